"""`fashion_dit.py evaluate`: images of the DiT by recipe and policy, beside torch's attention.

The sampler takes equal steps of Euler's method from noise at t = 1 to t = 0; sigma is t. All but
"float32" runs under autocast to bfloat16 on GPUs (in float32 on CPUs), so that attention alone
differs from "torch", which is torch's own in that dtype. Policies: "dynamic" scales, the library's
own; a "table" by qattn.diffusion.calibrate() from other noise; "late", dynamic scales and the last
steps in recipe bf16. qattn.diffusion.attach() puts all of them into the model.

The result: {"schema": 1, "provenance", "model": what training.json says, "evaluated": numbers of
steps, images, seeds, "complete": is all done?, and
"maxima": as terrain.py has them, how far the largest |Q|, |K|, |V| move over the steps;
"floor": Fréchet distance of the test images from the training images;
"paired": of equal noise, [{"recipe", "policy", "psnr": by step, of one step from where float32's
  own sampling is, "worst": of an image, by step, "final": of whole samplings, "final_worst"}] in dB
  against float32, of a range of 2;
"sheet": (recipe, policy) of the rows of the picture beside the result, ten images of equal noise;
"timing": {"batch", "layers", "attention": {name: ms a call}, "step": {name: ms}}, medians of turns;
"rows": [{"recipe", "policy", "seed" of the noise, "distance": from the training images,
  "agreement": share of images that the classifier takes for what was asked for, "seconds" of
  sampling, and with a table "clipped": codes of q, k, v, "codes": how many there were}]}.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import dit_model
import torch
from qattn import QattnError
from torch.nn import functional

SCHEMA = 1
MARGIN = 1.1
CALIBRATION_SEED = 90
TIMED = 9  # turns
CALLS = 3  # of attention in a turn


class Way(NamedTuple):
    recipe: str  #: of qattn, "torch" or "float32"
    policy: str = ""

    def __str__(self) -> str:
        return f"{self.recipe} {self.policy}".strip()


FLOAT, TORCH = Way("float32"), Way("torch")
RECIPES = ("int8", "int8_full", "fp8")
_STATIC = {"int8": 2, "int8_full": 3, "fp8": 3}  # operands that are codes
#: what is beside float32, by equal noise
PAIRED = (
    TORCH,
    Way("bf16"),
    *(Way(r, p) for r in RECIPES[:2] for p in ("dynamic", "table", "late")),
    *(Way("fp8", p) for p in ("dynamic", "table")),
)
#: (way, which seed of the noise), those that are asked about first
DISTANCES = (
    (TORCH, 0),
    *((Way(r, p), 0) for p in ("dynamic", "table", "late") for r in RECIPES[:2]),
    (TORCH, 1),
    (TORCH, 2),
    (Way("fp8", "dynamic"), 0),
    (Way("fp8", "table"), 0),
    (FLOAT, 0),
)


class Sampler:
    """The model, its steps, and the ways in which its attention is computed."""

    def __init__(self, model: dit_model.DiT, steps: int, late: int) -> None:
        self.model, self.steps, self.late = model, steps, late
        self.device = model.position.device
        self.times = [1 - k / steps for k in range(steps + 1)]
        self.calibration: Any = None
        self.static: Any = None  # StaticScales of the way that runs, if it has some

    def noise(self, count: int, seed: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(noise, labels) of a batch: the same on every device."""
        draw = torch.Generator().manual_seed(1_000_003 * seed + number)
        x = torch.randn(count, 1, dit_model.SIDE, dit_model.SIDE, generator=draw)
        return x.to(self.device), (torch.arange(count) % dit_model.CLASSES).to(self.device)

    def static_of(self, way: Way) -> Any:
        """Static scales of a way that has some, which count what they clip."""
        if way.policy != "table":
            return None
        return self.calibration.scales(way.recipe, margin=MARGIN, device=self.device)

    def schedule(self, way: Way) -> Any:
        from qattn.diffusion import Rule, Schedule

        rules = [Rule("bf16", last=self.late)] if way.policy == "late" else []
        return Schedule(way.recipe, *rules)

    @contextlib.contextmanager
    def running(self, way: Way, observer: Any = None, static: Any = None) -> Iterator[Callable]:
        """Gives what says which step is under way: a context manager of the step."""
        if way in (FLOAT, TORCH) and observer is None:
            self.static = None
            yield lambda _step: contextlib.nullcontext()
            return
        from qattn.diffusion import attach

        self.static = static or self.static_of(way)
        schedule = self.schedule(way)
        with attach(self.model, schedule, scales=self.static, on_attention=observer) as run:
            yield lambda step: run.at(step=step, steps=self.steps, sigma=self.times[step])
        reached = run.report().reached
        if len(reached) != len(self.model.blocks):
            raise ValueError(f"{way}: reached {len(reached)} layers of {len(self.model.blocks)}")

    @torch.no_grad()
    def step(self, way: Way, at: Callable, k: int, x: torch.Tensor, labels: torch.Tensor) -> Any:
        """x at the next step."""
        t = torch.full((len(x),), self.times[k], device=self.device)
        eager = torch.compiler.set_stance("force_eager" if way == FLOAT else "default")
        with at(k), eager, dit_model.autocast(self.device.type, enabled=way != FLOAT):
            velocity = self.model(x, t, labels)
        return x + (self.times[k + 1] - self.times[k]) * velocity

    def run(self, way: Way, at: Callable, x: torch.Tensor, labels: torch.Tensor) -> list:
        """x at every step, the noise first and the images last."""
        path = [x]
        for k in range(self.steps):
            path.append(self.step(way, at, k, path[-1], labels))
        return path

    def calibrate(self, count: int, name: str) -> None:
        from qattn.diffusion import calibrate

        def run(observer: Any) -> None:
            with self.running(TORCH, observer) as at:
                self.run(TORCH, at, *self.noise(count, CALIBRATION_SEED, 0))

        self.calibration = calibrate(run, model=name, sigmas=self.times[:-1])

    def clipped(self, images: int) -> dict:
        """What static scales clipped in the sampling that has just run, if it had some."""
        if self.static is None:
            return {}
        rows, shape = self.static.clipped(), self.model.shape
        each = images * shape.tokens * shape.hidden * shape.layers * self.steps
        return {
            "clipped": [sum(getattr(row, role) for row in rows) for role in "qkv"],
            "codes": each * _STATIC[self.static.recipe.name],
        }


@contextlib.contextmanager
def went_on(what: object) -> Iterator[None]:
    """Prints what fails inside, and the rest goes on: a GPU is not borrowed twice for one recipe.
    What failed is not in the result, which is then not complete."""
    try:
        yield
    except (QattnError, RuntimeError, ValueError) as error:
        print(f"FAILED {what}: {type(error).__name__}: {error}", flush=True)


# ---- Beside float32 ------------------------------------------------------------------------------


def psnr(x: torch.Tensor, reference: torch.Tensor) -> list[float]:
    """dB of each image, of a range of 2; 200 where there is no difference."""
    error = (x.double() - reference.double()).square().mean((1, 2, 3)).clamp(min=4e-20)
    return (10 * torch.log10(4 / error)).tolist()


def paired(sampler: Sampler, count: int, seed: int) -> tuple[list[dict], list, list]:
    """(rows, float32's path, [(way, images)] of the sheet) of one batch."""
    x, labels = sampler.noise(count, seed, 0)
    with sampler.running(FLOAT) as at:
        path = sampler.run(FLOAT, at, x, labels)
    rows, sheet = [], [(FLOAT, path[-1])]
    for way in PAIRED:
        with went_on(way):
            row, final = paired_row(sampler, way, path, labels)
            rows.append(row)
            if way != Way("bf16"):
                sheet.append((way, final))
            print(f"{way}: one step {min(row['psnr']):.1f} to {max(row['psnr']):.1f} dB, "
                  f"whole samplings {row['final']:.1f} dB", flush=True)  # fmt: skip
    return rows, path, sheet


def paired_row(sampler: Sampler, way: Way, path: list, labels: torch.Tensor) -> tuple[dict, Any]:
    with sampler.running(way) as at:
        steps = [
            psnr(sampler.step(way, at, k, path[k], labels), path[k + 1])
            for k in range(sampler.steps)
        ]
        final = sampler.run(way, at, path[0], labels)[-1]
    ends = psnr(final, path[-1])
    row = {
        "recipe": way.recipe,
        "policy": way.policy,
        "psnr": [statistics.mean(values) for values in steps],
        "worst": [min(values) for values in steps],
        "final": statistics.mean(ends),
        "final_worst": min(ends),
    }
    return row, final


def write_sheet(path: Path, rows: list[torch.Tensor]) -> None:
    """A picture, PNG in grey: a line a tensor of images from -1 to 1, twice their size."""
    lines = []
    for images in rows:
        inner = images[:, 0, 2:-2, 2:-2]  # without the frame
        pixels = ((inner.clamp(-1, 1) + 1) * 127.5).round().to("cpu", torch.uint8)
        framed = functional.pad(pixels, (0, 1, 0, 1), value=255)
        lines.append(torch.cat(list(framed), 1))
    grey = torch.cat(lines, 0).repeat_interleave(2, 0).repeat_interleave(2, 1)
    height, width = grey.shape
    raw = b"".join(b"\0" + bytes(line.tolist()) for line in grey)
    parts = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)),
             (b"IDAT", zlib.compress(raw, 9)), (b"IEND", b"")]  # fmt: skip
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    ))  # fmt: skip


# ---- Time ----------------------------------------------------------------------------------------


def turns(candidates: dict[str, Callable], device: torch.device, calls: int) -> dict[str, float]:
    """Milliseconds a call, the median of turns; candidates take turns.

    A candidate is a context manager that gives what is called; what it does itself is not timed.
    """
    marks: dict[str, list] = {}
    for name, context in candidates.items():
        with went_on(name), context() as call:
            call()
            marks[name] = []
    for _ in range(TIMED):
        for name, pairs in marks.items():
            begin, end = (_Mark(device) for _ in range(2))
            with candidates[name]() as call:
                begin.set()
                for _ in range(calls):
                    call()
                end.set()
            pairs.append((begin, end))
    if device.type == "cuda":
        torch.cuda.synchronize()
    return {
        name: statistics.median(begin.until(end) for begin, end in pairs) / calls
        for name, pairs in marks.items()
    }


class _Mark:
    """A moment on a device's own clock."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self.time = 0.0

    def set(self) -> None:
        if self.event is not None:
            self.event.record()
        self.time = time.perf_counter()

    def until(self, other: _Mark) -> float:
        if self.event is not None:
            return self.event.elapsed_time(other.event)
        return 1e3 * (other.time - self.time)


@contextlib.contextmanager
def plain(call: Callable, name: str = "") -> Iterator[Callable]:
    """A call; where its name says cudnn, torch's attention is cuDNN's meanwhile."""
    if "cudnn" not in name:
        yield call
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        yield call


@torch.no_grad()
def timing(sampler: Sampler, path: list) -> dict:
    """Of a step in the middle and of the attention of its middle layer."""
    import qattn.torch
    from qattn.diffusion import Place

    k, device = sampler.steps // 2, sampler.device
    x, labels = path[k], sampler.noise(len(path[k]), 0, 0)[1]
    layer, operands = len(sampler.model.blocks) // 2, []

    def capture(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        operands.append((q, k, v))
        return functional.scaled_dot_product_attention(q, k, v)

    sampler.model.blocks[layer].attention = capture
    sampler.step(TORCH, lambda _: contextlib.nullcontext(), k, x, labels)
    sampler.model.blocks[layer].attention = None
    q, key, v = operands[0]
    place = Place(f"blocks.{layer}", k, sampler.times[k], steps=sampler.steps)

    def by_torch() -> None:
        functional.scaled_dot_product_attention(q, key, v)

    def dynamic(recipe: str) -> Callable:
        return lambda: qattn.torch.sdpa(q, key, v, recipe=recipe)

    def static(recipe: str) -> Callable:
        scales = sampler.calibration.scales(recipe, margin=MARGIN)
        options = scales.arguments(place, q, key, v, layout="bhsd")
        return lambda: qattn.attention(q, key, v, layout="bhsd", recipe=recipe, **options)

    calls: dict[str, Callable] = dict.fromkeys(_torch_names(device), by_torch)
    calls["bf16"] = dynamic("bf16")
    for recipe in RECIPES:
        calls[f"{recipe} dynamic"] = dynamic(recipe)
        with went_on(f"{recipe} table"):
            calls[f"{recipe} table"] = static(recipe)
    alone = {name: partial(plain, call, name) for name, call in calls.items()}
    return {
        "batch": len(x),
        "layers": len(sampler.model.blocks),
        "attention": turns(alone, device, CALLS),
        "step": turns(_steps(sampler, k, x, labels), device, 1),
    }


def _torch_names(device: torch.device) -> list[str]:
    return ["torch", "torch cudnn"] if device.type == "cuda" else ["torch"]


def _steps(sampler: Sampler, k: int, x: torch.Tensor, labels: torch.Tensor) -> dict[str, Callable]:
    """What turns() takes: a step of the sampler, each in its way."""

    @contextlib.contextmanager
    def step(way: Way, name: str, static: Any) -> Iterator[Callable]:
        with (
            sampler.running(way, static=static) as at,
            plain(lambda: sampler.step(way, at, k, x, labels), name) as call,
        ):
            yield call

    made = {name: partial(step, TORCH, name, None) for name in _torch_names(sampler.device)}
    for way in (Way("bf16"), *(Way(r, p) for r in RECIPES for p in ("dynamic", "table"))):
        made[str(way)] = partial(step, way, "", sampler.static_of(way))
    return made


# ---- Distances -----------------------------------------------------------------------------------


def distance_row(
    sampler: Sampler, way: Way, seed: int, asked: argparse.Namespace, judge: Judge
) -> dict:
    begun, made = time.monotonic(), []
    with sampler.running(way) as at:
        for number, first in enumerate(range(0, asked.samples, asked.batch)):
            count = min(asked.batch, asked.samples - first)
            x, labels = sampler.noise(count, seed, number)
            made.append(sampler.run(way, at, x, labels)[-1].clamp(-1, 1))
    images = torch.cat(made)
    wanted = torch.cat([torch.arange(len(x)) % dit_model.CLASSES for x in made])
    if sampler.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = round(time.monotonic() - begun, 2)
    shown = dit_model.Images(images, wanted.to(sampler.device), {})
    return {
        "recipe": way.recipe,
        "policy": way.policy,
        "seed": seed,
        "distance": judge.distance(images),
        "agreement": dit_model.accuracy(judge.classifier, shown),
        "seconds": seconds,
        **sampler.clipped(asked.samples),
    }


class Judge:
    """Fréchet distances from the training images, by the classifier of a model's folder."""

    def __init__(self, classifier: Path, kept: Path, device: str) -> None:
        import weights

        self.classifier = dit_model.Classifier().to(device)
        weights.load(dict(self.classifier.named_parameters()), classifier)
        facts = json.loads(kept.read_text())
        self.reference = tuple(
            torch.tensor(facts[name], dtype=torch.float64) for name in ("mean", "covariance")
        )

    def distance(self, images: torch.Tensor) -> float:
        return dit_model.frechet(dit_model.statistics(self.classifier, images), self.reference)


# ---- The command ---------------------------------------------------------------------------------


def evaluate(
    asked: argparse.Namespace,
    files: dict[str, Path],
    result: dict,
    budget: Any,
    keep: Callable[[dict], None],
) -> dict:
    """Adds to `result` what it lacks and time allows; `keep` gets it after every part."""
    from terrain import growth

    training = json.loads(files["training"].read_text())
    shape = dit_model.Shape(**training["shape"])
    unseen = dit_model.read_images(asked.data, "t10k", asked.images)
    judge = Judge(files["classifier"], files["statistics"], asked.device)
    model = dit_model.make(shape, asked.device, files["model"])
    sampler = Sampler(model, asked.steps, asked.late)
    x, labels = sampler.noise(asked.batch, 0, 0)
    with torch.no_grad():
        compiled = asked.compile and dit_model.compile_parts(model, x, labels * 0.1, labels)
    sampler.calibrate(asked.batch, f"fashion_dit {training['sha256'][:16]}")
    told = {
        "model": {name: training[name] for name in training if name != "schema"},
        "evaluated": {
            "steps": asked.steps,
            "late": asked.late,
            "images": asked.samples,
            "batch": asked.batch,
            "margin": MARGIN,
            "calibration_seed": CALIBRATION_SEED,
            "compiled": compiled,
        },
    }
    for name, value in told.items():
        if result.setdefault(name, value) != value:
            raise ValueError(f"{name}: the result is of another; begin one without --resume")
    if "paired" not in result:
        result["maxima"] = growth(sampler.calibration)
        result["floor"] = judge.distance(unseen.pixels)
        print(f"floor: the test images' distance {result['floor']:.4f}", flush=True)
        rows, path, sheet = paired(sampler, asked.batch, 0)
        write_sheet(asked.out.with_suffix(".png"), [x[: dit_model.CLASSES] for _, x in sheet])
        result |= {"paired": rows, "sheet": [list(way) for way, _ in sheet]}
        result["timing"] = timing(sampler, path)
        print(json.dumps(result["timing"]), flush=True)
        keep(result)
    done = {(x["recipe"], x["policy"], x["seed"]) for x in result.setdefault("rows", [])}
    wanted = [(way, seed) for way, seed in DISTANCES if (*way, seed) not in done]
    for way, seed in wanted:
        if not budget.allows(6 if way == FLOAT else 1):
            print(f"budget: {way}, seed {seed} and what follows are left to --resume", flush=True)
            break
        begun = time.monotonic()
        with went_on(f"{way}, seed {seed}"):
            row = distance_row(sampler, way, seed, asked, judge)
            result["rows"].append(row)
            print(f"{way}, seed {seed}: distance {row['distance']:.4f}, "
                  f"agreement {row['agreement']:.3f}, {row['seconds']} s", flush=True)  # fmt: skip
        budget.took(time.monotonic() - begun)
        keep(result)
    result["complete"] = len(result["rows"]) == len(DISTANCES)
    keep(result)
    return result


def table(result: dict) -> str:
    """Markdown, a row a way."""
    lines = ["| attention | noise | distance | agreement |", "|---|---|---|---|"]
    lines += [
        f"| {Way(x['recipe'], x['policy'])} | {x['seed']} | {x['distance']:.4f} | "
        f"{x['agreement']:.3f} |"
        for x in result["rows"]
    ]
    return "\n".join(lines)
