"""Attention with its output projection in one call, beside two steps, on CPUs."""

import json
import os
import pathlib

from . import provenance, timing
from .record import RESULTS, markdown

HEADS, RECIPE = 8, "int8_full"
DIMS, TOKENS = (64, 128), (1, 256, 512, 1024, 2048)
CACHED = 1024  # keys of a call with one query
FORMATS = ("float32", "bfloat16")
NAMES = ("one call", "two steps", "attention")


def add_arguments(parser):
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=3, help="for each shape")
    parser.add_argument("--rounds", type=int, default=201, help="at most")
    parser.add_argument("--commit", help="where the tree is no git checkout")
    parser.add_argument("-o", "--output", required=True, help="the record")


def measure(torch, args, dtype, dim, tokens):
    import qattn

    made = getattr(torch, dtype)
    keys = CACHED if tokens == 1 else tokens
    q, k, v = (torch.randn(1, n, HEADS, dim).to(made) for n in (tokens, keys, keys))
    width = HEADS * dim
    weight = (torch.randn(width, width) / width**0.5).to(made)
    bias = torch.randn(width).to(made)
    options = {"recipe": RECIPE, "threads": args.threads}
    projection = {"projection": weight, "bias": bias}

    def two_steps():
        rows = qattn.attention(q, k, v, **options)
        return torch.nn.functional.linear(rows.flatten(-2), weight, bias)

    calls = {
        "one call": lambda: qattn.attention(q, k, v, **options, **projection),
        "two steps": two_steps,
        "attention": lambda: qattn.attention(q, k, v, **options),
    }
    times = timing.interleaved(timing.WallClock(), calls, args.seconds, args.rounds)
    rows = list(range(0, tokens, max(tokens // 16, 1)))
    ref = torch.as_tensor(qattn.reference_attention(q, k, v, rows=rows, **projection))[:, rows]
    errors = {
        name: float((calls[name]()[:, rows].double() - ref).norm() / ref.norm())
        for name in NAMES[:2]
    }
    found = {name: timing.summary(x) for name, x in times.items()}
    return {"dtype": dtype, "dim": dim, "tokens": tokens, "times": found, "errors": errors}


def run(args):
    import torch

    import qattn

    timing.check_limits(args.seconds, args.rounds)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    load = os.getloadavg()[0]
    facts = provenance.common(args.commit) | {
        "cpu": provenance.cpu_model(),
        "isa": qattn.cpu_isa(),
        "threads": args.threads,
        "torch": torch.__version__,
        "load_before": load,
    }
    runs = [
        measure(torch, args, dtype, dim, tokens)
        for dtype in FORMATS
        for dim in DIMS
        for tokens in TOKENS
    ]
    path = pathlib.Path(args.output)
    path.write_text(json.dumps({"provenance": facts, "runs": runs}, indent=1) + "\n")
    print("\n".join(table(runs)))
    return 0


def table(runs):
    rows = []
    for one in runs:
        ms = {name: x["median_ms"] for name, x in one["times"].items()}
        error = one["errors"]
        rows.append([
            f"{one['dtype']}, D {one['dim']}, {one['tokens']}",
            *(f"{ms[name]:.2f} ms" for name in NAMES),
            f"{ms['two steps'] / ms['one call']:.2f}x",
            f"{error['one call']:.5f}, {error['two steps']:.5f}",
        ])  # fmt: skip
    return markdown(["", *NAMES, "one call is", "errors"], rows)


def section():
    """Lines of docs/tables."""
    lines = []
    for path in sorted(RESULTS.glob("projection-*.json")):
        record = json.loads(path.read_text())
        p = record["provenance"]
        lines += [
            "",
            f"## Output projection, {p['cpu']}, {p['threads']} threads",
            "",
            f"{p['date']}, commit {p['commit']}, torch {p['torch']}, `{path.name}` "
            f"(`bench/bench.py projection`). `{RECIPE}`, {HEADS} heads, as many "
            f"features as channels, queries as many as keys (of one query: {CACHED} keys), on "
            f"{p['isa']}. Two steps: attention and torch's linear. Errors: NRMSE against "
            "float64 of both, of all or 16 rows.",
            "",
            *table(record["runs"]),
        ]
    return lines
