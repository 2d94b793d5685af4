"""Tokenizers from files: a tokenizer.json, its folder, or the state in a store."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from batchloom.core.errors import TokenizerError
from batchloom.core.files import describe_os_error, read_regular_file, suggest_path
from batchloom.tokens.control_tokens import (
    TokenizerHints,
    add_declared_tokens,
    choose_bos_token,
    choose_end_token,
    parse_named_templates,
    read_hints,
)
from batchloom.tokens.json_tokenizer import JsonTokenizer
from batchloom.tokens.tokenizer import Tokenizer
from batchloom.tokens.tokenizer_definition import (
    clean_tokenizer_json,
    make_definition,
    read_vocabulary,
)
from batchloom.tokens.tokenizer_state import restore_tokenizer

_TOKENIZER_FILE, _STATE_FILE = "tokenizer.json", "tokenizer_state.json"
_TEMPLATE_FILE = "chat_template.jinja"
_REMEDY = "give the path of a tokenizer.json that `tokenizers` or `transformers` saved, or of its folder"
# The largest vocabularies take some tens of MiB.
_MAX_BYTES = 1 << 30
_SIDECAR_FILES = ("tokenizer_config.json", "special_tokens_map.json")


def load_tokenizer_from_path(path: Path, end_token: str | None) -> Tokenizer:
    """Load the tokenizer in a file or folder; raise TokenizerError if there is none."""
    if path.is_dir():
        return _load_from_folder(path, end_token)
    raw = read_tokenizer_json(path)
    if "state_version" in raw:
        return _load_from_store(raw, path, end_token)
    return make_json_tokenizer(_get_base_name(path), raw, read_sidecar_hints(path.parent), end_token)


def _load_from_folder(folder: Path, end_token: str | None) -> Tokenizer:
    file, state = folder / _TOKENIZER_FILE, folder / _STATE_FILE
    if file.is_file():
        return make_json_tokenizer(
            _get_base_name(folder), read_tokenizer_json(file), read_sidecar_hints(folder), end_token
        )
    if state.is_file():
        return _load_from_store(read_tokenizer_json(state), state, end_token)
    other_files = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "tekken.json")
    present_files = [name for name in other_files if (folder / name).is_file()]
    raise TokenizerError(
        f"{folder} holds no tokenizer.json"
        + (f", only {', '.join(present_files)}" if present_files else "")
        + ": load it with transformers' AutoTokenizer and save it with save_pretrained, which "
        "writes one"
    )


def _load_from_store(state: Mapping[str, Any], path: Path, end_token: str | None) -> Tokenizer:
    if end_token is not None:
        raise TokenizerError(f"{path} is a store's tokenizer, whose end token is fixed: leave --end-token out")
    return restore_tokenizer(state)


def make_json_tokenizer(
    name: str, raw: Mapping[str, Any], hints: TokenizerHints, end_token: str | None
) -> JsonTokenizer:
    """Build a tokenizer from a parsed tokenizer.json and its sidecar files.

    Args:
        name: name of the tokenizer, also for error messages.
        raw: the parsed tokenizer.json.
        hints: settings in its sidecar files.
        end_token: the end-of-document token, None for the tokenizer's own.

    Raises:
        TokenizerError: not a tokenizer.json, or no end-of-document token.
    """
    cleaned = clean_tokenizer_json(add_declared_tokens(raw, hints), name)
    words = read_vocabulary(cleaned, name)
    control = [token["content"] for token in cleaned["added_tokens"] if token["special"]]
    end = choose_end_token(words, control, hints, end_token, name)
    definition = make_definition(cleaned, name, end=end, bos=choose_bos_token(cleaned, words, hints))
    return JsonTokenizer(name, definition, chat=hints.chat)


def read_tokenizer_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file.

    Raises:
        TokenizerError: the file cannot be read, or is not a JSON object.
    """
    try:
        value = orjson.loads(read_regular_file(path, _MAX_BYTES))
    except FileNotFoundError as error:
        raise TokenizerError(
            f"there is no file {path}; give the path of a tokenizer.json or of the folder of one"
            f"{suggest_path(str(path))}"
        ) from error
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {describe_os_error(error)}") from error
    except orjson.JSONDecodeError as error:
        raise TokenizerError(f"{path} is not JSON: {error}; {_REMEDY}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} is not a tokenizer.json: it holds a {type(value).__name__}; {_REMEDY}")
    return value


def read_sidecar_hints(folder: Path) -> TokenizerHints:
    """Read the settings in the sidecar files of a tokenizer.json.

    Raises:
        TokenizerError: a file cannot be read.
    """
    config, special = (
        read_tokenizer_json(folder / name) if (folder / name).is_file() else {} for name in _SIDECAR_FILES
    )
    return read_hints(config, special, _read_template_files(folder))


def _read_template_files(folder: Path) -> dict[str, str]:
    """Read chat templates in their own files, at the paths that transformers uses."""
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    files = {"default": folder / _TEMPLATE_FILE, **{file.stem: file for file in more}}
    templates = {name: _read_text(file) for name, file in files.items() if file.is_file()}
    legacy = folder / "chat_template.json"
    if "default" not in templates and legacy.is_file():
        templates |= parse_named_templates(read_tokenizer_json(legacy).get("chat_template"))
    return templates


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} is not a chat template: it cannot be read ({error})") from error


def _get_base_name(path: Path) -> str:
    """Return the last component of a path; its folder does not describe the tokenizer."""
    return path.absolute().name or path.resolve().name
