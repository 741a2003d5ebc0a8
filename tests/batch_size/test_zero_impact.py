"""With the probe on, a run is bit for bit the run without it: also where nothing can be computed by hand.

Forward draws random numbers, so a probe that draws one changes everything after it. `test_matrix.py` compares training
in every cut besides. The mutants at the end break a tap on purpose. Each must be seen, so the comparison can fail.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.batch_size.cut_loops import assert_untouched, both, check
from tests.batch_size.set_ups import Loop
from tests.mutants import Mutant
from tests.ranks import Ranks

AUTO = {"per_example": "auto"}
VIEWS, SMALL = {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.0001}
SPARSE_PACE = {"every": 3}
"""Not every window is measured. Ranks measure the first 16 in any case."""


def drawing(cut: str, **more: Any) -> Loop:
    """Windows of a loop that draws random numbers, past the first changes: DDP's buckets, a scaler, "auto" after 3."""
    options = more.get("options", {})
    windows = 32 if options.get("every") else 7 if options is AUTO or more.get("scaled") else 4
    return Loop(cut, **{"dropout": True, "windows": windows, "after": 2} | more)


ONE_PROCESS: dict[str, Loop] = {
    "one piece": drawing("one process", n_pieces=1, covered=True, options=AUTO),
    "one piece, compiled, autocast": drawing("one process", n_pieces=1, compiled=True, autocast=True, clips=False),
    "pieces": drawing("one process", clips=False),
    "pieces, autocast": drawing("one process", autocast=True),
    "Adam's metric": drawing("one process", metric=("adam",)),
    "one piece, a GradScaler": drawing("one process", n_pieces=1, autocast=True, scaled=True, options=AUTO),
    "pieces, a GradScaler": drawing("one process", autocast=True, scaled=True),
    "one window in three": drawing("one process", options=SPARSE_PACE),
    "one window in three, compiled, autocast": drawing(
        "one process", compiled=True, autocast=True, clips=False, options=SPARSE_PACE
    ),
}
OF_TWO: dict[str, Loop] = {
    "one piece": drawing("ddp", n_pieces=1, covered=True, options=AUTO),
    "pieces, compiled": drawing("ddp", compiled=True),
    "pieces, autocast": drawing("ddp", autocast=True, clips=False),
}
for name, options in {
    "": {},
    ", views of buckets": VIEWS,
    ", a static graph": {"static_graph": True},
    ", unused parameters": {"find_unused_parameters": True},
}.items():
    OF_TWO[f"examples{name}"] = drawing(
        "ddp", covered=True, sync="every", ddp=options, options={"per_example": "always"}
    )
OF_THREE: dict[str, Loop] = {"one piece": drawing("ddp", n_pieces=1, covered=True, options=AUTO)}
"""Averages over 3 ranks are rounded. Over 2, an average is exact."""

OF_TWO |= {
    "views of buckets": drawing("ddp", n_pieces=1, ddp=VIEWS),
    "small buckets, one window in three": drawing("ddp", ddp=SMALL, options=SPARSE_PACE),
    "the user's hook": drawing("ddp", hook="bf16"),
    "the user's hook, one window in three": drawing("ddp", n_pieces=1, hook="bf16", options=SPARSE_PACE),
}
OF_THREE |= {
    "one window in three": drawing("ddp", clips=False, options=SPARSE_PACE),
    "a sparse gradient": drawing("ddp", sparse=True, optimizer="SGD", clips=False),
}
# Half of all combinations: any three of the four options meet.
for view, static, (i, (n_pieces, sync)) in itertools.product(
    (False, True), (False, True), enumerate(((1, "last"), (2, "every"), (2, "last")))
):
    set_to_none = (view + static + i) % 2 == 0
    if static and (n_pieces, sync) == (2, "last"):
        continue  # PyTorch refuses no_sync in the first iteration of a static graph
    words = "views" * view, "a static graph" * static, "set to 0" * (not set_to_none)
    name = ", ".join(filter(None, (f"{n_pieces} pieces, {sync} reduces", *words)))
    ddp = SMALL | {"gradient_as_bucket_view": view, "static_graph": static}
    OF_THREE[name] = drawing("ddp", ddp=ddp, n_pieces=n_pieces, sync=sync, set_to_none=set_to_none)


def assert_measured(loop: Loop, probed: dict[str, Any]) -> None:
    """Each window, or one in three; but one without a moment, and one of a piece that shows no examples."""
    windows, is_one_piece = probed["reading"].windows, loop.n_pieces == 1 and loop.has("one")
    if "every" in loop.options:
        assert 5 < windows < 0.8 * loop.windows
    elif not is_one_piece or (loop.options is AUTO and loop.covered):
        assert windows == loop.windows - (loop.metric == ("adam",))


@pytest.mark.parametrize(
    ("n_ranks", "name"), [(n, name) for n, loops in ((1, ONE_PROCESS), (2, OF_TWO), (3, OF_THREE)) for name in loops]
)
def test_training_is_unchanged(request: pytest.FixtureRequest, n_ranks: int, name: str) -> None:
    loop = {1: ONE_PROCESS, 2: OF_TWO, 3: OF_THREE}[n_ranks][name]
    results = [both(loop)] if n_ranks == 1 else request.getfixturevalue(f"ranks{n_ranks}")(both, loop)
    for probed, plain in results:
        assert_untouched(probed, plain)
        assert_measured(loop, probed)
        assert (probed["modes"][-1] > 1024) == loop.scaled


# Mutants. The comparisons must see each of them.

TAPS = "sonde.batch_size.taps."
CHANGES_TRAINING: list[tuple[Mutant, Loop]] = [
    (
        Mutant(
            "squares the gradient in place",
            TAPS + "leaf_hooks:PieceGradient.take",
            "grad.clone() if copies else grad",
            "grad.square_()",
        ),
        drawing("ddp"),
    ),
    (
        Mutant(
            "draws a random number",
            TAPS + "leaf_hooks:PieceGradient.take",
            "grad.clone() if copies else grad",
            "(torch.rand(1), grad)[1]",
        ),
        drawing("ddp"),
    ),
]


def weights_differ(loop: Loop, mutant: Mutant) -> bool:
    probed, plain = both(loop, True, mutant)
    return not all(map(torch.equal, probed["weights"], plain["weights"]))


@pytest.mark.parametrize(("mutant", "loop"), CHANGES_TRAINING, ids=lambda value: getattr(value, "name", ""))
def test_a_tap_that_changes_training_is_seen(ranks3: Ranks, mutant: Mutant, loop: Loop) -> None:
    assert ranks3(weights_differ, loop, mutant) == [True] * 3


MISMEASURES = [
    Mutant(
        "forgets a piece's weight",
        TAPS + "window_sums:WindowSums.add",
        "self._add_gradient(gradient, counts.weight)",
        "self._add_gradient(gradient, 1.0)",
    ),
    Mutant(
        "reads one of the gradients that wait only",
        TAPS + "leaf_hooks:PieceGradient._keep",
        "self._terms.take(tuple(grads), tuple(grads.values()))",
        "self._terms.take(tuple(grads)[:1], tuple(grads.values())[:1])",
    ),
]


@pytest.mark.parametrize("mutant", MISMEASURES, ids=lambda mutant: mutant.name)
def test_a_tap_that_mismeasures_is_seen(ranks2: Ranks, mutant: Mutant) -> None:
    with pytest.raises(AssertionError):
        check(ranks2, Loop("ddp", weighted=True), mutant)
