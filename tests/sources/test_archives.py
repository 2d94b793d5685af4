"""Archives: members are sources, read in place; nothing is extracted or followed."""

import bz2
import gzip
import io
import json
import lzma
import struct
import tarfile
import zipfile

import lz4.frame
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from batchloom import InputError
from batchloom.core.errors import InputMissingError
from batchloom.sources import list_sources
from batchloom.sources.files import archives
from sources.source_reading import read_inputs

ROWS = [{"text": f"row {i}", "n": i} for i in range(600)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
COMPRESSORS = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.compress,
    "lz4": lz4.frame.compress,
}
NAMES = ["a.zip", "stored.zip", "a.tar", *(f"a.tar.{ending}" for ending in COMPRESSORS), "a.tgz"]


def encode_parquet():
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS), file, row_group_size=100)
    return file.getvalue()


def make_archive(path, files):
    """Write an archive of (name, bytes) in the format of its file name."""
    name = path.name
    if name.endswith(".zip"):
        method = zipfile.ZIP_STORED if "stored" in name else zipfile.ZIP_DEFLATED
        with zipfile.ZipFile(path, "w", method) as archive:
            for member, data in files:
                archive.writestr(member, data)
        return path
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for member, data in files:
            info = tarfile.TarInfo(member)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    ending = {"tgz": "gz", "tar": ""}.get(name.rpartition(".")[2], name.rpartition(".")[2])
    path.write_bytes(COMPRESSORS[ending](file.getvalue()) if ending else file.getvalue())
    return path


@pytest.mark.parametrize("name", NAMES)
def test_members_are_sources_in_the_order_of_the_archive(tmp_path, name):
    files = [
        ("b/lines.jsonl", LINES),
        ("a.json.gz", gzip.compress(json.dumps(ROWS).encode())),
        ("table.csv", b"text,n\nx,1\n"),
        ("no ending", LINES),
        ("deep/list.json.xz", lzma.compress(json.dumps({"data": ROWS}).encode())),
    ]
    result = read_inputs(make_archive(tmp_path / name, files))
    assert [source.name for source in result.sources] == [f"{name}/{member}" for member, _ in files]
    assert result.values == ROWS + ROWS + [{"text": "x", "n": "1"}] + ROWS + ROWS
    assert not result.notes
    assert read_inputs(tmp_path / name, unit=1000).values == result.values


@pytest.mark.parametrize("name", NAMES)
def test_skipped_and_unsafe_members_are_left_out(tmp_path, name):
    files = [
        (".hidden.txt", b"x"),
        ("a/.git/config", b"x"),
        ("__MACOSX/a.txt", b"x"),
        ("/etc/absolute.txt", b"x"),
        ("../up.txt", b"x"),
        ("inner.zip", b"PK"),
        ("image.png", b"\x89PNG\0"),
        ("numbers.json", b"[1, 2]"),
        ("broken.jsonl.gz", b"this was never packed"),
        ("empty.txt", b""),
        ("good.txt", b"good"),
    ]
    result = read_inputs(make_archive(tmp_path / name, files))
    assert result.values == ["good"]
    reasons = "1 JSON without records, 1 __MACOSX, 1 archives in archives, 1 binary .png, 1 broken"
    assert result.notes == (f"Left out of {name}: {reasons}, 1 empty, 2 hidden, 2 unsafe names.",)
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]
    hidden_only = make_archive(tmp_path / f"only.{name.split('.', 1)[1]}", files[:2])
    with pytest.raises(InputMissingError, match="holds no usable file, only 2 hidden"):
        read_inputs(hidden_only)


def test_links_and_devices_are_never_followed(tmp_path):
    for name, mode in (("a.tar", "w"), ("a.tar.gz", "w:gz")):
        with tarfile.open(tmp_path / name, mode) as archive:
            for member, kind in (
                ("link.txt", tarfile.SYMTYPE),
                ("hard.txt", tarfile.LNKTYPE),
                ("pipe.txt", tarfile.FIFOTYPE),
                ("device.txt", tarfile.CHRTYPE),
            ):
                info = tarfile.TarInfo(member)
                info.type, info.linkname = kind, "/etc/passwd"
                archive.addfile(info)
            info = tarfile.TarInfo("good.txt")
            info.size = 4
            archive.addfile(info, io.BytesIO(b"good"))
        result = read_inputs(tmp_path / name)
        assert result.values == ["good"]
        assert "4 links and special files" in result.notes[0]
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        info = zipfile.ZipInfo("link.txt")
        info.external_attr = 0o120777 << 16
        archive.writestr(info, "/etc/passwd")
        archive.writestr("good.txt", "good")
    assert "1 link or special file" in read_inputs(tmp_path / "a.zip").notes[0]


def test_encrypted_and_unsupported_members_are_left_out(tmp_path):
    path = make_archive(tmp_path / "a.zip", [("secret.txt", b"x" * 50), ("good.txt", b"good")])
    with zipfile.ZipFile(path, "a", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("odd.txt", b"odd" * 50)
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(data)
    result = read_inputs(path)
    assert result.values == ["good"]
    assert "1 compressed by a method other than deflate, 1 encrypted" in result.notes[0]


@pytest.mark.parametrize("name", ["stored.zip", "a.tar"])
def test_an_uncompressed_table_is_read_in_its_archive(tmp_path, name):
    path = make_archive(tmp_path / name, [("x.txt", b"text"), ("a.parquet", encode_parquet())])
    result = read_inputs(path, unit=1000)
    assert result.values == ["text", *ROWS]
    assert len(result.hashes) > 3


@pytest.mark.parametrize("name", ["a.zip", "a.tar.gz"])
def test_a_compressed_table_is_read_from_a_copy(tmp_path, name):
    path = make_archive(tmp_path / name, [("x.txt", b"text"), ("a.parquet", encode_parquet()), ("y.txt", b"more")])
    result = read_inputs(path, unit=1000)
    assert result.values == ["text", *ROWS, "more"]
    assert not result.notes


@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_archive_is_named(tmp_path, name):
    lines = b"".join(b'{"text": "row %d", "n": %d}\n' % (n, n) for n in range(3000))
    data = make_archive(tmp_path / name, [(f"{i}.jsonl", lines) for i in range(3)]).read_bytes()
    path = tmp_path / f"cut.{name.split('.', 1)[1]}"
    for cut in (5, len(data) // 2):
        path.write_bytes(data[:cut])
        with pytest.raises(InputError, match=rf"{path.name} is not a valid \w+ archive"):
            read_inputs(path)


def test_a_damaged_header_is_not_the_end_of_a_tar(tmp_path):
    path = make_archive(tmp_path / "a.tar", [(f"{i}.jsonl", LINES) for i in range(3)])
    data = bytearray(path.read_bytes())
    data[data.index(b"1.jsonl") + 150] ^= 0x55
    path.write_bytes(data)
    (tmp_path / "b.tar.gz").write_bytes(gzip.compress(data))
    for name in ("a.tar", "b.tar.gz"):
        with pytest.raises(InputError, match=f"{name} is not a valid tar archive .a damaged header"):
            read_inputs(tmp_path / name)


def test_a_member_whose_bytes_are_wrong_is_named(tmp_path):
    path = make_archive(tmp_path / "a.zip", [("a.txt", LINES)])
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\x01\x02")
    data[at + 16] ^= 0x55
    path.write_bytes(data)
    with pytest.raises(InputError, match="a.zip/a.txt is broken .its checksum is wrong"):
        read_inputs(path)
    data[at + 16] ^= 0x55
    data[at + 42 : at + 46] = struct.pack("<I", 7)
    path.write_bytes(data)
    with pytest.raises(InputError, match="local header is not where the directory says"):
        read_inputs(path)


@pytest.mark.parametrize("name", ["a.zip", "a.tar.gz", "a.tar.zst"])
def test_an_archive_like_a_zip_bomb_is_refused(tmp_path, name, monkeypatch):
    monkeypatch.setattr(archives, "BOMB_BYTES", 1 << 20)
    monkeypatch.setattr(archives, "BOMB_RATIO", 200)
    path = make_archive(tmp_path / name, [(f"{i}.txt", bytes(1 << 19)) for i in range(8)])
    with pytest.raises(InputError, match=f"{name} unpacks to more than 200 times its size"):
        read_inputs(path)


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz"])
def test_a_changed_archive_is_reported(tmp_path, name):
    from batchloom.sources import PartStream, list_sources

    path = make_archive(tmp_path / name, [("a.txt", b"text")])
    (source,) = list_sources([str(path)]).sources
    path.write_bytes(path.read_bytes() + b"\0" * 512)
    with pytest.raises(InputError, match=f"{name}/a.txt was changed while it was being prepared"):
        PartStream(source)


def test_a_compressed_tar_is_unpacked_once_for_all_its_members(tmp_path, monkeypatch):
    path = make_archive(tmp_path / "a.tar.gz", [(f"{i}.txt", b"x" * 100_000) for i in range(50)])
    read_sizes = []
    original_read = archives._SequentialTar.read

    def count_bytes(self, size):
        data = original_read(self, size)
        read_sizes.append(len(data))
        return data

    monkeypatch.setattr(archives._SequentialTar, "read", count_bytes)
    assert len(read_inputs(path).values) == 50
    # The archive is decompressed once to list it and once to read it.
    assert sum(read_sizes) < 2.1 * 50 * 101_000


def test_a_duplicate_member_name_is_read_twice(tmp_path):
    result = read_inputs(make_archive(tmp_path / "a.tar", [("a.txt", b"one"), ("a.txt", b"two")]))
    assert result.values == ["one", "two"]
    assert [source.name for source in result.sources] == ["a.tar/a.txt", "a.tar/a.txt#2"]


def test_archives_in_folders_are_opened(tmp_path):
    make_archive(tmp_path / "b.zip", [("a.txt", b"one")])
    (tmp_path / "a.txt").write_text("zero")
    result = read_inputs(tmp_path)
    assert result.values == ["zero", "one"]
    assert result.sources[1].name == f"{tmp_path.name}/b.zip/a.txt"


@pytest.mark.parametrize("tar_format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_tar_cut_after_a_long_name_is_refused(tmp_path, tar_format, suffix):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tar_format) as tar_file:
        for name in ("a.txt", "b" * 150 + ".txt"):
            member = tarfile.TarInfo(name)
            member.size = 5
            tar_file.addfile(member, io.BytesIO(b"hello"))
    path = tmp_path / f"x.tar{suffix}"
    # The first member takes 1,024 bytes, and the extra header with the long name as many.
    for size in (1024, 2048):
        data = buffer.getvalue()[:size]
        path.write_bytes(gzip.compress(data) if suffix else data)
        if size == 1024 and not suffix:
            # Its writer may have left the marker out, or the rest is missing.
            with pytest.raises(InputError, match="without an end marker, so files may be missing"):
                list_sources([str(path)])
            path.write_bytes(data + bytes(1024))
            assert len(list_sources([str(path)]).sources) == 1
        elif size == 1024:
            assert [source.name for source in list_sources([str(path)]).sources] == [f"{path.name}/a.txt"]
        else:
            with pytest.raises(InputError, match="it is cut short"):
                list_sources([str(path)])
