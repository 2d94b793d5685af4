"""Generation of the store that a resumed run reads."""

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
    """Return the store generation a run was started on; None for the newest.

    An older generation is logged by the first rank. None also covers data without generations, and data the run
    never used. A generation that was compacted away raises GenerationError.
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
        # The run predates generations, or was started on another copy, so search by fingerprint.
        number = newest.contents.find_generation(str(recorded_fingerprint))
    if number is None or number == newest.location.generation:
        return None
    # Reading the manifest raises GenerationError for a compacted generation before anything is built.
    newest.reader.files.read_manifest(number)
    if ranks.first:
        _LOG.info(
            "The run was started on generation %d of %s and continues with it; the newest is %d.",
            number,
            newest.location.name if newest.location.is_remote else data,
            newest.location.generation,
        )
    return number
