#include "reference/problem.hpp"

#include <algorithm>
#include <cmath>
#include <string>

#include "reference/decode.hpp"

namespace qattn::reference {
namespace {

std::int64_t entry(const TensorView& view, std::int64_t i, std::int64_t j = 0) {
  const std::int64_t at = i * view.stride[0] + j * view.stride[1];
  return view.format == Format::s64 ? load<std::int64_t>(view, at) : load<std::int32_t>(view, at);
}

Status wrong(const std::string& tensor, std::int64_t i, std::int64_t value,
             const std::string& rule) {
  return {Code::invalid_argument,
          tensor + "[" + std::to_string(i) + "] is " + std::to_string(value) + ": " + rule};
}

/// Strides by meaning. Packed tensors have no batch dimension; pages stand in its place.
Operand make_operand(const TensorView& view, Layout layout, bool packed) {
  Operand operand;
  operand.view = view;
  const int lead = packed ? 0 : 1;
  const int token = layout == Layout::bshd ? lead : lead + 1;
  const int head = layout == Layout::bshd ? lead + 1 : lead;
  operand.outer = packed ? 0 : view.stride[0];
  operand.token = view.stride[token];
  operand.head = view.stride[head];
  operand.channel = view.stride[lead + 2];
  operand.heads = view.shape[head];
  operand.dim = view.shape[lead + 2];
  operand.page_size = view.shape[token];
  return operand;
}

std::int64_t tokens(const TensorView& view, Layout layout, bool packed) {
  const int lead = packed ? 0 : 1;
  return view.shape[layout == Layout::bshd ? lead : lead + 1];
}

/// Fills first and length of every sequence from cu_seqlens.
Status read_cu_seqlens(const TensorView& cu, const std::string& tensor, std::int64_t total,
                       std::vector<std::int64_t>& first, std::vector<std::int64_t>& length) {
  for (std::int64_t b = 0; b + 1 < cu.shape[0]; ++b) {
    const std::int64_t begin = entry(cu, b), end = entry(cu, b + 1);
    if (b == 0 && begin != 0) return wrong(tensor, 0, begin, "must be 0");
    if (end < begin) return wrong(tensor, b + 1, end, "must not be less than the entry before it");
    if (end > total) return wrong(tensor, b + 1, end, "past the end of the packed tensor");
    first.push_back(begin);
    length.push_back(end - begin);
  }
  return {};
}

Status read_seqused(const TensorView& used, const std::string& tensor,
                    std::vector<std::int64_t>& length) {
  if (!used.present()) return {};
  for (std::size_t b = 0; b < length.size(); ++b) {
    const std::int64_t n = entry(used, static_cast<std::int64_t>(b));
    if (n < 0 || n > length[b]) {
      return wrong(tensor, static_cast<std::int64_t>(b), n,
                   "must be between 0 and the sequence's " + std::to_string(length[b]));
    }
    length[b] = n;
  }
  return {};
}

Status check_pages(const Problem& problem, const TensorView& table, std::int64_t pages) {
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    for (std::int64_t j = 0; j < problem.len_k[b]; j += problem.k.page_size) {
      const std::int64_t page = entry(table, b, j / problem.k.page_size);
      if (page < 0 || page >= pages) {
        return wrong("page_table[" + std::to_string(b) + "]", j / problem.k.page_size, page,
                     "must be a page from 0 to " + std::to_string(pages - 1));
      }
    }
  }
  return {};
}

/// A mask whose Sq or Sk extent is not 1 must reach every query and key that exists.
Status check_mask(const Problem& problem, const TensorView& mask) {
  if (!mask.present()) return {};
  for (int side = 0; side < 2; ++side) {
    const int dim = mask.rank - 2 + side;
    if (dim < 0 || mask.shape[dim] == 1) continue;
    const auto& length = side == 0 ? problem.len_q : problem.len_k;
    for (std::size_t b = 0; b < length.size(); ++b) {
      if (length[b] > mask.shape[dim]) {
        return wrong("mask.shape", dim, mask.shape[dim],
                     "sequence " + std::to_string(b) + " needs " + std::to_string(length[b]));
      }
    }
  }
  return {};
}

/// The same of a block mask, whose extents count blocks.
Status check_block_mask(const Problem& problem, const TensorView& mask,
                        const AttentionOptions& options) {
  if (!mask.present()) return {};
  for (int side = 0; side < 2; ++side) {
    const int dim = mask.rank - 2 + side;
    if (dim < 0 || mask.shape[dim] == 1) continue;
    const std::int64_t block = side == 0 ? options.block_mask_q : options.block_mask_k;
    for (const std::int64_t length : side == 0 ? problem.len_q : problem.len_k) {
      if (length > mask.shape[dim] * block) {
        return wrong("block_mask.shape", dim, mask.shape[dim],
                     "a sequence has " + std::to_string(length) + " tokens");
      }
    }
  }
  return {};
}

Status read_queries(const AttentionTensors& tensors, const AttentionOptions& options,
                    Problem& problem) {
  problem.packed_q = tensors.cu_seqlens_q.present();
  problem.q = make_operand(tensors.q, options.layout, problem.packed_q);
  problem.rows = tokens(tensors.q, options.layout, problem.packed_q);
  if (problem.packed_q) {
    problem.batch = tensors.cu_seqlens_q.shape[0] - 1;
    Status status = read_cu_seqlens(tensors.cu_seqlens_q, "cu_seqlens_q", problem.rows,
                                    problem.first_q, problem.room_q);
    if (!status.ok()) return status;
    problem.q.first = problem.first_q;
  } else {
    problem.batch = tensors.q.shape[0];
    problem.first_q.assign(problem.batch, 0);
    problem.room_q.assign(problem.batch, problem.rows);
  }
  problem.len_q = problem.room_q;
  return read_seqused(tensors.seqused_q, "seqused_q", problem.len_q);
}

Status read_keys(const AttentionTensors& tensors, const AttentionOptions& options,
                 Problem& problem) {
  const bool paged = tensors.page_table.present();
  const bool packed = tensors.cu_seqlens_k.present() && !paged;
  problem.k = make_operand(tensors.k, options.layout, packed);
  problem.v = make_operand(tensors.v, options.layout, packed);
  const std::int64_t total = tokens(tensors.k, options.layout, packed);
  if (packed) {
    Status status = read_cu_seqlens(tensors.cu_seqlens_k, "cu_seqlens_k", total, problem.k.first,
                                    problem.len_k);
    if (!status.ok()) return status;
    problem.v.first = problem.k.first;
  } else {
    const std::int64_t room = paged ? total * tensors.page_table.shape[1] : total;
    problem.len_k.assign(problem.batch, room);
  }
  Status status = read_seqused(tensors.seqused_k, "seqused_k", problem.len_k);
  if (!status.ok() || !paged) return status;
  problem.k.pages = problem.v.pages = tensors.page_table;
  return check_pages(problem, tensors.page_table, tensors.k.shape[0]);
}

}  // namespace

std::int64_t Operand::offset(std::int64_t b, std::int64_t s, std::int64_t h) const {
  if (pages.present()) {
    const std::int64_t page = entry(pages, b, s / page_size);
    return page * outer + (s % page_size) * token + h * head;
  }
  if (!first.empty()) return (first[b] + s) * token + h * head;
  return b * outer + s * token + h * head;
}

Result<Problem> make_problem(const AttentionTensors& tensors, const AttentionOptions& options) {
  Problem problem;
  Status status = read_queries(tensors, options, problem);
  if (status.ok()) status = read_keys(tensors, options, problem);
  if (status.ok()) status = check_mask(problem, tensors.mask);
  if (status.ok()) status = check_block_mask(problem, tensors.block_mask, options);
  if (!status.ok()) return status;
  problem.softmax_scale = options.softmax_scale
                              ? static_cast<double>(*options.softmax_scale)
                              : 1.0 / std::sqrt(static_cast<double>(problem.q.dim));
  return problem;
}

}  // namespace qattn::reference
