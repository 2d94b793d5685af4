"""Check versions, tested versions and test runs in docs/frameworks.md."""

import re
from pathlib import Path

from batchloom.adapters import requirements
from batchloom.adapters.requirements import Requirement
from batchloom.analysis.compare import FRAMEWORKS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "frameworks.md").read_text()
BEGIN, END = "<!-- versions: begin -->\n", "<!-- versions: end -->"


def read_pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.partition("==")[::2] for line in lines if "==" in line]
    return {name.lower(): version for name, version in pairs}


def _get_install_target(requirement):
    bound = f">={requirement.least}" + (f",<{requirement.below}" if requirement.below else "")
    return f"batchloom[{requirement.extra}]" if requirement.extra else f"{requirement.package}{bound}"


def make_version_table():
    """Return the table that belongs between the marks of the page."""
    all_requirements = [
        requirement for requirement in vars(requirements).values() if isinstance(requirement, Requirement)
    ]
    tested_versions = read_pins()
    rows = [
        f"| {requirement.package} | >= {requirement.least}{f', < {requirement.below}' if requirement.below else ''} | "
        f"{tested_versions.get(requirement.package, 'not installed')} | `{_get_install_target(requirement)}` |"
        for requirement in all_requirements
    ]
    return "\n".join(
        [
            "| package | works with | in `make test` and CI | installed by |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def test_the_version_table_matches_the_code_and_the_constraints():
    table = PAGE.partition(BEGIN)[2].partition(END)[0]
    assert table == make_version_table(), f"Put this between the marks:\n{make_version_table()}"


def test_every_framework_has_a_row_of_test_runs():
    rows = re.findall(r"^\| `([\w-]+)` \|(.*)\|$", PAGE, re.M)
    assert sorted(name for name, _ in rows) == sorted(framework.name for framework in FRAMEWORKS)
    for framework in FRAMEWORKS:
        cells = dict(rows)[framework.name]
        assert f"(../examples/{framework.module}.py)" in cells
        assert len(cells.split("|")) == 5


def test_examples_are_short():
    shared = {"__init__.py", "job.py"}
    long_examples = {
        path.name: count
        for path in (ROOT / "examples").glob("*.py")
        if path.name not in shared and (count := path.read_text().count("\n")) > 60
    }
    assert not long_examples
