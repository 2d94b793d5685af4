"""The loader's own settings: what a batch looks like and who takes which rows."""

from dataclasses import dataclass
from typing import Literal

from batchloom.core.spec import nearest, raise_problems

Labels = Literal["aligned", "shifted"]
Output = Literal["torch", "numpy"]
Form = Literal["rows", "varlen"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """How batches are made of a plan's rows; none of it changes which tokens a step holds.

    Attributes:
        labels: ``aligned`` with input_ids, as Hugging Face models expect (they shift), or
            ``shifted``: next-token targets. Both train the same set of tokens.
        output: ``torch`` tensors or ``numpy`` arrays.
        form: ``rows`` [batch, seq_len], or ``varlen``: spans back to back without padding.
        prefetch: batches made ahead by the producer thread; 0 makes them when asked.
        rank: this process's data-parallel rank; None finds it out.
        world_size: number of data-parallel ranks; None finds it out.
    """

    labels: Labels = "aligned"
    output: Output = "torch"
    form: Form = "rows"
    prefetch: int = 4
    rank: int | None = None
    world_size: int | None = None

    def __post_init__(self) -> None:
        problems = []
        for name, known in (("labels", Labels), ("output", Output), ("form", Form)):
            value, options = getattr(self, name), known.__args__  # type: ignore[attr-defined]
            if value not in options:
                hint = nearest(str(value), options)
                problems.append(f"{name}: {value!r} is none of {', '.join(options)}{hint}")
        if not isinstance(self.prefetch, int) or not 0 <= self.prefetch <= 1024:
            problems.append(f"prefetch: {self.prefetch!r} is not a whole number from 0 to 1024")
        if (self.rank is None) != (self.world_size is None):
            problems.append(
                f"rank: {self.rank} and world_size: {self.world_size} go together; give both or neither"
            )
        raise_problems(problems)
