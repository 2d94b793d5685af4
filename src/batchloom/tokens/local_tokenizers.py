"""Tokenizers from files: a tokenizer.json, its folder, or the state in a store."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import orjson

from batchloom.core.errors import TokenizerError
from batchloom.core.files import describe_os_error, read_regular_file, suggest_path
from batchloom.core.settings import suggest
from batchloom.core.wording import format_list
from batchloom.tokens.json_tokenizer import JsonTokenizer
from batchloom.tokens.tokenizer import ByteTokenizer, ChatTemplates, Tokenizer, UnknownTokenizer
from batchloom.tokens.tokenizer_definition import clean_tokenizer_json, read_vocabulary

# Tokens that end a document in pretraining, even if a chat model's config names another end.
_DOCUMENT_END_TOKENS = ("<|end_of_text|>", "<|endoftext|>", "<｜end▁of▁sentence｜>")  # noqa: RUF001
_FALLBACK_END_TOKENS = ("</s>", "<eos>", "<|eos|>")
# Tokens that chat templates access by these names (SPECIAL_TOKENS_ATTRIBUTES of transformers).
_SPECIAL_TOKEN_KEYS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# Ends of a chat turn. A config with one of these as its eos token describes conversations, not documents.
_TURN_END_TOKENS = frozenset(
    ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|eot|>", "<turn|>")
)
_TOKENIZER_FILE = "tokenizer.json"
_STATE_FILE = "tokenizer_state.json"
_TEMPLATE_FILE = "chat_template.jinja"
_REMEDY = "give the path of a tokenizer.json that `tokenizers` or `transformers` saved, or of its folder"
# The largest vocabularies take some tens of MiB.
_MAX_BYTES = 1 << 30
_SIDECAR_FILES = ("tokenizer_config.json", "special_tokens_map.json")
STATE_VERSION = 1
# Value of ``end_token`` for the ``eos_token`` of the sidecar files.
END_BY_CONFIG = "config"


class _JsonState(msgspec.Struct, forbid_unknown_fields=True):
    state_version: int
    kind: str
    name: str
    fingerprint: str
    end_id: int
    tokenizer: dict[str, Any]
    bos_id: int | None = None
    chat: ChatTemplates = ChatTemplates()


class _UnknownState(msgspec.Struct):
    vocab_size: int
    end_id: int


S = TypeVar("S", _JsonState, _UnknownState)


@dataclass(frozen=True, slots=True)
class TokenizerHints:
    """Settings in tokenizer_config.json and special_tokens_map.json."""

    eos: str | None = None
    # Token to prepend, only if the config says that models expect it.
    bos: str | None = None
    # Added tokens by id, as in ``added_tokens_decoder``.
    declared: Mapping[str, Any] = field(default_factory=dict)
    chat: ChatTemplates = field(default_factory=ChatTemplates)


def parse_named_templates(value: object) -> dict[str, str]:
    """Return a config's chat templates by name; it may be a text, a list or an object."""
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        pairs = [(e.get("name"), e.get("template")) for e in value if isinstance(e, Mapping)]
    else:
        pairs = list(value.items()) if isinstance(value, Mapping) else []
    return {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}


def _get_token_content(token: object) -> str | None:
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def add_declared_tokens(raw: Mapping[str, Any], hints: TokenizerHints) -> dict[str, Any]:
    """Add the config's added tokens to ``raw``, as transformers does on loading."""
    added = raw.get("added_tokens")
    if not hints.declared or not isinstance(added, list):
        return dict(raw)
    tokens = [dict(token) if isinstance(token, Mapping) else token for token in added]
    by_content = {token.get("content"): token for token in tokens if isinstance(token, dict)}
    for number, token in hints.declared.items():
        if not isinstance(token, Mapping) or not str(number).isdecimal():
            continue
        existing_token = by_content.get(token.get("content"))
        if existing_token is None:
            tokens.append({**token, "id": int(number)})
        elif token.get("special"):
            existing_token["special"] = True
    return {**raw, "added_tokens": tokens}


def choose_end_token(
    words: Mapping[str, int], control: list[str], hints: TokenizerHints, end_token: str | None, label: str
) -> str:
    """Choose the end-of-document token.

    It is ``end_token`` if given, for ``config`` the config's eos token; else the pretraining token that the
    vocabulary has; else the config's eos token, unless that ends a chat turn and ``</s>`` or similar exists.
    """
    if end_token == END_BY_CONFIG:
        return _require_config_end(words, control, hints, label)
    if end_token is not None:
        if end_token in words:
            return end_token
        raise TokenizerError(
            f"{label} has no token {end_token!r} to end documents with{suggest(end_token, control)}; "
            f"{_format_tokens(control)}"
        )
    eos = [hints.eos] if hints.eos in words and hints.eos is not None else []
    first = [token for token in eos if token not in _TURN_END_TOKENS]
    candidates = [token for token in _DOCUMENT_END_TOKENS if token in control] + first
    candidates += [token for token in _FALLBACK_END_TOKENS if token in control] + eos
    if not candidates:
        raise TokenizerError(
            f"{label} does not say which token ends a document: pass --end-token; {_format_tokens(control)}"
        )
    return candidates[0]


def _require_config_end(words: Mapping[str, int], control: list[str], hints: TokenizerHints, label: str) -> str:
    """Return the config's eos token, which TRL and Megatron append to documents."""
    if hints.eos in words and hints.eos is not None:
        return hints.eos
    problem = (
        "no file next to it names an eos_token" if hints.eos is None else f"{hints.eos!r} is not in its vocabulary"
    )
    raise TokenizerError(
        f"--end-token {END_BY_CONFIG} is the eos_token of tokenizer_config.json, and {label} has none ({problem}): "
        f"give the token itself, or leave --end-token out; {_format_tokens(control)}"
    )


def _format_tokens(control: list[str]) -> str:
    if not control:
        return "it has no special tokens"
    return f"its special tokens are {format_list([*map(repr, control)], 20)}"


def choose_bos_token(raw: Mapping[str, Any], words: Mapping[str, int], hints: TokenizerHints) -> str | None:
    """Return the token that models expect before a text document, or None.

    It is the token that the post-processor prepends, or the config's bos token if the config has
    ``"add_bos_token": true``.
    """
    token = _find_prepended_token(raw.get("post_processor")) or hints.bos
    return token if token in words else None


def _find_prepended_token(processor: object) -> str | None:
    """Return the special token that a post-processor prepends to a single sequence."""
    match processor:
        case {"type": "BertProcessing" | "RobertaProcessing", "cls": [token, *_]}:
            return str(token)
        case {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": name}}, *_], **template}:
            # A template may have its own name for a token.
            special_tokens = template.get("special_tokens")
            entry = special_tokens.get(str(name)) if isinstance(special_tokens, Mapping) else None
            match entry:
                case {"tokens": [token, *_]}:
                    return str(token)
            return str(name)
        case {"processors": [*parts]}:
            return next((token for part in parts if (token := _find_prepended_token(part))), None)
    return None


def load_tokenizer_from_path(path: Path, end_token: str | None) -> Tokenizer:
    """Load the tokenizer in a file or folder; raise TokenizerError if there is none."""
    file = _find_tokenizer_file(path) if path.is_dir() else path
    raw = read_tokenizer_json(file)
    if "state_version" in raw:
        if end_token is not None:
            raise TokenizerError(f"{file} is a store's tokenizer, whose end token is fixed: leave --end-token out")
        return restore_tokenizer(raw)
    # The name is the last component of the path: its folder does not describe the tokenizer.
    name = path.absolute().name or path.resolve().name
    return make_json_tokenizer(name, raw, read_sidecar_hints(file.parent), end_token)


def _find_tokenizer_file(folder: Path) -> Path:
    for name in (_TOKENIZER_FILE, _STATE_FILE):
        if (folder / name).is_file():
            return folder / name
    other_files = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "tekken.json")
    present_files = [name for name in other_files if (folder / name).is_file()]
    raise TokenizerError(
        f"{folder} holds no tokenizer.json"
        + (f", only {', '.join(present_files)}" if present_files else "")
        + ": load it with transformers' AutoTokenizer and save it with save_pretrained, which "
        "writes one"
    )


def make_json_tokenizer(
    name: str, raw: Mapping[str, Any], hints: TokenizerHints, end_token: str | None
) -> JsonTokenizer:
    """Build a tokenizer from a tokenizer.json; ``end_token`` None means its own."""
    cleaned = clean_tokenizer_json(add_declared_tokens(raw, hints), name)
    words = read_vocabulary(cleaned, name)
    control = [token["content"] for token in cleaned["added_tokens"] if token["special"]]
    end = choose_end_token(words, control, hints, end_token, name)
    return JsonTokenizer(name, cleaned, words, end=end, bos=choose_bos_token(cleaned, words, hints), chat=hints.chat)


def read_tokenizer_json(path: Path) -> dict[str, Any]:
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
    config, special_map = (
        read_tokenizer_json(folder / name) if (folder / name).is_file() else {} for name in _SIDECAR_FILES
    )
    special_tokens = {}
    for name in _SPECIAL_TOKEN_KEYS:
        token = _get_token_content(config.get(name)) or _get_token_content(special_map.get(name))
        if token is not None:
            special_tokens[name] = token
    declared = config.get("added_tokens_decoder")
    templates = _read_template_files(folder) or parse_named_templates(config.get("chat_template"))
    return TokenizerHints(
        eos=special_tokens.get("eos_token"),
        bos=special_tokens.get("bos_token") if config.get("add_bos_token") is True else None,
        declared=declared if isinstance(declared, Mapping) else {},
        chat=ChatTemplates(templates, special_tokens),
    )


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


def encode_state(tokenizer: Tokenizer) -> bytes:
    """Return the JSON of a tokenizer's ``state()``, as stores hold it."""
    if isinstance(tokenizer, JsonTokenizer):
        return tokenizer.encode_state()
    return msgspec.json.encode(tokenizer.state())


def restore_tokenizer(state: Mapping[str, Any]) -> Tokenizer:
    """Restore a tokenizer from its ``state()``; needs no network and no file.

    Raises:
        TokenizerError: an invalid state, one of another version, or one that was changed.
    """
    if not isinstance(state, Mapping) or "state_version" not in state:
        raise TokenizerError("this is not the state of a tokenizer: it has no state_version")
    version = state["state_version"]
    kind = state.get("kind")
    if version != STATE_VERSION:
        raise TokenizerError(
            f"the tokenizer's state has version {version!r:.40}, and this batchloom reads version "
            f"{STATE_VERSION}: use the batchloom that wrote it, or a newer one"
        )
    if kind == "bytes":
        tokenizer: Tokenizer = ByteTokenizer()
    elif kind == "none":
        numbers = _convert_state(state, _UnknownState)
        tokenizer = UnknownTokenizer(numbers.vocab_size, numbers.end_id)
    elif kind == "tokenizer.json":
        tokenizer = _restore_json_tokenizer(_convert_state(state, _JsonState))
    else:
        raise TokenizerError(f"the tokenizer's state is of unknown kind {kind!r:.40}")
    if tokenizer.fingerprint != state.get("fingerprint"):
        raise TokenizerError(
            f"the state of tokenizer {tokenizer.name!r:.80} was changed: its fingerprint is "
            f"{tokenizer.fingerprint}, but it records {state.get('fingerprint')!r:.40}; restore the "
            "file from the original store"
        )
    return tokenizer


def _convert_state(state: Mapping[str, Any], kind: type[S]) -> S:
    try:
        return msgspec.convert(state, kind)
    except msgspec.ValidationError as error:
        raise TokenizerError(
            f"the tokenizer's state is damaged: {error}; restore the file from the original store"
        ) from error


def _restore_json_tokenizer(state: _JsonState) -> JsonTokenizer:
    label = f"the state of tokenizer {state.name!r:.80}"
    cleaned = clean_tokenizer_json(state.tokenizer, label)
    words = read_vocabulary(cleaned, label)
    by_id = {number: word for word, number in words.items()}
    end = by_id.get(state.end_id)
    bos = None if state.bos_id is None else by_id.get(state.bos_id)
    if end is None or (bos is None and state.bos_id is not None):
        raise TokenizerError(
            f"{label} is damaged: its end_id {state.end_id} or bos_id {state.bos_id} is not in its vocabulary"
        )
    return JsonTokenizer(state.name, cleaned, words, end=end, bos=bos, chat=state.chat, label=label)
