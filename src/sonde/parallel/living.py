"""The living objects of some types, found among all objects that the garbage collector knows."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def living_of(kinds: Sequence[type[T]]) -> Iterator[T]:
    """Every living object of these types, but not of types derived from them."""
    # Each object refers to its type, and the garbage collector finds referrers in C: to look at each object in Python
    # takes much longer. By type(), since some objects make up their __class__, or import modules to know it; by id,
    # since a type may have no hash.
    ids = {id(kind) for kind in kinds}
    return (each for each in gc.get_referrers(*kinds) if id(type(each)) in ids)


def kinds_of(kind: type[T]) -> list[type[T]]:
    """A type, and every type derived from it."""
    found = {id(kind): kind}
    to_look_at = [kind]
    while to_look_at:
        derived = [each for each in type.__subclasses__(to_look_at.pop()) if id(each) not in found]
        found.update((id(each), each) for each in derived)
        to_look_at += derived
    return list(found.values())
