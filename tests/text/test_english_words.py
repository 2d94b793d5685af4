"""English words and sentences."""

import pytest
from hypothesis import given, strategies as st

from batchloom.text import count_sentences, english_words, iter_words
from batchloom.text.english_words import compute_word_statistics, split_segment_words
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


@given(st.lists(st.sampled_from(["a", "ab", "b", "ba", "語", "...", "don't"]), max_size=40))
def test_word_statistics_are_those_of_the_words(words):
    text = " ".join(words)
    split_words, statistics = list(iter_words(text)), compute_word_statistics(text)
    assert statistics.lengths.tolist() == list(map(len, split_words))
    assert statistics.letters.tolist() == [any(map(str.isalpha, word)) for word in split_words]
    by_hash = dict(zip(statistics.hashes.tolist(), split_words, strict=True))
    assert [by_hash[value] for value in statistics.hashes.tolist()] == split_words


def test_a_large_text_is_measured_like_its_parts():
    paragraph = " ".join(make_words(10_000)) + "\n"
    text_statistics, paragraph_statistics = compute_word_statistics(paragraph * 8), compute_word_statistics(paragraph)
    assert text_statistics.hashes.tolist() == paragraph_statistics.hashes.tolist() * 8
    assert len(compute_word_statistics("x" * 1_000_000)) == 1
