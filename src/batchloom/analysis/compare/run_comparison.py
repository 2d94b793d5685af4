"""Finished runs beside each other: by step or by tokens, each with its verdict."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from batchloom.analysis.compare.loss_curves import LossCurve
from batchloom.analysis.compare.verdict import LossVerdict, judge_loss_curve
from batchloom.core.settings import raise_problems

CurveAxis = Literal["step", "tokens"]
# Of the end of a curve, so that one step's noise decides nothing.
_TAIL_POINTS = 10


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A run beside the first.

    Attributes:
        curve: of the run.
        verdict: on it.
        at_common: its loss where the shortest run ends: the median of its last ten points up to there; None where it
            begins later.
        first_apart: where it first differs from the first run by more than the tolerance; None where it does not, or no
            tolerance was given.
        common: steps that both have, where losses were compared.
    """

    curve: LossCurve
    verdict: LossVerdict
    at_common: float | None
    first_apart: int | None
    common: int


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Runs that were compared.

    Attributes:
        by: what they stand beside each other by.
        until: where the shortest of them ends.
        tolerance: relative; None where losses were not compared with each other.
        runs: in the order given.
    """

    by: CurveAxis
    until: float
    tolerance: float | None
    runs: tuple[ComparedRun, ...]

    @property
    def synthetic(self) -> bool:
        """Whether a run says that it was on made-up data."""
        return any(run.curve.synthetic for run in self.runs)

    @property
    def agree(self) -> bool:
        """Whether none differs by more than the tolerance, or could not be compared; so too where none was given."""
        compared = self.tolerance is not None
        return not any(run.first_apart is not None or (compared and not run.common) for run in self.runs)


def compare_runs(curves: Sequence[LossCurve], by: CurveAxis = "step", tolerance: float | None = None) -> RunComparison:
    """Compare runs.

    Raises:
        SettingsError: by tokens, and a run does not say how many it has seen, or says what cannot be.
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
    """Why a run cannot stand by its tokens; empty where it can."""
    if curve.tokens is None:
        return f"by: {curve.name} does not say how many tokens it has seen; compare by step"
    previous_tokens = 0.0
    for step, tokens in zip(curve.steps, curve.tokens, strict=True):
        # Not a number is never above.
        if not previous_tokens <= tokens < np.inf:
            return (
                f"by: {curve.name} says {tokens:,.0f} tokens at step {step:,}, after {previous_tokens:,.0f}; "
                "compare by step"
            )
        previous_tokens = tokens
    return ""


def get_curve_positions(curve: LossCurve, by: CurveAxis) -> tuple[float, ...]:
    """Where the points of a curve stand."""
    return curve.tokens if by == "tokens" and curve.tokens is not None else curve.steps


def is_close_loss(loss: float, reference: float, tolerance: float) -> bool:
    """Whether a loss is within a relative tolerance of another; what is no finite number is near nothing."""
    return bool(np.isfinite(reference) and abs(loss - reference) <= tolerance * abs(reference))
