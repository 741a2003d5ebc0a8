"""The cost of a forecast of the entropy's change, beside a plain implementation with a backward for every prompt."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import math
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sonde
from sonde.policy.entropy_options import EntropyChangeOptions
from sonde.policy.scoring.token_statistics import CausalLMStatistics
from sonde.policy.stats.entropy_gradient import Responses, per_token_coefficients

PROMPT_TOKENS, RESPONSE_TOKENS, RESPONSES = 16, 48, 8
STATISTICS = CausalLMStatistics()
_LEARNING_RATE = 1e-4  # so small that first order and the finite step agree
_LOGIT_SCALE = 8.0  # with random weights the policy is uniform, and the gradient of its entropy is 0


@dataclass(frozen=True)
class Size:
    """The size of a policy and its batches.

    Attributes:
        width: size of the hidden states.
        layers: number of layers.
        vocabulary: number of tokens.
        prompts: number of evaluation prompts, and of prompts to learn from, each with 8 responses.
    """

    width: int = 256
    layers: int = 4
    vocabulary: int = 2048
    prompts: int = 16


TINY = Size(32, 1, 64, 4)


@dataclass(frozen=True)
class Scene:
    """A policy before an update by SGD. The step is η times the mean of the prompts' gradients.

    Attributes:
        model: a model of transformers.
        optimizer: the model's optimizer.
        evaluation: E.
        update: U, with advantages. Its mean gradient is in `.grad`, with the sign of a loss.
        probes: sonde's probes by their options.
    """

    model: nn.Module
    optimizer: torch.optim.SGD
    evaluation: sonde.Rollouts
    update: sonde.Rollouts
    probes: dict[str, sonde.EntropyChangeProbe] = field(default_factory=dict)


def scene(size: Size) -> Scene:
    """The same scene in each call."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=4 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=PROMPT_TOKENS + RESPONSE_TOKENS,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(_LOGIT_SCALE)
    evaluation, update = (_responses(model, size, first) for first in (0, size.prompts))
    optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)
    _gradient_of(model, update, slice(None)).div(-size.prompts).backward()
    return Scene(model, optimizer, evaluation, update)


@torch.no_grad()
def _responses(model: Any, size: Size, first: int) -> sonde.Rollouts:
    prompts = torch.randint(2, size.vocabulary, (size.prompts, PROMPT_TOKENS)).repeat_interleave(RESPONSES, 0)
    ids = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, max_new_tokens=RESPONSE_TOKENS
    )
    made = ids[:, PROMPT_TOKENS:]
    mask = torch.cat([torch.ones(len(ids), 1), (made == 1).cumsum(1)[:, :-1] == 0], 1).bool() & (made >= 0)
    mask[:, 1:] &= (made[:, :-1] == 1).cumsum(1) == 0
    attention = torch.cat([torch.ones_like(prompts).bool(), mask], 1)
    advantage = torch.randn(size.prompts, RESPONSES)
    advantage = (advantage - advantage.mean(1, keepdim=True)).flatten()
    numbers = first + torch.arange(size.prompts).repeat_interleave(RESPONSES)
    inputs = {"input_ids": torch.where(attention, ids, 0), "attention_mask": attention.long()}
    return sonde.Rollouts(inputs, mask, numbers, advantage=advantage)


def _gradient_of(model: nn.Module, rollouts: sonde.Rollouts, rows: slice | Tensor) -> Tensor:
    """The objective J of prompts: advantages times log-probabilities, a mean over each prompt's responses."""
    index = torch.arange(len(rollouts))[rows]
    some = rollouts.rows(index)
    s, _ = STATISTICS(model, some)
    return (some.credit().to(s) * torch.where(some.mask, s, 0.0)).sum() / RESPONSES


def by_backwards_along_the_step(made: Scene) -> tuple[float, float]:
    """δH and its variance, each evaluation prompt's gradient times the step: one backward a prompt."""
    rate = made.optimizer.param_groups[0]["lr"]
    step = {p: -rate * p.grad for p in made.model.parameters() if p.grad is not None}
    products = torch.tensor([_dot(x, step) for x in _entropy_gradients(made)], dtype=torch.float64)
    return float(products.mean()), float(products.var() / len(products))


def by_backwards_of_both(made: Scene) -> tuple[float, float]:
    """δH along η times the mean of the update prompts' gradients. Its variance is V_X + V_Y: both batches scatter.

    It takes two backwards for every update prompt and one for every evaluation prompt, and keeps no gradient.
    """
    rate, n = made.optimizer.param_groups[0]["lr"], made.evaluation.n_prompts
    y_mean = _mean(_update_gradients(made), n)
    x_mean: dict[Tensor, Tensor] = {}
    of_x = []
    for x in _entropy_gradients(made):
        of_x.append(_dot(x, y_mean))
        for p, g in x.items():
            x_mean[p] = x_mean[p].add_(g, alpha=1 / n) if p in x_mean else g / n
    of_y = [_dot(y, x_mean) for y in _update_gradients(made)]
    variances = [float(torch.tensor(of, dtype=torch.float64).var()) / n for of in (of_x, of_y)]
    return rate * sum(of_x) / n, rate**2 * sum(variances)


def _entropy_gradients(made: Scene) -> Any:
    """X_n, one evaluation prompt after the other."""
    e, model = made.evaluation, made.model
    with torch.no_grad():
        parts = [STATISTICS(model, e.rows(rows)) for rows in e.order(1)]
    s, h = (torch.cat(of).double() for of in zip(*parts, strict=True))
    coefficients = per_token_coefficients(h, Responses(e.mask, e.prompt))
    for rows in e.order(1):
        s, h = STATISTICS(model, e.rows(rows))
        on_s, on_h = coefficients.on_log_prob[rows].to(s), coefficients.on_entropy[rows].to(h)
        mask = e.mask[rows]
        yield _backward(model, (torch.where(mask, on_s * s, 0.0) + torch.where(mask, on_h * h, 0.0)).sum())


def _update_gradients(made: Scene) -> Any:
    """Y_p, one update prompt after the other."""
    for rows in made.update.order(1):
        yield _backward(made.model, _gradient_of(made.model, made.update, rows))


def _backward(model: nn.Module, objective: Tensor) -> dict[Tensor, Tensor]:
    parameters = list(model.parameters())
    return dict(zip(parameters, torch.autograd.grad(objective, parameters), strict=True))


def _mean(vectors: Any, n: int) -> dict[Tensor, Tensor]:
    total: dict[Tensor, Tensor] = {}
    for vector in vectors:
        for p, v in vector.items():
            total[p] = total[p].add_(v, alpha=1 / n) if p in total else v / n
    return total


def _dot(a: dict[Tensor, Tensor], b: dict[Tensor, Tensor]) -> float:
    return float(sum(torch.dot(a[p].flatten(), b[p].flatten()).double() for p in b))


def by_sonde(made: Scene, *, causes: bool = False, **options: Any) -> tuple[float, float, dict[str, float]]:
    """Sonde's forecast: δH, its variance, and the seconds of the phases.

    The variance along gradients is unbiased, and may be negative in a single batch.
    """
    key = repr(options)
    if key not in made.probes:  # a probe is made once in a training
        made.probes[key] = sonde.EntropyChangeProbe(
            made.model, made.optimizer, EntropyChangeOptions(**options), token_statistics=STATISTICS
        )
    found = made.probes[key].forecast(made.evaluation, made.update, causes=causes)
    if causes:
        return found.first_order.delta, found.first_order.se**2, dict(found.seconds)
    return found.delta, found.v_x + found.v_y, dict(found.seconds)


CONTESTANTS: dict[str, Callable[[Scene], Any]] = {
    "gradient, three backwards for every prompt": by_backwards_of_both,
    "step, a backward for every prompt": by_backwards_along_the_step,
    "sonde, update='gradient'": lambda made: by_sonde(made, update="gradient"),
    "sonde, the finite step, and causes by prompt": lambda made: by_sonde(made, causes=True),
    "sonde, the finite step": by_sonde,
}
OURS = "sonde, the finite step"


def costs(size: Size, rounds: int) -> dict[str, Any]:
    """Run the contestants in turn on the same batches, which are new in each round; squared errors are means.

    Sonde's score E before and after the step.
    """
    made = scene(size)
    seconds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    said: dict[str, list[dict[str, float]]] = {}
    phases: list[dict[str, float]] = []
    for k in range(rounds + 1):
        names = list(CONTESTANTS)
        if k:
            torch.manual_seed(k)
            E, U = (_responses(made.model, size, first) for first in (0, size.prompts))
            made = dataclasses.replace(made, evaluation=E, update=U)
            made.optimizer.zero_grad()
            _gradient_of(made.model, U, slice(None)).div(-size.prompts).backward()
        for name in names[k % len(names) :] + names[: k % len(names)]:
            start = time.perf_counter()
            delta, variance, *rest = CONTESTANTS[name](made)
            if k:  # the first warms up
                seconds[name].append(time.perf_counter() - start)
                said.setdefault(name, []).append({"delta": delta, "variance": variance})
                if name == OURS:
                    phases += rest
    return {
        "size": vars(size),
        "parameters": sum(p.numel() for p in made.model.parameters()),
        "seconds": seconds,
        "said": {
            name: {
                "delta": each[0]["delta"],
                "se": math.sqrt(max(math.fsum(of["variance"] for of in each) / len(each), 0.0)),
                "first_se": math.sqrt(max(each[0]["variance"], 0.0)),
            }
            for name, each in said.items()
        },
        "phases": phases,
    }


def peak_bytes(what: str, size: Size) -> int:
    """Growth of the process's peak memory, in a separate process; `.grad` exists before."""
    made = scene(size)
    rows = slice(0, 2 * RESPONSES)  # sonde's default micro-batch
    work: dict[str, Callable[[], object]] = {
        "training micro-batch": lambda: _gradient_of(made.model, made.update, rows).backward(),
        **{name: (lambda name=name: CONTESTANTS[name](made)) for name in CONTESTANTS},
    }
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the present memory
    before = _memory("VmRSS")
    work[what]()
    return _memory("VmHWM") - before


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def peaks(size: Size, names: Sequence[str] = tuple(CONTESTANTS), *, apart: bool = True) -> dict[str, int]:
    """Peak memory of contestants and of a training micro-batch, each in a separate process unless `apart` is False."""
    context = multiprocessing.get_context("forkserver")  # it has imported everything already
    context.set_forkserver_preload(["benchmarks.entropy_cost", "transformers.models.qwen2"])
    everything = ("training micro-batch", *names)
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1 if apart else None) as processes:
        return {what: processes.submit(peak_bytes, what, size).result() for what in everything}
