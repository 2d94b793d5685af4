"""lmms-engine's configurations: names of dataset types, and folders of media."""

import json

import pytest

import batchloom
from batchloom import DatasetConfig, InputError, SettingsError
from batchloom.compat import MultiModalDataset, load_lmms_engine_config
from batchloom.preparation import read_recipe
from media.processors import PROCESSORS, save_processor
from media.sample_media import make_image, make_messages

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Folder with two data sets whose images of one name lie in two folders."""
    for name, width in (("cats", 300), ("dogs", 60)):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        make_image(width, 60).save(tmp_path / "pictures" / name / "a.png")
        rows = [{"messages": make_messages("<image>What is it?", f"One of the {name}."), "images": ["a.png"]}]
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    save_processor(PROCESSORS["qwen2_vl"](), tmp_path / "processor")
    monkeypatch.chdir(tmp_path)
    return tmp_path


BLOCK = """
dataset:
  dataset_type: {kind}
  dataset_format: yaml
  {datasets}
  processor_config: {{processor_name: {home}/processor, processor_type: qwen2_vl}}
  packing: true
  packing_strategy: first_fit
  packing_length: 900
"""
LIST = """datasets:
  - {path: cats.json, data_folder: pictures/cats, data_type: json}
  - {path: dogs.json, data_folder: pictures/dogs, data_type: json}
"""


def write_config(home, kind, form="external"):
    (home / "configs").mkdir(exist_ok=True)
    (home / "configs/list.yaml").write_text(LIST)
    external = f"dataset_path: {home}/configs/list.yaml"
    datasets = external if form == "external" else LIST.replace("\n", "\n  ")
    (home / "configs/run.yaml").write_text(BLOCK.format(kind=kind, datasets=datasets, home=home))
    return home / "configs/run.yaml"


@pytest.mark.parametrize(
    ("kind", "form"),
    [("vision", "external"), ("vision_iterable", "inline"), ("qwen3_vl", "inline"), ("qwen3_vl_iterable", "external")],
)
def test_the_data_folder_is_that_of_the_media(home, kind, form):
    config = load_lmms_engine_config(write_config(home, kind, form))
    assert config.dataset_type == "vision"
    result = batchloom.prepare(config, out=home / "store", val_fraction=0)
    store = batchloom.open_store(result.path)
    assert result.counts.documents == 2
    lengths = [len(store[number].ids) for number in range(2)]
    assert lengths[0] > lengths[1]
    rows = MultiModalDataset(config, out=home / "rows", output="numpy")
    rows.build()
    assert len(rows[0]["image_grid_thw"]) == 2


def test_a_manifest_names_the_folders_of_media(home):
    manifest = home / "all.yaml"
    processor = str(home / "processor")
    manifest.write_text(LIST.replace("data_folder", "type: vision, media_folder"))
    media = {"processor": processor}
    options = {"tokenizer": processor, "media": media, "val_fraction": 0}
    first = batchloom.open_store(batchloom.prepare(manifest, out=home / "a", **options).path)
    # The folders are recorded without the location of the machine; the report has it for loaders.
    recorded = first.manifest.recipe["sources"]
    assert [source["media_folder_name"] for source in recorded] == ["cats", "dogs"]
    loader = batchloom.Loader(first, seq_len=900, global_batch_size=1, output="numpy")
    assert len(loader[0]["image_grid_thw"]) == 2
    with pytest.raises(SettingsError, match=r"sources\[0\].media_folder: .*'cats', whose location it does not hold"):
        batchloom.prepare(recipe=home / "a", out=home / "b")
    recipe = home / "recipe.yaml"
    recipe.write_text(LIST.replace("datasets", "inputs").replace("data_folder", "media_folder"))
    assert [source.media_folder for source in read_recipe(recipe).sources] == [
        str(home / "pictures" / name) for name in ("cats", "dogs")
    ]


def test_media_folders_are_checked(home):
    manifest = home / "all.yaml"
    media = {"processor": str(home / "processor")}
    options = {"tokenizer": str(home / "processor"), "val_fraction": 0}
    manifest.write_text("datasets:\n  - {path: cats.json, type: vision, media_folder: ../elsewhere}\n")
    with pytest.raises(InputError, match=r"datasets\[0\].media_folder: '../elsewhere' lies outside of the folder"):
        batchloom.prepare(manifest, out=home / "s", media=media, **options)
    manifest.write_text("datasets:\n  - {path: cats.json, media_folder: pictures/cats}\n")
    with pytest.raises(SettingsError, match=r"media_folder: no media are read; write type: vision"):
        batchloom.prepare(manifest, out=home / "s", **options)
    manifest.write_text("datasets:\n  - {path: cats.json, type: vision, media_folder: 5}\n")
    with pytest.raises(SettingsError, match=r"datasets\[0\].media_folder: 5 is not a text"):
        batchloom.prepare(manifest, out=home / "s", media=media, **options)


@pytest.mark.parametrize("name", ["qwen_omni", "qwen_omni_iterable"])
def test_names_of_types_with_sounds(name):
    assert DatasetConfig(dataset_type=name, dataset_path="x").dataset_type == "vision_audio"
    assert DatasetConfig(datasets=[{"path": "x", "type": name}]).datasets[0].type == "vision_audio"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llava_video", "'llava_video' of lmms-engine writes the times of frames"),
        ("llava_ov2_iterable", "reads the streams of video codecs"),
        ("aero_realtime_iterable", "aligns speech and text by time"),
        ("bagel_iterable", "generates images"),
        ("rae", "trains an image encoder"),
        ("sit", "without text; train it with lmms-engine"),
        ("visoin", "'visoin' is none of text, fineweb_edu, vision, vision_audio; did you mean 'vision'"),
    ],
)
def test_types_without_an_equivalent_are_refused(name, message):
    with pytest.raises(SettingsError, match=message):
        DatasetConfig(dataset_type=name, dataset_path="x")


def test_one_path_begins_in_the_current_folder(home):
    (home / "configs").mkdir()
    (home / "texts.jsonl").write_text('{"text": "hello"}\n')
    (home / "configs/run.yaml").write_text(
        "dataset:\n  dataset_type: text\n  dataset_format: jsonl\n  dataset_path: texts.jsonl\n"
    )
    config = load_lmms_engine_config(home / "configs/run.yaml")
    assert batchloom.prepare(config, out=home / "s", tokenizer="bytes", val_fraction=0).counts.documents == 1
