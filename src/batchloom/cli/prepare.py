"""``batchloom prepare``, and ``batchloom datasets``: inputs with a short name."""

import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Self, final

import click

import batchloom
from batchloom.cli.options import Argument, AsJson, Option, with_settings
from batchloom.cli.terminal import can_redraw_stderr, is_quiet, make_table, plain_console, print_json, print_note
from batchloom.core.wording import escape_unprintable, format_count, format_duration, format_size
from batchloom.core.yaml_reader import parse_yaml
from batchloom.preparation import (
    Note,
    PrepareReport,
    Progress,
    Recipe,
    RunSettings,
    make_request,
    run_request,
    run_separately,
)
from batchloom.preparation.report import PrepareResult, read_last_report
from batchloom.preparation.request import PrepareRequest, format_recipe, make_append_request
from batchloom.preparation.settings import flatten_settings, make_run_settings
from batchloom.store.format import QUARANTINE_NAME, format_generation_file_name

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars, TaskID

_PROGRESS_SECONDS = 5.0
_PHASE_LABELS = {
    "sample": "sampling",
    "tokenize": "tokenizing",
    "read": "looking at every id",
    "write": "writing shards",
    "look": "looking at every row",
    "convert": "converting",
    "upload": "sending",
}
_ROW_PHASES = ("look", "convert")


def unescape_marker(text: str) -> str:
    r"""Replace typed ``\n`` and ``\t`` by a newline and a tab."""
    return text.replace("\\n", "\n").replace("\\t", "\t")


def parse_setting_options(settings: dict[str, Any]) -> dict[str, Any]:
    """Flatten the groups of a recipe, and parse the short forms of options."""
    options = flatten_settings(settings)
    if "split_on" in options:
        options["split_on"] = unescape_marker(options["split_on"])
    if "dedup" in options:
        # A similarity without a mode selects near duplicates.
        options["dedup"] = {"mode": "near", **options["dedup"]}
        if len(options["dedup"]) == 1:
            options["dedup"] = options["dedup"]["mode"]
    return options


@with_settings(RunSettings, parameter="run")
@with_settings(Recipe)
def prepare(
    inputs: Annotated[
        list[str] | None,
        Argument(
            metavar="INPUT",
            help="Files, folders, globs and archives of text, code, JSON, CSV, Parquet and Arrow, compressed or not; "
            "URLs (s3://, gs://, https://, hf://); a data set of the Hub (org/name[:config][/split][@revision]) or its "
            "short name (see batchloom datasets); INPUT#N for N random records; a YAML manifest (.yaml, .yml) "
            "that lists such inputs; - for standard input; synthetic data (dummy, distributed_dummy), alone. They "
            "replace the inputs of --recipe.",
        ),
    ] = None,
    *,
    out: Annotated[
        str | None,
        Option(
            help="Folder of the store, or a URL in an object store (s3://bucket/prefix). --print-recipe needs none."
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        Option(help="Recipe file (YAML or JSON), or a store to prepare again. Options and inputs override it."),
    ] = None,
    print_recipe: Annotated[
        bool, Option("--print-recipe", help="Print the complete recipe as YAML, or with --json as JSON, and exit.")
    ] = False,
    settings: dict[str, Any],
    run: dict[str, Any],
    separate: Annotated[
        bool,
        Option(
            "--separate",
            help="Make a store of each data set of a manifest, in folders of --out, and mixture.yaml with their "
            "weights, for train --mixture.",
        ),
    ] = False,
    profile: Annotated[bool, Option("--profile", help="Print the seconds and the speed of each stage.")] = False,
    as_json: AsJson = False,
) -> None:
    """Prepare files into a store: tokenize, clean, deduplicate.

    Run the same command again to resume an interrupted job. A finished store is left as it is.
    """
    if not inputs and recipe is None and not run.get("append"):
        raise click.BadParameter("missing: name files, or a recipe with --recipe", param_hint="INPUT")
    options = parse_setting_options(settings)
    run_settings = make_run_settings(run)
    build_request = partial(make_append_request, out=out) if run_settings.append else make_request
    request = build_request(inputs or None, options, recipe)
    if print_recipe:
        _print_recipe(request, as_json=as_json)
        return
    if out is None:
        raise click.BadParameter("missing: name the folder of the store", param_hint="--out")
    if separate:
        _prepare_separately(request, out, run_settings, as_json=as_json)
        return
    with ProgressDisplay() as display:
        result = run_request(request, out, display.show, run_settings)
    if as_json:
        print_json(result)
    else:
        print_result(plain_console(), result)
    if profile:
        _print_profile(plain_console(stderr=as_json), read_last_report(out))


def _prepare_separately(request: PrepareRequest, out: str, settings: RunSettings, *, as_json: bool) -> None:
    with ProgressDisplay() as display:
        result = run_separately(request, out, display.show, settings)
    if as_json:
        print_json({"mixture": result.path, "stores": result.stores})
        return
    console = plain_console()
    for name, store_result in result.stores.items():
        console.print(f"{name}:")
        print_result(console, store_result)
    if result.path is not None:
        console.print(f"batchloom train --mixture {result.path} mixes them by their weights.")


def _print_recipe(request: PrepareRequest, *, as_json: bool) -> None:
    for note in request.notes:
        print_note(note)
    text = format_recipe(request.recipe, request.tokenizer_note)
    if as_json:
        print_json(parse_yaml(text.encode(), "the recipe"))
    else:
        sys.stdout.write(text)


@final
class ProgressDisplay:
    """Notes and progress on standard error: live on a terminal, else periodic lines."""

    def __init__(self) -> None:
        self._console = plain_console(stderr=True)
        self._quiet = is_quiet()
        self._phase = ""
        self._made_before = 0
        self._began = self._last_report_time = time.monotonic()
        self._bars: Bars | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def show(self, event: Note | Progress) -> None:
        """Show one event of the job."""
        if isinstance(event, Note):
            if event.is_warning or not self._quiet:
                self._console.print(escape_unprintable(event.text))
            return
        if self._quiet:
            return
        if event.phase != self._phase:
            # The first event of a phase arrives after part of its work is done.
            self._phase = event.phase
            self._began = time.monotonic()
            self._made_before = event.bytes_done - event.bytes_found
        if can_redraw_stderr():
            self._show_live(event)
        elif time.monotonic() - self._last_report_time >= _PROGRESS_SECONDS:
            self._last_report_time = time.monotonic()
            share = event.bytes_done / max(event.bytes_total, 1)
            self._console.print(f"{_PHASE_LABELS[event.phase]}: {share:.0%}, {self._facts(event)}")

    def _show_live(self, event: Progress) -> None:
        from rich.progress import BarColumn, Progress as Bars, TextColumn

        if self._bars is None or self._task is None:
            bar = BarColumn(bar_width=24)
            columns = (TextColumn("{task.description}"), bar, TextColumn("{task.fields[facts]}"))
            self._bars = Bars(*columns, console=self._console, transient=True)
            self._task = self._bars.add_task("", facts="")
            self._bars.start()
        self._bars.update(
            self._task,
            description=_PHASE_LABELS[event.phase],
            completed=event.bytes_done,
            total=event.bytes_total,
            facts=self._facts(event),
        )

    def _facts(self, event: Progress) -> str:
        if event.phase == "sample":
            return f"{format_size(event.bytes_total)} of input"
        seconds = max(time.monotonic() - self._began, 1e-3)
        rate = (event.bytes_done - event.bytes_found - self._made_before) / seconds
        facts = [
            f"{format_size(event.bytes_done)} of {format_size(event.bytes_total)}",
            f"{event.documents:,} documents",
            *([] if event.phase in _ROW_PHASES else [f"{event.tokens:,} tokens"]),
        ]
        if rate > 0:
            facts.append(f"{format_size(rate)}/s")
            facts.append(f"{format_duration((event.bytes_total - event.bytes_done) / rate)} left")
        if event.quarantined:
            facts.append(f"{event.quarantined:,} quarantined")
        return ", ".join(facts)


def print_result(console: "Console", result: PrepareResult) -> None:
    """Print the result of a job: documents read, dropped and kept, and the subsets."""
    path = escape_unprintable(str(result.path))
    counts = result.counts
    grown = result.generation > 1 and not result.already_done
    if result.already_done and not counts.records:
        console.print(f"{path} holds all of this already; nothing to append.")
        console.print(_format_totals(result))
        return
    if result.already_done:
        console.print(f"{path} is finished already; nothing to do.")
    name = format_generation_file_name(QUARANTINE_NAME, result.generation) if grown else QUARANTINE_NAME
    # A dry run has no store.
    quarantine_note = f" (see {path}/{name})" if counts.quarantined and result.subsets else ""
    input_size = f"{format_count(result.input_files, 'file')}, {format_size(result.input_bytes)}"
    rows = [
        ("new input" if grown else "input", input_size),
        ("records read", f"{counts.records:,}"),
        *((f"dropped: {reason}", f"{count:,}") for reason, count in counts.dropped.items()),
        *([("truncated to --max-tokens", f"{counts.truncated:,}")] if counts.truncated else []),
        (f"quarantined{quarantine_note}", f"{counts.quarantined:,}"),
        ("documents added" if grown else "documents kept", f"{counts.documents:,}"),
        ("tokens added" if grown else "tokens", f"{counts.tokens:,}"),
    ]
    console.print(make_table(("fact", "number"), rows, numbers={"number"}, header=False))
    if not result.subsets:
        # A dry run, which has already printed a note.
        return
    names = ("subset", "documents", "tokens", "shards")
    subset_rows = [
        (name, f"{subset.documents:,}", f"{subset.tokens:,}", f"{subset.shards:,}")
        for name, subset in result.subsets.items()
    ]
    console.print(make_table(names, subset_rows, numbers=names[1:]))
    if not result.already_done:
        rate = result.input_bytes / max(result.seconds, 1e-9)
        speed = f" ({format_size(rate)}/s)" if result.input_bytes else ""
        name = result.tokenizer
        engine = result.engine
        # A tokenizer without an engine is its own engine.
        engine_note = "" if engine.partition(" ")[0] == name else f", engine {engine}"
        summary = f"{path}: done in {format_duration(result.seconds)}{speed}"
        console.print(f"{summary}, tokenizer {name}{engine_note}, {result.dtype}.")
    if grown:
        console.print(_format_totals(result))


def _format_totals(result: PrepareResult) -> str:
    documents, tokens = result.in_all
    older = "; batchloom log shows which can be read" if result.generation > 1 else ""
    return (
        f"{escape_unprintable(str(result.path))} is generation {result.generation}, with {documents:,} documents "
        f"and {tokens:,} tokens in all{older}."
    )


def _print_profile(console: "Console", report: PrepareReport | None) -> None:
    """Print seconds, shares and speeds by stage; None is an unreadable report."""
    if report is None:
        console.print("Timings are in report.json next to the store.")
        return
    phases = ", ".join(f"{name} {format_duration(s)}" for name, s in report.seconds_by_phase.items())
    summary = f"{format_duration(report.seconds)} in all" + (f": {phases}" if phases else "")
    console.print(escape_unprintable(f"{summary}; {format_count(report.workers, 'worker')} ({report.executor})"))
    stages = report.content.stages
    if not stages:
        return
    total = sum(stage.seconds for stage in stages.values()) or 1.0
    names = ("stage", "seconds", "share", "speed", "documents/s")
    rows = [
        (
            name,
            f"{stage.seconds:,.2f}",
            f"{stage.seconds / total:.0%}",
            f"{format_size(stage.bytes / stage.seconds)}/s" if stage.seconds > 0 and stage.bytes else "",
            f"{stage.documents / stage.seconds:,.0f}" if stage.seconds > 0 and stage.documents else "",
        )
        for name, stage in stages.items()
    ]
    console.print(make_table(names, rows, numbers=names[1:]))
    console.print(
        "Seconds are over all workers where each does a stage for its units; what runs at the same time counts each "
        "for itself."
    )


def datasets(*, as_json: AsJson = False) -> None:
    """List the data sets with a short name, which prepare takes."""
    entries = batchloom.list_datasets()
    if as_json:
        print_json(entries)
        return
    rows = []
    for entry in entries:
        access = "remotely" if entry["streaming"] else "downloaded"
        access = access if entry["source"] == "real" else "synthetic"
        rows.append((entry["name"], entry["size"], access, entry["input"], entry["description"]))
    table = make_table(("name", "size", "read", "input", "description"), rows, numbers={"size"})
    for column in table.columns[:-1]:
        column.no_wrap = True
    plain_console().print(table)
