"""Loss curves of finished runs: recognized log formats, and comparisons of runs."""

import json
import math
import re

import pytest

from batchloom import InputError, SettingsError
from batchloom.analysis.compare import CompareSpec, compare_runs, read_loss_curve
from batchloom.analysis.compare.compare_report import (
    comparison_to_plain,
    describe_comparison,
    make_table_rows,
)
from batchloom.analysis.compare.comparison import FrameworkComparison
from batchloom.analysis.compare.loss_curves import is_close_loss
from batchloom.cli import run_command_line
from batchloom.core.errors import InputMissingError
from batchloom.testing import write_store


def write_jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.slow
def test_a_run_of_batchloom_train(tmp_path):
    store = write_store(tmp_path / "s", [[n % 250 for n in range(40)] for _ in range(50)])
    words = ["--seq-len", "32", "--global-batch-size", "4", "--batch-size", "4", "--max-iters", "2"]
    for data, name in ((str(store.path), "a"), ("distributed_dummy:vocab=300", "b")):
        assert run_command_line(["train", "--data", data, "--out", str(tmp_path / name), *words]) == 0
    real_curve, synthetic_curve = (read_loss_curve(str(tmp_path / name)) for name in "ab")
    assert (real_curve.kind, real_curve.steps, real_curve.synthetic) == ("batchloom", (0, 1), False)
    assert real_curve.tokens[1] > real_curve.tokens[0] > 0
    assert synthetic_curve.synthetic is True


@pytest.mark.parametrize("size", range(20))
def test_a_last_line_may_be_unfinished_anywhere(tmp_path, size):
    file = tmp_path / "x"
    file.write_text('{"step": 1, "loss": 2}\n' + '{"step": 2, "loss": 1}'[:size])
    assert read_loss_curve(str(file)).steps == (1,)


def test_json_lines_of_other_programs(tmp_path):
    rows = [{"step": 10, "loss": 3.5}, {"step": 20, "eval_loss": 3.0}, {"step": 20, "loss": 3.25}]
    # Rows of a run that resumed from step 15, then an unfinished line.
    resumed_rows = [{"step": 30, "loss": 3.0}, {"step": 20, "loss": 3.125, "text": "\u2028a\u0085"}]
    file = write_jsonl(tmp_path / "x.log", rows)
    with open(file, "a", encoding="utf-8") as stream:
        stream.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in resumed_rows))
        stream.write('{"step": 30, "lo')
    curve = read_loss_curve(file)
    assert (curve.kind, curve.steps, curve.losses) == ("jsonl", (10, 20, 30), (3.5, 3.125, 3.0))
    assert (curve.tokens, curve.synthetic) == (None, None)


@pytest.mark.parametrize("name", ["split", "mode", "phase", "kind"])
@pytest.mark.parametrize("phase", ["eval", "Evaluation", "val", "valid", "validation", "test"])
def test_evaluation_losses_are_ignored(tmp_path, name, phase):
    trained = [{"step": n, "train_loss": 5.0 - n, name: "train"} for n in (1, 2)]
    evaluated = [{"step": n, "loss": 9.0, name: phase} for n in (1, 2, 3)]
    curve = read_loss_curve(write_jsonl(tmp_path / "x", [*trained, *evaluated]))
    assert (curve.steps, curve.losses) == ((1, 2), (4.0, 3.0))


def test_the_most_frequent_loss_name_is_read_and_null_is_nan(tmp_path):
    rows = [{"step": n, "train_loss": 4.0, "other": n} for n in (1, 2)]
    curve = read_loss_curve(write_jsonl(tmp_path / "x", [{"step": 2, "loss": 8.0}, *rows]))
    assert curve.losses == (4.0, 4.0)
    rows = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}, {"step": 3, "loss": 1.0}]
    dense = {"step": 1, "loss": None, "val_loss": 2.0}
    curve = read_loss_curve(write_jsonl(tmp_path / "x", [*rows, dense]))
    assert curve.losses == (2.0, pytest.approx(math.nan, nan_ok=True), 1.0)
    assert compare_runs([curve]).runs[0].verdict.kind == "diverging"


@pytest.mark.parametrize(("value", "synthetic"), [(1.0, True), (0.0, False), (None, None)])
def test_the_synthetic_metric_marks_synthetic_data(tmp_path, value, synthetic):
    metrics = {} if value is None else {"data/synthetic": value}
    write_jsonl(tmp_path / "a.jsonl", [{"step": n, "loss": 2.0, **metrics} for n in range(3)])
    names, cells = ",".join(metrics), ",".join(map(str, metrics.values()))
    (tmp_path / "a.csv").write_text(f"step,loss,{names}\n1,2.0,{cells}\n")
    curves = [read_loss_curve(str(tmp_path / name)) for name in ("a.jsonl", "a.csv")]
    assert [curve.synthetic for curve in curves] == [synthetic] * 2


def test_the_data_is_real_if_every_run_says_so(tmp_path):
    real, synthetic, unknown = (
        read_loss_curve(write_jsonl(tmp_path / name, [{"step": 1, "loss": 2.0, **metrics}]))
        for name, metrics in (
            ("real", {"data/synthetic": 0.0}),
            ("made_up", {"data/synthetic": 1.0}),
            ("silent", {}),
        )
    )

    def describe_source(*curves):
        return comparison_to_plain(compare_runs(curves))["source"]

    assert (describe_source(real, real), describe_source(real, unknown)) == ("real", "unknown")
    assert describe_source(real, unknown, synthetic) == "synthetic"


def test_the_csv_of_lightning(tmp_path):
    loggers = pytest.importorskip("lightning.pytorch.loggers")
    logger = loggers.CSVLogger(str(tmp_path), name="", version="version_0")
    for step in (0, 1, 2):
        logger.log_metrics({"train_loss": 3.0 - step}, step=step)
        logger.log_metrics({"val_loss": 3.0}, step=step)
    logger.save()
    curve = read_loss_curve(str(tmp_path))
    assert (curve.kind, curve.steps, curve.losses) == ("csv", (0, 1, 2), (3.0, 2.0, 1.0))


def test_a_long_text_next_to_the_loss_is_skipped(tmp_path):
    file = tmp_path / "run.csv"
    file.write_text("step,loss,text\n1,2," + "x" * 200_000 + "\n")
    assert (read_loss_curve(str(file)).steps, read_loss_curve(str(file)).losses) == ((1,), (2.0,))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it begins []"),
        (b"hello there\nyou\n", "it begins ['hello there']"),
        (b"epoch,loss\n1,2\n", "it begins ['epoch,loss']"),
        (b"step,accuracy\n1,2\n", "rows with step, accuracy, and none with a step and a loss"),
        (b'{"a": 1, "b": 2}', "an object of a, b"),
        (b'{"step": 1, "acc": 2}\n{"step": 2}\n', "rows with step, acc"),
        (b"\x89PNG\r\n\x1a\n\xff", "it is not text"),
        (b'{"step": 1, "loss": "low"}\n{"step": 2, "loss": 1}\n', "has 'low' for loss, which is not a number"),
        (b'{"step": 1,\n{"step": 2, "loss": 1}\n', "line 1 is not JSON"),
        (b'{"step": 1, "loss": true}\n', "has True for loss, which is not a number"),
        (b'{"step": 1, "loss": 1' + b"0" * 400 + b"}\n", "bits for loss, which is not a number"),
        (b'{"step": 1, "loss": 1' + b"0" * 5000 + b"}\n\n", "line 1 is not JSON: Exceeds the limit"),
        (b'{"step": 1, "loss": 1}\n' + b'{"a":[' * 20000 + b"\n", "line 2 is not JSON: brackets"),
        (b'{\n  "log_history": [{"step": 1, "loss": 1}]}', "jq -c '.log_history[] | .step -= 1'"),
        (b'{"step": 0.25, "loss": 1}\n', "has 0.25 for step, which is not a whole number"),
        (b"global_step,loss\nnan,1\n", "has 'nan' for global_step, which is not a whole number"),
        (b'{"step": 1e300, "loss": 1}\n', "has 1e+300 for step, which is not a whole number"),
        (b'{"step": 7, "loss": 1}\n{"step": 7, "loss": 9}\n', "two losses for step 7, 1.0 and 9.0"),
    ],
)
def test_a_file_that_is_no_log_is_refused_with_a_remedy(tmp_path, content, message):
    file = tmp_path / "x"
    file.write_bytes(content)
    with pytest.raises(InputError) as error:
        read_loss_curve(str(file))
    assert message in str(error.value)
    # Every message names a remedy.
    remedy = r"Expected: a folder|Delete |as JSON lines|into another file|Remove the other row|write the number"
    assert re.search(remedy, str(error.value))


def test_a_missing_run(tmp_path):
    with pytest.raises(InputMissingError, match="There is no run at"):
        read_loss_curve(str(tmp_path / "gone"))
    with pytest.raises(InputError, match="a folder without a run: it has none of log.jsonl"):
        read_loss_curve(str(tmp_path))


def make_curve(tmp_path, name, losses, tokens=None, first=1):
    rows = [
        {"step": first + n, "loss": loss} | ({"tokens_seen": tokens * (n + 1)} if tokens else {})
        for n, loss in enumerate(losses)
    ]
    return read_loss_curve(write_jsonl(tmp_path / name, rows))


def test_runs_are_compared_by_step_or_tokens(tmp_path):
    short = make_curve(tmp_path, "a", [4.0, 3.0, 2.0], tokens=10)
    long = make_curve(tmp_path, "b", [4.0, 3.5, 3.0, 2.5, 2.0, 1.5], tokens=5)
    by_step, by_tokens = (compare_runs([short, long], by) for by in ("step", "tokens"))
    assert (by_step.until, by_tokens.until) == (3, 30)
    assert [run.at_common for run in by_step.runs] == [3.0, 3.5]
    assert [run.at_common for run in by_tokens.runs] == [3.0, 2.75]
    assert by_step.agree
    without_tokens = make_curve(tmp_path, "d", [1.0, 0.5])
    with pytest.raises(SettingsError, match="d does not say how many tokens it has seen"):
        compare_runs([short, without_tokens], "tokens")
    for tokens, message in (((5, 3), "3 tokens at step 2, after 5"), ((5, math.nan), "nan tokens at s")):
        rows = [{"step": n, "loss": 1.0, "tokens_seen": count} for n, count in enumerate(tokens, 1)]
        decreasing = read_loss_curve(write_jsonl(tmp_path / "e", rows))
        with pytest.raises(SettingsError, match=f"e says {message}"):
            compare_runs([short, decreasing], "tokens")
        assert compare_runs([short, decreasing]).until == 2
    late = compare_runs([short, make_curve(tmp_path, "c", [1.0, 0.5], first=7)])
    assert (late.runs[1].at_common, late.runs[1].common) == (None, 0)
    assert [row[3] for row in make_table_rows(late)] == ["3.0000", "begins later"]
    with_nan = compare_runs([short, make_curve(tmp_path, "d", [math.nan] * 3)])
    assert [row[3] for row in make_table_rows(with_nan)] == ["3.0000", "nan"]
    strict = compare_runs([short, long], tolerance=0.1)
    assert [run.first_apart for run in strict.runs] == [None, 2]
    assert not strict.agree
    disjoint = compare_runs([short, make_curve(tmp_path, "e", [4.0, 3.0], first=9)], tolerance=0.1)
    assert not disjoint.agree
    assert any("no step in common with" in sentence for sentence in describe_comparison(disjoint))


@pytest.mark.parametrize(
    ("loss", "reference", "agrees"),
    [
        (1.0, 1.0, True),
        (1.00009, 1.0, True),
        (1.0002, 1.0, False),
        (float("nan"), 1.0, False),
        (float("nan"), float("nan"), False),
        (float("inf"), float("inf"), False),
    ],
)
def test_close_losses(loss, reference, agrees):
    assert is_close_loss(loss, reference, 1e-4) == agrees


def test_the_record_holds_no_credentials_of_a_store_url():
    spec = CompareSpec(store="https://user:secret@host/store?token=x")
    comparison = FrameworkComparison(spec, "source=real", False, "plan", "digest", "pytorch", ())
    assert comparison_to_plain(comparison)["spec"]["store"] == "https://host/store"
