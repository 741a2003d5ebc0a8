"""Sums with about the precision of fp64 on devices that have fp32 alone: each number is a pair of fp32 numbers.

`FloatPairs` acts as an fp64 tensor. Its number is hi + lo, where lo holds what hi has lost to rounding: 48 bits, in the
range of fp32. Everything is made of fp32 additions and multiplications, one kernel for each, so that no compiler can
contract or reorder them.

References:
    Dekker 1971, A floating-point technique for extending the available precision (sum, product, division).
    Rump, Ogita and Oishi 2008, Accurate floating-point summation (sums in slices).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

_SPLIT = 2.0**12 + 1
"""Veltkamp's constant: x·c − (x·c − x) keeps the upper 12 of the 24 bits of x."""


class FloatPairs(Tensor):
    """An fp64 tensor, as far as its user can see, that is kept as two fp32 tensors.

    It has the operations that sums of squares need, and refuses others by name. Written for values, not for gradients.

    Args:
        hi: the numbers, rounded to fp32.
        lo: the rest, of the same shape and on the same device.
        both: the tensor of which they are the two halves, [2, …], if there is one.
    """

    hi: Tensor
    lo: Tensor
    both: Tensor | None

    @staticmethod
    def __new__(cls, hi: Tensor, lo: Tensor, both: Tensor | None = None) -> FloatPairs:
        """The wrapper, which holds no numbers of its own."""
        new: Any = Tensor._make_wrapper_subclass
        pairs = new(cls, hi.shape, strides=hi.stride(), dtype=torch.float64, device=hi.device, requires_grad=False)
        return cast(FloatPairs, pairs)

    def __init__(self, hi: Tensor, lo: Tensor, both: Tensor | None = None) -> None:
        self.hi, self.lo, self.both = hi, lo, both

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FloatPairs({self.hi}, {self.lo})"

    def tolist(self) -> Any:
        """The numbers on the host; waits for the device."""
        return joined(self.hi.cpu(), self.lo.cpu()).tolist()

    def item(self) -> Any:
        """The only number, on the host; waits for the device."""
        return joined(self.hi.cpu(), self.lo.cpu()).item()

    __float__ = item

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # torch.where would make an fp64 tensor of a number, on a device that has none.
        if function is torch.where:
            return _where(*args)
        if function is Tensor.where:
            return _where(args[1], args[0], args[2])
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = dict(kwargs or {})
        out = kwargs.pop("out", None)
        name = function.overloadpacket.__name__
        if name in _STRUCTURE:
            return _of_both(function, args, kwargs)
        rule = _RULES.get(name.removesuffix("_") if name != "copy_" else name)
        if rule is None:
            raise NotImplementedError(
                f"sums in pairs of fp32 have no {name}: move them to the CPU first, where they are fp64"
            )
        result = rule(*args, **kwargs)
        target = args[0] if name.endswith("_") else out
        return result if target is None else _write(target, result)


def widened(tensor: Tensor) -> FloatPairs:
    """A tensor's numbers as pairs: of any real dtype; fp32 and integers up to 2⁴⁸ exactly."""
    if isinstance(tensor, FloatPairs):
        return tensor
    hi = tensor.to(torch.float32)
    if tensor.dtype in (torch.float64, torch.int64, torch.int32):
        return FloatPairs(hi, _rest(tensor, hi))
    return FloatPairs(hi, torch.zeros_like(hi))


def rounded(tensor: Tensor) -> Tensor:
    """Pairs as plain fp32 numbers, other tensors as they are: for what needs no more than fp32."""
    return tensor.hi if isinstance(tensor, FloatPairs) else tensor


def zeros(shape: Sequence[int], device: torch.device) -> FloatPairs:
    """Zeros."""
    both = torch.zeros(2, *shape, dtype=torch.float32, device=device)
    return FloatPairs(both[0], both[1], both)


def joined(hi: Tensor, lo: Tensor) -> Tensor:
    """The numbers of pairs in fp64; on the CPU."""
    return hi.double() + lo.double()


def finite_or_zero(lo: Tensor) -> Tensor:
    """The lower halves; 0 where they are infinite or NaN, since the upper halves say so already."""
    return torch.where(torch.isfinite(lo), lo, 0.0)


# Exact sums and products of fp32 numbers. Infinite and NaN results stay in hi, and lo is 0 then.


def _two_sum(a: Tensor, b: Tensor) -> FloatPairs:
    total = a + b
    b_seen = total - a
    return FloatPairs(total, finite_or_zero((a - (total - b_seen)) + (b - b_seen)))


def _two_product(a: Tensor, b: Tensor) -> FloatPairs:
    product = a * b
    a_upper, b_upper = a * _SPLIT - (a * _SPLIT - a), b * _SPLIT - (b * _SPLIT - b)
    a_lower, b_lower = a - a_upper, b - b_upper
    lost = ((a_upper * b_upper - product) + a_upper * b_lower + a_lower * b_upper) + a_lower * b_lower
    return FloatPairs(product, finite_or_zero(lost))


# Arithmetic of pairs.


def _pairs(x: Any, like: Tensor | None = None) -> FloatPairs:
    """A number or tensor as pairs. Numbers go to the device of `like`."""
    if isinstance(x, Tensor):
        at_hand = like is not None and x.device.type == "cpu" and like.device.type != "cpu" and x.dim() == 0
        return _pairs(float(x), like) if at_hand else widened(x)
    assert like is not None
    hi = _fp32(float(x))
    lo = _fp32(float(x) - hi) if math.isfinite(hi) else 0.0
    return FloatPairs(*(torch.full((), part, dtype=torch.float32, device=like.device) for part in (hi, lo)))


def _fp32(x: float) -> float:
    try:
        return float(struct.unpack("f", struct.pack("f", x))[0])
    except OverflowError:
        return math.copysign(math.inf, x)


def _rest(tensor: Tensor, hi: Tensor) -> Tensor:
    """What rounding to fp32 has lost; 0 where the number has become infinite."""
    return finite_or_zero((tensor - hi.to(tensor.dtype)).to(torch.float32))


def _both(a: Any, b: Any) -> tuple[FloatPairs, FloatPairs]:
    like = a if isinstance(a, FloatPairs) else b
    return _pairs(a, like), _pairs(b, like)


def _add(a: Any, b: Any, *, alpha: float = 1) -> FloatPairs:
    a, b = _both(a, b if alpha == 1 else _multiply(b, alpha))
    total, low = _two_sum(a.hi, b.hi), _two_sum(a.lo, b.lo)
    first = _two_sum(total.hi, total.lo + low.hi)
    return _two_sum(first.hi, first.lo + low.lo)


def _add_single(a: FloatPairs, b: Tensor) -> FloatPairs:
    """Pairs and plain fp32 numbers."""
    total = _two_sum(a.hi, b)
    return _two_sum(total.hi, total.lo + a.lo)


def _subtract(a: Any, b: Any, *, alpha: float = 1) -> FloatPairs:
    return _add(a, _multiply(b, -alpha) if isinstance(b, Tensor) else -alpha * b)


def _multiply(a: Any, b: Any) -> FloatPairs:
    if not (isinstance(a, FloatPairs) or isinstance(b, FloatPairs)):
        a = widened(a)
    a, b = _both(a, b)
    product = _two_product(a.hi, b.hi)
    return _two_sum(product.hi, finite_or_zero(product.lo + (a.hi * b.lo + a.lo * b.hi)))


def _divide(a: Any, b: Any) -> FloatPairs:
    a, b = _both(a, b)
    quotient = a.hi / b.hi
    left = _subtract(a, _multiply(b, FloatPairs(quotient, torch.zeros_like(quotient))))
    return _two_sum(quotient, finite_or_zero(left.hi / b.hi))


def _square(a: FloatPairs) -> FloatPairs:
    return _multiply(a, a)


def _root(a: FloatPairs) -> FloatPairs:
    root = a.hi.sqrt()
    left = _subtract(a, _two_product(root, root))
    return _two_sum(root, finite_or_zero(left.hi / (2 * root)))


def _power(a: FloatPairs, exponent: float) -> FloatPairs:
    """Powers other than these have the precision of fp32."""
    exact: dict[float, Callable[[FloatPairs], FloatPairs]] = {1.0: lambda x: x, 2.0: _square, 0.5: _root}
    if (rule := exact.get(float(exponent))) is not None:
        return rule(a)
    return widened(a.hi.pow(exponent))


# Sums of many numbers.


def _sum(a: FloatPairs, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> FloatPairs:
    dims = list(range(a.dim())) if dim is None or dim == [] else [dim] if isinstance(dim, int) else list(dim)
    n = math.prod(a.shape[d] for d in dims)
    return _in_slices(a, n, lambda x: x.sum(dims, keepdim) if dims else x)


def _index_add(a: FloatPairs, dim: int, index: Tensor, source: Any, *, alpha: float = 1) -> FloatPairs:
    values = _multiply(source, alpha) if alpha != 1 else _pairs(source, a)
    a = widened(a)  # it may be fp32: only `source` need be pairs
    nothing = torch.zeros_like(a.hi)
    return _add(a, _in_slices(values, values.numel(), lambda x: nothing.index_add(dim, index, x)))


def _in_slices(a: FloatPairs, n: int, add_up: Callable[[Tensor], Tensor]) -> FloatPairs:
    """Sums of at most n of the numbers each, by a function that adds fp32 numbers up in any order.

    (x + σ) − σ is x rounded to a multiple of σ's last bit. If σ is 2n times the largest number, sums of n such
    multiples fit into 24 bits: however they are added, nothing is lost. The rest goes on to the next slice.
    """
    if not a.numel():
        return widened(add_up(a.hi))
    is_finite = torch.isfinite(a.hi)
    rest, lower = torch.where(is_finite, a.hi, 0.0), torch.where(is_finite, a.lo, 0.0)
    total = widened(add_up(torch.where(is_finite, 0.0, a.hi)))
    growth = math.ceil(math.log2(2 * n)) + 1  # σ is the largest number times this power of 2
    n_bits = max(23 - growth, 2)
    n_upper, n_lower = math.ceil(23 / n_bits), math.ceil(21 / n_bits)
    for k in range(n_upper + n_lower):
        if k == n_upper:  # the rest has come down to the size of the lower halves
            rest = rest + lower
        part, rest = _slice(rest, rest.abs().max() * 2.0**growth)
        total = _add_single(total, add_up(part))
    return _add_single(total, add_up(rest))


def _slice(x: Tensor, anchor: Tensor) -> tuple[Tensor, Tensor]:
    """The part of x that is a multiple of the anchor's last bit, and the rest."""
    part = finite_or_zero((x + anchor) - anchor)  # an anchor that overflows leaves everything to the rest
    return part, x - part


# Comparisons and choices.


def _compare(name: str) -> Callable[..., Tensor]:
    compare = getattr(torch, name)

    def rule(a: Any, b: Any) -> Tensor:
        a, b = _both(a, b)
        return torch.where(a.hi == b.hi, compare(a.lo, b.lo), compare(a.hi, b.hi))

    return rule


def _where(condition: Tensor, a: Any, b: Any) -> FloatPairs:
    a, b = _both(a, b)
    return FloatPairs(torch.where(condition, a.hi, b.hi), torch.where(condition, a.lo, b.lo))


def _clamp(a: FloatPairs, low: Any, high: Any) -> FloatPairs:
    """NaN stays NaN, since it is neither above nor below."""
    a = a if low is None else _where(_RULES["lt"](a, low), low, a)
    return a if high is None else _where(_RULES["gt"](a, high), high, a)


def _maximum(a: Any, b: Any) -> FloatPairs:
    a, b = _both(a, b)
    larger = _where(_RULES["ge"](a, b), a, b)
    return _where(torch.isnan(a.hi + b.hi), widened(torch.maximum(a.hi, b.hi)), larger)


def _largest(a: FloatPairs, dim: Any = None, keepdim: bool = False) -> FloatPairs:
    if dim not in (None, []):
        raise NotImplementedError("sums in pairs of fp32 have no maximum along a dim: take it of all of them")
    hi = a.hi.max()
    return FloatPairs(hi, finite_or_zero(torch.where(a.hi == hi, a.lo, -math.inf).max()))


def _copied(a: FloatPairs, *, dtype: Any = None, device: Any = None, non_blocking: bool = False, **_: Any) -> Tensor:
    """On the CPU, an fp64 tensor. On its own device, pairs; plain numbers of any other dtype."""
    if device is not None and torch.device(device).type != a.device.type:
        whole = joined(a.hi.to(device, non_blocking=non_blocking), a.lo.to(device, non_blocking=non_blocking))
        return whole.to(dtype or torch.float64)
    return FloatPairs(a.hi.clone(), a.lo.clone()) if dtype in (None, torch.float64) else a.hi.to(dtype)


def _write(target: Tensor, values: Any) -> Tensor:
    """Write values in place, and return the target."""
    if isinstance(target, FloatPairs):
        pairs = _pairs(values, target)
        target.hi.copy_(pairs.hi)
        target.lo.copy_(pairs.lo)
        return target
    if isinstance(values, FloatPairs):
        values = joined(values.hi.cpu(), values.lo.cpu()) if target.device.type == "cpu" else values.hi
    return target.copy_(values)


def _of_both(function: Any, args: Any, kwargs: Any) -> Any:
    """An operation that only moves numbers: the same for both halves. Plain tensors are widened."""
    on_device = _first(args)
    halves = [function(*_half(args, name, on_device), **_half(kwargs, name, on_device)) for name in ("hi", "lo")]
    if isinstance(halves[0], Tensor):
        return FloatPairs(*halves)
    return type(halves[0])(FloatPairs(hi, lo) for hi, lo in zip(*halves, strict=True))


def _first(args: Any) -> FloatPairs | None:
    for arg in args:
        found = arg if isinstance(arg, FloatPairs) else _first(arg) if isinstance(arg, (list, tuple)) else None
        if found is not None:
            return found
    return None


def _half(args: Any, name: str, like: FloatPairs | None) -> Any:
    if isinstance(args, dict):
        return {key: torch.float32 if key == "dtype" else value for key, value in args.items()}
    if isinstance(args, (list, tuple)):
        return type(args)(_half(arg, name, like) for arg in args)
    is_values = isinstance(args, Tensor) and (isinstance(args, FloatPairs) or args.is_floating_point())
    return getattr(_pairs(args, like), name) if is_values else args


_STRUCTURE = frozenset(
    (
        *("view", "_unsafe_view", "_reshape_alias", "select", "slice", "split", "split_with_sizes", "unbind", "expand"),
        *("squeeze", "unsqueeze", "t", "transpose", "permute", "detach", "alias", "clone", "index", "index_select"),
        *("cat", "stack", "neg", "zero_", "zeros_like", "empty_like", "new_zeros", "new_empty"),
    )
)
"""Operations that are the same for both halves."""

_RULES: dict[str, Callable[..., Any]] = {
    "add": _add,
    "sub": _subtract,
    "rsub": lambda a, b, alpha=1: _subtract(b, a, alpha=alpha),
    "mul": _multiply,
    "div": _divide,
    "reciprocal": lambda a: _divide(1.0, a),
    "square": _square,
    "sqrt": _root,
    "pow": _power,
    "abs": lambda a: _where(a.hi < 0, FloatPairs(-a.hi, -a.lo), a),
    "dot": lambda a, b: _sum(_multiply(a, b)),
    "sum": _sum,
    "mean": lambda a: _divide(_sum(a), float(a.numel())),
    "index_add": _index_add,
    "maximum": _maximum,
    "max": _largest,
    "amax": _largest,
    "where": _where,
    "nan_to_num": lambda a, *args, **kwargs: FloatPairs(torch.nan_to_num(a.hi, *args, **kwargs), a.lo),
    "fill": lambda a, value: _pairs(value, a),
    "clamp": lambda a, low=None, high=None: _clamp(a, low, high),
    "new_full": lambda a, size, value, **_: _add(a.new_zeros(size), value),
    "full_like": lambda a, value, **_: _add(torch.zeros_like(a), value),
    "ones_like": lambda a, **_: _add(torch.zeros_like(a), 1.0),
    "copy_": lambda target, values, non_blocking=False: values,
    "_to_copy": _copied,
    "isfinite": lambda a: torch.isfinite(a.hi),
    "isnan": lambda a: torch.isnan(a.hi),
    "isinf": lambda a: torch.isinf(a.hi),
    "any": lambda a: torch.any(a.hi != 0),
    **{name: _compare(name) for name in ("gt", "ge", "lt", "le", "eq", "ne")},
}
"""Rules by name; operations in place and into `out` write the result of the same rule."""
