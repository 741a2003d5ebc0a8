r"""A script that goes on from a checkpoint, in the style of nanoGPT's train.py. `sonde branch` trains branches with it.

The script knows nothing of sonde unless it gets --log: losses are read from what it prints, or from the log.

python examples/branch_nanogpt.py --steps 300 --save checkpoint.pt
sonde branch --checkpoint checkpoint.pt --batches 8,16,32,64 --units 4096 --seeds 3 --lr 2e-3 \
    --loss-regex "units (?P<units>\d+): loss (?P<loss>\S+)" -- python examples/branch_nanogpt.py \
    --resume {checkpoint} --batch {batch} --lr {lr} --seed {seed} --steps {steps}
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn

CONTEXT, WIDTH, EVERY = 32, 64, 256
"""Bytes of a sequence; width of the model; sequences between two looks at the held-out loss."""

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--resume", help="a file that --save wrote")
parser.add_argument("--save", help="a file for the weights and the optimizer's state")
parser.add_argument("--log", help="a folder for a log of sonde, with the noise scale and the held-out loss")
options = parser.parse_args()


class GPT(nn.Module):
    """One layer of attention over bytes: the loss of each next byte, as nanoGPT's GPT returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [batch, CONTEXT, 256] and the loss."""
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        x = self.embed(idx) + self.place(torch.arange(CONTEXT))
        logits = self.head(self.block(x, src_mask=mask, is_causal=True))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_bytes() -> Tensor:
    """The sources of the standard library, one after the other."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(source.read_bytes() for source in sources)), dtype=torch.uint8).long()


def get_batch(data: Tensor, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Stretches of text, and the same one byte later: [batch, CONTEXT].

    A larger batch is several smaller ones of the same generator, so branches of one seed see the same data.
    """
    at = torch.randint(len(data) - CONTEXT, (batch, 1), generator=generator) + torch.arange(CONTEXT)
    return data[at], data[at + 1]


def held_out_loss() -> float:
    """The mean loss of sequences that are the same in every branch, and never trained on."""
    model.eval()
    with torch.no_grad():
        loss: float = model(*held_out)[1].item()
    model.train()
    return loss


data = read_bytes()
n_train = int(0.9 * len(data))
held_out = get_batch(data[n_train:], 512, torch.Generator().manual_seed(1))
torch.manual_seed(1337)  # of the first weights; a checkpoint replaces them
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
if options.resume:
    saved = torch.load(options.resume)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
for group in optimizer.param_groups:
    group["lr"] = options.lr  # the state above holds the rate of the run that was saved

probe = None
if options.log:
    import sonde

    probe = sonde.attach(model, optimizer, unit="sequences", log=options.log)

order = torch.Generator().manual_seed(options.seed)
for step in range(options.steps + 1):
    units = step * options.batch
    if units % EVERY < options.batch or step == options.steps:
        loss = held_out_loss()
        print(f"units {units}: loss {loss:.5f}", flush=True)
        if probe:
            probe.log(eval_loss=loss)
    if step == options.steps:
        break
    model(*get_batch(data[:n_train], options.batch, order))[1].backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

if options.save:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, options.save)
