"""What plans choose for few queries beside other choices: packed heads and split keys.

The record is `bench.py run --shapes few` with recipes as they are and with "+splits=N", "+pack=N".
"""

from . import shapes
from .record import RESULTS, Record, markdown

NAME = "choices-h200.json"


def step_of(cells):
    """The attention kernels alone where quantisation is a step."""
    return "kernel" if any(c["step"] == "kernel" for c in cells) else "e2e"


def choice_text(cell):
    return f"{cell['pack_gqa']} x {cell['splits']}, {cell['median_ms'] * 1e3:.1f} us"


def row_of(shape, recipe, cells):
    """Of a shape and recipe: the plan's choice, the fastest of all, what that would save."""
    step = step_of(cells)
    measured = [c for c in cells if c.measured and c["step"] == step]
    own = [c for c in measured if c["candidate"] == recipe]
    kind = f"{shape.queries} of {shape.keys}, B {shape.batch}, {shape.heads_q}/{shape.heads_kv}"
    if not own:
        return [kind, recipe, "-", "-", "-"]
    best = min(measured, key=lambda c: c["median_ms"])
    saves = 1 - best["median_ms"] / own[0]["median_ms"]
    return [kind, recipe, choice_text(own[0]), choice_text(best), f"{100 * saves:.0f} %"]


def rows(record):
    found = {}
    for cell in record.cells:
        if not cell["candidate"].startswith("torch"):
            key = (cell.shape, cell["candidate"].split("+")[0])
            found.setdefault(key, []).append(cell)
    return [row_of(shape, recipe, cells) for (shape, recipe), cells in found.items()]


def section():
    """Lines of docs/tables."""
    path = RESULTS / NAME
    if not path.exists():
        return []
    record = Record.load(path)
    p = record.provenance
    head = ["queries of keys, heads", "recipe", "the plan's", "the fastest", "it would save"]
    return [
        "",
        "## What plans choose for few queries",
        "",
        f"{p['date']}, commit {p['commit']}, {record.machine}, `{NAME}` (`bench/bench.py run "
        f"--shapes few`), D {shapes.GROUPS['few'][0].dim}: packed heads x splits of the keys, and "
        "the time of the attention kernels, which the combination is part of.",
        "",
        *markdown(head, rows(record)),
    ]
