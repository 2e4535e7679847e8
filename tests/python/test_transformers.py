"""attn_implementation="qattn" in small models of transformers with random weights."""

import copy

import pytest
import torch
from cases import nrmse
from transformers import (
    AttentionInterface,
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5EncoderModel,
    ViTConfig,
    ViTModel,
)

import qattn
import qattn.transformers

RECIPES = {"qattn_f32": "f32", "qattn": "int8_full"}
TIGHT = 2e-6
# Bounds of int8_full: two to three times what was measured. Random weights keep it small, because
# the residual stream outweighs the attention.
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 128}  # fmt: skip
TEXT = {**SMALL, "vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
        "max_position_embeddings": 256}  # fmt: skip
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 16}


@pytest.fixture(autouse=True, scope="module")
def registered():
    for name, recipe in RECIPES.items():
        qattn.transformers.register(name, recipe)


def models(kind, config, *names):
    """The same weights under several attention implementations, "eager" first."""
    torch.manual_seed(0)
    built = []
    for name in ("eager", *names):
        own = copy.deepcopy(config)
        own._attn_implementation = name
        built.append(kind(own).eval())
        built[-1].load_state_dict(built[0].state_dict())
        assert built[-1].config._attn_implementation == name
    return built


def sharpen(model, factor=6.0):
    """Random projections give flat attention; larger queries make it matter what a query sees."""
    for name, weight in model.named_parameters():
        if "q_proj.weight" in name or "query.weight" in name or name.endswith(".q.weight"):
            weight.data.mul_(factor)
    return model


def compare(kind, config, inputs, keep=None):
    """NRMSE of float32 and of int8_full against eager, over the positions in `keep`."""
    built = models(kind, config, *RECIPES)
    sharpen(built[0])
    outputs = []
    for model in built:
        model.load_state_dict(built[0].state_dict())
        with torch.no_grad():
            out = model(**inputs)[0]
        outputs.append(out if keep is None else out[keep])
    return [nrmse(out, outputs[0]) for out in outputs[1:]]


def tokens(batch=2, length=40):
    return torch.randint(2, 128, (batch, length), generator=torch.Generator().manual_seed(1))


def padding(side, lengths=(40, 25)):
    mask = torch.zeros(2, 40, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, slice(40 - length, 40) if side == "left" else slice(0, length)] = 1
    return mask


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("kind, config, bound", [
    (LlamaForCausalLM, LlamaConfig(**GROUPED), 8e-3), (BertModel, BertConfig(**TEXT), 1e-4),
], ids=["llama", "bert"])  # fmt: skip
def test_text_models(kind, config, bound, side):
    inputs = {"input_ids": tokens()}
    keep = None
    if side is not None:
        inputs["attention_mask"] = padding(side)
        keep = inputs["attention_mask"].bool()
    tight, loose = compare(kind, config, inputs, keep)
    assert tight < TIGHT and 1e-6 < loose < bound


def test_vit():
    config = ViTConfig(**SMALL, image_size=32, patch_size=8)
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    tight, loose = compare(ViTModel, config, {"pixel_values": pixels})
    assert tight < TIGHT and 1e-6 < loose < 1e-3


@pytest.mark.parametrize("kind, config", [
    (MistralForCausalLM, MistralConfig(**GROUPED, sliding_window=8)),
    (Gemma2ForCausalLM, Gemma2Config(**GROUPED, sliding_window=8, query_pre_attn_scalar=5,
                                     attn_logit_softcapping=1.5)),
    (GptOssForCausalLM, GptOssConfig(**GROUPED, sliding_window=8, num_local_experts=2,
                                     num_experts_per_tok=1)),
], ids=["window", "window, softcap, scaling", "window, sinks"])  # fmt: skip
def test_window_softcap_scaling_and_sinks(kind, config):
    tight, loose = compare(kind, config, {"input_ids": tokens()})
    assert tight < TIGHT and 1e-6 < loose < 0.02


def test_position_bias():
    config = T5Config(vocab_size=128, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
    inputs = {"input_ids": tokens(), "attention_mask": padding("right")}
    tight, loose = compare(T5EncoderModel, config, inputs, padding("right").bool())
    assert tight < TIGHT and 1e-6 < loose < 0.04


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind, config", [
    (LlamaForCausalLM, LlamaConfig(**GROUPED)),
    (MistralForCausalLM, MistralConfig(**GROUPED, sliding_window=8)),
], ids=["llama", "mistral"])  # fmt: skip
def test_generate_gives_the_tokens_of_eager(kind, config, padded):
    eager, own = models(kind, config, "qattn_f32")
    sharpen(eager)
    own.load_state_dict(eager.state_dict())
    mask = padding("left") if padded else torch.ones(2, 40, dtype=torch.long)
    options = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False}
    expected, out = (m.generate(tokens(), **options) for m in (eager, own))
    assert out.shape == (2, 64) and torch.equal(out, expected)
    assert len(set(out[0, 40:].tolist())) > 3  # not one token over and over


@pytest.mark.parametrize("padded", [False, True])
def test_generate_with_the_default_recipe(padded):
    """int8_full: every step's logits beside eager's for the same tokens, and the tokens that are
    eager's wherever its choice is clearer than the recipe's error."""
    eager, own = models(LlamaForCausalLM, LlamaConfig(**GROUPED), "qattn")
    sharpen(eager)
    own.load_state_dict(eager.state_dict())
    mask = padding("left") if padded else torch.ones(2, 40, dtype=torch.long)
    out = own.generate(tokens(), attention_mask=mask, max_new_tokens=24, do_sample=False,
                       output_logits=True, return_dict_in_generate=True)  # fmt: skip
    new = out.sequences[:, 40:]
    assert new.shape == (2, 24) and len(set(new[0].tolist())) > 3
    longer = torch.cat([mask, torch.ones_like(new)], 1)
    places = (longer.cumsum(1) - 1).clamp(min=0)  # as generate() counts them
    with torch.no_grad():
        expected = eager(out.sequences, attention_mask=longer, position_ids=places).logits
    expected, logits = expected[:, 39:-1], torch.stack(out.logits, 1)
    steps = [nrmse(logits[:, i], expected[:, i]) for i in range(24)]
    assert 1e-6 < min(steps) and max(steps) < 8e-3  # test_text_models' bound
    best = expected.topk(2).values
    clear = best[..., 0] - best[..., 1] > 0.1 * expected.std()  # twelve times the largest error
    assert clear.float().mean() > 0.6
    assert torch.equal(new[clear], expected.argmax(-1)[clear])


def test_prefill_in_pieces():
    """Several queries after a filled cache: the mask is not the one of is_causal."""
    eager, own = models(LlamaForCausalLM, LlamaConfig(**GROUPED), "qattn_f32")
    with torch.no_grad():
        whole = eager(tokens()).logits
        first = own(tokens()[:, :25], use_cache=True)
        second = own(tokens()[:, 25:], past_key_values=first.past_key_values)
    assert nrmse(torch.cat([first.logits, second.logits], 1), whole) < TIGHT


def test_compile_of_a_model():
    torch._dynamo.reset()
    _, own = models(LlamaForCausalLM, LlamaConfig(**GROUPED), "qattn")
    compiled = torch.compile(own, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(
            compiled(tokens(), use_cache=False).logits, own(tokens(), use_cache=False).logits
        )


def layer(name="qattn_f32", **options):
    """One call as an attention layer makes it: 10 queries, 20 keys, no mask."""
    module = torch.nn.Identity()
    module.is_causal = False
    q, k, v = (torch.randn(1, 2, n, 16, generator=torch.Generator().manual_seed(n))
               for n in (10, 20, 20))  # fmt: skip
    given = {"query": q, "key": k, "value": v, "attention_mask": None} | options
    return AttentionInterface()[name](module, **given)[0]


def test_no_argument_is_ignored():
    plain = layer()
    assert plain.shape == (1, 10, 2, 16)
    assert torch.equal(layer(position_ids=torch.arange(10), use_cache=True, head_mask=None), plain)
    for options in (
        {"scaling": 0.1},
        {"softcap": 0.5},
        {"s_aux": torch.ones(2)},
        {"is_causal": True},
        {"position_bias": torch.randn(1, 2, 10, 20)},
        {"attention_mask": torch.rand(1, 1, 10, 20) > 0.5},
    ):
        assert not torch.allclose(layer(**options), plain, atol=1e-3), options
    causal = torch.ones(10, 20, dtype=torch.bool).tril()
    bias = torch.randn(1, 2, 10, 20)
    torch.testing.assert_close(
        layer(is_causal=True, position_bias=bias),
        layer(attention_mask=bias.masked_fill(~causal, -torch.inf)),
    )
    for kind in (torch.bool, torch.float32):
        mask = causal if kind is torch.bool else torch.where(causal, 0.0, -torch.inf)
        torch.testing.assert_close(layer(attention_mask=mask), layer(is_causal=True))
    assert torch.equal(layer(sliding_window=20), plain)


def test_window_of_a_layer_without_a_mask():
    q, k, v = (torch.randn(1, 2, 20, 16, generator=torch.Generator().manual_seed(n))
               for n in range(3))  # fmt: skip
    behind = torch.arange(20)[:, None] - torch.arange(20)
    visible = (behind >= 0) & (behind < 5)
    tensors = {"query": q, "key": k, "value": v}
    whole = layer(**tensors, is_causal=True, sliding_window=5)
    torch.testing.assert_close(whole, layer(**tensors, attention_mask=visible))
    tensors["query"] = q[:, :, -1:]
    torch.testing.assert_close(layer(**tensors, is_causal=True, sliding_window=5), whole[:, -1:])


@pytest.mark.parametrize("options, words", [
    ({"dropout": 0.1}, "dropout"), ({"output_attentions": True}, "output_attentions"),
    ({"head_mask": torch.ones(2)}, "head_mask"), ({"cache": object()}, "cache"),
    ({"cu_seq_lens_q": torch.tensor([0, 4, 10])}, "cu_seq_lens_q"),
    ({"sliding_window": 4}, "sliding_window"),
], ids=lambda x: x if isinstance(x, str) else "")  # fmt: skip
def test_refused_in_a_layer(options, words):
    with pytest.raises(qattn.Unsupported, match=words):
        layer(**options)


def test_training_is_refused():
    config = LlamaConfig(**GROUPED, attention_dropout=0.1)
    _, own = models(LlamaForCausalLM, config, "qattn")
    with pytest.raises(qattn.InvalidArgument, match="requires a gradient"):
        own(tokens())
    with torch.no_grad(), pytest.raises(qattn.Unsupported, match="dropout"):
        own.train()(tokens())


@pytest.mark.parametrize("recipe, backward", [("int8", "forward"), ("fp8", "16bit")])
def test_training(recipe, backward):
    """Gradients of all weights, as with torch's attention; padding as a mask."""
    qattn.transformers.register("qattn_training", recipe, backward=backward)
    theirs, own = models(LlamaForCausalLM, LlamaConfig(**GROUPED), "qattn_training")
    ids, mask = tokens(), torch.ones_like(tokens())
    mask[1, -3:] = 0
    made = []
    for model in (theirs, own):
        model.train()
        model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
        made.append({name: x.grad for name, x in model.named_parameters()})
    for name, x in made[0].items():
        assert nrmse(made[1][name], x) < (2e-2 if recipe == "int8" else 0.2), name
    with pytest.raises(qattn.InvalidArgument, match="backward: 'own'"):
        qattn.transformers.register("qattn_training", recipe, backward="own")


def test_registration():
    with pytest.raises(qattn.InvalidArgument, match="int7"):
        qattn.transformers.register("other", "int7")
    for name in ("sdpa", "eager", "flash_attention_2", "", 7):
        with pytest.raises(qattn.InvalidArgument, match="name"):
            qattn.transformers.register(name)
    assert "other" not in AttentionInterface()
    qattn.transformers.register("qattn_changing", "f32")
    before = layer("qattn_changing")
    qattn.transformers.register("qattn_changing", qattn.recipe("nvfp4"))
    assert not torch.allclose(layer("qattn_changing"), before, atol=1e-3)
