"""The machine code of two builds' GPU kernels, kernel by kernel.

    python tools/compare_sass.py OLD NEW [--only TEXT]

OLD and NEW are folders of builds with a CUDA backend. A kernel's code is the same to the bit, or it
differs outside of what lies between its first and its last matrix instruction, or there, too.
Between lies the body of its loops over keys, but also what ends rows, where a kernel has two such
loops; what begins a loop may lie before. Prints a line for each kernel that is not the same, with
its number of instructions before and after, and how many kernels are of each kind. Exits with 1 if
code differs between, or if a kernel is in one build only. Needs cuobjdump, as gpu_report.py does.
"""

import argparse
import collections
import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys
import typing

import gpu_report

INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);\s*/\* (0x[0-9a-f]+) \*/")
SECOND_WORD = re.compile(r"\s*/\* (0x[0-9a-f]+) \*/$")
PREDICATE = r"(@!?U?P\w+ )?"
MATRIX = re.compile(PREDICATE + r"[A-Z]*MMA")
# What holds an address of code, which moves with what is before it.
JUMP = re.compile(PREDICATE + r"(BRA|BRX|BSSY|CALL|JMP|RET|WARPSYNC|MOV R\d+, 0x[0-9a-f]+$)")
SAME, OUTSIDE, BETWEEN = "the same", "differ outside", "differ between"
ALONE, NO_PRODUCTS = "in one build only", "without matrix instructions, differ"


class Instruction(typing.NamedTuple):
    text: str
    words: tuple

    def located(self):
        """What tells it from others wherever it lies: its text, and when it may start."""
        if JUMP.match(self.text):
            return re.sub(r"`?\(?0x[0-9a-f]+\)?", "", self.text)
        return self.text, self.words[-1] >> 41


def instructions_of(text):
    """{(architecture, mangled name): instructions} of what cuobjdump -sass prints."""
    found, architecture, lines = {}, "", []
    for line in text.splitlines():
        if match := INSTRUCTION.match(line):
            lines.append(Instruction(match[1].strip(), (int(match[2], 16),)))
        elif lines and (match := SECOND_WORD.match(line)):
            lines[-1] = Instruction(lines[-1].text, (*lines[-1].words, int(match[1], 16)))
        elif match := re.match(r"\s*arch = (sm_\w+)", line):
            architecture = match[1]
        elif match := re.match(r"\s*Function : (\S+)", line):
            lines = found.setdefault((architecture, match[1]), [])
    return found


def disassembled(tools, name):
    environment = {**os.environ, "PATH": tools + os.pathsep + os.environ["PATH"]}
    dump = subprocess.run([tools + "/cuobjdump", "-sass", name], env=environment, text=True,
                          capture_output=True, check=True)
    return instructions_of(dump.stdout)


def code(tools, build):
    listed = build / "src" / "backends" / "cuda" / "outputs.txt"
    if not listed.exists():
        sys.exit(f"{build}: has no CUDA backend (QATTN_CUDA)")
    objects = [name for name in listed.read_text().split("\n")[1:]
               if pathlib.Path(name + ".ptxas").exists()]
    found = {}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for part in pool.map(lambda name: disassembled(tools, name), objects):
            found.update(part)
    return found


def between(lines):
    """From the first matrix instruction to the last one."""
    matrix = [i for i, x in enumerate(lines) if MATRIX.match(x.text)]
    return [x.located() for x in lines[matrix[0]:matrix[-1] + 1]] if matrix else []


def kind_of(old, new):
    """Where a kernel's code differs."""
    if old == new:
        return SAME
    a, b = between(old), between(new)
    if not a and not b:
        return NO_PRODUCTS
    return OUTSIDE if a == b else BETWEEN


def compare(old, new, only=""):
    """Prints what differs; returns how many kernels are of each kind."""
    names = gpu_report.demangled({mangled for _, mangled in old.keys() | new.keys()})
    kinds = collections.Counter()
    for key in sorted(old.keys() | new.keys()):
        name = f"{key[0]} {names[key[1]]}"
        if only not in name:
            continue
        before, after = old.get(key), new.get(key)
        kind = ALONE if before is None or after is None else kind_of(before, after)
        kinds[kind] += 1
        if kind != SAME:
            print(f"{kind}, {len(before or [])} -> {len(after or [])} instructions: {name}")
    for kind, count in sorted(kinds.items()):
        print(f"{count:4} {kind}")
    return kinds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=pathlib.Path)
    parser.add_argument("new", type=pathlib.Path)
    parser.add_argument("--only", default="", help="kernels whose name holds this text")
    args = parser.parse_args()
    tools = gpu_report.find_cuobjdump() or sys.exit("cuobjdump, nvdisasm: not found")
    kinds = compare(code(tools, args.old), code(tools, args.new), args.only)
    if not kinds:
        sys.exit("no kernel was compared")
    sys.exit(1 if kinds[BETWEEN] or kinds[ALONE] else 0)


if __name__ == "__main__":
    main()
