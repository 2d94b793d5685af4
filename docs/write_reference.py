"""Write the reference and the keyword arguments that derive from the code.

Names, settings, keys, metrics and errors are declared in the code. A page holds its prose, and for each such part a
comment ``<!-- begin NAME ARGUMENTS -->``: the function of that name in ``PARTS`` returns what follows, up to
``<!-- end -->``. `KEYWORDS` holds the typed keyword arguments of functions. Run this script after changing a
declaration or a page.
"""

import dataclasses
import importlib
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING
from functools import partial
from pathlib import Path
from typing import Any

import click

from batchloom import PlanSpec
from batchloom.batches import BATCH_KEYS, METRICS, BatchSpec
from batchloom.chat import COLUMN_TABLES, FORM_RULES, MESSAGE_KEYS, PART_KEYS
from batchloom.chat.schema.record_keys import TRAIN_FLAGS
from batchloom.chat.schema.schemas import INTERLEAVED_RULE, MESSAGE_MAPPING_NAMES, PROMPT_RULES, ROLE_MEANINGS, FormRule
from batchloom.chat.schema.turns import ROLE_BY_SENDER
from batchloom.cli.commands import APP, COMMANDS, load_command
from batchloom.cli.options import QUIET
from batchloom.core import errors
from batchloom.core.settings import SettingField, list_settings, list_written_fields
from batchloom.media import FrameSampling, MediaLimits
from batchloom.preparation import (
    ChatRecipe,
    DatasetConfig,
    DedupRecipe,
    ExecutionSettings,
    FimRecipe,
    ImportSpec,
    MediaRecipe,
    ReadRecipe,
    Recipe,
    RunSettings,
)
from batchloom.preparation.settings import DatasetEntry, ProcessorConfig
from batchloom.text import KNOWN_STEPS
from batchloom.train import DataRequest, MediaPaths, StoreOptions, StreamOptions, TrainSettings

REFERENCE = Path(__file__).parent / "reference"
_PART_PATTERN = re.compile(r"(<!-- begin (\S+)(.*?)-->\n).*?<!-- end -->", re.DOTALL)
# An option in a sentence. As code it keeps its two hyphens, which a page may replace by a dash.
_OPTION_PATTERN = re.compile(r"(?<![\w`-])--[a-z][a-z-]*")


def format_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    head = list(head)
    lines = [f"| {' | '.join(map(_escape_cell, cells))} |\n" for cells in (head, *rows)]
    return "".join([lines[0], "|---" * len(head) + "|\n", *lines[1:]])


def _escape_cell(text: str) -> str:
    """Escape a pipe anywhere, and outside code the characters that begin emphasis or HTML."""
    parts = text.replace("|", r"\|").split("`")
    parts[::2] = [part.replace("*", r"\*").replace("<", r"\<") for part in parts[::2]]
    return "`".join(parts)


def format_names(names: Iterable[str]) -> str:
    """Return names as code, separated by commas."""
    return ", ".join(f"`{name}`" for name in names)


def mark_options(sentence: str) -> str:
    """Mark the options in a sentence as code."""
    return _OPTION_PATTERN.sub(r"`\g<0>`", sentence)


# Settings

# Prefix of the keys of a class: the mapping that holds them, and the beginning of their names in it.
_KEY_PREFIXES: dict[type, str] = {
    DedupRecipe: "dedup.",
    MediaRecipe: "media.",
    MediaLimits: "media.",
    FrameSampling: "media.video_",
    FimRecipe: "fim.",
    ProcessorConfig: "processor_config.",
    DatasetEntry: "datasets[].",
}
SETTINGS_CLASSES: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        *(Recipe, ReadRecipe, ChatRecipe, DedupRecipe, MediaRecipe, MediaLimits, FrameSampling, FimRecipe),
        *(RunSettings, ExecutionSettings, DatasetConfig, ProcessorConfig, DatasetEntry),
        *(PlanSpec, TrainSettings, DataRequest, StreamOptions, MediaPaths, StoreOptions),
    )
}
# Classes whose fields are no options of a command.
_WITHOUT_OPTIONS = (FimRecipe, DatasetConfig, ProcessorConfig, DatasetEntry)


def format_settings(class_names: str) -> str:
    """Return the table of the settings in these classes."""
    classes = [SETTINGS_CLASSES[name] for name in class_names.split()]
    rows = [describe_field(cls, field) for cls in classes for field in list_fields(cls)]
    return format_table(("setting", "option", "value", "default", "meaning"), rows)


def list_fields(cls: type) -> list[SettingField]:
    """List the declared fields of a class, inherited ones last, as the command line does."""
    return sorted(list_settings(cls), key=lambda field: field.name not in cls.__annotations__)


def describe_field(cls: type, field: SettingField) -> tuple[str, ...]:
    option = "" if cls in _WITHOUT_OPTIONS else format_names(field.option_names)
    key = _KEY_PREFIXES.get(cls, "") + field.name
    return f"`{key}`", option, _format_type(field), _format_default(field), mark_options(field.setting.help)


def _format_type(field: SettingField) -> str:
    setting = field.setting
    hint = setting.option_type if setting.check and setting.option_type else field.hint
    if typing.get_origin(hint) is typing.Literal:
        return format_names(typing.get_args(hint))
    name = _name_type(hint)
    # A check of the field itself replaces the bounds.
    if hint in (int, float) and not (setting.check and hint is field.hint):
        return name + _format_bounds(setting.minimum, setting.maximum, setting.below)
    return name


def _name_type(hint: Any) -> str:
    if isinstance(hint, types.UnionType):
        return " or ".join(_name_type(option) for option in typing.get_args(hint) if option is not types.NoneType)
    names = {str: "text", int: "number", float: "number", bool: "yes or no", Path: "path", tuple: "list", list: "list"}
    kind = typing.get_origin(hint) or hint
    return names.get(kind) or ("mapping" if issubclass(kind, Mapping) else f"`{kind.__name__}`")


def _format_bounds(minimum: float | None, maximum: float | None, below: float | None) -> str:
    if below is not None:
        return f" from {minimum or 0:g} to below {below:g}"
    # Limits above 2**62 only keep a number inside its storage.
    least = f" from {int(minimum or 0):,}" if abs(minimum or 0) < 1 << 62 else ""
    return least + (f" to {int(maximum):,}" if maximum is not None and maximum < 1 << 62 else "")


def _format_default(field: SettingField) -> str:
    if field.setting.shown_default:
        return mark_options(field.setting.shown_default)
    if isinstance(field.default, bool):
        return "yes" if field.default else "no"
    if isinstance(field.default, float):
        return f"{field.default:g}"
    return "" if field.default in (None, MISSING, ()) else str(field.default)


def format_recipe_schema() -> str:
    """Return the JSON schema of recipe files, for completion and checks in editors."""
    fields = [field for cls in (Recipe, ReadRecipe, ChatRecipe) for field in list_settings(cls)]
    properties = {field.name: _describe_value(field) for field in fields}
    properties["inputs"] = {
        "description": "Files, folders, globs, URLs and data sets, in reading order.",
        "type": "array",
        "items": {"type": ["string", "object"]},
    }
    modes = next(field for field in list_settings(DedupRecipe) if field.name == "mode")
    mode = _describe_value(modes)
    properties["dedup"] = {
        "description": mode["description"],
        "anyOf": [{"enum": mode["enum"]}, _describe_class(DedupRecipe)],
    }
    properties["media"] = _describe_class(MediaRecipe)
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Recipe of batchloom prepare",
        "type": "object",
        "properties": dict(sorted(properties.items())),
        "additionalProperties": False,
    }
    return json.dumps(schema, indent=1) + "\n"


def _describe_class(cls: type) -> dict[str, Any]:
    properties = {field.name: _describe_value(field) for field in list_settings(cls)}
    for field in list_written_fields(cls):
        if field.form.prefix is not None:
            nested = _describe_class(field.hint)["properties"]
            properties |= {field.form.prefix + name: schema for name, schema in nested.items()}
    return {"type": ["object", "null"], "properties": properties, "additionalProperties": False}


def _describe_value(field: SettingField) -> dict[str, Any]:
    """Return the schema of a setting's value; short forms of texts are allowed, null is the default."""
    setting, described = field.setting, {"description": field.setting.help}
    if field.default not in (None, MISSING, ()):
        described["default"] = field.default
    if typing.get_origin(field.hint) is typing.Literal:
        return {**described, "enum": [*typing.get_args(field.hint), None]}
    if dataclasses.is_dataclass(field.hint):
        return {**described, "anyOf": [{"type": ["number", "null"]}, _describe_class(field.hint)]}
    kind = typing.get_origin(field.hint) or field.hint
    names = {str: "string", int: "integer", float: "number", bool: "boolean", tuple: "array"}
    types_of_value = [names.get(kind, "object"), "null"]
    if (setting.option_type is str and kind is not str) or kind is tuple:
        types_of_value.append("string")
    bounds = {"minimum": setting.minimum, "maximum": setting.maximum, "exclusiveMaximum": setting.below}
    if kind not in (int, float) or setting.check:
        bounds = {}
    return {**described, "type": types_of_value, **{name: value for name, value in bounds.items() if value is not None}}


# Keyword arguments

_RECIPE_CLASSES = (Recipe, ReadRecipe, ChatRecipe)
# Settings that are no keyword arguments of stream, which removes no duplicates and has an overlong of its own.
_NOT_STREAMED = ("fim", "dedup", "tokens_per_shard", "balance_subsets", "overlong", "prove")
# Settings that are no keyword arguments of doctor, which writes nothing.
_NOT_EXAMINED = ("dtype", "val_fraction", "test_fraction")


def format_preparation_keywords() -> str:
    """Return the module of the keyword arguments that functions take for the declared settings."""
    # None is unset: a recipe or the default says the value.
    recipe = {name: hint | None for name, hint in list_keywords(*_RECIPE_CLASSES).items()}
    run = {name: hint | None for name, hint in list_keywords(RunSettings, ExecutionSettings).items()}
    streamed = {name: hint for name, hint in recipe.items() if name not in _NOT_STREAMED}
    documents = {name: hint for name, hint in streamed.items() if name not in _NOT_EXAMINED}
    imports: dict[str, set[str]] = {}
    return _format_keyword_module(
        imports,
        _format_typed_dict("DocumentOptions(TypedDict", "Settings of documents; None is unset.", documents, imports),
        _format_typed_dict(
            "StreamedOptions(DocumentOptions",
            "Settings of a stream; None is unset.",
            {name: hint for name, hint in streamed.items() if name not in documents},
            imports,
        ),
        _format_typed_dict(
            "PrepareOptions(StreamedOptions",
            "Settings of a store and of the run that makes it; None is unset.",
            {name: hint for name, hint in recipe.items() if name not in streamed} | run,
            imports,
        ),
        _format_typed_dict(
            "ImportOptions(TypedDict", "Settings of an import of ids.", list_keywords(ImportSpec), imports
        ),
    )


def format_loader_keywords() -> str:
    """Return the module of the keyword arguments of a ``Loader``."""
    hints = {**typing.get_type_hints(PlanSpec), **typing.get_type_hints(BatchSpec), "device": object}
    imports: dict[str, set[str]] = {}
    summary = "Settings of the order and of batches; None is unset."
    options = {name: hint | None if hint is not object else hint for name, hint in hints.items()}
    return _format_keyword_module(imports, _format_typed_dict("LoaderOptions(TypedDict", summary, options, imports))


def _format_keyword_module(imports: dict[str, set[str]], *classes: str) -> str:
    imports.setdefault("typing", set()).update(("Literal", "TypedDict"))
    lines = [f"from {module} import {', '.join(sorted(imports[module]))}" for module in sorted(imports)]
    standard = [line for line in lines if "batchloom" not in line]
    own = [line for line in lines if "batchloom" in line]
    docstring = '"""Keyword arguments of functions; docs/write_reference.py writes them."""\n'
    return "\n".join([docstring, *standard, "", *own]) + "\n" + "".join(classes)


def _format_typed_dict(head: str, summary: str, hints: Mapping[str, Any], imports: dict[str, set[str]]) -> str:
    fields = "".join(f"    {name}: {name_hint(hint, imports)}\n" for name, hint in hints.items())
    return f'\n\nclass {head}, total=False):\n    """{summary}"""\n\n{fields}'


def list_keywords(*classes: type) -> dict[str, Any]:
    """Return the type of the keyword argument of each setting of these classes."""
    return {
        field.name: field.form.keyword or typing.get_type_hints(cls)[field.name]
        for cls in classes
        for field in list_written_fields(cls)
        if field.form.prefix is None
    }


_KEYWORD_PACKAGES = ("batchloom.preparation", "batchloom.batches")


def name_hint(hint: Any, imports: dict[str, set[str]]) -> str:
    """Return a type as source code; add the names that it needs to imports, by module."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " | ".join(name_hint(option, imports) for option in typing.get_args(hint))
    if hint is types.NoneType:
        return "None"
    text = inspect.formatannotation(hint).replace("'", '"')
    for module, name in re.findall(r"([a-z][\w.]*)\.(\w+)", text):
        # Other packages are imported through their interfaces.
        is_interface = module.startswith("batchloom.") and not module.startswith(_KEYWORD_PACKAGES)
        imports.setdefault(".".join(module.split(".")[:2]) if is_interface else module, set()).add(name)
    return re.sub(r"[a-z][\w.]*\.(\w+)", r"\1", text)


# Public names


def format_public_names(text: str) -> str:
    """Return a table of public names, and their docstrings as Sphinx inserts them.

    ``text`` lists the names after their module and a colon.
    """
    members, module = [], ""
    for word in text.split():
        if word.endswith(":"):
            module = word[:-1]
        else:
            members.append((module, word))
    rows = [(f"`{module}`", f"`{name}`", summarize(_find(module, name))) for module, name in members]
    directives = "".join(_format_directive(module, name) for module, name in members)
    return f"{format_table(('module', 'name', 'meaning'), rows)}\n~~~{{eval-rst}}\n{directives}~~~\n"


def _find(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def summarize(documented: Any) -> str:
    """Return the first paragraph of a docstring as Markdown."""
    summary = " ".join((inspect.getdoc(documented) or "").split("\n\n")[0].split())
    return re.sub(r":\w+:`~?([\w.]+)`", r"`\1`", summary).replace("``", "`")


def _format_directive(module: str, name: str) -> str:
    """Return the reStructuredText directive with which Sphinx inserts the docstring."""
    if inspect.isclass(_find(module, name)):
        return f".. autoclass:: {module}.{name}\n   :members:\n"
    return f".. autofunction:: {module}.{name}\n"


# Keys, metrics and errors


def format_batch_keys() -> str:
    """Return the table of the keys of a batch."""
    head = ("key", "dtype", "rows", "varlen", "present", "meaning")
    rows = [
        (f"`{key.name}`", key.dtype, key.rows_shape or "-", key.varlen_shape, key.presence, key.meaning)
        for key in BATCH_KEYS
    ]
    return format_table(head, rows)


def format_metrics() -> str:
    """Return the table of the metrics."""
    rows = [(f"`{metric.name}`", metric.unit, metric.scope, metric.meaning) for metric in METRICS]
    return format_table(("name", "unit", "scope", "meaning"), rows)


def format_errors() -> str:
    """Return the table of the error classes, as a tree."""
    return format_table(("class", "built-in base", "meaning"), _list_errors(errors.BatchloomError, 0))


def list_error_names() -> str:
    """Return the names of the errors that ``batchloom`` exports."""
    return format_names(name for name in importlib.import_module("batchloom").__all__ if name.endswith("Error"))


def _list_errors(error: type, depth: int) -> list[tuple[str, ...]]:
    """List a class of core/errors.py and, indented, the classes that derive from it."""
    built_in = [base for base in error.__bases__ if not issubclass(base, errors.BatchloomError)]
    names = [f"{base.__module__.split('.')[0]}.{base.__name__}".removeprefix("builtins.") for base in built_in]
    subclasses = [cls for cls in error.__subclasses__() if cls.__module__ == errors.__name__]
    row = ("&nbsp;&nbsp;" * 2 * depth + f"`{error.__name__}`", format_names(names), summarize(error))
    return [row, *(line for cls in subclasses for line in _list_errors(cls, depth + 1))]


# Schemas

_FLAG_KINDS = {
    "switch": "true or false",
    "inverted switch": "true (not trained) or false",
    "weight": "a weight; 0 is not trained, another selects the turn",
    "factor": "a factor of a turn that is trained anyway",
    "ranges": "`[{begin_offset, end_offset, train}]`; the rest of the content is not trained",
}


def format_forms(rules: Iterable[FormRule]) -> str:
    """Return the table of the forms of records."""
    return format_table(("columns", "optional roles", "become"), map(_describe_form, rules))


def _describe_form(rule: FormRule) -> tuple[str, ...]:
    required = " + ".join(" or ".join(f"`{name}`" for name in names) for names in rule.required.values())
    return required, format_names(rule.optional), rule.result


def format_roles() -> str:
    """Return the table of the roles with the columns that are read for them, in any kind of record."""
    columns: dict[str, dict[str, None]] = {role: {} for role in ROLE_MEANINGS}
    for rule in (*FORM_RULES, INTERLEAVED_RULE):
        for role, names in (*rule.required.items(), *rule.optional.items()):
            columns[role] |= dict.fromkeys(names)
    rows = [(f"`{role}`", format_names(columns[role]), meaning) for role, meaning in ROLE_MEANINGS.items()]
    return format_table(("role", "columns", "meaning"), rows)


def format_senders() -> str:
    """Return the table of the roles that records name otherwise."""
    rows = [(f"`{sender}`", role) for sender, role in sorted(ROLE_BY_SENDER.items()) if sender != role]
    return format_table(("role in the records", "becomes"), rows)


def format_train_flags() -> str:
    """Return the table of the train flags."""
    rows = [
        (f"`{name}`", rule.library, _FLAG_KINDS[rule.kind], "yes" * rule.is_assistant_only, "yes" * rule.is_for_parts)
        for name, rule in TRAIN_FLAGS.items()
    ]
    return format_table(("flag", "of", "value", "selects assistant turns only", "in parts"), rows)


def list_metadata_columns() -> str:
    """Return the names of the columns that are left out without a report."""
    return format_names(sorted(COLUMN_TABLES["text"].metadata))


def list_metadata_keys() -> str:
    """Return the keys of messages alone that are left out without a report."""
    return format_names(sorted(MESSAGE_KEYS.metadata - COLUMN_TABLES["text"].metadata))


def format_unsupported_keys() -> str:
    """Return the table of the unsupported keys, each once, with the kinds of records that it belongs to."""
    kinds: dict[tuple[str, Any], list[str]] = {}
    for kind, table in COLUMN_TABLES.items():
        for name, entry in table.unsupported.items():
            kinds.setdefault((name, entry), []).append(kind)
    keys = [(name, f"column: {', '.join(names)}", entry) for (name, entry), names in kinds.items()]
    keys += [(name, "message", entry) for name, entry in MESSAGE_KEYS.unsupported.items()]
    keys += [(name, "part of a content", entry) for name, entry in PART_KEYS.items()]
    rows = [(f"`{name}`", place, entry.library, entry.effect, entry.remedy) for name, place, entry in keys]
    return format_table(("key", "of", "library", "its effect there", "instead"), rows)


# Cleaning steps


def format_cleaning_steps() -> str:
    """Return a section for each cleaning step, with its settings."""
    sections = []
    for name, step in KNOWN_STEPS.items():
        summary, meanings = _parse_attributes(step.settings)
        packages = sorted({f"`{package}`" for _, package in step.requirements})
        needs = f" Needs {' and '.join(packages)} (extra `clean`)." if packages else ""
        help_text = step.help[0].upper() + step.help[1:]
        rows = [
            (f"`{field.name}`", _format_step_default(field), meanings[field.name])
            for field in dataclasses.fields(step.settings)
        ]
        notes = "" if summary.startswith("Settings of the step") else f"\n{summary}\n"
        table = format_table(("setting", "default", "meaning"), rows)
        sections.append(f"## `{name}`\n\n{help_text}.{needs}\n{notes}\n{table}")
    return "\n".join(sections)


def _parse_attributes(settings: type) -> tuple[str, dict[str, str]]:
    """Return the first paragraph of a docstring, and the meaning of each attribute."""
    text = inspect.getdoc(settings) or ""
    summary, _, attributes = text.partition("\nAttributes:\n")
    meanings = {}
    for match in re.finditer(r"^    (\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE):
        meaning = " ".join(match[2].split()).rstrip(".").replace("``", "`")
        meanings.update(dict.fromkeys(match[1].split(", "), meaning[0].upper() + meaning[1:] + "."))
    return " ".join(summary.split()).replace("``", "`"), meanings


def _format_step_default(field: "dataclasses.Field[Any]") -> str:
    value = {} if field.default is MISSING else field.default
    if value is None or (isinstance(value, (dict, tuple)) and not value):
        return ""
    plain = json.dumps(value, ensure_ascii=False)
    return f"`{plain if isinstance(value, (tuple, bool)) else value}`"


# Command line


def format_commands() -> str:
    """Return the table of the commands."""
    rows = [(f"[`{name}`](#batchloom-{name})", entry[1]) for name, entry in COMMANDS.items()]
    return format_table(("command", "result"), rows)


def format_general_options() -> str:
    """Return the table of the options without a command, or of every command."""
    context = click.Context(APP, info_name="batchloom", **APP.context_settings)
    return _format_options(context, [*APP.get_params(context), QUIET])


def format_exit_codes() -> str:
    """Return the table of the exit codes."""
    return format_table(("code", "meaning"), [(str(int(code)), code.meaning) for code in errors.ExitCode])


def format_command_sections() -> str:
    """Return a section for each command."""
    return "\n".join(map(_format_command, COMMANDS))


def _format_command(name: str) -> str:
    command = load_command(name)
    context = click.Context(command, info_name=f"batchloom {name}")
    params = [param for param in command.params if param is not QUIET]
    arguments = [param for param in params if isinstance(param, click.Argument)]
    options = [param for param in params if isinstance(param, click.Option)]
    usage = " ".join([context.info_name or "", *command.collect_usage_pieces(context)])
    parts = [
        f"## batchloom {name}\n",
        f"{mark_options(inspect.cleandoc(command.help or ''))}\n",
        _format_block("text", [usage]),
    ]
    if arguments:
        parts.append(format_table(("argument", "meaning"), [_describe_argument(param, context) for param in arguments]))
    # Options without a heading come first, as in the help text.
    for panel in dict.fromkeys([None, *(getattr(option, "panel", None) for option in options)]):
        members = [option for option in options if getattr(option, "panel", None) == panel]
        if members:
            parts += [f"**{panel}**\n"] * (panel is not None)
            parts.append(_format_options(context, members))
    parts.append(_format_block("sh", (command.epilog or "").splitlines()))
    return "\n".join(parts)


def _describe_argument(param: click.Argument, context: click.Context) -> tuple[str, str]:
    placeholder, help_text = param.get_help_record(context) or ("", "")
    return f"`{placeholder}`", mark_options(help_text.replace("  [required]", " Required."))


def _format_options(context: click.Context, options: Iterable[click.Parameter]) -> str:
    rows = [
        (
            format_names([*option.opts, *option.secondary_opts]),
            _format_option_value(option),
            mark_options(_format_option_default(option, context)),
            mark_options(option.help or ""),
        )
        for option in options
        if isinstance(option, click.Option)
    ]
    return format_table(("option", "value", "default", "meaning"), rows)


def _format_option_value(option: click.Option) -> str:
    if option.is_flag:
        return ""
    return format_names((option.metavar or "").strip("[]").split("|"))


def _format_option_default(option: click.Option, context: click.Context) -> str:
    if option.required:
        return "required"
    default = option.get_help_extra(context).get("default", "")
    # click puts a default that is described in words in parentheses.
    return default[1:-1] if default.startswith("(") else default


def _format_block(language: str, lines: Sequence[str]) -> str:
    return f"```{language}\n" + "".join(f"{line}\n" for line in lines) + "```\n"


PARTS: dict[str, Callable[..., str]] = {
    "settings": format_settings,
    "names": format_public_names,
    "error-names": list_error_names,
    "batch-keys": format_batch_keys,
    "metrics": format_metrics,
    "errors": format_errors,
    "forms": lambda: format_forms((*FORM_RULES[:-1], INTERLEAVED_RULE, FORM_RULES[-1])),
    "prompt-forms": lambda: format_forms(PROMPT_RULES),
    "roles": format_roles,
    "senders": format_senders,
    "message-names": lambda: format_names(MESSAGE_MAPPING_NAMES),
    "train-flags": format_train_flags,
    "metadata-columns": list_metadata_columns,
    "metadata-keys": list_metadata_keys,
    "unsupported-keys": format_unsupported_keys,
    "cleaning-steps": format_cleaning_steps,
    "commands": format_commands,
    "general-options": format_general_options,
    "exit-codes": format_exit_codes,
    "command-sections": format_command_sections,
}


def fill_page(name: str) -> str:
    """Return a page with the parts that the code declares now."""
    return _PART_PATTERN.sub(_fill_part, (REFERENCE / name).read_text())


def _fill_part(match: re.Match[str]) -> str:
    begin, name, arguments = match.groups()
    text = PARTS[name](*([arguments] if arguments.strip() else []))
    return f"{begin}{text.rstrip()}\n\n<!-- end -->"


PAGES: dict[str, Callable[[], str]] = {
    "recipe.schema.json": format_recipe_schema,
    **{
        name: partial(fill_page, name)
        for name in (
            *("settings.md", "cli.md", "python.md", "batch-keys.md"),
            *("metrics.md", "errors.md", "schemas.md", "cleaning-steps.md"),
        )
    },
}

_SOURCE = Path(__file__).parents[1] / "src/batchloom"
KEYWORD_MODULES = {
    _SOURCE / "preparation/keywords.py": format_preparation_keywords,
    _SOURCE / "batches/loading/loader_keywords.py": format_loader_keywords,
}

if __name__ == "__main__":
    for page, make_page in PAGES.items():
        (REFERENCE / page).write_text(make_page())
    for module_path, make_module in KEYWORD_MODULES.items():
        module_path.write_text(make_module())
