"""The reference of the command line, docs/reference/cli.md, whose tables docs/write_reference.py writes."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from batchloom.cli import run_command_line
from batchloom.core.errors import ExitCode

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/cli.md"


@pytest.fixture(scope="module")
def tokens():
    return MarkdownIt("commonmark").enable("table").parse(PAGE.read_text())


def list_rows(tokens):
    """Return the cells of each row of all tables, as Markdown."""
    rows = []
    for token, inline in pairwise(tokens):
        if token.type == "tr_open":
            rows.append([])
        if token.type in ("td_open", "th_open"):
            rows[-1].append(inline.content)
    return rows


def test_each_line_of_a_table_is_a_row_with_all_cells(tokens):
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|") and not line.startswith("|---")]
    rows = list_rows(tokens)
    assert len(rows) == len(lines)
    for line, cells in zip(lines, rows, strict=True):
        assert len(cells) == len(re.findall(r"(?<!\\)\|", line)) - 1
    # Comments mark the parts that derive from the code.
    assert all(token.content.startswith("<!--") for token in tokens if token.type == "html_block")
    assert not any(child.type == "html_inline" for token in tokens for child in token.children or ())


def test_each_option_of_the_help_is_on_the_page(capsys):
    assert run_command_line(["--help"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.partition("Commands:\n")[2].splitlines()]
    sections = dict(re.findall(r"^## batchloom (\w+)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S))
    assert list(sections) == names
    for name in names:
        assert run_command_line([name, "--help"]) == 0
        options = set(re.findall(r"^  (?:-\w, )?(--[a-z-]+)", capsys.readouterr().out, re.M)) - {"--help", "--quiet"}
        assert {option for option in options if f"`{option}`" not in sections[name]} == set()


def test_the_exit_codes_are_those_of_the_code(tokens):
    codes = {cells[0]: cells[1] for cells in list_rows(tokens) if cells[0].isdecimal()}
    assert codes == {str(int(code)): code.meaning for code in ExitCode}
