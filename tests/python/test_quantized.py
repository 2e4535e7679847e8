"""quantize(), dequantize(), Quantized operands, static scales."""

import dataclasses
import re

import ml_dtypes
import numpy as np
import pytest
import torch
from cases import CODED, TOLERANCE, array, normal, nrmse, qkv

import qattn

# Relative RMS error of a round trip on N(0,1): half a step over sqrt(3), step from the format.
ROUND_TRIP = {
    "s8": 0.01,
    "e4m3": 0.03,
    "e4m3fnuz": 0.03,
    "e5m2": 0.06,
    "mxfp8": 0.035,
    "mxfp4": 0.15,
    "nvfp4": 0.12,
}
GRANULARITIES = ["per_tensor", "per_head", "per_block", "per_token"]


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("role", ["q", "k", "v"])
@pytest.mark.parametrize("format", ROUND_TRIP)
def test_round_trip(format, role, framework):
    x = normal(2, 70, 3, 64)
    given = torch.from_numpy(x) if framework == "torch" else x
    coded = qattn.quantize(given, format=format, role=role)
    back = qattn.dequantize(coded)
    assert type(coded.codes) is type(given) and type(back) is type(given)
    assert coded.shape == x.shape and coded.role == role and coded.saturated == 0
    assert tuple(coded.codes.shape) == (2, 70, 3, 32 if format.endswith("fp4") else 64)
    assert nrmse(back, x) < ROUND_TRIP[format]


@pytest.mark.parametrize(
    "options", [{"smooth": True}, {"rotate": True}, {"layout": "bhsd"}], ids=str
)
@pytest.mark.parametrize("role", ["q", "k"])
def test_round_trip_options(role, options):
    x = normal(2, 64, 64, 32) + 3
    coded = qattn.quantize(x, format="nvfp4", role=role, **options)
    assert (coded.mean is not None) == ("smooth" in options)
    error = nrmse(qattn.dequantize(coded), x)
    assert error < (0.04 if "smooth" in options else 0.13)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_scales_and_codes_by_the_formula(granularity):
    x = normal(2, 70, 3, 16)
    coded = qattn.quantize(x, granularity=granularity, block=32, layout="bshd")
    groups = {"per_tensor": (0, 1, 2, 3), "per_head": (1, 3), "per_token": (3,)}
    t = x.transpose(0, 2, 1, 3)  # (B, H, S, D), the order of scales
    if granularity == "per_block":
        amax = np.stack([np.abs(t[:, :, i : i + 32]).max((2, 3)) for i in (0, 32, 64)], -1)
    else:
        axes = {"per_tensor": None, "per_head": (2, 3), "per_token": 3}[granularity]
        amax = np.abs(t).max(axes)
        assert granularity in groups
    scale = (amax * np.float32(1 / np.float32(127))).astype(np.float32)
    np.testing.assert_array_equal(coded.scale.reshape(scale.shape), scale)
    wide = {
        "per_block": lambda s: np.repeat(s, 32, -1)[:, :, :70, None],
        "per_token": lambda s: s[..., None],
        "per_head": lambda s: s[:, :, None, None],
        "per_tensor": lambda s: s,
    }[granularity](scale)
    codes = np.rint(t * (np.float32(1) / wide)).clip(-127, 127)
    np.testing.assert_array_equal(coded.codes.transpose(0, 2, 1, 3), codes)


@pytest.mark.parametrize(
    "format, code",
    [
        ("e4m3", ml_dtypes.float8_e4m3fn),
        ("e4m3fnuz", ml_dtypes.float8_e4m3fnuz),
        ("e5m2", ml_dtypes.float8_e5m2),
    ],
)
def test_float8_codes_against_ml_dtypes(format, code):
    x = normal(1, 33, 2, 24)
    coded = qattn.quantize(x, format=format, role="k", granularity="per_head")
    inverse = (np.float32(1) / coded.scale)[0, :, None]
    expected = (x[0] * inverse).astype(code).view(np.uint8)
    np.testing.assert_array_equal(coded.codes[0], expected)


def coded_operands(recipe, q, k, v, **options):
    qk, pv = CODED[recipe]
    return (
        qattn.quantize(q, format=qk, role="q", **options),
        qattn.quantize(k, format=qk, role="k", **options),
        v if pv is None else qattn.quantize(v, format=pv, role="v", **options),
    )


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("recipe", CODED)
def test_attention_on_quantized_operands(recipe, framework):
    arrays = qkv()
    if framework == "torch":
        arrays = [torch.from_numpy(x) for x in arrays]
    alone = {"smooth_k": False, "smooth_q": False}  # what quantize() leaves out
    inside = qattn.attention(*arrays, recipe=recipe, causal=True, **alone)
    coded = coded_operands(recipe, *arrays)
    out = qattn.attention(*coded, recipe=recipe, causal=True)
    assert type(out) is type(arrays[0]) and array(out).dtype == np.float64
    # the same codes and scales: only the order of float32 sums may differ
    assert nrmse(out, inside) < 2e-6 if recipe != "nvfp4" else nrmse(out, inside) < 1e-3
    assert nrmse(out, qattn.reference_attention(*arrays, causal=True)) < TOLERANCE[recipe] * 1.2
    half = qattn.attention(*coded, recipe=recipe, causal=True, out_dtype="float16")
    np.testing.assert_array_equal(array(half), array(out).astype(np.float16).astype(np.float64))


def test_only_k_and_v_quantized():
    q, k, v = qkv()
    _, kq, vq = coded_operands("int8_full", q, k, v)
    out = qattn.attention(q, kq, vq, recipe="int8_full")
    assert nrmse(out, qattn.attention(q, k, v, recipe="int8_full", smooth_k=False)) < 2e-6


def test_smoothed_k_and_v_carry_their_means():
    q, k, v = qkv()
    k, v = k + 5, v + 3
    coded = (
        q,
        qattn.quantize(k, role="k", smooth=True),
        qattn.quantize(v, role="v", smooth=True),
    )
    ref, ref_lse = qattn.reference_attention(q, k, v, return_lse=True)
    out, lse = qattn.attention(*coded, recipe="int8_full", return_lse=True)
    assert nrmse(out, ref) < 6e-3
    assert np.abs(lse - ref_lse).max() < 5e-2
    inside = qattn.attention(q, k, v, recipe="int8_full", smooth_v=True)
    assert nrmse(out, inside) < 2e-6


def test_rotated_operands():
    q, k, v = qkv()
    coded = [qattn.quantize(x, role=r, rotate=True) for x, r in ((q, "q"), (k, "k"))]
    out = qattn.attention(*coded, v, recipe="int8")
    inside = qattn.attention(q, k, v, recipe="int8", rotate=True, smooth_k=False)
    assert nrmse(out, inside) < 2e-6
    assert nrmse(out, qattn.reference_attention(q, k, v)) < TOLERANCE["int8"]


def test_raw_codes_with_their_scales():
    q, k, v = qkv()
    kq = qattn.quantize(k, role="k", granularity="per_block", block=64)
    expected = qattn.attention(q, kq, v, recipe="int8")
    out = qattn.attention(
        q, kq.codes, v, recipe="int8", k_scale=kq.scale, k_granularity=("per_block", 64)
    )
    np.testing.assert_array_equal(out, expected)
    f8 = [torch.from_numpy(x) for x in (q, k, v)]
    coded = coded_operands("fp8", *f8)
    expected = qattn.attention(*coded, recipe="fp8")
    out = qattn.attention(
        *(x.codes.view(torch.float8_e4m3fn) for x in coded),
        recipe="fp8",
        q_scale=coded[0].scale,
        k_scale=coded[1].scale,
        v_scale=coded[2].scale,
    )
    np.testing.assert_array_equal(out.numpy(), expected.numpy())
    coded = coded_operands("nvfp4", q, k, v)
    out = qattn.attention(
        *(x.codes for x in coded),
        recipe="nvfp4",
        **{
            f"{r}_{what}": getattr(x, field)
            for r, x in zip("qkv", coded, strict=True)
            for what, field in (("scale", "scale"), ("global", "global_scale"))
        },
    )
    np.testing.assert_array_equal(out, qattn.attention(*coded, recipe="nvfp4"))


def test_static_scales_and_saturation():
    q, k, v = qkv()
    scale = np.full((2, 2), 2.0 / 127, np.float32)  # clips beyond 2
    coded = qattn.quantize(k, role="k", granularity="per_head", static_scale=scale)
    clipped = int((np.abs(k) > 2.0 * 127.5 / 127).sum())
    assert coded.saturated == clipped > 100
    np.testing.assert_array_equal(coded.scale, scale)
    saturated = np.full(3, -1, np.int64)
    out = qattn.attention(
        q,
        k,
        v,
        recipe="int8",
        k_scale=scale,
        k_granularity="per_head",
        smooth_k=False,
        saturated=saturated,
    )
    assert saturated.tolist() == [0, clipped, 0]
    np.testing.assert_array_equal(out, qattn.attention(q, coded, v, recipe="int8"))
    counts = torch.empty(3, dtype=torch.int64)
    qattn.attention(q, k, v, recipe="int8", saturated=counts)
    assert counts.tolist() == [0, 0, 0]


def test_packed_and_paged_quantized():
    q, k, v = normal(37, 4, 32), normal(50, 2, 32, seed=1), normal(50, 2, 32, seed=2)
    cu_q, cu_k = np.array([0, 30, 37], np.int32), np.array([0, 9, 50], np.int32)
    options = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "recipe": "mxfp8"}
    kq = qattn.quantize(k, role="k", format="mxfp8", cu_seqlens=cu_k)
    vq = qattn.quantize(v, role="v", format="mxfp8", cu_seqlens=cu_k)
    np.testing.assert_allclose(qattn.dequantize(kq), k, atol=0.3)
    out = qattn.attention(q, kq, vq, **options)
    assert nrmse(out, qattn.attention(q, k, v, smooth_k=False, **options)) < 2e-6
    pages = normal(6, 16, 2, 32, seed=3)  # scales live with the page: quantise the pool as a batch
    kq = qattn.quantize(pages, role="k", format="s8")
    vq = qattn.quantize(pages, role="v", format="s8", granularity="per_token")
    used = {"page_table": [[4, 1, 0], [2, 5, 3]], "seqused_k": [40, 17]}
    out = qattn.attention(normal(2, 3, 4, 32), kq, vq, recipe="int8_full", **used)
    ref = qattn.reference_attention(normal(2, 3, 4, 32), pages, pages, **used)
    assert nrmse(out, ref) < 2e-2


#: K and V of other libraries' paged caches in one allocation: its shape, and its views
#: (pages, page size, heads, D).
PAGED = {
    "two pools": ((2, 6, 16, 2, 32), lambda m: (m[0], m[1])),
    "pairs of pages": ((6, 2, 16, 2, 32), lambda m: (m[:, 0], m[:, 1])),
    "pairs, heads first": (
        (6, 2, 2, 16, 32),
        lambda m: (m[:, 0].swapaxes(1, 2), m[:, 1].swapaxes(1, 2)),
    ),
}


@pytest.mark.parametrize("layout", PAGED)
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize(
    "format, granularity, recipe, bound",
    [("s8", "per_token", "int8_full", 2e-2), ("e4m3", "per_tensor", "fp8", 7e-2)],
)
def test_views_of_a_paged_cache_in_8_bits(layout, queries, format, granularity, recipe, bound):
    k, v = normal(6, 16, 2, 32, seed=1), normal(6, 16, 2, 32, seed=2)
    q = normal(2, queries, 8, 32)
    paged = {"page_table": [[4, 1, 0], [2, 5, 3]], "seqused_k": [40, 17], "causal": True}
    coded = [
        qattn.quantize(x, role=role, format=format, granularity=granularity)
        for role, x in (("k", k), ("v", v))
    ]
    want = qattn.attention(q, *coded, recipe=recipe, **paged)
    shape, views = PAGED[layout]
    memory = np.empty(shape, coded[0].codes.dtype)
    for view, x in zip(views(memory), coded):
        view[...] = x.codes
    seen = [dataclasses.replace(x, codes=y) for x, y in zip(coded, views(memory))]
    np.testing.assert_array_equal(qattn.attention(q, *seen, recipe=recipe, **paged), want)
    assert nrmse(want, qattn.attention(q, k, v, recipe="f32", **paged)) < bound


@pytest.mark.parametrize("page", [1, 3, 6, 16, 20, 24, 48, 80])
@pytest.mark.parametrize(
    "format, granularity, block",
    [
        ("s8", "per_block_channel", 16),
        ("s8", "per_block_channel", 128),
        ("e4m3", "per_block_channel", 64),
        ("e4m3", "per_block_channel", 8),
        ("mxfp8", None, 0),
        ("nvfp4", None, 0),
    ],
)
def test_scales_of_v_belong_to_a_page(page, format, granularity, block):
    """Where pages differ by orders of magnitude, a scale of the page before is seen at once."""
    q, k = normal(2, 3, 4, 32), normal(9, page, 2, 32, seed=1)
    v = normal(9, page, 2, 32, seed=2) * 4.0 ** np.arange(9, dtype="f4")[:, None, None, None]
    coded = qattn.quantize(v, role="v", format=format, granularity=granularity, block=block)
    lengths = [4 * page - page // 3, page + 1]
    used = {"page_table": [[4, 1, 0, 8], [2, 5, 3, 7]], "seqused_k": lengths}
    p = "u8" if format == "s8" else "f32"
    recipe = qattn.Recipe("pages", "f32", p, format)
    if format == "s8" and page % 4 != 0:
        with pytest.raises(qattn.Unsupported, match=f"v_scale: belongs to pages of {page} tokens"):
            qattn.attention(q, k, coded, recipe=recipe, **used)
        return
    out = qattn.attention(q, k, coded, recipe=recipe, **used)
    want = qattn.attention(q, k, qattn.dequantize(coded), recipe="f32", **used)
    assert nrmse(out, want) < (1e-2 if p == "u8" else 1e-6)


def spoiled(x, value, *places):
    """The operand with other scales, and globals if it has them, at these places."""
    scale, whole = x.scale.copy(), None if x.global_scale is None else x.global_scale.copy()
    for place in places:
        scale[place] = value
        if whole is not None and len(place) == 1:
            whole[place] = 0
    return dataclasses.replace(x, scale=scale, global_scale=whole)


FREE = [(6,), (0, slice(None), slice(8, None)), (3, slice(None), slice(1, None))]


@pytest.mark.parametrize(
    "role, options, free, last, named",
    [
        ("k", {"format": "s8"}, FREE, (0, 1, 7), "k_scale: value nan at (0, 1, 7)"),
        ("v", {"format": "s8", "granularity": "per_token"}, FREE, (3, 0, 0), "v_scale: value nan"),
        ("k", {"format": "s8"}, FREE, (1, 0, 15), "k_scale: value nan at (1, 0, 15)"),
        (
            "v",
            {"format": "s8", "granularity": "per_block_channel", "block": 8},
            [(6,), (0, slice(None), slice(1, None)), (3, slice(None), slice(1, None))],
            (0, 1, 0, 31),
            "v_scale: value nan at (0, 1, 0, 31)",
        ),
        ("k", {"format": "nvfp4"}, FREE, (0, 1, 7, 1), "k_scale: value nan at (0, 1, 7, 1)"),
    ],
)
def test_scales_out_of_use_may_be_anything(role, options, free, last, named):
    x = normal(7, 16, 2, 32, seed=1)
    used = {"page_table": [[4, 1, 0], [2, 3, 6]], "seqused_k": [40, 17]}
    codes = qattn.quantize(x, role=role, **options)

    def attend(coded):
        k, v = (coded, x) if role == "k" else (x, coded)
        v_format = options["format"] if role == "v" else "f32"
        recipe = qattn.Recipe(
            "pages",
            options["format"] if role == "k" else "f32",
            "u8" if v_format == "s8" else "f32",
            v_format,
        )
        return qattn.attention(normal(2, 3, 4, 32), k, v, recipe=recipe, **used)

    bad = 127 if options["format"] == "nvfp4" else np.nan  # 127 is e4m3's NaN
    np.testing.assert_array_equal(attend(spoiled(codes, bad, *free)), attend(codes))
    with pytest.raises(qattn.InvalidArgument, match=re.escape(named)):
        attend(spoiled(codes, bad, last))


def holding(x, place, code, scale=None):
    """The operand with one code, and its group's scale, exchanged."""
    codes, scales = x.codes.copy(), x.scale.copy()
    codes[place] = code
    if scale is not None:
        scales[place[0], place[2], place[1], 0] = scale
    return dataclasses.replace(x, codes=codes, scale=scales)


@pytest.mark.parametrize("format, code, scale", [("e5m2", 0x7C, None), ("mxfp8", 0x7E, 254)])
def test_codes_beyond_float32_show(format, code, scale):
    q, k, v = (normal(1, 40, 2, 32, seed=i) for i in range(3))
    recipe = qattn.Recipe("infinite", format, "f32", format if format == "e5m2" else "f32")
    coded = {role: qattn.quantize(x, role=role, format=format) for role, x in zip("qk", (q, k))}
    place = (0, 20, 1, 3)
    bad_k = holding(coded["k"], place, code, scale)
    assert np.isinf(qattn.dequantize(bad_k)[place])  # which says what the codes say
    out = qattn.attention(coded["q"], bad_k, v, recipe=recipe, causal=True)
    bad = np.isnan(out).all(-1)
    assert bad[0, 20:, 1].all() and bad.sum() == 20
    out = qattn.attention(holding(coded["q"], place, code, scale), coded["k"], v, recipe=recipe)
    assert np.isnan(out[place[:3]]).all() and np.isnan(out).all(-1).sum() == 1
    if format == "e5m2":
        coded_v = holding(qattn.quantize(v, role="v", format=format), place, code)
        out = qattn.attention(coded["q"], coded["k"], coded_v, recipe=recipe, causal=True)
        bad = np.isnan(out).any(-1)
        assert bad[0, 20:, 1].all() and bad.sum() == 20


def test_values_that_a_static_scale_makes_infinite_clip():
    x = normal(1, 16, 1, 32)
    x[0, 3, 0, 5], x[0, 4, 0, 6] = 3e38, -3e38
    scale = np.full((1, 1), 0.5, np.float32)
    coded = qattn.quantize(x, role="k", format="s8", granularity="per_head", static_scale=scale)
    assert coded.codes[0, 3, 0, 5] == 127 and coded.codes[0, 4, 0, 6] == -127
    assert coded.saturated == 2


def test_a_static_scale_of_the_tensor_hides_no_nan():
    x = normal(2, 20, 3, 32)
    x[1, 7, 2, 5] = np.nan
    options = {"format": "s8", "granularity": "per_tensor"}
    coded = qattn.quantize(x, role="k", static_scale=np.array([0.03], np.float32), **options)
    assert np.isnan(coded.scale).all()
    assert np.isnan(qattn.quantize(x, role="k", **options).scale).all()


def test_means_that_attention_cannot_use_are_refused():
    x = normal(2, 16, 2, 32)
    codes = qattn.quantize(x, role="k", smooth=True)
    pages = {"page_table": [[0], [1]], "seqused_k": [16, 9]}
    with pytest.raises(qattn.InvalidArgument, match="k: .* each page has a mean of its own"):
        qattn.attention(x, codes, x, recipe="int8", **pages)
    turned = [qattn.quantize(x, role=r, rotate=True, smooth=r == "k") for r in "qk"]
    with pytest.raises(qattn.InvalidArgument, match="k: .* its mean is not rotated"):
        qattn.attention(*turned, x, recipe="int8")


def test_scales_behind_a_sequence_may_be_anything():
    q, k, v = normal(2, 3, 4, 32), normal(2, 40, 2, 32, seed=1), normal(2, 40, 2, 32, seed=2)
    codes = qattn.quantize(k, role="k", format="s8")
    used = {"seqused_k": [40, 17], "recipe": "int8"}
    want = qattn.attention(q, codes, v, **used)
    free = (1, slice(None), slice(17, None))
    for bad in (0, np.nan):
        got = qattn.attention(q, spoiled(codes, bad, free), v, **used)
        np.testing.assert_array_equal(got, want)
        with pytest.raises(qattn.InvalidArgument, match=r"k_scale: value .* at \(1, 1, 16\)"):
            qattn.attention(q, spoiled(codes, bad, (1, 1, 16)), v, **used)


@pytest.mark.parametrize("granularity", ["per_tensor", "per_head", "per_channel"])
@pytest.mark.parametrize("packed", [False, True])
def test_scales_of_no_tokens(granularity, packed):
    """One scale for all tokens exists where there are none, and attention() takes it."""
    shape = (0, 3, 16) if packed else (2, 0, 3, 16)
    cu = {"cu_seqlens": np.zeros(3, np.int32)} if packed else {}
    x = np.zeros(shape, np.float32)
    v = qattn.quantize(x, role="v", format="e4m3", granularity=granularity, **cu)
    assert v.scale.size and (v.scale == np.float32(2.0**-126)).all()
    k = qattn.quantize(x, role="k", format="e4m3", **cu)
    q = normal(4, 3, 16) if packed else normal(2, 4, 3, 16)
    options = {"cu_seqlens_q": [0, 1, 4], "cu_seqlens_k": [0, 0, 0]} if packed else {}
    assert (qattn.attention(q, k, v, recipe="fp8", **options) == 0).all()


def test_the_scale_of_no_sequences():
    v = qattn.quantize(np.zeros((0, 5, 3, 16), np.float32), role="v", granularity="per_tensor",
                       format="s8")
    assert v.scale.size == 1 and v.scale.item() == np.float32(2.0**-126)


def test_scheduled_scale():
    sigma = [14.6, 5.0, 1.0, 0.1]
    assert qattn.scheduled_scale(0.5, sigma, 1, 2) == pytest.approx(0.1, rel=1e-6)
    for arguments, word in (
        ((0.5, sigma, 1, 4), "step"),
        ((0.5, [1.0, -1.0], 0, 1), "sigma"),
        ((0.5, sigma, 1.5, 2), "ref"),
        ((0.5, ["a"], 0, 0), "sigma"),
    ):
        with pytest.raises(qattn.InvalidArgument, match=word):
            qattn.scheduled_scale(*arguments)
