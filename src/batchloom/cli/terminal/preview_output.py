"""Previews of documents as a model will see them, on a terminal or in a file.

Every line starts with a mark, so that no document text can be mistaken for one: ``T`` for trained
text; ``|`` at the start of a document line, ``>`` where it continues. On a terminal, trained text
is also green. A repeated token, such as those of images, is written once with its count.
"""

import re
from collections.abc import Sequence

from rich.console import Console

from batchloom.analysis.doctor import DocumentPreview
from batchloom.core.wording import escape_unprintable

_TRAINED_STYLE = "green"
# A control token and its repetitions.
_REPEATED_TOKEN = re.compile(r"(<[^<>\s]{1,40}>)\1{7,}")
_LEGEND = r"T: trained; |: a line begins, >: it goes on; \x1b and the like: what cannot be seen"


def print_preview(console: Console, documents: Sequence[DocumentPreview]) -> None:
    """Print documents, after an explanation of the marks."""
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
    """Return a document as lines: mark, visible text, whether it is trained."""
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
            # Without text after the last newline, the next segment starts the next line.
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
    """Return a line with each run of a repeated token replaced by one and its count."""
    return _REPEATED_TOKEN.sub(lambda run: f"{run[1]}[x{len(run[0]) // len(run[1])}]", text)
