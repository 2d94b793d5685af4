"""Quality rules of C4, Gopher and FineWeb: results and reasons of drops."""

import pickle
import time

import pytest
from hypothesis import given, strategies as st

from batchloom import InputError, SettingsError
from batchloom.core.errors import InputMissingError
from batchloom.core.settings import from_plain, to_plain
from batchloom.text import C4, CleanStep, DroppedText, FineWeb, Gopher, Repetition, TextCleaner
from batchloom.text.quality import c4, fineweb, gopher, repetition
from text.quality_texts import EDGES, FIVE, SENTENCE, STEPS, make_gopher_text

NGRAMS = [
    *(repetition.TOP_NGRAM.format(n) for n, _ in Repetition().top_ngrams),
    *(repetition.DUPLICATE_NGRAMS.format(n) for n, _ in Repetition().duplicate_ngrams),
]


def list_reasons(module):
    """Return the drop reasons that a module declares."""
    return {value for value in vars(module).values() if isinstance(value, str) and "{}" not in value}


REASONS = {
    "c4": list_reasons(c4),
    "gopher": list_reasons(gopher),
    "repetition": {*list_reasons(repetition), *NGRAMS},
    "fineweb": list_reasons(fineweb),
}


def get_reason(verdict: str | DroppedText) -> str:
    return verdict.reason if isinstance(verdict, DroppedText) else ""


@pytest.mark.parametrize(("step", "inside", "outside", "why"), EDGES, ids=[e[3] for e in EDGES])
def test_a_limit_is_where_it_is_published(step, inside, outside, why):
    assert get_reason(STEPS[step](inside)) != why
    assert get_reason(STEPS[step](outside)) == why
    assert why in REASONS[step]
    assert STEPS[step](outside).detail


def test_details_hold_the_measured_values():
    assert STEPS["gopher"](make_gopher_text(49)) == DroppedText("gopher: too few words", "49 words, at least 50")
    assert STEPS["repetition"](" ".join(["same thing"] * 9)) == DroppedText(
        "repetition: most frequent 2-gram",
        "'same thing' 9 times, 91.8% of 98 characters, at most 20%",
    )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Too few.", None),
        ("These are three.", "These are three."),
        ("  With space around it.  ", "With space around it."),
        ("No mark at the end", None),
        ("It goes on and on...", None),
        ("Enable JavaScript in your browser.", None),
        ("Read our Privacy Policy before you go on.", None),
        ("As is known[1] it holds[citation needed].", "As is known it holds."),
        (f"Here is {'x' * 1000} too.", f"Here is {'x' * 1000} too."),
        (f"Here is {'x' * 1001} too.", None),
    ],
)
def test_c4_keeps_lines_that_look_like_sentences(line, expected):
    result = STEPS["c4"](f"{FIVE}\n{line}")
    assert result == (FIVE if expected is None else f"{FIVE}\n{expected}")


def test_c4_counts_sentences_of_the_remaining_lines():
    assert STEPS["c4"](" ".join([SENTENCE] * 5)) == " ".join([SENTENCE] * 5)
    result = STEPS["c4"](f"{SENTENCE}\n{SENTENCE}\nmenu\nhome")
    assert result == DroppedText("c4: too few sentences", "2 in 2 lines, at least 5")


def test_optional_rules_of_c4(tmp_path):
    text = "\n".join([f"{'word ' * 50}end."] * 2 + [SENTENCE] * 5)
    assert STEPS["c4"](text) == text
    step = c4.make_c4_step(C4(min_paragraphs=3))
    assert get_reason(step(text)) == "c4: too few long paragraphs"
    assert get_reason(step(f"{text}\n{'word ' * 50}end.")) == ""
    word_file = tmp_path / "bad.txt"
    word_file.write_text("gadzooks\nzounds a lot\n\n", encoding="utf-8")
    step = c4.make_c4_step(C4(bad_words=str(word_file)))
    assert step(f"{FIVE}\nHe said zounds and gadzook.") == f"{FIVE}\nHe said zounds and gadzook."
    for line in ("Gadzooks, he said that.", "It was zounds a lot."):
        assert get_reason(step(f"{FIVE}\n{line}")) == "c4: bad word"


def test_invalid_lists_of_bad_words(tmp_path):
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(InputError, match="holds no words; give one word per line"):
        c4.make_c4_step(C4(bad_words=str(tmp_path / "empty.txt")))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(InputError, match="save it as UTF-8"):
        c4.make_c4_step(C4(bad_words=str(tmp_path / "latin.txt")))
    with pytest.raises(InputMissingError, match=r"bad_words: .*emty.txt does not.*/empty.txt'\?"):
        c4.make_c4_step(C4(bad_words=str(tmp_path / "emty.txt")))
    with pytest.raises(InputError, match="bad_words: .* cannot be read: it is a folder"):
        c4.make_c4_step(C4(bad_words=str(tmp_path)))


def test_limits_that_are_none_are_off():
    gopher_without_limits = Gopher(**dict.fromkeys([name for name in to_plain(Gopher()) if name != "stop_words"]))
    assert gopher.make_gopher_step(gopher_without_limits)("# ... 7") == "# ... 7"
    assert gopher.make_gopher_step(gopher_without_limits)("") == ""
    no_limits = Repetition(
        max_duplicate_paragraphs=None,
        max_duplicate_paragraph_characters=None,
        max_duplicate_lines=None,
        max_duplicate_line_characters=None,
        top_ngrams=(),
        duplicate_ngrams=(),
    )
    assert repetition.make_repetition_step(no_limits)("a a\na a\na a") == "a a\na a\na a"
    fineweb_without_limits = FineWeb(
        min_ended_lines=None, max_short_lines=None, max_duplicate_characters=None, max_newlines=None
    )
    assert fineweb.make_fineweb_step(fineweb_without_limits)("a\na") == "a\na"
    fineweb_sparing_unended = FineWeb(spare_unended=True, max_short_lines=None)
    assert fineweb.make_fineweb_step(fineweb_sparing_unended)("a b c d\n e f g h") == "a b c d\n e f g h"


@pytest.mark.parametrize("settings", [C4(), Gopher(), Repetition(), FineWeb()], ids=lambda s: type(s).__name__)
def test_settings_are_plain_values_and_steps_are_portable(settings):
    assert from_plain(type(settings), to_plain(settings)) == settings
    make = {
        C4: c4.make_c4_step,
        Gopher: gopher.make_gopher_step,
        Repetition: repetition.make_repetition_step,
        FineWeb: fineweb.make_fineweb_step,
    }[type(settings)]
    step = pickle.loads(pickle.dumps(make(settings)))
    assert step(FIVE) == make(settings)(FIVE)


@pytest.mark.parametrize(
    ("settings", "values", "message"),
    [
        (Gopher, {"min_words": -1}, "min_words: -1 is not a whole number from 0 on"),
        (Gopher, {"max_bullet_lines": 1.5}, "max_bullet_lines: 1.5 is not a number from 0 to 1"),
        (Gopher, {"stop_words": ("",)}, "stop_words: .* is not a list of words"),
        (Repetition, {"top_ngrams": ((0, 0.1),)}, "top_ngrams: .* is not a list of"),
        (Repetition, {"duplicate_ngrams": ((5, 2),)}, "duplicate_ngrams: .* is not a list of"),
        (FineWeb, {"short_line": None}, "short_line: None is not a whole number"),
        (FineWeb, {"max_newlines": float("nan")}, "max_newlines: nan is not a finite number"),
        (FineWeb, {"spare_unended": 1}, "spare_unended: 1 is neither True nor False"),
        (C4, {"bad_words": ""}, "bad_words: '' is not the path of a list"),
    ],
)
def test_invalid_settings(settings, values, message):
    with pytest.raises(SettingsError, match=message):
        settings(**values)


PARTS = st.sampled_from(
    [
        *("the", "and", " ", "\n", "\n\n", ".", "...", "…", "#", "•", "-", "don't", "U.S.", "{"),
        *("7", ":-)", "word", "Ω", "語", "\x00", "\u2028", "\ud800", "http://a.b/c", "[1]", '"'),
        *("\t", "x" * 70),
    ]
)
TEXTS = st.one_of(st.text(max_size=200), st.lists(PARTS, max_size=120).map("".join))


@pytest.mark.parametrize("step", STEPS)
@given(text=TEXTS)
def test_any_text_gives_one_text_or_drop(step, text):
    verdict = STEPS[step](text)
    assert isinstance(verdict, str) or verdict.reason in REASONS[step]
    assert STEPS[step](text) == verdict
    if isinstance(verdict, str) and step != "c4":
        assert verdict == text


@given(texts=st.lists(TEXTS | st.sampled_from([text for edge in EDGES for text in edge[1:3] if len(text) < 9000])))
def test_a_text_has_the_same_verdict_in_any_batch(texts):
    for name in ("gopher", "repetition"):
        cleaned = TextCleaner([CleanStep(name)]).clean(texts)
        drops = {position: drop for position, _, drop in cleaned.drops}
        assert [drops.get(at, text) for at, text in enumerate(texts)] == list(map(STEPS[name], texts))
    # The words that the first rule has split serve the second one.
    both = TextCleaner([CleanStep("gopher"), CleanStep("repetition")]).clean(texts)
    assert both.texts == [text for text in texts if text == STEPS["gopher"](text) == STEPS["repetition"](text)]


@given(texts=st.lists(TEXTS, max_size=5))
def test_rules_see_the_words_of_changed_texts(texts):
    steps = [CleanStep("repetition"), CleanStep("whitespace"), CleanStep("control"), CleanStep("repetition")]
    expected = texts
    for step in steps:
        expected = TextCleaner([step]).clean(expected).texts
    assert TextCleaner(steps).clean(texts).texts == expected


HOSTILE = [
    "(",
    "a.",
    ":",
    "x",
    "((a))",
    "@:",
    "a b ",
    "\n",
    "-a",
    "US$",
    "\u0301",
    "。",
    "'",
    "{ ",
    "1.1.",
    "1 11 ",
]


@pytest.mark.parametrize("unit", HOSTILE)
def test_time_grows_with_length_alone(unit):
    seconds = []
    for size in (10_000, 80_000):
        text = (unit * size)[:size]
        start = time.process_time()
        for step in STEPS.values():
            step(text)
        seconds.append(time.process_time() - start)
    # For eight times the text, quadratic time would be 64 times as long.
    assert seconds[1] < 24 * max(seconds[0], 0.02)
