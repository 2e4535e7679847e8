"""The words of GPU kernels, and with them the emulator, are no part of the library of CPUs."""

import pathlib
import re

SOURCES = pathlib.Path(__file__).resolve().parents[2] / "src"
WORDS = "isa/isa.hpp"


def reached_from(source):
    """Every file of src that a source includes, by its path there, with the file that names it."""
    found, left = {}, [source]
    while left:
        file = left.pop()
        for name in re.findall(r'^#\s*include "([^"]+)"', (SOURCES / file).read_text(), re.M):
            if name not in found and (SOURCES / name).exists():
                found[name] = file
                left.append(name)
    return found


def test_the_library_of_cpus_is_built_without_words_of_gpus():
    text = (SOURCES / "CMakeLists.txt").read_text()
    sources = re.search(r"add_library\(qattn\b([^)]*)\)", text)[1].split()
    assert len(sources) > 40
    reached = {source: reached_from(source) for source in sources}
    assert "core/problem.hpp" in reached["core/problem/make.cpp"]
    assert {s: names[WORDS] for s, names in reached.items() if WORDS in names} == {}
    assert WORDS in reached_from("kernels/quantize/overlap/overlap.cpp")
