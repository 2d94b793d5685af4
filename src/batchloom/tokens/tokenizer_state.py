"""Restoration of tokenizers from the state in a store, without network or trust."""

from collections.abc import Mapping
from typing import Any

from batchloom.core.errors import TokenizerError
from batchloom.core.settings import suggest
from batchloom.tokens.bytes_tokenizer import ByteTokenizer
from batchloom.tokens.json_tokenizer import JsonTokenizer
from batchloom.tokens.tokenizer import ChatTemplates, Tokenizer
from batchloom.tokens.tokenizer_definition import (
    clean_tokenizer_json,
    make_definition,
    read_vocabulary,
)
from batchloom.tokens.unknown_tokenizer import restore_unknown_tokenizer

STATE_VERSION = 1
_STATE_KEYS: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "fingerprint": (str,),
    "end_id": (int,),
    "bos_id": (int, type(None)),
    "tokenizer": (dict,),
}


def restore_tokenizer(state: Mapping[str, Any]) -> Tokenizer:
    """Restore a tokenizer from its ``state()``; needs no network and no file.

    Raises:
        TokenizerError: an invalid state, one of another version, or one that was changed.
    """
    if not isinstance(state, Mapping) or "state_version" not in state:
        raise TokenizerError("this is not the state of a tokenizer: it has no state_version")
    version, kind = state["state_version"], state.get("kind")
    if version != STATE_VERSION:
        raise TokenizerError(
            f"the tokenizer's state has version {version!r:.40}, and this batchloom reads version "
            f"{STATE_VERSION}: use the batchloom that wrote it, or a newer one"
        )
    if kind == "bytes":
        tokenizer: Tokenizer = ByteTokenizer()
    elif kind == "none":
        tokenizer = restore_unknown_tokenizer(state)
    elif kind == "tokenizer.json":
        tokenizer = _restore_json_tokenizer(state)
    else:
        raise TokenizerError(f"the tokenizer's state is of unknown kind {kind!r:.40}")
    if tokenizer.fingerprint != state.get("fingerprint"):
        raise TokenizerError(
            f"the state of tokenizer {tokenizer.name!r:.80} was changed: its fingerprint is "
            f"{tokenizer.fingerprint}, but it records {state.get('fingerprint')!r:.40}; restore the "
            "file from the original store"
        )
    return tokenizer


def _restore_json_tokenizer(state: Mapping[str, Any]) -> JsonTokenizer:
    allowed_keys = {"state_version", "kind", "chat", *_STATE_KEYS}
    problems = [f"unknown {key!r:.40}{suggest(str(key), allowed_keys)}" for key in state if key not in allowed_keys]
    for key, types in _STATE_KEYS.items():
        value = state.get(key)
        if key not in state and type(None) not in types:
            problems.append(f"{key} is missing")
        elif not isinstance(value, types) or isinstance(value, bool):
            problems.append(f"{key} is {value!r:.40}")
    chat = state.get("chat", {"templates": {}, "tokens": {}})
    if not _is_chat_state(chat):
        problems.append(f"chat is {chat!r:.40}")
    if problems:
        raise TokenizerError(f"the tokenizer's state is damaged: {'; '.join(problems)}")
    label = f"the state of tokenizer {state['name']!r:.80}"
    cleaned = clean_tokenizer_json(state["tokenizer"], label)
    by_id = {number: word for word, number in read_vocabulary(cleaned, label).items()}
    bos_id = state.get("bos_id")
    end, bos = by_id.get(state["end_id"]), None if bos_id is None else by_id.get(bos_id)
    if end is None or (bos is None and bos_id is not None):
        raise TokenizerError(
            f"{label} is damaged: its end_id {state['end_id']} or bos_id {bos_id} is not in its vocabulary"
        )
    definition = make_definition(cleaned, label, end=end, bos=bos)
    return JsonTokenizer(state["name"], definition, chat=ChatTemplates(**chat))


def _is_chat_state(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and set(value) == {"templates", "tokens"}
        and all(
            isinstance(part, Mapping) and all(isinstance(text, str) for pair in part.items() for text in pair)
            for part in value.values()
        )
    )
