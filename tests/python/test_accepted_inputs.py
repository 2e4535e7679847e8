"""What users have and a strict reading would refuse: index tensors of 64 bits, numpy's bool, a
window beside causal, odd head dimensions of a KV cache."""

import stat

import numpy as np
import pytest
import torch
from cases import normal

import qattn
import qattn.torch
from qattn._interop import narrowed

R = np.random.default_rng(5)
Q, K, V = (R.standard_normal((2, n, 2, 32)).astype(np.float32) for n in (6, 9, 9))


def attend(q=Q, k=K, v=V, **options):
    out, lse = qattn.attention(q, k, v, return_lse=True, **{"recipe": "f32", **options})
    return out, lse


def same(a, b):
    for x, y in zip(a, b):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("make", [np.array, torch.tensor, list])
def test_index_tensors_of_64_bits(make):
    def call(convert):
        packed = attend(
            Q[0], K[0], V[0], cu_seqlens_q=convert([0, 2, 6]), cu_seqlens_k=convert([0, 5, 9]),
            seqused_q=convert([2, 3]), seqused_k=convert([4, 4]),
        )  # fmt: skip
        pages = attend(
            Q, K.reshape(6, 3, 2, 32), V.reshape(6, 3, 2, 32),
            seqused_k=convert([8, 4]), page_table=convert([[5, 1, 0], [3, 2, 0]]),
        )  # fmt: skip
        return (*packed, *pages)

    narrow = call(lambda x: np.array(x, np.int32))
    same(call(make), narrow)


def test_index_tensors_of_64_bits_everywhere_else():
    cu = np.array([0, 2, 6])
    same(
        [qattn.quantize(Q[0], role="q", cu_seqlens=x).codes for x in (cu, [0, 2, 6])],
        [qattn.quantize(Q[0], role="q", cu_seqlens=cu.astype(np.int32)).codes] * 2,
    )
    with pytest.raises(qattn.InvalidArgument, match="cu_seqlens: .*4294967302"):
        qattn.quantize(Q[0], role="q", cu_seqlens=cu + np.array([0, 0, 2**32]))
    cache = qattn.KvCache(kv_heads=2, head_dim=32)
    ids = [cache.add_sequence(), cache.add_sequence()]
    cache.append(0, np.array(ids), K[0, :6], V[0, :6], cu_seqlens=cu)
    assert [cache.length(i) for i in ids] == [2, 4]


def test_what_a_gpu_is_given_of_64_bits():
    """Numbers beyond 32 bits become ones that kernels find to be no index."""
    made = narrowed(torch.tensor([0, 7, 2**31 - 1, 2**31, 2**32 + 5, -1, -(2**40)]))
    assert made.dtype == torch.int32
    assert made.tolist() == [0, 7, 2**31 - 1, 2**31 - 1, 2**31 - 1, -1, -1]


def test_numpys_bool_is_a_bool():
    yes, no = np.True_, np.bool_(False)
    same(attend(causal=yes, smooth_k=no, recipe="int8"),
         attend(causal=True, smooth_k=False, recipe="int8"))
    assert isinstance(qattn.attention(Q, K, V, return_lse=yes), tuple)
    assert qattn.quantize(K, smooth=yes).mean is not None
    cache = qattn.KvCache(kv_heads=2, head_dim=32, rotate=no, smooth_k=yes)
    s = cache.add_sequence()
    cache.append(0, s, K[:1], V[:1])
    cache.decode(Q[:1, :2], 0, s, causal=no)
    q, k, v = (torch.from_numpy(x).transpose(1, 2) for x in (Q, K, V))
    want = qattn.torch.sdpa(q, k, v, is_causal=True)
    assert torch.equal(qattn.torch.sdpa(q, k, v, is_causal=yes, enable_gqa=no), want)
    for name in ("scale", "threads"):  # nor is it a number
        with pytest.raises(qattn.InvalidArgument, match=f"{name}: np.True_"):
            qattn.attention(Q, K, V, **{name: yes})


@pytest.mark.parametrize("window", [(2, 0), (2, -1), (2, 2), (2, 5), (2, 90), (-1, 5)])
def test_a_window_beside_causal_that_agrees_with_it(window):
    want = attend(causal=True, window=(window[0], 0))
    same(attend(causal=True, window=window), want)
    exact = qattn.reference_attention(Q, K, V, causal=True, window=window)
    assert np.abs(want[0] - exact).max() < 1e-5
    one = attend(Q[:, :1], causal=True, window=(3, 1))  # one query: nothing is behind it
    same(one, attend(Q[:, :1], causal=False, window=(3, 1)))


@pytest.mark.parametrize("window", [(2, 1), (2, 4), (-1, 3)])
def test_a_window_beside_causal_that_contradicts_it(window):
    with pytest.raises(qattn.InvalidArgument, match=f"window_right: {window[1]} contradicts"):
        attend(causal=True, window=window)


@pytest.mark.parametrize("framework", [np.asarray, torch.from_numpy])
def test_kv_cache_of_any_multiple_of_8(framework):
    """SmolLM, Phi and others have heads of 80, 96, 72, 40 channels."""
    for d, dv in ((80, 80), (72, 40), (8, 24), (248, 200)):
        k, v = (framework(normal(1, 300, 2, n)) for n in (d, dv))
        q = framework(normal(1, 2, 4, d))
        cache = qattn.KvCache(kv_heads=2, head_dim=d, v_head_dim=dv, tiers=[8], window=32)
        assert (cache.head_dim, cache.v_head_dim) == (d, dv)
        s = cache.add_sequence()
        cache.append(0, s, k, v)
        out = np.asarray(cache.decode(q, 0, s))
        # attention()'s causality is decode()'s
        want = qattn.reference_attention(*(np.asarray(x) for x in (q, k, v)), causal=True)
        assert np.linalg.norm(out - want) < 0.02 * np.linalg.norm(want)
        own = cache.read(s)
        assert own[0].shape == (2, 300, d) and own[1].shape == (2, 300, dv)


def test_a_saved_cache_keeps_the_mode_of_the_file_it_replaces(tmp_path):
    cache = qattn.KvCache(kv_heads=1, head_dim=40)
    path = tmp_path / "cache.safetensors"
    for mode in (0o600, 0o664):
        path.write_bytes(b"old")
        path.chmod(mode)
        cache.save(path)
        assert stat.S_IMODE(path.stat().st_mode) == mode
    assert qattn.KvCache.load(path).head_dim == 40
