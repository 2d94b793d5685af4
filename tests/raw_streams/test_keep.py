import contextlib
import gzip
import json
import os
import signal
from pathlib import Path

import psutil
import pytest

import batchloom
from batchloom import (
    Loader,
    OutputError,
    Recipe,
    SettingsError,
    open_store,
)
from batchloom.core.errors import StoreConflictError
from batchloom.preparation import (
    STREAM_BATCHES_FOLDER,
    ChatRecipe,
    DedupRecipe,
    RunSettings,
    run_recipe,
)
from batchloom.streaming import merge_states
from lane_plans import make_lane_loader
from preparation.stores import INLINE
from processes import have_ended
from raw_streams.streams import (
    LIMITS,
    collect_rows,
    make_small_stream,
    make_texts,
    write_lines,
    write_table,
    write_texts,
)
from sources.test_web_archives import make_record
from waiting import LIMIT_S

# Two epochs of the inputs, and some steps.
LONG_RUN = {"steps": 48, "seq_len": 128}


def read_store_files(folder: Path) -> dict[str, bytes]:
    """Read every file of a store except those that may differ between two runs."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.parent.name != "plans" and "report" not in path.name
    }


def prepare_store_files(stream, out: Path) -> dict[str, bytes]:
    run = RunSettings(unit_bytes=4096, limits=LIMITS, execution=INLINE)
    run_recipe(stream.recipe, out, lambda _: None, settings=run)
    return read_store_files(out)


def make_inputs(folder: Path, kind: str) -> Path:
    folder.mkdir()
    if kind == "jsonl":
        for number in range(3):
            write_texts(folder / f"{number}.jsonl", 60, seed=number)
    elif kind == "text":
        (folder / "long.txt").write_text("\n\n".join(make_texts(120)))
        (folder / "short.txt").write_text("a short text")
    elif kind == "mixed":
        write_texts(folder / "a.jsonl", 80)
        (folder / "b.jsonl.gz").write_bytes(
            gzip.compress("".join(json.dumps({"text": t}) + "\n" for t in make_texts(40, 5)).encode())
        )
        (folder / "c.csv").write_text("text\n" + "".join(f'"{t}\n"\n' for t in make_texts(40, 6)))
        write_table(make_texts(30, 7), folder)
    elif kind == "chat":
        rows = [
            {
                "messages": [
                    {"role": "user", "content": f"question {n}"},
                    {"role": "assistant", "content": f"answer {n} " * (n % 9 + 1)},
                ]
            }
            for n in range(90)
        ]
        write_lines(folder / "chat.jsonl", rows)
    elif kind == "wet":
        for name in ("a", "b"):
            texts = [f"{name} {text}" for text in make_texts(90)]
            (folder / f"{name}.wet").write_bytes(
                b"".join(make_record("conversion", text.encode(), number=n) for n, text in enumerate(texts))
            )
    elif kind == "bad":
        rows = [json.dumps({"text": t}) for t in make_texts(120)]
        rows[20:20] = ["{"]
        rows[90:90] = ['{"text": "a']
        (folder / "bad.jsonl").write_text("\n".join(rows) + "\n")
    return folder


IN_FAST_TIER = {("jsonl", 1), ("text", 2), ("mixed", 2), ("chat", 1), ("wet", 2), ("bad", 2)}


@pytest.mark.parametrize(
    ("kind", "world"),
    [
        pytest.param(kind, world, marks=[] if (kind, world) in IN_FAST_TIER else [pytest.mark.slow])
        for kind in ("jsonl", "text", "mixed", "chat", "wet", "bad")
        for world in (1, 2)
    ],
)
def test_a_kept_store_equals_a_prepared_one(tmp_path, kind, world):
    inputs, out = make_inputs(tmp_path / "inputs", kind), tmp_path / "kept"
    chat = ChatRecipe(max_tokens=60, overlong="split") if kind == "chat" else ChatRecipe()
    recipe = Recipe(
        inputs=("x",),
        tokenizer="bytes",
        dedup=DedupRecipe(mode="none"),
        val_fraction=0.1,
        chat=chat,
    )
    stream = make_small_stream(inputs, keep=out, recipe=recipe, lanes=2, **LONG_RUN)
    streamed = collect_rows(stream, world)
    notes = []
    stream.finish(workers=1, progress=lambda event: notes.append(getattr(event, "text", "")))
    adopted = [note for note in notes if "already read by a stream" in note]
    assert adopted
    assert read_store_files(out) == prepare_store_files(stream, tmp_path / "prepared")
    assert not (out / ".work").exists()

    store = open_store(out)
    repeated = {}
    for rank in range(2):
        for batch in make_lane_loader(store, stream, rank=rank, world_size=2):
            for row in range(4):
                repeated[batch.step, 2 * row + rank] = tuple(batch[key][row].tolist() for key in sorted(batch))
    assert repeated == streamed
    loader = make_lane_loader(store, stream, world_size=2)
    assert tuple(loader[20]["input_ids"][1].tolist()) == tuple(streamed[20, 2][0])


def test_a_completed_epoch_is_not_read_again(tmp_path):
    inputs, out = make_inputs(tmp_path / "inputs", "jsonl"), tmp_path / "kept"
    stream = make_small_stream(inputs, keep=out, lanes=2, **{**LONG_RUN, "steps": 80})
    collect_rows(stream)
    notes = []
    stream.finish(workers=1, progress=lambda event: notes.append(getattr(event, "text", "")))
    assert any(f"Resuming: {len(stream._units)} of {len(stream._units)} units were already read" in n for n in notes)


def test_finish_reads_the_remaining_units(tmp_path):
    inputs, out = make_inputs(tmp_path / "inputs", "jsonl"), tmp_path / "kept"
    stream = make_small_stream(inputs, keep=out, lanes=2, steps=3)
    collect_rows(stream)
    assert not stream.finish(workers=1).already_done
    assert read_store_files(out) == prepare_store_files(stream, tmp_path / "prepared")
    repeated = make_small_stream(inputs, keep=out, lanes=2, steps=3)
    assert collect_rows(repeated) == collect_rows(make_small_stream(inputs, lanes=2, steps=3))
    assert repeated.finish(workers=1).already_done


def test_a_resumed_stream_keeps_its_units(tmp_path):
    inputs, out = make_inputs(tmp_path / "inputs", "jsonl"), tmp_path / "kept"
    expected = collect_rows(make_small_stream(inputs, lanes=2, **LONG_RUN))
    loader = Loader(make_small_stream(inputs, keep=out, lanes=2, **LONG_RUN), output="numpy", prefetch=0)
    for batch in loader:
        if batch.step == 12:
            break
    assert list((out / ".work" / STREAM_BATCHES_FOLDER).rglob("stretch.json"))
    stream = make_small_stream(inputs, keep=out, lanes=2, **LONG_RUN)
    resumed = collect_rows(stream, state=loader.state_dict())
    assert resumed == {position: row for position, row in expected.items() if position[0] > 12}
    stream.finish(workers=1)
    assert read_store_files(out) == prepare_store_files(stream, tmp_path / "prepared")


def test_a_range_that_is_resumed_inside_is_not_kept(tmp_path):
    """A stream that is kept from a step on has not read the first records of a range."""
    inputs, out = make_inputs(tmp_path / "inputs", "jsonl"), tmp_path / "kept"
    loader = Loader(make_small_stream(inputs, lanes=2, **LONG_RUN), output="numpy", prefetch=0)
    for batch in loader:
        if batch.step == 4:
            break
    state = loader.state_dict()
    assert all(position[4] > 0 for position in state["lanes"].values())
    stream = make_small_stream(inputs, keep=out, lanes=2, **LONG_RUN)
    collect_rows(stream, state=state)
    stream.finish(workers=1)
    assert read_store_files(out) == prepare_store_files(stream, tmp_path / "prepared")


def test_a_stream_resumed_without_keep_warns(tmp_path, caplog):
    inputs, out = make_inputs(tmp_path / "inputs", "jsonl"), tmp_path / "kept"
    plan_settings = {"lanes": 2, "steps": 20}

    def resume(state, last_step, **options):
        loader = Loader(make_small_stream(inputs, **plan_settings, **options), output="numpy", prefetch=0)
        if state is not None:
            loader.load_state_dict(state)
        return next(loader.state_dict() for batch in loader if batch.step == last_step)

    states = [resume(None, 5, keep=out)]
    states.append(resume(states[0], 9, keep=out))
    assert "and from here on it does not" not in caplog.text
    states.append(resume(states[1], 12))
    assert caplog.text.count(f"and from here on it does not. Give keep={out} (--keep) to continue") == 1
    resume(states[2], 15)
    assert caplog.text.count("and from here on it does not") == 2
    stream = make_small_stream(inputs, keep=out, **plan_settings)
    loader = Loader(stream, output="numpy", prefetch=0)
    loader.load_state_dict(states[2])
    assert stream.abandoned is None
    stream.finish(workers=1)
    assert merge_states(states[2:])["keep"] == str(out)
    resume(states[2], 15)
    assert caplog.text.count("and from here on it does not") == 2


@pytest.mark.slow
def test_a_killed_worker_does_not_change_the_rows(tmp_path):
    inputs, out = make_inputs(tmp_path / "inputs", "jsonl"), tmp_path / "kept"
    expected = collect_rows(make_small_stream(inputs, lanes=2, **LONG_RUN))
    stream = make_small_stream(inputs, keep=out, lanes=2, workers=2, **LONG_RUN)
    rows, servers = {}, set()
    for batch in Loader(stream, output="numpy", prefetch=0):
        for row in range(8):
            rows[batch.step, row] = tuple(batch[key][row].tolist() for key in sorted(batch))
        servers |= list_worker_servers()
        if batch.step == 4:
            # A worker ends with its server.
            server = min(servers)
            os.kill(server, signal.SIGKILL)
            assert have_ended([server], LIMIT_S)
    assert len(servers) == 3
    assert rows == expected
    stream.finish(workers=1)
    assert read_store_files(out) == prepare_store_files(stream, tmp_path / "prepared")


def list_worker_servers() -> set[int]:
    """List the processes of this one that fork workers."""
    servers = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if any("run_server" in word for word in child.cmdline()):
                servers.add(child.pid)
    return servers


def test_prepare_resumes_the_units_of_a_stream(tmp_path):
    inputs, out = make_inputs(tmp_path / "inputs", "jsonl"), tmp_path / "kept"
    stream = make_small_stream(inputs, keep=out, lanes=2, **LONG_RUN)
    collect_rows(stream)
    assert prepare_store_files(stream, out) == prepare_store_files(stream, tmp_path / "prepared")


def test_invalid_keep_folders_are_refused(tmp_path):
    inputs = make_inputs(tmp_path / "inputs", "jsonl")
    make_inputs(tmp_path / "other", "text")
    with pytest.raises(SettingsError, match="keep: missing"):
        make_small_stream(inputs, lanes=2).finish()
    with pytest.raises(StoreConflictError, match="not empty"):
        make_small_stream(inputs, lanes=2, keep=inputs.with_name("other"))
    stream = make_small_stream(inputs, lanes=2, keep=tmp_path / "kept", steps=30)
    collect_rows(stream)
    recipe = Recipe(inputs=("x",), tokenizer="bytes", val_fraction=0.5, dedup=DedupRecipe(mode="none"))
    with pytest.raises(StoreConflictError, match="val_fraction"):
        collect_rows(make_small_stream(inputs, lanes=2, keep=tmp_path / "kept", recipe=recipe))
    prepare_store_files(stream, tmp_path / "plain")


def _prepare_folder(inputs, out, **settings):
    options = {"tokenizer": "bytes", "dedup": "none", "val_fraction": 0, **settings}
    batchloom.prepare(inputs, out=out, workers=1, **options)


def _begin_stream(inputs, out, **settings):
    run_kept_stream(inputs, out, **settings)
    assert (out / ".work").is_dir()


def run_kept_stream(inputs, out, **settings):
    options = {"tokenizer": "bytes", "val_fraction": 0, "workers": 0, **settings}
    plan_settings = {"seq_len": 128, "global_batch_size": 8, "steps": 20}
    stream = batchloom.stream(inputs, keep=out, **plan_settings, **options)
    for _ in Loader(stream, output="numpy"):
        pass
    return stream


@pytest.mark.parametrize("make_folder", [_prepare_folder, _begin_stream])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"val_fraction": 0.1}, "val_fraction"),
        ({"tokenizer": "train:300"}, "tokenizer"),
        ({"inputs": "b.jsonl"}, "inputs: b.jsonl is new"),
    ],
)
def test_the_folder_of_another_job_is_refused_before_the_first_batch(tmp_path, make_folder, changes, message):
    for number, name in enumerate("ab"):
        write_texts(tmp_path / f"{name}.jsonl", 200, seed=number)
    make_folder(tmp_path / "a.jsonl", tmp_path / "kept")
    options = {"inputs": "a.jsonl", **changes}
    with pytest.raises(StoreConflictError, match=message) as error:
        stream = batchloom.stream(
            tmp_path / options.pop("inputs"),
            keep=tmp_path / "kept",
            **{"tokenizer": "bytes", "val_fraction": 0, "workers": 0, **options},
            seq_len=128,
            global_batch_size=8,
            steps=2,
        )
        assert make_folder is _begin_stream
        next(iter(Loader(stream, output="numpy")))
    assert "--out is keep=" in str(error.value)


def test_a_finished_store_of_the_same_job_is_reused(tmp_path):
    lines = write_texts(tmp_path / "a.jsonl", 200)
    _prepare_folder(lines, tmp_path / "kept")
    assert run_kept_stream(lines, tmp_path / "kept").finish(workers=1).already_done


def test_inputs_changed_during_a_kept_stream_are_reported_by_finish(tmp_path):
    lines = write_texts(tmp_path / "a.jsonl", 200)
    stream = run_kept_stream(lines, tmp_path / "kept")
    write_texts(lines, 300)
    with pytest.raises(StoreConflictError, match=r"a.jsonl has .* choose another --out.*--out is keep="):
        stream.finish(workers=1)


@pytest.mark.parametrize("keep", [3, "\0", "", b"x", True])
def test_a_keep_value_that_is_not_a_path_is_refused(tmp_path, keep):
    lines = write_texts(tmp_path / "a.jsonl", 20)
    with pytest.raises(SettingsError, match=r"keep: .* is not a path; name the folder of the store"):
        run_kept_stream(lines, keep)


@pytest.mark.parametrize("keep", ["corpus", ".", "corpus/x"])
def test_the_folder_of_an_input_is_refused_as_keep(tmp_path, keep):
    (tmp_path / "corpus").mkdir()
    write_texts(tmp_path / "corpus/a.jsonl", 20)
    write_texts(tmp_path / "corpus/x", 20)
    with pytest.raises((StoreConflictError, OutputError)) as error:
        run_kept_stream(tmp_path / "corpus", tmp_path / keep)
    assert "--out is keep=" in str(error.value)
