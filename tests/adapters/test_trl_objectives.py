"""TRL's DPO, KTO and GRPO trainers on stores, through the examples."""

import json
import math
import shutil
import subprocess
import sys

import pytest

import batchloom
from batchloom.batches import PairMediaCollator
from batchloom.store import PreferencePairs, StoredPrompts
from chat.conftest import make_byte_level_tokenizer
from chat.conversations import CHATML
from media.models import make_model
from media.processors import PROCESSORS, save_processor
from media.sample_media import make_image
from media.test_tokens import PLACEHOLDERS, TEMPLATE
from preparation.stores import write_jsonl

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")

PAIRS = [{"prompt": f"{n} + {n}?", "chosen": f"It is {2 * n}.", "rejected": "No idea."} for n in range(40)]
LABELLED = [{"prompt": f"{n} + {n}?", "completion": f"It is {2 * n}.", "label": n % 2 == 0} for n in range(40)]
PROMPTS = [{"question": f"{n} + {n}?", "answer": f"{2 * n}", "level": n} for n in range(40)]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = make_byte_level_tokenizer(tmp_path_factory.mktemp("tokenizer") / "bytes")
    path = folder / "tokenizer_config.json"
    template = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    settings = {"chat_template": template, "pad_token": "<|endoftext|>", "bos_token": None}
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return folder


def prepare(tmp_path, rows, tokenizer_folder, **settings):
    write_jsonl(tmp_path / "in.jsonl", rows)
    settings = {"tokenizer": str(tokenizer_folder), "val_fraction": 0, **settings}
    return str(batchloom.prepare(tmp_path / "in.jsonl", out=tmp_path / "store", **settings).path)


def test_dpo_learns_to_prefer(tokenizer_folder, tmp_path):
    from batchloom.examples.dpo_trainer import train

    losses = train(prepare(tmp_path, PAIRS, tokenizer_folder), str(tokenizer_folder), str(tmp_path / "run"), steps=10)
    # The first loss of two equal models is that of a coin.
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.slow
def test_kto_learns_to_prefer(tokenizer_folder, tmp_path):
    from batchloom.examples.kto_trainer import train

    data = prepare(tmp_path, LABELLED, tokenizer_folder)
    losses = train(data, str(tokenizer_folder), str(tmp_path / "run"), steps=10)
    assert losses[0] == pytest.approx(0.5, abs=1e-5)
    assert losses[-1] < losses[0]


def test_kto_takes_a_store_of_pairs(tokenizer_folder, tmp_path):
    from batchloom.examples.kto_trainer import train

    data = prepare(tmp_path, PAIRS, tokenizer_folder)
    assert train(data, str(tokenizer_folder), str(tmp_path / "run"), steps=2)[0] == pytest.approx(0.5, abs=1e-5)


def test_grpo_gives_the_columns_to_the_reward_and_renders_the_stored_ids(tokenizer_folder, tmp_path, monkeypatch):
    from batchloom.examples import grpo_trainer

    data = prepare(tmp_path, PROMPTS, tokenizer_folder, prompts=True, carry="answer,level")
    seen, rendered = [], []

    class Watched(grpo_trainer.GRPOTrainer):
        def _tokenize_prompts(self, prompts):
            result = super()._tokenize_prompts(prompts)
            rendered.extend(result[0])
            return result

    def reward(prompts, completions, answer, level, **_):
        seen.extend(zip(prompts, answer, level, strict=True))
        return grpo_trainer.reward_likeness(completions, answer)

    monkeypatch.setattr(grpo_trainer, "GRPOTrainer", Watched)
    rewards = grpo_trainer.train(data, str(tokenizer_folder), str(tmp_path / "run"), steps=3, reward=reward)
    assert len(rewards) == 3
    assert len(seen) == len(rendered) == 12
    prompts = StoredPrompts(batchloom.open_store(data))
    for (messages, answer, level), ids in zip(seen, rendered, strict=True):
        assert {"prompt": messages, "answer": answer, "level": level} == prompts[level]
        assert list(ids) == prompts.ids(level)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows"), [("dpo_trainer", PAIRS), ("kto_trainer", LABELLED), ("grpo_trainer", PROMPTS)]
)
def test_the_examples_run_from_the_command_line(tokenizer_folder, tmp_path, name, rows):
    settings = {"prompts": True, "carry": "answer"} if name == "grpo_trainer" else {}
    data = prepare(tmp_path, rows, tokenizer_folder, **settings)
    shutil.copy(batchloom.examples.__path__[0] + f"/{name}.py", tmp_path / "example.py")
    command = [sys.executable, str(tmp_path / "example.py"), data, str(tokenizer_folder), str(tmp_path / "run")]
    output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout
    assert ("step    19  loss" in output) if name != "grpo_trainer" else output.strip().endswith("]")


@pytest.mark.slow
def test_dpo_trains_a_multimodal_model_with_the_features_of_the_store(tmp_path):
    from datasets import IterableDataset
    from trl import DPOConfig
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    from batchloom.examples.dpo_trainer import StoredPairsTrainer

    processor = PROCESSORS["qwen2_vl"]()
    folder = save_processor(processor, tmp_path / "processor")
    template = TEMPLATE.replace("KIND", "image").replace("PLACE", PLACEHOLDERS["qwen2_vl"])
    (folder / "chat_template.jinja").write_text(template)
    make_image(56, 84, seed=1).save(tmp_path / "a.png")
    question = {"role": "user", "content": "<image>?"}
    rows = [
        {"prompt": [question], "chosen": [{"role": "assistant", "content": f"a {n}"}], "images": ["a.png"],
         "rejected": [{"role": "assistant", "content": "no"}]}
        for n in range(8)
    ]  # fmt: skip
    store = batchloom.open_store(prepare(tmp_path, rows, folder, media={"processor": str(folder)}))
    args = DPOConfig(
        str(tmp_path / "run"),
        per_device_train_batch_size=2,
        max_steps=6,
        learning_rate=1e-2,
        max_length=None,
        remove_unused_columns=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    trainer = StoredPairsTrainer(
        make_model("qwen2_vl", processor),
        ref_model=make_model("qwen2_vl", processor),
        args=args,
        train_dataset=IterableDataset.from_generator(PreferencePairs, gen_kwargs={"store": store}),
        processing_class=processor.tokenizer,
        data_collator=PairMediaCollator(PreferencePairs(store), DataCollatorForPreference(pad_token_id=0)),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5)
    assert losses[-1] < 0.9 * losses[0]
