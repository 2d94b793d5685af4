"""Import of existing token files as stores."""

import gzip
import json
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import batchloom
from batchloom import InputError, OutputError, SettingsError
from batchloom.cli import run_command_line
from batchloom.core.errors import InputMissingError, StoreConflictError
from batchloom.preparation import WorkFolder, import_tokens, resumable_job
from batchloom.testing import write_store
from oracles import read_megatron_documents, write_megatron_pair
from preparation.jobs import run_until_killed
from preparation.stores import hash_store_files
from tiers import examples

DOCUMENTS = [[*f"number {n} of the lot".encode(), 256] for n in range(120)]


def read_documents(folder, split="train"):
    store = batchloom.open_store(folder, split)
    return [store[n].ids.tolist() for n in range(len(store))]


def write_flat_file(path, documents, dtype="<u2"):
    np.concatenate([np.array(ids, np.int64) for ids in documents]).astype(dtype).tofile(path)
    return path


@pytest.fixture
def prefix(tmp_path):
    return write_megatron_pair(tmp_path / "their.data_text", [[ids] for ids in DOCUMENTS])


def test_a_prefix_becomes_a_store_that_shares_its_bytes(tmp_path, prefix):
    result = import_tokens(prefix, out=tmp_path / "s", tokenizer="bytes")
    assert (result.counts.documents, result.tokenizer, result.notes) == (120, "bytes", ())
    assert os.path.samefile(tmp_path / "s/train/shard_00000.bin", f"{prefix}.bin")
    assert batchloom.check(tmp_path / "s").faults == []
    assert read_documents(tmp_path / "s") == DOCUMENTS == read_megatron_documents(tmp_path / "s/train/shard_00000")
    store = batchloom.open_store(tmp_path / "s")
    provenance = store.provenance.of(7)
    assert (provenance.source, provenance.record, provenance.line) == (str(prefix)[1:].rsplit("/")[-1], 7, None)
    assert provenance.offset == 2 * sum(map(len, DOCUMENTS[:7]))
    assert store[7].text == "number 7 of the lot<|endoftext|>"
    assert store.manifest.sources[0].end == "present"
    assert store.manifest.tokenizer.engine == result.engine == "imported"
    assert str(tmp_path) not in (tmp_path / "s/dataset_metadata.json").read_text()
    names = {path.name for path in (tmp_path / "s").iterdir()}
    assert names == {"dataset_metadata.json", "report.json", "tokenizer_state.json", "train"}


def write_llmc_file(path, documents, version, count=None):
    magic, dtype = {1: (20240520, "<u2"), 7: (20240801, "<u4")}.get(version, (20240520, "<u2"))
    ids = np.concatenate(documents)
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + ids.astype(dtype).tobytes())
    return path


@pytest.mark.parametrize("version", [1, 7])
def test_a_file_of_llm_c_has_its_dtype_and_documents_that_begin_with_the_end_token(tmp_path, version):
    """Every vocabulary size: the header would be ids of a large one."""
    size = {1: 50_257, 7: 128_256}[version]
    documents = [[256, *f"number {n}".encode()] for n in range(50)]
    path = write_llmc_file(tmp_path / "train.bin", documents, version)
    result = import_tokens(path, out=tmp_path / "s", vocab_size=size, eod=256, how="copy")
    assert read_documents(tmp_path / "s") == documents
    assert "train.bin has the header of llm.c: its documents begin with the end token." in result.notes
    with pytest.raises(InputError, match="its ids begin after a header. Give --copy"):
        import_tokens(path, out=tmp_path / "t", vocab_size=size, eod=256)
    with pytest.raises(InputError, match="--dtype is int64, and .* declares"):
        import_tokens(path, out=tmp_path / "t", vocab_size=size, eod=256, how="copy", dtype="int64")


@pytest.mark.parametrize(
    ("version", "count", "sentence"),
    [(1, 10, "instead of 1,044: it is damaged"), (3, None, "has version 3 of llm.c's header; known are 1")],
)
def test_damaged_files_of_llm_c(tmp_path, version, count, sentence):
    path = write_llmc_file(tmp_path / "a.bin", [[256, 1, 2]], version, count)
    with pytest.raises(InputError, match=sentence):
        import_tokens(path, out=tmp_path / "s", vocab_size=300, eod=256, how="copy")


@pytest.mark.parametrize("form", ["flat", "npy", "llm.c", "llm.c cut"])
def test_the_command_that_doctor_gives_imports_a_file(tmp_path, monkeypatch, form):
    monkeypatch.chdir(tmp_path)
    # The documents of llm.c begin with the end token.
    documents = [ids[-1:] + ids[:-1] for ids in DOCUMENTS] if form.startswith("llm.c") else DOCUMENTS
    match form:
        case "flat":
            write_flat_file("a.bin", documents)
        case "npy":
            with Path("a.bin").open("wb") as file:
                np.save(file, np.concatenate(documents).astype("<u2"))
        case _:
            write_llmc_file(Path("a.bin"), documents, 1)
    if form == "llm.c cut":
        os.truncate("a.bin", 700)
        [facts] = batchloom.doctor("a.bin").prepared
        assert facts.faults == ("a.bin ends inside its header of llm.c: it is damaged.",)
        return
    [command] = batchloom.doctor("a.bin").commands
    command = command.replace("DTYPE", "uint16").replace("TOKENIZER", "bytes")
    assert run_command_line(command.split()[1:]) == 0
    assert read_documents("a.bin-store") == documents


# Two documents have no end token, and one holds it inside.
CUT_DOCUMENTS = [[1, 2, 9], [3, 4], [5, 9, 6, 9], [7], [8, 9]]


def write_datatrove_index(path):
    np.cumsum([len(ids) for ids in CUT_DOCUMENTS]).astype("<u8").tofile(f"{path}.index")


def write_dolma_table(path):
    ends = np.cumsum([len(ids) for ids in CUT_DOCUMENTS]).tolist()
    rows = [f"{a},{b},id-{b},part.gz,{b}" for a, b in zip([0, *ends], ends, strict=False)]
    path.with_suffix(".csv.gz").write_bytes(gzip.compress("\n".join(rows).encode()))


@pytest.mark.parametrize(
    ("name", "write_index"), [("part.ds", write_datatrove_index), ("part-0.npy", write_dolma_table)]
)
def test_the_documents_are_those_of_the_list_beside_the_ids(tmp_path, name, write_index):
    path = write_flat_file(tmp_path / name, CUT_DOCUMENTS)
    write_index(path)
    result = import_tokens(path, out=tmp_path / "s", vocab_size=10, eod=9, dtype="uint16")
    assert read_documents(tmp_path / "s") == CUT_DOCUMENTS
    assert (
        f"gives the ends of the 5 documents of {name}; 2 do not end with 9, and 1 more of it are inside documents."
        in result.notes[0]
    )
    with pytest.raises(InputError, match="lists the ends of the documents: leave --document-tokens out"):
        import_tokens(path, out=tmp_path / "t", vocab_size=10, document_tokens=2, dtype="uint16")
    with pytest.raises(InputError, match="lists documents up to token 12, and .* has 6: give the --dtype"):
        import_tokens(path, out=tmp_path / "t", vocab_size=10, eod=9, dtype="uint32")


def test_lists_of_documents_that_cannot_be_followed(tmp_path):
    path = write_flat_file(tmp_path / "part.ds", CUT_DOCUMENTS)
    write_datatrove_index(path)
    (tmp_path / "part.ds.loss").write_bytes(bytes(12))
    with pytest.raises(InputError, match="part.ds.loss marks the trained tokens and cannot be read"):
        import_tokens(path, out=tmp_path / "s", vocab_size=10, eod=9, dtype="uint16")
    other = write_flat_file(tmp_path / "b.npy", CUT_DOCUMENTS)
    for text, sentence in (("0,3\n4,12\n", "do not follow each other"), ("a,b\n", "does not list the start")):
        (tmp_path / "b.csv.gz").write_bytes(gzip.compress(text.encode()))
        with pytest.raises(InputError, match=sentence):
            import_tokens(other, out=tmp_path / "s", vocab_size=10, eod=9, dtype="uint16")


def test_a_memory_map_named_npy_is_a_flat_file(tmp_path):
    """As dolma and OLMo write it."""
    path = write_flat_file(tmp_path / "ids.npy", DOCUMENTS)
    import_tokens(path, out=tmp_path / "s", tokenizer="bytes", dtype="uint16")
    assert read_documents(tmp_path / "s") == DOCUMENTS
    with pytest.raises(InputError, match="does not declare the dtype of its ids: give --dtype"):
        import_tokens(path, out=tmp_path / "t", tokenizer="bytes")


def test_the_same_command_again(tmp_path, prefix):
    import_tokens(prefix, out=tmp_path / "s", tokenizer="bytes")
    before = hash_store_files(tmp_path / "s")
    result = import_tokens(f"{prefix}.idx", out=tmp_path / "t", tokenizer="bytes")
    assert not result.already_done
    assert import_tokens(prefix, out=tmp_path / "s", tokenizer="bytes").already_done
    with pytest.raises(StoreConflictError, match="vocab_size: None -> 300"):
        import_tokens(prefix, out=tmp_path / "s", vocab_size=300)
    os.utime(f"{prefix}.bin", ns=(1, 1))
    with pytest.raises(StoreConflictError, match="other files, or files that were written again"):
        import_tokens(prefix, out=tmp_path / "s", tokenizer="bytes")
    with pytest.raises(StoreConflictError, match="finished store of another job"):
        batchloom.prepare(__file__, out=tmp_path / "s", tokenizer="bytes")
    assert hash_store_files(tmp_path / "s") == before


def test_killed_at_any_rename_an_import_starts_over_or_is_only_moved(tmp_path, prefix):
    options = {"tokenizer": "bytes", "how": "copy", "val_fraction": 0.2}
    import_tokens(prefix, out=tmp_path / "whole", **options)
    expected = hash_store_files(tmp_path / "whole")
    count, killed = -1, True
    while killed:
        count += 4
        out = tmp_path / f"out{count}"
        run = partial(import_tokens, prefix, out=out, **options)
        killed = run_until_killed({"os.rename", "os.remove"}, count, run)
        run()
        assert hash_store_files(out) == expected
        assert not (out / ".work").exists()
    assert count > 20


def test_an_import_that_another_run_has_just_finished_is_not_repeated(tmp_path, prefix, monkeypatch):
    out, folders = tmp_path / "s", []

    def make_work_folder(path):
        if not folders:
            folders.append(path)
            import_tokens(prefix, out=path, tokenizer="bytes")
        return WorkFolder(path)

    monkeypatch.setattr(resumable_job, "WorkFolder", make_work_folder)
    assert import_tokens(prefix, out=out, tokenizer="bytes").already_done
    assert not (out / ".work").exists()


def test_without_a_tokenizer_ids_are_shown_as_numbers(tmp_path, prefix):
    result = import_tokens(prefix, out=tmp_path / "s", vocab_size=300)
    store = batchloom.open_store(tmp_path / "s")
    assert (result.tokenizer, store.vocab_size, store.end_id) == ("none", 300, 256)
    assert batchloom.check(tmp_path / "s").sound
    assert batchloom.inspect(tmp_path / "s").first[0].startswith("110 117 109")
    with pytest.raises(batchloom.TokenizerError, match="imported without a tokenizer"):
        store.tokenizer.encode_batch(["text"])
    batch = next(iter(batchloom.Loader(store, seq_len=64, global_batch_size=2, output="numpy")))
    assert (batch["labels"] != -100).any()


def test_a_missing_common_end_token_is_reported(tmp_path):
    prefix = write_megatron_pair(tmp_path / "p", [[[1, 2]], [[3]]])
    result = import_tokens(prefix, out=tmp_path / "s", vocab_size=9)
    assert "id 0 is recorded as the end token" in result.notes[0]
    assert batchloom.open_store(tmp_path / "s").manifest.sources[0].end == "absent"
    assert import_tokens(prefix, out=tmp_path / "t", vocab_size=9, eod=8).notes == ()
    assert batchloom.open_store(tmp_path / "t").end_id == 8
    result = import_tokens(prefix, out=tmp_path / "u", tokenizer="bytes")
    assert "Not every document of p ends with 'bytes'" in result.notes[0]


def test_documents_of_several_sequences_get_an_index_of_their_own(tmp_path):
    documents = [[[1, 2], [3, 9]], [[4, 9]], [], [[5], [6], [9]]]
    prefix = write_megatron_pair(tmp_path / "p", documents, np.int32, modes=[0, 1, 0, 0, 0, 0])
    import_tokens(prefix, out=tmp_path / "s", vocab_size=10)
    assert read_documents(tmp_path / "s") == [[1, 2, 3, 9], [4, 9], [], [5, 6, 9]]
    assert batchloom.check(tmp_path / "s").faults == []


@pytest.mark.parametrize(
    ("dtype", "on_disk"), [("<u2", "uint16"), ("<i2", "uint16"), ("<u4", "int32"), ("<i4", "int32")]
)
def test_a_flat_file_is_linked(tmp_path, dtype, on_disk):
    path = write_flat_file(tmp_path / "train.bin", DOCUMENTS, dtype)
    import_tokens(path, out=tmp_path / "s", dtype=np.dtype(dtype).name, tokenizer="bytes", val=())
    assert os.path.samefile(tmp_path / "s/train/shard_00000.bin", path)
    assert read_documents(tmp_path / "s") == DOCUMENTS
    assert batchloom.open_store(tmp_path / "s").dtype.name == on_disk
    assert batchloom.check(tmp_path / "s").faults == []


@pytest.mark.parametrize("dtype", ["u1", "i1", "<i8", "<u8", ">u2", "<u2"])
def test_a_npy_file_is_copied(tmp_path, dtype):
    documents = [[5, 6, 7, 1], [1], [8]]
    np.save(tmp_path / "ids.npy", np.concatenate(documents).astype(dtype))
    with pytest.raises(InputError, match="cannot be used as a shard unchanged: its ids begin after a header"):
        import_tokens(tmp_path / "ids.npy", out=tmp_path / "s", vocab_size=99, eod=1)
    assert not (tmp_path / "s").exists()
    import_tokens(tmp_path / "ids.npy", out=tmp_path / "s", vocab_size=99, eod=1, how="copy")
    assert read_documents(tmp_path / "s") == documents
    store = batchloom.open_store(tmp_path / "s")
    assert store.dtype == np.uint16
    header = (tmp_path / "ids.npy").stat().st_size - 6 * np.dtype(dtype).itemsize
    assert store.provenance.of(1).offset == header + 4 * np.dtype(dtype).itemsize


def test_rows_of_a_npy_and_ranges_of_a_flat_file_are_documents(tmp_path):
    np.save(tmp_path / "rows.npy", np.arange(12, dtype=np.uint16).reshape(3, 4))
    import_tokens(tmp_path / "rows.npy", out=tmp_path / "s", vocab_size=99, how="copy")
    assert read_documents(tmp_path / "s") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    np.arange(7, dtype="<i4").tofile(tmp_path / "flat")
    import_tokens(tmp_path / "flat", out=tmp_path / "t", vocab_size=99, dtype="int32", document_tokens=3)
    assert read_documents(tmp_path / "t") == [[0, 1, 2], [3, 4, 5], [6]]


def test_val_by_name_and_by_hash(tmp_path, prefix):
    val_prefix = write_megatron_pair(tmp_path / "other", [[[1, 256]]])
    import_tokens(prefix, out=tmp_path / "s", val=val_prefix, tokenizer="bytes")
    assert (read_documents(tmp_path / "s"), read_documents(tmp_path / "s", "val")) == (DOCUMENTS, [[1, 256]])
    assert batchloom.open_store(tmp_path / "s", "val").provenance.of(0).source == "other"
    import_tokens(
        prefix,
        out=tmp_path / "t",
        tokenizer="bytes",
        how="copy",
        val_fraction=0.2,
        tokens_per_shard=500,
    )
    train, val = read_documents(tmp_path / "t"), read_documents(tmp_path / "t", "val")
    assert sorted(train + val) == sorted(DOCUMENTS)
    assert 5 < len(val) < 50
    assert len(batchloom.open_store(tmp_path / "t").shards) > 3
    assert batchloom.check(tmp_path / "t").faults == []
    two_documents = write_megatron_pair(tmp_path / "two", [[[1, 256]], [[2, 256]]])
    result = import_tokens(two_documents, out=tmp_path / "u", tokenizer="bytes", how="copy", val_fraction=0.001)
    assert len(read_documents(tmp_path / "u")) == 2
    assert "There is no val subset" in result.notes[0]


def test_hashes_know_nothing_of_dtypes(tmp_path):
    hashes = []
    for dtype in (np.uint16, np.int64, np.uint8):
        prefix = write_megatron_pair(tmp_path / dtype.__name__, [[[1, 2, 3]], [[4]]], dtype)
        import_tokens(prefix, out=tmp_path / f"{prefix.name}.s", vocab_size=200, how="copy")
        store = batchloom.open_store(tmp_path / f"{prefix.name}.s")
        hashes.append([store.provenance.of(0).hash, store.provenance.of(1).hash])
    assert hashes[0] == hashes[1] == hashes[2]
    assert hashes[0][0] != hashes[0][1]


@pytest.mark.parametrize("how", ["link", "copy"])
def test_masks_come_along(tmp_path, how):
    documents = [[5, 6, 7], [8, 9], [1]]
    flags = [[0, 1, 1], [0, 1], [1]]
    write_store(tmp_path / "a", documents, trained=flags)
    import_tokens(tmp_path / "a/train/shard_00000", out=tmp_path / "s", vocab_size=99, eod=1, how=how)
    store = batchloom.open_store(tmp_path / "s")
    numbers = np.arange(3)
    masks = store.mask(numbers, numbers * 0, np.array([3, 2, 1]))
    assert [flags_of_document.tolist() for flags_of_document in masks] == [
        list(map(bool, flags_of_document)) for flags_of_document in flags
    ]
    assert (store.contents.trained_tokens, batchloom.check(tmp_path / "s").faults) == (4, [])


def test_documents_out_of_order_are_copied_in_the_order_of_the_index(tmp_path):
    prefix = write_megatron_pair(tmp_path / "p", [[[1, 2, 9]], [[3, 9]]])
    data = bytearray((tmp_path / "p.idx").read_bytes())
    data[34:42] = np.array([2, 3], "<i4").tobytes()
    data[42:58] = np.array([6, 0], "<i8").tobytes()
    (tmp_path / "p.idx").write_bytes(data)
    with pytest.raises(InputError, match="another order than its index lists them. Give --copy"):
        import_tokens(prefix, out=tmp_path / "s", vocab_size=10)
    import_tokens(prefix, out=tmp_path / "s", vocab_size=10, how="copy")
    assert read_documents(tmp_path / "s") == [[3, 9], [1, 2, 9]]
    assert batchloom.open_store(tmp_path / "s").provenance.of(0).offset == 6


REFUSALS = {
    "beyond": ({"vocab_size": 200}, "document 0: holds id 256; a vocabulary of that size has ids 0 to 199"),
    "another tokenizer": ({"vocab_size": 100_277}, "uint16 ids, which end at 65,535; a vocabulary of that size has 100,277"),
    "dtype of a prefix": ({"vocab_size": 300, "dtype": "int32"}, "--dtype is int32, and .*bin declares uint16"),
    "pieces of a prefix": ({"vocab_size": 300, "document_tokens": 5}, "idx defines where documents end"),
    "learned": ({"tokenizer": "train:512"}, "the inputs hold ids"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.parametrize("how", ["link", "copy"])
def test_refusals_leave_nothing_behind(tmp_path, prefix, name, how):
    options, sentence = REFUSALS[name]
    with pytest.raises((InputError, batchloom.TokenizerError), match=sentence):
        import_tokens(prefix, out=tmp_path / "s", how=how, **options)
    assert not (tmp_path / "s").exists()


def test_negative_ids_are_named_by_document(tmp_path):
    prefix = write_megatron_pair(tmp_path / "p", [[[1, 2]], [[3], [4, -7]]], np.int32)
    with pytest.raises(InputError, match="document 1: holds id -7; "):
        import_tokens(prefix, out=tmp_path / "s", vocab_size=10)


FLAT_REFUSALS = {
    "no dtype": ({"eod": 256}, "does not declare the dtype of its ids: give --dtype"),
    "cut short": ({"dtype": "uint32", "eod": 256}, "has 13 bytes, which is not a multiple of the 4 bytes of uint32"),
    "no end": ({"dtype": "uint8"}, "does not define where documents end: give --eod ID"),
    "no such end": ({"dtype": "uint8", "eod": 77}, "does not contain id 77, which should end documents"),
    "int64": ({"dtype": "uint8", "eod": 5}, "its ids are uint8, and a store holds uint16 or int32. Give --copy"),
}  # fmt: skip


@pytest.mark.parametrize("name", FLAT_REFUSALS)
def test_flat_files_that_leave_something_open(tmp_path, name):
    options, sentence = FLAT_REFUSALS[name]
    (tmp_path / "f.bin").write_bytes(bytes(range(13)))
    vocabulary = 200 if options.get("dtype") == "uint8" else 300
    with pytest.raises(InputError, match=sentence):
        import_tokens(tmp_path / "f.bin", out=tmp_path / "s", vocab_size=vocabulary, **options)


def test_a_truncated_npy_file_is_named_with_its_sizes(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, np.zeros(100, np.uint16))
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(InputError, match="has 318 bytes instead of 328: it is damaged"):
        import_tokens(path, out=tmp_path / "s", vocab_size=10, eod=0, how="copy")


@pytest.mark.parametrize(
    ("array", "sentence"),
    [
        (np.zeros(3), "holds <f8 numbers"),
        (np.zeros((2, 2, 2), int), "shape \\(2, 2, 2\\)"),
        (np.zeros((4, 3), int).T, "in C order"),
        (np.zeros(0, int), "is empty"),
        (np.array([{}]), r"holds \|O numbers"),
        (None, "not a .npy file, or is damaged"),
    ],
)
def test_npy_files_that_hold_no_ids(tmp_path, array, sentence):
    if array is None:
        (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00 and then nothing")
    else:
        np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(InputError, match=sentence):
        import_tokens(tmp_path / "a.npy", out=tmp_path / "s", vocab_size=10, eod=0, how="copy")


def test_inputs_that_are_none(tmp_path, prefix):
    cases = [
        ([tmp_path / "no"], InputMissingError, "There is no file or folder "),
        ([tmp_path / "empty"], InputMissingError, "0 bytes"),
        ([tmp_path / "folder"], InputMissingError, "holds no Megatron prefix"),
        ([tmp_path / "store"], InputError, "is already a store"),
        ([prefix, f"{prefix}.bin"], InputError, "are the same file"),
    ]
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    write_store(tmp_path / "store", [[1]])
    for inputs, error_type, sentence in cases:
        with pytest.raises(error_type, match=sentence):
            import_tokens(inputs, out=tmp_path / "s", vocab_size=300)


def test_several_files_and_a_folder_are_shards(tmp_path):
    (tmp_path / "d").mkdir()
    for n in range(3):
        write_megatron_pair(tmp_path / "d" / f"part_{n}", [[ids] for ids in DOCUMENTS[n::3]])
    import_tokens(tmp_path / "d", out=tmp_path / "s", tokenizer="bytes")
    store = batchloom.open_store(tmp_path / "s")
    assert (
        len(store.shards),
        store.provenance.of(119).source,
        store.provenance.of(119).record,
    ) == (
        3,
        "d/part_2",
        39,
    )
    write_megatron_pair(tmp_path / "d" / "part_3", [[[1]]], np.int32)
    with pytest.raises(InputError, match="a store has one dtype: import them separately, or give --copy"):
        import_tokens(tmp_path / "d", out=tmp_path / "t", tokenizer="bytes")
    import_tokens(tmp_path / "d", out=tmp_path / "t", tokenizer="bytes", how="copy")
    assert len(read_documents(tmp_path / "t")) == 121


def test_contradicting_settings_are_reported_together(tmp_path, prefix):
    with pytest.raises(SettingsError) as error:
        import_tokens(prefix, out=tmp_path / "s", eod=5, document_tokens=3, val_fraction=0.1, dtype="uint17")
    sentences = " ".join(error.value.problems)
    for part in ("'uint17' is none of", "give the meaning of the ids", "not both", "give --copy"):
        assert part in sentences


def test_another_file_system(tmp_path, prefix, monkeypatch):
    def refuse(self, target):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    with pytest.raises(OutputError, match="Give an --out next to it, or --copy, or --symlink"):
        import_tokens(prefix, out=tmp_path / "s", tokenizer="bytes")
    import_tokens(prefix, out=tmp_path / "s", tokenizer="bytes", how="symlink")
    assert (tmp_path / "s/train/shard_00000.bin").is_symlink()
    assert read_documents(tmp_path / "s") == DOCUMENTS
    assert batchloom.check(tmp_path / "s").sound


def test_many_batches_give_the_same_store_as_one(tmp_path, prefix, monkeypatch):
    import_tokens(prefix, out=tmp_path / "a", tokenizer="bytes")
    monkeypatch.setattr("batchloom.preparation.imports.token_files._MAX_BATCH_TOKENS", 30)
    monkeypatch.setattr("batchloom.preparation.imports.token_files._MAX_BATCH_DOCUMENTS", 3)
    monkeypatch.setattr("batchloom.preparation.imports.imported_shards._CHUNK_SIZE", 7)
    monkeypatch.setattr("batchloom.preparation.imports.token_files._CHUNK_SIZE", 11)
    monkeypatch.setattr("batchloom.store.format.megatron_index._CHUNK_DOCUMENTS", 5)
    import_tokens(prefix, out=tmp_path / "b", tokenizer="bytes")
    assert hash_store_files(tmp_path / "a") == hash_store_files(tmp_path / "b")
    path = write_flat_file(tmp_path / "f.bin", DOCUMENTS)
    import_tokens(path, out=tmp_path / "c", tokenizer="bytes", dtype="uint16")
    assert read_documents(tmp_path / "c") == DOCUMENTS


def test_an_import_that_was_stopped_begins_anew(tmp_path, prefix):
    def stop(event):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_tokens(prefix, out=tmp_path / "s", tokenizer="bytes", progress=stop)
    assert not (tmp_path / "s").exists()
    (tmp_path / "s/.work/store/train").mkdir(parents=True)
    (tmp_path / "s/.work/store/train/shard_00000.bin").write_bytes(b"half")
    import_tokens(prefix, out=tmp_path / "s", tokenizer="bytes")
    assert read_documents(tmp_path / "s") == DOCUMENTS


def test_the_command(tmp_path, prefix, capsys):
    out = str(tmp_path / "s")
    assert run_command_line(["import", str(prefix), "--out", out, "--vocab_size", "257", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"]["documents"] == 120
    assert run_command_line(["check", out]) == 0
    assert run_command_line(["import", str(prefix), "--out", out]) == 2
    assert "give the meaning of the ids" in capsys.readouterr().err
    assert run_command_line(["import", str(prefix), "--out", out, "--copy", "--symlink", "--vocab-size=9"]) == 2


@settings(max_examples=examples(64), suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(["p.idx", "p.bin", "a.npy"]),
    how=st.sampled_from(["link", "copy"]),
    cut=st.none() | st.integers(0, 200),
    edits=st.lists(st.tuples(st.integers(0, 200), st.binary(min_size=1, max_size=8)), max_size=3),
)
def test_damaged_files_end_in_a_sound_store_or_a_named_error(tmp_path_factory, name, how, cut, edits):
    folder = tmp_path_factory.mktemp("damaged")
    write_megatron_pair(folder / "p", [[[1, 2, 3], [4]], [], [[5, 6]], [[7, 7]]])
    np.save(folder / "a.npy", np.arange(20, dtype=np.int32).reshape(4, 5))
    data = bytearray((folder / name).read_bytes())
    for position, replacement in edits:
        data[position : position + len(replacement)] = replacement
    (folder / name).write_bytes(data if cut is None else data[:cut])
    source, how = (folder / "a.npy", "copy") if name == "a.npy" else (folder / "p", how)
    try:
        import_tokens(source, out=folder / "s", vocab_size=300, how=how)
    except batchloom.BatchloomError:
        assert not (folder / "s").exists()
    else:
        assert batchloom.check(folder / "s").faults == []
