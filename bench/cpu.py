"""Speed of the CPU backend beside torch's SDPA in one run; writes JSON with its provenance.

Usage: python bench/cpu.py -o bench/results/cpu-<machine>.json [--threads 2] [--repeats 7]
Prefill: B 1, H 8, S 4096, D 128, quantisation included (float32 or bfloat16 in and out).
Decode: one query, GQA 32/8, D 128, K and V as s8 codes with a scale per token (torch: bfloat16).
Candidates run interleaved, round by round, and medians are compared, so that drifting clocks and
neighbours hit all of them alike.
"""

import argparse
import functools
import json
import os
import pathlib
import platform
import statistics
import subprocess
import time

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np  # noqa: E402
import torch  # noqa: E402

import qattn  # noqa: E402


def cpu_model():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def commit():
    root = pathlib.Path(__file__).resolve().parents[1]
    run = subprocess.run(["git", "-C", root, "describe", "--always", "--dirty"],
                         capture_output=True, text=True, check=False)
    return run.stdout.strip() or "unknown"


def interleaved(candidates, repeats):
    """Medians and minima in milliseconds of callables by name, one call of each a round."""
    times = {name: [] for name in candidates}
    for round_ in range(repeats + 1):
        for name, call in candidates.items():
            start = time.perf_counter()
            call()
            if round_:  # the first round warms up
                times[name].append((time.perf_counter() - start) * 1e3)
    return {n: {"median_ms": statistics.median(t), "min_ms": min(t)} for n, t in times.items()}


def prefill(threads, repeats, causal):
    shape = (1, 8, 4096, 128)
    f32 = [torch.randn(shape) for _ in range(3)]
    b16 = [x.bfloat16() for x in f32]
    out32, out16 = torch.empty(shape), torch.empty(shape, dtype=torch.bfloat16)
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def ours(recipe, inputs, out):
        return lambda: qattn.attention(*inputs, recipe=recipe, layout="bhsd", causal=causal,
                                       threads=threads, out=out)

    candidates = {
        "torch f32": lambda: sdpa(*f32, is_causal=causal),
        "torch bf16": lambda: sdpa(*b16, is_causal=causal),
        "int8_full, f32 in and out": ours("int8_full", f32, out32),
        "int8_full, bf16 in and out": ours("int8_full", b16, out16),
        "bf16 recipe, bf16 in and out": ours("bf16", b16, out16),
        "int8 recipe, bf16 in and out": ours("int8", b16, out16),
        "f32 recipe, f32 in and out": ours("f32", f32, out32),
    }
    result = interleaved(candidates, repeats)
    flop = 4 * shape[1] * shape[2] ** 2 * shape[3] / (2 if causal else 1)
    for row in result.values():
        row["gflops"] = flop / row["median_ms"] / 1e6
    return result


def read_bandwidth(threads, gibibytes=0.5):
    """GB/s of summing float32 from memory, the best of five (numpy, one thread a slice)."""
    from concurrent.futures import ThreadPoolExecutor

    data = np.ones(int(gibibytes * 2**28), dtype=np.float32)
    parts = np.array_split(data, threads)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(5):
            start = time.perf_counter()
            list(pool.map(np.max, parts))
            best = max(best, data.nbytes / (time.perf_counter() - start) / 1e9)
    return best


def decode(threads, repeats, keys):
    q = torch.randn(1, 32, 1, 128)
    k, v = (torch.randn(1, 8, keys, 128) for _ in range(2))
    kq = qattn.quantize(k, format="s8", role="k", granularity="per_token", layout="bhsd")
    vq = qattn.quantize(v, format="s8", role="v", granularity="per_token", layout="bhsd")
    b16 = [x.bfloat16() for x in (q, k, v)]
    out = torch.empty(1, 32, 1, 128)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    candidates = {
        "torch bf16": lambda: sdpa(*b16, enable_gqa=True),
        "int8_full, s8 K and V": lambda: qattn.attention(
            q, kq, vq, recipe="int8_full", layout="bhsd", threads=threads, out=out),
    }
    caches, used = kv_caches(q, k, v, threads)
    candidates.update(caches)
    used["int8_full, s8 K and V"] = 2 * 8 * keys * (128 + 4)
    result = interleaved(candidates, 5 * repeats)
    for name, read in used.items():
        row = result[name]
        row["bytes_read"] = read
        row["gb_per_s"] = read / row["median_ms"] / 1e6
    return result


def kv_caches(q, k, v, threads):
    """{name: decode} of one sequence in caches of one tier, and of a budget, and with the mass."""
    settings = {f"KvCache {b} bits": {"tiers": [b]} for b in (8, 4, 3, 2)}
    settings["KvCache 3.0 bits in all"] = {"average_bits": 3.0}
    candidates, used = {}, {}
    for name, options in settings.items():
        cache = qattn.KvCache(kv_heads=k.shape[1], head_dim=k.shape[3], threads=threads, **options)
        sequence = cache.add_sequence()
        cache.append(0, sequence, k, v, layout="bhsd")
        call = functools.partial(cache.decode, q, 0, sequence, layout="bhsd")
        candidates[name], used[name] = call, cache.usage(sequence).bytes
        if options == {"tiers": [4]}:
            candidates[f"{name}, with mass"] = functools.partial(call, return_mass=True)
            used[f"{name}, with mass"] = used[name]
    return candidates, used


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    record = {
        "provenance": {
            "date": time.strftime("%Y-%m-%d"), "commit": commit(), "cpu": cpu_model(),
            "isa": qattn.cpu_isa(), "threads": args.threads, "repeats": args.repeats,
            "torch": torch.__version__, "qattn": qattn.__version__,
            "load_before": os.getloadavg()[0],
        },
        "read_gb_per_s": read_bandwidth(args.threads),
        "prefill_full": prefill(args.threads, args.repeats, False),
        "prefill_causal": prefill(args.threads, args.repeats, True),
        "decode_4096": decode(args.threads, args.repeats, 4096),
        "decode_32768": decode(args.threads, args.repeats, 32768),
    }
    record["read_gb_per_s"] = max(record["read_gb_per_s"], read_bandwidth(args.threads))
    pathlib.Path(args.output).write_text(json.dumps(record, indent=1) + "\n")
    for section, rows in record.items():
        if not section.startswith(("prefill", "decode")):
            continue
        base = rows["torch bf16"]["median_ms"]
        for name, row in rows.items():
            ms = row["median_ms"]
            print(f"{section:15} {name:30} {ms:9.2f} ms  {base / ms:5.2f}x torch bf16")


if __name__ == "__main__":
    main()
