"""Worker setup, and task functions of every phase."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from batchloom.core.files import read_regular_file
from batchloom.preparation.documents.chat_encoding import ChatEncoder
from batchloom.preparation.documents.document_encoder import EncodeContext
from batchloom.preparation.documents.fill_in_the_middle import make_fim_cutter
from batchloom.preparation.documents.record_parsers import RecordParsers
from batchloom.preparation.documents.subsets import SubsetRule
from batchloom.preparation.documents.tokenizer_choice import make_chat_encoder, make_media_encoder
from batchloom.preparation.phases.duplicate_resolution import ResolveDuplicatesTask, resolve_unit_duplicates
from batchloom.preparation.phases.duplicate_tasks import (
    FindDuplicatesTask,
    LinkComponentsTask,
    SortSignaturesTask,
    SortStoredSignaturesTask,
    find_duplicates,
    link_components,
    sort_signatures,
    sort_stored_signatures,
)
from batchloom.preparation.phases.repeated_lines import write_segment_keys
from batchloom.preparation.phases.tokenize_unit import tokenize_unit
from batchloom.preparation.phases.unit_shards import WriteShardsTask, write_unit_shards
from batchloom.preparation.settings.recipe import Recipe
from batchloom.preparation.units.part_cuts import FindCutsTask, find_part_cuts
from batchloom.preparation.units.tasks import SegmentKeysTask, UnitTask
from batchloom.preparation.units.work_folder import translate_read_errors
from batchloom.preparation.workers.protocols import MessageCallback, TaskFunction
from batchloom.preparation.workers.versions import check_versions
from batchloom.sources import ReadLimits, RecordBounds
from batchloom.store.format import TOKEN_DTYPES
from batchloom.text import CleanStep, TextCleaner
from batchloom.tokens import EngineChoice, Tokenizer, apply_engine_choice, restore_tokenizer


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """Picklable setup of a job's workers.

    Attributes:
        recipe: the job's recipe.
        limits: read limits, which affect documents.
        tokenizer: file of the job's tokenizer state.
        engine: tokenizer engine that encodes.
        dtype: name of the token dtype on disk.
        chat: some source has conversations.
        clean: cleaning steps, ready to run.
        overlap: encode a batch on a thread while the next one is read.
        versions: versions of packages that affect output bytes, as the coordinator has them.
    """

    recipe: Recipe
    limits: ReadLimits
    tokenizer: Path
    engine: EngineChoice
    dtype: str
    chat: bool
    clean: tuple[CleanStep, ...]
    overlap: bool
    versions: Mapping[str, str]

    def __call__(self) -> TaskFunction:
        """Make the task function in the worker process.

        Raises:
            WorkerError: this process has other package versions.
        """
        check_versions(self.versions)
        return make_task_function(self.load_context)

    def load_context(self) -> EncodeContext:
        """Load the encode context in a new process; reads no input."""
        with translate_read_errors(self.tokenizer):
            state = msgspec.json.decode(read_regular_file(self.tokenizer), type=dict)
        tokenizer = apply_engine_choice(restore_tokenizer(state), self.engine)
        chat = make_chat_encoder(tokenizer, self.recipe) if self.chat else None
        return self.make_context(tokenizer, RecordParsers(self.recipe, self.limits), chat)

    def make_context(
        self, tokenizer: Tokenizer, record_parsers: RecordParsers, chat: ChatEncoder | None
    ) -> EncodeContext:
        """Build the encode context from existing components."""
        recipe = self.recipe
        return EncodeContext(
            record_parsers.rules,
            record_parsers,
            RecordBounds(record_parsers.rules),
            recipe.reading.normalize,
            tokenizer,
            TOKEN_DTYPES[self.dtype],
            SubsetRule(recipe.val_fraction, recipe.test_fraction),
            chat,
            overlap=self.overlap,
            cleaner=TextCleaner(self.clean) if self.clean else None,
            dedup=recipe.dedup,
            fim=make_fim_cutter(recipe.reading.fim, tokenizer),
            media=make_media_encoder(tokenizer, recipe, chat),
        )


def make_task_function(make_context: Callable[[], EncodeContext]) -> TaskFunction:
    """Return a function that runs tasks of every phase.

    The context is made on the first task that needs it.
    """
    get_context = cache(make_context)

    def run_phase_task(phase_task: Any, send_message: MessageCallback) -> Any:
        if isinstance(phase_task, UnitTask):
            return tokenize_unit(phase_task, get_context(), send_message)
        if isinstance(phase_task, SegmentKeysTask):
            return write_segment_keys(phase_task, get_context(), send_message)
        if isinstance(phase_task, FindCutsTask):
            return find_part_cuts(phase_task, get_context().rules)
        return _TASK_FUNCTIONS[type(phase_task)](phase_task)

    return run_phase_task


# Functions of tasks that need no encode context.
_TASK_FUNCTIONS: dict[type, Callable[[Any], Any]] = {
    FindDuplicatesTask: find_duplicates,
    SortSignaturesTask: sort_signatures,
    SortStoredSignaturesTask: sort_stored_signatures,
    LinkComponentsTask: link_components,
    ResolveDuplicatesTask: resolve_unit_duplicates,
    WriteShardsTask: write_unit_shards,
}
