"""Token id files: Megatron prefixes, flat files, ``.npy`` arrays; their ids."""

import json
import math
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
import xxhash
from numpy.lib import format as npy
from numpy.typing import NDArray

from batchloom.core.addresses import make_input_labels
from batchloom.core.errors import InputError, InputMissingError, StoreError
from batchloom.core.files import describe_missing_path, refuse_url
from batchloom.preparation.documents.document_facts import split_digests
from batchloom.preparation.report.report import ReportedSource
from batchloom.preparation.units.unit_rows import concatenate_ranges
from batchloom.sources import STORE_MARKER_NAME
from batchloom.store import map_file
from batchloom.store.format import LossMask, LossWeights, map_mask, map_weights
from batchloom.store.read import map_prefix, refuse_standalone_shard
from batchloom.store.write import write_chunks

FLAT_DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
_CHUNK_SIZE = 1 << 22
_NPY_HEADER_READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
# Magic numbers of llm.c's files for GPT-2 and for Llama 3, and the dtype by version.
_LLMC_MAGICS = (20240520, 20240801)
_LLMC_DTYPES = {1: "uint16", 7: "uint32"}
_LLMC_HEADER_BYTES = 1024
_HINT = "give --eod ID (the id that ends each document) or --document-tokens N (documents of N tokens)"


@dataclass(frozen=True, slots=True)
class TokenInput:
    path: Path
    name: str  # name of the file in the provenance
    kind: str  # ``megatron``, ``flat`` or ``npy``
    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class DocumentBoundaries:
    """Settings for files that do not declare their dtype or document boundaries."""

    dtype: str | None = None  # dtype of a token in a flat file
    eod: int | None = None
    document_tokens: int | None = None  # tokens of a document, if no id ends documents
    end_id: int | None = None  # end token of the tokenizer; None without a tokenizer


@dataclass(frozen=True, slots=True)
class TokenFile:
    token_input: TokenInput
    tokens: NDArray[Any]  # all ids in the file's dtype [T]
    lengths: NDArray[np.uint32]  # tokens of each document, uint32 [D]
    starts: NDArray[np.int64] | None
    header: int  # bytes before the first token
    mask: LossMask | None  # mask of the trained tokens; None if all are trained
    weights: LossWeights | None = None  # loss weights; None if all are 0 and 1
    note: str = ""  # what the file or one beside it says of its documents

    @property
    def flags(self) -> LossMask | LossWeights | None:
        """Trained flags or weight codes of the tokens; None if all weights are 1."""
        return self.weights or self.mask


def find_token_inputs(inputs: Sequence[str]) -> list[TokenInput]:
    """Return the token files in ``inputs``: prefixes, files, and folders of prefixes."""
    token_inputs: list[TokenInput] = []
    for path_text, label in zip(inputs, make_input_labels(inputs), strict=True):
        path = Path(os.path.expanduser(path_text))
        if not path.is_dir():
            token_inputs.append(_find_input(path, label))
            continue
        if (path / STORE_MARKER_NAME).exists():
            raise InputError(f"{path_text} is already a store: open it, or name a prefix inside it.")
        prefixes = sorted(index_path.with_suffix("") for index_path in path.glob("*.idx"))
        if not prefixes:
            raise InputMissingError(
                f"{path_text} holds no Megatron prefix (NAME.bin with NAME.idx); name flat files individually."
            )
        token_inputs += [_find_input(prefix, f"{label}/{prefix.name}") for prefix in prefixes]
    return token_inputs


def _find_input(path: Path, label: str) -> TokenInput:
    refuse_url(path, "A token file")
    stem = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    if stem.with_name(stem.name + ".idx").is_file():
        refuse_standalone_shard(stem)
        tokens = stem.with_name(stem.name + ".bin")
        kind = "megatron"
        label = label[: len(label) - len(path.name) + len(stem.name)]
    else:
        tokens = path
        kind = "flat"
    try:
        status = tokens.stat()
    except OSError as error:
        remedy = "name a Megatron prefix (NAME.bin with NAME.idx), a flat file of ids, or a .npy"
        raise InputMissingError(describe_missing_path(str(tokens), remedy)) from error
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{tokens} is neither a file nor a folder; write its data into a file first.")
    if not status.st_size:
        raise InputMissingError(f"{tokens} is empty: it has 0 bytes; name a file that is not empty.")
    # dolma and OLMo call a memory map without a header .npy, too.
    if kind == "flat" and _read_start(tokens, len(npy.MAGIC_PREFIX)) == npy.MAGIC_PREFIX:
        kind = "npy"
    return TokenInput(tokens, label, kind, status.st_size, status.st_mtime_ns)


def list_import_options(path: Path) -> tuple[str, ...]:
    """Return the options without which a file of ids is not imported.

    Raises:
        InputError: its header is damaged.
    """
    token_input = _find_input(path, path.name)
    if token_input.kind == "npy":
        _map_array(path)
        return ("--copy",)
    if (header := _read_llmc_header(path)) is not None:
        _map_llmc(path, header, None)
        return ("--copy",)
    return () if _apply_sidecar(path, DocumentBoundaries()).dtype else ("--dtype",)


def open_token_file(token_input: TokenInput, cutting: DocumentBoundaries, scratch: Path) -> TokenFile:
    """Map an input and find its documents.

    ``scratch`` holds the document lengths of a flat file, so that they take no memory.
    """
    if token_input.kind == "megatron":
        return _open_prefix(token_input, cutting)
    path = token_input.path
    note = ""
    llmc_header = _read_llmc_header(path) if token_input.kind == "flat" else None
    if token_input.kind == "npy":
        tokens, header = _map_array(path)
        _check_dtype(path, cutting.dtype, tokens.dtype)
    elif llmc_header is not None:
        tokens = _map_llmc(path, llmc_header, cutting.dtype)
        header = _LLMC_HEADER_BYTES
        note = f"{path.name} has the header of llm.c: its documents begin with the end token."
    else:
        cutting = _apply_sidecar(path, cutting)
        tokens = _map_flat(path, cutting.dtype)
        header = 0
    rows = tokens.shape[1] if tokens.ndim == 2 else None
    tokens = tokens.reshape(-1)
    if (bounds := _read_bounds(path, tokens, cutting)) is not None:
        lengths, note = bounds
    elif rows is not None and (cutting.eod, cutting.document_tokens) == (None, None):
        lengths = _iter_even_lengths(tokens.size, rows)
    else:
        lengths = _iter_document_lengths(path, tokens, cutting, at_start=llmc_header is not None)
    write_chunks(scratch, (chunk.astype("<u4").tobytes() for chunk in lengths))
    sizes = np.frombuffer(map_file(scratch), "<u4")
    sidecars = _map_loss_sidecars(path, tokens.size)
    return TokenFile(token_input, tokens, sizes, None, header, *sidecars, note)


def _open_prefix(token_input: TokenInput, cutting: DocumentBoundaries) -> TokenFile:
    stem = token_input.path.with_suffix("")
    if cutting.document_tokens is not None:
        raise InputError(
            f"{stem}.idx defines where documents end; leave --document-tokens out, or name {token_input.path.name} "
            "in a folder without its index."
        )
    shard, _ = map_prefix(stem)
    lengths = shard.lengths
    if not lengths.size:
        raise InputMissingError(f"{stem} holds no documents.")
    _check_dtype(token_input.path, cutting.dtype, shard.tokens.dtype)
    pointers = np.frombuffer(shard.pointers, np.int64)
    starts = None if _is_contiguous(pointers, lengths, shard.tokens.dtype.itemsize) else pointers
    if starts is not None:
        starts = starts // shard.tokens.dtype.itemsize
    sidecars = _map_loss_sidecars(token_input.path, shard.tokens.size)
    return TokenFile(token_input, shard.tokens, lengths, starts, 0, *sidecars)


def _is_contiguous(pointers: NDArray[np.int64], lengths: NDArray[np.uint32], itemsize: int) -> bool:
    """Return whether documents are contiguous; empty ones may point anywhere."""
    end = 0
    for start in range(0, len(lengths), _CHUNK_SIZE):
        sizes = lengths[start : start + _CHUNK_SIZE].astype(np.int64) * itemsize
        ends = end + np.cumsum(sizes)
        apart = pointers[start : start + _CHUNK_SIZE] != ends - sizes
        if (apart & (sizes > 0)).any():
            return False
        end = int(ends[-1])
    return True


def _check_dtype(path: Path, declared_dtype: str | None, dtype: np.dtype[Any]) -> None:
    if declared_dtype is not None and np.dtype(declared_dtype) != dtype.newbyteorder("="):
        raise InputError(
            f"--dtype is {declared_dtype}, and {path} declares {dtype.name}; leave --dtype out for files that "
            "declare their dtype."
        )


def _map_flat(path: Path, dtype: str | None) -> NDArray[Any]:
    if dtype is None:
        raise InputError(
            f"{path} does not declare the dtype of its ids: give --dtype (uint16 for most vocabularies below "
            "65,536, else uint32 or int32)."
        )
    token_dtype = np.dtype(dtype).newbyteorder("<")
    view = map_file(path)
    if len(view) % token_dtype.itemsize:
        raise InputError(
            f"{path} has {len(view):,} bytes, which is not a multiple of the {token_dtype.itemsize} bytes of "
            f"{dtype}: give another --dtype, or replace the file if it is truncated."
        )
    return np.frombuffer(view, token_dtype)


def _read_start(path: Path, size: int) -> bytes:
    with path.open("rb") as file:
        return file.read(size)


def _read_llmc_header(path: Path) -> tuple[int, int] | None:
    """Return version and number of tokens of a header of llm.c; None without one.

    Raises InputError if the file ends inside it.
    """
    start = _read_start(path, _LLMC_HEADER_BYTES)
    if int.from_bytes(start[:4], "little") not in _LLMC_MAGICS:
        return None
    if len(start) < _LLMC_HEADER_BYTES:
        raise InputError(f"{path} ends inside its header of llm.c: it is damaged.")
    _, version, count = np.frombuffer(start, "<i4", 3).tolist()
    return version, count


def _map_llmc(path: Path, header: tuple[int, int], declared_dtype: str | None) -> NDArray[Any]:
    """Map the ids behind a header of llm.c (``dev/data/data_common.py``)."""
    version, count = header
    if version not in _LLMC_DTYPES:
        raise InputError(f"{path} has version {version} of llm.c's header; known are 1 (uint16) and 7 (uint32).")
    dtype = np.dtype(_LLMC_DTYPES[version])
    _check_dtype(path, declared_dtype, dtype)
    view = map_file(path)
    size = _LLMC_HEADER_BYTES + count * dtype.itemsize
    if len(view) != size:
        raise InputError(f"{path} has {len(view):,} bytes instead of {size:,}: it is damaged.")
    return np.frombuffer(view, dtype.newbyteorder("<"), offset=_LLMC_HEADER_BYTES)


def _read_bounds(
    path: Path, tokens: NDArray[Any], cutting: DocumentBoundaries
) -> tuple[Iterator[NDArray[np.uint32]], str] | None:
    """Read the document lengths from the index of a token file.

    Supported are the index of datatrove (``NAME.index``: the end of each document, uint64) and the table of dolma and
    OLMo-core (``NAME.csv.gz``: start and end of each document in the first two columns).

    Returns:
        Lengths in tokens, and a note for the user; None without an index.

    Raises:
        InputError: the index does not fit the token file, or the options.
    """
    datatrove = path.with_name(f"{path.name}.index")
    dolma = path.with_suffix(".csv.gz")
    index = next((one for one in (datatrove, dolma) if one.is_file()), None)
    if index is None:
        return None
    if cutting.document_tokens is not None:
        raise InputError(
            f"{index} lists the ends of the documents: leave --document-tokens out, or move {index.name} elsewhere."
        )
    if (masked := path.with_name(f"{path.name}.loss")).is_file():
        raise InputError(
            f"{masked} marks the trained tokens and cannot be read; move it elsewhere to train all tokens."
        )
    ends = _read_datatrove_ends(index) if index == datatrove else _read_dolma_ends(index)
    lengths = np.diff(ends, prepend=0)
    if not len(ends) or (lengths < 0).any() or int(ends[-1]) != tokens.size:
        last = int(ends[-1]) if len(ends) else 0
        raise InputError(
            f"{index} lists documents up to token {last:,}, and {path.name} has {tokens.size:,}: give the --dtype of "
            "its ids, or fetch both files again."
        )
    note = f"{index.name} gives the ends of the {len(ends):,} documents of {path.name}"
    if (eod := cutting.end_id if cutting.eod is None else cutting.eod) is not None:
        filled_ends = ends[lengths > 0]
        missing = int(np.count_nonzero(tokens[filled_ends - 1] != eod))
        chunks = range(0, tokens.size, _CHUNK_SIZE)
        total = sum(int(np.count_nonzero(tokens[start : start + _CHUNK_SIZE] == eod)) for start in chunks)
        inside = total - (len(filled_ends) - missing)
        note += f"; {missing:,} do not end with {eod}, and {inside:,} more of it are inside documents"
    return iter([_check_lengths(lengths, path)]), f"{note}."


def _read_datatrove_ends(index: Path) -> NDArray[np.int64]:
    view = map_file(index)
    if len(view) % 8:
        raise InputError(f"{index} has {len(view):,} bytes, which is no multiple of 8: it is damaged.")
    return np.frombuffer(view, "<u8").astype(np.int64)


def _read_dolma_ends(index: Path) -> NDArray[np.int64]:
    """Return the ends of contiguous documents."""
    import pyarrow as pa
    from pyarrow import csv

    options = csv.ReadOptions(autogenerate_column_names=True)
    try:
        table = csv.read_csv(index, read_options=options)
        starts, ends = (np.asarray(table.column(number), np.int64) for number in (0, 1))
    except (pa.ArrowException, OSError, ValueError, TypeError) as error:
        raise InputError(f"{index} does not list the start and the end of each document: {error!s:.100}.") from error
    if (starts[1:] != ends[:-1]).any() or (len(starts) and starts[0]):
        raise InputError(f"{index} lists documents that do not follow each other; fetch both files again.")
    return ends


def _map_array(path: Path) -> tuple[NDArray[Any], int]:
    """Map a ``.npy`` file of one or two dimensions; return it and its header size."""
    try:
        with path.open("rb") as file:
            read_header = _NPY_HEADER_READERS[npy.read_magic(file)]
            shape, is_fortran, dtype = read_header(file)
            header = file.tell()
    except Exception as error:  # On damaged headers, numpy raises half a dozen kinds of errors.
        raise InputError(f"{path} is not a .npy file, or is damaged; save ids with numpy.save.") from error
    if dtype.kind not in "iu" or len(shape) not in (1, 2) or is_fortran:
        raise InputError(
            f"{path} holds {dtype.str} numbers of shape {shape}; expected are integers (i or u) of one "
            "dimension, or of two (a row is a document), in C order."
        )
    if min(shape) < 1:
        raise InputMissingError(f"{path} is empty: its shape is {shape}.")
    view = map_file(path)
    size = header + math.prod(shape) * dtype.itemsize
    if len(view) != size:
        raise InputError(f"{path} has {len(view):,} bytes instead of {size:,}: it is damaged.")
    return np.frombuffer(view, dtype, offset=header).reshape(shape), header


def _apply_sidecar(path: Path, cutting: DocumentBoundaries) -> DocumentBoundaries:
    """Fill unset boundaries from the sidecar of ``batchloom export --to flat``."""
    try:
        sidecar = json.loads(path.with_suffix(".json").read_bytes())
    except (OSError, ValueError):
        return cutting
    if not isinstance(sidecar, dict) or sidecar.get("dtype") not in FLAT_DTYPES:
        return cutting
    eod = sidecar.get("eod") if isinstance(sidecar.get("eod"), int) else None
    if cutting.eod is not None or cutting.document_tokens is not None:
        eod = cutting.eod
    return DocumentBoundaries(cutting.dtype or sidecar["dtype"], eod, cutting.document_tokens, cutting.end_id)


def _iter_document_lengths(
    path: Path, tokens: NDArray[Any], cutting: DocumentBoundaries, *, at_start: bool = False
) -> Iterator[NDArray[np.uint32]]:
    """Yield the document lengths of a flat file in chunks.

    With ``at_start`` the id that ends documents is the first one of each instead.
    """
    if cutting.document_tokens is not None:
        yield from _iter_even_lengths(tokens.size, cutting.document_tokens)
        return
    eod = cutting.end_id if cutting.eod is None else cutting.eod
    if eod is None:
        raise InputError(f"{path} does not define where documents end: {_HINT}.")
    last = -1
    has_any = False
    for start in range(0, tokens.size, _CHUNK_SIZE):
        ends = start + np.flatnonzero(tokens[start : start + _CHUNK_SIZE] == eod) - at_start
        has_any |= bool(ends.size)
        ends = ends[ends > last]
        if ends.size:
            yield _check_lengths(np.diff(ends, prepend=last), path)
            last = int(ends[-1])
    if not has_any:
        raise InputError(f"{path} does not contain id {eod}, which should end documents: {_HINT}.")
    if last + 1 < tokens.size:
        yield _check_lengths(np.array([tokens.size - 1 - last]), path)


def _check_lengths(lengths: NDArray[np.int64], path: Path) -> NDArray[np.uint32]:
    if int(lengths.max()) >= 2**31:
        raise InputError(
            f"{path} has a document of {int(lengths.max()):,} tokens, and an index holds at most {2**31 - 1:,} for "
            f"one: {_HINT}."
        )
    return lengths.astype(np.uint32)


def _iter_even_lengths(total: int, document_tokens: int) -> Iterator[NDArray[np.uint32]]:
    full_documents, remainder = divmod(total, document_tokens)
    for start in range(0, full_documents, _CHUNK_SIZE):
        yield np.full(min(_CHUNK_SIZE, full_documents - start), document_tokens, np.uint32)
    if remainder:
        yield np.array([remainder], np.uint32)


def _map_loss_sidecars(path: Path, tokens: int) -> tuple[LossMask | None, LossWeights | None]:
    """Read the ``.mask`` and ``.weights`` that ``batchloom export`` writes."""
    mask = _read_mask_sidecar(path, tokens)
    weights_path = path.with_suffix(".weights")
    if not weights_path.is_file():
        return mask, None
    weights = map_weights(weights_path, tokens)
    trained = mask.trained if mask else tokens
    if not weights.count() == weights.trained == trained:
        raise StoreError(
            f"{weights_path} declares {weights.trained:,} trained tokens and weights {weights.count():,}, but "
            f"{trained:,} tokens are trained: it is damaged. Export it again."
        )
    return mask, weights


def _read_mask_sidecar(path: Path, tokens: int) -> LossMask | None:
    """Read the ``.mask`` of the same name, as ``batchloom export`` writes it."""
    mask_path = path.with_suffix(".mask")
    if not mask_path.is_file():
        return None
    mask = map_mask(mask_path, tokens)
    beyond = int(mask.bits[-1]) >> (tokens % 8 or 8) if tokens else 0
    if mask.count() != mask.trained or beyond:
        raise StoreError(
            f"{mask_path} declares {mask.trained:,} trained tokens and marks {mask.count():,}: it is damaged. "
            "Export it again."
        )
    return mask if mask.trained < tokens else None


_MAX_BATCH_DOCUMENTS = 1 << 16
_MAX_BATCH_TOKENS = 1 << 21


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Consecutive documents of a file."""

    first: int  # number of the first document in the file
    lengths: NDArray[np.int64]  # tokens of each document, int64 [n]
    starts: NDArray[np.int64]  # index of the first token of each document in the file, int64 [n]
    tokens: NDArray[Any]  # ids of all documents, concatenated, in the file's dtype


@dataclass(slots=True)
class EdgeTokens:
    """First and last ids of documents; several values mean that documents differ."""

    firsts: set[int] = field(default_factory=set)
    lasts: set[int] = field(default_factory=set)

    def add(self, batch: TokenBatch) -> None:
        filled = batch.lengths > 0
        ends = np.cumsum(batch.lengths)[filled]
        if not ends.size:
            return
        firsts = batch.tokens[ends - batch.lengths[filled]]
        lasts = batch.tokens[ends - 1]
        # The minimum and maximum suffice to tell whether the ids differ.
        self.firsts |= {int(firsts.min()), int(firsts.max())}
        self.lasts |= {int(lasts.min()), int(lasts.max())}


def iter_token_batches(file: TokenFile) -> Iterator[TokenBatch]:
    """Yield the documents of a file in order, in batches of bounded size.

    A batch exceeds the bound only if it is a single longer document.
    """
    token_offset = first = 0
    while first < len(file.lengths):
        lengths = file.lengths[first : first + _MAX_BATCH_DOCUMENTS].astype(np.int64)
        cumulative_tokens = np.cumsum(lengths)
        count = max(1, int(np.searchsorted(cumulative_tokens, _MAX_BATCH_TOKENS, side="right")))
        lengths = lengths[:count]
        total = int(cumulative_tokens[min(count, len(cumulative_tokens)) - 1])
        if file.starts is None:
            starts = token_offset + cumulative_tokens[:count] - lengths
            tokens = file.tokens[token_offset : token_offset + total]
        else:
            starts = file.starts[first : first + count]
            tokens = concatenate_ranges(file.tokens, starts, starts + lengths)
        yield TokenBatch(first, lengths, starts, tokens)
        token_offset = token_offset + total
        first += len(lengths)


def hash_ids(batch: TokenBatch) -> NDArray[np.uint64]:
    """Return the XXH3-128 of each document's ids, (low, high) halves, uint64 [n, 2].

    The ids are hashed as little-endian u32, so the hash does not depend on the file's dtype.
    """
    if len(batch.lengths) == 1:
        digest = xxhash.xxh3_128()
        for start in range(0, batch.tokens.size, _MAX_BATCH_TOKENS):
            digest.update(batch.tokens[start : start + _MAX_BATCH_TOKENS].astype("<u4").data)
        return split_digests([digest.digest()])
    data = batch.tokens.astype("<u4").view(np.uint8).data
    stops = np.cumsum(batch.lengths * 4).tolist()
    return split_digests([xxhash.xxh3_128_digest(data[a:b]) for a, b in zip([0, *stops[:-1]], stops, strict=True)])


@final
class VocabularyCheck:
    def __init__(self, vocab_size: int, whose: str) -> None:
        self._vocab_size = vocab_size
        self._whose = whose

    def check_dtype(self, file: TokenFile) -> None:
        """Raise InputError if the dtype cannot hold the vocabulary, so ids were truncated."""
        most = int(np.iinfo(file.tokens.dtype).max)
        if self._vocab_size - 1 > most:
            raise InputError(
                f"{file.token_input.path} holds {file.tokens.dtype.name} ids, which end at {most:,}; {self._whose} "
                f"has {self._vocab_size:,}: the ids were made by another tokenizer, or truncated when they were "
                "written. Name the tokenizer that made them with --tokenizer or --vocab-size."
            )

    def check(self, file: TokenFile, batch: TokenBatch) -> None:
        ids = batch.tokens
        if not ids.size or (int(ids.min()) >= 0 and int(ids.max()) < self._vocab_size):
            return
        token_index = int(np.flatnonzero((ids < 0) | (ids >= self._vocab_size))[0])
        document_index = int(np.searchsorted(np.cumsum(batch.lengths), token_index, side="right"))
        raise InputError(
            f"{file.token_input.path}, document {batch.first + document_index}: holds id {int(ids[token_index])}; "
            f"{self._whose} has ids 0 to {self._vocab_size - 1:,}. Name the tokenizer that made them with "
            "--tokenizer, or the size of its vocabulary with --vocab-size; a wrong --dtype also gives wrong ids."
        )


def make_reported_sources(token_inputs: Sequence[TokenInput]) -> list[ReportedSource]:
    """Return the inputs as the report holds them."""
    return [
        ReportedSource(token_input.name, str(token_input.path.resolve()), token_input.size, token_input.mtime_ns)
        for token_input in token_inputs
    ]
