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

_LEAST_PLACES, _MOST_PLACES, _FAR_PLACES = 32, 512, 8
# Stretches of a packed file at least: what unpacks it reads ahead by two of them.
_LEAST_PACKED = 8
# A fault in the middle of a file has a line where so much before it has to be counted at most.
_COUNTED = 1 << 30
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is read; smaller only in tests.

    Attributes:
        whole_bytes: an input of at most so many bytes is read whole, which takes seconds.
        whole_files: and of so many files.
        sample_bytes: read of a larger one.
        probe_bytes: read at one place.
    """

    whole_bytes: int = 16 << 20
    whole_files: int = 256
    sample_bytes: int = 8 << 20
    probe_bytes: int = 256 << 10


@dataclass(frozen=True, slots=True)
class Look:
    """A part that is read.

    Attributes:
        part: it.
        stretches: how much of it, in what its reader gives at once; None: all.
    """

    part: Part
    stretches: int | None


@dataclass(slots=True)
class PartProgress:
    """How far the reading of a part is.

    Attributes:
        first: bytes its reader had consumed after its first stretch.
        given: records its reader gave.
        records: records that were taken of those.
        stretches: stretches it gave.
        share: bytes of the source these records stand for.
    """

    first: int
    given: int = 0
    records: int = 0
    stretches: int = 0
    share: float = 0.0


@final
class Looks:
    """The parts that are read, what they stand for, and what lies before them.

    Args:
        sources: the inputs, at least one.
        rules: how they are cut.
        sizes: how much is read.
        full: whether all of them is read, whatever the size.

    Attributes:
        whole: whether all of them is read; else a sample.
        looks: the parts, in order.
    """

    def __init__(
        self, sources: Sequence[Source], rules: ReadRules, sizes: Sizes, *, full: bool
    ) -> None:
        self.rules, self.sizes = rules, sizes
        total = sum(source.size for source in sources)
        small = total <= sizes.whole_bytes and len(sources) <= sizes.whole_files
        self.whole = full or small
        self._tables: dict[str, tuple[list[int], list[int] | None]] = {}
        self.looks = self._all(sources) if self.whole else self._sample(sources)

    def _all(self, sources: Sequence[Source]) -> list[Look]:
        units = plan_units(sources, self.rules)
        return [Look(part, None) for unit in units for part in unit.parts]

    def _sample(self, sources: Sequence[Source]) -> list[Look]:
        """Places in equal stretches of the input, and the first file of each format."""
        average = max(1, sum(source.size for source in sources) // len(sources))
        size = self.sizes.probe_bytes
        count = min(max(self.sizes.sample_bytes // min(size, average), _LEAST_PLACES), _MOST_PLACES)
        if any(is_url(source.path) for source in sources):
            count = _FAR_PLACES
        found = list(probes(sources, self.rules, count, size))
        numbers = {number for number, _ in found}
        firsts: dict[tuple[str, str | None], int] = {}
        for number, source in enumerate(sources):
            firsts.setdefault((source.kind, source.compression), number)
        for number in set(firsts.values()) - numbers:
            one = [sources[number]]
            found += [(number, probe) for _, probe in probes(one, self.rules, 1, size)]
        found.sort(key=lambda one: (one[0], one[1].part.start))
        return [self._look(probe) for _, probe in found]

    def _look(self, probe: Probe) -> Look:
        # Of a table whose rows nobody has counted, only whole groups say how many there are.
        known = not self.is_table(probe.part) or self._table(probe.part.source)[1] is not None
        places = probe.places
        if places is not None and probe.part.source.compression is not None:
            places = max(places, _LEAST_PACKED)
        return Look(probe.part, places if known else None)

    def is_table(self, part: Part) -> bool:
        """Whether a part is of a columnar source."""
        return way_of(part.source, self.rules) == "table"

    def _table(self, source: Source) -> tuple[list[int], list[int] | None]:
        """Where the groups of rows begin, and how many rows each has."""
        if source.path not in self._tables:
            with open_table(source) as table:
                self._tables[source.path] = table.starts, table.rows
        return self._tables[source.path]

    def share(self, part: Part, progress: PartProgress, consumed: int) -> float:
        """The bytes of the source that the records taken of a part stand for.

        Args:
            part: the part.
            progress: how far its reading is.
            consumed: bytes that were read, as its reader counts them.
        """
        source, ahead = part.source, consumed - progress.first
        if self.whole:
            return consumed
        if source.compression is not None and ahead and progress.stretches > 1:
            # What unpacks reads ahead: the growth since the first stretch tells what a stretch takes.
            return min(ahead * progress.stretches / (progress.stretches - 1), source.size)
        if not self.is_table(part):
            return consumed
        starts, rows = self._table(source)
        groups = slice(0, len(starts))
        if part.stop - part.start == 1 and part.start in starts:
            groups = slice(starts.index(part.start), starts.index(part.start) + 1)
        start = starts[groups.start] if groups.start else 0
        size = (starts[groups.stop] if groups.stop < len(starts) else source.size) - start
        return (
            size if rows is None else size * min(1.0, progress.records / max(sum(rows[groups]), 1))
        )

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
