"""Attention cases of other projects through qattn's doors: what both tools beside this one share.

A Call says in the words of none of them what is asked for. Two doors take it: qattn.attention on
numpy arrays, and qattn.torch on torch's tensors, sdpa() or, where it has no word, the operator
behind it. reference() computes it in float64. A verdict is right, wrong or refused; what is refused
names its reason, and so does what is wrong. Bounds of errors: `loose` of tests/python/cases.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests" / "python")]

import cases as errors  # noqa: E402
from qbench import provenance  # noqa: E402

import qattn  # noqa: E402

SCHEMA = 1
RECIPES = "f32", "bf16", "int8", "int8_full"
DOORS = "attention", "torch"
VERDICTS = "right", "wrong", "refused"


# ---- What is asked for ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Call:
    """One attention. q: (B, Hq, Sq, D), k: (B, Hkv, Sk, D), v: (B, Hkv, Sk, Dv), any strides.

    mask: bool (True = may look) or float (added), broadcasts to (B, Hq, Sq, Sk). lengths: (B), keys
    that exist. Query i stands at key i + offset, with lengths at i + its length - Sq: causal and
    the window (left, right; -1 is unlimited) count from there. sinks: (Hq) logits. slopes: (Hq),
    slope times the keys between is taken off a score.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    scale: float | None = None
    softcap: float = 0.0
    mask: np.ndarray | None = None
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    offset: int = 0
    lengths: np.ndarray | None = None
    sinks: np.ndarray | None = None
    slopes: np.ndarray | None = None
    layout: str = "bhsd"  #: of the tensors as they lie in memory, for the door that has the word

    @property
    def places(self) -> np.ndarray:
        """(B or 1, 1, Sq, Sk): how many keys a key lies behind the query's place."""
        queries, keys = self.q.shape[2], self.k.shape[2]
        first = np.array([self.offset]) if self.lengths is None else self.lengths - queries
        rows = np.arange(queries)[:, None] - np.arange(keys)
        return first[:, None, None, None] + rows

    @property
    def seen(self) -> np.ndarray | None:
        """(B or 1, 1, Sq, Sk) bool, all but the mask; none where everything may be looked at."""
        left, right = self.window
        if self.causal:
            right = 0
        if right == left == -1 and self.lengths is None:
            return None
        places = self.places
        seen = np.ones(places.shape, bool)
        if left >= 0:
            seen &= places <= left
        if right >= 0:
            seen &= places >= -right
        if self.lengths is not None:
            seen &= np.arange(self.k.shape[2]) < self.lengths[:, None, None, None]
        return seen

    def with_square_end(self) -> Call:
        """The same with its last query at its last key, where causal hides the keys behind it."""
        end = self.offset + self.q.shape[2]
        if not self.causal or self.lengths is not None or end > self.k.shape[2]:
            return self
        mask = self.mask if self.mask is None else self.mask[..., :end]
        return dataclasses.replace(self, k=self.k[:, :, :end], v=self.v[:, :, :end], mask=mask)


def reference(call: Call) -> np.ndarray:
    """(B, Hq, Sq, Dv) in float64; a query that sees no key gives 0."""
    group = call.q.shape[1] // call.k.shape[1]
    q = call.q.astype(np.float64)
    k, v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (call.k, call.v))
    scale = 1 / math.sqrt(q.shape[3]) if call.scale is None else call.scale
    s = scale * (q @ k.swapaxes(2, 3))
    if call.softcap:
        s = call.softcap * np.tanh(s / call.softcap)
    if call.slopes is not None:
        s = s - call.slopes.astype(np.float64)[:, None, None] * np.abs(call.places)
    if call.mask is not None:
        is_bool = call.mask.dtype == bool
        s = np.where(call.mask, s, -np.inf) if is_bool else s + call.mask.astype(np.float64)
    if call.seen is not None:
        s = np.where(call.seen, s, -np.inf)
    top, joins = s.max(3, keepdims=True), 0.0
    if call.sinks is not None:
        sinks = call.sinks.astype(np.float64)[:, None, None]
        top = np.maximum(top, sinks)
        joins = np.exp(sinks - top)
    p = np.exp(s - np.where(np.isneginf(top), 0.0, top))
    total = p.sum(3, keepdims=True) + joins
    return p @ v / np.where(total == 0, 1.0, total)


# ---- In the words of the doors -------------------------------------------------------------------


def by_attention(call: Call, recipe: str) -> np.ndarray:
    """qattn.attention on numpy arrays: (B, Hq, Sq, Dv)."""
    options: dict[str, Any] = {"scale": call.scale, "softcap": call.softcap or None,
                               "sinks": call.sinks, "alibi_slopes": call.slopes,
                               "layout": call.layout}  # fmt: skip
    if call.lengths is not None:
        options["seqused_k"] = call.lengths
    windowed = call.window != (-1, -1)
    if windowed or call.slopes is not None:
        call = call.with_square_end()
    at_end = call.lengths is not None or call.offset == call.k.shape[2] - call.q.shape[2]
    options["mask"] = call.mask
    if windowed and at_end:
        options |= {"causal": call.causal, "window": call.window}
    elif windowed:
        options["mask"] = joined_mask(call)
    elif call.causal and (call.lengths is not None or call.slopes is not None):
        options["causal"] = True
    elif call.causal and call.offset == 0:
        options["causal"] = "upper_left"
    elif call.causal:
        options["causal_offset"] = call.offset
    turn = (lambda x: x.swapaxes(1, 2)) if call.layout == "bshd" else (lambda x: x)
    out = qattn.attention(*map(turn, (call.q, call.k, call.v)), recipe=recipe, **options)
    return turn(out)


def by_torch(call: Call, recipe: str) -> np.ndarray:
    """qattn.torch.sdpa, or its operator for sinks, a softcap and windows: (B, Hq, Sq, Dv).

    A call of torch has one dtype: where q's is wider, k, v and the mask get it, which is exact.
    """
    import torch
    from torch.nn.attention.bias import causal_lower_right

    import qattn.torch as door

    if call.slopes is not None:
        far = call.slopes[:, None, None] * np.abs(call.places)
        mask = (0 if call.mask is None else call.mask) - far
        call = dataclasses.replace(call, mask=mask.astype(np.float32))
    call = call.with_square_end() if call.window != (-1, -1) else call
    queries, keys = call.q.shape[2], call.k.shape[2]
    own: dict[str, Any] = {}
    mask, causal = call.mask, False
    if mask is None and call.causal and call.lengths is None and call.window[1] in (-1, 0):
        if call.window[0] == -1 and call.offset == 0:
            causal = True
        elif call.window[0] == -1 and call.offset == keys - queries:
            mask = causal_lower_right(queries, keys)
        elif call.offset == 0 and queries == keys:
            causal, own["window_left"] = True, call.window[0]
    if mask is None and not causal or isinstance(mask, np.ndarray):
        mask = joined_mask(call)
    if isinstance(mask, np.ndarray):
        mask = tensor(mask if mask.ndim > 1 else mask[None])
    q, k, v = map(tensor, (call.q, call.k, call.v))
    k, v = k.to(q.dtype), v.to(q.dtype)
    if torch.is_tensor(mask) and mask.is_floating_point():
        mask = mask.to(torch.promote_types(mask.dtype, q.dtype))
    options = {"is_causal": causal, "scale": call.scale, "recipe": recipe,
               "enable_gqa": q.shape[1] != k.shape[1]}  # fmt: skip
    if call.sinks is not None:
        own["sinks"] = tensor(call.sinks)
    if call.softcap:
        own["softcap"] = call.softcap
    if own:
        out = torch.ops.qattn.attention(q, k, v, mask, **options, **own)
    else:
        out = door.sdpa(q, k, v, mask, **options)
    if out.dtype == torch.bfloat16:
        return out.view(torch.int16).numpy().view(call.q.dtype)
    return out.numpy()


def joined_mask(call: Call) -> np.ndarray | None:
    """One mask of everything that hides keys."""
    seen, mask = call.seen, call.mask
    if seen is None or mask is None:
        return mask if seen is None else seen
    return mask & seen if mask.dtype == bool else np.where(seen, mask, mask.dtype.type(-np.inf))


def tensor(x: np.ndarray) -> Any:
    """A torch tensor on the array's memory."""
    import torch

    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


# ---- Verdicts ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Verdict:
    what: str
    error: float | None = None  #: NRMSE against float64
    why: str = ""
    label: str = ""  #: which of a row's cases


#: a further rule of the case's own for recipe f32: what is wrong with an output, or nothing
Rule = Callable[[np.ndarray], str]


def judged(
    door: str, call: Call, recipe: str, reckon: Callable[[], np.ndarray], rule: Rule | None
) -> Verdict:
    """What the door makes of it; reckon gives reference(). Other errors than qattn's are wrong."""
    try:
        out = (by_attention if door == "attention" else by_torch)(call, recipe)
    except qattn.QattnError as refused:
        return Verdict("refused", why=str(refused))
    except Exception as failed:
        return Verdict("wrong", why=f"{type(failed).__name__}: {' '.join(str(failed).split())}")
    want = reckon()
    if out.shape != want.shape or out.dtype != call.q.dtype:
        return Verdict("wrong", why=f"gives {out.dtype}{list(out.shape)}")
    out = out.astype(np.float64)
    if not np.isfinite(out).all():
        return Verdict("wrong", why="gives NaN or Inf")
    if out[~want.any(axis=3)].any():
        return Verdict("wrong", why="a query that sees no key does not give 0")
    size = np.linalg.norm(want)
    error = float(np.linalg.norm(out - want) / size) if size else 0.0
    if rule is not None and recipe == "f32":
        why = rule(out)
        return Verdict("wrong" if why else "right", error, why)
    bound = errors.loose(recipe, call.q.dtype.name)
    why = "" if error <= bound else f"NRMSE {error:.1e} against float64, at most {bound:.1e}"
    return Verdict("wrong" if why else "right", error, why)


@dataclasses.dataclass
class Row:
    """A line of a record: verdicts of one or of more cases, by door and recipe."""

    name: str
    found: dict[str, dict[str, list[Verdict]]] = dataclasses.field(default_factory=dict)

    def add(self, call: Call, rule: Rule | None = None, label: str = "") -> None:
        want = functools.cache(lambda: reference(call))  # refused calls need none
        for door in DOORS:
            for recipe in RECIPES:
                verdict = judged(door, call, recipe, want, rule)
                verdict = dataclasses.replace(verdict, label=label)
                self.found.setdefault(door, {}).setdefault(recipe, []).append(verdict)

    def as_json(self) -> dict[str, Any]:
        """{"case", "runs", door: {recipe: {verdict: count}}, or its only verdict; "why"}."""
        line: dict[str, Any] = {"case": self.name}
        whys: dict[str, None] = {}
        for door, recipes in self.found.items():
            counts = {recipe: counted(verdicts) for recipe, verdicts in recipes.items()}
            line["runs"] = len(next(iter(recipes.values())))
            same = len({str(x) for x in counts.values()}) == 1
            line[door] = counts["f32"] if same else counts
            for recipe, verdicts in recipes.items():
                for x in verdicts:
                    if x.what == "wrong":
                        whys[f"{door} {recipe} {x.label}: {x.why}".replace(" :", ":")] = None
                    elif x.what == "refused":
                        whys[x.why] = None
        if whys:
            line["why"] = list(whys)
        return line


def counted(verdicts: Iterable[Verdict]) -> Any:
    counts = Counter(x.what for x in verdicts)
    return next(iter(counts)) if len(counts) == 1 else dict(counts)


# ---- Records and tables --------------------------------------------------------------------------


def totals(rows: list[Row]) -> dict[str, dict[str, dict[str, Any]]]:
    """{door: {recipe: {verdict: count, "largest": NRMSE of what is right}}}."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for door in DOORS:
        for recipe in RECIPES:
            all_of = [x for row in rows for x in row.found[door][recipe]]
            counts = Counter(x.what for x in all_of)
            largest = max((x.error or 0.0 for x in all_of if x.what == "right"), default=0.0)
            found.setdefault(door, {})[recipe] = {
                **{what: counts[what] for what in VERDICTS}, "largest": float(f"{largest:.2g}")
            }  # fmt: skip
    return found


def record(
    rows: list[Row], not_run: dict[str, int], settings: dict[str, Any], commit: str | None
) -> dict[str, Any]:
    """not_run: {what: how many}. settings: what else the provenance is to say."""
    import torch

    head = provenance.common(commit) | {
        "cpu": provenance.cpu_model(), "isa": qattn.cpu_isa(), "qattn": qattn.__version__,
        "numpy": np.__version__, "torch": torch.__version__, **settings,
    }  # fmt: skip
    return {"schema": SCHEMA, "provenance": head, "not_run": not_run, "totals": totals(rows),
            "rows": [row.as_json() for row in rows]}  # fmt: skip


def save(made: dict[str, Any], path: Path) -> None:
    """A row a line, so that two records differ by lines."""
    head = json.dumps({k: v for k, v in made.items() if k != "rows"}, indent=1)[:-2]
    rows = ",\n".join(f"  {json.dumps(x)}" for x in made["rows"])
    path.write_text(f'{head},\n "rows": [\n{rows}\n ]\n}}\n')


def show(made: dict[str, Any]) -> int:
    """Prints counts and everything that is not right; 1 where something is wrong."""
    print(f"{'door':10} {'recipe':10} {'right':>6} {'wrong':>6} {'refused':>8}  largest NRMSE")
    wrong = 0
    for door, recipes in made["totals"].items():
        for recipe, x in recipes.items():
            numbers = f"{x['right']:6} {x['wrong']:6} {x['refused']:8}"
            print(f"{door:10} {recipe:10} {numbers}  {x['largest']:.1e}")
            wrong += x["wrong"]
    for row in made["rows"]:
        if "why" in row:
            verdicts = ", ".join(f"{door} {row[door]}" for door in DOORS)
            print(f"{row['case']} ({row['runs']}): {verdicts}")
            print(*(f"    {why}" for why in row["why"]), sep="\n")
    for what, count in made["not_run"].items():
        print(f"not run: {count} {what}")
    return 1 if wrong else 0


def main(
    description: str,
    run: Callable[[argparse.Namespace], dict[str, Any]],
    more: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> int:
    """The program of a tool. run: arguments in, a record out. more: adds arguments."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="the record")
    parser.add_argument("--only", default="", help="cases whose names this expression finds")
    parser.add_argument("--commit", help="where the tree is no git checkout")
    more(parser)
    asked = parser.parse_args()
    made = run(asked)
    if asked.json is not None:
        save(made, asked.json)
    return show(made)
