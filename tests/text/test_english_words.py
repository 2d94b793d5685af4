"""English words and sentences."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, strategies as st

from batchloom.text import count_sentences, english_words, iter_words, word_statistics
from batchloom.text.english_words import split_segment_words
from text.quality_texts import make_words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("Hello, world!", "Hello | , | world | !"),
        ('("word",', '( | " | word | " | ,'),
        ("don't I'm we'll", "do | n't | I | 'm | we | 'll"),
        ("e.g. the U.S. at 8am.", "e.g. | the | U.S. | at | 8 | am | ."),
        ("see http://a.org/b?c=d.", "see | http://a.org/b?c=d | ."),
        ("mother-in-law 3-4 a/b", "mother | - | in | - | law | 3 | - | 4 | a | / | b"),
        ("wait... what…", "wait | ... | what | …"),
        ("items[:] :-)", "items | [: | ] | :-)"),
        ("10km $5 US$7 50%", "10 | km | $ | 5 | US$ | 7 | 50 | %"),
        ("a\u00a0b\u3000c", "a | b | c"),
    ],
)
def test_words(text, expected):
    assert " | ".join(iter_words(text)) == expected


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("", 0),
        ("no end", 1),
        ("One. Two.", 2),
        ("One! (Two?) Three", 3),
        ("At 3.5 or e.g. here. Then.", 2),
        ('He said. "Why?" Then.', 3),
        ("One.  \t (Two).", 2),
        ("What?!?! Yes...", 2),
    ],
)
def test_sentences(line, count):
    assert count_sentences(line, 99) == count
    assert count_sentences(line, 1) == min(count, 1)


@given(st.text(max_size=300))
def test_words_hold_all_characters(text):
    assert "".join(iter_words(text)) == "".join(text.split())


SEGMENT_PARTS = [
    *"!\"#$%&'()*,:;<=>?[]_`{}.+-/@^|~\\",
    *(
        "word",
        "Word",
        "AB",
        "J",
        "a",
        "8",
        "10km",
        "st2",
        "4a",
        "\xe9",
        "\u042f",
        "\u8a9e",
        "US$",
        "\u2026",
        "\u201d",
        "\xb0C",
    ),
    *(
        "don't",
        "it's",
        "can",
        "not",
        "e.g",
        "a.m",
        ":-)",
        "o.O",
        "http://a.org/b",
        "x_y",
        "n=1",
        "a-b",
        "''",
        "..",
        "2nd",
    ),
]


@given(st.lists(st.sampled_from(SEGMENT_PARTS), min_size=1, max_size=6).map("".join))
def test_cached_affixes_give_the_words_of_the_complete_rules(segment):
    assert split_segment_words(segment) == english_words._split_any_segment(segment)


SPACES = [" ", "  ", "\n", "\t", "\x1c", "\x85", "\u00a0", "\u2003", "\u2028", "\u3000", "\u200b", "\ufeff"]
PIECES = st.sampled_from(
    [*SEGMENT_PARTS, *SPACES, "\ud800", "\U000e0001", "\u0558", "x" * 70, "étc.", "語。", "a.b", "J.", "don't."]
)


@given(st.lists(st.lists(PIECES, max_size=30).map("".join) | st.text(max_size=80), max_size=5))
def test_words_of_a_batch_are_those_of_its_texts(texts):
    words = word_statistics.split_words(texts)
    words_by_text = [list(iter_words(text)) for text in texts]
    split = list(chain.from_iterable(words_by_text))
    assert np.diff(words.bounds).tolist() == list(map(len, words_by_text))
    assert words.lengths.tolist() == list(map(len, split))
    assert words.letters.tolist() == [any(map(str.isalpha, word)) for word in split]
    assert words.symbols.tolist() == list(map(english_words.load_english_set("punctuation").issuperset, split))
    some = list(range(0, len(texts), 2))
    assert words.select(some).lengths.tolist() == [len(word) for at in some for word in words_by_text[at]]


def test_words_are_split_at_pythons_white_space():
    spaces = [character for character in map(chr, range(0x110000)) if character.isspace()]
    others = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000 and not chr(code).isspace()]
    words = word_statistics.split_words([f"a{space}b" for space in spaces] + ["".join(others)])
    assert np.diff(words.bounds[:-1]).tolist() == [2] * len(spaces)
    assert words.lengths[words.bounds[-2] :].tolist() == list(map(len, iter_words("".join(others))))


def test_a_large_text_is_measured_like_its_parts():
    paragraph = " ".join(make_words(10_000)) + "\n"
    words, paragraph_words = word_statistics.split_words([paragraph * 8]), word_statistics.split_words([paragraph])
    assert words.lengths.tolist() == paragraph_words.lengths.tolist() * 8
    assert word_statistics.split_words(["x" * 1_000_000]).lengths.tolist() == [1_000_000]


def test_more_distinct_words_than_are_split_at_once_stay_in_order():
    # Every second segment is two words, so words and segments have different numbers.
    texts = [" ".join(f"{'x' * (number % 7)}{number} don't" for number in range(70_000)), "(one, two)"]
    words = word_statistics.split_words(texts)
    split = [word for text in texts for word in iter_words(text)]
    vocabulary = words.vocabulary.take(words.numbers).to_pylist()
    assert vocabulary == split
    repeats, repeated = words.make_ngrams().find_repeats(1)
    first = {}
    for number, word in enumerate(split[: words.bounds[1]]):
        first.setdefault(word, number)
    assert repeats.tolist() == [number for number, word in enumerate(split[: words.bounds[1]]) if first[word] < number]
    assert sorted({*repeats.tolist(), first["do"], first["n't"]}) == repeated.tolist()
