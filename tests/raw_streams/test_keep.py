import gzip
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

import batchloom
from batchloom import (
    Edit,
    Loader,
    OutputError,
    PlanError,
    Recipe,
    SettingsError,
    explain,
    open_store,
    when,
)
from batchloom.batches import PlanOptions
from batchloom.core.errors import StoreConflictError
from batchloom.plan import LanePlan
from batchloom.preparation import (
    STREAM_BATCHES_FOLDER,
    ChatRecipe,
    DedupRecipe,
    RunSettings,
    run_recipe,
)
from batchloom.store import read_range_bounds, remove_documents
from batchloom.streaming import merge_states
from raw_streams.streams import (
    LIMITS,
    rows_of,
    small_stream,
    table,
    texts,
    write_lines,
    write_texts,
)

LONG = {"steps": 120, "seq_len": 128}


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file of a store but those that may differ between two runs."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.parent.name != "plans" and "report" not in path.name
    }


def prepared(stream, out: Path) -> dict[str, bytes]:
    run = RunSettings(unit_bytes=4096, limits=LIMITS)
    run_recipe(stream.recipe, out, lambda _: None, settings=run)
    return files_of(out)


def make_inputs(folder: Path, kind: str) -> Path:
    folder.mkdir()
    if kind == "jsonl":
        for number in range(3):
            write_texts(folder / f"{number}.jsonl", 150, seed=number)
    elif kind == "text":
        (folder / "long.txt").write_text("\n\n".join(texts(300)))
        (folder / "short.txt").write_text("a short text")
    elif kind == "mixed":
        write_texts(folder / "a.jsonl", 200)
        (folder / "b.jsonl.gz").write_bytes(
            gzip.compress("".join(json.dumps({"text": t}) + "\n" for t in texts(80, 5)).encode())
        )
        (folder / "c.csv").write_text("text\n" + "".join(f'"{t}\n"\n' for t in texts(90, 6)))
        table(texts(60, 7), folder)
    elif kind == "chat":
        rows = [
            {
                "messages": [
                    {"role": "user", "content": f"question {n}"},
                    {"role": "assistant", "content": f"answer {n} " * (n % 9 + 1)},
                ]
            }
            for n in range(200)
        ]
        write_lines(folder / "chat.jsonl", rows)
    elif kind == "bad":
        rows = [json.dumps({"text": t}) for t in texts(200)]
        rows[20:20] = ["{"]
        rows[150:150] = ['{"text": "a']
        (folder / "bad.jsonl").write_text("\n".join(rows) + "\n")
    return folder


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", ["jsonl", "text", "mixed", "chat", "bad"])
def test_what_is_kept_is_what_prepare_makes(tmp_path, kind, world):
    inputs, out = make_inputs(tmp_path / "inputs", kind), tmp_path / "kept"
    chat = ChatRecipe(max_tokens=60, overlong="split") if kind == "chat" else ChatRecipe()
    recipe = Recipe(
        inputs=("x",),
        tokenizer="bytes",
        dedup=DedupRecipe(mode="none"),
        val_fraction=0.1,
        chat=chat,
    )
    stream = small_stream(inputs, keep=out, recipe=recipe, lanes=2, **LONG)
    streamed = rows_of(stream, world)
    notes = []
    stream.finish(workers=1, progress=lambda event: notes.append(getattr(event, "text", "")))
    adopted = [note for note in notes if "already read by a stream" in note]
    assert adopted
    assert files_of(out) == prepared(stream, tmp_path / "prepared")
    assert not (out / ".work").exists()

    store = open_store(out)
    spec = replace(stream.spec)
    plan = LanePlan(store, spec, lanes=stream.lanes, bounds=read_range_bounds(store))
    repeated = {}
    for rank in range(2):
        for batch in Loader(plan, rank=rank, world_size=2, output="numpy"):
            for row in range(4):
                repeated[batch.step, 2 * row + rank] = tuple(batch[key][row].tolist() for key in sorted(batch))
    assert repeated == streamed
    loader = Loader(plan, rank=0, world_size=2, output="numpy")
    assert tuple(loader[40]["input_ids"][1].tolist()) == tuple(streamed[40, 2][0])


def test_an_epoch_that_was_read_whole_needs_no_reading(tmp_path):
    inputs, out = make_inputs(tmp_path / "inputs", "jsonl"), tmp_path / "kept"
    stream = small_stream(inputs, keep=out, lanes=2, **{**LONG, "steps": 200})
    rows_of(stream)
    notes = []
    stream.finish(workers=1, progress=lambda event: notes.append(getattr(event, "text", "")))
    assert any(f"Resuming: {len(stream._units)} of {len(stream._units)} units were already read" in n for n in notes)


def test_what_was_not_read_is_read_by_prepare(tmp_path):
    inputs, out = make_inputs(tmp_path / "inputs", "jsonl"), tmp_path / "kept"
    stream = small_stream(inputs, keep=out, lanes=2, steps=3)
    rows_of(stream)
    assert not stream.finish(workers=1).already_done
    assert files_of(out) == prepared(stream, tmp_path / "prepared")
    again = small_stream(inputs, keep=out, lanes=2, steps=3)
    assert rows_of(again) == rows_of(small_stream(inputs, lanes=2, steps=3))
    assert again.finish(workers=1).already_done


def test_a_stream_goes_on_keeping_after_it_was_stopped(tmp_path):
    inputs, out = make_inputs(tmp_path / "inputs", "jsonl"), tmp_path / "kept"
    whole = rows_of(small_stream(inputs, lanes=2, **LONG))
    loader = Loader(small_stream(inputs, keep=out, lanes=2, **LONG), output="numpy", prefetch=0)
    for batch in loader:
        if batch.step == 30:
            break
    assert list((out / ".work" / STREAM_BATCHES_FOLDER).rglob("stretch.json"))
    stream = small_stream(inputs, keep=out, lanes=2, **LONG)
    rest = rows_of(stream, state=loader.state_dict())
    assert rest == {place: row for place, row in whole.items() if place[0] > 30}
    stream.finish(workers=1)
    assert files_of(out) == prepared(stream, tmp_path / "prepared")


def test_a_stream_that_goes_on_without_keeping_says_what_it_leaves(tmp_path, caplog):
    inputs, out = make_inputs(tmp_path / "inputs", "jsonl"), tmp_path / "kept"
    asked = {"lanes": 2, "steps": 20}

    def go_on(state, at, **request):
        loader = Loader(small_stream(inputs, **asked, **request), output="numpy", prefetch=0)
        if state is not None:
            loader.load_state_dict(state)
        return next(loader.state_dict() for batch in loader if batch.step == at)

    states = [go_on(None, 5, keep=out)]
    states.append(go_on(states[0], 9, keep=out))
    assert "and from here on it does not" not in caplog.text
    states.append(go_on(states[1], 12))
    assert caplog.text.count(f"and from here on it does not. Give keep={out} (--keep) to continue") == 1
    go_on(states[2], 15)
    assert caplog.text.count("and from here on it does not") == 2
    stream = small_stream(inputs, keep=out, **asked)
    loader = Loader(stream, output="numpy", prefetch=0)
    loader.load_state_dict(states[2])
    assert stream.abandoned is None
    stream.finish(workers=1)
    assert merge_states(states[2:])["keep"] == str(out)
    go_on(states[2], 15)
    assert caplog.text.count("and from here on it does not") == 2


def test_a_worker_that_is_killed_changes_nothing(tmp_path):
    inputs, out = make_inputs(tmp_path / "inputs", "jsonl"), tmp_path / "kept"
    whole = rows_of(small_stream(inputs, lanes=2, **LONG))
    # The server of warm processes, which other tests use, is no worker.
    others = set(psutil.Process().children())
    stream = small_stream(inputs, keep=out, lanes=2, workers=2, **LONG)
    found, killed = {}, 0
    for batch in Loader(stream, output="numpy", prefetch=0):
        for row in range(8):
            found[batch.step, row] = tuple(batch[key][row].tolist() for key in sorted(batch))
        if batch.step in (10, 50):
            for child in set(psutil.Process().children()) - others:
                # Python's own helper serves the tests that follow; a zombie has been killed.
                ended = child.status() == psutil.STATUS_ZOMBIE
                if not ended and "multiprocessing.resource_tracker" not in child.cmdline()[-1]:
                    os.kill(child.pid, signal.SIGKILL)
                    killed += 1
            time.sleep(0.1)
    assert killed
    assert found == whole
    stream.finish(workers=1)
    assert files_of(out) == prepared(stream, tmp_path / "prepared")


def test_prepare_alone_goes_on_with_what_a_stream_kept(tmp_path):
    inputs, out = make_inputs(tmp_path / "inputs", "jsonl"), tmp_path / "kept"
    stream = small_stream(inputs, keep=out, lanes=2, **LONG)
    rows_of(stream)
    assert prepared(stream, out) == prepared(stream, tmp_path / "prepared")


def test_no_plan_pretends_to_repeat_where_prepare_moved_a_document(tmp_path, caplog):
    path = write_texts(tmp_path / "few.jsonl", 40)
    stream = small_stream(path, lanes=1, keep=tmp_path / "kept")
    rows_of(stream)
    stream.finish(workers=1)
    store = open_store(tmp_path / "kept")
    assert store.manifest.subset_overrides
    assert "No plan of this store can repeat the stream" in caplog.text
    with pytest.raises(PlanError, match="no stream ranges"):
        read_range_bounds(store)


def test_the_stretches_of_another_store_are_refused(tmp_path):
    recipe = Recipe(inputs=("x",), tokenizer="bytes", val_fraction=0, dedup=DedupRecipe(mode="none"))
    kept = []
    for name, texts_ in (("one", "a"), ("two", "b")):
        folder = tmp_path / name
        folder.mkdir()
        write_lines(folder / "in.jsonl", [{"text": texts_ * (n % 50 + 1)} for n in range(400)])
        stream = small_stream(folder, keep=tmp_path / f"{name}-kept", recipe=recipe, lanes=2, steps=3)
        rows_of(stream)
        stream.finish(workers=1)
        kept.append(open_store(tmp_path / f"{name}-kept"))
    one, two = kept
    assert len(one) == len(two)
    name = "plans/stretches.lanes"
    (two.path / name).write_bytes((one.path / name).read_bytes())
    bounds = read_range_bounds(one)
    assert len(bounds) > 1
    (tmp_path / "gone").write_text("train:3\n")
    remove_documents(one.path, documents_file=tmp_path / "gone")
    assert read_range_bounds(open_store(one.path)).tolist() == bounds.tolist()
    with pytest.raises(PlanError, match=r"belongs to another store"):
        read_range_bounds(two)


def test_folders_that_cannot_be_kept_in(tmp_path):
    inputs = make_inputs(tmp_path / "inputs", "jsonl")
    make_inputs(tmp_path / "other", "text")
    with pytest.raises(SettingsError, match="keep: missing"):
        small_stream(inputs, lanes=2).finish()
    with pytest.raises(StoreConflictError, match="not empty"):
        small_stream(inputs, lanes=2, keep=inputs.with_name("other"))
    other = small_stream(inputs, lanes=2, keep=tmp_path / "kept", steps=30)
    rows_of(other)
    recipe = Recipe(inputs=("x",), tokenizer="bytes", val_fraction=0.5, dedup=DedupRecipe(mode="none"))
    with pytest.raises(StoreConflictError, match="val_fraction"):
        rows_of(small_stream(inputs, lanes=2, keep=tmp_path / "kept", recipe=recipe))
    prepared(other, tmp_path / "plain")
    store = open_store(tmp_path / "plain")
    with pytest.raises(PlanError, match="no stream ranges"):
        read_range_bounds(store)
    with pytest.raises(PlanError, match="end at document"):
        LanePlan(store, other.spec, lanes=2, bounds=np.array([0, 3]))


def _prepared(inputs, out, **settings):
    asked = {"tokenizer": "bytes", "dedup": "none", "val_fraction": 0, **settings}
    batchloom.prepare(inputs, out=out, workers=1, **asked)


def _begun(inputs, out, **settings):
    keeping(inputs, out, **settings)
    assert (out / ".work").is_dir()


def keeping(inputs, out, **settings):
    asked = {"tokenizer": "bytes", "val_fraction": 0, "workers": 0, **settings}
    order = {"seq_len": 128, "global_batch_size": 8, "steps": 20}
    stream = batchloom.stream(inputs, keep=out, **order, **asked)
    for _ in Loader(stream, output="numpy"):
        pass
    return stream


@pytest.mark.parametrize("make", [_prepared, _begun])
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"val_fraction": 0.1}, "val_fraction"),
        ({"tokenizer": "gpt2"}, "tokenizer"),
        ({"inputs": "b.jsonl"}, "inputs: b.jsonl is new"),
    ],
)
def test_the_folder_of_another_job_is_refused_before_the_first_batch(tmp_path, make, changes, said):
    for number, name in enumerate("ab"):
        write_texts(tmp_path / f"{name}.jsonl", 200, seed=number)
    make(tmp_path / "a.jsonl", tmp_path / "kept")
    asked = {"inputs": "a.jsonl", **changes}
    with pytest.raises(StoreConflictError, match=said) as error:
        stream = batchloom.stream(
            tmp_path / asked.pop("inputs"),
            keep=tmp_path / "kept",
            **{"tokenizer": "bytes", "val_fraction": 0, "workers": 0, **asked},
            seq_len=128,
            global_batch_size=8,
            steps=2,
        )
        assert make is _begun
        next(iter(Loader(stream, output="numpy")))
    assert "another keep=" in str(error.value)
    assert "--" not in str(error.value)


def test_the_finished_store_of_the_same_job_is_kept(tmp_path):
    lines = write_texts(tmp_path / "a.jsonl", 200)
    _prepared(lines, tmp_path / "kept")
    assert keeping(lines, tmp_path / "kept").finish(workers=1).already_done


def test_inputs_that_change_while_a_stream_keeps_are_told_at_its_end(tmp_path):
    lines = write_texts(tmp_path / "a.jsonl", 200)
    stream = keeping(lines, tmp_path / "kept")
    write_texts(lines, 300)
    with pytest.raises(StoreConflictError, match=r"a.jsonl has .* choose another keep=") as error:
        stream.finish(workers=1)
    assert "--" not in str(error.value)


@pytest.mark.parametrize("keep", [3, "\0", "", b"x", True])
def test_what_is_no_folder_is_not_kept_in(tmp_path, keep):
    lines = write_texts(tmp_path / "a.jsonl", 20)
    with pytest.raises(SettingsError, match=r"keep: .* is not a path; name the folder of the store"):
        keeping(lines, keep)


@pytest.mark.parametrize("keep", ["corpus", ".", "corpus/x"])
def test_the_folder_of_an_input_is_not_kept_in(tmp_path, keep):
    (tmp_path / "corpus").mkdir()
    write_texts(tmp_path / "corpus/a.jsonl", 20)
    write_texts(tmp_path / "corpus/x", 20)
    with pytest.raises((StoreConflictError, OutputError)) as error:
        keeping(tmp_path / "corpus", tmp_path / keep)
    assert "another keep=" in str(error.value)
    assert "keep= " not in str(error.value)
    assert "--" not in str(error.value)


def test_a_plan_in_the_order_of_lanes_without_sequences_says_why(kept):
    asked = {"seq_len": 3, "overlong": "drop", "global_batch_size": 8, "steps": 4}
    loader = Loader(kept, plan=PlanOptions(order="lanes", lanes=1), output="numpy", **asked)
    with pytest.raises(PlanError, match=rf"all {len(kept)} documents are longer than seq_len 3"):
        next(iter(loader))


@pytest.mark.parametrize(
    "ask",
    [
        lambda loader: loader.edit(Edit(step=2, skip=1)),
        lambda loader: explain(loader, 0),
        lambda loader: when(loader, document=0),
        lambda loader: explain(loader.plan, 0),
        lambda loader: pytest.importorskip("batchloom.adapters.pytorch").LoaderIterable(loader),
        lambda loader: pytest.importorskip("batchloom.adapters.pytorch").LoaderDataset(loader),
    ],
)
def test_what_a_plan_in_the_order_of_lanes_cannot_do_is_refused(kept, ask):
    lanes = PlanOptions(order="lanes", lanes=4)
    loader = Loader(kept, seq_len=32, global_batch_size=8, steps=12, plan=lanes)
    with pytest.raises(PlanError, match=r"in the order of lanes .* Plan the store in pools"):
        ask(loader)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept")
    lines = write_texts(folder / "a.jsonl", 200)
    stream = small_stream(lines, lanes=4, steps=3, keep=folder / "out")
    rows_of(stream)
    stream.finish(workers=1)
    return open_store(folder / "out")
