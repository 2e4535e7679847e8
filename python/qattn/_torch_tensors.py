"""Which torch tensors qattn takes: the one place that decides it.

A torch tensor may mean something else than what lies in its memory: subclasses answer by functions
of their own, views wait for a sign, wrappers belong to a transformation. What is not known to mean
its memory is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd import forward_ad

from ._errors import InvalidArgument, Unsupported

_own_function = torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]

#: Dispatch keys that leave a tensor what its memory holds; torch appends names of devices to some.
_PLAIN_KEYS = ("ADInplaceOrView", "Autograd", "Autocast", "BackendSelect")
_MEANS = {
    "Negative": "is a lazy negative; call resolve_neg() first",
    "Conjugate": "is a lazy conjugate; call resolve_conj() first",
    "ZeroTensor": "is a tensor of zeros without memory; call clone() first",
    "Functionalize": "belongs to torch.func.functionalize, which qattn.torch.sdpa() works inside",
}
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_dispatch_keys = torch._C._dispatch_keys
_seen_plain: set[int] = set()  # key sets, as integers, that were found plain


def check_tensor(name: str, x: torch.Tensor, differentiable: bool = False) -> None:
    """Refuses what no operator of qattn computes with: all but strided tensors on a CPU or a CUDA
    GPU, of torch.Tensor or a subclass that changes nothing. differentiable: gradients are left to
    the operator.

    Transformations (torch.func, tracing) may wrap them: torch's dispatcher unwraps for operators.
    """
    _check_class(name, x)
    refuse_tangent(name, x)
    if x.is_nested:
        raise InvalidArgument(f"{name}: is a nested tensor; qattn.attention() takes packed ones")
    if x.device.type not in ("cpu", "cuda"):
        raise Unsupported(f"{name}: lies on device {x.device}; qattn knows cpu and cuda")
    if x.layout != torch.strided:
        raise InvalidArgument(f"{name}: layout {x.layout} should be strided (dense)")
    if x.is_quantized:
        raise InvalidArgument(
            f"{name}: is a quantised tensor of torch ({x.dtype}), whose scales qattn does not read"
        )
    if not differentiable and x.requires_grad and torch.is_grad_enabled():
        raise InvalidArgument(
            f"{name}: requires a gradient, which only qattn.torch.sdpa() computes; detach it, or "
            "call inside torch.no_grad()"
        )


def refuse_tangent(name: str, x: torch.Tensor) -> None:
    """Refuses what carries a derivative forward: the result would have none."""
    if forward_ad._current_level < 0 or not isinstance(x, torch.Tensor):
        return
    if forward_ad.unpack_dual(x).tangent is not None:
        raise Unsupported(
            f"{name}: has a tangent (forward-mode differentiation, as of torch.func.jvp), which "
            "qattn does not compute"
        )


def are_known(tensors: Iterable[Any]) -> bool:
    """Do all mean their memory, like others that check_memory() has let pass? Then they ask no
    gradient. None is known, too."""
    if forward_ad._current_level >= 0:  # they may have a tangent
        return False
    for x in tensors:
        if type(x) in _PLAIN_TYPES:
            if x.requires_grad or _dispatch_keys(x).raw_repr() not in _seen_plain:
                return False
        elif x is not None:
            return False
    return True


def check_memory(name: str, x: torch.Tensor) -> None:
    """Refuses also what torch's dispatcher would have unwrapped: x's own memory is read."""
    if are_known((x,)):
        return
    check_tensor(name, x)
    keys = _dispatch_keys(x)
    for key in names_of(keys):
        if key in ("CPU", "CUDA") or key.startswith(_PLAIN_KEYS):
            continue
        if key.startswith("FuncTorch"):
            raise Unsupported(
                f"{name}: is wrapped by a transformation of torch.func ({key}), which "
                "qattn.torch.sdpa() works inside"
            )
        if key in _MEANS:
            raise InvalidArgument(f"{name}: {_MEANS[key]}")
        what = f"{type(x).__module__}.{type(x).__qualname__}"
        raise Unsupported(f"{name}: is a {what} of torch's {key}, whose memory qattn cannot read")
    _seen_plain.add(keys.raw_repr())


def as_mask(name: str, mask: Any, lengths: tuple[Any, Any] | None, device: Any) -> Any:
    """A mask, of which the two causal biases of torch.nn.attention.bias, that have no memory of
    their own, become the boolean tensors that they mean, on `device`.

    lengths: queries and keys of the call; None where it has several of each.
    """
    if not _is_causal_bias(mask):
        return mask
    if lengths is None:
        raise InvalidArgument(
            f"{name}: is a CausalBias, which sequences of several lengths have not; use causal="
        )
    own = (mask.seq_len_q, mask.seq_len_kv)
    if own != lengths:
        raise InvalidArgument(
            f"{name}: is a CausalBias of shape {own}, but the call's is {tuple(lengths)}"
        )
    last = own[1] - own[0] if _is_lower_right(mask) else 0
    return torch.ones(own, dtype=torch.bool, device=device).tril(last)


def is_causal_bias_of(mask: Any, length: Any, keys: Any) -> bool:
    """Is it a CausalBias of that shape that means what is_causal of torch means?"""
    if not _is_causal_bias(mask) or (mask.seq_len_q, mask.seq_len_kv) != (length, keys):
        return False
    return length == keys or not _is_lower_right(mask)


def _is_causal_bias(x: Any) -> bool:
    if type(x) is torch.Tensor or not isinstance(x, torch.Tensor):
        return False
    from torch.nn.attention.bias import CausalBias  # 0.1 s, which whoever made one has spent

    return type(x) is CausalBias


def _is_lower_right(mask: Any) -> bool:
    from torch.nn.attention.bias import CausalVariant

    return mask.variant == CausalVariant.LOWER_RIGHT


def _check_class(name: str, x: torch.Tensor) -> None:
    kind = type(x)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return
    function = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    plain = function in (_own_function, torch._C._disabled_torch_function_impl)
    if plain and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return
    if kind.__name__ in ("FakeTensor", "FunctionalTensor") and _is_tracing():
        return
    where = f"{kind.__module__}.{kind.__qualname__}"
    raise Unsupported(
        f"{name}: is a {where}, which answers by functions of its own; qattn reads memory, so give "
        "the plain tensor that it stands for"
    )


def _is_tracing() -> bool:
    """Is a mode of torch active that sees operators instead of running them?"""
    from torch.utils import _python_dispatch

    return bool(_python_dispatch._get_current_dispatch_mode_stack())


def names_of(keys: Any) -> list[str]:
    text = str(keys)  # "DispatchKeySet(CPU, ADInplaceOrView, ...)": no other way lists them all
    return [key.strip() for key in text[text.index("(") + 1 : -1].split(",") if key.strip()]
