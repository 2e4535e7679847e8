"""attention(), explain() and reference_attention(): arguments in, one call of the extension."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from . import _qattn
from ._bit_mask import BitMask
from ._causal import Lengths
from ._errors import InvalidArgument, Unsupported
from ._interop import (
    CPU,
    FORMATS,
    check_array,
    device_of,
    entry,
    entry_shape,
    float_format,
    format_of,
    is_torch,
    mask_entry,
    output_entry,
    refuse_tracing,
    same_numbers,
    shape_entry,
    small_entry,
    stream_of,
    unit_stride,
    workspace_of,
    zeros,
)
from ._options import call_options, layout_swaps
from ._ordinary import attend
from ._projection import (
    check_bias,
    linear,
    multiplies_behind,
    projected_shape,
    two_steps_text,
)
from ._quantize import Quantized
from ._recipe import (
    Granularity,
    MadeFor,
    Recipe,
    as_recipe,
    boolean,
    integer,
    scaling,
)

_ROLES = ("q", "k", "v")
#: the arguments beside an operand: granularity, scale, and what else its codes may need
_OPERANDS = {
    role: (f"{role}_granularity", f"{role}_scale", f"{role}_global", f"{role}_mean")
    for role in _ROLES
}
#: what others call an argument, and what attention() does
_OTHER_NAMES = {
    "attention_mask": "mask",
    "attn_mask": "mask",
    "attn_bias": "mask",
    "block_table": "page_table",
    "block_tables": "page_table",
    "cache_seqlens": "seqused_k",
    "is_causal": "causal",
    "k_descale": "k_scale",
    "logits_soft_cap": "softcap",
    "projection_bias": "bias",
    "q_descale": "q_scale",
    "return_attn_probs": "return_lse",
    "return_softmax_lse": "return_lse",
    "s_aux": "sinks",
    "sm_scale": "scale",
    "softmax_scale": "scale",
    "v_descale": "v_scale",
    "window_size": "window",
}
#: what others ask for, and why attention() does not
_NOT_NEEDED = {
    "deterministic": "results never depend on threads or timing; leave it out",
    "dropout_p": "qattn has no dropout; leave it out where it is 0",
    "enable_gqa": "k and v may have fewer heads than q; leave it out",
    "max_seqlen_k": "lengths are read from cu_seqlens_k; leave it out",
    "max_seqlen_q": "lengths are read from cu_seqlens_q; leave it out",
    "num_splits": "the plan splits keys by itself; leave it out",
}


_Function = TypeVar("_Function", bound=Callable[..., Any])


def _check_names(function: str, known: Container[str], given: Iterable[str]) -> None:
    """TypeError for arguments that there are not, with the name that one of another's has here."""
    for name in given:
        if name not in known:
            own, reason = _OTHER_NAMES.get(name), _NOT_NEEDED.get(name)
            hint = f"; here it is {own!r}" if own else f": {reason}" if reason else ""
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def _with_known_names(function: _Function) -> _Function:
    """attention(), which says what an argument is called here where it gets another's name, and
    has a shorter way for ordinary calls."""
    known = frozenset(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        if len(args) == 3:
            out = attend(*args, options)
            if out is not None:
                return out
        _check_names(function.__name__, known, options)
        return function(*args, **options)

    return cast(_Function, checked)


@_with_known_names
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    recipe: str | Recipe = "auto",
    layout: str = "bshd",
    causal: bool | str = False,
    causal_offset: int | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    mask: Any = None,
    block_mask: Any = None,
    block_mask_size: tuple[int, int] | None = None,
    alibi_slopes: Any = None,
    scale: float | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    page_table: Any = None,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    q_global: Any = None,
    k_global: Any = None,
    v_global: Any = None,
    k_mean: Any = None,
    v_mean: Any = None,
    scales_for: str | Recipe | MadeFor | None = None,
    saturated: Any = None,
    projection: Any = None,
    bias: Any = None,
    return_lse: bool = False,
    out: Any = None,
    out_dtype: Any = None,
    smooth_k: bool | None = None,
    smooth_q: bool | None = None,
    smooth_v: bool | None = None,
    rotate: bool | None = None,
    balance_k: bool | None = None,
    q_granularity: Granularity | None = None,
    k_granularity: Granularity | None = None,
    v_granularity: Granularity | None = None,
    threads: int = 0,
    validate: bool = False,
) -> Any:
    """softmax(scale * q k^T + ...) v with low-precision operands; nothing is copied or ignored.

    q: (B, Sq, Hq, D), k: (B, Sk, Hkv, D), v: (B, Sk, Hkv, Dv) with layout "bshd", dimensions 1 and
    2 swapped with "bhsd"; numpy arrays or torch tensors of float32, float16 or bfloat16, with any
    strides whose last one is 1; Hq a multiple of Hkv; D from 1 to 576 and Dv from 1 to 512.
    Each may be a Quantized instead, or an array of codes in the recipe's format (int8, uint8 or a
    float8 dtype; packed 4-bit codes (..., D / 2)) with its scales in q_scale, q_global, k_mean, ...
    With float inputs, q_scale, k_scale and v_scale are static scales, and k_mean (B, Hkv, D) is
    what smooth_k subtracts instead of k's own mean: any vector, exactly. scales_for: the recipe
    that static scales were made for, or a MadeFor; scales of another format are refused, and of
    rows that are not the call's (k with its mean or less it), and scales_for beside no scale at
    all. None: nobody knows, and they are taken. Scales are positive and finite; on a GPU, where
    only validate=True looks, others make the rows that use them NaN.
    q may be of another float dtype than k and v, as beside a cache in 16 bits. q_scale per head may
    be (B, Hkv), one for all heads that share k's, as FlashAttention has it.

    recipe: a name of recipes(), a Recipe, or "auto". q_granularity and the like: a name, (name,
    block) or (name, block, warp). smooth_k, smooth_q, smooth_v, rotate, balance_k: None leaves the
    choice to the recipe, which never rotates. smooth_q is on by itself for nvfp4_qk, nvfp4 and
    mxfp8 from 64 queries on, where q and k come as numbers and not packed. balance_k divides loud
    channels of k by powers of two and multiplies q's by them: exact; on by itself with rotate,
    which without it makes loud keys worse in FP8 and FP4, and on CPUs where q and k become int8 or
    4-bit floats; off where q or k comes as codes or has static scales.
    scale: softmax scale, default 1 / sqrt(D). softcap: s = c tanh(s / c).
    causal: query i sees keys j <= i + Sk - Sq (True or "lower_right") or j <= i ("upper_left").
    causal_offset: j <= i + causal_offset, the tokens before q where others follow it in k. Where
    sequences differ in Sk - Sq, upper left and offsets are a mask (longest Sq x longest Sk, of
    pages all that the table has); packed sequences on a GPU must share one cu_seqlens.
    window: (left, right), keys from i + Sk - Sq - left to i + Sk - Sq + right; -1 is unlimited.
    With causal, right is 0, -1, left (a distance: (w, w) is then (w, 0), as in FlashAttention) or
    hides nothing, from Sq - 1 on.
    mask: bool (True = may look) or float (added), broadcasts to (B, Hq, Sq, Sk); or a BitMask; or
    torch's causal_upper_left(Sq, Sk) or causal_lower_right(Sq, Sk). Other tensors of torch that
    are not what their memory holds are refused by name.
    block_mask: bool, one for each block of block_mask_size = (queries, keys) tokens, multiples of
    64; broadcasts to (B, Hq, blocks of queries, blocks of keys). Kernels skip what it forbids.
    sinks: (Hq) logits that join the denominator only.
    alibi_slopes: (Hq) or (B, Hq). Adds -slope * |i + Sk - Sq - j| to the score of query i
    and key j, Sq and Sk being the sequence's own lengths. Both may be of any float dtype.
    cu_seqlens_q, cu_seqlens_k: (B + 1), tensors are packed (T, H, D) or (H, T, D). seqused_q,
    seqused_k: (B), tokens that exist, or one number for all. page_table: (B, pages), k and v are
    (pages, page_size, Hkv, D); needs seqused_k. These are int32 or int64 (on GPUs torch's alone,
    which are copied to int32), or lists of integers.
    saturated: (3) int64 output, codes of q, k, v that a static scale clipped.
    projection: (E, Hq * Dv) as torch.nn.Linear has its weight, rows of stride 1; bias: (E), finite
    (on GPUs looked at with validate=True alone); both in out's dtype. The result is then each
    token's row of all heads, rounded to that dtype, times projection^T, plus bias: (B, Sq, E) or
    (T, E) in both layouts; on CUDA by torch's linear on the same stream, for torch tensors alone.
    threads: at most so many, 0 is the OpenMP default. One in a child of os.fork() if the thread
    that forked had used several: GNU's OpenMP would wait for them for ever.

    CUDA tensors: all tensors lie on q's device (lists will not do there), and the work is enqueued
    on torch's current stream of that device with memory of torch's allocator, without waiting: it
    can be captured in a CUDA graph once the same call has run before. Arrays with a
    __cuda_array_interface__ run on the one stream that they name (another one beside it is
    refused), and need `out`. Contents of index tensors are looked at only with validate=True, which
    waits for the stream; without it a bad entry makes its rows NaN (all rows, where sequences would
    share tokens) and device_errors() tells.

    Returns out of q's shape with Dv channels, framework and dtype of q (codes: float32) unless
    `out` or `out_dtype` says otherwise; with return_lse also the natural-log LSE, float32,
    (B, Hq, Sq) or packed (Hq, T). A row that sees no key gives 0 and -inf.
    Raises InvalidArgument, Unsupported, OutOfMemory; outputs are untouched then.
    """
    call = _Call(dict(locals()))
    out, lse = call.in_two_steps() if call.takes_two_steps() else call.run()
    return (out, lse) if return_lse else out


_SIGNATURE = inspect.signature(attention)


def explain(q: Any, k: Any, v: Any, **options: Any) -> str:
    """Which kernel attention() would run for these arguments and why, or why they are refused."""
    call = _Call(_arguments(q, k, v, options))
    call.shapes_of_outputs()
    text = _qattn.explain(call.tensors, call.options)
    if not call.takes_two_steps() or text.startswith("refused: "):
        return text
    call.forget_projection()
    call.shapes_of_outputs()
    return two_steps_text + _qattn.explain(call.tensors, call.options)


def reference_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    rows: Sequence[int] | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Attention in float64 on float32, float16 or bfloat16 inputs: the judge, slow and obvious.

    Takes attention()'s options; the recipe is ignored because nothing is quantised. rows: only
    these queries (index inside the sequence) are computed, the others are NaN.
    Returns float64 of attention()'s shape, and with return_lse the LSE in float64.
    """
    arguments = _arguments(q, k, v, options)
    for name in (
        "out",
        "out_dtype",
        "saturated",
        "q_scale",
        "k_scale",
        "v_scale",
        "q_global",
        "k_global",
        "v_global",
        "k_mean",
        "v_mean",
        "scales_for",
    ):
        if arguments[name] is not None:
            raise InvalidArgument(f"{name}: reference_attention() takes none")
    call = _Call(arguments)
    if call.device != CPU:
        raise Unsupported("q: lies on a GPU, and reference_attention() computes on the CPU")
    shape, lse_shape = call.out_shape(), call.lse_shape()
    projected = arguments["projection"] is not None
    swapped = range(len(shape)) if projected else layout_swaps(arguments["layout"], len(shape))
    out = _filled(q, tuple(shape[i] for i in swapped), np.nan)
    lse = _filled(q, lse_shape, np.nan) if return_lse else None
    chosen = [] if rows is None else [integer("rows", row) for row in rows]
    if rows is not None and not chosen:
        raise InvalidArgument("rows: is empty; leave it out to compute all rows")
    _qattn.reference_attention(call.tensors, call.options, out, lse, chosen)
    out = out.permute(*swapped) if is_torch(out) else out.transpose(swapped)
    return (out, lse) if return_lse else out


def _filled(like: Any, shape: tuple[int, ...], value: float) -> Any:
    array = zeros(like, "f64", shape)
    array[...] = value
    return array


def _arguments(q: Any, k: Any, v: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Every argument of attention() by name; TypeError for names that it does not have."""
    _check_names("attention", _SIGNATURE.parameters, options)
    bound = _SIGNATURE.bind(q, k, v, **options)
    bound.apply_defaults()
    return dict(bound.arguments)


class _Call:
    """Tensors and options of one call in the extension's terms."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._given = arguments
        self._recipe = as_recipe(arguments["recipe"])
        self._scalings: list[tuple[str, int, int]] = []
        self.tensors: dict[str, tuple] = {}
        q = self._quantized("q")
        #: the array of q, which decides device, stream and framework of everything new
        self.q = q.codes if q else arguments["q"]
        check_array("q", self.q)
        refuse_tracing("q", self.q)
        self.device = device_of(self.q)
        for role in _ROLES:
            self._add_operand(role)
        self._spread_q_scale()
        self._check_rotation()
        self._lengths = Lengths(arguments, self.tensors, self.q, self.device)
        self._lengths.add()
        self._lengths.take_causal()
        self._add_extras()
        self.options = self._options()

    def _add_operand(self, role: str) -> None:
        given = self._given
        granularity, scale, *others = _OPERANDS[role]
        original = self._quantized(role)
        if original:
            self._unwrap(role, original)
        x = original.codes if original else given[role]
        self._scalings.append(scaling(granularity, given[granularity]))
        codes = self._recipe.v if role == "v" else self._recipe.qk
        self.tensors[role] = entry(role, x, original.format if original else codes)
        unit_stride(role, x)
        if given[scale] is not None:
            raw = FORMATS[codes][2] if codes in FORMATS else None
            self.tensors[scale] = entry(scale, given[scale], raw)
        for name in others:
            if given.get(name) is not None:
                self.tensors[name] = entry(name, given[name])

    def _quantized(self, role: str) -> Quantized | None:
        x = self._given[role]
        return x if isinstance(x, Quantized) else None

    def _unwrap(self, role: str, x: Quantized) -> None:
        """Takes scales, mean and granularity from a Quantized; refuses a second source of them."""
        if x.role != role:
            raise InvalidArgument(f"{role}: was quantised for role {x.role!r}")
        if x.layout != self._given["layout"]:
            raise InvalidArgument(
                f"{role}: was quantised in layout {x.layout!r}, "
                f"the call says {self._given['layout']!r}"
            )
        if role == "q" and x.mean is not None:
            raise InvalidArgument(
                "q: was quantised with smooth=True, which only smooth_q inside attention() corrects"
            )
        if x.mean is not None and self._given["page_table"] is not None:
            raise InvalidArgument(
                f"{role}: was quantised with smooth=True, so that each page has a mean of its own; "
                "attention() takes one a sequence"
            )
        if x.mean is not None and x.rotate:
            raise InvalidArgument(
                f"{role}: was quantised with smooth=True and rotate=True; its mean is not rotated, "
                "and attention() wants that of the codes"
            )
        own = {
            f"{role}_scale": x.scale,
            f"{role}_global": x.global_scale,
            f"{role}_mean": x.mean,
            f"{role}_granularity": x.scaling,
        }
        for name, value in own.items():
            if self._given.get(name) is not None:
                raise InvalidArgument(f"{name}: is given, but {role} is a Quantized with its own")
            self._given[name] = value
        name = "cu_seqlens_q" if role == "q" else "cu_seqlens_k"
        packed = self._given[name]
        if (x.cu_seqlens is None) != (packed is None) or (
            packed is not None and not same_numbers(packed, x.cu_seqlens)
        ):
            raise InvalidArgument(f"{role}: was quantised with other {name} than the call's")

    def _spread_q_scale(self) -> None:
        """A scale of q for each head of k, (B, Hkv), becomes one for each head of q."""
        scale = self._given["q_scale"]
        if scale is None or len(scale.shape) != 2 or self._given["cu_seqlens_q"] is not None:
            return
        place = 2 if self._given["layout"] == "bshd" else 1
        heads_q, heads_k = (
            shape[place] if len(shape) == 4 else 0
            for shape in (entry_shape(self.tensors[role]) for role in ("q", "k"))
        )
        if heads_k in (0, heads_q) or scale.shape[1] != heads_k or heads_q % heads_k != 0:
            return
        group = heads_q // heads_k
        spread = (
            scale.repeat_interleave(group, 1) if is_torch(scale) else np.repeat(scale, group, 1)
        )
        self._given["q_scale"] = spread
        self.tensors["q_scale"] = entry("q_scale", spread)

    def _check_rotation(self) -> None:
        q, k = self._quantized("q"), self._quantized("k")
        for role, one, other in (("q", q, k), ("k", k, q)):
            if one is not None and one.rotate and (other is None or not other.rotate):
                raise InvalidArgument(
                    f"{role}: was quantised with rotate=True; q and k must both be, or neither"
                )

    def _add_extras(self) -> None:
        for name in ("sinks", "alibi_slopes"):
            if self._given[name] is not None:
                self.tensors[name] = small_entry(name, self._given[name], np.float32, self.device)
        mask = self._given["mask"] = self._lengths.plain_mask(self._given["mask"])
        if isinstance(mask, BitMask):
            self.tensors["mask"] = entry("mask", mask.bits, "b1")
        elif mask is not None:
            self.tensors["mask"] = mask_entry("mask", mask)
        if self._given["block_mask"] is not None:
            self.tensors["block_mask"] = mask_entry("block_mask", self._given["block_mask"], False)
        for name, given in (("projection", "projection"), ("projection_bias", "bias")):
            if self._given[given] is not None:
                self.tensors[name] = entry(given, self._given[given])
                unit_stride(given, self._given[given])
        if self._given["saturated"] is not None:
            self.tensors["saturated"] = output_entry("saturated", self._given["saturated"])

    def _options(self) -> Any:
        return call_options(self._given, self._recipe, tuple(self._scalings))

    def out_shape(self) -> tuple[int, ...]:
        """q's shape with v's channels, or projected; wrong ranks are left to the validator."""
        if "projection" in self.tensors:
            weight = entry_shape(self.tensors["projection"])
            return projected_shape(self.lse_shape(), weight)
        return (*entry_shape(self.tensors["q"])[:-1], *entry_shape(self.tensors["v"])[-1:])

    def lse_shape(self) -> tuple[int, ...]:
        shape = entry_shape(self.tensors["q"])
        order = layout_swaps(self._given["layout"], len(shape))
        return tuple(shape[i] for i in order)[:-1]

    def takes_two_steps(self) -> bool:
        return "projection" in self.tensors and multiplies_behind(self.q)

    def forget_projection(self) -> None:
        """From here on the call is attention alone."""
        self.tensors.pop("projection")
        self.tensors.pop("projection_bias", None)

    def in_two_steps(self) -> tuple[Any, Any]:
        """Attention, whose heads lie side by side then, and torch's linear; the results."""
        given, layout = self._given["out"], self._given["layout"]
        self.shapes_of_outputs()
        if given is not None:
            self.tensors["out"] = output_entry("out", given)
            unit_stride("out", given)
        _qattn.check(self.tensors, self.options)  # before anything is written
        if self._given["validate"] and self._given["bias"] is not None:
            check_bias(self._given["bias"])
        self.forget_projection()
        shape = self.out_shape()
        swaps = layout_swaps("bhsd" if layout == "bshd" else "bshd", len(shape))
        heads = zeros(self.q, self._out_format(), tuple(shape[i] for i in swaps), filled=True)
        lse = self.run(heads.permute(*swaps))[1]
        return linear(heads, self._given["projection"], self._given["bias"], given), lse

    def run(self, out: Any = None) -> tuple[Any, Any]:
        """Computes; returns out, that of the caller unless it is given here, and the LSE."""
        results = self.outputs(out)
        stream = stream_of(self.q, self.tensors)
        _qattn.attention(self.tensors, self.options, stream, workspace_of(self.q))
        return results

    def _out_format(self) -> str:
        given, q = self._given, self.tensors["q"][1]
        if given["out"] is not None:
            check_array("out", given["out"])
            own = format_of("out", given["out"])
            if given["out_dtype"] is not None and float_format(given["out_dtype"]) != own:
                raise InvalidArgument(f"out_dtype: {given['out_dtype']} differs from out's {own}")
            return own
        if given["out_dtype"] is not None:
            return float_format(given["out_dtype"])
        return q if q in ("f32", "f16", "bf16") else "f32"

    def outputs(self, out: Any = None) -> tuple[Any, Any]:
        """Adds out and lse to the tensors, new ones where the caller gave none; returns both."""
        return_lse = boolean("return_lse", self._given["return_lse"])
        out_format, lse = self._out_format(), None
        out = self._given["out"] if out is None else out
        if out is None:
            out = zeros(self.q, out_format, self.out_shape(), filled=True)
        self.tensors["out"] = output_entry("out", out)
        unit_stride("out", out)
        if return_lse:
            lse = zeros(self.q, "f32", self.lse_shape(), filled=True)
            self.tensors["lse"] = output_entry("lse", lse)
        return out, lse

    def shapes_of_outputs(self) -> None:
        self.tensors["out"] = shape_entry(self._out_format(), self.out_shape(), self.device)
        if boolean("return_lse", self._given["return_lse"]):
            self.tensors["lse"] = shape_entry("f32", self.lse_shape(), self.device)
