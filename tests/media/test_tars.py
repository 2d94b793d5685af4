"""WebDataset tars: samples in order, media by their place in the tar, and whatever is wrong with one."""

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
from media.made import encoded, picture, sound, talk
from media.processors import MADE, save

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def made():
    return MADE["qwen2_vl"]()


@pytest.fixture(scope="module")
def processor(made, tmp_path_factory):
    return str(save(made, tmp_path_factory.mktemp("processor")))


def jpeg(seed=0, width=60, height=80):
    return encoded(picture(width, height, seed=seed))


def packed(file, files, mode="w"):
    """A tar of these files, in order: (name, bytes)."""
    with tarfile.open(file, mode) as tar:
        for name, data in files:
            entry = tarfile.TarInfo(name)
            held = data.encode() if isinstance(data, str) else data
            entry.size = len(held)
            tar.addfile(entry, io.BytesIO(held))
    return file


def pairs(count=5, first=0):
    return [
        one
        for n in range(first, first + count)
        for one in (
            (f"{n:04}.jpg", jpeg(n, 40 + 17 * n)),
            (f"{n:04}.txt", f"Cat {n}.\n"),
            (f"{n:04}.cls", "3"),
        )
    ]


def prepared(source, out, processor, **settings):
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


def media_of(store):
    return StoreMedia(store).of(np.arange(len(store)))


def rows_of(file, **limits):
    (source,) = list_sources([str(file)], media=True).sources
    assert source.kind == "webdataset"
    rules = ReadRules(None, limits=ReadLimits(**limits))
    rows, bad = [], []
    with PartReader(SourcePart(source, 0, source.size), rules) as reader:
        for found in reader:
            rows += found.values
            bad += found.bad
        reader.finish()
    return rows, bad


def test_tars_of_captions_are_documents_and_batches(made, processor, tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(3):
        packed(folder / f"shards-{number:04}.tar", pairs(4, 4 * number))
    store, notes = prepared(folder, tmp_path / "out", processor)
    assert len(store) == 12
    assert any("with these suffixes are not read: .cls" in note for note in notes)
    assert not any("Left out" in note for note in notes)
    store_bytes = sum(one.stat().st_size for one in (store.path / "train").iterdir())
    assert store_bytes < sum(one.stat().st_size for one in folder.iterdir()) / 2
    for number, some in enumerate(media_of(store)):
        (one,) = some
        assert one.blob is None
        data = jpeg(number, 40 + 17 * number)
        stretch = tuple(map(int, one.location.rpartition("#")[2].split("+")))
        with FileContent(folder / one.location.partition("#")[0], stretch) as file:
            assert file.read(0, file.size) == data
        text = f"<|vision_start|><|image_pad|><|vision_end|>Cat {number}."
        ids = made(text=[text], images=[Image.open(io.BytesIO(data))])["input_ids"][0]
        assert store[number].ids.tolist() == [*ids, store.tokenizer.end_id]
    assert store.provenance.of(5).source == "shards/shards-0001.tar"
    assert store.provenance.of(5).record == 1
    again, _ = prepared(folder, tmp_path / "again", processor, workers=2)
    for file in (store.path / "train").iterdir():
        assert file.read_bytes() == (again.path / "train" / file.name).read_bytes()
    batches = list(batchloom.Loader(store, seq_len=200, global_batch_size=2))
    assert sum(len(batch["image_grid_thw"]) for batch in batches if "image_grid_thw" in batch) == 12


def test_held_media_of_tars_are_their_bytes(processor, tmp_path):
    packed(tmp_path / "a.tar", pairs())
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress((tmp_path / "a.tar").read_bytes()))
    named, _ = prepared(tmp_path / "a.tar", tmp_path / "named", processor)
    held, _ = prepared(tmp_path / "a.tar", tmp_path / "held", processor, media={"keep": "embed"})
    gz, _ = prepared(tmp_path / "a.tar.gz", tmp_path / "gz", processor)
    (tmp_path / "a.tar").unlink()
    for store in (held, gz):
        for number, some in enumerate(media_of(store)):
            path, begin = some[0].blob
            data = jpeg(number, 40 + 17 * number)
            assert path.read_bytes()[begin : begin + len(data)] == data
        assert [store[n].ids.tolist() for n in range(5)] == [named[n].ids.tolist() for n in range(5)]
        assert list(batchloom.Loader(store, seq_len=200, global_batch_size=2))
    with pytest.raises(MediumError, match=r"a\.tar#.* is missing"):
        list(batchloom.Loader(named, seq_len=200, global_batch_size=2))


def test_a_tar_that_was_packed_anew_is_told_at_load_time(processor, tmp_path):
    packed(tmp_path / "a.tar", pairs())
    store, _ = prepared(tmp_path / "a.tar", tmp_path / "out", processor)
    packed(tmp_path / "a.tar", pairs()[3:])
    with pytest.raises(MediumError, match=r"a\.tar#"):
        list(batchloom.Loader(store, seq_len=200, global_batch_size=2))
    packed(tmp_path / "a.tar", pairs(1))
    with pytest.raises(MediumError, match="has become shorter"):
        list(batchloom.Loader(store, seq_len=200, global_batch_size=2))


def test_records_name_their_media_in_their_own_order(processor, tmp_path):
    record = {"messages": talk("<image> or <image>?", "The first."), "images": ["b.jpg", "x.a.jpg"]}
    files = [
        ("some/x.a.jpg", jpeg(1)),
        ("some/x.b.jpg", jpeg(2)),
        ("some/x.json", json.dumps(record)),
        ("some/y.0.jpg", jpeg(3)),
        ("some/y.1.PNG", encoded(picture(), "PNG")),
        ("some/y.json", json.dumps({"messages": talk("<image><image>?", "Both.")})),
        ("some/z.jpg", jpeg(4)),
        ("some/z.json", json.dumps({"image": "elsewhere/9.jpg", "caption": "One."})),
    ]
    rows, bad = rows_of(packed(tmp_path / "a.tar", files))
    assert bad == []
    data = (tmp_path / "a.tar").read_bytes()
    found = []
    for row in rows:
        stretches = [tuple(map(int, one.rpartition("#")[2].split("+"))) for one in row["images"]]
        found.append([data[start : start + size] for start, size in stretches])
    assert found == [[jpeg(2), jpeg(1)], [jpeg(3), encoded(picture(), "PNG")], [jpeg(4)]]
    assert [row["__key__"] for row in rows] == ["some/x", "some/y", "some/z"]
    assert "image" not in rows[2]
    chats = packed(tmp_path / "chats.tar", files[:6])
    store, notes = prepared(chats, tmp_path / "out", processor)
    assert any("messages -> all turns, with images" in note for note in notes)
    assert [len(some) for some in media_of(store)] == [2, 2]


def test_samples_are_told_apart_by_the_first_dot_of_their_names(tmp_path):
    files = [
        ("a.b/0.1.x.jpg", jpeg()),
        ("a.b/0.txt", "Zero."),
        ("./c/1.jpg", jpeg(1)),
        ("./c/1.caption", "One."),
        ("./c/._1.jpg", b"resource fork"),
        ("README", "none of them"),
        ("2.JPG", jpeg(2)),
        ("2.Txt", "Two."),
    ]
    packed(tmp_path / "a.tar", files)
    rows, bad = rows_of(tmp_path / "a.tar")
    assert bad == []
    assert [row["__key__"] for row in rows] == ["a.b/0", "./c/1", "2"]
    assert [row["text"] for row in rows] == ["Zero.", "One.", "Two."]


def test_sounds_of_tars(tmp_path):
    folder = tmp_path / "p"
    processor = str(save(MADE["qwen2_audio"](), folder))
    files = [
        (f"{n}.{ending}", data)
        for n in range(2)
        for ending, data in (("flac", sound(20_000, form="FLAC", seed=n)), ("txt", f"Sound {n}."))
    ]
    store, _ = prepared(packed(tmp_path / "a.tar", files), tmp_path / "out", processor)
    batch = batchloom.Loader(store, seq_len=400, global_batch_size=1)[0]
    assert batch["input_features"].shape == (2, 80, 3000)


@pytest.mark.parametrize(
    ("files", "said"),
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
def test_what_is_wrong_with_a_sample_keeps_it_aside(files, said, tmp_path):
    good = [("a.jpg", jpeg()), ("a.txt", "A.")]
    last = [("c.jpg", jpeg()), ("c.txt", "C.")]
    file = packed(tmp_path / "a.tar", [*good, *files, *last])
    rows, (bad,) = rows_of(file, record_bytes=1000)
    assert [row["__key__"] for row in rows] == ["a", "c"]
    assert said in bad.reason
    assert "sample 'b'" in bad.reason
    assert bad.record == 1
    with tarfile.open(file) as tar:
        assert bad.offset == tar.getmembers()[2].offset


def test_links_and_large_held_media_keep_their_sample_aside(tmp_path):
    file = packed(tmp_path / "a.tar", [("a.jpg", jpeg()), ("a.txt", "A.")])
    with tarfile.open(file, "a") as tar:
        for name, target in (("b.jpg", "a.jpg"), ("b.txt", "a.txt")):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            tar.addfile(link)
    rows, (bad,) = rows_of(file)
    assert len(rows) == 1
    assert "link or special file 'b.jpg': pack it with tar --dereference" in bad.reason
    large = packed(tmp_path / "b.tar.gz", [("a.jpg", bytes(5000)), ("a.txt", "A.")], "w:gz")
    rows, (bad,) = rows_of(large, medium_bytes=4000)
    assert rows == []
    assert "has more than 4,000 bytes of media up to 'a.jpg'" in bad.reason


def test_bad_samples_are_told_with_their_number(processor, tmp_path):
    files = pairs(4)
    files[3] = (files[3][0], files[3][1][:-200])
    del files[7]
    store, _ = prepared(packed(tmp_path / "a.tar", files), tmp_path / "out", processor, max_bad=2)
    assert len(store) == 2
    lines = [json.loads(one) for one in (store.path / "quarantine.jsonl").read_text().splitlines()]
    assert sorted((one["source"], one["row"]) for one in lines) == [("a.tar", 2), ("a.tar", 3)]
    by_row = {one["row"]: one for one in lines}
    assert "cut short" in by_row[2]["reason"]
    assert "image 1 (a.tar#" in by_row[2]["reason"]
    assert '"__key__":"0001"' in by_row[2]["snippet"]
    assert "sample '0002' has 0002.jpg, 0002.cls, but no .txt" in by_row[3]["reason"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data[:9000], r"a.tar is damaged after byte 7,680 \(it is cut short\)"),
        (lambda data: data[:7680 + 100], r"damaged after byte 6,656 \(it is cut short\)"),
        (lambda data: data[:7680], "ends after the file at byte 6,656 without an end marker"),
        (lambda data: data[:7680] + b"x" * 512 + data[8192:], r"after byte 6,656 \(a damaged header\)"),
        (lambda data: data + data, "a.tar has data after its end: it seems to be several tars"),
    ],
)  # fmt: skip
def test_broken_tars_are_refused(change, said, processor, tmp_path):
    files = [(f"{n}.{end}", data) for n in range(9) for end, data in (("jpg", b"j" * 900), ("txt", "A."))]  # fmt: skip
    data = packed(tmp_path / "whole.tar", files).read_bytes()
    (tmp_path / "a.tar").write_bytes(change(data))
    with pytest.raises(InputError, match=said):
        rows_of(tmp_path / "a.tar")


def test_what_is_no_tar_or_holds_nothing(processor, tmp_path):
    (tmp_path / "a.tar").write_bytes(b"no tar " * 200)
    with pytest.raises(InputError, match="is not a valid tar archive"):
        prepared(tmp_path / "a.tar", tmp_path / "out", processor)
    packed(tmp_path / "b.tar", [])
    with pytest.raises(InputMissingError, match="holds no"):
        prepared(tmp_path / "b.tar", tmp_path / "out", processor)
    (tmp_path / "c.tar").write_bytes(b"")
    with pytest.raises(InputMissingError, match="is empty"):
        prepared(tmp_path / "c.tar", tmp_path / "out", processor)


def test_tars_of_records_and_jobs_without_media_are_read_as_before(processor, tmp_path):
    file = packed(tmp_path / "a.tar", pairs(2))
    assert {one.kind for one in list_sources([str(file)]).sources} == {"text"}
    lines = "".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(3))
    packed(tmp_path / "b.tar", [("in.jsonl", lines)])
    store, _ = prepared(tmp_path / "b.tar", tmp_path / "out", processor)
    assert len(store) == 3


def test_tars_through_a_pipe_are_refused(processor, tmp_path):
    file = packed(tmp_path / "a.tar", pairs(2))
    command = [sys.executable, "-m", "batchloom", "prepare", "-", "--processor", processor]
    command += ["--tokenizer", processor, "--out", str(tmp_path / "out")]
    with file.open("rb") as given:
        done = subprocess.run(command, stdin=given, capture_output=True, text=True)
    assert done.returncode == 1
    assert "can be read only once" in done.stderr


def test_media_of_tars_elsewhere_are_held(processor, tmp_path):
    fsspec = pytest.importorskip("fsspec")
    data = packed(tmp_path / "a.tar", pairs(3)).read_bytes()
    fsspec.filesystem("memory").pipe("/tars/a.tar", data)
    store, _ = prepared("memory://tars/a.tar", tmp_path / "out", processor)
    assert all(one.blob is not None for some in media_of(store) for one in some)
    fsspec.filesystem("memory").rm("/tars", recursive=True)
    batches = list(batchloom.Loader(store, seq_len=200, global_batch_size=2))
    assert sum(len(batch["image_grid_thw"]) for batch in batches if "image_grid_thw" in batch) == 3


def test_a_finished_store_of_tars_is_recognised(processor, tmp_path):
    file = packed(tmp_path / "a.tar", pairs(3))
    for done in (False, True):
        result = batchloom.prepare(
            file,
            out=tmp_path / "out",
            tokenizer=processor,
            media={"processor": processor},
            val_fraction=0,
        )
        assert result.already_done is done
    packed(file, pairs(4))
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
        packed(tmp_path / name / "a.tar", pairs(3, first))
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
