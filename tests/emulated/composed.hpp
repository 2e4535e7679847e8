// Cells composed of all that the products of matrix.hpp have: a covering array for each directory
// of kernels.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "emulated/matrix.hpp"
#include "support/covering_array.hpp"

namespace qattn::test {

/// Fields of a cell that are chosen together.
struct CellFactor {
  std::string name;
  std::function<void(Cell& to, const Cell& from)> take;
  std::function<bool(const Cell& a, const Cell& b)> same;
  std::function<std::string(const Cell&)> level;      ///< cells with one text are alike
  bool lossy = false;                                 ///< some values cost precision
  bool rare = false;                                  ///< some hide what others do
  std::function<double(const Cell&)> cost = nullptr;  ///< and cost time
};
const std::vector<CellFactor>& cell_factors();
/// So many of the first are what the others may need: formats and head dimensions.
constexpr std::size_t context_factors = 3;

/// Who serves a cell: no kernel of the directory, one with the portable one's help, or one alone.
enum class Served { no, helped, alone };

/// The cells of a directory of kernels.
class Composed {
 public:
  explicit Composed(std::string directory);

  const std::string& directory() const { return directory_; }
  const std::vector<Factor>& factors() const { return factors_; }
  /// Cells that have the values of a factor.
  const std::vector<std::vector<Cell>>& values() const { return values_; }
  Cell cell(const Choice& choice) const;
  /// The features that its values are of.
  std::string description(const Choice& choice) const;
  Served served(const Choice& choice) const;
  const std::vector<Cell>& cells() const { return cells_; }

 private:
  void generate();

  std::string directory_;
  std::vector<Factor> factors_;
  std::vector<std::vector<Cell>> values_;
  std::vector<Cell> cells_;
};

/// One for each line of architectures.inc.
const std::vector<Composed>& composed();

/// Plans a cell on its GPU, by its shapes alone.
Result<Plan> plan_shapes(const Cell& cell);

/// The cell as it can be laid out: pages are whole, and what shares keys has the longest first.
Cell settled(Cell cell);

}  // namespace qattn::test
