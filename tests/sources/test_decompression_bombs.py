"""Decompression bombs are refused soon, and highly compressible data is read."""

import functools
import io
import json
import random
import tarfile
import time
import zipfile

import pytest
import zstandard

from batchloom import InputError
from sources.source_reading import read_inputs
from sources.test_part_streams import compress

BOMB_BYTES = 256 << 20
UNITS = [b"\0", b"a", b"\n", b" ", b"[", b"{", b'"', b"\r\n", b"\xff"]
FAST_CASES = [
    *(("jsonl", unit) for unit in (b"a", b"\n")),
    *(("json", unit) for unit in (b"a", b'"')),
    ("csv", b"a"),
    ("txt", b"\n"),
    ("tar", b"a"),
]
ALL_CASES = [(ending, unit) for ending in ("jsonl", "json") for unit in UNITS]
ALL_CASES += [(ending, unit) for ending in ("csv", "tsv", "txt", "py", "tar") for unit in (b"a", b"\n")]
SLOW = pytest.mark.slow


@functools.cache
def make_zstd_bomb(unit):
    """Compress 256 MiB of one unit to 9 to 27 kB."""
    compressor = zstandard.ZstdCompressor().compressobj()
    block = unit * ((1 << 20) // len(unit))
    chunks = [compressor.compress(block) for _ in range(BOMB_BYTES // len(block))]
    return b"".join(chunks) + compressor.flush()


@functools.cache
def make_bomb(kind):
    """Compress 64 MiB; lzma and bz2 are slow, so their file has 16 equal streams."""
    if kind == "zst":
        return make_zstd_bomb(b"a")
    if kind in ("xz", "bz2"):
        return compress(kind, bytes(4 << 20)) * 16
    return compress(kind, bytes(64 << 20))


def assert_refused_soon(path, field=None):
    started = time.process_time()
    with pytest.raises(InputError, match=path.name):
        read_inputs(path, field=field)
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("ending", "unit"),
    [pytest.param(*case, marks=() if case in FAST_CASES else SLOW) for case in ALL_CASES],
    ids=ascii,
)
def test_a_zstd_bomb_is_refused_within_two_seconds(tmp_path, ending, unit):
    path = tmp_path / f"a.{ending}.zst"
    path.write_bytes(make_zstd_bomb(unit))
    assert path.stat().st_size < 30_000
    assert_refused_soon(path)


@pytest.mark.parametrize("kind", ["bz2", "xz"])
def test_other_bombs_are_refused_within_two_seconds(tmp_path, kind):
    path = tmp_path / f"a.jsonl.{kind}"
    path.write_bytes(make_bomb(kind))
    assert_refused_soon(path)


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        ("xz", "zip"),
        ("xz", "tar.zst"),
        *(pytest.param(inner, "zip", marks=SLOW) for inner in ("zst", "gz", "lz4")),
        *(pytest.param(inner, "tar.zst", marks=SLOW) for inner in ("zst", "gz", "lz4")),
    ],
)
def test_a_bomb_in_an_archive_is_refused_within_two_seconds(tmp_path, inner, outer):
    path = tmp_path / f"a.{outer}"
    data = make_bomb(inner)
    if outer == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(f"a.jsonl.{inner}", data)
    else:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as archive:
            info = tarfile.TarInfo(f"a.jsonl.{inner}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        path.write_bytes(zstandard.compress(out.getvalue()))
    assert_refused_soon(path)


@pytest.mark.parametrize("ending", ["jsonl", *(pytest.param(ending, marks=SLOW) for ending in ("json", "txt"))])
def test_highly_compressible_data_is_read(tmp_path, ending):
    """20 MB of nearly equal records compress by a factor of 100 to 1,000."""
    text = " ".join(str(n * n) for n in range(2000))
    rng = random.Random(1)
    rows = [{"id": n, "text": f"{rng.random()} {text[: 7000 + n]} {rng.random()} {text}"} for n in range(960)]
    match ending:
        case "jsonl":
            data = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        case "json":
            data = json.dumps(rows).encode()
        case "txt":
            data = "\n".join(row["text"] for row in rows).encode()
    path = tmp_path / f"a.{ending}.zst"
    path.write_bytes(zstandard.ZstdCompressor(level=12).compress(data))
    # Below this size, no ratio is refused.
    assert len(data) > 16 << 20
    assert 100 < len(data) / path.stat().st_size < 1000
    result = read_inputs(path)
    assert result.bad == []
    if ending == "txt":
        assert "".join(result.values).encode() == data
    else:
        assert result.values == rows


def test_an_endless_csv_header_is_named(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"a" * (20 << 20))
    with pytest.raises(InputError, match=r"a.csv, line 1: the record that begins here has more than 16.8 MB"):
        read_inputs(path)
