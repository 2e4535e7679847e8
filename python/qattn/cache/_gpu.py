"""GpuKvCache: the KV cache in mixed precision in the memory of a GPU, and decode over it there."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import _qattn
from .._errors import InvalidArgument
from .._interop import (
    check_array,
    device_named,
    device_of,
    entry,
    index_entry,
    is_cuda_array,
    is_torch,
    stream_of,
    workspace_of,
)
from .._recipe import boolean, integer
from ._host import (
    DecodeCall,
    KvBytes,
    KvCache,
    KvUsage,
    decode_options,
    layout_name,
    listed,
    one_or_all,
    path_name,
    rows,
    sequence_ids,
)

_MOST_KNOWN = 64  # lists of sequences whose tensors are kept


class GpuKvCache:
    """KvCache on a GPU: the same contents and choices, in memory that is taken once.

        cache = qattn.GpuKvCache(sequences=16, tokens=32768, kv_heads=8, head_dim=128,
                                 average_bits=3.0)
        s = cache.add_sequence()
        cache.append(layer, s, k, v)             # (1, S, 8, 128) on the GPU
        out = cache.decode(q, layer, s)          # (1, 1, 32, 128), its K and V appended before

    sequences: at a time; tokens: of each; pages: how many in 16 bits, then of each tier (None: as
    many as are ever needed); device: "cuda", "cuda:1", an index or a torch.device; the other
    options are KvCache's, but for `threads`. Calls are on the stream on which torch works on that
    device (or that an array names) and only enqueue kernels: append(), decode(), observe() and
    set_importance() neither allocate outside torch nor wait, but for the first call with a list of
    numbers, and a CUDA graph that captured them replays on the cache as it then is. length(),
    read(), usage() and status() wait. Sequences are numbers from add_sequence() or an int32 tensor
    (B) on the device; lists of numbers become tensors, the last 64 of which are kept (all that a
    graph captured), so that a capture wants a call with the same list shortly before it.

    What only the device can see (a pool without pages, a budget that cannot hold, more than
    `tokens`, bad numbers in an append's tensors) leaves the sequence as it was; from then on
    nothing is appended to it and decode gives NaN for it, until it is released. status() says why
    and qattn.device_errors() that it happened; that alone where observe() or set_importance() meet
    bad numbers, which change nothing.
    Raises InvalidArgument, Unsupported where the GPU has no kernels (decode: head dimensions 64,
    128 and 256), OutOfMemory.
    """

    def __init__(
        self,
        *,
        sequences: int,
        tokens: int,
        pages: Sequence[int] | None = None,
        device: Any = "cuda",
        **options: Any,
    ) -> None:
        facts = KvCache(**options)
        self._take(device, sequences, tokens)
        self._hold(_qattn.kv_gpu_create(facts._options, *self._room(pages)))

    def _take(self, device: Any, sequences: int, tokens: int) -> None:
        self.sequences, self.tokens = integer("sequences", sequences), integer("tokens", tokens)
        self._device = device_named(device)
        self._known: dict[tuple[int, ...], Any] = {}
        self._captured: dict[tuple[int, ...], Any] = {}  # by a CUDA graph
        self._used: set[int] = set()

    def _room(self, pages: Sequence[int] | None) -> tuple:
        """Capacity, device and stream as the extension takes them."""
        counts = [] if pages is None else listed("pages", pages)
        numbers = [integer("pages", count) for count in counts]
        return self.sequences, self.tokens, numbers, *self._device, self._stream()

    def _hold(self, cache: _qattn.GpuKvCache) -> None:
        self._cache = cache
        self.layers, self.kv_heads, self.head_dim, self.v_head_dim, _ = cache.shape()

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        sequences: int,
        tokens: int,
        pages: Sequence[int] | None = None,
        device: Any = "cuda",
    ) -> GpuKvCache:
        """A cache from the file that save() or KvCache.save() wrote; sequences keep their numbers,
        which are below `sequences`. The other options are the file's."""
        cache = cls.__new__(cls)
        cache._take(device, sequences, tokens)
        cache._hold(_qattn.kv_gpu_load(path_name(path), *cache._room(pages)))
        cache._used = {s for s in range(cache.sequences) if cache._cache.holds(s)}
        return cache

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes everything to a .safetensors file, as KvCache.save() does, for load() and
        KvCache.load(); it waits. Refused while something is wrong with a sequence (status())."""
        self._cache.save(path_name(path), self._stream())

    def _stream(self) -> int:
        """Where torch works on the cache's device."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available():
            return 0
        return torch.cuda.current_stream(self._device[1]).cuda_stream

    def _slots(self, sequences: Any) -> tuple:
        """A tensor of sequences, from numbers if need be."""
        if is_torch(sequences) or is_cuda_array(sequences):
            return index_entry("sequences", sequences, self._device)
        ids = tuple(sequence_ids(sequences))
        for number in ids:
            self._check(number)
        if len(set(ids)) != len(ids):
            raise InvalidArgument(f"sequences: {list(ids)} names one twice")
        return entry("sequences", self._kept(ids))

    def _kept(self, ids: tuple[int, ...]) -> Any:
        """The tensor of a list. A graph that captures it reads it for as long as the cache lives,
        so those are never dropped; of the others the oldest is, once the streams that read it are
        done."""
        held = self._captured.get(ids, self._known.get(ids))
        if held is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.pop(next(iter(self._known)))
            held = self._known[ids] = self._tensor(ids)
        if getattr(held, "is_cuda", False):
            torch = sys.modules["torch"]
            if torch.cuda.is_current_stream_capturing():
                self._captured[ids] = held
            else:
                held.record_stream(torch.cuda.current_stream(self._device[1]))
        return held

    def _tensor(self, ids: tuple[int, ...]) -> Any:
        torch = sys.modules.get("torch")
        if torch is None:
            raise InvalidArgument(
                "sequences: are numbers; without torch give an int32 array on the device"
            )
        device = torch.device("cuda", self._device[1])
        return torch.tensor(ids, dtype=torch.int32, device=device)

    def _check(self, sequence: int) -> int:
        if sequence not in self._used:
            raise InvalidArgument(f"sequence: {sequence} is not one of this cache")
        return sequence

    @property
    def free(self) -> int:
        """Sequences that can still be added."""
        return self.sequences - len(self._used)

    def add_sequence(self) -> int:
        """An empty sequence; a number may come again after release()."""
        slot = self._cache.add_sequence(self._stream())
        self._used.add(slot)
        return slot

    def fork(self, sequence: int) -> int:
        """A sequence with the same contents, in the same pages until one of them writes there."""
        copy = self._cache.fork(integer("sequence", sequence), self._stream())
        self._used.add(copy)
        return copy

    def release(self, sequence: int) -> None:
        """Forgets a sequence."""
        number = integer("sequence", sequence)
        self._cache.release(number, self._stream())
        self._used.discard(number)

    def length(self, sequence: int, layer: int = 0) -> int:
        """Tokens appended to one layer and not truncated; evicted ones count."""
        number, layer = integer("sequence", sequence), integer("layer", layer)
        return self._cache.length(number, layer, self._stream())

    def status(self, sequence: int) -> None:
        """Raises what went wrong on the device with a sequence since it was added."""
        self._cache.status(integer("sequence", sequence), self._stream())

    def append(
        self,
        layer: int,
        sequences: Any,
        k: Any,
        v: Any,
        *,
        layout: str = "bshd",
        counts: Any = None,
        importance: Any = None,
    ) -> None:
        """Appends S tokens to each of B different sequences in one layer.

        k: (B, S, kv_heads, head_dim), v: likewise with v_head_dim, dimensions 1 and 2 swapped with
        "bhsd"; float32, float16 or bfloat16, last stride 1; S at most `tokens`. counts: (B) int32,
        how many of the S tokens are there. importance: (B, kv_heads, N) float32, as KvCache's, N
        at least ceil(S' / 16). All on the cache's device.
        """
        tensors = {"sequences": self._slots(sequences), "k": rows("k", k), "v": rows("v", v)}
        if counts is not None:
            tensors["counts"] = index_entry("counts", counts, self._device)
        if importance is not None:
            tensors["importance"] = entry("importance", importance)
        stream = stream_of(k, tensors)
        self._cache.append(integer("layer", layer), tensors, layout_name(layout), stream)

    def decode(
        self,
        q: Any,
        layer: int,
        sequences: Any,
        *,
        layout: str = "bshd",
        scale: float | None = None,
        causal: bool = True,
        window_left: int | None = None,
        softcap: float | None = None,
        debias: bool = False,
        sinks: Any = None,
        tree_mask: Any = None,
        return_lse: bool = False,
        return_mass: bool = False,
        out: Any = None,
        workspace: Any = None,
    ) -> Any:
        """Attention of the newest Sq tokens: KvCache.decode() with tensors on the cache's device.

        sinks and tree_mask too are tensors there. The mass has a place for every block of 16 tokens
        that the cache has room for, (B, Hq, ceil(tokens / 16)): zeros behind the sequence.
        workspace: contiguous memory of the device from a multiple of 256 bytes on, which nothing
        else uses meanwhile (too little is refused with what is needed); default: torch's allocator
        gives it.
        """
        call = DecodeCall(q, layout, self.v_head_dim, out, sinks, tree_mask)
        call.tensors["sequences"] = self._slots(sequences)
        if boolean("return_lse", return_lse):
            call.add_lse()
        if boolean("return_mass", return_mass):
            call.add_mass((self.tokens + 15) // 16)
        self._cache.decode(
            integer("layer", layer),
            call.tensors,
            **decode_options(layout, scale, causal, window_left, softcap, debias),
            memory=_memory(q, workspace),
            stream=stream_of(q, call.tensors),
        )
        return call.returned()

    def truncate(self, sequence: int, length: int) -> None:
        """Forgets tokens from `length` on in every layer that has them.

        Pages that are left are demoted as far as the budget of the shorter sequence asks.
        """
        number, length = integer("sequence", sequence), integer("length", length)
        self._cache.truncate(number, length, self._stream())

    def evict(
        self,
        sequence: int,
        begin: int,
        end: int,
        *,
        layer: int | None = None,
        head: int | None = None,
    ) -> None:
        """Forgets tokens [begin, end) of one KV head or all, in one layer or all; the others keep
        their positions."""
        self._cache.evict(
            integer("sequence", sequence),
            one_or_all("layer", layer),
            one_or_all("head", head),
            integer("begin", begin),
            integer("end", end),
            self._stream(),
        )

    def observe(self, layer: int, sequences: Any, mass: Any) -> None:
        """Folds decode()'s probability mass into importance, as KvCache's: (B, Hq, N) float32, N at
        least ceil(S / 16). A mass that is not from 0 to 1e15 leaves its sequence as it was, and
        only qattn.device_errors() tells."""
        tensors = {"sequences": self._slots(sequences), "mass": entry("mass", mass)}
        self._cache.observe(integer("layer", layer), tensors, stream_of(mass, tensors))

    def set_importance(self, sequence: int, layer: int, importance: Any) -> None:
        """Sets importance, as KvCache's: (kv_heads, N) float32 on the cache's device, N at least
        ceil(length / 16). Too few blocks, or one that is not from 0 to 1e15, leave the sequence as
        it was, and only qattn.device_errors() tells."""
        number, layer = integer("sequence", sequence), integer("layer", layer)
        tensors = {"importance": entry("importance", importance)}
        self._cache.set_importance(number, layer, tensors, stream_of(importance))

    def read(self, sequence: int, layer: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """KvCache.read(), in host memory. For tests: it copies page by page."""
        number, layer = integer("sequence", sequence), integer("layer", layer)
        n = self.length(number, layer)
        k = np.empty((self.kv_heads, n, self.head_dim), np.float32)
        v = np.empty((self.kv_heads, n, self.v_head_dim), np.float32)
        tiers = np.empty((self.kv_heads, n), np.int32)
        tensors = {"k": entry("k", k), "v": entry("v", v), "tiers": entry("tiers", tiers)}
        self._cache.read(number, layer, tensors, self._stream())
        return k, v, tiers

    def bytes(self) -> KvBytes:
        """What is allocated on the device, used or not."""
        return KvBytes(**self._cache.bytes())

    def usage(self, sequence: int, layer: int = 0) -> KvUsage:
        """Bytes and tiers of one sequence and layer, as KvCache's."""
        number, layer = integer("sequence", sequence), integer("layer", layer)
        return KvUsage(**self._cache.usage(number, layer, self._stream()))


def _memory(q: Any, workspace: Any) -> Any:
    """A function of bytes that gives (address, bytes, owner)."""
    if workspace is not None:
        check_array("workspace", workspace)
        if device_of(workspace) != device_of(q):
            raise InvalidArgument("workspace: lies on another device than q")
        if is_torch(workspace):
            if not workspace.is_contiguous():
                raise InvalidArgument("workspace: is not contiguous")
            size = workspace.numel() * workspace.element_size()
            return lambda needed: (workspace.data_ptr(), size, workspace)
        if is_cuda_array(workspace):
            own = workspace.__cuda_array_interface__
            if own.get("strides") is not None:
                raise InvalidArgument("workspace: is not contiguous")
            size = int(np.prod(own["shape"])) * np.dtype(own["typestr"]).itemsize
            return lambda needed: (own["data"][0], size, workspace)
        raise InvalidArgument("workspace: lies in host memory")
    allocate = workspace_of(q)
    if allocate is None:
        raise InvalidArgument("workspace: is missing; only torch's tensors bring an allocator")

    def take(needed: int) -> tuple[int, int, Any]:
        memory = allocate(needed)
        return memory.data_ptr(), needed, memory

    return take
