"""Speed of quality rules and decontamination on one core, against datatrove.

    python bench/quality.py [--peers]

The same documents for all: Python's documentation, its sources, and the prose under
/usr/share/doc, cut at 20,000 characters. Speeds are by processor time. Each step also gets documents that another
one drops.
"""

import argparse
import functools
import gzip
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from batchloom.text import build_index
from batchloom.text.decontamination import make_step_with_index
from batchloom.text.quality import c4, fineweb, gopher, repetition
from batchloom.text.steps import CleanFunction

MOST = 20_000
STEPS: dict[str, CleanFunction] = {
    "c4": c4.make_c4_step(c4.C4()),
    "gopher": gopher.make_gopher_step(gopher.Gopher()),
    "repetition": repetition.make_repetition_step(repetition.Repetition()),
    "fineweb": fineweb.make_fineweb_step(fineweb.FineWeb()),
}
PEERS = {
    "c4": "C4QualityFilter",
    "gopher": "GopherQualityFilter",
    "repetition": "GopherRepetitionFilter",
    "fineweb": "FineWebQualityFilter",
}


def documents(most_bytes: int) -> list[str]:
    from pydoc_data.topics import topics

    found = [str(topics[name]) for name in sorted(topics)]
    paths = [*Path(os.__file__).parent.glob("*.py"), *Path("/usr/share/doc").rglob("*")]
    for path in sorted(paths)[::2]:
        if not path.is_file() or path.suffix in (".html", ".png"):
            continue
        try:
            raw = path.read_bytes()
            found.append((gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()[:MOST])
        except (OSError, EOFError, UnicodeDecodeError):
            continue
    step = max(1, sum(map(len, found)) // most_bytes)
    return [text for text in found[::step] if text and "\0" not in text]


def speed(run: Callable[[Sequence[str]], object], texts: Sequence[str]) -> float:
    """Return MB/s of processor time, the better of two rounds."""
    size, best = sum(len(text.encode()) for text in texts), 0.0
    for _ in range(2):
        begin = time.process_time()
        run(texts)
        best = max(best, size / (time.process_time() - begin) / 1e6)
    return best


def run_step(step: CleanFunction, texts: Sequence[str]) -> None:
    for text in texts:
        step(text)


def run_steps(texts: Sequence[str]) -> None:
    """Run all four steps in a row, whatever their verdicts."""
    for step in STEPS.values():
        run_step(step, texts)


def contamination(texts: Sequence[str]) -> CleanFunction:
    """Make a step with about a million n-grams, of which these texts hold few."""
    half = texts[: len(texts) // 2]
    records = [(f"{text[at : at + 600][::-1]}",) for text in half for at in range(0, len(text), 600)]
    return make_step_with_index(build_index({"reversed": records}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", action="store_true", help="datatrove's filters, too")
    arguments = parser.parse_args()
    texts = documents(6_000_000)
    size = sum(len(text.encode()) for text in texts) / 1e6
    print(f"{len(texts):,} documents, {size:.1f} MB; MB/s a core")
    theirs = {}
    if arguments.peers:
        from datatrove.data import Document
        from datatrove.pipeline import filters
        from datatrove.utils.text import split_into_parts

        some = texts[::8]
        for name, peer in PEERS.items():
            check = getattr(filters, peer)().filter

            def run(texts: Sequence[str], check: Callable[[Document], object] = check) -> None:
                for text in texts:
                    split_into_parts.cache_clear()
                    check(Document(text=text, id="0"))

            theirs[name] = speed(run, some)
    for name, step in STEPS.items():
        ours = speed(functools.partial(run_step, step), texts)
        beside = f"   datatrove {theirs[name]:6.2f}   {ours / theirs[name]:5.1f}x" if theirs else ""
        print(f"{name:14} {ours:7.1f}{beside}")
    print(f"{'the four':14} {speed(run_steps, texts):7.1f}")
    step = contamination(texts)
    print(f"{'decontaminate':14} {speed(functools.partial(run_step, step), texts):7.1f}")


if __name__ == "__main__":
    sys.exit(main())
