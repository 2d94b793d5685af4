"""Before phase A, per unit: the lines (or paragraphs) of its texts, so that those that stood before are known."""

from batchloom.preparation.dedup import key_file, piece_keys
from batchloom.preparation.documents import Task
from batchloom.preparation.phases.ingest import Intake
from batchloom.preparation.units import (
    At,
    PiecesOrder,
    Stopwatch,
    Suspects,
    UnitTally,
    claimed_file,
)
from batchloom.preparation.workers import Tell
from batchloom.sources import PartReader, read_ahead


def keep_pieces(order: PiecesOrder, task: Task, tell: Tell) -> int:
    """Write the keys of a unit's lines or paragraphs; how many there are, blank ones counted.

    Args:
        order: the parts to read, and where the keys go.
        task: the job's settings.
        tell: is told of what is taken in hand (:class:`At`).

    Raises:
        InputError: a source cannot be read.
        OutputError: the file cannot be written.
    """
    if task.pieces is None:
        raise AssertionError("nobody asked for lines or paragraphs")
    # What is dropped or bad is counted when the unit is read for good.
    intake = Intake(
        normalized=task.normalize,
        cleaner=task.cleaner,
        removal=None,
        tally=UnitTally(),
        watch=Stopwatch(),
    )
    suspects, count = Suspects(order.suspects, order.excluded), 0
    task.bounds.tell(order.cuts)
    parts = read_ahead(order.unit.parts, lambda part: part.source)
    with claimed_file(order.place, order.attempt) as aside, key_file(aside) as add:
        for number, part in enumerate(parts):
            reading = task.readings.of(part.source)
            if reading.way != "text":
                continue
            with PartReader(part, reading.rules, task.bounds) as reader:
                for found in reader:
                    for piece, careful in suspects.pieces(number, found):
                        if piece.records:
                            records = piece.records[0], piece.records[-1]
                            tell(At("clean", ((number, records[0]), (number, records[1]))))
                        intake.take(piece, reading, part.source.name)
                        numbers = [number] * len(piece.values)
                        keys, count = piece_keys(piece.values, numbers, count, task.pieces)
                        add(keys)
                        if careful:
                            tell(At("clean", None))
                reader.finish()
    return count
