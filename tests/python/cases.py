"""What several test files share: inputs, tolerances, errors."""

import numpy as np

import qattn

RECIPES = [str(recipe) for recipe in qattn.recipes()]

# NRMSE against float64 on N(0,1) inputs of a few hundred keys: about 1.5 x docs/NUMERICS.md. Tight
# bounds are test_error_rule.py's; here a recipe must only be itself and not a neighbour.
TOLERANCE = {
    "f32": 2e-6,
    "f16": 1e-3,
    "bf16": 8e-3,
    "int8": 1.5e-2,
    "int8_fp8": 5.5e-2,
    "int8_full": 2e-2,
    "fp8": 8e-2,
    "fp8_p16": 7e-2,
    "mxfp8": 9e-2,
    "nvfp4_qk": 0.2,
    "nvfp4": 0.27,
}
# Half an ulp of the output's format, over what float32 sums of tens of terms lose.
TIGHT = {"float32": 4e-6, "float16": 6e-4, "bfloat16": 5e-3}
# Times TOLERANCE, of NRMSE: few keys average little of a recipe's error away. 1500 draws of
# test_properties.py a recipe had at most 1.5.
FEW_KEYS = 2

# format of Q and K, of V; V of the recipes with a 16-bit V stays as it is
CODED = {
    "int8": ("s8", None),
    "int8_fp8": ("s8", "e4m3"),
    "int8_full": ("s8", "s8"),
    "fp8": ("e4m3", "e4m3"),
    "fp8_p16": ("e4m3", "e4m3"),
    "mxfp8": ("mxfp8", "mxfp8"),
    "nvfp4_qk": ("nvfp4", None),
    "nvfp4": ("nvfp4", "nvfp4"),
}


def loose(recipe, dtype):
    """The NRMSE that a recipe may have on few keys, with the rounding of an output of that dtype.

    f32 is not rounded at all: what is left are its sums and the output's format.
    """
    return TIGHT[dtype] if recipe == "f32" else np.hypot(FEW_KEYS * TOLERANCE[recipe], TIGHT[dtype])


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(dtype)


def qkv(batch=2, queries=70, keys=150, heads=4, kv_heads=2, dim=32, dim_v=None, seed=0):
    """q, k, v in layout bshd, float32."""
    return (
        normal(batch, queries, heads, dim, seed=seed),
        normal(batch, keys, kv_heads, dim, seed=seed + 1),
        normal(batch, keys, kv_heads, dim_v or dim, seed=seed + 2),
    )


def array(x):
    """float64 numpy array of anything."""
    if hasattr(x, "detach"):
        x = x.detach().double().numpy()
    return np.asarray(x, np.float64)


def nrmse(out, ref):
    out, ref = array(out), array(ref)
    return np.linalg.norm(out - ref) / np.linalg.norm(ref)
