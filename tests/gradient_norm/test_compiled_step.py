"""A step that torch.compile has compiled, with the clip in it: as without the compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import sonde

Step = Callable[[nn.Module, torch.optim.Optimizer], Tensor]


def clips(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    return sonde.clip_grad_norm_(model.parameters(), 0.1)


def clips_in_two_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    norm = sonde.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    sonde.clip_grads_with_norm_(model.parameters(), 0.1, norm)
    return norm


def clips_by_a_plan(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    return sonde.clip_grad_norm_distributed_(sonde.group_parameters_for_norm(model), 0.1)


@pytest.fixture
def compiler() -> Iterator[Callable[..., Callable[..., Tensor]]]:
    torch._dynamo.reset()
    yield lambda function: torch.compile(function, backend="eager")
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # torch's own, as it compiles
@pytest.mark.shows("norm and clip", "torch.compile")
@pytest.mark.parametrize("clip", [clips, clips_in_two_steps, clips_by_a_plan])
def test_a_compiled_step_with_a_clip_is_the_step(compiler: Callable[..., Callable[..., Tensor]], clip: Step) -> None:
    def train(*, is_compiled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

        def update() -> Tensor:
            norm = clip(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            return norm

        step, norms = compiler(update) if is_compiled else update, []
        for k in range(3):
            model(torch.full((3, 4), 1.0 + k)).square().sum().backward()
            norms.append(step())
        return [*norms, *model.parameters()]

    for compiled, plain in zip(train(is_compiled=True), train(is_compiled=False), strict=True):
        assert torch.equal(compiled, plain)
