"""Fill-in-the-middle (FIM), which moves parts of texts.

It is that of Bavarian et al., Efficient Training of Language Models to Fill in the Middle (2022): a text is cut at two
characters, each part is tokenized alone, and the parts are joined behind sentinel tokens, as prefix, suffix, middle
(PSM) or as suffix, prefix, middle (SPM, in the form that the paper trains jointly with PSM: prefix token, suffix token,
suffix, middle token, prefix, middle).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import TokenizerError
from batchloom.core.fingerprint import derive_key
from batchloom.core.keyed_hashing import GOLDEN, HashKey, hash_indices, mix_in_place
from batchloom.core.settings import suggest
from batchloom.preparation.settings.read_recipe import FimRecipe
from batchloom.tokens import Tokenizer

# Sentinels before prefix, suffix and middle, as published models have them.
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
    """Fill-in-the-middle settings resolved for a tokenizer."""

    rate: float
    spm_rate: float
    key: HashKey  # Hash key that selects texts and cut offsets
    prefix: int
    suffix: int
    middle: int


@dataclass(frozen=True, slots=True)
class FimSegments:
    """Texts as segments that are tokenized separately, in output order."""

    parts: list[str]
    before: NDArray[np.int64]  # Id of the sentinel before each segment, -1 for none, int64 [segments]
    bounds: NDArray[np.int64]  # Index of the first segment of each text, and the total, int64 [texts + 1]
    moved: int  # Number of texts that were cut


def make_fim_cutter(fim: FimRecipe | None, tokenizer: Tokenizer) -> FimCutter | None:
    """Resolve the sentinel tokens of a tokenizer; None without a FIM recipe."""
    if fim is None:
        return None
    words = {**tokenizer.added, **tokenizer.control}
    names = _find_sentinels(fim, words, tokenizer.name)
    parts, _ = tokenizer.encode_batch(["a", "a"])
    if (decoded := tokenizer.decode(parts)) != "aa":
        raise TokenizerError(
            f"fim: tokenizer {tokenizer.name!r} adds text at the beginning of a text ('a' and 'a' together decode "
            f"to {decoded!r}), so the parts of a text would not decode to the text: choose a byte-level one, or "
            "leave --fim out."
        )
    key = derive_key("fim", fim.seed)
    return FimCutter(float(fim.rate), float(fim.spm_rate), key, *(words[name] for name in names))


def _find_sentinels(fim: FimRecipe, words: Mapping[str, int], tokenizer_name: str) -> Sequence[str]:
    """Return the names of the prefix, suffix and middle tokens."""
    configured_names = [name for name in fim.sentinels if name is not None]
    for name in configured_names:
        if name not in words:
            raise TokenizerError(f"fim: tokenizer {tokenizer_name!r} has no token {name!r}{suggest(name, words)}")
    if configured_names:
        return configured_names
    for names in _KNOWN_SENTINELS:
        if all(name in words for name in names):
            return names
    examples = "; ".join(" ".join(names) for names in _KNOWN_SENTINELS[:2])
    raise TokenizerError(
        f"fim: tokenizer {tokenizer_name!r} has none of the known fill-in-the-middle tokens ({examples} and "
        "others): add three special tokens to its tokenizer.json, name those it has (fim: {rate: 0.5, prefix: "
        "..., suffix: ..., middle: ...}), or leave --fim out."
    )


def apply_fim(texts: list[str], hashes: NDArray[np.uint64], cutter: FimCutter) -> FimSegments:
    """Cut some of the texts and reorder their segments.

    ``hashes`` are the document hashes of the store, uint64 [texts, 2]; they alone decide.
    """
    seeds = mix_in_place(hash_indices(hashes[:, 0].view(np.int64), cutter.key) ^ hashes[:, 1])
    cut_mask = _random_uniform(seeds, 1) < cutter.rate
    suffix_first = _random_uniform(seeds, 2) < cutter.spm_rate
    sizes = np.array([len(text) for text in texts], np.uint64) + np.uint64(1)
    cut_offsets = np.sort([_random_below(seeds, 3, sizes), _random_below(seeds, 4, sizes)], axis=0)
    parts: list[str] = []
    before: list[int] = []
    bounds = np.zeros(len(texts) + 1, np.int64)
    psm = (cutter.prefix, cutter.suffix, cutter.middle)
    spm = (cutter.prefix, cutter.suffix, cutter.middle, _NO_TOKEN)
    rows = zip(texts, cut_mask.tolist(), suffix_first.tolist(), *cut_offsets.tolist(), strict=True)
    for number, (text, is_cut, first, start, stop) in enumerate(rows, 1):
        if not is_cut:
            parts.append(text)
            before.append(_NO_TOKEN)
        elif first:
            parts += ("", text[stop:], text[:start], text[start:stop])
            before += spm
        else:
            parts += (text[:start], text[stop:], text[start:stop])
            before += psm
        bounds[number] = len(parts)
    return FimSegments(parts, np.array(before, np.int64), bounds, int(cut_mask.sum()))


def insert_sentinels(
    ids: NDArray[np.uint32], starts: NDArray[np.int64], segments: FimSegments
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Insert the sentinels into the ids, and return the offset of each text.

    ``starts`` are the offsets of the segments in ``ids`` [segments + 1].
    """
    has_sentinel = segments.before != _NO_TOKEN
    ids_with_sentinels = np.insert(ids, starts[:-1][has_sentinel], segments.before[has_sentinel].astype(np.uint32))
    sentinel_counts = np.concatenate([[0], np.cumsum(has_sentinel)])
    return ids_with_sentinels, (starts + sentinel_counts)[segments.bounds]


def _random_words(seeds: NDArray[np.uint64], number: int) -> NDArray[np.uint64]:
    """Return word ``number`` of each text's own SplitMix64 generator."""
    return mix_in_place(seeds + np.uint64(GOLDEN * number % (1 << 64)))


def _random_uniform(seeds: NDArray[np.uint64], number: int) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each text."""
    return (_random_words(seeds, number) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _random_below(seeds: NDArray[np.uint64], number: int, sizes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return an integer below its size for each text; sizes are below 2**32."""
    return (((_random_words(seeds, number) >> _U32_SHIFT) * sizes) >> _U32_SHIFT).astype(np.int64)
