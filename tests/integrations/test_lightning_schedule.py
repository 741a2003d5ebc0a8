"""The batch schedule of Lightning's Trainer, against the loop by hand, beside the callback that anybody would write."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.plain_loop import BY_PIECES, optimizer_of, weights

pytest.importorskip("lightning", reason="needs lightning: pip install '.[lightning]'")
pytestmark = pytest.mark.filterwarnings("ignore")

import lightning as L  # noqa: E402

from sonde.integrations.lightning import NoiseScale  # noqa: E402
from sonde.integrations.lightning_schedule import schedule_batch  # noqa: E402
from tests.integrations.lightning_module import WIDTH, Module, loss_of, network, trainer_of  # noqa: E402

GROWS: dict[str, Any] = {"largest": 8, "ratio": 1e6, "pause": 0, "every": 3, "verbose": False, "rule": "none"}
N_BATCHES, SMALLEST = 46, 2
"""Of an epoch, whose last window is shorter."""


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(N_BATCHES)]


class Counting(L.Callback):  # type: ignore[misc]
    """The batches of each window, and the rate of its step."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.rates: list[float] = []
        self._n = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.optimizers[0].register_step_pre_hook(lambda o, *_: self.rates.append(o.param_groups[0]["lr"]))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._n += 1

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.sizes.append(self._n)
        self._n = 0


class Obvious(L.Callback):  # type: ignore[misc]
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.accumulate_grad_batches = 4


class Longer(Module):
    def __init__(self, rate: Any = None) -> None:
        super().__init__()
        self._rate = rate

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(batches(), batch_size=None)  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        optimizer = optimizer_of(self)
        if self._rate is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=N_BATCHES)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler} | self._rate}


def fitted(folder: Path, *callbacks: Any, rate: Any = None, **options: Any) -> tuple[Any, Any, Counting]:
    module, counting = Longer(rate), Counting()
    trainer = trainer_of(folder, *callbacks, counting, accumulate_grad_batches=SMALLEST, **options)
    trainer.fit(module)
    return trainer, module, counting


def by_hand(sizes: list[int]) -> torch.Tensor:
    """The weights after windows of these sizes. An epoch's last window is divided by the number that is set."""
    net, data, at, n_set = copy.deepcopy(network()), batches() * 2, 0, SMALLEST
    optimizer = optimizer_of(net)
    for size in sizes:
        n_set = max(n_set, size)
        for batch in data[at : at + size]:
            (loss_of(net, batch) / n_set).backward()
        at += size
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return weights(net)


def test_every_window_is_whole(tmp_path: Path) -> None:
    noise = NoiseScale(unit="rows", on_error="raise", **BY_PIECES)
    schedule = schedule_batch(noise, **(GROWS | {"counts": (2, 5, 8), "every": 1}))
    trainer, module, counting = fitted(tmp_path, noise, schedule)
    assert sum(counting.sizes) == 2 * N_BATCHES
    assert {2, 5, 8} <= set(counting.sizes)
    torch.testing.assert_close(weights(module.net), by_hand(counting.sizes), rtol=0, atol=1e-6)  # rounding of fp32
    assert trainer.accumulate_grad_batches == SMALLEST


def test_the_obvious_callback_steps_on_gradients_of_two_windows(tmp_path: Path) -> None:
    """What `schedule_batch` is for: a change after 6 batches, of 2 a window, to 4."""
    _, module, counting = fitted(tmp_path, Obvious())
    assert counting.sizes[:4] == [2, 2, 2, 2]
    assert float((weights(module.net) - by_hand(counting.sizes)).abs().max()) > 1e-3


def test_the_schedule_of_the_rate_ends_where_it_would(tmp_path: Path) -> None:
    noise = NoiseScale(unit="rows", on_error="raise", **BY_PIECES)
    schedule = schedule_batch(noise, **GROWS | {"rule": "sqrt"})
    trainer, _, counting = fitted(tmp_path, noise, schedule, rate={"interval": "step"}, gradient_clip_val=None)
    n_set = [max(counting.sizes[: k + 1]) for k in range(len(counting.sizes))]
    steps = [-(-size // SMALLEST) for size in counting.sizes]
    before = [sum(steps[:k]) for k in range(len(steps))]
    expected = [1e-2 * (1 - 0.9 * n / N_BATCHES) * (m / 2) ** 0.5 for n, m in zip(before, n_set, strict=True)]
    assert counting.rates == pytest.approx(expected, rel=1e-9)
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == N_BATCHES


def test_a_training_that_resumes_goes_on(tmp_path: Path) -> None:
    def callbacks() -> tuple[NoiseScale, L.Callback]:
        noise = NoiseScale(unit="rows", on_error="raise", **BY_PIECES)
        return noise, schedule_batch(noise, **GROWS)

    _, whole, counting = fitted(tmp_path / "whole", *callbacks())
    first, _, counted = fitted(tmp_path / "parts", *callbacks(), max_epochs=1)
    first.save_checkpoint(tmp_path / "saved.ckpt")
    module, rest, again = Longer(), Counting(), callbacks()
    trainer = trainer_of(tmp_path, *again, rest, accumulate_grad_batches=SMALLEST)
    trainer.fit(module, ckpt_path=tmp_path / "saved.ckpt")
    assert counted.sizes + rest.sizes == counting.sizes
    assert torch.equal(weights(module.net), weights(whole.net))
    _, _, anew = fitted(tmp_path / "anew", *again)  # the same callbacks, without a checkpoint
    assert anew.sizes == counting.sizes


def test_a_training_that_fails_leaves_the_trainer_as_it_was(tmp_path: Path) -> None:
    class Fails(L.Callback):  # type: ignore[misc]
        def on_before_zero_grad(self, trainer: Any, *_: Any) -> None:
            if trainer.accumulate_grad_batches > SMALLEST:
                self.trainer = trainer
                raise ArithmeticError

    noise, fails = NoiseScale(unit="rows", on_error="raise", **BY_PIECES), Fails()
    with pytest.raises(ArithmeticError):
        fitted(tmp_path, noise, schedule_batch(noise, **GROWS), fails)
    assert fails.trainer.accumulate_grad_batches == SMALLEST
    assert len(fails.trainer.optimizers[0]._optimizer_step_pre_hooks) == 1  # of `Counting`


@pytest.mark.parametrize(
    ("options", "of_schedule", "words"),
    [
        ({"max_steps": 4}, {}, "max_steps= counts optimizer steps"),
        ({"rate": {"interval": "step", "frequency": 3}}, {}, "a frequency above 1 counts optimizer steps"),
        ({}, {"monotone": False}, "monotone=False is for loops of your own"),
        ({}, {"largest": 1}, "largest must be at least the present 2 micro-batches"),
        ({"callbacks": []}, {}, "is not measured"),
    ],
)
def test_what_is_refused(tmp_path: Path, options: dict[str, Any], of_schedule: dict[str, Any], words: str) -> None:
    noise = NoiseScale(unit="rows", on_error="raise", **BY_PIECES)

    def fit() -> None:
        schedule = schedule_batch(noise, **(GROWS | of_schedule))
        alone = "callbacks" in options
        fitted(tmp_path, *([schedule] if alone else [noise, schedule]), **({} if alone else options))

    with pytest.raises(ValueError, match=re.escape(words)):
        fit()
