"""Synthetic data: generated documents, read as a store and reported as synthetic."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import batchloom
from batchloom import InputError, SettingsError, StoreError
from batchloom.compat import GPTDataLoader, IndexedDataset
from batchloom.core.synthetic_data import SyntheticDocuments, SyntheticSpec, parse_synthetic_spec
from batchloom.preparation import import_tokens
from batchloom.store import verify_prefix, verify_store
from batchloom.testing import write_store
from store.manifest_edits import edit_manifest
from tiers import examples

GOLDEN_LENGTHS = [25, 26, 20, 9, 11]
GOLDEN_RANDOM = [
    [10516, 3581, 9536, 19001, 16841, 13229],
    [37482, 8307, 17513, 22612, 25685, 22559],
    [19636, 11388, 13897, 37916, 45225, 18478],
    [43364, 34323, 48490, 17847, 8817, 25893],
    [731, 24703, 32171, 2998, 25929, 18705],
]
GOLDEN_TEXT = [
    [7, 1, 2, 3, 4, 5],
    [4040, 4041, 4042, 4043, 4044, 4045],
    [69, 70, 71, 72, 73, 74],
    [10318, 10319, 10320, 10321, 10322, 278],
    [0, 1, 2, 3, 4, 5],
]
GOLDEN_FINGERPRINT = "0ebe427d9d829f7d1afc8ba0d43db7f7"
SMALL = "dummy:documents=200,vocab=50,lengths=3-40,seed=1"


def read_ids(store, number):
    return store[number].ids.tolist()


def test_golden_bytes_of_every_kind():
    spec = {"documents": 5, "lengths": (6, 30), "seed": 7}
    random, text = (SyntheticDocuments(SyntheticSpec(**spec, kind=kind)) for kind in ("random", "text"))
    numbers, zeros = np.arange(5), np.zeros(5, np.int64)
    lengths = random.lengths(numbers)
    assert (lengths.dtype, lengths.tolist()) == (np.uint32, GOLDEN_LENGTHS)
    assert text.lengths(numbers).tolist() == GOLDEN_LENGTHS
    lengths_of_six = np.full(5, 6)
    assert random.ids(numbers, zeros, lengths_of_six).reshape(5, 6).tolist() == GOLDEN_RANDOM
    assert text.ids(numbers, zeros, lengths_of_six).reshape(5, 6).tolist() == GOLDEN_TEXT
    store = batchloom.open_store("dummy:documents=5,lengths=6-30,seed=7")
    assert store.fingerprint == GOLDEN_FINGERPRINT


@given(
    kind=st.sampled_from(["random", "text"]),
    vocab=st.sampled_from([2, 3, 17, 18, 256, 70_000, 2**31 - 1]),
    shortest=st.integers(1, 40),
    spread=st.integers(0, 60),
    seed=st.integers(-(2**128) + 1, 2**128 - 1),
    data=st.data(),
)
@settings(max_examples=examples(150))
def test_a_span_is_a_slice_of_its_document(kind, vocab, shortest, spread, seed, data):
    lengths = (shortest, shortest + spread)
    documents = SyntheticDocuments(SyntheticSpec(kind=kind, vocab=vocab, lengths=lengths, seed=seed))
    number = st.integers(0, documents.spec.documents - 1)
    numbers = np.array(data.draw(st.lists(number, min_size=1, max_size=5)))
    full_lengths = documents.lengths(numbers).astype(np.int64)
    assert ((full_lengths >= shortest) & (full_lengths <= shortest + spread)).all()
    texts = np.split(documents.ids(numbers, np.zeros_like(full_lengths), full_lengths), np.cumsum(full_lengths)[:-1])
    for text in texts:
        assert text[-1] == documents.end_id == vocab - 1
        assert ((text[:-1] >= 0) & (text[:-1] < vocab - 1)).all()
    starts = np.array([data.draw(st.integers(0, int(n) - 1)) for n in full_lengths])
    span_lengths = np.array([data.draw(st.integers(1, int(n - s))) for n, s in zip(full_lengths, starts, strict=True)])
    expected = [t[s : s + n] for t, s, n in zip(texts, starts, span_lengths, strict=True)]
    assert documents.ids(numbers, starts, span_lengths).tolist() == np.concatenate(expected).tolist()


def test_random_ids_are_uniform_and_text_follows_rules():
    def sample(kind):
        documents = SyntheticDocuments(SyntheticSpec(kind=kind, vocab=257, lengths=(1000, 1000)))
        sampled_ids = documents.ids(np.arange(300), np.zeros(300, np.int64), np.full(300, 1000))
        return sampled_ids.reshape(300, 1000)[:, :-1]

    random, text = sample("random"), sample("text")
    counts = np.bincount(random.ravel(), minlength=256)
    expected = random.size / 256
    # A chi-square of 255 degrees of freedom: its mean is 255, its deviation 23.
    assert 255 - 115 < ((counts - expected) ** 2 / expected).sum() < 255 + 115
    follows = text[:, 1:] == (text[:, :-1] + 1) % 256
    assert 0.8 < follows.mean() < 0.85
    assert (random[:, 1:] == (random[:, :-1] + 1) % 256).mean() < 0.01
    shares = np.bincount(text.ravel(), minlength=256) / text.size
    assert shares[:16].sum() > 3 * shares[128:144].sum()


def test_seeds_and_settings_change_the_documents():
    names = ["seed=1", "seed=2", "vocab=51", "kind=text", "lengths=4-40", "documents=201"]
    stores = [batchloom.open_store(f"dummy:{name}") for name in names]
    stores.append(batchloom.open_store("distributed_dummy:seed=1"))
    assert len({store.fingerprint for store in stores}) == len(stores)
    assert read_ids(stores[0], 5) != read_ids(stores[1], 5)


def test_synthetic_data_reads_like_a_store():
    store = batchloom.open_store(SMALL)
    assert (len(store), store.vocab_size, store.end_id, store.subsets) == (200, 50, 49, ("train",))
    lengths = store.lengths.slice(0, 200)
    assert store.tokens == store.contents.trained_tokens == lengths.sum()
    assert [len(store[number].ids) for number in range(200)] == lengths.tolist()
    assert store[-1].ids.tolist() == store[199].ids.tolist()
    assert (store.dtype, store.contents.synthetic, store.masked) == (np.dtype("<u2"), True, False)
    assert store[3].text == " ".join(map(str, read_ids(store, 3)))
    provenance = store[3].provenance
    assert (provenance.source, provenance.record) == (f"{SMALL},kind=random", 3)
    spans = (np.array([3, 4]), np.array([1, 0]), np.array([2, 3]))
    assert [span.tolist() for span in store.read(*spans)] == [read_ids(store, 3)[1:3], read_ids(store, 4)[:3]]
    assert [span.tolist() for span in store.mask(*spans)] == [[True] * 2, [True] * 3]
    with pytest.raises(StoreError, match="Document 3 of dummy:.* tokens, and a span of it ends at"):
        store.read(np.array([3]), np.array([0]), np.array([len(store[3].ids) + 1]))
    for name in ("tiny", "val"):
        with pytest.raises(InputError, match=f"no subset '{name}'; it has: train"):
            batchloom.open_store(SMALL, name)
    assert batchloom.inspect(SMALL, seq_len=32).documents == 200
    assert batchloom.open_store("dummy:vocab=70000").dtype == np.dtype("<i4")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dummy:docments=3", "'docments=3' is not a setting; .*; did you mean 'documents'?"),
        ("dummy:vocab", "dummy: 'vocab' is not a setting; write NAME=VALUE"),
        ("dummy:vocab=1", r"dummy.vocab: 1 is not a whole number from 2 to 2147483647"),
        ("dummy:vocab=abc", "dummy.vocab: 'abc' is not a whole number"),
        ("dummy:seed=1,seed=2", "dummy: seed is given twice"),
        ("dummy:lengths=9-3", r"dummy.lengths: \(9, 3\) is not a shortest and a longest"),
        ("dummy:lengths=0", r"dummy.lengths: \(0, 0\)"),
        ("dummy:lengths=-", "dummy.lengths: '-'"),
        ("dummy:lengths=1-99999999", "two whole numbers from 1 to 16777216"),
        ("distributed_dummy:kind=txt", "kind: 'txt' is not one of random, text; did you mean 'text'"),
        ("dummy:documents=" + "9" * 200, "dummy.documents: a number of"),
    ],
)
def test_invalid_settings(spec, message):
    with pytest.raises(SettingsError, match=message):
        batchloom.open_store(spec)


@pytest.mark.parametrize("kind", ["synthetic documents", "preference pairs"])
def test_a_shard_of_a_special_store_is_refused(tmp_path, monkeypatch, kind):
    if kind == "preference pairs":
        rows = ({"prompt": f"q{n}", "chosen": "yes", "rejected": f"no {n}"} for n in range(9))
        source = tmp_path / "in.jsonl"
        source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    else:
        source = "dummy:documents=9,vocab=257,kind=text"
    tokenizer = {"tokenizer": "bytes"} if kind == "preference pairs" else {}
    store = batchloom.prepare(source, out=tmp_path / "s", val_fraction=0, **tokenizer).path
    prefix = store / "train/shard_00000"
    message = f"is a shard of a store of {kind}.*name the store itself: {store}$"
    config = {"block_size": 4, "batch_size": 1, "output": "numpy"}
    openers = [
        batchloom.open_store,
        batchloom.check,
        IndexedDataset,
        lambda prefix: import_tokens(prefix, out=tmp_path / "i", tokenizer="bytes"),
        lambda prefix: import_tokens(prefix.parent, out=tmp_path / "i", tokenizer="bytes"),
    ]
    monkeypatch.chdir(prefix.parent)
    for path in (prefix, prefix.with_suffix(".bin"), Path("shard_00000")):
        for open_prefix in openers:
            with pytest.raises(InputError, match=message):
                open_prefix(path)
    with pytest.raises(InputError, match=f"{message}|not trained"):
        GPTDataLoader(config, dataset_dir=store / "train")
    assert not (tmp_path / "i").exists()


def test_a_loader_of_generated_documents_reports_them(tmp_path, caplog):
    store = batchloom.prepare("dummy:documents=9", out=tmp_path / "s", val_fraction=0).path
    config = {"block_size": 4, "batch_size": 1, "output": "numpy"}
    assert GPTDataLoader(config, dataset_dir=store).get_batch("train")[0].shape == (1, 4)
    assert f"source=synthetic: the documents of {store} are generated." in caplog.text


def test_all_problems_are_reported_together():
    with pytest.raises(SettingsError) as caught:
        parse_synthetic_spec("dummy:vocb=3,kind=txt,documents=0")
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize("name", ["dumy", "Dummy", "dummy2", "distributed-dummy", "x:dummy"])
def test_similar_names_are_not_synthetic_data(name):
    assert parse_synthetic_spec(name) is None
    with pytest.raises(StoreError, match=f"There is no file or folder {name}: "):
        batchloom.open_store(name)


@pytest.mark.parametrize("name", ["dummy", "dummy:vocab=9"])
def test_synthetic_data_is_not_listed_as_a_source(name):
    from batchloom.sources import list_sources

    with pytest.raises(FileNotFoundError, match=f"prepare {name} --out STORE writes a store of it"):
        list_sources([name])


def test_local_files_take_precedence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dummy").mkdir()
    with pytest.raises(StoreError, match="the folder is empty"):
        batchloom.open_store("dummy")
    real = write_store(tmp_path / "distributed_dummy", [[1, 2, 3]])
    opened = batchloom.open_store("distributed_dummy")
    assert (opened.contents.synthetic, opened.fingerprint) == (False, real.fingerprint)
    assert batchloom.check("distributed_dummy").data == "real"
    assert batchloom.open_store("dummy:").contents.synthetic


def test_check_distinguishes_kinds_of_data(tmp_path):
    verdict = batchloom.check(SMALL)
    assert (verdict.data, verdict.kind, verdict.sound) == ("synthetic", "synthetic", True)
    assert "batchloom train --data dummy:documents=200" in verdict.used
    real = batchloom.check(write_store(tmp_path / "s", [[1, 2, 256], [3, 256]]).path)
    assert (real.data, real.sound) == ("real", True)
    assert real.used.endswith("reads the 2 documents of subset train")
    prefix = batchloom.check(tmp_path / "s/train/shard_00000")
    assert (prefix.data, prefix.kind) == ("real", "prefix")
    assert "reads its 2 documents" in prefix.used
    (tmp_path / "a.jsonl").write_text('{"text": "words"}\n')
    raw = batchloom.check(tmp_path / "a.jsonl")
    assert (raw.data, raw.kind) == ("real", "file")
    assert raw.used.endswith("--out STORE reads 1 document of it")
    with pytest.raises(FileNotFoundError, match="There is no file or folder .*nowhere"):
        batchloom.check(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="did you mean 'dummy'"):
        batchloom.check("dumy")


def test_undeclared_noise_is_a_fault(tmp_path):
    """Synthetic ids under a manifest that declares them as text are a fault."""
    name = "dummy:documents=60,vocab=257,lengths=2000"
    batchloom.prepare(name, out=tmp_path / "s")
    assert verify_store(tmp_path / "s").faults == []
    edit_manifest(tmp_path / "s", lambda manifest: manifest["sources"][0].update(kind="text"))
    verdict = verify_store(tmp_path / "s")
    assert any("uniform noise" in fault for fault in verdict.faults)
    assert verdict.used == "nothing until the faults are fixed"
    bare = verify_prefix(tmp_path / "s/train/shard_00000")
    assert any("uniform noise" in fault for fault in bare.faults)


def test_an_export_reports_lost_information(tmp_path):
    from batchloom.store import export_store

    with pytest.raises(InputError, match="has no shards to export: write it first"):
        export_store(SMALL, to="megatron", out=tmp_path / "m")
    batchloom.prepare(SMALL, out=tmp_path / "s")
    report = export_store(tmp_path / "s", to="megatron", out=tmp_path / "m")
    assert report.notes[-1].startswith("source=synthetic: these documents are synthetic")
