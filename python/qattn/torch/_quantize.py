"""The operator torch.ops.qattn.quantize, and quantize(), which calls it.

The operator is qattn.quantize() without static scales and packed sequences, whose results have
shapes or counts that only their contents tell, and without the number of threads, which is no part
of what is computed: those stay with qattn.quantize().
"""

from __future__ import annotations

from typing import Any

import torch

from .. import _quantize
from .._errors import InvalidArgument, shown
from .._interop import FORMATS, packed_shape
from .._quantize import Quantized, sizes_of
from .._recipe import Granularity, boolean
from .._torch_tensors import check_memory, check_tensor
from ._library import library as _library
from ._ops import _refuse_gradients, _unit_stride

_library.define(
    "quantize(Tensor x, str format='s8', str role='k', str granularity='automatic', "
    "int block=0, int warp=0, str layout='bshd', bool smooth=False, bool rotate=False) "
    "-> (Tensor codes, Tensor scale, Tensor global_scale, Tensor mean)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def quantize(
    x: torch.Tensor,
    *,
    format: str = "s8",
    role: str = "k",
    granularity: Granularity | None = None,
    block: int = 0,
    warp: int = 0,
    layout: str = "bshd",
    smooth: bool = False,
    rotate: bool = False,
) -> Quantized:
    """qattn.quantize() of a torch tensor as one operator, torch.ops.qattn.quantize, so that
    torch.compile(fullgraph=True) and torch.export take it, with dynamic shapes too.

    x: (B, S, H, D) or, with layout "bhsd", (B, H, S, D); all else as there. Static scales, packed
    sequences and threads are qattn.quantize()'s alone: on CPUs the operator takes as many threads
    as that does by default. Tensors whose last stride is not 1 are copied on CPUs and refused on
    GPUs. Raises InvalidArgument, Unsupported.
    """
    if not isinstance(x, torch.Tensor):
        raise InvalidArgument(f"x: is a {type(x).__name__}, not a torch tensor")
    check_tensor("x", x)
    for name, value in (("format", format), ("role", role), ("layout", layout)):
        if not isinstance(value, str):
            raise InvalidArgument(f"{name}: {shown(value)} is not a name")
    kind, block, warp = sizes_of(granularity, block, warp)
    smooth, rotate = boolean("smooth", smooth), boolean("rotate", rotate)
    codes, scale, global_scale, mean = torch.ops.qattn.quantize(
        x, format, role, kind, block, warp, layout, smooth, rotate
    )
    return Quantized(
        codes,
        scale,
        format,
        role,
        global_scale if format == "nvfp4" else None,
        mean if smooth else None,
        None if kind == "automatic" else kind,
        block,
        warp,
        layout,
        rotate,
    )


@torch.library.impl(_library, "quantize", "CPU")
@torch.library.impl(_library, "quantize", "CUDA")
def _compute(
    x: torch.Tensor,
    format: str = "s8",
    role: str = "k",
    granularity: str = "automatic",
    block: int = 0,
    warp: int = 0,
    layout: str = "bshd",
    smooth: bool = False,
    rotate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    check_memory("x", x)
    with torch.no_grad():
        made = _quantize.quantize(
            _unit_stride("x", x),
            format=format,
            role=role,
            granularity=None if granularity == "automatic" else granularity,
            block=block,
            warp=warp,
            layout=layout,
            smooth=smooth,
            rotate=rotate,
        )
    optional = (made.global_scale, made.mean)
    return (made.codes, made.scale, *(_absent(x) if y is None else y for y in optional))


def _absent(x: torch.Tensor) -> torch.Tensor:
    """An output that format and options do not have."""
    return x.new_empty((0,), dtype=torch.float32)


@torch.library.register_fake("qattn::quantize", lib=_library)
def _fake(
    x: torch.Tensor,
    format: str = "s8",
    role: str = "k",
    granularity: str = "automatic",
    block: int = 0,
    warp: int = 0,
    layout: str = "bshd",
    smooth: bool = False,
    rotate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shapes, also of symbolic sizes; what is refused besides is refused when the operator runs."""
    if x.dim() != 4:
        raise InvalidArgument(f"x: rank {x.dim()} should be 4")
    if format not in FORMATS:
        raise InvalidArgument(f"format: {shown(format)} is not one of {', '.join(FORMATS)}")
    batch, tokens, heads, dim = x.shape
    if layout == "bhsd":
        tokens, heads = heads, tokens
    scale, mean_blocks = _scale_shape(
        format, role, granularity, block, warp, (batch, heads, tokens, dim)
    )
    mean = (batch, heads, mean_blocks, dim) if role == "q" else (batch, heads, dim)
    return (
        x.new_empty(
            packed_shape(format, tuple(x.shape)),
            dtype=torch.int8 if format == "s8" else torch.uint8,
        ),
        x.new_empty(scale, dtype=torch.float32 if FORMATS[format][2] == "f32" else torch.uint8),
        x.new_empty((batch, heads), dtype=torch.float32) if format == "nvfp4" else _absent(x),
        x.new_empty(mean, dtype=torch.float32) if smooth else _absent(x),
    )


def _scale_shape(
    format: str, role: str, granularity: str, block: Any, warp: Any, sizes: tuple
) -> tuple[tuple, Any]:
    """Shape of the scales, and blocks of Q's mean: groups.cpp once more, for symbolic sizes."""
    batch, heads, tokens, dim = sizes
    group = FORMATS[format][1]
    if granularity == "automatic":
        coarse = role == "v" and format != "s8"
        granularity = "group" if group else "per_channel" if coarse else "per_token"
    block = block or (64 if role == "v" and granularity == "per_thread" else 128)
    warp = warp or 16
    blocks = (tokens + block - 1) // block
    if granularity == "group":
        if role == "v":
            return (batch, heads, (tokens + group - 1) // group, dim), blocks
        return (batch, heads, tokens, (dim + group - 1) // group), blocks
    if granularity == "per_tensor":
        return (1,), blocks
    if granularity == "per_head":
        return (batch, heads), blocks
    if granularity == "per_channel":
        return (batch, heads, dim), blocks
    if granularity == "per_block_channel":
        return (batch, heads, blocks, dim), blocks
    counts = {
        "per_block": blocks,
        "per_warp": blocks * (block // warp),
        "per_thread": {"q": blocks * (block // warp) * 8, "k": blocks * 4}.get(role, tokens),
        "per_token": tokens,
    }
    if granularity not in counts:
        raise InvalidArgument(f"granularity: {shown(granularity)} is not a known one")
    return (batch, heads, counts[granularity]), blocks


# quantize() refuses before; callers of torch.ops end here.
_refuse_gradients("quantize", "x")
