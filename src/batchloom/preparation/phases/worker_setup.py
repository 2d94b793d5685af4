"""Setup of the workers of a job."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from batchloom.core.files import read_regular_file
from batchloom.core.process_state import relax_gc
from batchloom.preparation.documents.encode_chat import ChatEncoder
from batchloom.preparation.documents.encode_documents import DocumentEncoder, EncodeContext
from batchloom.preparation.documents.fill_in_the_middle import make_fim_cutter
from batchloom.preparation.documents.record_parsers import RecordParsers
from batchloom.preparation.documents.subsets import SubsetRule
from batchloom.preparation.documents.tokenizer_choice import make_chat_encoder, make_media_encoder
from batchloom.preparation.phases.tokenize_unit import tokenize_unit, write_segment_keys
from batchloom.preparation.settings.recipe import Recipe
from batchloom.preparation.settings.run_settings import ExecutionSettings
from batchloom.preparation.units.units import UnitTask
from batchloom.preparation.units.work_folder import translate_read_errors
from batchloom.preparation.workers.executor_choice import runs_inline
from batchloom.preparation.workers.fork_server import ForkServer
from batchloom.preparation.workers.package_versions import check_versions
from batchloom.preparation.workers.protocols import MessageCallback, TaskFunction
from batchloom.sources import ReadLimits, RecordBounds
from batchloom.store.format import TOKEN_DTYPES
from batchloom.text import CleanStep, TextCleaner
from batchloom.tokens import EncodingEngine, Tokenizer, apply_engine, restore_tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer with its default engine, cached by the content of its file."""
    with translate_read_errors(path):
        return _restore_tokenizer(read_regular_file(path))


@lru_cache(maxsize=1)
def _restore_tokenizer(state: bytes) -> Tokenizer:
    tokenizer = restore_tokenizer(msgspec.json.decode(state, type=dict))
    _ = tokenizer.engine
    return tokenizer


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
    engine: EncodingEngine
    dtype: str
    chat: bool
    clean: tuple[CleanStep, ...]
    overlap: bool
    versions: Mapping[str, str]

    def __call__(self) -> TaskFunction:
        """Make the task function in a worker, or where workers are forked from.

        Raises:
            WorkerError: this process has other package versions.
        """
        check_versions(self.versions)
        context = self.load_context()
        # Loads the engine, so that forked workers share it.
        context.encoder.tokenizer.encode_batch([])
        return make_task_function(context)

    def load_context(self) -> EncodeContext:
        """Load the encode context in a new process; reads no input."""
        tokenizer = apply_engine(load_tokenizer(self.tokenizer), self.engine)
        chat = make_chat_encoder(tokenizer, self.recipe) if self.chat else None
        return self.make_context(tokenizer, RecordParsers(self.recipe, self.limits), chat)

    def make_context(
        self, tokenizer: Tokenizer, record_parsers: RecordParsers, chat: ChatEncoder | None
    ) -> EncodeContext:
        """Build the encode context from existing components."""
        recipe = self.recipe
        return EncodeContext(
            encoder=DocumentEncoder(
                tokenizer=tokenizer,
                dtype=TOKEN_DTYPES[self.dtype],
                chat=chat,
                dedup=recipe.dedup,
                fim=make_fim_cutter(recipe.reading.fim, tokenizer),
                media=make_media_encoder(tokenizer, recipe, chat),
            ),
            record_parsers=record_parsers,
            bounds=RecordBounds(record_parsers.rules),
            normalize=recipe.reading.normalize,
            membership=SubsetRule(recipe.val_fraction, recipe.test_fraction),
            overlap=self.overlap,
            cleaner=TextCleaner(self.clean) if self.clean else None,
        )


def make_task_function(context: EncodeContext) -> TaskFunction:
    """Return a function that runs tasks of units and argumentless functions."""

    def run_phase_task(task: Any, send_message: MessageCallback) -> Any:
        with relax_gc():
            if isinstance(task, UnitTask):
                if task.repeat_unit is None:
                    return tokenize_unit(task, context, send_message)
                return write_segment_keys(task, task.repeat_unit, context, send_message)
            return task()

    return run_phase_task


@contextlib.contextmanager
def start_server(execution: ExecutionSettings, workers: int) -> Iterator[ForkServer | None]:
    """Run the process that workers are forked from; None if none are.

    It imports modules while this process does other work.
    """
    if execution.engine != "pool" or runs_inline(execution, workers):
        yield None
        return
    with ForkServer(__name__) as server:
        yield server
