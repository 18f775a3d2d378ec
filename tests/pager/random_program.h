// A program that uses groups of segments, in one piece or page by page in turns. It leaves some groups halfway.
#pragma once

#include <memory>
#include <random>
#include <vector>

#include "cache_fixture.h"

namespace zeropage {

class RandomProgram {
 public:
  struct Group {
    std::vector<unsigned> members;
    std::vector<Access> access = {};  // of each
    std::size_t turns = 0;            // pages of each that are taken; 0: the members one after another, whole
  };

  /// Makes segments of up to 7 pages, in groups of up to `most_members`.
  RandomProgram(FrameCache& cache, std::size_t page_bytes, unsigned seed, unsigned most_members)
      : cache_(cache), page_bytes_(page_bytes), random_(seed) {
    for (unsigned i = 0; i < 40 + most_members; ++i) {
      segments_.push_back(std::make_unique<TestSegment>());
      cache.bind(*segments_.back(), {(1 + below(7)) * page_bytes, 0, Role::parameter, Tier::disk});
    }
    for (unsigned g = 0; g < 12; ++g) {
      Group group;
      const unsigned members = 1 + below(below(3) ? 3 : most_members);
      for (unsigned m = 0; m < members; ++m) {
        group.members.push_back(below(segments_.size()));
        constexpr Access kAccess[] = {Access::read, Access::read, Access::write, Access::overwrite};
        group.access.push_back(kAccess[below(4)]);
      }
      if (members > 3 || below(2)) group.turns = 1 + below(7);
      groups_.push_back(group);
    }
  }
  const std::vector<Group>& groups() const { return groups_; }

  void run(const Group& group) {
    std::vector<PinRequest> requests;
    for (std::size_t i = 0; i < group.members.size(); ++i) {
      requests.push_back({segments_[group.members[i]].get(), group.access[i]});
    }
    if (group.turns == 0) {
      for (const PinRequest& request : requests) {
        cache_.pin({&request, 1});
        cache_.unpin({&request, 1});
      }
      return;
    }
    cache_.announce(requests);
    for (std::size_t page = 0; page < group.turns; ++page) {
      for (const PinRequest& request : requests) {
        if (page * page_bytes_ < request.segment->bytes()) {
          cache_.pin_page(*request.segment, page, request.access).wait();
        }
      }
    }
  }

 private:
  unsigned below(std::size_t end) { return static_cast<unsigned>(random_() % end); }

  FrameCache& cache_;
  const std::size_t page_bytes_;
  std::mt19937 random_;
  std::vector<std::unique_ptr<TestSegment>> segments_;
  std::vector<Group> groups_;
};

}  // namespace zeropage
