// New tokens: which pages they make, which pages leave the window, which tiers that asks for; and
// fewer tokens, which the budget allows fewer bytes. A plan is made for every sequence of a call
// before anything is changed.
#pragma once

#include <cstdint>
#include <vector>

#include "kvcache/data.hpp"
#include "kvcache/pages.hpp"

namespace qattn::kv {

class LaneSums;

/// The new rows of one sequence.
struct Rows {
  const std::byte *k = nullptr, *v = nullptr;                     ///< token 0 of head 0
  std::int64_t k_token = 0, k_head = 0, v_token = 0, v_head = 0;  ///< strides in bytes
  Format format = Format::none;
  std::int64_t count = 0;
  const float* importance = nullptr;  ///< [heads_kv][blocks] or null
  std::int64_t blocks = 0;

  const std::byte* k_row(std::int64_t head, std::int64_t token) const {
    return k + head * k_head + token * k_token;
  }
  const std::byte* v_row(std::int64_t head, std::int64_t token) const {
    return v + head * v_head + token * v_token;
  }
};

/// One page to be made: what `from` holds (if any), then new tokens [begin, end), in `to`'s tier.
/// In place where both are the same page.
struct Job {
  std::int64_t head = 0, index = 0;  ///< of the page's entry in its table
  Entry from, to;
  bool has_from = false;
  std::int64_t begin = 0, end = 0;  ///< positions in the sequence
};

class AppendPlan {
 public:
  /// Pages are taken from the pools but nothing else changes; without commit() they go back.
  AppendPlan(detail::KvCacheData& cache, Sequence& sequence, std::int64_t layer, const Rows& rows)
      : cache_(cache),
        layer_(sequence.layers[static_cast<std::size_t>(layer)]),
        rows_(rows),
        new_length_(layer_.length + rows.count) {}
  AppendPlan(AppendPlan&& other) noexcept;
  AppendPlan(const AppendPlan&) = delete;
  AppendPlan& operator=(const AppendPlan&) = delete;
  ~AppendPlan();

  /// Errors: out_of_memory where the budget cannot hold. Throws std::bad_alloc.
  Status make();
  /// In place of make(), without rows: the tokens from `length` on go, and pages are demoted as far
  /// as the budget then asks. Throws std::bad_alloc.
  void cut(std::int64_t length);
  const std::vector<Job>& jobs() const { return jobs_; }
  void run(const Job& job, std::byte* scratch) const;  ///< scratch: one page of 16 bits
  void commit() noexcept;

 private:
  bool only_fills_tails() const;
  void extend(std::int64_t head);
  Status assign_tiers();
  void take_pages();
  // append_sets.cpp
  struct Moments;
  struct Both;
  struct Moved;
  struct Choices;
  struct Span;
  void choose_sets();
  void choose_set(std::int64_t head, const DriftParts& parts, LaneSums& sums,
                  Choices& choices) const;
  void choose_part(const Span& part, std::uint32_t& named, int& last, Choices& choices) const;
  void put_set(std::int64_t head, const Moved& moved);
  /// f(position, row, size) for the rows of K or V that a mean may be of.
  template <class F>
  void for_rows(Part part, const Span& span, F f) const;
  Moments moments(Part part, const Span& span) const;
  /// `from`: means from which keys have moved; null: they have not.
  void freeze_k(const Moments& m, const float* from, Moved& moved) const;
  void freeze_v(const Moments& m, Moved& moved) const;
  /// Sets what is known of a page that is new, grows or leaves the window; negative: nothing.
  void weigh(Job& job) const;
  float key_importance(const Job& job) const;
  void load_new(Part part, std::int64_t head, std::int64_t position, float* row) const;
  void store_new_rows(const Job& job, std::byte* page) const;
  Frames frames(std::int64_t head, int set) const;

  detail::KvCacheData& cache_;
  Layer& layer_;
  Rows rows_;
  std::int64_t new_length_;
  bool fast_ = false;  ///< the last page of every table takes it all; tables_ is not used
  std::vector<Table> tables_;
  Sets sets_;  ///< the layer's, where one more is made now
  std::vector<Job> jobs_;
  std::vector<Entry> taken_;     ///< pages of this plan
  std::vector<Entry> replaced_;  ///< pages that the tables give up
};

}  // namespace qattn::kv
