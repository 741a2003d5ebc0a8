"""Moves small device vectors to the host without making the training path wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Note = TypeVar("Note")


@dataclass(frozen=True)
class _Batch(Generic[Note]):
    host: Tensor
    sizes: list[list[int]]
    notes: list[Note]
    copied: torch.cuda.Event | None


class Mailbox(Generic[Note]):
    """Vectors are posted on the device, sent together by one asynchronous copy, and received when they have arrived."""

    def __init__(self) -> None:
        self._posted: list[tuple[dist.Work | None, list[Tensor], Note]] = []
        self._sent: list[_Batch[Note]] = []

    def post(self, parts: list[Tensor], note: Note, work: dist.Work | None = None) -> None:
        """Put vectors in, with a note for the receiver.

        Args:
            parts: 1-D tensors of one floating dtype on one device; they must not be written to again.
            note: handed back with them.
            work: a collective that is still writing to them.
        """
        self._posted.append((work, parts, note))

    def send(self, *, abandon_unfinished: bool = False) -> None:
        """Start copying everything posted so far.

        Args:
            abandon_unfinished: leave out what a collective has not finished yet, as one whose peers have failed never
                will, or has failed to.

        Raises:
            RuntimeError: when a collective has failed; what the others wrote is sent.
        """
        posted, self._posted = self._posted, []
        finished: list[tuple[list[Tensor], Note]] = []
        failure: RuntimeError | None = None
        for work, parts, note in posted:
            if abandon_unfinished and work is not None and not work.is_completed():
                continue
            try:
                if work is not None:
                    work.wait()  # on a GPU only the stream waits; gloo finished it during the windows in between
            except RuntimeError as error:
                failure = error
                continue
            finished.append((parts, note))
        if finished:
            self._copy(finished)
        if failure is not None and not abandon_unfinished:
            raise failure

    def _copy(self, finished: list[tuple[list[Tensor], Note]]) -> None:
        packed = torch.cat([part for parts, _ in finished for part in parts])
        sizes = [[part.numel() for part in parts] for parts, _ in finished]
        notes = [note for _, note in finished]
        copied = None
        if packed.is_cuda:
            host = torch.empty(packed.shape, dtype=packed.dtype, device="cpu", pin_memory=True)
            host.copy_(packed, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(packed.device))
        else:
            host = packed.cpu()
        self._sent.append(_Batch(host, sizes, notes, copied))

    def receive(self, *, wait: bool) -> list[tuple[list[Tensor], Note]]:
        """What has arrived since the last call, in the order posted: parts on the CPU, and their note.

        Args:
            wait: wait for everything that was sent; the only place that waits for the device.
        """
        arrived: list[tuple[list[Tensor], Note]] = []
        while self._sent:
            batch = self._sent[0]
            if batch.copied is not None and not batch.copied.query():
                if not wait:
                    break
                batch.copied.synchronize()
            offset = 0
            for sizes, note in zip(batch.sizes, batch.notes, strict=True):
                vectors = batch.host[offset : offset + sum(sizes)]
                arrived.append((list(vectors.split(sizes)), note))
                offset += sum(sizes)
            del self._sent[0]
        return arrived
