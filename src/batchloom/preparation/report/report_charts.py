"""Charts of the report page: SVG bars, safe for arbitrary names and numbers.

The page sets colours and fonts; a title and a description state the content in words.
"""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from batchloom.core.wording import escape_unprintable

_WIDTH, _ROW, _LABEL, _VALUE = 760, 22, 230, 130
_HEIGHT, _FOOT = 180, 40
_LABEL_CHARACTERS = 34
_MAX_DESCRIBED_BARS = 8


class Bar(NamedTuple):
    """One bar: its name, its size, and the size in words."""

    label: str
    size: float
    words: str


def draw_horizontal_bars(name: str, title: str, bars: Sequence[Bar]) -> str:
    """Draw horizontal bars, each between its name and its size in words.

    ``name`` is the id of the chart, unique on the page, letters only.
    """
    most = max((bar.size for bar in bars), default=0) or 1
    room = _WIDTH - _LABEL - _VALUE
    elements = []
    for number, bar in enumerate(bars):
        y = number * _ROW
        width = _bar_fraction(bar.size, most) * room
        elements.append(
            f'<text class="label" x="{_LABEL - 8}" y="{y + 15}">{escape_text(shorten_label(bar.label))}</text>'
            f'<rect class="bar" x="{_LABEL}" y="{y + 3}" width="{width:.1f}" height="{_ROW - 6}" rx="2"/>'
            f'<text x="{_LABEL + width + 6:.1f}" y="{y + 15}">{escape_text(bar.words)}</text>'
        )
    return _make_svg(name, title, bars, len(bars) * _ROW, elements)


def draw_vertical_bars(name: str, title: str, bars: Sequence[Bar]) -> str:
    """Draw a histogram of vertical bars with their names below.

    ``name`` is the id of the chart, unique on the page, letters only. Bar names must be short.
    """
    most = max((bar.size for bar in bars), default=0) or 1
    step = _WIDTH / max(len(bars), 1)
    wide = min(step * 0.8, 60.0)
    room = _HEIGHT - _FOOT - 16
    elements = []
    for number, bar in enumerate(bars):
        middle = (number + 0.5) * step
        height = _bar_fraction(bar.size, most) * room
        top = _HEIGHT - _FOOT - height
        elements.append(
            f'<rect class="bar" x="{middle - wide / 2:.1f}" y="{top:.1f}" width="{wide:.1f}" '
            f'height="{height:.1f}" rx="2">'
            f"<title>{escape_text(f'{bar.label}: {bar.words}')}</title></rect>"
            f'<text class="below" x="{middle:.1f}" y="{_HEIGHT - _FOOT + 16}">{escape_text(bar.label)}</text>'
        )
    return _make_svg(name, title, bars, _HEIGHT, elements)


def shorten_label(label: str) -> str:
    """Shorten a label to its end, as the end of a path says more than its beginning."""
    if len(label) <= _LABEL_CHARACTERS:
        return label
    return f"…{label[1 - _LABEL_CHARACTERS :]}"


def escape_text(text: str) -> str:
    """Escape text for the page, with every character visible and none of them markup."""
    return escape(escape_unprintable(text))


def _bar_fraction(size: float, most: float) -> float:
    """Return the width share of a bar; any size above 0 stays visible."""
    return max(size / most, 0.004) if size > 0 else 0.0


def _make_svg(name: str, title: str, bars: Sequence[Bar], height: int, elements: list[str]) -> str:
    description = "; ".join(f"{bar.label}: {bar.words}" for bar in bars[:_MAX_DESCRIBED_BARS])
    more = f"; and {len(bars) - _MAX_DESCRIBED_BARS} more" if len(bars) > _MAX_DESCRIBED_BARS else ""
    return (
        f'<svg role="img" aria-labelledby="{name}-title {name}-words" viewBox="0 0 {_WIDTH} {max(height, 1)}">'
        f'<title id="{name}-title">{escape_text(title)}</title>'
        f'<desc id="{name}-words">{escape_text(description + more)}</desc>'
        f"{''.join(elements)}</svg>"
    )
