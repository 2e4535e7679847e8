"""The operator torch.ops.qattn.attention_backward: torch's own backward, fed with O and LSE that
another forward made, on CPUs and GPUs."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch

from .._errors import Unsupported
from .._torch_tensors import refuse_tangent
from ._library import library

#: Arguments of torch's operators as they are called here; others belong to another torch.
_ARGUMENTS = {
    "_scaled_dot_product_flash_attention_for_cpu": "query key value dropout_p is_causal attn_mask "
    "scale",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "grad_out query key value out "
    "logsumexp dropout_p is_causal attn_mask scale",
    "_scaled_dot_product_flash_attention": "query key value dropout_p is_causal "
    "return_debug_mask scale",
    "_scaled_dot_product_flash_attention_backward": "grad_out query key value out logsumexp "
    "cum_seq_q cum_seq_k max_q max_k dropout_p is_causal philox_seed philox_offset scale",
    "_scaled_dot_product_efficient_attention": "query key value attn_bias compute_log_sumexp "
    "dropout_p is_causal scale",
    "_scaled_dot_product_efficient_attention_backward": "grad_out_ query key value attn_bias out "
    "logsumexp philox_seed philox_offset dropout_p grad_input_mask is_causal scale",
}

#: Biases whose largest of a row is beyond this leave too few bits of float32 to the row's LSE. On
#: GPUs, where such rows may get NaN, all that float16 holds is near: P errs by half a percent then.
_FAR, _FAR_ON_GPUS = 1e4, 2.0**16
#: So many scores of such rows are in memory at a time.
_FAR_SCORES = 1 << 22
#: A bias that lets no score be seen beside it. A power of two, which float32 multiplies by log2(e)
#: as exactly as the LSE of the same number, however a kernel orders and fuses that.
_OVERWHELMING = -(2.0**60)
#: Biases less than twice this apart are as good as equal: of keys under others exp() is below 2e-7.
_APART = 16.0
#: A key under no larger bias than this anywhere has no part in what keys share (docs/NUMERICS.md).
_FAINT = -4096.0

library.define(
    "attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
    "Tensor? attn_mask, Tensor? out, Tensor? lse, Tensor? key_mean, bool is_causal, float scale) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.impl(library, "attention_backward", "CPU")
@torch.library.impl(library, "attention_backward", "CUDA")
def _backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    key_mean: torch.Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    inputs = (query, key, value)
    for name, x in zip(("grad_out", "query", "key", "value"), (grad_out, *inputs)):
        refuse_tangent(name, x)
    if 0 in (grad_out.numel(), query.numel(), key.numel(), value.numel()):
        return tuple(torch.zeros_like(x) for x in inputs)
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        if key_mean is None or lse is None:
            key = centred(key, mean_of_seen(key, attn_mask))
        else:
            lse = _lse_of_centred(query, lse, key_mean, scale)
            key = centred(key, key_mean)
        bias = largest = None
        if attn_mask is not None:
            key, value = _without_hidden(key, value, attn_mask)
            bias, largest = _additive(attn_mask, query.dtype)
        width = max(query.shape[-1], value.shape[-1])
        operands = [_padded(x, width) for x in (grad_out, query, key, value)]
        out = None if out is None else _padded(out, width)
        compute = _on_cuda if query.is_cuda else _on_cpu
        grads = compute(*operands, _Rest(out, lse, bias, largest, is_causal, scale))
        return tuple(_shaped_as(grad, x) for grad, x in zip(grads, inputs))


@torch.library.register_fake("qattn::attention_backward", lib=library)
def _fake_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    key_mean: torch.Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _refuse_again(*_: Any) -> None:
    raise Unsupported("query, key or value: second derivatives, which qattn does not compute")


torch.library.register_autograd("qattn::attention_backward", _refuse_again, lib=library)


def mean_of_seen(key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """(B, H, 1, E): float32 mean of the keys that somebody sees, as quantize(smooth=True) has it of
    all. Keys under biases of -4096 or less everywhere join it only if there are no others."""
    if mask is None:
        return key.mean(-2, keepdim=True, dtype=torch.float32)
    chosen = _seen(mask, key)
    if mask.dtype != torch.bool:
        near = _seen(mask, key, _FAINT)
        chosen = torch.where(near.any(-2, keepdim=True), near, chosen)
    total = torch.where(chosen, key, 0).sum(-2, keepdim=True, dtype=torch.float32)
    return total / chosen.sum(-2, keepdim=True).clamp(min=1)


def centred(key: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """K less its float32 mean, rounded once; on GPUs K is read and written once, in its dtype."""
    return torch.sub(key, mean, out=torch.empty_like(key))


def _seen(mask: torch.Tensor, key: torch.Tensor, bias: float = -math.inf) -> torch.Tensor:
    """(B or 1, H or 1, S, 1): keys that some query of their KV head sees under more than `bias`."""
    seen = (mask if mask.dtype == torch.bool else mask > bias).any(-2)
    if seen.shape[1] not in (1, key.shape[1]):
        seen = seen.unflatten(1, (key.shape[1], -1)).any(2)
    return seen.expand(-1, -1, key.shape[-2]).unsqueeze(-1)


def _lse_of_centred(
    query: torch.Tensor, lse: torch.Tensor, mean: torch.Tensor, scale: float
) -> torch.Tensor:
    """The LSE that belongs to K less its mean; +inf, so that P is 0, in rows that see no key.

    A sum of float32 products, since torch may round the operands of a float32 matrix product.
    """
    grouped = query.unflatten(1, (mean.shape[1], -1))
    shift = (grouped * mean.unsqueeze(2)).sum(-1, dtype=torch.float32).flatten(1, 2)
    return torch.where(lse == -math.inf, math.inf, lse - scale * shift)


def _without_hidden(
    key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros for the keys that no query sees: 0 times what they hold might be NaN."""
    seen = _seen(mask, key)
    return torch.where(seen, key, 0), torch.where(seen, value, 0)


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What is added to the scores, and, if these are biases, the largest of each row (B or 1, H or
    1, L or 1, 1)."""
    if mask.dtype == torch.bool:
        zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        return zeros.masked_fill_(~mask, -math.inf), None
    return mask, mask.amax(-1, keepdim=True)


def _far_rows(largest: torch.Tensor, limit: float) -> torch.Tensor:
    """Rows, of the shape of `largest`, whose LSE is worth nothing: biases move them so far that the
    scores in it are rounded off, such as of finfo.min alone. Their biases are taken without
    `largest`, which does not change P."""
    return largest.isfinite() & (largest.abs() > limit)


def _padded(x: torch.Tensor, width: int) -> torch.Tensor:
    """Rows of `width` that lie dense: torch's backward wants one head dimension of all operands."""
    if x.shape[-1] < width:
        return torch.nn.functional.pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def _shaped_as(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient in shape and strides of empty_like(x), which torch.compile counts on."""
    grad = grad[..., : x.shape[-1]]
    if grad.stride() == torch.empty_like(x, device="meta").stride():
        return grad
    return torch.empty_like(x).copy_(grad)


# ---- torch's operators ---------------------------------------------------------------------------


class _Rest(NamedTuple):
    """What torch's backward takes besides operands; without out and lse its forward makes them."""

    out: torch.Tensor | None
    lse: torch.Tensor | None
    bias: torch.Tensor | None  #: the caller's mask, as biases
    largest: torch.Tensor | None  #: bias of each row, where the caller's mask is one of biases
    is_causal: bool
    scale: float
    uniform: torch.Tensor | None = None  #: rows (..., L) under biases of _OVERWHELMING


_Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def check_operators(query: torch.Tensor) -> None:
    """Refuses, before the forward runs, a torch whose operators are not those known here."""
    for name in _ARGUMENTS:
        if ("for_cpu" in name) == (query.device.type == "cpu"):
            _aten(name)


@functools.cache
def _aten(name: str) -> Any:
    """One of torch's operators, whose arguments are those that this file passes."""
    packet = getattr(torch.ops.aten, name, None)
    known = _ARGUMENTS[name].split()
    own = [x.name for x in packet.default._schema.arguments] if packet is not None else None
    if own != known:
        takes = "has none" if own is None else f"takes ({', '.join(own)})"
        raise Unsupported(
            f"backward: aten::{name} of torch {torch.__version__} {takes}, qattn knows "
            f"({', '.join(known)}); call inside torch.no_grad()"
        )
    return packet.default


def _for_every_head(x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(query.shape[1] // x.shape[1], 1)


def _of_groups(grad: torch.Tensor, heads: int) -> torch.Tensor:
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


def _on_cpu(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rest: _Rest,
) -> _Gradients:
    heads, out, lse, bias = key.shape[1], rest.out, rest.lse, rest.bias
    asked, near = None, grad_out
    if bias is not None and rest.largest is not None:
        far = _far_rows(rest.largest, _FAR)
        bias, far = bias - torch.where(far, rest.largest, 0), far.squeeze(-1)
        if far.any():
            asked = far & grad_out.ne(0).any(-1)
            near = grad_out.masked_fill(asked.unsqueeze(-1), 0)
            if lse is not None:
                lse = torch.where(far, math.inf, lse)  # P is 0 then
    key_of, value_of = (_for_every_head(x, query) for x in (key, value))
    options = {"attn_mask": bias, "scale": rest.scale}
    if out is None or lse is None:
        forward = _aten("_scaled_dot_product_flash_attention_for_cpu")
        out, lse = forward(query, key_of, value_of, 0.0, rest.is_causal, **options)
    backward = _aten("_scaled_dot_product_flash_attention_for_cpu_backward")
    grads = backward(near, query, key_of, value_of, out, lse, 0.0, rest.is_causal, **options)
    grads = (grads[0], _of_groups(grads[1], heads), _of_groups(grads[2], heads))
    if asked is not None and rest.bias is not None and asked.any():
        return _with_far_rows(grads, asked, grad_out, query, key, value, rest.bias, rest.scale)
    return grads


def _with_far_rows(
    grads: _Gradients,
    asked: torch.Tensor,
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
) -> _Gradients:
    """The gradients with those of rows `asked` (B, H, L), whose biases are so large that scores
    are rounded off beside them in float32, as in the forward: under finfo.min alone P is uniform.
    """
    dq, dk, dv = (x.float() for x in grads)
    group = query.shape[1] // key.shape[1]
    bias = mask.expand(*query.shape[:-1], key.shape[-2])
    most = max(1, _FAR_SCORES // key.shape[-2])
    for b, h in asked.any(-1).nonzero().tolist():
        k, v = key[b, h // group].float(), value[b, h // group].float()
        for rows in asked[b, h].nonzero().squeeze(-1).split(most):
            q, g = query[b, h, rows].float(), grad_out[b, h, rows].float()
            p = torch.softmax(scale * (q @ k.mT) + bias[b, h, rows].float(), -1)
            dp = g @ v.mT
            ds = scale * p * (dp - (p * dp).sum(-1, keepdim=True))
            dq[b, h, rows] = ds @ k
            dk[b, h // group] += ds.mT @ q
            dv[b, h // group] += p.mT @ g
    return dq.to(grads[0].dtype), dk.to(grads[1].dtype), dv.to(grads[2].dtype)


def _on_cuda(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rest: _Rest,
) -> _Gradients:
    """Flash attention, which groups heads by itself. It has no masks, and its causality is of the
    bottom right: where those matter, the attention that torch calls efficient."""
    causal, scale, lengths = rest.is_causal, rest.scale, (query.shape[-2], key.shape[-2])
    if rest.largest is not None:
        grad_out, rest = _with_uniform_rows(grad_out, query, key, rest)
    beside_flash = causal and lengths[0] != lengths[1]
    if rest.bias is not None or beside_flash or query.dtype == torch.float32:
        return _efficient(grad_out, query, key, value, rest)
    out, lse = rest.out, rest.lse
    if out is None or lse is None:
        forward = _aten("_scaled_dot_product_flash_attention")
        out, lse = forward(query, key, value, 0.0, causal, False, scale=scale)[:2]
    backward = _aten("_scaled_dot_product_flash_attention_backward")
    nothing = _no_dropout(query)
    return backward(
        grad_out, query, key, value, out, lse, None, None, *lengths, 0.0, causal, nothing, nothing,
        scale=scale,
    )  # fmt: skip


def _with_uniform_rows(
    grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, rest: _Rest
) -> tuple[torch.Tensor, _Rest]:
    """What gives rows under large biases their gradients on a GPU that nobody waits for.

    Beside biases such as finfo.min or -1e9 scores vanish, as in the forward, and P is uniform over
    the n keys of the largest bias. No float32 LSE says log(n) beside it, so that P comes out as 1;
    the row's gradient of O, divided by n, makes up for it. Rows between those and the near ones
    depend on how single scores are rounded. To make their LSE again would cost a forward: where
    the gradient of their output is not 0, as it is for padding, they get NaN.
    """
    bias, largest, lse = rest.bias, rest.largest, rest.lse
    assert bias is not None and largest is not None
    far = _far_rows(largest, _FAR_ON_GPUS)
    uniform = far & (_room(largest) > _reach(query, key, rest.scale, largest.shape))
    # 0 for the largest, far below for others; then _OVERWHELMING and -inf
    times = torch.where(uniform, -_OVERWHELMING, 1).to(bias.dtype)
    less = torch.where(uniform, -_OVERWHELMING, 0).to(bias.dtype)
    bias = (bias - torch.where(far, largest, 0)).mul_(times).sub_(less)
    keys = bias.eq(_OVERWHELMING).sum(-1, keepdim=True) * (key.shape[-2] // bias.shape[-1])
    share = torch.where(uniform, 1 / keys, 1)
    far, uniform = far.squeeze(-1), uniform.squeeze(-1)
    if lse is not None:
        worth = torch.where(grad_out.ne(0).any(-1), math.nan, math.inf).to(lse.dtype)
        lse = torch.where(uniform, _OVERWHELMING, torch.where(far, worth, lse))
    grad_out = torch.mul(grad_out, share, out=torch.empty_like(grad_out))
    return grad_out, rest._replace(bias=bias, lse=lse, uniform=uniform)


def _room(largest: torch.Tensor) -> torch.Tensor:
    """How large a score may be that a bias of float32 swallows: half the gap to the next number."""
    size = largest.float().abs()
    return (size - torch.nextafter(size, torch.zeros_like(size))) / 2


def _reach(query: torch.Tensor, key: torch.Tensor, scale: float, shape: torch.Size) -> torch.Tensor:
    """A bound of the scores of a row, and some more for codes' errors, of rows of that shape."""
    longest = torch.linalg.vector_norm(key, dim=-1, dtype=torch.float32).amax(-1)
    of_query = torch.linalg.vector_norm(query, dim=-1, keepdim=True, dtype=torch.float32)
    reach = of_query * _for_every_head(longest, query)[..., None, None] * (1.1 * abs(scale))
    for i, size in enumerate(shape[:3]):
        if size == 1:
            reach = reach.amax(i, keepdim=True)
    return reach.clamp(min=_APART)


def _efficient(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rest: _Rest,
) -> _Gradients:
    heads, (length, keys) = key.shape[1], (query.shape[-2], key.shape[-2])
    key, value = (_for_every_head(x, query) for x in (key, value))
    out, lse, bias, scale = rest.out, rest.lse, rest.bias, rest.scale
    if bias is not None:  # rows of biases begin at multiples of 16 elements
        bias = bias.expand(*bias.shape[:-1], keys)
        bias = torch.nn.functional.pad(bias, (0, -keys % 16))[..., :keys]
        bias = bias.expand(*query.shape[:-1], keys)
    if out is None or lse is None:
        forward = _aten("_scaled_dot_product_efficient_attention")
        made = forward(query, key, value, bias, True, 0.0, rest.is_causal, scale=scale)
        out, lse = made[:2]
        if rest.uniform is not None:
            lse[..., :length].masked_fill_(rest.uniform, _OVERWHELMING)
    else:
        # The kernel assumes what its own forward makes: O of strides (B, L, H, E), which it does
        # not check, and an LSE of a multiple of 32 rows.
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        lse = torch.nn.functional.pad(lse, (0, -length % 32), value=math.inf)
    backward = _aten("_scaled_dot_product_efficient_attention_backward")
    wanted, nothing = [True, True, True, False], _no_dropout(query)
    grads = backward(
        grad_out, query, key, value, bias, out, lse, nothing, nothing, 0.0, wanted,
        rest.is_causal, scale=scale,
    )  # fmt: skip
    return grads[0], _of_groups(grads[1], heads), _of_groups(grads[2], heads)


def _no_dropout(like: torch.Tensor) -> torch.Tensor:
    """State of a generator, which nobody reads where nothing is dropped."""
    return like.new_empty(2, dtype=torch.int64)
