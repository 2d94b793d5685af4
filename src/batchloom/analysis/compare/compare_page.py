"""``compare.html``: a comparison as one page with an embedded picture."""

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


def render_comparison_page(comparison: AnyComparison, picture: bytes) -> str:
    """Render the page as HTML text; ``picture`` holds the PNG."""
    columns = list_columns(comparison)
    values = {
        "title": make_title(comparison),
        "banner": make_banner(comparison),
        "facts": _list_facts(comparison),
        "picture": base64.b64encode(picture).decode(),
        "columns": columns,
        "rows": [list(zip(columns, row, strict=True)) for row in make_table_rows(comparison)],
        "numbers": NUMBER_COLUMNS,
        "sentences": describe_comparison(comparison),
        "verdict": describe_verdict(comparison),
        "plain_hash": comparison.digest if isinstance(comparison, FrameworkComparison) else "",
    }
    return render_page(_TEMPLATE, values, {})


def _list_facts(comparison: AnyComparison) -> list[tuple[str, str]]:
    if not isinstance(comparison, FrameworkComparison):
        tolerance_text = "not compared step by step" if comparison.tolerance is None else f"{comparison.tolerance:g}"
        return [
            ("compared by", comparison.by),
            ("shortest ends at", f"{comparison.until:,.0f}"),
            ("tolerance", tolerance_text),
        ]
    spec = comparison.spec
    versions = {
        name: package_version for outcome in comparison.outcomes for name, package_version in outcome.versions.items()
    }
    return [
        ("data", comparison.origin),
        ("plan", comparison.plan),
        ("steps", f"{spec.steps:,}"),
        ("processes", f"{spec.processes:,}"),
        ("sizes", f"seq_len {spec.seq_len:,}, global batch {spec.global_batch_size:,}"),
        ("sequences of a forward pass", f"{spec.batch_size:,}"),
        ("seed", str(spec.seed)),
        ("tolerance of losses", f"{spec.tolerance:g} (relative)"),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
    ]
