"""Streams of documents with media: their batches are those of a store, wherever a run is resumed."""

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
from batchloom.batches import BatchOptions, DocumentRows, MediaOptions, check_text_only
from batchloom.core.errors import MediumError, TooManyBadRecordsError
from batchloom.plan import Mesh, choose_lane_pool_size
from batchloom.preparation import DedupRecipe, MediaRecipe, ReadRecipe
from batchloom.streaming import merge_states
from batchloom.streaming.stream_media import PoolMedia
from media.films import film
from media.made import encoded, picture, sound, talk
from media.test_batches import saved
from media.test_tars import packed, pairs
from raw_streams.streams import small_stream, write_lines
from raw_streams.test_keep import files_of, prepared
from single_settings import make_loader

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
SLOW = pytest.mark.slow
ORDER = {"seq_len": 900, "global_batch_size": 2, "steps": 12, "lanes": 2, "pool_size": 16}


@pytest.fixture(scope="module")
def sight(tmp_path_factory):
    return saved("qwen2_vl", tmp_path_factory.mktemp("sight"))[2]


@pytest.fixture(scope="module")
def hearing(tmp_path_factory):
    return saved("qwen2_audio", tmp_path_factory.mktemp("hearing"), chunk_length=2)[2]


def recipe_of(processor, **more):
    media = MediaRecipe(processor=str(processor), **more.pop("media", {}))
    return Recipe(
        inputs=("x",),
        tokenizer=str(processor),
        dedup=DedupRecipe(mode="none"),
        **{"val_fraction": 0.2, **more},
        reading=ReadRecipe(media=media),
    )


def jpeg(number):
    size = (20 + 31 * number % 190, 25 + 17 * number % 150)
    return encoded(picture(*size, seed=number), quality=90)


def talks(folder, count=60):
    """Conversations that name images, some of them none."""
    (folder / "pictures").mkdir(parents=True)
    rows = []
    for number in range(count):
        names = [f"pictures/{number}_{k}.jpg" for k in range(number % 3)]
        for name in names:
            (folder / name).write_bytes(jpeg(number))
        question = f"{'<image>' * len(names)} Who is number {number}?"
        rows.append({"messages": talk(question, f"It is cat {number}."), "images": names})
    return write_lines(folder / "talks.jsonl", rows)


def held(folder, count=40):
    """The same in Parquet, which holds their bytes."""
    rows = [
        {
            "messages": talk(f"<image> Who is number {number}?", f"It is cat {number}."),
            "images": [{"bytes": jpeg(number % 7), "path": None}],
        }
        for number in range(count)
    ]
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet", row_group_size=9)
    return folder / "rows.parquet"


def captions(folder, count=20):
    """Images and texts beside them."""
    folder.mkdir()
    for number in range(count):
        (folder / f"{number}.jpg").write_bytes(jpeg(number))
        (folder / f"{number}.txt").write_text(f"This is cat {number}. " * 20)
    return folder


def tars(folder):
    """WebDataset shards."""
    folder.mkdir()
    for shard in range(3):
        packed(folder / f"{shard}.tar", pairs(9, 9 * shard))
    return folder


def sounds(folder, count=24):
    (folder / "sounds").mkdir(parents=True)
    rows = []
    for number in range(count):
        name = f"sounds/{number}.wav"
        data = sound(4_000 + 301 * number, (16_000, 44_100)[number % 2], seed=number)
        (folder / name).write_bytes(data)
        rows.append({"messages": talk("<audio>What is it?", f"It is {number}."), "audios": [name]})
    return write_lines(folder / "talks.jsonl", rows)


def films(folder, count=24):
    (folder / "films").mkdir(parents=True)
    rows = []
    for number in range(count):
        name = f"films/{number}.mp4"
        (folder / name).write_bytes(film(25 * (1 + number % 2)))
        question = "<video>What is it?"
        rows.append({"messages": talk(question, f"It is film {number}."), "videos": [name]})
    return write_lines(folder / "talks.jsonl", rows)


INPUTS = {"talks": talks, "held": held, "captions": captions, "tars": tars, "sounds": sounds}


def batches_of(data, rank=0, world_size=1, state=None, **settings):
    settings = {"output": "numpy", "prefetch": 0, **settings}
    loader = Loader(data, rank=rank, world_size=world_size, **settings)
    if state is not None:
        loader.load_state_dict(state)
    return {batch.step: dict(batch) for batch in loader}


def assert_equal(some, others):
    assert sorted(some) == sorted(others)
    for step, batch in some.items():
        assert sorted(batch) == sorted(others[step])
        for name, value in batch.items():
            np.testing.assert_array_equal(value, others[step][name], f"{step} {name}")


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
def test_a_stream_gives_the_batches_of_the_store_that_it_keeps(tmp_path, monkeypatch, sight, hearing, kind, embed):
    if kind == "films":
        pytest.importorskip("av")
    inputs = {**INPUTS, "films": films}[kind](tmp_path / "in")
    more = {"media": {"keep": "embed"}} if embed else {}
    recipe = recipe_of(hearing if kind == "sounds" else sight, **more)
    stream = small_stream(inputs, recipe=recipe, keep=tmp_path / "kept", **ORDER)
    given, aside, forget = {}, [], PoolMedia.forget
    monkeypatch.setattr(PoolMedia, "forget", lambda pool: aside.extend(pool.spill_files) or forget(pool))
    for batch in Loader(stream, rank=0, world_size=1, output="numpy", prefetch=0):
        given[batch.step] = dict(batch)
    seen = [name for batch in given.values() for name in batch if name not in TEXT]
    assert len(seen) > len(given) / 2
    stream.finish(workers=1)
    assert files_of(tmp_path / "kept") == prepared(stream, tmp_path / "prepared")
    order = {**ORDER, "seed": 3, "order": "lanes", "output": "numpy"}
    repeated = make_loader(open_store(tmp_path / "kept"), **order)
    assert_equal(given, {batch.step: dict(batch) for batch in repeated})
    # Bytes are laid aside of media that stand in records, or are to be held.
    assert bool(aside) == (kind == "held" or embed)
    assert not any(path.exists() for path in aside)


TEXT = ("input_ids", "labels", "position_ids")


@pytest.fixture(scope="module")
def repeatable(request, sight, tmp_path_factory):
    """A function that makes a stream anew, and the batches of one."""
    inputs = INPUTS[request.param](tmp_path_factory.mktemp("repeatable") / "in")
    recipe = recipe_of(sight)

    def made(workers=0):
        return small_stream(inputs, recipe=recipe, workers=workers, **ORDER)

    return made, batches_of(made())


RESUMED_IN_FAST_TIER = {("talks", 0)}


@pytest.mark.parametrize(
    ("repeatable", "prefetch"),
    [
        pytest.param(kind, prefetch, marks=[] if (kind, prefetch) == ("held", 2) else [SLOW])
        for kind in ("talks", "held")
        for prefetch in (2, 8)
    ],
    indirect=["repeatable"],
)
def test_workers_change_nothing(repeatable, prefetch):
    made, expected = repeatable
    assert_equal(expected, batches_of(made(workers=2), prefetch=prefetch))


@pytest.mark.parametrize(
    ("repeatable", "step"),
    [
        pytest.param(kind, step, marks=[] if (kind, step) in RESUMED_IN_FAST_TIER else [SLOW])
        for kind in ("talks", "held")
        for step in range(ORDER["steps"])
    ],
    indirect=["repeatable"],
)
def test_a_stream_goes_on_from_any_step(repeatable, step):
    made, expected = repeatable
    loader = Loader(made(), rank=0, world_size=1, output="numpy", prefetch=0)
    iterator = iter(loader)
    for _ in range(step):
        next(iterator)
    state = json.loads(json.dumps(loader.state_dict()))
    iterator.close()
    left = {number: batch for number, batch in expected.items() if number >= step}
    assert_equal(left, batches_of(made(), state=state))


@pytest.mark.parametrize("repeatable", ["talks", pytest.param("held", marks=SLOW)], indirect=True)
def test_ranks_share_the_rows_of_a_step(repeatable):
    """On two ranks each has one row of the two."""
    made, expected = repeatable
    ranks = [batches_of(made(), rank, 2) for rank in range(2)]
    for step, batch in expected.items():
        for name in TEXT:
            rows = [one[step][name] for one in ranks]
            axis = 1 if name == "position_ids" else 0
            np.testing.assert_array_equal(np.concatenate(rows, axis), batch[name])
        for name in set(batch) - set(TEXT):
            both = [one[step][name] for one in ranks if name in one[step]]
            np.testing.assert_array_equal(np.concatenate(both), batch[name])


@pytest.mark.parametrize("repeatable", ["held", pytest.param("talks", marks=SLOW)], indirect=True)
def test_states_of_two_ranks_go_on_as_one(repeatable):
    made, expected = repeatable
    loaders = [Loader(made(), rank=rank, world_size=2, output="numpy") for rank in range(2)]
    states = []
    for loader in loaders:
        iterator = iter(loader)
        for _ in range(5):
            next(iterator)
        states.append(loader.state_dict())
        iterator.close()
    left = {number: batch for number, batch in expected.items() if number >= 5}
    assert_equal(left, batches_of(made(), state=merge_states(states)))


def test_each_epoch_reads_media_again_and_lets_go_of_them(tmp_path, sight):
    order = {**ORDER, "steps": 60, "pool_size": 8, "seq_len": 300}
    stream = small_stream(held(tmp_path / "in"), recipe=recipe_of(sight), **order)
    loader = Loader(stream, rank=0, world_size=1, output="numpy", prefetch=0)
    most = 0
    for _ in loader:
        most = max(most, sum(1 for _ in stream._folder.rglob("*.media")))
    assert 0 < most <= 3 * stream.lanes


def test_varlen_and_split_as_of_a_store(tmp_path, sight):
    stream = small_stream(talks(tmp_path / "in"), recipe=recipe_of(sight), **ORDER)
    rows = batches_of(stream, form="varlen")
    plain = batches_of(stream)
    for step, batch in rows.items():
        for name in set(plain[step]) - set(TEXT):
            np.testing.assert_array_equal(batch[name], plain[step][name])
    loader = Loader(stream, rank=0, world_size=1, output="numpy", prefetch=0)
    for batch in loader:
        parts = batch.split(1)
        grids = [part["image_grid_thw"] for part in parts if "image_grid_thw" in part]
        if grids:
            np.testing.assert_array_equal(np.concatenate(grids), batch["image_grid_thw"])


def test_a_medium_that_changes_meanwhile_is_an_error_with_its_line(tmp_path, sight):
    inputs = talks(tmp_path / "in", 12)
    stream = small_stream(inputs, recipe=recipe_of(sight, val_fraction=0), **ORDER)
    loader = Loader(stream, rank=0, world_size=1, output="numpy", prefetch=0)
    batches = iter(loader)
    next(batches)
    for path in (tmp_path / "in" / "pictures").iterdir():
        os.truncate(path, path.stat().st_size - 1)
    said = (
        r"The document at talks.jsonl, (line|byte) [\d,]+: image pictures/.* has .* bytes, but had .*batchloom prepare"
    )
    with pytest.raises(MediumError, match=said):
        list(batches)


def test_bad_media_are_left_out_and_counted(tmp_path, sight, caplog):
    inputs = talks(tmp_path / "in", 30)
    (tmp_path / "in" / "pictures" / "4_0.jpg").write_bytes(b"")
    recipe = recipe_of(sight, max_bad=1, val_fraction=0)
    given = batches_of(small_stream(inputs, recipe=recipe, **ORDER))
    assert len(given) == ORDER["steps"]
    assert "4_0.jpg" in caplog.text
    (tmp_path / "in" / "pictures" / "5_0.jpg").write_text("<svg/>")
    with pytest.raises(TooManyBadRecordsError, match="of this rank's lanes are bad"):
        batches_of(small_stream(inputs, recipe=recipe, **ORDER))


def test_the_door_takes_settings_of_media(tmp_path, sight):
    given = {
        "seq_len": 900,
        "global_batch_size": 2,
        "steps": 4,
        "tokenizer": str(sight),
        "media": {"processor": str(sight)},
        "workers": 0,
    }
    stream = batchloom.stream(talks(tmp_path / "in"), **given)
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
            {"batch": BatchOptions(mesh=Mesh(context=2)), "world_size": 2, "labels": "shifted"},
            "context-parallel",
        ),
        ({}, {"media": MediaOptions(replace="gone.json")}, "this is a stream"),
    ],
)
def test_what_would_cut_or_change_documents_is_refused(tmp_path, sight, order, settings, problem):
    settings = {"rank": 0, "world_size": 1, **settings}
    with pytest.raises(PlanError, match=problem):
        Loader(
            small_stream(talks(tmp_path / "in"), recipe=recipe_of(sight), **{**ORDER, **order}),
            **settings,
        )


def test_a_tokenizer_without_the_tokens_of_media_is_refused_at_once(tmp_path, sight):
    recipe = recipe_of(sight)
    wrong = Recipe(inputs=("x",), tokenizer="bytes", dedup=recipe.dedup, reading=recipe.reading)
    with pytest.raises(TokenizerError, match="has no control token"):
        small_stream(talks(tmp_path / "in"), recipe=wrong, **ORDER)


def test_a_processor_that_is_none_is_refused_at_once(tmp_path):
    with pytest.raises((InputError, SettingsError), match="processor"):
        batchloom.stream(
            talks(tmp_path / "in"),
            seq_len=90,
            global_batch_size=2,
            steps=4,
            tokenizer="bytes",
            media={"processor": str(tmp_path)},
        )


def test_a_pool_without_sequences_takes_nothing_from_the_one_before(tmp_path, sight):
    """Both have documents of the same stretch of a file, whose bytes were laid aside together."""
    rows = []
    for number in range(160):
        said = f"It is cat {number}. " * (1 if number < 8 else 200)
        rows.append(
            {
                "messages": talk("<image> Who?", said),
                "images": [{"bytes": jpeg(number % 7), "path": None}],
            }
        )
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), file)
    order = {**ORDER, "lanes": 1, "global_batch_size": 1, "pool_size": 8, "shuffle": False}
    recipe = recipe_of(sight, val_fraction=0)
    stream = small_stream(file, recipe=recipe, unit_bytes=1 << 24, **{**order, "steps": 3})
    given = batches_of(stream)
    assert all("pixel_values" in batch for batch in given.values())


def test_what_is_laid_aside_goes_with_each_iteration(tmp_path, sight):
    stream = small_stream(held(tmp_path / "in"), recipe=recipe_of(sight), **ORDER)
    loader = Loader(stream, rank=0, world_size=1, output="numpy", prefetch=0)
    for _ in range(3):
        batches = iter(loader)
        assert next(batches)
        assert list(stream._folder.rglob("*.media"))
        batches.close()
        assert not list(stream._folder.rglob("*.media"))


def test_texts_with_a_processor_are_cut_as_their_store_cuts_them(tmp_path, sight, caplog):
    file = write_lines(tmp_path / "text.jsonl", [{"text": f"Line {n}. " * 60} for n in range(60)])
    stream = small_stream(file, recipe=recipe_of(sight, val_fraction=0), **{**ORDER, "seq_len": 64})
    assert stream.spec.overlong == "split"
    assert batches_of(stream)
    caplog.clear()
    with_media = small_stream(talks(tmp_path / "in"), recipe=recipe_of(sight), **ORDER)
    iter(batches_of(with_media))
    assert "a larger seq_len keeps them" in caplog.text


def test_a_model_is_chosen_documents_of_a_first_step(tmp_path, sight):
    stream = small_stream(held(tmp_path / "in"), recipe=recipe_of(sight), **ORDER)
    loader = Loader(stream, rank=0, world_size=1)
    chosen = DocumentRows(loader)
    (number,) = chosen.with_media(900)
    batch = chosen.batch([[number], [number]])
    assert len(batch["image_grid_thw"]) == 2
    assert batch["input_ids"].shape == (2, int(chosen.batch([[number]])["input_ids"].numel()))
    texts = write_lines(
        tmp_path / "texts.jsonl",
        [{"messages": talk(f"Who is {n}?", "A cat."), "images": []} for n in range(99)],
    )
    blind = DocumentRows(Loader(small_stream(texts, recipe=recipe_of(sight), **ORDER), rank=0, world_size=1))
    assert blind.with_media(900) == []
    assert "pixel_values" in blind.describe_media_mismatch(TextAlone(), 900)


class TextAlone:
    """A model's face, as far as it is asked."""

    config = None

    def forward(self, input_ids, position_ids):
        """Takes text."""


@pytest.mark.parametrize("embed", [False, True])
def test_media_that_are_gone_in_a_later_epoch_are_counted_then(tmp_path, sight, embed):
    inputs = talks(tmp_path / "in", 12)
    media = {"keep": "embed"} if embed else {}
    recipe = recipe_of(sight, max_bad=0, val_fraction=0, media=media)
    order = {**ORDER, "lanes": 1, "global_batch_size": 1, "steps": 60}
    loader = Loader(small_stream(inputs, recipe=recipe, **order), output="numpy", prefetch=0)
    batches = iter(loader)
    for _ in range(6):
        next(batches)
    state = loader.state_dict()
    for path in (tmp_path / "in" / "pictures").iterdir():
        path.unlink()
    with pytest.raises((MediumError, TooManyBadRecordsError)):
        list(batches)
    again = Loader(small_stream(inputs, recipe=recipe, **order), output="numpy", prefetch=0)
    again.load_state_dict(state)
    with pytest.raises((MediumError, TooManyBadRecordsError)):
        list(again)
