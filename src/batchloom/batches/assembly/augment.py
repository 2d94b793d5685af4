"""The settings of augmentation: which tokens of a batch are changed, and what becomes of them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import SettingsError, StateError
from batchloom.core.fingerprint import derive_key
from batchloom.core.keyed_hashing import HashKey
from batchloom.core.settings import (
    as_int,
    coerce_int_fields,
    from_plain,
    quote_value,
    raise_problems,
    to_plain,
)

# The entry of a state that says how its batches were augmented.
AUGMENT_KEY = "augment"
# Which tokens a seed chooses changes with this number; docs/augmentation.md describes each version.
AUGMENT_VERSION = 1

_PROBABILITIES = (
    *("mask_prob", "mask_replace_prob", "random_replace_prob"),
    *("noise_prob", "loss_drop_prob"),
)
_MAX_IDS = 1 << 31
_KNOWN_MASK_TOKENS = ("[MASK]", "<mask>", "<|mask|>", "<|mdm_mask|>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Augment:
    """What is done to the tokens of a batch, after packing; with the defaults nothing.

    Probabilities are of each token on its own. Tokens without loss (padding, prompts, the first
    of each span) and special tokens stay as they are.

    Attributes:
        mask_prob: tokens that are to be told from both sides (BERT; 0.15 there). Labels stand at
            them, unshifted, and nowhere else.
        mask_id: what they become; None for the tokenizer's own mask token.
        mask_replace_prob: share of them that become ``mask_id``.
        random_replace_prob: share of them that become any other token; the rest stay.
        noise_prob: tokens of the input that become any other, while labels stay the true ones.
        loss_drop_prob: tokens whose loss is left out.
        seed: at most 128 bits; another seed chooses other tokens.
        vocab_size: ids the model has; None for the tokenizer's.
        special_ids: further tokens that stay and that no token becomes.
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
        bounds = {
            "mask_id": (0, _MAX_IDS - 1),
            "seed": (-most, most),
            "vocab_size": (1, _MAX_IDS),
        }
        problems = [
            f"{name}: {quote_value(getattr(self, name))} is no probability from 0 to 1"
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
        # 0.9 and 0.1 are 1, whatever the sum of the nearest binary fractions is.
        problems = (
            [f"mask_replace_prob: with random_replace_prob it makes {total_share:g}, more than 1"]
            if total_share > 1 + 1e-9
            else []
        )
        if self.mask_prob and self.noise_prob:
            problems.append(
                f"noise_prob: {self.noise_prob} and mask_prob: {self.mask_prob} exclude each other, for one is of "
                "models that see both sides and the other of causal ones; random_replace_prob is the noise of masking"
            )
        return problems

    def _set_special(self) -> list[str]:
        special_ids: Any = self.special_ids
        if not isinstance(special_ids, (tuple, list)):
            return [f"special_ids: {quote_value(special_ids)} is no tuple of ids"]
        ids = [as_int(value) for value in special_ids]
        wrong = [
            special_ids[number]
            for number, token_id in enumerate(ids)
            if token_id is None or not 0 <= token_id < _MAX_IDS
        ]
        if wrong:
            return [f"special_ids: {quote_value(wrong[0])} is no id"]
        object.__setattr__(self, "special_ids", tuple(ids))
        return []

    @property
    def is_on(self) -> bool:
        """Whether it changes anything."""
        return bool(self.mask_prob or self.noise_prob or self.loss_drop_prob)


def _is_probability(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return math.isfinite(value) and 0 <= float(value) <= 1


@dataclass(frozen=True, slots=True, eq=False)
class Augmentation:
    """Augmentation made ready for the batches of one store.

    Attributes:
        settings: with ``mask_id`` found.
        special: whether an id is special [at most the largest special id + 2]; the last entry is of
            all ids above.
        replacement_ids: the ids that a token may become, int64; empty where none becomes any.
        choice_key, replacement_key, drop_key: keys of which tokens, of what they become, and of whose loss is left out.
    """

    settings: Augment
    special: NDArray[np.bool_]
    replacement_ids: NDArray[np.int64]
    choice_key: HashKey
    replacement_key: HashKey
    drop_key: HashKey

    @property
    def drops_loss(self) -> bool:
        """Whether it decides which tokens are trained."""
        return bool(self.settings.mask_prob or self.settings.loss_drop_prob)


class TokenizerSource(Protocol):
    """What says which tokenizer made the ids: a store or a stream."""

    @property
    def vocab_size(self) -> int | None:
        """Every id is below this; None where nobody says."""

    @property
    def tokenizer(self) -> "SpecialTokens":
        """The tokenizer; asked for only where ``vocab_size`` is known."""


class SpecialTokens(Protocol):
    """The special tokens of a tokenizer."""

    @property
    def added(self) -> Mapping[str, int]:
        """Ids of the added tokens."""

    @property
    def control(self) -> Mapping[str, int]:
        """Ids of the control tokens."""

    @property
    def end_id(self) -> int:
        """The end-of-document id."""

    @property
    def bos_id(self) -> int | None:
        """The beginning-of-document id."""


def make_augmentation(
    augment: Augment | Mapping[str, Any] | None, store: TokenizerSource, labels: str
) -> Augmentation | None:
    """Check the settings against a store's tokenizer; None where they change nothing.

    Args:
        augment: the settings, also as plain values by their names.
        store: what is read; its tokenizer is looked at only where tokens are changed.
        labels: the form of the labels.

    Raises:
        SettingsError: all that does not fit.
    """
    if isinstance(augment, Mapping):
        augment = from_plain(Augment, augment, "augment")
    if augment is not None and not isinstance(augment, Augment):
        raise SettingsError(
            [f"augment: {quote_value(augment)} is no Augment; give Augment(noise_prob=0.1) or the like"]
        )
    if augment is None or not augment.is_on:
        return None
    changes = augment.mask_prob or augment.noise_prob
    # A bare prefix has no tokenizer.
    tokenizer = store.tokenizer if changes and store.vocab_size is not None else None
    words = {**tokenizer.added, **tokenizer.control} if tokenizer else {}
    settings = replace(augment, mask_id=_resolve_mask_id(augment, words))
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


def _resolve_mask_id(augment: Augment, words: Mapping[str, int]) -> int | None:
    if augment.mask_id is not None or not augment.mask_prob:
        return augment.mask_id
    return next((words[token] for token in _KNOWN_MASK_TOKENS if token in words), None)


def _find_problems(settings: Augment, store_vocab_size: int | None, labels: str) -> list[str]:
    """What does not fit a store of so many ids; None where it names no tokenizer."""
    problems = []
    size = settings.vocab_size or store_vocab_size
    if size is not None and store_vocab_size is not None and size < store_vocab_size:
        problems.append(f"vocab_size: {size:,} is less than the {store_vocab_size:,} ids of the store's tokenizer")
    if size is None and _draws_ids(settings):
        problems.append("vocab_size: missing; this store names no tokenizer, so give the number of ids to draw from")
    if settings.mask_prob and settings.mask_id is None and settings.mask_replace_prob:
        reason = "no tokenizer to look for" if store_vocab_size is None else "the store's tokenizer has none of"
        problems.append(
            f"mask_id: missing, and {reason} {', '.join(_KNOWN_MASK_TOKENS)}; name the id that stands for a masked "
            f"token (one "
            "beyond the vocabulary needs vocab_size, the ids that the model has)"
        )
    for name, ids in (("mask_id", (settings.mask_id,)), ("special_ids", settings.special_ids)):
        problems += [
            f"{name}: {token_id} is outside of the vocabulary, whose ids go from 0 to {size - 1}; a model that has "
            "more "
            "is told with vocab_size"
            for token_id in ids
            if token_id is not None and size is not None and token_id >= size
        ]
    if settings.mask_prob and labels == "shifted":
        problems.append(
            "mask_prob: a masked token is told where it stands, and labels='shifted' are those of the next; use "
            "labels='aligned'"
        )
    return problems


def add_augment_state(state: dict[str, Any], augmentation: Augmentation | None) -> dict[str, Any]:
    """A state of a plan with what was done to its tokens, where anything was."""
    return {**state, AUGMENT_KEY: _make_augment_entry(augmentation.settings)} if augmentation else state


def remove_augment_state(state: Any, augmentation: Augmentation | None) -> Any:
    """The state of the plan in one of :func:`add_augment_state`; what is no state is the plan's to refuse.

    Raises:
        StateError: its batches were augmented in another way; names each setting that differs.
    """
    if not isinstance(state, dict):
        return state
    saved_entry, current_entry = (
        state.get(AUGMENT_KEY),
        _make_augment_entry(augmentation.settings) if augmentation else None,
    )
    if saved_entry != current_entry:
        raise StateError(
            f"The state belongs to a run of other augmentation: "
            f"{'; '.join(_describe_setting_differences(saved_entry, current_entry))}. Give the "
            "augment= it was made with, or start without the state."
        )
    return {name: value for name, value in state.items() if name != AUGMENT_KEY}


def _make_augment_entry(settings: Augment) -> dict[str, Any]:
    return {"version": AUGMENT_VERSION, **to_plain(settings)}


def _describe_setting_differences(saved_entry: Any, current_entry: Any) -> list[str]:
    """Each setting that differs; one side may have no augmentation, and then its defaults do nothing."""
    if not isinstance(saved_entry, dict | None):
        return [f"augment was {quote_value(saved_entry)}"]
    off = _make_augment_entry(Augment())
    saved, current = saved_entry or off, current_entry or off
    return [
        f"augment.{name} was {quote_value(saved.get(name))} and is {quote_value(current.get(name))}"
        for name in sorted({*saved, *current})
        if saved.get(name) != current.get(name)
    ]
