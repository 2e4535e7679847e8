"""QattnCache on a GPU, in small models with random weights, against the same in host memory."""

import pytest
import torch
from gpu import DEVICE, nrmse

import qattn

pytest.importorskip("transformers")
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM  # noqa: E402

import qattn.transformers  # noqa: E402
from qattn.transformers import QattnCache  # noqa: E402


def build(dim, device=DEVICE):
    """A model whose attention matters: random projections alone give flat attention."""
    qattn.transformers.register("qattn_f16", "f16")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=256, head_dim=dim, pad_token_id=0,
        bos_token_id=1, eos_token_id=None, attn_implementation="qattn_f16",
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for name, weight in model.named_parameters():
        if "q_proj.weight" in name:
            weight.data.mul_(6)
    return model.half().to(device)


def tokens(batch=2, length=320):
    return torch.randint(2, 128, (batch, length), generator=torch.Generator().manual_seed(1))


def logits(model, ids, cache, prompt=300, mask=None):
    """Behind the prompt, a token at a time."""
    parts = []
    for start, stop in [(0, prompt), *((n, n + 1) for n in range(prompt, ids.shape[1]))]:
        given = {}
        if mask is not None:
            positions = (mask.cumsum(1)[:, start:stop] - 1).clamp_min(0)
            given = {"attention_mask": mask[:, :stop], "position_ids": positions}
        parts.append(model(ids[:, start:stop], past_key_values=cache, **given).logits.float())
    return torch.cat(parts[1:], 1).cpu()


CACHES = [{"window": 512}, {"tiers": [8], "window": 32}, {"tiers": [4], "window": 32},
          {"average_bits": 5.0, "budget_from": 320, "window": 16, "sinks": 0},
          {"tiers": [4], "window": 32, "k_granularity": "per_channel"}]  # fmt: skip
NAMES = ["16 bits", "8 bits", "4 bits", "mixed", "channels"]


@torch.no_grad()
@pytest.mark.parametrize("options", CACHES, ids=NAMES)
@pytest.mark.parametrize("dim", [64, 128])
def test_logits_are_the_host_caches(dim, options):
    model, on_host, ids = build(dim), build(dim, "cpu"), tokens()
    cache = QattnCache(model.config, tokens=320, **options)
    out = logits(model, ids.to(DEVICE), cache)
    assert isinstance(cache.kv, qattn.GpuKvCache) and cache.kv.length(cache.sequences[1], 1) == 320
    debias = "k_granularity" not in options  # where the GPU's cache has it
    want = logits(on_host, ids, QattnCache(model.config, debias=debias, **options))
    exact = logits(on_host, ids, DynamicCache())
    noise = nrmse(logits(model, ids.to(DEVICE), DynamicCache()), exact)  # of f16 on two machines
    error = nrmse(out, want)
    print(f"D {dim}, {options}: {error:.1e} beside the host's cache, {noise:.1e} without, "
          f"{nrmse(want, exact):.1e} from 16 bits")  # fmt: skip
    # Codes of nearly equal values may differ by one: a part of the cache's own error comes back.
    assert error < 2 * noise + 0.1 * nrmse(want, exact)


@torch.no_grad()
@pytest.mark.parametrize("dim", [64, 128])
def test_generate(dim):
    """Every token that the GPU chooses is the host's choice, or as good up to rounding."""
    model, on_host, ids = build(dim), build(dim, "cpu"), tokens(length=60)
    options = {"tiers": [8], "window": 32}
    given = {"max_new_tokens": 32, "do_sample": False}
    cache = QattnCache(model.config, tokens=128, **options)
    out = model.generate(ids.to(DEVICE), past_key_values=cache, **given).cpu()
    assert out.shape == (2, 92) and cache.kv.length(cache.sequences[0]) == 91
    want = on_host.generate(ids, past_key_values=QattnCache(model.config, **options), **given)
    print(f"D {dim}: {int((out == want)[:, 60:].sum())} of 64 tokens are the host's")
    seen = logits(on_host, out, QattnCache(model.config, **options), 59)[:, :-1]
    chosen = seen.gather(-1, out[:, 60:, None])[..., 0]
    assert float((seen.amax(-1) - chosen).max() / seen.std()) < 0.02


@torch.no_grad()
def test_padding_beams_and_prefixes():
    model, ids = build(64), tokens(length=60).to(DEVICE)
    mask = torch.ones(2, 60, dtype=torch.long, device=DEVICE)
    mask[1, :23] = 0
    both_rows = logits(model, ids, QattnCache(model.config, tokens=64), 40, mask)
    alone = logits(model, ids[1:, 23:], QattnCache(model.config, tokens=64), 17)
    assert nrmse(both_rows[1], alone[0]) < 3e-3
    given = {"max_new_tokens": 12, "do_sample": False, "num_beams": 3}
    cache = QattnCache(model.config, tokens=80)
    assert model.generate(ids, past_key_values=cache, **given).shape == (2, 72)
    assert cache.kv.sequences == 6
    prefix = QattnCache(model.config, tokens=80, sequences=4)
    model(ids[:, :30], past_key_values=prefix)
    outs = [model.generate(ids, past_key_values=prefix.fork(), max_new_tokens=8, do_sample=False)
            for _ in range(2)]  # fmt: skip
    assert torch.equal(*outs) and prefix.get_seq_length() == 30
    prefix.crop(-7)
    assert prefix.get_seq_length() == prefix.kv.length(prefix.sequences[1]) == 23
