"""Checksums of compressed files are verified: damage names the file."""

import bz2
import gzip
import io
import lzma
import random
import tarfile
import zipfile

import lz4.frame
import pytest
import zstandard

from batchloom import InputError
from batchloom.sources.files import archives, part_stream
from sources.source_reading import read_inputs

LINES = b"".join(b'{"text": "document %d"}\n' % number for number in range(60))

# Formats with a checksum of their content. Plain .tar has none; .zst and .lz4 may lack it.
COMPRESSORS = {
    "gz": lambda data: gzip.compress(data, 9, mtime=0),
    "gz stored": lambda data: gzip.compress(data, 0, mtime=0),
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    "lz4": lambda data: lz4.frame.compress(data, content_checksum=True),
}


def make_tar(data):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        info = tarfile.TarInfo("a.jsonl")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def make_zip(data, compression):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        archive.writestr(zipfile.ZipInfo("a.jsonl"), data, compression)
    return out.getvalue()


CASES = {
    **{f"a.jsonl.{kind.split()[0]}|{kind}": compress(LINES) for kind, compress in COMPRESSORS.items()},
    **{f"a.tar.{kind.split()[0]}|{kind}": compress(make_tar(LINES)) for kind, compress in COMPRESSORS.items()},
    "a.zip|stored": make_zip(LINES, zipfile.ZIP_STORED),
    "a.zip|deflated": make_zip(LINES, zipfile.ZIP_DEFLATED),
}


@pytest.mark.parametrize("max_flips", [40, pytest.param(1 << 20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_damage_anywhere_is_noticed(tmp_path, case, max_flips):
    """Flip one bit, at every byte or at a sample of them."""
    path = tmp_path / case.partition("|")[0]
    sound = CASES[case]
    path.write_bytes(sound)
    expected = read_inputs(path).values
    assert len(expected) == 60
    rng, reported = random.Random(case), 0
    positions = rng.sample(range(len(sound)), min(max_flips, len(sound)))
    for position in positions:
        data = bytearray(sound)
        data[position] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        try:
            result = read_inputs(path)
        except InputError as error:
            assert path.name in str(error)  # noqa: PT017 - an error is optional, but must be this one
            reported += 1
        else:
            # The flipped byte is metadata: a time, an owner, a name.
            assert result.values == expected
    assert reported > len(positions) * 0.5


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.json", "a.jsonl"])
def test_a_stored_member_with_another_byte_is_named(tmp_path, name):
    content = {"a.txt": b"text", "a.csv": b"a,b\n1,text\n", "a.json": b'[{"a": "text"}]'}
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, content.get(name, b'{"a": "text"}\n'))
    path.write_bytes(path.read_bytes().replace(b"text", b"test"))
    for unit in (2, 1 << 40):
        with pytest.raises(InputError, match=f"a.zip/{name} is broken .its checksum is wrong"):
            read_inputs(path, unit=unit)


def test_a_table_in_a_zip_with_another_byte_is_named(tmp_path):
    import pyarrow as pa

    table = pa.table({"text": ["some text"] * 10})
    with (
        pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file,
        pa.ipc.new_file(file, table.schema) as out,
    ):
        out.write(table)
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tmp_path / "a.arrow", "a.arrow")
    path.write_bytes(path.read_bytes().replace(b"some", b"same"))
    with pytest.raises(InputError, match="a.zip/a.arrow is broken .its checksum is wrong"):
        read_inputs(path)


@pytest.mark.parametrize("outer", ["zip", "tar.gz", "tar.xz"])
@pytest.mark.parametrize("inner", ["gz", "bz2", "xz", "zst"])
def test_a_bomb_within_a_bomb_is_named(tmp_path, monkeypatch, outer, inner):
    for module in (archives, part_stream):
        monkeypatch.setattr(module, "BOMB_RATIO", 100)
        monkeypatch.setattr(module, "BOMB_BYTES", 1 << 20)
    # Compressed twice it takes a few hundred bytes, and each ratio alone is unsuspicious.
    member = COMPRESSORS[inner](b" " * 80)
    data = b"".join(COMPRESSORS[inner](b" " * (1 << 15)) for _ in range(64)) + member
    path = tmp_path / f"a.{outer}"
    if outer == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(f"a.txt.{inner}", data)
    else:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as archive:
            info = tarfile.TarInfo(f"a.txt.{inner}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        path.write_bytes(COMPRESSORS[outer.partition(".")[2]](out.getvalue()))
    with pytest.raises(InputError, match=rf"a.{outer}/a.txt.{inner} unpacks to more than 100 times"):
        read_inputs(path)


def test_a_bomb_of_lz4_within_an_archive_is_named(tmp_path, monkeypatch):
    # lz4 alone reaches 255 times.
    monkeypatch.setattr(part_stream, "BOMB_BYTES", 1 << 20)
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.txt.lz4", lz4.frame.compress(bytes(64 << 20)))
    with pytest.raises(InputError, match="a.zip/a.txt.lz4 unpacks to more than 1,000 times"):
        read_inputs(path)
