"""Names, limits and dtypes of the store format.

``docs/reference/format.md`` is the specification.
"""

import os
import re
from pathlib import Path

import numpy as np
import xxhash

from batchloom.core.errors import StoreMissingError
from batchloom.core.files import describe_missing_path
from batchloom.core.settings import suggest
from batchloom.core.synthetic_data import SYNTHETIC_NAMES
from batchloom.core.wording import format_count, format_list

FORMAT_VERSION = 1
MANIFEST_NAME = "dataset_metadata.json"
TOKENIZER_NAME = "tokenizer_state.json"
PROCESSOR_NAME = "processor_state.json"
QUARANTINE_NAME = "quarantine.jsonl"
REPORT_NAME = "report.json"
PAGE_NAME = "report.html"
# Part of the report: the records that were dropped as duplicates.
DUPLICATES_NAME = "report.duplicates"
LENGTHS_NAME = "lengths.u32"
LENGTHS_CHECKSUMS_NAME = "lengths.sums"
# Folder of the manifests of older generations.
GENERATIONS_NAME = "generations"
# A folder that contains it is an unfinished store, or one with an append in progress.
WORK_NAME = ".work"
# A file in WORK_NAME, locked by the process that prepares into the store.
LOCK_NAME = "lock"
SUBSETS = ("train", "val", "test")
SHARD_NAME = re.compile(r"shard_\d{5,9}")
# Byte limit of a manifest and of other files read into memory.
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
TOKEN_DTYPES: dict[str, np.dtype[np.generic]] = {"uint16": np.dtype("<u2"), "int32": np.dtype("<i4")}
# Megatron stores smaller vocabularies in 16 bits (DType.optimal_dtype).
UINT16_VOCABULARY = 65_500
# Largest vocabulary whose ids fit into 16 bits.
UINT16_IDS = 1 << 16
_MAX_LISTED = 4


def choose_token_dtype(name: str, vocab_size: int) -> str:
    """Resolve ``auto``, ``uint16`` or ``int32`` to a dtype name by vocabulary size."""
    if name == "auto":
        return "uint16" if vocab_size < UINT16_VOCABULARY else "int32"
    return name


def format_shard_name(number: int) -> str:
    """Return ``shard_00017`` for 17; numbers above 99,999 have more digits."""
    return f"shard_{number:05d}"


def format_generation_file_name(name: str, generation: int) -> str:
    """Return the name of a file of a generation.

    ``lengths.u32`` becomes ``lengths.00002.u32`` in generation 2 and keeps its name in generation 1.
    """
    stem, dot, ending = name.partition(".")
    return name if generation == 1 else f"{stem}.{generation:05d}{dot}{ending}"


def format_removed_name(generation: int) -> str:
    """Return the name of the file that lists all documents removed up to a generation."""
    return f"removed.{generation:05d}.u64"


def format_generation_name(generation: int) -> str:
    """Return the path of an older generation's manifest inside its store."""
    return f"{GENERATIONS_NAME}/{generation:05d}.json"


def compute_checksum(data: bytes | memoryview) -> str:
    """Return the XXH3-128 of ``data`` as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


def make_missing_store_error(path: Path) -> StoreMissingError:
    """Build the error for a path without a store; ``path`` is quoted as given."""
    try:
        return StoreMissingError(describe_partial_store(path) or _describe_missing_store(path))
    except OSError:
        # Without read permission the cause cannot be determined.
        return StoreMissingError(f"There is no readable store at {path}.")


def resolve_store_folder(path: str | os.PathLike[str]) -> Path:
    folder = Path(path).absolute()
    try:
        is_missing = not (folder / MANIFEST_NAME).exists()
    except OSError:
        # An unreadable folder gets a more exact error when the manifest is read.
        is_missing = False
    if is_missing:
        raise make_missing_store_error(Path(path))
    return folder


def describe_partial_store(path: Path) -> str:
    """Describe the remedy for an incomplete store or a subset folder.

    Returns an empty string for any other path.
    """
    if (path / WORK_NAME).is_dir():
        return f"{path} is an unfinished store; give its prepare command again to continue."
    if path.name in SUBSETS and path.is_dir() and (path.parent / MANIFEST_NAME).is_file():
        return f"{path} is a subset of a store; name the store itself: {path.parent}"
    if not (path / MANIFEST_NAME).exists() and any((path / name / LENGTHS_NAME).is_file() for name in SUBSETS):
        return f"{path} is a store whose {MANIFEST_NAME} is missing: restore that file, or prepare the store again."
    return ""


def _describe_missing_store(path: Path) -> str:
    lead = f"{'No training shards found in' if path.is_dir() else 'There is no store at'} {path}: "
    if path.suffix in (".bin", ".idx") and path.is_file():
        partner_path = path.with_suffix(".idx" if path.suffix == ".bin" else ".bin")
        return f"{lead}a Megatron prefix is a pair of files, and {partner_path.name} is missing."
    if path.suffix in (".yaml", ".yml") and path.is_file():
        return f"{lead}this is a YAML file. If it names stores and weights, it is a mixture: --mixture {path}"
    stores = sorted(manifest.parent.name for manifest in path.glob(f"*/{MANIFEST_NAME}"))
    if stores:
        count = format_count(len(stores), "store")
        return f"{path} is a folder of {count}: name one of them ({format_list(stores, _MAX_LISTED)}), or a mixture."
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        kind = "file" if path.is_file() else f"folder without {MANIFEST_NAME}"
        return (
            f"{lead}this is a {kind}. If it holds text, make a store of it: batchloom prepare "
            f"{path} --out STORE; batchloom train also reads it directly: --input-file {path}"
        )
    if path.is_dir():
        return f"{lead}the folder is empty. Make one with: batchloom prepare INPUT... --out {path}"
    if path.exists():
        return f"{lead}this is a pipe or a device. Name the folder that batchloom prepare made."
    message = describe_missing_path(
        str(path),
        f"name a store (batchloom prepare INPUT... --out {path} makes one), or a Megatron prefix without its ending",
    )
    synthetic = suggest(str(path).partition(":")[0], SYNTHETIC_NAMES)
    return f"{message[:-1]}{synthetic}" if synthetic and message.endswith("ending.") else message
