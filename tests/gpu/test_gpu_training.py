"""Gradients on GPUs: the INT8 forward's O and LSE in torch's flash and efficient backwards."""

import math

import pytest
import torch
from gpu import DEVICE, normal, nrmse
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa
from torch.utils.checkpoint import checkpoint

import qattn
from qattn.torch import sdpa

DTYPES = (torch.float16, torch.bfloat16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def operands(length=300, keys=300, heads=4, kv_heads=4, batch=2, dim=128, dim_v=None, seed=0,
             dtype=torch.bfloat16):
    shapes = ((heads, length, dim), (kv_heads, keys, dim), (kv_heads, keys, dim_v or dim))
    return [normal(batch, *shape, dtype=torch.float32, seed=seed + i).to(dtype)
            for i, shape in enumerate(shapes)]  # fmt: skip


def family(name, dtype, length=1024, dim=128):
    query, key, value = operands(length, length, dim=dim, dtype=torch.float32)
    if name == "offset":
        key[..., :8] += 8
    if name == "sink":
        mean = query.mean(-2)
        key[:, :, 0] += 24 * mean / mean.norm(dim=-1, keepdim=True)
        value[:, :, 0] *= 0.05
    return [x.to(dtype) for x in (query, key, value)]


def leaves(given):
    return [x.detach().clone().requires_grad_() for x in given]


def gradients(attention, given, seed=9):
    given = leaves(given)
    out = attention(*given)
    grad = normal(*out.shape, dtype=torch.float32, seed=seed).to(out.dtype)
    return torch.autograd.grad(out, given, grad)


def errors(given, mask=None, recipe="int8", backward="forward", **options):
    """Relative errors of dQ, dK, dV against float64 on the same operands."""
    got = gradients(lambda *x: sdpa(*x, mask, recipe=recipe, backward=backward, **options), given)
    exact = mask if mask is None or mask.dtype == torch.bool else mask.double()
    want = gradients(lambda *x: torch_sdpa(*x, exact, **options), [x.double() for x in given])
    for x, y in zip(got, given, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
    return [nrmse(x, y) for x, y in zip(got, want, strict=True)]


# ---- Against float64 -----------------------------------------------------------------------------


@every_dtype
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name, bound", [("normal", 1e-2), ("offset", 1e-2), ("sink", 2e-2)])
def test_error_of_a_family(name, bound, dim, causal, dtype):
    found = errors(family(name, dtype, dim=dim), is_causal=causal)
    print(f"{name} {dim} causal={causal} {dtype}: dQ, dK, dV", *(f"{x:.2e}" for x in found))
    assert max(found[:2]) < bound
    # On a sink the LSE carries the error of its one large score into the sink's own dV.
    assert found[2] < (2.5e-2 if (name, dim) == ("sink", 64) else bound)


def test_an_offset_of_keys_spoils_what_is_not_centred(monkeypatch):
    query, key, value = family("offset", torch.bfloat16)
    given = query, key + 8 * normal(1, 4, 1, 128, dtype=torch.bfloat16, seed=5), value
    assert max(errors(given, is_causal=True)) < 1e-2
    zero = torch.zeros(2, 4, 1, 128, device=DEVICE)
    monkeypatch.setattr("qattn.torch._training.mean_of_seen", lambda *_: zero)
    assert errors(given, is_causal=True)[0] > 4e-2


SHAPES = {
    "grouped": ({"heads": 8, "kv_heads": 2}, {"enable_gqa": True}),
    "grouped causal": ({"heads": 8, "kv_heads": 2}, {"enable_gqa": True, "is_causal": True}),
    "one KV head": ({"kv_heads": 1}, {}),
    "more queries": ({"length": 500, "kv_heads": 2}, {"is_causal": True, "enable_gqa": True}),
    "more keys": ({"length": 200}, {"is_causal": True}),
    "narrow V": ({"dim_v": 64}, {"is_causal": True}),
    "wide heads": ({"dim": 256}, {"is_causal": True}),
    "narrow heads": ({"dim": 64}, {}),
    "scale": ({}, {"scale": 0.05}),
    "one query": ({"length": 1}, {}),
    "no query": ({"length": 0}, {}),
}


@every_dtype
@pytest.mark.parametrize("case", SHAPES)
def test_shapes(case, dtype):
    shape, options = SHAPES[case]
    given = operands(**shape, dtype=dtype)
    if case == "no query":
        assert all((x == 0).all() for x in gradients(lambda *x: sdpa(*x, recipe="int8"), given))
    else:
        assert max(errors(given, **options)) < 1.5e-2


def masks(length, keys, dtype):
    real = torch.arange(keys, device=DEVICE) < torch.tensor([keys, 200], device=DEVICE)[:, None]
    padding = real[:, None, None]
    return {
        "random": normal(length, keys, seed=4) > 0,
        "of heads": normal(2, 8, length, keys, seed=4) > -1,
        "padding": padding,
        "bias": normal(2, 1, length, keys, seed=4).to(dtype),
        "bias of queries": normal(length, 1, seed=4).to(dtype),
        "-inf": torch.where(padding, 0.0, -math.inf).to(dtype),
    }


@every_dtype
@pytest.mark.parametrize("keys", [300, 333])
@pytest.mark.parametrize("case", masks(1, 1, DTYPES[0]) if torch.cuda.is_available() else [""])
def test_masks(case, keys, dtype):
    mask = masks(300, keys, dtype)[case]
    given = operands(keys=keys, heads=8, kv_heads=2, dtype=dtype)
    assert max(errors(given, mask, enable_gqa=True)) < 1.5e-2


def test_rows_that_see_nothing_or_lie_far_off():
    hidden = torch.ones(300, 300, dtype=torch.bool, device=DEVICE)
    hidden[7] = False
    for backward in ("forward", "16bit"):
        assert max(errors(operands(), hidden, backward=backward)) < 1.5e-2
    mask = torch.zeros(300, 300, dtype=torch.bfloat16, device=DEVICE)
    mask[7] = -1e7  # scores neither vanish beside it nor keep their digits
    given = leaves(operands())
    out = sdpa(*given, mask, recipe="int8")
    grad = normal(*out.shape, dtype=torch.bfloat16, seed=9)
    asked = torch.autograd.grad(out, given, grad, retain_graph=True)
    assert torch.isnan(asked[0][:, :, 7]).all() and not torch.isnan(asked[0][:, :, 8]).any()
    grad[:, :, 7] = 0
    got = torch.autograd.grad(out, given, grad)
    assert all(torch.isfinite(x).all() for x in got) and (got[0][:, :, 7] == 0).all()


LEAST = {dtype: torch.finfo(dtype).min for dtype in DTYPES}
FAR = [(dtype, value) for dtype in DTYPES for value in (LEAST[dtype], -2e4, 6e4)]
FAR += [(torch.bfloat16, value) for value in (-3.3e38, -1e20, -1e9, 1e9, 1e30)]


@pytest.mark.parametrize("keys", [300, 333])
@pytest.mark.parametrize("dtype, value", FAR)
@pytest.mark.parametrize("recipe, backward", [("int8", "forward"), ("int8_full", "16bit")])
@pytest.mark.parametrize("some", [False, True])
def test_rows_under_large_biases(recipe, backward, some, dtype, value, keys):
    """Beside the largest P is uniform, as in the forward; those of float16 move nothing."""
    given = operands(keys=keys, heads=8, kv_heads=2, dtype=dtype)
    mask = torch.zeros(300, keys, dtype=dtype, device=DEVICE)
    mask[7:9] = value
    if some:  # keys that are hidden, or lie as low as there is
        mask[7:9, 100:] = -math.inf if value == LEAST[dtype] else LEAST[dtype]
    got = gradients(lambda *x: sdpa(*x, mask, recipe=recipe, backward=backward, enable_gqa=True),
                    given)  # fmt: skip

    def exact(query, key, value_):
        key, value_ = (x.repeat_interleave(4, 1) for x in (key, value_))
        scores = query @ key.mT / math.sqrt(128)
        lost = (mask.abs() > 1e8) & (mask > -math.inf)
        # lost in P beside the bias, but not in what P depends on
        scores = torch.where(lost, scores - scores.detach(), scores) + mask.double()
        return torch.softmax(scores, -1) @ value_

    want = gradients(exact, [x.double() for x in given])
    assert all(nrmse(x, y) < 2e-2 for x, y in zip(got, want, strict=True))
    rows = [nrmse(x[:, :, 7:9], y[:, :, 7:9]) for x, y in zip(got[:1], want[:1], strict=True)]
    assert rows[0] < 2e-2


@every_dtype
@pytest.mark.parametrize("recipe", ["int8_full", "int8"])
def test_16bit_is_the_gradient_of_torch(recipe, dtype):
    mask = normal(300, 300, seed=4) > 0
    for given, options in (({}, {"is_causal": True}), ({}, {"mask": mask}),
                           ({"length": 500}, {"is_causal": True})):  # fmt: skip
        found = errors(operands(**given, dtype=dtype), recipe=recipe, backward="16bit", **options)
        assert max(found) < 6e-3


def test_tf32_does_not_matter():
    """LSE - scale * q.mean has more digits than TF32 where K has an offset."""
    query, key, value = family("offset", torch.bfloat16)
    given = query, key + 100, value
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        found = errors(given, is_causal=True)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert max(found) < 2e-2


# ---- Inside torch --------------------------------------------------------------------------------


def attend(query, key, value):
    return sdpa(query * 1.5, key, value, is_causal=True, enable_gqa=True, recipe="int8") * 2


def close(got, want):
    """The backward adds in no fixed order."""
    return all(nrmse(x, y) < 5e-3 for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic)
    for length in (300, 200):
        given = operands(length, length, kv_heads=2)
        assert close(gradients(compiled, given), gradients(attend, given))


def test_opcheck():
    given = leaves(operands(kv_heads=2))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    mask = normal(300, 300) > 0
    for options in ((None, None, "int8", True, True), (mask, None, "int8", False, True)):
        torch.library.opcheck(torch.ops.qattn.attention.default, (*given, *options),
                              test_utils=tests)  # fmt: skip


def test_autocast_and_checkpoint():
    given = [x.float() for x in operands(kv_heads=2)]
    want = gradients(attend, [x.bfloat16() for x in given])
    with torch.autocast("cuda", dtype=torch.bfloat16):
        got = gradients(lambda *x: sdpa(x[0].bfloat16() * 1.5, *x[1:], is_causal=True,
                                        enable_gqa=True, recipe="int8") * 2, given)  # fmt: skip
    assert all(x.dtype == torch.float32 for x in got) and close(got, want)
    again = gradients(lambda *x: checkpoint(attend, *x, use_reentrant=False), operands(kv_heads=2))
    assert close(again, want)


@pytest.mark.parametrize("masked", [False, True])
def test_nothing_waits(masked):
    """A training step is captured in a graph: it does not wait, nor allocate beside torch."""
    given = leaves(operands())
    mask = normal(300, 300, seed=4).bfloat16() if masked else None
    grad = normal(2, 4, 300, 128, dtype=torch.bfloat16, seed=9)

    def step():
        out = sdpa(*given, mask, is_causal=not masked, recipe="int8")
        return torch.autograd.grad(out, given, grad)

    want = step()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    for x in made:
        x.zero_()
    graph.replay()
    assert close(made, want)


def test_refusals():
    given = leaves(operands())
    bias = torch.zeros(300, 300, device=DEVICE)
    with pytest.raises(qattn.Unsupported, match="attn_mask: dtype torch.float32; where query"):
        sdpa(*given, bias, recipe="int8")
    with torch.no_grad():
        assert sdpa(*given, bias, recipe="int8").shape == given[0].shape
    with pytest.raises(qattn.InvalidArgument, match="query: .* recipe 'int8_full' does not have"):
        sdpa(*given, recipe="int8_full")
    with pytest.raises(qattn.InvalidArgument, match="attn_mask: requires a gradient"):
        sdpa(*given, bias.bfloat16().requires_grad_(), recipe="int8")
