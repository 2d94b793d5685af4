"""Near duplicates: MinHash signatures, their keys, and components of their links.

The signatures are over shingles of token ids, one key per band. The sketch is Fast Similarity Sketching (Dahlgaard,
Knudsen, Thorup; FOCS 2017). Each round throws every shingle into one bin, until every bin of the document is filled. A
bin keeps the smallest (round, hash). Two documents agree in a bin with the probability of their Jaccard similarity, as
with one permutation per bin. A document costs two or three hashes per shingle instead of one per bin and shingle.

MINHASH_VERSION fixes the result on every platform: the arithmetic uses 64-bit integers and the constants below. Keys of
different versions, bands, rows or shingle sizes are not comparable.

For each unit, :func:`compute_signatures` gives one key per band and document, stored in a file (little-endian
u64 [D, bands], no header). After exact deduplication, :func:`write_signature_keys` sorts the keys of the remaining
documents. :func:`~batchloom.preparation.dedup.search_duplicates` links each document to the first with the same key,
and :func:`find_components` decides which documents to drop.
"""

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import OutputError, SettingsError
from batchloom.core.files import release_pages, wrap_os_errors
from batchloom.core.keyed_hashing import GOLDEN, mix_in_place, mix_int
from batchloom.preparation.dedup.duplicate_search import (
    DUPLICATE,
    get_document_ids,
    make_duplicate_rows,
    read_unit_duplicates,
)
from batchloom.preparation.dedup.sorted_keys import (
    SIGNATURE_KEY,
    count_records,
    map_records,
    open_key_writer,
    write_key_file,
)

MINHASH_VERSION = 1

# Share of the pairs of the given similarity that the banding of choose_banding finds.
TARGET_RECALL = 0.9
NO_KEY = np.uint64(0)

# The first digits of the fractions of pi and e. They are odd, so multiplication by them is invertible.
_SHINGLE_SEED = 0x243F6A8885A308D3
_BAND_SEED = 0xB7E151628AED2A6B
_U64_MASK = (1 << 64) - 1
_EMPTY_BIN = np.uint64(_U64_MASK)
_U32 = np.uint64(32)
_LOW_MASK = np.uint64(0xFFFFFFFF)
# Tokens and bins per block: this fits into the L2 cache of a core.
_BLOCK_TOKENS = 1 << 16
# After this many rounds a document with empty bins is short or repetitive, so its shingles are deduplicated.
_MAX_ROUNDS = 8
_CHUNK_TOKENS = 1 << 20


def match_probability(similarity: float, bands: int, rows: int) -> float:
    """Return the probability that two documents of a Jaccard similarity share a band."""
    return 1.0 - (1.0 - similarity**rows) ** bands


def choose_banding(similarity: float, hashes: int = 112) -> tuple[int, int]:
    """Return the (bands, rows) that find 9 of 10 pairs of a similarity.

    They have the most rows for which ``match_probability(similarity, hashes // rows, rows)`` is at
    least TARGET_RECALL, so that they find the fewest less similar pairs.

    Args:
        similarity: Jaccard similarity of the pairs to find, above 0 and at most 1.
        hashes: maximum number of hashes per document.

    Raises:
        SettingsError: so few hashes cannot find pairs of so low a similarity.
    """
    if not 0 < similarity <= 1:
        raise SettingsError([f"dedup.similarity: {similarity} is not a number above 0 and at most 1; try 0.8"])
    fitting_rows = [
        rows for rows in range(1, hashes + 1) if match_probability(similarity, hashes // rows, rows) >= TARGET_RECALL
    ]
    if not fitting_rows:
        problem = (
            f"dedup.similarity: {hashes} hashes per document do not find pairs with a similarity as low as "
            f"{similarity}; set a higher similarity"
        )
        raise SettingsError([problem])
    return hashes // fitting_rows[-1], fitting_rows[-1]


def compute_signatures(
    ids: NDArray[np.generic], lengths: NDArray[np.uint32], *, bands: int, rows: int, shingle: int
) -> NDArray[np.uint64]:
    """Return one key per band for each document, uint64 [D, bands].

    A document shorter than a shingle counts as one shingle. An empty document has NO_KEY in every band.

    Args:
        ids: token ids of all documents, concatenated [tokens].
        lengths: number of tokens of each document [D].
        bands: number of bands.
        rows: number of hashes per band.
        shingle: number of adjacent tokens per shingle.
    """
    sketches = np.empty((len(lengths), bands * rows), np.uint64)
    stops = np.cumsum(lengths, dtype=np.int64)
    starts = stops - lengths
    for first, last in _split_blocks(stops, bands * rows):
        block = ids[starts[first] : stops[last - 1]]
        if last - first == 1 and lengths[first] > _CHUNK_TOKENS:
            sketches[first:last] = _sketch_long(block, bands * rows, shingle)
        else:
            sketches[first:last] = _sketch(block, lengths[first:last].astype(np.int64), bands * rows, shingle)
    keys = _hash_signatures(sketches.reshape(-1, bands, rows))
    keys[lengths == 0] = NO_KEY
    return keys


def _split_blocks(stops: NDArray[np.int64], hashes: int) -> list[tuple[int, int]]:
    """Return document ranges of about _BLOCK_TOKENS tokens and bins."""
    most = max(1, _BLOCK_TOKENS // hashes)
    blocks = []
    first = 0
    begin = 0
    while first < len(stops):
        last = int(np.searchsorted(stops, begin + _BLOCK_TOKENS, "right"))
        last = min(max(last, first + 1), first + most)
        blocks.append((first, last))
        first = last
        begin = int(stops[last - 1])
    return blocks


def _sketch_long(ids: NDArray[np.generic], hashes: int, shingle: int) -> NDArray[np.uint64]:
    """Return the sketch of one long document, computed in chunks, uint64 [1, hashes].

    The sketch of a union is the elementwise minimum.
    """
    sketch = np.full((1, hashes), _EMPTY_BIN)
    for start in range(0, len(ids) - shingle + 1, _CHUNK_TOKENS):
        chunk = ids[start : start + _CHUNK_TOKENS + shingle - 1]
        np.minimum(sketch, _sketch(chunk, np.array([len(chunk)]), hashes, shingle), out=sketch)
    return sketch


def _sketch(ids: NDArray[np.generic], lengths: NDArray[np.int64], hashes: int, shingle: int) -> NDArray[np.uint64]:
    """Return the smallest (round, hash) per bin and document, uint64 [D, hashes]."""
    values, counts = _hash_shingles(ids, lengths, shingle)
    first_bins = np.arange(len(lengths), dtype=np.uint64) * np.uint64(hashes)
    bin_offsets = np.repeat(first_bins, counts)
    sketches = np.full(len(lengths) * hashes, _EMPTY_BIN)
    round_ = 0
    deduplicated = False
    while len(values):
        if round_ >= _MAX_ROUNDS and not deduplicated:
            values, bin_offsets = _unique_shingles(values, bin_offsets)
            counts = np.bincount((bin_offsets // np.uint64(hashes)).view(np.int64), minlength=len(lengths))
            deduplicated = True
        # Later rounds change no filled bin, so a few remaining shingles go through many rounds at once.
        end = 2 * hashes if round_ >= hashes else hashes
        rounds = np.arange(round_, min(end, round_ + 1 + _BLOCK_TOKENS // 16 // len(values)), dtype="u8")
        round_hashes = mix_in_place(values + (rounds[:, None] + np.uint64(1)) * np.uint64(GOLDEN))
        bins = round_hashes >> _U32
        if round_ < hashes:
            bins *= np.uint64(hashes)
            bins >>= _U32
        else:
            # After as many random rounds as bins, every shingle goes into each bin in turn.
            bins[:] = rounds[:, None] - np.uint64(hashes)
        bins += bin_offsets
        round_hashes &= _LOW_MASK
        round_hashes |= rounds[:, None] << _U32
        np.minimum.at(sketches, bins.ravel().view(np.int64), round_hashes.ravel())
        empty = (sketches.reshape(-1, hashes) == _EMPTY_BIN).any(axis=1)
        stops = np.cumsum(counts)
        values = _join_ranges(values, (stops - counts)[empty], stops[empty])
        counts *= empty
        bin_offsets = np.repeat(first_bins, counts)
        round_ += len(rounds)
    return sketches.reshape(-1, hashes)


def _unique_shingles(
    values: NDArray[np.uint64], bin_offsets: NDArray[np.uint64]
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the distinct shingles of each document; repeats fall into the same bins."""
    order = np.lexsort((values, bin_offsets))
    values = values[order]
    bin_offsets = bin_offsets[order]
    new = np.ones(len(values), bool)
    new[1:] = (values[1:] != values[:-1]) | (bin_offsets[1:] != bin_offsets[:-1])
    return values[new], bin_offsets[new]


def _hash_shingles(
    ids: NDArray[np.generic], lengths: NDArray[np.int64], shingle: int
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return a hash of each shingle and the number of shingles of each document [D].

    The hash is the polynomial of the ids + 1 in an odd constant modulo 2^64. A short document is
    padded with zeros, so it matches no document of another length.
    """
    padded_ids = np.add(ids, 1, dtype=np.uint64, casting="unsafe")
    padded = np.where(lengths, np.maximum(lengths, shingle), 0)
    if (padded != lengths).any():
        room = np.zeros(int(padded.sum()), np.uint64)
        shifts = np.cumsum(padded - lengths) - (padded - lengths)
        room[np.arange(len(padded_ids)) + np.repeat(shifts, lengths)] = padded_ids
        padded_ids = room
    values = padded_ids
    size = 1
    # Each hash of twice as many ids is made of two; the bits of the size say when one id more is added.
    for bit in f"{shingle:b}"[1:]:
        values = _append_hashes(values, size, values, size)
        size *= 2
        if bit == "1":
            values = _append_hashes(values, size, padded_ids, 1)
            size += 1
    counts = np.maximum(padded - shingle + 1, 0)
    stops = np.cumsum(padded)
    starts = stops - padded
    return _join_ranges(values, starts, starts + counts), counts


def _join_ranges(values: NDArray[np.uint64], starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Join ranges of an array, which is faster than to select their elements."""
    ranges = [values[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
    return np.concatenate(ranges) if ranges else values[:0]


def _append_hashes(
    values: NDArray[np.uint64], size: int, others: NDArray[np.uint64], other_size: int
) -> NDArray[np.uint64]:
    """Join hashes of ``size`` ids with those of the ids that follow."""
    later = others[size:]
    joined: NDArray[np.uint64] = values[: len(later)] * np.uint64(pow(_SHINGLE_SEED, other_size, 1 << 64))
    joined += later
    return joined


def _hash_signatures(sketches: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return one key per band from sketches [D, bands, rows]; no key is NO_KEY.

    Equal rows in different bands give different keys.
    """
    _, bands, rows = sketches.shape
    keys = np.zeros(sketches.shape[:2], np.uint64)
    for row in range(rows):
        keys += sketches[:, :, row] * np.uint64(pow(_BAND_SEED, row, 1 << 64))
        mix_in_place(keys)
    keys += np.array([mix_int(band + 1) for band in range(bands)], np.uint64)
    mix_in_place(keys)
    keys[keys == NO_KEY] = 1
    return keys


# Keys that are converted at once.
_CHUNK_KEYS = 1 << 20


def map_signatures(path: Path, bands: int) -> NDArray[np.uint64]:
    """Memory-map the signatures of a unit, uint64 [D, bands].

    Raises:
        OutputError: the file cannot be read, or its size does not match the bands.
    """
    with wrap_os_errors("use", path):
        size = path.stat().st_size
        if size % (8 * bands):
            raise OutputError(
                f"{path} has {size:,} bytes, which is not a multiple of {8 * bands} for {bands} bands per "
                "document: it was truncated, or written with another number of bands; remove it, then give the "
                "same command again."
            )
        if not size:
            return np.zeros((0, bands), np.uint64)
        return np.memmap(path, "<u8", "r").view(np.ndarray).reshape(-1, bands)


def write_signature_keys(
    path: Path,
    signatures: NDArray[np.uint64],
    parts: NDArray[np.uint32],
    exact: Sequence[Path] = (),
    unit: int = 0,
    excluded: NDArray[np.int64] | None = None,
) -> None:
    """Write the keys of one unit for the duplicate search, SIGNATURE_KEY.

    Args:
        path: the file to write.
        signatures: signatures of the unit's documents [D, bands], from :func:`map_signatures`.
        parts: index of each document's file part in the unit [D].
        exact: files of exact duplicates, which are skipped.
        unit: number of the unit.
        excluded: numbers of other documents to skip.

    Raises:
        OutputError: a file cannot be read or written, or is truncated.
    """
    count = signatures.shape[1]
    chunk_documents = max(1, _CHUNK_KEYS // count)
    with open_key_writer(path, SIGNATURE_KEY) as add:
        for start in range(0, len(signatures), chunk_documents):
            chunk = signatures[start : start + chunk_documents]
            keep = (chunk != NO_KEY).any(axis=1)
            keep[read_unit_duplicates(exact, unit, start, start + len(chunk))["number"] - start] = False
            if excluded is not None:
                keep[excluded[(excluded >= start) & (excluded < start + len(chunk))] - start] = False
            numbers = np.flatnonzero(keep)
            records = np.empty((len(numbers), count), SIGNATURE_KEY)
            records["high"] = chunk[numbers]
            records["number"] = (numbers + start)[:, None]
            records["part"] = parts[start : start + len(chunk)][numbers, None]
            add(records.reshape(-1))
            release_pages(signatures)
            release_pages(parts)


# Documents per partition, and pairs per chunk in memory: links in both directions, with room.
_PARTITION_DOCUMENTS = 1 << 20
_CHUNK = 1 << 22
_U32 = np.uint64(32)
_PAIR = np.dtype([("one", "<u8"), ("other", "<u8")])

_DocumentIds = NDArray[np.uint64]


def _compute_partitions(documents: _DocumentIds, partitions: int) -> NDArray[np.unsignedinteger]:
    """Return the number of each document's partition."""
    hashes = mix_in_place(documents.copy())
    hashes %= np.uint64(partitions)
    return hashes.astype(np.min_scalar_type(partitions))


@final
class _PairSpill:
    """Pairs of documents in files, partitioned by the hash of the first one."""

    def __init__(self, folder: Path, partitions: int) -> None:
        self._folder = folder
        self._partitions = partitions
        # Most partitions are read twice in a row, so the last one that fits one chunk is cached.
        self._cached_chunk: tuple[int, tuple[_DocumentIds, _DocumentIds]] | None = None
        with wrap_os_errors("use", folder):
            folder.mkdir(parents=True)

    def add(self, nodes: _DocumentIds, values: _DocumentIds) -> None:
        if not len(nodes):
            return
        partition = _compute_partitions(nodes, self._partitions)
        order = np.argsort(partition, kind="stable")
        pairs = np.stack([nodes[order], values[order]], axis=1)
        partition = partition[order]
        starts = np.flatnonzero(np.concatenate([[True], partition[1:] != partition[:-1]]))
        numbers = partition[starts].tolist()
        for number, partition_pairs in zip(numbers, np.split(pairs, starts[1:]), strict=True):
            path = self._path(number)
            # Each write opens the file: there may be more partitions than a process may open files.
            with wrap_os_errors("use", path), path.open("ab") as file:
                file.write(np.ascontiguousarray(partition_pairs, "<u8").data)

    def chunks(self, partition: int) -> Iterator[tuple[_DocumentIds, _DocumentIds]]:
        """Yield the pairs of a partition in chunks, each sorted by the first document."""
        path = self._path(partition)
        if self._cached_chunk is not None and self._cached_chunk[0] == partition:
            yield self._cached_chunk[1]
        elif path.exists():
            self._cached_chunk = None
            pairs = map_records(path, _PAIR)
            for start in range(0, len(pairs), _CHUNK):
                nodes = pairs["one"][start : start + _CHUNK].copy()
                order = np.argsort(nodes, kind="stable")
                chunk = nodes[order], pairs["other"][start : start + _CHUNK][order]
                if len(order) == len(pairs):
                    self._cached_chunk = partition, chunk
                yield chunk

    def remove(self) -> None:
        self._cached_chunk = None
        with wrap_os_errors("use", self._folder):
            shutil.rmtree(self._folder)

    def _path(self, partition: int) -> Path:
        return self._folder / f"{partition:05d}.pairs"


def find_components(links: Sequence[Path], scratch: Path, out: Path, first_new: int = 0) -> list[Path]:
    """Write the documents to drop, each with the document that stays in its place.

    :func:`~batchloom.preparation.dedup.read_unit_duplicates` reads the files.

    Args:
        links: files of :func:`~batchloom.preparation.dedup.search_duplicates` over signature keys, which
            link each document to an earlier similar one.
        scratch: folder for temporary files, emptied first and removed at the end.
        out: output folder of ``near_00000.drops`` and so on.
        first_new: number of the first new unit; documents of earlier units stay.

    Returns:
        The written files; every document occurs in at most one of them.

    Raises:
        OutputError: a file cannot be read or written, or is truncated.
    """
    count = sum(count_records(path, DUPLICATE) for path in links)
    partitions = max(1, -(-count // _PARTITION_DOCUMENTS))
    with wrap_os_errors("use", scratch), contextlib.ExitStack() as stack:
        shutil.rmtree(scratch, ignore_errors=True)
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        parts, pairs = _spill_links(links, scratch, partitions)
        changed = True
        round_ = 0
        while changed:
            large = _PairSpill(scratch / f"large_{round_}", partitions)
            changed = _large_star(pairs, large, partitions)
            pairs.remove()
            pairs = _PairSpill(scratch / f"small_{round_}", partitions)
            changed |= _small_star(large, pairs, partitions)
            large.remove()
            round_ += 1
        return _write_component_drops(pairs, parts, scratch, out, partitions, first_new)


def find_kept_documents(drops: Sequence[Path], documents: _DocumentIds) -> _DocumentIds:
    """Return the document that stays in the place of each one, usually itself.

    Args:
        drops: all files of one call of :func:`find_components`, in their order.
        documents: document ids, uint64 [K].

    Raises:
        OutputError: a file cannot be read, or is truncated.
    """
    kept = documents.copy()
    if not drops:
        return kept
    partitions = _compute_partitions(documents, len(drops))
    for partition, path in enumerate(drops):
        indices = np.flatnonzero(partitions == partition)
        rows = map_records(path, DUPLICATE)
        if not len(indices) or not len(rows):
            continue
        dropped = get_document_ids(rows)
        positions = np.minimum(dropped.searchsorted(documents[indices]), len(rows) - 1)
        is_dropped = dropped[positions] == documents[indices]
        kept[indices[is_dropped]] = get_document_ids(rows[positions[is_dropped]], "first_")
    return kept


def _spill_links(links: Sequence[Path], scratch: Path, partitions: int) -> tuple[_PairSpill, _PairSpill]:
    """Return the part of each linked document, and the links in both directions."""
    parts = _PairSpill(scratch / "parts", partitions)
    once = _PairSpill(scratch / "once", partitions)
    for path in links:
        rows = map_records(path, DUPLICATE)
        for start in range(0, len(rows), _CHUNK):
            chunk = rows[start : start + _CHUNK]
            later = get_document_ids(chunk)
            first = get_document_ids(chunk, "first_")
            parts.add(*_unique_pairs(later, chunk["part"].astype("<u8")))
            parts.add(*_unique_pairs(first, chunk["first_part"].astype("<u8")))
            once.add(*_unique_pairs(later, first))
    # Similar documents mostly agree in many bands. Their repeated links meet only here.
    pairs = _PairSpill(scratch / "links", partitions)
    for partition in range(partitions):
        for linked in once.chunks(partition):
            later, first = _unique_pairs(*linked)
            pairs.add(later, first)
            pairs.add(first, later)
    once.remove()
    return parts, pairs


def _large_star(pairs: _PairSpill, out: _PairSpill, partitions: int) -> bool:
    """Link later neighbours to the first of the neighbourhood; return if any changed."""
    changed = False
    for partition in range(partitions):
        table = _min_neighbours(pairs, partition)
        for nodes, neighbours in pairs.chunks(partition):
            first = np.minimum(nodes, _lookup_minimum(table, nodes))
            outward = neighbours > nodes
            changed |= bool((first != nodes)[outward].any())
            out.add(neighbours[outward], first[outward])
    return changed


def _small_star(pairs: _PairSpill, out: _PairSpill, partitions: int) -> bool:
    """Link earlier neighbours and the node to the first; return if any changed."""
    changed = False
    for partition in range(partitions):
        table = _min_neighbours(pairs, partition)
        for nodes, neighbours in pairs.chunks(partition):
            first = _lookup_minimum(table, nodes)
            linked = first == neighbours
            changed |= not bool(linked.all())
            later = np.where(linked, nodes, neighbours)
            out.add(later, first)
            out.add(first, later)
    return changed


def _write_component_drops(
    stars: _PairSpill, parts: _PairSpill, scratch: Path, out: Path, partitions: int, first_new: int
) -> list[Path]:
    """Add parts to dropped and remaining documents and write the drops by partition."""
    first_parts = _PairSpill(scratch / "first_parts", partitions)
    for partition in range(partitions):
        part_table = _min_neighbours(parts, partition)
        for nodes, neighbours in stars.chunks(partition):
            outward = neighbours > nodes
            first_parts.add(neighbours[outward], _lookup_minimum(part_table, nodes[outward]))
    files = []
    for partition in range(partitions):
        later, first = _min_neighbours(stars, partition)
        dropped_indices = np.flatnonzero(first < later)
        later = later[dropped_indices]
        first = first[dropped_indices]
        part = _lookup_minimum(_min_neighbours(parts, partition), later)
        first_part = _lookup_minimum(_min_neighbours(first_parts, partition), later)
        rows = make_duplicate_rows(later, part, first, first_part)
        path = out / f"near_{partition:05d}.drops"
        with write_key_file(path) as write:
            write(rows[rows["unit"] >= first_new])
        files.append(path)
    return files


def _min_neighbours(pairs: _PairSpill, partition: int) -> tuple[_DocumentIds, _DocumentIds]:
    """Return the sorted documents of a partition and the smallest neighbour of each."""
    documents = firsts = np.zeros(0, np.uint64)
    for chunk in pairs.chunks(partition):
        nodes, neighbours = chunk
        if len(documents):
            nodes = np.concatenate([documents, nodes])
            neighbours = np.concatenate([firsts, neighbours])
            order = np.argsort(nodes, kind="stable")
            nodes = nodes[order]
            neighbours = neighbours[order]
        starts = np.flatnonzero(np.concatenate([[True], nodes[1:] != nodes[:-1]]))
        documents = nodes[starts]
        firsts = np.minimum.reduceat(neighbours, starts)
    return documents, firsts


def _lookup_minimum(table: tuple[_DocumentIds, _DocumentIds], documents: _DocumentIds) -> _DocumentIds:
    """Look up sorted documents in a table of :func:`_min_neighbours`."""
    new = np.ones(len(documents), bool)
    np.not_equal(documents[1:], documents[:-1], out=new[1:])
    starts = np.flatnonzero(new)
    values = table[1][np.searchsorted(table[0], documents[starts])]
    return np.repeat(values, np.diff(starts, append=len(documents)))


def _unique_pairs(nodes: _DocumentIds, values: _DocumentIds) -> tuple[_DocumentIds, _DocumentIds]:
    order = np.lexsort((values, nodes))
    nodes = nodes[order]
    values = values[order]
    new = np.ones(len(nodes), bool)
    new[1:] = (nodes[1:] != nodes[:-1]) | (values[1:] != values[:-1])
    return nodes[new], values[new]
