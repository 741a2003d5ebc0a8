from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sonde.demos.byte_lm.options import DemoOptions, Setup, decide


def _decide(*, n_gpus: int = 0, n_cores: int = 2, **options: object) -> Setup:
    return decide(replace(DemoOptions(), **options), Path("out"), n_gpus=n_gpus, n_cores=n_cores)


def test_defaults_without_a_gpu() -> None:
    setup = _decide()
    assert (setup.device, setup.n_ranks, setup.n_threads, setup.batch) == ("cpu", 2, 1, 32)
    assert (setup.n_micro_batches, setup.sequences_per_micro_batch) == (2, 8)


def test_one_rank_per_gpu_and_the_batch_grows_with_them() -> None:
    setup = _decide(n_gpus=3)
    assert (setup.device, setup.n_ranks, setup.batch) == ("cuda", 3, 48)
    assert _decide(n_gpus=3, device="cpu").device == "cpu"


def test_ranks_share_the_cores() -> None:
    assert _decide(n_cores=9).n_threads == 4
    assert _decide(n_cores=1, ranks=3).n_threads == 1


def test_default_batch_fits_any_number_of_micro_batches() -> None:
    assert _decide(micro_batches=3).batch == 2 * 15
    assert _decide(micro_batches=40).batch == 2 * 40


def test_explicit_batch_is_split_evenly() -> None:
    setup = _decide(batch=24, micro_batches=4)
    assert setup.sequences_per_micro_batch == 3
    assert setup.metadata()["batch"] == 24


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"batch": -8}, "batch must be at least 1, got -8"),
        ({"learning_rate": 0.0}, "learning_rate must be positive and finite, got 0.0: try"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"batch": 30}, "must be a multiple of ranks × micro-batches = 2 × 2, got 30: pass --batch 28"),
        ({"batch": 3}, "got 3: pass --batch 4"),
        ({"ranks": 1, "micro_batches": 1}, "need at least 2 pieces per step .* got 1 rank × 1 micro-batch: pass"),
        ({"device": "cuda"}, "no GPU was found, and --device cuda was given: pass --device cpu"),
        ({"device": "cuda", "ranks": 2, "n_gpus": 1}, "got 2 ranks and 1 GPUs: pass"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _decide(**options)  # type: ignore[arg-type]


def _read(tmp_path: Path, text: str) -> DemoOptions:
    file = tmp_path / "demo.yaml"
    file.write_text(text)
    return DemoOptions.from_file(file)


def test_config_file_gives_options(tmp_path: Path) -> None:
    options = _read(tmp_path, "steps: 12\nmicro-batches: 4\nlearning_rate: 1e-3\ndevice: cpu\nout: runs/a\n")
    assert options == DemoOptions(steps=12, micro_batches=4, learning_rate=1e-3, device="cpu", out=Path("runs/a"))


def test_empty_config_file_changes_nothing(tmp_path: Path) -> None:
    assert _read(tmp_path, "# nothing yet\n") == DemoOptions()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stpes: 3\n", r"demo.yaml holds an unknown option 'stpes': did you mean 'steps'\?"),
        ("zzz: 3\n", "unknown option 'zzz': the options are steps, ranks, "),
        ("config: other.yaml\n", "unknown option 'config'"),
        ("steps: many\n", "steps in .*demo.yaml must be a whole number, got 'many': change that line"),
        ("steps: true\n", "steps in .* must be a whole number, got True"),
        ("steps: 1.5\n", "steps in .* must be a whole number, got 1.5"),
        ("learning_rate: fast\n", "learning_rate in .* must be a number, got 'fast'"),
        ("device: gpu\n", "device in .* must be one of auto, cpu, cuda, got 'gpu'"),
        ("out: 3\n", "out in .* must be a path, got 3"),
        ("- steps\n", "must map options to values, got a list: write lines such as 'steps: 100'"),
        ("steps: [1\n", "demo.yaml is not YAML: .* line 2"),
    ],
)
def test_config_file_errors_name_the_file_and_the_option(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _read(tmp_path, text)


def test_missing_config_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no config file at .*absent\.yaml: give a YAML file"):
        DemoOptions.from_file(tmp_path / "absent.yaml")
