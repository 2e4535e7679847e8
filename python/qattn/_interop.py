"""Arrays and tensors as the extension takes them, never a copy.

In host memory: numpy arrays and torch tensors. On a GPU: torch tensors, and whatever has a
__cuda_array_interface__ (CuPy, Numba). torch is looked up among the imported modules only, so that
`import qattn` does not need it.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from . import _qattn
from ._errors import InvalidArgument, Unsupported, shown

#: (numpy array, format name); of torch, and on a device: (address, format name, shape, strides,
#: device type, index, what owns the memory); without memory (None, format name, shape, device type,
#: index)
Entry = tuple

#: DLPack's numbers: (device type, index)
Device = tuple[int, int]
CPU: Device = (1, 0)
_CUDA, _HIP = 2, 10
_LEGACY_STREAM = 1  # how a __cuda_array_interface__ names stream 0


class _OnStream(tuple):
    """An Entry with the stream that its array names."""

    stream: int | None = None


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
#: dtypes that arguments other than operands and outputs take; those take floats
_TAKEN = {
    "sinks": ("float32",),
    "alibi_slopes": ("float32",),
    "cu_seqlens_q": ("int32", "int64"),
    "cu_seqlens_k": ("int32", "int64"),
    "seqused_q": ("int32", "int64"),
    "seqused_k": ("int32", "int64"),
    "page_table": ("int32", "int64"),
    "saturated": ("int64",),
    **{f"{role}_{what}": ("float32",) for role in "qkv" for what in ("global", "mean")},
    **{f"{role}_scale": ("float32", "float8_e4m3fn", "float8_e8m0fnu") for role in "qkv"},
}
_FLOATS = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
# dtypes that hold codes of a format which the recipe names
_RAW_CODES = ("uint8", "float4_e2m1fn_x2")

#: name: (bits, group, format of one scale)
FORMATS: dict[str, tuple[int, int, str]] = _qattn.formats()


def _torch() -> Any:
    return sys.modules.get("torch")


#: What is_torch() knows of a type by now: a call asks some twenty times. Objects that stand for
#: others are asked each time.
_IS_TORCH: dict[type, bool] = {np.ndarray: False, type(None): False}


def is_torch(x: object) -> bool:
    known = _IS_TORCH.get(type(x))
    if known is not None:
        return known
    torch = _torch()
    if torch is None:
        return False
    if issubclass(type(x), torch.Tensor):
        _IS_TORCH[type(x)] = True
        return True
    return isinstance(x, torch.Tensor)


def dtype_name(x: Any) -> str:
    """ "float32", "bfloat16", ...: torch's and numpy's names agree."""
    return _name_of(x.dtype)


@functools.lru_cache(maxsize=64)
def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def is_cuda_array(x: object) -> bool:
    """Is it an array on a GPU that is not torch's?"""
    if type(x) in _IS_TORCH:
        return False
    return not is_torch(x) and hasattr(x, "__cuda_array_interface__")


def device_of(x: Any) -> Device:
    """Where an array lies that check_array() has accepted."""
    if is_torch(x):
        return CPU if x.is_cpu else _torch_device(x.device)
    if is_cuda_array(x):
        own = getattr(x, "__dlpack_device__", None)
        return (_CUDA, int(own()[1])) if own else (_CUDA, 0)
    return CPU


@functools.lru_cache(maxsize=64)
def _torch_device(device: Any) -> Device:
    if device.type == "cpu":
        return CPU
    return (_HIP if _torch().version.hip else _CUDA), device.index


def stream_of(x: Any, tensors: Mapping[str, Entry] | None = None) -> int:
    """The stream of a call on x and `tensors`; 0 on CPUs and where nothing names one.

    torch's for its tensors, else the one that arrays with a __cuda_array_interface__ name. An array
    that names another is refused: nothing here would wait for what is under way there.
    """
    stream = None
    if is_torch(x):
        device = _torch_device(x.device)
        stream = None if device == CPU else _torch().cuda.current_stream(x.device).cuda_stream
    elif is_cuda_array(x):
        stream = _named_stream(x)
    for name, made in (tensors or {}).items():
        if type(made) is not _OnStream:
            continue
        own = made.stream
        if stream is None:
            stream = own
        elif own is not None and (own or _LEGACY_STREAM) != (stream or _LEGACY_STREAM):
            raise InvalidArgument(
                f"{name}: names stream {own}, but the call is on stream {stream}; "
                "arrays of one call name one stream or none"
            )
    return stream or 0


def _named_stream(x: Any) -> int | None:
    """What a __cuda_array_interface__ says; None: there is nothing to wait for."""
    stream = x.__cuda_array_interface__.get("stream")
    return None if stream is None else int(stream)


def workspace_of(x: Any) -> Callable[[int], Any] | None:
    """torch's own allocator for x's device; None: qattn allocates by itself."""
    if not is_torch(x) or x.device.type == "cpu":
        return None
    return _allocator_of(x.device)


@functools.lru_cache(maxsize=64)
def _allocator_of(device: Any) -> Callable[[int], Any]:
    torch = _torch()
    return lambda size: torch.empty(size, dtype=torch.uint8, device=device)


def device_named(device: Any) -> Device:
    """A device from "cuda", "cuda:1", an index or a torch.device."""
    text = f"cuda:{device}" if type(device) is int else str(device)
    kind, _, index = text.partition(":")
    kinds = {"cpu": CPU[0], "cuda": _CUDA}
    if kind not in kinds or (index and not index.isdecimal()) or len(index) > 9:
        raise InvalidArgument(f"device: {shown(device)} is not like 'cpu', 'cuda' or 'cuda:1'")
    if index or kind == "cpu" or _torch() is None:
        return kinds[kind], int(index or 0)
    return kinds[kind], _torch().cuda.current_device()


def check_array(name: str, x: Any) -> None:
    """Refuses what is neither an array nor a torch tensor that means what its memory holds."""
    if is_torch(x):
        from ._torch_tensors import check_memory

        check_memory(name, x)
    elif isinstance(x, np.ma.MaskedArray):
        raise InvalidArgument(f"{name}: is a masked array, whose mask would be ignored")
    elif not isinstance(x, np.ndarray) and not is_cuda_array(x):
        raise InvalidArgument(f"{name}: is a {type(x).__name__}, not a numpy array or torch tensor")


def refuse_tracing(name: str, x: Any) -> None:
    """Refuses what a trace of torch would record as memory that nobody writes: this is for calls
    that are no operators."""
    if not is_torch(x):
        return
    own = _torch()._C
    traced = own._get_tracing_state() is not None
    if not traced and own._len_torch_dispatch_stack():
        from torch.fx.experimental.proxy_tensor import get_proxy_mode

        traced = get_proxy_mode() is not None
    if traced:
        raise Unsupported(
            f"{name}: is traced, and a trace records operators; qattn.torch.sdpa() is one"
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
            f"{name}: dtype {dtype} is not one of {', '.join(_taken(name, codes))}"
            + _conversion(name, x)
        )
    if dtype == "float8_e4m3fn" and codes == "mxfp8":
        return codes  # mxfp8's elements are e4m3
    return _FORMATS[dtype]


def _taken(name: str, codes: str | None) -> list[str]:
    """The dtypes that an argument takes, of codes those in the format that the recipe names."""
    if name in _TAKEN:
        return [*_TAKEN[name]]
    if codes not in FORMATS or FORMATS[codes][0] > 8:
        return [*_FLOATS.values()]
    own = [dtype for dtype, format_name in _FORMATS.items() if format_name == codes]
    return [*_FLOATS.values(), *(own or _RAW_CODES)]


def _conversion(name: str, x: Any) -> str:
    """How to get numbers that qattn takes from real ones that it does not."""
    if name in _TAKEN:
        return ""
    if is_torch(x):
        real = x.dtype.is_floating_point and x.dtype.itemsize > 4
        return f"; numbers are float32, float16 or bfloat16: {name}.float()" if real else ""
    if getattr(getattr(x, "dtype", None), "kind", "") != "f":
        return ""
    return f"; numbers are float32, float16 or bfloat16: {name}.astype(numpy.float32)"


def entry(name: str, x: Any, codes: str | None = None) -> Entry:
    """An input as the extension takes it."""
    check_array(name, x)
    format_name = format_of(name, x, codes)
    if is_torch(x):
        return torch_entry(x, format_name)
    if is_cuda_array(x):
        made = _OnStream((*_memory(name, x, format_name), *device_of(x), x))
        made.stream = _named_stream(x)
        return made
    if dtype_name(x) == "bfloat16":
        x = x.view(np.uint16)  # numpy exports no types of ml_dtypes
    elif dtype_name(x).startswith("float8"):
        x = x.view(np.uint8)
    return x, format_name


def torch_entry(x: Any, format_name: str | None = None) -> Entry:
    """entry() of a torch tensor that was checked."""
    # Not DLPack: its exchange makes the default stream wait, which no graph capture survives.
    kind, index = device_of(x)
    format_name = format_name or _FORMATS[_name_of(x.dtype)]
    return x.data_ptr(), format_name, x.shape, x.stride(), kind, index, x


def torch_operands(q: Any, k: Any, v: Any) -> dict[str, Entry] | None:
    """Entries of three plain torch tensors of rank 4 and one dtype of floats that have one batch
    and rows of stride 1, as most have; None: they are others."""
    dtype = q.dtype
    own = _FORMATS.get(_name_of(dtype))
    if own not in _FLOATS or k.dtype is not dtype or v.dtype is not dtype:
        return None
    tensors = {"q": torch_entry(q, own), "k": torch_entry(k, own), "v": torch_entry(v, own)}
    shape = q.shape
    for made in tensors.values():
        strides = made[3]
        if len(strides) != 4 or strides[3] != 1 or made[2][0] != shape[0]:
            return None
    return tensors


def new_torch_output(tensors: dict[str, Entry], q: Any) -> Any:
    """New memory for the output of torch_operands()."""
    batch, second, third, _ = tensors["q"][2]  # of numbers new_empty() is quicker than of a tuple
    return q.new_empty(batch, second, third, tensors["v"][2][3])


def add_torch_output(tensors: dict[str, Entry], out: Any) -> None:
    """Joins new_torch_output() to the operands."""
    tensors["out"] = torch_entry(out, tensors["q"][1])


def _memory(name: str, x: Any, format_name: str) -> tuple:
    """Address, format, shape and strides (in elements) of a __cuda_array_interface__."""
    own = x.__cuda_array_interface__
    if own.get("mask") is not None:
        raise InvalidArgument(f"{name}: has a mask, which would be ignored")
    shape, size = tuple(own["shape"]), np.dtype(own["typestr"]).itemsize
    if own.get("strides") is None:
        strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    else:
        for stride in own["strides"]:
            if stride % size != 0:
                raise InvalidArgument(
                    f"{name}: stride {stride} in bytes is no multiple of the item size {size}"
                )
        strides = tuple(stride // size for stride in own["strides"])
    return own["data"][0], format_name, shape, strides


def unit_stride(name: str, x: Any) -> None:
    """Refuses a torch tensor whose rows are not dense: nothing is copied unasked."""
    if is_torch(x) and x.dim() > 0 and x.stride(-1) != 1 and x.shape[-1] > 1:
        raise InvalidArgument(
            f"{name}: stride {x.stride(-1)} of the last dimension should be 1; "
            "call .contiguous() first"
        )


def output_entry(name: str, x: Any, codes: str | None = None) -> Entry:
    """An output as the extension takes it: writable memory."""
    read_only = isinstance(x, np.ndarray) and not x.flags.writeable
    if read_only or (is_cuda_array(x) and x.__cuda_array_interface__["data"][1]):
        raise InvalidArgument(f"{name}: is read-only")
    return entry(name, x, codes)


def shape_entry(format_name: str, shape: tuple[int, ...], device: Device) -> Entry:
    """A tensor without memory, for explain()."""
    return None, format_name, shape, *device


def entry_shape(made: Entry) -> tuple[int, ...]:
    """Shape in elements of what entry() gave."""
    return element_shape(made[1], tuple(made[2] if len(made) > 2 else made[0].shape))


def small_entry(name: str, x: Any, dtype: type, device: Device = CPU) -> Entry:
    """A small input, for which in host memory a list of numbers is good enough."""
    if isinstance(x, (list, tuple)):
        if device != CPU:
            raise InvalidArgument(f"{name}: is a {type(x).__name__}; on a GPU give a tensor there")
        try:
            made = np.asarray(x)
            whole = made.dtype.kind in "iu" and np.can_cast(made.dtype, np.int64)
            if dtype is np.int64 and made.size and not whole:
                raise InvalidArgument(f"{name}: {shown(x)} is not a list of integers of 64 bits")
            x = made.astype(dtype, casting="unsafe" if made.dtype.kind in "iuf" else "safe")
        except (ValueError, TypeError, OverflowError) as error:
            raise InvalidArgument(f"{name}: {error}") from None
    if dtype is np.float32:
        x = _widened(name, x)
    return entry(name, x)


def _widened(name: str, x: Any) -> Any:
    """A few numbers in float32, from float16, bfloat16 or float64, which is rounded."""
    if is_torch(x):
        if not x.is_floating_point() or _name_of(x.dtype) not in ("float64", "float16", "bfloat16"):
            return x
        check_array(name, x)
        return x.float()
    if isinstance(x, np.ndarray) and dtype_name(x) in ("float64", "float16", "bfloat16"):
        check_array(name, x)
        return x.astype(np.float32)
    return x


def index_entry(name: str, x: Any, device: Device = CPU) -> Entry:
    """An index tensor: int32 or int64, in host memory a list of integers too."""
    if is_torch(x) and x.device.type != "cpu" and dtype_name(x) == "int64":
        check_array(name, x)
        x = narrowed(x)
    return small_entry(name, x, np.int64, device)


def narrowed(x: Any) -> Any:
    """int32 of an int64 tensor, for kernels, which read no other. What does not fit becomes a
    number that is out of range wherever an index is, and so is found as any other bad one is."""
    return x.clamp(-1, 2**31 - 1).to(_torch().int32)


def mask_entry(name: str, x: Any, floats: bool = True) -> Entry:
    """A mask: bool, or floats that are added where the mask may be such; the validator says what is
    wrong with a dtype that is a format."""
    check_array(name, x)
    if dtype_name(x) not in _FORMATS:
        check_mask_dtype(name, x, ("float32", "float16", "bfloat16") if floats else ())
    return entry(name, x)


def check_mask_dtype(name: str, x: Any, floats: tuple[str, ...]) -> None:
    """Refuses a mask of integers, which might say who may look or what is added, and others."""
    dtype = dtype_name(x)
    if dtype == "bool" or dtype in floats:
        return
    rule = "bool (True = may look)"
    if floats:
        rule += f" or {', '.join(floats)} (added to the scores)"
    hint = f"where its numbers say who may look, pass {name} != 0"
    if floats and "float" in dtype:
        hint = f"pass it in {floats[0]}"
    raise InvalidArgument(f"{name}: dtype {dtype} is not {rule}; {hint}")


def float_format(dtype: object, what: str = "out_dtype") -> str:
    """Format of an argument that is a dtype: a name, a numpy dtype or type, or a torch dtype."""
    text = str(dtype).removeprefix("torch.")
    if not isinstance(dtype, str) and "torch." not in str(dtype):
        try:
            text = str(np.dtype(dtype))  # type: ignore[call-overload]
        except (TypeError, ValueError):  # the latter for what has a dtype but is none
            pass
    name = _FORMATS.get(text, text)
    if name not in _FLOATS:
        raise InvalidArgument(f"{what}: {dtype} is not one of float32, float16, bfloat16")
    return name


def zeros(like: Any, format_name: str, shape: tuple[int, ...], *, filled: bool = False) -> Any:
    """New memory for an output, of framework and device of `like`: floats, codes or counters.

    filled: the call writes every element, so that a GPU need not clear it first.
    """
    dtype = _FLOATS.get(format_name) or {"s8": "int8", "f64": "float64"}.get(format_name, "uint8")
    if is_torch(like):
        torch = _torch()
        make = torch.empty if filled and like.device.type != "cpu" else torch.zeros
        return make(shape, dtype=getattr(torch, dtype), device=like.device)
    if is_cuda_array(like):
        raise Unsupported(
            f"out: qattn cannot allocate a {type(like).__name__}; attention() takes one as `out`"
        )
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


def same_numbers(a: Any, b: Any) -> bool:
    """Do two index tensors or lists hold the same? On a GPU this waits, unless they are one."""
    if a is b:
        return True
    if is_torch(a) and is_torch(b):
        return a.device == b.device and bool(a.shape == b.shape and (a == b).all())
    if is_torch(a) or is_torch(b):
        a, b = (x.cpu() if is_torch(x) else x for x in (a, b))
    return np.array_equal(np.asarray(a), np.asarray(b))
