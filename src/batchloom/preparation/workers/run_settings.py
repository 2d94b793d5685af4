"""Settings of a run that do not affect the output, or that only tests change."""

from dataclasses import astuple, dataclass, field
from pathlib import Path

from batchloom.preparation.units.units import UNIT_BYTES
from batchloom.preparation.workers.executors import ExecutionSettings
from batchloom.sources import ReadLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Run settings of a job.

    Attributes:
        execution: execution settings.
        append: add the new inputs to an existing store as a new generation.
        restart: replace the work of another recipe or of other inputs; identical units are reused.
        streaming: read remote Hub datasets without downloading them; None: only large ones.
        work: folder in which a store for a remote target is made; None for one below the user's cache.
        hash_inputs: identify inputs by content, not by mtime.
        dry_run: stop before shards are written, after counting what would be dropped.
        limits: read limits, which affect documents.
        unit_bytes: listed input bytes of a unit.
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
        """Sizes that affect documents and units."""
        return [*astuple(self.limits)[:-1], self.unit_bytes]
