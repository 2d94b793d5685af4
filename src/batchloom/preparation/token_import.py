"""``import``: build a store from existing token id files."""

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, TypedDict, Unpack, final

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from batchloom.core.addresses import make_input_labels
from batchloom.core.errors import InputError, OutputError, TokenizerError
from batchloom.core.fingerprint import fingerprint
from batchloom.core.loss_weights import TokenFlags
from batchloom.core.settings import Setting, find_choice_problem, find_problems, raise_problems, to_plain
from batchloom.preparation.documents.subsets import SubsetRule, describe_missed_shares
from batchloom.preparation.plain_store import PlainStoreJob, collect_subsets, finish_plain_store, list_plain_differences
from batchloom.preparation.report.progress import Listener, Note, Phase, PrepareResult, Progress, log_note
from batchloom.preparation.report.report import ReportedSource, read_report
from batchloom.preparation.resumable_job import run_job
from batchloom.preparation.settings.recipe import as_recipe_inputs, check_option_names, coerce_token_count
from batchloom.preparation.token_files import (
    FLAT_DTYPES,
    DocumentBoundaries,
    EdgeTokens,
    TokenBatch,
    TokenFile,
    TokenInput,
    VocabularyCheck,
    find_token_inputs,
    hash_ids,
    iter_token_batches,
    open_token_file,
)
from batchloom.preparation.units.subset_writer import SubsetWriter
from batchloom.preparation.units.unit_files import ROW
from batchloom.preparation.units.units import combine_part_hashes
from batchloom.preparation.units.work_folder import WORK_VERSION, JobIdentity, WorkFolder
from batchloom.store import Manifest, PartEntry, ShardEntry, map_file, wrap_write_errors
from batchloom.store.format import (
    FORMAT_VERSION,
    SUBSETS,
    TOKEN_DTYPES,
    BlockChecksums,
    SourceEntry,
    StoreCounts,
    SubsetEntry,
    choose_token_dtype,
    format_shard_name,
    iter_index_chunks,
    iter_provenance_chunks,
    make_tokenizer_entry,
)
from batchloom.store.write import make_folder, write_checksum_file, write_chunks
from batchloom.tokens import Tokenizer, UnknownTokenizer, parse_train_spec, resolve_tokenizer

_CHUNK_SIZE = 1 << 20
# Store dtype of each file dtype, valid once every id is checked against the vocabulary.
_COMPATIBLE_DTYPES = {"uint16": "uint16", "int16": "uint16", "int32": "int32", "uint32": "int32"}
_LINK_ERRNOS = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)


@dataclass(slots=True)
class ImportedFile:
    """An imported file with the XXH3-128 of its ids and its document edges."""

    file: TokenFile
    subset: str
    checksum: str = ""
    edges: EdgeTokens = field(default_factory=EdgeTokens)


# Reads the documents of a file, checks them, and fills in its checksum and edges.
ReadBatches = Callable[[ImportedFile], Iterator[TokenBatch]]


def _choose_linked_dtype(file: TokenFile) -> str:
    """Return the dtype of a store in which this file is a linked shard."""
    name = file.tokens.dtype.name
    if file.header:
        reason = "its ids begin after a header"
    elif file.starts is not None:
        reason = "its documents are stored in another order than its index lists them"
    elif name not in _COMPATIBLE_DTYPES:
        reason = f"its ids are {name}, and a store holds uint16 or int32"
    else:
        return _COMPATIBLE_DTYPES[name]
    raise InputError(
        f"{file.token_input.path} cannot be used as a shard unchanged: {reason}. Give --copy to write new shards."
    )


def _link_shard(imported_file: ImportedFile, stem: Path, part: int, link_mode: str, read: ReadBatches) -> ShardEntry:
    """Check a file of ids, write its sidecar files and link it as a shard."""
    file = imported_file.file
    dtype, count = TOKEN_DTYPES[_choose_linked_dtype(file)], len(file.lengths)
    checksums = BlockChecksums()

    def hashes() -> Iterator[NDArray[np.uint64]]:
        for batch in read(imported_file):
            checksums.append(np.ascontiguousarray(batch.tokens).data)
            yield hash_ids(batch)

    sizes = [(start, min(_CHUNK_SIZE, count - start)) for start in range(0, count, _CHUNK_SIZE)]
    numbers = (np.arange(start, start + size) for start, size in sizes)
    parts = (np.full(size, part) for _, size in sizes)
    columns = (hashes(), numbers, _iter_offsets(file), parts)
    docs = write_chunks(stem.with_suffix(".docs"), iter_provenance_chunks(count, columns))
    idx = write_chunks(stem.with_suffix(".idx"), iter_index_chunks(file.lengths, dtype))
    mask = _copy_sidecar(file, stem.with_suffix(".mask")) if file.mask else None
    weights = _copy_sidecar(file, stem.with_suffix(".weights")) if file.weights else None
    _link_path(file.token_input.path, stem.with_suffix(".bin"), link_mode)
    return ShardEntry(
        name=stem.name,
        documents=count,
        tokens=file.tokens.size,
        bytes=file.tokens.nbytes,
        bin=imported_file.checksum,
        idx=idx,
        docs=docs,
        mask=mask,
        trained=file.mask.trained if mask and file.mask else None,
        sums=write_checksum_file(stem.with_suffix(".sums"), checksums),
        weights=weights,
    )


def _iter_offsets(file: TokenFile) -> Iterator[NDArray[np.int64]]:
    offset = file.header
    for start in range(0, len(file.lengths), _CHUNK_SIZE):
        ends = offset + np.cumsum(file.lengths[start : start + _CHUNK_SIZE], dtype=np.int64) * (
            file.tokens.dtype.itemsize
        )
        yield np.concatenate([[offset], ends[:-1]])
        offset = int(ends[-1])


def _copy_sidecar(file: TokenFile, path: Path) -> str:
    view = map_file(file.token_input.path.with_suffix(path.suffix))
    return write_chunks(path, (view[start : start + _CHUNK_SIZE] for start in range(0, len(view), _CHUNK_SIZE)))


def _link_path(path: Path, destination: Path, link_mode: str) -> None:
    source = path.resolve()
    try:
        if link_mode == "symlink":
            destination.symlink_to(source)
        else:
            destination.hardlink_to(source)
    except OSError as error:
        if error.errno not in _LINK_ERRNOS:
            with wrap_write_errors(destination):
                raise
        raise OutputError(
            f"{path} cannot be linked into {destination.parent} ({os.strerror(error.errno or 0)}: another file "
            "system, or another owner's file). Give an --out next to it, or --copy, or --symlink, which makes the "
            "store depend on the file at its present path."
        ) from error


def _copy_shards(
    writers: Mapping[str, SubsetWriter], files: Sequence[ImportedFile], membership: SubsetRule, read: ReadBatches
) -> dict[str, list[ShardEntry]]:
    """Copy files, document by document, into shards.

    The hash of a ``train`` document chooses its subset; other documents keep theirs.
    """
    try:
        for part, imported_file in enumerate(files):
            for batch in read(imported_file):
                rows = _make_import_rows(imported_file.file, batch, part)
                codes = np.full(len(rows), SUBSETS.index(imported_file.subset))
                if imported_file.subset == SUBSETS[0]:
                    codes = membership.codes(rows).astype(np.int64)
                begins = np.cumsum(batch.lengths) - batch.lengths
                trained = _read_flags(imported_file.file, batch)
                for code, name in enumerate(SUBSETS):
                    row_indices = np.flatnonzero(codes == code)
                    if row_indices.size:
                        writers[name].add(rows, batch.tokens, begins, row_indices, trained)
        return {name: writer.finish() for name, writer in writers.items()}
    finally:
        for writer in writers.values():
            writer.abandon()


def _make_import_rows(file: TokenFile, batch: TokenBatch, part: int) -> NDArray[np.void]:
    rows = np.zeros(len(batch.lengths), ROW)
    rows["hash"] = hash_ids(batch)
    rows["record"] = batch.first + np.arange(len(rows))
    rows["offset"] = file.header + batch.starts * file.tokens.dtype.itemsize
    rows["part"], rows["length"] = part, batch.lengths
    return rows


def _read_flags(file: TokenFile, batch: TokenBatch) -> TokenFlags | None:
    flags = file.flags
    if flags is None:
        return None
    begins, stops = batch.starts.tolist(), (batch.starts + batch.lengths).tolist()
    if file.starts is None:
        return flags.slice(begins[0], stops[-1])
    return np.concatenate([flags.slice(a, b) for a, b in zip(begins, stops, strict=True)])


LinkMode = Literal["link", "symlink", "copy"]
_MAX_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportSpec:
    """Settings for turning token id files into a store."""

    inputs: tuple[str, ...]
    val: tuple[str, ...] = ()
    tokenizer: Annotated[
        str | None, Setting(help="Tokenizer that made the ids, in the form prepare takes; not train:N.")
    ] = None
    end_token: Annotated[
        str | None,
        Setting(
            help="End-of-document token; config for the eos_token of tokenizer_config.json.",
            shown_default="the tokenizer's",
        ),
    ] = None
    vocab_size: Annotated[
        int | None,
        Setting(help="Exclusive upper bound of the ids, if no tokenizer is given.", minimum=1, maximum=_MAX_COUNT),
    ] = None
    dtype: Annotated[
        str | None,
        Setting(
            help="Type of the ids of a flat file: uint16, uint32, int32, ... A .npy file has its own.",
            check=lambda value: find_choice_problem(value, FLAT_DTYPES),
        ),
    ] = None
    eod: Annotated[
        int | None,
        Setting(
            help="Id that ends each document of a flat file; without a tokenizer also recorded as the end token.",
            maximum=_MAX_COUNT,
            shown_default="the tokenizer's end token",
        ),
    ] = None
    document_tokens: Annotated[
        int | None,
        Setting(
            help="Number of tokens after which a flat file is cut into documents, instead of --eod.",
            minimum=1,
            maximum=_MAX_COUNT,
        ),
    ] = None
    val_fraction: Annotated[
        float, Setting(help="With --copy, share of the documents for the subset val, chosen by hash.", below=1)
    ] = 0.0
    tokens_per_shard: Annotated[
        int,
        Setting(
            help="With --copy, maximum tokens of a shard (100M, 1G); a single longer document gets a shard of its own.",
            minimum=1,
            maximum=_MAX_COUNT,
            option_type=str,
            metavar="SIZE",
            shown_default="100M",
        ),
    ] = 100_000_000
    how: Annotated[
        LinkMode,
        Setting(
            help="link (hard links), symlink (the store then depends on the files) or copy (new shards).",
            has_option=False,
        ),
    ] = "link"

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens_per_shard", coerce_token_count(self.tokens_per_shard))
        problems = [] if self.inputs else ["inputs: no inputs; name at least one prefix or file"]
        if any(not isinstance(path, str) or not path for path in (*self.inputs, *self.val)):
            problems.append(f"inputs: {(*self.inputs, *self.val)!r} contains a value that is not a path")
        raise_problems(problems + find_problems(self) + _check_combinations(self))
        object.__setattr__(self, "val_fraction", float(self.val_fraction))


def _import_spec_to_plain(spec: ImportSpec) -> dict[str, Any]:
    """Return the settings as stored in the manifest: plain values, no absolute paths."""
    labels = make_input_labels([*spec.inputs, *spec.val])
    plain = to_plain(spec)
    plain["inputs"], plain["val"] = labels[: len(spec.inputs)], labels[len(spec.inputs) :]
    if spec.tokenizer and PurePath(spec.tokenizer).is_absolute():
        plain["tokenizer"] = Path(spec.tokenizer).name
    return plain


def _check_combinations(spec: ImportSpec) -> list[str]:
    problems = []
    if (spec.tokenizer is None) == (spec.vocab_size is None):
        problems.append(
            "tokenizer: give the meaning of the ids: either --tokenizer, or --vocab-size if the tokenizer is "
            "unknown (batchloom check PREFIX prints the highest id)"
        )
    if spec.tokenizer is None and spec.end_token is not None:
        problems.append("end_token: names a token of a tokenizer; without --tokenizer give --eod ID")
    if spec.eod is not None and spec.vocab_size is not None and spec.eod >= spec.vocab_size:
        problems.append(f"eod: {spec.eod} is outside a vocabulary of {spec.vocab_size} ids")
    if spec.eod is not None and spec.document_tokens is not None:
        problems.append("document_tokens: a document ends at --eod or after a number of tokens, not both")
    if spec.val_fraction and spec.val:
        problems.append("val_fraction: --val already names the files of val; leave one of them out")
    if spec.val_fraction and spec.how != "copy":
        problems.append(
            "val_fraction: a linked file belongs to one subset as a whole; give --copy, or name separate files "
            f"with --val (how is {spec.how!r})"
        )
    return problems


ImportInputs = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class ImportOptions(TypedDict, total=False):
    """Fields of :class:`ImportSpec`; None is unset."""

    tokenizer: str | None
    end_token: str | None
    vocab_size: int | None
    dtype: str | None
    eod: int | None
    document_tokens: int | None
    val_fraction: float
    tokens_per_shard: int
    how: LinkMode


def import_tokens(
    inputs: ImportInputs,
    *,
    out: str | os.PathLike[str],
    val: ImportInputs = (),
    progress: Listener | None = None,
    **options: Unpack[ImportOptions],
) -> PrepareResult:
    """Build a store from files of token ids; linked files stay where they are.

    Every id is read once, in bounded memory, and checked against the vocabulary. On a finished
    store the same arguments succeed at once.

    Args:
        inputs: Megatron prefixes, flat files of ids, ``.npy`` files, and folders of prefixes.
        out: the store's folder.
        val: inputs of the subset ``val``.
        progress: called with each Note or Progress; without it, notes go to the log ``batchloom``.
        **options: settings, which :class:`ImportSpec` documents.

    Raises:
        SettingsError: settings contradict each other.
        InputMissingError: an input does not exist or is empty.
        InputError: ids outside the vocabulary, a dtype that disagrees, or a file that must be copied.
        StoreError: a prefix is damaged.
        TokenizerError: the tokenizer cannot be found, read or trusted.
        StoreConflictError: ``out`` holds the output of another job.
        OutputError: ``out`` cannot be written, or a file cannot be linked into it.
    """
    check_option_names("import_tokens", options, ImportOptions)
    spec = ImportSpec(inputs=as_recipe_inputs(inputs), val=as_recipe_inputs(val), **options)
    return run_import(spec, Path(out), progress or log_note)


def run_import(spec: ImportSpec, out: Path, listener: Listener) -> PrepareResult:
    """Run an import into ``out``; see :func:`import_tokens`."""
    token_inputs = find_token_inputs([*spec.inputs, *spec.val])
    first_val = len(find_token_inputs(spec.inputs))
    _check_no_repeats(token_inputs)
    tokenizer = _resolve_import_tokenizer(spec)
    plain, run = _import_spec_to_plain(spec), _ImportRun(spec, token_inputs, first_val, tokenizer, listener)
    sources = [(token_input.name, token_input.size, token_input.mtime_ns) for token_input in token_inputs]

    def list_differences(manifest: Manifest) -> list[str]:
        differences, report = list_plain_differences(manifest, plain), read_report(out)
        if report is None or report.sources != _make_reported_sources(token_inputs):
            differences.append("inputs: other files, or files that were written again")
        if tokenizer is not None and tokenizer.fingerprint != manifest.tokenizer.fingerprint:
            differences.append(f"tokenizer: {spec.tokenizer} has changed")
        return differences

    job = PlainStoreJob(out, JobIdentity(WORK_VERSION, plain, [], sources), list_differences, run.make)
    return replace(run_job(job, out), notes=tuple(run.notes))


def _resolve_import_tokenizer(spec: ImportSpec) -> Tokenizer | None:
    if spec.tokenizer is None:
        return None
    if parse_train_spec(spec.tokenizer) is not None:
        raise TokenizerError(
            f"{spec.tokenizer} would train a tokenizer on texts, and the inputs hold ids: name the tokenizer that "
            "made them, or give --vocab-size"
        )
    return resolve_tokenizer(spec.tokenizer, end_token=spec.end_token)


def _check_no_repeats(token_inputs: Sequence[TokenInput]) -> None:
    names_by_path: dict[Path, str] = {}
    for token_input in token_inputs:
        path = token_input.path.resolve()
        if path in names_by_path:
            raise InputError(
                f"{token_input.name} and {names_by_path[path]} are the same file; name each file once, for one subset."
            )
        names_by_path[path] = token_input.name


def _make_reported_sources(token_inputs: Sequence[TokenInput]) -> list[ReportedSource]:
    return [
        ReportedSource(token_input.name, str(token_input.path.resolve()), token_input.size, token_input.mtime_ns)
        for token_input in token_inputs
    ]


@final
class _ImportRun:
    def __init__(
        self,
        spec: ImportSpec,
        token_inputs: Sequence[TokenInput],
        first_val: int,
        tokenizer: Tokenizer | None,
        listener: Listener,
    ) -> None:
        self._spec, self._token_inputs, self._first_val = spec, token_inputs, first_val
        self._tokenizer, self._listener = tokenizer, listener
        self._vocab_size = tokenizer.vocab_size if tokenizer else spec.vocab_size or 0
        whose = f"tokenizer {tokenizer.name!r}" if tokenizer else "a vocabulary of that size"
        self._check = VocabularyCheck(self._vocab_size, whose)
        self.notes: list[str] = []
        self._total = 0

    def make(self, work: WorkFolder) -> Manifest:
        """Write the store into the work folder."""
        spec, declared_tokenizer = self._spec, self._tokenizer
        end_id = declared_tokenizer.end_id if declared_tokenizer else None
        cutting = DocumentBoundaries(spec.dtype, spec.eod, spec.document_tokens, end_id)
        files = []
        for number, token_input in enumerate(self._token_inputs):
            file = open_token_file(token_input, cutting, work.path / f"lengths.{number}")
            self._check.check_dtype(file)
            if file.note:
                self._note(file.note)
            files.append(ImportedFile(file, "val" if number >= self._first_val else "train"))
        self._total = sum(imported_file.file.tokens.nbytes for imported_file in files)
        make_shards = self._copy if spec.how == "copy" else self._link
        dtype, shards = make_shards(files, work.store)
        tokenizer = declared_tokenizer or UnknownTokenizer(self._vocab_size, self._end_id(files))
        manifest = self._make_manifest(files, collect_subsets(work.store, shards), dtype, tokenizer)
        report = {
            "sources": msgspec.to_builtins(_make_reported_sources(self._token_inputs)),
            "out": os.path.abspath(work.out),  # noqa: PTH100
            "notes": self.notes,
        }
        return finish_plain_store(work.store, manifest, tokenizer.state(), report)

    def _link(self, files: list[ImportedFile], store: Path) -> tuple[str, dict[str, list[ShardEntry]]]:
        dtypes = {
            _choose_linked_dtype(imported_file.file): imported_file.file.token_input.path for imported_file in files
        }
        if len(dtypes) > 1:
            first_description, second_description = (f"{path} holds {name}" for name, path in sorted(dtypes.items()))
            raise InputError(
                f"{first_description}, {second_description}, and a store has one dtype: import them separately, or "
                "give --copy."
            )
        shards: dict[str, list[ShardEntry]] = {"train": [], "val": []}
        read = self._make_reader("read")
        for part, imported_file in enumerate(files):
            folder = store / imported_file.subset
            make_folder(folder)
            stem = folder / format_shard_name(len(shards[imported_file.subset]))
            shards[imported_file.subset].append(_link_shard(imported_file, stem, part, self._spec.how, read))
        return next(iter(dtypes)), shards

    def _copy(self, files: list[ImportedFile], store: Path) -> tuple[str, dict[str, list[ShardEntry]]]:
        dtype = choose_token_dtype("auto", self._vocab_size)
        membership = SubsetRule(self._spec.val_fraction, 0.0)
        writers = {
            name: SubsetWriter(store / name, TOKEN_DTYPES[dtype], self._spec.tokens_per_shard) for name in SUBSETS
        }
        shards = _copy_shards(writers, files, membership, self._make_reader("write"))
        if self._spec.val_fraction and not shards["val"]:
            self._note(
                "There is no val subset: the hashes of all documents choose train. Raise --val-fraction, or name files "
                "for it with --val.",
                is_warning=True,
            )
        return dtype, shards

    def _make_reader(self, phase: Phase) -> ReadBatches:
        size = documents = tokens = 0

        def read(imported_file: ImportedFile) -> Iterator[TokenBatch]:
            nonlocal size, documents, tokens
            digest = xxhash.xxh3_128()
            for batch in iter_token_batches(imported_file.file):
                self._check.check(imported_file.file, batch)
                imported_file.edges.add(batch)
                digest.update(np.ascontiguousarray(batch.tokens).data)
                yield batch
                size, documents, tokens = (
                    size + batch.tokens.nbytes,
                    documents + len(batch.lengths),
                    tokens + batch.tokens.size,
                )
                self._listener(Progress(phase, size, self._total, 0, documents, tokens, 0))
            imported_file.checksum = digest.hexdigest()

        return read

    def _end_id(self, files: Sequence[ImportedFile]) -> int:
        """Return ``eod``, else the last id of all documents, else 0, which fills padding."""
        if self._spec.eod is not None:
            return self._spec.eod
        lasts = set().union(*(imported_file.edges.lasts for imported_file in files))
        if len(lasts) == 1:
            return int(lasts.pop())
        self._note(
            "Documents do not all end with the same id, and --eod is not given: id 0 is recorded as the end "
            "token, and is used for padding only.",
            is_warning=True,
        )
        return 0

    def _make_manifest(
        self,
        files: list[ImportedFile],
        subsets: dict[str, SubsetEntry],
        dtype: str,
        tokenizer: Tokenizer,
    ) -> Manifest:
        documents = sum(entry.documents for entry in subsets.values())
        tokens = sum(entry.tokens for entry in subsets.values())
        by_subset = {name: entry.tokens for name, entry in subsets.items()}
        shares = {"val": self._spec.val_fraction}
        notes = describe_missed_shares(shares, by_subset, documents, balance=False, texts=False, splits=False)
        for text in notes:
            self._note(text, is_warning=True)
        plain = _import_spec_to_plain(self._spec)
        return Manifest(
            format_version=FORMAT_VERSION,
            generation=1,
            dtype=dtype,
            # The encoder is unknown; only the tokenizer of the ids is declared.
            tokenizer=msgspec.structs.replace(make_tokenizer_entry(tokenizer), engine="imported", engine_version=""),
            recipe=plain,
            recipe_fingerprint=fingerprint(
                {name: value for name, value in plain.items() if name not in ("inputs", "val")}
            ),
            counts=StoreCounts(documents, documents, tokens, 0, {}),
            subsets=subsets,
            subset_overrides={},
            sources=tuple(self._source(imported_file, tokenizer) for imported_file in files),
        )

    def _source(self, imported_file: ImportedFile, tokenizer: Tokenizer) -> SourceEntry:
        token_input, edges = imported_file.file.token_input, imported_file.edges
        has_end, has_bos = edges.lasts == {tokenizer.end_id}, edges.firsts == {tokenizer.bos_id}
        if self._tokenizer and not has_end:
            self._note(
                f"Not every document of {token_input.name} ends with {tokenizer.name!r}'s end token "
                f"{tokenizer.end_id}; the documents are not changed.",
                is_warning=True,
            )
        count = len(imported_file.file.lengths)
        return SourceEntry(
            name=token_input.name,
            kind=token_input.kind,
            bytes=token_input.size,
            hash=combine_part_hashes([imported_file.checksum]),
            documents=count,
            tokens=int(np.sum(imported_file.file.lengths, dtype=np.int64)),
            bos="present" if has_bos else "absent",
            end="present" if has_end else "absent",
            parts=(PartEntry(imported_file.file.header, token_input.size, count),),
        )

    def _note(self, text: str, *, is_warning: bool = False) -> None:
        self.notes.append(text)
        self._listener(Note(text, is_warning))
