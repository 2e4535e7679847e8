"""qattn for torch: sdpa(), torch's scaled_dot_product_attention with low-precision operands.

    import qattn.torch
    out = qattn.torch.sdpa(query, key, value, is_causal=True, recipe="int8_full")

The meaning is that of torch 2.13, not that of qattn.attention(): is_causal is aligned to the top
left, and dimensions are (..., H, L, E).
"""

from __future__ import annotations

import torch

from . import _attention
from ._errors import InvalidArgument, Unsupported
from ._recipe import Recipe, boolean, real

__all__ = ["sdpa"]


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
) -> torch.Tensor:
    """torch.nn.functional.scaled_dot_product_attention, computed by qattn on the CPU.

    query: (..., H, L, E), key: (..., H, S, E), value: (..., H, S, Ev), rank 2 and up, of one dtype
    (float32, float16 or bfloat16). Leading dimensions broadcast; with enable_gqa the heads of key
    and value divide those of query. attn_mask: bool (True = may look), float32 or query's dtype
    (added), rank 2 and up, broadcasts to (..., H, L, S). is_causal: query i sees keys j <= i, also
    where L != S. A row that sees no key gives 0, as in torch.
    Inside torch.autocast the operands are cast as torch does. Tensors whose last stride is not 1
    are copied; others are not.

    Raises InvalidArgument: attn_mask together with is_causal, mixed dtypes, shapes that do not fit,
    E or Ev not a multiple of 8 up to 256, inputs that require gradients while grad mode is enabled.
    Raises Unsupported: dropout_p > 0, devices other than the CPU, enable_gqa with key and value of
    different numbers of heads.
    """
    tensors = {"query": query, "key": key, "value": value}
    if attn_mask is not None:
        tensors["attn_mask"] = attn_mask
    tensors = _prepared(tensors)
    _check_dropout(dropout_p)
    is_causal, enable_gqa = boolean("is_causal", is_causal), boolean("enable_gqa", enable_gqa)
    if is_causal and attn_mask is not None:
        raise InvalidArgument("attn_mask: excludes is_causal=True, as in torch")
    query, key, value = (_unit_stride(tensors[name]) for name in ("query", "key", "value"))
    query, key, value = _aligned(query, key, value, enable_gqa)
    lead, length, keys = query.shape[:-2], query.shape[-2], key.shape[-2]
    mask = tensors.get("attn_mask")
    if mask is not None:
        mask = _broadcast_mask(mask, (*lead, length, keys))
    window = None
    if is_causal:
        # Only keys j < L can be seen; then L >= S, and the bottom-right rule j <= i + S - L + right
        # of qattn says j <= i for right = L - S.
        key, value = key[..., :length, :], value[..., :length, :]
        window = (-1, length - key.shape[-2])
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    options = {
        "recipe": recipe,
        "layout": "bhsd",
        "window": window,
        "scale": None if scale is None else real("scale", scale),
    }
    if query.dim() < 3 or query.shape[-3] > 0:  # without heads there is nothing to attend with
        _run(query, key, value, mask, out, options)
    return out


def _prepared(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Checks what torch checks of each tensor by itself; applies autocast; detaches."""
    autocast = torch.is_autocast_enabled("cpu")
    prepared = {}
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise InvalidArgument(f"{name}: is a {type(x).__name__}, not a torch tensor")
        _attention.check_array(name, x)
        x = x.detach()
        if x.dim() < 2:
            raise InvalidArgument(f"{name}: rank {x.dim()} should be at least 2")
        if autocast and x.is_floating_point() and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype("cpu"))
        prepared[name] = x
    dtype = prepared["query"].dtype
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise InvalidArgument(f"query: dtype {dtype} is not float32, float16 or bfloat16")
    for name in ("key", "value"):
        if prepared[name].dtype != dtype:
            raise InvalidArgument(
                f"{name}: dtype {prepared[name].dtype} differs from query's {dtype}"
            )
    mask = prepared.get("attn_mask")
    if mask is not None and mask.dtype not in (torch.bool, torch.float32, dtype):
        raise InvalidArgument(
            f"attn_mask: dtype {mask.dtype} is not bool, float32 or query's {dtype}"
        )
    return prepared


def _check_dropout(dropout_p: float) -> None:
    p = real("dropout_p", dropout_p)
    if not 0.0 <= p <= 1.0:
        raise InvalidArgument(f"dropout_p: {p} is not in [0, 1]")
    if p > 0.0:
        raise Unsupported(f"dropout_p: {p}; qattn is for inference and has no dropout")


def _unit_stride(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _aligned(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operands with equal leading dimensions (views of stride 0 where torch broadcasts).

    Heads stay as they are where qattn groups them by itself: enable_gqa, and one KV head for all.
    """
    grouped = enable_gqa
    if enable_gqa:
        _check_gqa(query, key, value)
    elif min(query.dim(), key.dim(), value.dim()) >= 3:
        grouped = key.shape[-3] == 1 and value.shape[-3] == 1
    operands = {"query": query, "key": key, "value": value}
    cut = -3 if grouped else -2  # the dimensions from here on are not broadcast
    lead: tuple[int, ...] = ()
    for name, x in operands.items():
        try:
            lead = tuple(torch.broadcast_shapes(lead, x.shape[:cut]))
        except RuntimeError:
            raise InvalidArgument(
                f"{name}: shape {tuple(x.shape)} does not broadcast with query's "
                f"{tuple(query.shape)}" + ("" if enable_gqa else " (enable_gqa is False)")
            ) from None
    query, key, value = (x.expand(*lead, *x.shape[cut:]) for x in operands.values())
    return query, key, value


def _check_gqa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() < 3:
            raise InvalidArgument(f"{name}: rank {x.dim()} has no heads, which enable_gqa needs")
        heads = x.shape[-3]
        if heads == 0 or query.shape[-3] % heads != 0:
            raise InvalidArgument(
                f"{name}: {heads} heads do not divide query's {query.shape[-3]} heads"
            )
    if key.shape[-3] != value.shape[-3]:
        raise Unsupported(
            f"value: {value.shape[-3]} heads differ from key's {key.shape[-3]} (enable_gqa)"
        )


def _broadcast_mask(mask: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    try:
        return mask.expand(shape)
    except RuntimeError:
        raise InvalidArgument(
            f"attn_mask: shape {tuple(mask.shape)} does not broadcast to {shape}"
        ) from None


def _run(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    out: torch.Tensor,
    options: dict,
) -> None:
    """Fills `out`. Further batch dimensions are walked, so that no view has to be copied flat."""
    if query.dim() > 4:
        for i in range(query.shape[0]):
            _run(query[i], key[i], value[i], None if mask is None else mask[i], out[i], options)
        return
    while query.dim() < 4:
        query, key, value, out = (x.unsqueeze(0) for x in (query, key, value, out))
        mask = None if mask is None else mask.unsqueeze(0)
    with torch.no_grad():
        _attention.attention(query, key, value, mask=mask, out=out, **options)
