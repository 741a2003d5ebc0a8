"""Two ranks of which one is given something else, or fails: both raise, and neither waits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sonde.policy.entropy_change import EntropyChangeProbe
from sonde.policy.entropy_options import EntropyChangeOptions
from sonde.policy.policy_entropy import PolicyEntropyProbe
from sonde.policy.prompt_noise import PromptNoiseProbe
from tests.ranks import Ranks
from tests.small_policy import STATISTICS, drawn, loss, optimizer_of, policy


def _scene() -> tuple[Any, Any, Any, Any]:
    model, rank = policy(), dist.get_rank()
    optimizer = optimizer_of(model)
    E, U = drawn(model, 8 * rank, 8, seed=1), drawn(model, 200 + 4 * rank, 4, seed=2)
    loss(model, U).backward()
    return DistributedDataParallel(model), optimizer, E, U


def _advantages_on_one() -> Any:
    model, _, _, U = _scene()
    given = U if dist.get_rank() == 0 else dataclasses.replace(U, advantage=None)
    return PolicyEntropyProbe(model).measure(given)


def _update_on_one() -> Any:
    model, optimizer, E, U = _scene()
    return EntropyChangeProbe(model, optimizer).forecast(E, U if dist.get_rank() == 0 else None, causes=True)


def _causes_on_one() -> Any:
    model, optimizer, E, U = _scene()
    return EntropyChangeProbe(model, optimizer).forecast(E, U, causes=dist.get_rank() == 0)


def _option_on_one() -> Any:
    model, optimizer, E, _ = _scene()
    options = EntropyChangeOptions(clip_at=2.0 if dist.get_rank() == 0 else None)
    return EntropyChangeProbe(model, optimizer, options).forecast(E)


def _log_prob_on_one() -> Any:
    model, optimizer, E, _ = _scene()
    with torch.no_grad():
        s, _ = STATISTICS(model.module, E)
    given = E if dist.get_rank() == 0 else dataclasses.replace(E, log_prob=s)
    return EntropyChangeProbe(model, optimizer).forecast(given)


def _no_gradient_on_one() -> Any:
    model, optimizer, E, _ = _scene()
    if dist.get_rank() == 1:
        optimizer.zero_grad()
    return EntropyChangeProbe(model, optimizer).forecast(E)


def _no_memory_on_one(name: str) -> Callable[[], Any]:
    """Something between two gatherings fails on rank 1."""

    def measured() -> Any:
        from sonde.policy import entropy_measurement, policy_step
        from sonde.policy.scoring import scorer

        model, optimizer, E, U = _scene()
        with pytest.MonkeyPatch.context() as patch:

            def fail(*args: Any, **options: Any) -> Any:
                raise MemoryError("no memory")

            if dist.get_rank() == 1:
                module = next(m for m in (policy_step, entropy_measurement, scorer) if hasattr(m, name))
                patch.setattr(module, name, fail)
            probe = EntropyChangeProbe(model, optimizer)
            with probe.around_step(E, U, causes=True) as around:
                optimizer.step()
            return around.forecast

    return measured


def _detached_on_one() -> Any:
    model, _, _, U = _scene()

    def statistics(scored: Any, rollouts: Any) -> Any:
        s, h = STATISTICS(scored, rollouts)
        return (s.detach() if dist.get_rank() == 1 else s), h

    return PromptNoiseProbe(model, token_statistics=statistics).measure(U)


def _inner_module() -> Any:
    """A trainer's callback may have it: on its own it would be measured on this rank's prompts alone."""
    model, _, _, U = _scene()
    return PromptNoiseProbe(model.module).measure(U)


MEASURES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "entropy": lambda model, _, own: PolicyEntropyProbe(model).measure(own),
    "noise scale in prompts": lambda model, _, own: PromptNoiseProbe(model).measure(own),
    "forecast": lambda model, optimizer, own: EntropyChangeProbe(model, optimizer).forecast(own),
    "sampler": lambda model, optimizer, own: EntropyChangeProbe(model, optimizer, sampler=lambda _: own).step(),
}
NO_RESPONSES = "a rank has no response, expected at least one on each rank"


def _no_responses_on_one(name: str) -> Callable[[], Any]:
    def measured() -> Any:
        model, optimizer, _, U = _scene()
        return MEASURES[name](model, optimizer, U.rows(torch.arange(len(U) if dist.get_rank() == 0 else 0)))

    return measured


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "advantages": (_advantages_on_one, "some ranks gave responses with advantages, and others without"),
    "update": (_update_on_one, "some ranks gave update=, and others did not"),
    "causes": (_causes_on_one, "some ranks gave causes=True, and others did not"),
    "options": (_option_on_one, "the ranks' probes have different options"),
    "log_prob": (_log_prob_on_one, "some ranks gave log_prob= of the evaluation responses, and others did not"),
    "gradient": (_no_gradient_on_one, "no parameter has a gradient"),
    "scores": (_no_memory_on_one("checked_scores"), "no memory"),
    "a watch": (_no_memory_on_one("_Sample"), "no memory"),
    "a truth": (_no_memory_on_one("fixed_prefix_change"), "no memory"),
    "derivatives": (_no_memory_on_one("derivatives_along"), "no memory"),
    **{f"no responses, {name}": (_no_responses_on_one(name), NO_RESPONSES) for name in MEASURES},
    "an inner module": (_inner_module, "the model is inside a DistributedDataParallel module"),
    "a graph": (_detached_on_one, "log-probabilities that no gradient can be taken of"),
}


def raised() -> dict[str, str]:
    """The error of this rank in each case, one after the other."""
    found = {}
    for name, (measure, _) in CASES.items():
        try:
            measure()
        except (ValueError, RuntimeError, MemoryError) as error:
            found[name] = str(error)
    return found


def test_both_ranks_raise_the_error_and_go_on(ranks2: Ranks) -> None:
    first, second = ranks2(raised)
    for name, (_, message) in CASES.items():
        assert message in first[name], name
        assert message in second[name], name


def test_no_responses_at_all_are_refused() -> None:
    model = policy()
    none = drawn(model, 0, 4, seed=1).rows(torch.arange(0))
    for measure in MEASURES.values():
        with pytest.raises(ValueError, match=NO_RESPONSES):
            measure(model, optimizer_of(model), none)
