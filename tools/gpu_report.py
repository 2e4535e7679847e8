"""Registers, spills, matrix instructions and sizes of the GPU kernels, against a committed record.

    python tools/gpu_report.py BUILD           prints what the build in folder BUILD contains
    python tools/gpu_report.py BUILD --write   and records it in bench/results/gpu-resources.json
    python tools/gpu_report.py BUILD --check   fails where a kernel needs more registers than
                                               recorded, spills more, lost its matrix instruction,
                                               or is new

Registers, stack and spills are what ptxas said when each object was compiled (OBJECT.ptxas, written
by src/backends/cuda/keep_ptxas_log.sh). Instructions and the sizes of cubins need cuobjdump, from
the CUDA toolkit or from the `triton` wheel; without one they are left out. Another nvcc than the
recorded one allocates registers differently, so nothing is compared then.
"""

import argparse
import collections
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
RECORD = ROOT / "bench" / "results" / "gpu-resources.json"
ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\w+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")


def logged(text):
    """{(architecture, mangled name): resources} of one object's log."""
    found, current = {}, None
    for line in text.splitlines():
        if match := ENTRY.search(line):
            current = found.setdefault((match[2], match[1]), {})
        elif current is None:
            continue
        elif match := STACK.search(line):
            # Properties of functions that were not inlined are printed too; the entry's come first.
            current.setdefault("stack", int(match[1]))
            current.setdefault("spill", int(match[2]) + int(match[3]))
        elif match := USED.search(line):
            current["registers"] = int(match[1])
            shared = SHARED.search(line)
            current["static_shared"] = int(shared[1]) if shared else 0
    return found


def demangled(names):
    """Readable names of kernels: what isa::entry is instantiated with."""
    names = sorted(names)
    tool = shutil.which("c++filt")
    if tool is None or not names:
        return dict(zip(names, names, strict=True))
    run = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, check=True)
    short = {}
    for mangled, name in zip(names, run.stdout.splitlines(), strict=True):
        name = re.sub(r"qattn::(kernels::|isa::)?((cuda_target)::)?", "", name)
        match = re.match(r"void entry<(.*)>\((.*)\)$", name)
        short[mangled] = match[1].strip() if match else name
    return short


def find_cuobjdump():
    folders = [os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/bin"]
    if nvcc := shutil.which("nvcc"):
        folders.append(os.path.dirname(os.path.realpath(nvcc)))
    if (spec := importlib.util.find_spec("triton")) and spec.submodule_search_locations:
        folders.append(spec.submodule_search_locations[0] + "/backends/nvidia/bin")
    return shutil.which("cuobjdump") or shutil.which("cuobjdump", path=os.pathsep.join(folders))


def matrix_instructions(cuobjdump, library):
    """{(architecture, mangled name): {opcode: count}} of IMMA, HMMA, QMMA, HGMMA, IGMMA, ..."""
    run = subprocess.run([cuobjdump, "-sass", library], capture_output=True, text=True, check=True)
    found, architecture, counts = {}, "", collections.Counter()
    for line in run.stdout.splitlines():
        if match := re.match(r"\s*arch = (sm_\w+)", line):
            architecture = match[1]
        elif match := re.match(r"\s*Function : (\S+)", line):
            counts = found.setdefault((architecture, match[1]), collections.Counter())
        elif match := re.search(r"\s(?:@!?U?P\w+ )?([A-Z0-9]*MMA)(?:\.|\s)", line):
            counts[match[1]] += 1
    return found


def cubin_sizes(cuobjdump, library):
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([cuobjdump, "-xelf", "all", library], cwd=folder, capture_output=True,
                       check=True)
        sizes = collections.Counter()
        for file in pathlib.Path(folder).iterdir():
            if match := re.search(r"(sm_\w+)\.cubin$", file.name):
                sizes[match[1]] += file.stat().st_size
    return dict(sorted(sizes.items()))


def nvcc_version(build):
    cache = (build / "CMakeCache.txt").read_text()
    nvcc = re.search(r"^CMAKE_CUDA_COMPILER:\w+=(.+)$", cache, re.M)
    run = subprocess.run([nvcc[1] if nvcc else "nvcc", "--version"], capture_output=True, text=True,
                         check=True)
    return re.search(r"V([\d.]+)", run.stdout)[1]


def report(build, wheel):
    """Everything about one build, as it is recorded."""
    listed = build / "src" / "backends" / "cuda" / "outputs.txt"
    if not listed.exists():
        sys.exit(f"{build}: has no CUDA backend (QATTN_CUDA)")
    library, *objects = listed.read_text().split("\n")
    found = {}
    for name in objects:
        log = pathlib.Path(name + ".ptxas")
        if log.exists():
            found.update(logged(log.read_text()))
    sizes = {"library": pathlib.Path(library).stat().st_size}
    if wheel:
        sizes["wheel"] = pathlib.Path(wheel).stat().st_size
    if cuobjdump := find_cuobjdump():
        for key, counts in matrix_instructions(cuobjdump, library).items():
            if key in found:
                found[key]["instructions"] = dict(sorted(counts.items()))
        sizes["cubins"] = cubin_sizes(cuobjdump, library)
    else:
        print("cuobjdump: neither in the CUDA toolkit nor in a triton wheel; instructions left out")
    names = demangled({mangled for _, mangled in found})
    kernels = collections.defaultdict(dict)
    for (architecture, mangled), row in sorted(found.items()):
        kernels[architecture][names[mangled]] = row
    return {"nvcc": nvcc_version(build), "sizes": sizes, "kernels": dict(kernels)}


def compare(now, then):
    """What is worse than recorded, one line each."""
    worse = []
    for architecture, rows in now["kernels"].items():
        recorded = then["kernels"].get(architecture)
        if recorded is None:
            print(f"{architecture}: not in the record, not compared")
            continue
        for name, row in rows.items():
            old, where = recorded.get(name), f"{architecture} {name}"
            if old is None:
                worse.append(f"{where}: is not in the record; run with --write")
                continue
            for key in ("registers", "spill"):
                if row[key] > old[key]:
                    worse.append(f"{where}: {key} {old[key]} -> {row[key]}")
            if "instructions" in row:
                lost = set(old.get("instructions", {})) - set(row["instructions"])
                worse += [f"{where}: has no {opcode} any more" for opcode in sorted(lost)]
    return worse


def show(now):
    for architecture, rows in now["kernels"].items():
        print(f"{architecture}: {len(rows)} kernels")
        for name, row in rows.items():
            extra = " ".join(f"{n} {op}" for op, n in row.get("instructions", {}).items())
            print(f"  {row['registers']:3} registers, {row['spill']:4} B spilled, "
                  f"{row['stack']:4} B stack, {row['static_shared']:5} B static shared"
                  f"{', ' + extra if extra else ''}: {name}")
    for what, size in now["sizes"].items():
        print(f"{what}: {json.dumps(size)} bytes")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--wheel", help="a built wheel, whose size is recorded too")
    parser.add_argument("--record", type=pathlib.Path, default=RECORD)
    args = parser.parse_args()
    now = report(args.build, args.wheel)
    show(now)
    then = json.loads(args.record.read_text()) if args.record.exists() else None
    if args.check:
        if then is None:
            sys.exit(f"{args.record}: does not exist; run with --write")
        if then["nvcc"] != now["nvcc"]:
            print(f"recorded with nvcc {then['nvcc']}, this is {now['nvcc']}: not compared")
        elif worse := compare(now, then):
            sys.exit("\n".join(worse))
        else:
            print(f"nothing is worse than in {args.record.name}")
    if args.write:
        if then and "wheel" in then["sizes"]:
            now["sizes"].setdefault("wheel", then["sizes"]["wheel"])
        args.record.write_text(json.dumps(now, indent=1) + "\n")


if __name__ == "__main__":
    main()
