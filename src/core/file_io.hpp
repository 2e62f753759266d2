// Files as bytes: read whole, written atomically.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace treemla {

// An uninitialised block aligned for every element type. Throws Error(kOutOfMemory).
std::shared_ptr<std::byte> allocate_bytes(std::size_t size);

struct FileBytes {
  std::shared_ptr<const std::byte> data;
  std::size_t size = 0;
};

// Files smaller than this are read into memory, larger ones are mapped.
//
// A mapping costs nothing for the pages nobody touches and shares the page cache between processes, but a
// file that somebody truncates while it is mapped kills the process with SIGBUS at the next access. Reading
// turns that into an Error, and up to this size the copy takes milliseconds. Whoever keeps larger cases must
// replace them by rename, as write_file() does.
constexpr std::size_t kMapBytes = std::size_t{64} << 20;

// The whole of a regular file. Throws Error(kIo) when it can't be opened or read or is no regular file (never
// blocks on a fifo or a device), Error(kBadFile) when it is empty.
FileBytes read_file(const std::string& path);

// Replaces `path` (or the file that a symbolic link names) by a temporary file in the same folder, fsync and
// rename. On failure, Error(kIo), the old file is untouched and the temporary one removed.
void write_file(const std::string& path, std::span<const std::byte> bytes);

// `text` on one line: control characters escaped, bytes that are not UTF-8 replaced, cut after `max_bytes`.
std::string one_line(std::string_view text, std::size_t max_bytes = 4096);
// The same in double quotes, for names and values taken from files.
std::string in_quotes(std::string_view text, std::size_t max_bytes = 80);

}  // namespace treemla
