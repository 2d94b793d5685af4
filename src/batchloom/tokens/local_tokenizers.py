"""Tokenizers from files: a tokenizer.json, the folder of one, or what a store keeps."""

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
    """The tokenizer in a file or a folder.

    Raises:
        TokenizerError: nothing there, or no tokenizer.
    """
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
        raise TokenizerError(f"{path} is a store's tokenizer, whose end token is settled: leave --end-token out")
    return restore_tokenizer(state)


def make_json_tokenizer(
    name: str, raw: Mapping[str, Any], hints: TokenizerHints, end_token: str | None
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
    cleaned = clean_tokenizer_json(add_declared_tokens(raw, hints), name)
    words = read_vocabulary(cleaned, name)
    control = [token["content"] for token in cleaned["added_tokens"] if token["special"]]
    end = choose_end_token(words, control, hints, end_token, name)
    definition = make_definition(cleaned, name, end=end, bos=choose_bos_token(cleaned, words, hints))
    return JsonTokenizer(name, definition, chat=hints.chat)


def read_tokenizer_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        TokenizerError: it cannot be read, or is not a JSON object.
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
    """What the files beside a tokenizer.json add to it.

    Raises:
        TokenizerError: one of them cannot be read.
    """
    config, special = (
        read_tokenizer_json(folder / name) if (folder / name).is_file() else {} for name in _SIDECAR_FILES
    )
    return read_hints(config, special, _read_template_files(folder))


def _read_template_files(folder: Path) -> dict[str, str]:
    """Chat templates in files of their own, as transformers saves and finds them."""
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
        raise TokenizerError(f"{path} is no chat template: it cannot be read ({error})") from error


def _get_base_name(path: Path) -> str:
    """The last part of a path: where a file lay says nothing about the tokenizer."""
    return path.absolute().name or path.resolve().name
