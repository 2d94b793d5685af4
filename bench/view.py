"""Server time, memory and start-up of the pages of ``batchloom view`` on a large store.

    python bench/view.py [--documents N] [--sources N] [--copies N] [--rounds N]

The store is sparse: its ids and source records are holes, its lengths and indexes are real. All of its documents are
the first record of an input, of which 100 of the COPIES dropped duplicates are near duplicates. It is in
BATCHLOOM_BENCH_CACHE, or a temporary folder. Each page is asked for ROUNDS + 1 times. The table has the first
answer by the clock, the median of the others, each with the server's processor time, and the anonymous
memory that the server gained with the page. The targets are 300 ms and 30 MB for each page, and 1.5 s to the first.
"""

import argparse
import http.client
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import numpy as np

from batchloom.preparation import PrepareReport, ReportedSource
from batchloom.store import MANIFEST_NAME, REPORT_NAME, PartEntry, encode_manifest, read_manifest, write_file
from batchloom.store.format import (
    DROPPED_ROW,
    DUPLICATES_NAME,
    HEADER,
    Banding,
    SourceEntry,
    seal_manifest,
    write_dropped_duplicates,
)
from corpus import make_store

PAGES = {
    "overview": "/",
    "documents": "/documents",
    "documents from the middle": "/documents?start={middle}",
    "documents of a length": "/documents?least=40000",
    "documents of a file": "/documents?file=part-{last:05}.jsonl",
    "documents of no such length": "/documents?least=4000000",
    "search of a text": "/documents?text=not+in+any+document",
    "search of a hash": "/documents?mode=hash&text=" + "f" * 32,
    "search of a line": "/documents?mode=line&text=part-{last:05}.jsonl:1",
    "document": "/document/{middle}",
    "document as tokens": "/document/{middle}?as=tokens",
    "document as JSON": "/document/{middle}/json",
    "copies of a document": "/document/{middle}/copies",
    "dropped duplicates": "/document/{middle}/copies/dropped?start=50",
    "packing, first step": "/packing",
    "packing, a later step": "/packing?step=1000",
    "packing, a far step": "/packing?step=1000000",
    "packing, 512 rows": "/packing?batch=512&seq_len=4096",
    "packing strategies": "/packing/strategies",
    "plan": "/plan",
    "plan, a rank": "/plan?step=3&ranks=4&rank=2&workers=8",
    "plan, other settings": "/plan?seq_len=4096&batch=64",
    "plan, a document": "/plan?document={middle}",
    "stylesheet": "/static/view.css",
}


def make_large_store(folder: Path, documents: int, sources: int, copies: int) -> Path:
    """Make a sparse store whose documents name the first of many sources."""
    if (folder / MANIFEST_NAME).exists():
        return folder
    make_store(folder, documents, sparse=True)
    manifest = read_manifest(folder)
    for shard in manifest.subsets["train"].shards:
        with (folder / "train" / f"{shard.name}.docs").open("wb") as file:
            file.write(HEADER.pack(b"BLMDOCS\0", 1, shard.documents, 0))
            file.truncate(HEADER.size + 36 * shard.documents)
    first = manifest.sources[0]
    counts = np.diff(np.linspace(0, documents, sources + 1).astype(np.int64)).tolist()
    sizes = np.diff(np.linspace(0, first.tokens, sources + 1).astype(np.int64)).tolist()
    entries = tuple(
        msgspec.structs.replace(
            first, name=f"part-{number:05}.jsonl", documents=count, tokens=size, parts=(PartEntry(0, size, count),)
        )
        for number, (count, size) in enumerate(zip(counts, sizes, strict=True))
    )
    manifest = msgspec.structs.replace(manifest, sources=entries)
    add_dropped_duplicates(folder, entries, copies)
    write_file(folder / MANIFEST_NAME, encode_manifest(seal_manifest(manifest)))
    return folder


def add_dropped_duplicates(folder: Path, sources: Sequence[SourceEntry], copies: int) -> None:
    """Record dropped duplicates, and write the input file that holds the first ones."""
    line = json.dumps({"text": "many words " * 100}).encode() + b"\n"
    file = folder.with_name(f"{folder.name}.jsonl")
    file.write_bytes(line * sources[0].parts[0].records)
    reported = [
        ReportedSource(source.name, str(file), file.stat().st_size, file.stat().st_mtime_ns, "jsonl")
        for source in sources
    ]
    (folder / REPORT_NAME).write_bytes(msgspec.json.encode(PrepareReport(sources=reported)))

    def iter_tables() -> Iterator[np.ndarray]:
        generator = np.random.default_rng(0)
        for start in range(0, copies, 1 << 20):
            rows = np.zeros(min(1 << 20, copies - start), DROPPED_ROW)
            parts = generator.integers(1, len(sources), len(rows), np.uint64)
            rows["kept"] = rows["dropped"] = (parts << np.uint64(40)) + np.arange(len(rows), dtype=np.uint64) % 1000
            if not start:
                rows["kept"][:100] = 0
                rows["dropped"][:100] = np.arange(1, 101)
                rows["offset"][:100] = len(line) * np.arange(1, 101)
            rows["shared"] = 10
            yield rows

    write_dropped_duplicates(folder / DUPLICATES_NAME, iter_tables(), Banding(14, 8, 5, 1))


class Server:
    """``batchloom view`` in a process of its own."""

    def __init__(self, store: Path) -> None:
        begin = time.perf_counter()
        command = [sys.executable, "-m", "batchloom", "view", str(store), "--no-browser"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            self.open_first_page()
        except BaseException:
            self.stop()
            raise
        self.seconds, self.cpu = time.perf_counter() - begin, self.read_cpu()

    def open_first_page(self) -> None:
        assert self.process.stdout is not None
        url = urlsplit(self.process.stdout.readline().strip())
        self.connection = http.client.HTTPConnection(url.netloc, timeout=300)
        self.connection.request("GET", f"{url.path}?{url.query}")
        answer = self.connection.getresponse()
        answer.read()
        self.cookie = (answer.headers["set-cookie"] or "").partition(";")[0]
        self.get("/")

    def get(self, path: str) -> tuple[int, int]:
        """Return the status and the size of a page."""
        self.connection.request("GET", path, headers={"Cookie": self.cookie})
        answer = self.connection.getresponse()
        return answer.status, len(answer.read())

    def read_memory(self) -> float:
        """Return the anonymous memory in MB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) / 1000

    def read_cpu(self) -> float:
        """Return the processor time in seconds."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


def measure_page(server: Server, path: str, rounds: int) -> str:
    """Ask for a page several times; return the row of the table."""
    memory, seconds, cpu = server.read_memory(), [], [server.read_cpu()]
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        status, size = server.get(path)
        seconds.append(time.perf_counter() - begin)
        cpu.append(server.read_cpu())
    return (
        f"first {1000 * seconds[0]:6.0f} ms ({1000 * (cpu[1] - cpu[0]):5.0f} of processor time), "
        f"then {1000 * statistics.median(seconds[1:]):5.0f} ms ({1000 * (cpu[-1] - cpu[1]) / rounds:4.0f}), "
        f"{server.read_memory() - memory:+6.1f} MB, {size / 1000:6.1f} kB, status {status}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--documents", type=int, default=100_000_000)
    parser.add_argument("--sources", type=int, default=10_000)
    parser.add_argument("--copies", type=int, default=20_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", action="store_true", help="accepted for `make bench`; there is none here")
    asked = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="batchloom-bench-"))
    cache = Path(os.environ.get("BATCHLOOM_BENCH_CACHE") or work)
    os.environ["XDG_CACHE_HOME"] = str(work / "cache")
    try:
        store = make_large_store(
            cache / f"view-{asked.documents}-{asked.sources}-{asked.copies}",
            asked.documents,
            asked.sources,
            asked.copies,
        )
        shutil.rmtree(store / "plans", ignore_errors=True)
        starts = []
        for _ in range(3):
            server = Server(store)
            starts.append((server.seconds, server.cpu))
            server.stop()
        print(
            f"start to first page: {statistics.median(s for s, _ in starts):.2f} s, "
            f"{statistics.median(c for _, c in starts):.2f} s of processor time"
        )
        server = Server(store)
        try:
            for name, template in PAGES.items():
                path = template.format(middle=asked.documents // 2, last=asked.sources - 1)
                print(f"{name:28} {measure_page(server, path, asked.rounds)}", flush=True)
            print(f"anonymous memory at the end: {server.read_memory():.0f} MB")
        finally:
            server.stop()
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
