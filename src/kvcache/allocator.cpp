#include "kvcache/allocator.hpp"

#include <bit>
#include <queue>

namespace qattn::kv {
namespace {

/// One demotion on the hull of a page.
struct Step {
  double price;  ///< error a byte freed
  std::int64_t page;
  std::uint8_t to;

  /// priority_queue puts the largest first; here that is the cheapest, then the first page.
  bool operator<(const Step& other) const {
    return price != other.price ? price > other.price : page > other.page;
  }
};

class Prices {
 public:
  Prices(std::span<const KvTier> tiers, std::span<const std::int64_t> bytes, float hysteresis)
      : bytes_(bytes), anchored_(1.0 + static_cast<double>(hysteresis)) {
    for (const KvTier& t : tiers) distortion_.push_back(distortion(t));
  }

  std::int64_t bytes(std::uint8_t tier) const { return bytes_[tier - std::size_t{1}]; }

  /// The hull's next step of a page that would lie in tier `at`; false: there is none.
  bool next(const Candidate& page, std::uint8_t at, Step& step) const {
    bool any = false;
    for (std::size_t to = at + std::size_t{1}; to <= bytes_.size(); ++to) {
      const auto tier = static_cast<std::uint8_t>(to);
      const auto freed = static_cast<double>(bytes(at) - bytes(tier));
      if (freed <= 0) continue;
      const double price = (error(page, tier) - error(page, at)) / freed;
      if (any && price > step.price) continue;
      step.price = price;
      step.to = tier;
      any = true;
    }
    return any;
  }

 private:
  /// Expected squared error with the page in `tier`. Codes that went through other tiers carry
  /// those errors too; a page that was demoted before is held where it is by the hysteresis.
  double error(const Candidate& page, std::uint8_t tier) const {
    double d = 0;
    for (std::size_t i = 0; i < distortion_.size(); ++i) {
      const bool passed = (page.path >> i & 1) != 0;
      if (passed || i + 1 == tier) d += distortion_[i];
    }
    const bool anchored = std::popcount(page.path) > 1;
    const auto w = static_cast<double>(page.importance);
    return w * w * d * (anchored ? anchored_ : 1.0);
  }

  std::span<const std::int64_t> bytes_;
  std::vector<double> distortion_;
  double anchored_;
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

Allocation allocate(std::span<const Candidate> pages, std::span<const KvTier> tiers,
                    std::span<const std::int64_t> page_bytes, std::int64_t allowed,
                    float hysteresis) {
  const Prices prices(tiers, page_bytes, hysteresis);
  Allocation a;
  a.tier.reserve(pages.size());
  for (const Candidate& p : pages) {
    a.tier.push_back(p.tier == 0 ? std::uint8_t{1} : p.tier);
    a.bytes += prices.bytes(a.tier.back());
  }
  a.fits = allowed < 0 || a.bytes <= allowed;
  if (a.fits) return a;
  std::vector<Step> first;
  for (std::size_t i = 0; i < pages.size(); ++i) {
    Step step{0, static_cast<std::int64_t>(i), 0};
    if (prices.next(pages[i], a.tier[i], step)) first.push_back(step);
  }
  std::priority_queue<Step> steps({}, std::move(first));
  while (a.bytes > allowed && !steps.empty()) {
    Step step = steps.top();
    steps.pop();
    const auto i = static_cast<std::size_t>(step.page);
    a.bytes -= prices.bytes(a.tier[i]) - prices.bytes(step.to);
    a.tier[i] = step.to;
    if (prices.next(pages[i], a.tier[i], step)) steps.push(step);
  }
  a.fits = a.bytes <= allowed;
  return a;
}

}  // namespace qattn::kv
