"""Arguments as users of other libraries write them: one length for all, sinks in other floats,
queries in another format than the cache, causal by its corner, scales of q by head of k."""

import ml_dtypes
import numpy as np
import pytest
import torch

import qattn
import qattn.torch

R = np.random.default_rng(11)


def normal(*shape):
    return R.standard_normal(shape).astype(np.float32)


Q, K, V = normal(2, 4, 12, 64), normal(2, 2, 40, 64), normal(2, 2, 40, 64)


def attend(q=Q, k=K, v=V, **options):
    return qattn.attention(q, k, v, layout="bhsd", **{"recipe": "f32", **options})


def seen(offset, queries=12, keys=40):
    """attend() of queries that see keys j <= i + offset, by a mask."""
    q, k, v = Q[:, :, :queries], K[:, :, :keys], V[:, :, :keys]
    return attend(q, k, v, mask=np.tri(queries, keys, offset, dtype=bool))


# ---- One length for all --------------------------------------------------------------------------


@pytest.mark.parametrize("one", [33, np.int64(33)])
@pytest.mark.parametrize("torchs", [False, True])
def test_one_length_for_all(one, torchs):
    tensors = [torch.from_numpy(x) for x in (Q, K, V)] if torchs else [Q, K, V]
    got = attend(*tensors, seqused_k=one)
    np.testing.assert_array_equal(np.asarray(got), attend(seqused_k=[33, 33]))
    got = attend(*tensors, seqused_k=one, seqused_q=7)
    np.testing.assert_array_equal(np.asarray(got), attend(seqused_k=[33, 33], seqused_q=[7, 7]))


def test_one_length_of_pages():
    pool_k, pool_v = (x.swapaxes(1, 2).reshape(10, 8, 2, 64) for x in (K, V))
    table = np.arange(10, dtype=np.int32).reshape(2, 5)
    q = Q.swapaxes(1, 2)
    for of in (table, table.tolist()):
        got = qattn.attention(q, pool_k, pool_v, recipe="f32", page_table=of, seqused_k=33)
        np.testing.assert_array_equal(got.swapaxes(1, 2), attend(seqused_k=[33, 33]))


@pytest.mark.parametrize("bad", [41, -1, True, 3.0])
def test_one_length_out_of_range(bad):
    with pytest.raises((qattn.InvalidArgument, TypeError), match="seqused_k"):
        attend(seqused_k=bad)


# ---- Few numbers in any float --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16, "list"])
def test_sinks_and_slopes_in_other_floats(dtype):
    sinks, slopes = np.linspace(-1, 1, 4), np.linspace(0.125, 0.5, 4)
    made = [x.tolist() if dtype == "list" else x.astype(dtype) for x in (sinks, slopes)]
    want = [np.asarray(x).astype(np.float32) for x in made]
    np.testing.assert_array_equal(attend(sinks=made[0], alibi_slopes=made[1]),
                                  attend(sinks=want[0], alibi_slopes=want[1]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_sinks_of_torch_in_other_floats(dtype):
    q, k, v = (torch.from_numpy(x) for x in (Q, K, V))
    sinks = torch.linspace(-1, 1, 4, dtype=dtype)
    want = attend(q, k, v, sinks=sinks.float())
    assert torch.equal(attend(q, k, v, sinks=sinks), want)
    got = torch.ops.qattn.attention(q, k, v, None, sinks, "f32", enable_gqa=True)
    assert torch.equal(got, want)
    cache = qattn.KvCache(kv_heads=2, head_dim=64)
    s = cache.add_sequence()
    cache.append(0, s, k[:1], v[:1], layout="bhsd")
    got, want = (
        cache.decode(q[:1, :, :1], 0, s, layout="bhsd", sinks=x) for x in (sinks, sinks.float())
    )
    assert torch.equal(got, want)


def test_integers_are_no_sinks():
    with pytest.raises(qattn.InvalidArgument, match="sinks: format s32"):
        attend(sinks=np.arange(4, dtype=np.int32))


# ---- Queries in another format than K and V ------------------------------------------------------


@pytest.mark.parametrize("recipe", ["f32", "bf16", "int8", "int8_full", "fp8"])
@pytest.mark.parametrize("of_q, of_kv", [(np.float32, np.float16), (ml_dtypes.bfloat16, np.float16),
                                         (np.float16, np.float32)])
def test_queries_in_another_format(recipe, of_q, of_kv):
    q, k, v = Q.astype(of_q), K.astype(of_kv), V.astype(of_kv)
    got = attend(q, k, v, recipe=recipe, out_dtype="float32")
    wide = (x.astype(np.float32) for x in (q, k, v))
    np.testing.assert_array_equal(got, attend(*wide, recipe=recipe))
    assert attend(q, k, v, recipe=recipe).dtype == q.dtype


def test_sdpa_refuses_mixed_formats_as_torch_does():
    q, k, v = (torch.from_numpy(x) for x in (Q, K, V))
    for mixed in ((q, k.half(), v.half()), (q, k.half(), v), (q.half(), k, v)):
        for function in (torch.nn.functional.scaled_dot_product_attention, qattn.torch.sdpa):
            with pytest.raises(RuntimeError, match="dtype"):
                function(*mixed, enable_gqa=True)


def test_refusals_are_runtime_errors_too():
    """Code around torch's attention falls back by `except RuntimeError`."""
    assert issubclass(qattn.InvalidArgument, (ValueError, RuntimeError))
    assert issubclass(qattn.Unsupported, (NotImplementedError, RuntimeError))
    x = torch.randn(1, 2, 8, 64)
    for bad in ((x, x[..., :32], x), (x, x, x[:, :, :4]), (x, x[:, :, :4], x)):
        with pytest.raises(RuntimeError):
            qattn.torch.sdpa(*bad)
    with pytest.raises(RuntimeError):
        qattn.torch.sdpa(x, x, x, dropout_p=0.5)


# ---- Causal by its corner ------------------------------------------------------------------------


@pytest.mark.parametrize("queries, keys", [(12, 40), (12, 12), (12, 5), (1, 40), (12, 13)])
def test_corners_of_causal(queries, keys):
    q, k, v = Q[:, :, :queries], K[:, :, :keys], V[:, :, :keys]

    def call(**options):
        return attend(q, k, v, **options)

    np.testing.assert_array_equal(call(causal="lower_right"), call(causal=True))
    for corner in ("upper_left", "offset"):
        options = {"causal": corner} if corner == "upper_left" else {"causal_offset": 0}
        np.testing.assert_allclose(call(**options), seen(0, queries, keys), atol=1e-6)


@pytest.mark.parametrize("offset", [-20, -3, 0, 5, 27, 28, 29, 39, 100])
@pytest.mark.parametrize("torchs", [False, True])
def test_offsets_of_a_past(offset, torchs):
    tensors = [torch.from_numpy(x) for x in (Q, K, V)] if torchs else [Q, K, V]
    got = np.asarray(attend(*tensors, causal_offset=offset))
    np.testing.assert_allclose(got, seen(offset), atol=1e-6)
    # Beside lengths, and other masks.
    bias = normal(1, 4, 12, 40)
    want = attend(mask=np.where(np.tri(12, 40, offset, dtype=bool), bias, -np.inf),
                  seqused_k=[40, 21])
    given = torch.from_numpy(bias) if torchs else bias
    got = attend(*tensors, causal_offset=offset, mask=given, seqused_k=[40, 21])
    np.testing.assert_allclose(np.asarray(got), want, atol=1e-6)
    some = R.random((2, 1, 12, 40)) < 0.5
    given = torch.from_numpy(some) if torchs else some
    got = attend(*tensors, causal_offset=offset, mask=given)
    want = attend(mask=some & np.tri(12, 40, offset, dtype=bool))
    np.testing.assert_allclose(np.asarray(got), want, atol=1e-6)


def test_corners_in_the_other_layout_and_for_the_reference():
    q, k, v = (x.swapaxes(1, 2) for x in (Q, K, V))
    got = qattn.attention(q, k, v, recipe="f32", causal="upper_left").swapaxes(1, 2)
    np.testing.assert_allclose(got, seen(0), atol=1e-6)
    want = qattn.reference_attention(q, k, v, causal="upper_left").swapaxes(1, 2)
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert "kernel" in qattn.explain(q, k, v, recipe="f32", causal_offset=3)


@pytest.mark.parametrize("options, what", [
    ({"causal": "upper left"}, "causal: 'upper left' is not True"),
    ({"causal": "upper_left", "causal_offset": 3}, "causal_offset: 3 beside"),
    ({"causal": "upper_left", "window": (3, 0)}, "'upper_left': is not known beside window"),
    ({"causal_offset": 1, "alibi_slopes": [1.0] * 4}, "causal_offset: is not known beside alibi"),
    ({"causal_offset": 1.5}, "causal_offset"),
])  # fmt: skip
def test_refused_corners(options, what):
    with pytest.raises((qattn.InvalidArgument, TypeError), match=what):
        attend(**options)


# ---- Scales of q by head of k --------------------------------------------------------------------


@pytest.mark.parametrize("torchs", [False, True])
def test_scales_of_q_by_head_of_k(torchs):
    """As FlashAttention has them: q_descale (B, Hkv)."""
    scale = np.abs(Q).reshape(2, 2, -1).max(-1) / 127
    codes = np.rint(Q / np.repeat(scale, 2, 1)[:, :, None, None]).astype(np.int8)
    options = {"recipe": "int8", "q_granularity": "per_head", "out_dtype": "float32"}
    want = attend(codes, q_scale=np.repeat(scale, 2, 1), **options)
    convert = torch.from_numpy if torchs else np.asarray
    q, k, v, by_head_of_k = (convert(x) for x in (codes, K, V, scale))
    got = attend(q, k, v, q_scale=by_head_of_k, **options)
    np.testing.assert_array_equal(np.asarray(got), want)
    with pytest.raises(qattn.InvalidArgument, match="q_scale"):
        attend(codes, q_scale=scale[:, :1].repeat(3, 1), **options)


# ---- Names of others -----------------------------------------------------------------------------


@pytest.mark.parametrize("name, hint", [
    ("dropout_p", "no dropout"), ("max_seqlen_q", "cu_seqlens_q"), ("max_seqlen_k", "cu_seqlens_k"),
    ("cache_seqlens", "'seqused_k'"), ("q_descale", "'q_scale'"), ("softmax_scale", "'scale'"),
    ("attention_mask", "'mask'"), ("s_aux", "'sinks'"), ("deterministic", "never depend"),
    ("enable_gqa", "fewer heads"),
])  # fmt: skip
def test_names_of_others_get_a_hint(name, hint):
    with pytest.raises(TypeError, match=f"{name}.*{hint}"):
        attend(**{name: 0.0})


@pytest.mark.parametrize("name, x, taken", [
    ("q", Q.astype(np.float64), "float32, float16, bfloat16;"),
    ("k", K.astype(np.uint16), "float32, float16, bfloat16$"),
    ("seqused_k", np.array([3.0, 4.0]), "int32, int64$"),
    ("sinks", np.zeros(4, np.complex64), "float32$"),
])  # fmt: skip
def test_messages_name_the_formats_that_an_argument_takes(name, x, taken):
    with pytest.raises(qattn.InvalidArgument, match=f"^{name}: dtype .* is not one of {taken}"):
        attend(**{name: x})
