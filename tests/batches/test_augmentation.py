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


def make_loader(store, augment=None, **options):
    defaults = {"seq_len": 63, "global_batch_size": 12, "output": "numpy", "rank": 0, "world_size": 1}
    return batchloom.Loader(store, augment=augment, **{**defaults, **options})


def concat(batches, key):
    return np.concatenate([batch[key].ravel() for batch in batches])


def have_same_arrays(first, second):
    return all(np.array_equal(first[key], second[key]) for key in ("input_ids", "labels"))


def is_near_share(count, of, share):
    """Return whether a count is within six standard deviations of a share."""
    return abs(count - of * share) <= 6 * math.sqrt(of * share * (1 - share)) + 1e-9


def test_off_by_default(store):
    plain = make_loader(store)
    assert plain.feed.augmentation is make_loader(store, Augment(mask_id=3)).feed.augmentation is None
    assert "augment" not in plain.state_dict()
    assert have_same_arrays(plain[3], make_loader(store, Augment())[3])


def test_settings_may_be_plain(store):
    assert have_same_arrays(make_loader(store, {"noise_prob": 0.1})[1], make_loader(store, NOISE)[1])


def test_the_order_does_not_change(store):
    assert make_loader(store).plan.fingerprint == make_loader(store, NOISE).plan.fingerprint


@given(data=st.data(), kind=st.sampled_from(KINDS), prefetch=st.sampled_from([0, 2]))
@settings(max_examples=examples(25))
def test_any_topology_and_any_resume_give_the_same_tokens(store, data, kind, prefetch):
    full_run = list(make_loader(store, kind, epochs=2))
    stop = data.draw(st.integers(0, len(full_run)))
    state = make_loader(store, kind, epochs=2).plan.state(stop * 12)
    world = data.draw(st.sampled_from([1, 2, 3, 4, 6, 12]))
    parts = []
    for rank in range(world):
        loader = make_loader(store, kind, epochs=2, rank=rank, world_size=world, prefetch=prefetch)
        loader.load_state_dict({**state, **_get_augment_entry(loader)})
        parts.append(list(loader))
    for offset, expected in enumerate(full_run[stop:]):
        for key in ("input_ids", "labels"):
            together = np.concatenate([part[offset][key] for part in parts])
            assert np.array_equal(together, expected[key])


def _get_augment_entry(loader):
    state = json.loads(json.dumps(loader.state_dict()))
    return {"augment": state["augment"]}


@pytest.mark.parametrize("packing", ["best_fit", "none", "wrap"])
@pytest.mark.parametrize("kind", KINDS)
def test_both_forms_change_the_same_tokens(store, kind, packing):
    rows, varlen = (make_loader(store, kind, packing=packing, form=form) for form in ("rows", "varlen"))
    step = len(rows) - 1
    for number in (0, 1, step):
        plan = rows.plan.rows(number * 12, number * 12 + 12)
        row_of = np.repeat(np.arange(12), np.diff(plan.pointers))
        begins = row_of * 63 + plan.row_offsets
        indices = np.concatenate([np.arange(a, a + n) for a, n in zip(begins, plan.lengths, strict=True)])
        for key in ("input_ids", "labels"):
            assert np.array_equal(rows[number][key].ravel()[indices], varlen[number][key].ravel())


@pytest.mark.parametrize("kind", [NOISE, DROP])
def test_both_forms_of_labels_train_the_same_set(store, kind):
    aligned, shifted = (make_loader(store, kind, labels=form)[2] for form in ("aligned", "shifted"))
    assert np.array_equal(aligned["input_ids"], shifted["input_ids"])
    assert np.array_equal(aligned["labels"].ravel()[1:], shifted["labels"].ravel()[:-1])


def test_masked_tokens_have_their_ids_as_labels(store):
    plain, masked = list(make_loader(store, epochs=4)), list(make_loader(store, MLM, epochs=4))
    ids, labels = concat(plain, "input_ids"), concat(plain, "labels")
    masked_ids, targets = concat(masked, "input_ids"), concat(masked, "labels")
    chosen = targets != IGNORE_INDEX
    eligible = (labels != IGNORE_INDEX) & (ids != END)
    assert not (chosen & ~eligible).any()
    assert np.array_equal(targets[chosen], ids[chosen])
    assert np.array_equal(masked_ids[~chosen], ids[~chosen])
    count = int(chosen.sum())
    assert is_near_share(count, int(eligible.sum()), 0.15)
    assert is_near_share(int((masked_ids[chosen] == MASK).sum()), count, 0.8)
    # A random id equals the original one in 1 of 256 cases.
    changed = (masked_ids[chosen] != MASK) & (masked_ids[chosen] != ids[chosen])
    assert is_near_share(int(changed.sum()), count, 0.1 * 255 / 256)
    assert masked_ids[chosen][changed].max() < END


def test_noise_changes_inputs_and_no_label(store):
    plain, noisy = list(make_loader(store, epochs=4)), list(make_loader(store, NOISE, epochs=4))
    ids, labels = concat(plain, "input_ids"), concat(plain, "labels")
    noisy_ids = concat(noisy, "input_ids")
    assert np.array_equal(concat(noisy, "labels"), labels)
    changed = noisy_ids != ids
    eligible = (labels != IGNORE_INDEX) & (ids != END)
    assert not (changed & ~eligible).any()
    assert is_near_share(int(changed.sum()), int(eligible.sum()), 0.1 * 255 / 256)
    new = np.bincount(noisy_ids[changed], minlength=301)
    assert new[256:].sum() == 0
    assert all(is_near_share(int(count), int(changed.sum()), 1 / 256) for count in new[:256])


def test_dropped_loss_changes_labels_alone(store):
    plain, dropped = list(make_loader(store, epochs=4)), list(make_loader(store, DROP, epochs=4))
    before, after = concat(plain, "labels"), concat(dropped, "labels")
    assert np.array_equal(concat(plain, "input_ids"), concat(dropped, "input_ids"))
    changed = before != after
    assert (after[changed] == IGNORE_INDEX).all()
    assert is_near_share(int(changed.sum()), int((before != IGNORE_INDEX).sum()), 0.3)


@pytest.mark.parametrize("share", [1e-3, 0.5, 1.0])
def test_every_rate_holds(store, share):
    plain = list(make_loader(store, epochs=8))
    labels = concat(plain, "labels")
    after = concat(make_loader(store, Augment(loss_drop_prob=share), epochs=8), "labels")
    assert is_near_share(int((labels != after).sum()), int((labels != IGNORE_INDEX).sum()), share)


def test_prompts_stay_as_they_are(masked_store):
    plain, noisy = make_loader(masked_store)[0], make_loader(masked_store, Augment(noise_prob=1.0))[0]
    untrained = plain["labels"] == IGNORE_INDEX
    assert np.array_equal(plain["input_ids"][untrained], noisy["input_ids"][untrained])
    assert (plain["input_ids"][~untrained] != noisy["input_ids"][~untrained]).mean() > 0.97
    masked = make_loader(masked_store, MLM)[0]
    assert (masked["labels"][untrained] == IGNORE_INDEX).all()


def test_epochs_and_neighbours_and_seeds_share_nothing(store):
    def find_dropped(augment, batches):
        return [make_loader(store, augment)[n]["labels"] != make_loader(store)[n]["labels"] for n in batches]

    half_dropped = Augment(loss_drop_prob=0.5)
    first, second = find_dropped(half_dropped, [0, 1])
    (other_seed,) = find_dropped(Augment(loss_drop_prob=0.5, seed=1), [0])
    trained = [make_loader(store)[n]["labels"] != IGNORE_INDEX for n in (0, 1)]
    both_trained = trained[0] & trained[1]
    assert is_near_share(int((first ^ second)[both_trained].sum()), int(both_trained.sum()), 0.5)
    assert is_near_share(int((first ^ other_seed)[trained[0]].sum()), int(trained[0].sum()), 0.5)
    # The two draws of one 64-bit word, and neighboring columns.
    for distance in (1, 2):
        pair = trained[0][:, distance:] & trained[0][:, :-distance]
        differ = (first[:, distance:] ^ first[:, :-distance])[pair]
        assert is_near_share(int(differ.sum()), differ.size, 0.5)


def test_each_epoch_changes_other_tokens(store):
    options = {"shuffle": False, "epochs": 2, "global_batch_size": 1}
    dropped, plain = make_loader(store, Augment(loss_drop_prob=0.5), **options), make_loader(store, **options)
    epoch_length = plain.plan.orders.sequences_per_epoch
    assert np.array_equal(plain[0]["labels"], plain[epoch_length]["labels"])
    first, second = (dropped[step]["labels"][plain[0]["labels"] != IGNORE_INDEX] for step in (0, epoch_length))
    assert is_near_share(int((first != second).sum()), first.size, 0.5)


def test_the_tokens_are_pinned(store):
    """The choices of a seed are data: a change of the arithmetic changes runs."""
    batch = make_loader(store, Augment(loss_drop_prob=0.25, seed=7), packing="none", shuffle=False)[0]
    plain = make_loader(store, packing="none", shuffle=False)[0]
    dropped = np.flatnonzero(batch["labels"][0] != plain["labels"][0])
    assert dropped.tolist() == PINNED
    trained = np.flatnonzero(plain["labels"][0] != IGNORE_INDEX).tolist()
    assert [at for at in trained if draw(7, "drop", 0, at) < 1 << 30] == PINNED


PINNED = [7, 9, 14, 16, 17, 22, 24, 42, 47, 56]


def draw(seed, purpose, position, column):
    """Return one draw in plain integers, as docs/reference/seeded-choices.md defines it."""
    first, second = derive_key("augment", seed, purpose)
    start = mix_int(mix_int((position + first) % 2**64) ^ second)
    word = mix_int((start + (column // 2 + 1) * GOLDEN) % 2**64)
    return word >> 32 if column % 2 else word % 2**32


def test_a_state_of_other_augmentation_is_refused_by_field(store):
    state = json.loads(json.dumps(make_loader(store, NOISE).state_dict()))
    make_loader(store, NOISE).load_state_dict(state)
    with pytest.raises(StateError, match=r"augment.noise_prob was 0.1 and is 0.0"):
        make_loader(store).load_state_dict(state)
    with pytest.raises(StateError, match=r"augment.noise_prob was 0.0 and is 0.1"):
        make_loader(store, NOISE).load_state_dict(make_loader(store).state_dict())
    with pytest.raises(StateError, match=r"augment.seed was 0 and is 1"):
        make_loader(store, Augment(noise_prob=0.1, seed=1)).load_state_dict(state)
    with pytest.raises(StateError, match="not a loader's state"):
        make_loader(store).load_state_dict([])


def test_every_wrong_setting_is_reported_at_once():
    with pytest.raises(SettingsError) as caught:
        Augment(mask_prob=1.5, noise_prob=math.nan, loss_drop_prob=True, mask_id=-1, seed="x")
    reported = {problem.split(":")[0] for problem in caught.value.problems}
    names = ("mask_prob", "noise_prob", "loss_drop_prob", "mask_id", "seed")
    assert reported == {f"augment.{name}" for name in names}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_prob": 0.1, "noise_prob": 0.1}, "exclude each other"),
        ({"mask_replace_prob": 0.8, "random_replace_prob": 0.3}, "it is 1.1, more than 1"),
        ({"noise_prob": "0.1"}, "'0.1' is not a probability"),
        ({"noise_prob": -0.1}, "-0.1 is not a probability"),
        ({"special_ids": (1, -2)}, "-2 is not an id"),
        ({"special_ids": "ab"}, "'ab' is not a tuple of ids"),
    ],
)
def test_contradictions_are_refused(options, message):
    with pytest.raises(SettingsError, match=message):
        Augment(**options)


@pytest.mark.parametrize(
    ("augment", "message"),
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
def test_what_does_not_fit_the_store_is_refused(store, augment, message):
    with pytest.raises(SettingsError, match=message):
        make_loader(store, augment)


def test_masking_refuses_labels_of_the_next_token(store):
    with pytest.raises(SettingsError, match="labels='aligned'"):
        make_loader(store, MLM, labels="shifted")


def test_a_bare_prefix_needs_the_size_of_its_vocabulary(store):
    prefix = batchloom.open_store(next((store.path / "train").glob("*.bin")))
    with pytest.raises(SettingsError, match="vocab_size: missing"):
        make_loader(prefix, NOISE)
    augment = Augment(noise_prob=0.5, vocab_size=257, special_ids=(END,))
    ids, noisy_ids = make_loader(prefix)[0]["input_ids"], make_loader(prefix, augment)[0]["input_ids"]
    assert np.array_equal(ids == END, noisy_ids == END)
    assert (ids != noisy_ids).mean() > 0.3
    assert have_same_arrays(make_loader(prefix, DROP)[0], make_loader(prefix, DROP)[0])


def test_the_tokenizers_own_mask_token_is_found(tmp_path):
    from batchloom.tokens import train_tokenizer

    definition = train_tokenizer(["ab ab ab"], 258).state()["tokenizer"]
    added = {**definition["added_tokens"][0], "id": 258, "content": "[MASK]"}
    definition["added_tokens"].append(added)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(definition))
    store = write_store(tmp_path / "s", [list(range(60))] * 20, tokenizer=str(path))
    loader = make_loader(store, Augment(mask_prob=0.5))
    assert loader.feed.augmentation.settings.mask_id == 258
    assert loader.state_dict()["augment"]["mask_id"] == 258
    assert (loader[0]["input_ids"] == 258).any()
