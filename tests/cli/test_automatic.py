"""What "auto" is on GPUs, against the times of the records: never slower than 16 bits.

`qattn explain --device` plans for a GPU that is not here; the program's path is in QATTN_CLI.
"""

import json
import os
import re
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

PROGRAM = os.environ.get("QATTN_CLI")
RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
pytestmark = pytest.mark.skipif(not PROGRAM, reason="QATTN_CLI is not set")

#: record: the GPU whose plans it is for, and the recipes that "auto" chooses among there
RECORDS = {
    "gpu-h200-prefill": ("sm_90", ("bf16", "int8_full")),
    "choices-h200": ("sm_90", ("bf16", "int8_full")),
    "gpu-portable-h100": ("sm_80", ("bf16", "int8")),
}
EXTENTS = "batch", "heads_q", "heads_kv", "queries", "keys", "dim"
SLOWER = 0.93  #: of the fastest's speed, of each shape; the mean may lose a quarter of that


def times(record, recipes):
    """{shape: {recipe: ms from bf16 tensors, codes included}} where all were timed."""
    found = defaultdict(dict)
    for cell in json.loads((RESULTS / f"{record}.json").read_text())["cells"]:
        if cell["step"] == "e2e" and cell["io"] == "bf16" and "median_ms" in cell:
            shape = cell["shape"]
            key = tuple(shape[x] for x in EXTENTS)
            found[*key, shape["causal"]][cell["candidate"]] = cell["median_ms"]
    return {shape: ms for shape, ms in found.items() if all(x in ms for x in recipes)}


def automatic(device, shape):
    *extents, causal = shape
    command = [PROGRAM, "explain", "--device", device, "--shape", ",".join(map(str, extents)),
               "--input-format", "bf16", *(["--causal"] if causal else [])]  # fmt: skip
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.search(r"^auto: .+", text, re.MULTILINE), text
    return re.search(r"^recipe: (\S+)", text, re.MULTILINE)[1]


@pytest.mark.parametrize("record", RECORDS)
def test_auto_is_as_fast_as_the_fastest_of_the_record(record):
    device, recipes = RECORDS[record]
    speeds = {}
    for shape, ms in times(record, recipes).items():
        chosen = automatic(device, shape)
        assert chosen in recipes, shape
        speeds[shape] = min(ms[x] for x in recipes) / ms[chosen]
    assert len(speeds) >= 10
    slow = {shape: round(x, 3) for shape, x in speeds.items() if x < SLOWER}
    assert not slow
    assert sum(speeds.values()) / len(speeds) > 1 - (1 - SLOWER) / 4


def test_auto_does_not_depend_on_the_batch():
    for device in ("sm_80", "sm_90"):
        for extents in ((32, 8, 1, 4096, 128), (32, 32, 1024, 1024, 64), (16, 16, 4096, 4096, 128)):
            chosen = {automatic(device, (batch, *extents, False)) for batch in (1, 3, 256)}
            assert len(chosen) == 1, (device, extents)
