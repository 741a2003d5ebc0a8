"""What goes wrong under DDP: peers that fail, hooks that come late, gradients changed behind DDP's buckets."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sonde
from tests.probes.loops import Recording, attached, batch, mean_loss, small_model
from tests.probes.test_noise_scale_ddp import in_bf16
from tests.ranks import Ranks


def _peer_leaves(by_with: bool) -> dict[str, object]:
    """A window whose sum never finishes: the other rank does not take part, and the collective fails in time."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    if dist.get_rank() == 1:
        time.sleep(3)
        return {}
    model, sink = small_model(), Recording()
    probe = attached(model, process_group=group, sinks=[sink])
    raised = ""
    try:
        if by_with:
            with probe:
                _one_window(model, probe)
                raise KeyError("the user's own")
        _one_window(model, probe)
        probe.close()
    except (KeyError, RuntimeError) as error:
        raised = type(error).__name__
    return {
        "hooks": sum(len(p._backward_hooks or ()) for p in model.parameters()),
        "kinds": [r["kind"] for r in sink.records],
        "closed": sink.closed,
        "raised": raised,
    }


def _one_window(model: torch.nn.Module, probe: sonde.NoiseScaleProbe) -> None:
    for _ in range(2):
        with probe.piece(units=4):
            mean_loss(model, *batch(4, torch.Generator().manual_seed(0))).backward()
    probe.step()
    time.sleep(1.5)  # until the sum over ranks has failed


@pytest.mark.parametrize("by_with", [True, False])
def test_a_failed_peer_leaves_no_hook_and_a_whole_log(by_with: bool) -> None:
    ranks = Ranks(2)  # their own: a group of theirs is broken afterwards
    try:
        left, _ = ranks(_peer_leaves, by_with)
    finally:
        ranks.stop()
    assert left["hooks"] == 0
    assert left["kinds"] == ["header", "end"]
    assert left["closed"] == 1
    assert left["raised"] == ("KeyError" if by_with else "RuntimeError")


def _changed_behind_the_buckets(tap: str) -> tuple[str, dict[str, int], str]:
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(small_model())
    generator = torch.Generator().manual_seed(dist.get_rank())
    with attached(model, tap=tap, log_every=1, horizon=20.0) as probe:
        for _ in range(30):
            with probe.piece(units=4):
                mean_loss(model, *batch(4, generator)).backward()
            for p in model.parameters():
                p.grad.clamp_(-0.01, 0.01)  # type: ignore[union-attr]
            probe.step()
            model.zero_grad()
        return probe.reading().status, dict(probe.reading().dropped), probe._reader.tap_name


@pytest.mark.parametrize("tap", ["auto", "comm_hook"])
def test_what_is_changed_after_the_reduction_is_seen(ranks2: Ranks, tap: str) -> None:
    for status, dropped, tap_name in ranks2(_changed_behind_the_buckets, tap):
        assert status == "unresolved"
        assert sum(dropped.values()) == 30
        assert all("clipped by value" in reason for reason in dropped)
        assert (tap_name == "leaf hooks") == (tap == "auto")  # no reason to change to a tap that sees less


def _scaled_behind_the_buckets() -> list[tuple[float | None, float | None]]:
    """Clipped by norm, differently in each window, before probe.step(): the same as not clipped."""
    found = []
    for clips in (False, True):
        model = DistributedDataParallel(small_model())
        generator = torch.Generator().manual_seed(dist.get_rank())
        with attached(model, tap="comm_hook") as probe:
            for _ in range(20):
                with probe.piece(units=4):
                    mean_loss(model, *batch(4, generator)).backward()
                if clips:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                probe.step()
                model.zero_grad()
            found.append((probe.reading().trace_cov, probe.reading().grad_sq))
    return found


def test_scaling_after_the_reduction_does_not_matter(ranks2: Ranks) -> None:
    for plain, clipped in ranks2(_scaled_behind_the_buckets):
        assert clipped == pytest.approx(plain, rel=1e-4)


def _hook_registered_late() -> tuple[int, dict[str, int]]:
    model = DistributedDataParallel(small_model())
    generator = torch.Generator().manual_seed(dist.get_rank())
    with attached(model, tap="leaf", log_every=1) as probe:
        model.register_comm_hook(None, in_bf16)
        for _ in range(10):
            with probe.piece(units=4):
                mean_loss(model, *batch(4, generator)).backward()
            probe.step()
            model.zero_grad()
        return probe.reading().windows, dict(probe.reading().dropped)


def test_a_communication_hook_may_be_registered_after_attach(ranks2: Ranks) -> None:
    for windows, dropped in ranks2(_hook_registered_late):
        assert (windows, dropped) == (10, {})


def _a_tap_each() -> tuple[float | None, float | None, bool]:
    """One rank reads leaf hooks, the other DDP's buckets, as when "auto" changes at different windows."""
    model, plain = DistributedDataParallel(small_model()), DistributedDataParallel(small_model())
    generator = torch.Generator().manual_seed(dist.get_rank())
    with attached(model, tap="leaf" if dist.get_rank() == 0 else "comm_hook") as probe:
        for _ in range(10):
            x, y = batch(4, generator)
            with probe.piece(units=4):
                mean_loss(model, x, y).backward()
            mean_loss(plain, x, y).backward()
            probe.step()
            same = all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))  # type: ignore[arg-type]
            if not same:
                break
            model.zero_grad()
            plain.zero_grad()
        return probe.reading().trace_cov, probe.reading().grad_sq, same


def _leaf_on_both() -> tuple[float | None, float | None]:
    model = DistributedDataParallel(small_model())
    generator = torch.Generator().manual_seed(dist.get_rank())
    with attached(model, tap="leaf") as probe:
        for _ in range(10):
            with probe.piece(units=4):
                mean_loss(model, *batch(4, generator)).backward()
            probe.step()
            model.zero_grad()
        return probe.reading().trace_cov, probe.reading().grad_sq


def test_ranks_may_change_taps_at_different_windows(ranks2: Ranks) -> None:
    expected = ranks2(_leaf_on_both)[0]
    for trace_cov, grad_sq, same in ranks2(_a_tap_each):
        assert same
        assert (trace_cov, grad_sq) == pytest.approx(expected, rel=1e-5)
