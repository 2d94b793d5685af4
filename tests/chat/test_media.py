"""Media in records: typed parts, placeholders with media columns, and mismatches."""

import base64
import json

import pytest

from batchloom.chat import detect_schema, make_record_reader, parse_medium
from batchloom.core.errors import UnusableRecordError
from batchloom.core.medium import Medium

PNG = b"\x89PNG\r\n\x1a\n" + bytes(60)
PNG_BASE64 = base64.b64encode(PNG).decode()
ANSWER = {"role": "assistant", "content": "A cat."}


def read_record(row, mapping=None):
    return make_record_reader(detect_schema([row], mapping), media=True)(row)


def make_record(content, **columns):
    return {"messages": [{"role": "user", "content": content}, ANSWER], **columns}


def test_placeholders_become_parts_at_their_positions():
    row = make_record("What is <image>this?", images=["a.jpg"])
    conversation = read_record(row)
    assert conversation.messages[0]["content"] == [
        {"type": "text", "text": "What is "},
        {"type": "image"},
        {"type": "text", "text": "this?"},
    ]
    assert conversation.media == [Medium("image", "a.jpg")]
    assert conversation.messages[1] == ANSWER
    assert row["messages"][0]["content"] == "What is <image>this?"


def test_media_of_several_kinds_and_turns_are_in_the_order_of_their_parts():
    row = {
        "messages": [
            {"role": "user", "content": "<image><audio>One?"},
            ANSWER,
            {"role": "user", "content": "<image>Two?"},
            ANSWER,
        ],
        "images": ["a.jpg", "b.jpg"],
        "audios": ["c.wav"],
    }
    conversation = read_record(row)
    assert [m.location for m in conversation.media] == ["a.jpg", "c.wav", "b.jpg"]
    kinds = [[part["type"] for part in m["content"]] for m in conversation.messages[::2]]
    assert kinds == [["image", "audio", "text"], ["image", "text"]]


@pytest.mark.parametrize(
    ("part", "medium"),
    [
        (
            {"type": "image_url", "image_url": {"url": "http://h/a.png"}},
            Medium("image", "http://h/a.png"),
        ),
        ({"type": "image_url", "image_url": "http://h/a.png"}, Medium("image", "http://h/a.png")),
        ({"type": "image", "url": "http://h/a.png"}, Medium("image", "http://h/a.png")),
        ({"type": "image", "path": "a.png"}, Medium("image", "a.png")),
        ({"type": "image", "image": "a.png"}, Medium("image", "a.png")),
        ({"type": "image", "image": {"bytes": PNG, "path": None}}, Medium("image", "", PNG)),
        ({"type": "image", "base64": PNG_BASE64}, Medium("image", "", PNG)),
        (
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG_BASE64}"}},
            Medium("image", "", PNG),
        ),
        ({"type": "audio_url", "audio_url": {"url": "a.wav"}}, Medium("audio", "a.wav")),
        ({"type": "audio", "audio": "a.wav"}, Medium("audio", "a.wav")),
        ({"type": "video_url", "video_url": {"url": "a.mp4"}}, Medium("video", "a.mp4")),
        (
            {"type": "input_audio", "input_audio": {"data": PNG_BASE64, "format": "wav"}},
            Medium("audio", "", PNG),
        ),
    ],
)
def test_typed_parts_of_transformers_and_openai(part, medium):
    conversation = read_record(make_record([part, {"type": "text", "text": "What?"}]))
    assert conversation.media == [medium]
    assert conversation.messages[0]["content"] == [{"type": medium.kind}, {"type": "text", "text": "What?"}]


def test_a_bare_part_takes_the_next_of_the_list():
    conversation = read_record(
        make_record(
            [{"type": "image"}, {"type": "text", "text": "?"}],
            images=[{"path": "a.jpg", "bytes": None}],
        )
    )
    assert conversation.media == [Medium("image", "a.jpg")]


def test_a_single_medium_needs_no_list_and_columns_can_be_named():
    assert read_record(make_record("<image>?", image="a.jpg")).media == [Medium("image", "a.jpg")]
    assert read_record(make_record("<image>?", pics=["b.jpg"]), {"images": "pics"}).media == [Medium("image", "b.jpg")]


def test_other_forms_of_conversations_hold_media_too():
    sharegpt = {
        "conversations": [
            {"from": "human", "value": "<image>?"},
            {"from": "gpt", "value": "A cat."},
        ],
        "images": ["a.jpg"],
    }
    assert read_record(sharegpt).messages[0] == {
        "role": "user",
        "content": [{"type": "image"}, {"type": "text", "text": "?"}],
    }
    alpaca = {"instruction": "What?", "input": "<image>", "output": "A cat.", "images": ["a.jpg"]}
    assert read_record(alpaca).messages[0]["content"] == [
        {"type": "text", "text": "What?\n"},
        {"type": "image"},
    ]
    completion = {"prompt": "<image>", "completion": "A cat.", "image": "a.jpg"}
    assert read_record(completion).media == [Medium("image", "a.jpg")]
    as_text = {
        "messages": json.dumps([{"role": "user", "content": "<image>?"}, ANSWER]),
        "images": ["a.jpg"],
    }
    assert read_record(as_text).media == [Medium("image", "a.jpg")]


def test_conversations_without_media_are_unchanged():
    row = make_record("What is <b>this</b>?")
    conversation = read_record(row)
    assert conversation.messages == row["messages"]
    assert conversation.media == []


@pytest.mark.parametrize(
    ("row", "kinds"),
    [
        (make_record("1. <audio>\n2. <video>\n3. <image>"), []),
        (make_record("<image>?", images=[]), []),
        (make_record("<image> <video>?", images=["a.jpg"]), ["image"]),
        (make_record([{"type": "image", "url": "a.jpg"}, {"type": "text", "text": "<image>?"}]), ["image"]),
        ({"prompt": "<image>?", "completion": "A cat.", "system": "Say <video>."}, []),
    ],
)
def test_a_placeholder_without_media_of_its_kind_is_text(row, kinds):
    conversation = read_record(row)
    assert [medium.kind for medium in conversation.media] == kinds
    written = json.dumps(conversation.messages)
    given = json.dumps(list(row.values()))
    for kind in ("image", "audio", "video"):
        replaced = kind in kinds and "images" in row
        assert written.count(f"<{kind}>") == given.count(f"<{kind}>") - replaced


def test_parts_may_have_an_index_into_the_list():
    parts = [{"type": "image", "index": 1, "text": None}, {"type": "image", "index": 0}]
    conversation = read_record(make_record([*parts, {"type": "text", "text": "?"}], images=["a", "b"]))
    assert [medium.location for medium in conversation.media] == ["b", "a"]
    for number in (2, -1, True, "0"):
        with pytest.raises(UnusableRecordError, match="has index"):
            read_record(make_record([{"type": "image", "index": number}], images=["a", "b"]))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (make_record("<image><image>?", images=["a"]), "holds 1 image next to the text"),
        (
            make_record("?", images=["a.jpg", "b.jpg"]),
            r"holds 2 images and 0 placeholders .* images\[0\] has none",
        ),
        (make_record("<image>?", images=["a", "b"]), r"images\[1\] has none"),
        (make_record([{"type": "image"}]), r"content\[0\] has a placeholder <image> without"),
        (make_record("<image>?", images=[3]), r"images\[0\] holds a number, not the path"),
        (make_record("<image>?", images=[""]), r"images\[0\] is empty"),
        (make_record("<image>?", images=[{"format": "png"}]), r"images\[0\] has 'format', and no url"),
        (make_record("<image>?", images=[{"bytes": b"x", "base64": "*"}]), None),
        (make_record("<image>?", images=[{"base64": "*"}]), "is not base64"),
        (
            make_record([{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]),
            "empty base64",
        ),
        (make_record([{"type": ["image"], "url": "a"}]), r"content\[0\] holds an object, not"),
        (make_record("<image>?", images=["data:image/png,abc"]), "that is not base64"),
        (
            {**make_record("<image>?", images=["a"]), "system": "See <image>"},
            "column 'system' has a placeholder",
        ),
        (make_record([{"type": "image_url", "image_url": {}}]), "has a placeholder|has nothing"),
    ],
)
def test_mismatched_media_are_reported_with_their_position(row, message):
    if message is None:
        assert read_record(row).media == [Medium("image", "", b"x")]
        return
    with pytest.raises(UnusableRecordError, match=message):
        read_record(row)


def test_media_are_refused_unless_requested():
    row = make_record([{"type": "image", "medium": 0}, {"type": "text", "text": "?"}])
    with pytest.raises(UnusableRecordError, match="need --processor"):
        make_record_reader(detect_schema([row]))(row)
    row = make_record("<image>?", images=["a.jpg"])
    with pytest.raises(UnusableRecordError, match="need --processor"):
        make_record_reader(detect_schema([row]))(row)


def test_base64_is_distinguished_from_a_path():
    long = "a" * 80
    assert parse_medium("image", long, "images[0]") == Medium("image", long)
    assert parse_medium("image", PNG_BASE64, "images[0]").data == PNG
    for beginning in (
        b"\0\0\0\x1cftypavif",
        b"\xff\xfb\x90d",
        b"\xff\xf3\x90d",
        b"\x1aE\xdf\xa3",
        b"ID3",
    ):
        data = beginning + bytes(range(60))
        assert parse_medium("image", base64.b64encode(data).decode(), "images[0]").data == data
    for path in ("//server/share/" + "a" * 60 + ".mp3", "AAAA/" + "b" * 70 + ".mp4"):
        assert parse_medium("audio", path, "audios[0]").location == path
