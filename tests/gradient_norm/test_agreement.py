"""Ranks that were asked different things, or hold other gradients than they count: refused on every rank, unharmed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard

import sonde
from tests.gradient_norm.placed_gradients import Call, Case, check_on_ranks, each_of, noise, placed, plain, world
from tests.ranks import Ranks, mesh_of
from tests.sharded import WAYS, exact_gradients, experts, norm_of, pipeline

rank = dist.get_rank


def by_rank(option: str, *values: Any, sharded: bool = False) -> Callable[[], Call]:
    """The option has another value on each rank; ranks share a mesh, or the shards of a gradient."""

    def call() -> Call:
        value = values[rank() % len(values)]
        options: dict[str, Any] = {} if sharded else {"mesh": world()}
        max_norm = value if option == "max_norm" else 1.0
        options |= {} if option == "max_norm" else {option: value}
        p = placed(torch.ones(2), world(), [Shard(0)], (4,)) if sharded else plain(torch.ones(3))
        return Call([p], options, max_norm)

    return call


def holds(make: Callable[[], Any]) -> Callable[[], Call]:
    """A clip over the mesh of all ranks, of what this rank holds."""
    return lambda: Call(make(), {"mesh": world()})


def plan(make: Callable[[], Any]) -> Callable[[], Call]:
    return lambda: Call(make(), {"mesh": world()}, by=sonde.group_parameters_for_norm)


def total_norm(**options: Any) -> Call:
    return Call([torch.ones(2)], {"mesh": world(), **options}, by=sonde.get_total_norm)


def groups(last: Any, others: Any, order: float, *, sharded: bool = False) -> Callable[[], Call]:
    """The last rank has these groups, the others have others: names, or how many they are."""

    def call() -> Call:
        n = max(last, others) if isinstance(last, int) else len(last)
        names = last if rank() == dist.get_world_size() - 1 else others
        made = [torch.full((2,), 1.0 + k) for k in range(n)]
        if sharded:
            made = [placed(g, world(), [Shard(0)], (2 * world().size(),)).grad for g in made]  # type: ignore[misc]
        by_group = [f"{k % names}" for k in range(n)] if isinstance(names, int) else list(names)
        options = {"norm_type": order, "by_group": by_group, "mesh": None if sharded else world()}
        return Call(made, options, by=sonde.get_total_norm)

    return call


def grid(*names: str) -> DeviceMesh:
    return mesh_of((2, 2), names)


def shard_of(seed: int, mesh: DeviceMesh) -> nn.Parameter:
    """This rank's shard, over a mesh of one axis, of the gradient of 24 elements that the seed gives."""
    return placed(noise(seed, 24).chunk(mesh.size())[mesh.get_local_rank()].clone(), mesh, [Shard(0)], (24,))


def squares(*seeds: int) -> float:
    return math.sqrt(sum(float(noise(seed, 24).double().square().sum()) for seed in seeds))


def stages_on_one_rank_only() -> Call:
    mesh = grid("stage", "dp")
    return Call([plain(torch.ones(3))], {"mesh": mesh} | ({"pp_mesh": mesh["stage"]} if rank() else {}))


def pipeline_without_stages(*, named: bool) -> Call:
    """The axis of the stages has another name than "pp"."""
    cut = pipeline(dp=2)
    mesh = mesh_of((2, 2, 1), ("stage", "data", "tensor"))
    return Call(list(cut.parameters.items() if named else cut.parameters.values()), {"mesh": mesh})


def stages_of_equal_shapes(*, names: tuple[str, str], with_mesh: bool) -> Call:
    """Fully sharded over the ranks of each stage: no name and no shape shows that the stages differ."""
    mesh = grid(*names)
    p = placed(noise(mesh.get_local_rank(names[0]), 4, 4), mesh[names[1]], [Shard(0)], (8, 4))
    return Call([p], {"mesh": mesh} if with_mesh else {})


def towers(*, with_mesh: bool) -> Call:
    """Two encoders, each cut over a mesh of its own, beside a trunk that all ranks share."""
    mesh = grid("tower", "dp")
    at = mesh.get_local_rank("tower")
    tower = placed(noise(at, 2, 4), mesh["dp"], [Shard(0)], (4, 4))
    trunk = placed(noise(9, 2, 4)[:1], mesh, [Shard(0), Shard(0)], (4, 4))
    return Call([("trunk.w", trunk), (("image.w", "text.w")[at], tower)], {"mesh": mesh} if with_mesh else {})


def ignored_by_fsdp() -> Call:
    """Plain parameters beside sharded ones, whose gradients nobody averages over ranks."""
    return Call([placed(noise(1, 2, 4), world(), [Shard(0)], (8, 4)), plain(noise(rank(), 30))])


def undeclared_experts() -> Call:
    cut = experts(as_dtensors=False)
    return Call(list(cut.parameters.items()), {"mesh": cut.mesh})


def one_small_gradient_missing() -> list[nn.Parameter]:
    parameters = [plain(noise(1, 50, 50)), plain(noise(2, 4))]
    if rank() == 1:
        parameters[1].grad = None
    return parameters


def lists_without_missing_gradients() -> list[tuple[str, nn.Parameter]]:
    """The names differ too, since there are fewer of them: the number is the cause."""
    layer = nn.Linear(2, 2)
    layer.weight.grad, layer.bias.grad = torch.ones(2, 2), None if rank() else torch.ones(2)
    return [(name, p) for name, p in layer.named_parameters() if p.grad is not None]


def partial_in_another_order(*dtypes: torch.dtype) -> list[Any]:
    made = [
        (f"{k}", placed(torch.ones(3 + k, dtype=dtype), world(), [Partial()], (3 + k,), [Replicate()]))
        for k, dtype in enumerate(dtypes)
    ]
    return made[:: -1 if rank() else 1]


def experts_over(axis: str, kind: str) -> Call:
    """An expert of one name and shape, cut over one axis of a grid; `mesh=` has all ranks along one axis."""
    mesh = grid("a", "b")
    which = 0 if kind == "copies" else mesh.get_local_rank("b" if axis == "a" else "a")
    options = {"replicas": {"w": 1}} if kind == "declared" else {}
    return Call([("w", shard_of(which, mesh[axis]))], {"mesh": world(), **options})


def around_an_axis(*, is_copy: bool) -> Call:
    """Cut over the outer and the inner axis of a grid together, with copies along the axis between."""
    mesh = mesh_of((2, 2, 2), ("dp", "tp", "cp"))
    around = mesh["dp", "cp"]._flatten("dp_cp")
    return Call([("w", shard_of(0 if is_copy else mesh.get_local_rank("tp"), around))], {"mesh": world()})


def stages_beside_mesh(kind: str) -> Call:
    """Two stages of two ranks, whose axis `mesh=` does not have; each stage has other parameters."""
    mesh = grid("pp", "dp")
    stage, dp = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    p = plain(noise(2 * stage + dp if kind == "experts" else stage, 24))
    if kind == "missing" and rank() == 3:
        p.grad = None
    name = f"w{stage}{dp}" if kind == "other names" else f"w{stage}"
    return Call([(name, p)], {"mesh": world(), "pp_mesh": mesh["pp"]})


def experts_of_stages(kind: str, *shape: int) -> Call:
    """Two stages of four ranks; in each, an expert is cut over two ranks that lie next to each other."""
    mesh = mesh_of((2, 2, 2), ("pp", "ep", "efsdp"))
    stage = mesh.get_local_rank("pp")
    seed = stage if kind == "copies" else 2 * stage + mesh.get_local_rank("ep")
    on = mesh_of(shape, ("pp", "dp")[-len(shape) :])
    options = {"mesh": on, "pp_mesh": on["pp"] if len(shape) == 2 else mesh["pp"]}
    return Call([(f"w{stage}", shard_of(seed, mesh["efsdp"]))], options)


def stages_in_no_order(*, of_one_axis: bool) -> Call:
    """Stages 0 and 1 on ranks 0, 3 and on 1, 2: a mesh of one axis does not show the ranks of a stage."""
    mesh = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("pp", "dp"))
    stage = mesh.get_local_rank("pp")
    options = {"mesh": world() if of_one_axis else mesh, "pp_mesh": mesh["pp"]}
    return Call([(f"w{stage}", plain(noise(stage, 24)))], options)


def declared(*counts: int) -> Call:
    """Experts of one name. Ranks that declare the same number have the same values."""
    first = counts.index(counts[rank()])
    expert = plain(torch.full((4,), 1.0 + first))
    return Call([("e", expert)], {"mesh": world(), "replicas": {"e": counts[rank()]}}, None)


def model_on_halves() -> Call:
    """FSDP2 over each half of the ranks, its gradients averaged over the halves by hand."""
    mesh = grid("replicate", "shard")
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(6, 5), mesh=mesh["shard"])
    model(noise(rank(), 3, 6)).square().sum().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad.to_local(), group=mesh.get_group("replicate"))  # type: ignore[union-attr]
    exact = math.sqrt(sum(float(p.grad.full_tensor().double().square().sum()) for p in model.parameters()))  # type: ignore[union-attr]
    for p in model.parameters():
        p.grad.div_(exact)  # type: ignore[union-attr]
    return Call(list(model.named_parameters()), {"mesh": world()})


def on_one_axis(way: str) -> Call:
    """`mesh=` is one axis of all ranks, as an engine's world mesh is; test_clip_on_ranks.py has the grid's own."""
    cut = WAYS[way][1]()
    return Call(list(cut.parameters.items()), {"mesh": world(), "pp_mesh": cut.pp_mesh}, None)


P, DIFFER = "have different parameters", "differ between ranks that should hold the same"
PLAIN = f"plain gradients .*{DIFFER}.*declare experts and shards by replicas="
ON_A_PART, GROUPS = f"DTensors on a part of mesh= .*{DIFFER}", "by_group= differs between ranks"
F32 = torch.float32
CASES = [
    Case("max_norm", 2, by_rank("max_norm", 1.0, 2.0), "max_norm differs between ranks, got [12].0 on this rank: pass"),
    Case("max_norm on 4 ranks", 4, by_rank("max_norm", 1.0, 1.0, 2.0), "max_norm differs between ranks"),
    Case("max_norm or None", 2, by_rank("max_norm", 1.0, None), "max_norm differs between ranks"),
    Case("None and inf", 2, by_rank("max_norm", None, math.inf), math.sqrt(3)),
    Case("0.1 in fp32", 2, by_rank("max_norm", 0.1, torch.tensor(0.1)), math.sqrt(3)),
    Case("huge and None", 2, by_rank("max_norm", 1e300, None), math.sqrt(3)),
    Case("max_norm, no mesh", 2, by_rank("max_norm", 1.0, 2.0, sharded=True), "max_norm differs between ranks"),
    Case("p = 2 and 3", 2, by_rank("norm_type", 2.0, 3.0), "norm_type differs between ranks, got [23] on this rank"),
    Case("p = 2 and ∞", 2, by_rank("norm_type", 2.0, math.inf), "norm_type differs between ranks"),
    Case("p, no mesh", 2, by_rank("norm_type", 2.0, 3.0, sharded=True), "norm_type differs between ranks"),
    Case("nonfinite", 2, by_rank("nonfinite", "skip", "ignore"), "nonfinite differs between ranks, got nonfinite='"),
    Case("pp_mesh on one rank", 4, stages_on_one_rank_only, "pp_mesh= differs between ranks"),
    Case("stages, names", 4, lambda: pipeline_without_stages(named=True), f"{P}.*pass pp_mesh="),
    Case("stages, no names", 4, lambda: pipeline_without_stages(named=False), f"{P}.*pass pp_mesh="),
    Case(
        "stages of equal shapes",
        4,
        lambda: stages_of_equal_shapes(names=("stage", "dp"), with_mesh=True),
        "DTensors on a part of mesh=.*pass pp_mesh=",
    ),
    Case(
        "stages, no mesh",
        4,
        lambda: stages_of_equal_shapes(names=("pp", "shards"), with_mesh=False),
        r"\('pp', 'shards'\) .*has pipeline stages.*pp_mesh=mesh\['pp'\]",
    ),
    Case("towers", 4, lambda: towers(with_mesh=True), f"{P}.*by replicas="),
    Case("towers, no mesh", 4, lambda: towers(with_mesh=False), f"{P}.*by replicas="),
    Case("ignored by FSDP2, no mesh", 4, ignored_by_fsdp, PLAIN),
    Case("undeclared experts", 4, undeclared_experts, PLAIN),
    Case("plain shards", 2, holds(lambda: [plain(noise(1, 64)), plain(noise(2, 64, 64).chunk(2)[rank()])]), PLAIN),
    Case("not synchronised", 2, holds(lambda: [plain(noise(rank(), 30, 20))]), f"{PLAIN}.*sum the gradients over the"),
    Case("large, not synchronised", 2, holds(lambda: [plain(noise(rank(), 10**6).bfloat16())]), PLAIN),
    Case("one gradient missing", 4, holds(one_small_gradient_missing), PLAIN),
    Case("a scalar that lost digits", 2, holds(lambda: [plain(torch.tensor([1 + 1e-4 * rank()]))]), 1.00005),
    Case("no parameters", 2, holds(lambda: [] if rank() else [plain(torch.ones(3))]), P),
    Case("filtered lists", 2, holds(lists_without_missing_gradients), f"{P} .*: pass all parameters"),
    Case("other names", 2, holds(lambda: [(f"w{rank()}", plain(torch.ones(3)))]), f"{P} .*pass pp_mesh="),
    Case("partial, order", 2, holds(lambda: partial_in_another_order(F32, F32)), "in the same order on every rank", 2),
    Case(
        "partial, two dtypes",
        2,
        holds(lambda: partial_in_another_order(F32, torch.float64)),
        "in the same order on every rank",
        3,
    ),
    Case("replicas", 3, lambda: declared(3, 1, 1), r"replicas= does not fit over all ranks, got \[[13]\] on this rank"),
    Case("replicas of other numbers", 3, lambda: declared(1, 2, 2), math.sqrt(4 * (1 + 4))),
    Case("replicas of one number", 3, lambda: declared(3, 3, 3), 2.0),
    *(
        Case(f"{kind} over {axis}", 4, lambda axis=axis, kind=kind: experts_over(axis, kind), gives)
        for kind, gives in (("undeclared", ON_A_PART), ("declared", squares(0, 1)), ("copies", squares(0)))
        for axis in "ab"
    ),
    Case("copies inside a cut", 8, lambda: around_an_axis(is_copy=True), squares(0)),
    Case("experts inside a cut", 8, lambda: around_an_axis(is_copy=False), DIFFER),
    Case("FSDP2 on halves", 4, model_on_halves, 1.0),
    Case("stages beside mesh=", 4, lambda: stages_beside_mesh("stages"), squares(0, 1)),
    Case("their names differ", 4, lambda: stages_beside_mesh("other names"), f"ranks of one pipeline stage {P}"),
    Case("their experts", 4, lambda: stages_beside_mesh("experts"), PLAIN),
    Case("one missing in a stage", 4, lambda: stages_beside_mesh("missing"), PLAIN),
    *(
        Case(f"{kind} in stages of {shape}", 8, lambda kind=kind, shape=shape: experts_of_stages(kind, *shape), gives)
        for kind, gives in (("copies", squares(0, 1)), ("experts", ON_A_PART))
        for shape in ((8,), (2, 4))
    ),
    Case("stages in no order", 4, lambda: stages_in_no_order(of_one_axis=True), "mesh= has no such axis: pass a mesh="),
    Case("stages of a grid", 4, lambda: stages_in_no_order(of_one_axis=False), squares(0, 1)),
    *(
        Case(way, 4, lambda way=way: on_one_axis(way), norm_of(exact_gradients(), 2.0))
        for way in ("HSDP", "FSDP2 over context parallelism", "FSDP2 over TP", "PP × FSDP2", "PP × TP")
    ),
    Case("plan, a shape", 2, plan(lambda: [plain(torch.ones(5 - rank()))]), f"ranks of mesh= {P}"),
    Case("plan, a name", 2, plan(lambda: [(f"w{rank()}", plain(torch.ones(3)))]), f"ranks of mesh= {P}"),
    Case("plan, none on a rank", 2, plan(lambda: [plain(torch.ones(3))] * rank()), (rf"{P} \(0 on", rf"{P} \(1 on")),
    *(
        Case(f"{n} and {more} groups, p {p}, {cut}", 2, groups(n, more, p, sharded=cut), GROUPS, None)
        for n, more in ((3, 17), (64, 65), (65, 300), (1, 300))
        for p in (2.0, math.inf)
        for cut in (False, True)
    ),
    Case("3 ranks' groups", 3, groups(3, 17, 2.0), GROUPS),
    Case("groups of other names", 2, groups(("a", "b"), ("a", "c"), 2.0), GROUPS),
    Case("error_if_nonfinite", 2, lambda: total_norm(error_if_nonfinite=bool(rank())), "error_if_nonfinite differs"),
]


@each_of(CASES)
def test_ranks_that_disagree_are_refused_on_every_rank(request: pytest.FixtureRequest, index: int) -> None:
    """And nobody else is; one collective shows it, and the ranks go on in step."""
    check_on_ranks(request, __name__, index)


def _rounded(dtype: torch.dtype, n: int) -> bool:
    """Independent differences of up to 1.5 units in the last place, over gradients of a heavy tail."""
    for trial in range(10):
        whole, own = noise(trial, n).double().pow(3), torch.Generator().manual_seed(100 * trial + rank())
        more = 2 * torch.rand(n, generator=own, dtype=torch.float64) - 1
        gradient = (whole * (1 + 1.5 * torch.finfo(dtype).eps * more)).to(dtype)
        for order in (1.0, 2.0, 3.0, math.inf):
            sonde.clip_grad_norm_([plain(gradient)], 1.0, order, mesh=world())
    return True


@pytest.mark.parametrize("n", [1, 30, 10_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_copies_that_differ_by_rounding_are_copies(ranks2: Ranks, dtype: torch.dtype, n: int) -> None:
    assert ranks2(_rounded, dtype, n) == [True] * 2
