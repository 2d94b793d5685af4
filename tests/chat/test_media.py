"""Media in records: typed parts, placeholders with lists beside them, and what does not fit together."""

import base64
import json

import pytest

from batchloom.chat import detect_schema, make_record_reader, parse_medium
from batchloom.core.errors import UnusableRecordError
from batchloom.core.medium import Medium

PNG = b"\x89PNG\r\n\x1a\n" + bytes(60)
IN_TEXT = base64.b64encode(PNG).decode()
ANSWER = {"role": "assistant", "content": "A cat."}


def read(row, mapping=None):
    return make_record_reader(detect_schema([row], mapping), media=True)(row)


def asked(content, **beside):
    return {"messages": [{"role": "user", "content": content}, ANSWER], **beside}


def test_placeholders_become_parts_where_they_stand():
    row = asked("What is <image>this?", images=["a.jpg"])
    made = read(row)
    assert made.messages[0]["content"] == [
        {"type": "text", "text": "What is "},
        {"type": "image"},
        {"type": "text", "text": "this?"},
    ]
    assert made.media == [Medium("image", "a.jpg")]
    assert made.messages[1] == ANSWER
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
    made = read(row)
    assert [m.location for m in made.media] == ["a.jpg", "c.wav", "b.jpg"]
    kinds = [[part["type"] for part in m["content"]] for m in made.messages[::2]]
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
        ({"type": "image", "base64": IN_TEXT}, Medium("image", "", PNG)),
        (
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{IN_TEXT}"}},
            Medium("image", "", PNG),
        ),
        ({"type": "audio_url", "audio_url": {"url": "a.wav"}}, Medium("audio", "a.wav")),
        ({"type": "audio", "audio": "a.wav"}, Medium("audio", "a.wav")),
        ({"type": "video_url", "video_url": {"url": "a.mp4"}}, Medium("video", "a.mp4")),
        (
            {"type": "input_audio", "input_audio": {"data": IN_TEXT, "format": "wav"}},
            Medium("audio", "", PNG),
        ),
    ],
)
def test_typed_parts_of_transformers_and_openai(part, medium):
    made = read(asked([part, {"type": "text", "text": "What?"}]))
    assert made.media == [medium]
    assert made.messages[0]["content"] == [{"type": medium.kind}, {"type": "text", "text": "What?"}]


def test_a_bare_part_takes_the_next_of_the_list():
    made = read(
        asked(
            [{"type": "image"}, {"type": "text", "text": "?"}],
            images=[{"path": "a.jpg", "bytes": None}],
        )
    )
    assert made.media == [Medium("image", "a.jpg")]


def test_a_single_medium_needs_no_list_and_columns_can_be_named():
    assert read(asked("<image>?", image="a.jpg")).media == [Medium("image", "a.jpg")]
    assert read(asked("<image>?", pics=["b.jpg"]), {"images": "pics"}).media == [Medium("image", "b.jpg")]


def test_other_forms_of_conversations_hold_media_too():
    sharegpt = {
        "conversations": [
            {"from": "human", "value": "<image>?"},
            {"from": "gpt", "value": "A cat."},
        ],
        "images": ["a.jpg"],
    }
    assert read(sharegpt).messages[0] == {
        "role": "user",
        "content": [{"type": "image"}, {"type": "text", "text": "?"}],
    }
    alpaca = {"instruction": "What?", "input": "<image>", "output": "A cat.", "images": ["a.jpg"]}
    assert read(alpaca).messages[0]["content"] == [
        {"type": "text", "text": "What?\n"},
        {"type": "image"},
    ]
    completion = {"prompt": "<image>", "completion": "A cat.", "image": "a.jpg"}
    assert read(completion).media == [Medium("image", "a.jpg")]
    as_text = {
        "messages": json.dumps([{"role": "user", "content": "<image>?"}, ANSWER]),
        "images": ["a.jpg"],
    }
    assert read(as_text).media == [Medium("image", "a.jpg")]


def test_conversations_without_media_are_as_ever():
    row = asked("What is <b>this</b>?")
    made = read(row)
    assert made.messages == row["messages"]
    assert made.media == []


def test_parts_may_say_which_of_the_list_they_are():
    parts = [{"type": "image", "index": 1, "text": None}, {"type": "image", "index": 0}]
    made = read(asked([*parts, {"type": "text", "text": "?"}], images=["a", "b"]))
    assert [one.location for one in made.media] == ["b", "a"]
    for number in (2, -1, True, "0"):
        with pytest.raises(UnusableRecordError, match="has index"):
            read(asked([{"type": "image", "index": number}], images=["a", "b"]))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            asked("<image>?"),
            r"messages\[0\].content has a placeholder <image> without its image: .* holds 0 images",
        ),
        (asked("<image><image>?", images=["a"]), "holds 1 image next to the text"),
        (
            asked("?", images=["a.jpg", "b.jpg"]),
            r"holds 2 images and 0 placeholders .* images\[0\] has none",
        ),
        (asked("<image>?", images=["a", "b"]), r"images\[1\] has none"),
        (asked("<audio>?", images=["a"]), "a placeholder <audio> without its audio"),
        (asked([{"type": "image"}]), r"content\[0\] has a placeholder <image> without"),
        (asked("<image>?", images=[3]), r"images\[0\] holds a number, not the path"),
        (asked("<image>?", images=[""]), r"images\[0\] is empty"),
        (asked("<image>?", images=[{"format": "png"}]), r"images\[0\] has 'format', and no url"),
        (asked("<image>?", images=[{"bytes": b"x", "base64": "*"}]), None),
        (asked("<image>?", images=[{"base64": "*"}]), "is not base64"),
        (
            asked([{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]),
            "empty base64",
        ),
        (asked([{"type": ["image"], "url": "a"}]), r"content\[0\] holds an object, not"),
        (asked("<image>?", images=["data:image/png,abc"]), "that is not base64"),
        (
            {**asked("<image>?", images=["a"]), "system": "See <image>"},
            "column 'system' has a placeholder",
        ),
        (asked([{"type": "image_url", "image_url": {}}]), "has a placeholder|has nothing"),
    ],
)
def test_what_does_not_fit_together_is_told_with_its_place(row, said):
    if said is None:
        assert read(row).media == [Medium("image", "", b"x")]
        return
    with pytest.raises(UnusableRecordError, match=said):
        read(row)


def test_without_being_asked_for_media_are_refused():
    row = asked([{"type": "image", "medium": 0}, {"type": "text", "text": "?"}])
    with pytest.raises(UnusableRecordError, match="need --processor"):
        make_record_reader(detect_schema([row]))(row)
    row = asked("<image>?", images=["a.jpg"])
    with pytest.raises(UnusableRecordError, match="need --processor"):
        make_record_reader(detect_schema([row]))(row)


def test_base64_is_told_from_a_path():
    long = "a" * 80
    assert parse_medium("image", long, "images[0]") == Medium("image", long)
    assert parse_medium("image", IN_TEXT, "images[0]").data == PNG
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
