"""Which tokens end a document and open one, from what lies beside a tokenizer.json."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from batchloom.core.errors import TokenizerError
from batchloom.core.settings import suggest
from batchloom.tokens.tokenizer import ChatTemplates

# Tokens that end a document in pretraining, whatever a chat model's config calls its end.
_DOCUMENT_END_TOKENS = ("<|end_of_text|>", "<|endoftext|>", "<｜end▁of▁sentence｜>")  # noqa: RUF001
_FALLBACK_END_TOKENS = ("</s>", "<eos>", "<|eos|>")
# Tokens that chat templates know by these names (SPECIAL_TOKENS_ATTRIBUTES of transformers).
_SPECIAL_TOKEN_KEYS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# Ends of a chat turn: a config that names one as its eos token speaks of conversations.
_TURN_END_TOKENS = frozenset(
    ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|eot|>", "<turn|>")
)


@dataclass(frozen=True, slots=True)
class TokenizerHints:
    """What tokenizer_config.json and special_tokens_map.json add to a tokenizer.json.

    Attributes:
        eos: the end-of-sequence token, if one is named.
        bos: the token to put first, only where the config says that models want it.
        declared: added tokens by id, as ``added_tokens_decoder`` lists them.
        chat: what the files say of conversations.
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
    """The hints in the files beside a tokenizer.json.

    Args:
        config: the parsed tokenizer_config.json, empty where it is missing.
        special_map: the parsed special_tokens_map.json, likewise.
        templates: chat templates in files of their own, which win over the config's.
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
    """The chat templates of a config, by name: a text, a list of named ones, or an object."""
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
    """``raw`` with the added tokens of the config beside it, as transformers loads the two."""
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
    """The end-of-document token.

    The token asked for; else the one of pretraining where the vocabulary has it; else the
    config's eos token, unless that ends a chat turn and ``</s>`` or the like is there.

    Args:
        words: the vocabulary.
        control: its special tokens.
        hints: what the config says.
        end_token: the user's choice, if any.
        label: what to call the tokenizer in errors.

    Raises:
        TokenizerError: no such token, or none was asked for and none can be told.
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
    """The token that models expect before a text document, if any.

    It is what the post-processor puts first, or the config's bos token where the config says
    ``"add_bos_token": true``.
    """
    token = _find_prepended_token(raw.get("post_processor")) or hints.bos
    return token if token in words else None


def _find_prepended_token(processor: object) -> str | None:
    """The special token a post-processor puts before the one sequence it is given."""
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
    """The token a template calls ``name``: usually the same word, but it may rename."""
    special_tokens = template.get("special_tokens")
    entry = special_tokens.get(name) if isinstance(special_tokens, Mapping) else None
    tokens = entry.get("tokens") if isinstance(entry, Mapping) else None
    return str(tokens[0]) if isinstance(tokens, list) and tokens else name
