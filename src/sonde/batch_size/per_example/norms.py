"""Exact squared norms of each example's gradient, during the user's own backward.

A forward hook on each layer that has a rule keeps what the layer was called with, and puts a hook on the tensor that it
returns. That hook adds no node to the graph. It sees the gradient of the output in backward, and the layer's rule
reduces the two at once. A leaf hook on each parameter sees the whole gradient, which the uses must add up to.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from sonde.batch_size.batch_dim import LayerSaw, layers_that_know, seen_by
from sonde.batch_size.hooks import (
    ModuleHook,
    accumulates,
    backward_number,
    in_backward,
    inside_another_backward,
    is_compiled,
    is_in_graph,
    put_on,
    takes_fast_path,
    will_accumulate,
)
from sonde.batch_size.per_example.covered import PerExampleSquares
from sonde.batch_size.per_example.piece import Call, Layer, PieceSums, Uses
from sonde.batch_size.per_example.rules import (
    BATCH_NORMS,
    COUPLES_EXAMPLES,
    GradientsOf,
    Inputs,
    NotCoveredError,
    couples_examples,
    rule_of,
    rules_by_type,
)
from sonde.batch_size.window_clock import MEASURING, OwnTime
from sonde.parallel.devices import default_staging_bytes, is_capturing
from sonde.parallel.model_state import is_in_own_pass
from sonde.parallel.placements import is_dtensor
from sonde.parallel.wrappers import clean_name, find_wrapper
from sonde.wording import plural, some_of

PLAIN: tuple[type[Tensor], ...] = (Tensor, nn.Parameter)
"""Classes of tensors whose elements are what they look like."""
_CHECKPOINTS = "torch.utils.checkpoint"
_OF_COMPILED_MODULES = r"Using `torch\.compile\(module\)` when there are global hooks"


class PerExampleNorms:
    """Squared norms of each example's own gradient, |h_b|² for every parameter and every example of a piece.

    The examples are in the first dim of what each layer returns (for `nn.MultiheadAttention`, where `batch_first`
    says). Nothing is changed: gradients, outputs and random numbers are bit for bit those without it. Hooks are there
    between `open` and `close` only, or inside `with`. A parameter that a rule does not cover is named with the reason,
    never guessed.

    Measured on this rank: under DDP these are the gradients of the rank's own examples.

    Args:
        model: as it is trained, plain, in DDP or under FSDP2. Under FSDP2 without `parameters`, on all ranks together.
        parameters: what to measure, by name; all trainable parameters by default.
        leaves: the tensor that forward uses for each of them, [parameters], where it is another one: FSDP2 gathers it.
        rules: rules for layers of your own, by type. A rule takes the layer, a tuple of what it was called with, and
            the gradient of its output. It returns each example's gradient by the parameter's name within the layer: a
            tensor `[examples, *shape of the parameter]`, or `OuterProducts` for a matrix. It may raise
            `NotCoveredError` with the reason. Tensors come in fp32 or better. A layer's only input tensor comes in
            chunks of examples.
        staging_bytes: memory for intermediate results, by default 8 MiB, or 128 MiB on an accelerator. A single
            example's weight gradient is formed in blocks that fit. Its activations at one layer may take more. It also
            bounds what is kept of a parameter that is used several times (unless one gradient of it takes more); beyond
            that, the parameter is not covered.
        several_backwards: whether a piece may have several backwards, all of the same examples, whose gradients add
            up. This keeps the inputs and output gradients of all layers until the piece ends.

    Raises:
        ValueError: for parameters that are cut in forward too (tensor parallelism), and for a model without trainable
            parameters.

    Example:
        >>> class Scale(nn.Module):
        ...     def __init__(self, width):
        ...         super().__init__()
        ...         self.scale = nn.Parameter(torch.ones(width))
        ...     def forward(self, x):
        ...         return x * self.scale
        >>> def scale_rule(layer, inputs, grad_output):  # [examples, positions, width]
        ...     return {"scale": (grad_output * inputs[0]).sum(1)}
        >>> model = nn.Sequential(nn.Linear(3, 4), Scale(4))
        >>> with PerExampleNorms(model, rules={Scale: scale_rule}) as norms:
        ...     model(torch.ones(8, 5, 3)).square().mean().backward()
        ...     squares = norms.take(n_examples=8)
        >>> squares.names, squares.sq_norms.shape, squares.not_covered()
        (('0.weight', '0.bias', '1.scale'), torch.Size([3, 8]), {})
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        parameters: Mapping[str, nn.Parameter] | None = None,
        leaves: Sequence[Tensor] | None = None,
        rules: Mapping[type[nn.Module], GradientsOf] | None = None,
        staging_bytes: int | None = None,
        several_backwards: bool = False,
    ) -> None:
        if staging_bytes is not None and staging_bytes <= 0:
            raise ValueError(
                f"staging_bytes must be positive, got {staging_bytes}: 8 * 2**20 is the default on the CPU"
            )
        if parameters is None:
            wrapper = find_wrapper(model)
            parameters, leaves = wrapper.parameters, wrapper.leaves
        if not parameters:
            raise ValueError("there are no parameters to measure: give at least one that is trained")
        measured: list[Tensor] = list(parameters.values() if leaves is None else leaves)
        _refuse_cut(parameters, measured)
        self._model, self._rules, self._device = model, rules_by_type(rules or {}), measured[0].device
        named = dict(zip(parameters, measured, strict=True))
        self._piece = PieceSums(
            named, staging_bytes or default_staging_bytes(self._device), several_backwards=several_backwards
        )
        # Between forwards, FSDP2 shows its shards in the layers; in forward, what it has gathered.
        self._uses = dict(zip(map(id, parameters.values()), self._piece.uses, strict=True))
        self._uses |= dict(zip(map(id, measured), self._piece.uses, strict=True))
        self._say_what_is_unseen()
        self._layers: dict[nn.Module, Layer] = {}
        """The layers that have a rule, while hooks are installed."""
        self._know_the_batch: set[nn.Module] = set()
        self._batch_norms: dict[nn.Module, str] = {}
        self._handles: list[RemovableHandle] = []
        self.is_open = False
        """Whether the hooks are installed."""
        self.own = OwnTime()
        """Counts what its hooks take."""
        self.discard()

    def discard(self) -> None:
        """Forget what backward has added since the last `take`, and what forward has shown."""
        self._forget_backwards()
        self._saw: list[LayerSaw] = []
        """What layers were called with that know which dim is the batch."""
        self._coupled: str | None = None
        self._failure: Exception | None = None

    def _forget_backwards(self) -> None:
        self._piece.forget()
        self._backwards: set[int] = set()
        self._n_backwards = 0

    @property
    def without_rule(self) -> dict[str, str]:
        """Parameters that no layer with a rule holds, and why. Others may turn out not to be covered in a piece."""
        return {uses.name: uses.if_unseen for uses in self._piece.uses if uses.if_unseen != _USED_ELSEWHERE}

    def open(self) -> None:
        """Install the hooks: before the first forward that is measured.

        Raises:
            RuntimeError: if they are installed already.
            ValueError: for compiled and graphed models, and for parameters that are not in the model any more.
        """
        if self.is_open:
            raise RuntimeError("the hooks are installed already: close() comes before another open()")
        _refuse_model(self._model)
        present = {self._uses[id(p)] for p in self._model.parameters() if id(p) in self._uses}
        if gone := [uses.name for uses in self._piece.uses if uses not in present]:
            raise ValueError(
                f"the model has lost {plural(len(gone), 'parameter')} ({some_of(gone)}): attach anew (or make a new "
                "PerExampleNorms)"
            )
        self._know_the_batch = set(layers_that_know(self._model))
        for name, layer in self._model.named_modules():
            if isinstance(layer, BATCH_NORMS):
                self._batch_norms[layer] = clean_name(name)
            rule = rule_of(layer, self._rules)
            # Only layers with a rule are asked for their parameters: containers would go through all of the model's.
            if rule is not None and (held := self._held_by(layer)):
                self._layers[layer] = Layer(clean_name(name), layer, rule, held)
        self._hook_layers()
        self._hooked = {uses for uses in self._piece.uses if uses.parameter.requires_grad}  # some may have been frozen
        for uses in self._hooked:
            self._handles.append(uses.parameter.register_hook(self._harmless(self._whole, uses)))
        self.is_open = True

    @property
    def knows_time_first(self) -> bool:
        """Whether a layer shows which dim is the batch where that may be time."""
        return bool(self._know_the_batch)

    @property
    def released(self) -> list[str]:
        """Names of the parameters that have become trainable since the hooks were installed, and have none."""
        return [uses.name for uses in self._piece.uses if uses.parameter.requires_grad and uses not in self._hooked]

    def _hook_layers(self) -> None:
        """Have `_called` run after the forward of each watched layer."""
        hook = _LayerHook(self._harmless(self._called))
        if any(map(takes_fast_path, self._model.modules())):
            # An `nn.TransformerEncoderLayer` that finds a hook on itself or inside gives other bits in evaluation. It
            # does not see one that is on all modules.
            self._handles.append(torch_module.register_module_forward_hook(hook, with_kwargs=True, always_call=True))
            _silence_compiled_modules()
            return
        for layer in self._layers.keys() | self._know_the_batch | self._batch_norms.keys():
            how = {"with_kwargs": True, "prepend": True, "always_call": True}
            self._handles.append(put_on(layer.register_forward_hook, hook, **how))

    def _harmless(self, hook: Callable[..., None], *first: Any) -> Callable[..., None]:
        """A hook whose time counts, and whose error does not end the user's forward or backward: `take` raises it."""

        def harmless(*args: Any) -> None:
            start = time.perf_counter()
            try:
                hook(*first, *args)
            except Exception as error:  # a bug, a mistake in a rule of the user's, or no memory left
                self._failure = self._failure or error
            finally:
                self.own.spent[MEASURING] += time.perf_counter() - start

        return harmless

    def take(self, n_examples: int) -> PerExampleSquares:
        """The squared norms of the piece: of all that backward has added since the last call.

        Args:
            n_examples: examples in the piece. A layer that has returned another number in its first dim is not covered.

        Raises:
            RuntimeError: if the hooks are not installed, or a CUDA graph is recorded.
            ValueError: if `n_examples` is not a whole number from 1 up.
            Exception: what went wrong in a forward or backward of the piece, such as a mistake in a rule. The piece is
                forgotten.
        """
        if not self.is_open:
            raise RuntimeError(
                "the hooks are not installed: take() belongs inside `with`, or between open() and close()"
            )
        if type(n_examples) is not int or n_examples < 1:
            raise ValueError(f"n_examples must be a whole number from 1 up, got {n_examples!r}")
        if (failure := self._failure) is not None:
            self.discard()
            raise failure
        if is_capturing(self._device):
            raise RuntimeError(
                "take() was called while a CUDA graph is recorded, whose replays run no hooks: measure outside of it"
            )
        with _plain_arithmetic(self._device):
            squares = self._piece.take(n_examples, self._why_nothing())
        self.discard()
        return squares

    def _why_nothing(self) -> str | None:
        """Why no parameter is covered in this piece, if so."""
        if self.had_unexpected_backwards:
            return (
                f"the piece had {self._n_backwards} backwards: add the losses and call backward once, take() after "
                "each if they have different examples, or say several_backwards=True"
            )
        if released := self.released:
            names = some_of(released)
            return f"{names} became trainable after the hooks were installed: call close(), and open() again"
        if not self._backwards:
            return "no backward has added to `.grad` in this piece: call take() after loss.backward()"
        if square := next((saw for saw in self._saw if saw.is_square), None):
            return (
                f"{square.kind} with batch_first=False was called with as many examples as positions, so that either "
                "may be the rows of other layers: take another number of examples"
            )
        return self._coupled

    @property
    def had_unexpected_backwards(self) -> bool:
        """Whether the piece has had several backwards, which `several_backwards=False` excludes."""
        return self._n_backwards > 1 and not self._piece.several_backwards

    def add_backwards_up(self) -> None:
        """From the next piece on, its backwards are of the same examples, as `several_backwards=True` says."""
        self._piece.add_backwards_up()

    def forget_backwards(self) -> None:
        """Forget backwards since the last `take`, but not forwards whose backward is still to come."""
        if self._backwards:
            self._forget_backwards()

    def close(self) -> None:
        """Remove every hook, and let go of everything that was kept."""
        for handle in self._handles:
            handle.remove()
            # A hook on all modules leaves its number behind, by which torch would think that one is there.
            getattr(torch_module, "_global_forward_hooks_with_kwargs", {}).pop(handle.id, None)
        self._handles, self._layers, self._batch_norms, self.is_open = [], {}, {}, False
        self._piece.forget_calls()
        self.discard()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _held_by(self, layer: nn.Module, *, recurse: bool = True) -> dict[str, Uses]:
        return {n: self._uses[id(p)] for n, p in layer.named_parameters(recurse=recurse) if id(p) in self._uses}

    def _say_what_is_unseen(self) -> None:
        """For each parameter, what it means if no rule sees it."""
        for uses in self._piece.uses:
            uses.if_unseen = _NO_RULE.format("its layer")
        for layer in self._model.modules():
            has_rule = rule_of(layer, self._rules) is not None
            for uses in self._held_by(layer, recurse=has_rule).values():
                if has_rule:
                    uses.if_unseen = _USED_ELSEWHERE
                elif uses.if_unseen != _USED_ELSEWHERE:
                    uses.if_unseen = _NO_RULE.format(type(layer).__name__)

    def _called(self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        """After the forward of any watched layer.

        Without an output if forward was left by an error, as a checkpoint does inside its last layer.
        """
        if not torch.is_grad_enabled():
            return
        if module in self._know_the_batch and (saw := seen_by(module, args, keywords)) is not None:
            self._saw.append(saw)
        if module in self._batch_norms and couples_examples(module):
            self._coupled = f"{self._batch_norms[module]}: {COUPLES_EXAMPLES}"
        if (layer := self._layers.get(module)) is not None:
            self._wait_for_gradient(layer, args, keywords, output)

    def _wait_for_gradient(self, layer: Layer, args: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        """Keep what a layer was called with, and wait for the gradient of what it returned."""
        now = stage()
        if now == "again" and in_backward():
            with contextlib.suppress(NotCoveredError):  # the first call has noted the reason
                self._piece.again[layer].append(_arranged(layer, args, keywords))
        output = output[0] if isinstance(output, tuple) and output else output
        # The graph of a forward that is run again has no backward. What is not waited for is not covered.
        is_plain = type(output) in PLAIN and not output.is_nested and output.layout is torch.strided
        if now in ("again", "inner") or not is_plain or not output.requires_grad or is_capturing(output.device):
            return
        call, inputs = Call(layer, output.shape, self._saw), ()
        try:
            inputs = _arranged(layer, args, keywords)
        except NotCoveredError as reason:
            call.why_not = str(reason)
        # What a table looks up is small, and other uses of the table may ask for it: it is kept in checkpoints too.
        call.is_run_again = now == "first" and layer.rule.rows is None and not call.why_not
        if not call.is_run_again:
            call.inputs = inputs
        self._piece.expect(call)
        _hook_gradient_of(output, inputs, self._harmless(self._returned, call))

    def _returned(self, call: Call, grad: Tensor) -> None:
        """In backward, with the gradient of what a layer has returned."""
        is_measured = any(will_accumulate(uses.parameter) for uses in call.layer.parameters.values())
        if not self.is_open or not is_measured or is_capturing(grad.device):
            return
        self._note_backward(grad)
        with _plain_arithmetic(grad.device) as dtype:
            self._piece.add_use(call, grad, dtype or grad.dtype)

    def _whole(self, uses: Uses, grad: Tensor | None) -> None:
        """In backward, with the whole gradient of a parameter."""
        if grad is None or is_in_own_pass(uses.parameter):
            return
        if accumulates(uses.parameter) and not is_capturing(grad.device):
            self._note_backward(grad)
            with _plain_arithmetic(grad.device):
                self._piece.add_whole(uses, grad)

    def _note_backward(self, grad: Tensor) -> None:
        """Count the backwards of the piece, but for those that a reentrant checkpoint runs inside another."""
        if (number := backward_number()) not in self._backwards:
            self._backwards.add(number)
            self._n_backwards += not inside_another_backward(grad)


_NO_RULE = "{} has no rule: give one in rules=, or leave the parameter out"
_USED_ELSEWHERE = (
    "it had a gradient that no rule has seen: it is used outside its layer's forward, or that forward was replaced or "
    "returned no plain tensor, or its rule does not give it by this name"
)


class _LayerHook(ModuleHook):
    """A hook on layers. In a pass of sonde's own, and in a graph that is being made, it does nothing.

    What the layer's parameters miss in a graph is noticed in backward.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        # Where an error left a forward, torch gives a hook on all modules no keywords.
        *keywords, output = rest
        if not (is_in_graph() or is_in_own_pass(layer)):
            self._function(layer, args, keywords[0] if keywords else {}, output)


def _silence_compiled_modules() -> None:
    """A compiled module that is called beside a hook on all modules would warn. Ours does nothing in compiled code."""
    # Once: each change of the filters would have Python show again what it has shown.
    if all(getattr(message, "pattern", "") != _OF_COMPILED_MODULES for _, message, *_ in warnings.filters):
        warnings.filterwarnings("ignore", _OF_COMPILED_MODULES)


@contextlib.contextmanager
def _plain_arithmetic(device: torch.device) -> Iterator[torch.dtype | None]:
    """Without a graph, as in a backward with create_graph, and without autocast, whose dtype it gives."""
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        with torch.no_grad(), torch.autocast(kind, enabled=False):
            yield torch.get_autocast_dtype(kind)
    else:
        with torch.no_grad():
            yield None


def stage() -> Literal["plain", "first", "again", "inner"]:
    """How the forward that is running now stands to activation checkpoints, by their functions on the stack.

    A non-reentrant checkpoint (`use_reentrant=False`) builds its graph in the first forward, whose outputs get the
    hooks, and throws the activations away. In backward it runs the forward again, for the activations alone. The first
    call's input is then taken from the second call. A reentrant checkpoint builds its graph in backward, and needs none
    of this: that is "plain", as without any checkpoint. Where an outer checkpoint runs again, an inner one throws its
    activations away once more.
    """
    frame, is_inside = sys._getframe(1), False
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        if frame.f_globals.get("__name__") != _CHECKPOINTS:
            continue
        function = frame.f_code.co_name
        if function == "recompute_fn":
            return "inner" if is_inside else "again"
        if function == "backward":  # a reentrant checkpoint builds its graph here
            break
        is_inside |= function == "checkpoint"
    return "first" if is_inside else "plain"


def _arranged(layer: Layer, args: tuple[Any, ...], keywords: dict[str, Any]) -> Inputs:
    """What a layer was called with, as its rule takes it, without a graph."""
    if len(keywords) > 1:  # in the order of the layer's forward
        order = list(inspect.signature(layer.module.forward).parameters)
        keywords = dict(sorted(keywords.items(), key=lambda item: (*order, item[0]).index(item[0])))
    with torch.no_grad():
        given = layer.rule.arrange(layer.module, args, keywords)
        return tuple(t.detach() if isinstance(t, Tensor) else t for t in given)


def _hook_gradient_of(output: Tensor, inputs: Inputs, function: Callable[[Tensor], None]) -> None:
    """Call a function with the gradient of what a layer returned, whatever is written into it later.

    A write in place into a view leaves the view's own hooks behind: gradients then go to the tensor under it by another
    way. Linear layers return views for three dims, so `relu_` after them would do this. The hook of a view that shows
    all of the tensor under it is therefore put on that tensor, if the layer made it: an input in the same memory may
    have gradients from elsewhere too.
    """
    base, shape, stride = output._base, output.shape, output.stride()
    memory = {t.untyped_storage().data_ptr() for t in inputs if isinstance(t, Tensor)}
    is_whole = base is not None and base.numel() == output.numel() and base.is_contiguous()
    if base is None or base.grad_fn is None or not is_whole or base.untyped_storage().data_ptr() in memory:
        output.register_hook(function)
    else:
        base.register_hook(lambda grad: function(grad.contiguous().as_strided(shape, stride)))


def _refuse_cut(parameters: Mapping[str, Tensor], leaves: Sequence[Tensor]) -> None:
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


def _refuse_model(model: nn.Module) -> None:
    """Refuse a model whose layers are not called one by one.

    Raises:
        ValueError: naming the first layer.
    """
    for name, layer in model.named_modules():
        is_graphed = getattr(vars(layer).get("forward"), "__module__", None) == "torch.cuda.graphs"
        if is_graphed or is_compiled(layer):
            how = "replayed as a whole by torch.cuda.make_graphed_callables" if is_graphed else "compiled"
            raise ValueError(
                f"per-example norms need the calls of single layers, and {name or 'the model'!r} is {how}: measure "
                "without that, or measure its pieces, as sonde.attach does with two or more in a window"
            )
