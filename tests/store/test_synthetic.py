"""Synthetic data: arithmetic on its settings, read like any store, and always called what it is."""

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


def ids(store, number):
    return store[number].ids.tolist()


def test_the_bytes_of_every_kind_are_pinned():
    spec = {"documents": 5, "lengths": (6, 30), "seed": 7}
    random, text = (SyntheticDocuments(SyntheticSpec(**spec, kind=kind)) for kind in ("random", "text"))
    every, zeros = np.arange(5), np.zeros(5, np.int64)
    lengths = random.lengths(every)
    assert (lengths.dtype, lengths.tolist()) == (np.uint32, GOLDEN_LENGTHS)
    assert text.lengths(every).tolist() == GOLDEN_LENGTHS
    six = np.full(5, 6)
    assert random.ids(every, zeros, six).reshape(5, 6).tolist() == GOLDEN_RANDOM
    assert text.ids(every, zeros, six).reshape(5, 6).tolist() == GOLDEN_TEXT
    store = batchloom.open_store("dummy:documents=5,lengths=6-30,seed=7")
    assert store.fingerprint == GOLDEN_FINGERPRINT


@given(
    kind=st.sampled_from(["random", "text"]),
    vocab=st.sampled_from([2, 3, 17, 18, 256, 70_000, 2**31 - 1]),
    shortest=st.integers(1, 40),
    more=st.integers(0, 60),
    seed=st.integers(-(2**128) + 1, 2**128 - 1),
    data=st.data(),
)
@settings(max_examples=examples(150))
def test_a_span_is_a_cut_of_its_document(kind, vocab, shortest, more, seed, data):
    lengths = (shortest, shortest + more)
    made = SyntheticDocuments(SyntheticSpec(kind=kind, vocab=vocab, lengths=lengths, seed=seed))
    number = st.integers(0, made.spec.documents - 1)
    documents = np.array(data.draw(st.lists(number, min_size=1, max_size=5)))
    whole = made.lengths(documents).astype(np.int64)
    assert ((whole >= shortest) & (whole <= shortest + more)).all()
    texts = np.split(made.ids(documents, np.zeros_like(whole), whole), np.cumsum(whole)[:-1])
    for text in texts:
        assert text[-1] == made.end_id == vocab - 1
        assert ((text[:-1] >= 0) & (text[:-1] < vocab - 1)).all()
    starts = np.array([data.draw(st.integers(0, int(n) - 1)) for n in whole])
    parts = np.array([data.draw(st.integers(1, int(n - s))) for n, s in zip(whole, starts, strict=True)])
    cut = [t[s : s + n] for t, s, n in zip(texts, starts, parts, strict=True)]
    assert made.ids(documents, starts, parts).tolist() == np.concatenate(cut).tolist()


def test_random_ids_are_uniform_and_text_follows_rules():
    def sample(kind):
        made = SyntheticDocuments(SyntheticSpec(kind=kind, vocab=257, lengths=(1000, 1000)))
        found = made.ids(np.arange(300), np.zeros(300, np.int64), np.full(300, 1000))
        return found.reshape(300, 1000)[:, :-1]

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


def test_seeds_and_settings_make_other_documents():
    names = ["seed=1", "seed=2", "vocab=51", "kind=text", "lengths=4-40", "documents=201"]
    stores = [batchloom.open_store(f"dummy:{name}") for name in names]
    stores.append(batchloom.open_store("distributed_dummy:seed=1"))
    assert len({store.fingerprint for store in stores}) == len(stores)
    assert ids(stores[0], 5) != ids(stores[1], 5)


def test_it_reads_like_any_store():
    store = batchloom.open_store(SMALL)
    assert (len(store), store.vocab_size, store.end_id, store.subsets) == (200, 50, 49, ("train",))
    lengths = store.lengths.slice(0, 200)
    assert store.tokens == store.contents.trained_tokens == lengths.sum()
    assert [len(store[number].ids) for number in range(200)] == lengths.tolist()
    assert store[-1].ids.tolist() == store[199].ids.tolist()
    assert (store.dtype, store.contents.synthetic, store.masked) == (np.dtype("<u2"), True, False)
    assert store[3].text == " ".join(map(str, ids(store, 3)))
    origin = store[3].provenance
    assert (origin.source, origin.record) == (f"{SMALL},kind=random", 3)
    spans = (np.array([3, 4]), np.array([1, 0]), np.array([2, 3]))
    assert [span.tolist() for span in store.read(*spans)] == [ids(store, 3)[1:3], ids(store, 4)[:3]]
    assert [span.tolist() for span in store.mask(*spans)] == [[True] * 2, [True] * 3]
    with pytest.raises(StoreError, match="Document 3 of dummy:.* tokens, and a span of it ends at"):
        store.read(np.array([3]), np.array([0]), np.array([len(store[3].ids) + 1]))
    for name in ("tiny", "val"):
        with pytest.raises(InputError, match=f"no subset '{name}'; it has: train"):
            batchloom.open_store(SMALL, name)
    assert batchloom.inspect(SMALL, seq_len=32).documents == 200
    assert batchloom.open_store("dummy:vocab=70000").dtype == np.dtype("<i4")


@pytest.mark.parametrize(
    ("given", "said"),
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
def test_settings_that_are_none(given, said):
    with pytest.raises(SettingsError, match=said):
        batchloom.open_store(given)


@pytest.mark.parametrize("made", ["synthetic documents", "preferences"])
def test_a_shard_does_not_pass_for_what_its_store_says_it_is_not(tmp_path, monkeypatch, made):
    if made == "preferences":
        rows = ({"prompt": f"q{n}", "chosen": "yes", "rejected": f"no {n}"} for n in range(9))
        given = tmp_path / "in.jsonl"
        given.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    else:
        given = "dummy:documents=9,vocab=257,kind=text"
    tokenizer = {"tokenizer": "bytes"} if made == "preferences" else {}
    store = batchloom.prepare(given, out=tmp_path / "s", val_fraction=0, **tokenizer).path
    prefix = store / "train/shard_00000"
    named = f"is a shard of a store of {made}.*name the store itself: {store}$"
    config = {"block_size": 4, "batch_size": 1, "output": "numpy"}
    doors = [
        batchloom.open_store,
        batchloom.check,
        IndexedDataset,
        lambda prefix: import_tokens(prefix, out=tmp_path / "i", tokenizer="bytes"),
        lambda prefix: import_tokens(prefix.parent, out=tmp_path / "i", tokenizer="bytes"),
    ]
    monkeypatch.chdir(prefix.parent)
    for place in (prefix, prefix.with_suffix(".bin"), Path("shard_00000")):
        for door in doors:
            with pytest.raises(InputError, match=named):
                door(place)
    with pytest.raises(InputError, match=f"{named}|not trained"):
        GPTDataLoader(config, dataset_dir=store / "train")
    assert not (tmp_path / "i").exists()


def test_a_window_of_made_up_documents_is_called_one(tmp_path, caplog):
    store = batchloom.prepare("dummy:documents=9", out=tmp_path / "s", val_fraction=0).path
    config = {"block_size": 4, "batch_size": 1, "output": "numpy"}
    assert GPTDataLoader(config, dataset_dir=store).get_batch("train")[0].shape == (1, 4)
    assert f"source=synthetic: the documents of {store} are generated." in caplog.text


def test_every_problem_is_told_at_once():
    with pytest.raises(SettingsError) as caught:
        parse_synthetic_spec("dummy:vocb=3,kind=txt,documents=0")
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize("name", ["dumy", "Dummy", "dummy2", "distributed-dummy", "x:dummy"])
def test_only_its_names_are_it(name):
    assert parse_synthetic_spec(name) is None
    with pytest.raises(StoreError, match=f"There is no file or folder {name}: "):
        batchloom.open_store(name)


@pytest.mark.parametrize("name", ["dummy", "dummy:vocab=9"])
def test_what_has_no_records_is_not_read(name):
    from batchloom.sources import list_sources

    with pytest.raises(FileNotFoundError, match=f"prepare {name} --out STORE writes a store of it"):
        list_sources([name])


def test_what_lies_here_is_never_taken_for_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dummy").mkdir()
    with pytest.raises(StoreError, match="the folder is empty"):
        batchloom.open_store("dummy")
    real = write_store(tmp_path / "distributed_dummy", [[1, 2, 3]])
    opened = batchloom.open_store("distributed_dummy")
    assert (opened.contents.synthetic, opened.fingerprint) == (False, real.fingerprint)
    assert batchloom.check("distributed_dummy").data == "real"
    assert batchloom.open_store("dummy:").contents.synthetic


def test_check_tells_the_three_apart(tmp_path):
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


def test_noise_is_a_fault_where_nobody_said_so(tmp_path):
    """The ids of a declared store, under a manifest that calls them text."""
    name = "dummy:documents=60,vocab=257,lengths=2000"
    batchloom.prepare(name, out=tmp_path / "s")
    assert verify_store(tmp_path / "s").faults == []
    path = tmp_path / "s/dataset_metadata.json"
    manifest = json.loads(path.read_text())
    manifest["sources"][0]["kind"] = "text"
    del manifest["checksum"]
    path.write_text(json.dumps(manifest))
    verdict = verify_store(tmp_path / "s")
    assert any("uniform noise" in fault for fault in verdict.faults)
    assert verdict.used == "nothing until the faults are fixed"
    bare = verify_prefix(tmp_path / "s/train/shard_00000")
    assert any("uniform noise" in fault for fault in bare.faults)


def test_an_export_says_what_it_loses(tmp_path):
    from batchloom.store import export_store

    with pytest.raises(InputError, match="has no shards to export: write it first"):
        export_store(SMALL, to="megatron", out=tmp_path / "m")
    batchloom.prepare(SMALL, out=tmp_path / "s")
    done = export_store(tmp_path / "s", to="megatron", out=tmp_path / "m")
    assert done.notes[-1].startswith("source=synthetic: these documents are synthetic")
