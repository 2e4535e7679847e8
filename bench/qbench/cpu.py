"""Attention on a CPU beside torch's: short and long calls, decode, masks and the smallest call.

--beside names a Python file with other implementations (candidates.Peers); what they refuse has no
time. Such files are not part of the repository: they link what they measure.
"""

import contextlib
import dataclasses
import json
import os
import pathlib

from . import provenance, timing
from .record import RESULTS, markdown

SOFTCAP = 30.0
RECIPES = ("own", "int8_full", "auto")  #: own: products in the tensors' format
RESTLESS = 0.15  #: interquartile range over median, from which a case's numbers are about so much
COLD_FROM = 1 << 22  #: bytes of K and V that a call with few queries finds in no cache


@dataclasses.dataclass(frozen=True)
class Case:
    heads_q: int
    heads_kv: int
    queries: int
    keys: int
    dim: int
    io: str
    causal: bool = False
    layout: str = "bshd"

    @property
    def name(self):
        heads = f"{self.heads_q}/{self.heads_kv}" if self.heads_q != self.heads_kv else self.heads_q
        return (
            f"{heads} heads, {self.queries} of {self.keys}, D {self.dim}, {self.io}, {self.layout}"
            + (", causal" if self.causal else "")
        )


def prefill(io, lengths, layout="bshd"):
    return [
        Case(8, 8, s, s, dim, io, causal, layout)
        for s in lengths for dim in (64, 128) for causal in (False, True)
    ]  # fmt: skip


def decode(io, dim, lengths, layout):
    return [Case(32, 8, 1, keys, dim, io, False, layout) for keys in lengths]


CASES = [
    *prefill("bf16", (256, 512, 1024)), *prefill("bf16", (2048, 4096))[::3],
    *prefill("bf16", (1024,), "bhsd")[2:], *prefill("f32", (256, 512, 1024))[::2],
    *prefill("f32", (2048,), "bhsd")[2:], *prefill("f16", (1024,))[2:],
    *decode("bf16", 128, (1024, 4096, 32768), "bshd"), *decode("bf16", 64, (4096,), "bhsd"),
    *decode("f32", 128, (1024, 4096, 32768), "bhsd"), *decode("f16", 128, (4096, 32768), "bshd"),
    Case(32, 8, 2, 4096, 128, "bf16"), Case(32, 8, 16, 8192, 128, "bf16"),
    Case(8, 8, 799, 3, 64, "f32"),
]  # fmt: skip
#: what a call has besides, of 8 heads, 512 queries and keys, D 64
PATHS = ("plain", "softcap", "half masked", "float bias")
PATH_RECIPES = (("f32", "f32"), ("bf16", "bf16"), ("int8_full", "f32"), ("int8_full", "bf16"))


def add_arguments(parser):
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=120, help="for all")
    parser.add_argument("--rounds", type=int, default=101, help="at most, a case")
    parser.add_argument("--only", default="", help="cases whose name has this text")
    parser.add_argument("--commit", help="where the tree is no git checkout")
    parser.add_argument("--beside", help="Python file with other implementations")
    parser.add_argument("-o", "--output", required=True, help="the record")


def peer_calls(peers, tensors, causal):
    """{name: call} of other implementations for tensors (B, S, H, D), but for those that refuse."""
    calls = {}
    for name in peers.names:
        with contextlib.suppress(*peers.REFUSALS):
            calls[name] = peers.module.make(name, *tensors, causal)[0]["e2e"]
    return calls


def torch_calls(torch, case, q, k, v):
    """torch's attention on contiguous tensors, heads first, and where few queries share K and V
    with their group's heads as rows."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    if case.layout == "bshd":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    gqa = case.heads_q != case.heads_kv
    calls = {"torch": lambda: sdpa(q, k, v, is_causal=case.causal, enable_gqa=gqa)}
    if gqa and case.queries == 1:
        packed = q.reshape(1, case.heads_kv, case.heads_q // case.heads_kv, case.dim)
        calls["torch packed"] = lambda: sdpa(packed, k, v)
    return calls


def measure(torch, qattn, clock, case, seconds, args, peers):
    made = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[case.io]

    def rows(tokens, heads):
        between = (heads, tokens) if case.layout == "bhsd" else (tokens, heads)
        return torch.randn(1, *between, case.dim).to(made)

    q = rows(case.queries, case.heads_q)
    k, v = (rows(case.keys, case.heads_kv) for _ in range(2))

    def call(recipe):
        recipe = case.io if recipe == "own" else recipe
        options = {"recipe": recipe, "causal": case.causal, "layout": case.layout}
        return lambda: qattn.attention(q, k, v, threads=args.threads, **options)

    calls = {name: call(name) for name in RECIPES} | torch_calls(torch, case, q, k, v)
    tensors = [x.transpose(1, 2) if case.layout == "bhsd" else x for x in (q, k, v)]
    calls |= peer_calls(peers, tensors, case.causal)
    times = timing.interleaved(clock, calls, seconds, args.rounds)
    return {"case": dataclasses.asdict(case), "name": case.name,
            "times": {name: timing.summary(x) for name, x in times.items()}}  # fmt: skip


def measure_paths(torch, qattn, clock, seconds, args):
    tokens, found = 512, []
    half = torch.rand(1, 1, tokens, tokens) < 0.5
    half[..., 0] = True
    for recipe, io in PATH_RECIPES:
        made = {"bf16": torch.bfloat16, "f32": torch.float32}[io]
        q, k, v = (torch.randn(1, tokens, 8, 64).to(made) for _ in range(3))
        bias = torch.randn(1, 1, tokens, tokens).to(made)
        options = {"plain": {}, "softcap": {"softcap": SOFTCAP},
                   "half masked": {"mask": half}, "float bias": {"mask": bias}}  # fmt: skip

        def call(more, recipe=recipe, qkv=(q, k, v)):
            return lambda: qattn.attention(*qkv, recipe=recipe, threads=args.threads, **more)

        calls = {name: call(more) for name, more in options.items()}
        times = timing.interleaved(clock, calls, seconds / len(PATH_RECIPES), args.rounds)
        found.append({"recipe": recipe, "io": io,
                      "times": {name: timing.summary(x) for name, x in times.items()}})  # fmt: skip
    return found


def measure_small(torch, qattn, clock, seconds):
    """16 queries and keys of one head of 64 channels."""
    import qattn.torch

    x = torch.randn(1, 1, 16, 64)
    host = x.transpose(1, 2).contiguous().numpy()
    sdpa = torch.nn.functional.scaled_dot_product_attention
    calls = {
        "attention() on numpy": lambda: qattn.attention(host, host, host),
        "qattn.torch.sdpa": lambda: qattn.torch.sdpa(x, x, x),
        "torch": lambda: sdpa(x, x, x),
    }
    times = timing.interleaved(clock, calls, seconds, 20001)
    return {name: timing.summary(t) for name, t in times.items()}


def run(args):
    import torch

    import qattn

    from .candidates import Peers

    timing.check_limits(args.seconds, args.rounds)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    facts = provenance.common(args.commit) | {
        "cpu": provenance.cpu_model(),
        "isa": qattn.cpu_isa(),
        "threads": args.threads,
        "torch": torch.__version__,
        "load_before": os.getloadavg()[0],
    }
    peers = Peers(args.beside)
    if peers.names:
        facts["beside"] = peers.versions
    warm, cold = timing.WallClock(), timing.ColdClock(torch)
    cases = [case for case in CASES if args.only in case.name]
    seconds = args.seconds * 0.9 / len(cases)
    runs = []
    for case in cases:
        bytes_kv = 2 * case.heads_kv * case.keys * case.dim * (4 if case.io == "f32" else 2)
        few = case.queries * 16 <= case.keys and bytes_kv >= COLD_FROM
        runs.append(measure(torch, qattn, cold if few else warm, case, seconds, args, peers))
        print(*table(runs[-1:])[2:], flush=True)
    paths = measure_paths(torch, qattn, warm, args.seconds * 0.08, args)
    small = measure_small(torch, qattn, warm, args.seconds * 0.02)
    record = {"provenance": facts, "runs": runs, "paths": paths, "small": small}
    pathlib.Path(args.output).write_text(json.dumps(record, indent=1) + "\n")
    print("\n".join([*path_table(paths), *small_table(small)]))
    return 0


def peers_of(runs):
    known = (*RECIPES, "torch", "torch packed")
    return list(dict.fromkeys(name for one in runs for name in one["times"] if name not in known))


def table(runs):
    """Of each case torch's time and how many times as fast qattn and others are."""
    rows, others = [], peers_of(runs)
    for one in runs:
        ms = {name: x["median_ms"] for name, x in one["times"].items()}
        loud = max(x["spread"] for x in one["times"].values()) > RESTLESS
        best = min(x for name, x in ms.items() if name.startswith("torch"))
        about = "about " if loud else ""
        speeds = (f"{about}{best / ms[r]:.2f}x" if r in ms else "" for r in (*RECIPES, *others))
        rows.append([one["name"], f"{about}{best:.3g} ms", *speeds])
    return markdown(["", "torch", "own format", "int8_full", "auto", *others], rows)


def path_table(paths):
    rows = []
    for one in paths:
        ms = {name: x["median_ms"] for name, x in one["times"].items()}
        others = (f"{ms[name] / ms['plain']:.2f}" for name in PATHS[1:])
        rows.append([f"{one['recipe']} from {one['io']}", f"{ms['plain']:.3g} ms", *others])
    return markdown(["", *PATHS], rows)


def small_table(small):
    return markdown([*small], [[f"{x['median_ms'] * 1e3:.1f} us" for x in small.values()]])


def section():
    """Lines of docs/tables."""
    lines = []
    for path in sorted(RESULTS.glob("cpu-shapes-*.json")):
        record = json.loads(path.read_text())
        p = record["provenance"]
        beside = f" Beside them, times as fast as torch: {p['beside']}." if "beside" in p else ""
        lines += [
            "",
            f"## Beside torch, {p['cpu']}, {p['isa']}, threads: {p['threads']}",
            "",
            f"{p['date']}, commit {p['commit']}, torch {p['torch']}, `{path.name}` "
            "(`bench/bench.py cpu`). Torch's time, on contiguous tensors with heads first, and how "
            "many times as fast attention() is: with products in the tensors' own format, with "
            "`int8_full` and with `auto`. Calls of few queries find K and V in no cache; of one "
            "query torch's time is the better of its own and of one with a group's heads as rows. "
            '"about": the quarters of a case\'s times lie more than 15 % apart.' + beside,
            "",
            *table(record["runs"]),
            "",
            "Times the plain call, 8 heads, 512 queries and keys, D 64:",
            "",
            *path_table(record["paths"]),
            "",
            "The smallest call: 16 queries and keys of one head, D 64:",
            "",
            *small_table(record["small"]),
        ]
    return lines
