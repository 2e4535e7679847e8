"""qattn.transformers.QattnCache in small models with random weights, against DynamicCache."""

import copy
import sys

import pytest
import torch
from cases import nrmse
from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
)

import qattn
import qattn.transformers
from qattn.transformers._cache import Features
from qattn.transformers import QattnCache

pytestmark = pytest.mark.slow

SMALL = {"vocab_size": 128, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 128, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": None, "max_position_embeddings": 2048}  # fmt: skip
# One page of 16 bits at the end and none at the start: nearly everything lies in tiers.
NARROW = {"window": 16, "sinks": 0}
DECODE = 4e-4  # of the whole model's logits; decode itself is allowed 2e-3 and measures 2e-4


@pytest.fixture(autouse=True, scope="module")
def registered():
    qattn.transformers.register("qattn_f32", "f32")


def build(kind=LlamaForCausalLM, config=None, dim=64, dtype=torch.float32):
    """A model whose attention matters: random projections alone give flat attention."""
    torch.manual_seed(0)
    config = config or LlamaConfig(**SMALL, head_dim=dim)
    config._attn_implementation = "qattn_f32"
    model = kind(config).eval().to(dtype)
    for name, weight in model.named_parameters():
        if "q_proj.weight" in name:
            weight.data.mul_(6)
    return model


@pytest.fixture(scope="module")
def llama():
    return build()


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def tokens(batch=2, length=40, seed=1):
    return torch.randint(2, 128, (batch, length), generator=torch.Generator().manual_seed(seed))


def left_padding(lengths, length=40):
    mask = torch.zeros(len(lengths), length, dtype=torch.long)
    for row, count in enumerate(lengths):
        mask[row, length - count :] = 1
    return mask


def logits(model, ids, cache, prompt, step=1, mask=None):
    """Logits of the tokens behind the prompt, which are given `step` at a time."""
    parts = []
    for start, stop in zip([0, *range(prompt, ids.shape[1], step)],
                           [*range(prompt, ids.shape[1], step), ids.shape[1]]):  # fmt: skip
        given = {}
        if mask is not None:
            positions = (mask.cumsum(1)[:, start:stop] - 1).clamp_min(0)
            given = {"attention_mask": mask[:, :stop], "position_ids": positions}
        parts.append(model(ids[:, start:stop], past_key_values=cache, **given).logits)
    return torch.cat(parts[1:], 1)


def generate(model, ids, cache=None, count=24, **options):
    options = {"max_new_tokens": count, "do_sample": False} | options
    return model.generate(ids, past_key_values=cache, **options)


class RoundedCache(DynamicCache):
    """Keeps keys and values in 16 bits; the first call attends to them as they come."""

    def __init__(self, dtype):
        super().__init__()
        self.kept = dtype

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        first = self.get_seq_length(layer_idx) == 0
        rounded = [x.to(self.kept).to(x.dtype) for x in (key_states, value_states)]
        whole = super().update(*rounded, layer_idx)
        return (key_states, value_states) if first else whole


# ---- Against 16 bits -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dim, kept", [(64, "float16"), (128, "float16"), (64, "bfloat16"), (80, "float16")]
)
def test_in_the_window_it_is_16_bit_attention(dim, kept):
    model = build(dim=dim)
    ids = tokens(length=100)
    cache = QattnCache(model.config, window=128, window_dtype=kept)
    out = logits(model, ids, cache, 60)
    want = logits(model, ids, RoundedCache(getattr(torch, kept)), 60)
    exact = logits(model, ids, DynamicCache(), 60)
    assert nrmse(out, want) < DECODE
    assert nrmse(exact, want) > (DECODE if kept == "bfloat16" else 5e-5)
    assert cache.get_seq_length() == 100 and cache.kv.length(cache.sequences[1], 1) == 100


@pytest.mark.parametrize("dtype, bound", [(torch.float16, 3e-3), (torch.bfloat16, 2.5e-2)])
def test_16_bit_models(dtype, bound):
    model = build(dtype=dtype)
    ids = tokens(length=100)
    cache = QattnCache(model.config)
    out = logits(model, ids, cache, 60)
    assert out.dtype == dtype
    assert nrmse(out.float(), logits(model, ids, DynamicCache(), 60).float()) < bound
    if dtype == torch.bfloat16:  # f16 would lose what is beyond its range
        big = torch.full((1, 2, 1, 64), 1e6, dtype=dtype)
        fresh = QattnCache(model.config)
        fresh.update(big, big, 0)
        fresh.store_prompt(0, torch.zeros(1, 4, 1, 64, dtype=dtype), None, None)
        assert (fresh.kv.read(fresh.sequences[0])[0] == big[0].float().numpy()).all()


@pytest.mark.parametrize("dim", [64, 128, 40])
def test_eight_bits_give_the_tokens_of_16(dim):
    model = build(dim=dim)
    ids = tokens(length=300)
    cache = QattnCache(model.config, tiers=[8], window=64)
    assert torch.equal(generate(model, ids, cache), generate(model, ids))
    used = cache.kv.usage(cache.sequences[0], 1)
    assert used.tier_tokens[0] >= 2 * (300 - 16 - 80) and used.length == 323
    ids = tokens(length=330, seed=3)
    out = logits(model, ids, QattnCache(model.config, tiers=[8], window=64), 300)
    assert 1e-4 < nrmse(out, logits(model, ids, DynamicCache(), 300)) < 6e-3


def test_error_by_bits(llama):
    ids = tokens(length=330)
    want = logits(llama, ids, DynamicCache(), 300)
    errors = {
        bits: nrmse(logits(llama, ids, QattnCache(llama.config, tiers=[bits], **NARROW), 300), want)
        for bits in (8, 4, 3, 2)
    }
    assert errors[8] < 0.1 * errors[4] and errors[4] < errors[3] < errors[2], errors
    assert errors[4] < 0.1, errors


@pytest.mark.parametrize("step", [3, 8, 30])
def test_several_tokens_at_once(llama, step):
    """Speculated tokens and long suffixes, at most 8 at a time in decode."""
    ids = tokens(length=130)
    single, several = (
        logits(llama, ids, QattnCache(llama.config, tiers=[8], window=64), 100, n)
        for n in (1, step)
    )
    assert nrmse(several, single) < 6e-3
    wide = [logits(llama, ids, QattnCache(llama.config, window=256), 100, n) for n in (1, step)]
    assert nrmse(wide[1], wide[0]) < DECODE


# ---- generate() ----------------------------------------------------------------------------------


def test_sampling(llama):
    torch.manual_seed(7)
    want = generate(llama, tokens(), do_sample=True, top_k=20)
    torch.manual_seed(7)
    out = generate(llama, tokens(), QattnCache(llama.config), do_sample=True, top_k=20)
    assert torch.equal(out, want)
    torch.manual_seed(8)
    assert not torch.equal(generate(llama, tokens(), do_sample=True, top_k=20), want)


@pytest.mark.parametrize("options", [{}, {"tiers": [4], **NARROW}], ids=["16 bits", "4 bits"])
def test_left_padding(llama, options):
    """Padding does not enter the cache: every row is what it is alone."""
    lengths, ids = (60, 37, 1), tokens(3, 80)
    mask = torch.cat([left_padding(lengths, 60), torch.ones(3, 20, dtype=torch.long)], 1)
    cache = QattnCache(llama.config, **options)
    out = logits(llama, ids, cache, 60, mask=mask)
    for row, length in enumerate(lengths):
        alone = QattnCache(llama.config, **options)
        want = logits(llama, ids[row : row + 1, 60 - length :], alone, length)
        assert nrmse(out[row], want[0]) < 1e-5
        assert cache.kv.length(cache.sequences[row], 1) == length + 20
        assert cache.kv.usage(cache.sequences[row]) == alone.kv.usage(alone.sequences[0])
    if not options:
        assert nrmse(out, logits(llama, ids, DynamicCache(), 60, mask=mask)) < DECODE


def test_generate_with_left_padding(llama):
    mask = left_padding((40, 25))
    want = generate(llama, tokens(), attention_mask=mask)
    assert torch.equal(
        generate(llama, tokens(), QattnCache(llama.config), attention_mask=mask), want
    )
    # The first piece of row 1 is padding and nothing else.
    pieces = QattnCache(llama.config)
    out = generate(llama, tokens(), pieces, attention_mask=mask, prefill_chunk_size=13)
    assert torch.equal(out, want) and pieces.kv.length(pieces.sequences[1]) == 25 + 23


@pytest.mark.parametrize("padded", [False, True])
def test_beam_search(llama, padded):
    options = {"num_beams": 4, "num_return_sequences": 2, "count": 30}
    if padded:
        options["attention_mask"] = left_padding((40, 25))
    cache = QattnCache(llama.config)
    out = generate(llama, tokens(), cache, **options)
    assert torch.equal(out, generate(llama, tokens(), **options))
    assert cache.batch_size == 8
    assert not torch.equal(out, generate(llama, tokens(), **options | {"num_beams": 2}))


def test_assisted_decoding(llama):
    """Candidates that the model turns down are cropped again."""
    helper = build()
    for weight in helper.model.layers[1].parameters():
        weight.data.mul_(0.5)
    want = generate(llama, tokens(1), count=40)
    cache = QattnCache(llama.config)
    crops = []
    cropped = cache.crop
    cache.crop = lambda count: (crops.append(count), cropped(count))
    assert torch.equal(generate(llama, tokens(1), cache, count=40, assistant_model=helper), want)
    assert any(count < 0 for count in crops)
    assert cache.kv.length(cache.sequences[0]) == cache.get_seq_length() >= 78


# ---- Windows, softcap, sinks ---------------------------------------------------------------------

GROUPED = SMALL | {"head_dim": 64}
FEATURES = [
    (MistralForCausalLM, MistralConfig(**GROUPED, sliding_window=8)),
    (Gemma2ForCausalLM, Gemma2Config(**GROUPED, sliding_window=8, query_pre_attn_scalar=5,
                                     attn_logit_softcapping=1.5)),
    (GptOssForCausalLM, GptOssConfig(**GROUPED, sliding_window=8, num_local_experts=2,
                                     num_experts_per_tok=1)),
]  # fmt: skip


@pytest.mark.parametrize("step", [1, 5])
@pytest.mark.parametrize("kind, config", FEATURES, ids=["window", "softcap", "sinks"])
def test_features_of_layers(kind, config, step):
    model = build(kind, config)
    ids = tokens(length=70)
    mask = torch.cat([left_padding((50, 35), 50), torch.ones(2, 20, dtype=torch.long)], 1)
    for given in (None, mask):
        out = logits(model, ids, QattnCache(config), 50, step, given)
        assert nrmse(out, logits(model, ids, DynamicCache(config=config), 50, step, given)) < DECODE


def test_holes_in_a_window_are_refused():
    model = build(MistralForCausalLM, MistralConfig(**GROUPED, sliding_window=8))
    mask = torch.ones(1, 40, dtype=torch.long)
    mask[0, 20] = 0
    cache = QattnCache(model.config)
    model(tokens(1), past_key_values=cache, attention_mask=mask)
    longer = torch.ones(1, 41, dtype=torch.long)
    longer[0, 20] = 0
    with pytest.raises(qattn.Unsupported, match="hides tokens between others"):
        model(tokens(1, 1), past_key_values=cache, attention_mask=longer)


# ---- Forks, crops, budgets -----------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [copy.deepcopy, QattnCache.fork])
def test_prefix_is_shared(llama, duplicate):
    ids = tokens(2, 340)
    prefix = QattnCache(llama.config, tiers=[4], window=32)
    llama(ids[:1, :300], past_key_values=prefix)
    before, read = prefix.kv.bytes(), prefix.kv.read(prefix.sequences[0], 1)
    other = duplicate(prefix)
    other.batch_repeat_interleave(2)
    assert other.kv is prefix.kv and other.batch_size == 2
    shared = prefix.kv.bytes()
    assert shared.codes == before.codes and shared.window == before.window
    both = torch.cat([ids[:1, :300].expand(2, -1), ids[:, 300:]], 1)
    out = llama(both[:, 300:], past_key_values=other).logits
    for row in range(2):
        alone = QattnCache(llama.config, tiers=[4], window=32)
        llama(both[row : row + 1, :300], past_key_values=alone)
        want = llama(both[row : row + 1, 300:], past_key_values=alone).logits
        assert nrmse(out[row], want[0]) < 1e-5
    assert prefix.get_seq_length() == 300 and other.get_seq_length() == 340
    for was, now in zip(read, prefix.kv.read(prefix.sequences[0], 1), strict=True):
        assert (was == now).all()
    used = other.sequences
    del other
    with pytest.raises(qattn.InvalidArgument, match="sequence"):
        prefix.kv.length(used[0])
    assert prefix.kv.bytes().codes == before.codes


def test_generate_from_a_prefix(llama):
    prefix = QattnCache(llama.config)
    llama(tokens(1)[:, :30], past_key_values=prefix)
    want = generate(llama, tokens(1))
    for _ in range(2):
        assert torch.equal(generate(llama, tokens(1), prefix.fork()), want)


def test_crop_and_reset(llama):
    ids = tokens(2, 60)
    mask = torch.cat([left_padding((30, 10), 30), torch.ones(2, 30, dtype=torch.long)], 1)
    cache = QattnCache(llama.config)
    want = logits(llama, ids, cache, 30, mask=mask)
    cache.crop(0)
    assert cache.get_seq_length() == 60
    cache.crop(-20)
    assert cache.get_seq_length() == 40 and cache.kv.length(cache.sequences[1]) == 20
    given = {"attention_mask": mask, "position_ids": mask.cumsum(1)[:, 40:] - 1}
    again = llama(ids[:, 40:], past_key_values=cache, **given).logits
    assert nrmse(again, want[:, 10:]) < DECODE
    other = cache.fork()
    other.layers[1].alive = ~other.layers[1].alive  # as masks of one layer's own would make it
    with pytest.raises(qattn.Unsupported, match="layers hide different tokens"):
        other.crop(-1)
    del other
    for count in (1, -61):
        with pytest.raises(qattn.InvalidArgument, match="tokens_to_remove"):
            cache.crop(count)
    cache.crop(-40)
    assert cache.get_seq_length() == 20 and cache.kv.length(cache.sequences[1]) == 0
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.batch_size == -1
    assert cache.kv.bytes().window == cache.kv.bytes().tables == 0
    logits(llama, ids[:1], cache, 30)
    assert cache.get_seq_length() == 60 and cache.batch_size == 1


def test_rows_are_selected(llama):
    ids = tokens(3, 30)
    cache = QattnCache(llama.config)
    llama(ids, past_key_values=cache)
    dropped = cache.sequences[0]
    cache.batch_select_indices(torch.tensor([False, True, True]))
    with pytest.raises(qattn.InvalidArgument, match="sequence"):
        cache.kv.length(dropped)
    cache.reorder_cache(torch.tensor([1, 1, 0]))
    order = torch.tensor([2, 2, 1])
    out = llama(tokens(3, 4, seed=5), past_key_values=cache).logits
    plain = DynamicCache()
    llama(ids[order], past_key_values=plain)
    assert nrmse(out, llama(tokens(3, 4, seed=5), past_key_values=plain).logits) < DECODE
    assert len(set(cache.sequences)) == 3


class RecordedCache(QattnCache):
    """Remembers the importance that it appends with."""

    def _append(self, layer_idx, sequences, key, value, importance=None):
        self.__dict__.setdefault("told", []).append(importance)
        super()._append(layer_idx, sequences, key, value, importance)


def test_budget_goes_where_queries_look(llama):
    ids = tokens(1, 1040)
    want = logits(llama, ids, DynamicCache(), 1000)
    options = {"average_bits": 6.5, "budget_from": 1000, **NARROW}
    for given in ({}, {"observe": 0}, {"importance": "key_norm"}):
        cache = RecordedCache(llama.config, **options, **given)
        assert nrmse(logits(llama, ids, cache, 1000), want) < 0.2
        for layer in range(2):
            used = cache.kv.usage(cache.sequences[0], layer)
            assert 6 < used.average_bits <= 6.5 and used.bytes <= used.allowed_bytes
            assert (cache.told[layer] is None) == bool(given)
            if not given:
                tiers = torch.from_numpy(cache.kv.read(cache.sequences[0], layer)[2])
                tiers = tiers[:, :960].unflatten(1, (60, 16)).float().mean(2)
                weights = cache.told[layer][0, :, :60]
                above = weights > weights.median(1, keepdim=True).values
                assert tiers[above].mean() < tiers[~above].mean() - 0.5
        assert cache.told[2:] == [None] * 80


def test_decode_steps_are_observed(llama, monkeypatch):
    seen = []
    monkeypatch.setattr(
        qattn.KvCache, "observe", lambda _, layer, rows, mass: seen.append((layer, rows, mass))
    )
    ids = tokens(2, 60)
    cache = QattnCache(llama.config, average_bits=8.0)
    logits(llama, ids, cache, 40, step=10)
    assert [(layer, rows) for layer, rows, _ in seen] == [
        (layer, cache.sequences) for layer in (0, 0, 1, 1, 0, 0, 1, 1)
    ]  # ten tokens at once are eight and two
    for _, _, mass in seen:
        torch.testing.assert_close(mass.sum(-1), torch.ones(2, 4), atol=1e-3, rtol=0)
    seen.clear()
    logits(llama, ids, QattnCache(llama.config, average_bits=8.0, observe=0), 40)
    assert not seen


def test_a_prompts_last_64_queries_are_observed(llama):
    q, k = torch.randn(1, 4, 90, 64), torch.randn(1, 2, 90, 64)

    def importance(**options):
        cache = QattnCache(llama.config, average_bits=8.0, **options)
        return cache._importance(q, k, Features(None, None, None, None))

    assert torch.equal(importance(), importance(observe=64))
    assert not torch.equal(importance(), importance(observe=63))


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_importance_of_a_prompt_is_its_mass(llama, softcap):
    cache = QattnCache(llama.config, average_bits=8.0, observe=3)
    asked = Features(0.5, softcap, None, None)
    q, k = torch.randn(1, 4, 40, 64), torch.randn(1, 2, 40, 64)
    got = cache._importance(q, k, asked)
    assert got.shape == (1, 2, 3)
    for head in range(2):
        squares = torch.zeros(3)
        for row in range(37, 40):
            for h in (2 * head, 2 * head + 1):
                s = k[0, head, : row + 1] @ q[0, h, row] * 0.5
                p = (softcap * (s / softcap).tanh() if softcap else s).softmax(0)
                p = torch.nn.functional.pad(p, (0, 48 - len(p))).reshape(3, 16).sum(1)
                squares += p**2 / 6
        torch.testing.assert_close(got[0, head], squares.sqrt())


def test_debias_is_decodes_and_stays_off_where_scores_are_capped(llama, monkeypatch):
    asked, decode = [], qattn.KvCache.decode

    def seen(*given, **options):
        asked.append(options["debias"])
        return decode(*given, **options)

    monkeypatch.setattr(qattn.KvCache, "decode", seen)
    ids, options = tokens(1, 100), {"tiers": [2], "window": 16}
    straight = logits(llama, ids, QattnCache(llama.config, **options), 90)
    biased = logits(llama, ids, QattnCache(llama.config, debias=False, **options), 90)
    layers = llama.config.num_hidden_layers
    assert asked == [True] * (len(asked) // 2) + [False] * (len(asked) // 2)
    assert len(asked) % (2 * layers) == 0 and not torch.equal(straight, biased)
    asked.clear()
    q, k = torch.randn(1, 4, 1, 64), torch.randn(1, 2, 1, 64)
    cache = QattnCache(llama.config, **options)
    logits(llama, ids[:, :20], cache, 19)
    asked.clear()
    cache._step(0, cache.sequences, q, k, k, torch.empty_like(q), Features(0.5, 1.5, None, None))
    assert asked == [False]


def test_debias_by_default_where_the_cache_has_it(llama, monkeypatch):
    module = sys.modules[QattnCache.__module__]
    channels = {"k_granularity": "per_channel", "tiers": [4]}

    def debiases(**options):
        return QattnCache(llama.config, **options)._debiases()

    assert debiases() and debiases(**channels) and not debiases(debias=False)
    monkeypatch.setattr(module, "GpuKvCache", qattn.KvCache)  # as if it were on a GPU
    assert debiases() and not debiases(**channels)
    key = torch.empty(1, 2, 1, 64, device="meta")  # no CPU's either
    cache = QattnCache(llama.config, **channels, debias=True, tokens=9)
    with pytest.raises(qattn.Unsupported, match="debias: should be off on a GPU"):
        cache._open(1, key)


# ---- Refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options, words", [
    ({"tiers": [5]}, "tiers"), ({"window": 100}, "window: 100"), ({"observe": -1}, "observe: -1"),
    ({"debias": 1}, "debias: 1 is neither True nor"),
    ({"observe": 8}, "no effect without average_bits"), ({"window_dtype": "int8"}, "window_dtype"),
    ({"observe": 8, "average_bits": 8.0, "importance": "key_norm"}, "another unit"),
])  # fmt: skip
def test_refused_options(options, words):
    with pytest.raises(qattn.InvalidArgument, match=words):
        QattnCache(LlamaConfig(**GROUPED), **options)


@pytest.mark.parametrize("config, words", [
    (T5Config(), "encoder-decoder"),
    (LlamaConfig(**GROUPED, layer_types=["full_attention", "chunked_attention"]), "chunked"),
    (LlamaConfig(**GROUPED, kv_lora_rank=64), "kv_lora_rank"),
], ids=["T5", "chunked", "latent"])  # fmt: skip
def test_refused_models(config, words):
    with pytest.raises(qattn.Unsupported, match=words):
        QattnCache(config)


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_other_attention_is_refused(name):
    config = LlamaConfig(**GROUPED)
    model = build(config=config)
    config._attn_implementation = name
    with pytest.raises(qattn.Unsupported, match="attn_implementation"):
        model(tokens(), past_key_values=QattnCache(config))


def test_refused_calls(llama):
    cache = QattnCache(llama.config)
    llama(tokens(), past_key_values=cache)
    one = tokens(2, 1)
    with pytest.raises(qattn.InvalidArgument, match="a batch of 1, but the cache holds 2 rows"):
        llama(one[:1], past_key_values=cache)
    hidden = torch.ones(2, 41, dtype=torch.long)
    hidden[0, 7] = 0
    itself = torch.ones(2, 41, dtype=torch.long)
    itself[0, 40] = 0
    for mask, words in (
        (hidden, "is not causal"), (torch.ones(2, 1, 1, 41).bool().triu(5), "is not causal"),
        (itself, "itself sees others"),
    ):  # fmt: skip
        fresh = cache.fork()
        with pytest.raises(qattn.Unsupported, match=f"attention_mask: .*{words}"):
            llama(one, past_key_values=fresh, attention_mask=mask)
        for call in (
            fresh.fork,
            lambda c=fresh: c.crop(-1),
            lambda c=fresh: c.reorder_cache([0, 0]),
        ):
            with pytest.raises(qattn.Unsupported, match="a forward pass is under way, or failed"):
                call()
        with pytest.raises(qattn.Unsupported, match="never ran, or failed"):
            llama(one, past_key_values=fresh)
    with pytest.raises(qattn.Unsupported, match="torch.float32"):
        llama(one, past_key_values=cache.fork(), attention_mask=torch.zeros(2, 1, 1, 41))
    padded = QattnCache(llama.config)
    llama(tokens(), past_key_values=padded, attention_mask=left_padding((40, 25)))
    with pytest.raises(qattn.Unsupported, match="an earlier one hid tokens"):
        llama(one, past_key_values=padded)
    with pytest.raises(qattn.Unsupported, match="pickled"):
        copy.copy(cache).__reduce_ex__(4)
    with pytest.raises(qattn.Unsupported, match="meta"):
        QattnCache(llama.config).update(torch.zeros(1, 2, 1, 64, device="meta"), None, 0)
    some = torch.zeros(2, 2, 1, 64)
    for given in ({"window": 3}, {"cache_kwargs": {"window": 3}}):
        with pytest.raises(qattn.Unsupported, match="'window'"):
            cache.fork().update(some, some, 0, **given)
    with pytest.raises(qattn.Unsupported, match="'7'"):
        cache.fork().update(some, some, 0, 7)
    for given in ((None,), ({"sin": some, "cos": some, "cache_position": None},)):
        assert cache.fork().update(some, some, 0, *given)[0].shape == (2, 2, 41, 64)
    with pytest.raises(qattn.InvalidArgument, match="layer_idx: 2"):
        cache.update(some, some, 2)
    with pytest.raises(qattn.InvalidArgument, match="requires a gradient"), torch.enable_grad():
        llama(one, past_key_values=cache)


def test_two_heads_that_do_not_fit(llama):
    cache = QattnCache(LlamaConfig(**SMALL, head_dim=32))
    with pytest.raises(qattn.InvalidArgument, match="k: shape"):
        llama(tokens(), past_key_values=cache)


def test_whole_graphs_are_refused(llama):
    """Where graphs may break, torch.compile leaves the cache out; slowly, so not tested here."""
    torch._dynamo.reset()
    compiled = torch.compile(llama, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        compiled(tokens(), past_key_values=QattnCache(llama.config))
