"""Guards between jobs, and between a job and files of others."""

import importlib.metadata
import io
import os
import shutil
import sys
import warnings
from functools import partial

import numpy as np
import pytest

from batchloom.core.errors import StoreConflictError, TooManyBadRecordsError
from batchloom.preparation import Progress, RunSettings, WorkFolder, resumable_job, run_recipe
from batchloom.preparation.units.unit_rows import trained_file_name
from batchloom.preparation.workers import package_versions
from batchloom.store import read_manifest, remove_documents
from preparation.jobs import run_until_killed
from preparation.stores import INLINE, hash_store_files, make_recipe, prepare_store, write_jsonl

SETTINGS = {"unit_bytes": 500, "tokens_per_shard": 500, "val_fraction": 0.2}
DELETIONS = ("shutil.rmtree", "os.remove", "os.rmdir", "os.rename")


@pytest.fixture
def inputs(tmp_path):
    """Write twenty documents twice, in two files."""
    words = [f"word{number}" for number in range(400)]
    rng = np.random.default_rng(3)
    texts = [" ".join(rng.choice(words, 12)) for _ in range(20)]
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    write_jsonl(tmp_path / "b.jsonl", [{"text": text} for text in texts])
    return [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]


def stop_at(phase, documents=0):
    def stop(event):
        if isinstance(event, Progress) and event.phase == phase and event.documents > documents:
            raise KeyboardInterrupt

    return stop


def test_a_folder_of_somebody_else_is_refused_before_standard_input_is_read(tmp_path, monkeypatch):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "report.json").write_text("mine")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a text\n")))
    with pytest.raises(StoreConflictError, match="is not empty .report.json. and is not a store"):
        prepare_store("-", tmp_path / "theirs")
    assert [path.name for path in (tmp_path / "theirs").iterdir()] == ["report.json"]
    assert sys.stdin.read() == "a text\n"


def test_a_store_that_another_run_has_just_finished_is_not_overwritten(tmp_path, inputs, monkeypatch):
    out, folders = tmp_path / "out", []

    def make_work_folder(path):
        if not folders:
            folders.append(path)
            prepare_store(inputs[:1], path, **SETTINGS)
        return WorkFolder(path)

    monkeypatch.setattr(resumable_job, "WorkFolder", make_work_folder)
    with pytest.raises(StoreConflictError, match="holds a finished store of another job"):
        prepare_store(inputs, out, **SETTINGS | {"tokens_per_shard": 300})
    prepare_store(inputs[:1], tmp_path / "whole", **SETTINGS)
    assert hash_store_files(out) == hash_store_files(tmp_path / "whole")
    folders.clear()
    assert prepare_store(inputs[:1], tmp_path / "twice", **SETTINGS).already_done
    assert not (tmp_path / "twice" / ".work").exists()


def test_a_store_that_changed_after_it_was_read_is_not_appended_to(tmp_path, inputs, monkeypatch):
    out, folders = tmp_path / "out", []
    prepare_store(inputs[:1], out, **SETTINGS)
    write_jsonl(tmp_path / "c.jsonl", [{"text": "something that is new"}])
    append_settings = RunSettings(append=True, execution=INLINE)

    def make_work_folder(path):
        if not folders:
            folders.append(path)
            run(
                make_recipe(
                    inputs=(f"{tmp_path / 'c.jsonl'}",),
                    tokenizer="bytes",
                    val_fraction=0.2,
                    tokens_per_shard=500,
                ),
                append_settings,
            )
        return WorkFolder(path)

    def run(recipe, settings):
        return run_recipe(recipe, out, lambda event: None, settings=settings)

    monkeypatch.setattr(resumable_job, "WorkFolder", make_work_folder)
    monkeypatch.setattr(resumable_job, "lock_store", lambda path: warnings.catch_warnings())
    recipe = make_recipe(inputs=(f"{inputs[1]}",), tokenizer="bytes", val_fraction=0.2, tokens_per_shard=500)
    with pytest.raises(StoreConflictError, match="has become generation 2 since this run looked"):
        run(recipe, append_settings)
    assert read_manifest(out).generation == 2


@pytest.mark.slow
def test_killed_while_a_restart_deletes_the_first_command_still_makes_its_store(tmp_path, inputs):
    near_settings = SETTINGS | {"dedup": "near"}
    prepare_store(inputs, tmp_path / "whole", **near_settings)
    with pytest.raises(KeyboardInterrupt):
        prepare_store(inputs, tmp_path / "stopped", listener=stop_at("write", 10), **near_settings)
    other_recipe = make_recipe(inputs=tuple(map(str, inputs)), tokenizer="bytes", tokens_per_shard=450)
    restart_settings = RunSettings(restart=True, unit_bytes=500, execution=INLINE)
    count, runs, killed = 1, 0, True
    while killed:
        out = tmp_path / f"out{count}"
        shutil.copytree(tmp_path / "stopped", out)
        restart = partial(run_recipe, other_recipe, out, stop_at("tokenize"), settings=restart_settings)
        killed = run_until_killed(DELETIONS, count, restart)
        count, runs = count + 1, runs + 1
        if killed:
            try:
                prepare_store(inputs, out, **near_settings)
            except StoreConflictError as error:
                # The other job may have progressed so far that it is the unfinished one.
                if "holds unfinished work of another job" not in str(error):
                    raise
                continue
            assert hash_store_files(out) == hash_store_files(tmp_path / "whole")
    assert count > 8
    assert runs > 2


def test_going_back_to_the_versions_of_a_stopped_job_goes_on(tmp_path, inputs, monkeypatch):
    prepare_store(inputs, tmp_path / "whole", **SETTINGS)
    out, get_version = tmp_path / "out", importlib.metadata.version
    with pytest.raises(KeyboardInterrupt):
        prepare_store(inputs, out, listener=stop_at("write", 10), **SETTINGS)
    package_versions._get_installed_version.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", lambda name: f"{get_version(name)}.99")
        with pytest.raises(KeyboardInterrupt):
            prepare_store(inputs, out, listener=stop_at("tokenize", 10), **SETTINGS)
    package_versions._get_installed_version.cache_clear()
    prepare_store(inputs, out, **SETTINGS)
    assert hash_store_files(out) == hash_store_files(tmp_path / "whole")


def test_another_version_of_batchloom_makes_all_units_again(tmp_path, inputs, monkeypatch):
    out, get_version = tmp_path / "out", importlib.metadata.version
    with pytest.raises(KeyboardInterrupt):
        prepare_store(inputs, out, listener=stop_at("write"), **SETTINGS)
    package_versions._get_installed_version.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(
            importlib.metadata,
            "version",
            lambda name: "99.0" if name == "batchloom" else get_version(name),
        )
        assert prepare_store(inputs, out, **SETTINGS).resumed_units == 0
    package_versions._get_installed_version.cache_clear()


def test_shards_of_a_job_that_was_given_up_do_not_stay_in_the_store(tmp_path, inputs):
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        prepare_store(inputs, out, listener=stop_at("write"), **SETTINGS)
    # A job that is killed while it moves its shards leaves such files.
    (out / "train").mkdir()
    (out / "train" / "shard_00099.bin").write_bytes(b"text that nobody knows")
    prepare_store(inputs, out, **SETTINGS)
    prepare_store(inputs, tmp_path / "whole", **SETTINGS)
    assert hash_store_files(out) == hash_store_files(tmp_path / "whole")


def test_a_smaller_budget_for_bad_records_is_asked_of_a_finished_store_too(tmp_path):
    with (tmp_path / "a.jsonl").open("w") as file:
        file.writelines(f'{{"text": "text {number}"}}\n' for number in range(30))
        file.write("broken\n" * 4)
    out = tmp_path / "out"
    prepare_store(tmp_path / "a.jsonl", out, max_bad=5)
    assert prepare_store(tmp_path / "a.jsonl", out, max_bad=4).already_done
    with pytest.raises(TooManyBadRecordsError, match="4 of the 34 records .* --max-bad 3 allows"):
        prepare_store(tmp_path / "a.jsonl", out, max_bad=3)
    assert read_manifest(out).counts.quarantined == 4


def test_tokens_that_are_not_those_that_were_written_are_not_copied(tmp_path, inputs):
    # Half of the second file remains, so that it is copied and not linked.
    lines = inputs[0].read_text().splitlines(keepends=True)
    inputs[1].write_text("".join([*lines[:10], *(line.replace("word", "other") for line in lines[10:])]))
    settings = {"unit_bytes": inputs[0].stat().st_size, "val_fraction": 0.0}
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        prepare_store(inputs, out, listener=stop_at("write"), **settings)
    path = max(out.glob(".work/units/*/tokens.train.bin"), key=lambda file: file.stat().st_size)
    data = path.read_bytes()
    for damaged_data in (data[:-4] + bytes(4), data[:-4]):
        path.write_bytes(damaged_data)
        with pytest.raises(StoreConflictError, match="holds other bytes than were written; delete"):
            prepare_store(inputs, out, **settings)
    path.write_bytes(data)
    flags = path.with_name(trained_file_name("train"))
    flags.mkdir()
    with pytest.raises(StoreConflictError, match=f"{flags} cannot be read .*; delete"):
        prepare_store(inputs, out, **settings)
    flags.rmdir()
    prepare_store(inputs, out, **settings)
    prepare_store(inputs, tmp_path / "whole", **settings)
    assert hash_store_files(out) == hash_store_files(tmp_path / "whole")


def test_who_changes_a_store_waits_for_a_run_that_is_at_work_in_it(tmp_path, inputs):
    prepare_store(inputs[:1], tmp_path / "out", **SETTINGS)
    with (
        WorkFolder(tmp_path / "out"),
        pytest.raises(StoreConflictError, match=rf"Another run is .* \(process {os.getpid()}\); wait"),
    ):
        remove_documents(tmp_path / "out", sources=["a.jsonl"])
    assert remove_documents(tmp_path / "out", sources=["a.jsonl"]).documents
