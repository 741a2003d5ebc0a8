"""Folded gradients: exact where they fit, right on average where they do not, and never of gradient size."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from sonde.batch_size.taps.gradient_sketch import GradientSketch, bucket_counts
from sonde.batch_size.taps.step_sketches import StepSketches
from tests.batch_size.per_example.live_memory import LiveMemory

CPU = torch.device("cpu")


def sketch_of(
    parameters: Sequence[Tensor], groups: Sequence[int], *, kib: int = 0, n_groups: int | None = None
) -> GradientSketch:
    n = max(groups) + 1 if n_groups is None else n_groups
    return GradientSketch(parameters, groups, n_groups=n, staging_bytes=kib * 1024, device=CPU)


def test_few_elements_are_kept_as_they_are() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 5), (7,), (), (2, 3, 4, 4), (0, 3)]
    a, b = ([torch.randn(shape, generator=generator) for shape in shapes] for _ in range(2))
    b[3] = b[3].to(memory_format=torch.channels_last)
    b[1] = b[1].bfloat16()
    sketch = sketch_of(a, [0, 1, 0, 1, 0])
    assert sketch.is_exact
    assert sketch.error == 0
    one, two = sketch.of([*a[:2], None, *a[3:]], 5), sketch.of(b, 5)
    expected = [float((a[0] * b[0]).double().sum()), sum(float((a[i].double() * b[i].double()).sum()) for i in (1, 3))]
    assert sketch.products(one, two).tolist() == pytest.approx(expected, rel=1e-6)


def gradients(kind: str) -> tuple[list[Tensor], list[Tensor]]:
    """Two gradients with 0.5 of the angle's cosine or so; "alike" has rows that are multiples of each other."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if kind == "random":
        matrix, other = draw(130, 256), draw(130, 256)
    elif kind == "alike":  # with rows as long as the sketch's, and shorter ones that fit into them
        matrix, other = draw(130, 1) * draw(1, 256), draw(130, 1) * draw(1, 256)
    else:
        # So many rows that sums of rows without random signs would be 3 % too large.
        matrix, other = torch.ones(520, 256).double(), draw(520, 256) + 0.1
    a = [matrix, draw(2048), draw(40, 16, 3, 3).to(memory_format=torch.channels_last), draw(5)]
    b = [matrix + other, a[1] + draw(2048), a[2].flip(0), a[3]]
    return a, [b[0], b[1], b[2].to(memory_format=torch.channels_last), b[3]]


@pytest.mark.parametrize("kind", ["random", "alike", "constant"])
@pytest.mark.parametrize("groups", [[0, 0, 0, 0], [0, 1, 2, 3]], ids=["one group", "each its own"])
def test_products_are_right_on_average_with_the_error_that_is_said(kind: str, groups: list[int]) -> None:
    a, b = gradients(kind)
    a, b = [g.float() for g in a], [g.float() for g in b]
    sketch, n_keys = sketch_of(a, groups), 150
    assert not sketch.is_exact
    products = torch.stack([sketch.products(sketch.of(a, key), sketch.of(b, key)) for key in range(n_keys)])
    for group, size in enumerate(sketch.sizes):
        own = [i for i, of in enumerate(groups) if of == group]
        exact = sum(float((a[i].double() * b[i].double()).sum()) for i in own)
        norms = [math.sqrt(sum(float(g[i].double().square().sum()) for i in own)) for g in (a, b)]
        values = products[:, group]
        if size == sum(a[i].numel() for i in own):
            assert values.tolist() == pytest.approx([exact] * n_keys, rel=1e-5)
            continue
        assert abs(float(values.mean()) - exact) < 4 * float(values.std()) / math.sqrt(n_keys)
        # √((|a|²|b|² + ⟨a, b⟩²)/m) for independent signs; rows that are multiples of each other at most double it.
        said = math.sqrt(((norms[0] * norms[1]) ** 2 + exact**2) / size)
        assert 0.3 * said < float(values.std()) < 2 * said


def test_a_missing_gradient_counts_as_0_and_the_key_decides_the_signs() -> None:
    a, _ = gradients("random")
    sketch = sketch_of(a, [0, 0, 0, 0])
    without = sketch.of([a[0], None, a[2], a[3]], 3)
    assert torch.allclose(without, sketch.of([a[0], torch.zeros_like(a[1]), a[2], a[3]], 3))
    assert torch.equal(sketch.of(a, 3), sketch_of(a, [0, 0, 0, 0]).of(a, 3))
    assert not torch.allclose(sketch.of(a, 3), sketch.of(a, 4))


def test_layouts_do_not_matter() -> None:
    """A gradient may come with other strides than the one before."""
    generator = torch.Generator().manual_seed(2)
    shapes: list[tuple[int, ...]] = [(5, 3000), (1, 64, 30, 30), (6000,), (3, 4, 5000)]
    grads = [torch.randn(shape, generator=generator) for shape in shapes]
    strided = [
        grads[0].T.contiguous().T,
        grads[1].to(memory_format=torch.channels_last),
        grads[2].repeat_interleave(2)[::2],
        grads[3].permute(2, 0, 1).contiguous().permute(1, 2, 0),
    ]
    assert not any(g.is_contiguous() for g in strided)
    sketch = sketch_of(grads, [0, 0, 1, 1])
    assert torch.equal(sketch.of(grads, 1), sketch.of(strided, 1))


def test_buckets_are_shared_out() -> None:
    assert bucket_counts([10], 2048) == [10]
    assert bucket_counts([10**6], 2048) == [2048]
    assert bucket_counts([10**6, 3, 0, 10**9], 2051) == [1024, 3, 0, 1024]
    assert bucket_counts([10**6] * 5000, 2048) == [1] * 5000


@pytest.mark.parametrize("groups", [[0, 0, 0], [0, 1, 2]], ids=["one group", "each its own"])
def test_memory_is_bounded_by_the_staging_area(groups: list[int]) -> None:
    grads = [torch.ones(2000, 500), torch.ones(300_000, dtype=torch.bfloat16), torch.ones(500, 2000).T]
    sketch = sketch_of(grads, groups, kib=256)
    with LiveMemory() as memory:
        first = sketch.of(grads, 1)
        sketch.products(first, sketch.of(grads, 1))
    assert memory.peak < 256 * 1024 < 0.05 * sum(g.numel() * g.element_size() for g in grads)


def test_windows_pair_up_if_they_follow_each_other() -> None:
    a, _ = gradients("random")
    steps = StepSketches(sketch_of(a, [0, 0, 0, 0]))
    windows = [(1, 1), (3, 1), (4, 1), (5, 1), (6, 2), (7, 1), (8, 1), (9, 1)]
    found = [steps.end_window(a, number=number, n_pieces=n) for number, n in windows]
    assert [None if step is None else step.is_second for step in found] == [
        *(False, False, True),
        *(False, None, False, True, False),
    ]
    own, with_first = found[2].products.tolist()  # type: ignore[union-attr]
    assert own == pytest.approx(with_first)  # both of a pair have the same signs
    steps.forget()
    assert steps.end_window(a, number=10, n_pieces=1).is_second is False  # type: ignore[union-attr]
    assert steps.seconds > 0


def test_random_state_is_left_alone() -> None:
    a, _ = gradients("random")
    sketch, before = sketch_of(a, [0, 0, 0, 0]), torch.get_rng_state()
    sketch.of(a, 1)
    assert torch.equal(torch.get_rng_state(), before)
