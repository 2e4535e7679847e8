#include "gpu/device_table.hpp"

namespace qattn::test {

std::vector<Feature> device_table() {
  std::vector<Feature> all = features_of_gpus();
  // Its block mask is as large as the longest sequence. The host cannot read a GPU's cu_seqlens, so
  // there a block mask covers all tokens in memory, and this one is refused.
  std::erase_if(all, [](const Feature& f) { return f.name == "block_mask_varlen"; });
  constexpr std::int64_t dims[][2] = {{64, 64},   {96, 96},   {128, 128},
                                      {192, 128}, {192, 192}, {256, 256}};
  for (const auto& [dim, dim_v] : dims) {
    for (const bool causal : {false, true}) {
      Feature f;
      f.name = std::string(causal ? "long_causal_" : "long_") + std::to_string(dim);
      f.dim = dim, f.dim_v = dim_v;
      f.sq = {300, 300}, f.sk = {450, 450};
      f.options.causal = causal;
      f.how.output = causal ? Format::none : Format::f32;
      all.push_back(f);
      f.name += "_general";
      f.options.softcap = 3;
      f.sq = {140, 140}, f.sk = {200, 200};
      all.push_back(f);
    }
  }
  // Rows that are no whole pieces of eight channels.
  for (const auto& [dim, dim_v] : {std::pair{1, 3}, {36, 36}, {65, 20}, {100, 65}, {250, 131}}) {
    Feature f;
    f.name = "heads_" + std::to_string(dim) + "_" + std::to_string(dim_v);
    f.dim = dim, f.dim_v = dim_v, f.options.causal = dim % 2 == 0;
    f.how.output = dim % 2 == 0 ? Format::none : Format::f32;
    all.push_back(f);
  }
  // Three consumers in a block of Hopper's kernel, by the room that there is for rows: a block for
  // each of an H200's multiprocessors, and more keys than any sequence uses.
  for (const std::int64_t dim : {64, 128}) {
    for (const bool causal : {false, true}) {
      Feature f;
      f.name = std::string(three_consumers) + (causal ? "causal_" : "") + std::to_string(dim);
      f.applies = [dim](const Recipe& r) {
        return (r.v == Format::s8 && dim == 64) || r.v == Format::e4m3;
      };
      f.dim = f.dim_v = dim;
      f.heads_q = 11, f.heads_k = 1;
      f.sq.assign(12, 190), f.sk.assign(12, dim == 64 ? 2240 : 8320);
      f.used_q = {190, 0, 1, 64, 65, 128, 129, 190, 100, 7, 160, 190};
      f.used_k = {700, 300, 129, 128, 0, 257, 129, 190, 64, 1, 448, 333};
      f.how.seqused_q = f.how.seqused_k = true;
      f.options.causal = causal;
      f.how.output = causal ? Format::none : Format::f32;
      all.push_back(f);
    }
  }
  // Keys enough for P of 16 bits in shared memory: in whole tiles and not.
  for (const bool causal : {false, true}) {
    Feature f;
    f.name = std::string(long_rows) + (causal ? "causal" : "full");
    f.applies = [causal](const Recipe& r) {
      return r.qk == r.v || (!causal && (r.v == Format::bf16 || r.v == Format::f16));
    };
    f.dim = f.dim_v = 128;
    f.sq = {300, 300}, f.sk = {4480, 4480};
    f.used_q = {300, 130}, f.used_k = {4480, 4333};
    f.how.seqused_q = f.how.seqused_k = true;
    f.options.causal = causal;
    f.how.output = causal ? Format::none : Format::f32;
    all.push_back(f);
    f.name += "_general";
    f.options.softcap = 3;
    all.push_back(f);
  }
  // Codes of Q made by the attention kernel, several blocks of rows one after the other.
  for (const std::int64_t dim : {64, 96, 128}) {
    Feature f;
    f.name = "many_rows_" + std::to_string(dim);
    f.dim = f.dim_v = dim;
    f.sq = {700, 700};
    f.heads_q = 16;
    f.how.lse = false;
    f.how.output = Format::none;
    all.push_back(f);
  }
  // So many rows and sequences that plans make codes beside attention.
  for (const std::int64_t dim : {64, 128}) {
    Feature f;
    f.name = "beside_" + std::to_string(dim);
    f.applies = [](const Recipe& r) { return r.v == Format::s8; };
    f.dim = f.dim_v = dim;
    f.sq = {1100, 1100, 1100, 1100}, f.sk = {1024, 1024, 1024, 1024};
    f.heads_q = 32, f.heads_k = 16;
    f.how.lse = false;
    f.how.output = Format::none;
    all.push_back(f);
  }
  // Four works more than a GPU of 132 multiprocessors takes at a time: they come in parts.
  for (const bool lse : {false, true}) {
    Feature f;
    f.name = std::string("last_works") + (lse ? "_lse" : "");
    f.applies = [](const Recipe& r) { return r.p != Format::e4m3; };
    f.dim = f.dim_v = 128;
    f.sq = {150, 150}, f.sk = {4200, 4200};
    f.heads_q = 34, f.heads_k = 17;
    f.how.lse = f.sinks = lse;
    f.how.output = lse ? Format::f32 : Format::none;
    all.push_back(f);
  }
  return all;
}

}  // namespace qattn::test
