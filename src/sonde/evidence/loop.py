"""Branches of a training from one checkpoint, in a loop of the user's own: the critical batch size, measured directly.

The story, from top to bottom: `branch` checks what it was given and keeps the state; `_Branching.run` goes from branch
to branch; `_Branching._trained` trains one; what it has changed is given back, and the next one starts.
"""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sonde.batch_size.step_watch import is_followed
from sonde.console import stack_level, tell
from sonde.evidence.branches import Branch, Branches, Proxy
from sonde.evidence.kept_state import KeptState
from sonde.evidence.rates import RateRule, held_rates, largest_rate, options_at, rate_factor, rule_in_words, usual_rule
from sonde.evidence.stats.loss_curves import Curve
from sonde.parallel.model_state import preserve_modes_and_randomness
from sonde.parallel.process_groups import gather_objects
from sonde.record_values import whole_number
from sonde.wording import duration, number

OnBranch = Callable[[Branches], object]
_LOSS = "held-out loss"
_DECAYED = (0.5, 0.7, 1.0)
"""Parts of the units at whose end the rate has fallen to 0: the losses there make the curve of such a branch."""


def branch(
    train_step: Callable[[int], object],
    state: Mapping[str, Any],
    *,
    loss: Callable[[], float | Tensor],
    batches: Sequence[int],
    units: float,
    unit: str = "examples",
    reference: int | None = None,
    seeds: int = 3,
    seed: Callable[[int], object] | None = None,
    rate_rule: RateRule | None = None,
    decay: bool = False,
    tolerance: float = 0.2,
    evaluations: int = 16,
    proxies: Sequence[Proxy] = (),
    keep_on: torch.device | str | None = None,
    on_branch: OnBranch | None = None,
    verbose: bool = True,
) -> Branches:
    """Train short branches from here with several batch sizes, and see how many units each needs for the same loss.

    Every branch starts from the state as it is now, and trains on as many units. It is given back bit for bit after
    each branch, also after an error or Ctrl-C: weights, `.grad`, buffers, modes, `requires_grad`, all that `state`
    names, and the random generators of Python, numpy and torch. The training then goes on as if nothing had happened.

    The learning rate is held in each branch: that of now times what `rate_rule` gives for the batch. A schedule in
    `train_step` may step, but its rates are not used: it counts steps, and branches of a larger batch take fewer.

    One step with each batch size is taken first, to see that `train_step` heeds its argument and that seeds differ. The
    reference is trained twice for the first seed. A warning follows unless its losses are equal bit for bit. Then the
    state misses something, or kernels are not deterministic.

    With several ranks, all of them call this together. Each keeps its own part of the state.

    Args:
        train_step: `train_step(batch)` draws so many units, on all ranks together, and takes one optimizer step.
        state: all that a step changes, by name: modules, optimizers, schedules, a GradScaler, the position in the data.
            A value is a module, an optimizer, a `torch.Generator`, an object with `state_dict` and `load_state_dict`,
            or a pair of functions (save, load).
        loss: returns the loss on fixed held-out data, the same number on every rank. Random draws in it, and changes of
            train and evaluation mode, do not reach the training.
        batches: sizes in units of one optimizer step, two or more.
        units: that each branch trains on, or up to a step more.
        unit: plural name of the unit.
        reference: batch size that the others are compared with, and whose rate is that of now; by default the smallest.
        seeds: branches of each batch size. With one, the result has no interval.
        seed: `seed(k)` is called at the start of each branch with k = 0, 1, …, so that it draws other data for another
            k, and other data on other ranks. By default all global generators and those in `state` are seeded.
        rate_rule: "linear" (times batch / reference), "sqrt" (times its root), "adam" (likewise, with β and ε), "none",
            a multiple for each batch size, or a function of batch / reference. By default "linear" for SGD, else
            "sqrt".
        decay: let the rate fall to 0 in each branch, linearly, so that a larger rate leaves no more noise in its loss.
            Only the loss at the end counts then, so each branch is trained on 0.5, 0.7 and 1 of the units. Ratios above
            2 are only said to be about so large.
        tolerance: part of the units that a batch may need more and still be below the critical batch.
        evaluations: of the loss in each branch, besides the first; with `decay`, one at its end.
        proxies: noise scales that the report shows beside the measurement.
        keep_on: device of the copy of weights and optimizer state; by default where they are. "cpu" saves memory.
        on_branch: called after each branch with all branches so far, to save them.
        verbose: print a line after each branch on standard error, on the first rank.

    Returns:
        The branches. `critical` has the critical batch size with its interval, `ratios` the units of each batch.

    Raises:
        ValueError: for an argument out of its range; a step that does the same for two batch sizes or seeds, or changes
            no weight; a probe that is attached to the model; a loss that differs over ranks.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([3.0]))
        >>> optimizer = torch.optim.SGD([weight], lr=0.02)
        >>> def train_step(batch):
        ...     optimizer.zero_grad()
        ...     (weight - torch.randn(batch)).square().mean().backward()
        ...     optimizer.step()
        >>> model = torch.nn.ParameterList([weight])
        >>> found = branch(
        ...     train_step, {"model": model, "optimizer": optimizer}, loss=lambda: weight.square().item(),
        ...     batches=[4, 16], units=256, rate_rule="none", verbose=False,
        ... )
        >>> [round(ratio.ratio) for ratio in found.ratios], weight.item()
        ([4], 3.0)
    """
    batches = [*batches, *([] if reference is None else [reference])]
    _check_arguments(batches, units, seeds, evaluations, tolerance)
    first = min(batches) if reference is None else reference
    kept = KeptState(state, keep_on)
    rule = usual_rule(kept.optimizers) if rate_rule is None else rate_rule
    if not kept.optimizers and rule != "none":
        raise ValueError('state has no optimizer whose rate could follow the batch: add it, or pass rate_rule="none"')
    for batch, optimizer in itertools.product(batches, kept.optimizers):
        for group in optimizer.param_groups:
            options_at(group, rule, batch, first)
    if is_followed(kept.model.parameters()):
        raise ValueError(
            "a probe of sonde is attached to the model, and would take branches for the training: keep its state_dict, "
            "close it, and after the branches attach it again and load the state"
        )
    in_words = rule_in_words(rule, first) + (", falling to 0 in each branch" if decay else "")
    plan = Branches(unit, first, units, tolerance, in_words, (), tuple(proxies), _LOSS)
    branching = _Branching(train_step, loss, kept, plan, rule, seed or kept.seed, evaluations, decay)
    ordered = [first, *sorted({*batches} - {first})]
    is_first_rank = branching.ranks is None or branching.ranks.rank() == 0
    with kept.given_back():  # once more, in case Ctrl-C comes while a branch gives it back
        branching.check_step(ordered, seeds)
        return branching.run(ordered, seeds, on_branch, says=verbose and is_first_rank)


def _check_arguments(batches: Sequence[int], units: float, seeds: int, evaluations: int, tolerance: float) -> None:
    named = [("seeds", seeds), ("evaluations", evaluations), *(("each of batches", batch) for batch in batches)]
    for name, value in named:
        whole_number(f"{name} must be a whole number", value)
    if len(set(batches)) < 2:
        raise ValueError(f"batches must be two different sizes or more, got {list(batches)}: add a larger one")
    if not max(batches) <= units < math.inf:
        raise ValueError(
            f"units must be enough for a step of the largest batch, {max(batches)}, got {units}: pass at least a "
            "dozen times as many"
        )
    if not 0 < tolerance < math.inf:
        raise ValueError(f"tolerance must be positive, got {tolerance}: 0.2 allows a fifth more units")


def _all_ranks() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


@dataclass
class _Branching:
    """The branches of one call.

    Attributes:
        train_step: of the user.
        loss: of the user.
        kept: the state from which every branch starts.
        plan: the result, without branches.
        rule: how the rate follows the batch.
        seed: has the branch that begins draw its own data.
        evaluations: of the loss in each branch.
        decays: whether the rate falls to 0 in each branch.
        ranks: that work together; None for this process alone.
    """

    train_step: Callable[[int], object]
    loss: Callable[[], float | Tensor]
    kept: KeptState
    plan: Branches
    rule: RateRule
    seed: Callable[[int], object]
    evaluations: int
    decays: bool
    ranks: dist.ProcessGroup | None = field(default_factory=_all_ranks)

    def check_step(self, batches: Sequence[int], n_seeds: int) -> None:
        """See by single steps from the checkpoint, at its rate, that batches and seeds make a difference.

        Args:
            batches: the reference first.
            n_seeds: of each batch size.

        Raises:
            ValueError: if they make none.
        """
        moved = [self._moved(batch, 0) for batch in batches]
        if not any(itertools.chain.from_iterable(moved[0])):
            raise ValueError(
                "train_step changes no parameter of the modules in state: it must take one optimizer step, state must "
                "have the model, and the rate must not be 0, as it is when a warm-up begins"
            )
        for (one, by_one), (other, by_other) in itertools.combinations(zip(batches, moved, strict=True), 2):
            if by_one == by_other:
                raise ValueError(
                    f"train_step({one}) and train_step({other}) do exactly the same: let train_step draw as many units "
                    "as its argument says"
                )
        if n_seeds > 1 and self._moved(batches[0], 1) == moved[0]:
            raise ValueError(
                "another seed changes nothing in the first step: pass seed=, a function of k that has train_step draw "
                "other data for another k, or seeds=1"
            )

    def _moved(self, batch: int, seed: int) -> list[list[float]]:
        """How far one step moves each parameter, on each rank."""
        reference = int(self.plan.reference)
        with self.kept.given_back(), held_rates(self.kept.optimizers, self.rule, reference, reference):
            self.seed(seed)
            self.train_step(batch)
            return gather_objects(self.ranks, self.kept.moved)

    def run(self, batches: Sequence[int], n_seeds: int, on_branch: OnBranch | None, *, says: bool) -> Branches:
        """Train all branches: those of the reference first, then larger and larger batches.

        Args:
            batches: the reference first.
            n_seeds: of each batch size.
            on_branch: called after each branch.
            says: print a line after each branch.
        """
        order = [(batch, seed, 0) for batch in batches for seed in range(n_seeds)]
        order.insert(1, (batches[0], 0, 1))
        found, start, at_first = self.plan, time.perf_counter(), self._loss_now()
        for n, (batch, seed, n_before) in enumerate(order, start=1):
            found = replace(found, branches=(*found.branches, self._trained(batch, seed, n_before, at_first)))
            if says:
                left = duration((time.perf_counter() - start) / n * (len(order) - n))
                tell(f"{_in_words(found.branches[-1])} ({n} of {len(order)} branches, {left} left)")
            if n_before:
                _compare(*found.branches, unit=found.unit)
            if on_branch is not None:
                on_branch(found)
        return found

    def _trained(self, batch: int, seed: int, n_before: int, at_first: float) -> Branch:
        """One branch.

        Args:
            batch: units of each step.
            seed: of its data.
            n_before: branches that were alike.
            at_first: the loss before the first step.
        """
        curve = [(0, at_first)]
        n_steps = [math.ceil(part * self.plan.units / batch) for part in (_DECAYED if self.decays else (1.0,))]
        for n in sorted({*n_steps}):
            curve += self._losses(batch, seed, n)
            if not math.isfinite(curve[-1][1]):
                break
        rate = largest_rate(self.kept.optimizers)
        factor = rate_factor(self.rule, batch, int(self.plan.reference))
        return Branch(
            batch,
            seed,
            None if rate is None else rate * factor,
            Curve(tuple(float(n * batch) for n, _ in curve), tuple(loss for _, loss in curve)),
            copy=n_before,
        )

    def _losses(self, batch: int, seed: int, n_steps: int) -> list[tuple[int, float]]:
        """Steps and losses of one training from the checkpoint: of its end alone if the rate decays."""
        n_due = 1 if self.decays else self.evaluations
        due = {math.ceil(k * n_steps / n_due) for k in range(1, n_due + 1)}
        found: list[tuple[int, float]] = []
        reference = int(self.plan.reference)
        with self.kept.given_back(), held_rates(self.kept.optimizers, self.rule, batch, reference) as take:
            self.seed(seed)
            for n in range(1, n_steps + 1):
                if self.decays:
                    take(1 - (n - 1) / n_steps)
                self.train_step(batch)
                if n in due:
                    found.append((n, self._loss_now()))
                    if not math.isfinite(found[-1][1]):
                        break
        return found

    def _loss_now(self) -> float:
        with preserve_modes_and_randomness(self.kept.model):
            of_ranks = gather_objects(self.ranks, lambda: float(self.loss()))
        if len({*map(repr, of_ranks)}) > 1:
            raise ValueError(f"loss must return the same number on every rank, got {of_ranks}: average it over ranks")
        return of_ranks[0]


def _in_words(branch: Branch) -> str:
    again = ", again" if branch.copy else ""
    losses = branch.curve.losses
    end = number(losses[-1], 4) if math.isfinite(losses[-1]) else "not finite"
    return f"batch {branch.batch:g}, seed {branch.seed}{again}: {_LOSS} {number(losses[0], 4)} → {end}"


def _compare(one: Branch, again: Branch, *, unit: str) -> None:
    """Warn if the reference's first two branches, which are alike, have other losses."""
    pairs = list(zip(one.curve.losses, again.curve.losses, strict=False))
    differ = [k for k, (a, b) in enumerate(pairs) if repr(a) != repr(b)]
    if differ or len(one.curve.losses) != len(again.curve.losses):
        largest = max((abs(pairs[k][0] - pairs[k][1]) for k in differ), default=math.nan)
        warnings.warn(
            f"the reference was trained twice from the same state, and the losses differ by up to {number(largest)}, "
            f"from {number(one.curve.units[differ[0]] if differ else None)} {unit} on: state misses something that "
            "train_step changes, such as the position in the data, or kernels are not deterministic",
            stacklevel=stack_level(),
        )
