"""Missing media: check lists them, and loaders replace their documents."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import batchloom
from batchloom import InputError, PlanError, SettingsError, StateError
from batchloom.adapters.agreement import _describe_rank, find_disagreement
from batchloom.adapters.pytorch import LoaderDataset
from batchloom.batches import DocumentRows, MediaOptions, Meter
from batchloom.batches.media.media_stores import find_missing_documents, read_missing_media
from batchloom.cli import run_command_line
from batchloom.core.errors import MediumError
from batchloom.store import remove_documents
from batchloom.testing import write_store
from media.processors import PROCESSORS, save_processor
from media.sample_media import encode_image, make_image, make_messages, write_images

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
SIZES = {"seq_len": 200, "global_batch_size": 2, "output": "numpy"}
PAIR = "pictures/large.png"


def prepare_store(file, out, processor, **media):
    media = {"processor": processor, **media}
    batchloom.prepare(file, out=out, tokenizer=processor, media=media, val_fraction=0, dedup="none")
    return batchloom.open_store(out)


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    """Store, its input file and processor; two documents share a large picture."""
    folder = tmp_path_factory.mktemp("made")
    processor = str(save_processor(PROCESSORS["qwen2_vl"](), folder / "processor"))
    file = write_images(folder / "in", 8)
    (file.parent / PAIR).write_bytes(encode_image(make_image(290, 260, seed=5), "PNG"))
    rows = json.loads(file.read_text())
    rows += [
        {"messages": make_messages(f"<image>Who is {number}?", "A large one."), "images": [PAIR]}
        for number in ("this", "that")
    ]
    file.write_text(json.dumps(rows))
    return prepare_store(file, folder / "store", processor), file, processor


@pytest.fixture
def store_copy(intact, tmp_path):
    """Copy of the store, and the folder of its pictures, which a test may change."""
    shutil.copytree(intact[0].path, tmp_path / "store")
    folder = tmp_path / "in"
    shutil.copytree(intact[1].parent, folder)
    report = tmp_path / "store" / "report.json"
    report.write_text(report.read_text().replace(str(intact[1].parent), str(folder)))
    return batchloom.open_store(tmp_path / "store"), folder


def documents_of(store, records):
    return sorted(n for n in range(len(store)) if store.provenance.of(n).record in records)


@pytest.fixture
def damaged(store_copy):
    """Store with missing, changed and damaged pictures.

    Gives the store, the list that check wrote, the documents and the verdict of check.
    """
    store, folder = store_copy
    (folder / "pictures" / "3_0.jpg").unlink()
    (folder / "pictures" / "4_1.jpg").write_bytes(encode_image(make_image(9, 9, seed=77)))
    # The edges of the file stay, so that only decoding finds the damage.
    data = bytearray((folder / PAIR).read_bytes())
    assert len(data) > 200_000
    data[100_000:100_400] = bytes(400)
    (folder / PAIR).write_bytes(data)
    list_file = folder.parent / "gone.json"
    verdict = batchloom.check(store.path, missing_media=list_file)
    return store, list_file, documents_of(store, (3, 4, 9, 10)), verdict


def to_numpy(batch):
    return {name: np.asarray(value) for name, value in batch.items()}


def assert_same_batch(actual, expected):
    assert set(actual) == set(expected)
    for name in actual:
        assert np.array_equal(np.asarray(actual[name]), np.asarray(expected[name])), name


def test_check_reads_all_media_and_names_the_missing(damaged):
    store, list_file, missing, verdict = damaged
    assert not verdict.sound
    text = "\n".join(verdict.faults)
    assert len(verdict.faults) == 4
    assert "image pictures/3_0.jpg is missing" in text
    assert "image pictures/4_1.jpg has" in text
    assert text.count(f"image {PAIR} ") == 2, text
    assert f"Document {max(missing[-2:])}, too: Document" in text
    assert verdict.facts["media"] == "17 in 10 documents, 4 of which hold unreadable media"
    assert "replaces 4 documents of it with padding" in verdict.used
    listed = read_missing_media(list_file)
    assert listed.store == str(store.path)
    assert list(listed.subsets["train"].documents) == missing
    assert listed.subsets["train"].fingerprint == store.fingerprint


def test_a_sound_store_has_an_empty_list(intact, tmp_path):
    verdict = batchloom.check(intact[0].path, missing_media=tmp_path / "gone.json")
    assert verdict.sound
    assert verdict.facts["media"].startswith("17 in 10 documents, 0 of which")
    assert read_missing_media(tmp_path / "gone.json").subsets["train"].documents == ()
    plain = batchloom.Loader(intact[0], **SIZES)
    loader = batchloom.Loader(intact[0], **SIZES, media=MediaOptions(replace=str(tmp_path / "gone.json")))
    assert loader.plan.fingerprint == plain.plan.fingerprint


def test_listed_documents_become_padding_and_all_else_stays(damaged, intact, caplog):
    store, list_file, missing, _ = damaged
    with pytest.raises(MediumError, match=r"--missing-media FILE lists .* MediaOptions\(replace=FILE\)"):
        list(batchloom.Loader(store, **SIZES))
    intact_loader = batchloom.Loader(intact[0], **SIZES)
    loader = batchloom.Loader(store, **SIZES, media=MediaOptions(replace=str(list_file)))
    assert loader.feed.replaced == {"data": tuple(missing)}
    meter, served, padded = Meter(loader), 0, 0
    for before, after in zip(intact_loader, meter.over(loader), strict=True):
        rows = intact_loader.plan.rows(*intact_loader.plan.positions_of(before.step))
        hidden = np.zeros(before["input_ids"].shape, bool)
        owners = np.repeat(np.arange(len(rows)), np.diff(rows.pointers))
        for span, document in enumerate(rows.documents.tolist()):
            offset, row = int(rows.row_offsets[span]), int(owners[span])
            if document in missing:
                hidden[row, offset : offset + int(rows.lengths[span])] = True
                padded += 1
        assert np.array_equal(before["input_ids"][~hidden], after["input_ids"][~hidden])
        assert (after["input_ids"][hidden] == store.end_id).all()
        assert (after["labels"][hidden] == -100).all()
        assert np.array_equal(before["labels"][~hidden], after["labels"][~hidden])
        pad = store.tokenizer.control["<|image_pad|>"]
        patches = after["image_grid_thw"].prod(axis=1).sum() if "image_grid_thw" in after else 0
        assert (after["input_ids"] == pad).sum() == patches // 4
        served += int((after["labels"] != -100).sum())
    assert padded == 4
    assert served == sum(loader.trained_tokens(step) for step in range(len(loader)))
    assert meter.metrics()["data/banned"] == 4
    assert "4 of 11 documents of" in caplog.text
    spans = [s for step in range(len(loader)) for q in batchloom.explain(loader, step) for s in q.spans]
    assert sorted(span.document for span in spans if span.banned) == missing


def test_ranks_serve_the_same_and_count_alike(damaged):
    store, list_file, _, _ = damaged
    media = MediaOptions(replace=str(list_file))
    ranks = [batchloom.Loader(store, **SIZES, rank=rank, world_size=2, media=media) for rank in (0, 1)]
    single = batchloom.Loader(store, **SIZES, media=media)
    for step in range(len(single)):
        parts = [loader[step] for loader in ranks]
        assert sum(int((part["labels"] != -100).sum()) for part in parts) == single.trained_tokens(step)
        assert [loader.trained_tokens(step) for loader in ranks] == [single.trained_tokens(step)] * 2
        assert np.array_equal(np.concatenate([part["input_ids"] for part in parts]), single[step]["input_ids"])
    assert find_disagreement([_describe_rank(loader) for loader in ranks]) is None
    unlisted = batchloom.Loader(store, **SIZES, rank=1, world_size=2)
    assert "edits is" in find_disagreement([_describe_rank(ranks[0]), _describe_rank(unlisted)])


def test_a_run_resumes_with_a_list_and_its_state_keeps_it(damaged, intact):
    store, list_file, missing, _ = damaged
    media = MediaOptions(replace=str(list_file))
    settings = {**SIZES, "epochs": 2}
    first_batches = iter(batchloom.Loader(intact[0], **settings, prefetch=0))
    intact_loader = batchloom.Loader(intact[0], **settings, prefetch=0)
    steps = iter(intact_loader)
    next(steps), next(first_batches)
    state = intact_loader.state_dict()
    loader = batchloom.Loader(store, **settings, media=media)
    loader.load_state_dict(state)
    assert [edit["step"] for edit in loader.plan.journal] == [1]
    batches = [to_numpy(batch) for batch in loader]
    fresh = batchloom.Loader(store, **settings, media=media)
    assert [edit["step"] for edit in fresh.plan.journal] == [0]
    for actual, expected in zip(batches, list(fresh)[1:], strict=True):
        assert_same_batch(actual, to_numpy(expected))
    # The state holds the list: a run resumes without the file, with it, and with a longer one.
    later_state = loader.state_at(2)
    without_list = batchloom.Loader(store, **settings)
    without_list.load_state_dict(later_state)
    with_list = batchloom.Loader(store, **settings, media=media)
    with_list.load_state_dict(later_state)
    assert with_list.plan.journal == without_list.plan.journal == loader.plan.journal
    assert_same_batch(to_numpy(next(iter(without_list))), batches[1])
    longer_list = json.loads(list_file.read_text())
    extra = next(n for n in range(len(store)) if n not in missing)
    longer_list["subsets"]["train"]["documents"].append(extra)
    longer_file = list_file.with_name("more.json")
    longer_file.write_text(json.dumps(longer_list))
    grown = batchloom.Loader(store, **settings, media=MediaOptions(replace=(str(list_file), str(longer_file))))
    grown.load_state_dict(later_state)
    assert [(e["step"], e["ban"]["data"]) for e in grown.plan.journal] == [(1, missing), (2, [extra])]
    # A plan with other edits resumes from its own state only.
    fresh.edit(batchloom.Edit(step=fresh.first_editable_step, ban={"data": [extra]}))
    with pytest.raises(StateError, match="journal"):
        fresh.load_state_dict(later_state)


def test_a_window_of_alike_lengths_is_not_cut(damaged, intact):
    store, list_file, _, _ = damaged
    settings = {**SIZES, "global_batch_size": 1, "packing": "none", "group_by_length": 4}
    intact_loader = batchloom.Loader(intact[0], **settings, overlong="drop")
    state = intact_loader.state_at(6)
    loader = batchloom.Loader(store, **settings, overlong="drop", media=MediaOptions(replace=str(list_file)))
    loader.load_state_dict(state)
    assert [edit["step"] for edit in loader.plan.journal] == [4]
    steps = [batch.step for batch in loader]
    assert steps == list(range(6, len(intact_loader)))


def test_workers_of_a_dataloader_need_no_list(damaged):
    store, list_file, _, _ = damaged
    loader = batchloom.Loader(store, **{**SIZES, "output": "torch"}, media=MediaOptions(replace=str(list_file)))
    expected = [to_numpy(batch) for batch in loader]
    dataset = LoaderDataset(loader)
    list_file.unlink()
    dataloader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=1)
    for loader_arrays, batch in zip(expected, dataloader, strict=True):
        assert_same_batch(loader_arrays, to_numpy(batch))


def test_a_list_applies_to_its_store_in_a_mixture(damaged, intact, tmp_path):
    store, list_file, missing, _ = damaged
    text = write_store(tmp_path / "text", [[1, 2, 3]] * 9, tokenizer=str(store.path))
    stores = {"a": store, "b": text}
    assert find_missing_documents(stores, [str(list_file)]) == {"a": tuple(missing)}
    mixture = batchloom.Mixture({"a": 1, "b": 1}, stores=stores)
    media = MediaOptions(replace=[str(list_file)])
    loader = batchloom.Loader(mixture, **SIZES, overlong="drop", steps=8, media=media)
    assert len(list(loader)) == 8
    with pytest.raises(InputError, match=f"names documents of {store.path}, but of no store"):
        batchloom.Loader(text, seq_len=8, global_batch_size=2, media=media)


def test_removed_documents_are_not_checked(damaged, tmp_path):
    store, _, missing, _ = damaged
    numbers = tmp_path / "numbers"
    numbers.write_text("".join(f"train:{number}\n" for number in missing))
    remove_documents(store.path, documents_file=numbers)
    assert batchloom.check(store.path).sound
    older = batchloom.check(store.path, generation=1, missing_media=tmp_path / "older.json")
    assert "4 of which" in older.facts["media"]
    assert read_missing_media(tmp_path / "older.json").subsets["train"].fingerprint == store.fingerprint


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not a list of documents with missing images or audio"),
        ("[1]", "is not a list of documents"),
        ('{"version": 2, "store": "x", "subsets": {}}', "has version 2"),
        (None, "cannot be read"),
    ],
)
def test_invalid_lists_are_refused(intact, tmp_path, content, message):
    file = tmp_path / "gone.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InputError, match=message):
        batchloom.Loader(intact[0], **SIZES, media=MediaOptions(replace=str(file)))


def test_a_list_names_existing_documents_of_stores(damaged, intact):
    store, list_file, _, _ = damaged
    content = json.loads(list_file.read_text())
    content["subsets"]["train"]["documents"] = [99]
    list_file.write_text(json.dumps(content))
    media = MediaOptions(replace=str(list_file))
    with pytest.raises(SettingsError, match="document 99 does not exist"):
        batchloom.Loader(store, **SIZES, media=media)
    text = intact[1].with_name("text.jsonl")
    text.write_text('{"text": "some text"}\n' * 9)
    stream = batchloom.stream(str(text), tokenizer="bytes", seq_len=32, global_batch_size=1, steps=2)
    with pytest.raises(PlanError, match="this is a stream"):
        batchloom.Loader(stream, media=media)
    with pytest.raises(SettingsError, match="replace: 5 is not the path of a list"):
        MediaOptions(replace=5)
    with pytest.raises(SettingsError, match="replace: '' is not the path"):
        MediaOptions(replace=("a", ""))


def test_the_command_lists_missing_media(damaged, tmp_path, capsys):
    store, list_file, _, _ = damaged
    command_list = tmp_path / "said.json"
    assert run_command_line(["check", str(store.path), "--missing-media", str(command_list), "--json"]) == 1
    assert "4 of which" in json.loads(capsys.readouterr().out)["facts"]["media"]
    assert command_list.read_bytes() == list_file.read_bytes()
    assert run_command_line(["check", str(store.path), "--no-media"]) == 0
    assert "media:" not in capsys.readouterr().out


def test_stores_without_a_list_are_refused(intact, tmp_path):
    write_store(tmp_path / "text", [[1, 2, 3]] * 9)
    with pytest.raises(SettingsError, match="is not a store that was made with a processor"):
        batchloom.check(tmp_path / "text", missing_media=tmp_path / "gone.json")
    with pytest.raises(SettingsError, match="found only with media=True"):
        batchloom.check(intact[0].path, media=False, missing_media=tmp_path / "gone.json")
    shutil.copytree(intact[0].path, tmp_path / "store")
    path = tmp_path / "store" / "train" / "shard_00000.media"
    path.write_bytes(path.read_bytes()[:-1])
    verdict = batchloom.check(tmp_path / "store", missing_media=tmp_path / "gone.json")
    assert not verdict.sound
    assert "shard_00000.media" in " ".join(verdict.faults)
    assert not Path(tmp_path / "gone.json").exists()


def test_a_model_is_not_tried_on_documents_with_missing_media(damaged):
    store, list_file, missing, _ = damaged
    chosen = DocumentRows(batchloom.Loader(store, **SIZES, media=MediaOptions(replace=str(list_file))))
    numbers = [*chosen.with_media(SIZES["seq_len"]), *chosen.few(SIZES["seq_len"])]
    assert not set(numbers) & set(missing)
    assert chosen.batch([[number] for number in numbers])
