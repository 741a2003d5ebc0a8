"""The history of windows: their sizes, the windows that are set aside, and the average over the run."""

from __future__ import annotations

import json
import math

import pytest
import torch

from sonde.batch_size.stats.history import WindowHistory
from sonde.batch_size.stats.noise_scale import WindowEstimate
from sonde.batch_size.stats.reading import set_aside_alerts
from sonde.batch_size.stats.solved_window import SolvedWindow


def window(*groups: tuple[float, float], units: float = 16.0) -> SolvedWindow:
    """A window with (tr Σ, |G|²) of each group."""
    per_group = tuple(WindowEstimate(*group) for group in groups)
    total = WindowEstimate(math.fsum(x for x, _ in groups), math.fsum(y for _, y in groups))
    return SolvedWindow(
        total=total,
        per_group=per_group,
        within_between=None,
        norm=math.sqrt(total.grad_sq + total.trace_cov / units),  # |F|² = |G|² + v tr Σ
        effective_units=units,
        u=4 / units,
        witness_squares=1.0,
        witness_differences=1.0,
    )


def noisy(n: int, *, level: float = 1.0, seed: int = 0) -> list[SolvedWindow]:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(n, 2, generator=generator, dtype=torch.float64).tolist()
    return [window((level * (30 + 4 * a), level * (1 + b))) for a, b in noise]


def filled(windows: list[SolvedWindow], *, horizon: float = 20.0, groups: tuple[str, ...] = ("a",)) -> WindowHistory:
    history = WindowHistory(groups, horizon)
    for number, each in enumerate(windows, start=1):
        history.add(each, number)
    return history


def numbers_of(history: WindowHistory, name: str | None = None) -> list[float]:
    """The windows that count in a series: a group's, or that of the total."""
    ((series, row),) = [(s, names.index(name)) for names, s in history.series() if name in names]
    return series.numbers[series.trace_cov[row] != 0].tolist()


@pytest.mark.parametrize("n", [1, 2, 5, 6, 7, 11, 12, 40])
def test_every_window_is_kept_once_and_in_order(n: int) -> None:
    history = filled(noisy(n))
    assert numbers_of(history) == list(range(1, n + 1))
    assert history.run_average().windows == n
    ((_, series),) = history.series()
    assert series.ages.tolist() == list(range(n - 1, -1, -1))


def test_a_window_is_divided_by_the_median_of_its_neighbours() -> None:
    """By the definition: five windows before and five after, as far as there are any, without itself."""
    windows = noisy(30)
    ((_, series),) = filled(windows).series()
    squares = torch.tensor([w.norm**2 for w in windows], dtype=torch.float64)
    for i, each in enumerate(windows):
        near = [j for j in range(max(i - 5, 0), min(i + 6, 30)) if j != i]
        size = float(torch.quantile(squares[near], 0.5))
        assert series.trace_cov[0, i].item() == pytest.approx(each.total.trace_cov / size, rel=1e-12)
        assert series.grad_sq[0, i].item() == pytest.approx(each.total.grad_sq / size, rel=1e-12)


def test_old_windows_leave_and_long_horizons_share_entries() -> None:
    short = numbers_of(filled(noisy(300), horizon=20.0))
    assert short == list(range(300 - 80, 301))
    windows = noisy(3000)
    history = filled(windows, horizon=math.inf)
    numbers = numbers_of(history)
    assert len(numbers) <= 512 + 5
    ((_, series),) = history.series()
    total = sum(w.total.trace_cov for w in windows)
    assert series.mean_trace_cov[0].item() == pytest.approx(total / 3000, rel=1e-9)
    ratio = (series.trace_cov.sum() / series.grad_sq.sum()).item()
    assert ratio == pytest.approx(total / sum(w.total.grad_sq for w in windows), rel=0.01)


def test_the_average_over_the_run_weighs_steps_by_their_progress() -> None:
    """McCandlish et al. 2018, appendix D: Σ B/(1 + B/b) / Σ 1/(1 + B/b), B the noise scale at a step, b the batch."""
    batch, windows, exact = 16.0, [], []
    for i in range(200):
        noise_scale = 20.0 * math.exp(0.02 * i)
        grad_sq = math.exp(-0.05 * i)  # what a ratio of plain averages would weigh by
        windows.append(window((noise_scale * grad_sq, grad_sq), units=batch))
        exact.append((noise_scale, 1 / (1 + noise_scale / batch)))
    expected = sum(b * progress for b, progress in exact) / sum(progress for _, progress in exact)
    average = filled(windows).run_average()
    assert average.trace_cov is not None
    assert average.grad_sq is not None
    assert average.trace_cov / average.grad_sq == pytest.approx(expected, rel=0.03)  # sizes are medians of neighbours
    plain = sum(w.total.trace_cov for w in windows) / sum(w.total.grad_sq for w in windows)
    assert plain < 0.5 * expected


def test_a_window_that_outweighs_the_rest_is_set_aside_for_ever() -> None:
    windows = noisy(60)
    windows[39] = noisy(1, level=300.0**2)[0]
    history = WindowHistory(("a",), 20.0)
    for number, each in enumerate(windows, start=1):
        history.add(each, number)
        if number >= 40:
            assert 40 not in numbers_of(history)  # at once, and not only when its neighbours are known
    assert history.set_asides.n == 1
    assert history.set_asides.last is not None
    assert history.set_asides.last.window == 40
    assert history.set_asides.last.times == pytest.approx(300.0**2, rel=0.5)
    assert history.windows == 60
    assert history.run_average().windows == 59


def test_two_broken_windows_side_by_side_are_both_set_aside() -> None:
    windows = noisy(100)
    windows[59], windows[60] = noisy(2, level=300.0**2, seed=1)
    history = filled(windows)
    assert history.set_asides.n == 2
    assert not {60, 61} & set(numbers_of(history))


@pytest.mark.parametrize("n_groups", [1, 6])
def test_windows_of_single_parameters_are_no_outliers(n_groups: int) -> None:
    """Squares of single numbers: many are 100 times the median of ten neighbours, whose own median may be tiny."""
    generator = torch.Generator().manual_seed(0)
    pieces = torch.randn(2000, n_groups, 3, generator=generator, dtype=torch.float64)
    means, variances = pieces.mean(2), pieces.var(2)
    history = filled(
        [
            window(*((4 * v, m * m - v / 3) for m, v in zip(*row, strict=True)), units=12.0)
            for row in zip(means.tolist(), variances.tolist(), strict=True)
        ],
        groups=tuple(map(str, range(n_groups))),
    )
    assert history.set_asides.n == 0
    assert sum(history.set_asides.n_in_group.values()) <= 1


def test_a_lasting_change_of_size_sets_no_window_aside() -> None:
    history = filled(noisy(30) + noisy(30, level=1e4, seed=1))
    assert history.set_asides.n == 0
    assert numbers_of(history) == list(range(1, 61))


def test_windows_that_are_often_large_are_what_training_is_like() -> None:
    windows = noisy(200)
    for i in range(20, 200, 10):
        windows[i] = noisy(1, level=1e4, seed=i)[0]
    history = filled(windows)
    assert history.set_asides.n <= 0.05 * 200


def test_groups_that_changed_begin_anew_and_groups_that_are_gone_leave_the_total() -> None:
    windows = [window((10.0 + i % 3, 1.0), (5.0, 2.0), (100.0, 3.0)) for i in range(30)]
    history = filled(windows, groups=("a", "b", "frozen"))
    history.parameters_changed(["frozen"], gone=["frozen"], number=31)
    by_name = {name: (series, row) for names, series in history.series() for row, name in enumerate(names)}
    assert set(by_name) == {None, "a", "b"}
    series, row = by_name[None]
    ratios = (series.trace_cov[row] / series.grad_sq[row]).tolist()
    assert ratios == pytest.approx(
        [(15.0 + i % 3) / 3.0 for i in range(30)]
    )  # without the frozen group, of the past too
    history.parameters_changed(["b"], gone=[], number=31)
    assert numbers_of(history, "a") == list(range(1, 31))
    assert numbers_of(history, "b") == numbers_of(history) == []
    history.add(windows[0], 31)
    assert numbers_of(history, "b") == numbers_of(history) == [31]


def test_the_state_round_trips_through_json_and_goes_on_alike() -> None:
    first, second = filled(noisy(50)), WindowHistory(("a",), 20.0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for number, each in enumerate(noisy(20, seed=1), start=51):
        for history in (first, second):
            history.add(each, number)
    assert second.state_dict() == first.state_dict()


def test_a_state_of_another_horizon_is_refused() -> None:
    with pytest.raises(ValueError, match="horizon of 20 windows, this probe uses 30"):
        WindowHistory(("a",), 30.0).load_state_dict(filled(noisy(3)).state_dict())


def two_groups(n: int, *, spike_at: int | None = None) -> list[SolvedWindow]:
    """A large group, and one of a millionth of its size whose window `spike_at` is 1,000² times as large."""
    generator = torch.Generator().manual_seed(3)
    windows = []
    for number, (a, b, c, d) in enumerate(torch.rand(n, 4, generator=generator, dtype=torch.float64).tolist(), 1):
        small = 1e-6 * (1e6 if number == spike_at else 1.0)
        windows.append(window((30 + 4 * a, 1 + b), (small * (5 + c), small * (1 + d))))
    return windows


def test_a_window_that_outweighs_the_rest_in_one_group_is_set_aside_for_that_group() -> None:
    history = filled(two_groups(60, spike_at=40), groups=("large", "small"))
    assert 40 not in numbers_of(history, "small")
    assert 40 in numbers_of(history, "large")
    assert 40 in numbers_of(history)
    assert history.set_asides.n == 0
    assert history.set_asides.n_in_group == {"large": 0, "small": 1}
    (aside,) = history.set_asides.last_in_groups
    assert (aside.window, aside.group) == (40, "small")
    assert aside.times == pytest.approx(1e6, rel=0.5)
    restored = WindowHistory(("large", "small"), 20.0)
    restored.load_state_dict(json.loads(json.dumps(history.state_dict())))
    assert numbers_of(restored, "small") == numbers_of(history, "small")
    assert restored.set_asides.n_in_group == history.set_asides.n_in_group
    sound = filled(two_groups(60), groups=("large", "small"))
    assert sound.set_asides.n_in_group == {"large": 0, "small": 0}
    assert len(sound.series()) == 1


def test_at_once_and_when_entries_are_shared_the_group_is_as_if_its_spike_had_not_been() -> None:
    ratios = []
    for spike_at in (None, 2500):
        history = WindowHistory(("large", "small"), math.inf)
        for number, each in enumerate(two_groups(3000, spike_at=spike_at), start=1):
            history.add(each, number)
            if number == spike_at:
                assert number not in numbers_of(history, "small")  # at once
        assert len(numbers_of(history, "small")) <= 512 + 5
        ((series, row),) = [(s, names.index("small")) for names, s in history.series() if "small" in names]
        ratios.append((series.trace_cov[row].sum() / series.grad_sq[row].sum()).item())
    assert ratios[0] == pytest.approx(ratios[1], rel=1e-3)


def test_a_group_that_often_has_large_windows_keeps_them() -> None:
    windows = two_groups(200)
    for i in range(20, 200, 10):
        windows[i] = two_groups(i + 1, spike_at=i + 1)[i]
    history = filled(windows, groups=("large", "small"))
    assert 1 <= history.set_asides.n_in_group["small"] <= 0.05 * 200


def test_a_group_whose_windows_have_any_size_keeps_almost_all_of_them() -> None:
    """Rare tokens and experts: one window in 20 has 100 times its neighbours', but few outweigh a whole horizon."""
    sizes = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64).mul(2.5).exp().tolist()
    windows = [window((30.0, 1.0), (5e-6 * size, 1e-6 * size)) for size in sizes]
    history = filled(windows, groups=("large", "small"))
    assert history.set_asides.n_in_group["small"] <= 0.02 * 400


def test_a_group_that_rests_in_most_windows_is_left_alone() -> None:
    windows = [window((30.0, 1.0), (5.0, 1.0) if i % 4 == 0 else (0.0, 0.0)) for i in range(60)]
    assert filled(windows, groups=("large", "small")).set_asides.n_in_group == {"large": 0, "small": 0}


def test_a_state_with_a_window_set_aside_for_an_unknown_group_is_refused() -> None:
    state = filled(noisy(20)).state_dict()
    state["settled"][0].append(7)
    with pytest.raises(ValueError, match="unknown groups"):
        WindowHistory(("a",), 20.0).load_state_dict(state)


def test_a_group_may_have_an_empty_name() -> None:
    """Such as `lambda name: name.rpartition(".")[0]` gives parameters of the model itself."""
    windows = [window((10.0 + i % 3, 1.0), (5.0, 2.0)) for i in range(30)]
    by_name = {
        name: series.trace_cov[row]
        for names, series in filled(windows, groups=("", "layer")).series()
        for row, name in enumerate(names)
    }
    assert set(by_name) == {None, "", "layer"}
    torch.testing.assert_close(by_name[None], by_name[""] + by_name["layer"])


def test_a_window_that_is_set_aside_for_several_groups_is_named_for_each() -> None:
    windows = [window((30.0, 1.0), *[(5e-6 + 1e-7 * (i % 3), 1e-6)] * 2, (5e-6, 1e-6)) for i in range(60)]
    windows[39] = window((30.0, 1.0), (0.5, 0.1), (0.5, 0.1), (5e-6, 1e-6))
    history = filled(windows, groups=("large", "b", "c", "d"))
    assert [(aside.window, aside.group) for aside in history.set_asides.last_in_groups] == [(40, "b"), (40, "c")]
    alerts = set_aside_alerts(None, history.set_asides.last_in_groups)
    assert "window 40" in alerts["group_outweighs"]
    assert "times in group 'b'" in alerts["group_outweighs"]
    assert "times in group 'c'" in alerts["group_outweighs"]
    assert "these groups" in alerts["group_outweighs"]


def what_it_says(history: WindowHistory) -> tuple[object, ...]:
    series = [(names, s.trace_cov.tolist(), s.numbers.tolist()) for names, s in history.series()]
    return series, history.run_average().state_dict(), history.set_asides_now()


def test_what_a_history_was_asked_before_changes_no_answer() -> None:
    groups = ("large", "small")
    windows = [*two_groups(7, spike_at=7), *two_groups(5), window((3e7, 1e6), (3e-5, 1e-6)), *two_groups(7)]
    asked = WindowHistory(groups, 20.0)
    for number, each in enumerate(windows, start=1):
        asked.add(each, number)
        assert what_it_says(asked) == what_it_says(filled(windows[:number], groups=groups))
    assert (asked.set_asides.n, asked.set_asides.n_in_group["small"]) == (1, 1)

    other = filled(two_groups(12, spike_at=12), groups=groups)
    asked.load_state_dict(other.state_dict())
    assert what_it_says(asked)[2].n_in_group["small"] == 1
    asked.begin_anew(7, every=1)
    other.begin_anew(7, every=1)
    assert what_it_says(asked)[:2] == what_it_says(other)[:2]
