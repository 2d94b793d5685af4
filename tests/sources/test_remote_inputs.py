"""Inputs behind URLs: a web server and an S3 server on loopback, with faults, and memory."""

import bz2
import gzip
import io
import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import lz4.frame
import pyarrow as pa
import pytest

from batchloom import BatchloomError, InputError, check
from batchloom.cli import run_command_line
from batchloom.core.addresses import has_wildcard, is_url, redact_url
from batchloom.core.errors import (
    AccessError,
    DownloadError,
    InputMissingError,
    MissingDependencyError,
)
from batchloom.remote import client as reach, open_remote_file
from batchloom.sources import ReadLimits, list_sources, make_input_labels
from preparation.stores import make, texts, tree
from sources.source_reading import Read
from sources.test_archives import NAMES, make as pack
from sources.test_tables import FORMS, write

SECRET = "SECRET"
LINES = b"".join(
    json.dumps({"text": f"document {number} " + "x" * (number % 900)}).encode() + b"\n" for number in range(3000)
)
PACKED = gzip.compress(LINES, mtime=0)


def put(client, **files):
    for key, data in files.items():
        client.put_object(Bucket="bucket", Key=key, Body=data)


@pytest.mark.parametrize(
    ("place", "name"),
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
    ],
)
def test_no_secret_of_a_url_is_shown(place, name):
    assert redact_url(place) == name
    assert make_input_labels([place])[0] == name or not is_url(place)


def test_urls_that_differ_in_what_is_not_shown_are_told_apart():
    urls = ["https://h/a.txt?id=1", "x.txt", "https://h/a.txt?id=2", "-"]
    assert make_input_labels(urls) == ["https://h/a.txt", "x.txt", "https://h/a.txt (2)", "stdin"]


def test_a_question_mark_of_a_web_address_is_no_wildcard():
    assert not has_wildcard("https://h/a.txt?sig=*")
    assert has_wildcard("https://h/*.txt?sig=1")
    assert has_wildcard("s3://bucket/a?.txt")


def test_a_file_of_the_web_gives_the_store_of_its_copy(web, tmp_path):
    web.files = {"/d/a.jsonl": LINES, "/d/b.jsonl.gz": PACKED}
    for name, data in web.files.items():
        (tmp_path / Path(name).name).write_bytes(data)
    options = {"unit_bytes": 300_000, "tokens_per_shard": 200_000}
    make([f"{web.url}{name}?sig={SECRET}" for name in web.files], tmp_path / "far", **options)
    make([tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"], tmp_path / "near", **options)
    far, near = tree(tmp_path / "far"), tree(tmp_path / "near")
    assert {name for name in far if far[name] != near[name]} <= {
        "dataset_metadata.json",
        "report.json",
    }
    assert not any(SECRET in path.read_text("latin1") for path in tmp_path.rglob("*") if path.is_file())
    # What was read of the large one was read in stretches: more than its parts, less than it twice.
    ranges = [asked for _, path, asked in web.asked if path.startswith("/d/a") and asked]
    assert len(ranges) > 10


@pytest.mark.parametrize("name", [*FORMS, *NAMES, "a.csv.bz2", "a.json.xz", "a.jsonl.lz4", "a"])
def test_every_kind_is_read_where_it_lies(web, impatient, tmp_path, name):
    rows = [{"text": f"row {i} " + "x" * (i % 700)} for i in range(3000)]
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    if name in FORMS:
        path = write(tmp_path / name, pa.Table.from_pylist(rows))
    elif name in NAMES:
        members = [("a.jsonl", lines), ("b.csv", b"n,text\n1,one\n"), ("c.txt", b"text" * 100)]
        path = pack(tmp_path / name, members)
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
    web.cut = 200_000
    far, near = (
        Read(place, field="text", unit=200_000, limits=ReadLimits(chunk_bytes=64 << 10)) for place in (url, path)
    )
    assert len(near.values) >= 3000
    for what in ("values", "records", "offsets", "hashes", "bad"):
        assert getattr(far, what) == getattr(near, what)
    make(url, tmp_path / "o", unit_bytes=200_000)
    assert make(url, tmp_path / "o", unit_bytes=200_000).already_done
    files = [one for one in (tmp_path / "o").rglob("*") if one.is_file()]
    assert not any(SECRET in one.read_text("latin1") for one in files)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.zip", "a.tar", "a.tar.gz"])
def test_what_does_not_come_is_no_fault_of_the_file(web, impatient, tmp_path, name):
    """No table or archive is called broken, and no member is left out, for want of a network."""
    rows = [{"text": f"row {i} " + "x" * 500} for i in range(3000)]
    if name in FORMS:
        write(tmp_path / name, pa.Table.from_pylist(rows))
    else:
        members = [(f"{i}.txt", os.urandom(200_000)) for i in range(3)]
        pack(tmp_path / name, [*members, ("json", b"{")])
    web.files[f"/{name}"] = (tmp_path / name).read_bytes()
    asked = 0
    while True:
        # The server fails for good after the first request, the second, ...
        web.fails_after = asked
        try:
            Read(f"{web.url}/{name}", field="text")
        except DownloadError:
            asked += 1
        else:
            break
    assert asked > 2


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
    # A signed address is another one each time.
    make(f"{web.url}/a.jsonl?sig=1", tmp_path / "o")
    assert make(f"{web.url}/a.jsonl?sig=2", tmp_path / "o").already_done
    web.files["/a.jsonl"] = LINES[:-2] + b"\n\n"
    with pytest.raises(BatchloomError, match="has other content"):
        make(f"{web.url}/a.jsonl", tmp_path / "o")


def test_a_file_that_changes_while_it_is_read_is_an_error(web, tmp_path):
    web.files["/a.jsonl"] = LINES

    def change(event):
        web.files["/a.jsonl"] = LINES[:-10] + b"x" * 10

    with pytest.raises(InputError, match=r"/a.jsonl was changed while it was being prepared"):
        make(f"{web.url}/a.jsonl", tmp_path / "o", listener=change, unit_bytes=300_000)


@pytest.mark.parametrize("cut", [70_000, 300_001])
def test_a_connection_that_breaks_is_taken_up_where_it_broke(web, impatient, tmp_path, cut):
    web.files["/a.jsonl"] = LINES
    make(f"{web.url}/a.jsonl", tmp_path / "whole")
    web.cut = cut
    make(f"{web.url}/a.jsonl", tmp_path / "cut")
    assert texts(tmp_path / "cut") == texts(tmp_path / "whole")


def test_a_connection_that_always_breaks_is_an_error_and_no_short_text(web, impatient):
    web.files["/a.txt"], web.cut = LINES, 10
    with pytest.raises(DownloadError, match=r"no data from byte 0 of \d.* in 6 tries .*the connection broke"):
        open_remote_file(f"{web.url}/a.txt?sig={SECRET}", len(LINES)).read()


def test_a_server_that_fails_for_a_while_is_asked_again(web, impatient):
    web.files["/a.txt"], web.failures = LINES, 5
    assert open_remote_file(f"{web.url}/a.txt", len(LINES)).read() == LINES
    web.failures = 6
    with pytest.raises(DownloadError, match="in 6 tries .the server answered 503"):
        open_remote_file(f"{web.url}/a.txt", len(LINES)).read()


def test_waits_grow_to_half_a_minute_together():
    waits = [reach.compute_backoff(tries) for tries in range(1, 6)]
    assert waits == sorted(waits)
    assert 20 < sum(waits) < 40


def test_reading_anywhere_is_reading_the_file(web):
    web.files["/a.txt"] = LINES
    near, far = io.BytesIO(LINES), open_remote_file(f"{web.url}/a.txt", len(LINES))
    for place, count in [
        (0, 5),
        (len(LINES) - 3, 10),
        (700_000, 400_000),
        (100, 1),
        (101, 900_000),
        (0, -1),
    ]:
        assert (near.seek(place), near.read(count)) == (far.seek(place), far.read(count))
        assert near.tell() == far.tell()
    far.close()


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
def test_what_cannot_be_had_is_one_sentence_without_secrets(web, impatient, status, kind, sentence):
    web.answers["/a.txt"] = status
    url = f"{web.url}/a.txt?sig={SECRET}".replace("//", f"//me:{SECRET}@")
    with pytest.raises(kind, match=sentence) as caught:
        list_sources([url])
    assert SECRET not in str(caught.value)
    # Nor does a traceback repeat the library's error, which has the whole address.
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize(
    ("url", "kind", "words"),
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
def test_what_cannot_be_reached_is_told_at_once(url, kind, words, monkeypatch):
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(reach, "_make_storage_options", reach._make_storage_options.__wrapped__)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "other")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with pytest.raises(kind, match=words):
        list_sources([url])
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_library_that_is_missing_is_named():
    missing = {"https://h/a": ("aiohttp", "http"), "s3://b/a": ("s3fs", "s3")}
    missing["gs://b/a"] = ("gcsfs", "gs")
    code = """
import sys
for module in sys.argv[1].split():
    sys.modules[module] = None
from batchloom.sources import list_sources
for url in sys.argv[2:]:
    try:
        list_sources([url])
    except ImportError as error:
        print(type(error).__name__, error)
"""
    modules = " ".join(module for module, _ in missing.values())
    words = [sys.executable, "-c", code, modules, *missing]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        f"{MissingDependencyError.__name__} {url} needs a library that is not installed: "
        f"pip install 'batchloom[{extra}]', or name local files."
        for url, (_, extra) in missing.items()
    ], done.stderr


def test_a_server_without_ranges_gives_a_copy_that_is_gone_afterwards(web, impatient, tmp_path):
    web.files["/a.jsonl"], web.ranges = LINES, False
    make(f"{web.url}/a.jsonl", tmp_path / "o", unit_bytes=300_000)
    assert len(texts(tmp_path / "o")) == 3000
    assert not (tmp_path / "o" / ".work").exists()
    assert make(f"{web.url}/a.jsonl", tmp_path / "o", unit_bytes=300_000).already_done
    assert check(f"{web.url}/a.jsonl").sound
    web.cut = 1000
    with pytest.raises(DownloadError, match="the connection broke"):
        make(f"{web.url}/a.jsonl", tmp_path / "p")
    assert not (tmp_path / "p").exists()


def test_folders_and_globs_of_s3(s3, tmp_path):
    put(
        s3,
        **{"x/b.jsonl": LINES, "x/a/c.jsonl.gz": PACKED, "x/a/what?.txt": b"a text"},
    )
    put(
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
    assert [one.name for one in list_sources(["s3://bucket/x/*.jsonl"]).sources] == ["s3://bucket/x/b.jsonl"]
    assert len(list_sources(["s3://bucket/x/**/*.jsonl*"]).sources) == 2
    make("s3://bucket/x", tmp_path / "o", unit_bytes=300_000)
    assert len(texts(tmp_path / "o")) == 3001
    assert make("s3://bucket/x", tmp_path / "o", unit_bytes=300_000).already_done
    assert not any(SECRET in path.read_text("latin1") for path in tmp_path.rglob("*") if path.is_file())


def test_what_is_not_there_in_s3(s3):
    for place in ("s3://bucket/nothing.txt", "s3://no-such-bucket/a.txt"):
        with pytest.raises(FileNotFoundError, match=f"There is no file or folder {place}"):
            list_sources([place])
    with pytest.raises(InputMissingError, match=r"Nothing matches s3://bucket/nothing\*"):
        list_sources(["s3://bucket/nothing*"])


def test_other_file_systems_of_fsspec(tmp_path):
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe("/bucket/a.jsonl", LINES)
    make("memory://bucket/*.jsonl", tmp_path / "o", unit_bytes=300_000)
    assert len(texts(tmp_path / "o")) == 3000
    memory.rm("/bucket", recursive=True)
    (tmp_path / "a.txt").write_text("local")
    assert [one.path for one in list_sources([f"file://{tmp_path}/a.txt"]).sources] == [f"{tmp_path}/a.txt"]


@pytest.fixture
def run_with(monkeypatch, capsys, tmp_path):
    """Runs a command in an empty folder with bytes on standard input: exit code, output, errors."""
    monkeypatch.chdir(tmp_path)

    def run_command(words, data):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        return run_command_line(words), *capsys.readouterr()

    return run_command


def test_standard_input(run_with, tmp_path):
    prepare = ["prepare", "-", "--out", "o", "--tokenizer", "bytes", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "batchloom", *prepare],
        input=PACKED,
        capture_output=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["counts"]["documents"] == 3000
    assert b"to resume a stopped job, pipe the same bytes again" in done.stderr
    assert not (tmp_path / "o" / ".work").exists()
    assert json.loads(run_with(prepare, PACKED)[1])["already_done"]
    assert "another job (inputs: stdin has 1," in run_with(prepare, LINES)[2]
    assert run_with(["check", "-"], LINES)[0] == 0
    assert run_with(["prepare", "-", "--out", "p"], b"") == (
        1,
        "",
        "batchloom: stdin is empty: it has 0 bytes; name a file with content, or leave it out.\n",
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["o"]


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.parquet", "a.stream.arrow"])
def test_standard_input_is_known_by_what_it_holds(run_with, tmp_path, name):
    if name in FORMS:
        path = write(tmp_path / name, pa.table({"text": ["one", "two"]}))
    else:
        path = pack(tmp_path / name, [("a.jsonl", b'{"text": "one"}\n'), ("b.txt", b"two")])
    _, out, complaints = run_with(["check", "-", "--json"], path.read_bytes())
    assert json.loads(out)["facts"]["records"].startswith("2 (2 documents"), complaints


def test_local_data_opens_no_connection(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES)
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
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_stopped_job_over_standard_input_goes_on_with_the_same_bytes(tmp_path, monkeypatch):
    def give(data):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    class Stop(Exception):
        pass

    def stop(event):
        if getattr(event, "bytes_done", 0) > 900_000:
            raise Stop

    give(LINES)
    with pytest.raises(Stop):
        make("-", tmp_path / "o", unit_bytes=300_000, listener=stop)
    left = tmp_path / "o" / ".work" / "spool" / "of-a-killed-run"
    left.mkdir(parents=True)
    give(LINES[:-3] + b"yy\n")
    with pytest.raises(BatchloomError, match=r"unfinished work of another job .inputs: stdin was rewritten"):
        make("-", tmp_path / "o", unit_bytes=300_000)
    give(LINES)
    assert make("-", tmp_path / "o", unit_bytes=300_000).resumed_units > 1
    assert len(texts(tmp_path / "o")) == 3000
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
def test_an_address_its_library_does_not_take_is_named(url):
    with pytest.raises(InputError) as told:
        list_sources([url])
    assert url in str(told.value)
    assert "address is in" in str(told.value)


def test_a_slash_too_many_shows_no_password():
    with pytest.raises(InputError, match="http://host.invalid/x") as told:
        list_sources(["http:///user:secret@host.invalid/x"])
    assert "secret" not in str(told.value)


def test_a_scheme_may_be_written_in_capitals(web):
    web.files["/a.jsonl"] = LINES
    assert Read(web.url.replace("http", "HTTP") + "/a.jsonl", field="text").seen == 3000
