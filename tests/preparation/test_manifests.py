"""YAML manifests and DatasetConfig as inputs of prepare."""

import csv
import json
import time
from dataclasses import FrozenInstanceError, fields

import pyarrow as pa
import pyarrow.parquet
import pytest

import batchloom
from batchloom import DatasetConfig, InputError, PlanSpec, SettingsError
from batchloom.core.errors import InputMissingError, StoreConflictError
from batchloom.preparation import convert, make_request
from batchloom.store import read_manifest
from preparation.stores import hash_store_files, read_texts, write_jsonl
from sources.test_saved_datasets import ROWS as SAVED, save_dataset

ARITHMETIC = [{"q": f"What is {n} + 1?", "a": str(n + 1)} for n in range(40)]


@pytest.fixture
def folder(tmp_path):
    """Write data sets in several formats, without a manifest."""
    data = tmp_path / "data"
    data.mkdir()
    write_jsonl(data / "sums.jsonl", ARITHMETIC)
    with (data / "notes.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["id", "body"], *([n, f"note {n}"] for n in range(30))])
    table = pa.table({"question": [f"q{n}" for n in range(20)], "best": [f"a{n}" for n in range(20)]})
    pyarrow.parquet.write_table(table, data / "best.parquet")
    write_jsonl(data / "plain.jsonl", [{"text": f"plain {n}"} for n in range(40)])
    write_jsonl(data / "lines.txt", [{"text": f"line {n}"} for n in range(10)])
    return tmp_path


MANIFEST = """
datasets:
  - path: sums.jsonl
    data_folder: data
    data_type: jsonl
    name: sums
    weight: 0.7
    mapping: {prompt: q, response: a}
  - {path: data/notes.csv, data_type: csv, text_field: body, weight: 2}
  - path: data/best.parquet
    data_type: parquet
    mapping: {prompt: question, response: best}
  - {path: data/lines.txt, data_type: jsonl}
"""


def write(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def prepare(inputs, out, **settings):
    settings.setdefault("tokenizer", "bytes")
    return batchloom.prepare(inputs, out=out, val_fraction=0, **settings)


def list_inputs(manifest):
    """Return (input, its settings) of each data set of a manifest."""
    recipe = make_request([str(manifest)], {}, None).recipe
    return list(zip(recipe.inputs, recipe.sources, strict=True))


def test_four_formats_with_four_settings_in_one_store(folder):
    result = prepare(write(folder / "all.yaml", MANIFEST), folder / "out")
    assert result.counts.documents == 100
    manifest = read_manifest(result.path)
    assert [(source.kind, source.detected, source.documents) for source in manifest.sources] == [
        ("jsonl", "q/a -> 2 turns", 40),
        ("csv", "body -> plain text", 30),
        ("parquet", "question/best -> 2 turns", 20),
        ("jsonl", "text -> plain text", 10),
    ]
    assert [(source.dataset, source.weight) for source in manifest.sources] == [
        ("sums", 0.7),
        ("", 2.0),
        ("", None),
        ("", None),
    ]
    assert [bool(settings) for settings in manifest.recipe["sources"]] == [True, True, True, False]
    assert "Weights of 2 inputs are recorded and not applied" in "".join(result.notes)
    store = batchloom.open_store(result.path)
    assert store.contents.weights[0] == ("sums", 0.7)
    assert batchloom.check(result.path).sound
    assert prepare(folder / "all.yaml", folder / "out").already_done


def test_options_and_a_manifest_give_the_same_bytes(folder, monkeypatch):
    monkeypatch.chdir(folder)
    mapping = "mapping: {prompt: q, response: a}"
    write(folder / "l.yaml", f"datasets: [{{path: data/sums.jsonl, data_type: jsonl, {mapping}}}]")
    block = "dataset_path: data/plain.jsonl, dataset_format: jsonl, processor_config: {processor_name: bytes}"
    write(folder / "b.yaml", f"dataset: {{{block}}}")
    by_options = prepare("data/sums.jsonl", "one", mapping={"prompt": "q", "response": "a"})
    assert hash_store_files(prepare("l.yaml", "two").path) == hash_store_files(by_options.path)
    detected = prepare("data/plain.jsonl", "three")
    assert hash_store_files(batchloom.prepare("b.yaml", out="four", val_fraction=0).path) == hash_store_files(
        detected.path
    )
    config = DatasetConfig(dataset_path="data/plain.jsonl")
    assert hash_store_files(prepare(config, "five").path) == hash_store_files(detected.path)


def test_a_manifest_goes_with_other_inputs_and_options_fill_in(folder):
    manifest = write(folder / "l.yaml", "datasets: [{path: data/lines.txt, data_type: jsonl, text_field: text}]")
    result = prepare([folder / "data/notes.csv", manifest], folder / "out", text_field="body")
    assert sorted(read_texts(result.path))[::39] == ["line 0", "note 9"]


DEFAULTS = {
    "dataset_type": "text",
    "dataset_format": None,
    "datasets": None,
    "processor_config": None,
    "shuffle": True,
    "packing": False,
    "packing_length": None,
    "packing_strategy": "first_fit",
    "filter_overlong": True,
    "follow_links": False,
    "videos": {},
}


def test_every_default():
    config = DatasetConfig(dataset_path="x.jsonl")
    assert {name: getattr(config, name) for name in DEFAULTS} == DEFAULTS
    assert config == DatasetConfig(dataset_path="x.jsonl", **DEFAULTS)
    entry = DatasetConfig(datasets=[{"path": "x"}]).datasets[0]
    assert {field.name for field in fields(entry) if getattr(entry, field.name)} == {"path"}
    assert config.tokenizer is None
    with pytest.raises(FrozenInstanceError):
        config.packing = True


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("none", 32_000, "drop", True)),
        ({"packing": True}, ("first_fit", 32_000, "drop", True)),
        ({"packing": True, "packing_strategy": "window_16"}, ("window_16", 32_000, "drop", True)),
        (
            {"packing": True, "packing_strategy": "best_fit", "packing_length": 64},
            ("best_fit", 64, "drop", True),
        ),
        ({"filter_overlong": False, "shuffle": False}, ("none", 32_000, "split", False)),
    ],
)
def test_plan_settings(options, expected):
    plan_settings = DatasetConfig(dataset_path="x", **options).plan_settings()
    assert tuple(plan_settings[name] for name in ("packing", "seq_len", "overlong", "shuffle")) == expected
    PlanSpec(global_batch_size=1, **plan_settings)
    assert DatasetConfig(dataset_path="x", **options).plan_settings(longest=512)["seq_len"] == min(
        512 if "packing_length" not in options else 64, expected[1]
    )


def test_everything_that_is_wrong_at_once(tmp_path):
    text = """
dataset:
  dataset_type: vison
  dataset_format: jsonll
  dataset_path: x
  shuffle: "yes"
  packing: 1
  pakcing: true
  packing_length: 0
  packing_strategy: first_fitt
  filter_overlong: [true]
  processor_config: {processor_nam: bytes}
  datasets:
    - {path: a, weigth: 1}
    - {path: 5, weight: -1, type: audio, data_type: yaml, name: "", mapping: {promt: q}}
    - five
    - {weight: true, mapping: {prompt: q}, text_field: t}
"""
    path = write(tmp_path / "w.yaml", text)
    with pytest.raises(SettingsError) as error:
        DatasetConfig.load(path)
    problems = [problem.removeprefix(f"{path}: dataset.") for problem in error.value.problems]
    assert sorted(problem.split(":")[0] for problem in problems) == sorted(
        [
            "dataset_type",
            "dataset_format",
            "shuffle",
            "packing",
            "pakcing",
            "packing_length",
            "packing_strategy",
            "filter_overlong",
            "processor_config.processor_name",
            "processor_config.processor_nam",
            "dataset_path",
            "datasets[0].weigth",
            "datasets[1].path",
            "datasets[1].weight",
            "datasets[1].type",
            "datasets[1].data_type",
            "datasets[1].name",
            "datasets[1].mapping.promt",
            "datasets[2]",
            "datasets[3].path",
            "datasets[3].weight",
            "datasets[3].text_field",
        ]
    )
    message = "\n".join(problems)
    for hint in (
        "'vision'",
        "'jsonl'",
        "'packing'",
        "'first_fit'",
        "'processor_name'",
        "'weight'",
        "'prompt'",
    ):
        assert f"did you mean {hint}?" in message
    assert "no file" not in message


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, "dataset_path: missing"),
        ({"datasets": []}, "datasets: there are none"),
        (
            {"datasets": [{"path": "x", "name": "a"}, {"path": "y", "name": "a"}]},
            "datasets: two are called 'a'",
        ),
        ({"dataset_path": "x", "datasets": [{"path": "y"}]}, "dataset_path: goes with no datasets"),
        (
            {"dataset_path": "x", "dataset_type": "video"},
            "dataset_type: 'video' is none of text, fineweb_edu, vision, vision_audio",
        ),
        ({"datasets": [{"path": "x", "weight": float("nan")}]}, r"datasets\[0\].weight: nan"),
        ({"datasets": [{"path": "x\0"}]}, r"datasets\[0\].path"),
        ({"datasets": 5}, "datasets: 5 is not a list"),
        (
            {"dataset_path": "x", "packing_length": 1 << 30},
            "packing_length: 1073741824 is not a whole number",
        ),
    ],
)
def test_invalid_configurations_are_refused(settings, problem):
    with pytest.raises(SettingsError, match=problem):
        DatasetConfig(**settings)


def test_a_null_is_a_default(folder):
    text = "dataset: {dataset_path: data/sums.jsonl, packing_strategy: null, packing: null, datasets: null}"
    assert DatasetConfig.load(write(folder / "n.yaml", text)).plan_settings()["packing"] == "none"


def test_a_block_of_another_trainer_works_as_it_is(folder):
    text = """
trainer_type: fsdp2_trainer
dataset_config:
  dataset_type: text
  dataset_format: yaml
  processor_config: {processor_name: bytes, processor_type: qwen2, extra_kwargs: {}}
  dataset_path: all.yaml
  datasets: null
  object_storage: none
  bucket_name: null
  packing: true
  packing_strategy: first_fit
  packing_length: 8192
  filter_overlong: true
  filter_overlong_workers: 8
  max_length: null
  video_backend: qwen_vl_utils
  extra_kwargs: {}
trainer_args: {output_dir: ./out, learning_rate: 1.0e-5}
"""
    write(folder / "all.yaml", MANIFEST)
    path = write(folder / "config.yaml", text)
    result = batchloom.prepare(path, out=folder / "out", val_fraction=0)
    assert (result.tokenizer, result.counts.documents) == ("bytes", 100)
    assert result.notes[:2] == (
        f"{path}: dataset_config is read, and the rest is not.",
        f"{path}: not used of it: filter_overlong_workers, video_backend.",
    )
    assert DatasetConfig.load(path).plan_settings()["packing"] == "first_fit"
    jobs = "- type: trainer\n  config:\n" + "".join(f"    {line}\n" for line in text.splitlines())
    assert DatasetConfig.load(write(folder / "jobs.yaml", jobs)).packing_length == 8192


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b", "holds a list and names no data sets"),
        ("5", "holds a number and names no data sets"),
        ("just words", "holds a text"),
        ("a: 1\ndatasetts: []", "it holds 'a', 'datasetts'; did you mean 'datasets'?"),
        ("{}", "it holds nothing"),
        ("dataset: 5", "dataset holds a number, not settings"),
        ("dataset: {dataset_path: x}\ndatasets: [{path: x}]", "one of them is read"),
        ("datasets: 5", "datasets: 5 is not a list"),
    ],
)
def test_files_that_name_nothing(tmp_path, text, message):
    path = write(tmp_path / "f.yaml", text)
    with pytest.raises((InputError, SettingsError), match="^" + str(path)) as error:
        prepare(path, tmp_path / "out")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            "{path: ../data/sums.jsonl}",
            "'../data/sums.jsonl' lies outside of the folder of the manifest",
        ),
        ("{path: in/../../data/sums.jsonl}", "lies outside of the folder of the manifest"),
        ("{path: link.jsonl}", "through a symbolic link to"),
        ("{path: linked/sums.jsonl}", "through a symbolic link to"),
        ("{path: 'linked/*.jsonl'}", "through a symbolic link to"),
        ("{path: sums.jsonl, data_folder: ..}", "'..' lies outside of the folder of the manifest"),
        ("{path: sums.jsonl, data_folder: linked}", "'linked' lies outside"),
        ("{path: ../x.jsonl, data_folder: in}", "lies outside of its data_folder in"),
        ("{path: /etc/passwd, data_folder: in}", "lies outside of its data_folder in"),
        ("{path: /etc/passwd, data_folder: /usr}", "lies outside of its data_folder /usr"),
        ("{path: 's3://b/x', data_folder: 's3://c'}", "lies outside of its data_folder s3://c"),
        ("{path: '../x', data_folder: 's3://c'}", "lies outside of its data_folder s3://c"),
        ("{path: 's3://k:secret@b/x', data_folder: in}", "'s3://b/x' lies outside"),
        ("{path: '-'}", "standard input"),
    ],
)
def test_paths_that_leave_are_refused(folder, entry, message):
    home = folder / "home"
    (home / "in").mkdir(parents=True)
    (home / "link.jsonl").symlink_to(folder / "data/sums.jsonl")
    (home / "linked").symlink_to(folder / "data")
    path = write(home / "m.yaml", f"datasets:\n  - path: in\n  - {entry}\n")
    with pytest.raises(InputError) as error:
        list_inputs(path)
    assert str(error.value).startswith(f"{path}, datasets[1]: ")
    assert message in str(error.value)
    assert "secret" not in str(error.value)


def test_paths_written_in_full_may_lie_anywhere(folder):
    path = folder / "data/sums.jsonl"
    text = f"""
datasets:
  - path: {path}
  - {{path: {path}, data_folder: {folder}}}
  - {{path: notes.csv, data_folder: {folder}/data}}
  - path: https://example.com/x.jsonl
  - {{path: x.jsonl, data_folder: 's3://bucket/data/'}}
  - {{path: 's3://bucket/data/y.jsonl', data_folder: 's3://bucket/data'}}
"""
    assert [location for location, _ in list_inputs(write(folder / "far" / "m.yaml", text))] == [
        str(path),
        str(path),
        str(folder / "data/notes.csv"),
        "https://example.com/x.jsonl",
        "s3://bucket/data/x.jsonl",
        "s3://bucket/data/y.jsonl",
    ]


def test_a_file_url_is_a_path_written_in_full(folder):
    text = f"datasets: [{{path: 'file://{folder}/data/sums.jsonl', mapping: {{prompt: q, response: a}}}}]"
    path = write(folder / "m.yaml", text)
    assert prepare(f"file://{path}", folder / "out").counts.documents == 40
    text = f"datasets: [{{path: ../x.jsonl, data_folder: 'file://{folder}/data'}}]"
    with pytest.raises(InputError, match="lies outside of its data_folder"):
        prepare(write(folder / "n.yaml", text), folder / "out2")


def test_a_link_that_stays_is_followed(folder):
    (folder / "again.jsonl").symlink_to(folder / "data/sums.jsonl")
    assert len(list_inputs(write(folder / "m.yaml", "datasets: [{path: again.jsonl}]"))) == 1


def test_missing_inputs_are_named_with_their_entry(folder, monkeypatch):
    text = "datasets: [{path: data/sum.jsonl}, {path: data/notes.csv}, {path: x.json}]"
    path = write(folder / "m.yaml", text)
    with pytest.raises(InputMissingError) as error:
        prepare(path, folder / "out")
    assert str(error.value) == (
        f"{path}, datasets[0]: JSONL file not found: {folder}/data/sum.jsonl: name files, folders or quoted globs that "
        f"exist; did you mean '{folder}/data/sums.jsonl'?; also missing: {folder}/x.json ({path}, datasets[2])."
    )
    single = write(folder / "one.yaml", "datasets: [{path: data/sum.jsonl}]")
    with pytest.raises(InputMissingError, match=r"did you mean '.*data/sums.jsonl'\?$"):
        prepare(single, folder / "out")
    monkeypatch.chdir(folder)
    with pytest.raises(InputMissingError, match="Relative paths start from the folder of the file"):
        prepare(write(folder / "conf" / "m.yaml", "datasets: [{path: data/sums.jsonl}]"), "out")
    with pytest.raises(InputMissingError, match=r"c.yaml, dataset.dataset_path: JSON file not found"):
        prepare(write(folder / "c.yaml", "dataset: {dataset_path: a/b.json}"), "out")


@pytest.mark.parametrize(
    ("entry", "location"),
    [
        ("{path: org/name}", "org/name"),
        ("{path: org/name, data_type: hf_dataset, split: test}", "org/name/test"),
        ("{path: org/name, config: main, split: train, revision: v1}", "org/name:main/train@v1"),
        ("{path: 'org/name:main', split: test}", "org/name:main/test"),
        ("{path: fineweb-edu}", "fineweb-edu"),
        ("{path: fineweb, config: default}", "HuggingFaceFW/fineweb:default/train"),
        ("{path: 'hf://datasets/org/name'}", "hf://datasets/org/name"),
    ],
)
def test_names_of_the_hub(tmp_path, entry, location):
    assert list_inputs(write(tmp_path / "m.yaml", f"datasets: [{entry}]"))[0][0] == location


def test_a_folder_in_the_working_folder_is_not_what_a_manifest_names(tmp_path, monkeypatch):
    (tmp_path / "org/name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "conf" / "m.yaml", "datasets: [{path: org/name}]")
    assert list_inputs(path)[0][0] == "hf://datasets/org/name"


@pytest.mark.parametrize("entry", ["{path: a/b.jsonl}", "{path: a/b.json}", "{path: a/b, data_type: jsonl}"])
def test_files_are_not_looked_up_on_the_hub(tmp_path, entry):
    with pytest.raises(InputMissingError, match="datasets"):
        list_inputs(write(tmp_path / "m.yaml", f"datasets: [{entry}]"))


def test_a_name_of_the_hub_with_another_type_is_a_file_that_is_missing(tmp_path):
    path = write(tmp_path / "m.yaml", "datasets: [{path: org/name, data_type: parquet}]")
    with pytest.raises(InputMissingError, match="A data set of the Hub needs data_type: hf_dataset"):
        list_inputs(path)


def test_a_file_with_the_name_of_a_data_set_is_that_file(folder):
    write_jsonl(folder / "org", [{"text": "x"}])
    assert list_inputs(write(folder / "m.yaml", "datasets: [{path: org}]"))[0][0] == str(folder / "org")


def test_settings_of_hub_data_sets_only(folder):
    for key in ("config", "revision"):
        path = write(folder / "m.yaml", f"datasets: [{{path: data/sums.jsonl, {key}: x}}]")
        with pytest.raises(SettingsError, match=rf"{key}: applies only to Hub data sets"):
            list_inputs(path)
    path = write(folder / "m.yaml", "datasets: [{path: 'org/name/train', split: test}]")
    with pytest.raises(SettingsError, match=r"split: 'test' and path 'org/name/train' contradict"):
        list_inputs(path)


def test_fineweb_edu_is_a_preset_or_a_column_called_text(folder):
    manifest = write(folder / "m.yaml", "dataset: {dataset_type: fineweb_edu}")
    recipe = make_request([str(manifest)], {}, None).recipe
    assert (recipe.inputs, recipe.reading.text_field) == (("fineweb-edu",), "text")
    rows = [{"text": f"t{n}", "messages": []} for n in range(9)]
    write_jsonl(folder / "data/edu.jsonl", rows)
    path = write(folder / "e.yaml", "dataset: {dataset_type: fineweb_edu, dataset_path: data/edu.jsonl}")
    assert sorted(read_texts(prepare(path, folder / "out").path)) == [f"t{n}" for n in range(9)]


@pytest.mark.parametrize(
    ("form", "name", "kind"),
    [
        ("jsonl", "lines.txt", "jsonl"),
        ("json", "lines.txt", "jsonl"),
        ("json", "list.txt", "json"),
        ("json", "plain.jsonl", "jsonl"),
        ("csv", "table.txt", "csv"),
        ("parquet", "best.txt", "parquet"),
        ("jsonl", "plain.txt.gz", "jsonl"),
    ],
)
def test_a_declared_type_is_used_where_the_content_agrees(folder, form, name, kind):
    import gzip

    data = folder / "data"
    rows = [{"text": f"row {n}"} for n in range(9)]
    (data / "list.txt").write_text(json.dumps(rows))
    (data / "table.txt").write_text((data / "notes.csv").read_text())
    (data / "best.txt").write_bytes((data / "best.parquet").read_bytes())
    (data / "plain.txt.gz").write_bytes(gzip.compress((data / "plain.jsonl").read_bytes()))
    columns = ", text_field: body" if form == "csv" else ", mapping: {prompt: question, response: best}"
    mapping = columns if form in ("csv", "parquet") else ""
    path = write(folder / "m.yaml", f"datasets: [{{path: data/{name}, data_type: {form}{mapping}}}]")
    result = prepare(path, folder / "out")
    (source,) = read_manifest(result.path).sources
    assert source.kind == kind
    assert result.counts.quarantined == 0


def test_a_file_with_another_declared_type_is_another_job(folder):
    text = "datasets: [{path: data/lines.txt, data_type: jsonl}]"
    path = write(folder / "m.yaml", text)
    prepare(path, folder / "out")
    write(path, text.replace(", data_type: jsonl", ""))
    with pytest.raises(StoreConflictError, match="lines.txt was read as jsonl and would be read as text"):
        prepare(path, folder / "out")


@pytest.mark.parametrize(
    ("form", "name", "message"),
    [
        ("csv", "sums.jsonl", "holds JSON Lines (jsonl), and data_type says csv"),
        ("jsonl", "notes.csv", "holds CSV (csv), and data_type says jsonl"),
        ("jsonl", "list.json", "holds a list of JSON objects (json), and data_type says jsonl"),
        ("jsonl", "words.txt", "holds plain text, and data_type says jsonl"),
        ("parquet", "sums.jsonl", "data_type says parquet"),
        ("arrow", "best.parquet", "holds Parquet (parquet), and data_type says arrow"),
        ("hf_dataset", "sums.jsonl", "is a file, and data_type hf_dataset needs a folder"),
        ("csv", "lines.txt", "holds plain text, and data_type says csv"),
    ],
)
def test_a_declared_type_that_contradicts_the_content_is_refused(folder, form, name, message):
    (folder / "data/words.txt").write_text("just words\n")
    (folder / "data/list.json").write_text(json.dumps(ARITHMETIC))
    path = write(folder / "m.yaml", f"datasets: [{{path: data/{name}, data_type: {form}}}]")
    with pytest.raises(InputError, match=r"m.yaml, datasets\[0\]: ") as error:
        prepare(path, folder / "out")
    assert message in str(error.value)


def test_files_of_other_types_in_a_folder_are_skipped_and_counted(folder):
    path = write(folder / "m.yaml", "datasets: [{path: data, data_type: csv}]")
    (folder / "data/lines.txt").unlink()
    result = prepare(path, folder / "out", text_field="body")
    assert any(note.endswith("data: 3 not csv.") for note in result.notes)
    assert [source.kind for source in read_manifest(result.path).sources] == ["csv"]


def test_a_saved_data_set_and_its_split(folder):
    save_dataset(folder / "saved/train", SAVED[:5], 1)
    save_dataset(folder / "saved/test", SAVED[5:7], 1)
    (folder / "saved/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for split, count in (("", 5), (", split: test", 2)):
        text = f"datasets: [{{path: saved, data_type: hf_dataset{split}}}]"
        result = prepare(write(folder / "m.yaml", text), folder / f"out{count}")
        assert result.counts.documents == count


def test_a_file_named_twice_with_other_settings_is_refused(folder):
    text = "datasets:\n  - {path: data/sums.jsonl}\n  - {path: data/sums.jsonl, text_field: q}\n"
    path = write(folder / "m.yaml", text)
    with pytest.raises(
        InputError,
        match=r"listed by .*, datasets\[0\] and by .*, datasets\[1\] with different settings",
    ):
        prepare(path, folder / "out")
    write(path, text.replace("}", ", text_field: q}", 1))
    assert any(note.startswith("Named more than once") for note in prepare(path, folder / "out").notes)


def test_check_reads_what_prepare_would(folder):
    path = write(folder / "m.yaml", MANIFEST)
    report = batchloom.check(path)
    records = prepare(path, folder / "out").counts.records
    assert report.sound
    assert report.facts["records"].startswith(f"{records:,} (")
    write(path, "datasets: [{path: data/nowhere.jsonl}]")
    with pytest.raises(InputMissingError, match=r"m.yaml, datasets\[0\]"):
        batchloom.check(path)


def test_other_source_settings_and_weights_are_another_job(folder):
    path = write(folder / "m.yaml", MANIFEST)
    first = read_manifest(prepare(path, folder / "out").path).recipe_fingerprint
    write(path, MANIFEST.replace("weight: 2", "weight: 3"))
    with pytest.raises(StoreConflictError, match="sources: .* -> "):
        prepare(path, folder / "out")
    assert read_manifest(prepare(path, folder / "two").path).recipe_fingerprint == first
    write(path, MANIFEST.replace("text_field: body", "text_field: id"))
    assert read_manifest(prepare(path, folder / "three").path).recipe_fingerprint != first


def test_two_tokenizers_are_one_too_many(folder):
    for name in ("bytes", "gpt2"):
        text = f"dataset: {{dataset_path: data/sums.jsonl, processor_config: {{processor_name: {name}}}}}"
        write(folder / f"{name}.yaml", text)
    with pytest.raises(InputError, match="names the tokenizer bytes and .* gpt2, but a store has one"):
        batchloom.prepare([folder / "bytes.yaml", folder / "gpt2.yaml"], out=folder / "out")


def test_a_tokenizer_next_to_the_file_is_found(folder):
    (folder / "tok").mkdir()
    text = "dataset: {dataset_path: data/sums.jsonl, processor_config: {processor_name: tok}}"
    assert DatasetConfig.load(write(folder / "m.yaml", text)).tokenizer == str(folder / "tok")


@pytest.mark.parametrize("name", ["../tok", "linked"])
def test_a_tokenizer_that_leaves_the_folder_is_refused(folder, name):
    (folder / "tok").mkdir()
    (folder / "home").mkdir()
    (folder / "home/linked").symlink_to(folder / "tok")
    text = f"dataset: {{dataset_path: x, processor_config: {{processor_name: {name}}}}}"
    with pytest.raises(InputError, match=r"m.yaml: dataset\.processor_config.processor_name: .* outside"):
        list_inputs(write(folder / "home/m.yaml", text))


def test_unmapped_columns_name_the_entry(folder):
    path = write(folder / "m.yaml", "datasets: [{path: data/sums.jsonl}]")
    with pytest.raises(InputError, match=r"m.yaml, datasets\[0\]: .*sums.jsonl: no schema fits") as error:
        prepare(path, folder / "out")
    assert str(error.value).endswith("(use mapping: in that file)")


def test_a_list_in_a_list_is_refused(folder):
    write(folder / "all.yaml", MANIFEST)
    with pytest.raises(InputError, match="manifests cannot be nested"):
        list_inputs(write(folder / "m.yaml", "datasets: [{path: all.yaml}]"))


def test_a_list_in_a_block_is_a_list_alone(folder):
    write(folder / "inner.yaml", "dataset: {dataset_path: data/sums.jsonl}")
    path = write(folder / "m.yaml", "dataset: {dataset_format: yaml, dataset_path: inner.yaml}")
    with pytest.raises(InputError, match="holds more than a list of data sets"):
        list_inputs(path)
    inline = "dataset: {dataset_format: yaml, datasets: [{path: data/sums.jsonl}]}"
    assert len(list_inputs(write(folder / "m.yaml", inline))) == 1
    formed = "dataset: {dataset_format: jsonl, datasets: [{path: data/sums.jsonl}]}"
    assert list_inputs(write(folder / "m.yaml", formed))[0][1].data_type == "jsonl"


def test_yaml_in_a_folder_is_text(folder):
    write(folder / "texts" / "a.yaml", "key: value\n")
    assert read_texts(prepare(folder / "texts", folder / "out").path) == ["key: value\n"]


def test_a_manifest_is_not_converted_as_text(folder):
    with pytest.raises(InputError, match="is named like a manifest, which convert does not read"):
        convert(write(folder / "m.yaml", MANIFEST), out=folder / "out.jsonl")


@pytest.mark.parametrize("count", [2000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_very_many_data_sets(tmp_path, count):
    (tmp_path / "d").mkdir()
    for n in range(10):
        write_jsonl(tmp_path / f"d/{n}.jsonl", [{"text": "x"}])
    lines = [f"- {{path: d/{n % 10}.jsonl, data_type: jsonl, weight: 0.5}}" for n in range(count)]
    path = write(tmp_path / "m.yaml", "datasets:\n" + "\n".join(lines))
    start = time.process_time()
    inputs = list_inputs(path)
    assert (len(inputs), inputs[-1][1].weight) == (count, 0.5)
    assert time.process_time() - start < max(10, count * 1e-3)


@pytest.mark.parametrize(
    "job",
    [
        "base_model: bytes\ndatasets: [{path: data/sums.jsonl, type: chat_template}]",
        "model_name_or_path: bytes\ndataset: identity,alpaca",
        "model: bytes\ndataset: [data/sums.jsonl]",
        "dataset: data/sums.jsonl",
    ],
)
def test_the_job_of_another_trainer_is_refused_with_what_to_write(folder, job):
    path = write(folder / "job.yaml", job)
    with pytest.raises(InputError, match=r"job.yaml is the job of another trainer.* List its data sets in a manifest"):
        prepare(path, folder / "out")


def test_a_block_of_data_sets_next_to_a_model_is_read(folder):
    block = "model: {name: tiny}\ndataset: {dataset_path: data/plain.jsonl}"
    result = prepare(write(folder / "run.yaml", block), folder / "out")
    assert any("dataset is read, and the rest is not" in note for note in result.notes)


@pytest.mark.parametrize("suffix", ["", ":identity"])
def test_a_list_of_data_sets_of_another_library_is_refused(folder, suffix):
    path = write(folder / "dataset_info.json", '{"identity": {"file_name": "a.jsonl"}}')
    with pytest.raises(InputError, match="lists data sets of LLaMA-Factory or ms-swift, which is not read"):
        prepare(f"{path}{suffix}", folder / "out")


def test_a_role_that_is_no_text_is_refused():
    with pytest.raises(SettingsError, match=r"datasets\[0\].mapping.5: unknown role; roles are prompt, "):
        DatasetConfig(datasets=[{"path": "texts.jsonl", "mapping": {5: "text"}}])
