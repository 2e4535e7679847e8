"""A record: one JSON file of a run. The only module that knows its layout.

{"schema": 2, "provenance": {...}, "cells": [cell], "errors": [error]}
cell: {"shape": fields of Shape, "candidate", "io": format of the tensors, "step": e2e (16-bit or
  float32 tensors in and out, quantisation included), kernel (operands already quantised), quantise
  or cached (K and V are codes from the start, Q is quantised in the call)} and either
  {"median_ms", ...} or {"refused": why} (it cannot do this) or {"failed": why} (it is wrong).
error: {"family", "dim", "candidate", "io", and "nrmse", "refused" or "failed"}.
"""

import dataclasses
import json
import pathlib

from .shapes import Shape

SCHEMA = 2
ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"


class Cell(dict):
    """One cell of a record, as the JSON has it."""

    @property
    def shape(self):
        return Shape(**self["shape"])

    @property
    def key(self):
        return (self.shape.name, self["candidate"], self["io"], self["step"])

    @property
    def label(self):
        """The row's name: candidate, the tensors' format where it is no matter of course, step."""
        usual = self["candidate"] != "torch" and self["io"] in ("bf16", self["candidate"])
        io = "" if usual else f" {self['io']}"
        step = "" if self["step"] == "e2e" and not self.get("quantises", True) else self["step"]
        return f"{self['candidate']}{io} {step}".strip()

    @property
    def measured(self):
        return "median_ms" in self


def make_cell(shape, candidate, io, step, **facts):
    identity = {"shape": dataclasses.asdict(shape), "candidate": candidate, "io": io, "step": step}
    return Cell(identity | facts)


class Record:
    def __init__(self, provenance, cells=(), errors=(), name=""):
        self.provenance, self.name = provenance, name
        self.cells = [Cell(c) for c in cells]
        self.errors = list(errors)

    @classmethod
    def load(cls, path):
        path = pathlib.Path(path)
        data = json.loads(path.read_text())
        if data.get("schema") != SCHEMA:
            raise ValueError(f"{path}: is no record of bench.py run (schema {data.get('schema')})")
        return cls(data["provenance"], data["cells"], data["errors"], path.name)

    def save(self, path):
        """Cells and errors one a line, so that two records differ by lines."""
        provenance = json.dumps(self.provenance, indent=1).replace("\n", "\n ")
        pathlib.Path(path).write_text(
            f'{{\n "schema": {SCHEMA},\n "provenance": {provenance},\n'
            f' "cells": {lines(self.cells)},\n "errors": {lines(self.errors)}\n}}\n'
        )

    def groups(self):
        """Cells by group of shapes, in the order of the record."""
        found = {}
        for cell in self.cells:
            found.setdefault(cell.shape.group, []).append(cell)
        return found

    def failures(self):
        return [x for x in (*self.cells, *self.errors) if "failed" in x]

    @property
    def machine(self):
        return self.provenance.get("gpu") or self.provenance["cpu"]

    @property
    def baseline(self):
        """(candidate, io) that speed-ups are over."""
        return ("torch flash", "bf16") if "gpu" in self.provenance else ("torch", "bf16")


def tool_record(name):
    """What another tool than `run` wrote: (record, provenance); None where there is none."""
    path = RESULTS / name
    if not path.exists():
        return None
    record = json.loads(path.read_text())
    return record, record["provenance"]


def measured_on(p):
    """When, of what and on which GPU a tool's record is."""
    driver = p["nvidia_smi"]["driver_version"]
    return f"{p['date']}, commit {p['commit']}, {p['gpu']}, driver {driver}"


def lines(items):
    return "[\n" + ",\n".join("  " + json.dumps(x) for x in items) + "\n ]"


def markdown(header, rows):
    """A table."""
    return [
        "| " + " | ".join(header) + " |",
        "|---" * len(header) + "|",
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def committed():
    """The records in the repository, CPUs first; the folder holds files of other tools, too."""
    paths = [*sorted(RESULTS.glob("cpu-*.json")), *sorted(RESULTS.glob("gpu-*.json"))]
    return [Record.load(path) for path in paths if "schema" in json.loads(path.read_text())]


def baselines(cells, baseline):
    """Milliseconds of a (candidate, io) by shape; steps besides e2e are not a baseline."""
    return {
        c.shape.name: c["median_ms"]
        for c in cells
        if c.measured and (c["candidate"], c["io"]) == baseline and c["step"] == "e2e"
    }
