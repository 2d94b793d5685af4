"""What a manifest says of generations: how each was made, which documents it added, which are removed."""

from itertools import pairwise
from typing import Annotated, Any, Literal, get_args

import msgspec

GenerationKind = Literal["prepared", "appended", "removed", "compacted"]
GENERATION_KINDS: tuple[str, ...] = get_args(GenerationKind)
# Numbers of a manifest. Their products with the bytes of a row or a token stay below 2**63.
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
# An XXH3-128.
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]*$", min_length=32, max_length=32)]


class LayerEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The documents that one generation added to a subset: how many, and the XXH3-128 of their lengths.

    ``sums`` is that of the head of the ``.sums`` of their lengths, and not in older stores.
    """

    generation: Count
    documents: Count
    lengths: Digest
    sums: Digest | None = None


class RemovedEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The removed documents of a subset, their tokens and how many of these were trained.

    ``generation`` names the file, ``file`` is its XXH3-128.
    """

    generation: Count
    documents: Count
    tokens: Size
    trained: Size
    file: Digest


class GenerationEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One generation as the log tells it.

    ``documents`` and ``tokens`` are those of each subset after it, without what is removed;
    ``fingerprints`` those of its subsets; ``sources`` how many sources the store then had. ``recipe``
    and its fingerprint are there where a job read inputs, ``selected`` where documents were removed:
    the names they were asked for by. ``manifest`` is the XXH3-128 of the generation's manifest,
    which every later generation knows.
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
        """Whether a job read inputs for it."""
        return self.made in ("prepared", "appended")


def list_readable_generations(history: tuple[GenerationEntry, ...]) -> tuple[int, ...]:
    """Numbers of the generations that can still be opened: those since the last compaction."""
    readable_numbers: list[int] = []
    for entry in history:
        readable_numbers = [entry.number] if entry.made == "compacted" else [*readable_numbers, entry.number]
    return tuple(readable_numbers)


def list_history_faults(generation: int, history: tuple[GenerationEntry, ...], sources: int) -> list[str]:
    """List the contradictions in a history, one phrase each; ``sources`` are those of the manifest."""
    numbers = [entry.number for entry in history]
    # Its length first: a damaged manifest may say any number.
    if history and (len(numbers) != generation or numbers != list(range(1, generation + 1))):
        return [f"its history has the generations {numbers}, and it is generation {generation}"]
    if not history and generation != 1:
        return [f"it is generation {generation} and has no history"]
    counts = [0, *(entry.sources for entry in history), sources]
    if any(a > b for a, b in pairwise(counts)):
        return [f"its history has {counts[1:-1]} sources, and the manifest {sources}"]
    return []


def list_layer_faults(generation: int, layers: tuple[LayerEntry, ...], bounds: set[int], documents: int) -> list[str]:
    """What contradicts itself in the layers of a subset, one phrase each.

    Args:
        generation: of the manifest.
        layers: as it lists them; empty where there is one, of generation 1.
        bounds: numbers of documents at which shards end.
        documents: of the subset.
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
    return [] if end == documents else [f"has {end} documents in its layers, and says {documents}"]
