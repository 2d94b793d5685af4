"""Run every code block of the README and the docs, in order, page by page."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import batchloom
import batchloom.compat
from batchloom.preparation import parse_clean_steps
from batchloom.text import find_clean_problems
from processes import run_module

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
# Languages that are not run: setup commands (CI runs them itself), layouts, data.
SHOWN = {"sh", "text", "json", "yaml", "mermaid"}


def blocks(page):
    return [(match[1], match[2]) for match in FENCE.finditer(page.read_text())]


def name_of(page):
    return str(page.relative_to(ROOT))


# Pages whose commands train models or compare frameworks, which takes over five seconds.
LONG_PAGES = {
    "docs/coming-from.md",
    "docs/compare.md",
    "docs/recipes.md",
    "docs/train.md",
    "docs/worker.md",
}
PAGES_WITH_CODE = [page for page in PAGES if {name for name, _ in blocks(page)} - SHOWN]


def test_every_block_says_what_it_is():
    for page in PAGES:
        for language, _ in blocks(page):
            assert language in {"python", "bash"} | SHOWN, f"{page.name}: block of {language!r}"


def test_steps_of_cleaning_are_written_as_recipes_read_them():
    shown = [text for page in PAGES for language, text in blocks(page) if language == "yaml"]
    steps = [found["clean"] for found in map(yaml.safe_load, shown) if "clean" in found]
    assert steps
    assert [find_clean_problems(parse_clean_steps(one)) for one in steps] == [[] for _ in steps]


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} -> {target}"


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/explanation/architecture.md"])
def test_files_of_the_source_that_a_page_names_are_there(page):
    named = re.findall(r"`(?:src/batchloom/)?([a-z_]+/[\w/]+(?:\.py|/))`", (ROOT / page).read_text())
    outside = ("docs/", "tests/", "bench/", "scripts/")
    inside = [path for path in named if not path.startswith(outside)]
    assert len(inside) >= 10
    assert [path for path in inside if not (ROOT / "src/batchloom" / path).exists()] == []


def test_every_page_is_named_in_the_readme_and_every_public_name_in_the_reference():
    readme, reference = (ROOT / "README.md").read_text(), (ROOT / "docs/reference.md").read_text()
    unnamed = [page.name for page in ROOT.glob("docs/*.md") if f"(docs/{page.name})" not in readme]
    assert unnamed == []
    names = {*batchloom.__all__, *batchloom.compat.__all__}
    assert {name for name in names if f"`{name}`" not in reference} == set()


def page_environment(cache):
    return {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(cache),
        "PYTHONWARNINGS": "default",
    }


def runnable(page):
    return [(language, text) for language, text in blocks(page) if language not in SHOWN]


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] if name_of(page) in LONG_PAGES else []) for page in PAGES_WITH_CODE],
    ids=name_of,
)
def test_blocks_run(page, tmp_path, monkeypatch):
    """Run all blocks of a page in one process with most modules imported already.

    They start in an empty folder: a page creates the files that it uses.
    """
    (tmp_path / "blocks.json").write_text(json.dumps(runnable(page)))
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    environment = page_environment(tmp_path / "cache")
    done = run_module("run_blocks", tmp_path / "blocks.json", env=environment)
    assert done.returncode == 0, f"{page.name}:\n{done.stdout}\n{done.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=name_of)
def test_blocks_run_as_typed(page, tmp_path):
    """Run each block in a separate process, shell commands in a shell."""
    environment = {**os.environ, **page_environment(tmp_path / "cache")}
    (tmp_path / "empty").mkdir()
    for language, text in runnable(page):
        command = [sys.executable, "-c", text] if language == "python" else ["bash", "-euo", "pipefail", "-c", text]
        done = subprocess.run(
            command,
            cwd=tmp_path / "empty",
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{page.name}:\n{text}\n{done.stdout}\n{done.stderr}"
