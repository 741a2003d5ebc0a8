"""Adds up the squared norms of single examples over one window, as one vector that ranks can sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from sonde.batch_size.hook_failures import log_failure
from sonde.batch_size.per_example.norms import PerExampleNorms
from sonde.batch_size.per_example.rules import GradientsOf
from sonde.batch_size.stats.comparisons import N_SCORES, OrderScores, order_scores
from sonde.batch_size.stats.example_sums import ExampleSums
from sonde.batch_size.stats.window_row import WindowRow
from sonde.batch_size.taps.window_sums import Named, PieceCounts, WindowSums, as_vector
from sonde.batch_size.window_clock import OwnTime
from sonde.parallel.devices import exact_bits, to_device, widened, zero_sums
from sonde.wording import plural

_MOST_DIGEST_BITS, _MOST_RANKS = 10, 4096
"""Bits of a digest of the covered parameters, or fewer: sums of its squares over so many ranks must be exact."""
_SEED = 20261122
NOTHING_COVERED = (
    "no parameter was covered: what layers were called with does not add up to the gradients, as under torch.compile, "
    "with a penalty on weights in the loss, or where 16 bits round too much"
)
"""Why a window's examples cannot be used, where the host knows no reason for a single parameter."""
SEVERAL_BACKWARDS = (
    "a piece had several backwards; from the next piece on, each example's gradients are summed before they are "
    "squared. If the backwards are of different examples, give each a piece of its own"
)
_MOST_BYTES = 64 * 2**20
"""Memory for the squared norms of one piece, of every example and parameter."""


@dataclass(frozen=True)
class _Counts:
    """What follows the squares in the vector; each is summed over ranks.

    Attributes:
        sq_weight: Σ w_b².
        n_examples: examples.
        n_pieces: pieces whose examples were read.
        n_covered: covered parameters.
        digest: of which parameters are covered.
        sq_digest: its square.
        n_reading: ranks that read any examples.
        n_parameters: measured parameters of these ranks.
        n_idle: ranks that would have read examples, and had no piece.
        n_without: ranks that read no examples, whether they would have or not.
        next: score of neighbours in the batch; see `comparisons.py`.
        opposite: of the first example and the last one, the second and the last but one, and so on.
        half: of the first example of either half, the second of either half, and so on.
        n_scores: pieces that have such scores.
    """

    sq_weight: float | Tensor = 0.0
    n_examples: float | Tensor = 0.0
    n_pieces: float | Tensor = 0.0
    n_covered: float | Tensor = 0.0
    digest: float | Tensor = 0.0
    sq_digest: float | Tensor = 0.0
    n_reading: float | Tensor = 0.0
    n_parameters: float | Tensor = 0.0
    n_idle: float | Tensor = 0.0
    n_without: float | Tensor = 0.0
    next: float | Tensor = 0.0
    opposite: float | Tensor = 0.0
    half: float | Tensor = 0.0
    n_scores: float | Tensor = 0.0


@dataclass(frozen=True)
class ExampleRow:
    """What the examples of one window gave, on the host.

    Attributes:
        sums: None if they cannot be used.
        why_not: the reason; empty if they can be used, and in a window in which examples were not read.
        covered: which parameters are covered on this rank, [parameters]; empty if examples were not read.
    """

    sums: ExampleSums | None
    why_not: str
    covered: Sequence[bool]


class ExampleWindow:
    """Adds up |h_b|²/w_b of each example of a window; no value is read on the host.

    Examples are the units of a piece, and the rows of what the model's layers are called with. A piece whose units are
    not the rows cannot be used, and says so.

    Args:
        model: as `PerExampleNorms` takes it.
        parameters: the measured ones by name.
        leaves: see `PerExampleNorms`.
        rules: see `PerExampleNorms`.
        is_sharded: whether ranks hold parts of `.grad`, whose squares are known only after the sum over ranks.
        staging_bytes: see `PerExampleNorms`.
        own: the probe's time.

    Raises:
        ValueError: for models that `PerExampleNorms` refuses.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        leaves: Sequence[Tensor],
        *,
        staging_bytes: int,
        rules: Mapping[type[nn.Module], GradientsOf] | None = None,
        is_sharded: bool = False,
        own: OwnTime,
    ) -> None:
        self._norms = PerExampleNorms(
            model, parameters=parameters, leaves=leaves, rules=rules, staging_bytes=max(staging_bytes, 2**16)
        )
        self._norms.own = own
        self._names, self._is_sharded = tuple(parameters), is_sharded
        self._device = leaves[0].device
        generator = torch.Generator(device="cpu").manual_seed(_SEED)
        self._n_digests = 2 ** min(_MOST_DIGEST_BITS, exact_bits(self._device, _MOST_RANKS) // 2)
        keys = torch.randint(self._n_digests, (len(self._names),), generator=generator, device="cpu")
        self._keys = widened(to_device(keys, self._device))
        self.reasons: dict[str, str] = {}
        """Why parameters, by name, are not covered, as far as the host knows; "" holds a reason for all of them."""
        self._reset()

    def _reset(self) -> None:
        self._small = zero_sums(len(self._names), device=self._device)
        self._sq_weight = self._small.new_zeros(())
        self._scores = self._small.new_zeros(N_SCORES)
        self._n_examples = self._n_pieces = 0

    @property
    def is_open(self) -> bool:
        """Whether examples are read now."""
        return self._norms.is_open

    @property
    def without_rule(self) -> Mapping[str, str]:
        """Parameters that no layer with a rule holds, and why."""
        return self._norms.without_rule

    def open(self) -> None:
        """Read the examples of the pieces from now on.

        Raises:
            ValueError: see `PerExampleNorms.open`.
        """
        if not self._norms.is_open:
            self._norms.open(watches_batch_norms=True)

    def close(self) -> None:
        """Read nothing until `open`; keep no hook."""
        self._norms.close()

    def begin_piece(self) -> None:
        """From here until `end_piece` all backwards are one piece: those before it, outside pieces, do not count."""
        if self._norms.is_open:
            self._norms.forget_backwards()

    def end_piece(self, counts: PieceCounts, unscale: Tensor | None) -> None:
        """Add the examples of the piece that ends here.

        Args:
            counts: of the piece.
            unscale: the factor that undoes a GradScaler's scale; None without one.
        """
        if not self._norms.is_open:
            return
        if isinstance(counts.units, Tensor) or not float(counts.units).is_integer():
            self.reasons[""] = "the number of units of a piece is no whole number that the host knows: pass an int"
            self._norms.discard()
            return
        n = int(counts.units)
        if counts.unit_weights is not None and len(counts.unit_weights) != n:  # units that count for nothing among them
            self.reasons[""] = f"the weights of {len(counts.unit_weights)} units do not say which {n} are the examples"
            self._norms.discard()
            return
        if 8 * n * len(self._names) > _MOST_BYTES:
            examples, parameters = plural(n, "example"), plural(len(self._names), "parameter")
            self.reasons[""] = f"the norms of {examples} in {parameters} take too much memory: is the unit a row?"
            self._norms.discard()
            return
        if self._norms.had_unexpected_backwards:  # taken to be of the same examples
            self.reasons[""] = SEVERAL_BACKWARDS
            self._norms.discard()
            self._norms.add_backwards_up()
            return
        try:
            squares = self._norms.take(n)
        except Exception as error:  # a bug, a mistake in a rule of the user's, or no memory left: training goes on
            log_failure(error)
            self.reasons[""] = f"reading them failed ({type(error).__name__}: {error})"
            self._norms.discard()
            return
        if squares.reasons and self.reasons.get("") == SEVERAL_BACKWARDS:
            del self.reasons[""]  # a later reason is the one to tell
        self.reasons |= squares.reasons
        weights = _weights_of_examples(counts, n, self._small)
        over_weight = torch.where(weights > 0, squares.sq_norms / weights, squares.sq_norms * 0.0).sum(1)
        self._small += over_weight if unscale is None else over_weight * unscale.square()
        self._sq_weight += weights.square().sum()
        of_gradients = torch.where(weights[:, None] > 0, squares.projections / weights[:, None], 0.0)
        self._scores += order_scores(of_gradients)
        self._n_examples += n
        self._n_pieces += 1

    def discard_piece(self) -> None:
        """Forget the present piece."""
        if self._norms.is_open:
            self._norms.discard()

    def end_window(self, sums: WindowSums, sq_norms_big: Tensor | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The numbers of the window by name; starts the next one.

        Args:
            sums: of the window's pieces, not taken yet.
            sq_norms_big: |F|² per parameter, of a sharded model this rank's share of it, [parameters]; None if examples
                were not read.

        Returns:
            The numbers to be summed over ranks, and this rank's own.
        """
        has_read = self._n_pieces > 0 and sq_norms_big is not None
        counts = _Counts(n_without=float(not has_read), n_idle=float(self._norms.is_open and not has_read))
        squares, covered = self._small.new_zeros(3, sums.n_groups), self._small.new_zeros(0)
        if has_read:
            assert sq_norms_big is not None
            is_covered = torch.isfinite(self._small)
            values = torch.stack([self._small, sums.sq_norms_over_weight, sq_norms_big]).where(is_covered, 0.0)
            squares, covered = sums.per_group(values)[:, :-1], widened(is_covered)
            counts = self._counts(covered)
        small, of_pieces, of_window = squares
        of_ranks = {"small": small, "of_pieces": of_pieces, "counts": as_vector(_values(counts), self._device)}
        own = {"covered": covered}
        (of_ranks if self._is_sharded else own)["big"] = of_window
        self._reset()
        return of_ranks, own

    def _counts(self, covered: Tensor) -> _Counts:
        """What is counted in a window whose examples were read; `covered` as 1 or 0, [parameters]."""
        digest = (self._keys * covered).sum().remainder(self._n_digests)
        scores = dict(zip(("next", "opposite", "half", "n_scores"), self._scores.unbind(), strict=True))
        return _Counts(
            sq_weight=self._sq_weight,
            n_examples=float(self._n_examples),
            n_pieces=float(self._n_pieces),
            n_covered=covered.sum(),
            digest=digest,
            sq_digest=digest.square(),
            n_reading=1.0,
            n_parameters=float(len(self._names)),
            **scores,
        )


def _weights_of_examples(counts: PieceCounts, n: int, like: Tensor) -> Tensor:
    """w_b, each example's part of its piece's weight: [examples]."""
    if counts.unit_weights is None:
        return like.new_ones(n) / n * counts.weight
    own = counts.unit_weights
    own = widened(to_device(own.detach(), like.device)) if isinstance(own, Tensor) else as_vector(own, like.device)
    return own / own.sum() * counts.weight


def _values(row: object) -> list[float | Tensor]:
    """A dataclass's values, in their order."""
    return [getattr(row, each.name) for each in fields(row)]  # type: ignore[arg-type]


def read_examples(sums: Named, row: WindowRow) -> ExampleRow:
    """Name the numbers of a window's examples once they are on the host.

    Args:
        sums: by name, summed over ranks; on the CPU.
        row: of the window's pieces.
    """
    counts = _Counts(*sums["counts"].tolist())
    n_reading, n_read = round(float(counts.n_reading)), round(float(counts.n_pieces))
    covered = [bool(each) for each in sums["covered"].tolist()]
    if not n_reading:
        # Where examples were not wanted in this window, no rank was idle.
        is_idle = row.n_pieces and round(float(counts.n_idle))
        why_not = "in no piece could one example be told from another" if is_idle else ""
        return ExampleRow(None, why_not, covered)
    n_covered = round(float(counts.n_covered) / n_reading)
    n_parameters = round(float(counts.n_parameters) / n_reading)
    why_not = ""
    if n_read != row.n_pieces:
        why_not = f"examples were read in {n_read} of {plural(row.n_pieces, 'piece')} only"
    elif n_reading * round(float(counts.sq_digest)) != round(float(counts.digest)) ** 2:
        why_not = "other parameters were covered on other ranks"
    elif not n_covered:
        why_not = NOTHING_COVERED
    elif round(float(counts.n_without)) and n_covered < n_parameters:
        # Its part of |F|², or what it says of the covered parameters, is missing.
        why_not = "a rank read no examples, so it does not know which parameters are covered"
    if why_not:
        return ExampleRow(None, why_not, covered)
    of_examples = ExampleSums(
        sq_norm_over_weight=sums["small"].double(),
        weight=row.weight,
        weight_over_units=row.weight,  # n_b = 1 throughout
        sq_weight_over_units=float(counts.sq_weight),
        n_pieces=round(float(counts.n_examples)),
        of_pieces=sums["of_pieces"].double(),
        sq_norm_big=row.sq_norm_big if n_covered == n_parameters else sums["big"].double(),
        n_covered=n_covered,
        order=OrderScores(*(float(each) for each in (counts.next, counts.opposite, counts.half, counts.n_scores))),
    )
    return ExampleRow(of_examples, "", covered or [True] * n_parameters)
