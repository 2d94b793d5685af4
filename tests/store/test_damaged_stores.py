"""Damaged and malicious stores: each gives one clear error and never wrong tokens."""

import json
import os
import struct
from collections import deque

import numpy as np
import pytest
import xxhash

import batchloom
from batchloom import StoreError
from batchloom.store import verify_prefix, verify_store
from batchloom.store.format import compute_file_checksums, split_checksum
from batchloom.store.write import write_shard_checksums
from batchloom.testing import write_store
from store.manifest_edits import edit_manifest

# Magic, version, code of the dtype, sequences and documents, as Megatron writes an .idx.
HEADER = struct.Struct("<9sQBQQ")
DOCUMENTS = [[n % 256 for n in range(k, k + 20)] + [256] for k in range(50)]


@pytest.fixture
def folder(tmp_path):
    write_store(tmp_path, DOCUMENTS, documents_per_shard=20)
    return tmp_path


def read_all_documents(folder):
    store = batchloom.open_store(folder)
    return [store[n].ids.tolist() for n in range(len(store))]


def seal_sidecars(folder):
    """Give the manifest the checksums that the sidecars have now, as if the writer had made them so."""

    def seal(manifest):
        for name, subset in manifest["subsets"].items():
            for shard in subset["shards"]:
                for suffix in ("docs", "mask", "weights", "pairs", "fields", "media"):
                    path = folder / name / f"{shard['name']}.{suffix}"
                    if path.is_file() and suffix in shard:
                        shard[suffix] = xxhash.xxh3_128_hexdigest(path.read_bytes())
                stem = folder / name / shard["name"]
                shard["sums"] = write_shard_checksums(
                    stem,
                    compute_file_checksums(stem.with_suffix(".bin")),
                    mask=stem.with_suffix(".mask").is_file(),
                    weights=stem.with_suffix(".weights").is_file(),
                )

    edit_manifest(folder, seal)


def truncate(path, count):
    path.write_bytes(path.read_bytes()[:-count])


def overwrite(path, offset, data):
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(content)


def get_first_shard(manifest):
    return manifest["subsets"]["train"]["shards"][0]


def get_first_source(manifest):
    return manifest["sources"][0]


MANIFEST_ATTACKS = {
    "etc passwd": (lambda m: get_first_shard(m).update(name="../../etc/passwd"), "not of the form shard_00000"),
    "absolute name": (lambda m: get_first_shard(m).update(name="/etc/passwd"), "not of the form shard_00000"),
    "subset outside": (lambda m: m["subsets"].update({"../x": m["subsets"]["train"]}), "subset '../x' is not one of"),
    "other version": (lambda m: m.update(format_version=99), "format_version 99"),
    "no version": (lambda m: m.pop("format_version"), "is not a manifest"),
    "version as text": (lambda m: m.update(format_version="1"), "is not a manifest"),
    "lying documents": (lambda m: get_first_shard(m).update(documents=21), "declares 50 documents"),
    "lying tokens": (lambda m: get_first_shard(m).update(tokens=10**9, bytes=2 * 10**9), "its shards have"),
    "negative": (lambda m: get_first_shard(m).update(documents=-1), r"Expected `int` >= 0 - at .*shards\[0\].documents"),
    "bytes": (lambda m: get_first_shard(m).update(bytes=7), "contradict"),
    "dtype": (lambda m: m.update(dtype="float64"), "dtype 'float64' is not one of"),
    "dtype that lies": (lambda m: (m.update(dtype="int32"), [s.update(bytes=2 * s["bytes"]) for s in m["subsets"]["train"]["shards"]]), "holds uint16 tokens, the manifest says int32"),
    "surprise": (lambda m: m.update(surprise=1), "unknown field `surprise`"),
    "missing": (lambda m: m.pop("tokenizer"), "missing required field `tokenizer`"),
    "wrong type": (lambda m: get_first_shard(m).update(tokens="12"), "Expected `int`, got `str`"),
    "parts": (lambda m: get_first_source(m).update(parts=[[0, 9, -1]]), r"Expected `int` >= 0 - at `\$.sources\[0\].parts\[0\]\[2\]`"),
    "huge parts": (lambda m: get_first_source(m).update(parts=[[0, 2**70, 50]]), r"Expected `int` <= \d+ - at `\$.sources\[0\].parts"),
    "parts as floats": (lambda m: get_first_source(m).update(parts=[[0, 0.5, 50]]), "Expected `int`, got `float`"),
    "parts of too many records": (lambda m: get_first_source(m).update(parts=[[0, 9, 2**40]] * 1025), "the parts of its sources have"),
    "weight": (lambda m: get_first_source(m).update(weight=0), "Expected `float` > 0"),
    "checksum of a shard": (lambda m: get_first_shard(m).update(bin="-" + "1" * 31), "Expected `str` matching regex"),
    "trained without a mask": (lambda m: get_first_shard(m).update(trained=3), "contradict each other"),
    "media without a size": (lambda m: get_first_shard(m).update(media="0" * 32), "contradict each other"),
    "a size without a file": (lambda m: get_first_shard(m).update(parquet_bytes=3), "contradict each other"),
    "no block checksums": (lambda m: get_first_shard(m).pop("sums"), "missing required field `sums`"),
    "no block checksums of lengths": (lambda m: m["subsets"]["train"].pop("sums"), "missing required field `sums`"),
    "trained": (lambda m: get_first_shard(m).update(trained=10**6, mask="0" * 32), "contradict each other"),
    "bos_id": (lambda m: m["tokenizer"].update(bos_id=-1), "bos_id -1 is not in the vocabulary"),
    "override": (lambda m: m.update(subset_overrides={"0" * 32: "x"}), "subset 'x' is not one of"),
    "overridden": (lambda m: m.update(subset_overrides={"x": "val"}), "matching regex|length"),
    "generation": (lambda m: m.update(generation=2**64), "Expected `int` <="),
    "huge number": (lambda m: get_first_shard(m).update(tokens=2**80), r"Expected `int` <= \d+ - at .*shards\[0\].tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", MANIFEST_ATTACKS)
def test_damaged_manifests(folder, name):
    change, sentence = MANIFEST_ATTACKS[name]
    edit_manifest(folder, change)
    with pytest.raises(StoreError, match=sentence):
        read_all_documents(folder)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"format_version": 1, "recipe": {"a":' + "[" * 100_000,
        "[]",
        "null",
        '{"format_version": 1}',
        "\x00\xff",
    ],
)
def test_invalid_manifest_bytes(folder, text):
    (folder / "dataset_metadata.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(StoreError, match="dataset_metadata.json"):
        batchloom.open_store(folder)


def replace_by_pipe(path):
    path.unlink()
    os.mkfifo(path)


IDX, BIN, LENGTHS = "train/shard_00000.idx", "train/shard_00000.bin", "train/lengths.u32"
FILE_ATTACKS = {
    "idx cut in header": (lambda f: (f / IDX).write_bytes(b"MMIDIDX"), "is cut short"),
    "idx cut": (lambda f: truncate(f / IDX, 1), "cut short or damaged"),
    "idx empty": (lambda f: (f / IDX).write_bytes(b""), "is cut short"),
    "idx gone": (lambda f: (f / IDX).unlink(), "cannot be read: No such file"),
    "idx magic": (lambda f: overwrite(f / IDX, 0, b"XX"), "is not a Megatron index"),
    "idx version": (lambda f: overwrite(f / IDX, 9, struct.pack("<Q", 2)), "index version 2"),
    "idx dtype unknown": (lambda f: overwrite(f / IDX, 17, b"\x63"), "dtype code 99"),
    "idx dtype other": (lambda f: overwrite(f / IDX, 17, b"\x04"), "holds int32 tokens, the manifest says uint16"),
    "idx count": (lambda f: overwrite(f / IDX, 18, struct.pack("<Q", 2**60)), "cut short or damaged"),
    "idx document index": (lambda f: overwrite(f / IDX, 34 + 12 * 20, struct.pack("<q", 5)), "does not run from 0"),
    "pointer outside": (lambda f: overwrite(f / IDX, 34 + 80, struct.pack("<q", 10**9)), "not where its index points"),
    "pointer negative": (lambda f: overwrite(f / IDX, 34 + 80, struct.pack("<q", -42)), "not where its index points"),
    "length lies": (lambda f: overwrite(f / IDX, 34, struct.pack("<i", 3)), "not where its index points"),
    "length negative": (lambda f: overwrite(f / IDX, 34, struct.pack("<i", -3)), "not where its index points"),
    "bin cut": (lambda f: truncate(f / BIN, 2), "has 838 bytes, the manifest says 840"),
    "bin odd": (lambda f: truncate(f / BIN, 1), "has 839 bytes"),
    "bin longer": (lambda f: (f / BIN).write_bytes((f / BIN).read_bytes() + b"ab"), "has 842 bytes"),
    "bin gone": (lambda f: (f / BIN).unlink(), "cannot be read"),
    "pointer of another document": (lambda f: overwrite(f / IDX, 34 + 80, struct.pack("<q", 42)), "not where its index points"),
    "pointer into a token": (lambda f: overwrite(f / IDX, 34 + 80, struct.pack("<q", 7)), "not where its index points"),
    "lengths shorter": (lambda f: overwrite(f / LENGTHS, 0, struct.pack("<I", 3)), "have 1,032 tokens, the manifest says 1,050"),
    "lengths that add up": (lambda f: overwrite(f / LENGTHS, 0, struct.pack("<2I", 3, 39)), "not where its index points"),
    "idx a pipe": (lambda f: replace_by_pipe(f / IDX), "a pipe or a device"),
    "bin a pipe": (lambda f: replace_by_pipe(f / BIN), "a pipe or a device"),
    "lengths a pipe": (lambda f: replace_by_pipe(f / LENGTHS), "a pipe or a device"),
    "manifest a pipe": (lambda f: replace_by_pipe(f / "dataset_metadata.json"), "a pipe or a device"),
    "lengths cut": (lambda f: truncate(f / LENGTHS, 4), "50 documents take 200"),
    "lengths lie": (lambda f: overwrite(f / LENGTHS, 0, struct.pack("<I", 400)), "have 1,429 tokens, the manifest says 1,050"),
}  # fmt: skip


MASK = "train/shard_00000.mask"
MASK_ATTACKS = {
    "gone": (lambda f: (f / MASK).unlink(), "cannot be read: No such file", True),
    "cut in header": (lambda f: (f / MASK).write_bytes(b"BLMMASK"), "is cut short", True),
    "cut": (lambda f: truncate(f / MASK, 1), "its shard has 6", True),
    "magic": (lambda f: overwrite(f / MASK, 0, b"XX"), "is not a .mask file", True),
    "version": (lambda f: overwrite(f / MASK, 8, b"\x02"), "is not a .mask file", True),
    "tokens lie": (lambda f: overwrite(f / MASK, 16, b"\x07"), "declares 7 tokens", True),
    "trained lie": (lambda f: overwrite(f / MASK, 24, b"\x02"), "its header says 2 trained", False),
    "bits": (lambda f: overwrite(f / MASK, 32, b"\x3f"), "checksum differs", False),
    "bits beyond the last token": (lambda f: overwrite(f / MASK, 32, b"\xf5"), "6 bits are set", False),
}  # fmt: skip


@pytest.mark.parametrize("name", MASK_ATTACKS)
def test_damaged_masks(tmp_path, name):
    change, sentence, fails_when_read = MASK_ATTACKS[name]
    write_store(tmp_path, [[1, 2, 3], [4, 5, 6]], trained=[[1, 0, 1], [0, 1, 1]])
    change(tmp_path)
    if sentence != "checksum differs":
        seal_sidecars(tmp_path)
    if fails_when_read:
        with pytest.raises(StoreError, match=sentence):
            batchloom.open_store(tmp_path).mask(np.array([0]), np.array([0]), np.array([3]))
    verdict = verify_store(tmp_path)
    assert any(sentence in fault for fault in verdict.faults), verdict.faults


@pytest.mark.parametrize("suffix", [".mask", ".weights", ".docs"])
@pytest.mark.parametrize("verify", ["off", "first-read"])
def test_any_bit_of_a_sidecar_is_verified_when_it_is_first_read(tmp_path, suffix, verify):
    write_store(tmp_path, [[1, 2, 3], [4, 5, 6]], trained=[[1, 0, 0.5], [0, 1, 1]])
    path = tmp_path / f"train/shard_00000{suffix}"
    if suffix == ".mask":
        write_store(tmp_path / "m", [[1, 2, 3], [4, 5, 6]], trained=[[1, 0, 1], [0, 1, 1]])
        path = tmp_path / "m/train/shard_00000.mask"
    sound = path.read_bytes()
    for position in range(len(sound)):
        overwrite(path, position, bytes([sound[position] ^ 4]))
        store = batchloom.open_store(path.parent.parent, verify=verify)
        with pytest.raises(StoreError, match=f"shard_00000{suffix}"):
            _ = store.provenance.of(0) if suffix == ".docs" else store.mask(*np.array([[0], [0], [3]]))
        path.write_bytes(sound)


DOCUMENT_TOKENS = 700


@pytest.fixture(scope="module", params=[1, 0.5], ids=[".mask", ".weights"])
def flagged(tmp_path_factory, request):
    """A store of three shards of 500 documents, whose flags are verified in runs of 374."""
    path = tmp_path_factory.mktemp("flagged") / "store"
    flags = [[0, request.param] * (DOCUMENT_TOKENS // 2) for _ in range(1500)]
    write_store(path, [[1] * DOCUMENT_TOKENS] * 1500, trained=flags, documents_per_shard=500)
    return path


@pytest.fixture
def damaged_flags(flagged):
    """The store with one bit of the flags of document 990 flipped, in the second shard."""
    suffix = ".weights" if (flagged / "train/shard_00001.weights").is_file() else ".mask"
    path = flagged / f"train/shard_00001{suffix}"
    token = 490 * DOCUMENT_TOKENS + 1
    position = 32 + (token if suffix == ".weights" else token // 8)
    sound = path.read_bytes()
    overwrite(path, position, bytes([sound[position] ^ 8]))
    yield flagged
    path.write_bytes(sound)


def test_damaged_flags_are_refused_when_their_block_is_read(damaged_flags):
    store = batchloom.open_store(damaged_flags)
    served = np.array([*range(740), *range(1130, 1500)])
    store.mask(served, np.zeros_like(served), np.full(served.size, DOCUMENT_TOKENS))
    with pytest.raises(StoreError, match=r"shard_00001\.(mask|weights): bytes [\d,]+ to [\d,]+ do not match"):
        store.mask(np.array([990]), np.array([600]), np.array([3]))


@pytest.mark.parametrize("is_mixture", [False, True])
def test_no_batch_has_damaged_flags(damaged_flags, tmp_path, is_mixture):
    """The native kernel reads the flags of one store, and of several, where they are mapped."""
    data = batchloom.open_store(damaged_flags)
    if is_mixture:
        other = write_store(tmp_path / "other", [[2] * DOCUMENT_TOKENS] * 50)
        data = batchloom.Mixture({"a": 0.9, "b": 0.1}, stores={"a": data, "b": other})
    loader = batchloom.Loader(data, seq_len=DOCUMENT_TOKENS, global_batch_size=1, steps=2000, shuffle=False)
    with pytest.raises(StoreError, match="do not match its checksums"):
        deque(loader, maxlen=0)
    assert loader.state_dict()["position"] > 0


def test_a_mask_missing_from_the_manifest(folder):
    (folder / MASK).write_bytes(b"")
    assert any(".mask: the manifest does not list it" in fault for fault in verify_store(folder).faults)


@pytest.mark.parametrize("name", FILE_ATTACKS)
def test_damaged_files(folder, name):
    change, sentence = FILE_ATTACKS[name]
    change(folder)
    with pytest.raises(StoreError, match=sentence):
        read_all_documents(folder)
    verdict = verify_store(folder)
    assert not verdict.sound


def test_check_finds_damage_that_reading_cannot(folder):
    assert verify_store(folder).sound
    overwrite(folder / BIN, 8, struct.pack("<H", 77))
    assert verify_store(folder).faults == [f"{folder / BIN}: checksum differs from the manifest's."]


WRONG_COUNTS = {
    "documents": (lambda m: m["counts"].update(documents=51), "says 51 documents, its subsets hold 50;"),
    "tokens": (lambda m: m["counts"].update(tokens=7), "says 7 tokens, its subsets hold 1,050;"),
    "records": (lambda m: m["counts"].update(records=60), "says 60 records, the parts of its sources hold 50;"),
    "fates": (lambda m: m["counts"].update(dropped={"empty": 3}), "says 50 records, its documents, quarantined and dropped records together are 53;"),
    "quarantined": (lambda m: m["counts"].update(quarantined=2), "says 2 quarantined records, quarantine.jsonl has 0;"),
    "parts": (lambda m: m["sources"][0].update(parts=[[0, 9, 49]]), "says 50 records, the parts of its sources hold 49;"),
    "documents of a source": (lambda m: m["sources"][0].update(documents=49), "says 49 documents of given, the documents that name it as their source are 50;"),
    "tokens of a source": (lambda m: m["sources"][0].update(tokens=9), "says 9 tokens of given, the documents that name it as their source hold 1,050;"),
    "no source": (lambda m: m.update(sources=[]), "says 0 documents of sources it does not list, its .docs files have 50;"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_COUNTS)
def test_check_compares_every_count(folder, name):
    change, sentence = WRONG_COUNTS[name]
    edit_manifest(folder, change)
    faults = [fault for fault in verify_store(folder).faults if sentence in fault]
    assert len(faults) == 1
    assert faults[0].endswith("or prepare the store again.")


def test_check_counts_the_lines_of_the_quarantine(folder):
    (folder / "quarantine.jsonl").write_text('{"line": 1}\n{"line": 2}\n')
    (fault,) = verify_store(folder).faults
    assert "says 0 quarantined records, quarantine.jsonl has 2;" in fault


def test_check_finds_ids_outside_the_vocabulary(folder):
    overwrite(folder / BIN, 8, struct.pack("<H", 300))
    assert any("token id 300; the vocabulary has ids 0 to 256" in fault for fault in verify_store(folder).faults)


def test_check_finds_another_tokenizer(folder):
    state = json.loads((folder / "tokenizer_state.json").read_text())
    from batchloom.tokens import train_tokenizer

    (folder / "tokenizer_state.json").write_text(json.dumps(train_tokenizer(["aa ab"] * 9, 260).state()))
    assert any("another tokenizer" in fault for fault in verify_store(folder).faults)
    (folder / "tokenizer_state.json").write_text(json.dumps(state)[:-5])
    assert any("cannot be read" in fault for fault in verify_store(folder).faults)


def test_check_finds_noise(tmp_path):
    rng = np.random.default_rng(0)
    text = [[*(b"it was the best of times, it was the worst of times; " * 30), 256] for _ in range(20)]
    write_store(tmp_path / "text", text)
    assert verify_store(tmp_path / "text").sound
    write_store(tmp_path / "noise", [rng.integers(0, 257, 2000).tolist() for _ in range(20)])
    assert any("uniform noise" in fault for fault in verify_store(tmp_path / "noise").faults)


@pytest.mark.parametrize("count", [1, 7, 33, 100])
def test_truncated_prefixes(folder, tmp_path, count):
    for suffix in (".bin", ".idx"):
        copy = tmp_path / f"copy{suffix[1:]}{count}"
        for kind in (".bin", ".idx"):
            copy.with_suffix(kind).write_bytes((folder / f"train/shard_00000{kind}").read_bytes())
        assert verify_prefix(copy).sound
        truncate(copy.with_suffix(suffix), count)
        with pytest.raises(StoreError):
            read_all_documents(copy)
        assert not verify_prefix(copy).sound


def test_a_prefix_whose_documents_run_backwards(folder, tmp_path):
    for kind in (".bin", ".idx"):
        (tmp_path / f"p{kind}").write_bytes((folder / f"train/shard_00000{kind}").read_bytes())
    overwrite(tmp_path / "p.idx", HEADER.size + 12 * 20 + 8, struct.pack("<q", 9))
    with pytest.raises(StoreError, match="run backwards"):
        batchloom.open_store(tmp_path / "p")


def write_prefix(path, lengths, pointers, bounds=None):
    """Write a uint16 prefix of tokens 0, 1, 2, ... with the given index columns."""
    bounds = bounds or list(range(len(lengths) + 1))
    header = HEADER.pack(b"MMIDIDX\0\0", 1, 8, len(lengths), len(bounds))
    columns = ((lengths, "<i4"), (pointers, "<i8"), (bounds, "<i8"))
    path.with_suffix(".idx").write_bytes(
        header + b"".join(np.array(column, kind).tobytes() for column, kind in columns)
    )
    path.with_suffix(".bin").write_bytes(np.arange(sum(lengths), dtype="<u2").tobytes())
    return path


@pytest.mark.parametrize(
    ("lengths", "pointers", "bounds", "sentence"),
    [
        ([3, 2, 4], [0, 4, 10], None, "points sequence 1 to byte 4 of the .bin, but the one before it ends at 6"),
        ([3, 2, 4], [0, 8, 10], None, "points sequence 1 to byte 8 of the .bin, but the one before it ends at 6"),
        ([3, 2, 4], [0, 6, 6], None, "overlap or leave gaps"),
        ([3, 2, 4], [-2, 6, 10], None, "points sequence 0 to byte -2"),
        ([3, 2, 4], [0, 6, 2**60], None, "points sequence 2 to byte"),
        ([3, 2, 4], [0, 6, 8], [0, 2, 3], "points sequence 2 to byte 8"),
    ],
)  # fmt: skip
def test_a_prefix_whose_documents_hold_tokens_of_others(tmp_path, lengths, pointers, bounds, sentence):
    path = write_prefix(tmp_path / "p", lengths, pointers, bounds)
    with pytest.raises(StoreError, match=sentence):
        batchloom.open_store(path)
    assert [sentence in fault for fault in verify_prefix(path).faults] == [True]


def test_a_prefix_may_hold_its_documents_in_any_order(tmp_path):
    path = write_prefix(tmp_path / "p", [3, 0, 2, 4], [12, 8, 0, 4], [0, 1, 2, 4])
    assert verify_prefix(path).sound
    store = batchloom.open_store(path)
    assert [store[n].ids.tolist() for n in range(3)] == [[6, 7, 8], [], [0, 1, 2, 3, 4, 5]]


def test_a_span_beyond_its_document_is_refused(folder):
    store, ones = batchloom.open_store(folder), np.ones(1, np.int64)
    with pytest.raises(StoreError, match=r"Document 1 of .* has 21 tokens, and a span of it ends at 22"):
        store.read(ones, ones, 21 * ones)


def test_a_shard_larger_than_its_documents_is_refused(folder):
    (folder / BIN).write_bytes((folder / BIN).read_bytes() + b"ab")
    edit_manifest(
        folder,
        lambda m: (
            get_first_shard(m).update(tokens=421, bytes=842),
            m["subsets"]["train"].update(tokens=1051),
        ),
    )
    with pytest.raises(StoreError, match="have 1,050 tokens, the manifest says 1,051"):
        read_all_documents(folder)


@pytest.mark.parametrize("name", ["end_id", "vocab_size", "bos_id"])
def test_a_wrong_tokenizer_entry_is_a_fault(folder, name):
    value = {"end_id": 0, "vocab_size": 999, "bos_id": 7}[name]
    edit_manifest(folder, lambda m: m["tokenizer"].update({name: value}))
    assert any("another tokenizer" in fault for fault in verify_store(folder).faults)
    edit_manifest(folder, lambda m: m["tokenizer"].update(end_id=70_000))
    with pytest.raises(StoreError, match="end_id 70000 is not in the vocabulary"):
        batchloom.open_store(folder)


def test_a_manifest_that_is_not_utf8(folder):
    path = folder / "dataset_metadata.json"
    data = path.read_bytes().replace(b'"given"', b'"giv\xffn"')
    content_checksum, old_checksum = split_checksum(data)
    path.write_bytes(data.replace(old_checksum.encode(), content_checksum.encode()))
    with pytest.raises(StoreError, match="not a manifest"):
        batchloom.open_store(folder)


def test_a_prefix_without_documents_is_a_fault(tmp_path):
    (tmp_path / "empty.idx").write_bytes(HEADER.pack(b"MMIDIDX\0\0", 1, 8, 0, 1) + bytes(8))
    (tmp_path / "empty.bin").write_bytes(b"")
    assert verify_prefix(tmp_path / "empty").faults == [f"{tmp_path / 'empty'}: holds no documents."]
    with pytest.raises(batchloom.InputError, match="nothing to inspect"):
        batchloom.inspect(tmp_path / "empty")


def test_a_missing_tokenizer_is_named_with_its_file(folder):
    path = folder / "tokenizer_state.json"
    path.write_text("null")
    assert f"{path}: this is not the state of a tokenizer" in " ".join(verify_store(folder).faults)
    path.unlink()
    (fault,) = verify_store(folder).faults
    assert fault.startswith(f"{path} cannot be read: ")
    assert fault.endswith("; restore it from the original store.")


@pytest.mark.parametrize("data", [b"[" * 100_000, b"\xff", None])
def test_an_unreadable_tokenizer(folder, data):
    path = folder / "tokenizer_state.json"
    replace_by_pipe(path)
    if data is not None:
        path.unlink()
        path.write_bytes(data)
    with pytest.raises(StoreError, match="tokenizer_state.json cannot be read: "):
        batchloom.open_store(folder)[0].text  # noqa: B018
