"""Gradients that two pipeline stages both have are found; equal sums, signs turned round and infinities are no ties."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard

from sonde.gradient_norm import ties
from tests.gradient_norm.placed_gradients import Call, Case, check_on_ranks, each_of, noise, placed, plain
from tests.ranks import mesh_of

rank = dist.get_rank


def stages(gradient: Tensor, *, has_names: bool = True, name: str = "w", **options: Any) -> Call:
    """Stages of one rank each: a gradient that may be on several, and one of the stage's own."""
    mesh = mesh_of((dist.get_world_size(),), ("pp",))
    named = [(f"{name}{rank()}", plain(gradient)), (f"own{rank()}", plain(noise(90 + rank(), 3, 3)))]
    listed = named if has_names else [p for _, p in named]
    return Call(listed, {"mesh": mesh, "pp_mesh": mesh, **options}, None)


def tied_over(which: tuple[int, ...], *shape: int, **options: Any) -> Call:
    """The other stages have a gradient of their own of that shape."""
    return stages(noise(5 if rank() in which else 20 + rank(), *shape), **options)


def embedding_and_head(*, sharded: bool, with_mesh: bool) -> Call:
    """On the first and the last of two stages of two ranks, with the sum of both gradients."""
    mesh = mesh_of((2, 2), ("pp", "dp"))
    stage, dp = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    weight = placed(noise(5, 8, 6).chunk(2)[dp], mesh["dp"], [Shard(0)], (8, 6)) if sharded else plain(noise(5, 8, 6))
    named = [(("embed.w", "head.w")[stage], weight), ("norm", plain(noise(10 + stage, 3)))]
    return Call(named, {"pp_mesh": mesh["pp"]} | ({"mesh": mesh} if with_mesh else {}))


def copies_as_stages() -> Call:
    """All ranks have the same gradients, two of one shape, and the data-parallel axis is passed as pp_mesh=."""
    mesh = mesh_of((dist.get_world_size(),), ("dp",))
    return Call([(f"b{k}", plain(noise(k, 4, 4))) for k in range(2)], {"mesh": mesh, "pp_mesh": mesh})


def both_ways(gradient: Tensor) -> Call:
    """On a grid of two stages, a gradient that proves nothing, whoever has it."""
    mesh = mesh_of((2, 2), ("pp", "dp"))
    return Call([plain(gradient)], {"mesh": mesh, "pp_mesh": mesh["pp"]}, None)


def bad_on_one_stage(value: float, nonfinite: str) -> Call:
    gradient = noise(rank(), 4, 8)
    if rank() == 0:
        gradient[0, 0] = value
    return stages(gradient, nonfinite=nonfinite)


def declared(n: int) -> Call:
    return tied_over((0, 1, 2), 8, 6, replicas={f"w{rank()}": n})


def size(*gradients: Tensor) -> float:
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradients))


WHOLE, OWN = noise(1, 4, 8), [noise(90 + k, 3, 3) for k in range(3)]
NOT_TIED = {
    "equal squares": [torch.tensor(v, dtype=torch.bfloat16) * 2**-10 for v in ([1.0, 8.0], [4.0, 7.0])],
    "turned round": [WHOLE, -WHOLE],
    "another order": [WHOLE.flatten()[torch.randperm(32, generator=torch.Generator().manual_seed(k))] for k in (0, 1)],
    "one element": [torch.tensor([0.5])] * 2,
    "few nonzero": [torch.zeros(100).index_fill(0, torch.arange(7), 1.0).cumsum(0) * (torch.arange(100) < 7)] * 2,
    "constant size": [torch.ones(4, 8) * s * (1 - 2 * (torch.arange(8) % 2)) for s in (1, 1)],
}
TIED = {
    "few rows": torch.zeros(5000, 40).index_copy(0, torch.arange(50) * 97 % 5000, noise(1, 50, 40)),
    "transposed": noise(1, 30, 20).t(),
    "bf16": noise(1, 13).bfloat16(),
    "eight": noise(1, 8),
    "large": noise(1, 300, 512),
    "3-D": noise(1, 5, 30, 70),
}
ON_2, ELSEWHERE = r"on 2 pipeline stages .*replicas=\{", "a parameter of other stages has the same gradient on"
COPIES = "the same gradients throughout, as data-parallel copies do"
CASES = [
    Case("plain", 4, lambda: embedding_and_head(sharded=False, with_mesh=True), r"replicas=\{'(embed|head).w': 4\}"),
    Case("sharded", 4, lambda: embedding_and_head(sharded=True, with_mesh=True), r"replicas=\{'(embed|head).w': 2\}"),
    Case("no mesh", 4, lambda: embedding_and_head(sharded=True, with_mesh=False), "count 2 times: pass mesh= of", 2),
    Case("3 stages", 3, lambda: tied_over((0, 1, 2), 8, 6), r"on 3 pipeline stages .*replicas=\{'w[012]': 3\}"),
    Case("2 of 3", 3, lambda: tied_over((0, 1), 8, 6), rf"{ON_2}'w[01]': 2\}}|{ELSEWHERE} 2"),
    Case("the ends", 3, lambda: tied_over((0, 2), 8, 6), rf"{ON_2}'w[02]': 2\}}|{ELSEWHERE} 2"),
    Case("3 of 4", 4, lambda: tied_over((0, 2, 3), 8, 6), rf"on 3 .*'w[023]': 3\}}|{ELSEWHERE} 3"),
    Case("no names", 2, lambda: tied_over((0, 1), 8, 6, has_names=False), r"^parameter 0 .*replicas=\{tensor: 2\}"),
    Case("a vector", 2, lambda: tied_over((0, 1), 13), r"'w[01]': 2\} .*if it is tied.*'w[01]': 1\} if not"),
    Case("copies", 2, copies_as_stages, COPIES),
    Case("copies on 4 ranks", 4, copies_as_stages, COPIES),
    Case("declared", 3, lambda: declared(3), size(noise(5, 8, 6), *OWN)),
    Case("declared as three", 3, lambda: declared(1), size(*[noise(5, 8, 6)] * 3, *OWN)),
    Case("zeros", 4, lambda: both_ways(torch.zeros(4, 3)), 0.0),
    Case("ones", 4, lambda: both_ways(torch.ones(4, 3)), math.sqrt(24)),
    *(
        Case(
            f"{kind}, p {p}",
            2,
            lambda g=g, p=p: stages(g, name="blocks", norm_type=p),
            (f"{ON_2}'blocks{0}'", f"{ON_2}'blocks{1}'"),
        )
        for kind, g in TIED.items()
        for p in (1.0, 2.0, 6.0)
    ),
    *(Case(f"{kind}", 2, lambda g=g: stages(g[rank()]), size(*g, *OWN[:2])) for kind, g in NOT_TIED.items()),
    *(
        Case(
            f"{value} on one of {n} stages, {way}",
            n,
            lambda value=value, way=way: bad_on_one_stage(value, way),
            abs(value),
        )
        for n in (2, 3)
        for value in (math.inf, -math.inf, math.nan)
        for way in ("ignore", "skip")
    ),
]


@each_of(CASES)
def test_ties_are_refused_and_nothing_else_is(request: pytest.FixtureRequest, index: int) -> None:
    check_on_ranks(request, __name__, index)


@pytest.mark.parametrize("n_stages", [2, 5, 16, 33])
def test_ties_are_found_among_many_stages_and_nowhere_else(n_stages: int) -> None:
    def tied(powers: Tensor) -> tuple[bool, int]:
        slots, row = torch.zeros(ties.N_SLOTS, dtype=torch.float64), ties.row_of((8, 6))
        for stage, power in enumerate(powers):
            for part in (0.25, 0.75):  # shards
                slots.view(-1, ties.N_STAGES)[row, ties.slot_of(stage, n_stages)] += part * power
        return bool(ties.found(slots).any()), ties.tied_stages(slots, row, 0, n_stages)[0]

    powers = torch.rand(n_stages, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.1
    assert tied(powers) == (False, 1)
    one_of_its_own = 0.0 * powers  # only the first and the last stage have this shape, as an embedding and a head
    one_of_its_own[[0, -1]] = 0.3
    assert tied(one_of_its_own) == (True, 2)
    assert tied(torch.full((n_stages,), math.nan)) == (False, 1)
