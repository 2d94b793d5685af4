"""Reports: HTML pages with inline styles and no script, notebooks, plots."""

import importlib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchloom.core.errors import MissingDependencyError
from batchloom.core.files import replace_file
from batchloom.core.wording import escape_unprintable, shorten

if TYPE_CHECKING:
    from jinja2 import Environment

_BASE_TEMPLATE = Path(__file__).with_name("page.html.j2")

_MAX_TITLE_LENGTH = 160


def render_page(template: Path, values: Mapping[str, Any], filters: Mapping[str, Callable[..., Any]]) -> str:
    """Render a page as text.

    Args:
        template: template that extends ``page``: its block ``main`` is the body, and ``sources`` what its security
            policy allows besides styles.
        values: values of the template; ``title`` is the page's title.
        filters: template filters besides ``seen`` (makes every character visible) and ``count`` (``1,234``).
    """
    environment = _make_environment(template)
    environment.filters |= filters
    return environment.get_template("own").render(values)


@cache
def _make_environment(template: Path) -> "Environment":
    """Compile a template once, which takes as long as preparing a small store."""
    # jinja2 is slow to import.
    from jinja2 import DictLoader, Environment, StrictUndefined

    own = template.read_text("utf-8")
    pages = DictLoader({"page": _BASE_TEMPLATE.read_text("utf-8"), "own": own})
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, loader=pages)
    environment.filters |= {"seen": escape_unprintable, "count": "{:,}".format}
    return environment


def make_notebook_html(value: object) -> str | None:
    """Return the display of a value, made by ``batchloom.view``.

    Without the packages of the pages it is None, and a notebook shows the ``repr``.
    """
    try:
        # By name, so that the packages of these values do not depend on the pages. Only a notebook comes here.
        pages = importlib.import_module("batchloom.view")
    except MissingDependencyError:
        return None
    display: str | None = pages.make_notebook_html(value)
    return display


def escape_plot_text(text: str) -> str:
    """Escape a text for matplotlib: characters missing in the font, and dollars.

    Long titles, for example of many stores, are cut.
    """
    return shorten(text, _MAX_TITLE_LENGTH).encode("ascii", "backslashreplace").decode().replace("$", r"\$")


def save_figure(figure: Any, png: Path) -> None:
    """Write a figure as PNG, through a temporary file."""
    with replace_file(png) as partial_path:
        figure.savefig(partial_path, format="png", dpi=120)
