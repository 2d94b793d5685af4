"""``batchloom check``."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import batchloom
from batchloom.cli.options import Argument, AsJson, Generation, Option
from batchloom.cli.terminal import Line, print_escaped, print_json, report
from batchloom.core.errors import ExitCode, InputMissingError
from batchloom.core.wording import format_count
from batchloom.store.maintain import VerificationResult

_JSON_KEYS = ("path", "kind", "sound", "data", "used", "faults", "facts", "sample")


def check(
    path: Annotated[
        str,
        Argument(
            metavar="PATH", help="Store, Megatron prefix, raw file or folder, or URL of one; or synthetic data by name."
        ),
    ],
    *,
    text_field: Annotated[
        str | None,
        Option(help="Field of raw records that holds the text.", show_default="detected from the records"),
    ] = None,
    encoding: Annotated[
        str | None, Option(help="Encoding of raw text, JSON and CSV files.", show_default="utf-8")
    ] = None,
    vocab_size: Annotated[int | None, Option(help="Exclusive upper bound of the ids of a Megatron prefix.")] = None,
    generation: Generation = None,
    media: Annotated[
        bool,
        Option(help="Read, decode and process the images and audio of a store."),
    ] = True,
    missing_media: Annotated[
        Path | None,
        Option(help="File to write: the documents with unreadable images or audio, for MediaOptions(replace=...)."),
    ] = None,
    as_json: AsJson = False,
) -> ExitCode:
    """Verify a store or raw file: real, synthetic or absent.

    Exit code 0: sound, 1: faulty or absent, 2: wrong options.
    """
    try:
        verdict = batchloom.check(
            path,
            text_field=text_field,
            encoding=encoding,
            vocab_size=vocab_size,
            generation=generation,
            media=media,
            missing_media=missing_media,
        )
    except InputMissingError as error:
        if not as_json:
            print_escaped(f"{'data:':12} absent")
            raise
        absent = VerificationResult(path, "absent", [str(error)], used="nothing")
        print_json({**{name: getattr(absent, name) for name in _JSON_KEYS}, "data": "absent"})
        return ExitCode.FAILED
    values = {name: getattr(verdict, name) for name in _JSON_KEYS}
    report(values, _iter_lines(verdict), as_json=as_json)
    return ExitCode.DONE if verdict.sound else ExitCode.FAILED


def _iter_lines(verdict: VerificationResult) -> Iterator[Line]:
    sample = {"sample": repr(verdict.sample)} if verdict.sample else {}
    for name, fact in {"data": verdict.data, **verdict.facts, **sample, "used": verdict.used}.items():
        yield f"{name + ':':12} {fact}"
    yield from ((f"FAULT: {fault}", "red") for fault in verdict.faults)
    yield f"{verdict.path}: {'sound' if verdict.sound else format_count(len(verdict.faults), 'fault')}"
