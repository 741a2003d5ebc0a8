"""Numbers, times and ranges as text for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_MINUS = "\N{MINUS SIGN}"
_NOT_KNOWN = "not known"


def number(value: float | None, digits: int = 3) -> str:
    """A number with `digits` significant digits and separated thousands. A power of ten is used if it saves zeros.

    Args:
        value: the number. None and NaN become "not known".
        digits: significant digits. A number below a million keeps all digits before the decimal point.

    Example:
        >>> number(38.1234), number(1234567.0), number(-0.00001234)
        ('38.1', '1.23 million', '−1.23 × 10⁻⁵')
    """
    if value is None or math.isnan(value):
        return _NOT_KNOWN
    if value == 0 or math.isinf(value):
        return "0" if value == 0 else "unbounded"
    sign, size = (_MINUS if value < 0 else ""), abs(value)
    for threshold, word in ((1e9, "billion"), (1e6, "million")):
        if threshold <= size < 1e12:
            return f"{sign}{_plain(size / threshold, digits)} {word}"
    if 1e-3 <= size < 1e6:
        return sign + _plain(size, digits)
    mantissa, exponent = f"{size:.{digits - 1}e}".split("e")
    return f"{sign}{mantissa} × 10{str(int(exponent)).translate(_SUPERSCRIPT)}"


def count(value: float | None) -> str:
    """A whole number in full, with separated thousands.

    Example:
        >>> count(1234567)
        '1,234,567'
    """
    return _NOT_KNOWN if value is None else f"{value:,.0f}"


def percent(fraction: float | None) -> str:
    """A fraction of 1 as a percentage.

    Example:
        >>> percent(0.0042)
        '0.42\\xa0%'
    """
    return _NOT_KNOWN if fraction is None else f"{number(100 * fraction, 2)}\N{NO-BREAK SPACE}%"


def interval(low: float | None, high: float | None) -> str:
    """An interval in words. An interval without an upper end is a lower bound.

    Example:
        >>> interval(31.2, 46.9), interval(120.0, math.inf), interval(0.0, 12.0)
        ('31.2 to 46.9', 'more than 120', 'less than 12')
    """
    if low is None or high is None:
        return _NOT_KNOWN
    if math.isinf(high):
        return f"more than {number(low)}"
    return f"less than {number(high)}" if low == 0 else f"{number(low)} to {number(high)}"


def estimate(status: str, value: float | None, low: float | None, high: float | None) -> str:
    """A noise scale in words, as far as it is known.

    Example:
        >>> estimate("resolved", 38.1, 31.2, 46.9), estimate("unresolved", None, None, None)
        ('38.1 (31.2 to 46.9)', 'not known yet')
    """
    if status == "unresolved":
        return "not known yet"
    known = interval(low, high)
    return f"{number(value)} ({known})" if status == "resolved" else known


def in_units(middle: float | None, low: float | None, high: float | None, unit: str) -> str:
    """A number as far as it is known, with its unit.

    Example:
        >>> in_units(38.1, 31.2, 46.9, "sequences"), in_units(None, 120.0, math.inf, "sequences")
        ('38.1 sequences [31.2 – 46.9]', 'more than 120 sequences')
    """
    if middle is not None:
        of = unit.removesuffix("s") if number(middle) == "1" else unit
        return f"{number(middle)} {of} [{number(low)} – {number(high)}]"
    return f"{interval(low, high)} {unit}"


def units(n: float, unit: str) -> str:
    """A batch with its unit, a whole number where it is nearly one: "1 sequence", "16 sequences", "3.7 prompts".

    A logged batch is an average, which an epoch's last windows lower a little.

    Example:
        >>> units(1, "sequences"), units(15.97, "sequences"), units(1536, "rows"), units(3.7, "prompts")
        ('1 sequence', '16 sequences', '1,536 rows', '3.7 prompts')
    """
    is_whole = abs(n - round(n)) <= max(0.01 * n, 1e-6) and round(n) > 0
    size = count(n) if is_whole else number(n, 2)
    return f"{size} {unit.removesuffix('s') if size == '1' else unit}"


def moment(seconds: float) -> str:
    """A point in time, in UTC.

    Args:
        seconds: seconds since 1970.

    Example:
        >>> moment(1_700_000_000)
        '14 November 2023, 22:13 UTC'
    """
    at = datetime.fromtimestamp(seconds, UTC)
    return f"{at.day} {at:%B %Y, %H:%M} UTC"


def duration(seconds: float) -> str:
    """A length of time, to about two digits.

    Example:
        >>> duration(8000), duration(75), duration(0.0021)
        ('2 h 13 min', '1 min 15 s', '2.1 ms')
    """
    if seconds < 1:
        return f"{number(1000 * seconds, 2)} ms"
    if seconds < 60:
        return f"{number(seconds, 2)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min" if minutes else f"{hours:,} h"


def plural(n: int, singular: str) -> str:
    """A count with its noun.

    Example:
        >>> plural(1, "window"), plural(1200, "window")
        ('1 window', '1,200 windows')
    """
    return f"{n:,} {singular}{'' if n == 1 else 's'}"


def capital(text: str) -> str:
    """The text with a capital letter first.

    Example:
        >>> capital("iPads"), capital("")
        ('IPads', '')
    """
    return text[:1].upper() + text[1:]


def some_of(names: Sequence[str], most: int = 1) -> str:
    """The first of some names, with an ellipsis if there are more.

    Example:
        >>> some_of(["a", "b", "c"], 2), some_of(["a"])
        ('a, b, …', 'a')
    """
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


def shorten(name: str, longest: int = 28) -> str:
    """A name that fits beside an axis. An ellipsis replaces the middle of a long name.

    Example:
        >>> shorten("model.layers.0.self_attn.q_proj.weight", 21)
        'model.laye…roj.weight'
    """
    half = (longest - 1) // 2
    return name if len(name) <= longest else f"{name[:half]}…{name[-half:]}"


def _plain(size: float, digits: int) -> str:
    """A positive number without an exponent. 64.0 becomes 64, but 38.10 keeps its significant zero."""
    if size < 10 ** (digits - 1):
        size = float(f"{size:.{digits - 1}e}")  # round first: 0.99996 becomes 1.0, which needs fewer decimals
    if size == int(size):
        return f"{size:,.0f}"
    decimals = max(digits - 1 - math.floor(math.log10(size)), 0)
    return f"{size:,.{decimals}f}"
