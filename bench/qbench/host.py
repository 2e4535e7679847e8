"""How long a call keeps the host, on a GPU: small calls, whose kernels are over before.

Python: qattn.torch.sdpa and qattn.attention on CUDA tensors, torch's own attention and one
addition, which is a single launch, beside them; --also names folders of other builds' Python
packages. C++: host_time (bench/gpu/host_time.cpp). Processes take turns, since a host's clocks
differ by half between them, and calls within one; medians of rounds, then of turns.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

from . import provenance
from .record import RESULTS, markdown, measured_on, tool_record

NAME = "host-h100.json"
RECIPES = ("bf16", "int8", "int8_full", "fp8")
DIMS = (64, 128)
HEADS, TOKENS, CALLS = 8, 128, 200


def add_arguments(parser):
    parser.add_argument("--program", required=True, help="host_time")
    parser.add_argument("--also", nargs="*", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--commit", help="where the tree is no git checkout")
    parser.add_argument("-o", "--output", default=str(RESULTS / NAME))
    parser.add_argument("--child", action="store_true", help="print this process's times alone")


def python_calls(torch, d):
    """Callables by name."""
    import qattn.torch

    q, k, v = (
        torch.randn(1, HEADS, TOKENS, d, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )
    tokens_first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    one = torch.zeros(1, device="cuda")
    sdpa = torch.nn.functional.scaled_dot_product_attention
    calls = {"torch add_": lambda: one.add_(1), "torch sdpa": lambda: sdpa(q, k, v)}
    for recipe in RECIPES:
        calls[f"sdpa {recipe}"] = lambda r=recipe: qattn.torch.sdpa(q, k, v, recipe=r)
    calls["attention int8"] = lambda: qattn.attention(*tokens_first, recipe="int8")
    return calls


def python_times(torch, rounds):
    found = {}
    for d in DIMS:
        calls = python_calls(torch, d)
        times = {name: [] for name in calls}
        for n in range(-1, rounds):  # the first round warms up
            for name, call in calls.items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(CALLS):
                    call()
                if n >= 0:
                    times[name].append((time.perf_counter() - start) / CALLS * 1e6)
        found[f"D {d}"] = {name: round(statistics.median(x), 2) for name, x in times.items()}
    return found


def child(folder, rounds):
    """python_times() in a process; `folder`: of another build's package."""
    command = [sys.executable, str(pathlib.Path(__file__).parents[1] / "bench.py"), "host"]
    command += ["--program", "-", "--child", "--rounds", str(rounds)]
    environment = dict(os.environ)
    if folder:
        environment["PYTHONPATH"] = folder
        environment.pop("QATTN_CUDA_LIBRARY", None)
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout)


def median_of(turns):
    """Of dictionaries of one form, number by number."""
    if not isinstance(turns[0], dict):
        return round(statistics.median(turns), 2)
    return {key: median_of([turn[key] for turn in turns]) for key in turns[0]}


def program_times(program, rounds):
    """{"RECIPE D": {"attention_us", "run_us"}}"""
    done = subprocess.run([program, str(CALLS), str(rounds)], check=True, stdout=subprocess.PIPE)
    return {
        f"{row['recipe']} {row['d']}": {key: row[key] for key in ("attention_us", "run_us")}
        for row in json.loads(done.stdout)
    }


def run(args):
    import torch

    if args.child:
        print(json.dumps(python_times(torch, args.rounds)))
        return 0
    facts = provenance.common(args.commit) | provenance.gpu_facts(torch)
    facts["torch"] = torch.__version__
    builds = {"this": ""} | dict(named.split("=", 1) for named in args.also)
    python, cpp = {name: [] for name in builds}, []
    for _ in range(args.turns):
        for name, folder in builds.items():
            python[name].append(child(folder, args.rounds))
        cpp.append(program_times(args.program, args.rounds))
    medians = {name: median_of(turns) for name, turns in python.items()}
    record = {"provenance": facts, "python": medians, "cpp": median_of(cpp)}
    pathlib.Path(args.output).write_text(json.dumps(record, indent=1) + "\n")
    print("\n".join(tables(record)))
    return 0


def tables(record):
    builds = record["python"]
    head = ["microseconds a call", *(f"{d}, {name}" for name in builds for d in builds[name])]
    rows = [
        [call, *(f"{times[call]:.1f}" for found in builds.values() for times in found.values())]
        for call in builds["this"][f"D {DIMS[0]}"]
    ]
    lines = markdown(head, rows)
    cpp = record["cpp"]
    keys = [(d, key) for d in DIMS for key in ("attention_us", "run_us")]
    rows = [[r, *(f"{cpp[f'{r} {d}'][key]:.1f}" for d, key in keys)] for r in RECIPES]
    head = ["C++", *(f"D {d}, {name}" for d in DIMS for name in ("attention()", "run()"))]
    return [*lines, "", *markdown(head, rows)]


def section():
    """Lines of docs/tables."""
    if (found := tool_record(NAME)) is None:
        return []
    record, p = found
    return [
        "",
        "## How long a call keeps the host",
        "",
        f"{measured_on(p)}, torch {p['torch']}, `{NAME}` (`bench/bench.py host`): {HEADS} heads, "
        f"{TOKENS} tokens, calls of the same shapes before, the GPU idle. Most of what C++ takes "
        "is launches. A captured graph has none of it."
        + (f" {p['about']}" if "about" in p else ""),
        "",
        *tables(record),
    ]
