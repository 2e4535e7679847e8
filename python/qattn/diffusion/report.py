"""Which attention layers of a model were reached, by what, how often, on which steps."""

from __future__ import annotations

import collections
import dataclasses

from .place import Place


class Counts:
    """Calls by layer and by the name of what computed them, and the steps of those calls."""

    def __init__(self) -> None:
        self.calls: dict[str, collections.Counter[str]] = {}
        self.steps: dict[tuple[str, str], set[int]] = {}

    def add(self, place: Place, name: str) -> None:
        calls = self.calls.get(place.layer)
        if calls is None:
            calls = self.calls[place.layer] = collections.Counter()
        calls[name] += 1
        if place.step is not None:
            steps = self.steps.get((place.layer, name))
            if steps is None:
                steps = self.steps[place.layer, name] = set()
            steps.add(place.step)

    def of_layer(
        self, layer: str, kind: str, forwards: int, missed: int, answered: int = 0
    ) -> LayerReport:
        calls = dict(self.calls.get(layer, {}))
        steps = {name: tuple(sorted(self.steps.get((layer, name), ()))) for name in calls}
        return LayerReport(layer, kind, forwards, calls, steps, missed, answered)


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """One attention layer: what ran it."""

    layer: str  #: its name in the model
    kind: str  #: its class
    forwards: int  #: how often its forward() ran
    calls: dict[str, int]  #: attention calls that were seen, by recipe ("torch": torch's own)
    steps: dict[str, tuple[int, ...]]  #: the steps of those calls, where they are known
    missed: int  #: how often its forward() ran without an attention call that was seen
    #: how often another answered for it: a cache of diffusers, a hook that skips it
    answered: int = 0

    @property
    def reached(self) -> bool:
        """Did it run, and was its attention seen whenever it ran?"""
        return bool(self.calls) and self.missed == 0


@dataclasses.dataclass(frozen=True)
class Report:
    """Every attention layer of what was attached; str() is a table."""

    layers: tuple[LayerReport, ...]

    @property
    def reached(self) -> tuple[LayerReport, ...]:
        """Layers whose every call went through the schedule."""
        return tuple(x for x in self.layers if x.reached)

    @property
    def unreached(self) -> tuple[LayerReport, ...]:
        """Layers that ran and computed their attention by other means, at least once."""
        return tuple(x for x in self.layers if x.missed)

    @property
    def idle(self) -> tuple[LayerReport, ...]:
        """Layers that did not run, or for which others answered whenever they ran."""
        return tuple(x for x in self.layers if not x.reached and not x.missed)

    def __str__(self) -> str:
        rows = [("layer", "computed by", "calls", "steps")]
        for layer in self.layers:
            for name, calls in sorted(layer.calls.items()):
                rows.append((layer.layer, name, str(calls), spans(layer.steps.get(name, ()))))
            if layer.missed:
                rows.append((layer.layer, f"NOT REACHED ({layer.kind})", str(layer.missed), ""))
            if layer.answered:
                rows.append((layer.layer, "another's answer", str(layer.answered), ""))
            if not (layer.calls or layer.missed or layer.answered):
                rows.append((layer.layer, "did not run", "0", ""))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [
            "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths)), row[3]]).rstrip()
            for row in rows
        ]
        lines.append(
            f"{len(self.reached)} reached, {len(self.unreached)} not reached, "
            f"{len(self.idle)} did not run"
        )
        return "\n".join(lines)


def spans(steps: tuple[int, ...]) -> str:
    """Steps in few characters: (0, 1, 2, 5) is "0-2, 5"."""
    parts: list[list[int]] = []
    for step in sorted(steps):
        if parts and parts[-1][1] == step - 1:
            parts[-1][1] = step
        else:
            parts.append([step, step])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
