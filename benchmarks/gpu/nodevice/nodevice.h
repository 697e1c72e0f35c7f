/* What the three parts of the CUDA runtime without a device share: the table of what ran, and graph captures.

   An entry stands for one kernel, one shape of a product, or one kind of copy. A call from the host adds to
   its `called`. A call into a capture adds the entry to the graph that is being captured; a launch of that
   graph then stands for all of them. */
#ifndef NODEVICE_H
#define NODEVICE_H
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef __cplusplus
#error "C, not C++: the names of functions must stay as they are"
#endif

#define EXPORT __attribute__((visibility("default")))

typedef struct {
    const void *key;      /* address of a kernel, or of an interned name */
    const char *name;
    unsigned long called; /* by the host, since the last reset */
    dim3 grid, block;     /* of the last launch */
    size_t shared;        /* bytes of dynamic shared memory of the last launch */
} Entry;

/* Count work that a stream is given. `key` names it; grid, block and shared memory are those of a kernel. */
void nodevice_work(const void *key, cudaStream_t stream, dim3 grid, dim3 block, size_t shared);
/* Count work that has a name and no address, such as a copy or a product of a shape. */
void nodevice_named(const char *name, cudaStream_t stream);
/* Give the kernel at an address its name. */
void nodevice_name(const void *key, const char *name);
/* Count a wait of the host: for a stream, for an event of a capture, or (`any`) for all work. Return the
   error that CUDA returns if a capture forbids it. */
cudaError_t nodevice_wait(const char *function, cudaStream_t stream, int captured_event, int any);
/* Return what the driver says of an attribute of the device; the numbers are those of an H200. */
int nodevice_attribute(int attribute);
const char *nodevice_device_name(void);

#endif
