// The readers of .npy and .safetensors files: round trips, and hostile files that must be refused
// with a reason.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>

#include "io/file.hpp"
#include "io/half.hpp"
#include "io/load.hpp"
#include "io/npy.hpp"
#include "io/safetensors.hpp"

namespace qattn::io {
namespace {

namespace fs = std::filesystem;
using Shape = std::vector<std::int64_t>;

/// A directory of its own for every test, gone afterwards.
class Files : public testing::Test {
 protected:
  void SetUp() override {
    const testing::TestInfo* test = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = fs::temp_directory_path() /
              (std::string("qattn_io_") + test->name() + "_" + std::to_string(::getpid()));
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::string file(const std::string& name, const std::string& contents) const {
    std::ofstream(path(name), std::ios::binary) << contents;
    return path(name);
  }
  std::size_t file_count() const {
    return static_cast<std::size_t>(
        std::distance(fs::directory_iterator(folder_), fs::directory_iterator()));
  }

 private:
  fs::path folder_;
};

std::string little_endian(std::uint64_t value, int bytes) {
  std::string text;
  for (int i = 0; i < bytes; ++i) text += static_cast<char>(value >> (8 * i) & 0xff);
  return text;
}

std::string npy(const std::string& header, const std::string& data, int major = 1) {
  return std::string("\x93NUMPY") + static_cast<char>(major) + '\0' +
         little_endian(header.size(), major == 1 ? 2 : 4) + header + data;
}

std::string npy_header(const std::string& descr, const std::string& shape,
                       const std::string& order = "False") {
  return "{'descr': '" + descr + "', 'fortran_order': " + order + ", 'shape': " + shape + ", }\n";
}

std::string safetensors(const std::string& header, const std::string& data) {
  return little_endian(header.size(), 8) + header + data;
}

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  std::string text = "\"";
  return text.append(name)
      .append("\":{\"dtype\":\"")
      .append(dtype)
      .append("\",\"shape\":")
      .append(shape)
      .append(",\"data_offsets\":")
      .append(offsets)
      .append("}");
}

std::string object(std::initializer_list<std::string> members) {
  std::string text;
  for (const std::string& member : members) text.append(text.empty() ? "{" : ",").append(member);
  return text.append("}");
}

/// The refusal names the file and contains `rule`.
template <class T>
void expect_refused(const Result<T>& result, const std::string& name, const std::string& rule) {
  ASSERT_FALSE(result.ok()) << name;
  EXPECT_EQ(result.status().code(), Code::invalid_argument);
  EXPECT_NE(result.status().message().find(rule), std::string::npos)
      << name << ": " << result.status().message();
}

class NpyTest : public Files {};
class SafetensorsTest : public Files {};
class OutputTest : public Files {};

TEST_F(NpyTest, EveryFormatSurvivesARoundTrip) {
  for (const Format format : {Format::f32, Format::f16, Format::bf16, Format::s8, Format::u8,
                              Format::s32, Format::s64, Format::b8}) {
    for (const Shape& shape : {Shape{2, 3, 4}, Shape{5}, Shape{}, Shape{3, 0, 2}}) {
      Array array = zeros(format, shape);
      for (std::size_t i = 0; i < array.bytes.size(); ++i) {
        array.bytes[i] = static_cast<std::byte>(format == Format::b8 ? i % 2 : i * 7 + 1);
      }
      OutputFiles files;
      ASSERT_TRUE(write_npy(files, path("x.npy"), array).ok());
      ASSERT_TRUE(files.commit().ok());
      const Result<Array> read = read_npy(path("x.npy"), {.bf16 = true});
      ASSERT_TRUE(read.ok()) << read.status().message();
      EXPECT_EQ(read->format, format);
      EXPECT_EQ(read->shape, shape);
      EXPECT_EQ(read->bytes, array.bytes);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(read->bytes.data()) % 64, 0u);
    }
  }
}

TEST_F(NpyTest, DataBeginsAtAMultipleOf64Bytes) {
  OutputFiles files;
  ASSERT_TRUE(write_npy(files, path("x.npy"), zeros(Format::f32, {3})).ok());
  ASSERT_TRUE(files.commit().ok());
  EXPECT_EQ((fs::file_size(path("x.npy")) - 12) % 64, 0u);
}

TEST_F(NpyTest, PackedCodesAreWrittenAsBytes) {
  OutputFiles files;
  ASSERT_TRUE(write_npy(files, path("x.npy"), zeros(Format::nvfp4, {2, 32})).ok());
  ASSERT_TRUE(files.commit().ok());
  const Result<Array> read = read_npy(path("x.npy"));
  ASSERT_TRUE(read.ok()) << read.status().message();
  EXPECT_EQ(read->format, Format::u8);
  EXPECT_EQ(read->shape, (Shape{2, 16}));
}

TEST_F(NpyTest, Versions1To3AndForeignSpellingsAreRead) {
  const std::string data = little_endian(0x3f800000, 4) + little_endian(0x40000000, 4);
  const std::string spellings[] = {
      npy_header("<f4", "(2,)"),
      "{\"shape\":(2,),\"fortran_order\":False,\"descr\":\"<f4\"}",
      "{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2)}   \n",
  };
  for (int major = 1; major <= 3; ++major) {
    for (const std::string& header : spellings) {
      const Result<Array> read = read_npy(file("x.npy", npy(header, data, major)));
      ASSERT_TRUE(read.ok()) << read.status().message();
      EXPECT_EQ(get(*read, 0), 1.0f);
      EXPECT_EQ(get(*read, 1), 2.0f);
    }
  }
}

TEST_F(NpyTest, Uint16IsBf16OnlyOnRequest) {
  const std::string x = file("x.npy", npy(npy_header("<u2", "(1,)"), "\x80\x3f"));
  expect_refused(read_npy(x), "uint16", "--bf16");
  const Result<Array> read = read_npy(x, {.bf16 = true});
  ASSERT_TRUE(read.ok());
  EXPECT_EQ(get(*read, 0), 1.0f);
}

TEST_F(NpyTest, OtherOrdersAndWidthsAreConverted) {
  std::string converted;
  // (2, 3, 2), element (i, j, k) = i + 10 j + 100 k, in big-endian halves in Fortran order.
  std::string data;
  for (int k = 0; k < 2; ++k) {
    for (int j = 0; j < 3; ++j) {
      for (int i = 0; i < 2; ++i) {
        const std::uint16_t half = f16_from(static_cast<float>(i + 10 * j + 100 * k));
        data += {static_cast<char>(half >> 8), static_cast<char>(half & 0xff)};
      }
    }
  }
  const std::string x = file("x.npy", npy(npy_header(">f2", "(2, 3, 2)", "True"), data));
  const Result<Array> read = read_npy(x, {.converted = &converted});
  ASSERT_TRUE(read.ok()) << read.status().message();
  EXPECT_EQ(converted, "big to little endian, Fortran to C order");
  for (int n = 0; n < 12; ++n) {
    EXPECT_EQ(get(*read, n), static_cast<float>(n / 6 + 10 * (n / 2 % 3) + 100 * (n % 2)));
  }
  const std::string f4 = little_endian(0x3f800000, 4);
  EXPECT_TRUE(
      read_npy(file("x.npy", npy(npy_header("<f4", "(1,)"), f4)), {.converted = &converted}).ok());
  EXPECT_EQ(converted, "");
  EXPECT_TRUE(read_npy(file("e.npy", npy(npy_header("<f8", "(0, 3)", "True"), ""))).ok());
}

TEST_F(NpyTest, HostileFilesAreRefused) {
  const std::string f4 = "0123";
  const std::string huge = "(4611686018427387904,)";
  struct Case {
    const char* name;
    std::string contents, rule;
  };
  const Case cases[] = {
      {"empty", "", "truncated"},
      {"magic only", "\x93NUMPY", "truncated"},
      {"wrong magic", "PK\x03\x04" + std::string(60, 'x'), "magic"},
      {"version 0", npy(npy_header("<f4", "(1,)"), f4, 0), "version 0.0"},
      {"version 4", npy(npy_header("<f4", "(1,)"), f4, 4), "version 4.0"},
      {"header past the end", std::string("\x93NUMPY\x01\x00\xff\xff{}", 12), "header"},
      {"4 GiB header", std::string("\x93NUMPY\x02\x00\xff\xff\xff\xff{}", 14), "header of"},
      {"length cut", std::string("\x93NUMPY\x02\x00\xff", 9), "truncated"},
      {"no dictionary", npy("[1, 2]\n", f4), "dictionary"},
      {"unclosed", npy("{'descr': '<f4', 'fortran_order': False", f4), "','"},
      {"text after", npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)} import os\n", f4),
       "after its dictionary"},
      {"key missing", npy("{'descr': '<f4', 'shape': (1,)}\n", f4), "needs descr"},
      {"key twice", npy("{'descr': '<f4', 'descr': '<f4', 'shape': (1,)}\n", f4), "twice"},
      {"unknown key", npy("{'descr': '<f4', 'evil': 1, 'shape': (1,)}\n", f4), "unknown key"},
      {"structured dtype",
       npy("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}\n", f4), "dtype"},
      {"pickled objects", npy(npy_header("|O", "(1,)"), f4), "dtype '|O'"},
      {"float64 cut", npy(npy_header("<f8", "(2,)"), f4 + f4), "in float64 needs 16 bytes"},
      {"float64 beyond f32", npy(npy_header(">f8", "(1,)"), std::string("\x7f\xe0\0\0\0\0\0\0", 8)),
       "element 0 is 8.988466e+307"},
      {"float128", npy(npy_header("<f16", "(1,)"), f4 + f4 + f4 + f4), "dtype '<f16'"},
      {"raw bytes", npy(npy_header("<V1", "(4,)"), f4), "any format of 8 bits"},
      {"raw memory of numpy", npy(npy_header("|V2", "(2,)"), f4), "dtype '|V2'"},
      {"order is no boolean", npy(npy_header("<f4", "(1,)", "0"), f4), "True nor False"},
      {"negative extent", npy(npy_header("<f4", "(-1,)"), f4), "negative"},
      {"extent over 64 bits", npy(npy_header("<f4", "(99999999999999999999,)"), f4), "2^63"},
      {"product overflows", npy(npy_header("<f4", "(4294967296, 4294967296, 4294967296)"), f4),
       "overflows"},
      {"overflow behind a zero",
       npy(npy_header("<f4", "(0, 4294967296, 4294967296, 4294967296)"), ""), "overflows"},
      {"huge extent", npy(npy_header("|i1", huge), f4), "overflows"},
      {"terabytes promised", npy(npy_header("|i1", "(1099511627776,)"), f4), "truncated"},
      {"float extent", npy(npy_header("<f4", "(1.0,)"), f4), "','"},
      {"extent is text", npy(npy_header("<f4", "('1',)"), f4), "no number"},
      {"shape without comma", npy(npy_header("<f4", "(1)"), f4), "','"},
      {"shape is a list", npy(npy_header("<f4", "[1]"), f4), "tuple"},
      {"six dimensions", npy(npy_header("<f4", "(1, 1, 1, 1, 1, 1)"), f4), "5 dimensions"},
      {"data truncated", npy(npy_header("<f4", "(2,)"), f4 + "456"), "truncated"},
      {"trailing garbage", npy(npy_header("<f4", "(1,)"), f4 + "4"), "trailing"},
      {"boolean of 2", npy(npy_header("|b1", "(2,)"), std::string("\x01\x02", 2)), "0 or 1"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    const std::string x = file("x.npy", c.contents);
    expect_refused(read_npy(x), c.name, c.rule);
    expect_refused(read_npy(x), c.name, "x.npy");
  }
}

TEST_F(NpyTest, EveryTruncationIsRefused) {
  const std::string whole = npy(npy_header("<f4", "(2, 2)"), std::string(16, 'x'));
  ASSERT_TRUE(read_npy(file("whole.npy", whole)).ok());
  for (std::size_t length = 0; length < whole.size(); ++length) {
    EXPECT_FALSE(read_npy(file("cut.npy", whole.substr(0, length))).ok()) << length;
  }
}

TEST_F(NpyTest, WhatIsNoFileIsRefused) {
  expect_refused(read_npy(path("absent.npy")), "absent", "no such file");
  expect_refused(read_npy(path("")), "directory", "not a regular file");
  expect_refused(read_npy("/dev/zero"), "device", "not a regular file");
}

TEST_F(SafetensorsTest, TensorsAndMetadataAreRead) {
  const std::string header =
      object({"\"__metadata__\":{\"model\":\"m\"}", entry("b", "F32", "[2]", "[4,12]"),
              entry("a", "F16", "[1,2]", "[0,4]"), entry("none", "I8", "[0,7]", "[12,12]")}) +
      "   ";
  const std::string data = std::string("\x00\x3c\x00\xc0", 4) + little_endian(0x3f800000, 4) +
                           little_endian(0xbf800000, 4);
  const std::string x = file("x.safetensors", safetensors(header, data));
  Result<SafetensorsFile> opened = SafetensorsFile::open(x);
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  EXPECT_EQ(opened->names(), (std::vector<std::string>{"a", "b", "none"}));
  EXPECT_EQ(opened->metadata().at("model"), "m");

  const Result<Array> a = load(x + ":a");
  ASSERT_TRUE(a.ok()) << a.status().message();
  EXPECT_EQ(a->format, Format::f16);
  EXPECT_EQ(a->shape, (Shape{1, 2}));
  EXPECT_EQ(get(*a, 1), -2.0f);
  const Result<Array> b = load(x + ":b");
  ASSERT_TRUE(b.ok());
  EXPECT_EQ(get(*b, 1), -1.0f);
  EXPECT_TRUE(load(x + ":none").ok());
  expect_refused(load(x + ":c"), "unknown name", "it has: a, b, none");
  expect_refused(load(x), "no name", ":tensor_name");
  expect_refused(load(path("x.pt")), "other kind", "neither");
}

TEST_F(SafetensorsTest, HostileFilesAreRefused) {
  const std::string four = "0123", eight = four + four;
  const std::string max = "9223372036854775807", over = "18446744073709551616";
  const std::string square = "[9223372036854775807,9223372036854775807]";
  const std::string deep(200000, '[');
  struct Case {
    const char* name;
    std::string contents, rule;
  };
  const auto one = [&](const std::string& dtype, const std::string& shape,
                       const std::string& offsets, const std::string& data) {
    return safetensors(object({entry("t", dtype, shape, offsets)}), data);
  };
  const Case cases[] = {
      {"empty", "", "truncated"},
      {"seven bytes", "1234567", "truncated"},
      {"length of 2^64 - 1", std::string(8, '\xff') + "{}", "at most"},
      {"length over 100 MB", little_endian(100'000'001, 8) + "{}", "at most"},
      {"length past the end", little_endian(50, 8) + "{}", "truncated"},
      {"not JSON", safetensors("{nonsense}", ""), "JSON"},
      {"JSON cut", safetensors("{\"t\":{", ""), "JSON"},
      {"two values", safetensors("{} {}", ""), "JSON"},
      {"invalid UTF-8", safetensors("{\"\xff\":1}", ""), "JSON"},
      {"array", safetensors("[1]", ""), "object"},
      {"nested deeply", safetensors(deep, ""), "deeply"},
      {"name twice",
       safetensors(object({entry("t", "I8", "[4]", "[0,4]"), entry("t", "I8", "[4]", "[4,8]")}),
                   eight),
       "twice"},
      {"dtype twice",
       safetensors("{\"t\":{\"dtype\":\"I8\",\"dtype\":\"I8\",\"shape\":[4],"
                   "\"data_offsets\":[0,4]}}",
                   four),
       "twice"},
      {"entry is a number", safetensors("{\"t\":1}", ""), "dtype, shape"},
      {"no shape", safetensors("{\"t\":{\"dtype\":\"I8\",\"data_offsets\":[0,4]}}", four), "shape"},
      {"unknown member",
       safetensors("{\"t\":{\"dtype\":\"I8\",\"shape\":[4],\"data_offsets\":[0,4],"
                   "\"evil\":1}}",
                   four),
       "exactly"},
      {"metadata is a list", safetensors("{\"__metadata__\":[]}", ""), "__metadata__"},
      {"metadata holds a number", safetensors("{\"__metadata__\":{\"a\":1}}", ""), "not a string"},
      {"unknown dtype", one("C64", "[1]", "[0,8]", eight), "dtype C64"},
      {"dtype is no text",
       safetensors("{\"t\":{\"dtype\":4,\"shape\":[4],\"data_offsets\":[0,4]}}", four),
       "dtype is not"},
      {"negative extent", one("I8", "[-4]", "[0,4]", four), "extent"},
      {"float extent", one("I8", "[4.0]", "[0,4]", four), "extent"},
      {"extent over 64 bits", one("I8", "[" + over + "]", "[0,4]", four), "extent"},
      {"product overflows", one("F32", square, "[0,4]", four), "overflows"},
      {"overflow behind a zero",
       one("F32", "[0,9223372036854775807,9223372036854775807]", "[0,0]", ""), "overflows"},
      {"six dimensions", one("I8", "[1,1,1,1,1,4]", "[0,4]", four), "5 dimensions"},
      {"size differs", one("F32", "[2]", "[0,4]", four), "needs 8 bytes"},
      {"too many bytes", one("F32", "[1]", "[0,8]", eight), "trailing"},
      {"end before begin", one("I8", "[4]", "[4,0]", four), "before they begin"},
      {"end past the file", one("I8", "[8]", "[0,8]", four), "the file has 4"},
      {"offset of 2^63 - 1", one("I8", "[4]", "[0," + max + "]", four), "the file has 4"},
      {"one offset", one("I8", "[4]", "[0]", four), "two integers"},
      {"negative offset", one("I8", "[4]", "[-4,0]", four), "two integers"},
      {"overlap",
       safetensors(object({entry("s", "I8", "[4]", "[0,4]"), entry("t", "I8", "[4]", "[2,6]")}),
                   "012345"),
       "overlap"},
      {"hole",
       safetensors(object({entry("s", "I8", "[2]", "[0,2]"), entry("t", "I8", "[2]", "[4,6]")}),
                   "012345"),
       "hole"},
      {"trailing garbage", one("I8", "[4]", "[0,4]", eight), "trailing"},
      {"boolean of 255", one("BOOL", "[1]", "[0,1]", "\xff"), "0 or 1"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    const std::string x = file("x.safetensors", c.contents);
    expect_refused(load(x + ":t"), c.name, c.rule);
    expect_refused(load(x + ":t"), c.name, "x.safetensors");
  }
}

TEST_F(SafetensorsTest, EveryTruncationIsRefused) {
  const std::string whole =
      safetensors(object({entry("t", "F32", "[2,2]", "[0,16]")}), std::string(16, 'x'));
  ASSERT_TRUE(load(file("whole.safetensors", whole) + ":t").ok());
  for (std::size_t length = 0; length < whole.size(); ++length) {
    EXPECT_FALSE(load(file("cut.safetensors", whole.substr(0, length)) + ":t").ok()) << length;
  }
}

TEST_F(OutputTest, NothingRemainsOfWhatWasNotCommitted) {
  {
    OutputFiles files;
    ASSERT_TRUE(files.add_text(path("a"), "text").ok());
    EXPECT_FALSE(fs::exists(path("a")));
  }
  EXPECT_EQ(file_count(), 0u);
}

TEST_F(OutputTest, CommitReplacesAndLeavesNoTemporary) {
  file("a", "old and longer");
  OutputFiles files;
  ASSERT_TRUE(files.add_text(path("a"), "new").ok());
  ASSERT_TRUE(files.add_text(path("b"), "other").ok());
  ASSERT_TRUE(files.commit().ok());
  EXPECT_EQ(file_count(), 2u);
  EXPECT_EQ(fs::file_size(path("a")), 3u);
}

TEST_F(OutputTest, ImpossibleTargetsAreRefused) {
  EXPECT_FALSE(OutputFiles::check(path("no/such/folder")).ok());
  EXPECT_FALSE(OutputFiles::check(path("")).ok());
  EXPECT_FALSE(OutputFiles::check("/dev/null").ok());
  OutputFiles files;
  ASSERT_TRUE(files.add_text(path("a"), "1").ok());
  EXPECT_FALSE(files.add_text(path("a"), "2").ok());
}

TEST_F(OutputTest, ASymbolicLinkKeepsPointingAtTheNewContents) {
  file("target", "old");
  fs::create_symlink(path("target"), path("link"));
  OutputFiles files;
  ASSERT_TRUE(files.add_text(path("link"), "newer").ok());
  ASSERT_TRUE(files.commit().ok());
  EXPECT_TRUE(fs::is_symlink(path("link")));
  EXPECT_EQ(fs::file_size(path("target")), 5u);
}

TEST(HalfTest, EveryCodeSurvivesARoundTrip) {
  for (std::uint32_t code = 0; code < 65536; ++code) {
    const auto bits = static_cast<std::uint16_t>(code);
    const float f16 = f16_to_float(bits), bf16 = bf16_to_float(bits);
    ASSERT_TRUE(std::isnan(f16) || f16_from(f16) == bits) << bits;
    ASSERT_TRUE(std::isnan(bf16) || bf16_from(bf16) == bits) << bits;
  }
}

TEST(HalfTest, RoundsHalfToEvenAndOverflowsToInfinity) {
  EXPECT_EQ(f16_from(1.0f + 0x1p-11f), 0x3c00);
  EXPECT_EQ(f16_from(1.0f + 3 * 0x1p-11f), 0x3c02);
  EXPECT_EQ(f16_from(0x1p-25f), 0x0000);
  EXPECT_EQ(f16_from(65519.0f), 0x7bff);
  EXPECT_EQ(f16_from(65520.0f), 0x7c00);
  EXPECT_EQ(bf16_from(1.0f + 0x1p-8f), 0x3f80);
  EXPECT_EQ(bf16_from(1.0f + 3 * 0x1p-8f), 0x3f82);
  EXPECT_TRUE(std::isnan(f16_to_float(f16_from(std::numeric_limits<float>::quiet_NaN()))));
}

}  // namespace
}  // namespace qattn::io
