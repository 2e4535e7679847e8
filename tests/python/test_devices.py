"""Arrays on a GPU, without one: tests/validation/fake_cuda.cpp stands in for libqattn_cuda, and
arrays with a __cuda_array_interface__ for device memory. What needs a real GPU is in tests/gpu."""

import os
import subprocess
import sys

import numpy as np
import pytest

import qattn
from qattn._interop import device_named

PREPARED = """
import numpy as np, qattn

class Cuda:
    '''Host memory that says it lies on a GPU.'''
    def __init__(self, array, device=0, stream=None, read_only=False):
        self.array, self.dtype, self.shape = array, array.dtype, array.shape
        self.device, self.stream, self.read_only = device, stream, read_only
    def __dlpack_device__(self):
        return 2, self.device
    @property
    def __cuda_array_interface__(self):
        own = self.array.__array_interface__
        return {"data": (own["data"][0], self.read_only), "shape": own["shape"],
                "typestr": own["typestr"], "strides": own["strides"], "version": 3,
                "stream": self.stream}

def cuda(*shape, dtype=np.float32, **options):
    return Cuda(np.zeros(shape, dtype), **options)

def ints(*values, **options):
    return Cuda(np.array(values, np.int32), **options)

def refused(words, call, error=qattn.InvalidArgument):
    try:
        call()
    except error as caught:
        assert words in str(caught), caught
    else:
        raise AssertionError("not refused: " + words)

q, k, v = (cuda(1, 4, 2, 64) for _ in range(3))
out = cuda(1, 4, 2, 64)
"""


def run(code, library):
    env = dict(os.environ, QATTN_CUDA_LIBRARY=library)
    process = subprocess.run([sys.executable, "-c", PREPARED + code], env=env, text=True,
                             capture_output=True, check=False)
    assert process.returncode == 0, process.stderr


@pytest.fixture
def fake():
    library = os.environ.get("QATTN_FAKE_CUDA")
    if not library:
        pytest.fail("QATTN_FAKE_CUDA should name libqattn_fake_cuda.so")
    return library


def test_device_and_stream_reach_the_kernel(fake):
    run("""
assert qattn.attention(q, k, v, out=out) is out and (out.array == 0).all()
on_one = [cuda(1, 4, 2, 64, device=1, stream=7) for _ in range(3)]
mine = cuda(1, 4, 2, 64, device=1)
qattn.attention(*on_one, out=mine)
assert (mine.array == 1007).all()
text = qattn.explain(*on_one)
assert text.startswith("attn.fake_cuda: chosen\\nattn.cpu."), text
assert "device: cuda:1\\narchitecture: sm_90\\n" in text, text
strided = Cuda(np.zeros((1, 2, 4, 80), np.float32)[..., :64].transpose(0, 2, 1, 3))
qattn.attention(strided, k, v, out=out)
assert "chosen" in qattn.explain(np.zeros((1, 4, 2, 64), np.float32), *[q.array] * 2)
""", fake)


def test_refusals_on_a_device(fake):
    run("""
host = np.zeros((1, 4, 2, 64), np.float32)
refused("k: lies on another device than q (cpu, q on cuda:0)",
        lambda: qattn.attention(q, host, v, out=out))
refused("out: lies on another device", lambda: qattn.attention(q, k, v, out=host))
refused("v: lies on another device than q (cuda:1, q on cuda:0)",
        lambda: qattn.attention(q, k, cuda(1, 4, 2, 64, device=1), out=out))
refused("invalid device ordinal",
        lambda: qattn.attention(*[cuda(1, 4, 2, 64, device=2)] * 3,
                                out=cuda(1, 4, 2, 64, device=2)),
        qattn.Unsupported)
refused("threads: 3 is for CPUs", lambda: qattn.attention(q, k, v, out=out, threads=3))
refused("seqused_k: is a list", lambda: qattn.attention(q, k, v, out=out, seqused_k=[4]))
refused("out: qattn cannot allocate a Cuda", lambda: qattn.attention(q, k, v),
        qattn.Unsupported)
refused("out: is read-only",
        lambda: qattn.attention(q, k, v, out=cuda(1, 4, 2, 64, read_only=True)))
refused("q: stride 2", lambda: qattn.attention(Cuda(np.zeros((1, 4, 2, 128), np.float32)[..., ::2]),
                                               k, v, out=out))
refused("q: lies on a GPU", lambda: qattn.reference_attention(q, k, v), qattn.Unsupported)
refused("cannot allocate a Cuda", lambda: qattn.quantize(q), qattn.Unsupported)
""", fake)


def test_strides_of_no_whole_elements_are_refused(fake):
    run("""
def field(*shape, dtype=np.float32):
    record = np.dtype([("x", dtype, (64,)), ("rest", np.uint8)])  # one byte more a row
    return Cuda(np.zeros(shape, record)["x"])

def refuses(name, stride, size, call):
    refused(f"{name}: stride {stride} in bytes is no multiple of the item size {size}", call)

x, half = field(1, 4, 2), field(1, 4, 2, dtype=np.float16)
refuses("q", 514, 4, lambda: qattn.attention(x, k, v, out=out))
refuses("v", 514, 4, lambda: qattn.attention(q, k, x, out=out))
refuses("k", 129, 2, lambda: qattn.attention(q, half, v, out=out))
refuses("out", 514, 4, lambda: qattn.attention(q, k, v, out=x))
refuses("k", 514, 4, lambda: qattn.explain(q, x, v))
bits = np.zeros((4, 4, 3), np.uint8)[..., :2]  # any stride is one of whole bytes
assert qattn._interop.entry("bits", Cuda(bits), "b1")[3] == (12, 3, 1)
""", fake)


def test_the_stream_that_tensors_name(fake):
    """The one that all name who name any: work on another would be read before it is done."""
    run("""
from qattn._interop import entry, stream_of

def named(**streams):
    return {name: entry(name, cuda(2, stream=s)) for name, s in streams.items()}

def stream(**streams):
    return stream_of(cuda(2, stream=streams.get("q")), named(**streams))

assert stream_of(cuda(2, stream=7)) == 7 and stream_of(np.zeros(2)) == stream_of(cuda(2)) == 0
assert stream(q=None, k=None) == 0 and stream(q=7, k=None, v=7) == 7
assert stream(q=None, k=None, v=9, mask=9) == 9
assert stream(q=1, k=0) == 1  # both are the legacy default stream
rule = "; arrays of one call name one stream or none"
refused("k: names stream 9, but the call is on stream 7" + rule, lambda: stream(q=7, k=9))
refused("v: names stream 9, but the call is on stream 7", lambda: stream(k=7, v=9))
refused("mask: names stream 2, but the call is on stream 1", lambda: stream(q=1, k=1, mask=2))
text = {"host": (np.zeros(2), "f32")}
assert stream_of(cuda(2), text | named(k=3)) == 3
""", fake)


def test_calls_on_different_streams_are_refused(fake):
    run("""
def one(stream):
    return cuda(1, 4, 2, 64, stream=stream)

qattn.attention(q, one(9), v, out=out)
assert (out.array == 9).all()  # q names none
qattn.attention(one(7), k, one(7), out=out, mask=cuda(4, 4, stream=7))
assert (out.array == 7).all()
for name, given in {
    "k": dict(k=one(9)),
    "v": dict(v=one(9)),
    "out": dict(out=one(9)),
    "mask": dict(mask=cuda(4, 4, stream=9)),
    "seqused_k": dict(seqused_k=ints(3, stream=9)),
}.items():
    call = dict(q=one(7), k=k, v=v, out=out) | given
    refused(f"{name}: names stream 9, but the call is on stream 7",
            lambda: qattn.attention(**call))
assert (out.array == 7).all()
""", fake)


def test_torch_tensors_give_address_stream_and_workspace(fake):
    """CPU tensors that the package takes for CUDA ones."""
    run("""
import torch
from qattn import _attention, _interop, _quantize

allocated = []
def workspace_of(x):
    def allocate(size):
        allocated.append(torch.empty(size, dtype=torch.uint8))
        return allocated[-1]
    return allocate

for module in (_interop, _attention, _quantize):
    module.device_of = lambda x: (2, 1)
_attention.attend = lambda *call: None  # the short way is for host memory
_attention.stream_of = lambda x, tensors: 5
_attention.workspace_of = workspace_of
x = [torch.zeros(1, 4, 2, 64) for _ in range(3)]
assert (qattn.attention(*x) == 1005).all()
assert [len(w) for w in allocated] == [1024] and (allocated[0] == 1).all()
wide = torch.zeros(1, 2, 4, 128)
assert (qattn.attention(wide[..., :64].transpose(1, 2), *x[1:]) == 1005).all()
refused("v: stride 2 of the last dimension should be 1; call .contiguous() first",
        lambda: qattn.attention(x[0], x[1], torch.zeros(1, 4, 2, 128)[..., ::2]))
refused("x: lies on cuda:1, where there is no quantize() yet",
        lambda: qattn.quantize(x[0]), qattn.Unsupported)
codes = qattn.Quantized(x[0].to(torch.int8), torch.zeros(1, 2, 4), "s8", "k")
refused("codes: lie on a GPU", lambda: qattn.dequantize(codes), qattn.Unsupported)
used = torch.tensor([-1], dtype=torch.int32)
refused("seqused_k: entry 0 is -1", lambda: qattn.attention(*x, seqused_k=used, validate=True))
out = torch.zeros(1, 4, 2, 64)
assert qattn.attention(*x, out=out) is out and (out == 1005).all()
""", fake)


def test_contents_are_named_if_asked_for_and_reported_otherwise(fake):
    run("""
qattn.attention(q, k, v, out=out, seqused_k=ints(3), validate=True)
qattn.device_errors("cuda:0")
refused("seqused_k: entry 0 is -1",
        lambda: qattn.attention(q, k, v, out=out, seqused_k=ints(-1), validate=True))
qattn.attention(q, k, v, out=out, seqused_k=ints(-1))
refused("cu_seqlens or seqused held", lambda: qattn.device_errors(0))
qattn.device_errors("cuda")
""", fake)


def test_without_the_library():
    run("""
for call in (lambda: qattn.attention(q, k, v, out=out), lambda: qattn.device_errors("cuda:0")):
    refused("/nowhere/libqattn_cuda.so", call, qattn.Unsupported)
qattn.device_errors("cpu")
qattn.attention(*[np.zeros((1, 4, 2, 64), np.float32)] * 3)
""", "/nowhere/libqattn_cuda.so")


def test_device_names():
    assert device_named("cpu") == (1, 0)
    assert device_named(3) == device_named("cuda:3") == (2, 3)
    for wrong in ("gpu", "cuda:-1", "cuda:x", None, 1.5):
        with pytest.raises(qattn.InvalidArgument, match="device: "):
            device_named(wrong)


def test_validate_is_a_flag():
    x = np.zeros((1, 2, 1, 32), np.float32)
    qattn.attention(x, x, x, validate=True)
    with pytest.raises(qattn.InvalidArgument, match="validate"):
        qattn.attention(x, x, x, validate=1)
