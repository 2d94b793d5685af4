"""Deduplication end to end: dropped documents depend on nothing but the input."""

import json
import random
import re
from collections import Counter

import pytest

import batchloom
from batchloom import SettingsError
from batchloom.cli import run_command_line
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
from preparation.stores import hash_store_files, make_recipe, prepare_store, read_documents, read_texts, write_jsonl

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def make_words(rng, count):
    return ["".join(rng.choices(_LETTERS, k=rng.randint(3, 9))) for _ in range(count)]


def rewrite_words(rng, text, share):
    """Replace a share of consecutive words of a text by random ones."""
    parts = text.split(" ")
    count = round(share * len(parts))
    start = rng.randrange(len(parts) - count)
    return " ".join([*parts[:start], *make_words(rng, count), *parts[start + count :]])


def jaccard(first, second, shingle=5):
    """Return the Jaccard similarity of two texts, by the definition."""
    sets = [{text[start : start + shingle] for start in range(len(text) - shingle + 1)} for text in (first, second)]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def prepare_units(inputs, out, *, workers=1, unit_bytes=1 << 40, dry_run=False, **settings):
    recipe = make_recipe(inputs=tuple(map(str, inputs)), **{"tokenizer": "bytes", **settings})
    run_settings = RunSettings(
        execution=ExecutionSettings(workers=workers),
        unit_bytes=unit_bytes,
        dry_run=dry_run,
        limits=ReadLimits(),
    )
    return run_recipe(recipe, out, lambda _: None, settings=run_settings)


class Corpus:
    """Texts in files of several formats, with planted copies and their originals."""

    def __init__(self, folder, seed=1):
        rng = random.Random(seed)
        self.plain = [" ".join(make_words(rng, 60)) for _ in range(60)]
        rows = [("plain", number, text) for number, text in enumerate(self.plain)]
        rows += [("exact", number, self.plain[number]) for number in range(20)]
        rows += [("near", number, rewrite_words(rng, self.plain[number], 0.02)) for number in range(20, 35)]
        rows += [("far", number, rewrite_words(rng, self.plain[number], 0.5)) for number in range(35, 50)]
        rng.shuffle(rows)
        self.rows = rows
        size = len(rows) // 4
        parts = [rows[number * size : (number + 1) * size if number < 3 else None] for number in range(4)]
        write_jsonl(folder / "a.jsonl", [{"text": text} for *_, text in parts[0]])
        (folder / "b.json").write_text(json.dumps([{"text": text} for *_, text in parts[1]]))
        (folder / "c.csv").write_text("text\n" + "".join(f"{text}\n" for *_, text in parts[2]))
        (folder / "d").mkdir()
        for number, (*_, text) in enumerate(parts[3]):
            (folder / "d" / f"{number:03d}.txt").write_text(text)
        self.inputs = [folder / "a.jsonl", folder / "b.json", folder / "c.csv", folder / "d"]

    def firsts(self, *kinds):
        """Return the texts that remain if these kinds count as copies of their originals."""
        names, expected = set(), []
        for kind, number, text in self.rows:
            name = number if kind in ("plain", *kinds) else (kind, number)
            if name not in names:
                expected.append(text)
            names.add(name)
        return expected


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return Corpus(tmp_path_factory.mktemp("corpus"))


def test_none_keeps_all(corpus, tmp_path):
    result = prepare_store(corpus.inputs, tmp_path / "out", dedup="none")
    assert read_texts(tmp_path / "out") == [text for *_, text in corpus.rows]
    assert not result.counts.dropped


def test_exact_finds_all_and_nothing_else(corpus, tmp_path):
    result = prepare_store(corpus.inputs, tmp_path / "out")
    assert read_texts(tmp_path / "out") == corpus.firsts("exact")
    assert result.counts.dropped == {"exact duplicate": 20}
    assert batchloom.check(tmp_path / "out").sound


def test_near_finds_what_its_banding_promises(corpus, tmp_path):
    similarities = [jaccard(corpus.plain[number], text) for kind, number, text in corpus.rows if kind == "near"]
    expected_count = sum(match_probability(similarity, 14, 8) for similarity in similarities)
    assert min(similarities) > 0.9
    assert expected_count > 14.95
    other_similarities = [jaccard(corpus.plain[number], text) for kind, number, text in corpus.rows if kind == "far"]
    assert sum(match_probability(similarity, 14, 8) for similarity in other_similarities) < 0.3
    result = prepare_store(corpus.inputs, tmp_path / "out", dedup="near")
    # Recall and precision are 1.
    assert read_texts(tmp_path / "out") == corpus.firsts("exact", "near")
    assert result.counts.dropped == {"exact duplicate": 20, "near duplicate": 15}
    assert batchloom.check(tmp_path / "out").sound


def test_recall_is_that_of_the_formula(tmp_path):
    rng = random.Random(5)
    plain = [" ".join(make_words(rng, 100)) for _ in range(75)]
    rewritten = [rewrite_words(rng, text, 0.12) for text in plain]
    probabilities = [match_probability(jaccard(*make_pair), 14, 8) for make_pair in zip(plain, rewritten, strict=True)]
    expected, spread = sum(probabilities), sum(p * (1 - p) for p in probabilities) ** 0.5
    assert 37 < expected < 70
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": text} for text in plain + rewritten])
    dropped = prepare_store(path, tmp_path / "out", dedup="near").counts.dropped["near duplicate"]
    assert abs(dropped - expected) < 4 * spread


def test_a_similarity_chooses_its_banding(tmp_path):
    rng = random.Random(6)
    plain = [" ".join(make_words(rng, 100)) for _ in range(40)]
    path = write_jsonl(
        tmp_path / "in.jsonl",
        [{"text": text} for text in plain + [rewrite_words(rng, text, 0.06) for text in plain]],
    )
    dropped = {}
    for settings in (
        {"similarity": 0.8},
        {"similarity": 0.6},
        {"similarity": 0.99},
        {"bands": 8, "rows": 13},
    ):
        result = prepare_store(path, tmp_path / str(settings), dedup={"mode": "near", **settings})
        dropped[*settings.values()] = result.counts.dropped.get("near duplicate", 0)
    assert dropped[0.8,] >= 34
    assert dropped[0.6,] == 40
    assert dropped[0.99,] < 16
    similar = prepare_store(path, tmp_path / "0.9", dedup={"mode": "near", "similarity": 0.9})
    assert similar.counts.dropped["near duplicate"] == dropped[8, 13]
    assert read_texts(tmp_path / "0.9") == read_texts(tmp_path / str({"bands": 8, "rows": 13}))


@pytest.mark.parametrize(
    ("settings", "problem"),
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
def test_a_wrong_similarity_is_reported_by_its_path(settings, problem):
    with pytest.raises(SettingsError) as error:
        make_recipe(inputs=("in.jsonl",), dedup=settings)
    (message,) = error.value.problems
    assert message.startswith("dedup.similarity: ")
    assert problem in message


MODES = ["exact", "near", "lines", "paragraphs"]


@pytest.mark.parametrize("mode", MODES)
def test_units_do_not_affect_deduplication(corpus, tmp_path, mode):
    results = []
    for unit_bytes in (6_000, 1 << 40):
        out = tmp_path / f"{unit_bytes}"
        prepare_units(corpus.inputs, out, unit_bytes=unit_bytes, dedup=mode)
        results.append([(text, split) for _, text, split in read_documents(out)])
        assert batchloom.check(out).sound
    assert results[0] == results[1]
    assert len(results[0]) < len(corpus.rows)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("workers", "unit_bytes"), [(2, 2_000), (5, 8_000)])
def test_workers_decide_no_byte(corpus, tmp_path, mode, workers, unit_bytes):
    prepare_units(corpus.inputs, tmp_path / "one", workers=1, unit_bytes=unit_bytes, dedup=mode)
    prepare_units(corpus.inputs, tmp_path / "pool", workers=workers, unit_bytes=unit_bytes, dedup=mode)
    assert hash_store_files(tmp_path / "pool") == hash_store_files(tmp_path / "one")


MENU_LINE = "Home | News | About us"


@pytest.fixture
def pages(tmp_path):
    """Write pages with a repeated menu and notice, and one page of these alone."""
    (tmp_path / "in").mkdir()
    rows = [f"{MENU_LINE}\nPage {n} says {n * n}.\n\nAll rights\nreserved." for n in range(30)]
    rows.insert(7, f"  {MENU_LINE}\n\nAll rights\nreserved.\n")
    write_jsonl(tmp_path / "in" / "a.jsonl", [{"text": text} for text in rows[:11]])
    write_jsonl(tmp_path / "in" / "b.jsonl", [{"text": text} for text in rows[11:]])
    return tmp_path / "in"


def test_repeated_lines_go(pages, tmp_path):
    result = prepare_store(pages, tmp_path / "out", dedup="lines", unit_bytes=300, val_fraction=0)
    remaining = read_texts(tmp_path / "out")
    assert remaining[0] == f"{MENU_LINE}\nPage 0 says 0.\n\nAll rights\nreserved."
    assert remaining[1:] == [f"Page {n} says {n * n}.\n" for n in range(1, 30)]
    assert result.counts.dropped == {"only repeated lines": 1}
    assert batchloom.check(tmp_path / "out").sound


def test_repeated_paragraphs_go(pages, tmp_path):
    result = prepare_store(pages, tmp_path / "out", dedup="paragraphs", unit_bytes=300, val_fraction=0)
    remaining = read_texts(tmp_path / "out")
    beginnings = [f"{MENU_LINE}\nPage {n} says {n * n}." for n in range(30)]
    # The paragraph of the page that is only the menu occurs once.
    assert remaining[0] == f"{beginnings[0]}\n\nAll rights\nreserved."
    assert [text.strip() for text in remaining[1:]] == [*beginnings[1:7], MENU_LINE, *beginnings[7:]]
    assert not result.counts.dropped


def test_a_duplicate_is_never_on_both_sides(tmp_path):
    rows = [{"text": f"text {n % 100}"} for n in range(300)]
    path = write_jsonl(tmp_path / "in.jsonl", rows)
    prepare_store(path, tmp_path / "all", dedup="none", val_fraction=0.2, test_fraction=0.2)
    prepare_store(path, tmp_path / "out", val_fraction=0.2, test_fraction=0.2, unit_bytes=500)
    subset_by_text = {}
    for _, text, split in read_documents(tmp_path / "all"):
        assert subset_by_text.setdefault(text, split) == split
    remaining = read_documents(tmp_path / "out")
    assert {text: split for _, text, split in remaining} == subset_by_text
    assert Counter(text for _, text, _ in remaining) == Counter(subset_by_text.keys())


def test_a_subset_is_filled_from_what_stays(tmp_path):
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": f"text {n % 3}"} for n in range(30)])
    result = prepare_store(path, tmp_path / "out", val_fraction=1e-9)
    assert {name: subset.documents for name, subset in result.subsets.items()} == {"train": 2, "val": 1}
    equal_texts = prepare_store(
        write_jsonl(tmp_path / "one.jsonl", [{"text": "x"}] * 9), tmp_path / "one", val_fraction=0.5
    )
    assert {name: subset.documents for name, subset in equal_texts.subsets.items()} == {"train": 1}
    assert any("too few distinct documents" in note for note in equal_texts.notes)


def make_conversation(number, answer="a"):
    return {
        "messages": [
            {"role": "user", "content": f"question {number}"},
            {"role": "assistant", "content": f"{answer} {number}"},
        ]
    }


def test_conversations(tmp_path):
    rows = [make_conversation(n) for n in range(20)] + [
        make_conversation(3),
        make_conversation(3, "b"),
        make_conversation(9),
    ]
    result = prepare_store(write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out", unit_bytes=500)
    assert result.counts.dropped == {"exact duplicate": 2}
    assert result.counts.documents == 21


def test_parts_of_a_split_conversation_are_no_duplicates(tmp_path):
    long = {"messages": make_conversation(0)["messages"] * 8}
    result = prepare_store(
        write_jsonl(tmp_path / "in.jsonl", [long, make_conversation(1), long, make_conversation(2)]),
        tmp_path / "out",
        chat=ChatRecipe(max_tokens=90, overlong="split"),
        dedup="near",
    )
    counts = result.counts
    parts = counts.documents - 2
    assert parts > 2
    assert counts.dropped == {"exact duplicate": parts, "nothing to train": 2}
    assert counts.records == counts.documents + parts + 2 - counts.further
    assert batchloom.check(tmp_path / "out").sound


def make_pair(number, rejected="no"):
    return {"prompt": f"{number}?", "chosen": f"yes {number}", "rejected": f"{rejected} {number}"}


@pytest.mark.parametrize("mode", ["exact", "near"])
def test_both_sides_of_a_pair_go_together(tmp_path, mode):
    rows = [make_pair(n) for n in range(40)] + [make_pair(5), make_pair(6, "quite another answer, not at all")]
    out = tmp_path / "out"
    result = prepare_store(write_jsonl(tmp_path / "in.jsonl", rows), out, unit_bytes=400, dedup=mode)
    assert result.counts.dropped["exact duplicate"] == 2
    assert result.counts.documents == 82 - result.counts.dropped.get("near duplicate", 0)
    assert batchloom.check(out).sound


@pytest.mark.parametrize("mode", ["exact", "near"])
def test_one_answer_with_two_labels_is_no_duplicate(tmp_path, mode):
    rows = [
        {"prompt": "how?", "completion": "in such a way, by and by", "label": label}
        for label in (True, False, True, False, True)
    ]
    result = prepare_store(write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out", dedup=mode)
    assert result.counts.documents == 2
    assert result.counts.dropped == {"exact duplicate": 3}


def test_end_tokens_do_not_make_texts_similar(tmp_path):
    # Documents have one token each: with end tokens they would share half of their tokens.
    rows = [{"text": letter} for letter in _LETTERS]
    recipe = {"mode": "near", "shingle": 1, "bands": 64, "rows": 1}
    result = prepare_store(write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out", dedup=recipe)
    assert not result.counts.dropped


def test_a_dry_run_reports_drops_and_the_run_resumes_it(corpus, tmp_path):
    out = tmp_path / "out"
    dry = prepare_units(corpus.inputs, out, dry_run=True, dedup="near", unit_bytes=12_000)
    assert dry.counts.dropped == {"exact duplicate": 20, "near duplicate": 15}
    assert not dry.subsets
    assert not (out / "dataset_metadata.json").exists()
    work_folder = next(path for path in out.iterdir())
    pairs = read_report(work_folder).content.duplicates
    assert sum(pair.count for pair in pairs) == 35
    result = prepare_units(corpus.inputs, out, dedup="near", unit_bytes=12_000)
    assert result.counts == dry.counts
    assert result.resumed_units > 1
    prepare_units(corpus.inputs, tmp_path / "undisturbed", dedup="near", unit_bytes=12_000)
    assert hash_store_files(out) == hash_store_files(tmp_path / "undisturbed")


def test_the_dry_run_command_reports_drops_and_no_store(tmp_path, capsys):
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": "one"}, {"text": "one"}, {"text": "two"}])
    command = ["prepare", str(path), "--out", str(tmp_path / "out"), "--tokenizer", "bytes"]
    assert run_command_line([*command, "--dry-run", "--profile"]) == 0
    captured = capsys.readouterr()
    assert "encode" in captured.out
    assert re.search(r"dropped: exact duplicate +1\n", captured.out)
    assert "done in" not in captured.out
    assert "no store was written" in captured.err
    assert run_command_line([*command, "--similarity", "0.9"]) == 1
    assert "--restart" in capsys.readouterr().err


def test_a_store_made_again_is_the_same(corpus, tmp_path):
    dedup = {"mode": "near", "similarity": 0.85}
    first = batchloom.prepare(corpus.inputs, out=tmp_path / "a", tokenizer="bytes", dedup=dedup)
    rerun = batchloom.prepare(recipe=tmp_path / "a", out=tmp_path / "b")
    assert hash_store_files(first.path) == hash_store_files(rerun.path)
    assert any("is identical to" in note for note in rerun.notes)
    recipe = read_recipe(tmp_path / "a")
    assert recipe.dedup == DedupRecipe(mode="near", similarity=0.85)


DEFAULT_NOTE = "Removing exact duplicates, "


@pytest.mark.parametrize(
    ("settings", "mode", "expected"),
    [
        ({}, "exact", DEFAULT_NOTE),
        ({"split_on": "file"}, "exact", DEFAULT_NOTE),
        ({"split_on": "line"}, "none", "Keeping duplicates, because lines of verse"),
        ({"split_on": "paragraph"}, "none", "Keeping duplicates, because paragraphs of verse"),
        ({"split_on": "\n"}, "none", "Keeping duplicates, because lines of verse"),
        ({"split_on": "line", "dedup": "exact"}, "exact", ""),
        ({"dedup": "none"}, "none", ""),
        ({"dedup": "exact"}, "exact", ""),
    ],
)
def test_the_default_is_announced_once_before_work_begins(tmp_path, settings, mode, expected):
    (tmp_path / "in.txt").write_text("one\n\none\n\ntwo\n\nthree")
    events = []
    for _ in range(2):
        result = batchloom.prepare(
            tmp_path / "in.txt",
            out=tmp_path / "out",
            tokenizer="bytes",
            progress=events.append,
            **settings,
        )
    assert result.already_done
    notes = [(index, event.text) for index, event in enumerate(events) if hasattr(event, "text")]
    duplicate_notes = [(index, text) for index, text in notes if "uplicates" in text]
    assert [text[: len(expected)] for _, text in duplicate_notes] == ([expected] if expected else [])
    assert all(index == 0 for index, _ in duplicate_notes)
    assert read_recipe(tmp_path / "out").dedup.mode == mode


def test_made_up_data_has_no_duplicates_to_speak_of(tmp_path):
    result = batchloom.prepare("dummy:documents=50", out=tmp_path / "out")
    assert not any("uplicates" in note for note in result.notes)


@pytest.mark.parametrize(
    "rows",
    [
        [{"text": f"text {n % 7}"} for n in range(20)],
        [make_conversation(n % 7) for n in range(20)],
        [make_pair(n % 7) for n in range(20)],
        [{"prompt": "q", "completion": f"a {n % 5}", "label": n % 2 == 0} for n in range(20)],
    ],
    ids=["texts", "conversations", "pairs", "labels"],
)
def test_doctor_and_check_count_what_goes(tmp_path, rows):
    path = write_jsonl(tmp_path / "in.jsonl", rows)
    diagnosis = batchloom.doctor(path, tokenizer="bytes")
    result = batchloom.prepare(path, out=tmp_path / "out", tokenizer="bytes")
    repeated = result.counts.dropped["exact duplicate"]
    assert (diagnosis.duplicates.repeated, diagnosis.duplicates.left_out) == (repeated, True)
    assert diagnosis.documents == result.counts.documents + repeated
    report = batchloom.check(path)
    assert "--no-dedup keeps them" in report.facts["duplicates"]


def test_doctor_says_that_lines_stay(tmp_path):
    (tmp_path / "in.txt").write_text("one\none\ntwo\n")
    diagnosis = batchloom.doctor(tmp_path / "in.txt", tokenizer="bytes", split_on="line")
    assert (diagnosis.duplicates.repeated, diagnosis.duplicates.left_out) == (1, False)
