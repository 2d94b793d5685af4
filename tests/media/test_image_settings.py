"""Settings of the image processor that override those in its files."""

import json
import shutil

import numpy as np
import pytest

import batchloom
from batchloom import DatasetConfig, InputError, SettingsError
from batchloom.core.errors import StoreConflictError
from batchloom.media import open_processor
from batchloom.preparation import MediaRecipe
from media.processors import PROCESSORS, save_processor
from media.sample_media import make_image, write_images, write_sounds

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
LIMITS = {"max_pixels": 28 * 28 * 16, "min_pixels": 28 * 28 * 9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("settings")
    write_images(folder / "in")
    save_processor(PROCESSORS["qwen2_vl"](), folder / "processor")
    save_processor(PROCESSORS["qwen2_vl"](**LIMITS), folder / "limited")
    return folder


@pytest.fixture(scope="module")
def limited(folder):
    """Store made with a processor whose files hold the limits."""
    processor = str(folder / "limited")
    options = {"tokenizer": processor, "media": {"processor": processor}, "val_fraction": 0}
    return batchloom.open_store(batchloom.prepare(folder / "in/talks.json", out=folder / "expected", **options).path)


def read_tokens(store):
    return [store[number].ids.tolist() for number in range(len(store))]


def assert_equal_batches(first, second):
    options = {"seq_len": 900, "global_batch_size": 2, "output": "numpy", "rank": 0, "world_size": 1}
    loaders = [batchloom.Loader(store, **options) for store in (first, second)]
    assert len(loaders[0]) == len(loaders[1]) > 0
    for expected, actual in zip(*loaders, strict=True):
        for name in ("input_ids", "labels", "pixel_values", "image_grid_thw"):
            np.testing.assert_array_equal(np.asarray(expected[name]), np.asarray(actual[name]))


MANIFESTS = {
    "limits": dict(LIMITS),
    "settings by name": {"kwargs": dict(LIMITS)},
    "size": {"kwargs": {"size": {"shortest_edge": LIMITS["min_pixels"], "longest_edge": LIMITS["max_pixels"]}}},
    "lmms-engine": {"extra_kwargs": {f"image_{name}": value for name, value in LIMITS.items()}},
    "both": {"max_pixels": LIMITS["max_pixels"], "extra_kwargs": {"image_min_pixels": LIMITS["min_pixels"]}},
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_gives_the_store_of_a_processor_with_these_settings(folder, limited, tmp_path, name):
    processor = {"processor_name": str(folder / "processor"), **MANIFESTS[name]}
    config = DatasetConfig(
        dataset_type="vision", dataset_path=str(folder / "in/talks.json"), processor_config=processor
    )
    batchloom.prepare(config, out=tmp_path / "store", val_fraction=0)
    store = batchloom.open_store(tmp_path / "store")
    assert batchloom.check(store.path).sound
    assert read_tokens(store) == read_tokens(limited)
    assert_equal_batches(limited, store)


def test_image_settings_are_part_of_the_identity(folder, tmp_path):
    processor, file = str(folder / "processor"), folder / "in/talks.json"
    media = {"processor": processor, "image_settings": LIMITS}
    options = {"tokenizer": processor, "val_fraction": 0}
    result = batchloom.prepare(file, out=tmp_path / "store", media=media, **options)
    store = batchloom.open_store(result.path)
    assert store.manifest.recipe["reading"]["media"]["image_settings"] == LIMITS
    plain = batchloom.open_store(
        batchloom.prepare(file, out=tmp_path / "plain", media={"processor": processor}, **options).path
    )
    assert "image_settings" not in plain.manifest.recipe["reading"]["media"]
    assert store.manifest.processor.fingerprint != plain.manifest.processor.fingerprint
    assert store.manifest.recipe_fingerprint != plain.manifest.recipe_fingerprint
    assert read_tokens(store) != read_tokens(plain)
    shutil.copytree(folder / "in", tmp_path / "in")
    more = (tmp_path / "in/talks.json").rename(tmp_path / "in/more.json")
    other_media = {**media, "image_settings": {"max_pixels": 28 * 28 * 17}}
    with pytest.raises(StoreConflictError, match="has processor Qwen2VLProcessor"):
        batchloom.prepare(more, out=result.path, append=True, media=other_media)
    # The settings of the store stay if they are not given again.
    grown = batchloom.prepare(more, out=result.path, append=True, media={"processor": processor}, dedup="none")
    assert grown.generation == 2
    tokens = read_tokens(batchloom.open_store(result.path))
    assert tokens[len(store) :] == tokens[: len(store)]


def test_a_recipe_with_image_settings_rebuilds_its_store(folder, tmp_path, monkeypatch):
    media = {"processor": str(folder / "processor"), "image_settings": LIMITS}
    batchloom.prepare(
        folder / "in/talks.json", out=tmp_path / "out", tokenizer=media["processor"], media=media, val_fraction=0
    )
    monkeypatch.chdir(folder)
    batchloom.prepare(recipe=tmp_path / "out", out=tmp_path / "again")
    first, second = ((tmp_path / name / "dataset_metadata.json").read_bytes() for name in ("out", "again"))
    assert first == second


SETTINGS = {
    "qwen2_vl": [LIMITS, {"max_pixels": 28 * 28 * 30}, {"size": {"shortest_edge": 3136, "longest_edge": 40000}}],
    "qwen3_vl": [{"max_pixels": 32 * 32 * 8, "min_pixels": 32 * 32}],
    "smolvlm": [{"do_image_splitting": False}, {"size": {"longest_edge": 112}}],
    "llava": [{"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}],
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_do_what_they_do_in_from_pretrained(tmp_path, name):
    from transformers import AutoImageProcessor

    save_processor(PROCESSORS[name](), tmp_path / "p")
    default = open_processor(tmp_path / "p")
    for settings in SETTINGS[name]:
        expected = AutoImageProcessor.from_pretrained(tmp_path / "p", **settings)
        processor = open_processor(tmp_path / "p", None, settings)
        (tmp_path / "written").mkdir(exist_ok=True)
        processor.files.write(tmp_path / "written")
        written = AutoImageProcessor.from_pretrained(tmp_path / "written")
        images = [make_image(333, 777), make_image(640, 37)]
        for image in images:
            expected_values, values = (
                np.asarray(part(images=[image], return_tensors="np")["pixel_values"]) for part in (expected, written)
            )
            np.testing.assert_array_equal(expected_values, values)
        assert processor.files.fingerprint != default.files.fingerprint
        assert processor.notes == default.notes


def test_a_size_overrides_the_limits_of_older_files(tmp_path):
    folder = save_processor(PROCESSORS["qwen2_vl"](), tmp_path / "p")
    file = tmp_path / "p/preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "min_pixels": 3136, "max_pixels": 50176}))
    size = {"shortest_edge": 3136, "longest_edge": 28 * 28 * 8}
    assert open_processor(folder, None, {"size": size}).families["image"].most_pixels == 28 * 28 * 8
    assert open_processor(folder, None, {"max_pixels": 28 * 28 * 9}).families["image"].most_pixels == 28 * 28 * 9


BAD_SETTINGS = {
    "another processor's": ("llava", {"max_pixels": 5}, r"media.image_settings.max_pixels: unknown setting"),
    "unknown": ("qwen2_vl", {"max_pixel": 5}, r"max_pixel: unknown setting; did you mean 'max_pixels'"),
    "no images": ("qwen2_audio", {"max_pixels": 5}, "Qwen2AudioProcessor cannot be loaded with {'max_pixels': 5}"),
    "contradiction": ("qwen2_vl", {"max_pixels": 9}, "max_pixels: 9 is less than min_pixels, 3,136"),
    "a value of another type": ("qwen2_vl", {"patch_size": "x"}, "patch_size|invalid settings"),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_settings_that_a_processor_does_not_have_are_refused(tmp_path, name):
    family, settings, message = BAD_SETTINGS[name]
    save_processor(PROCESSORS[family](), tmp_path / "p")
    (write_sounds if family == "qwen2_audio" else write_images)(tmp_path / "in", 1)
    media = {"processor": str(tmp_path / "p"), "image_settings": settings}
    with pytest.raises((SettingsError, InputError), match=message):
        batchloom.prepare(tmp_path / "in/talks.json", out=tmp_path / "s", tokenizer=str(tmp_path / "p"), media=media)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (5, "is no mapping of settings by name"),
        ({"max_pixels": 0}, "has max_pixels 0, which is no number of pixels above 0"),
        ({"min_pixels": float("nan")}, "has min_pixels nan"),
        ({"max_pixels": True}, "has max_pixels True"),
        ({1: 2}, "is no mapping"),
        ({"size": {1, 2}}, "holds what JSON cannot hold"),
    ],
)
def test_invalid_values_are_refused(value, message):
    (problem,) = MediaRecipe(processor="x", image_settings=value).problems()
    assert problem.startswith("media.image_settings: ")
    assert message in problem


def test_invalid_settings_in_a_manifest_are_refused_together(tmp_path):
    file = write_images(tmp_path / "in", 1)
    processor = {
        "processor_name": "here",
        "max_pixels": 5,
        "kwargs": {"max_pixels": 6},
        "extra_kwargs": {"video_max_pixels": 1, "image_max_pixel": 1, "audio_max_length": 3},
    }
    block = {"dataset_type": "vision", "dataset_path": str(file), "processor_config": processor}
    with pytest.raises(SettingsError) as error:
        batchloom.prepare(DatasetConfig(**block), out=tmp_path / "store")
    problems = [problem.partition("processor_config.")[2] for problem in error.value.problems]
    assert [problem.partition(":")[0] for problem in problems] == [
        "kwargs.max_pixels",
        "extra_kwargs.video_max_pixels",
        "extra_kwargs.image_max_pixel",
        "extra_kwargs.audio_max_length",
    ]
    assert "did you mean 'image_max_pixels'" in problems[2]


def test_blocks_of_one_job_have_equal_settings(folder, tmp_path):
    configs = [
        DatasetConfig(
            dataset_type="vision",
            dataset_path=str(folder / "in/talks.json"),
            processor_config={"processor_name": str(folder / "processor"), "max_pixels": pixels},
        )
        for pixels in (28 * 28 * 16, 28 * 28 * 17)
    ]
    with pytest.raises(InputError, match="set the image processor differently"):
        batchloom.prepare(configs, out=tmp_path / "out", val_fraction=0)


def test_image_settings_of_texts_are_not_used(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "hello"}\n' * 2)
    processor = {"processor_name": "bytes", "max_pixels": 5, "extra_kwargs": {"anything": 1}}
    config = DatasetConfig(dataset_path=str(tmp_path / "a.jsonl"), processor_config=processor)
    assert batchloom.prepare(config, out=tmp_path / "out", val_fraction=0).counts.documents == 1
