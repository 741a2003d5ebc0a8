"""Refuses models in which no layer's call tells the gradient of single examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from sonde.batch_size.module_hook import is_compiled
from sonde.batch_size.per_example.layer_hooks import is_graphed
from sonde.batch_size.per_example.rules import COUPLES_EXAMPLES, couples_examples
from sonde.parallel.placements import is_dtensor


def refuse_cut(parameters: Mapping[str, Tensor], leaves: Sequence[Tensor]) -> None:
    """Refuse parameters of which forward uses a part only.

    Args:
        parameters: what is measured, by name.
        leaves: the tensor that forward uses for each of them.

    Raises:
        ValueError: naming the first.
    """
    for name, leaf in zip(parameters, leaves, strict=True):
        if is_dtensor(leaf):
            raise ValueError(
                f"per-example norms need whole parameters in forward, and {name!r} is cut over ranks there: measure "
                "its pieces, as sonde.attach does"
            )


def refuse_model(model: nn.Module, *, batch_norms: bool) -> None:
    """Refuse a model whose layers are not called one by one, or couple the examples.

    Args:
        model: as it is trained.
        batch_norms: whether to refuse batch normalisation in train mode too.

    Raises:
        ValueError: naming the first layer.
    """
    for name, layer in model.named_modules():
        if is_graphed(layer):
            raise ValueError(
                "per-example norms need the calls of single layers, and torch.cuda.make_graphed_callables replays "
                f"{name or 'the model'!r} as a whole: measure its pieces, as sonde.attach does with two or more in a "
                "window, or measure a model that is not graphed"
            )
        if is_compiled(layer):
            raise ValueError(
                f"per-example norms need the calls of single layers, and {name or 'the model'!r} is compiled: "
                "measure before torch.compile, or train without it in the measured windows"
            )
        if batch_norms and couples_examples(layer):
            raise ValueError(f"{name!r} ({type(layer).__name__}): {COUPLES_EXAMPLES}")
