"""nanoGPT: ids in one file, and random windows of it."""

from pathlib import Path

import numpy as np
import torch
from torch import nn

# prepare.py
text = Path("input.txt").read_text()
characters = sorted(set(text))
number = {character: index for index, character in enumerate(characters)}
np.array([number[character] for character in text], np.uint16).tofile("train.bin")

# train.py
block_size, batch_size = 64, 8
data = np.memmap("train.bin", np.uint16, "r")


def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in starts])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in starts])
    return x, y


model = nn.Sequential(nn.Embedding(len(characters), 32), nn.Linear(32, len(characters)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(20):
    x, y = get_batch()  # some windows come twice, others never
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save({"model": model.state_dict()}, "ckpt.pt")  # a resumed run draws other windows
