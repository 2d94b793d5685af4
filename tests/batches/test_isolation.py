"""Thresholds of leaks, and the arguments that a model accepts."""

import pytest

torch = pytest.importorskip("torch")

from batchloom.batches import accepts_argument, is_leaking, measure_leakage

NAN = float("nan")


@pytest.mark.parametrize(
    ("packed", "mixed", "half", "leak"),
    [
        (0.9e-5, 0.0, False, False),
        (1.1e-5, 0.0, False, True),
        (0.019, 1.0, False, False),
        (0.021, 1.0, False, True),
        (0.049, 1.0, None, False),
        (0.051, 1.0, None, True),
        (0.19, 1.0, True, False),
        (0.21, 1.0, True, True),
        (NAN, 1.0, False, True),
        (NAN, NAN, True, True),
    ],
)
def test_a_leak_is_measured_by_what_no_isolation_would_do(packed, mixed, half, leak):
    assert is_leaking(packed, mixed, half=half) is leak


def test_a_batch_of_a_probe_knows_its_spans_and_may_come_back_in_one_row():
    documents = [torch.tensor([5, 6, 7]), torch.tensor([1, 2])]
    batches = []

    def compute_logits(batch):
        batches.append(batch)
        # Scores of the previous token in this span: the same packed and alone.
        scores = torch.nn.functional.one_hot(batch["input_ids"] + batch["position_ids"], 16).float()
        return scores.reshape(1, -1, 16)

    packed, mixed = measure_leakage(compute_logits, documents, 2)
    assert (packed, mixed > 0) == (0.0, True)
    rows = next(probe for probe in batches if probe.layout.pointers.tolist() == [0, 2, 4])
    assert rows.layout.offsets.tolist() == [0, 3, 0, 2]
    assert rows["labels"].tolist() == [[-100, 6, 7, -100, 2], [-100, 2, -100, 6, 7]]
    last = batches[-1]
    assert (last.layout.lengths.tolist(), last["position_ids"].tolist()) == (
        [5, 5],
        [[*range(5)]] * 2,
    )


def test_arguments_that_a_model_accepts():
    class Named(torch.nn.Module):
        def forward(self, input_ids, position_ids=None):
            return input_ids

    class Anything(torch.nn.Module):
        def forward(self, input_ids, **kwargs):
            return input_ids

    assert [accepts_argument(Named(), name) for name in ("position_ids", "labels")] == [True, False]
    assert accepts_argument(Anything(), "position_ids")
