"""Documents whose media are gone, which a run serves as padding: the same on every rank, as an edit of its plan.

Which documents these are is a list that ``batchloom check`` made before, so that ranks need not ask each other. It
becomes an edit (``ban``) at the step a loader begins with: the journal of the run has it, and so its state.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchloom.core.errors import InputError, PlanError
from batchloom.plan import Edit, Plan, with_journal
from batchloom.store import Store, read_missing_media

# Documents of a source by its name, as an edit takes them.
MissingDocuments = Mapping[str, tuple[int, ...]]
_EDIT_NOTE = "images or audio are gone"


def replace_missing_documents(plan: Plan, files: Sequence[str]) -> tuple[Plan, MissingDocuments]:
    """The plan of a run that serves documents as padding from its first step on, and which these are.

    Args:
        plan: the order; or a stream, of which nobody knows the documents.
        files: lists of documents; none for a run without such.

    Raises:
        InputError: a list cannot be read, or is of another store or generation.
        PlanError, SettingsError: as :func:`ban_missing_documents`.
    """
    if not files:
        return plan, {}
    if not isinstance(plan, Plan):
        raise PlanError(
            "MediaOptions.replace is of a plan that can be edited, and this is a stream, or the order of one: prepare "
            "the data into a store, and leave order out."
        )
    missing_documents = find_missing_documents(plan.stores, files)
    return ban_missing_documents(plan, missing_documents, 0), missing_documents


def find_missing_documents(stores: Mapping[str, object], files: Sequence[str]) -> MissingDocuments:
    """The documents of a plan's sources that lists name.

    Args:
        stores: of the plan, by the names of their sources.
        files: the lists.

    Raises:
        InputError: one cannot be read, or is of another store or generation.
    """
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
                f"{file} names documents of {listed.store}, and of no store or generation that is opened here "
                f"({', '.join(store.location.name for store in opened.values())}): make the list of that one "
                "(batchloom check STORE --gone FILE; --generation for an older one)."
            )
        for name, documents in matches.items():
            documents_by_source.setdefault(name, set()).update(documents)
    return {name: tuple(sorted(some)) for name, some in sorted(documents_by_source.items()) if some}


def ban_missing_documents(plan: Plan, missing_documents: MissingDocuments, step: int) -> Plan:
    """The plan that serves documents as padding from a step on, as far as it does not yet.

    Args:
        plan: the order.
        missing_documents: the documents of its sources.
        step: of a window of ``group_by_length`` the whole one: edits do not go through one, and this moves no row.

    Raises:
        PlanError: a plan that takes no edits, or has one behind the step.
        SettingsError: documents that a source does not have.
    """
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
    """The plan that goes on from a state, and its position there.

    What the state's journal does not ban yet is banned from there on: what was served before stays as it was.

    Args:
        plan: of the loader.
        missing_documents: the documents that it serves as padding.
        state: of a plan, whose journal a plan takes that nobody edited.

    Raises:
        StateError: it is of another plan.
        PlanError, SettingsError: as :func:`ban_missing_documents`.
    """
    if missing_documents:
        bare = Plan(plan.orders.data, plan.spec, (), plan.orders)
        plan = bare if plan.edits == ban_missing_documents(bare, missing_documents, 0).edits else plan
    plan = with_journal(plan, state)
    position = plan.resume(state)
    if not missing_documents:
        return plan, position
    return ban_missing_documents(plan, missing_documents, plan.orders.course.step_at(position)[0]), position
