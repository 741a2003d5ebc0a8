"""The benchmark of what metrics mean."""

from __future__ import annotations

import math

import pytest

from benchmarks import metric_meaning


def test_the_exact_noise_scale_of_signs() -> None:
    """Of one element that has a signal of 1 and noise of variance 1: P = erf(√(B/2)), and f by its definition."""
    signal = metric_meaning.signals()["all alike"][:1]
    at = metric_meaning.sign_gains(signal, 2.0)
    assert at.real == pytest.approx(math.erf(1.0))
    assert at.promised == pytest.approx(math.erf(1.0) + math.exp(-1.0) / math.sqrt(math.pi))
    assert at.promised_sq == pytest.approx(1.0 + 0.5)


def test_the_page_as_committed_is_what_a_run_gives() -> None:
    """The rows of signs are closed forms: the same at every run."""
    page = metric_meaning.RESULTS.read_text()
    for row in metric_meaning.rows(metric_meaning.Options(), ["sign"]):
        assert "| " + " | ".join(map(str, row)) + " |" in page
