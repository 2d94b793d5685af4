"""Files of a store beside its tokens: manifest, tokenizer and sidecars."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import numpy as np
import orjson
from numpy.typing import NDArray

from batchloom.core.errors import StoreError, TokenizerError
from batchloom.core.files import describe_os_error
from batchloom.store.format.layout import TOKENIZER_NAME, compute_checksum
from batchloom.store.format.manifest import Manifest, TokenizerEntry, compute_subset_fingerprint
from batchloom.store.format.media_index import MediaRows, map_media
from batchloom.store.format.shard_columns import read_columns
from batchloom.store.format.shard_sidecars import (
    DocumentFields,
    PairIndex,
    PartTable,
    ProvenanceTable,
    make_part_table,
    map_fields,
    map_pair_index,
    map_provenance,
)
from batchloom.store.read.mapped_shards import ShardTable
from batchloom.tokens import Tokenizer, restore_tokenizer

if TYPE_CHECKING:
    import pyarrow as pa

Ids = NDArray[np.int64]
_RESTORE_REMEDY = "restore it from the original store"


class SubsetFiles:
    """Files of a subset of a local, remote or synthetic store, or of a prefix.

    Attributes:
        name: address of the store without credentials, for messages.
        manifest: the store's manifest; None for a bare prefix.
        split: name of the subset.
        table: shards of the subset; none for synthetic data.
    """

    def __init__(self, name: str, manifest: Manifest | None, split: str, table: ShardTable) -> None:
        self.name = name
        self.manifest = manifest
        self.split = split
        self.table = table

    def _list_shards_with(self, suffix: str) -> list[int]:
        """Return the shards that have a file of this suffix."""
        shards = self.manifest.subsets[self.split].shards if self.manifest else ()
        return [number for number, shard in enumerate(shards) if suffix in shard.checksums]

    @cached_property
    def part_table(self) -> PartTable:
        """Parts of the sources that the manifest lists; none for a bare prefix."""
        return make_part_table(self.manifest.sources if self.manifest else ())

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the subset's content, 32 hex digits."""
        if self.manifest is None:
            raise AssertionError("the reader of a bare prefix computes its own")
        return compute_subset_fingerprint(self.manifest, self.split)

    def _open_file(self, shard: int, suffix: str) -> tuple[Path, memoryview]:
        """Return the path of a file of a shard, for messages, and its content."""
        raise NotImplementedError

    def provenance(self, shard: int, rows: Ids | None = None) -> ProvenanceTable:
        """Read the provenance of rows of a shard, or of all documents if ``rows`` is None."""
        path, view = self._open_file(shard, ".docs")
        provenance = map_provenance(path, view)
        documents = self.table.locations[shard].documents
        if len(provenance) != documents:
            raise StoreError(
                f"{path} has {len(provenance)} documents, the manifest says {documents}. The store is damaged: "
                "run batchloom check on it."
            )
        return self._check_parts(provenance if rows is None else provenance.take(rows))

    def sides(self, shard: int) -> PairIndex:
        """Read the pairs and sides of a shard of a preference store."""
        path, view = self._open_file(shard, ".pairs")
        objective = self.manifest.objective if self.manifest else ""
        return map_pair_index(path, self.table.locations[shard].documents, objective, view)

    def media(self, shard: int) -> MediaRows:
        """Read the media index of a shard that has one."""
        path, view = self._open_file(shard, ".media")
        return map_media(path, self.table.locations[shard].documents, view)

    def fields(self, shard: int) -> DocumentFields:
        """Read the columns that the documents of a shard carry."""
        path, view = self._open_file(shard, ".fields")
        return map_fields(path, self.table.locations[shard].documents, view)

    def columns(self, shard: int, rows: Ids | None = None) -> "pa.Table":
        """Read the columns of rows of a shard that has some, of all if ``rows`` is None."""
        path, view = self._open_file(shard, ".parquet")
        return read_columns(path, view, self.table.locations[shard].documents, rows)

    def blob(self, shard: int, begin: int, size: int) -> bytes:
        """Read bytes of the ``.blobs`` of a shard, fewer at the end of the file."""
        raise NotImplementedError

    def file(self, name: str) -> bytes:
        """Read a small file of the store; raises FileNotFoundError."""
        raise NotImplementedError

    def read_manifest(self, generation: int | None = None) -> Manifest:
        """Read the current manifest of a generation, or of the newest if None.

        Raises as ``open_store``.
        """
        raise NotImplementedError

    def read_tokenizer(self) -> Tokenizer:
        """Read the tokenizer; raises as ``Store.tokenizer``."""
        if self.manifest is None:
            raise StoreError(f"{self.name} is a bare Megatron prefix: it does not say which tokenizer made it.")
        return _load_tokenizer(self.file, self.name, self.manifest.tokenizer)

    def _check_parts(self, provenance: ProvenanceTable) -> ProvenanceTable:
        """Return ``provenance`` after checking that the manifest lists all its parts."""
        if len(provenance) and int(provenance.parts.max()) >= len(self.part_table.records):
            raise StoreError(
                f"{self.name}: a document names a part of its sources that the manifest does not list. The store is "
                "damaged: run batchloom check on it."
            )
        return provenance


# Tokenizers in use by the checksum of their file: a mixture of a thousand stores has one, which takes a second to load.
_LOADED_TOKENIZERS: WeakValueDictionary[str, Tokenizer] = WeakValueDictionary()


def _load_tokenizer(read_file: Callable[[str], bytes], store_name: str, entry: TokenizerEntry) -> Tokenizer:
    """Load the tokenizer of a store and check it against the manifest."""
    path = f"{store_name}/{TOKENIZER_NAME}"
    try:
        data = read_file(TOKENIZER_NAME)
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {describe_os_error(error)}; {_RESTORE_REMEDY}.") from error
    key = compute_checksum(data)
    tokenizer = _LOADED_TOKENIZERS.get(key)
    if tokenizer is None:
        tokenizer = _LOADED_TOKENIZERS[key] = _restore_tokenizer(data, path)
    if (tokenizer.vocab_size, tokenizer.end_id, tokenizer.bos_id) != (entry.vocab_size, entry.end_id, entry.bos_id):
        raise StoreError(
            f"{path} has {tokenizer.vocab_size} ids, end {tokenizer.end_id} and BOS {tokenizer.bos_id}; the "
            f"manifest says {entry.vocab_size}, {entry.end_id} and {entry.bos_id}: it is another tokenizer."
        )
    if tokenizer.fingerprint != entry.fingerprint:
        raise StoreError(
            f"{path} has fingerprint {tokenizer.fingerprint}, the manifest says {entry.fingerprint}: it is another "
            "tokenizer."
        )
    return tokenizer


def _restore_tokenizer(data: bytes, path: str) -> Tokenizer:
    try:
        return restore_tokenizer(orjson.loads(data))
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} cannot be read: {error}; {_RESTORE_REMEDY}.") from error
