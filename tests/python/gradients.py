"""What the tests of gradients share: operands, and errors against float64."""

import torch
from cases import nrmse
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

from qattn.torch import sdpa


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(length=40, keys=56, heads=4, kv_heads=4, batch=2, dim=32, dim_v=None, seed=0):
    return (
        normal(batch, heads, length, dim, seed=seed),
        normal(batch, kv_heads, keys, dim, seed=seed + 1),
        normal(batch, kv_heads, keys, dim_v or dim, seed=seed + 2),
    )


def family(name, length=512, dim=64, seed=0):
    """N(0,1); K with an offset in some channels; a key that draws much of the mass, of small V."""
    query, key, value = operands(length, length, 2, 2, 1, dim, seed=seed)
    if name == "offset":
        key[..., :8] += 8
    if name == "sink":
        mean = query.mean(-2)
        key[:, :, 0] += 24 * mean / mean.norm(dim=-1, keepdim=True)
        value[:, :, 0] *= 0.05
    return query, key, value


def leaves(given):
    return [x.detach().clone().requires_grad_() for x in given]


def gradients(attention, given, seed=9):
    """(O, gradients) for a random gradient of O."""
    given = leaves(given)
    out = attention(*given)
    grad = normal(*out.shape, seed=seed).to(out.dtype)
    return out.detach(), torch.autograd.grad(out, given, grad)


def errors(given, mask=None, reference_mask=None, dtype=torch.float32, **options):
    """Relative errors of dQ, dK, dV against float64 on the same operands."""
    given = [x.to(dtype) for x in given]
    shape = {name: options[name] for name in ("is_causal", "scale", "enable_gqa")
             if name in options}  # fmt: skip
    _, got = gradients(lambda *x: sdpa(*x, mask, **{"recipe": "int8", **options}), given)
    exact = mask if reference_mask is None else reference_mask
    if exact is not None and exact.dtype != torch.bool:
        exact = exact.double()
    doubles = [x.double() for x in given]
    _, want = gradients(lambda *x: torch_sdpa(*x, exact, **shape), doubles)
    for x, y in zip(got, given, strict=True):
        assert x.shape == y.shape and x.dtype == dtype
    return [nrmse(x, y) for x, y in zip(got, want, strict=True)]


def padding(keys=56, real=40):
    return (torch.arange(keys) < torch.tensor([keys, real])[:, None])[:, None, None]
