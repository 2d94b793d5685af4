"""Templates of the pages, and their filters."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from batchloom.core.wording import escape_unprintable, format_count, format_size, shorten

_FOLDER = Path(__file__).parent
STATIC_FOLDER = _FOLDER / "static"


@cache
def _make_environment() -> Environment:
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FileSystemLoader(_FOLDER / "templates"),
    )
    environment.filters |= {
        "seen": escape_unprintable,
        "count": "{:,}".format,
        "counted": format_count,
        "size": format_size,
        "percent": format_percent,
        "shorten": shorten,
    }
    environment.globals |= {"address": make_address}
    return environment


def render(template: str, values: Mapping[str, Any]) -> str:
    """Render a template of this package; every value in it is escaped."""
    return _make_environment().get_template(template).render(values)


def format_percent(share: float) -> str:
    """Format a share of 0 to 1; only 0 and 1 themselves become 0 and 100 %."""
    if 0 < share < 0.0005:
        return "<0.1%"
    if 0.9995 <= share < 1:
        return ">99.9%"
    return f"{share:.1%}"


def make_address(path: str, *parameters: Mapping[str, Any]) -> str:
    """Return the address of a page.

    Later parameters replace earlier ones, and empty ones are left out.
    """
    merged = {name: value for group in parameters for name, value in group.items()}
    query = {name: value for name, value in merged.items() if value not in (None, "")}
    return quote(path) + (f"?{urlencode(query)}" if query else "")
