"""Streams of documents with media give the batches of a store, also when resumed."""

import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchloom
from batchloom import (
    InputError,
    Loader,
    PlanError,
    Recipe,
    SettingsError,
    TokenizerError,
    open_store,
)
from batchloom.batches import DocumentRows, MediaOptions, check_text_only
from batchloom.core.errors import MediumError, TooManyBadRecordsError
from batchloom.plan import Mesh
from batchloom.preparation import DedupRecipe, MediaRecipe, ReadRecipe
from batchloom.streaming import choose_lane_pool_size, merge_states
from batchloom.streaming.lane import PoolMedia
from lane_plans import make_lane_loader
from media.sample_media import encode_image, make_image, make_messages, make_sound
from media.sample_videos import make_video
from media.test_batches import save_with_template
from media.test_tars import make_pairs, write_tar
from raw_streams.streams import make_small_stream, write_lines
from raw_streams.test_keep import prepare_store_files, read_store_files

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
SLOW = pytest.mark.slow
# Each lane packs several pools, and comes to its second epoch.
ORDER = {"seq_len": 400, "global_batch_size": 2, "steps": 8, "lanes": 2, "pool_size": 6}


@pytest.fixture(scope="module")
def image_processor(tmp_path_factory):
    # 16 tokens of an image at most.
    return save_with_template("qwen2_vl", tmp_path_factory.mktemp("sight"), max_pixels=28 * 28 * 16)[2]


@pytest.fixture(scope="module")
def audio_processor(tmp_path_factory):
    return save_with_template("qwen2_audio", tmp_path_factory.mktemp("hearing"), chunk_length=2)[2]


def make_recipe(processor, **settings):
    media_recipe = MediaRecipe(processor=str(processor), **settings.pop("media", {}))
    return Recipe(
        inputs=("x",),
        tokenizer=str(processor),
        dedup=DedupRecipe(mode="none"),
        **{"val_fraction": 0.2, **settings},
        reading=ReadRecipe(media=media_recipe),
    )


def make_jpeg(number):
    size = (20 + 31 * number % 190, 25 + 17 * number % 150)
    # A Parquet file with few bytes has few ranges, each of which opens it again.
    return encode_image(make_image(*size, seed=number), quality=10)


def write_talks(folder, count=30):
    """Write conversations of which most name images."""
    (folder / "pictures").mkdir(parents=True)
    rows = []
    for number in range(count):
        names = [f"pictures/{number}_{k}.jpg" for k in range(number % 3)]
        for name in names:
            (folder / name).write_bytes(make_jpeg(number))
        question = f"{'<image>' * len(names)} Who is number {number}?"
        rows.append({"messages": make_messages(question, f"It is cat {number}."), "images": names})
    return write_lines(folder / "talks.jsonl", rows)


def write_embedded(folder, count=24):
    """Write conversations to Parquet with the bytes of their images."""
    rows = [
        {
            "messages": make_messages(f"<image> Who is number {number}?", f"It is cat {number}."),
            "images": [{"bytes": make_jpeg(number % 7), "path": None}],
        }
        for number in range(count)
    ]
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet", row_group_size=9)
    return folder / "rows.parquet"


def write_captions(folder, count=20):
    """Write images and captions of the same name."""
    folder.mkdir()
    for number in range(count):
        (folder / f"{number}.jpg").write_bytes(make_jpeg(number))
        (folder / f"{number}.txt").write_text(f"This is cat {number}. " * 20)
    return folder


def write_tars(folder):
    """Write WebDataset shards."""
    folder.mkdir()
    for shard in range(3):
        write_tar(folder / f"{shard}.tar", make_pairs(9, 9 * shard))
    return folder


def write_sounds(folder, count=12):
    (folder / "sounds").mkdir(parents=True)
    rows = []
    for number in range(count):
        name = f"sounds/{number}.wav"
        data = make_sound(4_000 + 301 * number, (16_000, 44_100)[number % 2], seed=number)
        (folder / name).write_bytes(data)
        rows.append({"messages": make_messages("<audio>What is it?", f"It is {number}."), "audios": [name]})
    return write_lines(folder / "talks.jsonl", rows)


def write_videos(folder, count=12):
    (folder / "films").mkdir(parents=True)
    rows = []
    for number in range(count):
        name = f"films/{number}.mp4"
        (folder / name).write_bytes(make_video(25 * (1 + number % 2)))
        question = "<video>What is it?"
        rows.append({"messages": make_messages(question, f"It is film {number}."), "videos": [name]})
    return write_lines(folder / "talks.jsonl", rows)


INPUTS = {
    "talks": write_talks,
    "held": write_embedded,
    "captions": write_captions,
    "tars": write_tars,
    "sounds": write_sounds,
}


def read_batches(data, rank=0, world_size=1, state=None, **settings):
    settings = {"output": "numpy", "prefetch": 0, **settings}
    loader = Loader(data, rank=rank, world_size=world_size, **settings)
    if state is not None:
        loader.load_state_dict(state)
    return {batch.step: dict(batch) for batch in loader}


def assert_equal(actual, expected):
    assert sorted(actual) == sorted(expected)
    for step, batch in actual.items():
        assert sorted(batch) == sorted(expected[step])
        for name, value in batch.items():
            np.testing.assert_array_equal(value, expected[step][name], f"{step} {name}")


# Media that are named and media that are embedded.
IN_FAST_TIER = {("talks", False), ("captions", False), ("held", True), ("sounds", True)}


@pytest.mark.parametrize(
    ("kind", "embed"),
    [
        pytest.param(kind, embed, marks=[] if (kind, embed) in IN_FAST_TIER else [SLOW])
        for kind in (*INPUTS, "films")
        for embed in (False, True)
    ],
)
def test_a_stream_gives_the_batches_of_the_store_it_writes(
    tmp_path, monkeypatch, image_processor, audio_processor, kind, embed
):
    if kind == "films":
        pytest.importorskip("av")
    inputs = {**INPUTS, "films": write_videos}[kind](tmp_path / "in")
    media_settings = {"media": {"keep": "embed"}} if embed else {}
    recipe = make_recipe(audio_processor if kind == "sounds" else image_processor, **media_settings)
    stream = make_small_stream(inputs, recipe=recipe, keep=tmp_path / "kept", **ORDER)
    batches, spilled, forget = {}, [], PoolMedia.forget
    monkeypatch.setattr(PoolMedia, "forget", lambda pool: spilled.extend(pool.spill_files) or forget(pool))
    for batch in Loader(stream, rank=0, world_size=1, output="numpy", prefetch=0):
        batches[batch.step] = dict(batch)
    features = [name for batch in batches.values() for name in batch if name not in TEXT]
    assert len(features) > len(batches) / 2
    stream.finish(workers=1)
    assert read_store_files(tmp_path / "kept") == prepare_store_files(stream, tmp_path / "prepared")
    repeated = make_lane_loader(open_store(tmp_path / "kept"), stream)
    assert_equal(batches, {batch.step: dict(batch) for batch in repeated})
    # Bytes are spilled of media that are in records or are to be embedded.
    assert bool(spilled) == (kind == "held" or embed)
    assert not any(path.exists() for path in spilled)


TEXT = ("input_ids", "labels", "position_ids")


@pytest.fixture(scope="module")
def repeatable_stream(request, image_processor, tmp_path_factory):
    """Function that makes an equal stream each time, and the batches of one."""
    inputs = INPUTS[request.param](tmp_path_factory.mktemp("repeatable") / "in")
    recipe = make_recipe(image_processor)

    def make_stream(workers=0):
        return make_small_stream(inputs, recipe=recipe, workers=workers, **ORDER)

    return make_stream, read_batches(make_stream())


# Step 3 is inside of the second pool of a lane.
RESUMED_IN_FAST_TIER = {("talks", 3)}


# A worker imports transformers for four seconds.
@SLOW
@pytest.mark.parametrize(
    ("repeatable_stream", "workers"), [("held", 1), ("talks", 2), ("held", 2)], indirect=["repeatable_stream"]
)
def test_workers_change_nothing(repeatable_stream, workers):
    make_stream, expected = repeatable_stream
    assert_equal(expected, read_batches(make_stream(workers=workers), prefetch=2))


@pytest.mark.parametrize(
    ("repeatable_stream", "step"),
    [
        pytest.param(kind, step, marks=[] if (kind, step) in RESUMED_IN_FAST_TIER else [SLOW])
        for kind in ("talks", "held")
        for step in range(ORDER["steps"])
    ],
    indirect=["repeatable_stream"],
)
def test_a_stream_resumes_from_any_step(repeatable_stream, step):
    make_stream, expected = repeatable_stream
    loader = Loader(make_stream(), rank=0, world_size=1, output="numpy", prefetch=0)
    iterator = iter(loader)
    for _ in range(step):
        next(iterator)
    state = json.loads(json.dumps(loader.state_dict()))
    iterator.close()
    remaining = {number: batch for number, batch in expected.items() if number >= step}
    assert_equal(remaining, read_batches(make_stream(), state=state))


@pytest.mark.parametrize("repeatable_stream", ["talks", pytest.param("held", marks=SLOW)], indirect=True)
def test_ranks_share_the_rows_of_a_step(repeatable_stream):
    """Each of two ranks has one of the two rows."""
    make_stream, expected = repeatable_stream
    ranks = [read_batches(make_stream(), rank, 2) for rank in range(2)]
    for step, batch in expected.items():
        for name in TEXT:
            rows = [batches[step][name] for batches in ranks]
            axis = 1 if name == "position_ids" else 0
            np.testing.assert_array_equal(np.concatenate(rows, axis), batch[name])
        for name in set(batch) - set(TEXT):
            parts = [batches[step][name] for batches in ranks if name in batches[step]]
            np.testing.assert_array_equal(np.concatenate(parts), batch[name])


@pytest.mark.slow
@pytest.mark.parametrize("repeatable_stream", ["held", pytest.param("talks", marks=SLOW)], indirect=True)
def test_states_of_two_ranks_go_on_as_one(repeatable_stream):
    make_stream, expected = repeatable_stream
    loaders = [Loader(make_stream(), rank=rank, world_size=2, output="numpy") for rank in range(2)]
    states = []
    for loader in loaders:
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        states.append(loader.state_dict())
        iterator.close()
    remaining = {number: batch for number, batch in expected.items() if number >= 3}
    assert_equal(remaining, read_batches(make_stream(), state=merge_states(states)))


@pytest.mark.slow
def test_each_epoch_reads_media_again_and_deletes_them(tmp_path, image_processor):
    order = {**ORDER, "steps": 20}
    stream = make_small_stream(write_embedded(tmp_path / "in"), recipe=make_recipe(image_processor), **order)
    loader = Loader(stream, rank=0, world_size=1, output="numpy", prefetch=0)
    most_files = 0
    for _ in loader:
        most_files = max(most_files, sum(1 for _ in stream._folder.rglob("*.media")))
    assert 0 < most_files <= 3 * stream.lanes


@pytest.mark.parametrize("repeatable_stream", ["talks"], indirect=True)
def test_varlen_and_split_as_of_a_store(repeatable_stream):
    make_stream, by_row = repeatable_stream
    stream = make_stream()
    varlen = read_batches(stream, form="varlen")
    for step, batch in varlen.items():
        for name in set(by_row[step]) - set(TEXT):
            np.testing.assert_array_equal(batch[name], by_row[step][name])
    loader = Loader(stream, rank=0, world_size=1, output="numpy", prefetch=0)
    for batch in loader:
        parts = batch.split(1)
        grids = [part["image_grid_thw"] for part in parts if "image_grid_thw" in part]
        if grids:
            np.testing.assert_array_equal(np.concatenate(grids), batch["image_grid_thw"])


def test_a_medium_that_changed_is_an_error_with_its_line(tmp_path, image_processor):
    inputs = write_talks(tmp_path / "in", 12)
    stream = make_small_stream(inputs, recipe=make_recipe(image_processor, val_fraction=0), **ORDER)
    loader = Loader(stream, rank=0, world_size=1, output="numpy", prefetch=0)
    batches = iter(loader)
    next(batches)
    for path in (tmp_path / "in" / "pictures").iterdir():
        os.truncate(path, path.stat().st_size - 1)
    message = (
        r"The document at talks.jsonl, (line|byte) [\d,]+: image pictures/.* has .* bytes, but had .*batchloom prepare"
    )
    with pytest.raises(MediumError, match=message):
        list(batches)


def test_bad_media_are_left_out_and_counted(tmp_path, image_processor, caplog):
    inputs = write_talks(tmp_path / "in", 30)
    (tmp_path / "in" / "pictures" / "4_0.jpg").write_bytes(b"")
    recipe = make_recipe(image_processor, max_bad=1, val_fraction=0)
    batches = read_batches(make_small_stream(inputs, recipe=recipe, **ORDER))
    assert len(batches) == ORDER["steps"]
    assert "4_0.jpg" in caplog.text
    (tmp_path / "in" / "pictures" / "5_0.jpg").write_text("<svg/>")
    with pytest.raises(TooManyBadRecordsError, match="of this rank's lanes are bad"):
        read_batches(make_small_stream(inputs, recipe=recipe, **ORDER))


def test_stream_takes_media_settings(tmp_path, image_processor):
    settings = {
        "seq_len": 900,
        "global_batch_size": 2,
        "steps": 4,
        "tokenizer": str(image_processor),
        "media": {"processor": str(image_processor)},
        "workers": 0,
    }
    stream = batchloom.stream(write_talks(tmp_path / "in"), **settings)
    assert stream.spec.pool_size == choose_lane_pool_size(media=True) == 1024
    assert stream.spec.overlong == "drop"
    loader = Loader(stream, rank=0, world_size=1)
    assert loader.holds_media
    assert any("pixel_values" in batch for batch in loader)
    with pytest.raises(InputError, match="holds images or audio, which a trainer does not pass on"):
        check_text_only(loader, "a trainer")


@pytest.mark.parametrize(
    ("order", "settings", "problem"),
    [
        ({"packing": "wrap"}, {}, "packing='wrap' cuts documents"),
        ({"overlong": "split"}, {}, "overlong='split' cuts documents"),
        ({"overlong": "truncate"}, {}, "overlong='truncate' cuts documents"),
        ({}, {"augment": {"noise_prob": 0.1}}, "leave augment .* out"),
        (
            {},
            {"mesh": Mesh(context=2), "world_size": 2, "labels": "shifted"},
            "context-parallel",
        ),
        ({}, {"media": MediaOptions(replace="gone.json")}, "this is a stream"),
    ],
)
def test_settings_that_cut_or_change_documents_are_refused(tmp_path, image_processor, order, settings, problem):
    settings = {"rank": 0, "world_size": 1, **settings}
    with pytest.raises(PlanError, match=problem):
        Loader(
            make_small_stream(write_talks(tmp_path / "in"), recipe=make_recipe(image_processor), **{**ORDER, **order}),
            **settings,
        )


def test_a_tokenizer_without_the_tokens_of_media_is_refused_at_once(tmp_path, image_processor):
    recipe = make_recipe(image_processor)
    text_recipe = Recipe(inputs=("x",), tokenizer="bytes", dedup=recipe.dedup, reading=recipe.reading)
    with pytest.raises(TokenizerError, match="has no control token"):
        make_small_stream(write_talks(tmp_path / "in"), recipe=text_recipe, **ORDER)


def test_an_invalid_processor_is_refused_at_once(tmp_path):
    with pytest.raises((InputError, SettingsError), match="processor"):
        batchloom.stream(
            write_talks(tmp_path / "in"),
            seq_len=90,
            global_batch_size=2,
            steps=4,
            tokenizer="bytes",
            media={"processor": str(tmp_path)},
        )


def test_a_pool_without_sequences_takes_nothing_from_the_one_before(tmp_path, image_processor):
    """Both pools read the same byte range, whose media were spilled together."""
    rows = []
    for number in range(40):
        answer = f"It is cat {number}. " * (1 if number < 8 else 200)
        rows.append(
            {
                "messages": make_messages("<image> Who?", answer),
                "images": [{"bytes": make_jpeg(number % 7), "path": None}],
            }
        )
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), file)
    order = {**ORDER, "lanes": 1, "global_batch_size": 1, "pool_size": 8, "shuffle": False}
    recipe = make_recipe(image_processor, val_fraction=0)
    stream = make_small_stream(file, recipe=recipe, unit_bytes=1 << 24, **{**order, "steps": 3})
    batches = read_batches(stream)
    assert all("pixel_values" in batch for batch in batches.values())


def test_spilled_media_are_deleted_with_each_iteration(tmp_path, image_processor):
    stream = make_small_stream(write_embedded(tmp_path / "in"), recipe=make_recipe(image_processor), **ORDER)
    loader = Loader(stream, rank=0, world_size=1, output="numpy", prefetch=0)
    for _ in range(3):
        batches = iter(loader)
        assert next(batches)
        assert list(stream._folder.rglob("*.media"))
        batches.close()
        assert not list(stream._folder.rglob("*.media"))


def test_texts_with_a_processor_are_cut_as_their_store_cuts_them(tmp_path, image_processor, caplog):
    file = write_lines(tmp_path / "text.jsonl", [{"text": f"Line {n}. " * 60} for n in range(20)])
    stream = make_small_stream(file, recipe=make_recipe(image_processor, val_fraction=0), **{**ORDER, "seq_len": 64})
    assert stream.spec.overlong == "split"
    assert read_batches(stream)
    caplog.clear()
    with_media = make_small_stream(write_talks(tmp_path / "in"), recipe=make_recipe(image_processor), **ORDER)
    iter(read_batches(with_media))
    assert "a larger seq_len keeps them" in caplog.text


def test_a_model_is_tried_on_documents_of_the_first_step(tmp_path, image_processor):
    stream = make_small_stream(write_embedded(tmp_path / "in"), recipe=make_recipe(image_processor), **ORDER)
    loader = Loader(stream, rank=0, world_size=1)
    rows = DocumentRows(loader)
    (number,) = rows.with_media(900)
    batch = rows.batch([[number], [number]])
    assert len(batch["image_grid_thw"]) == 2
    assert batch["input_ids"].shape == (2, int(rows.batch([[number]])["input_ids"].numel()))
    texts = write_lines(
        tmp_path / "texts.jsonl",
        [{"messages": make_messages(f"Who is {n}?", "A cat."), "images": []} for n in range(99)],
    )
    text_rows = DocumentRows(
        Loader(make_small_stream(texts, recipe=make_recipe(image_processor), **ORDER), rank=0, world_size=1)
    )
    assert text_rows.with_media(900) == []
    assert "pixel_values" in text_rows.describe_media_mismatch(TextModel(), 900)


class TextModel:
    """Interface of a model that takes only text."""

    config = None

    def forward(self, input_ids, position_ids):
        """Take text."""


@pytest.mark.parametrize("embed", [False, True])
def test_media_missing_in_a_later_epoch_are_counted_then(tmp_path, image_processor, embed):
    inputs = write_talks(tmp_path / "in", 12)
    media = {"keep": "embed"} if embed else {}
    recipe = make_recipe(image_processor, max_bad=0, val_fraction=0, media=media)
    order = {**ORDER, "lanes": 1, "global_batch_size": 1, "steps": 60}
    loader = Loader(make_small_stream(inputs, recipe=recipe, **order), output="numpy", prefetch=0)
    batches = iter(loader)
    for _ in range(6):
        next(batches)
    state = loader.state_dict()
    for path in (tmp_path / "in" / "pictures").iterdir():
        path.unlink()
    with pytest.raises((MediumError, TooManyBadRecordsError)):
        list(batches)
    resumed = Loader(make_small_stream(inputs, recipe=recipe, **order), output="numpy", prefetch=0)
    resumed.load_state_dict(state)
    with pytest.raises((MediumError, TooManyBadRecordsError)):
        list(resumed)
