"""Agreement of ids and masks with TRL's SFTTrainer on prompts and completions.

These tests run only where TRL is installed (the extra ``bench-chat``).
"""

import json

import numpy as np
import pytest

from batchloom.chat import detect_schema, make_record_reader
from batchloom.core.document import Conversation
from batchloom.preparation import ChatEncoder, ChatRecipe, encode_conversations
from batchloom.tokens import resolve_tokenizer
from chat.conversations import CHATML, LLAMA3, SWITCHED, THINKING

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")

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


TEMPLATES = {"chatml": CHATML, "header": HEADER, "thinking": THINKING}
CASES = [("bytes", "chatml"), ("bytes", "header"), ("nfc", "thinking")]


def check_prompts_and_completions(tokenizer, hf_tokenizer, folder, template, pairs):
    hf_tokenizer.chat_template = template
    hf_tokenizer.pad_token = hf_tokenizer.eos_token
    expected = prepare_with_trl(hf_tokenizer, make_rows(pairs), folder / "out")
    conversations = [Conversation(row["prompt"] + row["completion"], completion=1) for row in make_rows(pairs)]
    unmarked_template = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    (folder / "y.jinja").write_text(unmarked_template)
    encoder = ChatEncoder(tokenizer, str(folder / "y.jinja"))
    rules = ChatRecipe(train_on="completion", prove=True)
    assert_equal(encode_conversations(conversations, encoder, rules), expected)


@pytest.mark.parametrize(("name", "template"), CASES)
def test_prompt_and_completion(tokenizers, hf_tokenizers, tmp_path, name, template):
    check_prompts_and_completions(tokenizers[name], hf_tokenizers[name], tmp_path, TEMPLATES[template], ROWS)


def test_prompts_and_completions_of_real_data(tokenizers, hf_tokenizers, tmp_path, real_data):
    lines = (real_data / "gsm8k_train.jsonl").read_text().splitlines()[:100]
    pairs = [(row["question"], row["answer"]) for row in map(json.loads, lines)]
    check_prompts_and_completions(tokenizers["bytes"], hf_tokenizers["bytes"], tmp_path, CHATML, pairs)


def assert_equal(encoded, expected):
    """Compare ids and labels with the columns that TRL prepared."""
    assert not encoded.faults
    assert encoded.lengths.tolist() == [len(ids) for ids in expected["input_ids"]]
    assert encoded.ids.tolist() == [number for ids in expected["input_ids"] for number in ids]
    labels = np.where(encoded.flags.trained, encoded.ids.astype(np.int64), -100).tolist()
    assert labels == [number for ids in expected["labels"] for number in ids]


# One newline after the thought, as in HEADER.
SWITCH = SWITCHED.replace(r"</think>\n\n", r"</think>\n")
# TRL passes the names that a table adds to a row as None; Qwen3's template compares with false.
ARGUMENTS = [{"enable_thinking": False}, {"enable_thinking": True}, {"enable_thinking": None}]


def test_template_arguments_of_rows(tokenizers, hf_tokenizers, tmp_path):
    rows = [
        row | {"chat_template_kwargs": arguments}
        for arguments in ARGUMENTS
        for row in make_rows([*ROWS[:1], *ROWS[2:]])
    ]
    (tmp_path / "x.jinja").write_text(SWITCH)
    tokenizer = hf_tokenizers["bytes"]
    tokenizer.chat_template = SWITCH
    tokenizer.pad_token = tokenizer.eos_token
    expected = prepare_with_trl(tokenizer, rows, tmp_path / "out")
    read = make_record_reader(detect_schema(rows))
    encoder = ChatEncoder(tokenizers["bytes"], str(tmp_path / "x.jinja"))
    encoded = encode_conversations(list(map(read, rows)), encoder, ChatRecipe(train_on="completion", prove=True))
    assert_equal(encoded, expected)
    # Without thinking, the empty thought is a part of the prompt.
    assert [int(mask) for mask in encoded.flags.trained[: encoded.lengths[0]]] != [
        int(mask) for mask in encoded.flags.trained[encoded.lengths[:3].sum() :][: encoded.lengths[0]]
    ]


def test_template_arguments_of_qwen3(tmp_path, real_tokenizers):
    from transformers import AutoTokenizer

    folders = [path.parent for path in real_tokenizers.rglob("tokenizer.json") if "qwen3" in str(path)]
    if not folders:
        pytest.skip("BATCHLOOM_REAL_TOKENIZERS has no qwen3")
    # With a thought, TRL takes its first token for that of the empty thought in the prompt.
    plain = [pair for pair in ROWS if "<think>" not in pair[1]]
    rows = [row | {"chat_template_kwargs": arguments} for arguments in ARGUMENTS for row in make_rows(plain)]
    expected = prepare_with_trl(AutoTokenizer.from_pretrained(folders[0]), rows, tmp_path / "out")
    encoder = ChatEncoder(resolve_tokenizer(str(folders[0])))
    read = make_record_reader(detect_schema(rows))
    encoded = encode_conversations(list(map(read, rows)), encoder, ChatRecipe(train_on="completion", prove=True))
    assert_equal(encoded, expected)
