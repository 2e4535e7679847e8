"""Wrong calls: the error names the tensor or option, and outputs stay as they were."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from cases import normal, qkv

import qattn

Q, K, V = qkv()
T = [torch.from_numpy(x) for x in (Q, K, V)]
READ_ONLY = np.zeros((2, 70, 4, 32), np.float32)
READ_ONLY.flags.writeable = False
KQ = qattn.quantize(K, role="k")
VQ = qattn.quantize(V, role="v")
QQ = qattn.quantize(Q, role="q")
NAN_SCALE = np.full((2, 2), np.nan, np.float32)
PACKED = {"cu_seqlens_q": [0, 70], "cu_seqlens_k": [0, 150]}
INVALID, UNSUPPORTED = qattn.InvalidArgument, qattn.Unsupported


def replaced(**changes):
    return {"recipe": "int8", **changes}


def refusal(error, words, q=Q, k=K, v=V, **options):
    return error, words, (q, k, v), options


REFUSALS = {
    "list": refusal(INVALID, "q: is a list", q=Q.tolist()),
    "masked array": refusal(INVALID, "k: is a masked array", k=np.ma.array(K)),
    "float64": refusal(INVALID, r"v: dtype float64 .* float32, float16 or bfloat16: v.astype\(",
                       v=V.astype(np.float64)),
    "torch float64": refusal(INVALID, r"k: dtype float64 .* float16 or bfloat16: k.float\(",
                             *T[:1], T[1].double(), T[2]),
    "byte order": refusal(INVALID, "q: dtype >f4", q=Q.astype(">f4")),
    "complex": refusal(INVALID, "q: dtype complex64", q=Q.astype(np.complex64)),
    "rank 3": refusal(INVALID, "q: rank 3", q=Q[0]),
    "rank 6": refusal(INVALID, "q: rank 6", q=Q[None, None]),
    "rank 0": refusal(INVALID, "v: rank 0", v=np.ones((), np.float32)),
    "head dim": refusal(INVALID, "q: head_dim 0", Q[..., :0], K[..., :0]),
    "head dim of k": refusal(INVALID, "k: head_dim 24", k=K[..., :24]),
    "heads": refusal(INVALID, "q: 3 heads", q=Q[:, :, :3]),
    "heads of v": refusal(INVALID, "v: 1 heads", v=V[:, :, :1]),
    "length of v": refusal(INVALID, "v: length 149", v=V[:, 1:]),
    "batch": refusal(INVALID, "k: batch 1", k=K[:1], v=V[:1]),
    "last stride": refusal(INVALID, "q: stride", q=np.repeat(Q, 2, -1)[..., ::2]),
    "mixed dtypes": refusal(INVALID, "format f32 differs from k's f16", k=K.astype(np.float16)),
    "gradient": refusal(INVALID, "q: requires a gradient", q=T[0].clone().requires_grad_()),
    "device": refusal(UNSUPPORTED, "k: lies on device meta", k=T[1].to("meta")),
    "sparse": refusal(INVALID, "v: layout", v=T[2].to_sparse()),
    "recipe": refusal(INVALID, 'recipe: "int7"', recipe="int7"),
    "recipe type": refusal(INVALID, "recipe: 8", recipe=8),
    "recipe format": refusal(
        INVALID, "int9", recipe=dataclasses.replace(qattn.recipe("int8"), qk="int9")
    ),
    "recipe that no kernel has": refusal(
        UNSUPPORTED, "u8 P goes with s8 V",
        recipe=dataclasses.replace(qattn.recipe("int8_full"), p="f16"),
    ),
    "layout": refusal(INVALID, 'layout: "sbhd"', layout="sbhd"),
    "layout type": refusal(INVALID, "layout: 1", layout=1),
    "causal type": refusal(INVALID, "causal: 1", causal=1),
    "window": refusal(INVALID, "window: 5", window=5),
    "window below": refusal(INVALID, "window_left: -2", window=(-2, 0)),
    "window and causal": refusal(
        INVALID, "window_right: 3 contradicts causal.* 0, -1, window_left's 4", window=(4, 3),
        causal=True
    ),
    "window type": refusal(INVALID, "window_right: 0.5", window=(4, 0.5)),
    "softcap": refusal(INVALID, "softcap: -1", softcap=-1.0),
    "scale": refusal(INVALID, "^scale: inf", scale=float("inf")),
    "scale bool": refusal(INVALID, "scale: np.True_", scale=np.True_),
    "head_dim too long": refusal(INVALID, "q: head_dim 577 .* longer heads have no kernel",
                                 *(np.zeros((1, 5, 1, 577), np.float32) for _ in range(3))),
    "head_dim of v too long": refusal(INVALID, "v: head_dim 513 is not from 1 to 512",
                                      *(np.zeros((1, 5, 1, 513), np.float32) for _ in range(3))),
    "scale type": refusal(INVALID, "scale: 'x'", scale="x"),
    "threads": refusal(INVALID, "threads: -1", threads=-1),
    "threads type": refusal(INVALID, "threads: 1.5", threads=1.5),
    "threads huge": refusal(INVALID, "threads", threads=2**70),
    "mask shape": refusal(INVALID, "mask: shape", mask=np.ones((70, 151), bool)),
    "mask dtype": refusal(INVALID, "mask: format s32", mask=np.ones((70, 150), np.int32)),
    "mask int64": refusal(INVALID, "mask: format s64 .* true = may look.* pass mask != 0",
                          mask=np.ones((70, 150), np.int64)),
    "mask int16": refusal(INVALID, "mask: dtype int16 is not bool .* pass mask != 0",
                          mask=np.ones((70, 150), np.int16)),
    "mask float64": refusal(INVALID, "mask: dtype float64 is not bool .* pass it in float32",
                            mask=np.zeros((70, 150))),
    "block mask bytes": refusal(
        INVALID, "block_mask: dtype uint8 is not bool .* pass block_mask != 0",
        block_mask=np.ones((2, 3), np.uint8), block_mask_size=(64, 64)
    ),
    "mask bits shape": refusal(
        INVALID, "mask: shape", mask=qattn.BitMask(np.ones((70, 18), np.uint8))
    ),
    "mask bits apart": refusal(
        INVALID, "mask: stride 2 of b1", mask=qattn.BitMask(np.ones((70, 38), np.uint8)[:, ::2])
    ),
    "mask bytes": refusal(INVALID, "mask: dtype uint8 is not bool .* pass mask != 0",
                          mask=np.ones((70, 150), np.uint8)),
    "sinks": refusal(INVALID, "sinks: shape", sinks=[0.0, 1.0]),
    "ragged sinks": refusal(INVALID, "sinks: ", sinks=[[1.0], [1.0, 2.0]]),
    "alibi dtype": refusal(INVALID, "alibi_slopes: format s32", alibi_slopes=Q[0, 0, :, 0].astype(
        np.int32)),
    "seqused": refusal(INVALID, "seqused_k: entry 1 is 151", seqused_k=[3, 151]),
    "seqused dtype": refusal(INVALID, "seqused_k: format f32", seqused_k=np.float32([3, 4])),
    "seqused wide": refusal(
        INVALID, "seqused_k: entry 1 is 4294967300", seqused_k=np.array([3, 2**32 + 4])
    ),
    "seqused floats": refusal(INVALID, r"seqused_k: \[3, 4.0\] is not a list of integers",
                              seqused_k=[3, 4.0]),
    "page table wide": refusal(INVALID, r"page_table: entry \(1, 0\) is 4294967296",
                               page_table=np.array([[0], [2**32]]), seqused_k=[5, 5]),
    "cu_seqlens": refusal(INVALID, "cu_seqlens_q: last entry 69", Q[0], K[0], V[0],
                          **{**PACKED, "cu_seqlens_q": [0, 69]}),
    "cu_seqlens order": refusal(INVALID, "cu_seqlens_k: entry 2", Q[0], K[0], V[0],
                                cu_seqlens_q=[0, 30, 70], cu_seqlens_k=[0, 160, 150]),
    "page table": refusal(INVALID, r"page_table: entry \(1, 0\) is 2",
                          page_table=[[0], [2]], seqused_k=[5, 5]),
    "page table alone": refusal(INVALID, "page_table: needs seqused_k", page_table=[[0], [1]]),
    "out read-only": refusal(INVALID, "out: is read-only", out=READ_ONLY),
    "out shape": refusal(INVALID, "out: shape", out=np.zeros((2, 70, 4, 24), np.float32)),
    "out dtype": refusal(INVALID, "out: format s32", out=np.zeros((2, 70, 4, 32), np.int32)),
    "out is an input": refusal(INVALID, "out: overlaps the memory of q", out=Q),
    "out overlaps itself": refusal(
        INVALID, "out: stride", out=torch.zeros(1, 70, 4, 32).expand(2, -1, -1, -1)
    ),
    "out against out_dtype": refusal(INVALID, "out_dtype: float16", out_dtype="float16",
                                     out=np.zeros((2, 70, 4, 32), np.float32)),
    "out_dtype": refusal(INVALID, "out_dtype: int8", out_dtype="int8"),
    "saturated": refusal(INVALID, "saturated: shape", saturated=np.zeros(2, np.int64)),
    "granularity": refusal(INVALID, 'q_granularity: "per_row"',
                           **replaced(q_granularity="per_row")),
    "granularity of role": refusal(INVALID, "k", **replaced(k_granularity="per_channel")),
    "granularity type": refusal(INVALID, "v_granularity: 3", **replaced(v_granularity=3)),
    "granularity block": refusal(INVALID, "block", **replaced(k_granularity=("per_block", -4))),
    "toggle": refusal(INVALID, "smooth_k: 'yes'", **replaced(smooth_k="yes")),
    "raw codes of a float recipe": refusal(INVALID, "k: dtype uint8", k=KQ.codes.view(np.uint8),
                                           recipe="auto"),
    "codes without scale": refusal(INVALID, "k_scale: is missing", k=KQ.codes, recipe="int8"),
    "codes in auto": refusal(INVALID, "k: codes", k=KQ),
    "codes of another format": refusal(INVALID, "k: format s8", k=KQ, recipe="fp8"),
    "codes of another role": refusal(INVALID, "q: was quantised for role 'k'", q=KQ, recipe="int8"),
    "codes of another layout": refusal(
        INVALID, "k: was quantised in layout 'bhsd'", recipe="int8",
        k=qattn.quantize(K, role="k", layout="bhsd"),
    ),
    "two scales": refusal(INVALID, "k_scale: is given", **replaced(k=KQ, k_scale=KQ.scale)),
    "two granularities": refusal(INVALID, "k_granularity: is given",
                                 **replaced(k=KQ, k_granularity="per_token")),
    "balanced codes": refusal(INVALID, "balance_k: cannot", **replaced(k=KQ, balance_k=True)),
    "balanced static scales": refusal(
        INVALID, "balance_k: changes rows", recipe="int8", balance_k=True,
        q_scale=np.ones((2, 4, 70), np.float32)),
    "smooth codes": refusal(INVALID, "smooth_k: cannot", **replaced(k=KQ, smooth_k=True)),
    "smooth q": refusal(INVALID, "q: was quantised with smooth=True", recipe="int8",
                        q=qattn.quantize(Q, role="q", smooth=True), k=KQ),
    "rotation of one": refusal(INVALID, "k: was quantised with rotate=True", recipe="int8",
                               k=qattn.quantize(K, role="k", rotate=True)),
    "rotation differs": refusal(INVALID, "q: was quantised with rotate=True", recipe="int8",
                                q=qattn.quantize(Q, role="q", rotate=True), k=KQ),
    "other cu_seqlens": refusal(
        INVALID, "k: was quantised with other cu_seqlens_k", Q[0],
        qattn.quantize(K[0], role="k", cu_seqlens=[0, 10, 150]), V[0], recipe="int8", **PACKED,
    ),
    "NaN scale": refusal(INVALID, "k_scale: value",
                         **replaced(k_scale=NAN_SCALE, k_granularity="per_head")),
    "scale shape": refusal(INVALID, "k_scale: shape",
                           **replaced(k_scale=NAN_SCALE[:1], k_granularity="per_head")),
    "scale of a float recipe": refusal(INVALID, "q_scale: is given", recipe="f32",
                                       q_scale=np.ones((2, 4, 70), np.float32)),
    "mean of floats": refusal(INVALID, "k_mean: is given, but smooth_k", recipe="int8",
                              smooth_k=False, k_mean=np.zeros((2, 2, 32), np.float32)),
    "global of s8": refusal(INVALID, "k_global: belongs", recipe="int8", k=KQ.codes,
                            k_scale=KQ.scale, k_global=np.ones((2, 2), np.float32)),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_and_outputs_untouched(case):
    error, words, operands, options = REFUSALS[case]
    copies = [x.copy() for x in (Q, K, V)]
    options = dict(options)
    given = options.setdefault("out", np.full((2, 70, 4, 32), 7, np.float32))
    shape = (2, 70, 4, 32) if np.ndim(operands[0]) == 4 else (70, 4, 32)
    if np.shape(given) == (2, 70, 4, 32) and shape != np.shape(given) and "out" not in case:
        given = options["out"] = np.full(shape, 7, np.float32)
    if case == "out_dtype":
        del options["out"]
    before = given.clone() if isinstance(given, torch.Tensor) else given.copy()
    counts = options.setdefault("saturated", np.full(3, 7, np.int64))
    with pytest.raises(error, match=words) as caught:
        qattn.attention(*operands, **options)
    assert isinstance(caught.value, qattn.QattnError)
    np.testing.assert_array_equal(np.asarray(given), np.asarray(before))
    if case != "saturated":
        np.testing.assert_array_equal(counts, 7)
    for x, copy in zip((Q, K, V), copies, strict=True):
        np.testing.assert_array_equal(x, copy)


QUANTIZE = {
    "format": ({"format": "s4"}, "format: "),
    "format of no codes": ({"format": "f16"}, "format: f16"),
    "role": ({"role": "x"}, "role: "),
    "role type": ({"role": None}, "role: None"),
    "rotate v": ({"role": "v", "rotate": True}, "rotate: "),
    "granularity": ({"granularity": "per_row"}, "granularity: "),
    "two blocks": ({"granularity": ("per_block", 32), "block": 64}, "block: 64"),
    "block": ({"block": -1}, "block: -1"),
    "smooth": ({"smooth": 1}, "smooth: 1"),
    "static scale of groups": ({"format": "mxfp8", "static_scale": [1.0]}, "static_scale: "),
    "static scale shape": ({"granularity": "per_head", "static_scale": [1.0]}, "static_scale: "),
    "cu_seqlens": ({"cu_seqlens": [0, 5]}, "x: rank 4"),
    "threads": ({"threads": -2}, "threads: -2"),
}


@pytest.mark.parametrize("case", QUANTIZE)
def test_quantize_refused(case):
    options, words = QUANTIZE[case]
    with pytest.raises(INVALID, match=words):
        qattn.quantize(K, **options)


@pytest.mark.parametrize("scale", [0.0, -0.0, -1.0, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("format", ["s8", "e4m3", "e4m3fnuz", "e5m2"])
def test_static_scales_are_positive_and_finite(format, scale):
    words = rf"static_scale: value {scale:f} at \(.*\) is not positive and finite"
    for granularity in ("per_tensor", "per_head", "per_token"):
        shape = qattn.quantize(K, format=format, granularity=granularity).scale.shape
        given = np.full(shape, 0.5, np.float32)
        given.flat[-1] = scale
        for form in (given, torch.from_numpy(given)):
            with pytest.raises(INVALID, match=words):
                qattn.quantize(K, format=format, granularity=granularity, static_scale=form)
    with pytest.raises(INVALID, match=words):
        qattn.quantize(K, format=format, granularity="per_tensor", static_scale=[scale])


def test_other_refusals():
    with pytest.raises(INVALID, match="x: format s32"):
        qattn.quantize(K.astype(np.int32))
    with pytest.raises(INVALID, match="x: is a ndarray"):
        qattn.dequantize(K)
    with pytest.raises(INVALID, match="scale: shape"):
        qattn.dequantize(dataclasses.replace(KQ, scale=KQ.scale[:1]))
    with pytest.raises(INVALID, match="out_dtype"):
        qattn.dequantize(KQ, "int8")
    with pytest.raises(INVALID, match="q_scale: reference_attention"):
        qattn.reference_attention(Q, K, V, q_scale=QQ.scale)
    with pytest.raises(INVALID, match="q"):
        qattn.reference_attention(QQ, K, V, recipe="int8")
    with pytest.raises(INVALID, match="70"):
        qattn.reference_attention(Q, K, V, rows=[70])
    with pytest.raises(INVALID, match="rows: is empty"):
        qattn.reference_attention(Q, K, V, rows=[])
    assert "refused: k_scale: is missing" in qattn.explain(Q, KQ.codes, VQ.codes, recipe="int8")


@pytest.mark.parametrize(
    ("name", "own"), [("is_causal", "causal"), ("softmax_scale", "scale"), ("attn_mask", "mask")]
)
def test_names_of_others_are_told_ours(name, own):
    for call in (qattn.attention, qattn.explain, qattn.reference_attention):
        words = f"unexpected keyword argument '{name}'; here it is '{own}'"
        with pytest.raises(TypeError, match=words):
            call(Q, K, V, **{name: None})
    with pytest.raises(TypeError, match="unexpected keyword argument 'dropout'$"):
        qattn.attention(Q, K, V, dropout=0.5)


def test_explain_names_the_scale_as_python_does():
    text = qattn.explain(Q, K, V, scale=math.inf)
    assert "scale: inf" in text and "softmax_scale" not in text


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_the_other_layout_is_named(layout):
    q, k, v = (x if layout == "bhsd" else x.swapaxes(1, 2) for x in (Q, K, V))
    other = "bshd" if layout == "bhsd" else "bhsd"
    with pytest.raises(INVALID, match=rf"q: .* layout {layout}, \(.*, and these fit {other}, \("):
        qattn.attention(q, k, v, layout=layout)
    assert "these fit" not in qattn.explain(Q[:, :, :3], K, V)


ARRAY = np.zeros((3, 70, 4, 32), np.float32)
NOT_NUMBERS = {
    "integer": ("threads", lambda x: qattn.attention(Q, K, V, threads=x)),
    "real": ("scale", lambda x: qattn.attention(Q, K, V, scale=x)),
    "boolean": ("causal", lambda x: qattn.attention(Q, K, V, causal=x)),
    "toggle": ("smooth_k", lambda x: qattn.attention(Q, K, V, smooth_k=x)),
    "recipe": ("recipe", lambda x: qattn.attention(Q, K, V, recipe=x)),
    "layout": ("layout", lambda x: qattn.attention(Q, K, V, layout=x)),
    "window": ("window", lambda x: qattn.attention(Q, K, V, window=x)),
    "block of the mask": ("block_mask_size", lambda x: qattn.attention(Q, K, V, block_mask_size=x)),
    "granularity": ("q_granularity", lambda x: qattn.attention(Q, K, V, q_granularity=x)),
    "format": ("format", lambda x: qattn.quantize(Q, format=x)),
    "role": ("role", lambda x: qattn.quantize(Q, role=x)),
    "device": ("device", qattn.device_errors),
}


@pytest.mark.parametrize("case", NOT_NUMBERS)
@pytest.mark.parametrize("array", [ARRAY, torch.from_numpy(ARRAY)], ids=["numpy", "torch"])
def test_an_array_in_the_place_of_an_option_is_not_printed(case, array):
    name, call = NOT_NUMBERS[case]
    with pytest.raises(INVALID, match=rf"^{name}: .*of shape \(3, 70, 4, 32\)") as caught:
        call(array)
    assert len(str(caught.value)) < 200


def test_a_long_value_is_cut():
    with pytest.raises(INVALID, match=r"^threads: '0123456789.*\.\.\. is not an integer") as caught:
        qattn.attention(Q, K, V, threads="0123456789" * 1000)
    assert len(str(caught.value)) < 200


def test_the_isa_can_be_forced(monkeypatch):
    monkeypatch.setenv("QATTN_CPU_ISA", "scalar")
    assert qattn.cpu_isa() == "scalar"
    assert "attn.cpu.scalar: chosen" in qattn.explain(Q, K, V, recipe="int8")
    monkeypatch.setenv("QATTN_CPU_ISA", "abacus")
    with pytest.raises(INVALID, match="abacus"):
        qattn.attention(normal(1, 8, 1, 8), normal(1, 8, 1, 8), normal(1, 8, 1, 8))
