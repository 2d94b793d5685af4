"""Streams of the bytes of files: compressed, damaged and changed ones."""

import bz2
import gzip
import lzma
import os
import random

import lz4.frame
import pytest
import zstandard

from batchloom import InputError
from batchloom.core.errors import InputMissingError
from batchloom.sources import PartStream, list_sources

TEXT = b"".join(b"line %d of a text\n" % i for i in range(4000))


def list_source(path):
    (source,) = list_sources([str(path)]).sources
    return source


def read_stream(path, size=10_000):
    with PartStream(list_source(path)) as stream:
        chunks = []
        while data := stream.read(size):
            assert len(data) <= size
            chunks.append(data)
        assert stream.consumed == path.stat().st_size
        assert stream.finish() != b""
        return b"".join(chunks)


def compress(kind, data):
    if kind == "lz4":
        return lz4.frame.compress(data, content_checksum=True)
    modules = {"gz": gzip, "zst": zstandard, "bz2": bz2, "xz": lzma}
    return modules[kind].compress(data)


KINDS = ["gz", "zst", "bz2", "xz", "lz4"]


@pytest.mark.parametrize("kind", KINDS)
def test_compressed_files_of_one_or_several_members(tmp_path, kind):
    path = tmp_path / f"a.txt.{kind}"
    path.write_bytes(compress(kind, TEXT))
    assert read_stream(path) == TEXT
    path.write_bytes(compress(kind, TEXT) + compress(kind, b"") + compress(kind, b"more"))
    assert read_stream(path) == TEXT + b"more"


def test_streaming_zstd_without_a_stated_size(tmp_path):
    path = tmp_path / "a.txt.zst"
    compressor = zstandard.ZstdCompressor(level=10).compressobj()
    path.write_bytes(compressor.compress(TEXT) + compressor.flush())
    assert read_stream(path) == TEXT


@pytest.mark.parametrize(("window_log", "noted"), [(20, False), (27, False), (28, True), (31, True)])
def test_zstd_windows_up_to_2_gib_are_read_and_noted(tmp_path, window_log, noted):
    """As dumps of Reddit have; zstd itself refuses windows above 128 MiB without --long."""
    text = random.Random(1).randbytes(1_200_000).hex().encode()
    parameters = zstandard.ZstdCompressionParameters(window_log=window_log, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / "a.txt.zst").write_bytes(compressor.compress(text) + compressor.flush())
    assert read_stream(tmp_path / "a.txt.zst") == text
    notes = list_sources([str(tmp_path / "a.txt.zst")]).notes
    assert any(f"takes up to {1 << (window_log - 20):,} MiB" in note for note in notes) is noted


def test_a_highly_compressed_file_is_read_in_chunks(tmp_path):
    for kind in KINDS:
        path = tmp_path / f"a.txt.{kind}"
        path.write_bytes(compress(kind, bytes(4 << 20)))
        with PartStream(source_of_text(path)) as stream:
            assert len(stream.read(1000)) == 1000
            assert stream.position == 1000


def source_of_text(path):
    return list_source(path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("remaining", [3, 20, 0.5, 0.999])
def test_a_truncated_file_is_named_with_its_byte(tmp_path, kind, remaining):
    path = tmp_path / f"a.txt.{kind}"
    data = compress(kind, os.urandom(20_000))
    path.write_bytes(data[: remaining if isinstance(remaining, int) else int(len(data) * remaining)])
    with pytest.raises(
        InputError,
        match=rf"^a.txt.{kind} is cut short: its \w+ data ends or fails at byte [\d,]+ of",
    ):
        read_stream(path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_named(tmp_path, kind):
    path = tmp_path / f"a.txt.{kind}"
    path.write_bytes(b"this was never packed")
    with pytest.raises(InputError, match=rf"^a.txt.{kind} does not begin like \w+: rename it to a.txt if"):
        read_stream(path)
    compressor = zstandard.ZstdCompressor(write_checksum=True)
    data = bytearray(compressor.compress(TEXT) if kind == "zst" else compress(kind, TEXT))
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(InputError, match="is broken|is cut short"):
        read_stream(path)


def test_a_changed_or_missing_file_is_reported(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(TEXT)
    source = list_source(path)
    with PartStream(source) as stream:
        stream.read(10)
        path.write_bytes(TEXT + b"more")
        with pytest.raises(InputError, match="a.txt was changed while it was being prepared"):
            stream.finish()
    with pytest.raises(InputError, match="was changed"):
        PartStream(source)
    with PartStream(list_source(path)) as stream:
        os.truncate(path, 100)
        with pytest.raises(InputError, match="was changed"):
            stream.read_up_to(1 << 20)
    path.unlink()
    with pytest.raises(InputMissingError, match="a.txt is missing"):
        PartStream(source)


def test_a_wrong_checksum_is_reported(tmp_path):
    data = bytearray(gzip.compress(TEXT))
    data[-6] ^= 1
    (tmp_path / "a.txt.gz").write_bytes(data)
    with pytest.raises(InputError, match=r"a.txt.gz is broken \(CRC check failed"):
        read_stream(tmp_path / "a.txt.gz")


@pytest.mark.parametrize("kind", ["gz", "zst", "bz2", "xz"])
def test_a_zip_bomb_is_refused_and_small_files_of_any_ratio_are_not(tmp_path, kind, monkeypatch):
    monkeypatch.setattr("batchloom.sources.files.part_stream.BOMB_BYTES", 2 << 20)
    monkeypatch.setattr("batchloom.sources.files.part_stream.BOMB_RATIO", 300)
    path = tmp_path / f"a.txt.{kind}"
    path.write_bytes(compress(kind, bytes(2 << 20)))
    with PartStream(list_source(path)) as stream:
        stream.finish()
    path.write_bytes(compress(kind, bytes(4 << 20)))
    with PartStream(list_source(path)) as stream, pytest.raises(InputError, match="a zip bomb"):
        stream.finish()


def test_xz_with_padding_between_its_streams(tmp_path):
    path = tmp_path / "a.txt.xz"
    path.write_bytes(compress("xz", b"one") + bytes(8) + compress("xz", b"two") + bytes(4))
    assert read_stream(path) == b"onetwo"
