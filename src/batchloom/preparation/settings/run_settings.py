"""Settings of a run of ``prepare``: its executor, and the use of earlier work."""

import os
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from batchloom.core.settings import (
    Setting,
    WrittenForm,
    as_int,
    build_settings,
    find_problems,
    list_setting_names,
    raise_problems,
)
from batchloom.core.wording import parse_size
from batchloom.sources import ReadLimits

ExecutorName = Literal["pool", "ray"]

# Listed input bytes of a unit of a stream and of a large job; a constant, because the cuts of large files depend on it.
UNIT_BYTES = 256 << 20
_MAX_WORKERS = 100_000
# A worker takes more without any input.
_MIN_WORKER_MEMORY = 64 << 20
RunSetting = partial(Setting, panel="Execution")


def _find_worker_problem(value: object) -> str:
    count = as_int(value)
    if value == "auto" or (count is not None and 1 <= count <= _MAX_WORKERS):
        return ""
    return f"is neither 'auto' nor a number from 1 to {_MAX_WORKERS:,}"


def _find_memory_problem(value: object) -> str:
    count = as_int(value)
    if count is not None and count >= _MIN_WORKER_MEMORY:
        return ""
    return f"is not a size of at least {_MIN_WORKER_MEMORY:,} bytes, such as 700M or 2G"


def _parse_worker_count(value: object) -> object:
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _parse_memory(value: object) -> object:
    return parse_size(value) or value if isinstance(value, str) else value


def _parse_folder(value: object) -> object:
    return Path(value) if isinstance(value, str | os.PathLike) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionSettings:
    """Settings of the executor of a job."""

    workers: Annotated[
        int | Literal["auto"],
        RunSetting(
            help="Number of units processed in parallel, or auto.",
            check=_find_worker_problem,
            parse=_parse_worker_count,
            option_type=str,
        ),
    ] = "auto"
    engine: Annotated[ExecutorName, RunSetting(help="Executor: pool (processes of this machine) or ray.")] = "pool"
    address: Annotated[
        str | None,
        RunSetting(
            help="Address of the cluster for --engine ray: host:port, or auto for the one of this machine.",
            shown_default="a new one on this machine",
        ),
    ] = None
    memory_per_worker: Annotated[
        int | None,
        RunSetting(
            help="Maximum memory of a worker (2G, 700M). A worker that needs more is restarted.",
            check=_find_memory_problem,
            parse=_parse_memory,
            keyword=int | str,
            option_type=str,
            metavar="SIZE",
            shown_default="no limit",
        ),
    ] = None

    def __post_init__(self) -> None:
        problems = find_problems(self)
        if self.address is not None and self.engine != "ray":
            problems.append("address: applies to Ray clusters only; give --engine ray with it")
        raise_problems(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Settings of a run."""

    execution: Annotated[ExecutionSettings, WrittenForm(prefix="")] = field(default_factory=ExecutionSettings)
    append: Annotated[
        bool,
        RunSetting(
            help="Append new inputs to the store at --out as its next generation, by its own recipe.",
            option="--append",
        ),
    ] = False
    restart: Annotated[
        bool,
        RunSetting(
            help="Replace unfinished work of another recipe or of other inputs; equal units are reused.",
            option="--restart",
        ),
    ] = False
    hash_inputs: Annotated[
        bool,
        RunSetting(
            help="Compare inputs by content instead of modification time; reads them once more.",
            option="--hash-inputs",
        ),
    ] = False
    dry_run: Annotated[
        bool,
        RunSetting(
            help="Stop before the store is written, and report what would be removed.",
            option="--dry-run",
        ),
    ] = False
    streaming: Annotated[
        bool | None,
        RunSetting(
            help="Read Hub datasets remotely, or download them first.",
            shown_default="large ones remotely",
        ),
    ] = None
    work: Annotated[
        Path | None,
        RunSetting(
            help="Local folder in which a store for a remote --out is made.",
            parse=_parse_folder,
            keyword=str | os.PathLike[str],
            shown_default="a folder of the user's cache",
        ),
    ] = None
    for_loader: Annotated[
        bool,
        RunSetting(
            help="Refuse preferences and prompts, which a loader does not train.",
            has_option=False,
        ),
    ] = False
    limits: ReadLimits = field(default_factory=ReadLimits)
    unit_bytes: int = 0

    def __post_init__(self) -> None:
        raise_problems(find_problems(self))

    @property
    def constants(self) -> list[int]:
        """Sizes that affect documents and units."""
        return [*astuple(self.limits)[:-1], self.unit_bytes]


# Names of the settings of a run, with those of its executor.
RUN_SETTINGS = list_setting_names(RunSettings)


def make_run_settings(options: Mapping[str, Any]) -> RunSettings:
    """Build the settings of a run from those of its options among the given ones.

    Numbers and sizes may be texts, as on the command line: ``"4"``, ``"2G"``.
    """
    return build_settings(RunSettings, {name: options[name] for name in RUN_SETTINGS if name in options})
