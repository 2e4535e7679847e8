"""qattn: attention with low-precision operands, on numpy arrays and torch tensors (CPU and CUDA).

    import numpy as np, qattn
    q, k, v = (np.random.randn(1, 1024, 8, 64).astype(np.float32) for _ in range(3))
    out = qattn.attention(q, k, v, recipe="int8_full", causal=True)   # (1, 1024, 8, 64)

attention() computes, quantize() and dequantize() convert operands ahead, explain() says what would
run, reference_attention() is the float64 judge. KvCache and, on GPUs, GpuKvCache hold keys and
values in 2 to 16 bits and decode over them. qattn.torch.sdpa is torch's
scaled_dot_product_attention. Formulas, recipes and their errors: docs/NUMERICS.md.
"""

from typing import Any

from . import _qattn
from ._attention import attention, explain, reference_attention
from ._bit_mask import BitMask
from ._errors import InternalError, InvalidArgument, OutOfMemory, QattnError, Unsupported
from ._interop import device_named as _device_named
from ._quantize import Quantized, dequantize, quantize, scheduled_scale
from ._recipe import Granularity, MadeFor, Recipe, recipe, recipes
from .cache import GpuKvCache, KvBytes, KvCache, KvUsage

__version__: str = _qattn.version()


def cpu_isa() -> str:
    """The CPU instruction set in use ("avx512vnni", "scalar"); QATTN_CPU_ISA forces one.

    Raises InvalidArgument for an unknown name, Unsupported where this CPU lacks it.
    """
    return _qattn.cpu_isa()


def device_errors(device: Any = "cuda") -> None:
    """Raises InvalidArgument if a kernel met a bad index tensor on that device since the last call.

    device: "cuda" (the current one), "cuda:1", an index or a torch.device. Waits for the device;
    reading clears. On CPUs every call reports by itself, so there is nothing to tell.
    """
    _qattn.device_errors(*_device_named(device))


__all__ = [
    "BitMask",
    "GpuKvCache",
    "Granularity",
    "InternalError",
    "InvalidArgument",
    "KvBytes",
    "KvCache",
    "KvUsage",
    "MadeFor",
    "OutOfMemory",
    "QattnError",
    "Quantized",
    "Recipe",
    "Unsupported",
    "__version__",
    "attention",
    "cpu_isa",
    "dequantize",
    "device_errors",
    "explain",
    "quantize",
    "recipe",
    "recipes",
    "reference_attention",
    "scheduled_scale",
]
