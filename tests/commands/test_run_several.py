"""Scripts that train several models, in turn, one after another, or in several processes: a log and a verdict each."""

from __future__ import annotations

from pathlib import Path

import pytest

import sonde
from tests.commands.scripts import DDP
from tests.commands.unmodified import check_untouched, explicit, with_run

FOLDS = """
import gc, weakref
models, kept = [], []
for fold in range(3):
    model = network()
    models.append(weakref.ref(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # (keep it here)
    for step in range(6):
        for micro in range(4):
            x, y = batch()
            (nn.functional.mse_loss(model(x), y) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
gc.collect()
print([each() is None for each in models])
torch.save(model.state_dict(), sys.argv[1])
"""

TURNS = """
model = network()
optimizers = [torch.optim.SGD(model[0].parameters(), lr=1e-2), torch.optim.SGD(model[2].parameters(), lr=1e-2)]
# (attach here)
for step in range(12):
    model.zero_grad()
    for micro in range(2):
        x, y = batch()
        nn.functional.mse_loss(model(x), y).backward()
    # (a window ends here)
    optimizers[step % 2].step()
torch.save(model.state_dict(), sys.argv[1])
"""

LATER_PARAMETERS = """
model = network()
model[0].requires_grad_(False)
optimizer = torch.optim.AdamW(model[2].parameters(), lr=1e-2)
for step in range(12):
    if step == 6:
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": model[0].parameters()})
    for micro in range(2):
        x, y = batch()
        nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save(model.state_dict(), sys.argv[1])
"""

OUT_OF_MEMORY = """
class Memory(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows):
        ctx.rows = rows
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        if ctx.rows > 16:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return gradient, None

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 1)
    def forward(self, x):
        if len(x) > 32:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return self.head(torch.tanh(Memory.apply(self.body(x), len(x))))

def train(rows):
    torch.manual_seed(0)
    generator.manual_seed(7)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # (attach here)
    for step in range(12):
        x, y = batch(rows)
        nn.functional.mse_loss(model(x), y).backward()
        # (a window ends here)
        optimizer.step()
        optimizer.zero_grad()
    torch.save(model.state_dict(), sys.argv[1])
"""

RETRIES = """
rows = 64
while True:
    try:
        train(rows)
        break
    except torch.OutOfMemoryError:
        rows //= 2
"""

TWO_PROCESSES = """
import multiprocessing

def train(file):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(12):
        for micro in range(2):
            x, y = batch()
            nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(model.state_dict(), file)

other = multiprocessing.get_context("fork").Process(target=train, args=(sys.argv[1] + ".other",))
other.start()
train(sys.argv[1])
other.join()
"""

BY_RANK = DDP.replace(
    'dist.init_process_group("gloo")', 'dist.init_process_group("gloo")\nimport os\ndel os.environ["RANK"]'
)
"""Ranks as `torch.multiprocessing.spawn` starts them: without a variable that says which they are."""


@pytest.mark.parametrize("are_kept", [False, True])
def test_folds_are_measured_one_after_another_and_let_go(are_kept: bool, tmp_path: Path) -> None:
    measured = check_untouched(
        FOLDS.replace("# (keep it here)", "kept.append((model, optimizer))" * are_kept), tmp_path
    )
    assert measured.out == ("[False, False, False]\n" if are_kept else "[True, True, False]\n")
    assert "not measured" not in measured.err
    lines = [line for line in measured.err.splitlines() if "B_simple" in line]
    assert [line.split("B_simple")[0] for line in lines] == [f"sonde: {n}. Sequential: " for n in (1, 2, 3)]
    for n in (1, 2, 3):
        run = sonde.read_run(measured.folder.with_name("log" if n == 1 else f"log-{n}"))
        assert (run.header.run, run.readings[-1].window) == ("log" if n == 1 else f"log-{n}", 6)
        is_open = are_kept or n == 3
        assert run.ended == ("the script ended" if is_open else "the script was done with its optimizers")


def test_a_training_whose_first_batches_do_not_fit_into_memory(tmp_path: Path) -> None:
    """The attempts that took no step leave nothing behind: one verdict, one log, in the folder that was asked for."""
    measured = check_untouched(OUT_OF_MEMORY + RETRIES, tmp_path)
    own = explicit(OUT_OF_MEMORY + "train(16)\n", tmp_path)
    assert ", batch 16 rows, 12 windows" in measured.err
    assert measured.err.count("sonde: B_simple") == 1
    assert "no step of" not in measured.err
    assert not measured.folder.with_name("log-2").exists()
    assert measured.run.readings[-1].dropped == {}
    assert len(own.numbers) == 3
    assert measured.numbers == pytest.approx(own.numbers, rel=1e-5)


def test_optimizers_that_take_turns_on_one_model_end_a_window_each(tmp_path: Path) -> None:
    measured = check_untouched(TURNS, tmp_path)
    own = explicit(TURNS, tmp_path, attach="sonde.attach(model, ")
    assert measured.numbers[0] == 12
    assert measured.numbers == pytest.approx(own.numbers, rel=1e-5)


def test_a_reading_without_later_parameters_says_so(tmp_path: Path) -> None:
    measured = check_untouched(LATER_PARAMETERS, tmp_path)
    assert "2 parameters came or became trainable after measuring began" in measured.err
    reading, *rest = measured.err[measured.err.index("sonde: B_simple") :].splitlines()
    assert ", 12 windows" in reading
    assert rest[0] == "sonde: parameters that came or became trainable after measuring began are not in it"


def test_processes_that_are_no_job_have_a_log_each(tmp_path: Path) -> None:
    measured = check_untouched(TWO_PROCESSES, tmp_path)
    assert measured.err.count("sonde: B_simple") == 2
    for name in ("log", "log-2"):
        run = sonde.read_run(measured.folder.with_name(name))
        assert (run.header.run, run.readings[-1].window) == (name, 12)
        records = measured.folder.with_name(name) / "records.jsonl"
        assert records.read_text().count("header") == 1


def test_ranks_without_a_variable_have_one_verdict_after_their_process_group(tmp_path: Path) -> None:
    measured = check_untouched(BY_RANK, tmp_path, ranks=2)
    assert measured.err.count("sonde: B_simple") == 1
    assert measured.run.readings[-1].window == 12
    other = measured.folder.parent / "err-1"
    assert "sonde" not in other.read_text()


def test_a_second_start_in_the_same_folder_is_a_run_of_its_own(tmp_path: Path) -> None:
    first = with_run(TURNS, tmp_path)
    again = with_run(TURNS.replace("range(12)", "range(11)"), tmp_path / "again", out=first.folder)
    run = sonde.read_run(first.folder)
    assert (run.earlier_runs, len(run.headers), run.readings[-1].window) == (1, 1, 11)
    assert f"sonde: log     {first.folder}\n" in again.err
