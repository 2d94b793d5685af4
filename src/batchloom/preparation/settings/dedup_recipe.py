"""The settings of deduplication."""

from dataclasses import dataclass
from typing import Literal

from batchloom.core.errors import SettingsError
from batchloom.core.settings import as_int, quote_value, suggest
from batchloom.preparation.dedup import MINHASH_VERSION, RepeatUnit, choose_banding
from batchloom.store.format import Banding

DedupMode = Literal["none", "exact", "lines", "paragraphs", "near"]

DEDUP_MODES = ("none", "exact", "lines", "paragraphs", "near")
_BANDING_FIELDS = ("bands", "rows")
_MAX_HASHES = 4096
_MAX_SHINGLE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class DedupRecipe:
    """Which duplicates are left out; the first in input order stays.

    What is wrong with one is told by the recipe that holds it, with all else that is wrong.

    Attributes:
        mode: ``none``; ``exact``: documents of the same text; ``lines`` and ``paragraphs``: lines
            (paragraphs) of the same text, then documents; ``near``: documents of the same text,
            then those that MinHash finds alike.
        bands: of MinHash: groups of hashes; documents that agree in all of one are alike.
        rows: hashes of a band. A pair of similarity s is found with the probability
            1 - (1 - s^rows)^bands.
        shingle: neighbouring tokens that are hashed together.
        similarity: from which on nine of ten pairs are found; bands and rows follow from it
            (:func:`~batchloom.preparation.dedup.bands_for`). None: they say it themselves.
        keep_signatures: whether the store keeps the keys of bands, so that what is appended to it is
            compared with all that it has: 8 bytes a band and document.
    """

    mode: DedupMode = "exact"
    bands: int = 14
    rows: int = 8
    shingle: int = 5
    similarity: float | None = None
    keep_signatures: bool = True

    @property
    def banding(self) -> Banding:
        """How keys of bands are made."""
        similarity = self.similarity
        bands, rows = (self.bands, self.rows) if similarity is None else choose_banding(similarity)
        return Banding(bands, rows, self.shingle, MINHASH_VERSION)

    @property
    def stored_banding(self) -> Banding | None:
        """How the keys are made that a store keeps; None where it keeps none."""
        if self.mode != "near" or not self.keep_signatures:
            return None
        return self.banding

    @property
    def repeat_unit(self) -> RepeatUnit | None:
        """What is left out where it stood before; None where only whole documents are."""
        return self.mode if self.mode in ("lines", "paragraphs") else None

    def problems(self) -> list[str]:
        """What is wrong with these values, by the names ``prepare`` takes them under."""
        problems = []
        if self.mode not in DEDUP_MODES:
            hint = suggest(self.mode, DEDUP_MODES) if isinstance(self.mode, str) else ""
            problems.append(f"dedup: {quote_value(self.mode)} is none of {', '.join(DEDUP_MODES)}{hint}")
        for name, most in (
            ("bands", _MAX_HASHES),
            ("rows", _MAX_HASHES),
            ("shingle", _MAX_SHINGLE),
        ):
            value = as_int(getattr(self, name))
            if value is None or not 1 <= value <= most:
                quoted_value = quote_value(getattr(self, name))
                problems.append(f"dedup.{name}: {quoted_value} is not a whole number from 1 to {most:,}")
            elif value != getattr(DedupRecipe(), name) and self.mode != "near":
                problems.append(
                    f"dedup.{name}: belongs to mode near, and mode is {quote_value(self.mode)}; leave it out"
                )
        if not problems and self.bands * self.rows > _MAX_HASHES:
            problems.append(
                f"dedup.bands: {self.bands} of {self.rows} rows are {self.bands * self.rows:,} hashes a document; "
                f"choose at most {_MAX_HASHES:,}"
            )
        keep: object = self.keep_signatures
        if not isinstance(keep, bool):
            problems.append(f"dedup.keep_signatures: {quote_value(keep)} is neither true nor false")
        elif not keep and self.mode != "near":
            problems.append(
                f"dedup.keep_signatures: belongs to mode near, and mode is {quote_value(self.mode)}; leave it out"
            )
        return problems + self._similarity_problems()

    def _similarity_problems(self) -> list[str]:
        similarity: object = self.similarity
        if similarity is None:
            return []
        if isinstance(similarity, bool) or not isinstance(similarity, (int, float)):
            return [f"dedup.similarity: {quote_value(similarity)} is no number; try 0.8"]
        try:
            choose_banding(similarity)
        except SettingsError as error:
            return list(error.problems)
        if self.mode != "near":
            return [f"dedup.similarity: belongs to mode near, and mode is {quote_value(self.mode)}; leave it out"]
        defaults = DedupRecipe()
        changed_fields = [name for name in _BANDING_FIELDS if getattr(self, name) != getattr(defaults, name)]
        return [
            f"dedup.similarity: bands and rows follow from it, and {name} is given; leave one of them out"
            for name in changed_fields[:1]
        ]
