"""Temporary store in memory for the duration of a training run."""

import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import batchloom
from batchloom.core.errors import InputError, InputMissingError
from batchloom.core.files import describe_missing_path, refuse_url
from batchloom.train.distributed import RankGroup
from batchloom.train.train_log import PrintLine

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of random name and mode 0700 is made in it
# Bytes of temporary and final token files per byte of text in the worst case (one id per byte).
_STORE_SIZE_FACTOR = 6
_COMPRESSION_FACTOR = 8
_COMPRESSED_SUFFIXES = (".gz", ".zst")
_MANIFEST_SUFFIXES = (".yaml", ".yml")


def describe_missing_input(inputs: Path) -> str:
    return describe_missing_path(str(inputs), "name a file or folder that exists")


@contextmanager
def prepare_temporary_store(
    inputs: Path,
    tokenizer: str | None,
    media: Mapping[str, str] | None,
    ranks: RankGroup,
    print_line: PrintLine,
    *,
    follow_links: bool = False,
) -> Iterator[Path]:
    """Prepare an input into a temporary store, once on each machine.

    The store is in memory if it fits, else in the folder for temporary files. It is removed at the end.

    Args:
        inputs: a file or folder, in the form prepare takes.
        tokenizer: tokenizer in the form prepare takes; None for its default.
        media: settings of images and audio in the form prepare takes; None for text only.
        ranks: rank group; the first rank of a machine prepares, the others wait.
        print_line: function that prints one line.
        follow_links: option of prepare.

    Raises:
        InputMissingError: ``inputs`` does not exist.
        InputError: it is a manifest, which also has training settings.
        BatchloomError: any error of prepare.
    """
    if not inputs.exists():
        refuse_url(inputs, "--input-file")
        raise InputMissingError(f"--input-file: {describe_missing_input(inputs)}")
    if inputs.suffix.lower() in _MANIFEST_SUFFIXES and inputs.is_file():
        raise InputError(f"--input-file: {inputs} is named like a manifest; give it as --dataset-config {inputs}")
    if ranks.local_rank:
        ranks.run_exclusively(None)
        yield Path(ranks.broadcast_local_path(""))
        return
    parent_folder = _SHARED_MEMORY if _fits_in_memory(inputs) else None
    with (
        _exit_on_sigterm(),
        tempfile.TemporaryDirectory(prefix="batchloom-", dir=parent_folder) as folder,
    ):
        # The log and the plots show the name of this folder as the name of the data.
        store = Path(folder) / (inputs.name.split(".")[0] or "input")
        if ranks.first:
            print_line(f"input  {inputs} is prepared in {store}, which is removed at the end")
        ranks.run_exclusively(
            lambda: batchloom.prepare(inputs, out=store, tokenizer=tokenizer, media=media, follow_links=follow_links)
        )
        yield Path(ranks.broadcast_local_path(str(store)))


def _fits_in_memory(inputs: Path) -> bool:
    """Return whether memory has room for twice the store and its temporary files."""
    if not _SHARED_MEMORY.is_dir():
        return False
    files = [f for f in inputs.rglob("*") if f.is_file()] if inputs.is_dir() else [inputs]
    needed = sum(
        file.stat().st_size * _STORE_SIZE_FACTOR * (_COMPRESSION_FACTOR if file.suffix in _COMPRESSED_SUFFIXES else 1)
        for file in files
    )
    return 2 * needed < shutil.disk_usage(_SHARED_MEMORY).free


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Run the clean-up on SIGTERM (from a scheduler or torchrun), as on Ctrl-C."""

    def end(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    previous_handler = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
