"""tools/gpu_report.py: what it demands of a build, on the committed record."""

import copy
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import gpu_report  # noqa: E402


@pytest.fixture(scope="module")
def record():
    return json.loads(gpu_report.RECORD.read_text())


def test_every_recorded_kernel_has_the_instructions_that_it_is_about(record):
    for architecture, kernels in record["kernels"].items():
        for name, row in kernels.items():
            wanted = gpu_report.wanted_instructions(architecture, name)
            assert wanted <= set(row["instructions"]), f"{architecture} {name}"


def test_every_gpu_with_conversions_from_fp8_decodes_codes(record):
    """Code of sm_80, which sm_89 would run, has empty kernels for them."""
    for architecture in ("sm_89", "sm_90", "sm_100", "sm_120"):
        assert any(n.startswith("Uniform8Decode<") for n in record["kernels"][architecture])


def test_what_kernels_are_about():
    wanted = gpu_report.wanted_instructions
    assert wanted("sm_90a", "Sm90Attention<Sm90Config{128, (Element)2, (Element)4, true}>") == {
        "IGMMA", "QGMMA",
    }  # fmt: skip
    halves = "Sm80Attention<Sm80Config{64, (Element)1, (Element)1, false}>"
    assert wanted("sm_80", halves) == {"HMMA"}
    assert wanted("sm_89", "Uniform8Decode<Uniform8Config{64, (Element)4, (Element)4}>") == {"HMMA"}
    assert wanted("sm_80", "Uniform8Decode<Uniform8Config{64, (Element)4, (Element)4}>") == set()
    assert wanted("sm_90", "CombineSplits") == set()  # no matrices
    with pytest.raises(SystemExit, match="not known"):
        wanted("sm_90", "Sm80Attention<of something else>")


@pytest.mark.parametrize("key", ["registers", "spill", "shared"])
def test_more_than_recorded_is_worse_and_less_is_not(record, key):
    assert gpu_report.compare(record, record) == []
    more = copy.deepcopy(record)
    more["kernels"]["sm_90a"]["(anonymous namespace)::any_kernel()"][key] += 1
    (line,) = gpu_report.compare(more, record)
    assert key in line and "any_kernel" in line
    assert gpu_report.compare(record, more) == []


def test_lost_instructions_new_kernels_and_growth_are_told(record):
    now = copy.deepcopy(record)
    name = next(n for n in now["kernels"]["sm_90a"] if n.startswith("Sm90Attention<"))
    now["kernels"]["sm_90a"][name]["instructions"] = {}
    now["kernels"]["sm_90"]["New"] = now["kernels"]["sm_90"].pop("CombineSplits")
    now["sizes"]["library"] *= 2
    lines = "\n".join(gpu_report.compare(now, record))
    for text in (f"{name}: has no", "New: is not in the record", "CombineSplits: is not built",
                 "the library: "):
        assert text in lines, lines
