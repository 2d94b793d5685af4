"""Names, numbers and dtypes of the store format; ``docs/format.md`` is the normative page."""

import re

import numpy as np
import xxhash

FORMAT_VERSION = 1
MANIFEST_NAME = "dataset_metadata.json"
TOKENIZER_NAME = "tokenizer_state.json"
PROCESSOR_NAME = "processor_state.json"
QUARANTINE_NAME = "quarantine.jsonl"
REPORT_NAME = "report.json"
PAGE_NAME = "report.html"
LENGTHS_NAME = "lengths.u32"
LENGTHS_CHECKSUMS_NAME = "lengths.sums"
# The manifests of older generations.
GENERATIONS_NAME = "generations"
# A folder with it is a store that is not finished, or that is being appended to.
WORK_NAME = ".work"
# In it; whoever prepares into the store holds it.
LOCK_NAME = "lock"
SUBSETS = ("train", "val", "test")
SHARD_NAME = re.compile(r"shard_\d{5,9}")
# Bytes of a manifest, or of another file that is read as one: docs/format.md has what large stores need.
SMALL_FILE_LIMIT = 512 << 20


# Megatron's IndexedDataset dtype codes (megatron/core/datasets/indexed_dataset.py, DType).
DTYPE_CODES: dict[int, np.dtype[np.generic]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
TOKEN_DTYPES: dict[str, np.dtype[np.generic]] = {
    "uint16": np.dtype("<u2"),
    "int32": np.dtype("<i4"),
}
# The highest vocabulary that Megatron itself stores in 16 bits (DType.optimal_dtype).
UINT16_VOCABULARY = 65_500
# The highest vocabulary whose ids 16 bits hold.
UINT16_IDS = 1 << 16


def choose_token_dtype(name: str, vocab_size: int) -> str:
    """The dtype name for ``auto|uint16|int32`` and a vocabulary of ``vocab_size`` ids."""
    if name == "auto":
        return "uint16" if vocab_size < UINT16_VOCABULARY else "int32"
    return name


def format_shard_name(number: int) -> str:
    """``shard_00017`` for 17; more digits above 99,999."""
    return f"shard_{number:05d}"


def format_generation_file_name(name: str, generation: int) -> str:
    """``lengths.00002.u32`` for ``lengths.u32`` of generation 2; the first generation's files have plain names."""
    stem, dot, ending = name.partition(".")
    return name if generation == 1 else f"{stem}.{generation:05d}{dot}{ending}"


def format_removed_name(generation: int) -> str:
    """The file of a subset that names the documents removed by a generation and those before it."""
    return f"removed.{generation:05d}.u64"


def format_generation_name(generation: int) -> str:
    """Where the manifest of an older generation lies inside its store."""
    return f"{GENERATIONS_NAME}/{generation:05d}.json"


def compute_checksum(data: bytes | memoryview) -> str:
    """XXH3-128 of ``data`` as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)
