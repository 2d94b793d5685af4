"""What ``overlong`` leaves out of a run, told to the log ``batchloom`` before the run and counted."""

import threading

from batchloom.batches.origin import log_of
from batchloom.plan.plan import Plan

# Counting reads every length: up to so many documents that takes a few milliseconds.
_AT_ONCE = 1 << 20


def announce_left_out(plan: Plan) -> bool:
    """Tell what is left out, with numbers where they can be had at once.

    Returns:
        Whether they could not: then :func:`count_left_out` tells them.
    """
    spec = plan.spec
    if spec.overlong not in ("drop", "truncate"):
        return False
    if plan.documents <= _AT_ONCE:
        _tell_numbers(plan)
        return False
    what = "documents" if spec.overlong == "drop" else "the ends of documents"
    log_of(*plan.stores.values()).warning(
        "overlong=%r leaves out %s longer than seq_len %d; plan.left_out() counts them, and "
        "overlong='split' keeps them.",
        spec.overlong,
        what,
        spec.seq_len,
    )
    return True


def announce_cut(plan: Plan) -> None:
    """Tell that conversations are cut, where a store of texts and conversations has long documents."""
    long = plan.documents > _AT_ONCE or plan.longest() > plan.spec.seq_len
    if long:
        log_of(*plan.stores.values()).warning(
            "The store holds texts and conversations, and its documents longer than seq_len %d are cut, conversations "
            "too: overlong='drop' leaves all of them out; prepare --max-tokens %d leaves out conversations alone.",
            plan.spec.seq_len,
            plan.spec.seq_len,
        )


def count_left_out(plan: Plan) -> None:
    """Count in a thread of its own, and tell."""
    threading.Thread(
        target=_tell_numbers, args=(plan,), name="batchloom-left-out", daemon=True
    ).start()


def _tell_numbers(plan: Plan) -> None:
    left_out, spec = plan.left_out(), plan.spec
    if left_out.tokens:
        log_of(*plan.stores.values()).warning(
            "overlong=%r leaves %s of %s documents and %s tokens out of every epoch, as longer than seq_len %d; "
            "overlong='split' keeps them.",
            spec.overlong,
            f"{left_out.documents:,}",
            f"{plan.documents:,}",
            f"{left_out.tokens:,}",
            spec.seq_len,
        )
