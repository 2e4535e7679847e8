"""Speed of the GPU backend beside torch's SDPA in one run; writes JSON with its provenance.

Usage: python bench/gpu.py -o gpu.json [--repeats 20]
End to end: 16-bit tensors in and out, quantisation included. Candidates run interleaved, round by
round, between CUDA events, and medians are compared; before each, a write larger than L2 evicts
what the one before left there. Every output is checked against float64 on a sample of rows.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import time

import torch

import qattn

SHAPES = {  # name: (B, Hq, Hkv, Sq, Sk, D, causal)
    "prefill 4k D128": (4, 32, 32, 4096, 4096, 128, False),
    "prefill 4k D128 causal": (4, 32, 32, 4096, 4096, 128, True),
    "prefill 16k D128 causal": (1, 32, 32, 16384, 16384, 128, True),
    "prefill 16k GQA 8 causal": (1, 32, 8, 16384, 16384, 128, True),
    "video 32k D128": (1, 24, 24, 32760, 32760, 128, False),
    "prefill 4k D64": (4, 32, 32, 4096, 4096, 64, False),
    "prefill 4k D256 causal": (2, 16, 16, 4096, 4096, 256, True),
    "chunk 512 of 16k": (1, 32, 8, 512, 16384, 128, True),
}
RECIPES = ("bf16", "int8", "int8_full", "int8_fp8", "fp8", "fp8_p16")


def commit():
    root = pathlib.Path(__file__).resolve().parents[1]
    run = subprocess.run(["git", "-C", root, "describe", "--always", "--dirty"],
                         capture_output=True, text=True, check=False)
    return run.stdout.strip() or "unknown"


def interleaved(candidates, repeats):
    """Milliseconds of callables by name, one call of each a round."""
    evict = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times = {name: [] for name in candidates}
    for round_ in range(repeats + 2):
        for name, call in candidates.items():
            evict.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            if round_ > 1:  # the first rounds warm up
                times[name].append(start.elapsed_time(end))
    return {n: {"median_ms": statistics.median(t), "min_ms": min(t)} for n, t in times.items()}


def sampled_error(out, q, k, v, causal):
    """NRMSE of some rows of the first batch entry and head; layout bhsd."""
    length, keys, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    rows = torch.randint(0, length, (64,), device="cuda")
    s = q[0, -1, rows].double() @ k[0, (q.shape[1] - 1) // group].double().T / q.shape[-1] ** 0.5
    if causal:
        j = torch.arange(keys, device="cuda")
        s = s.masked_fill(j[None] > rows[:, None] + keys - length, -torch.inf)
    ref = s.softmax(-1) @ v[0, (q.shape[1] - 1) // group].double()
    return float((out[0, -1, rows].double() - ref).norm() / ref.norm())


def measure(shape, repeats):
    batch, heads, kv_heads, length, keys, dim, causal = shape
    torch.manual_seed(0)
    q = torch.randn(batch, heads, length, dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(batch, kv_heads, keys, dim, device="cuda", dtype=torch.bfloat16)
            for _ in range(2))
    out = torch.empty_like(q)

    def ours(recipe):
        return lambda: qattn.attention(q, k, v, recipe=recipe, layout="bhsd", causal=causal,
                                       out=out)

    def torchs():
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=heads != kv_heads)

    candidates, errors = {}, {}
    if not causal or length == keys:  # torch's causal is aligned to the top left
        candidates["torch bf16"] = torchs
    for recipe in RECIPES:
        try:
            ours(recipe)()
        except qattn.Unsupported:
            continue
        errors[recipe] = sampled_error(out, q, k, v, causal)
        candidates[recipe] = ours(recipe)
    rows = interleaved(candidates, repeats)
    flop = 4 * batch * heads * length * keys * dim
    if causal:
        flop *= 1 - (length - 1) / (2 * keys)
    for name, row in rows.items():
        row["tflops"] = flop / row["median_ms"] / 1e9
        if name in errors:
            row["nrmse"] = errors[name]
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", required=True)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    record = {"provenance": {
        "date": time.strftime("%Y-%m-%d"), "commit": commit(),
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "cuda": torch.version.cuda, "qattn": qattn.__version__, "repeats": args.repeats,
        "scope": "end to end, bf16 in and out",
    }}
    for name, shape in SHAPES.items():
        record[name] = measure(shape, args.repeats)
        print(name)
        for candidate, row in record[name].items():
            error = f", NRMSE {row['nrmse']:.2e}" if "nrmse" in row else ""
            print(f"  {candidate:12} {row['median_ms']:9.3f} ms {row['tflops']:7.1f} TFLOP/s"
                  + error)
        pathlib.Path(args.output).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
