"""A loop with Accelerate on two ranks under DDP and FSDP2, against one process with all of their pieces."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integrations.as_launched import as_launched, free_port, fsdp2
from tests.integrations.plain_loop import BY_PIECES, Piece, plain_loop, same_numbers, whole_weights
from tests.ranks import Ranks

pytest.importorskip("accelerate", reason="needs accelerate: pip install '.[accelerate]'")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

NUMBERS = ("b_simple", "low", "high", "grad_sq", "trace_cov", "units_per_window", "windows", "dropped", "unit")


def _trained(port: int, wrapper: str, precision: str, clips: bool) -> dict[str, Any]:
    """Once without sonde and once with it. Each rank gets every second of the micro-batches."""
    with as_launched(port):
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState

        from sonde.integrations import accelerate as integration
        from tests.integrations.accelerate_loop import loop, tokens

        probes: list[Any] = []

        def run(attach: bool) -> torch.Tensor:
            GradientState._reset_state()
            AcceleratorState._reset_state(reset_partial_state=True)
            plugin = {"fsdp_plugin": fsdp2()} if wrapper == "FSDP2" else {}
            accelerator = Accelerator(gradient_accumulation_steps=3, cpu=True, mixed_precision=precision, **plugin)

            def attached(model: Any, optimizer: Any) -> None:
                options = {"unit": "rows", "units": tokens, "on_error": "raise", **BY_PIECES}
                assert wrapper in str([kind.__name__ for kind in type(model).__mro__]).replace("FSDPModule", "FSDP2")
                probes.append(integration.attach(accelerator, model, optimizer, clips=clips, **options))

            return whole_weights(loop(accelerator, attached if attach else None))

        plain, measured = run(False), run(True)
        reading = probes[0].reading()
        return {
            "largest_difference": float((plain - measured).abs().max()),
            "reading": {name: getattr(reading, name) for name in NUMBERS},
        }


@pytest.mark.parametrize(
    ("wrapper", "precision", "clips"),
    [
        ("DistributedDataParallel", "no", False),
        ("DistributedDataParallel", "bf16", False),
        ("FSDP2", "no", False),
        ("FSDP2", "no", True),
    ],
)
def test_two_ranks(ranks2: Ranks, wrapper: str, precision: str, clips: bool) -> None:
    from tests.integrations.accelerate_loop import batches, loss_of, network, tokens

    first, second = ranks2(_trained, free_port(), wrapper, precision, clips)
    for rank in (first, second):  # sonde's own clip sums in fp64
        assert rank["largest_difference"] <= (1e-6 if clips else 0)
    assert first["reading"] == second["reading"]
    data = batches()
    own = [[Piece({"batch": b}, {"unit_weights": tokens(b).tolist()}, 1 / 6) for b in data[rank::2]] for rank in (0, 1)]
    windows = [own[0][k : k + 3] + own[1][k : k + 3] for k in (0, 3)] * 3
    assert [len(window) for window in windows[:2]] == [6, 2]

    def loss_of_piece(model: Any, piece: Piece) -> torch.Tensor:
        def in_fp32(batch: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                return model(batch).float()  # type: ignore[no-any-return]

        return loss_of(in_fp32, piece.inputs["batch"]) * piece.weight  # type: ignore[arg-type]

    expected = plain_loop(network(), windows, loss_of_piece)
    assert same_numbers(SimpleNamespace(**first["reading"]), expected, apart_in_16_bits=precision == "bf16")
    assert first["reading"]["windows"] == 6
