"""A real Trainer of Lightning on two ranks, under DDP and cut by FSDP2, against one process with all the pieces."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import pytest
import torch

from tests.integrations.as_launched import as_launched, free_port, reading_of_all, result_of
from tests.integrations.plain_loop import BY_PIECES, Piece, plain_loop, same_numbers, whole_weights
from tests.ranks import Ranks

pytest.importorskip("lightning", reason="needs lightning: pip install '.[lightning]'")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


def _trained(port: int, sharded: bool) -> dict[str, Any]:
    """Once without sonde and once with it."""
    with as_launched(port):
        import torch.distributed as dist
        from lightning.pytorch.plugins.environments import TorchElasticEnvironment
        from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
        from torch.distributed.fsdp import fully_shard

        from sonde.integrations.lightning import NoiseScale
        from tests.integrations.lightning_module import Module, batches, trainer_of

        class OfRank(Module):
            def configure_model(self) -> None:
                if sharded and not hasattr(self, "is_cut"):
                    self.is_cut = True
                    mesh = self.device_mesh["data_parallel"]
                    fully_shard(self.net[0], mesh=mesh)
                    fully_shard(self.net, mesh=mesh)

            def train_dataloader(self) -> Any:
                own = batches()[dist.get_rank() :: 2]
                return torch.utils.data.DataLoader(own, batch_size=None)  # type: ignore[arg-type]

        def fitted(*callbacks: Any) -> torch.Tensor:
            strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1) if sharded else DDPStrategy()
            module, environment = OfRank(), TorchElasticEnvironment()
            options = {"strategy": strategy, "plugins": [environment], "devices": 2, "use_distributed_sampler": False}
            clip = {"gradient_clip_val": None} if sharded else {}
            trainer_of(tempfile.mkdtemp(), *callbacks, **options, **clip).fit(module)
            return whole_weights(module)

        os.environ |= {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0"}
        try:
            plain, probe = fitted(), NoiseScale(unit="rows", on_error="raise", **BY_PIECES)
            return result_of(plain, fitted(probe), probe.reading())
        finally:
            for name in ("TORCHELASTIC_RUN_ID", "GROUP_RANK"):
                os.environ.pop(name)


@pytest.mark.parametrize("sharded", [False, True])
def test_two_ranks(ranks2: Ranks, sharded: bool) -> None:
    from tests.integrations.lightning_module import batches, loss_of, network

    reading = reading_of_all(ranks2(_trained, free_port(), sharded))
    assert reading.windows == 6
    data = batches()
    own = [[Piece({"batch": batch}, {"units": len(batch)}, 1 / 6) for batch in data[rank::2]] for rank in (0, 1)]
    windows = [own[0][k : k + 3] + own[1][k : k + 3] for k in (0, 3, 6)] * 2
    assert [len(window) for window in windows[:3]] == [6, 6, 2]

    def loss_of_piece(model: Any, piece: Piece) -> torch.Tensor:
        return loss_of(model, piece.inputs["batch"]) * piece.weight

    assert same_numbers(reading, plain_loop(network(), windows, loss_of_piece, max_norm=1e9 if sharded else 0.5))
