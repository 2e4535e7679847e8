"""The shapes that are measured, in groups: what models ask of attention."""

import dataclasses

TOKENS = 16384  # of a batch, in the sweeps over the sequence's length


@dataclasses.dataclass(frozen=True)
class Shape:
    group: str
    batch: int
    heads_q: int
    heads_kv: int
    queries: int
    keys: int
    dim: int
    causal: bool
    dim_v: int = 0  #: V's and the output's head dimension; 0: dim

    @property
    def dims(self):
        return f"{self.dim}/{self.dim_v}" if self.dim_v else str(self.dim)

    @property
    def channels_v(self):
        return self.dim_v or self.dim

    @property
    def name(self):
        return (
            f"{self.group} B{self.batch} H{self.heads_q}/{self.heads_kv} Q{self.queries} "
            f"K{self.keys} D{self.dims} {'causal' if self.causal else 'full'}"
        )

    def flop(self):
        """Of both products, two for a multiply-add; pairs that causality hides do not count.

        A square causal shape counts as half of the full one (docs/NUMERICS.md, "Metrics").
        """
        pairs = self.queries * self.keys - (self.queries**2 / 2 if self.causal else 0)
        return 2 * self.batch * self.heads_q * (self.dim + self.channels_v) * pairs

    def elements_kv(self):
        """Of K and V together."""
        return self.batch * self.heads_kv * self.keys * (self.dim + self.channels_v)


# How tables call them: a table has all lengths of one kind.


def count(x):
    return f"{x // 1024}K" if x % 1024 == 0 else str(x)


def column_name(shape):
    length = (
        f"S {shape.keys}"
        if shape.queries == shape.keys
        else f"{count(shape.queries)} of {count(shape.keys)}"
    )
    return length if shape.group == "mha" else f"B {shape.batch}, {length}"


def table_name(shape):
    heads = f"{shape.heads_q} heads"
    if shape.heads_q != shape.heads_kv:
        heads = f"{shape.heads_q} query heads over {shape.heads_kv}"
    return f"D {shape.dims}, {'causal' if shape.causal else 'full'}, {heads}"


def sweep(group, heads_q, heads_kv, dim, lengths, dim_v=0):
    return [
        Shape(group, max(1, TOKENS // s), heads_q, heads_kv, s, s, dim, causal, dim_v)
        for s in lengths
        for causal in (False, True)
    ]


def chunk(queries, keys):
    """The last tokens of a long prompt: prefill in pieces."""
    return Shape("llm", 1, 32, 8, queries, keys, 128, True)


GROUPS = {
    "mha": [
        s for dim in (128, 64) for s in sweep("mha", 32, 32, dim, [2**n for n in range(10, 16)])
    ],
    "gqa": sweep("gqa", 32, 8, 128, [2**n for n in range(10, 16)])
    + sweep("gqa", 64, 8, 128, [4096, 16384]),
    "llm": [chunk(s, s) for s in (4096, 16384, 65536)] + [chunk(512, 16384), chunk(2048, 32768)],
    # Tokens of CogVideoX-5B, and of Wan 2.1 at 480p (1.3B) and 720p (14B).
    "video": [
        Shape("video", 1, heads, heads, s, s, dim, False)
        for s, heads, dim in ((17776, 48, 64), (32760, 12, 128), (75600, 40, 128))
    ],
    # Heads wider than most.
    "wide": [
        Shape("wide", batch, 16, 16, s, s, 256, causal)
        for batch, s in ((16, 1024), (4, 4096), (1, 16384))
        for causal in (False, True)
    ],
    # Those between the powers of two. 192/128 is DeepSeek's prefill.
    "dims": [
        s
        for dim, dim_v in ((96, 0), (192, 0), (192, 128))
        for s in sweep("dims", 16, 16, dim, [4096, 16384], dim_v)
    ],
    "decode": [
        Shape("decode", batch, 32, 8, 1, keys, 128, False)
        for batch, keys in ((16, 8192), (16, 32768), (1, 8192), (1, 32768), (1, 131072))
    ],
    # Where plans pack heads and split keys.
    "few": [
        Shape("few", batch, heads, kv, queries, keys, 128, queries > 1)
        for heads, kv in ((32, 8), (64, 8), (32, 32))
        for batch, queries, keys in (
            (1, 1, 512), (1, 1, 1024), (1, 1, 4096), (1, 1, 65536), (4, 1, 4096), (4, 1, 16384),
            (16, 1, 2048), (16, 1, 16384), (64, 1, 4096), (1, 4, 8192), (4, 16, 8192),
            (1, 64, 16384), (1, 128, 16384), (1, 512, 16384),
        )
    ],
    # What two cores do in a second.
    "cpu": [Shape("cpu", 1, 8, 8, 4096, 4096, 128, causal) for causal in (False, True)]
    + [Shape("cpu", 1, 32, 8, 1, keys, 128, False) for keys in (4096, 32768)],
}
DEFAULT = {"cuda": "mha,gqa,llm,video,wide,dims,decode", "cpu": "cpu", "emulated": ""}


def parse_custom(text):
    """A shape from "B,Hq,Hkv,Sq,Sk,D" or "B,Hq,Hkv,Sq,Sk,D,Dv", or "...,causal"."""
    parts = text.split(",")
    causal = parts[-1] == "causal"
    sizes = parts[:-1] if causal else parts
    if len(sizes) not in (6, 7) or not all(x.isdecimal() and int(x) > 0 for x in sizes):
        raise ValueError(f"shape {text!r}: not B,Hq,Hkv,Sq,Sk,D[,Dv] of positive integers[,causal]")
    shape = Shape("custom", *map(int, sizes[:6]), causal, *map(int, sizes[6:]))
    if shape.heads_q % shape.heads_kv:
        raise ValueError(f"shape {text!r}: Hq is no multiple of Hkv")
    if causal and shape.queries > shape.keys:
        raise ValueError(f"shape {text!r}: causal with more queries than keys has empty rows")
    return shape


def select(groups, only=(), custom=()):
    """The shapes of the groups whose names contain every text of `only`, then the custom ones."""
    unknown = [g for g in groups if g not in GROUPS]
    if unknown:
        raise ValueError(f"shapes: {unknown[0]!r} is not one of {', '.join(GROUPS)}")
    chosen = [s for g in groups for s in GROUPS[g] if all(text in s.name for text in only)]
    chosen += [parse_custom(text) for text in custom]
    if not chosen:
        raise ValueError("no shape is selected")
    return chosen
