"""Definition of a tokenizer.json: validation, vocabulary and fingerprint."""

import base64
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import orjson

from batchloom.core.errors import TokenizerError
from batchloom.core.fingerprint import fingerprint

# Ids must fit into the int32 shards of a store.
ID_LIMIT = 2**31 - 1

_ADDED_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")

# Bytes that never occur in UTF-8.
_INVALID_UTF8_BYTES = (0xC0, 0xC1, *range(0xF5, 0x100))

# Published normalizers reach 6: a space becomes the mark of SentencePiece.
_MAX_GROWTH = 32
# Bytes of the longest compatible form in Unicode, that of U+FDFA.
_MAX_UNICODE_EXPANSION = 33

# A file that omits these keys and one that spells them out describe the same tokenizer.
_BPE_DEFAULTS: dict[str, tuple[object, ...]] = {
    "dropout": (None, 0),
    "unk_token": (None,),
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
    "fuse_unk": (False,),
    "byte_fallback": (False,),
    "ignore_merges": (False,),
}
GPT2_PRE_TOKENIZER: dict[str, Any] = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}


def clean_tokenizer_json(raw: Mapping[str, Any], label: str) -> dict[str, Any]:
    """Remove truncation and padding from a tokenizer.json, and refuse random ids."""
    model = raw.get("model")
    if not isinstance(model, Mapping) or not isinstance(model.get("vocab"), (Mapping, list)):
        raise TokenizerError(
            f"{label} is not a tokenizer.json: it has no model with a vocabulary; give the file "
            "that `tokenizers` or `transformers` saves under that name"
        )
    if model.get("dropout"):
        raise TokenizerError(
            f"{label} sets BPE dropout {model['dropout']}: the ids of a text would be random; "
            'set "dropout" to null in it'
        )
    added = raw.get("added_tokens") or []
    if not isinstance(added, list):
        raise TokenizerError(f"{label}: added_tokens is not a list")
    tokens = [_clean_added_token(token, label) for token in added]
    return {**raw, "truncation": None, "padding": None, "added_tokens": tokens}


def _clean_added_token(token: object, label: str) -> dict[str, Any]:
    content = token.get("content") if isinstance(token, Mapping) else None
    if not isinstance(token, Mapping) or not isinstance(content, str) or not content:
        raise TokenizerError(f"{label}: an added token without content: {str(token)[:80]}")
    if type(token.get("id")) is not int:
        raise TokenizerError(f"{label}: added token {content!r:.40} has no whole number as id")
    special = bool(token.get("special", False))
    plain: dict[str, Any] = {"id": token["id"], "content": content}
    for flag in _ADDED_TOKEN_FLAGS:
        plain[flag] = bool(token.get(flag, flag == "normalized" and not special))
    return {**plain, "special": special}


def read_vocabulary(cleaned: Mapping[str, Any], label: str) -> dict[str, int]:
    """Return every token and its id, including added tokens."""
    vocabulary = cleaned["model"]["vocab"]
    if isinstance(vocabulary, list):
        # (token, score) pairs of a Unigram model.
        tokens = [pair[0] if isinstance(pair, list) and pair else None for pair in vocabulary]
        vocabulary = {token: number for number, token in enumerate(tokens) if isinstance(token, str)}
    words = dict(vocabulary)
    for word, number in words.items():
        if type(number) is not int or not 0 <= number < ID_LIMIT:
            raise TokenizerError(
                f"{label}: token {word[:40]!r} has id {str(number)[:40]}, which is not a whole "
                f"number from 0 to {ID_LIMIT - 1}"
            )
    size = len(words)
    highest = -1
    for token in sorted(cleaned["added_tokens"], key=lambda token: int(token["id"])):
        content = token["content"]
        number = token["id"]
        # tokenizers assigns its own id to an added token that the vocabulary lacks, whatever the file says.
        expected_id = words.get(content, max(size, highest + 1))
        if expected_id != number:
            raise TokenizerError(
                f"{label}: added token {content!r} has id {number} in the file, and tokenizers gives "
                f"it {expected_id}: number the added tokens without gaps, starting at the size of the vocabulary"
            )
        highest = max(highest, number)
        words[content] = number
    if not words:
        raise TokenizerError(f"{label}: its vocabulary is empty")
    owners: dict[int, str] = {}
    for word, number in words.items():
        if owners.setdefault(number, word) != word:
            raise TokenizerError(f"{label}: id {number} belongs to {owners[number]!r} and to {word!r}")
    return words


def is_lossy(model: Mapping[str, Any], words: Mapping[str, int]) -> bool:
    """Return whether a BPE has neither an unknown token nor a token for every byte."""
    if model.get("type", "BPE") != "BPE" or model.get("unk_token") or model.get("byte_fallback"):
        return False
    letters = make_byte_alphabet()
    return any(letters[byte] not in words for byte in range(256) if byte not in _INVALID_UTF8_BYTES)


def mark_control_tokens(
    tokens: list[dict[str, Any]], words: Mapping[str, int], names: Iterable[str | None]
) -> list[dict[str, Any]]:
    """Mark ``names`` as special tokens, which a document cannot spell."""
    by_content = {token["content"]: token for token in tokens}
    for name in names:
        if name is not None:
            added_token = by_content.get(name) or _clean_added_token({"content": name, "id": words[name]}, name)
            by_content[name] = {**added_token, "id": words[name], "special": True}
    return sorted(by_content.values(), key=lambda token: int(token["id"]))


def hide_control_tokens(text: bytes, control: Mapping[str, int]) -> bytes:
    """Return the JSON with unspellable control tokens, for models other than BPE.

    A BPE reaches a token through merges only, and no merge yields a control token. The other models look
    words up in the vocabulary, which contains ``</s>`` even if text must not match it.
    """
    tokenizer_json = orjson.loads(text)
    model = tokenizer_json["model"]
    names = {
        content: f"\uffff{number}\uffff" for content, number in control.items() if content != model.get("unk_token")
    }
    if isinstance(model["vocab"], list):
        model["vocab"] = [[names.get(pair[0], pair[0]), *pair[1:]] for pair in model["vocab"]]
    else:
        model["vocab"] = {names.get(word, word): n for word, n in model["vocab"].items()}
    for token in tokenizer_json["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    return orjson.dumps({**tokenizer_json, "post_processor": None})


def refuse_growth(tokenizer_json: Mapping[str, Any], label: str) -> None:
    """Refuse steps that could make a text much longer.

    Eight steps that each replace one `a` by twenty make 25 GB of one letter. The bound leaves out Unicode's own forms,
    which make a text at most eleven times as long.

    Raises:
        TokenizerError: a text may become more than ``_MAX_GROWTH`` times as long.
    """
    for key in ("normalizer", "decoder"):
        growth = _bound_growth(iter_steps(tokenizer_json.get(key)))
        if growth > _MAX_GROWTH:
            raise TokenizerError(
                f"{label}: its {key} could make a text {growth:,.0f} times as long, and more than {_MAX_GROWTH} is "
                "refused: it would take too much memory"
            )


def _bound_growth(steps: Iterable[Mapping[str, Any]]) -> float:
    """Return how many times as long steps may make a part of a text, in bytes."""
    # What steps have written: its growth, and its characters, None for any.
    written: list[tuple[float, set[str] | None]] = [(1.0, set())]
    for step in steps:
        content = str(step.get("content") or step.get("prepend") or "")
        pattern = _get_literal(step)
        # A text is replaced in what an earlier step has written only if the two share a character.
        before = (growth for growth, letters in written if pattern is None or letters is None or letters & pattern)
        growth = max(1.0, _find_growth(step)) * max(before, default=1.0)
        written.append((growth, None if pattern is None else set(content)))
    return max(growth for growth, _ in written)


def _get_literal(step: Mapping[str, Any]) -> set[str] | None:
    """Return the characters that a step replaces; None for any.

    What it prepends replaces none.
    """
    if step.get("type") == "Prepend":
        return set()
    pattern = step.get("pattern") if step.get("type") == "Replace" else None
    literal = pattern.get("String") if isinstance(pattern, Mapping) else None
    return set(literal) if isinstance(literal, str) and literal else None


def _find_growth(step: Mapping[str, Any]) -> float:
    """Return how many times as long a step may make a text, in bytes."""
    if step.get("type") == "Prepend":
        return 1 + len(str(step.get("prepend", "")).encode())
    if step.get("type") == "Replace":
        content = str(step.get("content", ""))
        pattern = step.get("pattern")
        literal = pattern.get("String") if isinstance(pattern, Mapping) else None
        if isinstance(literal, str) and literal:
            return len(content.encode()) / len(literal.encode())
        # A pattern may match before each byte.
        return 1 + len(content.encode())
    if step.get("type") == "Precompiled":
        # SentencePiece's map: the size of its trie in four bytes, the trie, and the texts that replace others.
        try:
            charsmap = base64.b64decode(str(step.get("precompiled_charsmap") or ""))
        except ValueError as error:
            raise TokenizerError(f"the map of a Precompiled normalizer is not base64: {error}") from error
        texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]
        return max(map(len, texts.split(b"\0"))) / _MAX_UNICODE_EXPANSION
    return 1


def iter_steps(step: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the single steps of a normalizer, pre-tokenizer or decoder."""
    if isinstance(step, Mapping):
        if step.get("type") != "Sequence":
            yield step
        for key in ("normalizers", "pretokenizers", "decoders"):
            parts = step.get(key)
            for part in parts if isinstance(parts, (list, tuple)) else ():
                yield from iter_steps(part)


def replace_unsplit_metaspace(tokenizer_json: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace a Metaspace pre-tokenizer that does not split by equal normalizers.

    transformers writes such a step for the tokenizers of Llama and Mistral, and fastokens does not support it.
    """
    step = tokenizer_json.get("pre_tokenizer")
    if not isinstance(step, Mapping) or step.get("type") != "Metaspace" or step.get("split", True):
        return tokenizer_json
    mark = step.get("replacement", "\u2581")
    scheme = step.get("prepend_scheme", "always")
    # An added token that matches in a text begins a part, and "first" marks only the first part.
    if scheme == "first" and any(not token["special"] for token in tokenizer_json["added_tokens"]):
        return tokenizer_json
    marks = [{"type": "Replace", "pattern": {"String": " "}, "content": mark}]
    if scheme != "never":
        # A text that begins with a space has its mark already, and an empty one needs none.
        marks.append({"type": "Replace", "pattern": {"Regex": f"^(?=[^{re.escape(mark)}])"}, "content": mark})
    normalizers = [*iter_steps(tokenizer_json.get("normalizer")), *marks]
    return {
        **tokenizer_json,
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
    }


def fingerprint_definition(tokenizer_json: Mapping[str, Any], end_id: int, bos_id: int | None) -> str:
    """Return the fingerprint of the normalized fields that determine ids."""
    normalizer = _normalize_step(tokenizer_json.get("normalizer"))
    tokens = []
    for token in tokenizer_json["added_tokens"]:
        plain = {"id": token["id"], "content": token["content"], "special": token["special"]}
        if not token["special"]:  # Special tokens never match, so their flags have no effect.
            plain |= {flag: token[flag] for flag in _ADDED_TOKEN_FLAGS}
            plain["normalized"] = token["normalized"] and normalizer is not None
        tokens.append(plain)
    fields = {
        "model": _normalize_model(tokenizer_json["model"]),
        "normalizer": normalizer,
        "pre_tokenizer": _normalize_step(tokenizer_json.get("pre_tokenizer")),
        "added_tokens": tokens,
        "end_id": end_id,
        "bos_id": bos_id,
    }
    return fingerprint(fields)


def _normalize_model(model: Mapping[str, Any]) -> dict[str, Any]:
    merges = model.get("merges")
    if model.get("type", "BPE") != "BPE" or not isinstance(merges, list):
        return dict(model)
    plain = {key: value for key, value in model.items() if key not in _BPE_DEFAULTS or value not in _BPE_DEFAULTS[key]}
    plain["merges"] = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in merges]
    return plain | {"type": "BPE"}


def _normalize_step(step: Any) -> Any:
    """Remove offset-only options from a step; None if the step has no effect."""
    if not isinstance(step, Mapping):
        return step
    plain = dict(step)
    for key in ("normalizers", "pretokenizers"):
        if isinstance(plain.get(key), list):
            plain[key] = [_normalize_step(part) for part in plain[key]]
            if not plain[key]:
                return None
    if plain.get("type") == "ByteLevel":
        plain.pop("trim_offsets", None)
        if plain.get("use_regex") is True:
            del plain["use_regex"]
    return plain


def make_byte_level_json(
    vocab: dict[str, int],
    merges: list[list[str]],
    control: dict[str, int],
    *,
    pre_tokenizer: dict[str, Any],
    ignore_merges: bool = False,
) -> dict[str, Any]:
    """Build the tokenizer.json of a byte-level BPE; ``vocab`` has the control tokens."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    model: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ignore_merges,
        "vocab": vocab,
        "merges": merges,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": token, **flags, "special": True}
            for token, number in sorted(control.items(), key=lambda pair: pair[1])
        ],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": GPT2_PRE_TOKENIZER,
        "model": model,
    }


def make_byte_alphabet() -> list[str]:
    """Return the character of each byte, [256] (GPT-2's ``bytes_to_unicode``).

    A printable Latin-1 character represents itself, the other bytes are numbered from U+0100 (Radford et al. 2019).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(substitutes)) for byte in range(256)]
