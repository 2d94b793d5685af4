"""Decontamination: documents that share words with a record of an evaluation set."""

import gzip
import json
import os
import pickle
import sys
import time
import zipfile
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, strategies as st

from batchloom import InputError, SettingsError
from batchloom.core.errors import InputMissingError, RecordError
from batchloom.core.settings import from_plain, to_plain
from batchloom.preparation.identity import build_overlap_index
from batchloom.preparation.identity.step_files import _index_sets, _iter_records, fingerprint_step_files
from batchloom.text import CleanStep, DecontaminationSettings, DroppedText, build_index, make_decontamination_step
from batchloom.text.decontamination import OVERLAP_REASON, load_index, make_step_with_index, split_normal_words
from text.quality_texts import make_words

QUESTION = "A train leaves the station at noon and travels sixty miles an hour toward the old city"
SHORT = "How many legs has a spider with two shoes?"


def make_step(**sets):
    return make_step_with_index(build_index({name: [(text,) for text in texts] for name, texts in sets.items()}))


def test_thirteen_words_in_a_row_are_an_overlap():
    clean = make_step(trains=["Nothing of it.  But " * 5, QUESTION])
    words = QUESTION.split()
    assert clean(" ".join(["so", *words[2:14], "it", "went"])) == " ".join(["so", *words[2:14], "it", "went"])
    result = clean(" ".join(["so", *words[2:15], "it", "went"]))
    assert result == DroppedText(
        "decontaminate: shares words with trains",
        f"record 2 of trains: {' '.join(words[2:15])!r}",
    )


def test_case_punctuation_and_layout_do_not_hide_an_overlap():
    clean = make_step(trains=[QUESTION])
    hidden = QUESTION.upper().replace(" ", " -- \n“").replace("TRAIN", "*train*,")
    assert isinstance(clean(f"<p>{hidden}</p>"), DroppedText)


def test_short_fields_match_completely():
    clean = make_step(legs=[SHORT], few=["What is two and two", QUESTION])
    assert isinstance(clean(f"Q: {SHORT} A: ..."), DroppedText)
    assert clean("How many legs has a spider with two hats?")[:3] == "How"
    assert clean("What is two and two?") == "What is two and two?"


def test_fields_of_a_record_are_joined_in_order():
    question, answer = "What colour has the sky?", "It is blue in the day, all day."
    clean = make_step_with_index(build_index({"quiz": [(question, answer)]}))
    assert isinstance(clean(f"Quiz! {question} {answer} Well."), DroppedText)
    assert isinstance(clean(f"Quiz! {answer}"), DroppedText)
    assert clean(f"Quiz! {question} {question}") == f"Quiz! {question} {question}"


def test_the_first_overlap_and_the_first_set_are_reported():
    clean = make_step_with_index(build_index({"a": [(QUESTION,)], "b": [(QUESTION,), (SHORT,)]}))
    assert clean(QUESTION).reason == "decontaminate: shares words with a"
    assert clean(f"{SHORT} {QUESTION}").detail.startswith("record 2 of b")


@pytest.mark.parametrize("stride", [60, pytest.param(9, marks=pytest.mark.slow)])
def test_an_overlap_late_in_a_large_text(stride):
    clean = make_step(trains=[QUESTION])
    filler = " ".join(make_words(1000))
    text = " ".join([filler] * 200)
    assert clean(text) == text
    # The text is read in parts. An overlap across the edge of a part is found.
    for position in range((1 << 20) - 100, (1 << 20) + 20, stride):
        head = text[:position].rsplit(" ", 1)[0]
        result = clean(f"{head} {QUESTION} {filler}")
        assert result.detail == f"record 1 of trains: {' '.join(split_normal_words(QUESTION)[:13])!r}"


@given(
    st.lists(st.sampled_from("abcd"), max_size=60),
    st.lists(st.sampled_from("abcd"), min_size=2, max_size=30),
    st.integers(1, 6),
    st.integers(1, 6),
)
def test_overlaps_are_those_of_a_simple_search(document, record, words, min_words):
    if len(record) < min(words, min_words):
        return
    clean = make_step_with_index(build_index({"s": [(" ".join(record),)]}, words=words, min_words=min_words))
    size = min(words, len(record))
    grams = {tuple(record[i : i + size]) for i in range(len(record) - size + 1)}
    is_shared = any(tuple(document[i : i + size]) in grams for i in range(len(document) - size + 1))
    assert isinstance(clean(" ".join(document)), DroppedText) == is_shared


@given(st.text(max_size=200))
def test_any_text_gives_itself_or_a_drop(text):
    assert make_step(trains=[QUESTION])(text) == text
    assert split_normal_words(text) == split_normal_words(" ".join(split_normal_words(text)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Don\u2019t STOP_me, now", "don t stop me now"),
        ("Cafe\u0301 CAFÉ", "café café"),
        ("東京タワー2024年", "東 京 タ ワ ー 2024 年"),
        ("हिन्दी भाषा", "हिन्दी भाषा"),
        ("1,000.5 x=y≠z", "1 000 5 x y z"),
    ],
)
def test_normal_words(text, expected):
    assert " ".join(split_normal_words(text)) == expected


def test_an_index_is_a_file_that_workers_map(tmp_path):
    rows = [{"question": QUESTION, "choices": ["red", "blue"], "answer": 1}, {"question": SHORT}]
    (tmp_path / "quiz.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "lines.txt").write_text(f"short\n{' '.join(make_words(20))}\n")
    settings = DecontaminationSettings(
        sets={"quiz": str(tmp_path / "quiz.jsonl"), "lines": str(tmp_path / "lines.txt")}
    )
    assert list(_iter_records(settings.sets["quiz"], [])) == [(QUESTION, "red", "blue"), (SHORT,)]
    ready_settings = build_overlap_index(settings, tmp_path)
    assert build_overlap_index(settings, tmp_path) == ready_settings
    assert from_plain(DecontaminationSettings, to_plain(ready_settings)) == ready_settings
    clean = pickle.loads(pickle.dumps(make_decontamination_step(ready_settings)))
    assert clean(f"- {SHORT}").detail.startswith("record 2 of quiz")
    assert clean(" ".join(make_words(14))).reason in [OVERLAP_REASON.format(name) for name in settings.sets]
    assert clean("nothing of it") == "nothing of it"
    assert (
        load_index(ready_settings.index).fingerprint
        == _index_sets(settings, {name: [] for name in settings.sets}).fingerprint
    )
    clean_step = CleanStep("decontaminate", {"sets": settings.sets})
    fingerprint = fingerprint_step_files([clean_step])
    (tmp_path / "lines.txt").write_text(f"short\n{' '.join(make_words(21))}\n")
    assert fingerprint_step_files([clean_step]) != fingerprint
    assert build_overlap_index(settings, tmp_path).index != ready_settings.index


def rewrite_same_size(path, text):
    """Write other content of the same size with the same modification time."""
    status = path.stat()
    assert len(text.encode()) == status.st_size
    path.write_text(text)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_fingerprints_of_sets_depend_on_their_bytes(tmp_path):
    path = tmp_path / "quiz.txt"
    path.write_text(f"{' '.join(make_words(20))}\n")
    settings = DecontaminationSettings(sets={"quiz": str(path)})
    clean_step = CleanStep("decontaminate", {"sets": settings.sets})
    fingerprint, ready_settings = fingerprint_step_files([clean_step]), build_overlap_index(settings, tmp_path)
    assert fingerprint_step_files([clean_step]) == fingerprint
    rewrite_same_size(path, path.read_text()[::-1].strip() + "\n")
    assert fingerprint_step_files([clean_step]) != fingerprint
    assert build_overlap_index(settings, tmp_path).index != ready_settings.index
    (tmp_path / "copy.txt").write_text(path.read_text())
    (tmp_path / "copy.jsonl").write_text(path.read_text())
    copies = [
        fingerprint_step_files([CleanStep("decontaminate", {"sets": {name: str(tmp_path / file_name)}, **options})])
        for name, file_name, options in [
            ("quiz", "copy.txt", {}),
            ("other", "copy.txt", {}),
            ("quiz", "copy.jsonl", {}),
            ("quiz", "copy.txt", {"words": 14}),
            ("quiz", "copy.txt", {"min_words": 9}),
        ]
    ]
    assert copies[0] == fingerprint_step_files([clean_step])
    assert len(set(copies)) == len(copies)


def test_fingerprints_of_sets_need_no_index(tmp_path):
    (tmp_path / "quiz.jsonl").write_text("no JSON\n")
    settings = {"sets": {"quiz": str(tmp_path / "quiz.jsonl")}}
    assert fingerprint_step_files([CleanStep("decontaminate", settings)])
    with pytest.raises(RecordError, match=r"quiz\.jsonl"):
        build_overlap_index(DecontaminationSettings(**settings), tmp_path)
    settings = {"sets": {"quiz": str(tmp_path / "none.jsonl")}}
    with pytest.raises(InputMissingError, match=r"none\.jsonl"):
        fingerprint_step_files([CleanStep("decontaminate", settings)])


def test_sets_of_every_form(tmp_path):
    folder = tmp_path / "sets"
    folder.mkdir()
    rows = [{"question": QUESTION, "n": n} for n in range(50)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "c.json").write_text(json.dumps(rows))
    (folder / "d.csv").write_text("question,n\n" + f'"{QUESTION}",1\n' * 50)
    pq.write_table(pa.Table.from_pylist(rows), folder / "e.parquet")
    with zipfile.ZipFile(folder / "f.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.glob("[a-e].*")):
            archive.write(path, path.name)
    (folder / "g.txt").write_text(QUESTION)
    fsspec.filesystem("memory").pipe("/evaluation/h.jsonl", lines)
    sets = {"here": str(folder), "far": "memory://evaluation/h.jsonl"}
    settings = DecontaminationSettings(sets=sets)
    ready_settings = build_overlap_index(settings, tmp_path)
    assert (
        load_index(ready_settings.index).fingerprint
        == _index_sets(settings, {name: [] for name in settings.sets}).fingerprint
    )
    fsspec.filesystem("memory").pipe("/evaluation/h.jsonl", lines.upper())
    assert build_overlap_index(settings, tmp_path).index != ready_settings.index


_AUDIT_HOOKS = []


def test_a_set_that_changes_during_reading_gives_no_wrong_index(tmp_path):
    path, count = tmp_path / "quiz.txt", 0
    old_text, new_text = (f"{' '.join(words)}\n" for words in (make_words(20), make_words(20)[::-1]))
    settings, refusals = DecontaminationSettings(sets={"quiz": str(path)}), []
    fingerprints = {}
    for text in (old_text, new_text):
        path.write_text(text)
        fingerprints[_index_sets(settings, {name: [] for name in settings.sets}).fingerprint] = Path(
            build_overlap_index(settings, tmp_path).index
        ).name
    assert len(set(fingerprints.values())) == 2
    sys.addaudithook(lambda event, args: event == "open" and _AUDIT_HOOKS and _AUDIT_HOOKS[-1](args[0]))
    is_rewritten = 1
    while is_rewritten:
        path.write_text(old_text)
        count, is_rewritten = count + 1, 0
        remaining = count

        def rewrite_at_open(opened_path):
            nonlocal remaining, is_rewritten
            remaining -= str(opened_path) == str(path)
            if not remaining and not is_rewritten:
                is_rewritten = 1
                rewrite_same_size(path, new_text)

        folder = tmp_path / f"{count}"
        folder.mkdir()
        _AUDIT_HOOKS.append(rewrite_at_open)
        try:
            index = Path(build_overlap_index(settings, folder).index)
            assert fingerprints[load_index(str(index)).fingerprint] == index.name
        except InputError as error:
            refusals.append((str(error), list(folder.iterdir())))
        finally:
            _AUDIT_HOOKS.clear()
    assert refusals
    assert all("was changed while it was used" in message and not files for message, files in refusals)


def test_golden_fingerprint():
    index = build_index({"s": [("one two three four five six seven eight",)]})
    assert index.fingerprint == "d464bbd4e59f3f10d1e31630fb85c75b"


@pytest.mark.parametrize("cut", [0, 10, 64, 100, 400])
def test_a_file_that_is_no_index(tmp_path, cut):
    path = tmp_path / "x.index"
    path.write_bytes(bytes(build_index({"s": [(QUESTION,)]}).serialize())[:cut])
    with pytest.raises(InputError, match="index"):
        load_index(str(path))
    with pytest.raises(InputError, match="cannot be read"):
        load_index(str(tmp_path / "absent"))


def test_invalid_evaluation_sets(tmp_path):
    with pytest.raises(InputError, match="'s' holds no text of 8 words or more"):
        build_index({"s": [("too short",)]})
    with pytest.raises(SettingsError, match="names no evaluation set"):
        DecontaminationSettings()
    with pytest.raises(SettingsError, match="words: 0 is not a whole number"):
        DecontaminationSettings(sets={"a": "b"}, words=0)
    with pytest.raises(InputError, match="there is no index"):
        make_decontamination_step(DecontaminationSettings(sets={"a": "b"}))
    (tmp_path / "bad.jsonl").write_text('{"q": "x"}\n{broken\n')
    with pytest.raises(RecordError, match="line 2 in bad.jsonl"):
        list(_iter_records(str(tmp_path / "bad.jsonl"), []))


@pytest.mark.parametrize("unit", ["a ", "x", "語", "\u0301", "a\u0301", "\n", "…", QUESTION[:60] + " "])
def test_time_grows_with_length_alone(unit):
    clean = make_step(trains=[QUESTION], letters=["a " * 20])
    seconds = []
    for size in (20_000, 160_000):
        start = time.process_time()
        clean((unit * size)[:size])
        seconds.append(time.process_time() - start)
    assert seconds[1] < 24 * max(seconds[0], 0.02)
