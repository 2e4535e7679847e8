"""`fashion_dit.py finetune`: the DiT trained on with INT8 attention, beside torch's.

The trained model goes on, from equal weights, on test images that it has not seen, turned by a
quarter, so that there is something to learn. Data, times and noise are equal between ways, and in
equal order; the last tenth of the images is held out. Ways are train_byte_model.py's: torch, int8
and detached, the negative control. On GPUs all run under autocast to bfloat16.

The result: {"schema": 1, "provenance", "complete": is all done?, "model": preset, shape, parameters
and sha256 of the weights, "training": steps, batch, rate, reports, images, held_out,
"start": the loss held out before, "rows": [{"attention", "seed", "curve": [[step, loss in training,
loss held out]], "held_out": the last one, "seconds"}], "summary": as train_byte_model.py has it}.
Losses are mean squares of the velocity's error.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dit_model
import torch
import train_byte_model
import weights
from torch import nn

SCHEMA = 1


def rate_at(step: int, steps: int, rate: float) -> float:
    """A warm-up over a twentieth, then a cosine down to a tenth."""
    warm = max(1, steps // 20)
    if step < warm:
        return rate * (step + 1) / warm
    return rate * (0.55 + 0.45 * math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def split(images: dit_model.Images, batch: int, device: str) -> tuple[Any, Any]:
    """(to train on, held out), turned by a quarter; whole batches are held out."""
    pixels = images.pixels.rot90(1, (2, 3)).contiguous()
    kept = max(1, len(pixels) // 10 // batch) * batch
    parts = [
        dit_model.Images(pixels[part], images.labels[part], images.facts).to(device)
        for part in (slice(None, -kept), slice(-kept, None))
    ]
    if len(parts[0].labels) < batch:
        raise ValueError(f"images: {len(pixels)} are less than two batches of {batch}")
    return parts[0], parts[1]


def tuned(
    model: dit_model.DiT, way: str, seed: int, asked: argparse.Namespace, images: tuple[Any, Any]
) -> dict:
    """The row of one training, from the weights that the model has."""
    train, held_out = images
    device = train.pixels.device
    model.attend_with(train_byte_model.attention_of(way))
    parameters = list(model.parameters())
    optimiser = torch.optim.AdamW(parameters, betas=(0.9, 0.99), weight_decay=0.0)
    draw = torch.Generator().manual_seed(seed)
    begun, curve, recent = time.monotonic(), [], []
    report = max(1, asked.steps // asked.reports)
    for step in range(asked.steps):
        which = torch.randint(len(train.labels), (asked.batch,), generator=draw).to(device)
        t = torch.sigmoid(torch.randn(asked.batch, generator=draw)).to(device)
        pixels = train.pixels[which]
        noise = torch.randn(pixels.shape, generator=draw).to(device)
        loss = dit_model.flow_loss(model, pixels, train.labels[which], t, noise)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimiser.param_groups:
            group["lr"] = rate_at(step, asked.steps, asked.rate)
        optimiser.step()
        recent.append(loss.detach())
        if (step + 1) % report == 0 or step + 1 == asked.steps:
            now = dit_model.held_out_loss(model, held_out, asked.batch)
            curve.append([step + 1, float(torch.stack(recent).mean()), now])
            recent.clear()
    return {
        "attention": way,
        "seed": seed,
        "curve": curve,
        "held_out": curve[-1][2],
        "seconds": round(time.monotonic() - begun, 1),
    }


def finetune(
    asked: argparse.Namespace,
    files: dict[str, Path],
    result: dict,
    budget: Any,
    keep: Callable[[dict], None],
) -> dict:
    """Adds to `result` the trainings that it lacks and time allows; `keep` gets it after each."""
    facts = json.loads(files["training"].read_text())
    shape = dit_model.Shape(**facts["shape"])
    images = split(dit_model.read_images(asked.data, "t10k", asked.images), asked.batch,
                   asked.device)  # fmt: skip
    model = dit_model.make(shape, asked.device, files["model"])
    named = dict(model.named_parameters())
    told = {
        "model": {x: facts[x] for x in ("preset", "shape", "parameters", "sha256")},
        "training": {
            "steps": asked.steps,
            "batch": asked.batch,
            "rate": asked.rate,
            "reports": asked.reports,
            "images": len(images[0].labels),
            "held_out": len(images[1].labels),
        },
    }
    for name, value in told.items():
        if result.setdefault(name, value) != value:
            raise ValueError(f"{name}: the result is of another; begin one without --resume")
    example = [x[: asked.batch] for x in (images[0].pixels, images[0].labels)]
    t = torch.full((asked.batch,), 0.5, device=asked.device)
    if asked.compile:
        dit_model.compile_parts(model, example[0], t, example[1])
    result["start"] = dit_model.held_out_loss(model, images[1], asked.batch)
    print(f"held out before: {result['start']:.4f}", flush=True)
    rows = result.setdefault("rows", [])
    done = {(row["attention"], row["seed"]) for row in rows}
    wanted = [(way, seed) for seed in asked.seeds for way in asked.attention]
    wanted.sort(key=lambda x: x[0] == "detached")  # what time may not be left for
    for way, seed in wanted:
        if (way, seed) in done:
            continue
        if not budget.allows():
            print(f"budget: {way}, seed {seed} and what follows are left to --resume", flush=True)
            break
        begun = time.monotonic()
        weights.load(named, files["model"])
        rows.append(tuned(model, way, seed, asked, images))
        budget.took(time.monotonic() - begun)
        print(f"{way}, seed {seed}: held out {rows[-1]['held_out']:.4f}, "
              f"{rows[-1]['seconds']} s", flush=True)  # fmt: skip
        result["summary"] = train_byte_model.summary(rows)
        keep(result)
    result["complete"] = {(row["attention"], row["seed"]) for row in rows} >= set(wanted)
    keep(result)
    return result


def table(result: dict) -> str:
    """Markdown, a row a way."""
    lines = ["| attention | held out | spread | over torch | steps over torch |",
             "|---|---|---|---|---|"]  # fmt: skip
    for way, x in result["summary"].items():
        over, steps = x.get("over_torch"), x.get("steps_over_torch")
        lines.append(
            f"| {way} | {x['held_out']:.5f} | {x['spread']:.5f} | "
            f"{'' if over is None else format(over, '+.5f')} | "
            f"{'' if steps is None else format(steps, '.3f')} |"
        )
    return "\n".join(lines)
