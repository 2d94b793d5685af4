"""Manifest entries that describe generations, layers and removed documents."""

from itertools import pairwise
from typing import Annotated, Any, Literal, get_args

import msgspec

GenerationKind = Literal["prepared", "appended", "removed", "compacted"]
GENERATION_KINDS: tuple[str, ...] = get_args(GenerationKind)
# The upper bounds keep products of counts with the bytes of a row or token below 2**63.
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
# XXH3-128 in hex digits.
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]*$", min_length=32, max_length=32)]


class LayerEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Documents that one generation added to a subset.

    ``lengths`` is the XXH3-128 of the lengths file; ``sums`` is the checksum of the header of its ``.sums``, absent in
    older stores.
    """

    generation: Count
    documents: Count
    lengths: Digest
    sums: Digest | None = None


class RemovedEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Removed documents of a subset, with their tokens and trained tokens.

    ``generation`` is part of the file name, ``file`` is the XXH3-128 of the file.
    """

    generation: Count
    documents: Count
    tokens: Size
    trained: Size
    file: Digest


class GenerationEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """History entry of one generation.

    ``documents``, ``tokens`` and ``fingerprints`` are those of each subset after this generation, without removed
    documents; ``sources`` is the number of sources at that time. ``recipe`` and its fingerprint are present if a job
    read inputs. ``selected`` holds the source names given to a removal. ``manifest`` is the XXH3-128 of this
    generation's manifest, which every later generation records.
    """

    number: Count
    made: GenerationKind
    documents: dict[str, Count]
    tokens: dict[str, Size]
    fingerprints: dict[str, str]
    sources: Count
    recipe: dict[str, Any] = {}
    recipe_fingerprint: str = ""
    selected: tuple[str, ...] = ()
    manifest: str = ""

    @property
    def has_inputs(self) -> bool:
        """True if a job read inputs for this generation."""
        return self.made in ("prepared", "appended")


def list_readable_generations(history: tuple[GenerationEntry, ...]) -> tuple[int, ...]:
    """Return the numbers of the generations since the last compaction.

    Older ones cannot be opened.
    """
    readable_numbers: list[int] = []
    for entry in history:
        readable_numbers = [entry.number] if entry.made == "compacted" else [*readable_numbers, entry.number]
    return tuple(readable_numbers)


def list_history_faults(generation: int, history: tuple[GenerationEntry, ...], sources: int) -> list[str]:
    """List the contradictions in a history, one phrase each.

    ``sources`` is the number of sources in the manifest.
    """
    numbers = [entry.number for entry in history]
    # The length is compared first: a damaged generation number could make the range huge.
    if history and (len(numbers) != generation or numbers != list(range(1, generation + 1))):
        return [f"its history has the generations {numbers}, but it is generation {generation}"]
    if not history and generation != 1:
        return [f"it is generation {generation} but has no history"]
    counts = [0, *(entry.sources for entry in history), sources]
    if any(a > b for a, b in pairwise(counts)):
        return [f"its history has {counts[1:-1]} sources, and the manifest {sources}"]
    return []


def list_layer_faults(generation: int, layers: tuple[LayerEntry, ...], bounds: set[int], documents: int) -> list[str]:
    """List the contradictions in the layers of a subset, one phrase each.

    ``layers`` is empty if the subset has one layer, of generation 1. ``bounds`` holds the document numbers at which
    shards end.
    """
    if not layers:
        return []
    numbers = [layer.generation for layer in layers]
    ascending = all(a < b for a, b in pairwise(numbers))
    if not ascending or numbers[0] < 1 or numbers[-1] > generation:
        return [f"has the layers of generations {numbers} in generation {generation}"]
    end = 0
    for layer in layers:
        end += layer.documents
        if layer.documents < 1 or end not in bounds:
            return [f"has a layer of generation {layer.generation} that ends inside a shard"]
    return [] if end == documents else [f"has {end} documents in its layers, but declares {documents}"]
