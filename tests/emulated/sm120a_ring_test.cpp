// GeForce Blackwell's plain kernels, whose K and V come by TMA: which calls they serve, and that a
// ring with a fault does not pass for a right one.
#include <set>

#include "conformance/coded.hpp"
#include "emulated/on_gpu.hpp"
#include "isa/emu/fault.hpp"

namespace qattn::test {
namespace {

/// More tiles than any ring has stages.
constexpr std::int64_t many_keys = 450;

class GeforceRing : public OnGpuTest {
 protected:
  Feature feature(std::int64_t sq, std::int64_t sk, std::int64_t dim) const {
    Feature f;
    f.sq = {sq, sq}, f.sk = {sk, sk}, f.dim = f.dim_v = dim;
    f.heads_q = 2, f.heads_k = 1;
    return with_inputs(f, recipe(), Format::bf16);
  }

  /// The smallest head dimension that has a ring.
  std::int64_t small() const { return has_fp8(recipe()) || info(recipe().qk).group > 0 ? 64 : 128; }

  /// Under every timing, with the same bits, as the model says, and by TMA.
  void expect_ring(const Feature& f, int pack = 0, int splits = 0) {
    expect_ring(f, recipe(), pack, splits);
  }
  void expect_ring(const Feature& f, const Recipe& recipe, int pack, int splits) {
    const Call call = make_call(f, 21);
    Laid laid = lay_out(call, f.how);
    const ForceSplitKv forced(pack, splits);
    emu::take_stats();
    const Outcome outcome = run_emulated(call, laid, recipe, every_timing());
    const emu::Stats done = emu::take_stats();
    ASSERT_FALSE(HasFailure());
    EXPECT_EQ(outcome.splits, std::max(splits, 1));
    EXPECT_NE(outcome.plan.find("kernel: sm120a_prefill"), std::string::npos) << outcome.plan;
    EXPECT_GT(done.warp_instructions(emu::Word::tma_load), 0);
    expect_matches_model(outcome, call, f.how.output,
                         model_attention(call, outcome.model_options()));
  }
};

TEST_P(GeforceRing, ServesPlainCalls) {
  for (const std::int64_t dim : std::set<std::int64_t>{small(), 128}) {
    SCOPED_TRACE(dim);
    expect_ring(feature(130, many_keys, dim));
    if (HasFailure()) return;
    Feature causal = feature(200, 330, dim);
    causal.options.causal = true;
    expect_ring(causal);
    if (HasFailure()) return;
  }
}

TEST_P(GeforceRing, ServesPackedSequences) {
  Feature f = feature(64, 64, small());
  f.sq = {64, 1, 150, 65}, f.sk = {64, 129, 300, 65}, f.options.causal = true;
  f.how.packed_q = f.how.packed_k = true;
  expect_ring(f);
  if (HasFailure() || info(recipe().qk).group == 0) return;
  Recipe smooth = recipe();
  smooth.smooth_q = Toggle::on;
  expect_ring(f, smooth, 0, 0);
}

/// Q's means come with K, of one block of Q or of two: some that end inside a block of threads, and
/// such as are longer than one.
TEST_P(GeforceRing, MeansOfQueries) {
  if (info(recipe().qk).group == 0) GTEST_SKIP() << "formats of groups";
  for (const std::int32_t block : {64, 128, 192, 320}) {
    SCOPED_TRACE(block);
    Recipe smooth = recipe();
    smooth.smooth_q = Toggle::on, smooth.q_scale = {Granularity::group, block, 0};
    Feature f = feature(330, 200, small());
    f.family = Family::outliers;
    expect_ring(f, smooth, 0, 0);
    if (HasFailure()) return;
  }
}

TEST_P(GeforceRing, ServesFewQueries) {
  Feature f = feature(3, many_keys, small());
  f.heads_q = 8, f.heads_k = 2;
  expect_ring(f, 4, 2);
}

/// Fewer rows than the block has warps for, and none in some sequences.
TEST_P(GeforceRing, WarpsWithoutRows) {
  Feature f = feature(17, many_keys, small());
  f.used_k = {many_keys, 17}, f.how.seqused_k = true;
  f.options.causal = true;
  expect_ring(f);
}

/// Plants a fault for as long as it lives.
class Planted {
 public:
  Planted(emu::Fault fault, int mbarrier) { emu::planted_fault() = {fault, 0, mbarrier}; }
  ~Planted() { emu::planted_fault() = {}; }
  Planted(const Planted&) = delete;
  Planted& operator=(const Planted&) = delete;
};

/// Is a call noticed that runs with what is planted: by the emulator, or by its result?
bool is_noticed(const Feature& f, const Recipe& recipe, const Timing& timing,
                const ModelOutput& model) {
  const Call call = make_call(f, 22);
  Laid laid = lay_out(call, f.how);
  emu::Options& options = emu::options();
  const emu::Options before = options;
  options.schedule = timing.schedule, options.order = timing.order, options.seed = timing.seed;
  const EmulatedBackend backend(120);
  const Outcome outcome = run_call(call, laid, recipe);
  options = before;
  return !outcome.status.ok() ||
         !(distance(outcome.out, model.out, call.dim_v).nrmse <= 100 * tight_bound(f.how.output));
}

/// Of the first stage's barriers: K is there, V is, K has been read, V has.
constexpr int k_full = 0, v_full = 1, k_empty = 2, v_empty = 3;

TEST_P(GeforceRing, BrokenRingsAreNoticed) {
  const Feature f = feature(40, many_keys, small());
  const Call call = make_call(f, 22);
  Laid laid = lay_out(call, f.how);
  const Outcome right = run_emulated(call, laid, recipe(), every_timing().first(1));
  ASSERT_FALSE(HasFailure());
  const ModelOutput model = model_attention(call, right.model_options());
  using emu::Fault;
  for (const auto& [fault, barriers] :
       {std::pair{Fault::none, std::vector{0}},
        std::pair{Fault::lost_wait, std::vector{k_full, v_full, k_empty, v_empty}},
        std::pair{Fault::lost_arrival, std::vector{k_full, v_full, k_empty, v_empty}},
        std::pair{Fault::few_bytes, std::vector{k_full, v_full}},
        std::pair{Fault::many_bytes, std::vector{k_full, v_full}},
        std::pair{Fault::no_swizzle, std::vector{0}}}) {
    for (const int barrier : barriers) {
      const Planted planted(fault, barrier);
      const bool noticed = std::ranges::any_of(every_timing(), [&](const Timing& timing) {
        return is_noticed(f, recipe(), timing, model);
      });
      EXPECT_EQ(noticed, fault != Fault::none)
          << "fault " << static_cast<int>(fault) << " of barrier " << barrier;
    }
  }
}

std::vector<OnGpu> recipes_on_geforce() {
  std::vector<OnGpu> all = everywhere();
  std::erase_if(all, [](const OnGpu& x) { return x.architecture != 120; });
  return all;
}

INSTANTIATE_TEST_SUITE_P(Cover, GeforceRing, testing::ValuesIn(recipes_on_geforce()), recipe_name);

}  // namespace
}  // namespace qattn::test
