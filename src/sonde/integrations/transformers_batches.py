"""A micro-batch of transformers' Trainer or TRL's: its independent samples and their weights in the loss."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from sonde.batch_size.forward_units import rows
from sonde.integrations.trainer_probe import Counts, as_counts

UnitsOfBatch = Callable[[Mapping[str, Any]], Any]
"""Given a micro-batch, it returns its units (a number, or one for each name), or the weights of each, [units]."""
WeightOfBatch = Callable[[Mapping[str, Any]], float | Tensor]
"""Given a micro-batch, it returns its weight in the loss."""
_OF_PAIRS = ("DPOTrainer", "RewardTrainer")
"""Trainers of TRL whose batches have the preferred and the other answer of each pair."""
_ROUNDING_OF_INVERSE = 0.005
"""Relative rounding of 1/n in 16 bits."""
_LEAST = 1e-6
"""Tokens of a sample without any: it counts for nothing, and the samples' weights stay positive."""


class MicroBatches:
    """Counts the micro-batches of one trainer.

    Args:
        trainer: a `Trainer`, or one of TRL's.
        units: the user's function of a micro-batch; None to count rows, pairs or packed documents.
        weight: the user's function of a micro-batch; None to read from the loss how they weigh.

    Attributes:
        unit: the plural name of what is counted, if the user does not name it.

    Raises:
        ValueError: for a trainer of TRL whose independent samples are not known.
    """

    def __init__(self, trainer: Any, units: UnitsOfBatch | None, weight: WeightOfBatch | None = None) -> None:
        self._units, self._weight = units, weight
        of_trl = next((c.__name__ for c in type(trainer).__mro__ if c.__module__.startswith("trl.")), None)
        if of_trl == "GRPOTrainer":
            raise ValueError(
                "completions of one prompt depend on each other, so GRPO is measured in prompts: use "
                "sonde.integrations.trl.attach(trainer, {'gns_probe': {'enabled': True, 'unit': 'prompts'}})"
            )
        if of_trl not in (None, "SFTTrainer", *_OF_PAIRS) and units is None:
            raise ValueError(
                f"the independent samples of TRL's {of_trl} are not known: pass units=, a function that is given a "
                "micro-batch and returns their number"
            )
        self._has_pairs = of_trl in _OF_PAIRS
        model: Any = trainer.accelerator.unwrap_model(trainer.model)
        self._model: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
        reads_tokens = getattr(self._model, "main_input_name", "input_ids") == "input_ids"
        self.unit = "pairs" if self._has_pairs else "sequences" if reads_tokens else "examples"
        self._is_of_sft = of_trl == "SFTTrainer"
        self._is_over_window: bool | None = getattr(trainer, "loss_is_scaled_for_ga", None)
        """Whether the loss is divided by the tokens of the whole window; None until the first micro-batch shows it."""
        self._shifts = shifts_labels(self._model)

    def count(self, inputs: Mapping[str, Any], loss: Tensor, n_items: Any) -> Counts:
        """The units and weights of a micro-batch. Its first call waits for the device.

        Args:
            inputs: of the model.
            loss: whose backward follows.
            n_items: the loss tokens of the window, as the trainer counts them; None if it does not.

        Raises:
            ValueError: for a batch that does not show its units.
        """
        counts, n_own = self._units_of(inputs)
        if self._weight is not None:
            counts["weight"] = self._weight(inputs)
        elif n_own is not None and n_items is not None and self._divides_by(loss, n_items):
            counts["weight"] = n_own / torch.as_tensor(n_items, device=n_own.device).sum()
        return counts

    def _units_of(self, inputs: Mapping[str, Any]) -> tuple[Counts, Tensor | None]:
        """The units of a micro-batch, and its loss tokens or rows, 0-dim; None for pairs."""
        if self._has_pairs and self._units is None:
            return {"units": n_pairs(inputs)}, None
        n_units, tokens = samples(inputs, shifts=self._shifts)
        n_own = torch.as_tensor(n_units) if tokens is None else tokens.sum()
        if self._units is not None:
            return as_counts(self._units(inputs)), n_own
        return {"units": n_units} if tokens is None else {"units": n_units, "unit_weights": tokens}, n_own

    def _divides_by(self, loss: Tensor, n_items: Any) -> bool:
        """Whether the loss is divided by the tokens of the whole window. The first micro-batch shows it for all."""
        if self._is_over_window is None:
            found = is_divided_by(loss, torch.as_tensor(n_items))
            names = inspect.unwrap(type(self._model).forward).__code__.co_names
            self._is_over_window = self._is_of_sft or "loss_function" in names if found is None else found
        return self._is_over_window

    @property
    def weighting(self) -> str | None:
        """How micro-batches weigh in the loss, in words; None if the user says it."""
        if self._weight is not None:
            return None
        if self._is_over_window:
            return "pieces weigh by their loss tokens: the loss is divided by those of the whole window"
        return "each piece weighs the same: the loss is a mean over its own batch"


def shifts_labels(model: nn.Module) -> bool:
    """Whether the model's loss compares position i with label i + 1.

    `Trainer._loss_shifts_labels` says so of fewer models: it is False for GPT-2, whose loss shifts by default.
    """
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return getattr(model, "loss_function", None) is ForCausalLMLoss and not is_encoder_decoder


def n_pairs(inputs: Mapping[str, Any]) -> int:
    """The pairs of a preference batch, [2 · pairs, tokens].

    Raises:
        ValueError: for an odd number of rows.
    """
    n = rows(inputs)
    if n is None or n % 2:
        raise ValueError(f"a batch of pairs has two rows for each, got {n} rows: pass units= to attach")
    return n // 2


def samples(inputs: Mapping[str, Any], *, shifts: bool) -> tuple[float | Tensor, Tensor | None]:
    """The samples of a batch, and the loss tokens of each.

    Args:
        inputs: of the model. A batch that packs documents without padding has `cu_seq_lens_q` [documents + 1], or
            `position_ids` [rows, tokens] that begin again at 0, and no `attention_mask`.
        shifts: whether the loss shifts `labels`.

    Returns:
        The number of rows, or of packed documents that have loss tokens; and the loss tokens of each sample, [samples].
        None where the loss has no tokens. Documents without loss tokens are listed with next to no tokens.

    Raises:
        ValueError: if the batch has no tensor with rows.
    """
    labels = inputs.get("shift_labels")
    if labels is None and isinstance(labels := inputs.get("labels"), Tensor) and labels.dim() > 1 and shifts:
        labels = labels[..., 1:]
    if not isinstance(labels, Tensor) or labels.dim() < 2 or labels.is_floating_point():
        if (n := rows(inputs)) is None:
            raise ValueError("the batch has no tensor with rows: pass units= to attach, a function of the batch")
        return n, None
    is_in_loss = labels.ne(-100).flatten(1)
    document, n_documents = _documents(inputs) if "attention_mask" not in inputs else (None, 0)
    if document is None:
        return len(is_in_loss), is_in_loss.sum(1).clamp(min=_LEAST)
    of_label = document[:, document.shape[1] - is_in_loss.shape[1] :].flatten()
    tokens = torch.zeros(n_documents, device=document.device)
    tokens.index_add_(0, of_label, is_in_loss.flatten().to(tokens))
    return tokens.gt(0).sum().clamp(min=1), tokens.clamp(min=_LEAST / n_documents)


def _documents(inputs: Mapping[str, Any]) -> tuple[Tensor | None, int]:
    """The number of the document that each token is of, from 0, [rows, tokens]; None if nothing is packed.

    Also a number that no document reaches: their number, or that of tokens where only the device knows it.
    """
    borders, positions = inputs.get("cu_seq_lens_q"), inputs.get("position_ids")
    if borders is not None:
        ids = inputs["input_ids"]
        places = torch.arange(ids.numel(), device=borders.device)
        document = torch.bucketize(places, borders[1:], right=True).view(ids.shape[0], -1)
        return document.to(ids.device), len(borders) - 1
    if isinstance(positions, Tensor) and positions.dim() == 2:
        begins = positions == 0
        begins[:, 0] = True
        return begins.flatten().cumsum(0).sub(1).view(positions.shape), positions.numel()
    return None, 0


def is_divided_by(loss: Tensor, n_items: Tensor) -> bool | None:
    """Whether a division by this number, or a multiplication by its inverse, is among the last operations of a loss.

    Waits for the device.

    Args:
        loss: with its graph.
        n_items: 0-dim.

    Returns:
        None if the graph is compiled, and shows no operations.
    """
    nodes, seen = deque([loss.grad_fn]), 0
    while nodes and seen < 64:
        node, seen = nodes.popleft(), seen + 1
        if node is None:
            continue
        if "Compiled" in node.name():
            return None
        other = getattr(node, "_saved_other", None)
        if isinstance(other, Tensor) and other.numel() == 1:
            divides, multiplies = (node.name().startswith(name) for name in ("DivBackward", "MulBackward"))
            is_inverse = multiplies and abs(other.item() * n_items.item() - 1) < _ROUNDING_OF_INVERSE
            if is_inverse or (divides and other.item() == n_items.item()):
                return True
        nodes.extend(parent for parent, _ in node.next_functions)
    return False
