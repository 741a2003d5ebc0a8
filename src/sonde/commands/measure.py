"""`sonde measure MODEL --data …`: the noise scale of a checkpoint of transformers, in words and in a table."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from rich.console import Console
from torch import Tensor
from tyro.conf import Positional, arg

from sonde.batch_size.measure import Measurement, check_limits, measure, some_seconds_apart
from sonde.batch_size.stats.reading import GroupReading
from sonde.commands.branch_result import print_table
from sonde.commands.text import read_documents, sequences
from sonde.decision.decide import decide
from sonde.decision.facts import Facts
from sonde.evidence.answer import Row
from sonde.log.sinks import JsonlSink
from sonde.parallel.devices import default_device
from sonde.records import RunLog
from sonde.version import install_hint
from sonde.wording import count, estimate, number, percent, plural

_UNIT = "sequences"


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


def run_measure(options: MeasureOptions) -> int:
    """Measure, and print the noise scale, what it means for a batch, and that of each block.

    Args:
        options: the options of the user.

    Returns:
        The exit status, 0.

    Raises:
        ImportError: when transformers is not installed.
        FileNotFoundError: when there is no data.
        ValueError: when the model or the data cannot be used.
    """
    check_ranges(options)
    check_limits(options.until, options.most, options.batch)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    device = _device(options.device)
    documents = read_documents(options.data)
    try:
        model, tokenizer = _load(options, device)
        pieces = _pieces(documents, tokenizer, options)
        console.print(_setting(model, device, options))
        measurement = _measured(model, pieces, device, options, console)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"{device} has too little memory: pass a smaller --examples-per-piece or --tokens, or --dtype bfloat16"
        ) from error
    _print_result(measurement, options, console)
    return 0


def _measured(
    model: Any,
    pieces: Iterator[Tensor],
    device: torch.device,
    options: MeasureOptions,
    console: Console,
) -> Measurement:
    torch.manual_seed(options.seed)  # of dropout; this process does nothing else
    return measure(
        model,
        lambda model, ids: _loss(model, ids.to(device)),
        pieces,
        unit=_UNIT,
        until=options.until,
        most_batches=None if options.most is None else math.ceil(options.most / options.examples_per_piece),
        batch=options.batch,
        log=_log(options),
        on_window=some_seconds_apart(lambda text: console.print(f"  {text}")),
        verbose=False,
    )


def _device(name: str) -> torch.device:
    try:
        device = default_device() if name == "auto" else torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        first_line = str(error).partition("\n")[0]
        raise ValueError(f"--device {name} cannot be used here ({first_line}): pass cpu or auto") from error
    return device


def _load(options: MeasureOptions, device: torch.device) -> tuple[Any, Any]:
    """The model, in its mode and with gradients for all of its parameters, and its tokenizer."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise ImportError(f"sonde measure needs transformers: {install_hint('transformers')}") from error
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype))
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    except (OSError, ValueError, KeyError) as error:
        first_line = str(error).partition("\n")[0].rstrip(".:")
        raise ValueError(
            f"transformers cannot load {options.model!r} ({first_line}): pass a folder that save_pretrained has "
            "written, with a tokenizer in it, or the name of a model"
        ) from error
    _check_fit(model, tokenizer, options)
    tokenizer.model_max_length = int(1e30)  # whole documents are encoded, and cut afterwards
    model.config.use_cache = False
    model.requires_grad_(True)
    return model.to(device).train(options.train_mode), tokenizer


def _check_fit(model: Any, tokenizer: Any, options: MeasureOptions) -> None:
    """Refuse a tokenizer that is not the model's, and sequences that are too long for it."""
    n_known = model.config.get_text_config().vocab_size
    # Without files of its own, transformers makes a tokenizer that knows no text.
    if not tokenizer.encode("text", add_special_tokens=False) or len(tokenizer) > n_known:
        raise ValueError(
            f"{options.model} has no tokenizer that fits (it knows {len(tokenizer)} tokens, the model {n_known}): save "
            "the model's tokenizer in its folder, by save_pretrained"
        )
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(context, int) and options.tokens > context:
        raise ValueError(
            f"{options.model} reads at most {context} tokens, got --tokens {options.tokens}: pass --tokens {context}"
        )


def _loss(model: Any, ids: Tensor) -> Tensor:
    """The mean loss of predicting each next token; ids: [sequences, tokens]."""
    return model(input_ids=ids, labels=ids).loss  # type: ignore[no-any-return]


def _pieces(documents: Iterable[str], tokenizer: Any, options: MeasureOptions) -> Iterator[Tensor]:
    """Sequences, a few at a time: [examples_per_piece, tokens].

    Raises:
        ValueError: when there are too few to compare.
    """
    each = sequences(documents, tokenizer, options.tokens, seed=options.seed)
    first = list(itertools.islice(each, options.examples_per_piece + 1))
    if len(first) <= options.examples_per_piece:
        raise ValueError(
            f"{options.data} has text for {plural(len(first), 'sequence')} of {options.tokens} tokens, and a noise "
            "scale compares pieces: pass more text, a smaller --tokens or a smaller --examples-per-piece"
        )
    return _batched(itertools.chain(first, each), options.examples_per_piece)


def _batched(each: Iterator[Tensor], n: int) -> Iterator[Tensor]:
    while batch := list(itertools.islice(each, n)):
        yield torch.stack(batch)


def _log(options: MeasureOptions) -> RunLog | None:
    if options.log is None:
        return None
    metadata = {name: v if isinstance(v, int | float) else str(v) for name, v in asdict(options).items()}
    return RunLog(JsonlSink(options.log), run=f"measure {options.model}", metadata=metadata, every=1)


def _setting(model: Any, device: torch.device, options: MeasureOptions) -> str:
    mode = "train mode" if options.train_mode else "evaluation mode, without dropout"
    return (
        f"{options.model}: {count(sum(p.numel() for p in model.parameters()))} parameters in {options.dtype} on "
        f"{device}, {mode}. Sequences of {options.tokens} tokens from {options.data}, "
        f"{options.examples_per_piece} in each backward."
    )


def _print_result(measurement: Measurement, options: MeasureOptions, console: Console) -> None:
    reading = measurement.reading
    console.print(f"\n{measurement}")
    console.print(f"loss {number(measurement.loss, 4)} nats per token")
    for line in _meaning(measurement, options):
        console.print(line)
    rows = _group_rows(reading.groups, total_grad_sq=reading.grad_sq, total_trace_cov=reading.trace_cov)
    print_table(rows, console, right=range(1, 4))
    if options.log is not None:
        console.print(f"\nlog     {options.log}\n        sonde report {options.log}  writes a page of it")
        console.print(f"        sonde branch --noise {options.log} …  sets trained branches beside it")


def _meaning(measurement: Measurement, options: MeasureOptions) -> Iterator[str]:
    """What the noise scale means: in tokens, and for a batch."""
    reading = measurement.reading
    if reading.b_simple is not None:
        tokens = [number(n * options.tokens) for n in (reading.b_simple, reading.low or 0.0, reading.high or 0.0)]
        yield f"In tokens: {tokens[0]} [{tokens[1]} – {tokens[2]}]"
    if reading.units_per_window is not None:  # with --batch
        facts = Facts(reading.unit, reading.units_per_window, reading.now, reason=reading.reason, wait=reading.advice)
        found = decide(facts)
        yield "\n" + "\n".join((found.sentence, found.reason, *found.notes))
    elif reading.b_simple is not None:
        yield (
            "In published runs, the critical batch size was 0.1 to 20 times the noise scale: `sonde branch` measures "
            "it. The noise scale grows while a model trains. Pass --batch N for a verdict on a batch of N."
        )


def _group_rows(groups: Any, *, total_grad_sq: float | None, total_trace_cov: float | None) -> Iterator[Row]:
    """The noise scale of each block, and its shares of |G|² and tr Σ."""
    yield "block", "noise scale", "of |G|²", "of tr Σ"
    group: GroupReading
    for name, group in groups.items():
        shares = _share(group.grad_sq, total_grad_sq), _share(group.trace_cov, total_trace_cov)
        yield name, estimate(group.status, group.b_simple, group.low, group.high), *shares


def _share(part: float | None, whole: float | None) -> str:
    """A part in per cent. That of a |G|² that is not positive yet is not known."""
    return "–" if part is None or not whole or whole <= 0 or part < 0 else percent(part / whole)


COMMAND = (MeasureOptions, run_measure)
