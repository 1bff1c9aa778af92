// Parameters of the forward kernel in e4m3.
#pragma once

#include "sm90/key_bytes.cuh"

namespace sta {

struct Parameters {
  TensorMap q;  // boxes of kHeadDim columns by kGroup tokens
  ByteMaps keys;
  Output out;
  float* lse;            // [batch, heads, queries]
  float const* q_scale;  // [batch, heads, queries]
  float const* k_scale;  // [batch, key heads]
  float const* v_scale;  // [batch, key heads, columns]
  float const* shift;    // [batch, heads, queries]: what smoothing took off the scores
  int kv_heads;
  Problem problem;
};

}  // namespace sta
