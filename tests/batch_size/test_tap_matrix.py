"""Every tap under every way that DDP keeps gradients: weights are bit for bit those of a run without a probe.

The mutants at the end break a tap on purpose. Each must be seen, so the comparison can fail.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.batch_size.ddp_loops import assert_as_by_hand, train_on_rank
from tests.batch_size.loops import attached
from tests.mutants import Mutant
from tests.ranks import Ranks

STEPS = 7
CLOSED_AFTER = 5
"""Steps with the probe. The last steps show what a closed probe leaves behind."""
LEAF, BUCKETS, REFUSED = "leaf hooks", "DDP's communication hook", "refused"


@dataclass(frozen=True)
class Case:
    """One way to train under DDP.

    Attributes:
        pieces: micro-batches per rank and window.
        reduces: whether DDP reduces in every backward, or only in the last of a window.
        sparse: whether the embedding's gradient is sparse.
    """

    bucket_view: bool = False
    static_graph: bool = False
    set_to_none: bool = True
    pieces: int = 1
    reduces: str = "last"
    sparse: bool = False


CASES = [
    Case(*options, *((1, "last"), (2, "last"), (2, "every"))[(i + k) % 3])
    for i, options in enumerate(itertools.product([False, True], repeat=3))
    for k in range(2)
]
SPARSE = [Case(bucket_view=view, sparse=True) for view in (False, True)]


def train(case: Case, tap: str | None) -> tuple[list[Tensor], str]:
    """The weights after each step, and the tap that read the gradients last."""
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Embedding(20, 24, sparse=case.sparse), nn.Tanh(), nn.LayerNorm(24), nn.Linear(24, 3))
    model = DistributedDataParallel(
        plain, gradient_as_bucket_view=case.bucket_view, static_graph=case.static_graph, bucket_cap_mb=0.001
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    probe = attached(model, optimizer, tap=tap, log_every=1) if tap else None
    weights, name = [], ""
    for step in range(STEPS):
        if probe and step == CLOSED_AFTER:
            probe.close()
            probe = None
        for i in range(case.pieces):
            # PyTorch refuses no_sync in the first iteration of a static graph.
            reduces = i == case.pieces - 1 or case.reduces == "every" or (case.static_graph and step == 0)
            x, y = torch.randint(20, (4,), generator=generator), torch.randn(4, 3, generator=generator)
            with (
                probe.piece(units=4) if probe else contextlib.nullcontext(),
                contextlib.nullcontext() if reduces else model.no_sync(),
            ):
                (model(x) - y).square().mean().backward()
        if probe:
            probe.step()
            name = probe._reader.tap_name
        optimizer.step()
        optimizer.zero_grad(set_to_none=case.set_to_none)
        weights.append(torch.cat([p.detach().flatten() for p in plain.parameters()]).clone())
    return weights, name


def compare(
    cases: Sequence[Case], taps: Sequence[str], mutant: Mutant | None = None
) -> list[tuple[Case, str, str, bool]]:
    """For each case and tap: the tap that read last, and whether the weights are those of the run without a probe."""
    found = []
    for case in cases:
        without, _ = train(case, None)
        for tap in taps:
            with mutant.applied() if mutant else contextlib.nullcontext():
                try:
                    probed, name = train(case, tap)
                except ValueError as error:
                    probed, name = without, REFUSED if "gradient_as_bucket_view" in str(error) else str(error)
            found.append((case, tap, name, all(map(torch.equal, probed, without))))
    return found


def tap_expected(case: Case, tap: str, n_ranks: int) -> str:
    if tap == "comm_hook":
        return REFUSED if case.bucket_view and n_ranks == 3 else BUCKETS
    return LEAF


ON_RANKS = {3: CASES + SPARSE, 2: [case for case in CASES if case.bucket_view or case == Case()] + SPARSE}
"""All cases on 3 ranks, where averages are rounded. On 2, those whose tap depends on the number of ranks, and a plain
case: an average of two is exact."""


@pytest.mark.parametrize("n_ranks", ON_RANKS)
def test_weights_are_those_without_a_probe(request: pytest.FixtureRequest, n_ranks: int) -> None:
    ranks: Ranks = request.getfixturevalue(f"ranks{n_ranks}")
    cases = ON_RANKS[n_ranks]
    for i in range(0, len(cases), 8):  # few at a time, well within the deadline of the ranks
        few = cases[i : i + 8]
        for found in ranks(compare, few, ("leaf", "comm_hook")):
            assert len(found) == 2 * len(few)
            assert [row for row in found if not row[3]] == []
            assert [name for _, _, name, _ in found] == [tap_expected(c, tap, n_ranks) for c, tap, _, _ in found]


# Mutants. The comparison above must see each of them.

TAPS = "sonde.batch_size.taps."
CHANGES_WEIGHTS = [
    (
        Mutant(
            "divides where DDP multiplies",
            TAPS + "ddp_buckets:_Average.__call__",
            "buffer.mul_(1.0 / n_ranks)",
            "buffer.div_(n_ranks)",
        ),
        Case(),
        "comm_hook",
    ),
    (
        Mutant(
            "multiplies where DDP divides",
            TAPS + "ddp_buckets:_Average.__call__",
            "buffer.div_(n_ranks)",
            "buffer.mul_(1.0 / n_ranks)",
        ),
        Case(sparse=True),
        "comm_hook",
    ),
    (
        Mutant(
            "reads buckets that DDP divides in two ways",
            TAPS + "ddp_buckets:averages_alike",
            "return not model.gradient_as_bucket_view or",
            "return True or",
        ),
        Case(bucket_view=True, set_to_none=False),
        "comm_hook",
    ),
    (
        Mutant(
            "scales the bucket while reading it",
            TAPS + "ddp_buckets:_relay_bucket",
            "relay.listener(bucket)",
            "relay.listener(bucket); bucket.buffer().mul_(2)",
        ),
        Case(),
        "comm_hook",
    ),
    (
        Mutant(
            "squares the gradient in place",
            TAPS + "leaf_hooks:PieceGradient.take",
            "grad.clone() if copies else grad",
            "grad.square_()",
        ),
        Case(),
        "leaf",
    ),
]


@pytest.mark.parametrize(("mutant", "case", "tap"), CHANGES_WEIGHTS, ids=lambda value: getattr(value, "name", ""))
def test_a_tap_that_changes_weights_is_seen(ranks3: Ranks, mutant: Mutant, case: Case, tap: str) -> None:
    for [(*_, is_same)] in ranks3(compare, [case], [tap], mutant):
        assert not is_same


MISMEASURES = [
    Mutant(
        "keeps views of a buffer that is reduced later",
        TAPS + "ddp_buckets:DDPBucketTap._read",
        "self.witness.read(i, g).clone()",
        "self.witness.read(i, g)",
    ),
    Mutant(
        "takes the reduced gradient for the rank's own",
        TAPS + "ddp_buckets:_relay_bucket",
        "    relay.listener(bucket)\n    return relay.comm_hook(relay.comm_state, bucket)",
        "    future = relay.comm_hook(relay.comm_state, bucket)\n        future.wait()\n"
        "        relay.listener(bucket)\n        return future\n"
        "    return relay.comm_hook(relay.comm_state, bucket)",
    ),
    Mutant(
        "forgets the weight of a rank's merged piece",
        TAPS + "window_sums:WindowSums.merge",
        "self._add_gradient(gradient, self._weight)",
        "self._add_gradient(gradient, 1.0)",
    ),
    Mutant(
        "reads one parameter of a bucket only",
        TAPS + "ddp_buckets:DDPBucketTap._read",
        "self._terms.take(tuple(grads), tuple(grads.values()))",
        "self._terms.take(tuple(grads)[:1], tuple(grads.values())[:1])",
    ),
]


def _mistaken(mutant: Mutant | None) -> dict[str, Any]:
    with mutant.applied() if mutant else contextlib.nullcontext():
        return train_on_rank({}, tap="comm_hook", windows=6)  # the same data in all pieces show after 5


@pytest.mark.parametrize("mutant", [None, *MISMEASURES], ids=lambda mutant: mutant.name if mutant else "sound")
def test_a_tap_that_mismeasures_is_seen(ranks2: Ranks, mutant: Mutant | None) -> None:
    with pytest.raises(AssertionError) if mutant else contextlib.nullcontext():
        assert_as_by_hand(ranks2(_mistaken, mutant), windows=6)
