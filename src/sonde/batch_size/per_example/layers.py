"""Which layers of a model are measured, by which rule, and which models cannot be measured."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from sonde.batch_size.module_hook import is_compiled
from sonde.batch_size.per_example import attention, convolution
from sonde.batch_size.per_example.rules import (
    BY_NAME,
    COUPLES_EXAMPLES,
    RULES,
    GradientsOf,
    LayerRule,
    couples_examples,
    own_rule,
)
from sonde.parallel.placements import is_dtensor


def rules_by_type(own: Mapping[type[nn.Module], GradientsOf]) -> dict[type[nn.Module], LayerRule]:
    """The rules of all types of layers that have one.

    Args:
        own: rules of the user, which replace those of sonde.
    """
    return {**RULES, **convolution.RULES, **attention.RULES, **{kind: own_rule(rule) for kind, rule in own.items()}}


def rule_of(layer: nn.Module, rules: dict[type[nn.Module], LayerRule]) -> LayerRule | None:
    """The rule of a layer's type, or of the type that it has its forward from; None without one.

    Args:
        layer: of any type.
        rules: the result of `rules_by_type`.
    """
    for kind in type(layer).__mro__:
        if kind in rules:
            return rules[kind] if type(layer).forward is kind.forward else None
    if type(layer).__module__.startswith("transformers."):
        held = {name for name, _ in layer.named_parameters()}
        for pattern, (names, rule) in BY_NAME.items():
            if fnmatch.fnmatchcase(type(layer).__name__, pattern) and held == names:
                return rule
    return None


def refuse_cut(parameters: Mapping[str, Tensor], leaves: Sequence[Tensor]) -> None:
    """Refuse parameters of which forward uses a part only.

    Args:
        parameters: what is measured, by name.
        leaves: the tensor that forward uses for each of them.

    Raises:
        ValueError: naming the first.
    """
    for name, leaf in zip(parameters, leaves, strict=True):
        if is_dtensor(leaf):
            raise ValueError(
                f"per-example norms need whole parameters in forward, and {name!r} is cut over ranks there: measure "
                "its pieces, as sonde.attach does"
            )


def refuse_model(model: nn.Module, *, batch_norms: bool) -> None:
    """Refuse a model whose layers are not called one by one, or couple the examples.

    Args:
        model: as it is trained.
        batch_norms: whether to refuse batch normalisation in train mode too.

    Raises:
        ValueError: naming the first layer.
    """
    for name, layer in model.named_modules():
        if getattr(vars(layer).get("forward"), "__module__", None) == "torch.cuda.graphs":
            raise ValueError(
                "per-example norms need the calls of single layers, and torch.cuda.make_graphed_callables replays "
                f"{name or 'the model'!r} as a whole: measure its pieces, as sonde.attach does with two or more in a "
                "window, or measure a model that is not graphed"
            )
        if is_compiled(layer):
            raise ValueError(
                f"per-example norms need the calls of single layers, and {name or 'the model'!r} is compiled: "
                "measure before torch.compile, or train without it in the measured windows"
            )
        if batch_norms and couples_examples(layer):
            raise ValueError(f"{name!r} ({type(layer).__name__}): {COUPLES_EXAMPLES}")
