"""Filters on the media of documents: one store as several sources of a mixture."""

import json
import pickle

import numpy as np
import pytest
from hypothesis import given, strategies as st

import batchloom
from batchloom import InputError, Mixture, SettingsError
from batchloom.analysis import explain_unserved, forecast_plan
from batchloom.batches import check_text_only, read_mixture
from batchloom.core.medium import MEDIUM_KINDS
from batchloom.store import StoreMedia
from batchloom.store.read.stored_media import _mask_kind_sets, normalize_media_filter
from batchloom.testing import write_store
from media.processors import PROCESSORS, save_processor
from media.sample_media import encode_image, make_image, make_messages

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
SIZES = {"seq_len": 256, "global_batch_size": 8, "output": "numpy", "rank": 0, "world_size": 1}


@pytest.fixture(scope="module")
def store_folder(tmp_path_factory):
    """Folder of a store: 16 conversations with an image, 16 without, 32 texts."""
    folder = tmp_path_factory.mktemp("chosen")
    save_processor(PROCESSORS["qwen2_vl"](), folder / "processor")
    add_records(folder, "first", 16)
    return folder


def add_records(folder, name, count):
    """Write records to ``folder/name``; add them to ``folder/store``."""
    (folder / name).mkdir()
    rows = []
    for number in range(count):
        sides = (28 + 9 * number % 130, 56 + 7 * number % 90)
        (folder / name / f"{number}.png").write_bytes(encode_image(make_image(*sides, seed=number), "PNG"))
        question = f"<image> Who is {name} {number}?"
        rows.append({"messages": make_messages(question, "A cat."), "images": [f"{number}.png"]})
        rows.append({"messages": make_messages(f"Who is {name} {number}?", "Nobody. " * (1 + number % 3))})
    (folder / name / "talks.json").write_text(json.dumps(rows))
    texts = [{"text": f"{name} {n} " * (1 + n % 40)} for n in range(2 * count)]
    (folder / name / "texts.jsonl").write_text("".join(json.dumps(t) + "\n" for t in texts))
    processor = str(folder / "processor")
    batchloom.prepare(
        [str(folder / name / "talks.json"), str(folder / name / "texts.jsonl")],
        out=folder / "store",
        tokenizer=processor,
        media={"processor": processor},
        val_fraction=0,
        append=(folder / "store").exists(),
    )


def open_filtered(store_folder, media=None, **options):
    return batchloom.open_store(store_folder / "store", media=media, **options)


def documents_of(data, **options):
    plan = batchloom.Loader(data, **{**SIZES, **options}).plan
    rows = plan.rows(0, plan.positions)
    return set(rows.documents.tolist()), rows


def test_kinds_split_a_store(store_folder):
    everything, text_only, image = (
        open_filtered(store_folder),
        open_filtered(store_folder, "none"),
        open_filtered(store_folder, "image"),
    )
    kinds = StoreMedia(everything).list_kinds(np.arange(len(everything)))
    assert text_only.tokens + image.tokens == everything.tokens
    assert open_filtered(store_folder, "any").tokens == image.tokens
    assert text_only.contents.remaining_counts[0] + image.contents.remaining_counts[0] == len(everything)
    assert text_only.contents.trained_tokens + image.contents.trained_tokens == everything.contents.trained_tokens
    assert len({store.fingerprint for store in (everything, text_only, image, open_filtered(store_folder, "any"))}) == 4
    for store, selected in ((text_only, kinds == 0), (image, kinds == 1)):
        lengths = store.lengths.slice(0, len(store))
        assert np.array_equal(lengths, np.where(selected, everything.lengths.slice(0, len(everything)), 0))
        assert np.array_equal(store.lengths.take(np.arange(len(store))[::-1]), lengths[::-1])
        assert store.tokens == int(lengths.sum())
        assert documents_of(store)[0] == set(np.flatnonzero(selected).tolist())
    assert "media='none'" in repr(text_only)


def test_texts_alone_hold_no_media(store_folder):
    text_only = open_filtered(store_folder, "none")
    loader = batchloom.Loader(text_only, **(SIZES | {"seq_len": 64}))
    # Texts may be cut if the filter excludes all documents with media.
    assert loader.plan.spec.overlong == "split"
    assert not any("pixel_values" in batch for batch in loader)
    pad = text_only.tokenizer.control["<|image_pad|>"]
    assert not any((batch["input_ids"] == pad).any() for batch in loader)
    image = batchloom.Loader(open_filtered(store_folder, "image"), **SIZES)
    assert image.plan.spec.overlong == "drop"
    assert all("pixel_values" in batch for batch in image)


def test_modalities_have_weights(store_folder, tmp_path):
    file = tmp_path / "mix.yaml"
    file.write_text(
        "weights: {text: 0.3, image: 0.7}\n"
        f"stores:\n  text: {{path: {store_folder}/store, media: none}}\n"
        f"  image: {{path: {store_folder}/store, media: image}}\n"
    )
    loader = batchloom.Loader(read_mixture(file), **SIZES, steps=40)
    rows = loader.plan.rows(0, 320)
    tokens = np.bincount(rows.sources, rows.lengths)
    shares = dict(zip(loader.plan.stores, tokens / tokens.sum(), strict=True))
    assert shares["image"] == pytest.approx(0.7, abs=0.03)
    kinds = StoreMedia(open_filtered(store_folder)).list_kinds(rows.documents)
    names = np.array(list(loader.plan.stores))[rows.sources]
    assert np.array_equal(names == "image", kinds == 1)
    batch = loader[3]
    spans = [span for sequence in batchloom.explain(loader, 3) for span in sequence.spans]
    assert sum(len(span.media) for span in spans) == len(batch["image_grid_thw"])


def test_a_forecast_counts_only_filtered_documents(store_folder):
    stores = {"text": open_filtered(store_folder, "none"), "image": open_filtered(store_folder, "image")}
    mixture = Mixture({"text": 1, "image": 1}, stores=stores)
    sources = forecast_plan(batchloom.Loader(mixture, **SIZES, steps=20).plan).sources
    counts = {source.name: (source.documents, source.tokens) for source in sources}
    assert counts == {
        "text": (48, stores["text"].tokens),
        "image": (16, stores["image"].tokens),
    }


@pytest.mark.parametrize("unit", ["tokens", "documents", "epochs"])
def test_units_count_only_filtered_documents(store_folder, unit):
    stores = {"text": open_filtered(store_folder, "none"), "image": open_filtered(store_folder, "image")}
    mixture = Mixture({"text": 1, "image": 1}, stores=stores, unit=unit)
    sizes = {**SIZES, "packing": "best_fit", "seq_len": 512}
    plan = batchloom.Loader(mixture, **sizes, steps=200).plan
    rows = plan.rows(0, 1600)
    amounts = {
        "tokens": np.bincount(rows.sources, rows.lengths),
        "documents": np.bincount(rows.sources),
        "epochs": np.bincount(rows.sources, rows.lengths) / [plan.stores[name].tokens for name in plan.stores],
    }[unit]
    assert amounts[0] / amounts[1] == pytest.approx(1, abs=0.06)


def test_a_run_on_a_filtered_store_resumes_on_its_generation(tmp_path):
    save_processor(PROCESSORS["qwen2_vl"](), tmp_path / "processor")
    add_records(tmp_path, "first", 6)
    loader = batchloom.Loader(open_filtered(tmp_path, "image"), **(SIZES | {"global_batch_size": 2}))
    iterator = iter(loader)
    expected = [batch["input_ids"] for batch in loader]
    next(iterator)
    state = loader.state_dict()
    resumed = batchloom.Loader(open_filtered(tmp_path, "image"), **(SIZES | {"global_batch_size": 2}))
    resumed.load_state_dict(state)
    assert all(np.array_equal(b["input_ids"], expected[b.step]) for b in resumed)
    first_generation = open_filtered(tmp_path, "image")
    add_records(tmp_path, "second", 3)
    store = open_filtered(tmp_path, "image")
    assert store.location.generation == 2
    assert store.contents.find_generation(first_generation.fingerprint) == 1
    assert store.contents.find_generation(open_filtered(tmp_path, generation=1).fingerprint) is None
    assert store.lengths.layers == open_filtered(tmp_path).lengths.layers
    assert documents_of(first_generation)[0] < documents_of(store)[0]
    with pytest.raises(batchloom.StateError, match=r"generation 1 .* generation=1"):
        batchloom.Loader(store, **(SIZES | {"global_batch_size": 2})).load_state_dict(state)


def test_a_filtered_store_can_be_pickled(store_folder):
    store = open_filtered(store_folder, "image")
    copy = pickle.loads(pickle.dumps(store))
    assert (copy.contents.media, copy.fingerprint, copy.tokens) == (
        "image",
        store.fingerprint,
        store.tokens,
    )
    assert np.array_equal(copy.lengths.slice(0, 50), store.lengths.slice(0, 50))


def test_explain_names_the_filter_of_an_unserved_document(store_folder):
    image = open_filtered(store_folder, "image")
    text_document = int(np.flatnonzero(image.lengths.slice(0, len(image)) == 0)[0])
    plan = batchloom.Loader(image, **SIZES).plan
    assert batchloom.when(plan, document=text_document) == ()
    explanation = explain_unserved(plan, 0, text_document, plan.steps - 1)
    assert "its media are not the ones that source 'data' takes from its store (media='image')" in explanation


kind_lists = st.lists(st.sampled_from(MEDIUM_KINDS), min_size=1, max_size=3, unique=True)


@given(kind_lists)
def test_each_set_of_kinds_has_one_name(kinds):
    media_filter = normalize_media_filter("+".join(kinds))
    assert media_filter == normalize_media_filter("+".join(reversed(kinds)))
    filters = {"none", *("+".join(k for k in MEDIUM_KINDS if k in kinds) for kinds in _list_kind_sets())}
    assert sum(_mask_kind_sets(name).astype(int) for name in filters).tolist() == [1] * 8
    assert _mask_kind_sets(media_filter).sum() == 1
    assert np.array_equal(_mask_kind_sets("any"), ~_mask_kind_sets("none"))


def _list_kind_sets():
    return [[kind for bit, kind in enumerate(MEDIUM_KINDS) if n >> bit & 1] for n in range(1, 8)]


@pytest.mark.parametrize("media", ["", "picture", "image+image", "image+none", "+", 5, ["image"]])
def test_unknown_filters_are_refused(store_folder, media):
    with pytest.raises(SettingsError, match="media: .* is not one of none, any, image, audio, video"):
        open_filtered(store_folder, media)


def test_a_filter_that_matches_nothing_is_refused(store_folder, tmp_path):
    with pytest.raises(InputError, match=r"with media 'audio'; it has: 48 none, 16 image"):
        open_filtered(store_folder, "audio")
    write_store(tmp_path / "plain", [[1, 2, 3], [4, 5]])
    assert batchloom.open_store(tmp_path / "plain", media="none").tokens == 5
    with pytest.raises(InputError, match="it has: 2 none"):
        batchloom.open_store(tmp_path / "plain", media="any")
    for bare in (tmp_path / "plain" / "train" / "shard_00000", "dummy"):
        with pytest.raises(SettingsError, match="only stores have media"):
            batchloom.open_store(bare, media="none")
    (tmp_path / "mix.yaml").write_text(
        f"weights: {{a: 1}}\nstores: {{a: {{path: {store_folder}/store, media: pictures}}}}\n"
    )
    with pytest.raises(SettingsError, match=r"stores.a: media: 'pictures' is not one of"):
        read_mixture(tmp_path / "mix.yaml")


def test_texts_of_a_store_with_media_are_plain_texts(store_folder):
    loader = batchloom.Loader(open_filtered(store_folder, media="none"), **SIZES)
    assert not loader.holds_media
    assert loader[0]["position_ids"].ndim == 2
    check_text_only(loader, "a trainer")
