"""Folders of media with captions in a table or in text files of the same name."""

import csv
import json
import shutil

import numpy as np
import pytest

import batchloom
from batchloom.core.errors import InputMissingError
from batchloom.store import StoreMedia, verify_store
from media.processors import PROCESSORS, save_processor
from media.sample_media import encode_image, make_image, make_messages, make_sound

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    return str(save_processor(PROCESSORS["qwen2_vl"](), tmp_path_factory.mktemp("processor")))


@pytest.fixture
def folder(tmp_path):
    """Folder with images, one of them in a subfolder."""
    cats = tmp_path / "cats"
    (cats / "more").mkdir(parents=True)
    for number in range(4):
        path = cats / ("more" if number == 3 else ".") / f"{number}.v1.jpg"
        path.write_bytes(encode_image(make_image(60 + 20 * number, 80, seed=number)))
    return cats


def prepare_store(source, out, processor, **settings):
    media = {"processor": processor, **settings.pop("media", {})}
    result = batchloom.prepare(
        source,
        out=out,
        tokenizer=processor,
        media=media,
        **{"val_fraction": 0, "dedup": "none", **settings},
    )
    assert verify_store(result.path).faults == []
    return batchloom.open_store(result.path), result.notes


def read_captions(store):
    """Return per document the locations of its media, and its last words."""
    media = StoreMedia(store).of(np.arange(len(store)))
    texts = [store.tokenizer.decode(store[n].ids).rpartition("|>")[0] for n in range(len(store))]
    captions = [text.rpartition("|>")[2].removesuffix("<|endoftext") for text in texts]
    return [([medium.location for medium in row], text) for row, text in zip(media, captions, strict=True)]


NAMES = ["0.v1.jpg", "1.v1.jpg", "2.v1.jpg", "more/3.v1.jpg"]


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_a_table_names_the_images_next_to_it(form, folder, processor, tmp_path):
    rows = [{"file_name": name, "text": f"Cat {n}."} for n, name in enumerate(NAMES)]
    if form == "jsonl":
        (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with (folder / "metadata.csv").open("w") as file:
            writer = csv.DictWriter(file, ["file_name", "text"])
            writer.writeheader()
            writer.writerows(rows)
    store, notes = prepare_store(folder, tmp_path / "out", processor)
    assert read_captions(store) == [([name], f"Cat {n}.") for n, name in enumerate(NAMES)]
    assert not any("Left out" in note for note in notes)
    batches = list(batchloom.Loader(store, seq_len=300, global_batch_size=2))
    assert sum(len(batch["image_grid_thw"]) for batch in batches) == 4


def test_a_table_of_conversations_and_of_several_images(folder, processor, tmp_path):
    rows = [
        {"file_name": NAMES[0], "messages": make_messages("<image>Who?", "A cat.")},
        {"file_names": NAMES[1:3], "messages": make_messages("<image> and <image>?", "Two cats.")},
    ]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    store, _ = prepare_store(folder, tmp_path / "out", processor)
    media = StoreMedia(store).of(np.arange(2))
    assert [[medium.location for medium in row] for row in media] == [[NAMES[0]], NAMES[1:3]]


def test_rows_that_name_no_media_are_quarantined(folder, processor, tmp_path):
    rows = [
        {"file_name": NAMES[0], "text": "A cat."},
        {"file_name": "cat.zip", "text": "No cat."},
        {"file_name": 5, "text": "No cat."},
        {"file_name": "gone.jpg", "text": "No cat."},
        {"file_name": "a.wav", "text": "A sound."},
        {"file_name": NAMES[1], "images": [NAMES[2]], "text": "Which cat?"},
    ]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "a.wav").write_bytes(make_sound())
    store, _ = prepare_store(folder, tmp_path / "out", processor, max_bad=5)
    assert read_captions(store) == [([NAMES[0]], "A cat.")]
    lines = (store.path / "quarantine.jsonl").read_text().splitlines()
    reasons = [json.loads(line)["reason"] for line in lines]
    for reason, message in zip(
        reasons,
        (
            "names 'cat.zip', which has no image, audio or video extension",
            "'file_name' holds a number, not the name of a file",
            "gone.jpg) is missing",
            "is audio, but the processor takes only image",
            "columns 'file_name' and 'images' both name media",
        ),
        strict=True,
    ):
        assert message in reason


def test_texts_named_as_images_are_their_captions(folder, processor, tmp_path):
    for number, name in enumerate(NAMES):
        (folder / name).with_suffix(".txt").write_text(f"Cat {number},\n\nfat.\r\n")
    (folder / "1.v1.png").write_bytes(encode_image(make_image(), "PNG"))
    (folder / "alone.jpg").write_bytes(encode_image(make_image()))
    (folder / "plain.txt").write_text("Line one.\nLine two.\n")
    settings = {"media": {"data_folder": str(tmp_path)}, "split_on": "line"}
    store, notes = prepare_store(folder, tmp_path / "out", processor, **settings)
    file_names = [name.rpartition("/")[2] for name in NAMES]
    assert read_captions(store) == [
        ([file_names[0]], "Cat 0,\n\nfat."),
        ([file_names[1], "1.v1.png"], "Cat 1,\n\nfat."),
        ([file_names[2]], "Cat 2,\n\nfat."),
        ([file_names[3]], "Cat 3,\n\nfat."),
        ([], "Line one."),
        ([], "Line two."),
    ]
    assert any("1 image or sound without a text file of the same name" in note for note in notes)
    assert any("texts next to media of the same name" in note for note in notes)
    folders = {StoreMedia(store).folder_of(n) for n in range(4)}
    assert folders == {str(folder), str(folder / "more")}
    parallel_out = tmp_path / "again"
    prepare_store(folder, parallel_out, processor, workers=2, **settings)
    for file in (store.path / "train").iterdir():
        assert file.read_bytes() == (parallel_out / "train" / file.name).read_bytes()
    batches = list(batchloom.Loader(store, seq_len=300, global_batch_size=2))
    assert sum(len(batch.get("image_grid_thw", ())) for batch in batches) == 5


def test_new_images_are_seen_by_the_next_run(folder, processor, tmp_path):
    (folder / "0.v1.txt").write_text("Cat.")
    image = folder / "0.v1.jpg"
    image.rename(tmp_path / "away.jpg")
    assert read_captions(prepare_store(folder, tmp_path / "out", processor)[0]) == [([], "Cat.")]
    (tmp_path / "away.jpg").rename(image)
    assert read_captions(prepare_store(folder, tmp_path / "again", processor)[0]) == [([image.name], "Cat.")]


def test_a_caption_without_its_image_is_a_text(folder, processor, tmp_path):
    (folder / "0.v1.txt").write_text("Cat.")
    (folder / "0.v1.jpg").unlink()
    store, _ = prepare_store(folder, tmp_path / "out", processor)
    assert read_captions(store) == [([], "Cat.")]


def test_a_cut_image_with_a_caption_is_quarantined(folder, processor, tmp_path):
    for name in NAMES[:3]:
        (folder / name).with_suffix(".txt").write_text("Cat.")
    data = (folder / NAMES[1]).read_bytes()
    (folder / NAMES[1]).write_bytes(data[:-200])
    store, _ = prepare_store(folder, tmp_path / "out", processor, max_bad=1)
    assert [locations for locations, _ in read_captions(store)] == [[NAMES[0]], [NAMES[2]]]
    (bad,) = map(json.loads, (store.path / "quarantine.jsonl").read_text().splitlines())
    assert bad["source"].endswith("1.v1.txt")
    assert "image 1 (1.v1.jpg)" in bad["reason"]
    assert "cut short" in bad["reason"]


def test_images_alone_are_no_input(folder, processor, tmp_path):
    shutil.rmtree(folder / "more")
    with pytest.raises(InputMissingError, match="3 images and sounds without a text file of the same name"):
        prepare_store(folder, tmp_path / "out", processor)


@pytest.mark.parametrize("keep", ["reference", "embed"])
def test_images_behind_a_link_that_leaves_the_folder_are_read_only_where_links_are_followed(
    folder, processor, tmp_path, keep
):
    outside = tmp_path / "outside"
    outside.mkdir()
    for link, target in ((NAMES[0], outside / "cat.jpg"), (NAMES[3], outside / "deep.jpg")):
        shutil.move(folder / link, target)
        (folder / link).symlink_to(target)
    (folder / "again.jpg").symlink_to(NAMES[1])
    names = (*NAMES, "again.jpg")
    rows = [{"file_name": name, "text": f"Cat {n}."} for n, name in enumerate(names)]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"media": {"keep": keep}, "max_bad": 5}
    store, _ = prepare_store(folder, tmp_path / "some", processor, **settings)
    inside = [NAMES[1], NAMES[2], "again.jpg"]
    assert len(store) == len(inside)
    lines = (store.path / "quarantine.jsonl").read_text().splitlines()
    reasons = [json.loads(line)["reason"] for line in lines]
    assert len(reasons) == 2
    assert all("through a symbolic link to " in reason for reason in reasons)
    assert all("--follow-links" in reason for reason in reasons)
    store, _ = prepare_store(folder, tmp_path / "all", processor, follow_links=True, **settings)
    assert len(store) == len(names)
    # Batches follow the links that prepare followed.
    batches = list(batchloom.Loader(store, seq_len=300, global_batch_size=1))
    assert sum(len(batch["image_grid_thw"]) for batch in batches) == len(names)
