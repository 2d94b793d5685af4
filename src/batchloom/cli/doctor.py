"""``batchloom doctor``."""

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import batchloom
from batchloom.analysis.doctor import Diagnosis, DocumentPreview, PreparedFacts, SourceFacts
from batchloom.cli.options import Argument, AsJson, Option, with_settings
from batchloom.cli.prepare import ProgressDisplay, parse_setting_options
from batchloom.cli.terminal import Line, redact_urls, report
from batchloom.core.addresses import redact_url
from batchloom.core.errors import BatchloomError, ExitCode, SettingsError
from batchloom.core.wording import escape_unprintable, format_count, format_duration, format_size
from batchloom.preparation import DocumentOptions, Recipe
from batchloom.preparation.documents import get_objective
from batchloom.store.format import OBJECTIVES

# From this share of documents on, the verdict says that they are cut or left out.
_NOTED_SHARE = 0.01
_LABEL_WIDTH = 14
_MAX_FAULTS = 10
# Marks of a preview: every line starts with one, so that no document text can be mistaken for a mark.
_TRAINED_STYLE = "green"
# A control token and its repetitions.
_REPEATED_TOKEN = re.compile(r"(<[^<>\s]{1,40}>)\1{7,}")
_LEGEND = (
    r"T: trained, with its weight unless 1; |: a line begins, >: it goes on; \x1b and the like: what cannot be seen"
)


@with_settings(
    Recipe,
    # The settings of documents, without the subset that a diagnosis does not make.
    only=(*(set(DocumentOptions.__annotations__) - {"val_from"}), "overlong", "processor", "data_folder"),
)
def doctor(
    inputs: Annotated[
        list[str],
        Argument(metavar="INPUT", help="Inputs as prepare takes them; also stores and Megatron prefixes."),
    ],
    *,
    settings: dict[str, Any],
    seq_len: Annotated[int, Option(help="Number of tokens of a sequence, for the packing estimate.")] = 2048,
    global_batch_size: Annotated[
        int | None,
        Option(help="Number of sequences of a step, for the steps of an epoch, which are not counted without it."),
    ] = None,
    full: Annotated[
        bool,
        Option("--full", help="Read everything. Without it inputs above 16 MiB are sampled."),
    ] = False,
    preview: Annotated[int, Option(help="Number of documents of each source to show as a model sees them.")] = 2,
    as_json: AsJson = False,
) -> ExitCode:
    """Inspect raw inputs: schema, lengths, faults, packing.

    Nothing is written. Exit code 0: sound, 1: faulty or missing, 2: wrong options.
    """
    try:
        with ProgressDisplay() as display:
            diagnosis = batchloom.doctor(
                inputs,
                **parse_setting_options(settings),
                seq_len=seq_len,
                global_batch_size=global_batch_size,
                full=full,
                preview=preview,
                progress=display.show,
            )
    except BatchloomError as error:
        if isinstance(error, SettingsError) or not as_json:
            raise
        diagnosis = Diagnosis(inputs=tuple(map(redact_url, inputs)), faults=(redact_urls(str(error), inputs),))
    report(diagnosis.plain(), _iter_lines(diagnosis), as_json=as_json)
    return ExitCode.DONE if diagnosis.sound else ExitCode.FAILED


def _iter_lines(diagnosis: Diagnosis) -> Iterator[Line]:
    for source in diagnosis.sources:
        yield from _iter_source_lines(source, exact=diagnosis.exact)
    for prepared in diagnosis.prepared:
        yield from _iter_prepared_lines(prepared)
    if diagnosis.sources:
        yield from _iter_total_lines(diagnosis)
    raw = [document for source in diagnosis.sources for document in source.preview]
    yield from _iter_preview_lines([*raw, *(document for facts in diagnosis.prepared for document in facts.preview)])
    for kind, style, sentences in (
        ("note", "", diagnosis.notes),
        ("warning", "yellow", diagnosis.warnings),
        ("FAULT", "red", diagnosis.faults),
        ("bad record", "red", [bad.sentence for bad in diagnosis.bad]),
    ):
        listed = sentences[:_MAX_FAULTS] if kind == "FAULT" else sentences
        yield from ((f"{kind}: {sentence}", style) for sentence in listed)
        if len(listed) < len(sentences):
            yield f"{kind}: and {len(sentences) - len(listed):,} more", style
    if diagnosis.bad_seen > len(diagnosis.bad):
        yield f"bad records: {diagnosis.bad_seen - len(diagnosis.bad):,} more", "red"
    yield f"{'verdict:':{_LABEL_WIDTH}} {_describe_verdict(diagnosis)}"
    unread = [facts.path for facts in diagnosis.prepared if facts.kind == "store" and not facts.checked]
    if diagnosis.sound and unread:
        yield (
            f"{'':{_LABEL_WIDTH}} Bytes of {unread[0]} were not compared with their checksums; batchloom check does "
            "that, and doctor --full."
        )
    yield from (f"{'next:':{_LABEL_WIDTH}} {command}" for command in diagnosis.commands)


def _describe_verdict(diagnosis: Diagnosis) -> str:
    """Return the number of faults, or what a loader loses at this ``seq_len``."""
    if not diagnosis.sound:
        return format_count(len(diagnosis.faults), "fault")
    packing = diagnosis.packing
    documents = diagnosis.documents
    sound = "sound" if diagnosis.exact else "sound in the sample (--full reads everything)"
    if packing is None or packing.longer < _NOTED_SHARE * documents:
        return sound
    verb = "leaves out" if packing.is_dropped else "cuts"
    facts = f"{packing.longer:,} of {format_count(documents, 'document')} ({packing.longer / documents:.0%}), with "
    facts += f"{packing.longer_tokens / max(diagnosis.tokens or 0, 1):.0%} of the tokens"
    lengths = {length: percent for percent, length in packing.keeping}
    proposals = ", ".join(f"{length:,} keeps {percent}%" for length, percent in lengths.items())
    return f"{sound}, but a loader {verb} {facts}, at seq_len {packing.seq_len:,}; {proposals} whole"


def _format_row(label: str, fact: str) -> str:
    return f"  {label + ':':{_LABEL_WIDTH}} {fact}"


def _iter_source_lines(source: SourceFacts, *, exact: bool) -> Iterator[Line]:
    about = "" if exact else "about "
    more = f" and {about}{source.files - 1:,} more that are read alike" if source.files > 1 else ""
    packed = f", {source.compression}" if source.compression else ""
    yield (
        f"{source.name}{more}: {source.format}{packed}, {about if more else ''}{format_size(source.bytes)}",
        "bold",
    )
    if source.detected:
        columns = ", ".join(f"{role}={'|'.join(names)}" for role, names in source.mapping.items())
        yield _format_row("detected", source.detected + (f" ({columns})" if columns else ""))
    if source.unused:
        yield _format_row("unused", ", ".join(source.unused))
    objective = OBJECTIVES.get(get_objective(source.way))
    if objective:
        yield _format_row("read by", f"{objective.trainers}, with {objective.reader}")
    if not source.records:
        return
    dropped = "".join(f", {count:,} left out: {rule}" for rule, count in source.dropped.items())
    yield _format_row(
        "records",
        f"{about}{source.records:,} ({source.documents:,} documents, {source.empty:,} empty, {source.bad:,} bad"
        f"{dropped})",
    )
    for kind, media_count in source.media.items():
        each = "video frame" if kind == "video" else kind
        yield _format_row(
            kind,
            f"{about}{format_count(media_count.media, each)} in {format_count(media_count.documents, 'document')}: "
            f"{media_count.tokens:,} tokens",
        )
    for label, lengths in (("characters", source.characters), ("tokens", source.tokens)):
        if lengths is not None:
            of_sample = "" if exact else f" (of {lengths.documents:,} in the sample)"
            yield _format_row(
                label,
                f"mean {lengths.mean:,.1f}, median {lengths.median:,}, 95 % up to {lengths.p95:,}, longest "
                f"{lengths.longest:,}{of_sample}",
            )
    if source.total_tokens:
        share = (source.trained_tokens or 0) / source.total_tokens
        yield _format_row("total tokens", f"{about}{source.total_tokens:,}, {share:.1%} of them trained")
    for side, side_count in source.sides.items() if objective and not objective.carries else ():
        answers = format_count(side_count.documents, "answer")
        yield _format_row(side, f"{about}{answers}, {side_count.trained_tokens:,} trained tokens")


def _iter_prepared_lines(prepared: PreparedFacts) -> Iterator[Line]:
    inspection = prepared.inspection
    state = "not made a store yet" if prepared.kind == "ids" else "prepared already"
    yield f"{prepared.path}: {prepared.kind}, {state}", "bold"
    if inspection is None:
        return
    split = f" [{inspection.split}]" if inspection.split else ""
    fill = next(efficiency for efficiency in inspection.efficiencies if efficiency.packing == "best_fit").fill
    yield _format_row(
        "holds" + split,
        f"{inspection.documents:,} documents, {inspection.tokens:,} tokens ({inspection.dtype}), longest "
        f"{inspection.longest:,}",
    )
    if inspection.objective:
        yield _format_row("sides", ", ".join(f"{count:,} {side}" for side, count in inspection.sides.items()))
    else:
        yield _format_row("packing", f"{fill:.2%} full at seq_len {inspection.seq_len:,}")
    yield _format_row("verified", "every byte" if prepared.checked else "its index only (--full: every byte)")


def _iter_total_lines(diagnosis: Diagnosis) -> Iterator[Line]:
    about = "" if diagnosis.exact else "about "
    documents = f"{about}{format_count(diagnosis.documents, 'document')}"
    yield f"all: {format_count(diagnosis.files, 'file')}, {format_size(diagnosis.bytes)}, {documents}", "bold"
    if not diagnosis.exact:
        yield _format_row(
            "sample",
            f"{format_size(diagnosis.read_bytes)} of {format_size(diagnosis.bytes)} were read: counts are estimates, "
            "--full reads everything",
        )
    if diagnosis.duplicates and diagnosis.duplicates.documents:
        copies = diagnosis.duplicates
        sample_note = "" if copies.exact else " in the sample, which sees few of them"
        handling = "removes them (--no-dedup keeps them); they are included in all counts here"
        then = f"; prepare {handling if copies.left_out else 'keeps them'}" if copies.repeated else ""
        yield _format_row(
            "duplicates",
            f"{copies.repeated:,} of {copies.documents:,} documents ({copies.share:.2%}){sample_note}{then}",
        )
    if diagnosis.tokenizer and diagnosis.tokens is not None:
        tokenizer = diagnosis.tokenizer
        template = f", template {tokenizer.template}" if tokenizer.template else ""
        yield _format_row("tokenizer", f"{tokenizer.name} ({tokenizer.vocab_size:,} ids, {tokenizer.engine}{template})")
        yield _format_row("tokens", f"{about}{diagnosis.tokens:,}")
    if diagnosis.packing:
        pack = diagnosis.packing
        steps = f", {pack.steps:,} steps of {pack.global_batch_size:,}" if pack.steps else ""
        yield _format_row(
            "packing",
            f"{about}{format_count(pack.sequences, 'sequence')} of {pack.seq_len:,}{steps}: {pack.fill:.2%} full with "
            f"{pack.packing}; {pack.bound:.2%} is the upper bound for these lengths",
        )
    if diagnosis.seconds is not None and diagnosis.store_bytes is not None:
        yield _format_row(
            "prepare",
            f"about {format_duration(diagnosis.seconds)} on this machine, {format_size(diagnosis.store_bytes)} on disk",
        )
    for estimate in diagnosis.ways:
        memory = f"about {format_size(estimate.memory_bytes)} of memory per run"
        if estimate.way == "prepare":
            steps = f"{estimate.steps:,} steps per epoch" if estimate.steps else "the exact steps of each epoch"
            yield _format_row("prepared", f"first batch in about a second, once prepared; {memory}; {steps}")
        else:
            start = f"first batch after about {format_duration(estimate.start_seconds)}"
            lanes = format_count(estimate.lanes or 0, "lane")
            yield _format_row("streamed", f"{start}, {lanes}; {memory}; you set the number of steps")


def _iter_preview_lines(documents: Sequence[DocumentPreview]) -> Iterator[Line]:
    """Yield the lines of documents, after an explanation of the marks."""
    if documents:
        yield f"preview ({_LEGEND})", "bold"
    for document in documents:
        location = f"line {document.line}" if document.line else f"row {document.row}"
        location_note = f", {location}" if document.line or document.row else ""
        yield f"-- {document.file}{location_note}: {document.tokens:,} tokens, {document.trained:,} trained"
        for mark, line, trained in make_preview_lines(document):
            yield f"{mark} {line}".rstrip(), _TRAINED_STYLE if trained else ""


def make_preview_lines(document: DocumentPreview) -> list[tuple[str, str, bool]]:
    """Return a document as lines: mark, visible text, whether it is trained."""
    lines: list[tuple[str, str, bool]] = []
    begins = True
    for segment in document.pieces:
        if segment.trained is None:
            lines.append(("  ", f"... {segment.tokens:,} tokens are not shown ...", False))
            begins = False
            continue
        mark = "T" if segment.trained else " "
        if not isinstance(segment.trained, bool):
            mark += f" {segment.trained:g} "
        parts = segment.text.split("\n")
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            # Without text after the last newline, the next segment starts the next line.
            if part or not last:
                lines.append(
                    (
                        mark + ("|" if begins else ">"),
                        _shorten_token_runs(escape_unprintable(part)),
                        bool(segment.trained),
                    )
                )
            begins = not last or (begins and not part)
    return lines


def _shorten_token_runs(text: str) -> str:
    """Return a line with each run of a repeated token replaced by one and its count."""
    return _REPEATED_TOKEN.sub(lambda run: f"{run[1]}[x{len(run[0]) // len(run[1])}]", text)
