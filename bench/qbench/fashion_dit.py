"""Tables of tools/eval/fashion_dit.py: a diffusion transformer by recipe and scale policy."""

from .record import markdown, tool_record
from .training import loss_table, seeds_of

RECORD, TRAINING = "fashion-dit.json", "fashion-dit-training.json"
#: What is asked of the tool beside what a record has: said where a table lacks it.
WANTED = (("float32", "", 0),)
SEEDS = 3  # of each way of fine-tuning
STEPS_SHOWN = 5
SLOWER = 1.2  # times that are worth a sentence
MISSING = "not measured"
NAMES = {"torch": "torch, bf16", "torch cudnn": "torch's cuDNN, bf16", "bf16": "`bf16`"}


def name_of(recipe, policy=""):
    if policy:
        return f"`{recipe}`, {policy}"
    return NAMES.get(recipe, recipe)


def distances(record):
    """{(recipe, policy): {seed of the noise: row}}, in the order of record["paired"]."""
    found = {(x["recipe"], x["policy"]): {} for x in record["paired"]}
    for x in record["rows"]:
        found.setdefault((x["recipe"], x["policy"]), {})[x["seed"]] = x
    return {way: by_seed for way, by_seed in found.items() if by_seed}


def torch_band(record):
    """(smallest, largest) distance of torch's bf16 over the seeds of noise."""
    values = [x["distance"] for x in distances(record)["torch", ""].values()]
    return min(values), max(values)


def distance_table(record):
    """A line a way and noise, beside torch's own of the same noise."""
    base, rows = distances(record)["torch", ""], []
    for (recipe, policy), by_seed in distances(record).items():
        for seed, x in sorted(by_seed.items()):
            own = base.get(seed) if recipe != "torch" else None
            rows.append([
                name_of(recipe, policy),
                f"{seed}",
                f"{x['distance']:.4f}",
                f"{x['distance'] - own['distance']:+.4f}" if own else "",
                f"{x['distance'] / own['distance'] - 1:+.2%}" if own else "",
                f"{x['agreement']:.2%}",
                f"{x['seconds']:.1f} s",
                f"{own['seconds'] / x['seconds']:.2f}x" if own else "",
            ])  # fmt: skip
    measured = {(x["recipe"], x["policy"], x["seed"]) for x in record["rows"]}
    for recipe, policy, seed in WANTED:
        if (recipe, policy, seed) not in measured:
            rows.append([name_of(recipe, policy), f"{seed}", MISSING, *[""] * 5])
    head = ["attention", "noise", "distance", "less torch's", "in percent", "class as asked"]
    return markdown([*head, "sampling", "speed"], rows)


def clipped_text(record):
    told = [
        f"{name_of(x['recipe'], x['policy'])} {', '.join(map(str, x['clipped']))} of "
        f"{x['codes'] / 1e9:.0f} thousand million"
        for x in record["rows"]
        if "clipped" in x
    ]
    return f"Codes of Q, K and V that static scales clipped: {'; '.join(told)}."


def steps_shown(count):
    """Some of the steps 0 .. count - 1, the first and the last among them."""
    return sorted({round(i * (count - 1) / (STEPS_SHOWN - 1)) for i in range(STEPS_SHOWN)})


def psnr_table(record):
    """A line a way: dB of single steps and of whole samplings, the mean and the worst image."""
    steps = record["evaluated"]["steps"]
    shown = steps_shown(steps)
    rows = [
        [
            name_of(x["recipe"], x["policy"]),
            *(f"{x['psnr'][k]:.1f} ({x['worst'][k]:.1f})" for k in shown),
            f"{x['final']:.1f} ({x['final_worst']:.1f})",
        ]
        for x in record["paired"]
    ]
    return markdown(["", *(f"step {k + 1}, t {1 - k / steps:.2f}" for k in shown), "whole"], rows)


def time_table(record):
    """A line a way: attention alone, a step of the model, and both beside torch's own."""
    t = record["timing"]
    base, rows = {part: t[part]["torch"] for part in ("attention", "step")}, []
    for way, ms in t["attention"].items():
        step = t["step"][way]
        rows.append([
            name_of(way) if way in NAMES else name_of(*way.split()),
            f"{ms:.3f} ms",
            f"{base['attention'] / ms:.2f}x",
            f"{step:.1f} ms",
            f"{base['step'] / step:.2f}x",
            f"{t['layers'] * ms / step:.0%}",
        ])  # fmt: skip
    head = ["", "attention, a layer", "beside torch", "a step", "beside torch", "share"]
    return markdown(head, rows)


def slower_text(record):
    """What the table of times means, in words that follow from it."""
    ms, told = record["timing"]["attention"], []
    if min(x for name, x in ms.items() if name not in NAMES) > ms["torch"]:
        told.append("No 8-bit recipe is as fast as torch's bf16 here.")
    for recipe in dict.fromkeys(name.split()[0] for name in ms if name not in NAMES):
        ratio = ms[f"{recipe} dynamic"] / ms[f"{recipe} table"]
        if ratio > SLOWER:
            told.append(f"`{recipe}` takes {ratio:.1f} times as long with dynamic scales as with a "
                        "table's.")  # fmt: skip
    return " ".join(told)


def seeds_text(record):
    """Of a fine-tuning: which trainings are missing."""
    short = [f"{way} has {n} of {SEEDS} seeds" for way, n in seeds_of(record).items() if n < SEEDS]
    return f" The time on the machine was up: {', '.join(short)}." if short else ""


def training_section():
    if (found := tool_record(TRAINING)) is None:
        return []
    record, p = found
    t = record["training"]
    return [
        "",
        "## Fine-tuning",
        "",
        f"{p['date']}, commit {p['commit']}, {p['gpu']}, torch {p['torch']}, bfloat16 under "
        f"autocast, `{TRAINING}`: the same weights trained on for {t['steps']} steps of "
        f"{t['batch']} images, on {t['images']} test images turned by a quarter, which the model "
        f"has not seen; {t['held_out']} are held out. Equal data, times and noise in equal order."
        + seeds_text(record),
        "",
        'torch: its own attention. int8: `recipe="int8"` forward and backward. detached: the '
        "same, with Q and K cut off from the gradient, which must fail. Losses are mean squares of "
        f"the velocity's error, means over seeds; before: {record['start']:.4f}. Steps: to within "
        "2 % of where torch ends with the same seed, over torch's.",
        "",
        *loss_table(record, digits=5),
    ]


def section():
    """Lines of docs/tables."""
    if (found := tool_record(RECORD)) is None:
        return []
    record, p = found
    e, m, shape = record["evaluated"], record["model"], record["model"]["shape"]
    low, high = torch_band(record)
    maxima = ", ".join(
        f"{role.upper()} {x['median']:.2f}x ({x['worst']:.2f}x)"
        for role, x in record["maxima"].items()
    )
    tokens, heads = (32 // shape["patch"]) ** 2, shape["hidden"] // shape["head_dim"]
    note = m["provenance"].get("note")
    lacking = " The time on the machine was up before all was measured."
    return [
        "",
        f"{p['date']}, commit {p['commit']}, {p['gpu']}, driver {p['driver']}, torch {p['torch']}, "
        f"`{RECORD}`, by `tools/eval/fashion_dit.py`: a diffusion transformer of Fashion-MNIST, "
        f"{m['parameters'] / 1e6:.1f} million parameters, {shape['layers']} layers, {tokens} "
        f"tokens, {heads} heads of {shape['head_dim']} channels, {e['steps']} steps from noise. "
        "Attention alone differs; all else is bfloat16 under autocast."
        + ("" if record["complete"] else lacking),
        "",
        f"The model: {m['provenance']['date']}, commit {m['provenance']['commit']}, "
        f"{m['seconds']:.0f} s of training on an {m['provenance']['gpu']}, about {m['steps']} "
        f"steps of {m['batch']} images."
        + (f" Its record was {note}." if note else "")
        + ("" if m["held_out"] else " Its loss held out is not known."),
        "",
        "dynamic: scales of each call. table: static scales by layer, head and step, from other "
        f"noise, with a margin of {e['margin']}. late: dynamic, and the last {e['late']} steps in "
        "`bf16`.",
        "",
        "## Distance",
        "",
        f"Fréchet distance of {e['images']} images from the training images, of the features of a "
        f"classifier that names {m['classifier']['accuracy']:.1%} of the test images rightly. "
        f"Floor, of the test images: {record['floor']:.4f}. torch's bf16 alone moves from "
        f"{low:.4f} to {high:.4f} with the noise, by {high - low:.4f}. Speed: of the whole "
        "sampling, over torch's of the same noise.",
        "",
        *distance_table(record),
        "",
        clipped_text(record),
        "",
        "How many times as large as at the smallest step the largest |Q|, |K| less its mean and "
        f"|V| are at the largest, over layers and heads, median and worst: {maxima}.",
        "",
        "## PSNR",
        "",
        f"In dB against float32, the mean over {e['batch']} images and the worst. Steps: one step "
        "from where float32's own sampling is. whole: the images of whole samplings from equal "
        "noise. The line of torch is what bfloat16 costs in all of the model; a recipe adds to it.",
        "",
        *psnr_table(record),
        "",
        "## Time",
        "",
        f"Batch {record['timing']['batch']}, medians of turns; torch takes its back end itself. "
        "beside torch: how many times as fast. share: of a layer's attention, times the layers, in "
        f"the step. {slower_text(record)}",
        "",
        *time_table(record),
        *training_section(),
    ]
