"""One prompt, or one response to each prompt: the change is given, and what is not known has a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.policy.entropy_scene import Scene


def one_each(scene: Scene) -> Any:
    return scene.E.rows(torch.arange(0, len(scene.E), 4))


def test_one_evaluation_prompt_gives_the_change_without_an_error() -> None:
    scene = Scene()
    forecast = scene.probe().forecast(scene.E.rows(torch.arange(4)))
    assert forecast.delta is not None
    assert (forecast.se, forecast.low, forecast.n_evaluation) == (None, None, 1)
    assert "its standard error is not known: it needs at least 2 evaluation prompts, got 1" in forecast.reason


def test_one_update_prompt_gives_the_change_without_an_error() -> None:
    scene = Scene("sgd", lr=0.1)
    probe = scene.probe(update="gradient")
    forecast = probe.forecast(scene.E, scene.U.rows(torch.arange(4)))
    assert forecast.delta is not None
    assert (forecast.se, forecast.n_update) == (None, 1)
    assert "at least 2 prompts to evaluate and 2 to update on, got 24 and 1" in forecast.reason
    assert len(forecast.causes.prompts) == 1


@pytest.mark.parametrize(
    "options", [{}, *({"objective": "sequence", "sequence_weights": w} for w in ("one", "length", "longest"))]
)
def test_one_response_to_each_prompt_is_enough_for_a_finite_step(options: dict[str, Any]) -> None:
    scene = Scene()
    forecast = scene.probe(**options).forecast(one_each(scene))
    assert forecast.is_valid, forecast.reason
    assert forecast.low < forecast.delta < forecast.high
    assert forecast.n_evaluation == 24


def test_derivatives_need_two_responses_only_where_weights_depend_on_them() -> None:
    scene = Scene()
    assert scene.probe().forecast(one_each(scene), causes=True).first_order.se is not None
    with pytest.raises(ValueError, match="leave-one-out needs at least 2 responses to every prompt"):
        scene.probe(objective="sequence", sequence_weights="length").forecast(one_each(scene), causes=True)
