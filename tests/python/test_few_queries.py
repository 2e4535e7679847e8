"""Few queries over K and V in floats, which CPUs read where they lie: pages, hidden and bad keys."""

import ml_dtypes
import numpy as np
import pytest

import qattn

RECIPES = ["f32", "f16", "bf16", "auto"]
DTYPE = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "auto": np.float32}


def operands(recipe, queries=2, keys=300, d=20, dv=36, heads=2):
    rng = np.random.default_rng(keys)
    shapes = (queries, 2 * heads, d), (keys, heads, d), (keys, heads, dv)
    return [rng.standard_normal((1, *x)).astype(DTYPE[recipe]) for x in shapes]


def bits(x):
    return x.view(np.uint8)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("page", [8, 48, 128])
def test_pages_have_the_bits_of_dense_calls(recipe, page):
    q, k, v = operands(recipe)
    dense = qattn.attention(q, k, v, recipe=recipe)
    count = -(-k.shape[1] // page)
    order = np.random.default_rng(1).permutation(count).astype(np.int32)
    pools = []
    for x in (k, v):
        pool = np.full((count, page, *x.shape[2:]), np.nan, x.dtype)
        for n, place in enumerate(order):
            part = x[0, n * page : (n + 1) * page]
            pool[place, : len(part)] = part
        pools.append(pool)
    paged = qattn.attention(q, *pools, recipe=recipe, page_table=order[None],
                            seqused_k=np.array([k.shape[1]], np.int32))  # fmt: skip
    assert np.array_equal(bits(paged), bits(dense))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_hidden_leaves_no_trace(recipe, bad):
    q, k, v = operands(recipe)
    seen = np.random.default_rng(2).random((1, 1, 1, k.shape[1])) < 0.7
    clean = qattn.attention(q, k, v, recipe=recipe, mask=seen)
    for x in (k, v):
        x[0, ~seen[0, 0, 0]] = bad
    assert np.array_equal(bits(qattn.attention(q, k, v, recipe=recipe, mask=seen)), bits(clean))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("operand", [0, 1, 2])
def test_bad_values_make_rows_nan_that_see_them(bad, operand):
    q, k, v = operands("f32")
    (q, k, v)[operand][0, 1, 1, 3] = bad
    out = qattn.attention(q, k, v, recipe="f32", causal=True, causal_offset=0)
    wrong = np.isnan(out).all(axis=-1)
    rows = {0: (1, [1]), 1: (1, [2, 3]), 2: (1, [2, 3])}[operand]
    expected = np.zeros_like(wrong)
    expected[0, rows[0], rows[1]] = True
    assert np.array_equal(wrong, expected)


def test_large_products_stay_finite():
    q, k, v = operands("f32", queries=1, d=64)
    q[:] = 2.5e18
    k[:] = np.where(np.arange(k.shape[1]) % 2, -2.5e18, 2.5e18)[None, :, None, None]
    assert np.isfinite(qattn.attention(q, k, v)).all()
