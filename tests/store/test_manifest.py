"""The manifest's checksum: changed manifests and manifests without it are refused."""

import json
import os
import random
import resource
import time

import msgspec
import pytest
import xxhash

import batchloom
from batchloom import InputError, StoreError, check, open_store
from batchloom.cli import run_command_line
from batchloom.store import read_manifest, remove_documents
from batchloom.testing import append_documents, write_store
from preparation.s3_relay import Fault
from sources.web_server import Handler, Web, serve
from store.manifest_edits import edit_manifest
from store.remote_stores import copy_to_bucket, relay_bucket

NAME = "dataset_metadata.json"
DOCUMENTS = {"train": [[72, 105, 256], [256], [1, 2, 3, 4, 256]], "val": [[7, 256]]}
TRAINED = {"train": [[0, 1, 1], [1], [0, 0, 1, 1, 1]]}
SINGLE_RANK = {"seq_len": 4, "global_batch_size": 2, "output": "numpy", "rank": 0, "world_size": 1}


@pytest.fixture
def folder(tmp_path):
    """A store of three generations with masked and removed documents."""
    write_store(tmp_path / "store", DOCUMENTS, trained=TRAINED, documents_per_shard=2)
    append_documents(tmp_path / "store", [[9, 256], [10, 11, 256]], source="more")
    remove_documents(tmp_path / "store", sources=["more"])
    return tmp_path / "store"


def iter_leaves(value, path=()):
    """Iterate over the paths and values of all scalars in a JSON value."""
    if not isinstance(value, dict | list):
        yield path, value
        return
    for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield from iter_leaves(inner, (*path, name))


def change_value(value):
    """Return another value of the same type."""
    if value is None:
        return 1
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return value[:-1] + ("0" if value[-1:] != "0" else "1")
    return value + 1


def encode_formatted(manifest):
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def test_the_checksum_covers_the_file_without_it(folder):
    for path in (folder / NAME, *folder.glob("generations/*")):
        data = path.read_bytes()
        *before, last, closing = data.splitlines(keepends=True)
        fields = b"".join(before)
        assert last == b' "checksum": "%s"\n' % json.loads(data)["checksum"].encode()
        without = fields.removesuffix(b",\n") + b"\n" + closing
        assert json.loads(data)["checksum"] == xxhash.xxh3_128_hexdigest(without)


def test_a_change_of_any_field_is_refused(folder):
    manifest_path = folder / NAME
    original = json.loads(manifest_path.read_text())
    assert encode_formatted(original) == manifest_path.read_bytes()
    leaves = list(iter_leaves(original))
    assert len(leaves) > 100
    for path, value in leaves:
        changed = json.loads(json.dumps(original))
        inner = changed
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = change_value(value)
        (folder / NAME).write_bytes(encode_formatted(changed))
        with pytest.raises(StoreError, match=f"{NAME} (was changed or damaged|has format_version)"):
            open_store(folder)
    manifest_path.write_bytes(encode_formatted(original))
    assert open_store(folder).end_id == 256


def test_a_change_of_an_older_generation_is_refused(folder):
    path = folder / "generations/00001.json"
    path.write_bytes(path.read_bytes().replace(b'"end_id": 256', b'"end_id": 255'))
    assert open_store(folder).location.generation == 3
    with pytest.raises(StoreError, match="00001.json is not the manifest of that generation"):
        open_store(folder, generation=1)


@pytest.mark.parametrize("seed", range(4))
def test_a_manifest_with_any_byte_changed_or_cut_short_is_refused(folder, seed):
    path, rng = folder / NAME, random.Random(seed)
    data = path.read_bytes()
    for _ in range(100):
        at = rng.randrange(len(data))
        changed = bytearray(data)
        changed[at] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(StoreError, match=NAME):
            open_store(folder)
        path.write_bytes(data[:at])
        with pytest.raises(StoreError, match=NAME):
            open_store(folder)


def test_a_manifest_in_another_form_is_refused(folder):
    path = folder / NAME
    path.write_text(json.dumps(json.loads(path.read_text())))
    with pytest.raises(StoreError, match="its checksum is missing, and its content has .*; restore it from a"):
        open_store(folder)


@pytest.mark.parametrize("name", [NAME, "generations/00001.json"])
def test_a_manifest_without_checksum_is_refused(folder, name):
    manifest = json.loads((folder / name).read_text())
    del manifest["checksum"]
    (folder / name).write_bytes(encode_formatted(manifest))
    with pytest.raises(StoreError, match="its checksum is missing, and its content has .*; restore it from a"):
        open_store(folder, generation=None if name == NAME else 1)


SIZES = "--seq-len 8 --global-batch-size 2"
COMMANDS = (
    "check {}",
    "inspect {}",
    f"plan {{}} {SIZES}",
    f"explain {{}} {SIZES} --step 0",
    f"when {{}} {SIZES} --document 0",
    "log {}",
    "export {} --to flat --out {}-out",
    "remove {} --source given",
    "compact {}",
    "prepare {}/in.txt --out {} --append",
    f"train --data {{}} {SIZES} --max-iters 1",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_a_changed_manifest(folder, capsys, command):
    (folder / "in.txt").write_text("More.")
    path = folder / NAME
    path.write_bytes(path.read_bytes().replace(b'"end_id": 256', b'"end_id": 255'))
    before = path.read_bytes()
    assert run_command_line(command.replace("{}", str(folder)).split()) != 0
    output = "".join(capsys.readouterr())
    assert "dataset_metadata.json was changed or damaged: its checksum is" in output.replace("\n", " ")
    assert "restore it from a copy, or prepare the data again" in output.replace("\n", " ")
    assert path.read_bytes() == before


def test_a_manifest_of_a_gigabyte_is_refused_at_once(folder):
    os.truncate(folder / NAME, 1_000_000_000)
    peak, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(StoreError, match="1,000,000,000 bytes, and at most 536,870,912 are read"):
        open_store(folder)
    assert time.process_time() - started < 0.5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 64 << 10  # KiB


def test_a_manifest_of_very_many_values_is_refused_before_it_is_parsed(folder):
    data = b'{"format_version": 1, "recipe": {"x": [' + b"[]," * 20_000_000 + b"0]}}"
    (folder / NAME).write_bytes(data)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(StoreError, match="has more than 33,554,432 values"):
        open_store(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 256 << 10  # KiB


class DamagingHandler(Handler):
    """Changes a byte of the first responses that hold a manifest."""

    sound_responses = damaged_responses = 0

    def send(self, web, path, *, body):
        if path.endswith(NAME) and DamagingHandler.sound_responses:
            DamagingHandler.sound_responses -= 1
            super().send(web, path, body=body)
        elif path.endswith(NAME) and DamagingHandler.damaged_responses:
            DamagingHandler.damaged_responses -= 1
            sound = web.files[path]
            web.files[path] = sound.replace(b'"end_id": 256', b'"end_id": 255')
            super().send(web, path, body=body)
            web.files[path] = sound
        else:
            super().send(web, path, body=body)


@pytest.fixture
def web(folder):
    web = Web()
    for path in folder.rglob("*"):
        if path.is_file():
            web.files[f"/store/{path.relative_to(folder)}"] = path.read_bytes()
    return web


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(open_store, id="open"),
        pytest.param(check, id="check", marks=pytest.mark.slow),
        pytest.param(lambda url: open_store(url, generation=1), id="older", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("times", [2, 99])
def test_a_manifest_damaged_in_transit_is_fetched_again(web, operation, times, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    DamagingHandler.damaged_responses = times
    with serve(DamagingHandler, web=web):
        try:
            result = operation(f"{web.url}/store")
        except StoreError as error:
            result = error
    message = f"/store/{NAME} was changed or damaged: its checksum is"
    if times == 2:
        assert not isinstance(result, StoreError)
        assert result.sound if operation is check else result.end_id == 256
    else:
        assert message in (result.faults[0] if operation is check else str(result))
        manifest_requests = [request for request in web.requests if request[1].endswith(NAME)]
        assert len(manifest_requests) == (6 if operation is check else 3)


@pytest.mark.slow
def test_a_manifest_damaged_while_check_copies_it_is_fetched_again(web, monkeypatch):
    # The manifest is read twice, then its size and version are requested, then it is copied.
    monkeypatch.setattr(DamagingHandler, "sound_responses", 3)
    monkeypatch.setattr(DamagingHandler, "damaged_responses", 1)
    with serve(DamagingHandler, web=web):
        result = check(f"{web.url}/store")
    assert result.sound, result.faults
    assert DamagingHandler.damaged_responses == 0


@pytest.mark.slow
def test_a_manifest_damaged_on_its_way_from_a_bucket_is_fetched_again(s3, folder, tmp_path):
    url = copy_to_bucket(s3, folder)
    with relay_bucket(s3) as relay:
        relay.faults = [
            Fault("flip answer", "GET", NAME, times=2),
            Fault("flip answer", "GET", "generations/00002", times=2),
        ]
        store = open_store(url, cache=tmp_path / "cache", generation=2)
        assert store.fingerprint == open_store(folder, generation=2).fingerprint
        assert not any(fault.times for fault in relay.faults)


def test_a_large_manifest_is_fetched_and_a_larger_one_is_refused(web, folder, tmp_path, monkeypatch):
    """Beyond 8 MiB the size is requested before the remaining bytes."""
    manifest = read_manifest(folder)
    edit_manifest(folder, lambda m: m["recipe"].update(long="x" * (9 << 20)))
    data = (folder / NAME).read_bytes()
    web.files[f"/store/{NAME}"] = data
    with serve(web=web):
        store = open_store(f"{web.url}/store", cache=tmp_path / "cache")
        assert store.manifest.subsets == manifest.subsets
        monkeypatch.setattr("batchloom.store.read.remote_store.SMALL_FILE_LIMIT", 8 << 20)
        web.requests.clear()
        with pytest.raises(StoreError, match="bytes, and at most 8,388,608 are read; check the address"):
            open_store(f"{web.url}/store", cache=tmp_path / "cache")
    assert [request[2] for request in web.requests] == ["bytes=0-8388607", "bytes=0-0"]


def test_inputs_with_a_too_large_manifest_are_refused_at_once(tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    for number in range(5):
        (tmp_path / f"in/{number}.txt").write_text(f"Text {number}.")
    settings = {"tokenizer": "bytes", "workers": 1}
    monkeypatch.setattr("batchloom.preparation.input_jobs.SMALL_FILE_LIMIT", 1000)
    with pytest.raises(InputError, match="5 input files make a manifest of more than 1,000 bytes"):
        batchloom.prepare(tmp_path / "in", out=tmp_path / "out", **settings)
    monkeypatch.undo()
    # Without that check, writing the manifest itself is refused.
    monkeypatch.setattr("batchloom.store.format.manifest.SMALL_FILE_LIMIT", 1000)
    with pytest.raises(StoreError, match="would have .* bytes; the limit is 1,000"):
        batchloom.prepare(tmp_path / "in", out=tmp_path / "out", **settings)
    assert not (tmp_path / "out" / NAME).exists()
