"""`sonde measure` on a tiny GPT-2, from a folder of text to the table, and its errors as sentences."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import pytest
import torch

import sonde
from sonde.cli import main
from sonde.commands.text import read_documents, sequences
from sonde.wording import number

pytest.importorskip("transformers", reason="needs transformers: pip install 'transformers>=5.23,<6'")
pytestmark = pytest.mark.filterwarnings("ignore")  # other packages cause various warnings when they are imported

from tests.commands.tiny_gpt import write_model, write_tokenizer  # noqa: E402

TEXT = Path(__file__).parents[2] / "LICENSE"  # a text that does not change


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt")
    write_tokenizer(folder)
    write_model(folder)
    return folder


def error(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """What a command that must fail says."""
    assert main(["measure", *map(str, argv)]) == 2
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return err


def test_a_checkpoint_from_text_to_table(gpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = ["--data", TEXT, "--tokens", "64", "--most", "120", "--batch", "64", "--log", tmp_path / "run"]
    assert main(["measure", str(gpt), *map(str, options)]) == 0
    said = capsys.readouterr().out
    # The same sequences, by hand.
    tokenizer = AutoTokenizer.from_pretrained(gpt)
    model = AutoModelForCausalLM.from_pretrained(gpt)
    rows = torch.stack(list(sequences(read_documents(TEXT), tokenizer, 64, seed=0)))[:120]
    expected = sonde.measure(
        model, lambda m, ids: m(input_ids=ids, labels=ids).loss, rows.split(4), unit="sequences", verbose=False
    )
    known = expected.reading
    assert known.status == "resolved"
    low, ratio, high = (number(value or math.nan) for value in (known.low, known.b_simple, known.high))
    assert f"B_simple {ratio} sequences [{low} – {high}]" in said
    loss = re.search(r"loss ([\d.]+) nats per token", said)
    assert loss
    assert float(loss[1]) == pytest.approx(expected.loss, rel=1e-3)
    assert f"In tokens: {64 * known.b_simple:.3g} [" in said  # type: ignore[operator]
    assert "30,624 parameters in float32 on cpu, evaluation mode, without dropout" in said
    assert "Time it first: a batch of 1 sequence takes" in " ".join(said.split())
    table = dict(re.findall(r"^(transformer\.\S+) +(\S+) \(", said, flags=re.M))
    assert list(table) == [
        "transformer.wte",
        "transformer.wpe",
        "transformer.h.0",
        "transformer.h.1",
        "transformer.ln_f",
    ]
    assert table["transformer.h.0"] == number(known.groups["transformer.h.0"].b_simple or math.nan)
    # And the log.
    run = sonde.read_run(tmp_path / "run")
    assert run.readings[-1].metrics["gns/b_simple"] == pytest.approx(known.b_simple, rel=1e-5)
    assert run.header.metadata["tokens"] == 64


def test_it_stops_when_it_is_precise(gpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts").mkdir()
    for page in TEXT.parent.glob("*.md"):
        (tmp_path / "texts" / page.name).write_text(page.read_text())
    assert main(["measure", str(gpt), "--data", str(tmp_path / "texts"), "--tokens", "32", "--until", "0.3"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"± [12]?\d(\.\d+)? %, from", said)
    assert "before" not in said
    assert "the critical batch size was 0.1 to 20 times the noise scale" in said


def test_a_report_without_a_batch_to_judge(gpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("bokeh")
    options = ["--data", TEXT, "--tokens", "64", "--most", "100", "--log", tmp_path]
    assert main(["measure", str(gpt), *map(str, options)]) == 0
    page = sonde.write_report(tmp_path).read_text()
    assert "No batch size was given to judge" in page
    assert "The model did not train while it was measured" in page
    assert "No window was measured" not in page


@pytest.mark.parametrize("options", [["--dtype", "bfloat16"], ["--train-mode"], ["--examples-per-piece", "1"]])
def test_other_options(gpt: Path, capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    assert main(["measure", str(gpt), "--data", str(TEXT), "--tokens", "64", "--most", "90", *options]) == 0
    said = capsys.readouterr().out
    assert "B_simple" in said
    assert ("train mode" in said) == (options == ["--train-mode"])


def test_errors(gpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "until must be a part of B_simple between 0" in error(capsys, gpt, "--data", TEXT, "--until", 10)
    assert "--tokens must be at least 2, got 1" in error(capsys, gpt, "--data", TEXT, "--tokens", 1)
    assert "reads at most 64 tokens, got --tokens 512: pass --tokens 64" in error(capsys, gpt, "--data", TEXT)
    assert "no file or folder at" in error(capsys, gpt, "--data", tmp_path / "absent")
    assert "--device mars cannot be used here" in error(capsys, gpt, "--data", TEXT, "--device", "mars")
    short = tmp_path / "short.txt"
    short.write_text("Too short a text.")
    assert "has text for 0 sequences of 64 tokens" in error(capsys, gpt, "--data", short, "--tokens", 64)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert f"transformers cannot load '{empty}'" in error(capsys, empty, "--data", TEXT)
    without_tokenizer = tmp_path / "without"
    write_model(without_tokenizer)
    assert "has no tokenizer that fits (it knows 1 tokens, the model 97)" in error(
        capsys, without_tokenizer, "--data", TEXT
    )
    taken = tmp_path / "taken"
    taken.write_text("")
    assert str(taken) in error(capsys, gpt, "--data", TEXT, "--tokens", 64, "--log", taken)


def test_without_transformers_the_error_names_it(
    gpt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    said = error(capsys, gpt, "--data", TEXT)
    assert said == "sonde: error: sonde measure needs transformers: pip install 'gradsonde[transformers]'\n"
