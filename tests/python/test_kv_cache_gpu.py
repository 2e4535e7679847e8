"""GpuKvCache from Python without a GPU: tests/kvcache_gpu/emulated_cuda.cpp stands in for
libqattn_cuda, torch's CPU tensors for CUDA ones. What needs a real GPU is in tests/gpu."""

import os
import subprocess
import sys

import pytest

qattn = pytest.importorskip("qattn")
pytestmark = pytest.mark.slow

PREPARED = """
import numpy as np, torch, qattn
from qattn import _interop
from qattn.cache import _gpu as _kv_cache_gpu, _host as _kv_cache

torch.manual_seed(1)
for module in (_interop, _kv_cache):
    module.device_of = lambda x: (2, 0) if _interop.is_torch(x) and on_gpu else (1, 0)
on_gpu = True
workspaces = []
def workspace_of(x):
    def allocate(size):
        raw = torch.empty(size + 256, dtype=torch.uint8)
        workspaces.append(raw[-raw.data_ptr() % 256:][:size])
        return workspaces[-1]
    return allocate
_kv_cache_gpu.workspace_of = workspace_of

class Cache(qattn.GpuKvCache):
    def __init__(self, **options):
        super().__init__(**{"device": "cuda:0"} | options)
    def _tensor(self, ids):
        return torch.tensor(ids, dtype=torch.int32)

def on_host(call):
    global on_gpu
    on_gpu = False
    try:
        return call()
    finally:
        on_gpu = True

def refused(words, call, error=qattn.InvalidArgument):
    try:
        call()
    except error as caught:
        assert words in str(caught), caught
    else:
        raise AssertionError("not refused: " + words)

def rows(batch, tokens, heads=2, dim=64):
    return torch.randn(batch, tokens, heads, dim)

def nrmse(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())

options = dict(kv_heads=2, head_dim=64, window=32, tiers=[4])
cache = Cache(**options, sequences=3, tokens=400, layers=2)
host = qattn.KvCache(**options, layers=2)
"""


@pytest.fixture
def emulated():
    library = os.environ.get("QATTN_EMULATED_CUDA")
    if not library:
        pytest.fail("QATTN_EMULATED_CUDA should name libqattn_emulated_cuda.so")

    def run(code):
        env = dict(os.environ, QATTN_CUDA_LIBRARY=library)
        process = subprocess.run([sys.executable, "-c", PREPARED + code], env=env, text=True,
                                 capture_output=True, check=False)  # fmt: skip
        assert process.returncode == 0, process.stderr

    return run


def test_does_what_the_hosts_cache_does(emulated):
    emulated("""
ids = [cache.add_sequence(), cache.add_sequence()]
assert ids == [host.add_sequence(), host.add_sequence()] == [0, 1] and cache.free == 1
for count in (150, 1, 40):
    k, v, told = rows(2, count), rows(2, count), torch.rand(2, 2, 25)
    cache.append(1, ids, k, v, importance=told)
    own = told[:, :, : -(-(host.length(0, 1) + count) // 16)].contiguous()
    on_host(lambda: host.append(1, ids, k, v, importance=own))
def same():
    for s in ids:
        assert cache.usage(s, 1) == host.usage(s, 1)
        for a, b in zip(cache.read(s, 1), host.read(s, 1)):
            np.testing.assert_array_equal(a, b)
same()
q = rows(2, 3, 8)
asked = dict(return_lse=True, return_mass=True, softcap=5.0, window_left=150,
             sinks=torch.ones(8), tree_mask=torch.ones(2, 3, 3, dtype=torch.bool).tril())
out, lse, mass = cache.decode(q, 1, ids, **asked)
want, want_lse, want_mass = on_host(lambda: host.decode(q, 1, ids, **asked))
assert nrmse(out, want) < 2e-3 and mass.shape == (2, 8, 25) and len(workspaces) == 1
torch.testing.assert_close(lse, want_lse, atol=4e-3, rtol=0)
torch.testing.assert_close(mass[..., :12], want_mass, atol=1e-3, rtol=0)
assert (mass[..., 12:] == 0).all()
straight = cache.decode(q, 1, ids, debias=True)
assert nrmse(straight, on_host(lambda: host.decode(q, 1, ids, debias=True))) < 2e-3
bhsd = cache.decode(q.transpose(1, 2), 1, torch.tensor(ids, dtype=torch.int32), layout="bhsd")
torch.testing.assert_close(bhsd.transpose(1, 2), cache.decode(q, 1, ids), rtol=0, atol=0)
cache.observe(1, ids, mass)
on_host(lambda: host.observe(1, ids, mass[..., :12].contiguous()))
for c in (cache, host):
    assert c.fork(1) == 2
    c.truncate(1, 99)
    c.evict(0, 20, 40, layer=1, head=1)
ids.append(2)
same()
assert cache.free == 0 and cache.length(1, 1) == 99 and cache.length(2, 1) == 191
refused("sequences: all 3 sequences are in use", cache.add_sequence, qattn.OutOfMemory)
cache.append(0, 2, rows(1, 5), rows(1, 5), counts=torch.tensor([3], dtype=torch.int32))
assert cache.length(2) == 3
cache.release(1)
assert cache.free == 1
held = cache.bytes()
assert held.total == (held.codes + held.scales + held.window + held.tables + held.means
                      + held.spare)
memory = torch.zeros(1 << 20, dtype=torch.uint8)
memory = memory[-memory.data_ptr() % 256:]
again = torch.empty(1, 1, 8, 64, dtype=torch.float16)
assert cache.decode(rows(1, 1, 8).half(), 1, 2, out=again, workspace=memory) is again
assert again.isfinite().all() and len(workspaces) == 4
qattn.device_errors("cuda:0")
""")


def test_tensors_on_different_streams_are_refused(emulated):
    emulated("""
for module in (_interop, _kv_cache, _kv_cache_gpu):
    module.device_of = lambda x: (2, 0)

class Named:
    def __init__(self, tensor, stream):
        self.array, self.stream = tensor.numpy(), stream
        self.dtype, self.shape = self.array.dtype, self.array.shape
    @property
    def __cuda_array_interface__(self):
        return self.array.__array_interface__ | {"stream": self.stream}

s, rule = cache.add_sequence(), "names stream 9, but the call is on stream 7"
k = Named(rows(1, 5), 7)
refused("v: " + rule, lambda: cache.append(0, s, k, Named(rows(1, 5), 9)))
assert cache.length(s) == 0
cache.append(0, s, k, Named(rows(1, 5), None))
q, out = Named(rows(1, 1, 4), 7), rows(1, 1, 4)
memory = torch.zeros(1 << 20, dtype=torch.uint8)
memory = memory[-memory.data_ptr() % 256:]
refused("sinks: " + rule, lambda: cache.decode(q, 0, s, out=out, workspace=memory,
                                               sinks=Named(torch.zeros(4), 9)))
cache.decode(q, 0, s, out=out, workspace=memory)
ids = Named(torch.tensor([s], dtype=torch.int32), 7)
refused("sequences: names stream 7, but the call is on stream 9",
        lambda: cache.observe(0, ids, Named(torch.zeros(1, 4, 1), 9)))
""")


def test_importance_that_is_told(emulated):
    """It decides which pages are demoted, as on the host."""
    emulated("""
mixed = dict(kv_heads=2, head_dim=64, window=32, average_bits=5.0, budget_from=400)
cache, host = Cache(**mixed, sequences=1, tokens=700), qattn.KvCache(**mixed)
s = cache.add_sequence()
assert host.add_sequence() == s
def append(count):
    k, v = rows(1, count), rows(1, count)
    cache.append(0, s, k, v)
    on_host(lambda: host.append(0, s, k, v))
append(400)
told = torch.tensor([[1e-3] * 20 + [9.0] * 24, [9.0] * 20 + [1e-3] * 24])
cache.set_importance(s, 0, told)
on_host(lambda: host.set_importance(s, 0, told[:, :25].contiguous()))
append(200)
tiers = cache.read(s)[2]
np.testing.assert_array_equal(tiers, host.read(s)[2])
assert tiers[0, 32:300].mean() > tiers[1, 32:300].mean() + 0.5, tiers
assert cache.usage(s) == host.usage(s)
for wrong in (-told, told[:, :37].contiguous(), told * float("nan")):
    cache.set_importance(s, 0, wrong)
    refused("KV cache", lambda: qattn.device_errors("cuda:0"))
cache.status(s)
refused("importance: shape (1, 44) should be (2, -1)",
        lambda: cache.set_importance(s, 0, told[:1]))
refused("importance: format f16 is not f32",
        lambda: cache.set_importance(s, 0, told.half()))
refused("sequence: 1 holds no", lambda: cache.set_importance(1, 0, told))
refused("importance: lies on cpu, and the KV cache lies on cuda:0",
        lambda: cache.set_importance(s, 0, told.numpy()), qattn.Unsupported)
""")


def test_files(emulated, tmp_path):
    """One file for caches on GPUs and on the host."""
    emulated(f"""
path = {str(tmp_path / "slot window_format d: kv")!r}
""" + """
ids = [cache.add_sequence() for _ in range(2)]
assert [host.add_sequence() for _ in range(2)] == ids
def append(count, *which):
    k, v = rows(len(which), count), rows(len(which), count)
    cache.append(1, list(which), k, v)
    on_host(lambda: host.append(1, list(which), k, v))
append(200, 0, 1)
for c in (cache, host):
    assert c.fork(0) == 2
    c.release(1)
append(9, 0)
cache.save(path)
host.save(path + "2")
assert open(path, "rb").read() == open(path + "2", "rb").read()
host = qattn.KvCache.load(path)
cache = Cache.load(path + "2", sequences=4, tokens=300, device="cuda:0")
assert (cache.layers, cache.kv_heads, cache.head_dim, cache.v_head_dim) == (2, 2, 64, 64)
assert (cache.free, cache.sequences, cache.tokens) == (2, 4, 300) and type(cache) is Cache
append(60, 2, 0)
for s in (0, 2):
    assert cache.usage(s, 1) == host.usage(s, 1)
    for a, b in zip(cache.read(s, 1), host.read(s, 1)):
        np.testing.assert_array_equal(a, b)
refused("sequence: 1 is not one of this cache", lambda: append(1, 1))
assert cache.add_sequence() == 1 and host.add_sequence() == 3

def loads(words, error=qattn.InvalidArgument, path=path, **capacity):
    def load():
        Cache.load(path, **(dict(sequences=3, tokens=300, device="cuda:0") | capacity))
    try:
        load()
    except error as caught:
        assert str(caught).startswith(words), caught
    else:
        raise AssertionError("not refused: " + words)
loads("sequences: 2 should be above 2, the number of a sequence of the file", sequences=2)
loads("tokens: 208 are fewer than the 209 of sequence 0 of the file", tokens=208)
loads("pages: there are 1 numbers", pages=[3])
loads("pages[0]: 2 are fewer than the ", pages=[2, 99])
loads("pages: 5 is not a list", pages=5)
loads("path: 5 is not a path", path=5)
loads("path: " + path + "3 cannot be read", path=path + "3")
loads("invalid device ordinal", qattn.Unsupported, device="cuda:1")
refused("path: /nowhere/d: slot.part cannot be written", lambda: cache.save("/nowhere/d: slot"))
cache.append(0, 1, rows(1, 299), rows(1, 299))
cache.append(0, 1, rows(1, 2), rows(1, 2))
refused("KV cache", lambda: qattn.device_errors("cuda:0"))
refused("sequence 1: more tokens than its capacity", lambda: cache.save(path))
cache.release(1)
cache.save(path)
""")


def test_k_with_a_scale_a_channel(emulated):
    emulated("""
channels = dict(options, k_granularity="per_channel", page_size=32, sinks=32)
cache, host = Cache(**channels, sequences=1, tokens=400), qattn.KvCache(**channels)
s = cache.add_sequence()
assert s == host.add_sequence()
for count in (150, 1, 40):
    k, v = rows(1, count), rows(1, count)
    k[..., 5] *= 20
    cache.append(0, s, k, v)
    on_host(lambda: host.append(0, s, k, v))
for a, b in zip(cache.read(s), host.read(s)):
    np.testing.assert_array_equal(a, b)
q = rows(1, 3, 8)
assert nrmse(cache.decode(q, 0, s), on_host(lambda: host.decode(q, 0, s))) < 2e-3
assert cache.usage(s) == host.usage(s)
""")


def test_refusals(emulated):
    emulated("""
s = cache.add_sequence()
k = rows(1, 20)
cache.append(0, s, k, k)
q = rows(1, 1, 8)
refused("sequence: 2 is not one of this cache", lambda: cache.append(0, [s, 2], k, k))
refused("sequences: [0, 0] names one twice", lambda: cache.decode(q, 0, [s, s]))
refused("sequence: 1 holds no sequence", lambda: cache.truncate(1, 3))
refused("sequence: 2 holds no sequence", lambda: cache.fork(2))
refused("layer: 2 is not from 0 to 1", lambda: cache.append(2, s, k, k))
refused("layer: 2 is not from 0 to 1", lambda: cache.usage(s, 2))
refused("sequence: 1 holds no sequence", lambda: cache.usage(1))
refused("k: shape", lambda: cache.append(0, s, rows(1, 2, 3), rows(1, 2, 3)))
refused("v: shape", lambda: cache.append(0, s, k, rows(1, 19)))
refused("k: 401 tokens are more than the capacity of 400",
        lambda: cache.append(0, s, rows(1, 401), rows(1, 401)))
refused("counts: format s64 is not s32",
        lambda: cache.append(0, s, k, k, counts=torch.tensor([3])))
refused("k: lies on cpu, and the KV cache lies on cuda:0",
        lambda: cache.append(0, torch.tensor([s], dtype=torch.int32), k.numpy(), k),
        qattn.Unsupported)
refused("q: rank 3 should be 4", lambda: cache.decode(q[0], 0, s))
refused("q: 9 queries", lambda: cache.decode(rows(1, 9, 8), 0, s))
refused("q: stride 2", lambda: cache.decode(rows(1, 1, 8, 128)[..., ::2], 0, s))
refused("sinks: is a list", lambda: cache.decode(q, 0, s, sinks=[1.0] * 8))
refused("layout: \\"abc\\"", lambda: cache.decode(q, 0, s, layout="abc"))
refused("should be at least", lambda: cache.decode(q, 0, s, workspace=torch.zeros(256)))
refused("workspace: lies in host memory",
        lambda: cache.decode(q, 0, s, workspace=np.zeros(256)))
refused("workspace: is not contiguous",
        lambda: cache.decode(q, 0, s, workspace=torch.zeros(4, 4)[:, :2]))
refused("mass: shape", lambda: cache.observe(0, s, torch.zeros(2, 8, 25)))
refused("threads: 2 is for CPUs", lambda: Cache(**options, sequences=1, tokens=9, threads=2))
refused("tokens: 0", lambda: Cache(**options, sequences=1, tokens=0))
refused("pages: there are 1 numbers",
        lambda: Cache(**options, sequences=1, tokens=9, pages=[3]))
channels = Cache(**options, sequences=1, tokens=99, k_granularity="per_channel")
channels.append(0, channels.add_sequence(), k, k)
refused("debias: should be off on a GPU where K has a scale a channel",
        lambda: channels.decode(q, 0, 0, debias=True), qattn.Unsupported)
refused("invalid device ordinal",
        lambda: Cache(**options, sequences=1, tokens=9, device="cuda:1"), qattn.Unsupported)
odd = Cache(kv_heads=1, head_dim=32, sequences=1, tokens=64)
odd.append(0, odd.add_sequence(), rows(1, 4, 1, 32), rows(1, 4, 1, 32))
refused("no GPU kernel for K of head dimension 32",
        lambda: odd.decode(rows(1, 1, 1, 32), 0, 0), qattn.Unsupported)
""")


def test_what_only_the_device_sees(emulated):
    emulated("""
s, other = cache.add_sequence(), cache.add_sequence()
k = rows(1, 300)
for _ in range(2):
    cache.append(0, s, k, k)
cache.append(0, other, k, k)
refused("KV cache", lambda: qattn.device_errors("cuda:0"))
refused("more tokens than its capacity", lambda: cache.status(s), qattn.OutOfMemory)
cache.status(other)
assert cache.length(s) == 300
out = cache.decode(rows(2, 1, 8), 0, [s, other])
assert out[0].isnan().all() and out[1].isfinite().all()
refused("", lambda: qattn.device_errors("cuda:0"))
""")


@pytest.mark.slow
def test_qattn_cache_on_a_gpu(emulated):
    """QattnCache over the emulated GPU's cache gives the logits and tokens of the host's."""
    emulated("""
import types
from transformers import LlamaConfig, LlamaForCausalLM
import qattn.transformers
from qattn.transformers import _cache as _transformers_cache
from qattn.transformers import QattnCache

on_gpu = False
def there(name):
    method = getattr(qattn.GpuKvCache, name)
    def call(self, *given, **options):
        global on_gpu
        on_gpu = True
        try:
            return method(self, *given, **options)
        finally:
            on_gpu = False
    return call
for name in ("append", "decode", "observe"):
    setattr(Cache, name, there(name))
_transformers_cache.GpuKvCache = Cache

class OnGpu(QattnCache):
    '''Takes keys for CUDA's.'''
    def _open(self, batch, key):
        there = torch.device("cuda:0")
        super()._open(batch, types.SimpleNamespace(dtype=key.dtype, device=there))

qattn.transformers.register("qattn_f32", "f32")
config = LlamaConfig(vocab_size=128, hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, intermediate_size=128, head_dim=64, pad_token_id=0,
                     bos_token_id=1, eos_token_id=None, attn_implementation="qattn_f32")
model = LlamaForCausalLM(config).eval()
for name, weight in model.named_parameters():
    if "q_proj.weight" in name:
        weight.data.mul_(6)
torch.set_grad_enabled(False)
ids = torch.randint(2, 128, (2, 120))
mask = torch.ones(2, 120, dtype=torch.long)
mask[1, :30] = 0
narrow = dict(window=16, sinks=0, average_bits=7.0, budget_from=120)

def logits(cache):
    model(ids[:, :100], past_key_values=cache, attention_mask=mask[:, :100])
    return torch.cat([model(ids[:, n : n + 4], past_key_values=cache,
                            attention_mask=mask[:, : n + 4]).logits for n in range(100, 120, 4)], 1)

cache = OnGpu(config, tokens=120, **narrow)
out, want = logits(cache), logits(QattnCache(config, **narrow))
assert nrmse(out, want) < 2e-3, nrmse(out, want)
assert cache.kv.length(cache.sequences[1], 1) == 90 and cache.kv.sequences == 2
refused("tokens: a row would have 121",
        lambda: model(ids[:, :1], past_key_values=cache), qattn.OutOfMemory)
cache.reset()
refused("tokens: is missing", lambda: model(ids, past_key_values=OnGpu(config)))

def generate(cache, **options):
    return model.generate(ids[:, :40], past_key_values=cache, max_new_tokens=16, do_sample=False,
                          **options)
want = generate(None)
assert torch.equal(generate(OnGpu(config, tokens=64)), want)
beams = dict(num_beams=3)
assert torch.equal(generate(OnGpu(config, tokens=64), **beams), generate(None, **beams))
prefix = OnGpu(config, tokens=64, sequences=6)
model(ids[:, :30], past_key_values=prefix)
for _ in range(3):
    assert torch.equal(generate(prefix.fork()), want)
kept = prefix.fork()
refused("sequences: 4 more rows, but the cache on the GPU has room for 2 of 6",
        lambda: kept.batch_repeat_interleave(3), qattn.OutOfMemory)
kept.crop(-10)
assert kept.get_seq_length() == 20 and kept.kv.length(kept.sequences[0]) == 20
qattn.device_errors("cuda:0")
""")


class FakeTensor:
    is_cuda = True

    def __init__(self):
        self.streams = 0

    def record_stream(self, stream):
        self.streams += 1


def test_tensors_of_lists_outlive_graphs(monkeypatch):
    """A graph reads the tensor that it captured, however many other lists come after it."""
    torch = pytest.importorskip("torch")
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)
    cache = qattn.GpuKvCache.__new__(qattn.GpuKvCache)
    cache._device, cache._known, cache._captured = ("cuda", 0), {}, {}
    monkeypatch.setattr(cache, "_tensor", lambda ids: FakeTensor())
    eager, captured = cache._kept((0,)), cache._kept((0, 1))
    assert (eager.streams, captured.streams) == (1, 1)
    capturing = True
    assert cache._kept((0, 1)) is captured
    capturing = False
    for other in range(2, 80):
        assert cache._kept((other,)).streams == 1  # its memory waits for the stream that reads it
    assert cache._kept((0, 1)) is captured
    assert cache._kept((0,)) is not eager
    assert len(cache._known) == 64


def test_refusals_name_pythons_arguments(emulated):
    """No TypeError of the extension, no name that only C++ has."""
    emulated("""
s = cache.add_sequence()
k, q = rows(1, 4), rows(1, 1, 4)
cache.append(0, s, k, k)
def made(**changes):
    return lambda: Cache(**(options | dict(sequences=3, tokens=400) | changes))
def decode(**changes):
    return lambda: cache.decode(**(dict(q=q, layer=0, sequences=s) | changes))
wide, many = torch.tensor([0]), torch.tensor([0] * 4, dtype=torch.int32)
for words, call in [
    ("head_dim: 40 is not a multiple", made(head_dim=40)),
    ("sequences: 0 is not from 1 to 65535", made(sequences=0)),
    ("tokens: 0 is not from 1 to 1073741824", made(tokens=0)),
    ("pages: there are 1 numbers", made(pages=[4])),
    ("pages[1]: -1 is not from 0 to 2^30", made(pages=[4, -1])),
    ("pages: 5 is not a list", made(pages=5)),
    ("device: 'cuda:99999999999' is not like", made(device="cuda:99999999999")),
    ("sequences: format s64 is not s32", decode(sequences=wide)),
    ("sequences: there are 4, should be 1 to the capacity of 3 seq", decode(sequences=many)),
    ("q: 3 heads should be a multiple of kv_heads 2", decode(q=q[:, :, :3])),
    ("q: int32 is not one of float32", decode(q=q.int())),
    ("scale: inf is not finite", decode(scale=float("inf"))),
    ("return_mass: 1 is neither True nor False", decode(return_mass=1)),
    ("head: -1 is below 0; None stands for all", lambda: cache.evict(s, 0, 2, head=-1)),
    ("mass: 3 query heads are no multiple of kv_heads 2",
     lambda: cache.observe(0, s, torch.ones(1, 3, 25))),
    ("sequence: 2 holds no sequence of this cache", lambda: cache.length(2)),
]:
    try:
        call()
    except qattn.InvalidArgument as caught:
        assert str(caught).startswith(words), caught
    else:
        raise AssertionError("not refused: " + words)
for number in range(2):
    cache.add_sequence()
refused("sequences: all 3 sequences are in use", cache.add_sequence, qattn.OutOfMemory)
for step in range(2):
    cache.append(0, s, rows(1, 300), rows(1, 300))
refused("sequence 0: more tokens than its capacity", lambda: cache.status(s), qattn.OutOfMemory)
elsewhere = torch.empty(1 << 24, dtype=torch.uint8)
_kv_cache_gpu.device_of = lambda x: (1, 0) if x is elsewhere else (2, 0)
refused("workspace: lies on another device than q", decode(workspace=elsewhere))
""")
