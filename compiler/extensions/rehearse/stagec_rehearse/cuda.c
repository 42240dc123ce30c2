/* NVIDIA's driver for a virtual device (virtual.h): XLA's own plugin for CUDA starts on it, and runs no kernel.
 *
 * It is libcuda.so.1, libcudart.so.13 and libnvidia-ml.so.1 at once, as much of them as XLA:GPU and Mosaic's runtime call;
 * and libcublas.so.13, libcublasLt.so.13 and libcudnn.so.9, which have no kernel. DEVICE_ATTRIBUTES has numbers of
 * CU_DEVICE_ATTRIBUTE_....
 */
#define LT(name) cublasLt##name
enum { LT_WORDS = 8 };
#include "virtual.h"

/* The driver. */

int cuInit(unsigned flags) { return (void)flags, start(); }
int cuDriverGetVersion(int *version) { return *version = 13000, OK; }
int cuDeviceGetCount(int *devices) { return *devices = count(), OK; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, ordinal < count() ? OK : NO_DEVICE; }
int cuDeviceGetName(char *name, int size, int device) { return (void)device, snprintf(name, size, "%s", DEVICE_NAME), OK; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { return (void)device, *bytes = DEVICE_MEMORY, OK; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  return (void)device, *value = attribute_of_device(attribute), OK;
}
int cuDeviceGetPCIBusId(char *id, int size, int device) { return snprintf(id, size, "0000:00:%02x.0", device), OK; }

/* A context is the number of its device, and CONTEXT; a thread begins without one. */
enum { CONTEXT = 0x1000 };
static __thread int has_context;
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { return (void)device, *flags = 0, *active = 0, OK; }
int cuDevicePrimaryCtxSetFlags_v2(int device, unsigned flags) { return (void)device, (void)flags, OK; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = (void *)(Address)(CONTEXT + device), OK; }
int cuDevicePrimaryCtxRelease_v2(int device) { return (void)device, OK; }

int cuCtxGetCurrent(void **context) { return *context = has_context ? (void *)(Address)(CONTEXT + current) : NULL, OK; }
int cuCtxSetCurrent(void *context) {
  has_context = context != NULL;
  return current = context ? (int)((Address)context - CONTEXT) : 0, OK;
}
int cuCtxGetDevice(int *device) { return *device = current, OK; }
int cuCtxSynchronize(void) { return wait_for_all(); }
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, OK; }
int cuDeviceCanAccessPeer(int *can, int device, int other) { return (void)device, (void)other, *can = 0, OK; }

/* XLA answers so for a function that it does not find here. */
enum { LACKING = 303 };
int cuGetErrorName(int error, const char **name) {
  switch (error) {
    case OUT_OF_MEMORY: return *name = "CUDA_ERROR_OUT_OF_MEMORY", OK;
    case ILLEGAL_ADDRESS: return *name = "CUDA_ERROR_ILLEGAL_ADDRESS", OK;
    case LACKING: return *name = "CUDA_ERROR_SHARED_OBJECT_INIT_FAILED", OK;
    default: return *name = "CUDA_ERROR_UNKNOWN", OK;
  }
}
int cuGetErrorString(int error, const char **text) {
  return *text = error == LACKING ? "stagec's virtual driver lacks this function" : SAID, OK;
}

int cuMemGetInfo_v2(size_t *available, size_t *total) { return memory(available, total); }
int cuMemAlloc_v2(void **at, size_t size) { return on_device(at, size); }
int cuMemFree_v2(void *at) { return freed_on_device(at); }
int cuMemHostAlloc(void **at, size_t size, unsigned flags) { return (void)flags, on_host(at, size); }
int cuMemFreeHost(void *at) { return freed(at), OK; }
int cuMemHostRegister_v2(void *at, size_t size, unsigned flags) { return (void)at, (void)size, (void)flags, OK; }
int cuMemHostUnregister(void *at) { return (void)at, OK; }
int cuMemGetAllocationGranularity(size_t *size, const void *of, int which) { return (void)of, (void)which, *size = 1 << 21, OK; }
int cuMemCreate(Address *handle, size_t size, const void *of, Address flags) {
  int device = ((const int *)of)[3]; /* in a CUmemAllocationProp, behind two kinds and the location's */
  return (void)flags, *handle = size + device, claim(device, size); /* of whole pages, so there is room for the device */
}
int cuMemAddressReserve(void **at, size_t size, size_t alignment, Address where, Address flags) {
  return (void)alignment, (void)where, (void)flags, on_host(at, size);
}
int cuMemMap(Address at, size_t size, size_t offset, Address handle, Address flags) {
  return (void)at, (void)size, (void)offset, (void)handle, (void)flags, OK;
}
int cuMemSetAccess(Address at, size_t size, const void *access, size_t n) { return (void)at, (void)size, (void)access, (void)n, OK; }
int cuMemUnmap(Address at, size_t size) { return (void)at, (void)size, OK; }
int cuMemRelease(Address handle) { return release(handle % PAGE, handle / PAGE * PAGE), OK; }
int cuMemAddressFree(Address at, size_t size) { return (void)size, freed((void *)at), OK; }
int cuPointerGetAttribute(void *value, int attribute, Address at) {
  return (void)at, *(int *)value = attribute == 2 ? 2 : 0, OK; /* memory of a device */
}

int cuMemcpyHtoD_v2(void *to, const void *from, size_t size) { return copy(to, from, size); }
int cuMemcpyDtoH_v2(void *to, const void *from, size_t size) { return copy(to, from, size); }
int cuMemcpyHtoDAsync_v2(void *to, const void *from, size_t size, void *stream) { return (void)stream, copy(to, from, size); }
int cuMemcpyDtoHAsync_v2(void *to, const void *from, size_t size, void *stream) { return (void)stream, copy(to, from, size); }
int cuMemcpyDtoDAsync_v2(void *to, const void *from, size_t size, void *stream) {
  return (void)stream, copy_on_device(to, from, size);
}
int cuMemsetD8Async(void *to, unsigned char value, size_t size, void *stream) { return (void)stream, fill(to, value, size); }
int cuMemsetD32Async(void *to, unsigned value, size_t n, void *stream) { return (void)stream, fill_words(to, value, n); }

int cuStreamCreate(void **stream, unsigned flags) { return (void)flags, made(stream); }
int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) { return (void)priority, cuStreamCreate(stream, flags); }
int cuStreamDestroy_v2(void *stream) { return (void)stream, OK; }
int cuStreamSynchronize(void *stream) { return (void)stream, wait_for_all(); }
int cuStreamQuery(void *stream) { return (void)stream, query(); }
int cuStreamIsCapturing(void *stream, int *status) { return (void)stream, *status = 0, OK; }
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) { return (void)stream, (void)event, (void)flags, OK; }
int cuEventCreate(void **event, unsigned flags) { return (void)flags, made(event); }
int cuEventDestroy_v2(void *event) { return (void)event, OK; }
int cuEventRecord(void *event, void *stream) { return (void)event, (void)stream, OK; }
int cuEventQuery(void *event) { return (void)event, query(); }
int cuEventSynchronize(void *event) { return (void)event, wait_for_all(); }
int cuEventElapsedTime_v2(float *milliseconds, void *from, void *to) { return (void)from, (void)to, *milliseconds = 0.01f, OK; }
int cuLaunchHostFunc(void *stream, void (*function)(void *), void *data) { return (void)stream, call_later(function, data); }

int cuModuleLoadData(void **module, const void *code) { return load(module, code); }
/* XLA gives the kernels with which it decides in a graph as PTX, a text that has their names. */
int cuModuleLoadDataEx(void **module, const void *text, unsigned n, int *options, void **values) {
  return (void)n, (void)options, (void)values, *module = strdup(text), OK;
}
int cuModuleLoadFatBinary(void **module, const void *code) { return load(module, code); }
int cuModuleUnload(void *module) { return unload(module); }
int cuModuleGetFunction(void **function, void *module, const char *name) {
  int here = memcmp(module, ELFMAG, SELFMAG) ? strstr(module, name) != NULL : symbol(module, name) != NULL;
  return here ? *function = strdup(name), OK : NOT_FOUND;
}
int cuModuleGetGlobal_v2(void **at, size_t *size, void *module, const char *name) { return variable(at, size, module, name); }
int cuFuncGetAttribute(int *value, int attribute, void *function) { return (void)attribute, (void)function, *value = 0, OK; }
int cuFuncSetAttribute(void *function, int attribute, int value) { return (void)function, (void)attribute, (void)value, OK; }
int cuFuncSetCacheConfig(void *function, int config) { return (void)function, (void)config, OK; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads, size_t shared) {
  return (void)function, (void)threads, (void)shared, *blocks = 1, OK;
}

/* How a kernel reads and writes tiles of an array: what CUDA's documents ask of the arguments is asked here too. */
int cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *array, const Address *sizes, const Address *strides,
                           const unsigned *tile, const unsigned *steps, int interleave, int swizzle, int promotion, int fill) {
  static const int BYTES[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4}; /* of the types, by their numbers */
  (void)promotion, (void)fill;
  if (type < 0 || type >= (int)(sizeof BYTES / sizeof *BYTES) || rank < 1 || rank > 5 || interleave) return INVALID_VALUE;
  size_t row = (size_t)tile[0] * BYTES[type];
  if ((Address)map % 64 || (Address)array % 16 || row % 16 || (swizzle && row > 16u << swizzle)) return INVALID_VALUE;
  for (unsigned i = 0; i < rank; ++i) {
    if (!sizes[i] || sizes[i] > 1ull << 32 || !tile[i] || tile[i] > 256 || !steps[i] || steps[i] > 8) return INVALID_VALUE;
    if (i + 1 < rank && (strides[i] % 16 || strides[i] >= 1ull << 40)) return INVALID_VALUE;
  }
  return memset(map, 0, 128), OK;
}

int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned i, unsigned j, unsigned k, unsigned shared,
                   void *stream, void **parameters, void **more) {
  (void)x, (void)y, (void)z, (void)i, (void)j, (void)k, (void)shared, (void)stream, (void)parameters, (void)more;
  return launch(function);
}
int cuLaunchKernelEx(const void *config, void *function, void **parameters, void **more) {
  return (void)config, (void)parameters, (void)more, launch(function);
}

int cuGraphCreate(void **graph, unsigned flags) { return (void)flags, make_graph(graph); }
int cuGraphDestroy(void *graph) { return (void)graph, OK; }
int cuGraphAddKernelNode_v2(void **node, void *graph, void **after, size_t n, void *const *parameters) {
  return (void)after, (void)n, add(node, graph, parameters[0]); /* the function comes first in them */
}
int cuGraphAddNode_v2(void **node, void *graph, void **after, const void *edges, size_t n, void *const *parameters) {
  (void)after, (void)edges, (void)n;
  enum { KERNEL = 0, CONDITIONAL = 13 };
  int type = *(const int *)parameters; /* behind it and 12 bytes is the node's own */
  if (type == CONDITIONAL) {           /* a handle, type and count, and the graphs of its bodies, which nothing launches */
    unsigned bodies = ((const unsigned *)parameters)[7];
    void **graphs = calloc(bodies, sizeof *graphs);
    for (unsigned i = 0; i < bodies; ++i) make_graph(&graphs[i]);
    *(void ***)&((void **)parameters)[4] = graphs;
  }
  return add(node, graph, type == KERNEL ? parameters[2] : NULL);
}
int cuGraphConditionalHandleCreate(Address *made, void *graph, void *context, unsigned value, unsigned flags) {
  return (void)graph, (void)context, (void)value, (void)flags, *made = (Address)handle(), OK;
}
int cuGraphAddMemsetNode(void **node, void *graph, void **after, size_t n, const void *parameters, void *context) {
  return (void)after, (void)n, (void)parameters, (void)context, add(node, graph, NULL);
}
int cuGraphAddMemcpyNode(void **node, void *graph, void **after, size_t n, const void *parameters, void *context) {
  return (void)after, (void)n, (void)parameters, (void)context, add(node, graph, NULL);
}
int cuStreamBeginCaptureToGraph(void *stream, void *graph, const void *after, const void *edges, size_t n, int mode) {
  return (void)stream, (void)after, (void)edges, (void)n, (void)mode, capturing = graph, OK;
}
int cuStreamEndCapture(void *stream, void **graph) { return (void)stream, captured(graph); }
int cuGraphGetRootNodes(void *graph, void **nodes, size_t *n) { return (void)graph, (void)nodes, *n = 0, OK; }
int cuGraphAddChildGraphNode(void **node, void *graph, void **after, size_t n, void *child) {
  return (void)after, (void)n, add_child(node, graph, child);
}
int cuGraphExecChildGraphNodeSetParams(void *graph, void *node, void *child) {
  return (void)graph, (void)node, (void)child, OK;
}
int cuGraphAddEmptyNode(void **node, void *graph, void **after, size_t n) { return (void)after, (void)n, add(node, graph, NULL); }
int cuGraphKernelNodeSetAttribute(void *node, int attribute, const void *value) {
  return (void)node, (void)attribute, (void)value, OK;
}
int cuGraphNodeGetType(void *node, int *type) { return *type = ((Node *)node)->kernel ? 0 : 5, OK; }
int cuGraphExecKernelNodeSetParams_v2(void *graph, void *node, const void *parameters) {
  return (void)graph, (void)node, (void)parameters, OK;
}
int cuGraphExecNodeSetParams(void *graph, void *node, const void *parameters) {
  return (void)graph, (void)node, (void)parameters, OK;
}
int cuGraphExecMemcpyNodeSetParams(void *graph, void *node, const void *parameters, void *context) {
  return (void)graph, (void)node, (void)parameters, (void)context, OK;
}
int cuGraphExecMemsetNodeSetParams(void *graph, void *node, const void *parameters, void *context) {
  return (void)graph, (void)node, (void)parameters, (void)context, OK;
}
int cuGraphInstantiateWithFlags(void **instance, void *graph, Address flags) { return (void)flags, *instance = graph, OK; }
int cuGraphExecDestroy(void *graph) { return (void)graph, OK; }
int cuGraphUpload(void *graph, void *stream) { return (void)graph, (void)stream, OK; }
int cuGraphLaunch(void *graph, void *stream) { return (void)stream, launch_graph(graph); }

/* The runtime library, of which XLA asks for versions, the last error, and kernels of its own library. */

int cudaGetDevice(int *device) { return *device = current, OK; }
int cudaSetDevice(int device) { return has_context = 1, current = device, OK; }
int cudaGetDeviceCount(int *devices) { return cuDeviceGetCount(devices); }
int cudaRuntimeGetVersion(int *version) { return *version = 13000, OK; }
int cudaDriverGetVersion(int *version) { return cuDriverGetVersion(version); }
int cudaGetLastError(void) { return OK; }
int cudaPeekAtLastError(void) { return OK; }
const char *cudaGetErrorName(int error) { return (void)error, "cudaErrorUnknown"; }
const char *cudaGetErrorString(int error) { return (void)error, SAID; }
void **__cudaRegisterFatBinary(void *code) {
  static void *handle;
  return (void)code, &handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
void __cudaRegisterFunction(void **code, const void *symbol, char *function, const char *name) {
  (void)code, (void)function, keep(symbol, name);
}
int cudaGetFuncBySymbol(void **function, const void *symbol) { return *function = (void *)kept(symbol), *function ? OK : NOT_FOUND; }
void __cudaRegisterVar(void) {}

/* The libraries whose kernels XLA times beside its own: they are here, and have no kernel. */

int cudnnCreate(void **library) { return made(library); }
int cudnnDestroy(void *library) { return (void)library, OK; }
int cudnnSetStream(void *library, void *stream) { return (void)library, (void)stream, OK; }
size_t cudnnGetVersion(void) { return 91200; }
int cudnnGetProperty(int which, int *value) { return *value = which == 0 ? 9 : which == 1 ? 12 : 0, OK; }
int cublasCreate_v2(void **library) { return made(library); }
const char *cublasGetStatusString(int status) { return (void)status, SAID; }
int cublasDestroy_v2(void *library) { return (void)library, OK; }
int cublasSetStream_v2(void *library, void *stream) { return (void)library, (void)stream, OK; }

/* The management library. */

int nvmlInit_v2(void) { return OK; }
int nvmlShutdown(void) { return OK; }
int nvmlSystemGetDriverVersion(char *version, unsigned size) { return snprintf(version, size, "580.00.00"), OK; }
const char *nvmlErrorString(int error) { return (void)error, SAID; }
