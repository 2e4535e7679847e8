"""Errors of the recipes of 4-bit floats, and of mxfp8, beside SageAttention3's recipe simulated.

Families of tools/sim/recipe_sim.py, Q, K and V of a sentence encoder (data/) and, with --model, of
a language model (the folder that `tools/eval/kv_language_model.py pretrained` writes).
"""

import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

from . import provenance
from .record import RESULTS, ROOT, markdown, tool_record

sys.path.insert(0, str(ROOT / "tools" / "sim"))
import recipe_sim  # noqa: E402
import sageattention3  # noqa: E402

NAME = "fp4-errors.json"
QUERIES, KEYS, DIMS = 256, 2048, (128, 64)
SAGE = {f"SageAttention3, {form}": form for form in sageattention3.FORMS}
E4M3 = {"p": "e4m3", "v": "e4m3"}
PLAIN = {"smooth_q": False}
BY_16, BY_128 = ({"q_granularity": ("group", n)} for n in (16, 128))
ROTATE = {"rotate": True}
#: {recipe: {column: (changes of the recipe, options)}}
COMMON = {
    "as it is": ({}, {}),
    "smooth_q off": ({}, PLAIN),
    "blocks of 16": ({}, BY_16),
    "blocks of 128": ({}, BY_128),
    "rotate": ({}, ROTATE),
}
VARIANTS = {
    "nvfp4": COMMON,
    "nvfp4_qk": COMMON | {"e4m3 P and V": (E4M3, {})},
    "mxfp8": COMMON,
}
#: of a standard deviation by the mean, above which a table says it
LARGE_SPREAD = 0.25


def add_arguments(parser):
    parser.add_argument("--seeds", type=int, default=6, help="of each family")
    parser.add_argument("--model", type=pathlib.Path, help="folder of a language model")
    parser.add_argument("--layers", type=int, default=6, help="of the language model, spread")
    parser.add_argument(
        "--emulated",
        type=pathlib.Path,
        help="the program emulated_attention: only its errors, into the record that is there",
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--commit", help="where the tree is no git checkout")
    parser.add_argument("-o", "--output", default=str(RESULTS / NAME), help="the record")


def relative(out, exact):
    return float(np.linalg.norm(out - exact) / np.linalg.norm(exact))


def exact(q, k, v, causal):
    """Attention in float64; causal: bottom right."""
    s = q @ k.T / np.sqrt(q.shape[1])
    if causal:
        s[np.arange(len(k)) > np.arange(len(q))[:, None] + len(k) - len(q)] = -np.inf
    p = np.exp(s - s.max(1, keepdims=True))
    return p @ v / p.sum(1, keepdims=True)


def errors(qattn, tensors, causal, threads):
    """{recipe or form: NRMSE or {variant: NRMSE}} of q, k, v (S, D), which are rounded to f16."""
    tensors = [x.astype(np.float16) for x in tensors]
    numbers = [x.astype(np.float64) for x in tensors]
    want = exact(*numbers, causal)
    found = {}
    for recipe, variants in VARIANTS.items():
        for variant, (changes, options) in variants.items():
            chosen = dataclasses.replace(qattn.recipe(recipe), **changes)
            out = qattn.attention(
                *(x[None, :, None] for x in tensors),
                recipe=chosen,
                causal=causal,
                threads=threads,
                out_dtype="float32",
                **options,
            )
            found.setdefault(recipe, {})[variant] = relative(out[0, :, 0], want)
    for name, form in SAGE.items():
        found[name] = relative(sageattention3.attention(*numbers, causal, form), want)
    return found


def family_heads(seeds):
    """(inputs, D, causal, heads): every family of recipe_sim."""
    for dim in DIMS:
        for i, family in enumerate(recipe_sim.FAMILIES):
            heads = [
                recipe_sim.family(family, np.random.default_rng((s, dim, i)), KEYS, dim, QUERIES)
                for s in range(seeds)
            ]
            yield family, dim, False, heads


def encoder_heads():
    """The sentence encoder of data/: all heads of all layers."""
    from safetensors.numpy import load_file

    tensors = load_file(ROOT / "data" / "minilm_qkv.safetensors")
    for layer in range(len(tensors) // 3):
        q, k, v = (tensors[f"layer{layer}.{x}"][0] for x in "qkv")
        yield f"MiniLM, layer {layer}", q.shape[-1], False, list(zip(q, k, v))


def model_heads(folder, layers):
    """Some layers of a language model on KEYS held-out tokens: every query head's last QUERIES."""
    import torch
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    seen = {}

    def keep(module, query, key, value, *args, **options):
        seen[module.layer_idx] = [x[0].numpy() for x in (query[:, :, -QUERIES:], key, value)]
        return sdpa_attention_forward(module, query, key, value, *args, **options)

    AttentionInterface.register("fp4_errors", keep)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="fp4_errors", local_files_only=True
    ).eval()
    ids = np.fromfile(folder / "held_out.bin", "<i4", KEYS).astype(np.int64)
    if len(ids) != KEYS:
        raise ValueError(f"{folder}: held_out.bin has {len(ids)} tokens; {KEYS} are needed")
    with torch.no_grad():
        model(torch.from_numpy(ids)[None])
    for layer in np.unique(np.linspace(0, len(seen) - 1, layers).astype(int)):
        q, k, v = seen[layer]
        group = len(q) // len(k)
        heads = [(q[h], k[h // group], v[h // group]) for h in range(len(q))]
        yield f"language model, layer {layer}", q.shape[-1], True, heads


#: of the inputs that kernels attend to in the emulator; heads of each
EMULATED = ("N(0,1)", "peaky", "V mean", "dominated", "MiniLM, layer 0", "MiniLM, layer 3")
EMULATED_HEADS = 2


def emulated(program, recipe, heads):
    """What GeForce Blackwell's kernel gives for f16 q, k, v (H, S, D): (H, S, D) float32."""
    with tempfile.TemporaryDirectory() as folder:
        files = {x: str(pathlib.Path(folder, f"{x}.npy")) for x in "qkvo"}
        for x, tensor in zip("qkv", heads):
            np.save(files[x], tensor[None])
        command = [program, "--arch", "sm120a", "--recipe", recipe, "--output-format", "f32"]
        for x, flag in (("q", "--q"), ("k", "--k"), ("v", "--v"), ("o", "-o")):
            command += [flag, files[x]]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ValueError(f"{program}: {done.stdout}{done.stderr}")
        return np.load(files["o"])[0]


def run_emulated(qattn, args):
    path = pathlib.Path(args.output)
    record = json.loads(path.read_text())
    rows = []
    for inputs, dim, _, heads in (*family_heads(EMULATED_HEADS), *encoder_heads()):
        if inputs not in EMULATED:
            continue
        q, k, v = (np.stack(x).astype(np.float16) for x in zip(*heads[:EMULATED_HEADS]))
        want = np.stack(
            [exact(*(x.astype(np.float64) for x in head), False) for head in zip(q, k, v)]
        )
        row = {"inputs": inputs, "dim": dim}
        for recipe in VARIANTS:
            gpu = emulated(args.emulated, recipe, (q, k, v))
            options = {"recipe": recipe, "layout": "bhsd", "out_dtype": "float32"}
            cpu = qattn.attention(q[None], k[None], v[None], **options)[0]
            row[recipe] = {"cpu": relative(cpu, want), "gpu": relative(gpu, want)}
        rows.append(row)
        print(row, flush=True)
    record["emulated"] = {"provenance": provenance.common(args.commit), "rows": rows}
    write(path, record)
    return 0


def write(path, record):
    """Rows one a line."""
    parts = [
        f' "{name}": [\n' + ",\n".join("  " + json.dumps(row) for row in part) + "\n ]"
        if isinstance(part, list)
        else f' "{name}": {json.dumps(part)}'
        for name, part in record.items()
    ]
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def run(args):
    import qattn

    if args.emulated:
        return run_emulated(qattn, args)
    sources = [*family_heads(args.seeds), *encoder_heads()]
    facts = provenance.common(args.commit) | {
        "cpu": provenance.cpu_model(),
        "isa": qattn.cpu_isa(),
        "qattn": qattn.__version__,
    }
    if args.model:
        facts["model"] = json.loads((args.model / "training.json").read_text()).get("package")
        sources += model_heads(args.model, args.layers)
    rows = []
    for inputs, dim, causal, heads in sources:
        each = [errors(qattn, head, causal, args.threads) for head in heads]
        row = {"inputs": inputs, "dim": dim, "causal": causal, "heads": len(heads)}
        for name in (*VARIANTS, *SAGE):
            row[name] = joined([x[name] for x in each])
        rows.append(row)
        print(f"{inputs}, D {dim}", flush=True)
    settings = {"queries": QUERIES, "keys": KEYS, "seeds": args.seeds}
    write(pathlib.Path(args.output), {"provenance": facts, "settings": settings, "rows": rows})
    return 0


def joined(values):
    """Mean and standard deviation, of every variant where there are some."""
    if isinstance(values[0], dict):
        return {name: joined([x[name] for x in values]) for name in values[0]}
    return {"mean": float(f"{np.mean(values):.4g}"), "deviation": float(f"{np.std(values):.2g}")}


# ---- Tables --------------------------------------------------------------------------------------


def text_of(cell):
    spread = cell["deviation"] > LARGE_SPREAD * cell["mean"]
    return f"{cell['mean']:.4f}" + (f" ± {cell['deviation']:.4f}" if spread else "")


def is_real(row):
    return row["inputs"] not in recipe_sim.FAMILIES


def label(row):
    return row["inputs"] + (", causal" if row["causal"] else "")


def table(rows, recipe):
    header = ["inputs", "D", *VARIANTS[recipe]]
    beside = SAGE if recipe == "nvfp4" else {}
    body = [
        [label(row), str(row["dim"]), *(text_of(row[recipe][v]) for v in VARIANTS[recipe])]
        + [text_of(row[name]) for name in beside]
        for row in rows
    ]
    return markdown([*header, *beside], body)


def kinds_of(rows):
    """{column: rows} of what tables take means over."""
    return {
        "N(0,1)": [r for r in rows if r["inputs"] == "N(0,1)"],
        "families": [r for r in rows if not is_real(r)],
        "real tensors": [r for r in rows if is_real(r)],
    }


def mean_of(row, recipe, variant):
    return row[recipe][variant]["mean"]


def geometric(ratios):
    return f"{np.exp(np.mean(np.log(ratios))):.2f}" if ratios else ""


def options_table(rows):
    """How many times an option's error is that of the recipe as it is."""
    kinds = kinds_of(rows)
    pairs = [
        (f"`{recipe}`, {variant}", (recipe, variant), (recipe, "as it is"))
        for recipe, variants in VARIANTS.items()
        for variant in list(variants)[1:]
    ]
    e4m3 = ("nvfp4_qk", "e4m3 P and V")
    pairs.append(("`nvfp4_qk`, e4m3 P and V, for `nvfp4`", e4m3, ("nvfp4", "as it is")))
    body = []
    for name, one, base in pairs:
        ratios = {
            kind: [mean_of(row, *one) / mean_of(row, *base) for row in members]
            for kind, members in kinds.items()
        }
        halved = [
            f"{sum(x <= 0.5 for x in ratios[kind])} of {len(ratios[kind])}"
            for kind in ("families", "real tensors")
        ]
        body.append([name, *map(geometric, ratios.values()), *halved])
    return markdown(["", *kinds, "families halved", "real tensors halved"], body)


def peer(row):
    """SageAttention3's error: its better form."""
    return min(row[name]["mean"] for name in SAGE)


def peer_table(rows):
    kinds = kinds_of(rows)
    body = []
    for recipe in ("nvfp4", "nvfp4_qk"):
        for variant in VARIANTS[recipe]:
            ratios = {
                kind: [mean_of(row, recipe, variant) / peer(row) for row in members]
                for kind, members in kinds.items()
            }
            real = ratios["real tensors"]
            above = f"{sum(x > 1 for x in real)} of {len(real)}"
            body.append([f"`{recipe}`, {variant}", *map(geometric, ratios.values()), above])
    return markdown(["", *kinds, "real tensors above"], body)


def section():
    """Lines of docs/tables."""
    loaded = tool_record(NAME)
    if loaded is None:
        return []
    record, p = loaded
    rows, settings = record["rows"], record["settings"]
    lines = [
        "",
        f"{p['date']}, commit {p['commit']}, `{NAME}` (`bench/bench.py fp4`). NRMSE against "
        f"float64, mean over heads: {settings['seeds']} draws of each family "
        f"([what they are](recipe-errors.md)), {settings['queries']} queries and "
        f"{settings['keys']} keys; all heads of the sentence encoder all-MiniLM-L6-v2 on 512 "
        "tokens; a language model"
        + (f" ({p['model']})" if p.get("model") else "")
        + f" on {settings['keys']} tokens, causal. ± is the standard deviation where it is more "
        "than a quarter of the mean.",
        "",
        "Computed by the CPU backend. [GeForce Blackwell's kernels](../internals/geforce.md) have "
        "the same formats and scales, but tiles of 64 keys instead of 128: their errors in the "
        "emulator stand at the end. SageAttention3's recipe is simulated from its paper and, in a "
        "second form, from what its kernel does with P (`tools/sim/sageattention3.py`). smooth_q "
        "takes the mean of blocks of 64 queries where no other size is named; SageAttention3 of "
        "128.",
        "",
        "## Beside SageAttention3's recipe",
        "",
        "Times the error of the better of its two forms, geometric mean over inputs, and on how "
        "many of the real tensors (a layer each) the error is above it.",
        "",
        *peer_table(rows),
        "",
        "## What options change",
        "",
        "Times the error of the recipe as it is, geometric mean over inputs, and of how many "
        "inputs the option halves the error.",
        "",
        *options_table(rows),
    ]
    for recipe in VARIANTS:
        beside = " beside SageAttention3" if recipe == "nvfp4" else ""
        lines += ["", f"## `{recipe}`{beside}", "", *table(rows, recipe)]
    return lines + emulated_section(record)


def emulated_section(record):
    if "emulated" not in record:
        return []
    part = record["emulated"]
    body = [
        [row["inputs"], str(row["dim"])]
        + [f"{row[recipe][where]:.4f}" for recipe in VARIANTS for where in ("cpu", "gpu")]
        for row in part["rows"]
    ]
    columns = [f"`{recipe}`, {where}" for recipe in VARIANTS for where in ("CPU", "GPU")]
    return [
        "",
        "## GeForce Blackwell's kernels beside the CPU",
        "",
        f"{part['provenance']['date']}, commit {part['provenance']['commit']}, in the emulator "
        f"(`bench/bench.py fp4 --emulated`): NRMSE over {EMULATED_HEADS} heads, recipes as they "
        "are.",
        "",
        *markdown(["inputs", "D", *columns], body),
    ]
