"""How a job is run: what decides no byte, and what is other than the default only in tests."""

from dataclasses import astuple, dataclass, field
from pathlib import Path

from batchloom.preparation.units import UNIT_BYTES
from batchloom.preparation.workers.executors import ExecutionSettings
from batchloom.sources import ReadLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """How a job is run.

    Attributes:
        execution: who does the work.
        append: whether a store that is there becomes a new generation, of those inputs that are new to it.
        restart: whether work of another recipe or of other inputs gives way; units that are the same stay.
        streaming: whether data sets of the Hub are read where they lie; None: large ones are.
        work: where a store that goes elsewhere is made; None for a folder below the user's cache.
        hash_inputs: whether inputs are told apart by their contents, not by their times.
        dry_run: whether to stop before anything is written, when it is known what would be left out.
        limits: the sizes that decide documents.
        unit_bytes: listed input of a unit.
    """

    execution: ExecutionSettings = field(default_factory=ExecutionSettings)
    append: bool = False
    restart: bool = False
    streaming: bool | None = None
    work: Path | None = None
    hash_inputs: bool = False
    dry_run: bool = False
    limits: ReadLimits = field(default_factory=ReadLimits)
    unit_bytes: int = UNIT_BYTES

    @property
    def constants(self) -> list[int]:
        """The sizes that decide documents and units."""
        return [*astuple(self.limits)[:-1], self.unit_bytes]
