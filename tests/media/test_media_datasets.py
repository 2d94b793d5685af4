"""Datasets with media, as manifests and ``DatasetConfig`` describe them."""

import json

import numpy as np
import pytest

import batchloom
from batchloom import DatasetConfig, InputError, SettingsError
from batchloom.preparation import read_recipe
from batchloom.store import StoreMedia
from media.processors import PROCESSORS, save_processor
from media.sample_media import make_messages, write_images, write_sounds
from media.sample_videos import make_video

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


def write_sources(name, tmp_path):
    """Write a processor and conversations for it; return their dataset type."""
    save_processor(PROCESSORS[name](), tmp_path / "processor")
    sounds = name == "qwen2_audio"
    (write_sounds if sounds else write_images)(tmp_path / "in")
    return "vision_audio" if sounds else "vision"


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_audio"])
def test_a_block_names_the_processor(name, tmp_path):
    kind = write_sources(name, tmp_path)
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
    store, reference = (batchloom.open_store(tmp_path / folder) for folder in ("store", "options"))
    assert store.fingerprint == reference.fingerprint
    assert store.manifest.processor == reference.manifest.processor
    loader = batchloom.Loader(store, global_batch_size=2, output="numpy", **config.plan_settings())
    assert loader.holds_media
    assert loader.plan.spec.overlong == "drop"


def test_a_list_mixes_images_and_texts(tmp_path):
    write_sources("qwen2_vl", tmp_path)
    texts = [{"messages": make_messages(f"What is {n}?", f"The number {n}.")} for n in range(20)]
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    (tmp_path / "list.yaml").write_text(
        "datasets:\n  - {path: in/talks.json, type: vision}\n  - {path: texts.json, type: text}\n"
    )
    block = BLOCK.format(kind="text").replace("in/talks.json", "list.yaml")
    (tmp_path / "block.yaml").write_text(block.replace("format: json", "format: yaml"))
    batchloom.prepare(tmp_path / "block.yaml", out=tmp_path / "store", val_fraction=0)
    assert len(batchloom.open_store(tmp_path / "store")) == 9 + 20
    # A bare list names no processor, so the call does.
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


def test_a_block_selects_frames(tmp_path, caplog):
    kind = write_sources("llava", tmp_path)
    (tmp_path / "in/a.mp4").write_bytes(make_video(40, 10))
    rows = [{"messages": make_messages("<video>?", "A film."), "videos": ["a.mp4"]}]
    (tmp_path / "in/talks.json").write_text(json.dumps(rows))
    manifest = tmp_path / "block.yaml"
    for number, (settings, frames) in enumerate(
        (
            ("fps: 1", 4),
            ("fps: 1\n  frame_num: 7", 4),
            ("frame_num: 7", 7),
            ("video_sampling_strategy: frame_num\n  fps: 1\n  frame_num: 3", 3),
            ("video_max_frames: 2\n  video_backend: decord", 2),
            ("fps: 1\n  video_max_frames: null\n  videos: null", 4),
            ("fps: null\n  frame_num: 7", 7),
            ("video_max_pixels: 1000", 8),
        )
    ):
        manifest.write_text(f"{BLOCK.format(kind=kind)}  {settings}\n")
        out = tmp_path / f"store{number}"
        batchloom.prepare(manifest, out=out, val_fraction=0)
        assert batchloom.inspect(out).media["video"].media == frames
    (media,) = StoreMedia(batchloom.open_store(out)).of(np.array([0]))
    assert (media[0].facts.width, media[0].facts.height) == (36, 27)
    (tmp_path / "in/talks.json").write_text('[{"text": "hello"}]')
    manifest.write_text(f"{BLOCK.format(kind='text')}  fps: 1\n")
    batchloom.prepare(manifest, out=tmp_path / "texts", val_fraction=0)
    assert f"{manifest}: not used for texts: fps." in caplog.text


def test_blocks_of_one_job_select_the_same_frames(tmp_path):
    kind = write_sources("llava", tmp_path)
    (tmp_path / "in/a.mp4").write_bytes(make_video(40, 10))
    rows = [{"messages": make_messages("<video>?", "A film."), "videos": ["a.mp4"]}]
    (tmp_path / "in/talks.json").write_text(json.dumps(rows))
    manifests = [tmp_path / f"{name}.yaml" for name in ("once", "twice", "unsaid")]
    for manifest, settings in zip(manifests, ("  fps: 1\n", "  fps: 2\n", ""), strict=True):
        manifest.write_text(f"{BLOCK.format(kind=kind)}{settings}")
    once, twice, unsaid = manifests
    with pytest.raises(InputError, match="sample video frames differently"):
        batchloom.prepare([once, twice], out=tmp_path / "out", val_fraction=0)
    batchloom.prepare([unsaid, once], out=tmp_path / "out", val_fraction=0)
    assert batchloom.inspect(tmp_path / "out").media["video"].media == 4


def test_invalid_video_settings_are_refused(tmp_path):
    block = {"dataset_type": "vision", "dataset_path": "x"}
    with pytest.raises(SettingsError) as error:
        DatasetConfig(**block, videos={"frame_num": 0, "video_max_pixels": "many"})
    assert error.value.problems == (
        "frame_num: 0 is not a whole number from 1 to 1,000,000,000",
        "video_max_pixels: 'many' is not a whole number from 1 to 1,000,000,000",
    )
    with pytest.raises(SettingsError, match="video_sampling_strategy: 'uniform' is none of fps"):
        DatasetConfig(**block, videos={"video_sampling_strategy": "uniform"})
    with pytest.raises(SettingsError, match="videos.rate: unknown setting"):
        DatasetConfig(**block, videos={"rate": 1})
    manifest = tmp_path / "flat.yaml"
    manifest.write_text("dataset: {dataset_type: vision, dataset_path: x, fps: 1}")
    assert DatasetConfig(**block, videos={"fps": 1}) == DatasetConfig.load(manifest)
    with pytest.raises(SettingsError, match="frame_num: there is none, and video_sampling"):
        DatasetConfig(**block, videos={"video_sampling_strategy": "frame_num"})


def test_media_are_never_cut(tmp_path):
    block = {"dataset_path": "x", "packing_length": 64, "filter_overlong": False}
    assert DatasetConfig(dataset_type="vision", **block).plan_settings()["overlong"] == "error"
    list_block = {"datasets": [{"path": "x", "type": "vision_audio"}], "filter_overlong": False}
    assert DatasetConfig(**list_block).plan_settings()["overlong"] == "error"
    assert DatasetConfig(dataset_type="text", **block).plan_settings()["overlong"] == "split"


def test_a_missing_processor_is_refused(tmp_path):
    file = write_images(tmp_path / "in", 1)
    block = {"dataset_type": "vision", "dataset_path": str(file)}
    with pytest.raises(InputError, match="dataset_path: 'vision' needs a processor"):
        batchloom.prepare(DatasetConfig(**block), out=tmp_path / "store", tokenizer="bytes")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"inputs:\n  - {{path: {file}, type: vision}}\n")
    with pytest.raises(SettingsError, match=r"inputs\[0\].type: 'vision' is not supported in a recipe"):
        read_recipe(recipe)
