"""QattnCache: qattn.KvCache as a cache of transformers.

A model calls the cache's update() with new keys and values and hands what comes back to its
attention function, beside queries and mask. update() keeps the new rows and returns InCache, a
stand-in without memory, and the attention function "qattn" asks it for what it needs: the rows of a
prompt as they came, or attention over the cache as it lies. Any other use of a stand-in raises.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from ._errors import InvalidArgument, Unsupported
from ._kv_cache import KvCache
from ._recipe import integer

#: KvCache.decode() takes so many queries of a sequence at once
QUERIES = 8
_BLOCK = 16  # tokens that share an importance
# What models hand to update() in earlier releases of transformers 5; caches that grow ignore it.
_WITHOUT_EFFECT = frozenset({"cache_kwargs", "cache_position", "cos", "sin"})


class InCache(torch.Tensor):
    """Stands for the keys or values of one layer: shape (B, Hkv, past + new, D), no memory.

    Attention functions other than qattn's would compute with it, so every operation on it raises
    Unsupported; its shape, dtype and device can be asked for.
    """

    cache: QattnCache
    layer: int

    @staticmethod
    def __new__(cls, cache: QattnCache, layer: int, new: torch.Tensor, length: int) -> InCache:
        shape = (*new.shape[:2], length, new.shape[3])
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=new.dtype, device=new.device)
        made.cache, made.layer = cache, layer
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"InCache(layer={self.layer}, shape={tuple(self.shape)})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        raise Unsupported(
            f"{func}: keys and values lie in a QattnCache, which only attention registered by "
            "qattn.transformers.register() reads; set attn_implementation to its name"
        )


@dataclasses.dataclass
class Features:
    """What an attention layer asks for besides queries and mask."""

    scale: float | None
    softcap: float | None
    sliding_window: int | None  #: keys that a query sees, itself among them
    sinks: torch.Tensor | None  #: (Hq)


class _Layer(CacheLayerMixin):
    """What transformers may ask of one layer; QattnCache does the rest for all layers at once."""

    is_croppable = True
    supports_early_init = False
    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.columns = 0  #: tokens of each row, those that its mask hides included
        self.alive = torch.ones(0, 0, dtype=torch.bool)  #: (B, columns): is the token in the cache?
        self.pending: tuple[torch.Tensor, torch.Tensor] | None = None  #: update()'s, not yet in it

    def copy(self) -> _Layer:
        made = _Layer()
        made.columns, made.alive = self.columns, self.alive
        return made

    def get_seq_length(self) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def _whole(self, *_: Any, **__: Any) -> Any:
        raise Unsupported("QattnCache: its layers share their sequences; call the cache's method")

    lazy_initialization = update = offload = prefetch = _whole  # type: ignore[assignment]
    reset = reorder_cache = crop = batch_repeat_interleave = batch_select_indices = _whole


class QattnCache(Cache):
    """A transformers cache over qattn.KvCache, for generate() and forward(past_key_values=...).

        qattn.transformers.register(recipe="bf16")
        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="qattn").eval()
        cache = qattn.transformers.QattnCache(model.config, average_bits=4.0)
        model.generate(**inputs, past_key_values=cache)

    config: of a decoder-only model whose layers all have the same KV heads and head dimension. The
    options are KvCache's (tiers, average_bits, budget_from, window, ...). window_dtype: bfloat16
    where the model's keys are, else float16. observe: with a budget, attention of that many of a
    prompt's last queries gives its tokens their importance, and decode steps go on with what they
    see; 0: neither. Default: 32 with a budget and importance "uniform", else 0. A budget holds from
    budget_from tokens on, by default thousands; for shorter texts name it, and a smaller window.

    The first call of an empty cache, a prompt, attends to K and V as they come, with the registered
    recipe; their rows are quantised afterwards. All later calls append and then attend to the cache
    as it lies, at most 8 queries at a time: no other copy of its contents is kept. Tokens that the
    attention mask hides (padding) do not enter the cache. Layers with a sliding window keep all
    tokens; their queries look back as far as the window.

    Rows of a batch are sequences of one KvCache (`kv`, numbers in `sequences`). fork() and
    copy.deepcopy() give a cache with the same contents whose pages are shared, e.g. for a common
    prefix; crop(), beam search, batch_repeat_interleave() and batch_select_indices() work.
    Raises InvalidArgument for options, Unsupported for models, masks and devices that cannot be
    right; host memory only.
    """

    layers: list[_Layer]  # type: ignore[assignment]

    def __init__(
        self, config: Any, *, observe: int | None = None, window_dtype: Any = None, **options: Any
    ) -> None:
        options = _shape_of(config) | options
        guessed = options.get("importance", "uniform") != "uniform"
        budget = options.get("average_bits") is not None
        if observe is None:
            observe = 32 if budget and not guessed else 0
        self._observe = integer("observe", observe)
        if self._observe < 0:
            raise InvalidArgument(f"observe: {observe} should not be negative")
        if self._observe and not budget:
            raise InvalidArgument(f"observe: {observe} has no effect without average_bits")
        if self._observe and guessed:
            raise InvalidArgument(
                f"observe: {observe} with importance {options['importance']!r}, which is in "
                "another unit than what queries see"
            )
        self._options = options
        self._given_dtype = window_dtype
        self.kv = KvCache(**options, window_dtype=window_dtype or "float16")
        self.sequences: tuple[int, ...] = ()
        super().__init__(layers=[_Layer() for _ in range(self.kv.layers)])

    # ---- What a model calls ----------------------------------------------------------------------

    def update(
        self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Keeps the new rows, (B, Hkv, S, D) and (B, Hkv, S, Dv), until the layer's attention.

        Returns two stand-ins (InCache) of the whole keys and values.
        """
        if torch.compiler.is_compiling():
            raise Unsupported("QattnCache: torch.compile(fullgraph=True) cannot take it in")
        given = {**kwargs, **(kwargs.get("cache_kwargs") or {})}
        for x in args:
            given.update(x if isinstance(x, dict) else {} if x is None else {str(x): x})
        if unknown := sorted(given.keys() - _WITHOUT_EFFECT):
            raise Unsupported(f"QattnCache: update() with {unknown}, which it does not know")
        if not 0 <= layer_idx < len(self.layers):
            raise InvalidArgument(
                f"layer_idx: {layer_idx}, but there are {len(self.layers)} layers"
            )
        _check_device(key_states)
        batch, _, new, _ = key_states.shape
        layer = self.layers[layer_idx]
        if not self.sequences:
            self._open(batch, key_states.dtype)
        if batch != len(self.sequences):
            raise InvalidArgument(
                f"key_states: a batch of {batch}, but the cache holds {len(self.sequences)} rows; "
                "reset() empties it"
            )
        if layer.pending is not None:
            raise Unsupported(
                f"QattnCache: layer {layer_idx} was given keys whose attention never ran, or "
                "failed; reset() empties the cache"
            )
        layer.pending = (key_states, value_states)
        length = layer.columns + new
        return (
            InCache(self, layer_idx, key_states, length),
            InCache(self, layer_idx, value_states, length),
        )

    def is_prompt(self, layer_idx: int) -> bool:
        """Is what update() was given the first of its layer?"""
        return self.layers[layer_idx].columns == 0

    def take_prompt(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a prompt as they came: (B, Hkv, S, D) and (B, Hkv, S, Dv)."""
        return self._pending(layer_idx)

    def store_prompt(
        self, layer_idx: int, query: torch.Tensor, mask: torch.Tensor | None, asked: Features
    ) -> None:
        """Appends a prompt after its attention. query: (B, Hq, S, D), mask: as attend()'s."""
        layer, (key, value) = self.layers[layer_idx], self._pending(layer_idx)
        batch, _, new, _ = key.shape
        alive = _alive(mask, batch, new)
        if bool(alive.all()):
            told = self._importance(query, key, asked)
            self._append(layer_idx, self.sequences, key, value, told)
        else:
            for row, sequence in enumerate(self.sequences):
                q, k, v = (x[row : row + 1, :, alive[row]] for x in (query, key, value))
                if k.shape[2]:
                    self._append(layer_idx, (sequence,), k, v, self._importance(q, k, asked))
        layer.columns, layer.alive, layer.pending = new, alive, None

    def attend(
        self, layer_idx: int, query: torch.Tensor, mask: torch.Tensor | None, asked: Features
    ) -> torch.Tensor:
        """Appends what update() was given and attends to the cache as it lies.

        query: (B, Hq, S, D), the newest S tokens; mask: bool (B, 1, S, past + S) or None, which is
        causal. Returns (B, Hq, S, Dv) of query's dtype; zeros for padding. Raises Unsupported for a
        mask that is more than causality, padding on the left and the sliding window.
        """
        layer, (key, value) = self.layers[layer_idx], self._pending(layer_idx)
        batch, heads, new, _ = query.shape
        alive = torch.cat([layer.alive, _alive(mask, batch, new)], 1)
        _check_mask(mask, alive, new, asked.sliding_window)
        out = query.new_zeros(batch, new, heads, value.shape[3]).transpose(1, 2)
        for start in range(0, new, QUERIES):
            block = slice(start, min(start + QUERIES, new))
            here = alive[:, layer.columns :][:, block]
            q, k, v = (x[:, :, block] for x in (query, key, value))
            if bool(here.all()):
                self._step(layer_idx, self.sequences, q, k, v, out[:, :, block], asked)
                continue
            for row, sequence in enumerate(self.sequences):
                seen = here[row]
                if bool(seen.any()):
                    some = [x[row : row + 1, :, seen] for x in (q, k, v)]
                    part = out.new_zeros(1, heads, int(seen.sum()), out.shape[3])
                    self._step(layer_idx, (sequence,), some[0], some[1], some[2], part, asked)
                    out[row, :, block][:, seen] = part[0]
        layer.columns, layer.alive, layer.pending = layer.columns + new, alive, None
        return out

    # ---- What generate() and users call ----------------------------------------------------------

    def fork(self) -> QattnCache:
        """A cache with the same contents, whose pages are shared until one of the two changes
        them."""
        self._settled()
        made = QattnCache.__new__(QattnCache)
        made.__dict__.update(self.__dict__)
        made.sequences = ()
        made.layers = [layer.copy() for layer in self.layers]
        made.sequences = tuple(self.kv.fork(sequence) for sequence in self.sequences)
        return made

    __copy__ = fork

    def __deepcopy__(self, memo: dict[int, Any]) -> QattnCache:
        return self.fork()

    def __getstate__(self) -> Any:
        raise Unsupported("QattnCache: cannot be pickled; kv.save() writes the KvCache to a file")

    def __del__(self) -> None:
        for sequence in self.__dict__.get("sequences", ()):
            self.kv.release(sequence)

    @property
    def batch_size(self) -> int:
        """Rows that the cache holds; -1 before the first update()."""
        return len(self.sequences) or -1

    def reset(self) -> None:
        """Forgets everything; the next batch may have another size."""
        for sequence in self.sequences:
            self.kv.release(sequence)
        self.sequences = ()
        self.layers = [_Layer() for _ in self.layers]

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the newest tokens: -n forgets n. What was quantised stays so."""
        remove = -integer("tokens_to_remove", tokens_to_remove)
        if remove < 0:
            raise InvalidArgument(f"tokens_to_remove: {tokens_to_remove} should not be positive")
        lengths = {layer.columns for layer in self.layers}
        if len(lengths) != 1 or remove > max(lengths):
            raise InvalidArgument(
                f"tokens_to_remove: {tokens_to_remove}, but layers hold {sorted(lengths)} tokens"
            )
        self._settled()
        if remove == 0:
            return
        keep, alive = max(lengths) - remove, self.layers[0].alive
        if any(not torch.equal(layer.alive, alive) for layer in self.layers):
            raise Unsupported("tokens_to_remove: layers hide different tokens")
        for row, sequence in enumerate(self.sequences):
            left = int(alive[row, :keep].sum())
            if left < self.kv.length(sequence):
                self.kv.truncate(sequence, left)
        for layer in self.layers:
            layer.columns, layer.alive = keep, alive[:, :keep]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row beam_idx[i] was: beams that go on twice are forked."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, one beside the other."""
        self.batch_select_indices(
            torch.arange(len(self.sequences)).repeat_interleave(integer("repeats", repeats))
        )

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps rows `indices` (integers or a mask (B)), in that order; a row may come twice."""
        if not self.sequences:
            return
        self._settled()
        chosen = torch.arange(len(self.sequences))[torch.as_tensor(indices).cpu()].tolist()
        used: set[int] = set()
        made: list[int] = []
        for row in chosen:
            sequence = self.sequences[row]
            made.append(self.kv.fork(sequence) if row in used else sequence)
            used.add(row)
        for row, sequence in enumerate(self.sequences):
            if row not in used:
                self.kv.release(sequence)
        self.sequences = tuple(made)
        for layer in self.layers:
            layer.alive = layer.alive[chosen] if layer.columns else layer.alive

    # ---- Parts -----------------------------------------------------------------------------------

    def _open(self, batch: int, dtype: torch.dtype) -> None:
        """Sequences of the first batch. Nobody has seen a dtype before, nor is anything stored."""
        if self._given_dtype is None and dtype == torch.bfloat16:
            self._given_dtype = dtype
            self.kv = KvCache(**self._options, window_dtype=dtype)
        self.sequences = tuple(self.kv.add_sequence() for _ in range(batch))

    def _pending(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        pending = self.layers[layer_idx].pending
        if pending is None:
            raise Unsupported(
                f"QattnCache: attention of layer {layer_idx} ran twice after one update(), or "
                "after reset(); models whose layers share keys are not supported"
            )
        return pending

    def _settled(self) -> None:
        if any(layer.pending is not None for layer in self.layers):
            raise Unsupported("QattnCache: a forward pass is under way, or failed; call reset()")

    def _append(
        self, layer_idx: int, sequences: Any, key: Any, value: Any, importance: Any = None
    ) -> None:
        self.kv.append(layer_idx, sequences, key, value, layout="bhsd", importance=importance)

    def _step(
        self, layer: int, sequences: Any, q: Any, k: Any, v: Any, out: Any, asked: Features
    ) -> None:
        """Appends up to 8 tokens to sequences and attends to them and what is before them."""
        self._append(layer, sequences, k, v)
        given = self.kv.decode(
            q,
            layer,
            sequences,
            layout="bhsd",
            scale=asked.scale,
            window_left=None if asked.sliding_window is None else asked.sliding_window - 1,
            softcap=asked.softcap,
            sinks=None if asked.sinks is None else asked.sinks.detach().float(),
            return_mass=self._observe > 0,
            out=out,
        )
        if self._observe:
            self.kv.observe(layer, sequences, given[1])

    def _importance(
        self, query: torch.Tensor, key: torch.Tensor, asked: Features
    ) -> torch.Tensor | None:
        """(B, Hkv, ceil(S / 16)): the probability that the last queries put on each block, root of
        the mean square over them and over a KV head's query heads, as observe() has it."""
        if not self._observe:
            return None
        batch, heads, length, dim = query.shape
        heads_kv, count = key.shape[1], min(self._observe, length)
        q = query[:, :, length - count :].float().reshape(batch, heads_kv, -1, dim)
        scale = dim**-0.5 if asked.scale is None else asked.scale
        scores = q @ key.float().transpose(2, 3) * scale
        if asked.softcap:
            scores = asked.softcap * torch.tanh(scores / asked.softcap)
        scores = scores.reshape(batch, heads_kv, heads // heads_kv, count, length)
        hidden = ~_visible(length, count, asked.sliding_window)
        mass = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        mass = torch.nn.functional.pad(mass, (0, -length % _BLOCK)).unflatten(-1, (-1, _BLOCK))
        return mass.sum(-1).square().mean((2, 3)).sqrt()


def _shape_of(config: Any) -> dict[str, int]:
    """KvCache's options that the model decides."""
    if getattr(config, "is_encoder_decoder", False):
        raise Unsupported("config: of an encoder-decoder model, whose cross attention is no decode")
    config = config.get_text_config(decoder=True)
    for name in ("kv_lora_rank", "kv_sharing_modes", "num_kv_shared_layers"):
        if getattr(config, name, None):
            raise Unsupported(f"config: {name} is {getattr(config, name)!r}, another kind of cache")
    other = set(getattr(config, "layer_types", None) or ())
    other -= {"full_attention", "sliding_attention"}
    if other:
        raise Unsupported(f"config: layers of type {', '.join(sorted(other))}")
    heads = config.num_attention_heads
    return {
        "layers": config.num_hidden_layers,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
    }


def _check_device(x: torch.Tensor) -> None:
    """The one place that says where a KvCache lies."""
    if x.device.type != "cpu":
        raise Unsupported(f"key_states: lie on {x.device}; a QattnCache lies in host memory")


def _alive(mask: torch.Tensor | None, batch: int, new: int) -> torch.Tensor:
    """(B, new): which of the newest tokens any query sees."""
    if mask is None:
        return torch.ones(batch, new, dtype=torch.bool)
    if mask.dtype != torch.bool:
        raise Unsupported(f"attention_mask: {mask.dtype}; with a QattnCache it should be bool")
    return mask[..., mask.shape[-1] - new :].flatten(1, -2).any(1).expand(batch, new)


def _visible(length: int, queries: int, sliding_window: int | None) -> torch.Tensor:
    """(queries, length): what causality and a window let the newest queries see."""
    behind = torch.arange(length - queries, length)[:, None] - torch.arange(length)
    return (behind >= 0) & (behind < (sliding_window or length))


def _check_mask(
    mask: torch.Tensor | None, alive: torch.Tensor, new: int, sliding_window: int | None
) -> None:
    """Refuses a mask that says something else than the cache will do.

    mask: bool (B or 1, any, new, length) or None, alive: (B, length).
    """
    length = alive.shape[1]
    if mask is None:
        if not bool(alive.all()):
            raise Unsupported(
                "attention_mask: absent, but an earlier one hid tokens from the cache"
            )
        return
    if sliding_window is not None and sliding_window < length:
        ranks = alive.cumsum(1)
        first = alive.to(torch.uint8).argmax(1, keepdim=True)
        holes = alive & (ranks != torch.arange(1, length + 1) - first)
        if bool(holes.any()):
            raise Unsupported(
                f"attention_mask: hides tokens between others, and the window of {sliding_window} "
                "counts them; a QattnCache does not hold them"
            )
    expected = _visible(length, new, sliding_window) & alive[:, None, None]
    own = alive[:, None, length - new :, None]
    if mask.shape[-2:] != (new, length) or bool(((mask != expected) & own).any()):
        raise Unsupported(
            "attention_mask: is not causal with tokens hidden and a sliding window as before; "
            "a QattnCache cannot attend by it"
        )
    if bool((mask & ~own).any()):
        raise Unsupported(
            "attention_mask: hides a token behind the prompt that itself sees others; padding of "
            "a QattnCache stands on the left"
        )
