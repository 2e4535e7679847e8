"""QattnCache in a small model with keys as loud as Qwen2.5's, against K with a scale a channel."""

import pytest
import torch
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

import qattn.transformers
from qattn.transformers import QattnCache

pytestmark = pytest.mark.slow

SIZES = {"vocab_size": 128, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 128, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": None, "max_position_embeddings": 4096, "head_dim": 128,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}  # fmt: skip


def loud_model(size, first):
    """Random weights; layer 0's keys have a bias in eight channels that its queries hardly use."""
    qattn.transformers.register("qattn_f32", "f32")
    torch.manual_seed(0)
    config = Qwen2Config(**SIZES)
    config._attn_implementation = "qattn_f32"
    model = Qwen2ForCausalLM(config).eval()
    for name, weight in model.named_parameters():
        if "q_proj.weight" in name:
            weight.data.mul_(20)
    attention = model.model.layers[0].self_attn
    for half, share in ((0, 1.0), (64, -0.7)):
        loud = slice(first + half, first + half + 4)
        attention.k_proj.bias.data.view(2, 128)[:, loud] = size * share
        attention.q_proj.weight.data.view(4, 128, 128)[:, loud] *= 0.02
        attention.q_proj.bias.data.view(4, 128)[:, loud] = 0
    return model


@torch.no_grad()
def logits(model, ids, cache, prompt):
    """Log-probabilities of the tokens behind the prompt, which come eight at a time."""
    model(ids[:, :prompt], past_key_values=cache)
    parts = [
        model(ids[:, start : start + 8], past_key_values=cache).logits
        for start in range(prompt, ids.shape[1], 8)
    ]
    return torch.cat(parts, 1).log_softmax(-1)


# Pairs from 45 on hardly turn in so few tokens.
@pytest.mark.parametrize(
    "size, first, prompt",
    [(50, 30, 160), (200, 30, 160), (200, 0, 600), (400, 30, 160), (400, 45, 160)],
)
def test_loud_keys_at_four_bits(size, first, prompt):
    model = loud_model(size, first)
    ids = torch.randint(2, 128, (1, 760), generator=torch.Generator().manual_seed(1))
    exact = logits(model, ids, DynamicCache(), prompt)

    def divergence(**options):
        cache = QattnCache(model.config, **options)
        seen = logits(model, ids, cache, prompt)
        usage = cache.kv.usage(cache.sequences[0], 0)
        assert not usage.allowed_bytes or usage.bytes <= usage.allowed_bytes
        return (exact.exp() * (exact - seen)).sum(-1).mean().item(), usage

    budget = {"average_bits": 4.6, "window": 32, "budget_from": 700}
    for options in {}, budget:  # 4 bits, and 4 on average
        ours, usage = divergence(**options)
        channels = divergence(**options, k_granularity="per_channel")[0]
        assert usage.balanced_channels >= 2 * 8 and ours <= 1.5 * channels
    if size == 200:
        assert divergence(balance_k=False)[0] > 10 * divergence()[0]
