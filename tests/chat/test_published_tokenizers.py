"""Published tokenizers with their own templates.

BATCHLOOM_REAL_TOKENIZERS names a folder of folders, each with a tokenizer.json and a
tokenizer_config.json. Without it, the tests are skipped.
"""

import json
import os
from pathlib import Path

import pytest

from batchloom.core.document import Conversation
from batchloom.preparation import ChatEncoder, ChatRecipe, encode_conversations
from batchloom.tokens import resolve_tokenizer
from chat.conversations import make_conversation

ROOT = os.environ.get("BATCHLOOM_REAL_TOKENIZERS")
FOLDERS = sorted(path.parent for path in Path(ROOT).rglob("tokenizer.json")) if ROOT else []
CALL = {"type": "function", "function": {"name": "find", "arguments": {"city": "Zürich", "n": 3}}}
CONVERSATIONS = [
    make_conversation("hi", "hello", system="Be brief."),
    make_conversation(" hi \n", "\n hello\n\n", "ça va?", "<think>\nhm\n</think>\n\nbien 😀"),
    make_conversation("e\u0301\u0323 \u212b \u1e9b\u0323", "\u0301x", "日本語", "ﬁn"),
    make_conversation("x", "", "y", "z"),
    Conversation(
        [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "sunny"},
            {"role": "assistant", "content": "It is sunny."},
        ]
    ),
]


@pytest.fixture(scope="module", params=FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def encoder_and_hf_tokenizer(request):
    from transformers import PreTrainedTokenizerFast

    config = json.loads((request.param / "tokenizer_config.json").read_text())
    control_tokens = resolve_tokenizer(str(request.param)).chat.tokens
    hf_tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(request.param / "tokenizer.json"),
        chat_template=config["chat_template"],
        clean_up_tokenization_spaces=False,
        **control_tokens,
    )
    return ChatEncoder(resolve_tokenizer(str(request.param))), hf_tokenizer


@pytest.mark.skipif(not FOLDERS, reason="BATCHLOOM_REAL_TOKENIZERS names no tokenizers")
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_ids_are_those_of_the_own_template(encoder_and_hf_tokenizer, conversation):
    encoder, hf_tokenizer = encoder_and_hf_tokenizer
    encoded = encode_conversations([conversation], encoder, ChatRecipe(train_on="all", prove=True))
    if encoded.faults and "rejects it" in encoded.faults[0].reason:
        with pytest.raises(Exception):  # noqa: B017 - whatever the template raises
            hf_tokenizer.apply_chat_template(conversation.messages)
        return
    if encoded.faults and "leaves out tool calls" in encoded.faults[0].reason:
        assert CALL["function"]["name"] not in hf_tokenizer.apply_chat_template(conversation.messages, tokenize=False)
        return
    assert not encoded.faults
    assert encoded.ids.tolist() == hf_tokenizer.apply_chat_template(conversation.messages)["input_ids"]


@pytest.mark.skipif(not FOLDERS, reason="BATCHLOOM_REAL_TOKENIZERS names no tokenizers")
def test_gsm8k(encoder_and_hf_tokenizer, real_data):
    encoder, hf_tokenizer = encoder_and_hf_tokenizer
    lines = (real_data / "gsm8k_train.jsonl").read_text().splitlines()[:500]
    rows = [json.loads(line) for line in lines]
    conversations = [make_conversation(row["question"], row["answer"]) for row in rows]
    encoded = encode_conversations(conversations, encoder, ChatRecipe(prove=True))
    assert not encoded.faults
    assert not encoded.dropped
    expected = hf_tokenizer.apply_chat_template([c.messages for c in conversations])["input_ids"]
    assert encoded.ids.tolist() == [number for ids in expected for number in ids]
    bounds = [0, *encoded.lengths.cumsum().tolist()]
    for n, row in enumerate(rows):
        document = slice(bounds[n], bounds[n + 1])
        trained = encoder.tokenizer.decode(encoded.ids[document][encoded.flags.trained[document]])
        assert row["answer"].strip() in trained
        assert row["question"].strip() not in trained


@pytest.mark.skipif(not FOLDERS, reason="BATCHLOOM_REAL_TOKENIZERS names no tokenizers")
def test_chatml_writes_the_tools_that_qwen_writes(encoder_and_hf_tokenizer):
    encoder, hf_tokenizer = encoder_and_hf_tokenizer
    if "<tool_response>" not in (hf_tokenizer.chat_template or ""):
        pytest.skip("its template is not of Qwen's form")
    chatml = ChatEncoder(encoder.tokenizer, "chatml")
    tool = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
    # Qwen3 writes an empty thought only into the last answer.
    messages = [
        {"role": "system", "content": "Be brief."},
        *CONVERSATIONS[-1].messages,
        {"role": "assistant", "content": "Two:", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "a"},
        {"role": "tool", "content": "b"},
        {"role": "user", "content": "thanks"},
    ]
    messages[2] = messages[2] | {"content": ""}
    encoded = encode_conversations([Conversation(messages, [tool])], chatml, ChatRecipe(train_on="all", prove=True))
    assert not encoded.faults
    expected = hf_tokenizer.apply_chat_template(messages, tools=[tool])["input_ids"]
    assert encoded.ids.tolist() == expected
