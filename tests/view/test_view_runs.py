"""The page of a run in a real browser: curves, spikes, and the documents of a step."""

import contextlib
import json
import math
import os
import re
import shutil
import sys
import threading

import pytest

import batchloom
from batchloom.adapters.logging import read_log
from batchloom.analysis import PlanRequest, resolve_plan
from batchloom.core.fingerprint import fingerprint
from batchloom.plan import Edit
from batchloom.train import DataRequest, StreamOptions
from batchloom.view import ViewSpec, make_pages
from train.runs import BASE_SETTINGS, run_training, small_store, start_run
from view.axe import check_accessibility
from view.conftest import TOKEN, open_client, serving

STEPS = 12


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of 12 steps on a store, with the losses of the rows of every second step."""
    folder = tmp_path_factory.mktemp("runs")
    store = small_store(folder / "s")
    run_training(store, folder / "run", {"steps": STEPS, "log_row_loss": 2})
    return folder / "run", store


@pytest.fixture(scope="module")
def address(run):
    with serving(run[0], store=str(run[1].path)) as served:
        yield served


@pytest.fixture
def opened(page, address):
    page.goto(f"{address}/run?token={TOKEN}")
    return page


def explain_step(run, step):
    """Return the documents of each row of a step of the log."""
    plan, _ = resolve_plan(PlanRequest(checkpoint=run[0], store=str(run[1].path)))
    return [[span.document for span in sequence.spans] for sequence in batchloom.explain(plan, step)]


def read_rows(page):
    """Return the number and the documents of each drawn row."""
    return [
        (
            int(row.locator(".number").first.inner_text()),
            [int(link.get_attribute("href").partition("?")[0].rpartition("/")[2]) for link in row.locator("a").all()],
        )
        for row in page.locator(".ranked .row").all()
    ]


def write_log(folder, entries, tail="", *, planned=None):
    """Write the log of a run by hand; its folder holds no checkpoint."""
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text("{}")
    start = {"kind": "start", "step": 0, "origin": "source=real s/train", "run": {"steps": planned}}
    lines = [start, *({"kind": "step", "origin": "source=real s/train", **entry} for entry in entries)]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return folder


def test_a_click_on_a_point_shows_the_rows_with_the_largest_loss_first(opened, run):
    assert opened.locator("[data-chart] a").count() == STEPS
    opened.locator("[data-chart] a[data-step='5'] rect").click()
    opened.wait_for_url("**step=5#step")
    entry = next(e for e in read_log(run[0] / "log.jsonl") if e["kind"] == "step" and e["step"] == 5)
    documents, losses = explain_step(run, 5), entry["row_loss"]
    order = sorted(range(4), key=lambda row: -losses[row])
    assert read_rows(opened) == [(row, documents[row]) for row in order]
    notes = [row.locator(".number").last.inner_text() for row in opened.locator(".ranked .row").all()]
    assert notes == [f"{losses[row]:.3f}" for row in order]
    assert f"{entry['loss']:.4f}" in opened.locator("#step .facts").inner_text()


@pytest.mark.slow
def test_a_step_without_row_losses_shows_its_rows_in_order(opened, address, run):
    opened.goto(f"{address}/run?step=0")
    assert read_rows(opened) == list(enumerate(explain_step(run, 0)))
    assert opened.locator("#step p.soft a").inner_text() == "1"
    assert opened.locator("#step a[rel='prev']").count() == 0


def test_a_span_opens_its_document_and_the_step_its_packing(opened, address, run):
    opened.goto(f"{address}/run?step=2")
    first = explain_step(run, 2)[0][0]
    opened.locator("#step").get_by_role("link", name="packing").click()
    opened.wait_for_url("**/packing?step=2")
    assert opened.locator("h1").inner_text().startswith("Step 2 ")
    opened.go_back()
    opened.locator(".ranked .spans a").first.click()
    opened.wait_for_url(f"**/document/{first}*")
    assert opened.locator("h1").inner_text().startswith(f"Document {first}")


@pytest.mark.slow
def test_keys_move_between_points_and_steps(opened):
    opened.locator("[data-chart] a[data-step='4']").focus()
    opened.keyboard.press("ArrowRight")
    opened.keyboard.press("ArrowRight")
    opened.keyboard.press("Enter")
    opened.wait_for_url("**step=6#step")
    opened.keyboard.press("ArrowLeft")
    opened.wait_for_url("**step=5#step")
    opened.keyboard.press("ArrowRight")
    opened.wait_for_url("**step=6#step")


def test_a_range_is_chosen_by_the_address_and_by_dragging(opened, address):
    opened.goto(f"{address}/run?from=4&to=9")
    assert [link.get_attribute("data-step") for link in opened.locator("[data-chart] a").all()] == list("456789")
    box = opened.locator("[data-chart]").bounding_box()
    middle = box["y"] + box["height"] / 2
    # The chart covers steps 4 to 9, so this is 5.05 to 7.95.
    opened.mouse.move(box["x"] + 0.21 * box["width"], middle)
    opened.mouse.down()
    opened.mouse.move(box["x"] + 0.5 * box["width"], middle)
    opened.mouse.move(box["x"] + 0.79 * box["width"], middle)
    opened.mouse.up()
    opened.wait_for_url("**from=5&to=8*")
    assert opened.locator("[data-chart] a").count() == 4
    opened.get_by_role("link", name="whole run").click()
    opened.wait_for_url(f"{address}/run")


@pytest.mark.slow
def test_smoothing_and_a_logarithmic_axis_are_in_the_address(opened, address):
    opened.get_by_label("Smooth").select_option("10")
    opened.get_by_label("Axis").select_option("log")
    opened.get_by_role("button", name="Show", exact=True).click()
    opened.wait_for_url("**smooth=10&axis=log")
    assert opened.locator(".curve.smooth").count() == 1
    assert opened.get_by_label("Axis").input_value() == "log"


def read_page(address, path):
    """Return the text of a page."""
    with open_client(address) as client:
        return client.get(path).raise_for_status().text


def test_the_means_of_a_range_include_the_steps_before_it(tmp_path):
    entries = [{"step": step, "loss": float(step)} for step in range(1, 41)]
    entries[9]["loss"] = 90.0
    with serving(write_log(tmp_path / "run", entries)) as address:
        text = read_page(address, "/run?from=10&to=20&smooth=10")
    (line,) = re.findall(r'class="curve smooth" points="([^"]*)"', text)
    heights = [float(point.partition(",")[2]) for point in line.split()]
    means = [sum(entry["loss"] for entry in entries[step - 10 : step]) / 10 for step in range(10, 21)]
    # The axis covers 11 to 90, and a margin of 4 % on both sides.
    assert heights == pytest.approx([1000 * ((90 - mean) / 79 + 0.04) / 1.08 for mean in means], abs=0.1)
    # The first step of the range is far above the steps before it.
    assert re.findall(r'class="spike" href="/run\?[^"]*step=(\d+)#', text) == ["10"]


def test_a_run_remembers_its_data(page, run):
    with serving(run[0]) as address:
        page.goto(f"{address}/run?step=2&token={TOKEN}")
        assert read_rows(page) == list(enumerate(explain_step(run, 2)))


def test_without_its_data_a_run_shows_curves_and_what_to_give(page, run, tmp_path):
    folder = shutil.copytree(run[0], tmp_path / "run")
    described = json.loads((folder / "run.json").read_text())
    del described["data"]["path"]
    (folder / "run.json").write_text(json.dumps(described))
    assert make_pages(ViewSpec(data=[str(folder)])).first_page == "/run"
    with serving(folder) as address:
        page.goto(f"{address}/?token={TOKEN}")
        page.wait_for_url("**/run")
        page.locator("[data-chart] a[data-step='6'] rect").click()
        page.wait_for_url("**step=6#step")
        remedy = f"Name the data of the run: batchloom view {folder} --store STORE."
        assert page.locator("#step .error").inner_text() == remedy
        assert page.locator(".ranked").count() == 0
        page.problems.clear()
        assert page.goto(f"{address}/documents").status == 400
        assert remedy in page.locator("main").inner_text()
        # Chromium reports the status as an error of the console.
        page.problems.clear()


def test_a_run_on_a_mixture_asks_for_the_mixture(tmp_path):
    folder = write_log(tmp_path / "run", [{"step": 1, "loss": 2.0}])
    described = {"data": {"mixture": {}, "sources": {"web": {}, "code": {}}}, "order": {}}
    (folder / "run.json").write_text(json.dumps(described))
    with serving(folder) as address:
        assert f"batchloom view {folder} --mixture MIXTURE." in read_page(address, "/run?step=1")


def copy_run(run, folder):
    """Copy a run without its checkpoint."""
    shutil.copytree(run[0], folder)
    shutil.rmtree(folder / "checkpoints")
    return folder


@pytest.mark.slow
def test_a_run_without_a_checkpoint_is_shown_by_its_settings(page, run, tmp_path):
    folder = copy_run(run, tmp_path / "run")
    with serving(folder, store=str(run[1].path)) as address:
        page.goto(f"{address}/run?token={TOKEN}")
        page.locator("[data-chart] a[data-step='4'] rect").click()
        page.wait_for_url("**step=4#step")
        assert read_rows(page) == list(enumerate(explain_step(run, 4)))
        page.goto(f"{address}/plan")
        assert "steps done at the newest checkpoint\n0" in page.locator(".facts").inner_text()


def test_the_edits_of_a_log_are_in_the_plan(page, run, tmp_path):
    folder = copy_run(run, tmp_path / "run")
    plan, _ = resolve_plan(PlanRequest(checkpoint=run[0], store=str(run[1].path)))
    banned = batchloom.explain(plan, 7)[0].spans[0].document
    edited = plan.edited(Edit(step=6, ban={"data": [banned]}))
    with serving(folder, store=str(run[1].path)) as address:
        page.goto(f"{address}/run?step=7&token={TOKEN}")
        assert "banned" not in page.locator(".ranked").inner_text()
        with (folder / "log.jsonl").open("a") as log:
            log.write(json.dumps({"kind": "edit", "step": 5, "edit": edited.journal[-1]}) + "\n")
        page.reload()
        assert "banned" in page.locator(".ranked").inner_text()
        page.goto(f"{address}/plan")
        assert "ban 1 document of data" in page.locator("section", has_text="Changes of the run").inner_text()


def test_a_run_without_a_checkpoint_refuses_the_store_of_another(run, tmp_path):
    other = small_store(tmp_path / "other", longest=30)
    folder = copy_run(run, tmp_path / "run")
    with pytest.raises(batchloom.StateError, match="not those of the run"), serving(folder, store=str(other.path)):
        pass


def test_pages_follow_a_run_that_writes(run, tmp_path):
    """The log grows and checkpoints are replaced while two clients read every page."""
    folder, state = tmp_path / "run", "checkpoints/step_{:08d}/state.json"
    loader = batchloom.Loader(run[1], seq_len=32, global_batch_size=4, steps=STEPS)
    copy_run(run, folder)
    lines = (run[0] / "log.jsonl").read_text().splitlines(keepends=True)
    (folder / "log.jsonl").write_text(lines[0])
    stop = threading.Event()

    def write():
        step = 0
        # Runs make a checkpoint every few seconds at most.
        while not stop.wait(0.05):
            step = step % STEPS + 1
            with (folder / "log.jsonl").open("a") as log:
                line = lines[step]
                log.write(line[:20])
                log.flush()
                log.write(line[20:])
            file = folder / state.format(step)
            partial = file.parent.with_suffix(".partial")
            partial.mkdir(parents=True)
            saved = {"step": step, "loader": loader.state_at(step), "checksums": {}}
            (partial / file.name).write_text(json.dumps({**saved, "check": fingerprint(saved)}))
            shutil.rmtree(file.parent, ignore_errors=True)
            partial.rename(file.parent)
            for old in folder.glob("checkpoints/step_*"):
                if old != file.parent:
                    shutil.rmtree(old)

    writer = threading.Thread(target=write)
    with serving(folder, store=str(run[1].path)) as address, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(open_client(address)) for _ in range(2)]
        writer.start()
        try:
            for number in range(30):
                client = clients[number % 2]
                path = ("/run", "/run?step=1", "/plan", "/packing?step=2", "/documents")[number % 5]
                answer = client.get(path)
                assert answer.status_code == 200, answer.text
                assert "error" not in re.findall(r'<p class="(\w+)" role', answer.text)
        finally:
            stop.set()
            writer.join()


def test_the_store_of_another_run_is_refused(run, tmp_path):
    other = small_store(tmp_path / "other", longest=30)
    with pytest.raises(batchloom.StateError), serving(run[0], store=str(other.path)):
        pass


def test_a_run_on_a_stream_shows_its_curve_and_why_it_has_no_documents(page, tmp_path):
    (tmp_path / "words.txt").write_text("one two three four five six seven " * 200)
    request = DataRequest(
        stream=(str(tmp_path / "words.txt"),), tokenizer="bytes", options=StreamOptions(workers=0, lanes=1)
    )
    start_run(request, tmp_path / "run", {**BASE_SETTINGS, "steps": 3})
    with serving(tmp_path / "run") as address:
        page.goto(f"{address}/run?step=2&token={TOKEN}")
        assert page.locator("[data-chart] a").count() == 3
        assert "was on a stream" in page.locator("#step .error").inner_text()


def test_losses_that_are_not_finite_stay_visible(page, tmp_path):
    entries = [{"step": step, "loss": 5 - step / 10} for step in range(1, 21)]
    entries[7]["loss"], entries[11]["loss"] = math.nan, None
    with serving(write_log(tmp_path / "run", entries)) as address:
        page.goto(f"{address}/run?token={TOKEN}")
        assert page.locator("[data-chart] .lost").count() == 2
        # The line has gaps there.
        assert page.locator(".big .curve").count() == 3
        page.get_by_role("link", name="step 8 not finite").click()
        page.wait_for_url("**step=8#step")
        assert "not finite" in page.locator("#step .facts").inner_text()


def test_a_log_is_read_on_while_it_is_written(page, tmp_path):
    entries = [{"step": step, "loss": 2.0} for step in range(1, 6)]
    folder = write_log(tmp_path / "run", entries, tail='{"kind": "step", "step": 6, "lo')
    with serving(folder) as address:
        page.goto(f"{address}/run?token={TOKEN}")
        assert page.locator("[data-chart] a").count() == 5
        with (folder / "log.jsonl").open("a") as log:
            log.write('ss": 2.5}\nnot JSON\n')
        page.reload()
        assert page.locator("[data-chart] a").last.get_attribute("data-step") == "6"
        assert "line 8" in page.locator("p.error:not([hidden])").inner_text()
        # A resumed run repeats steps 4 to 6.
        with (folder / "log.jsonl").open("a") as log:
            log.write('{"kind": "start", "step": 3, "origin": "source=real s/train", "run": {}}\n')
            log.write('{"kind": "step", "step": 4, "loss": 9.0}\n')
        page.reload()
        assert [link.get_attribute("data-step") for link in page.locator("[data-chart] a").all()] == list("1234")
        assert "9.0000" in page.locator("[data-chart] a").last.text_content()
        assert page.locator(".mark").count() == 1
        # A resumed run of batchloom train replaces its log.
        write_log(tmp_path / "new", entries[:2])
        (tmp_path / "new" / "log.jsonl").replace(folder / "log.jsonl")
        page.reload()
        assert page.locator("[data-chart] a").count() == 2
        # A run that begins anew writes a longer log into the same file.
        write_log(folder, [{"step": step, "loss": 7.0} for step in range(1, 10)], planned=9)
        page.reload()
        assert {link.text_content().split()[-1] for link in page.locator("[data-chart] a").all()} == {"7.0000"}


def test_entries_that_no_trainer_writes_are_harmless(tmp_path):
    losses = (3.0, sys.float_info.max, -1e308, 1e-320)
    entries = [{"step": step, "loss": loss, "row_loss": 5} for step, loss in enumerate(losses, 1)]
    with serving(write_log(tmp_path / "run", entries)) as address, open_client(address) as client:
        for path in ("/run", "/run?axis=log", "/run?step=2"):
            assert client.get(path).status_code == 200


def test_the_curves_follow_a_run_until_it_ends(own_page, tmp_path):
    page = own_page
    folder = write_log(tmp_path / "run", [{"step": step, "loss": 2.0} for step in range(3)], planned=10)
    points = page.locator("[data-chart] a")

    def train_until(done):
        """Log steps until so many are done; let the page ask for them."""
        with (folder / "log.jsonl").open("a") as log:
            log.writelines(f'{{"kind": "step", "step": {step}, "loss": 3.0}}\n' for step in range(3, done))
        with page.expect_response("**/run*"):
            page.clock.fast_forward(5_000)

    page.clock.install()
    page.set_viewport_size({"width": 1280, "height": 300})
    with serving(folder) as address:
        page.goto(f"{address}/run?step=2&token={TOKEN}")
        page.evaluate("scrollTo(0, 200)")
        train_until(5)
        page.get_by_role("heading", name="5 of 10 steps").wait_for()
        assert points.count() == 5
        assert page.evaluate("scrollY") == 200
        assert page.locator("[aria-current='true']").get_attribute("data-step") == "2"
        assert page.locator("#step a[rel='next']").inner_text() == "step 3 →"
        # What the reader uses stays, and has its keys.
        points.nth(3).focus()
        train_until(7)
        page.keyboard.press("ArrowRight")
        assert page.evaluate("document.activeElement.dataset.step") == "4"
        assert points.count() == 5
        page.evaluate("document.activeElement.blur()")
        train_until(10)
        page.get_by_role("heading", name="10 of 10 steps").wait_for()
        assert page.locator("[hx-trigger]").count() == 1
        # The last evaluation may take a minute.
        written = (folder / "log.jsonl").stat().st_mtime - 60
        os.utime(folder / "log.jsonl", (written, written))
        train_until(3)
        page.locator("[hx-trigger]").wait_for(state="detached")
        points.nth(6).locator("rect").click()
        page.wait_for_url("**step=6#step")


def test_a_killed_run_is_not_followed_for_long(tmp_path):
    folder = write_log(tmp_path / "run", [{"step": 1, "loss": 2.0}], planned=10)
    with serving(folder) as address:
        assert "hx-trigger" in read_page(address, "/run")
        os.utime(folder / "log.jsonl", (0, 0))
        assert "hx-trigger" not in read_page(address, "/run")


@pytest.mark.slow
def test_a_single_step_is_a_point(page, tmp_path):
    with serving(write_log(tmp_path / "run", [{"step": 1, "loss": 2.0, "tokens_per_s": 9.0}])) as address:
        page.goto(f"{address}/run?token={TOKEN}")
        assert page.locator("h1").inner_text() == "Loss step 1"
        assert page.locator(".big .point, .small-charts .point").count() == 2
        page.locator("[data-chart] a rect").click()
        page.wait_for_url("**step=1#step")


def test_a_range_without_a_step_names_those_of_the_log(address):
    text = read_page(address, "/run?from=100&to=200")
    assert f"<small>{STEPS} of {STEPS} steps</small>" in text
    assert f"The log has no step in this range. It has steps 0\N{EN DASH}{STEPS - 1}." in text
    assert f"The run ends with step {STEPS - 1}." in read_page(address, "/run?step=500")


@pytest.mark.slow
def test_a_long_log_is_thinned_out_and_keeps_its_extremes(page, tmp_path):
    entries = [{"step": step, "loss": 3 + 0.01 * (step % 7)} for step in range(1, 6_001)]
    entries[3_141]["loss"], entries[5_000]["loss"], entries[4_444]["loss"] = 7.5, 0.25, None
    with serving(write_log(tmp_path / "run", entries)) as address:
        page.goto(f"{address}/run?token={TOKEN}")
        steps = [int(link.get_attribute("data-step")) for link in page.locator("[data-chart] a").all()]
        assert len(steps) == 480
        assert {3_142, 4_445} <= {*steps}
        assert page.locator("[data-chart] a[data-step='3142'] title").text_content() == "step 3,142: loss 7.5000"
        heights = [float(y) for line in page.locator(".big .curve").all() for y in read_heights(line)]
        assert (min(heights), max(heights)) == pytest.approx((1000 * 0.04 / 1.08, 1000 * 1.04 / 1.08), abs=0.1)
        # No other step is far above the steps before it, as steps are higher only by a pattern of 7.
        assert [text.split()[1] for text in page.locator(".spike").all_inner_texts()] == ["3,142", "4,445"]
        page.locator(".spike").first.click()
        page.wait_for_url("**step=3142#step")
        mean = sum(entry["loss"] for entry in entries[3_116:3_141]) / 25
        assert f"{mean:.4f} (+{7.5 - mean:.4f})" in page.locator("#step .facts").inner_text()
        assert len(page.content()) < 300_000


def read_heights(line):
    return [point.partition(",")[2] for point in line.get_attribute("points").split()]


@pytest.mark.slow
def test_the_log_of_another_trainer_is_drawn(page, tmp_path):
    (tmp_path / "metrics.csv").write_text("step,loss\n" + "".join(f"{step},{9 - step}\n" for step in range(1, 6)))
    with serving(tmp_path / "metrics.csv") as address:
        page.goto(f"{address}/run?token={TOKEN}&step=3")
        assert page.locator("[data-chart] a").count() == 5
        assert "--checkpoint" in page.locator("#step .error").inner_text()


@pytest.mark.slow
def test_the_checkpoint_of_another_trainer_leads_to_the_documents(page, run, tmp_path):
    (tmp_path / "metrics.csv").write_text("step,loss\n" + "".join(f"{step},{9 - step}\n" for step in range(1, 6)))
    loader = batchloom.Loader(run[1], seq_len=32, global_batch_size=4, steps=STEPS)
    (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    options = {"store": str(run[1].path), "checkpoint": tmp_path / "state.json"}
    with serving(tmp_path / "metrics.csv", **options) as address:
        page.goto(f"{address}/run?token={TOKEN}&step=3")
        assert read_rows(page) == list(enumerate(explain_step(run, 3)))


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/run?step=6", "/run?smooth=10&axis=log&step=99"])
def test_the_page_breaks_no_rule_of_axe(opened, address, path):
    check_accessibility(opened, address + path)


def test_wrong_parameters_are_named(address):
    with open_client(address) as client:
        for path, message in (
            ("/run?from=9&to=3", "is before step 9"),
            ("/run?step=abc", "step: &#39;abc&#39; is not a whole number"),
        ):
            response = client.get(path)
            assert response.status_code == 400
            assert message in response.text
        assert "no entry of step 99" in client.get("/run?step=99").text
        assert "unsafe" not in client.get("/run").headers["content-security-policy"]
