"""Splits of data sets in folders and archives: by cards, and by names as ``datasets`` reads them."""

import json
import re
import shutil
import tarfile
import zipfile

import pytest

import batchloom
from batchloom.core.errors import BatchloomError, InputError, InputMissingError, SettingsError
from batchloom.preparation import convert
from batchloom.sources import DeclaredInput, list_sources, parse_split
from preparation.stores import read_texts, write_jsonl

CARD = """---
license: mit
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*
  - split: test
    path: [data/test-*, more/**]
---
# A card
"""
TWO_CONFIGS = """---
configs:
- config_name: de
  data_files: de/*.jsonl
- config_name: en
  data_dir: en
  data_files:
    train: "*.jsonl"
    test: held/*.jsonl
---
"""
HELD_OUT = ("train.jsonl", "test.jsonl", "validation.jsonl")
# Files of a folder, and those that are read; a string is what an error says.
LAYOUTS = {
    "files": (HELD_OUT, ["train.jsonl"]),
    "files and a licence": ((*HELD_OUT, "LICENSE", "README.md"), ["train.jsonl"]),
    "folders": (("train/a.jsonl", "train/b/c.jsonl", "dev/a.jsonl", "eval/x.jsonl"), ["train/a.jsonl", "train/b/c.jsonl"]),
    "names with words": (("my_train_data.jsonl", "my-test-data.jsonl"), ["my_train_data.jsonl"]),
    "folders with words": (("01-training/a.jsonl", "the dev set/a.jsonl"), ["01-training/a.jsonl"]),
    "shards": (("data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl"), ["data/train-00000-of-00001.jsonl"]),
    "a cache": (("tiny-train.jsonl", "tiny-test.jsonl", "cache-0123456789abcdef.arrow", "dataset_info.json"), ["tiny-train.jsonl"]),
    "several data sets": (("a/train.jsonl", "a/test.jsonl", "b/x.jsonl"), ["a/train.jsonl", "b/x.jsonl"]),
    "train only": (("train.jsonl", "more.jsonl"), ["more.jsonl", "train.jsonl"]),
    "a held-out split only": (("test-1.jsonl", "test-2.jsonl"), ["test-1.jsonl", "test-2.jsonl"]),
    "no split": (("attest.jsonl", "trainer.jsonl", "latest.jsonl"), ["attest.jsonl", "latest.jsonl", "trainer.jsonl"]),
    "shards without splits": (("data/wiki-00000-of-00001.jsonl", "data/books-00000-of-00001.jsonl"), ["data/books-00000-of-00001.jsonl", "data/wiki-00000-of-00001.jsonl"]),
    "named as no split": (("test.jsonl", "a.jsonl"), "--input-split train reads the train split with the files of no split"),
    "splits without train": (("data/train_sft-00000-of-00001.jsonl", "data/test_sft-00000-of-00001.jsonl"), "has the splits test_sft, train_sft, and none is train"),
    "texts": (("a.txt", "the test of time.txt", "README.md"), ["README.md", "a.txt", "the test of time.txt"]),
    "texts of splits": (("train.txt", "test.txt"), ["train.txt"]),
    "code": (("src/a.py", "test/b.py", "README.md"), ["README.md", "src/a.py", "test/b.py"]),
}  # fmt: skip


def write_files(folder, names, card=""):
    """Write files of one record or text each, which says its name."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        is_record = name.endswith(".jsonl")
        path.write_text(f"{json.dumps({'text': f'<{name}>'})}\n" * 2 if is_record else f"<{name}>")
        if name.endswith(".arrow"):
            path.write_bytes(b"ARROW1\0\0")
        if name == "dataset_info.json":
            path.write_text('{"features": {}}')
    if card:
        (folder / "README.md").write_text(card)
    return folder


def list_names(folder, split=None):
    """Return the paths below a folder that are read, and the listing."""
    declared = [DeclaredInput(split=None if split is None else parse_split(split))]
    listing = list_sources([str(folder)], declared_inputs=declared)
    return sorted(source.path.removeprefix(f"{folder}/") for source in listing.sources), listing


@pytest.mark.parametrize(("files", "expected"), LAYOUTS.values(), ids=LAYOUTS)
def test_names_tell_the_split(tmp_path, files, expected):
    write_files(tmp_path, files)
    if isinstance(expected, str):
        with pytest.raises(InputError, match=expected):
            list_names(tmp_path)
    else:
        assert list_names(tmp_path)[0] == expected


@pytest.mark.parametrize("name", ["files", "folders", "names with words", "folders with words", "shards"])
def test_the_split_is_that_of_datasets(tmp_path, name):
    import datasets

    files, expected = LAYOUTS[name]
    write_files(tmp_path / "set", files)
    builder = datasets.load_dataset_builder(str(tmp_path / "set"), cache_dir=str(tmp_path / "cache"))
    for split, urls in builder.config.data_files.items():
        names = sorted(url.partition(f"{tmp_path}/set/")[2] for url in urls)
        assert list_names(tmp_path / "set", str(split))[0] == names
    assert sorted(url.partition("/set/")[2] for url in builder.config.data_files["train"]) == expected


@pytest.mark.parametrize(
    "text", ["train[:1%]", "train[10%:90%]", "train[3:7]", "train[-10%:]", "train[:-3]", "train[1%:]"]
)
@pytest.mark.parametrize("total", [0, 7, 50, 149, 1000])
def test_rows_are_those_of_datasets(text, total):
    from datasets.arrow_reader import ReadInstruction

    [expected] = ReadInstruction.from_spec(text).to_absolute({"train": total})
    rows = parse_split(text).rows.resolve(total)
    assert (rows.start, max(rows.start, rows.stop)) == (expected.from_, max(expected.from_, expected.to))


@pytest.mark.parametrize("text", ["", "train[", "train[1:2", "train[a:b]", "a/b/c", "train+test", "train[%:]"])
def test_other_texts_are_no_splits(tmp_path, text):
    write_files(tmp_path, HELD_OUT)
    with pytest.raises(SettingsError, match="input_split"):
        batchloom.prepare(tmp_path, out=tmp_path / "out", tokenizer="bytes", input_split=text)


def test_only_the_paths_below_the_input_are_searched(tmp_path):
    folder = write_files(tmp_path / "test_set", ["a.jsonl", "b.jsonl"])
    names, listing = list_names(folder)
    assert names == ["a.jsonl", "b.jsonl"]
    assert listing.sources.matches_path(re.compile(rb"test_"), 0, "")
    assert not listing.sources.matches_path(re.compile(rb"test_"), 0, f"{folder}/")
    assert listing.sources.matches_path(re.compile(rb"b\.jsonl"), 0, f"{folder}/")


def test_a_card_decides_before_names(tmp_path):
    files = ("data/train-0.jsonl", "data/test-0.jsonl", "more/x.jsonl", "other.jsonl", "LICENSE")
    write_files(tmp_path, files, CARD)
    names, listing = list_names(tmp_path)
    assert names == ["data/train-0.jsonl"]
    [note] = [note for note in listing.warnings if "split" in note]
    assert "by its card split train is read, and not test (2 files), 1 file of no split" in note
    assert any("2 cards, licences and caches" in note for note in listing.warnings)
    assert list_names(tmp_path, "test")[0] == ["data/test-0.jsonl", "more/x.jsonl"]
    assert list_names(tmp_path, "all")[0] == ["data/test-0.jsonl", "data/train-0.jsonl", "more/x.jsonl", "other.jsonl"]
    with pytest.raises(InputMissingError, match="has no split 'tset'.*did you mean 'test'"):
        list_names(tmp_path, "tset")


def test_a_configuration_of_a_card_is_named(tmp_path):
    write_files(tmp_path, ("de/a.jsonl", "en/a.jsonl", "en/held/b.jsonl"), TWO_CONFIGS)
    with pytest.raises(InputError, match="names several configurations; it has de, en.*--input-split de/train"):
        list_names(tmp_path)
    assert list_names(tmp_path, "de/train")[0] == ["de/a.jsonl"]
    assert list_names(tmp_path, "en/test")[0] == ["en/held/b.jsonl"]
    assert list_names(tmp_path, "en/all")[0] == ["en/a.jsonl", "en/held/b.jsonl"]


def test_a_card_whose_files_are_missing_is_refused(tmp_path):
    write_files(tmp_path, ("x.jsonl",), CARD)
    with pytest.raises(InputMissingError, match="README.md names data/train-\\*, and no such file is here"):
        list_names(tmp_path)
    (tmp_path / "README.md").write_text("---\nconfigs: [\n---\n")
    with pytest.raises(InputError, match="The card says which files are data"):
        list_names(tmp_path)
    assert list_names(tmp_path, "all")[0] == ["x.jsonl"]


def test_files_of_no_split_are_train_on_request(tmp_path):
    write_files(tmp_path, ("a.jsonl", "b.jsonl", "test.jsonl"))
    assert list_names(tmp_path, "train")[0] == ["a.jsonl", "b.jsonl"]
    assert list_names(tmp_path, "test")[0] == ["test.jsonl"]
    assert list_names(tmp_path, "all")[0] == ["a.jsonl", "b.jsonl", "test.jsonl"]


def test_a_file_left_out_by_its_split_is_read_if_an_input_names_it(tmp_path):
    write_files(tmp_path, HELD_OUT)
    listing = list_sources([str(tmp_path), str(tmp_path / "test.jsonl")])
    assert [source.path.rpartition("/")[2] for source in listing.sources] == ["train.jsonl", "test.jsonl"]


def pack_zip(folder, path):
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(folder.rglob("*")):
            archive.write(file, f"top/{file.relative_to(folder)}")


def pack_tar(folder, path):
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, "top")


@pytest.mark.parametrize(("name", "pack"), [("set.zip", pack_zip), ("set.tar.gz", pack_tar), ("copy", shutil.copytree)])
def test_stores_hold_the_split(tmp_path, name, pack):
    """Folders, archives and manifests."""
    pack(write_files(tmp_path / "set", ("data/train-0.jsonl", "data/test-0.jsonl", "LICENSE"), CARD), tmp_path / name)
    settings = {"tokenizer": "bytes", "val_fraction": 0, "dedup": "none"}

    def read_texts(inputs, out, **more):
        store = batchloom.open_store(batchloom.prepare(inputs, out=tmp_path / out, **settings, **more).path)
        return {bytes(n for n in store[k].ids if n < 256).decode() for k in range(len(store))}

    assert read_texts(tmp_path / name, "train") == {"<data/train-0.jsonl>"}
    assert read_texts(tmp_path / name, "test", input_split="test") == {"<data/test-0.jsonl>"}
    (tmp_path / "sets.yaml").write_text(f"datasets:\n- {{path: {name}, split: test}}\n")
    assert read_texts(tmp_path / "sets.yaml", "manifest") == {"<data/test-0.jsonl>"}
    rows = convert(tmp_path / name, out=tmp_path / "rows.jsonl")
    assert rows.rows == 2
    assert "train-0" in (tmp_path / "rows.jsonl").read_text()


@pytest.mark.parametrize(
    ("files", "card", "split", "expected"),
    [
        (
            ("data/a.jsonl", "other/c.jsonl"),
            "configs:\n- {config_name: x, data_dir: data}\n- {config_name: y, data_dir: other}",
            "y/train",
            ["other/c.jsonl"],
        ),
        (
            ("en/train.jsonl", "en/test.jsonl", "de/train.jsonl", "de/test.jsonl"),
            "configs:\n- {config_name: en, data_dir: en, default: true}\n- {config_name: de, data_dir: de}",
            "de/test",
            ["de/test.jsonl"],
        ),
        (("data/a.jsonl", "x.jsonl"), "configs:\n- {config_name: one, data_dir: data}", None, ["data/a.jsonl"]),
        (
            ("data/a.jsonl", "data/b.jsonl"),
            (
                "configs:\n- config_name: d\n  data_files:\n  - {split: train, path: data/*}\n"
                "  - {split: validation, path: data/b.jsonl}"
            ),
            None,
            ["data/a.jsonl", "data/b.jsonl"],
        ),
        (
            ("data/a.jsonl", "data/b.jsonl"),
            (
                "configs:\n- config_name: d\n  data_files:\n  - {split: train, path: data/*}\n"
                "  - {split: validation, path: data/b.jsonl}"
            ),
            "validation",
            ["data/b.jsonl"],
        ),
        (("data/train.jsonl", "benchmark/test.jsonl"), "", None, ["data/train.jsonl"]),
        (("en/train/a.jsonl", "en/test/a.jsonl", "fr/test/a.jsonl"), "", None, ["en/train/a.jsonl"]),
    ],
)
def test_configurations_of_folders_and_held_out_folders(tmp_path, files, card, split, expected):
    write_files(tmp_path / "set", files, f"---\n{card}\n---\n" if card else "")
    names, _ = list_names(tmp_path / "set", split)
    assert sorted(names) == expected


def test_a_configuration_that_is_asked_for_as_a_split(tmp_path):
    card = "configs:\n- {config_name: de, data_dir: de, default: true}\n- {config_name: en, data_dir: en}"
    write_files(tmp_path / "set", ("de/train.jsonl", "en/train.jsonl"), f"---\n{card}\n---\n")
    with pytest.raises(InputMissingError, match="has a configuration of this name: write --input-split en/SPLIT"):
        list_names(tmp_path / "set", "en")
    card = "configs:\n- {config_name: train, data_files: de/train.jsonl}\n- {config_name: test, data_dir: en}"
    (tmp_path / "set/README.md").write_text(f"---\n{card}\n---\n")
    assert list_names(tmp_path / "set", "train/train")[0] == ["de/train.jsonl"]


def test_a_configuration_needs_a_card(tmp_path):
    write_files(tmp_path / "set", HELD_OUT)
    with pytest.raises(InputMissingError, match="has no configuration 'nosuch': no card names one"):
        list_names(tmp_path / "set", "nosuch/train")


def test_rows_of_a_split_are_read(tmp_path):
    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set" / "train-1.jsonl", [{"text": f"<{n}>"} for n in range(30)])
    write_jsonl(tmp_path / "set" / "train-2.jsonl", [{"text": f"<{n}>"} for n in range(30, 50)])
    write_jsonl(tmp_path / "set" / "test.jsonl", [{"text": "<test>"}])
    for split, expected in (("train[:10%]", range(5)), ("train[28:32]", range(28, 32)), ("train[-2:]", range(48, 50))):
        convert(tmp_path / "set", out=tmp_path / "rows.jsonl", input_split=split, force=True)
        rows = [json.loads(line)["text"] for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
        assert rows == [f"<{n}>" for n in expected]


def test_a_saved_data_set_has_splits(tmp_path):
    import datasets

    splits = {name: datasets.Dataset.from_list([{"text": f"<{name}>"}]) for name in ("train", "test", "extra")}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "set"))
    for split, expected in ((None, ["train"]), ("extra", ["extra"]), ("all", ["extra", "test", "train"])):
        names, _ = list_names(tmp_path / "set", split)
        assert sorted(name.partition("/")[0] for name in names) == expected
    with pytest.raises(InputMissingError, match="has no split 'tset'"):
        list_names(tmp_path / "set", "tset")


def test_the_cache_of_datasets_is_read_by_splits(tmp_path):
    import datasets

    (tmp_path / "in").mkdir()
    write_files(tmp_path / "in", HELD_OUT)
    loaded = datasets.load_dataset(str(tmp_path / "in"), cache_dir=str(tmp_path / "cache"))
    loaded["train"].map(lambda row: row)
    names, _ = list_names(tmp_path / "cache")
    assert [name.rpartition("-")[2] for name in names] == ["train.arrow"]


def test_splits_of_the_hub_are_named_once(tmp_path):
    with pytest.raises(BatchloomError, match="input_split: 'test' and the split 'train' of 'org/name' differ"):
        list_names("org/name:default/train", "test")


@pytest.mark.parametrize(
    ("pattern", "archive", "pack"),
    [
        ("{}.zip", "{}.zip", pack_zip),
        ("data/*-{}.tar.gz", "data/x-{}.tar.gz", pack_tar),
        ("{}/**", "{}/x.zip", pack_zip),
    ],
)
def test_a_card_names_archives(tmp_path, pattern, archive, pack):
    splits = ("train", "test")
    entries = "".join(f"  - {{split: {split}, path: '{pattern.format(split)}'}}\n" for split in splits)
    for split in splits:
        path = tmp_path / "in" / archive.format(split)
        path.parent.mkdir(parents=True, exist_ok=True)
        pack(write_files(tmp_path / split, (f"{split}.jsonl",)), path)
    (tmp_path / "in/README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files:\n{entries}---\n")
    result = batchloom.prepare(tmp_path / "in", out=tmp_path / "s", tokenizer="bytes", val_fraction=0, dedup="none")
    assert read_texts(result.path) == ["<train.jsonl>"] * 2
