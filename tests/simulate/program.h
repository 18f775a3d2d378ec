// The threads of a simulated program. Each owner has segments that only it writes. It repeats a list of operations,
// so that the plan predicts them, and checks every page that it sees.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "simulate/world.h"

namespace zeropage::simulate {

/// One program thread.
class Owner {
 public:
  Owner(World& world, int number, std::uint64_t seed);
  /// Until its cycles are done or the cache is closed.
  void run();

 private:
  using Shared = std::shared_ptr<SimulatedSegment>;
  struct Step {
    Kind kind;
    std::vector<std::pair<std::size_t, Access>> members;  // segments, by index
    std::uint64_t seed;                                   // of the details
  };
  struct Planned {};  // thrown by an operator that fails on purpose

  void make_plan();
  Step make_step();
  void do_step(const Step& step);
  void perform(const Step& step);

  void use_whole(const Step& step, const std::vector<Shared>& members, const std::vector<Access>& access);
  void compute_on(const std::vector<Shared>& members, const std::vector<Access>& access, bool fails);
  void stream(const std::vector<Shared>& members, const std::vector<Access>& access);
  PagePin pin_page(SimulatedSegment& segment, std::size_t page, Access access);
  void use_page(SimulatedSegment& segment, std::size_t page, PagePin& pin, Access access);
  void read_others();
  void zero(const Shared& segment);
  void evict();
  void read_home(const Shared& segment);
  void update_versions(const std::vector<Shared>& members);
  bool write_version(SimulatedSegment& segment, std::vector<PageModel>& next);
  void use_below(const Shared& segment, Access access);
  void freeze(const std::vector<Shared>& members);
  void bind(std::size_t index);
  SegmentSpec random_spec(std::size_t index);
  void compute();

  std::vector<Shared> members_of(const Step& step, std::vector<Access>& access) const;
  std::size_t rounded_bytes(const SimulatedSegment& segment) const;
  bool chance(std::uint64_t n) { return one_in(details_, n); }

  World& world_;
  FrameCache& cache_;
  const int number_;
  Random random_;   // of the plan
  Random details_;  // of the current operation
  std::vector<Step> plan_;
  std::vector<Shared>& mine_;
  std::vector<SegmentSpec> specs_;  // the next of each segment
  std::size_t device_homes_ = 0, host_homes_ = 0;
  std::vector<std::size_t> home_bytes_;  // of each segment that is a permanent home
};

/// The thread that writes checkpoints.
void save_all(World& world);

/// Compares all content with the model, from memory and from home. No fault happens any more.
void check_everything(World& world);

}  // namespace zeropage::simulate
