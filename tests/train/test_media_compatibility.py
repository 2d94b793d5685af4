"""Models that do not fit the media of a store are refused before training."""

import json
import shutil

import pytest

import batchloom
from batchloom import InputError
from batchloom.core.errors import TrainError
from media.models import make_model
from train.families import Families
from train.model_folders import write_model
from train.runs import run_training

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    return Families(tmp_path_factory.mktemp("families"))


def copy_with_config(folder, out, **entries):
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, **entries}))
    return out


def check_refused(family, model_folder, out, message, error=InputError):
    with pytest.raises(error, match=message):
        family.train(out / "run", {"model": {"init": str(model_folder)}})
    assert not (out / "run").exists()


def test_models_for_other_data_are_refused(families, tmp_path):
    image_family, audio_family, llava = (families[name] for name in ("qwen2_vl", "qwen2_audio", "llava"))
    write_model(tmp_path / "text", vocab_size=512)
    for family, model_folder, message in (
        (image_family, tmp_path / "text", "LlamaForCausalLM, which is not a multimodal language model, and the store"),
        (
            audio_family,
            image_family.folder,
            "which does not take feature_attention_mask, input_features, the features of each audio in",
        ),
        (llava, audio_family.folder, "does not take pixel_values, the features of each image in"),
        (
            image_family,
            copy_with_config(image_family.folder, tmp_path / "other", image_token_id=7),
            r"image_token_id 7, but in .* each image has the placeholder '<\|image_pad\|>', which is 5",
        ),
    ):
        check_refused(family, model_folder, tmp_path, message)
    with pytest.raises(InputError, match="own GPT accepts only text: .*train --init FOLDER"):
        run_training(image_family.store, tmp_path / "run", {"steps": 1})


def test_a_model_with_too_few_ids_or_patches_of_another_size_is_refused(families, tmp_path):
    family = families["llava"]
    few_ids = make_llava(family, tmp_path / "few", vocab_size=250)
    check_refused(family, few_ids, tmp_path, r"has ids up to 294 and the model in .* has 250", TrainError)
    small_patches = make_llava(family, tmp_path / "large", patch_size=7)
    message = "LlavaForConditionalGeneration of .* cannot process documents of .* with their media: .*own processor"
    check_refused(family, small_patches, tmp_path, message, TrainError)


def make_llava(family, folder, *, vocab_size=None, patch_size=14):
    model = make_model("llava", family.made)
    config = model.config
    config.text_config.vocab_size = vocab_size or config.text_config.vocab_size
    config.vision_config.patch_size = patch_size
    type(model)(config).save_pretrained(folder)
    return folder


def test_a_multimodal_model_is_refused_for_text(families, tmp_path):
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"text": f"Line {n}. " * 9}) + "\n" for n in range(60)))
    family = families["llava"]
    result = batchloom.prepare(file, out=tmp_path / "text", tokenizer=str(family.processor))
    with pytest.raises(InputError, match="not a causal language model, and the store holds only text"):
        run_training(
            batchloom.open_store(result.path),
            tmp_path / "run",
            {"model": {"init": str(family.folder)}},
        )
