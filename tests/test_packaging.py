"""What pip installs: its name, the extras that messages name, and the wheel as it is built."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.metadata import Metadata

from sonde.version import DISTRIBUTION, __version__
from tests.docs_blocks import ROOT

SOURCE = ROOT / "src"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_messages_name_what_can_be_installed() -> None:
    files = {path: path.read_text() for path in SOURCE.rglob("*.py")}
    named = {extra for text in files.values() for extra in re.findall(r"install_hint\(['\"](\w+)['\"]\)", text)}
    assert {"report", "trl"} < named <= set(PROJECT["optional-dependencies"])
    assert PROJECT["name"] == DISTRIBUTION
    by_hand = [path.name for path, text in files.items() if re.search(rf"pip install|{DISTRIBUTION}", text)]
    assert by_hand == ["version.py"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    backend = pytest.importorskip("hatchling.build", reason="what builds the wheel is hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # as build tools do
        return folder / str(backend.build_wheel(str(folder)))


def test_the_wheel_has_every_file_of_sonde(wheel: Path) -> None:
    files = {path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*") if path.is_file()}
    packed = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == {name for name in files if "__pycache__" not in name}


def test_a_package_index_takes_the_metadata(wheel: Path) -> None:
    folder = f"{DISTRIBUTION}-{__version__}.dist-info"
    metadata = Metadata.from_email(ZipFile(wheel).read(f"{folder}/METADATA"), validate=True)
    assert (metadata.name, str(metadata.version)) == (DISTRIBUTION, __version__)
    # hatchling resolves extras that refer to the project itself. Another name would be a stranger's package.
    assert "sonde" not in {requirement.name for requirement in metadata.requires_dist or ()}
    assert b"sonde = sonde.cli:main" in ZipFile(wheel).read(f"{folder}/entry_points.txt").splitlines()
    assert metadata.description_content_type == "text/markdown"
    assert metadata.description is not None
    assert "## What works where" in metadata.description
    assert re.findall(r"\]\((?!https?:).*", metadata.description) == [], "no file is where such a link leads"
