"""Gradients of qattn.torch.sdpa: against float64, compiled, under autocast and checkpointing, and
what is refused because it has none."""

import math

import pytest
import torch
from cases import nrmse
from gradients import (
    FAR,
    check_far_row,
    errors,
    exact_row_gradients,
    family,
    gradients,
    leaves,
    normal,
    operands,
    padding,
    row_gradients,
)
from torch.autograd import forward_ad
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa
from torch.utils.checkpoint import checkpoint

import qattn
from qattn.torch import _backward as _torch_backward
from qattn.torch import sdpa

pytestmark = pytest.mark.slow

OP = torch.ops.qattn.attention.default
TRAINING = torch.ops.qattn.attention_training.default
BACKWARD = torch.ops.qattn.attention_backward.default
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# ---- Against float64 -----------------------------------------------------------------------------


#: of dQ, dK, dV. On a sink the LSE carries the error of its one large score into the sink's own dV.
BOUNDS = {"normal": [1e-2] * 3, "offset": [1e-2] * 3, "sink": [2e-2, 2e-2, 2.5e-2]}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", BOUNDS)
def test_error_of_a_family(name, causal, dtype):
    for seed in (0, 10):
        given = family(name, 1024 if name == "sink" else 512, seed=seed)
        found = errors(given, is_causal=causal, dtype=dtype)
        assert all(x < y for x, y in zip(found, BOUNDS[name], strict=True)), found


@pytest.mark.parametrize("name, bound", [("normal", 1e-2), ("offset", 1e-2), ("sink", 2e-2)])
def test_error_of_wider_heads(name, bound):
    for dtype in DTYPES[:2]:
        found = errors(family(name, 768, 128), is_causal=True, dtype=dtype)
        assert max(found) < bound, found


def test_an_offset_of_keys_spoils_what_is_not_centred(monkeypatch):
    """The bound of test_error_of_a_family is the centring's: without it dQ is far off."""
    query, key, value = family("offset")
    given = query, key + 8 * normal(1, 2, 1, 64, seed=5), value
    assert max(errors(given, is_causal=True)) < 1e-2
    zero = torch.zeros(1, 2, 1, 64)
    monkeypatch.setattr("qattn.torch._training.mean_of_seen", lambda *_: zero)
    assert errors(given, is_causal=True)[0] > 5e-2


SHAPES = {
    "grouped": ({"heads": 6, "kv_heads": 2}, {"enable_gqa": True}),
    "grouped causal": ({"heads": 6, "kv_heads": 2}, {"enable_gqa": True, "is_causal": True}),
    "one KV head": ({"kv_heads": 1}, {}),
    "more queries": ({"length": 70}, {"is_causal": True}),
    "more keys": ({"length": 20}, {"is_causal": True}),
    "narrow V": ({"dim_v": 16}, {"is_causal": True}),
    "wide V": ({"dim_v": 64}, {}),
    "scale": ({}, {"scale": 0.05}),
    "one query": ({"length": 1}, {}),
    "odd heads": ({"dim": 33, "dim_v": 21, "kv_heads": 2}, {"enable_gqa": True}),
    "odd heads causal": ({"dim": 65}, {"is_causal": True}),
    "odd heads of 16 bits": ({"dim": 50, "dim_v": 7}, {"backward": "16bit"}),
    "heads of Gemma": ({"dim": 512, "heads": 2, "kv_heads": 1}, {"enable_gqa": True}),
    "heads of latent attention": ({"dim": 576, "dim_v": 512, "batch": 1}, {"is_causal": True}),
}


@pytest.mark.parametrize("case", SHAPES)
def test_shapes(case):
    shape, options = SHAPES[case]
    assert max(errors(operands(**shape), **options)) < 1.5e-2


def test_ranks_and_broadcasting():
    for shapes in ([(20, 32)] * 3, [(3, 20, 32)] * 3, [(2, 3, 2, 20, 32)] * 3,
                   [(2, 3, 20, 32), (3, 20, 32), (20, 32)]):  # fmt: skip
        given = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
        assert max(errors(given)) < 1.5e-2


def test_views_and_expanded_gradients():
    query, key, value = operands(40, 40)
    packed = torch.stack([x.transpose(1, 2) for x in (query, key, value)], 2).requires_grad_()
    out = sdpa(*packed.permute(2, 0, 3, 1, 4), recipe="int8")
    out.sum().backward()  # a gradient whose strides are 0
    plain = leaves((query, key, value))
    sdpa(*plain, recipe="int8").backward(torch.ones_like(query))
    for i, x in enumerate(plain):
        assert torch.equal(packed.grad[:, :, i].transpose(1, 2), x.grad)
    turned = leaves([x.mT.contiguous() for x in (query, key, value)])  # the last stride is not 1
    sdpa(*(x.mT for x in turned), recipe="int8").backward(torch.ones_like(query))
    for x, y in zip(turned, plain, strict=True):
        torch.testing.assert_close(x.grad.mT, y.grad)


def test_one_operand_alone():
    given = operands()
    _, want = gradients(lambda *x: sdpa(*x, recipe="int8"), given)
    for i in range(3):
        some = list(given)
        some[i] = some[i].clone().requires_grad_()
        out = sdpa(*some, recipe="int8")
        got = torch.autograd.grad(out, some[i], normal(*out.shape, seed=9))[0]
        assert torch.equal(got, want[i])


def test_the_forward_is_the_same_with_a_gradient():
    for options in ({"is_causal": True}, {"attn_mask": normal(40, 56) > 0}):
        for recipe, backward in (("int8", "forward"), ("int8_full", "16bit")):
            given = operands()
            want = sdpa(*given, recipe=recipe, **options)
            out = sdpa(*leaves(given), recipe=recipe, backward=backward, **options)
            assert out.requires_grad and torch.equal(out, want)
            with torch.no_grad():
                assert not sdpa(*leaves(given), recipe=recipe, **options).requires_grad


@pytest.mark.parametrize("q, k", [((2, 3, 0, 16), (2, 3, 5, 16)), ((2, 3, 5, 16), (2, 3, 0, 16)),
                                  ((0, 3, 5, 16), (0, 3, 5, 16)), ((2, 0, 5, 16), (2, 0, 5, 16))],
                         ids=str)  # fmt: skip
def test_empty(q, k):
    for causal in (False, True):
        given = leaves([torch.ones(q), torch.ones(k), torch.ones(k)])
        sdpa(*given, is_causal=causal, recipe="int8").sum().backward()
        assert all((x.grad == 0).all() and x.grad.shape == x.shape for x in given)


# ---- Masks ---------------------------------------------------------------------------------------


MASKS = {
    "random": normal(40, 56, seed=4) > 0,
    "of heads": normal(2, 4, 40, 56, seed=4) > -1,
    "padding": padding(),
    "bias": normal(2, 1, 40, 56, seed=4),
    "bias of queries": normal(40, 1, seed=4),
    "-inf": torch.where(padding(), 0.0, -torch.inf),
    "-1e4": torch.where(padding(), 0.0, -1e4),
    "upper left": causal_upper_left(40, 56),
    "lower right": causal_lower_right(40, 56),
}


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("case", MASKS)
def test_masks(case, dtype):
    mask, exact = MASKS[case], None
    if "er " in case:
        last = 56 - 40 if case == "lower right" else 0
        exact = torch.ones(40, 56, dtype=torch.bool).tril(last)
    given = operands(heads=4, kv_heads=2)
    assert max(errors(given, mask, exact, dtype, enable_gqa=True)) < 1.5e-2


@pytest.mark.parametrize("additive", [False, True])
def test_keys_that_nobody_sees_have_no_influence(additive):
    mask = padding().expand(2, 1, 40, 56)
    if additive:
        mask = torch.where(mask, 0.0, -torch.inf)
    _, want = gradients(lambda *x: sdpa(*x, mask, recipe="int8"), operands())
    query, key, value = operands()
    key[1, :, 40:], value[1, :, 40:] = torch.nan, torch.inf
    _, got = gradients(lambda *x: sdpa(*x, mask, recipe="int8"), (query, key, value))
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)
    assert (got[1][1, :, 40:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_centred_keys_are_rounded_once(dtype):
    dense = normal(2, 3, 50, 48, dtype=dtype)
    dense[..., 0, 0], dense[..., 1, 0], dense[..., 2, 0] = math.nan, math.inf, 6e4
    apart = dense.transpose(1, 2).contiguous().transpose(1, 2)
    for key in (dense, apart, dense[..., ::2], dense[:, :1].expand(-1, 3, -1, -1)):
        mean = key[..., 3:, :].mean(-2, keepdim=True, dtype=torch.float32)
        made, expected = _torch_backward.centred(key, mean), (key - mean).to(dtype)
        assert made.dtype == dtype
        torch.testing.assert_close(made, expected, rtol=0, atol=0, equal_nan=True)


def test_a_mean_of_seen_keys_alone():
    """Hidden keys far from the others would leave an offset in those that count."""
    query, key, value = family("normal")
    mask = (torch.arange(512) < 300).expand(512, 512)
    key[:, :, 300:] -= 60
    assert max(errors((query, key + 16, value), mask)) < 1e-2
    faint = torch.where(mask, 0.0, -1e4)
    assert max(errors((query, key + 16, value), faint)) < 1e-2


def test_rows_that_see_nothing_or_lie_far_off():
    """Rows of padding, of False or finfo.min, and large biases that say nothing by themselves."""
    hidden = torch.ones(40, 56, dtype=torch.bool)
    hidden[7] = False
    found = errors(operands(), hidden)
    assert max(found) < 1.5e-2
    mask = torch.zeros(40, 56)
    mask[7] = 3e5
    assert max(errors(operands(), mask, torch.zeros(40, 56))) < 4e-2


@pytest.mark.parametrize("recipe, backward", [("int8", "forward"), ("int8_full", "16bit")])
@pytest.mark.parametrize("value", FAR)
@pytest.mark.parametrize("some", [False, True])
def test_rows_under_biases_beside_which_scores_vanish(recipe, backward, value, some):
    """The forward gives such a row the mean of V at its largest biases; so are its gradients."""
    check_far_row(value, some, recipe, backward, 1e-3)


@pytest.mark.parametrize("sign", [-1, 1])
def test_rows_under_biases_of_any_size(sign):
    """P is that of scores, of K less its mean, that float32 rounds beside the row's bias."""
    given = operands(8, 12, 4, 2)
    k = (given[1] - given[1].mean(-2, keepdim=True)).repeat_interleave(2, 1)
    scores = given[0][:, :, 5:6] @ k.mT / math.sqrt(32)
    for exponent in torch.arange(0, 38.6, 0.7).tolist():
        mask = normal(8, 12, seed=4)
        mask[5] = min(sign * 10.0**exponent, 3.4e38)
        share = torch.softmax(scores + mask[5], -1)
        _, got, grad = row_gradients(given, mask, "int8_full", "16bit")
        want = exact_row_gradients(given, share, grad)
        found = [nrmse(x, y) for x, y in zip((got[0][:, :, 5:6], *got[1:]), want, strict=True)]
        assert max(found) < 1e-2, exponent


def test_gradients_beside_rows_that_lie_far_off():
    """Of other rows they are as without such rows, whatever recipe and grouping."""
    given = operands(40, 56, 4, 2)
    mask = normal(40, 56, seed=4)
    far = mask.clone()
    far[7:9] = -1e9
    grad = normal(2, 4, 40, 32, seed=5)
    grad[:, :, 7:9] = 0
    found = []
    for bias in (mask, far):
        own = leaves(given)
        out = sdpa(*own, bias, recipe="int8", enable_gqa=True)
        found.append(torch.autograd.grad(out, own, grad))
    for x, y in zip(*found):
        assert nrmse(x, y.double()) < 1e-2


# ---- backward="16bit" ----------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["int8_full", "fp8", "nvfp4", "f32", "int8"])
def test_16bit_is_the_gradient_of_torch(recipe):
    for options in ({"is_causal": True}, {"mask": normal(40, 56, seed=4) > 0}):
        found = errors(operands(), recipe=recipe, backward="16bit", **options)
        assert max(found) < 1e-5
    found = errors(family("offset"), recipe=recipe, backward="16bit", dtype=torch.bfloat16)
    assert max(found) < 6e-3


def test_recipes_of_the_callers():
    own = qattn.Recipe("mine", "s8", "none", "none")
    given = operands()
    got = gradients(lambda *x: sdpa(*x, recipe=own), given)
    want = gradients(lambda *x: sdpa(*x, recipe="int8"), given)
    assert all(torch.equal(x, y) for x, y in zip(got[1], want[1], strict=True))


# ---- Inside torch --------------------------------------------------------------------------------

OPCHECKS = {
    "plain": ({}, (None, None, "int8")),
    "causal": ({"kv_heads": 2}, (None, None, "int8", True, True)),
    "mask": ({"kv_heads": 2}, (normal(40, 56) > 0, None, "int8", False, True)),
    "16bit": ({}, (normal(2, 1, 1, 56), None, "fp8", False, False, 0.2, 0.0, -1, "16bit")),
}


@pytest.mark.parametrize("case", OPCHECKS)
def test_opcheck(case):
    shape, options = OPCHECKS[case]
    torch.library.opcheck(OP, (*leaves(operands(**shape)), *options))


@pytest.mark.parametrize("backward", ["forward", "16bit"])
def test_opcheck_of_the_parts(backward):
    given = operands(kv_heads=2, dim_v=16)
    mask = normal(2, 4, 40, 56) > 0
    options = (mask, "int8", backward, False, 0.2)
    torch.library.opcheck(TRAINING, (*leaves(given), *options))
    made = TRAINING(*given, *options) if backward == "forward" else (None, None, None)
    grad = normal(2, 4, 40, 16, seed=9)
    torch.library.opcheck(BACKWARD, (grad, *given, mask, *made, False, 0.2))


def attend(query, key, value, mask=None, causal=False):
    out = sdpa(query * 1.5, key, value, mask, is_causal=causal, enable_gqa=True, recipe="int8")
    return out.transpose(1, 2) * 2


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("options", [{"causal": True}, {"mask": normal(40, 56) > 0}],
                         ids=["causal", "mask"])  # fmt: skip
def test_compile_without_graph_breaks(options, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    given = operands(kv_heads=2)
    want = gradients(lambda *x: attend(*x, **options), given)
    got = gradients(lambda *x: compiled(*x, **options), given)
    assert torch.equal(got[0], want[0])
    assert all(torch.equal(x, y) for x, y in zip(got[1], want[1], strict=True))


@pytest.mark.slow
def test_compile_with_inductor():
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True)
    want, got = (gradients(lambda *x, f=f: f(*x, causal=True), operands(kv_heads=2))
                 for f in (attend, compiled))  # fmt: skip
    for x, y in zip(got[1], want[1], strict=True):
        torch.testing.assert_close(x, y)


def test_a_refusal_stays_one_when_compiled():
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: sdpa(*x, recipe="fp8"), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="requires a gradient, which recipe 'fp8' does not have"):
        compiled(*leaves(operands()))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_autocast(dtype):
    given = operands()
    want = gradients(lambda *x: sdpa(*x, recipe="int8"), [x.to(dtype) for x in given])
    with torch.autocast("cpu", dtype=dtype):  # the backward too, which torch advises against
        out, got = gradients(lambda *x: sdpa(*x, recipe="int8"), given)
    assert out.dtype == dtype and torch.equal(out, want[0])
    for x, y in zip(got, want[1], strict=True):
        assert x.dtype == torch.float32 and torch.equal(x, y.float())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant):
    given = operands(kv_heads=2)
    want = gradients(attend, given)
    got = gradients(lambda *x: checkpoint(attend, *x, use_reentrant=reentrant), given) \
        if not reentrant else _reentrant(given)  # fmt: skip
    assert all(torch.equal(x, y) for x, y in zip(got[1], want[1], strict=True))


def _reentrant(given):
    """That kind of checkpoint knows backward() alone."""
    given = leaves(given)
    out = checkpoint(attend, *given, use_reentrant=True)
    out.backward(normal(*out.shape, seed=9))
    return out, [x.grad for x in given]


def test_a_layer_learns():
    """A few steps of a layer: the loss falls as with torch's attention."""
    def losses(attention):
        torch.manual_seed(0)
        layer = torch.nn.Linear(32, 96)
        optimiser = torch.optim.Adam(layer.parameters(), 1e-2)
        x, target = normal(2, 24, 32), normal(2, 24, 32, seed=1).cumsum(1)
        made = []
        for _ in range(20):
            q, k, v = (y.unflatten(-1, (2, 16)).transpose(1, 2) for y in layer(x).chunk(3, -1))
            out = attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            loss = (out - target).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            made.append(loss.item())
        return made

    ours, theirs = losses(lambda *x, **y: sdpa(*x, **y, recipe="int8")), losses(torch_sdpa)
    assert theirs[-1] < 0.9 * theirs[0]
    assert ours == pytest.approx(theirs, rel=2e-3)


# ---- Refusals ------------------------------------------------------------------------------------


def test_what_has_no_gradient_is_refused_by_name():
    q, k, v = operands(40, 40)
    wants = q.clone().requires_grad_()
    invalid, unsupported = qattn.InvalidArgument, qattn.Unsupported
    cases = [
        (invalid, "query: .* recipe 'auto' does not have", lambda x: sdpa(x, k, v)),
        (invalid, "query: .* recipe 'int8_full'", lambda x: sdpa(x, k, v, recipe="int8_full")),
        (invalid, "key: .* recipe 'bf16'", lambda x: sdpa(q, x, v, recipe="bf16")),
        (unsupported, "sinks: ", lambda x: OP(x, k, v, None, torch.zeros(4), "int8")),
        (unsupported, "softcap: 2.0",
         lambda x: OP(x, k, v, None, None, "int8", False, False, None, 2.0)),
        (unsupported, "window_left: 6",
         lambda x: OP(x, k, v, None, None, "int8", True, False, None, 0.0, 6)),
        (unsupported, "dropout_p: 0.1", lambda x: sdpa(x, k, v, dropout_p=0.1, recipe="int8")),
    ]  # fmt: skip
    for error, words, call in cases:
        with pytest.raises(error, match=words):
            call(wants)
        if "dropout" not in words:
            with torch.no_grad():
                assert not call(wants).requires_grad
            assert not call(q).requires_grad
    bias = torch.zeros(40, 40, requires_grad=True)
    for backward in ("forward", "16bit"):
        with pytest.raises(invalid, match="attn_mask: requires a gradient"):
            sdpa(wants, k, v, bias, recipe="int8", backward=backward)
    with pytest.raises(invalid, match="sinks: requires a gradient"):
        OP(q, k, v, None, torch.zeros(4, requires_grad=True), "int8")
    with pytest.raises(invalid, match="attn_mask: excludes"):
        OP(wants, k, v, bias.detach(), None, "int8", True)
    for backward in ("32bit", 16, None):
        for x in (q, wants):
            with pytest.raises(invalid, match="backward: .* is not one of forward, 16bit"):
                sdpa(x, k, v, recipe="int8", backward=backward)


def test_other_derivatives_are_refused():
    q, k, v = operands(40, 40)
    wants = q.clone().requires_grad_()
    first = torch.autograd.grad(sdpa(wants, k, v, recipe="int8").sum(), wants, create_graph=True)[0]
    with pytest.raises(qattn.Unsupported, match="second derivatives"):
        first.sum().backward()
    with pytest.raises(qattn.Unsupported, match="query: .*torch.func"):
        torch.func.grad(lambda x: sdpa(x, k, v, recipe="int8").sum())(q)
    with pytest.raises(qattn.Unsupported, match="query: has a tangent"):
        torch.func.jvp(lambda x: sdpa(x, k, v, recipe="int8"), (q,), (q,))
    out = sdpa(wants, k, v, recipe="int8")
    rows = q.transpose(1, 2)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, q)
        for name, call in {
            "query": lambda: OP(dual, k, v, None, None, "f32"),
            "q": lambda: qattn.attention(dual, k, v, layout="bhsd"),
            "x": lambda: qattn.quantize(dual, layout="bhsd"),
            "grad_out": lambda: torch.autograd.grad(out, wants, dual),
        }.items():
            with pytest.raises(qattn.Unsupported, match=f"{name}: has a tangent"):
                call()
        assert not qattn.attention(rows, rows, rows).requires_grad
    with pytest.raises(qattn.Unsupported, match="x: has a tangent"):
        torch.func.jvp(lambda x: torch.ops.qattn.quantize(x, smooth=True)[3], (q,), (q,))


def test_another_torch_is_refused(monkeypatch):
    name = "_scaled_dot_product_flash_attention_for_cpu_backward"
    monkeypatch.setitem(_torch_backward._ARGUMENTS, name, "grad_out query key value")
    _torch_backward._aten.cache_clear()
    with pytest.raises(qattn.Unsupported, match=f"{name} of torch .* takes .*value, out"):
        sdpa(*leaves(operands()), recipe="int8")
    monkeypatch.undo()
    sdpa(*leaves(operands()), recipe="int8").sum().backward()
