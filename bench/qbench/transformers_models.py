"""The page of what attn_implementation="qattn" does in each class of transformers, from the record
of `tools/eval/transformers_models.py run`."""

from collections import Counter

from .record import markdown, tool_record

NAME = "transformers-models.json"
#: (verdict, what it means), in the order of the page
VERDICTS = {
    "right": "its layers came to qattn, and it gives what `eager` gives",
    "refused": "when the implementation is set, by name",
    "refused in forward": "in the first forward pass, by name",
    "wrong": "it gives something else, and `sdpa` does not",
    "differs under sdpa too": "it gives something else, as it does under `sdpa`",
    "not reached": "it gives what `eager` gives by its own attention, and says so",
    "silent": "as before, and it does not say so",
    "no attention": "nothing that qattn could compute; it says that no layer came",
    "random": "`eager` differs from itself",
    "failed": "another error",
    "not made": "the tool found no small configuration or no inputs",
}
#: of these only the number of classes is shown
COUNTED = "right", "no attention"


def text(why):
    """What stands in a cell."""
    return why.replace("|", "\\|").removeprefix("attn_implementation: ").removesuffix(
        "; use 'eager' for it"
    )


def grouped(rows):
    """[[file, classes, why]]: classes of a file whose reasons differ only in their names."""
    found = {}
    for row in rows:
        why = text(row.get("why", ""))
        for part in (f"{row['class']}: ", f"{row['class']} "):
            why = why.removeprefix(part)
        found.setdefault((row["module"], why), []).append(row["class"])
    return [[module, ", ".join(names), why] for (module, why), names in found.items()]


def counted(rows):
    """One paragraph: files and how many of their classes."""
    counts = Counter(row["module"] for row in rows)
    return ", ".join(f"{module} {count}" for module, count in counts.items()) + "."


def section():
    """Lines of docs/tables."""
    found = tool_record(NAME)
    if found is None:
        return ["No record."]
    record, p = found
    by_verdict = {name: [x for x in record["rows"] if x["verdict"] == name] for name in VERDICTS}
    made = len(record["rows"]) - len(by_verdict["not made"])
    lines = [
        f"{p['date']}, commit {p['commit']}, transformers {p['transformers']}, torch {p['torch']}, "
        f"`{NAME}` (`tools/eval/transformers_models.py run`). Small models with random weights: "
        f"{made} of {len(record['rows'])} classes could be made. Recipe f32, with padding and "
        f"without; an output differs above an NRMSE of {record['settings']['bound']:g}.",
        "",
        *markdown(
            ["", "classes", "meaning"],
            [[name, str(len(by_verdict[name])), means] for name, means in VERDICTS.items()],
        ),
    ]
    worst = max((x["error"] for x in by_verdict["right"]), default=0.0)
    lines += ["", f"The largest NRMSE of those that are right is {worst:.1e}."]
    for name, rows in by_verdict.items():
        if not rows:
            continue
        lines += ["", f"## {name[0].upper()}{name[1:]}", ""]
        if name in COUNTED:
            lines += [f"Classes by modeling file: {counted(rows)}"]
        else:
            lines += markdown(["file", "classes", "why"], grouped(rows))
    return lines
