"""A loop with Accelerate on two ranks under DDP and FSDP2, against one process with all of their pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integrations.as_launched import as_launched, free_port, fsdp2, reading_of_all, result_of
from tests.integrations.plain_loop import BY_PIECES, Piece, plain_loop, same_numbers, whole_weights
from tests.ranks import Ranks

pytest.importorskip("accelerate", reason="needs accelerate: pip install '.[accelerate]'")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


def _trained(port: int, wrapper: str, clips: bool) -> dict[str, Any]:
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
            accelerator = Accelerator(gradient_accumulation_steps=3, cpu=True, **plugin)

            def attached(model: Any, optimizer: Any) -> None:
                options = {"unit": "rows", "units": tokens, "on_error": "raise", **BY_PIECES}
                assert wrapper in str([kind.__name__ for kind in type(model).__mro__]).replace("FSDPModule", "FSDP2")
                probes.append(integration.attach(accelerator, model, optimizer, clips=clips, **options))

            return whole_weights(loop(accelerator, attached if attach else None))

        plain, measured = run(False), run(True)
        return result_of(plain, measured, probes[0].reading())


@pytest.mark.parametrize(("wrapper", "clips"), [("DistributedDataParallel", False), ("FSDP2", False), ("FSDP2", True)])
def test_two_ranks(ranks2: Ranks, wrapper: str, clips: bool) -> None:
    from tests.integrations.accelerate_loop import batches, loss_of, network, tokens

    # sonde's own clip sums in fp64.
    reading = reading_of_all(ranks2(_trained, free_port(), wrapper, clips), apart=1e-6 if clips else 0.0)
    data = batches()
    own = [[Piece({"batch": b}, {"unit_weights": tokens(b).tolist()}, 1 / 6) for b in data[rank::2]] for rank in (0, 1)]
    windows = [own[0][k : k + 3] + own[1][k : k + 3] for k in (0, 3)] * 3
    assert [len(window) for window in windows[:2]] == [6, 2]

    def loss_of_piece(model: Any, piece: Piece) -> torch.Tensor:
        return loss_of(model, piece.inputs["batch"]) * piece.weight

    assert same_numbers(reading, plain_loop(network(), windows, loss_of_piece))
    assert reading.windows == 6
