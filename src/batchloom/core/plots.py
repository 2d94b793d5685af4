"""Text and output files of matplotlib plots."""

from pathlib import Path
from typing import Any

from batchloom.core.errors import OutputError

_MAX_TITLE_LENGTH = 160


def escape_plot_text(text: str) -> str:
    """Escape a text for matplotlib: characters missing in the font, and dollars.

    Long titles, for example of many stores, are cut.
    """
    title = text if len(text) <= _MAX_TITLE_LENGTH else f"{text[: _MAX_TITLE_LENGTH - 3]}..."
    return title.encode("ascii", "backslashreplace").decode().replace("$", r"\$")


def save_figure(figure: Any, png: Path) -> None:
    """Write a figure as PNG, through a temporary file.

    Raises:
        OutputError: it cannot be written.
    """
    partial_path = png.with_name(png.name + ".partial")
    try:
        figure.savefig(partial_path, format="png", dpi=120)
        partial_path.rename(png)
    except OSError as error:
        raise OutputError(f"{png} cannot be written: {error.strerror}.") from error
