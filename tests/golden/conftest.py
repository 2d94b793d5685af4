"""Fixtures of the golden tests: inputs and stores, built once per process."""

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import batchloom
from golden.inputs import fix_times, write_inputs
from golden.interface import Output, run_command
from golden.recipes import ALL_RECIPES, RECIPE_FILES

# Variables of launchers, which would change results.
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_RANK")


class Workspace:
    """A folder with all inputs, in which commands run and build stores."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._outputs: dict[str, Output] = {}

    @contextlib.contextmanager
    def enter(self) -> Iterator[Path]:
        """Change to the folder, so that all paths are relative."""
        with contextlib.chdir(self.root):
            yield self.root

    def run(self, words: str, code: int = 0) -> Output:
        """Run a command line in the folder; fail on another exit code."""
        with self.enter():
            output = run_command(shlex.split(words))
        assert output.code == code, f"batchloom {words}: exit code {output.code}\n{output.err}"
        return output

    def prepare(self, name: str) -> Path:
        """Build the store of a recipe once; return its path in the folder."""
        recipe, path = ALL_RECIPES[name], Path("stores") / name
        if recipe.missing:
            pytest.skip(f"{name} needs {', '.join(recipe.missing)}")
        if name not in self._outputs:
            # Versions without --balance-subsets chose the subsets by hash only.
            split = "" if name == "synthetic" else "--no-balance-subsets"
            words = f"prepare {recipe.words} {split} --out {path} --workers 1 --json"
            self._outputs[name] = self.run(words)
        return path

    def prepare_output(self, name: str) -> str:
        """Return the output of ``prepare --json`` for a recipe."""
        self.prepare(name)
        return self._outputs[name].out

    def open(self, name: str, split: str = "train") -> batchloom.Store:
        """Open the store of a recipe."""
        path = self.prepare(name)
        with self.enter():
            return batchloom.open_store(str(path), split)


@pytest.fixture(scope="session")
def golden_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with all inputs, written once per process."""
    root = tmp_path_factory.mktemp("golden")
    write_inputs(root)
    for name, text in RECIPE_FILES.items():
        (root / name).write_text(text, "utf-8")
    fix_times(root)
    return root


@pytest.fixture(autouse=True, scope="module")
def fixed_environment(golden_folder: Path) -> Iterator[None]:
    """Remove variables of launchers and users; restore them after each module."""
    with pytest.MonkeyPatch.context() as patch:
        for name in _LAUNCHER_VARIABLES:
            patch.delenv(name, raising=False)
        patch.setenv("XDG_CACHE_HOME", str(golden_folder / "cache"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(scope="session")
def workspace(golden_folder: Path) -> Workspace:
    """Return the workspace of the golden folder."""
    return Workspace(golden_folder)
