// What the demo measures; the report and the table are two views of it.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "console.hpp"
#include "measure.hpp"

namespace qattn::cli {

/// One recipe on every layer of the model and on the synthetic long context.
struct DemoRow {
  std::string recipe;
  std::vector<double> layer_nrmse;
  double nrmse_mean = 0, nrmse_worst = 0, worst_row_cosine = 1;
  double ms = 0;              ///< mean over the layers
  double memory_vs_f16 = 0;   ///< of the model's Q, K, V
  std::int64_t nan_rows = 0;  ///< output rows with NaN or Inf, all layers and the long context
  double long_nrmse = 0, long_worst_row_cosine = 1, long_ms = 0;  ///< NaN where refused
};

struct EmbeddingRow {
  std::string recipe;
  double min_cosine = 0, mean_cosine = 0;
};

/// The end-to-end result that tools/capture/embed_minilm.py wrote.
struct Embeddings {
  std::string model;
  std::int64_t sentences = 0;
  std::vector<EmbeddingRow> rows;
};
/// Errors: invalid_argument "path: rule".
Result<Embeddings> read_embeddings(const std::string& path);

struct Demo {
  std::map<std::string, std::string> source;  ///< metadata of the data file
  Json machine;
  Geometry layer, long_context;
  std::int64_t long_reference_rows = 0;
  std::vector<DemoRow> rows;
  std::vector<Skipped> skipped;
  double f32_ms = 0, f32_long_ms = 0;
  std::optional<Embeddings> embeddings;

  Table table() const;
  Json json() const;
};

/// A self-contained HTML page: no scripts, nothing loaded from elsewhere.
std::string html_report(const Demo& demo);

}  // namespace qattn::cli
