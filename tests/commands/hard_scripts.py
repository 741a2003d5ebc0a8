"""Training scripts that cannot be measured, or not without an option."""

from __future__ import annotations

LBFGS = """
model = network()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)
x, y = batch(32)
def closure():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    return loss
for step in range(3):
    optimizer.step(closure)
"""

TWO_MODULES = """
encoder, decoder = nn.Linear(6, 16), nn.Linear(16, 1)
model = decoder
optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=1e-2)
for step in range(5):
    x, y = batch()
    nn.functional.mse_loss(decoder(encoder(x)), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""

PARTS = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 1)
    def loss(self, x, y):
        return nn.functional.mse_loss(self.head(torch.tanh(self.body(x))), y)

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
# (attach here)
for step in range(12):
    for micro in range(3):
        model.loss(*batch()).backward()
    # (a window ends here)
    optimizer.step()
    optimizer.zero_grad()
"""


STEPS_IN_BACKWARD = """
model = network()
optimizers = {p: torch.optim.SGD([p], lr=1e-2) for p in model.parameters()}
def step(p):
    optimizers[p].step()
    optimizers[p].zero_grad()
for p in model.parameters():
    p.register_post_accumulate_grad_hook(step)
for _ in range(5):
    x, y = batch()
    nn.functional.mse_loss(model(x), y).backward()
"""

TOKENS = """
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
    def forward(self, input_ids, labels):
        scores = self.head(self.embed(input_ids))[:, :-1]
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")

model = Tagger()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
# (attach here)
for step in range(12):
    micro_batches = []
    for micro in range(3):
        ids = torch.randint(20, (4, 9), generator=generator)
        lengths = torch.randint(2, 10, (4, 1), generator=generator)
        micro_batches.append((ids, torch.where(torch.arange(9) < lengths, ids.flip(1), -100)))
    n_tokens = sum(labels[:, 1:].ne(-100).sum() for _, labels in micro_batches)
    for ids, labels in micro_batches:
        (model(ids, labels=labels) / n_tokens).backward()
    # (a window ends here)
    optimizer.step()
    optimizer.zero_grad()
"""
