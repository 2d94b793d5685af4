"""Stores of conversations with media: tokens, media files and quarantine."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import batchloom
from batchloom import InputError, SettingsError, StoreError
from batchloom.cli import run_command_line
from batchloom.core.errors import InputMissingError, StoreConflictError
from batchloom.media import open_processor
from batchloom.store import (
    MEDIA_ROW_DTYPE,
    NOT_STORED,
    MediaRows,
    ShardMedia,
    StoreMedia,
    compact_store,
    map_media,
    remove_documents,
    verify_store,
)
from media.processors import PROCESSORS, save_processor
from media.sample_media import encode_image, make_image, make_messages, make_sound, write_images, write_sounds

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def processors(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processors")
    return {
        name: str(save_processor(PROCESSORS[name](), folder / name)) for name in ("qwen2_vl", "qwen2_audio", "gemma3")
    }


def prepare_store(file, out, processor, **settings):
    media = {"processor": processor, **settings.pop("media", {})}
    batchloom.prepare(
        file,
        out=out,
        tokenizer=processor,
        media=media,
        val_fraction=0,
        **{"dedup": "none", **settings},
    )
    return batchloom.open_store(out)


@pytest.fixture(scope="module")
def talks_file(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("talks"))


@pytest.fixture(scope="module")
def store(tmp_path_factory, talks_file, processors):
    return prepare_store(talks_file, tmp_path_factory.mktemp("made") / "store", processors["qwen2_vl"])


def test_every_document_names_its_media_and_their_tokens(store, talks_file, processors):
    rows = json.loads(talks_file.read_text())
    processor = open_processor(Path(processors["qwen2_vl"]))
    family, pad = processor.families["image"], store.tokenizer.control["<|image_pad|>"]
    media = StoreMedia(store)
    assert media.any
    assert list_media_folders(store) == {str(talks_file.parent)}
    for number in range(len(store)):
        row = rows[store.provenance.of(number).record]
        (items,) = media.of(np.array([number]))
        assert [item.location for item in items] == row.get("images", [])
        ids = store[number].ids
        for item in items:
            facts = item.facts
            assert family.expand(facts).runs == (item.tokens,)
            assert (ids[item.start : item.start + item.tokens] == pad).all()
            assert item.size == (talks_file.parent / item.location).stat().st_size
            assert item.blob is None
        assert int((ids == pad).sum()) == sum(item.tokens for item in items)


def test_a_store_with_media_is_checked(store, tmp_path):
    assert verify_store(store.path).faults == []
    copy = tmp_path / "copy"
    shutil.copytree(store.path, copy)
    file = copy / "train" / "shard_00000.media"
    data = bytearray(file.read_bytes())
    data[40] ^= 1
    file.write_bytes(data)
    assert "shard_00000.media: checksum differs" in verify_store(copy).faults[0]
    file.write_bytes(data[:-1])
    assert "in 3,0" in verify_store(copy).faults[0] or "bytes of locations" in verify_store(copy).faults[0]
    file.unlink()
    assert "shard_00000.media" in verify_store(copy).faults[0]


def test_the_same_job_gives_the_same_bytes_with_any_workers(tmp_path, store, processors):
    folder = tmp_path / "many"
    folder.mkdir()
    rows = json.loads((find_talks_file(store)).read_text())
    shutil.copytree(find_talks_file(store).parent / "pictures", folder / "pictures")
    for number in range(3):
        (folder / f"{number}.json").write_text(json.dumps(rows[number::3]))
    stores = [
        prepare_store(folder, tmp_path / f"out{workers}", processors["qwen2_vl"], workers=workers) for workers in (1, 2)
    ]
    first, second = (
        {file.relative_to(built.path): file.read_bytes() for file in (built.path / "train").iterdir()}
        for built in stores
    )
    assert first == second
    assert Path("train/shard_00000.media") in first


def list_media_folders(store):
    return set(StoreMedia(store).folders) - {None}


def find_talks_file(store):
    (folder,) = list_media_folders(store)
    return Path(folder) / "talks.json"


def test_embedded_media_are_stored_once(tmp_path, processors):
    file = write_images(tmp_path / "in", 3)
    rows = json.loads(file.read_text())
    file.write_text(json.dumps([*rows, {**rows[0], "messages": make_messages("<image>Again?", "It is.")}]))
    store = prepare_store(file, tmp_path / "out", processors["qwen2_vl"], media={"keep": "embed"})
    media = [medium for document_media in StoreMedia(store).of(np.arange(len(store))) for medium in document_media]
    assert len(media) == 7
    by_location = {medium.location: medium for medium in media}
    blobs = store.path / "train" / "shard_00000.blobs"
    assert blobs.stat().st_size == sum(medium.size for medium in by_location.values())
    for medium in media:
        path, begin = medium.blob
        data = path.read_bytes()[begin : begin + medium.size]
        assert data == (file.parent / medium.location).read_bytes()
    assert verify_store(store.path).faults == []
    data = bytearray(blobs.read_bytes())
    data[7] ^= 1
    blobs.write_bytes(data)
    assert "shard_00000.blobs: checksum differs" in verify_store(store.path).faults[0]
    blobs.write_bytes(data[:-1])
    assert any("its media end at" in fault for fault in verify_store(store.path).faults)


def test_media_in_records_are_always_embedded(tmp_path, processors):
    import pyarrow as pa
    import pyarrow.parquet as pq

    data = encode_image(make_image(), "PNG")
    table = {
        "messages": [make_messages("<image>?", "A cat.")],
        "images": [[{"bytes": data, "path": "a.png"}]],
    }
    pq.write_table(pa.table(table), tmp_path / "in.parquet")
    store = prepare_store(tmp_path / "in.parquet", tmp_path / "out", processors["qwen2_vl"])
    ((medium,),) = StoreMedia(store).of(np.array([0]))
    assert medium.location == ""
    assert medium.blob[0].read_bytes() == data


def test_placeholders_of_records_without_media_are_counted_texts(tmp_path, processors, caplog):
    answer = "1. <audio>: sound\n2. <video>: film\n3. <image>"
    rows = [{"messages": make_messages("New elements of HTML?", answer)}, {"messages": make_messages("And?", "None.")}]
    file = tmp_path / "in.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0]]))
    store = prepare_store(file, tmp_path / "out", processors["qwen2_vl"])
    [first, _, last] = [store.tokenizer.decode(store[number].ids) for number in range(len(store))]
    assert answer in first
    assert answer in last
    [note] = [message for message in caplog.messages if "markers of media, such as <image>" in message]
    assert ": 2 records, first in.jsonl, line 1. " in note


def test_sounds_are_stored_with_their_true_lengths(tmp_path, processors):
    file = write_sounds(tmp_path / "in")
    store = prepare_store(file, tmp_path / "out", processors["qwen2_audio"])
    family = open_processor(Path(processors["qwen2_audio"])).families["audio"]
    token = store.tokenizer.control["<|AUDIO|>"]
    for number, (medium,) in enumerate(StoreMedia(store).of(np.arange(len(store)))):
        assert (store[number].ids == token).sum() == medium.tokens == family.expand(medium.facts).runs[0]


BAD = {
    "no medium": (
        {"messages": make_messages("<image><image>?", "A."), "images": ["good.png"]},
        "placeholder <image> without its image",
    ),
    "no placeholder": ({"messages": make_messages("?", "A."), "images": ["good.png"]}, "has none"),
    "missing": (
        {"messages": make_messages("<image>?", "A."), "images": ["none.png"]},
        r"image 1 \(none.png\) is missing",
    ),
    "empty": (
        {"messages": make_messages("<image>?", "A."), "images": ["empty.png"]},
        r"is empty \(0 bytes\)",
    ),
    "cut": (
        {"messages": make_messages("<image>?", "A."), "images": ["cut.jpg"]},
        "begins as JPEG but cannot be read",
    ),
    "svg": ({"messages": make_messages("<image>?", "A."), "images": ["drawing.png"]}, "an SVG drawing"),
    "outside": (
        {"messages": make_messages("<image>?", "A."), "images": ["../../etc/passwd"]},
        "is outside",
    ),
    "thin": ({"messages": make_messages("<image>?", "A."), "images": ["thin.png"]}, "more than 200"),
    "large": (
        {"messages": make_messages("<image>?", "A."), "images": ["large.png"]},
        "more than the 90,000 that are allowed",
    ),
    "a sound": (
        {"messages": make_messages("<audio>?", "A."), "audios": ["a.wav"]},
        "is audio, but the processor takes only image",
    ),
}


def test_unusable_records_are_quarantined_with_their_line(tmp_path, processors):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "good.png").write_bytes(encode_image(make_image(), "PNG"))
    (folder / "empty.png").write_bytes(b"")
    (folder / "cut.jpg").write_bytes(encode_image(make_image(200, 200))[:3000])
    (folder / "drawing.png").write_text("<svg xmlns='http://www.w3.org/2000/svg'></svg>")
    (folder / "thin.png").write_bytes(encode_image(make_image(4000, 3), "PNG"))
    (folder / "large.png").write_bytes(encode_image(make_image(400, 300), "PNG"))
    (folder / "a.wav").write_bytes(make_sound())
    good = {"messages": make_messages("<image>Who?", "A cat."), "images": ["good.png"]}
    lines = [row for bad, _ in BAD.values() for row in (bad, good)]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    store = prepare_store(
        folder / "in.jsonl",
        tmp_path / "out",
        processors["qwen2_vl"],
        media={"image_pixels": 90_000},
        max_bad=50,
    )
    assert len(store) == len(BAD)
    quarantined = [json.loads(line) for line in (store.path / "quarantine.jsonl").read_text().splitlines()]
    assert [entry["line"] for entry in quarantined] == [1 + 2 * number for number in range(len(BAD))]
    for entry, (_, message) in zip(quarantined, BAD.values(), strict=True):
        assert re.search(message, entry["reason"]), entry["reason"]


def test_equal_texts_about_other_images_are_no_duplicates(tmp_path, processors):
    for number in (0, 1):
        (tmp_path / f"{number}.png").write_bytes(encode_image(make_image(seed=number), "PNG"))
    (tmp_path / "same.png").write_bytes((tmp_path / "0.png").read_bytes())
    rows = [
        {"messages": make_messages("<image>Who?", "A cat."), "images": [f"{name}.png"]} for name in ("0", "1", "same")
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    store = prepare_store(tmp_path / "in.jsonl", tmp_path / "out", processors["qwen2_vl"], dedup="exact")
    assert [store.provenance.of(number).record for number in range(len(store))] == [0, 1]


def test_near_duplicates_about_other_images_stay(tmp_path, processors):
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(encode_image(make_image(seed=number), "PNG"))
    text = "It is a cat that sits on a mat and looks at a bird that sits on a tree. " * 3
    rows = [
        {"messages": make_messages("<image>Describe it.", text), "images": [f"{number % 4}.png"]} for number in range(4)
    ]
    rows.append({"messages": make_messages("<image>Describe it!", text), "images": ["0.png"]})
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    store = prepare_store(tmp_path / "in.jsonl", tmp_path / "out", processors["qwen2_vl"], dedup="near")
    assert [store.provenance.of(number).record for number in range(len(store))] == [0, 1, 2, 3]


def test_paths_begin_in_the_current_folder(tmp_path, processors, monkeypatch):
    write_images(tmp_path / "in", 2)
    monkeypatch.chdir(tmp_path / "in")
    store = prepare_store("talks.json", tmp_path / "out", processors["qwen2_vl"])
    assert len(store) == 3
    explicit = prepare_store("talks.json", tmp_path / "again", processors["qwen2_vl"], media={"data_folder": "."})
    assert len(explicit) == 3


def test_images_side_by_side_whose_text_is_joined(tmp_path):
    """Gemma 3 puts line ends around an image; those of two images may be one token."""
    import tokenizers

    processor = PROCESSORS["gemma3"]()
    folder = save_processor(processor, tmp_path / "processor")
    file = folder / "tokenizer.json"
    definition = json.loads(file.read_text())
    vocabulary, merges = definition["model"]["vocab"], definition["model"]["merges"]
    added_ids = [entry["id"] for entry in definition["added_tokens"]]
    for token in ("\u010a\u010a", "\u010a\u010a\u010a\u010a"):
        if token not in vocabulary:
            vocabulary[token] = max([*vocabulary.values(), *added_ids]) + 1
        half = token[: len(token) // 2]
        if [half, half] not in merges:
            merges.append([half, half])
    file.write_text(json.dumps(definition))
    ids = tokenizers.Tokenizer.from_file(str(file)).encode("\n\n\n\n<start_of_image>").ids
    assert len(ids) == 2
    (tmp_path / "a.png").write_bytes(encode_image(make_image(), "PNG"))
    row = {"messages": make_messages("<image><image>Who?", "Cats."), "images": ["a.png", "a.png"]}
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n")
    store = prepare_store(tmp_path / "in.jsonl", tmp_path / "out", str(folder))
    (media,) = StoreMedia(store).of(np.array([0]))
    control = store.tokenizer.control
    for medium in media:
        ids = store[0].ids[medium.start : medium.start + medium.tokens]
        assert (ids[0], ids[-1]) == (control["<start_of_image>"], control["<end_of_image>"])


def test_appended_files_of_one_name_keep_their_own_folders(tmp_path, processors):
    files = [write_images(tmp_path / name, count) for name, count in (("one", 2), ("two", 3))]
    for number, file in enumerate(files):
        if number:
            rows = json.loads(file.read_text())
            for row in rows:
                row["messages"][1]["content"] += " Again."
            file.write_text(json.dumps(rows))
        batchloom.prepare(
            file,
            out=tmp_path / "out",
            append=bool(number),
            tokenizer=None if number else processors["qwen2_vl"],
            media={"processor": processors["qwen2_vl"]},
            val_fraction=0,
            dedup="none",
        )
    store = batchloom.open_store(tmp_path / "out")
    media = StoreMedia(store)
    folders = [media.folder_of(number) for number in range(len(store))]
    assert sorted(set(folders)) == [str(tmp_path / "one"), str(tmp_path / "two")]
    assert list(batchloom.Loader(store, seq_len=900, global_batch_size=2))


def test_appended_media_are_embedded_as_the_first_are(tmp_path, processors):
    file = write_images(tmp_path / "one", 2)
    embedded = prepare_store(file, tmp_path / "out", processors["qwen2_vl"], media={"keep": "embed"})
    assert embedded.manifest.recipe["reading"]["media"]["keep"] == "embed"
    added_file = write_images(tmp_path / "two", 3).rename(tmp_path / "two" / "more.json")
    batchloom.prepare(added_file, out=tmp_path / "out", append=True, media={"processor": processors["qwen2_vl"]})
    grown = batchloom.open_store(tmp_path / "out")
    media = [medium for document_media in StoreMedia(grown).of(np.arange(len(grown))) for medium in document_media]
    assert all(medium.blob is not None for medium in media)


def test_an_absolute_data_folder_is_given_again_to_append(tmp_path, processors):
    file = write_images(tmp_path / "in", 2)
    moved = file.rename(tmp_path / "talks.json")
    media = {"data_folder": str(tmp_path / "in")}
    prepare_store(moved, tmp_path / "out", processors["qwen2_vl"], media=media)
    added_file = tmp_path / "more.json"
    added_file.write_text(moved.read_text().replace("number", "item"))
    with pytest.raises(SettingsError, match="was made of media below a folder 'in'"):
        batchloom.prepare(added_file, out=tmp_path / "out", append=True, media={"processor": processors["qwen2_vl"]})
    batchloom.prepare(
        added_file,
        out=tmp_path / "out",
        append=True,
        media={"processor": processors["qwen2_vl"], **media},
    )


def test_check_and_loaders_find_a_changed_processor(store, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(store.path, copy)
    file = copy / "processor_state.json"
    state = json.loads(file.read_text())
    file.write_text(json.dumps({**state, "tokens": {"image": "<|im_end|>"}}))
    assert "processor_state.json is not the one" in verify_store(copy).faults[0]
    with pytest.raises(StoreError, match="is not the one that the manifest next to it names"):
        batchloom.Loader(batchloom.open_store(copy), seq_len=600, global_batch_size=1)
    file.unlink()
    assert "processor_state.json cannot be read" in verify_store(copy).faults[0]


def test_paths_begin_in_the_data_folder(tmp_path, processors):
    file = write_images(tmp_path / "in", 2)
    moved = tmp_path / "elsewhere.json"
    file.rename(moved)
    with pytest.raises(InputError, match="is missing"):
        prepare_store(moved, tmp_path / "out", processors["qwen2_vl"], max_bad=0)
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    store = prepare_store(moved, tmp_path / "out", processors["qwen2_vl"], media={"data_folder": str(tmp_path / "in")})
    assert list_media_folders(store) == {str(tmp_path / "in")}


def test_removed_and_compacted_documents_take_their_media_along(tmp_path, processors):
    file = write_images(tmp_path / "in", 5)
    store = prepare_store(file, tmp_path / "out", processors["qwen2_vl"], media={"keep": "embed"})
    before = {
        store.provenance.of(n).record: media for n, media in enumerate(StoreMedia(store).of(np.arange(len(store))))
    }
    removed = store.provenance.of(2)
    (tmp_path / "gone.txt").write_text(f"{removed.hash}\n")
    remove_documents(store.path, documents_file=tmp_path / "gone.txt")
    compact_store(store.path)
    assert verify_store(store.path).faults == []
    after = batchloom.open_store(store.path)
    assert len(after) == len(store) - 1
    for number, media in enumerate(StoreMedia(after).of(np.arange(len(after)))):
        record = after.provenance.of(number).record
        assert record != removed.record
        fields = [(medium.location, medium.start, medium.tokens, medium.digest, medium.size) for medium in media]
        assert fields == [
            (medium.location, medium.start, medium.tokens, medium.digest, medium.size) for medium in before[record]
        ]
        for medium in media:
            path, begin = medium.blob
            assert path.read_bytes()[begin : begin + medium.size] == (file.parent / medium.location).read_bytes()


def test_more_conversations_are_appended_with_the_same_processor(tmp_path, processors):
    first_file = write_images(tmp_path / "one", 3)
    store = prepare_store(first_file, tmp_path / "out", processors["qwen2_vl"])
    second_file = write_images(tmp_path / "two", 4)
    second_file = second_file.rename(second_file.with_name("more.json"))
    batchloom.prepare(second_file, out=tmp_path / "out", append=True, media={"processor": processors["qwen2_vl"]})
    grown = batchloom.open_store(tmp_path / "out")
    assert len(grown) > len(store)
    assert verify_store(grown.path).faults == []
    store_media = StoreMedia(grown)
    assert list_media_folders(grown) == {str(first_file.parent), str(second_file.parent)}
    assert sum(map(len, store_media.of(np.arange(len(grown))))) > 6
    third_file = write_images(tmp_path / "three", 1)
    third_file = third_file.rename(third_file.with_name("other.json"))
    for media in ({"processor": processors["gemma3"]}, {"processor": write_other_processor(tmp_path / "other")}):
        with pytest.raises(StoreConflictError, match="has processor Qwen2VLProcessor"):
            batchloom.prepare(third_file, out=tmp_path / "out", append=True, media=media)


def write_other_processor(folder):
    """Write a processor that makes other tokens of an image."""
    folder.mkdir()
    return str(save_processor(PROCESSORS["qwen2_vl"](max_pixels=28 * 28 * 16), folder))


def test_a_recipe_rebuilds_its_store(tmp_path, processors, monkeypatch):
    file = write_images(tmp_path / "in", 2)
    store = prepare_store(file, tmp_path / "out", processors["qwen2_vl"])
    with pytest.raises(InputMissingError, match="give the path of the original with --processor"):
        batchloom.prepare(recipe=store.path, out=tmp_path / "again")
    monkeypatch.chdir(Path(processors["qwen2_vl"]).parent)
    batchloom.prepare(recipe=store.path, out=tmp_path / "again")
    manifest, rebuilt_manifest = ((tmp_path / name / "dataset_metadata.json").read_bytes() for name in ("out", "again"))
    assert manifest == rebuilt_manifest


def test_the_commands_take_no_more_than_processor_tokenizer_and_out(tmp_path, processors, real_data, capsys):
    for name, file, file_kind in (
        ("qwen2_vl", "mllm_demo.json", "image"),
        ("qwen2_audio", "mllm_audio_demo.json", "audio"),
    ):
        out, folder = tmp_path / name, processors[name]
        source = real_data / "multimodal" / file
        prepare_command = [
            "prepare",
            str(source),
            "--processor",
            folder,
            "--tokenizer",
            folder,
            "--out",
            str(out),
        ]
        for command in (
            prepare_command,
            ["check", str(out)],
            ["inspect", str(out)],
            ["doctor", str(out)],
            prepare_command,
        ):
            code, printed = run_command_line(command), capsys.readouterr()
            assert code == 0, (command, printed)
            if command[0] == "inspect":
                store = batchloom.open_store(out)
                count = sum(len(media) for media in StoreMedia(store).of(np.arange(len(store))))
                assert f"{count} {file_kind}s in " in printed.out
            if command[0] == "doctor":
                assert "FOLDER is the folder of a model for that processor" in " ".join(printed.out.split())
                assert f"batchloom train --data {out} --init FOLDER" in printed.out
            if command[0] == "check":
                assert "--init FOLDER (of a model made for its processor) reads" in printed.out


def test_invalid_media_settings_are_refused(tmp_path):
    with pytest.raises(SettingsError) as error:
        batchloom.prepare(
            tmp_path,
            out=tmp_path / "out",
            media={"procesor": "x", "image_pixels": -1},
        )
    problems = "; ".join(error.value.problems)
    assert "media.procesor: unknown setting; did you mean 'processor'?" in problems
    assert "media.processor: there is none" in problems
    assert "media.image_pixels: -1 is not a whole number" in problems
    with pytest.raises(SettingsError, match="media.keep: 'embeded' is none of reference, embed; did you mean"):
        batchloom.prepare(tmp_path, out=tmp_path / "out", media={"processor": "x", "keep": "embeded"})


def test_golden_bytes_of_a_media_file(tmp_path):
    rows = np.zeros(2, MEDIA_ROW_DTYPE)
    rows["digest"] = [(1, 2), (3, 4)]
    rows["size"], rows["blob"] = (10, 20), (0, NOT_STORED)
    rows["place"], rows["place_size"] = (0, 1), (1, 2)
    rows["facts"], rows["grid"] = [(30, 20, 0), (40, 30, 1)], [(1, 4, 6), (0, 0, 0)]
    rows["document"], rows["start"], rows["tokens"] = (0, 3), (5, 0), (6, 4)
    file = tmp_path / "shard_00000.media"
    file.write_bytes(MediaRows(rows, b"abc").to_bytes())
    golden = Path(__file__).parent / "golden.media"
    assert file.read_bytes() == golden.read_bytes()
    mapped = map_media(file, 4)
    assert [mapped.read_location(number) for number in (0, 1)] == ["a", "bc"]
    selected = mapped.take(np.array([1, 3]))
    assert selected.rows["document"].tolist() == [1]
    assert selected.read_location(0) == "bc"
    packed, byte_ranges = ShardMedia(mapped, file).pack()
    assert byte_ranges == [(0, 10)]
    assert packed.rows["blob"].tolist() == [0, NOT_STORED]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows.__setitem__("document", (3, 0)), "not in the order of its 4 documents"),
        (lambda rows: rows.__setitem__("document", (0, 9)), "not in the order of its 4 documents"),
        (lambda rows: rows.__setitem__("kind", (0, 7)), "has the unknown kind 7"),
        (lambda rows: rows.__setitem__("place_size", (1, 200)), "are outside the file"),
        (
            lambda rows: (rows.__setitem__("document", (1, 1)), rows.__setitem__("start", (5, 6))),
            "overlap",
        ),
    ],
)
def test_hostile_files_of_media_are_refused(tmp_path, change, message):
    golden = (Path(__file__).parent / "golden.media").read_bytes()
    rows = np.frombuffer(golden, MEDIA_ROW_DTYPE, 2, 32).copy()
    change(rows)
    file = tmp_path / "shard_00000.media"
    file.write_bytes(golden[:32] + rows.tobytes() + golden[-3:])
    with pytest.raises(StoreError, match=message):
        map_media(file, 4)
