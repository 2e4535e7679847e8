"""A QattnCache after an exception inside a forward pass: layers hold different tokens, so nothing
goes on until reset()."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import qattn
import qattn.transformers

LAYERS = 4


class Stop(Exception):
    pass


@pytest.fixture
def model():
    qattn.transformers.register("qattn_after_errors", recipe="f32")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=LAYERS,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256,
        attn_implementation="qattn_after_errors",
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def step(model, cache, length=1):
    with torch.no_grad():
        ids = torch.arange(length)[None] % 64
        return model(input_ids=ids, past_key_values=cache).logits


def stop_in(model, layer, part):
    """The forward pass raises before that part of a layer; returns what undoes it."""

    def stop(*_):
        raise Stop

    return getattr(model.model.layers[layer], part).register_forward_pre_hook(stop)


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("layer, part", [(0, "mlp"), (2, "self_attn"), (2, "mlp"), (3, "mlp")])
def test_layers_that_differ_are_not_gone_on_with(model, layer, part, prompt):
    cache = qattn.transformers.QattnCache(model.config, window=16, sinks=0)
    if not prompt:
        step(model, cache, 20)
    hook = stop_in(model, layer, part)
    with pytest.raises(Stop):
        step(model, cache, 5)
    hook.remove()
    if layer == LAYERS - 1:  # every layer has its tokens: nothing is unequal
        step(model, cache)
        return
    for _ in range(2):
        with pytest.raises(qattn.Unsupported, match=r"reset\(\) empties the cache"):
            step(model, cache)
    for use in (cache.fork, lambda: cache.crop(-1), lambda: cache.batch_repeat_interleave(2)):
        with pytest.raises(qattn.Unsupported, match=r"call reset\(\)"):
            use()
    cache.reset()
    fresh = qattn.transformers.QattnCache(model.config, window=16, sinks=0)
    for length in (20, 3, 1):
        assert torch.equal(step(model, cache, length), step(model, fresh, length))


def test_a_layer_whose_attention_fails(model):
    cache = qattn.transformers.QattnCache(model.config, window=16, sinks=0)
    step(model, cache, 20)
    append, calls = cache.kv.append, []

    def fail(*arguments, **options):
        calls.append(arguments)
        if len(calls) > 2:
            raise Stop
        append(*arguments, **options)

    cache.kv.append = fail
    with pytest.raises(Stop):
        step(model, cache)
    cache.kv.append = append
    with pytest.raises(qattn.Unsupported, match="forward pass failed: layer 0 holds 21 tokens"):
        step(model, cache)
