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


def explained(device, shape, *options):
    *extents, causal = shape
    command = [PROGRAM, "explain", "--device", device, "--shape", ",".join(map(str, extents)),
               "--input-format", "bf16", *(["--causal"] if causal else []), *options]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def automatic(device, shape):
    text = explained(device, shape)
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


#: choice of the plan: the word of a record's recipe that asks for it
CHOICES = {"codes: beside attention": "+beside", "q_codes: in the attention kernel": ""}


def test_codes_of_narrow_heads_are_made_where_that_is_fastest():
    """Of the record's choices: in the attention kernel (the recipe's own then), beside, first."""
    found = defaultdict(dict)
    record = json.loads((RESULTS / "variants-h200-way-back-d64.json").read_text())
    for cell in record["cells"]:
        name = cell["candidate"]
        if cell["step"] == "e2e" and name.startswith("int8_full") and "@" not in name:
            key = *(cell["shape"][x] for x in EXTENTS), cell["shape"]["causal"]
            found[key][name.removeprefix("int8_full")] = cell["median_ms"]
    assert len(found) == 10
    for shape, ms in found.items():
        text = explained("sm_90", shape, "--recipe", "int8_full")
        chosen = next((word for line, word in CHOICES.items() if line in text), "+no_q")
        assert min(ms.values()) / ms[chosen] > 0.97, (shape, chosen, ms)
