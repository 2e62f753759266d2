#include "scores_file.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>

#include "core/safetensors.hpp"
#include "treemla/error.hpp"

namespace treemla::cli {

ScoresFile read_scores(const std::string& path) {
  const auto refuse = [&](const std::string& field, const std::string& message) {
    throw Error(ErrorCode::kBadFile, field, fmt::format("{}: {}", one_line(path), message));
  };
  ScoresFile result;
  result.file = read_file(path);
  const safetensors::Header header =
      safetensors::parse({result.file.data.get(), result.file.size}, one_line(path));
  const auto is_scores = [](const safetensors::Tensor& t) {
    return t.name == "logits" || t.name == "log_probs";
  };
  const auto found = std::find_if(header.tensors.begin(), header.tensors.end(), is_scores);
  if (found == header.tensors.end() || std::count_if(found, header.tensors.end(), is_scores) != 1)
    refuse("logits", "must have one tensor \"logits\" or \"log_probs\"");
  const safetensors::Tensor& t = *found;
  if (t.dtype != "F32" && t.dtype != "BF16")
    refuse(t.name, fmt::format("tensor \"{}\" is {}: must be F32 or BF16", t.name, t.dtype));
  if (t.shape.size() != 2 && t.shape.size() != 3)
    refuse(t.name, fmt::format("tensor \"{}\" has shape {}: must be [L, V] or [b, L, V]", t.name,
                               safetensors::shape_text(t.shape)));
  const bool batched = t.shape.size() == 3;
  const int64_t b = batched ? t.shape[0] : 1, num_depths = t.shape[batched], vocab = t.shape[batched + 1];
  if (b < 1 || b > (1 << 20) || num_depths < 1 || num_depths > kMaxTreeDepths || vocab < 1 ||
      vocab > kMaxVocab)
    refuse(t.name, fmt::format("tensor \"{}\" has shape {}: allowed are b from 1 to {}, L to {}, V to {}",
                               t.name, safetensors::shape_text(t.shape), 1 << 20, kMaxTreeDepths, kMaxVocab));
  result.b = static_cast<int>(b);
  result.num_depths = static_cast<int>(num_depths);
  result.scores.data = result.file.data.get() + safetensors::kLengthBytes + header.bytes + t.begin;
  result.scores.dtype = t.dtype == "F32" ? DType::kF32 : DType::kBF16;
  result.scores.vocab = static_cast<int>(vocab);
  result.scores.are_log_probs = t.name == "log_probs";
  if (reinterpret_cast<std::uintptr_t>(result.scores.data) % dtype_bytes(result.scores.dtype) != 0)
    refuse(t.name, fmt::format("tensor \"{}\" begins at byte {} of the buffer, which does not suit {}",
                               t.name, t.begin, t.dtype));
  return result;
}

}  // namespace treemla::cli
