"""Gradients of torch.ops.qattn.attention: where an input asks for one, the call goes to
torch.ops.qattn.attention_training, whose backward is torch.ops.qattn.attention_backward.

The backward is torch's own flash backward, fed with what the INT8 forward gave: O and LSE. It takes
K less its mean, and LSE less scale * q.mean, which is the same function. The mean matters all the
same: rows of dS then add up to the forward's error and not to 0, and dQ would get that times it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .._errors import InvalidArgument, Unsupported, shown
from .._recipe import Recipe
from .._torch_tensors import check_memory, names_of, refuse_tangent
from . import _ops as ops
from ._backward import check_operators, mean_of_seen
from ._library import BACKWARDS, check_backward, library

#: Operands of a forward whose O and LSE are good enough: s8 Q and K, 16-bit P and V.
_WITH_GRADIENT = ("s8", "none", "none")

library.define(
    "attention_training(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, str recipe, "
    "str backward, bool is_causal, float scale) -> (Tensor out, Tensor lse, Tensor key_mean)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


# ---- Who asks for a gradient ---------------------------------------------------------------------


def _autograd(
    keyset: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    recipe: str = "auto",
    is_causal: bool = False,
    enable_gqa: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    window_left: int = -1,
    backward: str = "forward",
) -> torch.Tensor:
    """What torch.ops.qattn.attention does above the kernels: nothing, unless a gradient is asked
    for. It is not register_autograd(), which saves outputs, and this operator gives O alone."""
    tensors = {"query": query, "key": key, "value": value, "attn_mask": attn_mask, "sinks": sinks}
    given = {name: x for name, x in tensors.items() if x is not None}
    for name, x in given.items():
        refuse_tangent(name, x)
    asking = [name for name, x in given.items() if x.requires_grad]
    if asking and torch.is_grad_enabled():
        check_backward(backward)
        _refuse(asking, given, recipe, softcap, window_left, backward)
        return _differentiable(
            query, key, value, attn_mask, recipe, is_causal, enable_gqa, scale, backward
        )
    options = recipe, is_causal, enable_gqa, scale, softcap, window_left, backward
    return ops.below_autograd(
        torch.ops.qattn.attention.default, keyset, (*tensors.values(), *options)
    )


library.impl("attention", _autograd, "Autograd", with_keyset=True)


def _refuse(
    asking: list[str],
    given: dict[str, torch.Tensor],
    recipe: str,
    softcap: float,
    window_left: int,
    backward: str,
) -> None:
    """Refuses by name what has no gradient."""
    for name in ("attn_mask", "sinks"):
        if name in asking:
            raise InvalidArgument(
                f"{name}: requires a gradient, which qattn computes of query, key and value alone; "
                "detach it, or call inside torch.no_grad()"
            )
    made, who = Recipe(*ops._recipe_tuple(recipe)), asking[0]
    if backward == "forward" and (made.qk, made.p, made.v) != _WITH_GRADIENT:
        raise InvalidArgument(
            f"{who}: requires a gradient, which recipe {made.name!r} does not have; pass "
            "recipe='int8', or backward='16bit' for the gradient of torch's own attention; or "
            "detach it, or call inside torch.no_grad()"
        )
    if any(_is_of_func(given[name]) for name in asking):
        raise Unsupported(
            f"{who}: requires a gradient by a transformation of torch.func, which takes no "
            "operator with a gradient of its own; torch.autograd.grad() and backward() do"
        )
    reason = f"has no gradient, which {who} requires; detach it, or call inside torch.no_grad()"
    if "sinks" in given:
        raise Unsupported(f"sinks: attention with sinks {reason}")
    if softcap != 0.0:
        raise Unsupported(f"softcap: {softcap}; attention with a softcap {reason}")
    if window_left != -1:
        raise Unsupported(
            f"window_left: {window_left}; attention with a window {reason}; a mask may say the same"
        )
    mask, query = given.get("attn_mask"), given["query"]
    if mask is not None and query.is_cuda and mask.dtype not in (torch.bool, query.dtype):
        raise Unsupported(
            f"attn_mask: dtype {mask.dtype}; where {who} requires a gradient, torch's backward on "
            f"GPUs takes bool or query's {query.dtype}"
        )
    check_operators(query)


def _is_of_func(x: torch.Tensor) -> bool:
    return any(key.startswith("FuncTorchGrad") for key in names_of(torch._C._dispatch_keys(x)))


def _differentiable(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    recipe: str,
    is_causal: bool,
    enable_gqa: bool,
    scale: float | None,
    backward: str,
) -> torch.Tensor:
    """attention() through an operator of rank 4 and grouped heads alone: torch differentiates what
    makes the operands such."""
    if mask is not None and min(query.dim(), key.dim()) >= 2:
        mask, is_causal = ops._plain_mask(mask, query, key, is_causal)
    ops._check_tensors(query, key, value, mask)
    query, key, value = ops._aligned(query, key, value, enable_gqa)
    if mask is not None:
        if is_causal:
            raise InvalidArgument("attn_mask: excludes is_causal=True, as in torch")
        ops._broadcast_mask(mask, (*query.shape[:-1], key.shape[-2]))
        mask = _rank_four(mask, query)
    if is_causal:  # nobody sees the keys from L on
        key, value = (x[..., : query.shape[-2], :] for x in (key, value))
    out = torch.ops.qattn.attention_training(
        _flat(query),
        _flat(key),
        _flat(value),
        mask,
        recipe,
        backward,
        is_causal,
        1 / math.sqrt(query.shape[-1]) if scale is None else scale,
    )[0]
    return out.reshape(*query.shape[:-1], value.shape[-1])


def _flat(x: torch.Tensor) -> torch.Tensor:
    """(B, H, S, D) of a tensor of any rank."""
    while x.dim() < 4:
        x = x.unsqueeze(0)
    return x if x.dim() == 4 else x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def _rank_four(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """A mask that broadcasts to (B, H, L, S) where it broadcast to query's dimensions."""
    while mask.dim() < 3:
        mask = mask.unsqueeze(0)
    if any(size != 1 for size in mask.shape[:-3]):
        mask = mask.expand(*query.shape[:-3], *mask.shape[-3:])
    return mask.reshape(math.prod(mask.shape[:-3]), *mask.shape[-3:])


# ---- The operator that is differentiated ---------------------------------------------------------


@torch.library.impl(library, "attention_training", "CPU")
@torch.library.impl(library, "attention_training", "CUDA")
def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    recipe: str,
    backward: str,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tensors = {"query": query, "key": key, "value": value, "attn_mask": attn_mask}
    for name, x in tensors.items():
        if x is not None:
            check_memory(name, x)
    grouped = query.shape[1] != key.shape[1]
    lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
    out = ops._computed(
        *tensors.values(), None, recipe, is_causal, grouped, scale, 0.0, -1, lse=lse
    )
    if backward == "16bit":
        return out, _absent(query), _absent(query)
    # Taken here again: attention() does not return its own, and codes made before it, which would
    # bring one, would be others, without `balance_k`. Which mean it is matters to rounding alone.
    return out, lse, mean_of_seen(key, attn_mask)


@torch.library.register_fake("qattn::attention_training", lib=library)
def _fake_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    recipe: str,
    backward: str,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    if backward == "16bit":
        return out, _absent(query), _absent(query)
    mean = key.new_empty((*key.shape[:2], 1, key.shape[3]), dtype=torch.float32)
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32), mean


def _absent(x: torch.Tensor) -> torch.Tensor:
    """An output that the call does not have."""
    return x.new_empty((0,), dtype=torch.float32)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    query, key, value, mask, _, ctx.backward, ctx.is_causal, ctx.scale = inputs
    ctx.mark_non_differentiable(*output[1:])
    made = output if ctx.backward == "forward" else (None, None, None)
    ctx.save_for_backward(query, key, value, mask, *made)


def _gradients(ctx: Any, grad_out: torch.Tensor, *_: Any) -> tuple:
    refuse_tangent("grad_out", grad_out)
    made = torch.ops.qattn.attention_backward(
        grad_out, *ctx.saved_tensors, ctx.is_causal, ctx.scale
    )
    return (*made, None, None, None, None, None)


torch.library.register_autograd(
    "qattn::attention_training", _gradients, setup_context=_save, lib=library
)
