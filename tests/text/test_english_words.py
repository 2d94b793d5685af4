"""English words, sentences and n-grams; the native library and Python give the same ones."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings, strategies as st

from batchloom.core.native import WORDS_SOURCE, compile_library, find_compiler, load_library
from batchloom.text import count_sentences, english_words, iter_words
from batchloom.text.english_words import split_segment_words
from batchloom.text.words import WordKernel, count_words_in_python, find_excess_in_python
from text.quality_texts import make_words
from tiers import examples


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


# (n, share) pairs: of all n-grams, and of many sizes of which some are exceeded.
EVERY, SOME = ((1, 0.0), (2, 0.0)), ((1, 0.3), (2, 0.2), (3, 0.18), (4, 0.1), (7, 0.05))


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if find_compiler() is None:
        pytest.skip("no C compiler")
    return load_library(compile_library(WORDS_SOURCE, tmp_path_factory.mktemp("words")), WORDS_SOURCE)


@pytest.fixture(scope="module")
def kernel(library):
    return WordKernel(library)


def assert_same(kernel, text):
    assert kernel.count_words(text) == count_words_in_python(text)
    for limits in ((EVERY, ()), ((), EVERY), (SOME, SOME), ((), SOME), ((), ((5, 0.0),))) if text else ():
        assert kernel.find_excess(text, *limits) == find_excess_in_python(text, *limits)


SPACES = [" ", "  ", "\n", "\t", "\x1c", "\x85", "\u00a0", "\u2003", "\u2028", "\u3000", "\u200b", "\ufeff"]
PIECES = st.sampled_from(
    [*SEGMENT_PARTS, *SPACES, "\ud800", "\U000e0001", "\u0558", "x" * 70, "étc.", "語。", "a.b", "J.", "don't.", "\x00"]
)


@given(st.lists(PIECES, max_size=60).map("".join) | st.text(max_size=80))
@settings(max_examples=examples(300))
def test_any_text_has_the_same_words_and_ngrams(kernel, text):
    assert_same(kernel, text)


@given(st.text("ab1.-/'(): A$=~*_\x00\x7f", max_size=12))
@settings(max_examples=examples(300))
def test_any_segment_of_ascii_has_the_same_words(kernel, text):
    assert_same(kernel, text)


@given(st.lists(st.sampled_from(["a", "ab", "b", "ba", "é", "the same beginning", "otherwise", ","]), max_size=60))
def test_repeated_words_have_the_same_ngrams(kernel, words):
    assert_same(kernel, " ".join(words))


def test_words_are_split_at_pythons_white_space(kernel):
    # Every white space is below U+3001, and emoji end below U+1FB00. Of the rest, every 37th character is enough.
    characters = [chr(code) for code in (*range(0x3100), *range(0x3100, 0x110000, 37))]
    assert sum(map(str.isspace, characters)) == sum(chr(code).isspace() for code in range(0x110000))
    for character in filter(str.isspace, characters):
        assert kernel.count_words(f"a{character}b").words == 2
    others = "".join(character for character in characters if not character.isspace())
    assert kernel.count_words(others) == count_words_in_python(others)


def test_kernels_share_the_state_of_the_process_between_threads(library, kernel):
    text = "Hello, world! (one) don't " * 200
    expected = count_words_in_python(text)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(50):
            other = pool.submit(WordKernel, library)
            counts = pool.submit(lambda: [kernel.count_words(text) for _ in range(10)])
            assert counts.result() == [expected] * 10
            assert other.result().count_words(text) == expected


# The limits of words.c, and small ones, which a small text exceeds.
LIMITS = {
    "MOST_SEGMENTS = 1 << 17": "MOST_SEGMENTS = 1 << 9",
    "MOST_SEGMENT_BYTES = 1 << 23": "MOST_SEGMENT_BYTES = 1 << 14",
    "MOST_UNKNOWN = 1 << 12": "MOST_UNKNOWN = 1 << 6",
    "MOST_KEPT_BYTES = 1 << 24": "MOST_KEPT_BYTES = 1 << 15",
}


@pytest.mark.parametrize("are_limits_small", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_large_texts_and_more_segments_than_the_library_keeps(are_limits_small, library, tmp_path):
    kernel, size = WordKernel(library), 150_000
    if are_limits_small:
        code = WORDS_SOURCE.read_text()
        for limit, small_limit in LIMITS.items():
            assert limit in code
            code = code.replace(limit, small_limit)
        source, size = tmp_path / WORDS_SOURCE.name, 600
        source.write_text(code)
        kernel = WordKernel(load_library(compile_library(source, tmp_path), source))
    # Each of the segments has more than one word and is not split by the library.
    text = " ".join(f"{'x' * (number % 7)}{number}km don't" for number in range(size))
    assert kernel.count_words(text) == count_words_in_python(text)
    assert kernel.count_words("x" * 7 * size) == (1, 0, 1, 7 * size)
    assert kernel.count_words("é" * 60 * size) == (1, 0, 1, 60 * size)
    # Memory that is kept, and memory that was released, serve the next text.
    assert kernel.count_words(text) == count_words_in_python(text)


def test_a_large_text_has_the_same_repeated_ngrams(kernel):
    paragraph = " ".join(make_words(10_000)) + "\n"
    excess = kernel.find_excess(paragraph * 8, (), ((10, 0.5),))
    assert excess == find_excess_in_python(paragraph * 8, (), ((10, 0.5),))
    assert excess.characters == 7 * 60_000


def test_the_most_frequent_ngram_is_the_first_one_of_equals(kernel):
    excess = kernel.find_excess("one two, one two. don't x don't x", ((2, 0.1),), ())
    assert (excess.ngram, excess.times, excess.characters) == ("one two", 2, 14)


def test_python_counts_repeats_like_datatrove(kernel):
    words = ["a", "b", "c", "a", "b", "c", "a", "b", "c"]
    assert list(iter_words(" ".join(words))) == words
    # The words of a repeated n-gram are skipped.
    assert kernel.find_excess(" ".join(words), (), ((3, 0.0),)).characters == 6
