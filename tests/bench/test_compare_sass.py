"""tools/compare_sass.py: where the machine code of a kernel differs."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tools"))

import compare_sass

LINES = ["MOV R1, 0x1234", "HGMMA R24", "@P0 FMUL R3, R3, 0x40490fdb", "@!P1 HGMMA R24",
         "STS [R2+0x400], R3", "@P0 BRA 0x1230", "EXIT"]


def printed(lines, stalls=()):
    """As cuobjdump -sass prints them; `stalls`: places of instructions that wait longer."""
    text = "\tcode for sm_90a\n\tarch = sm_90a\n\t\tFunction : kernel\n"
    for i, line in enumerate(lines):
        word = 0x000fe20000000000 + ((i in stalls) << 41)
        text += f"        /*{16 * i:04x}*/   {line} ;   /* {hash(line) % 2**64:#018x} */\n"
        text += f"                     /* {word:#018x} */\n"
    return text


def code(lines, stalls=()):
    return compare_sass.instructions_of(printed(lines, stalls))[("sm_90a", "kernel")]


OLD = code(LINES)


def test_reads_what_cuobjdump_prints():
    assert [x.text for x in OLD] == LINES
    assert all(len(x.words) == 2 for x in OLD)
    assert compare_sass.kind_of(OLD, code(LINES)) == compare_sass.SAME


@pytest.mark.parametrize("place, kind", [
    (0, compare_sass.OUTSIDE), (1, compare_sass.OUTSIDE), (2, compare_sass.BETWEEN),
    (3, compare_sass.BETWEEN), (4, compare_sass.OUTSIDE), (7, compare_sass.OUTSIDE),
])
def test_an_instruction_more(place, kind):
    new = code([*LINES[:place], "NOP", *LINES[place:]])
    assert compare_sass.kind_of(OLD, new) == kind
    assert compare_sass.kind_of(new, OLD) == kind


@pytest.mark.parametrize("place, line, kind", [
    (0, "MOV R1, 0x1235", compare_sass.OUTSIDE),
    (2, "@P0 FMUL R3, R3, 0x40490fdc", compare_sass.BETWEEN),
    (4, "STS [R2+0x800], R3", compare_sass.OUTSIDE),
    (4, "HGMMA R24", compare_sass.BETWEEN),
    (0, "HGMMA R24", compare_sass.BETWEEN),
])
def test_another_operand(place, line, kind):
    new = code([*LINES[:place], line, *LINES[place + 1:]])
    assert compare_sass.kind_of(OLD, new) == kind
    assert compare_sass.kind_of(new, OLD) == kind


def test_branches_between_may_move_and_waits_may_not():
    branch = [*LINES[:2], "@P0 BRA 0x1230", *LINES[2:]]
    moved = [*LINES[:2], "@P0 BRA 0x1240", *LINES[2:]]
    assert compare_sass.kind_of(code(branch), code(moved)) == compare_sass.OUTSIDE
    assert compare_sass.kind_of(OLD, code(LINES, stalls=[2])) == compare_sass.BETWEEN
    assert compare_sass.kind_of(OLD, code(LINES, stalls=[0])) == compare_sass.OUTSIDE


def test_kernels_without_products():
    none, some = code(["MOV"]), code(["EXIT"])
    assert compare_sass.kind_of(none, some) == compare_sass.NO_PRODUCTS
    assert compare_sass.kind_of(none, OLD) == compare_sass.BETWEEN


def test_names_kernels_of_one_build(capsys):
    key = ("sm_90a", "kernel")
    assert compare_sass.compare({key: OLD}, {})[compare_sass.ALONE] == 1
    assert "sm_90a kernel" in capsys.readouterr().out
    assert not compare_sass.compare({key: OLD}, {key: OLD}, only="another")


def test_a_folder_that_is_no_build_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="no CUDA backend"):
        compare_sass.code("", tmp_path)
