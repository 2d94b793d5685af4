"""Documents longer than a sequence: what becomes of them where nobody says so, and what is told of it."""

from collections.abc import Sequence
from itertools import islice

from batchloom.core.errors import PlanError
from batchloom.plan import PlanSpec
from batchloom.plan.packing import OverlongMode
from batchloom.preparation.documents import RecordParsers
from batchloom.sources.files import Source

# So many files are looked into for a warning; what else holds conversations is told when it is come to.
_MAX_SAMPLED_FILES = 64
# Kinds of files that are texts whatever they hold.
_TEXT_KINDS = ("text", "code")


def may_hold_media(sources: Sequence[Source], readings: RecordParsers) -> bool:
    """Whether documents of some source may hold images or audio, by how it is read."""
    return readings.reads_media and any(
        readings.get_parser(source).record_kind in ("conversation", "interleaved") for source in sources
    )


def check_no_cuts(packing: str, overlong: OverlongMode | None) -> None:
    """Refuse what cuts documents, of a stream with images or audio.

    Raises:
        PlanError: says what to give.
    """
    setting = "packing='wrap'" if packing == "wrap" else f"overlong={overlong!r}"
    if packing == "wrap" or overlong in ("split", "truncate"):
        raise PlanError(
            f"{setting} cuts documents, and one with images or audio is never cut: give packing='best_fit' and "
            "overlong='drop' or 'error'."
        )


def choose_overlong(sources: Sequence[Source], readings: RecordParsers) -> OverlongMode:
    """``drop`` where every input holds conversations, or one may hold media, else ``split``.

    As a loader over their store has it, but for conversations beside texts that a processor is given for and that name
    no media: whether some do is known when all are read.

    Files that are texts by their kind are not looked into, nor is any after the first that holds
    no conversations.
    """
    if may_hold_media(sources, readings):
        return "drop"
    texts_first = sorted(sources, key=lambda source: source.kind not in _TEXT_KINDS)
    alone = all(readings.get_parser(source).templated for source in texts_first)
    return "drop" if alone else "split"


def has_conversations(sources: Sequence[Source], readings: RecordParsers) -> bool:
    """Whether some of the first files that may hold conversations do: the first of each input, then the others."""
    unsure = [source for source in sources if source.kind not in _TEXT_KINDS]
    first = {source.input: source for source in reversed(unsure)}
    other_sources = (source for source in unsure if first[source.input] is not source)
    sampled_sources = islice((*first.values(), *other_sources), _MAX_SAMPLED_FILES)
    return any(readings.get_parser(source).templated for source in sampled_sources)


def describe_cut_conversations(spec: PlanSpec) -> str:
    """What is said where conversations are cut since texts lie beside them."""
    return (
        f"The inputs hold texts and conversations, and documents longer than seq_len {spec.seq_len} are cut, "
        f"conversations too: overlong='drop' leaves all of them out, stream(max_tokens={spec.seq_len}) conversations "
        "alone."
    )


def describe_left_out(spec: PlanSpec, *, media: bool) -> str:
    """What is said where something is left out; empty where nothing is. Documents with media are never cut."""
    if spec.overlong not in ("drop", "truncate"):
        return ""
    remedy = "a larger seq_len" if media else "overlong='split'"
    dropped_content = "documents" if spec.overlong == "drop" else "the ends of documents"
    return (
        f"overlong={spec.overlong!r} leaves out {dropped_content} longer than seq_len {spec.seq_len}; {remedy} "
        f"keeps them."
    )
