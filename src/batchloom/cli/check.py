"""``batchloom check``."""

from pathlib import Path
from typing import Annotated

import typer

import batchloom
from batchloom.cli.terminal import AsJson, Generation, plain_console, print_json
from batchloom.core.errors import InputMissingError
from batchloom.core.wording import escape_unprintable, format_count
from batchloom.store.maintain import VerificationResult


def check(
    path: Annotated[
        str,
        typer.Argument(
            help="A store or its URL, a Megatron prefix, a raw file, folder or URL, or the name of synthetic data."
        ),
    ],
    *,
    text_field: Annotated[
        str | None,
        typer.Option(help="Field of raw records that holds the text.", show_default="detected from the records"),
    ] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Exclusive upper bound of the ids of a bare prefix.")] = None,
    generation: Generation = None,
    media: Annotated[
        bool,
        typer.Option(help="Read, decode and process the images and audio that a store holds or names."),
    ] = True,
    missing_media: Annotated[
        Path | None,
        typer.Option(
            help="Write the documents whose images or audio cannot be read to this file, for MediaOptions(replace=...)."
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Verify a store or raw file, and report real, synthetic or absent data.

    Exit code 0: sound, 1: faulty or absent, 2: wrong options.
    """
    try:
        verdict = batchloom.check(
            path,
            text_field=text_field,
            vocab_size=vocab_size,
            generation=generation,
            media=media,
            missing_media=missing_media,
        )
    except InputMissingError as error:
        if not as_json:
            plain_console().print(f"{'data:':12} absent")
            raise
        _print_json(VerificationResult(path, "absent", [str(error)], used="nothing"), "absent")
        return 1
    if as_json:
        _print_json(verdict, verdict.data)
        return 0 if verdict.sound else 1
    console = plain_console()
    console.print(f"{'data:':12} {verdict.data}")
    for name, fact in verdict.facts.items():
        console.print(f"{escape_unprintable(name) + ':':12} {escape_unprintable(str(fact))}")
    if verdict.sample:
        console.print(f"{'sample:':12} {verdict.sample!r}")
    console.print(f"{'used:':12} {escape_unprintable(verdict.used)}")
    for fault in verdict.faults:
        console.print(f"FAULT: {escape_unprintable(fault)}", style="red")
    console.print(
        f"{escape_unprintable(verdict.path)}: "
        f"{'sound' if verdict.sound else format_count(len(verdict.faults), 'fault')}"
    )
    return 0 if verdict.sound else 1


def _print_json(verdict: VerificationResult, data: str) -> None:
    print_json(
        {
            "path": verdict.path,
            "kind": verdict.kind,
            "sound": verdict.sound,
            "data": data,
            "used": verdict.used,
            "faults": verdict.faults,
            "facts": verdict.facts,
            "sample": verdict.sample,
        }
    )
