"""Deduplication end to end: what goes, what stays, and that nothing else has a say in it."""

import json
import random
import re
from collections import Counter

import pytest

import batchloom
from batchloom import SettingsError
from batchloom.cli import run_command_line as main
from batchloom.preparation import (
    ChatRecipe,
    DedupRecipe,
    ExecutionSettings,
    RunSettings,
    read_recipe,
    read_report,
    run_recipe,
)
from batchloom.preparation.dedup import match_probability
from batchloom.sources import ReadLimits
from preparation.stores import documents, jsonl, make, recipe_of, texts, tree

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def words(rng, count):
    return ["".join(rng.choices(_LETTERS, k=rng.randint(3, 9))) for _ in range(count)]


def nearly(rng, text, share):
    """The text with so large a share of its words replaced by others, in one stretch."""
    every = text.split(" ")
    count = round(share * len(every))
    first = rng.randrange(len(every) - count)
    return " ".join([*every[:first], *words(rng, count), *every[first + count :]])


def jaccard(one, other, shingle=5):
    """The similarity of two texts of bytes, by the definition."""
    sets = [{text[at : at + shingle] for at in range(len(text) - shingle + 1)} for text in (one, other)]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def run(inputs, out, *, workers=1, unit_bytes=1 << 40, dry_run=False, **settings):
    recipe = recipe_of(inputs=tuple(map(str, inputs)), **{"tokenizer": "bytes", **settings})
    how = RunSettings(
        execution=ExecutionSettings(workers=workers),
        unit_bytes=unit_bytes,
        dry_run=dry_run,
        limits=ReadLimits(),
    )
    return run_recipe(recipe, out, lambda _: None, settings=how)


class Corpus:
    """Texts over files of several formats, with copies planted everywhere; knows what is a copy of what."""

    def __init__(self, folder, seed=1):
        rng = random.Random(seed)
        self.plain = [" ".join(words(rng, 120)) for _ in range(120)]
        rows = [("plain", number, text) for number, text in enumerate(self.plain)]
        rows += [("exact", number, self.plain[number]) for number in range(40)]
        rows += [("near", number, nearly(rng, self.plain[number], 0.02)) for number in range(40, 70)]
        rows += [("far", number, nearly(rng, self.plain[number], 0.5)) for number in range(70, 100)]
        rng.shuffle(rows)
        self.rows = rows
        cut = len(rows) // 4
        pieces = [rows[at * cut : (at + 1) * cut if at < 3 else None] for at in range(4)]
        jsonl(folder / "a.jsonl", [{"text": text} for *_, text in pieces[0]])
        (folder / "b.json").write_text(json.dumps([{"text": text} for *_, text in pieces[1]]))
        (folder / "c.csv").write_text("text\n" + "".join(f"{text}\n" for *_, text in pieces[2]))
        (folder / "d").mkdir()
        for number, (*_, text) in enumerate(pieces[3]):
            (folder / "d" / f"{number:03d}.txt").write_text(text)
        self.inputs = [folder / "a.jsonl", folder / "b.json", folder / "c.csv", folder / "d"]

    def firsts(self, *kinds):
        """The texts that are to be left where these kinds are one with the plain ones they come of."""
        seen, left = set(), []
        for kind, number, text in self.rows:
            name = number if kind in ("plain", *kinds) else (kind, number)
            if name not in seen:
                left.append(text)
            seen.add(name)
        return left


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return Corpus(tmp_path_factory.mktemp("corpus"))


def test_none_keeps_all(corpus, tmp_path):
    result = make(corpus.inputs, tmp_path / "out", dedup="none")
    assert texts(tmp_path / "out") == [text for *_, text in corpus.rows]
    assert not result.counts.dropped


def test_exact_finds_all_and_nothing_else(corpus, tmp_path):
    result = make(corpus.inputs, tmp_path / "out")
    assert texts(tmp_path / "out") == corpus.firsts("exact")
    assert result.counts.dropped == {"exact duplicate": 40}
    assert batchloom.check(tmp_path / "out").sound


def test_near_finds_what_its_banding_promises(corpus, tmp_path):
    alike = [jaccard(corpus.plain[number], text) for kind, number, text in corpus.rows if kind == "near"]
    promised = sum(match_probability(one, 14, 8) for one in alike)
    assert min(alike) > 0.9
    assert promised > 29.9
    unlike = [jaccard(corpus.plain[number], text) for kind, number, text in corpus.rows if kind == "far"]
    assert sum(match_probability(one, 14, 8) for one in unlike) < 0.3
    result = make(corpus.inputs, tmp_path / "out", dedup="near")
    # Recall and precision are 1.
    assert texts(tmp_path / "out") == corpus.firsts("exact", "near")
    assert result.counts.dropped == {"exact duplicate": 40, "near duplicate": 30}
    assert batchloom.check(tmp_path / "out").sound


def test_recall_is_that_of_the_formula(tmp_path):
    rng = random.Random(5)
    plain = [" ".join(words(rng, 100)) for _ in range(150)]
    alike = [nearly(rng, text, 0.12) for text in plain]
    promised = [match_probability(jaccard(*pair), 14, 8) for pair in zip(plain, alike, strict=True)]
    expected, spread = sum(promised), sum(p * (1 - p) for p in promised) ** 0.5
    assert 75 < expected < 140
    path = jsonl(tmp_path / "in.jsonl", [{"text": text} for text in plain + alike])
    found = make(path, tmp_path / "out", dedup="near").counts.dropped["near duplicate"]
    assert abs(found - expected) < 4 * spread


def test_a_similarity_is_found_by_the_bands_it_comes_to(tmp_path):
    rng = random.Random(6)
    plain = [" ".join(words(rng, 100)) for _ in range(100)]
    path = jsonl(
        tmp_path / "in.jsonl",
        [{"text": text} for text in plain + [nearly(rng, text, 0.06) for text in plain]],
    )
    left = {}
    for said in (
        {"similarity": 0.8},
        {"similarity": 0.6},
        {"similarity": 0.99},
        {"bands": 8, "rows": 13},
    ):
        result = make(path, tmp_path / str(said), dedup={"mode": "near", **said})
        left[*said.values()] = result.counts.dropped.get("near duplicate", 0)
    assert left[0.8,] >= 85
    assert left[0.6,] == 100
    assert left[0.99,] < 40
    similar = make(path, tmp_path / "0.9", dedup={"mode": "near", "similarity": 0.9})
    assert similar.counts.dropped["near duplicate"] == left[8, 13]
    assert texts(tmp_path / "0.9") == texts(tmp_path / str({"bands": 8, "rows": 13}))


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"mode": "exact", "similarity": 0.8}, "belongs to mode near"),
        ({"mode": "near", "similarity": 0.8, "bands": 7}, "bands is given"),
        ({"mode": "near", "similarity": 0.8, "rows": 7}, "rows is given"),
        ({"mode": "near", "similarity": 0}, "above 0 and at most 1"),
        ({"mode": "near", "similarity": 1.2}, "not a number from 0 to 1"),
        ({"mode": "near", "similarity": float("nan")}, "not a number from 0 to 1"),
        ({"mode": "near", "similarity": True}, "not a number from 0 to 1"),
        ({"mode": "near", "similarity": "high"}, "not a number from 0 to 1"),
        ({"mode": "near", "similarity": 0.001}, "set a higher"),
    ],
)
def test_a_wrong_similarity_is_told_by_its_path(said, problem):
    with pytest.raises(SettingsError) as error:
        recipe_of(inputs=("in.jsonl",), dedup=said)
    (told,) = error.value.problems
    assert told.startswith("dedup.similarity: ")
    assert problem in told


MODES = ["exact", "near", "lines", "paragraphs"]


@pytest.mark.parametrize("mode", MODES)
def test_units_have_no_say_in_what_stays(corpus, tmp_path, mode):
    found = []
    for unit_bytes in (30_000, 7_000, 1 << 40):
        out = tmp_path / f"{unit_bytes}"
        run(corpus.inputs, out, unit_bytes=unit_bytes, dedup=mode)
        found.append([(text, split) for _, text, split in documents(out)])
        assert batchloom.check(out).sound
    assert found[0] == found[1] == found[2]
    assert len(found[0]) < len(corpus.rows)


@pytest.mark.parametrize(
    ("mode", "workers", "unit_bytes"),
    [
        ("near", 2, 30_000),
        *(pytest.param(mode, *how, marks=pytest.mark.slow) for mode in MODES for how in [(2, 7_000), (5, 30_000)]),
    ],
)
def test_workers_decide_no_byte(corpus, tmp_path, mode, workers, unit_bytes):
    run(corpus.inputs, tmp_path / "one", workers=1, unit_bytes=unit_bytes, dedup=mode)
    run(corpus.inputs, tmp_path / "pool", workers=workers, unit_bytes=unit_bytes, dedup=mode)
    assert tree(tmp_path / "pool") == tree(tmp_path / "one")


MENU = "Home | News | About us"


@pytest.fixture
def pages(tmp_path):
    """Files of pages with a menu and a notice that repeat, one page that is nothing else."""
    (tmp_path / "in").mkdir()
    rows = [f"{MENU}\nPage {n} says {n * n}.\n\nAll rights\nreserved." for n in range(30)]
    rows.insert(7, f"  {MENU}\n\nAll rights\nreserved.\n")
    jsonl(tmp_path / "in" / "a.jsonl", [{"text": text} for text in rows[:11]])
    jsonl(tmp_path / "in" / "b.jsonl", [{"text": text} for text in rows[11:]])
    return tmp_path / "in"


def test_repeated_lines_go(pages, tmp_path):
    result = make(pages, tmp_path / "out", dedup="lines", unit_bytes=300, val_fraction=0)
    left = texts(tmp_path / "out")
    assert left[0] == f"{MENU}\nPage 0 says 0.\n\nAll rights\nreserved."
    assert left[1:] == [f"Page {n} says {n * n}.\n" for n in range(1, 30)]
    assert result.counts.dropped == {"only repeated lines": 1}
    assert batchloom.check(tmp_path / "out").sound


def test_repeated_paragraphs_go(pages, tmp_path):
    result = make(pages, tmp_path / "out", dedup="paragraphs", unit_bytes=300, val_fraction=0)
    left = texts(tmp_path / "out")
    first = [f"{MENU}\nPage {n} says {n * n}." for n in range(30)]
    # The page of the menu alone has a paragraph of its own, which is not another's.
    assert left[0] == f"{first[0]}\n\nAll rights\nreserved."
    assert [text.strip() for text in left[1:]] == [*first[1:7], MENU, *first[7:]]
    assert not result.counts.dropped


def test_a_duplicate_is_never_on_both_sides(tmp_path):
    rows = [{"text": f"text {n % 300}"} for n in range(1200)]
    path = jsonl(tmp_path / "in.jsonl", rows)
    make(path, tmp_path / "all", dedup="none", val_fraction=0.2, test_fraction=0.2)
    make(path, tmp_path / "out", val_fraction=0.2, test_fraction=0.2, unit_bytes=1000)
    side = {}
    for _, text, split in documents(tmp_path / "all"):
        assert side.setdefault(text, split) == split
    left = documents(tmp_path / "out")
    assert {text: split for _, text, split in left} == side
    assert Counter(text for _, text, _ in left) == Counter(side.keys())


def test_a_subset_is_filled_from_what_stays(tmp_path):
    path = jsonl(tmp_path / "in.jsonl", [{"text": f"text {n % 3}"} for n in range(30)])
    result = make(path, tmp_path / "out", val_fraction=1e-9)
    assert {name: one.documents for name, one in result.subsets.items()} == {"train": 2, "val": 1}
    one = make(jsonl(tmp_path / "one.jsonl", [{"text": "x"}] * 9), tmp_path / "one", val_fraction=0.5)
    assert {name: some.documents for name, some in one.subsets.items()} == {"train": 1}
    assert any("too few distinct documents" in note for note in one.notes)


def conversation(number, answer="a"):
    return {
        "messages": [
            {"role": "user", "content": f"question {number}"},
            {"role": "assistant", "content": f"{answer} {number}"},
        ]
    }


def test_conversations(tmp_path):
    rows = [conversation(n) for n in range(20)] + [
        conversation(3),
        conversation(3, "b"),
        conversation(9),
    ]
    result = make(jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out", unit_bytes=500)
    assert result.counts.dropped == {"exact duplicate": 2}
    assert result.counts.documents == 21


def test_pieces_of_a_split_conversation_are_no_duplicates(tmp_path):
    long = {"messages": conversation(0)["messages"] * 8}
    result = make(
        jsonl(tmp_path / "in.jsonl", [long, conversation(1), long, conversation(2)]),
        tmp_path / "out",
        chat=ChatRecipe(max_tokens=90, overlong="split"),
        dedup="near",
    )
    counts = result.counts
    pieces = counts.documents - 2
    assert pieces > 2
    assert counts.dropped == {"exact duplicate": pieces, "nothing to train": 2}
    assert counts.records == counts.documents + pieces + 2 - counts.further
    assert batchloom.check(tmp_path / "out").sound


def pair(number, rejected="no"):
    return {"prompt": f"{number}?", "chosen": f"yes {number}", "rejected": f"{rejected} {number}"}


@pytest.mark.parametrize("mode", ["exact", "near"])
def test_both_sides_of_a_pair_go_together(tmp_path, mode):
    rows = [pair(n) for n in range(40)] + [pair(5), pair(6, "quite another answer, not at all")]
    out = tmp_path / "out"
    result = make(jsonl(tmp_path / "in.jsonl", rows), out, unit_bytes=400, dedup=mode)
    assert result.counts.dropped["exact duplicate"] == 2
    assert result.counts.documents == 82 - result.counts.dropped.get("near duplicate", 0)
    assert batchloom.check(out).sound


@pytest.mark.parametrize("mode", ["exact", "near"])
def test_one_answer_with_two_labels_is_no_duplicate(tmp_path, mode):
    rows = [
        {"prompt": "how?", "completion": "in such a way, by and by", "label": label}
        for label in (True, False, True, False, True)
    ]
    result = make(jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out", dedup=mode)
    assert result.counts.documents == 2
    assert result.counts.dropped == {"exact duplicate": 3}


def test_what_is_added_to_a_text_makes_nothing_alike(tmp_path):
    # Documents of one token each: with the end token they would share half of their tokens.
    rows = [{"text": letter} for letter in _LETTERS]
    recipe = {"mode": "near", "shingle": 1, "bands": 64, "rows": 1}
    result = make(jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out", dedup=recipe)
    assert not result.counts.dropped


def test_a_dry_run_shows_what_would_go_and_the_run_goes_on_from_it(corpus, tmp_path):
    out = tmp_path / "out"
    dry = run(corpus.inputs, out, dry_run=True, dedup="near", unit_bytes=50_000)
    assert dry.counts.dropped == {"exact duplicate": 40, "near duplicate": 30}
    assert not dry.subsets
    assert not (out / "dataset_metadata.json").exists()
    work = next(path for path in out.iterdir())
    pairs = read_report(work).content.duplicates
    assert sum(one.count for one in pairs) == 70
    real = run(corpus.inputs, out, dedup="near", unit_bytes=50_000)
    assert real.counts == dry.counts
    assert real.resumed_units > 1
    run(corpus.inputs, tmp_path / "undisturbed", dedup="near", unit_bytes=50_000)
    assert tree(out) == tree(tmp_path / "undisturbed")


def test_a_dry_run_says_what_would_go_and_not_that_it_is_done(tmp_path, capsys):
    path = jsonl(tmp_path / "in.jsonl", [{"text": "one"}, {"text": "one"}, {"text": "two"}])
    words = ["prepare", str(path), "--out", str(tmp_path / "out"), "--tokenizer", "bytes"]
    assert main([*words, "--dry-run", "--profile"]) == 0
    told = capsys.readouterr()
    assert "encode" in told.out
    assert re.search(r"dropped: exact duplicate +1\n", told.out)
    assert "done in" not in told.out
    assert "no store was written" in told.err
    assert main([*words, "--similarity", "0.9"]) == 1
    assert "--restart" in capsys.readouterr().err


def test_a_store_made_again_is_the_same(corpus, tmp_path):
    said = {"mode": "near", "similarity": 0.85}
    first = batchloom.prepare(corpus.inputs, out=tmp_path / "a", tokenizer="bytes", dedup=said)
    again = batchloom.prepare(recipe=tmp_path / "a", out=tmp_path / "b")
    assert tree(first.path) == tree(again.path)
    assert any("is identical to" in note for note in again.notes)
    recipe = read_recipe(tmp_path / "a")
    assert recipe.dedup == DedupRecipe(mode="near", similarity=0.85)


USUAL = "Removing exact duplicates, "


@pytest.mark.parametrize(
    ("settings", "mode", "told"),
    [
        ({}, "exact", USUAL),
        ({"split_on": "file"}, "exact", USUAL),
        ({"split_on": "line"}, "none", "Keeping duplicates, because lines of verse"),
        ({"split_on": "paragraph"}, "none", "Keeping duplicates, because paragraphs of verse"),
        ({"split_on": "\n"}, "none", "Keeping duplicates, because lines of verse"),
        ({"split_on": "line", "dedup": "exact"}, "exact", ""),
        ({"dedup": "none"}, "none", ""),
        ({"dedup": "exact"}, "exact", ""),
    ],
)
def test_the_default_is_announced_once_before_work_begins(tmp_path, settings, mode, told):
    (tmp_path / "in.txt").write_text("one\n\none\n\ntwo\n\nthree")
    heard = []
    for _ in range(2):
        result = batchloom.prepare(
            tmp_path / "in.txt",
            out=tmp_path / "out",
            tokenizer="bytes",
            progress=heard.append,
            **settings,
        )
    assert result.already_done
    notes = [(at, one.text) for at, one in enumerate(heard) if hasattr(one, "text")]
    about = [(at, text) for at, text in notes if "uplicates" in text]
    assert [text[: len(told)] for _, text in about] == ([told] if told else [])
    assert all(at == 0 for at, _ in about)
    assert read_recipe(tmp_path / "out").dedup.mode == mode


def test_made_up_data_has_no_duplicates_to_speak_of(tmp_path):
    result = batchloom.prepare("dummy", out=tmp_path / "out")
    assert not any("uplicates" in note for note in result.notes)


@pytest.mark.parametrize(
    "rows",
    [
        [{"text": f"text {n % 7}"} for n in range(20)],
        [conversation(n % 7) for n in range(20)],
        [pair(n % 7) for n in range(20)],
        [{"prompt": "q", "completion": f"a {n % 5}", "label": n % 2 == 0} for n in range(20)],
    ],
    ids=["texts", "conversations", "pairs", "labels"],
)
def test_doctor_and_check_count_what_goes(tmp_path, rows):
    path = jsonl(tmp_path / "in.jsonl", rows)
    found = batchloom.doctor(path, tokenizer="bytes")
    result = batchloom.prepare(path, out=tmp_path / "out", tokenizer="bytes")
    gone = result.counts.dropped["exact duplicate"]
    assert (found.duplicates.repeated, found.duplicates.left_out) == (gone, True)
    assert found.documents == result.counts.documents + gone
    verdict = batchloom.check(path)
    assert "--no-dedup keeps them" in verdict.facts["duplicates"]


def test_doctor_says_that_lines_stay(tmp_path):
    (tmp_path / "in.txt").write_text("one\none\ntwo\n")
    found = batchloom.doctor(tmp_path / "in.txt", tokenizer="bytes", split_on="line")
    assert (found.duplicates.repeated, found.duplicates.left_out) == (1, False)
