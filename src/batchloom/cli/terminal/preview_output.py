"""Documents as a model will see them, on a terminal or in a file.

Every line begins with its own mark, so that nothing a document holds can look like one: ``T`` where
it is trained; ``|`` where a line of the document begins, ``>`` where it goes on. On a terminal what
is trained is green as well. A token that stands many times in a row, as those of images do, is written once with
their number.
"""

import re
from collections.abc import Sequence

from rich.console import Console

from batchloom.analysis.doctor import DocumentPreview
from batchloom.core.wording import escape_unprintable

_TRAINED_STYLE = "green"
# A control token and those like it that follow.
_REPEATED_TOKEN = re.compile(r"(<[^<>\s]{1,40}>)\1{7,}")
_LEGEND = r"T: trained; |: a line begins, >: it goes on; \x1b and the like: what cannot be seen"


def print_preview(console: Console, documents: Sequence[DocumentPreview]) -> None:
    """Print documents, and before them what the marks mean."""
    if documents:
        console.print(f"preview ({_LEGEND})", style="bold")
    for document in documents:
        location = f"line {document.line}" if document.line else f"row {document.row}"
        location_note = f", {location}" if document.line or document.row else ""
        console.print(
            f"-- {escape_unprintable(document.file)}{location_note}: {document.tokens:,} tokens, "
            f"{document.trained:,} trained"
        )
        for mark, line, trained in make_preview_lines(document):
            console.print(f"{mark} {line}".rstrip(), style=_TRAINED_STYLE if trained else "")


def make_preview_lines(document: DocumentPreview) -> list[tuple[str, str, bool]]:
    """A document as lines: the mark, what can be seen of the line, whether it is trained."""
    lines: list[tuple[str, str, bool]] = []
    begins = True
    for segment in document.pieces:
        if segment.trained is None:
            lines.append(("  ", f"... {segment.tokens:,} tokens are not shown ...", False))
            begins = False
            continue
        mark = "T" if segment.trained else " "
        parts = segment.text.split("\n")
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            # What follows the last line end is a line of the next piece, unless it holds something.
            if part or not last:
                lines.append(
                    (
                        mark + ("|" if begins else ">"),
                        shorten_token_runs(escape_unprintable(part)),
                        segment.trained,
                    )
                )
            begins = not last or (begins and not part)
    return lines


def shorten_token_runs(text: str) -> str:
    """A line in which a token that stands many times in a row is written once, with their number."""
    return _REPEATED_TOKEN.sub(lambda run: f"{run[1]}[x{len(run[0]) // len(run[1])}]", text)
