"""Registers, memory, matrix instructions and sizes of the GPU kernels, against a committed record.

    python tools/gpu_report.py BUILD           prints what the build in folder BUILD contains
    python tools/gpu_report.py BUILD --write   and records it in bench/results/gpu-resources.json
    python tools/gpu_report.py BUILD --merge   records anew those kernels of the record that the
                                               build has
    python tools/gpu_report.py BUILD --check   fails where a kernel needs more registers or shared
                                               memory than recorded, spills more, has not the
                                               instructions that it is about, or is new, and where
                                               the library has grown by a tenth

Registers, stack and spills are what ptxas said when each object was compiled (OBJECT.ptxas, written
by src/backends/cuda/keep_ptxas_log.sh); shared memory is that and what launches add, which is in
the kernel's name. Instructions and the sizes of cubins need cuobjdump and nvdisasm, from the CUDA
toolkit or from the wheels nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm; without them they are
left out. Another nvcc than the recorded one allocates registers differently, so nothing is compared
then.
"""

import argparse
import collections
import concurrent.futures
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
LAUNCHED = re.compile(r"(.*), (\d+)$")  # entry<KERNEL, DYNAMIC SHARED BYTES>
OPCODE = re.compile(r"\s(?:@!?U?P\w+ )?([A-Z0-9]*MMA(?:\.SF)?)(?:\.|\s)")
# What multiplies elements of isa::Element's order: in Hopper's kernels, in the portable ones, and
# in those of GeForce Blackwell, with scales.
ELEMENTS = ("f16", "bf16", "s8", "u8", "e4m3", "e5m2", "e2m1")
WARPGROUP = {"f16": "HGMMA", "bf16": "HGMMA", "s8": "IGMMA", "u8": "IGMMA", "e4m3": "QGMMA"}
SCALED = {"f16": "HMMA", "bf16": "HMMA", "s8": "IMMA", "u8": "IMMA", "e4m3": "QMMA.SF",
          "e2m1": "OMMA.SF"}
WARP = {"f16": "HMMA", "bf16": "HMMA", "s8": "IMMA", "u8": "IMMA", "e4m3": "QMMA"}


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
    """cuobjdump with nvdisasm beside it, which it calls."""
    folders = [os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/bin"]
    if nvcc := shutil.which("nvcc"):
        folders.append(os.path.dirname(os.path.realpath(nvcc)))
    if spec := importlib.util.find_spec("nvidia"):
        for parent in spec.submodule_search_locations or ():
            folders += [str(folder) for folder in pathlib.Path(parent).glob("cu*/bin")]
    for folder in folders:
        if all(shutil.which(tool, path=folder) for tool in ("cuobjdump", "nvdisasm")):
            return folder
    return None


def matrix_instructions(tools, objects):
    """{(architecture, mangled name): {opcode: count}} of IMMA, HMMA, QMMA, HGMMA, IGMMA, ..."""
    environment = {**os.environ, "PATH": tools + os.pathsep + os.environ["PATH"]}

    def disassembled(name):
        # A file of machine code is a hundred times its size as text: grep reads it faster.
        with subprocess.Popen([tools + "/cuobjdump", "-sass", name], env=environment,
                              stdout=subprocess.PIPE) as dump:
            run = subprocess.run(["grep", "-E", "MMA|Function : |arch = "], stdin=dump.stdout,
                                 capture_output=True, text=True, check=False)
        if dump.returncode != 0:
            sys.exit(f"cuobjdump -sass {name}: failed")
        return run.stdout

    found = {}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for text in pool.map(disassembled, objects):
            architecture, counts = "", collections.Counter()
            for line in text.splitlines():
                if match := re.match(r"\s*arch = (sm_\w+)", line):
                    architecture = match[1]
                elif match := re.match(r"\s*Function : (\S+)", line):
                    counts = found.setdefault((architecture, match[1]), collections.Counter())
                elif match := OPCODE.search(line):
                    counts[match[1]] += 1
    return found


def wanted_instructions(architecture, name):
    """The matrix instructions that a kernel is about."""
    if re.match(r"Decode<", name):
        return {"HMMA"}
    if match := re.match(r"Uniform8Decode<Uniform8Config\{\d+, \(Element\)(\d)", name):
        if ELEMENTS[int(match[1])] == "s8":
            return {"IMMA"}
        return set() if architecture == "sm_80" else {"HMMA"}  # empty there
    if match := re.match(r"Sm120Attention<\w+\{\d+, \(Element\)(\d), \d+, \(Element\)(\d)", name):
        if not architecture.startswith("sm_12"):
            return set()  # empty there
        return {SCALED[ELEMENTS[int(match[i])]] for i in (1, 2)}
    match = re.match(r"(Sm80|Sm90)Attention<\w+\{\d+, \(Element\)(\d), \(Element\)(\d)", name)
    if match is None:
        if re.match(r"(Sm80|Sm90)Attention<", name):
            sys.exit(f"{name}: what it multiplies is not known")
        return set()
    elements = [ELEMENTS[int(match[i])] for i in (2, 3)]
    hopper = match[1] == "Sm90"
    if hopper and not architecture.startswith("sm_90a"):
        return set()  # empty there
    if not hopper and "e4m3" in elements and not re.match(r"sm_(89|12)", architecture):
        return set()  # likewise
    return {(WARPGROUP if hopper else WARP)[element] for element in elements}


def cubin_sizes(tools, library):
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([tools + "/cuobjdump", "-xelf", "all", library], cwd=folder,
                       capture_output=True, check=True)
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
    if tools := find_cuobjdump():
        with_code = [name for name in objects if pathlib.Path(name + ".ptxas").exists()]
        counted = matrix_instructions(tools, with_code)
        for key, row in found.items():
            row["instructions"] = dict(sorted(counted.get(key, {}).items()))
        sizes["cubins"] = cubin_sizes(tools, library)
    else:
        print("cuobjdump, nvdisasm: neither in the CUDA toolkit nor in Python's wheels; "
              "instructions left out")
    names = demangled({mangled for _, mangled in found})
    kernels = collections.defaultdict(dict)
    for (architecture, mangled), row in sorted(found.items()):
        name = names[mangled]
        row["shared"] = row.pop("static_shared")
        if match := LAUNCHED.match(name):
            name = match[1]
            row["shared"] += int(match[2])
        kernels[architecture][name] = row
    return {"nvcc": nvcc_version(build), "sizes": sizes, "kernels": dict(kernels)}


def compare(now, then):
    """What is worse than recorded, one line each."""
    worse = []
    same = now["kernels"].keys() == then["kernels"].keys()
    if not same:
        print("built for other architectures than the record: kernels that both have are compared")
    for architecture, rows in now["kernels"].items():
        recorded = then["kernels"].get(architecture, {})
        if same:
            worse += [f"{architecture} {name}: is not built any more; run with --write"
                      for name in sorted(recorded.keys() - rows.keys())]
        for name, row in rows.items():
            old, where = recorded.get(name), f"{architecture} {name}"
            if old is None:
                if same:
                    worse.append(f"{where}: is not in the record; run with --write")
                continue
            for key in ("registers", "spill", "shared"):
                if row[key] > old[key]:
                    worse.append(f"{where}: {key} {old[key]} -> {row[key]}")
            if "instructions" in row:
                lost = wanted_instructions(architecture, name) - set(row["instructions"])
                worse += [f"{where}: has no {opcode}" for opcode in sorted(lost)]
    if same:
        size, old = now["sizes"]["library"], then["sizes"]["library"]
        if 10 * size > 11 * old:
            worse.append(f"the library: {old} -> {size} bytes")
    return worse


def show(now):
    for architecture, rows in now["kernels"].items():
        print(f"{architecture}: {len(rows)} kernels")
        for name, row in rows.items():
            extra = " ".join(f"{n} {op}" for op, n in row.get("instructions", {}).items())
            print(f"  {row['registers']:3} registers, {row['spill']:4} B spilled, "
                  f"{row['stack']:4} B stack, {row['shared']:6} B shared"
                  f"{', ' + extra if extra else ''}: {name}")
    for what, size in now["sizes"].items():
        print(f"{what}: {json.dumps(size)} bytes")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--merge", action="store_true")
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
    if args.merge:
        if then is None or then["nvcc"] != now["nvcc"]:
            sys.exit("--merge: the record is of another nvcc, or there is none; run with --write")
        for architecture, rows in now["kernels"].items():
            recorded = then["kernels"].get(architecture, {})
            recorded.update({name: row for name, row in rows.items() if name in recorded})
        args.record.write_text(json.dumps(then, indent=1) + "\n")
    if args.write:
        if "cubins" not in now["sizes"]:
            sys.exit("--write: without cuobjdump the record would lose its instructions")
        if then and then["kernels"].keys() != now["kernels"].keys():
            print(f"recorded architectures were {', '.join(then['kernels'])}")
        if then and "wheel" in then["sizes"]:
            now["sizes"].setdefault("wheel", then["sizes"]["wheel"])
        args.record.write_text(json.dumps(now, indent=1) + "\n")


if __name__ == "__main__":
    main()
