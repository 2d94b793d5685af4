"""Processor time of the suite: a record of each test file, and the budget of the fast tier.

A run of the whole fast tier is recorded in pytest's cache. The next run says at its start what to expect, and each ends
with its slowest files. A run above the budget of ``tests/README.md`` fails: growth is decided, and not drifted into.
"""

import ast
import os
import re
import time
from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

import tiers

_CACHE_KEY = "batchloom/record"
_OUTPUT_KEY = "processor_times"
_README = Path(__file__).with_name("README.md")
_SLOWEST = 10
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
# Source code whose compilation is the sample, and its seconds on the machine on which the budget was set.
_SAMPLE = Path(ast.__file__).read_text()
_REFERENCE_S = 0.0097
_SAMPLE_INTERVAL_S = 5.0


def find_budget(text: str) -> float:
    """Find the budget of the fast tier in a page, in seconds of processor time."""
    match = re.search(r"budget is (\d+) seconds of processor time", text)
    if match is None:
        raise ValueError("tests/README.md names no budget of the form: budget is N seconds of processor time")
    return float(match[1])


def find_excess(seconds: float, speed: float, budget: float) -> str | None:
    """Return a message if a run took more than the budget.

    Args:
        seconds: processor time of the run.
        speed: speed of this machine relative to the one on which the budget was set.
        budget: seconds of processor time on that machine.
    """
    if seconds * speed <= budget:
        return None
    return (
        f"The fast tier took {seconds:.0f} s of processor time at {speed:.2f} times the speed for which "
        f"tests/README.md allows {budget:.0f} s. Make the slowest tests cheaper, mark some as slow, or raise the "
        "budget there and say why."
    )


def list_slowest(seconds_by_file: Mapping[str, float]) -> list[str]:
    """Return a line for each of the slowest files."""
    return [f"{seconds:7.1f} s  {name}" for name, seconds in Counter(seconds_by_file).most_common(_SLOWEST)]


def _run_sample() -> float:
    """Return the processor time of a fixed piece of work."""
    begin = time.thread_time()
    compile(_SAMPLE, "sample", "exec")
    return time.thread_time() - begin


class SpeedMeter:
    """Meter of this machine's speed relative to the one on which the budget was set.

    The clock of a machine, and what its neighbours leave of it, changes within minutes: samples are spread over the
    run whose processor time they scale.
    """

    def __init__(self) -> None:
        self._samples = [_run_sample()]
        self._next_sample = time.monotonic() + _SAMPLE_INTERVAL_S

    def sample(self) -> None:
        """Take a sample if the last one is old."""
        if time.monotonic() >= self._next_sample:
            self._samples.append(_run_sample())
            self._next_sample = time.monotonic() + _SAMPLE_INTERVAL_S

    def compute_speed(self) -> float:
        """Return the mean speed so far."""
        return _REFERENCE_S * len(self._samples) / sum(self._samples)


def read_processor_seconds() -> float:
    """Return the processor time so far of this process and of the processes that it waited for."""
    times = os.times()
    seconds = times.user + times.system + times.children_user + times.children_system
    # Processes of `processes.py` are forked by a server, which waits for them.
    server_id = forkserver._forkserver._forkserver_pid
    if server_id is not None and Path(f"/proc/{server_id}/stat").exists():
        # Fields 14 to 17 of proc(5): user and system time of the server and of its children.
        fields = Path(f"/proc/{server_id}/stat").read_text().rpartition(")")[2].split()
        seconds += sum(map(int, fields[11:15])) / _TICKS_A_SECOND
    return seconds


class TimeRecorder:
    """Recorder of the processor time of each test file, in a process that runs tests."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.seconds_by_file: Counter[str] = Counter()
        self._speed_meter = SpeedMeter()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Measure a test with its fixtures."""
        begin = read_processor_seconds()
        try:
            return (yield)
        finally:
            self._speed_meter.sample()
            self.seconds_by_file[item.nodeid.partition("::")[0]] += read_processor_seconds() - begin

    @property
    def speed(self) -> float:
        """The machine's speed during the run."""
        return self._speed_meter.compute_speed()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Send the record to the process that reports."""
        self.seconds_by_file["(imports and collection)"] += read_processor_seconds() - self.seconds_by_file.total()
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput[_OUTPUT_KEY] = (dict(self.seconds_by_file), self.speed)


@dataclass(eq=False)
class SuiteReport:
    """Record of a whole session, and what it prints and decides."""

    config: pytest.Config
    recorder: TimeRecorder | None  # None if other processes run the tests

    def __post_init__(self) -> None:
        self._begin = time.monotonic()
        self._seconds_by_file: Counter[str] = Counter()
        self._speeds: list[float] = []
        self._excess: str | None = None

    @property
    def _is_whole(self) -> bool:
        options = self.config.option
        is_part = options.keyword or options.markexpr or options.slice or getattr(options, "lf", False)
        is_part = is_part or options.collectonly
        return self.config.args_source is pytest.Config.ArgsSource.TESTPATHS and tiers.tier == "fast" and not is_part

    @property
    def _speed(self) -> float:
        return sum(self._speeds) / len(self._speeds)

    def pytest_report_header(self) -> str | None:
        """Say what the last run of the whole tier took."""
        if not self._is_whole:
            return None
        record = self.config.cache.get(_CACHE_KEY, None)
        if record is None:
            return f"budget: {find_budget(_README.read_text()):.0f} s of processor time; no earlier run is recorded"
        return f"last run: {record['seconds']:.0f} s of processor time in {record['wall_seconds'] / 60:.1f} minutes"

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add the record of a process that ran tests."""
        self._add(*getattr(node, "workeroutput", {}).get(_OUTPUT_KEY, ({}, 1.0)))

    def _add(self, seconds_by_file: Mapping[str, float], speed: float) -> None:
        self._seconds_by_file.update(seconds_by_file)
        self._speeds.append(speed)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Save the record, and fail a run above the budget."""
        if self.recorder is not None:
            self.recorder.pytest_sessionfinish()
            self._add(self.recorder.seconds_by_file, self.recorder.speed)
        if not self._is_whole or session.exitstatus != pytest.ExitCode.OK:
            return
        seconds, wall_seconds = self._seconds_by_file.total(), time.monotonic() - self._begin
        self.config.cache.set(_CACHE_KEY, {"seconds": seconds, "wall_seconds": wall_seconds})
        self._excess = find_excess(seconds, self._speed, find_budget(_README.read_text()))
        if self._excess is not None:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the slowest files."""
        if not self._is_whole:
            return
        terminalreporter.section("slowest files, in processor time")
        for line in list_slowest(self._seconds_by_file):
            terminalreporter.write_line(line)
        terminalreporter.write_line(
            f"{self._seconds_by_file.total():7.1f} s  in all, at {self._speed:.2f} times the speed of the budget's machine"
        )
        if self._excess is not None:
            terminalreporter.write_line(self._excess, red=True, bold=True)


def register(config: pytest.Config) -> None:
    """Register what records and reports in this process."""
    is_worker, has_workers = hasattr(config, "workerinput"), bool(getattr(config.option, "numprocesses", None))
    recorder = None if has_workers and not is_worker else TimeRecorder(config)
    if recorder is not None:
        config.pluginmanager.register(recorder)
    if not is_worker:
        config.pluginmanager.register(SuiteReport(config, recorder))
