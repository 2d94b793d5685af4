"""Fill-in-the-middle: of some texts the middle stands last, so that a model learns to fill it in.

After Bavarian et al., Efficient Training of Language Models to Fill in the Middle (2022): a text is
cut at two characters, each part is tokenized alone, and the parts are put together behind tokens
of their own, as prefix, suffix, middle (PSM) or as suffix, prefix, middle (SPM, in the form that
the paper trains jointly with PSM: prefix token, suffix token, suffix, middle token, prefix, middle).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import TokenizerError
from batchloom.core.fingerprint import derive_key
from batchloom.core.keyed_hashing import GOLDEN, HashKey, hash_indices, mix_in_place
from batchloom.core.settings import suggest
from batchloom.preparation.settings import FimRecipe
from batchloom.tokens import Tokenizer

# Tokens before prefix, suffix and middle, as published models have them.
_KNOWN_SENTINELS = (
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("[PREFIX]", "[SUFFIX]", "[MIDDLE]"),
)
_NO_TOKEN = -1
_U32_SHIFT = np.uint64(32)


@dataclass(frozen=True, slots=True)
class FimCutter:
    """Fill-in-the-middle made ready for a tokenizer.

    Attributes:
        rate, spm_rate: see :class:`FimRecipe`.
        key: of which texts, and where they are cut.
        prefix, suffix, middle: ids of the tokens before each part.
    """

    rate: float
    spm_rate: float
    key: HashKey
    prefix: int
    suffix: int
    middle: int


@dataclass(frozen=True, slots=True)
class FimSegments:
    """Texts as the pieces that are tokenized, in the order in which they will stand.

    Attributes:
        pieces: of all texts.
        before: id of the token before each piece, -1 for none, int64 [pieces].
        bounds: first piece of each text, and their number, int64 [texts + 1].
        moved: how many texts were cut.
    """

    pieces: list[str]
    before: NDArray[np.int64]
    bounds: NDArray[np.int64]
    moved: int


def make_fim_cutter(fim: FimRecipe | None, tokenizer: Tokenizer) -> FimCutter | None:
    """Find the tokens in a tokenizer; None where nothing is asked for.

    Raises:
        TokenizerError: it has no such tokens, or the parts of a text are not the text again.
    """
    if fim is None:
        return None
    words = {**tokenizer.added, **tokenizer.control}
    names = _find_sentinels(fim, words, tokenizer.name)
    parts, _ = tokenizer.encode_batch(["a", "a"])
    if (joined := tokenizer.decode(parts)) != "aa":
        raise TokenizerError(
            f"fim: tokenizer {tokenizer.name!r} writes something where a text begins ('a' and 'a' together are "
            f"{joined!r}), so that the parts of a text would not be the text again: choose a byte-level one, or leave "
            "--fim out."
        )
    key = derive_key("fim", fim.seed)
    return FimCutter(float(fim.rate), float(fim.spm_rate), key, *(words[one] for one in names))


def _find_sentinels(fim: FimRecipe, words: Mapping[str, int], where: str) -> Sequence[str]:
    """The tokens before prefix, suffix and middle."""
    named = [one for one in fim.named if one is not None]
    for one in named:
        if one not in words:
            raise TokenizerError(
                f"fim: tokenizer {where!r} has no token {one!r}{suggest(one, words)}"
            )
    if named:
        return named
    for names in _KNOWN_SENTINELS:
        if all(one in words for one in names):
            return names
    known = "; ".join(" ".join(names) for names in _KNOWN_SENTINELS[:2])
    raise TokenizerError(
        f"fim: tokenizer {where!r} has none of the tokens that fill-in-the-middle is known by ({known} and others): "
        "add three special tokens to its tokenizer.json, name those it has (fim: {rate: 0.5, prefix: ..., suffix: ..., "
        "middle: ...}), or leave --fim out."
    )


def apply_fim(texts: list[str], hashes: NDArray[np.uint64], how: FimCutter) -> FimSegments:
    """Cut some of the texts, and say in which order their parts stand.

    Args:
        texts: the texts.
        hashes: of each, as the store keeps them, uint64 [texts, 2]: all that decides.
        how: the rates and tokens.
    """
    own = mix_in_place(hash_indices(hashes[:, 0].view(np.int64), how.key) ^ hashes[:, 1])
    chosen, suffix_first = (
        _random_uniform(own, 1) < how.rate,
        _random_uniform(own, 2) < how.spm_rate,
    )
    sizes = np.array([len(text) for text in texts], np.uint64) + np.uint64(1)
    places = np.sort([_random_below(own, 3, sizes), _random_below(own, 4, sizes)], axis=0)
    pieces: list[str] = []
    before: list[int] = []
    bounds = np.zeros(len(texts) + 1, np.int64)
    psm, spm = (how.prefix, how.suffix, how.middle), (how.prefix, how.suffix, how.middle, _NO_TOKEN)
    rows = zip(texts, chosen.tolist(), suffix_first.tolist(), *places.tolist(), strict=True)
    for number, (text, is_cut, first, start, stop) in enumerate(rows, 1):
        if not is_cut:
            pieces.append(text)
            before.append(_NO_TOKEN)
        elif first:
            pieces += ("", text[stop:], text[:start], text[start:stop])
            before += spm
        else:
            pieces += (text[:start], text[stop:], text[start:stop])
            before += psm
        bounds[number] = len(pieces)
    return FimSegments(pieces, np.array(before, np.int64), bounds, int(chosen.sum()))


def insert_sentinels(
    ids: NDArray[np.uint32], starts: NDArray[np.int64], cut: FimSegments
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """The ids of all pieces with the tokens before them, and where each text begins in them.

    Args:
        ids: of all pieces, back to back.
        starts: where each begins, and the end [pieces + 1].
        cut: what they are.
    """
    has = cut.before != _NO_TOKEN
    made = np.insert(ids, starts[:-1][has], cut.before[has].astype(np.uint32))
    put = np.concatenate([[0], np.cumsum(has)])
    return made, (starts + put)[cut.bounds]


def _random_words(own: NDArray[np.uint64], number: int) -> NDArray[np.uint64]:
    """The numbered word of each text's own generator (SplitMix64)."""
    return mix_in_place(own + np.uint64(GOLDEN * number % (1 << 64)))


def _random_uniform(own: NDArray[np.uint64], number: int) -> NDArray[np.float64]:
    """A number in [0, 1) for each text."""
    return (_random_words(own, number) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _random_below(
    own: NDArray[np.uint64], number: int, sizes: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """A whole number below its size for each text; sizes are below 2**32."""
    return (((_random_words(own, number) >> _U32_SHIFT) * sizes) >> _U32_SHIFT).astype(np.int64)
