"""The page of a plan in a real browser: shares, epochs, steps of a document, and ranks."""

import json
import re
from collections import Counter

import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import batchloom
from batchloom.adapters.pytorch import LoaderIterable
from batchloom.batches import read_mixture
from batchloom.cli import run_command_line
from batchloom.plan import Stage
from batchloom.testing import write_store
from batchloom.view import PlanChoice, ViewTarget
from view.axe import check_accessibility
from view.conftest import TOKEN, serving

WEIGHTS, LATER = {"web": 0.75, "code": 0.25}, {"web": 0.2, "code": 0.8}
SETTINGS = {"seq_len": 64, "global_batch_size": 12, "steps": 90}
ADDRESS = "/plan?seq_len=64&batch=12&steps=90"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A mixture of two stores whose weights change after 30 steps."""
    folder = tmp_path_factory.mktemp("mixture")
    for name, count in (("web", 300), ("code", 80)):
        texts = [{"text": f"{name} {number} " + "word " * (number % 11)} for number in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
        batchloom.prepare(folder / f"{name}.jsonl", out=folder / name, tokenizer="bytes", val_fraction=0)
    file = {"weights": WEIGHTS, "stores": {name: str(folder / name) for name in WEIGHTS}}
    (folder / "mix.yaml").write_text(json.dumps({**file, "stages": [{"step": 30, "weights": LATER}]}))
    return folder / "mix.yaml"


@pytest.fixture(scope="module")
def plan(mixture):
    read = read_mixture(str(mixture))
    assert list(read.stages) == [Stage(step=30, weights=LATER)]
    return batchloom.Loader(read, **SETTINGS, output="numpy").plan


@pytest.fixture(scope="module")
def address(mixture):
    with serving(mixture) as served:
        yield served


@pytest.fixture
def opened(page, address):
    page.goto(f"{address}{ADDRESS}&token={TOKEN}")
    return page


@pytest.mark.slow
def test_the_drawn_shares_are_those_of_the_rows(opened, plan):
    columns = opened.locator("#shares ~ figure .plot g")
    assert columns.count() == 60
    rows = [plan.rows(*plan.positions_of(step)) for step in range(90)]
    sources = [[plan.names[number] for number in step.sources[step.pointers[:-1]]] for step in rows]
    colours = {f"c{number}": name for number, name in enumerate(plan.names)}
    for column in (columns.nth(number) for number in (0, 13, 20, 37, 59)):
        first, last = (
            int(word)
            for word in column.locator("title").text_content().strip().partition("\n")[0].split()
            if word.isdigit()
        )
        counts = Counter(name for step in sources[first : last + 1] for name in step)
        shares = {name: 100 * count / counts.total() for name, count in counts.items()}
        drawn = {
            colours[part.get_attribute("class")]: float(part.get_attribute("height"))
            for part in column.locator("rect").all()
        }
        assert drawn == pytest.approx(shares, abs=0.001)


def test_the_promise_and_the_stage_are_shown(opened):
    promise = opened.locator("section", has_text="Shares over the run").locator("strong")
    assert 0 < float(promise.inner_text()) <= 1
    change = opened.locator("section", has_text="Changes of the run").locator("tbody tr").inner_text()
    assert change.split("\t")[:2] == ["30", "stage"]
    assert "code 80.0%" in change
    line = opened.locator(".change")
    assert float(line.get_attribute("x1")) == pytest.approx(100 / 3, abs=0.01)


def test_a_range_of_steps_includes_its_last(opened, address):
    opened.get_by_label("Steps from").fill("20")
    opened.get_by_label("to", exact=True).fill("30")
    opened.locator("section", has_text="Shares over the run").get_by_role("button").click()
    opened.wait_for_url("**from=20&to=30**")
    assert opened.locator("#shares ~ figure .plot g").count() == 11
    for heading in ("#shares", "#changes", "th >> text=largest deviation"):
        assert re.search(r" steps 20\W30$", opened.locator(heading).inner_text())
    assert "step 31 is after step 30" in opened.request.get(f"{address}{ADDRESS}&from=31&to=30").text()


@pytest.mark.slow
def test_epochs_are_those_of_the_forecast(opened, plan):
    from batchloom.analysis import forecast_plan

    table = opened.locator("section", has=opened.locator("#sources")).locator("tbody tr")
    rows = {row.locator("th").inner_text(): row.locator("td").all_inner_texts() for row in table.all()}
    for source in forecast_plan(plan).sources:
        weight, effective, *_, sequences, _, epochs, _ = rows[source.name]
        assert (weight, sequences) == (f"{WEIGHTS[source.name]:.1%}", f"{source.sequences:,}")
        assert (effective, epochs) == (f"{source.effective:.1%}", f"{source.epochs:.2f}")


@pytest.mark.parametrize(
    ("source", "text", "document"),
    [
        pytest.param("code", "17", 17, marks=pytest.mark.slow),
        ("", "code.jsonl:18", 17),
        pytest.param("web", "web.jsonl:1", 0, marks=pytest.mark.slow),
    ],
)
def test_a_document_is_found_in_the_steps_that_serve_it(opened, plan, source, text, document):
    opened.locator("select[name=source]").select_option(source)
    opened.get_by_label("Document or file:line").fill(text)
    opened.get_by_role("button", name="Find").click()
    opened.wait_for_url("**document=*")
    name = source or "code"
    expected = [(showing.step, showing.row) for showing in batchloom.when(plan, document=document, source=name)]
    rows = opened.locator("#served tbody tr").all()
    shown = [(row.locator("th").inner_text(), row.locator("td").first.inner_text()) for row in rows]
    assert [(int(step), int(row)) for step, row in shown] == expected
    assert len(expected) > 1
    opened.locator("#served th a").first.click()
    opened.wait_for_url(f"**step={expected[0][0]}&row=*")
    assert "64 tokens" in opened.locator("h1").inner_text()


@pytest.mark.slow
def test_the_page_of_a_large_store_waits_for_its_counts_and_loads_again(page, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with serving("dummy:documents=2000000") as address:
        answer = page.goto(f"{address}/plan?seq_len=8192&document=1999999&step=20000&ranks=2&token={TOKEN}")
        assert answer.headers["refresh"] == "2"
        note = (
            "The sequences of the data are being counted, once for this plan. This page loads again until it is done."
        )
        assert page.get_by_role("alert").all_inner_texts() == [note, note]
        page.locator("#served tbody tr").wait_for()
        assert page.locator("#loads tbody tr").count() == 2


@pytest.mark.slow
def test_a_search_in_many_epochs_is_bounded(page, tmp_path):
    store = write_store(tmp_path / "store", [[104, 105]] * 40)
    with serving(store.path) as address:
        # Ten sequences make an epoch of ten steps.
        page.goto(f"{address}/plan?seq_len=8&batch=1&steps=100000&document=5&token={TOKEN}")
        assert "Searched up to step 1,000." in page.locator("section", has=page.locator("#served")).inner_text()
        assert page.locator("#served tbody tr").count() == 100


@pytest.mark.slow
def test_a_small_source_does_not_bound_the_search_in_another(page, tmp_path):
    write_store(tmp_path / "big", [[104, 105]] * 2000)
    write_store(tmp_path / "tiny", [[104, 105]] * 4)
    (tmp_path / "mix.yaml").write_text("weights: {big: 1, tiny: 1}\nstores: {big: big, tiny: tiny}\n")
    with serving(tmp_path / "mix.yaml") as address:
        page.goto(f"{address}/plan?seq_len=8&batch=1&steps=1000&document=7&source=big&token={TOKEN}")
        assert page.locator("#served tbody tr").count() == 1


def test_a_wrong_document_is_named_beside_the_form(opened, address):
    for document, message in (
        ("99999", "no document 99,999"),
        ("some words", "neither the number of a document"),
        ("web.jsonl:301", "(line or row 301): 300 records of it were read"),
    ):
        opened.goto(f"{address}{ADDRESS}&document={document}&source=web")
        assert message in opened.locator("[role=alert]").inner_text()
        assert opened.locator("#loads").count() == 1


def test_the_rows_of_ranks_are_those_of_explain(opened, address, plan):
    opened.goto(f"{address}{ADDRESS}&step=7&ranks=4")
    rows = [cell.inner_text() for cell in opened.locator("#loads tbody td:nth-child(2)").all()]
    sequences = batchloom.explain(plan, 7, world_size=4, text=0)
    expected = {rank: [s.row for s in sequences if s.rank == rank] for rank in range(4)}
    assert rows == [", ".join(map(str, expected[rank])) for rank in range(4)]
    opened.locator("#loads tbody a").nth(2).click()
    opened.wait_for_url("**rank=2#ranks")
    cells = opened.locator("#loads tbody td:nth-child(5)").all_inner_texts()
    costs = [float(cell.split()[0]) for cell in cells]
    bars = [float(bar.get_attribute("width")) for bar in opened.locator("#loads rect").all()]
    assert bars == pytest.approx([100 * cost / max(costs) for cost in costs], abs=0.6)
    assert len(set(bars)) > 1
    drawn = [int(row.locator(".number").first.inner_text()) for row in opened.locator("#ranks .row").all()]
    assert drawn == expected[2]
    opened.goto(f"{address}{ADDRESS}&step=7&ranks=5")
    assert "5" in opened.locator("#ranks [role=alert]").inner_text()


class WorkerOfStep(IterableDataset):
    """Worker and step of each batch that ``LoaderIterable`` makes in a worker."""

    def __init__(self, loader):
        self.batches = LoaderIterable(loader)

    def __iter__(self):
        for batch in self.batches:
            yield get_worker_info().id, batch.step


@pytest.mark.slow
def test_the_worker_of_a_step_is_that_of_a_dataloader(opened, address, mixture):
    loader = batchloom.Loader(read_mixture(str(mixture)), **SETTINGS, rank=0, world_size=4, prefetch=0)
    made = dict(reversed(pair) for pair in DataLoader(WorkerOfStep(loader), batch_size=None, num_workers=2))
    for step in (0, 7, 8):
        opened.goto(f"{address}{ADDRESS}&step={step}&ranks=4&workers=2")
        assert opened.locator("#ranks p strong").inner_text() == f"worker {made[step]}"
        rows = opened.locator("#workers tbody tr").all()
        shown = {
            int(number): int(row.locator("th").inner_text())
            for row in rows
            for number in row.locator("td").inner_text().split(", ")
        }
        assert len(shown) >= 6
        assert shown.items() <= made.items()
        assert opened.locator("#workers .current th").inner_text() == str(made[step])
    opened.locator("#workers a").last.click()
    opened.wait_for_url("**workers=2#ranks")


def test_balance_is_offered_where_it_changes_the_cost(opened, address, mixture):
    loader = batchloom.Loader(read_mixture(str(mixture)), **SETTINGS, rank=0, world_size=4, balance=True)
    measured = [loader.imbalance(step) for step in range(90)]
    changes = [f"{imbalance.in_order:.2f}" != f"{imbalance.actual:.2f}" for imbalance in measured]
    sentence = opened.locator("#ranks p", has_text="attention cost")
    for step in (changes.index(False), changes.index(True)):
        opened.goto(f"{address}{ADDRESS}&step={step}&ranks=4")
        assert f"is {measured[step].in_order:.2f} times the mean." in sentence.inner_text()
        assert sentence.get_by_role("link").count() == changes[step]
    sentence.get_by_role("link", name=f"With balance=True: {measured[step].actual:.2f} times").click()
    opened.wait_for_url("**balance=yes#ranks")
    assert f"is {measured[step].actual:.2f} times the mean." in sentence.inner_text()
    rows = opened.locator("#loads tbody td:nth-child(2)").all_inner_texts()
    sequences = sorted(batchloom.explain(loader, step, text=0), key=lambda sequence: sequence.rank_row)
    assert rows == [", ".join(str(s.row) for s in sequences if s.rank == rank) for rank in range(4)]
    sentence.get_by_role("link", name=f"Without balance: {measured[step].in_order:.2f} times").click()
    opened.wait_for_url(lambda url: "balance" not in url)


@pytest.mark.slow
def test_a_mixture_without_end_is_shown_for_ten_thousand_steps(opened, address, mixture):
    opened.goto(f"{address}/plan?seq_len=64")
    assert opened.locator("h1").inner_text().startswith("Plan 10,000 steps")
    note = "The mixture has no end; 10,000 steps are assumed."
    remedy = "Give another number in the field “Steps of the run”."
    assert opened.locator("#assumed").inner_text() == f"{note} {remedy}"
    opened.goto(f"{address}/packing?seq_len=64")
    assert f"{note} {remedy}" in opened.locator("p.tools").first.inner_text()
    opened.get_by_label("Steps of the run").fill("20")
    opened.get_by_label("Steps of the run").press("Enter")
    opened.wait_for_url("**steps=20*")
    assert opened.locator("p.tools").first.inner_text().endswith("20 steps in the run")
    opened.goto(f"{address}/plan?seq_len=64&steps=20")
    assert opened.locator("#assumed").count() == 0
    file = mixture.parent / "step.html"
    assert run_command_line(["view", str(mixture), "--step", "0", "--seq-len", "64", "--out", str(file)]) == 0
    assert note in file.read_text()
    assert remedy not in file.read_text()


def test_a_mixture_that_stops_has_its_own_steps(mixture):
    file = mixture.parent / "stop.yaml"
    file.write_text(json.dumps({**json.loads(mixture.read_text()), "exhausted": "stop"}))
    target, choice = ViewTarget(str(file)), PlanChoice(seq_len=64)
    loader = batchloom.Loader(read_mixture(str(file)), seq_len=64, global_batch_size=8)
    plan = target.make_plan(choice)
    assert (plan.fingerprint, plan.steps) == (loader.plan.fingerprint, len(loader))
    assert not target.assumes_steps(plan, choice)


def test_a_single_store_has_epochs_and_no_shares(page, mixture):
    with serving(mixture.parent / "code") as address:
        page.goto(f"{address}/plan?seq_len=64&batch=4&document=5&token={TOKEN}")
        assert page.locator("#shares, input[name=from]").count() == 0
        assert "1.00" in page.locator("section", has=page.locator("#sources")).locator("tbody").inner_text()
        assert page.locator("#served tbody tr").count() == 1


@pytest.mark.slow
def test_the_page_breaks_no_rule_of_axe(opened, address):
    check_accessibility(opened, f"{address}{ADDRESS}&document=17&source=code&step=3&ranks=4&workers=2")


def test_the_overview_of_a_mixture_has_all_sources_and_their_totals(opened, address):
    opened.goto(f"{address}/")
    section = opened.locator("section", has_text="All sources")
    assert "380 documents" in section.locator("h2").inner_text()
    assert [row.split("\t")[:2] for row in section.locator("tr").all_inner_texts()[1:]] == [
        ["web", "300"],
        ["code", "80"],
    ]
    section.get_by_role("link", name="code").click()
    opened.wait_for_url("**source=code*")
    assert opened.locator("a[aria-current=true]").first.inner_text() == "code"
