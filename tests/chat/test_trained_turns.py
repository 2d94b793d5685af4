"""Trained turns under published templates, against the marks that TRL puts around them and texts read by hand."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st

from batchloom.chat import detect_schema, make_record_reader
from batchloom.core.document import Conversation
from batchloom.preparation import ChatEncoder, ChatRecipe, encode_conversations
from batchloom.tokens import resolve_tokenizer
from chat.conftest import make_byte_level_tokenizer
from chat.template_cases import (
    AXOLOTL,
    CASES,
    EOS,
    MARKED,
    MISTRAL,
    TEMPLATES,
    TOOLS,
    UNMARKED,
    list_marked_texts,
)
from chat.trained_texts import list_trained_texts
from tiers import examples

# A call of its own form each: JSON, channels, XML, control tokens, and no stop token.
FAST = ("qwen3_training", "gptoss_training", "nemotron_3_nano_training", "deepseekv3_training", "glm4moe_training")
BY_TIER = [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in MARKED]
# What TRL marks beside what a model writes: headers that its prompt has; an end token of the whole text; and white
# space after the stop token. It leaves out Gemma's stop token after a call.
MARKED_HEADERS = {
    "gptoss": ("<|start|>assistant",),
    "muse": ("<|start|>assistant",),
    "deepseek": ("<\uff5cAssistant\uff5c>", "<\uff5ctool\u2581outputs\u2581end\uff5c>"),
    "qwen2_5_training": ("\n",),
}
UNMARKED_STOP = {"diffusion_gemma_training": "<|tool_response>"}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in (*UNMARKED, *AXOLOTL, *MISTRAL)]
# Trained texts of templates for which TRL has no marks, read once.
CHECKED = Path(__file__).with_name("checked_turns.json")


def normalize(name, texts):
    """Return texts without what TRL marks or leaves out for reasons of its own."""
    headers = next((headers for start, headers in MARKED_HEADERS.items() if name.startswith(start)), ())
    stop = UNMARKED_STOP.get(name, "")
    normalized = []
    for text in texts:
        header = next((header for header in headers if text.startswith(header)), "")
        end = EOS if name.startswith("phi3") else ""
        normalized.append(text.removeprefix(header).removesuffix(stop).removesuffix(end).rstrip("\n"))
    return normalized


def find_difference(name, case, trained):
    """Return how trained texts differ from the marked ones; empty if they are equal or both are refused."""
    try:
        marked = normalize(name, list_marked_texts(name, CASES[case]))
    except Exception as error:  # noqa: BLE001 - a template may refuse a conversation in any way
        return "" if isinstance(trained, str) else f"trained, but TRL: {error}"
    if isinstance(trained, str):
        has_calls = all(value in "".join(marked) for value in list_call_values(case))
        return trained if has_calls or "leaves out tool calls" not in trained else ""
    trained = normalize(name, trained)
    return "" if trained == marked else f"{trained} instead of {marked}"


def list_call_values(case):
    """Return the names and texts of the calls of a case."""
    functions = [call["function"] for turn in CASES[case][0] for call in turn.get("tool_calls", ())]
    values = [value for function in functions for value in function["arguments"].values()]
    return [*(function["name"] for function in functions), *(value for value in values if isinstance(value, str))]


# Conversations that a template writes completely and batchloom refuses.
REFUSED = {
    # The second call has no header and no opening token: no model could write it.
    # The text of the turn comes behind the result of its call.
    ("diffusion_gemma_training", "text and call"): "writes turn 3 inside turn 2",
}


@pytest.mark.parametrize("name", BY_TIER)
def test_a_turn_is_what_the_training_template_marks(make_published_encoder, name):
    results = list_trained_texts(make_published_encoder(name), list(CASES.values()))
    differences = {
        case: difference
        for case, trained in zip(CASES, results, strict=True)
        if (difference := find_difference(name, case, trained))
    }
    expected = {case: reason for (template, case), reason in REFUSED.items() if template == name}
    assert differences.keys() == expected.keys(), differences
    assert all(reason in differences[case] for case, reason in expected.items())


@pytest.mark.parametrize("name", [*BY_TIER, *SLOW])
@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_a_turn_has_all_that_is_the_models_and_nothing_else(make_published_encoder, name, data):
    """Words of random conversations are in the turns of their own messages, and numbers between them."""
    words = iter(f"w{number}w" for number in range(1000))
    kinds = ["word", 7.5, True, None, [], {}, ["word", 3], {"k": "word", "n": 4}]

    def draw_value():
        drawn = json.dumps(data.draw(st.sampled_from(kinds)))
        return json.loads(re.sub('"word"', lambda _: f'"{next(words)}"', drawn))

    messages = [{"role": "user", "content": next(words)}]
    for _ in range(data.draw(st.integers(1, 3))):
        calls = [
            {"type": "function", "id": "abcdefghi", "function": {"name": next(words), "arguments": arguments}}
            for arguments in [{f"k{n}": draw_value() for n in range(data.draw(st.integers(0, 3)))}]
            if data.draw(st.booleans())
        ]
        answer = {"role": "assistant", "content": "" if calls and data.draw(st.booleans()) else next(words)}
        messages.append({**answer, **({"tool_calls": calls} if calls else {})})
        if calls:
            result = {"role": "tool", "tool_call_id": "abcdefghi", "name": calls[0]["function"]["name"]}
            messages += [{**result, "content": next(words)}, {"role": "assistant", "content": next(words)}]
        messages.append({"role": "user", "content": next(words)})
    messages.pop()
    tools = data.draw(st.sampled_from([None, TOOLS]))
    [trained] = list_trained_texts(make_published_encoder(name), [(messages, tools)])
    assume(not isinstance(trained, str))
    answers = [message for message in messages if message["role"] == "assistant"]
    assert len(trained) == len(answers)
    for text, message in zip(trained, answers, strict=True):
        own = _find_words(json.dumps(message))
        # A template may leave out the text beside a call.
        assert _find_words(text) <= own
        assert own - _find_words(text) <= ({message["content"]} if "tool_calls" in message else set())


def _find_words(text):
    return set(re.findall(r"w\d+w", text))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*UNMARKED, *MISTRAL])
def test_a_turn_of_a_template_without_marks_is_as_read_by_hand(make_published_encoder, name):
    trained = list_trained_texts(make_published_encoder(name), list(CASES.values()))
    assert dict(zip(CASES, trained, strict=True)) == json.loads(CHECKED.read_text())[name]


PARTS = [
    {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
    {"role": "user", "content": [{"type": "text", "text": "Where is "}, {"type": "text", "text": "Oslo?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "In Norway."}]},
]
AS_STRINGS = [{**turn, "content": "".join(part["text"] for part in turn["content"])} for turn in PARTS]


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "glm4moe", "qwen3_vl", "smolvlm"])
def test_text_parts_are_written_as_one_text(make_published_encoder, name):
    """Templates that take only strings, only parts, or both."""
    encoder = make_published_encoder(name)
    parts, strings = (
        encode_conversations([Conversation(turns)], encoder, ChatRecipe(prove=True)) for turns in (PARTS, AS_STRINGS)
    )
    assert parts.ids.tolist() == strings.ids.tolist()
    assert parts.flags.trained.tolist() == strings.flags.trained.tolist()
    assert "Where is Oslo?" in encoder.tokenizer.decode(parts.ids)
    is_joined = name in ("qwen3", "llama3_1")
    assert any("text parts" in change for change in parts.altered) == is_joined


def test_a_tool_without_a_type_is_a_function(make_published_encoder):
    """Published templates read ``tool.function``; transformers renders such a list as it is, or fails."""
    bare = [TOOLS[0]["function"]]
    messages, _ = CASES["call alone"]
    for name in ("gptoss", "qwen3", "muse_glimmer"):
        encoder = make_published_encoder(name)
        wrapped, unwrapped = (
            encode_conversations([Conversation(messages, tools)], encoder, ChatRecipe(prove=True))
            for tools in (TOOLS, bare)
        )
        assert wrapped.ids.tolist() == unwrapped.ids.tolist()
        assert not wrapped.altered
        assert any("tools without a type" in change for change in unwrapped.altered)


def test_a_thought_before_a_call_is_trained(make_published_encoder):
    """LLaMA-Factory accepts it in the text of a ``function_call``."""
    call = '<think>\nLook it up.\n</think>\n\n{"name": "get_weather", "arguments": {"city": "Oslo"}}'
    turns = [
        {"from": "human", "value": "Oslo?"},
        {"from": "function_call", "value": call},
        {"from": "observation", "value": "7 degrees"},
        {"from": "gpt", "value": "Cold."},
    ]
    record = {"conversations": turns}
    messages = make_record_reader(detect_schema([record], None))(record).messages
    separate, _ = CASES["thought before a call"]
    separate = [{**turn, "reasoning_content": None} if turn["content"] == "Cold." else turn for turn in separate]
    encoder = make_published_encoder("qwen3")
    assert list_trained_texts(encoder, [(messages, TOOLS)]) == list_trained_texts(encoder, [(separate, TOOLS)])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("'-'", "leaves out content of turn 3"),
        ("m.content | upper", "changes content of turn 1"),
        ("m.content[:3]", "changes content of turn 1"),
    ],
)
def test_a_user_that_a_template_does_not_quote_is_a_fault(published_tokenizer, tmp_path, content, reason):
    """An answer to another question would be trained."""
    text = "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ CONTENT }}<|im_end|>\n{% endfor %}"
    condition = "loop.index != 3" if "-" in content else "m.role != 'user'"
    (tmp_path / "t.jinja").write_text(text.replace("CONTENT", f"m.content if {condition} else {content}"))
    encoder = ChatEncoder(published_tokenizer, str(tmp_path / "t.jinja"))
    [result] = list_trained_texts(encoder, [CASES["several turns"]])
    assert reason in result


def write_arguments(arguments):
    """Return the conversation of a call with these arguments."""
    messages, tools = CASES["call alone"]
    call = {"type": "function", "id": "abcdefghi", "function": {"name": "get_weather", "arguments": arguments}}
    return [turn if "tool_calls" not in turn else {**turn, "tool_calls": [call]} for turn in messages], tools


TEXT_CALL, OBJECT_CALL = write_arguments('{"city": "Oslo"}'), write_arguments({"city": "Oslo"})


@pytest.mark.parametrize(
    ("name", "written"),
    [("gptoss", r'"{\"city\": \"Oslo\"}"<|call|>'), ("gemma4_v2", 'get_weather{{"city": "Oslo"}}<tool_call|>')],
)
def test_arguments_as_json_text_stay_and_are_noticed(make_published_encoder, name, written):
    """Ids are those of transformers, which writes the text as a string, or in braces, within the call."""
    encoder = make_published_encoder(name)
    encoded = encode_conversations([Conversation(*TEXT_CALL)], encoder, ChatRecipe(prove=True))
    assert written in encoder.tokenizer.decode(encoded.ids)
    assert [change for change in encoded.altered if "--tool-arguments parse" in change]
    plain = encode_conversations([Conversation(*OBJECT_CALL)], encoder, ChatRecipe(prove=True))
    assert not plain.altered


@pytest.mark.parametrize(
    ("name", "case", "form"),
    [("gptoss", TEXT_CALL, "parse"), ("qwen3", TEXT_CALL, "parse"), ("deepseekv3", OBJECT_CALL, "text")],
)
def test_arguments_are_converted_on_request(make_published_encoder, name, case, form):
    other = OBJECT_CALL if case is TEXT_CALL else TEXT_CALL
    [expected] = list_trained_texts(make_published_encoder(name), [other])
    converted = list_trained_texts(make_published_encoder(name), [case, other], tool_arguments=form)
    assert converted == [expected, expected]


@pytest.mark.parametrize(("name", "case"), [("glm4moe", TEXT_CALL), ("deepseekv3", OBJECT_CALL)])
def test_arguments_are_converted_for_a_template_that_takes_one_form(make_published_encoder, name, case):
    other = OBJECT_CALL if case is TEXT_CALL else TEXT_CALL
    encoder = make_published_encoder(name)
    encoded = encode_conversations([Conversation(*case)], encoder, ChatRecipe(prove=True))
    expected = encode_conversations([Conversation(*other)], encoder, ChatRecipe(prove=True))
    assert encoded.ids.tolist() == expected.ids.tolist()
    assert encoded.flags.trained.tolist() == expected.flags.trained.tolist()
    noted = "takes no JSON text as" if case is TEXT_CALL else "takes no objects as"
    assert [change for change in encoded.altered if noted in change]
    assert not [change for change in expected.altered if "as arguments of calls" in change]


@pytest.mark.parametrize(
    ("calls", "results", "notes"),
    [
        ("ab", "ab", []),
        ("ab", "ba", ["another order"]),
        ("a", "c", ["no call before", "no result"]),
        ("ab", "a", ["no result"]),
        ("", "a", ["no call before"]),
        ("a?", "b", []),
        ("ab", "a?", []),
        ("ab", "c?", ["no call before", "no result"]),
    ],
)
def test_results_that_do_not_fit_their_calls_are_noticed(make_published_encoder, calls, results, notes):
    """The identifier ? is none: nothing says which result is whose."""
    listed = [
        {"type": "function", "id": None if name == "?" else name, "function": {"name": "f", "arguments": {}}}
        for name in calls
    ]
    messages = [
        {"role": "user", "content": "Both?"},
        {"role": "assistant", "content": "Let me see.", **({"tool_calls": listed} if listed else {})},
        *({"role": "tool", "content": "7", **({} if name == "?" else {"tool_call_id": name})} for name in results),
        {"role": "assistant", "content": "Cold."},
    ]
    encoded = encode_conversations([Conversation(messages)], make_published_encoder("qwen3"), ChatRecipe(prove=True))
    assert not encoded.faults
    found = [change for change in encoded.altered if "result" in change]
    assert len(found) == len(notes)
    assert all(note in " ".join(found) for note in notes)


PAGE = Path(__file__).parents[2] / "docs" / "reference" / "chat-templates.md"


def format_row(name, results):
    """Return the row of a template in the table of the docs."""
    reasons = {case: result for case, result in results.items() if isinstance(result, str)}
    rejected = [case for case, reason in reasons.items() if "rejects it" in reason]
    omitted = [case for case, reason in reasons.items() if "leaves out tool calls" in reason]
    others = ", ".join(case for case in reasons if case not in (*rejected, *omitted))
    return f"| `{name}` | {len(results) - len(reasons)} | {len(rejected)} | {len(omitted)} | {others} |"


def test_no_line_end_is_trained_behind_a_stop_that_is_left_out(make_published_encoder):
    """The marks of this template hold the line end behind the stop."""
    encoder = make_published_encoder("qwen2_5_training")
    assert list_trained_texts(encoder, [CASES["several turns"]], train_on_eos="none") == [["Hello.", "Yes."]]
    [last] = list_trained_texts(encoder, [CASES["several turns"]], train_on_eos="last")
    assert [text.rstrip("\n") for text in last] == ["Hello.", "Yes.<|im_end|>"]


@pytest.mark.slow
def test_the_table_of_templates_is_in_the_docs(make_published_encoder):
    names = [*(name for name in TEMPLATES if name not in MARKED), *AXOLOTL, *MISTRAL]
    rows = [
        format_row(
            name, dict(zip(CASES, list_trained_texts(make_published_encoder(name), list(CASES.values())), strict=True))
        )
        for name in names
    ]
    table = PAGE.read_text().partition("## ")[0]
    assert [line for line in table.splitlines() if line.startswith("| `")] == rows
    assert f"{len(CASES)} conversations" in table


TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
LOOP = "{% for m in messages %}TURN{% endfor %}".replace("TURN", TURN)
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
COLLECTED = """{% set ns = namespace(all='') %}{% for m in messages %}{% set ns.all = ns.all ~ m.role ~ m.content %}\
{% endfor %}{{ ns.all }}"""
ANSWERS = ["Hello.<|im_end|>", "Yes.<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (LOOP + PROMPT, ANSWERS),
        (LOOP, ANSWERS),
        ("{% macro turn(m) %}TURN{% endmacro %}{% for m in messages %}{{ turn(m) }}{% endfor %}" + PROMPT, ANSWERS),
        ("{% set all %}" + LOOP + "{% endset %}{{ all }}" + PROMPT, ANSWERS),
        ("{% for n in range(messages | length) %}{% set m = messages[n] %}TURN{% endfor %}" + PROMPT, ANSWERS),
        ("{% for m in messages %}{% set m = dict(m) %}TURN{% endfor %}" + PROMPT, ANSWERS),
        ("{% for m in messages %}TURN{% if true %}{% continue %}{% endif %}never{% endfor %}" + PROMPT, ANSWERS),
        (LOOP.replace("m.content", "m.content | trim") + PROMPT, ANSWERS),
        (LOOP.replace("messages", "messages[2:] + messages[:2]") + PROMPT, ANSWERS[::-1]),
        (
            "{% for m in messages %}{% if m.role == 'assistant' %}x{% endif %}{% endfor %}" + LOOP + PROMPT,
            "several places",
        ),
        (LOOP + LOOP + PROMPT, "several places"),
        (COLLECTED, "does not write turn 2 where it loops"),
        (
            LOOP.replace("{{ m.role }}", "{{ m.role }} to {{ messages[0].content }}") + PROMPT,
            "header of turn 2 differs",
        ),
        (LOOP + PROMPT.replace("assistant", "model"), "header of turn 2 differs"),
        (LOOP + "{{ raise_exception('no') if messages | length > 2 }}", "rejects it"),
        ("{% for m in messages %}{{ raise_exception('no ' ~ m.role) if m.role == 'user' }}TURN{% endfor %}", "no user"),
        ("{{ messages }}", "cannot be found"),
    ],
)
def test_a_template_of_any_make_is_right_or_refused(published_tokenizer, tmp_path, template, expected):
    (tmp_path / "t.jinja").write_text(template.replace("TURN", TURN))
    encoder = ChatEncoder(published_tokenizer, str(tmp_path / "t.jinja"))
    [result] = list_trained_texts(encoder, [CASES["several turns"]])
    assert expected in result if isinstance(expected, str) else result == expected


CALL_LOOP = """{% for m in messages %}{% if m.role != 'tool' %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\
<|im_end|>
{% if m.tool_calls %}<|im_start|>user
{% for r in messages[loop.index:] %}{% if r.role != 'tool' %}{% break %}{% endif %}\
<tool_response>{{ r.content }}</tool_response>{% endfor %}<|im_end|>
{% endif %}{% endif %}{% endfor %}"""


@pytest.mark.parametrize("result", ["7 degrees", "", " "])
@pytest.mark.parametrize("name", ["gemma4", "diffusion_gemma", "own", "own with a line end behind"])
def test_a_result_in_the_round_of_its_call_is_never_trained(
    make_published_encoder, published_tokenizer, tmp_path, name, result
):
    """A blank result has no mark."""
    if name.startswith("own"):
        # Then the result has a round of its own, too.
        end = "{{ '\n' }}{% endfor %}" if name != "own" else "{% endfor %}"
        (tmp_path / "t.jinja").write_text(CALL_LOOP.removesuffix("{% endfor %}") + end + PROMPT)
        encoder = ChatEncoder(published_tokenizer, str(tmp_path / "t.jinja"))
    else:
        encoder = make_published_encoder(name)
    messages, tools = CASES["call alone"]
    messages = [{**turn, "content": result} if turn["role"] == "tool" else turn for turn in messages]
    [trained] = list_trained_texts(encoder, [(messages, tools)])
    if isinstance(trained, str):
        assert "inside turn" in trained or "behind the stop token of turn 2" in trained
        return
    call, answer = trained
    assert "Oslo" in call
    assert "response:" not in call
    assert "</tool_response>" not in call
    assert answer.startswith("Cold.")


QUESTION = {"role": "user", "content": "Is it cold?"}
RESULT = {"role": "tool", "content": "7 degrees"}
ANSWER = {"role": "assistant", "content": "Cold."}
TURN_ENDS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}END{% endfor %}" + PROMPT


def test_a_result_is_followed_by_the_header_of_other_answers(published_tokenizer, tmp_path):
    """The prompt after a result is empty, and the header is behind a separator of turns."""
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ '' if loop.first else '\n' }}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt and messages[-1].role == 'user' %}<|im_start|>assistant\n{% endif %}"
    )
    encoder = ChatEncoder(published_tokenizer, str(tmp_path / "t.jinja"))
    turns = [QUESTION, {"role": "assistant", "content": "Wait."}, RESULT, ANSWER]
    assert list_trained_texts(encoder, [(turns, None)]) == [["Wait.<|im_end|>", "Cold.<|im_end|>"]]


def test_the_token_that_begins_a_text_is_never_a_stop(published_tokenizer, tmp_path):
    (tmp_path / "t.jinja").write_text(TURN_ENDS.replace("END", "{{ eos_token }}{{ bos_token }}"))
    encoder = ChatEncoder(published_tokenizer, str(tmp_path / "t.jinja"))
    [trained] = list_trained_texts(encoder, [CASES["several turns"]])
    assert trained == [f"Hello.{EOS}", f"Yes.{EOS}"]


def test_a_prompt_that_depends_on_what_was_said_is_a_header(published_tokenizer, tmp_path):
    """A header of an example is the beginning of the one of this conversation."""
    brief = "{{ '[brief] ' if messages[0].content == 'brief' }}"
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}BRIEF{% endif %}{{ m.content }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\nBRIEF{% endif %}".replace(
            "BRIEF", brief
        )
    )
    encoder = ChatEncoder(published_tokenizer, str(tmp_path / "t.jinja"))
    conversations = [([{"role": "user", "content": text}, ANSWER], None) for text in ("long", "brief", "brief", "long")]
    assert list_trained_texts(encoder, conversations) == [["Cold.<|im_end|>"]] * 4


def test_generation_marks_outside_an_answer_are_refused(published_tokenizer, tmp_path):
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{% generation %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endgeneration %}"
        "{% endfor %}" + PROMPT
    )
    encoder = ChatEncoder(published_tokenizer, str(tmp_path / "t.jinja"))
    [reason] = list_trained_texts(encoder, [CASES["several turns"]])
    assert "as generated, which is not inside one assistant turn" in reason


IN_LOOP = "{% for m in messages %}HEADER{{ m.content }}</s>\n{% if loop.last and add_generation_prompt %}PROMPT{% endif %}{% endfor %}"


def test_a_token_that_begins_and_ends_texts_is_a_stop(tmp_path):
    """As GPT-2's."""
    token = "<|endoftext|>"
    folder = make_byte_level_tokenizer(tmp_path / "t", bos_token=token, eos_token=token)
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ eos_token }}"
    )
    encoder = ChatEncoder(resolve_tokenizer(str(folder)), str(tmp_path / "t.jinja"))
    [trained] = list_trained_texts(encoder, [CASES["plain"]])
    assert trained == [f"Hello.\n{token}"]


def test_the_header_of_another_answer_is_no_stop(published_tokenizer, tmp_path):
    (tmp_path / "t.jinja").write_text("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}")
    encoder = ChatEncoder(published_tokenizer, str(tmp_path / "t.jinja"))
    user, first = CASES["plain"][0]
    turns = [user, first, {"role": "assistant", "content": "Yes."}, user, first]
    assert list_trained_texts(encoder, [(turns, None)]) == [["Hello.", "Yes.<|user|>", "Hello."]]


def test_a_token_within_an_answer_is_no_stop(published_tokenizer, tmp_path):
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for call in m.tool_calls or [] %}<|call|>"
        "{{ call.function.name }}<|message|>{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    encoder = ChatEncoder(published_tokenizer, str(tmp_path / "t.jinja"))
    [[call, _]] = list_trained_texts(encoder, [CASES["integer, and its result"]])
    assert call == '<|call|>get_weather<|message|>{"days": 2}'


def test_a_thought_before_every_answer_is_no_header(published_tokenizer, tmp_path):
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n"
        "{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    encoder = ChatEncoder(published_tokenizer, str(tmp_path / "t.jinja"))
    plain, thinking = list_trained_texts(encoder, [CASES["several turns"], CASES["thought in the last turn"]])
    assert plain == [f"<think>\n\n</think>\n\n{answer}<|im_end|>" for answer in ("Hello.", "Yes.")]
    assert thinking == ["<think>\nTwo and two.\n</think>\n\nFour.<|im_end|>"]


@pytest.mark.parametrize("header", ["<|{{ m.role }}|>\n", "### {{ m.role }}:\n", "{{ m.role | upper }}: "])
def test_a_generation_prompt_in_the_loop_is_a_header(published_tokenizer, tmp_path, header):
    prompt = header.replace("{{ m.role }}", "assistant").replace("{{ m.role | upper }}", "ASSISTANT")
    (tmp_path / "t.jinja").write_text(IN_LOOP.replace("HEADER", header).replace("PROMPT", prompt))
    encoder = ChatEncoder(published_tokenizer, str(tmp_path / "t.jinja"))
    [trained] = list_trained_texts(encoder, [CASES["several turns"]])
    assert trained == ["Hello.</s>", "Yes.</s>"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        # The last end token stands behind the loop, and a generation prompt may stand there in any case.
        ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}</s>", ["Hello.<|user|>", "Yes.</s>"]),
        ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>", ["Hello.<|user|>", "Yes."]),
        # BOS begins a round, and ends none.
        (
            "{% for m in messages %}{{ bos_token ~ '[INST] ' if m.role == 'user' }}{{ m.content }}{% endfor %}",
            ["Hello.", "Yes."],
        ),
    ],
)
def test_a_stop_token_is_no_header_of_an_answer(published_tokenizer, tmp_path, template, expected):
    (tmp_path / "t.jinja").write_text(template)
    encoder = ChatEncoder(published_tokenizer, str(tmp_path / "t.jinja"))
    assert list_trained_texts(encoder, [CASES["several turns"]]) == [expected]
