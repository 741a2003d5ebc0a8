"""What the blocks of the page on trainers assume: a trainer, a module or an accelerator, and a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sonde
from tests.docs_blocks import Names, Page
from tests.docs_scenes import scene


@scene("trainers.md")
def trainers(page: Page) -> None:
    names = page.run(of_transformers)
    if names:
        assert sonde.read_run("runs/my-run").readings[-1].window == names["trainer"].state.global_step == 14
    names = page.run(of_transformers)
    if names:
        reading = names["probe"].reading()
        assert (reading.windows, reading.unit) == (14, "documents")
        assert 5 < reading.units_per_window < 6  # two rows each: six in most windows, four in the last of an epoch
    names = page.run(of_trl)
    if names:
        readings = [probe.reading() for probe in (names["sft_probe"], names["dpo_probe"])]
        assert [(reading.windows, reading.unit) for reading in readings] == [(2, "sequences"), (2, "pairs")]
    Path("runs/my-run/records.jsonl").unlink(missing_ok=True)
    names = page.run(of_lightning)
    if names:
        run = sonde.read_run("runs/my-run")
        assert (run.header.unit, run.readings[-1].window) == ("images", names["trainer"].global_step)
    Path("runs/my-run/records.jsonl").unlink(missing_ok=True)
    names = page.run(of_accelerate)
    if names:
        train(names)
        last = sonde.read_run("runs/my-run").readings[-1]
        assert (last.window, last.dropped, last.metrics["gns/units_per_window"]) == (2, {}, 8)
    names = page.run(of_accelerate_prepared)
    if names:
        train(names)
        reading = names["probe"].reading()
        assert (reading.windows, reading.dropped, reading.units_per_window) == (2, {}, 8)
        assert reading.effective_units < 8  # sequences have unequal numbers of tokens


def of_transformers() -> Names:
    from tests.integrations.hf_trainer import trainer_of

    Path("runs/my-run/records.jsonl").unlink(missing_ok=True)
    return {"trainer": trainer_of(Path("trained"))}


def of_trl() -> Names:
    from tests.integrations.trl_trainers import dpo, sft

    return {"sft": sft(Path("trained"), max_steps=2, lora=True), "dpo": dpo(Path("trained"), max_steps=2)}


def of_lightning() -> Names:
    from tests.integrations.lightning_module import Module

    return {"module": Module()}


def of_accelerate() -> Names:
    """Windows of two micro-batches of 4 sequences."""
    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from tests.integrations.hf_trainer import gpt2, padded, ragged_texts

    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)
    model = gpt2()
    rows: Any = ragged_texts(16)
    return {
        "accelerator": Accelerator(cpu=True, gradient_accumulation_steps=2),
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "loader": torch.utils.data.DataLoader(rows, batch_size=4, collate_fn=padded),
    }


def of_accelerate_prepared() -> Names:
    names = of_accelerate()
    three = ("model", "optimizer", "loader")
    return names | dict(zip(three, names["accelerator"].prepare(*(names[name] for name in three)), strict=True))


def train(names: Names) -> None:
    """The loop that needs no line of sonde."""
    accelerator = names["accelerator"]
    for batch in names["loader"]:
        with accelerator.accumulate(names["model"]):
            accelerator.backward(names["model"](**batch).loss)
            names["optimizer"].step()
            names["optimizer"].zero_grad()
    accelerator.end_training()
