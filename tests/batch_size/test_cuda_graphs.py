"""CUDA graphs: what is recorded holds nothing of sonde, and what graphs own is read before it is overwritten.

The graphs are recorded by the CPU; see `tests/recorded_graphs.py` and `tests/pretend_device.py`. On a GPU:
`tests/gpu/test_cuda_graphs.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import sonde
from sonde.batch_size.taps.leaf_hooks import PieceGradient, is_output_of_graph
from tests.batch_size.loops import assert_same, attached, batch, mean_loss, small_model
from tests.gpu.graphs import graphed, graphed_layer, windows_of
from tests.mutants import Mutant
from tests.oracles import window_by_hand
from tests.pretend_device import DEVICE, PretendDevice, on_host
from tests.recorded_graphs import cuda_graphs_on_cpu

SIZES = (4, 2)
EAGER, REPLAYS = 2, 3
"""Windows before the graph is recorded, and replays of it."""
OVERWRITTEN = "copied, since CUDA graphs write to the same memory"
GRAPH = "a graph that is replayed runs no hook"


# A whole step in a graph.


def step_in_graph(
    device: PretendDevice,
    *,
    probed: bool,
    outside: str = "",
    declared: bool = False,
    attach_late: bool = False,
    **options: Any,
) -> tuple[list[Tensor], sonde.NoiseScaleProbe | None]:
    """Some windows as they are, then one recorded into a graph, which is replayed.

    Args:
        device: to train on.
        probed: with a probe.
        outside: what stays outside of the graph: "" nothing, "step" both steps, "clip" the clip and the optimizer's.
        declared: micro-batches are declared in the graph too, as they are outside.
        attach_late: the probe comes after the first windows.
        **options: of `attach`.

    Returns:
        The weights; and the probe, which is closed.
    """
    model = small_model().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)
    generator = torch.Generator().manual_seed(0)
    inputs = [[t.to(DEVICE) for t in batch(n, generator)] for n in SIZES]
    options = {"units_per_piece": SIZES[0]} | options
    probe = attached(model, optimizer, **options) if probed and not attach_late else None

    def backwards(*, declared: bool = True) -> None:
        for x, y in inputs:
            with probe.piece(units=len(x)) if probe and declared else contextlib.nullcontext():
                mean_loss(model, x, y).backward()

    def end() -> None:
        if probe and outside == "clip":
            probe.clip_grad_norm_(0.5)
        elif probe:
            probe.step()
        elif outside == "clip":
            sonde.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    for _ in range(EAGER):
        backwards()
        end()
        optimizer.zero_grad()
    probe = attached(model, optimizer, **options) if probed and attach_late else probe
    with device.capture() as graph:
        backwards(declared=declared)
        if not outside:
            end()
    if outside:
        end()
    for _ in range(REPLAYS):
        for window in inputs:
            for t in window:
                t.mul_(0.9)
        graph.replay()
        if outside:
            end()
    if probe:
        probe.close()
    return [on_host(p.detach()).clone() for p in model.parameters()], probe


STEPS: dict[str, dict[str, Any]] = {
    "all": {},
    "all, declared": {"declared": True},
    "backward": {"outside": "step"},
    "backward, declared": {"outside": "step", "declared": True},
    "backward, before any window": {"outside": "step", "attach_late": True},
    "backward, with a clip after it": {"outside": "clip"},
    "backward, with single examples": {"outside": "step", "per_example": "always"},
    "backward, in other metrics": {"outside": "step", "metric": ("euclidean", "sign")},
    "backward, one window in three": {"outside": "step", "every": 3},
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_in_a_graph_holds_nothing_of_sonde(name: str) -> None:
    """Replays train as without a probe, bit for bit, and windows without hooks say why."""
    with PretendDevice() as device:
        weights, probe = step_in_graph(device, probed=True, **STEPS[name])
        assert device.recorded == []
        plain, _ = step_in_graph(device, probed=False, **{k: v for k, v in STEPS[name].items() if k in ("outside",)})
        assert probe is not None
        reading = probe.reading()
    assert all(map(torch.equal, weights, plain))
    outside = STEPS[name].get("outside")
    if outside:
        n_dropped = sum(n for reason, n in reading.dropped.items() if GRAPH in reason)
        assert n_dropped == 1 + REPLAYS if "one window in three" not in name else n_dropped > 0
        if "single examples" not in name:  # which are not read of tensors of the pretended device
            assert sum(reading.dropped.values()) == n_dropped
    assert GRAPH in probe.alerts["in_cuda_graph" if outside else "cuda_graph"]


LAUNCHES = [
    Mutant(
        "leaf hooks read in a graph",
        "sonde.batch_size.taps.tap:Tap.runs_in_graph",
        "is_capturing(grad.device)",
        "False",
    ),
    Mutant(
        "a window ends in a graph", "sonde.batch_size.window_ends:WindowEnds.end", "self._reader.is_recorded()", "False"
    ),
    Mutant(
        "layers are read in a graph",
        "sonde.batch_size.per_example.norms:PerExampleNorms._whole",
        "and not is_capturing(grad.device)",
        "",
    ),
]


@pytest.mark.parametrize("mutant", LAUNCHES, ids=lambda mutant: mutant.name)
def test_what_is_launched_in_a_graph_is_noticed(mutant: Mutant) -> None:
    steps = [STEPS["all"], STEPS["backward, before any window"], STEPS["backward, with single examples"]]
    with mutant.applied(), PretendDevice() as device:
        for options in steps:
            with contextlib.suppress(Exception):  # such as a copy to the host
                step_in_graph(device, probed=True, **options)
        assert device.recorded


def test_a_clip_or_a_scalar_in_a_graph_is_refused() -> None:
    """A clip that is left out would be silent."""
    with PretendDevice() as device, attached(small_model().to(DEVICE), units_per_piece=4) as probe:
        with device.capture():
            with pytest.raises(RuntimeError, match=r"record torch\.nn\.utils\.clip_grad_norm_ instead"):
                probe.clip_grad_norm_(1.0)
            with pytest.raises(RuntimeError, match="log the tensor after each replay"):
                probe.log(loss=torch.zeros((), device=DEVICE))
            probe.log(rate=0.1)
        assert device.recorded == []


def test_examples_are_not_taken_in_a_graph() -> None:
    refused = pytest.raises(RuntimeError, match="while a CUDA graph is recorded")
    with PretendDevice() as device, sonde.PerExampleNorms(small_model().to(DEVICE)) as norms, device.capture(), refused:
        norms.take(4)


# Graphs of the model, with backwards outside.


MAKES: dict[str, Callable[[torch.device], nn.Module]] = {"model": graphed, "layer": graphed_layer}
CPU = torch.device("cpu")


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize(("n_backwards", "declared"), [(1, True), (1, False), (2, True)])
def test_graphed_callables(make: str, n_backwards: int, declared: bool) -> None:
    """A second backward overwrites the gradients of the first: the first such window is dropped, later ones copy."""
    with cuda_graphs_on_cpu():
        measured, by_hand, reading = windows_of(MAKES[make](CPU), CPU, n_backwards=n_backwards, declared=declared)
    if n_backwards == 2:
        assert measured.pop(0) is None
        assert [OVERWRITTEN in reason for reason in reading.dropped] == [True]
    assert len(measured) == reading.windows
    for got, exact in zip(measured, by_hand[-len(measured) :], strict=True):
        assert got == pytest.approx(exact, rel=1e-5, abs=1e-5 * exact[0])


def test_gradients_that_torch_refuses_to_read_drop_one_window() -> None:
    """A compiled graph's first runs mark what they returned; torch says so where it is read. (Seen on an H200.)"""
    keep, refusals = (
        PieceGradient._keep,
        ["Error: accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run."],
    )

    def refuses_once(piece: PieceGradient, grads: dict[int, Tensor]) -> None:
        if refusals:
            raise RuntimeError(refusals.pop())
        keep(piece, grads)

    with mock.patch.object(PieceGradient, "_keep", refuses_once):
        measured, by_hand, reading = windows_of(small_model(), CPU)
    assert measured.pop(0) is None
    assert [OVERWRITTEN in reason for reason in reading.dropped] == [True]
    for got, exact in zip(measured, by_hand[1:], strict=True):
        assert got == pytest.approx(exact, rel=1e-5, abs=1e-5 * exact[0])


def test_the_backwards_of_a_capture_are_no_pieces() -> None:
    with cuda_graphs_on_cpu():
        model = small_model()
        with attached(model, units_per_piece=4) as probe:
            model[3] = torch.cuda.make_graphed_callables(model[3], (torch.randn(4, 160, requires_grad=True),))
            probe.step()
            probe.reading()
            assert list(probe.alerts) == ["no_backward"]  # there was no piece


@pytest.mark.parametrize("make", MAKES)
def test_examples_of_graphed_callables_are_refused_by_name(make: str) -> None:
    with cuda_graphs_on_cpu():
        model = MAKES[make](CPU)
    with pytest.raises(ValueError, match="replayed as a whole by torch"):
        attached(model, per_example="always", units_per_piece=4)
    x, y = batch(4, torch.Generator().manual_seed(0))
    with attached(model, per_example="auto", units_per_piece=4) as probe:
        mean_loss(model, x, y).backward()
        probe.step()
        reading = probe.reading()
    assert "replayed as a whole by torch.cuda.make_graphed_callables" in reading.reason
    assert "Accumulate gradients over 2 or more micro-batches" in reading.reason


# Memory that is taken back, as by torch.compile(mode="reduce-overhead").


class TakenBack(torch.autograd.Function):
    """A linear layer that returns its gradients in the same memory each time, and takes it back in forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, memory: list[Tensor]) -> Tensor:
        for t in memory:
            t.fill_(torch.nan)
        ctx.save_for_backward(x, weight)
        ctx.memory = memory
        return x @ weight.T + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        of_weight, of_bias = ctx.memory  # held here too, so autograd copies them into `.grad`
        return grad @ weight, of_weight.copy_(grad.T @ x), of_bias.copy_(grad.sum(0)), None


class LinearInMemory(nn.Linear):
    """As `nn.Linear`."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "memory"):
            self.memory = [torch.empty_like(self.weight.detach()), torch.empty_like(self.bias.detach())]
        return TakenBack.apply(x, self.weight, self.bias, self.memory)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("n_backwards", "declared"), [(1, True), (1, False), (2, True), (3, True)])
def test_gradients_whose_memory_is_taken_back(n_backwards: int, declared: bool) -> None:
    model = small_model()
    for each in model:
        if isinstance(each, nn.Linear):
            each.__class__ = LinearInMemory
    measured, by_hand, reading = windows_of(model, CPU, n_backwards=n_backwards, declared=declared)
    if n_backwards > 1:
        assert measured.pop(0) is None
        assert [OVERWRITTEN in reason for reason in reading.dropped] == [True]
    for got, exact in zip(measured, by_hand[-len(measured) :], strict=True):
        assert got == pytest.approx(exact, rel=1e-5, abs=1e-5 * exact[0])


def test_guard_outputs_of_compiled_graphs_are_listed() -> None:
    """`torch.compile(mode="reduce-overhead")` lists what its graphs return, and autograd copies what is listed."""
    with PretendDevice():
        listed, other = torch.ones(3).to(DEVICE), torch.ones(3).to(DEVICE)
        torch._C._set_cached_tensors_enabled(True)
        torch._C._add_cached_tensor(listed)
        try:
            assert is_output_of_graph(listed)
            assert not is_output_of_graph(other)
        finally:
            torch._C._remove_cached_tensor(listed)
            torch._C._set_cached_tensors_enabled(False)


class Listed(torch.autograd.Function):
    """Returns x, and a gradient that is listed as the output of a compiled graph, and is lost at the next forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, listed: list[Tensor]) -> Tensor:
        for t in listed:
            torch._C._remove_cached_tensor(t)
            t.fill_(torch.nan)
        listed.clear()
        ctx.listed = listed
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        grad = grad.clone()
        torch._C._add_cached_tensor(grad)
        ctx.listed.append(grad)
        return grad, None


def test_gradients_that_a_compiled_graph_takes_back_are_copied() -> None:
    """Two backwards in a piece: the first one's gradients wait while the second forward runs."""
    torch._C._set_cached_tensors_enabled(True)
    try:
        with PretendDevice():
            weight = nn.Parameter(torch.arange(3.0).to(DEVICE))
            model = nn.ParameterList([weight])
            weight.grad = torch.zeros_like(weight)
            listed: list[Tensor] = []
            with attached(model) as probe:
                for factor in (1.0, 3.0):
                    with probe.piece(units=1):
                        for part in (1.0, 2.0):
                            (Listed.apply(weight, listed) * factor * part).sum().backward()
                probe.step()
                reading = probe.reading()
    finally:
        torch._C._set_cached_tensors_enabled(False)
    gradients = [torch.full((3,), 3.0 * factor, dtype=torch.float64) for factor in (1.0, 3.0)]
    assert_same(reading, window_by_hand(gradients, [1.0] * 2, [1.0] * 2, gradients[0] + gradients[1]))
