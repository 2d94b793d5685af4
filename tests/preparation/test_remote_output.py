"""Stores uploaded to object stores: moto's S3 behind a faulty relay, and memory."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from batchloom import InputError, OutputError, SettingsError, StoreError, open_store, prepare
from batchloom.cli import run_command_line
from batchloom.core.errors import StoreConflictError, StoreMissingError
from batchloom.preparation import remote_prepare, upload_store
from batchloom.preparation.output_checks import check_remote_separate
from batchloom.preparation.remote_work_folder import default_work_folder
from batchloom.remote import RemoteFolder, client, upload
from batchloom.remote.upload import (
    MAX_REQUEST_ATTEMPTS,
    PART_BYTES,
    choose_part_bytes,
    compute_etag,
    compute_jittered_backoff,
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
    monkeypatch.setattr(upload, "PART_BYTES", SMALL_PART_BYTES)
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", SMALL_PART_BYTES)
    path = tmp_path / "big.bin"
    path.write_bytes(BIG_FILE_BYTES)
    return path


@pytest.fixture
def memory():
    """Return the memory file system, and remove its bucket afterwards.

    What decides about jobs is the same for all file systems, and this one takes no time.
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
        folder.upload(big_file, "big.bin")
        remote_file = folder.list_files()["big.bin"]
    assert not any(fault.times for fault in relay.faults)
    assert read_object(s3, "x/big.bin") == BIG_FILE_BYTES
    assert remote_file.checksum == compute_etag(big_file, len(BIG_FILE_BYTES))
    assert remote_file.checksum.endswith("-3")


@pytest.mark.slow
def test_parts_of_the_usual_size(relay, s3, tmp_path):
    path = tmp_path / "big.bin"
    path.write_bytes(HALF_MIB * 72)
    with RemoteFolder("s3://bucket/x") as folder:
        folder.upload(path, "big.bin")
        assert folder.list_files()["big.bin"].checksum.endswith("-3")
        # The checksum shows it: nothing was read back.
        assert "GET" not in {method for method, name in relay.requests if "big.bin" in name}
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
        (Fault("answer", part="partNumber=2", times=99, status=403, code="AccessDenied"), "403 Ac"),
        (Fault("flip", part="partNumber=1", times=99), "differed from the sent file in all 3 uploads"),
    ],
)
def test_an_upload_that_fails_names_its_reason(relay, big_file, fault, message):
    relay.faults = [replace(fault)]
    with RemoteFolder("s3://bucket/x") as folder:
        # A first request is retried less often.
        assert folder.list_files() == {}
        with pytest.raises(OutputError, match=f"s3://bucket/x/big.bin.*{message}.* again") as caught:
            folder.upload(big_file, "big.bin")
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_folder_that_is_stopped_ends_the_upload_of_a_large_file(relay, s3, big_file, monkeypatch):
    monkeypatch.setattr(upload, "_PARALLEL_PARTS", 1)
    with RemoteFolder("s3://bucket/x") as folder:
        monkeypatch.setattr(relay, "fault", lambda method, path: relay.requests.append(path) or folder.stop())
        with pytest.raises(OutputError, match="Stopped"):
            folder.upload(big_file, "big.bin")
    assert not any("partNumber=2" in path for path in relay.requests)
    assert list_keys(s3) == []


@pytest.mark.parametrize("has_own_checksum", [False, True])
def test_an_object_with_another_checksum_is_compared_by_its_bytes(relay, s3, tmp_path, has_own_checksum):
    """Objects that the service encrypts with its own keys have such checksums."""
    path = tmp_path / "file"
    path.write_bytes(HALF_MIB)
    s3.put_object(Bucket="bucket", Key="x/file", Body=HALF_MIB)
    s3.put_object(Bucket="bucket", Key="x/other", Body=HALF_MIB[::-1])
    with RemoteFolder("s3://bucket/x") as folder:
        files = folder.list_files()
        if has_own_checksum:
            files = {name: replace(remote_file, checksum="another") for name, remote_file in files.items()}
        assert folder.holds(path, "file", files["file"])
        assert not folder.holds(path, "other", files["other"])
        assert not folder.holds(path, "missing", files["other"])


@pytest.mark.slow
def test_a_server_that_hangs_is_not_waited_for(relay, s3, big_file, monkeypatch):
    monkeypatch.setattr(client, "_READ_TIMEOUT", 1)
    monkeypatch.setattr(client, "_make_storage_options", client._make_storage_options.__wrapped__)
    relay.faults = [Fault("hang", part="partNumber=2")]
    with RemoteFolder("s3://bucket/x") as folder:
        folder.upload(big_file, "big.bin")
    assert read_object(s3, "x/big.bin") == BIG_FILE_BYTES


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
def test_a_refusing_bucket_is_not_asked_again(relay, s3, input_file, tmp_path, fault, message):
    fault = replace(fault)
    relay.faults = [fault]
    with pytest.raises(OutputError, match=f"Cannot write s3://bucket/store.*{message}"):
        prepare(input_file, out="s3://bucket/store", **PREPARE_OPTIONS)
    # Four threads ask once, and may begin another file before they are stopped.
    assert 99 - fault.times <= 8
    # The next run needs only the upload.
    assert bool(list((tmp_path / "cache").rglob("dataset_metadata.json"))) == (fault.method == "PUT")


def test_a_dry_run_sends_nothing_and_the_run_goes_on_from_it(memory, input_file):
    dry = prepare(input_file, out="memory://bucket/dry", dry_run=True, **PREPARE_OPTIONS)
    assert not dry.subsets
    assert list_files(memory, "dry") == []
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
def test_a_bucket_that_refuses_in_the_middle_keeps_what_it_has(relay, s3, input_file, tmp_path):
    prepare(input_file, out=tmp_path / "local", **PREPARE_OPTIONS)
    relay.faults = [Fault("answer", spare=5, times=99, status=403, code="AccessDenied")]
    with pytest.raises(OutputError, match="403 AccessDenied"):
        prepare(input_file, out="s3://bucket/store", **PREPARE_OPTIONS)
    kept = set(read_objects(s3, "store"))
    assert kept
    assert "dataset_metadata.json" not in kept
    with pytest.raises(StoreConflictError, match="s3://bucket/store is not empty .*choose another --out"):
        prepare(input_file, out="s3://bucket/store", work=tmp_path / "another", **PREPARE_OPTIONS)
    relay.faults, relay.requests = [], []
    result = prepare(input_file, out="s3://bucket/store", **PREPARE_OPTIONS)
    assert not result.already_done
    assert_same(read_objects(s3, "store"), tmp_path / "local")
    assert not kept.intersection(name[len("/bucket/store/") :] for name in relay.puts())


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


def test_another_job_with_the_same_folder_is_refused(memory, input_file, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        prepare(input_file, out="memory://bucket/store", progress=stop_at_phase("write"), **PREPARE_OPTIONS)
    with pytest.raises(StoreConflictError, match="holds unfinished work of another job .dtype: .* give --restart"):
        prepare(input_file, out="memory://bucket/store", dtype="int32", **PREPARE_OPTIONS)
    with pytest.raises(KeyboardInterrupt):
        prepare(input_file, out="memory://bucket/store", progress=stop_before_manifest, **PREPARE_OPTIONS)
    sent = read_files(memory, "store")
    for options, message in (
        ({}, "holds a finished store of another job .dtype: .* delete that folder"),
        ({"work": tmp_path / "w", "restart": True}, "memory://bucket/store is not empty .*; choose another --out"),
    ):
        with pytest.raises(StoreConflictError, match=message):
            prepare(input_file, out="memory://bucket/store", dtype="int32", **options, **PREPARE_OPTIONS)
    input_file.write_text(input_file.read_text().replace("document 7 ", "document 8 "))
    with pytest.raises(StoreConflictError, match="a finished store of .*in.jsonl has other content"):
        prepare(input_file, out="memory://bucket/store", **PREPARE_OPTIONS)
    assert read_files(memory, "store") == sent


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
    with pytest.raises(StoreConflictError, match="in.jsonl has other content"):
        prepare(input_file, **options)
    input_file.write_text(text)
    input_file.touch()
    resumed = prepare(input_file, **options)
    assert (resumed.already_done, resumed.resumed_units) == (False, 1 if phase == "write" else 0)
    assert prepare(input_file, **options).already_done
    rewrite_with_old_time(input_file, text.replace("document 7 ", "document 8 "))
    with pytest.raises(StoreConflictError, match="a finished store of .*in.jsonl has other conten"):
        prepare(input_file, restart=True, **options)


def test_restart_replaces_unfinished_work(memory, input_file, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        prepare(
            input_file,
            out="memory://bucket/store",
            progress=stop_at_phase("write"),
            **PREPARE_OPTIONS | {"tokens_per_shard": 3000},
        )
    with pytest.raises(StoreConflictError, match="give --restart to start over"):
        prepare(input_file, out="memory://bucket/store", **PREPARE_OPTIONS)
    prepare(input_file, out="memory://bucket/store", restart=True, **PREPARE_OPTIONS)
    prepare(input_file, out=tmp_path / "local", **PREPARE_OPTIONS)
    assert_same(read_files(memory, "store"), tmp_path / "local")
    assert not list((tmp_path / "cache").rglob("*.*"))


def test_a_resumed_upload_sends_the_rest(memory, input_file):
    def list_times():
        return {name: memory.modified(f"/bucket/store/{name}") for name in list_files(memory, "store")}

    with pytest.raises(KeyboardInterrupt):
        prepare(input_file, out="memory://bucket/store", progress=stop_before_manifest, **PREPARE_OPTIONS)
    before = list_times()
    events = []
    result = prepare(input_file, out="memory://bucket/store", progress=events.append, **PREPARE_OPTIONS)
    assert not result.already_done
    after = list_times()
    assert after.keys() - before.keys() == {"dataset_metadata.json"}
    assert all(after[name] == before[name] for name in before)
    last = events[-1]
    assert last.bytes_total - last.bytes_found == memory.size("/bucket/store/dataset_metadata.json")
    with pytest.raises(StoreConflictError, match="holds a finished store of another job"):
        prepare(input_file, out="memory://bucket/store", restart=True, dtype="int32", **PREPARE_OPTIONS)
    assert list_times() == after


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dataset_metadata.json", "memory://bucket/store holds another store, or another generation of this one"),
        ("notes.txt", "memory://bucket/store is not empty .notes.txt."),
    ],
)
def test_files_that_appear_during_the_work_are_refused(memory, input_file, name, message):
    def write_file(event):
        if getattr(event, "phase", "") == "upload" and event.bytes_done:
            memory.pipe(f"/bucket/store/{name}", b"{}")

    with pytest.raises(StoreConflictError, match=message):
        prepare(input_file, out="memory://bucket/store", progress=write_file, **PREPARE_OPTIONS)
    assert memory.cat(f"/bucket/store/{name}") == b"{}"


def test_a_job_that_fails_before_anything_is_finished_leaves_nothing(memory, input_file, tmp_path):
    with pytest.raises(InputError, match="max-bad 0"):
        prepare(input_file, out="memory://bucket/store", max_bad=0, **PREPARE_OPTIONS)
    assert list_files(memory, "store") == []
    assert not list((tmp_path / "cache").rglob("*.*"))
    prepare(input_file, out="memory://bucket/store", **PREPARE_OPTIONS)


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


def test_a_run_killed_after_the_manifest_is_finished(memory, input_file, tmp_path):
    prepare(input_file, out="memory://bucket/store", **PREPARE_OPTIONS)
    store = default_work_folder("memory://bucket/store") / "store"
    prepare(input_file, out=store, **PREPARE_OPTIONS)
    assert prepare(input_file, out="memory://bucket/store", **PREPARE_OPTIONS).already_done
    assert not store.exists()


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
        ("s3:/bucket/x", "The output begins with s3:/ and one slash, and a URL has two: write it as text, s3://"),
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


def test_parts_are_as_large_as_a_file_needs():
    assert choose_part_bytes(0) == choose_part_bytes(PART_BYTES * 10_000) == PART_BYTES
    assert choose_part_bytes(PART_BYTES * 10_000 + 1) == PART_BYTES + (1 << 20)
    assert -(-(5 << 40) // choose_part_bytes(5 << 40)) <= 10_000


def test_waits_are_bounded_and_each_names_own():
    waits = [compute_jittered_backoff(tries, "s3://b/x") for tries in range(1, MAX_REQUEST_ATTEMPTS)]
    assert 30 < sum(waits) < 70
    assert waits != [compute_jittered_backoff(tries, "s3://b/y") for tries in range(1, MAX_REQUEST_ATTEMPTS)]
    assert waits == [compute_jittered_backoff(tries, "s3://b/x") for tries in range(1, MAX_REQUEST_ATTEMPTS)]


@pytest.fixture
def store(input_file, tmp_path):
    prepare(input_file, out=tmp_path / "local", **PREPARE_OPTIONS)
    return tmp_path / "local"


def test_a_finished_store_is_uploaded_once(relay, s3, store):
    (store / ".hidden").write_text("mine")
    (store / "train" / "shard_00009.bin.partial").write_text("mine")
    events = []
    first = upload_store(store, "s3://bucket/a/", progress=events.append)
    (store / ".hidden").unlink()
    (store / "train" / "shard_00009.bin.partial").unlink()
    objects = read_objects(s3, "a")
    assert {name: (store / name).read_bytes() for name in objects} == objects
    assert_same(objects, store)
    assert relay.puts()[-1] == "/bucket/a/dataset_metadata.json"
    assert (first.path, first.files, first.bytes) == ("s3://bucket/a", len(objects), sum(map(len, objects.values())))
    assert first.sent_bytes == first.bytes == events[-1].bytes_done == events[-1].bytes_total
    assert events[-1].documents == len(open_store(store))
    relay.requests.clear()
    assert upload_store(store, "s3://bucket/a").sent_bytes == 0
    assert relay.puts() == []


def test_an_upload_goes_on_and_replaces_changed_objects(memory, store, tmp_path):
    upload_store(store, "memory://bucket/a")
    memory.rm("/bucket/a/dataset_metadata.json")
    memory.rm("/bucket/a/report.json")
    name = "train/shard_00000.bin"
    memory.pipe(f"/bucket/a/{name}", bytes(memory.size(f"/bucket/a/{name}")))
    result = upload_store(store, "memory://bucket/a")
    sent = ("dataset_metadata.json", "report.json", name)
    assert result.sent_bytes == sum((store / name).stat().st_size for name in sent)
    assert_same(read_files(memory, "a"), store)


def test_an_upload_onto_something_else_is_refused(memory, store, tmp_path, input_file):
    prepare(input_file, out=tmp_path / "other", dtype="int32", **PREPARE_OPTIONS)
    upload_store(tmp_path / "other", "memory://bucket/a")
    before = read_files(memory, "a")
    with pytest.raises(
        StoreConflictError, match="memory://bucket/a holds another store, or another generation of this one"
    ):
        upload_store(store, "memory://bucket/a")
    assert read_files(memory, "a") == before
    memory.pipe("/bucket/b/notes.txt", b"mine")
    with pytest.raises(StoreConflictError, match="memory://bucket/b is not empty .notes.txt.*choose another URL"):
        upload_store(store, "memory://bucket/b")
    assert list_files(memory, "b") == ["notes.txt"]


def test_a_store_that_changes_during_its_upload_is_no_store(memory, store, tmp_path, input_file):
    prepare(input_file, out=tmp_path / "other", dtype="int32", **PREPARE_OPTIONS)

    def replace_manifest(_event):
        shutil.copy(tmp_path / "other" / "dataset_metadata.json", store)

    with pytest.raises(StoreConflictError, match="local was changed during its upload; give the command again"):
        upload_store(store, "memory://bucket/a", progress=replace_manifest)
    assert "dataset_metadata.json" not in list_files(memory, "a")


def test_a_store_that_lacks_a_file_is_not_uploaded(memory, store):
    (store / "train" / "shard_00000.bin").unlink()
    with pytest.raises(StoreError, match=r"lacks train/shard_00000.bin. Run batchloom check on the store"):
        upload_store(store, "memory://bucket/a")
    assert list_files(memory, "a") == []


def test_a_subset_may_be_a_link(memory, store, tmp_path):
    shutil.move(store / "train", tmp_path / "elsewhere")
    (store / "train").symlink_to(tmp_path / "elsewhere")
    upload_store(store, "memory://bucket/a")
    assert "train/shard_00000.bin" in list_files(memory, "a")


def test_another_upload_to_the_same_folder_is_noticed(memory, store):
    manifest_bytes = (store / "dataset_metadata.json").stat().st_size

    def replace_file(event):
        # Earlier, the verification of the upload itself could meet the other file.
        if event.bytes_done == event.bytes_total - manifest_bytes:
            memory.pipe_file("/bucket/a/train/shard_00000.bin", b"another")

    with pytest.raises(StoreConflictError, match="is not the file that was sent: another upload changes this folder"):
        upload_store(store, "memory://bucket/a", progress=replace_file)
    assert "dataset_metadata.json" not in list_files(memory, "a")


def test_a_manifest_that_a_killed_upload_left_in_part_is_sent_again(memory, store):
    manifest = (store / "dataset_metadata.json").read_bytes()
    memory.pipe_file("/bucket/a/dataset_metadata.json", manifest[:100])
    upload_store(store, "memory://bucket/a")
    assert memory.cat_file("/bucket/a/dataset_metadata.json") == manifest


def test_restart_replaces_a_local_store_that_was_not_sent(memory, input_file, monkeypatch):
    def fail(*_):
        raise OutputError("no network")

    with monkeypatch.context() as patch:
        patch.setattr(remote_prepare, "send_store", fail)
        with pytest.raises(OutputError, match="no network"):
            prepare(input_file, out="memory://bucket/a", **PREPARE_OPTIONS)
    with pytest.raises(StoreConflictError, match="holds a finished store of another job"):
        prepare(input_file, out="memory://bucket/a", **PREPARE_OPTIONS | {"dtype": "int32"})
    prepare(input_file, out="memory://bucket/a", restart=True, **PREPARE_OPTIONS | {"dtype": "int32"})
    assert open_store("memory://bucket/a").manifest.dtype == "int32"


def test_what_is_no_finished_store_is_not_uploaded(memory, store, tmp_path):
    for path, kind in (
        (tmp_path / "nothing", StoreMissingError),
        (tmp_path, StoreMissingError),
        (store / "train" / "shard_00000", StoreMissingError),
        ("s3://bucket/a", InputError),
    ):
        with pytest.raises(kind):
            upload_store(path, "memory://bucket/a")
    (store / "dataset_metadata.json").write_text("{}")
    with pytest.raises(StoreError, match="is not a manifest"):
        upload_store(store, "memory://bucket/a")
    with pytest.raises(InputError, match="elsewhere is no URL; write scheme://bucket/prefix"):
        RemoteFolder("elsewhere")
    assert list_files(memory, "a") == []


def test_the_command_uploads(memory, store, capsys):
    assert run_command_line(["upload", str(store), "memory://bucket/a"]) == 0
    assert "memory://bucket/a: " in capsys.readouterr().out
    assert run_command_line(["upload", str(store), "memory://bucket/a"]) == 0
    assert "memory://bucket/a holds this store already" in capsys.readouterr().out
    assert run_command_line(["upload", str(store / "train"), "memory://bucket/b"]) == 1
    assert "is a subset of a store" in capsys.readouterr().err
