"""A loop in the style of nanoGPT's train.py: two lines of sonde, and the verdict is printed when the script ends.

python examples/nanogpt_loop.py
"""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path

import torch
from torch import Tensor, nn

import sonde  # 1

CONTEXT, BATCH_SIZE, GRADIENT_ACCUMULATION_STEPS, MAX_ITERS = 16, 16, 4, 150

data = torch.frombuffer(bytearray(Path(pydoc_data.topics.__file__).read_bytes()), dtype=torch.uint8).long()


class Model(nn.Module):
    """Given bytes [batch, CONTEXT] and their targets [batch], it returns logits and loss, as nanoGPT's GPT does."""

    def __init__(self) -> None:
        super().__init__()
        hidden = nn.Linear(32 * CONTEXT, 256)
        self.net = nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), hidden, nn.GELU(), nn.Linear(256, 256))

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [batch, 256] and the loss."""
        logits = self.net(idx)
        return logits, nn.functional.cross_entropy(logits, targets)


def get_batch() -> tuple[Tensor, Tensor]:
    """Stretches of text and the byte that follows each."""
    ix = torch.randint(len(data) - CONTEXT, (BATCH_SIZE,))
    return torch.stack([data[i : i + CONTEXT] for i in ix]), data[ix + CONTEXT]


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
# 2: each forward shows how many contexts it has. A run this short measures every window, and has a log.
sonde.attach(model, optimizer, unit="contexts", every=1, log="runs/nanogpt-loop")

X, Y = get_batch()
for iter_num in range(MAX_ITERS):
    for _ in range(GRADIENT_ACCUMULATION_STEPS):
        logits, loss = model(X, Y)
        loss = loss / GRADIENT_ACCUMULATION_STEPS
        X, Y = get_batch()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if iter_num % 50 == 0:
        print(f"iter {iter_num}: loss {loss.item() * GRADIENT_ACCUMULATION_STEPS:.4f}")
