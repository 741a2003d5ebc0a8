"""What `sonde branch` is asked for: the command and the folder of each run."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from sonde.decision.rate import WITH_BETAS, adam_settings, parsed_rule, rate_factor, rule_in_words, scaled_decay
from sonde.evidence.shell_losses import LossSource

ADAM = ("beta1", "beta2", "eps")
PLACEHOLDERS = ("checkpoint", "batch", "lr", "seed", "units", "steps", "out", *ADAM, "weight_decay")
"""Names in braces that a command may hold."""
AGAIN, LENGTHS = "again", ("steps", "units")
"""A second run of the same command; placeholders that say when a run ends."""
_LEAST_BELOW = 2
"""The smallest batch that has another one below it."""
_HARDLY = 1e-6
"""A rate times this moves no weight that a loss shows."""
_PLACEHOLDER = re.compile(r"(?<!\$)\{([A-Za-z_]\w*)\}")  # ${NAME} is the shell's


@dataclass(frozen=True)
class Asked:
    """One run that is to be trained: a branch, or the first one once more with something changed.

    Attributes:
        batch: units of one optimizer step.
        seed: of its data.
        units: that it trains on.
        settings: of the optimizer, by placeholder.
        command: with all placeholders filled in.
        folder: of this run, an absolute path. It differs between commands, checkpoints, units and sources of losses.
        changed: empty for a branch. Of a second run of the first branch, `AGAIN`. Of a twin, which is the first branch
            of a batch with one other value, the placeholder that has it.
        value: that it has.
        instead_of: the branch's value.
    """

    batch: float
    seed: int
    units: float
    settings: tuple[tuple[str, float], ...]
    command: tuple[str, ...]
    folder: Path
    changed: str = ""
    value: float | None = None
    instead_of: float | None = None

    @property
    def rate(self) -> float | None:
        """Learning rate; None where the script has its own."""
        return dict(self.settings).get("lr")

    @property
    def name(self) -> str:
        """For people."""
        if self.changed not in ("", AGAIN):
            return f"check of {{{self.changed}}} by {self.value:.4g}"
        return f"batch {self.batch:g}, seed {self.seed}" + (", second run" if self.changed else "")


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
        """What tells the checkpoint from another one in its place: times and sizes of its files."""
        path = None if (checkpoint := self.base.get("checkpoint")) is None else Path(checkpoint)
        files = [] if path is None else [path, *sorted(path.rglob("*"))]
        return [n for file in files for n in (file.stat().st_mtime_ns, file.stat().st_size)]

    def asked(self) -> list[Asked]:
        """Every run. After the first branch of a batch come its twins, which show what the script uses there.

        The first batch is the reference. The largest one follows, at which a limit in the script would show soon.
        """
        runs = list[Asked]()
        for batch in dict.fromkeys((self.reference, self.batches[-1], *self.batches)):
            sizes = [(seed, part * self.units) for seed in range(1, self.n_seeds + 1) for part in self.lengths]
            one, *others = (self._asked(batch, *size) for size in sizes)
            twins = (self._asked(batch, *sizes[0], *change) for change in self._changes(batch, sizes[0][1]))
            runs += [one, *twins, *others]
        return runs

    def _asked(self, batch: float, seed: int, units: float, changed: str = "", value: float | None = None) -> Asked:
        values = self._values(batch, units) | {"seed": seed}
        before = values.get(changed)
        if value is not None:
            values[changed] = value
        command = fill(self.command, values)
        content = json.dumps([command, units, astuple(self.source), self.start])
        digest = hashlib.sha256(content.encode()).hexdigest()[:10]
        folder = self.out.absolute() / f"batch-{_digits(batch)}-seed-{seed}{changed and f'-{changed}'}-{digest}"
        words = fill(command, {"out": folder})
        if changed in LENGTHS:
            units = values["steps"] * batch if changed == "steps" else values["units"]
        if changed == "batch":  # in as many steps
            units *= values["batch"] / batch
        settings = tuple((name, values[name]) for name in ("lr", *ADAM, "weight_decay") if name in values)
        return Asked(values["batch"], values["seed"], units, settings, words, folder, changed, value, before)

    def _changes(self, batch: float, units: float) -> list[tuple[str, float | None]]:
        """Other values of placeholders, so far away that no script which uses them has the same losses.

        Those at the reference show whether the script uses a placeholder at all. Those at the largest batch show
        whether it uses it so far up: where the script has a limit, values beyond it are the same. A batch a little
        below each one shows whether it is rounded; the script may refuse that.
        """
        now = dict.fromkeys(PLACEHOLDERS, 0.0) | {"lr": 0.01} | self._values(batch, units)
        half, others = self.batches[-1] / 2, list[tuple[str, float | None]]()
        of_optimizer = [
            ("beta1", now["beta1"] / 2 or 0.5),
            ("beta2", now["beta2"] / 2 or 0.5),
            ("eps", now["eps"] + 1),  # far above what an average of squared gradients comes to
            ("weight_decay", now["weight_decay"] + 0.1 / now["lr"]),  # a tenth of the weights with each step
        ]
        if batch == self.reference:
            others += [
                (AGAIN, None),
                ("batch", min(each for each in self.batches if each != batch)),
                *([("seed", 2)] if self.n_seeds == 1 else []),  # otherwise the second seed's branch shows it
                ("lr", _HARDLY * now["lr"]),
                ("units", units / 4),
                ("steps", math.ceil(now["steps"] / 4)),
                *of_optimizer,
            ]
        if batch == self.batches[-1]:  # half of it, where the script can take that as it takes the smallest
            lower = max(self.batches[-2], half if half % self.batches[0] == 0 else 0.0)
            others += [("lr", 2 * now["lr"]), *([("batch", lower)] if lower != self.reference else []), *of_optimizer]
        if batch >= _LEAST_BELOW:
            others += [("batch", below(batch))]
        used = {AGAIN, *used_placeholders(self.command)}
        return [change for change in dict.fromkeys(others) if change[0] in used]

    def _values(self, batch: float, units: float) -> dict[str, Any]:
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
        return values


def below(batch: float) -> float:
    """A little less than a batch, which a script may refuse: an eighth, since the losses of nearer ones may be equal.

    Example:
        >>> below(8), below(20), below(1024)
        (7, 18, 896)
    """
    return batch - max(round(batch / 8), 1)


def used_placeholders(command: Sequence[str]) -> set[str]:
    """Names in braces in a command."""
    return {name for word in command for name in _PLACEHOLDER.findall(word)}


def fill(command: Sequence[str], values: Mapping[str, object]) -> tuple[str, ...]:
    """A command with values for its placeholders. Placeholders without a value stay.

    Example:
        >>> fill(["--batch={batch}", "${HOME}", "{out}"], {"batch": 2.0**20, "HOME": 1})
        ('--batch=1048576', '${HOME}', '{out}')
    """
    words = {name: _digits(each) if isinstance(each, int | float) else str(each) for name, each in values.items()}
    return tuple(_PLACEHOLDER.sub(lambda found: words.get(found[1], found[0]), word) for word in command)


def check_names(command: Sequence[str], known: Sequence[str]) -> None:
    """Refuse a placeholder that nothing is known to fill in.

    Args:
        command: with placeholders.
        known: names that have values.

    Raises:
        ValueError: with the placeholder and what to do.
    """
    if unknown := sorted(used_placeholders(command) - set(known)):
        names = ", ".join(f"{{{name}}}" for name in known)
        raise ValueError(
            f"the command has the placeholder {{{unknown[0]}}}, which is none of {names}: give the script a value there"
        )


def _digits(value: float) -> str:
    """A number as scripts can read it: a whole one without an exponent, of however many digits."""
    whole = round(value)
    return str(whole) if math.isclose(value, whole, rel_tol=1e-9) else f"{value:.10g}"


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
    check_names(command, PLACEHOLDERS)
    used = used_placeholders(command)
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
