"""tools/check_includes.py finds what it is for."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[2] / "tools" / "check_includes.py"
SPEC = importlib.util.spec_from_file_location("check_includes", PATH)
check = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(check)


def test_the_tree_keeps_its_floors():
    pairs = list(check.includes(PATH.parents[1] / "src"))
    assert len(pairs) > 500
    assert [f for f in (check.fault(*pair) for pair in pairs) if f] == []


@pytest.mark.parametrize(
    ("file", "included", "why"),
    [
        ("core/plan.hpp", "kernels/cpu/words.hpp", "not below core"),
        ("kernels/quantize/gpu/prepare.cpp", "kernels/attention/gpu.hpp", "beside"),
        ("kernels/attention/gpu.cpp", "kernels/quantize/gpu/plain_params.hpp", "beside"),
        ("kernels/attention/sm80/host.cpp", "kernels/attention/sm90a/host.hpp", "room of its own"),
        ("kvcache/gpu/cache.cpp", "kernels/decode/call.hpp", "not below kvcache"),
        ("kernels/decode/uniform8/host.cpp", "kernels/attention/sm80/host.hpp", "room of its own"),
        ("kernels/attention/gpu.cpp", "kernels/attention/cpu/kernel.hpp", "room of its own"),
        ("reference/reference.cpp", "kernels/cpu/words.hpp", "not below reference"),
        ("core/plan.cpp", None, "neither below src"),
        ("new/thing.cpp", "core/plan.hpp", "on no floor"),
    ],
)
def test_a_fault_is_named(file, included, why):
    assert why in check.fault(file, included)


def test_files_on_disk_are_read(tmp_path):
    (tmp_path / "core").mkdir()
    (tmp_path / "kernels" / "cpu").mkdir(parents=True)
    (tmp_path / "kernels" / "cpu" / "words.hpp").write_text("")
    (tmp_path / "core" / "plan.cpp").write_text(
        '#include <vector>\n  #  include "kernels/cpu/words.hpp"\n#include "core/none.hpp"\n'
    )
    assert list(check.includes(tmp_path)) == [
        ("core/plan.cpp", "kernels/cpu/words.hpp"),
        ("core/plan.cpp", None),
    ]
