"""Lists of documents with missing media, and plan edits that pad them.

``batchloom check`` writes the lists beforehand, so that ranks need no communication. A list becomes an edit (``ban``)
at the loader's first step, and so part of the run's journal and state.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from batchloom.core.errors import InputError, PlanError
from batchloom.core.files import JSON_DECODE_ERRORS, describe_os_error, read_regular_file
from batchloom.plan import Edit, Plan, with_journal
from batchloom.store import Store, write_file

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
