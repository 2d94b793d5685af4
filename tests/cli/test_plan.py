"""Command ``plan``: forecasts of a run from document lengths."""

import json
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from batchloom import Edit, Loader, Mixture, Plan, PlanSpec, open_store
from batchloom.analysis import forecast_plan
from batchloom.batches import read_mixture
from batchloom.cli import run_command_line
from batchloom.plan import Stage, parse_assumed_stores
from batchloom.testing import write_store
from batchloom.train import describe_mixture
from plan.length_stores import LengthStore

SIZES = ["--seq-len", "32", "--global-batch-size", "4"]


@pytest.fixture
def store_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(3)
    for name, count in (("web", 60), ("code", 25)):
        write_store(tmp_path / name, [[7] * n for n in rng.integers(1, 60, count)])
    return tmp_path


def run_plan_json(capsys, *arguments):
    assert run_command_line(["plan", *arguments, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "options",
    [
        ["--epochs", "3"],
        ["--steps", "17", "--packing", "wrap"],
        ["--overlong", "drop"],
        ["--overlong", "truncate", "--pool-size", "16"],
        ["--last", "drop", "--no-shuffle", "--align", "4"],
        ["--packing", "none", "--group-by-length", "3"],
    ],
)
def test_a_forecast_is_what_the_run_serves(store_folder, capsys, options):
    forecast = run_plan_json(capsys, "web", *SIZES, *options)
    values = dict(zip(options[::2], options[1::2], strict=False))
    plan = Plan(
        open_store("web"),
        PlanSpec(
            seq_len=32,
            global_batch_size=4,
            epochs=3 if "--epochs" in values else None,
            steps=17 if "--steps" in values else None,
            packing=values.get("--packing", "best_fit"),
            overlong=values.get("--overlong", "split"),
            pool_size=int(values.get("--pool-size", 0)),
            last=values.get("--last", "fill"),
            shuffle="--no-shuffle" not in options,
            align=4 if "--no-shuffle" in options else 1,
            group_by_length=int(values.get("--group-by-length", 0)),
        ),
    )
    rows = plan.rows(0, plan.positions_of(plan.steps - 1)[1])
    served_sequences = int((np.diff(rows.pointers) > 0).sum())
    assert (forecast["exact"], forecast["exact_tokens"]) == (True, True)
    assert forecast["fingerprint"] == plan.fingerprint
    assert forecast["steps"] == plan.steps
    assert forecast["sequences"] == served_sequences
    assert forecast["tokens"] == rows.lengths.sum()
    assert forecast["padding"] == pytest.approx(1 - rows.lengths.sum() / (len(rows) * 32))
    (source,) = forecast["sources"]
    left_out = plan.left_out()
    assert (source["dropped"], source["lost"]) == (left_out.documents, left_out.tokens)
    if "--group-by-length" in values:
        window = rows.lengths[:12].reshape(3, 4)
        assert forecast["cut_padding"] == pytest.approx(1 - window.sum() / (4 * window.max(1).sum()))
        assert forecast["cut_padding"] < forecast["padding"] / 2
    if "--epochs" in values:
        assert forecast["least_padding"] <= forecast["padding"]


def test_a_forecast_of_a_mixture_counts_each_source(store_folder, capsys):
    arguments = ["--mixture", "web=0.7,code=0.3", *SIZES, "--steps", "200"]
    forecast = run_plan_json(capsys, *arguments, "--world-size", "2", "--tokens-per-second", "1000")
    plan = Plan(read_mixture("web=0.7,code=0.3"), PlanSpec(seq_len=32, global_batch_size=4, steps=200))
    rows = plan.rows(0, plan.positions)
    for number, source in enumerate(forecast["sources"]):
        assert source["tokens_served"] == rows.lengths[rows.sources == number].sum()
        assert abs(source["error"]) < 0.01
        assert source["epochs"] == pytest.approx(
            (rows.sources[rows.pointers[:-1]] == number).sum() / source["sequences_per_epoch"]
        )
        first_full_step = next(
            step
            for step in range(200)
            if (rows.sources[rows.pointers[: 4 * step + 4]] == number).sum() >= source["sequences_per_epoch"]
        )
        assert abs(source["through"] - first_full_step) <= 1
    assert forecast["rank_bytes"] == -(-forecast["bytes"] // 2)
    assert forecast["hours"] == pytest.approx(200 * 4 * 32 / 1000 / 3600)
    assert run_command_line(["plan", *arguments]) == 0
    text = capsys.readouterr().out
    assert "weight 70.0000%, effective" in text
    first_full_step = forecast["sources"][0]["through"] + 1
    assert f"passed through once after {first_full_step} steps, and begins again" in text


def count_steps_with_source(mixture, name, spec):
    """Return the number of steps that begin before a source is exhausted."""
    plan = Plan(replace(mixture, exhausted="repeat"), replace(spec, steps=200))
    rows, number = plan.rows(0, 200), plan.names.index(name)
    turns = np.flatnonzero(rows.sources[rows.pointers[:-1]] == number)
    turn = int(turns[plan.orders.order(number).counts.sequences])
    return next(step for step in range(201) if step * spec.global_batch_size >= turn)


@pytest.mark.parametrize("size", range(1, 8))
def test_a_source_is_exhausted_after_the_steps_it_had_a_share_of(store_folder, capsys, size):
    opened_stores = {name: open_store(name) for name in ("web", "code")}
    mixture = Mixture({"web": 0.5, "code": 0.5}, stores=opened_stores, exhausted="redistribute")
    plan = Plan(mixture, PlanSpec(seq_len=32, global_batch_size=size))
    forecast = forecast_plan(plan)
    code = next(source for source in forecast.sources if source.name == "code")
    assert code.exhausted == count_steps_with_source(mixture, "code", plan.spec)
    later_rows = plan.rows(code.exhausted * size, plan.positions)
    assert plan.names.index("code") not in later_rows.sources
    assert [share.step for share in forecast.shares] == [0, code.exhausted]
    assert f"mix    code is exhausted after {code.exhausted} steps: " in "\n".join(describe_mixture(plan, plan.steps))
    (store_folder / "mix.yaml").write_text(
        "weights: {web: 1, code: 1}\nstores: {web: web, code: code}\nexhausted: redistribute\n"
    )
    arguments = ["plan", "--mixture", "mix.yaml", "--seq-len", "32", "--global-batch-size", str(size)]
    assert run_command_line(arguments) == 0
    text = capsys.readouterr().out
    assert f"code: exhausted after {code.exhausted} steps\n" in text
    assert f"shares: web 100.00% of the sequences, after {code.exhausted} steps\n" in text


def test_stages_and_edits_are_listed_with_their_steps(store_folder, capsys):
    (store_folder / "mix.yaml").write_text(
        "weights: {web: 1}\nstores: {web: web, code: code}\n"
        "stages: [{step: 6, weights: {code: 1}}, {step: 90, weights: {web: 1}}]\n"
    )
    arguments = ["--mixture", "mix.yaml", *SIZES, "--steps", "9"]
    forecast = run_plan_json(capsys, *arguments)
    assert forecast["shares"] == [
        {"step": 0, "shares": {"web": 1.0}},
        {"step": 6, "shares": {"code": 1.0}},
    ]
    assert run_command_line(["plan", *arguments]) == 0
    text = capsys.readouterr().out
    assert "shares: web 100.00% of the sequences\n" in text
    assert "shares: code 100.00% of the sequences, after 6 steps\n" in text
    assert "code: no weight at the beginning\n" in text
    loader = Loader(
        read_mixture("mix.yaml"),
        seq_len=32,
        global_batch_size=4,
        steps=9,
        output="numpy",
        rank=0,
        world_size=1,
    )
    loader.edit(Edit(step=3, weights={"web": 1, "code": 1}, note="both"))
    (store_folder / "state.json").write_text(json.dumps(loader.state_dict()))
    arguments = ["plan", "--mixture", "mix.yaml", "--checkpoint", "state.json", "--steps", "9"]
    assert run_command_line(arguments) == 0
    text = capsys.readouterr().out
    assert "edit after 3 steps: weights {web=1, code=1} (both)\n" in text
    assert "% of the sequences, after 3 steps\n" in text
    assert "after 6 steps" not in text


def test_forecast_padding_is_at_least_the_bound():
    # Sequences of one source are full, those of the other only half full.
    stores = {"full": LengthStore([32] * 40, "full"), "half": LengthStore([17] * 40, "half")}
    mixture = Mixture({"full": 9, "half": 1}, stores=stores)
    plan = Plan(mixture, PlanSpec(seq_len=32, global_batch_size=4, steps=100))
    forecast = forecast_plan(plan)
    assert forecast.padding == pytest.approx(forecast.least_padding)
    edited_forecast = forecast_plan(Plan(mixture, plan.spec, [Edit(step=50, seq_len=17, skip=3)]))
    assert 0 < edited_forecast.least_padding <= edited_forecast.padding


def test_mixing_is_measured_while_a_source_is_served():
    stores = {name: LengthStore([10] * 4096, name) for name in ("a", "b", "c")}
    spec = PlanSpec(seq_len=40, global_batch_size=8, steps=1000)
    mixture = Mixture({"a": 1}, stores=stores, stages=[Stage(step=998, weights={"b": 1})])
    mixture = replace(mixture, stages=[*mixture.stages, Stage(step=2000, weights={"c": 1})])
    a, b, c = (source.mixing for source in forecast_plan(Plan(mixture, spec)).sources)
    assert a == b
    assert c is None


def test_a_source_with_less_than_one_document_per_step_is_reported(store_folder, capsys):
    arguments = ["plan", "--mixture", "web=0.9999,code=0.0001", *SIZES, "--steps", "9000"]
    assert run_command_line(arguments) == 0
    text = capsys.readouterr().out
    assert "a step draws less than 1 document\n" in text
    assert "about 0 documents" not in text


def test_exhaustion_edits_and_skips(store_folder):
    mixture = Mixture(
        {"web": 0.5, "code": 0.5},
        stores={"web": open_store("web"), "code": open_store("code")},
        exhausted="redistribute",
    )
    edits = [Edit(step=3, skip=2), Edit(step=5, seq_len=64)]
    plan = Plan(mixture, PlanSpec(seq_len=32, global_batch_size=4), edits)
    forecast = forecast_plan(plan)
    assert forecast.exact
    assert not forecast.exact_tokens
    assert forecast.steps == plan.steps
    assert forecast.skipped == 8
    code = next(source for source in forecast.sources if source.name == "code")
    later_rows = plan.rows(plan.positions_of(code.exhausted)[0], plan.positions)
    assert plan.names.index("code") not in later_rows.sources
    assert sum(source.epochs for source in forecast.sources) == pytest.approx(2, abs=0.3)


def test_estimates_are_close_and_marked_as_estimates():
    lengths = np.random.default_rng(0).lognormal(5, 1, 200_000).astype(np.uint32) + 1
    store = LengthStore(lengths)
    plan = Plan(store, PlanSpec(seq_len=512, global_batch_size=8, pool_size=1024))
    forecast = forecast_plan(plan)
    assert not forecast.exact
    assert not plan.orders.is_counted
    plan.orders.count_all()
    assert forecast.steps == pytest.approx(plan.steps, rel=0.002)
    assert forecast_plan(plan).steps == plan.steps
    assert forecast_plan(plan).exact


@pytest.mark.parametrize(("lanes", "epoch_share"), [(1, 0.5), (32, 0.5), (32, 0.95)])
def test_estimates_go_on_where_an_edit_of_seq_len_leaves_a_source(lanes, epoch_share):
    rng = np.random.default_rng(0)
    assumed_stores = {
        name: LengthStore(np.clip(rng.lognormal(3, 1, count), 1, 200).astype(np.uint32), name)
        for name, count in (("a", 10_000), ("b", 50_000))
    }
    mixture = Mixture({"a": 1, "b": 4}, stores=assumed_stores, exhausted="redistribute")
    spec = PlanSpec(seq_len=256, global_batch_size=64, lanes=lanes, pool_size=128)
    step = int(epoch_share * Plan(mixture, spec).orders.order(0).counts.sequences * 5) // 64
    plan = Plan(mixture, spec, [Edit(step=step, seq_len=512)])
    forecast = forecast_plan(plan)
    assert not forecast.exact
    # With lanes the rest of a slot of many pools is packed at once, and so better than pool by pool.
    assert forecast.steps == pytest.approx(plan.steps, rel=0.02 if lanes == 1 else 0.05)
    assert [source.epochs for source in forecast.sources] == pytest.approx([1, 1], abs=0.02)


class SampledLengths:
    """Lengths that allow reading a thousandth of the documents."""

    def __init__(self, lengths):
        self.lengths, self.size, self.remaining = lengths, lengths.size, lengths.size // 1000

    def take(self, documents):
        self.remaining -= documents.size
        assert self.remaining >= 0, "more than a sample is counted"
        return self.lengths.take(documents)


def test_a_dry_run_counts_nothing_of_a_source_that_was_retired_before():
    stores = parse_assumed_stores("a=3T tokens/2B documents, b=3T tokens/2B documents")
    for store in stores.values():
        store.lengths = SampledLengths(store.lengths)
    plan = Plan(
        Mixture({"a": 1, "b": 1}, stores=stores),
        PlanSpec(seq_len=2048, global_batch_size=512, steps=30_000),
        [
            Edit(step=10_000, seq_len=4096, weights={"a": 1}),
            Edit(step=20_000, seq_len=8192),
            Edit(step=25_000, weights={"a": 1, "b": 1}),
        ],
    )
    assert [source.exhausted for source in forecast_plan(plan).sources] == [None, None]


def test_forecast_distance_of_neighbours_in_a_block():
    store = LengthStore([10] * 4096)
    spec = PlanSpec(seq_len=40, global_batch_size=8, pool_size=1024, block=64)
    plan = Plan(store, spec)
    (source,) = forecast_plan(plan).sources
    # Two random positions of 256 are a third of it apart on average.
    assert source.mixing.apart == pytest.approx(256 / 3, rel=0.15)
    assert (source.mixing.block, source.mixing.pool, source.mixing.documents) == (64, 1024, 32)
    assert source.mixing.blocks <= 16
    unshuffled = forecast_plan(Plan(store, PlanSpec(seq_len=40, global_batch_size=8, shuffle=False)))
    assert unshuffled.sources[0].mixing.apart < 1


@pytest.mark.slow
def test_forecasts_of_assumed_stores_are_marked_as_assumed(capsys):
    arguments = ["--assume", "15T tokens, 12B documents", "--seq-len", "2048"]
    assert run_command_line(["plan", *arguments, "--global-batch-size", "512"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all("source=assumed" in line for line in lines)
    assert any(line.startswith("about 14,30") for line in lines)
    mixture_forecast = run_plan_json(
        capsys,
        *("--assume", "web=10T tokens/8B documents, code=5.5B tokens / 4M documents"),
        *("--mixture", "web=9,code=1", "--steps", "1000", "--seq-len", "2048", "--global-batch-size", "512"),
    )
    assert [source["documents"] for source in mixture_forecast["sources"]] == [4 * 10**6, 8 * 10**9]
    assert mixture_forecast["source"] == "assumed"


def test_assumed_lengths_have_their_mean_and_are_the_same_one_by_one():
    lengths = parse_assumed_stores("1.25B tokens, 1M documents")["data"].lengths
    values = lengths.take(np.arange(1_000_000))
    assert values.mean() == pytest.approx(1250, rel=0.01)
    assert np.log(values[values > 0]).std() == pytest.approx(1.1, rel=0.02)
    for number in (0, 17, 999_999):
        assert lengths.take(np.array([number]))[0] == values[number]


@pytest.mark.parametrize("text", ["15 T, 12B docs", "15T tokens/12B doc", "15 TTOKENS,12 B documents"])
def test_spellings_of_assumed_sizes(text):
    (store,) = parse_assumed_stores(text).values()
    assert (store.tokens, store.lengths.size) == (15 * 10**12, 12 * 10**9)


@pytest.mark.parametrize("shuffle", [True, False])
def test_very_long_documents_are_planned_without_their_rows(shuffle):
    store = parse_assumed_stores("10T tokens, 1M documents")["data"]
    assert store.lengths.take(np.arange(1000)).max() > 1e8
    spec = PlanSpec(seq_len=64, global_batch_size=8, steps=1000, shuffle=shuffle)
    tracemalloc.start()
    forecast = forecast_plan(Plan(store, spec))
    assert tracemalloc.get_traced_memory()[1] < 1e8
    tracemalloc.stop()
    assert (forecast.exact, forecast.exact_tokens, forecast.steps) == (True, False, 1000)
    (source,) = forecast.sources
    assert source.mixing is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", *SIZES], "store: missing"),
        (["plan", "web"], "--seq-len: missing"),
        (["plan", "web", "--mixture", "web=1", *SIZES], "exclude each other"),
        (["plan", "--assume", "many tokens", *SIZES], "write '15T tokens, 12B documents'"),
        (["plan", "--assume", "5 tokens, 9 documents", *SIZES], "one token per document"),
        (["plan", "--assume", "9 tokens, 5 documents", "--write", *SIZES], "no store to keep"),
        (["plan", "--mixture", "web=0.7,code=0.3", *SIZES], "steps: missing"),
        (["plan", "web", "--tokens-per-second", "0", *SIZES], "not a number above 0"),
        (["plan", "nowhere", *SIZES], "There is no file or folder"),
        (["plan", "web", *SIZES, "--world-size", "3"], "cannot be divided evenly among 3 ranks"),
        (["plan", "web", *SIZES, "--world-size", str(10**20)], "cannot be divided evenly"),
        (["plan", "web", *SIZES, "--world-size", "0"], "world-size: 0 is not a whole number"),
        (
            ["plan", "--assume", "1T tokens, 1 documents", *SIZES],
            "would have more than 2,147,483,647 tokens, the most a store can hold",
        ),
    ],
)
def test_invalid_plans_are_refused(store_folder, capsys, arguments, message):
    assert run_command_line(arguments) in (1, 2)
    assert message in capsys.readouterr().err


def test_tables_are_written_once(store_folder, capsys):
    arguments = ["web", *SIZES, "--pool-size", "2"]
    forecast = run_plan_json(capsys, *arguments, "--write")
    assert len(forecast["written"]) == 1
    assert forecast["written"] == run_plan_json(capsys, *arguments, "--write")["written"]
    assert (
        Plan(open_store("web"), PlanSpec(seq_len=32, global_batch_size=4, pool_size=2)).orders.sequences_per_epoch
        == (forecast["sequences"])
    )


@pytest.mark.parametrize("length", [{"steps": 50}, {"steps": 52}, {"epochs": 2}, {}])
def test_a_checkpoint_of_grouped_rows_knows_its_plan(store_folder, capsys, length):
    sizes = {"seq_len": 32, "global_batch_size": 4, "packing": "none", "group_by_length": 5}
    loader = Loader(open_store("web"), **sizes, **length, output="numpy", rank=0, world_size=1)
    loader.load_state_dict(loader.plan.state(8))
    state = store_folder / "state.json"
    state.write_text(json.dumps(loader.state_dict()))
    forecast = run_plan_json(capsys, "web", "--checkpoint", str(state))
    assert forecast["fingerprint"] == loader.plan.fingerprint
    if length != {"steps": 50}:
        assert forecast["steps"] == len(loader)


def test_the_journal_of_a_checkpoint(store_folder, capsys):
    mixture = read_mixture("web=0.7,code=0.3")
    loader = Loader(mixture, seq_len=32, global_batch_size=4, steps=50, output="numpy", rank=0, world_size=1)
    first_fingerprint = loader.plan.fingerprint
    loader.edit(Edit(step=5, weights={"web": 1, "code": 1}, note="more code"))
    loader.edit(Edit(step=9, ban={"web": [3, 4]}, skip=2))
    state = store_folder / "state.json"
    state.write_text(json.dumps(loader.state_dict()))
    assert run_command_line(["plan", "--journal", str(state)]) == 0
    header, first_edit, second_edit = capsys.readouterr().out.splitlines()
    assert first_fingerprint in header
    assert "after 5 steps: weights {web=1, code=1} (more code)  -> " in first_edit
    assert "after 9 steps: skip 2 steps, ban 2 documents of web" in second_edit
    assert second_edit.endswith(loader.plan.fingerprint)
    changed = json.loads(state.read_text())
    changed["edits"][0]["step"] = 4
    state.write_text(json.dumps(changed))
    assert run_command_line(["plan", "--journal", str(state)]) == 1
    assert "edit 0 of the journal (step 4) was changed by hand" in capsys.readouterr().err


def test_a_run_that_ends_with_its_sources_is_forecast_exactly(store_folder):
    for exhausted in ("stop", "redistribute"):
        for steps in (None, 1000):
            mixture = Mixture(
                {"web": 0.5, "code": 0.5},
                stores={"web": open_store("web"), "code": open_store("code")},
                exhausted=exhausted,
            )
            plan = Plan(mixture, PlanSpec(seq_len=32, global_batch_size=4, steps=steps))
            forecast = forecast_plan(plan)
            rows = plan.rows(0, plan.positions_of(plan.steps - 1)[1])
            assert (forecast.steps, forecast.tokens) == (plan.steps, rows.lengths.sum())
            assert forecast.sequences == (np.diff(rows.pointers) > 0).sum()
            assert forecast.empty == len(rows) - forecast.sequences


@pytest.mark.parametrize(
    ("command", "spelled"),
    [
        (["plan", "web", "--seq-len", "4", "--global-batch-size", "1", "--overlong", "error"], "choose --overlong split"),
        (["explain", "web", "--step", "0", "--seq-len", "4", "--global-batch-size", "1", "--overlong", "error"], "--overlong split"),
        (["plan", "web", "--seq-len", "4", "--global-batch-size", "6", "--world-size", "4"], "uneven='pad'"),
        (["plan", "packing='none'/web", "--seq-len", "4", "--global-batch-size", "6"], "folder packing='none'/web:"),
    ],
)  # fmt: skip
def test_messages_name_options_where_the_command_has_them(store_folder, capsys, command, spelled):
    assert run_command_line(command) == 1
    assert spelled in capsys.readouterr().err


def test_forecast_of_many_pools_grouped_by_length():
    lengths = np.random.default_rng(0).integers(1, 30, 2000).astype(np.uint32)
    spec = PlanSpec(seq_len=16, global_batch_size=4, pool_size=20, packing="none", group_by_length=3)
    assert forecast_plan(Plan(LengthStore(lengths), spec)).cut_padding > 0


def test_forecast_of_a_resumed_run_whose_source_pauses():
    rng = np.random.default_rng(0)
    stores = {name: LengthStore(rng.integers(1, 30, 2000).astype(np.uint32), name) for name in "ab"}
    mixture = Mixture({"a": 1, "b": 1}, stores=stores)
    spec = PlanSpec(seq_len=16, global_batch_size=4, pool_size=20, steps=400)
    edits = [
        Edit(step=50, seq_len=32, weights={"a": 1}),
        Edit(step=51, seq_len=64),
        Edit(step=52, weights={"a": 1, "b": 1}),
    ]
    plan = Plan(mixture, spec, edits)
    plan.resume(Plan(mixture, spec, edits).state(plan.positions_of(60)[0]))
    assert forecast_plan(plan).steps == 400


@pytest.mark.parametrize(
    ("settings", "edits", "steps"),
    [({"steps": 10}, [Edit(step=0, seq_len=32)], 10), ({"last": "drop"}, [], 0)],
)
def test_forecast_of_a_mixture_that_begins_or_ends_at_once(settings, edits, steps):
    stores = {name: LengthStore(np.full(10, 9, np.uint32), name) for name in "ab"}
    exhausted = "repeat" if steps else "stop"
    mixture = Mixture({"a": 1, "b": 1}, stores=stores, exhausted=exhausted)
    plan = Plan(mixture, PlanSpec(seq_len=16, global_batch_size=64, **settings), edits)
    assert forecast_plan(plan).steps == steps
