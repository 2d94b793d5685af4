"""``compare.html``: a comparison as one page with its picture inside."""

import base64
from pathlib import Path

from batchloom.analysis.compare.compare_report import (
    NUMBER_COLUMNS,
    AnyComparison,
    describe_comparison,
    describe_verdict,
    list_columns,
    make_banner,
    make_table_rows,
    make_title,
)
from batchloom.analysis.compare.comparison import FrameworkComparison
from batchloom.core.html_page import render_page

_TEMPLATE = Path(__file__).with_name("compare.html.j2")


def render_comparison_page(found: AnyComparison, picture: bytes) -> str:
    """The page as text.

    Args:
        found: what is told.
        picture: the PNG.
    """
    columns = list_columns(found)
    values = {
        "title": make_title(found),
        "banner": make_banner(found),
        "facts": _list_facts(found),
        "picture": base64.b64encode(picture).decode(),
        "columns": columns,
        "rows": [list(zip(columns, row, strict=True)) for row in make_table_rows(found)],
        "numbers": NUMBER_COLUMNS,
        "sentences": describe_comparison(found),
        "verdict": describe_verdict(found),
        "plain_hash": found.digest if isinstance(found, FrameworkComparison) else "",
    }
    return render_page(_TEMPLATE, values, {})


def _list_facts(found: AnyComparison) -> list[tuple[str, str]]:
    if not isinstance(found, FrameworkComparison):
        asked = "not compared step by step" if found.tolerance is None else f"{found.tolerance:g}"
        return [
            ("beside each other by", found.by),
            ("shortest ends at", f"{found.until:,.0f}"),
            ("tolerance", asked),
        ]
    spec = found.spec
    versions = {name: one for outcome in found.outcomes for name, one in outcome.versions.items()}
    return [
        ("data", found.origin),
        ("plan", found.plan),
        ("steps", f"{spec.steps:,}"),
        ("processes", f"{spec.processes:,}"),
        ("sizes", f"seq_len {spec.seq_len:,}, global batch {spec.global_batch_size:,}"),
        ("sequences of a forward pass", f"{spec.batch_size:,}"),
        ("seed", str(spec.seed)),
        ("tolerance of losses", f"{spec.tolerance:g} (relative)"),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
    ]
