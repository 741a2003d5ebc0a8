"""What is measured and clipped is what the optimizer steps, however its parameters and the model's overlap."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from sonde import NoiseScaleProbe
from tests.batch_size import loops
from tests.batch_size.loops import batch, mean_loss, small_model
from tests.oracles import window_by_hand
from tests.ranks import Ranks, mesh_of


def attached(model: nn.Module, optimizer: Any = None, **options: Any) -> NoiseScaleProbe:
    return loops.attached(model, optimizer, **{"units_per_piece": 4} | options)


def adam(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-4)


def pieces(model: nn.Module, of: Sequence[Tensor], seed: int, n: int = 3) -> list[Tensor]:
    """The backwards of a window, and the gradient that each has added: [parameters], float64."""
    generator, added = torch.Generator().manual_seed(seed), []
    for _ in range(n):
        before = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in of]
        mean_loss(model, *batch(4, generator)).backward()
        added.append(torch.cat([(p.grad - b).double().flatten() for p, b in zip(of, before, strict=True)]))  # type: ignore[operator]
    return added


def train(
    model: nn.Module,
    probe: NoiseScaleProbe,
    optimizers: Sequence[Any],
    of: Sequence[Tensor],
    zero: Callable[[], object],
    windows: int = 24,
) -> None:
    """Windows whose tr Σ and |G|² must be those of some parameters."""
    for window in range(windows):
        added = pieces(model, of, window)
        probe.step()
        for optimizer in optimizers:
            optimizer.step()
        zero()
        solved = probe.window()
        assert solved is not None, probe.reading().dropped
        trace, grad_sq = window_by_hand(added, [1.0] * 3, [4.0] * 3, torch.stack(added).sum(0))
        # fp32 gradients, read as differences of sums here: a few 1e-6 of the larger numbers.
        assert solved.total.trace_cov == pytest.approx(trace, rel=1e-4)
        assert solved.total.grad_sq == pytest.approx(grad_sq, rel=1e-4, abs=1e-4 * trace)


class Wrapped:
    """An optimizer in a wrapper such as Accelerate's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self.optimizer.register_step_pre_hook(hook)


class ByHand:
    """A loop's own steps."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters = list(parameters)

    @torch.no_grad()
    def step(self) -> None:
        for p in self.parameters:
            p.sub_(p.grad, alpha=1e-4)  # type: ignore[arg-type]


def shared_out(model: nn.Sequential) -> list[Any]:
    return [torch.optim.SGD(model[:2].parameters(), lr=1e-3), adam(model[2:].parameters())]


def of_head(model: nn.Sequential) -> list[Any]:
    return [adam(model[3:].parameters())]


def at_rate_0(model: nn.Sequential) -> list[Any]:
    """A group that rests, and a parameter with two names."""
    model[4].tied = model[4].weight
    return [adam([{"params": list(model[:3].parameters()), "lr": 0.0}, {"params": list(model[3:].parameters())}])]


@dataclass(frozen=True)
class Case:
    """Which optimizers a loop has.

    Attributes:
        steps: those that step.
        given: of them, those that attach is given.
        measured: the part of the model whose noise scale is measured.
        idle: further ones, made before attach or after it, which never step.
        said: alerts.
    """

    steps: Callable[[nn.Sequential], list[Any]]
    given: Callable[[list[Any], nn.Sequential], Any] = lambda steps, model: steps
    measured: Callable[[Any], nn.Module] = lambda model: model
    idle: Callable[[nn.Sequential], list[Any]] = lambda model: []
    said: dict[str, tuple[str, ...]] = field(default_factory=dict)


def head(model: Any) -> nn.Module:
    return model[3:]  # type: ignore[no-any-return]


ANOTHER = "attach again, with all optimizers that step the model: optimizer=(first, second)"
CASES = {
    "the head's": Case(of_head, measured=head),
    "two that share the model out": Case(shared_out),
    "turned round": Case(shared_out, lambda steps, model: steps[::-1]),
    "wrapped": Case(shared_out, lambda steps, model: tuple(map(Wrapped, steps))),
    "the head's, wrapped": Case(of_head, lambda steps, model: Wrapped(steps[0]), head),
    "one of another model": Case(
        shared_out, lambda steps, model: adam(small_model().parameters()), said={"optimizer_replaced": ()}
    ),
    "the first of two": Case(
        shared_out,
        lambda steps, model: steps[0],
        lambda model: model[:2],
        said={"not_watched": ("an optimizer steps 6 parameters that no given one held at attach", ANOTHER)},
    ),
    "the second of two": Case(
        shared_out,
        lambda steps, model: steps[1],
        lambda model: model[2:],
        said={"not_watched": ("an optimizer steps 2 parameters that no given one held at attach", ANOTHER)},
    ),
    # One of an earlier stage of training, or of a later one, when the trunk is to be unfrozen.
    "one of the rest that never steps": Case(of_head, measured=head, idle=lambda model: [adam(model[:3].parameters())]),
    "one of all that never steps": Case(of_head, measured=head, idle=lambda model: [adam(model.parameters())]),
    "a given one that never steps": Case(
        lambda model: shared_out(model)[:1],
        lambda steps, model: [*steps, adam(model[2:].parameters())],
        said={"not_stepped": ("6 measured parameters (2.weight",)},
    ),
    "none given, a part is stepped": Case(
        of_head, lambda steps, model: None, said={"not_stepped": ("4 measured parameters (0.weight",)}
    ),
    "none given, the rest is stepped by hand": Case(
        lambda model: [*of_head(model), ByHand(model[:3].parameters())], lambda steps, model: None
    ),
    "a rate of 0, and tied parameters": Case(at_rate_0),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_measured_is_what_the_optimizers_step(name: str) -> None:
    """Where only the optimizer zeroes its own gradients, those of the trunk add up for ever."""
    case, model = CASES[name], small_model()
    optimizers = case.steps(model)
    before, zero = case.idle(model), optimizers[0].zero_grad if name == "the head's" else model.zero_grad
    with attached(model, case.given(optimizers, model), log_every=1) as probe:
        after = case.idle(model)
        train(model, probe, optimizers, list(case.measured(model).parameters()), zero)
        assert len(before) == len(after)  # they are alive
        assert probe.alerts.keys() == case.said.keys()
        for kind, words in case.said.items():
            assert all(each in probe.alerts[kind] for each in words)


def test_attach_says_what_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    model = small_model()
    with attached(model, adam(model[3:].parameters()), verbose=True) as probe:
        said = capsys.readouterr().err
        assert set(probe._tracker.groups) == {"3", "4"}
    assert "Adam, with 4 of 8 trainable parameters: only these are measured" in said
    assert "0.weight" in said
    assert "plain, 26,243 trainable parameters" in said
    attached(model, shared_out(model), verbose=True).close()
    assert "Adam and SGD\n" in capsys.readouterr().err


@pytest.mark.parametrize("joins", ["a group", "an optimizer"])
def test_parameters_that_are_stepped_later_are_named(joins: str) -> None:
    """The noise scale is still that of the others."""
    model = small_model()
    optimizers, of_probe = of_head(model), list(model[3:].parameters())
    with attached(model, optimizers[0], log_every=1) as probe:
        train(model, probe, optimizers, of_probe, model.zero_grad, windows=3)
        assert probe.alerts == {}
        if joins == "a group":
            optimizers[0].add_param_group({"params": list(model[:3].parameters())})
        else:
            optimizers.append(adam(model[:3].parameters()))
        train(model, probe, optimizers, of_probe, model.zero_grad, windows=3)
        assert "steps 4 parameters that no given one held at attach" in probe.alerts["not_watched"]


def test_single_examples_of_a_head_alone() -> None:
    model = small_model()
    own = list(model[3:].parameters())
    x, y = batch(12, torch.Generator().manual_seed(0))
    rows = [torch.autograd.grad(mean_loss(model, *row), own) for row in zip(x.split(1), y.split(1), strict=True)]
    grads = [torch.cat([g.double().flatten() for g in row]) for row in rows]
    expected = window_by_hand(grads, [1.0] * 12, [1.0] * 12, torch.stack(grads).mean(0))
    with attached(model, adam(own), units_per_piece="first dim", per_example="always") as probe:
        mean_loss(model, x, y).backward()
        probe.step()
        reading = probe.reading()
        assert (reading.trace_cov, reading.grad_sq) == pytest.approx(expected, rel=1e-4)
        assert probe.alerts == {}


# The clip.


def with_temperature(model: nn.Module) -> tuple[nn.Parameter, Callable[[Tensor], Tensor]]:
    """A parameter of the loss, which only the optimizer knows besides."""
    temperature = nn.Parameter(torch.tensor([1.5]))
    return temperature, lambda loss: loss * temperature.exp().sum()


@pytest.mark.parametrize("every", [1, 3])
def test_a_clip_takes_all_that_the_optimizer_steps(every: int) -> None:
    """As torch's clip over the optimizer's parameters; the trunk's gradients, which add up, are none of them."""

    def clipped(ours: bool) -> tuple[list[Tensor], list[float]]:
        model = small_model()
        temperature, scaled = with_temperature(model)
        stepped = [*model[3:].parameters(), temperature]
        optimizer = torch.optim.SGD(stepped, lr=0.01)
        probe = attached(model, optimizer, every=every) if ours else None
        norms = []
        for window in range(7):
            for seed in (0, 1):
                loss = mean_loss(model, *batch(4, torch.Generator().manual_seed(2 * window + seed)))
                scaled(loss).backward()
            clip = torch.nn.utils.clip_grad_norm_(stepped, 0.5) if probe is None else probe.clip_grad_norm_(0.5)
            norms.append(float(clip))
            optimizer.step()
            optimizer.zero_grad()
        if probe is not None:
            assert probe.reading().windows > 1, probe.reading().dropped
            assert probe.alerts == {}
            probe.close()
        return [p.detach().clone() for p in (*model.parameters(), temperature)], norms

    ours, norms = clipped(True)
    theirs, expected = clipped(False)
    # Norms are summed in fp64 here and in fp32 there.
    assert norms == pytest.approx(expected, rel=1e-6)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, rtol=1e-5, atol=1e-7)


def clip_on_rank(how: str) -> dict[str, Any]:
    """A clip of a model on several ranks, with a parameter that only the optimizer holds."""
    torch.manual_seed(0)
    plain = small_model()
    temperature, scaled = with_temperature(plain)
    model: nn.Module = plain
    if how == "FSDP2":
        mesh = mesh_of((dist.get_world_size(),))
        fully_shard(plain, mesh=mesh)
    else:
        model = DistributedDataParallel(plain)
    twin = small_model()
    if how == "ZeRO":
        from torch.distributed.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer

        optimizer: Any = ZeroRedundancyOptimizer([*model.parameters(), temperature], torch.optim.SGD, lr=0.01)
    else:
        optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.01)
    probe = attached(model, optimizer, every=1)
    x, y = batch(4, torch.Generator().manual_seed(dist.get_rank()))
    scaled(mean_loss(model, x, y)).backward()
    twin_temperature = nn.Parameter(temperature.detach().clone())
    (mean_loss(twin, x, y) * twin_temperature.exp().sum()).backward()
    for p in (*twin.parameters(), twin_temperature, temperature):
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
        p.grad /= dist.get_world_size()  # type: ignore[operator]
    expected = torch.nn.utils.clip_grad_norm_([*twin.parameters(), twin_temperature], 0.5)
    norm = probe.clip_grad_norm_(0.5)
    found = {
        "norm": float(norm),
        "expected": float(expected),
        "temperature": float(temperature.grad) / float(twin_temperature.grad),  # type: ignore[arg-type]
        "alerts": dict(probe.alerts),
    }
    probe.close()
    return found


@pytest.mark.parametrize("how", ["DDP", "ZeRO", "FSDP2"])
def test_a_clip_on_ranks_takes_what_the_optimizer_alone_holds(ranks2: Ranks, how: str) -> None:
    for found in ranks2(clip_on_rank, how):
        # fp32 gradients that gloo has averaged.
        assert found["norm"] == pytest.approx(found["expected"], rel=1e-5)
        assert found["temperature"] == pytest.approx(1.0, rel=1e-5)
        assert found["alerts"] == {}
