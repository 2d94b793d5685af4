"""Synthetic data as a requested replacement for missing data."""

import logging
from pathlib import Path

from batchloom import open_store
from batchloom.core.addresses import is_url
from batchloom.core.errors import StoreMissingError, TrainError
from batchloom.core.synthetic_data import DISTRIBUTED_DUMMY, SyntheticSpec
from batchloom.train.data.memory_store import describe_missing_input
from batchloom.train.distributed import RankGroup
from batchloom.train.model.pretrained import read_model_config
from batchloom.train.train_settings import PretrainedSettings, TrainSettings

_LOG = logging.getLogger("batchloom")


def choose_synthetic_data(
    data: Path | str | None, input_file: Path | None, settings: TrainSettings, ranks: RankGroup
) -> Path | None:
    """Return the spec of synthetic data that replaces missing data, or None.

    Data that exists but is unusable is not replaced, because opening it reports the reason.

    Args:
        data: folder of a store, or a prefix.
        input_file: a file or folder; either this or ``data`` is given.
        settings: settings of the run; its model determines the vocabulary.
        ranks: rank group; all ranks must agree.

    Raises:
        TrainError: the data exists for some ranks only.
    """
    reason = _describe_absent_store(Path(data)) if data is not None and not is_url(str(data)) else ""
    if input_file is not None and _is_absent(input_file):
        reason = f"--input-file: {describe_missing_input(input_file)}"
    absent = int(ranks.total(float(bool(reason)))[0])
    if not absent:
        return None
    if absent < ranks.world_size:
        raise TrainError(
            f"{data or input_file} is missing for {absent} of {ranks.world_size} ranks only, so synthetic data "
            "cannot replace it. Put it where every rank can read it."
        )
    if ranks.first:
        _LOG.warning("Could not load real data: %s", reason)
        _LOG.warning("Falling back to synthetic data")
    vocabulary = _get_model_vocabulary(settings) or SyntheticSpec().vocab
    return Path(SyntheticSpec(name=DISTRIBUTED_DUMMY, vocab=vocabulary).spec_string)


def _describe_absent_store(data: Path) -> str:
    """Return the error text of a store that does not exist; empty if it exists."""
    stem = data.with_suffix("") if data.suffix in (".bin", ".idx") else data
    halves = (stem.with_name(stem.name + ending) for ending in (".bin", ".idx") if stem.name)
    if not all(_is_absent(path) for path in (data, *halves)):
        return ""
    try:
        open_store(data)
    except StoreMissingError as error:
        return str(error)
    return ""


def _is_absent(path: Path) -> bool:
    """Return whether a path does not exist, as opposed to being unreadable.

    A path behind a broken symbolic link does not count as absent, because its data may only be unmounted.
    """
    try:
        path.lstat()
    except OSError as error:
        behind = any(above.is_symlink() and not above.exists() for above in path.parents)
        return isinstance(error, FileNotFoundError) and not behind
    return False


def _get_model_vocabulary(settings: TrainSettings) -> int | None:
    """Return the model's vocabulary size; None if it adapts to any."""
    if not isinstance(settings.model, PretrainedSettings):
        return settings.model.vocab_size
    vocab_size = getattr(read_model_config(settings.model), "vocab_size", None)
    return vocab_size if isinstance(vocab_size, int) else None
