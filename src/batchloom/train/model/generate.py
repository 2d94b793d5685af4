"""Text from a trained model, one token after the other."""

import torch
from torch import Tensor

from batchloom import Store
from batchloom.train.model.gpt_model import GPT
from batchloom.train.model.pretrained import PretrainedModel

_TOP_K = 40


def continue_text(
    model: GPT | PretrainedModel,
    store: Store,
    prompt: str,
    count: int,
    *,
    window: int,
    temperature: float = 0.8,
) -> str:
    """Continue a prompt; the same model and prompt give the same text.

    Args:
        model: a trained model.
        store: names the tokenizer.
        prompt: text to go on from.
        count: most tokens to add; the end token ends earlier.
        window: tokens the model looks back on; at most the ``seq_len`` it was trained with.
        temperature: below 1 prefers likely tokens.

    Returns:
        The prompt and what was added.
    """
    ids = [int(token) for token in store.tokenizer.encode_batch([prompt])[0]]
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        scores = _compute_next_logits(model, ids[-window:])[: store.tokenizer.vocab_size]
        best, tokens = scores.topk(min(_TOP_K, scores.numel()))
        chances = torch.softmax(best / temperature, 0)
        token = int(tokens[int(torch.multinomial(chances, 1, generator=generator))])
        if token == store.end_id:
            break
        ids.append(token)
    return store.tokenizer.decode(ids)


@torch.no_grad()
def _compute_next_logits(model: GPT | PretrainedModel, ids: list[int]) -> Tensor:
    """Scores of the token after ``ids``: [vocab_size] float32 on the CPU."""
    device = next(model.parameters()).device
    row = torch.tensor([ids], device=device)
    positions = torch.arange(len(ids), device=device)[None]
    return model.logits(row, positions)[0, -1].float().cpu()
