"""Speed and errors of qattn beside torch's attention, from the run to the page.

  bench.py run -o RECORD.json         measure: --device, --shapes, --recipes, ...
  bench.py compare A.json B.json      what became slower or worse from A to B
  bench.py render [--check]           docs/tables and tables of pages from bench/results
  bench.py plot [--check]             docs/plots from bench/results
  bench.py roofline -o RECORD.json    a CPU's peaks, and attention beside them
  bench.py decode --program DECODE_BENCH  decode over a KV cache on a GPU, beside torch
  bench.py paged                      decode over 8-bit pages of other libraries on a GPU
  bench.py smoothing --library LIBRARY  K's mean, a sequence or a tile, on a GPU
  bench.py host --program HOST_TIME   how long small calls on a GPU keep the host
  bench.py cpu -o RECORD.json         attention on a CPU beside torch, of many shapes
  bench.py kv -o RECORD.json          decode over a KV cache on a CPU
  bench.py projection -o RECORD.json  attention with its output projection on a CPU
  bench.py fp4 --model FOLDER         errors of 4-bit recipes beside SageAttention3's, on a CPU
  bench.py counters --library LIBRARY hardware counters of the attention kernels, by ncu

Candidates take turns, round by round, and medians are compared; results are compared with float64.
`run` needs torch; on GPUs libattention_bench (target attention_bench), on CPUs the Python package.
`compare` and `render` need nothing, `plot` needs matplotlib, `roofline` the target cpu_roofline.
"""

import argparse
import importlib
import os
import sys

COMMANDS = {
    "run": "measure",
    "compare": "two records, worst first",
    "render": "docs/tables, and the tables of README and docs/PERFORMANCE.md, from bench/results",
    "plot": "docs/plots from bench/results",
    "decode": "decode over a KV cache on a GPU",
    "paged": "decode over 8-bit pages on a GPU",
    "smoothing": "K's mean, a sequence or a tile",
    "host": "how long small calls on a GPU keep the host",
    "cpu": "attention on a CPU beside torch, of many shapes",
    "kv": "decode over a KV cache on a CPU",
    "projection": "attention with its output projection on a CPU",
    "fp4": "errors of 4-bit recipes beside SageAttention3's, simulated",
    "counters": "hardware counters of the attention kernels, by ncu",
    "roofline": "peaks of a CPU's units, and attention beside them",
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=COMMANDS)
    # Each command is a module of its own, imported alone: only `run` needs torch.
    command = sys.argv[1] if sys.argv[1:] and sys.argv[1] in COMMANDS else None
    if command is None:
        parser.parse_args()
    # torch brings an OpenMP runtime of its own. Where both runtimes' idle threads spin for work,
    # they take the cores from each other. Read when a runtime is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    module = importlib.import_module(f"qbench.{command}")
    options = argparse.ArgumentParser(prog=f"bench.py {command}", description=COMMANDS[command])
    module.add_arguments(options)
    try:
        return module.run(options.parse_args(sys.argv[2:]))
    except ValueError as error:
        sys.exit(f"bench.py {command}: {error}")


if __name__ == "__main__":
    sys.exit(main())
