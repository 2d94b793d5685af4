"""Training on raw inputs without a prepared store."""

import json
import shlex
from pathlib import Path

import pytest

import batchloom
from batchloom import SettingsError, StateError
from batchloom.cli import run_command_line
from batchloom.core.errors import TooManyBadRecordsError
from batchloom.train import DataRequest, MediaPaths, StreamOptions
from chat.conftest import make_byte_level_tokenizer
from processes import run_two_ranks
from train.model_folders import write_model
from train.runs import BASE_SETTINGS, read_steps, start_run


@pytest.fixture(scope="module")
def input_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("inputs") / "sums.jsonl"
    rows = [{"text": f"{n} and {n} are {2 * n}."} for n in range(200)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_stream(input_file, out, changes=None, *, resume=False, stop_at=None, **request):
    options = StreamOptions(**{"workers": 0, **request.pop("options", {})})
    data = DataRequest(stream=(str(input_file),), options=options, **{"tokenizer": "bytes", **request})
    return start_run(data, out, {**BASE_SETTINGS, "steps": 20, **(changes or {})}, resume=resume, stop_at=stop_at)


def test_passes_do_not_change_the_losses(tmp_path, input_file):
    run_stream(input_file, tmp_path / "one", {"steps": 4})
    _, printed = run_stream(input_file, tmp_path / "two", {"steps": 4, "batch_size": 2})
    assert any("1 rank x 2 passes x 2 rows" in line for line in printed)
    losses, expected = ([loss for _, loss, *_ in read_steps(tmp_path / name)] for name in ("two", "one"))
    assert losses == pytest.approx(expected, rel=1e-4)


def test_a_run_on_a_stream_learns_and_resumes_exactly(tmp_path, input_file):
    run_stream(input_file, tmp_path / "whole")
    run_stream(input_file, tmp_path / "two", stop_at=9)
    _, printed = run_stream(input_file, tmp_path / "two", resume=True)
    assert read_steps(tmp_path / "two") == read_steps(tmp_path / "whole")
    losses = [loss for _, loss, *_ in read_steps(tmp_path / "whole")]
    assert losses[-1] < losses[0] - 1
    assert any("stream of sums.jsonl" in line for line in printed)
    with pytest.raises(StateError, match="seed was 0 and is 5"):
        run_stream(input_file, tmp_path / "two", {"seed": 5}, resume=True)


def test_patterns_choose_the_files_of_a_stream(tmp_path, input_file):
    folder = tmp_path / "tree"
    folder.mkdir()
    (folder / "sums.jsonl").write_bytes(input_file.read_bytes())
    (folder / "notes.md").write_text("other " * 400)
    run_stream(folder, tmp_path / "run", {"steps": 2}, options={"exclude": "*.md"})
    run_stream(folder / "sums.jsonl", tmp_path / "alone", {"steps": 2})
    assert read_steps(tmp_path / "run") == read_steps(tmp_path / "alone")


def test_a_run_on_a_stream_cannot_be_edited(tmp_path, input_file, capsys):
    run_stream(input_file, tmp_path / "run", stop_at=2)
    batchloom.prepare(input_file, out=tmp_path / "store", tokenizer="bytes")
    arguments = ["edit", tmp_path / "run", "--data", tmp_path / "store", "--at-step", 5, "--ban", 3]
    assert run_command_line(list(map(str, arguments))) == 1
    assert "trains on a stream, which cannot be edited: its order is that of its input" in capsys.readouterr().err


def test_a_run_that_fails_before_its_first_step_can_be_started_again(tmp_path, input_file):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(input_file.read_text()[:200] + "\n" + "bad\n" * 300)
    with pytest.raises(TooManyBadRecordsError, match="are bad"):
        run_stream(bad, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.lock"]
    run_stream(input_file, tmp_path / "run", stop_at=1)
    assert len(read_steps(tmp_path / "run")) == 1


def test_a_run_writes_the_store_of_its_inputs(tmp_path, input_file):
    _, printed = run_stream(input_file, tmp_path / "long", {"steps": 60}, options={"keep": tmp_path / "kept"})
    assert any("is the store of the inputs" in line for line in printed)
    batchloom.prepare(input_file, out=tmp_path / "made", tokenizer="bytes", dedup="none", balance_subsets=False)
    manifests = [tmp_path / name / "dataset_metadata.json" for name in ("kept", "made")]
    assert manifests[0].read_bytes() == manifests[1].read_bytes()
    longer_input = tmp_path / "more.jsonl"
    longer_input.write_text(input_file.read_text() * 30)
    _, printed = run_stream(longer_input, tmp_path / "short", {"steps": 4}, options={"keep": tmp_path / "part"})
    assert any("0 of 1 units of the input are in" in line for line in printed)


def test_a_run_reports_the_command_that_finishes_its_store(tmp_path, input_file):
    store, out = tmp_path / "k", tmp_path / "run"
    run_stream(input_file, out, stop_at=5, options={"keep": store})
    _, printed = run_stream(input_file, out, resume=True, stop_at=9)
    assert not any("is unfinished" in line for line in printed)
    _, printed = run_stream(input_file, out, resume=True)
    command = f"batchloom prepare {input_file} --tokenizer bytes --dedup none --no-balance-subsets --out {store}"
    assert (
        f"keep   {store} is unfinished, and nothing was written to it since --resume; finish it with: {command}"
        in printed
    )
    assert run_command_line(shlex.split(command)[1:]) == 0
    _, printed = run_stream(input_file, out, {"steps": 22}, resume=True)
    assert not any("is unfinished" in line for line in printed)


def test_a_checkpoint_of_another_stream_is_refused(tmp_path, input_file):
    run_stream(input_file, tmp_path / "run", stop_at=5)
    folder = make_byte_level_tokenizer(tmp_path / "tokenizer")
    with pytest.raises(StateError, match="tokenizer: 'bytes' -> 'tokenizer'"):
        run_stream(input_file, tmp_path / "run", resume=True, tokenizer=str(folder))


@pytest.mark.slow
def test_a_model_is_finetuned_on_a_stream(tmp_path, input_file):
    write_model(tmp_path / "model")
    settings = {**BASE_SETTINGS, "model": {"init": str(tmp_path / "model")}, "steps": 2}
    data = DataRequest(stream=(str(input_file),), options=StreamOptions(workers=1), tokenizer="bytes")
    outcome, printed = start_run(data, tmp_path / "run", settings)
    assert outcome.steps == 2
    assert any("do not see each other" in line for line in printed)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"stream": ("a",), "data": Path("b")}, "--data and --stream exclude each other"),
        (
            {"data": Path("b"), "options": StreamOptions(lanes=4)},
            "--lanes: 4 requires --stream",
        ),
        (
            {"data": Path("b"), "options": StreamOptions(keep=Path("c"))},
            "--keep: c requires --stream",
        ),
        ({"stream": ("a",), "if_missing": "synthetic"}, "--if-missing"),
        ({"data": Path("b"), "media": MediaPaths(processor="c")}, "--processor: c requires --input-file or --stream"),
        ({"data": Path("b"), "options": StreamOptions(follow_links=True)}, "--follow-links: requires --input-file or"),
        ({"stream": ("b",), "missing_media_lists": ("c",)}, "--missing-media: c requires --data or --mixture"),
    ],
)
def test_contradicting_options_are_refused(options, problem):
    assert any(problem in message for message in DataRequest(**options).problems())


def test_no_lanes_for_so_many_ranks(tmp_path, input_file):
    with pytest.raises(SettingsError, match="lanes"):
        run_stream(input_file, tmp_path / "run", options={"lanes": 0})


@pytest.mark.slow
def test_two_ranks_gather_their_state(tmp_path, input_file):
    config = tmp_path / "small.json"
    config.write_text(json.dumps({**BASE_SETTINGS, "steps": 10}))
    args = ["--stream", input_file, "--tokenizer", "bytes", "--config-file", config, "--device", "cpu"]
    args += ["--stream-workers", "0", "--out", tmp_path / "two", "--stop-at", "5"]
    run_two_ranks("-m", "batchloom", "train", *args)
    run_stream(input_file, tmp_path / "two", {"steps": 10}, resume=True)
    run_stream(input_file, tmp_path / "one", {"steps": 10})
    actual, expected = (read_steps(tmp_path / name) for name in ("two", "one"))
    assert [tokens for *_, tokens in actual] == [tokens for *_, tokens in expected]
    assert [loss for _, loss, *_ in actual] == pytest.approx([loss for _, loss, *_ in expected], abs=1e-4)
