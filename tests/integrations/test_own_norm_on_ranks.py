"""Trainers on two ranks of FSDP2 whose own norm is that of each rank's shard, and those that have the right one."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
from torch import nn

from tests.integrations.as_launched import as_launched, free_port
from tests.integrations.norm_of_shard import check_said, clip_by_shard, norm_of_shard, usual
from tests.integrations.plain_loop import BY_PIECES
from tests.ranks import Ranks

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


def _of_hugging_face(kind: str, is_wrong: bool, factors: list[float]) -> Any:
    from sonde.integrations import transformers as integration
    from tests.integrations import hf_trainer, trl_trainers

    make = {"Trainer": hf_trainer.trainer_of, "SFTTrainer": trl_trainers.sft}[kind]
    blocks = {"Trainer": "GPT2Block", "SFTTrainer": "Qwen2DecoderLayer"}
    config = {"version": 2, "cpu_ram_efficient_loading": False, "transformer_layer_cls_to_wrap": [blocks[kind]]}
    trainer = make(tempfile.mkdtemp(), fsdp=True, fsdp_config=config)

    if is_wrong:
        trainer.accelerator.clip_grad_norm_ = clip_by_shard(factors)
    probe = integration.attach(trainer, on_error="raise", **BY_PIECES)
    trainer.train()
    return probe


def _of_lightning(kind: str, is_wrong: bool, factors: list[float]) -> Any:
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    from sonde.integrations.lightning import NoiseScale
    from tests.integrations.lightning_module import Module, trainer_of

    class OfRank(Module):
        def __init__(self) -> None:
            super().__init__()
            self.net[2] = nn.Linear(8, 4)  # of one row, one rank would hold nearly all of the gradient

        def configure_model(self) -> None:
            if not hasattr(self, "is_cut"):
                self.is_cut = True
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            """Logs a norm, as many modules do."""
            if is_wrong:
                factors.append(norm_of_shard(self.parameters())[1])

    strategy, probe = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1), NoiseScale(**BY_PIECES)
    options = {"strategy": strategy, "plugins": [TorchElasticEnvironment()], "devices": 2}
    clip = {"gradient_clip_val": None} if is_wrong else {}
    trainer_of(tempfile.mkdtemp(), probe, **options, **clip, use_distributed_sampler=False).fit(OfRank())
    return probe


def _trained(port: int, kind: str, is_wrong: bool) -> tuple[list[str], float]:
    """What is said at the end, and the usual norm over the true one."""
    factors: list[float] = []
    with as_launched(port, TORCHELASTIC_RUN_ID="none", GROUP_RANK="0"):
        probe = (_of_lightning if kind == "Lightning" else _of_hugging_face)(kind, is_wrong, factors)
        return [*probe.said_at_end], usual(factors)


@pytest.mark.parametrize("is_wrong", [True, False], ids=["shard", "right"])
@pytest.mark.parametrize("kind", ["Trainer", "SFTTrainer", "Lightning"])
def test_the_norm_of_a_shard_is_named_with_its_factor(kind: str, is_wrong: bool, ranks2: Ranks) -> None:
    pytest.importorskip({"Trainer": "transformers", "SFTTrainer": "trl", "Lightning": "lightning"}[kind])
    check_said(is_wrong, *ranks2(_trained, free_port(), kind, is_wrong)[0])
