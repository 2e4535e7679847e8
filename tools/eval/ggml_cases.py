#!/usr/bin/env python3
"""A grid of attention as ggml tests its operator FLASH_ATTN_EXT, judged in float64.

    python tools/eval/ggml_cases.py [--json FILE] [--only REGEX] [--whole]

The values of each parameter, and which meet, are those of llama.cpp's tests/test-backend-ops.cpp,
of the commit that the record names. q is float32, k and v are float16 (in heads of 64 and 72 also
float32 and bfloat16) and lie in a cache that is longer than they are. Inputs are uniform within -1
and 1, sinks within -10 and 10; a float16 mask is added, a fifth of it blocks of 0 or -inf, times a
slope a head where there is a bias. Beside the grid: masks of ALiBi as llama.cpp makes them, which
qattn has a word for, and K and V of two types.

A row of the record is a kind: head sizes, heads, types and what is asked for. Its cases differ in
lengths, batch and the order of memory; without --whole they take turns, so that each kind meets
each number of queries and of keys. ggml's precision has no word here, all sums are float32, and
makes no case. Caches of quantised types are not run: they are counted as in the whole grid. The
provenance has ggml's own bound as an NRMSE, `ggml`. Exits with 1 where something is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

if __name__ == "__main__":  # cases are small; before what reads it is imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
from foreign_cases import Call, Row, main, record  # noqa: E402

LLAMA_CPP = "0054f92869492a7d2784ea9bc920916db8cd3301"
NMSE = 5e-4  #: that ggml allows this operator: the square of an NRMSE
SIZES = ((40, 40), (64, 64), (72, 72), (80, 80), (96, 96), (128, 128), (192, 128), (192, 192),
         (256, 256), (320, 256), (512, 512), (576, 512))  # fmt: skip
#: (heads of k, heads of q for each) by head size of q, beside (4, 1) and (4, 4)
GROUPS = {128: ((4, 12),), 192: ((4, 8), (4, 16)),
          320: ((1, 1), (1, 4), (1, 32)), 576: ((1, 1), (1, 4), (1, 20))}  # fmt: skip
TYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
QUANTISED = "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"
ALL_TYPES = (64, 72)  #: head sizes of which every type is tested, of others f16
MIXED = 8  #: cases of K and V of two types of which one is quantised
KEYS, QUERIES = (113, 512, 1024), (1, 3, 32, 75)
CAP, BIAS = 10.0, 8.0


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a row's cases have in common."""

    size: tuple[int, int]
    heads: tuple[int, int]  #: of k, and of q for each of them
    types: tuple[str, str]
    mask: bool = False
    sinks: bool = False
    bias: bool = False
    cap: bool = False
    alibi: bool = False

    @property
    def name(self) -> str:
        one = self.types[0] if self.types[0] == self.types[1] else "/".join(self.types)
        words = [x for x in ("mask", "sinks", "bias", "cap", "alibi") if getattr(self, x)]
        heads = f"{self.heads[0] * self.heads[1]}/{self.heads[0]}"
        return " ".join([f"D {self.size[0]}/{self.size[1]}", f"H {heads}", one, *words])


@dataclasses.dataclass(frozen=True)
class Shape:
    keys: int
    queries: int
    batch: int = 1
    heads_inside: bool = False  #: heads of a token lie side by side, not tokens of a head

    @property
    def name(self) -> str:
        inside = " heads inside" if self.heads_inside else ""
        return f"keys {self.keys} queries {self.queries} batch {self.batch}{inside}"


def types_of(size: int) -> tuple[str, ...]:
    return (*TYPES, *QUANTISED) if size in ALL_TYPES else ("f16",)


def kinds() -> Iterator[Kind]:
    """The grid, quantised types too."""
    yes_and_no = (True, False)
    for size in SIZES:
        caps = yes_and_no if size[0] == 128 else (False,)
        for heads in ((4, 1), (4, 4), *GROUPS.get(size[0], ())):
            for type_kv in types_of(size[0]):
                both = type_kv, type_kv
                for mask, sinks, cap in itertools.product(yes_and_no, yes_and_no, caps):
                    for bias in yes_and_no if mask else (False,):
                        yield Kind(size, heads, both, mask, sinks, bias, cap)


def shapes(kind: Kind, number: int, whole: bool) -> Iterator[Shape]:
    """Shapes of the kind: of the whole grid, or for each number of queries one, whose number of
    keys and batch take turns with the kind's number."""
    keys = KEYS if kind.heads[1] == 1 else (512,)
    batches = (1, 3) if kind.size[0] <= 64 else (1,)
    may_swap = kind.mask and not kind.bias and not kind.cap
    every = list(itertools.product(batches, keys))
    for n, queries in enumerate(QUERIES):
        for batch, count in every if whole else [every[(n + number) % len(every)]]:
            yield Shape(count, queries, batch)
            if whole and may_swap and count == 512:
                yield Shape(count, queries, batch, heads_inside=True)
    if may_swap and not whole:
        queries, batch = QUERIES[number % 4], batches[number // 4 % len(batches)]
        yield Shape(512, queries, batch, heads_inside=True)


def beside() -> Iterator[tuple[Kind, list[Shape]]]:
    yield Kind((64, 64), (4, 1), ("f16", "f32"), mask=True), [Shape(96, 2)]
    for size, heads in itertools.product((64, 128), ((4, 1), (4, 4))):
        lengths = [Shape(x, y) for x, y in itertools.product(KEYS, QUERIES)]
        yield Kind((size, size), heads, ("f16", "f16"), alibi=True), lengths


# ---- Inputs --------------------------------------------------------------------------------------


class Inputs:
    """Tensors of one case, by its name alone."""

    def __init__(self, kind: Kind, shape: Shape) -> None:
        self.rng = np.random.default_rng(list(f"{kind.name} {shape.name}".encode()))
        self.kind, self.shape = kind, shape

    def uniform(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return self.rng.uniform(-1, 1, shape).astype(np.float32).astype(dtype)

    def cached(self, heads: int, size: int, type_kv: str) -> np.ndarray:
        """(batch, heads, keys, size), half of a cache whose other half is NaN."""
        batch, keys = self.shape.batch, self.shape.keys
        dtype = TYPES[type_kv]
        if self.shape.heads_inside:
            cache = np.full((batch, keys, 2 * heads, size), np.nan, dtype)
            cache[:, :, :heads] = self.uniform((batch, keys, heads, size), dtype)
            return cache[:, :, :heads].swapaxes(1, 2)
        cache = np.full((batch, heads, 2 * keys, size), np.nan, dtype)
        cache[:, :, :keys] = self.uniform((batch, heads, keys, size), dtype)
        return cache[:, :, :keys]

    def mask(self) -> np.ndarray:
        """(batch, 1, queries, keys) float16; blocks of up to 64 x 128 are 0 or -inf."""
        batch, queries, keys = self.shape.batch, self.shape.queries, self.shape.keys
        mask = self.uniform((batch, 1, queries, keys), np.float16)
        count = max(2, round(0.2 * mask.size / (min(64, queries) * 128)))
        for n in range(count):
            b, row, column = (int(self.rng.integers(x)) for x in (batch, queries, keys))
            mask[b, 0, row : row + 64, column : column + 128] = 0.0 if n % 2 else -np.inf
        return mask


def slopes(heads: int) -> np.ndarray:
    """ALiBi's (heads) for a largest bias: a geometric row for the largest power of two of heads,
    between its members another."""
    power = 2 ** int(math.log2(heads))
    inside = [2 ** (-BIAS / power * (h + 1)) for h in range(power)]
    between = [2 ** (-BIAS / 2 / power * (2 * h + 1)) for h in range(heads - power)]
    return np.array(inside + between, np.float32)


def made(kind: Kind, shape: Shape) -> Call:
    inputs = Inputs(kind, shape)
    (size, size_v), (heads_kv, group) = kind.size, kind.heads
    heads = heads_kv * group
    if shape.heads_inside:
        q = inputs.uniform((shape.batch, shape.queries, heads, size), np.float32).swapaxes(1, 2)
    else:
        q = inputs.uniform((shape.batch, heads, shape.queries, size), np.float32)
    k = inputs.cached(heads_kv, size, kind.types[0])
    # With DeepSeek's latent attention the values are the first channels of the keys.
    v = k[..., :size_v] if size == 576 else inputs.cached(heads_kv, size_v, kind.types[1])
    mask = inputs.mask() if kind.mask else None
    if kind.bias:
        mask = slopes(heads)[:, None, None] * mask.astype(np.float32)
    call = Call(q, k, v, softcap=CAP if kind.cap else 0.0, mask=mask)
    if kind.sinks:
        sinks = 10 * inputs.uniform((heads,), np.float32)
        call = dataclasses.replace(call, sinks=sinks)
    if kind.alibi:
        offset = shape.keys - shape.queries
        call = dataclasses.replace(call, causal=True, offset=offset, slopes=slopes(heads))
    return call


def run(asked: argparse.Namespace) -> dict[str, Any]:
    rows: list[Row] = []
    skipped: Counter[str] = Counter()
    grid = ((x, list(shapes(x, n, asked.whole))) for n, x in enumerate(kinds()))
    for kind, each in itertools.chain(grid, beside()):
        if not re.search(asked.only, kind.name):
            continue
        if kind.types[0] in QUANTISED:
            count = len(list(shapes(kind, 0, True)))
            skipped[f"with K and V in {kind.types[0]}, which qattn has no word for"] += count
            continue
        row = Row(kind.name)
        for shape in each:
            row.add(made(kind, shape), label=shape.name)
        rows.append(row)
    if not asked.only:
        skipped["with K and V in two types of which one is quantised"] = MIXED
    settings = {"llama.cpp": LLAMA_CPP, "ggml": float(f"{math.sqrt(NMSE):.2g}")}
    return record(rows, dict(skipped), settings | {"whole": asked.whole}, asked.commit)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--whole", action="store_true", help="the whole grid, four times as long")


if __name__ == "__main__":
    sys.exit(main(__doc__, run, arguments))
