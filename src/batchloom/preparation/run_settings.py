"""How a job is run: what decides no byte, and what is other than the default only in tests."""

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from pathlib import Path

from batchloom.preparation.crews import Execution
from batchloom.preparation.units import UNIT_BYTES
from batchloom.sources.rules import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """How a job is run.

    Attributes:
        execution: who does the work.
        restart: whether work of another recipe or of other inputs gives way; units that are the same stay.
        streaming: whether data sets of the Hub are read where they lie; None: large ones are.
        work: where a store that goes elsewhere is made; None for a folder below the user's cache.
        content: the hash of the content of sources by path, where inputs are told apart by it.
        limits: the sizes that decide documents.
        unit_bytes: listed input of a unit.
    """

    execution: Execution = field(default_factory=Execution)
    restart: bool = False
    streaming: bool | None = None
    work: Path | None = None
    content: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    unit_bytes: int = UNIT_BYTES

    @property
    def constants(self) -> list[int]:
        """The sizes that decide documents and units."""
        return [*astuple(self.limits)[:-1], self.unit_bytes]
