"""Decode over a KV cache on a CPU beside torch's attention over the same tokens in bf16.

One query a sequence. All caches and torch take turns, each with cold caches of the CPU; results are
compared with float64 attention over what each cache holds. The budget's cache is told importances
of one random draw: how many bytes it reads does not depend on them, how they lie in tiers does.
--beside: as of `bench.py cpu`.
"""

import json
import os
import pathlib

from . import provenance, timing
from .cpu import peer_calls
from .record import RESULTS, markdown

HEADS_Q, HEADS_KV, DIM = 32, 8, 128
CACHES = {
    "8 bits": {"tiers": [8]},
    "4 bits": {"tiers": [4]},
    "3 bits": {"tiers": [3]},
    "2 bits": {"tiers": [2]},
    "3.0 bits in all": {"average_bits": 3.0},
}
#: calls of a cache: what decode() is asked for besides the output
CALLS = {"decode": {}, "mass": {"return_mass": True}, "debias": {"debias": True}}
WRONG = 2e-3  # NRMSE of bf16 results against float64 over the decoded contents


def add_arguments(parser):
    parser.add_argument("--tokens", default="4096,32768", help="lengths, e.g. 4096,32768")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=30, help="for each length")
    parser.add_argument("--rounds", type=int, default=100, help="at most")
    parser.add_argument("--commit", help="where the tree is no git checkout")
    parser.add_argument("--beside", help="Python file with other implementations")
    parser.add_argument("-o", "--output", required=True, help="the record")


def empty(qattn, options, tokens, threads):
    """Raises qattn.InvalidArgument for a budget that does not hold at this length."""
    if "average_bits" in options:
        options = options | {"budget_from": tokens}
    return qattn.KvCache(
        kv_heads=HEADS_KV, head_dim=DIM, window_dtype="bfloat16", threads=threads, **options
    )


def fill(torch, cache, options, k, v):
    """Appends K and V, (1, S, Hkv, D), to a sequence of the cache; returns its number."""
    told = None
    if "average_bits" in options:
        draw = torch.Generator().manual_seed(2)
        told = torch.randn(1, HEADS_KV, -(-k.shape[1] // 16), generator=draw).mul(1.5).exp()
    sequence = cache.add_sequence()
    cache.append(0, sequence, k, v, importance=told)
    return sequence


def error_of(torch, cache, sequence, q, out):
    """NRMSE of one query's output, (1, 1, Hq, D), against float64 over the decoded contents."""
    from . import errors

    k, v, _ = (torch.from_numpy(x) for x in cache.read(sequence))
    group, row = HEADS_Q // HEADS_KV, torch.zeros(1, dtype=torch.long)
    want = [
        errors.exact_rows(q[0, :, h], k[h // group], v[h // group], row, False)[0]
        for h in range(HEADS_Q)
    ]
    return errors.difference(out[0, 0], torch.stack(want))


def checked(torch, cache, sequence, q):
    """What decode() makes of the query, and its error; the same with mass, finite with debias."""
    out = cache.decode(q, 0, sequence)
    with_mass, _ = cache.decode(q, 0, sequence, return_mass=True)
    error = error_of(torch, cache, sequence, q, out)
    same = torch.equal(out, with_mass)
    finite = all(x.isfinite().all() for x in (out, cache.decode(q, 0, sequence, debias=True)))
    if not (error <= WRONG and same and finite):
        raise ValueError(f"decode: NRMSE {error:.2e}, with mass equal: {same}, finite: {finite}")
    return error


def torch_calls(torch, q, k, v):
    """Attention of one query, as asked for and with a group's queries as rows of one head, which
    needs no K and V of every query head."""
    heads = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    packed = q.reshape(1, HEADS_KV, HEADS_Q // HEADS_KV, DIM)
    attend = torch.nn.functional.scaled_dot_product_attention
    calls = {
        "enable_gqa": lambda: attend(*heads, enable_gqa=True),
        "packed": lambda: attend(packed, *heads[1:]),
    }
    want, got = (call().flatten().double() for call in calls.values())
    if not (want - got).norm() <= 2 * WRONG * want.norm():
        raise ValueError("torch: packed queries give another result")
    return calls


def measure(qattn, torch, args, tokens, peers):
    """What a record has of one length."""
    draw = torch.Generator().manual_seed(1)

    def rows(*shape):
        return torch.randn(*shape, generator=draw).bfloat16()

    q = rows(1, 1, HEADS_Q, DIM)
    k, v = (rows(1, tokens, HEADS_KV, DIM) for _ in range(2))
    calls = {("torch", name): call for name, call in torch_calls(torch, q, k, v).items()}
    others = peer_calls(peers, (q, k, v), False)
    calls |= {("beside", name): call for name, call in others.items()}
    found = {}
    for name, options in CACHES.items():
        try:
            cache = empty(qattn, options, tokens, args.threads)
        except qattn.InvalidArgument as error:
            found[name] = {"cache": name, "refused": str(error)}
            continue
        sequence = fill(torch, cache, options, k, v)
        error, usage = checked(torch, cache, sequence, q), cache.usage(sequence, 0)
        facts = {"bytes": usage.bytes, "average_bits": usage.average_bits, "nrmse": error}
        found[name] = {"cache": name, **facts}
        for call, asked in CALLS.items():
            calls[name, call] = lambda c=cache, s=sequence, a=asked: c.decode(q, 0, s, **a)
    times = timing.interleaved(timing.ColdClock(torch), calls, args.seconds, args.rounds)
    for (name, call), values in times.items():
        if name not in ("torch", "beside"):
            found[name][call] = timing.summary(values)
    return {
        "tokens": tokens,
        "torch": {name: timing.summary(x) for (of, name), x in times.items() if of == "torch"},
        "beside": {name: timing.summary(x) for (of, name), x in times.items() if of == "beside"},
        "rows": list(found.values()),
    }


def run(args):
    import torch

    from .candidates import Cpu, Peers

    lengths = [int(x) for x in args.tokens.split(",")]
    if min(lengths) < 1:
        raise ValueError(f"tokens: {args.tokens}, but lengths are from 1")
    timing.check_limits(args.seconds, args.rounds)
    device = Cpu(args.threads)
    facts = provenance.common(args.commit) | device.facts()
    facts |= {"rounds_at_most": args.rounds, "seconds_at_most": args.seconds}
    peers = Peers(args.beside)
    if peers.names:
        facts["beside"] = peers.versions
    runs = [measure(device.qattn, torch, args, tokens, peers) for tokens in lengths]
    facts |= device.facts_at_the_end()
    record = {"provenance": facts, "heads_q": HEADS_Q, "heads_kv": HEADS_KV, "d": DIM, "runs": runs}
    pathlib.Path(args.output).write_text(json.dumps(record, indent=1) + "\n")
    print("\n".join(tables(record)))
    return 0


def tables(record):
    lines = []
    for one in record["runs"]:
        ms_of = {name: {of: x["median_ms"] for of, x in one.get(name, {}).items()}
                 for name in ("torch", "beside")}  # fmt: skip
        beside = ms_of["torch"] | ms_of["beside"]
        told = [
            ", ".join(f"{ms:.3g} ms ({name})" for name, ms in x.items()) for x in ms_of.values()
        ]
        others = f"; others: {told[1]}" if told[1] else ""
        lines += ["", f"{one['tokens']} tokens; torch bf16: {told[0]}{others}:", ""]
        rows = []
        for row in one["rows"]:
            if "refused" in row:
                rows.append([row["cache"], f"refused: {row['refused']}", *[""] * (4 + len(beside))])
                continue
            ms = row["decode"]["median_ms"]
            cost = {call: f"{100 * (row[call]['median_ms'] / ms - 1):+.1f} %" for call in CALLS}
            rows.append(
                [
                    row["cache"],
                    f"{row['average_bits']:.2f}",
                    f"{ms:.3g} ms",
                    *(f"{x / ms:.1f}x" for x in beside.values()),
                    f"{row['bytes'] / ms / 1e6:.1f} GB/s",
                    cost["mass"],
                    cost["debias"],
                ]
            )
        head = ["", "bits in all", "a call", *(f"beside {name}" for name in beside), "reads"]
        lines += markdown([*head, "mass costs", "debias costs"], rows)
    return lines


def lines_of(name, record):
    p = record["provenance"]
    return [
        "",
        f"## Decode over a KV cache, {p['cpu']}, {p['threads']} threads",
        "",
        f"{p['date']}, commit {p['commit']}, {p['isa']}, torch {p['torch']}, `{name}` "
        f"(`bench/bench.py kv`): one query of a sequence, heads {record['heads_q']}/"
        f"{record['heads_kv']}, D {record['d']}, pages of 16 tokens, a window of 128 tokens and 16 "
        "sinks in 16 bits, bf16 in and out; medians of calls that take turns. packed: torch given "
        "the queries of a KV head as rows of one head, which a user can do. Every call finds the "
        f"CPU's caches cold. A maximum of floats reads {p['read_gb_per_s']:.1f} GB/s; load before "
        f"the run: {p['load_before']:.1f}."
        + (f" Others, where a column has them: {p['beside']}." if "beside" in p else ""),
        *tables(record),
    ]


def section():
    """Lines of docs/tables."""
    lines = []
    for path in sorted(RESULTS.glob("kv-cpu-*.json")):
        lines += lines_of(path.name, json.loads(path.read_text()))
    return lines
