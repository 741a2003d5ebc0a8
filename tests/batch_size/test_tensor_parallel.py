"""The noise scale under tensor and sequence parallelism, alone and below FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.batch_size.cut_models import assert_same_values
from tests.batch_size.sharded_loops import Loop, train
from tests.ranks import Ranks

LOOPS = {
    f"{cut}{', no clip' * (not clips)}{', weights' * weighted}": Loop(cut=cut, clips=clips, weighted=weighted)
    for cut in ("tp", "sp", "fsdp over tp", "fsdp over sp")
    for clips, weighted in ((True, False), (False, True))
}
MORE = {"fsdp over sp, every piece reduces": Loop(cut="fsdp over sp", sync="every", clips=False)}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("tp", marks=pytest.mark.shows("noise scale", "TP")),
        pytest.param("sp", marks=pytest.mark.shows("noise scale", "SP")),
        pytest.param("fsdp over tp", marks=pytest.mark.shows("noise scale", "FSDP2 over TP")),
        pytest.param("fsdp over sp", marks=pytest.mark.shows("noise scale", "FSDP2 over SP")),
        *(name for name in LOOPS | MORE if "," in name),
    ],
)
def test_values_and_training_unchanged(request: pytest.FixtureRequest, name: str) -> None:
    loop = (LOOPS | MORE)[name]
    ranks: Ranks = request.getfixturevalue("ranks4" if "fsdp" in loop.cut else "ranks2")
    results = ranks(_values, loop)
    for result in results:
        assert result["alerts"] == {}
        for window, exact in zip(result["windows"], result["by hand"], strict=True):
            assert window is not None, result["reading"].dropped
            assert_same_values(window, exact, result["reading"].effective_units)
        assert result["setup"]["ranks"] == (2 if "fsdp" in loop.cut else 1)
    assert len({str(result["windows"]) for result in results}) == 1
    assert_unchanged(results, ranks(_values, loop, False), loop)


def assert_unchanged(results: list[dict[str, Any]], without: list[dict[str, Any]], loop: Loop) -> None:
    """Bit for bit. Partial gradients take one small collective a piece besides, and one a window."""
    n_partial = loop.windows * (2 + (loop.cut == "sp")) if loop.cut.endswith("sp") else 0
    for with_probe, unprobed in zip(results, without, strict=True):
        assert all(map(torch.equal, with_probe["weights"], unprobed["weights"]))
        assert with_probe["norms"] == unprobed["norms"]
        n_more = with_probe["collectives"] - unprobed["collectives"]
        assert n_more == n_partial + (0 if loop.clips else loop.windows)


def _values(loop: Loop, probed: bool = True) -> dict[str, Any]:
    return train(loop, probed=probed, values=True)
