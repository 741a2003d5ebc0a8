"""What attach refuses on ranks: by name, with what works there, and on all ranks even where one alone is at fault."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import sonde
from tests.batch_size.cuts import Cut, made
from tests.batch_size.loops import attached, small_model
from tests.batch_size.set_ups import Loop
from tests.ranks import Ranks, mesh_of

WORLD = {"process_group": None}  # the group of all ranks, which exists on ranks alone


def attach(model: Any, *, of_rank_1: dict[str, Any] | None = None, **options: Any) -> None:
    """Attach to a model or a cut; rank 1 may have options of its own."""
    if isinstance(model, Cut):
        model, options = model.model, options | model.arguments
    options |= of_rank_1 or {} if dist.get_rank() == 1 else {}
    if "process_group" in options:
        options["process_group"] = dist.group.WORLD
    attached(model, options.pop("optimizer", None), **options).close()


class DeepSpeedEngine(nn.Module):
    """What sonde knows DeepSpeed's engine by: a module that holds the model, of a class in a package of that name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


DeepSpeedEngine.__module__ = "deepspeed.runtime.engine"


def of_the_first_version() -> Any:
    return FullyShardedDataParallel(small_model(), device_id=torch.device("cpu"))


def on_the_meta_device() -> nn.Module:
    with torch.device("meta"):
        model = small_model()
    return fully_shard(model, mesh=mesh_of((2,)))


def in_ddp_and_in_fsdp() -> nn.ModuleDict:
    return nn.ModuleDict(
        {"a": fully_shard(small_model(), mesh=mesh_of((2,))), "b": DistributedDataParallel(small_model())}
    )


def cut_inside_ddp() -> nn.Module:
    model = DistributedDataParallel(small_model())
    parallelize_module(model.module, mesh_of((2,)), {"0": ColwiseParallel()})
    return model


WRAPPERS: list[Any] = []
"""Kept alive while what is inside of them is attached to."""


def inside(wrapper: Any) -> Any:
    WRAPPERS[:] = [wrapper]
    return getattr(wrapper, "_orig_mod", wrapper).module


def stage(which: str) -> None:
    """Rank 0's stage of a pipeline cannot be measured."""
    mesh = mesh_of((2,), ("pp",))
    module: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    if dist.get_rank() == 0 and which == "frozen":
        module.requires_grad_(False)
    elif dist.get_rank() == 0 and which == "complex":
        module.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    elif dist.get_rank() == 0:
        module = nn.Tanh()
    attach(module, mesh=mesh, pp_mesh=mesh)


def frozen_on_one_rank() -> None:
    model = small_model()
    model[0].bias.requires_grad_(dist.get_rank() == 0)
    attach(model, **WORLD)


def other_optimizers() -> None:
    """One rank gives the optimizer of the head, the other both."""
    model = small_model()
    parts = [torch.optim.SGD(model[:2].parameters()), torch.optim.Adam(model[2:].parameters())]
    attach(DistributedDataParallel(model), optimizer=parts[1] if dist.get_rank() else parts)


def adam_without_moments() -> None:
    model = small_model()
    optimizer = (torch.optim.SGD if dist.get_rank() else torch.optim.AdamW)(model.parameters(), lr=0.1)
    attach(model, optimizer=optimizer, metric="adam", **WORLD)


def compiled_on_one_rank() -> None:
    model: Any = small_model()
    attach(torch.compile(model, backend="eager") if dist.get_rank() else model, per_example="always", **WORLD)


def in_metric(cut: str, metric: str) -> None:
    model = made(Loop(cut)).model
    attach(model, optimizer=torch.optim.AdamW(model.parameters()), metric=metric)


def ddp() -> nn.Module:
    return DistributedDataParallel(small_model())


def both_axes(*, of_experts: bool = True) -> Any:
    return mesh_of((2, 2), ("dp", "ep" if of_experts else "cp"))


def experts(**arguments: Any) -> None:
    attach(made(Loop("ep plain", says_so=False)).model, mesh=both_axes(), **arguments)


def other_experts() -> None:
    weight = distribute_tensor(torch.ones(4), both_axes()["ep"], [Shard(0)])
    attach(nn.ParameterList([nn.Parameter(weight)]), mesh=both_axes()["ep"], expert_mesh=both_axes()["dp"])


def sequences(cut: str, **arguments: Any) -> None:
    attach(made(Loop(cut)).model, **arguments)


def cp() -> Any:
    return both_axes(of_experts=False)


PEER = "another rank refused to attach"
NO_CP, SEVERAL = (
    "cp_mesh= is no axis of the mesh of all ranks: pass mesh=",
    "expert_mesh= has several ranks, and no trai",
)
OF_TWO: dict[str, tuple[Callable[[], None], Any]] = {
    # What cannot be measured.
    "a process group of FSDP2": (lambda: attach(made(Loop()), **WORLD), "a sharded model knows its ranks"),
    "no mesh": (lambda: attach(made(Loop()), mesh=2), "mesh must be a DeviceMesh, got 2"),
    "FSDP1": (lambda: attach(of_the_first_version()), "FSDP's first version does not show the gradients.*fully_shard"),
    "inside FSDP1": (lambda: attach(inside(of_the_first_version())), "inside a module of FSDP's first version"),
    "on meta": (
        lambda: attach(on_the_meta_device()),
        "is on the meta device, which holds no values: attach after to_emp",
    ),
    "inside DDP": (lambda: attach(inside(ddp())), "pass that module, as trainer.model_wrapped"),
    "inside a compiled DDP": (
        lambda: attach(inside(torch.compile(ddp(), backend="eager"))),
        "pass that module, as trainer.model_wrapped",
    ),
    "DeepSpeed": (
        lambda: attach(DeepSpeedEngine(small_model())),
        "DeepSpeed .DeepSpeedEngine. does not show the gradients of micro-batches.*engine.get_global_grad_norm",
    ),
    "inside DeepSpeed": (
        lambda: attach(inside(DeepSpeedEngine(small_model()))),
        "DeepSpeed .DeepSpeedEngine. does not",
    ),
    "one part in DDP, one in FSDP2": (
        lambda: attach(in_ddp_and_in_fsdp()),
        "DDP holds one part of the model, and 'a.0.weight' outside that part is cut over ranks.*a probe to each part",
    ),
    "shards in DDP": (
        lambda: attach(cut_inside_ddp()),
        "DDP holds '0.weight', which is cut over ranks .a DTensor., and",
    ),
    "Adam's metric, FSDP2": (
        lambda: in_metric("fsdp", "adam"),
        "leaves each rank a part, got FSDP2: use metric='sign' or",
    ),
    "sign, TP": (lambda: in_metric("tp", "sign"), "needs the whole gradient of each piece on one rank"),
    "spectral, FSDP2": (
        lambda: in_metric("fsdp", "spectral"),
        "each matrix whole on one rank, got a model cut by FSDP2",
    ),
    "Adam's metric, FSDP2 of one rank": (lambda: in_metric("fsdp over tp", "adam"), "no error"),  # it has it whole
    # Ranks that differ.
    "a scaler on rank 1": (
        lambda: attach(ddp(), of_rank_1={"grad_scaler": print}),
        (PEER, "grad_scaler must be a torch.amp.GradScaler"),
    ),
    "a frozen stage": (lambda: stage("frozen"), ("the model", "another rank's pipeline stage.* stage 0: the model")),
    "a stage without parameters": (
        lambda: stage(""),
        ("the model", "another rank's pipeline stage.* stage 0: the mod"),
    ),
    "a complex stage": (
        lambda: stage("complex"),
        ("gradients must be real", "another rank's .* stage 0: gradients must"),
    ),
    "units": (
        lambda: attach(ddp(), of_rank_1={"unit": "rows of rank 1"}),
        "unit differs between ranks, got '(rows|rows of rank 1)' on this rank",
    ),
    "further units": (
        lambda: attach(small_model(), of_rank_1={"unit": ("rows", "tokens")}, **WORLD),
        "the list of further units differs between ranks",
    ),
    "every": (lambda: attach(ddp(), every=3, of_rank_1={"every": 6}), "every differs between ranks"),
    "budget": (
        lambda: attach(ddp(), every=None, budget=0.1, of_rank_1={"budget": 0.2}),
        "budget differs between ranks",
    ),
    "parameters": (frozen_on_one_rank, "the list of measured parameters differs between ranks"),
    "optimizers": (other_optimizers, "the list of measured parameters differs between ranks"),
    "a metric": (adam_without_moments, (PEER, "metric='adam'")),
    "compiled on one rank": (compiled_on_one_rank, ("but another rank cannot read them", "is compiled")),
}
OF_FOUR: dict[str, tuple[Callable[[], None], Any]] = {
    "a mesh without the stages": (
        lambda: attach(made(Loop("pp ddp", axes={"dp": 2})).model, **of_stages("dp")),
        "pp_mesh= is no axis of mesh=",
    ),
    "cp_mesh= alone": (lambda: sequences("fsdp over cp", cp_mesh=cp()["cp"]), NO_CP),
    "cp_mesh= of two axes": (
        lambda: sequences("fsdp over cp", mesh=cp(), cp_mesh=cp()),
        "cp_mesh must have 1 axis, got 2",
    ),
    "DDP of other ranks": (
        lambda: sequences("ddp over cp", cp_mesh=cp()["cp"]),
        "DDP averages over other ranks than those of mesh=",
    ),
    "CP over TP": (
        lambda: sequences("fsdp over tp", cp_mesh=mesh_of((2, 2), ("dp", "tp"))["dp"]),
        "context parallelism is measured alone and below FSDP2 or DDP",
    ),
    "plain experts": (
        lambda: attach(made(Loop("one process")).model, expert_mesh=both_axes()["ep"]),
        "expert_mesh= is for experts that are DTensors",
    ),
    "the other axis": (lambda: experts(expert_mesh=both_axes()["dp"]), SEVERAL),
    "other experts": (other_experts, SEVERAL),
    "two axes of experts": (lambda: experts(expert_mesh=both_axes()), "expert_mesh must have 1 axis, got 2"),
    "a name of experts": (lambda: experts(expert_mesh="ep"), "expert_mesh must be a DeviceMesh, got 'ep'"),
    "two kinds of experts": (
        lambda: attach(nn.ModuleList([made(Loop("ep fsdp", n_feeding=n)).model for n in (2, 4)])),
        "experts are spread over different sets of ranks",
    ),
}


def of_stages(axis: str) -> dict[str, Any]:
    mesh = mesh_of((2, 2, 1), ("pp", "dp", "tp"))
    return {"mesh": mesh[axis], "pp_mesh": mesh["pp"]}


WRAPPED = {"DDP": (2, "ddp"), "FSDP2": (2, "fsdp"), "TP": (2, "tp"), "PP": (2, "pp"), "EP": (4, "ep fsdp")}
WRAPPED |= {"DDP over CP": (2, "ddp over cp"), "FSDP2 over CP": (2, "fsdp over cp")}
DIFFERENT: dict[str, tuple[dict[str, Any], Any]] = {
    "allowance": ({"allowance": 20.0}, "allowance differs between ranks, got (10.0|20.0) on this rank"),
    "groups": ({"groups": None}, "the groups of parameters differs between ranks"),
    "an option out of range": ({"allowance": -1.0}, (PEER, "allowance must be seconds")),
    "a group function that fails": ({"groups": lambda name: 1 / 0}, (PEER, "division by zero")),
    "no optimizer for Adam's metric": ({"metric": "adam"}, (PEER, "got no optimizer")),
}


def said(attempt: Callable[[], None]) -> str:
    try:
        attempt()
    except (ValueError, ArithmeticError) as error:
        return str(error)
    return "no error"


def attempted(name: str) -> str:
    return said((OF_TWO | OF_FOUR)[name][0])


def with_other_options(cut: str) -> dict[str, str]:
    return {name: said(partial(attach, made(Loop(cut)), of_rank_1=own)) for name, (own, _) in DIFFERENT.items()}


def assert_said(messages: list[str], expected: Any, name: str) -> None:
    """Of all ranks, or of each: those after the first two say what the first one says."""
    for rank, message in enumerate(messages):
        pattern = expected if isinstance(expected, str) else expected[rank == 1]
        assert re.search(pattern, message), (name, rank, message)


@pytest.mark.parametrize("name", [*OF_TWO, *OF_FOUR])
def test_refused_on_all_ranks(request: pytest.FixtureRequest, name: str) -> None:
    ranks: Ranks = request.getfixturevalue("ranks2" if name in OF_TWO else "ranks4")
    assert_said(ranks(attempted, name), (OF_TWO | OF_FOUR)[name][1], name)


@pytest.mark.parametrize("name", WRAPPED)
def test_arguments_that_one_rank_refuses_or_that_differ(request: pytest.FixtureRequest, name: str) -> None:
    n_ranks, cut = WRAPPED[name]
    results = request.getfixturevalue(f"ranks{n_ranks}")(with_other_options, cut)
    for option, (_, expected) in DIFFERENT.items():
        assert_said([of_rank[option] for of_rank in results], expected, option)


def other_quantities() -> list[str]:
    policy = made(Loop("ep fsdp")).model
    measure = [
        lambda: sonde.PromptNoiseProbe(policy).measure(None),  # type: ignore[arg-type]
        lambda: sonde.measure(policy, lambda m, b: m(b).sum(), [torch.ones(1)]),
    ]
    return [said(each) for each in measure]  # type: ignore[arg-type]


@pytest.mark.refuses("prompts", "EP")
@pytest.mark.refuses("measure", "EP")
def test_other_quantities_of_experts_are_refused(ranks4: Ranks) -> None:
    for prompts, measure in ranks4(other_quantities):
        assert prompts.startswith("gradients of single prompts cannot be read of experts that several ranks feed")
        assert measure.startswith("sonde.measure does not read experts that are spread over ranks yet")


def probes_for_each_part() -> list[int]:
    model, x = in_ddp_and_in_fsdp(), torch.randn(2, 12)
    with attached(model["a"]) as of_a, attached(model["b"]) as of_b:
        for _ in range(2):
            with of_a.piece(units=2), of_b.piece(units=2):
                (model["a"](x) + model["b"](x)).square().sum().backward()
        of_a.step()
        of_b.step()
        return [of_a.reading().windows, of_b.reading().windows]


def test_a_probe_for_each_part_of_another_wrapper_measures(ranks2: Ranks) -> None:
    """As the refusal of a model of DDP and FSDP2 says."""
    assert ranks2(probes_for_each_part) == [[1, 1]] * 2


class NoRoom:
    """A log that cannot begin."""

    must_begin = True

    def open(self, *args: object) -> None:
        raise OSError("no space left on device")

    write = close = open


def with_a_log_that_fails(cut: str) -> tuple[str, int, str]:
    """What is said, whether hooks are left, and what the log says to a probe of this rank alone."""
    model, log = made(Loop(cut)).model, sonde.RunLog([NoRoom()] if dist.get_rank() == 0 else [])
    said = []
    for each in (model, small_model()):
        with pytest.raises((OSError, RuntimeError)) as error:
            attached(each, log=log)
        said.append(str(error.value))
    return said[0], sum(bool(p._backward_hooks) for p in model.parameters()), said[1]


@pytest.mark.parametrize("cut", ["ddp", "fsdp"])
def test_a_log_that_one_rank_cannot_begin(ranks2: Ranks, cut: str) -> None:
    (failed, _, own_log), (told, n_left, log) = ranks2(with_a_log_that_fails, cut)
    assert failed == "no space left on device"
    assert told == "the log of the run could not be begun on another rank, whose error says why: no rank measures"
    assert n_left == 0
    assert own_log == log
    assert log.startswith("this log has ended, as every probe that wrote to it was closed: make a new RunLog")
