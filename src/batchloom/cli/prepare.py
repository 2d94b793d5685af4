"""``batchloom prepare``."""

import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self, final

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress as Bars, TaskID, TextColumn
from rich.table import Table

from batchloom.chat import parse_mapping
from batchloom.cli.terminal import plain_console, print_profile
from batchloom.core.files import decode_file_name
from batchloom.core.settings import quote_value
from batchloom.core.wording import escape_unprintable, format_count, format_duration, format_size
from batchloom.preparation import (
    ExecutionSettings,
    Note,
    Progress,
    Recipe,
    RunSettings,
    make_request,
    run_request,
)
from batchloom.preparation.report import PrepareResult, read_last_report
from batchloom.preparation.request import (
    PrepareRequest,
    format_recipe,
    make_append_request,
    recipe_settings,
)
from batchloom.preparation.settings import SIZE_HINT, parse_token_count
from batchloom.store.format import QUARANTINE_NAME, format_generation_file_name

_CHAT_PANEL = "Conversations"
_MEDIA_PANEL = "Images and audio"
_RUN_PANEL = "How the job is carried out"
_PROGRESS_SECONDS = 5.0
# What counts where neither an option nor a recipe says otherwise.
_DEFAULT_SETTINGS = recipe_settings(Recipe(inputs=("-",)))
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


def parse_size(text: str, option: str = "--tokens-per-shard") -> int:
    """``100M``, ``1G``, ``100_000`` as a number.

    Raises:
        typer.BadParameter: it is none.
    """
    size = parse_token_count(text)
    if size is None:
        raise typer.BadParameter(f"{quote_value(text)} is not {SIZE_HINT}", param_hint=option)
    return size


def _format_default(name: str) -> str:
    return str(_DEFAULT_SETTINGS[name])


def collect_media_settings(
    processor: str | None, data_folder: str | None, keep: str | None = None
) -> dict[str, Any] | None:
    """The settings of media, where any is given."""
    options = {"processor": processor, "data_folder": data_folder, "keep": keep}
    settings = {name: value for name, value in options.items() if value is not None}
    return settings or None


def unescape_marker(text: str) -> str:
    r"""``\n`` and ``\t`` as typed on a command line stand for a newline and a tab."""
    return text.replace("\\n", "\n").replace("\\t", "\t")


def prepare(
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="INPUT",
            help="Files, folders, globs and archives of text, code, JSON, CSV, Parquet and Arrow, also packed; URLs "
            r"(s3://, gs://, https://, hf://); a data set of the Hub (org/name\[:config]\[/split]\[@revision]) or its "
            "short name (see batchloom datasets); a YAML manifest (.yaml, .yml) of such; - for standard input; "
            "synthetic data (dummy, distributed_dummy), alone. In place of a recipe's.",
        ),
    ] = None,
    *,
    out: Annotated[
        str | None,
        typer.Option(help="Folder of the store, or a place in an object store (s3://bucket/prefix)."),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="A recipe file (YAML or JSON), or a store, which is made again; options and inputs win over it."
        ),
    ] = None,
    print_recipe: Annotated[
        bool, typer.Option("--print-recipe", help="Print the whole recipe as YAML, and do nothing.")
    ] = False,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="bytes, gpt2, train:N (learn one from the input), tiktoken:NAME, the path of a "
            "tokenizer.json or of its folder, or a Hub id; gpt2 where no manifest names one, and with "
            "--processor what lies beside that."
        ),
    ] = None,
    end_token: Annotated[
        str | None,
        typer.Option(help="End-of-document token, where the tokenizer does not say."),
    ] = None,
    text_field: Annotated[
        str | None,
        typer.Option(help="Field of a record that holds the text; told from the records by default."),
    ] = None,
    map_: Annotated[
        str | None,
        typer.Option("--map", help="Columns by role, over what is detected: prompt=q,response=a."),
    ] = None,
    ignore: Annotated[
        str | None,
        typer.Option(help="Columns and message keys to treat as absent, separated by commas: lang,score."),
    ] = None,
    split_on: Annotated[
        str | None,
        typer.Option(
            show_default=_format_default("split_on"),
            help="What a document of a text file is: auto (a file; a plain-text file above 1 MiB "
            "is cut at blank lines into documents of about 64 KiB), file, line, paragraph, or any "
            r"other string: texts are cut where it stands, and it is removed (\n is a newline).",
        ),
    ] = None,
    normalize: Annotated[
        bool | None,
        typer.Option(
            "--normalize/--no-normalize",
            show_default="normalize",
            help="Bring text to Unicode NFC with \\n newlines; nothing is lower-cased.",
        ),
    ] = None,
    clean: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMES",
            help="Steps of cleaning, in this order; none takes those of a recipe away.",
            show_default="none",
        ),
    ] = None,
    fim: Annotated[
        float | None,
        typer.Option(
            metavar="RATE",
            show_default="0",
            help="Share of the texts whose middle is put last, for models that fill in (fill-in-the-middle).",
        ),
    ] = None,
    processor: Annotated[
        str | None,
        typer.Option(
            help="Folder or Hub id of a processor of transformers: conversations may hold images or audio.",
            rich_help_panel=_MEDIA_PANEL,
        ),
    ] = None,
    data_folder: Annotated[
        str | None,
        typer.Option(
            show_default="the folder of each file",
            help="Where the paths of images and audio begin.",
            rich_help_panel=_MEDIA_PANEL,
        ),
    ] = None,
    media: Annotated[
        str | None,
        typer.Option(
            show_default="reference",
            help="Whether the store names them (reference) or holds their bytes (embed).",
            rich_help_panel=_MEDIA_PANEL,
        ),
    ] = None,
    tokens_per_shard: Annotated[
        str | None,
        typer.Option(
            show_default=_format_default("tokens_per_shard"),
            help="A shard has at most so many tokens (100M, 1G), except for a single longer document.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            show_default=_format_default("dtype"),
            help="auto (uint16 below a vocabulary of 65,500, else int32), uint16, int32.",
        ),
    ] = None,
    val_fraction: Annotated[
        float | None,
        typer.Option(
            show_default=_format_default("val_fraction"),
            help="Share of the tokens for validation; documents are chosen by hash, and stay whole.",
        ),
    ] = None,
    test_fraction: Annotated[
        float | None,
        typer.Option(show_default=_format_default("test_fraction"), help="Share of the tokens for testing."),
    ] = None,
    balance_subsets: Annotated[
        bool | None,
        typer.Option(
            "--balance-subsets/--no-balance-subsets",
            show_default="balance-subsets",
            help="Move single documents where a subset misses its share of the tokens by more than 20 % of it. "
            "Without it hashes alone choose.",
        ),
    ] = None,
    dedup: Annotated[
        str | None,
        typer.Option(
            show_default="exact; none with --split-on line or paragraph",
            help="Which duplicates are left out, the first of each stays: exact (documents), lines, paragraphs, near "
            "(documents that are alike), none (also --no-dedup).",
        ),
    ] = None,
    similarity: Annotated[
        float | None,
        typer.Option(
            show_default="0.8",
            help="With --dedup near: documents from this share of common token runs on are alike (9 of 10 such pairs "
            "are found).",
        ),
    ] = None,
    max_bad: Annotated[
        str | None,
        typer.Option(
            show_default=_format_default("max_bad"),
            help="Bad records allowed: a number, or a share that allows at least 10. They go to quarantine.jsonl.",
        ),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            help="Chat template: chatml, llama3, alpaca, plain, one of the tokenizer's own by name, or a "
            "file; the tokenizer's own by default, else plain.",
            rich_help_panel=_CHAT_PANEL,
        ),
    ] = None,
    train_on: Annotated[
        str | None,
        typer.Option(
            help="Turns that are trained: assistant, all, last or completion; the assistant's by default, "
            "the completion of prompt-completion records.",
            rich_help_panel=_CHAT_PANEL,
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens a conversation may have.", rich_help_panel=_CHAT_PANEL),
    ] = None,
    overlong: Annotated[
        str | None,
        typer.Option(
            show_default=_format_default("overlong"),
            help="What becomes of longer ones: drop, truncate-turns, split or error.",
            rich_help_panel=_CHAT_PANEL,
        ),
    ] = None,
    prove: Annotated[
        bool | None,
        typer.Option(
            "--prove/--no-prove",
            show_default="no-prove",
            help="Decode trained tokens and compare.",
            rich_help_panel=_CHAT_PANEL,
        ),
    ] = None,
    follow_links: Annotated[
        bool | None,
        typer.Option(
            "--follow-links/--no-follow-links",
            show_default="no-follow-links",
            help="Follow symbolic links that lead out of an input folder. Without it they are skipped and counted.",
        ),
    ] = None,
    streaming: Annotated[
        bool | None,
        typer.Option(
            "--streaming/--no-streaming",
            help="Read data sets of the Hub where they lie, or download them first; without it those above "
            "10 GB are read where they lie.",
        ),
    ] = None,
    workers: Annotated[
        str,
        typer.Option(
            help="How many units are done at the same time: a number, or auto.",
            rich_help_panel=_RUN_PANEL,
        ),
    ] = "auto",
    engine: Annotated[
        str,
        typer.Option(
            help="Who does them: pool (processes of this machine) or ray.",
            rich_help_panel=_RUN_PANEL,
        ),
    ] = "pool",
    address: Annotated[
        str | None,
        typer.Option(
            help="Of a Ray cluster (host:port, auto); one of this machine by default.",
            rich_help_panel=_RUN_PANEL,
        ),
    ] = None,
    memory_per_worker: Annotated[
        str | None,
        typer.Option(
            help="A worker that holds more (2G, 700M) is ended, and its unit done again.",
            rich_help_panel=_RUN_PANEL,
        ),
    ] = None,
    append: Annotated[
        bool,
        typer.Option(
            "--append",
            help="Add inputs that are new to the store at --out as its next generation, by its own recipe.",
            rich_help_panel=_RUN_PANEL,
        ),
    ] = False,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart",
            help="Unfinished work of another recipe or of other inputs gives way; units that are the same stay.",
            rich_help_panel=_RUN_PANEL,
        ),
    ] = False,
    hash_inputs: Annotated[
        bool,
        typer.Option(
            "--hash-inputs",
            help="Tell inputs apart by their contents, not by their times: reads them once more.",
            rich_help_panel=_RUN_PANEL,
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Stop before the store is written, and show what would be left out.",
            rich_help_panel=_RUN_PANEL,
        ),
    ] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Say at the end where the time went.")] = False,
    work: Annotated[
        Path | None,
        typer.Option(
            help="Where a store that goes elsewhere is made before it is sent; a folder below the user's cache by "
            "default."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> int:
    """Make a store of text, code, JSON, CSV, Parquet and Arrow files.

    The same command goes on where a stopped one ended, and succeeds at once when all is done.
    """
    if not inputs and recipe is None and not append:
        raise typer.BadParameter("missing: name files, or a recipe with --recipe", param_hint="INPUT")
    options = {
        "tokenizer": tokenizer,
        "end_token": end_token,
        "text_field": text_field,
        "mapping": parse_mapping(map_) if map_ is not None else None,
        "ignore": ignore,
        "split_on": unescape_marker(split_on) if split_on is not None else None,
        "normalize": normalize,
        "clean": clean or None,
        "fim": fim,
        "media": collect_media_settings(processor, data_folder, media),
        "dedup": _make_dedup_setting(dedup, similarity),
        "tokens_per_shard": parse_size(tokens_per_shard) if tokens_per_shard is not None else None,
        "dtype": dtype,
        "val_fraction": val_fraction,
        "test_fraction": test_fraction,
        "balance_subsets": balance_subsets,
        "max_bad": max_bad,
        "template": template,
        "train_on": train_on,
        "max_tokens": max_tokens,
        "overlong": overlong,
        "prove": prove,
        "follow_links": follow_links,
    }
    choose = partial(make_append_request, out=out) if append else make_request
    request = choose(inputs or None, options, recipe)
    if print_recipe:
        return _print_recipe(request)
    if out is None:
        raise typer.BadParameter("missing: name the folder of the store", param_hint="--out")
    settings = RunSettings(
        execution=_make_execution(workers, engine, address, memory_per_worker),
        append=append,
        restart=restart,
        hash_inputs=hash_inputs,
        dry_run=dry_run,
        streaming=streaming,
        work=work,
    )
    with ProgressDisplay() as display:
        result = run_request(request, out, display.show, settings)
    _print_outcome(result, as_json=as_json)
    if profile:
        print_profile(plain_console(stderr=as_json), read_last_report(out))
    return 0


def _make_execution(workers: str, engine: str, address: str | None, memory: str | None) -> ExecutionSettings:
    """Build the settings of workers from the words of the command line."""
    return ExecutionSettings(
        workers=int(workers) if workers.isdecimal() else workers,  # type: ignore[arg-type]  # it is checked there
        engine=engine,  # type: ignore[arg-type]  # it is checked there
        address=address,
        memory=None if memory is None else parse_size(memory, "--memory-per-worker"),
    )


def _print_recipe(request: PrepareRequest) -> int:
    for note in request.notes:
        plain_console(stderr=True).print(escape_unprintable(note))
    sys.stdout.write(format_recipe(request.recipe, request.tokenizer_note))
    return 0


def _print_outcome(result: PrepareResult, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(result, enc_hook=_format_path) + b"\n")
    else:
        print_result(plain_console(), result)


def _make_dedup_setting(mode: str | None, similarity: float | None) -> str | dict[str, object] | None:
    """What was said of duplicates; a similarity alone is one of near duplicates."""
    return mode if similarity is None else {"mode": mode or "near", "similarity": similarity}


def _format_path(value: object) -> str:
    return decode_file_name(str(value))


@final
class ProgressDisplay:
    """Shows notes and progress on standard error: live on a terminal, else a line now and then."""

    def __init__(self) -> None:
        self._console = plain_console(stderr=True)
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
        """Take one event of the job."""
        if isinstance(event, Note):
            self._console.print(escape_unprintable(event.text))
            return
        if event.phase != self._phase:
            # The first word of a phase comes when some of its work is done already.
            self._phase, self._began = event.phase, time.monotonic()
            self._made_before = event.bytes_done - event.bytes_found
        if self._console.is_terminal:
            self._show_live(event)
        elif time.monotonic() - self._last_report_time >= _PROGRESS_SECONDS:
            self._last_report_time = time.monotonic()
            share = event.bytes_done / max(event.bytes_total, 1)
            self._console.print(f"{_PHASE_LABELS[event.phase]}: {share:.0%}, {self._facts(event)}")

    def _show_live(self, event: Progress) -> None:
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


def print_result(console: Console, result: PrepareResult) -> None:
    """Print what came of a job: what was read, dropped and kept, and the subsets."""
    path = escape_unprintable(str(result.path))
    counts, grown = result.counts, result.generation > 1 and not result.already_done
    if result.already_done and not counts.records:
        console.print(f"{path} holds all of this already; nothing to append.")
        console.print(_format_totals(result))
        return
    if result.already_done:
        console.print(f"{path} is finished already; nothing to do.")
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    table.add_row(
        "new input" if grown else "input",
        f"{format_count(result.input_files, 'file')}, {format_size(result.input_bytes)}",
    )
    table.add_row("records read", f"{counts.records:,}")
    for reason, count in counts.dropped.items():
        table.add_row(f"dropped: {escape_unprintable(reason)}", f"{count:,}")
    name = format_generation_file_name(QUARANTINE_NAME, result.generation) if grown else QUARANTINE_NAME
    # A dry run has made none.
    quarantine_note = f" (see {path}/{name})" if counts.quarantined and result.subsets else ""
    table.add_row(f"quarantined{quarantine_note}", f"{counts.quarantined:,}")
    table.add_row("documents added" if grown else "documents kept", f"{counts.documents:,}")
    table.add_row("tokens added" if grown else "tokens", f"{counts.tokens:,}")
    console.print(table)
    if not result.subsets:
        # A dry run, which has said so.
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("subset")
    for name in ("documents", "tokens", "shards"):
        table.add_column(name, justify="right")
    for name, subset in result.subsets.items():
        table.add_row(name, f"{subset.documents:,}", f"{subset.tokens:,}", f"{subset.shards:,}")
    console.print(table)
    if not result.already_done:
        rate = result.input_bytes / max(result.seconds, 1e-9)
        speed = f" ({format_size(rate)}/s)" if result.input_bytes else ""
        name, engine = result.tokenizer, result.engine
        # One that needs no engine is its own.
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
        f"and {tokens:,} "
        f"tokens in all{older}."
    )
