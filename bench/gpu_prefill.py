"""Prefill kernels beside torch's SDPA in one run: kernel-only, end to end, quantisation alone.

Usage: python bench/gpu_prefill.py LIBATTENTION_BENCH -o RECORD.json [--recipes bf16,int8,int8_full]
           [--lengths 1024,2048,4096,8192,16384] [--dims 128,64] [--rounds 11]

MHA, 32 heads, B * S = 16384, bf16 in and out. "kernel": operands already quantised; "e2e":
quantisation included. Candidates run interleaved, round by round, between CUDA events; medians.
Every output is compared with float64 on two heads (S <= 4096), and must repeat bit for bit.
"""

import argparse
import ctypes
import json
import math
import pathlib
import statistics
import subprocess
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS, TOKENS = 32, 16384


class Shape(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int64) for n in
                ("batch", "heads_q", "heads_kv", "tokens_q", "tokens_k", "d")] + [
                    ("causal", ctypes.c_int32), ("f16", ctypes.c_int32)]


def load(path):
    lib = ctypes.CDLL(path)
    pointer = ctypes.c_void_p
    lib.bench_error.restype = ctypes.c_char_p
    lib.bench_create.restype = pointer
    lib.bench_create.argtypes = [ctypes.c_char_p, ctypes.POINTER(Shape)] + [pointer] * 4
    lib.bench_run.argtypes = [pointer, ctypes.c_int, pointer]
    lib.bench_workspace.restype = ctypes.c_int64
    lib.bench_workspace.argtypes = [pointer]
    lib.bench_destroy.argtypes = [pointer]
    return lib


class Call:
    """One recipe on one shape."""

    def __init__(self, lib, recipe, shape, q, k, v):
        self.lib, self.out = lib, torch.full_like(q, math.nan)
        self.handle = lib.bench_create(recipe.encode(), ctypes.byref(shape), q.data_ptr(),
                                       k.data_ptr(), v.data_ptr(), self.out.data_ptr())
        if not self.handle:
            raise SystemExit(f"{recipe}: {lib.bench_error().decode()}")

    def step(self, which):
        if self.lib.bench_run(self.handle, which, torch.cuda.current_stream().cuda_stream):
            raise SystemExit(self.lib.bench_error().decode())


def medians(candidates, rounds):
    times = {name: [] for name in candidates}
    for i in range(rounds + 3):  # the first three warm up
        for name, call in candidates.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            if i >= 3:
                times[name].append(start.elapsed_time(end))
    return {name: statistics.median(t) for name, t in times.items()}


def exact(q, k, v, causal):
    """The first two heads of the first sequence in float64."""
    q, k, v = (x[:1, :, :2].transpose(1, 2).double() for x in (q, k, v))
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        s.masked_fill_(torch.ones_like(s[0, 0], dtype=torch.bool).triu(1), -math.inf)
    return torch.softmax(s, -1) @ v


def sdpa(backend, q, k, v, causal):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))

    def call():
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return call


def measure(lib, recipes, length, dim, causal, rounds):
    batch = max(1, TOKENS // length)
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, length, HEADS, dim, device="cuda", dtype=torch.bfloat16)
               for _ in range(3))
    shape = Shape(batch, HEADS, HEADS, length, length, dim, causal, 0)
    candidates = {"torch flash": sdpa(SDPBackend.FLASH_ATTENTION, q, k, v, causal),
                  "torch cudnn": sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v, causal)}
    want = exact(q, k, v, causal) if length <= 4096 else None
    calls, errors, workspace = [], {}, {}
    for recipe in recipes:
        call = Call(lib, recipe, shape, q, k, v)
        calls.append(call)
        call.step(0)
        first = call.out.clone()
        call.step(0)
        if not torch.equal(first, call.out) or call.out.isnan().any():
            raise SystemExit(f"{recipe}: results differ from run to run, or are NaN")
        if want is not None:
            got = call.out[:1, :, :2].transpose(1, 2).double()
            errors[recipe] = ((got - want).norm() / want.norm()).item()
        workspace[recipe] = lib.bench_workspace(call.handle)
        if recipe in ("bf16", "f16"):
            candidates[recipe] = lambda c=call: c.step(0)
        else:
            for step, name in enumerate(("e2e", "quantise", "kernel")):
                candidates[f"{recipe} {name}"] = lambda c=call, s=step: c.step(s)
    times = medians(candidates, rounds)
    for call in calls:
        lib.bench_destroy(call.handle)
    flop = 4 * batch * HEADS * length * length * dim / (2 if causal else 1)
    return {"D": dim, "S": length, "B": batch, "causal": bool(causal), "ms": times,
            "tflops": {n: flop / t / 1e9 for n, t in times.items() if "quantise" not in n},
            "nrmse": errors, "bytes_qkvo": 4 * q.numel() * 2, "bytes_workspace": workspace}


def provenance():
    root = pathlib.Path(__file__).resolve().parents[1]
    git = subprocess.run(["git", "-C", root, "describe", "--always", "--dirty"],
                         capture_output=True, text=True, check=False)
    smi = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,clocks.mem,"
                          "power.draw", "--format=csv,noheader"],
                         capture_output=True, text=True, check=False)
    return {"date": time.strftime("%Y-%m-%d"), "commit": git.stdout.strip() or "unknown",
            "gpu": torch.cuda.get_device_name(), "nvidia-smi at the end": smi.stdout.strip(),
            "torch": torch.__version__, "cuda": torch.version.cuda}


def numbers(text):
    return [int(x) for x in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("library")
    parser.add_argument("-o", "--output", required=True)
    parser.add_argument("--recipes", default="bf16,int8,int8_full")
    parser.add_argument("--lengths", type=numbers, default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--dims", type=numbers, default=[128, 64])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--commit", help="where the tree is no git checkout")
    args = parser.parse_args()
    lib, rows = load(args.library), []
    for dim in args.dims:
        for length in args.lengths:
            for causal in (False, True):
                row = measure(lib, args.recipes.split(","), length, dim, causal, args.rounds)
                rows.append(row)
                flash = row["ms"]["torch flash"]
                print(f"D{dim} S{length} {'causal' if causal else 'full'}: " + "  ".join(
                    f"{n} {t * 1e3:.0f} us ({flash / t:.2f}x)" for n, t in row["ms"].items()),
                    flush=True)
    facts = provenance() | ({"commit": args.commit} if args.commit else {})
    pathlib.Path(args.output).write_text(
        json.dumps({"provenance": facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
