"""A measured model is copied and saved as if it were not measured; so is its optimizer."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

import sonde
from tests.batch_size.loops import batch, mean_loss, small_model

SAFE = [nn.Sequential, nn.Linear, nn.Tanh, nn.LayerNorm]
CALLS: list[int] = []


def of_the_user(module: nn.Module, args: Any, output: Any) -> None:
    CALLS.append(1)


def of_the_user_with_keywords(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    CALLS.append(2)


def saved(whole: Any) -> bytes:
    file = io.BytesIO()
    torch.save(whole, file)
    return file.getvalue()


def tables(model: nn.Module) -> list[Any]:
    hooks = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
    names = (*hooks, "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
    return [(type(vars(m)[name]), dict(vars(m)[name])) for m in model.modules() for name in names]


def measured(model: nn.Module, optimizer: torch.optim.Optimizer) -> sonde.NoiseScaleProbe:
    """A probe with all of its hooks, in the middle of a window."""
    probe = sonde.attach(
        model, optimizer, unit="rows", units_per_piece="first dim", per_example="always", every=1, verbose=False
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        mean_loss(model, *batch(4, generator)).backward()
        probe.step()
        optimizer.step()
        optimizer.zero_grad()
    mean_loss(model, *batch(4, generator)).backward()
    assert any(hooks for _, hooks in tables(model))
    return probe


def plain_twin(model: nn.Module) -> nn.Module:
    """A model with the same parameters and hooks of the user's, made without a copy."""
    twin = small_model()
    twin.load_state_dict(model.state_dict())
    return twin


@pytest.mark.parametrize("has_own_hooks", [False, True])
def test_a_measured_model_is_saved_as_it_is_without_a_probe(has_own_hooks: bool) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with measured(model, optimizer):
        twin = plain_twin(model)
        if has_own_hooks:
            for each in (model, twin):
                each[3].register_forward_hook(of_the_user)
                each[3].register_forward_hook(of_the_user_with_keywords, with_kwargs=True)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        assert b"sonde" not in saved(model)
        with torch.serialization.safe_globals([*SAFE, of_the_user, of_the_user_with_keywords]):
            copies.append(torch.load(io.BytesIO(saved(model)), weights_only=True))
        x = torch.ones(2, 12)
        expected = model(x)
        for copied in copies:
            own = [1, 2] if has_own_hooks else []
            CALLS.clear()
            assert torch.equal(copied(x), expected)
            assert own == CALLS
            assert [len(hooks) for _, hooks in tables(copied)] == [len(hooks) for _, hooks in tables(twin)]
            assert {kind for kind, _ in tables(copied)} == {kind for kind, _ in tables(twin)}


def test_a_measured_model_is_pickled_to_the_same_bytes() -> None:
    model = small_model()
    before = pickle.dumps(model)
    with sonde.attach(model, unit="rows", units_per_piece="first dim", per_example="always", verbose=False):
        assert pickle.dumps(model) == before


def test_other_ordered_dictionaries_are_copied_and_pickled_as_ever() -> None:
    model = small_model()
    table = model.state_dict()  # an OrderedDict with an attribute
    other: OrderedDict[str, Any] = OrderedDict(a=[1, 2], b=OrderedDict(c=3))
    before = pickle.dumps([other, dict(table)])
    with sonde.attach(model, unit="rows", units_per_piece="first dim", per_example="always", verbose=False):
        assert pickle.dumps([other, dict(table)]) == before
        again = copy.deepcopy(table)
        assert again._metadata == table._metadata  # type: ignore[attr-defined]
        assert list(again) == list(table)
        with torch.serialization.safe_globals([]):
            loaded = torch.load(io.BytesIO(saved(table)), weights_only=True)
        assert all(torch.equal(loaded[name], table[name]) for name in table)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_the_optimizer_of_a_measured_model_is_saved_without_hooks(kind: Any) -> None:
    model = small_model()
    optimizer = kind(model.parameters(), lr=0.1)
    with measured(model, optimizer):
        assert optimizer._optimizer_step_pre_hooks
        assert b"sonde" not in pickle.dumps(optimizer)
        for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            assert not vars(copied).get("_optimizer_step_pre_hooks")
            assert copied.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
