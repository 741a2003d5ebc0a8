"""Every example runs as its first lines say, from a folder of its own."""

from __future__ import annotations

import contextlib
import re
import runpy
import textwrap
from pathlib import Path

import pytest
import torch.distributed as dist

import sonde
from tests.docs_blocks import ROOT, pattern_of
from tests.new_process import Python

EXAMPLES = Path(__file__).parent.parent / "examples"
NAMES = sorted(path.name for path in EXAMPLES.glob("*.py"))
HERE = ("lightning_trainer.py", "transformers_trainer.py")
"""Run in this process, as those of TRL: it may have imported their trainers already, which takes many seconds."""
ENDED = {
    "accelerate_ddp.py": "training ended",
    "lightning_trainer.py": "training ended",
    "nanogpt_loop.py": "the process ended without probe.close()",
    "transformers_trainer.py": "training ended",
}
"""How logs end that `close` does not end."""
NEEDS = {
    "accelerate_ddp.py": "accelerate",
    "lightning_trainer.py": "lightning",
    "transformers_trainer.py": "transformers",
}
OTHERWISE = {
    *(
        "batch_schedule.py",
        "branch_nanogpt.py",
        "dr_grpo_loop.py",
        "fsdp2_clip.py",
        "torchtitan_debug.py",
        "trl_grpo.py",
        "trl_hold_entropy.py",
    ),
    *("trl_sft_dpo.py", "unmodified_script.py"),
}
"""Those that have a test of their own: they measure something else, or more."""
MEASURES_NOISE = sorted(set(NAMES) - OTHERWISE)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # other packages cause various warnings


def n_ranks(name: str) -> int:
    """The number of processes that its first lines start."""
    first_lines = (EXAMPLES / name).read_text().split('"""')[1]
    if f"\ntorchrun --nproc-per-node 2 examples/{name}\n" in first_lines:
        return 2
    assert f"\npython examples/{name}\n" in first_lines
    return 1


def run_example(name: str, folder: Path) -> str:
    """What rank 0 prints. Its processes have the environment that torchrun gives them, and have imported torch."""
    n = n_ranks(name)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun has the store, not rank 0
    shared = {
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(n)]
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(Python(str(EXAMPLES / name), folder=folder, environment=shared | rank if n > 1 else {}))
            for rank in ranks
        ]
        ended = [python.wait() for python in started]
    assert all(end.status == 0 for end in ended), "\n".join(end.err for end in ended)
    return ended[0].out


def run_here(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process. Accelerate's state of it, which trainers set up, is forgotten."""
    from accelerate.state import AcceleratorState, GradientState

    monkeypatch.chdir(folder)
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        GradientState._reset_state()
        AcceleratorState._reset_state(reset_partial_state=True)


def test_sharded_example(tmp_path: Path) -> None:
    said = run_example("fsdp2_clip.py", tmp_path)
    losses, norms = zip(*re.findall(r"loss ([\d.]+), gradient norm ([\d.]+)", said), strict=True)
    assert len(losses) == 3
    assert float(losses[-1]) < float(losses[0])
    assert all(float(norm) > 0 for norm in norms)


def test_a_policy_gradient_loop_by_hand(tmp_path: Path) -> None:
    """Two ranks, the noise scale in prompts, forecasts of the entropy, one log, and one report of both."""
    pytest.importorskip("datasets", reason="needs trl: pip install '.[trl]'")
    said = run_example("dr_grpo_loop.py", tmp_path)
    assert len(re.findall(r"^step \d+: entropy [\d.]+ nats a token; forecast [-+][\d.e-]+ ± ", said, flags=re.M)) == 4
    run = sonde.read_run(tmp_path / "runs" / "dr-grpo")
    assert [reading.window for reading in run.policy] == [10, 20, 30, 40]
    assert all(r.metrics["entropy/n_evaluation_prompts"] == 20.0 for r in run.policy)
    assert all(r.point.is_valid for r in run.policy)
    last = run.readings[-1]
    assert (last.window, last.pieces["per_window"], last.metrics["gns/units_per_window"]) == (40, 4, 16.0)
    assert last.metrics["gns/trace_cov"] > 0
    page = sonde.write_report(tmp_path / "runs" / "dr-grpo").read_text()
    for section in ("Noise scale and batch size", "Entropy of the policy", "Forecast against truth"):
        assert f"<h2>{section}" in page


def test_a_batch_grows_with_the_noise_scale(tmp_path: Path) -> None:
    """It prints each change, takes fewer steps for the same data, and its log has the decisions."""
    said = run_example("batch_schedule.py", tmp_path)
    ((seen, n_steps),) = re.findall(r"^([\d,]+) contexts in (\d+) steps, 800 at the smallest batch$", said, flags=re.M)
    assert 12_800 <= int(seen.replace(",", "")) < 12_800 + 32 * 8
    assert int(n_steps) < 400
    batches = [own.metrics["schedule/batch"] for own in sonde.read_run(tmp_path / "runs" / "batch-schedule").own]
    assert batches == sorted(batches)
    assert (batches[0], batches[-1]) == (16.0, 128.0)


def test_unmodified_script_prints_what_the_readme_shows(tmp_path: Path) -> None:
    """Numbers may differ, and so the verdict: it follows from them."""
    (command,) = re.findall(r"^sonde (run .*)$", (EXAMPLES / "unmodified_script.py").read_text(), flags=re.M)
    output = rf"^    sonde {re.escape(command)}\n\n.*\n\n((?:    .*\n)+)"
    (shown,) = re.findall(output, (ROOT / "README.md").read_text(), flags=re.M)
    arguments = command.replace("examples/", f"{EXAMPLES}/").split()
    with Python("-m", "sonde", *arguments, folder=tmp_path, environment={"OMP_NUM_THREADS": "1"}) as process:
        ended = process.wait()
    assert ended.status == 0, ended.err
    expected, said = textwrap.dedent(shown).splitlines(), ended.err.splitlines()
    assert len(said) == len(expected), ended.err
    for line, claim in zip(said, expected, strict=True):
        if claim.startswith("sonde: B_simple"):
            assert re.fullmatch(r"sonde: B_simple [\d>].* sequences.*, batch 16 sequences, 150 windows", line)
        elif claim.startswith("sonde: advice"):
            assert re.fullmatch(r"sonde: advice  Time it first: a batch of .* if it is\. More: sonde advise .*", line)
        else:
            assert re.fullmatch(pattern_of(claim), line), ended.err
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)$", ended.out, flags=re.M)]
    assert len(losses) == 4
    check_advice(ended.err.split("log     ")[1].split("\n")[0], tmp_path)
    assert losses[-1] < losses[0] - 1


def check_advice(log: str, folder: Path) -> None:
    """The page shows what `sonde advise` prints, of another log."""
    page = (ROOT / "docs" / "advice.md").read_text()
    with Python("-m", "sonde", "advise", log, folder=folder) as process:
        said = process.wait().out
    (head,) = re.findall(r"^ +batch +ranks.*$", page, flags=re.M)
    (shown,) = re.findall(r"^ *batch +ranks ×.*$", said, flags=re.M)
    assert [word for word in head.replace("…", "").split() if word not in shown.split()] == []
    assert "Time it first: a batch of " in page
    assert said.startswith("Time it first: a batch of ")


def test_a_script_for_branches_resumes_where_it_stopped(tmp_path: Path) -> None:
    """At its batch and seed; the held-out loss at the checkpoint is the same for all, and a log holds it too."""

    def losses(*arguments: str) -> list[tuple[str, str]]:
        script = str(EXAMPLES / "branch_nanogpt.py")
        with Python(script, *arguments, folder=tmp_path, environment={"OMP_NUM_THREADS": "1"}) as process:
            ended = process.wait()
        assert ended.status == 0, ended.err
        return re.findall(r"^units (\d+): loss (\S+)$", ended.out, flags=re.M)

    trained = losses("--steps", "64", "--save", "checkpoint.pt")
    assert [units for units, _ in trained] == ["0", "256", "512"]
    one, other, again = (
        losses("--resume", "checkpoint.pt", "--batch", batch, "--seed", seed, "--steps", steps, *log)
        for batch, seed, steps, log in (
            ("8", "1", "32", []),
            ("16", "1", "16", []),
            ("8", "1", "32", ["--log", "runs/x"]),
        )
    )
    assert one[0][1] == other[0][1] == trained[-1][1]
    assert one == again
    assert float(one[-1][1]) < float(trained[-1][1])
    assert one[-1][0] == other[-1][0] == "256"
    assert one[-1][1] != other[-1][1]
    _, logged = sonde.read_run(tmp_path / "runs" / "x").series("eval_loss")
    assert logged


def test_torchtitan_example(tmp_path: Path) -> None:
    """A few steps of the debug model, which is larger than the other examples' models."""
    pytest.importorskip("torchtitan", reason="the example of torchtitan needs it: make test-torchtitan")
    assert n_ranks("torchtitan_debug.py") == 2
    said = run_example("torchtitan_debug.py", tmp_path)
    assert said == ""  # torchtitan logs to stderr, and so does sonde
    run = sonde.read_run(tmp_path / "runs" / "torchtitan-debug")
    last = run.readings[-1]
    assert (run.ended, run.alerts, last.dropped) == ("training ended", (), {})
    assert (last.window, last.pieces["per_window"]) == (20, 4)
    assert last.metrics["gns/units_per_window"] == 16
    assert last.metrics["gns/b_simple_low"] is not None


def test_the_entropy_is_held_where_the_other_example_loses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("trl", reason="the example of TRL needs trl")
    assert n_ranks("trl_hold_entropy.py") == 1
    run_here("trl_hold_entropy.py", tmp_path, monkeypatch)
    said = capsys.readouterr().out
    entropies = [float(found) for found in re.findall(r"step \d+: entropy ([\d.]+), coefficient 0\.0", said)]
    assert len(entropies) == 3
    assert entropies[-1] == pytest.approx(2.2, abs=0.2)


def test_reinforcement_learning_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("trl", reason="the example of TRL needs trl")
    assert n_ranks("trl_grpo.py") == 1
    run_here("trl_grpo.py", tmp_path, monkeypatch)
    said = capsys.readouterr().out
    found = re.findall(
        r"step (\d+): entropy ([\d.]+) nats a token; forecast ([-+.e\d]+) ± ([.e\d-]+) nats a token", said
    )
    assert [int(step) for step, *_ in found] == [1, 11, 21, 31]
    assert float(found[-1][1]) < float(found[0][1])  # it has become surer of itself
    assert all(float(se) > 0 for *_, se in found)
    learned = said.split("learning from")[1].split("evaluated on")[0]
    assert len(re.findall(r"^\d\+\d= ", learned, flags=re.M)) == 4


def test_fine_tuning_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl", reason="the example of TRL needs trl")
    assert n_ranks("trl_sft_dpo.py") == 1
    run_here("trl_sft_dpo.py", tmp_path, monkeypatch)
    for name, unit, n_windows in (("sft", "sequences", 40), ("dpo", "pairs", 20)):
        run = sonde.read_run(tmp_path / "runs" / name)
        last = run.readings[-1]
        assert (run.ended, run.alerts, run.header.unit) == ("training ended", (), unit)
        assert (last.window, last.dropped, last.metrics["gns/units_per_window"]) == (n_windows, {}, 16)
        assert last.metrics["gns/b_simple_low"] is not None


@pytest.mark.parametrize("name", MEASURES_NOISE)
def test_example(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"{name} needs {NEEDS[name]}")
    if name in HERE:
        run_here(name, tmp_path, monkeypatch)
        said = capsys.readouterr().err
    else:
        said = run_example(name, tmp_path)
    (log,) = tmp_path.glob("runs/*/records.jsonl")
    run = sonde.read_run(log)
    last = run.readings[-1]
    assert run.ended == ENDED.get(name, "closed")
    assert last.window == {"fsdp2.py": 100}.get(name, 150)
    assert last.dropped == {}
    assert last.status == "resolved"
    # A small byte model on English: between a handful and a few thousand contexts, wherever the seed leads.
    assert 5 < (last.metrics["gns/b_simple"] or 0) < 5000
    ranks = 1 if name == "pipeline.py" else n_ranks(name)
    assert run.header.setup["ranks"] == ranks
    assert last.pieces["per_window"] == {"pipeline.py": 8, "single_gpu.py": 1}.get(name, 4 * ranks)
    assert last.metrics["gns/covered"] == 1.0
    # A pipeline has its loss on the last stage, and the first one writes the log. Three lines log no loss.
    if name not in ("pipeline.py", "nanogpt_loop.py"):
        _, losses = run.series("loss")
        assert losses[-1] < losses[0] - 1
    if name not in ENDED:  # their last reading is printed beside the set-up
        assert "B_simple" in said
