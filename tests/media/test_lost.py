"""Media that are gone: check finds and lists them, and a loader that is given the list serves padding for theirs."""

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
from batchloom.batches import DocumentRows, MediaOptions, Meter, PlanOptions
from batchloom.batches.media.missing_media_edits import find_missing_documents
from batchloom.cli import run_command_line
from batchloom.core.errors import MediumError
from batchloom.store import read_missing_media, remove_documents
from batchloom.testing import write_store
from media.made import encoded, picture, talk, write_images
from media.processors import MADE, save

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
SIZES = {"seq_len": 200, "global_batch_size": 2, "output": "numpy"}
PAIR = "pictures/large.png"


def prepared(file, out, processor, **media):
    media = {"processor": processor, **media}
    batchloom.prepare(file, out=out, tokenizer=processor, media=media, val_fraction=0, dedup="none")
    return batchloom.open_store(out)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A store, the file that it was made of, and its processor; two documents hold one large picture."""
    folder = tmp_path_factory.mktemp("made")
    processor = str(save(MADE["qwen2_vl"](), folder / "processor"))
    file = write_images(folder / "in", 8)
    (file.parent / PAIR).write_bytes(encoded(picture(290, 260, seed=5), "PNG"))
    rows = json.loads(file.read_text())
    rows += [
        {"messages": talk(f"<image>Who is {number}?", "A large one."), "images": [PAIR]} for number in ("this", "that")
    ]
    file.write_text(json.dumps(rows))
    return prepared(file, folder / "store", processor), file, processor


@pytest.fixture
def moved(made, tmp_path):
    """A copy of the store, whose pictures can be changed; gives it and their folder."""
    shutil.copytree(made[0].path, tmp_path / "store")
    folder = tmp_path / "in"
    shutil.copytree(made[1].parent, folder)
    report = tmp_path / "store" / "report.json"
    report.write_text(report.read_text().replace(str(made[1].parent), str(folder)))
    return batchloom.open_store(tmp_path / "store"), folder


def documents_of(store, records):
    return sorted(n for n in range(len(store)) if store.provenance.of(n).record in records)


@pytest.fixture
def lost(moved):
    """A store of which pictures are gone, another one, and damaged inside; its list of them, and who they are."""
    store, folder = moved
    (folder / "pictures" / "3_0.jpg").unlink()
    (folder / "pictures" / "4_1.jpg").write_bytes(encoded(picture(9, 9, seed=77)))
    # Its edges are what they were, so that only decoding tells.
    data = bytearray((folder / PAIR).read_bytes())
    assert len(data) > 200_000
    data[100_000:100_400] = bytes(400)
    (folder / PAIR).write_bytes(data)
    listed = folder.parent / "gone.json"
    verdict = batchloom.check(store.path, missing_media=listed)
    return store, listed, documents_of(store, (3, 4, 9, 10)), verdict


def arrays(batch):
    return {name: np.asarray(value) for name, value in batch.items()}


def same(one, other):
    assert set(one) == set(other)
    for name in one:
        assert np.array_equal(np.asarray(one[name]), np.asarray(other[name])), name


def test_check_reads_all_media_and_names_those_that_are_gone(lost):
    store, listed, gone, verdict = lost
    assert not verdict.sound
    text = "\n".join(verdict.faults)
    assert len(verdict.faults) == 4
    assert "image pictures/3_0.jpg is missing" in text
    assert "image pictures/4_1.jpg has" in text
    assert text.count(f"image {PAIR} ") == 2, text
    assert f"Document {max(gone[-2:])}, too: Document" in text
    assert verdict.facts["media"] == "17 in 10 documents, 4 of which hold unreadable media"
    assert "replaces 4 documents of it with padding" in verdict.used
    found = read_missing_media(listed)
    assert found.store == str(store.path)
    assert list(found.subsets["train"].documents) == gone
    assert found.subsets["train"].fingerprint == store.fingerprint


def test_a_sound_store_has_an_empty_list(made, tmp_path):
    verdict = batchloom.check(made[0].path, missing_media=tmp_path / "gone.json")
    assert verdict.sound
    assert verdict.facts["media"].startswith("17 in 10 documents, 0 of which")
    assert read_missing_media(tmp_path / "gone.json").subsets["train"].documents == ()
    plain = batchloom.Loader(made[0], **SIZES)
    loader = batchloom.Loader(made[0], **SIZES, media=MediaOptions(replace=str(tmp_path / "gone.json")))
    assert loader.plan.fingerprint == plain.plan.fingerprint


def test_documents_that_are_listed_are_padding_and_all_else_stays(lost, made, caplog):
    store, listed, gone, _ = lost
    with pytest.raises(MediumError, match=r"--missing-media FILE lists .* MediaOptions\(replace=FILE\)"):
        list(batchloom.Loader(store, **SIZES))
    whole = batchloom.Loader(made[0], **SIZES)
    loader = batchloom.Loader(store, **SIZES, media=MediaOptions(replace=str(listed)))
    assert loader.replaced == {"data": tuple(gone)}
    meter, served, padded = Meter(loader), 0, 0
    for before, after in zip(whole, meter.over(loader), strict=True):
        rows = whole.plan.rows(*whole.plan.positions_of(before.step))
        hidden = np.zeros(before["input_ids"].shape, bool)
        owners = np.repeat(np.arange(len(rows)), np.diff(rows.pointers))
        for span, document in enumerate(rows.documents.tolist()):
            place, row = int(rows.row_offsets[span]), int(owners[span])
            if document in gone:
                hidden[row, place : place + int(rows.lengths[span])] = True
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
    told = [s for step in range(len(loader)) for q in batchloom.explain(loader, step) for s in q.spans]
    assert sorted(span.document for span in told if span.banned) == gone


def test_ranks_serve_the_same_and_count_alike(lost):
    store, listed, _, _ = lost
    media = MediaOptions(replace=str(listed))
    ranks = [batchloom.Loader(store, **SIZES, rank=rank, world_size=2, media=media) for rank in (0, 1)]
    alone = batchloom.Loader(store, **SIZES, media=media)
    for step in range(len(alone)):
        parts = [loader[step] for loader in ranks]
        assert sum(int((part["labels"] != -100).sum()) for part in parts) == alone.trained_tokens(step)
        assert [loader.trained_tokens(step) for loader in ranks] == [alone.trained_tokens(step)] * 2
        assert np.array_equal(np.concatenate([part["input_ids"] for part in parts]), alone[step]["input_ids"])
    assert find_disagreement([_describe_rank(loader) for loader in ranks]) is None
    other = batchloom.Loader(store, **SIZES, rank=1, world_size=2)
    assert "edits is" in find_disagreement([_describe_rank(ranks[0]), _describe_rank(other)])


def test_a_run_goes_on_with_a_list_and_its_state_keeps_it(lost, made):
    store, listed, gone, _ = lost
    media = MediaOptions(replace=str(listed))
    settings = {**SIZES, "epochs": 2}
    begun = iter(batchloom.Loader(made[0], **settings, prefetch=0))
    before = batchloom.Loader(made[0], **settings, prefetch=0)
    steps = iter(before)
    next(steps), next(begun)
    state = before.state_dict()
    loader = batchloom.Loader(store, **settings, media=media)
    loader.load_state_dict(state)
    assert [edit["step"] for edit in loader.plan.journal] == [1]
    given = [arrays(batch) for batch in loader]
    fresh = batchloom.Loader(store, **settings, media=media)
    assert [edit["step"] for edit in fresh.plan.journal] == [0]
    for one, other in zip(given, list(fresh)[1:], strict=True):
        same(one, arrays(other))
    # Its state holds the list: it goes on without the file, and with it, and with one of more documents.
    later = loader.state_at(2)
    without = batchloom.Loader(store, **settings)
    without.load_state_dict(later)
    again = batchloom.Loader(store, **settings, media=media)
    again.load_state_dict(later)
    assert again.plan.journal == without.plan.journal == loader.plan.journal
    same(arrays(next(iter(without))), given[1])
    more = json.loads(listed.read_text())
    extra = next(n for n in range(len(store)) if n not in gone)
    more["subsets"]["train"]["documents"].append(extra)
    wider = listed.with_name("more.json")
    wider.write_text(json.dumps(more))
    grown = batchloom.Loader(store, **settings, media=MediaOptions(replace=(str(listed), str(wider))))
    grown.load_state_dict(later)
    assert [(e["step"], e["ban"]["data"]) for e in grown.plan.journal] == [(1, gone), (2, [extra])]
    # A plan that was edited otherwise goes on with its own state alone.
    fresh.edit(batchloom.Edit(step=fresh.first_editable_step, ban={"data": [extra]}))
    with pytest.raises(StateError, match="journal"):
        fresh.load_state_dict(later)


def test_a_window_of_alike_lengths_is_not_cut(lost, made):
    store, listed, _, _ = lost
    windows = PlanOptions(group_by_length=4)
    settings = {**SIZES, "global_batch_size": 1, "packing": "none", "plan": windows}
    before = batchloom.Loader(made[0], **settings, overlong="drop")
    state = before.state_at(6)
    loader = batchloom.Loader(store, **settings, overlong="drop", media=MediaOptions(replace=str(listed)))
    loader.load_state_dict(state)
    assert [edit["step"] for edit in loader.plan.journal] == [4]
    steps = [batch.step for batch in loader]
    assert steps == list(range(6, len(before)))


def test_workers_of_a_dataloader_need_no_list(lost):
    store, listed, _, _ = lost
    loader = batchloom.Loader(store, **{**SIZES, "output": "torch"}, media=MediaOptions(replace=str(listed)))
    expected = [arrays(batch) for batch in loader]
    dataset = LoaderDataset(loader)
    listed.unlink()
    given = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=1)
    for one, other in zip(expected, given, strict=True):
        same(one, arrays(other))


def test_of_a_mixture_each_store_has_its_own(lost, made, tmp_path):
    store, listed, gone, _ = lost
    text = write_store(tmp_path / "text", [[1, 2, 3]] * 9, tokenizer=str(store.path))
    stores = {"a": store, "b": text}
    assert find_missing_documents(stores, [str(listed)]) == {"a": tuple(gone)}
    mixture = batchloom.Mixture({"a": 1, "b": 1}, stores=stores)
    media = MediaOptions(replace=[str(listed)])
    loader = batchloom.Loader(mixture, **SIZES, overlong="drop", steps=8, media=media)
    assert len(list(loader)) == 8
    with pytest.raises(InputError, match=f"names documents of {store.path}, but of no store"):
        batchloom.Loader(text, seq_len=8, global_batch_size=2, media=media)


def test_removed_documents_are_not_looked_at(lost, tmp_path):
    store, _, gone, _ = lost
    numbers = tmp_path / "numbers"
    numbers.write_text("".join(f"train:{number}\n" for number in gone))
    remove_documents(store.path, documents_file=numbers)
    assert batchloom.check(store.path).sound
    older = batchloom.check(store.path, generation=1, missing_media=tmp_path / "older.json")
    assert "4 of which" in older.facts["media"]
    assert read_missing_media(tmp_path / "older.json").subsets["train"].fingerprint == store.fingerprint


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not a list of documents with missing images or audio"),
        ("[1]", "is not a list of documents"),
        ('{"version": 2, "store": "x", "subsets": {}}', "has version 2"),
        (None, "cannot be read"),
    ],
)
def test_what_is_no_list_is_refused(made, tmp_path, content, said):
    file = tmp_path / "gone.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InputError, match=said):
        batchloom.Loader(made[0], **SIZES, media=MediaOptions(replace=str(file)))


def test_a_list_is_of_documents_that_are_there_and_of_plans(lost, made):
    store, listed, _, _ = lost
    told = json.loads(listed.read_text())
    told["subsets"]["train"]["documents"] = [99]
    listed.write_text(json.dumps(told))
    media = MediaOptions(replace=str(listed))
    with pytest.raises(SettingsError, match="document 99 does not exist"):
        batchloom.Loader(store, **SIZES, media=media)
    text = made[1].with_name("text.jsonl")
    text.write_text('{"text": "some text"}\n' * 9)
    stream = batchloom.stream(str(text), tokenizer="bytes", seq_len=32, global_batch_size=1, steps=2)
    with pytest.raises(PlanError, match="this is a stream"):
        batchloom.Loader(stream, media=media)
    with pytest.raises(SettingsError, match="replace: 5 is not the path of a list"):
        MediaOptions(replace=5)
    with pytest.raises(SettingsError, match="replace: '' is not the path"):
        MediaOptions(replace=("a", ""))


def test_the_command_lists_what_is_gone(lost, tmp_path, capsys):
    store, listed, _, _ = lost
    said = tmp_path / "said.json"
    assert run_command_line(["check", str(store.path), "--missing-media", str(said), "--json"]) == 1
    assert "4 of which" in json.loads(capsys.readouterr().out)["facts"]["media"]
    assert said.read_bytes() == listed.read_bytes()
    assert run_command_line(["check", str(store.path), "--no-media"]) == 0
    assert "media:" not in capsys.readouterr().out


def test_what_cannot_be_listed_is_told(made, tmp_path):
    write_store(tmp_path / "text", [[1, 2, 3]] * 9)
    with pytest.raises(SettingsError, match="is not a store that was made with a processor"):
        batchloom.check(tmp_path / "text", missing_media=tmp_path / "gone.json")
    with pytest.raises(SettingsError, match="found only with media=True"):
        batchloom.check(made[0].path, media=False, missing_media=tmp_path / "gone.json")
    shutil.copytree(made[0].path, tmp_path / "store")
    path = tmp_path / "store" / "train" / "shard_00000.media"
    path.write_bytes(path.read_bytes()[:-1])
    verdict = batchloom.check(tmp_path / "store", missing_media=tmp_path / "gone.json")
    assert not verdict.sound
    assert "shard_00000.media" in " ".join(verdict.faults)
    assert not Path(tmp_path / "gone.json").exists()


def test_a_model_is_not_tried_on_documents_whose_media_are_gone(lost):
    store, listed, gone, _ = lost
    chosen = DocumentRows(batchloom.Loader(store, **SIZES, media=MediaOptions(replace=str(listed))))
    numbers = [*chosen.with_media(SIZES["seq_len"]), *chosen.few(SIZES["seq_len"])]
    assert not set(numbers) & set(gone)
    assert chosen.batch([[number] for number in numbers])
