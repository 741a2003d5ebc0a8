"""What ranks compare survives the sum over ranks: digests, and copies as wholes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sonde.gradient_norm import agreement


@pytest.mark.parametrize("n", [2, 8, 4096, 20000])
@pytest.mark.parametrize("uses_max", [False, True])
def test_digests_survive_the_sum_over_ranks_exactly(n: int, uses_max: bool) -> None:
    """Equal digests leave no trace in fp64, in any order of summation; one that differs is seen on any rank."""
    generator = torch.Generator().manual_seed(0)

    def slots(each: int, digest: int) -> Tensor:
        ballot = agreement.Ballot("up to 6", uses_max=uses_max)
        ballot.add_digest("parameters", digest, agreement.contrast(range(n), [each]))
        return ballot.slots(torch.device("cpu"))

    usual = [slots(each, 2**20 - 1) for each in range(n)]

    def reduced(odd: int | None) -> list[bool]:
        total = torch.zeros(agreement.N_SLOTS, dtype=torch.float64)
        for each in torch.randperm(n, generator=generator).tolist():
            own = slots(each, 2**20 - 2) if each == odd else usual[each]
            total = torch.maximum(total, own) if uses_max else total + own
        return agreement.disagreements(total, uses_max=uses_max, has_stages=False).tolist()

    assert not any(reduced(None))
    for odd in (0, n - 1):
        assert agreement.first_disagreement(reduced(odd)) == ("parameters", 0)


def sets_of(n: int, m: int, kind: str) -> list[list[int]]:
    """n ranks in sets of m, which lie next to each other, far apart, or anyhow."""
    order = list(range(n))
    if kind == "apart":
        order = [i + j * (n // m) for i in range(n // m) for j in range(m)]
    elif kind == "anyhow":
        order = torch.randperm(n, generator=torch.Generator().manual_seed(n)).tolist()
    return [order[i : i + m] for i in range(0, n, m)]


@pytest.mark.parametrize("kind", ["next", "apart", "anyhow"])
@pytest.mark.parametrize(("n", "m"), [(4, 2), (6, 3), (16, 4), (64, 8)])
def test_copies_in_any_sets_of_ranks_are_compared_as_wholes(n: int, m: int, kind: str) -> None:
    """Shards of one copy differ, and those of another copy lie otherwise: only the sum over a copy's shards counts."""
    generator = torch.Generator().manual_seed(1)

    def names(factor: float) -> list[bool]:
        total = torch.zeros(agreement.N_SLOTS, dtype=torch.float64)
        for which, ranks in enumerate(sets_of(n, m, kind)):
            powers = torch.rand(m, dtype=torch.float64, generator=generator)
            powers *= (factor if which == 1 else 1.0) / powers.sum()
            for each, power in zip(ranks, powers, strict=True):
                ballot = agreement.Ballot("up to 6", uses_max=False)
                ballot.add_copies("sharded", power, agreement.contrast(range(n), {each, *ranks}), 1e-4)
                total += ballot.slots(torch.device("cpu"))
        return agreement.disagreements(total, uses_max=False, has_stages=False).tolist()

    assert not any(names(1.0 + 1e-6))
    assert agreement.first_disagreement(names(1.01)) == ("sharded", 0)
