"""Token datasets of pretraining scripts: windows of shards, and Megatron prefixes."""

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from batchloom.batches import IGNORE_INDEX, find_world
from batchloom.batches.loading import check_next_token_objective
from batchloom.compat.script_arguments import as_asked, check_output, tokenizer_of
from batchloom.core.errors import InputError, InputMissingError, SettingsError
from batchloom.core.fingerprint import derive_key
from batchloom.core.settings import as_int, check_index, quote_value, raise_problems, suggest
from batchloom.plan import Permutation
from batchloom.store import MANIFEST_NAME, Store, map_file, open_store
from batchloom.store.format import make_missing_store_error, map_index
from batchloom.store.read import map_prefix, refuse_media, refuse_standalone_shard

SPLITS = {"train": "train", **dict.fromkeys(("val", "valid", "validation", "dev", "eval"), "val")}
_BLOCK_SIZE = ("block_size", "seq_len", "max_seq_length", "context_length")
_DTYPES = ("uint16", "uint32", "int32")
_VAL_FRACTION = 0.1

_LOG = logging.getLogger("batchloom")
Tokens = NDArray[Any]


@final
class GPTDataLoader:
    """Batches of token windows over a text, or over a folder of shards.

    A window is ``block_size`` tokens and the targets that follow them. The windows of an epoch
    do not overlap, and the seed permutes them: every position is a target once.
    Fewer than ``block_size`` positions at the two ends are in no window; they differ
    in each epoch. Rank and world size are found as by ``batchloom.Loader``; ranks share an epoch.

    Args:
        config: an object or a mapping with ``block_size`` (or ``seq_len``, ``max_seq_length``,
            ``context_length``) and ``batch_size``. Optional are ``seed`` (0), ``val_fraction`` (0.1; the end of
            data without a val split), ``dtype`` of shards without an index (``uint32``) and ``output``
            (``torch`` or ``numpy``). All other settings are ignored.
        tokenizer: see :func:`batchloom.compat.script_arguments.tokenizer_of`; None with a store or shards
            to skip the check of ids against a vocabulary.
        dataset_dir: a store; or a folder of ``shard_00000.bin`` ... or ``train.bin`` and ``val.bin``,
            headerless, also in ``train/`` and ``val/``.

    Raises:
        SettingsError: settings are missing or invalid.
        StoreMissingError: ``No training shards found`` in the folder.
        StoreError: the shards are damaged.
        InputError: a store or its shards have untrained tokens or another objective.
    """

    def __init__(
        self,
        config: Any,
        tokenizer: Any = None,
        dataset_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        settings = _Settings(config)
        self.block_size = settings.block_size
        self.batch_size = settings.batch_size
        self._settings = settings
        check_output(settings.output)
        self._rank, self._world_size = find_world()
        self._tokenizer = None if tokenizer is None else tokenizer_of(tokenizer)
        self._lines: dict[str, _Line] = {}
        self._steps: dict[str, int] = {}
        self._orders: dict[str, tuple[int, Permutation]] = {}
        if dataset_dir is not None:
            self._set_splits(_open_folder(Path(dataset_dir), settings.dtype))

    def prepare_data(self, text: str) -> dict[str, int]:
        """Use a text as the data; its last ``val_fraction`` is ``val``.

        Returns:
            Number of tokens of each split.

        Raises:
            InputError: there is no tokenizer.
            SettingsError: ``text`` is not a string.
        """
        if not hasattr(text, "encode"):
            raise_problems([f"text: {quote_value(text)} is not a text; give one str"])
        if self._tokenizer is None:
            raise InputError("prepare_data needs a tokenizer: GPTDataLoader(config, tokenizer).")
        self._set_splits({"train": [self._tokenizer.encode_batch([text])[0]]})
        return {split: line.size for split, line in self._lines.items()}

    def _set_splits(self, arrays_by_split: Mapping[str, Sequence[Tokens]]) -> None:
        train = _Line(arrays_by_split["train"])
        train_size = train.size - int(train.size * self._settings.val_fraction)
        if "val" in arrays_by_split:
            self._lines = {"train": train, "val": _Line(arrays_by_split["val"])}
        else:
            self._lines = {
                "train": train.part(0, train_size),
                "val": train.part(train_size, train.size),
            }
        self._steps = {}
        self._orders = {}

    def batches_per_epoch(self, split: str = "train") -> int:
        """Return the number of this rank's batches per epoch, rounded up."""
        line = self._line(split)
        return -(-line.windows(self.block_size) // (self.batch_size * self._world_size))

    def get_batch(self, split: str) -> tuple[Any, Any]:
        """Return the next batch ``(x, y)`` of a split, int64 [batch_size, block_size].

        ``y`` is ``x`` shifted by one token.

        Raises:
            InputError: there is no data yet, the split is too short, or an id is not in the vocabulary.
        """
        line = self._line(split)
        name = SPLITS[split]
        step = self._steps.get(name, 0)
        first = (step * self._world_size + self._rank) * self.batch_size
        rows = [self._window(name, line, n) for n in range(first, first + self.batch_size)]
        ids = np.stack(rows).astype(np.int64)
        self._refuse_foreign(ids)
        self._steps[name] = step + 1
        pair = {"x": ids[:, :-1].copy(), "y": ids[:, 1:].copy()}
        batch = as_asked(pair, self._settings.output)
        return batch["x"], batch["y"]

    def _window(self, name: str, line: "_Line", number: int) -> Tokens:
        count = line.windows(self.block_size)
        size = self.block_size
        seed = self._settings.seed
        epoch, window_index = divmod(number, count)
        cached_epoch, order = self._orders.get(name, (-1, None))
        if order is None or cached_epoch != epoch:
            order = Permutation(count, derive_key(seed, "windows", name, epoch))
            self._orders[name] = epoch, order
        max_offset = (line.size - 1) % size
        offset = derive_key(seed, "offset", name, epoch)[0] % (max_offset + 1)
        start = offset + size * int(order.at(np.array([window_index]))[0])
        return line.take(start, start + size + 1)

    def _line(self, split: str) -> "_Line":
        if not isinstance(split, str) or split not in SPLITS:
            hint = suggest(str(split), SPLITS)
            raise_problems([f"split: {quote_value(split)} is not one of train, val{hint}"])
        line = self._lines.get(SPLITS[split])
        if line is None:
            raise InputError("There is no data yet: call prepare_data(text), or give GPTDataLoader a dataset_dir.")
        if line.size <= self.block_size:
            raise InputError(
                f"{split} has {line.size:,} tokens, and block_size {self.block_size} needs {self.block_size + 1}; "
                "give more data, a larger val_fraction, or a smaller block_size."
            )
        return line

    def _refuse_foreign(self, ids: Tokens) -> None:
        if self._tokenizer is None:
            return
        worst = int(ids.max()) if ids.min() >= 0 else int(ids.min())
        if not 0 <= worst < self._tokenizer.vocab_size:
            raise InputError(
                f"The data holds token id {worst}; tokenizer {self._tokenizer.name!r} has ids 0 to "
                f"{self._tokenizer.vocab_size - 1}: another tokenizer made them, or they are not "
                f"{self._settings.dtype} (config.dtype)."
            )


@final
class _Settings:
    def __init__(self, config: Any) -> None:
        read = config.get if isinstance(config, Mapping) else partial(getattr, config)
        block = next((name for name in _BLOCK_SIZE if read(name, None) is not None), _BLOCK_SIZE[0])
        self.block_size = as_int(read(block, None)) or 0
        self.batch_size = as_int(read("batch_size", None)) or 0
        dtype = read("dtype", "uint32")
        self.seed = read("seed", 0)
        self.val_fraction = read("val_fraction", _VAL_FRACTION)
        self.dtype = ""
        with suppress(TypeError):
            # Shards are read as little-endian on any machine.
            self.dtype = np.dtype(dtype).name if np.dtype(dtype).newbyteorder("<") == np.dtype(dtype) else ""
        self.output = read("output", "torch")
        problems = [
            f"config.{name}: missing"
            if read(name, None) is None
            else f"config.{name}: {quote_value(read(name, None))} is not a whole number above 0"
            for name, value in ((block, self.block_size), ("batch_size", self.batch_size))
            if value < 1
        ]
        if as_int(self.seed) is None:
            problems.append(f"config.seed: {quote_value(self.seed)} is not a whole number")
        if not isinstance(self.val_fraction, int | float) or not 0 <= self.val_fraction < 1:
            problems.append(f"config.val_fraction: {quote_value(self.val_fraction)} is not in [0, 1)")
        if self.dtype not in _DTYPES:
            problems.append(f"config.dtype: {quote_value(dtype)} is not one of {', '.join(_DTYPES)}")
        raise_problems(problems)


@final
class _Line:
    """Concatenation of token arrays without a copy."""

    def __init__(self, arrays: Sequence[Tokens]) -> None:
        self._arrays = [array for array in arrays if array.size]
        self._ends = np.cumsum([array.size for array in self._arrays], dtype=np.int64)
        self.size = int(self._ends[-1]) if self._arrays else 0

    def windows(self, size: int) -> int:
        return (self.size - 1) // size

    def part(self, start: int, stop: int) -> "_Line":
        return _Line(self._views(start, stop))

    def take(self, start: int, stop: int) -> Tokens:
        return np.concatenate(self._views(start, stop))

    def _views(self, start: int, stop: int) -> list[Tokens]:
        views = []
        first = int(np.searchsorted(self._ends, start, side="right"))
        for number in range(first, len(self._arrays)):
            array = self._arrays[number]
            begin = int(self._ends[number]) - array.size
            if begin >= stop:
                break
            views.append(array[max(start - begin, 0) : stop - begin])
        return views


def _open_folder(folder: Path, dtype: str) -> dict[str, list[Tokens]]:
    """Return the tokens of a store, or of a folder of headerless shards, by split."""
    if (folder / MANIFEST_NAME).is_file() and any(folder.glob("*/shard_*.idx")):
        train = open_store(folder)
        stores = [train, *([open_store(folder, "val")] if "val" in train.subsets else [])]
        check_next_token_objective(train)
        refuse_media(train.manifest, train.location.name, "GPTDataLoader")
        if any(store.masked or store.reader.weighted for store in stores):
            raise _masked_tokens_error(folder)
        if train.contents.synthetic:
            _LOG.warning("source=synthetic: the documents of %s are generated.", folder)
        return {store.split: [_read_indexed_shard(stem) for stem in store.shards.stems] for store in stores}
    paths = {}
    for split in ("train", "val"):
        file = folder / f"{split}.bin"
        paths[split] = [file] if file.is_file() else sorted((folder / split).glob("shard_*.bin"))
    paths["train"] = paths["train"] or sorted(folder.glob("shard_*.bin"))
    if not paths["train"]:
        raise make_missing_store_error(folder)
    return {split: [_read_shard(path, dtype) for path in files] for split, files in paths.items() if files}


def _read_shard(path: Path, dtype: str) -> Tokens:
    """Return the ids of a shard: by its index, or without one all bytes as ``dtype``."""
    stem = path.with_suffix("")
    # A store's shard has its own dtype, so its bytes must not be read as another one.
    if any(path.with_suffix(ending).exists() for ending in (".idx", ".docs")):
        refuse_standalone_shard(stem)
        return _read_indexed_shard(stem)
    view = map_file(path)
    item = np.dtype(dtype).newbyteorder("<")
    if not len(view):
        raise InputMissingError(f"{path} is empty: it has 0 bytes; write it again, or remove it.")
    if len(view) % item.itemsize:
        raise InputError(
            f"{path} has {len(view):,} bytes, not a multiple of the {item.itemsize} of {dtype}: it is truncated, or "
            "has another config.dtype."
        )
    return np.frombuffer(view, item)


def _read_indexed_shard(stem: Path) -> Tokens:
    """Return the ids of a shard with an index and without a mask."""
    if any(stem.with_name(stem.name + suffix).exists() for suffix in (".mask", ".weights")):
        raise _masked_tokens_error(stem)
    return map_prefix(stem)[0].tokens


def _masked_tokens_error(path: Path) -> InputError:
    return InputError(
        f"{path} holds documents with tokens that are not trained or weighted, which a window (x, y) cannot express; "
        "use batchloom.Loader, whose labels mark them."
    )


@final
class IndexedDataset:
    """Sequences of a Megatron prefix, or documents of a store, by number.

    Args:
        prefix: ``path/name`` of any ``name.bin``/``name.idx`` pair, or a store's folder.
        split: ``train``, ``val`` or ``test``; only for a store.

    Attributes:
        sequence_lengths: tokens of each sequence, int32 [S]; also called ``sizes``.
        document_indices: first sequence of each document, and S at the end, int64 [D + 1].

    Raises:
        StoreMissingError: there is nothing at ``prefix``.
        StoreError: the data is damaged.
    """

    def __init__(self, prefix: str | os.PathLike[str], split: str = "train") -> None:
        # open_store checks the complete index, documents and sequences.
        self._load_store(open_store(prefix, split))

    def _load_store(self, store: Store) -> None:
        self._store = store
        if self._store.manifest is None:
            path = self._store.path
            index = map_index(path.with_name(path.name + ".idx"))
            self.sequence_lengths = index.lengths
            self.document_indices = index.documents
        else:
            self.sequence_lengths = self._store.lengths.slice(0, len(self._store)).view("<i4")
            self.document_indices = np.arange(len(self._store) + 1)

    def __getstate__(self) -> Store:
        # An unpickled store has the same generation, and maps the files again.
        return self._store

    def __setstate__(self, store: Store) -> None:
        self._load_store(store)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    @property
    def sizes(self) -> NDArray[np.int32]:
        """``sequence_lengths`` by its older name."""
        return self.sequence_lengths

    def __getitem__(self, number: Any) -> Any:
        """Return the ids of a sequence, read-only and in their dtype on disk.

        For a slice, return a list of them.

        Raises:
            IndexError: the sequence does not exist.
        """
        if isinstance(number, slice):
            return [self.get(n) for n in range(*number.indices(len(self)))]
        return self.get(number)

    def get(self, number: int, offset: int = 0, length: int | None = None) -> Tokens:
        """Return ``length`` ids of a sequence from ``offset`` on; None for all the rest.

        Raises:
            IndexError: the sequence does not exist, or is shorter.
        """
        index = check_index(number, len(self), "sequence")
        size = int(self.sequence_lengths[index])
        stop = size if length is None else offset + length
        if not 0 <= offset <= stop <= size:
            raise IndexError(f"Sequence {index} has {size} tokens; there are none from {offset} to {stop}.")
        document = int(np.searchsorted(self.document_indices, index, side="right")) - 1
        first = int(self.document_indices[document])
        # The sequences of a document are stored one after the other.
        begin = int(self.sequence_lengths[first:index].sum(dtype=np.int64)) + offset
        ids: Tokens = self._store[document].ids[begin : begin + stop - offset]
        return ids


@final
class PretrainingDataset:
    """Map-style dataset of one document per row, padded or cut at ``seq_length``.

    Documents of fewer than two tokens have nothing to predict and give no row. Padding wastes
    compute: ``batchloom.Loader`` packs the same documents.

    Args:
        prefix: as for :class:`IndexedDataset`.
        tokenizer: tokenizer that made the ids; its end token fills padding. See
            :func:`batchloom.compat.script_arguments.tokenizer_of`.
        seq_length: tokens of a row.
        split: ``train``, ``val`` or ``test``; only for a store.
        output: ``torch`` or ``numpy``.

    Attributes:
        store: open store or prefix.

    Raises:
        StoreMissingError, StoreError: as for :class:`IndexedDataset`.
        InputError: the store has another objective, such as pairs with rejected answers.
        TokenizerError: the tokenizer cannot be read or trusted.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        tokenizer: Any,
        seq_length: int,
        split: str = "train",
        *,
        output: str = "torch",
    ) -> None:
        if (as_int(seq_length) or 0) < 2:
            raise SettingsError([f"seq_length: {quote_value(seq_length)} is not a number above 1"])
        check_output(output)
        self.store = open_store(prefix, split)
        check_next_token_objective(self.store)
        refuse_media(self.store.manifest, self.store.location.name, "PretrainingDataset")
        if self.store.reader.weighted:
            raise InputError(
                f"{self.store.location.name} has loss weights, which PretrainingDataset does not pass on; use "
                "batchloom.Loader, whose batches have loss_weights."
            )
        resolved_tokenizer = tokenizer_of(tokenizer)
        self._end_id = resolved_tokenizer.end_id
        self._vocab_size = resolved_tokenizer.vocab_size
        self._seq_length = seq_length
        self._output = output
        lengths = self.store.lengths.slice(0, len(self.store))
        self._documents = np.setdiff1d(np.flatnonzero(lengths > 1), self.store.contents.removed)

    def __len__(self) -> int:
        return int(self._documents.size)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return ``input_ids``, ``labels`` (-100 without loss) and ``attention_mask``.

        Each is int64 [seq_length].

        Raises:
            InputError: the document has an id outside of the tokenizer's vocabulary.
            IndexError: the row does not exist.
        """
        document = int(self._documents[number])
        ids = self.store[document].ids[: self._seq_length].astype(np.int64)
        if int(ids.max()) >= self._vocab_size or int(ids.min()) < 0:
            raise InputError(
                f"Document {document} of {self.store.path} holds token id {int(ids.max())}; the tokenizer has ids 0 "
                f"to {self._vocab_size - 1}: give the tokenizer that made them."
            )
        size = ids.size
        (trained,) = self.store.mask(np.array([document]), np.zeros(1, np.int64), np.array([size]))
        row = np.full((3, self._seq_length), [[self._end_id], [IGNORE_INDEX], [0]], np.int64)
        row[0, :size], row[1, :size], row[2, :size] = ids, np.where(trained, ids, IGNORE_INDEX), 1
        # No token precedes the first one, so nothing predicts it.
        row[1, 0] = IGNORE_INDEX
        names = ("input_ids", "labels", "attention_mask")
        return as_asked(dict(zip(names, row, strict=True)), self._output)
