"""First phase: what all units share, chosen from the first records."""

from functools import partial
from typing import final

from batchloom.preparation.documents.encode_documents import EncodeContext
from batchloom.preparation.documents.fill_in_the_middle import make_fim_cutter
from batchloom.preparation.documents.record_parsers import RecordParsers
from batchloom.preparation.documents.tokenizer_choice import (
    choose_dtype_name,
    choose_job_template,
    choose_job_tokenizer,
    find_unused_columns,
)
from batchloom.preparation.identity.step_files import build_step_indexes
from batchloom.preparation.phases.prepare_notes import describe_unused_columns
from batchloom.preparation.phases.worker_setup import WorkerSetup, load_tokenizer
from batchloom.preparation.report.progress import PrepareLog, Progress
from batchloom.preparation.request.recipe_choice import PrepareRequest
from batchloom.preparation.units.work_folder import WorkFolder
from batchloom.preparation.workers.fork_server import ForkServer
from batchloom.preparation.workers.machine_limits import count_cores
from batchloom.preparation.workers.package_versions import collect_versions
from batchloom.sources import SourceListing
from batchloom.tokens import Tokenizer, parse_train_spec


@final
class SamplePhase:
    """Choice of the tokenizer, the chat template and the setup of the workers."""

    def __init__(
        self,
        work: WorkFolder,
        request: PrepareRequest,
        listing: SourceListing,
        record_parsers: RecordParsers,
        log: PrepareLog,
        server: ForkServer | None,
    ) -> None:
        self._work = work
        self._recipe = request.recipe
        self._tokenizer_state = request.tokenizer_state
        self._listing = listing
        self._record_parsers = record_parsers
        self._log = log
        self._server = server

    def run(self, workers: int) -> tuple[WorkerSetup, EncodeContext]:
        """Return the setup of the workers, and the context of this process."""
        recipe = self._recipe
        parsers = self._record_parsers
        log = self._log
        with log.time("sample"):
            tokenizer = self._choose_tokenizer()
        chat = choose_job_template(recipe, self._listing.sources, parsers, tokenizer, log.add_warning)
        columns = find_unused_columns(map(parsers.get_parser, self._listing.sources), chat)
        log.report(describe_unused_columns(columns))
        setup = WorkerSetup(
            recipe,
            parsers.rules.limits,
            self._work.tokenizer_path,
            tokenizer.engine,
            choose_dtype_name(recipe, tokenizer),
            chat is not None,
            build_step_indexes(recipe.reading.clean, self._work.path, log.note),
            overlap=count_cores() >= 2 * workers,
            versions=collect_versions(recipe.reading.clean),
        )
        return setup, setup.make_context(tokenizer, parsers, chat)

    def _choose_tokenizer(self) -> Tokenizer:
        """Return the job's tokenizer: saved by an earlier run, learned, or resolved.

        The server loads it while this process verifies its engine.
        """
        recipe = self._recipe
        state = self._work.tokenizer_state()
        if state is None and parse_train_spec(recipe.tokenizer) is not None:
            self._log.listener(Progress("sample", 0, self._listing.bytes, 0, 0, 0, 0))

        def keep(tokenizer: Tokenizer) -> None:
            choose_dtype_name(recipe, tokenizer)
            if state is None:
                self._work.keep_tokenizer(tokenizer)
            if self._server is not None:
                self._server.call(partial(load_tokenizer, self._work.tokenizer_path))

        tokenizer = choose_job_tokenizer(
            recipe,
            self._listing.sources,
            self._record_parsers,
            self._log.add_warning,
            self._tokenizer_state if state is None else state,
            keep,
        )
        make_fim_cutter(recipe.reading.fim, tokenizer)
        return tokenizer
