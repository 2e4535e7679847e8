"""Hardware counters of the attention kernels, by Nsight Compute: what binds them.

Each kernel runs once under `ncu` on operands that are quantised already, with clocks as they are.
`--child` is the program that ncu runs. Record: {"provenance", "rows": [{"recipe", "shape",
"kernel", "counters": {ncu's name: number}}]}.
"""

import csv
import dataclasses
import io
import json
import pathlib
import re
import subprocess
import sys

from . import provenance
from .record import RESULTS, ROOT, markdown, measured_on, tool_record
from .shapes import parse_custom

NAME = "counters-h200.json"
RECIPES = "int8_full,int8_fp8,fp8,int8,bf16"
#: B,Hq,Hkv,Sq,Sk,D[,causal]
SHAPES = ("16,32,32,1024,1024,128", "1,32,32,16384,16384,128", "1,32,32,16384,16384,128,causal",
          "1,32,32,16384,16384,64")  # fmt: skip
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "SchedulerStats", "WarpStateStats")
PIPE = "sm__{}.avg.pct_of_peak_sustained_active"
#: columns of the page, in percent of what there is while a multiprocessor works
BUSY = {
    "tensor cores": PIPE.format("pipe_tensor_cycles_active"),
    "EX2 (XU)": PIPE.format("inst_executed_pipe_xu"),
    "ALU": PIPE.format("pipe_alu_cycles_active"),
    "FMA": PIPE.format("pipe_fma_cycles_active"),
    "issue slots": "smsp__issue_active.avg.pct_of_peak_sustained_active",
}
TIME, CYCLES = "gpu__time_duration.sum", "sm__cycles_active.avg"
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
KEPT = re.compile("|".join((STALL.pattern, r"^sm__\w+\.avg\.pct_of_peak_sustained_active$",
                            *map(re.escape, (TIME, CYCLES, *BUSY.values())))))  # fmt: skip


def add_arguments(parser):
    parser.add_argument("--library", required=True, help="libattention_bench.so")
    parser.add_argument("--recipes", default=RECIPES)
    parser.add_argument("--shape", action="append", help="B,Hq,Hkv,Sq,Sk,D[,causal]; repeatable")
    parser.add_argument("--commit", help="where the tree is no git checkout")
    parser.add_argument("-o", "--output", default=str(RESULTS / NAME))
    parser.add_argument("--csv", help="also keep what ncu wrote")
    parser.add_argument("--child", action="store_true", help="what ncu runs")


def asked(args):
    """(recipe, Shape) in the order of launches."""
    shapes = [parse_custom(text) for text in args.shape or SHAPES]
    return [(recipe, shape) for shape in shapes for recipe in args.recipes.split(",") if recipe]


def launch_all(args):
    """One launch of each attention kernel."""
    from .candidates import machine
    from .run import random_tensors

    device = machine("cuda", args.library, 1)
    for recipe, shape in asked(args):
        candidate = device.candidate(recipe, "bf16", shape, random_tensors(shape, "bf16", "cuda"))
        if "quantise" in candidate.steps:
            candidate.steps["quantise"]()
        candidate.steps.get("kernel", candidate.steps["e2e"])()
        device.synchronize()
        candidate.close()
    return 0


def under_ncu(args):
    """What ncu writes as CSV."""
    command = ["ncu", "--csv", "--page", "raw", "--clock-control", "none"]
    command += ["--kernel-name-base", "demangled", "--kernel-name", "regex:Sm90Attention"]
    for section in SECTIONS:
        command += ["--section", section]
    command += [sys.executable, str(ROOT / "bench" / "bench.py"), "counters", "--child"]
    command += ["--library", args.library, "--recipes", args.recipes]
    for text in args.shape or SHAPES:
        command += ["--shape", text]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def rows_of(text, launches):
    """Counters by launch, from ncu's CSV: names, units, then a line a launch. Raises ValueError
    where ncu saw other launches than were asked for."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    table = list(csv.reader(io.StringIO("\n".join(lines))))
    names, _, *found = table if len(table) > 2 else ([], [])
    if len(found) != len(launches):
        raise ValueError(f"ncu saw {len(found)} attention kernels of {len(launches)}")
    rows = []
    for (recipe, shape), values in zip(launches, found):
        given = dict(zip(names, values))
        counters = {}
        for name, value in given.items():
            if not KEPT.search(name):
                continue
            try:
                counters[name] = float(value.replace(",", ""))
            except ValueError:
                continue
        rows.append({"recipe": recipe, "shape": dataclasses.asdict(shape),
                     "kernel": given["Kernel Name"], "counters": counters})  # fmt: skip
    return rows


def run(args):
    if args.child:
        return launch_all(args)
    import torch

    text = under_ncu(args)
    if args.csv:
        pathlib.Path(args.csv).write_text(text)
    facts = provenance.common(args.commit) | provenance.gpu_facts(torch)
    facts["ncu"] = provenance.command_output("ncu", "--version").splitlines()[-1]
    record = {"provenance": facts, "rows": rows_of(text, asked(args))}
    pathlib.Path(args.output).write_text(json.dumps(record, indent=1) + "\n")
    return 0


def stalls(counters):
    """Parts of the time that warps wait, by reason, the largest first; without those that issue."""
    found = {m[1]: x for name, x in counters.items() if (m := STALL.fullmatch(name))}
    waiting = {k: x for k, x in found.items() if k != "selected"}
    total = sum(waiting.values())
    return sorted(((x / total, k) for k, x in waiting.items() if x > 0), reverse=True)


def table(rows):
    lines = []
    for row in rows:
        shape, counters = row["shape"], row["counters"]
        where = f"{'causal' if shape['causal'] else 'full'}, D {shape['dim']}, S {shape['keys']}"
        told = ", ".join(f"{k.replace('_', ' ')} {x:.0%}" for x, k in stalls(counters)[:4])
        busy = [f"{counters[name]:.0f} %" for name in BUSY.values()]
        lines.append([f"{row['recipe']}, {where}", f"{counters[TIME] / 1e3:.0f} us", *busy, told])
    return markdown(["", "time", *BUSY, "warps wait for"], lines)


def section():
    """Lines of docs/tables."""
    if (found := tool_record(NAME)) is None:
        return []
    record, p = found
    return [
        "",
        "## Counters of Hopper's attention kernels",
        "",
        f"{measured_on(p)}, ncu ({p['ncu']}), "
        f"`{NAME}` (`bench/bench.py counters`): the attention kernel alone, heads 32/32, 16384 "
        "tokens in all, at the clocks that profiling leaves. Percent of what each has while a "
        "multiprocessor works; the four reasons that warps wait for most, of all their waiting "
        "(ncu's names: wait is a fixed latency).",
        "",
        *table(record["rows"]),
    ]
