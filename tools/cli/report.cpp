// The demo's HTML report.
#include <fmt/format.h>

#include "demo.hpp"
#include "svg.hpp"

namespace qattn::cli {

namespace {

constexpr const char* head = R"(<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>qattn demo</title>
<style>
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2 { line-height: 1.2; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #8884;
  white-space: nowrap; }
th:first-child, td:first-child, .facts td, .facts th { text-align: left; }
svg { width: 100%; min-width: 38rem; max-width: 46rem; height: auto; font-size: 12px; }
svg text { fill: currentColor; paint-order: stroke; stroke: Canvas; stroke-width: 4px; }
svg polyline, svg .key { stroke-width: 1.5; }
svg .grid { stroke: #8886; }
svg .mark { stroke: currentColor; stroke-dasharray: 4 4; }
.machine { border-left: 4px solid #8886; padding-left: .8rem; }
</style>
</head>
<body>
)";

std::string html(const Table& table, const char* style = "numbers") {
  std::string text = fmt::format("<div class=\"wide\"><table class=\"{}\">\n", style);
  const char* cell = "th";
  for (const auto& row : table.rows()) {
    text += "<tr>";
    for (const std::string& value : row) {
      text += fmt::format("<{0}>{1}</{0}>", cell, escape_html(value));
    }
    text += "</tr>\n";
    cell = "td";
  }
  return text + "</table></div>\n";
}

std::string section(const std::string& title, const std::string& note, const std::string& body) {
  return fmt::format("<h2>{}</h2>\n<p>{}</p>\n<div class=\"wide\">{}</div>\n", title, note, body);
}

std::string errors(const Demo& demo) {
  std::vector<std::string> layers;
  std::vector<Series> series;
  for (const DemoRow& row : demo.rows) {
    series.push_back({row.recipe, row.layer_nrmse});
    while (layers.size() < row.layer_nrmse.size()) {
      layers.push_back(fmt::format("layer {}", layers.size()));
    }
  }
  return log_lines("NRMSE by layer and recipe", layers, series);
}

std::string speed(const std::string& label, const Demo& demo, double DemoRow::* ms,
                  double baseline) {
  std::vector<Bar> list;
  for (const DemoRow& row : demo.rows) {
    const double speedup = baseline / (row.*ms);
    list.push_back({row.recipe, speedup, fmt::format("{:.2f}x ({:.2f} ms)", speedup, row.*ms)});
  }
  return bars(label, list, 1.0);
}

std::string memory(const Demo& demo) {
  std::vector<Bar> list;
  for (const DemoRow& row : demo.rows) {
    list.push_back({row.recipe, row.memory_vs_f16, fmt::format("{:.3f}", row.memory_vs_f16)});
  }
  return bars("Bytes of Q, K and V with their scales, relative to f16", list, 1.0);
}

std::string embeddings(const Demo& demo) {
  if (!demo.embeddings) {
    return "<p>Not in this report. <code>python tools/capture/embed_minilm.py -o "
           "embeddings.json</code>, then <code>qattn demo --embeddings embeddings.json</code>, "
           "adds "
           "it.</p>\n";
  }
  Table table({"recipe", "lowest cosine", "mean cosine"});
  for (const EmbeddingRow& row : demo.embeddings->rows) {
    table.add({row.recipe, fixed(row.min_cosine, 6), fixed(row.mean_cosine, 6)});
  }
  return fmt::format(
      "<p>Cosine between the embeddings of {} sentences by {} and those with its attention "
      "replaced "
      "by <code>qattn.torch.sdpa</code>, padding masks included.</p>\n{}",
      demo.embeddings->sentences, escape_html(demo.embeddings->model), html(table));
}

std::string error_and_speed(const Demo& demo) {
  std::vector<Point> points;
  for (const DemoRow& row : demo.rows) {
    points.push_back({row.recipe, row.long_nrmse, demo.f32_long_ms / row.long_ms});
  }
  return scatter("Speed against error, long context", {"error (NRMSE against float64)", 0},
                 {"times as fast as f32", 1}, points);
}

std::string machine_text(const Demo& demo) {
  const Json& m = demo.machine;
  return fmt::format(
      "<p class=\"machine\">Measured on {}, instruction set {}, {} threads, by qattn {}.</p>\n",
      escape_html(m["cpu"].get<std::string>()), escape_html(m["isa"].get<std::string>()),
      m["threads"].dump(), escape_html(m["version"].get<std::string>()));
}

std::string provenance_html(const Demo& demo) {
  Table table({"what", "value"});
  for (const auto& [key, value] : demo.machine.items()) {
    table.add({key, value.is_string() ? value.get<std::string>() : value.dump()});
  }
  for (const auto& [key, value] : demo.source) table.add({key, value});
  std::string text = html(table, "facts");
  for (const Skipped& s : demo.skipped) {
    text += fmt::format("<p>{} skipped: {}</p>\n", escape_html(s.recipe), escape_html(s.reason));
  }
  return text;
}

}  // namespace

std::string html_report(const Demo& demo) {
  std::string page = head;
  page +=
      "<h1>qattn: attention in low precision</h1>\n"
      "<p>qattn computes attention with 8-bit and 4-bit numbers. A <em>recipe</em> says which "
      "numbers: <code>int8_full</code> is 8-bit integers throughout, <code>f32</code> is ordinary "
      "floats. This page shows what each recipe costs in accuracy and gains in speed on this "
      "machine.</p>\n";
  page += machine_text(demo);
  page += section("Speed against error",
                  "Each point is a recipe. Up is faster, left is more accurate. The dashed line is "
                  "the speed of <code>f32</code>. The input is a synthetic long context.",
                  error_and_speed(demo));
  page += "<h2>All numbers</h2>\n" + html(demo.table());
  page += fmt::format(
      "<p>The first columns are of Q, K and V of every layer of a real model on real text "
      "(B,Hq,Hkv,Sq,Sk,D = {}), the last three of the long context ({}: shifted keys and a sink "
      "token; error on {} query rows). NRMSE = |o - ref| / |ref|, against float64 on the "
      "unquantised inputs. Times are end to end, quantisation included.</p>\n",
      demo.layer.text(), demo.long_context.text(), demo.long_reference_rows);
  page += section("Error by layer", "NRMSE on the model's layers, logarithmic.", errors(demo));
  page += section("Speed, long context", "Relative to recipe f32 (dashed) in the same run.",
                  speed("Speedup on the long context", demo, &DemoRow::long_ms, demo.f32_long_ms));
  page += section("Speed, model layers", "The same on the model's short sequences.",
                  speed("Speedup on the model's layers", demo, &DemoRow::ms, demo.f32_ms));
  page += section("Memory", "Bytes of Q, K and V as multiplied, scales included, over f16's.",
                  memory(demo));
  page += "<h2>Sentence embeddings</h2>\n" + embeddings(demo);
  page += "<h2>Where these numbers come from</h2>\n" + provenance_html(demo);
  return page + "</body>\n</html>\n";
}

}  // namespace qattn::cli
