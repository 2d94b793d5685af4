"""The command line that prepares the examined inputs, quoted for a shell."""

import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields

from batchloom.analysis.doctor.findings import SourceFacts
from batchloom.preparation import ChatRecipe, ReadRecipe, Recipe

_DEFAULT_OUT = "store"


def quote_for_shell(word: str) -> str:
    r"""Quote a word for a shell; unprintable characters are escaped: ``$'a\x1bb'``."""
    if word.isprintable():
        return shlex.quote(word)
    plain = os.fsencode(word)
    spelled = "".join(chr(byte) if 32 <= byte < 127 and byte not in b"'\\" else f"\\x{byte:02x}" for byte in plain)
    return f"$'{spelled}'"


def make_prepare_commands(
    recipe: Recipe, tokenizer: str, inputs: Sequence[str], sources: Sequence[SourceFacts]
) -> list[str]:
    """Return the prepare commands: one, or one per distinct ``--map``.

    ``inputs`` holds names for the command line; an input that cannot be named there has an empty name.
    """
    if not all(inputs):
        return []
    suggested = {source.suggestion for source in sources if source.suggestion}
    refused = [source for source in sources if source.fault and not source.suggestion]
    if not suggested:
        return [_make_prepare_command(recipe, tokenizer, inputs, "")]
    if len(suggested) == 1 and not refused and all(source.suggestion for source in sources):
        return [_make_prepare_command(recipe, tokenizer, inputs, suggested.pop())]
    by_map: dict[str, list[str]] = {}
    for source in sources:
        if source not in refused:
            by_map.setdefault(source.suggestion or "", []).append(source.path)
    return [
        _make_prepare_command(recipe, tokenizer, paths, mapping, number)
        for number, (mapping, paths) in enumerate(by_map.items(), 1)
    ]


def _make_prepare_command(
    recipe: Recipe, tokenizer: str, inputs: Iterable[str], suggestion: str, number: int = 0
) -> str:
    words = [
        "batchloom",
        "prepare",
        *inputs,
        "--out",
        _choose_out_folder(number),
        "--tokenizer",
        tokenizer,
    ]
    mapping = suggestion or ",".join(f"{role}={column}" for role, column in recipe.reading.mapping.items())
    if mapping:
        words += ["--map", mapping]
    if recipe.reading.ignore:
        words += ["--ignore", ",".join(recipe.reading.ignore)]
    if (media := recipe.reading.media) is not None:
        words += ["--processor", media.processor]
        words += ["--data-folder", media.data_folder] if media.data_folder is not None else []
        words += ["--media", media.keep] if media.keep != "reference" else []
    for spec, names in (
        (recipe, ("end_token", "max_bad")),
        (recipe.reading, ("text_field", "split_on")),
        (recipe.chat, ("template", "train_on", "max_tokens", "overlong")),
    ):
        for name in names:
            value = getattr(spec, name)
            if value != _get_default(spec, name):
                words += [f"--{name.replace('_', '-')}", _format_setting(name, value)]
    if recipe.follow_links:
        words.append("--follow-links")
    if not recipe.reading.normalize:
        words.append("--no-normalize")
    return " ".join(map(quote_for_shell, words))


def _format_setting(name: str, value: object) -> str:
    r"""Format a value for the command line: a newline in a marker as ``\n``."""
    text = str(value)
    return text.replace("\n", "\\n").replace("\t", "\\t") if name == "split_on" else text


def _get_default(spec: Recipe | ReadRecipe | ChatRecipe, name: str) -> object:
    default = next(field.default for field in fields(spec) if field.name == name)
    return None if default is MISSING else default


def _choose_out_folder(number: int) -> str:
    """Return the name of a folder that does not exist yet."""
    name, count = f"{_DEFAULT_OUT}-{number}" if number else _DEFAULT_OUT, 2
    folder = name
    while os.path.lexists(folder):
        folder, count = f"{name}-{count}", count + 1
    return folder
