"""ComfyUI's override function, called as ComfyUI calls it."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from cases import nrmse

import qattn
import qattn.diffusion as qd
from qattn.diffusion import Place, Rule, Schedule


def rand(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def operands(batch=2, length=10, keys=12, heads=4, size=16):
    return rand(batch, length, heads, size), *rand(2, batch, keys, heads, size, seed=2)


def comfy(q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False,
          skip_output_reshape=False, **others):  # fmt: skip
    """ComfyUI's attention_pytorch, in short."""
    if not skip_reshape:
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    if mask is not None:
        mask = mask[None] if mask.dim() == 2 else mask
        mask = mask[:, None] if mask.dim() == 3 else mask
    out = F.scaled_dot_product_attention(q, k, v, mask, scale=others.get("scale"))
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


def call(override, *args, **options):
    """As ComfyUI's wrapper calls it."""
    options["transformer_options"] = {"optimized_attention_override": override,
                                      **options.get("transformer_options", {})}  # fmt: skip
    return override(comfy, *args, **options, _inside_attn_wrapper=True)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("mask", [None, (10, 12), (2, 10, 12), (2, 4, 10, 12), (2, 1, 12)])
def test_comfyui_computes_the_same(flat, mask):
    override = qd.comfyui.override("f32")
    q, k, v = (x.transpose(1, 2) for x in operands())
    options = {"skip_reshape": True, "skip_output_reshape": True}
    if flat:
        q, k, v = (x.transpose(1, 2).flatten(2) for x in (q, k, v))
        options = {}
    if mask is not None:
        options["mask"] = rand(*mask) > 0 if mask[0] == 2 else rand(*mask)
    expected = comfy(q, k, v, 4, **options)
    out = call(override, q, k, v, 4, **options)
    torch.testing.assert_close(out, expected)
    if mask is not None:
        assert nrmse(call(override, q, k, v, 4, **{**options, "mask": None}), expected) > 0.05
    torch.testing.assert_close(call(override, q, k, v, 4, **options, scale=0.5),
                               comfy(q, k, v, 4, **options, scale=0.5))  # fmt: skip


def test_comfyui_schedules():
    schedule = Schedule("int8_full", Rule("bf16", last=1), Rule("f16", layers="input.*"),
                        Rule("torch", sigma=(14, 15)))  # fmt: skip
    override = qd.comfyui.override(schedule)
    q = rand(1, 10, 64)
    sigmas = torch.tensor([14.6, 7.0, 3.0, 0.5, 0.0])
    for i, block in ((0, ("double_block", 3)), (1, ("double_block", 3)), (1, ("input", 4)),
                     (3, ("double_block", 3))):  # fmt: skip
        options = {"sigmas": sigmas[i : i + 1].clone(), "sample_sigmas": sigmas, "block": block,
                   "block_index": 0, "cond_or_uncond": [0]}  # fmt: skip
        with torch.inference_mode():
            call(override, q, q, q, 2, transformer_options=options)
    between = {**options, "sigmas": torch.tensor([5.0])}
    assert override._place(between) == Place("double_block.3.0", 1, 5.0, "cond", 4)
    out = call(override, q, q, q, 2, transformer_options=between, low_precision_attention=False)
    assert torch.equal(out, comfy(q, q, q, 2))
    layers = {x.layer: x for x in override.report().layers}
    assert layers["double_block.3.0"].steps == {
        "torch": (0,), "int8_full": (1,), "bf16": (3,), "comfyui": (1,)
    }  # fmt: skip
    assert layers["input.4.0"].calls == {"f16": 1}
    with pytest.raises(qattn.InvalidArgument, match="step is not known"):
        call(override, q, q, q, 2)


@pytest.mark.parametrize("schedule, steps", [
    ([14.6, 7.0, 3.0, 0.5, 0.0], {14.6: 0, 7.0: 1, 5.0: 1, 3.0: 2, 0.5: 3, 0.1: 3, 20.0: None}),
    ([0.0, 0.5, 3.0, 7.0, 14.6], {0.0: 0, 0.5: 1, 2.0: 1, 3.0: 2, 7.0: 3, 9.0: 3}),  # backwards
    ([math.inf, 3.0, 0.5, 0.0], {math.inf: 0, 100.0: 0, 3.0: 1, 0.5: 2}),
    ([9.0, 3.0, 3.0, 1.0, 0.0], {9.0: 0, 3.0: None, 1.0: 3}),  # nobody tells which of the two
    ([9.0, 3.0, 5.0, 1.0, 0.0], {9.0: None, 5.0: None, 1.0: None}),  # noise in between
    ([9.0, 0.0], {9.0: 0, 1.0: 0}),
], ids=["falling", "rising", "infinite", "equal", "restarts", "one"])  # fmt: skip
def test_comfyui_steps_of_lists(schedule, steps):
    """The step, or that it is not known."""
    override = qd.comfyui.override("f32")
    for sigma, step in steps.items():
        options = {"sigmas": torch.tensor([sigma]), "sample_sigmas": torch.tensor(schedule)}
        place = override._place(options)
        assert (place.step, place.steps) == (step, len(schedule) - 1), sigma
        assert place.sigma == pytest.approx(sigma)


def test_comfyui_copies_of_options_have_the_same_override():
    """Some versions copy a model's options deeply."""
    override = qd.comfyui.override("f32")
    assert copy.deepcopy({"optimized_attention_override": override}) == {
        "optimized_attention_override": override
    }


@pytest.mark.parametrize("options, words", [
    ({"window": 3}, "window"), ({"attn_precision": torch.float16}, "attn_precision"),
    ({"heads": 3}, "heads"), ({"skip_reshape": True}, "q: .* is not a torch tensor"),
    ({"mask": torch.ones(4)}, "mask"),
], ids=["unknown", "precision", "heads", "shape", "mask"])  # fmt: skip
def test_comfyui_refuses(options, words):
    q = rand(1, 10, 64)
    with pytest.raises((qattn.InvalidArgument, qattn.Unsupported), match=words):
        call(qd.comfyui.override("f32"), q, q, q, **{"heads": 2, **options})
