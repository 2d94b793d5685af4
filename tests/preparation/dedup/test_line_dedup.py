"""Repeated lines and paragraphs, compared with a set in memory."""

import re

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from batchloom import InputError
from batchloom.preparation.dedup import (
    LineDeduplicator,
    hash_segments,
    line_dedup,
    open_key_writer,
    search_duplicates,
)
from batchloom.preparation.dedup.line_dedup import count_segments, remove_segments
from tiers import examples

SEGMENTS = st.sampled_from(["a", "b", " a", "b \t", "", "  ", "　", "c", "é", "a\r"])
TEXTS = st.lists(SEGMENTS, max_size=8).map("\n".join)


def remove_through_files(folder, units, mode, batch_size=2):
    """Remove repeated segments of the texts of units by key files."""
    files = []
    for unit, texts in enumerate(units):
        files.append(folder / f"{unit}.keys")
        number = 0
        with open_key_writer(files[-1]) as add:
            for start in range(0, len(texts), batch_size):
                batch_texts = texts[start : start + batch_size]
                records, number = hash_segments(batch_texts, [unit] * len(batch_texts), number, mode)
                add(records)
    search_duplicates(files, (0, 1), 0, folder / "drops")
    remaining = []
    for unit, texts in enumerate(units):
        removal = LineDeduplicator([folder / "drops"], unit, mode)
        texts_of_unit = []
        for start in range(0, len(texts), batch_size + 1):
            texts_of_unit += removal(texts[start : start + batch_size + 1])
        remaining.append(texts_of_unit)
    return remaining


def remove_in_memory(units, mode):
    seen_segments, remaining = set(), []
    for texts in units:
        remaining.append([])
        for text in texts:
            separator = r"(\n)" if mode == "lines" else r"(\n\s*\n)"
            parts = [*re.split(separator, text), ""]
            kept_segments, has_removed = [], False
            for segment, end in zip(parts[::2], parts[1::2], strict=True):
                if segment.strip() and segment.strip() in seen_segments:
                    has_removed = True
                    is_last_removed = True
                else:
                    kept_segments.append([segment, end])
                    is_last_removed = False
                if segment.strip():
                    seen_segments.add(segment.strip())
            if kept_segments and is_last_removed:
                kept_segments[-1][1] = ""
            text_left = "".join(segment + end for segment, end in kept_segments)
            remaining[-1].append(None if has_removed and not text_left.strip() else text_left)
    return remaining


@settings(max_examples=examples(100))
@given(
    st.lists(st.lists(TEXTS, max_size=5), max_size=3),
    st.sampled_from(["lines", "paragraphs"]),
    st.sampled_from([1, 1 << 22]),
)
def test_remaining_segments_are_those_of_a_set(tmp_path_factory, units, mode, chunk_size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line_dedup, "_CHUNK_NUMBERS", chunk_size)
        remaining = remove_through_files(tmp_path_factory.mktemp("lines"), units, mode)
    assert remaining == remove_in_memory(units, mode)


def test_repeated_lines_are_removed(tmp_path):
    units = [["Menu\nfirst story\nMenu\n", "Menu \n\nsecond story"], ["first story", "", "third"]]
    assert remove_through_files(tmp_path, units, "lines") == [
        ["Menu\nfirst story\n", "\nsecond story"],
        [None, "", "third"],
    ]


def test_repeated_paragraphs_are_removed(tmp_path):
    units = [["Note:\nall is well\n\nStory one", "Note:\nall is well\n \n\nStory two\n\nNote:"]]
    units.append(["Story two\n\nStory one", "Note:\n\nmore"])
    assert remove_through_files(tmp_path, units, "paragraphs") == [
        ["Note:\nall is well\n\nStory one", "Story two\n\nNote:"],
        [None, "more"],
    ]


def test_texts_without_drops_are_the_same_objects():
    texts = ["a\nb", "c\nc"]
    remaining, stop = remove_segments(texts, np.array([3]), 0, "lines")
    assert stop == 4
    assert remaining[0] is texts[0]
    assert remaining[1] == "c"


@pytest.mark.parametrize(
    ("text", "lines", "paragraphs"),
    [("", 1, 1), ("a", 1, 1), ("a\n\nb\n", 4, 2), ("\n\n\na", 4, 2)],
)
def test_segments_are_counted_as_they_are_hashed(text, lines, paragraphs):
    for mode, count in (("lines", lines), ("paragraphs", paragraphs)):
        assert count_segments(text, mode) == count
        assert hash_segments([text], [0], 5, mode)[1] == 5 + count


def test_more_segments_than_can_be_numbered_are_refused():
    with pytest.raises(InputError, match="more than 4,294,967,296 lines, too many to number; split"):
        hash_segments(["a\nb"], [0], 2**32 - 1, "lines")
