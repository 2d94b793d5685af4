"""Choice of the chat template, and the notes about it."""

import json

import pytest

from batchloom.chat import BUILT_IN_TEMPLATES, ChatTemplate, choose_template
from batchloom.core.errors import InputMissingError, TemplateError
from batchloom.preparation import ChatEncoder
from batchloom.tokens import resolve_tokenizer, restore_tokenizer
from chat.conftest import make_byte_level_tokenizer
from chat.conversations import CHATML, make_conversation

TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"


def resolve_with_config(folder, **config):
    make_byte_level_tokenizer(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return resolve_tokenizer(str(folder))


def test_no_template_means_plain_with_a_note(tokenizers):
    encoder = ChatEncoder(tokenizers["bytes"])
    assert encoder.renderer.name == "plain"
    assert "has no chat template: plain is used" in encoder.notes[0]
    rendered = encoder.renderer.render(make_conversation(" hi ", "ho", system="s")).text
    assert rendered == "System:\ns\n\nUser:\nhi\n\nAssistant:\nho<|endoftext|>\n"


@pytest.mark.parametrize("name", BUILT_IN_TEMPLATES)
def test_built_in_templates_give_no_notes(tokenizers, name):
    assert ChatEncoder(tokenizers["bytes"], name).notes == ()


def test_a_built_in_needs_its_control_tokens():
    gpt2 = resolve_tokenizer("gpt2")
    with pytest.raises(TemplateError, match=r"chatml writes <\|im_start\|>, <\|im_end\|>, which .*'gpt2'"):
        ChatEncoder(gpt2, "chatml")
    assert ChatEncoder(gpt2, "alpaca").renderer.name == "alpaca"


def test_unknown_names_and_missing_files(tmp_path):
    with pytest.raises(TemplateError, match="no template 'chatlm'; did you mean 'chatml'?"):
        choose_template("chatlm", {}, {}, "t")
    with pytest.raises(InputMissingError, match=r"no template file .*x\.jinja"):
        choose_template(str(tmp_path / "x.jinja"), {}, {}, "t")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{% for m in messages %}{% endfor %}\n{% break %}", "line 2: break is outside of a loop"),
        ("{% for m in x %}{% macro f() %}{% continue %}{% endmacro %}{% endfor %}", "continue is outside of a loop"),
        ("{% for m in x %}{% generation %}{% break %}{% endgeneration %}{% endfor %}", "break is outside of a loop"),
    ],
)
def test_a_break_outside_of_a_loop_is_refused(text, sentence):
    with pytest.raises(TemplateError, match=sentence):
        ChatTemplate("t", text, {})


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.jinja", b"\xff", "not UTF-8"),
        ("a.json", b"[]", "an object with chat_template"),
        ("a.json", b'{"chat_template": 3}', "chat_template is not a string"),
        ("a.jinja", b"x" * (1 << 20) + b"x", "cannot be read: it has 1,048,577 bytes, and at most 1,048,576 are read"),
    ],
)
def test_bad_files_get_a_sentence(tmp_path, name, content, sentence):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TemplateError, match=sentence):
        choose_template(str(tmp_path / name), {}, {}, "t")


@pytest.mark.parametrize(
    "config",
    [TEMPLATE, [{"name": "default", "template": TEMPLATE}], {"default": TEMPLATE}],
    ids=["text", "list", "object"],
)
def test_the_template_of_the_tokenizer_config(tmp_path, config):
    tokenizer = resolve_with_config(tmp_path / "t", chat_template=config)
    assert ChatEncoder(tokenizer).renderer.render(make_conversation("a", "b")).text == ("a<|endoftext|>b<|endoftext|>")


def test_files_next_to_the_tokenizer_win(tmp_path):
    folder = tmp_path / "t"
    make_byte_level_tokenizer(folder)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "legacy"}))
    assert resolve_tokenizer(str(folder)).chat.templates == {"default": "legacy"}
    (folder / "chat_template.jinja").write_text("file{% for m in messages %} {{ m.content }}{% endfor %}")
    (folder / "additional_chat_templates").mkdir()
    tool_template = "tools: {{ tools }}{% for m in messages %} {{ m.content }}{% endfor %}"
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(tool_template)
    tokenizer = resolve_with_config(folder, chat_template="config")
    assert tokenizer.chat.templates["default"].startswith("file")
    assert tokenizer.chat.templates["tool_use"] == tool_template
    encoder = ChatEncoder(tokenizer)
    assert encoder.renderer.render(make_conversation("a", "b")).text == "file a b"
    assert encoder.renderer.render(make_conversation("a", "b", tools=[1])).text == "tools: [1] a b"
    assert ChatEncoder(tokenizer, "tool_use").renderer.name == "tool_use"


def test_several_without_a_default_must_be_named(tmp_path):
    templates = [{"name": "a", "template": "x"}, {"name": "b", "template": "y"}]
    tokenizer = resolve_with_config(tmp_path / "t", chat_template=templates)
    with pytest.raises(TemplateError, match="the chat templates a, b but none called default"):
        ChatEncoder(tokenizer)


def test_the_state_carries_the_template_and_ids_do_not_depend_on_it(tmp_path, tokenizers):
    tokenizer = resolve_with_config(tmp_path / "t", chat_template=CHATML)
    assert tokenizer.fingerprint == tokenizers["bytes"].fingerprint
    restored = restore_tokenizer(json.loads(json.dumps(tokenizer.state())))
    assert restored.chat == tokenizer.chat
    assert ChatEncoder(restored).renderer.render(make_conversation("a", "b")).text.startswith("<|im_start|>user\na")
    assert "chat" not in resolve_tokenizer("gpt2").state()


def test_a_template_without_a_stop_gives_a_note(tmp_path, tokenizers):
    (tmp_path / "x.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    notes = ChatEncoder(tokenizers["bytes"], str(tmp_path / "x.jinja")).notes
    assert "writes no control token after an assistant turn" in notes[0]


def test_a_template_with_a_date_gives_a_note(tmp_path, tokenizers):
    (tmp_path / "x.jinja").write_text("{{ strftime_now('%Y') }}" + CHATML)
    notes = ChatEncoder(tokenizers["bytes"], str(tmp_path / "x.jinja")).notes
    assert any("it always gets 2024-07-26" in note for note in notes)
