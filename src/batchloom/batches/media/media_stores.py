"""Media of store documents for batches, and lists of documents with missing media.

``batchloom check`` writes the lists beforehand, so that ranks need no communication. A list becomes an edit (``ban``)
at the loader's first step, and so part of the run's journal and state.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, final

import msgspec
import numpy as np

from batchloom.batches.assembly.array_filling import Ids, TokenReader
from batchloom.batches.assembly.batch_spec import DEFAULT_MEDIA_SPEC, MediaOptions
from batchloom.batches.media.batch_media import BatchMedia, BatchMedium, ProcessorContext
from batchloom.core.errors import InputError, PlanError, StoreError
from batchloom.core.files import JSON_DECODE_ERRORS, describe_os_error, read_regular_file
from batchloom.media import MediaLimits
from batchloom.plan import Edit, Plan, with_journal
from batchloom.plan.packing import Rows
from batchloom.store import Store, StoreMedia, write_file
from batchloom.store.format import StoredMedium, mask_removed

# Number of documents whose media are read together; a medium that several of them share is read once.
_BATCH_DOCUMENTS = 512


@final
class StoreSource:
    remedy = (
        "batchloom check STORE --missing-media FILE lists such documents; MediaOptions(replace=FILE), or train "
        "--missing-media FILE, serves padding for them."
    )

    def __init__(self, store: Store) -> None:
        self.store, self.media = store, StoreMedia(store)
        self.limits = _read_limits(store)

    def read_bytes(self, medium: StoredMedium) -> bytes:
        return self.media.read_bytes(medium)

    def folder_of(self, document: int) -> str | None:
        return self.media.folder_of(document)

    def describe_document(self, document: int) -> str:
        origin = self.store.provenance.of(document)
        return f"Document {document} of {self.store.location.name} ({origin.source}, {origin.position})"


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
            spans, documents = spans[is_present], documents[is_present]
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


def check_store_media(store: Store) -> Iterator[MediaCheckBatch]:
    """Read the media of a store's documents, except removed ones."""
    reads, source = make_media_of_stores([store], DEFAULT_MEDIA_SPEC), StoreSource(store)
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


def write_missing_media(path: Path, store: str, subsets: Mapping[str, SubsetMissingMedia]) -> None:
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
    if not isinstance(plan, Plan):
        raise PlanError(
            "MediaOptions.replace needs a plan that can be edited, but this is a stream, or repeats the order of "
            "one: prepare the data into a store, and leave order out."
        )
    missing_documents = find_missing_documents(plan.stores, files)
    return ban_missing_documents(plan, missing_documents, 0), missing_documents


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
        bare = Plan(plan.orders.data, plan.spec, (), plan.orders)
        plan = bare if plan.edits == ban_missing_documents(bare, missing_documents, 0).edits else plan
    plan = with_journal(plan, state)
    position = plan.resume(state)
    if not missing_documents:
        return plan, position
    return ban_missing_documents(plan, missing_documents, plan.orders.run_layout.step_at(position)[0]), position
