"""Agreement of ids and masks with TRL's SFTTrainer on prompts and completions.

These tests run only where TRL is installed (the extra ``bench-chat``).
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from batchloom.core.document import Conversation
from batchloom.preparation import ChatEncoder, ChatRules, encode_conversations
from chat.conversations import CHATML, LLAMA3, THINKING

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")

REAL = Path(os.environ.get("BATCHLOOM_REAL_DATA", "/nonexistent"), "gsm8k_train.jsonl")
ROWS = [
    ("hi", "hello there"),
    ("2 + 2?", "<think>\nadd\n</think>\n\n4"),
    (" spaces ", "ça va, 日本語 😀"),
    ("x", "y"),
]


def make_rows(pairs):
    return [
        {
            "prompt": [{"role": "user", "content": question}],
            "completion": [{"role": "assistant", "content": answer}],
        }
        for question, answer in pairs
    ]


def prepare_with_trl(tokenizer, examples, folder):
    import datasets
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        pad_token_id=tokenizer.eos_token_id,
    )
    arguments = trl.SFTConfig(
        output_dir=str(folder), max_length=None, report_to=[], use_cpu=True, bf16=False,
        completion_only_loss=True,
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        LlamaForCausalLM(config),
        args=arguments,
        processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list(examples),
    )
    return trainer.train_dataset


# TRL tokenizes the prompt separately. GPT-2's pre-tokenizer splits "\n\n" differently before a word,
# so TRL trains the end of the header (and warns); batchloom does not.
HEADER = LLAMA3.replace("\n\n", "\n")


@pytest.mark.parametrize("template", [CHATML, HEADER, THINKING], ids=["chatml", "header", "thinking"])
@pytest.mark.parametrize("name", ["bytes", "nfc"])
def test_prompt_and_completion(tokenizers, hf_tokenizers, tmp_path, name, template):
    pairs = ROWS
    if REAL.is_file():
        lines = map(json.loads, REAL.read_text().splitlines()[:200])
        pairs = pairs + [(row["question"], row["answer"]) for row in lines]
    (tmp_path / "x.jinja").write_text(template)
    tokenizer = hf_tokenizers[name]
    tokenizer.chat_template = template
    tokenizer.pad_token = tokenizer.eos_token
    expected = prepare_with_trl(tokenizer, make_rows(pairs), tmp_path / "out")
    conversations = [Conversation(row["prompt"] + row["completion"], completion=1) for row in make_rows(pairs)]
    unmarked_template = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    (tmp_path / "y.jinja").write_text(unmarked_template)
    encoder = ChatEncoder(tokenizers[name], str(tmp_path / "y.jinja"))
    rules = ChatRules(train_on="completion", prove=True)
    encoded = encode_conversations(conversations, encoder, rules)
    assert not encoded.faults
    assert encoded.lengths.tolist() == [len(ids) for ids in expected["input_ids"]]
    assert encoded.ids.tolist() == [number for ids in expected["input_ids"] for number in ids]
    labels = np.where(encoded.mask, encoded.ids.astype(np.int64), -100).tolist()
    assert labels == [number for ids in expected["labels"] for number in ids]
