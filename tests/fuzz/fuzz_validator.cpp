// The validator and what stands behind it: a call built from bytes is planned and explained without
// memory, then run on exactly as much memory as its views reach.
#include "fuzz/check.hpp"
#include "fuzz/wild_call.hpp"

using namespace qattn;
using namespace qattn::fuzz;

namespace {

void refuse_well(const Status& s) {
  require(s.code() != Code::internal, "no internal error", s.message());
  require(s.code() == Code::out_of_memory || names_something(s.message()),
          "a refusal names something", s.message());
}

void attention_target(Choices c, bool real) {
  WildCall call(c, real);
  const Result<Plan> made = plan(call.tensors, call.options);
  if (!made.ok()) refuse_well(made.status());
  const std::string text = explain(call.tensors, call.options);
  require(text.starts_with("refused: ") == (made.status().code() == Code::invalid_argument),
          "explain() and plan() agree", text + made.status().message());
  if (!real) return;
  const Status s = attention(call.tensors, call.options);
  if (!s.ok()) refuse_well(s);
  require(made.ok() || !s.ok(), "attention() refuses what plan() refuses", made.status().message());
  const std::string wrong = call.memory.violation(!s.ok());
  require(wrong.empty(), "only outputs of accepted calls are written", wrong + "\n" + s.message());
}

void quantize_target(Choices c, bool real) {
  WildQuantize call(c, real);
  Status s;
  if (!real) {
    s = quantize_shapes(call.tensors.x, call.options, call.tensors.cu_seqlens).status();
  } else if (call.backwards) {
    s = dequantize(call.tensors, call.options);
  } else {
    s = quantize(call.tensors, call.options).status();
  }
  if (!s.ok()) refuse_well(s);
  const std::string wrong = call.memory.violation(!s.ok());
  require(wrong.empty(), "only outputs of accepted calls are written", wrong + "\n" + s.message());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const Choices rest({data + 1, size - 1});
  switch (data[0] % 4) {
    case 0:
      attention_target(rest, true);
      break;
    case 1:
      attention_target(rest, false);
      break;
    case 2:
      quantize_target(rest, true);
      break;
    default:
      quantize_target(rest, false);
  }
  return 0;
}
