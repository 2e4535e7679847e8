"""qattn.KvCache from Python: decode loops against numpy in float64, forks, packed sequences, torch
tensors, refusals."""

import json
import os

import numpy as np
import pytest

import qattn


def rows(rng, batch, tokens, heads, dim):
    return rng.standard_normal((batch, tokens, heads, dim)).astype(np.float32)


def reference(q, k, v, scale=None):
    """q (Sq, Hq, D) against k, v (Hkv, S, D) in float64, causal; NaN rows are evicted."""
    queries, heads, dim = q.shape
    length = k.shape[1]
    out = np.zeros((queries, heads, v.shape[2]))
    mass = np.zeros((heads, -(-length // 16)))
    for i in range(queries):
        for h in range(heads):
            kv = h // (heads // k.shape[0])
            s = k[kv].astype(np.float64) @ q[i, h].astype(np.float64)
            s *= dim**-0.5 if scale is None else scale
            s[length - queries + i + 1 :] = -np.inf
            s[np.isnan(k[kv][:, 0])] = -np.inf
            p = np.exp(s - s.max())
            p /= p.sum()
            out[i, h] = p @ np.nan_to_num(v[kv].astype(np.float64))
            np.add.at(mass[h], np.arange(length) // 16, p / queries)
    return out, mass


def nrmse(a, b):
    return np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def test_a_decode_loop(rng):
    """Prefill, then token by token with what decode saw as importance; the budget holds."""
    cache = qattn.KvCache(kv_heads=2, head_dim=64, average_bits=4.0, window=32, budget_from=600)
    s = cache.add_sequence()
    cache.append(0, s, rows(rng, 1, 500, 2, 64), rows(rng, 1, 500, 2, 64))
    for step in range(150):
        cache.append(0, s, rows(rng, 1, 1, 2, 64), rows(rng, 1, 1, 2, 64))
        q = rows(rng, 1, 1, 8, 64)
        out, lse, mass = cache.decode(q, 0, s, return_lse=True, return_mass=True)
        assert out.shape == (1, 1, 8, 64) and out.dtype == np.float32
        assert lse.shape == (1, 8, 1) and mass.shape == (1, 8, -(-(501 + step) // 16))
        cache.observe(0, s, mass)
        usage = cache.usage(s)
        assert usage.bytes <= usage.allowed_bytes
        if step % 50 == 0:
            k, v, tiers = cache.read(s)
            want, want_mass = reference(q[0], k, v)
            assert nrmse(out[0], want) <= 2e-3
            np.testing.assert_allclose(mass[0], want_mass, atol=1e-4)
    assert cache.length(s) == 650
    assert set(np.unique(tiers)) > {0}
    assert usage.window_tokens + sum(usage.tier_tokens) == 2 * 650


def test_debias(rng):
    """Keys in 2 bits beside a window in 16: what the window gets too much without it."""
    k, v = rows(rng, 1, 1000, 1, 128), rows(rng, 1, 1000, 1, 128)
    q = 3 * rows(rng, 1, 8, 16, 128)  # scores of standard deviation 3
    cache = qattn.KvCache(kv_heads=1, head_dim=128, tiers=[2], window=512)
    s = cache.add_sequence()
    cache.append(0, s, k, v)
    exact = qattn.attention(q, k, v, recipe="f32", return_lse=True)[1]
    biased, straight = (
        cache.decode(q, 0, s, causal=False, debias=on, return_lse=True)[1] for on in (False, True)
    )
    biased, straight = ((x - exact).mean() for x in (biased, straight))
    assert biased < -0.1 and abs(straight) < 0.7 * -biased
    with pytest.raises(qattn.InvalidArgument, match="debias: should be off with a softcap"):
        cache.decode(q, 0, s, softcap=5.0, debias=True)
    eight = qattn.KvCache(kv_heads=1, head_dim=128, tiers=[8])
    eight.append(0, s := eight.add_sequence(), k, v)
    for factor in (1, 1e21):  # |q|^2 overflows
        on, off = (eight.decode(q * np.float32(factor), 0, s, debias=x) for x in (True, False))
        np.testing.assert_array_equal(on, off)
        assert np.isfinite(on).all()


BOUNDS = [(8, 0.012), (4, 0.15), (3, 0.28), (2, 0.51), ((4, 2), 0.4)]


@pytest.mark.parametrize("bits, bound", BOUNDS)
def test_error_by_tier(rng, bits, bound):
    cache = qattn.KvCache(kv_heads=2, head_dim=128, tiers=[bits])
    s = cache.add_sequence()
    k, v = rows(rng, 1, 4096, 2, 128), rows(rng, 1, 4096, 2, 128)
    cache.append(0, s, k, v)
    q = rows(rng, 1, 1, 8, 128)
    want, _ = reference(q[0], k[0].transpose(1, 0, 2), v[0].transpose(1, 0, 2))
    assert nrmse(cache.decode(q, 0, s)[0], want) <= bound


@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_k_with_a_scale_a_channel(rng, tmp_path, page_size):
    k, v = rows(rng, 1, 1024, 2, 128), rows(rng, 1, 1024, 2, 128)
    k[..., 5::32] *= 10
    q = rows(rng, 1, 1, 8, 128)
    q[..., 5::32] *= 0.1  # as K's channels vary, or the others would not matter
    errors, scales = [], []
    for name in "per_token", "per_channel":
        options = {"page_size": page_size, "sinks": page_size, "balance_k": False}
        cache = qattn.KvCache(kv_heads=2, head_dim=128, tiers=[3], k_granularity=name, **options)
        s = cache.add_sequence()
        cache.append(0, s, k, v)
        out = cache.decode(q, 0, s)[0]
        held, held_v, tiers = cache.read(s)
        assert nrmse(out, reference(q[0], held, held_v)[0]) <= 2e-3
        loud = (held - k[0].transpose(1, 0, 2))[tiers == 1]
        errors.append(np.sqrt(np.mean(np.delete(loud, np.s_[5::32], axis=1) ** 2)))
        scales.append(cache.bytes().scales)
        cache.save(tmp_path / "cache.safetensors")
        loaded = qattn.KvCache.load(tmp_path / "cache.safetensors")
        np.testing.assert_array_equal(loaded.decode(q, 0, s)[0], out)
    assert errors[1] < 0.6 * errors[0]
    pages = 2 * ((1024 - 128) // page_size - 1)
    assert scales == [pages * 4 * page_size, pages * (2 * page_size + 2 * 128 + 16)]


def test_several_queries_and_a_tree(rng):
    cache = qattn.KvCache(kv_heads=1, head_dim=32)
    s = cache.add_sequence()
    cache.append(0, s, rows(rng, 1, 300, 1, 32), rows(rng, 1, 300, 1, 32))
    q = rows(rng, 1, 4, 3, 32)
    k, v, _ = cache.read(s)
    want, _ = reference(q[0], k, v)
    assert nrmse(cache.decode(q, 0, s)[0], want) <= 2e-3
    bhsd = cache.decode(np.ascontiguousarray(q.transpose(0, 2, 1, 3)), 0, s, layout="bhsd")
    np.testing.assert_array_equal(bhsd.transpose(0, 2, 1, 3), cache.decode(q, 0, s))
    line = np.tril(np.ones((1, 4, 4), bool))
    np.testing.assert_array_equal(cache.decode(q, 0, s, tree_mask=line), cache.decode(q, 0, s))
    line[0, 3, 1] = False
    assert np.any(cache.decode(q, 0, s, tree_mask=line) != cache.decode(q, 0, s))


def test_fork_truncate_evict_release(rng):
    cache = qattn.KvCache(kv_heads=2, head_dim=32, layers=2)
    a = cache.add_sequence()
    for layer in range(2):
        cache.append(layer, a, rows(rng, 1, 400, 2, 32), rows(rng, 1, 400, 2, 32))
    one = cache.bytes()
    b = cache.fork(a)
    assert cache.bytes().codes == one.codes and cache.bytes().tables == 2 * one.tables
    before = cache.read(a, 1)
    cache.append(1, b, rows(rng, 1, 50, 2, 32), rows(rng, 1, 50, 2, 32))
    cache.truncate(b, 420)
    assert (cache.length(b, 0), cache.length(b, 1)) == (400, 420)
    cache.evict(b, 10, 30, layer=1, head=0)
    k, _, tiers = cache.read(b, 1)
    assert (tiers[0, 10:30] == -1).all() and np.isnan(k[0, 10:30]).all()
    assert (tiers[1] >= 0).all() and (tiers[0, 30:] >= 0).all()
    for was, now in zip(before, cache.read(a, 1), strict=True):
        np.testing.assert_array_equal(was, now)
    cache.release(a)
    cache.release(b)
    assert cache.bytes().codes == cache.bytes().window == cache.bytes().tables == 0


def test_packed_append_equals_one_by_one(rng):
    counts = [3, 0, 200, 17]
    k, v = rows(rng, 1, sum(counts), 2, 32)[0], rows(rng, 1, sum(counts), 2, 32)[0]
    cu = np.cumsum([0, *counts])
    together, alone = (qattn.KvCache(kv_heads=2, head_dim=32) for _ in range(2))
    ids = [together.add_sequence() for _ in counts]
    together.append(0, ids, k, v, cu_seqlens=cu.tolist())
    for count, begin, i in zip(counts, cu, ids, strict=False):
        j = alone.add_sequence()
        alone.append(0, j, k[None, begin : begin + count], v[None, begin : begin + count])
        for x, y in zip(together.read(i), alone.read(j), strict=True):
            np.testing.assert_array_equal(x, y)


def test_torch_tensors(rng):
    torch = pytest.importorskip("torch")
    cache = qattn.KvCache(kv_heads=2, head_dim=64, window_dtype=torch.bfloat16)
    s = cache.add_sequence()
    k = torch.randn(1, 2, 300, 64, dtype=torch.bfloat16)
    v = torch.randn(1, 2, 300, 64, dtype=torch.bfloat16)
    cache.append(0, s, k, v, layout="bhsd")
    q = torch.randn(1, 4, 1, 64, dtype=torch.bfloat16)
    out, mass = cache.decode(q, 0, s, layout="bhsd", return_mass=True)
    assert out.dtype == torch.bfloat16 and out.shape == q.shape
    cache.observe(0, [s], mass)
    dk, dv, _ = cache.read(s)
    want, _ = reference(q[0].permute(1, 0, 2).float().numpy(), dk, dv)
    assert nrmse(out[0].permute(1, 0, 2).float().numpy(), want) <= 5e-3
    with pytest.raises(qattn.InvalidArgument, match="stride"):
        cache.append(0, s, k.transpose(2, 3), v)


def test_files_that_safetensors_wrote_again(rng, tmp_path):
    """It sorts tensors by their kind and name; without metadata= it leaves out what they mean."""
    safetensors = pytest.importorskip("safetensors")
    from safetensors.numpy import load_file, save_file

    cache = qattn.KvCache(kv_heads=2, head_dim=32, layers=2, tiers=[(4, 3)])
    s = cache.add_sequence()
    cache.append(1, s, rows(rng, 1, 300, 2, 32), rows(rng, 1, 300, 2, 32))
    path, again = tmp_path / "cache.safetensors", tmp_path / "again.safetensors"
    cache.save(path)
    with safetensors.safe_open(path, "np") as file:
        save_file(load_file(path), again, metadata=file.metadata())
    assert again.read_bytes() != path.read_bytes()
    for x, y in zip(cache.read(s, 1), qattn.KvCache.load(again).read(s, 1), strict=True):
        np.testing.assert_array_equal(x, y)
    good = again.read_bytes()
    again.write_bytes(good.replace(b'"lengths"', b'"length2"'))
    with pytest.raises(qattn.InvalidArgument, match="not its metadata's"):
        qattn.KvCache.load(again)
    first = good.index(b'"data_offsets":[0,')
    again.write_bytes(good[:first] + good[first:].replace(b"[0,", b"[8,", 1))
    with pytest.raises(qattn.InvalidArgument, match="not its metadata's"):
        qattn.KvCache.load(again)
    save_file(load_file(path), again)
    with pytest.raises(qattn.InvalidArgument, match="no metadata qattn_kv_cache.*metadata="):
        qattn.KvCache.load(again)


def test_save_and_load(rng, tmp_path):
    cache = qattn.KvCache(kv_heads=2, head_dim=32, v_head_dim=64, layers=2, tiers=[(4, 3)])
    s = cache.add_sequence()
    cache.append(1, s, rows(rng, 1, 300, 2, 32), rows(rng, 1, 300, 2, 64))
    path = tmp_path / "cache.safetensors"
    cache.save(path)
    loaded = qattn.KvCache.load(path)
    assert (loaded.layers, loaded.kv_heads, loaded.head_dim, loaded.v_head_dim) == (2, 2, 32, 64)
    for x, y in zip(cache.read(s, 1), loaded.read(s, 1), strict=True):
        np.testing.assert_array_equal(x, y)
    q = rows(rng, 1, 1, 4, 32)
    np.testing.assert_array_equal(cache.decode(q, 1, s), loaded.decode(q, 1, s))
    # The header as the format wants it.
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    ends = [header[name]["data_offsets"] for name in header if name != "__metadata__"]
    assert ends[0][0] == 0 and ends[-1][1] == len(data) - 8 - size
    assert all(a[1] == b[0] for a, b in zip(ends, ends[1:], strict=False))
    assert header["lengths"] == {"dtype": "I64", "shape": [1, 2], "data_offsets": ends[1]}
    path.write_bytes(data[:-1])
    with pytest.raises(qattn.InvalidArgument, match="its header asks for"):
        qattn.KvCache.load(path)


def test_importance_of_a_prefill_decides_tiers(rng):
    cache = qattn.KvCache(kv_heads=1, head_dim=64, average_bits=3.5, window=16, sinks=0)
    s = cache.add_sequence()
    weights = np.full((1, 1, 128), 0.01, np.float32)
    weights[0, 0, 20:30] = 1
    cache.append(0, s, rows(rng, 1, 2048, 1, 64), rows(rng, 1, 2048, 1, 64), importance=weights)
    tiers = cache.read(s)[2][0]
    assert (tiers[320:480] == 1).all(), "eight bits where it matters"
    assert tiers[480:2000].max() == 4


@pytest.mark.parametrize("k_granularity", ["per_token", "per_channel"])
@pytest.mark.parametrize("dims", [(1, 3), (33, 21), (80, 97), (300, 257), (576, 512)])
def test_heads_of_any_size(rng, tmp_path, dims, k_granularity):
    d, dv = dims
    cache = qattn.KvCache(
        kv_heads=2, head_dim=d, v_head_dim=dv, tiers=[8], window=32, k_granularity=k_granularity
    )
    s = cache.add_sequence()
    k, v = rows(rng, 1, 200, 2, d), rows(rng, 1, 200, 2, dv)
    cache.append(0, s, k[:, :150], v[:, :150])
    copy = cache.fork(s)
    cache.append(0, s, k[:, 150:], v[:, 150:])
    q = rows(rng, 1, 3, 4, d)
    out, mass = cache.decode(q, 0, s, return_mass=True)
    want = qattn.reference_attention(q, k, v, causal=True)
    assert np.linalg.norm(out - want) < 0.02 * np.linalg.norm(want)
    assert out.shape == (1, 3, 4, dv) and abs(mass.sum(-1) - 1).max() < 1e-3
    cache.evict(copy, 20, 40)
    cache.save(tmp_path / "cache.safetensors")
    loaded = qattn.KvCache.load(tmp_path / "cache.safetensors")
    assert (loaded.head_dim, loaded.v_head_dim) == dims
    for sequence in (s, copy):
        np.testing.assert_array_equal(
            loaded.decode(q, 0, sequence), cache.decode(q, 0, sequence)
        )
        for x, y in zip(loaded.read(sequence), cache.read(sequence)):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"head_dim": 577}, "^head_dim: 577 is not from 1 to 576"),
        ({"v_head_dim": 513}, "^v_head_dim: 513 is not from 1 to 512"),
        ({"head_dim": 0}, "^head_dim: 0 is not from 1 to 576"),
        ({"kv_heads": 0}, "^kv_heads: 0 is not from 1 to 65536"),
        ({"tiers": 4}, "^tiers: 4 is not a list"),
        ({"tiers": "84"}, "^tiers: '84' is not a list"),
        ({"tiers": {8, 4}}, "^tiers: .* is not a list"),
        ({"tiers": [4, 2]}, "tiers: more than one without average_bits"),
        ({"tiers": [(4, 4, 4)]}, "tiers: "),
        ({"tiers": [2**40]}, r"tiers\[0\]"),
        ({"average_bits": 3.0, "budget_from": 100}, "it holds from 2[0-9]+"),
        ({"window": 100}, "window: 100 is not a multiple of page_size 16"),
        ({"window_dtype": "float32"}, "^window_dtype: f32 is neither f16 nor bf16"),
        ({"window_dtype": "int8"}, "window_dtype: int8"),
        ({"importance": "none"}, "importance: 'none'"),
        ({"k_granularity": "per_head"}, "k_granularity: per_head is neither per_token nor"),
        ({"k_granularity": "channel"}, "k_granularity: 'channel' is neither per_token nor"),
        ({"k_granularity": None}, "k_granularity: None is not a name"),
        ({"importance": "\udc80"}, "^importance: .* is not a name"),
        ({"smooth_k": 1}, "smooth_k: 1 is neither True nor False"),
        ({"balance_k": 1}, "balance_k: 1 is neither True nor False"),
        ({"smooth_v": 1}, "smooth_v: 1 is neither True nor False"),
    ],
)
def test_refused_options(arguments, words):
    with pytest.raises(qattn.InvalidArgument, match=words):
        qattn.KvCache(**{"kv_heads": 2, "head_dim": 128, **arguments})


def test_refused_calls(rng):
    cache = qattn.KvCache(kv_heads=2, head_dim=32)
    s = cache.add_sequence()
    good = rows(rng, 1, 4, 2, 32)
    with pytest.raises(qattn.InvalidArgument, match="k: shape"):
        cache.append(0, s, good[..., :16], good)
    with pytest.raises(qattn.InvalidArgument, match="sequence: 9"):
        cache.append(0, 9, good, good)
    with pytest.raises(qattn.InvalidArgument, match="q: 1 queries, but sequence 0 has 0 tokens"):
        cache.decode(rows(rng, 1, 1, 2, 32), 0, s)
    cache.append(0, s, good, good)
    with pytest.raises(qattn.InvalidArgument, match="q: 3 heads"):
        cache.decode(rows(rng, 1, 1, 3, 32), 0, s)
    with pytest.raises(qattn.InvalidArgument, match="mass: "):
        cache.observe(0, s, np.zeros((1, 2, 9), np.float32))
    with pytest.raises(qattn.InvalidArgument, match="layer: 1"):
        cache.length(s, 1)
    assert cache.length(s) == 4


def test_arguments_in_another_order_are_told_without_their_elements(rng):
    cache = qattn.KvCache(kv_heads=2, head_dim=32)
    s, q = cache.add_sequence(), rows(rng, 1, 1, 4, 32)
    shape = r"of shape \(1, 1, 4, 32\)"
    for words, call in [
        (rf"^sequences: a numpy.ndarray {shape} is no number", lambda: cache.decode(0, s, q)),
        (rf"^layer: a numpy.ndarray {shape} is not an integer", lambda: cache.append(q, s, q, q)),
        (rf"^sequence: a numpy.ndarray {shape} is not an integer", lambda: cache.fork(q)),
        ("^sequences: a numpy.ndarray of shape", lambda: cache.append(0, [q[0]], q, q)),
    ]:
        with pytest.raises(qattn.InvalidArgument, match=words) as caught:
            call()
        assert len(str(caught.value)) < 120


def test_the_other_layout_is_named(rng):
    cache = qattn.KvCache(kv_heads=2, head_dim=32)
    s = cache.add_sequence()
    k, q = rows(rng, 1, 5, 2, 32), rows(rng, 1, 1, 4, 32)
    bhsd = r"layout bshd, .* these fit bhsd, \(batch, heads, tokens, head_dim\)"
    bshd = r"layout bhsd, .* these fit bshd, \(batch, tokens, heads, head_dim\)"
    with pytest.raises(qattn.InvalidArgument, match=rf"k: shape \(1, 2, 5, 32\).*{bhsd}"):
        cache.append(0, s, k.swapaxes(1, 2), k.swapaxes(1, 2))
    with pytest.raises(qattn.InvalidArgument, match=f"k: shape.*{bshd}"):
        cache.append(0, s, k, k, layout="bhsd")
    cache.append(0, s, k, k)
    with pytest.raises(qattn.InvalidArgument, match=f"q: 1 heads should be .*{bhsd}"):
        cache.decode(q.swapaxes(1, 2), 0, s)
    with pytest.raises(qattn.InvalidArgument, match=f"q: 1 heads should be .*{bshd}"):
        cache.decode(q, 0, s, layout="bhsd")
    many = np.repeat(q, 4, axis=2)
    with pytest.raises(qattn.InvalidArgument, match=f"q: 16 queries .*{bhsd}"):
        cache.decode(many.swapaxes(1, 2), 0, s)


def test_refusals_name_pythons_arguments(rng, tmp_path):
    """No TypeError of the extension, no name that only C++ has."""
    cache = qattn.KvCache(kv_heads=2, head_dim=32)
    s = cache.add_sequence()
    good = rows(rng, 1, 4, 2, 32)
    q = rows(rng, 1, 1, 4, 32)
    cache.append(0, s, good, good)
    one = np.ones((1, 3, 1), np.float32)
    for words, call in [
        ("q: 3 heads should be a multiple of kv_heads 2", lambda: cache.decode(q[:, :, :3], 0, s)),
        ("scale: nan is not finite", lambda: cache.decode(q, 0, s, scale=np.nan)),
        ("q: int32 is not one of float32", lambda: cache.decode(q.astype(np.int32), 0, s)),
        ("return_lse: 1 is neither True nor", lambda: cache.decode(q, 0, s, return_lse=1)),
        ("debias: 1 is neither True nor", lambda: cache.decode(q, 0, s, debias=1)),
        (
                "return_mass: a numpy.ndarray of shape",
                lambda: cache.decode(q, 0, s, return_mass=np.zeros(2)),
            ),
        ("layout: '.udc80' is not a name", lambda: cache.decode(q, 0, s, layout="\udc80")),
        ("mass: 3 query heads are no multiple of kv_heads 2", lambda: cache.observe(0, s, one)),
        ("sequences: b'0' is not a list", lambda: cache.observe(0, b"0", one)),
        ("sequences: .0. is not a list", lambda: cache.observe(0, {0}, one)),
        ("sequences: None is not an integer", lambda: cache.observe(0, None, one)),
        ("layer: -1 is below 0; None stands for all", lambda: cache.evict(s, 0, 2, layer=-1)),
        ("head: -1 is below 0; None stands for all", lambda: cache.evict(s, 0, 2, head=-1)),
        ("path: 3 is not a path", lambda: cache.save(3)),
        ("path: None is not a path", lambda: qattn.KvCache.load(None)),
        ("path: '.udc80' is not a path in UTF-8", lambda: cache.save("\udc80")),
        ("path: .* has a NUL in it", lambda: cache.save(f"{tmp_path}/a\0b")),
    ]:
        with pytest.raises(qattn.InvalidArgument, match="^" + words):
            call()
    assert not list(tmp_path.iterdir())
    cache.save(os.fsencode(tmp_path / "slots d: heads_kv"))
    with pytest.raises(qattn.InvalidArgument, match="slot d: heads_kv cannot be read"):
        qattn.KvCache.load(tmp_path / "slot d: heads_kv")
    again = qattn.KvCache.load(os.fsencode(tmp_path / "slots d: heads_kv"))
    out = again.decode(q, 0, np.array(s))  # an array without dimensions is a number
    np.testing.assert_array_equal(out, cache.decode(q, 0, [s]))


@pytest.mark.parametrize("value", [1e30, 3e38, np.inf, np.nan, -1e30])
@pytest.mark.parametrize("granularity", ["per_token", "per_channel"])
@pytest.mark.parametrize("late", [False, True])
def test_an_evicted_key_leaves_nothing_behind(rng, value, granularity, late):
    def error(value):
        cache = qattn.KvCache(
            kv_heads=1, head_dim=64, tiers=[8], window=16, sinks=16, window_dtype="bfloat16",
            k_granularity=granularity,
        )
        s = cache.add_sequence()
        bad = k.copy()
        bad[0, 40, 0, 5] = value
        cache.append(0, s, bad[:, : 200 if late else 41], v[:, : 200 if late else 41])
        cache.evict(s, 40, 41)
        rest = slice(200 if late else 41, None)
        cache.append(0, s, bad[:, rest], v[:, rest])
        want, _ = reference(q[0], alive[0].transpose(1, 0, 2), v[0].transpose(1, 0, 2))
        return nrmse(cache.decode(q, 0, s)[0], want)

    k, v = rows(rng, 1, 264, 1, 64), rows(rng, 1, 264, 1, 64)
    q, alive = rows(rng, 1, 1, 2, 64), k.copy()
    alive[:, 40] = np.nan
    assert error(value) <= 1.1 * error(k[0, 40, 0, 5])


def test_truncation_keeps_the_budget(rng):
    cache = qattn.KvCache(kv_heads=1, head_dim=64, average_bits=4.0, window=32)
    cache = qattn.KvCache(
        kv_heads=1, head_dim=64, average_bits=4.0, window=32, budget_from=cache.shortest_length
    )
    s = cache.add_sequence()
    length = 3 * cache.shortest_length
    cache.append(0, s, rows(rng, 1, length, 1, 64), rows(rng, 1, length, 1, 64))
    for shorter in range(length - 1, 0, -61):
        cache.truncate(s, shorter)
        usage = cache.usage(s)
        assert usage.bytes <= usage.allowed_bytes
        cache.append(0, s, rows(rng, 1, 2, 1, 64), rows(rng, 1, 2, 1, 64))
        usage = cache.usage(s)
        assert usage.bytes <= usage.allowed_bytes


def loud_keys(first, size, length=1024):
    """Keys as Qwen2.5 has them: rotary embeddings turn a bias, in pairs where queries are small."""
    rng, half = np.random.default_rng(12), 64

    def turned(x):
        angle = np.arange(x.shape[1])[:, None] * 1e6 ** (-np.arange(half) / half)
        c, s = np.cos(angle)[None, :, None], np.sin(angle)[None, :, None]
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * c - b * s, a * s + b * c], -1)

    bias = np.zeros(128)
    bias[first : first + 4], bias[first + half : first + half + 4] = size, -0.7 * size
    q, k, v = rng.standard_normal((3, 1, length, 2, 128))
    q[..., bias != 0] *= 0.02
    return [x.astype(np.float32) for x in (turned(2 * q)[:, -8:], turned(k + bias), v)]


@pytest.mark.parametrize("first", [30, 0])
def test_loud_channels_cost_little_by_themselves(first):
    q, k, v = loud_keys(first, 200)
    exact = qattn.attention(q, k, v, recipe="f32", causal=True)

    def error(**options):
        cache = qattn.KvCache(kv_heads=2, head_dim=128, tiers=[4], window=64, **options)
        s = cache.add_sequence()
        cache.append(0, s, k, v)
        out = cache.decode(q, 0, s)
        return np.linalg.norm(out - exact) / np.linalg.norm(exact), cache.usage(s)

    balanced, usage = error()
    assert balanced < 0.27 and usage.balanced_channels == 2 * 8
    plain, usage = error(balance_k=False)
    assert plain > 1 and usage.balanced_channels == 0


def test_v_far_from_zero_costs_no_bits(rng, tmp_path):
    q, k, v = rows(rng, 1, 1, 4, 64), rows(rng, 1, 600, 2, 64), rows(rng, 1, 600, 2, 64)
    v += 32
    exact = qattn.attention(q, k, v, recipe="f32")

    def error(**options):
        cache = qattn.KvCache(kv_heads=2, head_dim=64, **options)
        s = cache.add_sequence()
        cache.append(0, s, k, v)
        out = cache.decode(q, 0, s)
        cache.save(tmp_path / "cache.safetensors")
        loaded = qattn.KvCache.load(tmp_path / "cache.safetensors")
        np.testing.assert_array_equal(loaded.decode(q, 0, s), out)
        assert loaded.usage(s) == cache.usage(s)
        return np.sqrt(np.mean((out - exact) ** 2)), cache.usage(s).shifted_heads

    moved, heads = error()
    assert heads == 2 and moved < 0.06
    kept, heads = error(smooth_v=False)
    assert heads == 0 and kept > 0.5


@pytest.mark.parametrize("layout, shape", [("bshd", (1, 1, 71, 64)), ("bhsd", (1, 71, 1, 64))])
def test_any_number_of_query_heads_on_one(rng, layout, shape):
    """Falcon has 71."""
    k, v = rows(rng, 1, 50, 1, 64), rows(rng, 1, 50, 1, 64)
    q = rows(rng, 1, 71, 1, 64)
    cache = qattn.KvCache(kv_heads=1, head_dim=64, bits=8)
    s = cache.add_sequence()
    cache.append(0, s, k, v)
    got = cache.decode(q.reshape(shape), 0, s, layout=layout)
    want = qattn.reference_attention(q, k.swapaxes(1, 2), v.swapaxes(1, 2), layout="bhsd")
    assert got.shape == shape
    difference = got.reshape(want.shape) - want
    assert np.linalg.norm(difference) < 3e-2 * np.linalg.norm(want)


def test_bits_are_one_tier(rng):
    k, v = rows(rng, 1, 300, 2, 64), rows(rng, 1, 300, 2, 64)
    usages = []
    for options in ({"bits": 3}, {"tiers": [3]}, {"bits": (8, 4)}, {"tiers": [(8, 4)]}):
        cache = qattn.KvCache(kv_heads=2, head_dim=64, **options)
        s = cache.add_sequence()
        cache.append(0, s, k, v)
        usages.append(cache.usage(s, 0))
    assert usages[0] == usages[1] != usages[2] == usages[3]
    for more in ({"tiers": [8]}, {"average_bits": 4.0}):
        with pytest.raises(qattn.InvalidArgument, match="bits: 3 is for all pages"):
            qattn.KvCache(kv_heads=2, head_dim=64, bits=3, **more)
