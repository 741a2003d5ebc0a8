"""The windows in a log, a JSON object a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def logged_windows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "records.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith('{"kind":"window"')]
