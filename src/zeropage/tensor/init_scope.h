// An init scope: while a thread is in one, factories on that thread make paged tensors.
//
// It is not a lock, and it is no property of the space: other threads, also those that start meanwhile, are outside
// until they enter the space themselves. It belongs to its thread, and scopes nest: the last one entered is left
// first. A scope inside another one of the same space is a part of it, and its end has no effect on its tensors.
#pragma once

#include <memory>

namespace zeropage {

struct Domain;
struct OpenScope;

class InitScope {
 public:
  /// Space::enter() makes scopes. All ranks enter together, because they then draw the same random numbers
  /// (tensor/shared_draws.h). Throws RankError if ranks are not together.
  explicit InitScope(std::shared_ptr<Domain> domain);
  /// Calls leave(). If leave() refuses, or an exception is under way, calls abandon() instead. Throws whatever
  /// leave() throws. The thread is in no scope whose object is dead. A destructor that may not throw, such as that of
  /// std::unique_ptr, ends the program with the message: call leave() first.
  ~InitScope() noexcept(false);
  /// Ends the scope. Over ranks, all call it together: tensors made in the scope are then the same on all ranks. In a
  /// C++ program with compute_dtype, parameters made in it have masters from now on. Does nothing the second time.
  /// Throws AccessError, and changes nothing, on another thread or while a scope entered later is open. Throws
  /// RankError, BudgetError or DiskError if ranks or masters fail; the scope has then ended.
  void leave();
  /// Ends the scope from any thread and in any order, without communication: other ranks may not have come as far.
  /// Over ranks, the tensors made in it are unusable. In mixed precision, they have no masters.
  void abandon() noexcept;
  InitScope(const InitScope&) = delete;
  InitScope& operator=(const InitScope&) = delete;

 private:
  std::shared_ptr<OpenScope> scope_;  // null: it has ended
  int exceptions_;                    // under way when it began
};

}  // namespace zeropage
