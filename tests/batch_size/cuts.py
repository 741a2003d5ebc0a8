"""Models cut over ranks in every way that sonde knows, as a `Loop` says it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.batch_size.set_ups import (
    N_MICRO,
    Loop,
    Stage,
    bare,
    build,
    loss_of,
    loss_of_stages,
    of_window,
    tokens,
    with_peft,
)
from tests.ranks import mesh_of


def in_bf16(state: object, bucket):  # type: ignore[no-untyped-def]  # torch's own refuses gloo by its name
    return default_hooks.bf16_compress_hook(state, bucket)


HOOKS: dict[str, Any] = {
    "allreduce": default_hooks.allreduce_hook,
    "bf16": in_bf16,
    "powersgd": powerSGD_hook.powerSGD_hook,
}


def in_two_groups(parameters: list[Any]) -> torch.optim.Optimizer:
    rest = {"params": parameters[3:], "betas": (0.8, 0.9), "eps": 1e-3}
    return torch.optim.AdamW([{"params": parameters[:3]}, rest], lr=1e-2)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "one by one": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=False),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, amsgrad=True, foreach=False),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-2),
    "RAdam": lambda parameters: torch.optim.RAdam(parameters, lr=1e-2),
    "two groups": in_two_groups,
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}


@dataclass
class Cut:
    """A model as this rank holds it, and the arguments that tell the probe how it is cut."""

    loop: Loop
    model: nn.Module
    arguments: dict[str, Any] = field(default_factory=dict)
    averaged_by_loop: list[nn.Parameter] = field(default_factory=list)
    """Parameters whose gradients nobody else averages."""
    schedule: Any = None
    numbers: tuple[int, ...] = ()
    """Of this rank's stages."""
    scaler: torch.amp.GradScaler = field(init=False)

    def __post_init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3, enabled=self.loop.scaled)

    @property
    def n_stages(self) -> int:
        return 4 if self.loop.looped else 2

    def backward(self, window: int, piece: int, *, is_last: bool) -> None:
        """The backward of one of this rank's pieces."""
        with self.synchronised(is_last):
            self.scaler.scale(self.loss(window, piece)).backward()

    def loss(self, window: int, piece: int) -> Tensor:
        loop = self.loop
        part, n_parts = (dist.get_rank() % 2, 2) if loop.has("cp") else (0, 1)
        with torch.autocast("cpu", torch.bfloat16, enabled=loop.autocast):
            return loss_of(loop, self.model, tokens(loop, loop.data_rank, window, piece), part, n_parts)

    @contextlib.contextmanager
    def synchronised(self, is_last: bool) -> Iterator[None]:
        """Gradients are averaged over ranks in the last piece alone, or in every one."""
        reduces = is_last or self.loop.sync == "every"
        model = getattr(self.model, "_orig_mod", self.model)
        if isinstance(model, DistributedDataParallel) and not reduces:
            with model.no_sync():
                yield
            return
        if outermost := next((m for m in self.model.modules() if isinstance(m, FSDPModule)), None):
            outermost.set_requires_gradient_sync(reduces)
        yield

    def run_schedule(self, window: int, targets: Tensor | None = None) -> None:
        """All micro-batches of this rank's stages."""
        inputs, wanted = of_window(self.loop.data_rank, window)
        last = {"target": wanted if targets is None else targets} if self.n_stages - 1 in self.numbers else {}
        self.schedule.step(*([inputs] if 0 in self.numbers else []), **last)

    def reduce(self) -> None:
        """What the loop averages itself before the step."""
        for p in self.averaged_by_loop:
            if p.grad is not None:
                average(p)
        for p in self.model.parameters() if self.loop.summed else ():
            p.grad.mul_(dist.get_world_size())  # type: ignore[union-attr]
        if self.loop.has("ep") and (self.loop.has("plain") or self.loop.n_feeding == 4):
            reduce_experts(self.loop, self.model)


def made(loop: Loop) -> Cut:
    """The model on this rank."""
    if loop.has("pp"):
        return pipeline(loop)
    if loop.has("ep"):
        return with_experts(loop)
    if loop.has("cp"):
        return sharing_sequences(loop)
    if loop.adapters in ("hooks", "loop"):
        return with_plain_adapters(loop)
    model = build(loop)
    if loop.has("ddp"):
        return in_ddp(model, loop)
    if loop.has("plain"):
        return Cut(loop, model, {"process_group": dist.group.WORLD} if loop.says_so else {}, list(model.parameters()))
    return Cut(loop, perhaps_compiled(model, loop) if loop.has("one") else sharded(model, loop))


def perhaps_compiled(model: nn.Module, loop: Loop) -> nn.Module:
    compiled: Any = torch.compile(model, backend="aot_eager") if loop.compiled else model
    return compiled  # type: ignore[no-any-return]


def in_ddp(model: nn.Module, loop: Loop) -> Cut:
    """With the user's hook registered."""
    ddp = DistributedDataParallel(model, **loop.ddp)
    if loop.hook:
        hook = HOOKS[loop.hook]
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2) if loop.hook == "powersgd" else None
        ddp.register_comm_hook(state, hook)
    return Cut(loop, perhaps_compiled(ddp, loop))


def sharded(model: Any, loop: Loop, **options: Any) -> Any:
    """The model cut by FSDP2, by tensor parallelism, or both."""
    if not loop.has("tp", "sp"):
        shape = loop.mesh or (dist.get_world_size(),)
        # PEFT takes an axis of any other name for tensor parallelism.
        names = ("fsdp",) if loop.peft else ("replicate", "shard")[2 - len(shape) :]
        return fully_sharded(model, mesh_of(shape, names), loop, **options)
    mesh = mesh_of((dist.get_world_size() // 2, 2), ("dp", "tp"))
    if loop.adapters:
        whole = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, mesh["tp"], {"blocks.*.up.base": whole, "blocks.*.down.base": whole})
    else:
        tensor_parallel(model, mesh["tp"], "blocks.*", in_sequence=loop.has("sp"))
    return fully_sharded(model, mesh["dp"], loop, **options) if loop.has("fsdp") else model


def tensor_parallel(model: nn.Module, mesh: Any, blocks: str, *, in_sequence: bool) -> None:
    """Cut every layer; with `in_sequence`, activations between layers are cut along the sequence."""
    between = Shard(1) if in_sequence else Replicate()
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        f"{blocks}.up": ColwiseParallel(input_layouts=between),
        f"{blocks}.down": RowwiseParallel(output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan | ({f"{blocks}.norm": SequenceParallel()} if in_sequence else {}))


def fully_sharded(model: Any, mesh: Any, loop: Loop, **options: Any) -> Any:
    """Cut the model by FSDP2: each block, and the rest."""
    options |= {"mesh": mesh} | loop.fsdp
    if loop.bf16 == "parameters":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    elif loop.bf16:
        options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    for block in model.get_submodule("base_model.model" if hasattr(model, "base_model") else "").blocks:
        if loop.compiled:
            block.compile(backend="aot_eager")
        fully_shard(block, **options)
    return fully_shard(model, **options)


OFFLOADED = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}


def average(p: Tensor) -> None:
    """Average a gradient over all ranks. What has been averaged before stays as it is."""
    assert p.grad is not None
    dist.all_reduce(p.grad)
    p.grad /= dist.get_world_size()


def with_plain_adapters(loop: Loop) -> Cut:
    """Frozen layers that FSDP2 cuts, and adapters that it does not."""
    if loop.peft:
        model = with_peft(sharded(bare(loop).requires_grad_(False), loop), loop)
        plain = [p for n, p in model.named_parameters() if ".lora_" in n]
    else:
        model = build(loop)
        plain = [p for n, p in model.named_parameters() if n.endswith((".a", ".b"))]
        sharded(model, loop, ignored_params=set(plain))
    if loop.adapters == "loop":
        return Cut(loop, model, averaged_by_loop=plain)
    for p in plain:
        p.register_post_accumulate_grad_hook(average)
    return Cut(loop, model)


def sharing_sequences(loop: Loop) -> Cut:
    """Pairs of ranks have a half of each sequence."""
    mesh, model = mesh_of((dist.get_world_size() // 2, 2), ("dp", "cp")), build(loop)
    model.attention.group = mesh["cp"].get_group()  # type: ignore[union-attr]
    of_all = {"mesh": mesh, "cp_mesh": mesh["cp"]}
    if loop.has("plain"):  # where all ranks share sequences, cp_mesh= is the mesh of all ranks
        arguments = of_all if mesh["dp"].size() > 1 else {"cp_mesh": mesh["cp"]}
        return Cut(loop, model, arguments, list(model.parameters()))
    if loop.has("ddp"):
        return Cut(loop, DistributedDataParallel(model, find_unused_parameters=True), of_all)
    axes = mesh if loop.has("hsdp") else mesh_of((dist.get_world_size(),))
    return Cut(loop, fully_sharded(model, axes, loop), of_all if loop.has("fsdp") else {"cp_mesh": mesh["cp"]})


def with_experts(loop: Loop) -> Cut:
    """Experts over some of four ranks, and the other parameters cut by FSDP2 or left whole."""
    n_same = 4 // loop.n_feeding
    both = mesh_of((n_same, loop.n_feeding), ("dp", "ep"))
    needed: dict[str, Any] = {"mesh": both, "expert_mesh": both["ep"]}
    model: Any = build(loop)
    model.ep = both["ep"]
    model.experts.w = nn.Parameter(distribute_tensor(model.experts.w.detach(), both["ep"], [Shard(0)]))
    if loop.has("plain"):
        rest = [p for p in model.parameters() if not isinstance(p, DTensor)]
        return Cut(loop, model, needed if loop.says_so else {"mesh": both}, rest)
    if loop.has("tp"):
        mesh = mesh_of((2, 2), ("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"head": ColwiseParallel(output_layouts=Replicate())})
        return Cut(loop, fully_shard(model, mesh=mesh["dp"], ignored_params={model.experts.w}))
    if n_same == 1:
        return Cut(loop, fully_shard(model, mesh=mesh_of((4,)), ignored_params={model.experts.w}))
    fully_shard(model.experts, mesh=both["dp"], shard_placement_fn=lambda _: Shard(1))
    if loop.averaged:
        model.experts.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it sums
        model.experts.set_gradient_divide_factor(4.0)
    return Cut(loop, fully_shard(model, mesh=mesh_of((4,))), needed if loop.n_feeding == 1 else {})


def reduce_experts(loop: Loop, model: Any) -> None:
    """The experts that FSDP2 does not cut."""
    n_same, grad = 4 // loop.n_feeding, model.experts.w.grad
    if n_same > 1:
        dist.all_reduce(grad._local_tensor, group=mesh_of((n_same, loop.n_feeding), ("dp", "ep")).get_group("dp"))
    grad._local_tensor.div_(4 if loop.averaged else n_same)


def pipeline(loop: Loop) -> Cut:
    """This rank's stages, each perhaps cut over further ranks."""
    dp, tp, copies = (loop.axes.get(name, 1) for name in ("dp", "tp", "replicate"))
    shape, names = (
        ((2, copies, dp // copies), ("pp", "replicate", "shard")) if copies > 1 else ((2, dp, tp), ("pp", "dp", "tp"))
    )
    mesh = mesh_of(shape, names)
    at, looped = mesh.get_local_rank("pp"), loop.looped
    whole = bare(loop)
    which = [(i,) for i in looped[at]] if looped else [((0, 1), (2, 3))[at]]
    modules: list[Any] = [Stage(whole, parts) for parts in which]
    if tp > 1:
        for module in modules:
            tensor_parallel(module, mesh["tp"], "block*", in_sequence=loop.has("sp"))
    if loop.has("ddp"):
        modules = [DistributedDataParallel(m, process_group=mesh.get_group("dp")) for m in modules]
    elif dp > 1:
        axes = mesh["replicate", "shard"] if copies > 1 else mesh["dp"]
        modules = [fully_shard(m, mesh=axes) for m in modules]
    cut = Cut(
        loop, nn.ModuleList(modules), {"mesh": mesh, "pp_mesh": mesh["pp"]}, numbers=looped[at] if looped else (at,)
    )
    device, group = torch.device("cpu"), mesh.get_group("pp")
    stages = [PipelineStage(m, n, cut.n_stages, device, group=group) for m, n in zip(modules, cut.numbers, strict=True)]
    schedule: Any = getattr(schedules, loop.schedule)
    cut.schedule = schedule(
        stages if looped else stages[0], N_MICRO, loss_fn=lambda out, y: loss_of_stages(out, y, loop.weighted)
    )
    return cut
