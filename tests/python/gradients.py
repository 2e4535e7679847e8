"""What the tests of gradients share: operands, and errors against float64."""

import math

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


# ---- Rows under biases beside which scores vanish ------------------------------------------------

FAR = [-3.4e38, torch.finfo(torch.float32).min, -1e20, -1e9, 1e9, 1e30]


def far_row(value, some):
    """A mask whose row 5 lies far off, and that row's P: uniform over its largest biases."""
    mask = torch.zeros(8, 12)
    mask[5] = value
    chosen = torch.ones(12)
    if some:  # other keys lie twice as far below, or are hidden
        mask[5, 7:] = 0 if value > 0 else -math.inf if value < -1e38 else value * 2
        mask[5, 3] = -math.inf
        chosen[7:], chosen[3] = 0, 0
    return mask, chosen / chosen.sum()


def row_gradients(given, mask, recipe, backward, row=5):
    """O, and the gradients of that row alone, with the row's gradient of O."""
    own = leaves(given)
    out = sdpa(*own, mask, recipe=recipe, backward=backward, enable_gqa=True)
    grad = torch.zeros_like(out)
    grad[:, :, row] = normal(*grad[:, :, row].shape, seed=3)
    return out.detach(), torch.autograd.grad(out, own, grad), grad[:, :, row : row + 1]


def exact_row_gradients(given, share, grad, row=5):
    """In float64, of a row (row,) of P of every head, or (B, H, 1, S)."""
    query, key, value = (x.double() for x in given)
    group = query.shape[1] // key.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (key, value))
    share = share.double().expand(*k.shape[:2], 1, -1)
    dp = grad.double() @ v.mT
    ds = share * (dp - (share * dp).sum(-1, keepdim=True)) / math.sqrt(query.shape[-1])
    dk, dv = ds.mT @ query[:, :, row : row + 1], share.mT @ grad.double()
    return ds @ k, *(x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))


def check_far_row(value, some, recipe, backward, bound):
    given = operands(8, 12, 4, 2)
    mask, share = far_row(value, some)
    out, got, grad = row_gradients(given, mask, recipe, backward)
    v = given[2].repeat_interleave(2, 1).double()
    assert nrmse(out[:, :, 5], share.double() @ v) < 2e-2
    want = exact_row_gradients(given, share, grad)
    assert (got[0][:, :, :5] == 0).all() and (got[0][:, :, 6:] == 0).all()
    for x, y in zip((got[0][:, :, 5:6], *got[1:]), want, strict=True):
        assert nrmse(x, y) < bound
