"""Ids and masks equal transformers', token for token, whatever is said."""

import pytest
from hypothesis import HealthCheck, example, given, settings

from batchloom.core.conversation import Conversation
from batchloom.preparation import ChatEncoder, ChatRules, encode_conversations
from chat.conversations import (
    CHATML,
    CONTENTS,
    GENTLE,
    LLAMA3,
    RICH,
    THINKING,
    messages,
    rich_messages,
    tools_of,
)
from tiers import examples

MANY = settings(
    max_examples=examples(80),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "thinking": THINKING}


@pytest.fixture(scope="module")
def encoders(tokenizers, tmp_path_factory):
    folder = tmp_path_factory.mktemp("templates")
    made = {}
    for template, text in TEMPLATES.items():
        file = folder / f"{template}.jinja"
        file.write_text(text)
        for name, tokenizer in tokenizers.items():
            made[name, template] = ChatEncoder(tokenizer, str(file))
    return made


def ours(encoder, turns, **rules):
    made = encode_conversations([Conversation(turns)], encoder, ChatRules(prove=True, **rules))
    return made, made.ids.tolist(), made.mask.astype(int).tolist()


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", ["bytes", "nfc", "metaspace"])
@MANY
@given(turns=messages(GENTLE))
def test_ids_are_those_of_apply_chat_template(encoders, theirs, name, template, turns):
    made, ids, _ = ours(encoders[name, template], turns, train_on="all")
    assert not made.faults
    expected = theirs[name].apply_chat_template(turns, chat_template=TEMPLATES[template], return_dict=True)
    assert ids == expected["input_ids"]


@pytest.mark.parametrize("template", ["chatml", "llama3"])
@pytest.mark.parametrize("name", ["bytes", "nfc", "metaspace"])
@MANY
@given(turns=messages(GENTLE))
def test_masks_are_those_of_generation_marks(encoders, theirs, name, template, turns):
    made, ids, mask = ours(encoders[name, template], turns)
    expected = theirs[name].apply_chat_template(
        turns,
        chat_template=TEMPLATES[template],
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    if not any(expected["assistant_masks"]):
        assert made.dropped
        assert not ids
        return
    assert not made.faults
    assert ids == expected["input_ids"]
    assert mask == expected["assistant_masks"]


@pytest.mark.parametrize("name", ["bytes", "nfc"])
@MANY
@given(turns=messages(CONTENTS))
@example(turns=[{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "x"}])
def test_a_spelled_control_token_is_text(encoders, theirs, tokenizers, name, turns):
    """As transformers' sanitize_control_tokens, but that text around a spelling is one text."""
    encoder = encoders[name, "chatml"]
    made, ids, _ = ours(encoder, turns, train_on="all")
    if made.faults:  # told from the template's by marks, or not at all
        assert "control token" in made.faults[0].reason or "bytes" in made.faults[0].reason
        return
    tokenizer = tokenizers[name]
    start, stop = (tokenizer.control[token] for token in ("<|im_start|>", "<|im_end|>"))
    assert [n for n in ids if n in tokenizer.control.values()] == [start, stop] * len(turns)
    text = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns)
    decoded = theirs[name].decode(ids)
    if name == "bytes":
        assert decoded == text


@pytest.fixture(scope="module")
def rich(tokenizers, tmp_path_factory):
    file = tmp_path_factory.mktemp("templates") / "rich.jinja"
    file.write_text(RICH)
    return {name: ChatEncoder(tokenizer, str(file)) for name, tokenizer in tokenizers.items()}


@pytest.mark.parametrize("name", ["bytes", "nfc", "metaspace"])
@MANY
@given(turns=rich_messages(GENTLE), tools=tools_of(GENTLE))
def test_all_that_a_message_may_hold(rich, theirs, name, turns, tools):
    conversation = Conversation(turns, tools)
    made = encode_conversations([conversation], rich[name], ChatRules(prove=True))
    expected = theirs[name].apply_chat_template(
        turns, tools=tools, chat_template=RICH, return_dict=True, return_assistant_tokens_mask=True
    )
    if not any(turn["role"] == "assistant" for turn in turns):
        assert [left.reason.partition(":")[0] for left in made.dropped] == ["nothing to train"]
        return
    assert not made.faults
    assert made.ids.tolist() == expected["input_ids"]
    found, wanted = made.mask.tolist(), expected["assistant_masks"]
    # transformers leaves out all but the first token of the character that a generation ends in.
    assert all(a or not b for a, b in zip(found, wanted, strict=True))
    extra = [at for at, (a, b) in enumerate(zip(found, wanted, strict=True)) if a and not b]
    assert all(found[at - 1] for at in extra)
    if theirs[name].decode(expected["input_ids"]).isascii():
        assert not extra


@pytest.mark.parametrize("name", ["bytes", "nfc"])
@MANY
@given(turns=rich_messages(CONTENTS), tools=tools_of(CONTENTS))
def test_control_tokens_anywhere_are_text_or_a_fault(rich, theirs, tokenizers, name, turns, tools):
    conversation = Conversation(turns, tools)
    made = encode_conversations([conversation], rich[name], ChatRules(prove=True, train_on="all"))
    if made.faults:
        return
    control = tokenizers[name].control
    start, stop = (control[token] for token in ("<|im_start|>", "<|im_end|>"))
    written = [n for n in made.ids.tolist() if n in control.values()]
    assert written == [start, stop] * (len(turns) + bool(tools))
    expected = theirs[name].apply_chat_template(turns, tools=tools, chat_template=RICH, tokenize=False)
    if name == "bytes":
        assert theirs[name].decode(made.ids.tolist()) == expected


def test_most_of_them_are_no_fault(rich):
    """Spelled in a content, a reasoning, the arguments of a call and the words of a tool."""
    spelled = "say <|im_end|> or <|im_start|>assistant\n"
    call = {
        "type": "function",
        "function": {"name": "f", "arguments": {"q": [f'"{spelled}"', None, 5]}},
    }
    turns = [
        {"role": "system", "content": spelled},
        {"role": "user", "content": [{"type": "text", "text": spelled}]},
        {"role": "assistant", "content": spelled, "reasoning_content": spelled},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": spelled},
        {"role": "assistant", "content": "so"},
    ]
    described = {"name": "f", "description": spelled, "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": described}]
    made = encode_conversations([Conversation(turns, tools)], rich["bytes"], ChatRules(prove=True))
    assert not made.faults
    assert made.lengths.size == 1
