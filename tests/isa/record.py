"""Joins what conformance_gpu and accumulator_width wrote on a GPU into one committed record:

    python tests/isa/record.py isa.json accumulators.json DRIVER bench/results/isa-h200.json
"""

import json
import sys


def main():
    report, accumulators, driver, target = sys.argv[1:]
    with open(report) as file:
        record = json.load(file)
    with open(accumulators) as file:
        rows = json.load(file)["accumulators"]
    operations = record.pop("operations")
    record["driver"] = driver
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in record.items()]
    for key, entries in (("accumulators", rows), ("operations", operations)):
        listed = ",\n".join("  " + json.dumps(entry) for entry in entries)
        lines.append(f' "{key}": [\n{listed}\n ]')
    with open(target, "w") as file:
        file.write("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
