"""GpuKvCache on torch's CUDA tensors: against KvCache on the host, streams, graphs, refusals."""

import math

import numpy as np
import pytest
import torch
from gpu import DEVICE, ints, normal, nrmse

import qattn

MIXED = {"kv_heads": 2, "average_bits": 5.0, "window": 32, "budget_from": 400}


def both(dim=128, sequences=2, tokens=700, **options):
    """A cache on the GPU and one on the host with the same sequences."""
    options = MIXED | {"head_dim": dim} | options
    gpu = qattn.GpuKvCache(sequences=sequences, tokens=tokens, **options)
    host = qattn.KvCache(**options)
    ids = [gpu.add_sequence() for _ in range(sequences)]
    assert ids == [host.add_sequence() for _ in range(sequences)]
    return gpu, host, ids


def same(gpu, host, ids):
    for s in ids:
        for a, b in zip(gpu.read(s), host.read(s), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.fixture
def no_synchronisation():
    mode_before = torch.cuda.get_sync_debug_mode()
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode(mode_before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim, heads", [(64, 2), (128, 8), (256, 32)])
def test_equals_the_hosts_cache(dim, heads, dtype):
    """append, decode and observe in a loop: contents bit for bit, attention within 2e-3."""
    gpu, host, ids = both(dim, window_dtype="bfloat16" if dtype == torch.bfloat16 else "float16")
    for step, count in enumerate((500, 1, 1, 9, 40, 1, 8)):
        k, v = (normal(2, count, 2, dim, dtype=dtype, seed=3 * step + i) for i in range(2))
        gpu.append(0, ids, k, v)
        host.append(0, ids, k.cpu(), v.cpu())
        same(gpu, host, ids)
        q = normal(2, min(count, 8), heads, dim, dtype=dtype, seed=step + 90)
        out, lse, mass = gpu.decode(q, 0, ids, return_lse=True, return_mass=True)
        want, want_lse, want_mass = host.decode(
            q.cpu(), 0, ids, return_lse=True, return_mass=True
        )
        bound = {torch.float32: 2e-3, torch.float16: 2.1e-3, torch.bfloat16: 4e-3}[dtype]
        assert out.dtype == dtype and nrmse(out.cpu(), want) < bound  # 16-bit outputs round again
        assert float((lse.cpu() - want_lse).abs().max()) < 4e-3
        assert nrmse(mass[..., : want_mass.shape[2]].cpu(), want_mass) < 2e-3
        assert (mass[..., want_mass.shape[2] :] == 0).all()
        gpu.observe(0, ids, mass)
        host.observe(0, ids, mass[..., : want_mass.shape[2]].cpu().contiguous())
    same(gpu, host, ids)


def test_files_and_importance(tmp_path):
    """Through files into the other kind of cache, where both go on the same way."""
    gpu, host, ids = both()
    path = tmp_path / "kv.safetensors"
    for step in range(3):
        k, v = normal(2, 200, 2, 128, seed=step), normal(2, 200, 2, 128, seed=step + 9)
        gpu.append(0, ids, k, v)
        host.append(0, ids, k.cpu(), v.cpu())
        blocks = (host.length(0) + 15) // 16
        told = normal(2, blocks + 3, dtype=torch.float32, seed=step + 20).abs()
        gpu.set_importance(1, 0, told)
        host.set_importance(1, 0, told[:, :blocks].cpu().contiguous())
        assert [gpu.usage(s) for s in ids] == [host.usage(s) for s in ids]
        gpu.save(path)
        saved = path.read_bytes()
        host.save(path)
        assert path.read_bytes() == saved
        q = normal(2, 1, 8, 128, seed=step + 30)
        out = gpu.decode(q, 0, ids)
        gpu, host = qattn.GpuKvCache.load(path, sequences=2, tokens=700), qattn.KvCache.load(path)
        same(gpu, host, ids)
        assert torch.equal(gpu.decode(q, 0, ids), out)


def test_features():
    gpu, host, ids = both()
    k, v = normal(2, 600, 2, 128), normal(2, 600, 2, 128, seed=1)
    gpu.append(0, ids, k, v)
    host.append(0, ids, k.cpu(), v.cpu())
    for cache in (gpu, host):
        cache.evict(ids[0], 100, 130, head=1)
        cache.truncate(ids[1], 571)
    same(gpu, host, ids)
    q = normal(2, 5, 8, 128, seed=2)
    sinks = normal(8, dtype=torch.float32, seed=4)
    tree = torch.ones(2, 5, 5, dtype=torch.bool, device=DEVICE).tril()
    tree[0, 4, 2] = False
    for options in ({"window_left": 300}, {"softcap": 3.0}, {"scale": 0.2}, {"causal": False},
                    {"sinks": sinks}, {"tree_mask": tree}):  # fmt: skip
        on_host = {n: x.cpu() if torch.is_tensor(x) else x for n, x in options.items()}
        want = host.decode(q.cpu(), 0, ids, **on_host)
        assert nrmse(gpu.decode(q, 0, ids, **options).cpu(), want) < 2.1e-3, options
    bhsd = gpu.decode(q.transpose(1, 2), 0, ints(*ids), layout="bhsd")
    assert torch.equal(bhsd.transpose(1, 2), gpu.decode(q, 0, ids))


def test_fork_and_bytes():
    gpu, host, ids = both(sequences=1)
    k, v = normal(1, 500, 2, 128), normal(1, 500, 2, 128, seed=1)
    full = gpu.bytes()
    with pytest.raises(qattn.OutOfMemory, match="sequences: all 1 sequences are in use"):
        gpu.fork(ids[0])
    gpu = qattn.GpuKvCache(sequences=2, tokens=700, head_dim=128, **MIXED)
    assert gpu.bytes().total > full.total  # there is room for what both may append
    gpu.add_sequence()
    gpu.append(0, 0, k, v)
    host.append(0, 0, k.cpu(), v.cpu())
    assert gpu.fork(0) == host.fork(0) == 1 and gpu.free == 0
    more = normal(1, 90, 2, 128, seed=5)
    gpu.append(0, 1, more, more)
    host.append(0, 1, more.cpu(), more.cpu())
    same(gpu, host, [0, 1])
    held = gpu.bytes()
    assert held.total == (
        held.codes + held.scales + held.window + held.tables + held.means + held.spare
    )


def test_streams_and_no_synchronisation(no_synchronisation):
    """Late inputs on a side stream are waited for because the work is on it too."""
    gpu, _, ids = both()
    k, v, q = normal(2, 300, 2, 128), normal(2, 300, 2, 128, seed=1), normal(2, 1, 8, 128, seed=2)
    gpu.append(0, ids, k, v)
    want = gpu.decode(q, 0, ids)
    for s in ids:
        gpu.truncate(s, 0)
    late = [torch.full_like(x, math.nan) for x in (k, v, q)]
    torch.cuda.synchronize()
    no_synchronisation()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        for to, x in zip(late, (k, v, q), strict=True):
            to.copy_(x)
        gpu.append(0, ids, late[0], late[1])
        out, mass = gpu.decode(late[2], 0, ids, return_mass=True)
        gpu.observe(0, ids, mass)
        assert not side.query()  # nothing has waited
    torch.cuda.set_sync_debug_mode("default")
    side.synchronize()
    assert torch.equal(out, want)


def test_a_captured_step_replays_on_the_cache_as_it_is():
    caches = [both()[0] for _ in range(2)]
    k, v = normal(2, 450, 2, 128), normal(2, 450, 2, 128, seed=1)
    for cache in caches:
        cache.append(0, [0, 1], k, v)
    rows = [normal(2, 1, heads, 128) for heads in (2, 2, 8)]
    out = torch.empty(2, 1, 8, 128, dtype=torch.float16, device=DEVICE)

    def step(cache):
        cache.append(0, [0, 1], rows[0], rows[1])
        _, mass = cache.decode(rows[2], 0, [0, 1], out=out, return_mass=True)
        cache.observe(0, [0, 1], mass)

    caches[0].decode(rows[2], 0, [0, 1])  # makes the tensor of [0, 1]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):  # fails at any allocation or synchronisation outside torch
        step(caches[0])
    for n in range(200):
        for i, x in enumerate(rows):
            x.copy_(normal(*x.shape, seed=1000 + 3 * n + i))
        graph.replay()
        replayed = out.clone()
        step(caches[1])
        assert torch.equal(replayed, out), n
    assert caches[0].length(1) == 650
    same(caches[0], caches[1], [0, 1])


def test_refusals():
    gpu, _, ids = both()
    k, q = normal(2, 20, 2, 128), normal(2, 1, 8, 128)
    gpu.append(0, ids, k, k)
    with pytest.raises(qattn.Unsupported, match="k: lies on cpu, and the KV cache lies on cuda:0"):
        gpu.append(0, ids, k.cpu(), k)
    with pytest.raises(qattn.Unsupported, match="sequences: lies on cpu"):
        gpu.decode(q, 0, torch.zeros(2, dtype=torch.int32))
    with pytest.raises(qattn.InvalidArgument, match="q: 9 queries of a sequence"):
        gpu.decode(normal(2, 9, 8, 128), 0, ids)
    with pytest.raises(qattn.InvalidArgument, match="q: 33 heads should be a multiple of kv_heads"):
        gpu.decode(normal(2, 1, 33, 128), 0, ids)
    with pytest.raises(qattn.Unsupported, match="no GPU kernel for K of head dimension 96"):
        odd, _, _ = both(dim=96)
        odd.append(0, ids, normal(2, 20, 2, 96), normal(2, 20, 2, 96))
        odd.decode(normal(2, 1, 8, 96), 0, ids)
    with pytest.raises(qattn.OutOfMemory):
        qattn.GpuKvCache(sequences=1000, tokens=1 << 20, kv_heads=8, head_dim=128)
    out = gpu.decode(q, 0, ints(0, 5))
    assert out[1].isnan().all() and out[0].isfinite().all()
    with pytest.raises(qattn.InvalidArgument):
        qattn.device_errors()
