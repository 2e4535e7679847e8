"""`qattn_model` beside what was measured: bench/results/model-*.json and the machine's records.

The times come from the records, not from the model's file: a new record needs no new model.
"""

import dataclasses
import json

from .record import RESULTS, markdown
from .shapes import Shape


def models():
    """Those of one machine, whose measurements stand beside them; others: predictions.py."""
    found = [
        (path.name, json.loads(path.read_text())) for path in sorted(RESULTS.glob("model-*.json"))
    ]
    return [(name, model) for name, model in found if "machine" in model]


def find(row, record):
    """Milliseconds of what the row predicts; None if the record does not have it."""
    wanted = Shape("model", **row["shape"])
    for cell in record.cells:
        if (
            cell.measured
            and dataclasses.replace(cell.shape, group="model") == wanted
            and (cell["candidate"], cell["step"]) == (row["recipe"], row["step"])
            # Records of before kernels were named are of the best, as the model's rows.
            and cell.get("kernel", row["kernel"]) == row["kernel"]
        ):
            return cell["median_ms"]
    return None


def row_name(row):
    shape = row["shape"]
    mask = "causal" if shape["causal"] else "full"
    heads = "" if shape["heads_q"] == shape["heads_kv"] else (
        f", heads {shape['heads_q']}/{shape['heads_kv']}")  # fmt: skip
    if is_few(row):
        mask = f"{shape['queries']} query" + ("" if shape["queries"] == 1 else "s")
    return f"{row['recipe']} ({row['kernel']}), D {shape['dim']}{heads}, {mask}"


def is_few(row):
    return row["shape"]["queries"] < row["shape"]["keys"]


def text_of(row, record):
    microseconds, measured = row["predicted_ms"] * 1e3, find(row, record)
    text = f"{microseconds:.0f} us {row['limit']}"
    return text if measured is None else f"{text}; {measured / row['predicted_ms']:.2f}x"


def column(row):
    shape = Shape("model", **row["shape"])
    return f"B {shape.batch}, {shape.keys} keys" if is_few(row) else f"S {shape.keys}"


def clocks_table(rows):
    """A line a recipe, kernel and head dimension: the mask changes no whole tile."""
    units = list(rows[0]["clocks_a_tile"])
    lines = {}
    for row in rows:
        name = f"{row['recipe']} ({row['kernel']}), D {row['shape']['dim']}"
        if is_few(row):
            name += ", few queries"
        if row["block_queries"] > 128:
            name += f", {row['block_queries']} queries a block"
        lines.setdefault(name, [f"{row['clocks_a_tile'][unit]:.0f}" for unit in units])
    return markdown(["", *units], [[name, *cells] for name, cells in lines.items()])


def bounds_table(rows, record):
    columns = list(dict.fromkeys(column(row) for row in rows))
    lines = {}
    for row in rows:
        lines.setdefault(row_name(row), {})[column(row)] = text_of(row, record)
    cells = [[name, *(line.get(c, "") for c in columns)] for name, line in lines.items()]
    return markdown(["", *columns], cells)


def section(records):
    """Lines of docs/tables."""
    lines = []
    for name, model in models():
        machine = model["machine"]
        record = next((r for r in records if r.machine == machine["name"]), None)
        if record is None:
            raise ValueError(f"{name}: no record of {machine['name']} to compare with")
        rates = ", ".join(
            f"{unit} {x['a_clock']:g}" for unit, x in machine["a_clock_and_multiprocessor"].items()
        )
        lines += [
            "",
            f"## Predicted against measured, {machine['name']}",
            "",
            f"`qattn_model` counts what a kernel does in the emulator and divides by what the "
            f"machine does: {machine['multiprocessors']:g} multiprocessors at "
            f"{machine['hertz'] / 1e9:g} GHz, a clock of one: {rates}; memory "
            f"{machine['dram_bytes_per_second'] / 1e12:g} TB/s ({machine['source']}). The longest "
            "unit bounds the time from below: units overlap at best, and additions and "
            "multiplications that kernels write as operators of C++ are not counted. "
            f"`{name}`, beside `{record.name}`.",
            "",
            "Clocks of one multiprocessor for a tile of 128 x 128 scores:",
            "",
            *clocks_table(model["rows"]),
            "",
            "The bound, its unit, and how many times as long the kernel took:",
            "",
            *bounds_table([row for row in model["rows"] if not is_few(row)], record),
            "",
            "Of few queries, with the combination of one block's parts:",
            "",
            *bounds_table([row for row in model["rows"] if is_few(row)], record),
        ]
    return lines
