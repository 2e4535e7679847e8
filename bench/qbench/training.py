"""Tables of tools/eval/train_byte_model.py: losses of models trained with INT8 attention."""

import collections

from .record import markdown, tool_record

RECORD = "training-h100.json"


def seeds_of(record):
    """{way: how many trainings it has}."""
    return collections.Counter(row["attention"] for row in record["rows"])


def loss_table(record, digits=4):
    """A line a way of attention."""
    rows = []
    for way, x in record["summary"].items():
        steps = x.get("steps_over_torch")
        rows.append([
            way,
            f"{seeds_of(record)[way]}",
            f"{x['held_out']:.{digits}f}",
            f"{x['spread']:.{digits}f}",
            f"{x['over_torch']:+.{digits}f} ({x['apart']:+.{digits}f})",
            "-" if steps is None else f"{steps:.3f}",
        ])  # fmt: skip
    head = ["attention", "seeds", "loss held out", "spread", "less torch's (furthest seed)"]
    return markdown([*head, "steps"], rows)


def section():
    """Lines of docs/tables."""
    if (found := tool_record(RECORD)) is None:
        return []
    record, p = found
    model, shape = record["model"], record["model"]["shape"]
    seeds = sorted({row["seed"] for row in record["rows"]})
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
        *loss_table(record),
    ]
