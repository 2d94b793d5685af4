"""Settings of fill-in-the-middle."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

from batchloom.core.errors import SettingsError
from batchloom.core.settings import Setting, find_problems, quote_value, raise_problems, suggest, to_plain

_SENTINELS = ("prefix", "suffix", "middle")
_MAX_SEED = (1 << 128) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FimRecipe:
    """Settings of fill-in-the-middle, which moves the middle of a text to its end.

    See Bavarian et al. 2022. The recipe that holds it reports its problems.

    Attributes:
        rate: share of the texts to transform, each chosen by its own hash.
        spm_rate: share of those in which the suffix precedes the prefix.
        seed: at most 128 bits; it changes which texts are chosen and where they are cut.
        prefix, suffix, middle: tokens before each part; None for those of the tokenizer.
    """

    rate: Annotated[float, Setting(help="Share of the texts to transform.", maximum=1)] = 0.5
    spm_rate: Annotated[float, Setting(help="Share of those with the suffix first.", maximum=1)] = 0.5
    seed: Annotated[int, Setting(help="Seed of the choice.", minimum=-_MAX_SEED, maximum=_MAX_SEED)] = 0
    prefix: Annotated[str | None, Setting(help="Token before the prefix.")] = None
    suffix: Annotated[str | None, Setting(help="Token before the suffix.")] = None
    middle: Annotated[str | None, Setting(help="Token before the middle.")] = None

    @property
    def sentinels(self) -> tuple[str | None, ...]:
        """Tokens before prefix, suffix and middle."""
        return self.prefix, self.suffix, self.middle

    def problems(self) -> list[str]:
        """List the problems of the values, by the names ``prepare`` takes them under."""
        problems = find_problems(self, "fim.")
        sentinel_fields = [name for name in _SENTINELS if getattr(self, name) is not None]
        if sentinel_fields and len(sentinel_fields) < len(_SENTINELS):
            missing = ", ".join(name for name in _SENTINELS if name not in sentinel_fields)
            problems.append(f"fim.{sentinel_fields[0]}: alone is not enough; name {missing}, too, or none")
        if not problems and sentinel_fields and len(set(self.sentinels)) < len(_SENTINELS):
            problems.append("fim.prefix: prefix, suffix and middle must be three different tokens")
        return problems


def parse_fim(value: object) -> FimRecipe | None:
    """Parse fill-in-the-middle from a rate, settings or a FimRecipe; None for rate 0.

    Raises:
        SettingsError: unknown settings. The recipe reports problems of their values.
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
    """Return the plain value: the rate alone if everything else has its default."""
    if fim is None:
        return None
    settings, defaults = to_plain(fim), to_plain(FimRecipe())
    plain = {name: value for name, value in settings.items() if value != defaults[name] or name == "rate"}
    # 1 and 1.0 are one recipe and must have one fingerprint.
    plain |= {name: float(plain[name]) for name in ("rate", "spm_rate") if name in plain}
    return plain["rate"] if len(plain) == 1 else plain
