"""torchtitan's debug model on CPUs: sonde is one call between making its Trainer and training.

torchrun --nproc-per-node 2 examples/torchtitan_debug.py

On GPUs, `measured` in a configuration does it with torchtitan's own command: see docs/torchtitan.md.
"""

from __future__ import annotations

import json
import pydoc_data.topics
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils

# torchtitan trains on accelerators. This is what it asks of its device, before its other parts are imported.
utils.device_type = "cpu"
utils.device_module = SimpleNamespace(
    current_device=lambda: 0,
    device_count=lambda: 1,
    empty_cache=lambda: None,
    get_device_name=lambda device: "CPU",
    get_device_properties=lambda device: SimpleNamespace(total_memory=1),
    memory_stats=lambda device: {},
    reset_peak_memory_stats=lambda: None,
    set_device=lambda device: None,
    synchronize=lambda: None,
)

from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from sonde.integrations.torchtitan import attach  # noqa: E402

FILES = Path("torchtitan-debug")


def written_files() -> None:
    """A tokenizer of bytes and paragraphs of English, where torchtitan has files of its own."""
    (FILES / "text").mkdir(parents=True, exist_ok=True)
    vocabulary = {chr(i): i for i in range(256)} | {"<bos>": 256, "<eos>": 257}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(FILES / "tokenizer.json"))
    (FILES / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    paragraphs = [part for topic in pydoc_data.topics.topics.values() for part in topic.split("\n\n")]
    lines = [json.dumps({"text": part}) for part in paragraphs if len(part) > 20]
    (FILES / "text" / "paragraphs.jsonl").write_text("\n".join(lines))


def debugmodel() -> Trainer.Config:
    """The debug model on short rows, in two micro-batches a step."""
    config = llama3_debugmodel()
    config.hf_assets_path, config.dataloader.dataset_path = str(FILES), str(FILES / "text")
    config.dump_folder = str(FILES)
    config.training.seq_len, config.training.local_batch_size, config.training.global_batch_size = 64, 4, 16
    config.training.steps = 20
    config.loss = CrossEntropyLoss.Config(global_vocab_size=2048)
    config.debug.seed = 1
    config.checkpoint.enable = config.validator.enable = False
    return config


def main() -> None:
    """Train on CPUs."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        written_files()
    dist.barrier()
    torch.autograd.set_multithreading_enabled(False)  # as torchtitan does where it makes the process group
    config = debugmodel()
    config.training.mixed_precision_param = "float32"
    for layer in config.model_spec.model.layers:  # the other attentions have no backward on CPUs
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    trainer = config.build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):  # gloo has no other reduction
            module.set_force_sum_reduction_for_comms(True)

    # Without `every=1`, measuring takes 1 % of the run's time, or 10 seconds.
    attach(trainer, unit="sequences", clips=True, every=1, log="runs/torchtitan-debug")
    trainer.train()

    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
