#include "kvcache/allocator.hpp"

#include <queue>

namespace qattn::kv {
namespace {

/// One demotion on the hull of a page.
struct Step {
  double price = 0;  ///< error a byte freed
  std::int64_t page = 0;
  std::uint8_t to = 0;

  /// priority_queue puts the largest first; here that is the cheapest, then the first page.
  bool operator<(const Step& other) const {
    return price != other.price ? price > other.price : page > other.page;
  }
};

}  // namespace

double distortion(const KvTier& tier) {
  const auto of = [](int bits) {
    // Relative RMS errors at D = 128; tests/kvcache/quantizer_test.cpp measures them.
    const double e = bits == 2 ? 0.341 : bits == 3 ? 0.188 : bits == 4 ? 0.0998 : 0.0065;
    return e * e;
  };
  return of(tier.k_bits) + of(tier.v_bits);
}

Prices make_prices(std::span<const KvTier> tiers, std::span<const std::int64_t> page_bytes,
                   float hysteresis) {
  Prices p;
  p.anchored = 1.0 + static_cast<double>(hysteresis);
  for (std::size_t i = 0; i < tiers.size(); ++i) {
    p.bytes[i] = page_bytes[i];
    p.distortion[i] = distortion(tiers[i]);
  }
  p.tiers = static_cast<std::int32_t>(tiers.size());
  return p;
}

Allocation allocate(std::span<const Candidate> pages, std::span<const KvTier> tiers,
                    std::span<const std::int64_t> page_bytes, std::int64_t allowed,
                    float hysteresis) {
  const Prices prices = make_prices(tiers, page_bytes, hysteresis);
  const auto next = [&](std::size_t i, int at, Step& step) {
    step.page = static_cast<std::int64_t>(i);
    step.to = static_cast<std::uint8_t>(prices.next(pages[i], at, step.price));
    return step.to != 0;
  };
  Allocation a;
  a.tier.reserve(pages.size());
  for (const Candidate& p : pages) {
    a.tier.push_back(p.tier == 0 ? std::uint8_t{1} : p.tier);
    a.bytes += prices.bytes_of(a.tier.back());
  }
  a.fits = allowed < 0 || a.bytes <= allowed;
  if (a.fits) return a;
  std::vector<Step> first;
  for (std::size_t i = 0; i < pages.size(); ++i) {
    Step step;
    if (next(i, a.tier[i], step)) first.push_back(step);
  }
  std::priority_queue<Step> steps({}, std::move(first));
  while (a.bytes > allowed && !steps.empty()) {
    Step step = steps.top();
    steps.pop();
    const auto i = static_cast<std::size_t>(step.page);
    a.bytes -= prices.bytes_of(a.tier[i]) - prices.bytes_of(step.to);
    a.tier[i] = step.to;
    if (next(i, a.tier[i], step)) steps.push(step);
  }
  a.fits = a.bytes <= allowed;
  return a;
}

}  // namespace qattn::kv
