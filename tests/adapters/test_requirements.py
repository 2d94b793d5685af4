"""A framework that is missing or too old is told before it fails, with the remedy."""

import pytest

from batchloom.adapters import requirements
from batchloom.adapters.requirements import Requirement, installed, problem_of, require
from batchloom.core.errors import MissingDependencyError

OWN = [one for one in vars(requirements).values() if isinstance(one, Requirement)]


@pytest.mark.parametrize("needed", OWN, ids=lambda one: one.package)
def test_what_is_installed_in_a_version_that_works_is_taken(needed):
    if installed(needed.package) is None:
        pytest.skip(f"{needed.package} is not installed")
    require(needed)


@pytest.mark.parametrize(
    ("needed", "said"),
    [
        (
            Requirement("no-such-framework", "2.0", "none"),
            "no-such-framework is needed and not installed",
        ),
        (
            Requirement("numpy", "99.0", "none"),
            f"numpy {installed('numpy')} is installed and >=99.0 is needed",
        ),
        (Requirement("numpy", "1.0", "none", below="1.2"), "is installed and >=1.0,<1.2 is needed"),
    ],
)
def test_what_cannot_be_used_is_named_with_the_version_that_can(needed, said):
    with pytest.raises(MissingDependencyError, match=said) as caught:
        require(needed)
    assert "pip install 'batchloom[none]'" in str(caught.value)


def test_all_problems_are_told_at_once():
    with pytest.raises(MissingDependencyError, match="one is needed.*two is needed"):
        require(Requirement("one", "1", "x"), Requirement("two", "1", "x"))


@pytest.mark.parametrize(
    ("version", "fits"), [("2.6.0+cpu", True), ("2.6rc1", True), ("2.5.9", False), ("3", True)]
)
def test_versions_are_compared_as_numbers(monkeypatch, version, fits):
    monkeypatch.setattr(requirements, "installed", lambda package: version)
    assert (problem_of(Requirement("torch", "2.6", "train")) is None) == fits


def test_extras_are_those_of_the_package():
    import tomllib
    from pathlib import Path

    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    for one in OWN:
        assert f"{one.package}>={one.least}" in extras[one.extra], one
