"""docs/PERFORMANCE.md from bench/results/*.json. `--check` fails if the page differs.

Usage: python bench/render.py [--check]
"""

import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "PERFORMANCE.md"
TITLES = {
    "prefill_full": "Prefill, B 1, H 8, S 4096, D 128, quantisation included",
    "prefill_causal": "The same, causal",
    "decode_4096": "Decode, one query, GQA 32/8, D 128, 4096 keys",
    "decode_32768": "Decode, 32768 keys",
}


def table(rows):
    f32 = rows.get("torch f32", {}).get("median_ms")
    b16 = rows["torch bf16"]["median_ms"]
    lines = ["| | median ms | GFLOP/s or GB/s | x torch f32 | x torch bf16 |",
             "|---|---|---|---|---|"]
    for name, row in rows.items():
        ms = row["median_ms"]
        rate = row.get("gflops", row.get("gb_per_s"))
        lines.append(f"| {name} | {ms:.2f} | {f'{rate:.1f}' if rate else ''} "
                     f"| {f'{f32 / ms:.2f}' if f32 else ''} | {b16 / ms:.2f} |")
    return lines


def gpu_table(rows, dim, causal):
    """Speed-ups over torch's FlashAttention-2 by length; rows of one head dimension."""
    rows = [r for r in rows if r["D"] == dim and r["causal"] == causal]
    names = list(rows[0]["ms"])
    lines = ["| | " + " | ".join(f"S {r['S']}" for r in rows) + " |",
             "|---" * (len(rows) + 1) + "|"]
    for name in names:
        cells = []
        for r in rows:
            ms = r["ms"][name]
            cells.append(f"{ms * 1e3:.0f} us" if "quantise" in name else
                         f"{r['tflops'][name]:.0f} ({r['ms']['torch flash'] / ms:.2f}x)")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def gpu_section(record, name):
    p, rows = record["provenance"], record["rows"]
    lines = ["", f"## {p['gpu']}, prefill", "",
             f"{p['date']}, commit {p['commit']}, torch {p['torch']}, `{name}`. MHA, 32 heads, "
             "B S = 16384, bf16 in and out; TFLOP/s and times torch's FlashAttention-2 of the same "
             "run; kernel: operands already quantised; e2e: quantisation included."]
    for dim in sorted({r["D"] for r in rows}, reverse=True):
        for causal in (False, True):
            lines += ["", f"### D {dim}, {'causal' if causal else 'full'}", "",
                      *gpu_table(rows, dim, causal)]
    worst = {}
    for r in rows:
        for recipe, error in r["nrmse"].items():
            worst[recipe] = max(worst.get(recipe, 0), error)
    first = rows[0]
    lines += ["", "NRMSE against float64 on N(0,1), the largest: " + ", ".join(
        f"{recipe} {error:.1e}" for recipe, error in worst.items()) + ".", "",
        f"Bytes at S {first['S']}, D {first['D']}: Q, K, V and O in 16 bits "
        f"{first['bytes_qkvo'] / 2**20:.0f} MiB; workspace (codes and scales) " + ", ".join(
            f"{r} {b / 2**20:.1f} MiB" for r, b in first["bytes_workspace"].items()) + "."]
    return lines


def page():
    lines = ["# Performance", "",
             "Written by `bench/render.py` from `bench/results/*.json`; do not edit by hand.",
             "`bench/cpu.py` and `bench/gpu_prefill.py` make the records: candidates interleaved "
             "in one run, medians."]
    for path in sorted((ROOT / "bench" / "results").glob("cpu-*.json")):
        record = json.loads(path.read_text())
        p = record["provenance"]
        lines += ["", f"## {p['cpu']}, {p['threads']} threads, {p['isa']}", "",
                  f"{p['date']}, commit {p['commit']}, torch {p['torch']}, `{path.name}`. "
                  f"Memory reads {record['read_gb_per_s']:.1f} GB/s in the same run."]
        for key, title in TITLES.items():
            lines += ["", f"### {title}", "", *table(record[key])]
            codes = record[key].get("int8_full, s8 K and V")
            if codes:
                share = codes["gb_per_s"] / record["read_gb_per_s"]
                lines += ["", f"K and V are read at {100 * share:.0f} % of the measured bandwidth."]
    for path in sorted((ROOT / "bench" / "results").glob("gpu-*-prefill.json")):
        lines += gpu_section(json.loads(path.read_text()), path.name)
    return "\n".join(lines) + "\n"


def main():
    if "--check" in sys.argv[1:]:
        if PAGE.read_text() != page():
            sys.exit("docs/PERFORMANCE.md differs from bench/results: run python bench/render.py")
    else:
        PAGE.write_text(page())


if __name__ == "__main__":
    main()
