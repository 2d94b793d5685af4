"""Conversion of HTML to its visible text with resiliparse.

Texts that are not HTML stay unchanged.
"""

import re
from dataclasses import dataclass
from typing import Literal

from batchloom.core.settings import coerce_int_fields, raise_problems
from batchloom.text.steps import CleanFunction, DroppedText

# Elements that make a text HTML. <b> or <i> alone occur in Markdown and comments, too.
_BLOCK_TAGS = (
    "html|head|body|title|meta|link|script|style|div|p|br|hr|h[1-6]|ul|ol|li|dl|dt|dd|table|thead|tbody|tr|td|th"
    "|pre|blockquote|section|article|main|nav|aside|header|footer|form|figure|span|a|img|center|font|iframe|noscript"
)
_HTML_START = re.compile(
    rf"[\s\ufeff]*+(?:<!--(?:(?!-->).)*+-->[\s\ufeff]*+)*+(?:<\?xml[^<>]*+>\s*+)?+<(?:!doctype\s+html|(?:{_BLOCK_TAGS})[\s/>])",
    re.IGNORECASE | re.DOTALL,
)
_HTML_TAG = re.compile(rf"<(?:!doctype\s+html|/?(?:{_BLOCK_TAGS})(?:\s[^<>]*+)?/?>)", re.IGNORECASE)
# Without any of these, the heuristics would drop lists: so close to the root they look like menus.
_PAGE_TAG = re.compile(r"<(?:!doctype|html|body)[\s>]", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class HtmlSettings:
    """Settings of the step ``html``.

    Attributes:
        when: ``begins``: a text is HTML if it begins with an HTML tag; ``anywhere``: if it
            contains one.
        main: remove menus, footers and similar parts of a page, unless the page has nothing else.
            A text without ``<html>`` or ``<body>`` is a fragment, which is extracted completely.
        links: write link targets after the links.
        most_depth: maximum nesting depth of elements; deeper pages are dropped.
    """

    when: Literal["begins", "anywhere"] = "begins"
    main: bool = True
    links: bool = False
    most_depth: int = 1000

    def __post_init__(self) -> None:
        raise_problems(coerce_int_fields(self, {"most_depth": (1, 5000)}))


def make_html_step(settings: HtmlSettings) -> CleanFunction:
    """Return the function that converts HTML to its visible text, or drops a page."""
    from resiliparse.extract.html2text import extract_plain_text

    def extract(page: str, *, main: bool) -> str:
        return str(
            extract_plain_text(page, preserve_formatting=True, main_content=main, links=settings.links, alt_texts=False)
        )

    begins = settings.when == "begins"

    def clean(text: str) -> str | DroppedText:
        if "<" not in text or not (_HTML_START.match(text) if begins else _HTML_TAG.search(text)):
            return text
        drop = _check_parse_cost(text, settings.most_depth)
        if drop is not None:
            return drop
        page = text if text.isascii() else text.encode("utf-8", "replace").decode()
        main = settings.main and _PAGE_TAG.search(text) is not None
        page_text = extract(page, main=main)
        if main and not page_text.strip():
            page_text = extract(page, main=False)
        return page_text.strip("\n")

    return clean


# A tag with its attributes as split by the standard (WHATWG HTML, 13.2.5), and a comment.
_TAG = re.compile(
    r"<(?:(/?)([a-zA-Z][^\s/>]*+)((?:[\s/]++|=?[^\s/>=]++(?:\s*+=\s*+(?:\"[^\"]*+\"?|'[^']*+'?|[^\s>\"'][^\s>]*+)?)?)*+)"
    r"|!--(?:(?!--!?>).)*+)",
    re.DOTALL,
)
# Elements that do not nest: they are void, or the next one of their kind ends them.
_VOID_TAGS = frozenset(
    (
        "area",
        "base",
        "br",
        "col",
        "embed",
        "hr",
        "img",
        "input",
        "link",
        "meta",
        "source",
        "track",
        "wbr",
        "param",
        "p",
        "li",
        "dt",
        "dd",
        "tr",
        "td",
        "th",
        "thead",
        "tbody",
        "tfoot",
        "colgroup",
    )
)
_RAW_TEXT_TAGS = frozenset(("script", "style", "textarea", "title", "xmp", "iframe", "noembed", "noframes"))
_ATTRIBUTE = re.compile(r"=?[^\s/>=]++(?:\s*+=\s*+(?:\"[^\"]*+\"?|'[^']*+'?|[^\s>\"'][^\s>]*+)?)?")
_MAX_ATTRIBUTES = 4000


def _check_parse_cost(text: str, most_depth: int) -> DroppedText | None:
    """Drop texts that take quadratic time: deep nesting, very many attributes."""
    open_elements: dict[str, int] = {}
    depth = 0
    at = 0
    while tag := _TAG.search(text, at):
        at = tag.end()
        closing = tag[1]
        name = (tag[2] or "").lower()
        if len(tag[3] or "") > 2 * _MAX_ATTRIBUTES and len(_ATTRIBUTE.findall(tag[3])) > _MAX_ATTRIBUTES:
            return DroppedText("html: too many attributes", f"over {_MAX_ATTRIBUTES:,} in one tag <{name[:20]}>")
        if not name or name in _VOID_TAGS:
            continue
        if closing:
            if open_elements.get(name):
                open_elements[name] -= 1
                depth -= 1
            continue
        if name in _RAW_TEXT_TAGS:
            end = re.compile(rf"</{name}", re.IGNORECASE).search(text, at)
            at = end.start() if end else len(text)
            continue
        open_elements[name] = open_elements.get(name, 0) + 1
        depth += 1
        if depth > most_depth:
            return DroppedText("html: nested too deeply", f"over {most_depth:,} elements inside each other")
    return None
