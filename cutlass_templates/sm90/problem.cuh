// What all kernels of attention for Hopper have in common.
#pragma once

#include "include/strided.cuh"
#include "sm90/fragments.cuh"
#include "sm90/work.cuh"
