"""Instructions that the compiled prefill kernels issue for a tile of scores, for qattn_model.

    python tools/gpu_slots.py            prints them
    python tools/gpu_slots.py --write    and records them in bench/results/gpu-slots.json

The emulator counts words, and what kernels write as operators of C++ leaves no trace there. Machine
code has it all: of the loop over tiles of keys, the way with the fewest instructions that has as
many matrix instructions as the tile needs, which is that without masks, rescaling and bad values.
It is still a lower bound. Needs nvcc and nvdisasm.
"""

import argparse
import collections
import json
import pathlib
import re
import shutil
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
RECORD = ROOT / "bench" / "results" / "gpu-slots.json"
KEYS = 64  # of an iteration
TILE = 128  # queries and keys of what the model scales
WARPS = {"sm120a": 8, "sm80": 4}  # that share 128 queries
#: recipe: arguments of QATTN_INSTANCE behind the head dimension; the last says: not general
SM120A = {
    "nvfp4": "e2m1, 16, e2m1, 16, false",
    "nvfp4_qk": "e2m1, 16, bf16, 0, false",
    "mxfp8": "e4m3, 32, e4m3, 32, false",
    "fp8": "e4m3, 0, e4m3, 0, false",
    "int8_fp8": "s8, 0, e4m3, 0, false",
}
SM80 = {"bf16": "bf16, bf16, false", "int8": "s8, bf16, false", "int8_full": "s8, u8, false"}
SM89 = SM80 | {"fp8": "e4m3, e4m3, false", "int8_fp8": "s8, e4m3, false"}
#: of 128 channels alone
SM120A_128 = {"bf16": "bf16, 0, bf16, 0, false", "int8": "s8, 0, bf16, 0, false"}
#: (target of nvcc, folder of the kernel, recipes, head dimensions)
KERNELS = (
    ("sm_120f", "sm120a", SM120A, (128, 64)),
    ("sm_120f", "sm120a", SM120A_128, (128,)),
    ("sm_89", "sm80", SM89, (128, 64)),
    ("sm_80", "sm80", SM80, (128, 64)),
)

LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z0-9_.]+)([^;]*);")
LABEL = re.compile(r"^(\.L_\w+):")
TARGET = re.compile(r"`\((\.L_\w+)\)")
MMA = re.compile(r"^[HIQO]MMA")
#: What executes an opcode: the model's units; what is not here takes a slot and no more.
UNITS = {
    "special": {"MUFU"},
    "convert": {"F2FP", "F2F", "I2F", "F2I", "I2FP", "F2IP"},
    "fma": {"FFMA", "FADD", "FMUL", "FFMA2", "FADD2", "FMUL2", "IMAD"},
    "integer": {"LOP3", "PRMT", "FMNMX", "FMNMX3", "IADD3", "IADD", "SEL", "FSEL", "ISETP",
                "FSETP", "SHF", "LEA", "VIMNMX", "IMNMX", "FCHK", "IDP", "VIADD", "PLOP3", "I2IP"},
}  # fmt: skip


class Block:
    def __init__(self):
        self.opcodes, self.next = [], []

    def mmas(self):
        return sum(bool(MMA.match(op)) for op in self.opcodes)


def blocks_of(text):
    """Basic blocks of one function in the order of the code; `next` holds indices."""
    found, names, jumps = [Block()], {}, []
    falls = True  # does the block before go on here?
    for line in text.splitlines():
        if label := LABEL.match(line):
            if found[-1].opcodes:
                found.append(Block())
                if falls:
                    found[-2].next.append(len(found) - 1)
                falls = True
            names[label[1]] = len(found) - 1
        elif match := LINE.search(line):
            _, predicate, opcode, rest = match.groups()
            found[-1].opcodes.append(opcode)
            root = opcode.split(".")[0]
            if root not in ("BRA", "EXIT", "RET", "BRX", "JMP"):
                continue
            to = TARGET.search(rest)
            if opcode.startswith("BRA.DIV"):  # a warp whose lanes have parted
                to = None
            if root == "BRA" and to:
                jumps.append((len(found) - 1, to[1]))
            always = predicate is None and not re.match(r"\s*!?U?P\d", rest)
            falls = not always or opcode.startswith("BRA.DIV")
            found.append(Block())
            if falls:
                found[-2].next.append(len(found) - 1)
            falls = True
    for index, label in jumps:
        found[index].next.append(names[label])
    return found


def loop_of(blocks):
    """(first, last) of the loop that has most matrix instructions and is the shortest of those."""
    loops = [
        (to, index) for index, block in enumerate(blocks) for to in block.next if to <= index
    ]
    most = max(sum(b.mmas() for b in blocks[a : z + 1]) for a, z in loops)
    good = [x for x in loops if sum(b.mmas() for b in blocks[x[0] : x[1] + 1]) == most]
    return min(good, key=lambda x: x[1] - x[0])


def shortest(blocks, first, last, least):
    """Blocks of the way from first to last with the fewest instructions and `least` products."""
    best = {first: {blocks[first].mmas(): (len(blocks[first].opcodes), (first,))}}
    for index in range(first, last):
        for to in blocks[index].next:
            if not index < to <= last:
                continue
            for mmas, (count, way) in best.get(index, {}).items():
                made = (mmas + blocks[to].mmas(), count + len(blocks[to].opcodes), (*way, to))
                known = best.setdefault(to, {})
                if made[0] not in known or made[1] < known[made[0]][0]:
                    known[made[0]] = made[1:]
    ways = [way for mmas, way in best[last].items() if mmas >= least]
    return min(ways)[1]


def least_products(recipe, dim):
    """Matrix instructions of a warp's 16 rows and an iteration, without those of row sums."""
    deep = {"nvfp4": 64, "nvfp4_qk": 64, "bf16": 16}.get(recipe, 32)
    deep_v = {"nvfp4": 64, "nvfp4_qk": 16, "bf16": 16, "int8": 16}.get(recipe, 32)
    return KEYS // 8 * dim // deep + dim // 8 * KEYS // deep_v


def slots_of(text, folder, recipe, dim):
    """{unit: warp instructions} for a tile of 128 x 128 scores."""
    blocks = blocks_of(text)
    first, last = loop_of(blocks)
    rows = TILE // WARPS[folder]
    way = shortest(blocks, first, last, least_products(recipe, dim) * rows // 16)
    opcodes = [op.split(".")[0] for index in way for op in blocks[index].opcodes]
    iterations = TILE // KEYS * WARPS[folder]
    count = collections.Counter({"issue": len(opcodes)})
    for op in opcodes:
        for unit, members in UNITS.items():
            count[unit] += op in members
    return {unit: n * iterations for unit, n in count.items()}


def machine_code(folder, target, dim, arguments, nvdisasm, place):
    source, cubin = place / "one.cu", place / "one.cubin"
    source.write_text(
        f'#include "kernels/attention/{folder}/launch.cuh"\nQATTN_INSTANCE({dim}, {arguments})\n'
    )
    subprocess.run(
        ["nvcc", "-std=c++20", "-O3", f"-arch={target}", "-cubin", "--expt-relaxed-constexpr",
         f"-I{ROOT / 'src'}", f"-I{ROOT / 'include'}", '-DQATTN_VERSION="x"', source,
         "-o", cubin], check=True, capture_output=True)  # fmt: skip
    run = subprocess.run([nvdisasm, "-c", cubin], check=True, capture_output=True, text=True)
    return run.stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"write {RECORD.name}")
    parser.add_argument("--nvdisasm", default=shutil.which("nvdisasm") or "nvdisasm")
    args = parser.parse_args()
    told = subprocess.run(["nvcc", "--version"], check=True, capture_output=True, text=True)
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for target, folder, recipes, dims in KERNELS:
            for recipe, arguments in recipes.items():
                for dim in dims:
                    text = machine_code(folder, target, dim, arguments, args.nvdisasm,
                                        pathlib.Path(place))  # fmt: skip
                    row = {"target": target, "kernel": f"{folder}_prefill", "recipe": recipe,
                           "dim": dim, "a_tile": slots_of(text, folder, recipe, dim)}  # fmt: skip
                    print(json.dumps(row), flush=True)
                    rows.append(row)
    if args.write:
        record = {"nvcc": re.search(r"V([\d.]+)", told.stdout)[1], "rows": rows}
        RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
