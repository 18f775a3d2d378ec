#include "zeropage/pager/foresight/access_plan.h"

#include <doctest/doctest.h>
#include <time.h>

#include <algorithm>
#include <string>

#include "memory_shortage.h"

using namespace zeropage;

namespace {

struct Program {
  AccessPlan plan;
  std::vector<AccessPlan::Ordinal> ordinals;

  explicit Program(std::size_t runs) {
    for (std::size_t i = 0; i < runs; ++i) ordinals.push_back(plan.create(i));
  }
  void use(const std::string& names, Access access = Access::read) {
    for (const char name : names) plan.use({ordinals[name - 'a'], access, true, true}, 1000);
  }
  std::string coming(std::size_t most) const {
    std::string names;
    for (std::size_t k = 0; k < most; ++k) {
      const auto next = plan.coming(k);
      if (!next) break;
      names += static_cast<char>('a' + next->use.ordinal);
    }
    return names;
  }
};

}  // namespace

TEST_CASE("what comes next is what came next, forward and backward told apart by the way there") {
  Program program(3);
  program.use("abcb");
  CHECK(program.coming(5).empty());
  program.use("a");
  program.use("abcb");
  CHECK(program.coming(6) == "abcbab");  // goes on periodically
  program.use("a");
  program.use("bc");
  CHECK(program.coming(3) == "bab");
  program.use("b");
  CHECK(program.coming(2) == "ab");
}

TEST_CASE("the plan finds its place again after something new") {
  Program program(6);
  program.use("abcdefabcdef");
  CHECK(program.coming(2) == "ab");
  program.use("c");  // as never before
  CHECK(program.coming(2).empty());
  program.use("d");
  CHECK(program.coming(3) == "efc");
  const auto surprises = program.plan.surprises();
  program.use("efabcdef");
  CHECK(program.plan.surprises() <= surprises + 1);
}

TEST_CASE("accumulation: the longest way back tells which of equal passes comes next") {
  Program program(5);
  const std::string pass = "abcdcb", step = "e";
  const auto period = [&] {
    for (int i = 0; i < 4; ++i) program.use(pass);
    program.use(step);
  };
  period(), period(), period();
  const auto surprises = program.plan.surprises();
  for (int i = 0; i < 5; ++i) period();
  CHECK(program.plan.surprises() == surprises);
  for (int i = 0; i < 3; ++i) program.use(pass);
  CHECK(program.coming(8) == pass + "ea");
  program.use(pass);
  CHECK(program.coming(4) == "eabc");
}

TEST_CASE("the next use is the first that comes, in bytes of uses from now") {
  Program program(4);
  program.use("abcdabcdab");
  CHECK(program.plan.next_use(2).begin == program.plan.now());
  CHECK(program.plan.next_use(3).begin > program.plan.now());
  CHECK(program.plan.next_use(1).begin - program.plan.next_use(0).begin == 1001);
  CHECK(program.plan.next_use(1).begin - program.plan.now() == 3 * 1001);
  const auto never = program.plan.create(9);
  CHECK(program.plan.next_use(never).begin == AccessPlan::kNever);
}

TEST_CASE("what is created anew takes the place of the one that died there, whatever was created between") {
  AccessPlan plan;
  const auto parameter = plan.create(1), other = plan.create(2);
  std::vector<AccessPlan::Ordinal> gradients;
  for (int step = 0; step < 6; ++step) {
    plan.use({parameter, Access::read, true, true}, 100);
    const auto gradient = plan.create(7);
    plan.use({gradient, Access::overwrite, false, true}, 100);
    plan.use({other, Access::read, true, true}, 100);
    const auto second = plan.create(7);
    plan.use({second, Access::overwrite, false, true}, 100);
    if (step >= 3) {
      CHECK(gradient == gradients[gradients.size() - 2]);
      CHECK(second == gradients.back());
    }
    gradients.push_back(gradient);
    gradients.push_back(second);
    plan.use({gradient, Access::read, false, true}, 100);
    plan.use({second, Access::read, false, false}, 100);
    plan.destroy(gradient);
    plan.destroy(second);
  }
}

TEST_CASE("content that dies before its next use is needed until its death, and nothing reads it then") {
  AccessPlan plan;
  const auto parameter = plan.create(1), other = plan.create(2);
  for (int step = 0; step < 6; ++step) {
    const auto gradient = plan.create(7);
    plan.use({gradient, Access::overwrite, true, true}, 100);
    plan.use({parameter, Access::read, true, true}, 100);
    if (step >= 4) {  // it is used once more
      CHECK(plan.next_use(gradient).begin == plan.now());
      CHECK(plan.next_use(gradient).access == Access::read);
    }
    plan.use({gradient, Access::read, true, true}, 100);
    const auto death = plan.next_use(gradient);
    if (step >= 4) {
      CHECK(death.begin == plan.now() + 101);
      CHECK(death.access == Access::overwrite);
    }
    plan.use({other, Access::read, true, true}, 100);
    plan.destroy(gradient);
    plan.use({parameter, Access::write, true, true}, 100);
    if (step >= 4) CHECK(plan.next_use(gradient).begin == plan.now());  // its successor's
  }
}

TEST_CASE("a long history is forgotten from its beginning, and the plan stands") {
  Program program(26);
  std::string pass;
  for (char name = 'a'; name <= 'z'; ++name) pass += name;
  program.use(pass);
  program.use(pass);
  const auto surprises = program.plan.surprises();
  for (int i = 0; i < 25'000; ++i) program.use(pass);
  CHECK(program.plan.surprises() <= surprises + 1);
  CHECK(program.coming(3) == "abc");
  CHECK(program.plan.next_use(0).begin == program.plan.now());
}

namespace {

double cpu_seconds() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

/// The longest use after `before` others.
double longest_use(int before) {
  AccessPlan plan;
  constexpr int kRuns = 3000;
  for (int i = 0; i < kRuns; ++i) plan.create(1);
  double longest = 0;
  for (int i = 0; i < before + 1000; ++i) {
    const double begin = cpu_seconds();
    plan.use({static_cast<AccessPlan::Ordinal>(i % kRuns), Access::read, true, true}, 1000);
    if (i >= before) longest = std::max(longest, cpu_seconds() - begin);
  }
  return longest;
}

}  // namespace

TEST_CASE("no use takes long when the history is full") {
  double longest = 1;  // a busy machine interrupts some
  for (int i = 0; i < 4 && longest > 0.002; ++i) longest = std::min(longest, longest_use((1 << 18) - 500));
  CHECK(longest < 0.002);
}

TEST_CASE("the next use of each of many in one group is found in a moment") {
  constexpr std::size_t kMembers = 40'000;
  AccessPlan plan;
  for (std::size_t i = 0; i < kMembers; ++i) plan.create(1);
  for (int step = 0; step < 3; ++step) {
    for (AccessPlan::Ordinal i = 0; i < kMembers; ++i) plan.use({i, Access::read, false, i == 0}, 1000);
  }
  const auto now = plan.now();
  const double begin = cpu_seconds();
  std::size_t right = 0;
  for (AccessPlan::Ordinal i = 0; i < kMembers; ++i) {
    const auto next = plan.next_use(i);
    right += next.begin == now && next.end == now + kMembers * 1001;
  }
  CHECK(cpu_seconds() - begin < 0.5);
  CHECK(right == kMembers);
}

TEST_CASE("runs that never repeat have no more ordinals than the history has uses") {
  AccessPlan plan;
  AccessPlan::Ordinal highest = 0;
  for (std::uint64_t kind = 0; kind < 1'000'000; ++kind) {
    const AccessPlan::Ordinal ordinal = plan.create(kind);
    highest = std::max(highest, ordinal);
    if (kind % 3 != 0) plan.use({ordinal, Access::read, true, true}, 1000);
    plan.destroy(ordinal);
  }
  CHECK(highest <= 1 << 18);
}

TEST_CASE("the ordinals of the dead are taken over in a moment, however many there are") {
  constexpr std::size_t kRuns = 200'000;
  AccessPlan plan;
  for (AccessPlan::Ordinal i = 0; i < kRuns; ++i) plan.use({plan.create(1), Access::read, true, true}, 1000);
  for (AccessPlan::Ordinal i = 0; i < kRuns; ++i) plan.destroy(i);
  const double begin = cpu_seconds();
  for (AccessPlan::Ordinal i = 0; i + 1024 < kRuns; ++i) CHECK(plan.create(1) == i);
  CHECK(cpu_seconds() - begin < 1);
}

TEST_CASE("a use for which memory was short is one like any other when it comes again") {
  for (std::size_t number = 0; number < 8; ++number) {
    AccessPlan plan;
    const auto use = [&](AccessPlan::Ordinal ordinal) { plan.use({ordinal, Access::read, true, true}, 1000); };
    const AccessPlan::Ordinal first = plan.create(1);
    for (int round = 0; round < 3; ++round) {
      use(first);
      const AccessPlan::Ordinal second = plan.create(2);
      CHECK(second == first + 1);
      try {
        const FailingAllocation failing(number);
        use(second);
      } catch (const std::bad_alloc&) {
        use(second);
      }
      plan.destroy(second);
    }
  }
}
