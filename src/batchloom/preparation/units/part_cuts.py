"""Before phase A: part boundaries of large CSV files and JSON lists, in one pass."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batchloom.preparation.units.units import Unit
from batchloom.sources import ReadRules
from batchloom.sources.files import PartStart, Source, is_sequential
from batchloom.sources.formats import KnownCut, SequentialCuts


@dataclass(frozen=True, slots=True)
class FindCutsTask:
    """Task of finding the part boundaries of one source.

    Attributes:
        source: source with several parts.
        nominal: byte offsets at or after which its parts begin, ascending.
        attempt: required of every task, though this one writes no file.
    """

    source: Source
    nominal: tuple[int, ...]
    attempt: str = ""


def find_part_cuts(task: FindCutsTask, rules: ReadRules) -> tuple[PartStart | None, ...]:
    """Find the starts of a source's parts; None if no record follows an offset.

    Raises:
        InputError: the source cannot be read, or its header or list is invalid.
    """
    sequential_cuts = SequentialCuts(task.source, rules)
    return tuple(sequential_cuts.get_cut(nominal) for nominal in task.nominal)


def make_cuts_tasks(units: Sequence[Unit], rules: ReadRules) -> list[FindCutsTask]:
    """Make a task for each source whose part boundaries some units need."""
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
    """Select the cuts that a unit needs; keys are (path, nominal offset)."""
    cut_keys = dict.fromkeys((part.source.path, offset) for part in unit.parts for offset in (part.start, part.stop))
    return tuple(
        (path, offset, cuts_by_offset[path, offset]) for path, offset in cut_keys if (path, offset) in cuts_by_offset
    )
