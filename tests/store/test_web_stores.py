"""Stores behind servers on the web that answer with something else than what was asked for."""

import pytest

from batchloom import check, open_store
from batchloom.core.errors import DownloadError
from batchloom.testing import write_store
from sources.web_server import Handler, Web, serving

DOCUMENTS = [[*f"Text number {n} of the store.".encode(), 256] for n in range(60)]
PAGE = b"<!DOCTYPE html><title>Please log in</title>"


class Login(Handler):
    """Answers everything with a page."""

    def answer(self, *, body):
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(PAGE)))
        self.end_headers()
        if body:
            self.wfile.write(PAGE)


@pytest.fixture
def web(tmp_path):
    near = write_store(tmp_path / "near", DOCUMENTS).path
    web = Web()
    web.files = {f"/near/{path.relative_to(near)}": path.read_bytes() for path in near.rglob("*") if path.is_file()}
    return web


def test_a_store_is_opened_and_checked(web, tmp_path):
    with serving(web=web):
        store = open_store(f"{web.url}/near", cache=tmp_path / "cache")
        assert [store[n].ids.tolist() for n in range(60)] == DOCUMENTS
        assert not check(f"{web.url}/near").faults


@pytest.mark.parametrize("look", [open_store, check])
def test_a_server_without_ranges_is_told(web, look):
    web.ranges = False
    # What its server shows of the folder is no data, however well it reads.
    web.files["/near"] = PAGE
    words = r"/near/dataset_metadata.json cannot be read in parts: .*range requests.*Use a server that"
    with serving(web=web), pytest.raises(DownloadError, match=words):
        look(f"{web.url}/near")


@pytest.mark.parametrize("name", ["dataset_metadata.json", "train/shard_00000.bin"])
def test_a_shard_that_comes_without_ranges_ends_the_check(web, monkeypatch, name):
    send = Handler.send

    def sometimes(handler, web, path, *, body):
        web.ranges = not path.endswith(name)
        send(handler, web, path, body=body)

    monkeypatch.setattr(Handler, "send", sometimes)
    with serving(web=web), pytest.raises(DownloadError, match=f"/near/{name} cannot be read in parts"):
        check(f"{web.url}/near")


@pytest.mark.parametrize("ranges", [True, False])
def test_a_page_instead_of_a_manifest_is_told(web, tmp_path, ranges):
    words = "/near/dataset_metadata.json is not a data file: its server answered with an HTML page"
    web.files = {"/near/dataset_metadata.json": PAGE, "/near": PAGE}
    with serving(Handler if ranges else Login, web):
        with pytest.raises(DownloadError, match=words):
            open_store(f"{web.url}/near", cache=tmp_path / "cache")
        # The page may be what is meant: it is checked as raw input, and why it is no store is told.
        assert "is not a data file" in check(f"{web.url}/near").facts["no store"]
