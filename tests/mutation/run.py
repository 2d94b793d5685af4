"""Run the tests against planted faults, and list the faults that no test notices.

Every mutant is planted in a copy of ``src``, which tests import in place of the original:

    python tests/mutation/run.py                       # every mutant, each against its hinted tests
    python tests/mutation/run.py NAME ... --whole      # survivors of those against all tests
    python tests/mutation/run.py NAME ... --together   # all of them at once against all tests
    python tests/mutation/run.py NAME ... --baseline   # the hinted tests without any mutant

The exit status is 1 if a mutant survives, and 2 if pytest cannot run the tests of a mutant.
"""

import argparse
import compileall
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from mutants import MUTANTS, Mutant, apply_mutants

REPOSITORY = Path(__file__).resolve().parents[2]
# The tests of the mutants read the original source, so that copies do not need them.
PYTEST = shlex.split("-m pytest -q --no-header --ignore=tests/mutation -p no:randomly")
PYTEST += ["-p", "no:cacheprovider"]
ALL_TESTS = shlex.split("-n 2 --dist loadfile tests")
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a mutant: ``caught``, ``timeout`` (caught too), ``survived``, ``error``."""

    name: str
    file: str
    result: str
    caught_by: str
    seconds: float


class CopyRunner:
    """Runs the tests of the repository ``root`` on faulty copies of its source."""

    def __init__(self, root: Path, folder: Path, pytest_args: Sequence[str]) -> None:
        self._root, self._folder, self._args = root, folder, pytest_args
        self._processes: set[subprocess.Popen[bytes]] = set()
        # One snapshot: the tree may be edited while mutants run.
        self._source = folder / "source"
        shutil.copytree(root / "src", self._source, ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(self._source, quiet=2)
        words = [sys.executable, "-c", "import batchloom; print(batchloom.__file__)"]
        environment = self._environment(self._source)
        result = subprocess.run(words, cwd=root, env=environment, capture_output=True, text=True)
        # An editable install must not hide the copies, or every mutant would survive.
        if not Path(result.stdout.strip()).is_relative_to(self._source):
            location = result.stdout.strip() or result.stderr
            raise SystemExit(f"import batchloom finds {location} and not the copy in {self._source}")

    def _environment(self, source: Path) -> dict[str, str]:
        """Return the environment in which tests import the copy ``source``."""
        path = [str(source), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "OMP_NUM_THREADS": "1",
            # Examples that fail on a mutant must not enter the database of the repository.
            "HYPOTHESIS_STORAGE_DIRECTORY": str(source.parent / "hypothesis"),
        }
        # Otherwise every process that a test starts would compile all modules again.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        return environment

    def run(self, mutants: Sequence[Mutant], words: Sequence[str], timeout: float) -> tuple:
        """Return pytest's exit status (None: timeout) and output with these mutants."""
        copy = Path(tempfile.mkdtemp(dir=self._folder))
        try:
            shutil.copytree(self._source, copy / "src")
            apply_mutants(copy / "src" / "batchloom", mutants)
            with (copy / "output").open("w+b") as output:
                process = subprocess.Popen(
                    [sys.executable, *PYTEST, f"--basetemp={copy}/t", *self._args, *words],
                    cwd=self._root,
                    env=self._environment(copy / "src"),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self._processes.add(process)
                status = None
                try:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        status = process.wait(timeout)
                finally:
                    end_session(process)
                    self._processes.discard(process)
                output.seek(0)
                return status, output.read().decode(errors="replace")
        finally:
            shutil.rmtree(copy, ignore_errors=True)

    def end(self) -> None:
        """Kill every run in progress."""
        for process in list(self._processes):
            end_session(process)


def end_session(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and all processes of its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def classify_run(status: int | None, output: str) -> tuple[str, list[str]]:
    """Return the result of a run, and the tests that failed or the end of the output."""
    failed = list(dict.fromkeys(FAILED.findall(output)))
    if status is None:
        return "timeout", failed
    if status == 0:
        return "survived", []
    # Status 2 means that collection failed, or that pytest-xdist stopped after a failure.
    if status == 1 or (status == 2 and (failed or "ERROR collecting" in output)):
        return "caught", failed or ["no test by name"]
    return "error", [f"pytest ended with status {status}: ...{output[-2000:]}"]


def try_mutant(runner: CopyRunner, mutant: Mutant, options: argparse.Namespace) -> Outcome:
    """Run the hinted tests of a mutant; with ``--whole`` run all if it survives."""
    began = time.monotonic()
    hints = [f"tests/{hint}" for hint in mutant.tests]
    try:
        result, failed = classify_run(*runner.run([mutant], ["-x", *hints], options.timeout))
        if result == "survived" and options.whole:
            run = runner.run([mutant], ["-x", *ALL_TESTS], options.whole_timeout)
            result, failed = classify_run(*run)
    except (ValueError, FileNotFoundError) as error:
        # The source has changed and no longer contains the text of the mutant.
        result, failed = "error", [str(error)]
    seconds, first = round(time.monotonic() - began, 1), "".join(failed[:1])
    print(f"{result:9} {mutant.name} ({seconds:.0f} s) {first}", flush=True)
    return Outcome(mutant.name, mutant.file, result, first, seconds)


def print_table(outcomes: Sequence[Outcome]) -> None:
    """Print the outcomes as a table, and the number of each result."""
    rows = [("name", "file", "result", "caught by", "seconds")]
    for outcome in outcomes:
        # The message of an error has many lines, and is printed already.
        first = "" if outcome.result == "error" else outcome.caught_by
        seconds = str(outcome.seconds)
        rows.append((outcome.name, outcome.file, outcome.result, first, seconds))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())
    counts = Counter(outcome.result for outcome in outcomes)
    listed = ", ".join(f"{count} {result}" for result, count in counts.items())
    print(f"\n{len(outcomes)} mutants: {listed}.")


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="Mutants to try (default: all).")
    add("--root", type=Path, default=REPOSITORY, help="Repository to test (default: this one).")
    add("--jobs", type=int, default=2, help="Mutants tried at the same time (default: 2).")
    add("--json", type=Path, metavar="FILE", help="File that gets the results.")
    add("--list", action="store_true", help="List the mutants and try none.")
    add("--together", action="store_true", help="Run all tests with all these mutants at once.")
    add("--whole", action="store_true", help="Run all tests where the hinted ones find nothing.")
    add("--baseline", action="store_true", help="Run the hinted tests without a mutant.")
    add("--timeout", type=float, default=900, help="Seconds for hinted tests (default: 900).")
    add("--whole-timeout", type=float, default=7200, help="Seconds for all tests (default: 7200).")
    add("--pytest-args", type=shlex.split, default=[], help='As in --pytest-args="--tier all".')
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - {mutant.name for mutant in MUTANTS}):
        parser.error(f"no such mutants: {', '.join(unknown)}; --list shows all of them")
    return options


def main() -> int:
    """Try the requested mutants, and return the exit status."""
    options = parse_arguments()
    # A kill ends the tests, too, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    mutants = [m for m in MUTANTS if not options.names or m.name in options.names]
    if options.list:
        print(*(f"{mutant.name:38}{mutant.file}" for mutant in mutants), sep="\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="mutation-", ignore_cleanup_errors=True) as folder:
        runner = CopyRunner(options.root.resolve(), Path(folder), options.pytest_args)
        if options.baseline:
            hints = dict.fromkeys(f"tests/{hint}" for mutant in mutants for hint in mutant.tests)
            result, failed = classify_run(*runner.run([], hints, options.whole_timeout))
            print(*failed, f"without any mutant: {len(failed)} tests fail", sep="\n")
            return 0 if result == "survived" else 2
        if options.together:
            result, failed = classify_run(*runner.run(mutants, ALL_TESTS, options.whole_timeout))
            print(*failed, f"{len(mutants)} mutants together: {result}", sep="\n")
            facts = {"mutants": [mutant.name for mutant in mutants], "failed": failed}
            results = {result}
        else:
            pool = ThreadPoolExecutor(options.jobs)
            try:
                outcomes = list(pool.map(lambda m: try_mutant(runner, m, options), mutants))
            finally:
                # After Ctrl-C no other mutant starts.
                pool.shutdown(wait=False, cancel_futures=True)
                runner.end()
                pool.shutdown()
            print_table(outcomes)
            facts = {"outcomes": [asdict(outcome) for outcome in outcomes]}
            results = {outcome.result for outcome in outcomes}
    if options.json is not None:
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 2 if "error" in results else 1 if "survived" in results else 0


if __name__ == "__main__":
    sys.exit(main())
