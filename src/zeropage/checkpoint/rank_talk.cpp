#include "zeropage/checkpoint/rank_talk.h"

#include <fmt/format.h>

#include "zeropage/base/errors.h"
#include "zeropage/tensor/paged_tensor.h"

namespace zeropage {

RankTalk::RankTalk(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    const auto* segment = segment_of(tensor);
    if (!segment || !segment->domain()->partition.ranks) continue;
    const Partition& partition = segment->domain()->partition;
    if (ranks_ && (ranks_->size() != partition.ranks->size() || ranks_->rank() != partition.ranks->rank() ||
                   !replicas_ != !partition.replicas)) {
      throw RankError(
          "these tensors are partitioned over different groups of ranks; save and load those of one group at a time");
    }
    if (!ranks_) ranks_ = partition.ranks, replicas_ = partition.replicas;
  }
  if (ranks_) rank_ = ranks_->rank() + (replicas_ ? ranks_->size() * replicas_->rank() : 0);
}

std::vector<std::string> RankTalk::gather(const std::string& mine) {
  if (!ranks_) return {mine};
  const Subject subject{"checkpoint"};
  const std::vector<std::string> group = ranks_->all_gather_text(mine, subject);
  if (!replicas_) return group;
  std::string texts;  // each after its length and a colon
  for (const std::string& text : group) texts += fmt::format("{}:{}", text.size(), text);
  std::vector<std::string> all;
  for (const std::string& one : replicas_->all_gather_text(texts, subject)) {
    for (std::size_t at = 0; at < one.size();) {
      std::size_t digits = 0;
      const std::size_t length = std::stoul(one.substr(at), &digits);
      all.push_back(one.substr(at + digits + 1, length));
      at += digits + 1 + length;
    }
  }
  return all;
}

void RankTalk::together(c10::function_ref<void()> work) {
  std::exception_ptr failure;
  std::string text;
  try {
    work();
  } catch (const std::exception& error) {
    failure = std::current_exception();
    text = *error.what() ? error.what() : "an error without a text";
  } catch (...) {
    failure = std::current_exception();
    text = "an error of an unknown kind";
  }
  const std::vector<std::string> texts = gather(text);
  if (failure) std::rethrow_exception(failure);
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    if (!texts[rank].empty()) throw RankError(fmt::format("rank {} failed: {}", rank, texts[rank]));
  }
}

}  // namespace zeropage
