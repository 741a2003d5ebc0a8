"""What goes wrong in mid-run or on one rank, plain and under each wrapper: a reason or the right number, never a hang.

Torch itself refuses some of it: DDP an exchanged or frozen parameter, FSDP2 and tensor parallelism another layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.batch_size.loops import attached, flat_grad, load_foreign_state, mean_loss
from tests.batch_size.two_layers import clear, cut, filled_up, pieces_of, small
from tests.oracles import window_by_hand
from tests.ranks import Ranks

SETUPS = ("plain", "DDP", "FSDP2", "TP")


def data_rank(setup: str) -> int:
    return dist.get_rank() if setup in ("DDP", "FSDP2") else 0


def run_window(probe: Any, model: Any, pieces: list[Any], *, fill: int = 0) -> None:
    """One window: the pieces, and before them `fill` backwards outside of pieces, which add nothing."""
    for piece in filled_up(model, [None] * fill + pieces):
        with probe.piece(units=len(piece[0])):
            mean_loss(model, *piece).backward()
    probe.step()


def known(probe: Any) -> dict[str, Any]:
    reading, solved = probe.reading(), probe.window()
    last = solved and (solved.total.trace_cov, solved.total.grad_sq)
    return {"windows": reading.windows, "dropped": dict(reading.dropped), "alerts": set(probe.alerts), "last": last}


def results(ranks: Ranks, setup: str, function: Callable[..., Any], *args: Any) -> list[Any]:
    return [function(*args)] if setup == "plain" else ranks(function, *args)


def new_layer(model: nn.Sequential) -> None:
    model[2] = nn.Linear(8, 3)


def new_parameter(model: nn.Sequential) -> None:
    model[2].bias = nn.Parameter(model[2].bias.detach().clone())


def new_values(model: nn.Sequential) -> None:
    for p in model.parameters():
        p.data = p.data.clone()


def frozen(model: nn.Sequential) -> None:
    model[0].requires_grad_(False)


def _changed(setup: str, change: Callable[[nn.Sequential], None]) -> dict[str, Any]:
    """Four windows, the change, and six more."""
    inner = small()
    model = cut(setup, inner)
    with attached(model) as probe:
        for window in range(10):
            if window == 4:
                change(inner)
            try:
                run_window(probe, model, pieces_of(data_rank(setup), window, 2))
            except RuntimeError as error:
                return {"error": str(error)}
            clear(inner)
        return known(probe)


REPLACED = "measured parameters are no longer in the model"
OF_TORCH = {
    ("DDP", new_layer): "Expected to have finished reduction",
    ("DDP", new_parameter): "Expected to have finished reduction",
    ("DDP", frozen): "Expected to have finished reduction",
    ("TP", new_layer): "shapes cannot be multiplied",
}
"""What torch itself refuses in a forward after it, on every rank."""


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("change", [new_layer, new_parameter, new_values, frozen])
def test_parameters_that_change_in_mid_run(ranks2: Ranks, setup: str, change: Any) -> None:
    for result in results(ranks2, setup, _changed, setup, change):
        if (setup, change) in OF_TORCH:
            assert OF_TORCH[setup, change] in result["error"]
        elif change is frozen:
            assert result["alerts"] == {"frozen"}
            assert (result["windows"], result["dropped"]) == (10, {})
        elif change is new_values or (setup, change) == ("FSDP2", new_parameter):  # FSDP2 puts its own back
            assert (result["windows"], result["dropped"], result["alerts"]) == (10, {}, set())
        else:
            (reason,) = result["dropped"]
            assert reason.startswith(REPLACED)
            assert (result["dropped"][reason], result["windows"], result["last"]) == (6, 4, None)
            assert "replaced" in result["alerts"]


N_PIECES = {"uneven": (1, 3), "none on one rank": (3, 0)}


def _uneven(setup: str, n_pieces: tuple[int, int]) -> dict[str, Any]:
    """A rank with fewer pieces fills up with backwards that add nothing, since DDP and FSDP2 need as many on each."""
    model, rank = cut(setup, small()), dist.get_rank()
    with attached(model, units_per_piece=None) as probe:
        own = pieces_of(rank, 0, n_pieces[rank], units=3 + rank)
        run_window(probe, model, own, fill=max(n_pieces) - len(own))
        result = known(probe)
        result["pieces"] = probe._log._pieces["per_window"]
        return result


@pytest.mark.parametrize("setup", ["DDP", "FSDP2"])
@pytest.mark.parametrize("name", N_PIECES)
def test_ranks_with_other_numbers_of_pieces(ranks2: Ranks, setup: str, name: str) -> None:
    n_pieces = N_PIECES[name]
    every = [piece for rank, n in enumerate(n_pieces) for piece in pieces_of(rank, 0, n, units=3 + rank)]
    model = small()
    gradients = [flat_grad(model, mean_loss(model, *piece)) for piece in every]
    units = [float(len(x)) for x, _ in every]
    expected = window_by_hand(gradients, [1.0] * len(every), units, torch.stack(gradients).sum(0) / 2)
    for result in ranks2(_uneven, setup, n_pieces):
        assert result["pieces"] == sum(n_pieces)
        assert result["last"] == pytest.approx(expected, rel=1e-5)


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another group function": ({"groups": None}, {}, "groups of parameters"),
    "an option out of range": ({"allowance": -1.0}, {}, "allowance must be seconds"),
    "a group function that fails": ({"groups": lambda name: 1 / 0}, {}, "division by zero"),
    "no optimizer for Adam's metric": ({"metric": "adam"}, {}, "got no optimizer"),
}


def _other_arguments(setup: str, name: str) -> str:
    own, others, _ = OTHERS[name]
    try:
        attached(cut(setup, small()), **(own if dist.get_rank() == 1 else others)).close()
    except (ValueError, ArithmeticError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("setup", ["DDP", "FSDP2", "TP"])
@pytest.mark.parametrize("name", OTHERS)
def test_arguments_that_one_rank_refuses_or_that_differ_are_refused_on_all(
    ranks2: Ranks, setup: str, name: str
) -> None:
    first, second = ranks2(_other_arguments, setup, name)
    message = OTHERS[name][2]
    assert message in second
    assert (
        "groups of parameters differs between ranks" in first
        if message in first
        else ("another rank refused to attach" in first)
    )


def _foreign_state(setup: str) -> tuple[str, bool]:
    model = cut(setup, small())
    with attached(model) as probe:
        run_window(probe, model, pieces_of(data_rank(setup), 0, 2))
        clear(model)
        return load_foreign_state(probe)


@pytest.mark.parametrize("setup", SETUPS)
def test_a_checkpoint_of_another_model(ranks2: Ranks, setup: str) -> None:
    for message, is_unchanged in results(ranks2, setup, _foreign_state, setup):
        assert message.startswith("the state was saved by a probe that measured other parameters")
        assert is_unchanged
