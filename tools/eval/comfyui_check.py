"""ComfyUI's own models beside qattn's override, on the CPU: CHECKOUT [--recipe NAME ...]

CHECKOUT is a folder with ComfyUI's source, as of its `optimized_attention_override`; what it
imports must be installed (einops, psutil, torchsde, aiohttp, ...). Small models of random weights
run once by themselves and once with qattn.diffusion.comfyui.override() in transformer_options,
through ComfyUI's wrapper of attention functions:

* Flux: blocks of two streams and of one, heads apart (skip_reshape), with and without a mask;
* Wan: self and cross attention of flat heads;
* CrossAttention of Stable Diffusion, whose mask is bool or added.

ComfyUI's function is torch's (--use-pytorch-cross-attention), as on GPUs: the one that CPUs have
by default adds bool masks as numbers.

One line a model: the error of its output, the largest of its attentions, each beside ComfyUI's on
the same operands (NRMSE), and how many calls the override answered. Exit code 0: every error is at
most its recipe's, every call of attention came to the override, and without a mask outputs are ten
errors away. 1: not so. 2: there is no such checkout.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from qattn.diffusion import comfyui

#: NRMSE of an attention that a recipe may have; of normal numbers it has half of that
#: (docs/tables/recipe-errors.md)
ALLOWED = {"f32": 1e-5, "bf16": 1e-2, "int8": 3e-2, "int8_full": 4e-2}

Model = Callable[[dict[str, Any]], torch.Tensor]


def nrmse(x: torch.Tensor, expected: torch.Tensor) -> float:
    error = (x.double() - expected.double()).pow(2).mean().sqrt()
    return float(error / expected.double().pow(2).mean().sqrt())


def randomised(module: torch.nn.Module) -> torch.nn.Module:
    """Weights that keep numbers near 1; ComfyUI's own are not initialised."""
    for parameter in module.parameters():
        fan_in = parameter.shape[-1] if parameter.dim() > 1 else 0
        values = torch.randn(parameter.shape)
        parameter.data = values / fan_in**0.5 if fan_in else 1 + 0.1 * values
    return module.eval()


def flux(masked: bool) -> Model:
    from comfy import ops
    from comfy.ldm.flux.model import Flux

    model = randomised(Flux(
        in_channels=4, out_channels=4, vec_in_dim=16, context_in_dim=32, hidden_size=256,
        mlp_ratio=2.0, num_heads=4, depth=2, depth_single_blocks=2, axes_dim=[16, 24, 24],
        theta=10000, patch_size=2, qkv_bias=True, guidance_embed=False, dtype=torch.float32,
        device="cpu", operations=ops.disable_weight_init,
    ))  # fmt: skip
    x, text, y = torch.randn(2, 4, 32, 24), torch.randn(2, 40, 32), torch.randn(2, 16)
    tokens = 40 + 16 * 12
    mask = (torch.rand(2, tokens, tokens) > 0.5).float().log() if masked else None

    def run(options: dict[str, Any]) -> torch.Tensor:
        return model(x, torch.tensor([0.7, 0.7]), text, y, transformer_options=options,
                     attention_mask=mask)  # fmt: skip

    return run


def wan() -> Model:
    from comfy import ops
    from comfy.ldm.wan.model import WanModel

    model = randomised(WanModel(
        text_len=32, in_dim=4, dim=256, ffn_dim=512, freq_dim=64, text_dim=48, out_dim=4,
        num_heads=4, num_layers=2, dtype=torch.float32, device="cpu",
        operations=ops.disable_weight_init,
    ))  # fmt: skip
    x, text = torch.randn(1, 4, 3, 16, 16), torch.randn(1, 32, 48)

    def run(options: dict[str, Any]) -> torch.Tensor:
        return model(x, torch.tensor([500.0]), text, transformer_options=options)

    return run


def cross_attention(added: bool | None) -> Model:
    from comfy import ops
    from comfy.ldm.modules.attention import CrossAttention

    layer = randomised(CrossAttention(
        256, 128, heads=4, dim_head=64, dtype=torch.float32, device="cpu",
        operations=ops.disable_weight_init,
    ))  # fmt: skip
    x, context = torch.randn(2, 150, 256), torch.randn(2, 77, 128)
    seen = torch.rand(2, 150, 77) > 0.5
    mask = None if added is None else seen.float().log() if added else seen

    def run(options: dict[str, Any]) -> torch.Tensor:
        return layer(x, context, mask=mask, transformer_options=options)

    return run


#: name: (the model, the same without its mask)
MODELS: dict[str, tuple[Callable[[], Model], Callable[[], Model] | None]] = {
    "flux": (lambda: flux(False), None),
    "flux, mask": (lambda: flux(True), lambda: flux(False)),
    "wan": (wan, None),
    "cross attention": (lambda: cross_attention(None), None),
    "cross attention, bool mask": (lambda: cross_attention(False), lambda: cross_attention(None)),
    "cross attention, added mask": (lambda: cross_attention(True), lambda: cross_attention(None)),
}


def made(make: Callable[[], Model]) -> Model:
    torch.manual_seed(5)
    return make()


def own_calls(model: Model) -> tuple[torch.Tensor, int]:
    """What ComfyUI computes, and how many attentions that is."""
    calls = 0

    def count(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return func(*args, **kwargs)

    counted = model({"optimized_attention_override": count})
    own = model({})
    if not torch.equal(own, counted):
        raise SystemExit("ComfyUI's own override changes its result")
    return own, calls


class Beside:
    """qattn's override, and the largest error of its calls beside ComfyUI's function."""

    def __init__(self, recipe: str) -> None:
        self.override, self.error = comfyui.override(recipe), 0.0

    def __call__(self, func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = self.override(func, *args, **kwargs)
        self.error = max(self.error, nrmse(out, func(*args, **kwargs)))
        return out

    def calls(self) -> int:
        return sum(sum(layer.calls.values()) for layer in self.override.report().layers)


def check(name: str, recipe: str) -> bool:
    make, without = MODELS[name]
    model = made(make)
    expected, attentions = own_calls(model)
    beside = Beside(recipe)
    error = nrmse(model({"optimized_attention_override": beside}), expected)
    worst = max(error, beside.error)
    good = worst <= ALLOWED[recipe] and beside.calls() == attentions > 0
    line = f"{name}, {recipe}: output {error:.1e}, attentions up to {beside.error:.1e}"
    line += f" of {ALLOWED[recipe]:.0e}, {beside.calls()} of {attentions} calls"
    if without is not None:
        change = nrmse(made(without)({"optimized_attention_override": Beside(recipe)}), expected)
        good = good and change > 10 * error
        line += f"; without its mask {change:.1e}"
    print(line + ("" if good else ": WRONG"))
    return good


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--recipe", action="append", choices=sorted(ALLOWED))
    arguments = parser.parse_args()
    if not (arguments.checkout / "comfy" / "ldm" / "modules" / "attention.py").is_file():
        print(f"{arguments.checkout}: holds no comfy/ldm/modules/attention.py", file=sys.stderr)
        return 2
    sys.path.insert(0, str(arguments.checkout.resolve()))
    sys.argv[1:] = ["--cpu", "--use-pytorch-cross-attention"]  # ComfyUI reads the command line
    import comfy.options

    comfy.options.enable_args_parsing()
    with torch.inference_mode():
        results = [check(name, recipe) for name in MODELS for recipe in arguments.recipe or ALLOWED]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
