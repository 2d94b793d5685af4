"""Media of coming steps are decoded while those of a step are: threads never wait for a step's last medium."""

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
from media.made import encoded, picture, talk
from media.test_batches import saved

SIZES = {"seq_len": 200, "global_batch_size": 1, "output": "numpy"}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Twelve documents of one image each, one to a row."""
    folder = tmp_path_factory.mktemp("ahead")
    processor = saved("qwen2_vl", folder / "processor")[2]
    rows = []
    for number in range(12):
        (folder / f"{number}.png").write_bytes(encoded(picture(140 + number, 60), "PNG"))
        asked = "<image>" + f"Who is number {number}? " * 8
        rows.append({"messages": talk(asked, "A cat."), "images": [f"{number}.png"]})
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
def seen(monkeypatch):
    """The documents whose media threads took up, in order, as they take them up."""
    taken, one = [], BatchMedia._extract_features

    def noted(media, found):
        taken.append(found[0].medium.document)
        return one(media, found)

    monkeypatch.setattr(BatchMedia, "_extract_features", noted)
    return taken


def test_a_row_has_one_image(store):
    loader = batchloom.Loader(store, **SIZES)
    assert len(loader) == 12
    assert all(len(batch["image_grid_thw"]) == 1 for batch in loader)


def test_a_slow_medium_does_not_keep_those_of_coming_steps_waiting(store, monkeypatch):
    loader = batchloom.Loader(store, **SIZES, prefetch=4, media=MediaOptions(workers=2))
    first = int(loader.plan.rows(0, 1).documents[0])
    others, one = threading.Semaphore(0), BatchMedia._extract_features

    def slow(media, found):
        if found[0].medium.document == first:
            # Until the other thread has taken up those of the three steps behind it.
            for _ in range(3):
                assert others.acquire(timeout=60)
        else:
            others.release()
        return one(media, found)

    monkeypatch.setattr(BatchMedia, "_extract_features", slow)
    batches = {batch.step: dict(batch) for batch in loader}
    monkeypatch.undo()
    assert len(batches) == 12
    plain = batchloom.Loader(store, **SIZES, prefetch=0, media=MediaOptions(workers=1))
    for batch in plain:
        assert batches[batch.step].keys() == batch.keys()
        for name, value in batch.items():
            np.testing.assert_array_equal(batches[batch.step][name], value)


@pytest.mark.parametrize("form", ["rows", "varlen"])
def test_batches_are_those_that_are_asked_for_one_by_one(store, form):
    sizes = {**SIZES, "global_batch_size": 3}
    loader = batchloom.Loader(store, **sizes, prefetch=3, form=form)
    for batch in loader:
        again = loader.batch(batch.step)
        assert again.keys() == batch.keys()
        for name, value in batch.items():
            np.testing.assert_array_equal(again[name], value)


def test_nothing_is_read_ahead_where_that_is_not_wanted(store, seen):
    batches = iter(batchloom.Loader(store, **SIZES, prefetch=0))
    for given in range(1, 4):
        next(batches)
        assert len(seen) == given


def test_who_leaves_has_no_more_media_read(store, seen):
    loader = batchloom.Loader(store, **SIZES, prefetch=8, media=MediaOptions(workers=1))
    batches = iter(loader)
    next(batches)
    batches.close()
    deadline = time.monotonic() + 60
    while any(t.name == "batchloom-producer" for t in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    read = len(seen)
    time.sleep(0.3)
    # What was being read then is read.
    assert len(seen) <= read + 1


def test_a_medium_that_is_gone_is_told_behind_the_steps_before_it(store):
    loader = batchloom.Loader(store, **SIZES, prefetch=6)
    document = int(loader.plan.rows(3, 4).documents[0])
    path = store.path.parent / f"{document}.png"
    aside = path.rename(path.with_suffix(".aside"))
    given, before = [], loader.state_at(3)
    try:
        with pytest.raises(MediumError, match=rf"Document {document} of .*, line {document + 1}\)"):
            for batch in loader:
                given += [batch.step]
    finally:
        aside.rename(path)
    assert given == [0, 1, 2]
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
