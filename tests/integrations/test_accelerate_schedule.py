"""The batch schedule of a loop with Accelerate on two ranks, against the loop by hand, beside the obvious change."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integrations.as_launched import as_launched, free_port
from tests.integrations.plain_loop import BY_PIECES, weights, whole_weights
from tests.ranks import Ranks

pytest.importorskip("accelerate", reason="needs accelerate: pip install '.[accelerate]'")
pytestmark = [pytest.mark.filterwarnings("ignore")]

GROWS: dict[str, Any] = {"largest": 8, "ratio": 1e6, "pause": 0, "every": 1, "verbose": False, "rule": "sqrt"}
GROWS["counts"] = (2, 5, 8)
N_BATCHES, SMALLEST, EPOCHS = 31, 2, 2
"""On each rank in an epoch, whose last window is shorter."""
N_STEPS = 120
"""Of the schedule of the rate, of which Accelerate takes two with each window, one for each rank."""


def _batches() -> list[torch.Tensor]:
    from tests.integrations.accelerate_loop import WIDTH

    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(2 * N_BATCHES)]


def _optimizer(model: Any) -> torch.optim.SGD:
    """Its steps are in proportion to gradients, so that ranks may sum these in another order than one process."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _rate(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=N_STEPS)


def _trained(port: int, how: str) -> dict[str, Any]:
    with as_launched(port):
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState

        from sonde.integrations import accelerate as integration
        from sonde.integrations.accelerate_schedule import schedule_batch
        from tests.integrations.accelerate_loop import loss_of, network

        GradientState._reset_state()
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(gradient_accumulation_steps=SMALLEST, cpu=True)
        data: Any = torch.utils.data.DataLoader(_batches(), batch_size=1, collate_fn=lambda one: one[0])  # type: ignore[arg-type]
        net = network()
        own = _optimizer(net)
        model, optimizer, loader, scheduler = accelerator.prepare(net, own, data, _rate(own))
        probe = integration.attach(accelerator, model, optimizer, unit="rows", on_error="raise", **BY_PIECES)
        schedule = None if how == "obvious" else schedule_batch(probe, **GROWS, lr_scheduler=scheduler)
        windows: list[tuple[int, int]] = []
        size = 0
        for _ in range(EPOCHS):
            for batch in loader:
                with accelerator.accumulate(model):
                    size += 1
                    accelerator.backward(loss_of(model, batch))
                    optimizer.step()
                    if schedule is None or how == "steps of its own":
                        scheduler.step()
                    else:
                        schedule.step_lr(scheduler)
                    optimizer.zero_grad()
                    if accelerator.sync_gradients:
                        windows.append((size, accelerator.gradient_accumulation_steps))
                        size = 0
                        if how == "obvious" and len(windows) == 3:
                            accelerator.gradient_accumulation_steps = 4
        probe.close()
        weights_of_all = whole_weights(model)
        return {"weights": weights_of_all, "windows": windows, "steps": scheduler.scheduler.last_epoch}


def _by_hand(windows: list[tuple[int, int]]) -> tuple[torch.Tensor, int]:
    """Both ranks' micro-batches in one process, in windows of so many, with losses divided by the second number.

    A schedule of the rate takes a step for every two micro-batches; a short window ends with a whole one.
    """
    from tests.integrations.accelerate_loop import loss_of, network

    net, at, n_counted = network(), 0, 0
    optimizer, shown = _optimizer(net), _optimizer(network())
    scheduler = _rate(shown)
    of_ranks = [_batches()[rank::2] * EPOCHS for rank in (0, 1)]
    for size, n_set in windows:
        for batches in of_ranks:
            for batch in batches[at : at + size]:
                (loss_of(net, batch) / n_set / 2).backward()
        at += size
        optimizer.param_groups[0]["lr"] = shown.param_groups[0]["lr"] * (n_set / SMALLEST) ** 0.5
        optimizer.step()
        optimizer.zero_grad()
        n_counted += size
        n_counted += n_counted % SMALLEST if size < n_set else 0
        shown.step()
        while scheduler.last_epoch < 2 * (n_counted // SMALLEST):
            scheduler.step()
    return weights(net), scheduler.last_epoch


def test_every_window_is_whole_on_both_ranks(ranks2: Ranks) -> None:
    first, second = ranks2(_trained, free_port(), "ours")
    assert torch.equal(first["weights"], second["weights"])
    windows = first["windows"]
    assert windows == second["windows"]
    assert {n_set for _, n_set in windows} == {2, 5, 8}
    assert len([1 for size, n_set in windows if size != n_set]) <= EPOCHS  # the last of an epoch
    by_hand, n_steps = _by_hand(windows)
    torch.testing.assert_close(first["weights"], by_hand, rtol=0, atol=1e-6)  # rounding of fp32
    assert first["steps"] == n_steps


def test_the_obvious_change_makes_a_window_that_is_too_short(ranks2: Ranks) -> None:
    """What `schedule_batch` is for: two micro-batches come after the change, and each loss is divided by four."""
    first, second = ranks2(_trained, free_port(), "obvious")
    assert torch.equal(first["weights"], second["weights"])
    assert first["windows"][2:5] == [(2, 2), (2, 4), (4, 4)]


def _refused(port: int) -> str:
    try:
        _trained(port, "steps of its own")
    except ValueError as error:
        return str(error)
    return "nothing"


def test_a_schedule_of_the_rate_that_counts_steps_is_refused_on_both_ranks(ranks2: Ranks) -> None:
    for said in ranks2(_refused, free_port()):
        assert "call schedule.step_lr(lr_scheduler) in place of lr_scheduler.step()" in said


@pytest.mark.usefixtures("no_accelerate_state")
def test_a_checkpoint_holds_where_the_schedule_stands(tmp_path: Any) -> None:
    from sonde.integrations import accelerate as integration
    from sonde.integrations.accelerate_schedule import schedule_batch
    from tests.integrations.accelerate_loop import accelerator, loss_of, network

    def train(n: int, load: bool) -> tuple[Any, Any]:
        made = accelerator(gradient_accumulation_steps=SMALLEST)
        net = network()
        model, optimizer = made.prepare(net, _optimizer(net))
        probe = integration.attach(made, model, optimizer, unit="rows", on_error="raise", **BY_PIECES)
        schedule = schedule_batch(probe, **GROWS)
        made.register_for_checkpointing(schedule)
        if load:
            made.load_state(str(tmp_path))
        for batch in _batches()[:n]:
            with made.accumulate(model):
                made.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
        if not load:
            made.save_state(str(tmp_path))
        grown = made.gradient_accumulation_steps
        probe.close()
        assert made.gradient_accumulation_steps == SMALLEST
        return grown, schedule.present

    of_first = train(2 * N_BATCHES, load=False)
    assert of_first == (8, 8)
    assert train(1, load=True) == of_first
