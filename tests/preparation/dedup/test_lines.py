"""Lines and paragraphs that stood before, against a set in memory."""

import re

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from batchloom import InputError
from batchloom.preparation.dedup import (
    LineDeduplicator,
    hash_segments,
    line_dedup as taking,
    open_key_writer,
    search_duplicates,
)
from batchloom.preparation.dedup.line_dedup import count_segments, remove_segments
from tiers import examples

PIECE = st.sampled_from(["a", "b", " a", "b \t", "", "  ", "　", "c", "é", "a\r"])
TEXT = st.lists(PIECE, max_size=8).map("\n".join)


def through_files(folder, units, pieces, batch=2):
    """What is left of the texts of units, by the way of keys in files."""
    files = []
    for unit, texts in enumerate(units):
        files.append(folder / f"{unit}.keys")
        number = 0
        with open_key_writer(files[-1]) as add:
            for start in range(0, len(texts), batch):
                some = texts[start : start + batch]
                records, number = hash_segments(some, [unit] * len(some), number, pieces)
                add(records)
    search_duplicates(files, (0, 1), 0, folder / "drops")
    left = []
    for unit, texts in enumerate(units):
        removal = LineDeduplicator([folder / "drops"], unit, pieces)
        rest = []
        for start in range(0, len(texts), batch + 1):
            rest += removal(texts[start : start + batch + 1])
        left.append(rest)
    return left


def by_set(units, pieces):
    seen, left = set(), []
    for texts in units:
        left.append([])
        for text in texts:
            parting = r"(\n)" if pieces == "lines" else r"(\n\s*\n)"
            split = [*re.split(parting, text), ""]
            kept, went = [], False
            for piece, end in zip(split[::2], split[1::2], strict=True):
                if piece.strip() and piece.strip() in seen:
                    went = True
                    last_went = True
                else:
                    kept.append([piece, end])
                    last_went = False
                if piece.strip():
                    seen.add(piece.strip())
            if kept and last_went:
                kept[-1][1] = ""
            rest = "".join(piece + end for piece, end in kept)
            left[-1].append(None if went and not rest.strip() else rest)
    return left


@settings(max_examples=examples(100))
@given(
    st.lists(st.lists(TEXT, max_size=5), max_size=3),
    st.sampled_from(["lines", "paragraphs"]),
    st.sampled_from([1, 1 << 22]),
)
def test_what_is_left_is_what_a_set_leaves(tmp_path_factory, units, pieces, stretch):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(taking, "_CHUNK_NUMBERS", stretch)
        left = through_files(tmp_path_factory.mktemp("lines"), units, pieces)
    assert left == by_set(units, pieces)


def test_lines_that_stood_before_go(tmp_path):
    units = [["Menu\nfirst story\nMenu\n", "Menu \n\nsecond story"], ["first story", "", "third"]]
    assert through_files(tmp_path, units, "lines") == [
        ["Menu\nfirst story\n", "\nsecond story"],
        [None, "", "third"],
    ]


def test_paragraphs_that_stood_before_go(tmp_path):
    units = [["Note:\nall is well\n\nStory one", "Note:\nall is well\n \n\nStory two\n\nNote:"]]
    units.append(["Story two\n\nStory one", "Note:\n\nmore"])
    assert through_files(tmp_path, units, "paragraphs") == [
        ["Note:\nall is well\n\nStory one", "Story two\n\nNote:"],
        [None, "more"],
    ]


def test_texts_without_drops_are_the_same_objects():
    texts = ["a\nb", "c\nc"]
    left, stop = remove_segments(texts, np.array([3]), 0, "lines")
    assert stop == 4
    assert left[0] is texts[0]
    assert left[1] == "c"


@pytest.mark.parametrize(
    ("text", "lines", "paragraphs"),
    [("", 1, 1), ("a", 1, 1), ("a\n\nb\n", 4, 2), ("\n\n\na", 4, 2)],
)
def test_pieces_are_counted_as_they_are_keyed(text, lines, paragraphs):
    for pieces, count in (("lines", lines), ("paragraphs", paragraphs)):
        assert count_segments(text, pieces) == count
        assert hash_segments([text], [0], 5, pieces)[1] == 5 + count


def test_more_pieces_than_can_be_numbered_are_refused():
    with pytest.raises(InputError, match="more than 4,294,967,296 lines, too many to number; split"):
        hash_segments(["a\nb"], [0], 2**32 - 1, "lines")
