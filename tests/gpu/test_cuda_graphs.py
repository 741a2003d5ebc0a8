"""On a CUDA device: real graphs of whole steps, of callables and of `mode="reduce-overhead"`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import sonde
from tests.batch_size.loops import attached, batch, mean_loss, small_model
from tests.gpu.graphs import compiled, graphed, graphed_layer, layer, windows_of

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # What torch itself says while it makes graphs and compiles, before sonde is attached.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),
]

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("n_backwards", [1, 2])
@pytest.mark.parametrize(("make", "alike"), [(graphed, small_model), (graphed_layer, small_model), (compiled, layer)])
def test_gradients_that_a_graph_owns_are_read_before_it_overwrites_them(
    make: Callable[[torch.device], nn.Module], alike: Callable[[], nn.Module], n_backwards: int
) -> None:
    measured, by_hand, reading = windows_of(make(DEVICE), DEVICE, alike=alike, n_backwards=n_backwards)
    assert reading.windows >= 1, reading.dropped
    for got, exact in zip(measured, by_hand, strict=True):
        if got is not None:
            assert got == pytest.approx(exact, rel=1e-3, abs=1e-3 * exact[0])  # products round otherwise on a GPU


def train(*, probed: bool) -> tuple[list[torch.Tensor], sonde.NoiseScaleProbe | None]:
    """Some windows, then the backward of one in a graph that is replayed."""
    model = small_model().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x, y = (t.to(DEVICE) for t in batch(4, torch.Generator().manual_seed(0)))
    probe = attached(model, optimizer, units_per_piece=4) if probed else None
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            mean_loss(model, x, y).backward()
            mean_loss(model, y.repeat(1, 4), y).backward()
            if probe:
                probe.step()
            optimizer.step()
            optimizer.zero_grad()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mean_loss(model, x, y).backward()
        mean_loss(model, y.repeat(1, 4), y).backward()
    for _ in range(3):
        x.mul_(0.9)
        graph.replay()
        if probe:
            probe.step()
        optimizer.step()
    torch.cuda.synchronize()
    if probe:
        probe.close()
    return [p.detach().clone() for p in model.parameters()], probe


def test_a_step_in_a_graph_holds_nothing_of_sonde() -> None:
    weights, probe = train(probed=True)
    plain, _ = train(probed=False)
    assert all(map(torch.equal, weights, plain))
    assert probe is not None
    reading = probe.reading()
    assert reading.windows == 3, reading.dropped
    assert sum(reading.dropped.values()) == 3
    assert all("a graph that is replayed runs no hook" in reason for reason in reading.dropped)
