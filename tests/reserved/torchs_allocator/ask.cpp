// Asks torch's caching allocator what a file asks, and prints what it has after each line.
//
//     a BLOCK BYTES STREAM    allocate        f BLOCK    free        e    empty the cache
//
// Printed are allocated and reserved bytes, the peaks of both, and how often all that waited was
// given back; "oom" first where there was no room.
#include <c10/cuda/CUDAAllocatorConfig.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/PeerToPeerAccess.h>

#include <cstdio>
#include <iostream>
#include <string>
#include <unordered_map>

namespace allocator = c10::cuda::CUDACachingAllocator;

int main() {
  c10::cuda::detail::init_p2p_access_cache(1);
  allocator::init(1);
  // Which kind of handle expandable segments have is otherwise asked of the machine.
  allocator::CUDAAllocatorConfig::set_expandable_segments_handle_type(
      allocator::Expandable_Segments_Handle_Type::POSIX_FD);
  std::unordered_map<long, void*> blocks;
  std::string what;
  while (std::cin >> what) {
    long block = 0, nbytes = 0, stream = 0;
    const char* note = "";
    if (what == "a") {
      std::cin >> block >> nbytes >> stream;
      try {
        blocks[block] = allocator::get()->raw_alloc_with_stream(nbytes, (cudaStream_t)stream);
      } catch (const c10::OutOfMemoryError&) {
        blocks[block] = nullptr;
        note = "oom ";
      }
    } else if (what == "f") {
      std::cin >> block;
      if (blocks[block])
        allocator::get()->raw_delete(blocks[block]);
    } else {
      allocator::emptyCache();
    }
    const auto found = allocator::getDeviceStats(0);
    std::printf("%s%ld %ld %ld %ld %ld\n", note, (long)found.allocated_bytes[0].current,
        (long)found.reserved_bytes[0].current, (long)found.allocated_bytes[0].peak,
        (long)found.reserved_bytes[0].peak, (long)found.num_alloc_retries);
  }
}
