"""Packed sequences and paged keys from Python: against one call a sequence."""

import numpy as np
import pytest
import torch
from cases import normal

import qattn

CU_Q = np.array([0, 30, 30, 37], np.int32)
CU_K = np.array([0, 9, 150, 250], np.int32)
RECIPES = ["f32", "int8", "int8_full", "fp8", "nvfp4"]


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_packed_equals_one_by_one(recipe, layout):
    q, k, v = normal(37, 4, 32), normal(250, 2, 32, seed=1), normal(250, 2, 32, seed=2)
    given = (q, k, v) if layout == "bshd" else [x.transpose(1, 0, 2) for x in (q, k, v)]
    out, lse = qattn.attention(
        *given,
        recipe=recipe,
        causal=True,
        layout=layout,
        return_lse=True,
        cu_seqlens_q=torch.from_numpy(CU_Q),
        cu_seqlens_k=CU_K,
    )
    assert lse.shape == (4, 37)
    out = out if layout == "bshd" else out.transpose(1, 0, 2)
    for b in range(3):
        rows, keys = slice(*CU_Q[b : b + 2]), slice(*CU_K[b : b + 2])
        one, one_lse = qattn.attention(
            q[None, rows], k[None, keys], v[None, keys], recipe=recipe, causal=True, return_lse=True
        )
        np.testing.assert_array_equal(out[rows], one[0])
        np.testing.assert_array_equal(lse[:, rows], one_lse[0])


@pytest.mark.parametrize("recipe", RECIPES)
def test_paged_equals_dense(recipe):
    pages = [np.full((8, 16, 2, 32), np.nan, np.float32) for _ in range(2)]
    table = np.array([[7, 2, 5], [2, 0, 1]], np.int32)  # page 2 is shared; its content must agree
    used = np.array([40, 16], np.int32)
    pool = normal(2, 8, 16, 2, 32, seed=3)
    dense = [np.zeros((2, 48, 2, 32), np.float32) for _ in range(2)]
    for b in range(2):
        for s in range(used[b]):
            page, slot = table[b, s // 16], s % 16
            for i in range(2):
                pages[i][page, slot] = pool[i, page, slot]
                dense[i][b, s] = pool[i, page, slot]
    q = normal(2, 5, 4, 32)
    options = {"recipe": recipe, "seqused_k": used, "smooth_k": None if recipe == "f32" else True}
    out = qattn.attention(q, *pages, page_table=table, **options)
    assert np.isfinite(out).all(), "a page tail was read"
    np.testing.assert_array_equal(out, qattn.attention(q, *dense, **options))
    lists = {**options, "seqused_k": used.tolist()}
    again = qattn.attention(q, *pages, page_table=table.tolist(), **lists)
    np.testing.assert_array_equal(out, again)


def test_reference_on_packed():
    q, k, v = normal(37, 4, 32), normal(250, 2, 32, seed=1), normal(250, 2, 32, seed=2)
    options = {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "causal": True}
    ref = qattn.reference_attention(q, k, v, **options)
    np.testing.assert_allclose(qattn.attention(q, k, v, recipe="f32", **options), ref, atol=2e-6)
    swapped = [x.transpose(1, 0, 2) for x in (q, k, v)]
    other = qattn.reference_attention(*swapped, layout="bhsd", **options)
    np.testing.assert_array_equal(other.transpose(1, 0, 2), ref)
