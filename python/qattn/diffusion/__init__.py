"""qattn for diffusion models: precision by step and layer, in diffusers, ComfyUI and others.

    import qattn.diffusion as qd
    schedule = qd.Schedule("int8_full", qd.Rule("bf16", last=5))
    with qd.attach(pipeline, schedule) as run:
        image = pipeline(prompt).images[0]
    print(run.report())

attach() reaches the attention layers of a pipeline or model and reports on them, register() makes
the attention backend "qattn" of diffusers, comfyui.override() is ComfyUI's override function.
calibrate() finds static scales. This module imports neither torch nor diffusers before one of them
is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .calibration import Calibration, Maxima, calibrate
from .place import OnAttention, Place, Scales, current_place, placed
from .scales import Clipped, StaticScales
from .schedule import Rule, Schedule

if TYPE_CHECKING:
    from . import comfyui
    from .attachment import Attachment, attach
    from .backend import register
    from .report import LayerReport, Report

#: where a name lies that needs torch or diffusers
_LATER = {
    "Attachment": "attachment",
    "LayerReport": "report",
    "Report": "report",
    "attach": "attachment",
    "comfyui": "comfyui",
    "register": "backend",
}

__all__ = [
    "Attachment",
    "Calibration",
    "Clipped",
    "LayerReport",
    "Maxima",
    "OnAttention",
    "Place",
    "Report",
    "Rule",
    "Scales",
    "Schedule",
    "StaticScales",
    "attach",
    "calibrate",
    "comfyui",
    "current_place",
    "placed",
    "register",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{_LATER[name]}", __name__)
    value = module if name == "comfyui" else getattr(module, name)
    globals()[name] = value
    return value
