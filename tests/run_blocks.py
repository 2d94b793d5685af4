"""Run the code blocks of a page in this process; lines that need a shell use one.

``python -m run_blocks BLOCKS.json``: the file holds pairs of language and text.
"""

import json
import shlex
import subprocess
import sys
import types
import warnings
from itertools import groupby
from pathlib import Path

from batchloom.cli import run_command_line


def is_batchloom_command(line: str) -> bool:
    """Return whether a line is a single batchloom command without shell syntax."""
    return line.startswith("batchloom ") and not set(line) & set("|><;&$*?#\\\n")


def run_python(text: str) -> None:
    """Run a block as ``python -c`` does."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(text, "<block>", "exec"), main.__dict__)


def run_shell(text: str) -> None:
    """Run batchloom commands in this process and all other lines in a shell."""
    for is_command, lines in groupby(text.splitlines(keepends=True), lambda line: is_batchloom_command(line[:-1])):
        if is_command:
            for line in lines:
                code = run_command_line(shlex.split(line)[1:])
                assert code == 0, line
        else:
            subprocess.run(["bash", "-euo", "pipefail", "-c", "".join(lines)], check=True)


def main() -> None:
    warnings.resetwarnings()
    warnings.simplefilter("default")
    for number, (language, text) in enumerate(json.loads(Path(sys.argv[1]).read_text())):
        print(f"block {number}:\n{text}", file=sys.stderr, flush=True)
        (run_python if language == "python" else run_shell)(text)


if __name__ == "__main__":
    main()
