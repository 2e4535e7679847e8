#!/usr/bin/env python3
"""What low-precision attention costs a diffusion transformer: images of Fashion-MNIST by recipe,
and the model trained on with INT8 attention.

    python tools/eval/fashion_dit.py train --data DATA -o MODEL           # torch alone
    python tools/eval/fashion_dit.py evaluate --data DATA --model MODEL -o RESULT.json
    python tools/eval/fashion_dit.py finetune --data DATA --model MODEL -o RESULT.json
    python tools/eval/fashion_dit.py table RESULT.json                    # Markdown

DATA is the folder usr/share/datasets/fashion-mnist of Debian's package dataset-fashion-mnist.
evaluate and finetune read its test images alone. The model is that of dit_model.py: 1024 tokens, 6
layers, 3 heads of 64 channels.

train writes to MODEL: model.safetensors (float16, the mean of the weights), classifier.safetensors,
whose features the distances are of, statistics.json (their mean and covariance over the images that
both were trained on) and training.json (what was done). evaluate: dit_evaluate.py, finetune:
dit_finetune.py say what their results hold.

--budget-seconds: evaluate and finetune begin nothing that would end after so many seconds of the
process, train shortens its training. Exit status: 3 where something is left to do, which --resume
does; 1 where something is refused or missing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "bench")]

#: files of a model's folder
MODEL, CLASSIFIER = "model.safetensors", "classifier.safetensors"
STATISTICS, TRAINING = "statistics.json", "training.json"
_SAVING = 10.0  # seconds that what follows a training takes


class Budget:
    """Seconds of this process that are left."""

    def __init__(self, seconds: float | None) -> None:
        self.end = None if seconds is None else time.monotonic() + seconds
        self.longest = 0.0

    def left(self) -> float:
        return float("inf") if self.end is None else self.end - time.monotonic()

    def allows(self, parts: float = 1) -> bool:
        """Is there time for what takes as long as so many of the longest part so far?"""
        return self.left() > 1.1 * parts * self.longest

    def took(self, seconds: float) -> None:
        self.longest = max(self.longest, seconds)


def provenance_of(asked: argparse.Namespace) -> dict[str, Any]:
    import torch
    from qbench import provenance

    made = {**provenance.common(asked.commit), "torch": torch.__version__}
    if asked.device == "cuda":
        facts = provenance.gpu_facts(torch)
        driver = facts.pop("nvidia_smi", {}).get("driver_version")
        return {**made, **facts, "driver": driver}
    return {**made, "device": provenance.cpu_model()}


def device_of(asked: argparse.Namespace) -> str:
    import torch

    return asked.device or ("cuda" if torch.cuda.is_available() else "cpu")


def train(asked: argparse.Namespace) -> dict:
    import dit_model
    import torch
    import weights

    budget = Budget(asked.budget_seconds)
    asked.device = device_of(asked)
    made = provenance_of(asked)  # what can fail does before the training
    shape = dit_model.PRESETS[asked.preset]
    images = dit_model.read_images(asked.data, "train", asked.images).to(asked.device)
    unseen = dit_model.read_images(asked.data, "t10k", asked.images).to(asked.device)
    asked.out.mkdir(parents=True, exist_ok=True)

    classifier = dit_model.train_classifier(images, asked.classifier_steps, asked.seed)
    named = dict(classifier.named_parameters())
    digest = weights.save(named, asked.out / CLASSIFIER)
    weights.load(named, asked.out / CLASSIFIER)  # what is judged by later is judged by now
    mean, covariance = dit_model.statistics(classifier, images.pixels)
    kept = {"mean": mean.tolist(), "covariance": covariance.tolist()}
    (asked.out / STATISTICS).write_text(json.dumps(kept) + "\n")
    facts = {
        "steps": asked.classifier_steps,
        "accuracy": dit_model.accuracy(classifier, unseen),
        "sha256": digest,
    }
    print(f"classifier: {facts['accuracy']:.1%} of test images right", flush=True)

    torch.manual_seed(asked.seed)
    model = dit_model.DiT(shape).to(asked.device)
    batch = min(asked.batch, len(images.labels))
    judged = min(100, batch, len(unseen.labels))
    example = (images.pixels[:batch], torch.rand(batch, device=asked.device), images.labels[:batch])
    compiled = asked.compile and dit_model.compile_parts(model, *example)
    seconds = min(asked.seconds, budget.left() - _SAVING)
    if seconds < asked.seconds:
        print(f"budget: {seconds:.0f} s of training instead of {asked.seconds:.0f}", flush=True)

    def keep() -> None:
        weights.save(run.mean_weights(), asked.out / MODEL)

    run = dit_model.Training(model, images, batch, asked.rate, asked.seed, max(seconds, 1.0),
                             asked.steps, keep)  # fmt: skip
    run.run()
    result = {
        "schema": 1,
        "provenance": made,
        "preset": asked.preset,
        "shape": dataclasses.asdict(shape),
        "parameters": sum(x.numel() for x in model.parameters()),
        "seed": asked.seed,
        "batch": batch,
        "rate": asked.rate,
        "steps": run.done,
        "seconds": round(run.passed, 1),
        "compiled": compiled,
        "curve": run.curve,
        "data": [images.facts, unseen.facts],
        "classifier": facts,
    }
    file = asked.out / MODEL
    result["sha256"], result["bytes"] = weights.save(run.mean_weights(), file), file.stat().st_size
    result["held_out"] = None  # the file is there should the loss not come
    (asked.out / TRAINING).write_text(json.dumps(result, indent=1) + "\n")
    mean_model = dit_model.make(shape, asked.device, file)
    result["held_out"] = dit_model.held_out_loss(mean_model, unseen, judged)
    (asked.out / TRAINING).write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"trained: {run.done} steps of {batch} images in {run.passed:.0f} s, held-out loss "
        f"{result['held_out']:.4f}, {result['bytes'] / 1e6:.1f} MB",
        flush=True,
    )
    return result


def read(path: Path) -> dict:
    result = json.loads(path.read_text())
    if result.get("schema") != 1:
        raise ValueError(f"schema: {result.get('schema')!r} should be 1")
    return result


def judge(asked: argparse.Namespace) -> dict:
    """evaluate and finetune, which begin and keep their results alike."""
    import dit_evaluate
    import dit_finetune
    import qattn

    budget = Budget(asked.budget_seconds)
    asked.device = device_of(asked)
    files = {"model": MODEL, "classifier": CLASSIFIER, "statistics": STATISTICS,
             "training": TRAINING}  # fmt: skip
    files = {name: asked.model / file for name, file in files.items()}
    result = read(asked.out) if asked.resume and asked.out.exists() else {"schema": 1}
    result["provenance"] = {**provenance_of(asked), "qattn": qattn.__version__}

    def keep(made: dict) -> None:
        asked.out.write_text(json.dumps(made, indent=1) + "\n")

    work = dit_evaluate.evaluate if asked.command == "evaluate" else dit_finetune.finetune
    return work(asked, files, result, budget, keep)


def table(result: dict) -> str:
    import dit_evaluate
    import dit_finetune

    return (dit_finetune if "training" in result else dit_evaluate).table(result)


# ---- Command line --------------------------------------------------------------------------------


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    summary, _, rest = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, what: str, out: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=what)
        made.add_argument("--data", type=Path, required=True, help="folder of the data set")
        made.add_argument("-o", "--out", type=Path, required=True, help=out)
        made.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if there is one")
        made.add_argument("--images", type=int, help="of the data set, instead of all")
        made.add_argument("--budget-seconds", type=float, help="seconds that the process may take")
        made.add_argument("--commit", help="what runs, where the tree is no git checkout")
        made.add_argument("--no-compile", dest="compile", action="store_false",
                          help="leave torch.compile alone")  # fmt: skip
        return made

    one = command("train", "train the model and the classifier", "folder of the model")
    one.add_argument("--preset", choices=["small", "tiny"], default="small")
    one.add_argument("--seconds", type=float, default=150.0, help="of training")
    one.add_argument("--steps", type=int, help="of training, instead of seconds")
    one.add_argument("--classifier-steps", type=int, default=2000)
    one.add_argument("--batch", type=int, default=128)
    one.add_argument("--rate", type=float, default=8e-4)
    one.add_argument("--seed", type=int, default=0)

    def judged(name: str, what: str) -> argparse.ArgumentParser:
        made = command(name, what, "JSON file, kept part by part")
        made.add_argument("--model", type=Path, required=True, help="folder that train wrote")
        made.add_argument("--resume", action="store_true", help="do what the JSON file lacks")
        return made

    two = judged("evaluate", "sample images by recipe and policy")
    two.add_argument("--samples", type=int, default=10000, help="images a row")
    two.add_argument("--batch", type=int, default=500)
    two.add_argument("--steps", type=int, default=20, help="of the sampler")
    two.add_argument("--late", type=int, default=5, help="steps in 16 bits of policy late")
    three = judged("finetune", "train on, by torch's attention and INT8")
    three.add_argument("--attention", nargs="+", default=["torch", "int8", "detached"])
    three.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    three.add_argument("--steps", type=int, default=150)
    three.add_argument("--batch", type=int, default=128)
    three.add_argument("--rate", type=float, default=5e-4)
    three.add_argument("--reports", type=int, default=15, help="losses held out in one training")
    show = commands.add_parser("table", help="print a result")
    show.add_argument("result", type=Path)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    asked = parsed(arguments)
    try:
        if asked.command == "train":
            train(asked)
            return 0
        result = read(asked.result) if asked.command == "table" else judge(asked)
        print(table(result))
    except (OSError, ValueError, KeyError, ImportError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0 if result.get("complete", True) else 3


if __name__ == "__main__":
    sys.exit(main())
