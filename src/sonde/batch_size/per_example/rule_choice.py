"""Which rule a layer has: one for its type, the user's before sonde's, or one for a layer of transformers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from sonde.batch_size.per_example import attention, convolution
from sonde.batch_size.per_example.rules import RULES, GradientsOf, LayerRule, own_rule
from sonde.batch_size.per_example.transformers_layers import transformers_rule


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
    return transformers_rule(layer)
