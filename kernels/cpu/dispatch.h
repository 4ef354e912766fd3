// The kernels of the instruction set in use.
#pragma once

#include "kernels.h"

namespace hfz {

const Kernels& kernels();

}  // namespace hfz
