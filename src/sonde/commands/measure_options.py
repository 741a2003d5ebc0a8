"""The options of `sonde measure`, and their ranges."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg


@dataclass(frozen=True)
class MeasureOptions:
    """Measure the gradient noise scale of a language model of transformers, as it is, on your text.

    Nothing is trained. The text is cut into sequences, which are shuffled. Each backward pass takes a few of them, and
    measuring ends when both ends of the 95 % interval are as near to the noise scale as `--until` says. It needs
    memory for the model, its gradients and the activations of one backward.

    Attributes:
        model: Folder or name that transformers' AutoModelForCausalLM.from_pretrained takes.
        data: A text file, a file of JSON lines with "text", or a folder of them (.txt, .md, .jsonl).
        tokens: Tokens per sequence, as in your training.
        examples_per_piece: Sequences per backward pass.
        until: Stop when the interval is within this part of the noise scale: 0.1 for ± 10 %.
        most: Stop after so many sequences.
        batch: Your batch size in sequences, to judge.
        device: Where to measure: cpu, cuda, cuda:1, xpu, mps. With auto, on the first GPU if there is one.
        dtype: Dtype of the weights and gradients.
        train_mode: Measure in train mode, with the model's dropout.
        seed: Seed of the order of the sequences, and of dropout.
        log: Folder for a log, from which `sonde report` makes a page.
    """

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    data: Annotated[Path, arg(metavar="FILE_OR_FOLDER")]
    tokens: Annotated[int, arg(metavar="N")] = 512
    examples_per_piece: Annotated[int, arg(metavar="N")] = 4
    until: Annotated[float, arg(metavar="PART")] = 0.1
    most: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: all of the data)")] = None
    batch: Annotated[float | None, arg(metavar="N", help_behavior_hint="(optional)")] = None
    device: Annotated[str, arg(metavar="DEVICE")] = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    train_mode: bool = False
    seed: Annotated[int, arg(metavar="N")] = 0
    log: Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="(optional)")] = None


def check_ranges(options: MeasureOptions) -> None:
    """Refuse options of the sequences outside their range.

    Raises:
        ValueError: with the option, its value and its range.
    """
    for name, least in (("tokens", 2), ("examples_per_piece", 1)):
        if (value := getattr(options, name)) < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}: give a larger number")
