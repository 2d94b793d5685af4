"""Reading against the underlying parser: rows as dicts, and one text field.

    python bench/read.py [--mb 200]

JSONL against msgspec's decode_lines of the same bytes, Parquet against pyarrow's iter_batches and
to_pylist. Reading does more: it locates records, hashes the bytes and bounds its
memory. All files are in the page cache; ratios are of medians over alternating rounds.
"""

import argparse
import json
import random
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from batchloom.preparation.settings import UNIT_BYTES
from batchloom.sources import PartReader, ReadRules, RecordBounds, list_sources, split_source

_CHUNK = 1 << 20


def ours(path: Path, field: str | None) -> int:
    """Read a file as preparation does; return the number of records."""
    rules, seen = ReadRules(field), 0
    bounds = RecordBounds(rules)
    for source in list_sources([str(path)]).sources:
        for part in split_source(source, rules, UNIT_BYTES):
            with PartReader(part, rules, bounds) as reader:
                for found in reader:
                    seen += len(found.values)
                reader.finish()
    return seen


def msgspec_lines(path: Path, field: str | None) -> int:
    """Parse complete lines with msgspec alone, a chunk at a time."""
    kind = dict if field is None else msgspec.defstruct("Row", [(field, str)], gc=False)
    decoder, carry, seen = msgspec.json.Decoder(kind), b"", 0
    with path.open("rb") as file:
        while data := file.read(_CHUNK):
            data = carry + data
            end = data.rfind(b"\n") + 1
            rows = decoder.decode_lines(data[:end])
            seen += len(rows if field is None else [getattr(row, field) for row in rows])
            carry = data[end:]
    return seen


def msgspec_list(path: Path, field: str | None) -> int:
    """Parse the complete file with msgspec at once, without a memory bound."""
    kind = dict if field is None else msgspec.defstruct("Row", [(field, str)], gc=False)
    return len(msgspec.json.decode(path.read_bytes(), type=list[kind]))


def pyarrow_rows(path: Path, field: str | None) -> int:
    """Read rows with pyarrow alone."""
    columns = None if field is None else [field]
    with pq.ParquetFile(path) as file:
        batches = file.iter_batches(batch_size=2048, columns=columns, use_threads=False)
        return sum(len((b if field is None else b.column(0)).to_pylist()) for b in batches)


def write_corpus(work: Path, megabytes: int) -> None:
    """Write documents of about 2 kB with further columns, in three formats."""
    choose = random.Random(1)
    words = [
        "the",
        "of",
        "and",
        "model",
        "weaving",
        "thread",
        "naïve",
        '"quoted"',
        "line\n",
        "x = y[0]",
    ]
    rows, size = [], 0
    while size < megabytes * 1_000_000:
        text = " ".join(choose.choices(words, k=choose.randint(20, 700)))
        rows.append({"id": len(rows), "text": text, "url": f"https://example.org/{size}", "score": 0.5})
        rows[-1]["meta"] = {"tags": ["a", "b"], "language": "en"}
        size += len(text.encode())
    with (work / "a.jsonl").open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    (work / "a.json").write_text(json.dumps(rows, ensure_ascii=False, indent=1), encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(rows), work / "a.parquet", row_group_size=20_000)


def measure(work: Callable[[], int]) -> tuple[float, int]:
    begin = time.perf_counter()
    seen = work()
    return time.perf_counter() - begin, seen


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, default=200)
    parser.add_argument("--peers", action="store_true", help="accepted for `make bench`")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="batchloom-bench-"))
    cases = [("a.jsonl", msgspec_lines), ("a.parquet", pyarrow_rows), ("a.json", msgspec_list)]
    try:
        write_corpus(work, options.mb)
        print(f"{'file':<10} {'what':<6} {'parser':>9} {'batchloom':>10}   of the parser's speed")
        for name, parser_alone in cases:
            size = (work / name).stat().st_size / 1e6
            for what, field in (("rows", None), ("text", "text")):
                alone, mine = [], []
                for _ in range(5):
                    seconds, expected = measure(lambda: parser_alone(work / name, field))  # noqa: B023
                    alone.append(seconds)
                    seconds, seen = measure(lambda: ours(work / name, field))  # noqa: B023
                    mine.append(seconds)
                    assert seen == expected
                base, own = statistics.median(alone), statistics.median(mine)
                print(f"{name:<10} {what:<6} {size / base:6.0f} MB/s {size / own:7.0f} MB/s   {base / own:.0%}")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        print(f"(peak of this process, parsers and corpus included: {peak} MiB)", file=sys.stderr)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
