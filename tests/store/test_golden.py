"""Golden bytes of docs/reference/format.md. A change here needs a new format_version."""

import inspect
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash

from batchloom import InputError, StoreError, check
from batchloom.store import map_provenance
from batchloom.store.format import (
    COUNTED_ENTRY_BYTES,
    BlockChecksums,
    MaskBuilder,
    PairIndex,
    ProvenanceTable,
    choose_token_dtype,
    compute_file_checksums,
    compute_pair_numbers,
    encode_index,
    format_shard_name,
    map_checksum_file,
    map_index,
    map_mask,
    map_pair_index,
)
from batchloom.store.format.megatron_index import HEADER
from batchloom.store.write import write_shard_checksums
from batchloom.testing import write_store
from oracles import import_megatron

DOCUMENTS = {"train": [[72, 105, 256], [256], [], [1, 2, 3, 4, 256]], "val": [[7, 256]]}


def test_index_bytes():
    expected = (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 8, 3, 4)
        + struct.pack("<3i", 3, 0, 2)
        + struct.pack("<3q", 0, 6, 6)
        + struct.pack("<4q", 0, 1, 2, 3)
    )
    assert encode_index(np.array([3, 0, 2], np.uint32), np.dtype("<u2")) == expected
    assert encode_index(np.array([], np.uint32), np.dtype("<i4"))[17] == 4


def test_index_pointers_of_shards_above_two_gibibytes():
    lengths = np.array([2**31 - 1, 2**31 - 1, 5], np.uint32)
    data = encode_index(lengths, np.dtype("<u2"))
    pointers = np.frombuffer(data, "<i8", 3, offset=HEADER.size + 4 * 3)
    assert pointers.tolist() == [0, 2 * (2**31 - 1), 4 * (2**31 - 1)]


def test_provenance_bytes(tmp_path):
    provenance = ProvenanceTable(
        np.array([[1, 2], [3, 4]], np.uint64),
        np.array([5, 6], np.uint64),
        np.array([7, 8], np.uint64),
        np.array([9, 10], np.uint32),
    )
    expected = b"BLMDOCS\x00" + struct.pack("<QQQ", 1, 2, 0) + struct.pack("<8Q", 1, 2, 3, 4, 5, 6, 7, 8)
    expected += struct.pack("<2I", 9, 10)
    assert provenance.to_bytes() == expected
    (tmp_path / "x.docs").write_bytes(expected)
    mapped = map_provenance(tmp_path / "x.docs")
    assert mapped.to_bytes() == expected
    assert provenance.take(np.array([1])).records.tolist() == [6]


def test_mask_bytes(tmp_path):
    builder = MaskBuilder()
    for flags in ([1, 0, 0], [1, 1, 1, 1, 0, 1], [], [0]):
        builder.append(np.array(flags, bool))
    expected = b"BLMMASK\x00" + struct.pack("<QQQ", 1, 10, 6) + bytes([0b01111001, 0b00000001])
    assert builder.to_bytes() == expected
    (tmp_path / "x.mask").write_bytes(expected)
    mask = map_mask(tmp_path / "x.mask", 10)
    assert mask.slice(0, 10).tolist() == [
        True,
        False,
        False,
        True,
        True,
        True,
        True,
        False,
        True,
        False,
    ]
    assert mask.slice(7, 9).tolist() == [False, True]
    assert (mask.trained, mask.count()) == (6, 6)


def test_checksum_bytes(tmp_path):
    data = bytes(range(256)) * 16 * 600 + b"rest"
    checksums = BlockChecksums()
    for chunk in (data[:5], data[5:4095], data[4095:4096], data[4096:40_000], data[40_000:]):
        checksums.append(chunk)
    digests = [xxhash.xxh3_64_intdigest(data[at : at + 4096]) for at in range(0, len(data), 4096)]
    entries = struct.pack("<601Q", *digests)
    roots = [xxhash.xxh3_64_intdigest(entries[at : at + 4096]) for at in (0, 4096)]
    head = b"BLMSUMS\x00" + struct.pack("<QQQ", 1, 601, 8) + struct.pack("<2Q", *roots)
    head += bytes(4096 - len(head))
    assert checksums.to_bytes() == (head + entries, xxhash.xxh3_128_hexdigest(head))
    (tmp_path / "x.sums").write_bytes(head + entries)
    mapped = map_checksum_file(tmp_path / "x.sums", xxhash.xxh3_128_hexdigest(head), 601)
    mapped.verify(tmp_path / "x", memoryview(data), range(601))
    mapped.verify(tmp_path / "x", memoryview(data[3 * 4096 :]), range(598), first_entry=3)
    with pytest.raises(StoreError, match=r"x: bytes 4,096 to 8,192 do not match its checksums"):
        mapped.verify(tmp_path / "x", memoryview(data[:4096] + bytes(4096)), range(2))


def test_each_file_of_a_shard_begins_a_block(tmp_path):
    """The checksums of a shard are those of its tokens, then of its mask, then of its weights."""
    (tmp_path / "x.mask").write_bytes(b"m" * 5000)
    (tmp_path / "x.weights").write_bytes(b"w" * 100)
    checksums = BlockChecksums()
    checksums.append(b"t" * 4100)
    write_shard_checksums(tmp_path / "x.bin", checksums, mask=True, weights=True)
    blocks = [b"t" * 4096, b"t" * 4, b"m" * 4096, b"m" * 904, b"w" * 100]
    entries = struct.pack("<5Q", *map(xxhash.xxh3_64_intdigest, blocks))
    assert (tmp_path / "x.sums").read_bytes()[4096:] == entries


def test_checksum_bytes_of_lengths(tmp_path):
    """Each checksum is followed by the number of tokens before its block."""
    lengths = np.arange(2500, dtype="<u4")
    checksums = BlockChecksums(COUNTED_ENTRY_BYTES)
    checksums.append(lengths[:1500])
    checksums.append(lengths[1500:])
    data, _ = checksums.to_bytes()
    blocks = [lengths[at : at + 1024].tobytes() for at in (0, 1024, 2048)]
    preceding_tokens = (0, sum(range(1024)), sum(range(2048)))
    pairs = zip(map(xxhash.xxh3_64_intdigest, blocks), preceding_tokens, strict=True)
    entries = b"".join(struct.pack("<2Q", *pair) for pair in pairs)
    root = struct.pack("<Q", xxhash.xxh3_64_intdigest(entries))
    expected = b"BLMSUMS\x00" + struct.pack("<QQQ", 1, 3, 16) + root
    assert data == expected + bytes(4096 - len(expected)) + entries


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 3 << 20])
def test_file_checksums_equal_appended_checksums(tmp_path, size):
    data = bytes(size)
    (tmp_path / "x.bin").write_bytes(data)
    checksums = BlockChecksums()
    checksums.append(data)
    expected, head = checksums.to_bytes()
    assert compute_file_checksums(tmp_path / "x.bin").to_bytes() == (expected, head)
    (tmp_path / "x.sums").write_bytes(expected)
    blocks = range(-(-size // 4096))
    map_checksum_file(tmp_path / "x.sums", head, len(blocks)).verify(tmp_path / "x.bin", memoryview(data), blocks)
    for position in {0, 24, 31, len(expected) - 1}:
        changed = bytearray(expected)
        changed[position] ^= 1
        (tmp_path / "x.sums").write_bytes(changed)
        with pytest.raises(StoreError, match="x.sums"):
            mapped = map_checksum_file(tmp_path / "x.sums", head, len(blocks))
            mapped.verify(tmp_path / "x.bin", memoryview(data), blocks)


def test_pairs_bytes(tmp_path):
    numbers = compute_pair_numbers(np.array([0, 0, 3], np.uint32), np.array([7, 8, 1], np.uint64))
    assert numbers.tolist() == [7, 8, (3 << 40) + 1]
    expected = b"BLMPAIR\x00" + struct.pack("<QQQ", 1, 4, 0)
    expected += struct.pack("<4Q", 7, 7, 9, 9) + bytes([1, 2, 1, 2])
    index = PairIndex(np.array([7, 7, 9, 9], np.uint64), np.array([1, 2, 1, 2], np.uint8))
    assert index.to_bytes() == expected
    (tmp_path / "x.pairs").write_bytes(expected)
    assert map_pair_index(tmp_path / "x.pairs", 4, "pairs").to_bytes() == expected
    with pytest.raises(StoreError, match="document 0 has side 1, which is not a side of labels"):
        map_pair_index(tmp_path / "x.pairs", 4, "labels")
    (tmp_path / "x.pairs").write_bytes(expected[:-4] + bytes([3, 4, 4, 3]))
    with pytest.raises(StoreError, match="are not in ascending order"):
        map_pair_index(tmp_path / "x.pairs", 4, "labels")


def test_pairs_are_numbered_up_to_a_limit():
    for part, record in ((1 << 23, 0), (0, 1 << 40)):
        with pytest.raises(InputError, match="give fewer, larger files"):
            compute_pair_numbers(np.array([part], np.uint32), np.array([record], np.uint64))


def test_a_mask_is_written_only_where_a_token_is_not_trained(tmp_path):
    documents, flags = [[1, 2], [3], [4, 5, 6]], [[1, 1], [1], [0, 1, 1]]
    store = write_store(tmp_path, documents, documents_per_shard=2, trained=flags)
    assert not (tmp_path / "train/shard_00000.mask").exists()
    assert (tmp_path / "train/shard_00001.mask").read_bytes()[-1] == 0b110
    manifest = json.loads((tmp_path / "dataset_metadata.json").read_text())
    first, second = manifest["subsets"]["train"]["shards"]
    assert "mask" not in first
    assert second["trained"] == 2
    assert store.masked
    spans = store.mask(np.array([2, 0]), np.array([1, 0]), np.array([2, 2]))
    assert [span.tolist() for span in spans] == [[True, True], [True, True]]
    assert check(tmp_path).sound


def test_a_mask_changes_the_fingerprint(tmp_path):
    documents = [[1, 2], [3]]
    masks = ([[0, 1], [1]], [[1, 0], [1]], None)
    stores = [write_store(tmp_path / str(i), documents, trained=mask) for i, mask in enumerate(masks)]
    assert len({store.fingerprint for store in stores}) == 3


def test_the_files_of_a_store(tmp_path):
    write_store(tmp_path, DOCUMENTS, documents_per_shard=3)
    files = {str(p.relative_to(tmp_path)): p.read_bytes() for p in sorted(tmp_path.rglob("*")) if p.is_file()}
    assert sorted(files) == [
        "dataset_metadata.json",
        "tokenizer_state.json",
        "train/lengths.sums",
        "train/lengths.u32",
        "train/shard_00000.bin",
        "train/shard_00000.docs",
        "train/shard_00000.idx",
        "train/shard_00000.sums",
        "train/shard_00001.bin",
        "train/shard_00001.docs",
        "train/shard_00001.idx",
        "train/shard_00001.sums",
        "val/lengths.sums",
        "val/lengths.u32",
        "val/shard_00000.bin",
        "val/shard_00000.docs",
        "val/shard_00000.idx",
        "val/shard_00000.sums",
    ]
    assert files["train/shard_00000.bin"] == struct.pack("<4H", 72, 105, 256, 256)
    assert files["train/lengths.u32"] == struct.pack("<4I", 3, 1, 0, 5)
    manifest = json.loads(files["dataset_metadata.json"])
    assert manifest["format_version"] == 1
    assert [shard["documents"] for shard in manifest["subsets"]["train"]["shards"]] == [3, 1]


def test_the_manifest_matches_its_schema(tmp_path):
    import jsonschema

    write_store(tmp_path, DOCUMENTS)
    schema = json.loads((Path(__file__).parents[2] / "docs/reference/manifest.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    manifest = json.loads((tmp_path / "dataset_metadata.json").read_text())
    jsonschema.validate(manifest, schema)
    manifest["surprise"] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(manifest, schema)


def test_the_same_store_has_the_same_bytes(tmp_path):
    first, second = tmp_path / "one", tmp_path / "two"
    write_store(first, DOCUMENTS)
    write_store(second, DOCUMENTS)
    for path in first.rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (second / path.relative_to(first)).read_bytes()


def test_dtype_follows_megatrons_rule():
    dtype = import_megatron("indexed_dataset").DType
    for vocabulary in (257, 50_257, 65_499, 65_500, 65_536, 151_936):
        assert np.dtype(choose_token_dtype("auto", vocabulary)) == dtype.optimal_dtype(vocabulary)


def test_int32_ids_read_unchanged_as_uint32(tmp_path):
    store = write_store(tmp_path, [[1, 200, 256]], dtype="int32")
    assert np.fromfile(tmp_path / "train/shard_00000.bin", "<u4").tolist() == [1, 200, 256]
    assert store[0].ids.dtype == np.dtype("<i4")


def test_shard_names_grow():
    assert [format_shard_name(n) for n in (0, 99_999, 100_000)] == [
        "shard_00000",
        "shard_99999",
        "shard_100000",
    ]


@pytest.mark.parametrize("code", range(1, 9))
def test_every_dtype_code_is_read(tmp_path, code):
    data = bytearray(encode_index(np.array([1], np.uint32), np.dtype("<u2")))
    data[17] = code
    (tmp_path / "a.idx").write_bytes(data)
    assert map_index(tmp_path / "a.idx").dtype.itemsize == [1, 1, 2, 4, 8, 8, 4, 2][code - 1]


def test_the_schema_matches_the_manifest_class():
    import msgspec

    from batchloom.store import Manifest

    def clean(value):
        # From Python 3.13 on, a docstring has no indentation.
        return {**value, "description": inspect.cleandoc(value["description"])} if "description" in value else value

    text = (Path(__file__).parents[2] / "docs/reference/manifest.schema.json").read_text()
    schema = json.loads(text, object_hook=clean)
    generated = json.loads(json.dumps(msgspec.json.schema(Manifest)), object_hook=clean)
    assert {key: schema[key] for key in generated} == generated


def test_a_document_too_long_for_an_index_is_refused():
    with pytest.raises(StoreError, match="Document 1 has 2,147,483,648 tokens"):
        encode_index(np.array([4, 2**31], np.uint32), np.dtype("<u2"))
