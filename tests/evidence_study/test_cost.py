"""The study of cost: which contestants run where, its table, and its figure."""

from __future__ import annotations

from pathlib import Path

import pytest
from evidence.cost import CONTESTANTS, added_time, pieces, plot
from evidence.work import Done, Store


def stored(folder: Path) -> Store:
    """Made-up seconds: sonde adds a tenth, on 1 and on 8 ranks."""
    store = Store(folder)
    for ranks, name, factor in ((1, "control", 1.0), (1, "sonde", 1.1), (8, "control", 1.0), (8, "sonde", 1.1)):
        arguments = {"contestant": name, "shape": "0.9M", "micro_batches": 4, "ranks": ranks}
        store.append("cost", Done(arguments, {"seconds": [[[0.02, 0.02 * factor]] * 3] * 2, "cores": 2}, 1.0, "abc"))
    missing = {"contestant": "fairscale", "shape": "0.9M", "micro_batches": 4, "ranks": 1}
    store.append("cost", Done(missing, {"missing": "fairscale"}, 1.0, "abc"))
    return store


def test_the_table_has_what_was_added_and_says_where_ranks_share_cores(tmp_path: Path) -> None:
    head, *rows = added_time(stored(tmp_path))
    assert head[2:] == ["no probe again (control)", "sonde"]
    assert rows == [
        [f"0.9M, {setup}", "20 ms", "+0.0% [+0.0%, +0.0%]", "+10.0% [+10.0%, +10.0%]"]
        for setup in ("1 × 4", "8 × 4, on 2 cores")
    ]


def test_the_figure_has_a_point_for_each_number(tmp_path: Path) -> None:
    drawn = [points.data_source.data for points in plot(stored(tmp_path)).renderers[1::2]]
    assert [data["middle"] for data in drawn] == [[1.0, 1.0], [pytest.approx(1.1), pytest.approx(1.1)]]


def test_each_contestant_is_timed_where_it_has_something_to_measure() -> None:
    where = {
        name: {(p["micro_batches"], p["ranks"]) for p in pieces(False) if p["contestant"] == name}
        for name in CONTESTANTS
    }
    over_ranks = {(2, 2), (2, 4), (2, 8)}
    assert where["control"] == over_ranks | {(1, 1), (4, 1), (16, 1)}
    assert where["sonde"] == where["fairscale"] == where["adaptdl"] == over_ranks | {(4, 1), (16, 1)}
    assert where["sonde-examples"] == {(1, 1)}
    assert where["snapshot"] == {(4, 1), (16, 1)}
    assert where["k-diffusion"] == over_ranks
