"""Google Cloud Storage: gcsfs against an emulator on loopback, behind a relay that can fail."""

import gzip
import http.client
import json
import os
from urllib.parse import quote

import pytest

from batchloom import InputError, check, prepare
from batchloom.core.errors import AccessError, DownloadError, InputMissingError
from batchloom.remote import (
    RemoteFolder,
    block_file as blocks,
    client as reach,
    upload_retry as far_asking,
)
from batchloom.sources import list_sources
from preparation.s3_relay import Fault, relaying
from preparation.stores import make, tree
from sources.source_reading import Read
from sources.web_server import Handler, serving

# Read when gcsfs is imported: otherwise it looks for the kind of a bucket by gRPC, which no emulator speaks.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
pytest.importorskip("gcsfs", reason="gs:// is tested where gcsfs is installed")
emulator = pytest.importorskip("gcp_storage_emulator.server", reason="no emulator of gs://")

LINES = b"".join(b'{"text": "document %d"}\n' % number for number in range(20_000))


class Relay(Handler):
    """Hands requests on to ``web.behind``, and fails as the web server does."""

    def answer(self, *, body):
        web = self.web
        web.asked.append((self.command, self.path, self.headers.get("Range")))
        status = (
            503 if web.failures else next((status for name, status in web.answers.items() if name in self.path), None)
        )
        web.failures = max(0, web.failures - 1)
        if status:
            self.empty(status)
            return
        connection = http.client.HTTPConnection(*web.behind, timeout=10)
        connection.request(self.command, self.path, headers=dict(self.headers))
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        self.send_response(answer.status)
        for name in ("Content-Type", "Content-Range"):
            if name in answer.headers:
                self.send_header(name, answer.headers[name])
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


@pytest.fixture
def gs(storage, monkeypatch):
    import gcsfs

    with serving(Relay) as relay:
        relay.behind = storage
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", relay.url)
        monkeypatch.setenv("NO_GCE_CHECK", "true")
        monkeypatch.setattr(blocks, "compute_backoff", lambda tries: 0)
        monkeypatch.setattr(reach, "compute_backoff", lambda tries: 0)
        gcsfs.GCSFileSystem.clear_instance_cache()
        yield relay
        gcsfs.GCSFileSystem.clear_instance_cache()


def put(storage, **files):
    for name, data in files.items():
        connection = http.client.HTTPConnection(*storage, timeout=10)
        place = f"/upload/storage/v1/b/bucket/o?uploadType=media&name={quote(name, safe='')}"
        connection.request("POST", place, data, {"Content-Type": "text/plain"})
        assert connection.getresponse().status == 200
        connection.close()


FILES = {
    "d/a.jsonl": LINES,
    "d/b.jsonl.gz": gzip.compress(LINES, mtime=0),
    "d/c/d.csv": b"n,text\n1,one\n",
    "d/.hidden.jsonl": b"{",
}


def test_a_folder_of_gs_gives_the_store_of_its_copy(gs, storage, tmp_path):
    put(storage, **FILES)
    for name, data in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    options = {"unit_bytes": 200_000}
    make("gs://bucket/d", tmp_path / "far", **options)
    make(tmp_path / "d", tmp_path / "near", **options)
    far, near = tree(tmp_path / "far"), tree(tmp_path / "near")
    assert {name for name in far if far[name] != near[name]} <= {
        "dataset_metadata.json",
        "report.json",
    }
    assert make("gs://bucket/d", tmp_path / "far", **options).already_done
    assert check("gs://bucket/d/a.jsonl").facts["records"].startswith("20,000 ")
    assert [one.name for one in list_sources(["gs://bucket/d/**/*.csv"]).sources] == ["gs://bucket/d/c/d.csv"]


def test_what_is_not_there_in_gs(gs, storage):
    put(storage, **FILES)
    for place in ("gs://bucket/nowhere.jsonl", "gs://other/a.jsonl", "gs://other/*.jsonl"):
        with pytest.raises(InputMissingError, match="gs://"):
            list_sources([place])


def test_what_may_not_be_read_in_gs(gs, storage):
    put(storage, **FILES)
    gs.answers["a.jsonl"] = 403
    with pytest.raises(AccessError, match="Access to gs://bucket/d/a.jsonl is denied"):
        list_sources(["gs://bucket/d/a.jsonl"])
    gs.answers = {"/b/": 403}
    with pytest.raises(AccessError, match="Access to gs://bucket/d is denied"):
        list_sources(["gs://bucket/d"])


def test_connections_to_gs_that_break_are_taken_up_again(gs, storage):
    put(storage, **FILES)
    gs.cut = 100_000
    assert [row["text"] for row in Read("gs://bucket/d/a.jsonl").values] == [
        json.loads(line)["text"] for line in LINES.splitlines()
    ]
    gs.cut = None
    gs.failures = 2
    assert len(Read("gs://bucket/d/a.jsonl").values) == 20_000


def test_a_file_of_gs_that_is_written_anew_is_an_error(gs, storage):
    put(storage, **FILES)
    from batchloom.sources import PartStream

    (source,) = list_sources(["gs://bucket/d/a.jsonl"]).sources
    put(storage, **{"d/a.jsonl": LINES[::-1]})
    with (
        pytest.raises(InputError, match="a.jsonl was changed while it was being prepared"),
        PartStream(source) as stream,
    ):
        stream.finish()


def test_gs_that_is_down_is_told(gs):
    gs.answers["/"] = 503
    with pytest.raises(DownloadError, match="Failed to download gs://bucket/d/a.jsonl"):
        list_sources(["gs://bucket/d/a.jsonl"])


def test_an_answer_that_gcsfs_has_only_words_for_is_told(gs, storage, monkeypatch):
    def refused(self, status, headers=()):
        data = b'{"error": {"message": "Invalid bucket name: SECRET", "code": 400}}'
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    monkeypatch.setattr(Handler, "empty", refused)
    gs.answers["/"] = 400
    with pytest.raises(DownloadError, match="the server answered 400") as caught:
        list_sources(["gs://bucket/d/a.jsonl"])
    assert "SECRET" not in str(caught.value)


# Of aiohttp, about how gcsfs sends.
@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
def test_a_store_is_prepared_into_gs(storage, monkeypatch, tmp_path):
    import gcsfs

    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://{}:{}".format(*storage))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    gcsfs.GCSFileSystem.clear_instance_cache()
    (tmp_path / "a.jsonl").write_bytes(LINES)
    options = {"tokenizer": "bytes", "tokens_per_shard": 100_000}
    prepare(tmp_path / "a.jsonl", out=tmp_path / "near", **options)
    url = "gs://bucket/made/store"
    prepare(tmp_path / "a.jsonl", out=url, work=tmp_path / "work", **options)
    assert prepare(tmp_path / "a.jsonl", out=url, work=tmp_path / "work", **options).already_done
    (tmp_path / "big").write_bytes(os.urandom(6 << 20))
    with RemoteFolder(url) as folder:
        files = folder.list_files()
        for name in sorted(files):
            if not name.startswith("report."):
                assert folder.read(name) == (tmp_path / "near" / name).read_bytes()
        assert len(files) == len([one for one in (tmp_path / "near").rglob("*") if one.is_file()])
        # Above 5 MiB its library sends in pieces.
        sent = folder.upload(tmp_path / "big", "big")
        assert folder.list_files()["big"] == sent
        assert folder.holds(tmp_path / "big", "big", sent)
        assert folder.create("owner", b"one") == folder.create("owner", b"other") == b"one"
    gcsfs.GCSFileSystem.clear_instance_cache()


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
@pytest.mark.parametrize(
    "fault", [Fault("answer", "POST", "upload_id"), Fault("cut body", "POST", "upload_id", times=2)]
)
def test_what_breaks_on_its_way_to_gs_is_sent_again(storage, monkeypatch, tmp_path, fault):
    import gcsfs

    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setattr(far_asking, "compute_jittered_backoff", lambda tries, name: 0)
    (tmp_path / "big").write_bytes(os.urandom(6 << 20))
    with relaying("http://{}:{}".format(*storage)) as relay:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", relay.url)
        gcsfs.GCSFileSystem.clear_instance_cache()
        # So it answers where an upload is ended that broke.
        relay.faults = [fault, Fault("answer", "DELETE", times=9, status=499, code="")]
        with RemoteFolder("gs://bucket/broken") as folder:
            folder.upload(tmp_path / "big", "big")
            assert folder.read("big") == (tmp_path / "big").read_bytes()
    assert fault.times == 0
    gcsfs.GCSFileSystem.clear_instance_cache()
