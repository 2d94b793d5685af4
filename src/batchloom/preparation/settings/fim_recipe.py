"""The settings of fill-in-the-middle."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from batchloom.core.errors import SettingsError
from batchloom.core.settings import as_int, is_text, quote_value, raise_problems, suggest, to_plain

_SENTINELS = ("prefix", "suffix", "middle")
_MAX_SEED = (1 << 128) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FimRecipe:
    """Texts of which the middle stands last, so that a model learns to fill it in (Bavarian et al. 2022).

    What is wrong with one is told by the recipe that holds it, with all else that is wrong.

    Attributes:
        rate: share of the texts, each chosen by its own hash.
        spm_rate: share of those whose suffix comes before the prefix.
        seed: at most 128 bits; another seed chooses and cuts otherwise.
        prefix, suffix, middle: the tokens before each part; None for those that the tokenizer has.
    """

    rate: float = 0.5
    spm_rate: float = 0.5
    seed: int = 0
    prefix: str | None = None
    suffix: str | None = None
    middle: str | None = None

    @property
    def sentinels(self) -> tuple[str | None, ...]:
        """The tokens before prefix, suffix and middle."""
        return self.prefix, self.suffix, self.middle

    def problems(self) -> list[str]:
        """What is wrong with these values, by the names ``prepare`` takes them under."""
        problems = [
            f"fim.{name}: {quote_value(getattr(self, name))} is no share from 0 to 1"
            for name in ("rate", "spm_rate")
            if not _is_fraction(getattr(self, name))
        ]
        seed = as_int(self.seed)
        if seed is None or abs(seed) > _MAX_SEED:
            problems.append(f"fim.seed: {quote_value(self.seed)} is no whole number of at most 128 bits")
        sentinel_fields = [name for name in _SENTINELS if getattr(self, name) is not None]
        problems += [
            f"fim.{name}: {quote_value(getattr(self, name))} is no token; name one of the tokenizer's"
            for name in sentinel_fields
            if not is_text(getattr(self, name))
        ]
        if sentinel_fields and len(sentinel_fields) < len(_SENTINELS):
            missing = ", ".join(name for name in _SENTINELS if name not in sentinel_fields)
            problems.append(f"fim.{sentinel_fields[0]}: alone is not enough; name {missing}, too, or none")
        if not problems and sentinel_fields and len(set(self.sentinels)) < len(_SENTINELS):
            problems.append("fim.prefix: prefix, suffix and middle are to be three tokens")
        return problems


def _is_fraction(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 0 <= value <= 1


def parse_fim(value: object) -> FimRecipe | None:
    """Fill-in-the-middle as a rate, as settings, or as the value itself; None where the rate is 0.

    Raises:
        SettingsError: settings nobody knows. What is wrong with their values is told by the recipe.
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        field_names = [field.name for field in fields(FimRecipe)]
        raise_problems(
            [
                f"fim.{name}: unknown setting{suggest(str(name), field_names)}"
                for name in value
                if name not in field_names
            ]
        )
        value = FimRecipe(**value)
    elif not isinstance(value, FimRecipe):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise SettingsError([f"fim: {quote_value(value)} is no rate; write 0.5, or {{rate: 0.5, ...}}"])
        value = FimRecipe(rate=value)
    return value if value.rate != 0 or value.problems() else None


def fim_to_plain(fim: FimRecipe | None) -> Any:
    """The same as a plain value: its rate where that says all."""
    if fim is None:
        return None
    settings, defaults = to_plain(fim), to_plain(FimRecipe())
    plain = {name: value for name, value in settings.items() if value != defaults[name] or name == "rate"}
    # 1 and 1.0 are one recipe and must have one fingerprint.
    plain |= {name: float(plain[name]) for name in ("rate", "spm_rate") if name in plain}
    return plain["rate"] if len(plain) == 1 else plain
