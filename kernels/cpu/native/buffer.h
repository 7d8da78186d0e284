// Memory that grows and is freed only with its owner. It begins at a cache line, so that vectors of 64 bytes do not cross lines.
#pragma once
#include <cstdlib>
#include <cstring>
#include <new>

namespace everbatch {

template <class T>
class Buffer {
public:
    Buffer() = default;
    Buffer(Buffer&& other) noexcept : data_(other.data_), size_(other.size_) { other.data_ = nullptr, other.size_ = 0; }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { std::free(data_); }

    // Makes room for `size` elements. If it has to grow, the content is lost and everything is zero.
    void grow(size_t size) {
        if (size <= size_) return;
        std::free(data_);
        const size_t bytes = (size * sizeof(T) + 63) / 64 * 64;
        data_ = static_cast<T*>(std::aligned_alloc(64, bytes)), size_ = size;
        if (!data_) throw std::bad_alloc();
        std::memset(static_cast<void*>(data_), 0, bytes);
    }

    T* data() { return data_; }
    const T* data() const { return data_; }

private:
    T* data_ = nullptr;
    size_t size_ = 0;
};

// Distance of rows of n float32: n rounded up to 64, and one cache line more, so that rows do not all map to the same cache sets.
inline int64_t row_length(int64_t n) { return (n + 63) / 64 * 64 + 16; }

}  // namespace everbatch
