"""Speed of each cleaning step alone, in MB/s of UTF-8 on one core, on real texts.

    python bench/clean.py [--mb 25] [--texts FOLDER] [--pages FOLDER]

Texts are the Python sources of the standard library and installed packages, and the files under --texts
(plain or .gz); pages are .html files under --pages, for the html step. Best of three rounds of CPU time, since
the machine may have other load; the first result is a pass over all texts without any step.
"""

import argparse
import gzip
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path

from batchloom.text import KNOWN_STEPS, CleanStep, TextCleaner
from batchloom.text.registry import compute_utf8_length

_LONGEST = 1 << 20


def texts_of(paths: Iterable[Path], megabytes: int) -> list[str]:
    """Read complete files as texts, sorted by path, up to a total size."""
    texts, size = [], 0
    for path in sorted(paths):
        if size >= megabytes * 1_000_000:
            break
        if not path.is_file():
            continue
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
        try:
            text = data.decode()
        except UnicodeDecodeError:
            continue
        if 0 < len(text) < _LONGEST:
            texts.append(text)
            size += len(data)
    return texts


def pieces(texts: list[str], length: int = 2000) -> list[str]:
    """Cut texts at line ends into documents of about 2 kB, as in many corpora."""
    found = []
    for text in texts:
        at = 0
        while at < len(text):
            end = text.find("\n", at + length) + 1 or len(text)
            found.append(text[at:end])
            at = end
    return found


def speed(steps: list[CleanStep], texts: list[str]) -> tuple[float, int, int]:
    """Return the best of three MB/s, and the numbers of changed and dropped documents."""
    cleaner, size, best = TextCleaner(steps), sum(map(compute_utf8_length, texts)), float("inf")
    for _ in range(3):
        start = time.process_time()
        done = cleaner.clean(texts)
        best = min(best, time.process_time() - start)
    changed = done.counts[-1].changed if done.counts else 0
    return size / best / 1e6, changed, len(done.drops)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, default=25)
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--pages", type=Path)
    parser.add_argument("--only", nargs="*", default=list(KNOWN_STEPS))
    asked = parser.parse_args()
    paths = sysconfig.get_paths()
    python = {*Path(paths["stdlib"]).rglob("*.py"), *Path(paths["purelib"]).rglob("*.py")}
    corpora = {"python": texts_of(python, asked.mb)}
    if asked.texts:
        corpora["texts"] = texts_of(asked.texts.rglob("*"), asked.mb)
        corpora["texts of 2 kB"] = pieces(corpora["texts"])
    if asked.pages:
        corpora["pages"] = texts_of(asked.pages.rglob("*.html"), asked.mb)
    for name, texts in corpora.items():
        size = sum(map(compute_utf8_length, texts)) / 1e6
        print(f"{name}: {len(texts):,} documents, {size:.1f} MB; no step {speed([], texts)[0]:,.0f} MB/s")
        for step in asked.only:
            rate, changed, dropped = speed([CleanStep(step)], texts)
            print(f"  {step:12} {rate:8.1f} MB/s, {changed:,} changed, {dropped:,} dropped")


if __name__ == "__main__":
    main()
