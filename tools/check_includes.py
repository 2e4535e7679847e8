"""Holds src to its floors: python3 tools/check_includes.py [--table]

A file includes files of its own floor and of those below; floors of one storey know nothing of each
other. Backends and architectures of attention are rooms, which only they themselves and the
registry look into. What is declared on one floor may be defined above it, which nobody sees here.
Prints one line a fault and exits with 1 where there is any; `--table` prints how many includes lead
from each floor to each other.
"""

import argparse
import collections
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
INCLUDE = re.compile(r'^\s*#\s*include\s+(?:"([^"]+)"|<([^>]+)>)', re.M)
SUFFIXES = (".h", ".hpp", ".cpp", ".cuh", ".cu", ".inl", ".inc", ".in", ".def")

#: From the ground up. A floor is a folder with all that lies in it.
STOREYS = (
    ("formats",),
    ("isa",),
    ("core",),
    ("kernels/cpu",),
    ("kernels/operand",),
    ("kernels/quantize", "kernels/attention"),
    ("kvcache",),
    ("kernels/decode",),
    ("kernels/kv_append",),
    ("registry", "reference"),
    ("backends",),
)
#: Floors that see less than what is below them.
ONLY = {"reference": {"reference", "core", "formats"}}
ROOM = re.compile(r"(kernels/attention/(?:cpu|sm\w+|gfx\w+))/")
STOREY_OF = {floor: i for i, storey in enumerate(STOREYS) for floor in storey}


def floor_of(path):
    fits = [f for f in STOREY_OF if path.startswith(f + "/")]
    return max(fits, key=len) if fits else None


def includes(root):
    """(file, included file), below root; of a quoted name that is no file there, nor a public
    header, (file, None)."""
    for path in sorted(p for p in root.rglob("*") if p.suffix in SUFFIXES):
        for quoted, angled in INCLUDE.findall(path.read_text(encoding="utf-8")):
            name = quoted or angled
            if (root / name).is_file():
                yield path.relative_to(root).as_posix(), name
            elif quoted and not (root.parent / "include" / name).is_file():
                yield path.relative_to(root).as_posix(), None


def fault(file, name):
    """What is wrong with an include, or nothing."""
    if name is None:
        return f"{file}: includes a name that is neither below src nor below include"
    own, other = floor_of(file), floor_of(name)
    if own is None or other is None:
        return f"{file if own is None else name} is on no floor"
    room = ROOM.match(name)
    if room and own != "registry" and not file.startswith(room[1] + "/"):
        return f"{file}: {name} is in a room of its own"
    if own == other or (STOREY_OF[other] < STOREY_OF[own] and other in ONLY.get(own, STOREY_OF)):
        return None
    where = "beside" if STOREY_OF[other] == STOREY_OF[own] else "not below"
    return f"{file}: {name} is {where} {own}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", action="store_true", help="includes from floor to floor")
    args = parser.parse_args()
    pairs = list(includes(ROOT / "src"))
    faults = [f for f in (fault(*pair) for pair in pairs) if f]
    if args.table and not faults:
        counts = collections.Counter((floor_of(a), floor_of(b)) for a, b in pairs)
        for (a, b), n in sorted(counts.items()):
            print(f"{a} -> {b}: {n}")
    print("\n".join(faults), end="\n" if faults else "")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
