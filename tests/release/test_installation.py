"""Installation from the built package, without the source tree."""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from batchloom.core.native import SOURCES, find_compiler, get_library_path

pytestmark = [
    pytest.mark.slow,
    # Installing torch takes minutes on a busy machine.
    pytest.mark.timeout(1800),
    pytest.mark.skipif(find_compiler() is None, reason="no C compiler"),
]

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
LIBRARIES = {str(get_library_path(path, path.parent).relative_to(ROOT / "src")) for path in SOURCES}
LICENSES = {"LICENSE", "english.LICENSE", "gpt2_vocab.LICENSE", "htmx.LICENSE"}
LIBRARY_SCRIPT = """
from batchloom.core.native import SOURCES, find_library
assert all(find_library(source, "slow") for source in SOURCES)
"""


def make_environment(**extra):
    """Return the environment without the source tree and the outer virtual environment."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")
    return {name: value for name, value in os.environ.items() if name not in hidden} | extra


def run(*command, cwd, **extra):
    completed = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=make_environment(**extra), capture_output=True, text=True
    )
    assert completed.returncode == 0, f"{command}: {completed.stdout[-2000:]}\n{completed.stderr[-4000:]}"
    return completed.stdout


def build(source, out, *options, **extra):
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, *options, source, cwd=out, **extra)


def get_names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """Folder with the sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(dist):
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def scripts(wheel, tmp_path_factory):
    """Folder with the commands of a new virtual environment that has the wheel and its dependencies."""
    folder = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", folder, cwd=folder)
    run(folder / "bin/python", "-m", "pip", "install", "--quiet", "-c", CONSTRAINTS, wheel, cwd=folder)
    return folder / "bin"


def test_the_wheel_holds_the_package_alone(wheel):
    names = get_names(wheel)
    metadata = wheel.name.partition("-py3")[0] + ".dist-info"
    assert {name.split("/")[0] for name in names} == {"batchloom", metadata}
    tracked = run("git", "ls-files", "src/batchloom", cwd=ROOT).split()
    package = {name for name in names if not name.startswith(metadata)}
    assert package == {path.removeprefix("src/") for path in tracked} | LIBRARIES
    assert {Path(name).name for name in names if ".dist-info/licenses/" in name} == LICENSES


def test_the_tag_is_that_of_the_libraries(wheel):
    python, abi, platform = wheel.stem.split("-")[-3:]
    assert (python, abi) == ("py3", "none")
    assert platform.startswith(("linux_", "macosx_"))


def test_the_index_takes_both_files(dist):
    run(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir(), cwd=dist)


def test_a_wheel_without_a_compiler_is_pure(dist, tmp_path):
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    out = tmp_path / "out"
    out.mkdir()
    build(source, out, "--wheel", CC="false")
    (wheel,) = out.iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in get_names(wheel) if name.endswith(".so")]


def test_the_installed_package_prepares_checks_and_inspects(scripts, tmp_path):
    rows = [{"text": f"Document {number} counts to {number + 1}."} for number in range(500)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    batchloom = scripts / "batchloom"
    location = run(scripts / "python", "-c", "import batchloom; print(batchloom.__file__)", cwd=tmp_path).strip()
    assert Path(location).is_relative_to(scripts.parent)
    run(scripts / "python", "-c", LIBRARY_SCRIPT, cwd=tmp_path)
    # The default tokenizer is part of the package.
    run(batchloom, "prepare", "in.jsonl", "--out", "store", cwd=tmp_path)
    run(batchloom, "check", "store", cwd=tmp_path)
    assert "documents" in run(batchloom, "inspect", "store", "--seq-len", "64", cwd=tmp_path)
    run(batchloom, "doctor", "in.jsonl", cwd=tmp_path)


def test_the_demo_runs_with_the_extra_train(scripts, wheel, tmp_path):
    run(scripts / "python", "-m", "pip", "install", "--quiet", "-c", CONSTRAINTS, f"{wheel}[train]", cwd=tmp_path)
    # Enough steps to get below the unigram entropy, which the demo requires.
    run(scripts / "batchloom", "demo", "--out", "demo", "--steps", "40", cwd=tmp_path)
    assert (tmp_path / "demo" / "run" / "loss.png").is_file()
