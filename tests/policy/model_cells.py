"""The models that people train, cell by cell: what a forecast uses for each, and how exact it is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """A model before its step.

    Attributes:
        parameters: their dtype; for adapters over a frozen base, the dtypes of both.
        attention: "eager", or "sdpa": torch's fused attention.
        arithmetic: "", or the dtype of autocast or of FSDP2's mixed precision.
        wrapper: "plain", "DDP" or "FSDP2".
        scored_in: the precision that the forecast reports.
        derivatives: how "auto" takes derivatives.
        within: largest error of δH against float64, over the standard error.
        first_order_within: the same of the change to first order.
    """

    parameters: str
    attention: str
    arithmetic: str
    wrapper: str
    scored_in: str
    derivatives: str
    within: float
    first_order_within: float

    @property
    def name(self) -> str:
        """For the test."""
        parts = (self.parameters, self.attention, self.arithmetic and f"{self.arithmetic} arithmetic", self.wrapper)
        return ", ".join(filter(None, parts))


CELLS = [
    Cell("fp32", "eager", "", "plain", "float32", "forward", 1e-3, 1e-3),
    Cell("fp32", "sdpa", "", "plain", "float32", "forward", 1e-3, 1e-3),
    Cell("fp32", "sdpa", "bf16", "plain", "float32", "forward", 1e-3, 1e-3),
    Cell("fp32", "sdpa", "fp16", "plain", "float32", "forward", 1e-3, 1e-3),
    Cell("bf16", "eager", "", "plain", "float32", "forward", 1e-3, 0.02),
    Cell("bf16", "sdpa", "", "plain", "float32", "forward", 1e-3, 0.02),
    Cell("bf16 base, fp32 LoRA", "sdpa", "", "plain", "float32", "forward", 1e-3, 1e-3),
    Cell("bf16 base, bf16 LoRA", "sdpa", "", "plain", "float32", "forward", 1e-3, 0.02),
    Cell("fp32", "eager", "", "DDP", "float32", "forward", 1e-3, 1e-3),
    Cell("fp32", "sdpa", "", "DDP", "float32", "forward", 1e-3, 1e-3),
    Cell("fp32", "sdpa", "bf16", "DDP", "float32", "forward", 1e-3, 1e-3),
    Cell("fp32", "sdpa", "fp16", "DDP", "float32", "forward", 1e-3, 1e-3),
    Cell("bf16", "sdpa", "", "DDP", "float32", "forward", 1e-3, 0.02),
    Cell("bf16 base, fp32 LoRA", "sdpa", "", "DDP", "float32", "forward", 1e-3, 1e-3),
    Cell("bf16 base, bf16 LoRA", "sdpa", "", "DDP", "float32", "forward", 1e-3, 0.02),
    Cell("fp32", "eager", "", "FSDP2", "float32", "central", 1e-3, 0.02),
    Cell("fp32", "sdpa", "", "FSDP2", "float32", "central", 1e-3, 0.02),
    Cell("fp32", "sdpa", "bf16", "FSDP2", "float32", "central", 1e-3, 0.02),
    Cell("fp32", "sdpa", "fp16", "FSDP2", "float32", "central", 1e-3, 0.02),
    Cell("bf16", "sdpa", "", "FSDP2", "float32", "backward", 1e-3, 0.02),
    Cell("bf16 base, fp32 LoRA", "sdpa", "", "FSDP2", "float32", "central", 1e-3, 0.02),
    Cell("bf16 base, bf16 LoRA", "sdpa", "", "FSDP2", "float32", "backward", 1e-3, 0.02),
]
