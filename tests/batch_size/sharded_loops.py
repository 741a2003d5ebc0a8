"""Training loops on models that are cut over ranks, and the same pieces on one process in float64."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import sonde
from sonde.parallel.wrappers import block_of
from tests.batch_size.cut_models import Values, last_window, local_weights, n_collectives, whole_parameters, with_total
from tests.oracles import window_by_hand
from tests.ranks import mesh_of

VOCABULARY, WIDTH, LENGTH = 13, 8, 6  # 13 is uneven over 2, 3 and 4 ranks
UNITS = ((4, 2), (3, 5), (1, 6), (2, 2))
"""Units of the two pieces of each data-parallel rank."""


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.checkpoints = False

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpoints:
            return checkpoint(self.hidden, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.hidden(x)

    def hidden(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))
        return out


class LM(nn.Module):
    """A small language model with parameters of every kind: tied, tiny, unused in the loss."""

    def __init__(self, *, hidden: int, tied: bool, scaled: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.scale = nn.Parameter(torch.ones(1)) if scaled else None  # an empty shard on all ranks but one
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.scale is not None:
            x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Loop:
    """How a model is cut and trained.

    Attributes:
        cut: by FSDP2, tensor parallelism ("tp"), with sequence parallelism ("sp"), or FSDP2 over one of these.
        mesh: shape of the mesh of FSDP2; None for all ranks.
        reshard: `reshard_after_forward`.
        sync: "every" piece reduces, or the "last".
        mixed: parameters in bf16, reduced in fp32.
        reduced_in_bf16: gradients are reduced in bf16.
        offload: parameters on the CPU between uses.
        tied: the head has the embedding's weight.
        frozen: the embedding is frozen.
        checkpoints: activations are computed again in backward.
        compiled: blocks are compiled.
        evaluates: an evaluation forward runs before each window.
        evaluates_last: an evaluation forward runs between the last backward and the end of each window.
        forwards: forwards whose losses one backward adds up.
        late: windows before the probe is attached.
        clips: the probe clips, rather than only ending windows.
        dropout: forward draws random numbers.
        weighted: pieces weigh by their units.
        windows: how many windows.
        covered: every parameter is in a layer whose examples can be read.
        options: of the probe.
    """

    cut: str = "fsdp"
    mesh: tuple[int, ...] | None = None
    reshard: bool | int | None = None
    sync: str = "last"
    mixed: bool = False
    reduced_in_bf16: bool = False
    offload: bool = False
    tied: bool = False
    frozen: bool = False
    checkpoints: bool = False
    compiled: bool = False
    evaluates: bool = False
    evaluates_last: bool = False
    forwards: int = 1
    late: int = 0
    clips: bool = True
    dropout: bool = False
    weighted: bool = False
    windows: int = 2
    covered: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def build(loop: Loop) -> LM:
    torch.manual_seed(5)
    hidden = 11 if loop.cut == "fsdp" else 12  # torch's tensor parallelism cannot reshape uneven activations
    model = LM(hidden=hidden, tied=loop.tied, scaled=not (loop.cut.endswith("sp") or loop.covered))
    model.embed.weight.requires_grad_(not loop.frozen)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.checkpoints = loop.checkpoints
        block.dropout.p = 0.1 * loop.dropout
    return model


def n_data_ranks(loop: Loop) -> int:
    return dist.get_world_size() // (1 if loop.cut == "fsdp" else 2)


def data_rank(loop: Loop) -> int:
    """Ranks 0 and 1 share a piece under tensor parallelism, ranks 2 and 3 the next one."""
    return dist.get_rank() // (dist.get_world_size() // n_data_ranks(loop))


def shard(model: LM, loop: Loop) -> LM:
    """Cut the model as the loop says."""
    if loop.cut == "fsdp":
        shape = loop.mesh or (dist.get_world_size(),)
        return fully_sharded(model, mesh_of(shape, ("replicate", "shard")[2 - len(shape) :]), loop)
    mesh = mesh_of((n_data_ranks(loop), 2), ("dp", "tp"))
    tensor_parallel(model, mesh["tp"], in_sequence=loop.cut.endswith("sp"))
    return fully_sharded(model, mesh["dp"], loop) if "fsdp" in loop.cut else model


def tensor_parallel(model: LM, mesh: DeviceMesh, *, in_sequence: bool) -> None:
    """Cut every layer; with `in_sequence`, activations between layers are cut along the sequence."""
    between = Shard(1) if in_sequence else Replicate()
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "blocks.*.up": ColwiseParallel(input_layouts=between),
        "blocks.*.down": RowwiseParallel(output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan | ({"blocks.*.norm": SequenceParallel()} if in_sequence else {}))


def fully_sharded(model: LM, mesh: DeviceMesh, loop: Loop) -> LM:
    """Cut the model by FSDP2: each block, and the rest."""
    options: dict[str, Any] = {"mesh": mesh}
    if loop.reshard is not None:
        options["reshard_after_forward"] = loop.reshard
    if loop.mixed:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if loop.reduced_in_bf16:
        options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    if loop.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for block in model.blocks:
        if loop.compiled:
            block.compile(backend="aot_eager")
        fully_shard(block, **options)
    return fully_shard(model, **options)


def tokens(rank: int, window: int, piece: int) -> Tensor:
    """[units, LENGTH + 1] of one piece."""
    generator = torch.Generator().manual_seed(1000 * window + 10 * rank + piece)
    return torch.randint(VOCABULARY, (UNITS[rank % len(UNITS)][piece], LENGTH + 1), generator=generator)


def loss_of(model: nn.Module, ids: Tensor, loop: Loop) -> Tensor:
    """The mean over units, or their sum over a constant where pieces weigh by their units."""
    total = torch.zeros((), dtype=torch.float64)
    for _ in range(loop.forwards):
        logits = model(ids[:, :-1]).double().flatten(0, 1)
        total = total + nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
        ids = ids.flip(0)
    return total * (len(ids) / 3.0 if loop.weighted else 1.0)


def train(loop: Loop, *, probed: bool = True, values: bool = False) -> dict[str, Any]:
    """Train on this rank.

    Returns:
        The parameters after training, the collectives that were issued, and with a probe its reading and alerts. With
        `values`, also each window of the probe, and the same by hand: (tr Σ, |G|²) of the total and of each group. Then
        the loop gathers the parameters before each window, with a probe or without.
    """
    torch._dynamo.reset()
    model = shard(build(loop), loop)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    rank, before = data_rank(loop), None
    probe: Any = None
    result: dict[str, Any] = {"norms": [], "windows": [], "by hand": []}
    torch.manual_seed(11 + rank)
    for window in range(-loop.late, loop.windows):
        if window == 0 and probed:
            options = {"unit": "sequences", "verbose": False, "every": 1, "log": sonde.RunLog(every=1000)}
            probe = sonde.attach(model, optimizer, **(options | loop.options))  # type: ignore[arg-type]
        if window == 0:
            before = n_collectives()
        whole = whole_parameters(model) if values and window >= 0 else {}
        if loop.evaluates:
            _evaluate(model, tokens(rank, window, 0))
        for k in range(2):
            if loop.sync == "last" and isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(k == 1)
            ids = tokens(rank, window, k)
            counts: dict[str, Any] = {"units": len(ids)} | ({"weight": len(ids)} if loop.weighted else {})
            with probe.piece(**counts) if probe else contextlib.nullcontext():
                loss_of(model, ids, loop).backward()
        if loop.evaluates_last:
            _evaluate(model, tokens(rank, window, 0))
        result["norms"].append(_end(probe, parameters, loop))
        optimizer.step()
        optimizer.zero_grad()
        if values and probe and window >= 0:
            result["windows"].append(last_window(probe))
            result["by hand"].append(by_hand(whole, loop, window))
    result["collectives"] = n_collectives() - (before or 0)
    if probe:
        result["reading"], result["alerts"] = probe.reading(), probe.alerts
        result["setup"] = probe._setup()
        probe.close()
    result["hooks"] = sum(len(p._backward_hooks or ()) for p in gathered(model))
    result["weights"] = local_weights(model)
    return result


def _evaluate(model: nn.Module, ids: Tensor) -> None:
    model.eval()
    with torch.no_grad():
        model(ids[:, :-1])
    model.train()


def _end(probe: Any, parameters: list[nn.Parameter], loop: Loop) -> float:
    if loop.clips:
        clip: Callable[..., Tensor] = probe.clip_grad_norm_ if probe else clip_alone(parameters)
        return float(clip(0.5))
    if probe:
        probe.step()
    return 0.0


def clip_alone(parameters: list[nn.Parameter]) -> Callable[..., Tensor]:
    """The clip of a run without a probe: over all ranks, as the probe's."""
    mesh: DeviceMesh = max((p.device_mesh for p in parameters if isinstance(p, DTensor)), key=lambda m: m.size())
    return lambda max_norm: sonde.clip_grad_norm_(parameters, max_norm, mesh=mesh)


def gathered(model: nn.Module) -> list[nn.Parameter]:
    """The whole parameters that FSDP2 has gathered."""
    found = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            found += [p for p in module.parameters() if not isinstance(p, DTensor)]
            module.reshard()
    return found


def by_hand(whole: dict[str, Tensor], loop: Loop, window: int) -> Values:
    """(tr Σ, |G|²) of the total and of each group, from the whole gradient of every piece of every rank in float64.

    With per_example="always", every example is a piece. In bf16, a piece's gradient is that of a bf16 model, and only
    the sums are in float64.
    """
    dtype = torch.bfloat16 if loop.mixed else torch.float64
    model = copy.deepcopy(build(loop))
    for name, p in model.named_parameters():
        p.data = whole[name].to(p.device)
    model = model.to(dtype)
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    pieces, weights, units = [], [], []
    for rank in range(n_data_ranks(loop)):
        for k in range(2):
            ids = tokens(rank, window, k)
            parameters = [p for p in model.parameters() if p.requires_grad]
            parts = ids.split(1) if loop.options.get("per_example") == "always" else [ids]
            for part in parts:
                share = 1.0 if loop.weighted else 1.0 / len(parts)
                grads = torch.autograd.grad(share * loss_of(model, part, loop), parameters)
                pieces.append(dict(zip(names, (g.double().flatten() for g in grads), strict=True)))
                weights.append((len(ids) if loop.weighted else 1.0) / len(parts))
                units.append(len(part))
    group_of = str if loop.options.get("groups") == "parameters" else block_of
    groups = list(dict.fromkeys(group_of(n) for n in names))
    solved = []
    for group in groups:
        gradients = [torch.cat([piece[n] for n in names if group_of(n) == group]) for piece in pieces]
        final = torch.stack(gradients).sum(0) / n_data_ranks(loop)
        solved.append(window_by_hand(gradients, weights, units, final))
    return with_total(solved)
