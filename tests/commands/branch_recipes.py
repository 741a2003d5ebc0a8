"""Training scripts of three trainers as users write them, and the lines that change for `sonde branch`."""

from __future__ import annotations

NANOGPT = """
import os
import pydoc_data.topics
import sys
from ast import literal_eval
from pathlib import Path

import torch
from torch import nn

out_dir, init_from = "out", "scratch"
eval_interval, eval_iters, always_save_checkpoint = 32, 8, True
gradient_accumulation_steps, batch_size, block_size = 1, 8, 16
learning_rate, max_iters = 2e-3, 128
for arg in sys.argv[1:]:  # as configurator.py
    key, value = arg[2:].split("=")
    kind = type(globals()[key])
    globals()[key] = value if kind is str else literal_eval(value)
    assert type(globals()[key]) is kind
os.makedirs(out_dir, exist_ok=True)
seed_offset = 0
torch.manual_seed(1337 + seed_offset)

text = torch.frombuffer(bytearray(Path(pydoc_data.topics.__file__).read_bytes()), dtype=torch.uint8).long()
parts = {"train": text[: int(0.9 * len(text))], "val": text[int(0.9 * len(text)) :]}


def get_batch(split):
    data = parts[split]
    ix = torch.randint(len(data) - block_size, (batch_size,))
    return torch.stack([data[i : i + block_size] for i in ix]), torch.stack([data[i + block_size] for i in ix])


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * block_size, 256))

    def forward(self, idx, targets):
        logits = self.net(idx)
        return logits, nn.functional.cross_entropy(logits, targets)


model, iter_num, best_val_loss = GPT(), 0, 1e9
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
if init_from == "resume":
    checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"))
    model.load_state_dict(checkpoint["model"])
    iter_num, best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]
    optimizer.load_state_dict(checkpoint["optimizer"])


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            losses[k] = model(*get_batch(split))[1].item()
        out[split] = losses.mean()
    model.train()
    return out


X, Y = get_batch("train")
while True:
    for param_group in optimizer.param_groups:
        param_group["lr"] = learning_rate
    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}", flush=True)
        if losses["val"] < best_val_loss or always_save_checkpoint:
            best_val_loss = losses["val"].item()
            checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            checkpoint |= {"iter_num": iter_num, "best_val_loss": best_val_loss}
            torch.save(checkpoint, os.path.join(out_dir, "ckpt.pt"))
    for micro_step in range(gradient_accumulation_steps):
        logits, loss = model(X, Y)
        X, Y = get_batch("train")
        (loss / gradient_accumulation_steps).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    if iter_num > max_iters:
        break
"""
"""nanoGPT's train.py in shape: options are globals, evaluations draw at random, a resumed run saves where it loaded."""

OF_NANOGPT = {
    "torch.manual_seed(1337 + seed_offset)": 'torch.manual_seed(int(os.environ.get("SEED", 1337)) + seed_offset)',
    "        losses = estimate_loss()": (
        "        with torch.random.fork_rng(): torch.manual_seed(0); losses = estimate_loss()"
    ),
}

TRAINER = """
import pydoc_data.topics
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments, set_seed


@dataclass
class ModelArguments:
    model_name_or_path: str | None = None


model_args, args = HfArgumentParser((ModelArguments, TrainingArguments)).parse_args_into_dataclasses()
set_seed(args.seed)
text = torch.frombuffer(bytearray(Path(pydoc_data.topics.__file__).read_bytes()), dtype=torch.uint8).long()
rows = [{"input_ids": row, "labels": row} for row in text[: len(text) // 32 * 32].view(-1, 32)]
if checkpoint := model_args.model_name_or_path:
    model = GPT2LMHeadModel.from_pretrained(checkpoint)
else:
    no_dropout = dict(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=1, n_head=2, **no_dropout))
trainer = Trainer(model=model, args=args, train_dataset=rows[256:], eval_dataset=rows[:256])
trainer.train()
"""
OF_TRAINER = {
    "trainer.train()": (
        'own = {"param_groups": trainer.create_optimizer().state_dict()["param_groups"]}\n'
        'trainer.optimizer.load_state_dict(torch.load(f"{checkpoint}/optimizer.pt") | own)\n'
        "trainer.train()"
    ),
}

LIGHTNING = """
import argparse
import pydoc_data.topics
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import LambdaCallback
from sonde.integrations.lightning import NoiseScale
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
for name, kind, default in (("batch", int, 8), ("lr", float, 2e-3), ("seed", int, 0), ("every", int, 32)):
    parser.add_argument("--" + name, type=kind, default=default)
parser.add_argument("--steps", type=int, default=-1)
parser.add_argument("--resume")
parser.add_argument("--out", default="out")
args = parser.parse_args()
text = torch.frombuffer(bytearray(Path(pydoc_data.topics.__file__).read_bytes()), dtype=torch.uint8).long()
rows = text.unfold(0, 17, 5)


class ByteModel(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * 16, 256))

    def loss(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0][:, :-1]), batch[0][:, -1])

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=args.lr)


L.seed_everything(args.seed)
trainer = L.Trainer(
    max_steps=args.steps,
    val_check_interval=args.every,
    check_val_every_n_epoch=None,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    callbacks=[],
)
train, held_out = TensorDataset(rows[1024:]), TensorDataset(rows[:1024])
loaders = DataLoader(train, batch_size=args.batch, shuffle=True), DataLoader(held_out, batch_size=256)
trainer.fit(ByteModel(), *loaders, ckpt_path=args.resume)
if not args.resume:
    trainer.save_checkpoint("last.ckpt")
"""
OF_LIGHTNING = {
    "    callbacks=[],": (
        "    callbacks=[\n"
        "LambdaCallback(on_train_start=lambda trainer, _: trainer.optimizers[0].param_groups[0].update(lr=args.lr)),\n"
        'NoiseScale(unit="rows"),\n'
        "],"
    ),
}


def changed(script: str, lines: dict[str, str]) -> str:
    """The script for branches."""
    for before, after in lines.items():
        assert script.count(f"{before}\n") == 1
        script = script.replace(f"{before}\n", f"{after}\n")
    return script
