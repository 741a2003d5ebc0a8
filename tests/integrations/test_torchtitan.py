"""A real Trainer of torchtitan: the values of a plain loop, weights as without sonde, its log and its checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("torchtitan", reason="needs torchtitan: make test-torchtitan")
# torchtitan and what it imports cause various warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

from torchtitan.config import ConfigManager  # noqa: E402

import sonde  # noqa: E402
from sonde.integrations.torchtitan_batches import documents  # noqa: E402
from tests.integrations.plain_loop import BY_PIECES, plain_loop, same_numbers  # noqa: E402
from tests.integrations.titan_trainer import (  # noqa: E402
    LR,
    STEPS,
    config_of,
    integration,
    loss_over_window,
    plain_model,
    titan,
    trainer_of,
    whole_state,
    windows_of,
)


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train(config: Any, **options: Any) -> tuple[dict[str, Tensor], Any, dict[str, Tensor]]:
    """The weights afterwards, the probe, and the weights before; without options there is no probe."""
    trainer = trainer_of(config)
    before = whole_state(trainer)
    options = {"unit": "rows", "on_error": "raise", **BY_PIECES} | options if options else {}
    probe = integration.attach(trainer, **options) if options else None
    trainer.train()
    trainer.close()
    return whole_state(trainer), probe, before


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("unit", ["rows", "documents"])
def test_reads_as_a_plain_loop(tmp_path: Path, unit: str) -> None:
    """On ragged rows, and on the documents in them."""
    config = config_of(tmp_path)
    units = documents if unit == "documents" else None
    measured, probe, before = train(config, units=units, log=tmp_path / "log")
    assert same(measured, train(config)[0])
    reading = probe.reading()
    assert (reading.windows, reading.dropped) == (STEPS, {})
    windows = windows_of(3)
    if unit == "documents":
        for piece in (piece for window in windows for piece in window):
            rows = piece.inputs["labels"].ne(-100)
            parts = [rows[0].sum(), rows[1, :10].sum(), rows[1, 10:].sum(), rows[2].sum()]
            piece.counts["unit_weights"] = [float(part) for part in parts if part]
    expected = plain_loop(plain_model(config, before), windows, loss_over_window(windows), lr=LR)
    assert expected.b_simple is not None
    assert same_numbers(reading, expected)
    run = sonde.read_run(tmp_path / "log")
    assert (run.ended, run.alerts) == ("training ended", ())


def test_backwards_of_a_chunked_loss_are_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtitan's loss runs a backward for each chunk. Weights stay, so that the first window may be left out."""
    config = config_of(tmp_path, chunks=4)
    for group in config.optimizer.param_groups:
        group.optimizer_kwargs["lr"] = 0.0
    _, probe, before = train(config, log=tmp_path / "log")
    reading = probe.reading()
    assert reading.windows == STEPS - 1
    assert "from the next window on" in next(iter(reading.dropped))
    windows = windows_of(3)
    first_is_dropped = [windows[0][:1], *windows[1:]]  # a window of one piece
    expected = plain_loop(plain_model(config, before), first_is_dropped, loss_over_window(windows), lr=0.0)
    assert same_numbers(reading, expected)


def test_clips_as_torchtitan(tmp_path: Path) -> None:
    """By the same norm, and the log has the share of windows that were clipped."""
    config, clip = config_of(tmp_path), titan.dist_utils.clip_grad_norm_
    ours, probe, _ = train(config, clips=True, log=tmp_path / "log")
    assert titan.dist_utils.clip_grad_norm_ is clip
    assert (probe.reading().windows, probe.reading().dropped) == (STEPS, {})
    theirs, _, before = train(config)
    # torchtitan adds squares up in fp32, and AdamW follows signs where gradients are small.
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-4) for name in ours)
    assert not same(theirs, before)
    run = sonde.read_run(tmp_path / "log")
    assert run.alerts == ()
    assert run.readings[-1].metrics["grad/clip_fraction"] == 1.0


def test_its_metrics_have_the_noise_scale(tmp_path: Path) -> None:
    trainer = trainer_of(config_of(tmp_path))
    logged: dict[int, dict[str, Any]] = {}
    trainer.metrics_processor.logger.log = lambda metrics, step: logged.update({step: dict(metrics)})
    integration.attach(trainer, unit="rows", on_error="raise", **BY_PIECES)
    trainer.train()
    assert list(logged) == [1, 2, 4, 6]
    assert all(metrics["gns/units_per_window"] == 9 for metrics in list(logged.values())[1:])
    assert {"n_tokens_seen", "gns/b_simple", "gns/b_simple_low"} <= logged[6].keys()


def test_a_resumed_training_goes_on_with_its_averages(tmp_path: Path) -> None:
    _, whole, _ = train(config_of(tmp_path / "whole"), units=None)
    train(config_of(tmp_path / "parts", saves=True, steps=4), units=None)
    _, resumed, _ = train(config_of(tmp_path / "parts", saves=True), units=None)
    reading = resumed.reading()
    assert reading.windows == STEPS
    assert same_numbers(reading, whole.reading())


def test_a_checkpoint_without_averages_is_loaded_as_it_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(config_of(tmp_path, saves=True, steps=4))
    with caplog.at_level(logging.WARNING):
        _, probe, _ = train(config_of(tmp_path, saves=True), units=None)
    assert probe.reading().windows == STEPS - 4
    assert "the checkpoint has no entry 'sonde'" in caplog.text


def test_a_trainer_that_attaches_itself(tmp_path: Path) -> None:
    """As torchtitan's own command makes it, whose options work as before."""
    chosen = ["--module", "tests.integrations.titan_trainer", "--config", "measured_config"]
    config = ConfigManager().parse_args([*chosen, "--training.steps", "3", "--dump_folder", str(tmp_path)])
    trainer = config.build()
    assert isinstance(trainer, titan.Trainer)
    trainer.train()
    assert trainer.noise_scale.reading().windows == 3
    assert same(whole_state(trainer), train(config_of(tmp_path, steps=3))[0])


def test_cuda_graphs_are_named_and_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """torchtitan replaces this function by one that replays a graph."""
    trainer = trainer_of(config_of(tmp_path))
    body = trainer.fwd_bwd_fn
    trainer.fwd_bwd_fn = lambda *args: body(*args)
    with caplog.at_level(logging.ERROR):
        probe = integration.attach(trainer, unit="rows", clips=True)
        trainer.train()
    assert "this training is not measured: ValueError: backwards are replayed in CUDA graphs" in caplog.text
    assert probe.reading() is None
    trainer = trainer_of(config_of(tmp_path))
    trainer.fwd_bwd_fn = lambda *args: body(*args)
    with pytest.raises(ValueError, match=r"train with --training\.disable_cuda_graphs"):
        integration.attach(trainer, unit="rows", on_error="raise")


def test_a_training_that_fails_ends_its_log(tmp_path: Path) -> None:
    trainer = trainer_of(config_of(tmp_path))
    integration.attach(trainer, unit="rows", log=tmp_path / "log", **BY_PIECES)
    body = trainer.fwd_bwd_fn.__func__
    calls = iter(range(100))

    def fails(self: Any, *args: Any) -> Any:
        if next(calls) == 7:
            raise KeyError("of the user's own")
        return body(self, *args)

    trainer.fwd_bwd_fn = fails.__get__(trainer)
    with pytest.raises(KeyError, match="of the user's own"):
        trainer.train()
    run = sonde.read_run(tmp_path / "log")
    assert run.ended == "stopped by KeyError"
    assert run.readings[-1].window == 2


def test_closing_leaves_the_trainer_as_it_was(tmp_path: Path) -> None:
    trainer = trainer_of(config_of(tmp_path))
    owners = (trainer, trainer.optimizers, trainer.metrics_processor, titan.dist_utils)
    before = [dict(vars(owner)) for owner in owners]
    probe = integration.attach(trainer, unit="rows", verbose=False, clips=True)
    with pytest.raises(ValueError, match="has a probe already"):
        integration.attach(trainer, unit="rows")
    probe.close()
    after = [dict(vars(owner)) for owner in owners]
    assert [set(names) for names in after] == [set(names) for names in before]
    with pytest.raises(ValueError, match=r"must be a torchtitan\.trainer\.Trainer"):
        integration.attach(object())


def test_guard_the_order_of_torchtitans_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the integration leans on: these calls, by these names and with these arguments, in this order."""
    trainer = trainer_of(config_of(tmp_path, steps=2))
    calls: list[Any] = []

    def noting(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def note(*args: Any, **kwargs: Any) -> Any:
            calls.append((name, len(args), sorted(kwargs)))
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, note)

    noting(trainer, "train_step")
    noting(trainer, "forward_backward_step")
    noting(trainer, "fwd_bwd_fn")
    noting(titan.dist_utils, "clip_grad_norm_")
    noting(trainer.optimizers, "step")
    noting(trainer.metrics_processor, "log")
    trainer.train()
    piece = [("forward_backward_step", 0, ["global_valid_tokens", "input_dict", "labels"]), ("fwd_bwd_fn", 4, [])]
    end = [("clip_grad_norm_", 2, ["ep_enabled", "foreach", "pp_mesh"]), ("step", 0, [])]
    step = [("train_step", 1, []), *piece * 3, *end, ("log", 4, ["extra_metrics"])]
    assert calls == step * 2
