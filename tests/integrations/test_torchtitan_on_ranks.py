"""A real Trainer of torchtitan on two ranks, cut in each of its ways, against one process with all the pieces."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.integrations.as_launched import reading_of_all, result_of
from tests.integrations.norm_of_shard import check_said, clip_by_shard, usual
from tests.integrations.plain_loop import BY_PIECES, plain_loop, same_numbers
from tests.ranks import Ranks

pytest.importorskip("torchtitan", reason="needs torchtitan: make test-torchtitan")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


@pytest.fixture
def new_ranks() -> Iterator[Ranks]:
    """Processes of their own: FSDP2 refuses spmd_types on new meshes of ranks that had others."""
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


def _trained(options: dict[str, Any]) -> dict[str, Any]:
    """Once without sonde and once with it."""
    warnings.simplefilter("ignore")
    from tests.integrations.titan_trainer import config_of, integration, trainer_of, whole_state

    def fitted(is_measured: bool) -> tuple[Any, ...]:
        trainer = trainer_of(config_of(tempfile.mkdtemp(), **options))
        before = whole_state(trainer)
        probe = integration.attach(trainer, unit="rows", on_error="raise", **BY_PIECES) if is_measured else None
        trainer.train()
        return before, whole_state(trainer), probe

    before, plain, _ = fitted(False)
    _, measured, probe = fitted(True)
    flat = [torch.cat([state[name].flatten() for name in plain]) for state in (plain, measured)]
    return result_of(*flat, probe.reading()) | {"before": before}


SETUPS: dict[str, dict[str, Any]] = {
    "FSDP2": {"ranks": 2, "accumulates": 2},
    "FSDP2 in bf16": {"ranks": 2, "accumulates": 2, "precision": "bfloat16"},
    "FSDP2, partial DTensors": {"ranks": 2, "accumulates": 2, "backend": "partial_dtensor"},
    "HSDP": {"ranks": 2, "accumulates": 2, "data_parallel_replicate": 2},
    "TP, full DTensors": {"tensor_parallel": 2, "backend": "full_dtensor"},
    "TP, partial DTensors": {"tensor_parallel": 2, "backend": "partial_dtensor"},
    "PP": {"pipeline_parallel": 2},
}


@pytest.mark.parametrize("setup", SETUPS)
def test_two_ranks(new_ranks: Ranks, setup: str) -> None:
    from tests.integrations.titan_trainer import LR, config_of, loss_over_window, plain_model, windows_of

    options = SETUPS[setup]
    first, second = new_ranks(_trained, options)
    found = reading_of_all((first, second))
    assert (found.windows, found.dropped) == (6, {})
    n_ranks = options.get("ranks", 1)
    windows = windows_of(options.get("accumulates", 3) * n_ranks)
    model = plain_model(config_of("", **options), first["before"] | second["before"])
    expected = plain_loop(model, windows, loss_over_window(windows), lr=LR)
    if "bf16" in setup:
        # Its matrices are in 16 bits, and those of the plain model are not.
        assert found.b_simple == pytest.approx(expected.b_simple, rel=0.05)
        return
    # sonde has means over data-parallel ranks, where torchtitan adds them up.
    found.grad_sq, found.trace_cov = found.grad_sq * n_ranks**2, found.trace_cov * n_ranks**2
    assert same_numbers(found, expected)


def _clipped(options: dict[str, Any]) -> dict[str, Any]:
    """The norms of a training that clips by itself, those of another by sonde, and the collectives of their clips."""
    warnings.simplefilter("ignore")
    from torch.distributed.tensor.debug import CommDebugMode

    from sonde.integrations.guarded import WrappedMethods
    from tests.integrations.titan_trainer import config_of, integration, titan, trainer_of, whole_state

    norms: dict[bool, list[float]] = {False: [], True: []}
    n_collectives, weights = {}, {}
    for is_ours in (False, True):

        def counted(clip: Any, *args: Any, is_ours: bool = is_ours, **kwargs: Any) -> Any:
            with CommDebugMode() as collectives:
                norm = clip(*args, **kwargs)
            norms[is_ours].append(float(norm))
            n_collectives[is_ours] = collectives.get_total_counts()
            return norm

        trainer = trainer_of(config_of(tempfile.mkdtemp(), **options))
        clips: Any = titan.dist_utils
        if is_ours:
            probe = integration.attach(trainer, unit="rows", clips=True, **BY_PIECES)
            clips = probe
        counting = WrappedMethods(clips, **{"_clip_grad_norm_" if is_ours else "clip_grad_norm_": counted})
        trainer.train()
        counting.restore()
        weights[is_ours] = whole_state(trainer)
    return {
        "norms": (norms[False], norms[True]),
        "collectives": (n_collectives[False], n_collectives[True]),
        "off": max(float((weights[True][name] - w).abs().max()) for name, w in weights[False].items()),
        "is_measured": probe.reading() is not None,
    }


@pytest.mark.parametrize(
    ("options", "is_measured"),
    [
        ({"tensor_parallel": 2}, False),
        ({"tensor_parallel": 2, "backend": "full_dtensor"}, True),
        ({"pipeline_parallel": 2}, True),
    ],
    ids=["TP by spmd_types, whose noise scale is refused", "TP, full DTensors", "PP"],
)
def test_one_collective_clips(new_ranks: Ranks, options: dict[str, Any], is_measured: bool) -> None:
    for result in new_ranks(_clipped, options):
        theirs, ours = result["norms"]
        # torchtitan adds squares up in fp32.
        assert ours == pytest.approx(theirs, rel=3e-4)
        assert result["collectives"][1] == 1
        assert result["off"] < 1e-4
        assert result["is_measured"] is is_measured


def _own_norm(is_wrong: bool) -> tuple[list[str], float]:
    """What is said at the end of a training, and torchtitan's usual norm over the true one."""
    warnings.simplefilter("ignore")
    from tests.integrations.titan_trainer import config_of, integration, titan, trainer_of

    factors: list[float] = []
    trainer, dist_utils = trainer_of(config_of(tempfile.mkdtemp(), ranks=2, accumulates=2)), titan.dist_utils
    for name, parameter in trainer.model_parts[0].named_parameters():
        # Of the vocabulary, batches have few tokens, whose rows the first rank holds.
        parameter.requires_grad_(name.startswith("layers"))
    probe = integration.attach(trainer, unit="rows", on_error="raise", **BY_PIECES)
    clip = dist_utils.clip_grad_norm_
    try:
        dist_utils.clip_grad_norm_ = clip_by_shard(factors) if is_wrong else clip
        trainer.train()
    finally:
        dist_utils.clip_grad_norm_ = clip
    return [*probe.said_at_end], usual(factors)


@pytest.mark.parametrize("is_wrong", [True, False], ids=["shard", "right"])
def test_the_norm_of_a_shard_is_named_with_its_factor(new_ranks: Ranks, is_wrong: bool) -> None:
    check_said(is_wrong, *new_ranks(_own_norm, is_wrong)[0])
