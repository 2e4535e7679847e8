"""attention(..., projection=W, bias=b): what comes out and what is refused."""

import numpy as np
import pytest
import torch
from cases import RECIPES, array, normal, nrmse, qkv

import qattn

ROUNDING = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 8e-3}


def weight(features, width, seed=9):
    return normal(features, width, seed=seed) / np.float32(np.sqrt(width))


def product(rows, w, b=None):
    """In float64, of rows (B, S, H, D) in their dtype."""
    flat = array(rows).reshape(*rows.shape[:-2], -1)
    return flat @ array(w).T + (0 if b is None else array(b))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_it_is_the_product_of_attentions_rows(recipe, dtype):
    q, k, v = (torch.from_numpy(x).to(getattr(torch, dtype)) for x in qkv())
    w = torch.from_numpy(weight(50, 4 * 32)).to(q.dtype)
    b = torch.from_numpy(normal(50)).to(q.dtype)
    rows, lse = qattn.attention(q, k, v, recipe=recipe, return_lse=True)
    out, own = qattn.attention(q, k, v, recipe=recipe, projection=w, bias=b, return_lse=True)
    assert out.shape == (2, 70, 50) and out.dtype is q.dtype
    assert torch.equal(own, lse)
    assert nrmse(out, product(rows, w, b)) < ROUNDING[dtype]
    plain = qattn.attention(q, k, v, recipe=recipe, projection=w)
    assert nrmse(plain, product(rows, w)) < ROUNDING[dtype]


def test_reference_and_layouts_agree():
    q, k, v = qkv()
    w, b = weight(24, 128), normal(24)
    ref = qattn.reference_attention(q, k, v, projection=w, bias=b)
    assert ref.shape == (2, 70, 24)
    np.testing.assert_allclose(
        ref, product(qattn.reference_attention(q, k, v), w, b), rtol=1e-10, atol=1e-12
    )
    swapped = [x.transpose(0, 2, 1, 3) for x in (q, k, v)]
    same = qattn.attention(*swapped, layout="bhsd", recipe="f32", projection=w, bias=b)
    assert nrmse(same, ref) < 2e-6
    also = qattn.reference_attention(*swapped, layout="bhsd", projection=w, bias=b)
    np.testing.assert_array_equal(also, ref)


def test_packed_sequences_out_and_rows_that_see_nothing():
    q, k, v = normal(33, 4, 32), normal(40, 2, 32), normal(40, 2, 32)
    w, b = weight(20, 128), normal(20)
    out = np.full((33, 40), 7, np.float32)
    made = qattn.attention(
        q, k, v, cu_seqlens_q=[0, 5, 33], cu_seqlens_k=[0, 0, 40],
        projection=w, bias=b, out=out[:, :20], recipe="f32",
    )  # fmt: skip
    assert made.base is out
    np.testing.assert_array_equal(out[:5, :20], np.broadcast_to(b, (5, 20)))
    ref = qattn.reference_attention(q[5:][None], k[None], v[None], projection=w, bias=b)
    assert nrmse(out[5:, :20], ref[0]) < 2e-6
    assert (out[:, 20:] == 7).all()


def test_refusals_name_the_argument_and_write_nothing():
    q, k, v = qkv(batch=1, queries=8)
    w, b, out = weight(16, 128), normal(16), np.full((1, 8, 16), 7, np.float32)
    nan = b.copy()
    nan[3] = np.nan
    for options, text in [
        ({"projection": w[:, :127]}, "projection: shape (16, 127) should be (E, Hq * Dv)"),
        ({"projection": np.asfortranarray(w)}, "projection: stride 16 of the last dimension"),
        ({"projection": w.astype(np.float16)}, "projection: format f16 differs from out's f32"),
        ({"projection": w, "bias": b[:7]}, "bias: shape (7) should be (16)"),
        ({"projection": w, "bias": nan}, "bias: value nan at (3) is not finite"),
        ({"bias": b}, "out: rank 3 should be 4"),
        ({"projection": "w"}, "projection: is a str"),
        ({"projection": w[:4]}, "out: shape (1, 8, 16) should be (1, 8, 4)"),
    ]:
        with pytest.raises(qattn.InvalidArgument) as error:
            qattn.attention(q, k, v, out=out, **options)
        assert text in str(error.value), error.value
        assert (out == 7).all()
    with pytest.raises(qattn.InvalidArgument, match="^bias: is given without projection"):
        qattn.attention(q, k, v, bias=b)
    with pytest.raises(TypeError, match="here it is 'bias'"):
        qattn.attention(q, k, v, projection_bias=b)
    grown = torch.nn.Linear(128, 16)
    with pytest.raises(qattn.InvalidArgument, match="projection: requires a gradient"):
        qattn.attention(*map(torch.from_numpy, (q, k, v)), projection=grown.weight)


def test_explain_says_where_it_happens():
    q, k, v = qkv()
    text = qattn.explain(q, k, v, projection=weight(24, 128))
    assert "projection: f32 products, after all heads" in text


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_two_steps_as_on_a_gpu(monkeypatch, layout):
    """What CUDA tensors get, on the CPU: torch's linear behind attention."""
    q, k, v = (torch.from_numpy(x) for x in qkv(dim_v=16))
    if layout == "bhsd":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    w, b = torch.from_numpy(weight(24, 64)), torch.from_numpy(normal(24))
    options = {"projection": w, "bias": b, "recipe": "int8", "layout": layout}
    one, lse = qattn.attention(q, k, v, **options, return_lse=True)
    monkeypatch.setattr("qattn._attention.multiplies_behind", lambda _: True)
    two, own = qattn.attention(q, k, v, **options, return_lse=True)
    assert two.shape == (2, 70, 24) and torch.equal(own, lse)
    assert nrmse(two, one) < 1e-6
    out = torch.full((2, 24, 70), 7.0).transpose(1, 2)
    with pytest.raises(qattn.InvalidArgument, match="^out: stride"):
        qattn.attention(q, k, v, **options, out=out)
    wide = torch.full((2, 70, 30), 7.0)
    with pytest.raises(qattn.InvalidArgument, match="^bias: shape"):
        qattn.attention(q, k, v, **{**options, "bias": b[:5]}, out=wide[..., :24])
    assert (wide == 7).all()
    b[3] = torch.nan
    with pytest.raises(qattn.InvalidArgument, match=r"^bias: value nan at \(3\) is not finite"):
        qattn.attention(q, k, v, **options, validate=True, out=wide[..., :24])
    assert (wide == 7).all()
    b[3] = 0.5
    two = qattn.attention(q, k, v, **options)
    qattn.attention(q, k, v, **options, out=wide[..., :24])
    assert torch.equal(wide[..., :24], two) and (wide[..., 24:] == 7).all()
    text = qattn.explain(q, k, v, **options)
    assert text.startswith("projection: in two steps, torch's linear behind attention"), text
    assert "projection-to" not in text
    assert qattn.explain(q, k, v, projection=w[:, 1:], layout=layout).startswith("refused: ")
