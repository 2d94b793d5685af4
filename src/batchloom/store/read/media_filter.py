"""Filter of a store's documents by the kinds of media they hold."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import InputError, SettingsError
from batchloom.core.medium import MEDIUM_KINDS
from batchloom.core.settings import quote_value, suggest
from batchloom.store.format.store_lengths import StoreLengths
from batchloom.store.read.filtered_lengths import FilteredLengths
from batchloom.store.read.remote_lengths import RemoteLengths
from batchloom.store.read.store_reader import Store
from batchloom.store.read.stored_media import StoreMedia

NO_MEDIA, ANY_MEDIA = "none", "any"
_KIND_SEPARATOR = "+"
# Number of sets of kinds. A set is encoded as bits in the order of MEDIUM_KINDS.
_KIND_SETS = 1 << len(MEDIUM_KINDS)


def normalize_media_filter(media_filter: object) -> str:
    """Return the canonical spelling of a media filter.

    It is ``none``, ``any``, or kinds joined by ``+`` in the order of ``MEDIUM_KINDS``.

    Raises:
        SettingsError: the filter is invalid.
    """
    words = media_filter.split(_KIND_SEPARATOR) if isinstance(media_filter, str) else []
    if media_filter in (NO_MEDIA, ANY_MEDIA):
        return str(media_filter)
    if words and set(words) <= set(MEDIUM_KINDS) and len(set(words)) == len(words):
        return _KIND_SEPARATOR.join(kind for kind in MEDIUM_KINDS if kind in words)
    choices = (NO_MEDIA, ANY_MEDIA, *MEDIUM_KINDS)
    hint = suggest(media_filter, choices) if isinstance(media_filter, str) else ""
    raise SettingsError(
        [f"media: {quote_value(media_filter)} is not one of {', '.join(choices)}, or kinds joined by +{hint}"]
    )


def filter_by_media(store: Store, media_filter: object) -> Store:
    """Return a store whose lengths are 0 for documents that do not match the filter.

    A document matches a filter of kinds only if it holds exactly these kinds.

    Args:
        store: an open store with all its documents.
        media_filter: ``none``, ``any``, a kind (``image``: images and nothing else), or several joined by ``+``.

    Raises:
        SettingsError: the filter is invalid, or the store is a bare prefix or synthetic.
        InputError: no document matches; lists the kinds that exist.
        StoreError: a ``.media`` file is missing or damaged.
    """
    media, lengths = normalize_media_filter(media_filter), store.lengths
    if store.manifest is None or not isinstance(lengths, StoreLengths | RemoteLengths):
        raise SettingsError([f"media: only stores have media, and {store.location.name} is not a store"])
    store_media, selected_sets = StoreMedia(store), _mask_kind_sets(media)
    documents, tokens = _count_by_kind_set(store, store_media, lengths)
    if not documents[selected_sets].any():
        available_kinds = [f"{documents[n]:,} {_format_kinds(n)}" for n in np.flatnonzero(documents).tolist()]
        raise InputError(
            f"{store.location.name} has no documents in subset {store.split} with media {media!r}; it has: "
            f"{', '.join(available_kinds)}."
        )

    def is_chosen(numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        return selected_sets[store_media.list_kinds(numbers)]

    count, total = int(documents[selected_sets].sum()), int(tokens[selected_sets].sum())
    filtered_lengths = FilteredLengths(lengths, media, is_chosen, count, total)
    location = replace(store.location, options={**store.location.options, "media": media})
    reader = store.reader.for_lengths(filtered_lengths)
    return Store(store.path, store.split, store.manifest, location, reader, filtered_lengths)


def _format_kinds(kinds: int) -> str:
    return _KIND_SEPARATOR.join(kind for bit, kind in enumerate(MEDIUM_KINDS) if kinds >> bit & 1) or NO_MEDIA


def _mask_kind_sets(media: str) -> NDArray[np.bool_]:
    """Return a mask of the sets of kinds that match a filter, bool [sets]."""
    if media == ANY_MEDIA:
        return np.arange(_KIND_SETS) > 0
    return np.array([_format_kinds(kinds) == media for kinds in range(_KIND_SETS)])


def _count_by_kind_set(
    store: Store, media: StoreMedia, lengths: StoreLengths | RemoteLengths
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return documents and tokens for each set of kinds, int64 [sets] each."""
    documents, tokens = np.zeros(_KIND_SETS, np.int64), np.zeros(_KIND_SETS, np.int64)
    for shard in range(len(store.shards)):
        numbers, kinds = media.holding(shard)
        documents += np.bincount(kinds, minlength=_KIND_SETS)
        tokens += np.bincount(kinds, lengths.take(numbers), _KIND_SETS).astype(np.int64)
    # Documents without media, often most of a store, are counted without reading their lengths.
    documents[0], tokens[0] = len(store) - documents.sum(), store.tokens - tokens.sum()
    return documents, tokens
