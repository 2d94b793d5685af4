"""Stores for benchmarks: log-normal document lengths (mean of log 6.2, sigma 1.1)."""

import shutil
from pathlib import Path

import numpy as np

from batchloom.core.fingerprint import encode_canonical
from batchloom.core.loss_weights import LossFlags
from batchloom.remote import BLOCK_BYTES
from batchloom.store import (
    MANIFEST_NAME,
    Manifest,
    PartEntry,
    ShardEntry,
    compute_block_checksums,
    encode_manifest,
    write_file,
)
from batchloom.store.format import (
    FORMAT_VERSION,
    HEADER,
    PLAIN_ENTRY_BYTES,
    TOKENIZER_NAME,
    ProvenanceTable,
    SourceEntry,
    StoreCounts,
    SubsetEntry,
    compute_checksum,
    count_blocks,
    encode_index,
    format_shard_name,
    make_tokenizer_entry,
    seal_manifest,
)
from batchloom.store.format.block_checksums import SUMS_MAGIC
from batchloom.store.write import LengthsWriter, ShardWriter
from batchloom.tokens import resolve_tokenizer

VOCABULARY = 50_257
SHARD_TOKENS = 100_000_000


def lengths(documents: int, seed: int = 0) -> np.ndarray:
    """Draw document lengths in tokens, uint32 [documents]."""
    drawn = np.random.default_rng(seed).lognormal(6.2, 1.1, documents)
    return np.clip(drawn, 1, None).astype(np.uint32)


def make_store(folder: Path, documents: int, *, sparse: bool = False, seed: int = 0) -> Path:
    """Make a store of skewed random ids; ``sparse`` leaves ``.bin`` files as holes."""
    shutil.rmtree(folder, ignore_errors=True)
    train = folder / "train"
    train.mkdir(parents=True)
    all_lengths = lengths(documents, seed)
    ends = np.cumsum(all_lengths, dtype=np.int64)
    entries = []
    writer = LengthsWriter(train)
    writer.append(all_lengths)
    stated, sums = writer.finish()
    start = 0
    while start < documents:
        base = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, base + SHARD_TOKENS, side="right")))
        entries.append(_shard(train / format_shard_name(len(entries)), all_lengths[start:stop], sparse, seed))
        start = stop
    tokenizer = resolve_tokenizer("gpt2")
    write_file(folder / TOKENIZER_NAME, encode_canonical(tokenizer.state()))
    tokens = int(ends[-1])
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        generation=1,
        dtype="uint16",
        tokenizer=make_tokenizer_entry(tokenizer),
        recipe={},
        recipe_fingerprint="",
        counts=StoreCounts(documents, documents, tokens, 0, {}),
        subsets={
            "train": SubsetEntry(documents=documents, tokens=tokens, lengths=stated, shards=tuple(entries), sums=sums)
        },
        subset_overrides={},
        sources=(
            SourceEntry(
                "synthetic",
                "jsonl",
                tokens,
                "",
                documents,
                tokens,
                "absent",
                "absent",
                (PartEntry(0, tokens, documents),),
            ),
        ),
    )
    write_file(folder / MANIFEST_NAME, encode_manifest(seal_manifest(manifest)))
    return folder


def _zero_sums(stem: Path, size: int) -> str:
    """Write the .sums of a .bin of zeros without reading it; return its head checksum."""
    entries = np.full(count_blocks(size), compute_block_checksums(bytes(BLOCK_BYTES))[0])
    if size % BLOCK_BYTES:
        entries[-1] = compute_block_checksums(bytes(size % BLOCK_BYTES))[0]
    head = HEADER.pack(SUMS_MAGIC, 1, len(entries), PLAIN_ENTRY_BYTES) + compute_block_checksums(entries.data).tobytes()
    head += bytes(-len(head) % BLOCK_BYTES)
    write_file(stem.with_suffix(".sums"), head + entries.tobytes())
    return compute_checksum(head)


def _shard(stem: Path, shard_lengths: np.ndarray, sparse: bool, seed: int) -> ShardEntry:
    count, tokens = len(shard_lengths), int(shard_lengths.sum())
    if sparse:
        bin_path = stem.with_suffix(".bin")
        with bin_path.open("wb") as file:
            file.truncate(2 * tokens)
        write_file(stem.with_suffix(".idx"), encode_index(shard_lengths, np.dtype("<u2")))
        named = f"{int(stem.name[-5:]) + 1:032x}"
        return ShardEntry(
            name=stem.name, documents=count, tokens=tokens, bytes=2 * tokens,
            bin=f"1{named[1:]}", idx="0" * 32, docs=f"2{named[1:]}", sums=_zero_sums(stem, 2 * tokens),
        )  # fmt: skip
    rng = np.random.default_rng(seed + 1)
    writer = ShardWriter(stem, np.dtype("<u2"))
    # The cube of a uniform draw is skewed towards small ids, like real text.
    left = tokens
    while left:
        size = min(left, 1 << 24)
        chunk = (rng.random(size, dtype=np.float32) ** 3 * VOCABULARY).astype("<u2")
        writer.append(chunk, LossFlags.all_trained(size))
        left -= size
    numbers = np.arange(count, dtype=np.uint64)
    origins = ProvenanceTable(np.stack([numbers, numbers], 1), numbers, numbers, np.zeros(count, np.uint32))
    return writer.finish(shard_lengths, origins)
