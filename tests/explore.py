"""Search for inputs that break a property, with new seeds, for as long as it is told.

    python tests/explore.py --minutes 20 [TEST ...]

The suite draws the same examples in every run. Here each round draws others, and prints what fails as an example to pin
above the property. The exit status is 1 if something failed.
"""

import argparse
import ast
import re
import secrets
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PYTEST = [sys.executable, "-m", "pytest", "-q", "--no-header", "-n", "2", "--tier", "properties", "--tb", "short"]
# Hypothesis prints a failing call in the report of a test; here each line begins with an E.
FAILING = re.compile(r"^E   Failing test case: (\w+)\(\n(.*?)\nE   \)$", re.DOTALL | re.MULTILINE)
ARGUMENT = re.compile(r"^E       (\w+=.*?),?$(?=\nE       \w+=|\Z)", re.DOTALL | re.MULTILINE)
# Statuses of pytest for failures.
FAILED = 1


def make_pinned_examples(report: str) -> list[str]:
    """Return a decorator for each failing call that a report of pytest shows, with the name of the property."""
    examples = []
    for name, call in FAILING.findall(report):
        # What pytest's fixtures gave is not drawn, and most of it has no text that makes it again.
        texts = [re.sub(r"\nE +", " ", text) for text in ARGUMENT.findall(call)]
        drawn = [text for text in texts if _is_expression(text) and not text.startswith("tmp_path")]
        examples.append(f"@example({', '.join(drawn)})  # {name}")
    return list(dict.fromkeys(examples))


def _is_expression(argument: str) -> bool:
    try:
        ast.parse(f"call({argument})")
    except SyntaxError:
        return False
    return True


def explore(minutes: float, tests: list[str]) -> int:
    """Run rounds until the time is up, and return the number of examples found."""
    deadline, found, rounds = time.monotonic() + 60 * minutes, 0, 0
    while time.monotonic() < deadline:
        seed = secrets.randbelow(1 << 32)
        result = subprocess.run(
            [*PYTEST, f"--hypothesis-seed={seed}", *tests], cwd=REPOSITORY, capture_output=True, text=True
        )
        rounds += 1
        if result.returncode not in (0, FAILED):
            raise SystemExit(f"pytest ended with status {result.returncode}:\n{result.stdout[-4000:]}{result.stderr}")
        examples = make_pinned_examples(result.stdout)
        found += len(examples)
        print(f"round {rounds}, seed {seed}: {result.stdout.splitlines()[-1].strip('= ')}", flush=True)
        print("".join(f"{example}\n" for example in examples), end="")
        if result.returncode and not examples:
            print(result.stdout[-4000:])
            found += 1
    return found


def main() -> int:
    """Search, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=20, help="Minutes to search (default: 20).")
    parser.add_argument("tests", nargs="*", metavar="TEST", help="Tests to search in (default: all properties).")
    options = parser.parse_args()
    return int(explore(options.minutes, options.tests) > 0)


if __name__ == "__main__":
    sys.exit(main())
