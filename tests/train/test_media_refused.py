"""Models that are not made for the media of a store are refused before anything is trained or written."""

import json
import shutil

import pytest

import batchloom
from batchloom import InputError
from batchloom.core.errors import TrainError
from media.models import make
from train.families import Families
from train.folders import write_model
from train.runs import run_training

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    return Families(tmp_path_factory.mktemp("families"))


def stating(folder, out, **entries):
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, **entries}))
    return out


def refused(family, init, out, said, error=InputError):
    with pytest.raises(error, match=said):
        family.train(out / "run", {"model": {"init": str(init)}})
    assert not (out / "run").exists()


def test_models_for_other_data_are_refused(families, tmp_path):
    seeing, hearing, llava = (families[name] for name in ("qwen2_vl", "qwen2_audio", "llava"))
    write_model(tmp_path / "text", vocab_size=512)
    for family, init, said in (
        (seeing, tmp_path / "text", "LlamaForCausalLM, which accepts only text, and the store"),
        (
            hearing,
            seeing.folder,
            "which does not take feature_attention_mask, input_features, the features of each audio in",
        ),
        (llava, hearing.folder, "does not take pixel_values, the features of each image in"),
        (
            seeing,
            stating(seeing.folder, tmp_path / "other", image_token_id=7),
            r"image_token_id 7, but in .* each image has the placeholder '<\|image_pad\|>', which is 5",
        ),
    ):
        refused(family, init, tmp_path, said)
    with pytest.raises(InputError, match="own GPT accepts only text: .*train --init FOLDER"):
        run_training(seeing.store, tmp_path / "run", {"steps": 1})


def test_a_model_with_too_few_ids_or_patches_of_another_size_is_refused(families, tmp_path):
    family = families["llava"]
    few = make_llava(family, tmp_path / "few", vocab_size=250)
    refused(family, few, tmp_path, r"has ids up to 294 and the model in .* has 250", TrainError)
    large = make_llava(family, tmp_path / "large", patch_size=7)
    said = "LlavaForConditionalGeneration of .* cannot process documents of .* with their media: .*own processor"
    refused(family, large, tmp_path, said, TrainError)


def make_llava(family, folder, *, vocab_size=None, patch_size=14):
    model = make("llava", family.made)
    config = model.config
    config.text_config.vocab_size = vocab_size or config.text_config.vocab_size
    config.vision_config.patch_size = patch_size
    type(model)(config).save_pretrained(folder)
    return folder


def test_a_model_that_sees_is_refused_for_text(families, tmp_path):
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"text": f"Line {n}. " * 9}) + "\n" for n in range(60)))
    family = families["llava"]
    made = batchloom.prepare(file, out=tmp_path / "text", tokenizer=str(family.processor))
    with pytest.raises(InputError, match="not a causal language model, and the store holds only text"):
        run_training(
            batchloom.open_store(made.path),
            tmp_path / "run",
            {"model": {"init": str(family.folder)}},
        )
