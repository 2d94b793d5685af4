"""Phase B: the same document in several places, found in the files of keys of all units."""

from dataclasses import dataclass
from pathlib import Path

from batchloom.dedup.exact import find
from batchloom.store.writer import make_folder, write_file


@dataclass(frozen=True, slots=True)
class FindOrder:
    """One partition of all keys, to be looked through.

    Attributes:
        files: files of keys, in the order of documents.
        first_new: those before it are of older generations, whose documents stay.
        partition: number of the partition.
        partitions: how many there are.
        place: file that what is found is written to.
    """

    files: tuple[Path, ...]
    first_new: int
    partition: int
    partitions: int
    place: Path


def find_duplicates(order: FindOrder) -> int:
    """Write down the documents of a partition that stood before; how many they are."""
    found = find(order.files, order.partition, order.partitions, order.first_new)
    make_folder(order.place.parent)
    write_file(order.place, found.tobytes())
    return len(found)
