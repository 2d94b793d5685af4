"""Comparison of the fast engines with HF tokenizers, on hard texts and the user's."""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, islice
from typing import TypeVar, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchloom.core.files import find_cache_folder, read_regular_file, replace_file
from batchloom.core.fingerprint import fingerprint
from batchloom.tokens.json_tokenizer import JsonTokenizer, get_package_version
from batchloom.tokens.tokenizer import EncodingEngine, Tokenizer

# fastokens' regex engine and its hand-written splitters classify these characters unlike HF: U+180E
# is white space to the former, and the latter miss that U+017F is an s in (?i:'s). They are too rare
# to disable the fast engine for, so only texts with one of them go to the exact engine.
RARE_CHARACTERS = "\u017f\u180e"
# Increase it with every change of the texts of ``make_fixed_texts``, whose results are cached.
FIXED_TEXTS_VERSION = 1

T = TypeVar("T")

# Limit on the compared sample: HF tokenizers needs up to 150 bytes of memory per byte.
_MAX_TEXT_CHARACTERS = 1 << 16
_MAX_SAMPLE_CHARACTERS = 1 << 20

_SPACE_CHARACTERS = [
    *"\t\n\x0b\x0c\r\x1c\x1d\x1e\x1f \x85\xa0",
    *map(chr, [0x1680, *range(0x2000, 0x2010), 0x2028, 0x2029, 0x202F, 0x205F, 0x2060, 0x3000]),
    "\ufeff",
]
_TEXT_FRAGMENTS = [
    " ",
    "  ",
    "\n",
    "\r\n",
    "\r",
    "\t",
    "\xa0",
    "\u3000",
    "\u2028",
    "\x00",
    "\u200d",
    "a",
    "B",
    "lower",
    "Title",
    "UPPER",
    "\xe9",
    "e\u0301",
    "\u0301\u0327",
    "\xdf",
    "\u01c5",
    *("'s", "'LL", "'", '"', ".", ",", "--", "!?", "/", "_", "<|", "1", "23", "4567", "\xbd"),
    "\u4e2d\u6587",
    "\u304b\u30ab",
    "\ud55c",
    "\u1112\u1161\u11ab",
    "\u0639",
    "\u05d0",
    "\u0e01\u0e33",
    "\u0915\u094d\u0937",
    "\u0663",
    "\u2764\ufe0f",
    "\U0001f1eb\U0001f1f7",
    "\U0001f469\U0001f3fd\u200d\U0001f680",
    "\ue000",
    "\u0378",
    "\U0010ffff",
    "\ufffd",
    "\u202e",
]
_PLAIN_TEXTS = [
    "",
    "Hello world",
    "It's WE'LL they'Re I'M don'T 'tis ''s 's's s's",
    "def f(x):\n    return {'a': [1, 2.5e-3], \"b\": x**2}  # done\n\n\n\tif x:\n",
    "1 12 123 1234 12345 1,234.56 0x1F 1e10 \u00b2\u00b3 \u2163 \u2460 \u096a\u0968",
    "CamelCaseWord HTTPServer iPhone \u01c5ungla \u0130stanbul \u0131\u015f\u0131k STRASSE stra\u00dfe",
    "\u202bshalom \u05e9\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd\u202c \u0627\u0644\u0633\u0644\u0627\u0645",
    "a\u0300\u0301\u0302\u0303\u0316\u0327 \u0327\u0316\u0303 \u1e9b\u0323 \u212b \ufb01 \u2126",
    "".join(map(chr, range(256))),
]
_REPEATED_FRAGMENTS = [*"aA0= \n\xe9\u4e2d\U0001f600\u0301", "ab", "-_", "\t ", "\r\n"]


def make_conformance_texts(contents: Sequence[str] = ()) -> list[str]:
    """Return the fixed comparison texts, including the added tokens ``contents``."""
    return [
        *_PLAIN_TEXTS,
        *(run * 3000 for run in _REPEATED_FRAGMENTS),
        *(f"a{c}b {c}{c}c{c} \n{c}\n{c}'s1{c}2{c}" for c in _SPACE_CHARACTERS),
        *("".join(islice(atoms, 64)) for atoms in [_iter_mixed_texts()] for _ in range(600)),
        *(_surround_characters(map(chr, points)) for points in _iter_code_points()),
        *(_surround_characters([rare]) for rare in RARE_CHARACTERS),
        *(f"t'{rare}'TV x'{rare}y \n{rare}\n {rare}'s {rare}{rare}1" for rare in RARE_CHARACTERS),
        *(f"{c} a{c}b {c}{c}\n {c.upper()} {c[:-1]}" for c in _sample_evenly(contents, 200)),
    ]


def _iter_mixed_texts() -> Iterator[str]:
    """Yield fragments in a fixed pseudorandom order (Knuth's MMIX generator)."""
    state = 0
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        yield _TEXT_FRAGMENTS[(state >> 33) % len(_TEXT_FRAGMENTS)]


def _make_vocabulary_texts(tokenizer: JsonTokenizer) -> list[str]:
    """Return texts of sampled tokens, repeated and concatenated, to provoke merges."""
    words = [tokenizer.decode([number]) for number in _sample_evenly(range(tokenizer.vocab_size), 4096)]
    texts = []
    for start in range(0, len(words), 64):
        batch = words[start : start + 64]
        texts += ["".join(batch), "".join(reversed(batch)), " ".join(word * 4 for word in batch)]
    return texts


def _surround_characters(characters: Iterable[str]) -> str:
    return "".join(f"a{c}b {c}1{c} x'{c}y\n{c}.{c}'s" for c in characters)


def _iter_code_points() -> Iterator[list[int]]:
    """Yield every 61st code point of the planes with scripts, every 2,003rd elsewhere."""
    points = [*range(0x100, 0x32000, 61), *range(0x32000, 0x110000, 2003)]
    usable = [p for p in points if not 0xD800 <= p < 0xE000 and chr(p) not in RARE_CHARACTERS]
    for start in range(0, len(usable), 16):
        yield usable[start : start + 16]


def _sample_evenly(items: Sequence[T], limit: int) -> list[T]:
    """Return at most ``limit`` evenly spaced items, including first and last."""
    if len(items) <= limit:
        return list(items)
    indices = np.linspace(0, len(items) - 1, limit).astype(int)
    return [items[index] for index in indices]


@final
class EngineDifference(msgspec.Struct, frozen=True):
    """Difference of two engines on some texts, empty if they give the same ids.

    Attributes:
        example: description of the first difference.
        rare: characters of ``RARE_CHARACTERS`` in the differing texts.
        common: whether texts without these characters differ too.
    """

    example: str = ""
    rare: str = ""
    common: bool = False


def verify_engine(tokenizer: Tokenizer, sample: Sequence[str]) -> Tokenizer:
    """Return the tokenizer on an engine whose ids equal those of HF tokenizers.

    A fast engine (fastokens or splintr) is compared with HF tokenizers on hard texts, on texts of its vocabulary and on
    a sample of the user's. If they agree, the tokenizer is returned unchanged. If they differ, it is returned on the
    exact engine, and ``engine.note`` describes the difference. If they differ only in texts with characters that
    fastokens is known to treat differently, only such texts use the exact engine.

    Args:
        tokenizer: any tokenizer; one that is not on a fast engine is returned unchanged.
        sample: texts of the user's; the first 64 Ki characters of each, 1 Mi in all, are compared.

    Raises:
        TokenizerError: HF tokenizers cannot load the tokenizer.
    """
    if not isinstance(tokenizer, JsonTokenizer):
        return tokenizer
    tokenizer.load_engines()
    engine = tokenizer.engine
    if engine.name == "tokenizers":
        return tokenizer
    differences = _compare_on_fixed_texts(tokenizer), _compare_engines(tokenizer, _limit_sample(sample))
    example = next((difference.example for difference in differences if difference.example), "")
    if not example:
        return tokenizer
    version = get_package_version("tokenizers")
    note = f"{engine.name} {engine.version} and tokenizers {version} give different ids for {example}"
    if not any(difference.common for difference in differences):
        rare_characters = "".join(rare for rare in RARE_CHARACTERS if any(rare in d.rare for d in differences))
        names = " or ".join(f"U+{ord(rare):04X}" for rare in rare_characters)
        note = f"texts that hold {names} are encoded with tokenizers: {note}"
        return tokenizer.with_engine(replace(engine, note=note, exact_characters=rare_characters))
    return _fall_back(tokenizer, note)


def verify_control_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer on an engine that parses control tokens as HF tokenizers.

    This is :func:`verify_engine` for texts from a chat template, on fixed texts only.

    Args:
        tokenizer: any tokenizer; one that is not on fastokens is returned unchanged.

    Raises:
        TokenizerError: HF tokenizers cannot load the tokenizer.
    """
    if not isinstance(tokenizer, JsonTokenizer) or tokenizer.engine.name != "fastokens":
        return tokenizer
    example = _compare_on_fixed_texts(tokenizer, control=True).example
    if not example:
        return tokenizer
    return _fall_back(tokenizer, f"fastokens {tokenizer.engine.version} reads control tokens differently: {example}")


def make_fixed_texts(tokenizer: JsonTokenizer, *, control: bool) -> list[str]:
    """Return the texts on which the engines of a tokenizer are always compared."""
    contents = [*tokenizer.control, *tokenizer.added]
    if not control:
        return make_conformance_texts(contents) + _make_vocabulary_texts(tokenizer)
    base_texts = _sample_evenly(make_conformance_texts(), 200)
    tokens = _sample_evenly(contents, 64)
    texts = [token.join([text[:200], *tokens, "\n"]) for token in tokens for text in base_texts[:3]]
    return texts + [f"{tokens[0]}user\n{text[:2000]}{tokens[-1]}\n" for text in base_texts]


def _compare_on_fixed_texts(tokenizer: JsonTokenizer, *, control: bool = False) -> EngineDifference:
    """Compare the engines on fixed texts, or read the result of an earlier comparison.

    It is half a second's work with the same result for the same tokenizer, versions and texts.
    """
    versions = [tokenizer.engine.name, tokenizer.engine.version, get_package_version("tokenizers"), FIXED_TEXTS_VERSION]
    name = fingerprint([hashlib.sha256(tokenizer.json).hexdigest(), *versions, control])
    path = find_cache_folder() / "engines" / f"{name}.json"
    # A missing, damaged or unreadable result is made again.
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(read_regular_file(path), type=EngineDifference)
    difference = _compare_engines(tokenizer, make_fixed_texts(tokenizer, control=control), control=control)
    # Without a writable cache the next job compares again.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path) as partial_path:
            partial_path.write_bytes(msgspec.json.encode(difference))
    return difference


def _fall_back(tokenizer: JsonTokenizer, note: str) -> Tokenizer:
    note = f"{note}: the slower tokenizers is used"
    return tokenizer.with_engine(EncodingEngine("tokenizers", get_package_version("tokenizers"), note))


def apply_engine(tokenizer: Tokenizer, engine: EncodingEngine) -> Tokenizer:
    """Return the tokenizer on the engine that another process verified."""
    # Without a note it is the default engine.
    return tokenizer.with_engine(engine) if isinstance(tokenizer, JsonTokenizer) and engine.note else tokenizer


def _compare_engines(tokenizer: JsonTokenizer, texts: Sequence[str], *, control: bool = False) -> EngineDifference:
    ids, offsets = tokenizer.encode_batch(texts, control=control)
    right, bounds = tokenizer.encode_exactly(texts, control=control)
    differing = []
    example = ""
    for number, text in enumerate(texts):
        fast = ids[offsets[number] : offsets[number + 1]]
        exact = right[bounds[number] : bounds[number + 1]]
        if not np.array_equal(fast, exact):
            example = example or _describe_difference(fast, exact, tokenizer)
            differing.append(text)
    rare = "".join(rare for rare in RARE_CHARACTERS if any(rare in text for text in differing))
    common = not all(any(character in text for character in rare) for text in differing)
    return EngineDifference(example, rare, common)


def _limit_sample(sample: Sequence[str]) -> list[str]:
    texts = [text[:_MAX_TEXT_CHARACTERS] for text in sample[: _MAX_SAMPLE_CHARACTERS >> 4]]
    room = accumulate(len(text) for text in texts)
    return [text for text, used in zip(texts, room, strict=True) if used <= _MAX_SAMPLE_CHARACTERS]


def _describe_difference(fast: NDArray[np.uint32], exact: NDArray[np.uint32], tokenizer: JsonTokenizer) -> str:
    length = min(fast.size, exact.size)
    differences = np.flatnonzero(fast[:length] != exact[:length])
    position = int(differences[0]) if differences.size else length
    text = tokenizer.decode(exact[max(0, position - 6) : position + 4])
    ids, right = (encoding[position : position + 4].tolist() for encoding in (fast, exact))
    return f"{text!a} ({ids} and {right})"
