"""One tier of tests: its phases one after the other, their times, and a record.

    python3 tools/tier.py check|test|test-all [--phases NAME,...] [--record FILE] [--resume]

A phase is a target of the Makefile, which alone knows the commands. The first phase that fails
ends the tier. At its end, however it ends, each phase's minutes and CPU seconds are printed, those
of its build steps by kind, and what of the budget they used (tests/budget.json, in CPU seconds).
The same as JSON is written to build/tier-TIER.json (or FILE: bench/results/ keeps the last one of
each tier).

A tier that is longer than one sitting, or than one machine, is run in parts of one commit. --resume
leaves out the phases that passed in the last run. --phases runs these alone. Either keeps the other
phases of the record that is there, if it is of this very commit. QATTN_COMMIT names the commit of a
tree that came without its repository.
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
    "test-all": ["setup-all", "configure", "build", "ctest-all", "ctest-full", "pytest", "docs",
                 "sanitize-all", "tsan", "fuzz", "arm", "wheels", "cuda-all"],
}

# The closing lines of the runners, and what they count.
# From CMake 4 on ctest names failures only where there are some.
CTEST = re.compile(r"^\d+% tests passed(?:, (\d+) tests? failed)? out of (\d+)", re.M)
PYTEST = re.compile(r"^(?=\d+ (?:passed|failed)).* in [\d.]+s\b.*$", re.M)


def counts(text):
    """(passed, failed, skipped) of every runner that closed in `text`."""
    passed = failed = skipped = 0
    for match in CTEST.finditer(text):
        failed += int(match[1] or 0)
        passed += int(match[2]) - int(match[1] or 0)
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
    if os.environ.get("QATTN_COMMIT"):
        return os.environ["QATTN_COMMIT"]
    git = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty", "--abbrev=10"],
                         capture_output=True, text=True, check=False)
    return git.stdout.strip() or "no repository"


def phases_before(tier, path):
    """What the record has of this commit, by phase; nothing of another, or of a changed tree."""
    try:
        last = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if last["tier"] != tier or last["commit"] != commit() or "dirty" in last["commit"]:
        return {}
    return {phase["phase"]: phase for phase in last["phases"]}


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


def timed_phase(name, asked):
    """Runs a phase: its entry in the record."""
    start, used, logs = time.monotonic(), cpu_seconds(), step_logs()
    status, text = run_phase(name)
    passed, failed, skipped = counts(text)
    return {"phase": name, "ok": status == 0, "processor": processor(), "cores": os.cpu_count(),
            "seconds": round(time.monotonic() - start, 1),
            "cpu_seconds": round(cpu_seconds() - used, 1), "asked": asked,
            "passed": passed, "failed": failed, "skipped": skipped, "steps": steps_since(logs)}


def record_of(tier, phases):
    """A record is good when every phase of the tier has passed."""
    totals = {key: round(sum(phase[key] for phase in phases), 1)
              for key in ("seconds", "cpu_seconds", "asked", "passed", "failed", "skipped")}
    passed = {phase["phase"] for phase in phases if phase["ok"]}
    return {"tier": tier, "commit": commit(),
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "ok": passed == set(TIERS[tier]), **totals, "phases": phases}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tier", choices=TIERS)
    parser.add_argument("--phases", help="only these, separated by commas")
    parser.add_argument("--record", type=pathlib.Path, help="also write the record to this file")
    parser.add_argument("--resume", action="store_true", help="leave out what has passed")
    args = parser.parse_args()
    args.phases = args.phases.split(",") if args.phases else TIERS[args.tier]
    for name in args.phases:
        if name not in TIERS[args.tier]:
            parser.error(f"{args.tier} has no phase {name}: {', '.join(TIERS[args.tier])}")
    return args


def main():
    args = arguments()
    tier = args.tier
    kept = args.record or ROOT / "build" / f"tier-{tier}.json"
    part = args.resume or args.phases != TIERS[tier]
    found = phases_before(tier, kept) if part else {}
    budget = json.loads((ROOT / "tests" / "budget.json").read_text()).get(tier, {})
    failed = ""
    for name in args.phases:
        if args.resume and name in found and found[name]["ok"]:
            continue
        print(f"==== make {tier}: {name}", flush=True)
        found[name] = timed_phase(name, sum(budget.get(name, {}).values()))
        if not found[name]["ok"]:
            failed = name
            break
    phases = [found[name] for name in TIERS[tier] if name in found]
    record = record_of(tier, phases)

    print(f"\nmake {tier}, {os.cpu_count()} cores, {processor()}")
    print_phases(phases)
    print(f"  {'together':<18}{clock(record['seconds']):>12}{record['cpu_seconds']:>9.0f}"
          f"{record['asked'] or '':>7}" + (f"; make {failed} failed" if failed else ""))
    for path in filter(None, [ROOT / "build" / f"tier-{tier}.json", args.record]):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{record['passed']} passed, {record['failed']} failed, {record['skipped']} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
