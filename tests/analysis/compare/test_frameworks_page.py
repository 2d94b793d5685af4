"""docs/frameworks.md says of every framework which versions work, which were tried, and what was run where."""

import re
from pathlib import Path

from batchloom.adapters import requirements
from batchloom.adapters.requirements import Requirement
from batchloom.analysis.compare import FRAMEWORKS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "frameworks.md").read_text()
BEGIN, END = "<!-- versions: begin -->\n", "<!-- versions: end -->"


def pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [line.partition("==")[::2] for line in lines if "==" in line]
    return {name.lower(): version for name, version in found}


def versions_table():
    """What the page has to have between its marks."""
    known = [one for one in vars(requirements).values() if isinstance(one, Requirement)]
    tried = pins()
    rows = [
        f"| {one.package} | >= {one.least}{f', < {one.below}' if one.below else ''} | "
        f"{tried.get(one.package, 'not installed')} | `batchloom[{one.extra}]` |"
        for one in known
    ]
    return "\n".join(
        [
            "| package | works with | in `make test` and CI | installed by |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def test_the_table_of_versions_is_what_the_code_and_the_constraints_say():
    shown = PAGE.partition(BEGIN)[2].partition(END)[0]
    assert shown == versions_table(), f"Put this between the marks:\n{versions_table()}"


def test_every_framework_says_what_was_run_where():
    rows = re.findall(r"^\| `([\w-]+)` \|(.*)\|$", PAGE, re.M)
    assert sorted(name for name, _ in rows) == sorted(one.name for one in FRAMEWORKS)
    for one in FRAMEWORKS:
        cells = dict(rows)[one.name]
        assert f"(../examples/{one.module}.py)" in cells
        assert len(cells.split("|")) == 5


def test_examples_are_as_short_as_they_are_said_to_be():
    shared = {"__init__.py", "job.py"}
    long = {
        path.name: lines
        for path in (ROOT / "examples").glob("*.py")
        if path.name not in shared and (lines := path.read_text().count("\n")) > 60
    }
    assert not long
