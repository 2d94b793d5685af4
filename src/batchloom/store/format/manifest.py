"""The manifest of a store, ``dataset_metadata.json``: written last, read first.

It holds only what follows from inputs and recipe: no times, speeds, absolute paths or
worker counts. The same job writes the same bytes on any machine.
"""

import re
from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import msgspec
import xxhash
from msgspec.structs import replace

from batchloom.core.errors import GenerationError, StoreError
from batchloom.core.files import JSON_DECODE_ERRORS, describe_os_error, read_regular_file
from batchloom.core.fingerprint import fingerprint
from batchloom.store.format.layout import (
    FORMAT_VERSION,
    LENGTHS_CHECKSUMS_NAME,
    LENGTHS_NAME,
    MANIFEST_NAME,
    SHARD_NAME,
    SMALL_FILE_LIMIT,
    SUBSETS,
    TOKEN_DTYPES,
    compute_checksum,
    format_generation_file_name,
    format_generation_name,
    format_removed_name,
    make_missing_store_error,
)
from batchloom.store.format.objectives import OBJECTIVES, ObjectiveName
from batchloom.tokens import Tokenizer

# Limit of list and object elements. It bounds memory: a decoded `[]` takes 30 times its two bytes.
_VALUE_LIMIT = 1 << 25
_MAX_RECORDS = 1 << 50
_RESTORE_REMEDY = "restore it from a copy, or prepare the data again"
_CHECKSUM_PATTERN = re.compile(rb',\n "checksum": "([0-9a-f]{32})"\n}\n\Z')
_CHECKSUM_BYTES = 64
GenerationKind = Literal["prepared", "appended", "removed", "compacted"]
# The upper bounds keep products of counts with the bytes of a row or token below 2**63.
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
# XXH3-128 in hex digits.
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]*$", min_length=32, max_length=32)]


class LayerEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Documents that one generation added to a subset.

    ``lengths`` is the XXH3-128 of the lengths file; ``sums`` is the checksum of the header of its ``.sums``.
    """

    generation: Count
    documents: Count
    lengths: Digest
    sums: Digest


class RemovedEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Removed documents of a subset, with their tokens and trained tokens.

    ``generation`` is part of the file name, ``file`` is the XXH3-128 of the file.
    """

    generation: Count
    documents: Count
    tokens: Size
    trained: Size
    file: Digest


class GenerationEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """History entry of one generation.

    ``documents``, ``tokens`` and ``fingerprints`` are those of each subset after this generation, without removed
    documents; ``sources`` is the number of sources at that time. ``recipe`` and its fingerprint are present if a job
    read inputs. ``selected`` holds the source names given to a removal. ``manifest`` is the XXH3-128 of this
    generation's manifest, which every later generation records.
    """

    number: Count
    made: GenerationKind
    documents: dict[str, Count]
    tokens: dict[str, Size]
    fingerprints: dict[str, str]
    sources: Count
    recipe: dict[str, Any] = {}
    recipe_fingerprint: str = ""
    selected: tuple[str, ...] = ()
    manifest: str = ""

    @property
    def has_inputs(self) -> bool:
        """True if a job read inputs for this generation."""
        return self.made in ("prepared", "appended")


# Fields of a shard's entry that are the checksum of the file with this suffix.
_SHARD_FILES = (
    "bin",
    "idx",
    "docs",
    "mask",
    "weights",
    "pairs",
    "bands",
    "sums",
    "media",
    "blobs",
    "blobsums",
    "fields",
    "parquet",
)


class ShardEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One shard: its name without suffix, its counts and the XXH3-128 of each file.

    Optional fields: ``mask`` and ``trained`` (tokens) are present only if some token is not trained, ``weights`` only
    if some token has another loss weight than 0 and 1, ``pairs`` only in stores of preferences, prompts and labelled
    steps, ``fields`` only if documents carry columns, ``bands`` only with near deduplication, ``parquet`` only if
    records have columns. ``sums`` and ``blobsums`` are the checksums of the headers of these files. ``media`` is
    present only if documents hold media, ``blobs`` and ``blobsums`` only if the store holds the bytes of some.
    ``media_bytes``, ``blobs_bytes``, ``fields_bytes`` and ``parquet_bytes`` are the sizes of these files.
    """

    name: str
    documents: Count
    tokens: Size
    bytes: Size
    bin: Digest
    idx: Digest
    docs: Digest
    mask: Digest | None = None
    trained: Size | None = None
    pairs: Digest | None = None
    bands: Digest | None = None
    sums: Digest
    media: Digest | None = None
    media_bytes: Count | None = None
    blobs: Digest | None = None
    blobs_bytes: Size | None = None
    blobsums: Digest | None = None
    fields: Digest | None = None
    fields_bytes: Count | None = None
    parquet: Digest | None = None
    parquet_bytes: Count | None = None
    weights: Digest | None = None

    @property
    def checksums(self) -> dict[str, str]:
        """Checksum of each file that the shard has, by suffix."""
        checksums = {f".{name}": getattr(self, name) for name in _SHARD_FILES}
        return {suffix: checksum for suffix, checksum in checksums.items() if checksum is not None}

    @property
    def trained_tokens(self) -> int:
        """Number of trained tokens; without a mask, all tokens are trained."""
        return self.tokens if self.trained is None else self.trained

    @property
    def contradicts_itself(self) -> bool:
        """True if a file is listed without its size or count, or these without it."""
        pairs = (
            (self.mask, self.trained),
            (self.media, self.media_bytes),
            (self.blobs, self.blobs_bytes),
            (self.blobs, self.blobsums),
            (self.fields, self.fields_bytes),
            (self.parquet, self.parquet_bytes),
        )
        return any((file is None) != (fact is None) for file, fact in pairs)


class SubsetEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One subset (``train``, ``val``, ``test``): counts, lengths checksum and shards.

    ``layers`` is empty if all documents are of generation 1; otherwise ``lengths`` is the checksum
    of the first layer. ``sums`` is the checksum of the header of the ``.sums`` of these lengths. The counts include
    documents in ``removed``.
    """

    documents: Count
    tokens: Size
    lengths: Digest
    shards: tuple[ShardEntry, ...]
    layers: tuple[LayerEntry, ...] = ()
    removed: RemovedEntry | None = None
    sums: Digest

    @property
    def all_layers(self) -> tuple[LayerEntry, ...]:
        """Layers of the subset, including an implicit single one."""
        return self.layers or (LayerEntry(1, self.documents, self.lengths, self.sums),)

    @property
    def length_files(self) -> tuple[str, ...]:
        """Names of the lengths files, one per layer."""
        return tuple(format_generation_file_name(LENGTHS_NAME, layer.generation) for layer in self.all_layers)

    @property
    def length_checksum_files(self) -> tuple[str, ...]:
        """Names of the lengths' checksum files, one per layer."""
        return tuple(format_generation_file_name(LENGTHS_CHECKSUMS_NAME, layer.generation) for layer in self.all_layers)

    @property
    def removed_file(self) -> str | None:
        """Name of the file of removed documents; None if none are removed."""
        return None if self.removed is None else format_removed_name(self.removed.generation)

    @property
    def remaining_counts(self) -> tuple[int, int]:
        """Documents and tokens without removed documents."""
        removed_entry = self.removed
        return (
            self.documents - (removed_entry.documents if removed_entry else 0),
            self.tokens - (removed_entry.tokens if removed_entry else 0),
        )

    @property
    def trained_tokens(self) -> int:
        """Number of trained tokens without those of removed documents."""
        trained = sum(shard.trained_tokens for shard in self.shards)
        return trained - (self.removed.trained if self.removed else 0)


class PartEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A byte range [start, stop) of a source that one unit read, and its records."""

    start: Size
    stop: Size
    records: Count


class SourceEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """One input file: name relative to the inputs, counts, and end tokens.

    ``hash`` is the XXH3-128 of the digests of its parts, each the XXH3-128 of the part's
    bytes after decompression. ``bos`` and ``end`` are ``added``, ``present`` or ``absent``.
    ``detected`` says which columns became documents; empty for text files. ``conversations``
    says whether the documents are conversations. ``preferences`` is ``pairs`` (a chosen and a rejected
    answer), ``labels`` (labelled answers), ``prompts`` or absent.
    ``revision`` is the commit of the repository the file was read from, if any. ``dataset`` is the name given to
    the input it belongs to, and ``weight`` the given weight of that input; both are absent if not given.
    ``damage`` describes the damage of a file that was left out: its one part has no bytes.
    """

    name: str
    kind: str
    bytes: Size
    hash: str
    documents: Count
    tokens: Size
    bos: str
    end: str
    parts: tuple[PartEntry, ...]
    detected: str = ""
    conversations: bool = False
    preferences: str = ""
    revision: str = ""
    dataset: str = ""
    weight: Annotated[float, msgspec.Meta(gt=0)] | None = None
    damage: str = ""


class TokenizerEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Name and fingerprint of the tokenizer, and the engine that encoded."""

    name: str
    fingerprint: str
    vocabulary_hash: str
    vocab_size: Count
    end_id: int
    bos_id: int | None
    engine: str
    engine_version: str


class ProcessorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Class name, fingerprint and state checksum of the media processor."""

    name: str
    fingerprint: str
    state: str


class StoreCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Record and document counts; ``dropped`` counts dropped documents by reason.

    ``further`` counts the documents beyond one per record, stored or dropped, of records that gave several;
    ``truncated`` the records whose documents were cut to the maximum tokens, before duplicates were removed.
    """

    records: Count
    documents: Count
    tokens: Size
    quarantined: Count
    dropped: dict[str, Count]
    further: Count = 0
    truncated: Count = 0


# A cleaning step: its name, mapped to its settings.
_CleanStepShape = Annotated[dict[str, dict[str, Any]], msgspec.Meta(min_length=1, max_length=1)]


class _ReadingShape(msgspec.Struct):
    clean: list[str | _CleanStepShape] = []


class _RecipeShape(msgspec.Struct):
    """Types of the recipe's values that are used before a Recipe checks them all."""

    inputs: list[str] = []
    sources: list[dict[str, Any]] | None = None
    reading: _ReadingShape | None = None
    val_fraction: float | None = None
    test_fraction: float | None = None


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Content of ``dataset_metadata.json``; the format page documents each field.

    ``checksum`` is the XXH3-128 of the file without this field, which is the last one; empty until it is sealed.
    """

    format_version: int
    generation: Count
    dtype: str
    tokenizer: TokenizerEntry
    recipe: dict[str, Any]
    recipe_fingerprint: str
    counts: StoreCounts
    subsets: dict[str, SubsetEntry]
    subset_overrides: dict[Digest, str]
    sources: tuple[SourceEntry, ...]
    history: tuple[GenerationEntry, ...] = ()
    processor: ProcessorEntry | None = None
    checksum: str = ""

    @property
    def all_history(self) -> tuple[GenerationEntry, ...]:
        """Generations of the store, including an implicit single one."""
        return self.history or (make_generation_entry(self, "prepared"),)

    @property
    def readable(self) -> tuple[int, ...]:
        """Numbers of the generations since the last compaction, which can be opened."""
        numbers: list[int] = []
        for entry in self.all_history:
            numbers = [entry.number] if entry.made == "compacted" else [*numbers, entry.number]
        return tuple(numbers)

    def list_sources_of(self, entry: GenerationEntry) -> tuple[SourceEntry, ...]:
        """List the sources that a generation of the history added."""
        source_counts = [
            history_entry.sources for history_entry in self.all_history if history_entry.number < entry.number
        ]
        return self.sources[source_counts[-1] if source_counts else 0 : entry.sources]

    @property
    def objective(self) -> ObjectiveName:
        """``pairs``, ``labels``, ``prompts`` or ``steps``; empty for other documents."""
        names = {source.preferences for source in self.sources if source.documents}
        return cast("ObjectiveName", next((name for name in OBJECTIVES if name in names), ""))


def compute_subset_fingerprint(manifest: Manifest, subset: str) -> str:
    """Return the fingerprint of a subset's content, as the format page defines it."""
    entry = manifest.subsets[subset]
    removed_field = {"removed": entry.removed.file} if entry.removed else {}
    return fingerprint(
        {
            "format_version": FORMAT_VERSION,
            "dtype": manifest.dtype,
            "tokenizer": manifest.tokenizer.fingerprint,
            "subset": subset,
            "shards": [
                [s.documents, s.tokens, s.bin, s.idx]
                + ([s.mask] if s.mask else [])
                + ([f"weights:{s.weights}"] if s.weights else [])
                + ([f"pairs:{s.pairs}"] if s.pairs else [])
                + ([f"media:{s.media}"] if s.media else [])
                + ([f"fields:{s.fields}"] if s.fields else [])
                for s in entry.shards
            ],
            **removed_field,
        }
    )


def make_generation_entry(manifest: Manifest, kind: GenerationKind, selected: tuple[str, ...] = ()) -> GenerationEntry:
    """Build the history entry of a manifest's own generation."""
    entry = GenerationEntry(
        number=manifest.generation,
        made=kind,
        documents={name: entry.remaining_counts[0] for name, entry in manifest.subsets.items()},
        tokens={name: entry.remaining_counts[1] for name, entry in manifest.subsets.items()},
        fingerprints={name: compute_subset_fingerprint(manifest, name) for name in manifest.subsets},
        sources=len(manifest.sources),
        selected=selected,
    )
    if not entry.has_inputs:
        return entry
    return replace(entry, recipe=manifest.recipe, recipe_fingerprint=manifest.recipe_fingerprint)


def compute_filtered_fingerprint(subset_fingerprint: str, media: str) -> str:
    """Return the fingerprint of a subset filtered by ``media``; empty filters nothing."""
    return fingerprint([subset_fingerprint, {"media": media}]) if media else subset_fingerprint


def find_generation(manifest: Manifest, subset: str, target_fingerprint: str, media: str = "") -> int | None:
    """Return the first generation whose subset has a fingerprint; None if none has."""
    numbers = [
        entry.number
        for entry in manifest.all_history
        if (subset_fingerprint := entry.fingerprints.get(subset))
        and compute_filtered_fingerprint(subset_fingerprint, media) == target_fingerprint
    ]
    # If the oldest match was compacted away, a newer generation with the same content is used.
    return next((n for n in numbers if n in manifest.readable), numbers[0] if numbers else None)


def make_tokenizer_entry(tokenizer: Tokenizer) -> TokenizerEntry:
    """Build the manifest entry of a tokenizer."""
    return TokenizerEntry(
        name=tokenizer.name,
        fingerprint=tokenizer.fingerprint,
        vocabulary_hash=tokenizer.vocabulary_hash,
        vocab_size=tokenizer.vocab_size,
        end_id=tokenizer.end_id,
        bos_id=tokenizer.bos_id,
        engine=tokenizer.engine.name,
        engine_version=tokenizer.engine.version,
    )


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode a manifest as indented JSON, fields in the order of the class."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def compute_content_checksum(manifest: Manifest) -> str:
    """Return the XXH3-128 of a manifest's bytes without its own checksum."""
    return compute_checksum(encode_manifest(replace(manifest, checksum="")))


def seal_manifest(manifest: Manifest) -> Manifest:
    """Return the manifest with its checksum; every manifest is sealed before writing."""
    sealed = replace(manifest, checksum=compute_content_checksum(manifest))
    size = len(encode_manifest(sealed))
    if size > SMALL_FILE_LIMIT:
        raise StoreError(
            f"The manifest of this store would have {size:,} bytes; the limit is {SMALL_FILE_LIMIT:,}. Give fewer, "
            "larger input files (records of JSON Lines), larger shards (--tokens-per-shard), or make several stores."
        )
    return sealed


def split_checksum(data: bytes) -> tuple[str, str]:
    """Return the checksum of a manifest's content, and the recorded one or ""."""
    match = _CHECKSUM_PATTERN.search(data[-_CHECKSUM_BYTES:])
    if match is None:
        return compute_checksum(data), ""
    digest = xxhash.xxh3_128(memoryview(data)[: len(data) - len(match[0])])
    digest.update(b"\n}\n")
    return digest.hexdigest(), match[1].decode()


def read_manifest(folder: Path, generation: int | None = None) -> Manifest:
    """Read and check the manifest of the store in ``folder``.

    Args:
        folder: folder of the store.
        generation: an older generation; None for the newest.

    Raises:
        StoreMissingError: there is no manifest: no store, or an unfinished one.
        GenerationError: the generation never existed or was compacted away; lists the available ones.
        StoreError: not JSON, another format version, unknown or missing fields, names that
            leave the folder, or counts that contradict each other.
    """
    return read_generation_manifest(partial(_read_manifest_file, folder), folder, generation)


def read_generation_manifest(
    read_file: Callable[[str], bytes], store_path: Path | str, generation: int | None, tries: int = 1
) -> Manifest:
    """Read and check a manifest through ``read_file``; see :func:`read_manifest`."""
    newest = _read_verified(read_file, store_path, MANIFEST_NAME, tries)
    if generation is None or generation == newest.generation:
        return newest
    if generation not in newest.readable:
        available = ", ".join(map(str, newest.readable))
        if not 1 <= generation < newest.generation:
            raise GenerationError(f"{store_path} has no generation {generation}; it has: {available}.")
        raise GenerationError(
            f"Generation {generation} of {store_path} was compacted away when generation {newest.readable[0]} was "
            f"made; it has: {available}. A run on it cannot continue with this store; restore a copy made before, or "
            "start a new run."
        )
    name = format_generation_name(generation)
    try:
        return _read_verified(read_file, store_path, name, tries, newest.history[generation - 1].manifest)
    except FileNotFoundError as error:
        raise StoreError(f"{store_path}/{name} is missing; {_RESTORE_REMEDY}.") from error


def _read_verified(
    read_file: Callable[[str], bytes], store_path: Path | str, name: str, tries: int, expected: str | None = None
) -> Manifest:
    """Read a manifest, retrying while it is damaged."""
    path = f"{store_path}/{name}"
    for remaining_tries in reversed(range(tries)):
        data = read_file(name)
        if expected is not None and split_checksum(data)[0] != expected:
            damage = StoreError(f"{path} is not the manifest of that generation; {_RESTORE_REMEDY}.")
        else:
            try:
                return decode_manifest(data, path)
            except StoreError as error:
                damage = error
        if not remaining_tries:
            raise damage
    raise AssertionError("a manifest is read at least once")


def _read_manifest_file(folder: Path, name: str) -> bytes:
    path = folder / name
    try:
        return read_regular_file(path, SMALL_FILE_LIMIT)
    except FileNotFoundError as error:
        if name == MANIFEST_NAME:
            raise make_missing_store_error(folder) from error
        raise
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {describe_os_error(error)}.") from error


class _VersionField(msgspec.Struct):
    format_version: int


def decode_manifest(data: bytes, path: Path | str) -> Manifest:
    """Decode and check a manifest."""
    # Values follow commas and opening brackets. Strings contain more of these, so the exact count is lower.
    if len(data) > _VALUE_LIMIT and sum(map(data.count, (b",", b"[", b"{"))) > _VALUE_LIMIT:
        raise StoreError(f"{path} has more than {_VALUE_LIMIT:,} values; {_RESTORE_REMEDY}.")
    try:
        version = msgspec.json.decode(data, type=_VersionField).format_version
    except JSON_DECODE_ERRORS as error:
        raise StoreError(f"{path} is not a manifest: {error}; {_RESTORE_REMEDY}.") from error
    if version != FORMAT_VERSION:
        raise StoreError(
            f"{path} has format_version {version}; this batchloom reads {FORMAT_VERSION}. "
            "Open it with the version that wrote it, or prepare the data again."
        )
    content_checksum, recorded_checksum = split_checksum(data)
    if content_checksum != recorded_checksum:
        raise StoreError(
            f"{path} was changed or damaged: its checksum is {recorded_checksum or 'missing'}, and its content has "
            f"{content_checksum}; {_RESTORE_REMEDY}."
        )
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except JSON_DECODE_ERRORS as error:
        raise StoreError(f"{path} is not a manifest of this format: {error}; {_RESTORE_REMEDY}.") from error
    for problem in _list_contradictions(manifest):
        raise StoreError(f"{path} is damaged: {problem}; {_RESTORE_REMEDY}.")
    return manifest


def _list_recipe_faults(manifest: Manifest) -> list[str]:
    """List the first value of the wrong type in each recipe, one phrase each."""
    older_recipes = {f"history[{index}].recipe": entry.recipe for index, entry in enumerate(manifest.history)}
    faults = []
    for recipe_path, recipe in {"recipe": manifest.recipe, **older_recipes}.items():
        try:
            msgspec.convert(recipe, _RecipeShape)
        except msgspec.ValidationError as error:
            message, _, path = str(error).rpartition(" - at `$")
            faults.append(f"{recipe_path}{path.rstrip('`')}: {message}")
    return faults


def _list_contradictions(manifest: Manifest) -> list[str]:
    problems = []
    tokenizer = manifest.tokenizer
    if manifest.dtype not in TOKEN_DTYPES:
        problems.append(f"dtype {manifest.dtype!r} is not one of {', '.join(TOKEN_DTYPES)}")
    itemsize = TOKEN_DTYPES.get(manifest.dtype, TOKEN_DTYPES["int32"]).itemsize
    for field, value in (("end_id", tokenizer.end_id), ("bos_id", tokenizer.bos_id)):
        if value is not None and not 0 <= value < tokenizer.vocab_size:
            problems.append(f"{field} {value} is not in the vocabulary")
    problems += _list_objective_faults(manifest)
    problems += _list_recipe_faults(manifest)
    problems += _list_history_faults(manifest)
    records = sum(part.records for source in manifest.sources for part in source.parts)
    if records > _MAX_RECORDS:
        problems.append(f"the parts of its sources have {records} records")
    for name in (*manifest.subsets, *manifest.subset_overrides.values()):
        if name not in SUBSETS:
            problems.append(f"subset {name!r} is not one of {', '.join(SUBSETS)}")
    for name, subset in manifest.subsets.items():
        for shard in subset.shards:
            if not SHARD_NAME.fullmatch(shard.name):
                problems.append(f"shard name {shard.name!r} is not of the form shard_00000")
            has_wrong_counts = shard.bytes != shard.tokens * itemsize or shard.trained_tokens > shard.tokens
            if has_wrong_counts or shard.contradicts_itself:
                problems.append(f"{name}/{shard.name} has counts that contradict each other")
        documents = sum(shard.documents for shard in subset.shards)
        tokens = sum(shard.tokens for shard in subset.shards)
        if (documents, tokens) != (subset.documents, subset.tokens):
            problems.append(
                f"subset {name!r} declares {subset.documents} documents and {subset.tokens} tokens, "
                f"its shards have {documents} and {tokens} in total"
            )
        problems += [f"subset {name!r} {fault}" for fault in _list_layer_faults(manifest.generation, subset)]
    return problems


def _list_history_faults(manifest: Manifest) -> list[str]:
    generation = manifest.generation
    history = manifest.history
    numbers = [entry.number for entry in history]
    # The length is compared first: a damaged generation number could make the range huge.
    if history and (len(numbers) != generation or numbers != list(range(1, generation + 1))):
        return [f"its history has the generations {numbers}, but it is generation {generation}"]
    if not history and generation != 1:
        return [f"it is generation {generation} but has no history"]
    counts = [0, *(entry.sources for entry in history), len(manifest.sources)]
    if any(a > b for a, b in pairwise(counts)):
        return [f"its history has {counts[1:-1]} sources, and the manifest {counts[-1]}"]
    return []


def _list_layer_faults(generation: int, subset: SubsetEntry) -> list[str]:
    """List the contradictions in a subset's layers and removed documents."""
    faults = []
    removed = subset.removed
    if removed and not (
        1 < removed.generation <= generation
        and 0 < removed.documents <= subset.documents
        and 0 <= removed.trained <= removed.tokens <= subset.tokens
    ):
        faults.append(f"declares {removed.documents} removed documents out of {subset.documents}")
    if not subset.layers:
        return faults
    numbers = [layer.generation for layer in subset.layers]
    if any(a >= b for a, b in pairwise(numbers)) or numbers[0] < 1 or numbers[-1] > generation:
        return [f"has the layers of generations {numbers} in generation {generation}", *faults]
    shard_ends = set(accumulate(shard.documents for shard in subset.shards))
    end = 0
    for layer in subset.layers:
        end += layer.documents
        if layer.documents < 1 or end not in shard_ends:
            return [f"has a layer of generation {layer.generation} that ends inside a shard", *faults]
    if end != subset.documents:
        faults.append(f"has {end} documents in its layers, but declares {subset.documents}")
    return faults


def _list_objective_faults(manifest: Manifest) -> list[str]:
    """List faults of the objective: all documents of a store have the same."""
    names = {source.preferences for source in manifest.sources if source.documents}
    if unknown_names := sorted(names.difference(OBJECTIVES, [""])):
        return [f"preferences {unknown_names[0]!r} are none of {', '.join(OBJECTIVES)}"]
    if len(names) > 1:
        return [f"its sources have several objectives ({', '.join(sorted(name or 'none' for name in names))})"]
    has_pairs = bool(manifest.objective)
    has_fields = has_pairs and OBJECTIVES[manifest.objective].carries
    requirements = (
        (".pairs", has_pairs, "with an objective" if has_pairs else "without an objective"),
        (".fields", has_fields, "of prompts or steps" if has_fields else "without prompts or steps"),
    )
    return [
        f"{name}/{shard.name} has {'no' if is_needed else 'a'} {suffix} file in a store {description}"
        for name, subset in manifest.subsets.items()
        for shard in subset.shards
        for suffix, is_needed, description in requirements
        if (suffix in shard.checksums) != is_needed
    ]
