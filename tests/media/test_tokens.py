"""Stored tokens of conversations with media are those that the processor makes of template and media."""

import numpy as np
import pytest

from batchloom import TokenizerError
from batchloom.core.conversation import Conversation
from batchloom.core.medium import AudioFacts, ImageFacts, Medium, MediumInfo
from batchloom.media import open_processor
from batchloom.preparation import ChatEncoder, ChatRules, encode_conversations
from batchloom.tokens import resolve_tokenizer
from media.processors import MADE, save

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

LINES = (
    "{%- for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{%- if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{%- for part in message['content'] %}{% if part['type'] == 'KIND' %}PLACE"
    "{%- else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Templates that take contents as lists alone, as Idefics3's own.
LISTS = (
    "{%- for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{%- for part in message['content'] %}{% if part['type'] == 'KIND' %}PLACE"
    "{%- else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRINGS = (
    "{%- for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLACES = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), "<|vision_start|><|image_pad|><|vision_end|>"),
    "gemma3": "<start_of_image>",
    "qwen2_audio": "Audio: <|audio_bos|><|AUDIO|><|audio_eos|>\n",
}
SIZES = [(336, 224), (50, 120), (100, 100)]


@pytest.fixture(scope="module", params=list(MADE))
def family(request, tmp_path_factory):
    made = MADE[request.param]()
    folder = save(made, tmp_path_factory.mktemp(request.param))
    return request.param, made, folder, open_processor(folder)


def medium(kind, number):
    facts = AudioFacts(16_000 + 777 * number, 16_000) if kind == "audio" else ImageFacts(*SIZES[number % len(SIZES)])
    return Medium(kind, f"{number}.file", None, MediumInfo(facts, bytes(16), 1))


def conversation(kind, media=2):
    """Two questions with media and two answers, the second medium behind its text."""
    messages = [
        {"role": "system", "content": "You see."},
        {"role": "user", "content": [{"type": kind}, {"type": "text", "text": "Who are they?"}]},
        {"role": "assistant", "content": "Two cats."},
        {"role": "user", "content": [{"type": "text", "text": "\n\nAnd this?\n"}, {"type": kind}]},
        {"role": "assistant", "content": "One <b>dog</b>.\n"},
    ]
    return Conversation(messages, media=[medium(kind, number) for number in range(media)])


def oracle(made, template, conversation, kind):
    """What the processor makes of a conversation with blank media."""
    if kind == "audio":
        given = {
            "audio": [np.zeros(one.info.facts.samples, np.float32) for one in conversation.media],
            "sampling_rate": 16_000,
        }
    else:
        from PIL import Image

        sizes = [(one.info.facts.width, one.info.facts.height) for one in conversation.media]
        given = {"images": [Image.new("RGB", size) for size in sizes]}
    return np.asarray(made(text=[template], **given)["input_ids"][0])


def rendered(made, template, conversation, *, lists=False):
    messages = conversation.messages
    if lists:
        messages = [
            {**one, "content": [{"type": "text", "text": one["content"]}]} if isinstance(one["content"], str) else one
            for one in messages
        ]
    return made.tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)


@pytest.mark.parametrize("form", [LINES, LISTS])
def test_ids_are_the_processors(family, form, tmp_path):
    name, made, folder, processor = family
    (kind,) = processor.families
    template = form.replace("KIND", kind).replace("PLACE", PLACES.get(name, "<image>"))
    (tmp_path / "t.jinja").write_text(template)
    encoder = ChatEncoder(resolve_tokenizer(str(folder)), str(tmp_path / "t.jinja"), families=processor.families)
    one = conversation(kind)
    found = encode_conversations([one], encoder, ChatRules(prove=True))
    assert found.faults == []
    text = rendered(made, template, one, lists=form is LISTS)
    expected = oracle(made, text, one, kind)
    assert found.ids.tolist() == expected.tolist()
    check_places(found, made, processor.families[kind])


def check_places(found, made, family):
    """Media stand where their tokens are, and what is trained is the answers alone."""
    token = made.tokenizer.convert_tokens_to_ids(family.token)
    (placed,) = found.media
    flags = np.zeros(found.ids.size, bool)
    for one in placed:
        assert (found.ids[one.start : one.start + one.tokens] == token).any()
        flags[one.start : one.start + one.tokens] = True
    assert flags[found.ids == token].all()
    assert not found.mask[flags].any()
    trained = made.tokenizer.decode(found.ids[found.mask])
    assert trained == "Two cats.<|im_end|>One <b>dog</b>.\n<|im_end|>"


def test_where_a_template_knows_no_media_they_stand_in_the_text(family, tmp_path):
    _, made, folder, processor = family
    (kind,) = processor.families
    (tmp_path / "t.jinja").write_text(STRINGS)
    encoder = ChatEncoder(resolve_tokenizer(str(folder)), str(tmp_path / "t.jinja"), families=processor.families)
    alone = processor.families[kind].fallback_text
    assert any(f"has no {kind} placeholder" in note for note in encoder.renderer.notes)
    one = conversation(kind)
    found = encode_conversations([one], encoder, ChatRules(prove=True))
    assert found.faults == []
    joined = [
        {
            **message,
            "content": message["content"]
            if isinstance(message["content"], str)
            else "".join(part.get("text", alone) for part in message["content"]),
        }
        for message in one.messages
    ]
    text = made.tokenizer.apply_chat_template(joined, chat_template=STRINGS, tokenize=False)
    assert found.ids.tolist() == oracle(made, text, one, kind).tolist()
    check_places(found, made, processor.families[kind])


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    made = MADE["qwen2_vl"]()
    folder = save(made, tmp_path_factory.mktemp("qwen"))
    template = LINES.replace("KIND", "image").replace("PLACE", PLACES["qwen2_vl"])
    (folder / "chat_template.jinja").write_text(template)
    processor = open_processor(folder)
    return made, ChatEncoder(resolve_tokenizer(str(folder)), families=processor.families)


def test_a_turn_of_an_image_alone_is_a_turn(qwen):
    made, encoder = qwen
    messages = [
        {"role": "user", "content": [{"type": "image"}]},
        {"role": "assistant", "content": "A cat."},
    ]
    one = Conversation(messages, media=[medium("image", 0)])
    found = encode_conversations([one], encoder, ChatRules(prove=True))
    assert found.faults == []
    assert not found.altered
    assert made.tokenizer.decode(found.ids[found.mask]) == "A cat.<|im_end|>"


def test_what_spells_a_placeholder_is_text(qwen):
    made, encoder = qwen
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "<|image_pad|> is"}, {"type": "image"}],
        },
        {"role": "assistant", "content": "A <|vision_start|> cat."},
    ]
    one = Conversation(messages, media=[medium("image", 0)])
    found = encode_conversations([one], encoder, ChatRules(prove=True))
    assert found.faults == []
    pad = made.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    (placed,) = found.media[0]
    assert int((found.ids == pad).sum()) == placed.tokens == placed.grid[1] * placed.grid[2] // 4


def test_train_on_all_trains_no_medium(qwen):
    made, encoder = qwen
    found = encode_conversations([conversation("image")], encoder, ChatRules("all", prove=True))
    assert found.faults == []
    pad = made.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert (found.mask == (found.ids != pad)).all()


def test_an_image_of_an_assistant_is_not_trained(qwen):
    made, encoder = qwen
    messages = [
        {"role": "user", "content": "Draw a cat."},
        {"role": "assistant", "content": [{"type": "text", "text": "Here:"}, {"type": "image"}]},
    ]
    one = Conversation(messages, media=[medium("image", 0)])
    found = encode_conversations([one], encoder, ChatRules(prove=True))
    assert found.faults == []
    said = "Here:<|vision_start|><|vision_end|><|im_end|>"
    assert made.tokenizer.decode(found.ids[found.mask]) == said


@pytest.mark.parametrize(("overlong", "kept"), [("drop", 0), ("truncate-turns", 1), ("split", 0)])
def test_what_is_too_long_is_never_cut_through_a_medium(qwen, overlong, kept):
    _, encoder = qwen
    one = conversation("image")
    whole = encode_conversations([one], encoder, ChatRules())
    first, second = whole.media[0]
    limit = second.start + 3
    rules = ChatRules(max_tokens=limit, overlong=overlong)
    found = encode_conversations([one], encoder, rules)
    assert len(found.lengths) == kept
    if kept:
        assert found.media == [[first]]
        assert int(found.lengths[0]) <= second.start
    else:
        assert "overlong" in found.dropped[0].reason


def test_a_medium_that_the_processor_refuses_is_a_fault_of_its_conversation(qwen):
    _, encoder = qwen
    one = conversation("image")
    one.media[1] = Medium("image", "thin.png", None, MediumInfo(ImageFacts(4000, 3), bytes(16), 1))
    found = encode_conversations([one, conversation("image")], encoder, ChatRules())
    (fault,) = found.faults
    assert fault.number == 0
    assert "image 2 (thin.png) has 4,000 x 3 pixels" in fault.reason
    assert len(found.lengths) == 1


def test_a_tokenizer_without_the_processors_tokens_is_refused(qwen):
    _, encoder = qwen
    with pytest.raises(TokenizerError, match="has no control token '<|image_pad|>'"):
        ChatEncoder(resolve_tokenizer("bytes"), families=encoder.families)


def test_a_template_that_loses_media_is_told(qwen, tmp_path):
    _, encoder = qwen
    place = "{% if message == messages[0] %}" + PLACES["qwen2_vl"] + "{% endif %}"
    (tmp_path / "t.jinja").write_text(LINES.replace("KIND", "image").replace("PLACE", place))
    other = ChatEncoder(encoder.tokenizer, str(tmp_path / "t.jinja"), families=encoder.families)
    found = encode_conversations([conversation("image")], other, ChatRules())
    assert "the template writes 0 placeholders for its 2 media" in found.faults[0].reason
