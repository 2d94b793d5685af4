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
from store.test_damaged_stores import edit_manifest

FIRST = {"train": [[1, 2, 256], [3, 256], [4, 5, 6, 256]], "val": [[7, 256]]}
SECOND = {"train": [[8, 9, 256], [10, 256]], "test": [[11, 12, 256]]}


def contents(folder, generation=None):
    """Every document of a generation, by subset."""
    manifest = read_manifest(folder, generation)
    stores = {name: open_store(folder, name, generation=generation) for name in manifest.subsets}
    return {name: [one.ids.tolist() for one in store] for name, store in stores.items()}


def tree(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file() and not path.name.startswith("report")
    }


@pytest.fixture
def grown(tmp_path):
    """A store of two generations."""
    write_store(tmp_path / "s", FIRST, documents_per_shard=2)
    append_documents(tmp_path / "s", SECOND, documents_per_shard=1)
    return tmp_path / "s"


def test_an_appended_store_has_the_old_documents_under_their_numbers_and_the_new_behind(grown):
    both = {"train": FIRST["train"] + SECOND["train"], "val": FIRST["val"], "test": SECOND["test"]}
    assert contents(grown) == {name: both[name] for name in ("train", "val", "test")}
    assert contents(grown, 1) == FIRST
    store = open_store(grown)
    assert (store.location.generation, store.lengths.layers) == (2, (3, 2))
    assert [store.provenance.of(n).source for n in range(5)] == ["given"] * 3 + ["appended"] * 2
    assert check(grown).sound, check(grown).faults
    assert check(grown, generation=1).sound


def test_golden_bytes_of_a_second_generation(tmp_path):
    """What docs/format.md says of names and bytes; a change here needs a new format_version."""
    write_store(tmp_path, FIRST, documents_per_shard=2)
    before = tree(tmp_path)
    append_documents(tmp_path, SECOND, documents_per_shard=1)
    remove_documents(tmp_path, sources=["given"])
    after = tree(tmp_path)
    new = {name: data for name, data in after.items() if name not in before}
    assert sorted(new) == [
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
    # Every file but the manifest is as it was, and the old manifest is kept as it was.
    assert {name: after[name] for name in before if name != MANIFEST_NAME} == {
        name: data for name, data in before.items() if name != MANIFEST_NAME
    }
    assert new["generations/00001.json"] == before[MANIFEST_NAME]
    assert new["train/lengths.00002.u32"] == np.array([3, 2], "<u4").tobytes()
    head = b"BLMGONE\x00" + np.array([1, 3, 0], "<u8").tobytes()
    assert new["train/removed.00003.u64"] == head + np.array([0, 1, 2], "<u8").tobytes()
    manifest = json.loads(after[MANIFEST_NAME])
    train = manifest["subsets"]["train"]
    assert [(one["generation"], one["documents"]) for one in train["layers"]] == [(1, 3), (2, 2)]
    gone = train["removed"]
    assert (gone["generation"], gone["documents"], gone["tokens"], gone["trained"]) == (3, 3, 9, 9)
    made = [(one["number"], one["made"]) for one in manifest["history"]]
    assert made == [(1, "prepared"), (2, "appended"), (3, "removed")]
    assert manifest["history"][1]["documents"] == {"train": 5, "val": 1, "test": 1}
    import jsonschema

    schema = json.loads((Path(__file__).parents[2] / "docs" / "manifest.schema.json").read_text())
    jsonschema.validate(manifest, schema)


def test_a_store_of_one_generation_says_nothing_of_generations(tmp_path):
    write_store(tmp_path, FIRST)
    text = (tmp_path / MANIFEST_NAME).read_text()
    assert not {"history", "layers", "removed"} & set(json.loads(text)) | (
        {"layers", "removed"} & set(json.loads(text)["subsets"]["train"])
    )
    assert [one.made for one in read_log(tmp_path)] == ["prepared"]


def test_a_fingerprint_is_what_it_was_when_the_generation_was_the_newest(tmp_path):
    first = write_store(tmp_path, FIRST).fingerprint
    second = append_documents(tmp_path, SECOND).fingerprint
    remove_documents(tmp_path, sources=["appended"])
    found = [open_store(tmp_path, generation=number).fingerprint for number in (1, 2, 3)]
    assert found[:2] == [first, second]
    assert len(set(found)) == 3
    assert open_store(tmp_path).fingerprint == found[2]
    assert [one.fingerprints["train"] for one in read_log(tmp_path)] == found


def test_what_is_pickled_stays_of_its_generation(tmp_path):
    store = write_store(tmp_path, FIRST)
    data = pickle.dumps(store)
    append_documents(tmp_path, SECOND)
    again = pickle.loads(data)
    assert (again.location.generation, len(again), again.fingerprint) == (1, 3, store.fingerprint)
    assert pickle.loads(pickle.dumps(open_store(tmp_path, "test"))).location.generation == 2


@pytest.mark.parametrize(
    ("generation", "error", "words"),
    [
        (3, GenerationError, "has no generation 3; it has: 1, 2"),
        (0, GenerationError, "has no generation 0"),
        ("two", SettingsError, "generation: 'two' is not the number"),
    ],
)
def test_a_generation_that_is_not_there(grown, generation, error, words):
    with pytest.raises(error, match=words):
        open_store(grown, generation=generation)


def test_only_stores_have_generations(tmp_path, grown):
    with pytest.raises(SettingsError, match="only stores have generations"):
        open_store("dummy", generation=1)
    with pytest.raises(SettingsError, match="only stores have generations"):
        open_store(grown / "train/shard_00000", generation=1)
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
    whole = [batch["input_ids"].tolist() for batch in loader]
    loader = batchloom.Loader(store, **settings)
    taken = iter(loader)
    for _ in range(3):
        next(taken)
    state = loader.state_dict()
    append_documents(tmp_path, [[200] * 5] * 30)
    remove_documents(tmp_path, sources=["given"])
    older = batchloom.Loader(open_store(tmp_path, generation=1), **settings)
    older.load_state_dict(json.loads(json.dumps(state)))
    assert [batch["input_ids"].tolist() for batch in older] == whole[3:]
    newer = batchloom.Loader(open_store(tmp_path), **settings)
    with pytest.raises(
        StateError,
        match=r"made on generation 1 of .* generation 3 is open. .*generation=1\)",
    ):
        newer.load_state_dict(state)
    compact_store(tmp_path)
    newest = batchloom.Loader(open_store(tmp_path), **settings)
    with pytest.raises(GenerationError, match="Generation 1 .* was compacted away when generation 4"):
        newest.load_state_dict(state)


def test_hashes_and_parts_of_what_is_there(grown):
    remove_documents(grown, documents_file=listed(grown, "train:1", "train:3"))
    found = list(iter_shard_documents(grown))
    hashes = np.concatenate([one.hashes for one in found])
    parts = np.concatenate([one.parts for one in found])
    assert parts.tolist() == [0, 0, 1, 0, 1]
    kept = [("train", 0), ("train", 2), ("train", 4), ("val", 0), ("test", 0)]
    expected = [open_store(grown, name).provenance.of(n).hash for name, n in kept]
    assert [f"{(int(h) << 64) | int(low):032x}" for low, h in hashes] == expected


def listed(folder, *lines):
    path = folder.parent / "list.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_job_that_began_on_another_generation_is_refused(tmp_path, grown):
    copied = tmp_path / "copy"
    shutil.copytree(grown, copied)
    base = read_manifest(copied, 1)
    stale = extend_manifest(base, replace(base, subsets={}))
    with pytest.raises(StoreConflictError, match="is now generation 2, and was another"):
        add_generation(copied, stale, staged=tmp_path)
    assert tree(copied) == tree(grown)


def test_a_job_of_another_tokenizer_is_refused(grown, tmp_path):
    base = read_manifest(grown)
    other = replace(base, tokenizer=replace(base.tokenizer, fingerprint="f"))
    with pytest.raises(StoreConflictError, match="a store has only one tokenizer"):
        extend_manifest(base, other)


def test_missing_files_are_no_generation(grown, tmp_path):
    base = read_manifest(grown)
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
    before = tree(grown)
    with pytest.raises(StoreConflictError, match="lengths.00003.sums is missing"):
        add_generation(grown, extend_manifest(base, added), staged=tmp_path)
    assert tree(grown) == before


def test_adding_the_same_generation_again_is_done_already(grown, tmp_path):
    before = tree(grown)
    (grown / "train/shard_00099.bin").write_bytes(b"left over")
    add_generation(grown, read_manifest(grown), staged=tmp_path)
    assert tree(grown) == before


def test_a_store_is_changed_by_one_at_a_time(grown):
    changes = (
        lambda: compact_store(grown),
        lambda: remove_documents(grown, sources=["given"]),
    )
    for change in changes:
        with lock_store(grown), pytest.raises(StoreConflictError, match="Another run is changing"):
            change()
    (grown / WORK_NAME).mkdir()
    for change in changes:
        with pytest.raises(StoreConflictError, match="holds an unfinished job"):
            change()
    assert remove_documents(grown, sources=["given"], dry_run=True).documents == 4


@pytest.mark.parametrize(
    ("damage", "words"),
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
def test_check_finds_what_is_damaged(grown, damage, words):
    remove_documents(grown, documents_file=listed(grown, "train:4"))
    assert check(grown).sound
    damage(grown)
    faults = check(grown).faults
    assert any(words in fault for fault in faults), faults


@pytest.mark.parametrize(
    ("change", "words"),
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
def test_manifests_that_contradict_themselves_are_refused(grown, change, words):
    edit_manifest(grown, change)
    with pytest.raises(StoreError, match=words):
        open_store(grown)


def test_check_compares_what_the_history_says(grown):
    edit_manifest(grown, lambda m: m["history"][1]["tokens"].update(train=99))
    assert "history contradicts the manifest of generation 2 (tokens)" in "\n".join(check(grown).faults)


def append(folder):
    append_documents(folder, [[8, 9, 256], [10, 256]] * 6, documents_per_shard=5)


def remove(folder):
    remove_documents(folder, sources=["given"])


def killed_at(step, change, folder):
    """Run a change in a process that kills itself before its step-th change of the disk.

    Returns whether it ended before that.
    """
    child = os.fork()
    if not child:
        left = [step]

        def touch(event, _):
            if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"):
                left[0] -= 1
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(touch)
        change(folder)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return status == 0


@dataclass
class KilledChange:
    """One change of one store, killed at any step and then ended."""

    folder: Path
    change: Callable
    generation: int
    before: dict
    after: dict
    tree: dict

    def kill_at(self, step):
        """Kill the change at a step, check the store and end the change.

        Returns the generation that the killed change left, and whether the change had ended.
        """
        folder = self.folder / "try"
        shutil.copytree(self.folder / "seed", folder)
        ended = killed_at(step, self.change, folder)
        number = read_manifest(folder).generation
        assert number in (self.generation, self.generation + 1)
        assert contents(folder) == (self.before if number == self.generation else self.after)
        assert check(folder).sound
        shutil.rmtree(folder / WORK_NAME, ignore_errors=True)
        if number == self.generation or self.change is compact_store:
            self.change(folder)
        else:
            # The next change clears what this one left.
            add_generation(folder, read_manifest(folder), staged=folder)
        assert tree(folder) == self.tree
        shutil.rmtree(folder)
        return number, ended


@pytest.fixture(params=[append, remove, compact_store])
def killed_change(request, tmp_path):
    seed, change = tmp_path / "seed", request.param
    documents = {"train": [[n % 200, 256] for n in range(20)], "val": [[1, 256]]}
    write_store(seed, documents, documents_per_shard=5)
    if change is compact_store:
        append_documents(seed, {"train": [[8, 256]] * 9}, documents_per_shard=4)
        remove_documents(seed, documents_file=listed(seed, "train:0", "train:7", "train:22"))
    undisturbed = tmp_path / "undisturbed"
    shutil.copytree(seed, undisturbed)
    change(undisturbed)
    return KilledChange(
        folder=tmp_path,
        change=change,
        generation=read_manifest(seed).generation,
        before=contents(seed),
        after=contents(undisturbed),
        tree=tree(undisturbed),
    )


def test_a_killed_change_leaves_the_old_generation_or_the_new(killed_change):
    """Bisect for the step that makes the next generation: all kills leave one or the other."""
    old, new = 0, 256
    assert killed_change.kill_at(new) == (killed_change.generation + 1, True)
    while new - old > 1:
        step = (old + new) // 2
        number, _ = killed_change.kill_at(step)
        old, new = (step, new) if number == killed_change.generation else (old, step)
    assert killed_change.kill_at(new) == (killed_change.generation + 1, False)
    assert old > 20


@pytest.mark.slow
def test_a_change_killed_at_any_step_leaves_the_old_generation_or_the_new(killed_change):
    seen = []
    for step in range(1, 1000):
        number, ended = killed_change.kill_at(step)
        seen.append(number)
        if ended:
            break
    assert ended
    # It was killed both before and after the step that makes the next generation.
    assert seen == sorted(seen)
    assert set(seen[:-1]) == {killed_change.generation, killed_change.generation + 1}
    assert len(seen) > 20


@pytest.mark.slow
def test_a_change_killed_at_random_moments_is_ended_by_giving_it_again(tmp_path):
    """From another process, as on the command line."""
    write_store(tmp_path / "s", [[n % 200, 256] for n in range(200)], documents_per_shard=2)
    remove_documents(
        tmp_path / "s",
        documents_file=listed(tmp_path / "s", *(f"train:{n}" for n in range(0, 200, 2))),
    )
    before = contents(tmp_path / "s")
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
            assert contents(tmp_path / "s") == before
        assert check(tmp_path / "s").sound
    compact_store(tmp_path / "s")
    assert contents(tmp_path / "s") == {"train": [ids for ids in before["train"] if ids != [256, 256]]}
    assert sorted(p.name for p in (tmp_path / "s/train").iterdir() if p.suffix == ".bin") == [
        f"shard_{n:05d}.bin" for n in range(100, 200)
    ]
    assert not list((tmp_path / "s").rglob("*.partial"))


def test_the_old_manifest_is_kept_as_it_was_read(grown):
    base = read_manifest(grown, 1)
    assert encode_manifest(base) == (grown / "generations/00001.json").read_bytes()


def test_an_empty_append_makes_a_generation_of_the_same_documents(grown, tmp_path):
    base = read_manifest(grown)
    source = replace(base.sources[0], name="more", documents=0, tokens=0, parts=(PartEntry(0, 9, 3),))
    counts = replace(base.counts, records=3, documents=0, tokens=0, dropped={"exact": 2}, quarantined=1)
    (tmp_path / "quarantine.00003.jsonl").write_text("{}\n")
    (tmp_path / "report.00003.json").write_text('{"started": "today"}')
    added = replace(base, subsets={}, sources=(source,), counts=counts)
    add_generation(grown, extend_manifest(base, added), staged=tmp_path)
    assert contents(grown) == contents(grown, 2)
    assert [one.when for one in read_log(grown)] == ["", "", "today"]
    assert check(grown).sound, check(grown).faults
    assert open_store(grown).fingerprint == open_store(grown, generation=2).fingerprint
    assert open_store(grown).lengths.layers == (3, 2)
    # They are what is known of records that came to nothing, and outlive a compaction.
    compact_store(grown)
    assert check(grown).sound, check(grown).faults
    assert (grown / "quarantine.00003.jsonl").exists()
    (grown / "quarantine.00003.jsonl").unlink()
    assert "1 quarantined records, its quarantine files have 0" in "\n".join(check(grown).faults)


def test_a_subset_that_an_older_generation_has_not(grown):
    with pytest.raises(InputError, match="has no documents in subset 'test'; it has: train, val"):
        open_store(grown, "test", generation=1)
