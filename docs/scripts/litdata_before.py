"""LitData: chunks of ids, and a streaming data loader."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize
from tokenizers import Tokenizer
from torch import nn

seq_len = 64
tokenizer = Tokenizer.from_file("tokenizer.json")


def tokenize(file: str) -> Iterator[torch.Tensor]:
    for line in Path(file).read_text().splitlines():
        yield torch.tensor([*tokenizer.encode(json.loads(line)["text"]).ids, tokenizer.token_to_id("<|endoftext|>")])


if __name__ == "__main__":
    optimize(tokenize, ["train.jsonl"], "chunks", chunk_bytes="64MB", item_loader=TokensLoader(), num_workers=1)
    data = StreamingDataset("chunks", item_loader=TokensLoader(block_size=seq_len + 1), shuffle=True)
    loader = StreamingDataLoader(data, batch_size=8, num_workers=1)

    size = tokenizer.get_vocab_size()
    model = nn.Sequential(nn.Embedding(size, 32), nn.Linear(32, size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for ids in loader:  # windows cut documents, which see each other
        logits = model(ids[:, :-1].long())
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].long().flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save({"model": model.state_dict(), "loader": loader.state_dict()}, "ckpt.pt")
