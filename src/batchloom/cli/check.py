"""``batchloom check``."""

import json
from typing import Annotated

import typer
from rich.console import Console

import batchloom


def check(
    path: Annotated[
        str, typer.Argument(help="A store, a Megatron prefix, or a raw file, folder or URL.")
    ],
    *,
    text_field: Annotated[
        str, typer.Option(help="Field of a raw JSONL file that holds the text.")
    ] = "text",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Verify a store or a raw file. Exit code 0: sound, 1: faulty, 2: misuse."""
    verdict = batchloom.check(path, text_field=text_field)
    if as_json:
        facts = {"path": verdict.path, "kind": verdict.kind, "sound": verdict.sound}
        print(
            json.dumps(
                {
                    **facts,
                    "faults": verdict.faults,
                    "facts": verdict.facts,
                    "sample": verdict.sample,
                }
            )
        )
        return 0 if verdict.sound else 1
    console = Console(highlight=False, soft_wrap=True)
    for name, fact in verdict.facts.items():
        console.print(f"{name + ':':12} {fact}", markup=False)
    if verdict.sample:
        console.print(f"{'sample:':12} {verdict.sample!r}", markup=False)
    for fault in verdict.faults:
        console.print(f"FAULT: {fault}", markup=False, style="red")
    console.print(
        f"{verdict.path}: {'sound' if verdict.sound else f'{len(verdict.faults)} faults'}",
        markup=False,
    )
    return 0 if verdict.sound else 1
