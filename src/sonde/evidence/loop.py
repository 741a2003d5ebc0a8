"""Branches of a training from one checkpoint, in a loop of the user's own: the critical batch size, measured directly.

The story, from top to bottom: `branch` checks what it was given and keeps the state; `_Branching.run` goes from branch
to branch; `_Branching._trained` trains one; what that has changed is given back, and the next one starts.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sonde.batch_size.step_watch import is_followed
from sonde.console import stack_level, tell
from sonde.decision.rate_rules import DECAYED, FALLING, WITH_DECAY
from sonde.evidence.answer import advice, headline
from sonde.evidence.branches import Branch, Branches, Proxy
from sonde.evidence.kept_state import KeptState
from sonde.evidence.rates import Options, RateRule, held, in_words, options_at, usual_rule_of
from sonde.evidence.stats.loss_curves import Curve
from sonde.parallel.model_state import preserve_modes_and_randomness
from sonde.parallel.process_groups import gather_objects
from sonde.record_values import whole_number
from sonde.wording import duration, number

OnBranch = Callable[[Branches], object]
_LOSS = "held-out loss"
_ATTACHED = (
    "a probe of sonde is attached to the model, and would take branches for the training: keep its state_dict, close "
    "it, and after the branches attach it again and load the state"
)
_NOT_THE_SAME = (
    "the reference was trained twice from the same state, with other losses: state misses something that train_step "
    "changes, such as the position in the data, or kernels are not deterministic"
)


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
    scale_weight_decay: bool = False,
    decay: bool = False,
    tolerance: float = 0.2,
    evaluations: int = 16,
    proxies: Sequence[Proxy] = (),
    keep_on: torch.device | str | None = None,
    on_branch: OnBranch | None = None,
    verbose: bool = True,
) -> Branches:
    """Train short branches from here with several batch sizes, and see how many units each needs for the same loss.

    Every branch starts from the state as it is now, and trains on the same number of units. The state is given back bit
    for bit after each branch, also after an error or Ctrl-C: weights, `.grad`, buffers, modes, `requires_grad`, all
    that `state` names, and the random generators of Python, numpy and torch. The training then goes on as if nothing
    had happened.

    The learning rate is held in each branch: that of now times what `rate_rule` gives for the batch. A schedule in
    `train_step` may step, but its rates are not used: it counts steps, and branches of a larger batch take fewer.

    One step with each batch size is taken first, to see that `train_step` heeds its argument and that seeds differ. The
    reference is trained twice for the first seed. If the losses differ in any bit, a warning says so: the state misses
    something, or kernels are not deterministic.

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
            k, and other data on other ranks. By default all global generators and those in `state` are seeded. Where
            a loader cannot be saved, let `train_step` draw from another one, which `seed` makes anew.
        rate_rule: "linear" (times batch / reference), "sqrt" (times its root), "adam" (likewise, with β and ε), "none",
            or a table of multiples by batch size. "sgd=120" is ∝ 1/(1 + 120/batch), with a noise scale of 120 units,
            and "sign=120" its root, for Muon and others whose steps have a fixed size. By default "linear" for SGD,
            else "sqrt".
        scale_weight_decay: let weight decay follow the batch and the rate, so that it acts as fast per unit.
        decay: let the rate fall to 0 in each branch, linearly, so that a larger rate leaves no more noise in its loss.
            Only the loss at the end counts then, so each branch is trained three times, on 0.5, 0.7 and 1 of the
            units. Ratios above 2 are rough.
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
    given = [*batches, *([] if reference is None else [reference])]
    rising = sorted({whole_number("batches must be whole numbers", batch) for batch in given})
    _check_arguments(rising, units, seeds, evaluations, tolerance)
    first = rising[0] if reference is None else int(reference)
    ordered = [first, *(batch for batch in rising if batch != first)]
    kept = KeptState(state, keep_on)
    rule = usual_rule_of(kept.optimizers) if rate_rule is None else rate_rule
    if not kept.optimizers and rule != "none":
        raise ValueError('state has no optimizer whose rate could follow the batch: add it, or pass rate_rule="none"')
    if is_followed(kept.model.parameters()):
        raise ValueError(_ATTACHED)
    options = {
        batch: {each: options_at(each, rule, batch, first, scale_decay=scale_weight_decay) for each in kept.optimizers}
        for batch in ordered
    }
    said = in_words(rule) + (WITH_DECAY if scale_weight_decay else "") + (FALLING if decay else "")
    plan = Branches(unit, first, units, tolerance, said, (), tuple(proxies), _LOSS)
    branching = _Branching(train_step, loss, kept, plan, options, seed or kept.seed, seeds, evaluations, decay)
    says = verbose and (branching.ranks is None or branching.ranks.rank() == 0)
    with kept.given_back():  # once more, in case Ctrl-C comes while a branch gives it back
        branching.check_step()
        found = branching.run(on_branch, says=says)
    if says:
        tell(f"{headline(found)} {advice(found)}")
    return found


def _check_arguments(batches: Sequence[int], units: float, seeds: int, evaluations: int, tolerance: float) -> None:
    whole_number("seeds must be a whole number", seeds)
    if whole_number("evaluations must be a whole number", evaluations) < 2:
        raise ValueError("evaluations must be 2 or more to compare curves, got 1: 16 are steadier")
    if len(batches) < 2:
        raise ValueError(f"batches must be two different sizes or more, got {batches}: add a larger one")
    if not 2 * max(batches) <= units < math.inf:
        raise ValueError(
            f"units must be enough for 2 steps of the largest batch, {max(batches)}, got {units}: pass at least a "
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
        options: of the optimizers at each batch size, the reference first.
        seed: has the branch that begins draw its own data.
        n_seeds: of each batch size.
        evaluations: of the loss in each branch.
        decays: whether the rate falls to 0 in each branch.
        ranks: that work together; None for this process alone.
    """

    train_step: Callable[[int], object]
    loss: Callable[[], float | Tensor]
    kept: KeptState
    plan: Branches
    options: Mapping[int, Mapping[torch.optim.Optimizer, Options]]
    seed: Callable[[int], object]
    n_seeds: int
    evaluations: int
    decays: bool
    ranks: dist.ProcessGroup | None = field(default_factory=_all_ranks)

    def check_step(self) -> None:
        """See by single steps from the checkpoint, at its rate, that batches and seeds make a difference.

        Raises:
            ValueError: if they make none.
        """
        reference, *_ = self.options
        done = {batch: self._step(batch, 0) for batch in self.options}
        if not any(has_moved for has_moved, _ in done[reference]):
            raise ValueError(
                "train_step changes no parameter of the modules in state: it must take one optimizer step, state must "
                "have the model, and the rate must not be 0, as it is when a warm-up begins"
            )
        for one, other in itertools.combinations(done, 2):
            if done[one] == done[other]:
                raise ValueError(
                    f"train_step({one}) and train_step({other}) do exactly the same: let train_step draw as many units "
                    "as its argument says"
                )
        if self.n_seeds > 1 and self._step(reference, 1) == done[reference]:
            raise ValueError(
                "another seed changes nothing in the first step: pass seed=, a function of k that has train_step draw "
                "other data for another k, or seeds=1"
            )

    def _step(self, batch: int, seed: int) -> list[tuple[bool, list[float]]]:
        """What one step changes, on each rank."""
        with self._begun(int(self.plan.reference), seed):
            self.train_step(batch)
            return gather_objects(self.ranks, self.kept.changes)

    @contextlib.contextmanager
    def _begun(self, batch: int, seed: int) -> Iterator[Callable[[float], None]]:
        """A training from the checkpoint, with the rate of a batch size; yields what takes a part of the rate."""
        with self.kept.given_back(), held(self.options[batch]) as take:
            self.seed(seed)
            yield take

    def run(self, on_branch: OnBranch | None, *, says: bool) -> Branches:
        """Train all branches: those of the reference first, then larger and larger batches.

        Args:
            on_branch: called after each branch.
            says: print a line after each branch.
        """
        order = [(batch, seed, 0) for batch in self.options for seed in range(self.n_seeds)]
        order.insert(1, (order[0][0], 0, 1))
        found, start, at_first = self.plan, time.perf_counter(), self._loss_now()
        for n, (batch, seed, copy) in enumerate(order, start=1):
            curve = self._curve(batch, seed, at_first)
            rate = max((float(each["lr"]) for group in self.options[batch].values() for each in group), default=None)
            latest = Branch(batch, seed, rate, curve, copy=copy)
            found = replace(found, branches=(*found.branches, latest))
            if says:
                losses = f"{number(at_first, 4)} → {number(curve.losses[-1], 4)}"
                n_left = len(order) - n
                left = f", {duration((time.perf_counter() - start) / n * n_left)} left" if n_left else ""
                tell(f"{latest.name}: {_LOSS} {losses} ({n} of {len(order)} branches{left})")
            if copy and repr(found.branches[0].curve) != repr(curve):  # by their texts: NaN is not equal to itself
                warnings.warn(_NOT_THE_SAME, stacklevel=stack_level())
            if on_branch is not None:
                on_branch(found)
        return found

    def _curve(self, batch: int, seed: int, at_first: float) -> Curve:
        """The loss of one branch: of all its evaluations or, if the rate decays, of the ends of several lengths."""
        points = {0: at_first}
        for part in DECAYED if self.decays else (1.0,):
            points |= self._trained(batch, seed, math.ceil(part * self.plan.units / batch))
        return Curve(tuple(float(n * batch) for n in points), tuple(points.values()))

    def _trained(self, batch: int, seed: int, n_steps: int) -> dict[int, float]:
        """Losses of one training from the checkpoint, by the number of steps. It ends at a loss that is not finite."""
        n_due = 1 if self.decays else self.evaluations
        due = {math.ceil(k * n_steps / n_due) for k in range(1, n_due + 1)}
        found: dict[int, float] = {}
        with self._begun(batch, seed) as take:
            for n in range(n_steps):
                if self.decays:
                    take(1 - n / n_steps)
                self.train_step(batch)
                if n + 1 in due:
                    found[n + 1] = self._loss_now()
                    if not math.isfinite(found[n + 1]):
                        break
        return found

    def _loss_now(self) -> float:
        with preserve_modes_and_randomness(self.kept.model):
            of_ranks = gather_objects(self.ranks, lambda: float(self.loss()))
        if len({*map(repr, of_ranks)}) > 1:
            raise ValueError(f"loss must return the same number on every rank, got {of_ranks}: average it over ranks")
        return of_ranks[0]
