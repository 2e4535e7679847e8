"""Attention on CPUs beside the peaks of the units that it uses: what cpu_roofline measures."""

import json
import os
import pathlib
import subprocess

from . import provenance
from .record import RESULTS, markdown

UNITS = {"integer": "s8", "bf16": "bf16", "f32": "f32"}


def add_arguments(parser):
    parser.add_argument("--program", required=True, help="cpu_roofline, a target of the build")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--commit", help="where the tree is no git checkout")
    parser.add_argument("-o", "--output", required=True, help="the record")


def run(args):
    load = os.getloadavg()[0]
    done = subprocess.run(
        [args.program, str(args.threads)], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise ValueError(f"{args.program} ended with {done.returncode}")
    facts = provenance.common(args.commit) | {"cpu": provenance.cpu_model(), "load_before": load}
    record = {"provenance": facts, **json.loads(done.stdout)}
    pathlib.Path(args.output).write_text(json.dumps(record, indent=1) + "\n")
    print("\n".join(lines_of(pathlib.Path(args.output).name, record)))
    return 0


def has_codes(row):
    """Are K and V codes from the start? Records before them say nothing of it."""
    return row.get("kv", "bf16") != "bf16"


def shape_name(row):
    if row["queries"] == 1:
        codes = ", K and V in s8" if has_codes(row) else ""
        return f"decode, {row['keys']} keys, heads {row['heads_q']}/{row['heads_kv']}{codes}"
    return f"prefill, S {row['keys']}, {row['heads_q']} heads"


def peaks_table(record):
    def text(isa, unit):
        peak = isa["peaks"].get(unit)
        return "" if peak is None else f"{peak / 1e9:.0f}"

    rows = [[isa["isa"], *(text(isa, unit) for unit in UNITS)] for isa in record["isas"]]
    return markdown(["", *(f"{name} GFLOP/s" for name in UNITS.values())], rows)


def paths_table(record):
    rows = []
    for isa in record["isas"]:
        for row in isa["attention"]:
            parts = {name: row[name] / row["seconds"] for name in ("products", "softmax", "memory")}
            flop = 4 * row["heads_q"] * row["queries"] * row["keys"] * row["d"]
            rows.append(
                [
                    f"{isa['isa']}, {row['recipe']}",
                    shape_name(row),
                    f"{flop / row['seconds'] / 1e9:.0f}",
                    *(f"{100 * share:.0f} %" for share in parts.values()),
                    max(parts, key=parts.get),
                ]
            )
    return markdown(["", "", "GFLOP/s", "products", "softmax", "memory", "roof"], rows)


def absent(record):
    """What the tables do not have, and why: nobody shall take a gap for a measurement."""
    isas = {isa["isa"]: isa for isa in record["isas"]}
    notes = []
    if not any(name.startswith("neon") for name in isas):
        notes.append("NEON (dotprod, i8mm): run under qemu for correctness only, since no Arm "
                     "machine was at hand.")  # fmt: skip
    if "amx" not in isas:
        notes.append("AMX, its decode of 8-bit K and V too: this CPU has none.")
    elif not any(has_codes(row) for row in isas["amx"]["attention"]):
        notes.append("Decode of 8-bit K and V, on AMX too: this record is older than that "
                     "measurement, and no machine with AMX was at hand since.")  # fmt: skip
    if "scalar" not in isas:
        notes.append("Plain C++: not measured in this record.")
    if "avx2" in isas and record.get("loops", 1) < 2:
        notes.append("A right peak of AVX2 in s8: the compiler had left most of that loop's "
                     "products out, so it is too low, and shares of it are too high.")  # fmt: skip
    return notes


def lines_of(name, record):
    p = record["provenance"]
    coded = any(has_codes(row) for isa in record["isas"] for row in isa["attention"])
    scalar = any(isa["isa"] == "scalar" for isa in record["isas"])
    fastest = ", the fastest of 21 runs" if record.get("loops", 1) > 1 else ""
    plain = ", as does SSE2, at best what scalar, plain C++, is compiled to" if scalar else ""
    tiles = ""
    if "read_tiles" in record:
        tiles = (
            f", {record['read_tiles'] / 1e9:.1f} GB/s in the order of decode's tiles (128 rows of "
            "one of 8 heads side by side, then the next one's)"
        )
    codes = " (K and V in s8: codes with a scale a token, quantised before)" if coded else ""
    return [
        "",
        f"## Roofline, {p['cpu']}, {record['threads']} threads",
        "",
        f"{p['date']}, commit {p['commit']}, `{name}` (`bench/bench.py roofline`). Peaks are of "
        f"loops of independent instructions on registers{fastest} (a multiply-add is two "
        f"operations; AVX2 multiplies bytes as 16-bit words{plain}); memory reads "
        f"{record['read'] / 1e9:.1f} GB/s{tiles}.",
        "",
        *peaks_table(record),
        "",
        " ".join(["Not here:", *absent(record)]),
        "",
        f"Whole calls, bf16 in and out, D 128, quantisation included{codes}. The shares: the time "
        "of both products at their unit's peak, of the softmax of all scores on a tile in cache, "
        "of reading K and V once, each of the whole; the largest is the path's roof, and a core "
        "computes products and softmax one after the other but for what it overlaps.",
        "",
        *paths_table(record),
    ]


def section():
    """Lines of docs/tables."""
    lines = []
    for path in sorted(RESULTS.glob("roofline-*.json")):
        lines += lines_of(path.name, json.loads(path.read_text()))
    return lines
