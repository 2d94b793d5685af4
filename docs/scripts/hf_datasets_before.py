"""Hugging Face datasets: tokenize, join and cut, as run_clm.py does."""

from itertools import chain

import torch
from datasets import load_dataset
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

tokenizer = PreTrainedTokenizerFast(tokenizer_file="tokenizer.json", eos_token="<|endoftext|>")
seq_len = 64


def tokenize(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
    return {"input_ids": [[*ids, tokenizer.eos_token_id] for ids in tokenizer(rows["text"])["input_ids"]]}


def group(rows: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
    ids = list(chain(*rows["input_ids"]))
    # The rest of each thousand rows is lost, and documents see each other.
    return {"input_ids": [ids[i : i + seq_len] for i in range(0, len(ids) - seq_len + 1, seq_len)]}


data = load_dataset("json", data_files="train.jsonl", split="train")
data = data.map(tokenize, batched=True, remove_columns=data.column_names).map(group, batched=True).with_format("torch")

model = nn.Sequential(nn.Embedding(len(tokenizer), 32), nn.Linear(32, len(tokenizer)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for batch in DataLoader(data, batch_size=8, shuffle=True):
    logits = model(batch["input_ids"])[:, :-1]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
