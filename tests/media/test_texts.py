"""Texts and captions with media: token ids, schemas and quarantine."""

import json
from contextlib import closing

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import batchloom
from batchloom.chat import detect_schema, make_record_reader
from batchloom.core.errors import SchemaError, UnusableRecordError
from batchloom.store import StoreMedia, verify_store
from media.processors import PROCESSORS, save_processor
from media.sample_media import encode_image, make_image, make_messages, make_sound, write_images

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

PLACEHOLDERS = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), "<|vision_start|><|image_pad|><|vision_end|>"),
    "gemma3": "<start_of_image>",
    "qwen2_audio": "<|audio_bos|><|AUDIO|><|audio_eos|>\n",
}


@pytest.fixture(scope="module")
def hf_processors():
    return {name: make_processor() for name, make_processor in PROCESSORS.items()}


@pytest.fixture(scope="module")
def processors(hf_processors, tmp_path_factory):
    folder = tmp_path_factory.mktemp("processors")
    return {name: str(save_processor(processor, folder / name)) for name, processor in hf_processors.items()}


def write_rows(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def prepare_store(source, out, processor, *, media=None, **settings):
    result = batchloom.prepare(
        source,
        out=out,
        tokenizer=processor,
        media={"processor": processor, **(media or {})},
        **{"val_fraction": 0, "dedup": "none", **settings},
    )
    assert verify_store(result.path).faults == []
    return batchloom.open_store(result.path)


def read_quarantine(store):
    lines = (store.path / "quarantine.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def list_media(store):
    return StoreMedia(store).of(np.arange(len(store)))


def write_pictures(folder, count=3):
    sizes = [(120, 80), (50, 120), (100, 100)]
    for number in range(count):
        data = encode_image(make_image(*sizes[number % 3], seed=number), quality=90)
        (folder / f"{number}.jpg").write_bytes(data)


@pytest.mark.parametrize("name", [name for name in PROCESSORS if name != "qwen2_audio"])
def test_ids_are_those_of_the_processor_and_an_end(name, hf_processors, processors, tmp_path):
    write_pictures(tmp_path)
    rows = [
        {"images": ["0.jpg"], "text": "Two cats."},
        {"images": ["1.jpg", "2.jpg"], "text": "Once <image> and \n<image>\n\nthe end <b> \n"},
        {"images": [], "text": "No cat, but <image"},
    ]
    store = prepare_store(write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out", processors[name])
    placeholder = PLACEHOLDERS.get(name, "<image>")
    texts = [f"{placeholder}Two cats.", rows[1]["text"].replace("<image>", placeholder), rows[2]["text"]]
    end = store.tokenizer.end_id
    for number, (row, text) in enumerate(zip(rows, texts, strict=True)):
        images = [Image.open(tmp_path / file) for file in row["images"]] or None
        ids = hf_processors[name](text=[text], images=images)["input_ids"][0]
        assert store[number].ids.tolist() == [*ids, end]
        for image in images or []:
            image.close()
    documents = np.arange(3)
    lengths = store.lengths.take(documents).astype(np.int64)
    masks = store.mask(documents, np.zeros(3, np.int64), lengths)
    decoded = [store.tokenizer.decode(store[n].ids[masks[n]]) for n in range(3)]
    assert decoded[0] == "Two cats.<|endoftext|>" or name == "gemma3"
    assert decoded[0].endswith("Two cats.<|endoftext|>")
    assert masks[2].all()
    for media, mask in zip(list_media(store), masks, strict=True):
        assert all(not mask[medium.start : medium.start + medium.tokens].any() for medium in media)


def test_texts_with_media_may_have_weights(processors, tmp_path):
    write_pictures(tmp_path)
    rows = [
        {"images": ["0.jpg"], "text": "Two cats.", "weight": 0.5},
        {"images": ["1.jpg"], "text": "Three cats.", "weight": 0},
        {"images": [], "text": "No cat.", "weight": 2},
        {"images": ["2.jpg"], "text": "Four cats."},
    ]
    store = prepare_store(write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out", processors["qwen2_vl"])
    weights = [0.5, 2, 1]
    for document, weight in zip(store, weights, strict=True):
        assert (document.loss_weights == np.where(document.mask, weight, 0)).all()
        assert document.mask[-5:].all()


def test_sounds_with_transcriptions(hf_processors, processors, tmp_path):
    (tmp_path / "a.wav").write_bytes(make_sound(20_000))
    rows = [{"audio": "a.wav", "transcription": "Hello world."}]
    folder = processors["qwen2_audio"]
    store = prepare_store(write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out", folder)
    text = PLACEHOLDERS["qwen2_audio"] + "Hello world."
    inputs = hf_processors["qwen2_audio"](text=[text], audio=[np.zeros(20_000, np.float32)], sampling_rate=16_000)
    assert store[0].ids.tolist() == [*inputs["input_ids"][0], store.tokenizer.end_id]
    batch = batchloom.Loader(store, seq_len=400, global_batch_size=1)[0]
    assert batch["input_features"].shape == (1, 80, 3000)


def test_real_images_with_captions_in_batches(hf_processors, processors, tmp_path, real_data):
    """Features of a packed row are the processor's for each document alone."""
    folder = real_data / "multimodal" / "mllm_demo_data"
    rows = [{"image": f"{n}.jpg", "text": f"This is number {n}."} for n in (1, 2, 3)]
    store = prepare_store(
        write_rows(tmp_path / "in.jsonl", rows),
        tmp_path / "out",
        processors["qwen2_vl"],
        media={"data_folder": str(folder)},
    )
    loader = batchloom.Loader(store, seq_len=256, global_batch_size=1, shuffle=False)
    batch = loader[0]
    grids, pixels = [], []
    for n in (1, 2, 3):
        with closing(Image.open(folder / f"{n}.jpg")) as image:
            inputs = hf_processors["qwen2_vl"](text=[PLACEHOLDERS["qwen2_vl"] + f"This is number {n}."], images=[image])
        assert store[n - 1].ids.tolist()[:-1] == list(inputs["input_ids"][0])
        grids.append(inputs["image_grid_thw"])
        pixels.append(inputs["pixel_values"])
    assert sorted(batch["image_grid_thw"].tolist()) == sorted(np.concatenate(grids).tolist())
    total = sum(float(np.abs(array).sum()) for array in pixels)
    assert abs(float(batch["pixel_values"].abs().sum()) - total) < total * 1e-5
    trained = batch["input_ids"][0][batch["labels"][0] != -100].tolist()
    pad = store.tokenizer.control["<|image_pad|>"]
    assert trained.count(store.tokenizer.end_id) == 3
    assert pad not in trained


def test_typed_parts_and_lists_side_by_side(processors, tmp_path):
    write_pictures(tmp_path)
    parts = [
        {"type": "text", "text": "First "},
        {"type": "image", "path": "0.jpg"},
        {"type": "text", "text": " and "},
        {"type": "image_url", "image_url": {"url": "1.jpg"}},
        {"type": "text", "text": "."},
    ]
    typed = prepare_store(write_rows(tmp_path / "a.jsonl", [{"content": parts}]), tmp_path / "a", processors["gemma3"])
    row_of_lists = {"images": [None, "0.jpg", None, "1.jpg", None], "texts": ["First ", None] * 2 + ["."]}
    row_of_lists["texts"][2] = " and "
    lists = prepare_store(write_rows(tmp_path / "b.jsonl", [row_of_lists]), tmp_path / "b", processors["gemma3"])
    row_of_markers = {"text": "First <image> and <image>.", "images": ["0.jpg", "1.jpg"]}
    marked = prepare_store(write_rows(tmp_path / "c.jsonl", [row_of_markers]), tmp_path / "c", processors["gemma3"])
    assert typed[0].ids.tolist() == lists[0].ids.tolist() == marked[0].ids.tolist()
    assert [medium.location for medium in list_media(lists)[0]] == ["0.jpg", "1.jpg"]


def read_records(rows, **mapping):
    schema = detect_schema(rows, mapping, media=True)
    return [make_record_reader(schema)(row) for row in rows]


def test_texts_that_follow_one_another_are_paragraphs():
    (document,) = read_records([{"texts": ["a", "b", None, "", "c"], "images": [None, None, "x", None, None]}])
    assert document.texts == ["a\n\nb", "c"]
    assert [medium.location for medium in document.media] == ["x"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "<image>a<image>", "images": ["x"]}, "a placeholder <image> without its image"),
        ({"text": "<image>a", "images": ["x", "y"]}, r"images\[1\] has none"),
        ({"text": None, "images": ["x", "y"]}, "holds 2 media and no text in column 'text'"),
        ({"images": ["x"]}, "holds a medium and no text in column 'text'"),
        ({"text": 5, "images": ["x"]}, "column 'text' holds a number, not text"),
        ({"text": "a", "images": [None]}, r"images\[0\] holds null"),
        ({"text": ["a", None], "images": ["x", "y"]}, "index 0 has a value in each of text and images"),
        ({"text": ["a"], "images": ["x", "y"]}, "'text' has 1 item and column 'images' 2 items"),
        ({"text": ["a", 5], "images": [None, None]}, r"text\[1\] holds a number, not text"),
        ({"text": ["a", None], "images": "x"}, "and column 'images' a string"),
        ({"text": [{"type": "frames"}], "images": []}, "a part of type 'frames'"),
    ],
)  # fmt: skip
def test_bad_records_are_refused_with_a_reason(row, message):
    schema = detect_schema([{"text": "<image>", "images": ["x"]}], media=True)
    with pytest.raises(UnusableRecordError, match=message):
        make_record_reader(schema)(row)


def test_other_records_keep_their_schema():
    plain = [{"text": "a <image> in words"}]
    assert detect_schema(plain, media=True).form == "text"
    assert detect_schema([{"text": "a", "images": ["x"]}]).form == "text"
    rows = [{"messages": make_messages("<image>?", "A cat."), "image": "x", "text": "rendered"}]
    assert detect_schema(rows, media=True).form == "messages"
    assert detect_schema(rows, {"text": "text"}, media=True).form == "interleaved"
    assert read_records([{"body": "b", "pic": "x"}], text="body", images="pic")[0].media[0].location == "x"
    with pytest.raises(SchemaError, match="no schema fits"):
        detect_schema([{"caption": "a"}], media=True)


def test_media_after_the_first_records_are_quarantined(processors, tmp_path):
    write_pictures(tmp_path)
    rows = [{"text": f"number {n}"} for n in range(150)]
    rows.append({"text": "<image>", "images": ["0.jpg"]})
    store = prepare_store(write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out", processors["qwen2_vl"], max_bad=1)
    assert len(store) == 150
    (bad,) = read_quarantine(store)
    assert bad["line"] == 151
    assert "the first records of the file have no media" in bad["reason"]


@pytest.mark.parametrize("form", ["pair", "label"])
def test_preferences_do_not_lose_their_images(form, processors, tmp_path):
    write_pictures(tmp_path)
    rows = [{"prompt": f"Who is {n}?", "chosen": "A cat.", "rejected": "No."} for n in range(2)]
    if form == "label":
        rows = [{"prompt": f"Who is {n}?", "completion": "A cat.", "label": True} for n in range(2)]
    rows[1]["images"] = ["0.jpg"]
    file = write_rows(tmp_path / "in.jsonl", rows)
    store = prepare_store(file, tmp_path / "out", processors["qwen2_vl"], max_bad=1)
    assert store.contents.objective == ("labels" if form == "label" else "pairs")
    (bad,) = read_quarantine(store)
    assert bad["line"] == 2
    assert "holds 1 image and 0 placeholders for them" in bad["reason"]


def test_a_text_with_a_broken_image_is_quarantined(processors, tmp_path):
    write_pictures(tmp_path)
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "0.jpg").read_bytes()[:-300])
    rows = [
        {"image": "0.jpg", "text": "A cat."},
        {"image": "cut.jpg", "text": "Half a cat."},
        {"image": "../0.jpg", "text": "A cat elsewhere."},
        {"image": "1.jpg", "text": " \n"},
    ]
    store = prepare_store(write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out", processors["qwen2_vl"], max_bad=2)
    assert len(store) == 1
    quarantined = read_quarantine(store)
    assert [entry["line"] for entry in quarantined] == [2, 3]
    assert "cut short" in quarantined[0]["reason"]
    assert "is outside" in quarantined[1]["reason"]


def make_table(folder, form):
    data = [(folder / f"{n}.jpg").read_bytes() for n in range(3)]
    captions = [f"This is cat {n}." for n in range(3)]
    image_type = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    structs = [{"bytes": image, "path": None} for image in data]
    if form == "lists":
        pairs = pa.array([[image, image] for image in structs], pa.list_(image_type, 2))
        return pa.table({"images": pairs, "caption": captions})
    if form == "binary":
        return pa.table({"image": pa.array(data, pa.binary()), "text": captions})
    return pa.table({"image": pa.array(structs, image_type), "text": captions, "label": [0, 1, 2]})


@pytest.mark.parametrize("form", ["struct", "binary", "lists"])
def test_columns_of_images_and_captions(form, processors, tmp_path):
    write_pictures(tmp_path)
    pq.write_table(make_table(tmp_path, form), tmp_path / "in.parquet")
    store = prepare_store(tmp_path / "in.parquet", tmp_path / "out", processors["qwen2_vl"])
    media = list_media(store)
    assert [len(document_media) for document_media in media] == [2 if form == "lists" else 1] * 3
    for number, document_media in enumerate(media):
        for medium in document_media:
            path, begin = medium.blob
            data = path.read_bytes()[begin : begin + medium.size]
            assert data == (tmp_path / f"{number}.jpg").read_bytes()
    assert list(batchloom.Loader(store, seq_len=300, global_batch_size=2))


def test_columns_of_sounds_and_transcriptions(processors, tmp_path):
    data = [make_sound(8_000 + 999 * n, seed=n, form="FLAC") for n in range(3)]
    audio_type = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    sounds = pa.array([{"bytes": content, "path": f"{n}.flac"} for n, content in enumerate(data)], audio_type)
    table = pa.table({"audio": sounds, "text": [f"Sound {n}." for n in range(3)]})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=2)
    store = prepare_store(tmp_path / "in.parquet", tmp_path / "out", processors["qwen2_audio"])
    for content, media in zip(data, list_media(store), strict=True):
        path, begin = media[0].blob
        assert path.read_bytes()[begin : begin + media[0].size] == content
    batch = batchloom.Loader(store, seq_len=100, global_batch_size=3)[0]
    assert batch["input_features"].shape == (3, 80, 3000)


def test_columns_that_datasets_writes(processors, tmp_path):
    datasets = pytest.importorskip("datasets")
    write_pictures(tmp_path)
    features = datasets.Features(
        {"image": datasets.Image(), "text": datasets.Value("string"), "tags": datasets.List(datasets.Value("int8"), length=2)}
    )  # fmt: skip
    rows = {
        "image": [str(tmp_path / f"{n}.jpg") for n in range(3)],
        "text": [f"This is cat {n}." for n in range(3)],
        "tags": [[1, 2]] * 3,
    }
    dataset = datasets.Dataset.from_dict(rows, features=features)
    dataset.to_parquet(tmp_path / "in.parquet")
    store = prepare_store(tmp_path / "in.parquet", tmp_path / "out", processors["qwen2_vl"])
    assert [len(document_media) for document_media in list_media(store)] == [1, 1, 1]
    dataset.save_to_disk(tmp_path / "saved")
    media = {"data_folder": "/"}
    saved = prepare_store(tmp_path / "saved", tmp_path / "again", processors["qwen2_vl"], media=media)
    assert [saved[n].ids.tolist() for n in range(3)] == [store[n].ids.tolist() for n in range(3)]


def test_texts_and_conversations_in_one_store_and_its_order(processors, tmp_path):
    """The store does not depend on the number of workers, and can be appended to."""
    talks = write_images(tmp_path / "in", 4)
    write_pictures(tmp_path / "in")
    rows = [{"image": f"{n % 3}.jpg", "text": f"This is cat {n}."} for n in range(40)]
    captions = write_rows(tmp_path / "in" / "captions.jsonl", rows)
    (tmp_path / "in" / "plain.txt").write_text("A text of its own.\n")
    folder = processors["qwen2_vl"]
    inputs = [talks, captions, tmp_path / "in" / "plain.txt"]
    stores = [
        prepare_store(inputs, tmp_path / f"out{workers}", folder, workers=workers, dedup="exact") for workers in (1, 2)
    ]
    files = sorted(path for path in stores[0].path.rglob("*") if path.is_file())
    assert len(files) > 6
    for file in files:
        parallel_file = stores[1].path / file.relative_to(stores[0].path)
        assert file.name == "report.json" or "report" in file.name or (
            file.read_bytes() == parallel_file.read_bytes()
        )  # fmt: skip
    assert len(stores[0]) == 5 + 40 + 1
    added_file = write_rows(tmp_path / "in" / "more.jsonl", [{"image": "0.jpg", "caption": "Another cat."}])
    batchloom.prepare(added_file, out=stores[0].path, append=True, media={"processor": folder})
    grown = batchloom.open_store(stores[0].path)
    assert len(grown) == 47
    assert grown.tokenizer.decode(grown[46].ids).endswith("Another cat.<|endoftext|>")
    loader = batchloom.Loader(grown, seq_len=600, global_batch_size=2)
    assert loader.plan.spec.overlong == "drop"
    assert sum(len(batch["image_grid_thw"]) for batch in loader if "image_grid_thw" in batch) > 40


def test_captions_of_equal_words_about_other_images_are_no_duplicates(processors, tmp_path):
    write_pictures(tmp_path)
    rows = [{"image": f"{n % 3}.jpg", "text": "A photo."} for n in range(5)]
    rows += [{"text": "A photo."}, {"text": "A photo."}]
    store = prepare_store(
        write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out", processors["gemma3"], dedup="exact"
    )
    assert [store.provenance.of(number).record for number in range(len(store))] == [0, 1, 2, 5]
