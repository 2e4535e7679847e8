// The table of formats.def against the enum, the names and the codecs.
#include <gtest/gtest.h>

#include <optional>
#include <set>
#include <string_view>

#include "formats/bf16.hpp"
#include "formats/e2m1.hpp"
#include "formats/e4m3.hpp"
#include "formats/e4m3fnuz.hpp"
#include "formats/e5m2.hpp"
#include "formats/f16.hpp"
#include "formats/int8.hpp"
#include "formats/kv/codes.hpp"
#include "formats/micro.hpp"
#include "formats/ue8m0.hpp"
#include "qattn/format.hpp"

namespace qattn {
namespace {

TEST(FormatTable, RowsFollowTheEnum) {
  int id = 0;
  for (const FormatInfo& row : all_formats()) {
    EXPECT_EQ(static_cast<int>(row.id), ++id) << row.name;
    EXPECT_EQ(&info(row.id), &row);
    EXPECT_EQ(format_named(row.name), row.id);
  }
  EXPECT_GT(id, 0);
}

TEST(FormatTable, NamesAreTheIdentifiersAndUnique) {
#define QATTN_FORMAT(id, text, bits, group, scale) \
  EXPECT_STREQ(#id, text);                         \
  EXPECT_EQ(info(Format::id).name, #id);
#include "qattn/formats.def"
#undef QATTN_FORMAT
  std::set<std::string_view> names;
  for (const FormatInfo& row : all_formats()) names.insert(row.name);
  EXPECT_EQ(names.size(), all_formats().size());
}

TEST(FormatTable, NoneAndUnknown) {
  EXPECT_EQ(info(Format::none).name, "none");
  EXPECT_EQ(info(Format::none).bits, 0);
  EXPECT_EQ(info(Format::none).scale, Format::none);
  EXPECT_EQ(info(static_cast<Format>(-1)).name, "none");
  EXPECT_EQ(info(static_cast<Format>(1000)).name, "none");
  for (const char* name : {"", "none", "E4M3", "e4m3 ", "fp8"}) {
    EXPECT_EQ(format_named(name), std::nullopt) << name;
  }
}

TEST(FormatTable, SizesGroupsAndScalesAreConsistent) {
  for (const FormatInfo& row : all_formats()) {
    EXPECT_GT(row.bits, 0) << row.name;
    EXPECT_LE(row.bits, 64) << row.name;
    if (row.group > 0) {
      EXPECT_NE(row.scale, Format::none) << row.name;
      EXPECT_EQ(row.group * row.bits % 8, 0) << row.name << ": a group fills whole bytes";
    }
    if (row.scale != Format::none) {
      EXPECT_EQ(info(row.scale).group, 0) << row.name << ": a scale has no groups of its own";
      EXPECT_EQ(info(row.scale).bits % 8, 0) << row.name;
    }
  }
}

template <class Codec>
int code_bits() {
  return 8 * static_cast<int>(sizeof(typename Codec::Code));
}

TEST(FormatTable, SizesMatchTheCodecs) {
  EXPECT_EQ(info(Format::f16).bits, code_bits<formats::F16>());
  EXPECT_EQ(info(Format::bf16).bits, code_bits<formats::Bf16>());
  EXPECT_EQ(info(Format::s8).bits, code_bits<formats::S8>());
  EXPECT_EQ(info(Format::u8).bits, code_bits<formats::U8>());
  EXPECT_EQ(info(Format::e4m3).bits, code_bits<formats::E4m3>());
  EXPECT_EQ(info(Format::e4m3fnuz).bits, code_bits<formats::E4m3Fnuz>());
  EXPECT_EQ(info(Format::e5m2).bits, code_bits<formats::E5m2>());
  EXPECT_EQ(info(Format::ue8m0).bits, code_bits<formats::Ue8m0>());
  EXPECT_EQ(1 << info(Format::kv2).bits, formats::Kv<2>::levels);
  EXPECT_EQ(1 << info(Format::kv3).bits, formats::Kv<3>::levels);
  EXPECT_EQ(1 << info(Format::kv4).bits, formats::Kv<4>::levels);
  EXPECT_EQ(1 << info(Format::kv8).bits, formats::Kv<8>::levels);
  EXPECT_EQ(info(Format::mxfp8).group, formats::kMxGroup);
  EXPECT_EQ(info(Format::mxfp4).group, formats::kMxGroup);
  EXPECT_EQ(info(Format::nvfp4).group, formats::kNvfp4Group);
}

TEST(FormatTable, PackedBytes) {
  EXPECT_EQ(packed_bytes(8, info(Format::kv3).bits), 3);
  EXPECT_EQ(packed_bytes(16, info(Format::nvfp4).bits), 8);
  EXPECT_EQ(packed_bytes(5, info(Format::f32).bits), 20);
}

}  // namespace
}  // namespace qattn
