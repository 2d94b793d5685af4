"""Media of the next steps are decoded while a step waits for its own."""

import json
import threading
import time

import numpy as np
import pytest

import batchloom
from batchloom.batches import MediaOptions
from batchloom.batches.media import BatchMedia
from batchloom.batches.media.batch_media import _MemoryBudget
from batchloom.core.errors import MediumError
from media.sample_media import encode_image, make_image, make_messages
from media.test_batches import save_with_template
from waiting import wait_until

SIZES = {"seq_len": 200, "global_batch_size": 1, "output": "numpy"}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Store of twelve documents with one image each, one document per row."""
    folder = tmp_path_factory.mktemp("ahead")
    processor = save_with_template("qwen2_vl", folder / "processor")[2]
    rows = []
    for number in range(12):
        (folder / f"{number}.png").write_bytes(encode_image(make_image(140 + number, 60), "PNG"))
        question = "<image>" + f"Who is number {number}? " * 8
        rows.append({"messages": make_messages(question, "A cat."), "images": [f"{number}.png"]})
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    batchloom.prepare(
        folder / "in.jsonl",
        out=folder / "store",
        tokenizer=str(processor),
        media={"processor": str(processor)},
        val_fraction=0,
    )
    return batchloom.open_store(folder / "store")


@pytest.fixture
def processed_documents(monkeypatch):
    """Documents whose media the threads have started to process, in order."""
    documents, extract = [], BatchMedia._extract_features

    def record_document(media, located):
        documents.append(located[0].medium.document)
        return extract(media, located)

    monkeypatch.setattr(BatchMedia, "_extract_features", record_document)
    return documents


def test_a_row_has_one_image(store):
    loader = batchloom.Loader(store, **SIZES)
    assert len(loader) == 12
    assert all(len(batch["image_grid_thw"]) == 1 for batch in loader)


def test_a_slow_medium_does_not_keep_those_of_coming_steps_waiting(store, monkeypatch):
    loader = batchloom.Loader(store, **SIZES, prefetch=4, media=MediaOptions(workers=2))
    slow_document = int(loader.plan.rows(0, 1).documents[0])
    started_others, extract = threading.Semaphore(0), BatchMedia._extract_features

    def extract_slowly(media, located):
        if located[0].medium.document == slow_document:
            # Wait until the other thread has started on the next three steps.
            for _ in range(3):
                assert started_others.acquire(timeout=60)
        else:
            started_others.release()
        return extract(media, located)

    monkeypatch.setattr(BatchMedia, "_extract_features", extract_slowly)
    batches = {batch.step: dict(batch) for batch in loader}
    monkeypatch.undo()
    assert len(batches) == 12
    serial = batchloom.Loader(store, **SIZES, prefetch=0, media=MediaOptions(workers=1))
    for batch in serial:
        assert batches[batch.step].keys() == batch.keys()
        for name, value in batch.items():
            np.testing.assert_array_equal(batches[batch.step][name], value)


@pytest.mark.parametrize("form", ["rows", "varlen"])
def test_batches_are_those_that_are_asked_for_one_by_one(store, form):
    sizes = {**SIZES, "global_batch_size": 3}
    loader = batchloom.Loader(store, **sizes, prefetch=3, form=form)
    for batch in loader:
        indexed = loader.batch(batch.step)
        assert indexed.keys() == batch.keys()
        for name, value in batch.items():
            np.testing.assert_array_equal(indexed[name], value)


def test_nothing_is_read_ahead_without_prefetch(store, processed_documents):
    batches = iter(batchloom.Loader(store, **SIZES, prefetch=0))
    for count in range(1, 4):
        next(batches)
        assert len(processed_documents) == count


def test_closing_an_iterator_stops_reading_media(store, processed_documents):
    loader = batchloom.Loader(store, **SIZES, prefetch=8, media=MediaOptions(workers=1))
    batches = iter(loader)
    next(batches)
    batches.close()
    wait_until(
        lambda: not any(t.name == "batchloom-producer" for t in threading.enumerate()), "the producer thread ends"
    )
    count = len(processed_documents)
    # Another thread would go on.
    time.sleep(0.1)
    # One medium was being read when the iterator closed.
    assert len(processed_documents) <= count + 1


def test_a_missing_medium_is_reported_after_the_steps_before_it(store):
    loader = batchloom.Loader(store, **SIZES, prefetch=6)
    document = int(loader.plan.rows(3, 4).documents[0])
    path = store.path.parent / f"{document}.png"
    aside = path.rename(path.with_suffix(".aside"))
    steps, before = [], loader.state_at(3)
    try:
        with pytest.raises(MediumError, match=rf"Document {document} of .*, line {document + 1}\)"):
            for batch in loader:
                steps += [batch.step]
    finally:
        aside.rename(path)
    assert steps == [0, 1, 2]
    assert loader.state_dict() == before


def test_a_budget_is_given_back_and_never_waits_for_ever():
    budget = _MemoryBudget(10)
    with budget.reserve(100), budget.reserve(0):
        pass
    with budget.reserve(4), budget.reserve(6):
        pass
    with pytest.raises(RuntimeError, match="broken"), budget.reserve(10):
        raise RuntimeError("broken")
    with budget.reserve(10):
        pass
