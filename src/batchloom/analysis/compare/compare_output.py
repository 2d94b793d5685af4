"""Output files of a comparison: ``compare.json``, ``.png`` and ``.html``."""

import json
import shutil
from pathlib import Path

from batchloom.analysis.compare.compare_page import render_comparison_page
from batchloom.analysis.compare.compare_plots import draw_comparison
from batchloom.analysis.compare.compare_report import AnyComparison, comparison_to_plain
from batchloom.analysis.compare.comparison import FrameworkComparison
from batchloom.analysis.compare.finished_runs import PARTIAL
from batchloom.core.partial_files import wrap_os_errors


def write_comparison(comparison: AnyComparison, out: Path) -> tuple[Path, Path, Path]:
    """Write the three files atomically and return their paths.

    Files of an earlier comparison are replaced. The records of finished frameworks, from which a
    stopped comparison resumes, are removed.
    """
    json_file, png, html = (out / f"compare.{ending}" for ending in ("json", "png", "html"))
    with wrap_os_errors("write", out):
        out.mkdir(parents=True, exist_ok=True)
    draw_comparison(comparison, png)
    _write_text(json_file, json.dumps(comparison_to_plain(comparison), ensure_ascii=False, indent=1) + "\n")
    _write_text(html, render_comparison_page(comparison, png.read_bytes()))
    with wrap_os_errors("write", out):
        if isinstance(comparison, FrameworkComparison) and (out / PARTIAL).exists():
            shutil.rmtree(out / PARTIAL)
    return json_file, png, html


def _write_text(path: Path, text: str) -> None:
    partial_path = path.with_name(path.name + ".partial")
    with wrap_os_errors("write", path):
        partial_path.write_text(text, "utf-8", errors="replace")
        partial_path.rename(path)
