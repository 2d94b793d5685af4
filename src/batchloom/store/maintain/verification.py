"""Verification of a store: checksums, id ranges and counts."""

import contextlib
import shutil
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, final

import numpy as np
import xxhash
from msgspec.structs import replace
from numpy.typing import NDArray

from batchloom.core.addresses import redact_url
from batchloom.core.errors import BatchloomError, GenerationError, StoreError, StoreMissingError
from batchloom.core.files import read_regular_file
from batchloom.core.wording import format_count
from batchloom.remote import open_remote_file, stat_remote
from batchloom.store.format.block_checksums import COUNTED_ENTRY_BYTES, BlockChecksums, compute_file_checksums
from batchloom.store.format.dropped_duplicates import DroppedDuplicates, map_dropped_duplicates
from batchloom.store.format.layout import (
    LENGTHS_NAME,
    MANIFEST_NAME,
    PROCESSOR_NAME,
    QUARANTINE_NAME,
    SMALL_FILE_LIMIT,
    TOKEN_DTYPES,
    TOKENIZER_NAME,
    compute_checksum,
    format_generation_name,
)
from batchloom.store.format.manifest import (
    Manifest,
    ShardEntry,
    SubsetEntry,
    make_generation_entry,
    read_manifest,
)
from batchloom.store.format.media_index import NOT_STORED, map_media
from batchloom.store.format.megatron_index import map_file, map_index
from batchloom.store.format.objectives import OBJECTIVES
from batchloom.store.format.shard_columns import read_columns
from batchloom.store.format.shard_sidecars import (
    CHECK_REMEDY,
    compute_pair_numbers,
    map_fields,
    map_mask,
    map_pair_index,
    map_provenance,
    map_signature_file,
    map_weights,
)
from batchloom.store.format.store_lengths import map_lengths, map_removed, mask_removed
from batchloom.store.maintain.generations import list_generation_files, list_sidecars
from batchloom.store.read.remote_files import MAX_FETCH_ATTEMPTS
from batchloom.store.read.remote_store import open_remote_manifest
from batchloom.store.read.store_opening import open_store
from batchloom.store.read.store_reader import Store, decode_beginning
from batchloom.store.read.stored_media import read_processor_state
from batchloom.store.read.synthetic_store import is_synthetic

_CHUNK_BYTES = 8 << 20
_SAMPLED_IDS = 64
_NOISE_SAMPLE_TOKENS = 1 << 22
# Text has hundreds of times more equal token pairs than uniform noise. Below this factor it counts as noise.
_NOISE_FACTOR = 1.5
_NOISE_PAIRS = 200.0
_QUARANTINE_STEM = QUARANTINE_NAME.partition(".")[0]
_REMEDY = "restore the manifest that prepare wrote, or prepare the store again"


@dataclass(slots=True)
class VerificationResult:
    """Result of a verification.

    Attributes:
        path: path of the verified data.
        kind: ``store``, ``prefix``, ``file`` or ``synthetic`` (data that is computed as it is read).
        faults: one sentence per fault; empty if the data is sound.
        facts: facts and counts by label, in display order.
        sample: decoded beginning of a document.
        data: ``real``, ``synthetic``, or ``unknown`` if the manifest cannot be read. (Missing data
            raises an error instead.)
        used: description of the data that a training run would read.
    """

    path: str
    kind: str
    faults: list[str] = field(default_factory=list)
    facts: dict[str, str | int] = field(default_factory=dict)
    sample: str = ""
    data: Literal["real", "synthetic", "unknown"] = "real"
    used: str = ""

    @property
    def sound(self) -> bool:
        """True if there are no faults."""
        return not self.faults


def verify_store(
    folder: Path,
    progress: Callable[[int], None] | None = None,
    *,
    generation: int | None = None,
    provide_shard: Callable[[Path, ShardEntry], AbstractContextManager[None]] | None = None,
    open_subset: Callable[[str, int], Store] | None = None,
) -> VerificationResult:
    """Verify a store against its manifest: bytes, ids and counts.

    The newest generation references the files of all readable ones, so that verifying it verifies them too.

    Args:
        folder: folder of the store.
        progress: called with the number of bytes verified since the last call.
        generation: an older generation; None for the newest, including consistency of the older ones.
        provide_shard: given a shard's path without suffix, provides its files while they are verified;
            None if all are local.
        open_subset: opens a subset of a generation; None to open it in ``folder``.

    Raises:
        StoreMissingError: there is no manifest.
        GenerationError: there is no such generation.
    """
    verdict = VerificationResult(str(folder), "store")
    provide_shard = provide_shard or (lambda _stem, _entry: nullcontext())
    open_subset = open_subset or (lambda name, number: open_store(folder, name, generation=number))
    try:
        manifest = read_manifest(folder, generation)
    except (FileNotFoundError, GenerationError):
        raise
    except StoreError as error:
        verdict.faults.append(str(error))
        verdict.data = "unknown"
        verdict.used = describe_use(verdict, {})
        return verdict
    verdict.data = "synthetic" if is_synthetic(manifest) else "real"
    on_bytes_read = progress or (lambda _: None)
    for name, subset in manifest.subsets.items():
        verdict.faults += _list_subset_faults(folder / name, manifest, subset, on_bytes_read, provide_shard)
        removed_note = f", {subset.removed.documents:,} removed" if subset.removed else ""
        verdict.facts[name] = (
            f"{subset.documents:,} documents{removed_note}, {subset.tokens:,} tokens, "
            f"{format_count(len(subset.shards), 'shard')}"
        )
    if manifest.history:
        older_numbers = ", ".join(map(str, manifest.readable[:-1])) or "none"
        verdict.facts["generation"] = (
            f"{manifest.generation} ({manifest.history[-1].made}); older ones that can be read: {older_numbers}"
        )
        verdict.faults += _list_older_faults(folder, manifest)
    if manifest.processor is not None:
        verdict.facts["processor"] = f"{manifest.processor.name}, {manifest.processor.fingerprint}"
        try:
            read_processor_state(
                lambda name: read_regular_file(folder / name, SMALL_FILE_LIMIT), folder, manifest.processor
            )
        except StoreError as error:
            verdict.faults.append(str(error))
    if manifest.objective:
        verdict.facts["objective"] = f"{manifest.objective}: {OBJECTIVES[manifest.objective].layout}"
    if not verdict.faults:
        try:
            verdict.faults += _list_count_faults(folder, manifest)
            verdict.faults += _list_duplicate_faults(folder, manifest)
        except StoreError as error:
            verdict.faults.append(str(error))
        _check_content(folder, manifest, verdict, open_subset)
    counts = {name: subset.remaining_counts[0] for name, subset in manifest.subsets.items()}
    older = "" if generation is None else f" --generation {generation}"
    verdict.used = describe_use(verdict, counts, older)
    return verdict


def verify_synthetic(name: str) -> VerificationResult:
    """Describe synthetic data; there is nothing to verify."""
    store = open_store(name)
    verdict = VerificationResult(name, "synthetic", data="synthetic")
    verdict.facts["made of"] = str(store.path)
    verdict.facts["documents"] = f"{len(store):,}, {store.tokens:,} tokens"
    share = "every rank the same" if store.location.replicated else "every rank its share"
    verdict.facts["ranks"] = f"{share} of each step"
    verdict.sample = decode_beginning(store.tokenizer, store[0].ids, _SAMPLED_IDS)
    verdict.used = (
        f"batchloom train --data {name} generates its {format_count(len(store), 'document')} as it runs and reads no "
        f"file; batchloom prepare {name} --out STORE writes them"
    )
    return verdict


def describe_use(verdict: VerificationResult, counts: dict[str, int], older: str = "") -> str:
    """Describe the data that a training run would read from a store."""
    if verdict.faults:
        return "nothing until the faults are fixed"
    if name := str(verdict.facts.get("objective", "")).partition(":")[0]:
        objective = OBJECTIVES[name]
        return f"{objective.trainers} read it ({objective.reader}), but batchloom train refuses it"
    if not counts.get("train"):
        return "nothing by batchloom train: subset train has no documents"
    val = f", and evaluates on the {counts['val']:,} of subset val" if counts.get("val") else ""
    synthetic = "synthetic " if verdict.data == "synthetic" else ""
    documents = format_count(counts["train"], f"{synthetic}document")
    init = " --init FOLDER (of a model made for its processor)" if verdict.facts.get("processor") else ""
    return f"batchloom train --data {verdict.path}{older}{init} reads the {documents} of subset train{val}"


def verify_prefix(path: Path, vocab_size: int | None = None) -> VerificationResult:
    """Verify a bare Megatron prefix: files, id range, and noise.

    Args:
        path: the prefix.
        vocab_size: exclusive upper bound of the ids; None if unknown.
    """
    verdict = VerificationResult(str(path), "prefix")
    try:
        store = open_store(path)
        verdict.facts["prefix"] = f"{format_count(len(store), 'document')}, {store.tokens:,} tokens, {store.dtype.name}"
        if not len(store):
            verdict.faults.append(f"{path}: holds no documents.")
            return verdict
        if store.masked:
            verdict.facts["trained"] = f"{store.contents.trained_tokens:,} tokens, as {path}.mask says"
        if store.reader.weighted:
            verdict.facts["loss weights"] = f"those of {path}.weights"
        lowest, highest, _ = _scan_tokens(map_file(path.with_name(path.name + ".bin")), store.dtype)
        ids = _draw_sample_ids(store)
    except FileNotFoundError:
        raise
    except StoreError as error:
        verdict.faults.append(str(error))
        return verdict
    verdict.facts["ids"] = f"{lowest:,} to {highest:,}"
    verdict.faults += _list_range_faults(f"{path}.bin", lowest, highest, vocab_size)
    verdict.faults += _list_noise_faults(ids, vocab_size or highest + 1, str(path))
    verdict.used = (
        "nothing until the faults are fixed"
        if verdict.faults
        else f"batchloom train --data {path} reads its {format_count(len(store), 'document')} as they are"
    )
    return verdict


def _list_subset_faults(
    folder: Path,
    manifest: Manifest,
    subset: SubsetEntry,
    on_bytes_read: Callable[[int], None],
    provide_shard: Callable[[Path, ShardEntry], AbstractContextManager[None]],
) -> list[str]:
    faults = []
    try:
        names = zip(subset.length_files, subset.length_checksum_files, subset.all_layers, strict=True)
        for file, checksum_file, layer in names:
            layer_faults = _list_checksum_faults(folder / file, layer.lengths)
            if not layer_faults:
                checksums = BlockChecksums(COUNTED_ENTRY_BYTES)
                checksums.append(map_file(folder / file))
                layer_faults = _list_block_checksum_faults(folder / checksum_file, layer.sums, checksums)
            faults += layer_faults
        lengths = map_lengths(folder, subset)
    except StoreError as error:
        return [*faults, str(error)]
    start = 0
    last = -1
    for shard in subset.shards:
        shard_lengths = lengths.slice(start, start + shard.documents)
        start += shard.documents
        stem = folder / shard.name
        try:
            with provide_shard(stem, shard):
                faults += _list_shard_faults(stem, shard, shard_lengths, manifest, on_bytes_read)
                if manifest.objective:
                    pair_faults, last = _list_pair_faults(stem, shard, manifest, last)
                    faults += pair_faults
        except StoreError as error:
            faults.append(str(error))
    return faults or _list_removed_faults(folder, subset)


def _list_shard_faults(
    stem: Path,
    shard: ShardEntry,
    lengths: NDArray[np.uint32],
    manifest: Manifest,
    on_bytes_read: Callable[[int], None],
) -> list[str]:
    faults = []
    dtype = TOKEN_DTYPES[manifest.dtype]
    index = map_index(stem.with_suffix(".idx"))
    if not np.array_equal(index.lengths, lengths):
        faults.append(f"{stem}.idx: its lengths differ from {LENGTHS_NAME}.")
    if index.dtype != dtype:
        faults.append(f"{stem}.idx: holds {index.dtype.name} tokens, the manifest says {dtype.name}.")
    if len(map_provenance(stem.with_suffix(".docs"))) != shard.documents:
        faults.append(f"{stem}.docs: does not have the manifest's {shard.documents} documents.")
    if shard.bands is not None:
        map_signature_file(stem.with_suffix(".bands"), shard.documents)
    for suffix, checksum in shard.checksums.items():
        # The blocks of these are hashed with the tokens; .sums files are compared as a whole.
        if suffix not in (".bin", ".sums", ".blobsums", ".parquet"):
            faults += _list_checksum_faults(stem.with_suffix(suffix), checksum)
    faults += [
        f"{path}: the manifest does not list it."
        for path in map(
            stem.with_suffix,
            (".mask", ".weights", ".pairs", ".bands", ".media", ".blobs", ".blobsums", ".fields", ".parquet"),
        )
        if path.suffix not in shard.checksums and path.exists()
    ]
    faults += _list_mask_faults(stem, shard) + _list_media_faults(stem, shard, lengths)
    faults += _list_column_faults(stem.with_suffix(".parquet"), shard)
    faults += _list_field_faults(stem, shard)
    view = map_file(stem.with_suffix(".bin"))
    if len(view) != shard.bytes:
        return [*faults, f"{stem}.bin: has {len(view)} bytes, the manifest says {shard.bytes}."]
    checksums = BlockChecksums()
    lowest, highest, digest = _scan_tokens(view, dtype, on_bytes_read, checksums)
    if digest != shard.bin:
        faults.append(f"{stem}.bin: checksum differs from the manifest's.")
    else:
        for suffix in (".mask", ".weights"):
            if suffix in shard.checksums:
                checksums.append_file(stem.with_suffix(suffix))
        faults += _list_block_checksum_faults(stem.with_suffix(".sums"), shard.sums, checksums)
    return faults + _list_range_faults(f"{stem}.bin", lowest, highest, manifest.tokenizer.vocab_size)


def _list_checksum_faults(path: Path, expected_checksum: str | None) -> list[str]:
    if compute_checksum(map_file(path)) == expected_checksum:
        return []
    return [f"{path}: checksum differs from the manifest's."]


def _scan_tokens(
    view: memoryview,
    dtype: np.dtype[np.generic],
    on_bytes_read: Callable[[int], None] | None = None,
    checksums: BlockChecksums | None = None,
) -> tuple[int, int, str]:
    """Return the lowest and highest id of a ``.bin`` (0 if empty) and its checksum."""
    digest = xxhash.xxh3_128()
    ranges = []
    for begin in range(0, len(view), _CHUNK_BYTES):
        block = view[begin : begin + _CHUNK_BYTES]
        digest.update(block)
        if checksums:
            checksums.append(block)
        ids = np.frombuffer(block, dtype)
        ranges.append((int(ids.min()), int(ids.max())))
        if on_bytes_read:
            on_bytes_read(len(block))
    lowest = min((low for low, _ in ranges), default=0)
    return lowest, max((high for _, high in ranges), default=0), digest.hexdigest()


def _list_range_faults(name: str, lowest: int, highest: int, vocabulary: int | None) -> list[str]:
    """List a fault if an id is negative or outside a known vocabulary."""
    if lowest < 0:
        return [f"{name}: holds negative token ids ({lowest})."]
    if vocabulary is not None and highest >= vocabulary:
        return [f"{name}: holds token id {highest}; the vocabulary has ids 0 to {vocabulary - 1}."]
    return []


def _list_mask_faults(stem: Path, shard: ShardEntry) -> list[str]:
    path = stem.with_suffix(".mask")
    mask = None if shard.mask is None else map_mask(path, shard.tokens)
    faults = []
    if mask is not None and not mask.count() == mask.trained == shard.trained:
        counts = f"{mask.count():,} bits are set, its header says {mask.trained:,} trained tokens, the manifest"
        faults.append(f"{path}: {counts} {shard.trained:,}.")
    if shard.weights is None:
        return faults
    path = stem.with_suffix(".weights")
    weights = map_weights(path, shard.tokens)
    for start in range(0, shard.tokens, _CHUNK_BYTES):
        stop = min(start + _CHUNK_BYTES, shard.tokens)
        trained = np.ones(stop - start, bool) if mask is None else mask.slice(start, stop)
        if not np.array_equal(weights.slice(start, stop) != 0, trained):
            faults.append(f"{path}: its weights of 0 are not the untrained tokens of the shard.")
            break
    if weights.trained != shard.trained_tokens:
        faults.append(
            f"{path}: its header says {weights.trained:,} trained tokens, the manifest {shard.trained_tokens:,}."
        )
    return faults


def _list_media_faults(stem: Path, shard: ShardEntry, lengths: NDArray[np.uint32]) -> list[str]:
    path = stem.with_suffix(".media")
    blobs = stem.with_suffix(".blobs")
    if shard.media is None:
        return []
    media = map_media(path, shard.documents)
    faults = []
    ends = media.rows["start"].astype(np.int64) + media.rows["tokens"]
    if (ends > lengths[media.rows["document"]]).any():
        faults.append(f"{path}: media extend past the end of their documents.")
    if shard.blobs is not None:
        faults += _list_block_checksum_faults(
            stem.with_suffix(".blobsums"), shard.blobsums, compute_file_checksums(blobs)
        )
    for file_path, expected_size in ((path, shard.media_bytes), (blobs, shard.blobs_bytes)):
        if expected_size is not None and len(map_file(file_path)) != expected_size:
            faults.append(f"{file_path}: has {len(map_file(file_path)):,} bytes, the manifest says {expected_size:,}.")
    stored_media = media.rows[media.rows["blob"] != NOT_STORED]
    if len(stored_media):
        size = len(map_file(blobs))
        end = int((stored_media["blob"] + stored_media["size"]).max())
        if end != size:
            faults.append(f"{blobs}: has {size:,} bytes, its media end at {end:,}.")
    elif blobs.exists():
        faults.append(f"{blobs}: no medium of its shard is stored in it.")
    return faults


def _list_column_faults(path: Path, shard: ShardEntry) -> list[str]:
    """List the faults of a shard's ``.parquet``, parsed only if its checksum is right."""
    if shard.parquet is None:
        return []
    data = map_file(path)
    if compute_checksum(data) != shard.parquet:
        return [f"{path}: checksum differs from the manifest's."]
    faults = []
    if len(data) != shard.parquet_bytes:
        faults.append(f"{path}: has {len(data):,} bytes, the manifest says {shard.parquet_bytes:,}.")
    try:
        read_columns(path, data, shard.documents, np.empty(0, np.int64))
    except StoreError as error:
        faults.append(str(error))
    return faults


def _list_field_faults(stem: Path, shard: ShardEntry) -> list[str]:
    """List the faults of a shard's ``.fields``; stop at the first unfit document."""
    if shard.fields is None:
        return []
    path = stem.with_suffix(".fields")
    fields = map_fields(path, shard.documents)
    size = len(map_file(path))
    faults = []
    if size != shard.fields_bytes:
        faults.append(f"{path}: has {size:,} bytes, the manifest says {shard.fields_bytes:,}.")
    for document in range(shard.documents):
        if "prompt" not in fields.read(document):
            return [*faults, f"{path}: document {document} carries no prompt."]
    return faults


def _list_block_checksum_faults(path: Path, expected_checksum: str | None, checksums: BlockChecksums) -> list[str]:
    """List a fault if a ``.sums`` does not match its file."""
    data, head = checksums.to_bytes()
    if map_file(path) == data and head == expected_checksum:
        return []
    return [f"{path}: does not match its file or the manifest."]


def _list_pair_faults(stem: Path, shard: ShardEntry, manifest: Manifest, last: int) -> tuple[list[str], int]:
    """List the faults of a shard's ``.pairs``; also return its last pair number."""
    path = stem.with_suffix(".pairs")
    faults = []
    sides = map_pair_index(path, shard.documents, manifest.objective)
    provenance = map_provenance(stem.with_suffix(".docs"))
    if not np.array_equal(sides.pairs, compute_pair_numbers(provenance.parts, provenance.records)):
        faults.append(f"{path}: its pairs do not match the records that its .docs names.")
    if shard.documents and int(sides.pairs[0]) <= last:
        faults.append(f"{path}: its first pair is not after the pairs of the shards before it.")
    return faults, int(sides.pairs[-1]) if shard.documents else last


def _check_content(
    folder: Path, manifest: Manifest, verdict: VerificationResult, open_subset: Callable[[str, int], Store]
) -> None:
    """Check the tokenizer, decode a document, and test the tokens for noise."""
    nonempty_subsets = [name for name, subset in manifest.subsets.items() if subset.documents]
    if not nonempty_subsets:
        verdict.faults.append(f"{folder}: holds no documents.")
        return
    store = open_subset(nonempty_subsets[0], manifest.generation)
    entry = manifest.tokenizer
    verdict.facts["tokenizer"] = f"{entry.name}, {entry.vocab_size:,} ids, {entry.fingerprint}"
    try:
        tokenizer = store.tokenizer
        for first in store.contents.list_first(1):
            verdict.sample = tokenizer.decode(store[first].ids[:_SAMPLED_IDS])
    except BatchloomError as error:
        verdict.faults.append(str(error))
        return
    # Declared synthetic data may look like noise.
    if not store.contents.synthetic:
        verdict.faults += _list_noise_faults(_draw_sample_ids(store), entry.vocab_size, str(folder))


def _draw_sample_ids(store: Store) -> NDArray[np.int64]:
    share = max(1, _NOISE_SAMPLE_TOKENS // 256)
    numbers = np.linspace(0, len(store) - 1, num=min(len(store), 256)).astype(np.int64)
    numbers = numbers[~mask_removed(store.contents.removed, numbers)]
    samples = [store[int(n)].ids[:share] for n in numbers]
    return np.concatenate(samples).astype(np.int64) if samples else np.empty(0, np.int64)


def _list_noise_faults(ids: NDArray[np.int64], vocabulary: int, name: str) -> list[str]:
    """List a fault if equal token pairs are hardly more frequent than by chance."""
    pairs = ids.size * (ids.size - 1) / 2
    if ids.size == 0 or int(ids.min()) < 0 or pairs / vocabulary < _NOISE_PAIRS:
        return []
    counts = np.unique(ids, return_counts=True)[1].astype(np.float64)
    factor = float((counts * (counts - 1)).sum() / 2 / (pairs / vocabulary))
    if factor < _NOISE_FACTOR:
        fault = (
            f"{name}: its tokens look like uniform noise (equal pairs {factor:.2f} times chance; text has "
            "hundreds): they are synthetic, or were written with another dtype."
        )
        return [fault]
    return []


def _list_older_faults(folder: Path, newest: Manifest) -> list[str]:
    """List the faults of the older generations, one sentence each.

    Files shared with ``newest`` are verified with it. This function verifies that an older generation
    has no other files except its removed documents, and that the histories agree.
    """
    faults = []
    last = newest.history[-1]
    own_entry = make_generation_entry(newest, last.made, last.selected)
    for name in own_entry.__struct_fields__:
        if getattr(own_entry, name) != getattr(last, name):
            faults.append(f"{folder}: its history contradicts the manifest of generation {last.number} ({name}).")
            break
    for number in newest.readable[:-1]:
        try:
            older = read_manifest(folder, number)
        except StoreError as error:
            faults.append(str(error))
            continue
        # Only later generations record the checksum of a generation's manifest.
        older_history, expected_history = (
            [replace(entry, manifest="") for entry in history]
            for history in (older.all_history, newest.history[:number])
        )
        if older_history != expected_history:
            faults.append(f"{folder}: generation {number} has another history than the newest.")
        for name, subset in older.subsets.items():
            newer = newest.subsets.get(name)
            layers = subset.all_layers
            if (
                newer is None
                or newer.shards[: len(subset.shards)] != subset.shards
                or newer.all_layers[: len(layers)] != layers
            ):
                faults.append(
                    f"{folder / name}: the newest generation does not start with the shards of generation {number}."
                )
            else:
                faults += _list_removed_faults(folder / name, subset)
        if older.sources != newest.sources[: len(older.sources)]:
            faults.append(f"{folder}: the newest generation does not start with the sources of generation {number}.")
        faults += [
            f"{folder / file}: missing, but generation {number} names it."
            for file in sorted(list_generation_files(older))
            if not (folder / file).exists()
        ]
    return faults


def _list_removed_faults(folder: Path, subset: SubsetEntry) -> list[str]:
    if subset.removed is None or subset.removed_file is None:
        return []
    path = folder / subset.removed_file
    try:
        if faults := _list_checksum_faults(path, subset.removed.file):
            return faults
        tokens = int(map_lengths(folder, subset).take(map_removed(folder, subset)).sum(dtype=np.int64))
    except StoreError as error:
        return [str(error)]
    if tokens != subset.removed.tokens:
        return [f"{path}: its documents have {tokens:,} tokens, the manifest says {subset.removed.tokens:,}."]
    return []


def _list_count_faults(folder: Path, manifest: Manifest) -> list[str]:
    """List the counts in a manifest that are wrong, one sentence each."""
    counts = manifest.counts
    subsets = manifest.subsets.values()
    sources = manifest.sources
    records = sum(part.records for source in sources for part in source.parts)
    stored_and_dropped = counts.documents + counts.quarantined + sum(counts.dropped.values()) - counts.further
    noun = "pairs" if manifest.objective == "pairs" else "documents"
    names = [name for name in list_sidecars(manifest) if name.startswith(_QUARANTINE_STEM)]
    quarantine = f"{QUARANTINE_NAME} has" if len(names) == 1 else "its quarantine files have"
    comparisons = [
        ("documents", counts.documents, "its subsets hold", sum(s.documents for s in subsets)),
        ("tokens", counts.tokens, "its subsets hold", sum(s.tokens for s in subsets)),
        ("records", counts.records, "the parts of its sources hold", records),
        ("records", counts.records, f"its {noun}, quarantined and dropped records together are", stored_and_dropped),
        ("quarantined records", counts.quarantined, quarantine, sum(_count_lines(folder / name) for name in names)),
    ]
    documents, tokens = _count_by_part(folder, manifest)
    part = 0
    own = "the documents that name it as their source"
    for source in sources:
        part_slice = slice(part, part := part + len(source.parts))
        comparisons += [
            (f"documents of {source.name}", source.documents, f"{own} are", int(documents[part_slice].sum())),
            (f"tokens of {source.name}", source.tokens, f"{own} hold", int(tokens[part_slice].sum())),
        ]
    strays = int(documents[part:].sum())
    comparisons.append(("documents of sources it does not list", 0, "its .docs files have", strays))
    return [
        f"{folder}: the manifest says {expected_count:,} {label}, {actual_phrase} {actual_count:,}; {_REMEDY}."
        for label, expected_count, actual_phrase, actual_count in comparisons
        if expected_count != actual_count
    ]


def _list_duplicate_faults(folder: Path, manifest: Manifest) -> list[str]:
    """List the faults of the files of dropped duplicates, which may be deleted."""
    remedy = "Restore it from a copy, or delete it (only view reads it)."
    faults = []
    counts = np.array([part.records for source in manifest.sources for part in source.parts], np.uint64)
    # A kept document may have been removed later, and is then missing after a compaction.
    is_compacted = any(entry.made == "compacted" for entry in manifest.all_history)
    total = 0
    path = folder
    for entry in manifest.all_history:
        try:
            duplicates = map_dropped_duplicates(folder, entry.number) if entry.has_inputs else None
        except StoreError as error:
            faults.append(f"{str(error).removesuffix(CHECK_REMEDY)}{remedy}")
            continue
        if duplicates is None:
            continue
        total += len(duplicates.rows)
        path = duplicates.path
        fault = duplicates.find_fault(counts)
        if not fault and not is_compacted and (missing := _count_missing_records(folder, manifest, duplicates)):
            fault = f"{missing:,} of its rows name a kept record that is not stored"
        if fault or not len(duplicates.rows):
            faults.append(f"{duplicates.path}: {fault or 'it has no rows'}. {remedy}")
    dropped = sum(count for reason, count in manifest.counts.dropped.items() if reason.endswith(" duplicate"))
    # A row is a record, which may hold several documents, and older generations have no rows.
    if not faults and total > dropped:
        faults.append(f"{path}: it has {total:,} rows, and preparation dropped {dropped:,} duplicates. {remedy}")
    return faults


def _count_missing_records(folder: Path, manifest: Manifest, duplicates: DroppedDuplicates) -> int:
    """Count the rows whose kept record has no document in the store."""
    is_stored = np.zeros(len(duplicates.rows), bool)
    for name, subset in manifest.subsets.items():
        for shard in subset.shards:
            provenance = map_provenance((folder / name / shard.name).with_suffix(".docs"))
            stored = np.sort(compute_pair_numbers(provenance.parts, provenance.records))
            if not len(stored):
                continue
            start = 0
            for run in duplicates.iter_runs():
                begin = bisect_left(run["kept"], stored[0])
                end = bisect_right(run["kept"], stored[-1], begin)
                kept = run["kept"][begin:end]
                # Every kept record of this range has a position: none is larger than the last stored one.
                is_stored[start + begin : start + end] |= stored[stored.searchsorted(kept)] == kept
                start += len(run)
    return int(np.count_nonzero(~is_stored))


def _count_by_part(folder: Path, manifest: Manifest) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Count documents and tokens of each part from the ``.docs``.

    The last element counts documents of unlisted parts.
    """
    parts = sum(len(source.parts) for source in manifest.sources)
    documents = np.zeros(parts + 1, np.int64)
    tokens = np.zeros(parts + 1, np.int64)
    for name, subset in manifest.subsets.items():
        lengths = map_lengths(folder / name, subset)
        start = 0
        for shard in subset.shards:
            provenance = map_provenance((folder / name / shard.name).with_suffix(".docs"))
            part_indices = np.minimum(provenance.parts, parts)
            shard_lengths = lengths.slice(start, start + shard.documents)
            start += shard.documents
            documents += np.bincount(part_indices, minlength=parts + 1)
            # bincount returns floats, which are exact up to 2**53, far more than the tokens of a shard.
            tokens += np.bincount(part_indices, shard_lengths, minlength=parts + 1).astype(np.int64)
    return documents, tokens


def _count_lines(path: Path) -> int:
    if not path.exists():
        return 0
    view = map_file(path)
    return sum(bytes(view[at : at + _CHUNK_BYTES]).count(b"\n") for at in range(0, len(view), _CHUNK_BYTES))


# Block cache for decoded documents; it is deleted with the temporary folder.
_CACHE_BYTES = 1 << 30
# Files of a shard that later checks need.
_RETAINED_SUFFIXES = (".docs",)


def verify_remote_store(
    url: str, progress: Callable[[int], None] | None = None, *, generation: int | None = None
) -> VerificationResult:
    """Verify a store at a URL as :func:`~batchloom.store.verify_store` does.

    Every byte is downloaded once, one shard at a time, to a temporary folder. Lengths and provenance stay there,
    40 bytes per document. Files that no manifest names are not searched for.

    Args:
        url: URL of the store's folder.
        progress: called with the number of bytes verified since the last call.
        generation: an older generation; None for the newest, including consistency of the older ones.

    Raises:
        StoreMissingError: there is no manifest.
        GenerationError: there is no such generation.
        InputError: the store cannot be reached.
    """
    base = url.rstrip("/")
    with tempfile.TemporaryDirectory(prefix="batchloom-check-") as scratch:
        folder = Path(scratch) / "store"
        copy = _StoreCopy(base, folder)
        try:
            open_remote_manifest(base)
        except StoreMissingError:
            raise
        except StoreError as error:
            faulty = VerificationResult(redact_url(base), "store", [str(error)], data="unknown")
            faulty.used = describe_use(faulty, {})
            return faulty
        copy.copy_store_files()

        def open_subset(subset: str, number: int) -> Store:
            cache = Path(scratch) / "blocks"
            return open_store(base, subset, generation=number, cache=cache, cache_limit=_CACHE_BYTES)

        verdict = verify_store(
            folder, progress, generation=generation, provide_shard=copy.provide_shard, open_subset=open_subset
        )
    # The faults name the URL instead of the copy.
    verdict.path = redact_url(base)
    verdict.faults = [fault.replace(str(folder), verdict.path) for fault in verdict.faults]
    verdict.used = verdict.used.replace(str(folder), verdict.path)
    return verdict


@final
class _StoreCopy:
    """Local copy of a remote store's files, downloaded when needed."""

    def __init__(self, base: str, folder: Path) -> None:
        self._base = base
        self._folder = folder

    def copy_store_files(self) -> None:
        self._copy_manifest(MANIFEST_NAME, None)
        try:
            manifest = read_manifest(self._folder)
        except StoreError:
            return  # The verification reports it.
        for number in manifest.readable[:-1]:
            self._copy_manifest(format_generation_name(number), number)
        names = {TOKENIZER_NAME, *list_sidecars(manifest)}
        if manifest.processor is not None:
            names.add(PROCESSOR_NAME)
        for number in manifest.readable:
            with contextlib.suppress(StoreError):
                generation_manifest = manifest if number == manifest.generation else read_manifest(self._folder, number)
                names |= list_generation_files(generation_manifest)
        shards = {f"{name}/{shard.name}" for name, subset in manifest.subsets.items() for shard in subset.shards}
        for name in sorted(names):
            if str(Path(name).with_suffix("")) not in shards:
                self._copy_file(name)

    @contextlib.contextmanager
    def provide_shard(self, stem: Path, entry: ShardEntry) -> Iterator[None]:
        paths = [stem.with_suffix(suffix) for suffix in entry.checksums]
        for path in paths:
            self._copy_file(path.relative_to(self._folder).as_posix())
        try:
            yield
        finally:
            for path in paths:
                if path.suffix not in _RETAINED_SUFFIXES and path.exists():
                    # A later check only tests that the file exists; an existing mapping keeps its bytes.
                    path.unlink()
                    path.touch()

    def _copy_manifest(self, name: str, generation: int | None) -> None:
        """Copy a manifest, retrying while the copy is damaged."""
        for attempt in range(MAX_FETCH_ATTEMPTS):
            self._copy_file(name, attempt)
            with contextlib.suppress(StoreError):
                read_manifest(self._folder, generation)
                return

    def _copy_file(self, name: str, attempt: int = 0) -> None:
        """Copy a file; the verification reports a missing one."""
        url = f"{self._base}/{name}"
        status = stat_remote(url)
        if status is None:
            return
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # The bytes of a stamp are cached: with its own stamp, an attempt does not get the bytes of an earlier one.
        stamp = status.st_mtime_ns + attempt
        with open_remote_file(url, status.st_size, stamp) as source, path.open("wb") as file:
            shutil.copyfileobj(source, file, _CHUNK_BYTES)
