"""What a comparison leaves: ``compare.json``, ``compare.png`` and ``compare.html``."""

import json
import shutil
from pathlib import Path

from batchloom.analysis.compare.compare_page import page
from batchloom.analysis.compare.compare_plots import draw
from batchloom.analysis.compare.compare_report import Found, plain_of
from batchloom.analysis.compare.comparison import Comparison
from batchloom.analysis.compare.finished_runs import PARTIAL
from batchloom.core.partial_files import refused


def write(found: Found, out: Path) -> tuple[Path, Path, Path]:
    """Write the three files, each aside first; those of an earlier comparison are replaced.

    The records of finished frameworks, which a stopped comparison goes on from, are removed.

    Returns:
        Their paths.

    Raises:
        OutputError: they cannot be written.
    """
    json_file, png, html = (out / f"compare.{ending}" for ending in ("json", "png", "html"))
    with refused("write", out):
        out.mkdir(parents=True, exist_ok=True)
    draw(found, png)
    _write(json_file, json.dumps(plain_of(found), ensure_ascii=False, indent=1) + "\n")
    _write(html, page(found, png.read_bytes()))
    with refused("write", out):
        if isinstance(found, Comparison) and (out / PARTIAL).exists():
            shutil.rmtree(out / PARTIAL)
    return json_file, png, html


def _write(path: Path, text: str) -> None:
    aside = path.with_name(path.name + ".partial")
    with refused("write", path):
        aside.write_text(text, "utf-8", errors="replace")
        aside.rename(path)
