"""Hardware counters of the attention kernels, by Nsight Compute: what binds them.

Each kernel runs once under `ncu` on operands that are quantised already. `--child` is the program
that ncu runs. The record has every pipe's, scheduler's and stall's counter that ncu names; the page
some of them.
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
from .record import RESULTS, ROOT, markdown
from .shapes import parse_custom

NAME = "counters-h200.json"
RECIPES = "int8_full,int8_fp8,fp8,int8,bf16"
#: B,Hq,Hkv,Sq,Sk,D[,causal]
SHAPES = ("16,32,32,1024,1024,128", "1,32,32,16384,16384,128", "1,32,32,16384,16384,128,causal",
          "1,32,32,16384,16384,64")  # fmt: skip
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "SchedulerStats", "WarpStateStats")
KEPT = re.compile(r"^gpu__time_duration|pipe_.*pct|issue_active|issue_stalled|inst_executed|"
                  r"throughput.*pct|cycles_active")  # fmt: skip


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
    command += ["--kernel-name-base", "demangled", "--kernel-name", "regex:Sm90Prefill"]
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
