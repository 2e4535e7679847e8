#!/usr/bin/env python3
"""attn_implementation="qattn" in every class of the installed transformers that can be made small.

    python tools/eval/transformers_models.py run -o RECORD [--only REGEX] [--one] [--resume]
                                                 [--jobs N]
    python tools/eval/transformers_models.py show RECORD

Each class gets random weights, and inputs with and without padding where it takes a mask, and runs
under "eager", "sdpa" and "qattn" (recipe f32) in a process of its own. RECORD is JSON: {"schema":
1, "provenance", "settings", "rows": [{"class", "module": its modeling file, "verdict", and as far
as they exist "why", "calls": how often its layers came to qattn, "error" and "sdpa": NRMSE against
eager, the largest of its outputs}]}. Verdicts: right; refused (when the implementation was set, by
name); refused in forward; wrong; differs under sdpa too; not reached (and the model said so);
silent (not reached, and it did not say so); no attention; random (eager differs from itself);
failed (another error); not made (the class could not be made small, or took no input).

run prints how many classes have each verdict, and exits with 1 where one is wrong, silent or
failed. --one takes one class of each modeling file. --resume goes on where an earlier run ended.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import re
import resource
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "bench")]

SCHEMA = 1
BOUND = 1e-4  #: NRMSE of f32 beside eager, several layers and softmax of random weights apart
PARAMETERS = 30_000_000
SECONDS = 20  #: of CPU time, a class
BAD = "wrong", "silent", "failed"
_CACHES = frozenset({
    "attentions", "cross_attentions", "decoder_attentions", "decoder_hidden_states",
    "encoder_attentions", "encoder_hidden_states", "hidden_states", "past_key_values",
})  # fmt: skip
_BASES = ("ForConditionalGeneration", "ForCausalLM", "LMHeadModel", "Model", "ForMaskedLM",
          "ForImageClassification", "ForObjectDetection")  # fmt: skip


# ---- One class -----------------------------------------------------------------------------------


def outputs(out: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Numbers that a model gave, by name; neither its caches nor what it recorded."""
    import torch

    if torch.is_tensor(out):
        if out.is_floating_point() and out.numel():
            yield path, out
    elif isinstance(out, (dict, list, tuple)):
        items = out.items() if isinstance(out, dict) else enumerate(out)
        for key, x in items:
            if key not in _CACHES:
                yield from outputs(x, f"{path}.{key}")


def error(out: Any, want: Any, seen: Any) -> float:
    """The largest NRMSE of an output; seen: (B, S) places that count, where an output has them."""
    import torch

    got, expected = dict(outputs(out)), dict(outputs(want))
    if got.keys() != expected.keys() or any(got[k].shape != x.shape for k, x in expected.items()):
        return float("inf")
    worst = 0.0
    for key, y in expected.items():
        x, y = got[key].double(), y.double()
        if seen is not None and x.shape[:2] == seen.shape:
            x, y = x[seen], y[seen]
        finite = torch.isfinite(y)
        if not torch.equal(finite, torch.isfinite(x)):
            return float("inf")
        off = (x[finite] - y[finite]).norm().item()
        if off > 1e-7:
            worst = max(worst, off / (y[finite].norm().item() + 1e-30))
    return worst


class Counted:
    """How often layers came to an attention function."""

    def __init__(self, function: Any) -> None:
        self.function, self.calls = function, 0
        self.qattn_recipe = function.qattn_recipe

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        return self.function(*args, **options)


def build(cls: Any, config: Any, kind: str, weights: Any = None) -> Any:
    import torch

    torch.manual_seed(0)
    model = cls._from_config(copy.deepcopy(config), attn_implementation=kind).eval()
    if weights is not None:
        model.load_state_dict(weights)
        return model
    for x in model.parameters():
        if x.dim() > 1:
            torch.nn.init.normal_(x.data, std=0.1)
    return model


def forward(model: Any, given: dict[str, Any]) -> tuple[Any, list[str]]:
    """What it gives, and what qattn warned of."""
    import torch

    torch.manual_seed(7)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        out = model(**copy.deepcopy(given))
    return out, [str(x.message) for x in caught if "qattn" in str(x.message)]


def short(failed: BaseException) -> str:
    return f"{type(failed).__name__}: {' '.join(str(failed).split())}"[:240]


def small(cls: Any, variant: str) -> tuple[Any, Any]:
    """(configuration, eager model). Raises ValueError with the reason."""
    import torch
    from small_models import shrunk

    try:
        config = shrunk(cls.config_class, variant)
    except Exception as failed:
        raise ValueError(short(failed)) from failed
    try:
        with torch.device("meta"):
            count = sum(x.numel() for x in cls(copy.deepcopy(config)).parameters())
    except Exception:
        count = 0  # some do not build without memory
    if count > PARAMETERS:
        raise ValueError(f"{count / 1e6:.0f} M parameters")
    try:
        return config, build(cls, config, "eager")
    except Exception as failed:
        raise ValueError(short(failed)) from failed


def trials(model: Any) -> tuple[list[tuple[dict[str, Any], Any]], str]:
    """[(inputs, what eager gives)]: without padding, and with it where there is a mask."""
    from small_models import BATCH, LENGTH, Guesses

    found: list[tuple[dict[str, Any], Any]] = []
    whys: list[str] = []
    for number, given in enumerate(Guesses(model, False).all()):
        try:
            out, _ = forward(model, given)
        except Exception as failed:
            whys.append(short(failed))
            continue
        numbers = dict(outputs(out))
        if not numbers or any(x.isnan().any() for x in numbers.values()):
            whys.append("no number, or NaN")
            continue
        found.append((given, out))
        mask = given.get("attention_mask")
        if mask is not None and mask.shape == (BATCH, LENGTH):
            again = list(Guesses(model, True).all())[number]
            try:
                found.append((again, forward(model, again)[0]))
            except Exception:
                pass  # takes no padding
        break
    return found, "inputs: " + "; ".join(dict.fromkeys(whys))


def under(cls: Any, config: Any, kind: str, weights: Any, tried: Any) -> dict[str, Any]:
    """{"error", "said"} or {"refused" or "failed"}."""
    model = build(cls, config, kind, weights)
    worst, said = 0.0, []
    for given, want in tried:
        mask = given.get("attention_mask")
        seen = mask.bool() if mask is not None and mask.dim() == 2 else None
        out, words = forward(model, given)
        worst, said = max(worst, error(out, want, seen)), said + words
    return {"error": worst, "said": said}


def attends(model: Any) -> bool:
    """Is there attention of any kind in it, by code or by name?"""
    import torch
    from qattn.transformers._code import code_of

    return any(
        isinstance(x, torch.nn.MultiheadAttention)
        or code_of(type(x)).computes
        or "Attention" in type(x).__name__
        for x in model.modules()
    )


def examine(cls: Any, counted: Counted) -> dict[str, Any]:
    """A row of the record."""
    import qattn

    from small_models import VARIANTS

    row = named(cls)
    whys: list[str] = []
    for variant in VARIANTS:
        try:
            config, eager = small(cls, variant)
            tried, why = trials(eager)
        except ValueError as failed:
            tried, why = [], str(failed)
        if tried:
            break
        whys.append(why)
    else:
        return row | {"verdict": "not made", "why": whys[0][:300]}
    if error(forward(eager, tried[0][0])[0], tried[0][1], None) > BOUND / 10:
        return row | {"verdict": "random"}
    weights = eager.state_dict()
    try:
        row["sdpa"] = under(cls, config, "sdpa", weights, tried)["error"]
    except Exception as failed:
        row["sdpa refused"] = short(failed)[:80]
    try:
        build(cls, config, "qattn")
    except qattn.QattnError as refused:
        return row | {"verdict": "refused", "why": str(refused)}
    except Exception as failed:
        return row | {"verdict": "failed", "why": short(failed)}
    counted.calls = 0
    try:
        found = under(cls, config, "qattn", weights, tried)
    except qattn.QattnError as refused:
        return row | {"verdict": "refused in forward", "why": str(refused)}
    except Exception as failed:
        return row | {"verdict": "failed", "why": short(failed)}
    row |= {"calls": counted.calls, "error": found["error"]}
    return row | {"verdict": verdict(row, found["said"], attends(eager))}


def verdict(row: dict[str, Any], said: list[str], has_attention: bool) -> str:
    if not row["error"] <= BOUND:
        return "wrong" if row.get("sdpa", 0.0) <= BOUND else "differs under sdpa too"
    if row["calls"]:
        return "right"
    if not any(row["class"] in text for text in said):
        return "silent"
    return "not reached" if has_attention else "no attention"


# ---- All classes ---------------------------------------------------------------------------------


def by_file(only: str | None) -> list[list[str]]:
    """Names of each modeling file, those first whose classes hold the most of it."""
    import transformers

    files: dict[str, list[str]] = {}
    for name, module in sorted(transformers._class_to_module.items()):
        if "modeling_" in module and name[0].isupper() and not name.endswith("PreTrainedModel"):
            if "AutoModel" not in name and (not only or re.search(only, name)):
                files.setdefault(module, []).append(name)
    ends = lambda name: [not name.endswith(end) for end in _BASES]  # noqa: E731
    return [sorted(files[module], key=lambda x: (ends(x), x)) for module in sorted(files)]


def classes(only: str | None, one: bool) -> Iterator[Iterator[Any]]:
    """A group a file, of which the first that can be made is enough, or groups of one class: the
    first of all files before the second."""
    found = by_file(only)
    turns = found if one else ([x] for t in itertools.zip_longest(*found) for x in t if x)
    for names in turns:
        yield (x for name in names if (x := model_class(name)) is not None)


def model_class(name: str) -> Any:
    import transformers

    x = getattr(transformers, name, None)
    is_model = isinstance(x, type) and issubclass(x, transformers.PreTrainedModel)
    return x if is_model and x.config_class is not None else None


def named(cls: Any) -> dict[str, Any]:
    return {"class": cls.__name__, "module": cls.__module__.rsplit("modeling_", 1)[-1]}


def apart(cls: Any, counted: Counted) -> dict[str, Any]:
    """examine() in a process that a crash or a long run ends alone."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        try:
            row = examine(cls, counted)
        except BaseException as failed:
            why = short(failed) + traceback.format_exc()[-200:]
            row = named(cls) | {"verdict": "failed", "why": why}
        with os.fdopen(writing, "w") as pipe:
            json.dump(row, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if text:
        return json.loads(text)
    why = f"ended by signal {status & 127}: time or memory"
    return named(cls) | {"verdict": "not made", "why": why}


def rows_of(unfinished: Path) -> list[dict[str, Any]]:
    return [json.loads(x) for x in unfinished.read_text().splitlines()]


def work(
    asked: argparse.Namespace, counted: Counted, done: dict[str, Any], unfinished: Path, part: int
) -> None:
    """Appends the rows of every asked.jobs-th group of classes, from `part` on."""
    with unfinished.open("ab", buffering=0) as keep:  # a line a write: workers share the file
        for group in itertools.islice(classes(asked.only, asked.one), part, None, asked.jobs):
            for cls in group:
                row = done.get(cls.__name__) or apart(cls, counted)
                if cls.__name__ not in done:
                    keep.write((json.dumps(row) + "\n").encode())
                if asked.one and row["verdict"] != "not made":
                    break


def run(asked: argparse.Namespace) -> int:
    import torch
    import transformers
    from qbench import provenance

    import qattn
    import qattn.transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    qattn.transformers.register("qattn", recipe="f32")
    interface = transformers.AttentionInterface()
    counted = Counted(interface["qattn"])
    transformers.AttentionInterface.register("qattn", counted)
    unfinished = Path(f"{asked.output}.rows")
    if not (asked.resume and unfinished.exists()):
        unfinished.write_text("")
    done = {x["class"]: x for x in rows_of(unfinished)}
    workers = []
    for part in range(asked.jobs):
        workers.append(os.fork())
        if workers[-1] == 0:
            work(asked, counted, done, unfinished, part)
            os._exit(0)
    for process in workers:
        if os.waitpid(process, 0)[1] != 0:
            raise RuntimeError(f"a worker failed: go on with --resume ({unfinished} has its rows)")
    rows = rows_of(unfinished)
    record = {
        "schema": SCHEMA,
        "provenance": provenance.common(asked.commit)
        | {"transformers": transformers.__version__, "torch": torch.__version__,
           "qattn": qattn.__version__, "isa": qattn.cpu_isa()},
        "settings": {"bound": BOUND, "one": asked.one, "only": asked.only},
        "rows": sorted(rows, key=lambda x: (x["module"], x["class"])),
    }  # fmt: skip
    save(record, Path(asked.output))
    unfinished.unlink()
    return show(record)


def save(record: dict[str, Any], path: Path) -> None:
    """A row a line, so that two records differ by lines."""
    head = {k: v for k, v in record.items() if k != "rows"}
    text = json.dumps(head, indent=1)[:-2]
    rows = ",\n".join(f"  {json.dumps(x)}" for x in record["rows"])
    path.write_text(f'{text},\n "rows": [\n{rows}\n ]\n}}\n')


def show(record: dict[str, Any]) -> int:
    counts = Counter(x["verdict"] for x in record["rows"])
    for name, count in counts.most_common():
        print(f"{name}: {count}")
    for row in record["rows"]:
        if row["verdict"] in BAD:
            print(json.dumps(row))
    return 1 if any(counts[x] for x in BAD) else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("-o", "--output", required=True, help="the record")
    runs.add_argument("--only", help="classes whose names this regular expression finds")
    runs.add_argument("--one", action="store_true", help="one class of each modeling file")
    runs.add_argument("--resume", action="store_true", help="go on with RECORD.rows")
    runs.add_argument("--jobs", type=int, default=1, help="how many processes")
    runs.add_argument("--commit", help="where the tree is no git checkout")
    shows = commands.add_parser("show")
    shows.add_argument("record", type=Path)
    asked = parser.parse_args()
    if asked.command == "show":
        return show(json.loads(asked.record.read_text()))
    start = time.monotonic()
    status = run(asked)
    print(f"{time.monotonic() - start:.0f} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
