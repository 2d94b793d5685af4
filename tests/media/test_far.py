"""Stores with media elsewhere: read where they lie, fetched by what a step needs, checked, and written there."""

import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

import batchloom
from batchloom import StoreError
from batchloom.batches import MediaOptions, PlanOptions
from batchloom.core.errors import DownloadError
from batchloom.preparation.remote_output import _STORE_FILE
from batchloom.remote import (
    range_requests as ranges,
    s3_upload as far_s3,
    upload_retry as far_asking,
)
from batchloom.store import (
    MediaRows,
    StoreMedia,
    encode_manifest,
    map_media,
    read_manifest,
    read_missing_media,
    write_file,
)
from media.made import encoded, picture, talk
from media.processors import MADE, save
from preparation.s3_relay import Fault
from preparation.test_far import assert_same, keys
from sources.web import Web, serving
from store.far import behind_relay, kept, retry_at_once, same_batches, to_bucket, to_memory

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
SIZES = {"seq_len": 400, "global_batch_size": 2, "output": "numpy", "rank": 0, "world_size": 1}
URL = "s3://bucket/seen"
BLOBS = "seen/train/shard_00000.blobs"


def prepared(file, out, processor, **settings):
    keep = settings.pop("keep", "embed")
    return batchloom.prepare(
        file,
        out=out,
        tokenizer=processor,
        media={"processor": processor, "keep": keep},
        val_fraction=0,
        dedup="none",
        **settings,
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A store that holds its images, of two shards, the file that it was made of, and its processor."""
    folder = tmp_path_factory.mktemp("made")
    processor = str(save(MADE["qwen2_vl"](max_pixels=28 * 28 * 16), folder / "processor"))
    (folder / "in").mkdir()
    rows = []
    for number in range(12):
        name = f"{number}.png"
        size = (140 + 10 * number, 180 - 5 * number)
        (folder / "in" / name).write_bytes(encoded(picture(*size, seed=number), "PNG"))
        rows.append({"messages": talk(f"<image>Who is {number}?", "A cat."), "images": [name]})
    rows.append({"messages": talk("Who is nobody?", "Nobody is here.")})
    file = folder / "in" / "talks.json"
    file.write_text(json.dumps(rows))
    prepared(file, folder / "store", processor, tokens_per_shard=400)
    store = batchloom.open_store(folder / "store")
    assert len(store.shards) > 1
    return store, file, processor


@pytest.fixture
def relay(s3, made):
    to_bucket(s3, made[0].path, "seen")
    with behind_relay(s3) as found:
        yield found


@pytest.fixture
def impatient(monkeypatch):
    retry_at_once(monkeypatch)
    monkeypatch.setattr(far_asking, "compute_jittered_backoff", lambda tries, name: 0)
    monkeypatch.setattr(far_s3, "compute_jittered_backoff", lambda tries, name: 0)


def held_bytes(store):
    entry = store.manifest.subsets["train"]
    return sum(shard.blobs_bytes for shard in entry.shards)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"prefetch": 0}, marks=pytest.mark.slow),
        {"plan": PlanOptions(block=4), "form": "varlen"},
    ],
)
def test_a_loader_gives_the_same_batches(made, relay, tmp_path, settings):
    near = made[0]
    store = batchloom.open_store(URL, cache=tmp_path / "cache")
    loader = batchloom.Loader(store, **SIZES, **settings)
    assert same_batches(batchloom.Loader(near, **SIZES, **settings), loader) == len(loader)
    assert held_bytes(near) <= store.reader.fetched_bytes < 1.1 * held_bytes(near) + 200_000
    assert sum(path.stat().st_size for path in kept(tmp_path / "cache")) > held_bytes(near)
    again = batchloom.open_store(URL, cache=tmp_path / "cache")
    assert same_batches(loader, batchloom.Loader(again, **SIZES, **settings)) == len(loader)
    assert again.reader.fetched_bytes == 0


def test_a_step_takes_the_media_that_it_needs(made, relay, tmp_path):
    near = made[0]
    store = batchloom.open_store(URL, cache=tmp_path / "cache")
    loader = batchloom.Loader(store, seq_len=150, global_batch_size=1, output="numpy")
    loader[0]
    rows = loader.plan.rows(0, 1)
    needed = sum(medium.size for media in StoreMedia(near).of(rows.documents) for medium in media)
    assert needed <= store.reader.fetched_bytes < needed + held_bytes(near) / 3
    # Ahead of need: what a step holds is here before its media are asked for.
    store.reader.fetch(np.unique(rows.documents))
    fetched = store.reader.fetched_bytes
    loader[0]
    assert store.reader.fetched_bytes == fetched


def test_media_of_coming_steps_are_fetched_meanwhile(made, relay, tmp_path):
    store = batchloom.open_store(URL, cache=tmp_path / "cache")
    loader = batchloom.Loader(
        store,
        seq_len=80,
        global_batch_size=1,
        output="numpy",
        prefetch=1,
        plan=PlanOptions(block=1),
    )
    assert len(loader) > 6
    steps = iter(loader)
    next(steps)
    # A batch is made ahead, and the media of all others come by the thread that fetches.
    waited = 0
    while store.reader.fetched_bytes < held_bytes(made[0]) and waited < 1000:
        time.sleep(0.03)
        waited += 1
    assert store.reader.fetched_bytes >= held_bytes(made[0])
    steps.close()


def test_a_store_on_the_web_is_read(made, tmp_path):
    web = Web()
    web.files = {
        f"/near/{path.relative_to(made[0].path)}": path.read_bytes()
        for path in made[0].path.rglob("*")
        if path.is_file()
    }
    with serving(web=web):
        store = batchloom.open_store(f"{web.url}/near", cache=tmp_path / "cache")
        near = batchloom.Loader(made[0], **SIZES)
        assert same_batches(near, batchloom.Loader(store, **SIZES)) == len(near)


@pytest.mark.parametrize(("name", "value"), [("size", 1 << 40), ("blob", (1 << 63) + 5)])
def test_media_that_lie_nowhere_are_told(made, tmp_path, name, value):
    shutil.copytree(made[0].path, tmp_path / "store")
    path = tmp_path / "store" / "train" / "shard_00000.media"
    rows, places = (
        map_media(path, 1 << 20).rows.copy(),
        bytes(map_media(path, 1 << 20).location_bytes),
    )
    rows[name][0] = value
    manifest = read_manifest(tmp_path / "store")
    subset = manifest.subsets["train"]
    first = replace(subset.shards[0], media=write_file(path, MediaRows(rows, places).to_bytes()))
    changed = replace(subset, shards=(first, *subset.shards[1:]))
    hostile = encode_manifest(replace(manifest, subsets={"train": changed}, checksum=""))
    (tmp_path / "store" / "dataset_metadata.json").write_bytes(hostile)
    url = to_memory(tmp_path / "store", tmp_path.name)
    far = batchloom.open_store(url, cache=tmp_path / "cache")
    for store in (far, batchloom.open_store(tmp_path / "store")):
        with pytest.raises(StoreError, match="Document .*does not hold the bytes of its"):
            list(batchloom.Loader(store, **SIZES))


def test_a_small_cache_is_kept_to(made, relay, tmp_path, caplog):
    store = batchloom.open_store(URL, cache=tmp_path / "cache", cache_limit=600_000)
    assert held_bytes(made[0]) > 600_000
    loader = batchloom.Loader(store, **SIZES, epochs=2)
    assert same_batches(batchloom.Loader(made[0], **SIZES, epochs=2), loader) == len(loader)
    assert sum(path.stat().st_size for path in kept(tmp_path / "cache")) <= 600_000
    assert "The next steps are not fetched ahead: a step of this rank has" in caplog.text
    assert store.reader.fetched_bytes > held_bytes(made[0])


@pytest.mark.parametrize(
    "faults",
    [
        [Fault("answer", "GET", ".blobs", times=5), Fault("answer", "GET", ".media", status=500)],
        [Fault("answer", "GET", "processor_state", times=2)],
        [Fault("cut answer", "GET", ".blobs", times=3), Fault("cut answer", "GET", ".media")],
        [
            Fault("half answer", "GET", ".blobs", times=3),
            Fault("half answer", "GET", ".blobsums", times=2),
        ],
        [
            Fault("flip answer", "GET", ".blobs", times=2, spare=2),
            Fault("flip answer", "GET", ".media"),
        ],
    ],
    ids=["503", "state", "cut", "half", "flipped"],
)
def test_what_passes_is_asked_again(made, relay, tmp_path, impatient, faults):
    relay.faults = list(faults)
    store = batchloom.open_store(URL, cache=tmp_path)
    assert same_batches(batchloom.Loader(made[0], **SIZES), batchloom.Loader(store, **SIZES))
    assert all(not fault.times for fault in relay.faults)


@pytest.mark.parametrize("prefetch", [pytest.param(0, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("gone", f"Document .* cannot be read: s3://bucket/{BLOBS} is missing"),
        ("changed", f"Document .* cannot be read: s3://bucket/{BLOBS}: bytes .* do not match"),
        ("cut", f"Document .* cannot be read: s3://bucket/{BLOBS} does not match the manifest"),
    ],
)
def test_held_media_that_are_lost_there_are_told(s3, made, relay, tmp_path, impatient, prefetch, what, words):
    data = (made[0].path / "train" / "shard_00000.blobs").read_bytes()
    if what == "gone":
        s3.delete_object(Bucket="bucket", Key=BLOBS)
    elif what == "changed":
        s3.put_object(Bucket="bucket", Key=BLOBS, Body=bytes(byte ^ 1 for byte in data))
    else:
        s3.put_object(Bucket="bucket", Key=BLOBS, Body=data[:100])
    store = batchloom.open_store(URL, cache=tmp_path)
    with pytest.raises(StoreError, match=words):
        list(batchloom.Loader(store, **SIZES, prefetch=prefetch))


@pytest.mark.parametrize("name", ["train/shard_00000.media", "processor_state.json"])
def test_what_says_which_media_there_are_is_checked(s3, made, relay, tmp_path, impatient, name):
    data = (made[0].path / name).read_bytes()
    for body in (data[:-1] + bytes([data[-1] ^ 1]), data[:40], None):
        if body is None:
            s3.delete_object(Bucket="bucket", Key=f"seen/{name}")
        else:
            s3.put_object(Bucket="bucket", Key=f"seen/{name}", Body=body)
        store = batchloom.open_store(URL, cache=tmp_path / str(len(body or b"")))
        with pytest.raises(StoreError, match=f"seen/{name}"):
            list(batchloom.Loader(store, **SIZES))


def test_a_server_that_is_gone_is_no_lost_medium(made, relay, tmp_path, impatient, monkeypatch):
    monkeypatch.setattr(ranges, "_MAX_ATTEMPTS", 2)
    store = batchloom.open_store(URL, cache=tmp_path)
    relay.faults = [Fault("answer", "GET", ".blobs", times=10_000)]
    with pytest.raises(DownloadError):
        list(batchloom.Loader(store, **SIZES))
    with pytest.raises(DownloadError):
        batchloom.check(URL)


def test_questions_are_answered_from_there(made, relay, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store = batchloom.open_store(URL)
    ours, theirs = batchloom.inspect(URL), batchloom.inspect(made[0].path)
    assert ours.media == theirs.media
    assert ours.media["image"].media == 12
    told, expected = (
        [span.media for sequence in batchloom.explain(batchloom.Loader(one, **SIZES), 0) for span in sequence.spans]
        for one in (store, made[0])
    )
    assert told == expected
    assert any(told)
    (found,) = batchloom.doctor(URL).prepared
    assert (found.path, found.kind, found.faults) == (URL, "store", ())
    assert found.inspection.media == theirs.media
    assert found.preview


def test_check_reads_media_there_and_lists_the_lost(s3, made, relay, tmp_path, impatient):
    sound = batchloom.check(URL)
    assert sound.sound, sound.faults
    assert sound.facts["media"].startswith("12 in 12 documents, 0 of which")
    data = bytearray((made[0].path / "train" / "shard_00000.blobs").read_bytes())
    near = StoreMedia(made[0])
    ((medium,),) = near.of(np.array([1]))
    data[medium.blob[1] + medium.size // 2] ^= 1
    s3.put_object(Bucket="bucket", Key=BLOBS, Body=bytes(data))
    listed = tmp_path / "gone.json"
    verdict = batchloom.check(URL, missing_media=listed)
    assert any("shard_00000.blobs: checksum differs" in fault for fault in verdict.faults)
    gone = read_missing_media(listed)
    assert gone.store == URL
    # Neighbours share a block of 4 KiB with it at most.
    assert 1 in gone.subsets["train"].documents
    assert set(gone.subsets["train"].documents) <= {0, 1, 2}
    store = batchloom.open_store(URL, cache=tmp_path / "cache")
    media = MediaOptions(replace=str(listed))
    for prefetch in (0, 4):
        ours = batchloom.Loader(store, **SIZES, media=media, prefetch=prefetch)
        # The list is of what the store holds, wherever that lies.
        theirs = batchloom.Loader(made[0], **SIZES, media=media)
        assert same_batches(theirs, ours) == len(theirs)


def test_media_that_are_named_only_are_found_from_there(s3, made, relay, tmp_path):
    near = prepared(made[1], tmp_path / "named", made[2], keep="reference")
    near = batchloom.open_store(tmp_path / "named")
    store = batchloom.open_store(to_bucket(s3, near.path, "named"), cache=tmp_path / "cache")
    assert same_batches(batchloom.Loader(near, **SIZES), batchloom.Loader(store, **SIZES))
    pictures = to_bucket(s3, made[1].parent, "pictures")
    there = batchloom.Loader(store, **SIZES, media=MediaOptions(folder=pictures))
    assert same_batches(batchloom.Loader(near, **SIZES), there)


def test_a_store_is_made_there_as_here(s3, made, relay, tmp_path, impatient, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    local = prepared(made[1], tmp_path / "here", made[2], tokens_per_shard=400)
    relay.faults = [Fault("answer", "PUT", ".blobs", times=2), Fault("flip", "PUT", ".media")]
    done = prepared(made[1], "s3://bucket/there", made[2], tokens_per_shard=400)
    assert done.counts == local.counts
    assert_same(s3, "there", tmp_path / "here")
    assert {key for key in keys(s3, "there/") if not _STORE_FILE.fullmatch(key[6:])} == set()
    store = batchloom.open_store("s3://bucket/there", cache=tmp_path / "cache")
    assert same_batches(batchloom.Loader(made[0], **SIZES), batchloom.Loader(store, **SIZES))
    again = prepared(made[1], "s3://bucket/there", made[2], tokens_per_shard=400)
    assert again.already_done


def test_what_is_named_by_a_store_made_there_begins_where_it_did(s3, made, relay, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    prepared(made[1], "s3://bucket/named-there", made[2], keep="reference", tokens_per_shard=400)
    store = batchloom.open_store("s3://bucket/named-there", cache=tmp_path / "cache")
    assert not any(key.endswith(".blobs") for key in keys(s3, "named-there/"))
    assert same_batches(batchloom.Loader(made[0], **SIZES), batchloom.Loader(store, **SIZES))


def test_files_beside_media_are_checked(made, tmp_path):
    shutil.copytree(made[0].path, tmp_path / "store")
    path = tmp_path / "store" / "train" / "shard_00000.blobsums"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    faults = batchloom.check(tmp_path / "store").faults
    assert any("shard_00000.blobsums: does not match its file" in fault for fault in faults)
    path.unlink()
    faults = batchloom.check(tmp_path / "store").faults
    assert any("shard_00000.blobsums" in fault for fault in faults)


def test_a_store_whose_manifest_tells_no_sizes_is_refused_elsewhere(made, tmp_path):
    shutil.copytree(made[0].path, tmp_path / "store")
    manifest = read_manifest(tmp_path / "store")
    subset = manifest.subsets["train"]
    bare = {"media_bytes": None, "blobs_bytes": None, "blobsums": None}
    shards = tuple(replace(shard, **bare) for shard in subset.shards)
    older = replace(manifest, subsets={"train": replace(subset, shards=shards)}, checksum="")
    (tmp_path / "store" / "dataset_metadata.json").write_bytes(encode_manifest(older))
    assert list(batchloom.Loader(batchloom.open_store(tmp_path / "store"), **SIZES))
    url = to_memory(tmp_path / "store", tmp_path.name)
    store = batchloom.open_store(url, cache=tmp_path / "cache")
    with pytest.raises(StoreError, match="does not record the size of the media files of shard_00000"):
        list(batchloom.Loader(store, **SIZES))
    assert Path(tmp_path / "cache").is_dir()


def test_the_manifest_is_what_its_schema_says(made, tmp_path):
    import jsonschema

    schema = json.loads((Path(__file__).parents[2] / "docs" / "manifest.schema.json").read_text())
    data = (made[0].path / "dataset_metadata.json").read_bytes()
    manifest = json.loads(data)
    jsonschema.validate(manifest, schema)
    shutil.copytree(made[0].path, tmp_path / "store")
    for name in ("media_bytes", "blobs_bytes"):
        manifest = json.loads(data)
        del manifest["checksum"]
        manifest["subsets"]["train"]["shards"][0][name] = -1
        (tmp_path / "store" / "dataset_metadata.json").write_text(json.dumps(manifest))
        with pytest.raises(StoreError, match=f"Expected `int` >= 0 .*{name}"):
            batchloom.open_store(tmp_path / "store")
