"""Phase A, per unit: parse, normalize, hash and tokenize into temporary files."""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from batchloom.core.errors import DamagedFileError
from batchloom.preparation.dedup.line_dedup import RepeatUnit, hash_segments
from batchloom.preparation.dedup.sorted_keys import open_key_writer
from batchloom.preparation.documents.encode_documents import EncodeContext
from batchloom.preparation.units.record_ingester import RecordIngester
from batchloom.preparation.units.unit_files import UnitFiles
from batchloom.preparation.units.unit_report import Stopwatch, UnitStatistics
from batchloom.preparation.units.unit_tokenizer import UnitTokenizer
from batchloom.preparation.units.units import CrashIsolation, CrashMarker, DamagedPart, Unit, UnitTask
from batchloom.preparation.units.work_folder import (
    FACTS_NAME,
    UnitFacts,
    attempt_folder,
    move_into_place,
    open_attempt_file,
    read_unit_facts,
)
from batchloom.preparation.workers.protocols import MessageCallback
from batchloom.sources import PartReader, prefetch_sources
from batchloom.store import wrap_write_errors, write_file
from batchloom.store.write import make_folder, sync_folder

_T = TypeVar("_T")


def tokenize_unit(unit_task: UnitTask, context: EncodeContext, send_message: MessageCallback) -> UnitFacts:
    """Write a unit's files into an attempt folder, facts last, and move it into place.

    ``send_message`` receives a :class:`CrashMarker` before a batch, a :class:`UnitProgress` after it, and a
    :class:`DamagedPart` for a damaged file. A record that ends the job, as the recipe demands, raises UnusableError.
    """
    folder = attempt_folder(unit_task.output_path, unit_task.attempt)
    tokenize_parts = partial(_tokenize_parts, unit_task, context, folder, send_message)
    facts = _retry_without_damaged(tokenize_parts, unit_task.unit, context, send_message)
    write_file(folder / FACTS_NAME, msgspec.json.encode(facts))
    sync_folder(folder)
    if move_into_place(folder, unit_task.output_path):
        return facts
    # Another attempt was first; its facts differ from ours if a record was excluded.
    return read_unit_facts(unit_task.output_path) or facts


class _DamagedPartError(Exception):
    def __init__(self, part: int, error: DamagedFileError) -> None:
        super().__init__(str(error))
        self.part = part


@contextlib.contextmanager
def _name_part(number: int) -> Iterator[None]:
    try:
        yield
    except DamagedFileError as error:
        raise _DamagedPartError(number, error) from error


def _retry_without_damaged(
    read_parts: Callable[[Mapping[int, str]], _T], unit: Unit, context: EncodeContext, send_message: MessageCallback
) -> _T:
    """Call ``read_parts`` again without the parts whose files turn out to be damaged.

    What was read of such a file before may be wrong, too. Its argument has the damage by part.
    """
    try:
        return read_parts({})
    except _DamagedPartError as error:
        # The other parts are examined at once: with many damaged files, one retry each would take hours.
        damage = {error.part: str(error), **_find_damage(unit, error.part + 1, context)}
    for part, reason in damage.items():
        send_message(DamagedPart(part, reason))
    return read_parts(damage)


def _find_damage(unit: Unit, first: int, context: EncodeContext) -> dict[int, str]:
    """Read the parts from ``first`` on, and return the damage of files by part."""
    damage = {}
    for number, part in enumerate(unit.parts):
        if number < first:
            continue
        try:
            rules = context.record_parsers.get_parser(part.source).rules
            with PartReader(part, rules, context.bounds) as reader:
                for _ in reader:
                    pass
                reader.finish()
        except DamagedFileError as error:
            damage[number] = str(error)
    return damage


def _tokenize_parts(
    unit_task: UnitTask,
    context: EncodeContext,
    folder: Path,
    send_message: MessageCallback,
    damage: Mapping[int, str],
) -> UnitFacts:
    if damage:
        # Not every file of the first try is written again.
        with wrap_write_errors(folder):
            shutil.rmtree(folder)
    make_folder(folder)
    with contextlib.ExitStack() as stack:
        encoder = stack.enter_context(ThreadPoolExecutor(1, "encode")) if context.overlap else None
        files = stack.enter_context(UnitFiles(folder, context.dedup))
        unit_tokenizer = UnitTokenizer(unit_task, context, files, encoder, send_message)
        parts = prefetch_sources(unit_task.unit.parts, lambda part: part.source)
        for number, part in enumerate(parts):
            if number in damage:
                unit_tokenizer.leave_out(number, part, damage[number])
                continue
            rules = context.record_parsers.get_parser(part.source).rules
            with _name_part(number), PartReader(part, rules, context.bounds) as reader:
                for _ in unit_tokenizer.iter_steps(number, part, reader):
                    pass
        unit_tokenizer.flush()
        unit_tokenizer.write_pending()
        files.sync()
    return unit_tokenizer.make_facts()


def write_segment_keys(
    unit_task: UnitTask, repeat_unit: RepeatUnit, context: EncodeContext, send_message: MessageCallback
) -> int:
    """Write the keys of a unit's lines or paragraphs and return their number.

    The number includes blank lines, which have no key. ``send_message`` receives a :class:`CrashMarker` before
    each batch, and a :class:`DamagedPart` for a damaged file.
    """
    write_keys = partial(_write_part_keys, unit_task, repeat_unit, context, send_message)
    return _retry_without_damaged(write_keys, unit_task.unit, context, send_message)


def _write_part_keys(
    unit_task: UnitTask,
    repeat_unit: RepeatUnit,
    context: EncodeContext,
    send_message: MessageCallback,
    damage: Mapping[int, str],
) -> int:
    # Drops and bad records are counted in the tokenization pass, not here.
    ingester = RecordIngester(
        normalized=context.normalize,
        cleaner=context.cleaner,
        line_deduplicator=None,
        statistics=UnitStatistics(),
        stopwatch=Stopwatch(),
    )
    crash_isolation = CrashIsolation(unit_task.suspected_ranges, unit_task.excluded)
    count = 0
    parts = prefetch_sources(unit_task.unit.parts, lambda part: part.source)
    with (
        open_attempt_file(unit_task.output_path, unit_task.attempt) as attempt_path,
        open_key_writer(attempt_path) as add,
    ):
        for number, part in enumerate(parts):
            record_parser = context.record_parsers.get_parser(part.source)
            if record_parser.record_kind != "text" or number in damage:
                continue
            with _name_part(number), PartReader(part, record_parser.rules, context.bounds) as reader:
                for record_batch in reader:
                    for record_slice, is_suspected in crash_isolation.split_batch(number, record_batch):
                        if record_slice.records:
                            records = record_slice.records[0], record_slice.records[-1]
                            send_message(CrashMarker("clean", ((number, records[0]), (number, records[1]))))
                        ingester.ingest(record_slice, record_parser, part.source.name)
                        numbers = [number] * len(record_slice.values)
                        keys, count = hash_segments(record_slice.values, numbers, count, repeat_unit)
                        add(keys)
                        if is_suspected:
                            send_message(CrashMarker("clean", None))
                reader.finish()
    return count
