"""A micro-batch of transformers' Trainer or TRL's: its independent samples and their weights in the loss."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss, ForTokenClassification

from sonde.batch_size.batch_dim import units_in_batch
from sonde.integrations.guarded import Counts, as_counts

UnitsOfBatch = Callable[[Mapping[str, Any]], Any]
"""Given a micro-batch, it returns its units (a number, or one for each name), or the weights of each, [units]."""
WeightOfBatch = Callable[[Mapping[str, Any]], float | Tensor]
"""Given a micro-batch, it returns its weight in the loss."""
_OF_PAIRS = ("DPOTrainer", "RewardTrainer")
"""Trainers of TRL whose batches have the preferred and the other answer of each pair."""
_TOKEN_LOSSES = (ForCausalLMLoss, ForMaskedLMLoss, ForTokenClassification)
_LOSSES_OF_SAMPLES = ("CtcLoss", "CudnnCtcLoss", "BinaryCrossEntropy", "MseLoss", "L1Loss", "SmoothL1Loss", "HuberLoss")
"""Operations of torch's losses that have no tokens: each sample is one sequence, or has as many elements as others."""
_MOST_NODES = 64
"""Operations of a loss that are looked at, the last ones first."""
_MOST_UNDECIDED = 8
"""Micro-batches that may leave it open how they weigh. If all hold equal shares, they weigh the same either way."""
_BY_TOKENS = "pieces weigh by their loss tokens: the loss is divided by those of the whole window"
_THE_SAME = (
    "each piece weighs the same, since the loss shows no division by the tokens of the whole window. If it is divided "
    "by them, pass weight= to attach, a function of the batch that returns its loss tokens"
)
_REMEDY = "pass units= to attach, a function of the batch"
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
        has_pairs: whether a batch has two rows for each pair, so that a row is no independent sample.
        is_trl_trainer: whether the trainer is one of TRL's.
        trainer_name: for `sonde advise`.
        weighting: how micro-batches weigh in the loss, in words; None if the user says it, and while it is not known.

    Raises:
        ValueError: for a trainer of TRL whose independent samples are not known.
    """

    def __init__(self, trainer: Any, units: UnitsOfBatch | None, weight: WeightOfBatch | None = None) -> None:
        self._units, self._weight = units, weight
        trl_kind = next((c.__name__ for c in type(trainer).__mro__ if c.__module__.startswith("trl.")), None)
        if trl_kind == "GRPOTrainer":
            raise ValueError(
                "completions of one prompt depend on each other, so GRPO is measured in prompts: use "
                "sonde.integrations.trl.attach(trainer, noise_every=10)"
            )
        if trl_kind not in (None, "SFTTrainer", *_OF_PAIRS) and units is None:
            raise ValueError(
                f"the independent samples of TRL's {trl_kind} are not known: pass units=, a function that is given a "
                "micro-batch and returns their number"
            )
        self.is_trl_trainer, self.has_pairs = trl_kind is not None, trl_kind in _OF_PAIRS
        self.trainer_name = "TRL" if self.is_trl_trainer else "transformers"
        model: Any = trainer.accelerator.unwrap_model(trainer.model)
        self._model: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
        reads_tokens = getattr(self._model, "main_input_name", "input_ids") == "input_ids"
        self.unit = "pairs" if self.has_pairs else "sequences" if reads_tokens else "examples"
        self._trainer, self._is_sft = trainer, trl_kind == "SFTTrainer"
        self.weighting: str | None = None
        self._n_undecided = 0
        self._is_over_window: bool | None = None
        """Whether the loss is divided by the tokens of the whole window; None until the first micro-batch shows it."""
        self._shifts = shifts_labels(self._model)
        self._tokens_weigh: bool | None = None
        """Whether samples weigh by their loss tokens; None until a micro-batch shows it."""

    def count(self, inputs: Mapping[str, Any], loss: Tensor, n_items: Any) -> Counts:
        """The units and weights of a micro-batch. The first call waits for the device, and at most the first eight.

        Args:
            inputs: of the model.
            loss: whose backward follows.
            n_items: the loss tokens of the window, as the trainer counts them; None if it does not.

        Raises:
            ValueError: for a batch that does not show its units, and a loss that does not show how they weigh.
        """
        counts, n_own = self._units_of(inputs, loss, n_items)
        if self._weight is not None:
            counts["weight"] = self._weight(inputs)
        elif n_own is None or n_items is None:
            self.weighting = "each piece weighs the same: the loss is a mean over its own batch"
        elif self._divides_by(loss, n_items, n_own):
            counts["weight"] = n_own / torch.as_tensor(n_items, device=n_own.device).sum()
        return counts

    def _units_of(self, inputs: Mapping[str, Any], loss: Tensor, n_items: Any) -> tuple[Counts, Tensor | None]:
        """The units of a micro-batch, and its loss tokens or rows, 0-dim; None for pairs."""
        if self.has_pairs and self._units is None:
            if (n_rows := units_in_batch(inputs, _REMEDY)) % 2:
                raise ValueError(f"a batch of pairs has two rows for each, got {n_rows} rows: pass units= to attach")
            return {"units": n_rows // 2}, None
        n_units, tokens = samples(inputs, shifts=self._shifts)
        if tokens is not None and not self._weigh_by(tokens, loss, len(inputs["labels"]), n_items):
            n_units, tokens = len(inputs["labels"]), None
        n_own = torch.as_tensor(n_units) if tokens is None else tokens.sum()
        if self._units is not None:
            return as_counts(self._units(inputs)), n_own
        return {"units": n_units} if tokens is None else {"units": n_units, "unit_weights": tokens}, n_own

    def _weigh_by(self, tokens: Tensor, loss: Tensor, n_rows: int, n_items: Any) -> bool:
        """Whether samples weigh by their loss tokens. The first micro-batch whose loss shows it, shows it for all.

        Raises:
            ValueError: where the loss does not show it, and `units` does not say it.
        """
        if self._tokens_weigh is None:
            own = tokens.sum().round()
            found = is_over_tokens(loss, n_rows, own, own if n_items is None else torch.as_tensor(n_items).sum())
            if found is None and self._units is None and not self._has_token_loss():
                raise ValueError(
                    "the labels have several tokens for each sample, and the loss does not show whether samples weigh "
                    "by their tokens, or all the same: pass units= to attach, a function of the batch that returns the "
                    "weight of each sample in its loss, [samples], or their number where all weigh the same"
                )
            self._tokens_weigh = found is not False
        return self._tokens_weigh

    def _divides_by(self, loss: Tensor, n_items: Any, n_own: Tensor) -> bool:
        """Whether the loss is divided by the tokens of the whole window. The first micro-batch shows it for all."""
        if self._is_over_window is None:
            total, own = torch.as_tensor(n_items).sum(), n_own.round()  # rows without tokens count a little
            found = is_divided_by(loss, total)
            if not found and own > 0 and is_divided_by(loss, total, own):
                found = True
                self._n_undecided += 1
                if total.item() % own.item() == 0 and self._n_undecided <= _MOST_UNDECIDED:
                    return True  # or multiplied by 1/micro-batches, as a mean is: now both weigh alike
            self._is_over_window = self._is_by_the_code() if found is None else found
            self.weighting = _BY_TOKENS if self._is_over_window else _THE_SAME
        return self._is_over_window

    def _is_by_the_code(self) -> bool:
        """Whether a loss whose graph does not show it is divided by the tokens of the whole window.

        Raises:
            ValueError: for a `compute_loss` of the user's own.
        """
        if (names := self._names_in_forward()) is None:
            raise ValueError(
                "the graph of the loss is compiled or made by a function of its own, so it does not show how micro-"
                "batches weigh: pass weight= to attach. It is a function of the batch: 'lambda batch: 1.0' where each "
                "micro-batch's loss is a mean, or the batch's loss tokens where the loss is divided by those of the "
                "whole window"
            )
        return self._is_sft or "loss_function" in names

    def _has_token_loss(self) -> bool:
        """Whether a loss whose graph does not show it is a mean over tokens, by the code of transformers or TRL."""
        names = self._names_in_forward()
        loss = getattr(self._model, "loss_function", None) if names and "loss_function" in names else None
        return names is not None and (self._is_sft or loss in _TOKEN_LOSSES or "CrossEntropyLoss" in names)

    def _names_in_forward(self) -> tuple[str, ...] | None:
        """What the code of the model's forward names; None if the trainer's loss is neither transformers' nor TRL's."""
        module = inspect.unwrap(type(self._trainer).compute_loss).__module__
        if not module.startswith(("transformers.", "trl.")) or self._trainer.compute_loss_func is not None:
            return None
        names: tuple[str, ...] = inspect.unwrap(type(self._model).forward).__code__.co_names
        return names


def shifts_labels(model: nn.Module) -> bool:
    """Whether the model's loss compares position i with label i + 1.

    `Trainer._loss_shifts_labels` says so of fewer models: it is False for GPT-2, whose loss shifts by default.
    """
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return getattr(model, "loss_function", None) is ForCausalLMLoss and not is_encoder_decoder


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
        return units_in_batch(inputs, _REMEDY), None
    is_in_loss = labels.ne(-100).flatten(1)
    if (document := _documents(inputs)) is None:
        return len(is_in_loss), is_in_loss.sum(1).clamp(min=_LEAST)
    of_label = document[:, document.shape[1] - is_in_loss.shape[1] :].flatten()
    n_most = document.numel()  # their number is known to the device alone
    tokens = torch.zeros(n_most, device=document.device).index_add_(0, of_label, is_in_loss.flatten().float())
    return tokens.gt(0).sum().clamp(min=1), tokens.clamp(min=_LEAST / n_most)


def _documents(inputs: Mapping[str, Any]) -> Tensor | None:
    """The number of the document that each token is of, from 0, [rows, tokens]; None if nothing is packed."""
    borders, positions = inputs.get("cu_seq_lens_q"), inputs.get("position_ids")
    if "attention_mask" in inputs:
        return None
    if borders is not None:
        ids = inputs["input_ids"]
        places = torch.arange(ids.numel(), device=borders.device)
        return torch.bucketize(places, borders[1:], right=True).view(ids.shape[0], -1).to(ids.device)
    if isinstance(positions, Tensor) and positions.dim() == 2:
        begins = positions == 0
        begins[:, 0] = True
        return begins.flatten().cumsum(0).sub(1).view(positions.shape)
    return None


def is_over_tokens(loss: Tensor, n_rows: int, n_own: Tensor, n_items: Tensor) -> bool | None:
    """Whether a loss is a mean or a sum over tokens, so that samples weigh by their number of tokens.

    Args:
        loss: with its graph.
        n_rows: rows of the labels.
        n_own: loss tokens of the micro-batch, 0-dim. The host waits for it where no operation is a loss of torch's.
        n_items: likewise of the window.

    Returns:
        None if the last operations of the loss do not show it.
    """
    nodes = list(_last_operations(loss))
    of_classes = [node for node in nodes if node.name().startswith("NllLoss")]
    of_tokens = [node for node in of_classes if node._saved_target.numel() > n_rows]
    if any(node._saved_reduction for node in of_tokens):  # without, it has terms that other operations weigh
        return True
    if not of_tokens and (of_classes or any(node.name().startswith(_LOSSES_OF_SAMPLES) for node in nodes)):
        return False
    # A loss by hand, as with smoothed labels. Where each sample has one token, both are the same.
    is_divided = n_own > n_rows and (is_divided_by(loss, n_own) or is_divided_by(loss, n_items))
    return True if is_divided else None


def _last_operations(loss: Tensor) -> Iterator[Any]:
    """The nodes of a loss's graph, the last operations first."""
    nodes = deque([loss.grad_fn])
    for _ in range(_MOST_NODES):
        if nodes and (node := nodes.popleft()) is not None:
            yield node
            nodes.extend(() if _is_opaque(node) else (parent for parent, _ in node.next_functions))


def _is_opaque(node: Any) -> bool:
    """Whether a node stands for operations that it does not show."""
    return "Compiled" in node.name() or _makes_a_loss(node)


def is_divided_by(loss: Tensor, n_items: Tensor, n_own: Tensor | None = None) -> bool | None:
    """Whether one of the last operations of a loss divides by this number.

    That is a division by it, or a multiplication by its inverse, or by n_own times that; by a number, or by weights
    whose largest is that. Waits for the device.

    Args:
        loss: with its graph.
        n_items: loss tokens of the window, 0-dim.
        n_own: loss tokens of the micro-batch, 0-dim.

    Returns:
        None if the graph is compiled, or a function of the user's own has made the loss: neither shows its operations.
    """
    own, is_opaque = 1.0 if n_own is None else n_own.item(), False
    for node in _last_operations(loss):
        if _is_opaque(node):
            is_opaque = True
            continue
        other = getattr(node, "_saved_other", None)
        if isinstance(other, Tensor) and _shows_division(node.name(), other, n_items.item(), own):
            return True
    return None if is_opaque else False


def _shows_division(name: str, other: Tensor, n_items: float, n_own: float) -> bool:
    """Whether an operation with this other operand divides by `n_items`; see `is_divided_by`."""
    if name.startswith("DivBackward"):
        return other.numel() == 1 and other.item() == n_items
    if not name.startswith("MulBackward") or not other.is_floating_point():
        return False
    rounding = 0.51 * torch.finfo(other.dtype).eps + 1e-15  # of a quotient, and of the product below
    if other.numel() == 1:
        return any(abs(other.item() * n_items - factor) <= rounding * factor for factor in (1.0, n_own))
    # Weights of tokens. In 16 bits, many a tensor has a largest element that is about 1/n.
    is_exact = other.numel() > 0 and other.dtype in (torch.float32, torch.float64)
    return is_exact and abs(other.max().item() * n_items - 1) <= rounding


def _makes_a_loss(node: Any) -> bool:
    """Whether a node of the graph is a `torch.autograd.Function` in Python that has made a single number of others.

    DDP hands on a loss by such a function, which makes none.
    """
    if not (isinstance(node, BackwardCFunction) and any(not shape for shape in _shapes_of(node))):
        return False
    parents = [(parent, number) for parent, number in node.next_functions if parent is not None]
    return not any(
        number < len(shapes := _shapes_of(parent)) and not shapes[number]
        for parent, number in parents
        if "AccumulateGrad" not in parent.name()  # a parameter, such as a temperature
    )


def _shapes_of(node: Any) -> list[torch.Size]:
    """Of what a node has returned."""
    return [output.shape for output in getattr(node, "_input_metadata", ())]
