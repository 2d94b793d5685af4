"""Packed batches of media: each document's loss is that of the document alone, through its processor and its model."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

import batchloom
from batchloom import PlanError, SettingsError, StoreError
from batchloom.adapters.pytorch import LoaderDataset
from batchloom.batches import MediaOptions, PlanOptions
from batchloom.core.errors import MediumError
from batchloom.media import (
    BytesContent,
    MediaLimits,
    compute_mrope_positions,
    decode_audio,
    inspect_audio,
    join_features,
)
from batchloom.testing import write_store
from media.made import encoded, picture, talk, write_images, write_sounds
from media.models import inputs_of, make
from media.processors import MADE, save
from media.test_tokens import LINES, PLACES

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
SIZES = {"seq_len": 900, "global_batch_size": 2}


# The loss of a document is compared for all families; the rest for some of each kind.
SOME_FAMILIES = pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            name,
            marks=[] if name in ("qwen2_vl", "gemma3", "qwen2_audio") else [pytest.mark.slow],
        )
        for name in MADE
    ],
    indirect=True,
    scope="module",
)


@pytest.fixture(scope="module", params=list(MADE))
def family(request, tmp_path_factory):
    """Name, processor, template, store and the file that it was made of."""
    return made_of(request.param, tmp_path_factory.mktemp(request.param))


def made_of(name, folder):
    # All sounds are shorter than two seconds; 30 seconds make every forward pass slow.
    settings = {"chunk_length": 2} if name == "qwen2_audio" else {}
    made, template, where = saved(name, folder / "processor", **settings)
    kind = "audio" if name == "qwen2_audio" else "image"
    file = write_sounds(folder / "in") if kind == "audio" else write_images(folder / "in")
    return name, made, template, stored(file, folder / "store", where), file


def saved(name, folder, **settings):
    """A processor, its template, and the folder of both."""
    made = MADE[name](**settings)
    kind = "audio" if name == "qwen2_audio" else "image"
    template = LINES.replace("KIND", kind).replace("PLACE", PLACES.get(name, "<image>"))
    where = save(made, folder)
    (where / "chat_template.jinja").write_text(template)
    return made, template, where


def stored(file, out, processor, **media):
    given = {"processor": str(processor), **media}
    batchloom.prepare(file, out=out, tokenizer=str(processor), media=given, val_fraction=0, dedup="none")
    return batchloom.open_store(out)


def alone(made, model, template, store, file):
    """The summed loss of each document by itself: the processor's inputs, the store's labels."""
    rows, found = json.loads(file.read_text()), {}
    for number in range(len(store)):
        row = rows[store.provenance.of(number).record]
        kind = "audio" if "audios" in row else "image"
        messages = [{**one, "content": parts(one["content"], kind)} for one in row["messages"]]
        text = made.tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
        inputs = made(text=[text], return_tensors="pt", **media_of(row, file.parent))
        ids = inputs["input_ids"][0]
        assert store[number].ids.tolist() == ids.tolist()
        span = (np.array([number]), np.zeros(1, np.int64), np.array([len(ids)]))
        labels = torch.where(torch.tensor(store.mask(*span)[0]), ids, -100)
        with torch.no_grad():
            scores = model(**inputs).logits[0]
        loss = functional.cross_entropy(scores[:-1].float(), labels[1:], reduction="sum")
        found[number] = loss.item()
    return found


def parts(content, kind):
    pieces = content.split(f"<{kind}>")
    if len(pieces) == 1:
        return content
    texts = [[{"type": "text", "text": piece}] if piece else [] for piece in pieces]
    return sum(([{"type": kind}, *piece] for piece in texts[1:]), texts[0])


def media_of(row, folder):
    if "audios" in row:
        heard = []
        for name in row["audios"]:
            content = BytesContent((folder / name).read_bytes())
            heard.append(decode_audio(content, inspect_audio(content, MediaLimits()), 16_000))
        return {"audio": heard, "sampling_rate": 16_000}
    if "images" in row:
        return {"images": [Image.open(folder / name).convert("RGB") for name in row["images"]]}
    return {}


def packed(name, model, loader):
    """The summed loss of each document in packed batches."""
    found = {}
    for batch in loader:
        labels = batch["labels"]
        with torch.no_grad():
            scores = model(**inputs_of(name, batch), use_cache=False).logits
        losses = functional.cross_entropy(scores[:, :-1].float().transpose(1, 2), labels[:, 1:], reduction="none")
        rows = loader.plan.rows(*loader.plan.positions_of(batch.step))
        for row in range(len(rows)):
            for span in range(rows.pointers[row], rows.pointers[row + 1]):
                begin, length = int(rows.row_offsets[span]), int(rows.lengths[span])
                loss = losses[row, begin : begin + length - 1].sum().item()
                found[int(rows.documents[span])] = loss
    return found


def test_packed_documents_have_the_loss_that_they_have_alone(family):
    name, made, template, store, file = family
    model = make(name, made)
    expected = alone(made, model, template, store, file)
    found = packed(name, model, batchloom.Loader(store, **SIZES))
    assert set(found) == set(expected)
    for number, loss in expected.items():
        assert found[number] == pytest.approx(loss, rel=1e-4)


def test_the_features_of_other_media_would_be_seen(family):
    """The comparison can fail: with features of other media the losses are others."""
    name, made, _, store, _ = family
    model = make(name, made)
    batch = batchloom.Loader(store, **SIZES)[0]
    inputs = inputs_of(name, batch)
    features = "input_features" if "input_features" in batch else "pixel_values"
    other = {**inputs, features: inputs[features].flip(-1) * 1.5}
    with torch.no_grad():
        first, second = (model(**some, use_cache=False).logits for some in (inputs, other))
    assert (first - second).abs().max() > 1e-4


def test_real_conversations_have_the_loss_that_they_have_alone(real_data, tmp_path):
    for name in ("qwen2_vl", "qwen2_audio"):
        made, template, where = saved(name, tmp_path / name)
        kind = "audio" if name == "qwen2_audio" else "image"
        file = real_data / "multimodal" / ("mllm_audio_demo.json" if kind == "audio" else "mllm_demo.json")
        store = stored(file, tmp_path / f"{name}_store", where)
        model = make(name, made)
        expected = alone(made, model, template, store, file)
        found = packed(name, model, batchloom.Loader(store, **SIZES))
        assert found == {number: pytest.approx(loss, rel=1e-4) for number, loss in expected.items()}


def as_numpy(batch):
    return {name: np.asarray(value) for name, value in batch.items()}


def same(first, second):
    assert set(first) == set(second)
    for name in first:
        assert np.array_equal(first[name], second[name]), name


def alike(first, second):
    """The same but for zeros behind the features of a row, of which there are as many as its batch needs."""
    assert set(first) == set(second)
    for name, one in first.items():
        other = second[name]
        common = tuple(slice(0, min(pair)) for pair in zip(one.shape, other.shape, strict=True))
        assert np.array_equal(one[common], other[common]), name
        for array in (one, other):
            assert np.count_nonzero(array) == np.count_nonzero(array[common])


@SOME_FAMILIES
def test_any_step_is_given_on_its_own_on_any_rank(family):
    _, _, _, store, _ = family
    loader = batchloom.Loader(store, **SIZES)
    whole = list(loader)
    again = batchloom.Loader(store, **SIZES, media=MediaOptions(workers=1, memory=1 << 20), prefetch=0)
    for step, batch in enumerate(whole):
        same(as_numpy(again[step]), as_numpy(batch))
    for rank in (0, 1):
        part = batchloom.Loader(store, **SIZES, rank=rank, world_size=2)[0]
        row = whole[0].split(1)[rank]
        for name in ("input_ids", "labels", "position_ids"):
            assert torch.equal(part[name], row[name])


@SOME_FAMILIES
def test_a_run_goes_on_with_its_media_on_other_numbers_of_ranks(family):
    _, _, _, store, _ = family
    sizes = {"seq_len": 500, "global_batch_size": 4, "steps": 6}
    run = batchloom.Loader(store, **sizes)
    rows = {batch.step: batch.split(1) for batch in run}
    for step, world_size in ((1, 2), (3, 4), (4, 1)):
        state = json.loads(json.dumps(run.state_at(step)))
        ranks = [batchloom.Loader(store, **sizes, rank=rank, world_size=world_size) for rank in range(world_size)]
        for rank in ranks:
            rank.load_state_dict(state)
        seen = 0
        for number, batches in enumerate(zip(*ranks, strict=True), step):
            given = [part for batch in batches for part in batch.split(1)]
            wanted = {part["input_ids"].numpy().tobytes(): part for part in rows[number]}
            assert {part["input_ids"].numpy().tobytes() for part in given} == set(wanted)
            for part in given:
                alike(as_numpy(part), as_numpy(wanted[part["input_ids"].numpy().tobytes()]))
                seen += len(part) > len(PLAIN & set(part))
        assert seen


@SOME_FAMILIES
def test_parts_of_a_batch_hold_the_features_of_their_rows(family):
    name, made, _, store, _ = family
    model = make(name, made)
    for form in ("rows", "varlen"):
        loader = batchloom.Loader(store, seq_len=900, global_batch_size=4, form=form)
        batch = loader[0]
        split = batch.split(1)
        assert len(split) == 4
        features = [key for key in batch if key not in PLAIN]
        for key in features:
            there = [part[key] for part in split if key in part]
            assert sum(one.shape[0] for one in there) >= 1
        if form == "varlen":
            continue
        with torch.no_grad():
            whole = model(**inputs_of(name, batch), use_cache=False).logits
            for row, part in enumerate(split):
                one = model(**inputs_of(name, part), use_cache=False).logits
                assert (one[0] - whole[row]).abs().max() < 1e-4


PLAIN = {
    *("input_ids", "labels", "position_ids", "seq_idx", "token_type_ids"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return made_of("qwen2_vl", tmp_path_factory.mktemp("qwen"))


def test_a_batch_that_was_rebuilt_is_not_cut_blindly(qwen):
    batch = batchloom.Loader(qwen[3], **SIZES)[0]
    with pytest.raises(PlanError, match="does not know which features its rows hold"):
        type(batch)(dict(batch)).split(1)


def test_positions_are_those_of_the_model(qwen):
    """M-RoPE: of each document what ``get_rope_index`` of transformers gives it alone."""
    _, made, _, store, _ = qwen
    model = make("qwen2_vl", made)
    pad = store.tokenizer.control["<|image_pad|>"]
    loader = batchloom.Loader(store, **SIZES)
    for batch in loader:
        rows = loader.plan.rows(*loader.plan.positions_of(batch.step))
        grids, seen = batch["image_grid_thw"], 0
        for row in range(len(rows)):
            for span in range(rows.pointers[row], rows.pointers[row + 1]):
                begin, length = int(rows.row_offsets[span]), int(rows.lengths[span])
                ids = batch["input_ids"][row, begin : begin + length][None]
                types = (ids == pad).int()
                images = int((types[:, 1:] > types[:, :-1]).sum())
                own = grids[seen : seen + images]
                seen += images
                expected, _ = model.model.get_rope_index(ids, types, own if images else None)
                found = batch["position_ids"][:, row, begin : begin + length]
                assert torch.equal(found[1:], expected[:, 0])
                assert torch.equal(found[0], torch.arange(length))
        assert seen == len(grids)


def test_positions_of_aligned_documents_in_a_flattened_row(qwen):
    store = qwen[3]
    loader = batchloom.Loader(store, seq_len=904, global_batch_size=2, plan=PlanOptions(align=8), form="varlen")
    rows = batchloom.Loader(store, seq_len=904, global_batch_size=2, plan=PlanOptions(align=8))
    for flat, batch in zip(loader, rows, strict=True):
        bounds = flat["cu_seq_lens_q"].tolist()
        cuts = batch.layout
        owners = np.repeat(np.arange(2), np.diff(cuts.pointers))
        for span, length in enumerate(cuts.lengths.tolist()):
            place = int(cuts.offsets[span])
            expected = batch["position_ids"][:, owners[span], place : place + length]
            found = flat["position_ids"][:, 0, bounds[span] : bounds[span] + length]
            assert torch.equal(found, expected)


def test_positions_of_a_pinned_document():
    found = compute_mrope_positions(9, [(2, 4, (1, 4, 4))], 2)
    assert found.tolist() == [
        [0, 1, 2, 2, 2, 2, 4, 5, 6],
        [0, 1, 2, 2, 3, 3, 4, 5, 6],
        [0, 1, 2, 3, 2, 3, 4, 5, 6],
    ]


def test_text_and_media_mix_in_one_plan(qwen, tmp_path):
    store = qwen[3]
    (tmp_path / "text.jsonl").write_text(
        "".join(json.dumps({"text": f"Line {number}. " * 9}) + "\n" for number in range(60))
    )
    batchloom.prepare(tmp_path / "text.jsonl", out=tmp_path / "text", tokenizer=str(store.path), val_fraction=0)
    text = batchloom.open_store(tmp_path / "text")
    mixture = batchloom.Mixture({"text": 1, "seen": 1}, stores={"text": text, "seen": store})
    loader = batchloom.Loader(mixture, seq_len=600, global_batch_size=4, overlong="drop", steps=4)
    model = make("qwen2_vl", qwen[1])
    images = 0
    for batch in loader:
        pads = int((batch["input_ids"] == store.tokenizer.control["<|image_pad|>"]).sum())
        grids = batch.get("image_grid_thw", torch.zeros(0, 3, dtype=torch.int64))
        assert pads * 4 == int(grids.prod(dim=1).sum())
        assert batch["position_ids"].shape == (4, 4, 600)
        images += len(grids)
        with torch.no_grad():
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            assert model(**inputs, use_cache=False).logits.isfinite().all()
    assert images


def test_documents_with_media_are_never_cut(qwen):
    for settings in ({"overlong": "split"}, {"overlong": "truncate"}, {"packing": "wrap"}):
        with pytest.raises(PlanError, match="is never cut"):
            batchloom.Loader(qwen[3], **SIZES, **settings)
    with pytest.raises(PlanError, match="leave augment .* out"):
        batchloom.Loader(qwen[3], **SIZES, augment={"noise_prob": 0.1})
    lengths = [len(qwen[3][number].ids) for number in range(len(qwen[3]))]
    loader = batchloom.Loader(qwen[3], seq_len=max(lengths) - 1, global_batch_size=1)
    held = {int(one) for step in range(len(loader)) for one in loader.plan.rows(step, step + 1).documents}
    assert len(held) == len(lengths) - lengths.count(max(lengths))


@pytest.fixture
def moved(qwen, tmp_path):
    """A store whose pictures can be changed; gives it and its file."""
    folder = tmp_path / "in"
    shutil.copytree(qwen[4].parent, folder)
    store = stored(folder / "talks.json", tmp_path / "store", qwen[3].path.parent / "processor")
    return store, folder / "talks.json"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(b""), r"has 0 bytes, but had \d"),
        (
            lambda path: path.write_bytes(encoded(picture(9, 9, seed=77))),
            "when its tokens were made",
        ),
        (lambda path: path.write_bytes(path.read_bytes()[::-1]), "is not the file that its tokens were made from"),
    ],
)
def test_a_medium_that_is_gone_or_another_is_told_with_its_document(moved, change, said):
    store, file = moved
    change(file.parent / "pictures" / "3_0.jpg")
    number = next(n for n in range(len(store)) if store.provenance.of(n).record == 3)
    with pytest.raises(MediumError, match=said) as told:
        list(batchloom.Loader(store, **SIZES))
    assert f"Document {number} of {store.path}" in str(told.value)
    assert "talks.json" in str(told.value)
    assert "pictures/3_0.jpg" in str(told.value)


def test_an_edit_that_would_cut_media_is_refused(qwen):
    longest = int(qwen[3].lengths.slice(0, len(qwen[3])).max())
    sizes = {"seq_len": longest + 40, "global_batch_size": 1, "steps": 6}
    loader = batchloom.Loader(batchloom.Mixture({"a": 1}, stores={"a": qwen[3]}), **sizes)
    with pytest.raises(PlanError, match=r"seq_len 64 of the edit cuts document \d+ .* at least \d+"):
        loader.edit(batchloom.Edit(step=1, seq_len=64))
    loader.edit(batchloom.Edit(step=1, seq_len=longest))
    assert [batch["input_ids"].shape[1] for batch in loader] == [longest + 40, *[longest] * 5]


def test_a_plan_that_cuts_media_is_told(qwen):
    """Where nobody asked the loader: of a ready plan, or of a journal."""
    longest = int(qwen[3].lengths.slice(0, len(qwen[3])).max())
    sizes = {"seq_len": longest, "global_batch_size": 1, "steps": 6}
    plan = batchloom.Loader(batchloom.Mixture({"a": 1}, stores={"a": qwen[3]}), **sizes).plan
    loader = batchloom.Loader(plan.edited(batchloom.Edit(step=1, seq_len=64)))
    with pytest.raises(PlanError, match="holds images or audio and is cut by the plan"):
        list(loader)


def test_an_image_that_another_decoder_turns_is_told(qwen, tmp_path, monkeypatch):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.png").write_bytes(encoded(picture(140, 60), "PNG"))
    row = {"messages": talk("<image>Who?", "A cat."), "images": ["a.png"]}
    (folder / "in.jsonl").write_text(json.dumps(row))
    store = stored(folder / "in.jsonl", tmp_path / "store", qwen[3].path.parent / "processor")

    def turned(image, *, in_place):
        assert in_place
        image.im = image.rotate(90, expand=True).im
        image._size = image.im.size

    monkeypatch.setattr("PIL.ImageOps.exif_transpose", turned)
    with pytest.raises(MediumError, match="is 60 x 140 pixels, but its header said 140 x 60"):
        list(batchloom.Loader(store, **SIZES, prefetch=0))


def test_a_child_goes_on_while_its_parent_decodes(qwen):
    import multiprocessing

    loader = batchloom.Loader(qwen[3], **SIZES)
    iterator = iter(loader)
    next(iterator)
    # As if threads of the parent held all of it when the child was forked.
    with loader.media._budget.reserve(1 << 50):
        child = multiprocessing.get_context("fork").Process(target=loader.batch, args=(0,))
        child.start()
        child.join(60)
    assert child.exitcode == 0


def test_media_may_have_moved_as_a_whole(moved):
    store, file = moved
    before = [as_numpy(batch) for batch in batchloom.Loader(store, **SIZES)]
    elsewhere = file.parent.with_name("elsewhere")
    file.parent.rename(elsewhere)
    with pytest.raises(MediumError, match="is missing"):
        list(batchloom.Loader(store, **SIZES))
    found = batchloom.Loader(store, **SIZES, media=MediaOptions(folder=str(elsewhere)))
    for first, second in zip(before, found, strict=True):
        same(first, as_numpy(second))


def test_a_damaged_report_is_told_where_it_is_needed(moved):
    store, file = moved
    (store.path / "report.json").write_text("{")
    with pytest.raises(StoreError, match="it records the folders of relative image and audio paths"):
        list(batchloom.Loader(store, **SIZES))
    assert list(batchloom.Loader(store, **SIZES, media=MediaOptions(folder=str(file.parent))))
    (store.path / "report.json").unlink()
    with pytest.raises(MediumError, match="the store's report does not name its folder"):
        list(batchloom.Loader(store, **SIZES))


def test_workers_of_a_dataloader_read_media_as_they_are_told(moved):
    store, file = moved
    before = [as_numpy(batch) for batch in batchloom.Loader(store, **SIZES)]
    elsewhere = file.parent.with_name("elsewhere")
    file.parent.rename(elsewhere)
    loader = batchloom.Loader(store, **SIZES, media=MediaOptions(folder=str(elsewhere)))
    given = torch.utils.data.DataLoader(
        LoaderDataset(loader), batch_size=None, num_workers=1, multiprocessing_context="spawn"
    )
    for first, second in zip(before, given, strict=True):
        same(first, as_numpy(second))


def test_what_is_banned_is_served_without_its_media(qwen):
    mixture = batchloom.Mixture({"a": 1}, stores={"a": qwen[3]})
    loader = batchloom.Loader(mixture, **SIZES, steps=4, overlong="drop")
    before = batchloom.explain(loader, 0)
    held = [span for sequence in before for span in sequence.spans]
    banned = next(span.document for span in held if span.media)
    gone = sum(len(span.media) for span in held if span.document == banned)
    images = len(loader[0]["image_grid_thw"])
    loader.edit(batchloom.Edit(step=0, ban={"a": [banned]}))
    batch = as_numpy(loader[0])
    told = [span for sequence in batchloom.explain(loader, 0) for span in sequence.spans]
    assert all(span.media == () for span in told if span.document == banned)
    assert len(batch["image_grid_thw"]) == images - gone
    pad = qwen[3].tokenizer.control["<|image_pad|>"]
    patches = int(batch["image_grid_thw"].prod(axis=1).sum())
    assert int((batch["input_ids"] == pad).sum()) == patches // 4


def test_what_a_step_holds_is_told_with_its_media(qwen):
    loader = batchloom.Loader(qwen[3], **SIZES)
    told = [
        (span, medium)
        for step in range(len(loader))
        for sequence in batchloom.explain(loader, step)
        for span in sequence.spans
        for medium in span.media
    ]
    assert told
    pad = qwen[3].tokenizer.control["<|image_pad|>"]
    for span, medium in told:
        assert medium.kind == "image"
        assert (qwen[4].parent / medium.path).is_file()
        ids = qwen[3][span.document].ids[medium.start : medium.stop]
        assert pad in ids
        assert span.trained < span.stop - span.start - (medium.stop - medium.start)


def test_held_media_need_no_files(qwen, tmp_path):
    folder = tmp_path / "in"
    shutil.copytree(qwen[4].parent, folder)
    processor = qwen[3].path.parent / "processor"
    store = stored(folder / "talks.json", tmp_path / "store", processor, keep="embed")
    shutil.rmtree(folder)
    expected = batchloom.Loader(qwen[3], **SIZES)
    for first, second in zip(expected, batchloom.Loader(store, **SIZES), strict=True):
        same(as_numpy(first), as_numpy(second))


def test_stores_of_several_processors_are_refused(qwen, tmp_path):
    other = save(MADE["qwen2_vl"](max_pixels=28 * 28 * 16), tmp_path / "processor")
    store = stored(qwen[4], tmp_path / "store", other)
    mixture = batchloom.Mixture({"a": 1, "b": 1}, stores={"a": qwen[3], "b": store})
    with pytest.raises(PlanError, match="have several processors"):
        batchloom.Loader(mixture, **SIZES, overlong="drop", steps=2)


def test_wrong_settings_are_told():
    with pytest.raises(SettingsError) as told:
        MediaOptions(workers=-1, memory=3, folder=5)
    assert len(told.value.problems) == 3


def test_features_of_other_shapes_are_filled_up():
    found = join_features([{"x": np.ones((1, 2, 3))}, {"x": np.full((2, 3, 2), 2.0)}])
    assert found["x"].shape == (3, 3, 3)
    assert found["x"].sum() == 6 + 24


def test_a_store_of_text_is_read_as_ever(tmp_path):
    store = write_store(tmp_path / "store", [[1, 2, 3]] * 9)
    batch = batchloom.Loader(store, seq_len=8, global_batch_size=2)[0]
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    assert batch["position_ids"].ndim == 2
