"""Inputs whose documents are one subset: ``--val-from SPLIT``, and ``subset`` in manifests and recipes."""

import shutil
import tarfile

import pytest
import yaml

import batchloom
from batchloom.core.errors import InputError, InputMissingError, SettingsError
from batchloom.preparation import prepare_mixture
from batchloom.store import read_manifest
from golden.interface import run_command
from preparation.stores import hash_store_files, read_documents, write_jsonl

OPTIONS = {"tokenizer": "bytes", "dedup": "none"}


@pytest.fixture
def folder(tmp_path):
    """A data set of 200 rows for training, and 20 held out, of which one is trained, too."""
    folder = tmp_path / "set"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", [{"text": f"train {n}"} for n in range(200)])
    write_jsonl(folder / "validation.jsonl", [{"text": f"held out {n}"} for n in range(19)] + [{"text": "train 7"}])
    write_jsonl(folder / "test.jsonl", [{"text": "never read"}])
    return folder


def read_subsets(store):
    """Return the texts of each subset, in input order."""
    texts = {}
    for _, text, subset in read_documents(store):
        texts.setdefault(subset, []).append(text)
    return texts


def test_a_split_becomes_the_val_subset(folder, tmp_path):
    result = batchloom.prepare(folder, out=tmp_path / "out", val_from="validation", **OPTIONS)
    subsets = read_subsets(result.path)
    assert subsets["train"] == [f"train {n}" for n in range(200)]
    assert subsets["val"] == [*(f"held out {n}" for n in range(19)), "train 7"]
    names = [source.name for source in read_manifest(result.path).sources]
    assert names == ["set/validation.jsonl", "set/train.jsonl"]
    # A finished job is not done again, and its recipe gives the same bytes.
    before = hash_store_files(result.path)
    batchloom.prepare(folder, out=tmp_path / "out", val_from="validation", **OPTIONS)
    again = batchloom.prepare(recipe=tmp_path / "out", out=tmp_path / "again")
    assert hash_store_files(result.path) == hash_store_files(again.path) == before


def test_a_text_of_both_is_held_out(folder, tmp_path):
    subsets = read_subsets(
        batchloom.prepare(folder, out=tmp_path / "out", val_from="validation", tokenizer="bytes").path
    )
    assert "train 7" in subsets["val"]
    assert subsets["train"] == [f"train {n}" for n in range(200) if n != 7]


@pytest.mark.parametrize("workers", [1, 2])
def test_archives_and_workers(folder, tmp_path, workers):
    with tarfile.open(tmp_path / "set.tar", "w") as archive:
        archive.add(folder, "set")
    out = batchloom.prepare(
        tmp_path / "set.tar", out=tmp_path / "out", val_from="validation", workers=workers, **OPTIONS
    )
    assert {name: len(texts) for name, texts in read_subsets(out.path).items()} == {"train": 200, "val": 20}
    names = [source.name for source in read_manifest(out.path).sources]
    assert names == ["set.tar/set/validation.jsonl", "set.tar/set/train.jsonl"]


def test_hashes_choose_among_the_other_documents(folder, tmp_path):
    out = batchloom.prepare(folder, out=tmp_path / "out", val_from="validation", test_fraction=0.1, **OPTIONS)
    subsets = read_subsets(out.path)
    assert len(subsets["val"]) == 20
    assert 10 < len(subsets["test"]) < 30
    assert all(text.startswith("train") for text in subsets["test"])


def test_a_store_is_extended_by_its_own_rule(folder, tmp_path):
    batchloom.prepare(folder, out=tmp_path / "out", val_from="validation", **OPTIONS)
    (folder / "more").mkdir()
    write_jsonl(folder / "train-2.jsonl", [{"text": "more to train"}])
    write_jsonl(folder / "validation-2.jsonl", [{"text": "more held out"}])
    batchloom.prepare(out=tmp_path / "out", append=True, recipe=None)
    subsets = read_subsets(tmp_path / "out")
    assert subsets["train"][-1] == "more to train"
    assert subsets["val"][-1] == "more held out"


def test_a_manifest_names_the_subset(folder, tmp_path):
    shutil.copy(folder / "validation.jsonl", tmp_path / "held.jsonl")
    entries = [{"path": "set/train.jsonl"}, {"path": "held.jsonl", "subset": "test"}]
    (tmp_path / "sets.yaml").write_text(yaml.safe_dump({"datasets": entries}))
    subsets = read_subsets(batchloom.prepare(tmp_path / "sets.yaml", out=tmp_path / "out", **OPTIONS).path)
    assert len(subsets["test"]) == 20
    assert len(subsets["train"]) + len(subsets["val"]) == 200


def test_a_recipe_file_names_the_split(folder, tmp_path):
    (tmp_path / "r.yaml").write_text("inputs: [set]\ntokenizer: bytes\ndedup: none\nval_from: validation\n")
    subsets = read_subsets(batchloom.prepare(recipe=tmp_path / "r.yaml", out=tmp_path / "out").path)
    assert {name: len(texts) for name, texts in subsets.items()} == {"train": 200, "val": 20}
    # An option replaces the share of a recipe.
    (tmp_path / "r.yaml").write_text("inputs: [set]\ntokenizer: bytes\ndedup: none\nval_fraction: 0.5\n")
    named = batchloom.prepare(recipe=tmp_path / "r.yaml", out=tmp_path / "named", val_from="validation")
    assert hash_store_files(named.path) == hash_store_files(tmp_path / "out")


def test_ranges_of_rows_of_one_split(folder, tmp_path):
    ranges = {"input_split": "train[10%:]", "val_from": "train[:10%]"}
    subsets = read_subsets(batchloom.prepare(folder, out=tmp_path / "out", **ranges, **OPTIONS).path)
    assert subsets == {
        "train": [f"train {n}" for n in range(20, 200)],
        "val": [f"train {n}" for n in range(20)],
    }
    with pytest.raises(InputError, match="--input-split and --val-from read the same rows; name two ranges"):
        batchloom.prepare(folder, out=tmp_path / "no", input_split="train[5%:]", val_from="train[:10%]", **OPTIONS)
    with pytest.raises(InputError, match="is read for training and for val: name two splits, or two ranges"):
        batchloom.prepare(folder, out=tmp_path / "no", val_from="train", **OPTIONS)


def test_stores_of_single_inputs_have_it_too(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "other")
    inputs = [folder, tmp_path / "other"]
    prepare_mixture(inputs, out=tmp_path / "out", val_from="validation", **OPTIONS)
    assert len(batchloom.open_store(tmp_path / "out" / "set", "val")) == 20
    assert len(batchloom.open_store(tmp_path / "out" / "other", "val")) == 20


def test_an_append_with_the_same_input_reads_both_splits(folder, tmp_path):
    batchloom.prepare(folder, out=tmp_path / "out", val_from="validation", **OPTIONS)
    write_jsonl(folder / "validation-2.jsonl", [{"text": "more held out"}])
    batchloom.prepare(folder, out=tmp_path / "out", append=True)
    assert read_subsets(tmp_path / "out")["val"][-1] == "more held out"


def test_an_input_given_twice_with_a_split_is_read_once(folder, tmp_path):
    inputs = [folder, folder / "train.jsonl"]
    assert batchloom.prepare(inputs, out=tmp_path / "out", input_split="train", **OPTIONS).counts.documents == 200


def test_a_file_of_two_inputs_is_not_trained_and_held_out(folder, tmp_path):
    with pytest.raises(InputError, match="validation.jsonl.* is read for training and for val"):
        batchloom.prepare([folder, folder / "validation.jsonl"], out=tmp_path / "no", val_from="validation", **OPTIONS)
    # An input that is given twice is read once.
    twice = batchloom.prepare([folder, folder], out=tmp_path / "out", val_from="validation", **OPTIONS)
    assert twice.counts.documents == 220


def test_rows_of_other_splits_are_compared_in_their_file(folder, tmp_path):
    rows = {"val_from": "validation[:1]", "input_split": "all[1:]"}
    with pytest.raises(InputError, match="read the same rows"):
        batchloom.prepare(folder, out=tmp_path / "no", **rows, **OPTIONS)
    with pytest.raises(SettingsError, match="rows of a split and a number of records cannot be combined"):
        batchloom.prepare(f"{folder}/train.jsonl#3", out=tmp_path / "no", input_split="train[2:]", **OPTIONS)


def test_texts_of_an_input_for_val_stay_in_it(folder, tmp_path):
    entries = [{"path": "set/train.jsonl"}, {"path": "set/validation.jsonl", "subset": "val"}]
    (tmp_path / "sets.yaml").write_text(yaml.safe_dump({"datasets": entries}))
    subsets = read_subsets(batchloom.prepare(tmp_path / "sets.yaml", out=tmp_path / "out", tokenizer="bytes").path)
    assert len(subsets["val"]) == 20
    assert "train 7" not in subsets["train"]


def test_a_printed_recipe_gives_the_same_store(folder, tmp_path):
    words = ["prepare", str(folder), "--tokenizer", "bytes", "--val-from", "validation", "--quiet"]
    printed = run_command([*words, "--print-recipe"])
    assert printed.code == 0, printed.err
    (tmp_path / "recipe.yaml").write_text(printed.out)
    assert yaml.safe_load(printed.out)["val_from"] == "validation"
    stores = [tmp_path / "first", tmp_path / "second"]
    for arguments in (words, ["prepare", "--recipe", str(tmp_path / "recipe.yaml"), "--quiet"]):
        told = run_command([*arguments, "--out", str(stores[len(arguments) == 4])])
        assert told.code == 0, told.err
    assert hash_store_files(stores[0]) == hash_store_files(stores[1])


def test_what_cannot_be_is_refused(folder, tmp_path):
    with pytest.raises(InputMissingError, match="has no split 'valid'.*did you mean 'validation'"):
        batchloom.prepare(folder, out=tmp_path / "out", val_from="valid", **OPTIONS)
    with pytest.raises(
        SettingsError, match="val_fraction: val comes from a split .val_from. or from inputs .subset: val.; leave"
    ):
        batchloom.prepare(folder, out=tmp_path / "out", val_from="validation", val_fraction=0.1, **OPTIONS)
    with pytest.raises(SettingsError, match="val_from, subset: a stream has no subsets; leave them out"):
        batchloom.stream(folder, val_from="validation", tokenizer="bytes", seq_len=8, global_batch_size=1, steps=1)
