import json
import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import batchloom
from batchloom import SettingsError, StateError
from batchloom.batches import IGNORE_INDEX, Augment
from batchloom.core.fingerprint import derive_key
from batchloom.core.keyed_hashing import GOLDEN, mix_int
from batchloom.testing import write_store
from tiers import examples

END = 256
MASK = 300
MLM = Augment(mask_prob=0.15, mask_id=MASK, vocab_size=301)
NOISE = Augment(noise_prob=0.1)
DROP = Augment(loss_drop_prob=0.3)
KINDS = [MLM, NOISE, DROP, Augment(noise_prob=0.2, loss_drop_prob=0.1, seed=3)]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rng = np.random.default_rng(0)
    documents = [[*rng.integers(0, 256, rng.integers(1, 90)).tolist(), END] for _ in range(600)]
    return write_store(tmp_path_factory.mktemp("store"), documents, documents_per_shard=150)


@pytest.fixture(scope="module")
def masked_store(tmp_path_factory):
    rng = np.random.default_rng(1)
    documents = [rng.integers(0, 256, rng.integers(2, 90)).tolist() for _ in range(300)]
    trained = [(rng.random(len(ids)) < 0.5).astype(int).tolist() for ids in documents]
    return write_store(tmp_path_factory.mktemp("masked"), documents, trained=trained)


def make(store, augment=None, **options):
    usual = {"seq_len": 63, "global_batch_size": 12, "output": "numpy", "rank": 0, "world_size": 1}
    return batchloom.Loader(store, augment=augment, **{**usual, **options})


def flat(batches, key):
    return np.concatenate([batch[key].ravel() for batch in batches])


def same(one, two):
    return all(np.array_equal(one[key], two[key]) for key in ("input_ids", "labels"))


def within(count, of, share):
    """Whether a count lies within six standard deviations of what a share gives."""
    return abs(count - of * share) <= 6 * math.sqrt(of * share * (1 - share)) + 1e-9


def test_off_by_default(store):
    plain = make(store)
    assert plain.augmentation is make(store, Augment(mask_id=3)).augmentation is None
    assert "augment" not in plain.state_dict()
    assert same(plain[3], make(store, Augment())[3])


def test_settings_may_be_plain(store):
    assert same(make(store, {"noise_prob": 0.1})[1], make(store, NOISE)[1])


def test_the_order_does_not_change(store):
    assert make(store).plan.fingerprint == make(store, NOISE).plan.fingerprint


@given(data=st.data(), kind=st.sampled_from(KINDS), prefetch=st.sampled_from([0, 2]))
@settings(max_examples=examples(25))
def test_any_topology_and_any_resume_give_the_same_tokens(store, data, kind, prefetch):
    whole = list(make(store, kind, epochs=2))
    stop = data.draw(st.integers(0, len(whole)))
    state = make(store, kind, epochs=2).plan.state(stop * 12)
    world = data.draw(st.sampled_from([1, 2, 3, 4, 6, 12]))
    parts = []
    for rank in range(world):
        loader = make(store, kind, epochs=2, rank=rank, world_size=world, prefetch=prefetch)
        loader.load_state_dict({**state, **_entry(loader)})
        parts.append(list(loader))
    for offset, expected in enumerate(whole[stop:]):
        for key in ("input_ids", "labels"):
            together = np.concatenate([part[offset][key] for part in parts])
            assert np.array_equal(together, expected[key])


def _entry(loader):
    state = json.loads(json.dumps(loader.state_dict()))
    return {"augment": state["augment"]}


@pytest.mark.parametrize("packing", ["best_fit", "none", "wrap"])
@pytest.mark.parametrize("kind", KINDS)
def test_both_forms_change_the_same_tokens(store, kind, packing):
    rows, varlen = (make(store, kind, packing=packing, form=form) for form in ("rows", "varlen"))
    step = len(rows) - 1
    for number in (0, 1, step):
        plan = rows.plan.rows(number * 12, number * 12 + 12)
        row_of = np.repeat(np.arange(12), np.diff(plan.pointers))
        begins = row_of * 63 + plan.row_offsets
        places = np.concatenate([np.arange(a, a + n) for a, n in zip(begins, plan.lengths, strict=True)])
        for key in ("input_ids", "labels"):
            assert np.array_equal(rows[number][key].ravel()[places], varlen[number][key].ravel())


@pytest.mark.parametrize("kind", [NOISE, DROP])
def test_both_forms_of_labels_train_the_same_set(store, kind):
    aligned, shifted = (make(store, kind, labels=form)[2] for form in ("aligned", "shifted"))
    assert np.array_equal(aligned["input_ids"], shifted["input_ids"])
    assert np.array_equal(aligned["labels"].ravel()[1:], shifted["labels"].ravel()[:-1])


def test_masked_tokens_are_told_where_they_stand(store):
    plain, masked = list(make(store, epochs=4)), list(make(store, MLM, epochs=4))
    ids, labels = flat(plain, "input_ids"), flat(plain, "labels")
    seen, targets = flat(masked, "input_ids"), flat(masked, "labels")
    chosen = targets != IGNORE_INDEX
    eligible = (labels != IGNORE_INDEX) & (ids != END)
    assert not (chosen & ~eligible).any()
    assert np.array_equal(targets[chosen], ids[chosen])
    assert np.array_equal(seen[~chosen], ids[~chosen])
    count = int(chosen.sum())
    assert within(count, int(eligible.sum()), 0.15)
    assert within(int((seen[chosen] == MASK).sum()), count, 0.8)
    # Of 256 ids that a token may become one is itself.
    changed = (seen[chosen] != MASK) & (seen[chosen] != ids[chosen])
    assert within(int(changed.sum()), count, 0.1 * 255 / 256)
    assert seen[chosen][changed].max() < END


def test_noise_changes_inputs_and_no_label(store):
    plain, noisy = list(make(store, epochs=4)), list(make(store, NOISE, epochs=4))
    ids, labels = flat(plain, "input_ids"), flat(plain, "labels")
    seen = flat(noisy, "input_ids")
    assert np.array_equal(flat(noisy, "labels"), labels)
    changed = seen != ids
    eligible = (labels != IGNORE_INDEX) & (ids != END)
    assert not (changed & ~eligible).any()
    assert within(int(changed.sum()), int(eligible.sum()), 0.1 * 255 / 256)
    new = np.bincount(seen[changed], minlength=301)
    assert new[256:].sum() == 0
    assert all(within(int(count), int(changed.sum()), 1 / 256) for count in new[:256])


def test_dropped_loss_changes_labels_alone(store):
    plain, dropped = list(make(store, epochs=4)), list(make(store, DROP, epochs=4))
    before, after = flat(plain, "labels"), flat(dropped, "labels")
    assert np.array_equal(flat(plain, "input_ids"), flat(dropped, "input_ids"))
    gone = before != after
    assert (after[gone] == IGNORE_INDEX).all()
    assert within(int(gone.sum()), int((before != IGNORE_INDEX).sum()), 0.3)


@pytest.mark.parametrize("share", [1e-3, 0.5, 1.0])
def test_every_rate_holds(store, share):
    plain = list(make(store, epochs=8))
    labels = flat(plain, "labels")
    after = flat(make(store, Augment(loss_drop_prob=share), epochs=8), "labels")
    assert within(int((labels != after).sum()), int((labels != IGNORE_INDEX).sum()), share)


def test_prompts_stay_as_they_are(masked_store):
    plain, noisy = make(masked_store)[0], make(masked_store, Augment(noise_prob=1.0))[0]
    untrained = plain["labels"] == IGNORE_INDEX
    assert np.array_equal(plain["input_ids"][untrained], noisy["input_ids"][untrained])
    assert (plain["input_ids"][~untrained] != noisy["input_ids"][~untrained]).mean() > 0.97
    masked = make(masked_store, MLM)[0]
    assert (masked["labels"][untrained] == IGNORE_INDEX).all()


def test_epochs_and_neighbours_and_seeds_share_nothing(store):
    def chosen(augment, batches):
        return [make(store, augment)[n]["labels"] != make(store)[n]["labels"] for n in batches]

    half = Augment(loss_drop_prob=0.5)
    one, two = chosen(half, [0, 1])
    (other,) = chosen(Augment(loss_drop_prob=0.5, seed=1), [0])
    trained = [make(store)[n]["labels"] != IGNORE_INDEX for n in (0, 1)]
    both = trained[0] & trained[1]
    assert within(int((one ^ two)[both].sum()), int(both.sum()), 0.5)
    assert within(int((one ^ other)[trained[0]].sum()), int(trained[0].sum()), 0.5)
    # The two draws of a word, and places a column apart.
    for apart in (1, 2):
        pair = trained[0][:, apart:] & trained[0][:, :-apart]
        differ = (one[:, apart:] ^ one[:, :-apart])[pair]
        assert within(int(differ.sum()), differ.size, 0.5)


def test_each_epoch_changes_other_tokens(store):
    options = {"shuffle": False, "epochs": 2, "global_batch_size": 1}
    half, plain = make(store, Augment(loss_drop_prob=0.5), **options), make(store, **options)
    again = plain.plan.orders.sequences_per_epoch
    assert np.array_equal(plain[0]["labels"], plain[again]["labels"])
    one, two = (half[step]["labels"][plain[0]["labels"] != IGNORE_INDEX] for step in (0, again))
    assert within(int((one != two).sum()), one.size, 0.5)


def test_the_tokens_are_pinned(store):
    """What a seed chooses is part of a run: a change of the arithmetic is a change of data."""
    batch = make(store, Augment(loss_drop_prob=0.25, seed=7), packing="none", shuffle=False)[0]
    plain = make(store, packing="none", shuffle=False)[0]
    gone = np.flatnonzero(batch["labels"][0] != plain["labels"][0])
    assert gone.tolist() == PINNED
    trained = np.flatnonzero(plain["labels"][0] != IGNORE_INDEX).tolist()
    assert [at for at in trained if draw(7, "drop", 0, at) < 1 << 30] == PINNED


PINNED = [7, 9, 14, 16, 17, 22, 24, 42, 47, 56]


def draw(seed, purpose, position, place):
    """One draw in plain integers, as docs/augmentation.md says it is made."""
    first, second = derive_key("augment", seed, purpose)
    start = mix_int(mix_int((position + first) % 2**64) ^ second)
    word = mix_int((start + (place // 2 + 1) * GOLDEN) % 2**64)
    return word >> 32 if place % 2 else word % 2**32


def test_a_state_of_other_augmentation_is_refused_by_field(store):
    state = json.loads(json.dumps(make(store, NOISE).state_dict()))
    make(store, NOISE).load_state_dict(state)
    with pytest.raises(StateError, match=r"augment.noise_prob was 0.1 and is 0.0"):
        make(store).load_state_dict(state)
    with pytest.raises(StateError, match=r"augment.noise_prob was 0.0 and is 0.1"):
        make(store, NOISE).load_state_dict(make(store).state_dict())
    with pytest.raises(StateError, match=r"augment.seed was 0 and is 1"):
        make(store, Augment(noise_prob=0.1, seed=1)).load_state_dict(state)
    with pytest.raises(StateError, match="not a loader's state"):
        make(store).load_state_dict([])


def test_every_wrong_setting_is_told_at_once():
    with pytest.raises(SettingsError) as caught:
        Augment(mask_prob=1.5, noise_prob=math.nan, loss_drop_prob=True, mask_id=-1, seed="x")
    told = {problem.split(":")[0] for problem in caught.value.problems}
    names = ("mask_prob", "noise_prob", "loss_drop_prob", "mask_id", "seed")
    assert told == {f"augment.{name}" for name in names}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mask_prob": 0.1, "noise_prob": 0.1}, "exclude each other"),
        ({"mask_replace_prob": 0.8, "random_replace_prob": 0.3}, "it is 1.1, more than 1"),
        ({"noise_prob": "0.1"}, "'0.1' is not a probability"),
        ({"noise_prob": -0.1}, "-0.1 is not a probability"),
        ({"special_ids": (1, -2)}, "-2 is not an id"),
        ({"special_ids": "ab"}, "'ab' is not a tuple of ids"),
    ],
)
def test_contradictions_are_refused(options, said):
    with pytest.raises(SettingsError, match=said):
        Augment(**options)


@pytest.mark.parametrize(
    ("augment", "said"),
    [
        (Augment(mask_prob=0.1), "mask_id: missing"),
        (Augment(mask_prob=0.1, mask_id=257), "mask_id: 257 is outside the vocabulary"),
        (Augment(noise_prob=0.1, vocab_size=10), "vocab_size: 10 is less than the 257 ids"),
        (Augment(noise_prob=0.1, special_ids=(999,)), "special_ids: 999 is outside"),
        (Augment(noise_prob=0.1, special_ids=tuple(range(256))), "no other id"),
        ({"noise_prb": 0.1}, "augment.noise_prb: unknown setting; did you mean 'noise_prob'"),
        ({"noise_prob": 2}, "augment.noise_prob: 2.0 is not a probability"),
        (0.1, "is not an Augment"),
    ],
)
def test_what_does_not_fit_the_store_is_refused(store, augment, said):
    with pytest.raises(SettingsError, match=said):
        make(store, augment)


def test_masking_refuses_labels_of_the_next_token(store):
    with pytest.raises(SettingsError, match="labels='aligned'"):
        make(store, MLM, labels="shifted")


def test_a_bare_prefix_needs_the_size_of_its_vocabulary(store):
    prefix = batchloom.open_store(next((store.path / "train").glob("*.bin")))
    with pytest.raises(SettingsError, match="vocab_size: missing"):
        make(prefix, NOISE)
    augment = Augment(noise_prob=0.5, vocab_size=257, special_ids=(END,))
    ids, seen = make(prefix)[0]["input_ids"], make(prefix, augment)[0]["input_ids"]
    assert np.array_equal(ids == END, seen == END)
    assert (ids != seen).mean() > 0.3
    assert same(make(prefix, DROP)[0], make(prefix, DROP)[0])


def test_the_tokenizers_own_mask_token_is_found(tmp_path):
    from batchloom.tokens import train_tokenizer

    whole = train_tokenizer(["ab ab ab"], 258).state()["tokenizer"]
    added = {**whole["added_tokens"][0], "id": 258, "content": "[MASK]"}
    whole["added_tokens"].append(added)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(whole))
    store = write_store(tmp_path / "s", [list(range(60))] * 20, tokenizer=str(path))
    loader = make(store, Augment(mask_prob=0.5))
    assert loader.augmentation.settings.mask_id == 258
    assert loader.state_dict()["augment"]["mask_id"] == 258
    assert (loader[0]["input_ids"] == 258).any()
