"""quantize() and dequantize(): one operand to codes with their scales, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import _qattn
from ._errors import InvalidArgument, Unsupported, shown
from ._interop import (
    CPU,
    FORMATS,
    device_of,
    element_shape,
    entry,
    float_format,
    index_entry,
    output_entry,
    packed_shape,
    small_entry,
    stream_of,
    unit_stride,
    zeros,
)
from ._recipe import Granularity, MadeFor, Recipe, boolean, integer, made_for, real, scaling


@dataclasses.dataclass(frozen=True, eq=False)
class Quantized:
    """One operand as quantize() returns it; attention() takes it in place of q, k or v.

    The value of an element is code * scale (* global_scale), rotated back, plus the mean.
    """

    #: x's shape; int8 for s8, else uint8; packed formats: (..., D / 2), low nibble first
    codes: Any
    #: float32, or uint8 codes for grouped formats; shape by granularity (docs/NUMERICS.md)
    scale: Any
    format: str
    role: str  #: "q", "k" or "v"
    global_scale: Any = None  #: (B, H) float32, nvfp4 only
    mean: Any = None  #: if smooth: (B, H, D) float32; role "q": (B, H, ceil(S / block), D)
    granularity: str | None = None  #: None: the default for format and role
    block: int = 0  #: tokens per block; 0: the default (128)
    warp: int = 0  #: rows per warp; 0: the default (16)
    layout: str = "bshd"
    rotate: bool = False
    cu_seqlens: Any = None  #: (B + 1) integers if codes are packed sequences
    saturated: int = 0  #: codes that a static scale clipped

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in elements (codes of packed formats hold several per byte)."""
        return element_shape(self.format, tuple(self.codes.shape))

    @property
    def scaling(self) -> tuple[str, int, int]:
        return self.granularity or "automatic", self.block, self.warp


def quantize(
    x: Any,
    *,
    format: str = "s8",
    role: str = "k",
    granularity: Granularity | None = None,
    block: int = 0,
    warp: int = 0,
    layout: str = "bshd",
    smooth: bool = False,
    rotate: bool = False,
    static_scale: Any = None,
    scales_for: str | Recipe | MadeFor | None = None,
    cu_seqlens: Any = None,
    threads: int = 0,
) -> Quantized:
    """Quantises one operand, bit for bit as attention() does inside.

    x: (B, S, H, D), or (B, H, S, D) with layout "bhsd"; packed by cu_seqlens: (T, H, D) or
    (H, T, D). float32, float16 or bfloat16; D from 1 to 576 (v: 512), even for
    codes of 4 bits.
    format: s8, e4m3, e4m3fnuz, e5m2, mxfp8, mxfp4 or nvfp4. role: "q", "k" or "v" decides the
    direction of the groups. granularity, block (tokens), warp (rows): which elements share a scale;
    the defaults are the CPU's. smooth subtracts the mean over the sequence (q: over each block)
    and returns it; rotate applies a Hadamard rotation to the rows of q or k.
    static_scale: positive finite scales to use instead of the maxima; codes that they clip are
    counted in `saturated`. scales_for: the recipe that they were made for, or a MadeFor, of which
    the role's part counts; scales of another format are refused, and of rows with or less their
    mean where smooth says otherwise, and scales_for without static_scale. None: nobody knows,
    and they are taken. On CUDA tensors the work is enqueued on torch's current stream; with
    cu_seqlens or static_scale the call waits for it. Raises InvalidArgument, Unsupported.
    """
    scales = sizes_of(granularity, block, warp)
    options = _options(
        format,
        role,
        layout,
        scales,
        boolean("smooth", smooth),
        boolean("rotate", rotate),
        threads,
        scales_for,
    )
    tensors = {"x": entry("x", x)}
    unit_stride("x", x)
    device = device_of(x)
    if cu_seqlens is not None:
        tensors["cu_seqlens"] = index_entry("cu_seqlens", cu_seqlens, device)
    if static_scale is not None:
        tensors["static_scale"] = small_entry("static_scale", static_scale, np.float32, device)
    made, stream = {}, stream_of(x, tensors)
    for output, (output_format, shape) in _qattn.quantize_shapes(tensors, options, stream).items():
        made[output] = zeros(x, output_format, packed_shape(output_format, shape))
        tensors[output] = _output(output, made[output], output_format)
    saturated = _qattn.quantize(tensors, options, stream)
    return Quantized(
        made["codes"],
        made["scale"],
        format,
        role,
        made.get("global"),
        made.get("mean"),
        None if scales[0] == "automatic" else scales[0],
        scales[1],
        scales[2],
        layout,
        rotate,
        cu_seqlens,
        saturated,
    )


def sizes_of(granularity: Granularity | None, block: Any, warp: Any) -> tuple[str, int, int]:
    """(granularity, block, warp) of the arguments of quantize(), which may say a size twice."""
    name, *own = scaling("granularity", granularity)
    sizes = integer("block", block), integer("warp", warp)
    for what, mine, given in zip(("block", "warp"), own, sizes):
        if mine and given and mine != given:
            raise InvalidArgument(f"{what}: {given} contradicts granularity {granularity!r}")
    return name, sizes[0] or own[0], sizes[1] or own[1]


def dequantize(x: Quantized, dtype: Any = "float32", *, threads: int = 0) -> Any:
    """The values of a Quantized, of x's shape and framework.

    dtype: float32, float16 or bfloat16 (a name, or a numpy or torch dtype). Raises InvalidArgument.
    """
    if not isinstance(x, Quantized):
        raise InvalidArgument(f"x: is a {type(x).__name__}, not a qattn.Quantized")
    if x.format not in FORMATS:
        raise InvalidArgument(f"format: {shown(x.format)} is not one of {', '.join(FORMATS)}")
    if device_of(x.codes) != CPU:
        raise Unsupported("codes: lie on a GPU, and dequantize() computes on the CPU")
    options = _options(
        x.format,
        x.role,
        x.layout,
        x.scaling,
        x.mean is not None,
        boolean("rotate", x.rotate),
        threads,
    )
    out = zeros(x.codes, float_format(dtype), x.shape)
    tensors = {
        "x": output_entry("x", out),
        "codes": entry("codes", x.codes, x.format),
        "scale": entry("scale", x.scale, FORMATS[x.format][2]),
    }
    if x.global_scale is not None:
        tensors["global"] = entry("global_scale", x.global_scale)
    if x.mean is not None:
        tensors["mean"] = entry("mean", x.mean)
    if x.cu_seqlens is not None:
        tensors["cu_seqlens"] = index_entry("cu_seqlens", x.cu_seqlens)
    _qattn.dequantize(tensors, options)
    return out


def _output(name: str, x: Any, format_name: str) -> tuple:
    """An output of known format: raw codes' and scales' dtypes do not tell it."""
    made = output_entry(name, x, format_name)
    return (made[0], format_name, *made[2:])


def _options(
    format: Any,
    role: Any,
    layout: Any,
    scales: tuple[str, int, int],
    smooth: bool,
    rotate: bool,
    threads: Any,
    scales_for: Any = None,
) -> Any:
    for name, value in (("format", format), ("role", role), ("layout", layout)):
        if not isinstance(value, str):
            raise InvalidArgument(f"{name}: {shown(value)} is not a name")
    return _qattn.quantize_options(
        format=format,
        role=role,
        layout=layout,
        scaling=scales,
        smooth=smooth,
        rotate=rotate,
        threads=integer("threads", threads),
        scales_for=made_for(scales_for),
    )


def scheduled_scale(scale_at_ref: float, sigma: Sequence[float], ref: int, step: int) -> float:
    """Static scale for a diffusion model: s(step) = s(ref) * sigma[step] / sigma[ref].

    sigma: the noise level at each step, in whichever direction they run. Raises InvalidArgument
    for a step out of range or a sigma that is not positive and finite.
    """
    levels = [real("sigma", level) for level in sigma]
    return _qattn.scheduled_scale(
        real("scale_at_ref", scale_at_ref), levels, integer("ref", ref), integer("step", step)
    )
