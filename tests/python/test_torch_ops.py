"""torch.ops.qattn.attention: torch.compile, torch.export, autocast and its own checks."""

import dataclasses

import pytest
import torch
from cases import nrmse
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa
from torch.utils._python_dispatch import TorchDispatchMode

import qattn
from qattn.torch import sdpa

OP = torch.ops.qattn.attention.default
L, S, B = (torch.export.Dim(name) for name in "LSB")


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(length=20, keys=33, heads=4, kv_heads=4, batch=2, dtype=torch.float32):
    return (
        normal(batch, heads, length, 32, dtype=dtype),
        normal(batch, kv_heads, keys, 32, dtype=dtype, seed=1),
        normal(batch, kv_heads, keys, 16, dtype=dtype, seed=2),
    )


OPCHECKS = {
    "plain": (operands(), ()),
    "mask": (operands(), (normal(20, 33) > 0,)),
    "causal": (operands(), (None, None, "f32", True)),
    "grouped": (operands(kv_heads=2), (None, None, "f32", True, True)),
    "half": (operands(dtype=torch.bfloat16), (normal(2, 1, 1, 33), None, "int8_full")),
    "everything": (operands(), (normal(1, 33), normal(4), "f32", False, False, 0.3, 5.0, 7)),
    "broadcast": ((normal(20, 32), normal(2, 3, 9, 32), normal(9, 16)), ()),
    "empty": (operands(length=0), ()),
}


@pytest.mark.parametrize("case", OPCHECKS)
def test_opcheck(case):
    given, options = OPCHECKS[case]
    torch.library.opcheck(OP, (*given, *options))


def attend(query, key, value, mask=None, causal=False, gqa=False, scale=None):
    return sdpa(query * 1.5, key, value, mask, is_causal=causal, enable_gqa=gqa, scale=scale,
                recipe="f32") + 1  # fmt: skip


COMPILED = {
    "plain": (operands(), {}),
    "causal": (operands(33), {"causal": True}),
    "mask": (operands(), {"mask": normal(20, 33) > 0, "scale": 0.2}),
    "bias": (operands(), {"mask": normal(2, 1, 20, 33)}),
    "grouped": (operands(kv_heads=2), {"gqa": True, "causal": True}),
    "half": (operands(dtype=torch.bfloat16), {}),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("case", COMPILED)
def test_compile_without_graph_breaks(case, dynamic):
    given, options = COMPILED[case]
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(*given, **options), attend(*given, **options))


@pytest.mark.slow
def test_compile_with_inductor():
    torch._dynamo.reset()
    given = operands(kv_heads=2)
    compiled = torch.compile(attend, fullgraph=True)
    torch.testing.assert_close(compiled(*given, gqa=True), attend(*given, gqa=True))


def test_dynamic_shapes_compile_once():
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=backend)
    for length, keys, batch in ((20, 33, 2), (33, 20, 3), (50, 51, 4)):
        given = operands(length, keys, batch=batch)
        torch.testing.assert_close(compiled(*given, causal=True), attend(*given, causal=True))
    assert len(graphs) == 1


def test_compile_takes_a_recipe_of_the_callers():
    torch._dynamo.reset()
    own = dataclasses.replace(qattn.recipe("fp8"), qk="e5m2")
    compiled = torch.compile(
        lambda *given: sdpa(*given, recipe=own), fullgraph=True, backend="aot_eager"
    )
    given = operands()
    assert torch.equal(compiled(*given), sdpa(*given, recipe=own))
    assert not torch.equal(sdpa(*given, recipe="fp8"), sdpa(*given, recipe=own))


class Attend(torch.nn.Module):
    def forward(self, query, key, value):
        return sdpa(query, key, value, is_causal=True, enable_gqa=True, recipe="int8_full")


def test_export_with_independent_dynamic_shapes():
    shapes = ({0: B, 2: L}, {0: B, 2: S}, {0: B, 2: S})
    program = torch.export.export(Attend(), operands(kv_heads=2), dynamic_shapes=shapes)
    assert [n.target for n in program.graph.nodes if n.op == "call_function"] == [OP]
    for length, keys, batch in ((20, 33, 2), (33, 20, 3), (50, 51, 4)):
        given = operands(length, keys, kv_heads=2, batch=batch)
        assert torch.equal(program.module()(*given), Attend()(*given))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_casts_as_torch_does(dtype, compiled):
    torch._dynamo.reset()
    function = torch.compile(sdpa, fullgraph=True, backend="aot_eager") if compiled else sdpa
    query, key, value = operands()
    mask = normal(20, 33)
    cast = [x.to(dtype) for x in (query, key, value, mask)]
    with torch.autocast("cpu", dtype=dtype):
        out = function(query, key.to(dtype), value, mask, recipe="f32")
        assert out.dtype == torch_sdpa(query, key, value, mask).dtype == dtype
        inner = OP(query, key, value, mask, None, "f32")
    assert torch.equal(out, sdpa(*cast, recipe="f32")) and torch.equal(inner, out)
    with torch.autocast("cpu", dtype=dtype, enabled=False):
        assert sdpa(query, key, value, recipe="f32").dtype == torch.float32
    with torch.autocast("cpu", dtype=dtype), pytest.raises(qattn.InvalidArgument, match="float64"):
        sdpa(query.double(), key, value)


def test_gradients_are_refused_in_the_operator():
    given = operands()
    given[1].requires_grad_()
    with pytest.raises(qattn.InvalidArgument, match="requires a gradient"):
        OP(*given).sum().backward()  # torch 2.4 comes as far as backward()
    with torch.no_grad():
        assert not OP(*given).requires_grad
        assert torch.equal(OP(*given), OP(*(x.detach() for x in given)))


def test_output_is_new_memory_and_inputs_are_kept():
    x = normal(2, 4, 20, 32)
    copy = x.clone()
    out = OP(x, x, x, None, None, "f32")
    assert out.is_contiguous() and out._is_view() is False
    assert out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    assert torch.equal(x, copy)
    x.copy_(OP(x, x, x, None, None, "f32"))
    assert torch.equal(x, out)


def test_lazy_negatives_are_resolved():
    query, key, value = operands()
    lazy = torch._neg_view(query)
    assert lazy.is_neg()
    assert torch.equal(sdpa(lazy, key, value), sdpa(-query, key, value))


def expected(query, key, value, *, visible=None, softcap=None, sinks=None):
    """The definition in float64, for what torch's attention lacks."""
    query, key, value = (x.double() for x in (query, key, value))
    scores = query @ key.mT / query.shape[-1] ** 0.5
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores if visible is None else scores.masked_fill(~visible, -torch.inf)
    weights = scores.exp()
    denominator = weights.sum(-1, keepdim=True)
    if sinks is not None:
        denominator = denominator + sinks.double().exp()[:, None, None]
    return weights / denominator @ value


def test_sinks_softcap_and_window():
    query, key, value = operands(33)
    sinks = normal(4, seed=3)
    out = OP(query, key, value, None, sinks, "f32", False, False, None, 2.0)
    assert nrmse(out, expected(query, key, value, softcap=2.0, sinks=sinks)) < 3e-6
    offset = torch.arange(33)[:, None] - torch.arange(33)
    out = OP(query, key, value, None, None, "f32", True, False, None, 0.0, 6)
    assert nrmse(out, expected(query, key, value, visible=(offset >= 0) & (offset <= 6))) < 3e-6
    last = OP(query[:, :, :1], key, value, None, None, "f32", False, False, None, 0.0, 6)
    visible = torch.arange(33) >= 26
    assert nrmse(last, expected(query[:, :, :1], key, value, visible=visible)) < 3e-6


def test_refusals_of_the_operator():
    query, key, value = operands()
    with pytest.raises(qattn.InvalidArgument, match="attn_mask: excludes"):
        OP(query, key, value, normal(20, 33), None, "f32", True)
    with pytest.raises(qattn.InvalidArgument, match="window_left"):
        OP(query, key, value, None, None, "f32", True, False, None, 0.0, 6)
    with pytest.raises(qattn.InvalidArgument, match="sinks: shape"):
        OP(query, key, value, None, normal(3), "f32")
    with pytest.raises(qattn.InvalidArgument, match="int7"):
        OP(query, key, value, None, None, "int7")
    with pytest.raises(qattn.InvalidArgument, match="recipe: 7"):
        sdpa(query, key, value, recipe=7)


class _Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


def test_whoever_watches_operators_sees_one():
    """Without anybody who looks the operator is left out; results are the same."""
    q = torch.randn(1, 2, 16, 64, generator=torch.Generator().manual_seed(1))
    want = [qattn.torch.sdpa(q, q, q, recipe="int8") for _ in range(3)]
    with _Seen() as seen:
        watched = qattn.torch.sdpa(q, q, q, recipe="int8")
    assert "qattn::attention" in seen.names
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        profiled = qattn.torch.sdpa(q, q, q, recipe="int8")
    assert "qattn::attention" in [event.key for event in profile.key_averages()]
    traced = torch.jit.trace(lambda x: qattn.torch.sdpa(x, x, x, recipe="int8"), q)
    for other in (*want[1:], watched, profiled, traced(q)):
        assert torch.equal(want[0], other)
    assert not torch.equal(traced(2 * q), want[0])


def test_traces_refuse_what_is_no_operator():
    """They would record the memory of the result, and nothing that fills it."""
    q = torch.randn(1, 16, 2, 64)
    for call in (
        lambda x: qattn.attention(x, x, x),
        lambda x: qattn.attention(x, x, x, recipe="f32", window=(3, 3)),
    ):
        call(q)  # seen before, as a short call is
        with pytest.raises(qattn.Unsupported, match=r"q: is traced.*qattn\.torch\.sdpa"):
            torch.jit.trace(call, q)
        with pytest.raises(qattn.Unsupported, match="q: is traced"):
            torch.fx.experimental.proxy_tensor.make_fx(call)(q)


def test_a_call_after_others_is_checked_as_the_first_was():
    q = torch.zeros(1, 2, 16, 64)
    for _ in range(2):
        qattn.torch.sdpa(q, q, q, recipe="int8")
    with pytest.raises(qattn.InvalidArgument, match="requires a gradient"):
        qattn.torch.sdpa(q.clone().requires_grad_(), q, q, recipe="f32")
    with pytest.raises(qattn.InvalidArgument, match="key: dtype"):
        qattn.torch.sdpa(q, q.half(), q, recipe="int8")
    with pytest.raises(qattn.InvalidArgument, match="value: shape"):
        qattn.torch.sdpa(q, q, torch.zeros(1, 3, 16, 64), recipe="int8")
    strided = torch.zeros(1, 2, 64, 16).transpose(2, 3)
    assert torch.equal(qattn.torch.sdpa(strided, q, q, recipe="int8"), q)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert qattn.torch.sdpa(q, q, q, recipe="int8").dtype == torch.bfloat16
