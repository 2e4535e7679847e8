"""attach() with every cache and hook of diffusers: an attention layer that another answers for."""

import pytest
import torch

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
from cases import nrmse
from diffusers import hooks
from diffusion_models import build, pixart, rand, run, sd3_pipeline, wan, wan_pipeline

import qattn
import qattn.diffusion as qd

TIGHT = 1e-5
STEPS = 8
EVER = (-1, 2000)


def pyramid(pipeline=None):
    return hooks.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, cross_attention_block_skip_range=3,
        spatial_attention_timestep_skip_range=EVER, cross_attention_timestep_skip_range=EVER,
        current_timestep_callback=lambda: 500,
    )  # fmt: skip


def faster(pipeline):
    return hooks.FasterCacheConfig(
        spatial_attention_block_skip_range=2, spatial_attention_timestep_skip_range=(-1, 800),
        unconditional_batch_timestep_skip_range=(-1, 800),
        current_timestep_callback=lambda: pipeline.current_timestep,
        is_guidance_distilled=True, tensor_format="BCFHW",
        spatial_attention_block_identifiers=("blocks",),
    )  # fmt: skip


def sea(_):
    return hooks.SeaCacheConfig(
        threshold=1e3, raw_vision_callback=lambda model, args, kwargs: list(kwargs["hidden_states"])
    )


#: what enable_cache() takes, and for how many of the four layers of a Wan transformer it answers
#: at some steps: none where it skips whole blocks
CACHES = {
    "PyramidAttentionBroadcastConfig": (pyramid, 4),
    "FasterCacheConfig": (faster, 2),
    "FirstBlockCacheConfig": (lambda _: hooks.FirstBlockCacheConfig(threshold=1e3), 0),
    "MagCacheConfig": (
        lambda _: hooks.MagCacheConfig(
            threshold=1e3, max_skip_steps=2, num_inference_steps=STEPS, mag_ratios=[1.0] * STEPS
        ),
        0,
    ),
    "SeaCacheConfig": (sea, 0),
    "TaylorSeerCacheConfig": (
        lambda _: hooks.TaylorSeerCacheConfig(
            cache_interval=2, disable_cache_before_step=2, taylor_factors_dtype=torch.float32,
            cache_identifiers=["blocks.*attn1", "blocks.*attn2"],
        ),
        4,
    ),
}  # fmt: skip
#: of other models alone, or no caches; where they are tested
ELSEWHERE = {
    "TextKVCacheConfig": "test_text_keys_and_values_that_are_kept",
    "LayerSkipConfig": "test_diffusion_between.py",
    "SmoothedEnergyGuidanceConfig": "test_diffusion_between.py",
}


def sample(pipeline, inputs):
    noise = torch.Generator().manual_seed(0)
    return pipeline(**inputs, num_inference_steps=STEPS, generator=noise, output_type="latent",
                    return_dict=False)[0]  # fmt: skip


def test_every_cache_is_here():
    configs = {x for x in dir(hooks) if x.endswith("Config")}
    assert configs == {*CACHES, *ELSEWHERE}


@pytest.mark.parametrize("late", [False, True], ids=["before attach", "after"])
@pytest.mark.parametrize("name", CACHES)
def test_caches(name, late):
    make, answered = CACHES[name]
    pipeline, inputs = wan_pipeline()
    whole = sample(pipeline, inputs)
    pipeline.transformer.enable_cache(make(pipeline))
    want = sample(pipeline, inputs)
    assert nrmse(want, whole) > 1e-3  # it does cache
    if late:
        pipeline.transformer.disable_cache()
    with qd.attach(pipeline, "f32") as attached:
        if late:
            pipeline.transformer.enable_cache(make(pipeline))
        assert nrmse(sample(pipeline, inputs), want) < TIGHT
    report = attached.report()
    assert not report.unreached and len(report.reached) == len(report.layers) == 4
    assert sum(bool(x.answered) for x in report.layers) == answered
    for layer in report.layers:
        assert sum(layer.calls.values()) + layer.answered == layer.forwards
    assert sum(sum(x.calls.values()) for x in report.layers) < 4 * 2 * STEPS
    pipeline.transformer.disable_cache()
    assert nrmse(sample(pipeline, inputs), whole) == 0


def test_a_cache_of_a_model_without_the_dispatcher():
    pipeline, inputs = sd3_pipeline()
    whole = sample(pipeline, inputs)
    hooks.apply_pyramid_attention_broadcast(pipeline.transformer, pyramid())
    want = sample(pipeline, inputs)
    with qd.attach(pipeline, "f32") as attached:
        assert nrmse(sample(pipeline, inputs), want) < TIGHT < nrmse(want, whole)
    report = attached.report()
    assert not report.unreached and [x.answered for x in report.layers] == [STEPS // 2] * 2


def test_a_layer_that_attends_by_other_means_is_refused_under_a_cache():
    """A cache's hook is no excuse on the steps on which the layer itself runs."""
    from diffusers.models.attention_processor import AttnProcessor

    model, inputs = build(pixart)
    model.transformer_blocks[0].attn1.set_processor(AttnProcessor())
    hooks.apply_pyramid_attention_broadcast(model, pyramid())
    with qd.attach(model, "f32"), pytest.raises(
        qattn.Unsupported, match="transformer_blocks.0.attn1: .*AttnProcessor"
    ):
        run(model, inputs)


def test_a_cache_of_one_s_own():
    """Whoever replaces a layer's forward() may answer for it, too."""
    model, inputs = build(wan)
    layer, kept = model.blocks[0].attn1, []
    own = layer.forward

    def cached(*args, **kwargs):
        if not kept:
            kept.append(own(*args, **kwargs))
        return kept[0]

    layer.forward = cached
    with qd.attach(model, "f32") as attached:
        want = run(model, inputs)
        assert torch.equal(run(model, inputs), want)
    rows = {x.layer: x for x in attached.report().layers}
    assert rows["blocks.0.attn1"].calls == {"f32": 1} and rows["blocks.0.attn1"].answered == 1
    assert rows["blocks.1.attn1"].calls == {"f32": 2} and not attached.report().unreached
    assert "blocks.0.attn1  another's answer  1" in str(attached.report())


def test_text_keys_and_values_that_are_kept():
    """TextKVCache is for one model of diffusers alone."""
    model = diffusers.NucleusMoEImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=32,
        num_attention_heads=2, num_key_value_heads=2, joint_attention_dim=32,
        axes_dims_rope=(8, 12, 12), mlp_ratio=2.0, moe_enabled=False,
    ).eval()  # fmt: skip
    inputs = {
        "hidden_states": rand(1, 64, 16), "encoder_hidden_states": rand(1, 12, 32),
        "timestep": torch.tensor([0.5]), "img_shapes": [[(1, 8, 8)]],
    }  # fmt: skip
    want = run(model, inputs)
    model.enable_cache(hooks.TextKVCacheConfig())
    assert nrmse(run(model, inputs), want) < TIGHT
    with qd.attach(model, "f32") as attached:
        for _ in range(2):
            assert nrmse(run(model, inputs), want) < TIGHT
    report = attached.report()
    assert report.layers and len(report.reached) == len(report.layers)


def test_layerwise_casting():
    model, inputs = build(wan)
    want = run(model, inputs)
    model.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)
    cast = run(model, inputs)
    assert nrmse(cast, want) > 1e-4
    with qd.attach(model, "f32") as attached:
        assert nrmse(run(model, inputs), cast) < TIGHT
    assert len(attached.report().reached) == 4


def test_context_parallelism_is_refused():
    model, inputs = build(wan)
    for module in model.modules():
        processor = getattr(module, "processor", None)
        if hasattr(processor, "_parallel_config"):
            processor._parallel_config = object()
    with qd.attach(model, "f32"), pytest.raises(
        qattn.Unsupported, match="_parallel_config: .*context parallelism"
    ):
        run(model, inputs)
