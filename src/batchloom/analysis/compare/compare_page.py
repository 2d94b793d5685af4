"""``compare.html``: a comparison as one page with its picture inside."""

import base64
from pathlib import Path

from batchloom.analysis.compare.compare_report import (
    NUMBER_COLUMNS,
    Found,
    banner_of,
    columns_of,
    rows_of,
    sentences_of,
    title_of,
    verdict_of,
)
from batchloom.analysis.compare.comparison import Comparison
from batchloom.core.html_page import page_of

_TEMPLATE = Path(__file__).with_name("compare.html.j2")


def page(found: Found, picture: bytes) -> str:
    """The page as text.

    Args:
        found: what is told.
        picture: the PNG.
    """
    columns = columns_of(found)
    values = {
        "title": title_of(found),
        "banner": banner_of(found),
        "facts": _facts(found),
        "picture": base64.b64encode(picture).decode(),
        "columns": columns,
        "rows": [list(zip(columns, row, strict=True)) for row in rows_of(found)],
        "numbers": NUMBER_COLUMNS,
        "sentences": sentences_of(found),
        "verdict": verdict_of(found),
        "plain_hash": found.digest if isinstance(found, Comparison) else "",
    }
    return page_of(_TEMPLATE, values, {})


def _facts(found: Found) -> list[tuple[str, str]]:
    if not isinstance(found, Comparison):
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
