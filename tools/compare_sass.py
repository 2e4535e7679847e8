"""The machine code of two builds' GPU kernels, kernel by kernel.

    python tools/compare_sass.py OLD NEW [--only TEXT]

OLD and NEW are folders of builds with a CUDA backend. Branch targets aside, a kernel's code is the
same, or it differs: before its first matrix instruction, behind its last one, or between them,
where its loops are. Prints how many kernels are of each kind, and a line for each that differs
between, with its number of instructions before and after. Exits with 1 if there is one of these.
Needs cuobjdump, as gpu_report.py does.
"""

import argparse
import collections
import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys

import gpu_report

INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);")
MATRIX = re.compile(r"(@!?U?P\w+ )?[A-Z]*MMA")


def code_of(tools, name):
    """{(architecture, mangled name): instructions} of an object."""
    environment = {**os.environ, "PATH": tools + os.pathsep + os.environ["PATH"]}
    dump = subprocess.run([tools + "/cuobjdump", "-sass", name], env=environment, text=True,
                          capture_output=True, check=True)
    found, architecture, lines = {}, "", []
    for line in dump.stdout.splitlines():
        if match := INSTRUCTION.match(line):
            lines.append(re.sub(r"0x[0-9a-f]{3,}", "0x", match[1].strip()))
        elif match := re.match(r"\s*arch = (sm_\w+)", line):
            architecture = match[1]
        elif match := re.match(r"\s*Function : (\S+)", line):
            lines = found.setdefault((architecture, match[1]), [])
    return found


def code(tools, build):
    listed = build / "src" / "backends" / "cuda" / "outputs.txt"
    if not listed.exists():
        sys.exit(f"{build}: has no CUDA backend (QATTN_CUDA)")
    objects = [name for name in listed.read_text().split("\n")[1:]
               if pathlib.Path(name + ".ptxas").exists()]
    found = {}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for part in pool.map(lambda name: code_of(tools, name), objects):
            found.update(part)
    return found


def common_start(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y),
                min(len(a), len(b)))


def kind_of(old, new):
    """Where a kernel's code differs."""
    if old == new:
        return "the same"
    matrix = [i for i, line in enumerate(old) if MATRIX.match(line)]
    if not matrix:
        return "without matrix instructions, differ"
    if common_start(old, new) > matrix[-1]:
        return "differ behind the last matrix instruction"
    if common_start(old[::-1], new[::-1]) >= len(old) - matrix[0]:
        return "differ before the first matrix instruction"
    return "differ between"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=pathlib.Path)
    parser.add_argument("new", type=pathlib.Path)
    parser.add_argument("--only", default="", help="kernels whose name holds this text")
    args = parser.parse_args()
    tools = gpu_report.find_cuobjdump() or sys.exit("cuobjdump, nvdisasm: not found")
    old, new = code(tools, args.old), code(tools, args.new)
    names = gpu_report.demangled({mangled for _, mangled in old.keys() | new.keys()})
    kinds = collections.Counter()
    for key in sorted(old.keys() | new.keys()):
        name = f"{key[0]} {names[key[1]]}"
        if args.only not in name:
            continue
        if key not in old or key not in new:
            kinds["in one build only"] += 1
            continue
        kind = kind_of(old[key], new[key])
        kinds[kind] += 1
        if kind == "differ between":
            print(f"{len(old[key]):6} -> {len(new[key]):6} instructions: {name}")
    for kind, count in sorted(kinds.items()):
        print(f"{count:4} {kind}")
    sys.exit(1 if kinds["differ between"] else 0)


if __name__ == "__main__":
    main()
