"""docs/tables from bench/results, and the tables in README.md and docs/PERFORMANCE.md.

A page of docs/tables is a kind of machine or of measurement: a section a record, a table a family
of shapes.
"""

import textwrap

from . import (
    cpu,
    choices,
    counters,
    decode,
    fashion_dit,
    foreign_cases,
    fp4,
    host,
    kv,
    model,
    paged,
    predictions,
    projection,
    roofline,
    smoothing,
    summary,
    terrain,
    training,
    transformers_models,
    variants,
    wheel,
)
from .record import ROOT, baselines, committed, markdown
from .shapes import column_name, table_name

FOLDER = ROOT / "docs" / "tables"
#: pages that hold tables of qbench/summary.py among other text
MIXED = (summary.README, summary.PAGE, summary.GOALS)
COLUMNS = 100
TITLES = {
    "mha": "Multi-head attention, B S = 16384",
    "gqa": "Grouped queries, B S = 16384",
    "llm": "Prefill of language models",
    "video": "Video diffusion",
    "wide": "Wide heads",
    "dims": "Head dimensions 96, 192, and 192 of Q and K with 128 of V",
    "decode": "Decode, one query a sequence",
    "few": "Few queries",
    "cpu": "Attention on CPUs",
    "custom": "Other shapes",
}
#: what GPU recipes are to beat; the tables of speeds have the first baseline
CUDNN = ("torch cudnn", "bf16")
STEPS = (
    "e2e: 16-bit (or float32) tensors in and out, quantisation included; kernel: operands already "
    "quantised; cached: K and V are codes from the start. Where a plan leaves Q's codes to the "
    "attention kernel, e2e does, and is then not the sum of quantise and kernel, which prepare all."
)


def add_arguments(parser):
    parser.add_argument("--check", action="store_true", help="fail if the page differs")


def speed(cell):
    """TFLOP/s, or where K and V are read for one query, the speed of reading them."""
    if cell.shape.queries == 1:
        rate = cell.get("kv_gb_per_s")
        return f"{cell['median_ms']:.3g} ms" + (f", {rate:.3g} GB/s" if rate else "")
    if cell["tflops"] < 10:
        return f"{cell['tflops'] * 1e3:.0f} GFLOP/s"
    return f"{cell['tflops']:.0f}"


def text_of(cell, base):
    if cell is None:
        return ""
    if not cell.measured:
        return "failed" if "failed" in cell else "-"
    if cell["step"] == "quantise":
        return f"{cell['median_ms'] * 1e3:.0f} us"
    ratio = f" ({base / cell['median_ms']:.2f}x)" if base else ""
    return speed(cell) + ratio


def speed_table(cells, baseline):
    """Rows: candidates and steps; columns: shapes."""
    shapes = list(dict.fromkeys(c.shape for c in cells))
    by_place = {(c.label, c.shape): c for c in cells}
    base = baselines(cells, baseline)
    rows = []
    for label in dict.fromkeys(c.label for c in cells):
        row = [by_place.get((label, s)) for s in shapes]
        if any(c is not None and c.measured for c in row):
            rows.append([label, *(text_of(c, base.get(s.name)) for c, s in zip(row, shapes))])
    return markdown(["", *map(column_name, shapes)], rows)


def ratio_table(cells, over):
    """How many times as fast as the (candidate, io) `over`: as speed_table(), of recipes alone."""
    shapes = list(dict.fromkeys(c.shape for c in cells))
    base = baselines(cells, over)
    found = {
        (c.label, c.shape): base[c.shape.name] / c["median_ms"]
        for c in cells
        if c.measured and c["step"] != "quantise" and not c["candidate"].startswith("torch")
        if c.shape.name in base
    }
    labels = dict.fromkeys(label for label, _ in found)
    texts = {key: f"{ratio:.2f}x" for key, ratio in found.items()}
    rows = [[label, *(texts.get((label, s), "") for s in shapes)] for label in labels]
    return markdown(["", *map(column_name, shapes)], rows) if rows else []


def reasons(items, word):
    """One line a candidate and reason."""
    found = {}
    for x in items:
        if word in x:
            found.setdefault((x["candidate"], x[word]), []).append(x)
    return [
        f"- {word}: {candidate} ({len(xs)} of them): {reason}"
        for (candidate, reason), xs in found.items()
    ]


def group_section(group, cells, baseline):
    lines = ["", f"### {TITLES.get(group, group)}"]
    tables = {}
    for cell in cells:
        tables.setdefault(table_name(cell.shape), []).append(cell)
    for name, members in tables.items():
        lines += ["", f"{name}:", "", *speed_table(members, baseline)]
        if beside := ratio_table(members, CUDNN):
            lines += ["", f"{name}, beside torch's cuDNN in bf16:", "", *beside]
    told = reasons(cells, "refused") + reasons(cells, "failed")
    return lines + (["", *told] if told else [])


def error_section(errors):
    """NRMSE by family; candidates down, families across."""
    lines = []
    for dim in dict.fromkeys(x["dim"] for x in errors):
        members = [x for x in errors if x["dim"] == dim]
        families = list(dict.fromkeys(x["family"] for x in members))
        rows = []
        for key in dict.fromkeys((x["candidate"], x["io"]) for x in members):
            row = {x["family"]: x for x in members if (x["candidate"], x["io"]) == key}
            cells = [row.get(f, {}) for f in families]
            if any("nrmse" in x for x in cells):
                texts = (f"{x['nrmse']:.1e}" if "nrmse" in x else "-" for x in cells)
                rows.append([f"{key[0]}, {key[1]}", *texts])
        lines += ["", f"D {dim}:", "", *markdown(["", *families], rows)]
    told = reasons(errors, "failed")
    intro = ["", "### NRMSE against float64, by family of inputs", ""]
    intro += ["Two heads, 512 queries, 2048 keys; the families: tools/sim/recipe_sim.py."]
    return intro + lines + (["", *told] if told else [])


def sampled_errors(record):
    """The largest error beside a speed, by candidate: N(0,1) inputs."""
    worst = {}
    for cell in record.cells:
        if cell.get("nrmse") is not None:
            label = f"{cell['candidate']} ({cell['io']})"
            worst[label] = max(worst.get(label, 0), cell["nrmse"])
    if not worst:
        return []
    text = ", ".join(f"{label} {error:.1e}" for label, error in worst.items())
    return ["", f"NRMSE against float64 of what was timed, N(0,1), the largest: {text}."]


#: how many of Q, K and V a recipe has in 8 bits
EIGHT_BITS = {"int8": 2, "int8_full": 3, "int8_fp8": 3, "fp8": 3}


def workspaces(record):
    """What low precision does to memory, of the first shape: document 003's claim, checked."""
    first = record.cells[0].shape
    known = {
        c["candidate"]: c["bytes_workspace"]
        for c in record.cells
        if c.shape == first and c["candidate"] in EIGHT_BITS and "bytes_workspace" in c
    }
    if not known or first.heads_q != first.heads_kv or first.queries != first.keys:
        return []
    one = first.elements_kv() // 2  # elements of each of Q, K, V and O
    tensors = 8 * one
    lines = [
        "",
        f"Bytes at S {first.keys}, D {first.dim}, of Q, K, V and O in 16 bits: "
        f"{tensors / 2**20:.0f} MiB. A call on 16-bit tensors takes its workspace besides; where "
        "Q, K (and V) are codes from the start, the codes stand in place of the tensors.",
        "",
        "|  | codes | scales, means, padding | tensors and workspace | codes in their place |",
        "|---|---|---|---|---|",
    ]
    for name, workspace in known.items():
        codes = EIGHT_BITS[name] * one
        stored = tensors - 2 * codes + workspace
        lines.append(
            f"| {name} | {codes / 2**20:.0f} MiB | {(workspace - codes) / 2**20:.1f} MiB "
            f"| {(tensors + workspace) / tensors:.0%} | {stored / tensors:.0%} |"
        )
    return lines


def clocks_text(provenance):
    told = [
        f"{name} {x['median']:.0f} ({x['min']:.0f} to {x['max']:.0f})"
        for name, x in provenance.get("clocks", {}).items()
    ]
    at_end = provenance.get("nvidia-smi at the end")
    if at_end:
        told.append(f"nvidia-smi at the end: {at_end}")
    return f" Clocks: {', '.join(told)}." if told else ""


def turns_text(provenance):
    seconds = provenance.get("seconds_a_turn")
    if not seconds:
        return ""
    return (
        f" Turns of {seconds:g} s, call behind call, of whose second half the times are: each "
        "candidate at the clocks that its own power leaves it."
    )


def portable_text(record):
    """A GPU with kernels of its own, measured with a library that had none of them."""
    kernels = {c["kernel"] for c in record.cells if c.measured and "kernel" in c}
    if kernels != {"sm80_prefill"}:
        return ""
    return " The library was built without code for this GPU alone: these are the portable kernels."


def record_section(record):
    p = record.provenance
    on = f", {p['threads']} threads, {p['isa']}" if "cpu" in p else ""
    candidate, io = record.baseline
    over = f"{candidate} {io}" if candidate == "torch" else candidate
    bandwidth = p.get("read_gb_per_s")
    lines = [
        "",
        f"## {record.machine}{on}",
        "",
        f"{p['date']}, commit {p['commit']}, torch {p['torch']}, `{record.name}`."
        + (f" Memory reads {bandwidth:.1f} GB/s in the same run." if bandwidth else "")
        + portable_text(record)
        + clocks_text(p)
        + turns_text(p),
        "",
        f"TFLOP/s unless another unit is given, and how many times as fast as {over} in the same "
        f"run. {STEPS}",
    ]
    for group, cells in record.groups().items():
        lines += group_section(group, cells, record.baseline)
    lines += sampled_errors(record) + workspaces(record)
    if record.errors:
        lines += error_section(record.errors)
    return lines


def within_columns(line):
    """The line, or several: tables, headings and pictures cannot be broken."""
    if len(line) <= COLUMNS or line[0] in "|#!":
        return [line]
    return textwrap.wrap(line, COLUMNS, break_long_words=False, break_on_hyphens=False)


def records_of(word):
    """Sections of the committed records whose machine's name has `word`."""
    return [line for r in committed() if word in r.machine for line in record_section(r)]


def records_of_cpus():
    found = [line for r in committed() if "cpu" in r.provenance for line in record_section(r)]
    return found + cpu.section() + roofline.section() + kv.section() + projection.section()


#: {file: (title, function that gives its lines)}
PAGES = {
    "cpu": ("CPUs", records_of_cpus),
    "gpu-h100": ("NVIDIA H100", lambda: records_of("H100")),
    "gpu-h200": ("NVIDIA H200", lambda: records_of("H200")),
    "gpu-decode": ("Decode on GPUs", lambda: decode.section() + paged.section()),
    "gpu-choices": (
        "Builds and choices on GPUs",
        lambda: choices.section() + variants.section() + smoothing.section() + host.section(),
    ),
    "gpu-kernels": ("Hopper's kernels", lambda: counters.section() + model.section(committed())),
    "gpu-predictions": ("GPUs that nothing was measured on", predictions.section),
    "fp4-errors": ("Errors of 4-bit floats beside SageAttention3", fp4.section),
    "kv-models": ("What a KV cache costs a language model", summary.kv_models),
    "diffusion": ("What 8-bit attention costs a diffusion model", terrain.section),
    "fashion-dit": ("8-bit attention in a diffusion transformer", fashion_dit.section),
    "training": ("Training with INT8 attention", training.section),
    "transformers-models": ("Models of transformers", transformers_models.section),
    "foreign-cases": ("Cases of other projects", foreign_cases.section),
    "wheel": ("Packages", wheel.section),
}


def page(name):
    title, lines = PAGES[name]
    head = (
        "Written by `bench/bench.py render` from `bench/results/*.json`; do not edit by hand. "
        "`bench/bench.py run` makes the records: candidates take turns in one run, medians."
    )
    whole = [f"# {title}", "", head, *lines()]
    return "\n".join(part for line in whole for part in within_columns(line)) + "\n"


def texts():
    """{path: text} of every page that holds what the records say."""
    made = {FOLDER / f"{name}.md": page(name) for name in PAGES}
    return made | {path: summary.filled(path.read_text()) for path in MIXED}


def run(args):
    stale = [
        (path, text)
        for path, text in texts().items()
        if not path.exists() or path.read_text() != text
    ]
    if not args.check:
        FOLDER.mkdir(exist_ok=True)
        for path, text in stale:
            path.write_text(text)
        return 0
    for path, _ in stale:
        print(f"{path.name} differs from bench/results: run python bench/bench.py render")
    return 1 if stale else 0
