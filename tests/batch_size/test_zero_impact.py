"""With the probe on, a run is bit for bit the run without it."""

from __future__ import annotations

import contextlib
import itertools
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


@pytest.mark.parametrize(
    ("n_micro", "autocast", "clip", "compiled"),
    list(itertools.product([1, 4], [False, True], [False, True], [False, True])),
)
def test_plain(n_micro: int, autocast: bool, clip: bool, compiled: bool) -> None:
    options = {"n_micro": n_micro, "autocast": autocast, "clip": clip, "compiled": compiled}
    assert_untouched(run(probed=True, **options), run(probed=False, **options))


def test_adam_metric_only_reads_the_optimizer() -> None:
    options = {"n_micro": 2, "autocast": False, "clip": True, "metric": "adam"}
    assert_untouched(run(probed=True, **options), run(probed=False, **options))


def _both(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return run(probed=True, **options), run(probed=False, **options)


@pytest.mark.parametrize(
    ("n_micro", "autocast", "clip", "compiled"),
    list(itertools.product([1, 4], [False, True], [False, True], [False, True])),
)
def test_ddp(ranks2: Ranks, n_micro: int, autocast: bool, clip: bool, compiled: bool) -> None:
    options = {"n_micro": n_micro, "autocast": autocast, "clip": clip, "compiled": compiled, "ddp_options": {}}
    for on, off in ranks2(_both, options):
        assert_untouched(on, off)


@pytest.mark.parametrize("tap", ["leaf", "comm_hook"])
@pytest.mark.parametrize("n_micro", [1, 3])
@pytest.mark.parametrize("ddp_options", [{"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.01}], ids=str)
def test_ddp_options(ranks2: Ranks, tap: str, n_micro: int, ddp_options: dict[str, Any]) -> None:
    options = {"n_micro": n_micro, "autocast": False, "clip": True, "ddp_options": ddp_options, "tap": tap}
    for on, off in ranks2(_both, options):
        assert_untouched(on, off)


def test_static_graph(ranks2: Ranks) -> None:
    options = {"n_micro": 1, "autocast": False, "clip": True, "ddp_options": {"static_graph": True}}
    for on, off in ranks2(_both, options):
        assert_untouched(on, off)


@pytest.mark.parametrize("tap", ["leaf", "comm_hook"])
@pytest.mark.parametrize("n_micro", [1, 3])
def test_the_users_own_communication_hook(ranks2: Ranks, tap: str, n_micro: int) -> None:
    options = {"n_micro": n_micro, "autocast": False, "clip": True, "ddp_options": {}, "tap": tap, "compressed": True}
    for on, off in ranks2(_both, options):
        assert_untouched(on, off)


@pytest.mark.parametrize("n_micro", [1, 4])
def test_grad_scaler(n_micro: int) -> None:
    options = {"n_micro": n_micro, "autocast": True, "clip": True, "scaled": True}
    on, off = run(probed=True, **options), run(probed=False, **options)
    assert on["scale"] > 1024
    assert_untouched(on, off)


def test_three_ranks(ranks3: Ranks) -> None:
    options = {"n_micro": 1, "autocast": False, "clip": True, "ddp_options": {}}
    for on, off in ranks3(_both, options):
        assert_untouched(on, off)


# Where not every window is measured.


@pytest.mark.parametrize(("autocast", "clip", "compiled"), list(itertools.product([False, True], repeat=3)))
def test_one_window_in_three(autocast: bool, clip: bool, compiled: bool) -> None:
    options = {"n_micro": 2, "autocast": autocast, "clip": clip, "compiled": compiled, "every": 3, "steps": 30}
    assert_untouched(run(probed=True, **options), run(probed=False, **options))


@pytest.mark.parametrize("tap", ["leaf", "comm_hook"])
@pytest.mark.parametrize("n_micro", [1, 3])
def test_one_window_in_three_on_two_ranks(ranks2: Ranks, tap: str, n_micro: int) -> None:
    options = {"n_micro": n_micro, "autocast": False, "clip": True, "ddp_options": {"bucket_cap_mb": 0.01}}
    for on, off in ranks2(_both, options | {"tap": tap, "every": 3, "steps": 32}):
        assert_untouched(on, off)


@pytest.mark.parametrize("tap", ["leaf", "comm_hook"])
def test_one_window_in_three_on_three_ranks(ranks3: Ranks, tap: str) -> None:
    options = {"n_micro": 2, "autocast": False, "clip": False, "ddp_options": {}, "tap": tap}
    for on, off in ranks3(_both, options | {"every": 3, "steps": 32}):
        assert_untouched(on, off)


@pytest.mark.parametrize("tap", ["leaf", "comm_hook"])
def test_one_window_in_three_with_the_users_own_communication_hook(ranks2: Ranks, tap: str) -> None:
    options = {"n_micro": 1, "autocast": False, "clip": True, "ddp_options": {}, "tap": tap, "compressed": True}
    for on, off in ranks2(_both, options | {"every": 3, "steps": 32}):
        assert_untouched(on, off)


def test_the_comparison_sees_a_difference() -> None:
    options = {"n_micro": 2, "autocast": False, "clip": False}
    on, off = run(probed=True, **options), run(probed=False, **options)
    off["parameters"][0][0, 0] = torch.nextafter(off["parameters"][0][0, 0], torch.tensor(9.0))
    with pytest.raises(AssertionError, match="parameters"):
        assert_untouched(on, off)
