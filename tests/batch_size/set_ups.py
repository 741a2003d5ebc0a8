"""Small models of one description, each with its data and its loss; `cuts.py` spreads them over ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.gradient_norm import routed_experts

VOCABULARY, WIDTH, LENGTH, RANK = 13, 8, 6, 3  # 13 is uneven over 2, 3 and 4 ranks
UNITS = ((4, 2, 3), (3, 5, 1), (1, 6, 2), (2, 2, 4))
"""Units of the pieces of each data-parallel rank."""
N_MICRO, UNEQUAL, IGNORED = 4, (3.0, 1.0, 2.0, 2.5), -100
"""Of a pipeline: micro-batches of 3 units, whose units are said to be unequal where they weigh by their tokens."""


@dataclass(frozen=True)
class Loop:
    """How a model is cut and trained.

    Attributes:
        cut: in words: "one process", "ddp", "fsdp", "tp", "sp", or "plain" for whole on each rank; "fsdp over" tp or
            sp; "ddp", "fsdp", "hsdp" or "plain" and "over cp"; "ep fsdp", "ep plain", "ep fsdp over tp"; "pp", "pp
            ddp", "pp fsdp".
        mesh: shape of the mesh of FSDP2; None for all ranks.
        fsdp: options of `fully_shard`.
        ddp: options of DistributedDataParallel.
        hook: the user's communication hook of DDP, see `cuts.HOOKS`.
        summed: gradients are summed over ranks, rather than averaged.
        sync: "every" piece reduces, or the "last".
        bf16: "parameters" in bf16, reduced in fp32; or only "reduced" in bf16.
        tied: the head has the embedding's weight.
        frozen: the embedding is frozen.
        covered: every parameter is in a layer whose examples can be read.
        sparse: the embedding's gradient is sparse.
        checkpoints: activations are computed again in backward.
        compiled: blocks of FSDP2 are compiled, or else the whole model.
        autocast: forward runs in bf16, so nothing is computed by hand.
        scaled: by a GradScaler, whose scale grows every third step.
        evaluates: a forward without a graph runs "before" each window, or before its "end".
        forwards: forwards whose losses one backward adds up.
        late: windows before the probe is attached.
        after: windows after it is closed.
        dropout: forward draws random numbers, so nothing is computed by hand.
        twice: a piece has two backwards.
        in_order: layers are defined in the order of forward.
        adapters: low-rank adapters are trained, "sharded" with the rest or "whole"; or they are plain below FSDP2, and
            averaged by "hooks" once a gradient is accumulated, or by the "loop" before the step.
        peft: they are PEFT's. Those that are plain are made after the model was sharded.
        head: the head is trained besides adapters.
        n_feeding: ranks over which experts are spread; 1 as of a configuration that does not spread them.
        averaged: experts are divided by the number of all ranks, or only by that of ranks that hold the same ones.
        n_pieces: of each rank and window.
        idle: a data-parallel rank without pieces, see `cut_loops.fill_up`.
        merges: rank 0 takes both backwards for one piece.
        says_so: `expert_mesh=` or `process_group=` is given where it is needed.
        schedule: of a pipeline, a class of torch's.
        looped: the order in which ranks take the four stages; None for two stages of two parts.
        axes: sizes of "dp", "tp", and of copies among dp ("replicate").
        clips: the probe clips, rather than only ending windows; or "torch" clips before that.
        exact: parameters are in float64.
        weighted: pieces weigh by their units.
        declared: whether pieces are declared; otherwise each backward is a piece of 4 units.
        windows: how many.
        metric: as for attach.
        optimizer: by name, see `cuts.OPTIMIZERS`.
        part: how names of the parameters begin that it steps, which are all that is measured.
        set_to_none: how gradients are zeroed.
        options: further ones for attach.
    """

    cut: str = "fsdp"
    mesh: tuple[int, ...] | None = None
    fsdp: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    hook: str = ""
    summed: bool = False
    sync: str = "last"
    bf16: str = ""
    tied: bool = False
    frozen: bool = False
    covered: bool = False
    sparse: bool = False
    checkpoints: bool = False
    compiled: bool = False
    autocast: bool = False
    scaled: bool = False
    evaluates: str = ""
    forwards: int = 1
    late: int = 0
    after: int = 0
    dropout: bool = False
    twice: bool = False
    in_order: bool = True
    adapters: str = ""
    peft: bool = False
    head: bool = True
    n_feeding: int = 2
    averaged: bool = True
    n_pieces: int = 2
    idle: int | None = None
    merges: bool = False
    says_so: bool = True
    schedule: str = "Schedule1F1B"
    looped: tuple[tuple[int, ...], ...] | None = None
    axes: dict[str, int] = field(default_factory=dict)
    clips: bool | str = True
    exact: bool = False
    weighted: bool = False
    declared: bool = True
    windows: int = 2
    metric: tuple[str, ...] = ("euclidean",)
    optimizer: str = "AdamW"
    part: str = ""
    set_to_none: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    def has(self, *words: str) -> bool:
        """Whether the cut has one of these words."""
        return any(word in self.cut.split() for word in words)

    @property
    def n_data(self) -> int:
        """Ranks with data of their own."""
        if self.has("pp"):
            return self.axes.get("dp", 1)
        if self.has("one"):
            return 1
        return dist.get_world_size() // (2 if self.has("tp", "sp", "cp") else 1)

    @property
    def data_rank(self) -> int:
        if self.has("pp"):
            return dist.get_rank() // self.axes.get("tp", 1) % self.n_data
        return dist.get_rank() // (dist.get_world_size() // self.n_data) if self.n_data > 1 else 0


# Models.


class Adapted(nn.Module):
    """A frozen layer, and an update of low rank that is trained."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(RANK, base.in_features) / 3)
        self.b = nn.Parameter(torch.randn(base.out_features, RANK) / 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + x @ self.a.T @ self.b.T
        return out


class Block(nn.Module):
    def __init__(self, hidden: int, *, in_order: bool = True) -> None:
        super().__init__()
        self.norm, self.dropout, self.checkpoints = nn.LayerNorm(WIDTH), nn.Dropout(0.1), False
        for name in ("up", "down") if in_order else ("down", "up"):
            setattr(self, name, nn.Linear(*((WIDTH, hidden) if name == "up" else (hidden, WIDTH))))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.hidden, x, use_reentrant=False) if self.checkpoints else self.hidden(x)
        return out

    def hidden(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))
        return out


class LM(nn.Module):
    """A small language model with parameters of every kind: tied, tiny, unused in the loss."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        hidden = 1024 if loop.has("cp") else 12 if loop.has("tp", "sp", "pp") else 11
        self.embed = nn.Embedding(VOCABULARY, WIDTH, sparse=loop.sparse)
        self.attention = Attention() if loop.has("cp") else None
        has_scale = not (loop.has("sp", "cp", "pp") or loop.covered or loop.adapters)
        self.scale = nn.Parameter(torch.ones(1)) if has_scale else None  # an empty shard on all ranks but one
        self.blocks = nn.ModuleList(Block(hidden, in_order=loop.in_order) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.unused = nn.Parameter(torch.zeros(3)) if loop.has("cp") else None
        if loop.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, first: int = 0) -> Tensor:
        """Logits of tokens whose first is at this place of the sequence."""
        x = self.embed(tokens)
        if self.attention is not None:
            x = x + self.attention(x, first)
        if self.scale is not None:
            x = x * self.scale
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class Gather(torch.autograd.Function):
    """All tokens of a sequence, from the parts of all ranks; [rows, tokens, width]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[override]
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size(), 1)[ctx.group.rank()], None


class Attention(nn.Module):
    """Causal attention of this rank's tokens to those of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor, first: int) -> Tensor:
        x = x + self.place[first : first + x.shape[1]]
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.group is not None:
            k, v = Gather.apply(k, self.group), Gather.apply(v, self.group)
        scores = q @ k.transpose(1, 2) / WIDTH**0.5
        hidden = torch.arange(k.shape[1]) > first + torch.arange(x.shape[1])[:, None]
        out: Tensor = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
        return out


class Stage(nn.Module):
    """Some of the four parts of a model."""

    def __init__(self, whole: LM, which: tuple[int, ...]) -> None:
        super().__init__()
        parts = {"embed": whole.embed, "block0": whole.blocks[0], "block1": whole.blocks[1], "head": whole.head}
        for name in [list(parts)[i] for i in which]:
            self.add_module(name, parts[name])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.children():
            x = part(x)
        return x.contiguous()


def bare(loop: Loop) -> LM:
    """The model without adapters."""
    torch.manual_seed(5)
    model = LM(loop)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.checkpoints, block.dropout.p = loop.checkpoints, 0.1 * loop.dropout
    model.embed.weight.requires_grad_(not loop.frozen)
    return model.double() if loop.exact else model


def build(loop: Loop) -> nn.Module:
    """The whole model, as one process has it."""
    if loop.has("ep"):
        return routed_experts.build()
    model: Any = bare(loop)
    if loop.peft:
        return with_peft(model, loop)
    if loop.adapters:
        for block in model.blocks:
            block.up, block.down = Adapted(block.up), Adapted(block.down)
        for name, p in model.named_parameters():
            p.requires_grad_(name.endswith((".a", ".b")) or (loop.head and name.startswith("head")))
    return Stage(model, (0, 1, 2, 3)) if loop.has("pp") else model  # type: ignore[no-any-return]


def with_peft(model: Any, loop: Loop) -> nn.Module:
    """The model with PEFT's adapters in all blocks. One of the two matrices of each is 0 at first."""
    from peft import LoraConfig, get_peft_model  # takes seconds

    saved = ["head"] if loop.head else None
    config = LoraConfig(r=RANK, target_modules=["up", "down"], modules_to_save=saved)
    adapted: nn.Module = get_peft_model(model, config)
    return adapted


# Data.


def tokens(loop: Loop, rank: int, window: int, piece: int) -> Tensor:
    """[units, LENGTH + 1] of one piece; without the 1 for experts."""
    generator = torch.Generator().manual_seed(1000 * window + 10 * rank + piece)
    return torch.randint(VOCABULARY, (UNITS[rank][piece], LENGTH + (not loop.has("ep"))), generator=generator)


def of_window(rank: int, window: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of all micro-batches of a pipeline, [12, LENGTH]; some targets are ignored."""
    generator = torch.Generator().manual_seed(100 * window + rank)
    ids = torch.randint(VOCABULARY, (3 * N_MICRO, LENGTH + 1), generator=generator)
    ignored = torch.rand(3 * N_MICRO, LENGTH, generator=generator) < 0.3
    return ids[:, :-1], ids[:, 1:].masked_fill(ignored, IGNORED)


def counts(loop: Loop, rank: int, window: int) -> list[tuple[float, float]]:
    """Units and weight of each piece of a rank."""
    if loop.has("pp"):
        targets = of_window(rank, window)[1].chunk(N_MICRO)
        if loop.weighted:
            return [(UNEQUAL[(rank + k) % N_MICRO], float((t != IGNORED).sum())) for k, t in enumerate(targets)]
        return [(3.0, 1.0)] * N_MICRO
    units = [float(n) if loop.declared else 4.0 for n in UNITS[rank][: loop.n_pieces]]
    return [(n, n if loop.weighted else 1.0) for n in units]


def loss_of(loop: Loop, model: nn.Module, ids: Tensor, part: int = 0, n_parts: int = 1) -> Tensor:
    """The mean over tokens, of all or of those of one part, or their sum over a constant where pieces are weighted."""
    total = torch.zeros((), dtype=torch.float64)
    for _ in range(loop.forwards):
        if loop.has("ep"):
            logits, targets = model(ids), ids.roll(1, 1)
        elif n_parts > 1:
            inputs, targets = (x.chunk(n_parts, 1)[part] for x in (ids[:, :-1], ids[:, 1:]))
            logits = model(inputs, part * LENGTH // n_parts).flatten(0, 1)
        else:
            logits, targets = model(ids[:, :-1]).flatten(0, 1), ids[:, 1:]
        total = total + nn.functional.cross_entropy(logits.double(), targets.flatten())
        ids = ids.flip(0)
    return total * (len(ids) / 3.0 if loop.weighted else 1.0)


def loss_of_stages(logits: Tensor, targets: Tensor, weighted: bool) -> Tensor:
    """The mean over tokens that count, or their sum over a constant."""
    reduction: dict[str, Any] = {"reduction": "sum" if weighted else "mean", "ignore_index": IGNORED}
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), **reduction) / (20 if weighted else 1)
