"""Tiny random models and pipelines of diffusers, each with the inputs of one call."""

import pytest
import torch

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")

HEADS = {"attention_head_dim": 32, "num_attention_heads": 2, "num_layers": 2}
TEXT = {"joint_attention_dim": 32, "pooled_projection_dim": 32}


def rand(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def flux():
    model = diffusers.FluxTransformer2DModel(
        **{**HEADS, **TEXT, "num_layers": 1}, in_channels=16, num_single_layers=1,
        axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    return model, {
        "hidden_states": rand(1, 64, 16), "encoder_hidden_states": rand(1, 12, 32),
        "pooled_projections": rand(1, 32), "timestep": torch.tensor([0.5]),
        "img_ids": rand(64, 3), "txt_ids": torch.zeros(12, 3),
    }  # fmt: skip


def wan():
    model = diffusers.WanTransformer3DModel(
        **HEADS, patch_size=(1, 2, 2), in_channels=4, out_channels=4, text_dim=32, freq_dim=64,
        ffn_dim=64, cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=64,
    )  # fmt: skip
    return model, {"hidden_states": rand(1, 4, 2, 16, 16), "timestep": torch.tensor([500]),
                   "encoder_hidden_states": rand(1, 20, 32)}  # fmt: skip


def qwen():
    model = diffusers.QwenImageTransformer2DModel(
        **HEADS, patch_size=2, in_channels=16, out_channels=4, joint_attention_dim=32,
        axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    return model, {
        "hidden_states": rand(2, 64, 16), "encoder_hidden_states": rand(2, 12, 32),
        "encoder_hidden_states_mask": torch.tensor([[1] * 12, [1] * 7 + [0] * 5]),
        "timestep": torch.tensor([0.5, 0.5]), "img_shapes": [[(1, 8, 8)]] * 2,
    }  # fmt: skip


def sd3():
    model = diffusers.SD3Transformer2DModel(
        **{**HEADS, **TEXT}, sample_size=16, patch_size=2, in_channels=4, out_channels=4,
        caption_projection_dim=64, pos_embed_max_size=96,
    )  # fmt: skip
    return model, {"hidden_states": rand(1, 4, 16, 16), "encoder_hidden_states": rand(1, 20, 32),
                   "pooled_projections": rand(1, 32), "timestep": torch.tensor([500])}  # fmt: skip


def pixart():
    model = diffusers.PixArtTransformer2DModel(
        **HEADS, sample_size=16, patch_size=2, in_channels=4, out_channels=8,
        cross_attention_dim=64, caption_channels=32, use_additional_conditions=False,
    )  # fmt: skip
    return model, {
        "hidden_states": rand(2, 4, 16, 16), "timestep": torch.tensor([500, 500]),
        "encoder_hidden_states": rand(2, 20, 32),
        "encoder_attention_mask": torch.tensor([[1.0] * 12 + [0.0] * 8, [1.0] * 20]),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }  # fmt: skip


def dit():
    model = diffusers.DiTTransformer2DModel(
        **HEADS, sample_size=16, patch_size=2, in_channels=4, out_channels=8,
    )  # fmt: skip
    return model, {"hidden_states": rand(1, 4, 16, 16), "timestep": torch.tensor([500]),
                   "class_labels": torch.tensor([3])}  # fmt: skip


def unet():
    model = diffusers.UNet2DConditionModel(
        sample_size=16, block_out_channels=(16, 32), layers_per_block=1, cross_attention_dim=32,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), attention_head_dim=2,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), norm_num_groups=8,
    )  # fmt: skip
    return model, {"sample": rand(1, 4, 16, 16), "timestep": torch.tensor([500]),
                   "encoder_hidden_states": rand(1, 20, 32)}  # fmt: skip


def sana():
    model = diffusers.SanaTransformer2DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=1,
        num_cross_attention_heads=2, cross_attention_head_dim=16, cross_attention_dim=32,
        caption_channels=32, sample_size=16,
    )  # fmt: skip
    return model, {"hidden_states": rand(1, 4, 16, 16), "timestep": torch.tensor([500]),
                   "encoder_hidden_states": rand(1, 20, 32)}  # fmt: skip


def build(make):
    torch.manual_seed(0)
    model, inputs = make()
    return model.eval(), inputs


@torch.no_grad()
def run(model, inputs):
    return model(**inputs)[0]


def quiet(pipeline):
    pipeline.set_progress_bar_config(disable=True)
    pipeline.transformer.eval()
    return pipeline


def wan_pipeline():
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    pipeline = diffusers.WanPipeline(transformer=build(wan)[0], vae=None, scheduler=scheduler,
                                     text_encoder=None, tokenizer=None)  # fmt: skip
    text = rand(1, 16, 32)
    return quiet(pipeline), {"prompt_embeds": text, "negative_prompt_embeds": text * 0,
                             "guidance_scale": 5.0, "height": 64, "width": 64,
                             "num_frames": 5}  # fmt: skip


def sd3_pipeline():
    unused = ("text_encoder", "tokenizer")
    nothing = {f"{kind}{n}": None for kind in unused for n in ("", "_2", "_3")}
    pipeline = diffusers.StableDiffusion3Pipeline(
        transformer=build(sd3)[0], vae=None, **nothing,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )  # fmt: skip
    return quiet(pipeline), {
        "prompt_embeds": rand(1, 16, 32), "negative_prompt_embeds": rand(1, 16, 32, seed=3),
        "pooled_prompt_embeds": rand(1, 32), "negative_pooled_prompt_embeds": rand(1, 32, seed=4),
        "height": 64, "width": 64,
    }  # fmt: skip


def operands(batch=2, length=10, keys=12, heads=4, kv_heads=4, size=16):
    return rand(batch, length, heads, size), *rand(2, batch, keys, kv_heads, size, seed=2)


class Attention(torch.nn.Module):
    """A denoiser in short: one call of torch's attention, in rank 4."""

    def forward(self, sample, timestep=None):
        q = sample.flatten(2).mT.repeat(1, 1, 4).unflatten(-1, (2, 8)).transpose(1, 2)
        out = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        return 0.1 * out.transpose(1, 2).flatten(2)[..., :4].mT.unflatten(2, sample.shape[2:])
