"""What `sonde branch` is asked for: the command and the folder of each branch."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sonde.decision.rate_rules import (
    WITH_BETAS,
    adam_settings,
    parsed_rule,
    rate_factor,
    rule_in_words,
    scaled_decay,
)
from sonde.evidence.shell_losses import LossSource

ADAM = ("beta1", "beta2", "eps")
PLACEHOLDERS = ("checkpoint", "batch", "lr", "seed", "units", "steps", "out", *ADAM, "weight_decay")
"""Names in braces that a command may hold."""
_PLACEHOLDER = re.compile(r"(?<!\$)\{([A-Za-z_]\w*)\}")  # ${NAME} is the shell's


@dataclass(frozen=True)
class Asked:
    """One branch that is to be trained.

    Attributes:
        batch: units of one optimizer step.
        seed: of its data.
        copy: 1 for the second run of the reference, otherwise 0.
        units: that it trains on.
        rate: learning rate; None where the script has its own.
        command: with all placeholders filled in.
        folder: of this branch, an absolute path. It differs between commands, checkpoints, units and sources of losses.
    """

    batch: float
    seed: int
    copy: int
    units: float
    rate: float | None
    command: tuple[str, ...]
    folder: Path


@dataclass(frozen=True)
class Plan:
    """All that is asked for.

    Attributes:
        command: with placeholders.
        batches: rising.
        reference: one of them.
        units: that each branch trains on.
        lengths: parts of the units; several where only last losses count, since the rate falls to 0 in each branch.
        n_seeds: seeds 1 to this number.
        source: of the losses.
        out: folder of all branches.
        rule: of the learning rate, in words.
        rates: of each batch; none if the script has its own.
        base: values of placeholders at the reference: checkpoint, beta1, beta2, eps, weight_decay.
    """

    command: tuple[str, ...]
    batches: tuple[float, ...]
    reference: float
    units: float
    lengths: tuple[float, ...]
    n_seeds: int
    source: LossSource
    out: Path
    rule: str
    rates: Mapping[float, float]
    base: Mapping[str, Any]

    @property
    def start(self) -> list[int]:
        """What tells the checkpoint as it is now from another one in its place."""
        return _state_of(self.base.get("checkpoint"))

    def asked(self) -> list[Asked]:
        """Every branch: those of the reference first, since the others are compared with them."""
        seeds = range(1, self.n_seeds + 1)
        others = [(batch, seed, 0) for batch in self.batches if batch != self.reference for seed in seeds]
        wanted = [*((self.reference, seed, 0) for seed in seeds), (self.reference, 1, 1), *others]
        return [self._asked(*each, part * self.units) for each in wanted for part in self.lengths]

    def _asked(self, batch: float, seed: int, copy: int, units: float) -> Asked:
        values = self._values(batch, units) | {"seed": str(seed)}
        command = [_filled(word, values) for word in self.command]
        content = json.dumps([command, units, self.source.content, self.start])
        digest = hashlib.sha256(content.encode()).hexdigest()[:10]
        folder = self.out.absolute() / f"batch-{_digits(batch)}-seed-{seed}{'-again' if copy else ''}-{digest}"
        words = tuple(_filled(word, {"out": str(folder)}) for word in command)
        return Asked(batch, seed, copy, units, self.rates.get(batch), words, folder)

    def _values(self, batch: float, units: float) -> dict[str, str]:
        """Values of placeholders, but for the seed and the folder."""
        kappa, values = batch / self.reference, dict(self.base)
        values |= {"batch": batch, "units": units, "steps": math.ceil(units / batch)}
        if self.rates:
            values["lr"] = self.rates[batch]
        if "beta1" in values:
            values |= adam_settings(kappa, **{name: values[name] for name in ADAM})
        if "weight_decay" in values:
            factor = self.rates[batch] / self.rates[self.reference] if self.rates else 1.0
            values["weight_decay"] = scaled_decay(values["weight_decay"], kappa, factor)
        return {name: value if isinstance(value, str) else _digits(value) for name, value in values.items()}


def used_placeholders(command: Sequence[str]) -> set[str]:
    """Names in braces in a command."""
    return {name for word in command for name in _PLACEHOLDER.findall(word)}


def _filled(word: str, values: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), word)


def _digits(value: float) -> str:
    """A number as scripts can read it: a whole one without an exponent, of however many digits."""
    whole = round(value)
    return str(whole) if math.isclose(value, whole, rel_tol=1e-9) else f"{value:.10g}"


def _state_of(checkpoint: str | None) -> list[int]:
    """What tells a checkpoint from another one in its place: times and sizes of its files."""
    path = Path(checkpoint or "")
    files = [] if checkpoint is None else [path, *sorted(path.rglob("*"))]
    return [n for file in files for n in (file.stat().st_mtime_ns, file.stat().st_size)]


def rates_of(
    batches: Sequence[float], reference: float, lr: float | None, rule: str | None, used: set[str]
) -> tuple[str, dict[float, float]]:
    """The rule of the learning rate in words, and the rate of each batch.

    Args:
        batches: all of them.
        reference: the batch that `lr` is of.
        lr: learning rate of the reference.
        rule: as of `rate_factor`, or a table as "16:1e-3,32:1.4e-3"; None for sqrt, if the command takes a rate.
        used: placeholders of the command.

    Raises:
        ValueError: for options that contradict each other, and for a table that lacks a batch.
    """
    if "lr" not in used:
        if lr is not None or rule is not None:
            raise ValueError(
                "--lr and --lr-rule need {lr} in the command, got none: write it where the script takes it"
            )
        return "the script's own learning rate", {}
    rule = rule or "sqrt"
    if ":" in rule:
        if lr is not None:
            raise ValueError("--lr-rule with a table has the rate of each batch, got --lr too: leave out --lr")
        return "learning rates from a table", _table(rule, batches)
    parsed_rule(rule, ", or a table of rates such as 16:1e-3,32:1.4e-3")
    words = rule_in_words(rule) + (WITH_BETAS if used.issuperset(ADAM) else "")
    if lr is None or not 0 < lr < math.inf:
        raise ValueError(f"{{lr}} needs a rate above 0, got {lr}: pass --lr, the learning rate of batch {reference:g}")
    return words, {batch: lr * rate_factor(rule, batch, reference) for batch in batches}


def _table(text: str, batches: Sequence[float]) -> dict[float, float]:
    try:
        table = {float(batch): float(rate) for batch, rate in (entry.split(":") for entry in text.split(","))}
        return {batch: table[batch] for batch in batches}
    except ValueError:
        raise ValueError(f"--lr-rule takes a table such as 16:1e-3,32:1.4e-3, got {text!r}: write BATCH:RATE") from None
    except KeyError as missing:
        raise ValueError(f"the table of --lr-rule has no rate for batch {missing.args[0]:g}: add it") from None


def check_command(command: Sequence[str], base: Mapping[str, Any], rule: str | None, n_seeds: int) -> None:
    """Refuse a command whose placeholders cannot be filled in.

    Args:
        command: with placeholders.
        base: values that are given.
        rule: of the learning rate, as given.
        n_seeds: branches of each batch.

    Raises:
        ValueError: with the placeholder and what to do.
    """
    used = used_placeholders(command)
    if unknown := sorted(used - set(PLACEHOLDERS)):
        known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
        raise ValueError(f"the command has the placeholder {{{unknown[0]}}}, which is none of {known}: rename it")
    for name in ("batch", "seed") if n_seeds > 1 else ("batch",):
        if name not in used:
            raise ValueError(f"the command has no {{{name}}}: write it where the script takes it, --{name} {{{name}}}")
    if used & set(ADAM) and (not used.issuperset({*ADAM, "lr"}) or rule not in ("sqrt", None)):
        raise ValueError(
            "{beta1}, {beta2}, {eps} are Adam's rule, with {lr} and --lr-rule sqrt: use all of them, or none"
        )
    for name in ("checkpoint", *ADAM, "weight_decay"):
        option = f"--{name.replace('_', '-')}"
        if name in used and name not in base:
            raise ValueError(f"the command has {{{name}}}, which has no value: pass {option}")
        if name in base and name not in used:
            raise ValueError(
                f"{option} is given, but the command has no {{{name}}}: write it where the script takes it"
            )
