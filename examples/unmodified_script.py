"""A training script that knows nothing of sonde, in the style of nanoGPT's train.py. `sonde run` measures it as it is.

sonde run --unit sequences --every 1 -- examples/unmodified_script.py
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
from pathlib import Path

import torch
from torch import Tensor, nn

CONTEXT, WIDTH = 32, 64

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--max-iters", type=int, default=150)
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--accumulate", type=int, default=4)
options = parser.parse_args()

data = torch.frombuffer(bytearray(Path(pydoc_data.topics.__file__).read_bytes()), dtype=torch.uint8).long()


class GPT(nn.Module):
    """One layer of attention over bytes. Given bytes and the byte after each, it returns logits and loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [batch, CONTEXT, 256] and the loss."""
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        x = self.embed(idx) + self.place(torch.arange(CONTEXT))
        logits = self.head(self.block(x, src_mask=mask, is_causal=True))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch() -> tuple[Tensor, Tensor]:
    """Stretches of text, and the same one byte later: [batch, CONTEXT]."""
    ix = torch.randint(len(data) - CONTEXT, (options.batch_size,))
    return tuple(torch.stack([data[i + k : i + k + CONTEXT] for i in ix]) for k in (0, 1))


@torch.no_grad()
def estimate_loss() -> float:
    """The mean loss of eight batches."""
    model.eval()
    loss = sum(model(*get_batch())[1].item() for _ in range(8)) / 8
    model.train()
    return loss


torch.manual_seed(1337)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95))

for iter_num in range(options.max_iters):
    if iter_num % 50 == 0:
        print(f"step {iter_num}: loss {estimate_loss():.4f}")
    for _ in range(options.accumulate):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits, loss = model(*get_batch())
        (loss / options.accumulate).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

print(f"step {options.max_iters}: loss {estimate_loss():.4f}")
