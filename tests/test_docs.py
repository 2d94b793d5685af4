"""Run every code block of the README and the docs, in order, page by page."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import batchloom
import batchloom.compat
from batchloom.preparation import make_request, parse_clean_steps
from batchloom.preparation.request import format_recipe
from batchloom.text import find_clean_problems
from processes import run_module

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
# Languages that are not run: setup commands (CI runs them itself), layouts, data.
LANGUAGES_NOT_RUN = {"sh", "text", "json", "yaml", "mermaid"}


def find_blocks(page):
    return [(match[1], match[2]) for match in FENCE.finditer(page.read_text())]


def get_page_name(page):
    return str(page.relative_to(ROOT))


# Pages whose commands train models or compare frameworks, which takes over five seconds.
LONG_PAGES = {
    "docs/how-to/coming-from/own-scripts.md",
    "docs/how-to/check/compare.md",
    "docs/how-to/prepare/recipes.md",
    "docs/how-to/train/trainer.md",
    "docs/how-to/train/elastic-workers.md",
}
PAGES_WITH_CODE = [page for page in PAGES if {name for name, _ in find_blocks(page)} - LANGUAGES_NOT_RUN]


def test_every_block_has_a_known_language():
    for page in PAGES:
        for language, _ in find_blocks(page):
            assert language in {"python", "bash"} | LANGUAGES_NOT_RUN, f"{page.name}: block of {language!r}"


def test_cleaning_steps_are_valid():
    yaml_blocks = [text for page in PAGES for language, text in find_blocks(page) if language == "yaml"]
    steps = [settings["clean"] for settings in map(yaml.safe_load, yaml_blocks) if "clean" in settings]
    assert steps
    assert [find_clean_problems(parse_clean_steps(clean_steps)) for clean_steps in steps] == [[] for _ in steps]


def test_linked_pages_exist():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} -> {target}"


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/explanation/architecture.md"])
def test_source_files_that_a_page_names_exist(page):
    named = re.findall(r"`(?:src/batchloom/)?([a-z_]+/[\w/]+(?:\.py|/))`", (ROOT / page).read_text())
    outside = ("docs/", "tests/", "bench/", "scripts/")
    inside = [path for path in named if not path.startswith(outside)]
    assert len(inside) >= 10
    assert [path for path in inside if not (ROOT / "src/batchloom" / path).exists()] == []


REFERENCE = runpy.run_path(str(ROOT / "docs/write_reference.py"))["PAGES"]


# python.md imports every framework.
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] if page == "python.md" else []) for page in REFERENCE]
)
def test_a_reference_page_is_that_of_the_declarations(page):
    if page == "python.md":
        for framework in ("transformers", "lightning", "megatron.core", "torchtitan", "deepspeed", "accelerate"):
            pytest.importorskip(framework)
    assert (ROOT / "docs/reference" / page).read_text() == REFERENCE[page]()


def test_the_schema_of_recipe_files_accepts_recipes_and_finds_mistakes(tmp_path):
    import jsonschema

    schema = json.loads((ROOT / "docs/reference/recipe.schema.json").read_text())
    (tmp_path / "a.txt").write_text("text")
    requests = [
        {"tokenizer": "bytes", "dedup": {"mode": "near", "similarity": 0.7}, "tokens_per_shard": "1M", "fim": 0.5},
        {"clean": ["control", {"length": {"most_words": 300}}], "max_bad": 7, "template": "chatml", "max_tokens": 100},
    ]
    for settings in requests:
        recipe = make_request([str(tmp_path / "a.txt")], settings, None).recipe
        jsonschema.validate(yaml.safe_load(format_recipe(recipe)), schema)
    for wrong in ({"tokeniser": "bytes"}, {"val_fraction": 2}, {"overlong": "cut"}, {"dedup": {"modes": "near"}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"inputs": ["a.txt"], **wrong}, schema)


def test_every_public_name_is_in_the_reference():
    reference = (ROOT / "docs/reference/python.md").read_text()
    names = {*batchloom.__all__, *batchloom.compat.__all__}
    assert {name for name in names if f"`{name}`" not in reference} == set()


def make_page_environment(cache):
    return {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(cache),
        "PYTHONWARNINGS": "default",
    }


def find_runnable_blocks(page):
    return [(language, text) for language, text in find_blocks(page) if language not in LANGUAGES_NOT_RUN]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if get_page_name(page) in LONG_PAGES else [])
        for page in PAGES_WITH_CODE
    ],
    ids=get_page_name,
)
def test_blocks_run(page, tmp_path, monkeypatch):
    """Run all blocks of a page in one process with most modules imported already.

    They start in an empty folder: a page creates the files that it uses.
    """
    (tmp_path / "blocks.json").write_text(json.dumps(find_runnable_blocks(page)))
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    environment = make_page_environment(tmp_path / "cache")
    result = run_module("run_blocks", tmp_path / "blocks.json", env=environment)
    assert result.returncode == 0, f"{page.name}:\n{result.stdout}\n{result.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=get_page_name)
def test_blocks_run_as_typed(page, tmp_path):
    """Run each block in a separate process, shell commands in a shell."""
    environment = {**os.environ, **make_page_environment(tmp_path / "cache")}
    (tmp_path / "empty").mkdir()
    for language, text in find_runnable_blocks(page):
        command = [sys.executable, "-c", text] if language == "python" else ["bash", "-euo", "pipefail", "-c", text]
        result = subprocess.run(
            command,
            cwd=tmp_path / "empty",
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert result.returncode == 0, f"{page.name}:\n{text}\n{result.stdout}\n{result.stderr}"
