"""Texts that repeat in a unit are recognized, and have the length of the first."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from batchloom.preparation import Progress, read_report
from batchloom.preparation.units.seen_texts import SeenTexts
from batchloom.store import read_manifest
from preparation.stores import prepare_store, write_jsonl


@given(st.lists(st.lists(st.integers(0, 20), max_size=12), max_size=8), st.integers(0, 15))
def test_each_batch_knows_earlier_texts_and_its_own(batches, max_texts):
    seen_texts, lengths_by_key, unfinished = SeenTexts(max_texts), {}, []
    for batch in batches:
        digests = [bytes([key]) * 16 for key in batch]
        matches = seen_texts.look(digests)
        has_room = len(lengths_by_key) + len(digests) <= max_texts
        for key, is_new in zip(batch, matches.fresh.tolist(), strict=True):
            assert is_new == (key not in lengths_by_key)
            if has_room:
                lengths_by_key.setdefault(key, 100 + key)
        # A batch is looked up while the one before it is tokenized.
        unfinished.append((batch, matches))
        if len(unfinished) == 2:
            check_lengths(seen_texts, *unfinished.pop(0))
    for batch, matches in unfinished:
        check_lengths(seen_texts, batch, matches)


def check_lengths(seen_texts, batch, matches):
    new_lengths = [100 + key for key, is_new in zip(batch, matches.fresh.tolist(), strict=True) if is_new]
    lengths = seen_texts.lengths(matches, np.array(new_lengths, np.uint32))
    assert lengths.tolist() == [100 + key for key in batch]


def test_what_repeats_in_a_unit_is_counted_and_not_tokenized_again(tmp_path):
    documents = [{"text": f"text number {number % 7} of a few"} for number in range(40)]
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for number, path in enumerate(paths):
        write_jsonl(path, [{"text": f"{number} {record['text']}"} for record in documents])
    size = paths[0].stat().st_size
    prepare_store(paths, tmp_path / "all", dedup="none", val_fraction=0.0, unit_bytes=size)
    token_count = read_manifest(tmp_path / "all").subsets["train"].tokens

    def stop(event):
        if isinstance(event, Progress) and event.phase == "write":
            raise InterruptedError

    out = tmp_path / "out"
    with pytest.raises(InterruptedError):
        prepare_store(paths, out, listener=stop, val_fraction=0.0, unit_bytes=size)
    (tokens_file,) = out.glob(".work/units/*/tokens.train.bin")
    # Seven of forty texts are tokenized, with ids of two bytes.
    assert tokens_file.stat().st_size == 2 * token_count // 2 * 7 // 40
    prepare_store(paths, out, val_fraction=0.0, unit_bytes=size)
    assert read_manifest(out).subsets["train"].documents == 14
    steps = {flow.step: flow for flow in read_report(out).content.flows}
    assert steps["tokenize"].tokens_out == steps["dedup"].tokens_in == token_count
    assert steps["dedup"].tokens_out == read_manifest(out).subsets["train"].tokens
    prepare_store(paths, tmp_path / "plain", val_fraction=0.0, unit_bytes=size)
    assert read_manifest(tmp_path / "plain") == read_manifest(out)
