/* A libcuda for tests: the real signatures and structures over memfds, two GPUs.
 *
 * An allocation is a memfd, so that descriptors of it are real and other processes can map it. As on
 * a GPU it lives while a handle, a mapping or a descriptor does, and mapped memory that nothing was
 * given access to cannot be read. What is not as cuda.h has it is CUDA_ERROR_INVALID_VALUE. cuda-bindings asks cuGetProcAddress for
 * every function; one that is not here it cannot call.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef struct context *CUcontext;
typedef struct { int type; int id; } CUmemLocation;
typedef struct {
    int type;
    int requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct {
        unsigned char compressionType, gpuDirectRDMACapable;
        unsigned short usage;
        unsigned char reserved[4];
    } allocFlags;
} CUmemAllocationProp;
typedef struct { CUmemLocation location; int flags; } CUmemAccessDesc;
_Static_assert(sizeof(CUmemAllocationProp) == 32 && sizeof(CUmemAccessDesc) == 12, "cuda.h");
struct context { int device; };

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, INVALID_CONTEXT = 201 };
enum { GRANULARITY = 1 << 16, SLOTS = 1024 };

static struct context primary[2] = {{0}, {1}};
static _Thread_local CUcontext stack[8];
static _Thread_local int depth;
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
/* What is there now, and what has been called. */
int pushed, handles, reserved, mapped, retained, synchronized;
int can_share = 1;
/* The call that is to fail next, and how. */
char failing[64];
CUresult failure;

static int files[SLOTS]; /* of handle n + 1: a descriptor + 1 */
static struct range { CUdeviceptr start; size_t size; int mapped; } ranges[SLOTS];

static CUresult result(const char *call, CUresult otherwise) {
    if (strcmp(call, failing)) return otherwise;
    failing[0] = 0;
    return failure;
}
static CUresult in_context(const char *call) {
    return result(call, depth ? SUCCESS : INVALID_CONTEXT);
}
static int is_gpu(CUmemLocation at) { return at.type == 1 && (at.id == 0 || at.id == 1); }
static int is_wanted(const CUmemAllocationProp *p) {
    static const char zero[8];
    return p->type == 1 && p->requestedHandleTypes == 1 && is_gpu(p->location)
        && !p->win32HandleMetaData && !memcmp(&p->allocFlags, zero, 8);
}
static CUresult new_handle(CUmemGenericAllocationHandle *handle, int fd) {
    CUresult code = OUT_OF_MEMORY;
    pthread_mutex_lock(&guard);
    for (int n = 0; n < SLOTS && code; n++) if (!files[n]) {
        files[n] = fd + 1, *handle = n + 1, handles++, code = SUCCESS;
    }
    pthread_mutex_unlock(&guard);
    return code;
}
static int file_of(CUmemGenericAllocationHandle handle) {
    return handle - 1 < SLOTS ? files[handle - 1] - 1 : -1;
}
static struct range *range_of(CUdeviceptr start, size_t size) {
    for (struct range *r = ranges; r < ranges + SLOTS; r++)
        if (start && r->start == start && r->size == size) return r;
    return 0;
}
static CUresult backed(CUdeviceptr address, size_t size, int prot, int flags, int fd) {
    void *at = (void *)(uintptr_t)address;
    return mmap(at, size, prot, MAP_FIXED | flags, fd, 0) == at ? SUCCESS : INVALID_VALUE;
}

CUresult cuInit(unsigned flags) { return result("cuInit", flags ? INVALID_VALUE : 0); }
CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    if (ordinal > 1) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    if ((attribute != 102 && attribute != 103) || device > 1) return INVALID_VALUE;
    *value = attribute == 102 || can_share;
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
    __atomic_fetch_add(&pushed, 1, __ATOMIC_SEQ_CST);
    return SUCCESS;
}
CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    if (!depth) return INVALID_CONTEXT;
    *context = stack[--depth];
    __atomic_fetch_sub(&pushed, 1, __ATOMIC_SEQ_CST);
    return SUCCESS;
}
CUresult cuCtxSynchronize(void) { synchronized++; return in_context("cuCtxSynchronize"); }
CUresult cuMemsetD8_v2(CUdeviceptr address, unsigned char value, size_t count) {
    CUresult code = in_context("cuMemsetD8");
    if (!code) memset((void *)(uintptr_t)address, value, count);
    return code;
}
CUresult cuMemGetAllocationGranularity(size_t *size, const CUmemAllocationProp *wanted, int option) {
    if (!is_wanted(wanted) || option != 0) return INVALID_VALUE;
    *size = GRANULARITY;
    return SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size,
                     const CUmemAllocationProp *wanted, unsigned long long flags) {
    CUresult code = result("cuMemCreate", SUCCESS);
    if (code) return code;
    if (!is_wanted(wanted) || !size || size % GRANULARITY || flags) return INVALID_VALUE;
    int fd = memfd_create("gpu", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, size)) return OUT_OF_MEMORY;
    for (size_t at = 0; at < size; at += GRANULARITY) /* memory is not zero at first */
        if (pwrite(fd, "\xAB", 1, at) != 1) return OUT_OF_MEMORY;
    return new_handle(handle, fd);
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    CUresult code = INVALID_VALUE;
    pthread_mutex_lock(&guard);
    if (file_of(handle) >= 0) {
        close(file_of(handle)), files[handle - 1] = 0, handles--, code = SUCCESS;
    }
    pthread_mutex_unlock(&guard);
    return code;
}
CUresult cuMemExportToShareableHandle(void *fd, CUmemGenericAllocationHandle handle, int type,
                                      unsigned long long flags) {
    CUresult code = result("cuMemExportToShareableHandle", SUCCESS);
    if (code) return code;
    if (type != 1 || flags || file_of(handle) < 0) return INVALID_VALUE;
    *(int *)fd = dup(file_of(handle)); /* which children inherit, if nothing is done about it */
    return SUCCESS;
}
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *fd, int type) {
    char name[64] = {0}, link[64];
    CUresult code = result("cuMemImportFromShareableHandle", SUCCESS);
    if (code) return code;
    int own = fcntl((int)(intptr_t)fd, F_DUPFD_CLOEXEC, 3); /* the caller's stays the caller's */
    snprintf(link, sizeof link, "/proc/self/fd/%d", own);
    if (type != 1 || readlink(link, name, sizeof name - 1) < 0 || strncmp(name, "/memfd:gpu", 10)) {
        if (own >= 0) close(own);
        return INVALID_VALUE;
    }
    return new_handle(handle, own);
}
CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wanted,
                             unsigned long long flags) {
    if (!size || size % GRANULARITY || alignment || wanted || flags) return INVALID_VALUE;
    void *at = mmap(0, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return OUT_OF_MEMORY;
    pthread_mutex_lock(&guard);
    struct range *r = ranges;
    while (r->start) r++;
    *r = (struct range){*address = (CUdeviceptr)(uintptr_t)at, size, 0};
    reserved++;
    pthread_mutex_unlock(&guard);
    return SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
    CUresult code = INVALID_VALUE;
    pthread_mutex_lock(&guard);
    struct range *r = range_of(address, size);
    if (r && !r->mapped) {
        munmap((void *)(uintptr_t)address, size);
        r->start = 0, reserved--, code = SUCCESS;
    }
    pthread_mutex_unlock(&guard);
    return code;
}
CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long flags) {
    struct stat found;
    CUresult code = result("cuMemMap", SUCCESS);
    if (code) return code;
    code = INVALID_VALUE;
    pthread_mutex_lock(&guard);
    struct range *r = range_of(address, size);
    int fd = file_of(handle);
    if (r && !r->mapped && !offset && !flags && !fstat(fd, &found) && (size_t)found.st_size >= size)
        code = backed(address, size, PROT_NONE, MAP_SHARED, fd);
    if (!code) r->mapped = 1, mapped++;
    pthread_mutex_unlock(&guard);
    return code;
}
CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *wanted, size_t count) {
    CUresult code = result("cuMemSetAccess", SUCCESS);
    if (code) return code;
    struct range *r = range_of(address, size);
    if (!r || !r->mapped || count != 1 || !is_gpu(wanted->location) || wanted->flags != 3)
        return INVALID_VALUE;
    return mprotect((void *)(uintptr_t)address, size, PROT_READ | PROT_WRITE) ? INVALID_VALUE : 0;
}
CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    CUresult code = result("cuMemUnmap", SUCCESS);
    if (code) return code;
    code = INVALID_VALUE;
    pthread_mutex_lock(&guard);
    struct range *r = range_of(address, size);
    if (r && r->mapped)
        code = backed(address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
    if (!code) r->mapped = 0, mapped--;
    pthread_mutex_unlock(&guard);
    return code;
}
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
CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags,
                             int *status) {
    char name[80];
    (void)version, (void)flags;
    snprintf(name, sizeof name, "%s_v2", symbol);
    if (!(*function = dlsym(RTLD_DEFAULT, name))) *function = dlsym(RTLD_DEFAULT, symbol);
    if (status) *status = !*function;
    return SUCCESS;
}
