/* The functions of CUDA's driver that Triton's launcher, Inductor's static launcher and torch use.

   A module is a file that Triton compiled. It is not read; only the names of its kernels are kept. */
#include "nodevice.h"
#include <dlfcn.h>

#undef cuLinkCreate
#undef cuLinkAddData
#undef cuGetProcAddress

#define CONTEXT ((CUcontext)0x10)
#define DONE return CUDA_SUCCESS

EXPORT CUresult cuInit(unsigned flags) { DONE; }
EXPORT CUresult cuDriverGetVersion(int *version) { *version = CUDA_VERSION; DONE; }
EXPORT CUresult cuDeviceGetCount(int *count) { *count = 1; DONE; }
EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = 0; DONE; }
EXPORT CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    snprintf(name, length, "%s", nodevice_device_name());
    DONE;
}
EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    *value = nodevice_attribute(attribute);
    DONE;
}
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    DONE;
}
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = CONTEXT; DONE; }
EXPORT CUresult cuCtxGetCurrent(CUcontext *context) { *context = CONTEXT; DONE; }
EXPORT CUresult cuCtxSetCurrent(CUcontext context) { DONE; }
EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context) { DONE; }
EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *context) { if (context) *context = CONTEXT; DONE; }
EXPORT CUresult cuCtxGetDevice(CUdevice *device) { *device = 0; DONE; }
EXPORT CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; DONE; }
EXPORT CUresult cuCtxSetLimit(CUlimit limit, size_t value) { DONE; }
EXPORT CUresult cuGetErrorString(CUresult error, const char **text) { *text = "error"; DONE; }
EXPORT CUresult cuGetErrorName(CUresult error, const char **text) { *text = "error"; DONE; }

EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image) { *module = malloc(8); DONE; }
EXPORT CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count, CUjit_option *options, void **values) {
    return cuModuleLoadData(module, image);
}
EXPORT CUresult cuModuleLoad(CUmodule *module, const char *path) { return cuModuleLoadData(module, 0); }
EXPORT CUresult cuModuleUnload(CUmodule module) { DONE; }
EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    *function = calloc(1, 8);
    nodevice_name(*function, name);
    DONE;
}
EXPORT CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
             : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS            ? 64
                                                                  : 0;
    DONE;
}
EXPORT CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { DONE; }
EXPORT CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { DONE; }

static CUresult launch(const void *function, CUstream stream, dim3 grid, dim3 block, size_t shared) {
    nodevice_work(function, stream, grid, block, shared);
    DONE;
}
EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                               unsigned shared, CUstream stream, void **arguments, void **extra) {
    return launch(function, stream, (dim3){x, y, z}, (dim3){bx, by, bz}, shared);
}
EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *how, CUfunction function, void **arguments, void **extra) {
    return launch(function, how->hStream, (dim3){how->gridDimX, how->gridDimY, how->gridDimZ},
                  (dim3){how->blockDimX, how->blockDimY, how->blockDimZ}, how->sharedMemBytes);
}
EXPORT CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by,
                                          unsigned bz, unsigned shared, CUstream stream, void **arguments) {
    return launch(function, stream, (dim3){x, y, z}, (dim3){bx, by, bz}, shared);
}
EXPORT CUresult cuLinkCreate_v2(unsigned count, CUjit_option *options, void **values, CUlinkState *state) { DONE; }
EXPORT CUresult cuLinkAddData_v2(CUlinkState state, CUjitInputType type, void *data, size_t size, const char *name,
                                 unsigned count, CUjit_option *options, void **values) { DONE; }
EXPORT CUresult cuLinkComplete(CUlinkState state, void **binary, size_t *size) { DONE; }
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int size, size_t shared) {
    *blocks = 2;
    DONE;
}
EXPORT CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *how) {
    *clusters = 66;
    DONE;
}
EXPORT CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
    *(CUdeviceptr *)data = attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER ? pointer : 0;
    DONE;
}
EXPORT CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *result) {
    *function = dlsym(RTLD_DEFAULT, name);
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
/* Grouped products (CUTLASS) describe their tiles by these, and nothing reads them here. */
EXPORT CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                       const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                       const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                       CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) { DONE; }
EXPORT CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) { DONE; }
EXPORT CUresult cuMemsetD32Async(CUdeviceptr address, unsigned value, size_t count, CUstream stream) {
    nodevice_named("memory set", stream);
    DONE;
}
