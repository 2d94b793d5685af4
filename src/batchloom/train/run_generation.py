"""Which generation of a store a run that goes on is to read."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchloom import open_store
from batchloom.train.distributed import RankGroup
from batchloom.train.run_folder import RunFolder

_LOG = logging.getLogger("batchloom")


def find_initial_generation(
    data: Path | str, folder: RunFolder, ranks: RankGroup, open_options: Mapping[str, Any]
) -> int | None:
    """The generation of its store that a run was begun on, told where it is not the newest.

    Args:
        data: a store's folder, a prefix, or a name of synthetic data.
        folder: of the run.
        ranks: the first one speaks.
        open_options: options of ``open_store``.

    Returns:
        None for the newest, for data without generations, and for data that the run was never on.

    Raises:
        TrainError: there is no run in the folder.
        StoreError: there is no store, or it is damaged.
        GenerationError: the generation was compacted away.
    """
    recorded_data = folder.read().get("data")
    newest = open_store(data, **open_options)
    if not isinstance(recorded_data, dict) or newest.manifest is None or newest.location.generation is None:
        return None
    recorded_fingerprint = recorded_data.get("fingerprint")
    number = recorded_data.get("generation")
    fingerprints_by_generation = {entry.number: entry.fingerprints for entry in newest.manifest.all_history}
    if (
        not isinstance(number, int)
        or fingerprints_by_generation.get(number, {}).get(newest.split) != recorded_fingerprint
    ):
        # It was begun before there were several, or somewhere else.
        number = newest.contents.find_generation(str(recorded_fingerprint))
    if number is None or number == newest.location.generation:
        return None
    # Where it was compacted away, this says so before anything is built.
    newest.reader.files.read_manifest(number)
    if ranks.first:
        _LOG.info(
            "The run was begun on generation %d of %s and goes on with it; the newest is %d.",
            number,
            newest.location.name if newest.location.is_remote else data,
            newest.location.generation,
        )
    return number
