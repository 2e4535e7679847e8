"""Tables of tools/eval/terrain.py: images of a diffusion model by recipe and scale policy."""

from .record import markdown, tool_record

RECORD = "diffusion-terrain.json"
POLICIES = {
    "dynamic": "dynamic",
    "table": "table",
    "between": "table of other sigmas",
    "max": "one maximum",
    "law": "s ~ sigma",
}


def psnr_table(rows):
    """A line a recipe: dB, and the worst image's."""
    by_place = {(x["recipe"], x["policy"]): x for x in rows}
    lines = []
    for recipe in dict.fromkeys(x["recipe"] for x in rows):
        cells = [by_place.get((recipe, policy)) for policy in POLICIES]
        lines.append([recipe, *(f"{x['psnr']:.1f} ({x['worst']:.1f})" if x else "" for x in cells)])
    return markdown(["", *POLICIES.values()], lines)


def clipped_table(rows):
    """A line a recipe and policy: clipped codes, and where most of them are."""
    lines = []
    for x in rows:
        if "clipped" not in x:
            continue
        most = x["most_clipped"]
        place = f"{most['codes']} in {most['layer']}, step {most['step']}" if most else ""
        counts = (f"{n}" for n in x["clipped"])
        share = f"{1e6 * sum(x['clipped']) / x['codes']:.1f}"
        lines.append([f"{x['recipe']}, {POLICIES[x['policy']]}", *counts, share, place])
    return markdown(["", "of Q", "of K", "of V", "of a million", "the most"], lines)


def section():
    """Lines of docs/tables."""
    found = tool_record(RECORD)
    if found is None:
        return []
    record, p = found
    e, m, moved = record["evaluated"], record["model"], record["maxima"]
    images = e["images"] * len(e["seeds"])
    maxima = ", ".join(
        f"{role.upper()} {x['median']:.2f}x ({x['worst']:.2f}x)" for role, x in moved.items()
    )
    return [
        "",
        f"## {m['package']}, {len(e['sigmas'])} steps",
        "",
        f"{p['date']}, commit {p['commit']}, {p['cpu']}, {p['isa']}, torch {p['torch']}, "
        f"`{RECORD}`, by `tools/eval/terrain.py`: a consistency U-Net with {m['attentions']} "
        f"self-attentions, all else in float32; sigmas {', '.join(f'{x:g}' for x in e['sigmas'])}; "
        + (f"{images} images." if images > 1 else "one image."),
        "",
        "PSNR of the final image against float32's own sampling, in dB, the mean over images and "
        f"the worst. Static scales with a margin of {e['margin']}, calibrated on other noise: a "
        "table by step; a table calibrated at sigmas "
        f"{', '.join(f'{x:g}' for x in e['between'])} and interpolated; one maximum of all steps; "
        f"and the scale of step {e['reference']} times sigma over its sigma.",
        "",
        *psnr_table(record["rows"]),
        "",
        "How many times as large as at the smallest step the largest |Q|, |K| less its mean and "
        f"|V| are at the largest, over layers and heads, median and worst: {maxima}. Sigma: "
        f"{max(e['sigmas']) / min(e['sigmas']):.0f}x.",
        "",
        "Codes that static scales clipped:",
        "",
        *clipped_table(record["rows"]),
    ]
