"""What the GPU tests share: inputs, recipes by architecture, a float64 reference on the GPU."""

import math

import torch
from cases import TOLERANCE as CPU_TOLERANCE

import qattn

DEVICE = "cuda"

#: from this compute capability on; whatever is not listed may be refused
SINCE = {
    "f16": (8, 0),
    "bf16": (8, 0),
    "int8": (8, 0),
    "int8_full": (8, 0),
}
CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
# Where mma.sync of FP8 is one instruction, and Hopper, which has wgmma.
if CAPABILITY in ((8, 9), (9, 0)) or CAPABILITY >= (12, 0):
    SINCE["int8_fp8"] = SINCE["fp8"] = (8, 9)
RECIPES = [name for name, since in SINCE.items() if CAPABILITY == (0, 0) or CAPABILITY >= since]
#: one of each kind of product, for features that do not depend on the recipe
KINDS = [name for name in ("bf16", "int8_full") if name in RECIPES]

# K has a scale per 64 keys by default, the CPU one per token; both stay within the same bounds.
# 16-bit inputs and outputs add their own rounding to the CPU's bounds, which are of float32 ones.
TOLERANCE = {name: CPU_TOLERANCE[name] + 6e-4 for name in SINCE}
TOLERANCE["f16"], TOLERANCE["bf16"] = 2e-3, 1e-2


def dtype_of(recipe):
    return torch.bfloat16 if recipe == "bf16" else torch.float16


def normal(*shape, dtype=torch.float16, seed=0, device=DEVICE):
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def qkv(batch=2, queries=200, keys=333, heads=4, kv_heads=2, dim=128, dim_v=None,
        dtype=torch.float16, seed=0):
    """q, k, v in layout bshd."""
    return (
        normal(batch, queries, heads, dim, dtype=dtype, seed=seed),
        normal(batch, keys, kv_heads, dim, dtype=dtype, seed=seed + 1),
        normal(batch, keys, kv_heads, dim_v or dim, dtype=dtype, seed=seed + 2),
    )


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def sequence(q, k, v, *, causal=False, window=(-1, -1), softcap=None, sinks=None, mask=None,
             alibi=None, scale=None):
    """(O, LSE) in float64 of one sequence: q (Sq, Hq, D), k (Sk, Hkv, D), v (Sk, Hkv, Dv).

    mask: (Hq, Sq, Sk), bool or added; alibi: (Hq). docs/NUMERICS.md, "The function, in this order".
    """
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    s = q @ k.transpose(1, 2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    i = torch.arange(q.shape[1], device=q.device)[:, None]
    j = torch.arange(k.shape[1], device=q.device)[None, :]
    offset = j - i - (k.shape[1] - q.shape[1])
    if mask is not None and mask.dtype != torch.bool:
        s = s + mask.double()
    if alibi is not None:
        s = s - alibi.double()[:, None, None] * offset.abs()
    left, right = window
    hidden = torch.zeros_like(offset, dtype=torch.bool)
    if causal or right >= 0:
        hidden |= offset > (0 if causal else right)
    if left >= 0:
        hidden |= offset < -left
    s = s.masked_fill(hidden, -math.inf)
    if mask is not None and mask.dtype == torch.bool:
        s = s.masked_fill(~mask, -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.double()[:, None, None].expand(heads, s.shape[1], 1)], -1)
        v = torch.cat([v, v.new_zeros(heads, 1, v.shape[-1])], 1)
    if s.shape[-1] == 0:
        lse = s.new_full(s.shape[:2], -math.inf)
    else:
        lse = torch.logsumexp(s, -1)
    p = torch.exp(s - lse[..., None]).nan_to_num(0.0)
    return (p @ v).transpose(0, 1), lse


def reference(q, k, v, *, mask=None, alibi=None, **options):
    """The same of batches in layout bshd; mask broadcasts to (B, Hq, Sq, Sk), alibi to (B, Hq)."""
    batch, queries, heads, _ = q.shape
    if mask is not None:
        mask = mask.expand(batch, heads, queries, k.shape[1])
    if alibi is not None:
        alibi = alibi.expand(batch, heads)
    rows = [
        sequence(q[b], k[b], v[b], mask=None if mask is None else mask[b],
                 alibi=None if alibi is None else alibi[b], **options)
        for b in range(batch)
    ]
    return torch.stack([o for o, _ in rows]), torch.stack([lse for _, lse in rows])


def nrmse(out, ref):
    out, ref = out.double(), ref.double()
    return float((out - ref).norm() / ref.norm())


def check(recipe, got, want):
    """(O, LSE) against float64: the recipe's error, and rows that must be exactly empty."""
    (out, lse), (ref, ref_lse) = got, want
    assert out.shape == ref.shape and lse.shape == ref_lse.shape
    empty = torch.isneginf(ref_lse)
    assert torch.equal(torch.isneginf(lse), empty)
    assert not torch.isnan(out).any()
    error = nrmse(out, ref)
    assert error < TOLERANCE[recipe], f"{recipe}: NRMSE {error:.2e}"
    difference = (lse.double() - ref_lse)[~empty].abs()
    if difference.numel():
        # Two bounds: a wrong factor shifts every row, a broken row stands out.
        assert float(difference.mean()) < (2e-3 if recipe in ("f16", "bf16") else 3e-2)
        assert float(difference.max()) < (2e-2 if recipe in ("f16", "bf16") else 0.3)


def attention(q, k, v, recipe, **options):
    return qattn.attention(q, k, v, recipe=recipe, return_lse=True, **options)
