"""A store that lives in memory for as long as it is trained on."""

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
# Bytes of temporary and final token files for a byte of text, in the worst case (one id a byte).
_STORE_SIZE_FACTOR = 6
_COMPRESSION_FACTOR = 8
_COMPRESSED_SUFFIXES = (".gz", ".zst")
_MANIFEST_SUFFIXES = (".yaml", ".yml")


def describe_missing_input(inputs: Path) -> str:
    """Return the sentence about an input that is not there."""
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
    """Prepare an input into a store that is removed at the end; once on each machine.

    It lies in memory where there is room, else in the folder for temporary files.

    Args:
        inputs: a file or folder, as prepare takes it.
        tokenizer: as prepare takes it; None for prepare's default.
        media: the settings of images and audio, as prepare takes them; None where none are read.
        ranks: the first rank of a machine prepares, its neighbours wait.
        print_line: prints one line.
        follow_links: as prepare takes it.

    Raises:
        InputMissingError: there is nothing at ``inputs``.
        InputError: it is a manifest, which also says how to train.
        BatchloomError: whatever prepare finds wrong.
    """
    if not inputs.exists():
        refuse_url(inputs, "--input-file")
        raise InputMissingError(f"--input-file: {describe_missing_input(inputs)}")
    if inputs.suffix.lower() in _MANIFEST_SUFFIXES and inputs.is_file():
        raise InputError(f"--input-file: {inputs} is a manifest by its name; give it as --dataset-config {inputs}")
    if ranks.local_rank:
        ranks.run_exclusively(None)
        yield Path(ranks.broadcast_local_path(""))
        return
    parent_folder = _SHARED_MEMORY if _fits_in_memory(inputs) else None
    with (
        _exit_on_sigterm(),
        tempfile.TemporaryDirectory(prefix="batchloom-", dir=parent_folder) as folder,
    ):
        # The log and the curve name the data by this folder.
        store = Path(folder) / (inputs.name.split(".")[0] or "input")
        if ranks.first:
            print_line(f"input  {inputs} is prepared in {store}, which is removed at the end")
        ranks.run_exclusively(
            lambda: batchloom.prepare(inputs, out=store, tokenizer=tokenizer, media=media, follow_links=follow_links)
        )
        yield Path(ranks.broadcast_local_path(str(store)))


def _fits_in_memory(inputs: Path) -> bool:
    """Whether memory has room for the store and what making it takes, twice over."""
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
    """Let a polite kill (a scheduler's, torchrun's) run the clean-up as Ctrl-C does."""

    def end(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    previous_handler = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
