"""Forecasts of the models that people train, beside the same models in float64."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from sonde.parallel.unwrap import unwrap_model
from sonde.policy.entropy_change import EntropyChangeProbe
from sonde.policy.entropy_measurement import Cost, EntropyMeasurement
from sonde.policy.entropy_options import EntropyChangeOptions
from sonde.policy.scoring.optimizer_step import Direction, forecast_step
from sonde.policy.scoring.rollouts import Rollouts
from sonde.policy.scoring.scorer import Scored, Scorer
from sonde.policy.scoring.token_statistics import CausalLMStatistics
from sonde.policy.stats.entropy_change import EntropyObjective
from sonde.policy.stats.importance import change_by_finite_step
from tests.ranks import Ranks, mesh_of

pytest.importorskip("peft", reason="needs transformers and peft: pip install '.[trl]' peft")

N_PROMPTS, EACH, N_TOKENS = 12, 4, 12
WITHIN, FIRST_ORDER_WITHIN = 1e-3, 0.02
"""Largest errors of δH and of the change to first order against float64, over their standard errors."""


@dataclass(frozen=True)
class Cell:
    """A model before its step.

    Attributes:
        parameters: their dtype; for adapters over a frozen base, the dtypes of both.
        attention: "eager", or "sdpa": torch's fused attention.
        arithmetic: "", or the dtype of autocast or of FSDP2's mixed precision.
        wrapper: "plain", "DDP" or "FSDP2".
    """

    parameters: str
    attention: str = "sdpa"
    arithmetic: str = ""
    wrapper: str = "plain"

    @property
    def name(self) -> str:
        """For the test."""
        return ", ".join(filter(None, vars(self).values()))


LORA = [Cell("bf16 base, fp32 LoRA"), Cell("bf16 base, bf16 LoRA")]
PLAIN = [
    Cell("fp32", "eager"),
    Cell("fp32"),
    Cell("fp32", arithmetic="bf16"),
    Cell("fp32", arithmetic="fp16"),
    Cell("bf16", "eager"),
    Cell("bf16"),
    *LORA,
]
ON_RANKS = [
    replace(cell, wrapper=wrapper) for wrapper in ("DDP", "FSDP2") for cell in PLAIN if cell.attention == "sdpa"
]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def llama(attention: str) -> Any:
    from tests.tiny_llama import tiny_llama

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = tiny_llama(attn_implementation=attention)
        with torch.no_grad():
            model.lm_head.weight.mul_(8.0)  # random weights alone give a uniform policy
    return model


def with_adapters(model: Any, dtype: torch.dtype) -> Any:
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        peft = get_peft_model(
            model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
        )
    for p in peft.parameters():
        if p.requires_grad:
            p.data = p.data.to(dtype)
    return peft


def model_of(cell: Cell) -> Any:
    model = llama(cell.attention)
    if cell.parameters.startswith("bf16 base"):
        return with_adapters(model.bfloat16(), torch.bfloat16 if "bf16 LoRA" in cell.parameters else torch.float32)
    return model.to(DTYPES[cell.parameters])


def wrapped(cell: Cell, model: Any) -> nn.Module:
    if cell.wrapper == "DDP":
        return DistributedDataParallel(model)
    if cell.wrapper == "FSDP2":
        mesh = mesh_of((2,))
        options: dict[str, Any] = {}
        if cell.arithmetic:
            policy = MixedPrecisionPolicy(param_dtype=DTYPES[cell.arithmetic], reduce_dtype=torch.float32)
            options["mp_policy"] = policy
        for layer in next(m for m in model.modules() if isinstance(m, nn.ModuleList)):
            fully_shard(layer, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
    return model  # type: ignore[no-any-return]


def responses(first: int, n: int = N_PROMPTS) -> Rollouts:
    """Random tokens do for arithmetic: no test here asks whether they are the policy's own."""
    generator = torch.Generator().manual_seed(first)
    ids = torch.randint(2, 48, (n * EACH, 4 + N_TOKENS), generator=generator)
    mask = torch.arange(N_TOKENS)[None] < torch.randint(4, N_TOKENS + 1, (n * EACH, 1), generator=generator)
    advantage = torch.randn(n * EACH, generator=generator)
    return Rollouts({"input_ids": ids}, mask, torch.arange(first, first + n).repeat_interleave(EACH), advantage)


def learn(cell: Cell, model: nn.Module, U: Rollouts) -> None:
    """A backward as the training has it, with autocast and a loss scale."""
    arithmetic = cell.arithmetic if cell.wrapper != "FSDP2" else ""
    with torch.autocast("cpu", DTYPES[arithmetic or "bf16"], enabled=bool(arithmetic)):
        s, _ = CausalLMStatistics()(model, U)
    (-(U.credit().to(s) * s).sum() / len(U)).backward()


def in_float64(cell: Cell, model: nn.Module) -> Any:
    """The same weights in a model of float64."""
    inner = unwrap_model(model)
    if not isinstance(inner, FSDPModule):
        return copy.deepcopy(inner).double()
    whole = model_of(cell).double()
    full = {name: p.full_tensor() for name, p in inner.state_dict().items()}
    whole.load_state_dict({name: t.double() for name, t in full.items()})
    return whole


def scored(model: Any, E: Rollouts) -> Scored:
    return Scorer(model.eval(), CausalLMStatistics(), 4, None).scored(E)


def exact_first_order(model: Any, E: Rollouts, step: dict[str, Tensor]) -> float:
    """The derivative along the step, in float64."""
    base = scored(model, E)
    scorer = Scorer(model, CausalLMStatistics(), 4, None)
    measurement = EntropyMeasurement(EntropyChangeOptions(), scorer, base, None, Cost())
    named = dict(model.named_parameters())
    direction: Direction = {named[name]: delta.double() for name, delta in step.items()}
    return float(measurement.along_step(direction).bars_dot)


def measured(cell: Cell, rank: int = 0, n_ranks: int = 1) -> dict[str, Any]:
    """A forecast around the real step, and the same numbers in float64."""
    model = wrapped(cell, model_of(cell))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.01)
    whole_E, U = responses(0), responses(100, 8)
    own = torch.arange(len(whole_E)) // EACH % n_ranks == rank
    E = whole_E.rows(own.nonzero()[:, 0])
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=cell.arithmetic == "fp16")
    for k in range(2):  # the first step gives the optimizer a state
        optimizer.zero_grad()
        learn(cell, model, U)
        if k == 0:
            optimizer.step()
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(scaler.get_scale())
    before = in_float64(cell, model)
    probe = EntropyChangeProbe(model, optimizer, EntropyChangeOptions(micro_batch_prompts=4))
    if scaler.is_enabled():  # as a loop under a GradScaler does before it clips
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
    step = forecast_step(optimizer)
    names = {p: name for name, p in unwrap_model(model).named_parameters()}
    whole_step = {names[p]: (d.full_tensor() if hasattr(d, "full_tensor") else d).clone() for p, d in step.items()}
    arithmetic = cell.arithmetic if cell.wrapper != "FSDP2" else ""
    # Also a loop that has autocast around everything is scored in 32 bits.
    with (
        torch.autocast("cpu", DTYPES[arithmetic or "bf16"], enabled=bool(arithmetic)),
        probe.around_step(E, causes=True) as around,
    ):
        scaler.step(optimizer) if scaler.is_enabled() else optimizer.step()
    after = in_float64(cell, model)
    base, now = scored(before, whole_E), scored(after, whole_E)
    exact = change_by_finite_step(base, now, EntropyObjective("per_token")).change
    forecast = around.forecast
    first_order = exact_first_order(before, whole_E, whole_step)
    return {
        "precision": forecast.precision,
        "off": abs(forecast.delta - exact.delta) / exact.se,
        "first_order_off": abs(forecast.first_order.delta - first_order) / forecast.first_order.se,
        "delta": forecast.delta,
    }


def check(found: dict[str, Any]) -> None:
    assert found["precision"] == "float32", found
    assert found["off"] < WITHIN, found
    assert found["first_order_off"] < FIRST_ORDER_WITHIN, found


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's own
@pytest.mark.parametrize("cell", PLAIN, ids=lambda cell: cell.name)
def test_a_forecast_agrees_with_float64(cell: Cell) -> None:
    check(measured(cell))


def on_rank(cell: Cell) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # peft's own
        return measured(cell, dist.get_rank(), 2)


@pytest.mark.parametrize("cell", ON_RANKS, ids=lambda cell: cell.name)
def test_a_forecast_on_ranks_agrees_with_float64(ranks2: Ranks, cell: Cell) -> None:
    first, second = ranks2(on_rank, cell)
    check(first)
    assert first["delta"] == second["delta"]
