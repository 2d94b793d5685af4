"""One page of the site for each public object, with its parameters written out.

The page of the Python interface lists the objects, and the directives with which Sphinx inserts their docstrings. When
Sphinx builds the site, each directive gets a page of its own, and the list links there.
"""

import re
import typing
from pathlib import Path
from typing import Any

from write_reference import SETTINGS_CLASSES, describe_field, list_fields

_BLOCK_PATTERN = re.compile(r"~~~\{eval-rst\}\n(.*?)~~~\n", re.DOTALL)
_DIRECTIVE_PATTERN = re.compile(r"^\.\. auto(\w+):: (\S+)\n((?:   .*\n)*)", re.MULTILINE)
_ROW_PATTERN = re.compile(r"^\| `([\w.]+)` \| `(\w+)` \|", re.MULTILINE)
# Classes whose settings functions take as keywords; their classes are declared in this order.
_KEYWORD_CLASSES = ("Recipe", "ReadRecipe", "ChatRecipe", "RunSettings", "ExecutionSettings")


def write_api_pages(docs: Path) -> None:
    """Write the page of each object of ``reference/python.md`` to ``reference/api``."""
    folder = docs / "reference/api"
    folder.mkdir(exist_ok=True)
    pages = {}
    for block in _BLOCK_PATTERN.findall((docs / "reference/python.md").read_text("utf-8")):
        for kind, name, options in _DIRECTIVE_PATTERN.findall(block):
            title = name.removeprefix("batchloom.") if name.count(".") > 1 else name
            pages[f"{name}.rst"] = f"{title}\n{'=' * len(title)}\n\n.. auto{kind}:: {name}\n{options}"
    for path in folder.glob("*.rst"):
        if path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        path = folder / name
        # Sphinx reads a page again if its time changed.
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")


def link_api_pages(_app: Any, page: str, source: list[str]) -> None:
    """Let the list of the Python interface link to the pages, instead of holding all docstrings."""
    if page != "reference/python":
        return

    def list_pages(block: re.Match[str]) -> str:
        names = [f"api/{name}" for _, name, _ in _DIRECTIVE_PATTERN.findall(block[1])]
        return ":::{toctree}\n:hidden:\n\n" + "\n".join(names) + "\n:::\n"

    linked = _ROW_PATTERN.sub(r"| `\1` | [`\2`](api/\1.\2.rst) |", source[0])
    source[0] = _BLOCK_PATTERN.sub(list_pages, linked)


def write_out_options(_app: Any, what: str, _name: str, documented: Any, _options: Any, lines: list[str]) -> None:
    """Replace the item ``**options`` of a docstring by the options that its type declares."""
    if what != "function":
        return
    declared = typing.get_type_hints(documented).get("options")
    start = next((number for number, line in enumerate(lines) if line.lstrip().startswith("**options:")), None)
    if declared is None or start is None:
        return
    fields = {
        field.name: describe_field(SETTINGS_CLASSES[name], field)
        for name in reversed(_KEYWORD_CLASSES)
        for field in list_fields(SETTINGS_CLASSES[name])
    }
    indent = lines[start][: -len(lines[start].lstrip())]
    items = []
    # The hint is Unpack[...].
    for option in typing.get_type_hints(*typing.get_args(declared)):
        if option in fields:
            _, _, kind, default, meaning = fields[option]
            sentence = f"{meaning} Default: {default}." if default else meaning
            items.append(f"{indent}{option} ({kind}): {_convert_code(sentence)}")
    lines[start:start] = items


def _convert_code(sentence: str) -> str:
    """Return a sentence of Markdown as reStructuredText: code, and text without markup."""
    parts = sentence.replace("\\|", "|").split("`")
    plain = [re.sub(r"([*\\_])", r"\\\1", part) for part in parts[::2]]
    code = [f"``{part}``" for part in parts[1::2]]
    return "".join(word for pair in zip(plain, [*code, ""], strict=True) for word in pair)
