"""Run every code block of the README and the docs, in order, page by page."""

import json
import os
import re
import runpy
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml

import batchloom
import batchloom.compat
from batchloom.preparation import make_request
from batchloom.preparation.request import format_recipe
from processes import run_module
from run_blocks import check_shown_output

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
# Languages that are not run: setup commands (CI runs them itself), layouts, data.
LANGUAGES_NOT_RUN = {"sh", "text", "json", "yaml"}


def find_blocks(page):
    return [(match[1], match[2]) for match in FENCE.finditer(page.read_text())]


def find_runnable_blocks(page):
    """Return language, text and shown output of the blocks to run.

    The output is that of a ``text`` block that follows directly, on pages that promise real output, else None.
    """
    blocks, text = [], page.read_text()
    matches = list(FENCE.finditer(text))
    for match, following in zip(matches, [*matches[1:], None], strict=True):
        is_output = following and following[1] == "text" and not text[match.end() : following.start()].strip()
        if match[1] not in LANGUAGES_NOT_RUN:
            blocks.append((match[1], match[2], following[2] if is_output and shows_real_output(page) else None))
    return blocks


def shows_real_output(page):
    return page.name == "README.md" or page.parent.name == "tutorials"


def get_page_name(page):
    return str(page.relative_to(ROOT))


# What a newcomer reads first. The slow tier runs every page.
FIRST_PAGES = {
    "README.md",
    "docs/how-to/prepare/prepare.md",
    "docs/how-to/train/loader.md",
}
# Pages that docs/write_reference.py or a test derives: their length is that of the code.
GENERATED_PAGES = {
    f"docs/reference/{name}.md"
    for name in [
        "settings",
        "cleaning-steps",
        "cli",
        "python",
        "batch-keys",
        "metrics",
        "errors",
        "schemas",
        "chat-templates",
    ]
}
# Normative: complete, whatever their length.
SPECIFICATIONS = {"docs/reference/format.md", "docs/reference/order.md"}
HAND_WRITTEN_PAGES = [page for page in PAGES if get_page_name(page) not in GENERATED_PAGES]
PAGES_WITH_CODE = [page for page in PAGES if {name for name, _ in find_blocks(page)} - LANGUAGES_NOT_RUN]


def test_every_block_has_a_known_language():
    for page in PAGES:
        for language, _ in find_blocks(page):
            assert language in {"python", "bash"} | LANGUAGES_NOT_RUN, f"{page.name}: block of {language!r}"


def test_linked_pages_exist():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} -> {target}"


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/explanation/architecture.md"])
def test_source_files_that_a_page_names_exist(page):
    named = re.findall(r"`((?:src/batchloom/)?[a-z_]+/(?:[\w/-]+(?:\.py|/))?)`", (ROOT / page).read_text())
    assert len(named) >= 10
    folders = (ROOT, ROOT / "src/batchloom")
    assert [path for path in named if not any((folder / path).exists() for folder in folders)] == []


def count_words(page):
    return len(page.read_text().split())


@pytest.mark.parametrize(("page", "most_words"), [("README.md", 700), ("CONTRIBUTING.md", 800)])
def test_first_pages_are_short(page, most_words):
    assert count_words(ROOT / page) <= most_words


def test_no_page_has_more_than_1200_words():
    pages = [page for page in HAND_WRITTEN_PAGES if get_page_name(page) not in SPECIFICATIONS]
    assert {get_page_name(page): count_words(page) for page in pages if count_words(page) > 1200} == {}


def test_hand_written_pages_have_at_most_40000_words():
    pages = [page for page in HAND_WRITTEN_PAGES if page.parent.name != "decisions"]
    assert sum(map(count_words, pages)) <= 40_000


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path):
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "-q", "-b", "html"]
    result = subprocess.run([*command, ROOT / "docs", tmp_path], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


WRITER = runpy.run_path(str(ROOT / "docs/write_reference.py"))
REFERENCE = WRITER["PAGES"]


def test_each_part_that_the_code_declares_is_on_a_page():
    pages = "".join((ROOT / "docs/reference" / name).read_text() for name in REFERENCE)
    assert set(re.findall(r"<!-- begin ([\w-]+)", pages)) == WRITER["PARTS"].keys()
    classes = re.findall(r"<!-- begin settings (.*?) -->", pages)
    assert {name for names in classes for name in names.split()} == WRITER["SETTINGS_CLASSES"].keys()


# python.md imports every framework.
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] if page == "python.md" else []) for page in REFERENCE]
)
def test_a_reference_page_is_that_of_the_declarations(page):
    if page == "python.md":
        for framework in ("transformers", "lightning", "megatron.core", "torchtitan", "deepspeed", "accelerate"):
            pytest.importorskip(framework)
    assert (ROOT / "docs/reference" / page).read_text() == REFERENCE[page]()


def test_keyword_arguments_are_those_of_the_declarations():
    for path, make_module in WRITER["KEYWORD_MODULES"].items():
        assert path.read_text() == make_module()


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


def test_recipe_files_take_the_keys_on_the_page_of_settings():
    import jsonschema

    schema = json.loads((ROOT / "docs/reference/recipe.schema.json").read_text())
    sections = (ROOT / "docs/reference/settings.md").read_text().split("\n## ")
    rows = "".join(section for section in sections if "recipe files\n" in section)
    keys = re.findall(r"^\| `([\w.]+)`", rows, re.M)
    recipe = {group: {} for group, dot, _ in (key.partition(".") for key in keys) if dot}
    for key in keys:
        group, _, name = key.rpartition(".")
        (recipe[group] if group else recipe).setdefault(name)
    assert {*recipe, "inputs"} == set(schema["properties"])
    jsonschema.validate(recipe, schema)


def test_every_public_name_is_in_the_reference():
    reference = (ROOT / "docs/reference/python.md").read_text()
    names = {*batchloom.__all__, *batchloom.compat.__all__}
    assert {name for name in names if f"`{name}`" not in reference} == set()


# Pages that list the public names, and those that specify internals.
PAGES_WITH_OTHER_NAMES = {f"docs/reference/{name}.md" for name in ("python", "errors", "order", "seeded-choices")}


def find_names_of_batchloom(page):
    """Return module and name of each import in the blocks of a page, and of each dotted name in its sentences."""
    text = page.read_text()
    imports = re.findall(r"^ *from (batchloom[\w.]*) import (\([^)]+\)|.+)$", text, re.M)
    named = [(module, name) for module, names in imports for name in re.findall(r"\w+", names)]
    return [*named, *re.findall(r"`(batchloom(?:\.\w+)*)\.([a-zA-Z]\w*)", text)]


def test_every_name_on_a_page_is_in_the_reference():
    reference = (ROOT / "docs/reference/python.md").read_text()
    public = set(re.findall(r"^\| `(batchloom[\w.]*)` \| `(\w+)` \|", reference, re.M))
    public |= {("batchloom", name) for name in batchloom.__all__} | {tuple(name.rsplit(".", 1)) for name, _ in public}
    pages = [page for page in PAGES if page.parent.name != "decisions"]
    names = {
        (get_page_name(page), *name)
        for page in pages
        if get_page_name(page) not in PAGES_WITH_OTHER_NAMES
        for name in find_names_of_batchloom(page)
    }
    assert len(names) >= 50
    assert {name for name in names if name[1:] not in public} == set()


@pytest.mark.parametrize(
    ("shown", "output", "matches"),
    [
        ("a 1\n", "a  1\n\n", True),
        ("...\na\n", "a", True),
        ("step ... loss 6.0...", "step 1/2\nloss 6.0084", True),
        ("a b", "a\ntokenizing: 25%, 1.0 kB of 4.0 kB, 3 documents\nb", True),
        ("a ... c", "a b", False),
        ("a", "a b", False),
        ("a.c", "abc", False),
    ],
)
def test_shown_output_is_compared_with_the_real_one(shown, output, matches):
    with nullcontext() if matches else pytest.raises(AssertionError, match="The page shows"):
        check_shown_output(shown, output)


def make_page_environment(cache):
    return {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(cache),
        "PYTHONWARNINGS": "default",
    }


@pytest.mark.parametrize("name", sorted(FIRST_PAGES))
def test_blocks_run(name, tmp_path, monkeypatch):
    """Run all blocks of a page in one process with most modules imported already; compare the output that it shows.

    They start in an empty folder: a page creates the files that it uses.
    """
    (tmp_path / "blocks.json").write_text(json.dumps(find_runnable_blocks(ROOT / name)))
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    environment = make_page_environment(tmp_path / "cache")
    result = run_module("run_blocks", tmp_path / "blocks.json", env=environment)
    assert result.returncode == 0, f"{name}:\n{result.stdout}\n{result.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=get_page_name)
def test_blocks_run_as_typed(page, tmp_path):
    """Run each block in a separate process, shell commands in a shell."""
    environment = {**os.environ, **make_page_environment(tmp_path / "cache")}
    (tmp_path / "empty").mkdir()
    for language, text, shown in find_runnable_blocks(page):
        command = [sys.executable, "-c", text] if language == "python" else ["bash", "-euo", "pipefail", "-c", text]
        result = subprocess.run(
            command,
            cwd=tmp_path / "empty",
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        assert result.returncode == 0, f"{page.name}:\n{text}\n{result.stdout}"
        if shown is not None:
            check_shown_output(shown, result.stdout)
