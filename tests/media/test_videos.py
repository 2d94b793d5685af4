"""Videos: which frames are seen of them, the frames themselves, and what becomes of what is none."""

import io
import json
import math
import tarfile
from fractions import Fraction

import numpy as np
import pytest
from transformers.video_utils import VideoMetadata, default_sample_indices_fn

import batchloom
from batchloom import SettingsError
from batchloom.batches import MediaOptions
from batchloom.core.errors import MediumError, UnusableRecordError
from batchloom.core.medium import FrameFacts
from batchloom.media import BytesContent, FrameSampling, MediaLimits, media_features as features
from batchloom.media.frame_sampling import compute_frame_times, fit_frame_size
from batchloom.media.video import decode_frames, inspect_video
from batchloom.store import StoreMedia
from media.films import decoded, film, heard
from media.made import encoded, picture, sound, talk
from media.processors import MADE, save
from media.test_batches import as_numpy, same, stored
from media.test_tokens import LINES, PLACES

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
FORMS = [
    ("mp4", "mpeg4"),
    ("mp4", "libx264"),
    ("webm", "libvpx-vp9"),
    ("avi", "mpeg4"),
    ("mov", "libx264"),
]


def seen(data, limits=None, **sampling):
    return inspect_video(BytesContent(data), limits or MediaLimits(), FrameSampling(**sampling))


def sampled_by_transformers(total, rate, **wanted):
    return default_sample_indices_fn(VideoMetadata(total, fps=rate), **wanted).tolist()


@pytest.mark.parametrize(("total", "rate"), [(50, 25), (301, 30), (7, 10), (100, 24), (1, 25)])
def test_frames_are_those_that_transformers_takes(total, rate):
    seconds = Fraction(total, rate)
    for count in (1, 2, 3, 7):
        if count <= total:
            found = compute_frame_times(seconds, Fraction(rate), FrameSampling(frames=count))
            expected = sampled_by_transformers(total, rate, num_frames=count)
            assert [math.floor(Fraction(time, 10**6) * rate) for time in found] == expected
    for fps in (1, 2, 2.5, 1 / 3):
        found = compute_frame_times(seconds, Fraction(rate), FrameSampling(fps=fps, max_frames=10**6))
        expected = sampled_by_transformers(total, rate, fps=fps)
        assert [math.floor(Fraction(time, 10**6) * rate) for time in found] == expected


def test_there_is_always_a_frame_and_never_more_than_there_are():
    assert compute_frame_times(Fraction(1, 10), Fraction(10), FrameSampling(fps=0.1)) == [0]
    assert compute_frame_times(Fraction(1), Fraction(3), FrameSampling(frames=9)) == [
        0,
        333_334,
        666_667,
    ]
    assert len(compute_frame_times(Fraction(36_000), Fraction(30), FrameSampling(fps=2, max_frames=16))) == 16
    assert len(compute_frame_times(Fraction(2), None, FrameSampling(frames=9))) == 9


def test_frames_keep_their_form():
    sampling = FrameSampling(min_pixels=100, max_pixels=10_000)
    assert fit_frame_size(50, 40, sampling) == (50, 40)
    assert fit_frame_size(400, 100, sampling) == (200, 50)
    assert fit_frame_size(2, 2, sampling) == (10, 10)
    assert fit_frame_size(100_000, 1, sampling) == (31_622, 1)


@pytest.mark.parametrize(("form", "codec"), FORMS)
def test_frames_of_a_video_are_those_that_are_shown_then(form, codec):
    data = film(50, 25, form=form, codec=codec)
    every = decoded(data)
    for sampling in ({"fps": 5}, {"frames": 50}, {"frames": 3}, {}):
        facts = seen(data, **sampling)
        found = list(decode_frames(BytesContent(data), facts))
        assert [(one.width, one.height) for one in facts] == [(64, 48)] * len(facts)
        expected = [every[number * 50 // len(facts)] for number in range(len(facts))]
        assert [one.tobytes() for one in found] == [one.tobytes() for one in expected]
    # Beginning anywhere gives the same as beginning with the first.
    alone = list(decode_frames(BytesContent(data), facts[2:3]))
    assert alone[0].tobytes() == found[2].tobytes()


def test_frames_far_from_each_other_are_sought():
    data = film(600, 10, codec="libx264", gop=10)
    every = decoded(data)
    facts = seen(data, frames=5)
    assert [one.time for one in facts] == [0, 12_000_000, 24_000_000, 36_000_000, 48_000_000]
    found = list(decode_frames(BytesContent(data), facts))
    assert [one.tobytes() for one in found] == [every[at].tobytes() for at in (0, 120, 240, 360, 480)]
    # Of keyframes that are rare each is reached as well.
    rare = film(600, 10, codec="libx264", gop=600)
    facts = seen(rare, frames=60)
    found = list(decode_frames(BytesContent(rare), facts))
    assert [one.tobytes() for one in found] == [one.tobytes() for one in decoded(rare)[::10]]


def test_a_frame_stays_until_the_next_comes():
    times = [0, 100, 1000, 1500, 4000, 4500]
    data = film(6, 10, form="matroska", codec="libx264", times=times)
    every = decoded(data)
    facts = seen(data, frames=4)
    shown = [max(at for at, time in enumerate(times) if time * 1000 <= one.time) for one in facts]
    found = list(decode_frames(BytesContent(data), facts))
    assert [one.tobytes() for one in found] == [every[at].tobytes() for at in shown]
    assert len(set(shown)) > 2


def test_large_frames_are_made_smaller_and_small_ones_larger():
    data = film(10, 5, size=(320, 160))
    facts = seen(data, frames=2, max_pixels=3200)
    assert {(one.width, one.height) for one in facts} == {(80, 40)}
    (first, _) = decode_frames(BytesContent(data), facts)
    near = np.abs(np.asarray(first, np.int64) - np.asarray(decoded(data)[0].resize((80, 40)), np.int64))
    assert near.max() <= 1
    assert seen(film(4, 4, size=(16, 16)), min_pixels=1024)[0].width == 32


def remuxed(source, to, **options):
    """The same packets in another file."""
    import av

    with av.open(source) as given, av.open(to, "w", options=options) as made:
        stream = made.add_stream_from_template(given.streams.video[0])
        for packet in given.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                made.mux(packet)


def turned(data, degrees):
    """A video that says it lies on its side, as those of telephones do."""
    whole = bytearray(data)
    # The matrix of the track's header (tkhd), 16.16 fixed point.
    at = whole.index(b"tkhd") + 4 + 40
    one = 1 << 16
    a, b, c, d = {90: (0, one, -one, 0), 180: (-one, 0, 0, -one), 270: (0, -one, one, 0)}[degrees]
    matrix = (a, b, 0, c, d, 0, 0, 0, 1 << 30)
    whole[at : at + 36] = b"".join(value.to_bytes(4, "big", signed=True) for value in matrix)
    return bytes(whole)


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_videos_on_their_side_are_turned_upright(degrees):
    plain = film(8, 4)
    data = turned(plain, degrees)
    facts = seen(data, frames=2)
    assert (facts[0].width, facts[0].height) == ((64, 48) if degrees == 180 else (48, 64))
    (first, _) = decode_frames(BytesContent(data), facts)
    # A matrix of the file turns clockwise, Pillow the other way.
    expected = decoded(plain)[0].rotate(-degrees, expand=True)
    assert first.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is empty"),
        (b"<html>log in</html>", "which is not the start of a supported video"),
        (b"#EXTM3U\n#EXT-X-VERSION:3\nfile:///etc/passwd\n", "which is not the start of a supported video"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "which is not the start of a supported video"),
        (encoded(picture(), "PNG"), "which is not the start of a supported video"),
        (b"\0\0\0\x1cftypavif" + b"\0" * 60, "is an image"),
        (b"\0\0\0\x1cftypisom" + b"\0" * 60, "cannot be decoded"),
        (b"\x1aE\xdf\xa3" + b"\0" * 60, "cannot be decoded"),
        (b"RIFF\0\0\0\0AVI " + b"\0" * 60, "cannot be decoded"),
    ],
)
def test_what_is_no_video_is_refused(data, said):
    with pytest.raises(UnusableRecordError, match=said):
        seen(data)


def test_sound_alone_is_no_video():
    with pytest.raises(UnusableRecordError, match="holds no video"):
        seen(heard())
    with pytest.raises(UnusableRecordError, match="which is not the start of a supported video"):
        seen(sound())


@pytest.mark.parametrize(("form", "codec"), FORMS)
def test_cut_videos_are_refused(form, codec):
    data = film(250, 25, form=form, codec=codec)
    for share in (0.1, 0.5, 0.8):
        with pytest.raises(UnusableRecordError):
            seen(data[: int(len(data) * share)])


def test_a_video_that_streams_is_seen_to_be_cut(tmp_path):
    path = tmp_path / "a.mp4"
    path.write_bytes(film(250, 25, codec="libx264"))
    remuxed(path, tmp_path / "b.mp4", movflags="faststart")
    data = (tmp_path / "b.mp4").read_bytes()
    assert len(seen(data)) == 20
    with pytest.raises(UnusableRecordError, match="cut short|damaged"):
        seen(data[: len(data) // 2])


def test_frames_of_too_many_pixels_are_refused():
    with pytest.raises(UnusableRecordError, match="has frames of 3,072 pixels, more than the 3,000"):
        seen(film(4, 4), MediaLimits(image_pixels=3000))


def test_settings_that_are_none_are_told_at_once():
    with pytest.raises(SettingsError) as told:
        FrameSampling(fps=0, frames=0, max_frames=-1, min_pixels="few", max_pixels=1.5)
    assert len(told.value.problems) == 5
    with pytest.raises(SettingsError, match="is more than max_pixels"):
        FrameSampling(min_pixels=100, max_pixels=10)


def conversations(folder):
    """Conversations about videos and images; gives the file."""
    (folder / "films").mkdir(parents=True)
    for number, (form, codec) in enumerate(FORMS):
        size = (64 + 16 * number, 48)
        (folder / f"films/{number}.{form}").write_bytes(film(20 + 10 * number, 10, size=size, form=form, codec=codec))
    (folder / "a.png").write_bytes(encoded(picture(40, 30), "PNG"))
    rows = [
        {
            "messages": talk(f"<video> What is film {number}?", f"It is film {number}."),
            "videos": [f"films/{number}.{form}"],
        }
        for number, (form, _) in enumerate(FORMS)
    ]
    both = {"images": ["a.png"], "videos": ["films/1.mp4", "films/0.mp4"]}
    rows.append({"messages": talk("<video><image> and <video>?", "All."), **both})
    parts = [
        {"type": "text", "text": "Who?"},
        {"type": "video_url", "video_url": {"url": "films/1.mp4"}},
    ]
    rows.append({"messages": talk(parts, "Nobody.")})
    rows.append({"messages": talk("And without?", "Yes.")})
    file = folder / "talks.json"
    file.write_text(json.dumps(rows))
    return file


def frames_of(path, **sampling):
    data = path.read_bytes()
    return list(decode_frames(BytesContent(data), seen(data, **sampling)))


@pytest.mark.parametrize("name", ["qwen2_vl", "gemma3", "idefics3"])
def test_a_video_stands_as_its_frames(name, tmp_path):
    """The store's tokens and the batch's features are those of the processor, given the frames as images."""
    made = MADE[name]()
    template = LINES.replace("KIND", "image").replace("PLACE", PLACES.get(name, "<image>"))
    where = save(made, tmp_path / "processor")
    (where / "chat_template.jinja").write_text(template)
    file = conversations(tmp_path / "in")
    sampling = {"fps": 1.5, "max_pixels": 2000}
    given = {f"video_{key}": value for key, value in sampling.items()}
    store = stored(file, tmp_path / "store", where, **given)
    assert len(store) == 8
    loader = batchloom.Loader(store, seq_len=4096, global_batch_size=1)
    batches = list(loader)
    made_of = {}
    for number, row in enumerate(json.loads(file.read_text())):
        films = [file.parent / one for one in row.get("videos", [])]
        if number == 6:
            films = [file.parent / "films/1.mp4"]
        runs = [frames_of(one, **sampling) for one in films]
        images = [[one] for one in map(open_image, [file.parent / one for one in row.get("images", [])])]
        kinds = ["video", "image", "video"] if images else ["video"] * len(runs)
        order = [runs.pop(0) if kind == "video" else images.pop(0) for kind in kinds]
        content = [{"type": "image"} for some in order for _ in some]
        text = {5: " and ", 6: "Who?", 7: "And without?"}.get(number, f" What is film {number}?")
        said = [{"type": "text", "text": text}]
        if number == 5:
            last = len(order[2])
            content = [*content[:-last], *said, *content[-last:], {"type": "text", "text": "?"}]
        else:
            content = [*said, *content] if number >= 6 else [*content, *said]
        messages = [{"role": "user", "content": content if order else text}, row["messages"][1]]
        written = made.tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
        media = {"images": [one for some in order for one in some]} if order else {}
        inputs = made(text=[written], return_tensors="np", **media)
        document = next(at for at in range(8) if store.provenance.of(at).record == number)
        assert store[document].ids.tolist() == np.asarray(inputs["input_ids"])[0].tolist()
        if order:
            made_of[document] = np.asarray(inputs["pixel_values"])
    found = {}
    for batch in batches:
        rows = loader.plan.rows(*loader.plan.positions_of(batch.step))
        held = [int(one) for one in rows.documents if int(one) in made_of]
        axis = 1 if name == "idefics3" else 0
        expected = np.concatenate([made_of[one] for one in held], axis) if held else None
        if held and name != "idefics3":
            assert np.array_equal(np.asarray(batch["pixel_values"]), expected)
        elif held:
            assert batch["pixel_values"].shape[:2] == expected.shape[:2]
        found.update(dict.fromkeys(held, True))
    assert set(found) == set(made_of)


def open_image(path):
    from PIL import Image

    return Image.open(path).convert("RGB")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A processor, and the file of conversations."""
    folder = tmp_path_factory.mktemp("plain")
    where = save(MADE["llava"](), folder / "processor")
    template = LINES.replace("KIND", "image").replace("PLACE", "<image>")
    (where / "chat_template.jinja").write_text(template)
    return where, conversations(folder / "in")


def test_embedded_videos_are_kept_once_and_give_the_same(plain, tmp_path):
    where, file = plain
    named = stored(file, tmp_path / "named", where)
    held = stored(file, tmp_path / "held", where, keep="embed")
    films = {path.read_bytes() for path in (file.parent / "films").iterdir()}
    size = sum(map(len, films)) + (file.parent / "a.png").stat().st_size
    assert (tmp_path / "held/train/shard_00000.blobs").stat().st_size == size
    (file.parent / "films").rename(file.parent / "gone")
    try:
        sizes = {"seq_len": 4096, "global_batch_size": 2}
        moved = as_numpy(batchloom.Loader(held, **sizes)[0])
        with pytest.raises(MediumError, match=r"row 1\): video films/.* is missing"):
            batchloom.Loader(named, **sizes)[0]
    finally:
        (file.parent / "gone").rename(file.parent / "films")
    same(as_numpy(batchloom.Loader(named, **sizes)[0]), moved)
    one = batchloom.Loader(named, **sizes, media=MediaOptions(workers=1, memory=1 << 20), prefetch=0)
    same(as_numpy(one[0]), moved)


def test_a_video_that_has_changed_is_an_error(plain, tmp_path):
    where, file = plain
    store = stored(file, tmp_path / "store", where)
    path = file.parent / "films/3.avi"
    data = path.read_bytes()
    path.write_bytes(film(50, 10, size=(112, 48), form="avi", gop=3))
    try:
        with pytest.raises(MediumError, match="films/3.avi"):
            list(batchloom.Loader(store, seq_len=4096, global_batch_size=2))
    finally:
        path.write_bytes(data)


def test_the_store_says_which_frames_it_holds(plain, tmp_path):
    where, file = plain
    store = stored(file, tmp_path / "store", where, video_frames=3)
    counts = batchloom.inspect(tmp_path / "store").media
    assert counts["video"].media == 3 * 8
    assert counts["video"].documents == 7
    recipe = store.manifest.recipe["reading"]["media"]
    assert recipe["video_frames"] == 3
    (rows,) = batchloom.explain(batchloom.Loader(store, seq_len=4096, global_batch_size=8), 0)[:1]
    kinds = {medium.kind for span in rows.spans for medium in span.media}
    assert kinds == {"image", "video"}


def test_bad_videos_are_kept_aside_by_their_lines(plain, tmp_path):
    where, _ = plain
    good = film(8, 4)
    (tmp_path / "cut.mp4").write_bytes(good[: len(good) // 2])
    (tmp_path / "page.mp4").write_bytes(b"<html></html>")
    (tmp_path / "good.mp4").write_bytes(good)
    rows = [
        {"messages": talk("<video>?", "Yes."), "videos": [name]}
        for name in ("good.mp4", "cut.mp4", "page.mp4", "none.mp4")
    ]
    rows.append({"messages": talk("Where?", "No."), "videos": ["good.mp4"]})
    rows.append({"messages": talk("<video>?", "No.")})
    file = tmp_path / "in.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    store = stored(file, tmp_path / "store", where)
    assert len(store) == 1
    aside = (tmp_path / "store/quarantine.jsonl").read_text().splitlines()
    told = {one["line"]: one["reason"] for one in map(json.loads, aside)}
    assert set(told) == {2, 3, 4, 5, 6}
    assert "video 1 (cut.mp4) holds no video" in told[2]
    assert "is not the start of a supported video" in told[3]
    assert "is missing" in told[4]
    assert "has none" in told[5]
    assert "without its video" in told[6]


def test_videos_stand_in_texts_as_their_frames(plain, tmp_path):
    where, _ = plain
    made = MADE["llava"]()
    data = film(20, 10)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.mp4").write_bytes(data)
    rows = [
        {"text": "See <video> and <image> there.", "videos": ["a.mp4"], "images": ["b.png"]},
        {"text": "A caption.", "videos": ["a.mp4"]},
    ]
    (tmp_path / "in/b.png").write_bytes(encoded(picture(), "PNG"))
    file = tmp_path / "in/in.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    store = stored(file, tmp_path / "store", where, video_frames=3)
    texts = {
        0: "See <image><image><image> and <image> there.",
        1: "<image><image><image>A caption.",
    }
    frames = frames_of(tmp_path / "in/a.mp4", frames=3)
    images = {0: [*frames, open_image(tmp_path / "in/b.png")], 1: frames}
    for at in range(2):
        number = store.provenance.of(at).record
        ids = made(text=[texts[number]], images=images[number], return_tensors="np")["input_ids"][0]
        assert store[at].ids[:-1].tolist() == ids.tolist()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/a.mp4").write_bytes(data)
    (tmp_path / "folder/a.txt").write_text("A caption.")
    beside = stored(tmp_path / "folder", tmp_path / "beside", where, video_frames=3)
    ids = made(text=[texts[1]], images=frames, return_tensors="np")["input_ids"][0]
    assert beside[0].ids[:-1].tolist() == ids.tolist()


def test_videos_in_tars_are_named_by_their_place(plain, tmp_path):
    where, _ = plain
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, data in (
            ("0.mp4", film(20, 10)),
            ("0.txt", b"A film."),
            ("1.avi", film(8, 4, form="avi")),
        ):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        member = tarfile.TarInfo("1.caption")
        member.size = 7
        tar.addfile(member, io.BytesIO(b"Another"))
    store = stored(tmp_path / "a.tar", tmp_path / "store", where, video_frames=3)
    assert len(store) == 2
    (first, *_) = StoreMedia(store).of(np.array([0]))[0]
    assert first.blob is None
    assert "a.tar#" in first.location
    loader = batchloom.Loader(store, seq_len=64, global_batch_size=1)
    assert sum(len(batch["pixel_values"]) for batch in loader) == 6


def test_check_decodes_every_frame(plain, tmp_path, monkeypatch):
    where, _ = plain
    (tmp_path / "a.mp4").write_bytes(film(20, 10))
    row = {"messages": talk("<video>?", "A film."), "videos": ["a.mp4"]}
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    stored(tmp_path / "in.jsonl", tmp_path / "store", where, video_frames=4)
    frames = []
    decode = features.decode_frames
    monkeypatch.setattr(
        features,
        "decode_frames",
        lambda content, facts: frames.append([one.time for one in facts]) or decode(content, facts),
    )
    assert batchloom.check(tmp_path / "store").sound
    # Both documents name one video, which is decoded once.
    assert frames == [[0, 500_000, 1_000_000, 1_500_000]]
    (tmp_path / "a.mp4").unlink()
    verdict = batchloom.check(tmp_path / "store", missing_media=tmp_path / "gone.json")
    assert not verdict.sound
    assert any("a.mp4" in fault for fault in verdict.faults)
    spec = MediaOptions(replace=str(tmp_path / "gone.json"))
    batch = batchloom.Loader(
        batchloom.open_store(tmp_path / "store"),
        seq_len=128,
        global_batch_size=1,
        media=spec,
        output="numpy",
    )[0]
    assert "pixel_values" not in batch
    assert (batch["labels"] == -100).all()


def test_two_ways_to_say_how_many_frames_are_refused(plain, tmp_path):
    where, file = plain
    with pytest.raises(SettingsError, match="media.video_frames: video_fps says how many"):
        stored(file, tmp_path / "store", where, video_fps=1, video_frames=3)
    with pytest.raises(SettingsError, match="media.video_fps: -1 is not a number above 0"):
        stored(file, tmp_path / "store", where, video_fps=-1)


def test_a_frame_is_known_by_its_time():
    assert FrameFacts(4, 3, time=5) != FrameFacts(4, 3, time=6)
