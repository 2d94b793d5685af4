"""``batchloom train``."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, final

import typer

from batchloom.batches import read_mixture
from batchloom.core.addresses import is_url
from batchloom.core.settings import quote_value
from batchloom.core.wording import parse_size
from batchloom.train import require_train_packages

_DATA_PANEL = "Data"
_MODEL_PANEL = "Model and step"
_RUN_PANEL = "Course of the run"
_NOT_STARTED_MESSAGE = "Stopped before the run began; nothing was left behind."


def train(
    *,
    data: Annotated[
        str | None,
        typer.Option(
            help="A store's folder or its URL (s3://, gs://, https://), a bare Megatron prefix, or synthetic data: "
            "dummy or distributed_dummy, with settings as in dummy:documents=1000,kind=text.",
            rich_help_panel=_DATA_PANEL,
        ),
    ] = None,
    mixture: Annotated[
        str | None,
        typer.Option(
            help="Several stores and their weights, instead of --data: a YAML file, or stores/web=0.7,stores/code=0.3.",
            rich_help_panel=_DATA_PANEL,
        ),
    ] = None,
    input_file: Annotated[
        Path | None,
        typer.Option(
            help="A file to prepare into a temporary store in memory, instead of --data.",
            rich_help_panel=_DATA_PANEL,
        ),
    ] = None,
    dataset_config: Annotated[
        Path | None,
        typer.Option(
            help="A YAML file of data sets and their packing, prepared into OUT/data, instead of --data.",
            rich_help_panel=_DATA_PANEL,
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="With --input-file, --stream or --dataset-config: as prepare takes it.",
            rich_help_panel=_DATA_PANEL,
        ),
    ] = None,
    processor: Annotated[
        str | None,
        typer.Option(
            help="With --input-file or --stream: reads images and audio, the folder of a processor of transformers or "
            "a Hub id.",
            rich_help_panel=_DATA_PANEL,
        ),
    ] = None,
    data_folder: Annotated[
        str | None,
        typer.Option(
            help="Where paths of images and audio begin: with --processor, in place of the folder of the file that "
            "names them; of a store, where its media have moved.",
            rich_help_panel=_DATA_PANEL,
        ),
    ] = None,
    missing_media: Annotated[
        list[str] | None,
        typer.Option(
            help="Of stores: a list of documents whose media are missing (check --missing-media FILE), served "
            "as padding; may be given several times.",
            rich_help_panel=_DATA_PANEL,
        ),
    ] = None,
    stream: Annotated[
        list[str] | None,
        typer.Option(
            help="Files, folders, globs or URLs to read as the run goes on, instead of --data; may be given several "
            "times.",
            rich_help_panel=_DATA_PANEL,
        ),
    ] = None,
    lanes: Annotated[
        int | None,
        typer.Option(
            help="With --stream: parts of the input that are read side by side, a multiple of every number of ranks.",
            rich_help_panel=_DATA_PANEL,
        ),
    ] = None,
    stream_workers: Annotated[
        int | None,
        typer.Option(
            help="With --stream: processes of each rank that tokenize; 0 for none but its own.",
            rich_help_panel=_DATA_PANEL,
        ),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            help="With --stream: a folder where the store of the inputs grows meanwhile.",
            rich_help_panel=_DATA_PANEL,
        ),
    ] = None,
    follow_links: Annotated[
        bool,
        typer.Option(
            "--follow-links",
            help="With --stream or --input-file: follow symbolic links that lead out of an input folder.",
            rich_help_panel=_DATA_PANEL,
        ),
    ] = False,
    if_missing: Annotated[
        str,
        typer.Option(
            help="Where nothing is at --data or --input-file: error, or synthetic data stands in for it.",
            rich_help_panel=_DATA_PANEL,
        ),
    ] = "error",
    generation: Annotated[
        int | None,
        typer.Option(
            help="Of the store at --data, which generation; the newest, or with --resume the one that the run was "
            "begun on.",
            rich_help_panel=_DATA_PANEL,
        ),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            help="Of a store behind a URL: the folder of what is kept of it, shared by the ranks of a node; "
            "~/.cache/batchloom/blocks.",
            rich_help_panel=_DATA_PANEL,
        ),
    ] = None,
    cache_limit: Annotated[
        str | None,
        typer.Option(
            help="Bytes that are kept there at most, as 200GB; 50GB.",
            rich_help_panel=_DATA_PANEL,
        ),
    ] = None,
    verify: Annotated[
        str | None,
        typer.Option(
            help="Compare each 4 KiB of tokens with their checksum: first-read (behind a URL), full or off.",
            rich_help_panel=_DATA_PANEL,
        ),
    ] = None,
    packing: Annotated[
        str | None,
        typer.Option(help="best_fit, wrap, first_fit, window_N or none.", rich_help_panel=_DATA_PANEL),
    ] = None,
    overlong: Annotated[
        str | None,
        typer.Option(
            help="What becomes of a document longer than a sequence: split, drop, truncate or error; without it texts "
            "are split, and conversations dropped.",
            rich_help_panel=_DATA_PANEL,
        ),
    ] = None,
    noise_prob: Annotated[
        float | None,
        typer.Option(
            show_default="0",
            help="Share of the input tokens that are replaced by any other while it is trained; labels stay.",
            rich_help_panel=_DATA_PANEL,
        ),
    ] = None,
    model_name: Annotated[
        str | None,
        typer.Option(
            help="A configuration: tiny (the default), 150M_1024 or 250M_1024.",
            rich_help_panel=_MODEL_PANEL,
        ),
    ] = None,
    config_file: Annotated[
        Path | None,
        typer.Option(
            help="A configuration of your own: JSON as in configs/*.json.",
            rich_help_panel=_MODEL_PANEL,
        ),
    ] = None,
    init: Annotated[
        Path | None,
        typer.Option(
            help="Finetune the Hugging Face language model in this local folder; of images or audio where the data "
            "holds such.",
            rich_help_panel=_MODEL_PANEL,
        ),
    ] = None,
    attn_implementation: Annotated[
        str | None,
        typer.Option(
            help="With --init: sdpa (the default), eager, flex_attention, ...",
            rich_help_panel=_MODEL_PANEL,
        ),
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(help="Tokens of a sequence.", rich_help_panel=_MODEL_PANEL),
    ] = None,
    global_batch_size: Annotated[
        int | None,
        typer.Option(
            help="Sequences of a step, over all ranks.",
            rich_help_panel=_MODEL_PANEL,
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            help="Rows in one forward pass of one rank; lower it when memory runs out.",
            rich_help_panel=_MODEL_PANEL,
        ),
    ] = None,
    uneven: Annotated[
        str | None,
        typer.Option(
            help="Where a step does not divide among ranks and passes: refuse (the default), or pad with rows that "
            "carry no loss.",
            rich_help_panel=_MODEL_PANEL,
        ),
    ] = None,
    balance: Annotated[
        bool | None,
        typer.Option(
            "--balance/--no-balance",
            help="Deal the rows of each step to ranks by the squared lengths of their documents.",
            rich_help_panel=_MODEL_PANEL,
        ),
    ] = None,
    lr: Annotated[float | None, typer.Option(help="The highest learning rate.", rich_help_panel=_MODEL_PANEL)] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Of the order and of the first weights.", rich_help_panel=_MODEL_PANEL),
    ] = None,
    compile_model: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", help="torch.compile the model.", rich_help_panel=_MODEL_PANEL),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel=_MODEL_PANEL)] = "auto",
    max_iters: Annotated[
        int | None,
        typer.Option(help="Steps of the whole run.", rich_help_panel=_RUN_PANEL),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The run's folder; runs/ and the model's name when not given.",
            rich_help_panel=_RUN_PANEL,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the run in --out.", rich_help_panel=_RUN_PANEL),
    ] = False,
    stop_at: Annotated[
        int | None,
        typer.Option(
            help="Save and stop after this step of --max-iters; --resume goes on.",
            rich_help_panel=_RUN_PANEL,
        ),
    ] = None,
    eval_interval: Annotated[
        int | None,
        typer.Option(
            help="Steps between two looks at the val subset; 0: at the end only.",
            rich_help_panel=_RUN_PANEL,
        ),
    ] = None,
    eval_batches: Annotated[
        int | None,
        typer.Option(
            help="Batches of the val subset in each look.",
            rich_help_panel=_RUN_PANEL,
        ),
    ] = None,
    save_interval: Annotated[
        int | None,
        typer.Option(
            help="Steps between two checkpoints; 0: at the end only.",
            rich_help_panel=_RUN_PANEL,
        ),
    ] = None,
) -> None:
    """Train a small GPT on a store or a file, or finetune a pretrained model.

    Under torchrun every process is one rank.
    """
    require_train_packages()
    with _run_in_terminal():
        # Importing torch takes seconds.
        from batchloom.train import StreamOptions, start as run  # noqa: PLC0415

        media = {"processor": processor, "data_folder": data_folder}
        request = run.TrainRequest(
            data=run.DataRequest(
                data=data if data is None or is_url(data) else Path(data),
                mixture=None if mixture is None else read_mixture(mixture),
                input_file=input_file,
                dataset_config=dataset_config,
                tokenizer=tokenizer,
                if_missing=if_missing,
                generation=generation,
                stream=None if stream is None else tuple(stream),
                options=StreamOptions(lanes=lanes, workers=stream_workers, keep=keep, follow_links=follow_links),
                media={name: value for name, value in media.items() if value is not None} or None,
                missing_media_lists=tuple(missing_media or ()),
                open_options=_make_open_options(cache, cache_limit, verify),
            ),
            model=run.ModelRequest(
                model_name=model_name,
                config_file=config_file,
                init=init,
                attn_implementation=attn_implementation,
            ),
            out=out,
            resume=resume,
            stop_at=stop_at,
            device=device,
            changes={
                "packing": packing,
                "overlong": overlong,
                "noise_prob": noise_prob,
                "seq_len": seq_len,
                "global_batch_size": global_batch_size,
                "batch_size": batch_size,
                "uneven": uneven,
                "balance": balance,
                "lr": lr,
                "seed": seed,
                "compile": compile_model,
                "steps": max_iters,
                "eval_interval": eval_interval,
                "eval_batches": eval_batches,
                "save_interval": save_interval,
            },
        )
        run.start_training(request, print_line)


@contextmanager
def _run_in_terminal() -> Iterator[None]:
    """Print the log of a run to the terminal; Ctrl-C ends it with one sentence."""
    try:
        with _handle_first_interrupt(), _log_to_terminal():
            yield
    except KeyboardInterrupt as stop:
        # Ctrl-C reaches all ranks; only one prints.
        if os.environ.get("RANK", "0") == "0":
            typer.echo(f"\n{stop.args[0] if stop.args else _NOT_STARTED_MESSAGE}", err=True)
        raise typer.Exit(130) from None


def _make_open_options(cache: Path | None, limit: str | None, verify: str | None) -> dict[str, Any]:
    """Return the options for opening a store."""
    size = None if limit is None else _parse_bytes(limit)
    options = {"cache": cache, "cache_limit": size, "verify": verify}
    return {name: value for name, value in options.items() if value is not None}


def _parse_bytes(text: str) -> int:
    size = parse_size(text)
    if not size:
        raise typer.BadParameter(
            f"{quote_value(text)} is no number of bytes; write it as 50GB or 500MB.",
            param_hint="--cache-limit",
        )
    return size


def print_line(line: str, *, err: bool = False) -> None:
    """Print a line, which may contain path bytes that are not valid text."""
    encoding = (sys.stderr if err else sys.stdout).encoding or "utf-8"
    typer.echo(line.encode(encoding, "backslashreplace").decode(encoding), err=err)


@final
class _TerminalLogHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print_line(record.getMessage(), err=record.levelno >= logging.WARNING)


@contextmanager
def _log_to_terminal() -> Iterator[None]:
    """Print the log ``batchloom``: info to stdout, warnings to stderr."""
    log, handler = logging.getLogger("batchloom"), _TerminalLogHandler()
    # Only one rank prints.
    handler.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)
    previous_level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(previous_level)
        log.removeHandler(handler)


@contextmanager
def _handle_first_interrupt() -> Iterator[None]:
    """Let the first Ctrl-C end the run, and ignore others during the shutdown.

    Under torchrun two arrive: one from the terminal, one from torchrun.
    """
    previous_handler = signal.getsignal(signal.SIGINT)
    # A background job of a script ignores Ctrl-C, and must continue to.
    if threading.current_thread() is not threading.main_thread() or previous_handler == signal.SIG_IGN:
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, previous_handler)
