"""Metadata of the package: version, page on the index, extras."""

import json
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
import yaml

import batchloom

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
GROUPS = PROJECT["dependency-groups"]


@pytest.fixture(scope="module")
def metadata():
    """Metadata as the build backend writes them into sdist and wheel."""
    command = [sys.executable, "-m", "hatchling", "metadata"]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)


def get_names(requirements):
    return {
        re.split(r"[^\w.-]", requirement)[0].lower() for requirement in requirements if isinstance(requirement, str)
    }


def test_the_version_is_that_of_the_module(metadata):
    assert metadata["version"] == batchloom.__version__
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == batchloom.__version__


def test_the_changelog_describes_this_version_and_the_next():
    titles = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert titles[0] == "[Unreleased]"
    assert titles[1].startswith(f"[{batchloom.__version__}]")


def test_the_readme_renders_on_the_index(metadata):
    with warnings.catch_warnings():
        # readme_renderer warns of itself.
        warnings.simplefilter("ignore", DeprecationWarning)
        from readme_renderer import markdown
    readme = metadata["readme"]
    assert readme["content-type"] == "text/markdown"
    page = markdown.render(readme["text"])
    assert "<h1" in page
    assert "<table" in page


def test_the_page_on_installation_lists_the_extras():
    table = (ROOT / "docs/how-to/install.md").read_text().partition("| extra | adds |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.M) == list(EXTRAS)


def test_all_is_every_other_extra():
    assert EXTRAS["all"] == [f"batchloom[{','.join(name for name in EXTRAS if name != 'all')}]"]


def test_users_install_nothing_that_only_tests_need(metadata):
    for_users = [*metadata["dependencies"], *(item for items in EXTRAS.values() for item in items)]
    for group, items in GROUPS.items():
        assert get_names(items) & get_names(for_users) == set(), group
