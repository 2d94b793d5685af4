"""Text generation with a trained model, one token at a time."""

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
        store: store with the tokenizer.
        prompt: text to continue.
        count: maximum number of new tokens; the end token stops earlier.
        window: context length in tokens; at most the ``seq_len`` of the training.
        temperature: sampling temperature; below 1 prefers likely tokens.

    Returns:
        the prompt and its continuation.
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
    """Return the logits of the next token: [vocab_size] float32 on the CPU."""
    device = next(model.parameters()).device
    row = torch.tensor([ids], device=device)
    positions = torch.arange(len(ids), device=device)[None]
    return model.logits(row, positions)[0, -1].float().cpu()
