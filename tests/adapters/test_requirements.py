"""Missing or outdated frameworks are reported with the remedy."""

import os
import re
import subprocess
import sys
import tomllib
from operator import attrgetter
from pathlib import Path

import pytest

from batchloom.adapters import requirements
from batchloom.adapters.requirements import (
    Requirement,
    find_requirement_problem,
    get_installed_version,
    require_installed,
)
from batchloom.core.errors import MissingDependencyError

REQUIREMENTS = [value for value in vars(requirements).values() if isinstance(value, Requirement)]


@pytest.mark.parametrize("needed", REQUIREMENTS, ids=lambda requirement: requirement.package)
def test_what_is_installed_in_a_version_that_works_is_taken(needed):
    if get_installed_version(needed.package) is None:
        pytest.skip(f"{needed.package} is not installed")
    require_installed(needed)


@pytest.mark.parametrize(
    ("needed", "message"),
    [
        (
            Requirement("no-such-framework", "2.0", "none"),
            "no-such-framework is needed and not installed",
        ),
        (
            Requirement("numpy", "99.0", "none"),
            f"numpy {get_installed_version('numpy')} is installed and >=99.0 is needed",
        ),
    ],
)
def test_what_cannot_be_used_is_named_with_the_version_that_can(needed, message):
    with pytest.raises(MissingDependencyError, match=message) as caught:
        require_installed(needed)
    assert "pip install 'batchloom[none]'" in str(caught.value)


def test_a_framework_is_installed_by_itself():
    with pytest.raises(MissingDependencyError, match=r"pip install 'no-such-framework>=2.0'\."):
        require_installed(Requirement("no-such-framework", "2.0"))


def test_all_problems_are_reported_at_once():
    with pytest.raises(MissingDependencyError, match="one is needed.*two is needed"):
        require_installed(Requirement("one", "1", "x"), Requirement("two", "1", "x"))


@pytest.mark.parametrize(("version", "fits"), [("2.6.0+cpu", True), ("2.6rc1", True), ("2.5.9", False), ("3", True)])
def test_versions_are_compared_as_numbers(monkeypatch, version, fits):
    monkeypatch.setattr(requirements, "get_installed_version", lambda package: version)
    assert (find_requirement_problem(Requirement("torch", "2.6", "train")) is None) == fits


def test_extras_are_those_of_the_package():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    for requirement in filter(attrgetter("extra"), REQUIREMENTS):
        assert f"{requirement.package}>={requirement.least}" in extras[requirement.extra], requirement


NEEDS = {
    "accelerate": "torch",
    "agreement": "torch",
    "deepspeed": "torch",
    "fsdp2.fsdp2_state": "torch",
    "fsdp2.fsdp2_trainer": "torch",
    "hugging_face.trainer_objects": "transformers",
    "lightning": "lightning",
    "megatron": "megatron-core",
    "pytorch": "torch",
    "ray_train": "torch",
    "torchtitan": "torchtitan",
}
# Run in a separate process that lacks a package or has an old version of it.
SCRIPT = """
import importlib, importlib.metadata, sys

package, installed = sys.argv[1:3]
original_version = importlib.metadata.version

def version(name):
    if name != package:
        return original_version(name)
    if installed == "none":
        raise importlib.metadata.PackageNotFoundError(name)
    return installed

class MissingPackageFinder:
    def find_spec(self, name, path=None, target=None):
        if installed == "none" and name.split(".")[0] == package.split("-")[0]:
            raise ModuleNotFoundError(name)

importlib.metadata.version = version
sys.meta_path.insert(0, MissingPackageFinder())
from batchloom.core.errors import MissingDependencyError
for module in sys.argv[3:]:
    try:
        importlib.import_module(f"batchloom.adapters.{module}")
    except MissingDependencyError as error:
        print(error)
"""


@pytest.mark.parametrize("package", sorted({"torch", *NEEDS.values()}))
@pytest.mark.parametrize(("installed", "message"), [("none", "not installed"), ("0.1", "0.1 is installed")])
def test_an_adapter_names_what_is_missing_or_old_before_anything_else(package, installed, message):
    modules = [name for name, needed in NEEDS.items() if package in ("torch", needed)]
    command = [sys.executable, "-c", SCRIPT, package, installed, *modules]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert result.returncode == 0, result.stderr[-2000:]
    lines = result.stdout.splitlines()
    assert len(lines) == len(modules)
    for line in lines:
        assert re.search(f"{package}.* {message}.*pip install", line)
