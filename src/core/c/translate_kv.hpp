// What the files of the C interface of KV caches share.
#pragma once

#include "core/c/translate.hpp"

namespace qattn::c {

inline Status read_options(const qattn_kv_options* given, KvCacheOptions& options) {
  qattn_kv_options o;
  qattn_kv_options_init(&o);
  if (Status s = read_struct("options", given, o); !s.ok()) return s;
  if (Status s = read_flag("smooth_k", o.smooth_k); !s.ok()) return s;
  if (Status s = read_flag("rotate", o.rotate); !s.ok()) return s;
  if (Status s = read_flag("balance_k", o.balance_k); !s.ok()) return s;
  if (Status s = read_flag("smooth_v", o.smooth_v); !s.ok()) return s;
  if (o.reserved != 0) return invalid("reserved: " + std::to_string(o.reserved) + " is not 0");
  if (o.tier_count < 0 || o.tier_count > QATTN_KV_MAX_TIERS) {
    return invalid("tier_count: " + std::to_string(o.tier_count) + " is not from 0 to 7");
  }
  options.layers = o.layers;
  options.heads_kv = o.heads_kv;
  options.d = o.d;
  options.dv = o.dv;
  options.page_size = o.page_size;
  options.window = o.window;
  options.sinks = o.sinks;
  options.window_format = static_cast<Format>(o.window_format);
  options.tiers.clear();
  for (int i = 0; i < o.tier_count; ++i) {
    options.tiers.push_back({o.tiers[i].k_bits, o.tiers[i].v_bits});
  }
  options.average_bits = o.average_bits;
  options.budget_from = o.budget_from;
  options.smooth_k = o.smooth_k != 0;
  options.rotate = o.rotate != 0;
  options.balance_k = o.balance_k != 0;
  options.smooth_v = o.smooth_v != 0;
  options.importance = static_cast<KvImportance>(o.importance);
  options.threads = o.threads;
  options.importance_decay = o.importance_decay;
  options.hysteresis = o.hysteresis;
  options.k_granularity = static_cast<Granularity>(o.k_granularity);
  return {};
}

/// f(cache), where there is one.
template <class Cache, class Function>
qattn_status with(Cache* cache, Function f) noexcept {
  return guarded([&]() -> Status {
    if (cache == nullptr) return invalid("cache: is NULL");
    return f(cache->cache);
  });
}

/// Stores a Result through a pointer of the caller.
template <class T>
Status store(const char* name, const Result<T>& result, T* to) {
  if (!result.ok()) return result.status();
  if (to == nullptr) return invalid(std::string(name) + ": is NULL");
  *to = *result;
  return {};
}

inline Status check_pointer(const char* name, const void* pointer) {
  return pointer == nullptr ? invalid(std::string(name) + ": is NULL") : Status();
}

inline TensorView optional_view(const qattn_tensor* tensor) {
  return tensor == nullptr ? TensorView{} : view(*tensor);
}

inline Status read_decode(const qattn_kv_decode_tensors* given,
                          const qattn_kv_decode_options* given_options, KvDecodeTensors& tensors,
                          KvDecodeOptions& options) {
  qattn_kv_decode_tensors t;
  qattn_kv_decode_options o;
  qattn_kv_decode_tensors_init(&t);
  qattn_kv_decode_options_init(&o);
  if (Status s = read_struct("tensors", given, t); !s.ok()) return s;
  if (Status s = read_struct("options", given_options, o); !s.ok()) return s;
  if (Status s = read_flag("causal", o.causal); !s.ok()) return s;
  if (Status s = read_flag("has_softmax_scale", o.has_softmax_scale); !s.ok()) return s;
  if (Status s = read_flag("debias", o.debias); !s.ok()) return s;
  if (o.reserved != 0) return invalid("reserved: " + std::to_string(o.reserved) + " is not 0");
  tensors = {view(t.q), view(t.out), view(t.lse), view(t.sinks), view(t.tree_mask), view(t.mass)};
  options.layout = static_cast<Layout>(o.layout);
  if (o.has_softmax_scale) options.softmax_scale = o.softmax_scale;
  options.causal = o.causal != 0;
  options.window_left = o.window_left;
  options.softcap = o.softcap;
  options.threads = o.threads;
  options.debias = o.debias != 0;
  return {};
}

inline Status store_bytes(const KvBytes& b, qattn_kv_bytes* bytes) {
  qattn_kv_bytes full{0, b.codes, b.scales, b.window, b.tables, b.means, b.spare, b.total};
  return write_struct("bytes", full, bytes);
}

inline Status store_usage(const KvUsage& u, qattn_kv_usage* usage) {
  qattn_kv_usage full{0,
                      u.length,
                      u.bytes,
                      u.allowed_bytes,
                      u.average_bits,
                      u.window_tokens,
                      {},
                      u.balanced_channels,
                      u.shifted_heads};
  std::copy(u.tier_tokens.begin(), u.tier_tokens.end(), full.tier_tokens);
  return write_struct("usage", full, usage);
}

}  // namespace qattn::c
