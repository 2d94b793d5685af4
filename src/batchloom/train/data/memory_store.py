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
from batchloom.core.files import describe_missing, refuse_url
from batchloom.train.distributed import Ranks
from batchloom.train.train_log import Say

_MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of random name and mode 0700 is made in it
# Bytes of temporary and final token files for a byte of text, in the worst case (one id a byte).
_ROOM = 6
_PACKED = 8
_PACKED_SUFFIXES = (".gz", ".zst")
_MANIFESTS = (".yaml", ".yml")


def missing_input(inputs: Path) -> str:
    """Return the sentence about an input that is not there."""
    return describe_missing(str(inputs), "name a file or folder that exists")


@contextmanager
def temporary_store(
    inputs: Path,
    tokenizer: str | None,
    media: Mapping[str, str] | None,
    ranks: Ranks,
    say: Say,
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
        say: prints one line.
        follow_links: as prepare takes it.

    Raises:
        InputMissingError: there is nothing at ``inputs``.
        InputError: it is a manifest, which also says how to train.
        BatchloomError: whatever prepare finds wrong.
    """
    if not inputs.exists():
        refuse_url(inputs, "--input-file")
        raise InputMissingError(f"--input-file: {missing_input(inputs)}")
    if inputs.suffix.lower() in _MANIFESTS and inputs.is_file():
        raise InputError(
            f"--input-file: {inputs} is a manifest by its name; give it as --dataset-config {inputs}"
        )
    if ranks.local_rank:
        ranks.patiently(None)
        yield Path(ranks.path_of_first_neighbour(""))
        return
    home = _MEMORY if _fits(inputs) else None
    with _ends_on_sigterm(), tempfile.TemporaryDirectory(prefix="batchloom-", dir=home) as folder:
        # The log and the curve name the data by this folder.
        store = Path(folder) / (inputs.name.split(".")[0] or "input")
        if ranks.first:
            say(f"input  {inputs} is prepared in {store}, which is removed at the end")
        ranks.patiently(
            lambda: batchloom.prepare(
                inputs, out=store, tokenizer=tokenizer, media=media, follow_links=follow_links
            )
        )
        yield Path(ranks.path_of_first_neighbour(str(store)))


def _fits(inputs: Path) -> bool:
    """Whether memory has room for the store and what making it takes, twice over."""
    if not _MEMORY.is_dir():
        return False
    files = [f for f in inputs.rglob("*") if f.is_file()] if inputs.is_dir() else [inputs]
    needed = sum(
        file.stat().st_size * _ROOM * (_PACKED if file.suffix in _PACKED_SUFFIXES else 1)
        for file in files
    )
    return 2 * needed < shutil.disk_usage(_MEMORY).free


@contextmanager
def _ends_on_sigterm() -> Iterator[None]:
    """Let a polite kill (a scheduler's, torchrun's) run the clean-up as Ctrl-C does."""

    def end(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
