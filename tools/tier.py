"""One tier of tests: its phases one after the other, their times, and a record.

    python3 tools/tier.py check|test|test-all [--record FILE] [--resume]

A phase is a target of the Makefile, which alone knows the commands. The first phase that fails
ends the tier. At its end, however it ends, each phase's minutes and CPU seconds are printed, those
of its build steps by kind, and what of the budget they used (tests/budget.json, in CPU seconds).
The same as JSON is written to build/tier-TIER.json (or FILE: bench/results/ keeps the last one of
each tier). --resume goes on after the phases that passed in the last run of this tier, if that was
of this very commit.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import re
import resource
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]

TIERS = {
    # A developer's loop: what a change of a CPU file can break.
    "check": ["setup", "configure", "build", "ctest-check", "pytest-check"],
    # What CI runs.
    "test": ["setup", "configure", "build", "ctest", "pytest", "docs", "sanitize", "cuda"],
    # Everything there is.
    "test-all": ["setup-all", "configure", "build", "ctest-all", "pytest", "docs", "sanitize-all",
                 "tsan", "fuzz", "arm", "wheels", "cuda-all"],
}

# The closing lines of the runners, and what they count.
CTEST = re.compile(r"^\d+% tests passed, (\d+) tests failed out of (\d+)", re.M)
PYTEST = re.compile(r"^(?=\d+ (?:passed|failed)).* in [\d.]+s\b.*$", re.M)


def counts(text):
    """(passed, failed, skipped) of every runner that closed in `text`."""
    passed = failed = skipped = 0
    for match in CTEST.finditer(text):
        failed += int(match[1])
        passed += int(match[2]) - int(match[1])
    for line in PYTEST.findall(text):
        found = dict((word, int(number)) for number, word in re.findall(r"(\d+) (\w+)", line))
        passed += found.get("passed", 0)
        failed += found.get("failed", 0)
        skipped += found.get("skipped", 0)
    return passed, failed, skipped


#: What a build step is for, by the target that it belongs to; other targets are tests.
KINDS = {
    "qattn": "library", "qattn_emulator": "emulator", "link": "linking",
    "qattn_cli": "program", "qattn_described": "program", "qattn_model": "program",
    "_qattn": "extension", "nanobind-static": "extension",
    "qattn_emulated_kernels": "emulated kernels", "qattn_emulated_decode": "emulated kernels",
    "qattn_emulated_kv_kernels": "emulated kernels",
}
STEP = re.compile(r"^(\S+) ([\d.]+) ([\d.]+) (\d+)m([\d.]+)s (\d+)m([\d.]+)s$", re.M)


def step_logs():
    """Each build folder's list of steps (cmake/time_step.sh), and how long it is."""
    return {path: path.stat().st_size for path in (ROOT / "build").glob("**/step-times.log")}


def steps_since(before):
    """Count, seconds and CPU seconds of the build steps that the logs have gained, by kind."""
    found = {}
    for path, size in step_logs().items():
        for step in STEP.finditer(path.read_bytes()[before.get(path, 0):].decode()):
            name = "GPU code" if step[1].startswith("qattn_cuda") else KINDS.get(step[1], "tests")
            kind = found.setdefault(name, [0, 0.0, 0.0])
            kind[0] += 1
            kind[1] += float(step[3]) - float(step[2])
            kind[2] += 60 * (int(step[4]) + int(step[6])) + float(step[5]) + float(step[7])
    return {kind: {"steps": n, "seconds": round(wall, 1), "cpu_seconds": round(cpu, 1)}
            for kind, (n, wall, cpu) in sorted(found.items(), key=lambda one: -one[1][2])}


def cpu_seconds():
    """Of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_phase(name):
    """The phase's exit status and output; the output also goes to the terminal as it comes."""
    kept = []
    with subprocess.Popen(["make", "--no-print-directory", name], cwd=ROOT, text=True,
                          errors="replace", stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            kept.append(line)
    return process.returncode, "".join(kept)


def processor():
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    fields = dict(re.findall(r"^(vendor_id|cpu family|model|model name)\s*: (.*)$", text, re.M))
    return (f"{fields.get('model name', platform.machine())} "
            f"(family {fields.get('cpu family', '?')}, model {fields.get('model', '?')})")


def commit():
    git = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty", "--abbrev=10"],
                         capture_output=True, text=True, check=False)
    return git.stdout.strip() or "no repository"


def passed_before(tier):
    """Phases of the last run, in order up to the first that failed; none if the tree is another."""
    try:
        last = json.loads((ROOT / "build" / f"tier-{tier}.json").read_text())
    except (OSError, ValueError):
        return []
    if last["commit"] != commit() or "dirty" in last["commit"]:
        return []
    return last["phases"] if last["ok"] else last["phases"][:-1]


def clock(seconds):
    return f"{int(seconds) // 60:3} min {int(seconds) % 60:2} s"


def print_phases(phases):
    """A line a phase, and a line for each kind of its build steps."""
    print(f"  {'':<18}{'time':>12}{'CPU s':>9}{'asked':>7}")
    for phase in phases:
        ran, asked = phase["passed"] + phase["failed"], phase.get("asked")
        over = asked and phase["cpu_seconds"] > 1.3 * asked
        print(f"  {phase['phase']:<18}{clock(phase['seconds']):>12}{phase['cpu_seconds']:>9.0f}"
              f"{asked or '':>7}" + (f"  {ran} tests" if ran else "")
              + ("  WARNING: above 1.3 of what was asked" if over else ""))
        for kind, step in phase["steps"].items():
            print(f"    {kind:<16}{'':>12}{step['cpu_seconds']:>9.0f}{'':>7}"
                  f"  {step['steps']} steps")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tier", choices=TIERS)
    parser.add_argument("--record", type=pathlib.Path, help="also write the record to this file")
    parser.add_argument("--resume", action="store_true", help="leave out what has passed")
    args = parser.parse_args()
    budget = json.loads((ROOT / "tests" / "budget.json").read_text()).get(args.tier, {})
    phases, status = passed_before(args.tier) if args.resume else [], 0
    for name in TIERS[args.tier][len(phases):]:
        print(f"==== make {args.tier}: {name}", flush=True)
        start, used, logs = time.monotonic(), cpu_seconds(), step_logs()
        status, text = run_phase(name)
        found = counts(text)
        phases.append({"phase": name, "seconds": round(time.monotonic() - start, 1),
                       "cpu_seconds": round(cpu_seconds() - used, 1),
                       "asked": sum(budget.get(name, {}).values()),
                       "passed": found[0], "failed": found[1], "skipped": found[2],
                       "steps": steps_since(logs)})
        if status != 0:
            break
    seconds, used, asked = (sum(phase[key] for phase in phases)
                            for key in ("seconds", "cpu_seconds", "asked"))
    total = [sum(phase[key] for phase in phases) for key in ("passed", "failed", "skipped")]

    print(f"\nmake {args.tier}, {os.cpu_count()} cores, {processor()}")
    print_phases(phases)
    failed = f"; make {phases[-1]['phase']} failed" if status else ""
    print(f"  {'together':<18}{clock(seconds):>12}{used:>9.0f}{asked or '':>7}{failed}")
    record = {"tier": args.tier, "commit": commit(),
              "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
              "processor": processor(), "cores": os.cpu_count(), "ok": status == 0,
              "seconds": round(seconds, 1), "cpu_seconds": round(used, 1), "phases": phases}
    for path in filter(None, [ROOT / "build" / f"tier-{args.tier}.json", args.record]):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{total[0]} passed, {total[1]} failed, {total[2]} skipped")
    return 1 if status else 0


if __name__ == "__main__":
    sys.exit(main())
