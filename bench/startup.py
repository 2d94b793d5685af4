"""Time of short commands, which is mostly their start: each is a process of its own.

    python bench/startup.py [--rounds 7] [--base ../other/src] [--slack 1.5]

Rounds alternate between all commands, and with ``--base`` between this source tree and another one, whose ratio is
printed. With ``--slack`` the bench fails if the median processor time of a command is above its goal times the slack.
"""

import argparse
import inspect
import json
import os
import pydoc
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

SOURCE = str(Path(__file__).parent.parent / "src")
# Arguments and goal in seconds, for two cores that do nothing else. fastokens needs 0.4 s to load GPT-2.
COMMANDS = {
    "--help": ("--help", 0.3),
    "--version": ("--version", 0.3),
    "prepare --help": ("prepare --help", 0.5),
    "check": ("check store", 0.5),
    "inspect": ("inspect store", 0.5),
    "plan": ("plan store --seq-len 64 --global-batch-size 2", 0.6),
    "doctor 1 kB": ("doctor small.jsonl --tokenizer gpt2", 1.3),
    "prepare 1 kB, bytes": ("prepare small.jsonl --out out --tokenizer bytes", 0.8),
    "prepare 1 kB, gpt2": ("prepare small.jsonl --out out --tokenizer gpt2", 1.3),
    "prepare 4 MB, gpt2": ("prepare large.jsonl --out out --tokenizer gpt2", 1.5),
}


def write_inputs(folder: Path) -> None:
    """Write 1 kB and 4 MB of real text, and a store of the former."""
    parts = [part for part in inspect.getsource(pydoc).split("\n\n") if len(part) > 40]
    rng = random.Random(1)
    (folder / "small.jsonl").write_text("".join(json.dumps({"text": part[:100]}) + "\n" for part in parts[:8]))
    with (folder / "large.jsonl").open("w") as file:
        while file.tell() < 4_000_000:
            file.write(json.dumps({"text": "\n\n".join(rng.choices(parts, k=8))}) + "\n")
    run(SOURCE, "prepare small.jsonl --out store --tokenizer gpt2", folder)


def run(source: str, arguments: str, folder: Path) -> tuple[float, float]:
    """Return wall and processor seconds of a command."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    environment = {**os.environ, "PYTHONPATH": source}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "batchloom", *arguments.split()]
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--base", help="src folder of another version")
    parser.add_argument("--slack", type=float, help="fail above the goals times this number")
    options = parser.parse_args()
    trees = [SOURCE] + ([str(Path(options.base).absolute())] if options.base else [])
    seconds: dict[tuple[str, str], list[tuple[float, float]]] = {
        (name, tree): [] for name in COMMANDS for tree in trees
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        # The first round compiles modules and fills caches.
        for number in range(options.rounds + 1):
            for (command, tree), measured in seconds.items():
                value = run(tree, COMMANDS[command][0], folder)
                if number:
                    measured.append(value)
    failed = []
    for command, (_, goal) in COMMANDS.items():
        wall, processor = (median(value[kind] for value in seconds[command, SOURCE]) for kind in (0, 1))
        line = f"{command:<20} {wall:5.2f} s, processor {processor:5.2f} s, goal {goal:.1f}"
        if options.base:
            base = median(value[1] for value in seconds[command, trees[1]])
            line += f", {processor / base:.2f} of the {base:.2f} s of {options.base}"
        print(line)
        if options.slack and processor > goal * options.slack:
            failed.append(command)
    if failed:
        sys.exit(f"above the goal times {options.slack}: {', '.join(failed)}")


if __name__ == "__main__":
    main()
