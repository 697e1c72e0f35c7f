/* A CUDA runtime without a device: torch runs on it as on a GPU, and its work is counted and not done.

   How it works. torch calls the functions of libcudart (here: cudaMalloc, cudaLaunchKernel, ...), of cuBLAS
   (cublas.c) and, for kernels that Triton compiled, of the driver libcuda (driver.c). This library is
   preloaded (LD_PRELOAD), so the loader takes its functions before those of the real libraries. It is called
   libcuda.so.1, so the driver is found in it too. Functions that are not here are the real ones and fail
   without a device; add them when torch begins to use them.

   What is real. All of the host's work: Python, torch's dispatcher, autograd, the compilers, the launchers.
   So the number of launches, copies and waits, the grids, the captures of graphs, what the allocator takes,
   and the CPU time of the host are those of a GPU, but for the time of the driver itself
   (NODEVICE_LAUNCH_NS spins for so long at each launch).

   What is not. Memory is address space: no kernel writes to it, so a number that is read from the device is
   zero (0.0, False). Copies and memory sets of at most SMALL bytes are done, so that small things that the
   host sends out and reads back stay what they are. Events are always 1 ms apart, so whatever is timed takes
   the same time.

   What fails. torch finds NVRTC, which compiles its rarer elementwise kernels (torch.special.entr in eager
   code), by its file and not through this library, and it crashes. CUPTI and cuDNN look for a real driver.

   Captures. Work for a stream that is being captured becomes part of a graph. As on a GPU, a wait for such a
   stream, and in the modes `global` and `thread_local` any call that could wait, is an error there: it is
   printed, the capture is void, and cudaStreamEndCapture fails. One capture at a time is supported.

   Environment: NODEVICE_NAME and NODEVICE_GB (another device's name and memory), NODEVICE_LAUNCH_NS. */
#include "nodevice.h"
#include <dlfcn.h>
#include <sys/mman.h>
#include <time.h>

#define OK return cudaSuccess
#define SMALL (1UL << 16)
#define PAGE 4096UL
/* Addresses of the device's and of pinned memory, so that a pointer tells what it points to. */
#define REGION (1UL << 44)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long launch_ns;
static size_t total_memory = 150754820096UL, used_memory;
static char *device_memory, *host_memory;
static size_t device_end, host_end;

EXPORT const char *nodevice_device_name(void) {
    const char *name = getenv("NODEVICE_NAME");
    return name ? name : "NVIDIA H200";
}

/* ------------------------------------------------------------------------------------------ what is counted */

#define ENTRIES (1 << 17)
static Entry entries[ENTRIES];
static unsigned long waits, graph_launches, allocations, pageable, refused;

static Entry *entry_of(const void *key) { /* the lock is held */
    unsigned long h = (unsigned long)key;
    h = (h ^ (h >> 33)) * 0xff51afd7ed558ccdUL;
    for (h = (h ^ (h >> 33)) & (ENTRIES - 1); entries[h].key && entries[h].key != key;) h = (h + 1) & (ENTRIES - 1);
    entries[h].key = key;
    return &entries[h];
}

/* Return the one address that stands for a name. */
static const char *interned(const char *name) { /* the lock is held */
    static const char *names[1 << 14];
    unsigned long h = 5381;
    for (const char *c = name; *c; c++) h = h * 33 + (unsigned char)*c;
    for (h &= (1 << 14) - 1; names[h] && strcmp(names[h], name);) h = (h + 1) & ((1 << 14) - 1);
    return names[h] ? names[h] : (names[h] = strdup(name));
}

static void spin(void) {
    struct timespec begin, now;
    if (!launch_ns) return;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    do clock_gettime(CLOCK_MONOTONIC, &now);
    while ((now.tv_sec - begin.tv_sec) * 1000000000L + now.tv_nsec - begin.tv_nsec < launch_ns);
}

/* ------------------------------------------------------------------------------------------------- captures */

#define GRAPHS 4096
typedef struct {
    Entry **nodes;
    unsigned long count, room, launched; /* `launched` since the last reset */
} Graph;
static Graph graphs[GRAPHS];
static int captures; /* so far; the number of a graph is that of its capture, from 1 */

static struct {
    int number; /* 0: nothing is being captured */
    int refused;
    enum cudaStreamCaptureMode mode;
    pthread_t thread;
    cudaStream_t origin, streams[64]; /* the streams that wait for an event of the capture join it */
    int joined;
} capture;
static __thread enum cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

typedef struct {
    int capture;
} Event;

static int captured(cudaStream_t stream) {
    if (!capture.number) return 0;
    for (int i = 0; i < capture.joined; i++)
        if (capture.streams[i] == stream) return capture.number;
    return 0;
}

static void join(cudaStream_t stream) {
    if (captured(stream)) return;
    if (capture.joined == 64) {
        fprintf(stderr, "nodevice: more than 64 streams in one capture\n");
        abort();
    }
    capture.streams[capture.joined++] = stream;
}

/* Whether a call that could wait is forbidden here: to the capturing thread, or in mode `global` to all. */
static int unsafe(void) {
    if (!capture.number || thread_mode == cudaStreamCaptureModeRelaxed) return 0;
    if (capture.mode == cudaStreamCaptureModeGlobal) return 1;
    return capture.mode == cudaStreamCaptureModeThreadLocal && pthread_equal(capture.thread, pthread_self());
}

static cudaError_t refuse(const char *function) {
    refused++;
    capture.refused = 1;
    fprintf(stderr, "nodevice: %s is not permitted while a stream is captured\n", function);
    return cudaErrorStreamCaptureUnsupported;
}

EXPORT cudaError_t nodevice_wait(const char *function, cudaStream_t stream, int event, int any) {
    if (capture.number && (captured(stream) || event == capture.number || (any && unsafe())))
        return refuse(function);
    waits++;
    OK;
}

EXPORT void nodevice_work(const void *key, cudaStream_t stream, dim3 grid, dim3 block, size_t shared) {
    pthread_mutex_lock(&lock);
    Entry *entry = entry_of(key);
    entry->grid = grid;
    entry->block = block;
    entry->shared = shared;
    int number = captured(stream);
    if (!number) {
        entry->called++;
    } else {
        Graph *graph = &graphs[number];
        if (graph->count == graph->room) {
            graph->room = graph->room ? 2 * graph->room : 1024;
            graph->nodes = realloc(graph->nodes, graph->room * sizeof *graph->nodes);
        }
        graph->nodes[graph->count++] = entry;
    }
    pthread_mutex_unlock(&lock);
    if (!number) spin();
}

EXPORT void nodevice_name(const void *key, const char *name) {
    pthread_mutex_lock(&lock);
    entry_of(key)->name = strdup(name);
    pthread_mutex_unlock(&lock);
}

EXPORT void nodevice_named(const char *name, cudaStream_t stream) {
    dim3 none = {0, 0, 0};
    pthread_mutex_lock(&lock);
    const char *key = interned(name);
    entry_of(key)->name = key;
    pthread_mutex_unlock(&lock);
    nodevice_work(key, stream, none, none, 0);
}

/* ---------------------------------------------------------------------------- for count.py, through ctypes */

/* Begin to count anew. Graphs that were captured keep their nodes. */
EXPORT void nodevice_reset(void) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < ENTRIES; i++) entries[i].called = 0;
    for (int i = 0; i < GRAPHS; i++) graphs[i].launched = 0;
    waits = graph_launches = allocations = pageable = refused = 0;
    pthread_mutex_unlock(&lock);
}

/* Return the number of the capture in progress, or 0. */
EXPORT int nodevice_capturing(void) { return capture.number; }

/* Return how often the graph of a capture was launched since the reset. */
EXPORT unsigned long nodevice_launched(int number) { return graphs[number].launched; }



/* Write what was counted. First lines `: NAME NUMBER`. Then one line for each entry, with tabs between:
   calls by the host, runs in graphs, grid, block, shared memory, name. */
EXPORT int nodevice_dump(const char *path) {
    FILE *file = fopen(path, "w");
    if (!file) return 1;
    pthread_mutex_lock(&lock);
    unsigned long *ran = calloc(ENTRIES, sizeof *ran);
    for (int i = 1; i <= captures; i++)
        for (unsigned long n = 0; graphs[i].launched && n < graphs[i].count; n++)
            ran[graphs[i].nodes[n] - entries] += graphs[i].launched;
    fprintf(file, ": waits %lu\n: graph launches %lu\n: captures %d\n: refused %lu\n", waits, graph_launches,
            captures, refused);
    fprintf(file, ": allocations %lu\n: copies of pageable memory %lu\n", allocations, pageable);
    for (int i = 0; i < ENTRIES; i++)
        if (entries[i].called || ran[i])
            fprintf(file, "%lu\t%lu\t%ux%ux%u\t%u\t%zu\t%s\n", entries[i].called, ran[i], entries[i].grid.x,
                    entries[i].grid.y, entries[i].grid.z, entries[i].block.x, entries[i].shared,
                    entries[i].name ? entries[i].name : "?");
    free(ran);
    pthread_mutex_unlock(&lock);
    return fclose(file);
}

/* -------------------------------------------------------------------------------------------------- devices */

__attribute__((constructor)) static void begin(void) {
    const char *ns = getenv("NODEVICE_LAUNCH_NS"), *gb = getenv("NODEVICE_GB");
    launch_ns = ns ? atol(ns) : 0;
    if (gb) total_memory = (size_t)(atof(gb) * 1e9);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    device_memory = mmap(0, 2 * REGION, PROT_NONE, flags, -1, 0);
    if (device_memory == MAP_FAILED) {
        fprintf(stderr, "nodevice: no address space for a device's memory (ulimit -v must be unlimited)\n");
        abort();
    }
    host_memory = device_memory + REGION;
}

EXPORT int nodevice_attribute(int attribute) {
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrMemoryClockRate: return 3201000;
    case cudaDevAttrGlobalMemoryBusWidth: return 6144;
    case cudaDevAttrL2CacheSize: return 62914560;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrComputeCapabilityMajor: return 9;
    case cudaDevAttrComputeCapabilityMinor: return 0;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case 111: return 1024; /* shared memory that the system reserves for a block */
    default: return 1;
    }
}

EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "%s", nodevice_device_name());
    p->totalGlobalMem = total_memory;
    p->sharedMemPerBlock = 49152;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->warpSize = 32;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->major = 9;
    p->multiProcessorCount = 132;
    p->l2CacheSize = 62914560;
    p->maxThreadsPerMultiProcessor = 2048;
    p->sharedMemPerMultiprocessor = 233472;
    p->sharedMemPerBlockOptin = 232448;
    p->memoryBusWidth = 6144;
    p->maxBlocksPerMultiProcessor = 32;
    p->unifiedAddressing = p->cooperativeLaunch = p->pciBusID = 1;
    p->textureAlignment = 512;
    OK;
}

EXPORT cudaError_t cudaGetDevice(int *device) { *device = 0; OK; }
EXPORT cudaError_t cudaSetDevice(int device) { OK; }
EXPORT cudaError_t cudaGetDeviceCount(int *count) { *count = 1; OK; }
EXPORT cudaError_t cudaGetLastError(void) { OK; }
EXPORT cudaError_t cudaPeekAtLastError(void) { OK; }
EXPORT cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; OK; }
EXPORT cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; OK; }
EXPORT cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    *value = nodevice_attribute(attribute);
    OK;
}
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; OK; }
EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = 0; OK; }
EXPORT cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) { OK; }
EXPORT cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int device) {
    snprintf(id, length, "0000:01:00.0");
    OK;
}
EXPORT const char *cudaGetErrorString(cudaError_t error) {
    if (error == cudaErrorMemoryAllocation) return "out of memory";
    return error == cudaErrorStreamCaptureUnsupported ? "operation not permitted when stream is capturing" : "error";
}
EXPORT const char *cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }
EXPORT cudaError_t cudaProfilerStart(void) { OK; }
EXPORT cudaError_t cudaProfilerStop(void) { OK; }

/* --------------------------------------------------------------------------------------------------- memory */

/* Take a piece of a region. A page before it holds its size. */
static void *take(char *region, size_t *end, size_t size) {
    size_t pages = PAGE + ((size + PAGE - 1) & ~(PAGE - 1)) + PAGE;
    pthread_mutex_lock(&lock);
    char *page = region + *end;
    *end += pages;
    int full = *end > REGION || mprotect(page, pages, PROT_READ | PROT_WRITE);
    pthread_mutex_unlock(&lock);
    if (full) return 0;
    *(size_t *)page = size;
    return page + PAGE;
}

/* Return the memory of a piece; its addresses are not used again. */
static size_t leave(void *pointer) {
    char *page = (char *)pointer - PAGE;
    size_t size = *(size_t *)page;
    madvise(page, PAGE + size, MADV_DONTNEED);
    return size;
}

EXPORT cudaError_t cudaMalloc(void **pointer, size_t size) {
    if (unsafe()) return refuse("cudaMalloc");
    if (used_memory + size > total_memory) return cudaErrorMemoryAllocation;
    if (!(*pointer = take(device_memory, &device_end, size))) return cudaErrorMemoryAllocation;
    __atomic_add_fetch(&used_memory, size, __ATOMIC_SEQ_CST);
    allocations++;
    OK;
}
EXPORT cudaError_t cudaFree(void *pointer) {
    if (pointer) __atomic_sub_fetch(&used_memory, leave(pointer), __ATOMIC_SEQ_CST);
    OK;
}
EXPORT cudaError_t cudaMallocAsync(void **pointer, size_t size, cudaStream_t stream) { return cudaMalloc(pointer, size); }
EXPORT cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) { return cudaFree(pointer); }
EXPORT cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags) {
    return (*pointer = take(host_memory, &host_end, size)) ? cudaSuccess : cudaErrorMemoryAllocation;
}
EXPORT cudaError_t cudaFreeHost(void *pointer) { if (pointer) leave(pointer); OK; }
EXPORT cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned flags) { OK; }
EXPORT cudaError_t cudaHostUnregister(void *pointer) { OK; }
EXPORT cudaError_t cudaMemGetInfo(size_t *free_, size_t *total) {
    *total = total_memory;
    *free_ = total_memory - used_memory;
    OK;
}

static int on_device(const void *p) { return (char *)p >= device_memory && (char *)p < device_memory + REGION; }
static int pinned(const void *p) { return (char *)p >= host_memory && (char *)p < host_memory + REGION; }

EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    memset(attributes, 0, sizeof *attributes);
    attributes->type = on_device(pointer) ? cudaMemoryTypeDevice
                       : pinned(pointer)  ? cudaMemoryTypeHost
                                          : cudaMemoryTypeUnregistered;
    if (attributes->type == cudaMemoryTypeUnregistered) OK;
    attributes->devicePointer = attributes->hostPointer = (void *)pointer;
    OK;
}

static const char *place(const void *pointer) {
    return on_device(pointer) ? "device" : pinned(pointer) ? "pinned memory" : "pageable memory";
}

static void copy(void *to, const void *from, size_t size, cudaStream_t stream) {
    char name[64];
    snprintf(name, sizeof name, "copy: %s to %s", place(from), place(to));
    if (strstr(name, "pageable")) pageable++;
    nodevice_named(name, stream);
    if (size <= SMALL) memmove(to, from, size);
}

EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    copy(to, from, size, stream);
    OK;
}
EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    cudaError_t error = nodevice_wait("cudaMemcpy", 0, 0, 1);
    if (!error) copy(to, from, size, 0);
    return error;
}
EXPORT cudaError_t cudaMemcpyPeerAsync(void *to, int device, const void *from, int other, size_t size, cudaStream_t stream) {
    copy(to, from, size, stream);
    OK;
}
EXPORT cudaError_t cudaMemcpy2DAsync(void *to, size_t pitch, const void *from, size_t from_pitch, size_t width,
                                     size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    copy(to, from, SMALL + 1, stream);
    OK;
}
EXPORT cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t size, size_t offset, enum cudaMemcpyKind kind) { OK; }
EXPORT cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream) {
    nodevice_named("memory set", stream);
    if (size <= SMALL) memset(to, value, size);
    OK;
}
EXPORT cudaError_t cudaMemset(void *to, int value, size_t size) { return cudaMemsetAsync(to, value, size, 0); }
EXPORT cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) {
    return (*pointer = take(device_memory, &device_end, PAGE)) ? cudaSuccess : cudaErrorMemoryAllocation;
}
EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) { *pool = 0; OK; }
EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) { OK; }
EXPORT cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) { OK; }
EXPORT cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t size) { OK; }

/* --------------------------------------------------------------------------------------- streams and events */

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    static unsigned long made;
    *stream = (cudaStream_t)(0x1000 + 16 * __atomic_add_fetch(&made, 1, __ATOMIC_SEQ_CST));
    OK;
}
EXPORT cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { *priority = 0; OK; }
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream) { OK; }
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    return nodevice_wait("cudaStreamSynchronize", stream, 0, 1);
}
EXPORT cudaError_t cudaDeviceSynchronize(void) { return nodevice_wait("cudaDeviceSynchronize", 0, 0, 1); }
EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) {
    if (captured(stream) || unsafe()) return refuse("cudaStreamQuery");
    OK;
}
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    *event = calloc(1, sizeof(Event));
    OK;
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) { free(event); OK; }
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    ((Event *)event)->capture = captured(stream);
    OK;
}
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return cudaEventRecord(event, stream);
}
static int in_capture(cudaEvent_t event) { return capture.number && ((Event *)event)->capture == capture.number; }
EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (in_capture(event) || unsafe()) return refuse("cudaEventQuery");
    OK;
}
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    return nodevice_wait("cudaEventSynchronize", (cudaStream_t)-1, ((Event *)event)->capture, 1);
}
EXPORT cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end) { *ms = 1.0f; OK; }
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    if (in_capture(event)) join(stream);
    OK;
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    function(data);
    OK;
}
EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data, unsigned flags) {
    function(stream, cudaSuccess, data);
    OK;
}

/* -------------------------------------------------------------------------------------------------- kernels */

/* nvcc turns `kernel<<<grid, block, shared, stream>>>(...)` into a push of these four, and a stub that pops
   them and launches. */
typedef struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} Configuration;
static __thread Configuration pushed[32];
static __thread int depth;

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
    pushed[depth++] = (Configuration){grid, block, shared, stream};
    return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    Configuration *top = &pushed[--depth];
    *grid = top->grid;
    *block = top->block;
    *shared = top->shared;
    *(void **)stream = top->stream;
    OK;
}
EXPORT cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
    nodevice_work(kernel, stream, grid, block, shared);
    OK;
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *kernel, void **arguments) {
    nodevice_work(kernel, how->stream, how->gridDim, how->blockDim, how->dynamicSmemBytes);
    OK;
}
EXPORT cudaError_t cudaLaunchCooperativeKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
    nodevice_work(kernel, stream, grid, block, shared);
    OK;
}
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *handle, const void *kernel) { *handle = (cudaKernel_t)kernel; OK; }
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
    nodevice_work(kernel, stream, grid, block, shared);
    OK;
}
EXPORT cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
    nodevice_work(kernel, stream, grid, block, shared);
    OK;
}
EXPORT void **__cudaRegisterFatBinary(void *binary) {
    static void *handle[4];
    return handle;
}
EXPORT void __cudaRegisterFatBinaryEnd(void **handle) {}
EXPORT void __cudaUnregisterFatBinary(void **handle) {}
EXPORT char __cudaInitModule(void **handle) { return 1; }
EXPORT void __cudaRegisterFunction(void **handle, const char *stub, char *function, const char *name, int limit,
                                   uint3 *thread, uint3 *block, dim3 *block_size, dim3 *grid_size, int *warp) {
    pthread_mutex_lock(&lock);
    entry_of(stub)->name = name;
    pthread_mutex_unlock(&lock);
}
EXPORT void __cudaRegisterVar(void **handle, char *variable, char *address, const char *name, int outside, size_t size, int constant, int global) {}
EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *kernel) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->ptxVersion = attributes->binaryVersion = 90;
    attributes->maxDynamicSharedSizeBytes = 232448;
    OK;
}
EXPORT cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int value) { OK; }
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel, int size, size_t shared, unsigned flags) {
    *blocks = 2;
    OK;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int size, size_t shared) {
    *blocks = 2;
    OK;
}

/* torch asks for functions of the driver by name. One that driver.c lacks does nothing and succeeds. */
static CUresult nothing(void) { return CUDA_SUCCESS; }
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                                    unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
    void *found = dlsym(RTLD_DEFAULT, name);
    *function = found ? found : (void *)nothing;
    if (result) *result = cudaDriverEntryPointSuccess;
    OK;
}
EXPORT cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
    return cudaGetDriverEntryPointByVersion(name, function, 0, flags, result);
}

/* --------------------------------------------------------------------------------------------------- graphs */

/* A graph, and what is made ready of it, is the number of its capture. */
EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    if (capture.number || captures + 1 == GRAPHS) return refuse("a second capture");
    memset(&capture, 0, sizeof capture);
    capture.mode = mode;
    capture.thread = pthread_self();
    capture.origin = stream;
    capture.number = ++captures;
    join(stream);
    OK;
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    if (!capture.number || stream != capture.origin) return cudaErrorStreamCaptureUnmatched;
    *graph = (cudaGraph_t)(unsigned long)capture.number;
    fprintf(stderr, "nodevice: captured a graph of %lu nodes\n", graphs[capture.number].count);
    capture.number = 0;
    return capture.refused ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = captured(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    OK;
}
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *number,
                                            cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count) {
    cudaStreamIsCapturing(stream, status);
    if (number) *number = capture.number;
    if (graph) *graph = (cudaGraph_t)(unsigned long)capture.number;
    if (count) *count = 0;
    OK;
}
EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    enum cudaStreamCaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    OK;
}
EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t *ready, cudaGraph_t graph, unsigned long long flags) {
    *ready = (cudaGraphExec_t)graph;
    OK;
}
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *ready, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiate(ready, graph, flags);
}
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t ready, cudaStream_t stream) {
    graphs[(unsigned long)ready].launched++;
    graph_launches++;
    spin();
    OK;
}
EXPORT cudaError_t cudaGraphUpload(cudaGraphExec_t ready, cudaStream_t stream) { OK; }
EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) { OK; }
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t ready) { OK; }
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    *count = graphs[(unsigned long)graph].count;
    OK;
}
EXPORT cudaError_t cudaGraphDebugDotPrint(cudaGraph_t graph, const char *path, unsigned flags) { OK; }
