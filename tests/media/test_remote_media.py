"""Remote stores with media: reading, fetching ahead, checks and writing."""

import contextlib
import json
import shutil
from pathlib import Path

import fsspec
import numpy as np
import pytest
from msgspec.structs import replace

import batchloom
from batchloom import StoreError
from batchloom.batches import MediaOptions
from batchloom.batches.media import read_missing_media
from batchloom.core.errors import DownloadError
from batchloom.remote import client, remote_file, upload
from batchloom.store import (
    MediaRows,
    StoreMedia,
    encode_manifest,
    map_media,
    read_manifest,
    write_file,
)
from batchloom.store.format import seal_manifest
from media.processors import PROCESSORS, save_processor
from media.sample_media import encode_image, make_image, make_messages
from preparation.s3_relay import Fault
from preparation.test_remote_output import assert_same, read_objects
from sources.web_server import Web, serve
from store.manifest_edits import write_sealed
from store.remote_stores import (
    assert_same_batches,
    copy_to_bucket,
    copy_to_memory,
    list_block_files,
    relay_bucket,
    shorten_retry_delays,
)
from waiting import wait_until

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
SIZES = {"seq_len": 400, "global_batch_size": 2, "output": "numpy", "rank": 0, "world_size": 1}
URL = "s3://bucket/seen"


def prepare_store(file, out, processor, **settings):
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
def local(tmp_path_factory):
    """Store of several shards with embedded images, its input file and processor."""
    folder = tmp_path_factory.mktemp("made")
    processor = str(save_processor(PROCESSORS["qwen2_vl"](max_pixels=28 * 28 * 16), folder / "processor"))
    (folder / "in").mkdir()
    rows = []
    for number in range(12):
        name = f"{number}.png"
        size = (140 + 10 * number, 180 - 5 * number)
        (folder / "in" / name).write_bytes(encode_image(make_image(*size, seed=number), "PNG"))
        rows.append({"messages": make_messages(f"<image>Who is {number}?", "A cat."), "images": [name]})
    rows.append({"messages": make_messages("Who is nobody?", "Nobody is here.")})
    file = folder / "in" / "talks.json"
    file.write_text(json.dumps(rows))
    prepare_store(file, folder / "store", processor, tokens_per_shard=400)
    store = batchloom.open_store(folder / "store")
    assert len(store.shards) > 1
    return store, file, processor


@pytest.fixture
def empty_relay(s3):
    """Relay before an empty bucket."""
    with relay_bucket(s3) as s3_relay:
        yield s3_relay


@pytest.fixture
def relay(s3, empty_relay, local):
    """Relay before a bucket that holds the store at ``URL``."""
    copy_to_bucket(s3, local[0].path, "seen")
    return empty_relay


@pytest.fixture(scope="module")
def remote(local):
    """URL of the store in memory: a request to the S3 server takes 15 ms of processor time."""
    return copy_to_memory(local[0].path, "seen")


@pytest.fixture
def changeable(local, tmp_path):
    """URL of a copy of the store in memory, and its file system and path there."""
    url = copy_to_memory(local[0].path, tmp_path.name)
    return url, fsspec.filesystem("memory"), url.removeprefix("memory:/")


@pytest.fixture
def no_retry_delays(monkeypatch):
    shorten_retry_delays(monkeypatch)
    monkeypatch.setattr(upload, "compute_jittered_backoff", lambda tries, name: 0)


def count_blob_bytes(store):
    entry = store.manifest.subsets["train"]
    return sum(shard.blobs_bytes for shard in entry.shards)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"prefetch": 0}, marks=pytest.mark.slow),
        {"block": 4, "form": "varlen"},
    ],
)
def test_a_loader_gives_the_same_batches(local, remote, tmp_path, settings):
    assert_same_data(local, remote, tmp_path, settings)


@pytest.mark.slow
def test_a_loader_of_a_bucket_gives_the_same_batches(local, relay, tmp_path):
    assert_same_data(local, URL, tmp_path, {})


def assert_same_data(local, url, tmp_path, settings):
    local_store = local[0]
    store = batchloom.open_store(url, cache=tmp_path / "cache")
    loader = batchloom.Loader(store, **SIZES, **settings)
    assert assert_same_batches(batchloom.Loader(local_store, **SIZES, **settings), loader) == len(loader)
    assert count_blob_bytes(local_store) <= store.reader.fetched_bytes < 1.1 * count_blob_bytes(local_store) + 200_000
    assert sum(path.stat().st_size for path in list_block_files(tmp_path / "cache")) > count_blob_bytes(local_store)
    reopened = batchloom.open_store(url, cache=tmp_path / "cache")
    assert assert_same_batches(loader, batchloom.Loader(reopened, **SIZES, **settings)) == len(loader)
    assert reopened.reader.fetched_bytes == 0


def test_a_step_takes_the_media_that_it_needs(local, remote, tmp_path):
    local_store = local[0]
    store = batchloom.open_store(remote, cache=tmp_path / "cache")
    loader = batchloom.Loader(store, seq_len=150, global_batch_size=1, output="numpy")
    loader[0]
    rows = loader.plan.rows(0, 1)
    needed_bytes = sum(medium.size for media in StoreMedia(local_store).of(rows.documents) for medium in media)
    assert needed_bytes <= store.reader.fetched_bytes < needed_bytes + count_blob_bytes(local_store) / 3
    # Fetch the media of a step before it is read.
    store.reader.fetch(np.unique(rows.documents))
    fetched_bytes = store.reader.fetched_bytes
    loader[0]
    assert store.reader.fetched_bytes == fetched_bytes


def test_media_of_coming_steps_are_fetched_ahead(local, remote, tmp_path):
    store = batchloom.open_store(remote, cache=tmp_path / "cache")
    loader = batchloom.Loader(
        store,
        seq_len=80,
        global_batch_size=1,
        output="numpy",
        prefetch=1,
        block=1,
    )
    assert len(loader) > 6
    steps = iter(loader)
    next(steps)
    # One batch is made ahead; the fetch thread gets the media of all others.
    wait_until(lambda: store.reader.fetched_bytes >= count_blob_bytes(local[0]), "media of all steps are fetched")
    steps.close()


def test_a_store_on_the_web_is_read(local, tmp_path):
    web = Web()
    web.files = {
        f"/near/{path.relative_to(local[0].path)}": path.read_bytes()
        for path in local[0].path.rglob("*")
        if path.is_file()
    }
    with serve(web=web):
        store = batchloom.open_store(f"{web.url}/near", cache=tmp_path / "cache")
        local_loader = batchloom.Loader(local[0], **SIZES)
        assert assert_same_batches(local_loader, batchloom.Loader(store, **SIZES)) == len(local_loader)


@pytest.mark.parametrize(("name", "value"), [("size", 1 << 40), ("blob", (1 << 63) + 5)])
def test_media_outside_their_file_are_refused(local, tmp_path, name, value):
    shutil.copytree(local[0].path, tmp_path / "store")
    path = tmp_path / "store" / "train" / "shard_00000.media"
    rows, locations = (
        map_media(path, 1 << 20).rows.copy(),
        bytes(map_media(path, 1 << 20).location_bytes),
    )
    rows[name][0] = value
    manifest = read_manifest(tmp_path / "store")
    subset = manifest.subsets["train"]
    changed_shard = replace(subset.shards[0], media=write_file(path, MediaRows(rows, locations).to_bytes()))
    changed = replace(subset, shards=(changed_shard, *subset.shards[1:]))
    hostile = encode_manifest(seal_manifest(replace(manifest, subsets={"train": changed})))
    (tmp_path / "store" / "dataset_metadata.json").write_bytes(hostile)
    url = copy_to_memory(tmp_path / "store", tmp_path.name)
    remote_store = batchloom.open_store(url, cache=tmp_path / "cache")
    for store in (remote_store, batchloom.open_store(tmp_path / "store")):
        with pytest.raises(StoreError, match="Document .*does not hold the bytes of its"):
            list(batchloom.Loader(store, **SIZES))


def count_cached_bytes(cache):
    sizes = 0
    for path in list_block_files(cache):
        with contextlib.suppress(FileNotFoundError):
            sizes += path.stat().st_size
    return sizes


def test_a_cache_limit_is_observed(local, remote, tmp_path, caplog):
    store = batchloom.open_store(remote, cache=tmp_path / "cache", cache_limit=600_000)
    assert count_blob_bytes(local[0]) > 600_000
    loader = batchloom.Loader(store, **SIZES, epochs=2)
    assert assert_same_batches(batchloom.Loader(local[0], **SIZES, epochs=2), loader) == len(loader)
    # The thread that wrote the last block removes others after it.
    wait_until(lambda: count_cached_bytes(tmp_path / "cache") <= 600_000, "the cache at its limit")
    assert "The next steps are not fetched ahead: a step of this rank has" in caplog.text
    assert store.reader.fetched_bytes > count_blob_bytes(local[0])


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(
            [
                Fault("answer", "GET", ".blobs", times=5),
                Fault("answer", "GET", ".media", status=500),
                Fault("answer", "GET", "processor_state", times=2),
            ],
            marks=pytest.mark.slow,
        ),
        [
            Fault("cut answer", "GET", ".blobs", times=2),
            Fault("cut answer", "GET", ".media"),
            Fault("half answer", "GET", ".blobs", times=2, spare=1),
            Fault("half answer", "GET", ".blobsums"),
            Fault("flip answer", "GET", ".blobs", times=2, spare=2),
            Fault("flip answer", "GET", ".media"),
        ],
    ],
    ids=["answered", "damaged"],
)
def test_passing_faults_are_retried(local, relay, tmp_path, no_retry_delays, faults):
    relay.faults = list(faults)
    store = batchloom.open_store(URL, cache=tmp_path)
    assert assert_same_batches(batchloom.Loader(local[0], **SIZES), batchloom.Loader(store, **SIZES))
    assert all(not fault.times for fault in relay.faults)


@pytest.mark.parametrize("prefetch", [pytest.param(0, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: None, "Document .* cannot be read: {blobs} is missing"),
        (lambda data: bytes(byte ^ 1 for byte in data), "Document .* cannot be read: {blobs}: bytes .* do not match"),
        (lambda data: data[:100], "Document .* cannot be read: {blobs} does not match the manifest"),
    ],
    ids=["gone", "changed", "cut"],
)
def test_missing_or_damaged_remote_media_are_reported(changeable, tmp_path, no_retry_delays, prefetch, damage, message):
    url, fs, path = changeable
    blobs = f"{path}/train/shard_00000.blobs"
    replace_object(fs, blobs, damage(fs.cat_file(blobs)))
    store = batchloom.open_store(url, cache=tmp_path)
    with pytest.raises(StoreError, match=message.format(blobs=f"memory:/{blobs}")):
        list(batchloom.Loader(store, **SIZES, prefetch=prefetch))


def replace_object(fs, path, data):
    """Write data to a path, or delete what is there if data is None."""
    if data is None:
        fs.rm_file(path)
    else:
        fs.pipe_file(path, data)


@pytest.mark.parametrize("name", ["train/shard_00000.media", "processor_state.json"])
def test_remote_media_tables_are_checked(changeable, tmp_path, no_retry_delays, name):
    url, fs, path = changeable
    data = fs.cat_file(f"{path}/{name}")
    for body in (data[:-1] + bytes([data[-1] ^ 1]), data[:40], None):
        replace_object(fs, f"{path}/{name}", body)
        store = batchloom.open_store(url, cache=tmp_path / str(len(body or b"")))
        with pytest.raises(StoreError, match=f"{path}/{name}"):
            list(batchloom.Loader(store, **SIZES))


@pytest.mark.slow
def test_a_failing_server_is_no_missing_medium(local, relay, tmp_path, no_retry_delays, monkeypatch):
    # In each attempt s3fs retries by itself, for two seconds.
    for module in (client, remote_file):
        monkeypatch.setattr(module, "_MAX_ATTEMPTS", 2)
    store = batchloom.open_store(URL, cache=tmp_path)
    relay.faults = [Fault("answer", "GET", ".blobs", times=10_000)]
    with pytest.raises(DownloadError):
        list(batchloom.Loader(store, **SIZES))
    with pytest.raises(DownloadError):
        batchloom.check(URL)
    # Requests of other media are still being repeated.
    relay.faults.clear()


def test_analysis_reads_remote_stores(local, remote, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store = batchloom.open_store(remote)
    remote_inspection, local_inspection = batchloom.inspect(remote), batchloom.inspect(local[0].path)
    assert remote_inspection.media == local_inspection.media
    assert remote_inspection.media["image"].media == 12
    actual, expected = (
        [span.media for sequence in batchloom.explain(batchloom.Loader(source, **SIZES), 0) for span in sequence.spans]
        for source in (store, local[0])
    )
    assert actual == expected
    assert any(actual)
    (prepared_report,) = batchloom.doctor(remote).prepared
    assert (prepared_report.path, prepared_report.kind, prepared_report.faults) == (remote, "store", ())
    assert prepared_report.inspection.media == local_inspection.media
    assert prepared_report.preview


def test_check_reads_remote_media_and_lists_the_missing(local, changeable, tmp_path, no_retry_delays):
    url, fs, path = changeable
    clean = batchloom.check(url)
    assert clean.sound, clean.faults
    assert clean.facts["media"].startswith("12 in 12 documents, 0 of which")
    data = bytearray((local[0].path / "train" / "shard_00000.blobs").read_bytes())
    local_media = StoreMedia(local[0])
    ((medium,),) = local_media.of(np.array([1]))
    data[medium.blob[1] + medium.size // 2] ^= 1
    fs.pipe_file(f"{path}/train/shard_00000.blobs", bytes(data))
    list_file = tmp_path / "gone.json"
    verdict = batchloom.check(url, missing_media=list_file)
    assert any("shard_00000.blobs: checksum differs" in fault for fault in verdict.faults)
    missing = read_missing_media(list_file)
    assert missing.store == url
    # At most the neighbours share a block of 4 KiB with the damaged medium.
    assert 1 in missing.subsets["train"].documents
    assert set(missing.subsets["train"].documents) <= {0, 1, 2}
    store = batchloom.open_store(url, cache=tmp_path / "cache")
    media = MediaOptions(replace=str(list_file))
    for prefetch in (0, 4):
        remote_loader = batchloom.Loader(store, **SIZES, media=media, prefetch=prefetch)
        # The list applies to every copy of the store.
        local_loader = batchloom.Loader(local[0], **SIZES, media=media)
        assert assert_same_batches(local_loader, remote_loader) == len(local_loader)


def test_referenced_media_are_found_from_a_remote_store(local, tmp_path):
    prepare_store(local[1], tmp_path / "named", local[2], keep="reference")
    local_store = batchloom.open_store(tmp_path / "named")
    store = batchloom.open_store(copy_to_memory(local_store.path, f"{tmp_path.name}/named"), cache=tmp_path / "cache")
    assert assert_same_batches(batchloom.Loader(local_store, **SIZES), batchloom.Loader(store, **SIZES))
    pictures = copy_to_memory(local[1].parent, f"{tmp_path.name}/pictures")
    with_remote_folder = batchloom.Loader(store, **SIZES, media=MediaOptions(folder=pictures))
    assert assert_same_batches(batchloom.Loader(local_store, **SIZES), with_remote_folder)


def test_a_remote_store_equals_a_local_one(s3, local, empty_relay, tmp_path, no_retry_delays, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    local_result = prepare_store(local[1], tmp_path / "here", local[2], tokens_per_shard=400)
    empty_relay.faults = [Fault("answer", "PUT", ".blobs", times=2), Fault("flip", "PUT", ".media")]
    result = prepare_store(local[1], "s3://bucket/there", local[2], tokens_per_shard=400)
    assert result.counts == local_result.counts
    assert_same(read_objects(s3, "there"), tmp_path / "here")
    store = batchloom.open_store("s3://bucket/there", cache=tmp_path / "cache")
    assert assert_same_batches(batchloom.Loader(local[0], **SIZES), batchloom.Loader(store, **SIZES))
    repeated = prepare_store(local[1], "s3://bucket/there", local[2], tokens_per_shard=400)
    assert repeated.already_done


def test_a_remote_store_of_references_keeps_their_folders(local, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    url = f"memory://far/{tmp_path.name}"
    prepare_store(local[1], url, local[2], keep="reference", tokens_per_shard=400)
    store = batchloom.open_store(url, cache=tmp_path / "cache")
    assert not any(path.endswith(".blobs") for path in fsspec.filesystem("memory").find(f"/far/{tmp_path.name}"))
    assert assert_same_batches(batchloom.Loader(local[0], **SIZES), batchloom.Loader(store, **SIZES))


def test_checksum_files_of_media_are_checked(local, tmp_path):
    shutil.copytree(local[0].path, tmp_path / "store")
    path = tmp_path / "store" / "train" / "shard_00000.blobsums"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    faults = batchloom.check(tmp_path / "store").faults
    assert any("shard_00000.blobsums: does not match its file" in fault for fault in faults)
    path.unlink()
    faults = batchloom.check(tmp_path / "store").faults
    assert any("shard_00000.blobsums" in fault for fault in faults)


def test_the_manifest_follows_its_schema(local, tmp_path):
    import jsonschema

    schema = json.loads((Path(__file__).parents[2] / "docs/reference/manifest.schema.json").read_text())
    data = (local[0].path / "dataset_metadata.json").read_bytes()
    manifest = json.loads(data)
    jsonschema.validate(manifest, schema)
    shutil.copytree(local[0].path, tmp_path / "store")
    for name in ("media_bytes", "blobs_bytes"):
        manifest = json.loads(data)
        manifest["subsets"]["train"]["shards"][0][name] = -1
        write_sealed(tmp_path / "store" / "dataset_metadata.json", manifest)
        with pytest.raises(StoreError, match=f"Expected `int` >= 0 .*{name}"):
            batchloom.open_store(tmp_path / "store")
