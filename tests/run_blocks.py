"""Run the code blocks of a page in this process; lines that need a shell use one.

``python -m run_blocks BLOCKS.json``: the file holds the language, the text and the shown output (or null) of each block.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

from batchloom.cli import run_command_line

# A line such as "tokenizing: 25%, 1.0 MB of 4.0 MB", which a command prints every five seconds.
PROGRESS_LINE = re.compile(r"^[a-z ]+: +\d+%, .*\n", re.M)


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


def check_shown_output(shown: str, output: str) -> None:
    """Compare the output that a page shows with the real one; ``...`` stands for any text, white space is alike."""
    parts = [re.escape(" ".join(part.split())) for part in shown.split("...")]
    matches = re.fullmatch(r".*?".join(parts), " ".join(PROGRESS_LINE.sub("", output).split()), re.S)
    assert matches, f"The page shows:\n{shown}\nThe output is:\n{output}"


def capture_output(run: Callable[[str], None], text: str) -> str:
    """Run a block, and return what it and its processes write to stdout and stderr."""
    saved = [(number, os.dup(number)) for number in (1, 2)]
    with tempfile.TemporaryFile("w+") as file:
        for number, _ in saved:
            os.dup2(file.fileno(), number)
        try:
            run(text)
        finally:
            sys.stdout.flush()
            for number, copy in saved:
                os.dup2(copy, number)
                os.close(copy)
            file.seek(0)
            output = file.read()
            print(output)
    return output


def main() -> None:
    warnings.resetwarnings()
    warnings.simplefilter("default")
    # Lines of stdout and stderr keep their order.
    sys.stdout.reconfigure(line_buffering=True)
    for number, (language, text, shown) in enumerate(json.loads(Path(sys.argv[1]).read_text())):
        print(f"block {number}:\n{text}", file=sys.stderr, flush=True)
        output = capture_output(run_python if language == "python" else run_shell, text)
        if shown is not None:
            check_shown_output(shown, output)


if __name__ == "__main__":
    main()
