"""Decode over uniform 8-bit caches in pages, as serving libraries lay them out, on a GPU.

attention() over codes of K and V in one allocation (2, pages, page size, heads, D), captured as a
graph, beside torch's attention over the same tokens in bf16, dense. Calls take turns, with L2
emptied before each. Pages lie in random order; results are compared with float64 over the codes.
"""

import dataclasses

from . import timing
from .decode import BACKENDS, clocks_text, graph_of, record_shapes
from .record import RESULTS, markdown, measured_on, tool_record

NAME = "paged-decode-h200.json"
HEADS_Q, HEADS_KV, DIM = 32, 8, 128
#: format of the codes, granularity of their scales, recipe
FORMATS = {
    "s8": ("per_token", "int8_full"),
    "e4m3": ("per_tensor", "fp8"),
}
WRONG = {"s8": 3e-2, "e4m3": 8e-2}  # NRMSE of rounding Q and P, at many keys


def add_arguments(parser):
    parser.add_argument("--shapes", default="16:8192,16:32768,1:131072", help="B:S,...")
    parser.add_argument("--pages", default="16,64", help="tokens of a page")
    parser.add_argument("--seconds", type=float, default=4, help="for each shape")
    parser.add_argument("--rounds", type=int, default=60, help="at most")
    parser.add_argument("--commit", help="where the tree is no git checkout")
    parser.add_argument("-o", "--output", default=str(RESULTS / NAME))


@dataclasses.dataclass
class Cache:
    """K and V of `batch` sequences of `tokens` in pages of `page`."""

    k: object
    v: object
    table: object
    used: object

    @property
    def bytes(self):
        return sum(x.codes.nbytes + x.scale.nbytes for x in (self.k, self.v))

    def exact(self, torch, q, b, head):
        """Attention of query head `head` of sequence `b` in float64 over the decoded codes."""
        rows = []
        for x in (self.k, self.v):
            at, kv = self.table[b].long(), head * HEADS_KV // HEADS_Q
            codes = x.codes.view(torch.uint8)[at][:, :, kv]
            number = torch.int8 if x.format == "s8" else torch.float8_e4m3fn
            codes = codes.contiguous().view(number).double()
            scale = x.scale[at][:, kv, :, None] if x.scale.ndim == 3 else x.scale
            rows.append((codes * scale.double()).flatten(0, 1)[: int(self.used[b])])
        k, v = rows
        s = k @ q[b, 0, head].double() / DIM**0.5
        return s.softmax(0) @ v


def filled(torch, qattn, form, batch, tokens, page):
    granularity, _ = FORMATS[form]
    each = -(-tokens // page)
    pages = batch * each
    coded, codes = [], None
    for i, role in enumerate("kv"):
        x = torch.randn(pages, page, HEADS_KV, DIM, device="cuda", dtype=torch.bfloat16)
        one = qattn.quantize(x, role=role, format=form, granularity=granularity)
        if codes is None:
            codes = torch.empty((2, *one.codes.shape), dtype=one.codes.dtype, device="cuda")
        codes[i] = one.codes
        coded.append(dataclasses.replace(one, codes=codes[i]))
    table = torch.randperm(pages, device="cuda").int().view(batch, each)
    used = torch.full((batch,), tokens, device="cuda", dtype=torch.int32)
    return Cache(*coded, table, used)


def caller(torch, qattn, cache, q, form):
    out = torch.empty_like(q)
    recipe = FORMATS[form][1]
    options = {"page_table": cache.table, "seqused_k": cache.used, "recipe": recipe, "out": out}

    def call():
        qattn.attention(q, cache.k, cache.v, **options)
        return out

    return call


def error_of(torch, cache, q, out, form):
    """NRMSE of some rows; raises ValueError where it is not attention."""
    if fault := errors.nan_fault(out):
        raise ValueError(f"{form}: {fault}")
    places = [(0, 0), (len(q) - 1, HEADS_Q - 1), (len(q) // 2, HEADS_Q // 2)]
    want = torch.stack([cache.exact(torch, q, b, h) for b, h in places])
    got = torch.stack([out[b, 0, h].double() for b, h in places])
    error = float((got - want).norm() / want.norm())
    if not error <= WRONG[form]:
        raise ValueError(f"{form}: NRMSE {error:.2e} against float64")
    return error


def replay(torch, call):
    """The call as a graph, which holds none of its tensors: the result does."""
    graph = graph_of(torch, call)

    def again():
        graph.replay()
        return call

    return again


def torch_calls(torch, batch, tokens):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def rows(heads, length):
        return torch.randn(batch, heads, length, DIM, device="cuda", dtype=torch.bfloat16)

    q, k, v = rows(HEADS_Q, 1), rows(HEADS_KV, tokens), rows(HEADS_KV, tokens)
    attend = torch.nn.functional.scaled_dot_product_attention
    calls = {}
    for name, backend in BACKENDS.items():
        try:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                calls[name] = replay(torch, lambda: attend(q, k, v, enable_gqa=True))
        except RuntimeError as error:
            print(f"torch {name}: {str(error).strip().splitlines()[0]}")
    return calls


def read_call(torch):
    """A plain read of a gigabyte, in a graph as the others are."""
    x = torch.ones(1 << 28, dtype=torch.float32, device="cuda")
    return replay(torch, lambda: torch.amax(x)), x.nbytes


def measure(torch, qattn, args, batch, tokens):
    q = torch.randn(batch, 1, HEADS_Q, DIM, device="cuda", dtype=torch.bfloat16)
    calls = {("torch", name): call for name, call in torch_calls(torch, batch, tokens).items()}
    rows = {}
    for form in FORMATS:
        for page in (int(x) for x in args.pages.split(",")):
            cache = filled(torch, qattn, form, batch, tokens, page)
            call = caller(torch, qattn, cache, q, form)
            error = error_of(torch, cache, q, call(), form)
            options = {"page_table": cache.table, "seqused_k": cache.used}
            plan = qattn.explain(q, cache.k, cache.v, recipe=FORMATS[form][1], **options)
            rows[form, page] = {
                "cache": form,
                "page": page,
                "bytes": cache.bytes,
                "nrmse": error,
                "kernel": plan.splitlines()[0],
            }
            calls[form, page] = replay(torch, call)
    read, bytes_read = read_call(torch)
    calls["read", 0] = read
    clock = timing.CudaClock(torch)
    times = timing.interleaved(clock, calls, args.seconds, args.rounds)
    found = {key: timing.summary(x) for key, x in times.items()}
    for key, row in rows.items():
        row |= found[key]
    return {
        "batch": batch,
        "tokens": tokens,
        "read_gb_per_s": bytes_read / found["read", 0]["median_ms"] * 1e-6,
        "torch": {name: x for (of, name), x in found.items() if of == "torch"},
        "rows": list(rows.values()),
    }


def run(args):
    import qattn
    import torch

    timing.check_limits(args.seconds, args.rounds)
    torch.manual_seed(1)

    def measure_one(batch, tokens):
        return measure(torch, qattn, args, batch, tokens)

    runs = record_shapes(torch, args, measure_one)
    print("\n".join(tables(runs)))
    return 0


def tables(runs):
    lines = []
    for one in runs:
        beside = {name: x["median_ms"] * 1e3 for name, x in one["torch"].items()}
        told = ", ".join(f"{name} {us:.0f} us" for name, us in beside.items())
        lines += [
            "",
            f"B {one['batch']}, {one['tokens']} tokens, heads {HEADS_Q}/{HEADS_KV}, D {DIM}; "
            f"torch's maximum of floats reads {one['read_gb_per_s']:.0f} GB/s; bf16: {told}:",
            "",
        ]
        rows = []
        for row in one["rows"]:
            us = row["median_ms"] * 1e3
            rate = row["bytes"] / us * 1e-3
            share = f"{100 * rate / one['read_gb_per_s']:.0f} %"
            ratios = [f"{x / us:.2f}x" for x in beside.values()]
            kind = f"{row['cache']}, pages of {row['page']}"
            rows.append([kind, f"{us:.0f} us", share, *ratios, f"{row['nrmse']:.1e}"])
        head = ["", "a call", "of the read", *(f"beside {b}" for b in beside), "NRMSE"]
        lines += markdown(head, rows)
    return lines


def section():
    """Lines of docs/tables."""
    if (found := tool_record(NAME)) is None:
        return []
    record, p = found
    intro = [
        "",
        "## Decode over 8-bit caches of other libraries",
        "",
        f"{measured_on(p)}, torch {p['torch']}, "
        f"`{NAME}` (`bench/bench.py paged`): one query a sequence, K and V as codes in pages that "
        "lie in random order, s8 with a scale a token and head (`int8_full`), e4m3 with one in all "
        "(`fp8`); bf16 in and out, Q quantised in the call, which is captured as a graph; torch's "
        "K and V are dense. NRMSE: against float64 over the codes, of a few rows."
        + clocks_text(p),
    ]
    return intro + tables(record["runs"])
