"""Rendering of pages, and parameters of their requests."""

import base64
import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, final
from urllib.parse import quote, urlencode

from jinja2 import ChoiceLoader, DictLoader, Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from batchloom.core.errors import InputError
from batchloom.core.wording import escape_unprintable, format_count, format_size, shorten
from batchloom.view.documents.document_tokens import list_runs
from batchloom.view.target import PlanChoice

_FOLDER = Path(__file__).parent
STATIC_FOLDER = _FOLDER / "static"


# Address of a page that a single file does not hold. Links to it are removed; data cannot spell one, since its quotes
# are escaped.
_NO_ADDRESS = "no-page"
_DEAD_LINK = f' href="{_NO_ADDRESS}"'


@cache
def _make_environment(*, standalone: bool) -> Environment:
    templates = FileSystemLoader(_FOLDER / "templates")
    frame = (_FOLDER / "templates" / "standalone.html.j2").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # The pages are the same in a file; only their frame differs.
        loader=ChoiceLoader([DictLoader({"base.html.j2": frame}), templates]) if standalone else templates,
    )
    environment.filters |= {
        "printable": escape_unprintable,
        "count": "{:,}".format,
        "counted": format_count,
        "size": format_size,
        "percent": format_percent,
        "shorten": shorten,
        "runs": list_runs,
    }
    environment.globals |= {"address": make_address, "standalone": standalone}
    if standalone:
        # The hash admits this stylesheet alone.
        styles = (STATIC_FOLDER / "view.css").read_text(encoding="utf-8")
        digest = base64.b64encode(hashlib.sha256(styles.encode()).digest()).decode()
        environment.globals |= {
            "address": lambda *_: _NO_ADDRESS,
            "styles": Markup(styles),  # noqa: S704 - a file of this package
            "content_policy": f"default-src 'none'; img-src data:; media-src data:; style-src 'sha256-{digest}'",
        }
    return environment


def render(template: str, values: Mapping[str, Any]) -> str:
    """Render a template of this package; every value in it is escaped."""
    return _make_environment(standalone=False).get_template(template).render(values)


def render_file(template: str, values: Mapping[str, Any]) -> str:
    """Render a template as one file, which needs no script and loads nothing."""
    return _make_environment(standalone=True).get_template(template).render(values).replace(_DEAD_LINK, "")


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


_MOST = 1 << 40
_MOST_DIGITS = 13


@final
class _NumberConvertor(IntegerConvertor):
    """A number in the path of an address, which Python converts without an error."""

    regex = rf"[0-9]{{1,{_MOST_DIGITS}}}"


register_url_convertor("number", _NumberConvertor())


def respond(
    template: str, values: dict[str, Any], headers: Mapping[str, str] | None = None, status: int = 200
) -> Response:
    """Return the response with a rendered template."""
    return HTMLResponse(render(template, values), status, {"Cache-Control": "no-store", **(headers or {})})


def read_number(request: Request, name: str, default: int, least: int = 0) -> int:
    """Return a whole number of a request; InputError names one that is none."""
    text = request.query_params.get(name, "").replace(",", "").strip()
    if not text:
        return default
    if not text.isdecimal() or len(text) > _MOST_DIGITS or not least <= int(text) <= _MOST:
        raise InputError(f"{name}: {text[:40]!r} is not a whole number from {least:,} to {_MOST:,}")
    return int(text)


def read_choice(request: Request, default: PlanChoice) -> PlanChoice:
    """Return the settings of the plan that a request chooses."""
    return PlanChoice(
        seq_len=read_number(request, "seq_len", default.seq_len, 1),
        global_batch_size=read_number(request, "batch", default.global_batch_size, 1),
        packing=request.query_params.get("packing") or default.packing,
        seed=read_number(request, "seed", default.seed),
        steps=read_number(request, "steps", 0) or None,
        split=request.query_params.get("split", ""),
    )
