"""Packed batches of media: packing does not change a document's loss."""

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
from batchloom.batches import MediaOptions
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
from media.models import make_model, select_model_inputs
from media.processors import PROCESSORS, save_processor
from media.sample_media import encode_image, make_image, make_messages, write_images, write_sounds
from media.test_tokens import PLACEHOLDERS, TEMPLATE
from media.warm_context import get_warm_context

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
# The longest document has 243 tokens.
SIZES = {"seq_len": 300, "global_batch_size": 2}


# Losses are compared for all families, everything else for one of each kind.
SOME_FAMILIES = pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            name,
            marks=[] if name in ("qwen2_vl", "gemma3", "qwen2_audio") else [pytest.mark.slow],
        )
        for name in PROCESSORS
    ],
    indirect=True,
    scope="module",
)


@pytest.fixture(scope="module", params=list(PROCESSORS))
def family(request, tmp_path_factory):
    """Name, processor, template, store and the store's input file."""
    return make_family(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def model(family):
    """Model of the family's architecture."""
    return make_model(*family[:2])


def make_family(name, folder):
    # All sounds are shorter than two seconds; 30 seconds make every forward pass slow.
    settings = {"chunk_length": 2} if name == "qwen2_audio" else {}
    processor, template, processor_folder = save_with_template(name, folder / "processor", **settings)
    medium = "audio" if name == "qwen2_audio" else "image"
    file = write_sounds(folder / "in") if medium == "audio" else write_images(folder / "in", 5)
    return name, processor, template, make_store(file, folder / "store", processor_folder), file


def save_with_template(name, folder, **settings):
    """Write a processor with a chat template; return both and their folder."""
    processor = PROCESSORS[name](**settings)
    medium = "audio" if name == "qwen2_audio" else "image"
    template = TEMPLATE.replace("KIND", medium).replace("PLACE", PLACEHOLDERS.get(name, "<image>"))
    processor_folder = save_processor(processor, folder)
    (processor_folder / "chat_template.jinja").write_text(template)
    return processor, template, processor_folder


def make_store(file, out, processor, **media):
    media_options = {"processor": str(processor), **media}
    batchloom.prepare(file, out=out, tokenizer=str(processor), media=media_options, val_fraction=0, dedup="none")
    return batchloom.open_store(out)


def compute_single_losses(processor, model, template, store, file):
    """Return the summed loss of each document in a row of its own.

    Inputs come from the processor, labels from the store.
    """
    rows, losses = json.loads(file.read_text()), {}
    for number in range(len(store)):
        row = rows[store.provenance.of(number).record]
        medium = "audio" if "audios" in row else "image"
        messages = [{**message, "content": split_content(message["content"], medium)} for message in row["messages"]]
        text = processor.tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
        inputs = processor(text=[text], return_tensors="pt", **load_media(row, file.parent))
        ids = inputs["input_ids"][0]
        assert store[number].ids.tolist() == ids.tolist()
        span = (np.array([number]), np.zeros(1, np.int64), np.array([len(ids)]))
        labels = torch.where(torch.tensor(store.mask(*span)[0]), ids, -100)
        with torch.no_grad():
            scores = model(**inputs).logits[0]
        loss = functional.cross_entropy(scores[:-1].float(), labels[1:], reduction="sum")
        losses[number] = loss.item()
    return losses


def split_content(content, kind):
    pieces = content.split(f"<{kind}>")
    if len(pieces) == 1:
        return content
    texts = [[{"type": "text", "text": piece}] if piece else [] for piece in pieces]
    return sum(([{"type": kind}, *piece] for piece in texts[1:]), texts[0])


def load_media(row, folder):
    if "audios" in row:
        waveforms = []
        for name in row["audios"]:
            content = BytesContent((folder / name).read_bytes())
            waveforms.append(decode_audio(content, inspect_audio(content, MediaLimits()), 16_000))
        return {"audio": waveforms, "sampling_rate": 16_000}
    if "images" in row:
        return {"images": [Image.open(folder / name).convert("RGB") for name in row["images"]]}
    return {}


def compute_packed_losses(name, model, loader):
    """Return the summed loss of each document in packed batches."""
    losses = {}
    for batch in loader:
        labels = batch["labels"]
        with torch.no_grad():
            scores = model(**select_model_inputs(name, batch), use_cache=False).logits
        token_losses = functional.cross_entropy(scores[:, :-1].float().transpose(1, 2), labels[:, 1:], reduction="none")
        rows = loader.plan.rows(*loader.plan.positions_of(batch.step))
        for row in range(len(rows)):
            for span in range(rows.pointers[row], rows.pointers[row + 1]):
                begin, length = int(rows.row_offsets[span]), int(rows.lengths[span])
                loss = token_losses[row, begin : begin + length - 1].sum().item()
                losses[int(rows.documents[span])] = loss
    return losses


def test_packed_documents_have_the_loss_that_they_have_alone(family, model):
    name, processor, template, store, file = family
    expected = compute_single_losses(processor, model, template, store, file)
    actual = compute_packed_losses(name, model, batchloom.Loader(store, **SIZES))
    assert set(actual) == set(expected)
    for number, loss in expected.items():
        assert actual[number] == pytest.approx(loss, rel=1e-4)


def test_features_of_other_media_change_the_losses(family, model):
    """Features of other media change the losses, so the comparison can fail."""
    name, _, _, store, _ = family
    batch = batchloom.Loader(store, **SIZES)[0]
    inputs = select_model_inputs(name, batch)
    features = "input_features" if "input_features" in batch else "pixel_values"
    changed_inputs = {**inputs, features: inputs[features].flip(-1) * 1.5}
    with torch.no_grad():
        scores, changed_scores = (model(**arrays, use_cache=False).logits for arrays in (inputs, changed_inputs))
    assert (scores - changed_scores).abs().max() > 1e-4


def test_real_conversations_have_the_loss_that_they_have_alone(real_data, tmp_path):
    for name in ("qwen2_vl", "qwen2_audio"):
        processor, template, processor_folder = save_with_template(name, tmp_path / name)
        medium = "audio" if name == "qwen2_audio" else "image"
        file = real_data / "multimodal" / ("mllm_audio_demo.json" if medium == "audio" else "mllm_demo.json")
        store = make_store(file, tmp_path / f"{name}_store", processor_folder)
        model = make_model(name, processor)
        expected = compute_single_losses(processor, model, template, store, file)
        actual = compute_packed_losses(name, model, batchloom.Loader(store, seq_len=900, global_batch_size=2))
        assert actual == {number: pytest.approx(loss, rel=1e-4) for number, loss in expected.items()}


def as_numpy(batch):
    return {name: np.asarray(value) for name, value in batch.items()}


def assert_same_batch(first, second):
    assert set(first) == set(second)
    for name in first:
        assert np.array_equal(first[name], second[name]), name


def assert_same_but_padding(first, second):
    """Require equal arrays, apart from the zeros that pad features."""
    assert set(first) == set(second)
    for name, left in first.items():
        right = second[name]
        common = tuple(slice(0, min(pair)) for pair in zip(left.shape, right.shape, strict=True))
        assert np.array_equal(left[common], right[common]), name
        for array in (left, right):
            assert np.count_nonzero(array) == np.count_nonzero(array[common])


@SOME_FAMILIES
def test_any_step_can_be_read_alone_on_any_rank(family):
    _, _, _, store, _ = family
    loader = batchloom.Loader(store, **SIZES)
    batches = list(loader)
    random_access = batchloom.Loader(store, **SIZES, media=MediaOptions(workers=1, memory=1 << 20), prefetch=0)
    for step, batch in enumerate(batches):
        assert_same_batch(as_numpy(random_access[step]), as_numpy(batch))
    for rank in (0, 1):
        rank_batch = batchloom.Loader(store, **SIZES, rank=rank, world_size=2)[0]
        row = batches[0].split(1)[rank]
        for name in ("input_ids", "labels", "position_ids"):
            assert torch.equal(rank_batch[name], row[name])


@SOME_FAMILIES
def test_a_run_resumes_with_its_media_on_other_numbers_of_ranks(family):
    _, _, _, store, _ = family
    sizes = {"seq_len": 150, "global_batch_size": 4, "steps": 5}
    run = batchloom.Loader(store, **sizes)
    rows = {batch.step: batch.split(1) for batch in run}
    for step, world_size in ((1, 2), (3, 4), (4, 1)):
        state = json.loads(json.dumps(run.state_at(step)))
        ranks = [batchloom.Loader(store, **sizes, rank=rank, world_size=world_size) for rank in range(world_size)]
        for rank in ranks:
            rank.load_state_dict(state)
        rows_with_media = 0
        for number, batches in enumerate(zip(*ranks, strict=True), step):
            actual = [row for batch in batches for row in batch.split(1)]
            expected = {row["input_ids"].numpy().tobytes(): row for row in rows[number]}
            assert {row["input_ids"].numpy().tobytes() for row in actual} == set(expected)
            for row in actual:
                assert_same_but_padding(as_numpy(row), as_numpy(expected[row["input_ids"].numpy().tobytes()]))
                rows_with_media += len(row) > len(TEXT_ARRAYS & set(row))
        assert rows_with_media


@SOME_FAMILIES
def test_parts_of_a_batch_hold_the_features_of_their_rows(family, model):
    name, _, _, store, _ = family
    for form in ("rows", "varlen"):
        loader = batchloom.Loader(store, seq_len=150, global_batch_size=4, form=form)
        batch = loader[0]
        split = batch.split(1)
        assert len(split) == 4
        features = [key for key in batch if key not in TEXT_ARRAYS]
        for key in features:
            feature_parts = [part[key] for part in split if key in part]
            assert sum(array.shape[0] for array in feature_parts) >= 1
        if form == "varlen":
            continue
        with torch.no_grad():
            batch_scores = model(**select_model_inputs(name, batch), use_cache=False).logits
            for row, part in enumerate(split):
                part_scores = model(**select_model_inputs(name, part), use_cache=False).logits
                assert (part_scores[0] - batch_scores[row]).abs().max() < 1e-4


TEXT_ARRAYS = {
    *("input_ids", "labels", "position_ids", "seq_idx", "token_type_ids"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return make_family("qwen2_vl", tmp_path_factory.mktemp("qwen"))


def test_a_rebuilt_batch_is_not_split(qwen):
    batch = batchloom.Loader(qwen[3], **SIZES)[0]
    with pytest.raises(PlanError, match="does not know which features its rows hold"):
        type(batch)(dict(batch)).split(1)


def test_positions_are_those_of_the_model(qwen):
    """M-RoPE positions are those of transformers' ``get_rope_index``."""
    _, processor, _, store, _ = qwen
    model = make_model("qwen2_vl", processor)
    pad = store.tokenizer.control["<|image_pad|>"]
    loader = batchloom.Loader(store, **SIZES)
    for batch in loader:
        rows = loader.plan.rows(*loader.plan.positions_of(batch.step))
        grids, used_grids = batch["image_grid_thw"], 0
        for row in range(len(rows)):
            for span in range(rows.pointers[row], rows.pointers[row + 1]):
                begin, length = int(rows.row_offsets[span]), int(rows.lengths[span])
                ids = batch["input_ids"][row, begin : begin + length][None]
                types = (ids == pad).int()
                images = int((types[:, 1:] > types[:, :-1]).sum())
                document_grids = grids[used_grids : used_grids + images]
                used_grids += images
                expected, _ = model.model.get_rope_index(ids, types, document_grids if images else None)
                actual = batch["position_ids"][:, row, begin : begin + length]
                assert torch.equal(actual[1:], expected[:, 0])
                assert torch.equal(actual[0], torch.arange(length))
        assert used_grids == len(grids)


def test_positions_of_aligned_documents_in_a_flattened_row(qwen):
    store = qwen[3]
    loader = batchloom.Loader(store, seq_len=304, global_batch_size=2, align=8, form="varlen")
    rows = batchloom.Loader(store, seq_len=304, global_batch_size=2, align=8)
    for flat, batch in zip(loader, rows, strict=True):
        bounds = flat["cu_seq_lens_q"].tolist()
        cuts = batch.layout
        owners = np.repeat(np.arange(2), np.diff(cuts.pointers))
        for span, length in enumerate(cuts.lengths.tolist()):
            offset = int(cuts.offsets[span])
            expected = batch["position_ids"][:, owners[span], offset : offset + length]
            actual = flat["position_ids"][:, 0, bounds[span] : bounds[span] + length]
            assert torch.equal(actual, expected)


def test_positions_of_a_pinned_document():
    positions = compute_mrope_positions(9, [(2, 4, (1, 4, 4))], 2)
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 4, 5, 6],
        [0, 1, 2, 2, 3, 3, 4, 5, 6],
        [0, 1, 2, 3, 2, 3, 4, 5, 6],
    ]


def test_text_and_media_mix_in_one_plan(qwen, tmp_path):
    store = qwen[3]
    (tmp_path / "text.jsonl").write_text(
        "".join(json.dumps({"text": f"Line {number}. " * 9}) + "\n" for number in range(20))
    )
    batchloom.prepare(tmp_path / "text.jsonl", out=tmp_path / "text", tokenizer=str(store.path), val_fraction=0)
    text = batchloom.open_store(tmp_path / "text")
    mixture = batchloom.Mixture({"text": 1, "seen": 1}, stores={"text": text, "seen": store})
    loader = batchloom.Loader(mixture, seq_len=200, global_batch_size=4, overlong="drop", steps=3)
    model = make_model("qwen2_vl", qwen[1])
    images = 0
    for batch in loader:
        pads = int((batch["input_ids"] == store.tokenizer.control["<|image_pad|>"]).sum())
        grids = batch.get("image_grid_thw", torch.zeros(0, 3, dtype=torch.int64))
        assert pads * 4 == int(grids.prod(dim=1).sum())
        assert batch["position_ids"].shape == (4, 4, 200)
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
    served_documents = {
        int(document) for step in range(len(loader)) for document in loader.plan.rows(step, step + 1).documents
    }
    assert len(served_documents) == len(lengths) - lengths.count(max(lengths))


@pytest.fixture
def store_copy(qwen, tmp_path):
    """Store whose pictures a test may change, and its input file."""
    folder = tmp_path / "in"
    shutil.copytree(qwen[4].parent, folder)
    store = make_store(folder / "talks.json", tmp_path / "store", qwen[3].path.parent / "processor")
    return store, folder / "talks.json"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(b""), r"has 0 bytes, but had \d"),
        (
            lambda path: path.write_bytes(encode_image(make_image(9, 9, seed=77))),
            "when its tokens were made",
        ),
        pytest.param(
            lambda path: path.write_bytes(path.read_bytes()[::-1]),
            "is not the file that its tokens were made from",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_missing_or_changed_medium_is_reported_with_its_document(store_copy, change, message):
    store, file = store_copy
    change(file.parent / "pictures" / "3_0.jpg")
    number = next(n for n in range(len(store)) if store.provenance.of(n).record == 3)
    with pytest.raises(MediumError, match=message) as error:
        list(batchloom.Loader(store, **SIZES))
    assert f"Document {number} of {store.path}" in str(error.value)
    assert "talks.json" in str(error.value)
    assert "pictures/3_0.jpg" in str(error.value)


def test_an_edit_that_would_cut_media_is_refused(qwen):
    longest = int(qwen[3].lengths.slice(0, len(qwen[3])).max())
    sizes = {"seq_len": longest + 40, "global_batch_size": 1, "steps": 6}
    loader = batchloom.Loader(batchloom.Mixture({"a": 1}, stores={"a": qwen[3]}), **sizes)
    with pytest.raises(PlanError, match=r"seq_len 64 of the edit cuts document \d+ .* at least \d+"):
        loader.edit(batchloom.Edit(step=1, seq_len=64))
    loader.edit(batchloom.Edit(step=1, seq_len=longest))
    assert [batch["input_ids"].shape[1] for batch in loader] == [longest + 40, *[longest] * 5]


def test_a_plan_that_cuts_media_is_refused(qwen):
    """A ready plan, or a journal, does not pass through the loader's checks."""
    longest = int(qwen[3].lengths.slice(0, len(qwen[3])).max())
    sizes = {"seq_len": longest, "global_batch_size": 1, "steps": 6}
    plan = batchloom.Loader(batchloom.Mixture({"a": 1}, stores={"a": qwen[3]}), **sizes).plan
    loader = batchloom.Loader(plan.edited(batchloom.Edit(step=1, seq_len=64)))
    with pytest.raises(PlanError, match="holds images or audio and is cut by the plan"):
        list(loader)


def test_an_image_that_another_decoder_rotates_is_refused(qwen, tmp_path, monkeypatch):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.png").write_bytes(encode_image(make_image(140, 60), "PNG"))
    row = {"messages": make_messages("<image>Who?", "A cat."), "images": ["a.png"]}
    (folder / "in.jsonl").write_text(json.dumps(row))
    store = make_store(folder / "in.jsonl", tmp_path / "store", qwen[3].path.parent / "processor")

    def rotate(image, *, in_place):
        assert in_place
        image.im = image.rotate(90, expand=True).im
        image._size = image.im.size

    monkeypatch.setattr("PIL.ImageOps.exif_transpose", rotate)
    with pytest.raises(MediumError, match="is 60 x 140 pixels, but its header said 140 x 60"):
        list(batchloom.Loader(store, **SIZES, prefetch=0))


def test_a_child_goes_on_while_its_parent_decodes(qwen):
    import multiprocessing

    loader = batchloom.Loader(qwen[3], **SIZES)
    iterator = iter(loader)
    next(iterator)
    # Simulate parent threads that hold the whole budget when the child is forked.
    with loader.feed.media._budget.reserve(1 << 50):
        child = multiprocessing.get_context("fork").Process(target=loader.batch, args=(0,))
        child.start()
        child.join(60)
    assert child.exitcode == 0


def test_a_folder_of_media_may_move(store_copy):
    store, file = store_copy
    before = [as_numpy(batch) for batch in batchloom.Loader(store, **SIZES)]
    moved_folder = file.parent.with_name("elsewhere")
    file.parent.rename(moved_folder)
    with pytest.raises(MediumError, match="is missing"):
        list(batchloom.Loader(store, **SIZES))
    loader = batchloom.Loader(store, **SIZES, media=MediaOptions(folder=str(moved_folder)))
    for expected, actual in zip(before, loader, strict=True):
        assert_same_batch(expected, as_numpy(actual))


def test_a_damaged_report_is_an_error_only_where_it_is_needed(store_copy):
    store, file = store_copy
    (store.path / "report.json").write_text("{")
    with pytest.raises(StoreError, match="it records the folders of relative image and audio paths"):
        list(batchloom.Loader(store, **SIZES))
    assert list(batchloom.Loader(store, **SIZES, media=MediaOptions(folder=str(file.parent))))
    (store.path / "report.json").unlink()
    with pytest.raises(MediumError, match="the store's report does not name its folder"):
        list(batchloom.Loader(store, **SIZES))


@pytest.mark.slow
def test_workers_of_a_dataloader_use_the_media_options(store_copy):
    store, file = store_copy
    before = [as_numpy(batch) for batch in batchloom.Loader(store, **SIZES)]
    moved_folder = file.parent.with_name("elsewhere")
    file.parent.rename(moved_folder)
    loader = batchloom.Loader(store, **SIZES, media=MediaOptions(folder=str(moved_folder)))
    dataloader = torch.utils.data.DataLoader(
        LoaderDataset(loader), batch_size=None, num_workers=1, multiprocessing_context=get_warm_context()
    )
    for expected, actual in zip(before, dataloader, strict=True):
        assert_same_batch(expected, as_numpy(actual))


def test_banned_documents_are_served_without_their_media(qwen):
    mixture = batchloom.Mixture({"a": 1}, stores={"a": qwen[3]})
    loader = batchloom.Loader(mixture, **SIZES, steps=4, overlong="drop")
    before = batchloom.explain(loader, 0)
    spans = [span for sequence in before for span in sequence.spans]
    banned = next(span.document for span in spans if span.media)
    banned_media = sum(len(span.media) for span in spans if span.document == banned)
    images = len(loader[0]["image_grid_thw"])
    loader.edit(batchloom.Edit(step=0, ban={"a": [banned]}))
    batch = as_numpy(loader[0])
    after = [span for sequence in batchloom.explain(loader, 0) for span in sequence.spans]
    assert all(span.media == () for span in after if span.document == banned)
    assert len(batch["image_grid_thw"]) == images - banned_media
    pad = qwen[3].tokenizer.control["<|image_pad|>"]
    patches = int(batch["image_grid_thw"].prod(axis=1).sum())
    assert int((batch["input_ids"] == pad).sum()) == patches // 4


def test_explain_lists_the_media_of_a_step(qwen):
    loader = batchloom.Loader(qwen[3], **SIZES)
    media_spans = [
        (span, medium)
        for step in range(len(loader))
        for sequence in batchloom.explain(loader, step)
        for span in sequence.spans
        for medium in span.media
    ]
    assert media_spans
    pad = qwen[3].tokenizer.control["<|image_pad|>"]
    for span, medium in media_spans:
        assert medium.kind == "image"
        assert (qwen[4].parent / medium.path).is_file()
        ids = qwen[3][span.document].ids[medium.start : medium.stop]
        assert pad in ids
        assert span.trained < span.stop - span.start - (medium.stop - medium.start)


def test_embedded_media_need_no_files(qwen, tmp_path):
    folder = tmp_path / "in"
    shutil.copytree(qwen[4].parent, folder)
    processor = qwen[3].path.parent / "processor"
    store = make_store(folder / "talks.json", tmp_path / "store", processor, keep="embed")
    shutil.rmtree(folder)
    reference = batchloom.Loader(qwen[3], **SIZES)
    for expected, actual in zip(reference, batchloom.Loader(store, **SIZES), strict=True):
        assert_same_batch(as_numpy(expected), as_numpy(actual))


def test_stores_of_several_processors_are_refused(qwen, tmp_path):
    other_processor = save_processor(PROCESSORS["qwen2_vl"](max_pixels=28 * 28 * 16), tmp_path / "processor")
    store = make_store(qwen[4], tmp_path / "store", other_processor)
    mixture = batchloom.Mixture({"a": 1, "b": 1}, stores={"a": qwen[3], "b": store})
    with pytest.raises(PlanError, match="have several processors"):
        batchloom.Loader(mixture, **SIZES, overlong="drop", steps=2)


def test_invalid_options_are_refused():
    with pytest.raises(SettingsError) as error:
        MediaOptions(workers=-1, memory=3, folder=5)
    assert len(error.value.problems) == 3


def test_features_of_other_shapes_are_filled_up():
    joined = join_features([{"x": np.ones((1, 2, 3))}, {"x": np.full((2, 3, 2), 2.0)}])
    assert joined["x"].shape == (3, 3, 3)
    assert joined["x"].sum() == 6 + 24


def test_a_store_of_text_has_no_media_arrays(tmp_path):
    store = write_store(tmp_path / "store", [[1, 2, 3]] * 9)
    batch = batchloom.Loader(store, seq_len=8, global_batch_size=2)[0]
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    assert batch["position_ids"].ndim == 2
