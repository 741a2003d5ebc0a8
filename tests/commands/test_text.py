"""Text files become sequences of one length, each part of the text once, in random order."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch

from sonde.commands.text import read_documents, sequences


class Characters:
    """A tokenizer: one token for each character, 0 for the end."""

    def __init__(self, end: int | None = 0) -> None:
        self.eos_token_id = end

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(c) for c in text]


def test_a_folder_of_texts_and_json_lines(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "b.jsonl").write_text('{"text": "second", "id": 3}\n\n{"text": "third"}\n')
    (tmp_path / "inside" / "c.MD").write_text("fourth")
    (tmp_path / "d.bin").write_bytes(b"\xff\xfe")
    (tmp_path / "empty.txt").write_text(" \n")
    assert read_documents(tmp_path) == ["first", "second", "third", "fourth"]
    (tmp_path / "code.py").write_text("x = 1")
    assert read_documents(tmp_path / "code.py") == ["x = 1"]
    (tmp_path / "long.txt").write_text("a" * 70_000)  # shuffled in parts
    assert [len(part) for part in read_documents(tmp_path / "long.txt")] == [65_536, 4_464]


FAULTS: dict[str, tuple[str, bytes | None, str]] = {
    "no JSON": ("a.jsonl", b'{"text": "x"}\nnonsense\n', 'line 2 of {} is no JSON object with a "text", got \'nonse'),
    "no text": (
        "a.jsonl",
        b'{"text": "x"}\n{"body": "y"}\n',
        'line 2 of {} is no JSON object with a "text", got',
    ),
    "an array": ("a.jsonl", b'["x"]\n', "line 1 of {} is no JSON object"),
    "blanks": ("a.txt", b" \n ", "{} has no text"),
    "no UTF-8": ("a.txt", b"abc\xff", "{} is not text in UTF-8 (byte 3)"),
    "nothing to read": (".", b"", "{} has no file that ends in .txt, .md, .jsonl"),
    "nothing": ("absent", None, "no file or folder at {}"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_read(tmp_path: Path, fault: str) -> None:
    name, content, says = FAULTS[fault]
    if content:
        (tmp_path / name).write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(says.replace("{}", str(tmp_path / name)))):
        read_documents(tmp_path / name)


def test_every_token_is_in_one_sequence() -> None:
    documents = [chr(97 + i) * (10 * i + 3) for i in range(20)]
    rows = torch.stack(list(sequences(documents, Characters(), 8, seed=1)))
    n_tokens = sum(len(d) + 1 for d in documents)
    assert rows.shape == (n_tokens // 8, 8)
    assert rows.dtype == torch.int64
    seen = {chr(c): int((rows == c).sum()) for c in rows.unique().tolist() if c}
    left_over = n_tokens % 8
    assert sum(len(d) for d in documents) - sum(seen.values()) + 20 - int((rows == 0).sum()) == left_over
    assert all(10 * (ord(c) - 97) + 3 - n <= left_over for c, n in seen.items())


def test_the_order_is_random_and_that_of_the_seed() -> None:
    documents = ["".join(chr(200 + i)) * 8 for i in range(3000)]  # each is one sequence of 8
    tokenizer = Characters(end=None)
    first, again, other = ([int(row[0]) for row in sequences(documents, tokenizer, 8, seed=seed)] for seed in (1, 1, 2))
    assert first == again != other
    assert sorted(first) == list(range(200, 3200))
    # Neighbours in one document do not follow each other.
    one = "".join(chr(200 + i) * 8 for i in range(3000))
    order = [int(row[0]) for row in sequences([one], tokenizer, 8, seed=1)]
    assert sorted(order) == list(range(200, 3200))
    assert sum(abs(a - b) < 3 for a, b in itertools.pairwise(order)) < 60
