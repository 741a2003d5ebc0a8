"""Windows on their way from the device to the tracker and the journal."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from sonde.batch_size.log import NoiseScaleLog, WindowFacts
from sonde.batch_size.readback import Mailbox
from sonde.batch_size.setup import describe_window
from sonde.batch_size.stats.tracker import NoiseScaleTracker
from sonde.batch_size.taps.window_reader import Window, WindowReader
from sonde.batch_size.taps.window_sums import as_vector


@dataclass(frozen=True)
class _Note:
    """What the host knows of a window whose numbers are still on their way."""

    window: int
    time: float
    seconds: float
    clips: bool
    tap: str
    scalar_names: tuple[str, ...]
    witness_sizes: Mapping[int, int]


class Delivery:
    """Takes each ended window's numbers to the host without waiting, and has them averaged and written there.

    Args:
        reader: where windows come from.
        tracker: what averages them.
        journal: what writes them down.
        n_ranks: data-parallel ranks.
        knows_norm: whether the metric is the plain one, so that the tracker knows the gradient's norm.
        say: tells people of the first window.
    """

    def __init__(
        self,
        reader: WindowReader,
        tracker: NoiseScaleTracker,
        journal: NoiseScaleLog,
        *,
        n_ranks: int,
        knows_norm: bool,
        say: Callable[[str], None],
    ) -> None:
        self.window = 0
        """Windows ended so far, those before a restart included."""
        self._n_posted = 0
        self._reader, self._tracker, self._journal = reader, tracker, journal
        self._n_ranks, self._knows_norm, self._say = n_ranks, knows_norm, say
        self._mailbox: Mailbox[_Note] = Mailbox()
        self._seconds_told = 0.0
        self._is_first = True

    def post(
        self,
        window: Window,
        scalars: Mapping[str, float | Tensor],
        *,
        norm: Tensor | None,
        max_norm: float | None,
        seconds: float,
    ) -> None:
        """Put a window's numbers in the post.

        Args:
            window: what was read of it.
            scalars: the user's own.
            norm: of the gradient before it was clipped; None when it was not.
            max_norm: by which it was clipped; None when it was not.
            seconds: host time that the probe has taken so far, over all windows.
        """
        self.window += 1
        self._n_posted += 1
        extras: list[float | Tensor] = list(scalars.values())
        if norm is not None and max_norm is not None:
            extras = [norm, norm > max_norm, *extras]
        note = _Note(
            window=self.window,
            time=time.time(),
            seconds=seconds - self._seconds_told,
            clips=norm is not None,
            tap=self._reader.tap_name,
            scalar_names=tuple(scalars),
            witness_sizes=window.witness_sizes,
        )
        self._seconds_told = seconds
        parts = [window.packed, window.sq_norm, window.witness, as_vector(extras, self._reader.device)]
        self._mailbox.post(parts, note, window.work)

    def send_if_due(self, every: int) -> bool:
        """Send after the first window, and then every so many.

        Returns:
            Whether it did.
        """
        is_due = self._n_posted == 1 or self.window % every == 0
        if is_due:
            self.send()
        return is_due

    def send(self, *, abandon_unfinished: bool = False) -> None:
        """Start the copy of what has been posted; see `Mailbox.send`."""
        self._mailbox.send(abandon_unfinished=abandon_unfinished)

    def receive(self, *, wait: bool) -> None:
        """Average and write down what has arrived.

        Args:
            wait: wait for everything that was sent.
        """
        for (packed, big, witness, extras), note in self._mailbox.receive(wait=wait):
            row = self._reader.row(packed, big, witness, note.witness_sizes)
            drop = self._tracker.update(row)
            self._reader.took(row, is_sound=drop is None)
            values = extras.tolist()
            norm, clipped = (values[0], bool(values[1])) if note.clips else (self._plain_norm(), None)
            facts = WindowFacts(
                window=note.window,
                time=note.time,
                seconds=note.seconds,
                units=row.n_units,
                n_pieces=row.n_pieces,
                tap=note.tap,
                norm=norm,
                clipped=clipped,
                scalars=dict(zip(note.scalar_names, values[2 * note.clips :], strict=True)),
            )
            if self._is_first:
                self._is_first = False
                self._say(describe_window(row.n_pieces, row.n_units, self._n_ranks, self._tracker.unit))
            self._journal.window(facts, drop)

    def _plain_norm(self) -> float | None:
        """Norm of the window that the tracker has just taken; None in another metric."""
        return self._tracker.norm if self._knows_norm else None
