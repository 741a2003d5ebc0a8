"""The README as a package index shows it: links to files of this repository would lead nowhere there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ReadmeWithoutLinks(MetadataHookInterface):
    """Makes the long description of the distribution. Once the pages are online, links can lead there instead."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Leave out the list of pages at the end, pictures, and the targets of links, whose text stays."""
        text, *_ = Path(self.root, "README.md").read_text(encoding="utf-8").partition("## Read on\n")
        text = re.sub(r"!\[[^]]*\]\([^)]*\)\n*", "", text)
        text = re.sub(r"\[([^]]+)\]\((?!https?:)[^)]*\)", r"\1", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
