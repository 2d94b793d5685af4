"""Native libraries: where one cannot be used, numpy and Python take over with one line of log."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import batchloom
from batchloom.batches.assembly import find_kernel
from batchloom.core.native import SOURCES, compile_library, find_compiler, get_library_path
from batchloom.store.format import find_mapped_files_library
from batchloom.testing import write_store
from batchloom.text.words import count_words, find_word_kernel

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C compiler")


def fill_batch(folder):
    store = write_store(folder / "s", [[1, 2, 3]] * 20)
    loader = batchloom.Loader(store, seq_len=32, global_batch_size=4, output="numpy", rank=0, world_size=1, prefetch=0)
    assert next(iter(loader))["input_ids"][0, :3].tolist() == [1, 2, 3]


def split_text(_folder):
    assert count_words("Hello, world!") == (4, 2, 2, 10)


USERS = {
    "kernel": ("batchloom.batches.assembly.array_filling.KERNEL_SOURCE", find_kernel, fill_batch),
    "mapped_files": (
        "batchloom.store.format.megatron_index.MAPPED_FILES_SOURCE",
        find_mapped_files_library,
        fill_batch,
    ),
    "words": ("batchloom.text.words.WORDS_SOURCE", find_word_kernel, split_text),
}


@pytest.fixture(params=SOURCES, ids=lambda source: source.stem)
def installation(request, tmp_path, monkeypatch):
    """A source whose library is searched in a folder of its own, and its user."""
    name, find, use = USERS[request.param.stem]
    source = tmp_path / request.param.name
    source.write_bytes(request.param.read_bytes())
    monkeypatch.setattr(name, source)
    find.cache_clear()
    yield source, find, use
    find.cache_clear()


@needs_compiler
def test_a_compiled_library_is_used(installation, caplog):
    source, find, use = installation
    compile_library(source, source.parent)
    with caplog.at_level(logging.INFO, "batchloom"):
        assert find() is not None
        use(source.parent)
    assert caplog.records == []


@needs_compiler
@pytest.mark.parametrize("library", ["damaged", "other version", "other library"])
def test_an_unusable_library_is_named_once_and_not_used(installation, caplog, library):
    source, find, use = installation
    path = get_library_path(source, source.parent)
    if library == "damaged":
        path.write_bytes(Path(sys.executable).read_bytes()[:100])
    else:
        version = "long batchloom_kernel_version(void) { return 1; }" if library == "other version" else ""
        other = source.parent / "other.c"
        other.write_text(f"{version} long batchloom_other(void) {{ return 0; }}")
        subprocess.run([*find_compiler(), "-shared", "-fPIC", "-o", path, other], check=True)
    with caplog.at_level(logging.INFO, "batchloom"):
        use(source.parent)
        assert find() is None
    (line,) = [record for record in caplog.records if "cannot be used" in record.getMessage()]
    assert line.levelno == logging.WARNING
    assert ("was built from another version" if library == "other version" else path.name) in line.getMessage()


def test_a_missing_library_is_named_once(installation, caplog):
    source, find, use = installation
    with caplog.at_level(logging.INFO, "batchloom"):
        use(source.parent)
        assert find() is None
    assert [record.levelname for record in caplog.records if "is missing" in record.getMessage()] == ["INFO"]


def test_without_a_working_compiler_nothing_is_built(tmp_path, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OSError, match="no C compiler"):
        compile_library(SOURCES[0], tmp_path)
    monkeypatch.setenv("CC", "/bin/sh -c false")
    with pytest.raises(OSError, match="/bin/sh failed"):
        compile_library(SOURCES[0], tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_command_names_what_it_lacks(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "CC"} | {"PATH": str(tmp_path)}
    command = [sys.executable, "-m", "batchloom.core.native"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (
        1,
        "The native libraries are not built: there is no C compiler (cc, gcc, clang or $CC)\n",
    )


def test_a_universal_python_gets_both_architectures(tmp_path, monkeypatch):
    compiler = tmp_path / "compiler"
    new_library = get_library_path(SOURCES[0], tmp_path).with_suffix(".$PPID")
    compiler.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words\ntouch {new_library}\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    for platform, expected in (("macosx-10.13-universal2", True), ("macosx-11.0-arm64", False)):
        monkeypatch.setattr("sysconfig.get_platform", lambda platform=platform: platform)
        compile_library(SOURCES[0], tmp_path)
        assert ("-arch arm64 -arch x86_64" in (tmp_path / "words").read_text()) == expected


TRUNCATE_WHILE_MAPPED = """
import faulthandler, os, sys
import batchloom
if "faulthandler" in sys.argv:
    faulthandler.enable()
store = batchloom.open_store("s")
store[0]
os.truncate("s/train/shard_00000.bin", 10)
store[99].ids.sum()
"""


@needs_compiler
@pytest.mark.parametrize("handler", ["none", "faulthandler"])
def test_a_file_that_becomes_shorter_while_it_is_mapped_is_named(tmp_path, handler):
    write_store(tmp_path / "s", [[1] * 4000] * 100)
    command = [sys.executable, "-c", TRUNCATE_WHILE_MAPPED, handler]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == -signal.SIGBUS
    assert "s/train/shard_00000.bin became shorter while it was read" in result.stderr
    # The handler of somebody else does its work as before.
    assert ("Fatal Python error: Bus error" in result.stderr) == (handler == "faulthandler")


IN_A_WORKER = """
import os
import batchloom
from torch.utils.data import DataLoader
from batchloom.adapters.pytorch import LoaderIterable
loader = batchloom.Loader(batchloom.open_store("s"), seq_len=4000, global_batch_size=1, rank=0, world_size=1)
batches = iter(DataLoader(LoaderIterable(loader), batch_size=None, num_workers=1, prefetch_factor=1))
next(batches)
os.truncate("s/train/shard_00000.bin", 10)
list(batches)
"""


@needs_compiler
def test_a_worker_of_a_dataloader_names_the_file_too(tmp_path):
    pytest.importorskip("torch")
    write_store(tmp_path / "s", [[1] * 4000] * 100)
    command = [sys.executable, "-c", IN_A_WORKER]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "s/train/shard_00000.bin became shorter while it was read" in result.stderr


@needs_compiler
def test_a_signal_of_another_process_is_not_swallowed():
    code = (
        "import os, signal; from batchloom.store.format import install_short_file_handler as install;"
        "assert install() is not None; install(); os.kill(os.getpid(), signal.SIGBUS)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == -signal.SIGBUS
