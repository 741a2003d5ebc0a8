"""A thread that reads a probe while another trains, as a dashboard does."""

from __future__ import annotations

import threading

import torch

from tests.batch_size.loops import attached, small_model, train


def test_a_thread_may_read_while_another_trains() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    failures: list[BaseException] = []
    is_done = threading.Event()
    with attached(model, optimizer, log_every=1) as probe:

        def read() -> None:
            try:
                while not is_done.is_set():
                    probe.reading()
                    probe.state_dict()
            except BaseException as error:
                failures.append(error)

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        try:
            train(model, probe, optimizer, windows=60)
        finally:
            is_done.set()
            for reader in readers:
                reader.join(timeout=60)
        assert failures == []
        assert probe.reading().windows == 60  # none twice, none lost
