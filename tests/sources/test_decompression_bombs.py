"""Decompression bombs are refused soon, and highly compressible data is read."""

import io
import json
import random
import tarfile
import time
import zipfile

import lz4.frame
import pytest
import zstandard

from batchloom import InputError
from sources.source_reading import read_inputs
from sources.test_part_streams import compress

# A thousand times the most that 34 kB of zstd hold.
BOMB_BYTES = 1 << 30
UNITS = [b"\0", b"a", b"\n", b" ", b"[", b"{", b'"', b"\r\n", b"\xff"]


def make_zstd_bomb(unit):
    """Compress 1 GiB of one unit to about 34 kB."""
    compressor = zstandard.ZstdCompressor().compressobj()
    block = unit * ((1 << 20) // len(unit))
    chunks = [compressor.compress(block) for _ in range(BOMB_BYTES // len(block))]
    return b"".join(chunks) + compressor.flush()


BOMBS = {unit: make_zstd_bomb(unit) for unit in UNITS}


def assert_refused_soon(path, field=None):
    started = time.process_time()
    with pytest.raises(InputError, match=path.name):
        read_inputs(path, field=field)
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("ending", "unit"),
    [(ending, unit) for ending in ("jsonl", "json") for unit in UNITS]
    + [(ending, unit) for ending in ("csv", "tsv", "txt", "py", "tar") for unit in (b"a", b"\n")],
    ids=ascii,
)
def test_a_zstd_bomb_is_refused_within_two_seconds(tmp_path, ending, unit):
    path = tmp_path / f"a.{ending}.zst"
    path.write_bytes(BOMBS[unit])
    assert path.stat().st_size < 110_000
    assert_refused_soon(path)


@pytest.mark.parametrize("kind", ["bz2", "xz", "zst"])
def test_other_bombs_are_refused_within_two_seconds(tmp_path, kind):
    path = tmp_path / f"a.jsonl.{kind}"
    path.write_bytes(compress(kind, bytes(64 << 20)))
    assert_refused_soon(path)


@pytest.mark.parametrize("outer", ["zip", "tar.zst"])
@pytest.mark.parametrize("inner", ["zst", "xz", "gz", "lz4"])
def test_a_bomb_in_an_archive_is_refused_within_two_seconds(tmp_path, inner, outer):
    path = tmp_path / f"a.{outer}"
    data = bytes(64 << 20)
    data = BOMBS[b"a"] if inner == "zst" else compress(inner, data) if inner != "lz4" else lz4.frame.compress(data)
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


@pytest.mark.parametrize("ending", ["jsonl", "json", "txt"])
def test_highly_compressible_data_is_read(tmp_path, ending):
    """24 MB of nearly equal records compress by a factor of 100 to 1,000."""
    text = " ".join(str(n * n) for n in range(2000))
    rng = random.Random(1)
    rows = [{"id": n, "text": f"{rng.random()} {text[: 7000 + n]} {rng.random()} {text}"} for n in range(1200)]
    lines = [json.dumps(row).encode() + b"\n" for row in rows]
    data = json.dumps(rows).encode() if ending == "json" else b"".join(lines)
    path = tmp_path / f"a.{ending}.zst"
    path.write_bytes(zstandard.ZstdCompressor(level=12).compress(data))
    assert len(data) > 20_000_000
    assert 100 < len(data) / path.stat().st_size < 1000
    result = read_inputs(path)
    assert result.bad == []
    if ending == "txt":
        assert "".join(result.values).encode() == data
    else:
        assert result.values == rows


def test_an_endless_csv_header_is_named(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"a" * (40 << 20))
    with pytest.raises(InputError, match=r"a.csv, line 1: the record that begins here has more than 16.8 MB"):
        read_inputs(path)
