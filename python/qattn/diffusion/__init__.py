"""qattn for diffusion models: precision by step and layer, diffusers, ComfyUI."""

from __future__ import annotations

from .place import OnAttention, Place, Scales, current_place, placed

__all__ = ["OnAttention", "Place", "Scales", "current_place", "placed"]
