"""Derivatives along a direction beside Jacobians."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sonde.policy.scoring.directional_derivatives import Derivatives, derivatives_along
from tests.ranks import Ranks
from tests.sharded import VOCABULARY, build, fsdp, tokens


def token_numbers(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each token given the tokens before it, and the entropy at its position."""
    log_p = model(batch).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, batch[..., None])[..., 0], entropy


def random_direction(model: nn.Module, size: float = 1.0) -> dict[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        p: size * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype) for p in model.parameters()
    }


Function = Callable[[Tensor], tuple[Tensor, ...]]


def derivatives_of(
    function: Function,
    model: nn.Module,
    direction: Mapping[Tensor, Tensor],
    batches: Sequence[Tensor],
    pilot: Any = None,
) -> Derivatives:
    def passes(of: Sequence[Tensor], narrow: Mapping[Tensor, Tensor]) -> list[tuple[Tensor, ...]]:
        assert not narrow
        return [tuple(out.clone() for out in function(batch)) for batch in of]

    pilot = batches[0] if pilot is None else pilot
    return derivatives_along(passes, model, dict(direction), batches, pilot=pilot)


def along(model: nn.Module, direction: dict[Tensor, Tensor], n_batches: int = 2) -> Derivatives:
    return derivatives_of(lambda b: token_numbers(model, b), model, direction, list(tokens().chunk(n_batches)))


def joined(derivatives: Derivatives) -> Tensor:
    return torch.cat([torch.stack(outputs).flatten(1) for outputs in derivatives.batches], dim=1)


def exact(model: nn.Module, direction: dict[Tensor, Tensor]) -> Tensor:
    """Exact derivatives by one backward for every output."""
    outputs = torch.stack(token_numbers(model, tokens())).flatten()
    derivatives = []
    for out in outputs:
        grads = torch.autograd.grad(out, list(direction), retain_graph=True, allow_unused=True)
        derivatives.append(sum((g * d).sum() for g, d in zip(grads, direction.values(), strict=True) if g is not None))
    return torch.stack(derivatives).view(2, -1)  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "off"), [(torch.float64, 1e-7), (torch.float32, 2e-3)])
@pytest.mark.parametrize("size", [1e-6, 1.0])
@pytest.mark.parametrize("is_sensitive", [False, True])
def test_it_is_the_jacobian_times_the_direction(
    dtype: torch.dtype, off: float, size: float, is_sensitive: bool
) -> None:
    model = build().to(dtype)
    if is_sensitive:  # parameters of huge norm and little effect: a step by their norm would move the others too far
        with torch.no_grad():
            model.front.embed.weight[VOCABULARY:] = 1e4  # rows that no token uses
        off = 5e-3
    direction = random_direction(model, size)
    expected, before = exact(model, direction), [p.detach().clone() for p in model.parameters()]
    derivatives = along(model, direction)
    assert derivatives.doubt == ""
    assert float((joined(derivatives) - expected).norm() / expected.norm()) < off
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert all(
        torch.equal(d, r) for d, r in zip(direction.values(), random_direction(model, size).values(), strict=True)
    )


def test_tied_weights_move_together() -> None:
    model = build().double()
    model.front.embed = nn.Embedding(VOCABULARY, 8, dtype=torch.float64)
    model.back.head.weight = model.front.embed.weight
    direction = random_direction(model)
    expected = exact(model, direction)
    assert float((joined(along(model, direction)) - expected).norm() / expected.norm()) < 1e-7


def coarse(model: nn.Module, batch: Tensor) -> tuple[Tensor, ...]:
    return tuple((out * 64).round() / 64 for out in token_numbers(model, batch))


def autocast(model: nn.Module, batch: Tensor) -> tuple[Tensor, ...]:
    """bf16 rounds log-probabilities to about 2 digits."""
    with torch.autocast("cpu", torch.bfloat16):
        return token_numbers(model, batch)


def far(model: nn.Module, batch: Tensor) -> tuple[Tensor, ...]:
    """The second batch is 1,000 times as sensitive as the pilot."""
    s, h = token_numbers(model, batch)
    return (s, h) if torch.equal(batch, tokens().chunk(2)[0]) else (1e3 * s, h)


@pytest.mark.parametrize("function", [coarse, autocast, far])
def test_differences_that_are_no_derivatives_give_a_doubt(function: Any) -> None:
    model = build()
    before = [p.detach().clone() for p in model.parameters()]
    batches = list(tokens().chunk(2))
    found = derivatives_of(lambda b: function(model, b), model, random_direction(model), batches)
    assert "lost in rounding" in found.doubt
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_parameters_too_large_to_move_by_so_little_give_a_doubt() -> None:
    """Half of the effect comes from elements of 1e4. The other half needs steps that are too small to move them."""
    model = nn.ParameterList([torch.full((1000,), 1e4), torch.ones(1000)])

    def scaled(x: Tensor) -> tuple[Tensor, ...]:
        return (x * (model[0].sum() - 1e7 + 100.0 * model[1].sum()),)

    direction = {p: torch.ones_like(p) for p in model.parameters()}
    assert "too large to move by so little" in derivatives_of(scaled, model, direction, [torch.ones(2)]).doubt


def test_a_policy_that_is_certain_has_derivatives_of_zero() -> None:
    """Its log-probabilities are 0 to the last bits, and only these bits move."""
    model, wide = build(), build().double()

    def certain(of: nn.Module) -> Function:
        def numbers(batch: Tensor) -> tuple[Tensor, ...]:
            log_p = (3000.0 * of(batch)).log_softmax(-1)
            return log_p.amax(-1), -(log_p.exp() * log_p).sum(-1)

        return numbers

    batches = list(tokens().chunk(2))
    expected = joined(derivatives_of(certain(wide), wide, random_direction(wide), batches))
    derivatives = derivatives_of(certain(model), model, random_direction(model), batches)
    assert derivatives.doubt == ""
    sure = expected.abs() < 1e-6 * expected.abs().max()
    assert sure.float().mean() > 0.2
    assert float(joined(derivatives)[sure].abs().max()) < 1e-2 * float(expected.abs().max())


def _wrapped(how: str) -> Tensor:
    if how == "FSDP2":
        from torch.distributed.tensor import distribute_tensor

        cut = fsdp()
        model, direction = cut.keep, {}
        for name, whole in zip(cut.parameters, random_direction(build()).values(), strict=True):
            p = cut.parameters[name]
            direction[p] = distribute_tensor(whole, p.device_mesh, p.placements)  # type: ignore[attr-defined]
    else:
        model = DistributedDataParallel(build())
        direction = random_direction(model.module)
    return joined(along(model, direction))


@pytest.mark.parametrize("how", ["DDP", "FSDP2"])
def test_wrapped_models(ranks2: Ranks, how: str) -> None:
    model = build().double()
    direction = {p: d.double() for p, d in zip(model.parameters(), random_direction(build()).values(), strict=True)}
    expected = exact(model, direction)
    for derivatives in ranks2(_wrapped, how):
        assert float((derivatives - expected).norm() / expected.norm()) < 2e-3
