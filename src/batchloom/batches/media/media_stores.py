"""Media of store documents for batches, their check, and lists of missing ones.

``batchloom check`` writes the lists beforehand, so that ranks need no communication. A list becomes an edit (``ban``)
at the loader's first step, and so part of the run's journal and state.
"""

import contextlib
import io
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

import msgspec
import numpy as np

from batchloom.batches.assembly.array_filling import Ids, TokenReader
from batchloom.batches.assembly.batch_assembly import BatchLayout
from batchloom.batches.assembly.batch_spec import DEFAULT_MEDIA_SPEC, MediaOptions
from batchloom.batches.assembly.device import to_torch
from batchloom.batches.media.batch_media import (
    BatchMedia,
    BatchMedium,
    ProcessorContext,
    check_unchanged,
    open_medium,
)
from batchloom.core.addresses import is_url
from batchloom.core.errors import InputError, PlanError, StoreError
from batchloom.core.files import JSON_DECODE_ERRORS, describe_os_error, read_regular_file
from batchloom.core.medium import FrameFacts
from batchloom.core.wording import format_count
from batchloom.media import MediaContent, MediaLimits, decode_frames
from batchloom.plan import Edit, Plan, with_journal
from batchloom.plan.packing import Rows
from batchloom.store import PreferencePairs, Store, StoreMedia, open_store, read_manifest, write_file
from batchloom.store.format import StoredMedium, mask_removed
from batchloom.store.read import has_media, open_remote_manifest

if TYPE_CHECKING:
    from batchloom.store.maintain import VerificationResult

# Number of documents whose media are read together; a medium that several of them share is read once.
_BATCH_DOCUMENTS = 512
_MAX_LISTED = 10
# Cache limit for a remote store while its media are checked.
_MEDIA_CACHE_BYTES = 1 << 30


@final
class StoreSource:
    """Media of the documents of a store."""

    remedy = (
        "batchloom check STORE --missing-media FILE lists such documents; MediaOptions(replace=FILE), or train "
        "--missing-media FILE, serves padding for them."
    )

    def __init__(self, store: Store) -> None:
        self.store = store
        self.media = StoreMedia(store)
        self.limits = _read_limits(store)

    def read_bytes(self, medium: StoredMedium) -> bytes:
        return self.media.read_bytes(medium)

    def folder_of(self, document: int) -> str | None:
        return self.media.folder_of(document)

    def describe_document(self, document: int) -> str:
        origin = self.store.provenance.of(document)
        return f"Document {document} of {self.store.location.name} ({origin.source}, {origin.position})"


@contextlib.contextmanager
def _open_unchanged(source: StoreSource, medium: StoredMedium) -> Iterator[MediaContent]:
    with open_medium(source, medium) as content:
        if medium.blob is None:
            check_unchanged(medium, content)
        yield content


def read_medium_head(source: StoreSource, medium: StoredMedium, size: int) -> bytes:
    """Return the first bytes of a medium's file, after the checks of a batch.

    Raises:
        StoreError: the bytes in the store are damaged.
        UnusableRecordError: the named file is missing, unreadable, changed, or outside the folder.
    """
    with _open_unchanged(source, medium) as content:
        return content.read(0, size)


def read_medium(source: StoreSource, medium: StoredMedium) -> bytes:
    """Return the file of an image or a sound, or a frame of a video as PNG.

    Raises:
        StoreError: the bytes in the store are damaged.
        UnusableRecordError: the named file is missing, unreadable, changed, or outside the folder.
        MissingDependencyError: a package that decodes videos is missing.
    """
    with _open_unchanged(source, medium) as content:
        if not isinstance(medium.facts, FrameFacts):
            return content.read(0, content.size)
        picture = io.BytesIO()
        for frame in decode_frames(content, [medium.facts]):
            frame.save(picture, "PNG")
        return picture.getvalue()


@final
class _StoreMediaFinder:
    def __init__(self, stores: Sequence[Store]) -> None:
        self.sources = [StoreSource(store) for store in stores]
        self._firsts = np.cumsum([0, *(len(store) for store in stores)])

    def __call__(self, _reader: TokenReader, rows: Rows) -> list[BatchMedium]:
        numbers = np.searchsorted(self._firsts, rows.documents, side="right") - 1
        batch_media: list[BatchMedium] = []
        for number, source in enumerate(self.sources):
            if not source.media.any:
                continue
            spans = np.flatnonzero(numbers == number)
            documents = rows.documents[spans] - self._firsts[number]
            # Removed documents read as end tokens, without their media placeholders.
            is_present = ~mask_removed(source.store.contents.removed, documents)
            spans = spans[is_present]
            documents = documents[is_present]
            document_media = source.media.of(documents)
            _check_documents_whole(source, rows, spans, documents, document_media)
            batch_media += [
                BatchMedium(span, source, medium)
                for span, some in zip(spans.tolist(), document_media, strict=True)
                for medium in some
            ]
        return sorted(batch_media, key=lambda batch_medium: (batch_medium.span, batch_medium.medium.start))


def make_media_of_stores(stores: Sequence[Store], spec: MediaOptions) -> BatchMedia:
    find = _StoreMediaFinder(stores)
    prepared = [(source.store, state) for source in find.sources if (state := source.media.processor) is not None]
    if len({state["fingerprint"] for _, state in prepared}) > 1:
        raise PlanError(
            "The stores have several processors, whose features do not fit one model: "
            f"{', '.join(sorted({str(state['name']) for _, state in prepared}))}. Prepare all stores with one "
            "processor."
        )
    store, state = prepared[0]
    return BatchMedia(find, ProcessorContext(state, lambda: store.tokenizer.control), spec)


def _check_documents_whole(
    source: StoreSource, rows: Rows, spans: Ids, documents: Ids, media: Sequence[object]
) -> None:
    """Reject spans that cut a document with media: features are of the full document."""
    full_lengths = source.store.lengths.take(documents)
    is_cut = (rows.starts[spans] != 0) | (rows.lengths[spans] != full_lengths)
    for index in np.flatnonzero(is_cut).tolist():
        if media[index]:
            raise PlanError(
                f"Document {int(documents[index])} of {source.store.location.name} holds images or audio and is cut by "
                "the plan: give its source overlong='drop' or 'error', and a packing that cuts nothing (best_fit)."
            )


def _read_limits(store: Store) -> MediaLimits:
    reading = store.manifest.recipe.get("reading") if store.manifest else None
    media_settings = reading.get("media") if isinstance(reading, dict) else None
    if not isinstance(media_settings, dict | None):
        raise StoreError(
            f"The manifest of {store.location.name} has media settings that are no mapping. The store is damaged: "
            "restore its manifest from the original store."
        )
    limit_names = {field.name for field in fields(MediaLimits)}
    return MediaLimits(**{name: value for name, value in (media_settings or {}).items() if name in limit_names})


class MediaCheckBatch(NamedTuple):
    """Check result of some neighbouring documents."""

    documents: int
    media: int
    faults: dict[int, str]


def _check_store_media(store: Store) -> Iterator[MediaCheckBatch]:
    """Read the media of a store's documents, except removed ones."""
    reads = make_media_of_stores([store], DEFAULT_MEDIA_SPEC)
    source = StoreSource(store)
    for first in range(0, len(store), _BATCH_DOCUMENTS):
        numbers = np.arange(first, min(first + _BATCH_DOCUMENTS, len(store)))
        numbers = numbers[~mask_removed(store.contents.removed, numbers)]
        document_media = [media for media in source.media.of(numbers) if media]
        if not document_media:
            continue
        # A failed fetch is reported for the medium that needs it.
        with contextlib.suppress(StoreError):
            store.reader.fetch(np.array([media[0].document for media in document_media]))
        yield _check_documents(reads, source, document_media)


def _check_documents(
    reads: BatchMedia, source: StoreSource, document_media: list[list[StoredMedium]]
) -> MediaCheckBatch:
    kinds: dict[tuple[object, ...], StoredMedium] = {}
    for medium in chain.from_iterable(document_media):
        kinds.setdefault(_medium_key(medium), medium)
    wrong = dict(zip(kinds, reads.faults(source, list(kinds.values())), strict=True))
    faults: dict[int, str] = {}
    for medium in chain.from_iterable(document_media):
        if fault := wrong[_medium_key(medium)]:
            first_document = kinds[_medium_key(medium)].document
            prefix = "" if first_document == medium.document else f"Document {medium.document}, too: "
            faults.setdefault(medium.document, prefix + fault)
    return MediaCheckBatch(len(document_media), sum(map(len, document_media)), faults)


def _medium_key(medium: StoredMedium) -> tuple[object, ...]:
    """Return a key that distinguishes media, including frames of one video."""
    return medium.facts, medium.digest, medium.location, medium.blob, medium.grid


_VERSION = 1
# Document numbers by source name, as edits take them.
MissingDocuments = Mapping[str, tuple[int, ...]]
_EDIT_NOTE = "images or audio are gone"


class SubsetMissingMedia(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fingerprint of a subset, independent of its location, and document numbers."""

    fingerprint: str
    documents: tuple[int, ...]


class MissingMedia(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Address of the checked store, and its subsets by name."""

    version: int
    store: str
    subsets: dict[str, SubsetMissingMedia]


def _write_missing_media(path: Path, store: str, subsets: Mapping[str, SubsetMissingMedia]) -> None:
    """Write a list as JSON, atomically."""
    missing_media = MissingMedia(_VERSION, store, dict(subsets))
    write_file(path, msgspec.json.format(msgspec.json.encode(missing_media), indent=1) + b"\n")


def read_missing_media(path: Path) -> MissingMedia:
    """Read a list of documents with missing media."""
    remedy = "batchloom check STORE --missing-media FILE writes one"
    try:
        missing_media = msgspec.json.decode(read_regular_file(path), type=MissingMedia)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {describe_os_error(error)}; {remedy}.") from error
    except JSON_DECODE_ERRORS as error:
        raise InputError(
            f"{path} is not a list of documents with missing images or audio: {error}; {remedy}."
        ) from error
    if missing_media.version != _VERSION:
        raise InputError(f"{path} has version {missing_media.version}; this batchloom reads {_VERSION}; {remedy}.")
    return missing_media


def replace_missing_documents(plan: Plan, files: Sequence[str]) -> tuple[Plan, MissingDocuments]:
    """Return the plan with listed documents as padding, and these documents."""
    if not files:
        return plan, {}
    missing_documents = find_missing_documents(plan.stores, files)
    return ban_missing_documents(plan, missing_documents, 0), missing_documents


def make_no_replacement_error() -> PlanError:
    """Build the error for data whose documents cannot be replaced by padding."""
    return PlanError(
        "MediaOptions.replace needs a plan that can be edited, but this is a stream: prepare the data into a store."
    )


def find_missing_documents(stores: Mapping[str, object], files: Sequence[str]) -> MissingDocuments:
    documents_by_source: dict[str, set[int]] = {}
    opened = {name: store for name, store in stores.items() if isinstance(store, Store)}
    for file in files:
        listed = read_missing_media(Path(file))
        documents_by_fingerprint = {subset.fingerprint: subset.documents for subset in listed.subsets.values()}
        matches = {
            name: documents_by_fingerprint[s.fingerprint]
            for name, s in opened.items()
            if s.fingerprint in documents_by_fingerprint
        }
        if not matches:
            raise InputError(
                f"{file} names documents of {listed.store}, but of no store or generation that is open here "
                f"({', '.join(store.location.name for store in opened.values())}): make a list for an open one "
                "(batchloom check STORE --missing-media FILE; --generation for an older one)."
            )
        for name, documents in matches.items():
            documents_by_source.setdefault(name, set()).update(documents)
    return {name: tuple(sorted(some)) for name, some in sorted(documents_by_source.items()) if some}


def ban_missing_documents(plan: Plan, missing_documents: MissingDocuments, step: int) -> Plan:
    banned: dict[str, set[int]] = {}
    for edit in plan.edits:
        for name, numbers in edit.ban.items():
            banned.setdefault(name, set()).update(numbers)
    new = {
        name: [document for document in numbers if document not in banned.get(name, ())]
        for name, numbers in missing_documents.items()
    }
    if not any(new.values()):
        return plan
    step -= step % max(plan.spec.group_by_length, 1)
    ban = {name: numbers for name, numbers in new.items() if numbers}
    return plan.edited(Edit(step=step, ban=ban, note=_EDIT_NOTE))


def resume_with_missing(plan: Plan, missing_documents: MissingDocuments, state: dict[str, Any]) -> tuple[Plan, int]:
    if missing_documents:
        bare = Plan(plan.data, plan.spec, (), plan.orders)
        plan = bare if plan.edits == ban_missing_documents(bare, missing_documents, 0).edits else plan
    plan = with_journal(plan, state)
    position = plan.resume(state)
    if not missing_documents:
        return plan, position
    return ban_missing_documents(plan, missing_documents, plan.step_at(position)[0]), position


def check_media(
    verdict: "VerificationResult",
    location: str,
    generation: int | None,
    missing_media_file: str | os.PathLike[str] | None,
) -> None:
    """Add the media of a store to its verdict; write the list of unreadable ones."""
    missing_by_subset: dict[str, SubsetMissingMedia] = {}
    faults: list[str] = []
    documents = media = 0
    try:
        with _iter_subsets(location, generation) as stores:
            for store in stores:
                document_faults: dict[int, str] = {}
                for media_check in _check_store_media(store):
                    documents = documents + media_check.documents
                    media = media + media_check.media
                    document_faults |= media_check.faults
                missing_by_subset[store.split] = SubsetMissingMedia(store.fingerprint, tuple(sorted(document_faults)))
                faults += [document_faults[number] for number in sorted(document_faults)[: _MAX_LISTED - len(faults)]]
    except StoreError as error:
        # The same error may have been reported before.
        if str(error) not in verdict.faults:
            verdict.faults.append(f"{error} Its media were not checked.")
        return
    count = sum(len(missing_media.documents) for missing_media in missing_by_subset.values())
    verdict.facts["media"] = (
        f"{media:,} in {format_count(documents, 'document')}, {count:,} of which hold unreadable media"
    )
    if count:
        if not verdict.faults:
            verdict.used = (
                "batchloom.Loader, with media=MediaOptions(replace=FILE), replaces "
                f"{format_count(count, 'document')} of it with padding; --missing-media FILE lists them"
            )
        verdict.faults += faults
        if count > len(faults):
            more = format_count(count - len(faults), "more document")
            verdict.faults.append(f"{verdict.path}: and {more} with unreadable media.")
    if missing_media_file is not None:
        _write_missing_media(Path(missing_media_file), verdict.path, missing_by_subset)


@contextlib.contextmanager
def _iter_subsets(location: str, generation: int | None) -> Iterator[Iterator[Store]]:
    """Open the subsets that hold documents; a remote store is cached while in use."""
    if not is_url(location):
        manifest = read_manifest(Path(location), generation)
        names = [name for name, subset in manifest.subsets.items() if subset.documents]
        yield (open_store(location, name, generation=generation) for name in names)
        return
    manifest = open_remote_manifest(location, generation)
    names = [name for name, subset in manifest.subsets.items() if subset.documents]
    with tempfile.TemporaryDirectory(prefix="batchloom-check-") as cache:
        open_subset = partial(open_store, location, generation=generation, cache=cache, cache_limit=_MEDIA_CACHE_BYTES)
        yield (open_subset(split=name) for name in names)


@final
class PairMediaCollator:
    """Collator of preference pairs that adds the inputs of a multimodal model.

    It adds the features of the processor, such as ``pixel_values``, in the order of the rows: those of the chosen
    answers, then those of the rejected ones. Models with M-RoPE also get ``position_ids``, and models that mark the
    tokens of images ``token_type_ids``.

    Args:
        pairs: the pairs of a store with media.
        collate: collator of their items that makes ``input_ids`` of B chosen and then B rejected answers, as a tensor
            [2 * B, tokens] with padding at its end, such as TRL's ``DataCollatorForPreference``. It must not cut.

    Raises:
        InputError: the store holds no media.
    """

    def __init__(
        self, pairs: PreferencePairs, collate: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]]
    ) -> None:
        if not has_media(pairs.store):
            raise InputError(f"{pairs.store.location.name} holds no media: use the other collator alone.")
        self._store = pairs.store
        self._collate = collate
        self._media = make_media_of_stores([pairs.store], DEFAULT_MEDIA_SPEC)

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if "documents" not in examples[0]:
            raise InputError(
                "The items have no documents, which name their media: set remove_unused_columns=False in the settings "
                "of the trainer, which removes them otherwise."
            )
        batch = dict(self._collate(examples))
        documents = np.array([example["documents"] for example in examples], np.int64).T.ravel()
        lengths = self._store.lengths.take(documents).astype(np.int64)
        zeros = np.zeros_like(documents)
        pointers = np.arange(len(documents) + 1)
        rows = Rows(pointers, zeros.astype(np.int32), documents, zeros, lengths, zeros)
        ids = np.asarray(batch["input_ids"])
        arrays = {"input_ids": ids, "position_ids": np.broadcast_to(np.arange(ids.shape[1]), ids.shape)}
        layout = BatchLayout(pointers, lengths, zeros, 1, "aligned", sliced=False)
        self._media.begin(arrays, self._store.reader, rows, layout, varlen=False).finish()
        del arrays["input_ids"]
        if not self._media.traits.mrope:
            del arrays["position_ids"]
        return batch | to_torch(arrays)
