"""Settings: frozen dataclasses whose fields declare bounds, help and forms.

``Setting`` in a field's annotation holds what its type and default do not say. Validation, command-line options,
keyword arguments and plain JSON values derive from the fields. All problems of a call are reported at once, each with
its path.
"""

import dataclasses
import difflib
import math
import operator
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from batchloom.core.errors import SettingsError
from batchloom.core.wording import shorten

T = TypeVar("T")

_MAX_QUOTED_LENGTH = 120
_MAX_QUOTED_BITS = 256


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WrittenForm:
    """Declaration of how the value of a field is written in files, options and calls.

    Attributes:
        parse: returns the value of a short form. It returns what it does not know unchanged, for the field's check.
        keyword: type of a keyword argument, if it takes more forms than the field.
        plain: returns the JSON value, which ``parse`` reads back. None stays None.
        omit_default: whether plain values leave out the default.
        prefix: of a field that holds settings which are written beside those of its class: the beginning of their
            names there. None: they are written in a mapping.
    """

    parse: Callable[[Any], Any] | None = None
    keyword: Any = None
    plain: Callable[[Any], Any] | None = None
    omit_default: bool = False
    prefix: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting(WrittenForm):
    """Declaration of a settings field: what its type and default do not say.

    Example: ``seed: Annotated[int, Setting(help="Seed of the data order.", minimum=0)] = 0``.

    Attributes:
        help: help text of the command-line option.
        minimum, maximum: inclusive bounds of a number.
        below: exclusive upper bound of a number.
        check: returns the problem of a value, or an empty string. It replaces the check by type; a value of a setting
            of texts is first checked to be one.
        has_option: whether the command line has an option for it.
        option: name of the option, if not derived from the field; a bool then has no --no- form.
        option_type: type of the option's value, if the option takes a short form.
        metavar: placeholder of the option's value.
        shown_default: default in the help, if it is not that of the field.
        panel: heading of the option in the help.
    """

    help: str
    minimum: float | None = None
    maximum: float | None = None
    below: float | None = None
    check: Callable[[Any], str] | None = None
    has_option: bool = True
    option: str = ""
    option_type: type | None = None
    metavar: str | None = None
    shown_default: str = ""
    panel: str | None = None


# Of a field that declares none.
_NO_FORM = WrittenForm()


class SettingField(NamedTuple):
    """A declared field of a settings class; ``hint`` is its type without None."""

    name: str
    hint: Any
    default: Any
    form: WrittenForm
    optional: bool

    @property
    def setting(self) -> Setting:
        """Declaration of a field that is a setting, not settings of another class."""
        if not isinstance(self.form, Setting):
            raise TypeError(f"{self.name} holds settings of another class")
        return self.form

    @property
    def option_names(self) -> list[str]:
        """Names of the command-line option."""
        if not self.setting.has_option:
            return []
        name = self.name.replace("_", "-")
        names = [f"--{name}", f"--no-{name}"] if self.hint is bool else [f"--{name}"]
        return [self.setting.option] if self.setting.option else names


@cache
def list_written_fields(cls: Any) -> tuple[SettingField, ...]:
    """List the fields of a settings class that have a :class:`WrittenForm`, in order."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return tuple(
        SettingField(
            field.name,
            strip_none(hints[field.name].__origin__),
            field.default,
            metadata,
            optional=type(None) in typing.get_args(hints[field.name].__origin__),
        )
        for field in dataclasses.fields(cls)
        for metadata in getattr(hints[field.name], "__metadata__", ())
        if isinstance(metadata, WrittenForm)
    )


def list_settings(cls: Any) -> tuple[SettingField, ...]:
    """List the fields of a settings class that have a :class:`Setting`, in order."""
    return tuple(field for field in list_written_fields(cls) if isinstance(field.form, Setting))


def list_setting_names(cls: Any) -> tuple[str, ...]:
    """List the names of the settings of a class, as files and calls have them."""
    names: list[str] = []
    for field in list_written_fields(cls):
        prefix = field.form.prefix
        names += [field.name] if prefix is None else [prefix + name for name in list_setting_names(field.hint)]
    return tuple(names)


def find_problems(spec: object, path: str = "") -> list[str]:
    """Check the declared fields of a settings value; return its problems.

    Each is ``path.name: value problem``.
    """
    problems = []
    cls: Any = type(spec)
    for field in list_settings(cls):
        value = getattr(spec, field.name)
        if value is None and field.optional:
            continue
        if problem := _find_problem(value, field):
            problems.append(f"{path}{field.name}: {quote_value(value)} {problem}")
    return problems


def strip_none(hint: Any) -> Any:
    """Return an optional type without None."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint
    return next(option for option in typing.get_args(hint) if option is not types.NoneType)


def _find_problem(value: object, field: SettingField) -> str:
    if field.setting.check is None:
        return _find_type_problem(value, field)
    if field.hint is str and not isinstance(value, str):
        return "is not a text"
    return field.setting.check(value)


def _find_type_problem(value: object, field: SettingField) -> str:
    if typing.get_origin(field.hint) is typing.Literal:
        return find_choice_problem(value, typing.get_args(field.hint))
    if field.hint is bool:
        return "" if is_bool(value) else "is neither True nor False"
    if field.hint is str:
        return "" if is_text(value) else "is not a text of one or more Unicode characters"
    if field.hint is Path:
        return "" if isinstance(value, Path) else "is not a path"
    return _find_number_problem(value, field.setting, whole=field.hint is int)


def find_choice_problem(value: object, choices: Collection[str]) -> str:
    """Return the problem of a value that is none of these texts, or an empty string."""
    if isinstance(value, str) and value in choices:
        return ""
    return f"is none of {', '.join(choices)}{suggest(value, choices) if isinstance(value, str) else ''}"


def _find_number_problem(value: object, setting: Setting, *, whole: bool) -> str:
    minimum = setting.minimum or 0
    below = setting.below
    maximum = setting.maximum
    most = math.inf if maximum is None else maximum
    if whole:
        number: Any = as_int(value)
        bounds = f"of at least {minimum:,}" if maximum is None else f"from {minimum:,} to {maximum:,}"
        return "" if number is not None and minimum <= number <= most else f"is not a whole number {bounds}"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if below is not None:
        if is_number and minimum <= value < below:  # type: ignore[operator]
            return ""
        return f"is not {'' if is_number else 'a number '}in [{minimum:g}, {below:g})"
    bounds = f"of at least {minimum:g}" if maximum is None else f"from {minimum:g} to {maximum:g}"
    return "" if is_number and minimum <= value <= most else f"is not a number {bounds}"  # type: ignore[operator]


def suggest(word: str, candidates: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for the nearest known word, or an empty string."""
    nearest = find_nearest(word, candidates)
    return "" if nearest is None else f"; did you mean {nearest!r}?"


def find_nearest(word: str, candidates: Iterable[str]) -> str | None:
    """Return the known word nearest to another one; None without a similar one."""
    return next(iter(difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.6)), None)


def find_unknown_settings(names: Iterable[object], known_names: Collection[str], prefix: str = "") -> list[str]:
    """List a problem for each unknown name, with the nearest known one."""
    return [
        f"{prefix}{name}: unknown setting{suggest(str(name), known_names)}" for name in names if name not in known_names
    ]


def is_text(value: object) -> bool:
    """Return whether a value is a non-empty string of valid Unicode."""
    try:
        return isinstance(value, str) and bool(value.encode())
    except UnicodeEncodeError:
        return False


def raise_problems(problems: list[str]) -> None:
    """Raise one SettingsError that holds every problem, or return when there is none."""
    if problems:
        raise SettingsError(problems)


def is_bool(value: object) -> bool:
    """Return whether a value is a bool: the string ``'no'`` would count as true."""
    return isinstance(value, bool)


def as_int(value: object) -> int | None:
    """Return an integer value as a Python int; None for bools and non-integers."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def check_index(index: object, count: int, noun: str) -> int:
    """Return the index of one of ``count`` items; negative ones count from the end."""
    number = as_int(index)
    if number is None:
        raise TypeError(
            f"A {noun} is selected by a whole number, not by {quote_value(index)}; take several one by one."
        )
    if not -count <= number < count:
        raise IndexError(f"There is no {noun} {number}: there are {count:,}, numbered from 0.")
    return number % count


def is_positive_number(value: object, *, zero: bool = False) -> bool:
    """Return whether a value is a finite number above 0, or with ``zero`` at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        finite = math.isfinite(value)
    except OverflowError:
        return False
    return finite and (value >= 0 if zero else value > 0)


def quote_value(value: object) -> str:
    """Return the ``repr`` of a value for an error message, shortened if it is long."""
    number = as_int(value)
    # Python does not format ints of more than 4,300 digits.
    if number is not None and number.bit_length() > _MAX_QUOTED_BITS:
        return f"a number of {number.bit_length():,} bits"
    return shorten(repr(value if number is None else number), _MAX_QUOTED_LENGTH)


def coerce_int_fields(spec: object, bounds: Mapping[str, tuple[int, int]]) -> list[str]:
    """Convert integer fields of a frozen spec to plain ints; return the problems.

    Args:
        spec: a settings dataclass in its ``__post_init__``.
        bounds: minimum and maximum of each field; a field whose default is None may be None.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(spec)}  # type: ignore[arg-type]
    problems = []
    for name, (least, most) in bounds.items():
        value = getattr(spec, name)
        if value is None and defaults[name] is None:
            continue
        number = as_int(value)
        if number is None or not least <= number <= most:
            problems.append(f"{name}: {quote_value(value)} is not a whole number from {least} to {most}")
        else:
            object.__setattr__(spec, name, number)
    return problems


def convert_int_settings(spec: object) -> list[str]:
    """Convert declared integer fields to plain ints; return the problems."""
    return coerce_int_fields(
        spec,
        {
            field.name: (int(field.setting.minimum or 0), int(field.setting.maximum))
            for field in list_settings(type(spec))
            if field.hint is int
            and field.setting.maximum is not None
            and not (field.optional and getattr(spec, field.name) is None)
        },
    )


def to_plain(spec: object) -> dict[str, Any]:
    """Return a settings dataclass as a dict of JSON values (tuples become lists).

    Fields that do not count in comparisons are left out.
    """
    if not dataclasses.is_dataclass(spec) or isinstance(spec, type):
        raise TypeError(f"to_plain takes a settings value, not {type(spec).__name__}")
    forms = {field.name: field.form for field in list_written_fields(type(spec))}
    plain: dict[str, Any] = {}
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        form = forms.get(field.name, _NO_FORM)
        if not field.compare or (form.omit_default and value == _get_default(field)):
            continue
        if form.prefix is not None:
            plain |= {form.prefix + name: inner for name, inner in to_plain(value).items()}
        elif form.plain is not None and value is not None:
            plain[field.name] = form.plain(value)
        else:
            plain[field.name] = value_to_plain(value)
    return plain


def _get_default(field: "dataclasses.Field[Any]") -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def parse_short_forms(classes: Iterable[type], values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Parse the short forms of settings of these classes.

    Returns:
        The values by name, without those that cannot be parsed; and the problems of these.
    """
    parsed = dict(values)
    problems = list[str]()
    for field in [field for cls in classes for field in list_written_fields(cls)]:
        if field.form.parse is not None and parsed.get(field.name) is not None:
            try:
                parsed[field.name] = field.form.parse(parsed[field.name])
            except SettingsError as error:
                problems += error.problems
                del parsed[field.name]
    return parsed, problems


def build_settings(cls: type[T], values: object, prefix: str = "") -> T:
    """Build a settings class from written values by name; null counts as absent.

    Args:
        cls: class whose fields have a :class:`Setting` or a :class:`WrittenForm`.
        values: mapping of the values; short forms are parsed.
        prefix: path of the mapping in messages, with a final dot.

    Raises:
        SettingsError: unknown and missing names, and all problems that the class finds, each with its path.
    """
    if not isinstance(values, Mapping):
        raise SettingsError([f"{prefix.removesuffix('.')}: {quote_value(values)} is not a mapping"])
    names = list_setting_names(cls)
    given = {name: values[name] for name in names if values.get(name) is not None}
    parsed, problems = parse_short_forms([cls], given)
    # A value that cannot be parsed is not reported as missing, too.
    given |= parsed
    problems += find_unknown_settings(values, names, prefix)
    for field in list_written_fields(cls):  # type: ignore[arg-type]
        if field.form.prefix is None:
            continue
        name_by_written = {field.form.prefix + name: name for name in list_setting_names(field.hint)}
        nested = {name: given.pop(written) for written, name in name_by_written.items() if written in given}
        try:
            given[field.name] = build_settings(field.hint, nested, prefix + field.form.prefix)
        except SettingsError as error:
            problems += error.problems
    missing = [
        field.name
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
        if field.name not in given and field.default is field.default_factory is dataclasses.MISSING
    ]
    problems += [f"{prefix}{name}: missing" for name in missing]
    try:
        spec = cls(**given, **dict.fromkeys(missing))
    except SettingsError as error:
        reported = tuple(f"{name}:" for name in missing)
        class_problems = [prefix + problem for problem in error.problems if not problem.startswith(reported)]
        problems += [problem for problem in class_problems if problem not in problems]
    raise_problems(problems)
    return spec


def from_plain(cls: type[T], values: Mapping[str, Any], path: str = "") -> T:
    """Build the settings class ``cls`` from plain values.

    Raises:
        SettingsError: unknown names (with the nearest known one), missing names and values
            of another type, all in one error, each with its path.
    """
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    prefix = f"{path}." if path else ""
    problems = find_unknown_settings(values, fields, prefix)
    ready: dict[str, Any] = {}
    for name, field in fields.items():
        if name in values:
            try:
                ready[name] = _convert(hints[name], values[name], prefix + name)
            except SettingsError as error:
                problems += error.problems
        elif field.default is field.default_factory is dataclasses.MISSING:
            problems.append(f"{prefix}{name}: missing")
    raise_problems(problems)
    return cls(**ready)


def value_to_plain(value: Any) -> Any:
    """Return a settings value as JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_plain(value)
    if isinstance(value, Mapping):
        return {str(key): value_to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [value_to_plain(item) for item in value]
    return value


def _convert(hint: Any, value: Any, path: str) -> Any:
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(args, value, path)
    if origin is typing.Literal:
        if value in args:
            return value
        raise SettingsError([f"{path}: {value!r} is none of {', '.join(map(repr, args))}"])
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_convert(args[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if origin in (dict, Mapping) and isinstance(value, Mapping):
        convert = (lambda _, item, __: item) if args[1] is Any else _convert
        return {str(k): convert(args[1], item, f"{path}.{k}") for k, item in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, hint):
            return value
        if isinstance(value, Mapping):
            return from_plain(hint, value, path)
    elif hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError as error:
            raise SettingsError([f"{path}: a whole number too large for a float"]) from error
    elif isinstance(hint, type) and isinstance(value, hint) and not (isinstance(value, bool) and hint is not bool):
        return value
    name = getattr(hint, "__name__", str(hint))
    raise SettingsError([f"{path}: {value!r} is not {name}"])


def _convert_union(args: tuple[Any, ...], value: Any, path: str) -> Any:
    if value is None and type(None) in args:
        return None
    problems: list[str] = []
    # The problems of the last option are reported: of settings classes, the one with most known names.
    for option in sorted(args, key=lambda option: _count_known_fields(option, value)):
        if option is not type(None):
            try:
                return _convert(option, value, path)
            except SettingsError as error:
                problems = list(error.problems)
    raise SettingsError(problems)


def _count_known_fields(option: Any, value: Any) -> int:
    """Return the number of names in a mapping that are fields of a settings class."""
    if not (dataclasses.is_dataclass(option) and isinstance(value, Mapping)):
        return 0
    return len({field.name for field in dataclasses.fields(option)} & value.keys())
