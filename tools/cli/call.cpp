#include "call.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "console.hpp"
#include "io/load.hpp"

namespace qattn::cli {

namespace {

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::size_t begin = 0;
  while (true) {
    const std::size_t end = text.find(',', begin);
    parts.push_back(text.substr(begin, end - begin));
    if (end == std::string::npos) return parts;
    begin = end + 1;
  }
}

}  // namespace

void MeaningFlags::add_to(CLI::App& app) {
  app.add_option("--layout", layout, "order of the dimensions: bhsd (default) or bshd")
      ->check(CLI::IsMember({"bhsd", "bshd"}));
  app.add_flag("--causal", causal, "query i sees keys j <= i + Sk - Sq");
  app.add_option("--scale", scale, "softmax scale (default 1/sqrt(D))");
  app.add_option("--window", window, "left,right: keys around the diagonal; -1 is unlimited");
  app.add_option("--softcap", softcap, "c: scores become c*tanh(s/c) (default off)");
}

Result<AttentionOptions> MeaningFlags::options() const {
  AttentionOptions options;
  options.layout = parse_layout(layout);
  options.softmax_scale = scale;
  options.causal = causal;
  options.softcap = softcap;
  if (!window.empty()) {
    const auto sides = parse_integers(window);
    if (!sides || sides->size() != 2) {
      return usage_error(fmt::format("--window {}: two integers left,right are needed", window));
    }
    options.window_left = (*sides)[0];
    options.window_right = (*sides)[1];
  }
  return options;
}

void CallFlags::add_to(CLI::App& app) {
  MeaningFlags::add_to(app);
  app.add_option("--backend", backend, "auto (default) or cpu")
      ->check(CLI::IsMember({"auto", "cpu", "cuda", "hip"}));
  app.add_option("--threads", threads, "CPU threads (default: all)");
}

Result<AttentionOptions> CallFlags::options() const {
  if (backend == "cuda" || backend == "hip") {
    return Status(Code::unsupported,
                  fmt::format("--backend {}: this build has the backend cpu only", backend));
  }
  if (threads < 0) return usage_error(fmt::format("--threads {}: at least 0", threads));
  Result<AttentionOptions> options = MeaningFlags::options();
  if (options.ok()) options->threads = threads;
  return options;
}

void OperandFlags::add_to(CLI::App& app) {
  app.add_option("--q", q, "queries: x.npy or file.safetensors:tensor_name")->required();
  app.add_option("--k", k, "keys")->required();
  app.add_option("--v", v, "values")->required();
  app.add_flag("--bf16", bf16, "uint16 .npy files hold bf16");
}

Result<Geometry> Geometry::parse(const std::string& text) {
  const auto sizes = parse_integers(text);
  const bool positive =
      sizes && std::all_of(sizes->begin(), sizes->end(), [](std::int64_t n) { return n > 0; });
  if (!positive || sizes->size() != 6) {
    return usage_error(
        fmt::format("--shape {}: six positive integers B,Hq,Hkv,Sq,Sk,D are needed", text));
  }
  const std::vector<std::int64_t>& s = *sizes;
  // Before any view is made: its strides are products of these.
  if (!io::dense_bytes(Format::f32, {s[0], s[1], s[3], s[5]}) ||
      !io::dense_bytes(Format::f32, {s[0], s[2], s[4], s[5]})) {
    return usage_error(fmt::format("--shape {}: sizes in bytes overflow 64 bits", text));
  }
  return Geometry{s[0], s[1], s[2], s[3], s[4], s[5], s[5]};
}

std::string Geometry::text() const {
  return fmt::format("{},{},{},{},{},{}", batch, heads_q, heads_kv, queries, keys, dim);
}

double Geometry::flops(bool causal) const {
  const double products = static_cast<double>(batch) * static_cast<double>(heads_q) *
                          static_cast<double>(queries) * static_cast<double>(keys);
  return 2 * products * static_cast<double>(dim + dim_v) * (causal ? 0.5 : 1.0);
}

Result<io::Array> load_tensor(const char* name, const std::string& spec, bool bf16,
                              std::map<std::string, std::string>* metadata) {
  std::string converted;
  Result<io::Array> array =
      io::load(spec, {.bf16 = bf16, .converted = &converted, .metadata = metadata});
  if (!array.ok()) {
    return Status(array.status().code(), fmt::format("{}: {}", name, array.status().message()));
  }
  if (!converted.empty()) say(fmt::format("{}: {}: converted: {}", name, spec, converted));
  return array;
}

Result<Operands> Operands::load(const OperandFlags& flags) {
  Operands operands;
  struct Source {
    const char* name;
    const std::string& spec;
    io::Array& into;
  };
  const Source sources[] = {
      {"q", flags.q, operands.q}, {"k", flags.k, operands.k}, {"v", flags.v, operands.v}};
  for (const Source& source : sources) {
    Result<io::Array> array = load_tensor(source.name, source.spec, flags.bf16);
    if (!array.ok()) return array.status();
    source.into = std::move(*array);
  }
  return operands;
}

AttentionTensors Operands::tensors() const {
  AttentionTensors tensors;
  tensors.q = q.view();
  tensors.k = k.view();
  tensors.v = v.view();
  return tensors;
}

Result<Case> make_case(Operands operands, const AttentionOptions& options) {
  Case c{std::move(operands), options, {}};
  AttentionTensors tensors = c.operands.tensors();
  if (tensors.q.rank != 4 || tensors.k.rank != 4 || tensors.v.rank != 4) {
    const bool q = tensors.q.rank != 4, k = tensors.k.rank != 4;
    const io::Array& wrong = q ? c.operands.q : k ? c.operands.k : c.operands.v;
    return usage_error(fmt::format("{}: shape {} has {} dimensions; 4 are needed ({})",
                                   q   ? "q"
                                   : k ? "k"
                                       : "v",
                                   io::shape_text(wrong.shape), wrong.shape.size(),
                                   options.layout == Layout::bshd ? "B, S, H, D" : "B, H, S, D"));
  }
  c.geometry = geometry_of(tensors, options.layout);
  const std::vector<std::int64_t> out_shape{c.geometry.batch, c.geometry.heads_q,
                                            c.geometry.queries, c.geometry.dim_v};
  if (!io::dense_bytes(Format::f32, out_shape)) {
    return usage_error(fmt::format("out: shape {} overflows 64 bits", io::shape_text(out_shape)));
  }
  tensors.out = shapes_only(c.geometry, options.layout, Format::f32).out;
  const Result<Recipe> f32 = recipe_named("f32");
  if (!f32.ok()) return f32.status();
  c.options.recipe = *f32;
  const Result<Plan> planned = plan(tensors, c.options);
  if (!planned.ok() && planned.status().code() != Code::unsupported) return planned.status();
  return c;
}

Geometry geometry_of(const AttentionTensors& tensors, Layout layout) {
  const int head = layout == Layout::bshd ? 2 : 1, token = 3 - head;
  return {tensors.q.shape[0],     tensors.q.shape[head],  tensors.k.shape[head],
          tensors.q.shape[token], tensors.k.shape[token], tensors.q.shape[3],
          tensors.v.shape[3]};
}

std::vector<std::int64_t> operand_shape(Layout layout, std::int64_t batch, std::int64_t heads,
                                        std::int64_t tokens, std::int64_t dim) {
  if (layout == Layout::bshd) return {batch, tokens, heads, dim};
  return {batch, heads, tokens, dim};
}

AttentionTensors shapes_only(const Geometry& g, Layout layout, Format format) {
  const auto view = [&](std::int64_t heads, std::int64_t tokens, std::int64_t dim, Format f) {
    const auto shape = operand_shape(layout, g.batch, heads, tokens, dim);
    return TensorView::dense(static_cast<void*>(nullptr), f,
                             {shape[0], shape[1], shape[2], shape[3]});
  };
  AttentionTensors tensors;
  tensors.q = view(g.heads_q, g.queries, g.dim, format);
  tensors.k = view(g.heads_kv, g.keys, g.dim, format);
  tensors.v = view(g.heads_kv, g.keys, g.dim_v, format);
  tensors.out = view(g.heads_q, g.queries, g.dim_v, Format::f32);
  return tensors;
}

Result<std::vector<Recipe>> parse_recipes(const std::string& text) {
  if (text == "all") return std::vector<Recipe>(recipes().begin(), recipes().end());
  std::vector<Recipe> list;
  for (const std::string& name : split(text)) {
    const auto same = [&](const Recipe& recipe) { return recipe.name == name; };
    if (std::any_of(list.begin(), list.end(), same)) continue;
    Result<Recipe> recipe = recipe_named(name);
    if (!recipe.ok()) return recipe.status();
    list.push_back(*recipe);
  }
  return list;
}

Result<Format> parse_input_format(const std::string& option, const std::string& text) {
  const auto format = format_named(text);
  if (format == Format::f32 || format == Format::f16 || format == Format::bf16) return *format;
  return usage_error(fmt::format("{} {}: one of f32, f16, bf16 is needed", option, text));
}

std::optional<std::vector<std::int64_t>> parse_integers(const std::string& text) {
  std::vector<std::int64_t> numbers;
  for (const std::string& part : split(text)) {
    std::int64_t number = 0;
    const char* end = part.data() + part.size();
    const auto [stop, code] = std::from_chars(part.data(), end, number);
    if (code != std::errc() || stop != end) return std::nullopt;
    numbers.push_back(number);
  }
  return numbers;
}

Layout parse_layout(const std::string& text) {
  return text == "bshd" ? Layout::bshd : Layout::bhsd;
}

}  // namespace qattn::cli
