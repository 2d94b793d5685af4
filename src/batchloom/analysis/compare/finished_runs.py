"""Records of finished frameworks, cached in the output folder until the end."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

from batchloom.analysis.compare.launch import WitnessRecord
from batchloom.core.partial_files import PARTIAL_SUFFIX, wrap_os_errors

# This folder is removed when the files of the comparison are written.
PARTIAL = "compare.partial"


@final
class FinishedRuns:
    """Records of frameworks, which the same command reuses after a stop.

    Args:
        out: the output folder.
        command: everything that determines the result of a run, as plain values. Records of another command are
            deleted.
        print_line: callback that gets a line on what changed if records are deleted.

    Raises:
        OutputError: the folder cannot be written.
    """

    def __init__(self, out: Path, command: Mapping[str, Any], print_line: Callable[[str], None]) -> None:
        self._folder = out / PARTIAL
        plain = json.loads(json.dumps(command))
        with wrap_os_errors("write", self._folder):
            previous_command = self._read("command")
            if previous_command is not None and previous_command != plain:
                print_line(f"Starting over: {_describe_changes(previous_command, plain)}.")
                shutil.rmtree(self._folder)
            self._folder.mkdir(parents=True, exist_ok=True)
            self._write("command", plain)

    def load(self, number: int) -> tuple[WitnessRecord, float] | None:
        """Return a framework's record and its seconds; None if it has not run."""
        with wrap_os_errors("read", self._folder):
            saved_run = self._read(str(number))
        return None if saved_run is None else (WitnessRecord(**saved_run["record"]), saved_run["seconds"])

    def save(self, number: int, record: WitnessRecord, seconds: float) -> None:
        """Save the record of a framework."""
        with wrap_os_errors("write", self._folder):
            self._write(str(number), {"seconds": seconds, "record": asdict(record)})

    def _read(self, name: str) -> Any:
        file = self._folder / f"{name}.json"
        return json.loads(file.read_text("utf-8")) if file.exists() else None

    def _write(self, name: str, value: Any) -> None:
        file = self._folder / f"{name}.json"
        partial_file = file.with_name(file.name + PARTIAL_SUFFIX)
        partial_file.write_text(json.dumps(value), "utf-8")
        partial_file.rename(file)


def _describe_changes(previous: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    changed = [name for name in current if previous.get(name) != current[name]]
    return ", ".join(f"{name} was {previous.get(name)} and is {current[name]}" for name in changed)
