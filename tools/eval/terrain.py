#!/usr/bin/env python3
"""What low-precision attention costs a diffusion model that others trained: six-step sampling with
the consistency U-Net of the PyPI package adaptive-terrain-diffusion (MIT), on a CPU.

    pip install --no-deps adaptive-terrain-diffusion==0.4.2 && pip install onnx
    python tools/eval/terrain.py evaluate -o RESULT.json
    python tools/eval/terrain.py table RESULT.json                       # Markdown

Exit status: 1 where a package or file is missing or something is refused.

The network has 10.5 M parameters and 28 self-attentions: 9 of 2 heads and 1024 tokens, 9 of 3 and
256, 10 of 4 and 64, D 32. It was distilled to one step; six are taken here as consistency models
are sampled: x = network(x + sigma * noise, sigma) from sigma 80 down. Everything but attention is
torch in float32, so that only attention differs. Scales by policy: "dynamic" are the library's own,
"table", "max" and "law" those of qattn.diffusion.calibrate(), "between" a table whose sigmas are
not the sampler's but for the ends. Calibration sees other noise than what is judged. PSNR is of the
final image against float32's own sampling with the same noise, by the range of float32's image.

RESULT.json: {"schema": 1, "provenance": date, commit, versions, CPU; "model": {"package", "file",
"file_sha256", "attentions"}, "evaluated": {"sigmas", "between", "images", "seeds",
"calibration_seeds", "margin", "reference": the law's step}, "maxima": {"q", "k", "v": {"median",
"worst"}: how many times as large as the smallest step's the largest step's maximum is, over layers
and heads}, "rows": [row]}.
row: {"recipe", "policy", "psnr": mean over images in dB, "worst", "psnrs"} and of static scales
"clipped": codes of q, k, v, "codes": how many there were, "most_clipped": {"layer", "step",
"codes"} or null.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "bench")]

import numpy as np  # noqa: E402

SCHEMA = 1
PACKAGE, MODULE = "adaptive-terrain-diffusion", "terrain_diffusion"
SIGMAS = (80.0, 24.4, 8.0, 2.5, 0.8, 0.2)
BETWEEN = (80.0, 12.0, 1.6, 0.2)
SIZE = 128  # pixels a side
MARGIN = 1.1
REFERENCE = 2  # the law's step, the one whose scales it takes to all others
#: recipes with static scales, the two that are asked about first, and recipes without
STATIC = ("int8", "int8_full", "int8_fp8", "fp8", "fp8_p16")
DYNAMIC = ("f32", "f16", "bf16", "mxfp8", "nvfp4_qk", "nvfp4")
POLICIES = ("dynamic", "table", "max", "law", "between")


def model_file() -> Path:
    """The package's network. Raises ModuleNotFoundError, FileNotFoundError where it is not."""
    spec = importlib.util.find_spec(MODULE)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{PACKAGE}: is not installed")
    files = sorted((Path(spec.origin).parent / "weights").glob("*.onnx"))
    if not files:
        raise FileNotFoundError(f"{PACKAGE}: no .onnx file in {spec.origin}")
    return files[0]


class Sampler:
    """Consistency sampling of several terrains, whose attention is a function.

    attend(place, q, k, v): q, k, v torch tensors (B, S, H, D), to which 1 is the softmax scale;
    returns (B, S, H, D).
    """

    def __init__(self, images: int) -> None:
        import onnx_network

        self.network = onnx_network.Network(model_file())
        self.images = images

    def run(self, seed: int, attend: Callable, sigmas: tuple[float, ...] = SIGMAS):
        """(images, 128, 128) float32, from noise of that seed."""
        import torch
        from qattn.diffusion import Place

        labels = torch.linspace(0.1, 0.9, self.images)
        x = torch.zeros(self.images, 1, SIZE, SIZE)
        for step, sigma in enumerate(sigmas):

            def attention(layer, q, k, v):
                place = Place(layer, step, sigma, steps=len(sigmas))  # noqa: B023
                heads = q.shape[0] // self.images
                parts = (self.images, heads, q.shape[1])
                out = attend(
                    place,
                    *(y.reshape(*parts, -1).permute(0, 3, 1, 2).contiguous() for y in (q, k, v)),
                )
                return out.permute(0, 2, 3, 1).reshape(q.shape)

            noise = np.random.default_rng((seed, step)).standard_normal(x.shape)
            given = {
                "noisy": x + torch.from_numpy(noise.astype(np.float32)) * sigma,
                "sigma": torch.full((self.images,), sigma),
                "difficulty": labels,
            }
            x = self.network.run(given, attention)["denoised"]
        return x[:, 0].numpy()


def float_attention(_place, q, k, v):
    """The judge: torch's softmax and products in float32."""
    import torch

    scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def psnr(image: np.ndarray, reference: np.ndarray) -> float:
    """dB of one image, by the reference's range."""
    error = np.mean((image.astype(np.float64) - reference) ** 2)
    return float(10 * np.log10(np.ptp(reference).astype(np.float64) ** 2 / error))


def calibrated(sampler: Sampler, seeds: list[int], sigmas: tuple[float, ...] = SIGMAS):
    """qattn.diffusion.calibrate() over float32's own sampling."""
    from qattn.diffusion import calibrate

    def run(on_attention):
        def attend(place, q, k, v):
            on_attention(place, q, k, v)
            return float_attention(place, q, k, v)

        for seed in seeds:
            sampler.run(seed, attend, sigmas)

    return calibrate(run, model=f"{PACKAGE} {importlib.metadata.version(PACKAGE)}", sigmas=sigmas)


class LowPrecision:
    """Attention by a recipe, with static scales where there are some."""

    def __init__(self, recipe: str, scales=None) -> None:
        self.recipe, self.scales, self.codes = recipe, scales, 0

    def __call__(self, place, q, k, v):
        import qattn

        options = {}
        if self.scales is not None:
            options = self.scales.arguments(place, q, k, v)
            self.codes += sum(
                x.numel() for role, x in zip("qkv", (q, k, v)) if f"{role}_scale" in options
            )
        return qattn.attention(q, k, v, recipe=self.recipe, scale=1.0, **options)

    def facts(self) -> dict:
        """What was clipped."""
        if self.scales is None:
            return {}
        rows = self.scales.clipped()
        most = max(rows, key=lambda x: x.total)
        place = {"layer": most.layer, "step": most.step, "codes": most.total}
        return {
            "clipped": [sum(getattr(x, role) for x in rows) for role in "qkv"],
            "codes": self.codes,
            "most_clipped": place if most.total else None,
        }


def growth(calibration) -> dict:
    """How far the maxima move over the steps."""
    result = {}
    for kind, name in (("q", "q"), ("k_centred", "k"), ("v", "v")):
        ratios = np.concatenate(
            [(x := getattr(m, kind)).max(0) / x.min(0) for m in calibration.layers.values()]
        )
        result[name] = {"median": float(np.median(ratios)), "worst": float(ratios.max())}
    return result


def cells(recipes: list[str] | None, policies: list[str] | None) -> list[tuple[str, str]]:
    """(recipe, policy) of what is measured; those that are asked about most first."""
    every = [(r, p) for r in STATIC[:2] for p in POLICIES[:-1]]
    every += [(r, "dynamic") for r in DYNAMIC]
    every += [(r, p) for r in STATIC[2:] for p in POLICIES[:-1]]
    every += [(r, "between") for r in STATIC[:2]]
    return [(r, p) for r, p in every if r in (recipes or [r]) and p in (policies or [p])]


def evaluate(asked: argparse.Namespace, keep: Callable[[dict], None] = lambda _: None) -> dict:
    """The result; `keep` gets it after every row."""
    import onnx
    import qattn
    import torch
    from qbench import provenance

    torch.set_num_threads(asked.threads)
    wanted = cells(asked.recipes, asked.policies)
    sampler, file = Sampler(asked.images), model_file()
    found = {"table": calibrated(sampler, asked.calibration_seeds)}
    reference = {seed: sampler.run(seed, float_attention) for seed in asked.seeds}
    result = {
        "schema": SCHEMA,
        "provenance": {
            **provenance.common(asked.commit),
            **provenance.cpu_facts(torch, qattn, asked.threads),
            "onnx": onnx.__version__,
        },
        "model": {
            "package": found["table"].model,
            "file": file.name,
            "file_sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
            "attentions": len(sampler.network.layers),
        },
        "evaluated": {
            "sigmas": SIGMAS,
            "between": BETWEEN,
            "images": asked.images,
            "seeds": asked.seeds,
            "calibration_seeds": asked.calibration_seeds,
            "margin": MARGIN,
            "reference": REFERENCE,
        },
        "maxima": growth(found["table"]),
        "rows": [],
    }
    for recipe, policy in wanted:
        scales = None
        if policy != "dynamic":
            of, named = ("between", "table") if policy == "between" else ("table", policy)
            if of not in found:
                found[of] = calibrated(sampler, asked.calibration_seeds, BETWEEN)
            reference_step = REFERENCE if policy == "law" else None
            scales = found[of].scales(recipe, policy=named, margin=MARGIN, reference=reference_step)
        attend, values = LowPrecision(recipe, scales), []
        for seed in asked.seeds:
            made = sampler.run(seed, attend)
            values += [psnr(a, b) for a, b in zip(made, reference[seed])]
        row = {"recipe": recipe, "policy": policy, "psnr": float(np.mean(values))}
        row |= {"worst": min(values), "psnrs": values, **attend.facts()}
        result["rows"].append(row)
        keep(result)
    return result


def table(result: dict) -> str:
    """Markdown, a line a recipe."""
    by_place = {(row["recipe"], row["policy"]): row for row in result["rows"]}
    policies = [p for p in POLICIES if any(key[1] == p for key in by_place)]
    lines = [f"| recipe | {' | '.join(policies)} |", "|---" * (len(policies) + 1) + "|"]
    for recipe in dict.fromkeys(r for r, _ in by_place):
        rows = [by_place.get((recipe, p)) for p in policies]
        texts = (f"{row['psnr']:.1f} ({row['worst']:.1f})" if row else "" for row in rows)
        lines.append(f"| {recipe} | {' | '.join(texts)} |")
    return "\n".join(lines)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    summary, _, rest = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def numbers(text: str) -> list[int]:
        return [int(x) for x in text.split(",")]

    def names(text: str) -> list[str]:
        return text.split(",")

    run = commands.add_parser("evaluate", help="sample by recipe and policy")
    run.add_argument("-o", "--out", type=Path, required=True, help="JSON file, kept row by row")
    run.add_argument("--images", type=int, default=2, help="terrains of a seed")
    run.add_argument("--seeds", type=numbers, default=[1, 2], help="of the noise, e.g. 1,2")
    run.add_argument("--calibration-seeds", type=numbers, default=[90, 91])
    run.add_argument("--recipes", type=names, help="e.g. int8,int8_full; default: all")
    run.add_argument("--policies", type=names, help=f"of {','.join(POLICIES)}; default: all")
    run.add_argument("--threads", type=int, default=1, help="torch's")
    run.add_argument("--commit", help="what runs, where the tree is no git checkout")
    show = commands.add_parser("table", help="print a result")
    show.add_argument("result", type=Path)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    asked = parse(arguments)
    try:
        if asked.command == "table":
            result = json.loads(asked.result.read_text())
            if result.get("schema") != SCHEMA:
                raise ValueError(f"schema: {result.get('schema')!r} should be {SCHEMA}")
        else:

            def keep(made: dict) -> None:
                asked.out.write_text(json.dumps(made, indent=1) + "\n")

            result = evaluate(asked, keep)
        print(table(result))
    except (OSError, ValueError, KeyError, ImportError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
