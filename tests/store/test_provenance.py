"""Lookup of the documents of a record by their provenance."""

import pytest

from batchloom import StoreError, open_store
from batchloom.store import compact_store, find_documents, remove_documents
from batchloom.testing import append_documents, write_store
from store.test_damaged_stores import seal_sidecars


@pytest.mark.parametrize("compacted", [False, True])
def test_every_document_is_found_by_its_record(tmp_path, compacted):
    store = write_store(tmp_path / "s", [[n % 250, 256] for n in range(140)], documents_per_shard=14)
    append_documents(store.path, [[n % 250, 256] for n in range(20)])
    if compacted:
        (tmp_path / "gone").write_text("train:3\ntrain:144\n")
        remove_documents(store.path, documents_file=tmp_path / "gone")
        compact_store(store.path)
    store = open_store(store.path)
    provenances = [store.provenance.of(number) for number in range(len(store))]
    for number, provenance in enumerate(provenances):
        expected = [
            n
            for n, candidate in enumerate(provenances)
            if (candidate.source, candidate.record) == (provenance.source, provenance.record)
        ]
        assert number in expected
        assert find_documents(store, provenance.source, provenance.record) == expected


@pytest.mark.parametrize("part", [1, 1 << 24, (1 << 32) - 1])
def test_a_part_outside_of_the_sources_is_damage(tmp_path, part):
    store = write_store(tmp_path / "s", [[n % 250, 256] for n in range(100)])
    provenance = store.provenance.of(70)
    path = next(tmp_path.glob("s/train/*.docs"))
    data = bytearray(path.read_bytes())
    for document in range(len(store)):
        # The column follows a header of 32 bytes; see docs/reference/format.md.
        offset = 32 + 32 * len(store) + 4 * document
        data[offset : offset + 4] = part.to_bytes(4, "little")
    path.write_bytes(data)
    seal_sidecars(store.path)
    store = open_store(store.path)
    for look_up in (
        lambda: find_documents(store, provenance.source, provenance.record),
        lambda: store.provenance.of(3),
    ):
        with pytest.raises(StoreError, match="names a part of its sources that the manifest does"):
            look_up()


def test_a_record_outside_of_its_part_is_damage(tmp_path):
    store = write_store(tmp_path / "s", [[n % 250, 256] for n in range(100)])
    assert (store.provenance.of(70).record, store.provenance.of(70).line) == (70, 71)
    path = next(tmp_path.glob("s/train/*.docs"))
    data = bytearray(path.read_bytes())
    # The column follows a header of 32 bytes and the hashes; see docs/reference/format.md.
    offset = 32 + 16 * len(store) + 8 * 70
    data[offset : offset + 8] = (1 << 40).to_bytes(8, "little")
    path.write_bytes(data)
    seal_sidecars(store.path)
    store = open_store(store.path)
    assert store.provenance.of(69).record == 69
    with pytest.raises(StoreError, match=r"names record 1,099,511,627,776 of a part of given .* 100"):
        store.provenance.of(70)
