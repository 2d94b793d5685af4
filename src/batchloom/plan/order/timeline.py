"""Edits of a run, and its timeline of weights, batch sizes and sequence lengths.

The timeline maps each position to a source and an index.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import PlanError, SettingsError
from batchloom.core.settings import as_int, coerce_int_fields, is_text, quote_value, raise_problems, suggest
from batchloom.plan.mixture import (
    Mixture,
    PlanStore,
    Schedule,
    Stage,
    Weights,
    list_weight_problems,
    make_schedule,
    uses_size_weights,
)
from batchloom.plan.packing.plan_spec import PlanSpec, describe_window_conflict, list_window_problems
from batchloom.plan.packing.rows import Ints

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
        if not any(getattr(self, name) for name in _CHANGE_FIELDS) and self.weights is None:
            problems.append(f"step: the edit changes nothing; give one of {', '.join(_CHANGE_FIELDS)}")
        raise_problems(problems)


def _parse_bans(ban: Any, problems: list[str]) -> dict[str, tuple[int, ...]]:
    bans: dict[str, tuple[int, ...]] = {}
    if not isinstance(ban, Mapping):
        problems.append(f"ban: {quote_value(ban)} is not a mapping of sources to document numbers")
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
            problems.append(f"ban.{name}: unknown source{suggest(name, stores)}")
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


# The bound leaves room in 64 bits for the positions after an edit.
_MAX_POSITION = 1 << 60
# Number of positions checked for exhausted sources at once.
_STRIDE = 65_536


class StepRange(NamedTuple):
    """Steps of equal size from ``step`` on, the first at ``position``."""

    step: int
    position: int
    size: int
    seq_len: int


class WeightChange(NamedTuple):
    position: int
    weights: Weights


@dataclass(frozen=True, slots=True)
class RunLayout:
    """Step ranges and weight changes of a run, which depend on no document length."""

    step_ranges: tuple[StepRange, ...]  # ranges of steps of equal size, in order
    changes: tuple[WeightChange, ...]  # weight changes by position; the first is at 0
    seq_len_changes: tuple[tuple[int, int], ...]  # (position, seq_len) of each change of ``seq_len``
    bans: tuple[tuple[int, str, tuple[int, ...]], ...]  # (position, source, document numbers) of each ban

    def weights_by_era(self) -> tuple[tuple[Weights, ...], ...]:
        """Return the weights that apply in each era, between changes of ``seq_len``."""
        begins = [0, *(position for position, _ in self.seq_len_changes)]
        eras = []
        for begin, end in zip(begins, [*begins[1:], None], strict=True):
            first = bisect_right(self.changes, begin, key=lambda change: change.position) - 1
            eras.append(
                tuple(
                    change.weights
                    for change in self.changes[first:]
                    if end is None or max(begin, change.position) < end
                )
            )
        return tuple(eras)

    def range_at(self, position: int) -> StepRange:
        range_index = bisect_right(self.step_ranges, position, key=lambda step_range: step_range.position)
        return self.step_ranges[max(range_index - 1, 0)]

    def first_position(self, step: int) -> int:
        step_range = self.range_of_step(step)
        return step_range.position + (step - step_range.step) * step_range.size

    def step_at(self, position: int) -> tuple[int, int]:
        """Return the step that holds a position, and the index inside it.

        For a skipped position return the next step.
        """
        step_range = self.range_at(position)
        if position < step_range.position:
            return step_range.step, 0
        step, inside = divmod(position - step_range.position, step_range.size)
        range_index = self.step_ranges.index(step_range)
        if range_index + 1 < len(self.step_ranges) and step_range.step + step >= self.step_ranges[range_index + 1].step:
            return self.step_ranges[range_index + 1].step, 0
        return step_range.step + step, inside

    def steps_until(self, position: int) -> int:
        """Return the number of steps that begin before a position."""
        step, inside = self.step_at(position)
        return step + (inside > 0)

    def range_of_step(self, step: int) -> StepRange:
        if len(self.step_ranges) == 1:
            return self.step_ranges[0]
        range_index = bisect_right(self.step_ranges, step, key=lambda step_range: step_range.step)
        return self.step_ranges[max(range_index - 1, 0)]


def build_run_layout(weights: Weights, first: StepRange, stages: Sequence[Stage], edits: Sequence[Edit]) -> RunLayout:
    step_ranges, changes = [first], [WeightChange(0, weights)]
    seq_len_changes: list[tuple[int, int]] = []
    bans: list[tuple[int, str, tuple[int, ...]]] = []
    remaining_stages, remaining_edits, tokens = list(stages), list(edits), 0
    while remaining_stages or remaining_edits:
        current_range = step_ranges[-1]
        stage_step = _compute_stage_step(remaining_stages[0], current_range, tokens) if remaining_stages else None
        if stage_step is not None and (not remaining_edits or stage_step <= remaining_edits[0].step):
            at = current_range.position + (stage_step - current_range.step) * current_range.size
            changes.append(WeightChange(at, remaining_stages.pop(0).weights))
            continue
        edit = remaining_edits.pop(0)
        tokens += (edit.step - current_range.step) * current_range.size * current_range.seq_len
        position = current_range.position + (edit.step - current_range.step + edit.skip) * current_range.size
        if position > _MAX_POSITION:
            raise PlanError(
                f"The edit at step {edit.step:,} begins at sequence {position:,}, and a run has at most "
                f"{_MAX_POSITION:,} sequences. Give a smaller skip or step."
            )
        next_range = StepRange(
            edit.step, position, edit.global_batch_size or current_range.size, edit.seq_len or current_range.seq_len
        )
        if next_range.step == current_range.step:
            step_ranges.pop()
        step_ranges.append(next_range)
        if edit.seq_len and edit.seq_len != current_range.seq_len:
            seq_len_changes.append((position, edit.seq_len))
        if edit.weights is not None:
            changes.append(WeightChange(position, edit.weights))
            remaining_stages = []
        bans += [(position, name, tuple(numbers)) for name, numbers in edit.ban.items()]
    return RunLayout(tuple(step_ranges), tuple(changes), tuple(seq_len_changes), tuple(bans))


def _compute_stage_step(stage: Stage, current_range: StepRange, tokens: int) -> int:
    if stage.step is not None:
        return max(stage.step, current_range.step)
    missing_tokens = max((stage.tokens or 0) - tokens, 0)
    return current_range.step - (-missing_tokens // (current_range.size * current_range.seq_len))


@dataclass(frozen=True, slots=True, eq=False)
class TimelineSegment:
    """Positions under one schedule and one sequence length.

    With K lanes a source has K positions in turn, so that they are of different lanes.
    """

    position: int  # first position
    sources: NDArray[np.int32]  # number in the plan of each source of the schedule, int32 [sources of the schedule]
    schedule: Schedule  # schedule of the sources
    era: int  # number of earlier changes of ``seq_len``
    bases: Ints  # sequences of each source served earlier in this era, int64 [sources]
    lanes: int

    @property
    def plain(self) -> bool:
        """True for one source; then :meth:`index` suffices."""
        return len(self.sources) == 1

    def index(self, position: int) -> int:
        """Return the index in the era of a position of a plain segment."""
        return int(self.bases[self.sources[0]]) + position - self.position

    def at(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return the source and the index in the era of positions."""
        turns, inside = np.divmod(positions - self.position, self.lanes)
        local, numbers = self.schedule.at(turns)
        sources = self.sources[local].astype(np.int64)
        return sources, self.bases[sources] + numbers * self.lanes + inside

    def served(self, position: int) -> Ints:
        """Return the value of ``bases`` for a segment that starts at a position."""
        turn, inside = divmod(position - self.position, self.lanes)
        counts = self.bases.copy()
        counts[self.sources] += self.schedule.count(turn) * self.lanes
        if inside:
            counts[self.sources[self.schedule.at(np.array([turn]))[0]]] += inside
        return counts

    def find_position(self, source: int, index: int) -> int | None:
        """Return the position of a sequence; None if earlier or absent."""
        local = np.flatnonzero(self.sources == source)
        before = int(self.bases[source])
        if not local.size or index < before:
            return None
        number, inside = divmod(index - before, self.lanes)
        return self.position + self.schedule.find(int(local[0]), number) * self.lanes + inside


@final
class Timeline:
    """Segments of a run, created on demand.

    Exhaustion of a source depends on its counts, so segments cannot be created in advance.

    Args:
        layout: run layout with the changes of weights and lengths.
        slots: function (weights, exhausted sources, era) -> slots of a period by source number; empty if no
            source is left.
        limit: function (source, era, count) -> sequences of a source in an era if it has fewer than the count; else
            None, without counting pools where that is certain.
        sources: number of sources.
        lanes: number of lanes.
        stop: whether the run ends when the first source is exhausted; else the others take its share.

    Attributes:
        exhausted: position from which each exhausted source is unavailable.
        end: position where the run ends because no sequence is left; None if unknown.
        sure: position up to which all exhausted sources are known.
    """

    def __init__(
        self,
        layout: RunLayout,
        slots: Callable[[Weights, frozenset[int], int], Mapping[int, int]],
        limit: Callable[[int, int, int], int | None],
        *,
        sources: int,
        lanes: int,
        stop: bool,
    ) -> None:
        self._layout = layout
        self._slots = slots
        self._limit = limit
        self._lanes = lanes
        self._stop = stop
        self.exhausted: dict[int, int] = {}
        self.end: int | None = None
        self.sure = 0
        self._eras = [0, *(position for position, _ in layout.seq_len_changes)]
        # Positions at which a segment begins, whatever is exhausted.
        self._marks = sorted({*(change.position for change in layout.changes), *self._eras[1:]})
        self._segments: list[TimelineSegment] = []
        self._append(0, np.zeros(sources, np.int64))

    def _append(self, position: int, served: Ints) -> None:
        era = bisect_right(self._eras, position) - 1
        if self._segments and era != self._segments[-1].era:
            served = np.zeros_like(served)
        change_index = bisect_right(self._layout.changes, position, key=lambda change: change.position)
        weights = self._layout.changes[change_index - 1].weights
        exhausted = frozenset(n for n, exhausted_at in self.exhausted.items() if exhausted_at <= position)
        slots = self._slots(weights, exhausted, era)
        if not slots:
            self.end = position if self.end is None else min(self.end, position)
            return
        numbers = np.array(sorted(slots), np.int32)
        schedule = make_schedule(tuple(slots[n] for n in numbers.tolist()))
        self._segments.append(TimelineSegment(position, numbers, schedule, era, served, self._lanes))

    def segment_at(self, position: int) -> TimelineSegment | None:
        """Return the segment that holds a position; None past the end of the run."""
        while self.sure <= position and (self.end is None or self.sure < self.end):
            self._extend_to(position)
        if self.end is not None and position >= self.end:
            return None
        segment_index = bisect_right(self._segments, position, key=lambda segment: segment.position)
        return self._segments[segment_index - 1]

    def until(self, segment: TimelineSegment) -> int | None:
        """Return the currently known end of a segment; None if nothing is known to follow."""
        segment_index = self._segments.index(segment)
        if segment_index + 1 < len(self._segments):
            return self._segments[segment_index + 1].position
        mark = self._find_mark(segment.position)
        ends = [position for position in (mark, self.end) if position is not None]
        return min(ends) if ends else None

    def segments(self) -> Sequence[TimelineSegment]:
        return self._segments

    def _find_mark(self, position: int) -> int | None:
        """Return the first mark after a position."""
        mark_index = bisect_right(self._marks, position)
        return self._marks[mark_index] if mark_index < len(self._marks) else None

    def _extend_to(self, position: int) -> None:
        """Check the last segment up to its end or past ``position``, whichever is first."""
        segment = self._segments[-1]
        mark = self._find_mark(segment.position)
        # Positions are checked in strides, because sequential lookups would otherwise repeat the check each time.
        target = max(position + 1, self.sure + _STRIDE)
        if mark is not None:
            target = min(target, mark)
        first = self._find_first_exhausted(segment, target)
        if first is None:
            self.sure = target
            if target == mark:
                self._append(target, segment.served(target))
            return
        self._exhaust(*first)
        self.sure = max(self.sure, first[0])

    def _exhaust(self, position: int, number: int) -> None:
        """End a source at a position of the last segment."""
        self.exhausted[number] = position
        if self._stop:
            self.end = position
        else:
            self._append(position, self._segments[-1].served(position))

    def _find_first_exhausted(self, segment: TimelineSegment, target: int) -> tuple[int, int] | None:
        """Return (position, source) of the first source exhausted before ``target``."""
        served = segment.served(target)
        exhausted_sources = []
        for number in segment.sources.tolist():
            limit = self._limit(number, segment.era, int(served[number]))
            if limit is not None:
                exhausted_sources.append((segment.find_position(number, limit) or segment.position, number))
        return min(exhausted_sources, default=None)

    def adopt(self, exhausted: Mapping[int, int], position: int) -> None:
        """Load known exhausted sources up to a position.

        No source other than ``exhausted`` ends before it.
        """
        for exhausted_at, number in sorted((exhausted_at, number) for number, exhausted_at in exhausted.items()):
            if number in self.exhausted:
                continue
            self._begin_marked_segments(exhausted_at)
            self._exhaust(exhausted_at, number)
            self.sure = max(self.sure, exhausted_at)
        self._begin_marked_segments(position)
        self.sure = max(self.sure, position)

    def _begin_marked_segments(self, position: int) -> None:
        while (mark := self._find_mark(self._segments[-1].position)) is not None:
            # No segment begins past the end of the run.
            if mark > position or self.end is not None:
                break
            self._append(mark, self._segments[-1].served(mark))

    def find_end(self) -> int:
        """Return the position at which exhausted sources end the run."""
        stride = 1 << 16
        while self.end is None:
            self.segment_at(self.sure + stride)
            stride *= 2
        return self.end
