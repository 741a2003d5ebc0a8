"""torchtitan's Trainer with its debug model on a CPU; import it only with torchtitan.

torchtitan trains on accelerators. Here it is told what little it asks of its device, its attention is the only one of
its own that has a backward on CPUs, and FSDP2 adds gradients up by plain sums, since gloo has no other. All that needs
torchtitan is imported after it was told.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils

utils.device_type, utils.device_module = (
    "cpu",
    SimpleNamespace(  # type: ignore[assignment]
        current_device=lambda: 0,
        device_count=lambda: 1,
        empty_cache=lambda: None,
        get_device_name=lambda device: "CPU",
        get_device_properties=lambda device: SimpleNamespace(total_memory=1),
        memory_stats=lambda device: {},
        reset_peak_memory_stats=lambda: None,
        set_device=lambda device: None,
        synchronize=lambda: None,
    ),
)

import torchtitan.trainer as titan  # noqa: E402
from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402

from sonde.integrations import torchtitan as integration  # noqa: E402
from tests.integrations.plain_loop import Piece  # noqa: E402

_dims: dict[str, Any] = {}
_new_dims = titan.ParallelDims.from_config


def _same_dims(parallelism: Any, n_ranks: int) -> Any:
    """Meshes that are there already: FSDP2 refuses a second model on new meshes of the same ranks."""
    return _dims.setdefault(repr((parallelism, n_ranks)), _new_dims(parallelism, n_ranks))


titan.ParallelDims.from_config = _same_dims  # type: ignore[method-assign]
titan.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda seconds: None)  # type: ignore[assignment]

ROWS, TOKENS, VOCABULARY, STEPS, LR = 3, 16, 2048, 6, 1e-3


def batches(n: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Tokens, positions and labels of micro-batches [rows, tokens], of rows with a document or two.

    Some rows have few labels, and the second micro-batch has fewer than others.
    """
    generator = torch.Generator().manual_seed(1)
    made = []
    for k in range(n):
        tokens = torch.randint(6, (ROWS, TOKENS + 1), generator=generator)
        tokens[:, 1::2] = tokens[:, :-1:2]  # something to learn
        labels = tokens[:, 1:].clone()
        positions = torch.arange(TOKENS).repeat(ROWS, 1)
        positions[1, 10:] -= 10
        labels[0, 2 + k % 5 :] = -100
        if k == 1:
            labels[1:, :12] = -100
        made.append((tokens[:, :-1], positions, labels))
    return made


class Batches(BaseDataLoader):
    """Hands a rank every so-manieth of the same micro-batches, and goes on where a checkpoint was."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Without options."""

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **others: Any) -> None:
        self._rank, self._world, self._next = dp_rank, dp_world_size, 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for tokens, positions, labels in batches(100)[self._rank :: self._world][self._next :]:
            self._next += 1
            yield {"input": tokens, "positions": positions}, labels

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._next = state_dict["next"]


class NoTokenizer(BaseTokenizer):
    """The batches are tokens already."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Without options."""

    def __init__(self, config: Config, **others: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return VOCABULARY


def config_of(
    folder: Path | str,
    *,
    accumulates: int = 3,
    ranks: int = 1,
    chunks: int | None = None,
    precision: str = "float32",
    backend: str = "spmd_types",
    saves: bool = False,
    steps: int = STEPS,
    **degrees: int,
) -> Any:
    """The debug model's configuration, with two layers.

    Args:
        folder: for its output.
        accumulates: micro-batches of a rank in a step.
        ranks: data-parallel ones.
        chunks: of torchtitan's chunked loss; None for the plain one.
        precision: of FSDP2's parameters.
        backend: by which torchtitan cuts the model.
        saves: whether checkpoints are saved and loaded.
        steps: of the training.
        **degrees: of parallelism.
    """
    config = llama3_debugmodel()
    config.dump_folder = str(folder)
    del config.model_spec.model.layers[2:]
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    loss = CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)
    config.loss = loss if chunks is None else ChunkedLossWrapper.Config(loss_fn=loss, num_chunks=chunks)
    config.optimizer = default_adamw(lr=LR, weight_decay=0.0, betas=(0.9, 0.999))  # as `plain_loop.optimizer_of`
    config.lr_scheduler = LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0)
    config.tokenizer, config.dataloader = NoTokenizer.Config(), Batches.Config()
    config.training.seq_len, config.training.global_batch_size = TOKENS, ROWS * accumulates * ranks
    in_schedule = accumulates if degrees.get("pipeline_parallel", 1) > 1 else 1
    config.training.local_batch_size = ROWS * in_schedule
    config.parallelism.pipeline_parallel_microbatch_size = ROWS
    config.training.mixed_precision_param, config.training.max_norm = precision, 0.5
    config.training.steps = steps
    config.metrics.log_freq = 2
    config.checkpoint = CheckpointManager.Config(enable=saves, interval=2, last_save_model_only=False)
    config.validator.enable = False
    config.training.disable_cuda_graphs = True
    config.debug.seed, config.debug.enable_structured_logging = 1, False
    config.parallelism.spmd_backend, config.parallelism.pipeline_parallel_schedule = backend, "1F1B"
    for name, degree in degrees.items():
        setattr(config.parallelism, f"{name}_degree", degree)
    return config


def measured_config() -> Any:
    """For torchtitan's own command line."""
    return integration.measured(config_of("outputs"), unit="rows", every=1, verbose=False)


def trainer_of(config: Any) -> Any:
    """The trainer of this configuration, in the process group that is there."""
    os.environ["LOCAL_RANK"] = "0"
    trainer = config.build()
    gc.enable()  # torchtitan collects at steps of its own
    for part in trainer.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    return trainer


def plain_model(config: Any, weights: dict[str, Tensor]) -> nn.Module:
    """The same model on one process, without torchtitan's wrappers.

    Args:
        config: of the trainer.
        weights: whole tensors.
    """
    model: nn.Module = config.model_spec.model.build()
    model.to_empty(device="cpu")
    model.init_weights(buffer_device=None)
    model.load_state_dict(weights)
    return model


def windows_of(n_pieces: int, steps: int = STEPS) -> list[list[Piece]]:
    """The micro-batches of each step, as pieces whose rows weigh by their loss tokens."""
    pieces = []
    for tokens, positions, labels in batches(n_pieces * steps):
        of_rows = labels.ne(-100).sum(1)
        inputs = {"tokens": tokens, "positions": positions, "labels": labels}
        pieces.append(Piece(inputs, {"unit_weights": of_rows.tolist()}, float(of_rows.sum())))
    return [pieces[k : k + n_pieces] for k in range(0, len(pieces), n_pieces)]


def loss_over_window(windows: Sequence[Sequence[Piece]]) -> Callable[[nn.Module, Piece], Tensor]:
    """The loss of a piece, as torchtitan has it: a sum over its tokens, divided by the tokens of its window."""
    n_tokens = {id(piece): sum(other.weight for other in window) for window in windows for piece in window}

    def loss_of_piece(model: nn.Module, piece: Piece) -> Tensor:
        logits = model(piece.inputs["tokens"], positions=piece.inputs["positions"])
        total = F.cross_entropy(logits.flatten(0, 1).float(), piece.inputs["labels"].flatten(), reduction="sum")
        return total / n_tokens[id(piece)]

    return loss_of_piece


def whole_state(trainer: Any) -> dict[str, Tensor]:
    """Copies of the weights, put together from their shards."""
    state = {name: value for part in trainer.model_parts for name, value in part.state_dict().items()}
    return {name: getattr(value, "full_tensor", lambda v=value: v)().clone() for name, value in state.items()}
