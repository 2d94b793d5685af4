"""TRL's DPO, KTO and GRPO trainers on stores, through the examples."""

import json
import math
import shutil
import subprocess
import sys

import pytest

import batchloom
from batchloom.store import StoredPrompts
from chat.conftest import make_byte_level_tokenizer
from chat.conversations import CHATML
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
