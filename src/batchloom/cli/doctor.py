"""``batchloom doctor``."""

import re
from collections.abc import Sequence
from typing import Annotated, Any

import batchloom
from batchloom.analysis.doctor import Diagnosis, DocumentPreview, PreparedFacts, SourceFacts
from batchloom.cli.options import Argument, AsJson, Option, with_settings
from batchloom.cli.prepare import ProgressDisplay, parse_setting_options
from batchloom.cli.terminal import print_escaped, print_json, redact_urls
from batchloom.core.addresses import redact_url
from batchloom.core.errors import BatchloomError, ExitCode, SettingsError
from batchloom.core.wording import escape_unprintable, format_count, format_duration, format_size
from batchloom.preparation import Recipe
from batchloom.preparation.documents import get_objective
from batchloom.store.format import OBJECTIVES

_LABEL_WIDTH = 14
# Marks of a preview: every line starts with one, so that no document text can be mistaken for a mark.
_TRAINED_STYLE = "green"
# A control token and its repetitions.
_REPEATED_TOKEN = re.compile(r"(<[^<>\s]{1,40}>)\1{7,}")
_LEGEND = (
    r"T: trained, with its weight unless 1; |: a line begins, >: it goes on; \x1b and the like: what cannot be seen"
)


@with_settings(
    Recipe,
    only=(
        *(
            "tokenizer",
            "end_token",
            "text_field",
            "mapping",
            "ignore",
            "prompts",
            "carry",
            "split_on",
            "normalize",
            "clean",
        ),
        *("max_bad", "template", "template_args", "template_date", "tool_format", "default_system"),
        *("train_on", "train_on_eos", "max_tokens", "overlong", "processor", "data_folder", "follow_links"),
    ),
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
    if as_json:
        print_json(diagnosis.plain())
    else:
        _print_diagnosis(diagnosis)
    return ExitCode.DONE if diagnosis.sound else ExitCode.FAILED


def _print_diagnosis(diagnosis: Diagnosis) -> None:
    for source in diagnosis.sources:
        _print_source(source, exact=diagnosis.exact)
    for prepared in diagnosis.prepared:
        _print_prepared(prepared)
    if diagnosis.sources:
        _print_totals(diagnosis)
    previews = [document for source in diagnosis.sources for document in source.preview]
    previews += [document for prepared in diagnosis.prepared for document in prepared.preview]
    _print_preview(previews)
    for kind, style, sentences in (
        ("note", "", diagnosis.notes),
        ("warning", "yellow", diagnosis.warnings),
        ("FAULT", "red", diagnosis.faults),
    ):
        for sentence in sentences:
            print_escaped(f"{kind}: {sentence}", style=style)
    for bad in diagnosis.bad:
        print_escaped(f"bad record: {bad.sentence}", style="red")
    if diagnosis.bad_seen > len(diagnosis.bad):
        print_escaped(f"bad records: {diagnosis.bad_seen - len(diagnosis.bad):,} more", style="red")
    verdict = "sound" if diagnosis.sound else format_count(len(diagnosis.faults), "fault")
    print_escaped(f"{'verdict:':{_LABEL_WIDTH}} {verdict}")
    unread = [facts.path for facts in diagnosis.prepared if facts.kind == "store" and not facts.checked]
    if diagnosis.sound and unread:
        print_escaped(
            f"{'':{_LABEL_WIDTH}} Bytes of {unread[0]} were not compared with their checksums; batchloom check does "
            "that, and doctor --full."
        )
    for command in diagnosis.commands:
        print_escaped(f"{'next:':{_LABEL_WIDTH}} {command}")


def _print_row(label: str, fact: str) -> None:
    print_escaped(f"  {label + ':':{_LABEL_WIDTH}} {fact}")


def _print_source(source: SourceFacts, *, exact: bool) -> None:
    about = "" if exact else "about "
    more = f" and {source.files - 1:,} more that are read alike" if source.files > 1 else ""
    packed = f", {source.compression}" if source.compression else ""
    print_escaped(
        f"{source.name}{more}: {source.format}{packed}, {about if more else ''}{format_size(source.bytes)}",
        style="bold",
    )
    if source.detected:
        columns = ", ".join(f"{role}={'|'.join(names)}" for role, names in source.mapping.items())
        _print_row("detected", source.detected + (f" ({columns})" if columns else ""))
    if source.unused:
        _print_row("unused", ", ".join(source.unused))
    objective = OBJECTIVES.get(get_objective(source.way))
    if objective:
        _print_row("read by", f"{objective.trainers}, with {objective.reader}")
    if not source.records:
        return
    dropped = "".join(f", {count:,} left out: {rule}" for rule, count in source.dropped.items())
    _print_row(
        "records",
        f"{about}{source.records:,} ({source.documents:,} documents, {source.empty:,} empty, {source.bad:,} bad"
        f"{dropped})",
    )
    for kind, media_count in source.media.items():
        each = "video frame" if kind == "video" else kind
        _print_row(
            kind,
            f"{about}{format_count(media_count.media, each)} in {format_count(media_count.documents, 'document')}: "
            f"{media_count.tokens:,} tokens",
        )
    for label, lengths in (("characters", source.characters), ("tokens", source.tokens)):
        if lengths is not None:
            of_sample = "" if exact else f" (of {lengths.documents:,} in the sample)"
            _print_row(
                label,
                f"mean {lengths.mean:,.1f}, median {lengths.median:,}, 95 % up to {lengths.p95:,}, longest "
                f"{lengths.longest:,}{of_sample}",
            )
    if source.total_tokens:
        share = (source.trained_tokens or 0) / source.total_tokens
        _print_row("total tokens", f"{about}{source.total_tokens:,}, {share:.1%} of them trained")
    for side, side_count in source.sides.items() if objective and not objective.carries else ():
        answers = format_count(side_count.documents, "answer")
        _print_row(side, f"{about}{answers}, {side_count.trained_tokens:,} trained tokens")


def _print_prepared(prepared: PreparedFacts) -> None:
    inspection = prepared.inspection
    state = "not made a store yet" if prepared.kind == "ids" else "prepared already"
    print_escaped(f"{prepared.path}: {prepared.kind}, {state}", style="bold")
    if inspection is None:
        return
    split = f" [{inspection.split}]" if inspection.split else ""
    fill = next(efficiency for efficiency in inspection.efficiencies if efficiency.packing == "best_fit").fill
    _print_row(
        "holds" + split,
        f"{inspection.documents:,} documents, {inspection.tokens:,} tokens ({inspection.dtype}), longest "
        f"{inspection.longest:,}",
    )
    if inspection.objective:
        _print_row("sides", ", ".join(f"{count:,} {side}" for side, count in inspection.sides.items()))
    else:
        _print_row("packing", f"{fill:.2%} full at seq_len {inspection.seq_len:,}")
    _print_row("verified", "every byte" if prepared.checked else "its index only (--full: every byte)")


def _print_totals(diagnosis: Diagnosis) -> None:
    about = "" if diagnosis.exact else "about "
    print_escaped(
        f"all: {format_count(diagnosis.files, 'file')}, {format_size(diagnosis.bytes)}, "
        f"{about}{format_count(diagnosis.documents, 'document')}",
        style="bold",
    )
    if not diagnosis.exact:
        _print_row(
            "sample",
            f"{format_size(diagnosis.read_bytes)} of {format_size(diagnosis.bytes)} were read: counts are estimates, "
            "--full reads everything",
        )
    if diagnosis.duplicates and diagnosis.duplicates.documents:
        copies = diagnosis.duplicates
        sample_note = "" if copies.exact else " in the sample, which sees few of them"
        handling = "removes them (--no-dedup keeps them); they are included in all counts here"
        then = f"; prepare {handling if copies.left_out else 'keeps them'}" if copies.repeated else ""
        _print_row(
            "duplicates",
            f"{copies.repeated:,} of {copies.documents:,} documents ({copies.share:.2%}){sample_note}{then}",
        )
    if diagnosis.tokenizer and diagnosis.tokens is not None:
        tokenizer = diagnosis.tokenizer
        template = f", template {tokenizer.template}" if tokenizer.template else ""
        _print_row("tokenizer", f"{tokenizer.name} ({tokenizer.vocab_size:,} ids, {tokenizer.engine}{template})")
        _print_row("tokens", f"{about}{diagnosis.tokens:,}")
    if diagnosis.packing:
        pack = diagnosis.packing
        steps = f", {pack.steps:,} steps of {pack.global_batch_size:,}" if pack.steps else ""
        _print_row(
            "packing",
            f"{about}{format_count(pack.sequences, 'sequence')} of {pack.seq_len:,}{steps}: {pack.fill:.2%} full with "
            f"{pack.packing}; {pack.bound:.2%} is the upper bound for these lengths",
        )
    if diagnosis.seconds is not None and diagnosis.store_bytes is not None:
        _print_row(
            "prepare",
            f"about {format_duration(diagnosis.seconds)} on this machine, {format_size(diagnosis.store_bytes)} on disk",
        )
    for estimate in diagnosis.ways:
        memory = f"about {format_size(estimate.memory_bytes)} of memory per run"
        if estimate.way == "prepare":
            steps = f"{estimate.steps:,} steps per epoch" if estimate.steps else "the exact steps of each epoch"
            _print_row("prepared", f"first batch in about a second, once prepared; {memory}; {steps}")
        else:
            start = f"first batch after about {format_duration(estimate.start_seconds)}"
            lanes = format_count(estimate.lanes or 0, "lane")
            _print_row("streamed", f"{start}, {lanes}; {memory}; you set the number of steps")


def _print_preview(documents: Sequence[DocumentPreview]) -> None:
    """Print documents, after an explanation of the marks."""
    if documents:
        print_escaped(f"preview ({_LEGEND})", style="bold")
    for document in documents:
        location = f"line {document.line}" if document.line else f"row {document.row}"
        location_note = f", {location}" if document.line or document.row else ""
        print_escaped(f"-- {document.file}{location_note}: {document.tokens:,} tokens, {document.trained:,} trained")
        for mark, line, trained in make_preview_lines(document):
            print_escaped(f"{mark} {line}".rstrip(), style=_TRAINED_STYLE if trained else "")


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
