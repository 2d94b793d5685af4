"""Default policy and warnings for documents longer than a sequence."""

from collections.abc import Sequence
from itertools import islice

from batchloom.core.errors import PlanError
from batchloom.plan import PlanSpec
from batchloom.plan.packing import CUTTING_STRATEGIES, OverlongMode
from batchloom.preparation.documents import RecordParsers
from batchloom.sources.files import Source

# Number of files sampled for a warning; conversations in other files are reported when they are read.
_MAX_SAMPLED_FILES = 64
# Kinds of files that always hold plain text.
_TEXT_KINDS = ("text", "code")


def may_hold_media(sources: Sequence[Source], record_parsers: RecordParsers) -> bool:
    """Return whether documents of some source may hold media, by its record kind."""
    return record_parsers.reads_media and any(
        record_parsers.get_parser(source).record_kind in ("conversation", "interleaved") for source in sources
    )


def check_no_cuts(packing: str, overlong: OverlongMode | None) -> None:
    """Reject settings that cut documents, for a stream with images or audio.

    Raises:
        PlanError: names valid settings.
    """
    cuts = packing in CUTTING_STRATEGIES
    setting = f"packing={packing!r}" if cuts else f"overlong={overlong!r}"
    if cuts or overlong in ("split", "truncate"):
        raise PlanError(
            f"{setting} cuts documents, and documents with images or audio are never cut: give packing='best_fit' "
            "and overlong='drop' or 'error'."
        )


def choose_overlong(sources: Sequence[Source], record_parsers: RecordParsers) -> OverlongMode:
    """Return ``drop`` if all inputs hold conversations or some media, else ``split``.

    A loader over their store chooses the same, except for conversations without media next to texts, with a
    processor:
    only reading all inputs shows whether they hold media.

    Files that are texts by their kind are not read, nor any file after the first without conversations.
    """
    if may_hold_media(sources, record_parsers):
        return "drop"
    texts_first = sorted(sources, key=lambda source: source.kind not in _TEXT_KINDS)
    alone = all(record_parsers.get_parser(source).templated for source in texts_first)
    return "drop" if alone else "split"


def has_conversations(sources: Sequence[Source], record_parsers: RecordParsers) -> bool:
    """Return whether sampled files hold conversations.

    The sample begins with the first file of each input that may hold them.
    """
    unsure = [source for source in sources if source.kind not in _TEXT_KINDS]
    first = {source.input: source for source in reversed(unsure)}
    other_sources = (source for source in unsure if first[source.input] is not source)
    sampled_sources = islice((*first.values(), *other_sources), _MAX_SAMPLED_FILES)
    return any(record_parsers.get_parser(source).templated for source in sampled_sources)


def describe_cut_conversations(spec: PlanSpec) -> str:
    """Return the warning that conversations mixed with texts are cut."""
    return (
        f"The inputs hold texts and conversations, and all documents longer than seq_len {spec.seq_len} are cut, "
        f"including conversations. overlong='drop' drops them all; stream(max_tokens={spec.seq_len}) drops only "
        "conversations."
    )


def describe_left_out(spec: PlanSpec, *, media: bool) -> str:
    """Return the warning about documents left out; empty if all are read.

    Documents with media are never cut.
    """
    if spec.overlong not in ("drop", "truncate"):
        return ""
    remedy = "a larger seq_len" if media else "overlong='split'"
    dropped_content = "documents" if spec.overlong == "drop" else "the ends of documents"
    return (
        f"overlong={spec.overlong!r} leaves out {dropped_content} longer than seq_len {spec.seq_len}; {remedy} keeps "
        "them."
    )
