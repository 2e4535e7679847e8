"""qattn.torch.sdpa against torch.nn.functional.scaled_dot_product_attention."""

import numpy as np
import pytest
import torch
from cases import nrmse
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

import qattn
from qattn.torch import sdpa


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(q, k, v=None, dtype=torch.float32):
    return (
        normal(*q, dtype=dtype),
        normal(*k, dtype=dtype, seed=1),
        normal(*(v or k), dtype=dtype, seed=2),
    )


def agree(*args, recipe="f32", tolerance=3e-6, **kwargs):
    expected = torch_sdpa(*args, **kwargs)
    out = sdpa(*args, recipe=recipe, **kwargs)
    assert out.shape == expected.shape and out.dtype == expected.dtype
    if out.numel() == 0:
        return
    assert torch.isfinite(out).all()
    if expected.abs().max() == 0:
        assert out.abs().max() == 0
    else:
        assert nrmse(out, expected) <= tolerance


LENGTHS = [(64, 64), (40, 150), (150, 40), (1, 33), (33, 1), (129, 128)]
LEADS = [(), (3,), (2, 3), (2, 2, 3), (2, 1, 2, 2)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length, keys", LENGTHS)
@pytest.mark.parametrize("lead", LEADS, ids=str)
def test_shapes_and_causal(lead, length, keys, is_causal):
    given = operands((*lead, length, 32), (*lead, keys, 32), (*lead, keys, 48))
    agree(*given, is_causal=is_causal)
    agree(*given, is_causal=is_causal, scale=0.7)


@pytest.mark.parametrize("dtype, recipe, tolerance", [
    (torch.float16, "f32", 6e-4), (torch.bfloat16, "f32", 5e-3),
    (torch.float16, "f16", 1e-3), (torch.bfloat16, "bf16", 8e-3),
    (torch.float32, "int8", 0.015), (torch.float16, "int8_full", 0.02),
    (torch.bfloat16, "int8_full", 0.02), (torch.float32, "fp8", 0.08),
    (torch.float32, "mxfp8", 0.09), (torch.float32, "nvfp4", 0.27),
    (torch.float32, "int8_fp8", 0.055), (torch.float32, "nvfp4_qk", 0.2),
    (torch.float32, "fp8_p16", 0.07), (torch.float32, "auto", 0.02),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("is_causal", [False, True])
def test_dtypes_and_recipes(dtype, recipe, tolerance, is_causal):
    given = operands((2, 4, 130, 64), (2, 4, 200, 64), dtype=dtype)
    agree(*given, recipe=recipe, tolerance=tolerance, is_causal=is_causal)


HEADS = [(1, 1), (7, 13), (33, 100), (65, 65), (130, 255), (320, 320), (576, 512)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("e, ev", HEADS)
def test_heads_of_any_size(e, ev, is_causal):
    given = operands((2, 3, 50, e), (2, 3, 70, e), (2, 3, 70, ev))
    agree(*given, is_causal=is_causal)
    agree(*given, is_causal=is_causal, recipe="int8_full", tolerance=0.03)
    halves = operands((3, 50, e), (3, 70, e), (3, 70, ev), dtype=torch.float16)
    agree(*halves, is_causal=is_causal, recipe="f16", tolerance=2e-3)


MASKS = [(64, 90), (1, 90), (64, 1), (1, 64, 90), (3, 64, 90), (2, 1, 1, 90), (2, 3, 64, 90),
         (1, 1, 64, 1), (1, 3, 1, 90)]  # fmt: skip


@pytest.mark.parametrize("shape", MASKS, ids=str)
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
@pytest.mark.parametrize("recipe, tolerance", [("f32", 3e-6), ("int8_full", 0.03)])
def test_masks(shape, kind, recipe, tolerance):
    given = operands((2, 3, 64, 32), (2, 3, 90, 32))
    mask = normal(*shape, seed=3)
    mask = mask > -0.5 if kind is torch.bool else mask
    agree(*given, mask, recipe=recipe, tolerance=tolerance)
    agree(*given, attn_mask=mask, recipe=recipe, tolerance=tolerance, scale=0.2)


def test_masks_of_other_ranks_and_dtypes():
    mask = normal(2, 2, 1, 10, 20, seed=3) > 0
    agree(*operands((2, 2, 3, 10, 16), (2, 2, 3, 20, 16)), mask)
    agree(*operands((10, 16), (20, 16)), mask[0, 0, 0])
    half = operands((2, 3, 10, 16), (2, 3, 20, 16), dtype=torch.float16)
    agree(*half, normal(10, 20), tolerance=1e-3)
    agree(*half, normal(10, 20).half(), tolerance=1e-3)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
@pytest.mark.parametrize("recipe", ["f32", "int8_full", "nvfp4"])
def test_rows_without_keys_are_zero_as_in_torch(recipe, kind):
    given = operands((2, 3, 16, 32), (2, 3, 40, 32))
    mask = torch.ones(16, 40, dtype=torch.bool)
    mask[5] = mask[11] = False
    if kind is torch.float32:
        mask = torch.zeros(16, 40).masked_fill(~mask, -torch.inf)
    out, expected = sdpa(*given, mask, recipe=recipe), torch_sdpa(*given, mask)
    assert (expected[:, :, [5, 11]] == 0).all() and (out[:, :, [5, 11]] == 0).all()
    assert torch.isfinite(out).all()


BROADCAST = [
    ((2, 4, 10, 16), (1, 4, 20, 16), None),
    ((1, 4, 10, 16), (3, 4, 20, 16), None),
    ((2, 4, 10, 16), (4, 20, 16), None),
    ((2, 4, 10, 16), (2, 1, 20, 16), None),
    ((2, 1, 10, 16), (2, 4, 20, 16), None),
    ((1, 2, 10, 16), (1, 2, 20, 16), (4, 2, 20, 16)),
    ((10, 16), (2, 3, 20, 16), (20, 16)),
    ((2, 1, 4, 10, 16), (3, 4, 20, 16), (2, 3, 1, 20, 16)),
]


@pytest.mark.parametrize("q, k, v", BROADCAST, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_broadcasting(q, k, v, is_causal):
    agree(*operands(q, k, v), is_causal=is_causal)


@pytest.mark.parametrize("lead", [(), (2,), (2, 2)], ids=str)
@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (4, 1), (3, 3), (6, 2)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_enable_gqa(lead, heads, kv_heads, is_causal):
    given = operands((*lead, heads, 10, 16), (*lead, kv_heads, 20, 16))
    agree(*given, enable_gqa=True, is_causal=is_causal)
    agree(*given, normal(heads, 10, 20) > 0, enable_gqa=True)


@pytest.mark.parametrize("q, k", [((2, 3, 0, 16), (2, 3, 5, 16)), ((2, 3, 5, 16), (2, 3, 0, 16)),
                                  ((0, 3, 5, 16), (0, 3, 5, 16)), ((2, 0, 5, 16), (2, 0, 5, 16))],
                         ids=str)  # fmt: skip
def test_empty(q, k):
    agree(*operands(q, k))
    agree(*operands(q, k), is_causal=True)


def test_views():
    packed = normal(2, 10, 3, 4, 16)  # (B, L, 3, H, E)
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    agree(q, k, v)
    agree(q.mT.contiguous().mT, k, v)  # last stride is not 1: copied
    agree(normal(2, 3, 10, 1).expand(2, 3, 10, 16), *operands((1,), (2, 3, 20, 16))[1:])
    for scale in (-0.5, 0.0, 3.0):
        agree(q, k, v, scale=scale)


def test_gradients():
    q, k, v = operands((2, 3, 10, 16), (2, 3, 20, 16))
    q.requires_grad_()
    with pytest.raises(qattn.InvalidArgument, match="query: requires a gradient"):
        sdpa(q, k, v)
    with torch.no_grad():
        agree(q, k, v)
    with torch.inference_mode():
        agree(q, k, v)
    mask = torch.zeros(10, 20, requires_grad=True)
    with pytest.raises(qattn.InvalidArgument, match="attn_mask: requires a gradient"):
        sdpa(q.detach(), k, v, mask)


def test_autocast():
    given = operands((2, 3, 10, 16), (2, 3, 20, 16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        agree(*given, tolerance=1e-2)
        agree(*given, normal(10, 20), tolerance=1e-2)


def test_inputs_are_not_written():
    given = operands((2, 3, 10, 16), (2, 3, 20, 16))
    copies = [x.clone() for x in given]
    sdpa(*given, is_causal=True, recipe="int8_full")
    for x, copy in zip(given, copies, strict=True):
        np.testing.assert_array_equal(x.numpy(), copy.numpy())


Q, K, V = operands((2, 4, 10, 16), (2, 4, 20, 16))
REFUSED = {
    "mask with is_causal": ((Q, K, V, torch.zeros(10, 20)), {"is_causal": True}, "attn_mask"),
    "dropout": ((Q, K, V), {"dropout_p": 0.1}, "dropout_p"),
    "dropout out of range": ((Q, K, V), {"dropout_p": -0.1}, "dropout_p"),
    "key dtype": ((Q, K.half(), V), {}, "key: dtype"),
    "value dtype": ((Q, K, V.double()), {}, "value: dtype"),
    "float64": ((Q.double(), K.double(), V.double()), {}, "query: dtype"),
    "mask dtype": ((Q, K, V, torch.zeros(10, 20, dtype=torch.int32)), {}, "attn_mask: dtype"),
    "half mask": ((Q, K, V, torch.zeros(10, 20, dtype=torch.half)), {}, "attn_mask: dtype"),
    "mask shape": ((Q, K, V, torch.zeros(10, 21)), {}, "attn_mask: shape"),
    "mask enlarges": ((Q, K, V, torch.zeros(3, 2, 4, 10, 20)), {}, "attn_mask: shape"),
    "mask rank": ((Q, K, V, torch.zeros(20)), {}, "attn_mask: rank 1"),
    "heads differ": ((Q, K[:, :2], V[:, :2]), {}, "key: shape"),
    "gqa ratio": ((Q, K[:, :3], V[:, :3]), {"enable_gqa": True}, "key: 3 heads"),
    "gqa key and value": ((Q, K, V[:, :2]), {"enable_gqa": True}, "value: 2 heads"),
    "gqa rank 2": ((Q[0, 0], K[0, 0], V[0, 0]), {"enable_gqa": True}, "query: rank 2"),
    "rank 1": ((Q[0, 0, 0], K, V), {}, "query: rank 1"),
    "head dim of key": ((Q, K[..., :8], V), {}, "k: head_dim 8"),
    "head dim": ((Q[..., :0], K[..., :0], V), {}, "q: head_dim 0"),
    "head dim that is too long": (
        operands((2, 4, 10, 640), (2, 4, 20, 640)), {},
        "q: head_dim 640 .* torch.nn.functional.scaled_dot_product_attention takes them",
    ),
    "mask int64": (
        (Q, K, V, torch.ones(10, 20, dtype=torch.int64)), {}, "bool .* pass attn_mask != 0"
    ),
    "mask uint8": (
        (Q, K, V, torch.ones(10, 20, dtype=torch.uint8)), {}, "bool .* pass attn_mask != 0"
    ),
    "mask float64": ((Q, K, V, torch.zeros(10, 20).double()), {}, "pass it in float32"),
    "keys of value": ((Q, K, V[:, :, :19]), {}, "v: length 19"),
    "batch": ((Q, torch.cat([K, K[:1]]), V), {}, "key: shape"),
    "numpy": ((Q.numpy(), K, V), {}, "query: is a ndarray"),
    "meta device": ((Q, K.to("meta"), V), {}, "key: lies on device meta"),
    "sparse": ((Q, K, V, torch.zeros(10, 20).to_sparse()), {}, "attn_mask: layout"),
    "is_causal": ((Q, K, V), {"is_causal": 1}, "is_causal"),
    "scale": ((Q, K, V), {"scale": "a"}, "scale"),
    "nan scale": ((Q, K, V), {"scale": float("nan")}, "scale: nan"),
    "recipe": ((Q, K, V), {"recipe": "int7"}, "int7"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    args, kwargs, words = REFUSED[case]
    with pytest.raises(qattn.QattnError, match=words):
        sdpa(*args, **kwargs)
