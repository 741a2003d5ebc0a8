"""The groups of parameters that get a noise scale of their own."""

from __future__ import annotations

from typing import Literal

from sonde.parallel.parameter_roles import kinds_of
from sonde.parallel.stages import ModelParameters
from sonde.parallel.wrappers import GroupOf, block_of

Groups = Literal["blocks", "kinds", "parameters"] | GroupOf | None
"""How parameters are grouped; see `NoiseScaleOptions`."""

_MOST_LOGGED = 256
"""Groups that go to the log unless the user says so. A thousand of them are 100 kB with each reading."""


def check_groups(groups: object) -> None:
    """Refuse groups of another kind.

    Raises:
        ValueError: for anything but a known name, None or a function.
    """
    if not (groups in ("blocks", "kinds", "parameters") or groups is None or callable(groups)):
        raise ValueError(
            "groups must be 'blocks', 'kinds', 'parameters', None or a function from a parameter's name, got "
            f"{groups!r}: use 'blocks' for one group per top-level block"
        )


def group_names(groups: Groups, parameters: ModelParameters) -> list[str]:
    """The name of each parameter's group.

    Args:
        groups: how to group.
        parameters: of the whole model.

    Raises:
        ValueError: when a function returns anything but names.
    """
    if groups is None:
        return ["all" for _ in parameters.names]
    if groups == "blocks":
        return [block_of(name) for name in parameters.names]
    if groups == "kinds":
        return kinds_of(parameters.names, parameters.roles)
    if groups == "parameters":
        return list(parameters.names)
    assert callable(groups)
    names = [groups(name) for name in parameters.names]
    for parameter, name in zip(parameters.names, names, strict=True):
        if not isinstance(name, str):
            raise ValueError(
                f"groups must return a group's name, a str, for each parameter, got {name!r} for {parameter!r}: return "
                "one name for all parameters that belong nowhere else"
            )
    return names


def are_logged(groups: Groups, n_groups: int, log_groups: bool | None) -> bool:
    """Whether the groups' values go to the log.

    Args:
        groups: how parameters are grouped.
        n_groups: how many groups that made.
        log_groups: the user's choice; None for all but single parameters and long lists.
    """
    return log_groups if log_groups is not None else groups != "parameters" and n_groups <= _MOST_LOGGED
