"""Small finished stores made of token ids, for tests."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import xxhash
from msgspec.structs import replace
from numpy.typing import NDArray

from batchloom.core.errors import InputError
from batchloom.core.fingerprint import encode_canonical
from batchloom.core.loss_weights import LossFlags
from batchloom.store import (
    MANIFEST_NAME,
    WORK_NAME,
    Manifest,
    PartEntry,
    ShardEntry,
    Store,
    add_generation,
    encode_manifest,
    extend_manifest,
    open_store,
    read_manifest,
    write_file,
)
from batchloom.store.format import (
    FORMAT_VERSION,
    TOKEN_DTYPES,
    TOKENIZER_NAME,
    ProvenanceTable,
    SourceEntry,
    StoreCounts,
    SubsetEntry,
    choose_token_dtype,
    format_shard_name,
    make_tokenizer_entry,
    seal_manifest,
)
from batchloom.store.maintain import next_part_number, next_shard_numbers
from batchloom.store.write import LengthsWriter, ShardWriter, make_folder
from batchloom.tokens import Tokenizer, resolve_tokenizer

DocumentIds = Sequence[Sequence[int]]
DocumentWeights = Sequence[Sequence[float]]


def write_store(
    folder: str | os.PathLike[str],
    documents: DocumentIds | Mapping[str, DocumentIds],
    *,
    tokenizer: str = "bytes",
    dtype: str = "auto",
    documents_per_shard: int = 1000,
    trained: DocumentWeights | Mapping[str, DocumentWeights] | None = None,
) -> Store:
    """Write a finished store whose documents are exactly these ids, and open it.

    Args:
        folder: folder of the store; created if missing.
        documents: token ids of each document, for ``train`` or for each subset by name.
        tokenizer: spec of the store's tokenizer.
        dtype: ``auto``, ``uint16`` or ``int32``.
        documents_per_shard: number of documents per shard.
        trained: in the form of ``documents``, 1 or the loss weight of each trained token, and 0 for others;
            None if all are trained with weight 1.

    Raises:
        InputError: an id does not fit into the store's dtype.
    """
    store_path = Path(folder)
    resolved_tokenizer = resolve_tokenizer(tokenizer)
    name = choose_token_dtype(dtype, resolved_tokenizer.vocab_size)
    entries = _write_subsets(store_path, documents, trained, documents_per_shard, name)
    write_file(store_path / TOKENIZER_NAME, encode_canonical(resolved_tokenizer.state()))
    write_file(
        store_path / MANIFEST_NAME,
        encode_manifest(seal_manifest(_make_manifest(resolved_tokenizer, name, entries))),
    )
    return open_store(store_path, next(iter(entries)))


def append_documents(
    folder: str | os.PathLike[str],
    documents: DocumentIds | Mapping[str, DocumentIds],
    *,
    documents_per_shard: int = 1000,
    trained: DocumentWeights | Mapping[str, DocumentWeights] | None = None,
    source: str = "appended",
) -> Store:
    """Append documents of exactly these ids as a store's next generation, and open it.

    Args:
        folder: folder of the store.
        documents: as :func:`write_store` takes them.
        documents_per_shard: number of documents per shard.
        trained: as :func:`write_store` takes it.
        source: name of the documents' source.
    """
    store_path = Path(folder)
    base = read_manifest(store_path)
    staged = store_path / WORK_NAME / "store"
    entries = _write_subsets(staged, documents, trained, documents_per_shard, base.dtype, base)
    added_manifest = _make_manifest(open_store(store_path, next(iter(base.subsets))).tokenizer, base.dtype, entries)
    added_manifest = replace(added_manifest, sources=(replace(added_manifest.sources[0], name=source),))
    add_generation(store_path, extend_manifest(base, added_manifest), staged=staged)
    shutil.rmtree(staged.parent)
    return open_store(store_path, next(iter(entries)))


def _write_subsets(
    folder: Path,
    documents: DocumentIds | Mapping[str, DocumentIds],
    trained: DocumentWeights | Mapping[str, DocumentWeights] | None,
    per_shard: int,
    dtype: str,
    base: Manifest | None = None,
) -> dict[str, SubsetEntry]:
    """Write the shards of a first generation, or of the one after ``base``."""
    subsets = documents if isinstance(documents, Mapping) else {"train": documents}
    masks = trained if isinstance(trained, Mapping) else {"train": trained}
    first_shards, part = (next_shard_numbers(base), next_part_number(base)) if base else ({}, 0)
    entries: dict[str, SubsetEntry] = {}
    record = 0
    for subset, subset_documents in subsets.items():
        _check_ids_fit(subset_documents, dtype)
        make_folder(folder / subset)
        lengths = LengthsWriter(folder / subset, base.generation + 1 if base else 1)
        shards: list[ShardEntry] = []
        mask = masks.get(subset)
        for start in range(0, len(subset_documents), per_shard):
            shard_documents = [np.array(ids, np.int64) for ids in subset_documents[start : start + per_shard]]
            name = format_shard_name(first_shards.get(subset, 0) + len(shards))
            writer = ShardWriter(folder / subset / name, TOKEN_DTYPES[dtype])
            ids = np.concatenate(shard_documents)
            flags = LossFlags.all_trained(ids.size)
            if mask is not None:
                weights = [np.array(document_weights, float) for document_weights in mask[start : start + per_shard]]
                flags = LossFlags.from_weights(np.concatenate(weights))
            writer.append(ids, flags)
            sizes = np.array([len(ids) for ids in shard_documents], np.uint32)
            shards.append(writer.finish(sizes, _make_provenance(shard_documents, record + start, part)))
            lengths.append(sizes)
        checksum, sums_checksum = lengths.finish()
        entries[subset] = SubsetEntry(
            documents=len(subset_documents),
            tokens=sum(shard.tokens for shard in shards),
            lengths=checksum,
            shards=tuple(shards),
            sums=sums_checksum,
        )
        record += len(subset_documents)
    return entries


def _check_ids_fit(documents: DocumentIds, dtype: str) -> None:
    """Reject ids that would wrap around in the files."""
    largest = np.iinfo(dtype).max
    for document in documents:
        ids = np.array(document, np.int64)
        unstorable = ids[(ids < 0) | (ids > largest)]
        if len(unstorable):
            raise InputError(
                f"The id {unstorable[0]} does not fit into {dtype}, which holds 0 to {largest:,}. Give "
                "write_store(dtype='int32'), or a tokenizer with a larger vocabulary."
            )


def _make_provenance(documents: list[NDArray[np.int64]], first: int, part: int) -> ProvenanceTable:
    hashes = [xxhash.xxh3_128_intdigest(ids.tobytes()) for ids in documents]
    halves = [(h & 0xFFFFFFFFFFFFFFFF, h >> 64) for h in hashes]
    records = np.arange(first, first + len(documents), dtype=np.uint64)
    return ProvenanceTable(np.array(halves, np.uint64), records, records, np.full(len(documents), part, np.uint32))


def _make_manifest(tokenizer: Tokenizer, dtype: str, subsets: dict[str, SubsetEntry]) -> Manifest:
    documents = sum(entry.documents for entry in subsets.values())
    tokens = sum(entry.tokens for entry in subsets.values())
    return Manifest(
        format_version=FORMAT_VERSION,
        generation=1,
        dtype=dtype,
        tokenizer=make_tokenizer_entry(tokenizer),
        recipe={},
        recipe_fingerprint="",
        counts=StoreCounts(records=documents, documents=documents, tokens=tokens, quarantined=0, dropped={}),
        subsets=subsets,
        subset_overrides={},
        sources=(
            SourceEntry(
                name="given",
                kind="jsonl",
                bytes=tokens,
                hash="",
                documents=documents,
                tokens=tokens,
                bos="present",
                end="present",
                parts=(PartEntry(0, tokens, documents),),
            ),
        ),
    )
