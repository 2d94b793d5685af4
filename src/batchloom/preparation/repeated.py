"""Before phase A, per unit: the lines (or paragraphs) of its texts, so that those that stood before are known."""

from dataclasses import dataclass
from pathlib import Path

from batchloom.dedup.keys import key_file
from batchloom.dedup.lines import piece_keys
from batchloom.preparation.encoding import Task
from batchloom.preparation.intake import Intake
from batchloom.preparation.stopwatch import Stopwatch
from batchloom.preparation.unit_report import UnitTally
from batchloom.preparation.units import Unit
from batchloom.sources.beginnings import read_ahead
from batchloom.sources.ordered import KnownCut
from batchloom.sources.parts import PartReader
from batchloom.store.writer import make_folder


@dataclass(frozen=True, slots=True)
class PiecesOrder:
    """One unit whose lines (or paragraphs) are to be kept as keys.

    Attributes:
        unit: the parts to read.
        place: file of the keys.
        cuts: where its parts of large CSV files and JSON lists begin and end.
    """

    unit: Unit
    place: Path
    cuts: tuple[KnownCut, ...] = ()


def keep_pieces(order: PiecesOrder, task: Task) -> int:
    """Write the keys of a unit's lines or paragraphs; how many there are, blank ones counted.

    Raises:
        InputError: a source cannot be read.
        OutputError: the file cannot be written.
    """
    if task.pieces is None:
        raise AssertionError("nobody asked for lines or paragraphs")
    make_folder(order.place.parent)
    # What is dropped or bad is counted when the unit is read for good.
    intake = Intake(
        normalized=task.normalize,
        cleaner=task.cleaner,
        removal=None,
        tally=UnitTally(),
        watch=Stopwatch(),
    )
    count = 0
    task.bounds.tell(order.cuts)
    parts = read_ahead(order.unit.parts, lambda part: part.source)
    with key_file(order.place) as add:
        for number, part in enumerate(parts):
            reading = task.readings.of(part.source)
            if reading.way != "text":
                continue
            with PartReader(part, reading.rules, task.bounds) as reader:
                for found in reader:
                    intake.take(found, reading, part.source.name)
                    numbers = [number] * len(found.values)
                    keys, count = piece_keys(found.values, numbers, count, task.pieces)
                    add(keys)
                reader.finish()
    return count
