/* A libcuda for the test of `baton.cuda`: the real signatures over malloc, two GPUs. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct context *CUcontext;
typedef struct { char reserved[64]; } CUipcMemHandle;
struct context { int device; };

enum { SUCCESS = 0, INVALID_VALUE = 1, INVALID_DEVICE = 101, INVALID_CONTEXT = 201 };

static struct context primary[2] = {{0}, {1}};
static CUcontext stack[8];
int depth, retained, synchronized, freed, closed, initialized;
/* The call that is to fail next, and how. */
char failing[64];
CUresult failure;

static CUresult result(const char *call, CUresult otherwise) {
    if (strcmp(call, failing)) return otherwise;
    failing[0] = 0;
    return failure;
}
static CUresult in_context(const char *call) {
    return result(call, depth ? SUCCESS : INVALID_CONTEXT);
}

CUresult cuInit(unsigned flags) { initialized = 1; return result("cuInit", flags ? INVALID_VALUE : 0); }
CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    if (ordinal > 1) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}
CUresult cuDeviceGetP2PAttribute(int *value, int attribute, CUdevice from, CUdevice to) {
    if (attribute != 3 || from == to) return INVALID_VALUE;
    *value = from < to; /* as no machine is: to tell them apart */
    return SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    retained++;
    *context = &primary[device];
    return SUCCESS;
}
CUresult cuCtxPushCurrent_v2(CUcontext context) {
    if (context != &primary[0] && context != &primary[1]) return INVALID_CONTEXT;
    stack[depth++] = context;
    return SUCCESS;
}
CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    if (!depth) return INVALID_CONTEXT;
    *context = stack[--depth];
    return SUCCESS;
}
CUresult cuCtxSynchronize(void) { synchronized++; return in_context("cuCtxSynchronize"); }
CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes) {
    CUresult code = in_context("cuMemAlloc_v2");
    if (!code) {
        *address = (CUdeviceptr)(uintptr_t)malloc(bytes);
        memset((void *)(uintptr_t)*address, 0xAB, bytes);
    }
    return code;
}
CUresult cuMemsetD8_v2(CUdeviceptr address, unsigned char value, size_t count) {
    CUresult code = in_context("cuMemsetD8_v2");
    if (!code) memset((void *)(uintptr_t)address, value, count);
    return code;
}
CUresult cuMemFree_v2(CUdeviceptr address) {
    CUresult code = in_context("cuMemFree_v2");
    if (!code) free((void *)(uintptr_t)address), freed++;
    return code;
}
CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes) {
    memcpy(to, (void *)(uintptr_t)from, bytes);
    return in_context("cuMemcpyDtoH_v2");
}
CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
    memset(handle->reserved, 0x5A, sizeof handle->reserved);
    memcpy(handle->reserved + 8, &address, sizeof address);
    return in_context("cuIpcGetMemHandle");
}
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned flags) {
    if (flags != 1 || handle.reserved[0] != 0x5A || handle.reserved[63] != 0x5A) return INVALID_VALUE;
    memcpy(address, handle.reserved + 8, sizeof *address);
    return in_context("cuIpcOpenMemHandle_v2");
}
CUresult cuIpcCloseMemHandle(CUdeviceptr address) { closed++; return in_context("cuIpcCloseMemHandle"); }
CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr address) {
    if (attribute != 9 || !address) return INVALID_VALUE;
    *(int *)data = 1;
    return SUCCESS;
}
CUresult cuGetErrorName(CUresult code, const char **text) {
    *text = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : 0;
    return code == 2 ? SUCCESS : INVALID_VALUE;
}
CUresult cuGetErrorString(CUresult code, const char **text) {
    *text = code == 2 ? "out of memory" : 0;
    return code == 2 ? SUCCESS : INVALID_VALUE;
}
