"""Generations: stores that grow by new manifests over files that never change."""

import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

import batchloom
from batchloom import InputError, SettingsError, StateError, StoreError, check, open_store
from batchloom.core.errors import GenerationError, StoreConflictError, StoreMissingError
from batchloom.store import (
    MANIFEST_NAME,
    WORK_NAME,
    PartEntry,
    add_generation,
    compact_store,
    encode_manifest,
    extend_manifest,
    iter_shard_documents,
    lock_store,
    read_log,
    read_manifest,
    remove_documents,
)
from batchloom.testing import append_documents, write_store
from store.manifest_edits import edit_manifest

FIRST = {"train": [[1, 2, 256], [3, 256], [4, 5, 6, 256]], "val": [[7, 256]]}
SECOND = {"train": [[8, 9, 256], [10, 256]], "test": [[11, 12, 256]]}


def read_contents(folder, generation=None):
    """Read every document of a generation, by subset."""
    manifest = read_manifest(folder, generation)
    stores = {name: open_store(folder, name, generation=generation) for name in manifest.subsets}
    return {name: [document.ids.tolist() for document in store] for name, store in stores.items()}


def read_tree(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file() and not path.name.startswith("report")
    }


@pytest.fixture
def grown_store(tmp_path):
    """A store of two generations."""
    write_store(tmp_path / "s", FIRST, documents_per_shard=2)
    append_documents(tmp_path / "s", SECOND, documents_per_shard=1)
    return tmp_path / "s"


def test_appended_documents_follow_the_old_ones(grown_store):
    expected = {"train": FIRST["train"] + SECOND["train"], "val": FIRST["val"], "test": SECOND["test"]}
    assert read_contents(grown_store) == {name: expected[name] for name in ("train", "val", "test")}
    assert read_contents(grown_store, 1) == FIRST
    store = open_store(grown_store)
    assert (store.location.generation, store.lengths.layers) == (2, (3, 2))
    assert [store.provenance.of(n).source for n in range(5)] == ["given"] * 3 + ["appended"] * 2
    assert check(grown_store).sound, check(grown_store).faults
    assert check(grown_store, generation=1).sound


def test_golden_bytes_of_a_second_generation(tmp_path):
    """Names and bytes of docs/reference/format.md. A change here needs a new format_version."""
    write_store(tmp_path, FIRST, documents_per_shard=2)
    before = read_tree(tmp_path)
    append_documents(tmp_path, SECOND, documents_per_shard=1)
    remove_documents(tmp_path, sources=["given"])
    after = read_tree(tmp_path)
    new_files = {name: data for name, data in after.items() if name not in before}
    assert sorted(new_files) == [
        "generations/00001.json",
        "generations/00002.json",
        "test/lengths.00002.sums",
        "test/lengths.00002.u32",
        "test/shard_00000.bin",
        "test/shard_00000.docs",
        "test/shard_00000.idx",
        "test/shard_00000.sums",
        "train/lengths.00002.sums",
        "train/lengths.00002.u32",
        "train/removed.00003.u64",
        "train/shard_00002.bin",
        "train/shard_00002.docs",
        "train/shard_00002.idx",
        "train/shard_00002.sums",
        "train/shard_00003.bin",
        "train/shard_00003.docs",
        "train/shard_00003.idx",
        "train/shard_00003.sums",
        "val/removed.00003.u64",
    ]
    # Every file except the manifest is unchanged, and the old manifest is archived unchanged.
    assert {name: after[name] for name in before if name != MANIFEST_NAME} == {
        name: data for name, data in before.items() if name != MANIFEST_NAME
    }
    assert new_files["generations/00001.json"] == before[MANIFEST_NAME]
    assert new_files["train/lengths.00002.u32"] == np.array([3, 2], "<u4").tobytes()
    head = b"BLMGONE\x00" + np.array([1, 3, 0], "<u8").tobytes()
    assert new_files["train/removed.00003.u64"] == head + np.array([0, 1, 2], "<u8").tobytes()
    manifest = json.loads(after[MANIFEST_NAME])
    train = manifest["subsets"]["train"]
    assert [(entry["generation"], entry["documents"]) for entry in train["layers"]] == [(1, 3), (2, 2)]
    removed = train["removed"]
    assert (removed["generation"], removed["documents"], removed["tokens"], removed["trained"]) == (3, 3, 9, 9)
    changes = [(entry["number"], entry["made"]) for entry in manifest["history"]]
    assert changes == [(1, "prepared"), (2, "appended"), (3, "removed")]
    assert manifest["history"][1]["documents"] == {"train": 5, "val": 1, "test": 1}
    import jsonschema

    schema = json.loads((Path(__file__).parents[2] / "docs/reference/manifest.schema.json").read_text())
    jsonschema.validate(manifest, schema)


def test_a_store_of_one_generation_has_no_generation_fields(tmp_path):
    write_store(tmp_path, FIRST)
    text = (tmp_path / MANIFEST_NAME).read_text()
    assert not {"history", "layers", "removed"} & set(json.loads(text)) | (
        {"layers", "removed"} & set(json.loads(text)["subsets"]["train"])
    )
    assert [entry.made for entry in read_log(tmp_path)] == ["prepared"]


def test_later_generations_do_not_change_a_fingerprint(tmp_path):
    first = write_store(tmp_path, FIRST).fingerprint
    second = append_documents(tmp_path, SECOND).fingerprint
    remove_documents(tmp_path, sources=["appended"])
    fingerprints = [open_store(tmp_path, generation=number).fingerprint for number in (1, 2, 3)]
    assert fingerprints[:2] == [first, second]
    assert len(set(fingerprints)) == 3
    assert open_store(tmp_path).fingerprint == fingerprints[2]
    assert [entry.fingerprints["train"] for entry in read_log(tmp_path)] == fingerprints


def test_a_pickled_store_keeps_its_generation(tmp_path):
    store = write_store(tmp_path, FIRST)
    data = pickle.dumps(store)
    append_documents(tmp_path, SECOND)
    unpickled = pickle.loads(data)
    assert (unpickled.location.generation, len(unpickled), unpickled.fingerprint) == (1, 3, store.fingerprint)
    assert pickle.loads(pickle.dumps(open_store(tmp_path, "test"))).location.generation == 2


@pytest.mark.parametrize(
    ("generation", "error", "message"),
    [
        (3, GenerationError, "has no generation 3; it has: 1, 2"),
        (0, GenerationError, "has no generation 0"),
        ("two", SettingsError, "generation: 'two' is not the number"),
    ],
)
def test_a_missing_generation(grown_store, generation, error, message):
    with pytest.raises(error, match=message):
        open_store(grown_store, generation=generation)


def test_only_stores_have_generations(tmp_path, grown_store):
    with pytest.raises(SettingsError, match="only stores have generations"):
        open_store("dummy", generation=1)
    with pytest.raises(SettingsError, match="only stores have generations"):
        open_store(grown_store / "train/shard_00000", generation=1)
    with pytest.raises(StoreMissingError):
        open_store(tmp_path / "nothing", generation=1)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(SettingsError, match="only stores have generations"):
        check(tmp_path / "a.txt", generation=1)


def test_a_loader_on_an_older_generation_is_unaffected(tmp_path):
    settings = {"seq_len": 8, "global_batch_size": 2, "output": "numpy", "rank": 0, "world_size": 1}
    documents = [[n + 1] * (n % 7 + 1) for n in range(60)]
    store = write_store(tmp_path, documents, documents_per_shard=10)
    loader = batchloom.Loader(store, **settings)
    expected = [batch["input_ids"].tolist() for batch in loader]
    loader = batchloom.Loader(store, **settings)
    steps = iter(loader)
    for _ in range(3):
        next(steps)
    state = loader.state_dict()
    append_documents(tmp_path, [[200] * 5] * 30)
    remove_documents(tmp_path, sources=["given"])
    older = batchloom.Loader(open_store(tmp_path, generation=1), **settings)
    older.load_state_dict(json.loads(json.dumps(state)))
    assert [batch["input_ids"].tolist() for batch in older] == expected[3:]
    newer = batchloom.Loader(open_store(tmp_path), **settings)
    with pytest.raises(
        StateError,
        match=r"made on generation 1 of .* generation 3 is open. .*generation=1, removals=3\)",
    ):
        newer.load_state_dict(state)
    compact_store(tmp_path)
    newest = batchloom.Loader(open_store(tmp_path), **settings)
    with pytest.raises(GenerationError, match="Generation 1 .* was compacted away when generation 4"):
        newest.load_state_dict(state)


def test_hashes_and_parts_of_remaining_documents(grown_store):
    remove_documents(grown_store, documents_file=write_list(grown_store, "train:1", "train:3"))
    ranges = list(iter_shard_documents(grown_store))
    hashes = np.concatenate([document_range.hashes for document_range in ranges])
    parts = np.concatenate([document_range.parts for document_range in ranges])
    assert parts.tolist() == [0, 0, 1, 0, 1]
    remaining = [("train", 0), ("train", 2), ("train", 4), ("val", 0), ("test", 0)]
    expected = [open_store(grown_store, name).provenance.of(n).hash for name, n in remaining]
    assert [f"{(int(h) << 64) | int(low):032x}" for low, h in hashes] == expected


def write_list(folder, *lines):
    path = folder.parent / "list.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_job_started_on_another_generation_is_refused(tmp_path, grown_store):
    copy = tmp_path / "copy"
    shutil.copytree(grown_store, copy)
    base = read_manifest(copy, 1)
    stale = extend_manifest(base, replace(base, subsets={}))
    with pytest.raises(StoreConflictError, match="is now generation 2, and was another"):
        add_generation(copy, stale, staged=tmp_path)
    assert read_tree(copy) == read_tree(grown_store)


def test_a_job_of_another_tokenizer_is_refused(grown_store, tmp_path):
    base = read_manifest(grown_store)
    changed = replace(base, tokenizer=replace(base.tokenizer, fingerprint="f"))
    with pytest.raises(StoreConflictError, match="a store has only one tokenizer"):
        extend_manifest(base, changed)


def test_a_generation_with_missing_files_is_refused(grown_store, tmp_path):
    base = read_manifest(grown_store)
    train = base.subsets["train"]
    added = replace(
        base,
        subsets={
            "train": replace(
                train,
                documents=1,
                tokens=2,
                layers=(),
                shards=(replace(train.shards[0], name="shard_00009", documents=1, tokens=2, bytes=4),),
            )
        },
        sources=base.sources[:1],
    )
    before = read_tree(grown_store)
    with pytest.raises(StoreConflictError, match="lengths.00003.sums is missing"):
        add_generation(grown_store, extend_manifest(base, added), staged=tmp_path)
    assert read_tree(grown_store) == before


def test_adding_the_same_generation_again_changes_nothing(grown_store, tmp_path):
    before = read_tree(grown_store)
    (grown_store / "train/shard_00099.bin").write_bytes(b"left over")
    add_generation(grown_store, read_manifest(grown_store), staged=tmp_path)
    assert read_tree(grown_store) == before


def test_concurrent_changes_of_a_store_are_refused(grown_store):
    changes = (
        lambda: compact_store(grown_store),
        lambda: remove_documents(grown_store, sources=["given"]),
    )
    for change in changes:
        with lock_store(grown_store), pytest.raises(StoreConflictError, match="Another run is changing"):
            change()
    (grown_store / WORK_NAME).mkdir()
    for change in changes:
        with pytest.raises(StoreConflictError, match="holds an unfinished job"):
            change()
    assert remove_documents(grown_store, sources=["given"], dry_run=True).documents == 4


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: (s / "generations/00001.json").unlink(), "00001.json is missing"),
        (
            lambda s: (s / "generations/00001.json").write_bytes((s / "generations/00002.json").read_bytes()),
            "is not the manifest of that generation",
        ),
        (lambda s: (s / "train/removed.00003.u64").unlink(), "removed.00003.u64 cannot be read"),
        (
            lambda s: (s / "train/removed.00003.u64").write_bytes(
                (s / "train/removed.00003.u64").read_bytes()[:-8] + bytes([1]) + bytes(7)
            ),
            "checksum differs",
        ),
        (lambda s: (s / "train/lengths.00002.u32").write_bytes(bytes(8)), "checksum differs"),
        (lambda s: (s / "train/lengths.00002.u32").write_bytes(b""), "has 0 bytes"),
    ],
)
def test_check_finds_damage(grown_store, damage, message):
    remove_documents(grown_store, documents_file=write_list(grown_store, "train:4"))
    assert check(grown_store).sound
    damage(grown_store)
    faults = check(grown_store).faults
    assert any(message in fault for fault in faults), faults


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(generation=3), "it is generation 3"),
        (lambda m: m.update(history=[]), "generation 2 but has no history"),
        (lambda m: m.update(generation=1 << 40), r"has the generations \[1, 2\], but it is"),
        (lambda m: m["subsets"]["train"]["layers"][0].update(documents=1), "ends inside a shard"),
        (lambda m: m["subsets"]["train"]["layers"].pop(), "in its layers, but declares"),
        (
            lambda m: m["subsets"]["train"]["layers"][1].update(generation=1),
            r"layers of generations \[1, 1\]",
        ),
        (
            lambda m: m["subsets"]["train"]["layers"][1].update(generation=7),
            "layers of generations",
        ),
        (
            lambda m: m["subsets"]["train"].update(
                removed={
                    "generation": 2,
                    "documents": 9,
                    "tokens": 1,
                    "trained": 1,
                    "file": "0" * 32,
                }
            ),
            "declares 9 removed documents out of 5",
        ),
    ],
)
def test_contradictory_manifests_are_refused(grown_store, change, message):
    edit_manifest(grown_store, change)
    with pytest.raises(StoreError, match=message):
        open_store(grown_store)


def test_check_compares_the_history(grown_store):
    edit_manifest(grown_store, lambda m: m["history"][1]["tokens"].update(train=99))
    assert "history contradicts the manifest of generation 2 (tokens)" in "\n".join(check(grown_store).faults)


def append(folder):
    append_documents(folder, [[8, 9, 256], [10, 256]] * 6, documents_per_shard=5)


def remove(folder):
    remove_documents(folder, sources=["given"])


def run_killed(step, change, folder):
    """Run a change in a process that kills itself at its step-th disk operation.

    Returns whether the change finished first.
    """
    child = os.fork()
    if not child:
        remaining = [step]

        def touch(event, _):
            if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"):
                remaining[0] -= 1
                if not remaining[0]:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(touch)
        change(folder)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return status == 0


@dataclass
class KilledChange:
    """One change of one store, killed at any step and then completed."""

    folder: Path
    change: Callable
    generation: int
    before: dict
    after: dict
    tree: dict

    def kill_at(self, step):
        """Kill the change at a step, check the store and complete the change.

        Returns the generation after the kill, and whether the change had finished.
        """
        folder = self.folder / "try"
        shutil.copytree(self.folder / "seed", folder)
        finished = run_killed(step, self.change, folder)
        number = read_manifest(folder).generation
        assert number in (self.generation, self.generation + 1)
        assert read_contents(folder) == (self.before if number == self.generation else self.after)
        assert check(folder).sound
        shutil.rmtree(folder / WORK_NAME, ignore_errors=True)
        if number == self.generation or self.change is compact_store:
            self.change(folder)
        else:
            # The next change deletes the leftovers of this one.
            add_generation(folder, read_manifest(folder), staged=folder)
        assert read_tree(folder) == self.tree
        shutil.rmtree(folder)
        return number, finished


CHANGES = [append, *(pytest.param(change, marks=pytest.mark.slow) for change in (remove, compact_store))]


@pytest.fixture(params=CHANGES)
def killed_change(request, tmp_path):
    seed, change = tmp_path / "seed", request.param
    documents = {"train": [[n % 200, 256] for n in range(20)], "val": [[1, 256]]}
    write_store(seed, documents, documents_per_shard=10)
    if change is compact_store:
        append_documents(seed, {"train": [[8, 256]] * 9}, documents_per_shard=4)
        remove_documents(seed, documents_file=write_list(seed, "train:0", "train:7", "train:22"))
    undisturbed = tmp_path / "undisturbed"
    shutil.copytree(seed, undisturbed)
    change(undisturbed)
    return KilledChange(
        folder=tmp_path,
        change=change,
        generation=read_manifest(seed).generation,
        before=read_contents(seed),
        after=read_contents(undisturbed),
        tree=read_tree(undisturbed),
    )


def test_a_killed_change_leaves_the_old_generation_or_the_new(killed_change):
    """Bisect for the step that commits the next generation."""
    old, new = 0, 160
    number, finished = killed_change.kill_at(new)
    assert (number, finished) == (killed_change.generation + 1, True)
    while new - old > 1:
        step = (old + new) // 2
        number, now_finished = killed_change.kill_at(step)
        if number == killed_change.generation:
            old = step
        else:
            new, finished = step, now_finished
    # The step that commits it is not the last one.
    assert not finished
    assert old > 20


@pytest.mark.slow
def test_a_change_killed_at_any_step_leaves_the_old_generation_or_the_new(killed_change):
    generations = []
    for step in range(1, 1000):
        number, finished = killed_change.kill_at(step)
        generations.append(number)
        if finished:
            break
    assert finished
    # Kills happened both before and after the step that commits the next generation.
    assert generations == sorted(generations)
    assert set(generations[:-1]) == {killed_change.generation, killed_change.generation + 1}
    assert len(generations) > 20


@pytest.mark.slow
def test_a_change_killed_at_random_moments_is_completed_by_repeating_it(tmp_path):
    """Run the change in another process, as the command line does."""
    write_store(tmp_path / "s", [[n % 200, 256] for n in range(200)], documents_per_shard=2)
    remove_documents(
        tmp_path / "s",
        documents_file=write_list(tmp_path / "s", *(f"train:{n}" for n in range(0, 200, 2))),
    )
    before = read_contents(tmp_path / "s")
    command = [
        sys.executable,
        "-c",
        f"from batchloom.store import compact_store; print('begun', flush=True); compact_store({str(tmp_path / 's')!r})",
    ]
    rng = random.Random(0)
    for _ in range(6):
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            time.sleep(rng.uniform(0, 0.1))
            process.kill()
        if read_manifest(tmp_path / "s").generation == 2:
            assert read_contents(tmp_path / "s") == before
        assert check(tmp_path / "s").sound
    compact_store(tmp_path / "s")
    assert read_contents(tmp_path / "s") == {"train": [ids for ids in before["train"] if ids != [256, 256]]}
    assert sorted(p.name for p in (tmp_path / "s/train").iterdir() if p.suffix == ".bin") == [
        f"shard_{n:05d}.bin" for n in range(100, 200)
    ]
    assert not list((tmp_path / "s").rglob("*.partial"))


def test_the_old_manifest_is_archived_unchanged(grown_store):
    base = read_manifest(grown_store, 1)
    assert encode_manifest(base) == (grown_store / "generations/00001.json").read_bytes()


def test_an_empty_append_makes_a_generation_of_the_same_documents(grown_store, tmp_path):
    base = read_manifest(grown_store)
    source = replace(base.sources[0], name="more", documents=0, tokens=0, parts=(PartEntry(0, 9, 3),))
    counts = replace(base.counts, records=3, documents=0, tokens=0, dropped={"exact": 2}, quarantined=1)
    (tmp_path / "quarantine.00003.jsonl").write_text("{}\n")
    (tmp_path / "report.00003.json").write_text('{"started": "today"}')
    added = replace(base, subsets={}, sources=(source,), counts=counts)
    add_generation(grown_store, extend_manifest(base, added), staged=tmp_path)
    assert read_contents(grown_store) == read_contents(grown_store, 2)
    assert [entry.when for entry in read_log(grown_store)] == ["", "", "today"]
    assert check(grown_store).sound, check(grown_store).faults
    assert open_store(grown_store).fingerprint == open_store(grown_store, generation=2).fingerprint
    assert open_store(grown_store).lengths.layers == (3, 2)
    # Quarantine files document rejected records and survive a compaction.
    compact_store(grown_store)
    assert check(grown_store).sound, check(grown_store).faults
    assert (grown_store / "quarantine.00003.jsonl").exists()
    (grown_store / "quarantine.00003.jsonl").unlink()
    assert "1 quarantined records, its quarantine files have 0" in "\n".join(check(grown_store).faults)


def test_a_subset_missing_from_an_older_generation(grown_store):
    with pytest.raises(InputError, match="has no documents in subset 'test'; it has: train, val"):
        open_store(grown_store, "test", generation=1)
