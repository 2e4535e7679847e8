// fork(): a child of a process that has used OpenMP can compute with threads = 1. With more threads
// GNU's OpenMP runtime waits for workers that do not exist in the child; the last test records it.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "hardening/small_call.hpp"

namespace qattn::test {
namespace {

enum class End { good, bad, hung };

/// Runs `work` in a child and says how it ended; a hanging child is killed.
template <class Work>
End in_child(Work work, std::chrono::seconds patience) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(work() ? 0 : 1);
  const auto end = std::chrono::steady_clock::now() + patience;
  int status = 0;
  while (::waitpid(child, &status, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() > end) {
      ::kill(child, SIGKILL);
      ::waitpid(child, &status, 0);
      return End::hung;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? End::good : End::bad;
}

bool equals(const SmallCall& call, const char* recipe, int threads,
            const std::vector<float>& expected) {
  std::vector<float> out = call.output();
  return attention(call.tensors(out), options_of(recipe, threads)).ok() && out == expected;
}

TEST(Fork, BeforeAnyThread) {
  // The child is the first to use OpenMP: every number of threads works there.
  const SmallCall call;
  const auto work = [&call] {
    std::vector<float> one = call.output();
    return attention(call.tensors(one), options_of("int8_full", 1)).ok() &&
           equals(call, "int8_full", 3, one);
  };
  EXPECT_EQ(in_child(work, std::chrono::seconds(30)), End::good);
}

TEST(Fork, OneThreadAfterATeam) {
  const SmallCall call;
  for (const char* recipe : {"f32", "int8_full", "fp8"}) {
    std::vector<float> expected = call.output();
    ASSERT_TRUE(attention(call.tensors(expected), options_of(recipe, 3)).ok());
    const auto work = [&] { return equals(call, recipe, 1, expected); };
    EXPECT_EQ(in_child(work, std::chrono::seconds(30)), End::good) << recipe;
    EXPECT_TRUE(equals(call, recipe, 3, expected)) << "the parent is as it was";
  }
}

TEST(Fork, NewThreadOfTheChild) {
  // A thread that the child starts has no team yet, and gets a whole one.
  const SmallCall call;
  std::vector<float> expected = call.output();
  ASSERT_TRUE(attention(call.tensors(expected), options_of("int8_full", 3)).ok());
  const auto work = [&] {
    bool good = false;
    std::thread([&] { good = equals(call, "int8_full", 3, expected); }).join();
    return good;
  };
  EXPECT_EQ(in_child(work, std::chrono::seconds(30)), End::good);
}

TEST(Fork, TeamAfterATeamIsTheRuntimesAffair) {
  const SmallCall call;
  std::vector<float> expected = call.output();
  ASSERT_TRUE(attention(call.tensors(expected), options_of("int8_full", 3)).ok());
  const auto work = [&] { return equals(call, "int8_full", 3, expected); };
  const End end = in_child(work, std::chrono::seconds(3));
  RecordProperty("end", static_cast<int>(end));
  // Right or hanging, but never a wrong result. (libomp re-initialises itself in the child.)
  EXPECT_NE(end, End::bad);
  std::printf("a child's team after its parent's: %s\n", end == End::hung ? "hangs" : "works");
}

}  // namespace
}  // namespace qattn::test
