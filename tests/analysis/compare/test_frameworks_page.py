"""Check versions, test runs, install lines and examples of the pages in docs/how-to/frameworks."""

import re
from pathlib import Path

import pytest

from batchloom.adapters import requirements
from batchloom.adapters.requirements import Requirement
from batchloom.analysis.compare import FRAMEWORKS

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "docs/how-to/frameworks"
INDEX = (FOLDER / "index.md").read_text()
BEGIN, END = "<!-- versions: begin -->\n", "<!-- versions: end -->"
# Packages that an extra of an install line brings.
EXTRAS = {"train": {"torch"}, "hf": {"transformers", "datasets"}, "ray": {"ray", "pandas"}}


def read_pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.partition("==")[::2] for line in lines if "==" in line]
    return {name.lower(): version for name, version in pairs}


def make_version_table():
    """Return the table that belongs between the marks of the page."""
    all_requirements = [
        requirement for requirement in vars(requirements).values() if isinstance(requirement, Requirement)
    ]
    tested_versions = read_pins()
    rows = [
        f"| {requirement.package} | >= {requirement.least} | "
        f"{tested_versions.get(requirement.package, 'not installed')} |"
        for requirement in all_requirements
    ]
    return "\n".join(["| package | works with | tested |", "|---|---|---|", *rows, ""])


def read_framework_rows():
    """Return the cells of each framework's row."""
    return {name: cells.split("|") for name, cells in re.findall(r"^\| `([\w-]+)` \|(.*)\|$", INDEX, re.M)}


def test_the_version_table_matches_the_code_and_the_constraints():
    table = INDEX.partition(BEGIN)[2].partition(END)[0]
    assert table == make_version_table(), f"Put this between the marks:\n{make_version_table()}"


def test_every_framework_has_a_row_of_test_runs():
    rows = read_framework_rows()
    assert sorted(rows) == sorted(framework.name for framework in FRAMEWORKS)
    assert {len(cells) for cells in rows.values()} == {4}


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.name)
def test_the_page_of_a_framework_shows_its_example_and_installs_its_packages(framework):
    page_name = re.search(r"\]\(([\w-]+\.md)", read_framework_rows()[framework.name][0])[1]
    page = (FOLDER / page_name).read_text()
    example = f"../../../examples/{framework.module}.py"
    assert f":::{{literalinclude}} {example}\n" in page
    assert f"({example})" in page
    install_line = re.search(r"^pip install '?batchloom\[([\w,]+)\]'?(.*)$", page, re.M)
    installed = set(re.findall(r"[a-z][\w-]*", install_line[2]))
    installed = installed.union(*(EXTRAS[extra] for extra in install_line[1].split(",")))
    assert {requirement.package for requirement in framework.requirements} <= installed


def test_every_page_is_in_the_table_of_contents():
    listed = INDEX.partition(":hidden:\n\n")[2].partition(":::")[0].split()
    assert sorted(listed) == sorted(path.stem for path in FOLDER.glob("*.md") if path.stem != "index")


def test_examples_are_short():
    shared = {"__init__.py", "job.py"}
    long_examples = {
        path.name: count
        for path in (ROOT / "examples").glob("*.py")
        if path.name not in shared and (count := path.read_text().count("\n")) > 60
    }
    assert not long_examples
