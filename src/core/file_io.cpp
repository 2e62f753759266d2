#include "core/file_io.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <new>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "treemla/error.hpp"

namespace treemla {
namespace {

[[noreturn]] void io_error(const std::string& path, std::string_view what, int error) {
  throw Error(ErrorCode::kIo, "path",
              fmt::format("{}: {}: {}", one_line(path), what, std::generic_category().message(error)));
}

// Closes on scope exit; close() by hand where its result matters.
class Fd {
 public:
  explicit Fd(int fd) : fd_(fd) {}
  ~Fd() { close(); }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  int get() const { return fd_; }
  int close() { return fd_ < 0 ? 0 : ::close(std::exchange(fd_, -1)); }

 private:
  int fd_;
};

std::string_view kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISFIFO(mode)) return "a fifo";
  if (S_ISSOCK(mode)) return "a socket";
  return "a device";
}

// A file that removes itself unless it was renamed away.
class TempFile {
 public:
  // O_EXCL with a name of our own instead of mkstemp(): the mode then follows the umask. The name doesn't
  // contain that of the target, which may already be as long as names can be.
  TempFile(const std::string& target, const std::string& folder) {
    static std::atomic<unsigned> counter{0};
    for (int attempt = 0; attempt < 100; ++attempt) {
      path_ = fmt::format("{}.treemla-{}-{}.tmp", folder, ::getpid(), counter++);
      fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
      if (fd_ >= 0 || errno != EEXIST) break;
    }
    if (fd_ < 0) {
      const int error = errno;
      path_.clear();
      io_error(target, "can't create a temporary file beside it", error);
    }
  }
  ~TempFile() {
    if (!path_.empty()) ::unlink(path_.c_str());
  }
  TempFile(const TempFile&) = delete;
  TempFile& operator=(const TempFile&) = delete;
  int fd() const { return fd_; }
  int rename_to(const std::string& target) {
    const int result = ::rename(path_.c_str(), target.c_str());
    if (result == 0) path_.clear();
    return result;
  }

 private:
  std::string path_;
  int fd_ = -1;
};

}  // namespace

std::string in_quotes(std::string_view text, std::size_t max_bytes) {
  using Json = nlohmann::json;
  const bool cut = text.size() > max_bytes;
  std::string line = Json(text.substr(0, max_bytes)).dump(-1, ' ', false, Json::error_handler_t::replace);
  return cut ? line + "..." : line;
}

std::string one_line(std::string_view text, std::size_t max_bytes) {
  const auto is_plain = [](char c) { return c >= 0x20 && c < 0x7F; };
  if (text.size() <= max_bytes && std::all_of(text.begin(), text.end(), is_plain)) return std::string(text);
  const std::string escaped = in_quotes(text, max_bytes);
  const std::size_t last = escaped.rfind('"');
  std::string line;
  for (std::size_t i = 1; i < escaped.size(); ++i) {
    if (i == last) continue;
    // Quotes and backslashes harm no line.
    if (escaped[i] == '\\' && (escaped[i + 1] == '"' || escaped[i + 1] == '\\')) ++i;
    line += escaped[i];
  }
  return line;
}

std::shared_ptr<std::byte> allocate_bytes(std::size_t size) {
  constexpr std::align_val_t kAlign{64};
  void* block = ::operator new(std::max<std::size_t>(size, 1), kAlign, std::nothrow);
  if (!block) throw Error(ErrorCode::kOutOfMemory, "size", fmt::format("can't allocate {} bytes", size));
  return {static_cast<std::byte*>(block), [](std::byte* p) { ::operator delete(p, kAlign); }};
}

FileBytes read_file(const std::string& path) {
  // O_NONBLOCK: opening a fifo returns at once, and the check below refuses it.
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (fd.get() < 0) io_error(path, "can't open", errno);
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) io_error(path, "can't stat", errno);
  if (!S_ISREG(status.st_mode)) {
    throw Error(ErrorCode::kIo, "path",
                fmt::format("{}: is {}, must be a regular file", one_line(path), kind_of(status.st_mode)));
  }
  if (status.st_size == 0) {
    throw Error(ErrorCode::kBadFile, "file", fmt::format("{}: the file is empty", one_line(path)));
  }

  FileBytes file;
  file.size = static_cast<std::size_t>(status.st_size);
  if (file.size >= kMapBytes) {
    void* map = ::mmap(nullptr, file.size, PROT_READ, MAP_PRIVATE, fd.get(), 0);
    if (map == MAP_FAILED) io_error(path, "can't map", errno);
    file.data = std::shared_ptr<const std::byte>(
        static_cast<const std::byte*>(map),
        [size = file.size](const std::byte* p) { ::munmap(const_cast<std::byte*>(p), size); });
    return file;
  }
  const std::shared_ptr<std::byte> block = allocate_bytes(file.size);
  for (std::size_t done = 0; done < file.size;) {
    const ssize_t n = ::pread(fd.get(), block.get() + done, file.size - done, static_cast<off_t>(done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) io_error(path, "can't read", errno);
    if (n == 0) {
      throw Error(
          ErrorCode::kIo, "file",
          fmt::format("{}: shrank from {} to {} bytes while being read", one_line(path), file.size, done));
    }
    done += static_cast<std::size_t>(n);
  }
  file.data = block;
  return file;
}

void write_file(const std::string& path, std::span<const std::byte> bytes) {
  // A rename over a device or a link would replace the node itself: /dev/null must survive `-o /dev/null`.
  std::string target = path;
  struct stat status {};
  const bool exists = ::stat(path.c_str(), &status) == 0;
  if (exists && !S_ISREG(status.st_mode)) {
    throw Error(
        ErrorCode::kIo, "path",
        fmt::format("{}: is {}, can only replace a regular file", one_line(path), kind_of(status.st_mode)));
  }
  if (exists) {
    const std::unique_ptr<char, decltype(&std::free)> real(::realpath(path.c_str(), nullptr), &std::free);
    if (!real) io_error(path, "can't resolve", errno);
    target = real.get();
    // A rename needs no permission on the file it replaces, but write protection is meant to protect.
    if (::access(target.c_str(), W_OK) != 0) io_error(path, "can't replace", errno);
  }
  const std::size_t slash = target.rfind('/');
  const std::string folder = slash == std::string::npos ? "" : target.substr(0, slash + 1);
  if (slash != std::string::npos && slash + 1 == target.size()) io_error(path, "can't write", EISDIR);

  TempFile temp(path, folder);
  Fd fd(temp.fd());
  if (exists && ::fchmod(fd.get(), status.st_mode & 07777) != 0) io_error(path, "can't keep its mode", errno);
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t n = ::write(fd.get(), bytes.data() + done, bytes.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) io_error(path, fmt::format("can't write byte {} of {}", done, bytes.size()), errno);
    done += static_cast<std::size_t>(n);
  }
  if (::fsync(fd.get()) != 0) io_error(path, "can't flush", errno);
  if (fd.close() != 0) io_error(path, "can't close", errno);
  if (temp.rename_to(target) != 0) io_error(path, "can't put the new file in place", errno);
  // The rename itself survives a power cut only once the folder is on disk. Not every file system can sync a
  // folder, and the new file is complete either way, so a refusal is no failure.
  const Fd folder_fd(::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder_fd.get() >= 0) ::fsync(folder_fd.get());
}

}  // namespace treemla
