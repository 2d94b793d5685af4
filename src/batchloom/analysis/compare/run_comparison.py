"""Comparison of finished runs by step or by tokens, each with a verdict."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from batchloom.analysis.compare.loss_curves import LossCurve
from batchloom.analysis.compare.verdict import LossVerdict, judge_loss_curve
from batchloom.core.settings import raise_problems

CurveAxis = Literal["step", "tokens"]
# Points at the end of a curve whose median is used, so that the noise of one step has no effect.
_TAIL_POINTS = 10


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A run compared with the first.

    Attributes:
        curve: loss curve of the run.
        verdict: verdict on the curve.
        at_common: loss at the end of the shortest run: the median of the last ten points up to there; None if the run
            begins later.
        first_apart: first step that differs from the first run by more than the tolerance; None if there is none, or
            no tolerance was given.
        common: number of steps that both runs have.
    """

    curve: LossCurve
    verdict: LossVerdict
    at_common: float | None
    first_apart: int | None
    common: int


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Result of a comparison of runs.

    Attributes:
        by: x axis of the comparison.
        until: end of the shortest run on this axis.
        tolerance: relative tolerance; None if losses were not compared with each other.
        runs: runs in the given order.
    """

    by: CurveAxis
    until: float
    tolerance: float | None
    runs: tuple[ComparedRun, ...]

    @property
    def synthetic(self) -> bool:
        """True if any run records that its data was synthetic."""
        return any(run.curve.synthetic for run in self.runs)

    @property
    def agree(self) -> bool:
        """True if no run differs by more than the tolerance or lacks common steps.

        Without a tolerance it is always True.
        """
        compared = self.tolerance is not None
        return not any(run.first_apart is not None or (compared and not run.common) for run in self.runs)


def compare_runs(curves: Sequence[LossCurve], by: CurveAxis = "step", tolerance: float | None = None) -> RunComparison:
    """Compare loss curves with the first one, and judge each.

    Args:
        curves: curves of the runs, at least one.
        by: x axis of the comparison.
        tolerance: relative tolerance of losses at common steps; None to compare none.

    Raises:
        SettingsError: ``by`` is ``tokens``, and a run has no token counts or invalid ones.
    """
    if by == "tokens":
        raise_problems([problem for curve in curves if (problem := _find_token_problem(curve))])
    until = min(get_curve_positions(curve, by)[-1] for curve in curves)
    first, runs = curves[0], []
    for curve in curves:
        xs, losses = np.array(get_curve_positions(curve, by)), np.array(curve.losses)
        tail_losses = losses[xs <= until][-_TAIL_POINTS:]
        at_common = float(np.median(tail_losses)) if tail_losses.size else None
        common_steps = sorted({*curve.steps} & {*first.steps})
        curve_losses, first_losses = (dict(zip(c.steps, c.losses, strict=True)) for c in (curve, first))
        first_apart = None
        if tolerance is not None:
            first_apart = next(
                (s for s in common_steps if not is_close_loss(curve_losses[s], first_losses[s], tolerance)),
                None,
            )
        verdict = judge_loss_curve(get_curve_positions(curve, by), curve.losses, "token" if by == "tokens" else "step")
        runs.append(ComparedRun(curve, verdict, at_common, first_apart, len(common_steps)))
    return RunComparison(by, until, tolerance, tuple(runs))


def _find_token_problem(curve: LossCurve) -> str:
    """Explain why a run cannot be compared by tokens; empty if it can."""
    if curve.tokens is None:
        return f"by: {curve.name} does not say how many tokens it has seen; compare by step"
    previous_tokens = 0.0
    for step, tokens in zip(curve.steps, curve.tokens, strict=True):
        # This form also rejects NaN, which compares false.
        if not previous_tokens <= tokens < np.inf:
            return (
                f"by: {curve.name} says {tokens:,.0f} tokens at step {step:,}, after {previous_tokens:,.0f}; "
                "compare by step"
            )
        previous_tokens = tokens
    return ""


def get_curve_positions(curve: LossCurve, by: CurveAxis) -> tuple[float, ...]:
    """Return the x values of a curve."""
    return curve.tokens if by == "tokens" and curve.tokens is not None else curve.steps


def is_close_loss(loss: float, reference: float, tolerance: float) -> bool:
    """Return whether a loss is within a relative tolerance of the reference.

    A loss that is not finite is close to nothing.
    """
    return bool(np.isfinite(reference) and abs(loss - reference) <= tolerance * abs(reference))
