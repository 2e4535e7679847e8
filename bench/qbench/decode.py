"""Decode over a KV cache on a GPU beside torch's attention over the same tokens in bf16.

decode_bench measures the kernels (bench/gpu/decode_bench.cu); rounds of it and of torch take turns.
Both are captured graphs, with L2 emptied before each call. Medians of all rounds.
"""

import json
import pathlib
import statistics
import subprocess
import tempfile

from . import provenance
from .record import RESULTS, markdown, measured_on, tool_record
from .timing import CudaClock

NAME = "kv-decode-h200.json"
BACKENDS = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION"}
KEYS = ("cache", "batch", "heads_q", "heads_kv", "d", "tokens", "page", "bytes", "nrmse")
CALLS = 15  # of torch a round


def add_arguments(parser):
    parser.add_argument("--program", required=True, help="decode_bench")
    parser.add_argument("--shapes", default="16:8192,16:32768,1:131072", help="B:S,...")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--commit", help="where the tree is no git checkout")
    parser.add_argument("-o", "--output", default=str(RESULTS / NAME))


def graph_of(torch, call):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def torch_times(torch, clock, batch, tokens):
    """Milliseconds of one query a sequence by backend, or why there are none."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def rows(heads, length):
        return torch.randn(batch, heads, length, 128, device="cuda", dtype=torch.bfloat16)

    q, k, v = rows(32, 1), rows(8, tokens), rows(8, tokens)
    found = {}
    for name, backend in BACKENDS.items():
        try:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                graph = graph_of(
                    torch,
                    lambda: torch.nn.functional.scaled_dot_product_attention(
                        q, k, v, enable_gqa=True
                    ),
                )
            clock.milliseconds(graph.replay)
            found[name] = [clock.milliseconds(graph.replay) for _ in range(CALLS)]
        except RuntimeError as error:
            found[name] = str(error).strip().splitlines()[0]
    return found


def own_times(program, batch, tokens):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "run.json"
        command = [program, "--b", str(batch), "--s", str(tokens), "-o", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(path.read_text())


def measure(torch, args, batch, tokens):
    clock = CudaClock(torch)
    beside, reads, rows = {}, [], {}
    for _ in range(args.rounds):
        for name, times in torch_times(torch, clock, batch, tokens).items():
            if isinstance(times, str):
                beside[name] = times
            else:
                beside.setdefault(name, []).extend(times)
        torch.cuda.empty_cache()
        own = own_times(args.program, batch, tokens)
        reads.append(own["read_gb_per_s"])
        for row in own["rows"]:
            rows.setdefault(row["cache"], []).append(row)
    medians = []
    for members in rows.values():
        row = {key: members[0][key] for key in KEYS}
        row["us"] = statistics.median(m["us"] for m in members)
        for name in ("mass_us", "debias_us", "decode_us"):
            if name in members[0]:  # no debias where K has a scale a channel
                row[name] = statistics.median(m[name] for m in members)
        row["gb_per_s"] = row["bytes"] / row["us"] * 1e-3
        medians.append(row)
    return {
        "read_gb_per_s": statistics.median(reads),
        "torch_us": {
            name: statistics.median(x) * 1e3 for name, x in beside.items() if isinstance(x, list)
        },
        "torch_refused": {name: x for name, x in beside.items() if isinstance(x, str)},
        "rows": medians,
    }


def record_shapes(torch, args, measure_one, **facts):
    """measure_one(batch, tokens) of every shape of the arguments; writes the record, returns it."""
    facts = provenance.common(args.commit) | provenance.gpu_facts(torch) | facts
    facts["torch"] = torch.__version__
    with provenance.Sampler(provenance.smi_id(torch)) as sampler:
        shapes = [[int(x) for x in shape.split(":")] for shape in args.shapes.split(",")]
        runs = [measure_one(*shape) for shape in shapes]
        facts["clocks"] = sampler.summary()
    text = json.dumps({"provenance": facts, "runs": runs}, indent=1)
    pathlib.Path(args.output).write_text(text + "\n")
    return runs


def run(args):
    import torch

    def measure_one(batch, tokens):
        return measure(torch, args, batch, tokens)

    runs = record_shapes(torch, args, measure_one, program="bench/gpu/decode_bench.cu")
    print("\n".join(tables(runs)))
    return 0


def tables(runs):
    lines = []
    for one in runs:
        first = one["rows"][0]
        beside = one.get("torch_us", {})
        told = ", ".join(f"{name} {us:.0f} us" for name, us in beside.items())
        lines += [
            "",
            f"B {first['batch']}, {first['tokens']} tokens, heads {first['heads_q']}/"
            f"{first['heads_kv']}, D {first['d']}; a plain read {one['read_gb_per_s']:.0f} GB/s"
            + (f"; torch bf16: {told}:" if told else ":"),
            "",
        ]
        rows = []
        for row in one["rows"]:
            values = 2 * row["tokens"] * row["batch"] * row["heads_kv"] * row["d"]
            bits = 8 * row["bytes"] / values
            share = 100 * row["gb_per_s"] / one["read_gb_per_s"]
            ratios = [f"{us / row['us']:.2f}x" for us in beside.values()]
            texts = [f"{bits:.2f}", f"{row['us']:.0f} us", f"{share:.0f} %", *ratios]
            rows.append([row["cache"], *texts])
            for name in ("mass_us", "debias_us"):
                cost = f"{100 * (row[name] / row['us'] - 1):+.1f} %" if name in row else "-"
                rows[-1].append(cost)
        head = ["", "bits in all", "a call", "of the read", *(f"beside {b}" for b in beside)]
        lines += markdown([*head, "mass costs", "debias costs"], rows)
    return lines


def clocks_text(facts):
    sm = facts.get("clocks", {}).get("sm_mhz")
    return f" SM clock {sm['median']:.0f} MHz ({sm['min']:.0f} to {sm['max']:.0f})." if sm else ""


def section():
    """Lines of docs/tables."""
    if (found := tool_record(NAME)) is None:
        return []
    record, p = found
    intro = [
        "",
        "## Decode over a mixed-precision KV cache",
        "",
        f"{measured_on(p)}, torch {p['torch']}, "
        f"`{NAME}` (`bench/bench.py decode`): one query a sequence, pages of 16 tokens, a window "
        "of 128 tokens and 16 sinks in 16 bits; all kernels of a call, as a graph. mixed: 5 % of "
        "the pages in 8 bits, 25 % in 4, 40 % in 3 and 30 % in 2; mixed3: 2, 12, 38 and 48 %; "
        "kv4c and kv2c: K with a scale a channel. Bits of an element of K and V: window and scales "
        "counted, tables not." + clocks_text(p),
    ]
    return intro + tables(record["runs"])
