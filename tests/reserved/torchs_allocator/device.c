/* A device without a GPU: as much of CUDA's runtime as torch's caching allocator asks for.

   Addresses are numbers that nobody reads or writes. Each range lies above all before it, as in the
   emulator. DEVICE_NBYTES of the environment is how much there is. What is not needed succeeds and
   does nothing: `build` appends those names. */
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static size_t used_nbytes, next_address = (size_t)1 << 40;
static struct { size_t address, nbytes; } *taken;
static size_t count, room;
static cudaError_t last_error;

static size_t device_nbytes(void)
{
    static size_t found;
    const char *given = getenv("DEVICE_NBYTES");
    if (!found)
        found = given ? strtoull(given, NULL, 10) : (size_t)1 << 50;
    return found;
}

cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { *version = 13000; return cudaSuccess; }
const char *cudaGetErrorString(cudaError_t error) { return "out of memory"; }
const char *cudaGetErrorName(cudaError_t error) { return "error"; }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device)
{
    memset(found, 0, sizeof *found);
    found->totalGlobalMem = device_nbytes();
    found->major = 9;
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *left, size_t *total)
{
    *total = device_nbytes();
    *left = *total - used_nbytes;
    return cudaSuccess;
}

cudaError_t cudaGetLastError(void)
{
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaMalloc(void **address, size_t nbytes)
{
    if (used_nbytes + nbytes > device_nbytes())
        return last_error = cudaErrorMemoryAllocation;
    used_nbytes += nbytes;
    if (count == room)
        taken = realloc(taken, (room = room ? 2 * room : 1024) * sizeof *taken);
    taken[count].address = next_address;
    taken[count++].nbytes = nbytes;
    *address = (void *)next_address;
    next_address += nbytes;
    return cudaSuccess;
}

cudaError_t cudaFree(void *address)
{
    for (size_t n = 0; n < count; n++)
        if (taken[n].address == (size_t)address) {
            used_nbytes -= taken[n].nbytes;
            taken[n] = taken[--count];
            return cudaSuccess;
        }
    if (address)
        abort();
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *found)
{
    *found = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

/* Of the driver, for expandable segments: a handle is its size. */
typedef unsigned long long number;

static CUresult reserve(number *address, size_t nbytes, size_t align, number at, number flags)
{
    *address = next_address;
    next_address += nbytes;
    return CUDA_SUCCESS;
}

static CUresult create(number *handle, size_t nbytes, const void *properties, number flags)
{
    if (used_nbytes + nbytes > device_nbytes())
        return CUDA_ERROR_OUT_OF_MEMORY;
    used_nbytes += *handle = nbytes;
    return CUDA_SUCCESS;
}

static CUresult release(number handle)
{
    used_nbytes -= handle;
    return CUDA_SUCCESS;
}

static CUresult nothing(void) { return CUDA_SUCCESS; }

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *found)
{
    *function = !strcmp(name, "cuMemAddressReserve") ? (void *)reserve
                : !strcmp(name, "cuMemCreate")       ? (void *)create
                : !strcmp(name, "cuMemRelease")      ? (void *)release
                                                     : (void *)nothing;
    if (found)
        *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
