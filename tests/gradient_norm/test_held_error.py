"""An error on one rank: the other ranks raise too, no rank waits for ever, and gradients stay unchanged."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import sonde
from tests.gradient_norm.placed_gradients import Call, Case, check_on_ranks, each_of, placed, plain, with_grad, world
from tests.ranks import Ranks, mesh_of
from tests.sharded import fsdp

rank = dist.get_rank


def stray(make: Callable[[], nn.Parameter]) -> Callable[[], Call]:
    """A parameter that only rank 1 has, beside a model under FSDP2."""

    def call() -> Call:
        cut = fsdp()
        named = [*cut.parameters.items(), *([("stray", make())] if rank() == 1 else [])]
        return Call(named, {"mesh": cut.mesh})

    return call


def asked(option: str, value: Any, **others: Any) -> Callable[[], Call]:
    """Rank 1 asks for something that cannot be; the gradients are cut over both ranks."""

    def call() -> Call:
        cut, options = fsdp(), dict(others)
        max_norm = value if option == "max_norm" and rank() == 1 else 1.0
        if option != "max_norm" and rank() == 1:
            options[option] = value
        return Call([*cut.parameters.items()], {"mesh": cut.mesh, **options}, max_norm)

    return call


def on_meta(*placement: Any) -> nn.Parameter:
    local = DTensor.from_local(torch.ones(3, device="meta"), world(), list(placement), run_check=False)
    p = nn.Parameter(local.detach())
    p.grad = local
    return p


def mesh_of_this_rank() -> Call:
    return Call([*fsdp().parameters.items()], {"mesh": DeviceMesh("cpu", [rank()], _init_backend=False)})


def bad_among_partial() -> Call:
    p = placed(torch.ones(3), world(), [Partial()], (3,), [Replicate()])
    device = "meta" if rank() else "cpu"
    q = placed(torch.ones(5, device=device), world(), [Partial()], (5,), [Replicate()])
    return Call([("p", p), ("q", q)], {"mesh": world()})


def instead(function: Callable[..., Any], bad: Callable[[nn.Parameter], Any], **options: Any) -> Callable[[], Call]:
    """Rank 1 passes something else than the plain parameter of the other ranks."""

    def call() -> Call:
        p = plain(torch.ones(3))
        good: Any = [p.grad] if function is sonde.get_total_norm else [p]
        given = bad(p) if rank() == 1 else good
        more = {name: value for name, value in options.items() if rank() == 1}
        return Call(given, {"mesh": world(), **more}, by=function)

    return call


def other_parameters(function: Callable[..., Any], kind: str) -> Callable[[], Call]:
    """A parameter that is cut over both axes of a mesh, and a plain one; rank 1 passes something else."""

    def call() -> Call:
        mesh = mesh_of((2, 2), ("dp", "tp"))
        both: Any = [placed(torch.ones(2, 2), mesh, [Shard(0), Shard(1)], (4, 4)), plain(torch.ones(3))]
        others = {"none": None, "empty": [], "fewer": both[1:], "None among them": [None, both[1]]}
        return Call(others[kind] if rank() == 1 else both, {"mesh": mesh}, by=function)

    return call


def groups(names: Any, order: float) -> Callable[[], Call]:
    def call() -> Call:
        by_group = names if rank() else [str(k) for k in range(100)]
        options = {"norm_type": order, "mesh": world(), "by_group": by_group}
        return Call([torch.ones(2) for _ in range(100)], options, by=sonde.get_total_norm)

    return call


def first_fsdp() -> Call:
    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=True)
    model(torch.ones(2, 4)).sum().backward()
    return Call([*model.named_parameters()])


def on_stages(make: Callable[[], Tensor]) -> Call:
    """Plain parameters of two stages, without `mesh=`."""
    return Call([with_grad(make())], {"pp_mesh": mesh_of((2,), ("pp",))})


class Raising(torch.Tensor):
    """A gradient whose elements cannot be read: any kernel raises an error that is no RuntimeError."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("reshape", "copy_", "to", "double", "view", "aminmax", "abs"):
            raise LookupError("these elements are elsewhere")
        return super().__torch_function__(func, types, args, kwargs or {})


class Nowhere(torch.Tensor):
    """A gradient of a kind that nobody knows: it does not say on which device it is."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            raise LookupError("it is nowhere")
        return super().__torch_function__(func, types, args, kwargs or {})


def unreadable(order: float) -> Call:
    gradient = torch.ones(3).as_subclass(Raising) if rank() else torch.ones(3)
    return Call([with_grad(gradient)], {"norm_type": order, "mesh": world()}, None)


PEER = "another rank was called with something that cannot be used, or found a gradient that cannot be counted"
META = "gradient of stray: it is on meta and its mesh on cpu"
DECLARED = "replicas must be a mapping from parameters or their names"
CALLS = (sonde.clip_grad_norm_, sonde.group_parameters_for_norm)
BAD_OPTIONS: list[tuple[str, Any, str]] = [
    ("max_norm", -1.0, "max_norm must be ≥ 0, got -1.0"),
    ("nonfinite", "drop", "nonfinite must be one of"),
    ("norm_type", -1.0, "norm_type must be > 0, got -1.0"),
    ("norm_type", "two", "norm_type must be > 0, got 'two'"),
    ("norm_type", 7.0, "norm_type must be at most 6, or math.inf, got 7.0"),
]
CASES = [
    Case("complex", 2, stray(lambda: plain(torch.zeros(3) * 1j)), (PEER, "gradient of stray: it is complex")),
    Case(
        "placement",
        2,
        stray(lambda: placed(torch.ones(2), world(), [Partial("max")], (2,), [Replicate()])),
        (PEER, r"gradient of stray: placement Partial\(max\) on mesh axis 0 is not supported"),
    ),
    Case("device", 2, stray(lambda: on_meta(Replicate())), (PEER, META)),
    Case("plain on meta", 2, stray(lambda: with_grad(torch.zeros(3, device="meta"))), (PEER, META)),
    Case(
        "fp8",
        2,
        stray(lambda: with_grad(torch.zeros(3, dtype=torch.float8_e4m3fn))),
        (PEER, "gradient of stray: its dtype is torch.float8_e4m3fn, and only fp16, bf16, fp32 and fp64"),
    ),
    Case("threshold", 2, asked("max_norm", math.nan), (PEER, "max_norm must be ≥ 0, got nan")),
    Case(
        "replicas", 2, asked("replicas", {"typo": 1}), (PEER, "replicas= has 'typo', which is not among the parameters")
    ),
    Case(
        "many", 2, asked("replicas", {"back.up.weight": 2}), (PEER, "back.up.weight: it is cut into 2 shards over 2 of")
    ),
    *(
        Case(f"{o}, {v}, p {p}", 2, asked(o, v, **({} if o == "norm_type" else {"norm_type": p})), (PEER, match))
        for o, v, match in BAD_OPTIONS
        for p in (2.0, math.inf)
        if v != "two" or p == 2.0
    ),
    Case(
        "mesh",
        2,
        mesh_of_this_rank,
        r"on ranks 0, 1, which mesh= \(.*pass the mesh of all ranks that hold the model",
        0,
    ),
    Case("among partial ones", 2, bad_among_partial, (PEER, "gradient of q: it is on meta"), 2),
    Case("no tensor", 2, instead(sonde.clip_grad_norm_, lambda p: [p, 1.0]), (PEER, "parameters must be tensors")),
    Case(
        "pp_mesh",
        2,
        instead(sonde.clip_grad_norm_, lambda p: [p], pp_mesh="stages"),
        (PEER, "pp_mesh must be a DeviceM"),
    ),
    Case("a module", 2, instead(sonde.get_total_norm, lambda p: nn.Linear(2, 1)), (PEER, "got the module Linear")),
    *(
        Case(
            f"replicas={replicas} in {f.__name__}",
            2,
            instead(f, lambda p, f=f: [p.grad] if f is sonde.get_total_norm else [p], replicas=replicas),
            ("another rank", DECLARED),
        )
        for f in (*CALLS, sonde.get_total_norm)
        for replicas in ([1], 2, "w")
    ),
    *(
        Case(
            f"{kind} in {f.__name__}",
            4,
            other_parameters(f, kind),
            ("another rank", "must be tensors", *["another rank"] * 2),
        )
        for f in CALLS
        for kind in ("none", "None among them")
    ),
    *(
        Case(f"{kind} in {f.__name__}", 4, other_parameters(f, kind), "have different parameters")
        for f in CALLS
        for kind in ("empty", "fewer")
    ),
    *(
        Case(f"groups {names!s:.5}, p {p}", 2, groups(names, p), (PEER, match))
        for names, match in (
            ("ab", "got 'ab': pass a list of names"),
            (["a"], "got 1 names for 100 tensors"),
            ([1] * 100, "with the name of each tensor's group, got .1, 1"),
        )
        for p in (2.0, math.inf)
    ),
    Case("FSDP1", 2, first_fsdp, "FSDP's first version does not tell how it cuts parameters", None),
    Case("no groups", 2, groups(None, 2.0), "by_group= differs between ranks"),
    Case(
        "stage on meta",
        2,
        lambda: on_stages(lambda: torch.ones(3, device="meta" if rank() else "cpu")),
        (PEER, "it is on the meta device"),
    ),
    *(
        Case(
            f"unexpected, p {p}",
            2,
            lambda p=p: unreadable(p),
            (PEER, "gradients cannot be summed on cpu: LookupError: these elements are elsewhere"),
        )
        for p in (2.0, math.inf)
    ),
]


@each_of(CASES)
def test_what_is_wrong_on_one_rank_is_raised_on_all(request: pytest.FixtureRequest, index: int) -> None:
    check_on_ranks(request, __name__, index)


def _elsewhere() -> list[str]:
    """A parameter on ranks 0 and 1 only, and meshes of those ranks given on all four."""
    few, everyone = DeviceMesh("cpu", [0, 1]), world()
    p = nn.Parameter(distribute_tensor(torch.ones(4), few, [Shard(0)]))
    p.grad = distribute_tensor(torch.ones(4), few, [Shard(0)])
    plan = sonde.group_parameters_for_norm([("p", p)], mesh=everyone, replicas={"p": 1})
    assert float(sonde.clip_grad_norm_distributed_(plan, None)) == 2.0
    wrong: list[dict[str, Any]] = [{"mesh": everyone}, {"mesh": everyone, "replicas": {"p": 1}}, {"mesh": few}]
    messages = []
    for options in wrong[: 3 if rank() > 1 else 2]:
        try:
            messages.append(str(float(sonde.clip_grad_norm_([("p", p)], None, **options))))
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_a_parameter_on_other_ranks_has_to_be_declared(ranks4: Ranks) -> None:
    results = ranks4(_elsewhere)
    # Some of them have made more process groups than others. The next group of all four would wait for ever.
    ranks4.stop(kill=True)
    for messages in results[:2]:
        assert PEER in messages[0]
    for messages in results[2:]:
        assert "it is on ranks 0, 1, and this rank, which is not among them" in messages[0]
        assert "mesh has ranks 0, 1, and this rank is not among them" in messages[2]
    assert [messages[1] for messages in results] == ["2.0"] * 4


@pytest.mark.parametrize(
    ("attribute", "value", "match"),
    [
        ("ds_id", 0, "gradient of w: DeepSpeed's ZeRO-3 holds it in parts.*read engine.get_global_grad_norm"),
        ("tensor_model_parallel", True, "gradient of w: its attribute tensor_model_parallel says that it is a shard"),
        ("tensor_model_parallel", False, ""),
    ],
)
def test_what_the_attributes_of_other_frameworks_tell_is_refused(attribute: str, value: object, match: str) -> None:
    p = plain(torch.ones(3))
    setattr(p, attribute, value)
    if not match:
        assert float(sonde.clip_grad_norm_([("w", p)], 1.0)) == pytest.approx(math.sqrt(3))
        return
    with pytest.raises(ValueError, match=match):
        sonde.clip_grad_norm_([("w", p)], 1.0)
    assert torch.equal(p.grad, torch.ones(3))  # type: ignore[arg-type]


def _nowhere_on_one_rank(is_planned: bool) -> list[str]:
    """Beside a partial gradient, whose sum comes before the gradients are read."""
    mesh, p = world(), plain(torch.ones(3))
    partial = placed(torch.ones(3), mesh, [Partial()], (3,), [Replicate()])
    plan = sonde.group_parameters_for_norm([p, partial], mesh=mesh) if is_planned else None
    messages = []
    for gradient in (torch.ones(3).as_subclass(Nowhere) if rank() else torch.ones(3), torch.ones(3)):
        p.grad = gradient
        try:
            norm = sonde.clip_grad_norm_([p], None, mesh=mesh) if plan is None else None
            messages.append(f"{float(sonde.clip_grad_norm_distributed_(plan, None) if plan else norm):.4f}")  # type: ignore[arg-type]
        except ValueError as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize("is_planned", [True, False])
def test_a_gradient_of_an_unknown_kind_leaves_no_rank_waiting(ranks2: Ranks, is_planned: bool) -> None:
    (first, first_after), (second, second_after) = ranks2(_nowhere_on_one_rank, is_planned)
    assert PEER in first
    assert f"gradients cannot be {'collected' if is_planned else 'grouped'}: LookupError: it is nowhere" in second
    assert first_after == second_after == (f"{15**0.5:.4f}" if is_planned else f"{3**0.5:.4f}")
