"""torch.ops.qattn.quantize and qattn.torch.quantize(): qattn.quantize() as one operator."""

import pytest
import torch

import qattn
import qattn.torch

OP = torch.ops.qattn.quantize.default
FORMATS = ["s8", "e4m3", "e4m3fnuz", "e5m2", "mxfp8", "mxfp4", "nvfp4"]
S = torch.export.Dim("S")


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tensors(coded):
    """What a Quantized holds, in the operator's order; an absent one is empty."""
    given = (coded.codes, coded.scale, coded.global_scale, coded.mean)
    return [torch.empty(0) if x is None else x for x in given]


def same(mine, other):
    assert mine.shape == other.shape and mine.dtype == other.dtype
    assert torch.equal(mine, other)


# The fake's shapes are a second statement of those of the library: every granularity and format.
CASES = [
    *((role, {"format": f}) for f in FORMATS for role in "qkv"),
    *((r, {"granularity": g}) for g in ("per_tensor", "per_head", "per_token") for r in "qkv"),
    *((role, {"granularity": "per_block", "block": 32}) for role in "qk"),
    *((role, {"granularity": "per_thread"}) for role in "qkv"),
    ("q", {"granularity": "per_warp"}),
    ("q", {"granularity": "per_thread", "block": 64, "warp": 32}),
    ("v", {"granularity": "per_channel"}),
    ("v", {"granularity": "per_block_channel", "block": 24}),
    ("v", {"granularity": "per_block_channel", "format": "e4m3"}),
    *((role, {"smooth": True, "layout": "bhsd"}) for role in "qkv"),
    ("q", {"smooth": True, "block": 16}),
    ("k", {"smooth": True, "rotate": True, "format": "nvfp4"}),
]


@pytest.mark.parametrize("role, options", CASES, ids=str)
def test_operator_is_quantize(role, options):
    x = normal(2, 5, 150, 32) if "layout" in options else normal(2, 150, 5, 32)
    expected = qattn.quantize(x, role=role, **options)
    for mine, other in zip(OP(x, role=role, **options), tensors(expected), strict=True):
        same(mine, other)
    coded = qattn.torch.quantize(x, role=role, **options)
    for mine, other in zip(tensors(coded), tensors(expected), strict=True):
        same(mine, other)
    for name in ("format", "role", "granularity", "block", "warp", "layout", "rotate"):
        assert getattr(coded, name) == getattr(expected, name)
    torch.library.opcheck(OP, (x,), {"role": role, **options})


@pytest.mark.parametrize("x", [
    normal(2, 40, 3, 16, dtype=torch.bfloat16), normal(2, 40, 3, 16, dtype=torch.float16),
    normal(0, 40, 3, 16), normal(2, 0, 3, 16), normal(2, 40, 16, 3).mT,
], ids=["bf16", "f16", "no batch", "no tokens", "columns"])  # fmt: skip
def test_opcheck_of_inputs(x):
    torch.library.opcheck(OP, (x,))
    for mine, other in zip(OP(x), tensors(qattn.quantize(x.contiguous())), strict=True):
        same(mine, other)


def cache(k, v):
    """K and V of a prompt as codes, as a model would keep them."""
    return (
        qattn.torch.quantize(k * 0.5, role="k", smooth=True),
        qattn.torch.quantize(v, role="v", granularity="per_token"),
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_graph_breaks(dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(cache, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in (33, 70):
        k, v = normal(2, length, 4, 32), normal(2, length, 4, 32, seed=1)
        mine, expected = compiled(k, v), cache(k, v)
        for a, b in zip(mine, expected, strict=True):
            for x, y in zip(tensors(a), tensors(b), strict=True):
                same(x, y)
        out = [qattn.attention(k, *coded, recipe="int8_full") for coded in (mine, expected)]
        assert torch.equal(*out)


def test_dynamic_shapes_compile_once():
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    def codes(x):
        return OP(x, role="q", granularity="per_block", block=32, smooth=True)

    compiled = torch.compile(codes, fullgraph=True, dynamic=True, backend=backend)
    for batch, length in ((2, 33), (3, 70), (4, 256)):
        x = normal(batch, length, 4, 32)
        for mine, other in zip(compiled(x), codes(x), strict=True):
            same(mine, other)
    assert len(graphs) == 1


class Codes(torch.nn.Module):
    def forward(self, x):
        return OP(x, role="k", format="nvfp4")


def test_export_with_a_dynamic_length():
    program = torch.export.export(Codes(), (normal(2, 33, 4, 32),), dynamic_shapes=({1: S},))
    for length in (33, 50):
        x = normal(2, length, 4, 32)
        for mine, other in zip(program.module()(x), Codes()(x), strict=True):
            same(mine, other)


def test_refusals():
    x = normal(2, 33, 4, 32)
    with pytest.raises(qattn.InvalidArgument, match="x: requires a gradient"):
        OP(x.clone().requires_grad_())[1].sum().backward()  # torch 2.4 comes as far as backward()
    with pytest.raises(qattn.InvalidArgument, match="x: requires a gradient"):
        qattn.torch.quantize(x.clone().requires_grad_())
    for options, words in (
        ({"format": "int7"}, "int7"), ({"role": "w"}, "role"), ({"granularity": "per_warp"}, "Q"),
        ({"block": 12, "granularity": "per_block"}, "block"), ({"format": 8}, "format: 8"),
        ({"granularity": ("per_block", 64), "block": 32}, "contradicts"), ({"smooth": 1}, "smooth"),
        ({"layout": "bsd"}, "layout"), ({"rotate": True, "role": "v"}, "rotate"),
    ):  # fmt: skip
        with pytest.raises(qattn.InvalidArgument, match=words):
            qattn.torch.quantize(x, **options)
    for other in (x[0], x.double(), normal(2, 33, 4, 600)):
        with pytest.raises(qattn.InvalidArgument, match="x"):
            qattn.torch.quantize(other)
    with pytest.raises(qattn.InvalidArgument, match="not a torch tensor"):
        qattn.torch.quantize(x.numpy())
