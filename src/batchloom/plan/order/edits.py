"""Edits of a run."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchloom.core.errors import PlanError, SettingsError
from batchloom.core.settings import as_int, coerce_int_fields, is_text, quote_value, raise_problems, suggest
from batchloom.plan.mixture import Mixture, PlanStore, Weights, list_weight_problems, uses_size_weights
from batchloom.plan.packing.plan_spec import PlanSpec, describe_window_conflict, list_window_problems

_BOUNDS = {"step": (0, 1 << 48), "skip": (0, 1 << 48), "global_batch_size": (1, 1 << 24), "seq_len": (1, 1 << 24)}
_CHANGE_FIELDS = ("weights", "skip", "ban", "global_batch_size", "seq_len")
_CAPPED_HINT = (
    "are limited by most_epochs for the run's original number of tokens; an edit of batch size, seq_len or skip "
    "must also give weights as numbers"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """Change of a run from a step on; earlier steps keep their content.

    Attributes:
        step: first step the edit applies to.
        weights: new weights of a mixture, which replace all earlier weights and all later stages. A source
            without a weight is retired, a new one is added, and the others continue from their current position.
        skip: number of steps to leave out: ``step`` becomes the former step ``step + skip``.
        ban: numbers of banned documents by source. Their tokens become padding without loss; the rows are
            otherwise unchanged.
        global_batch_size: sequences of a step from here on.
        seq_len: tokens of a sequence from here on. The remainder of each source's pool is repacked.
        note: reason of the edit, for readers of the journal.
    """

    step: int
    weights: Weights | None = None
    skip: int = 0
    ban: Mapping[str, Sequence[int]] = field(default_factory=dict)
    global_batch_size: int | None = None
    seq_len: int | None = None
    note: str = ""

    def __post_init__(self) -> None:
        problems = coerce_int_fields(self, _BOUNDS)
        if self.note and not is_text(self.note):
            problems.append(f"note: {quote_value(self.note)} is not text")
        object.__setattr__(self, "ban", _parse_bans(self.ban, problems))
        # A field that is invalid changes something, too.
        if not problems and not any(getattr(self, name) for name in _CHANGE_FIELDS) and self.weights is None:
            problems.append(f"step: the edit changes nothing; give one of {', '.join(_CHANGE_FIELDS)}")
        raise_problems(problems)


def _parse_bans(ban: Any, problems: list[str]) -> dict[str, tuple[int, ...]]:
    bans: dict[str, tuple[int, ...]] = {}
    if not isinstance(ban, Mapping):
        shape = "a mapping of sources to document numbers; for a single store give {'data': [...]}"
        problems.append(f"ban: {quote_value(ban)} is not {shape}")
        return bans
    for name, numbers in ban.items():
        single = isinstance(numbers, (str, bytes)) or not isinstance(numbers, Iterable)
        document_numbers = [numbers] if single else list(numbers)
        as_ints = [as_int(number) for number in document_numbers]
        invalid_numbers = [n for n, w in zip(document_numbers, as_ints, strict=True) if w is None or w < 0]
        problems += [f"ban.{name}: {quote_value(number)} is not a document number" for number in invalid_numbers[:3]]
        bans[str(name)] = tuple(sorted({w for w in as_ints if w is not None and w >= 0}))
    return bans


def edit_to_plain(edit: Edit) -> dict[str, Any]:
    plain: dict[str, Any] = {"step": edit.step}
    for name in _CHANGE_FIELDS:
        value = getattr(edit, name)
        if value or (name == "weights" and value is not None):
            plain[name] = value
    if edit.ban:
        plain["ban"] = {name: list(numbers) for name, numbers in edit.ban.items()}
    return {**plain, "note": edit.note} if edit.note else plain


def check_edit(edit: Edit, stores: Mapping[str, Any], last: int, spec: PlanSpec, sizes: Mapping[str, int]) -> None:
    problems = []
    if edit.weights is not None:
        problems += list_weight_problems(edit.weights, stores, "weights")
    for name, numbers in edit.ban.items():
        if name not in stores:
            problems.append(f"ban.{name}: unknown source; the sources are {', '.join(stores)}{suggest(name, stores)}")
        elif numbers and numbers[-1] >= sizes[name]:
            problems.append(f"ban.{name}: document {numbers[-1]} does not exist; the source has {sizes[name]}")
    if edit.global_batch_size and edit.global_batch_size % spec.lanes:
        problems.append(f"global_batch_size: {edit.global_batch_size} is not a multiple of lanes {spec.lanes}")
    window = spec.group_by_length
    if window and edit.global_batch_size:
        problems += list_window_problems(window, edit.global_batch_size)
    if window and edit.skip % window:
        problems.append(
            f"skip: {edit.skip} steps do not end at a window of group_by_length {window}, inside which rows are "
            f"ordered by length; give {-(-edit.skip // window) * window}"
        )
    raise_problems(problems)
    if edit.step < last:
        raise PlanError(
            f"An edit at step {edit.step} precedes the edit at step {last}; edits can only be appended. Give a step "
            f"of at least {last}."
        )
    if window and edit.step % window:
        raise PlanError(f"An edit at step {edit.step} is {describe_window_conflict(edit.step, window)}")


def check_run(
    data: PlanStore | Mixture, stores: Mapping[str, PlanStore], spec: PlanSpec, edits: Sequence[Edit]
) -> None:
    mixture = data if isinstance(data, Mixture) else None
    for name, store in stores.items():
        if not store.lengths.size:
            subject = f"Source {name!r}" if mixture else "The store"
            raise PlanError(f"{subject} has no documents in this subset; there is nothing to plan.")
    if mixture and spec.epochs is not None:
        raise SettingsError(["epochs: a mixture has no common epochs, only epochs per source (SourceSpec); give steps"])
    if mixture and spec.steps is None and mixture.exhausted == "repeat":
        raise SettingsError(
            ["steps: missing; a mixture that repeats its sources has no end; give steps, or exhausted='stop'"]
        )
    sizes = {name: store.lengths.size for name, store in stores.items()}
    last = 0
    weights: Weights = mixture.weights if mixture else {}
    for edit in edits:
        if edit.weights is not None and mixture is None:
            raise SettingsError(["weights: a single store has no weights; start with a Mixture to change them"])
        check_edit(edit, stores, last, spec, sizes)
        if edit.weights is not None:
            weights = edit.weights
        changes_sizes = edit.global_batch_size or edit.seq_len or edit.skip
        if mixture and mixture.most_epochs and uses_size_weights(weights) and changes_sizes:
            raise SettingsError([f"weights: missing; weights by size {_CAPPED_HINT}"])
        last = edit.step


def refuse_past_end(edit: Edit, steps: int | None) -> None:
    """Refuse an edit past the end of a run; no later edit could precede it."""
    if steps is not None and edit.step > steps:
        raise PlanError(
            f"The run has {steps:,} steps, and after an edit at step {edit.step:,} no earlier edit would be "
            f"possible. Give a step of at most {steps:,}, or extend the run first."
        )
