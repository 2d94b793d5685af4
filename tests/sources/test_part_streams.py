"""Bytes as they come from disk: packed, broken, changed."""

import bz2
import gzip
import lzma
import os

import lz4.frame
import pytest
import zstandard

from batchloom import InputError
from batchloom.core.errors import InputMissingError
from batchloom.sources import PartStream, list_sources

TEXT = b"".join(b"line %d of a text\n" % i for i in range(20_000))


def source_of(path):
    (source,) = list_sources([str(path)]).sources
    return source


def unpack(path, size=10_000):
    with PartStream(source_of(path)) as stream:
        pieces = []
        while data := stream.read(size):
            assert len(data) <= size
            pieces.append(data)
        assert stream.consumed == path.stat().st_size
        assert stream.finish() != b""
        return b"".join(pieces)


def packed(kind, data):
    if kind == "lz4":
        return lz4.frame.compress(data, content_checksum=True)
    makers = {"gz": gzip, "zst": zstandard, "bz2": bz2, "xz": lzma}
    return makers[kind].compress(data)


KINDS = ["gz", "zst", "bz2", "xz", "lz4"]


@pytest.mark.parametrize("kind", KINDS)
def test_packed_files_of_one_or_several_members(tmp_path, kind):
    path = tmp_path / f"a.txt.{kind}"
    path.write_bytes(packed(kind, TEXT))
    assert unpack(path) == TEXT
    path.write_bytes(packed(kind, TEXT) + packed(kind, b"") + packed(kind, b"more"))
    assert unpack(path) == TEXT + b"more"


def test_streaming_zstd_without_a_stated_size(tmp_path):
    path = tmp_path / "a.txt.zst"
    packer = zstandard.ZstdCompressor(level=10).compressobj()
    path.write_bytes(packer.compress(TEXT) + packer.flush())
    assert unpack(path) == TEXT


def test_a_small_file_that_unpacks_to_a_large_one_comes_in_pieces(tmp_path):
    for kind in KINDS:
        path = tmp_path / f"a.txt.{kind}"
        path.write_bytes(packed(kind, bytes(50 << 20)))
        with PartStream(source_of_text(path)) as stream:
            assert len(stream.read(1000)) == 1000
            assert stream.position == 1000


def source_of_text(path):
    return source_of(path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("left", [3, 20, 0.5, 0.999])
def test_a_packed_file_cut_short_names_the_file_and_the_byte(tmp_path, kind, left):
    path = tmp_path / f"a.txt.{kind}"
    data = packed(kind, os.urandom(200_000))
    path.write_bytes(data[: left if isinstance(left, int) else int(len(data) * left)])
    with pytest.raises(
        InputError,
        match=rf"^a.txt.{kind} is cut short: its \w+ data ends or fails at byte [\d,]+ of",
    ):
        unpack(path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_packed_file_names_the_file_and_the_byte(tmp_path, kind):
    path = tmp_path / f"a.txt.{kind}"
    path.write_bytes(b"this was never packed")
    with pytest.raises(InputError, match=rf"^a.txt.{kind} does not begin like \w+: rename it to a.txt if"):
        unpack(path)
    checked = zstandard.ZstdCompressor(write_checksum=True)
    data = bytearray(checked.compress(TEXT) if kind == "zst" else packed(kind, TEXT))
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(InputError, match="is broken|is cut short"):
        unpack(path)


def test_a_file_that_changes_or_goes_is_noticed(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(TEXT)
    source = source_of(path)
    with PartStream(source) as stream:
        stream.read(10)
        path.write_bytes(TEXT + b"more")
        with pytest.raises(InputError, match="a.txt was changed while it was being prepared"):
            stream.finish()
    with pytest.raises(InputError, match="was changed"):
        PartStream(source)
    with PartStream(source_of(path)) as stream:
        os.truncate(path, 100)
        with pytest.raises(InputError, match="was changed"):
            stream.read_up_to(1 << 20)
    path.unlink()
    with pytest.raises(InputMissingError, match="a.txt is missing"):
        PartStream(source)


def test_a_wrong_checksum_is_called_by_its_name(tmp_path):
    data = bytearray(gzip.compress(TEXT))
    data[-6] ^= 1
    (tmp_path / "a.txt.gz").write_bytes(data)
    with pytest.raises(InputError, match=r"a.txt.gz is broken \(CRC check failed"):
        unpack(tmp_path / "a.txt.gz")


@pytest.mark.parametrize("kind", ["gz", "zst", "bz2", "xz"])
def test_a_zip_bomb_is_named_and_sound_files_of_any_ratio_are_not(tmp_path, kind, monkeypatch):
    monkeypatch.setattr("batchloom.sources.files.part_stream.BOMB_BYTES", 32 << 20)
    monkeypatch.setattr("batchloom.sources.files.part_stream.BOMB_RATIO", 500)
    path = tmp_path / f"a.txt.{kind}"
    path.write_bytes(packed(kind, bytes(31 << 20)))
    with PartStream(source_of(path)) as stream:
        stream.finish()
    path.write_bytes(packed(kind, bytes(64 << 20)))
    with PartStream(source_of(path)) as stream, pytest.raises(InputError, match="a zip bomb"):
        stream.finish()


def test_xz_with_padding_between_its_streams(tmp_path):
    path = tmp_path / "a.txt.xz"
    path.write_bytes(packed("xz", b"one") + bytes(8) + packed("xz", b"two") + bytes(4))
    assert unpack(path) == b"onetwo"
