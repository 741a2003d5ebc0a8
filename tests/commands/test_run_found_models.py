"""Which module is the model of which optimizer."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import SGD

from sonde.commands.run_script.model_search import model_among_living, models_in, watch_calls


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 1)


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.frozen = inner, nn.Linear(3, 3).requires_grad_(False)


def test_an_optimizer_of_one_part_has_that_part_for_its_model() -> None:
    model = Two()
    head = SGD(model.head.parameters())
    (found,) = models_in(model, [head])
    assert found.model is model.head
    model.body.requires_grad_(False)
    (found,) = models_in(model, [head])
    assert found.model is model  # nothing else in it is trained


def test_parts_beside_a_trained_rest_have_models_of_their_own_unless_nested() -> None:
    both = nn.ModuleDict({"a": Two(), "b": Two(), "rest": nn.Linear(2, 2)})
    a, b = SGD(both["a"].parameters()), SGD(both["b"].parameters())
    assert [each.model for each in models_in(both, [a, b])] == [both["a"], both["b"]]
    inner = SGD([both["a"].body.weight])
    (found,) = models_in(both, [inner, a])
    assert (found.model, found.optimizers) == (both["a"], (inner, a))


def test_a_module_around_the_model_that_trains_nothing_else_is_what_is_called() -> None:
    inner = Two()
    called = Around(inner)
    optimizer = SGD(inner.parameters())
    assert [each.model for each in models_in(called, [optimizer])] == [called]
    assert model_among_living(optimizer) is called


def test_a_temperature_beside_the_model_is_left_out() -> None:
    model, temperature = nn.Linear(30, 30), nn.Parameter(torch.ones(()))
    assert [each.model for each in models_in(model, [SGD([*model.parameters(), temperature])])] == [model]
    half = nn.Parameter(torch.ones(900))
    optimizer = SGD([*model.parameters(), half])
    assert models_in(model, [optimizer]) == []
    assert model_among_living(optimizer) is None


def test_the_first_calls_are_seen_and_torchs_own_code_comes_back() -> None:
    call, code = nn.Module.__call__, nn.Module.__call__.__code__
    seen: list[nn.Module] = []
    model = nn.Sequential(nn.Linear(2, 2))
    end = watch_calls(seen.append)
    try:
        expected = model(torch.ones(1, 2))
        assert nn.Module.__call__ is call  # torch's compiler compares its identity
        assert call.__code__.co_filename == code.co_filename  # it leaves code of this file alone
    finally:
        end()
    end()
    assert seen == [model, model[0]]
    assert call.__code__ is code
    assert torch.equal(model(torch.ones(1, 2)), expected)
    assert len(seen) == 2
