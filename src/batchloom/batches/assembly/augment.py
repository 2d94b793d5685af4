"""Seeded token augmentation that depends only on a token's position in the run.

The position is the sequence's position in the run and the column in its row. So ranks, workers, forms and
resumes change the same tokens, and each epoch changes others. Draws use SplitMix64 (Steele, Lea, Flood: Fast
Splittable Pseudorandom Number Generators, OOPSLA 2014), one generator per sequence, with random access.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from batchloom.batches.assembly.array_filling import IGNORE_INDEX, Ids
from batchloom.core.errors import SettingsError, StateError
from batchloom.core.fingerprint import derive_key
from batchloom.core.keyed_hashing import GOLDEN, HashKey, hash_indices, mix_in_place
from batchloom.core.settings import as_int, coerce_int_fields, from_plain, quote_value, raise_problems, to_plain
from batchloom.plan import PlanSpec
from batchloom.plan.order import list_differences
from batchloom.plan.packing import Rows, align_lengths

# State key that records how the batches were augmented.
AUGMENT_KEY = "augment"
# Version of the seeded token selection; docs/reference/seeded-choices.md describes each version.
AUGMENT_VERSION = 1
_PROBABILITIES = ("mask_prob", "mask_replace_prob", "random_replace_prob", "noise_prob", "loss_drop_prob")
_MAX_IDS = 1 << 31
_KNOWN_MASK_TOKENS = ("[MASK]", "<mask>", "<|mask|>", "<|mdm_mask|>")
# A draw has 32 bits, so a probability is exact to 2**-32.
_RANDOM_VALUES = 1 << 32
_LOW_MASK = np.uint64(_RANDOM_VALUES - 1)
_HALF_BITS = np.uint64(32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Augment:
    """Token augmentation, applied after packing; the defaults change nothing.

    Probabilities apply to each token independently. Tokens without loss (padding, prompts, the first
    of each span) and special tokens never change.

    Attributes:
        mask_prob: probability that a token is to be predicted from both sides (0.15 in BERT). Only these
            tokens have labels, and the labels are unshifted.
        mask_id: id of the mask token; None for the tokenizer's own.
        mask_replace_prob: share of the selected tokens that become ``mask_id``.
        random_replace_prob: share of the selected tokens that become a random token; the rest stay.
        noise_prob: probability that an input token becomes a random one, while labels keep the true token.
        loss_drop_prob: probability that a token's loss is dropped.
        seed: seed of the token selection, at most 128 bits.
        vocab_size: number of ids of the model; None for the tokenizer's.
        special_ids: further ids that never change and are never drawn.
    """

    mask_prob: float = 0.0
    mask_id: int | None = None
    mask_replace_prob: float = 0.8
    random_replace_prob: float = 0.1
    noise_prob: float = 0.0
    loss_drop_prob: float = 0.0
    seed: int = 0
    vocab_size: int | None = None
    special_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        most = (1 << 128) - 1
        bounds = {"mask_id": (0, _MAX_IDS - 1), "seed": (-most, most), "vocab_size": (1, _MAX_IDS)}
        problems = [
            f"{name}: {quote_value(getattr(self, name))} is not a probability from 0 to 1"
            for name in _PROBABILITIES
            if not _is_probability(getattr(self, name))
        ]
        if not problems:
            for name in _PROBABILITIES:
                object.__setattr__(self, name, float(getattr(self, name)))
            problems += self._contradictions()
        problems += coerce_int_fields(self, bounds)
        problems += self._set_special()
        raise_problems([f"augment.{problem}" for problem in problems])

    def _contradictions(self) -> list[str]:
        total_share = self.mask_replace_prob + self.random_replace_prob
        # The tolerance admits 0.9 and 0.1, whatever their binary fractions sum to.
        problems = (
            [f"mask_replace_prob: together with random_replace_prob it is {total_share:g}, more than 1"]
            if total_share > 1 + 1e-9
            else []
        )
        if self.mask_prob and self.noise_prob:
            problems.append(
                f"noise_prob: {self.noise_prob} and mask_prob: {self.mask_prob} exclude each other: noise_prob is "
                "for causal models, mask_prob for bidirectional ones; the noise of masking is random_replace_prob"
            )
        return problems

    def _set_special(self) -> list[str]:
        special_ids: Any = self.special_ids
        if not isinstance(special_ids, (tuple, list)):
            return [f"special_ids: {quote_value(special_ids)} is not a tuple of ids"]
        ids = [as_int(value) for value in special_ids]
        wrong = [
            special_ids[number]
            for number, token_id in enumerate(ids)
            if token_id is None or not 0 <= token_id < _MAX_IDS
        ]
        if wrong:
            return [f"special_ids: {quote_value(wrong[0])} is not an id"]
        object.__setattr__(self, "special_ids", tuple(ids))
        return []

    @property
    def is_on(self) -> bool:
        """True if any augmentation is enabled."""
        return bool(self.mask_prob or self.noise_prob or self.loss_drop_prob)


def _is_probability(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return math.isfinite(value) and 0 <= float(value) <= 1


@dataclass(frozen=True, slots=True, eq=False)
class Augmentation:
    """Augmentation prepared for the batches of one store."""

    settings: Augment  # the settings, with ``mask_id`` resolved
    # True for special ids [at most the largest special id + 2]; the last entry is that of all larger ids.
    special: NDArray[np.bool_]
    replacement_ids: NDArray[np.int64]  # ids that may be drawn, int64; empty if none is drawn
    choice_key: HashKey  # selects tokens
    replacement_key: HashKey  # draws replacements
    drop_key: HashKey  # drops loss

    @property
    def drops_loss(self) -> bool:
        """True if the augmentation changes which tokens carry a loss."""
        return bool(self.settings.mask_prob or self.settings.loss_drop_prob)


class TokenizerSource(Protocol):
    """A store or stream that names the tokenizer of its ids."""

    @property
    def vocab_size(self) -> int | None:
        """Upper bound of the ids, exclusive; None if unknown."""

    @property
    def tokenizer(self) -> "SpecialTokens":
        """The tokenizer; read only if ``vocab_size`` is known."""


class SpecialTokens(Protocol):
    @property
    def added(self) -> Mapping[str, int]:
        """Ids of the added tokens."""

    @property
    def control(self) -> Mapping[str, int]:
        """Ids of the control tokens."""

    @property
    def end_id(self) -> int:
        """End-of-document id."""

    @property
    def bos_id(self) -> int | None:
        """Beginning-of-document id."""


def make_augmentation(
    augment: Augment | Mapping[str, Any] | None, store: TokenizerSource, labels: str
) -> Augmentation | None:
    """Check settings against a store's tokenizer; return None if they change nothing."""
    if isinstance(augment, Mapping):
        augment = from_plain(Augment, augment, "augment")
    if augment is not None and not isinstance(augment, Augment):
        raise SettingsError(
            [f"augment: {quote_value(augment)} is not an Augment; give for example Augment(noise_prob=0.1)"]
        )
    if augment is None or not augment.is_on:
        return None
    changes = augment.mask_prob or augment.noise_prob
    # A bare prefix has no tokenizer.
    tokenizer = store.tokenizer if changes and store.vocab_size is not None else None
    words = {**tokenizer.added, **tokenizer.control} if tokenizer else {}
    settings = augment
    if augment.mask_id is None and augment.mask_prob:
        mask_id = next((words[token] for token in _KNOWN_MASK_TOKENS if token in words), None)
        settings = replace(augment, mask_id=mask_id)
    problems = _find_problems(settings, store.vocab_size, labels)
    raise_problems([f"augment.{problem}" for problem in problems])
    special = {*augment.special_ids}
    if tokenizer:
        special |= {*tokenizer.control.values(), tokenizer.end_id}
        special |= set() if tokenizer.bos_id is None else {tokenizer.bos_id}
    if settings.mask_prob and settings.mask_id is not None:
        special.add(settings.mask_id)
    table = np.zeros(max(special, default=-1) + 2, bool)
    table[list(special)] = True
    replacement_ids = np.zeros(0, np.int64)
    if _draws_ids(settings):
        size = store.vocab_size or augment.vocab_size or 0
        replacement_ids = np.setdiff1d(np.arange(size), list(special))
        if not replacement_ids.size:
            raise SettingsError([f"augment.special_ids: no other id of the vocabulary of {size:,} is left to draw"])
    keys = (derive_key("augment", augment.seed, purpose) for purpose in ("choose", "become", "drop"))
    return Augmentation(settings, table, replacement_ids, *keys)


def _draws_ids(settings: Augment) -> bool:
    return bool(settings.noise_prob or (settings.mask_prob and settings.random_replace_prob))


def _find_problems(settings: Augment, store_vocab_size: int | None, labels: str) -> list[str]:
    problems = []
    size = settings.vocab_size or store_vocab_size
    if size is not None and store_vocab_size is not None and size < store_vocab_size:
        problems.append(f"vocab_size: {size:,} is less than the {store_vocab_size:,} ids of the store's tokenizer")
    if size is None and _draws_ids(settings):
        problems.append("vocab_size: missing; this store names no tokenizer, so give the number of ids to draw from")
    if settings.mask_prob and settings.mask_id is None and settings.mask_replace_prob:
        reason = (
            "the store has no tokenizer to search for"
            if store_vocab_size is None
            else "the store's tokenizer has none of"
        )
        problems.append(
            f"mask_id: missing, and {reason} {', '.join(_KNOWN_MASK_TOKENS)}; give the id of the mask token (an id "
            "beyond the vocabulary needs vocab_size, the number of ids of the model)"
        )
    for name, ids in (("mask_id", (settings.mask_id,)), ("special_ids", settings.special_ids)):
        problems += [
            f"{name}: {token_id} is outside the vocabulary, whose ids are 0 to {size - 1}; for a model with more ids "
            "give vocab_size"
            for token_id in ids
            if token_id is not None and size is not None and token_id >= size
        ]
    if settings.mask_prob and labels == "shifted":
        problems.append(
            "mask_prob: a masked token is predicted at its own position, but labels='shifted' are those of the next "
            "token; use labels='aligned'"
        )
    return problems


def add_augment_state(state: dict[str, Any], augmentation: Augmentation | None) -> dict[str, Any]:
    """Return a plan state with the augmentation settings added, if there are any."""
    return {**state, AUGMENT_KEY: _make_augment_entry(augmentation.settings)} if augmentation else state


def remove_augment_state(state: Any, augmentation: Augmentation | None) -> Any:
    """Return the plan state without the entry of :func:`add_augment_state`.

    Values that are not dicts pass through; the plan rejects them.
    """
    if not isinstance(state, dict):
        return state
    saved_entry = state.get(AUGMENT_KEY)
    current_entry = _make_augment_entry(augmentation.settings) if augmentation else None
    if saved_entry != current_entry:
        # A side without augmentation counts as the defaults.
        default_entry = _make_augment_entry(Augment())
        differences = list_differences(saved_entry or default_entry, current_entry or default_entry, AUGMENT_KEY)
        raise StateError(
            f"The state belongs to a run with other augmentation: {'; '.join(differences)}. Give the augment= it was "
            "made with, or start without the state."
        )
    return {name: value for name, value in state.items() if name != AUGMENT_KEY}


def _make_augment_entry(settings: Augment) -> dict[str, Any]:
    return {"version": AUGMENT_VERSION, **to_plain(settings)}


def augment_batch(
    arrays: Mapping[str, Any], augmentation: Augmentation, rows: Rows, positions: Ids, plan: PlanSpec, *, labels: str
) -> None:
    seq_len = plan.seq_len
    ids = arrays["input_ids"].reshape(-1)
    targets = arrays["labels"].reshape(-1)
    if not rows.lengths.size:
        return
    cells = _compute_token_cells(rows, plan) if ids.size != len(rows) * seq_len else None
    label_offset = 1 if labels == "shifted" else 0
    share = augmentation.settings.mask_prob or augmentation.settings.noise_prob
    if share:
        token_indices = _select_tokens(share, augmentation.choice_key, positions, seq_len, cells)
        token_indices = token_indices[_mask_with_loss(targets, token_indices, label_offset)]
        token_indices = token_indices[
            ~augmentation.special[np.minimum(ids[token_indices], augmentation.special.size - 1)]
        ]
        own = token_indices if cells is None else cells[token_indices]
        words = _random_words(augmentation.replacement_key, positions, own, seq_len)
        if augmentation.settings.mask_prob:
            targets[:] = IGNORE_INDEX
            targets[token_indices] = ids[token_indices]
            _apply_mask(ids, token_indices, words, augmentation)
        else:
            ids[token_indices] = _draw_ids(words, augmentation)
    if augmentation.settings.loss_drop_prob:
        dropped_indices = _select_tokens(
            augmentation.settings.loss_drop_prob, augmentation.drop_key, positions, seq_len, cells
        )
        dropped_indices = dropped_indices[_mask_with_loss(targets, dropped_indices, label_offset)]
        targets[dropped_indices - label_offset] = IGNORE_INDEX
    if "loss_weights" in arrays:
        arrays["loss_weights"].reshape(-1)[targets == IGNORE_INDEX] = 0


def _compute_token_cells(rows: Rows, plan: PlanSpec) -> Ids:
    """Return the index of each span token in the flat rows [R * seq_len], int64 [T]."""
    row_of = np.repeat(np.arange(len(rows)), np.diff(rows.pointers))
    aligned_lengths = align_lengths(rows.lengths, plan.align)
    stops = np.cumsum(aligned_lengths)
    begins = row_of * plan.seq_len + rows.row_offsets
    return np.repeat(begins - (stops - aligned_lengths), aligned_lengths) + np.arange(int(stops[-1]))


def _select_tokens(share: float, key: HashKey, positions: Ids, seq_len: int, cells: Ids | None) -> Ids:
    """Return the indices of tokens drawn with probability ``share``."""
    # Each 64-bit number of a row's generator yields two draws, for adjacent tokens.
    steps = np.arange(1, (seq_len + 1) // 2 + 1).astype(np.uint64) * np.uint64(GOLDEN)
    words = mix_in_place(hash_indices(positions, key)[:, None] + steps)
    draws = words.astype("<u8", copy=False).view("<u4")[:, :seq_len].reshape(-1)
    if cells is not None:
        draws = draws[cells]
    return np.flatnonzero(draws <= np.uint32(max(1, round(share * _RANDOM_VALUES)) - 1))


def _random_words(key: HashKey, positions: Ids, cells: Ids, seq_len: int) -> NDArray[np.uint64]:
    """Return a 64-bit random number for each cell of the rows, uint64 [cells]."""
    rows, columns = np.divmod(cells, seq_len)
    words = hash_indices(positions, key)[rows]
    words += (columns + 1).astype(np.uint64) * np.uint64(GOLDEN)
    return mix_in_place(words)


def _mask_with_loss(targets: Ids, token_indices: Ids, label_offset: int) -> NDArray[np.bool_]:
    """Return whether each token carries a loss.

    The label of a token is ``label_offset`` positions before it.
    """
    # Index -1 of the first token wraps to the last label, which as a shifted label has no loss.
    lossy: NDArray[np.bool_] = targets[token_indices - label_offset] != IGNORE_INDEX
    return lossy


def _apply_mask(ids: Ids, token_indices: Ids, words: NDArray[np.uint64], augmentation: Augmentation) -> None:
    draws = (words >> _HALF_BITS).astype(np.int64)
    masked = round(augmentation.settings.mask_replace_prob * _RANDOM_VALUES)
    replaced = masked + round(augmentation.settings.random_replace_prob * _RANDOM_VALUES)
    if augmentation.settings.mask_id is not None:
        ids[token_indices[draws < masked]] = augmentation.settings.mask_id
    is_random = (draws >= masked) & (draws < replaced)
    if augmentation.replacement_ids.size:
        ids[token_indices[is_random]] = _draw_ids(words[is_random], augmentation)


def _draw_ids(words: NDArray[np.uint64], augmentation: Augmentation) -> Ids:
    id_indices = ((words & _LOW_MASK) * np.uint64(augmentation.replacement_ids.size)) >> _HALF_BITS
    return augmentation.replacement_ids[id_indices.astype(np.int64)]
