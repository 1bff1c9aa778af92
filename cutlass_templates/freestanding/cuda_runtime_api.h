// NVRTC has what device code needs of the runtime built in.
#pragma once
