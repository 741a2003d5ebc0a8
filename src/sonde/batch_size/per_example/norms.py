"""Exact squared norms of each example's gradient, during the user's own backward.

A forward hook on each layer that has a rule keeps what the layer was called with, and puts a hook on the tensor that it
returns. That hook adds no node to the graph. It sees the gradient of the output in backward, and the layer's rule
reduces the two at once. A leaf hook on each parameter sees the whole gradient, which the uses must add up to.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sonde.batch_size.batch_dim import LayerSaw, is_time_first, layers_that_know, seen_by
from sonde.batch_size.module_hook import put_on, takes_fast_path
from sonde.batch_size.per_example.call import Call, versions_of
from sonde.batch_size.per_example.checkpoints import Checkpoints, Stage, stage
from sonde.batch_size.per_example.fast_path import FastPaths
from sonde.batch_size.per_example.layer_hooks import LayerHook, arranged, hook_gradient_of
from sonde.batch_size.per_example.piece import PieceSums
from sonde.batch_size.per_example.refused_models import refuse_cut, refuse_model
from sonde.batch_size.per_example.result import PerExampleSquares
from sonde.batch_size.per_example.rule_choice import rule_of, rules_by_type
from sonde.batch_size.per_example.rules import (
    BATCH_NORMS,
    COUPLES_EXAMPLES,
    GradientsOf,
    LayerRule,
    NotCoveredError,
    couples_examples,
)
from sonde.batch_size.taps.autograd_internals import (
    accumulates,
    backward_number,
    in_backward,
    inside_another_backward,
    will_accumulate,
)
from sonde.parallel.devices import default_staging_bytes, is_capturing
from sonde.parallel.own_passes import is_in_own_pass
from sonde.parallel.wrappers import clean_name, find_wrapper
from sonde.wording import plural, some_of

P = ParamSpec("P")
T = TypeVar("T")

PLAIN: tuple[type[Tensor], ...] = (Tensor, nn.Parameter)
"""Classes of tensors whose elements are what they look like."""


def _timed(method: Callable[Concatenate[PerExampleNorms, P], T]) -> Callable[Concatenate[PerExampleNorms, P], T]:
    """Add the host time of a method to `seconds`. No such method calls another."""

    @functools.wraps(method)
    def timed(self: PerExampleNorms, /, *args: P.args, **keywords: P.kwargs) -> T:
        start = time.perf_counter()
        try:
            return method(self, *args, **keywords)
        finally:
            self.seconds += time.perf_counter() - start

    return timed


def _harmless(
    hook: Callable[Concatenate[PerExampleNorms, P], None],
) -> Callable[Concatenate[PerExampleNorms, P], None]:
    """A hook whose error does not end the user's forward or backward: `take` raises it."""

    @functools.wraps(hook)
    def harmless(self: PerExampleNorms, /, *args: P.args, **keywords: P.kwargs) -> None:
        try:
            hook(self, *args, **keywords)
        except Exception as error:  # a bug, a mistake in a rule of the user's, or no memory left
            self._failure = self._failure or error

    return harmless


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
        measured = dict(parameters)
        if not measured:
            raise ValueError("there are no parameters to measure: give at least one that is trained")
        self._model = model
        self._rules = rules_by_type(rules or {})
        self._parameters: list[Tensor] = list(measured.values() if leaves is None else leaves)
        refuse_cut(measured, self._parameters)
        # Between forwards, FSDP2 shows its shards in the layers; in forward, what it has gathered.
        self._indices = {id(p): i for i, p in enumerate(measured.values())}
        self._indices |= {id(p): i for i, p in enumerate(self._parameters)}
        self._several_backwards = several_backwards
        named = dict(zip(measured, self._parameters, strict=True))
        if staging_bytes is None:
            staging_bytes = default_staging_bytes(self._parameters[0].device)
        self._piece = PieceSums(named, staging_bytes, several_backwards)
        self._checkpoints = Checkpoints()
        self._unseen = self._reasons_for_unseen(list(measured))
        self._handles: list[RemovableHandle] = []
        self._fast_paths: FastPaths | None = None
        self.seconds = 0.0
        """Host time spent in hooks and methods so far."""
        self._forget_piece()

    def _forget_piece(self) -> None:
        self._backwards: set[int] = set()
        self._n_backwards = 0
        self._coupled: str | None = None
        self._saw: list[LayerSaw] = []
        """What layers were called with in this piece that know which dim is the batch."""
        self._failure: Exception | None = None

    @property
    def without_rule(self) -> dict[str, str]:
        """Parameters that no layer with a rule holds, and why. Others may turn out not to be covered in a piece."""
        return {name: reason for name, reason in self._unseen.items() if not reason.startswith(_USED_ELSEWHERE)}

    @property
    def is_open(self) -> bool:
        """Whether the hooks are installed."""
        return bool(self._handles)

    @_timed
    def open(self, *, watches_batch_norms: bool = False) -> None:
        """Install the hooks: before the first forward that is measured.

        Args:
            watches_batch_norms: do not refuse batch normalisation in train mode. A piece in which it ran is not
                covered then, and a layer may be put in evaluation mode later.

        Raises:
            RuntimeError: if they are installed already.
            ValueError: for compiled and graphed models, for batch normalisation in train mode, and for parameters that
                are not in the model any more.
        """
        if self._handles:
            raise RuntimeError("the hooks are installed already: close() comes before another open()")
        refuse_model(self._model, batch_norms=not watches_batch_norms)
        present = {self._indices[id(p)] for p in self._model.parameters() if id(p) in self._indices}
        if gone := [name for i, name in enumerate(self._unseen) if i not in present]:
            raise ValueError(
                f"the model has lost {plural(len(gone), 'parameter')} ({some_of(gone)}): attach anew (or make a new "
                "PerExampleNorms)"
            )
        for layer in layers_that_know(self._model):
            note = LayerHook(self._note_batch)
            self._handles.append(put_on(layer.register_forward_pre_hook, note, with_kwargs=True))
        fast = []
        for name, layer in self._model.named_modules():
            if isinstance(layer, torch.jit.ScriptModule):
                continue
            if takes_fast_path(layer):
                fast.append(layer)
            rule = rule_of(layer, self._rules)
            # Only layers with a rule are asked for their parameters: containers would go through all of the model's.
            if rule is not None and (held := self._held_by(layer)):
                hook = LayerHook(functools.partial(self._called, clean_name(name), rule, held))
                self._handles.append(put_on(layer.register_forward_hook, hook, prepend=True, with_kwargs=True))
                again = LayerHook(functools.partial(self._about_to_be_called, rule))
                self._handles.append(put_on(layer.register_forward_pre_hook, again, with_kwargs=True))
            if isinstance(layer, BATCH_NORMS):
                watch = LayerHook(functools.partial(self._batch_norm_called, clean_name(name)))
                self._handles.append(put_on(layer.register_forward_hook, watch, with_kwargs=True))
        if fast:
            hooks = self._before_fast_path, self._before_parent
            self._fast_paths = FastPaths(self._model, fast, self._handles, *hooks)
            self._handles += self._fast_paths.handles
        for i, p in enumerate(self._parameters):
            if p.requires_grad:  # it may have been frozen since
                self._handles.append(p.register_hook(functools.partial(self._whole, i)))

    @_timed
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
        if not self._handles:
            raise RuntimeError(
                "the hooks are not installed: take() belongs inside `with`, or between open() and close()"
            )
        if type(n_examples) is not int or n_examples < 1:
            raise ValueError(f"n_examples must be a whole number from 1 up, got {n_examples!r}")
        if (failure := self._failure) is not None:
            self.discard()
            raise failure
        if is_capturing(self._parameters[0].device):
            raise RuntimeError(f"take() was called while a CUDA graph is recorded: {_IN_CUDA_GRAPH}")
        reason = self._coupled
        if square := next((saw for saw in self._saw if saw.is_square), None):
            reason = (
                f"{square.kind} with batch_first=False was called with as many examples as positions, so that either "
                "may be the rows of other layers: take another number of examples"
            )
        if not self._backwards:
            reason = "no backward has added to `.grad` in this piece: call take() after loss.backward()"
        if self.had_unexpected_backwards:
            reason = (
                f"the piece had {self._n_backwards} backwards: call take() after each if they have different examples, "
                "or say several_backwards=True"
            )
        self._take_early_gradients()
        for call in self._checkpoints.forget_gradients():
            self._piece.refuse(list(call.indices.values()), "its checkpoint did not run it again in backward")
        squares = self._piece.take(n_examples, self._unseen, reason)
        self._forget_piece()
        return squares

    @property
    def had_unexpected_backwards(self) -> bool:
        """Whether the piece has had several backwards, which `several_backwards=False` excludes."""
        return self._n_backwards > 1 and not self._several_backwards

    def add_backwards_up(self) -> None:
        """From the next piece on, its backwards are of the same examples, as `several_backwards=True` says."""
        self._several_backwards = True
        self._piece.add_backwards_up()

    def discard(self) -> None:
        """Forget what backward has added since the last `take`."""
        self._checkpoints.forget_gradients()
        self._piece.new_piece()
        self._forget_piece()

    @_timed
    def forget_backwards(self) -> None:
        """Forget backwards since the last `take`, but not forwards whose backward is still to come."""
        self._put_back()
        if self._backwards:
            self._checkpoints.forget_gradients()
            self._piece.forget_gradients()
            self._backwards, self._n_backwards = set(), 0

    @_timed
    def close(self) -> None:
        """Remove every hook, and let go of everything that was kept."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._fast_paths = [], None
        self._piece.new_piece()
        self._piece.forget_calls()
        self._checkpoints.forget()
        self._forget_piece()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _held_by(self, layer: nn.Module) -> dict[str, int]:
        return {name: self._indices[id(p)] for name, p in layer.named_parameters() if id(p) in self._indices}

    def _reasons_for_unseen(self, names: Sequence[str]) -> dict[str, str]:
        """For each parameter, what it means if no rule sees it."""
        types: dict[int, str] = {}
        has_rule: set[int] = set()
        has_fast_path: set[int] = set()
        for layer in self._model.modules():
            if takes_fast_path(layer):
                has_fast_path.update(self._held_by(layer).values())
            if rule_of(layer, self._rules) is not None:
                has_rule.update(self._held_by(layer).values())
            for p in layer.parameters(recurse=False):
                if id(p) in self._indices:
                    types.setdefault(self._indices[id(p)], type(layer).__name__)
        return {
            name: _USED_ELSEWHERE + _OR_CALLED_ALONE * (i in has_fast_path)
            if i in has_rule
            else f"{types.get(i, 'its layer')} has no rule: give one in rules=, or leave the parameter out"
            for i, name in enumerate(names)
        }

    @_harmless
    @_timed
    def _called(
        self,
        name: str,
        rule: LayerRule,
        indices: Mapping[str, int],
        layer: nn.Module,
        args: tuple[Any, ...],
        keywords: dict[str, Any],
        output: Any,
    ) -> None:
        """After a layer's forward: keep what it was called with, and wait for the gradient of what it returned."""
        output = output[0] if isinstance(output, tuple) and output else output
        if not (torch.is_grad_enabled() and isinstance(output, Tensor) and output.requires_grad):
            return
        if is_capturing(output.device):
            self._piece.refuse(list(indices.values()), _IN_CUDA_GRAPH)
            return
        if self._is_refused(layer, indices, output):
            return
        if (now := stage()) in (Stage.AGAIN, Stage.NEITHER):
            return  # the graph of a forward that is run again has no backward
        call = Call(name, layer, rule, indices)
        try:
            with torch.no_grad():
                inputs = arranged(rule, layer, args, keywords)
                if rule.rows is not None and "weight" in indices:
                    call.table, call.rows = indices["weight"], rule.rows(layer, inputs)
        except NotCoveredError as reason:
            self._piece.refuse(list(indices.values()), str(reason))
            return
        if now is Stage.FIRST:
            call.is_run_again = True
            self._checkpoints.expect(call)
        else:
            call.inputs, call.versions = inputs, versions_of(inputs)
        self._piece.expect(call)
        hook_gradient_of(output, inputs, functools.partial(self._returned, call))

    def _is_refused(self, layer: nn.Module, indices: Mapping[str, int], output: Tensor) -> bool:
        """Whether a call cannot be measured, whatever its rule; the reason is noted."""
        if type(output) not in PLAIN or output.is_nested or output.layout is not torch.strided:
            kind = "nested" if output.is_nested else f"{type(output).__name__} with layout {output.layout}"
            self._piece.refuse(list(indices.values()), f"its layer returned a {kind} tensor: give it plain ones")
            return True
        held = dict(layer.named_parameters(remove_duplicate=False))  # under functional_call, any tensors
        replaced = [i for name, i in indices.items() if held.get(name) is not self._parameters[i]]
        self._piece.note_replaced(replaced)
        return bool(replaced)

    @_harmless
    @_timed
    def _note_batch(self, layer: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Before the forward of a layer that knows which dim is the batch."""
        if torch.is_grad_enabled() and (saw := seen_by(layer, args, keywords)) is not None:
            self._saw.append(saw)

    @_harmless
    @_timed
    def _before_fast_path(self, layer: nn.Module) -> None:
        """Before the forward of a layer that looks for hooks."""
        if self._fast_paths is not None:
            self._fast_paths.lift(layer)

    @_harmless
    @_timed
    def _before_parent(self, parent: nn.Module, args: object) -> None:
        """Before the forward of a module around such layers."""
        if torch.is_grad_enabled():
            self._put_back()

    def _put_back(self) -> None:
        if self._fast_paths is not None:
            self._fast_paths.put_back()

    @_harmless
    @_timed
    def _about_to_be_called(
        self, rule: LayerRule, layer: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        """Before a layer's forward: if a checkpoint runs it again, keep what it is called with.

        A checkpoint may stop inside its last layer, whose forward hook then never runs.
        """
        if in_backward() and torch.is_grad_enabled() and stage() is Stage.AGAIN:
            with contextlib.suppress(NotCoveredError), torch.no_grad():  # the first call has noted the reason
                self._checkpoints.run_again(layer, arranged(rule, layer, args, keywords))

    @_harmless
    @_timed
    def _returned(self, call: Call, grad: Tensor) -> None:
        """In backward, with the gradient of what a layer has returned."""
        if not self._handles or not any(will_accumulate(self._parameters[i]) for i in call.indices.values()):
            return
        if is_capturing(grad.device):
            self._piece.refuse(list(call.indices.values()), _IN_CUDA_GRAPH)
            return
        self._note_backward(grad)
        self._take_early_gradients()
        if call.is_run_again:
            self._checkpoints.keep_gradient(call, grad)
        else:
            self._add_use(call, grad)

    def _take_early_gradients(self) -> None:
        for call, grad in self._checkpoints.settle():
            self._add_use(call, grad)

    def _add_use(self, call: Call, grad: Tensor) -> None:
        if _is_autocast(grad):
            self._piece.note_dtype(call, torch.get_autocast_dtype(grad.device.type))
        with _plain_arithmetic(grad):
            dim = call.rule.example_dim(call.layer)
            if call.rule.may_read_time_first and is_time_first(grad.shape[:-1], self._saw):
                self._piece.read_time_first(call, self._saw)
                dim = 1
            self._piece.add_use(call, grad.movedim(dim, 0) if dim and grad.dim() > dim else grad)

    @_harmless
    @_timed
    def _whole(self, index: int, grad: Tensor | None) -> None:
        """In backward, with the whole gradient of a parameter."""
        if grad is None or is_in_own_pass(self._parameters[index]):
            return
        if accumulates(self._parameters[index]) and not is_capturing(grad.device):
            self._note_backward(grad)
            self._take_early_gradients()
            with _plain_arithmetic(grad):
                self._piece.add_whole(index, grad)

    def _batch_norm_called(self, name: str, layer: nn.Module, args: object, keywords: object, output: object) -> None:
        if torch.is_grad_enabled() and couples_examples(layer):
            self._coupled = f"{name}: {COUPLES_EXAMPLES}"

    def _note_backward(self, grad: Tensor) -> None:
        """Count the backwards of the piece, but for those that a reentrant checkpoint runs inside another."""
        if (number := backward_number()) not in self._backwards:
            self._put_back()
            self._backwards.add(number)
            self._n_backwards += not inside_another_backward(grad)


_IN_CUDA_GRAPH = "its layer ran inside a CUDA graph, whose replays run no hooks: measure outside of the graph"
_USED_ELSEWHERE = (
    "it had a gradient that no rule has seen: it is used outside its layer's forward, or that forward is not the one "
    "that the rule is for"
)
_OR_CALLED_ALONE = (
    ", or its nn.TransformerEncoderLayer was called in evaluation, and then alone in training: call the model instead"
)


def _is_autocast(grad: Tensor) -> bool:
    """Whether a backward runs inside autocast for its device."""
    return torch.amp.is_autocast_available(grad.device.type) and torch.is_autocast_enabled(grad.device.type)


@contextlib.contextmanager
def _plain_arithmetic(grad: Tensor) -> Iterator[None]:
    """Without a graph, as in a backward with create_graph, and without autocast."""
    without_autocast = (
        torch.autocast(grad.device.type, enabled=False) if _is_autocast(grad) else contextlib.nullcontext()
    )
    with torch.no_grad(), without_autocast:
        yield
