"""Files that unpack to far more than they hold are refused soon, and data that packs well is read."""

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
from sources.source_reading import Read
from sources.test_part_streams import packed

# A thousand times what 34 kB of zstd hold at most.
UNPACKED = 1 << 30
UNITS = [b"\0", b"a", b"\n", b" ", b"[", b"{", b'"', b"\r\n", b"\xff"]


def zstd_bomb(unit):
    """1 GiB of one unit in 34 kB or little more."""
    packer = zstandard.ZstdCompressor().compressobj()
    block = unit * ((1 << 20) // len(unit))
    pieces = [packer.compress(block) for _ in range(UNPACKED // len(block))]
    return b"".join(pieces) + packer.flush()


BOMBS = {unit: zstd_bomb(unit) for unit in UNITS}


def refuse_soon(path, field=None):
    begin = time.process_time()
    with pytest.raises(InputError, match=path.name):
        Read(path, field=field)
    assert time.process_time() - begin < 2


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
    refuse_soon(path)


@pytest.mark.parametrize("kind", ["bz2", "xz", "zst"])
def test_a_bomb_packed_otherwise_is_refused_within_two_seconds(tmp_path, kind):
    path = tmp_path / f"a.jsonl.{kind}"
    path.write_bytes(packed(kind, bytes(64 << 20)))
    refuse_soon(path)


@pytest.mark.parametrize("outer", ["zip", "tar.zst"])
@pytest.mark.parametrize("inner", ["zst", "xz", "gz", "lz4"])
def test_a_bomb_in_an_archive_is_refused_within_two_seconds(tmp_path, inner, outer):
    path = tmp_path / f"a.{outer}"
    data = bytes(64 << 20)
    data = BOMBS[b"a"] if inner == "zst" else packed(inner, data) if inner != "lz4" else lz4.frame.compress(data)
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
    refuse_soon(path)


@pytest.mark.parametrize("ending", ["jsonl", "json", "txt"])
def test_data_that_packs_well_is_read(tmp_path, ending):
    """Records that are nearly alike, 24 MB of them in a few hundredths to thousandths of that."""
    text = " ".join(str(n * n) for n in range(2000))
    digits = random.Random(1)
    rows = [{"id": n, "text": f"{digits.random()} {text[: 7000 + n]} {digits.random()} {text}"} for n in range(1200)]
    lines = [json.dumps(row).encode() + b"\n" for row in rows]
    data = json.dumps(rows).encode() if ending == "json" else b"".join(lines)
    path = tmp_path / f"a.{ending}.zst"
    path.write_bytes(zstandard.ZstdCompressor(level=12).compress(data))
    assert len(data) > 20_000_000
    assert 100 < len(data) / path.stat().st_size < 1000
    found = Read(path)
    assert found.bad == []
    if ending == "txt":
        assert "".join(found.values).encode() == data
    else:
        assert found.values == rows


def test_a_header_of_csv_that_does_not_end_is_named(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"a" * (40 << 20))
    with pytest.raises(InputError, match=r"a.csv has no readable header \(it does not end\)"):
        Read(path)
