"""WebDataset tars: order of samples, byte ranges of media, damaged tars."""

import gzip
import io
import json
import subprocess
import sys
import tarfile

import numpy as np
import pytest
from PIL import Image

import batchloom
from batchloom import InputError
from batchloom.core.errors import InputMissingError, MediumError, StoreConflictError
from batchloom.media import FileContent
from batchloom.sources import PartReader, ReadLimits, ReadRules, SourcePart, list_sources
from batchloom.store import StoreMedia, verify_store
from media.processors import PROCESSORS, save_processor
from media.sample_media import encode_image, make_image, make_messages, make_sound

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def hf_processor():
    return PROCESSORS["qwen2_vl"]()


@pytest.fixture(scope="module")
def processor(hf_processor, tmp_path_factory):
    return str(save_processor(hf_processor, tmp_path_factory.mktemp("processor")))


def make_jpeg(seed=0, width=60, height=80):
    return encode_image(make_image(width, height, seed=seed))


def write_tar(file, files, mode="w"):
    """Write a tar of these files, in order: (name, bytes)."""
    with tarfile.open(file, mode) as tar:
        for name, data in files:
            entry = tarfile.TarInfo(name)
            content = data.encode() if isinstance(data, str) else data
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return file


def make_pairs(count=5, first=0):
    return [
        member
        for n in range(first, first + count)
        for member in (
            (f"{n:04}.jpg", make_jpeg(n, 40 + 17 * n)),
            (f"{n:04}.txt", f"Cat {n}.\n"),
            (f"{n:04}.cls", "3"),
        )
    ]


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


def list_media(store):
    return StoreMedia(store).of(np.arange(len(store)))


def read_rows(file, **limits):
    (source,) = list_sources([str(file)], media=True).sources
    assert source.kind == "webdataset"
    rules = ReadRules(None, limits=ReadLimits(**limits))
    rows, bad = [], []
    with PartReader(SourcePart(source, 0, source.size), rules) as reader:
        for records in reader:
            rows += records.values
            bad += records.bad
        reader.finish()
    return rows, bad


def test_tars_of_captions_are_documents_and_batches(hf_processor, processor, tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(3):
        write_tar(folder / f"shards-{number:04}.tar", make_pairs(4, 4 * number))
    store, notes = prepare_store(folder, tmp_path / "out", processor)
    assert len(store) == 12
    assert any("with these suffixes are not read: .cls" in note for note in notes)
    assert not any("Left out" in note for note in notes)
    store_bytes = sum(path.stat().st_size for path in (store.path / "train").iterdir())
    assert store_bytes < sum(path.stat().st_size for path in folder.iterdir()) / 2
    for number, document_media in enumerate(list_media(store)):
        (medium,) = document_media
        assert medium.blob is None
        data = make_jpeg(number, 40 + 17 * number)
        byte_range = tuple(map(int, medium.location.rpartition("#")[2].split("+")))
        with FileContent(folder / medium.location.partition("#")[0], byte_range) as file:
            assert file.read(0, file.size) == data
        text = f"<|vision_start|><|image_pad|><|vision_end|>Cat {number}."
        ids = hf_processor(text=[text], images=[Image.open(io.BytesIO(data))])["input_ids"][0]
        assert store[number].ids.tolist() == [*ids, store.tokenizer.end_id]
    assert store.provenance.of(5).source == "shards/shards-0001.tar"
    assert store.provenance.of(5).record == 1
    parallel, _ = prepare_store(folder, tmp_path / "again", processor, workers=2)
    for file in (store.path / "train").iterdir():
        assert file.read_bytes() == (parallel.path / "train" / file.name).read_bytes()
    batches = list(batchloom.Loader(store, seq_len=200, global_batch_size=2))
    assert sum(len(batch["image_grid_thw"]) for batch in batches if "image_grid_thw" in batch) == 12


def test_embedded_media_of_tars_are_their_bytes(processor, tmp_path):
    write_tar(tmp_path / "a.tar", make_pairs())
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress((tmp_path / "a.tar").read_bytes()))
    referenced, _ = prepare_store(tmp_path / "a.tar", tmp_path / "named", processor)
    embedded, _ = prepare_store(tmp_path / "a.tar", tmp_path / "held", processor, media={"keep": "embed"})
    compressed, _ = prepare_store(tmp_path / "a.tar.gz", tmp_path / "gz", processor)
    (tmp_path / "a.tar").unlink()
    for store in (embedded, compressed):
        for number, document_media in enumerate(list_media(store)):
            path, begin = document_media[0].blob
            data = make_jpeg(number, 40 + 17 * number)
            assert path.read_bytes()[begin : begin + len(data)] == data
        assert [store[n].ids.tolist() for n in range(5)] == [referenced[n].ids.tolist() for n in range(5)]
        assert list(batchloom.Loader(store, seq_len=200, global_batch_size=2))
    with pytest.raises(MediumError, match=r"a\.tar#.* is missing"):
        list(batchloom.Loader(referenced, seq_len=200, global_batch_size=2))


def test_a_repacked_tar_is_refused_at_load_time(processor, tmp_path):
    write_tar(tmp_path / "a.tar", make_pairs())
    store, _ = prepare_store(tmp_path / "a.tar", tmp_path / "out", processor)
    write_tar(tmp_path / "a.tar", make_pairs()[3:])
    with pytest.raises(MediumError, match=r"a\.tar#"):
        list(batchloom.Loader(store, seq_len=200, global_batch_size=2))
    write_tar(tmp_path / "a.tar", make_pairs(1))
    with pytest.raises(MediumError, match="has become shorter"):
        list(batchloom.Loader(store, seq_len=200, global_batch_size=2))


def test_records_name_their_media_in_their_own_order(processor, tmp_path):
    record = {"messages": make_messages("<image> or <image>?", "The first."), "images": ["b.jpg", "x.a.jpg"]}
    files = [
        ("some/x.a.jpg", make_jpeg(1)),
        ("some/x.b.jpg", make_jpeg(2)),
        ("some/x.json", json.dumps(record)),
        ("some/y.0.jpg", make_jpeg(3)),
        ("some/y.1.PNG", encode_image(make_image(), "PNG")),
        ("some/y.json", json.dumps({"messages": make_messages("<image><image>?", "Both.")})),
        ("some/z.jpg", make_jpeg(4)),
        ("some/z.json", json.dumps({"image": "elsewhere/9.jpg", "caption": "One."})),
    ]
    rows, bad = read_rows(write_tar(tmp_path / "a.tar", files))
    assert bad == []
    data = (tmp_path / "a.tar").read_bytes()
    images = []
    for row in rows:
        byte_ranges = [tuple(map(int, location.rpartition("#")[2].split("+"))) for location in row["images"]]
        images.append([data[start : start + size] for start, size in byte_ranges])
    assert images == [[make_jpeg(2), make_jpeg(1)], [make_jpeg(3), encode_image(make_image(), "PNG")], [make_jpeg(4)]]
    assert [row["__key__"] for row in rows] == ["some/x", "some/y", "some/z"]
    assert "image" not in rows[2]
    chats = write_tar(tmp_path / "chats.tar", files[:6])
    store, notes = prepare_store(chats, tmp_path / "out", processor)
    assert any("messages -> all turns, with images" in note for note in notes)
    assert [len(media) for media in list_media(store)] == [2, 2]


def test_keys_of_samples_end_at_the_first_dot(tmp_path):
    files = [
        ("a.b/0.1.x.jpg", make_jpeg()),
        ("a.b/0.txt", "Zero."),
        ("./c/1.jpg", make_jpeg(1)),
        ("./c/1.caption", "One."),
        ("./c/._1.jpg", b"resource fork"),
        ("README", "none of them"),
        ("2.JPG", make_jpeg(2)),
        ("2.Txt", "Two."),
    ]
    write_tar(tmp_path / "a.tar", files)
    rows, bad = read_rows(tmp_path / "a.tar")
    assert bad == []
    assert [row["__key__"] for row in rows] == ["a.b/0", "./c/1", "2"]
    assert [row["text"] for row in rows] == ["Zero.", "One.", "Two."]


def test_sounds_of_tars(tmp_path):
    folder = tmp_path / "p"
    processor = str(save_processor(PROCESSORS["qwen2_audio"](), folder))
    files = [
        (f"{n}.{ending}", data)
        for n in range(2)
        for ending, data in (("flac", make_sound(20_000, form="FLAC", seed=n)), ("txt", f"Sound {n}."))
    ]
    store, _ = prepare_store(write_tar(tmp_path / "a.tar", files), tmp_path / "out", processor)
    batch = batchloom.Loader(store, seq_len=400, global_batch_size=1)[0]
    assert batch["input_features"].shape == (2, 80, 3000)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([("b.jpg", b"x"), ("b.jpg", b"y"), ("b.txt", "B.")], "'b' holds 'b.jpg' twice"),
        ([("b.jpg", b"x")], "has b.jpg, but no .txt, .caption or .json"),
        ([("b.txt", "B.")], "has b.txt, but no image or sound"),
        ([("b.cls", "1")], "has b.cls, but no .txt, .caption or .json"),
        ([("b.jpg", b"x"), ("b.json", "{")], "has 'b.json', which is not JSON"),
        ([("b.jpg", b"x"), ("b.json", "[]")], "has an array in 'b.json', not an object"),
        ([("b.jpg", b"x"), ("b.txt", b"\xff")], "byte 0xff is not valid UTF-8"),
        ([("b.jpg", b"x"), ("b.txt", "1"), ("b.1.txt", "2")], "has several .txt files"),
        ([("b.jpg", b"x"), ("b.txt", "1"), ("b.caption", "2")], "different texts in .txt and .caption"),
        ([("b.jpg", b"x"), ("b.txt", "1"), ("b.json", '{"text": "2"}')], "different texts in .json and .txt"),
        ([("b.jpg", b"x"), ("b.txt", "t" * 2000)], "has 'b.txt' of 2,000 bytes, more than 1,000"),
        ([("b.0.jpg", b"x"), ("b.1.jpg", b"y"), ("b.json", '{"images": ["0.jpg", "c.jpg"]}')], "names 'c.jpg' in column 'images'"),
        ([("b.0.jpg", b"x"), ("b.1.jpg", b"y"), ("b.json", '{"images": ["0.jpg"]}')], "names 1 of 2 in column 'images'"),
    ],
)  # fmt: skip
def test_invalid_samples_are_quarantined(files, message, tmp_path):
    before = [("a.jpg", make_jpeg()), ("a.txt", "A.")]
    after = [("c.jpg", make_jpeg()), ("c.txt", "C.")]
    file = write_tar(tmp_path / "a.tar", [*before, *files, *after])
    rows, (bad,) = read_rows(file, record_bytes=1000)
    assert [row["__key__"] for row in rows] == ["a", "c"]
    assert message in bad.reason
    assert "sample 'b'" in bad.reason
    assert bad.record == 1
    with tarfile.open(file) as tar:
        assert bad.offset == tar.getmembers()[2].offset


def test_samples_of_links_and_large_media_are_quarantined(tmp_path):
    file = write_tar(tmp_path / "a.tar", [("a.jpg", make_jpeg()), ("a.txt", "A.")])
    with tarfile.open(file, "a") as tar:
        for name, target in (("b.jpg", "a.jpg"), ("b.txt", "a.txt")):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            tar.addfile(link)
    rows, (bad,) = read_rows(file)
    assert len(rows) == 1
    assert "link or special file 'b.jpg': pack it with tar --dereference" in bad.reason
    large = write_tar(tmp_path / "b.tar.gz", [("a.jpg", bytes(5000)), ("a.txt", "A.")], "w:gz")
    rows, (bad,) = read_rows(large, medium_bytes=4000)
    assert rows == []
    assert "has more than 4,000 bytes of media up to 'a.jpg'" in bad.reason


def test_bad_samples_are_quarantined_with_their_number(processor, tmp_path):
    files = make_pairs(4)
    files[3] = (files[3][0], files[3][1][:-200])
    del files[7]
    store, _ = prepare_store(write_tar(tmp_path / "a.tar", files), tmp_path / "out", processor, max_bad=2)
    assert len(store) == 2
    entries = [json.loads(line) for line in (store.path / "quarantine.jsonl").read_text().splitlines()]
    assert sorted((entry["source"], entry["row"]) for entry in entries) == [("a.tar", 2), ("a.tar", 3)]
    by_row = {entry["row"]: entry for entry in entries}
    assert "cut short" in by_row[2]["reason"]
    assert "image 1 (a.tar#" in by_row[2]["reason"]
    assert '"__key__":"0001"' in by_row[2]["snippet"]
    assert "sample '0002' has 0002.jpg, 0002.cls, but no .txt" in by_row[3]["reason"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:9000], r"a.tar is damaged after byte 7,680 \(it is cut short\)"),
        (lambda data: data[:7680 + 100], r"damaged after byte 6,656 \(it is cut short\)"),
        (lambda data: data[:7680], "ends after the file at byte 6,656 without an end marker"),
        (lambda data: data[:7680] + b"x" * 512 + data[8192:], r"after byte 6,656 \(a damaged header\)"),
        (lambda data: data + data, "a.tar has data after its end: it seems to be several tars"),
    ],
)  # fmt: skip
def test_broken_tars_are_refused(change, message, processor, tmp_path):
    files = [(f"{n}.{end}", data) for n in range(9) for end, data in (("jpg", b"j" * 900), ("txt", "A."))]  # fmt: skip
    data = write_tar(tmp_path / "whole.tar", files).read_bytes()
    (tmp_path / "a.tar").write_bytes(change(data))
    with pytest.raises(InputError, match=message):
        read_rows(tmp_path / "a.tar")


def test_invalid_and_empty_tars_are_refused(processor, tmp_path):
    (tmp_path / "a.tar").write_bytes(b"no tar " * 200)
    with pytest.raises(InputError, match="is not a valid tar archive"):
        prepare_store(tmp_path / "a.tar", tmp_path / "out", processor)
    write_tar(tmp_path / "b.tar", [])
    with pytest.raises(InputMissingError, match="holds no"):
        prepare_store(tmp_path / "b.tar", tmp_path / "out", processor)
    (tmp_path / "c.tar").write_bytes(b"")
    with pytest.raises(InputMissingError, match="is empty"):
        prepare_store(tmp_path / "c.tar", tmp_path / "out", processor)


def test_tars_of_records_and_runs_without_media_are_read_as_text(processor, tmp_path):
    file = write_tar(tmp_path / "a.tar", make_pairs(2))
    assert {source.kind for source in list_sources([str(file)]).sources} == {"text"}
    lines = "".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(3))
    write_tar(tmp_path / "b.tar", [("in.jsonl", lines)])
    store, _ = prepare_store(tmp_path / "b.tar", tmp_path / "out", processor)
    assert len(store) == 3


@pytest.mark.slow
def test_tars_through_a_pipe_are_refused(processor, tmp_path):
    file = write_tar(tmp_path / "a.tar", make_pairs(2))
    command = [sys.executable, "-m", "batchloom", "prepare", "-", "--processor", processor]
    command += ["--tokenizer", processor, "--out", str(tmp_path / "out")]
    with file.open("rb") as stdin:
        result = subprocess.run(command, stdin=stdin, capture_output=True, text=True)
    assert result.returncode == 1
    assert "can be read only once" in result.stderr


def test_media_of_remote_tars_are_embedded(processor, tmp_path):
    fsspec = pytest.importorskip("fsspec")
    data = write_tar(tmp_path / "a.tar", make_pairs(3)).read_bytes()
    fsspec.filesystem("memory").pipe("/tars/a.tar", data)
    store, _ = prepare_store("memory://tars/a.tar", tmp_path / "out", processor)
    assert all(medium.blob is not None for media in list_media(store) for medium in media)
    fsspec.filesystem("memory").rm("/tars", recursive=True)
    batches = list(batchloom.Loader(store, seq_len=200, global_batch_size=2))
    assert sum(len(batch["image_grid_thw"]) for batch in batches if "image_grid_thw" in batch) == 3


def test_a_finished_store_of_tars_is_recognised(processor, tmp_path):
    file = write_tar(tmp_path / "a.tar", make_pairs(3))
    for finished in (False, True):
        result = batchloom.prepare(
            file,
            out=tmp_path / "out",
            tokenizer=processor,
            media={"processor": processor},
            val_fraction=0,
        )
        assert result.already_done is finished
    write_tar(file, make_pairs(4))
    with pytest.raises(StoreConflictError, match="a.tar"):
        batchloom.prepare(
            file,
            out=tmp_path / "out",
            tokenizer=processor,
            media={"processor": processor},
            val_fraction=0,
        )


def test_appended_tars_keep_their_own_folders(processor, tmp_path):
    for name, first in (("one", 0), ("two", 5)):
        (tmp_path / name).mkdir()
        write_tar(tmp_path / name / "a.tar", make_pairs(3, first))
        batchloom.prepare(
            tmp_path / name / "a.tar",
            out=tmp_path / "out",
            append=name == "two",
            tokenizer=processor if name == "one" else None,
            media={"processor": processor, "data_folder": "/"},
            val_fraction=0,
        )
    store = batchloom.open_store(tmp_path / "out")
    assert len(store) == 6
    folders = [StoreMedia(store).folder_of(n) for n in range(6)]
    assert sorted(set(folders)) == [str(tmp_path / "one"), str(tmp_path / "two")]
    batches = list(batchloom.Loader(store, seq_len=200, global_batch_size=2))
    assert sum(len(batch["image_grid_thw"]) for batch in batches if "image_grid_thw" in batch) == 6
