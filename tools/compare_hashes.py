"""The results of two builds' tests, call by call, bit by bit.

    QATTN_HASHES=old.txt OLD/bin/emulated_test --gtest_filter='Cover*:Pairs*'
    QATTN_HASHES=new.txt NEW/bin/emulated_test --gtest_filter='Cover*:Pairs*'
    python tools/compare_hashes.py old.txt new.txt

Tests of conformance, on CPUs and in the emulator, append a line a call: test, number of the call,
hash of outputs and LSE. Processes may share a file. Prints the calls that differ, and how many are
equal, differ or are in one file only. Exits with 1 if any differs or if none is in both.
"""

import pathlib
import sys


def hashes_of(text):
    """{(test, call): hash}; a test that ran again must have given the same."""
    found = {}
    for line in text.splitlines():
        test, call, value = line.rsplit(" ", 2)
        if found.setdefault((test, int(call)), value) != value:
            known = found[test, int(call)]
            raise ValueError(f"{test}, call {call}: {value} and {known} in one file")
    return found


def compare(old, new):
    """The calls that differ, those that are equal, and those in one of both only."""
    both = old.keys() & new.keys()
    differ = sorted(k for k in both if old[k] != new[k])
    return differ, len(both) - len(differ), len(old.keys() ^ new.keys())


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    differ, equal, alone = compare(*(hashes_of(pathlib.Path(p).read_text()) for p in sys.argv[1:]))
    for test, call in differ:
        print(f"{test}, call {call}")
    print(f"{equal} calls equal, {len(differ)} differ, {alone} in one file only")
    return int(bool(differ) or equal == 0)


if __name__ == "__main__":
    sys.exit(main())
