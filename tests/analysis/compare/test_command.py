"""Command line of ``batchloom compare``: examples, runs, reports and plots."""

import contextlib
import json
import re
import shutil
import signal
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import psutil
import pytest

from analysis.compare.warm_examples import MODULE, run_warm
from batchloom.adapters.requirements import Requirement
from batchloom.analysis.compare import (
    compare_report,
    compare_runs,
    comparison,
    frameworks,
    run_example,
)
from batchloom.analysis.compare.compare_report import render_comparison_page
from batchloom.analysis.compare.frameworks import _read_fault, _run_to_end
from batchloom.analysis.compare.loss_curves import LossCurve
from batchloom.cli import run_command_line
from batchloom.core.errors import TrainError
from batchloom.core.report_output import save_figure
from batchloom.testing import write_store
from processes import run_ranks, start_processes
from waiting import wait_until

FOLDER = Path(__file__).parent
MISSING_FRAMEWORK = frameworks.Framework("nosuch", "nosuch", (Requirement("no-such-trainer", "2.1"),))
SIZES = ["--steps", "6", "--seq-len", "64", "--global-batch-size", "8"]
FEW_STEPS = ["--steps", "3", "--seq-len", "32", "--global-batch-size", "2"]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rng = np.random.default_rng(5)
    documents = [rng.integers(0, 250, rng.integers(5, 90)).tolist() for _ in range(300)]
    return str(write_store(tmp_path_factory.mktemp("data") / "store", documents).path)


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.sources, self.words, self.roles = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        self.tags.append(tag)
        self.sources += [named[name] for name in ("src", "href") if name in named]
        self.roles += [named["role"]] if "role" in named else []

    def handle_data(self, data):
        self.words.append(data)


def read_outputs(out):
    png = (out / "compare.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    page = Page((out / "compare.html").read_text("utf-8"))
    assert "script" not in page.tags
    assert len(page.sources) == 1
    assert page.sources[0].startswith("data:image/png;base64,")
    return json.loads((out / "compare.json").read_text("utf-8")), page


def make_examples(folder):
    """Write examples with faults: wrong positions, an error, and a process that exits."""
    leaky, dies, leaves = (folder / f"{name}.py" for name in ("leaky", "dies", "leaves"))
    shutil.copy(FOLDER / "broken_examples.py", leaky)
    dies.write_text("def train(model, job):\n    raise OSError('no such disk')\n")
    leaves.write_text("import os\n\n\ndef train(model, job):\n    os._exit(0)\n")
    return leaky, dies, leaves


def check_leaky_result(output, report, page):
    """Check that the report blames ``leaky.py`` and not the plain loop."""
    assert "6 of 12 batches are not the plan's. The first is step 3 on rank 0" in output
    assert "documents of a row see each other" in output
    assert "losses differ from step" in output
    assert (report["format"], report["version"], report["kind"]) == (
        "batchloom-compare",
        1,
        "frameworks",
    )
    assert (report["source"], report["agree"], report["reference"]) == ("real", False, "pytorch")
    sound, broken = report["outcomes"][:2]
    assert sound["digest"] == report["digest"] != broken["digest"]
    assert [len(hashes) for hashes in sound["hashes"]] == [6, 6]
    # Rows are the same; positions differ from the fault on.
    assert [hashes[:3] for hashes in broken["hashes"]] == [hashes[:3] for hashes in sound["hashes"]]
    assert broken["losses"][:3] == pytest.approx(sound["losses"][:3], rel=1e-4)
    assert 3 <= broken["loss_difference"]["step"] < 6
    assert broken["speed"] is None
    assert broken["difference"]["planned"][0]["spans"][0]["origin"]["source"] == "given"
    # The speed leaves out the first step. A process with torch takes over 100 MB.
    assert sound["speed"]["warm_up"] == 1
    assert 0 < sound["speed"]["data_wait"] < 1
    assert sound["speed"]["tokens_per_s"] > 0
    assert 100e6 < sound["memory"]["resident"] < 4e9
    assert page.roles == []
    assert "SYNTHETIC" not in "".join([*page.words, output])


def test_a_broken_example_is_detected_next_to_a_sound_one(store, tmp_path, capsys, monkeypatch):
    def run_without_launcher(name, job, record, *, processes, seconds):
        return run_warm(name, job, record, processes)

    monkeypatch.setattr(comparison, "run_example", run_without_launcher)
    leaky, _, _ = make_examples(tmp_path)
    out = tmp_path / "out"
    words = ["--frameworks", f"pytorch,{leaky}", "--processes", "2", "--out", str(out)]
    assert run_command_line(["compare", store, *SIZES, *words]) == 1
    output = capsys.readouterr().out
    assert "1 of 2 frameworks not equal to the plan and the others" in output
    check_leaky_result(output, *read_outputs(out))


def test_the_error_of_an_example_is_recorded(store, tmp_path):
    _, dies, _ = make_examples(tmp_path)
    record = tmp_path / "record"
    record.mkdir()
    job = json.dumps({"data": store, "out": str(tmp_path), "steps": 6})
    (ended,) = run_ranks("-m", MODULE, dies, record, job, "250", ranks=1)
    assert ended.returncode == 1
    assert _read_fault(record) == "Rank 0: OSError: no such disk"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dies", "ended with 1. Rank 0: OSError: no such disk"),
        ("leaves", "ended without a record of what was trained on rank 0: the process exited"),
    ],
)
def test_an_example_that_ends_early_is_reported(store, tmp_path, name, message):
    example = {file.stem: file for file in make_examples(tmp_path)}[name]
    job = {"data": store, "out": str(tmp_path / "out"), "steps": 6}
    with pytest.raises(TrainError, match=f"{name}.py {message}"):
        run_example(str(example), job, tmp_path / "record")


@pytest.mark.slow
def test_broken_examples_are_detected_under_a_launcher(store, tmp_path, capsys):
    leaky, dies, leaves = make_examples(tmp_path)
    out = tmp_path / "out"
    words = ["--frameworks", f"pytorch,{leaky},{dies},{leaves}", "--processes", "2"]
    words += ["--out", str(out)]
    assert run_command_line(["compare", store, *SIZES, *words]) == 1
    output = capsys.readouterr().out
    assert "dies.py FAILED" in output
    assert "OSError: no such disk" in output
    assert "leaves.py FAILED" in output
    assert "ended without a record of what was trained on rank 0, 1" in " ".join(output.split())
    assert "3 of 4 frameworks not equal to the plan and the others" in output
    report, page = read_outputs(out)
    raised, exited = report["outcomes"][2:]
    assert (raised["state"], exited["state"]) == ("failed", "failed")
    check_leaky_result(output, report, page)


@pytest.mark.slow
def test_a_throughput_run_is_labelled_in_every_output(tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setattr(comparison, "FRAMEWORKS", (frameworks.find_framework("pytorch"), MISSING_FRAMEWORK))
    assert run_command_line(["compare", *SIZES, "--synthetic", "--out", str(out)]) == 0
    output = capsys.readouterr().out
    # Missing frameworks are listed with their remedy.
    assert "nosuch is missing: no-such-trainer is needed and not installed: pip install" in output
    assert output.startswith("SYNTHETIC DATA: a throughput run")
    assert output.count("SYNTHETIC DATA") == 2
    assert "source=synthetic" in output
    report, page = read_outputs(out)
    assert (report["source"], report["synthetic"]) == ("synthetic", True)
    assert "alert" in page.roles
    assert "SYNTHETIC DATA" in "".join(page.words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "store: missing; give a store, or --synthetic"),
        (["distributed_dummy"], "is synthetic data, which says nothing about training; give real"),
        (["STORE", "--synthetic"], "is real data; leave --synthetic out"),
        (["STORE", "--frameworks", "pytroch"], "'pytroch' is neither one of pytorch"),
        (["STORE", "--frameworks", "pytroch"], "did you mean 'pytorch'?"),
        (["STORE", "--frameworks", "gone.py"], "there is no file gone.py"),
        (["STORE", "--global-batch-size", "6", "--processes", "2"], "multiple of 4, such as 8"),
        (["STORE", "--steps", "0"], "steps: 0 is not a whole"),
        (["STORE", "--frameworks", "../x"], "'../x' is neither one of pytorch"),
        (["STORE", "--frameworks", "."], "'.' is neither one of pytorch"),
        (["STORE", "--frameworks", ""], "--frameworks: '' names none; leave it out for all"),
        (["STORE", "--frameworks", " ,"], "--frameworks: ' ,' names none"),
        (["STORE", "--tolerance", "-1"], "--tolerance: -1.0 is not a number above 0"),
        (["STORE", "--tolerance", "inf"], "--tolerance: inf is not a number above 0"),
        (["STORE", "--seconds", "nan"], "--seconds: nan is not a number above 0"),
        (["--runs", "a", "--tolerance", "nan"], "--tolerance: nan is no number above 0"),
        (["--runs", "a", "--tolerance", "inf"], "--tolerance: inf is no number above 0"),
        (["--runs", "a", "--tolerance", "-1"], "--tolerance: -1.0 is no number above 0"),
        (["STORE", "STORE"], "store: one is compared on, and 2 are given"),
        (["STORE", "--by", "tokens"], "--by: is of --runs"),
        (["--runs"], "runs: missing; give the logs"),
        (["--runs", "a", "--by", "hours"], "--by: 'hours' is none of step, tokens"),
        (["--runs", "a", "--steps", "5"], "steps: is of frameworks that are run"),
    ],
)
def test_misuse_is_refused_before_anything_runs(store, words, message, tmp_path, capsys):
    out = tmp_path / "out"
    words = [store if word == "STORE" else word for word in words]
    assert run_command_line(["compare", *words, "--out", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_an_empty_name_is_no_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_command_line(["compare", "--runs", "a", "--out", ""]) == 2
    assert "--out: '' is no folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_data_that_is_missing_is_never_substituted(tmp_path, capsys):
    assert run_command_line(["compare", str(tmp_path / "gone"), "--out", str(tmp_path / "out")]) == 1
    assert "gone" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_framework_that_is_asked_for_and_missing_is_refused(store, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(frameworks, "FRAMEWORKS", (*frameworks.FRAMEWORKS, MISSING_FRAMEWORK))
    out = str(tmp_path / "out")
    assert run_command_line(["compare", store, *SIZES, "--frameworks", "nosuch", "--out", out]) == 1
    assert "pip install 'no-such-trainer>=2.1'" in capsys.readouterr().err


def test_finished_runs(tmp_path, capsys):
    curves = json.loads((FOLDER / "curves.json").read_text())
    for name in ("text", "random"):
        rows = [{"step": n + 1, "loss": loss} for n, loss in enumerate(curves[name])]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    logs, out = [str(tmp_path / name) for name in ("text", "random")], tmp_path / "out"
    assert run_command_line(["compare", "--runs", *logs, "--out", str(out)]) == 0
    assert "1 converging, 1 flat" in capsys.readouterr().out
    report, _ = read_outputs(out)
    assert (report["kind"], report["source"]) == ("runs", "unknown")
    assert [run["verdict"]["kind"] for run in report["runs"]] == ["converging", "flat"]
    # Losses of two runs need to agree only if a tolerance is given.
    words = ["--tolerance", "0.001", "--json", "--out", str(out)]
    assert run_command_line(["compare", "--runs", *logs, *words]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [run["first_apart"] for run in report["runs"]] == [None, 2]


WAITING = """\
import time
from pathlib import Path

from batchloom.examples import pytorch

WAIT = Path(__file__).with_name("wait")


def train(model, job):
    while WAIT.exists():
        time.sleep(0.1)
    pytorch.train(model, job)
"""


def record_example_runs(monkeypatch, stopped_at=None):
    """Run examples in warm processes; return a list that collects their names."""
    names = []

    def run_without_launcher(name, job, record, *, processes, seconds):
        names.append(Path(name).name)
        if names[-1] == stopped_at:
            raise KeyboardInterrupt
        return run_warm(name, job, record, processes)

    monkeypatch.setattr(comparison, "run_example", run_without_launcher)
    return names


def read_report_without_times(out):
    """Return ``compare.json`` without times and memory, which differ between runs."""
    report = json.loads((out / "compare.json").read_text("utf-8"))
    for outcome in report["outcomes"]:
        assert outcome.pop("speed")["tokens_per_s"] > 0
        assert outcome.pop("memory")["resident"] > 0
    return report


def check_resumption(words, example, out, monkeypatch, capsys, line):
    """Run a stopped command again: it runs the example that was stopped, and reports what an undisturbed one does."""
    names = record_example_runs(monkeypatch)
    assert run_command_line([*words, str(out)]) == 0
    assert names == [example.name]
    assert f"{line}, before it was stopped\n" in capsys.readouterr().err
    assert sorted(file.name for file in out.iterdir()) == [f"compare.{ending}" for ending in ("html", "json", "png")]
    # A finished comparison leaves nothing to resume: the same command starts again.
    undisturbed = out.with_name("undisturbed")
    assert run_command_line([*words, str(undisturbed)]) == 0
    assert names == [example.name, "pytorch", example.name]
    assert read_report_without_times(out) == read_report_without_times(undisturbed)


def check_progress(errors, example, steps):
    """Check what a command printed before it was stopped; return the line of its finished example."""
    lines = errors.splitlines()
    assert lines[0] == f"[1/2] pytorch: running {steps} steps in 1 process"
    assert re.fullmatch(r"\[1/2\] pytorch: agrees, \d+\.\d s", lines[1])
    assert lines[2] == f"[2/2] {example}: running {steps} steps in 1 process"
    return lines[1]


@pytest.mark.slow
def test_the_same_command_resumes_after_a_stop(store, tmp_path, capsys, monkeypatch):
    example, out = tmp_path / "waiting.py", tmp_path / "out"
    example.write_text(WAITING)
    words = ["compare", store, *FEW_STEPS, "--frameworks", f"pytorch,{example}", "--out"]
    record_example_runs(monkeypatch, stopped_at="waiting.py")
    assert run_command_line([*words, str(out)]) == 130
    line = check_progress(capsys.readouterr().err, example, 3)
    check_resumption(words, example, out, monkeypatch, capsys, line)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_command_that_a_signal_ends_can_be_resumed(store, tmp_path, capsys, monkeypatch, number):
    example, wait, out = tmp_path / "waiting.py", tmp_path / "wait", tmp_path / "out"
    example.write_text(WAITING)
    wait.touch()
    words = ["compare", store, *SIZES, "--frameworks", f"pytorch,{example}", "--out"]
    # A killed command cannot delete its temporary folder.
    environments = [{"TMPDIR": str(tmp_path)}]
    with start_processes("-m", "batchloom", *words, str(out), environments=environments) as (command,):
        wait_until(lambda: "waiting.py: running" in command.err.read_text(), "the second example runs")
        command.send_signal(number)
        stopped = command.wait()
    # The example of a killed command ends by itself.
    wait.unlink()
    assert stopped.returncode == (130 if number == signal.SIGINT else -number)
    check_resumption(words, example, out, monkeypatch, capsys, check_progress(stopped.stderr, example, 6))


@pytest.mark.slow
def test_another_command_or_example_starts_over_and_reports_it(store, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    example = tmp_path / "own.py"
    example.write_text(WAITING)

    def compare(*options, stopped_at=None):
        names = record_example_runs(monkeypatch, stopped_at)
        words = ["--frameworks", "pytorch,own.py", "--out", "out"]
        code = run_command_line(["compare", store, *FEW_STEPS, *words, *options])
        return code, names, capsys.readouterr().err

    assert compare(stopped_at="own.py")[:2] == (130, ["pytorch", "own.py"])
    code, names, progress = compare("--seed", "7", stopped_at="own.py")
    assert (code, names) == (130, ["pytorch", "own.py"])
    assert progress.startswith("Starting over: seed was 0 and is 7, plan was ")
    example.write_text(WAITING + "\n")
    code, names, progress = compare("--seed", "7", stopped_at="own.py")
    assert (code, names) == (130, ["pytorch", "own.py"])
    assert progress.startswith("Starting over: the example own.py was ")
    code, names, progress = compare("--seed", "7")
    assert (code, names) == (0, ["own.py"])
    assert "Starting over" not in progress


def test_names_on_the_page_are_escaped():
    curve = LossCurve("<script>alert(1)</script>\x1b", "csv", (1, 2), (2.0, 1.0), None)
    text = render_comparison_page(compare_runs([curve]), b"png")
    assert "script" not in Page(text).tags
    assert "&lt;script&gt;alert(1)&lt;/script&gt;\\x1b" in text


def test_numbers_are_right_aligned(tmp_path):
    text = render_comparison_page(compare_runs([LossCurve("a", "csv", (1, 2), (2.0, 1.0), None)]), b"png")
    assert '<th scope="col" class="number">points</th>' in text
    assert '<td class="number">1.5000</td>' in text
    assert "<td>too short</td>" in text


@pytest.fixture
def draw_axes(monkeypatch, tmp_path):
    """Return a function that draws a comparison and returns the figure's axes."""

    def draw(result):
        saved_figures = []
        monkeypatch.setattr(compare_report, "save_figure", lambda *saved: saved_figures.append(saved))
        compare_report.draw_comparison(result, tmp_path / "a.png")
        figure, png = saved_figures[0]
        save_figure(figure, png)
        return figure.axes

    return draw


def has_whole_ticks(axes):
    return all(float(tick).is_integer() for tick in axes.get_xticks())


def test_curves_of_runs_are_solid_and_steps_whole(draw_axes):
    steps = tuple(range(1, 9))
    curves = [LossCurve(f"{n}", "csv", steps, (2.0 + n,) * 8, None) for n in range(12)]
    (axes,) = draw_axes(compare_runs(curves))
    lines = axes.get_lines()
    assert has_whole_ticks(axes)
    assert {line.get_linestyle() for line in lines[:10]} == {"-"}
    styles = {(line.get_color(), line.get_linestyle()) for line in lines}
    assert len(styles) == len(curves)


def test_losses_and_batches_of_frameworks_are_aligned(draw_axes):
    names = [f"framework {n}" for n in range(10)]
    outcomes = tuple(comparison.FrameworkResult(name, "ran", losses=(3.0, 2.0) * 4) for name in names)
    spec = comparison.CompareSpec(store="s", steps=8)
    result = comparison.FrameworkComparison(spec, "source=real s", False, "f", "d", names[0], outcomes)
    losses, batches = draw_axes(result)[:2]
    assert losses.get_xlim() == batches.get_xlim() == (-0.5, 7.5)
    assert has_whole_ticks(losses)
    # A dash is at least as long as its gap; shorter ones would look like dots.
    for line in losses.get_lines()[1:]:
        _, (dash, gap) = line._unscaled_dash_pattern
        assert gap <= dash


def test_a_run_that_hangs_leaves_no_process(tmp_path):
    pid_file = tmp_path / "pid"
    code = (
        "import subprocess, sys, pathlib, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        f"pathlib.Path({str(pid_file)!r}).write_text(str(child.pid))\n"
        "print('waiting for ever', file=sys.stderr, flush=True)\n"
        "time.sleep(600)\n"
    )
    with pytest.raises(TrainError, match="did not end within 10 s; its last output: waiting for ever"):
        _run_to_end([sys.executable, "-S", "-c", code], "hanging", 10)
    # The child is killed, but its new parent may not have waited for it yet.
    with contextlib.suppress(psutil.NoSuchProcess):
        orphan = psutil.Process(int(pid_file.read_text()))
        wait_until(lambda: orphan.status() == psutil.STATUS_ZOMBIE, "the child of the run is killed")
