"""Loss weights change the loss and the gradient of every trainer alike."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional

import batchloom
from batchloom import InputError
from batchloom.batches import IGNORE_INDEX
from batchloom.examples.job import adamw, tiny_model
from batchloom.testing import write_store

transformers = pytest.importorskip("transformers")

from batchloom.adapters import (
    FSDP2Arguments,
    FSDP2SFTTrainer,
    apply_loss_weights,
    compute_loss,
    sum_next_token_losses,
    sum_token_losses,
)
from batchloom.adapters.hugging_face import make_trainer_parts
from batchloom.core.errors import TrainError

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]
SIZES = {"seq_len": 32, "global_batch_size": 4}
STEPS = 4


def write_weighted_store(folder, weights=(0, 0.25, 1, 2, 10)):
    rng = np.random.default_rng(7)
    documents = [rng.choice([5, 17, 99, 180], rng.integers(2, 40)).tolist() for _ in range(80)]
    return write_store(folder, documents, trained=[rng.choice(weights, len(ids)).tolist() for ids in documents])


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_weighted_store(tmp_path_factory.mktemp("weights") / "s")


def make_loader(store, **settings):
    return batchloom.Loader(store, **{**SIZES, "steps": STEPS, **settings}, rank=0, world_size=1)


def test_a_loss_does_not_shift_labels_twice(store):
    batch = make_loader(store, labels="shifted")[0]
    with pytest.raises(InputError, match=r"shift them again\. Give Loader\(labels='aligned'\)"):
        compute_loss(None, batch, 1)


def compute_reference_loss(model, batch):
    """Return the weighted sum of the losses of single tokens, divided by their number."""
    logits = model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits.float()
    total, count = 0.0, 0
    for row, labels in enumerate(batch["labels"]):
        for position in range(1, labels.numel()):
            if labels[position] != IGNORE_INDEX:
                log_probability = functional.log_softmax(logits[row, position - 1], -1)[labels[position]]
                total = total - log_probability * batch["loss_weights"][row, position]
                count += 1
    return total / count


@pytest.fixture(scope="module")
def expected_losses(store):
    """Losses of a loop in plain torch."""
    model, losses = tiny_model(store), []
    optimizer = adamw(model.parameters(), 1e-3)
    for batch in make_loader(store):
        loss = compute_reference_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_sums_of_weighted_losses():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 6, 11, generator=generator)
    labels = torch.randint(0, 11, (2, 6), generator=generator)
    labels[0, 2] = IGNORE_INDEX
    weights = torch.rand(2, 6, generator=generator)
    each = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
    torch.testing.assert_close(sum_next_token_losses(logits, labels, weights), (each * weights[:, 1:].flatten()).sum())
    torch.testing.assert_close(sum_next_token_losses(logits, labels, torch.ones(2, 6)), each.sum())
    assert sum_next_token_losses(logits, labels) == sum_token_losses(
        logits.flatten(0, 1), functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX).flatten()
    )


def compute_own_loss(model, part, count):
    return model(**part, use_cache=False, num_items_in_batch=count).loss


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("compute", [compute_own_loss, compute_loss])
def test_a_model_of_transformers_applies_weights(store, expected_losses, passes, compute):
    model = tiny_model(store)
    if compute is compute_own_loss:
        apply_loss_weights(model)
    optimizer, losses = adamw(model.parameters(), 1e-3), []
    loader = make_loader(store)
    for batch in loader:
        count, total = loader.trained_tokens(batch.step), 0.0
        for part in batch.split(4 // passes):
            loss = compute(model, part, count)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    assert losses == pytest.approx(expected_losses, rel=1e-4)


def test_a_model_without_weights_in_its_batch_has_its_own_loss(store):
    plain, weighted = tiny_model(store), tiny_model(store)
    apply_loss_weights(weighted)
    batch = {name: value for name, value in make_loader(store)[0].items() if name != "loss_weights"}
    assert weighted(**batch, use_cache=False).loss == plain(**batch, use_cache=False).loss
    count = int((batch["labels"][:, 1:] != IGNORE_INDEX).sum())
    torch.testing.assert_close(compute_loss(plain, batch, count), plain(**batch, use_cache=False).loss)
    ones = (batch["labels"] != IGNORE_INDEX).float()
    torch.testing.assert_close(
        weighted(**batch, loss_weights=ones, use_cache=False).loss, plain(**batch, use_cache=False).loss
    )
    shifted = make_loader(store, labels="shifted")[0]
    inputs = {"input_ids": shifted["input_ids"], "position_ids": shifted["position_ids"], "use_cache": False}
    loss = weighted(
        **inputs, labels=shifted["labels"], shift_labels=shifted["labels"], loss_weights=shifted["loss_weights"]
    ).loss
    assert loss.item() == pytest.approx(compute_reference_loss(plain, make_loader(store)[0]).item(), rel=1e-4)


def test_a_model_that_is_none_of_transformers_is_refused():
    with pytest.raises(InputError, match="Linear does not pass loss_weights on to its loss. Compute the loss from"):
        apply_loss_weights(torch.nn.Linear(2, 2))


def make_trainer(store, folder, **settings):
    args = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        train_sampling_strategy="sequential",
        lr_scheduler_type="constant",
        max_grad_norm=0,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        report_to="none",
    )
    parts, model = make_trainer_parts(make_loader(store), args), tiny_model(store)
    settings = {"compute_loss_func": parts.loss, **settings}
    return transformers.Trainer(
        model,
        args,
        train_dataset=parts.dataset,
        data_collator=parts.collator,
        callbacks=[parts.callback],
        optimizers=(adamw(model.parameters(), 1e-3), None),
        **settings,
    )


def test_the_trainer_of_hugging_face_applies_weights(store, expected_losses, tmp_path):
    trainer = make_trainer(store, tmp_path)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses == pytest.approx(expected_losses, rel=1e-3)


@pytest.mark.slow
def test_a_trainer_with_its_own_loss_is_refused(store, tmp_path):
    with pytest.raises(TrainError, match="the trainer's loss does not apply them: give the trainer compute_loss_func"):
        make_trainer(store, tmp_path, compute_loss_func=None).train()


def make_fsdp2_trainer(store, folder, **settings):
    args = FSDP2Arguments(
        output_dir=str(folder),
        max_length=32,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
    )
    return FSDP2SFTTrainer(model=tiny_model(store), args=args, train_dataset=make_loader(store), **settings)


def test_the_fsdp2_trainer_applies_weights(store, expected_losses, tmp_path):
    trainer = make_fsdp2_trainer(store, tmp_path)
    trainer.train()
    assert trainer.log_history[0]["loss"] == pytest.approx(expected_losses[0], rel=1e-4)


def test_a_collator_that_leaves_weights_out_is_refused(store, tmp_path):
    names = ("input_ids", "labels", "position_ids")

    def collate(rows):
        return {name: torch.stack([row[name] for row in rows]) for name in names}

    with pytest.raises(InputError, match="data_collator leaves out loss_weights"):
        make_fsdp2_trainer(store, tmp_path, data_collator=collate).train()


def test_the_model_of_batchloom_applies_weights(store):
    from batchloom.train import GPT, ModelSettings

    model = GPT(ModelSettings(layers=1, width=32, heads=2), 257, 0)
    batch = make_loader(store)[0]
    arguments = [batch[name] for name in ("input_ids", "labels", "position_ids")]
    loss = model(*arguments, batch["loss_weights"])
    scores = model.logits(batch["input_ids"], batch["position_ids"])
    torch.testing.assert_close(loss, sum_next_token_losses(scores, batch["labels"], batch["loss_weights"]))
    ones = (batch["labels"] != IGNORE_INDEX).float()
    torch.testing.assert_close(model(*arguments, ones), model(*arguments))
    assert not math.isclose(loss.item(), model(*arguments).item())


def test_torchtitan_and_pairs_refuse_weights(store, tmp_path):
    from batchloom.compat import PretrainingDataset

    with pytest.raises(InputError, match="has loss weights, which PretrainingDataset does not pass on"):
        PretrainingDataset(str(store.path), "bytes", 32)
