"""The models that people train, cell by cell: what a forecast uses for each, and how exact it is.

`python -m tests.policy.model_cells` writes the table of the page.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "entropy-change.md"
_HEAD = "| parameters | attention | arithmetic of the training |"


@dataclass(frozen=True)
class Cell:
    """A model before its step.

    Attributes:
        parameters: their dtype; for adapters over a frozen base, the dtypes of both.
        attention: "eager", or "sdpa": torch's fused attention.
        arithmetic: "", or the dtype of autocast or of FSDP2's mixed precision.
        wrapper: "plain", "DDP" or "FSDP2".
        scored_in: the precision that the forecast reports.
        within: largest error of δH against float64, over the standard error.
        first_order_within: the same of the change to first order.
    """

    parameters: str
    attention: str
    arithmetic: str
    wrapper: str
    scored_in: str
    within: float
    first_order_within: float

    @property
    def name(self) -> str:
        """For the test."""
        parts = (self.parameters, self.attention, self.arithmetic and f"{self.arithmetic} arithmetic", self.wrapper)
        return ", ".join(filter(None, parts))


CELLS = [
    Cell("fp32", "eager", "", "plain", "float32", 1e-3, 0.02),
    Cell("fp32", "sdpa", "", "plain", "float32", 1e-3, 0.02),
    Cell("fp32", "sdpa", "bf16", "plain", "float32", 1e-3, 0.02),
    Cell("fp32", "sdpa", "fp16", "plain", "float32", 1e-3, 0.02),
    Cell("bf16", "eager", "", "plain", "float32", 1e-3, 0.02),
    Cell("bf16", "sdpa", "", "plain", "float32", 1e-3, 0.02),
    Cell("bf16 base, fp32 LoRA", "sdpa", "", "plain", "float32", 1e-3, 0.02),
    Cell("bf16 base, bf16 LoRA", "sdpa", "", "plain", "float32", 1e-3, 0.02),
    Cell("fp32", "eager", "", "DDP", "float32", 1e-3, 0.02),
    Cell("fp32", "sdpa", "", "DDP", "float32", 1e-3, 0.02),
    Cell("fp32", "sdpa", "bf16", "DDP", "float32", 1e-3, 0.02),
    Cell("fp32", "sdpa", "fp16", "DDP", "float32", 1e-3, 0.02),
    Cell("bf16", "sdpa", "", "DDP", "float32", 1e-3, 0.02),
    Cell("bf16 base, fp32 LoRA", "sdpa", "", "DDP", "float32", 1e-3, 0.02),
    Cell("bf16 base, bf16 LoRA", "sdpa", "", "DDP", "float32", 1e-3, 0.02),
    Cell("fp32", "eager", "", "FSDP2", "float32", 1e-3, 0.02),
    Cell("fp32", "sdpa", "", "FSDP2", "float32", 1e-3, 0.02),
    Cell("fp32", "sdpa", "bf16", "FSDP2", "float32", 1e-3, 0.02),
    Cell("fp32", "sdpa", "fp16", "FSDP2", "float32", 1e-3, 0.02),
    Cell("bf16", "sdpa", "", "FSDP2", "float32", 1e-3, 0.02),
    Cell("bf16 base, fp32 LoRA", "sdpa", "", "FSDP2", "float32", 1e-3, 0.02),
    Cell("bf16 base, bf16 LoRA", "sdpa", "", "FSDP2", "float32", 1e-3, 0.02),
]


def with_table(page: str) -> str:
    """The page with a line for each cell."""
    lines = page.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(_HEAD)) + 2
    end = next(i for i, line in enumerate(lines[start:], start) if not line.startswith("|"))
    rows = [
        f"| {c.parameters} | {c.attention} | {c.arithmetic or 'its own'} | {c.wrapper} | {c.scored_in} | "
        f"{c.within:g} | {c.first_order_within:g} |"
        for c in CELLS
    ]
    return "\n".join([*lines[:start], *rows, *lines[end:]]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
