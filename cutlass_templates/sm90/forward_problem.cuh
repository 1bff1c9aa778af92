// Parameters of the forward kernel.
#pragma once

#include "sm90/key_rows.cuh"

namespace sta {

struct Parameters {
  TensorMap q;  // boxes of kAtomColumns columns by kGroup tokens
  KeyMaps keys;
  Output out;
  float* lse;  // [batch, heads, queries]
  Problem problem;
};

}  // namespace sta
