/* AMD's driver for a virtual device (virtual.h): XLA's own plugin for ROCm starts on it, and runs no kernel.
 *
 * It is libamdhip64.so.7, as much of it as XLA:GPU calls, and of the libraries beside it what XLA asks for when it starts. All
 * others of their functions return an error (stagec/backends/gpu/stubs.py). DEVICE_ATTRIBUTES has numbers of
 * hipDeviceAttribute_t.
 */
#define LT(name) hipblasLt##name
enum { LT_WORDS = 3 };
#include "virtual.h"

enum { HIP_VERSION = 70226015 }; /* 7.2.26015, of the ROCm that XLA's plugin is built with */

/* hipDeviceAttribute_t */
enum { MEMORY_CLOCK = 60, BUS = 59, CLOCK = 5, L2 = 19, BLOCK_X = 26, GRID_X = 29, THREADS = 56, CORES = 63, REGISTERS = 71,
       SHARED = 74, THREADS_OF_CORE = 57, WARP = 87 };

int hipInit(unsigned flags) { return (void)flags, start(); }
int hipDriverGetVersion(int *version) { return *version = HIP_VERSION, OK; }
int hipRuntimeGetVersion(int *version) { return *version = HIP_VERSION, OK; }
int hipGetDeviceCount(int *devices) { return *devices = count(), OK; }
int hipGetDevice(int *device) { return *device = current, OK; }
int hipSetDevice(int device) { return current = device, OK; }
int hipDeviceGet(int *device, int ordinal) { return *device = ordinal, ordinal < count() ? OK : NO_DEVICE; }
int hipDeviceGetName(char *name, int size, int device) { return (void)device, snprintf(name, size, "%s", DEVICE_NAME), OK; }
int hipDeviceTotalMem(size_t *bytes, int device) { return (void)device, *bytes = DEVICE_MEMORY, OK; }
int hipDeviceGetAttribute(int *value, int attribute, int device) {
  return (void)device, *value = attribute_of_device(attribute), OK;
}
int hipDeviceGetPCIBusId(char *id, int size, int device) { return snprintf(id, size, "0000:%02x:00.0", device + 1), OK; }
int hipDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -1, OK; }
int hipDeviceCanAccessPeer(int *can, int device, int other) { return (void)device, (void)other, *can = 0, OK; }
int hipDeviceSynchronize(void) { return wait_for_all(); }

/* Of HIP 6 and 7: what XLA reads of it, at its places. */
int hipGetDevicePropertiesR0600(char *properties, int device) {
  enum { SIZE = 1472, NAME = 256 };
  static const int PLACES[][2] = {{304, REGISTERS}, {308, WARP}, {320, THREADS}, {324, BLOCK_X}, {328, BLOCK_X + 1},
                                  {332, BLOCK_X + 2}, {336, GRID_X}, {340, GRID_X + 1}, {344, GRID_X + 2}, {348, CLOCK},
                                  {388, CORES}, {608, MEMORY_CLOCK}, {612, BUS}, {616, L2}, {624, THREADS_OF_CORE}};
  (void)device;
  memset(properties, 0, SIZE);
  snprintf(properties, NAME, "%s", DEVICE_NAME);
  *(size_t *)(properties + 288) = DEVICE_MEMORY;
  *(size_t *)(properties + 296) = attribute_of_device(SHARED);
  for (size_t i = 0; i < sizeof PLACES / sizeof *PLACES; ++i)
    *(int *)(properties + PLACES[i][0]) = attribute_of_device(PLACES[i][1]);
  snprintf(properties + 1160, NAME, "%s", DEVICE_CAPABILITY);
  return OK;
}

const char *hipGetErrorString(int error) { return (void)error, SAID; }
int hipGetLastError(void) { return OK; }

int hipMemGetInfo(size_t *available, size_t *total) { return memory(available, total); }
int hipMalloc(void **at, size_t size) { return on_device(at, size); }
int hipMallocManaged(void **at, size_t size, unsigned flags) { return (void)flags, on_device(at, size); }
int hipFree(void *at) { return freed_on_device(at); }
int hipHostMalloc(void **at, size_t size, unsigned flags) { return (void)flags, on_host(at, size); }
int hipHostFree(void *at) { return freed(at), OK; }
int hipHostRegister(void *at, size_t size, unsigned flags) { return (void)at, (void)size, (void)flags, OK; }
int hipHostUnregister(void *at) { return (void)at, OK; }
int hipPointerGetAttribute(void *value, int attribute, void *at) {
  return (void)at, *(int *)value = attribute == 2 ? 2 : 0, OK; /* memory of a device */
}

int hipMemcpyHtoD(void *to, const void *from, size_t size) { return copy(to, from, size); }
int hipMemcpyDtoH(void *to, const void *from, size_t size) { return copy(to, from, size); }
int hipMemcpyHtoDAsync(void *to, const void *from, size_t size, void *stream) { return (void)stream, copy(to, from, size); }
int hipMemcpyDtoHAsync(void *to, const void *from, size_t size, void *stream) { return (void)stream, copy(to, from, size); }
int hipMemcpyDtoDAsync(void *to, const void *from, size_t size, void *stream) {
  return (void)stream, copy_on_device(to, from, size);
}
int hipMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
  enum { ON_DEVICE = 3 };
  return (void)stream, kind == ON_DEVICE ? copy_on_device(to, from, size) : copy(to, from, size);
}
int hipMemcpyWithStream(void *to, const void *from, size_t size, int kind, void *stream) {
  return hipMemcpyAsync(to, from, size, kind, stream);
}
int hipMemsetAsync(void *to, int value, size_t size, void *stream) { return (void)stream, fill(to, value, size); }
int hipMemsetD32Async(void *to, unsigned value, size_t n, void *stream) { return (void)stream, fill_words(to, value, n); }

int hipStreamCreateWithFlags(void **stream, unsigned flags) { return (void)flags, made(stream); }
int hipStreamCreateWithPriority(void **stream, unsigned flags, int priority) { return (void)flags, (void)priority, made(stream); }
int hipStreamDestroy(void *stream) { return (void)stream, OK; }
/* XLA of jaxlib 0.12 keeps a stream that nothing uses, and asks what kind it is. */
int hipStreamGetFlags(void *stream, unsigned *flags) { return (void)stream, *flags = 1, OK; }
int hipStreamGetPriority(void *stream, int *priority) { return (void)stream, *priority = 0, OK; }
int hipStreamSynchronize(void *stream) { return (void)stream, wait_for_all(); }
int hipStreamQuery(void *stream) { return (void)stream, query(); }
int hipStreamWaitEvent(void *stream, void *event, unsigned flags) { return (void)stream, (void)event, (void)flags, OK; }
int hipGetStreamDeviceId(void *stream) { return (void)stream, current; }
int hipEventCreateWithFlags(void **event, unsigned flags) { return (void)flags, made(event); }
int hipEventDestroy(void *event) { return (void)event, OK; }
int hipEventRecord(void *event, void *stream) { return (void)event, (void)stream, OK; }
int hipEventQuery(void *event) { return (void)event, query(); }
int hipEventSynchronize(void *event) { return (void)event, wait_for_all(); }
int hipEventElapsedTime(float *milliseconds, void *from, void *to) { return (void)from, (void)to, *milliseconds = 0.01f, OK; }
int hipLaunchHostFunc(void *stream, void (*function)(void *), void *data) { return (void)stream, call_later(function, data); }

int hipModuleLoadData(void **module, const void *code) { return load(module, code); }
int hipModuleUnload(void *module) { return unload(module); }
int hipModuleGetFunction(void **function, void *module, const char *name) {
  return symbol(module, name) ? *function = strdup(name), OK : NOT_FOUND;
}
int hipModuleGetGlobal(void **at, size_t *size, void *module, const char *name) { return variable(at, size, module, name); }
int hipFuncGetAttribute(int *value, int attribute, const void *function) { return (void)attribute, (void)function, *value = 0, OK; }
int hipFuncSetAttribute(const void *function, int attribute, int value) { return (void)function, (void)attribute, (void)value, OK; }
int hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads, size_t shared) {
  return (void)function, (void)threads, (void)shared, *blocks = 1, OK;
}
int hipModuleLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned i, unsigned j, unsigned k,
                          unsigned shared, void *stream, void **parameters, void **more) {
  (void)x, (void)y, (void)z, (void)i, (void)j, (void)k, (void)shared, (void)stream, (void)parameters, (void)more;
  return launch(function);
}

typedef struct {
  unsigned x, y, z;
} Size;
int hipLaunchKernel(const void *symbol, Size blocks, Size threads, void **parameters, size_t shared, void *stream) {
  const char *name = kept(symbol);
  (void)blocks, (void)threads, (void)parameters, (void)shared, (void)stream;
  return name ? launch(name) : NOT_FOUND;
}
int hipGetFuncBySymbol(void **function, const void *symbol) { return *function = (void *)kept(symbol), *function ? OK : NOT_FOUND; }
void **__hipRegisterFatBinary(void *code) {
  static void *handle;
  return (void)code, &handle;
}
void __hipUnregisterFatBinary(void **handle) { (void)handle; }
void __hipRegisterFunction(void **code, const void *symbol, char *function, const char *name) {
  (void)code, (void)function, keep(symbol, name);
}
void __hipRegisterVar(void) {}

int hipGraphCreate(void **graph, unsigned flags) { return (void)flags, make_graph(graph); }
int hipGraphDestroy(void *graph) { return (void)graph, OK; }
int hipGraphAddKernelNode(void **node, void *graph, void **after, size_t n, void *const *parameters) {
  return (void)after, (void)n, add(node, graph, parameters[3]); /* the size of a block and `extra` come first in them */
}
int hipGraphAddMemsetNode(void **node, void *graph, void **after, size_t n, const void *parameters) {
  return (void)after, (void)n, (void)parameters, add(node, graph, NULL);
}
int hipGraphAddMemcpyNode1D(void **node, void *graph, void **after, size_t n, void *to, const void *from, size_t size, int kind) {
  return (void)after, (void)n, (void)to, (void)from, (void)size, (void)kind, add(node, graph, NULL);
}
int hipGraphAddEmptyNode(void **node, void *graph, void **after, size_t n) { return (void)after, (void)n, add(node, graph, NULL); }
int hipGraphAddChildGraphNode(void **node, void *graph, void **after, size_t n, void *child) {
  return (void)after, (void)n, add_child(node, graph, child);
}
int hipGraphExecKernelNodeSetParams(void *graph, void *node, const void *parameters) {
  return (void)graph, (void)node, (void)parameters, OK;
}
int hipGraphExecMemsetNodeSetParams(void *graph, void *node, const void *parameters) {
  return (void)graph, (void)node, (void)parameters, OK;
}
int hipGraphExecMemcpyNodeSetParams1D(void *graph, void *node, void *to, const void *from, size_t size, int kind) {
  return (void)graph, (void)node, (void)to, (void)from, (void)size, (void)kind, OK;
}
int hipGraphExecChildGraphNodeSetParams(void *graph, void *node, void *child) {
  return (void)graph, (void)node, (void)child, OK;
}
int hipStreamBeginCapture(void *stream, int mode) { return (void)stream, (void)mode, make_graph(&capturing); }
int hipStreamEndCapture(void *stream, void **graph) { return (void)stream, captured(graph); }
int hipGraphGetRootNodes(void *graph, void **nodes, size_t *n) { return (void)graph, (void)nodes, *n = 0, OK; }
int hipGraphGetNodes(const Node *graph, void **nodes, size_t *n) {
  size_t total = 0;
  for (Node *node = graph->next; node; node = node->next, ++total)
    if (nodes && total < *n) nodes[total] = node;
  return *n = total, OK;
}
int hipGraphInstantiate(void **instance, void *graph, void **failed, char *log, size_t size) {
  return (void)failed, (void)log, (void)size, *instance = graph, OK;
}
int hipGraphExecDestroy(void *graph) { return (void)graph, OK; }
int hipGraphLaunch(void *graph, void *stream) { return (void)stream, launch_graph(graph); }

/* The libraries whose kernels XLA calls beside its own: they are here, and have no kernel. */

int rocblas_create_handle(void **library) { return made(library); }
int rocblas_destroy_handle(void *library) { return (void)library, OK; }
int rocblas_set_stream(void *library, void *stream) { return (void)library, (void)stream, OK; }
int miopenCreateWithStream(void **library, void *stream) { return (void)stream, made(library); }
int miopenDestroy(void *library) { return (void)library, OK; }
int miopenSetStream(void *library, void *stream) { return (void)library, (void)stream, OK; }

/* XLA asks MIOpen how it would run a convolution with a bias, and compiles none that it cannot. It adds the bias itself where
 * MIOpen cannot, as here. */

#define DESCRIBES(name) int miopen##name(void) { return OK; }
#define MAKES(name) int miopenCreate##name(void **object) { return made(object); }
MAKES(TensorDescriptor) MAKES(ConvolutionDescriptor)
DESCRIBES(SetTensorDescriptor) DESCRIBES(SetTensorDescriptorV2) DESCRIBES(DestroyTensorDescriptor)
DESCRIBES(InitConvolutionNdDescriptor) DESCRIBES(SetConvolutionGroupCount) DESCRIBES(SetConvolutionAttribute)
DESCRIBES(DestroyConvolutionDescriptor) DESCRIBES(ConvolutionForwardCompileSolution)

enum { DIRECT = 1 };
int miopenConvolutionForwardGetSolutionCount(void *library, void *w, void *x, void *convolution, void *y, size_t *n) {
  return (void)library, (void)w, (void)x, (void)convolution, (void)y, *n = 1, OK;
}
typedef struct {
  float time;
  size_t memory;
  uint64_t number;
  int algorithm;
} Solution;
int miopenConvolutionForwardGetSolution(void *library, void *w, void *x, void *convolution, void *y, size_t most, size_t *n,
                                        Solution *solution) {
  *solution = (Solution){0.01f, 0, 1, DIRECT};
  return (void)most, miopenConvolutionForwardGetSolutionCount(library, w, x, convolution, y, n);
}
int miopenConvolutionForwardGetWorkSpaceSize(void *library, void *w, void *x, void *convolution, void *y, size_t *size) {
  return (void)library, (void)w, (void)x, (void)convolution, (void)y, *size = 0, OK;
}
typedef struct {
  int algorithm;
  float time;
  size_t memory;
} Algorithm;
int miopenFindConvolutionForwardAlgorithm(void *library, void *x, const void *at, void *w, const void *w_at, void *convolution,
                                          void *y, void *y_at, int most, int *n, Algorithm *algorithm) {
  (void)library, (void)x, (void)at, (void)w, (void)w_at, (void)convolution, (void)y, (void)y_at, (void)most;
  return *algorithm = (Algorithm){DIRECT, 0.01f, 0}, *n = 1, OK;
}
