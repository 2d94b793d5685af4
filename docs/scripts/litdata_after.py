"""The same with batchloom: the state fits any number of ranks and workers."""

import torch
from torch import nn

import batchloom

store = batchloom.open_store(
    batchloom.prepare("train.jsonl", out="store", tokenizer="tokenizer.json", val_fraction=0).path
)
loader = batchloom.Loader(store, seq_len=64, global_batch_size=8, labels="shifted")

size = store.tokenizer.vocab_size
model = nn.Sequential(nn.Embedding(size, 32), nn.Linear(32, size))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for batch in loader:
    logits = model(batch["input_ids"])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save({"model": model.state_dict(), "loader": loader.state_dict()}, "ckpt.pt")
