"""Training scripts of other projects, run as they are under `sonde run`, and compared with themselves.

    python -m benchmarks.clients --nanogpt CHECKOUT --accelerate CHECKOUT [--out benchmarks/results]

The checkouts are those of karpathy/nanoGPT and huggingface/accelerate. The latter's examples also need
`pip install evaluate`. They ask for a model and data from elsewhere: small ones are made in their place, under the
names that the scripts load. nanoGPT reads Python's own documentation in place of Shakespeare.

Each script runs bare and under `sonde run`: exit status and stdout must be the same, and so must the weights where the
script saves them. nanoGPT's script also runs with sonde's three lines, beside code that takes the increments of `.grad`
after each backward in float64: the exact tr Σ and |G|² of each window.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import page

NANOGPT = [
    "train.py",
    "config/train_shakespeare_char.py",
    "--device=cpu",
    "--compile={compile}",
    "--eval_iters=2",
    "--eval_interval=20",
    "--log_interval=5",
    "--block_size=32",
    "--batch_size=4",
    "--n_layer=2",
    "--n_head=2",
    "--n_embd=32",
    "--max_iters=60",
    "--lr_decay_iters=60",
    "--dropout=0.1",
    "--gradient_accumulation_steps=4",
    "--dtype=bfloat16",
    "--always_save_checkpoint=True",
]
EXAMPLES = (
    "nlp_example.py --cpu",
    "by_feature/gradient_accumulation.py --cpu --gradient_accumulation_steps 4",
    "by_feature/automatic_gradient_accumulation.py --cpu",
    "by_feature/checkpointing.py --cpu --checkpointing_steps epoch --output_dir saved",
    "by_feature/early_stopping.py --cpu",
    "by_feature/local_sgd.py --cpu --local_sgd_steps 4",
    "by_feature/memory.py --cpu",
    "by_feature/multi_process_metrics.py --cpu",
)
ON_TWO_RANKS = (
    "by_feature/gradient_accumulation.py --cpu --gradient_accumulation_steps 4",
    "by_feature/local_sgd.py --cpu --local_sgd_steps 4",
)
THREE_LINES = """
import sonde
probe = sonde.attach(model, optimizer, unit="sequences", units_per_piece="first dim", every=1, per_example="never",
                     verbose=False)
_before, _pieces, worst = None, [], 0.0

def _backward_ended():
    global _before
    grads = [p.grad.double().flatten() if p.grad is not None else p.new_zeros(p.numel()).double()
             for p in model.parameters()]
    now = torch.cat(grads)
    _pieces.append(now if _before is None else now - _before)
    _before = now

def _window_ends():
    global _before, worst
    probe.step()
    m, n, big = len(_pieces), batch_size, float(_before @ _before)
    small = sum(float((m * h) @ (m * h)) for h in _pieces) / m
    u, v = 1 / n, 1 / (m * n)
    trace_cov, grad_sq = (small - big) / (u - v), (u * big - v * small) / (u - v)
    window = probe.window().total
    worst = max(worst, abs(window.trace_cov / trace_cov - 1),
                abs(window.grad_sq - grad_sq) / (abs(grad_sq) + u * trace_cov))
    _before = None
    _pieces.clear()

"""
"""Put into nanoGPT's script before its loop; the rest of it calls these functions."""
METRIC = """
import datasets
import evaluate

class Glue(evaluate.Metric):
    def _info(self):
        numbers = {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
        return evaluate.MetricInfo(description="", citation="", inputs_description="",
                                   features=datasets.Features(numbers))

    def _compute(self, predictions, references):
        return {"accuracy": sum(p == r for p, r in zip(predictions, references)) / len(references)}
"""
"""In place of the metric that Accelerate's examples load."""


@dataclass(frozen=True)
class Row:
    """One script.

    Attributes:
        client: the script, and how it was started.
        is_same: of its status, stdout and weights under `sonde run`, which are the same as without.
        reading: what sonde said at its end.
        deviation: the largest relative one of a window from exact values, where they are known.
    """

    client: str
    is_same: Mapping[str, bool]
    reading: str
    deviation: str = ""


def _run(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def _under_sonde(unit: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "sonde", "run", "--unit", unit, "--every", "1", "--no-report", *options, "--"]


def _reading(err: str) -> str:
    said = [line for line in err.splitlines() if re.match(r"sonde: (B_simple|not measured|no step)", line)]
    return re.split(r":| \(", said[-1].removeprefix("sonde: "))[0] if said else "nothing"


# nanoGPT.


def _nanogpt_in(folder: Path, checkout: Path) -> None:
    """Copy the script with what it imports, and write its data."""
    import pickle
    import pydoc_data.topics

    import numpy

    for name in ("train.py", "model.py", "configurator.py"):
        shutil.copy(checkout / name, folder)
    shutil.copytree(checkout / "config", folder / "config")
    text = Path(pydoc_data.topics.__file__).read_text()
    letters = sorted(set(text))
    ids = numpy.array([letters.index(letter) for letter in text], dtype=numpy.uint16)
    data = folder / "data" / "shakespeare_char"
    data.mkdir(parents=True)
    ids[: len(ids) * 9 // 10].tofile(data / "train.bin")
    ids[len(ids) * 9 // 10 :].tofile(data / "val.bin")
    meta = {"vocab_size": len(letters), "itos": dict(enumerate(letters)), "stoi": {c: i for i, c in enumerate(letters)}}
    (data / "meta.pkl").write_bytes(pickle.dumps(meta))


def _with_three_lines(script: str) -> str:
    """nanoGPT's script with a probe of its own, and exact values beside it."""
    before, loop = script.split("# training loop\n")
    backward, clip = "scaler.scale(loss).backward()\n", "    # clip the gradient\n"
    assert loop.count(backward) == loop.count(clip) == 1, "nanoGPT's loop is another one now"
    loop = loop.replace(backward, backward.rstrip() + "; _backward_ended()\n").replace(
        clip, "    _window_ends()\n" + clip
    )
    return f"{before}{THREE_LINES}{loop}\nprint('worst', worst)\n"


def nanogpt(checkout: Path) -> list[Row]:
    """The script plain and compiled, and with three lines."""
    import torch

    rows = []
    for is_compiled in (False, True):
        with tempfile.TemporaryDirectory() as name:
            _nanogpt_in(folder := Path(name), checkout)
            words = [word.format(compile=is_compiled) for word in NANOGPT]
            outputs, weights = [], []
            for command in ([sys.executable, *words], [*_under_sonde("sequences"), *words]):
                done = _run(command, folder)
                outputs.append((done.returncode, re.sub(r"time [^,]*,", "", done.stdout)))
                saved = torch.load(folder / "out-shakespeare-char" / "ckpt.pt", weights_only=False)["model"]
                weights.append(saved)
            exact = ""
            if not is_compiled:
                (folder / "three.py").write_text(_with_three_lines((folder / "train.py").read_text()))
                out = _run([sys.executable, "three.py", *words[1:]], folder).stdout
                exact = f"{float(re.findall(r'worst (.*)', out)[0]):.1g}"
            same = {
                "status": outputs[0][0] == outputs[1][0] == 0,
                "stdout": outputs[0][1] == outputs[1][1],
                "weights": all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0]),
            }
            client = f"nanoGPT's train.py, bf16, 4 micro-batches{', compiled' if is_compiled else ''}"
            rows.append(Row(client, same, _reading(done.stderr), exact))
    return rows


# Accelerate.


def _examples_in(folder: Path, checkout: Path) -> None:
    """Copy the examples, and write the model, the data and the metric that they load by name."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    shutil.copytree(checkout / "examples", folder / "examples")
    draw = random.Random(0)
    words = [f"w{number}" for number in range(60)]

    def sentence() -> list[str]:
        return [draw.choice(words) for _ in range(draw.randint(4, 20))]

    data = folder / "nyu-mll" / "glue"
    (data / "mrpc").mkdir(parents=True)
    splits = {"train": 200, "validation": 40, "test": 40}
    for split, n_rows in splits.items():
        lines = []
        for number in range(n_rows):
            first, is_same = sentence(), draw.random() < 0.5
            second = first[::-1] if is_same else sentence()
            row = {"sentence1": " ".join(first), "sentence2": " ".join(second), "label": int(is_same), "idx": number}
            lines.append(json.dumps(row))
        (data / "mrpc" / f"{split}.jsonl").write_text("\n".join(lines))
    files = "".join(f"  - split: {split}\n    path: mrpc/{split}.jsonl\n" for split in splits)
    (data / "README.md").write_text(f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{files}---\n")
    (folder / "glue").mkdir()
    (folder / "glue" / "glue.py").write_text(METRIC)
    model = folder / "bert-base-cased"
    model.mkdir()
    (model / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    BertTokenizerFast(str(model / "vocab.txt")).save_pretrained(model)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    BertForSequenceClassification(BertConfig(vocab_size=65, max_position_embeddings=64, **sizes)).save_pretrained(model)


def accelerate(checkout: Path) -> list[Row]:
    """Its examples, in one process and on two ranks."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        _examples_in(folder := Path(name), checkout)
        for n_ranks, examples in ((1, EXAMPLES), (2, ON_TWO_RANKS)):
            for example in examples:
                script, *others = f"examples/{example}".split()
                ranks = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(n_ranks)]
                launcher = [] if n_ranks == 1 else ["-m", "torch.distributed.run", *ranks]
                bare = _run([sys.executable, *launcher, script, *others], folder)
                shutil.rmtree(folder / "saved", ignore_errors=True)
                options = [] if n_ranks == 1 else ["--nproc", str(n_ranks)]
                done = _run([*_under_sonde("pairs", *options), script, *others], folder)
                same = {"status": bare.returncode == done.returncode == 0, "stdout": bare.stdout == done.stdout}
                client = f"Accelerate's {example.split()[0]}{', 2 ranks' if n_ranks > 1 else ''}"
                rows.append(Row(client, same, _reading(done.stderr)))
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows, for the page of results."""
    head = (
        "script",
        "as without sonde",
        "not so",
        "what sonde read",
        "largest deviation of a window from exact values",
    )
    lines = [head, ["---"] * len(head)]
    for row in rows:
        same = [name for name, is_same in row.is_same.items() if is_same]
        other = [name for name, is_same in row.is_same.items() if not is_same]
        lines.append((row.client, ", ".join(same), ", ".join(other), row.reading, row.deviation))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _commit(checkout: Path) -> str:
    done = subprocess.run(["git", "log", "-1", "--format=%h of %as"], cwd=checkout, capture_output=True, text=True)
    return done.stdout.strip() or "of an unknown commit"


def main() -> None:
    """Run the scripts of the checkouts that are given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, help="a checkout of karpathy/nanoGPT")
    parser.add_argument("--accelerate", type=Path, help="a checkout of huggingface/accelerate")
    parser.add_argument("--out", type=Path, help="folder for the results")
    options = parser.parse_args()
    rows = [] if options.nanogpt is None else nanogpt(options.nanogpt)
    rows += [] if options.accelerate is None else accelerate(options.accelerate)
    found = table(rows)
    print(found)
    if options.out is not None:
        command = "python -m benchmarks.clients --nanogpt CHECKOUT --accelerate CHECKOUT"
        checkouts = {"nanoGPT": options.nanogpt, "Accelerate": options.accelerate}
        of = ", ".join(f"{name} {_commit(checkout)}" for name, checkout in checkouts.items() if checkout is not None)
        title = "Scripts of other projects under sonde run"
        (options.out / "clients_cpu.md").write_text(page(title, command, f"Commits: {of}.\n\n{found}"))


if __name__ == "__main__":
    main()
