"""Images, sounds and video frames of documents in a real browser, and files that cannot be shown."""

import io
import json

import numpy as np
import pytest
from PIL import Image

import batchloom
from batchloom.view import ViewSpec, write_view
from media.processors import qwen2_audio, qwen2_vl, save_processor
from media.sample_media import encode_image, make_image, make_messages, write_images, write_sounds
from media.sample_videos import decode_all_frames, make_video
from store.test_damaged_stores import seal_sidecars
from view.conftest import TOKEN, open_client, serving


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    return str(save_processor(qwen2_vl(), tmp_path_factory.mktemp("processor")))


def prepare(file, out, processor, keep):
    batchloom.prepare(file, out=out, tokenizer=processor, media={"processor": processor, "keep": keep}, val_fraction=0)
    return out


def open_document(page, address, number):
    page.goto(f"{address}/?token={TOKEN}")
    page.goto(f"{address}/document/{number}")
    page.wait_for_load_state("networkidle")


@pytest.mark.parametrize("keep", [pytest.param("embed", marks=pytest.mark.slow), "reference"])
def test_the_images_of_a_document_are_shown(page, tmp_path, processor, keep):
    store = prepare(write_images(tmp_path / "in", count=3), tmp_path / "store", processor, keep)
    with serving(store) as address:
        open_document(page, address, 2)
        shown = page.locator("main img")
        assert shown.count() == 3
        sizes = [shown.nth(k).evaluate("image => [image.naturalWidth, image.naturalHeight]") for k in range(3)]
        expected = [
            Image.open(io.BytesIO((tmp_path / "in" / "pictures" / f"2_{k}.jpg").read_bytes())).size for k in range(3)
        ]
        assert [tuple(size) for size in sizes] == expected
        captions = page.locator("figcaption").all_inner_texts()
        assert captions[1].startswith("image pictures/2_1.jpg" if keep == "reference" else "image")
        # The placeholder tokens of an image are one item of the text.
        assert page.locator("main .text").inner_text().count("<|image_pad|>") == 3


@pytest.mark.slow
def test_a_sound_is_played_from_the_store_and_from_its_path(page, tmp_path):
    processor = str(save_processor(qwen2_audio(), tmp_path / "processor"))
    file = write_sounds(tmp_path / "in", count=2)
    for keep in ("embed", "reference"):
        with serving(prepare(file, tmp_path / keep, processor, keep)) as address:
            open_document(page, address, 0)
            seconds = page.locator("audio").evaluate(
                "sound => new Promise((done, fail) => { sound.onloadedmetadata = () => done(sound.duration); "
                "sound.onerror = () => fail(sound.error.message); sound.preload = 'metadata'; sound.load(); })"
            )
            assert seconds == pytest.approx(4_000 / 16_000, abs=0.01)


@pytest.mark.parametrize("keep", [pytest.param("embed", marks=pytest.mark.slow), "reference"])
def test_the_frames_of_a_video_are_those_that_the_model_sees(page, tmp_path, processor, keep):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "film.mp4").write_bytes(film := make_video(frames=50, rate=25))
    row = {"messages": make_messages("<video>What is it?", "A film."), "videos": ["film.mp4"]}
    (tmp_path / "in" / "talks.json").write_text(json.dumps([row]))
    with serving(prepare(tmp_path / "in" / "talks.json", tmp_path / "store", processor, keep)) as address:
        open_document(page, address, 0)
        captions = page.locator("figcaption").all_inner_texts()
        assert [caption[15:21] for caption in captions] == ["0.00 s", "0.50 s", "1.00 s", "1.50 s"]
        with open_client(address) as client:
            answer = client.get("/document/0/media/2")
        assert answer.headers["content-type"] == "image/png"
        frame = np.asarray(Image.open(io.BytesIO(answer.content)).convert("L")).mean()
        # At 25 frames per second, the third sampled frame is frame 25.
        assert frame == pytest.approx(np.asarray(decode_all_frames(film)[25].convert("L")).mean(), abs=2)


@pytest.fixture(scope="module")
def referring_store(tmp_path_factory, processor):
    """A store of pictures by path; each test that damages a picture has a document of its own."""
    folder = tmp_path_factory.mktemp("pictures")
    return prepare(write_images(folder / "in"), folder / "store", processor, "reference")


def damage_missing(picture):
    picture.unlink()


def damage_other(picture):
    picture.write_bytes(encode_image(make_image(33, 22, seed=5)))


def damage_cut(picture):
    picture.write_bytes(picture.read_bytes()[:-20])


def damage_same_size(picture):
    data = bytearray(picture.read_bytes())
    data[-40] ^= 255
    picture.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("document", "damage", "message"),
    [
        (1, damage_missing, "is missing"),
        pytest.param(2, damage_other, "when its tokens were made", marks=pytest.mark.slow),
        pytest.param(4, damage_cut, "when its tokens were made", marks=pytest.mark.slow),
        pytest.param(5, damage_same_size, "is not the file that its tokens were made from", marks=pytest.mark.slow),
    ],
)
def test_a_file_that_is_missing_or_changed_is_named_in_its_place(page, referring_store, document, damage, message):
    damage(referring_store.parent / "in" / "pictures" / f"{document}_1.jpg")
    with serving(referring_store) as address:
        open_document(page, address, document)
        assert page.locator("main img").count() == document % 3
        assert message in page.locator(".missing").inner_text()
        with open_client(address) as client:
            answer = client.get(f"/document/{document}/media/1")
            assert (answer.status_code, message in answer.text) == (400, True)
            assert client.get(f"/document/{document}/media/9").status_code == 400


@pytest.mark.slow
def test_stored_bytes_that_are_cut_short_are_named_in_their_place(page, tmp_path, processor):
    store = prepare(write_images(tmp_path / "in", count=2), tmp_path / "store", processor, "embed")
    blobs = store / "train" / "shard_00000.blobs"
    blobs.write_bytes(blobs.read_bytes()[:-100])
    with serving(store) as address:
        open_document(page, address, 1)
        assert page.locator("main img").count() == 1
        assert "it is damaged" in page.locator(".missing").inner_text()
        with open_client(address) as client:
            assert client.get("/document/1/media/0").status_code == 200
            assert client.get("/document/1/media/1").status_code == 500


def test_only_files_below_the_folder_of_the_inputs_are_served(tmp_path, processor):
    store = prepare(write_images(tmp_path / "in", count=2), tmp_path / "store", processor, "reference")
    outside = encode_image(make_image(31, 21, seed=1), quality=90)
    (tmp_path / "0.jpg").write_bytes(outside)
    file = store / "train" / "shard_00000.media"
    data = file.read_bytes()
    assert data.count(b"pictures/1_0.jpg") == 1
    # The store names a file outside, which the resolver refuses before it is opened.
    file.write_bytes(data.replace(b"pictures/1_0.jpg", b".././in/../0.jpg"))
    seal_sidecars(store)
    with serving(store) as address, open_client(address) as client:
        for path in ("/document/1/media/0", "/document/1/media/../../../0.jpg", "/document/1/media/%2e%2e"):
            answer = client.get(path)
            assert answer.status_code in (400, 404)
            assert outside not in answer.content
        assert "is outside" in client.get("/document/1").text


def test_a_page_file_holds_the_images(page, tmp_path, processor):
    store = prepare(write_images(tmp_path / "in", count=3), tmp_path / "store", processor, "reference")
    write_view(ViewSpec(data=[str(store)], document=2), tmp_path / "page.html")
    requests = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto((tmp_path / "page.html").as_uri())
    assert page.locator("img").nth(1).evaluate("image => image.naturalWidth") > 0
    assert [url for url in requests if not url.startswith("data:")] == [(tmp_path / "page.html").as_uri()]
