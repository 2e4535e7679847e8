"""QattnCache: qattn.KvCache or GpuKvCache as a cache of transformers.

A model calls the cache's update() with new keys and values and hands what comes back to its
attention function, beside queries and mask. update() keeps the new rows and returns InCache, a
stand-in without memory, and the attention function "qattn" asks it for what it needs: the rows of a
prompt as they came, or attention over the cache as it lies. Any other use of a stand-in raises.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from .._errors import InvalidArgument, OutOfMemory, Unsupported
from .._recipe import boolean, integer
from ..cache import GpuKvCache, KvCache
from ._in_cache import InCache
from ._masks import alive_of, check_mask, visible

#: KvCache.decode() takes so many queries of a sequence at once
QUERIES = 8
_BLOCK = 16  # tokens that share an importance
# What models hand to update() in releases of transformers 5; caches that grow ignore it. kwargs
# (since 5.24) are those of the layer's attention, which looks at them itself.
_WITHOUT_EFFECT = frozenset({"cache_kwargs", "cache_position", "cos", "kwargs", "sin"})


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
        #: (B, columns), in host memory: is the token in the cache?
        self.alive = torch.ones(0, 0, dtype=torch.bool)
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
    """A transformers cache over qattn.KvCache, or GpuKvCache where the model is on a GPU, for
    generate() and forward(past_key_values=...).

        qattn.transformers.register(recipe="bf16")
        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="qattn").eval()
        cache = qattn.transformers.QattnCache(model.config, average_bits=4.0)
        model.generate(**inputs, past_key_values=cache)

    config: of a decoder-only model whose layers all have the same KV heads and head dimension. The
    options are KvCache's (tiers, average_bits, budget_from, window, ...); with its defaults loud
    channels of K and large means of V are answered by layer and head, as kv.usage() says.
    window_dtype: bfloat16 where the model's keys are, else float16. observe: with a budget,
    attention of that many of a prompt's last queries gives its tokens their importance, and decode
    steps go on with what they see; 0: neither. Default: 64 with a budget and importance "uniform",
    else 0. debias: as KvCache.decode() has it, in layers without a softcap (default: where the
    cache has it, which a GPU's with k_granularity "per_channel" does not). A budget holds from
    budget_from tokens on, by default thousands; for shorter texts name it, and a smaller window.
    tokens, sequences: on a GPU, whose memory is taken once, the most tokens of a row and the rows
    held at a time, forks too (default: the first batch); in host memory they mean nothing.

    The first call of an empty cache, a prompt, attends to K and V as they come, with the registered
    recipe; their rows are quantised afterwards. All later calls append and then attend to the cache
    as it lies, at most 8 queries at a time: no other copy of its contents is kept. Tokens that the
    attention mask hides (padding) do not enter the cache. Layers with a sliding window keep all
    tokens; their queries look back as far as the window.

    Rows of a batch are sequences of one cache (`kv`, numbers in `sequences`). fork() and
    copy.deepcopy() give a cache with the same contents, e.g. for a common prefix, whose pages are
    shared in host memory and copied on a GPU; crop(), beam search, batch_repeat_interleave() and
    batch_select_indices() work. On a GPU these wait for it: a mask (copied to the host once a
    forward pass), crop(), padding, beam search and batch_select_indices() (their rows go to the
    host), and the first call on a list of sequences.
    Raises InvalidArgument for options, Unsupported for models, masks and devices that cannot be
    right, and, until reset(), once an exception left layers with different tokens.
    """

    layers: list[_Layer]  # type: ignore[assignment]

    def __init__(
        self,
        config: Any,
        *,
        observe: int | None = None,
        debias: bool | None = None,
        window_dtype: Any = None,
        tokens: int | None = None,
        sequences: int | None = None,
        **options: Any,
    ) -> None:
        options = _shape_of(config) | options
        guessed = options.get("importance", "uniform") != "uniform"
        budget = options.get("average_bits") is not None
        if observe is None:
            observe = 64 if budget and not guessed else 0
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
        self._debias = None if debias is None else boolean("debias", debias)
        self._options = options
        self._given_dtype = window_dtype
        self._tokens = None if tokens is None else integer("tokens", tokens)
        self._rows = None if sequences is None else integer("sequences", sequences)
        #: masks of this forward pass on a GPU by id, and they in host memory
        self._masks: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._newest = -1  #: the layer that was last given keys
        dtype = window_dtype or "float16"
        self.kv: Any = KvCache(**options, window_dtype=dtype)
        self._made = (dtype, torch.device("cpu"))  #: what kv was made for
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
            self._open(batch, key_states)
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
        self._check_turn(layer_idx)
        length = layer.columns + new
        self._check_tokens(layer, length)
        if layer_idx <= self._newest:
            self._masks = {}
        self._newest = layer_idx
        layer.pending = (key_states, value_states)
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
        alive = alive_of(self._on_host(mask), batch, new)
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
        mask = self._on_host(mask)
        alive = torch.cat([layer.alive, alive_of(mask, batch, new)], 1)
        check_mask(mask, alive, new, asked.sliding_window)
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
        them; on a GPU they are copied."""
        self._settled()
        made = QattnCache.__new__(QattnCache)
        made.__dict__.update(self.__dict__)
        made.sequences = ()
        made._masks = {}
        made.layers = [layer.copy() for layer in self.layers]
        self._check_room(len(self.sequences))
        for sequence in self.sequences:  # what is there goes with `made` if a fork fails
            made.sequences += (self.kv.fork(sequence),)
        return made

    __copy__ = fork

    def __deepcopy__(self, memo: dict[int, Any]) -> QattnCache:
        return self.fork()

    def __getstate__(self) -> Any:
        raise Unsupported("QattnCache: cannot be pickled; kv.save() writes the KvCache to a file")

    def __del__(self) -> None:
        if sys.is_finalizing():
            return  # a GPU may be gone already
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
        self._settled()
        remove = -integer("tokens_to_remove", tokens_to_remove)
        if remove < 0:
            raise InvalidArgument(f"tokens_to_remove: {tokens_to_remove} should not be positive")
        length = self.layers[0].columns
        if remove > length:
            raise InvalidArgument(
                f"tokens_to_remove: {tokens_to_remove}, but layers hold {length} tokens"
            )
        if remove == 0:
            return
        keep, alive = length - remove, self.layers[0].alive
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
        unused = set(range(len(self.sequences))) - set(chosen)
        self._check_room(len(chosen) - len(self.sequences))
        for row in unused:
            self.kv.release(self.sequences[row])
        used: set[int] = set()
        made: list[int] = []
        for row in chosen:
            sequence = self.sequences[row]
            made.append(self.kv.fork(sequence) if row in used else sequence)
            used.add(row)
        self.sequences = tuple(made)
        for layer in self.layers:
            layer.alive = layer.alive[chosen] if layer.columns else layer.alive

    # ---- Parts -----------------------------------------------------------------------------------

    def _open(self, batch: int, key: torch.Tensor) -> None:
        """Sequences of the first batch, in a cache for its dtype, device and rows."""
        dtype = self._given_dtype or ("bfloat16" if key.dtype == torch.bfloat16 else "float16")
        made = (dtype, key.device)
        if key.device.type == "cpu":
            if made != self._made:
                self.kv = KvCache(**self._options, window_dtype=dtype)
        elif self._tokens is None:
            raise InvalidArgument(
                "tokens: is missing; a QattnCache takes a GPU's memory once and wants to know the "
                "most tokens of a row"
            )
        elif self._debias and self._by_channel:
            raise Unsupported('debias: should be off on a GPU with k_granularity "per_channel"')
        elif made != self._made or (self._rows is None and batch > self.kv.free):
            self.kv = GpuKvCache(
                **self._options,
                window_dtype=dtype,
                sequences=self._rows or batch,
                tokens=self._tokens,
                device=key.device,
            )
        self._made = made
        self._check_room(batch)
        self.sequences = tuple(self.kv.add_sequence() for _ in range(batch))

    def _check_room(self, more: int) -> None:
        """Refuses before anything is changed what a GPU's capacity does not hold."""
        if isinstance(self.kv, GpuKvCache) and more > self.kv.free:
            raise OutOfMemory(
                f"sequences: {more} more rows, but the cache on the GPU has room for "
                f"{self.kv.free} of {self.kv.sequences}; QattnCache(sequences=...) says how many"
            )

    def _check_tokens(self, layer: _Layer, length: int) -> None:
        if not isinstance(self.kv, GpuKvCache) or length <= self.kv.tokens:
            return
        hidden = int((~layer.alive).sum(1).min()) if layer.columns else 0
        if length - hidden > self.kv.tokens:
            raise OutOfMemory(
                f"tokens: a row would have {length - hidden}, and the cache on the GPU has room "
                f"for {self.kv.tokens}; QattnCache(tokens=...) says how many"
            )

    def _on_host(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """A mask in host memory: layers of a forward pass share one copy."""
        if mask is None or mask.device.type == "cpu":
            return mask
        if id(mask) not in self._masks:
            self._masks[id(mask)] = (mask, mask.cpu())
        return self._masks[id(mask)][1]

    def _pending(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        pending = self.layers[layer_idx].pending
        if pending is None:
            raise Unsupported(
                f"QattnCache: attention of layer {layer_idx} ran twice after one update(), or "
                "after reset(); models whose layers share keys are not supported"
            )
        return pending

    def _settled(self) -> None:
        """Refuses where layers do not hold the same tokens: during a forward pass, and behind one
        that an exception ended."""
        columns = {layer.columns for layer in self.layers}
        if len(columns) > 1 or any(layer.pending is not None for layer in self.layers):
            raise Unsupported("QattnCache: a forward pass is under way, or failed; call reset()")

    def _check_turn(self, layer_idx: int) -> None:
        """Refuses a layer that would get ahead: a forward pass gives every layer its tokens once,
        so one that begins where layers differ follows one that failed."""
        columns = [layer.columns for layer in self.layers]
        if columns[layer_idx] > min(columns):
            raise Unsupported(
                f"QattnCache: a forward pass failed: layer {layer_idx} holds "
                f"{columns[layer_idx]} tokens, layer {columns.index(min(columns))} "
                f"{min(columns)}; reset() empties the cache"
            )

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
            debias=self._debiases() and not asked.softcap,
            sinks=None if asked.sinks is None else asked.sinks.detach().float(),
            return_mass=self._observe > 0,
            out=out,
        )
        if self._observe:
            self.kv.observe(layer, sequences, given[1])

    @property
    def _by_channel(self) -> bool:
        return self._options.get("k_granularity") == "per_channel"

    def _debiases(self) -> bool:
        if self._debias is not None:
            return self._debias
        return not (self._by_channel and isinstance(self.kv, GpuKvCache))

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
        hidden = ~visible(length, count, asked.sliding_window, scores.device)
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
    """The one place that says where a cache may lie."""
    if x.device.type not in ("cpu", "cuda"):
        raise Unsupported(
            f"key_states: lie on {x.device}; a QattnCache lies in host memory or on a CUDA GPU"
        )
