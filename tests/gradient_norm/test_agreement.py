"""Ranks that were asked different things, or hold other gradients than they count: refused on every rank, unharmed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import sonde
from sonde.gradient_norm import agreement
from tests.gradient_norm.placed_gradients import placed
from tests.ranks import Ranks, mesh_of
from tests.sharded import experts, pipeline, tp


def plain(grad: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(grad))
    parameter.grad = grad.clone()
    return parameter


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


Call = tuple[Any, float | None, dict[str, Any]]


def _different_max_norm() -> Call:
    return [plain(torch.ones(3))], 1.0 + dist.get_rank(), {"mesh": mesh_of((dist.get_world_size(),))}


def _max_norm_or_none() -> Call:
    return [plain(torch.ones(3))], 1.0 if dist.get_rank() else None, {"mesh": mesh_of((dist.get_world_size(),))}


def _different_max_norm_without_mesh() -> Call:
    return [placed(torch.ones(2), mesh_of((2,)), [Shard(0)], (4,))], 1.0 + dist.get_rank(), {}


def _different_order(*orders: float) -> Call:
    return [plain(torch.ones(3))], 1.0, {"mesh": mesh_of((2,)), "norm_type": orders[dist.get_rank()]}


def _different_order_without_mesh(*orders: float) -> Call:
    norm_type = orders[dist.get_rank()]
    return [placed(torch.ones(2), mesh_of((2,)), [Shard(0)], (4,))], 1.0, {"norm_type": norm_type}


def _different_policy() -> Call:
    policy = "skip" if dist.get_rank() else "ignore"
    return [plain(torch.ones(3))], 1.0, {"mesh": mesh_of((2,)), "nonfinite": policy}


def _stages_on_one_rank_only() -> Call:
    mesh = mesh_of((2, 2), ("stage", "dp"))
    options = {"pp_mesh": mesh["stage"]} if dist.get_rank() else {}
    return [plain(torch.ones(3))], 1.0, {"mesh": mesh, **options}


def _pipeline_axis_of_another_name(*, named: bool) -> Call:
    cut = pipeline(dp=2)
    mesh = mesh_of((2, 2, 1), ("stage", "data", "tensor"))
    return list(cut.parameters.items() if named else cut.parameters.values()), 1.0, {"mesh": mesh}


def _stages_of_equal_shapes_without_names() -> Call:
    """Fully sharded over the ranks of each stage: no name and no shape shows that the stages differ."""
    mesh = mesh_of((2, 2), ("stage", "dp"))
    stage = mesh.get_local_rank("stage")
    return [placed(noise(stage, 4, 4), mesh["dp"], [Shard(0)], (8, 4))], 1.0, {"mesh": mesh}


def _towers() -> Call:
    """Two encoders, each cut over a mesh of its own, beside a trunk that all ranks share."""
    mesh = mesh_of((2, 2), ("tower", "dp"))
    name = ("image.w", "text.w")[mesh.get_local_rank("tower")]
    tower = placed(noise(mesh.get_local_rank("tower"), 2, 4), mesh["dp"], [Shard(0)], (4, 4))
    trunk = placed(noise(9, 2, 4)[: 2 - 1], mesh, [Shard(0), Shard(0)], (4, 4))
    return [("trunk.w", trunk), (name, tower)], 1.0, {"mesh": mesh}


def _towers_without_mesh() -> Call:
    parameters, max_norm, _ = _towers()
    return parameters, max_norm, {}


def _ignored_by_fsdp() -> Call:
    """Plain parameters beside sharded ones, whose gradients nobody averages over ranks."""
    sharded = placed(noise(1, 2, 4), mesh_of((4,)), [Shard(0)], (8, 4))
    return [sharded, plain(noise(dist.get_rank(), 30))], 1.0, {}


def _stages_without_mesh() -> Call:
    """The mesh that gradients are cut over is one axis of a mesh whose other axis has the pipeline stages."""
    mesh = mesh_of((2, 2), ("pp", "shards"))  # torch may take an equal axis of another mesh for this one
    stage = mesh.get_local_rank("pp")
    return [placed(noise(stage, 4, 4), mesh["shards"], [Shard(0)], (8, 4))], 1.0, {}


def _undeclared_experts() -> Call:
    cut = experts(as_dtensors=False)
    return list(cut.parameters.items()), 1.0, {"mesh": cut.mesh}


def _plain_shards() -> Call:
    """Megatron's kind: tensors cut by hand, beside norms that all ranks have."""
    rank = dist.get_rank()
    parameters = [plain(noise(1, 64)), plain(noise(2, 64, 64).chunk(2)[rank])]
    return parameters, 1.0, {"mesh": mesh_of((2,))}


def _forgotten_synchronisation() -> Call:
    return [plain(noise(dist.get_rank(), 30, 20))], 1.0, {"mesh": mesh_of((2,))}


def _one_small_gradient_missing() -> Call:
    parameters = [plain(noise(1, 50, 50)), plain(noise(2, 4))]
    if dist.get_rank() == 1:
        parameters[1].grad = None
    return parameters, 1.0, {"mesh": mesh_of((4,))}


def _no_parameters_on_one_rank() -> Call:
    return [] if dist.get_rank() else [plain(torch.ones(3))], 1.0, {"mesh": mesh_of((2,))}


def _lists_without_missing_gradients() -> Call:
    """The names differ too, since there are fewer of them: the number is the cause."""
    layer = nn.Linear(2, 2)
    layer.weight.grad = torch.ones(2, 2)
    layer.bias.grad = None if dist.get_rank() else torch.ones(2)
    named = [(name, p) for name, p in layer.named_parameters() if p.grad is not None]
    return named, 1.0, {"mesh": mesh_of((2,))}


def _other_names() -> Call:
    return [(f"w{dist.get_rank()}", plain(torch.ones(3)))], 1.0, {"mesh": mesh_of((2,))}


def _partial_in_another_order() -> Call:
    mesh, rank = mesh_of((2,)), dist.get_rank()
    names = ["a", "b"] if rank else ["b", "a"]
    made = {n: placed(noise(k, 3), mesh, [Partial()], (3,), [Replicate()]) for k, n in enumerate("ab")}
    return [(n, made[n]) for n in names], 1.0, {"mesh": mesh}


def _tied_over_stages(*, sharded: bool, with_mesh: bool) -> Call:
    """An embedding and a head, on the first and the last of two stages, with the sum of both gradients."""
    mesh = mesh_of((2, 2), ("pp", "dp"))
    stage, dp = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    tied, own = noise(5, 8, 6), noise(10 + stage, 3)
    weight = placed(tied.chunk(2)[dp], mesh["dp"], [Shard(0)], (8, 6)) if sharded else plain(tied)
    options = {"mesh": mesh} if with_mesh else {}
    return [(("embed.w", "head.w")[stage], weight), ("norm", plain(own))], 1.0, {"pp_mesh": mesh["pp"], **options}


def _tied_over(stages: tuple[int, ...], *shape: int) -> Call:
    """One gradient on some stages of a pipeline of one rank each; the other stages have their own of that shape."""
    mesh = mesh_of((dist.get_world_size(),), ("pp",))
    stage = mesh.get_local_rank()
    shared = noise(5 if stage in stages else 20 + stage, *shape)
    named = [(f"w{stage}", plain(shared)), (f"own{stage}", plain(noise(10 + stage, 3, 3)))]
    return named, 1.0, {"mesh": mesh, "pp_mesh": mesh}


def _without_names(call: Call) -> Call:
    named, max_norm, options = call
    return [parameter for _, parameter in named], max_norm, options


def _copies_as_stages(n_ranks: int) -> Call:
    """All ranks have the same gradients, two of one shape, and the data-parallel axis is passed as pp_mesh=."""
    mesh = mesh_of((n_ranks,), ("dp",))
    return [(f"b{k}", plain(noise(k, 4, 4))) for k in range(2)], 1.0, {"mesh": mesh, "pp_mesh": mesh}


def _declared_unlike() -> Call:
    """The same name and other values on each rank. One rank alone counts its expert on all of them."""
    rank = dist.get_rank()
    named = [("expert", plain(torch.full((4,), rank + 1.0)))]
    return named, 1.0, {"mesh": mesh_of((3,)), "replicas": {"expert": 1 if rank else 3}}


ON_2, ELSEWHERE = r"on 2 pipeline stages .*replicas=\{", "a parameter of other stages has the same gradient on"
PARAMETERS = "have different parameters"
REFUSED: list[tuple[str, int, Callable[[], Call], str]] = [
    ("max_norm", 2, _different_max_norm, "max_norm differs between ranks, got [12].0 on this rank: pass the same"),
    ("max_norm on 4 ranks", 4, _different_max_norm, "max_norm differs between ranks"),
    ("max_norm or None", 2, _max_norm_or_none, "max_norm differs between ranks"),
    ("max_norm, no mesh", 2, _different_max_norm_without_mesh, "max_norm differs between ranks"),
    ("p = 2 and 3", 2, lambda: _different_order(2.0, 3.0), "norm_type differs between ranks, got [23] on this rank"),
    ("p = 2 and ∞", 2, lambda: _different_order(2.0, math.inf), "norm_type differs between ranks"),
    ("p = 2 and 3, no mesh", 2, lambda: _different_order_without_mesh(2.0, 3.0), "norm_type differs between ranks"),
    ("nonfinite", 2, _different_policy, "nonfinite differs between ranks, got nonfinite='(skip|ignore)' on this"),
    ("pp_mesh on one rank", 4, _stages_on_one_rank_only, "pp_mesh= differs between ranks"),
    ("stages, names", 4, lambda: _pipeline_axis_of_another_name(named=True), f"{PARAMETERS}.*pass pp_mesh="),
    ("stages, no names", 4, lambda: _pipeline_axis_of_another_name(named=False), f"{PARAMETERS}.*pass pp_mesh="),
    ("stages of equal shapes", 4, _stages_of_equal_shapes_without_names, "DTensors on a part of mesh=.*pass pp_mesh="),
    ("towers", 4, _towers, f"{PARAMETERS}.*by replicas="),
    ("towers, no mesh", 4, _towers_without_mesh, f"{PARAMETERS}.*by replicas="),
    ("ignored by FSDP2, no mesh", 4, _ignored_by_fsdp, "plain gradients .*differ between ranks.*by replicas="),
    ("stages, no mesh", 4, _stages_without_mesh, r"\('pp', 'shards'\) .*has pipeline stages.*pp_mesh=mesh\['pp'\]"),
    ("undeclared experts", 4, _undeclared_experts, "plain gradients .*differ between ranks.*declare experts"),
    ("plain shards", 2, _plain_shards, "plain gradients .*differ between ranks.*shards by replicas="),
    ("not synchronised", 2, _forgotten_synchronisation, "plain gradients .*sum the gradients over the ranks first"),
    ("one gradient missing", 4, _one_small_gradient_missing, "plain gradients .*differ between ranks"),
    ("no parameters", 2, _no_parameters_on_one_rank, PARAMETERS),
    (
        "filtered lists",
        2,
        _lists_without_missing_gradients,
        f"{PARAMETERS} .*: pass all parameters",
    ),
    ("other names", 2, _other_names, f"{PARAMETERS} .*pass pp_mesh="),
    ("partial, other order", 2, _partial_in_another_order, "list the parameters in the same order on every rank"),
    ("tied", 4, lambda: _tied_over_stages(sharded=False, with_mesh=True), r"replicas=\{'(embed|head).w': 4\}"),
    ("tied, sharded", 4, lambda: _tied_over_stages(sharded=True, with_mesh=True), r"replicas=\{'(embed|head).w': 2\}"),
    ("tied over 3 stages", 3, lambda: _tied_over((0, 1, 2), 8, 6), r"on 3 pipeline stages .*replicas=\{'w[012]': 3\}"),
    ("tied over 2 of 3", 3, lambda: _tied_over((0, 1), 8, 6), rf"{ON_2}'w[01]': 2\}}|{ELSEWHERE} 2"),
    ("tied over the ends", 3, lambda: _tied_over((0, 2), 8, 6), rf"{ON_2}'w[02]': 2\}}|{ELSEWHERE} 2"),
    ("tied over 3 of 4", 4, lambda: _tied_over((0, 2, 3), 8, 6), rf"on 3 .*'w[023]': 3\}}|{ELSEWHERE} 3"),
    (
        "tied, no names",
        2,
        lambda: _without_names(_tied_over((0, 1), 8, 6)),
        r"^parameter 0 .*replicas=\{tensor: 2\}",
    ),
    ("stages are copies", 2, lambda: _copies_as_stages(2), "the same gradients throughout, as data-parallel copies do"),
    ("copies, one shape", 4, lambda: _copies_as_stages(4), "the same gradients throughout, as data-parallel copies do"),
    ("replicas", 3, _declared_unlike, r"replicas= does not fit over all ranks, got \[[13]\] on this rank"),
    (
        "a tied vector",
        2,
        lambda: _tied_over((0, 1), 13),
        r"replicas=\{'w[01]': 2\} .*if it is tied.*'w[01]': 1\} if not",
    ),
    (
        "tied, no mesh",
        4,
        lambda: _tied_over_stages(sharded=True, with_mesh=False),
        "count 2 times: pass mesh= of",
    ),
]


TWO_COLLECTIVES = {
    "partial, other order": "partial gradients are summed first",
    "tied, no mesh": "the stages are summed last",
}
"""Why these take two; all others take one."""


def _outcome(index: int) -> tuple[str, int, bool]:
    """The message; how many collectives it took; whether gradients are unchanged."""
    parameters, max_norm, options = REFUSED[index][2]()
    tensors = [p[1] if isinstance(p, tuple) else p for p in parameters]
    before = [None if t.grad is None else getattr(t.grad, "_local_tensor", t.grad).clone() for t in tensors]
    with CommDebugMode() as counted:
        try:
            message = f"no error: {float(sonde.clip_grad_norm_(parameters, max_norm, **options))}"
        except ValueError as error:
            message = str(error)
    after = [None if t.grad is None else getattr(t.grad, "_local_tensor", t.grad) for t in tensors]
    same = all(a is b is None or torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return message, counted.get_total_counts(), same


@pytest.mark.parametrize("index", range(len(REFUSED)), ids=[case[0] for case in REFUSED])
def test_ranks_that_disagree_are_refused_on_every_rank(request: pytest.FixtureRequest, index: int) -> None:
    name, n_ranks, _, match = REFUSED[index]
    for message, n_collectives, unharmed in request.getfixturevalue(f"ranks{n_ranks}")(_outcome, index):
        assert re.search(match, message), message
        assert unharmed
        assert n_collectives == (2 if name in TWO_COLLECTIVES else 1)


def _norm_weights_beside_tensor_parallelism() -> list[float]:
    cut = tp()
    plain_norm = plain(noise(3, 50))
    grad = plain_norm.grad
    assert grad is not None
    if dist.get_rank():
        grad *= 1 + 2e-7 * noise(4, 50)  # what kernels that add in a random order leave
    return [
        float(sonde.clip_grad_norm_([*cut.parameters.values(), plain_norm], None, order, mesh=cut.mesh))
        for order in (1.0, 2.0, math.inf)
    ]


def test_rounding_is_no_disagreement(ranks2: Ranks) -> None:
    assert all(norm > 0 for norms in ranks2(_norm_weights_beside_tensor_parallelism) for norm in norms)


def _declared_tie_over_three_stages() -> list[float]:
    named, _, options = _tied_over((0, 1, 2), 8, 6)
    name = named[0][0]
    exact = math.sqrt(noise(5, 8, 6).norm() ** 2 + sum(noise(10 + s, 3, 3).norm() ** 2 for s in range(3)))
    norms = [float(sonde.clip_grad_norm_(named, None, replicas={name: n}, **options)) for n in (3, 1)]
    return [norms[0] / exact, norms[1] / math.sqrt(exact**2 + 2 * noise(5, 8, 6).norm() ** 2)]


def test_a_tie_that_is_declared_counts_as_declared(ranks3: Ranks) -> None:
    for ratios in ranks3(_declared_tie_over_three_stages):
        assert ratios == pytest.approx([1.0, 1.0])


def _zeros_infinities_and_ties() -> list[float]:
    """Gradients of zeros, of one value on all stages, infinite on one rank: nothing to refuse."""
    mesh = mesh_of((2, 2), ("pp", "dp"))
    ones, bad = plain(torch.ones(4, 3)), plain(torch.ones(3, 2))
    if dist.get_rank() == 3:
        bad.grad[0, 0] = math.nan  # type: ignore[index]
    options: dict[str, Any] = {"mesh": mesh, "pp_mesh": mesh["pp"]}
    zeros = float(sonde.clip_grad_norm_([plain(torch.zeros(4, 3))], 1.0, **options))
    return [
        zeros,
        float(sonde.clip_grad_norm_([ones], 1.0, **options)),
        float(sonde.clip_grad_norm_([ones, bad], None, **options)),
    ]


def test_gradients_that_prove_nothing_are_not_refused(ranks4: Ranks) -> None:
    for zeros, ones, bad in ranks4(_zeros_infinities_and_ties):
        assert zeros == 0.0
        assert ones == pytest.approx(math.sqrt(24))
        assert math.isnan(bad)


@pytest.mark.parametrize("n", [2, 3, 8, 4096, 20000])
@pytest.mark.parametrize("uses_max", [False, True])
def test_digests_survive_the_sum_over_ranks_exactly(n: int, uses_max: bool) -> None:
    """Equal digests leave no trace in fp64, in any order of summation; one that differs is seen on any rank."""
    generator = torch.Generator().manual_seed(0)

    def reduced(odd: int | None) -> list[bool]:
        total = torch.zeros(agreement.N_SLOTS, dtype=torch.float64)
        ranks = torch.randperm(n, generator=generator).tolist() if n < 5000 else range(n)
        for rank in ranks:
            ballot = agreement.Ballot("up to 6", uses_max=uses_max)
            ballot.add_digest("parameters", 2**20 - 1 - (rank == odd), agreement.contrast(range(n), [rank]))
            own = ballot.slots(torch.device("cpu"))
            total = torch.maximum(total, own) if uses_max else total + own
        return agreement.disagreements(total, uses_max=uses_max, has_stages=False).tolist()

    assert not any(reduced(None))
    for odd in (0, n // 2, n - 1):
        assert agreement.first_disagreement(reduced(odd)) == ("parameters", 0)


@pytest.mark.parametrize("n_stages", [2, 5, 16, 33])
def test_ties_are_found_among_many_stages_and_nowhere_else(n_stages: int) -> None:
    def tied(powers: Tensor) -> tuple[bool, int]:
        total = torch.zeros(agreement.N_SLOTS, dtype=torch.float64)
        for stage, power in enumerate(powers):
            ballot = agreement.Ballot("up to 6", uses_max=False)
            for part in (0.25, 0.75):  # shards
                ballot.add_tie(agreement.tie_row((8, 6)), part * power, stage=stage, n_stages=n_stages)
            total += ballot.slots(torch.device("cpu"))
        return bool(agreement.disagreements(total, uses_max=False, has_stages=True).any()), agreement.tied_stages(
            total, agreement.tie_row((8, 6)), 0, n_stages
        )[0]

    powers = torch.rand(n_stages, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.1
    assert tied(powers) == (False, 1)
    one_of_its_own = 0.0 * powers  # only the first and the last stage have this shape, as an embedding and a head
    one_of_its_own[[0, -1]] = 0.3
    assert tied(one_of_its_own) == (True, 2)
    assert tied(torch.full((n_stages,), math.nan)) == (False, 1)
