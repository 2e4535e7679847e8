"""Table of tools/eval/train_byte_model.py: losses of models trained with INT8 attention."""

from .record import markdown, tool_record

RECORD = "training-h100.json"


def section():
    """Lines of docs/tables."""
    if (found := tool_record(RECORD)) is None:
        return []
    record, p = found
    model, shape = record["model"], record["model"]["shape"]
    seeds = sorted({row["seed"] for row in record["rows"]})
    rows = []
    for way, x in record["summary"].items():
        steps = x.get("steps_over_torch")
        rows.append([
            way,
            f"{x['held_out']:.4f}",
            f"{x['spread']:.4f}",
            f"{x['over_torch']:+.4f} ({x['apart']:+.4f})",
            "-" if steps is None else f"{steps:.3f}",
        ])  # fmt: skip
    head = ["attention", "loss held out", "spread", "less torch's (furthest seed)", "steps"]
    return [
        "",
        "## A language model of bytes",
        "",
        f"{p['date']}, commit {p['commit']}, {p['device']}, torch {p['torch']}, {p['dtype']}, "
        f"`{RECORD}`, by `tools/eval/train_byte_model.py`: {model['parameters'] / 1e6:.1f} million "
        f"parameters, {shape['steps']} steps of {shape['batch']} sequences of {shape['context']} "
        f"bytes of the {model['text']['source']}, {len(seeds)} seeds, equal data in equal order.",
        "",
        "torch: its own attention in bfloat16. int8: `recipe=\"int8\"` forward and backward. "
        "detached: the same, with Q and K cut off from the gradient, which must fail. Losses are "
        "nats a byte of text that no training has seen, means over seeds. Steps: to within 2 % of "
        "where torch ends with the same seed, over torch's.",
        "",
        *markdown(head, rows),
    ]
