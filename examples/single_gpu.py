"""The most common loop there is: one process, one device, one batch a step, and no gradient accumulation.

python examples/single_gpu.py

A step is a single piece here, so each example's own gradient is read, in one window of many.
"""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path

import torch
from torch import nn

import sonde

CONTEXT, BATCH, WIDTH = 32, 32, 48

accelerator = torch.accelerator.current_accelerator(check_available=True)  # a GPU, say; None without one
device = accelerator if accelerator is not None else torch.device("cpu")
text = torch.frombuffer(bytearray(Path(pydoc_data.topics.__file__).read_bytes()), dtype=torch.uint8).long()
generator = torch.Generator().manual_seed(0)


class LanguageModel(nn.Module):
    """One layer of attention over bytes. The head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the byte after each: [sequences, CONTEXT, 256]."""
        places = torch.arange(CONTEXT, device=tokens.device).expand_as(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=tokens.device)
        return self.head(self.block(self.embed(tokens) + self.place(places), src_mask=mask, is_causal=True))


def sequences(n: int) -> torch.Tensor:
    """n random stretches of CONTEXT + 1 bytes: [n, CONTEXT + 1]."""
    starts = torch.randint(len(text) - CONTEXT, (n,), generator=generator)
    return torch.stack([text[s : s + CONTEXT + 1] for s in starts]).to(device)


torch.manual_seed(0)
model = LanguageModel().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
log = sonde.RunLog(sonde.JsonlSink("runs/single-gpu"))
probe = sonde.attach(model, optimizer, unit="sequences", log=log, every=1)  # a short run

for step in range(150):
    batch = sequences(BATCH)
    loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    probe.log(loss=loss)
    optimizer.step()
    optimizer.zero_grad()
    if step % 50 == 49:
        print(f"step {step + 1}: loss {loss.item():.2f}, {probe.reading()}")

probe.close()
