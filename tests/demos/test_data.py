from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sonde.demos.byte_lm.data import MIN_BYTES, draw_windows, find_sources, read_corpus, window_generator


def test_standard_library_is_found_in_a_fixed_order_without_its_tests() -> None:
    sources = find_sources()
    assert sources == find_sources()
    names = {source.name for source in sources}
    assert {"argparse.py", "decoder.py"} <= names
    folders = {part for source in sources for part in source.parent.parts[len(Path(sources[0]).parent.parts) :]}
    assert not folders & {"test", "tests", "site-packages"}


def test_corpus_is_the_files_one_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"x = 1\n")
    (tmp_path / "b.py").write_bytes("é".encode())
    corpus = read_corpus([tmp_path / "a.py", tmp_path / "b.py"])
    assert corpus.dtype == torch.uint8
    assert bytes(corpus.tolist()) == "x = 1\né".encode()


def test_missing_source_files_are_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "only.py").write_text("pass\n")
    with pytest.raises(FileNotFoundError, match=rf"got 5 bytes .* in {tmp_path}, expected at least 1,000,000: use"):
        find_sources(tmp_path)


def test_tests_and_installed_packages_do_not_count(tmp_path: Path) -> None:
    for folder in ("test", "json/tests", "site-packages/torch", "json"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "module.py").write_bytes(b"#" * MIN_BYTES)
    assert find_sources(tmp_path) == [tmp_path / "json" / "module.py"]


def test_windows_are_cut_from_the_whole_corpus() -> None:
    corpus = torch.arange(10, dtype=torch.uint8)
    windows = draw_windows(corpus, 200, 7, window_generator(0, 0, 0))
    assert windows.dtype == torch.int64
    assert (windows[:, 1:] - windows[:, :-1] == 1).all()
    assert set(windows[:, 0].tolist()) == {0, 1, 2}, "10 bytes hold 3 windows of 7 + 1"


def test_each_rank_step_and_seed_draws_its_own_windows_repeatably() -> None:
    def starts(seed: int, step: int, rank: int) -> tuple[int, ...]:
        corpus = torch.arange(251, dtype=torch.uint8).repeat(1000)
        return tuple(draw_windows(corpus, 8, 3, window_generator(seed, step, rank))[:, 0].tolist())

    drawn = [starts(seed, step, rank) for seed in (0, 1) for step in (0, 1, 2) for rank in (0, 1)]
    assert len(set(drawn)) == 12
    assert starts(1, 2, 1) == drawn[-1]
