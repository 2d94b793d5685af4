"""Subsets get their share of tokens as far as whole documents allow, else a note."""

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import batchloom
from batchloom.cli import run_command_line
from batchloom.core.errors import StoreConflictError
from batchloom.preparation import (
    DocumentGroup,
    Note,
    Progress,
    RunSettings,
    balance_subsets,
    describe_missed_shares,
    run_recipe,
)
from batchloom.store import read_manifest
from preparation.stores import INLINE, hash_store_files, make_recipe, prepare_store, read_documents, write_jsonl
from tiers import examples


@pytest.fixture(autouse=True)
def work_in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def compute_share(result, name="val"):
    """Return the share of the tokens that a subset of a result has."""
    subsets = result.subsets
    return subsets[name].tokens / sum(subset.tokens for subset in subsets.values())


def make_records(lengths):
    """Make records of different texts with these lengths in bytes."""
    return [{"text": f"{number} ".ljust(length, "x")} for number, length in enumerate(lengths)]


def find_share_note(result):
    """Return the note about a share; empty if there is none."""
    return "".join(note for note in result.notes if "of the tokens instead of" in note)


def test_three_books_are_divided_by_document_and_a_note_reports_the_share():
    Path("books").mkdir()
    for name, words in (("first", 4000), ("second", 5000), ("third", 4500)):
        Path(f"books/{name}.txt").write_text(" ".join(f"{name}{n}" for n in range(words)))
    result = prepare_store("books", "s", val_fraction=0.01)
    assert result.subsets["val"].documents == 1
    shortest = min(len(document[1]) for document in read_documents("s"))
    assert [len(document[1]) for document in read_documents("s") if document[2] == "val"] == [shortest]
    note = find_share_note(result)
    assert note.startswith("The val subset has ")
    assert "instead of 1 % (--val-fraction): documents stay whole, and there are 3 documents" in note
    assert "--split-on paragraph" in note
    assert note in json.loads(Path("s/report.json").read_text())["notes"]
    # Split into paragraphs, the same books meet the share without a note.
    for path in Path("books").iterdir():
        words = path.read_text().split()
        path.write_text("\n\n".join(" ".join(words[start : start + 20]) for start in range(0, 5000, 20)))
    result = prepare_store("books", "t", val_fraction=0.01, split_on="paragraph")
    assert 0.008 <= compute_share(result) <= 0.012
    assert not find_share_note(result)


@pytest.mark.parametrize("position", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 6))])
def test_one_giant_and_many_small_documents_keep_the_share(position):
    """The text of the giant, and so its hash, differs from case to case."""
    giant = {"text": f"giant {position} " + "y" * 40_000}
    write_jsonl("in.jsonl", [giant, *make_records([40 + n % 60 for n in range(300)])])
    result = prepare_store("in.jsonl", "s", val_fraction=0.3)
    assert 0.24 <= compute_share(result) <= 0.36 or find_share_note(result)
    small = prepare_store("in.jsonl", "t", val_fraction=0.01)
    assert 0.008 <= compute_share(small) <= 0.012
    assert not find_share_note(small)
    assert [document[2] for document in read_documents("t") if document[1].startswith("giant")] == ["train"]


@pytest.mark.parametrize("count", [2, 5, 20, 50, 100, 250])
def test_equal_documents_come_as_close_as_their_number_allows(count):
    write_jsonl("in.jsonl", make_records([100] * count))
    result = prepare_store("in.jsonl", "s", val_fraction=0.1, test_fraction=0.1)
    if count == 2:
        assert set(result.subsets) == {"train", "val"}
        return
    for name in ("val", "test"):
        if count >= 20:
            assert 0.08 <= compute_share(result, name) <= 0.12
        else:
            assert result.subsets[name].documents == 1


def test_a_store_says_in_its_recipe_that_documents_moved_and_is_made_again():
    write_jsonl("in.jsonl", make_records([50] * 40 + [4000] * 2))
    result = prepare_store("in.jsonl", "s", val_fraction=0.2)
    manifest = read_manifest(Path("s"))
    assert manifest.recipe["balance_subsets"] is True
    moved = manifest.subset_overrides
    assert moved
    by_hash = prepare_store("in.jsonl", "t", val_fraction=0.2, balance_subsets=False)
    assert "balance_subsets" not in read_manifest(Path("t")).recipe
    assert abs(compute_share(result) - 0.2) < abs(compute_share(by_hash) - 0.2)
    assert "hashes alone decide" in find_share_note(by_hash)
    for store in ("s", "t"):
        rerun = batchloom.prepare(recipe=store, out=f"{store}2")
        assert f"{store}2 is identical to {store}, byte for byte." in rerun.notes
    for store, balanced in (("s", False), ("t", True)):
        with pytest.raises(StoreConflictError, match="balance_subsets"):
            prepare_store("in.jsonl", store, val_fraction=0.2, balance_subsets=balanced)


def prepare_units(out, *, stop_after=None):
    """Prepare ``in.jsonl`` in units of 4 KiB; stop at the first progress of a phase."""

    def listener(event: Note | Progress) -> None:
        if stop_after and isinstance(event, Progress) and event.phase == stop_after:
            raise KeyboardInterrupt

    recipe = make_recipe(inputs=("in.jsonl",), tokenizer="bytes", val_fraction=0.1, max_bad=0)
    run_settings = RunSettings(unit_bytes=4096, execution=INLINE)
    return run_recipe(recipe, Path(out), listener, settings=run_settings)


def test_stops_change_nothing():
    rng = np.random.default_rng(7)
    lengths = (20 * rng.pareto(0.7, 120) + 10).astype(int).clip(max=9000)
    write_jsonl("in.jsonl", make_records(lengths.tolist()))
    result = prepare_units("one")
    assert read_manifest(Path("one")).subset_overrides
    assert 0.08 <= compute_share(result) <= 0.12
    for phase in ("tokenize", "write"):
        with pytest.raises(KeyboardInterrupt):
            prepare_units(f"stopped-{phase}", stop_after=phase)
        prepare_units(f"stopped-{phase}")
        assert hash_store_files(f"stopped-{phase}") == hash_store_files("one")


def test_appending_moves_new_documents_alone_and_equal_ones_stay_together():
    write_jsonl("a.jsonl", make_records([100] * 30))
    prepare_store("a.jsonl", "s", val_fraction=0.2)
    before = {document[1]: document[2] for document in read_documents("s")}
    write_jsonl("b.jsonl", make_records([100] * 30 + [300] * 60))
    recipe = make_recipe(inputs=("b.jsonl",), tokenizer="bytes", val_fraction=0.2, dedup={"mode": "none"})
    result = run_recipe(recipe, Path("s"), lambda _: None, settings=RunSettings(append=True, execution=INLINE))
    assert result.counts.documents == 90
    subsets = read_manifest(Path("s")).subsets
    share = subsets["val"].tokens / sum(subset.tokens for subset in subsets.values())
    assert 0.16 <= share <= 0.24
    sides: dict[str, set[str]] = {}
    for _, text, subset in read_documents("s"):
        sides.setdefault(text, set()).add(subset)
    assert all(len(subset_names) == 1 for subset_names in sides.values())
    assert all(sides[text] == {subset} for text, subset in before.items())
    assert batchloom.check("s").sound


CHAT = [
    {
        "messages": [
            {"role": "user", "content": f"What is {n}?"},
            {"role": "assistant", "content": f"It is {n}. " + "Truly. " * (n % 9) ** 2},
        ]
    }
    for n in range(60)
]
PAIRS = [{"prompt": f"Say {n}", "chosen": f"{n}" + "!" * n, "rejected": f"not {n}" + "?" * (n % 7)} for n in range(60)]


@pytest.mark.parametrize("records", [CHAT, PAIRS], ids=["conversations", "preferences"])
def test_conversations_and_pairs_keep_the_share(records):
    write_jsonl("in.jsonl", records)
    result = prepare_store("in.jsonl", "s", val_fraction=0.1)
    assert 0.08 <= compute_share(result) <= 0.12
    assert batchloom.check("s").sound


def test_several_sources_share_one_split():
    write_jsonl("short.jsonl", make_records([30] * 200))
    write_jsonl("long.jsonl", [{"text": f"long {n} " + "z" * 3000} for n in range(10)])
    result = prepare_store(["short.jsonl", "long.jsonl"], "s", val_fraction=0.05)
    assert 0.04 <= compute_share(result) <= 0.06


def test_a_document_longer_than_a_shard_is_announced_with_its_place():
    write_jsonl("in.jsonl", make_records([100] * 5 + [700] + [100] * 5 + [900] + [100]))
    result = prepare_store("in.jsonl", "s", val_fraction=0, tokens_per_shard=500, unit_bytes=600)
    (note,) = [note for note in result.notes if "--tokens-per-shard" in note]
    assert note.startswith("2 documents are longer than a shard (500 tokens, ")
    assert "The longest has 901 tokens: in.jsonl, line 12." in note
    result = prepare_store("in.jsonl", "t", val_fraction=0, tokens_per_shard=901, unit_bytes=600)
    assert not [note for note in result.notes if "--tokens-per-shard" in note]
    Path("book.txt").write_text("word " * 300)
    result = prepare_store("book.txt", "u", val_fraction=0, tokens_per_shard=500)
    assert "1 document is longer than a shard" in result.notes[-1]
    assert "book.txt" in result.notes[-1]


def test_the_command_line_reports_shares_and_takes_the_option(capsys):
    write_jsonl("in.jsonl", make_records([100] * 3))
    command = ["prepare", "in.jsonl", "--tokenizer", "bytes", "--json"]
    assert run_command_line([*command, "--out", "s"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert any(note.startswith("The val subset has 33.3 % of the tokens") for note in report["notes"])
    assert run_command_line([*command, "--out", "t", "--no-balance-subsets", "--val-fraction", "0.5"]) == 0
    capsys.readouterr()
    assert "balance_subsets" not in read_manifest(Path("t")).recipe
    assert run_command_line(["inspect", "s"]) == 0
    assert "val subset has 33.3 % of the tokens instead of 1 %" in capsys.readouterr().out


def assign_subsets(lengths, shares):
    """Assign documents at evenly spread positions to subsets by the shares."""
    count = len(lengths)
    groups: dict[str, list[DocumentGroup]] = {"train": [], "val": [], "test": []}
    for number, length in enumerate(lengths):
        position, val = number / count, shares["val"]
        name = "val" if position < val else "test" if position < val + shares["test"] else "train"
        groups[name].append(DocumentGroup(position, number + 1, length))
    return groups


@settings(max_examples=examples(400), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60) | st.integers(1, 3000), min_size=2, max_size=11),
    share=st.sampled_from([0.01, 0.05, 0.1, 0.2, 0.5]),
)
def test_the_share_is_met_wherever_some_documents_meet_it(lengths, share):
    shares = {"val": share, "test": 0.0}
    groups = assign_subsets(lengths, shares)
    tokens = {name: sum(group.tokens for group in members) for name, members in groups.items()}
    overrides = balance_subsets(shares, tokens, groups)
    subset_by_hash = {group.hash: overrides.get(group.hash, name) for name in groups for group in groups[name]}
    val = sum(group.tokens for members in groups.values() for group in members if subset_by_hash[group.hash] == "val")
    total = sum(lengths)

    def is_met(tokens: int) -> bool:
        return abs(tokens - share * total) <= 0.2 * share * total

    reachable = any(
        is_met(sum(lengths_in_val)) for size in range(1, len(lengths)) for lengths_in_val in combinations(lengths, size)
    )
    assert is_met(val) or not reachable
    # Neither side is empty, and a missed share is reported.
    assert 0 < val < total
    message = describe_missed_shares(shares, {"train": total - val, "val": val, "test": 0}, len(lengths))
    assert bool(message) != is_met(val)


def test_what_has_its_share_stays_as_hashes_say():
    groups = assign_subsets([10] * 100, {"val": 0.1, "test": 0.1})
    tokens = {name: sum(group.tokens for group in members) for name, members in groups.items()}
    assert balance_subsets({"val": 0.1, "test": 0.1}, tokens, groups) == {}


@settings(max_examples=examples(200), deadline=None)
@given(
    positions_and_lengths=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 50)), min_size=1, max_size=6
    ),
    shares=st.sampled_from([(0.05, 0.9), (0.3, 0.3), (0.01, 0.01), (0.5, 0)]),
)
def test_every_wanted_subset_gets_a_document_where_there_are_enough(positions_and_lengths, shares):
    share_by_subset = dict(zip(("val", "test"), shares, strict=True))
    groups: dict[str, list[DocumentGroup]] = {"train": [], "val": [], "test": []}
    for number, (position, length) in enumerate(positions_and_lengths):
        name = "val" if position < shares[0] else "test" if position < sum(shares) else "train"
        groups[name].append(DocumentGroup(position, number + 1, length))
    tokens = {name: sum(group.tokens for group in members) for name, members in groups.items()}
    overrides = balance_subsets(share_by_subset, tokens, groups)
    filled = {overrides.get(group.hash, name) for name in groups for group in groups[name]}
    assert len(filled) == min(len(positions_and_lengths), 1 + sum(share > 0 for share in shares))
    assert "train" in filled


def test_a_note_proposes_to_cut_texts_only_where_files_are_texts(capsys):
    write_jsonl("in.jsonl", make_records([20_000, 300, 30_000]))
    note = find_share_note(prepare_store("in.jsonl", "s", val_fraction=0.05))
    assert "Add data" in note
    assert "--split-on" not in note
    assert run_command_line(["inspect", "s"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "instead of 5 % (--val-fraction)" in printed
    assert "--split-on" not in printed
