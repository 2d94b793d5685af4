"""Stores behind web servers that ignore ranges or answer with HTML pages."""

import pytest

from batchloom import check, open_store
from batchloom.core.errors import DownloadError
from batchloom.testing import write_store
from sources.web_server import Handler, Web, serve

DOCUMENTS = [[*f"Text number {n} of the store.".encode(), 256] for n in range(60)]
PAGE = b"<!DOCTYPE html><title>Please log in</title>"


class LoginHandler(Handler):
    """Answers every request with an HTML page."""

    def answer(self, *, body):
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(PAGE)))
        self.end_headers()
        if body:
            self.wfile.write(PAGE)


@pytest.fixture
def web(tmp_path):
    local = write_store(tmp_path / "near", DOCUMENTS).path
    web = Web()
    web.files = {f"/near/{path.relative_to(local)}": path.read_bytes() for path in local.rglob("*") if path.is_file()}
    return web


def test_a_store_is_opened_and_checked(web, tmp_path):
    with serve(web=web):
        store = open_store(f"{web.url}/near", cache=tmp_path / "cache")
        assert [store[n].ids.tolist() for n in range(60)] == DOCUMENTS
        assert not check(f"{web.url}/near").faults


@pytest.mark.parametrize("operation", [open_store, check])
def test_a_server_without_ranges_is_reported(web, operation):
    web.ranges = False
    # A folder page of the server is not data, even if it is readable.
    web.files["/near"] = PAGE
    message = r"/near/dataset_metadata.json cannot be read in parts: .*range requests.*Use a server that"
    with serve(web=web), pytest.raises(DownloadError, match=message):
        operation(f"{web.url}/near")


@pytest.mark.parametrize("name", ["dataset_metadata.json", "train/shard_00000.bin"])
def test_a_shard_served_without_ranges_ends_the_check(web, monkeypatch, name):
    send = Handler.send

    def send_without_ranges(handler, web, path, *, body):
        web.ranges = not path.endswith(name)
        send(handler, web, path, body=body)

    monkeypatch.setattr(Handler, "send", send_without_ranges)
    with serve(web=web), pytest.raises(DownloadError, match=f"/near/{name} cannot be read in parts"):
        check(f"{web.url}/near")


@pytest.mark.parametrize("ranges", [True, False])
def test_a_page_instead_of_a_manifest_is_reported(web, tmp_path, ranges):
    message = "/near/dataset_metadata.json is not a data file: its server answered with an HTML page"
    web.files = {"/near/dataset_metadata.json": PAGE, "/near": PAGE}
    with serve(Handler if ranges else LoginHandler, web):
        with pytest.raises(DownloadError, match=message):
            open_store(f"{web.url}/near", cache=tmp_path / "cache")
        # The page may be a raw input. Check reads it as one and reports why it is not a store.
        assert "is not a data file" in check(f"{web.url}/near").facts["no store"]
