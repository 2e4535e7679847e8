"""Schedules of a Hopper kernel: built side by side, timed in one run, the table printed.

    tune_sm90.py build BUILD -o FOLDER --instance "128, s8, u8, false, 2, true" \\
        --vary give_after=5,6,7 --vary look_after=8,9
    tune_sm90.py run FOLDER -o RECORD.json --recipe int8_full --shape 4,32,32,4096,4096,128

ptxas orders a tile anew after changes that mean nothing, so the choices in
src/kernels/attention/sm90a/config.hpp are found by trying. `build` takes a build folder (Ninja)
whose target attention_bench is up to date. It compiles the instance, named by its line in
instances.inc, once for every combination of the values, and links a library of each into FOLDER; a
combination that does not compile is told and left out. `run` lets them take turns with the library
as it is, by bench/bench.py, and prints how much faster each one's kernel is, best first: above 1 is
faster. RECORD.json is bench.py's record.
"""

import argparse
import concurrent.futures
import itertools
import json
import math
import os
import pathlib
import re
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
LIBRARY = "cuda/libattention_bench.so"


def combinations(vary):
    """["a=1,2", "b=3"] as [{"a": "1", "b": "3"}, {"a": "2", "b": "3"}]."""
    names, values = [], []
    for text in vary:
        name, _, listed = text.partition("=")
        if not re.fullmatch(r"[a-z_]+", name) or not all(listed.split(",")):
            sys.exit(f"--vary {text}: should be NAME=VALUE,VALUE,...")
        names.append(name)
        values.append(listed.split(","))
    return [dict(zip(names, chosen, strict=True)) for chosen in itertools.product(*values)]


def header(choices):
    """What makes config.hpp take the choices. A file, for nvcc cuts -D at commas."""
    choices = dict(choices)
    if "give_after" in choices:  # which P V of the tile before waits for
        choices.setdefault("join_after", choices["give_after"])
    told = ", ".join(f"t.{name} = {value}" for name, value in choices.items())
    return f"#define QATTN_SM90_TUNING(t) {told}\n"


def bare(line):
    return line.replace(" ", "")


def source_of(build, instance):
    """The generated source with the instance, its line, and the source's other lines."""
    wanted = bare(f"QATTN_INSTANCE({instance})")
    for source in sorted((build / "src/backends/cuda").glob("sm90a_*instances_*.cu")):
        lines = source.read_text().splitlines()
        for line in lines:
            if bare(line) == wanted:
                return source, line, [x for x in lines if x != line]
    sys.exit(f"--instance {instance}: is in none of the sources of {build}")


def compile_command(commands, source):
    """The command that compiles `source`, without compiler cache, and its object."""
    for line in commands:
        words = shlex.split(line)
        if str(source) in words and "-c" in words:
            first = next(i for i, word in enumerate(words) if os.path.basename(word) == "nvcc")
            at = words.index("-o") + 1
            dropped = {words.index(flag) + i for flag in ("-MT", "-MF") for i in (0, 1)}
            dropped.add(words.index("-MD"))
            kept = [w for i, w in enumerate(words) if i >= first and i not in dropped]
            return kept, words[at]
    sys.exit(f"{source}: nothing compiles it")


def replaced(words, exchange):
    return [new for word in words for new in exchange.get(word, [word])]


def run(words, folder):
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode else None


def build_variants(asked):
    build = asked.build.resolve()
    told = subprocess.run(["ninja", "-t", "commands", LIBRARY], cwd=build, text=True,
                          capture_output=True, check=True).stdout.splitlines()  # fmt: skip
    source, line, others = source_of(build, asked.instance)
    compiling, compiled = compile_command(told, source)
    linking = [w for w in shlex.split(told[-1]) if w not in (":", "&&")]
    if LIBRARY not in linking or compiled not in linking:
        sys.exit(f"{build}: the last command of {LIBRARY} does not link it")
    asked.output.mkdir(parents=True, exist_ok=True)
    folder = asked.output.resolve()
    alone, rest = folder / "instance.cu", folder / "others.cu"
    includes = [x for x in others if x.startswith("#include")]
    alone.write_text("\n".join([*includes, line, ""]))
    rest.write_text("\n".join([*others, ""]))

    def compile_one(which, to, *options):
        words = replaced(compiling, {str(source): [str(which)], compiled: [str(to)]})
        return run([*words, *options], build)

    if failed := compile_one(rest, folder / "others.o"):
        sys.exit(failed)

    def make(number, choices):
        name = f"v{number}"
        made, library = folder / f"{name}.o", folder / f"{name}.so"
        told = folder / f"{name}.hpp"
        told.write_text(header(choices))
        if failed := compile_one(alone, made, "-include", str(told)):
            return name, choices, failed
        exchange = {compiled: [str(made), str(folder / "others.o")], LIBRARY: [str(library)]}
        failed = run(replaced(linking, exchange), build)
        made.unlink()
        return name, choices, failed

    variants = {}
    with concurrent.futures.ThreadPoolExecutor(asked.jobs) as pool:
        for name, choices, failed in pool.map(make, *zip(*enumerate(combinations(asked.vary)))):
            print(name, choices, "does not compile" if failed else "", flush=True)
            if failed:
                print(*failed.splitlines()[:2], sep="\n")
            else:
                variants[name] = choices
    kept = {"base": str(build / LIBRARY), "instance": asked.instance, "variants": variants}
    (folder / "variants.json").write_text(json.dumps(kept, indent=1) + "\n")
    return 0 if variants else 1


def speeds(record, recipe, variants):
    """[(geometric mean, smallest, choices)] of kernels' speeds over the library's, best first."""
    times = {}
    for cell in record["cells"]:
        if cell["step"] == "kernel" or not cell.get("quantises", True):
            shape = json.dumps(cell["shape"], sort_keys=True)
            times.setdefault(cell["candidate"], {})[shape] = cell["median_ms"]
    base, rows = times[recipe], []
    for name, choices in variants.items():
        own = times.get(f"{recipe}@{name}", {})
        ratios = [base[shape] / own[shape] for shape in base if shape in own]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            rows.append((mean, min(ratios), choices))
    return sorted(rows, key=lambda row: -row[0])


def run_variants(asked):
    kept = json.loads((asked.folder / "variants.json").read_text())
    command = [sys.executable, ROOT / "bench/bench.py", "run", "-o", asked.output, "--no-errors",
               "--library", asked.library or kept["base"], "--recipes", asked.recipe]  # fmt: skip
    for name in kept["variants"]:
        command += ["--against", f"{name}={asked.folder / name}.so"]
    for shape in asked.shape:
        command += ["--shape", shape]
    command += asked.bench
    if status := subprocess.run(command, check=False).returncode:
        return status
    record = json.loads(asked.output.read_text())
    print("\nmean   least  choices")
    for mean, least, choices in speeds(record, asked.recipe, kept["variants"]):
        print(f"{mean:.3f}  {least:.3f}  " + " ".join(f"{n}={v}" for n, v in choices.items()))
    return 0


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("build")
    one.add_argument("build", type=pathlib.Path)
    one.add_argument("-o", "--output", type=pathlib.Path, required=True)
    one.add_argument("--instance", required=True, help="of QATTN_INSTANCE(...)")
    one.add_argument("--vary", action="append", required=True, help="NAME=VALUE,VALUE")
    one.add_argument("--jobs", type=int, default=os.cpu_count())
    one.set_defaults(command=build_variants)
    two = commands.add_parser("run")
    two.add_argument("folder", type=pathlib.Path)
    two.add_argument("-o", "--output", type=pathlib.Path, required=True)
    two.add_argument("--recipe", required=True)
    two.add_argument("--shape", action="append", required=True, help="as of bench.py run")
    two.add_argument("--library", help="instead of the build's own")
    two.add_argument("bench", nargs="*", help="further arguments of bench.py run, behind --")
    two.set_defaults(command=run_variants)
    asked = parser.parse_args()
    return asked.command(asked)


if __name__ == "__main__":
    sys.exit(main())
