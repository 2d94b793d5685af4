"""Before phase A, per unit: the lines (or paragraphs) of its texts, so that those that stood before are known."""

from batchloom.preparation.dedup import hash_segments, open_key_writer
from batchloom.preparation.documents import EncodeContext
from batchloom.preparation.phases.ingest import RecordIngester
from batchloom.preparation.units import (
    CrashIsolation,
    CrashMarker,
    SegmentKeysTask,
    Stopwatch,
    UnitStatistics,
    open_attempt_file,
)
from batchloom.preparation.workers import MessageCallback
from batchloom.sources import PartReader, prefetch_sources


def write_segment_keys(order: SegmentKeysTask, task: EncodeContext, tell: MessageCallback) -> int:
    """Write the keys of a unit's lines or paragraphs; how many there are, blank ones counted.

    Args:
        order: the parts to read, and where the keys go.
        task: the job's settings.
        tell: is told of what is taken in hand (:class:`CrashMarker`).

    Raises:
        InputError: a source cannot be read.
        OutputError: the file cannot be written.
    """
    if task.pieces is None:
        raise AssertionError("nobody asked for lines or paragraphs")
    # What is dropped or bad is counted when the unit is read for good.
    intake = RecordIngester(
        normalized=task.normalize,
        cleaner=task.cleaner,
        removal=None,
        tally=UnitStatistics(),
        watch=Stopwatch(),
    )
    suspects, count = CrashIsolation(order.suspects, order.excluded), 0
    task.bounds.tell(order.cuts)
    parts = prefetch_sources(order.unit.parts, lambda part: part.source)
    with open_attempt_file(order.place, order.attempt) as aside, open_key_writer(aside) as add:
        for number, part in enumerate(parts):
            reading = task.readings.of(part.source)
            if reading.way != "text":
                continue
            with PartReader(part, reading.rules, task.bounds) as reader:
                for found in reader:
                    for piece, careful in suspects.pieces(number, found):
                        if piece.records:
                            records = piece.records[0], piece.records[-1]
                            tell(CrashMarker("clean", ((number, records[0]), (number, records[1]))))
                        intake.take(piece, reading, part.source.name)
                        numbers = [number] * len(piece.values)
                        keys, count = hash_segments(piece.values, numbers, count, task.pieces)
                        add(keys)
                        if careful:
                            tell(CrashMarker("clean", None))
                reader.finish()
    return count
