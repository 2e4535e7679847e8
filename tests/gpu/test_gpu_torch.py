"""The GPU backend inside torch: streams, graphs, compile, autocast, memory, devices, refusals."""

import math

import pytest
import torch
from gpu import CAPABILITY, DEVICE, KINDS, RECIPES, attention, dtype_of, ints, normal, nrmse, qkv

import qattn
from qattn.torch import sdpa

every_kind = pytest.mark.parametrize("recipe", KINDS)


@pytest.fixture
def no_synchronisation():
    """torch raises at every synchronisation of its own; those of qattn break a capture (below)."""
    mode_before = torch.cuda.get_sync_debug_mode()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode(mode_before)


@every_kind
def test_current_stream(recipe):
    """Inputs that appear late, on a side stream, are waited for because the work is on it too."""
    q, k, v = qkv(dtype=dtype_of(recipe))
    want = attention(q, k, v, recipe, causal=True)
    late = [torch.full_like(x, math.nan) for x in (q, k, v)]
    out = torch.full_like(q, math.nan)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        for to, x in zip(late, (q, k, v), strict=True):
            to.copy_(x)
        _, lse = attention(*late, recipe, causal=True, out=out)
        kept = out.clone(), lse.clone()
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(kept[0], want[0]) and torch.equal(kept[1], want[1])


def captured(call):
    """call() as a graph. Capturing fails at any allocation or synchronisation outside torch."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


@every_kind
def test_graph_capture_and_replay(recipe):
    q, k, v = qkv(dtype=dtype_of(recipe))
    used = ints(333, 333)
    out = torch.empty_like(q)

    def call():
        return qattn.attention(q, k, v, recipe=recipe, causal=True, seqused_k=used, out=out)

    graph = captured(call)
    for seed in (10, 20):
        for x, fresh in zip((q, k, v), qkv(dtype=dtype_of(recipe), seed=seed), strict=True):
            x.copy_(fresh)
        used.copy_(ints(300 - seed, 333))
        out.fill_(math.nan)
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, call())


@pytest.mark.skipif(CAPABILITY != (9, 0), reason="Hopper's kernels have a second one beside them")
@pytest.mark.parametrize("causal", [False, True])
def test_graph_of_codes_made_beside_attention(causal):
    """Each replay counts works and codes anew."""
    shape = {"batch": 4, "queries": 1024, "keys": 1024, "heads": 16, "kv_heads": 16}
    q, k, v = qkv(**shape)
    out = torch.empty_like(q)
    options = {"recipe": "int8_full", "causal": causal}

    def call():
        return qattn.attention(q, k, v, out=out, **options)

    assert "\ncodes: beside attention\n" in qattn.explain(q, k, v, **options)
    graph = captured(call)
    for seed in range(10, 50, 10):
        for x, fresh in zip((q, k, v), qkv(**shape, seed=seed), strict=True):
            x.copy_(fresh)
        out.fill_(math.nan)
        for _ in range(3):
            graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, call())
        parts = [qattn.attention(q[b:b + 1], k[b:b + 1], v[b:b + 1], **options) for b in range(4)]
        assert "beside attention" not in qattn.explain(q[:1], k[:1], v[:1], **options)
        assert nrmse(replayed, torch.cat(parts)) < 1e-3


@every_kind
def test_no_synchronisation(recipe, no_synchronisation):
    q, k, v = qkv(dtype=dtype_of(recipe))
    attention(q, k, v, recipe, causal=True)
    sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), enable_gqa=True, recipe=recipe)


def test_workspace_is_torchs():
    q, k, v = qkv(batch=4, queries=2048, keys=2048)
    out = torch.empty_like(q)
    qattn.attention(q, k, v, recipe="int8_full", out=out)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    qattn.attention(q, k, v, recipe="int8_full", out=out)
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before
    assert taken > 0, "int8_full quantises into a workspace"
    # Codes of Q, K and V are half of their bytes, scales and the caller's LSE small; a copy in 16
    # bits of any of the three, which nobody asked for, would be a third of them more.
    inputs = sum(x.numel() * x.element_size() for x in (q, k, v))
    assert taken < 0.7 * inputs, f"{taken} bytes for {inputs} of Q, K and V: a hidden copy?"
    assert torch.cuda.memory_allocated() == before


@every_kind
def test_out(recipe):
    q, k, v = qkv(dtype=dtype_of(recipe))
    want = qattn.attention(q, k, v, recipe=recipe)
    memory = torch.full((2, 200, 4, 150), 7.0, dtype=q.dtype, device=DEVICE)
    out = memory[..., 16:144]
    assert qattn.attention(q, k, v, recipe=recipe, out=out) is out
    assert torch.equal(out, want)
    assert (memory[..., :16] == 7).all() and (memory[..., 144:] == 7).all()


def far(x, axis, memory, at):
    """x's values in `memory` from element `at` on, with `axis` reaching beyond 2^32 elements."""
    shape, strides, inner = list(x.shape), [0] * x.dim(), 1
    for i in reversed(range(x.dim())):
        if i != axis:
            strides[i], inner = inner, inner * shape[i]
    strides[axis] = (2**32 // (shape[axis] - 1) + 15) // 8 * 8
    assert inner < 2**20 <= strides[axis]
    view = memory.view(x.dtype).as_strided(shape, strides, memory.storage_offset() + at)
    view.copy_(x)
    return view


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < 20 << 30, reason="takes 18 GB"
)
@pytest.mark.parametrize("axis", ["batch", "token", "head"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_offsets_beyond_32_bits(recipe, axis):
    near = qkv(keys=200, dtype=dtype_of(recipe))
    want = qattn.attention(*near, recipe=recipe, causal=True)
    # The output may not lie within the extent of an input, even between its elements.
    inputs, outputs = torch.zeros((2, 2**32 + 2**25), dtype=torch.float16, device=DEVICE)
    number = ("batch", "token", "head").index(axis)
    q, k, v = (far(x, number, inputs, 2**20 * i) for i, x in enumerate(near))
    out = far(torch.full_like(want, math.nan), number, outputs, 0)
    assert qattn.attention(q, k, v, recipe=recipe, causal=True, out=out) is out
    assert torch.equal(out, want)


# ---- sdpa ----------------------------------------------------------------------------------------


def heads_first(**shape):
    return [x.transpose(1, 2).contiguous() for x in qkv(**shape)]


@pytest.mark.parametrize("is_causal", [False, True])
def test_sdpa_means_what_torch_means(is_causal):
    q, k, v = heads_first(queries=100, keys=150, kv_heads=4, dtype=torch.bfloat16)
    want = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=is_causal
    )
    assert nrmse(sdpa(q, k, v, is_causal=is_causal, recipe="bf16"), want) < 1e-2


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    @torch.compile(fullgraph=True, dynamic=dynamic)
    def model(q, k, v):
        return sdpa(q * 1.0, k, v, is_causal=True, recipe="int8_full").transpose(1, 2) + 1

    for length in (128, 200):
        q, k, v = heads_first(queries=length, keys=length, kv_heads=4)
        want = sdpa(q, k, v, is_causal=True, recipe="int8_full").transpose(1, 2) + 1
        assert torch.equal(model(q, k, v), want)


def test_compile_reduce_overhead():
    """Inductor's own CUDA graphs around the operator."""
    @torch.compile(fullgraph=True, mode="reduce-overhead")
    def model(q, k, v):
        return sdpa(q, k, v, recipe="int8_full") * 2

    q, k, v = heads_first(kv_heads=4)
    want = sdpa(q, k, v, recipe="int8_full") * 2
    for _ in range(4):
        assert torch.equal(model(q, k, v).clone(), want)


def test_opcheck():
    q, k, v = heads_first(kv_heads=4)
    torch.library.opcheck(torch.ops.qattn.attention.default, (q, k, v, None, None, "int8_full"))


def test_autocast():
    q, k, v = heads_first(kv_heads=4, dtype=torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = sdpa(q, k, v, recipe="bf16")
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, sdpa(q.bfloat16(), k.bfloat16(), v.bfloat16(), recipe="bf16"))


def test_gradients_are_refused():
    q, k, v = heads_first(kv_heads=4)
    q.requires_grad_()
    with pytest.raises(qattn.InvalidArgument, match="query: requires a gradient"):
        sdpa(q, k, v)


# ---- Devices, other libraries --------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_another_than_the_current_device():
    q, k, v = (x.to("cuda:1") for x in qkv())
    want = attention(*(x.to("cuda:0") for x in (q, k, v)), "int8_full")[0]
    assert torch.cuda.current_device() == 0
    out, _ = attention(q, k, v, "int8_full")
    assert torch.cuda.current_device() == 0 and out.device == q.device
    assert torch.equal(out.cpu(), want.cpu())
    with pytest.raises(qattn.InvalidArgument, match=r"k: lies on another device .*cuda:0"):
        qattn.attention(q, k.to("cuda:0"), v)


def test_cuda_array_interface():
    cupy = pytest.importorskip("cupy")
    q, k, v = qkv()
    want = qattn.attention(q, k, v, recipe="int8_full")
    out = cupy.empty(tuple(q.shape), cupy.float16)
    torch.cuda.synchronize()
    operands = (cupy.asarray(x) for x in (q, k, v))
    assert qattn.attention(*operands, recipe="int8_full", out=out) is out
    cupy.cuda.runtime.deviceSynchronize()
    assert torch.equal(torch.from_numpy(out.get()), want.cpu())


# ---- Refusals, bad contents ----------------------------------------------------------------------


def test_refusals():
    q, k, v = qkv()
    invalid, unsupported = qattn.InvalidArgument, qattn.Unsupported
    cases = [
        (invalid, "k: lies on another device than q", lambda: qattn.attention(q, k.cpu(), v)),
        (invalid, "q: lies|k: lies", lambda: qattn.attention(q.cpu(), k, v.cpu())),
        (invalid, "out: lies on another", lambda: qattn.attention(q, k, v, out=q.cpu())),
        (invalid, "threads: 2 is for CPUs", lambda: qattn.attention(q, k, v, threads=2)),
        (invalid, "seqused_k: is a list", lambda: qattn.attention(q, k, v, seqused_k=[3, 3])),
        (invalid, "seqused_k: lies on another",
         lambda: qattn.attention(q, k, v, seqused_k=ints(3, 3).cpu())),
        (invalid, r"v: stride 2 .*contiguous\(\)",
         lambda: qattn.attention(q, k, normal(2, 333, 2, 256)[..., ::2])),
        (invalid, r"query: stride .*contiguous\(\)",
         lambda: sdpa(*[q.permute(0, 2, 3, 1)] * 3)),
        (invalid, "q: dtype float64", lambda: qattn.attention(q.double(), k, v)),
        (invalid, "overlaps", lambda: qattn.attention(q, k, v, out=q)),
        (invalid, "k: head_dim", lambda: qattn.attention(q, k[..., :64], v)),
        (unsupported, "v: is f32|but v is f32",
             lambda: qattn.attention(*(x.float() for x in (q, k, v)), recipe="int8")),
        (unsupported, "reference_attention", lambda: qattn.reference_attention(q, k, v)),
    ]  # fmt: skip
    for error, words, call in cases:
        with pytest.raises(error, match=words):
            call()


def test_bad_lengths_are_named_or_reported():
    q, k, v = (normal(100, heads, 128, seed=i) for i, heads in enumerate((4, 2, 2)))
    cu, bad = ints(0, 40, 100), ints(0, 140, 100)
    with pytest.raises(qattn.InvalidArgument, match="cu_seqlens_k: entry 2 is 100"):
        qattn.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=bad, validate=True)
    out = qattn.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=bad)
    assert torch.isnan(out).all(), "both sequences have a bad neighbour"
    with pytest.raises(qattn.InvalidArgument, match="cu_seqlens or seqused"):
        qattn.device_errors("cuda")
    qattn.device_errors("cuda")  # reading clears
    good = qattn.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, validate=True)
    assert not torch.isnan(good).any()


def test_a_bad_page_spoils_its_sequence_only():
    q = normal(2, 5, 4, 128)
    pages = normal(6, 64, 2, 128, seed=1), normal(6, 64, 2, 128, seed=2)
    table, used = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, device=DEVICE), ints(128, 100)
    want = qattn.attention(q, *pages, page_table=table, seqused_k=used)
    table[1, 1] = 6
    with pytest.raises(qattn.InvalidArgument, match=r"page_table: entry \(1, 1\) is 6"):
        qattn.attention(q, *pages, page_table=table, seqused_k=used, validate=True)
    out = qattn.attention(q, *pages, page_table=table, seqused_k=used)
    assert torch.equal(out[0], want[0]) and torch.isnan(out[1]).all()
    with pytest.raises(qattn.InvalidArgument, match="page_table held"):
        qattn.device_errors(DEVICE)
