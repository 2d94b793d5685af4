"""Data sets of images and sounds as manifests and ``DatasetConfig`` name them."""

import json

import numpy as np
import pytest

import batchloom
from batchloom import DatasetConfig, InputError, SettingsError
from batchloom.preparation import read_recipe
from batchloom.store import StoreMedia
from media.films import film
from media.made import talk, write_images, write_sounds
from media.processors import MADE, save

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
BLOCK = """
dataset:
  dataset_type: {kind}
  dataset_format: json
  dataset_path: in/talks.json
  processor_config: {{processor_name: processor, processor_type: any}}
  packing: true
  packing_length: 900
"""


def folder_of(name, tmp_path):
    """A processor and conversations with media that it takes; gives how a block calls them."""
    save(MADE[name](), tmp_path / "processor")
    sounds = name == "qwen2_audio"
    (write_sounds if sounds else write_images)(tmp_path / "in")
    return "vision_audio" if sounds else "vision"


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_audio"])
def test_a_block_names_the_processor(name, tmp_path):
    kind = folder_of(name, tmp_path)
    manifest = tmp_path / "block.yaml"
    manifest.write_text(BLOCK.format(kind=kind))
    config = DatasetConfig.load(manifest)
    batchloom.prepare(config, out=tmp_path / "store", val_fraction=0)
    batchloom.prepare(
        tmp_path / "in" / "talks.json",
        out=tmp_path / "options",
        tokenizer=str(tmp_path / "processor"),
        media={"processor": str(tmp_path / "processor")},
        val_fraction=0,
    )
    store, other = (batchloom.open_store(tmp_path / name) for name in ("store", "options"))
    assert store.fingerprint == other.fingerprint
    assert store.manifest.processor == other.manifest.processor
    loader = batchloom.Loader(store, global_batch_size=2, output="numpy", **config.plan_settings())
    assert loader.holds_media
    assert loader.plan.spec.overlong == "drop"


def test_a_list_mixes_images_and_texts(tmp_path):
    folder_of("qwen2_vl", tmp_path)
    texts = [{"messages": talk(f"What is {n}?", f"The number {n}.")} for n in range(20)]
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    (tmp_path / "list.yaml").write_text(
        "datasets:\n  - {path: in/talks.json, type: vision}\n  - {path: texts.json, type: text}\n"
    )
    block = BLOCK.format(kind="text").replace("in/talks.json", "list.yaml")
    (tmp_path / "block.yaml").write_text(block.replace("format: json", "format: yaml"))
    batchloom.prepare(tmp_path / "block.yaml", out=tmp_path / "store", val_fraction=0)
    assert len(batchloom.open_store(tmp_path / "store")) == 9 + 20
    # A bare list names no processor: the command does.
    processor = str(tmp_path / "processor")
    with pytest.raises(InputError, match=r"datasets\[0\]: 'vision' needs a processor"):
        batchloom.prepare(tmp_path / "list.yaml", out=tmp_path / "other", tokenizer=processor)
    batchloom.prepare(
        tmp_path / "list.yaml",
        out=tmp_path / "other",
        tokenizer=processor,
        media={"processor": processor},
        val_fraction=0,
    )
    assert batchloom.inspect(tmp_path / "other").media["image"].documents == 8


def test_a_block_says_which_frames_are_seen(tmp_path, caplog):
    kind = folder_of("llava", tmp_path)
    (tmp_path / "in/a.mp4").write_bytes(film(40, 10))
    rows = [{"messages": talk("<video>?", "A film."), "videos": ["a.mp4"]}]
    (tmp_path / "in/talks.json").write_text(json.dumps(rows))
    manifest = tmp_path / "block.yaml"
    for number, (said, frames) in enumerate(
        (
            ("fps: 1", 4),
            ("fps: 1\n  frame_num: 7", 4),
            ("frame_num: 7", 7),
            ("video_sampling_strategy: frame_num\n  fps: 1\n  frame_num: 3", 3),
            ("video_max_frames: 2\n  video_backend: decord", 2),
            ("video_max_pixels: 1000", 8),
        )
    ):
        manifest.write_text(f"{BLOCK.format(kind=kind)}  {said}\n")
        out = tmp_path / f"store{number}"
        batchloom.prepare(manifest, out=out, val_fraction=0)
        assert batchloom.inspect(out).media["video"].media == frames
    (found,) = StoreMedia(batchloom.open_store(out)).of(np.array([0]))
    assert (found[0].facts.width, found[0].facts.height) == (36, 27)
    (tmp_path / "in/talks.json").write_text('[{"text": "hello"}]')
    manifest.write_text(f"{BLOCK.format(kind='text')}  fps: 1\n")
    batchloom.prepare(manifest, out=tmp_path / "texts", val_fraction=0)
    assert f"{manifest}: not used for texts: fps." in caplog.text


def test_blocks_of_one_job_see_the_same_frames(tmp_path):
    kind = folder_of("llava", tmp_path)
    (tmp_path / "in/a.mp4").write_bytes(film(40, 10))
    rows = [{"messages": talk("<video>?", "A film."), "videos": ["a.mp4"]}]
    (tmp_path / "in/talks.json").write_text(json.dumps(rows))
    named = [tmp_path / f"{name}.yaml" for name in ("once", "twice", "unsaid")]
    for manifest, said in zip(named, ("  fps: 1\n", "  fps: 2\n", ""), strict=True):
        manifest.write_text(f"{BLOCK.format(kind=kind)}{said}")
    once, twice, unsaid = named
    with pytest.raises(InputError, match="sample video frames differently"):
        batchloom.prepare([once, twice], out=tmp_path / "out", val_fraction=0)
    batchloom.prepare([unsaid, once], out=tmp_path / "out", val_fraction=0)
    assert batchloom.inspect(tmp_path / "out").media["video"].media == 4


def test_settings_of_videos_that_are_none_are_told():
    said = {"dataset_type": "vision", "dataset_path": "x"}
    with pytest.raises(SettingsError) as told:
        DatasetConfig(**said, frame_num=0, video_max_pixels="many")
    assert told.value.problems == (
        "frame_num: 0 is not a whole number from 1 to 1,000,000,000",
        "video_max_pixels: 'many' is not a whole number from 1 to 1,000,000,000",
    )
    with pytest.raises(SettingsError, match="video_sampling_strategy: 'uniform' is none of fps"):
        DatasetConfig(**said, video_sampling_strategy="uniform")
    with pytest.raises(SettingsError, match="videos.rate: unknown setting"):
        DatasetConfig(**said, videos={"rate": 1})
    assert DatasetConfig(**said, videos={"fps": 1}) == DatasetConfig(**said, fps=1)
    with pytest.raises(SettingsError, match="frame_num: there is none, and video_sampling"):
        DatasetConfig(**said, video_sampling_strategy="frame_num")


def test_media_are_never_cut(tmp_path):
    said = {"dataset_path": "x", "packing_length": 64, "filter_overlong": False}
    assert DatasetConfig(dataset_type="vision", **said).plan_settings()["overlong"] == "error"
    listed = {"datasets": [{"path": "x", "type": "vision_audio"}], "filter_overlong": False}
    assert DatasetConfig(**listed).plan_settings()["overlong"] == "error"
    assert DatasetConfig(dataset_type="text", **said).plan_settings()["overlong"] == "split"


def test_what_cannot_be_said_of_them(tmp_path):
    file = write_images(tmp_path / "in", 1)
    said = {"dataset_type": "vision", "dataset_path": str(file)}
    with pytest.raises(SettingsError) as error:
        config = DatasetConfig(
            **said,
            processor_config={"processor_name": "here", "max_pixels": 5, "kwargs": {"size": 1}},
        )
        batchloom.prepare(config, out=tmp_path / "store")
    first, second = error.value.problems
    assert "processor_config.max_pixels is 5: write it into here/preprocessor_config.json" in first
    assert "processor_config.kwargs is {'size': 1}" in second
    with pytest.raises(InputError, match="dataset_path: 'vision' needs a processor"):
        batchloom.prepare(DatasetConfig(**said), out=tmp_path / "store", tokenizer="bytes")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"inputs:\n  - {{path: {file}, type: vision}}\n")
    with pytest.raises(SettingsError, match=r"inputs\[0\].type: 'vision' is not supported in a recipe"):
        read_recipe(recipe)
