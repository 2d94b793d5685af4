"""Stored tokens of conversations with media equal the processor's."""

import numpy as np
import pytest

from batchloom import TokenizerError
from batchloom.core.document import Conversation
from batchloom.core.medium import AudioFacts, ImageFacts, Medium, MediumInfo
from batchloom.media import open_processor
from batchloom.preparation import ChatEncoder, ChatRecipe, encode_conversations
from batchloom.tokens import resolve_tokenizer
from media.processors import PROCESSORS, save_processor

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

TEMPLATE = (
    "{%- for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{%- if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{%- for part in message['content'] %}{% if part['type'] == 'KIND' %}PLACE"
    "{%- else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A template that takes contents only as lists, as that of Idefics3 does.
LIST_TEMPLATE = (
    "{%- for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{%- for part in message['content'] %}{% if part['type'] == 'KIND' %}PLACE"
    "{%- else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRING_TEMPLATE = (
    "{%- for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLACEHOLDERS = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), "<|vision_start|><|image_pad|><|vision_end|>"),
    "gemma3": "<start_of_image>",
    "qwen2_audio": "Audio: <|audio_bos|><|AUDIO|><|audio_eos|>\n",
}
SIZES = [(336, 224), (50, 120), (100, 100)]


@pytest.fixture(scope="module", params=list(PROCESSORS))
def family(request, tmp_path_factory):
    hf_processor = PROCESSORS[request.param]()
    folder = save_processor(hf_processor, tmp_path_factory.mktemp(request.param))
    return request.param, hf_processor, folder, open_processor(folder)


def make_medium(kind, number):
    facts = AudioFacts(16_000 + 777 * number, 16_000) if kind == "audio" else ImageFacts(*SIZES[number % len(SIZES)])
    return Medium(kind, f"{number}.file", None, MediumInfo(facts, bytes(16), 1))


def make_conversation(kind, media=2):
    """Return two questions with media and two answers.

    The second medium follows its text.
    """
    messages = [
        {"role": "system", "content": "You see."},
        {"role": "user", "content": [{"type": kind}, {"type": "text", "text": "Who are they?"}]},
        {"role": "assistant", "content": "Two cats."},
        {"role": "user", "content": [{"type": "text", "text": "\n\nAnd this?\n"}, {"type": kind}]},
        {"role": "assistant", "content": "One <b>dog</b>.\n"},
    ]
    return Conversation(messages, media=[make_medium(kind, number) for number in range(media)])


def compute_expected_ids(hf_processor, template, conversation, kind):
    """Return the processor's ids of a conversation with blank media."""
    if kind == "audio":
        inputs = {
            "audio": [np.zeros(medium.info.facts.samples, np.float32) for medium in conversation.media],
            "sampling_rate": 16_000,
        }
    else:
        from PIL import Image

        sizes = [(medium.info.facts.width, medium.info.facts.height) for medium in conversation.media]
        inputs = {"images": [Image.new("RGB", size) for size in sizes]}
    return np.asarray(hf_processor(text=[template], **inputs)["input_ids"][0])


def render(hf_processor, template, conversation, *, lists=False):
    messages = conversation.messages
    if lists:
        messages = [
            {**message, "content": [{"type": "text", "text": message["content"]}]}
            if isinstance(message["content"], str)
            else message
            for message in messages
        ]
    return hf_processor.tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)


@pytest.mark.parametrize("form", [TEMPLATE, LIST_TEMPLATE])
def test_ids_are_the_processors(family, form, tmp_path):
    name, hf_processor, folder, processor = family
    (kind,) = processor.families
    template = form.replace("KIND", kind).replace("PLACE", PLACEHOLDERS.get(name, "<image>"))
    (tmp_path / "t.jinja").write_text(template)
    encoder = ChatEncoder(resolve_tokenizer(str(folder)), str(tmp_path / "t.jinja"), families=processor.families)
    conversation = make_conversation(kind)
    result = encode_conversations([conversation], encoder, ChatRecipe(prove=True))
    assert result.faults == []
    text = render(hf_processor, template, conversation, lists=form is LIST_TEMPLATE)
    expected = compute_expected_ids(hf_processor, text, conversation, kind)
    assert result.ids.tolist() == expected.tolist()
    check_spans(result, hf_processor, processor.families[kind])


def check_spans(result, hf_processor, family):
    """Require media at their tokens, and training on the answers only."""
    token = hf_processor.tokenizer.convert_tokens_to_ids(family.token)
    (media,) = result.media
    flags = np.zeros(result.ids.size, bool)
    for medium in media:
        assert (result.ids[medium.start : medium.start + medium.tokens] == token).any()
        flags[medium.start : medium.start + medium.tokens] = True
    assert flags[result.ids == token].all()
    assert not result.flags.trained[flags].any()
    trained = hf_processor.tokenizer.decode(result.ids[result.flags.trained])
    assert trained == "Two cats.<|im_end|>One <b>dog</b>.\n<|im_end|>"


def test_placeholders_are_in_the_text_if_a_template_has_no_media(family, tmp_path):
    _, hf_processor, folder, processor = family
    (kind,) = processor.families
    (tmp_path / "t.jinja").write_text(STRING_TEMPLATE)
    encoder = ChatEncoder(resolve_tokenizer(str(folder)), str(tmp_path / "t.jinja"), families=processor.families)
    fallback_text = processor.families[kind].fallback_text
    assert any(f"has no {kind} placeholder" in note for note in encoder.renderer.notes)
    conversation = make_conversation(kind)
    result = encode_conversations([conversation], encoder, ChatRecipe(prove=True))
    assert result.faults == []
    messages = [
        {
            **message,
            "content": message["content"]
            if isinstance(message["content"], str)
            else "".join(part.get("text", fallback_text) for part in message["content"]),
        }
        for message in conversation.messages
    ]
    text = hf_processor.tokenizer.apply_chat_template(messages, chat_template=STRING_TEMPLATE, tokenize=False)
    assert result.ids.tolist() == compute_expected_ids(hf_processor, text, conversation, kind).tolist()
    check_spans(result, hf_processor, processor.families[kind])


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    hf_processor = PROCESSORS["qwen2_vl"]()
    folder = save_processor(hf_processor, tmp_path_factory.mktemp("qwen"))
    template = TEMPLATE.replace("KIND", "image").replace("PLACE", PLACEHOLDERS["qwen2_vl"])
    (folder / "chat_template.jinja").write_text(template)
    processor = open_processor(folder)
    return hf_processor, ChatEncoder(resolve_tokenizer(str(folder)), families=processor.families)


def test_a_turn_of_an_image_alone_is_a_turn(qwen):
    hf_processor, encoder = qwen
    messages = [
        {"role": "user", "content": [{"type": "image"}]},
        {"role": "assistant", "content": "A cat."},
    ]
    conversation = Conversation(messages, media=[make_medium("image", 0)])
    result = encode_conversations([conversation], encoder, ChatRecipe(prove=True))
    assert result.faults == []
    assert not result.altered
    assert hf_processor.tokenizer.decode(result.ids[result.flags.trained]) == "A cat.<|im_end|>"


def test_text_that_spells_a_placeholder_is_text(qwen):
    hf_processor, encoder = qwen
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "<|image_pad|> is"}, {"type": "image"}],
        },
        {"role": "assistant", "content": "A <|vision_start|> cat."},
    ]
    conversation = Conversation(messages, media=[make_medium("image", 0)])
    result = encode_conversations([conversation], encoder, ChatRecipe(prove=True))
    assert result.faults == []
    pad = hf_processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    (medium,) = result.media[0]
    assert int((result.ids == pad).sum()) == medium.tokens == medium.grid[1] * medium.grid[2] // 4


def test_train_on_all_trains_no_medium(qwen):
    hf_processor, encoder = qwen
    result = encode_conversations([make_conversation("image")], encoder, ChatRecipe(train_on="all", prove=True))
    assert result.faults == []
    pad = hf_processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert (result.flags.trained == (result.ids != pad)).all()


def test_an_image_of_an_assistant_is_not_trained(qwen):
    hf_processor, encoder = qwen
    messages = [
        {"role": "user", "content": "Draw a cat."},
        {"role": "assistant", "content": [{"type": "text", "text": "Here:"}, {"type": "image"}]},
    ]
    conversation = Conversation(messages, media=[make_medium("image", 0)])
    result = encode_conversations([conversation], encoder, ChatRecipe(prove=True))
    assert result.faults == []
    trained_text = "Here:<|vision_start|><|vision_end|><|im_end|>"
    assert hf_processor.tokenizer.decode(result.ids[result.flags.trained]) == trained_text


@pytest.mark.parametrize(("overlong", "count"), [("drop", 0), ("truncate-turns", 1), ("split", 0)])
def test_an_overlong_conversation_is_never_cut_through_a_medium(qwen, overlong, count):
    _, encoder = qwen
    conversation = make_conversation("image")
    uncut = encode_conversations([conversation], encoder, ChatRecipe())
    first_medium, second_medium = uncut.media[0]
    limit = second_medium.start + 3
    rules = ChatRecipe(max_tokens=limit, overlong=overlong)
    result = encode_conversations([conversation], encoder, rules)
    assert len(result.lengths) == count
    if count:
        assert result.media == [[first_medium]]
        assert int(result.lengths[0]) <= second_medium.start
    else:
        assert "overlong" in result.dropped[0].reason


@pytest.mark.parametrize("overlong", ["truncate", "truncate-left"])
def test_truncation_keeps_whole_media_or_drops_the_conversation(qwen, overlong):
    _, encoder = qwen
    conversation = make_conversation("image")
    uncut = encode_conversations([conversation], encoder, ChatRecipe(train_on="all"))
    size = int(uncut.lengths[0])
    for limit in range(1, size):
        rules = ChatRecipe(train_on="all", max_tokens=limit, overlong=overlong)
        result = encode_conversations([conversation], encoder, rules)
        start, stop = (0, limit) if overlong == "truncate" else (size - limit, size)
        spans = [(medium.start, medium.start + medium.tokens) for medium in uncut.media[0]]
        if any(first < edge < behind for first, behind in spans for edge in (start, stop)):
            assert "a medium is never cut" in result.dropped[0].reason
        elif uncut.flags.trained[start + 1 : stop].any():
            assert result.ids.tolist() == uncut.ids[start:stop].tolist()
            inside = [(first - start, behind - start) for first, behind in spans if start <= first and behind <= stop]
            kept = result.media[0] if inside else []
            assert [(medium.start, medium.start + medium.tokens) for medium in kept] == inside
        else:
            assert result.dropped[0].rule == "nothing to train"


def test_a_medium_that_the_processor_refuses_is_a_fault_of_its_conversation(qwen):
    _, encoder = qwen
    conversation = make_conversation("image")
    conversation.media[1] = Medium("image", "thin.png", None, MediumInfo(ImageFacts(4000, 3), bytes(16), 1))
    result = encode_conversations([conversation, make_conversation("image")], encoder, ChatRecipe())
    (fault,) = result.faults
    assert fault.number == 0
    assert "image 2 (thin.png) has 4,000 x 3 pixels" in fault.reason
    assert len(result.lengths) == 1


def test_a_tokenizer_without_the_processors_tokens_is_refused(qwen):
    _, encoder = qwen
    with pytest.raises(TokenizerError, match="has no control token '<|image_pad|>'"):
        ChatEncoder(resolve_tokenizer("bytes"), families=encoder.families)


def test_a_template_that_drops_media_is_a_fault(qwen, tmp_path):
    _, encoder = qwen
    first_turn_only = "{% if message == messages[0] %}" + PLACEHOLDERS["qwen2_vl"] + "{% endif %}"
    (tmp_path / "t.jinja").write_text(TEMPLATE.replace("KIND", "image").replace("PLACE", first_turn_only))
    lossy_encoder = ChatEncoder(encoder.tokenizer, str(tmp_path / "t.jinja"), families=encoder.families)
    result = encode_conversations([make_conversation("image")], lossy_encoder, ChatRecipe())
    assert "the template writes 0 placeholders for its 2 media" in result.faults[0].reason
