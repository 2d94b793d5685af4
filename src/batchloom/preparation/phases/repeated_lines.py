"""Before phase A, per unit: keys of lines or paragraphs, to find repeated ones."""

from batchloom.preparation.dedup.line_dedup import hash_segments
from batchloom.preparation.dedup.sorted_keys import open_key_writer
from batchloom.preparation.documents.document_encoder import EncodeContext
from batchloom.preparation.phases.ingest import RecordIngester
from batchloom.preparation.units.crash_isolation import CrashIsolation
from batchloom.preparation.units.stopwatch import Stopwatch
from batchloom.preparation.units.tasks import CrashMarker, SegmentKeysTask
from batchloom.preparation.units.unit_report import UnitStatistics
from batchloom.preparation.units.work_folder import open_attempt_file
from batchloom.preparation.workers.protocols import MessageCallback
from batchloom.sources import PartReader, prefetch_sources


def write_segment_keys(segment_task: SegmentKeysTask, context: EncodeContext, send_message: MessageCallback) -> int:
    """Write the keys of a unit's lines or paragraphs and return their number.

    The number includes blank lines, which have no key. ``send_message`` receives a :class:`CrashMarker` before
    each batch.
    """
    if context.repeat_unit is None:
        raise AssertionError("repeated lines or paragraphs are not removed in this job")
    # Drops and bad records are counted in the tokenization pass, not here.
    ingester = RecordIngester(
        normalized=context.normalize,
        cleaner=context.cleaner,
        line_deduplicator=None,
        statistics=UnitStatistics(),
        stopwatch=Stopwatch(),
    )
    crash_isolation, count = CrashIsolation(segment_task.suspected_ranges, segment_task.excluded), 0
    context.bounds.set_known_cuts(segment_task.known_cuts)
    parts = prefetch_sources(segment_task.unit.parts, lambda part: part.source)
    with (
        open_attempt_file(segment_task.keys_path, segment_task.attempt) as attempt_path,
        open_key_writer(attempt_path) as add,
    ):
        for number, part in enumerate(parts):
            record_parser = context.record_parsers.get_parser(part.source)
            if record_parser.record_kind != "text":
                continue
            with PartReader(part, record_parser.rules, context.bounds) as reader:
                for record_batch in reader:
                    for record_slice, is_suspected in crash_isolation.split_batch(number, record_batch):
                        if record_slice.records:
                            records = record_slice.records[0], record_slice.records[-1]
                            send_message(CrashMarker("clean", ((number, records[0]), (number, records[1]))))
                        ingester.ingest(record_slice, record_parser, part.source.name)
                        numbers = [number] * len(record_slice.values)
                        keys, count = hash_segments(record_slice.values, numbers, count, context.repeat_unit)
                        add(keys)
                        if is_suspected:
                            send_message(CrashMarker("clean", None))
                reader.finish()
    return count
