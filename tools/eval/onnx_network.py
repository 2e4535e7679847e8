"""Runs an ONNX network of convolutions and self-attentions in torch, with attention as one step.

Network(path).run(inputs, attention=...) evaluates the graph node by node. Each chain of Einsum
(q k), Softmax and Einsum (p v) is one call of `attention`, by the name of the layer that made q.
Only the operators of OPERATORS are known; others are refused before anything runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnx.numpy_helper
import torch
from torch.nn import functional

#: (layer, q, k, v), each (B H, D, S), already scaled -> (B H, D, S)
Attention = Callable[[str, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_SCORES, _VALUES = b"bct,bcs->bts", b"bts,bcs->bct"
_PROJECTION = ".qkv.weight"  # of the convolution that makes a layer's q, k and v


def plain_attention(_layer: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q^T k) v in the operands' own dtype."""
    return torch.einsum("bts,bcs->bct", torch.einsum("bct,bcs->bts", q, k).softmax(-1), v)


@dataclasses.dataclass
class Step:
    """One node: what it does, the names that it reads and writes, and those that end with it."""

    operator: str
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, Any]
    last_use: list[str] = dataclasses.field(default_factory=list)


def _reshape(x, shape, a):
    sizes = shape.tolist()
    if not a["allowzero"]:
        sizes = [x.shape[i] if n == 0 else n for i, n in enumerate(sizes)]
    return x.reshape(sizes)


def _conv(x, weight, bias, a):
    top, left, bottom, right = a["pads"]
    if (top, left) != (bottom, right) or a["auto_pad"] != b"NOTSET":
        raise ValueError(f"Conv: pads {a['pads']} are not symmetric")
    return functional.conv2d(x, weight, bias, a["strides"], (top, left), a["dilations"], a["group"])


def _gemm(x, weight, bias, a):
    x, weight = x.mT if a["transA"] else x, weight.mT if a["transB"] else weight
    return a["alpha"] * (x @ weight) + a["beta"] * bias


def _resize(x, _, scales, a):
    if (a["mode"], a["nearest_mode"]) != (b"nearest", b"floor"):
        raise ValueError(f"Resize: mode {a['mode']!r} is not nearest, rounded down")
    return functional.interpolate(x, scale_factor=scales.tolist()[2:], mode="nearest")


def _average_pool(x, a):
    if any(a["pads"]) or a["ceil_mode"]:
        raise ValueError(f"AveragePool: pads {a['pads']} are not 0")
    return functional.avg_pool2d(x, a["kernel_shape"], a["strides"])


def _normalize(x, weight, bias, a):
    return functional.instance_norm(x, weight=weight, bias=bias, eps=a["epsilon"])


def _unsqueeze(x, axes, _):
    for axis in sorted(axes.tolist()):
        x = x.unsqueeze(axis)
    return x


#: operator: (its inputs..., attributes) -> output, or a tuple of several
OPERATORS: dict[str, Callable[..., Any]] = {
    "Add": lambda x, y, a: x + y,
    "AveragePool": _average_pool,
    "Clip": lambda x, low, high, a: x.clamp(low, high),
    "Concat": lambda *xs: torch.cat(xs[:-1], xs[-1]["axis"]),
    "Conv": _conv,
    "Cos": lambda x, a: x.cos(),
    "Div": lambda x, y, a: x / y,
    "Gemm": _gemm,
    "InstanceNormalization": _normalize,
    "Log": lambda x, a: x.log(),
    "Mul": lambda x, y, a: x * y,
    "Pow": lambda x, y, a: x**y,
    "Reciprocal": lambda x, a: 1 / x,
    "Reshape": _reshape,
    "Resize": _resize,
    "Shape": lambda x, a: torch.tensor(x.shape[a["start"] : a.get("end")]),
    "Sigmoid": lambda x, a: x.sigmoid(),
    "Sin": lambda x, a: x.sin(),
    "Split": lambda x, a: x.chunk(a["num_outputs"], a["axis"]),
    "Sqrt": lambda x, a: x.sqrt(),
    "Squeeze": lambda x, a: x.squeeze(),
    "Sub": lambda x, y, a: x - y,
    "Unsqueeze": _unsqueeze,
}


class Network:
    """A graph of an .onnx file. `layers`: the names of its attentions in the order of calls."""

    def __init__(self, path: Path) -> None:
        graph = onnx.load(path).graph
        self.constants = {
            x.name: torch.from_numpy(onnx.numpy_helper.to_array(x).copy())
            for x in graph.initializer
        }
        self.outputs = [x.name for x in graph.output]
        self.steps = _with_attention([_step(node) for node in graph.node])
        self.layers = [x.attributes["layer"] for x in self.steps if x.operator == "Attention"]
        unknown = {x.operator for x in self.steps} - OPERATORS.keys() - {"Attention"}
        if unknown:
            raise ValueError(f"{path}: has operators that are not known: {', '.join(unknown)}")
        self._forget_early()

    def _forget_early(self) -> None:
        """Tells each step which values nobody reads after it."""
        kept = {*self.constants, *self.outputs, ""}
        for step in reversed(self.steps):
            step.last_use = [x for x in dict.fromkeys(step.inputs) if x not in kept]
            kept.update(step.last_use)

    @torch.inference_mode()
    def run(
        self, inputs: dict[str, torch.Tensor], attention: Attention = plain_attention
    ) -> dict[str, torch.Tensor]:
        """The network's outputs by name."""
        values = {**self.constants, **inputs, "": None}
        for step in self.steps:
            operands = [values[x] for x in step.inputs]
            if step.operator == "Attention":
                made = attention(step.attributes["layer"], *operands)
            else:
                made = OPERATORS[step.operator](*operands, step.attributes)
            values.update(zip(step.outputs, made if isinstance(made, tuple) else (made,)))
            for name in step.last_use:
                del values[name]
        return {x: values[x] for x in self.outputs}


def _step(node: Any) -> Step:
    attributes = {x.name: onnx.helper.get_attribute_value(x) for x in node.attribute}
    return Step(node.op_type, list(node.input), list(node.output), attributes)


def _with_attention(steps: list[Step]) -> list[Step]:
    """Each chain of three nodes that is an attention as one step, in the place of its last."""
    made_by = {x: step for step in steps for x in step.outputs}
    result, layer, gone = [], "", set()
    for step in steps:
        if step.operator == "Conv" and step.inputs[1].endswith(_PROJECTION):
            layer = step.inputs[1].removesuffix(_PROJECTION)
        if step.operator == "Einsum" and step.attributes["equation"] == _VALUES:
            softmax = made_by[step.inputs[0]]
            scores = made_by[softmax.inputs[0]]
            if softmax.operator != "Softmax" or scores.attributes.get("equation") != _SCORES:
                raise ValueError(f"{step.outputs[0]}: is no product of softmax(q k) and v")
            gone.update((softmax.outputs[0], scores.outputs[0]))
            q, k = scores.inputs
            step = Step("Attention", [q, k, step.inputs[1]], step.outputs, {"layer": layer})
        result.append(step)
    return [x for x in result if x.outputs[0] not in gone]
