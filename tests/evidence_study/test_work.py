"""Pieces of work are done once, whatever interrupts them, and a piece that fails stops no other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evidence.work import Arguments, Done, Store, Study, time_left, to_do, work_off


def halved(of: int) -> Mapping[str, Any]:
    if of < 0:
        raise ValueError("negative")
    return {"half": of / 2}


def pieces(smoke: bool) -> Sequence[Arguments]:
    return [{"of": of} for of in ((1,) if smoke else (1, -1, 3))]


STUDY = Study("halves", pieces, halved)


def test_each_piece_is_done_once_and_a_failed_one_again(tmp_path: Path) -> None:
    store, said = Store(tmp_path), list[str]()
    waiting = to_do([STUDY], store, smoke=False)
    failed = work_off(waiting, store, 1, said.append)
    assert [done.result for done in store.read("halves")] == [{"half": 0.5}, {"half": 1.5}]
    assert failed == ['halves {"of": -1}: ValueError: negative']
    assert "0 left" in said[-1]
    assert [arguments for _, arguments in to_do([STUDY], store, smoke=False)] == [{"of": -1}]
    assert to_do([STUDY], store, smoke=True) == []


def test_a_line_that_was_cut_off_is_done_anew(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for of in (1, 3):
        store.append("halves", Done({"of": of}, {}, 1.0, "abc"))
    file = tmp_path / "halves.jsonl"
    file.write_bytes(file.read_bytes()[:-9])
    assert [done.arguments for done in store.read("halves")] == [{"of": 1}]
    store.append("halves", Done({"of": 5}, {}, 1.0, "abc"))
    assert [done.arguments for done in store.read("halves")] == [{"of": 1}, {"of": 5}]


def test_workers_do_what_one_process_does(tmp_path: Path) -> None:
    alone, together = Store(tmp_path / "1"), Store(tmp_path / "2")
    for store, jobs in ((alone, 1), (together, 2)):
        work_off(to_do([STUDY], store, smoke=False), store, jobs, lambda _: None)
    assert {str(d.result) for d in alone.read("halves")} == {str(d.result) for d in together.read("halves")}


def test_the_time_that_is_left_is_by_the_mean_of_each_study() -> None:
    assert time_left(["a", "a", "b"], {"a": [1.0, 3.0], "b": [10.0]}) == 14.0
    assert time_left(["new"], {"a": [1.0, 3.0]}) == 2.0
