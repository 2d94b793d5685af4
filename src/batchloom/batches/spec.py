"""The loader's own settings: what a batch looks like and who takes which rows."""

from dataclasses import dataclass
from typing import Literal

from batchloom.core.spec import nearest, raise_problems, set_wholes

Labels = Literal["aligned", "shifted"]
Output = Literal["torch", "numpy"]
Form = Literal["rows", "varlen"]

_MOST_RANKS = (1 << 24) - 1
_BOUNDS = {"prefetch": (0, 1024), "rank": (0, _MOST_RANKS), "world_size": (1, _MOST_RANKS + 1)}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """How batches are made of a plan's rows; none of it changes which tokens a step holds.

    Attributes:
        labels: ``aligned`` with input_ids, as Hugging Face models expect (they shift), or
            ``shifted``: next-token targets. Both train the same set of tokens.
        output: ``torch`` tensors or ``numpy`` arrays.
        form: ``rows`` [batch, seq_len], or ``varlen``: spans back to back without padding.
        prefetch: batches made ahead by the producer thread; 0 makes them when asked.
        rank: this process's data-parallel rank.
        world_size: number of data-parallel ranks.
    """

    labels: Labels = "aligned"
    output: Output = "torch"
    form: Form = "rows"
    prefetch: int = 4
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        problems = set_wholes(self, _BOUNDS)
        for name, known in (("labels", Labels), ("output", Output), ("form", Form)):
            value, options = getattr(self, name), known.__args__  # type: ignore[attr-defined]
            if value not in options:
                hint = nearest(str(value), options)
                problems.append(f"{name}: {value!r} is none of {', '.join(options)}{hint}")
        raise_problems(problems)
