"""KvCache: a paged KV cache in mixed precision, and decode attention over it (CPU)."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .. import _qattn
from .._errors import InvalidArgument, shown
from .._fork import new_lock
from .._interop import (
    device_of,
    dtype_name,
    entry,
    entry_shape,
    float_format,
    index_entry,
    mask_entry,
    output_entry,
    small_entry,
    unit_stride,
    zeros,
)
from .._recipe import boolean, integer, real

#: bits of K and of V, or one number for both
Tier = int | tuple[int, int]


@dataclasses.dataclass(frozen=True)
class KvBytes:
    """Memory of a cache in bytes. total is what is allocated, and the sum of the others."""

    codes: int  #: of pages in tiers; a page that several sequences share counts once
    scales: int
    window: int  #: pages in 16 bits
    tables: int  #: page tables
    means: int  #: of K's and V's channels
    spare: int  #: free pages of the pools, room to grow, bookkeeping
    total: int


@dataclasses.dataclass(frozen=True)
class KvUsage:
    """One (sequence, layer)."""

    length: int  #: tokens appended and not truncated
    bytes: int  #: what the budget counts; shared pages count in full
    allowed_bytes: int  #: by the budget; 0: there is none
    average_bits: float  #: 8 bytes / elements of K and V of `length` tokens
    window_tokens: int  #: alive in 16 bits, summed over heads
    tier_tokens: tuple[int, ...]  #: alive in each tier, summed over heads
    balanced_channels: int  #: of K, that balance_k divides, summed over heads
    shifted_heads: int  #: heads whose V lost its mean


class KvCache:
    """Keys and values of sequences: the newest and the first tokens in 16 bits, the others in
    tiers of 2, 3, 4 or 8 bits so that the average stays within a budget.

        cache = qattn.KvCache(layers=32, kv_heads=8, head_dim=128, average_bits=3.0)
        s = cache.add_sequence()
        cache.append(layer, s, k, v)             # (1, S, 8, 128): a prefill or a decode step
        out = cache.decode(q, layer, s)          # (1, 1, 32, 128), its K and V appended before

    head_dim, v_head_dim: from 1 to 576 and 512; pages hold multiples of 32, the rest zeros that
    count as bytes (so GpuKvCache takes those alone, to 256). bits: of all pages, a number or a pair
    (K, V), as one tier. tiers: best first, numbers of bits or pairs (K, V); None: 4, with a budget
    8, 4, 3 and 2.
    average_bits: bits an element of K and V, window, scales and tables counted, in every (sequence,
    layer), from budget_from tokens on (None: twice shortest_length); None: no budget, one tier.
    smooth_k: subtract each channel's mean of K before it is quantised; rotate: turn K and V by a
    Hadamard matrix; balance_k: divide channels of K that are louder than others by powers of two
    first (and multiply Q by them), chosen with the mean by layer and head; usage() says how many;
    without effect with k_granularity "per_channel". smooth_v: subtract V's means, too, in heads
    where they are large, and add them to what decode() gives. Keys and values that drift get
    further
    means and powers of two for their pages, up to 8. importance_decay: what observe()
    keeps of the old, in [0, 1). hysteresis: a page that was demoted before is demoted again only
    where that costs this much less than demoting another. threads: at most so many of the CPU; 0:
    all. window, sinks: newest and first tokens in 16 bits, multiples of page_size (16, 32 or 64).
    window_dtype: float16 or bfloat16, what rows are rounded to first. k_granularity: scales of K in
    tiers, "per_token", or "per_channel" over the tokens of a page, for keys some of whose channels
    vary far more than others (not rotated then; 2 head_dim + 16 bytes a page and head where
    per_token has 2 page_size). importance: "uniform" or "key_norm" (the inverse mean square of its
    keys), what a page weighs until append(), set_importance() or observe() tell it. Where a method
    takes sequences, one number will do for one sequence. Several threads may use one cache; calls
    wait for each other, and os.fork() for those under way: a child has the cache as it is between
    two calls.

    Raises InvalidArgument, which names the argument, the value and the rule.
    """

    def __init__(
        self,
        *,
        layers: int = 1,
        kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        bits: Tier | None = None,
        tiers: Iterable[Tier] | None = None,
        average_bits: float | None = None,
        budget_from: int | None = None,
        window: int = 128,
        sinks: int = 16,
        page_size: int = 16,
        window_dtype: Any = "float16",
        smooth_k: bool = True,
        rotate: bool = True,
        balance_k: bool = True,
        smooth_v: bool = True,
        k_granularity: str = "per_token",
        importance: str = "uniform",
        importance_decay: float = 0.9,
        hysteresis: float = 0.25,
        threads: int = 0,
    ) -> None:
        if bits is not None:
            if tiers is not None or average_bits is not None:
                raise InvalidArgument(
                    f"bits: {shown(bits)} is for all pages; leave out tiers and average_bits"
                )
            tiers = (bits,)
        if tiers is None:
            tiers = (4,) if average_bits is None else (8, 4, 3, 2)
        options = _qattn.kv_options(
            layers=integer("layers", layers),
            heads_kv=integer("kv_heads", kv_heads),
            d=integer("head_dim", head_dim),
            dv=integer("v_head_dim", head_dim if v_head_dim is None else v_head_dim),
            window_format=float_format(window_dtype, "window_dtype"),
            page_size=integer("page_size", page_size),
            window=integer("window", window),
            sinks=integer("sinks", sinks),
            tiers=[_tier(tier) for tier in listed("tiers", tiers)],
            average_bits=0.0 if average_bits is None else real("average_bits", average_bits),
            budget_from=0 if budget_from is None else integer("budget_from", budget_from),
            smooth_k=boolean("smooth_k", smooth_k),
            rotate=boolean("rotate", rotate),
            balance_k=boolean("balance_k", balance_k),
            smooth_v=boolean("smooth_v", smooth_v),
            k_granularity=name_of("k_granularity", k_granularity),
            importance=name_of("importance", importance),
            decay=real("importance_decay", importance_decay),
            hysteresis=real("hysteresis", hysteresis),
            threads=integer("threads", threads),
        )
        self._hold(_qattn.kv_create(options))

    def _hold(self, cache: _qattn.KvCache) -> None:
        self._cache = cache
        self._lock = new_lock()
        shape = cache.shape()
        self.layers, self.kv_heads, self.head_dim, self.v_head_dim, self._options = shape

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, threads: int = 0) -> KvCache:
        """The cache that save(), or a GpuKvCache's, wrote; sequences keep their numbers."""
        cache = cls.__new__(cls)
        cache._hold(_qattn.kv_load(path_name(path), integer("threads", threads)))
        return cache

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes everything to a .safetensors file, pages that sequences share once."""
        with self._lock:
            self._cache.save(path_name(path))

    @property
    def shortest_length(self) -> int:
        """The length from which on the budget holds with every page in the last tier; 0: none."""
        return _qattn.kv_shortest_length(self._options)

    def add_sequence(self) -> int:
        """An empty sequence; its number is never given twice."""
        with self._lock:
            return self._cache.add_sequence()

    def fork(self, sequence: int) -> int:
        """A sequence with the same contents; pages are shared until one of the two changes them."""
        with self._lock:
            return self._cache.fork(integer("sequence", sequence))

    def release(self, sequence: int) -> None:
        """Forgets a sequence."""
        with self._lock:
            self._cache.release(integer("sequence", sequence))

    def length(self, sequence: int, layer: int = 0) -> int:
        """Tokens appended to one layer and not truncated; evicted ones count."""
        with self._lock:
            return self._cache.length(integer("sequence", sequence), integer("layer", layer))

    def append(
        self,
        layer: int,
        sequences: int | Sequence[int],
        k: Any,
        v: Any,
        *,
        layout: str = "bshd",
        cu_seqlens: Any = None,
        importance: Any = None,
    ) -> None:
        """Appends S tokens to each of B different sequences in one layer.

        k: (B, S, kv_heads, head_dim), v: likewise with v_head_dim, dimensions 1 and 2 swapped with
        "bhsd"; packed by cu_seqlens (B + 1): (T, kv_heads, head_dim) or (kv_heads, T, head_dim).
        float32, float16 or bfloat16, last stride 1. importance: (B, kv_heads, ceil(S' / 16))
        float32 as set_importance() takes it, S' the longest length after the call: of the pages
        that this call fills or quantises, by position. Tokens that leave the window are quantised,
        and pages demoted as far as the budget asks. Raises OutOfMemory where the budget cannot hold
        (a file of an earlier version, after many truncations); the cache is as it was then.
        """
        tensors = {"k": rows("k", k), "v": rows("v", v)}
        if cu_seqlens is not None:
            tensors["cu_seqlens"] = index_entry("cu_seqlens", cu_seqlens)
        if importance is not None:
            tensors["importance"] = entry("importance", importance)
        layer, ids = integer("layer", layer), sequence_ids(sequences)
        with self._lock:
            self._cache.append(layer, ids, tensors, layout_name(layout))

    def decode(
        self,
        q: Any,
        layer: int,
        sequences: int | Sequence[int],
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
        threads: int = 0,
    ) -> Any:
        """Attention of the newest Sq tokens over window, sinks and every tier of their sequences.

        q: (B, Sq, Hq, head_dim), or (B, Hq, Sq, head_dim) with "bhsd"; Sq 1 to 8, Hq a multiple of
        kv_heads; query i is at position length - Sq + i. scale: default 1 / sqrt(head_dim). causal:
        no query sees a token behind its own. window_left: keys at or behind position - window_left.
        softcap: s = c tanh(s / c). debias: adds half the variance that rounding K to 2, 3 or 4 bits
        left in a score, so that exp(score) is right in the mean and tokens in few bits get their
        weight; not with softcap, nor in a GpuKvCache with k_granularity "per_channel". sinks: (Hq)
        float32 logits that join the denominator only. tree_mask: (B, Sq, Sq) bool, may query i look
        at the j-th newest token. threads: 0: the cache's. Returns out, of q's framework and dtype
        unless `out` is given; then, if asked for, the LSE (B, Hq, Sq) float32, and the probability
        mass by block of 16 tokens (B, Hq, ceil(S / 16)) float32, averaged over the queries, which
        observe() takes.
        """
        ids, layer = sequence_ids(sequences), integer("layer", layer)
        call = DecodeCall(q, layout, self.v_head_dim, out, sinks, tree_mask)
        options = decode_options(layout, scale, causal, window_left, softcap, debias)
        with self._lock:
            if boolean("return_lse", return_lse):
                call.add_lse()
            if boolean("return_mass", return_mass):
                longest = max((self._cache.length(i, layer) for i in ids), default=0)
                call.add_mass((longest + 15) // 16)
            self._cache.decode(
                layer, ids, call.tensors, **options, threads=integer("threads", threads)
            )
        return call.returned()

    def truncate(self, sequence: int, length: int) -> None:
        """Forgets tokens from `length` on in every layer that has them.

        Pages that are left are demoted as far as the budget of the shorter sequence asks.
        """
        with self._lock:
            self._cache.truncate(integer("sequence", sequence), integer("length", length))

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
        with self._lock:
            self._cache.evict(
                integer("sequence", sequence),
                one_or_all("layer", layer),
                one_or_all("head", head),
                integer("begin", begin),
                integer("end", end),
            )

    def observe(self, layer: int, sequences: int | Sequence[int], mass: Any) -> None:
        """Folds decode()'s probability mass (B, Hq, ceil(S / 16)) float32 into importance: the root
        of the mean square over a KV head's query heads, importance_decay of what a page was told or
        observed before kept. What "key_norm" guessed is in another unit, and is replaced."""
        layer, ids = integer("layer", layer), sequence_ids(sequences)
        with self._lock:
            self._cache.observe(layer, ids, {"mass": entry("mass", mass)})

    def set_importance(self, sequence: int, layer: int, importance: Any) -> None:
        """importance: (kv_heads, ceil(length / 16)) float32 from 0 to 1e15, where observe() follows
        in the unit of decode()'s mass, the probability on a block of 16 tokens. Pages of twice the
        importance are expected to cause twice the error in the same tier."""
        sequence, layer = integer("sequence", sequence), integer("layer", layer)
        with self._lock:
            self._cache.set_importance(
                sequence, layer, {"importance": entry("importance", importance)}
            )

    def read(self, sequence: int, layer: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The decoded contents: k (kv_heads, S, head_dim) and v float32, and the tier of each token
        (kv_heads, S) int32: -1 evicted (reads as NaN), 0 16 bits, 1 the first tier, and so on."""
        sequence, layer = integer("sequence", sequence), integer("layer", layer)
        with self._lock:
            n = self._cache.length(sequence, layer)
            k = np.empty((self.kv_heads, n, self.head_dim), np.float32)
            v = np.empty((self.kv_heads, n, self.v_head_dim), np.float32)
            tiers = np.empty((self.kv_heads, n), np.int32)
            tensors = {"k": entry("k", k), "v": entry("v", v), "tiers": entry("tiers", tiers)}
            self._cache.read(sequence, layer, tensors)
        return k, v, tiers

    def bytes(self) -> KvBytes:
        """Memory of the whole cache."""
        with self._lock:
            return KvBytes(**self._cache.bytes())

    def usage(self, sequence: int, layer: int = 0) -> KvUsage:
        """Bytes and tiers of one sequence and layer."""
        with self._lock:
            used = self._cache.usage(integer("sequence", sequence), integer("layer", layer))
        return KvUsage(**used)


class DecodeCall:
    """The tensors of a decode() and what it returns."""

    def __init__(
        self, q: Any, layout: Any, v_head_dim: int, out: Any, sinks: Any, tree_mask: Any
    ) -> None:
        self.tensors = {"q": rows("q", q)}
        shape = entry_shape(self.tensors["q"])
        if len(shape) != 4:
            raise InvalidArgument(f"q: rank {len(shape)} should be 4")
        head, query = (1, 2) if layout_name(layout) == "bhsd" else (2, 1)
        self._q, self._batch, self._heads, self._queries = q, shape[0], shape[head], shape[query]
        if out is None:
            q_format = float_format(dtype_name(q), "q")
            out = zeros(q, q_format, (*shape[:3], v_head_dim), filled=True)
        unit_stride("out", out)
        self._results: list[Any] = []
        self._add("out", out)
        device = device_of(q)
        if sinks is not None:
            self.tensors["sinks"] = small_entry("sinks", sinks, np.float32, device)
        if tree_mask is not None:
            self.tensors["tree_mask"] = _tree_entry(tree_mask, device)

    def _add(self, name: str, result: Any) -> None:
        self._results.append(result)
        self.tensors[name] = output_entry(name, result)

    def _numbers(self, *shape: int) -> Any:
        return zeros(self._q, "f32", shape, filled=True)

    def add_lse(self) -> None:
        self._add("lse", self._numbers(self._batch, self._heads, self._queries))

    def add_mass(self, blocks: int) -> None:
        self._add("mass", self._numbers(self._batch, self._heads, blocks))

    def returned(self) -> Any:
        return self._results[0] if len(self._results) == 1 else tuple(self._results)


def _tree_entry(mask: Any, device: Any) -> Any:
    if isinstance(mask, (list, tuple)):
        return small_entry("tree_mask", mask, np.bool_, device)
    return mask_entry("tree_mask", mask, False)


def decode_options(
    layout: Any, scale: Any, causal: Any, window_left: Any, softcap: Any, debias: Any
) -> dict[str, Any]:
    """decode()'s options as the extension takes them."""
    if isinstance(causal, str):
        raise InvalidArgument(
            f"causal: {shown(causal)} is neither True nor False; queries of decode() are the "
            "newest tokens, so that there is one corner"
        )
    return {
        "layout": layout_name(layout),
        "scale": None if scale is None else real("scale", scale),
        "causal": boolean("causal", causal),
        "window_left": -1 if window_left is None else integer("window_left", window_left),
        "softcap": 0.0 if softcap is None else real("softcap", softcap),
        "debias": boolean("debias", debias),
    }


def _tier(value: Any) -> tuple[int, int]:
    pair = value if isinstance(value, (tuple, list)) else (value, value)
    if len(pair) != 2:
        raise InvalidArgument(
            f"tiers: {shown(value)} is neither a number of bits nor a pair (K, V)"
        )
    return integer("tiers", pair[0]), integer("tiers", pair[1])


def listed(name: str, values: Any) -> list[Any]:
    """The elements of an argument that lists some, in their order."""
    if not isinstance(values, (str, bytes, set, frozenset, dict)):
        try:
            return list(values)
        except TypeError:
            pass
    raise InvalidArgument(f"{name}: {shown(values)} is not a list")


def sequence_ids(sequences: Any) -> list[int]:
    """Numbers of sequences; an array without dimensions is one, like any other number."""
    if getattr(sequences, "ndim", 1) > 1:
        raise InvalidArgument(f"sequences: {shown(sequences)} is no number, nor a list of them")
    if hasattr(sequences, "__len__") and getattr(sequences, "ndim", 1) != 0:
        return [integer("sequences", s) for s in listed("sequences", sequences)]
    return [integer("sequences", sequences)]


def one_or_all(name: str, index: Any) -> int:
    """An index, or -1 for all; -1 itself would be the last one to a reader of Python."""
    if index is None:
        return -1
    number = integer(name, index)
    if number < 0:
        raise InvalidArgument(f"{name}: {number} is below 0; None stands for all")
    return number


def name_of(what: str, value: Any) -> str:
    if isinstance(value, str) and value.isascii():
        return value
    raise InvalidArgument(f"{what}: {shown(value)} is not a name")


def layout_name(layout: Any) -> str:
    return name_of("layout", layout)


def path_name(path: Any) -> str:
    """A path as the extension takes it, in UTF-8."""
    try:
        text = os.fsdecode(path)
        text.encode()
    except (TypeError, UnicodeEncodeError):
        raise InvalidArgument(f"path: {shown(path)} is not a path in UTF-8") from None
    if "\0" in text:
        raise InvalidArgument(f"path: {shown(path)} has a NUL in it, where C's paths end")
    return text


def rows(name: str, x: Any) -> tuple:
    made = entry(name, x)
    unit_stride(name, x)
    return made
