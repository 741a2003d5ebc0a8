"""What an offline run of W&B has stored."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def records_of_wandb(file: Path) -> Iterator[Any]:
    """The records in an offline run's file: LevelDB's log format, blocks of chunks, behind 7 bytes of W&B's."""
    from wandb.proto import wandb_internal_pb2

    content, at, whole = file.read_bytes(), 7, b""
    while at < len(content):
        left = 2**15 - at % 2**15
        if left < 7:  # the rest of a block has no room for a chunk
            at += left
            continue
        _, n, kind = struct.unpack("<IHB", content[at : at + 7])
        whole, at = whole + content[at + 7 : at + 7 + n], at + 7 + n
        if kind in (1, 4):  # a whole record, or the last chunk of one
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


def rows_of_wandb(file: Path) -> list[dict[str, Any]]:
    """The rows of history in an offline run's file."""
    rows = [record.history.item for record in records_of_wandb(file) if record.WhichOneof("record_type") == "history"]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row} for row in rows]
