import os
import pickle
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

import batchloom
from batchloom import InputError, StoreError
from batchloom.core.errors import StoreMissingError
from batchloom.store import encode_manifest, read_manifest, write_file
from batchloom.store.format import encode_index, seal_manifest
from batchloom.testing import write_store
from oracles import write_megatron_pair
from store.manifest_edits import edit_manifest

HELLO = [*b"Hello", 256]


def test_documents_tokens_text_and_provenance(tmp_path):
    store = write_store(tmp_path / "s", {"train": [HELLO, [256], [*b"you", 256]], "val": [[*b"v", 256]]})
    assert (len(store), store.tokens, store.subsets) == (3, 11, ("train", "val"))
    assert store[0].ids.tolist() == HELLO
    assert store[-1].text == "you<|endoftext|>"
    provenance = store.provenance.of(2)
    assert (provenance.source, provenance.record, provenance.line, len(provenance.hash)) == ("given", 2, 3, 32)
    assert batchloom.open_store(tmp_path / "s", split="val")[0].text.startswith("v")
    with pytest.raises(IndexError):
        store[3]
    assert [document.number for document in store[-2:]] == [1, 2]
    with pytest.raises(TypeError, match="by a whole number, not by 'a'"):
        store["a"]
    assert "3 documents, 11 tokens" in repr(store)


def test_a_missing_subset(tmp_path):
    write_store(tmp_path, [HELLO])
    with pytest.raises(InputError, match="no documents in subset 'vla'; it has: train"):
        batchloom.open_store(tmp_path, split="vla")


def test_a_missing_store(tmp_path):
    with pytest.raises(StoreMissingError, match="batchloom prepare INPUT"):
        batchloom.open_store(tmp_path / "no")
    with pytest.raises(FileNotFoundError, match="the folder is empty. Make one with: batchloom"):
        batchloom.open_store(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "no")
    with pytest.raises(StoreMissingError, match=r"--out .*link makes one.*a broken link\.$"):
        batchloom.open_store(tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(StoreMissingError, match="this is a pipe or a device") as error:
            batchloom.open_store(path)
        assert "did you mean" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.txt", "this is a file.*batchloom prepare .*a.txt --out STORE;.*--input-file .*a.txt"),
        ("texts", "this is a folder without .*batchloom prepare .*texts --out STORE"),
        ("several", r"several is a folder of 2 stores: name one of them \(a, b\), or a mixture"),
        ("half", "is an unfinished store; give its prepare command again"),
        ("half.bin", "a pair of files, and half.idx is missing"),
        ("s/train", "is a subset of a store; name the store itself: .*/s$"),
        ("mix.yaml", "this is a YAML file.*it is a mixture: --mixture .*mix.yaml$"),
        ("a.tx", r"--out .*a.tx makes one.*did you mean '.*/a.txt'\?$"),
    ],
)
def test_paths_that_are_not_stores(tmp_path, name, message):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "mix.yaml").write_text("weights: {web: 1}")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("text")
    (tmp_path / "half" / ".work").mkdir(parents=True)
    (tmp_path / "half.bin").write_bytes(b"1234")
    for folder in ("s", "several/a", "several/b"):
        write_store(tmp_path / folder, [HELLO])
    with pytest.raises(StoreMissingError, match=message) as error:
        batchloom.open_store(tmp_path / name)
    assert name == "a.tx" or f"--out {tmp_path / name}" not in str(error.value)


def test_spans_across_shards(tmp_path):
    documents = [list(range(n, n + 1 + n % 7)) for n in range(200)]
    store = write_store(tmp_path, documents, documents_per_shard=3)
    rng = np.random.default_rng(0)
    chosen = rng.integers(0, 200, 500)
    sizes = np.array([len(documents[d]) for d in chosen])
    starts = rng.integers(0, sizes)
    lengths = rng.integers(1, sizes - starts + 1)
    expected = [documents[d][s : s + n] for d, s, n in zip(chosen, starts, lengths, strict=True)]
    assert [ids.tolist() for ids in store.read(chosen, starts, lengths)] == expected


def test_a_bounded_number_of_shards_stays_mapped(tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (300, 300))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    documents = [[n % 256] for n in range(120)]
    write_store(tmp_path, documents, documents_per_shard=1)
    store = batchloom.open_store(tmp_path)
    for _ in range(2):
        assert [int(store[n].ids[0]) for n in range(120)] == [n % 256 for n in range(120)]
        assert sum(shard is not None for shard in store.shards.mapped) == 22


def test_a_batch_over_more_shards_than_may_be_open(tmp_path):
    write_store(tmp_path, [[n % 250, 7] for n in range(340)], documents_per_shard=1)
    code = (
        "import resource, numpy as np, batchloom;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300));"
        f"s = batchloom.open_store({str(tmp_path)!r}); n = np.arange(340);"
        "views = s.read(n, n * 0, n * 0 + 2);"
        "print([int(v[0]) for v in views] == [k % 250 for k in range(340)])"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.stdout.strip() == "True", process.stderr


def test_opening_thousands_of_shards_reads_the_manifest_and_maps_nothing(tmp_path):
    shards = 3000
    write_store(tmp_path, [[1]])

    def repeat_shard(manifest):
        subset = manifest["subsets"]["train"]
        shard = subset["shards"][0]
        subset["shards"] = [{**shard, "name": f"shard_{n:05d}"} for n in range(shards)]
        subset["documents"] = subset["tokens"] = shards

    edit_manifest(tmp_path, repeat_shard)
    np.ones(shards, "<u4").tofile(tmp_path / "train" / "lengths.u32")
    before = set(os.listdir("/proc/self/fd"))
    store = batchloom.open_store(tmp_path)
    assert len(store.shards) == len(store) == shards
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 2
    assert store[0].ids.tolist() == [1]


def test_a_store_is_pickled(tmp_path):
    store = write_store(tmp_path, [HELLO])
    unpickled = pickle.loads(pickle.dumps(store))
    assert unpickled[0].ids.tolist() == HELLO
    assert unpickled.fingerprint == store.fingerprint


def test_the_fingerprint_depends_on_content_not_location(tmp_path):
    store = write_store(tmp_path / "a", {"train": [HELLO], "val": [HELLO]})
    assert write_store(tmp_path / "b", [HELLO]).fingerprint == store.fingerprint
    assert write_store(tmp_path / "c", [HELLO[::-1]]).fingerprint != store.fingerprint
    assert batchloom.open_store(tmp_path / "a", split="val").fingerprint != store.fingerprint


INTEGERS = [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16]


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_a_bare_prefix_of_any_origin(tmp_path, dtype, suffix):
    prefix = write_megatron_pair(tmp_path / "my.data_text", [[[1, 2, 3]], [[4], [5, 6]], [], [[7]]], dtype)
    store = batchloom.open_store(f"{prefix}{suffix}")
    assert [store[n].ids.tolist() for n in range(4)] == [[1, 2, 3], [4, 5, 6], [], [7]]
    assert (store.manifest, store.vocab_size, store.subsets, store.end_id) == (None, None, (), 0)
    assert (store.dtype, store.tokens) == (np.dtype(dtype), 7)
    loader = batchloom.Loader(store, seq_len=4, global_batch_size=1, output="numpy", shuffle=False, packing="none")
    assert [batch["input_ids"][0].tolist() for batch in loader] == [
        [1, 2, 3, 0],
        [4, 5, 6, 0],
        [7, 0, 0, 0],
    ]
    with pytest.raises(StoreError, match="does not say which tokenizer"):
        _ = store.tokenizer
    with pytest.raises(StoreError, match="does not say where"):
        store.provenance.of(0)


def test_a_prefix_fingerprint_sees_its_edges_and_size(tmp_path):
    prefix = write_megatron_pair(tmp_path / "p", [[[1, 2, 3]], [[4]]])
    name = batchloom.open_store(prefix).fingerprint
    data = bytearray((tmp_path / "p.bin").read_bytes())
    data[0] ^= 1
    (tmp_path / "p.bin").write_bytes(data)
    assert batchloom.open_store(prefix).fingerprint != name


def test_a_prefix_of_floats_is_refused(tmp_path):
    prefix = write_megatron_pair(tmp_path / "f", [[[1]]], np.float32)
    with pytest.raises(StoreError, match="float32 numbers, but token ids are integers"):
        batchloom.open_store(prefix)


@pytest.mark.parametrize("number", [3, -4, 10**9])
def test_provenance_of_a_missing_document(tmp_path, number):
    store = write_store(tmp_path, [HELLO, HELLO, HELLO])
    assert store.provenance.of(-1) == store.provenance.of(2)
    with pytest.raises(IndexError, match=f"no document {number}: there are 3, numbered from 0"):
        store.provenance.of(number)


def test_too_many_open_files_name_the_limit_to_raise(tmp_path):
    path = write_store(tmp_path, [HELLO] * 100, documents_per_shard=1).path
    code = (
        "import resource, sys, batchloom\n"
        "store = batchloom.open_store(sys.argv[1])\n"
        "import numpy, batchloom.store.read.mapped_shards\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))\n"
        "try:\n"
        "    arrays = [store[number].ids for number in range(len(store))]\n"
        "except batchloom.StoreError as error:\n"
        "    print(error)\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    assert "has too many files open; raise its limit: ulimit -n" in output


def test_a_path_that_is_too_long(tmp_path):
    with pytest.raises(StoreError, match="too long; choose a shorter one"):
        batchloom.open_store(tmp_path / ("x" * 300))


def test_a_file_is_synced_before_it_is_renamed(tmp_path, monkeypatch):
    synced = []

    def fsync(descriptor):
        synced.append((os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size, path.exists()))

    path = tmp_path / "file"
    monkeypatch.setattr(os, "fsync", fsync)
    write_file(path, b"12345")
    assert synced == [(path.stat().st_ino, 5, False)]
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("form", ["rows", "varlen"])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_batches_of_a_prefix_of_any_integers(tmp_path, dtype, form):
    documents = [[n % 100, 7, n % 3] for n in range(40)]
    prefix = write_megatron_pair(tmp_path / "p", [[ids] for ids in documents], dtype)
    loader = batchloom.Loader(batchloom.open_store(prefix), seq_len=10, global_batch_size=2, form=form, output="numpy")
    ids = [batch["input_ids"] for batch in loader]
    assert {array.dtype for array in ids} == {np.dtype(np.int64)}
    token_ids = np.concatenate([array.ravel() for array in ids])
    flat = np.concatenate(documents)
    # Padding holds id 0.
    assert np.bincount(token_ids, minlength=100)[1:].tolist() == np.bincount(flat, minlength=100)[1:].tolist()


def test_a_multimodal_prefix_reads_as_its_ids(tmp_path):
    documents = [[[1, 2], [3]], [[4, 5]]]
    prefix = write_megatron_pair(tmp_path / "p", documents, np.int32, modes=[0, 1, 0])
    assert (tmp_path / "p.idx").stat().st_size == 34 + 12 * 3 + 8 * 3 + 3
    store = batchloom.open_store(prefix)
    assert [store[n].ids.tolist() for n in range(2)] == [[1, 2, 3], [4, 5]]


def test_a_mask_next_to_a_prefix_is_read(tmp_path):
    write_store(tmp_path / "s", [[5, 6, 7], [8, 9]], trained=[[0, 1, 1], [0, 1]])
    store = batchloom.open_store(tmp_path / "s")
    prefix = batchloom.open_store(tmp_path / "s" / "train" / "shard_00000")
    labels = [
        batchloom.Loader(data, seq_len=5, global_batch_size=1, output="numpy")[0]["labels"].tolist()
        for data in (store, prefix)
    ]
    assert labels[0] == labels[1]
    assert (prefix.masked, prefix.contents.trained_tokens) == (True, 3)
    name = prefix.fingerprint
    (tmp_path / "s" / "train" / "shard_00000.mask").unlink()
    assert batchloom.open_store(tmp_path / "s" / "train" / "shard_00000").fingerprint != name


def write_large_pair(prefix, ids):
    """Write a file pair of a long document and one of a single id."""
    np.append(ids, 1).astype("<i2").tofile(f"{prefix}.bin")
    lengths = np.array([len(ids), 1], np.uint32)
    Path(f"{prefix}.idx").write_bytes(encode_index(lengths, np.dtype("<i2")))
    return prefix


def test_check_reads_every_id_of_a_prefix(tmp_path):
    # In the middle of a long document, outside of every sample.
    ids = np.full(3_000_000, 7)
    ids[::2], ids[1_500_000] = 9, -5
    prefix = write_large_pair(tmp_path / "p", ids)
    assert batchloom.check(prefix).faults == [f"{prefix}.bin: holds negative token ids (-5)."]
    ids[1_500_000] = 300
    write_large_pair(tmp_path / "p", ids)
    assert batchloom.check(prefix).facts["ids"] == "1 to 300"
    assert batchloom.check(prefix, vocab_size=301).sound
    assert batchloom.check(prefix, vocab_size=300).faults == [
        f"{prefix}.bin: holds token id 300; the vocabulary has ids 0 to 299."
    ]


def test_trained_tokens_of_a_document(tmp_path):
    documents = [list(b"question answer"), list(b"plain")]
    trained = [[0] * 9 + [1] * 6, [1] * 5]
    store = write_store(tmp_path / "masked", documents, trained=trained)
    assert store[0].mask.tolist() == [flag == 1 for flag in trained[0]]
    assert store[0].trained_text == "answer"
    assert store[1].trained_text == store[1].text == "plain"
    assert store[1].provenance.record == 1
    unmasked = write_store(tmp_path / "unmasked", documents)
    assert unmasked[0].mask.tolist() == [True] * 15


def measure_resident_bytes(path):
    """Return the bytes of a file that mappings of this process hold in memory."""
    resident, is_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            is_file = line.endswith(str(path))
        elif is_file and line.startswith("Rss:"):
            resident += 1024 * int(line.split()[1])
    return resident


def test_batches_of_a_large_prefix_keep_none_of_its_index_in_memory(tmp_path):
    # Above four million documents; a page of the index may have 2 MiB.
    count = (1 << 22) + 100
    lengths = np.ones(count, np.uint32)
    np.arange(count, dtype="<i4").tofile(tmp_path / "p.bin")
    (tmp_path / "p.idx").write_bytes(encode_index(lengths, np.dtype("<i4")))
    store = batchloom.open_store(tmp_path / "p")
    assert measure_resident_bytes(tmp_path / "p.idx") == 0
    loader = batchloom.Loader(store, seq_len=16, global_batch_size=64, output="numpy", steps=10, prefetch=0)
    for step in range(10):
        rows = loader.plan.rows(*loader.plan.positions_of(step))
        assert loader.batch(step)["input_ids"].ravel().tolist() == rows.documents.tolist()
    assert measure_resident_bytes(tmp_path / "p.idx") <= 4 << 20
    # The last block is shorter than the others.
    last = np.arange(count - 3, count)
    blocks, documents = store.reader._index_blocks.locate(last)
    assert [int(block.lengths[n]) for block, n in zip(blocks, documents, strict=True)] == [1, 1, 1]
    assert [block.pointers[n] // 4 for block, n in zip(blocks, documents, strict=True)] == last.tolist()


def test_stores_with_equal_tokenizer_files_share_the_tokenizer(tmp_path):
    for name in "ab":
        write_store(tmp_path / name, [[1, 2, 256]])
    first, second = batchloom.open_store(tmp_path / "a"), batchloom.open_store(tmp_path / "b")
    assert first.tokenizer is second.tokenizer
    # The file of another store is compared with its own manifest.
    path = tmp_path / "b" / "dataset_metadata.json"
    manifest = read_manifest(tmp_path / "b")
    entry = replace(manifest.tokenizer, fingerprint="0" * 32)
    path.write_bytes(encode_manifest(seal_manifest(replace(manifest, tokenizer=entry))))
    with pytest.raises(StoreError, match="it is another tokenizer"):
        _ = batchloom.open_store(tmp_path / "b").tokenizer
