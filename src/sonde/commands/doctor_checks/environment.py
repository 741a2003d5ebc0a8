"""What `sonde doctor` looks at without torch: versions, torchrun's variables, the host's name, the folder of logs."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from sonde.commands.doctor_checks.check import Check, checked
from sonde.commands.run import check_folder, existing_part
from sonde.version import TESTED, install_hint, is_within

OF_EXTRAS = {
    "bokeh": ("3.6", "4", "report"),
    "tensorboard": ("2.16", "", "tensorboard"),
    "wandb": ("0.19.10", "", "wandb"),
    "mlflow-skinny": ("3", "", "mlflow"),
    "trackio": ("0.20", "", "trackio"),
    "accelerate": (*TESTED["accelerate"], "accelerate"),
    "lightning": (*TESTED["lightning"], "lightning"),
    "transformers": (*TESTED["transformers"], "transformers"),
    "trl": (*TESTED["trl"], "trl"),
    "datasets": ("5", "", "trl"),
}
"""The packages of extras: the first version, the first one beyond, and the extra that installs the package."""
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_INTERFACE = "GLOO_SOCKET_IFNAME"
_ENOUGH_GB = 1.0
"""Free space for any log, its report, and what else a run writes meanwhile."""


def has_torch() -> bool:
    """Whether torch is there to be imported."""
    return importlib.util.find_spec("torch") is not None


def environment_checks(folder: Path) -> Iterator[Check]:
    """The rows.

    Args:
        folder: for logs.
    """
    yield _in_range("Python", platform.python_version(), *TESTED["Python"])
    without = "install torch to measure. Without it, logs can be read: sonde report, advise, compare and watch"
    yield _installed("torch", *TESTED["torch"], without) if has_torch() else _missing("torch", without)
    for package, (first, beyond, extra) in OF_EXTRAS.items():
        yield _installed(package, first, beyond, install_hint(extra))
    yield _installed("torchtitan", *TESTED["torchtitan"], "see docs/torchtitan.md")
    yield _torchrun()
    yield checked("host", _host)
    yield checked("log folder", functools.partial(_folder, folder))


def _installed(package: str, first: str, beyond: str, remedy: str) -> Check:
    try:
        return _in_range(package, importlib.metadata.version(package), first, beyond)
    except importlib.metadata.PackageNotFoundError:
        return _missing(package, remedy)


def _missing(package: str, remedy: str) -> Check:
    return Check(package, "not there", "not installed", remedy)


def _in_range(package: str, version: str, first: str, beyond: str) -> Check:
    if is_within(version, first, beyond):
        return Check(package, "ok", version)
    tested = f"{first} to below {beyond}" if beyond else f"{first} and later"
    return Check(package, "warning", f"{version}, and sonde's tests ran with {tested}", f"use {package} {tested}")


def _torchrun() -> Check:
    there = [name for name in _TORCHRUN if name in os.environ]
    if there and len(there) < len(_TORCHRUN):
        found = f"of {', '.join(_TORCHRUN)}, only {', '.join(there)} is set: init_process_group() fails or hangs"
        return Check("torchrun", "fails", found, f"unset {' '.join(there)}, or start by torchrun")
    return Check("torchrun", "ok", "rank {} of {}".format(*map(os.environ.get, there)) if there else "not used here")


def _host() -> Check:
    name, there = socket.gethostname(), [interface for _, interface in socket.if_nameindex()]
    lacking = [each for each in os.environ.get(_INTERFACE, "").split(",") if each not in ("", *there)]
    if lacking:
        found = f"{_INTERFACE} names {', '.join(lacking)}, but the interfaces are {', '.join(there)}"
        return Check("host", "fails", found, f"set {_INTERFACE} to one of them, or unset it")
    try:
        family, _, _, _, address = socket.getaddrinfo(name, 0)[0]
        with socket.create_server(address[:2], family=family) as server:
            socket.create_connection(server.getsockname()[:2], timeout=5.0).close()
    except OSError as error:
        found = f"no process here can be reached by the name {name} ({error.strerror or error})"
        advice = f"put {name} into /etc/hosts, bring its network up, or set {_INTERFACE}=lo"
        return Check("host", "warning", found, advice)
    return Check("host", "ok", f"{name} is {address[0]}")


def _folder(folder: Path) -> Check:
    check_folder(folder)
    free = shutil.disk_usage(existing_part(folder)).free / 1e9
    if free < _ENOUGH_GB:
        return Check("log folder", "warning", f"{free:.1f} GB free for {folder}", "make room, or pass another --out")
    return Check("log folder", "ok", f"{folder} can be written to, {free:.1f} GB free")
