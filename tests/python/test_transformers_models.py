"""attn_implementation="qattn" in models of every kind: right, refused by name, or said to be
unreached."""

import copy
import warnings

import pytest
import torch
import transformers
from cases import nrmse
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import qattn
import qattn.transformers

TEXT = {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 64}  # fmt: skip
SEQ2SEQ = {"vocab_size": 99, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
           "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
           "decoder_ffn_dim": 64, "pad_token_id": 0, "decoder_start_token_id": 2}  # fmt: skip
T5 = {"vocab_size": 99, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4}
BLOOM = {"vocab_size": 99, "hidden_size": 64, "n_layer": 2, "n_head": 4}
RIGHT = {
    "LlamaForCausalLM": TEXT,
    "PegasusXForConditionalGeneration": SEQ2SEQ,  # its layers never say is_causal
    "BartForConditionalGeneration": SEQ2SEQ,
    "LongT5ForConditionalGeneration": T5,  # these two have _supports_sdpa = False
    "SwitchTransformersForConditionalGeneration": T5 | {
        "num_sparse_encoder_layers": 0, "num_sparse_decoder_layers": 0},
    "GPT2LMHeadModel": {"vocab_size": 99, "n_embd": 64, "n_layer": 2, "n_head": 4},
}  # fmt: skip
REFUSED = {
    "BloomForCausalLM": BLOOM,
    "GPTNeoXJapaneseForCausalLM": TEXT,
    "MPNetModel": TEXT,
    "FalconForCausalLM": TEXT,  # KeyError of a table of classes
    "SamVisionModel": {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
                       "image_size": 32, "patch_size": 8, "mlp_dim": 64},
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def registered():
    qattn.transformers.register("qattn", recipe="f32")


def config_of(name):
    return getattr(transformers, name).config_class(**(RIGHT | REFUSED)[name])


def made(name, kind):
    torch.manual_seed(0)
    model = getattr(transformers, name)._from_config(config_of(name), attn_implementation=kind)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight.data, std=0.1)
    return model.eval()


def inputs(padded, name):
    ids = torch.arange(3, 15)[None].repeat(2, 1)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 8:] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    return given | ({"decoder_input_ids": ids} if "ConditionalGeneration" in name else {})


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", RIGHT)
def test_right(name, padded):
    given = inputs(padded, name)
    with torch.no_grad():
        want, got = (made(name, kind)(**given).logits for kind in ("eager", "qattn"))
    seen = given["attention_mask"].bool()
    assert nrmse(got[seen], want[seen]) < 2e-6


def by_from_config(name):
    getattr(transformers, name)._from_config(config_of(name), attn_implementation="qattn")


def by_config(name):
    config = config_of(name)
    config._attn_implementation = "qattn"
    getattr(transformers, name)(config)


def by_auto_model(name):
    transformers.AutoModel.from_config(config_of(name), attn_implementation="qattn")


@pytest.mark.parametrize("door", [by_from_config, by_config, by_auto_model])
@pytest.mark.parametrize("name", REFUSED)
def test_refused_where_it_is_built(name, door):
    with pytest.raises(qattn.Unsupported, match=f"attn_implementation: {name[:5]}"):
        door(name)


def test_refused_where_it_is_loaded(tmp_path):
    made("BloomForCausalLM", "eager").save_pretrained(tmp_path)
    for kind in (transformers.AutoModelForCausalLM, transformers.BloomForCausalLM):
        with pytest.raises(qattn.Unsupported, match="Bloom"):
            kind.from_pretrained(tmp_path, attn_implementation="qattn")


@pytest.mark.parametrize("name", REFUSED)
def test_refused_once_it_is_built(name):
    model = made(name, "eager")
    for change in (
        lambda: model.set_attn_implementation("qattn"),
        lambda: model.set_attn_implementation({"": "qattn"}),
        lambda: setattr(model.config, "_attn_implementation", "qattn"),
    ):
        with pytest.raises(qattn.Unsupported, match=f"attn_implementation: {name[:5]}"):
            change()
        assert model.config._attn_implementation == "eager"


def test_set_once_it_is_built():
    given = inputs(True, "LlamaForCausalLM")
    model = made("LlamaForCausalLM", "eager")
    with torch.no_grad():
        want = model(**given).logits
        model.set_attn_implementation("qattn")
        got = model(**given).logits
    assert model.config._attn_implementation == "qattn" and nrmse(got, want) < 2e-6
    assert not torch.equal(got, want)


def two_towers(kind):
    vision = transformers.CLIPVisionConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        image_size=32, patch_size=8,
    )  # fmt: skip
    text = transformers.MPNetConfig(**TEXT)
    config = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(vision, text)
    torch.manual_seed(0)
    return transformers.VisionTextDualEncoderModel._from_config(
        config, attn_implementation=kind
    ).eval()


def test_a_part_that_computes_attention_itself():
    """MPNet's layers get the masks that they know, beside a tower that dispatches."""
    given = inputs(True, "MPNetModel") | {"pixel_values": torch.randn(2, 3, 32, 32)}
    with torch.no_grad():
        want = two_towers("eager")(**given)
        got = two_towers("qattn")(**given)
    for name in ("text_embeds", "image_embeds"):
        assert nrmse(got[name], want[name]) < 2e-6
    assert not torch.equal(got.image_embeds, want.image_embeds)


class Config(PreTrainedConfig):
    model_type = "qattn_own"
    hidden_size = 64
    num_hidden_layers = 1


class Dispatching(torch.nn.Module):
    def __init__(self, config, is_causal):
        super().__init__()
        self.config, self.is_causal = config, is_causal

    def scores(self, x, mask):
        raise NotImplementedError

    def forward(self, x, attention_mask):
        x = x.unflatten(-1, (4, 16)).transpose(1, 2)
        call = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        return call(self, x, x, x, attention_mask, scaling=0.25)[0].flatten(2)


class Computing(Dispatching):
    """What dispatches in its base and not in itself."""

    def forward(self, x, attention_mask):
        x = x.unflatten(-1, (4, 16)).transpose(1, 2)
        return eager(self, x, x, x, attention_mask, scaling=0.25)[0].flatten(2)


def eager(module, query, key, value, attention_mask, scaling, **_):
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    return (scores.softmax(-1) @ value).transpose(1, 2), None


class Own(PreTrainedModel):
    """As code comes with weights: no flag of transformers is set."""

    config_class = Config

    def __init__(self, config, kind=Dispatching, is_causal=True):
        super().__init__(config)
        self.layer = kind(config, is_causal)
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.post_init()

    def forward(self, inputs_embeds, attention_mask=None):
        mask = create_causal_mask(self.config, inputs_embeds, attention_mask, None)
        return self.layer(inputs_embeds, mask) * self.weight


def own(name, *args):
    config = Config()
    config._attn_implementation = name
    return Own(config, *args).eval()


@pytest.mark.parametrize("is_causal", [False, True])
def test_code_of_users(is_causal):
    x = torch.randn(2, 12, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = own("eager", Dispatching, is_causal)(x)
        assert nrmse(own("qattn", Dispatching, is_causal)(x), want) < 2e-6
    with pytest.raises(qattn.Unsupported, match="Own: its Computing computes attention itself"):
        own("qattn", Computing, is_causal)


def test_layers_that_tell_implementations_apart():
    """Sparse attention comes as a mask for "eager" and "sdpa" alone."""
    config = transformers.DeepseekV32Config(**TEXT)
    with pytest.raises(qattn.Unsupported, match="DeepseekV32.*tells implementations apart"):
        with torch.device("meta"):
            transformers.DeepseekV32ForCausalLM._from_config(config, attn_implementation="qattn")


def grounding_dino(name, kind):
    config = getattr(transformers, name).config_class(
        text_config=transformers.BertConfig(**TEXT), encoder_layers=1, decoder_layers=1, d_model=64,
        encoder_attention_heads=4, decoder_attention_heads=4, num_queries=4,
    )  # fmt: skip
    with torch.device("meta"):
        return getattr(transformers, name)._from_config(config, attn_implementation=kind)


@pytest.mark.parametrize("name", ["GroundingDinoModel", "MMGroundingDinoModel"])
def test_masks_of_an_outer_model(name):
    """Truth values, which "eager" adds to the scores of the BERT inside."""
    refused = pytest.raises(qattn.Unsupported, match="GroundingDinoModel.* its BertModel masks")
    with refused:
        grounding_dino(name, "qattn")
    model = grounding_dino(name, "eager")
    (text,) = (x for x in model.modules() if type(x).__name__ == "BertModel")
    for change in (
        lambda: model.set_attn_implementation("qattn"),
        lambda: model.set_attn_implementation({"text_config": "qattn"}),
        lambda: text.set_attn_implementation("qattn"),
        lambda: setattr(text.config, "_attn_implementation", "qattn"),
    ):
        with refused:
            change()
        assert text.config._attn_implementation == "eager"


def said(model, **given):
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        model(**given)
    return [str(x.message) for x in caught if "qattn" in str(x.message)]


def test_a_model_that_is_not_reached_says_so():
    config = transformers.MambaConfig(vocab_size=99, hidden_size=32, num_hidden_layers=1)
    given = {"input_ids": torch.arange(3, 9)[None]}
    model = transformers.MambaForCausalLM._from_config(config, attn_implementation="qattn").eval()
    (text,) = said(model, **given)
    assert "MambaForCausalLM" in text
    assert said(model, **given) == []  # once
    copied = copy.deepcopy(
        transformers.MambaForCausalLM._from_config(config, attn_implementation="qattn").eval()
    )
    assert len(said(copied, **given)) == 1
    for kind in ("eager", "qattn"):
        assert said(made("LlamaForCausalLM", kind), **given) == []
    model = made("LlamaForCausalLM", "qattn")
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
    assert said(model, **given) == []


def test_an_unknown_argument_names_the_layer():
    module = own("qattn").layer
    x = torch.zeros(1, 2, 4, 16)
    with pytest.raises(qattn.Unsupported, match="indices.*Dispatching"):
        AttentionInterface()["qattn"](module, x, x, x, None, indices=torch.zeros(1))
