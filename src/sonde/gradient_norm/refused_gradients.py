"""Refuses gradients that cannot be counted with the others, and holds such errors until the other ranks have heard."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from sonde.parallel.placements import list_ranks, ranks_of
from sonde.parallel.shares import Share

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

_COUNTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_elements(dtype: torch.dtype, layout: torch.layout, is_meta: bool) -> None:
    """Refuse gradients whose elements cannot be squared and added up.

    Raises:
        ValueError: for complex and meta gradients, sparse ones that are not COO, and dtypes other than fp16, bf16, fp32
            and fp64.
    """
    if layout not in (torch.strided, torch.sparse_coo):
        raise ValueError(
            f"its layout is {layout}, and only dense and COO gradients can be counted: use to_sparse_coo()"
        )
    if dtype.is_complex:
        raise ValueError("it is complex, and only real gradients can be counted: use torch.view_as_real")
    if dtype not in _COUNTED_DTYPES:
        raise ValueError(f"its dtype is {dtype}, and only fp16, bf16, fp32 and fp64 can be counted: convert it")
    if is_meta:
        raise ValueError("it is on the meta device, which holds no values: materialise the model first")


def marks_of(parameter: Tensor) -> tuple[bool, bool, bool]:
    """The attributes by which other frameworks mark parameters that they have cut: of FSDP's first version, of
    DeepSpeed's ZeRO-3, and of Megatron's tensor parallelism."""
    return (
        bool(getattr(parameter, "_fsdp_flattened", False)),
        hasattr(parameter, "ds_id"),
        bool(getattr(parameter, "tensor_model_parallel", False)),
    )


def check_marks(parameter: Tensor, *, is_declared: bool) -> None:
    """Refuse plain tensors whose attributes say that other frameworks have cut them.

    Raises:
        ValueError: for a parameter of FSDP's first version, of DeepSpeed's ZeRO-3, or of Megatron's tensor parallelism.
    """
    is_flattened, is_partitioned, is_shard = marks_of(parameter)
    if is_flattened:
        raise ValueError(
            "FSDP's first version does not tell how it cuts parameters: use fully_shard, or FSDP's own clip_grad_norm_"
        )
    if is_partitioned:
        raise ValueError(
            "DeepSpeed's ZeRO-3 holds it in parts that it does not show: set gradient_clipping in DeepSpeed's "
            "configuration, and read engine.get_global_grad_norm()"
        )
    if is_shard and not is_declared and not hasattr(parameter, "_spec"):
        raise ValueError(
            "its attribute tensor_model_parallel says that it is a shard, and a plain tensor does not show over which "
            "ranks: pass mesh= of all ranks, and replicas= (how many of them hold the same shard)"
        )


def check_share(share: Share, device: torch.device, mesh: DeviceMesh | None, *, n_replicas: int | None = None) -> None:
    """Refuse a gradient that cannot be summed with the others.

    Args:
        share: of the gradient.
        device: of its local part.
        mesh: all ranks that hold any of the model, if it was given.
        n_replicas: how many of these ranks hold the same values, if it was declared.

    Raises:
        ValueError: when the gradient is on ranks outside `mesh`; when this rank is outside the gradient's mesh; when it
            is on another kind of device than its mesh (the CPU is allowed, since gradients may be offloaded, unless
            they must still be summed); when its placements contradict `n_replicas`.
    """
    gradient_mesh = share.mesh if share.mesh is not None else mesh
    if gradient_mesh is not None and device.type not in (gradient_mesh.device_type, "cpu"):
        raise ValueError(
            f"it is on {device.type} and its mesh on {gradient_mesh.device_type}: move the gradient to the mesh's "
            "device, or make the mesh on the gradient's"
        )
    if share.mesh is None:
        return
    if share.partial and device.type != share.mesh.device_type:
        raise ValueError(
            f"it must still be summed on {share.mesh.device_type}, but is on {device.type}: move it to "
            f"{share.mesh.device_type}"
        )
    if share.mesh.get_coordinate() is None and n_replicas is None:
        raise ValueError(
            f"it is on ranks {list_ranks(ranks_of(share.mesh))}, and this rank, which is not among them, cannot know "
            "how many ranks hold the same values: pass the mesh of all ranks, and replicas= for this parameter"
        )
    if mesh is None:
        return
    if not ranks_of(share.mesh) <= ranks_of(mesh):
        raise ValueError(
            f"it is on ranks {list_ranks(ranks_of(share.mesh))}, which mesh= ({list_ranks(ranks_of(mesh))}) does "
            "not contain: pass the mesh of all ranks that hold the model"
        )
    # Each shard is on at least as many ranks as its own mesh has copies, and on at most as many as all ranks allow.
    least, most = share.mesh.size() // share.n_shards, mesh.size() // share.n_shards
    if n_replicas is not None and (n_replicas % least or n_replicas > most):
        raise ValueError(
            f"it is cut into {share.n_shards} shards over {share.mesh.size()} of {mesh.size()} ranks, so replicas= "
            f"must be a multiple of {least}, at most {most}, got {n_replicas}: pass how many ranks hold the same values"
        )


def check_stages(share: Share, pp_mesh: DeviceMesh | None, in_stage: Collection[int]) -> None:
    """Refuse a `pp_mesh` whose ranks are not pipeline stages: stages have parameters of their own.

    Args:
        share: of the gradient.
        pp_mesh: the stages, if they were given.
        in_stage: the ranks of this rank's stage; empty if they are not known.

    Raises:
        ValueError: when the gradient is cut over ranks of `pp_mesh`, or over ranks of several stages.
    """
    if pp_mesh is None or share.mesh is None:
        return
    if len(shared := ranks_of(pp_mesh) & set(share.ranks)) > 1:
        raise ValueError(
            f"it is cut over ranks {list_ranks(shared)} of pp_mesh=, whose ranks are pipeline stages with parameters "
            "of their own: pass the mesh axis of the stages alone"
        )
    if in_stage and (others := set(share.ranks).difference(in_stage)):
        raise ValueError(
            f"it is cut over ranks {list_ranks(others)} too, which are in other pipeline stages than this "
            "rank: pass a mesh= that has the pipeline stages as an axis, and that axis as pp_mesh="
        )


class HeldError:
    """The first error found on this rank, to be raised after the next sum over ranks.

    A rank that raised at once would never join the sum, and its peers would wait there for ever. So one rule covers
    whatever is wrong on one rank: hold the error, take part in the sum with the failure flag set, raise after the sum.
    `global_norm` and `compare_plans` raise; everything before them holds.

    Two cases cannot be covered, and the peers wait until their backend gives up. One is an error in a sum itself, such
    as no memory for the buffer in which partial gradients are summed. The other is a rank without `mesh=` whose
    parameters cannot be used: it does not know which sums its peers make.

    Args:
        first: an error that was found already.

    Example:
        >>> problem = HeldError()
        >>> problem.attempt(int, "one", otherwise=0)
        0
        >>> problem.first
        ValueError("invalid literal for int() with base 10: 'one'")
    """

    def __init__(self, first: ValueError | None = None) -> None:
        self.first = first

    def keep(self, error: ValueError | None) -> None:
        """Hold this error, if it is one and there is no earlier one."""
        self.first = self.first or error

    def attempt(self, function: Callable[..., T], *args: Any, otherwise: T, what: str = "the call failed") -> T:
        """What a function returns; if it raises, the error is held, and `otherwise` is returned.

        Args:
            function: called with `args`.
            args: of the function.
            otherwise: returned after an error.
            what: of an error that is no `ValueError`, what could not be done.
        """
        try:
            return function(*args)
        except ValueError as error:
            self.keep(error)
        except Exception as error:  # of a gradient of a kind that nobody knows, no memory, or a defect
            problem = ValueError(f"{what}: {type(error).__name__}: {error}")
            problem.__cause__ = error
            self.keep(problem)
        return otherwise
