"""K's mean before it is quantised: one a sequence, found in a pass of its own, or one a tile.

A mean of each tile of keys would save the first reading of K, but it has to come back in the
scores, exactly: each query times each tile's mean, in 16 bits, for the attention kernel to add.
Measured: the quantisation of Q, K and V with the mean of sequences and without any, which one of
tiles cannot beat, and the products of Q with a mean for every 128 keys, without the addition.
"""

from . import shapes, timing
from .decode import clocks_text, record_shapes
from .record import RESULTS, markdown, measured_on, tool_record

NAME = "smoothing-h200.json"
HEADS, DIM, TILE = 32, 128, 128
RECIPE = "int8_full"
CALLS = {"mean of sequences": RECIPE, "no mean": RECIPE + "+no_smooth_k"}
CORRECTION = "q times means of tiles"


def add_arguments(parser):
    parser.add_argument("--library", required=True, help="libattention_bench.so")
    parser.add_argument(
        "--shapes", default="16:1024,8:2048,4:4096,2:8192,1:16384,1:32768", help="B:S,..."
    )
    parser.add_argument("--seconds", type=float, default=2, help="for each shape")
    parser.add_argument("--rounds", type=int, default=60, help="at most")
    parser.add_argument("--commit", help="where the tree is no git checkout")
    parser.add_argument("-o", "--output", default=str(RESULTS / NAME))


def correction(torch, q):
    """Products of every query with the mean of every tile, (B, H, S, tiles) in bf16."""
    batch, tokens = q.shape[:2]
    heads_first = q.transpose(1, 2).contiguous()  # or a batch would be copied in each call
    means = torch.randn(batch, HEADS, DIM, -(-tokens // TILE), device=q.device, dtype=q.dtype)
    out = torch.empty(batch, HEADS, tokens, means.shape[-1], device=q.device, dtype=q.dtype)
    return lambda: torch.matmul(heads_first, means, out=out)


def measure(torch, device, args, batch, tokens):
    from . import run as speed

    shape = shapes.Shape("smoothing", batch, HEADS, HEADS, tokens, tokens, DIM, False)
    tensors = speed.random_tensors(shape, "bf16", device.device)
    made = {name: device.candidate(r, "bf16", shape, tensors) for name, r in CALLS.items()}
    calls = {}
    for name, candidate in made.items():
        _, fault = speed.check(device, candidate, tensors, shape)
        if fault is not None:
            raise ValueError(f"{name}: {fault}")
        calls[name] = candidate.steps["quantise"]
    calls["attention"] = made["mean of sequences"].steps["kernel"]
    calls[CORRECTION] = correction(torch, tensors[0])
    times = timing.interleaved(device.clock, calls, args.seconds, args.rounds)
    for candidate in made.values():
        candidate.close()
    found = {name: timing.summary(x) for name, x in times.items()}
    return {"batch": batch, "tokens": tokens, "times": found}


def run(args):
    import torch

    from . import candidates

    timing.check_limits(args.seconds, args.rounds)
    device = candidates.machine("cuda", args.library, None)
    runs = record_shapes(torch, args, lambda b, s: measure(torch, device, args, b, s))
    print("\n".join(tables(runs)))
    return 0


def tables(runs):
    rows = []
    for one in runs:
        us = {name: x["median_ms"] * 1e3 for name, x in one["times"].items()}
        saved = us["mean of sequences"] - us["no mean"]
        rows.append([
            f"B {one['batch']}, {one['tokens']}",
            *(f"{us[name]:.0f} us" for name in (*CALLS, "attention")),
            f"{saved:.0f} us",
            f"{us[CORRECTION]:.0f} us" if CORRECTION in us else "-",
        ])  # fmt: skip
    head = ["", *CALLS, "attention", "the mean costs", CORRECTION]
    return markdown(head, rows)


def section():
    """Lines of docs/tables."""
    names = [path.name for path in sorted(RESULTS.glob("smoothing-*.json"))]
    if not names:
        return []
    lines = [
        "",
        "## K's mean, a sequence or a tile",
        "",
        f"`bench/bench.py smoothing`: Q, K and V of `{RECIPE}`, heads {HEADS}, D {DIM}, "
        "quantised with K's mean over its sequence, which reads K twice, and with none. A mean of "
        f"each {TILE} keys would save at most the difference, and cost at least the products of Q "
        "with those means, in bf16, which the attention would have to read and add besides.",
    ]
    for name in names:
        record, p = tool_record(name)
        left_out = f" Left out: {p['left_out']}." if "left_out" in p else ""
        about = f"{measured_on(p)}, `{name}`.{left_out}{clocks_text(p)}"
        lines += ["", about, "", *tables(record["runs"])]
    return lines
