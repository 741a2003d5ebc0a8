"""Breaks a function of sonde on purpose, to show that a test notices."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mutant:
    """One function with one piece of its source replaced.

    Attributes:
        name: the mistake, for people.
        function: "module:function" or "module:Class.method".
        old: source that must occur exactly once.
        new: the source in its place.
    """

    name: str
    function: str
    old: str
    new: str

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Run with the mistake in this process."""
        module_name, _, path = self.function.partition(":")
        module = importlib.import_module(module_name)
        *holders, name = path.split(".")
        holder: Any = module
        for part in holders:
            holder = getattr(holder, part)
        original = vars(holder)[name]
        source = textwrap.dedent(inspect.getsource(original))
        assert source.count(self.old) == 1, f"{self.name}: {self.old!r} must occur once in {self.function}: rewrite it"
        # Annotations are strings only where the module asks for it: DDP compares a hook's annotations with types.
        flags = getattr(vars(module).get("annotations"), "compiler_flag", 0)
        mutated = source.replace(self.old, self.new)
        made: dict[str, Any] = {}
        exec(compile(mutated, inspect.getfile(original), "exec", flags, dont_inherit=True), vars(module), made)
        setattr(holder, name, made[name])
        try:
            yield
        finally:
            setattr(holder, name, original)
