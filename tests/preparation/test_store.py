"""Prepared stores: every text once, in order, with provenance, in its subset."""

import gzip
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import example, given, settings, strategies as st

import batchloom
from batchloom import InputError, open_store
from batchloom.preparation.documents import MoveCandidates, SubsetRule, hash_to_unit_interval
from batchloom.preparation.documents.document_facts import hash_documents
from batchloom.preparation.documents.encode_text import add_control_tokens
from batchloom.preparation.units.unit_rows import ROW
from batchloom.store import read_manifest
from batchloom.store.format import map_index
from batchloom.text import normalize
from preparation.stores import SMALL_LIMITS, hash_store_files, prepare_store, read_documents, read_texts, write_jsonl
from tiers import examples

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@settings(max_examples=examples(25))
@given(
    lines=st.lists(TEXTS, min_size=1, max_size=30),
    second_lines=st.lists(TEXTS, max_size=10),
    unit=st.integers(60, 2000),
    shard=st.integers(1, 300),
    fractions=st.sampled_from([(0, 0), (0.3, 0), (0.3, 0.3), (0.05, 0.9)]),
    plain=st.booleans(),
)
@example(lines=["0"], second_lines=[], unit=60, shard=1, fractions=(0.05, 0.9), plain=False)
def test_every_text_arrives_once_and_in_order(tmp_path_factory, lines, second_lines, unit, shard, fractions, plain):
    folder = tmp_path_factory.mktemp("any")
    write_jsonl(folder / "a.jsonl", [{"id": 1, "text": line} for line in [*lines, "last"]])
    (folder / "b.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps({"text": line}) + "\n" for line in [*second_lines, "x"]).encode())
    )
    val, test = fractions
    out = folder / "store"
    result = prepare_store(
        [folder / "a.jsonl", folder / "b.jsonl.gz"],
        out,
        limits=SMALL_LIMITS,
        unit_bytes=unit,
        tokens_per_shard=shard,
        val_fraction=val,
        test_fraction=test,
        normalize=not plain,
        dedup="none",
    )
    expected = [line if plain else normalize(line) for line in [*lines, "last", *second_lines, "x"]]
    expected_texts = [line for line in expected if line.strip()]
    assert read_texts(out) == expected_texts
    assert result.counts.records == len(expected)
    assert result.counts.documents == len(expected_texts)
    assert result.counts.dropped.get("empty", 0) == len(expected) - len(expected_texts)
    assert result.counts.tokens == sum(len(line.encode()) + 1 for line in expected_texts)
    check_shards(out, shard)
    check_subsets(out, val, test, expected_texts)


def check_shards(out, max_tokens):
    for name, subset in read_manifest(out).subsets.items():
        assert [shard.name for shard in subset.shards] == [f"shard_{i:05d}" for i in range(len(subset.shards))]
        for shard in subset.shards:
            lengths = map_index(out / name / f"{shard.name}.idx").lengths
            assert shard.tokens <= max_tokens or len(lengths) == 1


def check_subsets(out, val, test, expected_texts):
    sides = {}
    for _, text, split in read_documents(out):
        sides.setdefault(text, set()).add(split)
    assert all(len(side) == 1 for side in sides.values())
    subset_names = [name for name, share in (("train", 1), ("val", val), ("test", test)) if share]
    filled = read_manifest(out).subsets.keys()
    assert len(filled) == min(len(subset_names), len(set(expected_texts)))
    assert "train" in filled
    for text, side in sides.items():
        low, high = hash_documents([text])[0].tolist()
        position = hash_to_unit_interval(np.array([high], np.uint64))[0]
        natural = "val" if position < val else "test" if position < val + test else "train"
        subset = read_manifest(out).subset_overrides.get(f"{(high << 64) | low:032x}", natural)
        assert side == {subset}


def test_lines_are_right_across_the_cuts_of_units(tmp_path):
    lines = [
        "",
        *(json.dumps({"text": f"text {i}"}) for i in range(180)),
        "broken",
        "",
        '{"text":"end"}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    out = tmp_path / "store"
    prepare_store(tmp_path / "a.jsonl", out, unit_bytes=97)
    for origin, text, _ in read_documents(out):
        assert json.loads(lines[origin.line - 1])["text"] == text
        assert (tmp_path / "a.jsonl").read_bytes()[origin.offset :].startswith(lines[origin.line - 1].encode())
    assert len(read_manifest(out).sources[0].parts) > 30
    (bad,) = map(json.loads, (out / "quarantine.jsonl").read_text().splitlines())
    assert (bad["source"], bad["line"], bad["column"], bad["snippet"]) == (
        "a.jsonl",
        182,
        1,
        "broken",
    )
    assert bad["reason"].startswith("not valid JSON")


def test_text_code_and_packed_files_together(tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    long_text = "".join(f"Paragraph {i}.\n\n" for i in range(400))
    (corpus / "a.txt").write_text(long_text)
    (corpus / "b.py").write_text(long_text)
    (corpus / "c.txt.gz").write_bytes(gzip.compress(long_text.encode()))
    (corpus / "d.md.zst").write_bytes(zstandard.compress(b"short\r\ntext"))
    out = tmp_path / "store"
    prepare_store(corpus, out, limits=SMALL_LIMITS, unit_bytes=1000, val_fraction=0, dedup="none")
    by_source = {}
    for origin, text, _ in read_documents(out):
        by_source.setdefault(origin.source, []).append(text)
        assert origin.line is None
    assert "".join(by_source["corpus/a.txt"]) == long_text
    assert len(by_source["corpus/a.txt"]) > 10
    assert by_source["corpus/b.py"] == [long_text]
    assert "".join(by_source["corpus/c.txt.gz"]) == long_text
    assert len(by_source["corpus/c.txt.gz"]) > 10
    assert by_source["corpus/d.md.zst"] == ["short\ntext"]


def test_bytes_do_not_depend_on_folders(tmp_path):
    for folder in ("here", "there/deep"):
        (tmp_path / folder).mkdir(parents=True)
        write_jsonl(tmp_path / folder / "a.jsonl", [{"text": f"t{i}"} for i in range(50)])
        prepare_store(tmp_path / folder / "a.jsonl", tmp_path / folder / "store", unit_bytes=100)
    first, second = (
        hash_store_files(tmp_path / "here" / "store"),
        hash_store_files(tmp_path / "there" / "deep" / "store"),
    )
    assert first == second
    manifest = (tmp_path / "here" / "store" / "dataset_metadata.json").read_text()
    assert str(tmp_path) not in manifest
    assert not (tmp_path / "here" / "store" / ".work").exists()


def test_chunks_and_batches_decide_nothing(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": f"text {i} " * (i % 7)} for i in range(200)])
    (tmp_path / "b.txt").write_text("word \n" * 2000)
    for number, chunk in enumerate((7, 100, 100_000)):
        limits = type(SMALL_LIMITS)(whole_text_bytes=2000, document_bytes=300, reach_bytes=500, chunk_bytes=chunk)
        prepare_store([tmp_path / "a.jsonl", tmp_path / "b.txt"], tmp_path / f"s{number}", limits=limits)
    assert hash_store_files(tmp_path / "s0") == hash_store_files(tmp_path / "s1") == hash_store_files(tmp_path / "s2")


def test_membership_stays_when_data_is_added(tmp_path):
    rows = [{"text": f"document {i}"} for i in range(300)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    write_jsonl(tmp_path / "b.jsonl", [*({"text": f"more {i}"} for i in range(300)), *rows])
    prepare_store(tmp_path / "a.jsonl", tmp_path / "one", val_fraction=0.1, test_fraction=0.1)
    prepare_store(
        [tmp_path / "a.jsonl", tmp_path / "b.jsonl"],
        tmp_path / "two",
        val_fraction=0.1,
        test_fraction=0.1,
    )
    sides = {text: split for _, text, split in read_documents(tmp_path / "one")}
    assert set(sides.values()) == {"train", "val", "test"}
    for _, text, split in read_documents(tmp_path / "two"):
        assert sides.setdefault(text, split) == split


def test_shares_are_about_what_was_asked():
    rows = np.zeros(40_000, ROW)
    rows["hash"] = hash_documents([f"text {i}" for i in range(len(rows))])
    codes = SubsetRule(0.1, 0.05).codes(rows)
    shares = np.bincount(codes, minlength=3) / len(codes)
    assert shares == pytest.approx([0.85, 0.1, 0.05], abs=0.006)


@given(st.integers(0, 2**64 - 1))
def test_membership_is_splitmix64_of_the_high_half(high):
    z, mask = high, 2**64 - 1
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    assert hash_to_unit_interval(np.array([high], np.uint64))[0] == (z >> 11) / 2**53


def test_one_document_is_for_training(tmp_path):
    (tmp_path / "a.txt").write_text("alone")
    result = prepare_store(tmp_path / "a.txt", tmp_path / "store", val_fraction=0.5, test_fraction=0.4)
    assert set(result.subsets) == {"train"}


def test_unmet_requests_are_reported(tmp_path):
    (tmp_path / "one.txt").write_text("ab ab abc\n" * 3)
    result = batchloom.prepare(tmp_path / "one.txt", out=tmp_path / "out", tokenizer="train:1000", test_fraction=0.1)
    ids = batchloom.open_store(tmp_path / "out").vocab_size
    notes = "\n".join(result.notes)
    assert f"train:1000 gave {ids} ids: " in notes
    assert "There is no val subset: " in notes
    assert "There is no test subset: " in notes
    assert "--test-fraction 0." in notes


def test_hashes_are_xxh3_of_the_normalised_text(tmp_path):
    (tmp_path / "a.txt").write_bytes("cafe\u0301\r\n".encode())
    prepare_store(tmp_path / "a.txt", tmp_path / "store")
    ((origin, text, _),) = read_documents(tmp_path / "store")
    assert text == "café\n"
    assert origin.hash == xxhash.xxh3_128_hexdigest("café\n".encode())


def test_control_tokens_surround_documents():
    dtype = np.dtype("<u2")
    ids, bounds = np.array([5, 6, 7], np.uint32), np.array([0, 2, 2, 3], np.int64)
    ends = add_control_tokens(ids, bounds, SimpleNamespace(bos_id=None, end_id=1), dtype)
    assert ends.tolist() == [5, 6, 1, 1, 7, 1]
    begins_and_ends = add_control_tokens(ids, bounds, SimpleNamespace(bos_id=0, end_id=1), dtype)
    assert begins_and_ends.tolist() == [0, 5, 6, 1, 0, 1, 0, 7, 1]
    assert begins_and_ends.dtype == dtype


def test_dtypes(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    prepare_store(tmp_path / "a.txt", tmp_path / "store", dtype="int32")
    store = open_store(tmp_path / "store")
    assert store.dtype == np.dtype("<i4")
    assert store[0].ids.tolist() == [*b"hello", 256]


def test_a_store_is_complete_on_its_own(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("hello world " * 300)
    prepare_store(tmp_path / "in", tmp_path / "store", tokenizer="train:300")
    shutil.rmtree(tmp_path / "in")
    shutil.move(tmp_path / "store", tmp_path / "moved")
    assert open_store(tmp_path / "moved")[0].text == "hello world " * 300 + "<|endoftext|>"


def test_an_explicit_uint16_with_a_larger_vocabulary_is_refused(tmp_path):
    words = {f"w{i}": i for i in range(70_000)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "added_tokens": [
            {
                "id": 70_000,
                "content": "<end>",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "a.txt").write_text("w5 w69999")
    settings = {"tokenizer": str(tmp_path / "tokenizer.json"), "end_token": "<end>"}
    with pytest.raises(InputError, match="--dtype uint16 holds ids up to 65,535.* has 70,001 ids; leave --dtype out"):
        prepare_store(tmp_path / "a.txt", tmp_path / "store", dtype="uint16", **settings)
    assert not (tmp_path / "store").exists()
    prepare_store(tmp_path / "a.txt", tmp_path / "store", **settings)
    store = open_store(tmp_path / "store")
    assert store.dtype == np.dtype("<i4")
    assert store[0].ids.tolist() == [5, 69_999, 70_000]


@pytest.mark.parametrize("heaviest", [True, False])
def test_candidates_are_those_of_all_documents_whatever_their_order(heaviest):
    rng = np.random.default_rng(3)
    hashes = rng.integers(0, 2**64, (400, 2), np.uint64, endpoint=False)
    hashes = hashes[rng.integers(0, 400, 3000)]
    lengths = rng.integers(1, 500, 3000).astype(np.uint32)
    all_candidates, few_candidates = MoveCandidates(heaviest=heaviest), MoveCandidates(heaviest=heaviest, most=50)
    all_candidates.add(hashes, lengths)
    for start in range(0, 3000, 100):
        few_candidates.add(hashes[start : start + 100], lengths[start : start + 100])
    groups = all_candidates.groups()
    assert sum(group.tokens for group in groups) == lengths.sum()
    if not heaviest:
        assert few_candidates.groups() == groups[:50]
    assert len(few_candidates.groups()) == 50
