"""``batchloom plan``: what a run comes to, told from lengths alone."""

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
from plan.sources import LengthsOnly
from single_settings import make_loader

SIZES = ["--seq-len", "32", "--global-batch-size", "4"]


@pytest.fixture
def stores(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(3)
    for name, count in (("web", 60), ("code", 25)):
        write_store(tmp_path / name, [[7] * n for n in rng.integers(1, 60, count)])
    return tmp_path


def asked(capsys, *words):
    assert run_command_line(["plan", *words, "--json"]) == 0, capsys.readouterr().err
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
def test_a_forecast_is_what_the_run_serves(stores, capsys, options):
    told = asked(capsys, "web", *SIZES, *options)
    given = dict(zip(options[::2], options[1::2], strict=False))
    plan = Plan(
        open_store("web"),
        PlanSpec(
            seq_len=32,
            global_batch_size=4,
            epochs=3 if "--epochs" in given else None,
            steps=17 if "--steps" in given else None,
            packing=given.get("--packing", "best_fit"),
            overlong=given.get("--overlong", "split"),
            pool_size=int(given.get("--pool-size", 0)),
            last=given.get("--last", "fill"),
            shuffle="--no-shuffle" not in options,
            align=4 if "--no-shuffle" in options else 1,
            group_by_length=int(given.get("--group-by-length", 0)),
        ),
    )
    rows = plan.rows(0, plan.positions_of(plan.steps - 1)[1])
    served = int((np.diff(rows.pointers) > 0).sum())
    assert (told["exact"], told["exact_tokens"]) == (True, True)
    assert told["fingerprint"] == plan.fingerprint
    assert told["steps"] == plan.steps
    assert told["sequences"] == served
    assert told["tokens"] == rows.lengths.sum()
    assert told["padding"] == pytest.approx(1 - rows.lengths.sum() / (len(rows) * 32))
    (source,) = told["sources"]
    left_out = plan.left_out()
    assert (source["dropped"], source["lost"]) == (left_out.documents, left_out.tokens)
    if "--group-by-length" in given:
        window = rows.lengths[:12].reshape(3, 4)
        assert told["cut_padding"] == pytest.approx(1 - window.sum() / (4 * window.max(1).sum()))
        assert told["cut_padding"] < told["padding"] / 2
    if "--epochs" in given:
        assert told["least_padding"] <= told["padding"]


def test_a_mixture_tells_what_each_source_serves(stores, capsys):
    words = ["--mixture", "web=0.7,code=0.3", *SIZES, "--steps", "200"]
    told = asked(capsys, *words, "--world-size", "2", "--tokens-per-second", "1000")
    plan = Plan(read_mixture("web=0.7,code=0.3"), PlanSpec(seq_len=32, global_batch_size=4, steps=200))
    rows = plan.rows(0, plan.positions)
    for number, source in enumerate(told["sources"]):
        assert source["tokens_served"] == rows.lengths[rows.sources == number].sum()
        assert abs(source["error"]) < 0.01
        assert source["epochs"] == pytest.approx(
            (rows.sources[rows.pointers[:-1]] == number).sum() / source["sequences_per_epoch"]
        )
        through = next(
            step
            for step in range(200)
            if (rows.sources[rows.pointers[: 4 * step + 4]] == number).sum() >= source["sequences_per_epoch"]
        )
        assert abs(source["through"] - through) <= 1
    assert told["rank_bytes"] == -(-told["bytes"] // 2)
    assert told["hours"] == pytest.approx(200 * 4 * 32 / 1000 / 3600)
    assert run_command_line(["plan", *words]) == 0
    text = capsys.readouterr().out
    assert "weight 70.0000%, effective" in text
    through = told["sources"][0]["through"] + 1
    assert f"passed through once after {through} steps, and begins again" in text


def steps_with(mixture, name, spec):
    """The steps before the first that begins at, or behind, the turn for which a source has nothing left."""
    plan = Plan(replace(mixture, exhausted="repeat"), replace(spec, steps=200))
    rows, number = plan.rows(0, 200), plan.names.index(name)
    turns = np.flatnonzero(rows.sources[rows.pointers[:-1]] == number)
    turn = int(turns[plan.orders.order(number).sequences])
    return next(step for step in range(201) if step * spec.global_batch_size >= turn)


@pytest.mark.parametrize("size", range(1, 8))
def test_a_source_is_exhausted_after_the_steps_it_had_a_share_of(stores, capsys, size):
    given = {name: open_store(name) for name in ("web", "code")}
    mixture = Mixture({"web": 0.5, "code": 0.5}, stores=given, exhausted="redistribute")
    plan = Plan(mixture, PlanSpec(seq_len=32, global_batch_size=size))
    told = forecast_plan(plan)
    code = next(one for one in told.sources if one.name == "code")
    assert code.exhausted == steps_with(mixture, "code", plan.spec)
    after = plan.rows(code.exhausted * size, plan.positions)
    assert plan.names.index("code") not in after.sources
    assert [held.step for held in told.shares] == [0, code.exhausted]
    assert f"mix    code is exhausted after {code.exhausted} steps: " in "\n".join(describe_mixture(plan, plan.steps))
    (stores / "mix.yaml").write_text(
        "weights: {web: 1, code: 1}\nstores: {web: web, code: code}\nexhausted: redistribute\n"
    )
    words = ["plan", "--mixture", "mix.yaml", "--seq-len", "32", "--global-batch-size", str(size)]
    assert run_command_line(words) == 0
    text = capsys.readouterr().out
    assert f"code: exhausted after {code.exhausted} steps\n" in text
    assert f"shares: web 100.00% of the sequences, after {code.exhausted} steps\n" in text


def test_stages_and_edits_are_told_with_the_steps_before_them(stores, capsys):
    (stores / "mix.yaml").write_text(
        "weights: {web: 1}\nstores: {web: web, code: code}\n"
        "stages: [{step: 6, weights: {code: 1}}, {step: 90, weights: {web: 1}}]\n"
    )
    words = ["--mixture", "mix.yaml", *SIZES, "--steps", "9"]
    told = asked(capsys, *words)
    assert told["shares"] == [
        {"step": 0, "shares": {"web": 1.0}},
        {"step": 6, "shares": {"code": 1.0}},
    ]
    assert run_command_line(["plan", *words]) == 0
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
    (stores / "state.json").write_text(json.dumps(loader.state_dict()))
    words = ["plan", "--mixture", "mix.yaml", "--checkpoint", "state.json", "--steps", "9"]
    assert run_command_line(words) == 0
    text = capsys.readouterr().out
    assert "edit after 3 steps: weights {web=1, code=1} (both)\n" in text
    assert "% of the sequences, after 3 steps\n" in text
    assert "after 6 steps" not in text


def test_no_packing_is_told_to_do_better_than_the_bound():
    # One source is filled to the last token, the other can only be filled by half.
    stores = {"full": LengthsOnly([32] * 40, "full"), "half": LengthsOnly([17] * 40, "half")}
    mixture = Mixture({"full": 9, "half": 1}, stores=stores)
    plan = Plan(mixture, PlanSpec(seq_len=32, global_batch_size=4, steps=100))
    told = forecast_plan(plan)
    assert told.padding == pytest.approx(told.least_padding)
    later = forecast_plan(Plan(mixture, plan.spec, [Edit(step=50, seq_len=17, skip=3)]))
    assert 0 < later.least_padding <= later.padding


def test_mixing_is_that_while_a_source_is_served():
    stores = {name: LengthsOnly([10] * 4096, name) for name in ("a", "b", "c")}
    spec = PlanSpec(seq_len=40, global_batch_size=8, steps=1000)
    mixture = Mixture({"a": 1}, stores=stores, stages=[Stage(step=998, weights={"b": 1})])
    mixture = replace(mixture, stages=[*mixture.stages, Stage(step=2000, weights={"c": 1})])
    a, b, c = (one.mixing for one in forecast_plan(Plan(mixture, spec)).sources)
    assert a == b
    assert c is None


def test_a_source_of_less_than_a_document_a_step_says_so(stores, capsys):
    words = ["plan", "--mixture", "web=0.9999,code=0.0001", *SIZES, "--steps", "9000"]
    assert run_command_line(words) == 0
    text = capsys.readouterr().out
    assert "a step draws less than 1 document\n" in text
    assert "about 0 documents" not in text


def test_exhaustion_edits_and_skips(stores):
    mixture = Mixture(
        {"web": 0.5, "code": 0.5},
        stores={"web": open_store("web"), "code": open_store("code")},
        exhausted="redistribute",
    )
    edits = [Edit(step=3, skip=2), Edit(step=5, seq_len=64)]
    plan = Plan(mixture, PlanSpec(seq_len=32, global_batch_size=4), edits)
    told = forecast_plan(plan)
    assert told.exact
    assert not told.exact_tokens
    assert told.steps == plan.steps
    assert told.skipped == 8
    code = next(one for one in told.sources if one.name == "code")
    after = plan.rows(plan.positions_of(code.exhausted)[0], plan.positions)
    assert plan.names.index("code") not in after.sources
    assert sum(one.epochs for one in told.sources) == pytest.approx(2, abs=0.3)


def test_estimates_are_near_and_called_estimates():
    lengths = np.random.default_rng(0).lognormal(5, 1, 200_000).astype(np.uint32) + 1
    store = LengthsOnly(lengths)
    plan = Plan(store, PlanSpec(seq_len=512, global_batch_size=8, pool_size=1024))
    told = forecast_plan(plan)
    assert not told.exact
    assert not plan.orders.is_counted
    plan.orders.count_all()
    assert told.steps == pytest.approx(plan.steps, rel=0.002)
    assert forecast_plan(plan).steps == plan.steps
    assert forecast_plan(plan).exact


@pytest.mark.parametrize(("lanes", "part"), [(1, 0.5), (64, 0.5), (64, 0.95)])
def test_estimates_go_on_where_an_edit_of_seq_len_leaves_a_source(lanes, part):
    rng = np.random.default_rng(0)
    given = {
        name: LengthsOnly(np.clip(rng.lognormal(3, 1, count), 1, 200).astype(np.uint32), name)
        for name, count in (("a", 20_000), ("b", 100_000))
    }
    mixture = Mixture({"a": 1, "b": 4}, stores=given, exhausted="redistribute")
    spec = PlanSpec(seq_len=256, global_batch_size=64, lanes=lanes, pool_size=128)
    step = int(part * Plan(mixture, spec).orders.order(0).sequences * 5) // 64
    plan = Plan(mixture, spec, [Edit(step=step, seq_len=512)])
    told = forecast_plan(plan)
    assert not told.exact
    assert told.steps == pytest.approx(plan.steps, rel=0.02)
    assert [one.epochs for one in told.sources] == pytest.approx([1, 1], abs=0.02)
    # With one lane a cut is known to the row, with 64 it may lie where they lend each other.
    assert (plan.orders.get_source_cut(0, 1) is None) == (part == 0.95)


class FewLengths:
    """Lengths that are asked of a sample only: a thousandth of all, at most."""

    def __init__(self, lengths):
        self.lengths, self.size, self.left = lengths, lengths.size, lengths.size // 1000

    def take(self, documents):
        self.left -= documents.size
        assert self.left >= 0, "more than a sample is counted"
        return self.lengths.take(documents)


def test_a_dry_run_counts_nothing_of_a_source_that_was_retired_before():
    stores = parse_assumed_stores("a=3T tokens/2B documents, b=3T tokens/2B documents")
    for store in stores.values():
        store.lengths = FewLengths(store.lengths)
    plan = Plan(
        Mixture({"a": 1, "b": 1}, stores=stores),
        PlanSpec(seq_len=2048, global_batch_size=512, steps=30_000),
        [
            Edit(step=10_000, seq_len=4096, weights={"a": 1}),
            Edit(step=20_000, seq_len=8192),
            Edit(step=25_000, weights={"a": 1, "b": 1}),
        ],
    )
    assert [one.exhausted for one in forecast_plan(plan).sources] == [None, None]


def test_neighbours_of_a_block_are_as_far_apart_as_is_told():
    store = LengthsOnly([10] * 4096)
    spec = PlanSpec(seq_len=40, global_batch_size=8, pool_size=1024, block=64)
    plan = Plan(store, spec)
    (source,) = forecast_plan(plan).sources
    # Two random places of 256 are a third of it apart, in the mean.
    assert source.mixing.apart == pytest.approx(256 / 3, rel=0.15)
    assert (source.mixing.block, source.mixing.pool, source.mixing.documents) == (64, 1024, 32)
    assert source.mixing.blocks <= 16
    plain = forecast_plan(Plan(store, PlanSpec(seq_len=40, global_batch_size=8, shuffle=False)))
    assert plain.sources[0].mixing.apart < 1


def test_what_does_not_exist_is_assumed_and_every_line_says_so(capsys):
    words = ["--assume", "15T tokens, 12B documents", "--seq-len", "2048"]
    assert run_command_line(["plan", *words, "--global-batch-size", "512"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all("source=assumed" in line for line in lines)
    assert any(line.startswith("about 14,30") for line in lines)
    many = asked(
        capsys,
        *("--assume", "web=10T tokens/8B documents, code=5.5B tokens / 4M documents"),
        *("--mixture", "web=9,code=1", "--steps", "1000", *SIZES),
    )
    assert [one["documents"] for one in many["sources"]] == [4 * 10**6, 8 * 10**9]
    assert many["source"] == "assumed"


def test_assumed_lengths_have_their_mean_and_are_the_same_one_by_one():
    lengths = parse_assumed_stores("1.25B tokens, 1M documents")["data"].lengths
    found = lengths.take(np.arange(1_000_000))
    assert found.mean() == pytest.approx(1250, rel=0.01)
    assert np.log(found[found > 0]).std() == pytest.approx(1.1, rel=0.02)
    for number in (0, 17, 999_999):
        assert lengths.take(np.array([number]))[0] == found[number]


@pytest.mark.parametrize("text", ["15 T, 12B docs", "15T tokens/12B doc", "15 TTOKENS,12 B documents"])
def test_assumptions_are_written_in_more_ways_than_one(text):
    (store,) = parse_assumed_stores(text).values()
    assert (store.tokens, store.lengths.size) == (15 * 10**12, 12 * 10**9)


@pytest.mark.parametrize("shuffle", [True, False])
def test_documents_far_longer_than_a_sequence_are_planned_without_their_rows(shuffle):
    store = parse_assumed_stores("10T tokens, 1M documents")["data"]
    assert store.lengths.take(np.arange(1000)).max() > 1e8
    spec = PlanSpec(seq_len=64, global_batch_size=8, steps=1000, shuffle=shuffle)
    tracemalloc.start()
    told = forecast_plan(Plan(store, spec))
    assert tracemalloc.get_traced_memory()[1] < 1e8
    tracemalloc.stop()
    assert (told.exact, told.exact_tokens, told.steps) == (True, False, 1000)
    (source,) = told.sources
    assert source.mixing.documents == pytest.approx(8 if shuffle else 1, rel=0.01)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["plan", *SIZES], "store: missing"),
        (["plan", "web"], "seq_len: missing"),
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
def test_what_cannot_be_planned_is_refused(stores, capsys, words, told):
    assert run_command_line(words) in (1, 2)
    assert told in capsys.readouterr().err


def test_tables_are_written_once(stores, capsys):
    words = ["web", *SIZES, "--pool-size", "2"]
    first = asked(capsys, *words, "--write")
    assert len(first["written"]) == 1
    assert first["written"] == asked(capsys, *words, "--write")["written"]
    assert (
        Plan(open_store("web"), PlanSpec(seq_len=32, global_batch_size=4, pool_size=2)).orders.sequences_per_epoch
        == (first["sequences"])
    )


@pytest.mark.parametrize("length", [{"steps": 50}, {"steps": 52}, {"epochs": 2}, {}])
def test_a_checkpoint_of_grouped_rows_knows_its_plan(stores, capsys, length):
    sizes = {"seq_len": 32, "global_batch_size": 4, "packing": "none", "group_by_length": 5}
    loader = make_loader(open_store("web"), **sizes, **length, output="numpy", rank=0, world_size=1)
    loader.load_state_dict(loader.plan.state(8))
    state = stores / "state.json"
    state.write_text(json.dumps(loader.state_dict()))
    told = asked(capsys, "web", "--checkpoint", str(state))
    assert told["fingerprint"] == loader.plan.fingerprint
    if length != {"steps": 50}:
        assert told["steps"] == len(loader)


def test_the_journal_of_a_checkpoint(stores, capsys):
    mixture = read_mixture("web=0.7,code=0.3")
    loader = Loader(mixture, seq_len=32, global_batch_size=4, steps=50, output="numpy", rank=0, world_size=1)
    began = loader.plan.fingerprint
    loader.edit(Edit(step=5, weights={"web": 1, "code": 1}, note="more code"))
    loader.edit(Edit(step=9, ban={"web": [3, 4]}, skip=2))
    state = stores / "state.json"
    state.write_text(json.dumps(loader.state_dict()))
    assert run_command_line(["plan", "--journal", str(state)]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert began in head
    assert "after 5 steps: weights {web=1, code=1} (more code)  -> " in first
    assert "after 9 steps: skip 2 steps, ban 2 documents of web" in second
    assert second.endswith(loader.plan.fingerprint)
    changed = json.loads(state.read_text())
    changed["edits"][0]["step"] = 4
    state.write_text(json.dumps(changed))
    assert run_command_line(["plan", "--journal", str(state)]) == 1
    assert "edit 0 of the journal (step 4) was changed by hand" in capsys.readouterr().err


def test_a_run_that_its_sources_end_is_told_to_its_last_sequence(stores):
    for exhausted in ("stop", "redistribute"):
        for steps in (None, 1000):
            mixture = Mixture(
                {"web": 0.5, "code": 0.5},
                stores={"web": open_store("web"), "code": open_store("code")},
                exhausted=exhausted,
            )
            plan = Plan(mixture, PlanSpec(seq_len=32, global_batch_size=4, steps=steps))
            told = forecast_plan(plan)
            rows = plan.rows(0, plan.positions_of(plan.steps - 1)[1])
            assert (told.steps, told.tokens) == (plan.steps, rows.lengths.sum())
            assert told.sequences == (np.diff(rows.pointers) > 0).sum()
            assert told.empty == len(rows) - told.sequences
