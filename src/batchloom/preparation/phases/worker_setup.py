"""What one worker does: orders of every phase, with all that it needs made once."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from batchloom.core.files import read_regular
from batchloom.preparation.documents import (
    ChatEncoder,
    Membership,
    Readings,
    Task,
    chat_encoder,
    make_fim,
    media_encoder,
)
from batchloom.preparation.phases.duplicate_resolution import SettleOrder, settle_unit
from batchloom.preparation.phases.duplicate_tasks import (
    BandsOrder,
    ComponentsOrder,
    FindOrder,
    StoredBandsOrder,
    find_duplicates,
    link_components,
    sort_bands,
    sort_stored_bands,
)
from batchloom.preparation.phases.repeated_lines import keep_pieces
from batchloom.preparation.phases.tokenize_unit import tokenize_unit
from batchloom.preparation.phases.unit_shards import WriteOrder, write_unit
from batchloom.preparation.settings import Recipe
from batchloom.preparation.units import CutsOrder, PiecesOrder, UnitOrder, find_cuts, reading
from batchloom.preparation.workers import Tell, Work, refuse_other_versions
from batchloom.sources import Limits, RecordBounds
from batchloom.store.format import TOKEN_DTYPES
from batchloom.text import Cleaner, CleanStep
from batchloom.tokens import EngineChoice, Tokenizer, on_engine, tokenizer_from_state


@dataclass(frozen=True, slots=True)
class Hand:
    """All that a worker of a job needs to know, as a value that other processes can be sent.

    Attributes:
        recipe: what to do.
        limits: the sizes that decide documents.
        tokenizer: the file that keeps the job's tokenizer.
        engine: how it encodes.
        dtype: name of the dtype on disk.
        chat: whether some source has conversations.
        clean: the steps of cleaning, ready to be taken.
        overlap: whether a batch is encoded on a thread while the next one is read.
        versions: of the packages that decide bytes, as the coordinator has them.
    """

    recipe: Recipe
    limits: Limits
    tokenizer: Path
    engine: EngineChoice
    dtype: str
    chat: bool
    clean: tuple[CleanStep, ...]
    overlap: bool
    versions: Mapping[str, str]

    def __call__(self) -> Work:
        """Make what does orders, in the process that does them.

        Raises:
            WorkerError: this process has other versions.
        """
        refuse_other_versions(self.versions)
        return doing(self.task)

    def task(self) -> Task:
        """What every unit needs, in a process that knows nothing yet; reads nothing of the input."""
        with reading(self.tokenizer):
            state = msgspec.json.decode(read_regular(self.tokenizer), type=dict)
        tokenizer = on_engine(tokenizer_from_state(state), self.engine)
        chat = chat_encoder(tokenizer, self.recipe) if self.chat else None
        return self.task_of(tokenizer, Readings(self.recipe, self.limits), chat)

    def task_of(self, tokenizer: Tokenizer, readings: Readings, chat: ChatEncoder | None) -> Task:
        """What every unit needs, of parts that are there."""
        recipe = self.recipe
        return Task(
            readings.rules,
            readings,
            RecordBounds(readings.rules),
            recipe.reading.normalize,
            tokenizer,
            TOKEN_DTYPES[self.dtype],
            Membership(recipe.val_fraction, recipe.test_fraction),
            chat,
            overlap=self.overlap,
            cleaner=Cleaner(self.clean) if self.clean else None,
            dedup=recipe.dedup,
            fim=make_fim(recipe.reading.fim, tokenizer),
            media=media_encoder(tokenizer, recipe, chat),
        )


def doing(make: Callable[[], Task]) -> Work:
    """What does the orders of every phase.

    Args:
        make: makes what the first phase needs, when its first order comes.
    """
    task = cache(make)

    def work(order: Any, tell: Tell) -> Any:
        if isinstance(order, UnitOrder):
            return tokenize_unit(order, task(), tell)
        if isinstance(order, PiecesOrder):
            return keep_pieces(order, task(), tell)
        if isinstance(order, CutsOrder):
            return find_cuts(order, task().rules)
        return _ALONE[type(order)](order)

    return work


# What does an order that says all by itself.
_ALONE: dict[type, Callable[[Any], Any]] = {
    FindOrder: find_duplicates,
    BandsOrder: sort_bands,
    StoredBandsOrder: sort_stored_bands,
    ComponentsOrder: link_components,
    SettleOrder: settle_unit,
    WriteOrder: write_unit,
}
