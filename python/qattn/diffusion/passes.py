"""A forward pass of an attached model, and how attention is caught in it.

torch.nn.functional stays as it is. A mode of torch (TorchFunctionMode) lies on the thread's stack
while a pass is under way, beneath all others, so that whoever stands between the model and torch
(other modes, tensors with a function of their own, patches of torch's function) is asked first, and
sees the function that was there. Outside of a pass nothing of it is left.
"""

from __future__ import annotations

import contextvars
import dataclasses
import sys
import types
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode, _get_overloaded_args, _pop_mode, _push_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .._errors import InvalidArgument, Unsupported
from .._torch_tensors import _is_causal_bias
from .attend import torch_attention
from .place import Place
from .schedule import TORCH

if TYPE_CHECKING:
    from .attachment import _Denoiser

_aten = torch.ops.aten.scaled_dot_product_attention
#: torch's attention, by all of its names
_ATTENTIONS = frozenset({torch_attention, _aten, _aten.default})
#: written in Python: torch hands it to modes whole, and what it calls to none
_MULTI_HEAD = F.multi_head_attention_forward
#: what a layer that computes its attention by other means would call
_PRODUCTS = frozenset({
    F.linear, F.bilinear, F.conv1d, F.conv2d, F.conv3d, F.softmax, torch.softmax, torch.einsum,
    torch.matmul, torch.mm, torch.bmm, torch.baddbmm, torch.addmm, torch.tensordot,
    torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.__rmatmul__, torch.Tensor.mm,
    torch.Tensor.bmm, torch.Tensor.baddbmm, torch.Tensor.addmm, torch.Tensor.softmax,
})  # fmt: skip
_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
#: operands that are nobody's but torch's own
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, bool, int, float, type(None)})


@dataclasses.dataclass
class Entered:
    """A module of the model that is running."""

    layer: str
    calls: int = 0  #: attention calls that were seen
    worked: bool = False  #: whether it called any product of torch


class Pass:
    """A forward pass that is under way: the modules entered, the innermost last."""

    def __init__(self, denoiser: _Denoiser, moment: Place, frame: types.FrameType) -> None:
        self.denoiser = denoiser
        self.moment = moment
        self.outer = pass_under_way()
        self.entered: list[Entered] = []
        self._places: dict[str, Place] = {}
        self._frame: types.FrameType | None = frame  # what runs the model's forward()

    def enter(self, name: str) -> None:
        self.entered.append(Entered(name))

    def place(self) -> Place:
        layer = self.entered[-1].layer
        if layer not in self._places:
            self._places[layer] = dataclasses.replace(self.moment, layer=layer)
        return self._places[layer]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Attention of (B, S, H, D) by the schedule, as Runner takes it."""
        place, runner = self.place(), self.denoiser.attachment.runner
        modes = _get_current_dispatch_mode_stack()
        if modes and runner.schedule.recipe_at(place) != TORCH:
            raise Unsupported(
                f"{place.layer}: a TorchDispatchMode ({type(modes[-1]).__name__}) stands between "
                "the model and torch, and would see nothing of qattn's kernels; "
                f"Rule('torch', layers={place.layer!r}) leaves this layer to torch"
            )
        out = runner(place, *args, **kwargs)
        self.entered[-1].calls += 1
        return out

    def leave(self, name: str) -> Entered | None:
        """What the module of that name did; it and what is in it are left. None where it was not
        entered, since another's hook refused to."""
        if all(row.layer != name for row in self.entered):
            return None
        done = Entered(name)
        left = None
        while left != name:
            row = self.entered.pop()
            left = row.layer
            done.calls += row.calls
            done.worked |= row.worked
        if self.entered:
            self.entered[-1].calls += done.calls
            self.entered[-1].worked |= done.worked
        return done

    def alive(self) -> bool:
        """Is its forward() still running, and attached? No hook tells of a KeyboardInterrupt."""
        if not self.denoiser.attachment.open or not self.entered:
            return False
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None

    def end(self) -> None:
        """The model's forward() is over."""
        self._frame = None
        _pass.set(self.outer)
        if self.outer is None:
            _remove_watch()


_pass: contextvars.ContextVar[Pass | None] = contextvars.ContextVar("qattn_pass", default=None)


def pass_under_way() -> Pass | None:
    """The forward pass of an attached model that this thread is in."""
    now = _pass.get()
    while now is not None and not now.alive():
        now = now.outer
    return now


def innermost_of(denoiser: _Denoiser) -> Pass | None:
    """The innermost pass of that model, also where an error has ended its forward()."""
    now = _pass.get()
    while now is not None and now.denoiser is not denoiser:
        now = now.outer
    return now


def begin(denoiser: _Denoiser, moment: Place, name: str, frame: types.FrameType) -> None:
    """A pass begins, inside of the one that may be under way. frame: what runs forward()."""
    now = Pass(denoiser, moment, frame)
    now.enter(name)
    _pass.set(now)
    if not any(isinstance(x, _Watch) for x in torch.overrides._get_current_function_mode_stack()):
        _put_beneath(_Watch())


def tidy() -> None:
    """Takes away what a pass left behind whose end no hook was told of."""
    if pass_under_way() is None:
        _pass.set(None)
        _remove_watch()


class _Watch(TorchFunctionMode):
    """Catches torch's attention for the pass under way, once nobody else has answered it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ATTENTIONS or func is _MULTI_HEAD:
            if torch.compiler.is_compiling():
                _refuse_compiled()
            now = pass_under_way()
            if now is not None:
                return self._caught(now, func, types, args, kwargs)
        elif (func in _PRODUCTS or isinstance(func, _OPERATORS)) and (now := _pass.get()):
            if now.entered:
                now.entered[-1].worked = True
        return func(*args, **kwargs)

    def _caught(self, now: Pass, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        # Tensors with a function of their own come after all modes; what they call comes here.
        operands = [x for x in (*args, *kwargs.values()) if type(x) not in _PLAIN]
        asked = [
            x
            for x in _get_overloaded_args([x for x in operands if not _is_causal_bias(x)])
            if type(x) is not torch.Tensor
        ] if operands else []
        for x in asked:
            with self:
                out = type(x).__torch_function__(func, types, args, kwargs)
            if out is not NotImplemented:
                return out
        if asked:
            raise TypeError(f"no implementation of {func} for {[type(x) for x in asked]}")
        if func is _MULTI_HEAD:
            with self:
                return _open_multi_head()(*args, **kwargs)
        return _attend(now, *args, **kwargs)


def _refuse_compiled() -> None:
    """Runs while torch.compile traces. It would leave out what raises and go on without the mode,
    in silence, so that its own refusal has to do where there is one."""
    words = (
        "torch.compile: compiled code in a model attached to qattn calls attention, and graphs do "
        "not ask for the step; torch.compiler.disable() takes the function out"
    )
    if hasattr(torch._dynamo, "error_on_graph_break"):
        with torch._dynamo.error_on_graph_break(True):
            torch._dynamo.graph_break(msg=words)
    raise Unsupported(words)


def _attend(
    now: Pass,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch.nn.functional.scaled_dot_product_attention, by the schedule."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            raise InvalidArgument(f"{name}: is a {type(x).__name__}, not a torch tensor")
    rank = query.dim()
    if rank > 4 or min(rank, key.dim(), value.dim()) < 2:
        raise Unsupported(f"query: rank {rank} in an attached model; 2 to 4 are known")
    heads = [_of_rank_4(x).transpose(1, 2) for x in (query, key, value)]
    if attn_mask is not None and attn_mask.dim() == 2:  # (L, S) here, never (B, S)
        attn_mask = attn_mask[None, None]
    out = now.run(*heads, attn_mask, dropout_p, is_causal, scale, enable_gqa).transpose(1, 2)
    return out if rank == 4 else out[(0,) * (4 - rank)]


def _of_rank_4(x: torch.Tensor) -> torch.Tensor:
    rank = x.dim()
    return x if rank == 4 else x[(None,) * (4 - rank)]


def _open_multi_head() -> Any:
    """torch's multi_head_attention_forward without its question whether a mode is there, so that
    the mode stays there for what it calls."""
    names = {**_MULTI_HEAD.__globals__, "has_torch_function": lambda _: False}
    made = types.FunctionType(
        _MULTI_HEAD.__code__, names, _MULTI_HEAD.__name__, _MULTI_HEAD.__defaults__
    )
    made.__kwdefaults__ = _MULTI_HEAD.__kwdefaults__
    return made


def _put_beneath(watch: _Watch) -> None:
    """Puts it beneath all modes of this thread but torch's device, which must lie lowest."""
    above = [_pop_mode() for _ in range(torch.overrides._len_torch_function_stack())]
    if above and isinstance(above[-1], DeviceContext):
        _push_mode(above.pop())
    for mode in (watch, *reversed(above)):
        _push_mode(mode)


def _remove_watch() -> None:
    """Takes it off this thread's stack, wherever it lies."""
    modes = [_pop_mode() for _ in range(torch.overrides._len_torch_function_stack())]
    for mode in reversed(modes):
        if not isinstance(mode, _Watch):
            _push_mode(mode)
