"""Remote inputs: a web server and an S3 server with faults, and memory."""

import bz2
import gzip
import io
import json
import lzma
import os
import shlex
import subprocess
import sys
from pathlib import Path

import lz4.frame
import pyarrow as pa
import pytest

from batchloom import BatchloomError, InputError, check, doctor
from batchloom.cli import run_command_line
from batchloom.core.addresses import has_wildcard, is_url, make_input_labels, redact_url
from batchloom.core.errors import (
    AccessError,
    DownloadError,
    InputMissingError,
    MissingDependencyError,
)
from batchloom.remote import client, open_remote_file
from batchloom.sources import ReadLimits, list_sources
from preparation.stores import hash_store_files, prepare_store, read_texts
from processes import run_python
from sources.source_reading import read_inputs
from sources.test_archives import NAMES, make_archive
from sources.test_tables import FORMS, write_table

SECRET = "SECRET"
LINES = b"".join(
    json.dumps({"text": f"document {number} " + "x" * (number % 900)}).encode() + b"\n" for number in range(900)
)
COMPRESSED = gzip.compress(LINES, mtime=0)


def put_objects(s3, **files):
    for key, data in files.items():
        s3.put_object(Bucket="bucket", Key=key, Body=data)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        (
            "https://me:SECRET@host:8080/a/b.jsonl?X-Amz-Signature=SECRET#SECRET",
            "https://host:8080/a/b.jsonl",
        ),
        ("HTTPS://SECRET@host/a.txt", "https://host/a.txt"),
        ("s3://bucket/what?.txt", "s3://bucket/what?.txt"),
        ("hf://datasets/org/name@refs/pr/1/a.jsonl", "hf://datasets/org/name@refs/pr/1/a.jsonl"),
        ("abfs://box@account/a.txt?sig=SECRET", "abfs://account/a.txt"),
        ("/plain/path?x#y", "/plain/path?x#y"),
        ("file:///plain/path?x#y", "file:///plain/path?x#y"),
    ],
)
def test_no_secret_of_a_url_is_shown(url, name):
    assert redact_url(url) == name
    assert make_input_labels([url])[0] == name or not is_url(url)


def test_urls_that_differ_in_hidden_parts_have_distinct_labels():
    urls = ["https://h/a.txt?id=1", "x.txt", "https://h/a.txt?id=2", "-"]
    assert make_input_labels(urls) == ["https://h/a.txt", "x.txt", "https://h/a.txt (2)", "stdin"]


def test_a_question_mark_of_a_web_address_is_not_a_wildcard():
    assert not has_wildcard("https://h/a.txt?sig=*")
    assert has_wildcard("https://h/*.txt?sig=1")
    assert has_wildcard("s3://bucket/a?.txt")


def test_a_web_file_gives_the_store_of_a_local_copy(web, tmp_path):
    web.files = {"/d/a.jsonl": LINES, "/d/b.jsonl.gz": COMPRESSED}
    for name, data in web.files.items():
        (tmp_path / Path(name).name).write_bytes(data)
    options = {"unit_bytes": 80_000, "tokens_per_shard": 200_000}
    prepare_store([f"{web.url}{name}?sig={SECRET}" for name in web.files], tmp_path / "far", **options)
    prepare_store([tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"], tmp_path / "near", **options)
    remote, local = hash_store_files(tmp_path / "far"), hash_store_files(tmp_path / "near")
    assert {name for name in remote if remote[name] != local[name]} <= {
        "dataset_metadata.json",
        "report.json",
    }
    assert not any(SECRET in path.read_text("latin1") for path in tmp_path.rglob("*") if path.is_file())
    # The large file is read in byte ranges, at least one per part.
    ranges = [byte_range for _, path, byte_range in web.requests if path.startswith("/d/a") and byte_range]
    assert len(ranges) > 5


# One of each reader: a table, a stream of tables, archives with and without an index, and a compressed file.
PREPARED = ("a.parquet", "a.stream.arrow", "a.zip", "a.tar.gz", "a.json.xz")


@pytest.mark.parametrize("name", [*FORMS, *NAMES, "a.csv.bz2", "a.json.xz", "a.jsonl.lz4", "a"])
def test_every_kind_is_read_remotely(web, no_retry_delay, tmp_path, name):
    rows = [{"text": f"row {i} " + "x" * (i % 700)} for i in range(900)]
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    if name in FORMS:
        path = write_table(tmp_path / name, pa.Table.from_pylist(rows))
    elif name in NAMES:
        members = [("a.jsonl", lines), ("b.csv", b"n,text\n1,one\n"), ("c.txt", b"text" * 100)]
        path = make_archive(tmp_path / name, members)
    else:
        table = "n,text\n" + "".join(f"1,{row['text']}\n" for row in rows)
        forms = {
            "a.csv.bz2": lambda: bz2.compress(table.encode()),
            "a.json.xz": lambda: lzma.compress(json.dumps(rows).encode()),
            "a.jsonl.lz4": lambda: lz4.frame.compress(lines),
            "a": lambda: gzip.compress(lines),
        }
        path = tmp_path / name
        path.write_bytes(forms[name]())
    web.files[f"/{name}"] = path.read_bytes()
    url = f"{web.url}/{name}?sig={SECRET}"
    web.cut = 80_000
    remote, local = (
        read_inputs(location, field="text", unit=70_000, limits=ReadLimits(chunk_bytes=64 << 10))
        for location in (url, path)
    )
    assert len(local.values) >= 900
    for attribute in ("values", "records", "offsets", "hashes", "bad"):
        assert getattr(remote, attribute) == getattr(local, attribute)
    if name not in PREPARED:
        return
    prepare_store(url, tmp_path / "o", unit_bytes=70_000)
    assert prepare_store(url, tmp_path / "o", unit_bytes=70_000).already_done
    files = [file for file in (tmp_path / "o").rglob("*") if file.is_file()]
    assert not any(SECRET in file.read_text("latin1") for file in files)


@pytest.mark.parametrize(
    "name",
    ["a.parquet", "a.zip", *(pytest.param(name, marks=pytest.mark.slow) for name in ("a.arrow", "a.tar", "a.tar.gz"))],
)
def test_download_errors_do_not_blame_the_file(web, no_retry_delay, tmp_path, name):
    """Network errors never mark a table or archive as broken, or skip a member."""
    rows = [{"text": f"row {i} " + "x" * 500} for i in range(1000)]
    if name in FORMS:
        write_table(tmp_path / name, pa.Table.from_pylist(rows))
    else:
        members = [(f"{i}.txt", os.urandom(100_000)) for i in range(3)]
        make_archive(tmp_path / name, [*members, ("json", b"{")])
    web.files[f"/{name}"] = (tmp_path / name).read_bytes()
    request_count = 0
    while True:
        # The server fails for good after the first request, the second, ...
        web.fails_after = request_count
        try:
            read_inputs(f"{web.url}/{name}", field="text")
        except DownloadError:
            request_count += 1
        else:
            break
    assert request_count > 2


def test_saved_datasets_behind_urls_are_refused():
    import fsspec

    memory = fsspec.filesystem("memory")
    for name in ("state.json", "dataset_info.json", "data-00000-of-00001.arrow"):
        memory.pipe(f"/saved/train/{name}", b"{}")
    with pytest.raises(InputError, match=r"memory://saved holds a dataset of save_to_disk, .*copy"):
        list_sources(["memory://saved"])
    memory.rm("/saved", recursive=True)


def test_a_web_file_given_again_is_the_same_input(web, tmp_path):
    web.files["/a.jsonl"] = LINES
    # A signed address differs each time.
    prepare_store(f"{web.url}/a.jsonl?sig=1", tmp_path / "o")
    assert prepare_store(f"{web.url}/a.jsonl?sig=2", tmp_path / "o").already_done
    web.files["/a.jsonl"] = LINES[:-2] + b"\n\n"
    with pytest.raises(BatchloomError, match="has other content"):
        prepare_store(f"{web.url}/a.jsonl", tmp_path / "o")


def test_a_file_that_changes_while_it_is_read_is_an_error(web, tmp_path):
    web.files["/a.jsonl"] = LINES

    def change(event):
        web.files["/a.jsonl"] = LINES[:-10] + b"x" * 10

    with pytest.raises(InputError, match=r"/a.jsonl was changed while it was being prepared"):
        prepare_store(f"{web.url}/a.jsonl", tmp_path / "o", listener=change, unit_bytes=80_000)


@pytest.mark.parametrize("cut", [70_000, pytest.param(200_001, marks=pytest.mark.slow)])
def test_a_broken_connection_is_resumed(web, no_retry_delay, tmp_path, cut):
    web.files["/a.jsonl"] = LINES
    prepare_store(f"{web.url}/a.jsonl", tmp_path / "whole")
    web.cut = cut
    prepare_store(f"{web.url}/a.jsonl", tmp_path / "cut")
    assert read_texts(tmp_path / "cut") == read_texts(tmp_path / "whole")


def test_a_connection_that_always_breaks_is_an_error(web, no_retry_delay):
    web.files["/a.txt"], web.cut = LINES, 10
    with pytest.raises(DownloadError, match=r"no data from byte 0 of \d.* in 6 tries .*the connection broke"):
        open_remote_file(f"{web.url}/a.txt?sig={SECRET}", len(LINES), 1).read()


def test_requests_to_a_failing_server_are_retried(web, no_retry_delay):
    web.files["/a.txt"], web.failures = LINES, 5
    assert open_remote_file(f"{web.url}/a.txt", len(LINES), 2).read() == LINES
    web.failures = 6
    with pytest.raises(DownloadError, match="in 6 tries .the server answered 503"):
        open_remote_file(f"{web.url}/a.txt", len(LINES), 3).read()


def test_retry_delays_grow_to_half_a_minute_in_total():
    delays = [client.compute_backoff(tries) for tries in range(1, 6)]
    assert delays == sorted(delays)
    assert 20 < sum(delays) < 40


def test_random_access_equals_the_local_file(web):
    web.files["/a.txt"] = LINES
    local, remote = io.BytesIO(LINES), open_remote_file(f"{web.url}/a.txt", len(LINES), 4)
    for offset, count in [
        (0, 5),
        (len(LINES) - 3, 10),
        (200_000, 120_000),
        (100, 1),
        (101, 300_000),
        (0, -1),
    ]:
        assert (local.seek(offset), local.read(count)) == (remote.seek(offset), remote.read(count))
        assert local.tell() == remote.tell()
    remote.close()


@pytest.mark.parametrize(
    ("status", "kind", "sentence"),
    [
        (404, InputMissingError, "There is no file or folder http://127.0.0.1:[0-9]+/a.txt."),
        (
            403,
            AccessError,
            "Access to http://.*/a.txt is denied: the server answered 403; check who may read it.",
        ),
        (400, DownloadError, "/a.txt cannot be read: the server answered 400; check its address"),
        (
            503,
            DownloadError,
            "Failed to download http://.*/a.txt: the server answered 503; check the network",
        ),
    ],
)
def test_http_errors_are_one_sentence_without_secrets(web, no_retry_delay, status, kind, sentence):
    web.answers["/a.txt"] = status
    url = f"{web.url}/a.txt?sig={SECRET}".replace("//", f"//me:{SECRET}@")
    with pytest.raises(kind, match=sentence) as caught:
        list_sources([url])
    assert SECRET not in str(caught.value)
    # The traceback must not repeat the library's error either: it has the full address.
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize(
    ("url", "kind", "message"),
    [
        (
            "http://127.0.0.1:9/a.txt",
            ConnectionError,
            "Failed to download .*the connection was refused",
        ),
        (
            "http://no-such-host.invalid/a.txt",
            ConnectionError,
            "the host name of its server cannot be resolved",
        ),
        (
            "s3a://bucket",
            ConnectionError,
            "Failed to download s3a://bucket: the connection was refused",
        ),
        ("nothing://host/a.txt", ValueError, "nothing:// is not known to fsspec"),
    ],
)
def test_unreachable_servers_are_reported_at_once(url, kind, message, monkeypatch):
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(client, "_make_storage_options", client._make_storage_options.__wrapped__)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "other")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with pytest.raises(kind, match=message):
        list_sources([url])
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_missing_library_is_named():
    libraries = {"https://h/a": "aiohttp", "s3://b/a": "s3fs", "gs://b/a": "gcsfs"}
    code = """
import sys
from batchloom.sources import list_sources
for url in sys.argv[1:]:
    try:
        list_sources([url])
    except ImportError as error:
        print(type(error).__name__, error)
"""
    process = run_python(code, *libraries, missing=[*libraries.values()])
    assert process.stdout.splitlines() == [
        f"{MissingDependencyError.__name__} {url} needs a library that is not installed: "
        f"pip install 'batchloom[remote]', or name local files."
        for url in libraries
    ], process.stderr


def test_a_server_without_ranges_is_read_by_a_temporary_copy(web, no_retry_delay, tmp_path):
    web.files["/a.jsonl"], web.ranges = LINES, False
    prepare_store(f"{web.url}/a.jsonl", tmp_path / "o", unit_bytes=80_000)
    assert len(read_texts(tmp_path / "o")) == 900
    assert not (tmp_path / "o" / ".work").exists()
    assert prepare_store(f"{web.url}/a.jsonl", tmp_path / "o", unit_bytes=80_000).already_done
    assert check(f"{web.url}/a.jsonl").sound
    web.cut = 1000
    with pytest.raises(DownloadError, match="the connection broke"):
        prepare_store(f"{web.url}/a.jsonl", tmp_path / "p")
    assert not (tmp_path / "p").exists()


def test_folders_and_globs_of_s3(s3, tmp_path):
    put_objects(
        s3,
        **{"x/b.jsonl": LINES, "x/a/c.jsonl.gz": COMPRESSED, "x/a/what?.txt": b"a text"},
    )
    put_objects(
        s3,
        **{"x/.hidden.txt": b"h", "x/store/dataset_metadata.json": b"{}", "x/store/t.json": b"{}"},
    )
    listing = list_sources(["s3://bucket/x"])
    assert [source.name for source in listing.sources] == [
        "s3://bucket/x/a/c.jsonl.gz",
        "s3://bucket/x/a/what?.txt",
        "s3://bucket/x/b.jsonl",
    ]
    assert listing.notes == ("Left out of s3://bucket/x: 2 files of stores, 1 hidden.",)
    assert [source.name for source in list_sources(["s3://bucket/x/*.jsonl"]).sources] == ["s3://bucket/x/b.jsonl"]
    assert len(list_sources(["s3://bucket/x/**/*.jsonl*"]).sources) == 2
    prepare_store("s3://bucket/x", tmp_path / "o", unit_bytes=80_000)
    assert len(read_texts(tmp_path / "o")) == 901
    assert prepare_store("s3://bucket/x", tmp_path / "o", unit_bytes=80_000).already_done
    assert not any(SECRET in path.read_text("latin1") for path in tmp_path.rglob("*") if path.is_file())


def test_missing_s3_inputs(s3):
    for url in ("s3://bucket/nothing.txt", "s3://no-such-bucket/a.txt"):
        with pytest.raises(FileNotFoundError, match=f"There is no file or folder {url}"):
            list_sources([url])
    with pytest.raises(InputMissingError, match=r"Nothing matches s3://bucket/nothing\*"):
        list_sources(["s3://bucket/nothing*"])


def test_other_file_systems_of_fsspec(tmp_path):
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe("/bucket/a.jsonl", LINES)
    prepare_store("memory://bucket/*.jsonl", tmp_path / "o", unit_bytes=80_000)
    assert len(read_texts(tmp_path / "o")) == 900
    memory.rm("/bucket", recursive=True)
    (tmp_path / "a.txt").write_text("local")
    assert [source.path for source in list_sources([f"file://{tmp_path}/a.txt"]).sources] == [f"{tmp_path}/a.txt"]
    [command] = doctor(f"file://{tmp_path}/a.txt", tokenizer="bytes").commands
    assert shlex.split(command)[2] == f"file://{tmp_path}/a.txt"


@pytest.fixture
def run_with_stdin(monkeypatch, capsys, tmp_path):
    """Run a command with bytes on stdin; return exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def run_command(arguments, data):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        return run_command_line(arguments), *capsys.readouterr()

    return run_command


def test_standard_input(run_with_stdin, tmp_path):
    prepare = ["prepare", "-", "--out", "o", "--tokenizer", "bytes", "--json"]
    process = subprocess.run(
        [sys.executable, "-m", "batchloom", *prepare],
        input=COMPRESSED,
        capture_output=True,
        cwd=tmp_path,
    )
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout)["counts"]["documents"] == 900
    assert b"to resume a stopped job, pipe the same bytes again" in process.stderr
    assert not (tmp_path / "o" / ".work").exists()
    assert json.loads(run_with_stdin(prepare, COMPRESSED)[1])["already_done"]
    assert f"another job (inputs: stdin has {len(LINES):,} bytes, had " in run_with_stdin(prepare, LINES)[2]
    assert run_with_stdin(["check", "-"], LINES)[0] == 0
    assert run_with_stdin(["prepare", "-", "--out", "p"], b"") == (
        1,
        "",
        "batchloom: stdin is empty: it has 0 bytes; name a file with content, or leave it out.\n",
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["o"]


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.parquet", "a.stream.arrow"])
def test_the_format_of_standard_input_is_detected(run_with_stdin, tmp_path, name):
    if name in FORMS:
        path = write_table(tmp_path / name, pa.table({"text": ["one", "two"]}))
    else:
        path = make_archive(tmp_path / name, [("a.jsonl", b'{"text": "one"}\n'), ("b.txt", b"two")])
    _, out, errors = run_with_stdin(["check", "-", "--json"], path.read_bytes())
    assert json.loads(out)["facts"]["records"].startswith("2 (2 documents"), errors


def test_local_data_opens_no_connection_and_loads_no_library_of_tables(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"".join(LINES.splitlines(keepends=True)[:150]))
    code = """
import sys
def hook(name, _):
    if name in ("socket.connect", "socket.getaddrinfo"):
        raise SystemExit(f"{name} was called")
sys.addaudithook(hook)
import batchloom
batchloom.prepare("a.jsonl", out="o", tokenizer="train:300", dedup="exact")
assert batchloom.check("o").sound and batchloom.check("a.jsonl").sound
loader = batchloom.Loader(batchloom.open_store("o"), seq_len=64, global_batch_size=4, output="numpy")
next(iter(loader))
assert not {"pyarrow", "lz4", "fsspec"} & set(sys.modules)
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=tmp_path)
    assert (process.returncode, process.stderr) == (0, b"")


def test_a_stopped_job_over_standard_input_is_resumed(tmp_path, monkeypatch):
    def set_stdin(data):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    class Stop(Exception):
        pass

    def stop(event):
        if getattr(event, "bytes_done", 0) > 200_000:
            raise Stop

    set_stdin(LINES)
    with pytest.raises(Stop):
        prepare_store("-", tmp_path / "o", unit_bytes=80_000, listener=stop)
    spool_folder = tmp_path / "o" / ".work" / "spool" / "of-a-killed-run"
    spool_folder.mkdir(parents=True)
    set_stdin(LINES[:-3] + b"yy\n")
    with pytest.raises(BatchloomError, match=r"unfinished work of another job .inputs: stdin was rewritten"):
        prepare_store("-", tmp_path / "o", unit_bytes=80_000)
    set_stdin(LINES)
    assert prepare_store("-", tmp_path / "o", unit_bytes=80_000).resumed_units > 1
    assert len(read_texts(tmp_path / "o")) == 900
    assert not (tmp_path / "o" / ".work").exists()


@pytest.mark.parametrize(
    "url",
    [
        *(
            "hf://",
            "hf://x",
            "hf://datasets/a",
            "hf://datasets/a/b@",
            "hf://datasets/a b/c/d.jsonl",
        ),
        *("s3://", "s3://B_AD bucket/x.jsonl", "http://", "data://x", "reference://", "dir://x"),
    ],
)
def test_an_address_refused_by_its_library_is_named(url):
    with pytest.raises(InputError) as caught:
        list_sources([url])
    assert url in str(caught.value)
    assert "address is in" in str(caught.value)


def test_a_slash_too_many_shows_no_password():
    with pytest.raises(InputError, match="http://host.invalid/x") as caught:
        list_sources(["http:///user:secret@host.invalid/x"])
    assert "secret" not in str(caught.value)


def test_a_scheme_may_be_written_in_capitals(web):
    web.files["/a.jsonl"] = LINES
    assert read_inputs(web.url.replace("http", "HTTP") + "/a.jsonl", field="text").seen == 900
