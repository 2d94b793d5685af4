"""Compact sequences of sources and their parts, for very many files."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, final, overload

from batchloom.sources.files.part_stream import Source, SourcePart

T = TypeVar("T")

_INT64 = range(-(1 << 63), 1 << 63)


class CompactSequence(Sequence[T]):
    """A sequence that makes its elements when they are read."""

    __slots__ = ()

    def make_element(self, number: int) -> T:
        """Return the element at an index that exists."""
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        numbers = range(len(self))[index]
        return self.make_element(numbers) if isinstance(numbers, int) else tuple(map(self.make_element, numbers))

    def __iter__(self) -> Iterator[T]:
        return map(self.make_element, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __reduce__(self) -> tuple[Callable[[Any], tuple[T, ...]], tuple[tuple[T, ...]]]:
        # A unit that is sent to a worker carries its own sources, not those of the whole listing.
        return tuple, (tuple(self),)


@final
class _TextColumn:
    """Strings as UTF-8 in one buffer."""

    def __init__(self) -> None:
        self._data, self._ends = bytearray(), array("q", [0])

    def append(self, text: str) -> None:
        # File names may hold lone surrogates.
        self._data += text.encode("utf-8", "surrogatepass")
        self._ends.append(len(self._data))

    def __getitem__(self, number: int) -> str:
        return self._data[self._ends[number] : self._ends[number + 1]].decode("utf-8", "surrogatepass")


@final
class SourceTable(CompactSequence[Source]):
    """Sources in arrays: 45 bytes for each, and its name and path in UTF-8.

    An object for each of a million files would take 400 MB.
    """

    def __init__(self) -> None:
        self._names, self._paths = _TextColumn(), _TextColumn()
        self._sizes, self._times, self._traits = array("q"), array("q"), array("i")
        # Few combinations of the other fields occur, except in archives.
        self._trait_numbers: dict[tuple[Any, ...], int] = {}
        self._trait_values: list[tuple[Any, ...]] = []
        self._others: dict[int, Source] = {}

    def append(self, source: Source) -> None:
        """Append a source."""
        traits = (source.kind, source.compression, source.revision, source.input)
        is_plain = source.member is None and source.sample is None and source.mtime_ns in _INT64
        if not is_plain:
            self._others[len(self)] = source
        number = self._trait_numbers.setdefault(traits, len(self._trait_values))
        if number == len(self._trait_values):
            self._trait_values.append(traits)
        self._names.append(source.name if is_plain else "")
        self._paths.append(source.path if is_plain else "")
        self._sizes.append(source.size)
        self._times.append(source.mtime_ns if is_plain else 0)
        self._traits.append(number)

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def bytes(self) -> int:
        """Total size of the files on disk."""
        return sum(self._sizes)

    def make_element(self, number: int) -> Source:
        """Return a source."""
        if number in self._others:
            return self._others[number]
        kind, compression, revision, input_number = self._trait_values[self._traits[number]]
        size, mtime_ns = self._sizes[number], self._times[number]
        name, path = self._names[number], self._paths[number]
        return Source(name, path, kind, compression, size, mtime_ns, None, revision, input_number)


@final
class CompactParts(CompactSequence[SourcePart]):
    """Parts of the sources of a listing, 24 bytes each.

    Args:
        sources: the sources of the listing.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._numbers, self._starts, self._stops = array("q"), array("q"), array("q")

    def append(self, source_number: int, start: int, stop: int) -> None:
        """Append bytes [start, stop) of a source."""
        self._numbers.append(source_number)
        self._starts.append(start)
        self._stops.append(stop)

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def bytes(self) -> int:
        """Total size of the parts."""
        return sum(self._stops) - sum(self._starts)

    def make_element(self, number: int) -> SourcePart:
        """Return a part."""
        return SourcePart(self._sources[self._numbers[number]], self._starts[number], self._stops[number])
