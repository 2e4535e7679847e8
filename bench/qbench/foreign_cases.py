"""The page of other projects' attention cases, from the records of `tools/eval/onnx_cases.py` and
`tools/eval/ggml_cases.py`."""

from .record import markdown, tool_record

DOORS = {"attention": "`qattn.attention`", "torch": "`qattn.torch`"}
RECORDS = {"onnx-cases.json": "ONNX", "ggml-cases.json": "ggml"}
VERDICTS = "right", "wrong", "refused"


def about_onnx(p):
    differing = ", ".join(p["differing"]) if p.get("differing") else "none"
    return (
        f"The cases of the operator Attention that onnx {p['onnx']} generates, opset 23 to 25. "
        "Recipe f32 is held to each case's own tolerance of the expected output, the others to "
        "their bound against float64. Expected outputs that float64, rounded to their format, "
        f"would miss: {differing}. Inputs lie within 0 and 1: a softcap or a bias there moves a "
        "result by less than the bounds of 8 bits, so that f32 alone tells these."
    )


def about_ggml(p):
    grid = "The whole grid" if p["whole"] else "A part of the grid"
    return (
        f"{grid} of FLASH_ATTN_EXT in llama.cpp's `tests/test-backend-ops.cpp`, in which each kind "
        "of call (head sizes, heads, types, what is asked for) meets each number of queries and of "
        "keys, with inputs of our own. q is float32, K and V have the type that is named. All "
        f"recipes are held to their bound against float64; ggml's own bound is {p['ggml']:g} as an "
        "NRMSE."
    )


def verdict_text(found):
    """Of a door in a row of a record: one verdict, or counts by recipe."""
    if isinstance(found, str):
        return found
    if set(found) <= set(VERDICTS):
        return ", ".join(f"{count} {what}" for what, count in found.items())
    return "; ".join(f"{recipe} {verdict_text(x)}" for recipe, x in found.items())


def holds(found, what):
    """Is there such a verdict in it?"""
    if isinstance(found, str):
        return found == what
    return what in found or any(holds(x, what) for x in found.values() if isinstance(x, dict | str))


def in_short(names):
    """Names side by side; of many that begin with the same two words these, and how many."""
    begun = {}
    for name in names:
        begun.setdefault(" ".join(name.split()[:2]), []).append(name)
    many = {start: f"{start} ({len(each)} kinds)" for start, each in begun.items() if len(each) > 3}
    return ", ".join(many.get(start) or ", ".join(each) for start, each in begun.items())


def named(rows, what):
    """The table of rows that have such a verdict: rows that say the same are one."""
    same = {}
    for row in rows:
        if any(holds(row[door], what) for door in DOORS):
            said = tuple(verdict_text(row[door]) for door in DOORS)
            why = "; ".join(row["why"]).replace("|", "\\|")
            same.setdefault((*said, why), []).append(row)
    return markdown(
        ["cases", "count", *DOORS.values(), "why"],
        [
            [in_short(x["case"] for x in each), str(sum(x["runs"] for x in each)), *said, why]
            for (*said, why), each in same.items()
        ],
    )


def record_section(name, title):
    found = tool_record(name)
    if found is None:
        return ["", f"## {title}", "", "No record."]
    record, p = found
    runs = sum(row["runs"] for row in record["rows"])
    about = about_onnx(p) if "onnx" in p else about_ggml(p)
    lines = ["", f"## {title}", "", f"{p['date']}, commit {p['commit']}, {p['cpu']}, {p['isa']}, "
             f"torch {p['torch']}, `{name}`. {about} {runs} cases."]  # fmt: skip
    lines += ["", *markdown(
        ["door", "recipe", *VERDICTS, "largest NRMSE of the right"],
        [
            [door, recipe, *(str(x[what]) for what in VERDICTS), f"{x['largest']:.1e}"]
            for door, recipes in record["totals"].items()
            for recipe, x in recipes.items()
        ],
    )]  # fmt: skip
    for what in ("wrong", "refused"):
        if any(x[what] for recipes in record["totals"].values() for x in recipes.values()):
            lines += ["", f"### {title}: {what}", "", *named(record["rows"], what)]
    if record["not_run"]:
        told = (f"- {count} {what}" for what, count in record["not_run"].items())
        lines += ["", f"### {title}: not run", "", *told]
    return lines


def section():
    """Lines of docs/tables."""
    intro = (
        "What qattn makes of the attention cases that other projects test themselves with: right, "
        "wrong, or refused in its own words. The doors: `qattn.attention` on numpy arrays, and "
        "`qattn.torch` by `sdpa` or, for sinks, softcap and windows, the operator behind it. torch "
        "has one dtype a call: K, V and masks are widened to q's. The bound of a recipe is twice "
        "its error on N(0,1), with the output's rounding: `loose` of `tests/python/cases.py`."
    )
    return [intro, *(x for name, title in RECORDS.items() for x in record_section(name, title))]
