"""numpy arrays and torch tensors as the extension takes them: (array, format name), never a copy.

torch is looked up among the imported modules only, so that `import qattn` does not need it.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from . import _qattn
from ._errors import InvalidArgument, Unsupported

#: (array, format name), or (None, format name, shape) for a tensor without memory
Entry = tuple

# The name of a dtype, which numpy (with ml_dtypes) and torch share, to the name of a format.
_FORMATS = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int8": "s8",
    "int32": "s32",
    "int64": "s64",
    "bool": "b8",
    "float8_e4m3fn": "e4m3",
    "float8_e4m3fnuz": "e4m3fnuz",
    "float8_e5m2": "e5m2",
    "float8_e8m0fnu": "ue8m0",
}
_FLOATS = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
# dtypes that hold codes of a format which the recipe names
_RAW_CODES = ("uint8", "float4_e2m1fn_x2")

#: name: (bits, group, format of one scale)
FORMATS: dict[str, tuple[int, int, str]] = _qattn.formats()


def _torch() -> Any:
    return sys.modules.get("torch")


def is_torch(x: object) -> bool:
    torch = _torch()
    return torch is not None and isinstance(x, torch.Tensor)


def dtype_name(x: Any) -> str:
    """ "float32", "bfloat16", ...: torch's and numpy's names agree."""
    return str(x.dtype).removeprefix("torch.")


def check_array(name: str, x: Any) -> None:
    """Refuses what is neither a numpy array nor a strided torch tensor in host memory."""
    if is_torch(x):
        check_tensor(name, x)
        if x.is_neg() or x.is_conj():
            raise InvalidArgument(f"{name}: is a lazy negative; call resolve_neg() first")
    elif isinstance(x, np.ma.MaskedArray):
        raise InvalidArgument(f"{name}: is a masked array, whose mask would be ignored")
    elif not isinstance(x, np.ndarray):
        raise InvalidArgument(f"{name}: is a {type(x).__name__}, not a numpy array or torch tensor")


def check_tensor(name: str, x: Any) -> None:
    """Refuses a torch tensor that is not a strided one in host memory."""
    import torch  # in sys.modules, since x is its tensor; torch.compile follows an import

    if x.device.type != "cpu":
        raise Unsupported(f"{name}: lies on device {x.device}; this build computes on the CPU only")
    if x.layout != torch.strided:
        raise InvalidArgument(f"{name}: layout {x.layout} should be strided (dense)")
    if x.requires_grad and torch.is_grad_enabled():
        raise InvalidArgument(
            f"{name}: requires a gradient, which qattn does not compute; detach it, or call inside "
            "torch.no_grad()"
        )


def format_of(name: str, x: Any, codes: str | None = None) -> str:
    """Format of an array's elements. `codes`: the format that raw bytes are in, if they may be."""
    dtype = dtype_name(x)
    if dtype in _RAW_CODES:
        if codes is None or codes == "none" or FORMATS[codes][0] > 8:
            raise InvalidArgument(
                f"{name}: dtype {dtype} holds codes, but the recipe has no coded format for it"
            )
        return codes
    if dtype not in _FORMATS:
        raise InvalidArgument(
            f"{name}: dtype {dtype} is not one of {', '.join([*_FORMATS, *_RAW_CODES])}"
        )
    if dtype == "float8_e4m3fn" and codes == "mxfp8":
        return codes  # mxfp8's elements are e4m3
    return _FORMATS[dtype]


def entry(name: str, x: Any, codes: str | None = None) -> Entry:
    """An input as the extension takes it."""
    check_array(name, x)
    format_name = format_of(name, x, codes)
    if is_torch(x):
        torch = _torch()
        x = x.detach()
        if dtype_name(x).startswith(("float8", "float4")):
            x = x.view(torch.uint8)  # DLPack of older consumers has no float8
    elif dtype_name(x) == "bfloat16":
        x = x.view(np.uint16)  # numpy exports no types of ml_dtypes
    elif dtype_name(x).startswith("float8"):
        x = x.view(np.uint8)
    return x, format_name


def output_entry(name: str, x: Any) -> Entry:
    """An output as the extension takes it: writable memory."""
    if isinstance(x, np.ndarray) and not x.flags.writeable:
        raise InvalidArgument(f"{name}: is read-only")
    return entry(name, x)


def shape_entry(format_name: str, shape: tuple[int, ...]) -> Entry:
    """A tensor without memory, for explain()."""
    return None, format_name, shape


def small_entry(name: str, x: Any, dtype: type) -> Entry:
    """A small input, for which a list of numbers is good enough."""
    if isinstance(x, (list, tuple)):
        try:
            x = np.asarray(x, dtype)
        except (ValueError, TypeError, OverflowError) as error:
            raise InvalidArgument(f"{name}: {error}") from None
    return entry(name, x)


def float_format(dtype: object) -> str:
    """Format of an `out_dtype`: a name, a numpy dtype or type, or a torch dtype."""
    text = str(dtype).removeprefix("torch.")
    if not isinstance(dtype, str) and "torch." not in str(dtype):
        try:
            text = str(np.dtype(dtype))  # type: ignore[call-overload]
        except TypeError:
            pass
    name = _FORMATS.get(text, text)
    if name not in _FLOATS:
        raise InvalidArgument(f"out_dtype: {dtype} is not one of float32, float16, bfloat16")
    return name


def zeros(like: Any, format_name: str, shape: tuple[int, ...]) -> Any:
    """New memory for an output, of the framework of `like`: floats, codes or counters."""
    dtype = _FLOATS.get(format_name) or {"s8": "int8", "f64": "float64"}.get(format_name, "uint8")
    if is_torch(like):
        return _torch().zeros(shape, dtype=getattr(_torch(), dtype))
    if dtype == "bfloat16":
        import ml_dtypes

        return np.zeros(shape, ml_dtypes.bfloat16)
    return np.zeros(shape, dtype)


def packed_shape(format_name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the array that holds `shape` elements: bytes, if several share one."""
    bits = FORMATS[format_name][0]
    return shape if bits >= 8 else (*shape[:-1], shape[-1] * bits // 8)


def element_shape(format_name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape in elements of an array of that format; the opposite of packed_shape."""
    bits = FORMATS[format_name][0]
    return shape if bits >= 8 or not shape else (*shape[:-1], shape[-1] * 8 // bits)
