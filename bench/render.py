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


def page():
    lines = ["# Performance", "",
             "Written by `bench/render.py` from `bench/results/*.json`; do not edit by hand.",
             "`bench/cpu.py` makes the CPU records: candidates interleaved in one run, medians."]
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
    return "\n".join(lines) + "\n"


def main():
    if "--check" in sys.argv[1:]:
        if PAGE.read_text() != page():
            sys.exit("docs/PERFORMANCE.md differs from bench/results: run python bench/render.py")
    else:
        PAGE.write_text(page())


if __name__ == "__main__":
    main()
