"""Which documents a record became, by looking at a few of them."""

import pytest

from batchloom import open_store
from batchloom.store.compact import compact_store
from batchloom.store.remove import remove_documents
from batchloom.store.whence import documents_of
from batchloom.testing.stores import append_documents, write_store


@pytest.mark.parametrize("compacted", [False, True])
def test_every_document_is_found_by_its_record(tmp_path, compacted):
    store = write_store(
        tmp_path / "s", [[n % 250, 256] for n in range(700)], documents_per_shard=70
    )
    append_documents(store.path, [[n % 250, 256] for n in range(100)])
    if compacted:
        (tmp_path / "gone").write_text("train:3\ntrain:720\n")
        remove_documents(store.path, documents_file=tmp_path / "gone")
        compact_store(store.path)
    store = open_store(store.path)
    found = [store.origin(number) for number in range(len(store))]
    for number, origin in enumerate(found):
        alike = [
            n
            for n, one in enumerate(found)
            if (one.source, one.record) == (origin.source, origin.record)
        ]
        assert number in alike
        assert documents_of(store, origin.source, origin.record) == alike
