"""``when`` inverts ``explain`` for any mixture, edit and number of ranks."""

import tempfile
from collections import defaultdict

from hypothesis import HealthCheck, given, settings, strategies as st

import batchloom
from batchloom import Edit, Mixture
from batchloom.testing import write_store
from tiers import examples

NAMES = ("a", "b", "c")
DOCUMENTS = st.lists(st.integers(1, 40), min_size=1, max_size=25)


def make_store(folder, lengths):
    return write_store(folder, [[65 + n % 60] * length for n, length in enumerate(lengths)])


@st.composite
def draw_edits(draw, names, *, lanes, sizes, window):
    edits, step, window = [], 0, window or 1
    for _ in range(draw(st.integers(0, 2))):
        step += draw(st.integers(1, 8 // window)) * window
        kind = draw(st.sampled_from(["weights", "skip", "ban", "seq_len", "global_batch_size"]))
        if kind == "seq_len" and lanes > 1:
            kind = "skip"
        value = {
            "weights": {name: draw(st.sampled_from([1, 2, 5])) for name in names[:2]},
            "skip": 2 * window,
            "ban": {name: [size // 2] for name, size in zip(names, sizes, strict=True)},
            "seq_len": 32,
            "global_batch_size": 8,
        }[kind]
        edits.append(Edit(step=step, **{kind: value}))
    return edits


@given(data=st.data())
@settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck))
def test_when_is_the_inverse_of_explain(data):
    draw = data.draw
    lengths = [draw(DOCUMENTS) for _ in range(draw(st.integers(1, 3)))]
    names, lanes = NAMES[: len(lengths)], draw(st.sampled_from([1, 2]))
    window = draw(st.sampled_from([0, 3])) if lanes == 1 else 0
    with tempfile.TemporaryDirectory() as folder:
        stores = {
            name: make_store(f"{folder}/{name}", document_lengths)
            for name, document_lengths in zip(names, lengths, strict=True)
        }
        mixture = Mixture({name: n + 1 for n, name in enumerate(names)}, stores=stores)
        loader = batchloom.Loader(
            mixture,
            seq_len=16,
            global_batch_size=4,
            steps=20,
            pool_size=draw(st.sampled_from([2, 8])),
            packing="none" if window else draw(st.sampled_from(["best_fit", "wrap"])),
            group_by_length=window,
            seed=draw(st.integers(0, 9)),
            lanes=lanes,
            balance=draw(st.booleans()),
            output="numpy",
            rank=0,
            world_size=draw(st.sampled_from([1, 2, 4])),
        )
        sizes = [len(document_lengths) for document_lengths in lengths]
        for edit in draw(draw_edits(names, lanes=lanes, sizes=sizes, window=window)):
            loader.edit(edit)
        explained = defaultdict(set)
        for step in range(20):
            for row in batchloom.explain(loader, step):
                for span in row.spans:
                    explained[span.source, span.document].add((step, row.row, row.rank, row.position, span.banned))
        for name, document_lengths in zip(names, lengths, strict=True):
            for document in range(len(document_lengths)):
                occurrences = batchloom.when(loader, source=name, document=document)
                positions = {(s.step, s.row, s.rank, s.position, s.banned) for s in occurrences}
                assert positions == explained[name, document]
                assert len(positions) == len(occurrences)


@given(world_size=st.sampled_from([1, 2, 4]), balance=st.booleans(), step=st.integers(0, 9))
@settings(max_examples=examples(20), deadline=None, suppress_health_check=list(HealthCheck))
def test_explain_describes_the_batches_of_a_rank(world_size, balance, step):
    with tempfile.TemporaryDirectory() as folder:
        store = make_store(f"{folder}/a", [3, 30, 9, 14, 2, 7, 21, 5, 16, 11] * 3)
        for rank in range(world_size):
            loader = batchloom.Loader(
                store,
                seq_len=16,
                global_batch_size=4,
                steps=10,
                balance=balance,
                output="numpy",
                rank=rank,
                world_size=world_size,
            )
            batch = loader.batch(step)
            rows = batchloom.explain(loader, step, rank=rank)
            assert [row.rank_row for row in rows] == list(range(4 // world_size))
            for row, ids in zip(rows, batch["input_ids"], strict=True):
                for span in row.spans:
                    served = ids[span.place : span.place + span.stop - span.start]
                    assert (served == store[span.document].ids[span.start : span.stop]).all()
                assert row.padding == 16 - sum(span.stop - span.start for span in row.spans)
            trained = sum(span.trained for row in rows for span in row.spans)
            assert trained == (batch["labels"] != -100).sum()
