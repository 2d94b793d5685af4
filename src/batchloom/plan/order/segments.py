"""Segments of a run: its batch sizes, sequence lengths, weights and bans.

They follow from stages and edits alone, and depend on no document length.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import final

from batchloom.core.errors import PlanError
from batchloom.plan.mixture import Stage, Weights
from batchloom.plan.order.edits import Edit

# The bound leaves room in 64 bits for the positions after an edit.
_MAX_POSITION = 1 << 60


@dataclass(frozen=True, slots=True)
class Segment:
    """Part of a run without stage or edit inside.

    Attributes:
        start: first position.
        step: first step.
        size: sequences of a step.
        seq_len: tokens of a sequence.
        weights: weights of the sources.
        schedule: number of earlier changes of the weights; each begins a schedule.
        era: number of earlier changes of ``seq_len``; each packs the sources again.
        bans: documents by source that are banned from here on, besides those of earlier segments.
    """

    start: int
    step: int
    size: int
    seq_len: int
    weights: Weights
    schedule: int = 0
    era: int = 0
    bans: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def count_tokens(self, step: int) -> int:
        """Count the tokens of the segment before a step."""
        return (step - self.step) * self.size * self.seq_len

    def locate_step(self, step: int) -> int:
        """Return the first position of a step, also of one after the segment."""
        return self.start + (step - self.step) * self.size


@final
@dataclass(frozen=True, slots=True)
class RunLayout:
    """Segments of a run, in order.

    One may be empty: then another edit begins where it begins.
    """

    segments: tuple[Segment, ...]

    def segment_at(self, position: int) -> Segment:
        """Return the last segment that begins at or before a position."""
        return self.segments[bisect_right(self.segments, position, key=lambda segment: segment.start) - 1]

    def segment_of_step(self, step: int) -> Segment:
        """Return the segment of a step."""
        if len(self.segments) == 1:
            return self.segments[0]
        number = bisect_right(self.segments, step, key=lambda segment: segment.step)
        return self.segments[max(number - 1, 0)]

    def first_position(self, step: int) -> int:
        """Return the first position of a step."""
        return self.segment_of_step(step).locate_step(step)

    def step_at(self, position: int) -> tuple[int, int]:
        """Return the step that holds a position, and the index inside it.

        For a skipped position return the next step.
        """
        number = bisect_right(self.segments, position, key=lambda segment: segment.start) - 1
        segment = self.segments[number]
        steps, inside = divmod(position - segment.start, segment.size)
        if number + 1 < len(self.segments) and segment.step + steps >= self.segments[number + 1].step:
            return self.segments[number + 1].step, 0
        return segment.step + steps, inside

    def steps_until(self, position: int) -> int:
        """Return the number of steps that begin before a position."""
        step, inside = self.step_at(position)
        return step + (inside > 0)

    def list_eras(self) -> list[list[Segment]]:
        """Return the segments of each era."""
        eras: list[list[Segment]] = [[] for _ in range(self.segments[-1].era + 1)]
        for segment in self.segments:
            eras[segment.era].append(segment)
        return eras

    def list_schedules(self) -> list[Segment]:
        """Return the segments that begin a schedule or an era, without empty ones."""
        firsts = [self.segments[0]]
        for segment in self.segments[1:]:
            if (segment.schedule, segment.era) == (firsts[-1].schedule, firsts[-1].era):
                continue
            if segment.start == firsts[-1].start:
                firsts.pop()
            firsts.append(segment)
        return firsts


def build_run_layout(first: Segment, stages: Sequence[Stage], edits: Sequence[Edit]) -> RunLayout:
    """Return the segments of a run that begins with ``first``."""
    segments = [first]
    remaining_stages = list(stages)
    remaining_edits = list(edits)
    tokens = 0
    while remaining_stages or remaining_edits:
        current = segments[-1]
        stage_step = _find_stage_step(remaining_stages[0], current, tokens) if remaining_stages else None
        if stage_step is not None and (not remaining_edits or stage_step <= remaining_edits[0].step):
            following = replace(
                current,
                start=current.locate_step(stage_step),
                step=stage_step,
                weights=remaining_stages.pop(0).weights,
                schedule=current.schedule + 1,
                bans={},
            )
        else:
            edit = remaining_edits.pop(0)
            following = _apply_edit(current, edit)
            if edit.weights is not None:
                remaining_stages = []
        tokens += current.count_tokens(following.step)
        segments.append(following)
    return RunLayout(tuple(segments))


def _find_stage_step(stage: Stage, current: Segment, tokens: int) -> int:
    """Return the first step of a stage; ``tokens`` are those before ``current``."""
    if stage.step is not None:
        return max(stage.step, current.step)
    missing_tokens = max((stage.tokens or 0) - tokens, 0)
    return current.step - (-missing_tokens // (current.size * current.seq_len))


def _apply_edit(current: Segment, edit: Edit) -> Segment:
    start = current.locate_step(edit.step + edit.skip)
    if start > _MAX_POSITION:
        raise PlanError(
            f"The edit at step {edit.step:,} begins at sequence {start:,}, and a run has at most {_MAX_POSITION:,} "
            "sequences. Give a smaller skip or step."
        )
    seq_len = edit.seq_len or current.seq_len
    return Segment(
        start=start,
        step=edit.step,
        size=edit.global_batch_size or current.size,
        seq_len=seq_len,
        weights=current.weights if edit.weights is None else edit.weights,
        schedule=current.schedule + (edit.weights is not None),
        era=current.era + (seq_len != current.seq_len),
        bans=edit.ban,
    )
