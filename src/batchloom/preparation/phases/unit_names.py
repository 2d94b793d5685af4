"""Names of a job's units, and the search for repeated lines or paragraphs in them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import msgspec

from batchloom.core.fingerprint import fingerprint
from batchloom.preparation.dedup.line_dedup import RepeatUnit
from batchloom.preparation.identity.recipe_identity import compute_recipe_fingerprint
from batchloom.preparation.settings.recipe import Recipe
from batchloom.preparation.units.units import RecordExcludedError, Unit, compute_unit_identity
from batchloom.preparation.units.work_folder import EXCLUDED_NAME, WORK_VERSION, ExcludedRecords, WorkFolder, read_json
from batchloom.preparation.workers.package_versions import collect_versions
from batchloom.store import write_file
from batchloom.tokens import Tokenizer


def collect_unit_settings(recipe: Recipe, tokenizer: Tokenizer, constants: Sequence[int]) -> dict[str, Any]:
    """Return everything but the inputs that decides a unit's files, as plain values."""
    return {
        "version": WORK_VERSION,
        "recipe": compute_recipe_fingerprint(recipe),
        "constants": list(constants),
        "tokenizer": [tokenizer.fingerprint, tokenizer.engine.name, tokenizer.engine.version, tokenizer.engine.note],
        "versions": collect_versions(recipe.reading.clean),
    }


@dataclass(frozen=True, slots=True)
class SegmentSearch:
    """Search for repeated lines or paragraphs: files and excluded records by unit."""

    key_files: list[Path]
    excluded: list[ExcludedRecords]
    folder: Path
    repeat_unit: RepeatUnit


@final
class UnitNames:
    """Names of units, which cover everything that decides their files.

    ``content`` holds content hashes by path, for sources that these identify.
    """

    def __init__(
        self,
        work: WorkFolder,
        units: Sequence[Unit],
        recipe: Recipe,
        tokenizer: Tokenizer,
        constants: Sequence[int],
        content: Mapping[str, str],
    ) -> None:
        self._work = work
        self._units = units
        self._content = content
        self._settings = collect_unit_settings(recipe, tokenizer, constants)
        self._repeat_unit = recipe.dedup.repeat_unit

    def make_names(self) -> tuple[list[str], SegmentSearch | None]:
        """Return the names of all units, and the search for repeated lines if any."""
        names = self._list_names(self._settings)
        if self._repeat_unit is None:
            return names, None
        excluded_by_name = self._read_excluded()
        excluded = [excluded_by_name.get(name, ()) for name in names]
        identities = [
            fingerprint([name, records]) if records else name for name, records in zip(names, excluded, strict=True)
        ]
        # Removed lines depend on all units before, so every unit's name covers all exclusions.
        before = fingerprint(identities)
        key_files = [self._work.segment_keys_path(identity) for identity in identities]
        search = SegmentSearch(key_files, excluded, self._work.duplicates / before, self._repeat_unit)
        return self._list_names({**self._settings, "before": before}), search

    def exclude(self, error: RecordExcludedError) -> None:
        """Store the excluded records of a unit for the next search and for later runs."""
        name = self._list_names(self._settings)[error.unit]
        excluded_by_name = {**self._read_excluded(), name: error.excluded}
        write_file(self._work.path / EXCLUDED_NAME, msgspec.json.encode(excluded_by_name))

    def _read_excluded(self) -> dict[str, ExcludedRecords]:
        return read_json(self._work.path / EXCLUDED_NAME, dict[str, ExcludedRecords]) or {}

    def _list_names(self, settings: Mapping[str, object]) -> list[str]:
        return [compute_unit_identity(unit, settings, self._content) for unit in self._units]
