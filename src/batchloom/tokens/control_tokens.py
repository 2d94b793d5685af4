"""Choice of the tokens that end and begin a document, from sidecar files."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from batchloom.core.errors import TokenizerError
from batchloom.core.settings import suggest
from batchloom.tokens.tokenizer import ChatTemplates

# Tokens that end a document in pretraining, even if a chat model's config names another end.
_DOCUMENT_END_TOKENS = ("<|end_of_text|>", "<|endoftext|>", "<｜end▁of▁sentence｜>")  # noqa: RUF001
_FALLBACK_END_TOKENS = ("</s>", "<eos>", "<|eos|>")
# Tokens that chat templates access by these names (SPECIAL_TOKENS_ATTRIBUTES of transformers).
_SPECIAL_TOKEN_KEYS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# Ends of a chat turn. A config with one of these as its eos token describes conversations, not documents.
_TURN_END_TOKENS = frozenset(
    ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|eot|>", "<turn|>")
)


@dataclass(frozen=True, slots=True)
class TokenizerHints:
    """Settings in tokenizer_config.json and special_tokens_map.json.

    Attributes:
        eos: the end-of-sequence token, or None.
        bos: the token to prepend, only if the config says that models expect it.
        declared: added tokens by id, as in ``added_tokens_decoder``.
        chat: chat settings.
    """

    eos: str | None = None
    bos: str | None = None
    declared: Mapping[str, Any] = field(default_factory=dict)
    chat: ChatTemplates = field(default_factory=ChatTemplates)


def read_hints(
    config: Mapping[str, Any],
    special_map: Mapping[str, Any],
    templates: Mapping[str, str] | None = None,
) -> TokenizerHints:
    """Extract hints from the parsed sidecar files, which may be empty.

    Chat templates in their own files, ``templates``, override the config's.
    """
    special_tokens = {}
    for name in _SPECIAL_TOKEN_KEYS:
        token = _get_token_content(config.get(name)) or _get_token_content(special_map.get(name))
        if token is not None:
            special_tokens[name] = token
    declared = config.get("added_tokens_decoder")
    return TokenizerHints(
        eos=special_tokens.get("eos_token"),
        bos=special_tokens.get("bos_token") if config.get("add_bos_token") is True else None,
        declared=declared if isinstance(declared, Mapping) else {},
        chat=ChatTemplates(templates or parse_named_templates(config.get("chat_template")), special_tokens),
    )


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
    words: Mapping[str, int],
    control: list[str],
    hints: TokenizerHints,
    end_token: str | None,
    label: str,
) -> str:
    """Choose the end-of-document token.

    It is ``end_token`` if given; else the pretraining token that the vocabulary has; else the
    config's eos token, unless that ends a chat turn and ``</s>`` or similar exists.

    Raises:
        TokenizerError: no such token, or none can be determined.
    """
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


def _format_tokens(control: list[str]) -> str:
    if not control:
        return "it has no special tokens"
    more = f" and {len(control) - 20} more" if len(control) > 20 else ""
    return f"its special tokens are {', '.join(map(repr, control[:20]))}{more}"


def choose_bos_token(raw: Mapping[str, Any], words: Mapping[str, int], hints: TokenizerHints) -> str | None:
    """Return the token that models expect before a text document, or None.

    It is the token that the post-processor prepends, or the config's bos token if the config has
    ``"add_bos_token": true``.
    """
    token = _find_prepended_token(raw.get("post_processor")) or hints.bos
    return token if token in words else None


def _find_prepended_token(processor: object) -> str | None:
    """Return the special token that a post-processor prepends to a single sequence."""
    for part in _iter_post_processors(processor):
        kind = part.get("type")
        if kind in ("BertProcessing", "RobertaProcessing"):
            token = part.get("cls")
            return str(token[0]) if isinstance(token, list) and token else None
        if kind == "TemplateProcessing":
            single = part.get("single")
            piece = single[0] if isinstance(single, list) and single else None
            special_token = piece.get("SpecialToken") if isinstance(piece, Mapping) else None
            if isinstance(special_token, Mapping):
                return _resolve_template_token(part, str(special_token.get("id")))
    return None


def _iter_post_processors(processor: object) -> Iterator[Mapping[str, Any]]:
    if isinstance(processor, Mapping):
        yield processor
        parts = processor.get("processors")
        for part in parts if isinstance(parts, list) else ():
            yield from _iter_post_processors(part)


def _resolve_template_token(template: Mapping[str, Any], name: str) -> str:
    """Return the token that a template calls ``name``; usually it is ``name`` itself."""
    special_tokens = template.get("special_tokens")
    entry = special_tokens.get(name) if isinstance(special_tokens, Mapping) else None
    tokens = entry.get("tokens") if isinstance(entry, Mapping) else None
    return str(tokens[0]) if isinstance(tokens, list) and tokens else name
