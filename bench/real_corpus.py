"""Real text and code for benchmarks, as JSONL: prose, documentation and sources.

    python bench/real_corpus.py OUT.jsonl [--mb 200] [--size 2000 | --natural] [--cache FOLDER]

Debian's packages dict-gcide (a dictionary of English), linux-doc-6.1 and rust-doc (documentation,
with tags removed) are fetched with ``apt-get download`` into the cache, unpacked there without
being installed, and never leave it; a missing package is reported. Python sources are
those of this machine. The same machine and cache give the same bytes.
"""

import argparse
import gzip
import html
import itertools
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("dict-gcide", "linux-doc-6.1", "rust-doc")
MIN_BYTES = 200
_TAGS = re.compile(r"<(script|style)\b.*?</\1\s*>|<[^>]*>", re.S | re.I)
_BLANKS = re.compile(r"\n\s*\n\s*")


def cache_folder() -> Path:
    """Return the package cache: BATCHLOOM_BENCH_CACHE, or the user's cache folder."""
    named = os.environ.get("BATCHLOOM_BENCH_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "batchloom-bench"


def fetched(cache: Path) -> list[Path]:
    """Return the folders of the unpacked packages that are available."""
    found = []
    for name in PACKAGES:
        folder = cache / name
        if not folder.is_dir():
            cache.mkdir(parents=True, exist_ok=True)
            try:
                if not list(cache.glob(f"{name}_*.deb")):
                    subprocess.run(["apt-get", "download", name], cwd=cache, check=True, capture_output=True)
                aside = cache / f"{name}.aside"
                subprocess.run(["dpkg", "-x", str(next(cache.glob(f"{name}_*.deb"))), str(aside)], check=True)
                aside.rename(folder)
            except (OSError, subprocess.CalledProcessError) as error:
                print(f"{name} is not to be had here ({error}); going on without", file=sys.stderr)
                continue
        found.append(folder)
    return found


def texts(cache: Path) -> Iterator[str]:
    """Yield dictionary entries, documentation pages and sources alternately."""
    folders = fetched(cache)
    kinds = [_prose(folders), _pages(folders), _code()]
    # Alternate, so that any range of the corpus holds all of them.
    for some in itertools.zip_longest(*kinds):
        for text in some:
            if text is not None and len(text) >= MIN_BYTES:
                yield text


def _prose(folders: list[Path]) -> Iterator[str]:
    """Yield dictionary sections of about 8 kB, split at blank lines."""
    for folder in folders:
        for path in sorted(folder.rglob("*.dict.dz")):
            # A dictzip file is a gzip file.
            with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
                held: list[str] = []
                size = 0
                for line in file:
                    held.append(line)
                    size += len(line)
                    if size > 8000 and not line.strip():
                        yield "".join(held)
                        held, size = [], 0
                yield "".join(held)


def _pages(folders: list[Path]) -> Iterator[str]:
    """Yield documentation pages without their tags, and plain texts unchanged."""
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            name = path.name.removesuffix(".gz")
            if not path.is_file() or not name.endswith((".html", ".txt", ".rst", ".md")):
                continue
            data = path.read_bytes()
            text = (gzip.decompress(data) if path.name.endswith(".gz") else data).decode("utf-8", "replace")
            if name.endswith(".html"):
                text = _BLANKS.sub("\n\n", html.unescape(_TAGS.sub(" ", text))).strip()
            yield text


def _code() -> Iterator[str]:
    places = [sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")]
    for path in sorted({path for place in places for path in Path(place).rglob("*.py")}):
        yield path.read_text("utf-8", errors="ignore")


def write_corpus(path: Path, megabytes: float, size: int | None, cache: Path) -> tuple[int, int]:
    """Write JSONL; return documents and bytes of text.

    ``megabytes`` limits the text. ``size`` is characters per document; None keeps natural documents.
    """
    documents = total = 0
    with path.open("w", encoding="utf-8") as out:
        for text in texts(cache):
            pieces = [text] if size is None else _cut(text, size)
            for piece in pieces:
                out.write(json.dumps({"text": piece}, ensure_ascii=False) + "\n")
                documents += 1
                total += len(piece.encode())
            if total >= megabytes * 1e6:
                break
    return documents, total


def _cut(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--mb", type=float, default=200)
    parser.add_argument("--size", type=int, default=2000)
    parser.add_argument("--natural", action="store_true")
    parser.add_argument("--cache", type=Path, default=cache_folder())
    options = parser.parse_args()
    size = None if options.natural else options.size
    documents, total = write_corpus(options.out, options.mb, size, options.cache)
    print(f"{documents:,} documents, {total / 1e6:,.1f} MB of text in {options.out}")


if __name__ == "__main__":
    main()
