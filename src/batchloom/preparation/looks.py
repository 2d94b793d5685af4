"""Which parts of an input are read to examine it: all of a small one, a spread sample of a large one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from batchloom.preparation.probes import Probe, probes
from batchloom.preparation.units import plan_units
from batchloom.sources.addresses import is_url
from batchloom.sources.cuts import open_table
from batchloom.sources.rules import Part, ReadRules, Source, way_of
from batchloom.sources.streams import open_source

# Inputs up to these sizes are read whole: it takes seconds.
WHOLE_BYTES, WHOLE_FILES = 16 << 20, 256
# Of larger ones so many bytes at a place, and so many of them together.
PROBE_BYTES, _SAMPLE = 256 << 10, 8 << 20
_LEAST_PLACES, _MOST_PLACES, _FAR_PLACES = 32, 512, 8
# A fault in the middle of a file has a line where so much before it has to be counted at most.
_COUNTED = 1 << 30
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Look:
    """A part that is read.

    Attributes:
        part: it.
        stretches: how much of it, in what its reader gives at once; None: all.
    """

    part: Part
    stretches: int | None


@final
class Looks:
    """The parts that are read, what they stand for, and what lies before them.

    Args:
        sources: the inputs, at least one.
        rules: how they are cut.
        whole: whether all of them is read; else a sample.

    Attributes:
        looks: the parts, in order.
    """

    def __init__(self, sources: Sequence[Source], rules: ReadRules, *, whole: bool) -> None:
        self.rules, self.whole = rules, whole
        self._tables: dict[str, tuple[list[int], list[int] | None]] = {}
        self.looks = self._all(sources) if whole else self._sample(sources)

    def _all(self, sources: Sequence[Source]) -> list[Look]:
        units = plan_units(sources, self.rules)
        return [Look(part, None) for unit in units for part in unit.parts]

    def _sample(self, sources: Sequence[Source]) -> list[Look]:
        """Places in equal stretches of the input, and the first file of each format."""
        average = max(1, sum(source.size for source in sources) // len(sources))
        count = min(max(_SAMPLE // min(PROBE_BYTES, average), _LEAST_PLACES), _MOST_PLACES)
        if any(is_url(source.path) for source in sources):
            count = _FAR_PLACES
        found = list(probes(sources, self.rules, count, PROBE_BYTES))
        formats = {(probe.part.source.kind, probe.part.source.compression) for _, probe in found}
        for number, source in enumerate(sources):
            if (source.kind, source.compression) not in formats:
                formats.add((source.kind, source.compression))
                found += [
                    (number, probe) for _, probe in probes([source], self.rules, 1, PROBE_BYTES)
                ]
        found.sort(key=lambda one: (one[0], one[1].part.start))
        return [self._look(probe) for _, probe in found]

    def _look(self, probe: Probe) -> Look:
        # Of a table whose rows nobody has counted, only whole groups say how many there are.
        known = not self.is_table(probe.part) or self._table(probe.part.source)[1] is not None
        return Look(probe.part, probe.places if known else None)

    def is_table(self, part: Part) -> bool:
        """Whether a part is of a columnar source."""
        return way_of(part.source, self.rules) == "table"

    def _table(self, source: Source) -> tuple[list[int], list[int] | None]:
        """Where the groups of rows begin, and how many rows each has."""
        if source.path not in self._tables:
            with open_table(source) as table:
                self._tables[source.path] = table.starts, table.rows
        return self._tables[source.path]

    def share(self, part: Part, records: int, consumed: int) -> float:
        """The bytes of the source that the first records of a part stand for.

        Args:
            part: the part.
            records: records of it that were read.
            consumed: bytes that were read, as its reader counts them.
        """
        source = part.source
        if self.whole or not self.is_table(part):
            return consumed
        starts, rows = self._table(source)
        groups = slice(0, len(starts))
        if part.stop - part.start == 1 and part.start in starts:
            groups = slice(starts.index(part.start), starts.index(part.start) + 1)
        start = starts[groups.start] if groups.start else 0
        size = (starts[groups.stop] if groups.stop < len(starts) else source.size) - start
        return size if rows is None else size * min(1.0, records / max(sum(rows[groups]), 1))

    def before(self, part: Part) -> int | None:
        """The records of a source before a part; None where counting them takes too long."""
        source, way = part.source, way_of(part.source, self.rules)
        if part.start == 0:
            return 0
        if way == "table":
            starts, rows = self._table(source)
            return None if rows is None else sum(rows[: starts.index(part.start)])
        if way not in ("jsonl", "line") or part.start > _COUNTED or is_url(source.path):
            return None
        lines, left = 0, part.start
        with open_source(source) as file:
            while left and (data := file.read(min(_BLOCK, left))):
                lines += data.count(b"\n")
                left -= len(data)
        return lines
