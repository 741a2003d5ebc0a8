"""The numbers of a record as experiment trackers take them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import cast

_READINGS = ("reading", "policy", "metrics")


def known_metrics(record: Mapping[str, object]) -> dict[str, float]:
    """The numbers of a record that are known, also each group's B_simple as `gns_by_group/NAME`.

    Names hold letters, digits, `_` and `/` only, which all trackers take.

    Args:
        record: any record; one without numbers gives none.
    """
    if record["kind"] not in _READINGS:
        return {}
    metrics = cast(Mapping[str, float | None], record["metrics"])
    groups = cast(Mapping[str, Mapping[str, float | None]], record.get("groups", {}))
    names = dict(zip(groups, _group_names(groups), strict=True))
    by_group = {f"gns_by_group/{names[name]}": group["b_simple"] for name, group in groups.items()}
    return {name: value for name, value in {**metrics, **by_group}.items() if value is not None}


def _group_names(groups: Mapping[str, object]) -> Iterator[str]:
    """Names of groups that all trackers take, each different: "layers.0" becomes "layers_0"."""
    taken: set[str] = set()
    for group in groups:
        name = plain = re.sub(r"[^A-Za-z0-9_/]+", "_", group) or "_"
        n = 1
        while name in taken:
            n += 1
            name = f"{plain}_{n}"
        taken.add(name)
        yield name
