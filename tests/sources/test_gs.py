"""Google Cloud Storage: gcsfs against an emulator behind a relay with faults."""

import gzip
import http.client
import json
import os
from contextlib import contextmanager
from urllib.parse import quote

import pytest

from batchloom import InputError, check, prepare
from batchloom.core.errors import AccessError, DownloadError, InputMissingError
from batchloom.remote import RemoteFolder, upload
from batchloom.sources import list_sources
from preparation.s3_relay import Fault, run_relay
from preparation.stores import hash_store_files, prepare_store
from sources.source_reading import read_inputs
from sources.web_server import Handler, serve
from store.remote_stores import shorten_retry_delays

# gcsfs reads this at import. Otherwise it looks up the bucket type by gRPC, which the emulator lacks.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
pytest.importorskip("gcsfs", reason="gs:// is tested where gcsfs is installed")
emulator = pytest.importorskip("gcp_storage_emulator.server", reason="no emulator of gs://")

LINES = b"".join(b'{"text": "document %d"}\n' % number for number in range(4000))


class RelayHandler(Handler):
    """Forwards requests to ``web.behind``, with the faults of the web server."""

    def answer(self, *, body):
        web = self.web
        web.requests.append((self.command, self.path, self.headers.get("Range")))
        status = (
            503 if web.failures else next((status for name, status in web.answers.items() if name in self.path), None)
        )
        web.failures = max(0, web.failures - 1)
        if status:
            self.empty(status)
            return
        connection = http.client.HTTPConnection(*web.behind, timeout=10)
        connection.request(self.command, self.path, headers=dict(self.headers))
        response = connection.getresponse()
        data = response.read()
        connection.close()
        self.send_response(response.status)
        for name in ("Content-Type", "Content-Range"):
            if name in response.headers:
                self.send_header(name, response.headers[name])
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if web.cut is not None and len(data) > web.cut:
            data, self.close_connection = data[: web.cut], True
        try:
            self.wfile.write(data)
        except OSError:
            self.close_connection = True


@pytest.fixture(scope="module")
def storage():
    server = emulator.create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
    server.start()
    yield server._api._httpd.server_address
    server.stop()


@contextmanager
def new_clients():
    """Connect to the servers of the environment anew; close all connections at the end of the block."""
    from fsspec.asyn import sync
    from gcsfs import GCSFileSystem

    GCSFileSystem.clear_instance_cache()
    try:
        yield
    finally:
        for client in GCSFileSystem._cache.values():
            if client._session is not None:
                sync(client.loop, client._session.close)
        GCSFileSystem.clear_instance_cache()


@pytest.fixture
def gs(storage, monkeypatch):
    with serve(RelayHandler) as relay:
        relay.behind = storage
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", relay.url)
        monkeypatch.setenv("NO_GCE_CHECK", "true")
        shorten_retry_delays(monkeypatch)
        with new_clients():
            yield relay


def upload_files(storage, **files):
    for name, data in files.items():
        connection = http.client.HTTPConnection(*storage, timeout=10)
        path = f"/upload/storage/v1/b/bucket/o?uploadType=media&name={quote(name, safe='')}"
        connection.request("POST", path, data, {"Content-Type": "text/plain"})
        assert connection.getresponse().status == 200
        connection.close()


FILES = {
    "d/a.jsonl": LINES,
    "d/b.jsonl.gz": gzip.compress(LINES, mtime=0),
    "d/c/d.csv": b"n,text\n1,one\n",
    "d/.hidden.jsonl": b"{",
}


def test_a_gs_folder_gives_the_store_of_a_local_copy(gs, storage, tmp_path):
    upload_files(storage, **FILES)
    for name, data in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    options = {"unit_bytes": 40_000}
    prepare_store("gs://bucket/d", tmp_path / "far", **options)
    prepare_store(tmp_path / "d", tmp_path / "near", **options)
    remote, local = hash_store_files(tmp_path / "far"), hash_store_files(tmp_path / "near")
    assert {name for name in remote if remote[name] != local[name]} <= {
        "dataset_metadata.json",
        "report.json",
    }
    assert prepare_store("gs://bucket/d", tmp_path / "far", **options).already_done
    assert check("gs://bucket/d/a.jsonl").facts["records"].startswith("4,000 ")
    assert [source.name for source in list_sources(["gs://bucket/d/**/*.csv"]).sources] == ["gs://bucket/d/c/d.csv"]


def test_missing_gs_inputs(gs, storage):
    upload_files(storage, **FILES)
    for url in ("gs://bucket/nowhere.jsonl", "gs://other/a.jsonl", "gs://other/*.jsonl"):
        with pytest.raises(InputMissingError, match="gs://"):
            list_sources([url])


def test_denied_gs_inputs(gs, storage):
    upload_files(storage, **FILES)
    gs.answers["a.jsonl"] = 403
    with pytest.raises(AccessError, match="Access to gs://bucket/d/a.jsonl is denied"):
        list_sources(["gs://bucket/d/a.jsonl"])
    gs.answers = {"/b/": 403}
    with pytest.raises(AccessError, match="Access to gs://bucket/d is denied"):
        list_sources(["gs://bucket/d"])


def test_broken_connections_to_gs_are_resumed(gs, storage):
    upload_files(storage, **FILES)
    gs.cut = 70_000
    assert [row["text"] for row in read_inputs("gs://bucket/d/a.jsonl").values] == [
        json.loads(line)["text"] for line in LINES.splitlines()
    ]
    gs.cut = None
    gs.failures = 2
    assert len(read_inputs("gs://bucket/d/a.jsonl").values) == 4000


def test_a_rewritten_gs_file_is_an_error(gs, storage):
    upload_files(storage, **FILES)
    from batchloom.sources import PartStream

    (source,) = list_sources(["gs://bucket/d/a.jsonl"]).sources
    upload_files(storage, **{"d/a.jsonl": LINES[::-1]})
    with (
        pytest.raises(InputError, match="a.jsonl was changed while it was being prepared"),
        PartStream(source) as stream,
    ):
        stream.finish()


def test_unavailable_gs_is_reported(gs):
    gs.answers["/"] = 503
    with pytest.raises(DownloadError, match="Failed to download gs://bucket/d/a.jsonl"):
        list_sources(["gs://bucket/d/a.jsonl"])


def test_an_error_that_gcsfs_reports_as_text_is_reported(gs, storage, monkeypatch):
    def send_json_error(self, status, headers=()):
        data = b'{"error": {"message": "Invalid bucket name: SECRET", "code": 400}}'
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    monkeypatch.setattr(Handler, "empty", send_json_error)
    gs.answers["/"] = 400
    with pytest.raises(DownloadError, match="the server answered 400") as caught:
        list_sources(["gs://bucket/d/a.jsonl"])
    assert "SECRET" not in str(caught.value)


# aiohttp warns about the large request bodies of gcsfs.
@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
def test_a_store_is_prepared_into_gs(storage, monkeypatch, tmp_path):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://{}:{}".format(*storage))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    (tmp_path / "a.jsonl").write_bytes(LINES)
    options = {"tokenizer": "bytes", "tokens_per_shard": 30_000}
    prepare(tmp_path / "a.jsonl", out=tmp_path / "near", **options)
    url = "gs://bucket/made/store"
    with new_clients():
        prepare(tmp_path / "a.jsonl", out=url, work=tmp_path / "work", **options)
        assert prepare(tmp_path / "a.jsonl", out=url, work=tmp_path / "work", **options).already_done
        (tmp_path / "big").write_bytes(os.urandom(6 << 20))
        with RemoteFolder(url) as folder:
            files = folder.list_files()
            for name in sorted(files):
                if not name.startswith("report."):
                    assert folder.read(name) == (tmp_path / "near" / name).read_bytes()
            assert len(files) == len([path for path in (tmp_path / "near").rglob("*") if path.is_file()])
            # gcsfs uploads files above 5 MiB in chunks.
            folder.upload(tmp_path / "big", "big")
            remote_file = folder.list_files()["big"]
            assert remote_file.checksum
            assert folder.holds(tmp_path / "big", "big", remote_file)
            (tmp_path / "big").write_bytes(os.urandom(6 << 20))
            assert not folder.holds(tmp_path / "big", "big", remote_file)


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
@pytest.mark.parametrize(
    "fault", [Fault("answer", "POST", "upload_id"), Fault("cut body", "POST", "upload_id", times=2)]
)
def test_broken_uploads_to_gs_are_retried(storage, monkeypatch, tmp_path, fault):
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setattr(upload, "compute_jittered_backoff", lambda tries, name: 0)
    (tmp_path / "big").write_bytes(os.urandom(6 << 20))
    with run_relay("http://{}:{}".format(*storage)) as relay:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", relay.url)
        # The server answers 499 when a broken upload is cancelled.
        relay.faults = [fault, Fault("answer", "DELETE", times=9, status=499, code="")]
        with new_clients(), RemoteFolder("gs://bucket/broken") as folder:
            folder.upload(tmp_path / "big", "big")
            assert folder.read("big") == (tmp_path / "big").read_bytes()
    assert fault.times == 0
