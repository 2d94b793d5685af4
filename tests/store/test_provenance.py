"""Which documents a record became, by looking at a few of them."""

import pytest

from batchloom import StoreError, open_store
from batchloom.store import compact_store, find_documents, remove_documents
from batchloom.testing import append_documents, write_store


@pytest.mark.parametrize("compacted", [False, True])
def test_every_document_is_found_by_its_record(tmp_path, compacted):
    store = write_store(tmp_path / "s", [[n % 250, 256] for n in range(700)], documents_per_shard=70)
    append_documents(store.path, [[n % 250, 256] for n in range(100)])
    if compacted:
        (tmp_path / "gone").write_text("train:3\ntrain:720\n")
        remove_documents(store.path, documents_file=tmp_path / "gone")
        compact_store(store.path)
    store = open_store(store.path)
    found = [store.provenance.of(number) for number in range(len(store))]
    for number, origin in enumerate(found):
        alike = [n for n, one in enumerate(found) if (one.source, one.record) == (origin.source, origin.record)]
        assert number in alike
        assert find_documents(store, origin.source, origin.record) == alike


@pytest.mark.parametrize("part", [1, 1 << 24, (1 << 32) - 1])
def test_a_part_that_no_source_has_is_damage_and_no_answer(tmp_path, part):
    store = write_store(tmp_path / "s", [[n % 250, 256] for n in range(100)])
    origin = store.provenance.of(70)
    path = next(tmp_path.glob("s/train/*.docs"))
    data = bytearray(path.read_bytes())
    for document in range(len(store)):
        # Behind a header of 32 bytes; see docs/format.md.
        at = 32 + 32 * len(store) + 4 * document
        data[at : at + 4] = part.to_bytes(4, "little")
    path.write_bytes(data)
    store = open_store(store.path)
    for ask in (
        lambda: find_documents(store, origin.source, origin.record),
        lambda: store.provenance.of(3),
    ):
        with pytest.raises(StoreError, match="names a part of its sources that the manifest does"):
            ask()


def test_a_record_that_its_part_does_not_have_is_damage_and_no_answer(tmp_path):
    store = write_store(tmp_path / "s", [[n % 250, 256] for n in range(100)])
    assert store.provenance.of(70).record == 70
    path = next(tmp_path.glob("s/train/*.docs"))
    data = bytearray(path.read_bytes())
    # Behind a header of 32 bytes and the hashes; see docs/format.md.
    at = 32 + 16 * len(store) + 8 * 70
    data[at : at + 8] = (1 << 40).to_bytes(8, "little")
    path.write_bytes(data)
    store = open_store(store.path)
    assert store.provenance.of(69).record == 69
    with pytest.raises(StoreError, match=r"names record 1,099,511,627,776 of a part of given .* 100"):
        store.provenance.of(70)
