"""Tokenizers from files: a tokenizer.json, the folder of one, or what a store keeps."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from batchloom.core.errors import TokenizerError
from batchloom.core.files import because, nearest_path, read_regular
from batchloom.tokens.control_tokens import (
    Hints,
    choose_bos,
    choose_end,
    named_templates,
    read_hints,
    with_declared,
)
from batchloom.tokens.json_tokenizer import JsonTokenizer
from batchloom.tokens.tokenizer import Tokenizer
from batchloom.tokens.tokenizer_definition import clean, define, vocabulary
from batchloom.tokens.tokenizer_state import tokenizer_from_state

_TOKENIZER, _STATE = "tokenizer.json", "tokenizer_state.json"
_TEMPLATE = "chat_template.jinja"
_REMEDY = (
    "give the path of a tokenizer.json that `tokenizers` or `transformers` saved, or of its folder"
)
# The largest vocabularies take some tens of MiB.
_MOST_BYTES = 1 << 30
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json")


def tokenizer_from_path(path: Path, end_token: str | None) -> Tokenizer:
    """The tokenizer in a file or a folder.

    Raises:
        TokenizerError: nothing there, or no tokenizer.
    """
    if path.is_dir():
        return _from_folder(path, end_token)
    raw = read_object(path)
    if "state_version" in raw:
        return _from_store(raw, path, end_token)
    return from_parts(_name(path), raw, read_beside(path.parent), end_token)


def _from_folder(folder: Path, end_token: str | None) -> Tokenizer:
    file, state = folder / _TOKENIZER, folder / _STATE
    if file.is_file():
        return from_parts(_name(folder), read_object(file), read_beside(folder), end_token)
    if state.is_file():
        return _from_store(read_object(state), state, end_token)
    known = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "tekken.json")
    there = [name for name in known if (folder / name).is_file()]
    raise TokenizerError(
        f"{folder} holds no tokenizer.json"
        + (f", only {', '.join(there)}" if there else "")
        + ": load it with transformers' AutoTokenizer and save it with save_pretrained, which "
        "writes one"
    )


def _from_store(state: Mapping[str, Any], path: Path, end_token: str | None) -> Tokenizer:
    if end_token is not None:
        raise TokenizerError(
            f"{path} is a store's tokenizer, whose end token is settled: leave --end-token out"
        )
    return tokenizer_from_state(state)


def from_parts(
    name: str, raw: Mapping[str, Any], hints: Hints, end_token: str | None
) -> JsonTokenizer:
    """A tokenizer from a parsed tokenizer.json and what its config says.

    Args:
        name: what the tokenizer is called, also in errors.
        raw: the parsed tokenizer.json.
        hints: what lies beside it.
        end_token: the end-of-document token, None for the tokenizer's own.

    Raises:
        TokenizerError: not a tokenizer.json, or none of its tokens ends a document.
    """
    cleaned = clean(with_declared(raw, hints), name)
    words = vocabulary(cleaned, name)
    control = [token["content"] for token in cleaned["added_tokens"] if token["special"]]
    end = choose_end(words, control, hints, end_token, name)
    definition = define(cleaned, name, end=end, bos=choose_bos(cleaned, words, hints))
    return JsonTokenizer(name, definition, chat=hints.chat)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        TokenizerError: it cannot be read, or is not a JSON object.
    """
    try:
        value = orjson.loads(read_regular(path, _MOST_BYTES))
    except FileNotFoundError as error:
        raise TokenizerError(
            f"there is no file {path}; give the path of a tokenizer.json or of the folder of one"
            f"{nearest_path(str(path))}"
        ) from error
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {because(error)}") from error
    except orjson.JSONDecodeError as error:
        raise TokenizerError(f"{path} is not JSON: {error}; {_REMEDY}") from error
    if not isinstance(value, dict):
        raise TokenizerError(
            f"{path} is not a tokenizer.json: it holds a {type(value).__name__}; {_REMEDY}"
        )
    return value


def read_beside(folder: Path) -> Hints:
    """What the files beside a tokenizer.json add to it.

    Raises:
        TokenizerError: one of them cannot be read.
    """
    config, special = (
        read_object(folder / name) if (folder / name).is_file() else {} for name in _BESIDE
    )
    return read_hints(config, special, _templates(folder))


def _templates(folder: Path) -> dict[str, str]:
    """Chat templates in files of their own, as transformers saves and finds them."""
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    files = {"default": folder / _TEMPLATE, **{file.stem: file for file in more}}
    templates = {name: _text(file) for name, file in files.items() if file.is_file()}
    legacy = folder / "chat_template.json"
    if "default" not in templates and legacy.is_file():
        templates |= named_templates(read_object(legacy).get("chat_template"))
    return templates


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} is no chat template: it cannot be read ({error})") from error


def _name(path: Path) -> str:
    """The last part of a path: where a file lay says nothing about the tokenizer."""
    return path.absolute().name or path.resolve().name
