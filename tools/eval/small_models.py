"""Models of transformers made small: configurations with a few layers of 64 channels, and inputs
that their forward() takes.

Nothing is known of a class but its configuration's fields and its forward()'s arguments, so that
both are guesses by name. A class whose guesses all fail is reported with the reason.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

BATCH, LENGTH = 2, 12
VOCABULARY = 160
FIRST_ID = 130  #: special tokens above it get ids from here on
_LAYERS = "num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth"
#: the first pattern that fits a field's whole name gives the largest value that it keeps
_LARGEST = [
    (r".*vocab_size|num_hash_buckets|.*_vocabulary.*", VOCABULARY),
    (r".*(key_value_heads|kv_heads)|num_key_value_groups", 2),
    (r".*(attention_heads|num_heads|n_heads|n_head|head_count)", 4),
    (r".*n_shared_experts|n_group|topk_group|.*num_dense_layers|first_k_dense_replace", 1),
    (r".*(_experts|num_expert|n_routed_experts)", 4),
    (r".*(experts_per_tok(en)?|moe_topk|moe_top_k|top_k|topk|experts_top_k)", 2),
    (r".*(layers|n_layer|depth|num_blocks|num_stages_total)", 2),
    (r"(q|kv|o)_lora_rank", 32),
    (r"qk_head_dim|index_head_dim", 32),
    (r".*(head_dim|d_kv|d_head|head_size|kv_channels|head_width)", 16),
    (r".*(hidden_size|embed_dim|d_model|hidden_dim|projection_dim)", 64),
    (r".*(embedding_dim|embedding_size)", 64),
    (r"n_embd|n_embed|dim|emb_dim|embed_size|width|.*proj_dim|.*output_dim|.*lru_width", 64),
    (r".*(ffn_dim|intermediate_size|intermediate_dim|inner|mlp_dim|d_ff|ffn_size|ff_dim)", 64),
    (r".*(ffn_hidden_size|mlp_hidden_size|feedforward_dim|feedforward_size|feed_forward_dim)", 64),
    (r".*moe.*_size|.*shared_expert.*_size|d_inner|d_latents|.*_channels_total", 64),
    (r".*(max_position_embeddings|n_positions|max_seq_len|max_sequence_length)", 128),
    (r"max_(source|target)_positions|n_ctx|block_size|seq_length|max_seqlen", 128),
    (r"(num_queries|.*query_tokens|num_latents|.*num_query)", 8),
    (r"image_size|img_size", 32),
    (r".*window_size", 4),
    (r".*patch_size", 8),
    (r"num_frames|frames_per_clip", 4),
]  # fmt: skip
_TOKEN = re.compile(r".*(token|pad|bos|eos|sep|cls|mask)(_token)?_(id|ids|index|idx)|.*_token")
_BY_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers",
             "indexer_types", "rope_layers", "layers_attn_types")  # fmt: skip
_NUMBER_OF_LAYERS = r".*(layers|n_layer|depths?|num_blocks)|.*vocab_size"
VARIANTS = "small", "ungrouped", "shallow"
_HEADS = "num_attention_heads", "num_heads", "encoder_attention_heads"
#: what a few configurations want besides
_BY_TYPE = {
    "autoformer": {"prediction_length": 8, "context_length": 8, "lags_sequence": [1, 2]},
    "informer": {"prediction_length": 8, "context_length": 8, "lags_sequence": [1, 2]},
    "time_series_transformer": {"prediction_length": 8, "context_length": 8,
                                "lags_sequence": [1, 2]},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_expand": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "xmod": {"default_language": "en_XX"},
    "longformer": {"attention_window": 4},
    "led": {"attention_window": 4},
    "reformer": {"axial_pos_shape": (4, 8), "axial_pos_embds_dim": (16, 48), "attn_layers": [
        "local", "local"], "hidden_size": 64},
    "bit": {"embedding_size": 32, "hidden_sizes": [32, 32, 32, 32], "depths": [1, 1, 1, 1]},
    "efficientnet": {"depth_coefficient": 0.1, "width_coefficient": 0.2, "hidden_dim": 64},
    "clap_audio_model": {"hidden_size": 64, "num_attention_heads": [2, 2, 2, 2],
                         "patch_embeds_hidden_size": 8, "depths": [1, 1, 1, 1], "num_mel_bins": 64,
                         "spec_size": 256},
}  # fmt: skip


# ---- Configurations ------------------------------------------------------------------------------


def _smaller(name: str, value: int) -> int:
    for pattern, largest in _LARGEST:
        if re.fullmatch(pattern, name):
            return min(value, largest)
    return value


def _of_list(name: str, value: list | tuple) -> list | tuple:
    """Numbers by stage of a pyramid: one layer each, channels and heads that fit each other."""
    if not value or any(isinstance(x, bool) or not isinstance(x, int) for x in value):
        return value
    if re.fullmatch(r".*depths|.*num_layers|layer_depths|num_blocks", name):
        return type(value)(1 for _ in value)
    if re.fullmatch(r"(.*_)?hidden_sizes|embed_dims?|dims", name):
        return type(value)(16 * 2**i for i in range(len(value)))
    if name in _HEADS:
        return type(value)(min(x, 2**i) for i, x in enumerate(value))
    return value


def _changes(fields: dict[str, Any], variant: str) -> dict[str, Any]:
    made: dict[str, Any] = {}
    next_id = FIRST_ID
    for name, value in fields.items():
        if name.startswith("_") or value is None or isinstance(value, bool):
            continue
        if hasattr(value, "sub_configs"):
            made[name] = shrunk(type(value), variant)
        elif isinstance(value, int) and _TOKEN.fullmatch(name):
            if value >= FIRST_ID:
                made[name], next_id = next_id, next_id + 1
        elif variant == "shallow" and not re.fullmatch(_NUMBER_OF_LAYERS, name):
            continue
        elif isinstance(value, int) and value > 0:
            made[name] = _smaller(name, value)
        elif isinstance(value, dict) and "mrope_section" in value:
            made[name] = value | {"mrope_section": [2, 3, 3]}  # half of 16 channels
        elif isinstance(value, (list, tuple)) and name not in _BY_LAYER:
            made[name] = _of_list(name, value)
    if fields.get("kv_lora_rank") and "num_key_value_heads" in made:
        made["num_key_value_heads"] = made.get("num_attention_heads")
    return {k: v for k, v in made.items() if not _same(v, fields[k])}


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and not hasattr(a, "sub_configs") and a == b


def _by_layer(fields: dict[str, Any], made: dict[str, Any]) -> None:
    """Lists with an entry a layer: every kind is kept, and as many layers as that takes."""
    lists = {k: list(fields[k]) for k in _BY_LAYER if isinstance(fields.get(k), (list, tuple))}
    count = next((made.get(k, fields.get(k)) for k in _LAYERS if k in fields), None)
    if not lists or not isinstance(count, int):
        return
    kinds = {k: list(dict.fromkeys(v)) for k, v in lists.items()}
    count = max(count, min(4, max(map(len, kinds.values()))))
    for name, kind in kinds.items():
        made[name] = (kind * count)[:count]
    for name in _LAYERS:
        if name in fields:
            made[name] = count


def _one_kv_head_each(made: dict[str, Any]) -> None:
    """Layers that know no groups of query heads."""
    for name in made:
        if name.endswith("num_key_value_heads"):
            made[name] = made.get(name.replace("key_value", "attention"), 4)


def shrunk(config_class: Any, variant: str = VARIANTS[0]) -> Any:
    """A small configuration of the class. Raises what its constructor raises.

    variant: "small"; "ungrouped", as many KV heads as heads; "shallow", of the width that it has.
    """
    fields = dict(vars(config_class()))
    made = _changes(fields, variant)
    if variant == "ungrouped":
        _one_kv_head_each(made)
    _by_layer(fields, made)
    made |= _BY_TYPE.get(getattr(config_class, "model_type", ""), {})
    numbers = {k: v for k, v in made.items() if not isinstance(v, (list, tuple))}
    error: Exception | None = None
    without = ({k: v for k, v in made.items() if k != name} for name in made)
    for attempt in (made, numbers, *without):
        try:
            return config_class(**attempt)
        except Exception as failed:  # a validator of any kind
            error = error or failed
    raise error or ValueError("no field to make smaller")


def field(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these numbers in the configuration or in those inside it."""
    waiting = [config]
    while waiting:
        x = waiting.pop(0)
        for name in names:
            value = getattr(x, name, None)
            if isinstance(value, (int, list, tuple)) and not isinstance(value, bool):
                return value
        waiting += [y for k in getattr(x, "sub_configs", ()) if (y := getattr(x, k, None))]
    return default


# ---- Inputs --------------------------------------------------------------------------------------


class Guesses:
    """Inputs that a model might take, most likely first."""

    def __init__(self, model: Any, padded: bool) -> None:
        import torch

        self.torch, self.config = torch, model.config
        self.draw = torch.Generator().manual_seed(1)
        self.takes = set(inspect.signature(model.forward).parameters)
        main = getattr(model, "main_input_name", "input_ids")
        self.main = main if isinstance(main, str) else main[0]
        self.mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
        if padded:
            self.mask[1, 8:] = 0

    def normal(self, *shape: int) -> Any:
        return self.torch.randn(BATCH, *shape, generator=self.draw)

    def ids(self) -> Any:
        ids = self.torch.arange(3, 3 + LENGTH)[None].repeat(BATCH, 1)
        ids[1] = ids[1].flip(0)
        return ids

    def only(self, **given: Any) -> dict[str, Any]:
        return {k: v for k, v in given.items() if k in self.takes}

    def text(self) -> dict[str, Any]:
        boxes = self.torch.zeros(BATCH, LENGTH, 4, dtype=self.torch.long)
        return self.only(
            input_ids=self.ids(), attention_mask=self.mask, bbox=boxes, decoder_input_ids=self.ids()
        )

    def images(self) -> Iterator[dict[str, Any]]:
        size = field(self.config, "image_size", "img_size", default=32)
        height, width = (size, size) if isinstance(size, int) else (size[0], size[-1])
        channels = field(self.config, "num_channels", "in_channels", "in_chans", default=3)
        frames = field(self.config, "num_frames", "frames_per_clip", default=4)
        shapes = [(channels, height, width), (channels, 64, 64), (channels, 224, 224),
                  (frames, channels, height, width)]  # fmt: skip
        names = {"pixel_values", "pixel_values_videos", "images"} & self.takes
        for shape in shapes:
            for name in sorted(names):
                yield {name: self.normal(*shape)}

    def sounds(self) -> Iterator[dict[str, Any]]:
        bins = field(self.config, "num_mel_bins", "input_feat_per_channel", "feature_size",
                     "input_dim", "feature_projection_input_dim", default=80)  # fmt: skip
        hidden = field(self.config, "feature_projection_input_dim", "hidden_size", default=64)
        after = self.only(decoder_input_ids=self.ids())
        source = field(self.config, "max_source_positions", default=0) * 2
        for time in dict.fromkeys((source or 64, 64, 256)):
            if "input_features" in self.takes:
                for shape in ((bins, time), (time, bins), (time, hidden), (1, time, bins)):
                    yield {"input_features": self.normal(*shape), **after}
        if "input_values" in self.takes:
            long = field(self.config, "max_length", default=64)
            for shape in ((2000,), (4000,), (1, 4000), (long, bins), (64, bins), (1, 64, 64)):
                yield {"input_values": self.normal(*shape), **after}

    def series(self) -> Iterator[dict[str, Any]]:
        if "past_values" in self.takes:
            time = field(self.config, "context_length", "prediction_length", default=32)
            lags = max(field(self.config, "lags_sequence", default=[0]))
            for shape in ((time, field(self.config, "num_input_channels", default=1)),
                          (time + lags,), (time,)):  # fmt: skip
                past = self.normal(*shape)
                features = self.torch.ones(*past.shape[:2], 1)
                yield {"past_values": past}
                yield self.only(
                    past_values=past, past_time_features=features[..., :0],
                    past_observed_mask=self.torch.ones_like(past),
                    future_time_features=self.normal(8, 0), future_values=self.normal(8),
                )  # fmt: skip

    def states(self) -> Iterator[dict[str, Any]]:
        hidden = field(self.config, "hidden_size", "d_model", "n_embd", default=64)
        if not isinstance(hidden, int):
            return
        for name in ("inputs_embeds", "hidden_states", "inputs"):
            if name in self.takes:
                yield self.only(attention_mask=self.mask) | {name: self.normal(LENGTH, hidden)}

    def all(self) -> Iterator[dict[str, Any]]:
        text = self.text() if self.takes & {"input_ids", "decoder_input_ids"} else {}
        images = list(self.images())
        after = self.only(decoder_input_ids=self.ids())
        if self.main.startswith("pixel") or not text:
            yield from images
            yield from ({**x, **after} for x in images if after)
        if text:
            yield text
        yield from ({**text, **x} for x in images if text)
        yield from images
        yield from self.sounds()
        yield from ({**text, **x} for x in self.sounds() if text)
        yield from self.series()
        yield from self.states()
