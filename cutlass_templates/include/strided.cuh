// [batch, head, token, column] tensors by their strides in elements; columns are contiguous.
#pragma once

namespace sta {

struct Input {
  Element const* data;
  long long batch, head, token;

  __device__ __forceinline__ Element const* row(int b, int h, int t) const { return data + b * batch + h * head + t * token; }
};

struct Output {
  Element* data;
  long long batch, head, token;

  __device__ __forceinline__ Element* row(int b, int h, int t) const { return data + b * batch + h * head + t * token; }
};

}  // namespace sta
