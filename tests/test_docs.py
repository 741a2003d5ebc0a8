"""The pages of docs/ and beside it keep their word: names, links, metrics and keys exist."""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import sonde
from tests.docs_blocks import DOCS, PAGES

METRICS = {metric for name in sonde.__all__ for metric in getattr(getattr(sonde, name), "METRICS", ())}
"""Metrics that the public probes declare."""

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def exists(name: str) -> bool:
    """Whether a dotted name, `sonde.integrations.trl.attach`, can be imported."""
    parts = name.split(".")
    found: Any = sonde
    for k, part in enumerate(parts[1:], start=2):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join(parts[:k]))
            except ModuleNotFoundError:
                return False
        found = getattr(found, part)
    return True


@each_page
def test_names_of_sonde_exist(page: Path) -> None:
    """Each `sonde.name` in code or prose. Commands such as `sonde report runs/x` have no dot."""
    text = page.read_text()
    names = set(re.findall(r"(?<![\w/.])sonde(?:\.[A-Za-z_]\w*)+", text))
    for package in ("trl", "torchtitan"):
        if any(f"sonde.integrations.{package}" in name for name in names):
            pytest.importorskip(package, reason=f"the integration needs {package}")
    assert not [name for name in sorted(names) if not exists(name)]


def test_a_name_that_does_not_exist_is_found() -> None:
    assert exists("sonde.RunLog")
    assert exists("sonde.policy.log.PolicyLog")
    assert not exists("sonde.RunLogs")
    assert not exists("sonde.measure.partial")


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target, heading in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        if target.startswith("http"):
            continue
        linked = page.parent / target if target else page
        assert linked.exists(), f"{page.name} links to {target}"
        assert not heading or heading in headings(linked), f"{page.name} links to {target}#{heading}"


def headings(page: Path) -> set[str]:
    """Anchors as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@each_page
def test_files_named_exist(page: Path) -> None:
    """Paths of files in backticks, from the root of the repository."""
    for path in re.findall(r"`((?:src|tests|docs|benchmarks|examples)/[\w./-]+)`", page.read_text()):
        assert (DOCS.parent / path).exists(), f"{page.name} names {path}"


def test_every_picture_is_made_by_the_script() -> None:
    scripts = "".join(script.read_text() for script in (DOCS / "figures").glob("*.py"))
    assert {picture.name for picture in DOCS.glob("*.png")} == set(re.findall(r'"([\w-]+\.png)"', scripts))


@each_page
def test_metrics_named_exist(page: Path) -> None:
    """Metric names in backticks: `gns/b_simple`. The page of one's own probe declares its own."""
    own = set(re.findall(r'"(\w+/\w+)": sonde\.Metric', page.read_text()))
    assert metrics_named(page) <= METRICS | own


def metrics_named(page: Path) -> set[str]:
    """Metric names in backticks."""
    return set(re.findall(r"`((?:gns|gns_prompts|entropy|length|grad|update|cost|run)/\w+)`", page.read_text()))


# The reference of the configuration.


def tables() -> dict[str, dict[str, Any]]:
    """What the page says: the default of each key, by probe."""
    sections = re.findall(r"^## `(\w+)`\n(.*?)(?=^## |\Z)", (DOCS / "configuration.md").read_text(), flags=re.S | re.M)
    return {
        probe: {key: yaml.safe_load(default) for key, default in re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", text, re.M)}
        for probe, text in sections
    }


def test_every_option_is_on_its_page_with_its_default() -> None:
    kinds = sonde.NoiseScaleOptions, sonde.EntropyChangeOptions
    of_no_file = {"unit", "rules"}  # the first has no default, the second are functions
    defaults = {kind.__name__: {f.name: f.default for f in dataclasses.fields(kind)} for kind in kinds}
    assert tables() == {name: {k: v for k, v in of.items() if k not in of_no_file} for name, of in defaults.items()}
