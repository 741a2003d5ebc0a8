from __future__ import annotations

import pytest
import torch

from sonde.batch_size.taps.witness import Witness


@pytest.mark.parametrize(
    "shape", [(), (1,), (5,), (128,), (512, 128), (3, 1000), (64, 3, 7, 7), (1, 1, 4000), (70, 1, 90)]
)
def test_a_few_elements_spread_over_the_shape(shape: tuple[int, ...]) -> None:
    grad = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    witness = Witness([grad.shape])
    read = witness.read(0, grad)
    assert read.numel() == witness.sizes[0]
    assert min(grad.numel(), 8) <= read.numel() <= 32 or grad.numel() == 1
    assert len(set(read.reshape(-1).tolist())) == read.numel()  # each at most once
    joined = witness.join({0: read}, grad.device)
    assert torch.equal(joined[: read.numel()], read.reshape(-1).double())
    assert joined.shape == (witness.size,)
    if grad.numel() > 64:
        assert read.max() > 0.5 * grad.numel()


def test_vectors_and_matrices_from_the_whole_depth() -> None:
    parameters = [torch.zeros(64, 64) if i % 2 else torch.zeros(64) for i in range(200)]
    witness = Witness([p.shape for p in parameters])
    seen: set[int] = set()
    for _ in range(50):
        kinds = [parameters[i].dim() for i in witness.indices]
        assert (kinds.count(1), kinds.count(2)) == (8, 4)
        assert min(witness.indices) == 0
        assert max(witness.indices) == 199
        assert witness.size == 384
        seen |= set(witness.indices)
        witness.move()
    assert seen == set(range(200))  # whatever touches a parameter in every window is met


@pytest.mark.parametrize("shape", [(100,), (17, 23), (5, 6, 7)])
def test_every_element_has_its_turn(shape: tuple[int, ...]) -> None:
    grad = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    witness = Witness([grad.shape])
    seen: set[float] = set()
    for _ in range(100):
        assert witness.sizes[0] > 0
        seen |= set(witness.read(0, grad).reshape(-1).tolist())
        witness.move()
    assert len(seen) == grad.numel()


def test_sparse_reads_as_dense() -> None:
    grad = torch.sparse_coo_tensor(torch.tensor([[0, 0, 3]]), torch.ones(3, 6), (9, 6), check_invariants=True)
    witness = Witness([grad.shape])
    assert torch.equal(witness.read(0, grad), witness.read(0, grad.to_dense()))


def test_empty_parameters_are_passed_over() -> None:
    assert Witness([(0,), (0, 5), (3,)]).indices == {2}
