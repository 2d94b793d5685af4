"""Stores prepared into object stores: moto's S3 behind a faulty relay, and memory."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from batchloom import InputError, OutputError, SettingsError, prepare
from batchloom.cli import run_command_line
from batchloom.core.errors import StoreConflictError
from batchloom.preparation import prepare_run, remote_prepare, rerun
from batchloom.preparation.remote_prepare import (
    OWNER_NAME,
    check_remote_separate,
    default_work_folder,
    sort_for_upload,
)
from batchloom.remote import (
    RemoteFolder,
    client,
    upload,
)
from batchloom.remote.upload import (
    MAX_REQUEST_ATTEMPTS,
    PART_BYTES,
    compute_jittered_backoff,
    compute_object_checksums,
    plan_parts,
)
from preparation.s3_relay import Fault, run_relay
from preparation.stores import write_jsonl
from waiting import wait_until

HALF_MIB = b"".join(hashlib.sha256(b"%d" % number).digest() for number in range(1 << 14))
BIG_FILE_BYTES = HALF_MIB * 5
SMALL_PART_BYTES = 1 << 20
SECRET = "k3yphrase"
# Two shards.
PREPARE_OPTIONS = {"tokenizer": "bytes", "tokens_per_shard": 6000, "val_fraction": 0}


@pytest.fixture
def relay(s3, monkeypatch):
    """Run a relay in front of an empty bucket, without delays between retries."""
    import s3fs

    for key in list_keys(s3):
        s3.delete_object(Bucket="bucket", Key=key)
    with run_relay(s3.meta.endpoint_url) as relay:
        monkeypatch.setenv("AWS_ENDPOINT_URL", relay.url)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        monkeypatch.setattr(upload, "compute_jittered_backoff", lambda tries, name: 0)
        s3fs.S3FileSystem.clear_instance_cache()
        yield relay
        s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def input_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = [{"text": f"document {number} " + "x" * (number % 90)} for number in range(200)]
    return write_jsonl(tmp_path / "in.jsonl", [*rows, {"no": "text"}])


@pytest.fixture
def big_file(tmp_path, monkeypatch):
    """Write a file of three parts, which are small here; S3 accepts parts of 5 MiB or more."""
    monkeypatch.setattr(upload, "plan_parts", lambda size: plan_parts(size, SMALL_PART_BYTES))
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", SMALL_PART_BYTES)
    path = tmp_path / "big.bin"
    path.write_bytes(BIG_FILE_BYTES)
    assert len(upload.plan_parts(len(BIG_FILE_BYTES))) == 3
    return path


@pytest.fixture
def memory():
    """Return the memory file system, and remove its bucket afterwards.

    What decides about jobs and their claims is the same for all file systems, and this one takes no time.
    """
    import fsspec

    memory = fsspec.filesystem("memory")
    yield memory
    if memory.exists("/bucket"):
        memory.rm("/bucket", recursive=True)


def list_files(memory, folder):
    """Return the names of the files in a folder of the bucket, relative to it."""
    folder = f"/bucket/{folder}"
    return sorted(name[len(folder) + 1 :] for name in memory.find(folder))


def list_keys(s3, prefix=""):
    response = s3.list_objects_v2(Bucket="bucket", Prefix=prefix)
    return [entry["Key"] for entry in response.get("Contents", [])]


def read_object(s3, key):
    return s3.get_object(Bucket="bucket", Key=key)["Body"].read()


def list_multipart_uploads(s3):
    return s3.list_multipart_uploads(Bucket="bucket").get("Uploads", [])


def assert_same(files, local):
    """Check that remote files, bytes by name, equal those of a local store, except the report."""
    local_files = {str(path.relative_to(local)): path.read_bytes() for path in local.rglob("*") if path.is_file()}
    assert files.keys() == local_files.keys()
    for name, content in local_files.items():
        assert name.startswith("report.") or files[name] == content, name


def read_objects(s3, prefix):
    return {key[len(prefix) + 1 :]: read_object(s3, key) for key in list_keys(s3, f"{prefix}/")}


def read_files(memory, folder):
    return {name: memory.cat(f"/bucket/{folder}/{name}") for name in list_files(memory, folder)}


def stop_at_phase(phase):
    """Return a listener that stops a job where a phase begins."""

    def listen(event):
        if getattr(event, "phase", "") == phase:
            raise KeyboardInterrupt

    return listen


def stop_before_manifest(event):
    """Stop a job that has sent everything but the manifest."""
    if getattr(event, "phase", "") == "upload" and 0 < event.bytes_done < event.bytes_total:
        [manifest] = default_work_folder("memory://bucket/store").glob("store/dataset_metadata.json")
        if event.bytes_done == event.bytes_total - manifest.stat().st_size:
            raise KeyboardInterrupt


def test_a_remote_store_equals_a_local_store(relay, s3, input_file, tmp_path):
    options = PREPARE_OPTIONS | {"val_fraction": 0.1}
    local = prepare(input_file, out=tmp_path / "local", **options)
    events = []
    remote = prepare(input_file, out="s3://bucket/a/store/", progress=events.append, **options)
    assert (remote.path, remote.already_done) == ("s3://bucket/a/store", False)
    assert (remote.counts, remote.subsets) == (local.counts, local.subsets)
    assert_same(read_objects(s3, "a/store"), tmp_path / "local")
    assert relay.puts()[-1] == "/bucket/a/store/dataset_metadata.json"
    report = json.loads(read_object(s3, "a/store/report.json"))
    assert report["out"] == "s3://bucket/a/store"
    assert b"s3://bucket/a/store" in read_object(s3, "a/store/report.html")
    assert not list((tmp_path / "cache").rglob("*.*"))
    progress = [event for event in events if getattr(event, "phase", "") == "upload"]
    assert progress[-1].bytes_done == progress[-1].bytes_total > 0
    relay.requests.clear()
    rerun = prepare(input_file, out="s3://bucket/a/store", **options)
    assert (rerun.already_done, rerun.counts) == (True, remote.counts)
    assert {method for method, _ in relay.requests} <= {"GET", "HEAD"}
    everything = b"".join(read_object(s3, key) for key in list_keys(s3, "a/"))
    assert SECRET.encode() not in everything


def test_synthetic_data_is_for_local_folders(memory):
    with pytest.raises(
        SettingsError, match="memory://bucket/made is remote, and synthetic data is written to this machine"
    ):
        prepare("dummy:documents=50,vocab=300", out="memory://bucket/made")
    assert not memory.exists("/bucket/made")


TRANSIENT_FAULTS = [
    Fault("answer", times=3),
    Fault("answer", times=2, status=400, code="RequestTimeout"),
    Fault("half answer", method="GET", part="list-type", times=3),
    Fault("flip", part="shard_00001.bin", times=2),
    Fault("cut answer", part="shard_00000.bin"),
    Fault("cut body", part="shard_00000.idx"),
]


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(TRANSIENT_FAULTS, id="all"),
        *(
            pytest.param([fault], marks=pytest.mark.slow, id=f"{fault.does} {fault.method} {fault.code}")
            for fault in (
                *TRANSIENT_FAULTS[:4],
                Fault("cut answer", times=3),
                Fault("answer", times=2, status=500, code="InternalError"),
                Fault("answer", method="GET", times=2),
                Fault("cut body", times=3),
            )
        ),
    ],
)
def test_transient_faults_are_retried(relay, s3, input_file, tmp_path, faults):
    prepare(input_file, out=tmp_path / "local", **PREPARE_OPTIONS)
    relay.faults = [replace(fault) for fault in faults]
    prepare(input_file, out="s3://bucket/store", **PREPARE_OPTIONS)
    assert not any(fault.times for fault in relay.faults)
    assert_same(read_objects(s3, "store"), tmp_path / "local")


PART_FAULTS = [
    Fault("flip", part="partNumber=2"),
    Fault("answer", method="POST", part="uploadId", status=404, code="NoSuchUpload"),
    Fault("cut answer", method="POST", part="uploadId"),
]


@pytest.mark.parametrize(
    "faults",
    [
        [],
        PART_FAULTS,
        *(
            pytest.param([fault], marks=pytest.mark.slow)
            for fault in (
                *PART_FAULTS,
                Fault("answer", part="partNumber=2", times=3),
                Fault("cut body", part="partNumber=1", times=2),
                Fault("cut answer", part="partNumber=3", times=2),
                Fault("half answer", method="POST", part="uploadId"),
                Fault("cut answer", method="POST", part="?uploads"),
            )
        ),
    ],
    ids=lambda faults: " ".join(f"{fault.does} {fault.method} {fault.part}" for fault in faults),
)
def test_large_files_go_in_parts(relay, s3, big_file, faults):
    relay.faults = [replace(fault) for fault in faults]
    with RemoteFolder("s3://bucket/x") as folder:
        remote_file = folder.upload(big_file, "big.bin")
        folder.end_uploads()
    assert not any(fault.times for fault in relay.faults)
    assert read_object(s3, "x/big.bin") == BIG_FILE_BYTES
    assert remote_file.mark == f'"{compute_object_checksums(big_file, len(BIG_FILE_BYTES)).etag}"'
    assert remote_file.mark.endswith('-3"')
    assert list_multipart_uploads(s3) == []


@pytest.mark.slow
def test_parts_of_the_usual_size(relay, s3, tmp_path):
    path = tmp_path / "big.bin"
    path.write_bytes(HALF_MIB * 72)
    with RemoteFolder("s3://bucket/x") as folder:
        assert folder.upload(path, "big.bin").mark.endswith('-3"')
    assert read_object(s3, "x/big.bin") == HALF_MIB * 72


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        pytest.param(
            Fault("answer", part="partNumber=2", times=99),
            r"the server answered 503 SlowDown \(8 ",
            marks=pytest.mark.slow,
        ),
        pytest.param(Fault("cut body", part="partNumber", times=99), "connection .*tries", marks=pytest.mark.slow),
        pytest.param(
            Fault("answer", part="partNumber=2", times=99, status=403, code="AccessDenied"),
            "403 Ac",
            marks=pytest.mark.slow,
        ),
        (Fault("flip", part="partNumber=1", times=99), "differed from the sent file in all 3 uploads"),
    ],
)
def test_an_upload_that_fails_leaves_no_parts(relay, s3, big_file, fault, message):
    relay.faults = [replace(fault)]
    with (
        RemoteFolder("s3://bucket/x") as folder,
        pytest.raises(OutputError, match=f"s3://bucket/x/big.bin.*{message}.* again") as caught,
    ):
        folder.upload(big_file, "big.bin")
    assert list_multipart_uploads(s3) == []
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.slow
def test_a_server_that_hangs_is_not_waited_for(relay, s3, big_file, monkeypatch):
    monkeypatch.setattr(client, "_READ_TIMEOUT", 1)
    monkeypatch.setattr(client, "_make_storage_options", client._make_storage_options.__wrapped__)
    relay.faults = [Fault("hang", part="partNumber=2")]
    with RemoteFolder("s3://bucket/x") as folder:
        folder.upload(big_file, "big.bin")
    assert read_object(s3, "x/big.bin") == BIG_FILE_BYTES
    assert list_multipart_uploads(s3) == []


def test_the_parts_that_a_killed_run_left_are_ended(relay, s3, input_file):
    s3.create_multipart_upload(Bucket="bucket", Key="store/train/shard_00000.bin")
    adjacent = s3.create_multipart_upload(Bucket="bucket", Key="store2/a")
    prepare(input_file, out="s3://bucket/store", dry_run=True, **PREPARE_OPTIONS)
    assert [upload["Key"] for upload in list_multipart_uploads(s3)] == ["store2/a"]
    s3.abort_multipart_upload(Bucket="bucket", Key="store2/a", UploadId=adjacent["UploadId"])


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            Fault("answer", times=99, status=403, code="AccessDenied"),
            "the server answered 403 AccessDenied; give credentials that may write it .AWS_PROFILE",
        ),
        (
            Fault("answer", method="GET", times=99, status=403, code="RequestTimeTooSkewed"),
            "403 RequestTimeTooSkewed; set the clock of this machine",
        ),
        pytest.param(
            Fault("answer", times=99, status=400, code="ExpiredToken"),
            "400 ExpiredToken; give credentials",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Fault("answer", times=99, status=507, code="XMinioStorageFull"),
            "the server answered 507 XMinioStorageFull",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_refusing_bucket_is_reported_at_once(relay, s3, input_file, tmp_path, fault, message):
    fault = replace(fault)
    relay.faults = [fault]
    with pytest.raises(OutputError, match=f"Cannot write s3://bucket/store.*{message}"):
        prepare(input_file, out="s3://bucket/store", **PREPARE_OPTIONS)
    # One request by batchloom, and at most one more by s3fs.
    assert 99 - fault.times <= 2
    assert not list((tmp_path / "cache").rglob("*.*"))


def test_a_dry_run_sends_nothing_and_the_run_goes_on_from_it(memory, input_file):
    dry = prepare(input_file, out="memory://bucket/dry", dry_run=True, **PREPARE_OPTIONS)
    assert not dry.subsets
    assert list_files(memory, "dry") == [OWNER_NAME]
    result = prepare(input_file, out="memory://bucket/dry", **PREPARE_OPTIONS)
    assert result.resumed_units == 1
    assert result.counts == dry.counts


def test_a_missing_bucket_is_reported_at_once(relay, input_file, tmp_path):
    with pytest.raises(OutputError, match="Cannot write s3://no-such/x: there is no such bucket"):
        prepare(input_file, out="s3://no-such/x", **PREPARE_OPTIONS)
    assert len(relay.requests) <= 2


def test_a_missing_server_is_reported_at_once(input_file, tmp_path, monkeypatch):
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(OutputError, match="Cannot write s3://bucket/x: the connection was refused"):
        prepare(input_file, out="s3://bucket/x", **PREPARE_OPTIONS)
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.slow
def test_a_bucket_that_refuses_in_the_middle_keeps_what_it_has_and_another_machine_goes_on(
    relay, s3, input_file, tmp_path
):
    prepare(input_file, out=tmp_path / "local", **PREPARE_OPTIONS)
    sent = set()
    for work in (None, tmp_path / "another"):
        # The claim is the first one that is sent.
        relay.faults = [Fault("answer", spare=5 if sent else 6, times=99, status=403, code="AccessDenied")]
        with pytest.raises(OutputError, match="403 AccessDenied"):
            prepare(input_file, out="s3://bucket/store", work=work, **PREPARE_OPTIONS)
        kept = read_objects(s3, "store").keys() - {OWNER_NAME}
        assert sent < kept
        assert "dataset_metadata.json" not in kept
        sent = kept
    relay.faults, relay.requests = [], []
    result = prepare(input_file, out="s3://bucket/store", **PREPARE_OPTIONS)
    assert not result.already_done
    assert_same(read_objects(s3, "store"), tmp_path / "local")
    # The report names the work folder.
    sent -= {"report.json", "report.html"}
    assert not sent.intersection(name[len("/bucket/store/") :] for name in relay.puts())


@pytest.mark.slow
def test_changed_objects_are_uploaded_again(relay, s3, input_file, tmp_path):
    relay.faults = [Fault("answer", part="dataset_metadata", times=99, status=403, code="Denied")]
    with pytest.raises(OutputError):
        prepare(input_file, out="s3://bucket/store", **PREPARE_OPTIONS)
    key = "store/train/shard_00001.bin"
    expected = read_object(s3, key)
    s3.put_object(Bucket="bucket", Key=key, Body=bytes(len(expected)))
    relay.faults, relay.requests = [], []
    prepare(input_file, out="s3://bucket/store", **PREPARE_OPTIONS)
    assert read_object(s3, key) == expected
    assert len(relay.puts()) == 2


def make_prepare_command(*options_after):
    common = ["--tokenizer", "bytes", "--tokens-per-shard", "6000", "--val-fraction", "0"]
    return ["prepare", "in.jsonl", *common, *options_after]


@pytest.mark.parametrize("uploads", [7, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_goes_on(relay, s3, input_file, tmp_path, capsys, uploads):
    prepare(input_file, out=tmp_path / "local", **PREPARE_OPTIONS)
    relay.delay = 0.02
    command = [sys.executable, "-m", "batchloom", *make_prepare_command("--out", "s3://bucket/store")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: len(relay.puts()) >= uploads or process.poll() is not None, "uploads")
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, process.communicate()
    process.communicate()
    assert "store/dataset_metadata.json" not in list_keys(s3)
    assert run_command_line(make_prepare_command("--out", "s3://bucket/store")) == 0
    captured = capsys.readouterr()
    assert "s3://bucket/store: done in" in captured.out
    assert_same(read_objects(s3, "store"), tmp_path / "local")
    # Four uploads run at a time, and only those may be repeated.
    assert len(relay.puts()) <= len(list_keys(s3, "store")) + 4
    assert not any(SECRET in text for text in captured)


def test_two_jobs_do_not_mix(memory, input_file, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        prepare(input_file, out="memory://bucket/store", progress=stop_before_manifest, **PREPARE_OPTIONS)
    with pytest.raises(
        StoreConflictError,
        match=r"memory://bucket/store holds unfinished work of another job .dtype: 'auto' -> 'int32'.; give --restart",
    ):
        prepare(input_file, out="memory://bucket/store", dtype="int32", work=tmp_path / "w", **PREPARE_OPTIONS)
    input_file.write_bytes(input_file.read_bytes() + b'{"text": "more"}\n')
    with pytest.raises(StoreConflictError, match=r"inputs: in.jsonl has [\d,]+ bytes, had "):
        prepare(input_file, out="memory://bucket/store", work=tmp_path / "w", **PREPARE_OPTIONS)


def rewrite_with_old_time(path, text):
    """Replace the content of a file and keep its time."""
    times = path.stat()
    path.write_text(text)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("phase", ["write", "upload"])
def test_inputs_of_a_remote_store_are_distinguished_by_content(memory, input_file, tmp_path, phase):
    options = {**PREPARE_OPTIONS, "out": "memory://bucket/store", "hash_inputs": True}
    with pytest.raises(KeyboardInterrupt):
        prepare(input_file, progress=stop_at_phase(phase), **options)
    text = input_file.read_text()
    rewrite_with_old_time(input_file, text.replace("document 7 ", "document 8 "))
    with pytest.raises(StoreConflictError, match="in.jsonl has other content.; give --restart to "):
        prepare(input_file, **options)
    input_file.write_text(text)
    input_file.touch()
    resumed = prepare(input_file, **options)
    assert (resumed.already_done, resumed.resumed_units) == (False, 1 if phase == "write" else 0)
    assert prepare(input_file, **options).already_done
    rewrite_with_old_time(input_file, text.replace("document 7 ", "document 8 "))
    with pytest.raises(StoreConflictError, match="a finished store of .*in.jsonl has other conten"):
        prepare(input_file, restart=True, **options)


def test_inputs_of_a_remote_store_are_hashed_once(memory, input_file, monkeypatch):
    calls = []
    hash_sources = rerun.hash_sources
    for module in (remote_prepare, prepare_run):
        monkeypatch.setattr(module, "hash_sources", lambda sources: calls.append(1) or hash_sources(sources))
    prepare(input_file, out="memory://bucket/store", hash_inputs=True, **PREPARE_OPTIONS)
    assert calls == [1]


@pytest.mark.parametrize("stop", [stop_at_phase("write"), stop_before_manifest], ids=["work", "uploads"])
def test_restart_replaces_unfinished_remote_work(memory, input_file, tmp_path, stop):
    other_options = PREPARE_OPTIONS | {"tokens_per_shard": 3000}
    with pytest.raises(KeyboardInterrupt):
        prepare(input_file, out="memory://bucket/store", progress=stop, **other_options)
    # After the uploads the complete store is on this machine, too.
    assert ("train/shard_00003.bin" in list_files(memory, "store")) == (stop is stop_before_manifest)
    for name in ("notes.txt", "train/notes.bin"):
        memory.pipe(f"/bucket/store/{name}", b"mine")
    with pytest.raises(StoreConflictError, match="give --restart to start over, or choose another"):
        prepare(input_file, out="memory://bucket/store", **PREPARE_OPTIONS)
    prepare(input_file, out="memory://bucket/store", restart=True, **PREPARE_OPTIONS)
    files = read_files(memory, "store")
    assert (files.pop("notes.txt"), files.pop("train/notes.bin")) == (b"mine", b"mine")
    prepare(input_file, out=tmp_path / "local", **PREPARE_OPTIONS)
    assert_same(files, tmp_path / "local")
    assert not list((tmp_path / "cache").rglob("*.*"))


def test_restart_of_the_same_job_goes_on_and_a_finished_store_stays(memory, input_file):
    def list_times():
        return {name: memory.modified(f"/bucket/store/{name}") for name in list_files(memory, "store")}

    with pytest.raises(KeyboardInterrupt):
        prepare(input_file, out="memory://bucket/store", progress=stop_before_manifest, **PREPARE_OPTIONS)
    before = list_times()
    prepare(input_file, out="memory://bucket/store", restart=True, **PREPARE_OPTIONS)
    after = list_times()
    assert after.keys() - before.keys() == {"dataset_metadata.json"}
    assert before.keys() - after.keys() == {OWNER_NAME}
    assert all(after[name] == before[name] for name in before.keys() & after.keys())
    with pytest.raises(StoreConflictError, match="holds a finished store of another job"):
        prepare(input_file, out="memory://bucket/store", restart=True, dtype="int32", **PREPARE_OPTIONS)
    assert list_times() == after


def test_a_job_that_another_has_begun_anew_over_sends_no_manifest(memory, input_file, tmp_path):
    def begin_other_job(event):
        if getattr(event, "phase", "") == "upload" and event.bytes_done and not events:
            events.append(event)
            with pytest.raises(KeyboardInterrupt):
                prepare(
                    input_file,
                    out="memory://bucket/store",
                    restart=True,
                    work=tmp_path / "w",
                    progress=stop_at_phase("write"),
                    dtype="int32",
                    **PREPARE_OPTIONS,
                )

    events = []
    with pytest.raises(StoreConflictError, match="holds unfinished work of another job .dtype: "):
        prepare(input_file, out="memory://bucket/store", progress=begin_other_job, **PREPARE_OPTIONS)
    assert b"int32" in memory.cat(f"/bucket/store/{OWNER_NAME}")
    assert "dataset_metadata.json" not in list_files(memory, "store")


def test_a_job_that_fails_gives_no_others_claim_back(memory, input_file):
    def claim_folder(event):
        if not events:
            events.append(event)
            memory.pipe(f"/bucket/store/{OWNER_NAME}", b"{}")

    events = []
    with pytest.raises(InputError, match="max-bad 0"):
        prepare(input_file, out="memory://bucket/store", max_bad=0, progress=claim_folder, **PREPARE_OPTIONS)
    assert list_files(memory, "store") == [OWNER_NAME]


def test_a_job_that_fails_before_anything_is_finished_leaves_nothing(memory, input_file, tmp_path):
    with pytest.raises(InputError, match="max-bad 0"):
        prepare(input_file, out="memory://bucket/store", max_bad=0, **PREPARE_OPTIONS)
    assert list_files(memory, "store") == []
    assert not list((tmp_path / "cache").rglob("*.*"))
    prepare(input_file, out="memory://bucket/store", **PREPARE_OPTIONS)


def test_a_job_whose_folder_another_took_sends_nothing(memory, input_file):
    def claim_folder(event):
        if getattr(event, "phase", "") == "tokenize":
            memory.pipe(f"/bucket/store/{OWNER_NAME}", memory.cat(f"/bucket/other/{OWNER_NAME}"))

    with pytest.raises(KeyboardInterrupt):
        prepare(
            input_file,
            out="memory://bucket/other",
            dtype="int32",
            progress=stop_at_phase("upload"),
            **PREPARE_OPTIONS,
        )
    with pytest.raises(StoreConflictError, match="holds unfinished work of another job .dtype: "):
        prepare(input_file, out="memory://bucket/store", progress=claim_folder, **PREPARE_OPTIONS)
    assert list_files(memory, "store") == [OWNER_NAME]


@pytest.mark.slow
def test_of_two_jobs_at_the_same_time_one_gets_the_folder(relay, s3):
    with RemoteFolder("s3://bucket/x") as first, RemoteFolder("s3://bucket/x") as second:
        assert first.create("owner", b"one") == b"one"
        assert second.create("owner", b"other") == b"one"
    # Both jobs looked before one of them wrote.
    relay.faults = [Fault("answer", method="GET", part="x/owner", status=404, code="NoSuchKey")]
    with RemoteFolder("s3://bucket/x") as second:
        assert second.create("owner", b"other") == b"one"
    # The reply to the first writer was lost.
    relay.faults = [Fault("cut answer")]
    with RemoteFolder("s3://bucket/y") as first:
        assert first.create("owner", b"one") == b"one"
    # The server does not support conditional writes.
    relay.faults = [Fault("answer", status=501, code="NotImplemented")]
    with RemoteFolder("s3://bucket/z") as first:
        assert first.create("owner", b"one") == b"one"


def test_a_folder_that_holds_something_else_is_refused(relay, s3, input_file):
    s3.put_object(Bucket="bucket", Key="store/notes.txt", Body=b"mine")
    with pytest.raises(StoreConflictError, match=r"s3://bucket/store is not empty .notes.txt. and is not a store"):
        prepare(input_file, out="s3://bucket/store", **PREPARE_OPTIONS)
    assert list_keys(s3) == ["store/notes.txt"]
    # A common beginning of the name does not make it the same folder.
    prepare(input_file, out="s3://bucket/sto", dry_run=True, **PREPARE_OPTIONS)


def test_a_finished_store_of_another_job_is_refused(memory, input_file):
    prepare(input_file, out="memory://bucket/store", **PREPARE_OPTIONS)
    with pytest.raises(StoreConflictError, match="memory://bucket/store holds a finished store of ano"):
        prepare(input_file, out="memory://bucket/store", dtype="int32", **PREPARE_OPTIONS)
    text = input_file.read_text()
    input_file.write_text(text.replace("document 7 ", "document 8 "))
    with pytest.raises(StoreConflictError, match="inputs: in.jsonl has other content"):
        prepare(input_file, out="memory://bucket/store", **PREPARE_OPTIONS)
    input_file.write_text(text)
    assert prepare(input_file, out="memory://bucket/store", **PREPARE_OPTIONS).already_done


def test_a_run_killed_after_the_manifest_is_finished(memory, input_file):
    prepare(input_file, out="memory://bucket/store", **PREPARE_OPTIONS)
    memory.pipe(f"/bucket/store/{OWNER_NAME}", b"{}")
    assert prepare(input_file, out="memory://bucket/store", **PREPARE_OPTIONS).already_done
    assert OWNER_NAME not in list_files(memory, "store")


def test_other_file_systems_of_fsspec(memory, input_file, tmp_path):
    options = PREPARE_OPTIONS | {"val_fraction": 0.1}
    prepare(input_file, out=tmp_path / "local", **options)
    prepare(input_file, out="memory://bucket/store", **options)
    assert prepare(input_file, out="memory://bucket/store", **options).already_done
    assert_same(read_files(memory, "store"), tmp_path / "local")
    with RemoteFolder("memory://bucket/store") as folder:
        entry = folder.list_files()["train/shard_00000.bin"]
        assert folder.holds(tmp_path / "local/train/shard_00000.bin", "train/shard_00000.bin", entry)
        memory.pipe("/bucket/store/train/shard_00000.bin", bytes(entry.size))
        entry = folder.list_files()["train/shard_00000.bin"]
        assert not folder.holds(tmp_path / "local/train/shard_00000.bin", "train/shard_00000.bin", entry)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://me:k3yphrase@host/x?sig=k3yphrase", "is a URL .https://...*cannot be written to"),
        ("hf://datasets/a/b", "is a URL .hf://"),
        ("s3://", "names no bucket"),
        ("s3://bucket/*.x", "holds a wildcard"),
        ("nothing://a/b", "is not known to fsspec"),
    ],
)
def test_invalid_store_locations_are_refused(input_file, url, message, tmp_path):
    with pytest.raises(InputError, match=message) as caught:
        prepare(input_file, out=url, **PREPARE_OPTIONS)
    assert SECRET not in str(caught.value)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("s3://bucket/a", "lies inside the input"),
        ("s3a://bucket/a/**/*.jsonl", "lies inside the input"),
        ("s3://bucket", "lies inside the input"),
        ("s3://bucket/a/out/b.jsonl", "lies inside --out"),
        ("s3://bucket/a/out", "lies inside --out"),
    ],
)
def test_an_output_is_no_part_of_an_input(source, message):
    with pytest.raises(StoreConflictError, match=message):
        check_remote_separate([source], "s3://bucket/a/out")


def test_an_output_next_to_an_input_is_accepted():
    other_inputs = ["s3://bucket/a/*.jsonl", "s3://bucket/a/ou", "s3://other/a", "gs://bucket/a", "a"]
    check_remote_separate([*other_inputs, "s3://bucket/a/out2"], "s3://bucket/a/out")


def test_a_work_folder_is_for_remote_stores(input_file, tmp_path):
    with pytest.raises(SettingsError, match="work: .* applies to a remote store only"):
        prepare(input_file, out=tmp_path / "o", work=tmp_path / "w")
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "mine.txt").write_text("mine")
    with pytest.raises(StoreConflictError, match="holds other files .mine.txt.; choose another"):
        prepare(input_file, out="memory://bucket/store", work=tmp_path / "w", **PREPARE_OPTIONS)


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
    assert [(part.start, part.stop) for part in plan_parts(0)] == [(0, 0)]
    assert [(part.start, part.stop) for part in plan_parts(PART_BYTES)] == [(0, PART_BYTES)]
    assert len(plan_parts(PART_BYTES + 1)) == 2
    parts = plan_parts(5 << 40)
    assert len(parts) <= 10_000
    assert parts[-1].stop == 5 << 40


def test_waits_are_bounded_and_each_names_own():
    waits = [compute_jittered_backoff(tries, "s3://b/x") for tries in range(1, MAX_REQUEST_ATTEMPTS)]
    assert 30 < sum(waits) < 70
    assert waits != [compute_jittered_backoff(tries, "s3://b/y") for tries in range(1, MAX_REQUEST_ATTEMPTS)]
    assert waits == [compute_jittered_backoff(tries, "s3://b/x") for tries in range(1, MAX_REQUEST_ATTEMPTS)]
