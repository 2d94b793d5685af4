"""Removal of documents with too few or too many characters or words."""

from dataclasses import dataclass

from batchloom.core.settings import coerce_int_fields, raise_problems
from batchloom.text.steps import CleanFunction, DroppedText

_MAX_LIMIT = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSettings:
    """Settings of the step ``length``; None means no limit.

    The word limits are those of Rae et al. 2021 (Gopher), table A1.

    Attributes:
        least_words: minimum number of words; white space separates words.
        most_words: maximum number of words.
        least_characters: minimum number of characters.
        most_characters: maximum number of characters.
    """

    least_words: int | None = 50
    most_words: int | None = 100_000
    least_characters: int | None = None
    most_characters: int | None = None

    def __post_init__(self) -> None:
        names = ("least_words", "most_words", "least_characters", "most_characters")
        limit_names = [name for name in names if getattr(self, name) is not None]
        problems = coerce_int_fields(self, dict.fromkeys(limit_names, (0, _MAX_LIMIT)))
        if not problems:
            problems = [*self._find_crossed_limits("words"), *self._find_crossed_limits("characters")]
        raise_problems(problems)

    def _find_crossed_limits(self, unit: str) -> list[str]:
        least = getattr(self, f"least_{unit}")
        most = getattr(self, f"most_{unit}")
        if least is None or most is None or least <= most:
            return []
        return [f"least_{unit}: {least:,} is above most_{unit}, {most:,}: every text would be dropped"]


def make_length_step(settings: LengthSettings) -> CleanFunction:
    counts_words = settings.least_words is not None or settings.most_words is not None

    def clean(text: str) -> str | DroppedText:
        drop = _check_limits(len(text), settings.least_characters, settings.most_characters, "characters")
        if drop is None and counts_words:
            drop = _check_limits(len(text.split()), settings.least_words, settings.most_words, "words")
        return drop or text

    return clean


def _check_limits(count: int, least: int | None, most: int | None, unit: str) -> DroppedText | None:
    if least is not None and count < least:
        return DroppedText(f"length: too few {unit}", f"{count:,} {unit}, at least {least:,}")
    if most is not None and count > most:
        return DroppedText(f"length: too many {unit}", f"{count:,} {unit}, at most {most:,}")
    return None
