"""Videos: sampling and decoding of frames, stores with videos, invalid files."""

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
from batchloom.media import BytesContent, FrameSampling, MediaLimits, processor as processor_module
from batchloom.media.video import compute_frame_times, decode_frames, fit_frame_size, inspect_video
from batchloom.store import StoreMedia
from media.processors import PROCESSORS, save_processor
from media.sample_media import encode_image, make_image, make_messages, make_sound
from media.sample_videos import decode_all_frames, make_audio_only_file, make_video
from media.test_batches import as_numpy, assert_same_batch, make_store
from media.test_tokens import PLACEHOLDERS, TEMPLATE

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
FORMS = [
    ("mp4", "mpeg4"),
    ("mp4", "libx264"),
    ("webm", "libvpx-vp9"),
    ("avi", "mpeg4"),
    ("mov", "libx264"),
]


def inspect_frames(data, limits=None, **sampling):
    return inspect_video(BytesContent(data), limits or MediaLimits(), FrameSampling(**sampling))


def sample_with_transformers(total, rate, **sampling):
    return default_sample_indices_fn(VideoMetadata(total, fps=rate), **sampling).tolist()


@pytest.mark.parametrize(("total", "rate"), [(50, 25), (301, 30), (7, 10), (100, 24), (1, 25)])
def test_sampled_frames_are_those_of_transformers(total, rate):
    seconds = Fraction(total, rate)
    for count in (1, 2, 3, 7):
        if count <= total:
            times = compute_frame_times(seconds, Fraction(rate), FrameSampling(frames=count))
            expected = sample_with_transformers(total, rate, num_frames=count)
            assert [math.floor(Fraction(time, 10**6) * rate) for time in times] == expected
    for fps in (1, 2, 2.5, 1 / 3):
        times = compute_frame_times(seconds, Fraction(rate), FrameSampling(fps=fps, max_frames=10**6))
        expected = sample_with_transformers(total, rate, fps=fps)
        assert [math.floor(Fraction(time, 10**6) * rate) for time in times] == expected


def test_at_least_one_frame_and_at_most_all_are_sampled():
    assert compute_frame_times(Fraction(1, 10), Fraction(10), FrameSampling(fps=0.1)) == [0]
    assert compute_frame_times(Fraction(1), Fraction(3), FrameSampling(frames=9)) == [
        0,
        333_334,
        666_667,
    ]
    assert len(compute_frame_times(Fraction(36_000), Fraction(30), FrameSampling(fps=2, max_frames=16))) == 16
    assert len(compute_frame_times(Fraction(2), None, FrameSampling(frames=9))) == 9


def test_frames_keep_their_aspect_ratio():
    sampling = FrameSampling(min_pixels=100, max_pixels=10_000)
    assert fit_frame_size(50, 40, sampling) == (50, 40)
    assert fit_frame_size(400, 100, sampling) == (200, 50)
    assert fit_frame_size(2, 2, sampling) == (10, 10)
    assert fit_frame_size(100_000, 1, sampling) == (31_622, 1)


@pytest.mark.parametrize(("form", "codec"), FORMS)
def test_decoded_frames_are_those_shown_at_their_times(form, codec):
    data = make_video(50, 25, form=form, codec=codec)
    all_frames = decode_all_frames(data)
    for sampling in ({"fps": 5}, {"frames": 50}, {"frames": 3}, {}):
        facts = inspect_frames(data, **sampling)
        frames = list(decode_frames(BytesContent(data), facts))
        assert [(frame.width, frame.height) for frame in facts] == [(64, 48)] * len(facts)
        expected = [all_frames[number * 50 // len(facts)] for number in range(len(facts))]
        assert [frame.tobytes() for frame in frames] == [frame.tobytes() for frame in expected]
    # Decoding that starts later gives the same frames.
    third_frame = list(decode_frames(BytesContent(data), facts[2:3]))
    assert third_frame[0].tobytes() == frames[2].tobytes()


def test_distant_frames_are_reached_by_seeking():
    data = make_video(200, 10, codec="libx264", gop=10)
    all_frames = decode_all_frames(data)
    facts = inspect_frames(data, frames=5)
    assert [frame.time for frame in facts] == [0, 4_000_000, 8_000_000, 12_000_000, 16_000_000]
    frames = list(decode_frames(BytesContent(data), facts))
    assert [frame.tobytes() for frame in frames] == [all_frames[at].tobytes() for at in (0, 40, 80, 120, 160)]
    # All frames are reached if keyframes are rare.
    rare_keyframes = make_video(200, 10, codec="libx264", gop=200)
    facts = inspect_frames(rare_keyframes, frames=20)
    frames = list(decode_frames(BytesContent(rare_keyframes), facts))
    assert [frame.tobytes() for frame in frames] == [
        frame.tobytes() for frame in decode_all_frames(rare_keyframes)[::10]
    ]


def test_a_frame_stays_until_the_next_comes():
    times = [0, 100, 1000, 1500, 4000, 4500]
    data = make_video(6, 10, form="matroska", codec="libx264", times=times)
    all_frames = decode_all_frames(data)
    facts = inspect_frames(data, frames=4)
    shown_frames = [max(at for at, time in enumerate(times) if time * 1000 <= frame.time) for frame in facts]
    frames = list(decode_frames(BytesContent(data), facts))
    assert [frame.tobytes() for frame in frames] == [all_frames[at].tobytes() for at in shown_frames]
    assert len(set(shown_frames)) > 2


def test_large_frames_are_made_smaller_and_small_ones_larger():
    data = make_video(10, 5, size=(320, 160))
    facts = inspect_frames(data, frames=2, max_pixels=3200)
    assert {(frame.width, frame.height) for frame in facts} == {(80, 40)}
    (first_frame, _) = decode_frames(BytesContent(data), facts)
    difference = np.abs(
        np.asarray(first_frame, np.int64) - np.asarray(decode_all_frames(data)[0].resize((80, 40)), np.int64)
    )
    assert difference.max() <= 1
    assert inspect_frames(make_video(4, 4, size=(16, 16)), min_pixels=1024)[0].width == 32


def remux(source, to, **options):
    """Copy the packets of a video to another file."""
    import av

    with av.open(source) as input_container, av.open(to, "w", options=options) as output_container:
        stream = output_container.add_stream_from_template(input_container.streams.video[0])
        for packet in input_container.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                output_container.mux(packet)


def make_rotated_video(data, degrees):
    """Return a video whose header rotates it, as those of telephones do."""
    content = bytearray(data)
    # The matrix of the track's header (tkhd), 16.16 fixed point.
    at = content.index(b"tkhd") + 4 + 40
    unit = 1 << 16
    a, b, c, d = {90: (0, unit, -unit, 0), 180: (-unit, 0, 0, -unit), 270: (0, -unit, unit, 0)}[degrees]
    matrix = (a, b, 0, c, d, 0, 0, 0, 1 << 30)
    content[at : at + 36] = b"".join(value.to_bytes(4, "big", signed=True) for value in matrix)
    return bytes(content)


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_videos_on_their_side_are_turned_upright(degrees):
    original = make_video(8, 4)
    data = make_rotated_video(original, degrees)
    facts = inspect_frames(data, frames=2)
    assert (facts[0].width, facts[0].height) == ((64, 48) if degrees == 180 else (48, 64))
    (first_frame, _) = decode_frames(BytesContent(data), facts)
    # A matrix of the file turns clockwise, Pillow the other way.
    expected = decode_all_frames(original)[0].rotate(-degrees, expand=True)
    assert first_frame.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"<html>log in</html>", "which is not the start of a supported video"),
        (b"#EXTM3U\n#EXT-X-VERSION:3\nfile:///etc/passwd\n", "which is not the start of a supported video"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "which is not the start of a supported video"),
        (encode_image(make_image(), "PNG"), "which is not the start of a supported video"),
        (b"\0\0\0\x1cftypavif" + b"\0" * 60, "is an image"),
        (b"\0\0\0\x1cftypisom" + b"\0" * 60, "cannot be decoded"),
        (b"\x1aE\xdf\xa3" + b"\0" * 60, "cannot be decoded"),
        (b"RIFF\0\0\0\0AVI " + b"\0" * 60, "cannot be decoded"),
    ],
)
def test_other_files_are_no_videos(data, message):
    with pytest.raises(UnusableRecordError, match=message):
        inspect_frames(data)


def test_sound_alone_is_no_video():
    with pytest.raises(UnusableRecordError, match="holds no video"):
        inspect_frames(make_audio_only_file())
    with pytest.raises(UnusableRecordError, match="which is not the start of a supported video"):
        inspect_frames(make_sound())


@pytest.mark.parametrize(("form", "codec"), FORMS)
def test_cut_videos_are_refused(form, codec):
    data = make_video(250, 25, form=form, codec=codec)
    for share in (0.1, 0.5, 0.8):
        with pytest.raises(UnusableRecordError):
            inspect_frames(data[: int(len(data) * share)])


def test_a_cut_faststart_video_is_refused(tmp_path):
    path = tmp_path / "a.mp4"
    path.write_bytes(make_video(250, 25, codec="libx264"))
    remux(path, tmp_path / "b.mp4", movflags="faststart")
    data = (tmp_path / "b.mp4").read_bytes()
    assert len(inspect_frames(data)) == 20
    with pytest.raises(UnusableRecordError, match="cut short|damaged"):
        inspect_frames(data[: len(data) // 2])


def test_frames_of_too_many_pixels_are_refused():
    with pytest.raises(UnusableRecordError, match="has frames of 3,072 pixels, more than the 3,000"):
        inspect_frames(make_video(4, 4), MediaLimits(image_pixels=3000))


def test_invalid_sampling_is_refused():
    with pytest.raises(SettingsError) as error:
        FrameSampling(fps=0, frames=0, max_frames=-1, min_pixels="few", max_pixels=1.5)
    assert len(error.value.problems) == 5
    with pytest.raises(SettingsError, match="is more than max_pixels"):
        FrameSampling(min_pixels=100, max_pixels=10)


def write_conversations(folder):
    """Write conversations about videos and images; return the file."""
    (folder / "films").mkdir(parents=True)
    for number, (form, codec) in enumerate(FORMS):
        size = (64 + 16 * number, 48)
        (folder / f"films/{number}.{form}").write_bytes(
            make_video(20 + 10 * number, 10, size=size, form=form, codec=codec)
        )
    (folder / "a.png").write_bytes(encode_image(make_image(40, 30), "PNG"))
    rows = [
        {
            "messages": make_messages(f"<video> What is film {number}?", f"It is film {number}."),
            "videos": [f"films/{number}.{form}"],
        }
        for number, (form, _) in enumerate(FORMS)
    ]
    media = {"images": ["a.png"], "videos": ["films/1.mp4", "films/0.mp4"]}
    rows.append({"messages": make_messages("<video><image> and <video>?", "All."), **media})
    parts = [
        {"type": "text", "text": "Who?"},
        {"type": "video_url", "video_url": {"url": "films/1.mp4"}},
    ]
    rows.append({"messages": make_messages(parts, "Nobody.")})
    rows.append({"messages": make_messages("And without?", "Yes.")})
    file = folder / "talks.json"
    file.write_text(json.dumps(rows))
    return file


def decode_sampled_frames(path, **sampling):
    data = path.read_bytes()
    return list(decode_frames(BytesContent(data), inspect_frames(data, **sampling)))


@pytest.mark.parametrize("name", ["qwen2_vl", pytest.param("gemma3", marks=pytest.mark.slow), "idefics3"])
def test_a_video_becomes_its_frames(name, tmp_path):
    """Tokens and features are the processor's for the frames as images."""
    processor = PROCESSORS[name]()
    template = TEMPLATE.replace("KIND", "image").replace("PLACE", PLACEHOLDERS.get(name, "<image>"))
    processor_folder = save_processor(processor, tmp_path / "processor")
    (processor_folder / "chat_template.jinja").write_text(template)
    file = write_conversations(tmp_path / "in")
    sampling = {"fps": 1.5, "max_pixels": 2000}
    video_options = {f"video_{key}": value for key, value in sampling.items()}
    store = make_store(file, tmp_path / "store", processor_folder, **video_options)
    assert len(store) == 8
    loader = batchloom.Loader(store, seq_len=4096, global_batch_size=1)
    batches = list(loader)
    expected_features = {}
    for number, row in enumerate(json.loads(file.read_text())):
        videos = [file.parent / file_name for file_name in row.get("videos", [])]
        if number == 6:
            videos = [file.parent / "films/1.mp4"]
        runs = [decode_sampled_frames(film, **sampling) for film in videos]
        images = [
            [image] for image in map(open_image, [file.parent / file_name for file_name in row.get("images", [])])
        ]
        kinds = ["video", "image", "video"] if images else ["video"] * len(runs)
        parts = [runs.pop(0) if kind == "video" else images.pop(0) for kind in kinds]
        content = [{"type": "image"} for images_of_part in parts for _ in images_of_part]
        text = {5: " and ", 6: "Who?", 7: "And without?"}.get(number, f" What is film {number}?")
        text_parts = [{"type": "text", "text": text}]
        if number == 5:
            last = len(parts[2])
            content = [*content[:-last], *text_parts, *content[-last:], {"type": "text", "text": "?"}]
        else:
            content = [*text_parts, *content] if number >= 6 else [*content, *text_parts]
        messages = [{"role": "user", "content": content if parts else text}, row["messages"][1]]
        prompt = processor.tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
        media = {"images": [image for images_of_part in parts for image in images_of_part]} if parts else {}
        inputs = processor(text=[prompt], return_tensors="np", **media)
        document = next(at for at in range(8) if store.provenance.of(at).record == number)
        assert store[document].ids.tolist() == np.asarray(inputs["input_ids"])[0].tolist()
        if parts:
            expected_features[document] = np.asarray(inputs["pixel_values"])
    checked_documents = {}
    for batch in batches:
        rows = loader.plan.rows(*loader.plan.positions_of(batch.step))
        documents = [int(document) for document in rows.documents if int(document) in expected_features]
        axis = 1 if name == "idefics3" else 0
        expected = np.concatenate([expected_features[document] for document in documents], axis) if documents else None
        if documents and name != "idefics3":
            assert np.array_equal(np.asarray(batch["pixel_values"]), expected)
        elif documents:
            assert batch["pixel_values"].shape[:2] == expected.shape[:2]
        checked_documents.update(dict.fromkeys(documents, True))
    assert set(checked_documents) == set(expected_features)


def open_image(path):
    from PIL import Image

    return Image.open(path).convert("RGB")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Folder of a processor, and a file of conversations."""
    folder = tmp_path_factory.mktemp("plain")
    processor_folder = save_processor(PROCESSORS["llava"](), folder / "processor")
    template = TEMPLATE.replace("KIND", "image").replace("PLACE", "<image>")
    (processor_folder / "chat_template.jinja").write_text(template)
    return processor_folder, write_conversations(folder / "in")


def test_embedded_videos_are_stored_once_and_give_the_same(sources, tmp_path):
    processor_folder, file = sources
    referenced = make_store(file, tmp_path / "named", processor_folder)
    embedded = make_store(file, tmp_path / "held", processor_folder, keep="embed")
    videos = {path.read_bytes() for path in (file.parent / "films").iterdir()}
    size = sum(map(len, videos)) + (file.parent / "a.png").stat().st_size
    assert (tmp_path / "held/train/shard_00000.blobs").stat().st_size == size
    (file.parent / "films").rename(file.parent / "gone")
    try:
        sizes = {"seq_len": 4096, "global_batch_size": 2}
        expected = as_numpy(batchloom.Loader(embedded, **sizes)[0])
        with pytest.raises(MediumError, match=r"row 1\): video films/.* is missing"):
            batchloom.Loader(referenced, **sizes)[0]
    finally:
        (file.parent / "gone").rename(file.parent / "films")
    assert_same_batch(as_numpy(batchloom.Loader(referenced, **sizes)[0]), expected)
    serial = batchloom.Loader(referenced, **sizes, media=MediaOptions(workers=1, memory=1 << 20), prefetch=0)
    assert_same_batch(as_numpy(serial[0]), expected)


def test_a_video_that_has_changed_is_an_error(sources, tmp_path):
    processor_folder, file = sources
    store = make_store(file, tmp_path / "store", processor_folder)
    path = file.parent / "films/3.avi"
    data = path.read_bytes()
    path.write_bytes(make_video(50, 10, size=(112, 48), form="avi", gop=3))
    try:
        with pytest.raises(MediumError, match="films/3.avi"):
            list(batchloom.Loader(store, seq_len=4096, global_batch_size=2))
    finally:
        path.write_bytes(data)


def test_a_store_counts_its_frames(sources, tmp_path):
    processor_folder, file = sources
    store = make_store(file, tmp_path / "store", processor_folder, video_frames=3)
    counts = batchloom.inspect(tmp_path / "store").media
    assert counts["video"].media == 3 * 8
    assert counts["video"].documents == 7
    recipe = store.manifest.recipe["reading"]["media"]
    assert recipe["video_frames"] == 3
    (rows,) = batchloom.explain(batchloom.Loader(store, seq_len=4096, global_batch_size=8), 0)[:1]
    kinds = {medium.kind for span in rows.spans for medium in span.media}
    assert kinds == {"image", "video"}


def test_bad_videos_are_quarantined_with_their_lines(sources, tmp_path):
    processor_folder, _ = sources
    good = make_video(8, 4)
    (tmp_path / "cut.mp4").write_bytes(good[: len(good) // 2])
    (tmp_path / "page.mp4").write_bytes(b"<html></html>")
    (tmp_path / "good.mp4").write_bytes(good)
    rows = [
        {"messages": make_messages("<video>?", "Yes."), "videos": [name]}
        for name in ("good.mp4", "cut.mp4", "page.mp4", "none.mp4")
    ]
    rows.append({"messages": make_messages("Where?", "No."), "videos": ["good.mp4"]})
    rows.append({"messages": make_messages("<video><video>?", "No."), "videos": ["good.mp4"]})
    file = tmp_path / "in.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    store = make_store(file, tmp_path / "store", processor_folder)
    assert len(store) == 1
    entries = (tmp_path / "store/quarantine.jsonl").read_text().splitlines()
    reasons = {entry["line"]: entry["reason"] for entry in map(json.loads, entries)}
    assert set(reasons) == {2, 3, 4, 5, 6}
    assert "video 1 (cut.mp4) holds no video" in reasons[2]
    assert "is not the start of a supported video" in reasons[3]
    assert "is missing" in reasons[4]
    assert "has none" in reasons[5]
    assert "without its video" in reasons[6]


def test_videos_in_texts_become_their_frames(sources, tmp_path):
    processor_folder, _ = sources
    processor = PROCESSORS["llava"]()
    data = make_video(20, 10)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.mp4").write_bytes(data)
    rows = [
        {"text": "See <video> and <image> there.", "videos": ["a.mp4"], "images": ["b.png"]},
        {"text": "A caption.", "videos": ["a.mp4"]},
    ]
    (tmp_path / "in/b.png").write_bytes(encode_image(make_image(), "PNG"))
    file = tmp_path / "in/in.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    store = make_store(file, tmp_path / "store", processor_folder, video_frames=3)
    texts = {
        0: "See <image><image><image> and <image> there.",
        1: "<image><image><image>A caption.",
    }
    frames = decode_sampled_frames(tmp_path / "in/a.mp4", frames=3)
    images = {0: [*frames, open_image(tmp_path / "in/b.png")], 1: frames}
    for at in range(2):
        number = store.provenance.of(at).record
        ids = processor(text=[texts[number]], images=images[number], return_tensors="np")["input_ids"][0]
        assert store[at].ids[:-1].tolist() == ids.tolist()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/a.mp4").write_bytes(data)
    (tmp_path / "folder/a.txt").write_text("A caption.")
    captioned = make_store(tmp_path / "folder", tmp_path / "beside", processor_folder, video_frames=3)
    ids = processor(text=[texts[1]], images=frames, return_tensors="np")["input_ids"][0]
    assert captioned[0].ids[:-1].tolist() == ids.tolist()


def test_videos_in_tars_are_named_by_their_byte_range(sources, tmp_path):
    processor_folder, _ = sources
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, data in (
            ("0.mp4", make_video(20, 10)),
            ("0.txt", b"A film."),
            ("1.avi", make_video(8, 4, form="avi")),
        ):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        member = tarfile.TarInfo("1.caption")
        member.size = 7
        tar.addfile(member, io.BytesIO(b"Another"))
    store = make_store(tmp_path / "a.tar", tmp_path / "store", processor_folder, video_frames=3)
    assert len(store) == 2
    (first_frame, *_) = StoreMedia(store).of(np.array([0]))[0]
    assert first_frame.blob is None
    assert "a.tar#" in first_frame.location
    loader = batchloom.Loader(store, seq_len=64, global_batch_size=1)
    assert sum(len(batch["pixel_values"]) for batch in loader) == 6


def test_check_decodes_every_frame(sources, tmp_path, monkeypatch):
    processor_folder, _ = sources
    (tmp_path / "a.mp4").write_bytes(make_video(20, 10))
    row = {"messages": make_messages("<video>?", "A film."), "videos": ["a.mp4"]}
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    make_store(tmp_path / "in.jsonl", tmp_path / "store", processor_folder, video_frames=4)
    frames = []
    decode = processor_module.decode_frames
    monkeypatch.setattr(
        processor_module,
        "decode_frames",
        lambda content, facts: frames.append([frame.time for frame in facts]) or decode(content, facts),
    )
    assert batchloom.check(tmp_path / "store").sound
    # Both documents name one video, which is decoded once.
    assert frames == [[0, 500_000, 1_000_000, 1_500_000]]
    (tmp_path / "a.mp4").unlink()
    verdict = batchloom.check(tmp_path / "store", missing_media=tmp_path / "gone.json")
    assert not verdict.sound
    assert any("a.mp4" in fault for fault in verdict.faults)
    media_options = MediaOptions(replace=str(tmp_path / "gone.json"))
    batch = batchloom.Loader(
        batchloom.open_store(tmp_path / "store"),
        seq_len=128,
        global_batch_size=1,
        media=media_options,
        output="numpy",
    )[0]
    assert "pixel_values" not in batch
    assert (batch["labels"] == -100).all()


def test_contradicting_frame_counts_are_refused(sources, tmp_path):
    processor_folder, file = sources
    with pytest.raises(SettingsError, match="media.video_frames: video_fps says how many"):
        make_store(file, tmp_path / "store", processor_folder, video_fps=1, video_frames=3)
    with pytest.raises(SettingsError, match="media.video_fps: -1 is not a number above 0"):
        make_store(file, tmp_path / "store", processor_folder, video_fps=-1)


def test_frames_of_other_times_differ():
    assert FrameFacts(4, 3, time=5) != FrameFacts(4, 3, time=6)
