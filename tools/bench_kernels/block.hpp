// Device memory that frees itself.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "backend/cuda/cuda_memory.hpp"

namespace treemla::bench {

class Block {
 public:
  explicit Block(std::size_t bytes) : data_(cuda_memory().allocate(bytes)) {}
  ~Block() { cuda_memory().release(data_); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  template <class T>
  static std::unique_ptr<Block> of(const std::vector<T>& v) {
    auto block = std::make_unique<Block>(v.size() * sizeof(T));
    cuda_memory().upload(block->get(), v.data(), v.size() * sizeof(T), nullptr);
    cuda_memory().synchronize(nullptr);
    return block;
  }
  void* get() const { return data_; }

 private:
  void* data_;
};

}  // namespace treemla::bench
