// Storages of the device.
#pragma once
#include <c10/core/StorageImpl.h>

namespace late {

// Give `storage` that many bytes of new memory, keep what fits, and give the old memory back.
void resize_bytes(c10::StorageImpl* storage, size_t bytes);

}  // namespace late
