"""tools/compare_sass.py: where the machine code of a kernel differs."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tools"))

import compare_sass

OLD = ["MOV R1", "CS2R R4", "HGMMA R24", "@P0 FMUL R3", "@!P1 HGMMA R24", "STG R3", "EXIT"]


@pytest.mark.parametrize("place, kind", [
    (None, "the same"),
    (0, "differ before the first matrix instruction"),
    (3, "differ between"),
    (4, "differ between"),
    (5, "differ behind the last matrix instruction"),
])
def test_kind_says_where_code_differs(place, kind):
    new = list(OLD)
    if place is not None:
        new[place:place + 1] = ["NOP", new[place]]
    assert compare_sass.kind_of(OLD, new) == kind
    assert compare_sass.kind_of(new, OLD) == kind


def test_kernels_without_products_have_a_kind_of_their_own():
    assert compare_sass.kind_of(["MOV"], ["EXIT"]) == "without matrix instructions, differ"


def test_objects_that_are_no_build_are_refused(tmp_path):
    with pytest.raises(SystemExit, match="no CUDA backend"):
        compare_sass.code("", tmp_path)
