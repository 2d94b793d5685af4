"""Settings of deduplication."""

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from batchloom.core.errors import SettingsError
from batchloom.core.settings import Setting, find_problems, quote_value
from batchloom.preparation.dedup.line_dedup import RepeatUnit
from batchloom.preparation.dedup.minhash import MINHASH_VERSION, choose_banding
from batchloom.store.format import Banding

DedupMode = Literal["none", "exact", "lines", "paragraphs", "near"]

_BANDING_FIELDS = ("bands", "rows")
_MAX_HASHES = 4096
_MAX_SHINGLE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class DedupRecipe:
    """Settings of deduplication; the first copy in input order is kept.

    The recipe that holds it reports its problems.

    Attributes:
        mode: ``none``; ``exact``: documents with the same text; ``lines`` and ``paragraphs``: repeated lines
            (paragraphs), then documents; ``near``: documents with the same text, then those that MinHash finds similar.
        bands: groups of MinHash values; documents that agree in all values of one band are near duplicates.
        rows: hashes of a band. A pair of similarity s is found with probability 1 - (1 - s^rows)^bands.
        shingle: number of consecutive tokens that are hashed together.
        similarity: similarity from which nine of ten pairs are found; it determines bands and rows. None to set them.
        keep_signatures: whether the store keeps the MinHash signatures, 8 bytes a band and document, so that
            appended documents are compared with all of its documents.
    """

    mode: Annotated[
        DedupMode,
        Setting(
            help="Duplicates to remove, keeping the first copy: exact (documents), lines, paragraphs, near (similar "
            "documents) or none (also --no-dedup).",
            option="--dedup",
            shown_default="exact; none with --split-on line or paragraph",
        ),
    ] = "exact"
    bands: Annotated[
        int, Setting(help="Bands of the MinHash signatures.", minimum=1, maximum=_MAX_HASHES, has_option=False)
    ] = 14
    rows: Annotated[
        int,
        Setting(
            help="Hashes of a band. A pair of similarity s is found with probability 1 - (1 - s^rows)^bands.",
            minimum=1,
            maximum=_MAX_HASHES,
            has_option=False,
        ),
    ] = 8
    shingle: Annotated[
        int,
        Setting(help="Consecutive tokens that are hashed together.", minimum=1, maximum=_MAX_SHINGLE, has_option=False),
    ] = 5
    similarity: Annotated[
        float | None,
        Setting(
            help="With --dedup near: share of common token runs from which documents count as near duplicates (nine "
            "of ten such pairs are found).",
            maximum=1,
            shown_default="0.8",
        ),
    ] = None
    keep_signatures: Annotated[
        bool,
        Setting(
            help="Keep the signatures in the store (8 bytes a band and document), so that appended documents are "
            "compared with all of its documents.",
            has_option=False,
        ),
    ] = True

    @property
    def banding(self) -> Banding:
        """Parameters of the MinHash signatures."""
        similarity = self.similarity
        bands, rows = (self.bands, self.rows) if similarity is None else choose_banding(similarity)
        return Banding(bands, rows, self.shingle, MINHASH_VERSION)

    @property
    def stored_banding(self) -> Banding | None:
        """Parameters of the signatures that a store keeps; None if it keeps none."""
        if self.mode != "near" or not self.keep_signatures:
            return None
        return self.banding

    @property
    def repeat_unit(self) -> RepeatUnit | None:
        """Unit of repetition inside documents; None to remove only complete documents."""
        return self.mode if self.mode in ("lines", "paragraphs") else None

    def problems(self) -> list[str]:
        """List the problems of the values, by the names ``prepare`` takes them under."""
        problems = find_problems(self, "dedup.")
        if problems:
            return [problem.replace("dedup.mode:", "dedup:") for problem in problems]
        defaults = DedupRecipe()
        changed = [field.name for field in fields(self) if getattr(self, field.name) != getattr(defaults, field.name)]
        if self.mode != "near":
            return [
                f"dedup.{name}: belongs to mode near, and mode is {quote_value(self.mode)}; leave it out"
                for name in changed
                if name != "mode"
            ]
        if self.similarity is not None:
            try:
                choose_banding(self.similarity)
            except SettingsError as error:
                return list(error.problems)
            return [
                f"dedup.similarity: bands and rows follow from it, and {name} is given; leave one of them out"
                for name in _BANDING_FIELDS
                if name in changed
            ][:1]
        if self.bands * self.rows > _MAX_HASHES:
            return [f"dedup.bands: {self.bands} of {self.rows} rows make more than {_MAX_HASHES:,} hashes; lower one"]
        return []
