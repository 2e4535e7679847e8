"""attention(), explain() and reference_attention() on numpy and torch."""

import math
import subprocess
import sys
import threading
import time

import ml_dtypes
import numpy as np
import pytest
import torch
from cases import RECIPES, TOLERANCE, array, normal, nrmse, qkv
from hypothesis import given, settings
from hypothesis import strategies as st

import qattn

NUMPY = [np.float32, np.float16, ml_dtypes.bfloat16]
TORCH = [torch.float32, torch.float16, torch.bfloat16]


def test_import_needs_no_torch():
    code = "import sys, qattn; assert 'torch' not in sys.modules; print(qattn.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == qattn.__version__


def test_names():
    isa = qattn.cpu_isa()
    assert f"attn.cpu.{isa}: chosen" in qattn.explain(*qkv())
    assert set(RECIPES) == set(TOLERANCE)
    assert qattn.recipe("auto").qk == "none"
    assert qattn.recipe("int8_full") in qattn.recipes()
    assert issubclass(qattn.InvalidArgument, ValueError)
    assert issubclass(qattn.Unsupported, RuntimeError)


@pytest.mark.parametrize("dtype", NUMPY, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("recipe", [*RECIPES, "auto"])
def test_numpy(recipe, dtype):
    q, k, v = (x.astype(dtype) for x in qkv())
    ref, ref_lse = qattn.reference_attention(q, k, v, causal=True, return_lse=True)
    out, lse = qattn.attention(q, k, v, recipe=recipe, causal=True, return_lse=True)
    assert type(out) is np.ndarray and out.dtype == q.dtype and out.shape == q.shape
    assert lse.dtype == np.float32 and lse.shape == (2, 4, 70) == ref_lse.shape
    unit = {"float32": 0, "float16": 4e-4, "bfloat16": 3e-3}[np.dtype(dtype).name]
    bound = TOLERANCE["int8_full" if recipe == "auto" else recipe]
    if np.dtype(dtype).name == "bfloat16":
        bound = max(bound, TOLERANCE["bf16"])  # "16-bit" is the input's own format
    assert nrmse(out, ref) < np.hypot(bound, unit) * 1.05
    assert np.abs(lse - ref_lse).max() < (0.3 if "nvfp4" in recipe else 0.1)


@pytest.mark.parametrize("dtype", NUMPY, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("d, dv", [(1, 3), (13, 65), (100, 97), (257, 300), (576, 512)])
def test_heads_of_any_size(d, dv, dtype):
    """Of arrays whose rows lie between others of NaN, in which nothing may be read or written."""
    q, k, v, out = (
        np.full((2, tokens, heads, width + 3), np.nan, np.float32).astype(dtype)
        for tokens, heads, width in ((9, 4, d), (70, 2, d), (70, 2, dv), (9, 4, dv))
    )
    for i, (x, width) in enumerate(((q, d), (k, d), (v, dv))):
        x[..., :width] = normal(*x.shape[:-1], width, seed=i).astype(dtype)
    q, k, v, written = q[..., :d], k[..., :d], v[..., :dv], out[..., :dv]
    ref = qattn.reference_attention(q, k, v, causal=True)
    for recipe, bound in (("f32", 4e-3), ("int8_full", 0.03), ("mxfp8", 0.2)):
        qattn.attention(q, k, v, recipe=recipe, causal=True, out=written)
        assert nrmse(written, ref) < bound
        assert np.isnan(out[..., dv:].astype(np.float32)).all()
        assert np.array_equal(qattn.attention(q, k, v, recipe=recipe, causal=True), written)


@pytest.mark.parametrize("dtype", TORCH, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_torch_equals_numpy(recipe, dtype):
    tensors = [torch.from_numpy(x).to(dtype) for x in qkv()]
    names = {torch.float32: np.float32, torch.float16: np.float16}
    arrays = [
        x.numpy() if dtype in names else x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        for x in tensors
    ]
    out, lse = qattn.attention(*tensors, recipe=recipe, return_lse=True)
    expected, expected_lse = qattn.attention(*arrays, recipe=recipe, return_lse=True)
    assert isinstance(out, torch.Tensor) and out.dtype == dtype and lse.dtype == torch.float32
    np.testing.assert_array_equal(array(out), array(expected))
    np.testing.assert_array_equal(lse.numpy(), expected_lse)


def test_lse_is_torch_logsumexp():
    q, k, v = (torch.from_numpy(x) for x in qkv(heads=2))
    _, lse = qattn.attention(q, k, v, recipe="f32", return_lse=True)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / 32**0.5
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=2e-6, rtol=0)
    assert qattn.attention(q, k, v, recipe="int8", return_lse=True)[1].shape == lse.shape


@pytest.mark.parametrize("recipe", ["f32", "int8_full"])
def test_layouts_and_strides_are_equal(recipe):
    q, k, v = qkv()
    expected = qattn.attention(q, k, v, recipe=recipe, causal=True)
    swapped = [x.transpose(0, 2, 1, 3) for x in (q, k, v)]
    out = qattn.attention(*swapped, recipe=recipe, causal=True, layout="bhsd")
    np.testing.assert_array_equal(out, expected.transpose(0, 2, 1, 3))
    # one buffer (B, S, H, 3, D): every operand is a view with gaps
    packed = np.full((2, 150, 2, 3, 32), np.nan, np.float32)
    packed[:, :, :, 1], packed[:, :, :, 2] = k, v
    out = qattn.attention(q, packed[:, :, :, 1], packed[:, :, :, 2], recipe=recipe, causal=True)
    np.testing.assert_array_equal(out, expected)
    # tokens backwards in memory
    reverse = [np.ascontiguousarray(x[:, ::-1])[:, ::-1] for x in (q, k, v)]
    assert reverse[0].strides[1] < 0
    np.testing.assert_array_equal(qattn.attention(*reverse, recipe=recipe, causal=True), expected)
    # stride 0: one batch entry for both
    same = [torch.from_numpy(x[:1]).expand(2, -1, -1, -1) for x in (q, k, v)]
    out = qattn.attention(*same, recipe=recipe, causal=True)
    np.testing.assert_array_equal(out[0], out[1])
    np.testing.assert_array_equal(out[0], expected[0])


def test_read_only_inputs_and_given_output():
    arrays = qkv()
    expected = qattn.attention(*arrays, recipe="int8")
    for x in arrays:
        x.flags.writeable = False
    assert np.array_equal(qattn.attention(*arrays, recipe="int8"), expected)
    wide = np.full((2, 70, 4, 40), 7, np.float32)
    out = wide[..., :32]
    assert qattn.attention(*arrays, recipe="int8", out=out) is out
    np.testing.assert_array_equal(out, expected)
    assert (wide[..., 32:] == 7).all()
    half = torch.empty(2, 70, 4, 32, dtype=torch.float16)
    assert qattn.attention(*arrays, recipe="int8", out=half) is half
    np.testing.assert_array_equal(half.numpy(), expected.astype(np.float16))


@pytest.mark.parametrize(
    "asked", ["float16", np.float16, np.dtype(np.float16), torch.float16, "f16"], ids=str
)
def test_out_dtype(asked):
    arrays = qkv()
    out = qattn.attention(*arrays, recipe="f32", out_dtype=asked)
    assert out.dtype == np.float16
    bf16 = qattn.attention(*map(torch.from_numpy, arrays), recipe="f32", out_dtype=torch.bfloat16)
    assert bf16.dtype == torch.bfloat16
    assert qattn.attention(*arrays, out_dtype="bfloat16").dtype == ml_dtypes.bfloat16


FEATURES = {
    "causal": {"causal": True},
    "window": {"window": (40, 10)},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": 0.3},
    "sinks": {"sinks": [2.5, -1.0, 4.0, 3.0]},
    "alibi": {"alibi_slopes": [0.1, 0.02, 0.3, 0.0]},
    "boolean mask": {"mask": normal(2, 1, 70, 150) > 0},
    "bit mask": {"mask": qattn.BitMask.pack(normal(2, 1, 70, 150) > 0)},
    "additive mask": {"mask": normal(4, 1, 150)},
    "bf16 mask": {"mask": normal(4, 70, 150).astype(ml_dtypes.bfloat16)},
    "used": {"seqused_q": [70, 3], "seqused_k": [5, 150]},
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("recipe", ["f32", "int8_full"])
def test_features(recipe, feature):
    q, k, v = qkv()
    ref, ref_lse = qattn.reference_attention(q, k, v, return_lse=True, **FEATURES[feature])
    plain = qattn.reference_attention(q, k, v)
    out, lse = qattn.attention(q, k, v, recipe=recipe, return_lse=True, **FEATURES[feature])
    assert nrmse(ref, plain) > 3 * TOLERANCE[recipe], "the feature changes too little to be tested"
    assert nrmse(out, ref) < 2 * TOLERANCE[recipe]
    finite = np.isfinite(ref_lse)
    np.testing.assert_array_equal(np.isfinite(lse), finite)
    assert np.abs(lse[finite] - ref_lse[finite]).max() < (1e-5 if recipe == "f32" else 5e-2)


@pytest.mark.parametrize("slopes", [(0.5, 0.25, 0.125, 0.0625), (-0.05, 0.3, 0.0, 1.0)])
@pytest.mark.parametrize("sizes", [(40, 40), (33, 150), (150, 33)])
@pytest.mark.parametrize("causal", [False, True])
def test_alibi_is_the_distance_on_both_sides(slopes, sizes, causal):
    """-slope |i + Sk - Sq - j| as FlashAttention has it, beside the formula in numpy."""
    q, k, v = (normal(2, n, 4, 32).astype(np.float64) for n in (sizes[0], sizes[1], sizes[1]))
    offset = np.arange(sizes[1]) - np.arange(sizes[0])[:, None] - (sizes[1] - sizes[0])
    s = np.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(32)
    s -= np.array(slopes)[:, None, None] * np.abs(offset)
    seen = offset <= 0 if causal else np.ones_like(offset, bool)
    p = np.where(seen, np.exp(s - s.max(-1, keepdims=True)), 0)
    total = p.sum(-1, keepdims=True)
    p = np.divide(p, total, where=total > 0, out=np.zeros_like(p))
    arrays = [x.astype(np.float32) for x in (q, k, v)]
    options = {"alibi_slopes": list(slopes), "causal": causal}
    for out in (
        qattn.reference_attention(*arrays, **options),
        qattn.attention(*arrays, recipe="f32", **options),
    ):
        assert nrmse(out, np.einsum("bhij,bjhd->bihd", p, v)) < 5e-6


@pytest.mark.parametrize(
    "option",
    [{"smooth_k": False}, {"smooth_q": True}, {"smooth_v": True}, {"rotate": True}],
    ids=str,
)
def test_toggles_act(option):
    q, k, v = qkv()
    out = qattn.attention(q, k, v, recipe="int8_full", **option)
    assert not np.array_equal(out, qattn.attention(q, k, v, recipe="int8_full"))
    assert nrmse(out, qattn.reference_attention(q, k, v)) < TOLERANCE["int8_full"]


def test_loud_channels_of_k_are_balanced():
    q, k, v = qkv()
    loud = np.arange(k.shape[-1]) == 3
    k = (k + 300 * loud * np.cos(np.arange(k.shape[1]))[None, :, None, None]).astype(np.float32)
    q = np.where(loud, q / 50, q).astype(np.float32)
    want = qattn.reference_attention(q, k, v)
    for recipe in ("int8", "int8_full", "int8_fp8"):
        assert nrmse(qattn.attention(q, k, v, recipe=recipe), want) < 2 * TOLERANCE[recipe]
        assert nrmse(qattn.attention(q, k, v, recipe=recipe, balance_k=False), want) > 0.1
    assert "balance_k=on" in qattn.explain(q, k, v, recipe="int8")
    codes = qattn.quantize(k, role="k")
    assert "balance_k=off" in qattn.explain(q, codes, v, recipe="int8")


@pytest.mark.parametrize(
    "granularity",
    ["per_tensor", "per_head", ("per_block", 16), ("per_warp", 64, 16), "per_token"],
    ids=str,
)
def test_granularities_act(granularity):
    q, k, v = qkv()
    q[:, ::3] *= 4  # tokens of different size, so that granularity matters
    options = {"q_granularity": granularity}
    assert f"q_scale={granularity if isinstance(granularity, str) else granularity[0]}" in (
        qattn.explain(q, k, v, recipe="int8", **options)
    )
    out = qattn.attention(q, k, v, recipe="int8", **options)
    same = np.array_equal(out, qattn.attention(q, k, v, recipe="int8"))
    assert same == (granularity == "per_token")
    assert nrmse(out, qattn.reference_attention(q, k, v)) < 0.05


def test_recipe_objects():
    import dataclasses

    q, k, v = qkv()
    fnuz = dataclasses.replace(
        qattn.recipe("fp8"), name="fp8_fnuz", qk="e4m3fnuz", p="f16", v="e4m3fnuz"
    )
    out = qattn.attention(q, k, v, recipe=fnuz)
    assert nrmse(out, qattn.reference_attention(q, k, v)) < 0.08
    assert "qk=e4m3fnuz" in qattn.explain(q, k, v, recipe=fnuz)


def test_explain():
    q, k, v = qkv()
    text = qattn.explain(q, k, v, recipe="int8_full", causal=True, return_lse=True)
    assert "int8_full" in text and "chosen" in text
    assert qattn.explain(q[..., :31], k, v).startswith("refused: k: head_dim 32")
    with pytest.raises(TypeError, match="casual"):
        qattn.explain(q, k, v, casual=True)


def test_reference_rows():
    q, k, v = qkv()
    ref = qattn.reference_attention(q, k, v)
    some = qattn.reference_attention(q, k, v, rows=[0, 69])
    np.testing.assert_array_equal(some[:, [0, 69]], ref[:, [0, 69]])
    assert np.isnan(some[:, 1:69]).all()
    scores = np.einsum("bqhd,bkhd->bhqk", q[:, :, ::2], k, dtype=np.float64) / 32**0.5
    p = np.exp(scores)
    expected = np.einsum("bhqk,bkhd->bqhd", p / p.sum(-1, keepdims=True), v.astype(np.float64))
    np.testing.assert_allclose(
        qattn.reference_attention(q[:, :, ::2], k, v), expected, rtol=1e-12, atol=1e-13
    )


def test_threads_do_not_change_the_result_and_the_gil_is_free():
    q, k, v = qkv(queries=700, keys=1500)
    expected = qattn.attention(q, k, v, recipe="fp8", threads=1)
    assert np.array_equal(qattn.attention(q, k, v, recipe="fp8", threads=3), expected)
    ticks, results = [], []
    worker = threading.Thread(
        target=lambda: results.append(qattn.reference_attention(q, k, v, threads=1))
    )
    worker.start()
    while worker.is_alive():
        ticks.append(time.perf_counter())
        time.sleep(0.002)
    worker.join()
    assert len(results) == 1 and len(ticks) > 5, "no other thread ran while qattn computed"


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(0, 3),
    queries=st.integers(0, 40),
    keys=st.integers(0, 140),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    dim=st.integers(1, 6).map(lambda n: 8 * n),
    dim_v=st.integers(1, 6).map(lambda n: 8 * n),
    window=st.one_of(
        st.sampled_from([{}, {"causal": True}]),
        st.tuples(st.integers(-1, 60), st.integers(-1, 60)).map(lambda w: {"window": w}),
    ),
    recipe=st.sampled_from(["f32", "int8_full", "mxfp8"]),
)
def test_any_shape(batch, queries, keys, kv_heads, group, dim, dim_v, window, recipe):
    q, k, v = qkv(batch, queries, keys, kv_heads * group, kv_heads, dim, dim_v)
    out, lse = qattn.attention(q, k, v, recipe=recipe, return_lse=True, **window)
    ref, ref_lse = qattn.reference_attention(q, k, v, return_lse=True, **window)
    assert out.shape == ref.shape == (batch, queries, kv_heads * group, dim_v)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(ref_lse))
    if out.size and np.abs(ref).max() > 0:
        # few keys average little of the error away
        assert nrmse(out, ref) < 2.5 * TOLERANCE[recipe] + 1e-6


@pytest.mark.parametrize("keys", [1, 7, 8, 150])
@pytest.mark.parametrize("recipe", ["f32", "int8_full"])
def test_a_bit_mask_is_the_mask_that_it_was_packed_from(recipe, keys):
    q = normal(2, 70, 4, 64)
    k, v = (normal(2, keys, 2, 64, seed=n) for n in (1, 2))
    mask = normal(2, 4, 70, keys, seed=3) > 0
    expected = qattn.attention(q, k, v, recipe=recipe, mask=mask)
    packed = qattn.BitMask.pack(mask)
    assert packed.bits.shape == (2, 4, 70, -(-keys // 8)) and packed.bits.dtype == np.uint8
    np.testing.assert_array_equal(qattn.attention(q, k, v, recipe=recipe, mask=packed), expected)
    in_torch = qattn.BitMask.pack(torch.from_numpy(mask))
    np.testing.assert_array_equal(in_torch.bits.numpy(), packed.bits)
    if keys % 8:  # what is behind the last key does not count
        packed.bits[..., -1] |= (0xFF << keys % 8) & 0xFF
    out = qattn.attention(*map(torch.from_numpy, (q, k, v)), recipe=recipe, mask=packed)
    np.testing.assert_array_equal(out.numpy(), expected)
    if keys <= 8:  # a byte a row, whose stride says nothing
        apart = qattn.BitMask(np.repeat(packed.bits, 3, -1)[..., ::3])
        np.testing.assert_array_equal(
            qattn.attention(q, k, v, recipe=recipe, mask=apart), expected
        )
    with pytest.raises(qattn.InvalidArgument, match="bits: dtype bool"):
        qattn.BitMask(mask)


@pytest.mark.parametrize("recipe", ["f32", "int8_full"])
def test_block_mask(recipe):
    q, k, v = (normal(2, 200, 4, 64, seed=n) for n in range(3))
    blocks = np.random.default_rng(4).random((2, 4, 2, 4)) < 0.6
    blocks[:, :, 1] = False  # queries from 128 on see nothing
    dense = np.repeat(np.repeat(blocks, 128, 2), 64, 3)[:, :, :200, :200]
    size = {"block_mask": blocks, "block_mask_size": (128, 64)}
    out, lse = qattn.attention(q, k, v, recipe=recipe, return_lse=True, **size)
    same = qattn.attention(q, k, v, recipe=recipe, mask=np.ascontiguousarray(dense))
    np.testing.assert_array_equal(out, same)
    assert (out[:, 128:] == 0).all() and np.isneginf(lse[:, :, 128:]).all()
    ref = qattn.reference_attention(q, k, v, **size)
    assert nrmse(out, ref) <= TOLERANCE[recipe]
    with pytest.raises(qattn.InvalidArgument, match="block_mask_q"):
        qattn.attention(q, k, v, block_mask=blocks)


SHORT_OPTIONS = [
    {},
    {"causal": True, "threads": 1, "scale": 0.25},
    {"causal": False, "softcap": 20, "smooth_k": False, "validate": True, "scale": 1},
    {"smooth_q": True, "rotate": True, "balance_k": False},
]


def both_ways(q, k, v, **options):
    """Of an ordinary call the short way, which takes operands by place, and the long way."""
    return [
        lambda: qattn.attention(q, k, v, **options),
        lambda: qattn.attention(q=q, k=k, v=v, **options),
    ]


@pytest.mark.parametrize("make", [*NUMPY, *TORCH], ids=str)
def test_the_short_way_gives_what_the_long_way_gives(make):
    rng = np.random.default_rng(7)
    for layout in ("bshd", "bhsd"):
        for options in SHORT_OPTIONS:
            shapes = [(2, 9, 4, 32), (2, 20, 2, 32), (2, 20, 2, 16)]
            whole = [rng.standard_normal(s).astype(np.float32) for s in shapes]
            if layout == "bhsd":
                whole = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in whole]
            q, k, v = (
                torch.tensor(x, dtype=make) if make in TORCH else x.astype(make) for x in whole
            )
            short, long = (f() for f in both_ways(q, k, v, recipe="int8", layout=layout, **options))
            assert type(short) is type(long) and short.dtype == long.dtype
            assert short.shape == long.shape
            short, long = (
                x.float() if make in TORCH else x.astype(np.float32) for x in (short, long)
            )
            np.testing.assert_array_equal(short, long)


class _Text(str):
    pass


@pytest.mark.parametrize(
    "wrong",
    [
        {"recipe": "int9"},
        {"recipe": 8},
        {"layout": "sbhd"},
        {"layout": None},
        {"causal": 1},
        {"causal": "lower"},
        {"scale": "small"},
        {"scale": True},
        {"scale": -math.inf},
        {"softcap": -1.0},
        {"threads": 1.0},
        {"threads": True},
        {"threads": -1},
        {"smooth_k": 0},
        {"validate": None},
        {"q": (2, 9, 4, 64)},
        {"k": (1, 20, 2, 32)},
        {"k": (2, 20, 3, 32)},
        {"v": (2, 21, 2, 32)},
        {"v": (2, 20, 32)},
        {"q": (4, 32)},
    ],
    ids=str,
)
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_the_short_way_refuses_what_the_long_way_refuses(framework, wrong):
    right = {"causal": True, "scale": 1.0, "softcap": 1.0, "threads": 1, "smooth_k": False}
    shapes = {"q": (2, 9, 4, 32), "k": (2, 20, 2, 32), "v": (2, 20, 2, 32)}
    options = {name: x for name, x in wrong.items() if name not in shapes}

    def arrays(given):
        made = [np.ones(given.get(name, shape), np.float32) for name, shape in shapes.items()]
        return [torch.tensor(x) for x in made] if framework == "torch" else made

    qattn.attention(*arrays({}), **right)  # its options are kept, and equal some wrong ones
    texts = []
    for call in both_ways(*arrays(wrong), **options):
        with pytest.raises(qattn.InvalidArgument) as refused:
            call()
        texts.append(str(refused.value))
    assert texts[0] == texts[1]


def test_the_short_way_keeps_no_option_that_may_change():
    q, k, v = qkv()
    scale = torch.tensor(0.25)
    before = qattn.attention(q, k, v, recipe="f32", scale=scale)
    scale.mul_(8)
    after = qattn.attention(q, k, v, recipe="f32", scale=scale)
    np.testing.assert_array_equal(before, qattn.attention(q, k, v, recipe="f32", scale=0.25))
    np.testing.assert_array_equal(after, qattn.attention(q, k, v, recipe="f32", scale=2.0))
    named = qattn.attention(q, k, v, recipe=_Text("f32"), scale=2.0)
    np.testing.assert_array_equal(after, named)


def test_the_short_way_is_for_plain_tensors_alone():
    q = torch.randn(1, 4, 2, 16)
    qattn.attention(q, q, q)
    for other, text in (
        (torch._neg_view(q), "lazy negative"),
        (q.clone().requires_grad_(), "requires a gradient"),
        (q.transpose(2, 3), "stride"),
        (q.to("meta"), "meta"),
    ):
        for name in "qkv":
            operands = {x: q for x in "qkv"} | {name: other}
            with pytest.raises(qattn.QattnError, match=f"{name}: .*{text}"):
                qattn.attention(*operands.values())


def test_the_short_way_under_modes_of_torch():
    from torch._subclasses.fake_tensor import FakeTensorMode

    q = torch.randn(1, 4, 2, 16)
    want = qattn.attention(q, q, q)
    with torch.inference_mode():
        assert torch.equal(qattn.attention(q, q, q), want)
    with FakeTensorMode(), pytest.raises(qattn.Unsupported, match="out"):
        qattn.attention(q, q, q)


@pytest.mark.parametrize("recipe", ["f32", "bf16", "int8", "int8_full"])
@pytest.mark.parametrize("heads,queries", [((8, 2), 16), ((6, 2), 13), ((5, 1), 11), ((14, 2), 9)])
def test_heads_of_a_group_whose_rows_fill_a_task_together(recipe, heads, queries):
    q, k, v = qkv(1, queries, 300, *heads, dim=64)
    whole, lse = qattn.attention(q, k, v, recipe=recipe, causal=True, return_lse=True)
    ref, ref_lse = qattn.reference_attention(q, k, v, causal=True, return_lse=True)
    assert nrmse(whole, ref) < TOLERANCE[recipe] and np.abs(lse - ref_lse).max() < 0.05
    bias = np.zeros((1, heads[0], queries, 300), np.float32)
    bias[:, 1::2, ::2, 5:] = -np.inf  # heads and rows of a task see other keys
    masked = qattn.attention(q, k, v, recipe=recipe, mask=bias > -1)
    assert nrmse(masked, qattn.reference_attention(q, k, v, mask=bias > -1)) < TOLERANCE[recipe]
    assert nrmse(qattn.attention(q, k, v, recipe=recipe, mask=bias), masked) < TOLERANCE[recipe]
