"""Exact squared norms of each example's gradient, during the user's own backward.

A forward hook on each layer that has a rule keeps what the layer was called with, and puts a hook on the tensor that it
returns. That hook adds no node to the graph. It sees the gradient of the output in backward, and the layer's rule
reduces the two at once. A leaf hook on each parameter sees the whole gradient, which the uses must add up to.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sonde.batch_size.batch_dim import layers_that_know, seen_by
from sonde.batch_size.module_hook import put_on, takes_fast_path
from sonde.batch_size.per_example.covered import PerExampleSquares
from sonde.batch_size.per_example.layer_hooks import FastPaths, LayerHook, Stage, arranged, hook_gradient_of, stage
from sonde.batch_size.per_example.layers import refuse_cut, refuse_model, rule_of, rules_by_type
from sonde.batch_size.per_example.piece import PieceSums
from sonde.batch_size.per_example.rules import (
    BATCH_NORMS,
    COUPLES_EXAMPLES,
    GradientsOf,
    NotCoveredError,
    couples_examples,
)
from sonde.batch_size.per_example.uses import Call, Layer, Uses
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

PLAIN: tuple[type[Tensor], ...] = (Tensor, nn.Parameter)
"""Classes of tensors whose elements are what they look like."""


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
        refuse_cut(parameters, measured)
        self._model, self._rules, self._device = model, rules_by_type(rules or {}), measured[0].device
        named = dict(zip(parameters, measured, strict=True))
        self._piece = PieceSums(named, staging_bytes or default_staging_bytes(self._device))
        if several_backwards:
            self.add_backwards_up()
        # Between forwards, FSDP2 shows its shards in the layers; in forward, what it has gathered.
        self._uses = dict(zip(map(id, parameters.values()), self._piece.uses, strict=True))
        self._uses |= dict(zip(map(id, measured), self._piece.uses, strict=True))
        self._unseen = self._reasons_for_unseen(list(parameters))
        self._handles: list[RemovableHandle] = []
        self._fast_paths: FastPaths | None = None
        self.seconds = 0.0
        """Host time spent in hooks and in `open` so far."""
        self.discard()

    def discard(self) -> None:
        """Forget what backward has added since the last `take`."""
        self._piece.forget(refusals=True)
        self._backwards: set[int] = set()
        self._n_backwards = 0
        self._coupled: str | None = None
        self._failure: Exception | None = None

    @property
    def without_rule(self) -> dict[str, str]:
        """Parameters that no layer with a rule holds, and why. Others may turn out not to be covered in a piece."""
        return {name: reason for name, reason in self._unseen.items() if not reason.startswith(_USED_ELSEWHERE)}

    @property
    def is_open(self) -> bool:
        """Whether the hooks are installed."""
        return bool(self._handles)

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
        start = time.perf_counter()
        if self._handles:
            raise RuntimeError("the hooks are installed already: close() comes before another open()")
        refuse_model(self._model, batch_norms=not watches_batch_norms)
        present = {self._uses[id(p)] for p in self._model.parameters() if id(p) in self._uses}
        if gone := [name for name, uses in zip(self._unseen, self._piece.uses, strict=True) if uses not in present]:
            raise ValueError(
                f"the model has lost {plural(len(gone), 'parameter')} ({some_of(gone)}): attach anew (or make a new "
                "PerExampleNorms)"
            )
        know_the_batch = layers_that_know(self._model)
        for name, layer in self._model.named_modules():
            rule = rule_of(layer, self._rules)
            # Only layers with a rule are asked for their parameters: containers would go through all of the model's.
            if rule is not None and (held := self._held_by(layer)):
                watched = Layer(clean_name(name), layer, rule, held)
                self._put_on(layer.register_forward_hook, self._called, watched, prepend=True, always_call=True)
            if layer in know_the_batch or isinstance(layer, BATCH_NORMS):
                self._put_on(layer.register_forward_pre_hook, self._note_batch, clean_name(name))
        self._fast_paths = FastPaths(self._model, self._handles)
        self._handles += self._fast_paths.handles
        for uses in self._piece.uses:
            if uses.parameter.requires_grad:  # it may have been frozen since
                self._handles.append(uses.parameter.register_hook(self._harmless(self._whole, uses)))
        self.seconds += time.perf_counter() - start

    def _put_on(
        self, register: Callable[..., RemovableHandle], hook: Callable[..., None], *first: Any, **how: bool
    ) -> None:
        self._handles.append(put_on(register, LayerHook(self._harmless(hook, *first)), with_kwargs=True, **how))

    def _harmless(self, hook: Callable[..., None], *first: Any) -> Callable[..., None]:
        """A hook whose time counts, and whose error does not end the user's forward or backward: `take` raises it."""

        def harmless(*args: Any) -> None:
            start = time.perf_counter()
            try:
                hook(*first, *args)
            except Exception as error:  # a bug, a mistake in a rule of the user's, or no memory left
                self._failure = self._failure or error
            finally:
                self.seconds += time.perf_counter() - start

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
        if not self._handles:
            raise RuntimeError(
                "the hooks are not installed: take() belongs inside `with`, or between open() and close()"
            )
        if type(n_examples) is not int or n_examples < 1:
            raise ValueError(f"n_examples must be a whole number from 1 up, got {n_examples!r}")
        if (failure := self._failure) is not None:
            self.discard()
            raise failure
        if is_capturing(self._device):
            raise RuntimeError(f"take() was called while a CUDA graph is recorded: {_IN_CUDA_GRAPH}")
        reason = self._coupled
        if square := next((saw for saw in self._piece.saw if saw.is_square), None):
            reason = (
                f"{square.kind} with batch_first=False was called with as many examples as positions, so that either "
                "may be the rows of other layers: take another number of examples"
            )
        if not self._backwards:
            reason = "no backward has added to `.grad` in this piece: call take() after loss.backward()"
        if self.had_unexpected_backwards:
            reason = (
                f"the piece had {self._n_backwards} backwards: add the losses and call backward once, take() after each if "
                "they have different examples, or say several_backwards=True"
            )
        with _plain_arithmetic(self._device):
            squares = self._piece.take(n_examples, self._unseen, reason)
        self.discard()
        return squares

    @property
    def had_unexpected_backwards(self) -> bool:
        """Whether the piece has had several backwards, which `several_backwards=False` excludes."""
        return self._n_backwards > 1 and not self._piece.several_backwards

    def add_backwards_up(self) -> None:
        """From the next piece on, its backwards are of the same examples, as `several_backwards=True` says."""
        self._piece.several_backwards = True
        for uses in self._piece.uses:
            uses.keeps_all = True

    def forget_backwards(self) -> None:
        """Forget backwards since the last `take`, but not forwards whose backward is still to come."""
        self._put_back()
        if self._backwards:
            self._piece.forget(refusals=False)
            self._backwards, self._n_backwards = set(), 0

    def close(self) -> None:
        """Remove every hook, and let go of everything that was kept."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._fast_paths = [], None
        self._piece.forget_calls()
        self.discard()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _held_by(self, layer: nn.Module, *, recurse: bool = True) -> dict[str, Uses]:
        return {n: self._uses[id(p)] for n, p in layer.named_parameters(recurse=recurse) if id(p) in self._uses}

    def _reasons_for_unseen(self, names: Sequence[str]) -> dict[str, str]:
        """For each parameter, what it means if no rule sees it."""
        elsewhere = _USED_ELSEWHERE + _OR_CALLED_ALONE * any(map(takes_fast_path, self._model.modules()))
        reasons: dict[Uses, str] = {}
        for layer in self._model.modules():
            has_rule = rule_of(layer, self._rules) is not None
            for uses in self._held_by(layer, recurse=has_rule).values():
                if has_rule:
                    reasons[uses] = elsewhere
                reasons.setdefault(uses, _NO_RULE.format(type(layer).__name__))
        of_each = (reasons.get(uses, _NO_RULE.format("its layer")) for uses in self._piece.uses)
        return dict(zip(names, of_each, strict=True))

    def _called(
        self, layer: Layer, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], output: Any
    ) -> None:
        """After a layer's forward: keep what it was called with, and wait for the gradient of what it returned.

        Without an output if forward was left by an error, as a checkpoint does inside its last layer.
        """
        if not torch.is_grad_enabled():
            return
        now = stage()
        if now is Stage.AGAIN and in_backward():
            with contextlib.suppress(NotCoveredError):  # the first call has noted the reason
                self._piece.again[layer].append(arranged(layer.rule, module, args, keywords))
        output = output[0] if isinstance(output, tuple) and output else output
        # The graph of a forward that is run again has no backward.
        if now in (Stage.AGAIN, Stage.NEITHER) or not isinstance(output, Tensor) or not output.requires_grad:
            return
        if is_capturing(output.device):
            layer.refuse(_IN_CUDA_GRAPH)
            return
        if type(output) not in PLAIN or output.is_nested or output.layout is not torch.strided:
            kind = "nested" if output.is_nested else f"{type(output).__name__} with layout {output.layout}"
            layer.refuse(f"its layer returned a {kind} tensor: give it plain ones")
            return
        held = dict(module.named_parameters(remove_duplicate=False))  # under functional_call, any tensors
        if replaced := [uses for name, uses in layer.parameters.items() if held.get(name) is not uses.parameter]:
            for uses in replaced:
                uses.is_replaced = True
            return
        try:
            inputs = arranged(layer.rule, module, args, keywords)
        except NotCoveredError as reason:
            layer.refuse(str(reason))
            return
        call = Call(layer, output.shape)
        # What a table looks up is small, and other uses of the table may ask for it: it is kept in checkpoints too.
        call.is_run_again = now is Stage.FIRST and layer.rule.rows is None
        if not call.is_run_again:
            call.receive(inputs)
        self._piece.expect(call)
        hook_gradient_of(output, inputs, self._harmless(self._returned, call))

    def _note_batch(self, name: str, layer: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Before the forward of a layer that knows which dim is the batch, or that may couple the examples in it."""
        if not torch.is_grad_enabled():
            return
        if couples_examples(layer):
            self._coupled = f"{name}: {COUPLES_EXAMPLES}"
        elif not isinstance(layer, BATCH_NORMS) and (saw := seen_by(layer, args, keywords)) is not None:
            self._piece.saw.append(saw)

    def _returned(self, call: Call, grad: Tensor) -> None:
        """In backward, with the gradient of what a layer has returned."""
        if not self._handles or not any(will_accumulate(uses.parameter) for uses in call.layer.parameters.values()):
            return
        if is_capturing(grad.device):
            call.layer.refuse(_IN_CUDA_GRAPH)
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
            self._put_back()
            self._backwards.add(number)
            self._n_backwards += not inside_another_backward(grad)

    def _put_back(self) -> None:
        if self._fast_paths is not None:
            self._fast_paths.put_back()


_NO_RULE = "{} has no rule: give one in rules=, or leave the parameter out"
_IN_CUDA_GRAPH = "its layer ran inside a CUDA graph, whose replays run no hooks: measure outside of the graph"
_USED_ELSEWHERE = (
    "it had a gradient that no rule has seen: it is used outside its layer's forward, or that forward is not the one "
    "that the rule is for"
)
_OR_CALLED_ALONE = (
    ", or its nn.TransformerEncoderLayer was called in evaluation, and then alone in training: call the model instead"
)


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
