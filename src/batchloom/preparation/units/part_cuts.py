"""Before phase A, per large CSV file or JSON list: where its parts meet, found by one pass for all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batchloom.preparation.units.units import Unit
from batchloom.sources import ReadRules
from batchloom.sources.files import PartStart, Source, is_sequential
from batchloom.sources.formats import KnownCut, SequentialCuts


@dataclass(frozen=True, slots=True)
class FindCutsTask:
    """One source whose parts are to be told apart.

    Attributes:
        source: it has several parts.
        nominal: the bytes at or after which its parts are to meet, ascending.
        attempt: as that of every order, though this one writes nothing.
    """

    source: Source
    nominal: tuple[int, ...]
    attempt: str = ""


def find_part_cuts(task: FindCutsTask, rules: ReadRules) -> tuple[PartStart | None, ...]:
    """Where the parts of a source begin; None where no record begins at or after a place.

    Raises:
        InputError: the source cannot be read, or its header or list is not sound.
    """
    sequential_cuts = SequentialCuts(task.source, rules)
    return tuple(sequential_cuts.get_cut(nominal) for nominal in task.nominal)


def make_cuts_tasks(units: Sequence[Unit], rules: ReadRules) -> list[FindCutsTask]:
    """The sources of which some units need to be told where their parts begin or end."""
    sources: dict[str, Source] = {}
    offsets_by_path: dict[str, set[int]] = {}
    for unit in units:
        for part in unit.parts:
            inner_offsets = {offset for offset in (part.start, part.stop) if 0 < offset < part.source.size}
            if inner_offsets and is_sequential(part.source, rules):
                sources[part.source.path] = part.source
                offsets_by_path.setdefault(part.source.path, set()).update(inner_offsets)
    return [FindCutsTask(sources[path], tuple(sorted(offsets_by_path[path]))) for path in sources]


def select_unit_cuts(unit: Unit, cuts_by_offset: Mapping[tuple[str, int], PartStart | None]) -> tuple[KnownCut, ...]:
    """What the parts of a unit need to know of all cuts, which are found by path and nominal place."""
    cut_keys = dict.fromkeys((part.source.path, offset) for part in unit.parts for offset in (part.start, part.stop))
    return tuple(
        (path, offset, cuts_by_offset[path, offset]) for path, offset in cut_keys if (path, offset) in cuts_by_offset
    )
