"""Errors against float64, of every candidate on every family of inputs.

On a reduced shape, for float64 costs a GPU many times what 16 bits do: two heads of 512 queries
and 2048 keys, not causal. The families are those of tools/sim/recipe_sim.py, which the tests use.
"""

import math
import sys

import numpy as np
import torch

from .candidates import DTYPES, Refused, one_line
from .record import ROOT
from .shapes import Shape

sys.path.insert(0, str(ROOT / "tools" / "sim"))
import recipe_sim  # noqa: E402

FAMILIES = recipe_sim.FAMILIES
HEADS, QUERIES, KEYS = 2, 512, 2048
SAMPLED_ROWS = 64
#: Worse than any recipe (nvfp4: 0.27): what is measured is not attention on these inputs.
NOT_ATTENTION = 0.5


def error_shape(dim, queries=QUERIES, keys=KEYS):
    return Shape("errors", 1, HEADS, HEADS, queries, keys, dim, False)


def family_tensors(family, shape, io, device):
    """q, k, v (B, S, H, D): each head draws its own."""
    heads = []
    for head in range(shape.heads_q):
        rng = np.random.default_rng((3, FAMILIES.index(family), head))
        heads.append(recipe_sim.family(family, rng, shape.keys, shape.dim, shape.queries))
    stacked = (np.stack(x, axis=1)[None].astype(np.float32) for x in zip(*heads))
    return [torch.from_numpy(x).to(device, DTYPES[io]) for x in stacked]


def exact_rows(q, k, v, rows, causal):
    """Rows of one head, (S, D) each, in float64."""
    s = q[rows].double() @ k.double().T / math.sqrt(q.shape[-1])
    if causal:
        keys = torch.arange(len(k), device=q.device)
        s = s.masked_fill(keys[None] > rows[:, None] + len(k) - len(q), -math.inf)
    return s.softmax(-1) @ v.double()


def nan_fault(out):
    """Which part of a result is no number, as a text; None if none is. A sample would miss rows."""
    bad, rows = (~out.isfinite()).any(-1), out[..., 0].numel()
    return f"the result has NaN or Inf in {int(bad.sum())} of {rows} rows" if bad.any() else None


def difference(got, want):
    """NRMSE; not finite where the result is not."""
    return float((got.double() - want).norm() / want.norm())


def sampled_error(out, tensors, shape):
    """NRMSE of some rows of the first head of the first sequence and the last of the last."""
    q, k, v = tensors
    group = shape.heads_q // shape.heads_kv
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, shape.queries, (SAMPLED_ROWS,), generator=generator).to(q.device)
    got, want = [], []
    for b, h in ((0, 0), (shape.batch - 1, shape.heads_q - 1)):
        operands = q[b, :, h], k[b, :, h // group], v[b, :, h // group]
        want.append(exact_rows(*operands, rows, shape.causal))
        got.append(out[b, rows, h])
    return difference(torch.cat(got), torch.cat(want))


def fault_of(error):
    """Why a result with this NRMSE is wrong; None if it is not."""
    if not math.isfinite(error):
        return "the result, or float64's, has NaN or Inf"
    if error > NOT_ATTENTION:
        return f"NRMSE {error:.1e} against float64"
    return None


def one_error(machine, name, io, shape, tensors, want):
    """{"nrmse"}, {"refused"} or {"failed"}."""
    try:
        candidate = machine.candidate(name, io, shape, tensors)
    except Refused as reason:
        return {"refused": str(reason)}
    try:
        candidate.steps["e2e"]()
        machine.synchronize()
        error, fault = difference(candidate.out(), want), nan_fault(candidate.out())
    except RuntimeError as broken:
        return {"failed": one_line(broken)}
    finally:
        candidate.close()
    # Families are there to be hard: a large error is a finding, NaN a fault.
    if fault is None and not math.isfinite(error):
        fault = fault_of(error)
    return {"nrmse": error} if fault is None else {"failed": fault}


def family_errors(machine, names, dims, shape_of=error_shape):
    """Errors for a record: every family, head dimension and (candidate, io) of `names`."""
    found = []
    for dim in dims:
        shape = shape_of(dim)
        rows = torch.arange(shape.queries, device=machine.device)
        for family in FAMILIES:
            for io in dict.fromkeys(io for _, io in names):
                q, k, v = tensors = family_tensors(family, shape, io, machine.device)
                want = torch.stack(
                    [
                        exact_rows(q[0, :, h], k[0, :, h], v[0, :, h], rows, False)
                        for h in range(shape.heads_q)
                    ],
                    dim=1,
                )[None]
                for name in (n for n, candidate_io in names if candidate_io == io):
                    result = one_error(machine, name, io, shape, tensors, want)
                    identity = {"family": family, "dim": dim, "candidate": name, "io": io}
                    found.append(identity | result)
    return found
