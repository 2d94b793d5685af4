"""Published tokenizers with their own templates, where BATCHLOOM_REAL_TOKENIZERS has them.

A folder of folders with a tokenizer.json and its tokenizer_config.json each.
"""

import json
import os
from pathlib import Path

import pytest

from batchloom.core.conversation import Conversation
from batchloom.preparation import ChatEncoder, ChatRules, encode_conversations
from batchloom.tokens import resolve_tokenizer
from chat.conversations import talk

ROOT = Path(os.environ.get("BATCHLOOM_REAL_TOKENIZERS", "/nonexistent"))
FOLDERS = sorted(path.parent for path in ROOT.rglob("tokenizer.json")) if ROOT.is_dir() else []
CALL = {"type": "function", "function": {"name": "find", "arguments": {"city": "Zürich", "n": 3}}}
TURNS = [
    talk("hi", "hello", system="Be brief."),
    talk(" hi \n", "\n hello\n\n", "ça va?", "<think>\nhm\n</think>\n\nbien 😀"),
    talk("e\u0301\u0323 \u212b \u1e9b\u0323", "\u0301x", "日本語", "ﬁn"),
    talk("x", "", "y", "z"),
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
def pair(request):
    from transformers import PreTrainedTokenizerFast

    config = json.loads((request.param / "tokenizer_config.json").read_text())
    named = resolve_tokenizer(str(request.param)).chat.tokens
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(request.param / "tokenizer.json"),
        chat_template=config["chat_template"],
        clean_up_tokenization_spaces=False,
        **named,
    )
    return ChatEncoder(resolve_tokenizer(str(request.param))), theirs


@pytest.mark.skipif(not FOLDERS, reason="BATCHLOOM_REAL_TOKENIZERS names no tokenizers")
@pytest.mark.parametrize("conversation", TURNS)
def test_ids_are_those_of_the_own_template(pair, conversation):
    encoder, theirs = pair
    made = encode_conversations([conversation], encoder, ChatRules(train_on="all", prove=True))
    if made.faults and "rejects it" in made.faults[0].reason:
        with pytest.raises(Exception):  # noqa: B017 - whatever the template raises
            theirs.apply_chat_template(conversation.messages)
        return
    if made.faults and "leaves out tool calls" in made.faults[0].reason:
        assert CALL["function"]["name"] not in theirs.apply_chat_template(conversation.messages, tokenize=False)
        return
    assert not made.faults
    assert made.ids.tolist() == theirs.apply_chat_template(conversation.messages)["input_ids"]


@pytest.mark.skipif(not FOLDERS, reason="BATCHLOOM_REAL_TOKENIZERS names no tokenizers")
def test_gsm8k(pair, real_data):
    encoder, theirs = pair
    lines = (real_data / "gsm8k_train.jsonl").read_text().splitlines()[:500]
    rows = [json.loads(line) for line in lines]
    conversations = [talk(row["question"], row["answer"]) for row in rows]
    made = encode_conversations(conversations, encoder, ChatRules(prove=True))
    assert not made.faults
    assert not made.dropped
    expected = theirs.apply_chat_template([c.messages for c in conversations])["input_ids"]
    assert made.ids.tolist() == [number for ids in expected for number in ids]
    bounds = [0, *made.lengths.cumsum().tolist()]
    for n, row in enumerate(rows):
        part = slice(bounds[n], bounds[n + 1])
        trained = encoder.tokenizer.decode(made.ids[part][made.mask[part]])
        assert row["answer"].strip() in trained
        assert row["question"].strip() not in trained


@pytest.mark.skipif(not FOLDERS, reason="BATCHLOOM_REAL_TOKENIZERS names no tokenizers")
def test_chatml_writes_the_tools_that_qwen_writes(pair):
    encoder, theirs = pair
    if "<tool_response>" not in (theirs.chat_template or ""):
        pytest.skip("its template is not of Qwen's form")
    chatml = ChatEncoder(encoder.tokenizer, "chatml")
    tool = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
    # Qwen3 writes an empty thought into the last answer alone.
    messages = [
        {"role": "system", "content": "Be brief."},
        *TURNS[-1].messages,
        {"role": "assistant", "content": "Two:", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "a"},
        {"role": "tool", "content": "b"},
        {"role": "user", "content": "thanks"},
    ]
    messages[2] = messages[2] | {"content": ""}
    made = encode_conversations([Conversation(messages, [tool])], chatml, ChatRules(train_on="all", prove=True))
    assert not made.faults
    expected = theirs.apply_chat_template(messages, tools=[tool])["input_ids"]
    assert made.ids.tolist() == expected
