"""What `qattn_model` says of GPUs that nothing was measured on, beside what others published.

bench/results/model-sm120.json; the instructions of machine code are of gpu-slots.json.
"""

import json

from .record import RESULTS, markdown

RECORD = RESULTS / "model-sm120.json"
#: (GPU, who, mask, D, TFLOP/s as published or read off a published picture)
PEERS = (
    ("RTX 5090", "SageAttention3, FP4", "full", 128, "1038 (its claim; 964 to 1038)"),
    ("RTX 5090", "SageAttention3, FP4", "causal", 128, "924 to 1027"),
    ("RTX 5090", "SageAttention3, FP4", "either", 64, "751 to 839"),
    ("RTX 5090", "SageAttention2, INT8 and FP8", "not said", 128, "560"),
    ("RTX 5090", "SageAttention2++, INT8 and FP8", "full", 128, "583 to 643"),
    ("RTX 5090", "SageAttention2++, INT8 and FP8", "causal", 128, "388 to 609"),
    ("RTX 5090", "FlashAttention-2, 16 bits", "either", 128, "173 to 215"),
    ("RTX PRO 5000", "SageAttention3, FP4, one user's", "full", 128, "468 kernel, 389 end to end"),
    ("RTX PRO 5000", "SageAttention2, one user's", "full", 128, "395"),
)


def shape_name(row):
    shape = row["shape"]
    return f"D {shape['dim']}, {'causal' if shape['causal'] else 'full'}"


def speeds(rows):
    """A line a recipe; TFLOP/s of the bound, where units take turns, and what binds."""
    lines = {}
    for row in rows:
        name = f"{row['recipe']} ({row['kernel']})"
        text = f"{row['tflops_in_turn']:.0f} to {row['tflops']:.0f}, {row['limit']}"
        lines.setdefault(name, {})[shape_name(row)] = text
    columns = list(dict.fromkeys(map(shape_name, rows)))
    cells = [[name, *(line.get(c, "") for c in columns)] for name, line in lines.items()]
    return markdown(["", *columns], cells)


def clocks(rows):
    full = [row for row in rows if not row["shape"]["causal"]]
    units = list(full[0]["clocks_a_tile"])
    return markdown(
        ["", *units],
        [
            [f"{row['recipe']}, D {row['shape']['dim']}",
             *(f"{row['clocks_a_tile'][unit]:.0f}" for unit in units)]
            for row in full
        ],
    )  # fmt: skip


def device(model):
    machine, rows = model["machine"], model["rows"]
    shape = rows[0]["shape"]
    rates = ", ".join(
        f"{unit} {x['a_clock']:g}" for unit, x in machine["a_clock_and_multiprocessor"].items()
    )
    return [
        "",
        f"## {machine['name']}",
        "",
        f"{machine['multiprocessors']:g} multiprocessors at {machine['hertz'] / 1e9:g} GHz, a "
        f"clock of one: {rates}; memory {machine['dram_bytes_per_second'] / 1e12:g} TB/s "
        f"({machine['source']}). B {shape['batch']}, {shape['heads_q']} heads, S {shape['keys']}.",
        "",
        "TFLOP/s predicted, and the unit that binds:",
        "",
        *speeds(rows),
        "",
        "Clocks of one multiprocessor for a tile of 128 x 128 scores:",
        "",
        *clocks(rows),
    ]


def section():
    """Lines of docs/tables."""
    lines = [
        "",
        "**These are predictions, not measurements: no kernel of this project ran on these GPUs.**",
        "",
        "The second number of a range is the bound: all units overlap, and the longest takes all "
        "the time. The first is that of the products and the longest other unit in turn; on that "
        "side kernels may be slower still, for neither number knows latencies, barriers, the tail "
        "of a grid or power. Clocks are published boost clocks, and cards run above and below "
        "them. Beside the emulator's counts stand instructions of the machine code of the loop "
        "over keys (`tools/gpu_slots.py`), of its shortest way: without masks and rescaling. "
        "tensor counts 8-bit multiply-accumulates at the rate of s8, other products by how much "
        "faster or slower the device has them. NVIDIA publishes no rates of sm_120 for lanes of "
        "conversions, EX2 and integers; those of the H200 are taken.",
    ]  # fmt: skip
    for model in json.loads(RECORD.read_text())["devices"]:
        lines += device(model)
    return lines + [
        "",
        "## What others publish",
        "",
        "TFLOP/s that others measured on their machines, read off their texts and pictures. Where "
        "one is above a bound of the same products, as FlashAttention-2's 215 above that of bf16, "
        "the card ran above its boost clock:",
        "",
        *markdown(["", "", "mask", "D", "TFLOP/s"], [[*map(str, row)] for row in PEERS]),
    ]
