"""Data that is not there, and what may stand in for it where that was asked for."""

import logging
from pathlib import Path

from batchloom import open_store
from batchloom.core.addresses import is_url
from batchloom.core.errors import StoreMissingError, TrainError
from batchloom.core.synthetic_data import DISTRIBUTED_DUMMY, SyntheticSpec
from batchloom.train.data.memory_store import describe_missing_input
from batchloom.train.distributed import RankGroup
from batchloom.train.model import read_model_config
from batchloom.train.train_settings import PretrainedSettings, TrainSettings

_LOG = logging.getLogger("batchloom")


def choose_synthetic_data(
    data: Path | str | None, input_file: Path | None, settings: TrainSettings, ranks: RankGroup
) -> Path | None:
    """The name of the synthetic data to train on in place of data that is absent; None where it is there.

    Data that is there and cannot be used is no case of it: whoever opens it meets the reason.

    Args:
        data: a store's folder or a prefix.
        input_file: a file or folder; one of the two is given.
        settings: of the run, whose model knows a vocabulary.
        ranks: all of them must find the same.

    Raises:
        TrainError: some ranks have the data, and others have not.
    """
    reason = _describe_absent_store(Path(data)) if data is not None and not is_url(str(data)) else ""
    if input_file is not None and _is_absent(input_file):
        reason = f"--input-file: {describe_missing_input(input_file)}"
    absent = int(ranks.total(float(bool(reason)))[0])
    if not absent:
        return None
    if absent < ranks.world_size:
        raise TrainError(
            f"{data or input_file} is absent for {absent} of {ranks.world_size} ranks and there for the others: "
            "nothing stands in for a part of the data. Put it where every rank finds it."
        )
    if ranks.first:
        _LOG.warning("Could not load real data: %s", reason)
        _LOG.warning("Falling back to synthetic data")
    vocabulary = _get_model_vocabulary(settings) or SyntheticSpec().vocab
    return Path(SyntheticSpec(name=DISTRIBUTED_DUMMY, vocab=vocabulary).spec_string)


def _describe_absent_store(data: Path) -> str:
    """Why a store cannot be opened, where that is because nothing is there; else empty."""
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
    """Whether the system says that nothing is there: not that it may not be looked at.

    Behind a link that leads nowhere there may be data which is not mounted now.
    """
    try:
        path.lstat()
    except OSError as error:
        behind = any(above.is_symlink() and not above.exists() for above in path.parents)
        return isinstance(error, FileNotFoundError) and not behind
    return False


def _get_model_vocabulary(settings: TrainSettings) -> int | None:
    """The ids the run's model knows; None where it takes any number."""
    if not isinstance(settings.model, PretrainedSettings):
        return settings.model.vocab_size
    vocab_size = getattr(read_model_config(settings.model), "vocab_size", None)
    return vocab_size if isinstance(vocab_size, int) else None
