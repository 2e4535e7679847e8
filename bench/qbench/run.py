"""Measuring: shapes one after the other, the candidates of each in turns."""

import os
import time

import torch

from . import errors, provenance, shapes, timing
from .candidates import DTYPES, Cpu, Cuda, Emulated, Refused, machine, one_line
from .record import Record, baselines, make_cell

DEFAULT_RECIPES = {kind.__name__.lower(): kind.default_recipes for kind in (Cuda, Cpu, Emulated)}
ERROR_DIMS = (128, 64)


def names_list(text):
    return [x for x in text.split(",") if x]


def add_arguments(parser):
    parser.add_argument("-o", "--output", required=True, help="the record")
    parser.add_argument("--device", choices=list(DEFAULT_RECIPES), default="cuda")
    parser.add_argument("--library", help="libattention_bench.so (GPUs)")
    parser.add_argument(
        "--against",
        action="append",
        default=[],
        metavar="NAME=LIBRARY",
        help="another build's, that takes turns with it as RECIPE@NAME; repeatable",
    )
    parser.add_argument(
        "--beside", metavar="FILE", help="Python file with other implementations (candidates.Peers)"
    )
    parser.add_argument(
        "--shapes", help=f"groups: {', '.join(shapes.GROUPS)}; default: those of the device"
    )
    parser.add_argument(
        "--only", action="append", default=[], help="shapes whose name has this text; repeatable"
    )
    parser.add_argument(
        "--shape", action="append", default=[], help="B,Hq,Hkv,Sq,Sk,D[,Dv][,causal]; repeatable"
    )
    parser.add_argument("--recipes", help="names, or nothing for torch alone")
    parser.add_argument("--rounds", type=int, default=21, help="at most, a shape")
    parser.add_argument("--seconds", type=float, default=200, help="for the whole run")
    parser.add_argument(
        "--turn", type=float, help="seconds of a turn, whose second half counts; default: one call"
    )
    parser.add_argument("--no-errors", action="store_true", help="leave out the input families")
    parser.add_argument("--threads", type=int, help="of CPUs")
    parser.add_argument("--commit", help="where the tree is no git checkout")


def random_tensors(shape, io, device):
    torch.manual_seed(0)
    q_size = (shape.batch, shape.queries, shape.heads_q, shape.dim)
    k_size = (shape.batch, shape.keys, shape.heads_kv, shape.dim)
    v_size = (*k_size[:-1], shape.channels_v)
    return [torch.randn(s, device=device, dtype=DTYPES[io]) for s in (q_size, k_size, v_size)]


def check(device, candidate, tensors, shape):
    """Runs it twice: (NRMSE, why it is wrong or None)."""
    try:
        candidate.steps["e2e"]()
        device.synchronize()
        first = candidate.out().clone()
        candidate.steps["e2e"]()
        device.synchronize()
    except RuntimeError as broken:
        return None, one_line(broken)
    error = errors.sampled_error(first, tensors, shape)
    # torch's own backends are measured as they are; a recipe must repeat bit for bit.
    repeats = torch.equal(first, candidate.out()) or candidate.name.startswith("torch")
    fault = errors.nan_fault(first) or errors.fault_of(error)
    return error, fault or (None if repeats else "results differ between runs")


def measured_cell(shape, candidate, step, times, error):
    facts = timing.summary(times)
    facts |= candidate.facts | candidate.step_facts.get(step, {})
    if step != "quantise":
        facts["tflops"] = shape.flop() / facts["median_ms"] / 1e9
        facts["nrmse"] = error
        if "bytes_kv" in facts:
            facts["kv_gb_per_s"] = facts["bytes_kv"] / facts["median_ms"] / 1e6
    return make_cell(shape, candidate.name, candidate.io, step, **facts)


def add_clocks(cell, sampler, spans):
    clocks = sampler.summary(spans)
    if cell.measured and clocks:
        cell["clocks"] = {k: x["median"] for k, x in clocks.items()}


def measure_shape(device, shape, names, seconds, rounds, sampler, turn=None):
    """Cells of one shape. `turn`: seconds of one (timing.LongTurns); None: one call."""
    cells, accepted, nrmse, begin = [], [], {}, time.monotonic()
    for io in dict.fromkeys(io for _, io in names):
        tensors = random_tensors(shape, io, device.device)
        for name in (n for n, candidate_io in names if candidate_io == io):
            try:
                candidate = device.candidate(name, io, shape, tensors)
            except (Refused, torch.OutOfMemoryError) as reason:
                cells.append(make_cell(shape, name, io, "e2e", refused=one_line(reason)))
                continue
            error, fault = check(device, candidate, tensors, shape)
            if fault is not None:
                cells.append(make_cell(shape, name, io, "e2e", failed=fault))
                candidate.close()
                continue
            accepted.append(candidate)
            nrmse[name, io] = error
    calls = {(i, step): c for i, x in enumerate(accepted) for step, c in x.steps.items()}
    turns = timing.LongTurns(device.clock, turn) if turn else None
    times = timing.interleaved(device.clock, calls, seconds, rounds, turns) if calls else {}
    for (i, step), values in times.items():
        x = accepted[i]
        cells.append(measured_cell(shape, x, step, values, nrmse[x.name, x.io]))
        spans = turns.spans[calls[i, step]] if turns else [(begin, time.monotonic())]
        add_clocks(cells[-1], sampler, spans)
    for candidate in accepted:
        candidate.close()
    return sorted(cells, key=lambda c: names.index((c["candidate"], c["io"])))


def print_shape(shape, cells, baseline):
    base = baselines(cells, baseline).get(shape.name)
    print(shape.name)
    for cell in cells:
        if not cell.measured:
            word = "failed" if "failed" in cell else "refused"
            print(f"  {cell.label:24} {word}: {cell[word]}")
            continue
        ratio = f" {base / cell['median_ms']:5.2f}x" if base else ""
        speed = f" {cell['tflops']:8.3g} TFLOP/s" if "tflops" in cell else ""
        print(f"  {cell.label:24} {cell['median_ms']:10.3f} ms{speed}{ratio}", flush=True)


def measure_all(device, record, chosen, names, args, deadline):
    with device.sampler() as sampler:
        for i, shape in enumerate(chosen):
            left = deadline - time.monotonic()
            if left <= 0:
                text = f"the time limit of {args.seconds:g} s came first"
                record.cells += [make_cell(shape, *name, "e2e", refused=text) for name in names]
                print(f"{shape.name}\n  refused: {text}")
                continue
            seconds = left / (len(chosen) - i)
            cells = measure_shape(device, shape, names, seconds, args.rounds, sampler, args.turn)
            record.cells += cells
            print_shape(shape, cells, record.baseline)
            record.save(args.output)  # what is measured stays, whatever comes
        record.provenance["clocks"] = sampler.summary()


def run(args):
    """Exit status: 1 if a result was wrong."""
    if args.device != "cpu" and args.threads is not None:
        raise ValueError("threads: are of CPUs")
    timing.check_limits(args.seconds, args.rounds)
    if args.turn is not None and not args.turn > 0:
        raise ValueError("turn: more than 0 seconds")
    groups = shapes.DEFAULT[args.device] if args.shapes is None and not args.shape else args.shapes
    chosen = shapes.select(names_list(groups or ""), args.only, args.shape)
    recipes = DEFAULT_RECIPES[args.device] if args.recipes is None else args.recipes
    device = machine(
        args.device, args.library, args.threads or os.cpu_count(), args.against, args.beside
    )
    names = device.names(names_list(recipes))

    deadline = time.monotonic() + args.seconds
    facts = provenance.common(args.commit) | device.facts()
    facts |= {"rounds_at_most": args.rounds, "seconds_at_most": args.seconds}
    if args.turn:
        facts["seconds_a_turn"] = args.turn
    record = Record(facts)
    if not args.no_errors:
        record.errors = errors.family_errors(device, names, ERROR_DIMS)
    measure_all(device, record, chosen, names, args, deadline)
    record.provenance |= device.facts_at_the_end()
    record.save(args.output)
    for x in record.failures():
        print(f"FAILED: {x['candidate']} {x.get('family', '')}: {x['failed']}")
    return 1 if record.failures() else 0
