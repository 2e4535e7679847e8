"""tools/tune_sm90.py: which variants it builds, with which commands, and what it makes of times."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
import tune_sm90  # noqa: E402

LINE = "QATTN_INSTANCE(128, s8, u8, false, 2, true)"


def test_every_combination_of_values():
    assert tune_sm90.combinations(["give_after=5,6", "look_after=8"]) == [
        {"give_after": "5", "look_after": "8"},
        {"give_after": "6", "look_after": "8"},
    ]
    for bad in ("give_after", "give_after=", "give_after=5,,6", "Give=5"):
        with pytest.raises(SystemExit, match="NAME=VALUE"):
            tune_sm90.combinations([bad])


def test_what_is_given_is_what_p_v_waits_for_unless_said():
    begin = "#define QATTN_SM90_TUNING(t) "
    wanted = begin + "t.give_after = 5, t.join_after = 5\n"
    assert tune_sm90.header({"give_after": "5"}) == wanted
    told = {"give_after": "5", "join_after": "6"}
    assert tune_sm90.header(told) == begin + "t.give_after = 5, t.join_after = 6\n"


def test_names_in_the_table_of_tuning():
    """The tool's hook is where the table ends, and the default variables are the table's."""
    text = (tune_sm90.ROOT / "src/kernels/attention/sm90a/config.hpp").read_text()
    assert "QATTN_SM90_TUNING(t);\n#endif\n  return t;" in text
    assert "give_after, look_after;" in text and "join_after, join_until;" in text


@pytest.fixture
def build(tmp_path):
    folder = tmp_path / "src/backends/cuda"
    folder.mkdir(parents=True)
    source = folder / "sm90a_instances_6.cu"
    source.write_text(f'#include "x.cuh"\n\nQATTN_INSTANCE(64, f16, f16, false, 2)\n{LINE}\n')
    return tmp_path, source


def test_finds_the_source_of_an_instance(build):
    folder, source = build
    found, line, others = tune_sm90.source_of(folder, "128,s8,u8,false,2,true")
    assert (found, line) == (source, LINE)
    assert others == ['#include "x.cuh"', "", "QATTN_INSTANCE(64, f16, f16, false, 2)"]
    with pytest.raises(SystemExit, match="is in none"):
        tune_sm90.source_of(folder, "128,s8,u8,false,2")


def test_compiles_without_the_cache_and_its_notes(build):
    _, source = build
    command = f"log.sh ccache /bin/nvcc -O3 -MD -MT a.o -MF a.o.d -x cu -c {source} -o a.o"
    words, compiled = tune_sm90.compile_command(["other", command], source)
    assert words == ["/bin/nvcc", "-O3", "-x", "cu", "-c", str(source), "-o", "a.o"]
    assert compiled == "a.o"
    assert tune_sm90.replaced(words, {"a.o": ["b.o", "c.o"]})[-2:] == ["b.o", "c.o"]
    with pytest.raises(SystemExit, match="nothing compiles"):
        tune_sm90.compile_command(["other"], source)


def test_speeds_are_geometric_means_over_shapes():
    def cell(name, step, shape, ms):
        return {"candidate": name, "step": step, "shape": shape, "median_ms": ms}

    record = {"cells": [
        cell("int8", "kernel", {"n": 1}, 4.0), cell("int8", "kernel", {"n": 2}, 2.0),
        cell("int8", "e2e", {"n": 1}, 99.0),
        cell("int8@v0", "kernel", {"n": 1}, 2.0), cell("int8@v0", "kernel", {"n": 2}, 4.0),
        cell("int8@v1", "kernel", {"n": 1}, 2.0), cell("int8@v1", "kernel", {"n": 2}, 1.0),
    ]}  # fmt: skip
    variants = {"v0": {"a": "1"}, "v1": {"a": "2"}, "v2": {"a": "3"}}
    assert tune_sm90.speeds(record, "int8", variants) == [
        (pytest.approx(2.0), 2.0, {"a": "2"}), (pytest.approx(1.0), 0.5, {"a": "1"}),
    ]  # fmt: skip
