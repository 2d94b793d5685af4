"""Recipe files: output of ``--print-recipe``, and recipes of earlier versions."""

from pathlib import Path

import pytest

from golden.conftest import Workspace
from golden.expectations import Expectations
from golden.recipes import ALL_RECIPES, OLDER_FILES

EXPECTED = Expectations("recipes")
_FROM_STORES = ("text", "jsonl-mapped", "chat-last-turn", "cleaned-by-quality", "synthetic")


def print_recipe(workspace: Workspace, words: str) -> list[str]:
    """Return the lines of a recipe that a command line prints."""
    return workspace.run(f"prepare {words} --print-recipe").out.split("\n")


@pytest.mark.parametrize("name", ALL_RECIPES)
def test_a_printed_recipe(workspace: Workspace, name: str) -> None:
    if ALL_RECIPES[name].missing:
        pytest.skip(f"{name} needs {', '.join(ALL_RECIPES[name].missing)}")
    EXPECTED.check(name, print_recipe(workspace, ALL_RECIPES[name].words))


@pytest.mark.parametrize("name", ALL_RECIPES)
def test_a_recipe_file_of_the_past(workspace: Workspace, name: str) -> None:
    """A recipe that an earlier version printed is read as the same recipe."""
    if ALL_RECIPES[name].missing:
        pytest.skip(f"{name} needs {', '.join(ALL_RECIPES[name].missing)}")
    lines = EXPECTED.read(name)
    Path(workspace.root / "past.yaml").write_text("\n".join(lines), "utf-8")
    assert print_recipe(workspace, "--recipe past.yaml") == lines


@pytest.mark.parametrize("name", OLDER_FILES)
def test_a_short_recipe_file(workspace: Workspace, name: str) -> None:
    Path(workspace.root / name).write_text(OLDER_FILES[name], "utf-8")
    EXPECTED.check(name, print_recipe(workspace, f"--recipe {name}"))


def test_an_option_wins_over_a_recipe_file(workspace: Workspace) -> None:
    words = "notes.csv tasks.jsonl --recipe every_setting.yaml --dtype auto --clean none --max-tokens 9"
    EXPECTED.check("options over a file", print_recipe(workspace, words))


@pytest.mark.parametrize("name", _FROM_STORES)
def test_the_recipe_of_a_store(workspace: Workspace, name: str) -> None:
    words = f"--recipe {workspace.prepare(name)}"
    EXPECTED.check(f"from the store {name}", print_recipe(workspace, words))


def test_no_other_expectations(workspace: Workspace) -> None:
    stores = (f"from the store {name}" for name in _FROM_STORES)
    EXPECTED.check_sections([*ALL_RECIPES, *OLDER_FILES, "options over a file", *stores])
