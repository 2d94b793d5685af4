"""Documents of a store by the media they hold, each kind a source of its own in a mixture."""

import json
import pickle

import numpy as np
import pytest
from hypothesis import given, strategies as st

import batchloom
from batchloom import InputError, Mixture, SettingsError
from batchloom.analysis import forecast_plan
from batchloom.analysis.plan_questions import explain_unserved
from batchloom.batches import check_text_only, read_mixture
from batchloom.core.medium import MEDIUM_KINDS
from batchloom.store import StoreMedia
from batchloom.store.read.media_filter import _mask_kind_sets, normalize_media_filter
from batchloom.testing import write_store
from media.made import encoded, picture, talk
from media.processors import MADE, save

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
SIZES = {"seq_len": 256, "global_batch_size": 8, "output": "numpy", "rank": 0, "world_size": 1}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A store of 16 conversations with an image, 16 without and 32 texts, in a folder of its own."""
    folder = tmp_path_factory.mktemp("chosen")
    save(MADE["qwen2_vl"](), folder / "processor")
    made(folder, "first", 16)
    return folder


def made(folder, name, count):
    """Records below ``folder/name``, prepared or appended to ``folder/store``."""
    (folder / name).mkdir()
    rows = []
    for number in range(count):
        sides = (28 + 9 * number % 130, 56 + 7 * number % 90)
        (folder / name / f"{number}.png").write_bytes(encoded(picture(*sides, seed=number), "PNG"))
        question = f"<image> Who is {name} {number}?"
        rows.append({"messages": talk(question, "A cat."), "images": [f"{number}.png"]})
        rows.append({"messages": talk(f"Who is {name} {number}?", "Nobody. " * (1 + number % 3))})
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


def chosen(place, media=None, **more):
    return batchloom.open_store(place / "store", media=media, **more)


def documents_of(data, **more):
    plan = batchloom.Loader(data, **{**SIZES, **more}).plan
    rows = plan.rows(0, plan.positions)
    return set(rows.documents.tolist()), rows


def test_kinds_split_a_store(place):
    whole, none, image = chosen(place), chosen(place, "none"), chosen(place, "image")
    known = StoreMedia(whole).list_kinds(np.arange(len(whole)))
    assert none.tokens + image.tokens == whole.tokens
    assert chosen(place, "any").tokens == image.tokens
    assert none.contents.remaining_counts[0] + image.contents.remaining_counts[0] == len(whole)
    assert none.contents.trained_tokens + image.contents.trained_tokens == whole.contents.trained_tokens
    assert len({one.fingerprint for one in (whole, none, image, chosen(place, "any"))}) == 4
    for store, wanted in ((none, known == 0), (image, known == 1)):
        found = store.lengths.slice(0, len(store))
        assert np.array_equal(found, np.where(wanted, whole.lengths.slice(0, len(whole)), 0))
        assert np.array_equal(store.lengths.take(np.arange(len(store))[::-1]), found[::-1])
        assert store.tokens == int(found.sum())
        assert documents_of(store)[0] == set(np.flatnonzero(wanted).tolist())
    assert "media='none'" in repr(none)


def test_texts_alone_hold_no_media(place):
    none = chosen(place, "none")
    loader = batchloom.Loader(none, **(SIZES | {"seq_len": 64}))
    # Texts of a store with images may be cut where no image is read.
    assert loader.plan.spec.overlong == "split"
    assert not any("pixel_values" in batch for batch in loader)
    pad = none.tokenizer.control["<|image_pad|>"]
    assert not any((batch["input_ids"] == pad).any() for batch in loader)
    image = batchloom.Loader(chosen(place, "image"), **SIZES)
    assert image.plan.spec.overlong == "drop"
    assert all("pixel_values" in batch for batch in image)


def test_modalities_have_weights(place, tmp_path):
    file = tmp_path / "mix.yaml"
    file.write_text(
        "weights: {text: 0.3, image: 0.7}\n"
        f"stores:\n  text: {{path: {place}/store, media: none}}\n"
        f"  image: {{path: {place}/store, media: image}}\n"
    )
    loader = batchloom.Loader(read_mixture(file), **SIZES, steps=40)
    rows = loader.plan.rows(0, 320)
    tokens = np.bincount(rows.sources, rows.lengths)
    shares = dict(zip(loader.plan.stores, tokens / tokens.sum(), strict=True))
    assert shares["image"] == pytest.approx(0.7, abs=0.03)
    known = StoreMedia(chosen(place)).list_kinds(rows.documents)
    names = np.array(list(loader.plan.stores))[rows.sources]
    assert np.array_equal(names == "image", known == 1)
    batch = loader[3]
    told = [span for sequence in batchloom.explain(loader, 3) for span in sequence.spans]
    assert sum(len(span.media) for span in told) == len(batch["image_grid_thw"])


def test_a_forecast_counts_the_chosen_alone(place):
    stores = {"text": chosen(place, "none"), "image": chosen(place, "image")}
    mixture = Mixture({"text": 1, "image": 1}, stores=stores)
    told = forecast_plan(batchloom.Loader(mixture, **SIZES, steps=20).plan).sources
    found = {one.name: (one.documents, one.tokens) for one in told}
    assert found == {
        "text": (48, stores["text"].tokens),
        "image": (16, stores["image"].tokens),
    }


@pytest.mark.parametrize("unit", ["tokens", "documents", "epochs"])
def test_units_count_the_chosen_alone(place, unit):
    stores = {"text": chosen(place, "none"), "image": chosen(place, "image")}
    mixture = Mixture({"text": 1, "image": 1}, stores=stores, unit=unit)
    sizes = {**SIZES, "packing": "best_fit", "seq_len": 512}
    plan = batchloom.Loader(mixture, **sizes, steps=200).plan
    rows = plan.rows(0, 1600)
    by = {
        "tokens": np.bincount(rows.sources, rows.lengths),
        "documents": np.bincount(rows.sources),
        "epochs": np.bincount(rows.sources, rows.lengths) / [plan.stores[name].tokens for name in plan.stores],
    }[unit]
    assert by[0] / by[1] == pytest.approx(1, abs=0.06)


def test_a_run_goes_on_and_knows_its_generation(tmp_path):
    save(MADE["qwen2_vl"](), tmp_path / "processor")
    made(tmp_path, "first", 6)
    loader = batchloom.Loader(chosen(tmp_path, "image"), **(SIZES | {"global_batch_size": 2}))
    iterator = iter(loader)
    wanted = [batch["input_ids"] for batch in loader]
    next(iterator)
    state = loader.state_dict()
    again = batchloom.Loader(chosen(tmp_path, "image"), **(SIZES | {"global_batch_size": 2}))
    again.load_state_dict(state)
    assert all(np.array_equal(b["input_ids"], wanted[b.step]) for b in again)
    first = chosen(tmp_path, "image")
    made(tmp_path, "second", 3)
    store = chosen(tmp_path, "image")
    assert store.location.generation == 2
    assert store.contents.find_generation(first.fingerprint) == 1
    assert store.contents.find_generation(chosen(tmp_path, generation=1).fingerprint) is None
    assert store.lengths.layers == chosen(tmp_path).lengths.layers
    assert documents_of(first)[0] < documents_of(store)[0]
    with pytest.raises(batchloom.StateError, match=r"generation 1 .* generation=1"):
        batchloom.Loader(store, **(SIZES | {"global_batch_size": 2})).load_state_dict(state)


def test_it_goes_to_other_processes(place):
    store = chosen(place, "image")
    again = pickle.loads(pickle.dumps(store))
    assert (again.contents.media, again.fingerprint, again.tokens) == (
        "image",
        store.fingerprint,
        store.tokens,
    )
    assert np.array_equal(again.lengths.slice(0, 50), store.lengths.slice(0, 50))


def test_why_a_document_is_not_served(place):
    image = chosen(place, "image")
    text = int(np.flatnonzero(image.lengths.slice(0, len(image)) == 0)[0])
    plan = batchloom.Loader(image, **SIZES).plan
    assert batchloom.when(plan, document=text) == ()
    told = explain_unserved(plan, 0, text, plan.steps - 1)
    assert "its media are not the ones that source 'data' takes from its store (media='image')" in told


words = st.lists(st.sampled_from(MEDIUM_KINDS), min_size=1, max_size=3, unique=True)


@given(words)
def test_each_set_of_kinds_has_one_word(kinds):
    word = normalize_media_filter("+".join(kinds))
    assert word == normalize_media_filter("+".join(reversed(kinds)))
    every = {"none", *("+".join(k for k in MEDIUM_KINDS if k in kinds) for kinds in _all_sets())}
    assert sum(_mask_kind_sets(one).astype(int) for one in every).tolist() == [1] * 8
    assert _mask_kind_sets(word).sum() == 1
    assert np.array_equal(_mask_kind_sets("any"), ~_mask_kind_sets("none"))


def _all_sets():
    return [[kind for bit, kind in enumerate(MEDIUM_KINDS) if n >> bit & 1] for n in range(1, 8)]


@pytest.mark.parametrize("asked", ["", "picture", "image+image", "image+none", "+", 5, ["image"]])
def test_words_that_are_none(place, asked):
    with pytest.raises(SettingsError, match="media: .* is not one of none, any, image, audio, video"):
        chosen(place, asked)


def test_what_holds_none_of_it(place, tmp_path):
    with pytest.raises(InputError, match=r"with media 'audio'; it has: 48 none, 16 image"):
        chosen(place, "audio")
    write_store(tmp_path / "plain", [[1, 2, 3], [4, 5]])
    assert batchloom.open_store(tmp_path / "plain", media="none").tokens == 5
    with pytest.raises(InputError, match="it has: 2 none"):
        batchloom.open_store(tmp_path / "plain", media="any")
    for bare in (tmp_path / "plain" / "train" / "shard_00000", "dummy"):
        with pytest.raises(SettingsError, match="only stores have media"):
            batchloom.open_store(bare, media="none")
    (tmp_path / "mix.yaml").write_text(f"weights: {{a: 1}}\nstores: {{a: {{path: {place}/store, media: pictures}}}}\n")
    with pytest.raises(SettingsError, match=r"stores.a: media: 'pictures' is not one of"):
        read_mixture(tmp_path / "mix.yaml")


def test_texts_of_a_store_with_media_are_plain_texts(place):
    loader = batchloom.Loader(chosen(place, media="none"), **SIZES)
    assert not loader.holds_media
    assert loader[0]["position_ids"].ndim == 2
    check_text_only(loader, "a trainer")
