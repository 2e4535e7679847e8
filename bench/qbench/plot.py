"""docs/plots from bench/results: the pictures that pages show, as SVG. `--all` draws every one.

The same record gives the same bytes of SVG with the same matplotlib: no date, no random ids.
"""

import io
import statistics

from . import fashion_dit, summary
from .record import ROOT, baselines, committed, tool_record

PLOTS = ROOT / "docs" / "plots"
#: What pages show, beside the picture of qbench/summary.py.
SHOWN = ("gpu-h200-turns-d128-speedup", "gpu-h200-prefill-models")
SUMMARY = "speed-and-error"
#: One colour a candidate, whatever else is in the record. Colours that colour-blind people tell
#: apart (Okabe and Ito).
COLOURS = {
    "torch flash": "#999999",
    "torch cudnn": "#000000",
    "bf16": "#56B4E9",
    "f16": "#0072B2",
    "int8": "#E69F00",
    "int8_full": "#D55E00",
    "int8_fp8": "#CC79A7",
    "fp8": "#009E73",
    "fp8_p16": "#F0E442",
}
MARKERS = {"e2e": "o", "kernel": "^", "cached": "s"}
DASHES = {"e2e": "-", "kernel": "--", "cached": ":"}
SWEEP = "mha"  # the group with a length on its axis
MEASURES = {"speed": "TFLOP/s", "speedup": "times as fast as torch cudnn"}
OTHERS = "times as fast as the faster of torch's back ends"
RIVAL = ("torch cudnn", "bf16")
STYLE = {
    "svg.hashsalt": "qattn",
    "svg.fonttype": "none",
    "figure.dpi": 100,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
}


def add_arguments(parser):
    parser.add_argument("--check", action="store_true", help="fail if a plot differs")
    parser.add_argument("--into", default=PLOTS, help="another folder than docs/plots")
    parser.add_argument("--all", action="store_true", help="what no page shows, too")


def pyplot():
    """Imported late: the page is rendered where matplotlib is not."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams.update(STYLE)
    import matplotlib.pyplot as plt

    return plt


def speeds(cells):
    return [c for c in cells if c.measured and c["step"] in DASHES and c["candidate"] in COLOURS]


def value_of(cell, kind, base):
    if kind == "speed":
        return cell["tflops"]
    return base[cell.shape.name] / cell["median_ms"] if cell.shape.name in base else None


def sweep_figure(cells, kind):
    """A panel a head dimension and mask, over the sequence's length."""
    plt = pyplot()
    panels = sorted({(c.shape.dim, c.shape.causal) for c in cells}, key=lambda p: (-p[0], p[1]))
    figure, axes = plt.subplots(1, len(panels), figsize=(3.4 * len(panels), 3.6), squeeze=False)
    base = baselines(cells, RIVAL)
    for axis, (dim, causal) in zip(axes[0], panels):
        members = [c for c in cells if (c.shape.dim, c.shape.causal) == (dim, causal)]
        for label in dict.fromkeys(c.label for c in members):
            line = sorted((c for c in members if c.label == label), key=lambda c: c.shape.keys)
            points = [(c.shape.keys, value_of(c, kind, base)) for c in line]
            points = [p for p in points if p[1] is not None]
            if points:
                axis.plot(
                    *zip(*points),
                    DASHES[line[0]["step"]],
                    color=COLOURS[line[0]["candidate"]],
                    marker=".",
                    label=label,
                )
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted({c.shape.keys for c in members}))
        axis.xaxis.set_major_formatter(lambda x, _: f"{x / 1024:g}K")
        axis.set_ylim(bottom=0)
        axis.set_title(f"D {dim}, {'causal' if causal else 'full'}")
        axis.set_xlabel("S")
    axes[0][0].set_ylabel(MEASURES[kind])
    handles = {}
    for axis in axes[0]:
        handles |= dict(zip(*reversed(axis.get_legend_handles_labels())))
    columns = min(6, 2 * len(panels))
    figure.legend(handles.values(), handles, loc="lower center", ncols=columns, frameon=False)
    figure.tight_layout(rect=(0, 0.06 + 0.05 * -(-len(handles) // columns), 1, 1))
    return figure


def others_figure(cells):
    """Shapes of models, one a line: speed-ups over the faster of torch's back ends there."""
    plt = pyplot()
    base = best_torch(cells)
    shapes = [s for s in dict.fromkeys(c.shape for c in cells) if s.name in base]
    figure, axis = plt.subplots(figsize=(8, 1.6 + 0.24 * len(shapes)))
    for label in dict.fromkeys(c.label for c in cells):
        line = [c for c in cells if c.label == label and c.shape.name in base]
        if line:
            axis.plot(
                [base[c.shape.name] / c["median_ms"] for c in line],
                [shapes.index(c.shape) for c in line],
                MARKERS[line[0]["step"]],
                color=COLOURS[line[0]["candidate"]],
                label=label,
            )
    axis.set_yticks(range(len(shapes)), [s.name for s in shapes], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(left=0)
    axis.axvline(1, color="#bbbbbb", zorder=0)
    axis.set_xlabel(OTHERS)
    figure.legend(*axis.get_legend_handles_labels(), loc="lower center", ncols=5, frameon=False)
    figure.tight_layout(rect=(0, 0.9 / figure.get_figheight(), 1, 1))
    return figure


def best_torch(cells):
    """Milliseconds of the faster back end by shape."""
    best = {}
    for c in cells:
        if c["candidate"].startswith("torch "):
            best[c.shape.name] = min(c["median_ms"], best.get(c.shape.name, c["median_ms"]))
    return best


def pareto_points(record):
    """{panel: [(candidate, step, speed-up, error)]}; a panel is a family of inputs.

    Speed: the geometric mean of the speed-ups over cuDNN in the sweep at the largest head
    dimension. Error: of the family, or where a record has none, what was timed.
    """
    cells = speeds(record.groups().get(SWEEP, []))
    base = baselines(cells, RIVAL)
    dim = max((c.shape.dim for c in cells), default=0)
    ratios, timed = {}, {}
    for c in cells:
        if c.shape.dim == dim and c.shape.name in base:
            place = (c["candidate"], c["step"])
            ratios.setdefault(place, []).append(base[c.shape.name] / c["median_ms"])
            if c.get("nrmse") is not None:
                timed[c["candidate"]] = max(timed.get(c["candidate"], 0), c["nrmse"])
    families = {}
    for x in record.errors:
        if x["dim"] == dim and "nrmse" in x:
            families.setdefault(x["family"], {})[x["candidate"]] = x["nrmse"]
    panels = families or {"N(0,1), as timed": timed}
    return {
        panel: [
            (candidate, step, statistics.geometric_mean(values), errors[candidate])
            for (candidate, step), values in ratios.items()
            if candidate in errors
        ]
        for panel, errors in panels.items()
    }


def front(points):
    """What no other point beats in both speed and error, by speed."""
    return sorted(
        (p for p in points if not any(q[2] >= p[2] and q[3] <= p[3] and q != p for q in points)),
        key=lambda p: p[2],
    )


def pareto_figure(record):
    plt = pyplot()
    panels = pareto_points(record)
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(3.4 * columns + 1, 3.2 * rows), squeeze=False
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (panel, points) in zip(axes.flat, panels.items()):
        best = front(points)
        axis.plot([p[2] for p in best], [p[3] for p in best], color="#bbbbbb", zorder=0)
        for candidate, step, ratio, error in points:
            axis.plot(ratio, error, MARKERS[step], color=COLOURS[candidate])
            axis.annotate(
                candidate, (ratio, error), xytext=(4, 4), textcoords="offset points", fontsize=7
            )
        axis.set_yscale("log")
        axis.margins(x=0.25)
        axis.set_title(panel)
        axis.set_xlabel(MEASURES["speedup"])
        axis.set_ylabel("NRMSE")
    figure.text(0.01, 0.01, "dots: e2e; triangles: kernel; line: the Pareto front", fontsize=8)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    return figure


def figures(record):
    """{file name without its end: (caption, function that draws)}."""
    cells = speeds(record.groups().get(SWEEP, []))
    others = [c for c in speeds(record.cells) if c.shape.group != SWEEP]
    stem = record.name.removesuffix(".json")
    machine, drawn = record.machine, {}
    if baselines(cells, RIVAL):
        for kind, measure in MEASURES.items():
            drawn[f"{stem}-{kind}"] = (
                f"{machine}: {measure}",
                lambda kind=kind: sweep_figure(cells, kind),
            )
    if best_torch(others):
        drawn[f"{stem}-models"] = (f"{machine}: {OTHERS}", lambda: others_figure(others))
    if any(pareto_points(record).values()):
        caption = f"{machine}: error against speed"
        drawn[f"{stem}-pareto"] = (caption, lambda: pareto_figure(record))
    return drawn


def summary_figure():
    """Error against speed on a GPU; a line joins a recipe's two ways of giving tensors."""
    plt = pyplot()
    points, keys = summary.gpu_points(), summary.LONG[-1]
    figure, axis = plt.subplots(figsize=(6.4, 3.8))
    for name in summary.ordered(points):
        p, colour = points[name], COLOURS[name]
        steps = [step for step in ("e2e", "kernel") if (step, keys) in p]
        at = [p[step, keys] for step in steps]
        axis.plot(at, [p["nrmse"]] * len(at), "-", color=colour, linewidth=1)
        for step, x in zip(steps, at):
            axis.plot(x, p["nrmse"], MARKERS[step], color=colour)
        below = name in ("bf16", "int8_fp8")
        axis.annotate(
            summary.NAMES.get(name, f"qattn {name}"),
            (at[0], p["nrmse"]),
            xytext=(0, -15 if below else 7),
            textcoords="offset points",
            ha="center",
        )
    axis.set_yscale("log")
    axis.set_ylim(1.4e-3, 1.2e-1)
    axis.set_xlim(0.35, 1.8)
    axis.set_xlabel(f"times as fast as cuDNN's bf16 attention, {keys // 1024}K tokens")
    axis.set_ylabel("relative error (NRMSE)")
    axis.axvline(1, color="#bbbbbb", zorder=0)
    figure.text(0.01, 0.01, "dots: 16-bit tensors in and out; triangles: codes given", fontsize=8)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    return figure


#: (recipe, policy) of the curves: where the name stands, as (step, dB above the curve)
PSNR_CURVES = {
    ("torch", ""): (9, 1.2),
    ("int8_full", "table"): (9.3, -2.3),
    ("fp8", "table"): (7, -3),
}
LESS_CURVES = {
    ("int8", "dynamic"): (12.5, 0.22),
    ("int8", "table"): (14.3, 0.27),
    ("int8_full", "dynamic"): (14, -0.16),
    ("int8_full", "table"): (6.5, -1.0),
    ("int8_full", "late"): (17.5, 0.09),
}
POLICY_DASHES = {"": "-", "dynamic": "-", "table": "--", "late": ":"}


def psnr_figure(record):
    """PSNR of one step, by step; and how far recipes are below torch's bf16."""
    plt = pyplot()
    rows = {(x["recipe"], x["policy"]): x["psnr"] for x in record["paired"]}
    torch_own = rows["torch", ""]
    figure, axes = plt.subplots(1, 2, figsize=(8.4, 3.6))
    panels = ((PSNR_CURVES, [0] * len(torch_own)), (LESS_CURVES, torch_own))
    for axis, (curves, base) in zip(axes, panels):
        for (recipe, policy), (at, above) in curves.items():
            line = [x - y for x, y in zip(rows[recipe, policy], base)]
            colour = "#000000" if recipe == "torch" else COLOURS[recipe]
            steps = range(1, len(line) + 1)
            axis.plot(steps, line, POLICY_DASHES[policy], color=colour)
            name = "torch, bf16" if recipe == "torch" else f"{recipe}, {policy}"
            axis.text(at, line[int(at) - 1] + above, name, color=colour, ha="center", va="center")
        axis.set_xticks([1, *range(5, len(base) + 1, 5)])
        axis.margins(y=0.09)
        axis.set_xlabel("step")
    axes[0].set_ylabel("PSNR of one step, dB")
    axes[1].set_ylabel("less torch's bf16, dB")
    figure.tight_layout()
    return figure


def distance_figure(record):
    """Fréchet distance by way; the band is what torch's bf16 has from other noise."""
    plt = pyplot()
    found = fashion_dit.distances(record)
    seeds = {seed: x["distance"] for seed, x in found.pop(("torch", "")).items()}
    found = {way: x[0]["distance"] for way, x in found.items() if 0 in x}
    figure, axis = plt.subplots(figsize=(6.4, 1.4 + 0.25 * len(found)))
    low, high = fashion_dit.torch_band(record)
    noises = ", ".join(map(str, sorted(seeds)))
    axis.axvspan(low, high, color="#dddddd", zorder=0)
    for seed, x in seeds.items():
        axis.axvline(x, color="#000000", linewidth=1)
        axis.annotate(f"{seed}", (x, 1), xycoords=("data", "axes fraction"), xytext=(0, 3),
                      textcoords="offset points", ha="center")  # fmt: skip
    for y, ((recipe, _), x) in enumerate(found.items()):
        axis.plot(x, y, "o", color=COLOURS[recipe])
    axis.text((low + high) / 2, (len(found) - 1) / 2, f"torch's bf16\nfrom noises {noises}",
              ha="center", va="center")  # fmt: skip
    axis.set_yticks(range(len(found)), [f"{recipe}, {policy}" for recipe, policy in found])
    axis.invert_yaxis()
    axis.margins(y=0.08)
    axis.set_xlabel("Fréchet distance from the training images; dots: noise 0")
    figure.tight_layout()
    return figure


def dit_drawings():
    """As drawings(), of the diffusion transformer's record."""
    if (found := tool_record(fashion_dit.RECORD)) is None:
        return {}
    return {
        "fashion-dit-psnr": lambda: psnr_figure(found[0]),
        "fashion-dit-distance": lambda: distance_figure(found[0]),
    }


def drawings(everything=False):
    """{file name without its end: function that draws} of what pages show, or of all there is."""
    drawn = {SUMMARY: summary_figure} | dit_drawings()
    for record in committed():
        for name, (_, draw) in figures(record).items():
            if everything or name in SHOWN:
                drawn[name] = draw
    return drawn


def encode(figure):
    stream = io.BytesIO()
    figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    return stream.getvalue()


def run(args):
    import pathlib

    folder, stale, plt = pathlib.Path(args.into), [], pyplot()
    for name, draw in drawings(args.all).items():
        figure = draw()
        svg = encode(figure)
        plt.close(figure)
        path = folder / f"{name}.svg"
        if not args.check:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(svg)
        elif not path.exists() or path.read_bytes() != svg:
            stale.append(path.name)
    for name in stale:
        print(f"{name} differs from bench/results: run python bench/bench.py plot")
    return 1 if stale else 0
