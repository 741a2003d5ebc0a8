"""Of up to 4,096 ranks, each adds one collective to a window, and its bytes stop growing at 256 ranks."""

from __future__ import annotations

from benchmarks.windows_at_scale import KINDS, RANKS, measure

from tests.new_process import in_new_process

BYTES_PER_MARK = 16
"""Two fp64 numbers by which ranks with the same data are recognised, for each rank with data of its own."""
MOST_MARKED = 256


def test_collectives_do_not_grow_with_ranks_nor_bytes_beyond_256() -> None:
    found = in_new_process(measure)
    assert [(sent.kind, sent.n_ranks) for sent in found] == [(kind, n) for kind in KINDS for n in RANKS]
    for sent in found:
        assert (sent.in_pieces, sent.collectives, sent.with_clip) == (0, 1, 1)
    for kind in KINDS:
        n_bytes = {sent.n_ranks: sent.n_bytes for sent in found if sent.kind == kind}
        n_sharing = 4 if "tensor" in kind else 1
        without_marks = {n - BYTES_PER_MARK * min(ranks // n_sharing, MOST_MARKED) for ranks, n in n_bytes.items()}
        assert len(without_marks) == 1, n_bytes
        assert n_bytes[4096] < 16_000
