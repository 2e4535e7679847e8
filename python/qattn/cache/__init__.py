"""KV caches in 2 to 16 bits, in host memory and on a GPU, and decode over them."""

from ._gpu import GpuKvCache
from ._host import KvBytes, KvCache, KvUsage

__all__ = ["GpuKvCache", "KvBytes", "KvCache", "KvUsage"]
