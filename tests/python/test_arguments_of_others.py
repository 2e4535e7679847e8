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


#: lengths of packed sequences: of several kinds, and of one
SEVERAL = ([5, 12, 0, 7, 3], [9, 12, 4, 0, 20])
AS_LONG = ([5, 12, 7], [5, 12, 7])
ALL_LONGER = ([5, 12, 0, 7], [8, 15, 0, 10])


def ends(lengths):
    return np.cumsum([0, *lengths]).astype(np.int32)


def packed_rows(lengths, heads):
    return normal(sum(lengths), heads, 64)


def one_by_one(q, k, v, lengths, offset, mask=None):
    """attention() of packed sequences whose query i sees keys j <= i + offset, each for itself."""
    out, at = np.zeros_like(q), [ends(x) for x in lengths]
    for b, (i, j) in enumerate(zip(*lengths)):
        of_q, of_k = slice(at[0][b], at[0][b] + i), slice(at[1][b], at[1][b] + j)
        seen = np.tri(i, j, offset, dtype=bool)
        own = seen if mask is None else seen & mask[:i, :j]
        parts = (x[None, s] for x, s in ((q, of_q), (k, of_k), (v, of_k)))
        out[of_q] = qattn.reference_attention(*parts, mask=own)[0] if i and j else 0
    return out


@pytest.mark.parametrize("lengths", [SEVERAL, AS_LONG, ALL_LONGER])
@pytest.mark.parametrize("offset", [None, 0, 2, -2])
@pytest.mark.parametrize("kind", ["numpy", "torch", "lists"])
def test_corners_of_packed_sequences(lengths, offset, kind):
    q, k, v = (packed_rows(x, h) for x, h in zip((lengths[0], lengths[1], lengths[1]), (4, 2, 2)))
    where = {"causal": "upper_left"} if offset is None else {"causal_offset": offset}
    want = one_by_one(q, k, v, lengths, offset or 0)
    of_q, of_k = (ends(x) for x in lengths)
    tensors, packed = (q, k, v), {"cu_seqlens_q": of_q, "cu_seqlens_k": of_k}
    if kind == "torch":
        tensors = [torch.from_numpy(x) for x in tensors]
        packed = {n: torch.from_numpy(x).long() for n, x in packed.items()}
    elif kind == "lists":
        packed = {n: x.tolist() for n, x in packed.items()}
    got = qattn.attention(*tensors, recipe="f32", **packed, **where)
    np.testing.assert_allclose(np.asarray(got), want, atol=2e-5)
    turned = [x.swapaxes(0, 1) for x in tensors]
    got = qattn.attention(*turned, recipe="f32", layout="bhsd", **packed, **where)
    np.testing.assert_allclose(np.asarray(got).swapaxes(0, 1), want, atol=2e-5)
    got = qattn.reference_attention(*tensors, **packed, **where)
    np.testing.assert_allclose(np.asarray(got), want, atol=1e-6)
    some = R.random((24, 24)) < 0.7  # larger than the longest
    want = one_by_one(q, k, v, lengths, offset or 0, some)
    for mask in (some, np.where(some, np.float32(0), np.float32(-np.inf))):
        given = torch.from_numpy(mask) if kind == "torch" else mask
        got = qattn.attention(*tensors, recipe="f32", mask=given, **packed, **where)
        np.testing.assert_allclose(np.asarray(got), want, atol=2e-5)


def test_corners_of_sequences_as_long_as_their_keys_need_no_mask():
    q, k, v = (packed_rows(AS_LONG[0], h) for h in (4, 2, 2))
    for packed in (ends(AS_LONG[0]), ends(AS_LONG[0]).tolist()):
        options = {"cu_seqlens_q": packed, "cu_seqlens_k": packed, "recipe": "int8_full"}
        got = qattn.attention(q, k, v, causal="upper_left", **options)
        np.testing.assert_array_equal(got, qattn.attention(q, k, v, causal=True, **options))
        assert "mask" not in qattn.explain(q, k, v, causal="upper_left", **options)


@pytest.mark.parametrize("corner", ["upper_left", -3, 4, 27])
@pytest.mark.parametrize("used", [33, [33, 20], [12, 12], [0, 40]])
def test_corners_of_pages(corner, used):
    pool_k, pool_v = (x.swapaxes(1, 2).reshape(10, 8, 2, 64) for x in (K, V))
    options = {"page_table": np.arange(10, dtype=np.int32).reshape(2, 5), "seqused_k": used}
    offset = 0 if corner == "upper_left" else corner
    where = {"causal": corner} if corner == "upper_left" else {"causal_offset": corner}
    both = [used, used] if isinstance(used, int) else used
    want = attend(seqused_k=both, mask=np.tri(12, 40, offset, dtype=bool)).swapaxes(1, 2)
    q = Q.swapaxes(1, 2)
    got = qattn.attention(q, pool_k, pool_v, recipe="f32", **options, **where)
    np.testing.assert_allclose(got, want, atol=1e-6)
    got = qattn.reference_attention(q, pool_k, pool_v, **options, **where)
    np.testing.assert_allclose(got, want, atol=1e-5)
    flat = q.reshape(24, 4, 64)
    got = qattn.attention(flat, pool_k, pool_v, recipe="f32", cu_seqlens_q=[0, 12, 24], **options,
                          **where)
    np.testing.assert_allclose(got.reshape(want.shape), want, atol=1e-6)


@pytest.mark.parametrize("options, what", [
    ({"cu_seqlens_q": [0, 3], "cu_seqlens_k": [0, 9, 20]}, "cu_seqlens"),
    ({"cu_seqlens_q": [0, 5, 3], "cu_seqlens_k": [0, 9, 20]}, "cu_seqlens_q"),
    ({"cu_seqlens_q": [0, 5, 2**40], "cu_seqlens_k": [0, 9, 20]}, "cu_seqlens_q"),
    ({"cu_seqlens_q": [0.0, 5.0, 20.0], "cu_seqlens_k": [0, 9, 20]}, "cu_seqlens_q"),
    ({"cu_seqlens_q": [[0, 5, 20]], "cu_seqlens_k": [0, 9, 20]}, "cu_seqlens_q"),
    ({"cu_seqlens_q": [], "cu_seqlens_k": [0, 9, 20]}, "cu_seqlens_q"),
    ({"seqused_k": [1, 2, 3]}, "seqused_k"),
    ({"seqused_k": [9, 12]}, "seqused_k"),
    ({"mask": np.zeros((1, 7), bool)}, "mask: extent 7 is below the longest sequence"),
    ({"mask": np.zeros((15, 11), np.int32)}, "mask: "),
    ({"mask": qattn.BitMask.pack(np.ones((15, 16), bool))}, "'upper_left': .* beside a BitMask"),
    ({"window": (3, 0)}, "'upper_left': is not known beside window"),
    ({"alibi_slopes": [1.0] * 4}, "'upper_left': is not known beside alibi_slopes"),
])  # fmt: skip
def test_refused_corners_of_packed_sequences(options, what):
    packed = {"cu_seqlens_q": [0, 5, 20], "cu_seqlens_k": [0, 9, 20]}
    q, k = normal(20, 4, 64), normal(20, 2, 64)
    with pytest.raises(qattn.InvalidArgument, match=what):
        qattn.attention(q, k, k, recipe="f32", causal="upper_left", **{**packed, **options})


@pytest.mark.parametrize("mask", [np.ones((3, 7), bool), np.ones((12, 40), np.int64)])
def test_wrong_masks_beside_a_corner(mask):
    with pytest.raises(qattn.InvalidArgument, match="^mask: "):
        attend(mask=mask, causal="upper_left")


def test_decode_has_one_corner():
    cache = qattn.KvCache(kv_heads=2, head_dim=64)
    s = cache.add_sequence()
    cache.append(0, s, K[:1], V[:1], layout="bhsd")
    for corner in ("upper_left", "lower_right"):
        with pytest.raises(qattn.InvalidArgument, match=f"causal: '{corner}' is neither True"):
            cache.decode(Q[:1, :, :1], 0, s, layout="bhsd", causal=corner)


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
