"""The committed measurement of the GPU vocabulary (docs/ISA_CONFORMANCE.md)."""

import json
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECORD = json.loads((ROOT / "bench/results/isa-h200.json").read_text())
OPERATIONS = {row["name"]: row for row in RECORD["operations"]}


def test_every_operation_agrees_with_the_emulator():
    assert len(OPERATIONS) == 163, "run tests/isa/conformance_gpu again where operations are new"
    for row in OPERATIONS.values():
        assert row["words"] > 0 and row["mismatches"] == 0 and not row["error"], row


def test_accumulators_are_as_documented():
    for row in RECORD["accumulators"]:
        name = row["instruction"]
        narrow = name in ("wgmma e4m3", "wgmma e5m2")
        # Two e4m3 numbers cannot have a product below 2^-16 with the probe's factors.
        bits = 13 if narrow else min(23, row["at_most"])
        assert row["products"] == row["product_into_accumulator"] == bits, row
        assert not narrow or row["accumulator_onto_product"] == bits, row


def test_the_document_names_the_record():
    text = (ROOT / "docs/ISA_CONFORMANCE.md").read_text()
    assert "bench/results/isa-h200.json" in text
    for key in ("gpu", "driver", "compiler"):
        assert RECORD[key] in text, RECORD[key]
