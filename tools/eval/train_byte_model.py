#!/usr/bin/env python3
"""What training with INT8 attention costs a language model: losses on text that it has not seen,
beside those of the same training with torch's attention.

    python tools/eval/train_byte_model.py run -o RESULT.json      # GPU or CPU; torch and qattn
    python tools/eval/train_byte_model.py table RESULT.json       # Markdown

Exit status: 1 where something is refused or missing; 2 where a loss of run is NaN.

The model is byte_model.py's. For every seed and way of attention it is trained from equal weights
on equal data in equal order: on a GPU under autocast to bfloat16, on a CPU in float32. --start goes
on from the weights of `kv_language_model.py train` (fine-tuning). The ways:

    torch     torch's scaled_dot_product_attention
    int8      qattn.torch.sdpa(recipe="int8")
    detached  the same with Q and K detached, so that only V learns: what a broken gradient looks
              like here
    NAME      qattn.torch.sdpa(recipe=NAME, backward="16bit") for any other recipe

RESULT.json is written after each training; with --resume, trainings that it holds are not done
again. {"schema": 1, "provenance": date, commit, versions, device; "model": preset, shape, text,
start; "rows": [{"attention", "seed", "curve": [[step, loss in training, loss held out]],
"held_out": the last one, "held_out_torch": of the final weights under torch's attention,
"seconds"}], "summary"}. Losses are nats a byte. summary: for every way {"held_out": mean over
seeds, "spread": largest less smallest, "over_torch": mean less torch's over the same seeds,
"apart": the difference of the seed in which it is largest,
"within_spread": is that at most torch's spread?, "steps": mean of the steps to the loss that is 2 %
above the one at which torch ends with that seed, null where a seed never gets there,
"steps_over_torch": the ratio to torch's steps}.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "bench")]

SCHEMA = 1
_NEAR = 1.02  # of torch's final loss: what "steps" counts to


def attention_of(way: str) -> Any:
    """The function that the model's layers call; None: torch's."""
    if way == "torch":
        return None
    import qattn.torch

    if way == "detached":
        return lambda q, k, v, **rest: qattn.torch.sdpa(
            q.detach(), k.detach(), v, recipe="int8", **rest
        )
    backward = "forward" if way == "int8" else "16bit"
    return lambda *given, **rest: qattn.torch.sdpa(*given, recipe=way, backward=backward, **rest)


def trained(asked: argparse.Namespace, way: str, seed: int, device: str, commit: str) -> tuple:
    """(facts of byte_model.train(), row) of one training."""
    import byte_model
    import torch

    with tempfile.TemporaryDirectory() as folder:
        facts = byte_model.train(
            asked.preset,
            Path(folder),
            seed=seed,
            steps=asked.steps,
            device=device,
            roots=asked.text,
            commit=commit,
            attention=attention_of(way),
            start=asked.start and asked.start / "model.safetensors",
            reports=asked.reports,
        )
        shape = byte_model.Shape(**facts["shape"])
        model = byte_model.ByteModel(shape).to(device)
        byte_model.load_weights(model, Path(folder) / "model.safetensors")
        held_out = bytearray((Path(folder) / "held_out.bin").read_bytes())
        text = torch.frombuffer(held_out, dtype=torch.uint8).to(device)
        under_torch = byte_model.held_out_loss(model, text, shape)
    row = {
        "attention": way,
        "seed": seed,
        "curve": [list(point) for point in facts["curve"]],
        "held_out": facts["curve"][-1][2],
        "held_out_torch": under_torch,
        "seconds": facts["seconds"],
    }
    return facts, row


def run(asked: argparse.Namespace) -> dict:
    import qattn
    import torch
    from qbench import provenance

    device = asked.device or ("cuda" if torch.cuda.is_available() else "cpu")
    commit = provenance.commit(asked.commit)
    result: dict = {"schema": SCHEMA, "rows": []}
    if asked.resume and asked.out.exists():
        result = read(asked.out)
    own = {
        "torch": torch.__version__,
        "qattn": qattn.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else provenance.cpu_model(),
        "dtype": "bfloat16 under autocast" if device == "cuda" else "float32",
    }
    done = {(row["attention"], row["seed"]) for row in result["rows"]}
    for seed in asked.seeds:
        for way in asked.attention:
            if (way, seed) in done:
                continue
            print(f"---- {way}, seed {seed}", flush=True)
            facts, row = trained(asked, way, seed, device, commit)
            model = {name: facts[name] for name in ("preset", "shape", "parameters", "text")}
            model["start"] = None if asked.start is None else asked.start.name
            if result.get("model", model) != model:
                raise ValueError(f"{asked.out}: is of another model, text or training")
            result["rows"].append(row)
            result = {
                "schema": SCHEMA,
                "provenance": {**provenance.common(asked.commit), **own},
                "model": model,
                "rows": result["rows"],
                "summary": summary(result["rows"]),
            }
            asked.out.write_text(json.dumps(result, indent=1) + "\n")
    return result


# ---- What the losses say -------------------------------------------------------------------------


def summary(rows: list[dict]) -> dict:
    losses: dict[str, dict[int, dict]] = {}
    for row in rows:
        losses.setdefault(row["attention"], {})[row["seed"]] = row
    base = losses.get("torch", {})
    made: dict[str, dict] = {}
    for way, own in losses.items():
        finals = [row["held_out"] for row in own.values()]
        facts = made[way] = {
            "held_out": statistics.mean(finals),
            "spread": max(finals) - min(finals),
        }
        shared = sorted(set(own) & set(base))
        if not shared:
            continue
        apart = [own[seed]["held_out"] - base[seed]["held_out"] for seed in shared]
        facts["over_torch"], facts["apart"] = statistics.mean(apart), max(apart, key=abs)
        spread = [row["held_out"] for row in base.values()]
        facts["within_spread"] = facts["over_torch"] <= max(spread) - min(spread)
        near = {seed: _NEAR * base[seed]["held_out"] for seed in shared}
        facts["steps"] = _mean([steps_to(own[seed]["curve"], near[seed]) for seed in shared])
        theirs = _mean([steps_to(base[seed]["curve"], near[seed]) for seed in shared])
        reached = facts["steps"] is not None and theirs is not None
        facts["steps_over_torch"] = facts["steps"] / theirs if reached else None
    return made


def _mean(values: list[float | None]) -> float | None:
    known = [x for x in values if x is not None]
    return statistics.mean(known) if known and len(known) == len(values) else None


def steps_to(curve: list, target: float) -> float | None:
    """Steps after which the loss held out is `target` for the first time, on straight lines between
    the reports; None: never."""
    before = None
    for step, _, loss in curve:
        if loss <= target:
            if before is None or before[1] <= loss:
                return float(step)
            return before[0] + (step - before[0]) * (before[1] - target) / (before[1] - loss)
        before = (step, loss)
    return None


def read(path: Path) -> dict:
    result = json.loads(path.read_text())
    if result.get("schema") != SCHEMA:
        raise ValueError(f"schema: {result.get('schema')!r} should be {SCHEMA}")
    return result


def table(result: dict) -> str:
    """Markdown, a row a way of attention."""
    model, made = result["model"], result["provenance"]
    seeds = sorted({row["seed"] for row in result["rows"]})
    lines = [
        f"{model['parameters']:,} parameters, {model['shape']['steps']} steps of "
        f"{model['shape']['batch']} x {model['shape']['context']} bytes, seeds "
        f"{', '.join(map(str, seeds))}; {made['device']}, {made['dtype']}",
        "",
        "| attention | held out, nats a byte | spread of seeds | over torch | furthest pair | "
        "steps over torch |",
        "|---|---|---|---|---|---|",
    ]
    for way, facts in result["summary"].items():
        over, apart = (_shown(facts.get(name), "+.4f") for name in ("over_torch", "apart"))
        steps = _shown(facts.get("steps_over_torch"), ".3f")
        lines.append(
            f"| {way} | {facts['held_out']:.4f} | {facts['spread']:.4f} | {over} | {apart} | "
            f"{steps} |"
        )
    return "\n".join(lines)


def _shown(value: float | None, how: str) -> str:
    return "" if value is None else format(value, how)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run", help="train and compare")
    one.add_argument("-o", "--out", type=Path, required=True, help="JSON file")
    one.add_argument("--preset", choices=["small", "tiny"], default="small")
    one.add_argument("--attention", nargs="+", default=["torch", "int8", "detached"])
    one.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    one.add_argument("--steps", type=int, help="instead of the preset's")
    one.add_argument("--reports", type=int, default=30, help="losses held out in one training")
    one.add_argument("--start", type=Path, help="folder of weights to go on from")
    one.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    one.add_argument("--text", type=Path, action="append", help="folder, instead of Python's own")
    one.add_argument("--resume", action="store_true", help="keep the trainings of RESULT.json")
    one.add_argument("--commit", help="what runs, where the tree is no git checkout")
    show = commands.add_parser("table", help="print a result")
    show.add_argument("result", type=Path)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    asked = parsed(arguments)
    try:
        result = run(asked) if asked.command == "run" else read(asked.result)
        print(table(result))
    except (OSError, ValueError, KeyError, ImportError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 2 if any(math.isnan(row["held_out"]) for row in result["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
