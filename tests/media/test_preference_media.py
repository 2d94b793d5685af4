"""Images in preferences: tokens and media of both sides, in every placement."""

import json

import numpy as np
import pytest
from PIL import Image

import batchloom
from batchloom.batches import PairMediaCollator
from batchloom.chat import detect_schema, make_record_reader
from batchloom.core.errors import UnusableRecordError
from batchloom.store import LabelledAnswers, PreferencePairs, StoreMedia
from media.models import make_model
from media.processors import PROCESSORS, save_processor
from media.sample_media import make_image
from media.test_tokens import PLACEHOLDERS, TEMPLATE
from preparation.stores import write_jsonl

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

IMAGE = {"type": "image"}


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def text(value):
    return {"type": "text", "text": value}


GOOD, BAD = assistant("good"), assistant("bad")
ASKED, PARTS = user("What is <image>this?"), user([text("What is "), IMAGE, text("this?")])
EARLIER = [user("<image>And?"), assistant("x")]

# Name of the shape: record, images of the chosen side, of the rejected side, turns of the prompt.
SHAPES = {
    "TRL, parts": ({"prompt": [PARTS], "chosen": [GOOD], "rejected": [BAD], "images": ["a.png"]}, ["a.png"], ["a.png"]),
    "TRL, implicit prompt": (
        {"chosen": [PARTS, GOOD], "rejected": [PARTS, BAD], "images": ["a.png"]}, ["a.png"], ["a.png"],
    ),
    "TRL, one image": ({"prompt": [PARTS], "chosen": [GOOD], "rejected": [BAD], "image": "a.png"}, ["a.png"], ["a.png"]),
    "LLaMA-Factory alpaca": (
        {"instruction": "What is <image>this?", "chosen": "good", "rejected": "bad", "images": ["a.png"]},
        ["a.png"], ["a.png"],
    ),
    "LLaMA-Factory sharegpt": (
        {"conversations": [{"from": "human", "value": "What is <image>this?"}],
         "chosen": {"from": "gpt", "value": "good"}, "rejected": {"from": "gpt", "value": "bad"}, "images": ["a.png"]},
        ["a.png"], ["a.png"],
    ),
    "ms-swift rejected_response": (
        {"messages": [*EARLIER, ASKED, GOOD], "rejected_response": "bad", "images": ["a.png", "b.png"]},
        ["a.png", "b.png"], ["a.png", "b.png"],
    ),
    "ms-swift rejected_messages": (
        {"messages": [*EARLIER, ASKED, GOOD], "rejected_messages": [*EARLIER, ASKED, BAD], "images": ["a.png", "b.png"]},
        ["a.png", "b.png"], ["a.png", "b.png"],
    ),
    "ms-swift rejected_images": (
        {"messages": [ASKED, GOOD], "rejected_messages": [ASKED, BAD], "images": ["a.png"], "rejected_images": ["c.png"]},
        ["a.png"], ["c.png"],
    ),
    "a prompt and complete conversations": (
        {"prompt": [ASKED], "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD], "images": ["a.png"]}, ["a.png"], ["a.png"],
    ),
    "parts that name their files": (
        {"prompt": [user([{"type": "image", "image": "a.png"}, text("this?")])], "chosen": [GOOD], "rejected": [BAD]},
        ["a.png"], ["a.png"],
    ),
    "the same image twice": (
        {"prompt": [user("<image><image>?")], "chosen": [GOOD], "rejected": [BAD], "images": ["a.png", "a.png"]},
        ["a.png", "a.png"], ["a.png", "a.png"],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def processor_folder(tmp_path_factory):
    folder = save_processor(PROCESSORS["qwen2_vl"](), tmp_path_factory.mktemp("qwen"))
    template = TEMPLATE.replace("KIND", "image").replace("PLACE", PLACEHOLDERS["qwen2_vl"])
    (folder / "chat_template.jinja").write_text(template)
    return folder


def write_pictures(folder):
    for number, (name, size) in enumerate({"a": (336, 224), "b": (100, 120), "c": (336, 224), "d": (90, 300)}.items()):
        make_image(*size, seed=number).save(folder / f"{name}.png")


def prepare(tmp_path, rows, processor_folder):
    write_pictures(tmp_path)
    write_jsonl(tmp_path / "in.jsonl", rows)
    settings = {"media": {"processor": str(processor_folder)}, "val_fraction": 0, "dedup": "none"}
    result = batchloom.prepare(tmp_path / "in.jsonl", out=tmp_path / "out", tokenizer=str(processor_folder), **settings)
    return result, batchloom.open_store(result.path)


def compute_ids(store, messages, names, folder):
    """Return the processor's ids of a conversation with these images."""
    processor = PROCESSORS["qwen2_vl"]()
    template = TEMPLATE.replace("KIND", "image").replace("PLACE", PLACEHOLDERS["qwen2_vl"])
    rendered = processor.tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    images = [Image.open(folder / name) for name in names]
    return processor(text=[rendered], images=images)["input_ids"][0]


@pytest.mark.parametrize("name", SHAPES)
def test_both_sides_are_what_the_processor_makes(processor_folder, tmp_path, name):
    record, *sides = SHAPES[name]
    result, store = prepare(tmp_path, [record] * 3, processor_folder)
    assert (result.counts.documents, result.counts.quarantined) == (6, 0)
    parsed = make_record_reader(detect_schema([record], media=True), media=True)(record)
    pairs, media = PreferencePairs(store), StoreMedia(store)
    item = pairs[1]
    for side, conversation, names in zip(("chosen", "rejected"), (parsed.chosen, parsed.rejected), sides, strict=True):
        assert item["prompt_ids"] + item[f"{side}_ids"] == list(
            compute_ids(store, conversation.messages, names, tmp_path)
        )
        (stored_media,) = media.of(np.array([getattr(pairs, side)[1]]))
        assert [medium.location for medium in stored_media] == names
        assert [medium.start + medium.tokens <= len(item["prompt_ids"]) for medium in stored_media] == [True] * len(
            names
        )
    assert store.tokenizer.decode(np.array(item["chosen_ids"])) == "good<|im_end|>\n"
    assert batchloom.check(result.path).sound
    with pytest.raises(batchloom.InputError, match="PreferencePairs"):
        batchloom.Loader(store, seq_len=512, global_batch_size=1)


def test_labelled_answers(processor_folder, tmp_path):
    rows = [{"messages": [ASKED, GOOD], "images": ["b.png"], "label": True}] * 2
    _, store = prepare(tmp_path, rows, processor_folder)
    answers = LabelledAnswers(store)
    item = answers[0]
    assert item["prompt_ids"] + item["completion_ids"] == list(compute_ids(store, [PARTS, GOOD], ["b.png"], tmp_path))
    (media,) = StoreMedia(store).of(np.array([1]))
    assert [medium.location for medium in media] == ["b.png"]


REFUSED = {
    "another size on the rejected side": (
        {"messages": [ASKED, GOOD], "rejected_messages": [ASKED, BAD], "images": ["a.png"], "rejected_images": ["d.png"]},
        "the tokens before its chosen answer differ from those before its rejected one",
    ),
    "a missing file": (
        {"prompt": [PARTS], "chosen": [GOOD], "rejected": [BAD], "images": ["no.png"]}, "no.png",
    ),
    "an image without a placeholder": (
        {"prompt": [user("?")], "chosen": [GOOD], "rejected": [BAD], "images": ["a.png"]},
        "holds 1 image and 0 placeholders",
    ),
    "a placeholder without its image": (
        {"prompt": [ASKED, ASKED], "chosen": [GOOD], "rejected": [BAD], "images": ["a.png"]},
        "placeholder <image> without its image",
    ),
    "one image too few on the rejected side": (
        {"messages": [ASKED, GOOD], "rejected_messages": [ASKED, BAD], "images": ["a.png"], "rejected_images": [""]},
        "is empty",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_unusable_records(processor_folder, tmp_path, name):
    record, sentence = REFUSED[name]
    fine = {key: value for key, value in record.items() if key != "rejected_images"} | {"images": ["b.png"]}
    fine |= {"prompt": [ASKED]} if "prompt" in record else {}
    result, _ = prepare(tmp_path, [fine] * 3 + [record], processor_folder)
    assert (result.counts.documents, result.counts.quarantined) == (6, 1)
    (line,) = (tmp_path / "out/quarantine.jsonl").read_text().splitlines()
    assert sentence in json.loads(line)["reason"]


def test_without_a_processor_images_are_refused():
    record = {"prompt": [user("?")], "chosen": [GOOD], "rejected": [BAD]}
    read = make_record_reader(detect_schema([record]))
    for name in ("images", "rejected_images"):
        with pytest.raises(
            UnusableRecordError, match=f"column '{name}' is not empty: images and audio need --processor"
        ):
            read({**record, name: ["a.png"]})


@pytest.mark.parametrize("name", ["qwen2_vl", "llava", "gemma3"])
def test_a_collator_adds_the_features_of_both_sides(tmp_path, name):
    torch, trainer = pytest.importorskip("torch"), pytest.importorskip("trl.trainer.dpo_trainer")
    processor, template = PROCESSORS[name](), TEMPLATE.replace("KIND", "image")
    template = template.replace("PLACE", PLACEHOLDERS.get(name, "<image>"))
    folder = save_processor(processor, tmp_path / "processor")
    (folder / "chat_template.jinja").write_text(template)
    rows = [
        {"messages": [user("<image>?"), GOOD], "rejected_response": "bad", "images": ["a.png"]},
        {"messages": [user("?"), GOOD], "rejected_response": "bad"},
        {"messages": [user("So: <image>?"), GOOD], "rejected_response": "worse", "images": ["c.png"]},
    ]
    _, store = prepare(tmp_path, rows, folder)
    pairs, model = PreferencePairs(store), make_model(name, processor).eval()
    collate = PairMediaCollator(pairs, trainer.DataCollatorForPreference(pad_token_id=0))
    batch = collate([pairs[n] for n in (2, 0, 1)])
    with pytest.raises(batchloom.InputError, match="remove_unused_columns=False"):
        collate([{name: value for name, value in pairs[0].items() if name != "documents"}])
    mask = batch.pop("completion_mask")
    assert mask.sum(1).tolist() == [len(pairs[n][side]) for side in ("chosen_ids", "rejected_ids") for n in (2, 0, 1)]
    with torch.no_grad():
        scores = model(**batch, use_cache=False).logits
        for number, (row, answer) in enumerate(
            [(2, "good"), (0, "good"), (1, "good"), (2, "worse"), (0, "bad"), (1, "bad")]
        ):
            names = rows[row].get("images")
            question = {2: [text("So: "), IMAGE, text("?")], 0: [IMAGE, text("?")], 1: "?"}[row]
            rendered = processor.tokenizer.apply_chat_template(
                [user(question), assistant(answer)], chat_template=template, tokenize=False
            )
            images = [Image.open(tmp_path / file) for file in names] if names else None
            alone = processor(text=[rendered], images=images, return_tensors="pt")
            expected = model(**alone, use_cache=False).logits[0]
            torch.testing.assert_close(scores[number, : len(expected)], expected, atol=1e-4, rtol=1e-4)


def test_a_collator_refuses_a_store_without_media(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", [{"prompt": "q", "chosen": "yes", "rejected": "no"}] * 2)
    store = batchloom.open_store(batchloom.prepare(tmp_path / "in.jsonl", out=tmp_path / "out", tokenizer="bytes").path)
    with pytest.raises(batchloom.InputError, match="holds no media"):
        PairMediaCollator(PreferencePairs(store), dict)
