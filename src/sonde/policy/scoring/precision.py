"""Scores in 32 bits of a model whose parameters, or whose arithmetic, have 16.

A small step changes scores by less than 16 bits resolve: of a step of AdamW at a rate of 1e-5, rounding leaves an error
8 times that of the sample. So parameters of 16 bits are converted while they are used, a block of layers at a time, and
autocast is off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sonde.parallel.placements import fsdp_groups, fsdp_states, is_fully_sharded, reshard

Precision = Literal["float32", "model"]
"""In which arithmetic responses are scored: in 32 bits at least, or as the model computes."""

Replaced = tuple[nn.Module, str, Tensor]
"""A parameter or buffer, and the module and the name it has its place in."""

NARROW = (torch.bfloat16, torch.float16)
"""The dtypes of 16 bits."""


def narrow_parameter(model: nn.Module) -> Tensor | None:
    """A parameter of 16 bits; None if there is none."""
    return next((p for p in model.parameters() if p.dtype in NARROW), None)


@contextlib.contextmanager
def in_float32(
    model: nn.Module, device_type: str, residuals: Mapping[Tensor, Tensor] | None = None
) -> Iterator[set[nn.Module]]:
    """Forwards of the model compute in 32 bits inside. Afterwards it has its own parameters again, whatever fails.

    Args:
        model: plain, in DDP, or cut by FSDP2.
        device_type: of the model, such as "cuda".
        residuals: added to parameters of 16 bits while they are converted.

    Yields:
        The modules whose parameters were converted so far, filled as their forwards run; none under FSDP2, which
        gathers in 32 bits.
    """
    with without_autocast(model, device_type), contextlib.ExitStack() as stack:
        converted = set[nn.Module]()
        if any(map(is_fully_sharded, model.modules())):
            stack.enter_context(gathered_in_float32(model, residuals))
        elif narrow_parameter(model) is not None:
            converted = stack.enter_context(_widened_blocks(model, residuals or {}))
        yield converted


@contextlib.contextmanager
def without_autocast(model: nn.Module, device_type: str) -> Iterator[None]:
    """Without autocast, and without the autocast that accelerate puts around a model's forward."""
    unwrapped: Any = getattr(model, "_original_forward", None)  # accelerate's name for it
    with contextlib.ExitStack() as stack:
        if torch.amp.is_autocast_available(device_type):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        if unwrapped is None:
            yield
            return
        wrapped = model.forward
        model.forward = unwrapped
        try:
            yield
        finally:
            model.forward = wrapped


@contextlib.contextmanager
def _widened_blocks(model: nn.Module, residuals: Mapping[Tensor, Tensor]) -> Iterator[set[nn.Module]]:
    """Each block has parameters of 32 bits while its forward runs. Yields the blocks that have run so far."""
    converted = set[nn.Module]()
    running: list[tuple[nn.Module, list[Replaced]]] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        running.append((module, []))
        _widen_parameters(blocks[module], residuals, running[-1][1])
        converted.add(module)
        return _widen(args), _widen(kwargs)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if running and running[-1][0] is module:  # not if a hook before `before` has failed
            restore()

    def restore() -> None:
        for changed in running.pop()[1]:
            _replace(*changed)

    blocks = _blocks(model)
    with contextlib.ExitStack() as stack:
        for module in blocks:
            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(after, always_call=True).remove)
        try:
            yield converted
        finally:
            while running:  # of blocks whose own forward never ended
                restore()


def _blocks(model: nn.Module) -> dict[nn.Module, list[nn.Module]]:
    """Modules whose parameters are converted together: a layer of a list with all inside it, and any other by itself.

    A layer may read the weights of the modules inside it, as adapters do to learn their dtype. The modules inside a
    layer are blocks too: checkpointing runs a layer's forward again without the layer's hooks, but with theirs.
    """
    blocks: dict[nn.Module, list[nn.Module]] = {}

    def visit(module: nn.Module) -> None:
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if any(t.dtype in NARROW for t in own):
            blocks[module] = [module]
        for child in module.children():
            if isinstance(module, nn.ModuleList) and narrow_parameter(child) is not None:
                blocks.update((inner, list(inner.modules())) for inner in child.modules())
            elif child not in blocks:
                visit(child)

    visit(model)
    return blocks


def _widen_parameters(modules: list[nn.Module], residuals: Mapping[Tensor, Tensor], replaced: list[Replaced]) -> None:
    """Put copies of 32 bits in the place of the modules' parameters and buffers of 16, and note what they replace."""
    copies: dict[Tensor, Tensor] = {}
    for module in modules:
        # Lists, since the modules change below.
        for name, tensor in [
            *module.named_parameters("", recurse=False, remove_duplicate=False),
            *module.named_buffers("", recurse=False, remove_duplicate=False),
        ]:
            if tensor.dtype not in NARROW:
                continue
            if tensor not in copies:
                copies[tensor] = tensor.float()
                if (rest := residuals.get(tensor)) is not None:
                    copies[tensor] = copies[tensor] + rest
            replaced.append((module, name, tensor))
            _replace(module, name, copies[tensor])


def _replace(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a tensor in the place of a parameter, which may be none itself, or of a buffer."""
    parameters: dict[str, Any] = module._parameters
    if name in parameters:
        parameters[name] = tensor
    else:
        setattr(module, name, tensor)


def _widen(value: Any) -> Any:
    """Tensors of 16 bits in 32, also inside tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in NARROW else value
    if type(value) is dict:
        return {name: _widen(v) for name, v in value.items()}
    return type(value)(map(_widen, value)) if type(value) in (tuple, list) else value


_KEPT = ("all_gather_outputs", "_unsharded_param", "_unsharded_inner_tensors", "_sharded_param_data")
"""What FSDP2 gathers, and what it keeps of that until the next time; private, since torch has no public names."""


def gathers_narrow(model: nn.Module) -> bool:
    """Whether FSDP2 gathers some of the model's parameters in 16 bits."""
    return any(_gathered_dtype(p) in NARROW for p in _parameters(model))


def why_not_in_float32(model: nn.Module) -> str:
    """Why FSDP2 cannot gather the model's parameters in 32 bits; empty if it can."""
    if any(hasattr(p.sharded_param.to_local(), "fsdp_post_all_gather") for p in _parameters(model)):
        return "FSDP2 gathers parameters of their own kind, such as float8"
    return ""


def has_run(model: nn.Module) -> bool:
    """Whether FSDP2 has run the model: in the first forward it decides on dtypes."""
    return all(hasattr(p, "param_dtype") for p in _parameters(model))


@contextlib.contextmanager
def gathered_in_float32(model: nn.Module, residuals: Mapping[Tensor, Tensor] | None = None) -> Iterator[None]:
    """Forwards inside gather parameters of 16 bits in 32, and cast neither inputs nor outputs to 16.

    On exit, FSDP2 has its own gathered parameters again, with whatever hooks they have.

    Args:
        model: with modules of FSDP2, that `why_not_in_float32` says nothing against.
        residuals: what is added to this rank's parts of parameters before they are gathered: the part of a step that 16
            bits do not hold.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    reshard(model)
    states = fsdp_states(model)
    policies = [state._mp_policy for state in states]
    changed = [p for p in _parameters(model) if _gathered_dtype(p) in NARROW]
    kept = [(p.param_dtype, {name: vars(p)[name] for name in _KEPT if name in vars(p)}) for p in changed]
    try:
        for state, policy in zip(states, policies, strict=True):
            if policy.param_dtype in NARROW or policy.output_dtype in NARROW:
                state._mp_policy = MixedPrecisionPolicy(param_dtype=torch.float32)
        for p in changed:
            p.param_dtype = None if p.orig_dtype == torch.float32 else torch.float32
            if residuals and (rest := residuals.get(p.sharded_param)) is not None:
                p.param_dtype = None
                # Flat; only parameters that are cut along their first dim have padding, and have it at the end.
                p._sharded_param_data = p._sharded_param_data.float()
                p._sharded_param_data[: rest.numel()].add_(rest.flatten())
            p.all_gather_outputs, p._unsharded_inner_tensors = [], []
            vars(p).pop("_unsharded_param", None)
        yield
    finally:
        reshard(model)
        for p, (dtype, gathered) in zip(changed, kept, strict=True):
            p.param_dtype = dtype
            for name in _KEPT:
                vars(p).pop(name, None)
            vars(p).update(gathered)
        for state, policy in zip(states, policies, strict=True):
            state._mp_policy = policy


def _parameters(model: nn.Module) -> list[Any]:
    """FSDP2's records of the parameters that it gathers."""
    return [p for group in fsdp_groups(model) for p in group.fsdp_params]


def _gathered_dtype(record: Any) -> torch.dtype:
    """The dtype in which FSDP2 gathers a parameter."""
    dtype: torch.dtype = getattr(record, "param_dtype", None) or record.sharded_param.dtype
    return dtype
