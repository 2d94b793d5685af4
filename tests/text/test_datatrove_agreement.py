"""Agreement of the quality rules with datatrove's filters."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings

from batchloom.text import C4, DroppedText, iter_words
from batchloom.text.english_words import load_english_tables
from batchloom.text.quality import c4
from oracles import import_datatrove
from text.quality_texts import EDGES, STEPS
from text.test_quality_rules import TEXTS
from tiers import examples

# Reasons by datatrove's names.
REASONS = {
    "lorem_ipsum": "c4: lorem ipsum",
    "curly_bracket": "c4: curly bracket",
    "too_few_sentences": "c4: too few sentences",
    "< 3 paragraphs": "c4: too few long paragraphs",
    "gopher_short_doc": "gopher: too few words",
    "gopher_long_doc": "gopher: too many words",
    "gopher_below_avg_threshold": "gopher: words too short",
    "gopher_above_avg_threshold": "gopher: words too long",
    "gopher_too_many_hashes": "gopher: too many hash signs",
    "gopher_too_many_ellipsis": "gopher: too many ellipses",
    "gopher_too_many_bullets": "gopher: too many lines begin with a bullet",
    "gopher_too_many_end_ellipsis": "gopher: too many lines end with an ellipsis",
    "gopher_below_alpha_threshold": "gopher: too few words with a letter",
    "gopher_enough_stop_words": "gopher: too few stop words",
    "dup_para_frac": "repetition: duplicate paragraphs",
    "dup_para_char_frac": "repetition: characters in duplicate paragraphs",
    "dup_line_frac": "repetition: duplicate lines",
    "dup_line_char_frac": "repetition: characters in duplicate lines",
    **{f"top_{n}_gram": f"repetition: most frequent {n}-gram" for n in (2, 3, 4)},
    **{f"duplicated_{n}_n_grams": f"repetition: duplicate {n}-grams" for n in range(5, 11)},
    "line_punct_ratio": "fineweb: too few lines end with punctuation",
    "short_line_ratio": "fineweb: too many short lines",
    "char_dup_ratio": "fineweb: too many characters in duplicate lines",
    "list_ratio": "fineweb: too many newlines",
}
FILTERS = {
    "c4": "C4QualityFilter",
    "gopher": "GopherQualityFilter",
    "repetition": "GopherRepetitionFilter",
    "fineweb": "FineWebQualityFilter",
}


@pytest.fixture(scope="module")
def filters():
    module = import_datatrove("pipeline.filters")
    return {step: getattr(module, name)() for step, name in FILTERS.items()}


def run_datatrove(filters, step: str, text: str) -> tuple[str, str]:
    """Return the text and an empty reason, or no text and the reason of a drop."""
    document = import_datatrove("data").Document(text=text, id="0")
    verdict = filters[step].filter(document)
    if isinstance(verdict, tuple):
        return "", REASONS.get(verdict[1], f"{step}: {verdict[1]}")
    return document.text, ""


def run_step(step: str, text: str) -> tuple[str, str]:
    verdict = STEPS[step](text)
    return ("", verdict.reason) if isinstance(verdict, DroppedText) else (verdict, "")


def list_python_documents() -> list[str]:
    """List Python's documentation and sources."""
    from pydoc_data.topics import topics

    documents = [str(topics[name]) for name in sorted(topics)]
    library = Path(os.__file__).parent
    documents += [path.read_text(encoding="utf-8")[:6000] for path in sorted(library.glob("[a-h]*.py"))]
    # The rules expect prose without the line breaks of a terminal.
    return documents + [text.replace("\n   ", " ") for text in documents[:60]]


def list_real_documents(folder: Path) -> list[str]:
    """List texts of web pages and answers to instructions."""
    lines = (folder / "c4_demo.jsonl").read_text(encoding="utf-8").splitlines()
    answers = [row["output"] for row in json.loads((folder / "alpaca_en_demo.json").read_text())]
    return [json.loads(line)["text"] for line in lines] + answers


# Kind, first document and stride. Some document of each has a defect that few have.
CORPORA = [
    ("Python", 0, 12),
    ("real inputs", 9, 44),
    pytest.param(("Python", 0, 1), marks=pytest.mark.slow),
    pytest.param(("real inputs", 0, 1), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=CORPORA, ids=str)
def corpus(request):
    """Documents of one kind: a few, or all of them."""
    kind, first, stride = request.param
    is_real = kind == "real inputs"
    documents = list_real_documents(request.getfixturevalue("real_data")) if is_real else list_python_documents()
    return documents[first::stride]


@pytest.mark.parametrize("step", FILTERS)
def test_verdicts_and_reasons_are_datatroves_on_real_documents(filters, corpus, step):
    results = [run_step(step, text) for text in corpus]
    assert results == [run_datatrove(filters, step, text) for text in corpus]
    assert len({reason for _, reason in results}) > 2


# spaCy takes seconds for the largest one, and test_quality_rules.py tests it alone.
LIMITS = [pytest.param(*edge, id=edge[3], marks=[pytest.mark.slow] * (len(edge[1]) > 100_000)) for edge in EDGES]


@pytest.mark.parametrize(("step", "inside", "outside", "why"), LIMITS)
def test_limits_are_datatroves(filters, step, inside, outside, why):
    assert run_step(step, inside) == run_datatrove(filters, step, inside)
    assert run_datatrove(filters, step, outside) == ("", why)


def test_words_are_spacys(corpus):
    split = import_datatrove("utils.text").split_into_words
    for text in corpus:
        assert list(iter_words(text)) == split(text)


def test_tables_are_spacys_and_datatroves():
    text_module = import_datatrove("utils.text")
    import spacy
    from spacy.symbols import ORTH

    model, tables = spacy.blank("en"), load_english_tables()
    for kind in ("prefixes", "suffixes", "infixes"):
        assert tables[kind] == [pattern for pattern in getattr(model.Defaults, kind) if pattern.strip()]
    special = {entry.replace(" ", ""): entry.split() for entry in tables["special"]}
    for token, parts in model.tokenizer.rules.items():
        if not any(map(str.isspace, token)):
            assert special.pop(token) == [token_part[ORTH] for token_part in parts]
    assert not special
    assert set(tables["sentence_ends"]) == set(model.add_pipe("sentencizer").punct_chars)
    assert set(tables["terminal_punctuation"]) == text_module.TERMINAL_PUNCTUATION
    assert set(tables["punctuation"]) == text_module.PUNCTUATION_SET


def is_defined(step: str, text: str) -> bool:
    """Return whether datatrove's filter gives a verdict: it divides by the words."""
    return bool(text.strip()) and "IS_ALPHA" not in text


@pytest.mark.parametrize("step", ["c4", "repetition", "fineweb"])
@settings(max_examples=examples(60))
@given(text=TEXTS.filter(lambda text: "\ud800" not in text))
def test_any_text_has_datatroves_verdict(step, text):
    filters = {step: getattr(import_datatrove("pipeline.filters"), FILTERS[step])()}
    if is_defined(step, text):
        assert run_step(step, text) == run_datatrove(filters, step, text)


def test_paragraphs_and_bad_words_are_datatroves(corpus, tmp_path, monkeypatch):
    module = import_datatrove("pipeline.filters.c4_filters")
    word_file = tmp_path / "words.txt"
    word_file.write_text("attribute\nreturn value\nc++\nwell\n")
    monkeypatch.setattr(module, "cached_asset_path_or_download", lambda *a, **k: str(word_file))
    chain = [module.C4QualityFilter(), module.C4ParagraphFilter(), module.C4BadWordsFilter(seed=0)]
    step = c4.make_c4_step(C4(min_paragraphs=3, bad_words=str(word_file)))
    reasons = set()
    for text in [
        *corpus,
        *("\n".join(["Now " + "word " * 50 + "end."] * 5 + [f"It is {w} x."]) for w in ("C++", "wells", "well,")),
    ]:
        document = import_datatrove("data").Document(text=text, id="0")
        verdicts = (datatrove_filter.filter(document) for datatrove_filter in chain)
        failed = next((verdict for verdict in verdicts if verdict is not True), None)
        verdict = step(text)
        if failed is None:
            assert verdict == document.text
        else:
            reason = failed[1] if isinstance(failed, tuple) else "document_removed_with_badwords"
            assert verdict.reason == REASONS.get(reason, "c4: bad word")
        reasons.add(getattr(verdict, "reason", ""))
    assert {"c4: bad word", "c4: too few long paragraphs", ""} <= reasons
