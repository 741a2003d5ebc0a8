"""Training scripts of transformers, Lightning and Accelerate, as users write them."""

from __future__ import annotations

TRANSFORMERS = """
import sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(0)
no_dropout = dict(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2, **no_dropout))
generator = torch.Generator().manual_seed(1)

def row(i):
    ids = torch.randint(50, (16,), generator=generator)
    ids[1::2] = (ids[::2] * 7 + 3) % 50
    labels = ids.clone()
    labels[4 + i % 12:] = -100
    return {"input_ids": ids, "labels": labels}

arguments = TrainingArguments("checkpoints", per_device_train_batch_size=4, gradient_accumulation_steps=4, max_steps=10,
    report_to=[], use_cpu=True, save_strategy="no", logging_steps=5, disable_tqdm=True, learning_rate=1e-3)
trainer = Trainer(model, arguments, train_dataset=[row(i) for i in range(160)])
# (attach here)
trainer.train()
print([log["loss"] for log in trainer.state.log_history if "loss" in log], list(trainer.state.log_history[0]))
torch.save(model.state_dict(), sys.argv[1])
"""

OUT_OF_MEMORY = """
import sys
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

class Net(nn.Module):
    main_input_name = "x"
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 2)
        self.seen = 0
    def forward(self, x, labels=None):
        self.seen += self.training
        if self.training and len(x) > 28 and self.seen > STEPS_THAT_FIT:
            raise RuntimeError("CUDA out of memory. Tried to allocate")
        logits = self.b(torch.tanh(self.a(x)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

torch.manual_seed(0)
data = [{"x": torch.randn(6), "labels": i % 2} for i in range(560)]
arguments = TrainingArguments("out", per_device_train_batch_size=32, auto_find_batch_size=True, num_train_epochs=1,
    report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", logging_strategy="no", dataloader_drop_last=True)
trainer = Trainer(model=Net(), args=arguments, train_dataset=data)
trainer.train()
print(trainer._train_batch_size)
torch.save(trainer.model.state_dict(), sys.argv[1])
"""

_DATA = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
network = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
x = torch.randn(320, 6)
data = TensorDataset(x, x[:, :1] + 0.5 * torch.randn(320, 1))
loader = DataLoader(data, batch_size=8, shuffle=True)
"""

LIGHTNING = (
    _DATA
    + """
import lightning

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = network

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.mse_loss(self.network(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

module = Module()
callbacks = []
# (attach here)
trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", accumulate_grad_batches=4, gradient_clip_val=1.0,
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    callbacks=callbacks)
trainer.fit(module, loader)
torch.save(module.state_dict(), sys.argv[1])
"""
)

ACCELERATE = (
    _DATA
    + """
from accelerate import Accelerator

accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
model, optimizer, loader, scheduler = accelerator.prepare(network, optimizer, loader, scheduler)
# (attach here)
for x, y in loader:
    with accelerator.accumulate(model):
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            # (a window ends here)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
accelerator.print(loader.dataset.tensors[0].sum().item())
torch.save(accelerator.unwrap_model(model).state_dict(), sys.argv[1])
"""
)
