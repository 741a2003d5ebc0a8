"""With the probe on, a run is bit for bit the run without it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sonde
from tests.batch_size.ddp_loops import in_bf16
from tests.batch_size.loops import batch, mean_loss
from tests.ranks import Ranks

STEPS = 12
"""Past the first changes: the scaler grows after 3, readings come every 3."""


def dropout_model() -> nn.Sequential:
    """Dropout draws random numbers in every forward: a probe that draws one changes everything after it."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(12, 160), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(160), nn.Linear(160, 160), nn.Linear(160, 3)
    )


def run(
    *,
    probed: bool,
    n_micro: int,
    autocast: bool,
    clip: bool,
    compiled: bool = False,
    ddp_options: dict[str, Any] | None = None,
    tap: str = "leaf",
    metric: str = "euclidean",
    scaled: bool = False,
    compressed: bool = False,
    every: int | None = None,
    steps: int = STEPS,
) -> dict[str, Any]:
    """Train and return everything that a probe could have disturbed."""
    torch._dynamo.reset()
    plain = dropout_model()
    ddp = DistributedDataParallel(plain, **ddp_options) if ddp_options is not None else None
    model: nn.Module = ddp or plain
    if compiled:
        model = torch.compile(model, backend="aot_eager")  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    rank = dist.get_rank() if ddp_options is not None else 0
    generator = torch.Generator().manual_seed(rank)
    torch.manual_seed(11 + rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3, enabled=scaled)
    own_hook: dict[str, Any] = {"comm_hook": in_bf16} if compressed and probed and tap == "comm_hook" else {}
    if compressed and not own_hook:
        assert ddp is not None
        ddp.register_comm_hook(None, in_bf16)
    probe = None
    if probed:
        probe = sonde.attach(
            model,
            optimizer,
            unit="rows",
            verbose=False,
            log=sonde.RunLog(every=3),
            tap=tap,  # type: ignore[arg-type]
            metric=metric,  # type: ignore[arg-type]
            grad_scaler=scaler,
            every=every,
            **own_hook,
        )
    grads = []
    for _ in range(steps):
        for i in range(n_micro):
            sync = ddp.no_sync() if ddp is not None and i < n_micro - 1 else contextlib.nullcontext()
            with probe.piece(units=4) if probe else contextlib.nullcontext(), sync:
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = mean_loss(model, *batch(4, generator))
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        # The same function on both sides: sonde's norm is exact where torch's is rounded.
        if clip and probe:
            probe.clip_grad_norm_(0.5)
        elif clip:
            sonde.clip_grad_norm_(plain.parameters(), 0.5)
        elif probe:
            probe.step()
        grads.append([p.grad.clone() for p in plain.parameters()])  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    hooks_left = None
    if probe:
        steps_seen = steps - (metric == "adam")  # the first has no second moment yet
        if every is None:
            # A single piece is solved from its examples, which need the calls of layers, and the plain norm.
            has_noise = n_micro > 1 or ddp is not None or (metric == "euclidean" and not compiled)
            assert probe.reading().windows == (steps_seen if has_noise else 0)
        else:
            assert 5 < probe.reading().windows < 0.8 * steps
        probe.close()
        hooks_left = sum(len(p._backward_hooks or ()) for p in plain.parameters())
        hooks_left += len(optimizer._optimizer_step_pre_hooks)
        hooks_left += sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return {
        "parameters": [p.detach().clone() for p in plain.parameters()],
        "optimizer": optimizer.state_dict()["state"],
        "grads": grads,
        "rng": torch.get_rng_state(),
        "scale": scaler.get_scale(),
        "training": [m.training for m in plain.modules()],
        "requires_grad": [p.requires_grad for p in plain.parameters()],
        "hooks_left": hooks_left,
    }


def assert_untouched(on: dict[str, Any], off: dict[str, Any]) -> None:
    assert on.pop("hooks_left") == 0
    assert off.pop("hooks_left") is None
    for key in off:
        a, b = torch.utils._pytree.tree_leaves(on[key]), torch.utils._pytree.tree_leaves(off[key])
        assert len(a) == len(b) > 0, key
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y, key


def options_of(**options: Any) -> dict[str, Any]:
    return {"n_micro": 1, "autocast": False, "clip": True} | options


def on_ranks(**options: Any) -> dict[str, Any]:
    return options_of(**{"ddp_options": {}} | options)


SPARSE_PACE = {"every": 3, "steps": 32}
"""Not every window is measured. Ranks measure the first 16 in any case."""
ONE_PROCESS: dict[str, dict[str, Any]] = {
    "one piece": options_of(),
    "one piece, compiled, autocast": options_of(compiled=True, autocast=True, clip=False),
    "pieces": options_of(n_micro=4, clip=False),
    "pieces, autocast": options_of(n_micro=4, autocast=True),
    "pieces, compiled, autocast": options_of(n_micro=4, compiled=True, autocast=True),
    "Adam's metric": options_of(n_micro=2, metric="adam"),
    "a GradScaler": options_of(autocast=True, scaled=True),
    "pieces, a GradScaler": options_of(n_micro=4, autocast=True, scaled=True),
    "one window in three": options_of(n_micro=2, **SPARSE_PACE),
    "one window in three, autocast, compiled, no clip": options_of(
        n_micro=2, autocast=True, compiled=True, clip=False, **SPARSE_PACE
    ),
}
OF_TWO: dict[str, dict[str, Any]] = {
    "one piece": on_ranks(),
    "one piece, compiled, autocast": on_ranks(compiled=True, autocast=True, clip=False),
    "pieces, compiled": on_ranks(n_micro=4, compiled=True),
    "pieces, autocast, no clip": on_ranks(n_micro=4, autocast=True, clip=False),
    "a static graph": on_ranks(ddp_options={"static_graph": True}),
} | {
    f"{tap}, {n_micro} pieces, {name}": on_ranks(tap=tap, n_micro=n_micro, **options)
    for tap in ("leaf", "comm_hook")
    for n_micro, name, options in (
        (1, "views of buckets", {"ddp_options": {"gradient_as_bucket_view": True}}),
        (3, "small buckets", {"ddp_options": {"bucket_cap_mb": 0.01}}),
        (3, "small buckets, one window in three", {"ddp_options": {"bucket_cap_mb": 0.01}} | SPARSE_PACE),
        (3, "the user's hook", {"compressed": True}),
        (1, "the user's hook, one window in three", {"compressed": True} | SPARSE_PACE),
    )
}
OF_THREE: dict[str, dict[str, Any]] = {
    "one piece": on_ranks(),
    "leaf, one window in three": on_ranks(n_micro=2, clip=False, tap="leaf", **SPARSE_PACE),
    "comm_hook, one window in three": on_ranks(n_micro=2, clip=False, tap="comm_hook", **SPARSE_PACE),
}


def both(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return run(probed=True, **options), run(probed=False, **options)


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_one_process(name: str) -> None:
    on, off = both(ONE_PROCESS[name])
    assert (on["scale"] > 1024) == ("GradScaler" in name)
    assert_untouched(on, off)


@pytest.mark.parametrize("name", OF_TWO)
def test_two_ranks(ranks2: Ranks, name: str) -> None:
    for on, off in ranks2(both, OF_TWO[name]):
        assert_untouched(on, off)


@pytest.mark.parametrize("name", OF_THREE)
def test_three_ranks(ranks3: Ranks, name: str) -> None:
    for on, off in ranks3(both, OF_THREE[name]):
        assert_untouched(on, off)


def test_the_comparison_sees_a_difference() -> None:
    on, off = both(options_of(n_micro=2))
    off["parameters"][0][0, 0] = torch.nextafter(off["parameters"][0][0, 0], torch.tensor(9.0))
    with pytest.raises(AssertionError, match="parameters"):
        assert_untouched(on, off)
