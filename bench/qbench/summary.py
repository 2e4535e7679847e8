"""The tables and the picture of README.md and docs/PERFORMANCE.md that are made from records.

A page holds a table between two comments, `<!-- table: NAME -->` and `<!-- end of table -->`;
fill() writes what is between them.
"""

import json
import re

from .cpu import RESTLESS
from .record import RESULTS, ROOT, Record, baselines, markdown

README = ROOT / "README.md"
PAGE = ROOT / "docs" / "PERFORMANCE.md"
GOALS = ROOT / "docs" / "internals" / "goals.md"
PLACE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.S)
CUDNN, FLASH = ("torch cudnn", "bf16"), ("torch flash", "bf16")
TORCH = ("torch", "bf16")
LONG = (4096, 16384)
#: The newest record of each candidate. All are of one kind of GPU, and each has its own cuDNN.
SOURCES = {
    "gpu-h100-turns-d128.json": (
        "torch flash",
        "torch cudnn",
        "bf16",
        "int8",
        "int8_fp8",
        "fp8",
    ),
    "variants-h100-lost-mass.json": ("int8_full",),
}
OTHER_GPU = {"gpu-h200-turns-d128.json": ("int8_full", "int8_fp8", "fp8")}
CPU = "cpu-zen5-2.json"
AMX = "cpu-shapes-amx-2.json"
NAMES = {
    "torch flash": "FlashAttention-2 (torch)",
    "torch cudnn": "cuDNN (torch)",
    "torch": "torch",
}
PRODUCTS = {
    "torch flash": ("bf16", "bf16"),
    "torch cudnn": ("bf16", "bf16"),
    "torch": ("bf16", "bf16"),
    "bf16": ("bf16", "bf16"),
    "int8": ("int8", "16-bit"),
    "int8_full": ("int8", "int8"),
    "int8_fp8": ("int8", "FP8"),
    "fp8": ("FP8", "FP8"),
}


#: Are all operands in 8 bits?
EIGHT_BITS = {name: "bf16" not in pair and "16-bit" not in pair for name, pair in PRODUCTS.items()}


def chosen(record, candidates, dim=128, causal=False):
    """Cells of those candidates at one head dimension, as many query as KV heads, LONG keys."""
    return [
        c
        for c in record.cells
        if c.measured
        and c["candidate"] in candidates
        and c.shape.group in ("mha", "custom", "cpu")
        and (c.shape.dim, c.shape.causal) == (dim, causal)
        and c.shape.heads_q == c.shape.heads_kv
        and c.shape.keys in LONG
        and c.shape.queries == c.shape.keys
    ]


def gpu_points(**shape):
    """{candidate: {(step, keys): times as fast as cuDNN in the same record, "nrmse": largest}}."""
    found = {}
    for name, candidates in SOURCES.items():
        record = Record.load(RESULTS / name)
        base = baselines(record.cells, CUDNN)
        for c in chosen(record, candidates, **shape):
            if c["step"] == "quantise":
                continue
            point = found.setdefault(c["candidate"], {"nrmse": 0})
            point[c["step"], c.shape.keys] = base[c.shape.name] / c["median_ms"]
            point["nrmse"] = max(point["nrmse"], c["nrmse"])
    return found


def cpu_points():
    """The same on a CPU, times torch's bf16; float32 tensors in and out have no part in it."""
    record = Record.load(RESULTS / CPU)
    base = baselines(record.cells, TORCH)
    found = {}
    for c in chosen(record, ("torch", "bf16", "int8", "int8_full")):
        if c["io"] == "bf16":
            point = found.setdefault(c["candidate"], {"nrmse": c["nrmse"]})
            point[c["step"], c.shape.keys] = base[c.shape.name] / c["median_ms"]
    return found


def amx_points():
    """{candidate: "1.20x", times as fast as torch's bf16} on a CPU with AMX, 4096 keys, no mask."""
    runs = json.loads((RESULTS / AMX).read_text())["runs"]
    (times,) = (
        run["times"]
        for run in runs
        if (run["case"]["keys"], run["case"]["queries"]) == (LONG[0], LONG[0])
        and (run["case"]["dim"], run["case"]["io"], run["case"]["causal"]) == (128, "bf16", False)
    )
    candidates = {"torch": "torch", "bf16": "own", "int8_full": "int8_full"}
    about = "about " if max(x["spread"] for x in times.values()) > RESTLESS else ""
    ms = {name: times[key]["median_ms"] for name, key in candidates.items()}
    return {name: f"{about}{ms['torch'] / x:.{1 if about else 2}f}x" for name, x in ms.items()}


def ordered(points):
    return [name for name in PRODUCTS if name in points]


def facts(name):
    return json.loads((RESULTS / name).read_text())["provenance"]


def machine(name):
    p = facts(name)
    return p.get("gpu") or f"{p['cpu']}, {p['threads']} threads, {p['isa']}"


def times(point, step, keys):
    value = point.get((step, keys))
    return "" if value is None else f"{value:.2f}x"


def percent(error):
    return f"{100 * error:.2g} %"


def name_of(candidate):
    return NAMES.get(candidate, f"`{candidate}`")


def speed_and_error():
    """One row a candidate; a GPU's, and beside it a CPU's."""
    points, on_cpu, on_amx = gpu_points(), cpu_points(), amx_points()

    rows = []
    for name in ordered(points):
        p = points[name]
        codes = "kernel" if ("kernel", LONG[0]) in p else None
        cells = [times(p, "e2e", keys) for keys in LONG]
        cells += [times(p, codes, keys) if codes else "" for keys in LONG]
        cells += [times(on_cpu.get(name, {}), "e2e", LONG[0]), on_amx.get(name, "")]
        rows.append([name_of(name), *PRODUCTS[name], percent(p["nrmse"]), *cells])
    torch_row = on_cpu["torch"]
    rows.append(
        ["torch on the CPU", *PRODUCTS["torch"], percent(torch_row["nrmse"]), "", "", "", "",
         times(torch_row, "e2e", LONG[0]), "1.00x"]
    )  # fmt: skip
    lengths = [f"{where}, {n // 1024}K" for where in ("GPU", "codes") for n in LONG]
    return markdown(["", "QK", "PV", "error", *lengths, "Zen 5, 4K", "AMX, 4K"], rows)


def machines():
    """Where those numbers are from."""
    rows = []
    for name in (*SOURCES, CPU, AMX):
        p = facts(name)
        rows.append([machine(name), p["date"], f"torch {p['torch']}", f"`bench/results/{name}`"])
    return markdown(["machine", "date", "beside", "record"], rows)


def gpu_speeds(causal):
    """Times cuDNN by length, end to end and with codes given, from the sweep's records."""
    rows, lengths = [], []
    for name, candidates in SOURCES.items():
        record = Record.load(RESULTS / name)
        base = baselines(record.cells, CUDNN)
        for candidate in candidates:
            if candidate == CUDNN[0]:
                continue
            for step in ("e2e", "kernel"):
                row = {
                    c.shape.keys: base[c.shape.name] / c["median_ms"]
                    for c in record.cells
                    if c.measured and (c["candidate"], c["step"]) == (candidate, step)
                    if (c.shape.dim, c.shape.causal) == (128, causal)
                }
                if row:
                    lengths = sorted(set(lengths) | set(row))
                    rows.append((candidate, step, row))
    header = ["", "tensors given as", *(f"{n // 1024}K" for n in lengths)]
    said = {"e2e": "16 bits", "kernel": "codes"}
    body = [
        [name_of(candidate), said[step]] + [f"{row[n]:.2f}x" if n in row else "" for n in lengths]
        for candidate, step, row in rows
    ]
    return markdown(header, body)


#: What 8-bit recipes are to reach on Hopper, times cuDNN: {(step, causal): by length}.
HOPPER = {
    ("kernel", False): (1.35, 1.5, 1.55, 1.6, 1.7, 1.7),
    ("kernel", True): (1.3, 1.4, 1.45, 1.5, 1.7, 1.7),
    ("e2e", False): (1.0, 1.2, 1.35, 1.45, 1.55, 1.6),
    ("e2e", True): (0.85, 1.05, 1.2, 1.35, 1.5, 1.55),
}
LENGTHS = tuple(1024 << i for i in range(6))


def goals():
    """Goals on Hopper and what the newest sweeps reach; in bold where that is the goal."""
    rows = []
    for (step, causal), asked in HOPPER.items():
        what = f"{'codes' if step == 'kernel' else '16 bits'}, {'causal' if causal else 'full'}"
        rows.append([what, "goal", *(f"{x:.2f}" for x in asked)])
        for name, candidates in {**SOURCES, **OTHER_GPU}.items():
            record = Record.load(RESULTS / name)
            base = baselines(record.cells, CUDNN)
            for candidate in candidates:
                if not EIGHT_BITS[candidate]:
                    continue
                row = {
                    c.shape.keys: base[c.shape.name] / c["median_ms"]
                    for c in record.cells
                    if c.measured and (c["candidate"], c["step"]) == (candidate, step)
                    if (c.shape.dim, c.shape.causal) == (128, causal)
                }
                texts = [
                    "" if n not in row else f"**{row[n]:.2f}**" if row[n] >= x else f"{row[n]:.2f}"
                    for n, x in zip(LENGTHS, asked)
                ]
                gpu = record.machine.split()[1]
                rows.append([f"`{candidate}`", f"{gpu}, {record.provenance['date']}", *texts])
    return markdown(["", "", *(f"{n // 1024}K" for n in LENGTHS)], rows)


CACHES = {
    "kv8": "8 bits",
    "kv4": "4 bits",
    "kv3": "3 bits",
    "kv2": "2 bits",
    "mixed3": "8, 4, 3 and 2 bits mixed",
    "k4v2": "K 4 bits, V 2 bits",
}


def kv_decode():
    """Decode over a KV cache on a GPU beside cuDNN, of the record's run with the most values."""
    runs = json.loads((RESULTS / "kv-decode-h200.json").read_text())["runs"]
    run = max(runs, key=lambda r: r["rows"][0]["batch"] * r["rows"][0]["tokens"])
    rows = []
    for row in run["rows"]:
        if row["cache"] in CACHES:
            values = 2 * row["tokens"] * row["batch"] * row["heads_kv"] * row["d"]
            speed = run["torch_us"]["cudnn"] / row["us"]
            bits = 8 * row["bytes"] / values
            rows.append(
                [
                    CACHES[row["cache"]],
                    f"{bits:.2f}",
                    f"{row['us']:.0f}",
                    f"{speed:.2f}x",
                ]
            )
    return markdown(["cache", "bits in all", "microseconds", "times cuDNN's bf16"], rows)


def model_rows(name):
    """What caches cost a language model: its record's rows by their bits."""
    rows = json.loads((RESULTS / name).read_text())["rows"]
    return [
        [row["cache"], f"{row['bits']:.2f}", f"{1e3 * row['kl']:.2f}"]
        + [f"{1e3 * row['kl_se']:.2f}", f"{row['perplexity']:.3f}"]
        for row in sorted((r for r in rows if "refused" not in r), key=lambda r: -r["bits"])
    ]


MODEL_HEAD = ["cache", "bits in all", "KL, millinats", "standard error", "perplexity"]


def kv_models():
    """Lines of docs/tables: every record of a language model."""
    lines = []
    for path in sorted(RESULTS.glob("kv-*.json")):
        record = json.loads(path.read_text())
        if "evaluated" not in record:
            continue
        e, p = record["evaluated"], record["provenance"]
        model = record["model"].get("package") or "a model of bytes, trained by the program"
        lines += ["", f"## {model}, {e['prefill'] + e['positions']} tokens", ""]
        lines += [
            f"{p['date']}, commit {p['commit']}, `{path.name}`: {e['sequences']} texts, "
            f"{e['prefill']} tokens of prompt and {e['positions']} positions each; window "
            f"{e['window']}, sinks {e['sinks']}. KL divergence from the 16-bit cache; the standard "
            "error is over texts.",
            "",
            *markdown(MODEL_HEAD, model_rows(path.name)),
        ]
    return lines


TABLES = {
    "kv-decode": kv_decode,
    "kv-model": lambda: markdown(MODEL_HEAD, model_rows("kv-smollm2-8k.json")),
    "speed-and-error": speed_and_error,
    "machines": machines,
    "goals": goals,
    "gpu-full": lambda: gpu_speeds(False),
    "gpu-causal": lambda: gpu_speeds(True),
}


def filled(text):
    """A page with its tables as the records have them."""

    def table(match):
        if match[2] not in TABLES:
            raise ValueError(f"no table is called {match[2]}; there are {', '.join(TABLES)}")
        return match[1] + "\n".join(TABLES[match[2]]()) + "\n" + match[3]

    return PLACE.sub(table, text)
