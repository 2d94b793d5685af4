"""Stores that are prepared into an object store: moto's S3 behind a relay with faults, and memory."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from batchloom import InputError, OutputError, SettingsError, prepare
from batchloom.cli import run_command_line as cli_run
from batchloom.core.errors import StoreConflictError
from batchloom.preparation import prepare_run as run, remote_prepare as far_job, rerun
from batchloom.preparation.remote_output import OWNER_NAME, StoreUploader, sort_for_upload
from batchloom.preparation.remote_prepare import check_remote_separate, default_work_folder
from batchloom.remote import (
    RemoteFolder,
    client as reach,
    s3_upload as far_s3,
    upload_retry as far_asking,
)
from batchloom.remote.multipart import PART_BYTES, compute_object_checksums, plan_parts
from batchloom.remote.upload_retry import MAX_UPLOAD_ATTEMPTS, compute_jittered_backoff
from preparation.s3_relay import Fault, relaying
from preparation.stores import jsonl

BIG = b"".join(hashlib.sha256(b"%d" % number).digest() for number in range(1 << 14)) * 72
SECRET = "k3yphrase"
OPTIONS = {"tokenizer": "bytes", "tokens_per_shard": 100_000, "val_fraction": 0.1}


@pytest.fixture
def far(s3, monkeypatch):
    """An empty bucket behind a relay; the environment leads to it, and nobody waits between tries."""
    import s3fs

    for one in keys(s3):
        s3.delete_object(Bucket="bucket", Key=one)
    with relaying(s3.meta.endpoint_url) as relay:
        monkeypatch.setenv("AWS_ENDPOINT_URL", relay.url)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        monkeypatch.setattr(far_asking, "compute_jittered_backoff", lambda tries, name: 0)
        monkeypatch.setattr(far_s3, "compute_jittered_backoff", lambda tries, name: 0)
        s3fs.S3FileSystem.clear_instance_cache()
        yield relay
        s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = [{"text": f"document {number} " + "x" * (number % 900)} for number in range(600)]
    return jsonl(tmp_path / "in.jsonl", [*rows, {"no": "text"}])


@pytest.fixture
def big(tmp_path):
    path = tmp_path / "big.bin"
    path.write_bytes(BIG)
    assert len(plan_parts(len(BIG))) == 3
    return path


def keys(s3, prefix=""):
    listed = s3.list_objects_v2(Bucket="bucket", Prefix=prefix)
    return [one["Key"] for one in listed.get("Contents", [])]


def content(s3, key):
    return s3.get_object(Bucket="bucket", Key=key)["Body"].read()


def left_over(s3):
    return s3.list_multipart_uploads(Bucket="bucket").get("Uploads", [])


def assert_same(s3, prefix, local):
    """The objects are the files of a local store byte for byte; the report differs."""
    names = sorted(str(one.relative_to(local)) for one in local.rglob("*") if one.is_file())
    assert sorted(key[len(prefix) + 1 :] for key in keys(s3, prefix)) == names
    for name in names:
        if not name.startswith("report."):
            assert content(s3, f"{prefix}/{name}") == (local / name).read_bytes(), name


def test_a_store_elsewhere_is_the_store_here(far, s3, given, tmp_path):
    local = prepare(given, out=tmp_path / "local", **OPTIONS)
    notes = []
    done = prepare(given, out="s3://bucket/a/store/", progress=notes.append, **OPTIONS)
    assert (done.path, done.already_done) == ("s3://bucket/a/store", False)
    assert (done.counts, done.subsets) == (local.counts, local.subsets)
    assert_same(s3, "a/store", tmp_path / "local")
    assert far.puts()[-1] == "/bucket/a/store/dataset_metadata.json"
    report = json.loads(content(s3, "a/store/report.json"))
    assert report["out"] == "s3://bucket/a/store"
    assert b"s3://bucket/a/store" in content(s3, "a/store/report.html")
    assert not list((tmp_path / "cache").rglob("*.*"))
    progress = [event for event in notes if getattr(event, "phase", "") == "upload"]
    assert progress[-1].bytes_done == progress[-1].bytes_total > 0
    far.asked.clear()
    again = prepare(given, out="s3://bucket/a/store", **OPTIONS)
    assert (again.already_done, again.counts) == (True, done.counts)
    assert {method for method, _ in far.asked} <= {"GET", "HEAD"}
    everything = b"".join(content(s3, key) for key in keys(s3, "a/"))
    assert SECRET.encode() not in everything


def test_synthetic_data_too(far, s3, given, tmp_path):
    what = "dummy:documents=50,vocab=300"
    prepare(what, out=tmp_path / "local")
    prepare(what, out="s3://bucket/made", work=tmp_path / "work")
    assert_same(s3, "made", tmp_path / "local")
    assert prepare(what, out="s3://bucket/made").already_done
    with pytest.raises(StoreConflictError, match="s3://bucket/made holds a finished store of anot"):
        prepare("dummy:documents=51,vocab=300", out="s3://bucket/made")
    with pytest.raises(StoreConflictError, match="s3://bucket/made holds a finished store of anot"):
        prepare(given, out="s3://bucket/made", **OPTIONS)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("answer", times=3),
        Fault("answer", times=2, status=400, code="RequestTimeout"),
        Fault("half answer", method="GET", part="list-type", times=3),
        Fault("flip", part="shard_00001.bin", times=2),
        *(
            pytest.param(fault, marks=pytest.mark.slow)
            for fault in (
                Fault("cut answer", times=3),
                Fault("answer", times=2, status=500, code="InternalError"),
                Fault("answer", method="GET", times=2),
                Fault("cut body", times=3),
            )
        ),
    ],
    ids=lambda fault: f"{fault.does} {fault.method} {fault.code}",
)
def test_what_passes_is_tried_again(far, s3, given, tmp_path, fault):
    prepare(given, out=tmp_path / "local", **OPTIONS)
    far.faults = [fault]
    prepare(given, out="s3://bucket/store", **OPTIONS)
    assert fault.times == 0
    assert_same(s3, "store", tmp_path / "local")


@pytest.mark.parametrize(
    "faults",
    [
        [],
        [Fault("flip", part="partNumber=2")],
        [Fault("cut answer", method="POST", part="uploadId")],
        [Fault("answer", method="POST", part="uploadId", status=404, code="NoSuchUpload")],
        *(
            pytest.param([fault], marks=pytest.mark.slow)
            for fault in (
                Fault("answer", part="partNumber=2", times=3),
                Fault("cut body", part="partNumber=1", times=2),
                Fault("cut answer", part="partNumber=3", times=2),
                Fault("half answer", method="POST", part="uploadId"),
                Fault("cut answer", method="POST", part="?uploads"),
            )
        ),
    ],
    ids=lambda faults: " ".join(f"{one.does} {one.method} {one.part}" for one in faults),
)
def test_large_files_go_in_parts(far, s3, big, faults):
    far.faults = faults
    with RemoteFolder("s3://bucket/x") as folder:
        found = folder.upload(big, "big.bin")
        folder.end_uploads()
    assert not any(one.times for one in faults)
    assert content(s3, "x/big.bin") == BIG
    assert found.mark == f'"{compute_object_checksums(big, len(BIG)).etag}"'
    assert found.mark.endswith('-3"')
    assert left_over(s3) == []


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        pytest.param(
            Fault("answer", part="partNumber=2", times=99),
            r"the server answered 503 SlowDown \(8 ",
            marks=pytest.mark.slow,
        ),
        (Fault("cut body", part="partNumber", times=99), "connection .*tries"),
        pytest.param(
            Fault("answer", part="partNumber=2", times=99, status=403, code="AccessDenied"),
            "403 Ac",
            marks=pytest.mark.slow,
        ),
        (Fault("flip", part="partNumber=1", times=99), "differed from the sent file in all 3 uploads"),
    ],
)
def test_an_upload_that_fails_leaves_no_parts(far, s3, big, fault, words):
    far.faults = [fault]
    with (
        RemoteFolder("s3://bucket/x") as folder,
        pytest.raises(OutputError, match=f"s3://bucket/x/big.bin.*{words}.* again") as told,
    ):
        folder.upload(big, "big.bin")
    assert left_over(s3) == []
    assert SECRET not in str(told.value)
    assert told.value.__cause__ is None


def test_a_server_that_hangs_is_not_waited_for(far, s3, big, monkeypatch):
    monkeypatch.setattr(reach, "_READ_TIMEOUT", 1)
    monkeypatch.setattr(reach, "_make_storage_options", reach._make_storage_options.__wrapped__)
    far.faults = [Fault("hang", part="partNumber=2")]
    with RemoteFolder("s3://bucket/x") as folder:
        folder.upload(big, "big.bin")
    assert content(s3, "x/big.bin") == BIG
    assert left_over(s3) == []


def test_the_parts_that_a_killed_run_left_are_ended(far, s3, given):
    s3.create_multipart_upload(Bucket="bucket", Key="store/train/shard_00000.bin")
    other = s3.create_multipart_upload(Bucket="bucket", Key="store2/a")
    prepare(given, out="s3://bucket/store", **OPTIONS)
    assert [one["Key"] for one in left_over(s3)] == ["store2/a"]
    s3.abort_multipart_upload(Bucket="bucket", Key="store2/a", UploadId=other["UploadId"])


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            Fault("answer", times=99, status=403, code="AccessDenied"),
            "the server answered 403 AccessDenied; give credentials that may write it .AWS_PROFILE",
        ),
        (
            Fault("answer", method="GET", times=99, status=403, code="RequestTimeTooSkewed"),
            "403 RequestTimeTooSkewed; set the clock of this machine",
        ),
        (
            Fault("answer", times=99, status=400, code="ExpiredToken"),
            "400 ExpiredToken; give credentials",
        ),
        (
            Fault("answer", times=99, status=507, code="XMinioStorageFull"),
            "the server answered 507 XMinioStorageFull",
        ),
    ],
)
def test_a_bucket_that_refuses_is_told_at_once(far, s3, given, tmp_path, fault, words):
    far.faults = [fault]
    with pytest.raises(OutputError, match=f"Cannot write s3://bucket/store.*{words}"):
        prepare(given, out="s3://bucket/store", **OPTIONS)
    # Once by us, and once more at most by its library.
    assert 99 - fault.times <= 2
    assert not list((tmp_path / "cache").rglob("*.*"))


def test_a_dry_run_sends_nothing_and_the_run_goes_on_from_it(far, s3, given):
    dry = prepare(given, out="s3://bucket/dry", dry_run=True, **OPTIONS)
    assert not dry.subsets
    assert keys(s3, "dry/") == ["dry/.work/job.json"]
    real = prepare(given, out="s3://bucket/dry", **OPTIONS)
    assert real.resumed_units == 1
    assert real.counts == dry.counts


def test_a_bucket_that_is_not_there_is_told_at_once(far, given, tmp_path):
    with pytest.raises(OutputError, match="Cannot write s3://no-such/x: there is no such bucket"):
        prepare(given, out="s3://no-such/x", **OPTIONS)
    assert len(far.asked) <= 2


def test_a_server_that_is_not_there_is_told_at_once(given, tmp_path, monkeypatch):
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(OutputError, match="Cannot write s3://bucket/x: the connection was refused"):
        prepare(given, out="s3://bucket/x", **OPTIONS)
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_bucket_that_begins_to_refuse_in_the_middle_keeps_what_it_has(far, s3, given, tmp_path):
    prepare(given, out=tmp_path / "local", **OPTIONS)
    far.faults = [Fault("answer", spare=9, times=99, status=403, code="AccessDenied")]
    with pytest.raises(OutputError, match="403 AccessDenied"):
        prepare(given, out="s3://bucket/store", **OPTIONS)
    before = {key[len("store/") :] for key in keys(s3, "store")} - {OWNER_NAME}
    assert before
    assert "dataset_metadata.json" not in before
    far.faults, far.asked = [], []
    result = prepare(given, out="s3://bucket/store", **OPTIONS)
    assert not result.already_done
    assert_same(s3, "store", tmp_path / "local")
    assert not before.intersection(name[len("/bucket/store/") :] for name in far.puts())


def test_another_machine_goes_on_and_sends_nothing_twice(far, s3, given, tmp_path):
    far.faults = [Fault("answer", spare=9, times=99, status=403, code="AccessDenied")]
    with pytest.raises(OutputError, match="403 AccessDenied"):
        prepare(given, out="s3://bucket/store", **OPTIONS)
    before = {key[len("store/") :] for key in keys(s3, "store")} - {
        OWNER_NAME,
        "report.json",
        "report.html",
    }
    far.faults, far.asked = [], []
    prepare(given, out="s3://bucket/store", work=tmp_path / "another", **OPTIONS)
    assert before
    assert not before.intersection(name[len("/bucket/store/") :] for name in far.puts())
    assert not (tmp_path / "another").exists()


def test_what_was_changed_there_is_sent_again(far, s3, given, tmp_path):
    far.faults = [Fault("answer", part="dataset_metadata", times=99, status=403, code="Denied")]
    with pytest.raises(OutputError):
        prepare(given, out="s3://bucket/store", **OPTIONS)
    key = "store/train/shard_00001.bin"
    right = content(s3, key)
    s3.put_object(Bucket="bucket", Key=key, Body=bytes(len(right)))
    far.faults, far.asked = [], []
    prepare(given, out="s3://bucket/store", **OPTIONS)
    assert content(s3, key) == right
    assert len(far.puts()) == 2


def prepare_words(*more):
    options = ["--tokenizer", "bytes", "--tokens-per-shard", "100000", "--val-fraction", "0.1"]
    return ["prepare", "in.jsonl", *options, *more]


@pytest.mark.parametrize("after", [11, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_goes_on(far, s3, given, tmp_path, capsys, after):
    prepare(given, out=tmp_path / "local", **OPTIONS)
    far.delay = 0.02
    command = [sys.executable, "-m", "batchloom", *prepare_words("--out", "s3://bucket/store")]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while len(far.puts()) < after:
        assert running.poll() is None, running.communicate()
        time.sleep(0.005)
    running.send_signal(signal.SIGKILL)
    running.communicate()
    assert "store/dataset_metadata.json" not in keys(s3)
    assert cli_run(prepare_words("--out", "s3://bucket/store")) == 0
    said = capsys.readouterr()
    assert "s3://bucket/store: done in" in said.out
    assert_same(s3, "store", tmp_path / "local")
    # Four are under way at a time, and those alone may be sent twice.
    assert len(far.puts()) <= len(keys(s3, "store")) + 4
    assert not any(SECRET in text for text in said)


def test_two_jobs_do_not_mix(far, s3, given, tmp_path):
    far.faults = [Fault("answer", part="tokenizer_state", times=99, status=403, code="Denied")]
    with pytest.raises(OutputError):
        prepare(given, out="s3://bucket/store", **OPTIONS)
    far.faults = []
    with pytest.raises(
        StoreConflictError,
        match=r"s3://bucket/store holds unfinished work of another job .dtype: 'auto' -> 'int32'.; give --restart",
    ):
        prepare(given, out="s3://bucket/store", dtype="int32", work=tmp_path / "w", **OPTIONS)
    given.write_bytes(given.read_bytes() + b'{"text": "more"}\n')
    with pytest.raises(StoreConflictError, match=r"inputs: in.jsonl has [\d,]+ bytes, had "):
        prepare(given, out="s3://bucket/store", work=tmp_path / "w", **OPTIONS)


def stopped(phase):
    """A listener that stops a job where a phase begins."""

    def listen(event):
        if getattr(event, "phase", "") == phase:
            raise KeyboardInterrupt

    return listen


def rewritten(path, text):
    """Give a file other content under its old time."""
    times = path.stat()
    path.write_text(text)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.fixture
def memory():
    """A folder in memory, empty before and after."""
    import fsspec

    memory = fsspec.filesystem("memory")
    yield memory
    if memory.exists("/bucket"):
        memory.rm("/bucket", recursive=True)


@pytest.mark.parametrize("phase", ["write", "upload"])
def test_inputs_of_a_store_elsewhere_are_told_apart_by_their_contents(memory, given, tmp_path, phase):
    how = {**OPTIONS, "out": "memory://bucket/store", "hash_inputs": True}
    with pytest.raises(KeyboardInterrupt):
        prepare(given, progress=stopped(phase), **how)
    text = given.read_text()
    rewritten(given, text.replace("document 7 ", "document 8 "))
    with pytest.raises(StoreConflictError, match="in.jsonl has other content.; give --restart to "):
        prepare(given, **how)
    given.write_text(text)
    given.touch()
    done = prepare(given, **how)
    assert (done.already_done, done.resumed_units) == (False, 1 if phase == "write" else 0)
    assert prepare(given, **how).already_done
    rewritten(given, text.replace("document 7 ", "document 8 "))
    with pytest.raises(StoreConflictError, match="a finished store of .*in.jsonl has other conten"):
        prepare(given, restart=True, **how)


def test_contents_of_inputs_are_read_once_for_a_store_elsewhere(memory, given, monkeypatch):
    read = []
    hashed = rerun.hash_sources
    for module in (far_job, run):
        monkeypatch.setattr(module, "hash_sources", lambda sources: read.append(1) or hashed(sources))
    prepare(given, out="memory://bucket/store", hash_inputs=True, **OPTIONS)
    assert read == [1]


@pytest.mark.parametrize("phase", ["write", "tokenizer_state"])
def test_restart_has_unfinished_work_elsewhere_give_way(far, s3, given, tmp_path, phase):
    other = OPTIONS | {"tokens_per_shard": 50_000}
    if phase == "write":
        with pytest.raises(KeyboardInterrupt):
            prepare(given, out="s3://bucket/store", progress=stopped(phase), **other)
    else:
        # All of its shards are there, and the whole store lies here.
        far.faults = [Fault("answer", part=phase, times=99, status=403, code="Denied")]
        with pytest.raises(OutputError):
            prepare(given, out="s3://bucket/store", **other)
        assert len(keys(s3, "store/train/")) > 6
    far.faults = []
    for name in ("notes.txt", "train/notes.bin"):
        s3.put_object(Bucket="bucket", Key=f"store/{name}", Body=b"mine")
    with pytest.raises(StoreConflictError, match="give --restart to start over, or choose another"):
        prepare(given, out="s3://bucket/store", **OPTIONS)
    prepare(given, out="s3://bucket/store", restart=True, **OPTIONS)
    for name in ("notes.txt", "train/notes.bin"):
        assert content(s3, f"store/{name}") == b"mine"
        s3.delete_object(Bucket="bucket", Key=f"store/{name}")
    prepare(given, out=tmp_path / "local", **OPTIONS)
    assert_same(s3, "store", tmp_path / "local")
    assert not list((tmp_path / "cache").rglob("*.*"))


def test_restart_of_the_same_job_goes_on_and_a_finished_store_stays(far, s3, given):
    far.faults = [Fault("answer", part="dataset_metadata", times=99, status=403, code="Denied")]
    with pytest.raises(OutputError):
        prepare(given, out="s3://bucket/store", **OPTIONS)
    far.faults, far.asked = [], []
    prepare(given, out="s3://bucket/store", restart=True, **OPTIONS)
    assert far.puts() == ["/bucket/store/dataset_metadata.json"]
    before = keys(s3)
    with pytest.raises(StoreConflictError, match="holds a finished store of another job"):
        prepare(given, out="s3://bucket/store", restart=True, dtype="int32", **OPTIONS)
    assert keys(s3) == before


def test_restart_with_synthetic_data(far, s3, given, tmp_path):
    what = "dummy:documents=50,vocab=300"
    with pytest.raises(KeyboardInterrupt):
        prepare(given, out="s3://bucket/made", progress=stopped("write"), **OPTIONS)
    with pytest.raises(StoreConflictError, match="give --restart"):
        prepare(what, out="s3://bucket/made")
    prepare(what, out="s3://bucket/made", restart=True)
    prepare(what, out=tmp_path / "local")
    assert_same(s3, "made", tmp_path / "local")


def test_a_job_that_another_has_begun_anew_over_sends_no_manifest(far, s3, given, tmp_path):
    def take(event):
        if getattr(event, "phase", "") == "upload" and event.bytes_done and not taken:
            taken.append(event)
            with pytest.raises(KeyboardInterrupt):
                prepare(
                    given,
                    out="s3://bucket/store",
                    restart=True,
                    work=tmp_path / "w",
                    progress=stopped("write"),
                    dtype="int32",
                    **OPTIONS,
                )

    taken = []
    with pytest.raises(StoreConflictError, match="holds unfinished work of another job .dtype: "):
        prepare(given, out="s3://bucket/store", progress=take, **OPTIONS)
    assert b"int32" in content(s3, f"store/{OWNER_NAME}")
    assert "store/dataset_metadata.json" not in keys(s3)


def test_a_job_that_fails_gives_no_others_claim_back(far, s3, given, tmp_path):
    def take(event):
        if not taken:
            taken.append(event)
            s3.put_object(Bucket="bucket", Key=f"store/{OWNER_NAME}", Body=b"{}")

    taken = []
    with pytest.raises(InputError, match="max-bad 0"):
        prepare(given, out="s3://bucket/store", max_bad=0, progress=take, **OPTIONS)
    assert keys(s3) == [f"store/{OWNER_NAME}"]


def test_a_job_that_fails_before_anything_is_finished_leaves_nothing(far, s3, given, tmp_path):
    with pytest.raises(InputError, match="max-bad 0"):
        prepare(given, out="s3://bucket/store", max_bad=0, **OPTIONS)
    assert keys(s3) == []
    assert not list((tmp_path / "cache").rglob("*.*"))
    prepare(given, out="s3://bucket/store", **OPTIONS)


def test_a_job_whose_folder_another_took_sends_nothing(far, s3, given, tmp_path):
    def take(event):
        if getattr(event, "phase", "") == "tokenize":
            s3.put_object(Bucket="bucket", Key=f"store/{OWNER_NAME}", Body=content(s3, other))

    other = f"other/{OWNER_NAME}"
    far.faults = [Fault("answer", part="tokenizer_state", times=99, status=403, code="Denied")]
    with pytest.raises(OutputError):
        prepare(given, out="s3://bucket/other", dtype="int32", **OPTIONS)
    with pytest.raises(StoreConflictError, match="holds unfinished work of another job .dtype: "):
        prepare(given, out="s3://bucket/store", progress=take, **OPTIONS)
    assert keys(s3, "store") == [f"store/{OWNER_NAME}"]


def test_of_two_jobs_at_the_same_time_one_gets_the_folder(far, s3):
    with RemoteFolder("s3://bucket/x") as one, RemoteFolder("s3://bucket/x") as other:
        assert one.create("owner", b"one") == b"one"
        assert other.create("owner", b"other") == b"one"
    # Both looked before one of them wrote.
    far.faults = [Fault("answer", method="GET", part="x/owner", status=404, code="NoSuchKey")]
    with RemoteFolder("s3://bucket/x") as other:
        assert other.create("owner", b"other") == b"one"
    # The answer to the one who came first was lost.
    far.faults = [Fault("cut answer")]
    with RemoteFolder("s3://bucket/y") as one:
        assert one.create("owner", b"one") == b"one"
    # A store that cannot do that.
    far.faults = [Fault("answer", status=501, code="NotImplemented")]
    with RemoteFolder("s3://bucket/z") as one:
        assert one.create("owner", b"one") == b"one"


def test_a_folder_that_holds_something_else_is_refused(far, s3, given):
    s3.put_object(Bucket="bucket", Key="store/notes.txt", Body=b"mine")
    with pytest.raises(StoreConflictError, match=r"s3://bucket/store is not empty .notes.txt. and is not a store"):
        prepare(given, out="s3://bucket/store", **OPTIONS)
    assert keys(s3) == ["store/notes.txt"]
    # A name that begins alike is another folder.
    prepare(given, out="s3://bucket/sto", **OPTIONS)


def test_a_finished_store_of_another_job_is_refused(far, given):
    prepare(given, out="s3://bucket/store", **OPTIONS)
    with pytest.raises(StoreConflictError, match="s3://bucket/store holds a finished store of ano"):
        prepare(given, out="s3://bucket/store", dtype="int32", **OPTIONS)
    text = given.read_text()
    given.write_text(text.replace("document 7 ", "document 8 "))
    with pytest.raises(StoreConflictError, match="inputs: in.jsonl has other content"):
        prepare(given, out="s3://bucket/store", **OPTIONS)
    given.write_text(text)
    assert prepare(given, out="s3://bucket/store", **OPTIONS).already_done


def test_a_run_killed_after_the_manifest_is_finished(far, s3, given):
    prepare(given, out="s3://bucket/store", **OPTIONS)
    s3.put_object(Bucket="bucket", Key=f"store/{OWNER_NAME}", Body=b"{}")
    assert prepare(given, out="s3://bucket/store", **OPTIONS).already_done
    assert f"store/{OWNER_NAME}" not in keys(s3)


def test_other_file_systems_of_fsspec(given, tmp_path):
    import fsspec

    memory = fsspec.filesystem("memory")
    prepare(given, out=tmp_path / "local", **OPTIONS)
    try:
        prepare(given, out="memory://bucket/store", **OPTIONS)
        assert prepare(given, out="memory://bucket/store", **OPTIONS).already_done
        names = [name[len("/bucket/store/") :] for name in memory.find("/bucket/store")]
        assert "dataset_metadata.json" in names
        for name in names:
            if not name.startswith("report."):
                assert memory.cat(f"/bucket/store/{name}") == (tmp_path / "local" / name).read_bytes()
        with RemoteFolder("memory://bucket/store") as folder:
            found = folder.list_files()["train/shard_00000.bin"]
            assert folder.holds(tmp_path / "local/train/shard_00000.bin", "train/shard_00000.bin", found)
            memory.pipe("/bucket/store/train/shard_00000.bin", bytes(found.size))
            found = folder.list_files()["train/shard_00000.bin"]
            assert not folder.holds(tmp_path / "local/train/shard_00000.bin", "train/shard_00000.bin", found)
    finally:
        memory.rm("/bucket", recursive=True)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://me:k3yphrase@host/x?sig=k3yphrase", "is a URL .https://...*cannot be written to"),
        ("hf://datasets/a/b", "is a URL .hf://"),
        ("s3://", "names no bucket"),
        ("s3://bucket/*.x", "holds a wildcard"),
        ("nothing://a/b", "is not known to fsspec"),
    ],
)
def test_what_is_no_place_for_a_store_is_refused(given, url, words, tmp_path):
    with pytest.raises(InputError, match=words) as told:
        prepare(given, out=url, **OPTIONS)
    assert SECRET not in str(told.value)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("s3://bucket/a", "lies inside the input"),
        ("s3a://bucket/a/**/*.jsonl", "lies inside the input"),
        ("s3://bucket", "lies inside the input"),
        ("s3://bucket/a/out/b.jsonl", "lies inside --out"),
        ("s3://bucket/a/out", "lies inside --out"),
    ],
)
def test_an_output_is_no_part_of_an_input(given, words):
    with pytest.raises(StoreConflictError, match=words):
        check_remote_separate([given], "s3://bucket/a/out")


def test_an_output_beside_an_input_is_none_of_it():
    beside = ["s3://bucket/a/*.jsonl", "s3://bucket/a/ou", "s3://other/a", "gs://bucket/a", "a"]
    check_remote_separate([*beside, "s3://bucket/a/out2"], "s3://bucket/a/out")


def test_work_is_for_stores_elsewhere(given, tmp_path):
    with pytest.raises(SettingsError, match="work: .* is for a store elsewhere"):
        prepare(given, out=tmp_path / "o", work=tmp_path / "w")
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "mine.txt").write_text("mine")
    with pytest.raises(StoreConflictError, match="holds other files .mine.txt.; choose another"):
        prepare(given, out="memory://bucket/store", work=tmp_path / "w", **OPTIONS)


def test_the_usual_work_folder_is_each_urls_own(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert default_work_folder("s3://b/a/") == default_work_folder("s3://b/a") != default_work_folder("s3://b/b")
    assert default_work_folder("s3://b/a").parent == Path("/c/batchloom/prepare")


def test_the_manifest_goes_last():
    names = [
        "dataset_metadata.json",
        "val/a",
        "report.json",
        "train/b",
        "train/a.partial",
        ".work/x",
    ]
    assert sort_for_upload(names) == ["train/b", "val/a", "report.json", "dataset_metadata.json"]


def test_parts_are_as_large_as_a_file_needs():
    assert [(one.start, one.stop) for one in plan_parts(0)] == [(0, 0)]
    assert [(one.start, one.stop) for one in plan_parts(PART_BYTES)] == [(0, PART_BYTES)]
    assert len(plan_parts(PART_BYTES + 1)) == 2
    most = plan_parts(5 << 40)
    assert len(most) <= 10_000
    assert most[-1].stop == 5 << 40


def test_waits_are_bounded_and_each_names_own():
    waits = [compute_jittered_backoff(tries, "s3://b/x") for tries in range(1, MAX_UPLOAD_ATTEMPTS)]
    assert 30 < sum(waits) < 70
    assert waits != [compute_jittered_backoff(tries, "s3://b/y") for tries in range(1, MAX_UPLOAD_ATTEMPTS)]
    assert waits == [compute_jittered_backoff(tries, "s3://b/x") for tries in range(1, MAX_UPLOAD_ATTEMPTS)]


def test_a_record_that_a_kill_cut_off_says_nothing(tmp_path):
    import fsspec

    record, local = tmp_path / "w" / "uploads.jsonl", tmp_path / "a"
    local.write_bytes(b"abc")
    with RemoteFolder("memory://bucket/u") as folder:
        uploads = StoreUploader(folder, folder.list_files(), record)
        assert (uploads.is_uploaded("a"), uploads.send(local, "a"), uploads.is_uploaded("a")) == (
            False,
            True,
            True,
        )
        assert StoreUploader(folder, folder.list_files(), record).is_uploaded("a")
        record.write_bytes(record.read_bytes()[:-9])
        again = StoreUploader(folder, folder.list_files(), record)
        assert (again.is_uploaded("a"), again.send(local, "a"), again.is_uploaded("a")) == (
            False,
            False,
            True,
        )
    fsspec.filesystem("memory").rm("/bucket", recursive=True)
