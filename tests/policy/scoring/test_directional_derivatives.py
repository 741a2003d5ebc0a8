"""Derivatives along a direction beside Jacobians and each other."""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

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


def along(model: nn.Module, direction: dict[Tensor, Tensor], mode: Any, n_batches: int = 2) -> Derivatives:
    batches = list(tokens().chunk(n_batches))
    return derivatives_along(lambda b: token_numbers(model, b), model, direction, batches, mode=mode)


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


@pytest.mark.parametrize(
    ("mode", "dtype", "off"),
    [
        ("forward", torch.float64, 1e-12),
        ("forward", torch.float32, 1e-5),
        ("central", torch.float64, 1e-7),
        ("central", torch.float32, 2e-3),
    ],
)
@pytest.mark.parametrize("size", [1e-6, 1.0])
def test_both_modes_give_the_jacobian_times_the_direction(
    mode: str, dtype: torch.dtype, off: float, size: float
) -> None:
    model = build().to(dtype)
    direction = random_direction(model, size)
    expected = exact(model, direction)
    before = [p.detach().clone() for p in model.parameters()]
    derivatives = along(model, direction, mode)
    assert (derivatives.mode, derivatives.why) == (mode, "" if mode == "forward" else "asked for")
    assert float((joined(derivatives) - expected).norm() / expected.norm()) < off
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_differences_are_smaller_for_a_more_sensitive_model(dtype: torch.dtype) -> None:
    """A parameter of huge norm and little effect: a step by its norm would move the others beyond the linear range."""
    model = build().to(dtype)
    with torch.no_grad():
        model.front.embed.weight[VOCABULARY:] = 1e4  # rows that no token uses
    direction = random_direction(model)
    expected = exact(model, direction)
    before = [p.detach().clone() for p in model.parameters()]
    derivatives = joined(along(model, direction, "central"))
    assert float((derivatives - expected).norm() / expected.norm()) < 5e-3
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_coarsely_rounded_outputs_give_a_doubt() -> None:
    model = build()
    direction = random_direction(model)
    before = [p.detach().clone() for p in model.parameters()]

    def coarse(batch: Tensor) -> tuple[Tensor, ...]:
        return tuple((out * 64).round() / 64 for out in token_numbers(model, batch))

    derivatives = derivatives_along(coarse, model, direction, list(tokens().chunk(2)), mode="central")
    assert "lost in rounding" in derivatives.doubt
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_a_policy_that_is_certain_has_derivatives_of_zero() -> None:
    """Its log-probabilities are 0 to the last bits, and only these bits move."""
    model = build()

    def certain(batch: Tensor) -> tuple[Tensor, ...]:
        log_p = (3000.0 * model(batch)).log_softmax(-1)
        return log_p.amax(-1), -(log_p.exp() * log_p).sum(-1)

    batches = list(tokens().chunk(2))
    expected = joined(derivatives_along(certain, model, random_direction(model), batches, mode="forward"))
    derivatives = derivatives_along(certain, model, random_direction(model), batches, mode="central")
    assert derivatives.doubt == ""
    sure = expected.abs() < 1e-6 * expected.abs().max()
    assert sure.float().mean() > 0.2
    assert float(joined(derivatives)[sure].abs().max()) < 1e-2 * float(expected.abs().max())


def test_differences_under_autocast_give_a_doubt() -> None:
    """bf16 rounds log-probabilities to about 2 digits."""
    model = build()
    direction = random_direction(model)

    def autocast(batch: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            return token_numbers(model, batch)

    assert "without autocast" in derivatives_along(autocast, model, direction, [tokens()], mode="central").doubt


def test_the_direction_is_restored_approximately() -> None:
    model = build()
    direction = random_direction(model)
    before = [d.clone() for d in direction.values()]
    along(model, direction, "central")
    for d, b in zip(direction.values(), before, strict=True):
        torch.testing.assert_close(d, b, rtol=1e-3, atol=1e-3)


class NoForwardMode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


def test_auto_falls_back_if_a_kernel_has_no_forward_mode_and_gives_the_reason() -> None:
    model = build().double()
    assert along(model, random_direction(model), "auto").mode == "forward"
    head = model.back.head
    model.back.head = nn.Sequential(head)  # type: ignore[assignment]
    model.back.register_forward_hook(lambda _m, _i, out: NoForwardMode.apply(out))
    derivatives = along(model, random_direction(model), "auto")
    assert derivatives.mode == "central"
    assert "forward mode" in derivatives.why or "forward AD" in derivatives.why or "jvp" in derivatives.why
    expected = exact(model, random_direction(model))
    assert float((joined(derivatives) - expected).norm() / expected.norm()) < 1e-7


@pytest.mark.parametrize("call", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", ["forward", "central"])
def test_parameters_are_restored_if_a_pass_fails(mode: str, call: int) -> None:
    model = build()
    before = copy.deepcopy(model.state_dict())
    held = list(model.parameters())
    calls = 0

    def fails(batch: Tensor) -> tuple[Tensor, ...]:
        nonlocal calls
        calls += 1
        if calls == call:
            raise KeyError
        return token_numbers(model, batch)

    def run() -> None:
        derivatives_along(fails, model, random_direction(model), list(tokens().chunk(2)), mode=mode)  # type: ignore[arg-type]

    if mode == "forward" and call > 2:
        run()
    else:
        with pytest.raises(KeyError):
            run()
    assert all(a is b for a, b in zip(model.parameters(), held, strict=True))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


class Failure(Exception):
    """Raised on purpose."""


class FailsOnce(TorchDispatchMode):
    """Raises at the n-th operation on a tensor of this shape: before it, or after it, as Ctrl-C does."""

    def __init__(self, shape: torch.Size, n: int, *, after: bool) -> None:
        super().__init__()
        self.shape, self.left, self.after = shape, n, after

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        counts = bool(args) and isinstance(args[0], Tensor) and args[0].shape == self.shape
        self.left -= counts
        fails = counts and self.left == 0
        if fails and not self.after:
            raise Failure
        result = func(*args, **(kwargs or {}))
        if fails:
            raise Failure
        return result


@pytest.mark.parametrize("after", [False, True])
def test_parameters_are_restored_whichever_operation_on_them_fails(after: bool) -> None:
    """Memory may be missing in any of them, also in those that bring the parameters back."""
    for n in itertools.count(1):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        before, direction = copy.deepcopy(model.state_dict()), random_direction(model)
        failing = FailsOnce(torch.Size((4, 4)), n, after=after)
        with contextlib.suppress(Failure), failing:
            derivatives_along(lambda x: (model(x),), model, direction, [torch.ones(3, 4)], mode="central")  # noqa: B023
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()), n
        if failing.left > 0:
            break
    assert n > 20


def test_an_error_that_is_not_about_forward_mode_is_not_hidden() -> None:
    model = build()

    def fails(_: Tensor) -> tuple[Tensor, ...]:
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        derivatives_along(fails, model, random_direction(model), [tokens()])


@pytest.mark.parametrize("shape", [(3, 2), (1,)])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_central_differences_of_sixteen_bits_are_refused(value: float, shape: tuple[int, ...]) -> None:
    """Whatever the narrow parameter holds, and however many elements it has."""
    model = nn.ParameterList([torch.ones(2), torch.full(shape, value, dtype=torch.bfloat16)])

    def outputs(_: Tensor) -> tuple[Tensor, ...]:
        return (torch.stack([p.float().sum() for p in model]),)

    with pytest.raises(ValueError, match=r"parameters of 32 bits or more, got torch.bfloat16"):
        derivatives_along(outputs, model, random_direction(model), [tokens()], mode="central")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_direction_that_cannot_store_the_parameters_is_refused(dtype: torch.dtype) -> None:
    model = build()
    before = [p.detach().clone() for p in model.parameters()]
    direction = {p: d.to(dtype) for p, d in random_direction(model).items()}
    with pytest.raises(ValueError, match=rf"must have their dtype, got {dtype} for torch.float32"):
        along(model, direction, "central")
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_tied_weights_move_together() -> None:
    model = build().double()
    model.front.embed = nn.Embedding(VOCABULARY, 8, dtype=torch.float64)
    model.back.head.weight = model.front.embed.weight
    direction = random_direction(model)
    expected = exact(model, direction)
    for mode in ("forward", "central"):
        derivatives = joined(along(model, dict(random_direction(model)), mode))
        assert float((derivatives - expected).norm() / expected.norm()) < 1e-7


def _wrapped(how: str) -> Tensor:
    if how == "FSDP2":
        cut = fsdp()
        model, direction = cut.keep, {}
        for name, whole in zip(cut.parameters, random_direction(build()).values(), strict=True):
            from torch.distributed.tensor import distribute_tensor

            p = cut.parameters[name]
            direction[p] = distribute_tensor(whole, p.device_mesh, p.placements)  # type: ignore[attr-defined]
    else:
        model = DistributedDataParallel(build())
        direction = random_direction(model.module)
    derivatives = derivatives_along(lambda b: token_numbers(model, b), model, direction, list(tokens().chunk(2)))
    assert derivatives.mode == ("central" if how == "FSDP2" else "forward"), derivatives.why
    assert dist.is_initialized()
    return joined(derivatives)


@pytest.mark.parametrize(("how", "off"), [("DDP", 1e-5), ("FSDP2", 2e-3)])
def test_wrapped_models(ranks2: Ranks, how: str, off: float) -> None:
    expected = _alone()
    for derivatives in ranks2(_wrapped, how):
        assert float((derivatives - expected).norm() / expected.norm()) < off


def _alone() -> Tensor:
    model = build().double()
    direction = {p: d.double() for p, d in zip(model.parameters(), random_direction(build()).values(), strict=True)}
    return exact(model, direction)


def test_parameters_too_large_to_move_by_so_little_give_a_doubt() -> None:
    """Half of the effect comes from elements of 1e4. The other half needs steps that are too small to move them."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.small = nn.Parameter(torch.full((1000,), 1e4)), nn.Parameter(torch.ones(1000))

        def forward(self, x: Tensor) -> Tensor:
            return x * (self.large.sum() - 1e7 + 100.0 * self.small.sum())

    model = Scaled()
    direction = {p: torch.ones_like(p) for p in model.parameters()}
    before = [p.detach().clone() for p in model.parameters()]
    derivatives = derivatives_along(lambda x: (model(x),), model, direction, [torch.ones(2)], mode="central")
    assert "too large to move by so little" in derivatives.doubt
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_outputs_unlike_the_pilots_give_a_doubt() -> None:
    model = build()
    direction = random_direction(model)
    batches = list(tokens().chunk(2))

    def far(batch: Tensor) -> tuple[Tensor, ...]:
        """The second batch is 1,000 times as sensitive."""
        s, h = token_numbers(model, batch)
        return (s, h) if batch is batches[0] else (1e3 * s, h)

    derivatives = derivatives_along(far, model, direction, batches, mode="central", pilot=batches[0])
    assert "by far too much" in derivatives.doubt


JIT = "`torch.jit.script` is {}. Please switch to `torch.compile` or `torch.export`."


@pytest.mark.parametrize(
    ("message", "category"),
    [
        (JIT.format("deprecated"), DeprecationWarning),  # up to torch 2.13
        (JIT.format("deprecated"), FutureWarning),  # from torch 2.14
        (JIT.format("not supported in Python 3.14+ and may break"), FutureWarning),
    ],
)
def test_only_the_warning_that_forward_mode_causes_is_passed_over(message: str, category: type[Warning]) -> None:
    model = nn.Linear(2, 1)

    def numbers(said: str) -> tuple[Tensor]:
        warnings.warn(said, category, stacklevel=2)
        return (model(torch.ones(1, 2)),)

    direction = random_direction(model)
    derivatives_along(numbers, model, direction, [message], mode="forward")
    with pytest.warns(category, match="another warning"):
        derivatives_along(numbers, model, direction, ["another warning"], mode="forward")
