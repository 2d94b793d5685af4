"""Texts that a unit has had already are told from the others, and have the length of the first."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from batchloom.preparation import Progress, read_report
from batchloom.preparation.dedup import SeenTexts
from batchloom.store import read_manifest
from preparation.stores import jsonl, make


@given(st.lists(st.lists(st.integers(0, 20), max_size=12), max_size=8), st.integers(0, 15))
def test_each_batch_knows_what_stood_before_it_and_in_it(batches, most):
    seen, known, waiting = SeenTexts(most), {}, []
    for batch in batches:
        digests = [bytes([one]) * 16 for one in batch]
        found = seen.look(digests)
        room = len(known) + len(digests) <= most
        for one, fresh in zip(batch, found.fresh.tolist(), strict=True):
            assert fresh == (one not in known)
            if room:
                known.setdefault(one, 100 + one)
        # One batch is looked at while the one before is tokenized.
        waiting.append((batch, found))
        if len(waiting) == 2:
            check_lengths(seen, *waiting.pop(0))
    for batch, found in waiting:
        check_lengths(seen, batch, found)


def check_lengths(seen, batch, found):
    made = [100 + one for one, fresh in zip(batch, found.fresh.tolist(), strict=True) if fresh]
    lengths = seen.lengths(found, np.array(made, np.uint32))
    assert lengths.tolist() == [100 + one for one in batch]


def test_what_repeats_in_a_unit_is_counted_and_not_tokenized_again(tmp_path):
    documents = [{"text": f"text number {number % 7} of a few"} for number in range(40)]
    names = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for number, path in enumerate(names):
        jsonl(path, [{"text": f"{number} {one['text']}"} for one in documents])
    size = names[0].stat().st_size
    make(names, tmp_path / "all", dedup="none", val_fraction=0.0, unit_bytes=size)
    every = read_manifest(tmp_path / "all").subsets["train"].tokens

    def stop(event):
        if isinstance(event, Progress) and event.phase == "write":
            raise InterruptedError

    out = tmp_path / "out"
    with pytest.raises(InterruptedError):
        make(names, out, listener=stop, val_fraction=0.0, unit_bytes=size)
    (left,) = out.glob(".work/units/*/tokens.train.bin")
    # Seven texts of forty, by a vocabulary whose ids have two bytes.
    assert left.stat().st_size == 2 * every // 2 * 7 // 40
    make(names, out, val_fraction=0.0, unit_bytes=size)
    assert read_manifest(out).subsets["train"].documents == 14
    steps = {one.step: one for one in read_report(out).content.flows}
    assert steps["tokenize"].tokens_out == steps["dedup"].tokens_in == every
    assert steps["dedup"].tokens_out == read_manifest(out).subsets["train"].tokens
    make(names, tmp_path / "plain", val_fraction=0.0, unit_bytes=size)
    assert read_manifest(tmp_path / "plain") == read_manifest(out)
