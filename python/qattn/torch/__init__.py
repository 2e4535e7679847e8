"""qattn for torch: sdpa(), torch's scaled_dot_product_attention with low-precision operands.

    import qattn.torch
    out = qattn.torch.sdpa(query, key, value, is_causal=True, recipe="int8_full")

The meaning is that of torch 2.13, not that of qattn.attention(): is_causal is aligned to the top
left, and dimensions are (..., H, L, E). sdpa() is one operator, torch.ops.qattn.attention, so that
torch.compile(fullgraph=True) and torch.export take it, with dynamic shapes too; with recipe int8 it
has gradients. quantize() is another, torch.ops.qattn.quantize: codes and scales of an operand, for
qattn.attention().
"""

from __future__ import annotations

import torch

from .._errors import InvalidArgument, Unsupported
from .._recipe import Recipe, boolean, real
from . import _training  # noqa: F401  its operators
from ._ops import attention
from ._quantize import quantize

__all__ = ["quantize", "sdpa"]


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    recipe: str | Recipe = "auto",
    backward: str = "forward",
) -> torch.Tensor:
    """torch.nn.functional.scaled_dot_product_attention, computed by qattn, on CPUs and CUDA GPUs.

    query: (..., H, L, E), key: (..., H, S, E), value: (..., H, S, Ev), rank 2 and up, of one dtype
    (float32, float16 or bfloat16). Leading dimensions broadcast; with enable_gqa the heads of key
    and value divide those of query. attn_mask: bool (True = may look), float32 or query's dtype
    (added), rank 2 and up, broadcasts to (..., H, L, S); or torch's causal_upper_left(L, S) or
    causal_lower_right(L, S). is_causal: query i sees keys j <= i, also
    where L != S. A row that sees no key gives 0, as in torch.
    Gradients of query, key and value: recipe "int8" has its own (backward="forward"), torch's flash
    backward of the forward's O and LSE and of K less its mean. backward="16bit" gives any recipe
    those of torch's own attention in the operands' dtype, which the backward computes anew. Where a
    gradient is asked for, GPUs take masks of bool or query's dtype; there a row whose largest bias
    is beyond 65536 or -65536, but not so far that it swallows every score in float32, as -1e9 and
    finfo.min do, gets NaN unless its output's gradient is 0 (backward="forward").
    Inside torch.autocast the operands are cast as torch does. Tensors whose last stride is not 1
    are copied on CPUs and refused on GPUs; others are taken as they are. On a GPU the call only
    enqueues work on the current stream and can be captured in a CUDA graph.

    Raises InvalidArgument: attn_mask together with is_causal, mixed dtypes, shapes that do not fit,
    E beyond 576 or Ev beyond 512, inputs that require gradients while grad mode is enabled
    where the recipe has none, an unknown backward.
    Raises Unsupported: dropout_p > 0, second derivatives, those of torch.func and of forward-mode,
    devices other than CPUs and CUDA GPUs, enable_gqa with key and value of different numbers of
    heads, subclasses of torch.Tensor that answer by functions of their own (DTensor, nested tensors
    of layout jagged, FakeTensor outside of tracing, ...), a torch whose backward is another.
    """
    if type(dropout_p) is not float or dropout_p != 0.0:
        _check_dropout(dropout_p)
    if is_causal is not False and boolean("is_causal", is_causal) and attn_mask is not None:
        raise InvalidArgument("attn_mask: excludes is_causal=True, as in torch")
    return attention(
        query,
        key,
        value,
        attn_mask,
        recipe=recipe,
        is_causal=is_causal,
        enable_gqa=False if enable_gqa is False else boolean("enable_gqa", enable_gqa),
        scale=None if scale is None else real("scale", scale),
        backward=backward,
    )


def _check_dropout(dropout_p: float) -> None:
    p = real("dropout_p", dropout_p)
    if not 0.0 <= p <= 1.0:
        raise InvalidArgument(f"dropout_p: {p} is not in [0, 1]")
    if p > 0.0:
        raise Unsupported(f"dropout_p: {p}; qattn has no dropout")
