/* A virtual driver for NVIDIA devices: XLA's own plugin for CUDA starts on it, and runs no kernel.
 *
 * It is libcuda.so.1, libcudart.so.13 and libnvidia-ml.so.1 at once, as much of them as XLA:GPU and Mosaic's runtime call;
 * and libcublas.so.13, libcublasLt.so.13 and libcudnn.so.9, which have no kernel. Memory of the device is memory of the
 * process that nobody touches, so it costs nothing; copies from and to the host copy, streams do everything at once, and a
 * launch of a kernel does nothing. So all of XLA's runtime is real but the results: it compiles, reads executables, allocates,
 * loads machine code into "modules", launches, and says when memory is out.
 *
 * What the device says of itself is compiled in (driver.py): DEVICE_NAME, DEVICE_MEMORY (bytes), DEVICE_ATTRIBUTES (pairs of
 * a CU_DEVICE_ATTRIBUTE_... and its value).
 *
 * The environment:
 *
 *   STAGEC_VIRTUAL_DEVICES   how many devices there are (1)
 *   STAGEC_VIRTUAL_VALUES    where set, results are computed elsewhere, and written to the device's memory
 *   STAGEC_VIRTUAL_KERNELS   file to which the name of each kernel that is launched is appended
 *   STAGEC_VIRTUAL_FAILURE   for tests, one of:
 *     no-driver        the driver cannot be initialized
 *     lost             the first launch fails, and each launch, copy and wait after it; what only puts something into a
 *                      stream does not: XLA ends the process where a thread that copies an argument cannot record its event
 */
#include <elf.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

typedef unsigned long long Address;

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_IMAGE = 200, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700 };

static int fails(const char *how) {
  const char *failure = getenv("STAGEC_VIRTUAL_FAILURE");
  return failure && strcmp(failure, how) == 0;
}

static int lost;
static int state(void) { return lost ? ILLEGAL_ADDRESS : OK; }

static int count(void) {
  const char *devices = getenv("STAGEC_VIRTUAL_DEVICES");
  return devices ? atoi(devices) : 1;
}

/* Memory. The kernel gives a page when somebody writes to it, and the same page of zeros to all who read. */

enum { PAGE = 1 << 21, MOST_DEVICES = 64 };
static size_t used[MOST_DEVICES];

static void *aligned(size_t size) {
  size_t whole = (size + PAGE - 1) / PAGE * PAGE + 2 * PAGE;
  char *at = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return NULL;
  size_t *given = (size_t *)(((uintptr_t)at + 2 * PAGE - 1) / PAGE * PAGE);
  given[-2] = (size_t)at, given[-1] = whole; /* what `freed` needs lies before it */
  return given;
}
static void freed(void *at) {
  if (at) munmap((void *)((size_t *)at)[-2], ((size_t *)at)[-1]);
}

/* Functions of the host in a stream: a thread calls them, as XLA may hold locks that they take. */

typedef struct Call {
  void (*function)(void *);
  void *data;
  struct Call *next;
} Call;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static Call *first, **last = &first;
static int pending;

static void *work(void *unused) {
  pthread_mutex_lock(&mutex);
  for (;;) {
    while (!first) pthread_cond_wait(&changed, &mutex);
    Call *call = first;
    first = call->next;
    if (!first) last = &first;
    pthread_mutex_unlock(&mutex);
    call->function(call->data);
    free(call);
    pthread_mutex_lock(&mutex);
    --pending;
    pthread_cond_broadcast(&changed);
  }
  return unused;
}

/* Not for ever: at the end of a process a function may wait for a lock that this thread holds. */
static int wait_for_all(void) {
  struct timespec end;
  clock_gettime(CLOCK_REALTIME, &end);
  end.tv_sec += 2;
  pthread_mutex_lock(&mutex);
  while (pending && pthread_cond_timedwait(&changed, &mutex, &end) == 0) continue;
  pthread_mutex_unlock(&mutex);
  return state();
}

static int query(void) {
  pthread_mutex_lock(&mutex);
  int waiting = pending;
  pthread_mutex_unlock(&mutex);
  return waiting ? NOT_READY : state();
}

/* The driver. */

int cuInit(unsigned flags) {
  (void)flags;
  if (fails("no-driver")) return NO_DEVICE;
  static int told;
  const char *results = getenv("STAGEC_VIRTUAL_VALUES") ? "this machine's CPU computes results" : "results are zeros";
  if (!told++) fprintf(stderr, "stagec: a virtual %s; no kernel runs, and %s\n", DEVICE_NAME, results);
  return OK;
}
int cuDriverGetVersion(int *version) { return *version = 13000, OK; }
int cuDeviceGetCount(int *devices) { return *devices = count(), OK; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, ordinal < count() ? OK : NO_DEVICE; }
int cuDeviceGetName(char *name, int size, int device) { return (void)device, snprintf(name, size, "%s", DEVICE_NAME), OK; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { return (void)device, *bytes = DEVICE_MEMORY, OK; }
int cuDeviceGetPCIBusId(char *id, int size, int device) { return snprintf(id, size, "0000:00:%02x.0", device), OK; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { return (void)device, *flags = 0, *active = 0, OK; }
int cuDevicePrimaryCtxSetFlags_v2(int device, unsigned flags) { return (void)device, (void)flags, OK; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = (void *)(Address)(0x1000 + device), OK; }
int cuDevicePrimaryCtxRelease_v2(int device) { return (void)device, OK; }

int cuDeviceGetAttribute(int *value, int attribute, int device) {
  static const int VALUES[][2] = {DEVICE_ATTRIBUTES};
  (void)device;
  *value = 0;
  for (size_t i = 0; i < sizeof VALUES / sizeof *VALUES; ++i)
    if (VALUES[i][0] == attribute) *value = VALUES[i][1];
  return OK;
}

static __thread void *current;
int cuCtxGetCurrent(void **context) { return *context = current, OK; }
int cuCtxSetCurrent(void *context) { return current = context, OK; }
int cuCtxGetDevice(int *device) { return *device = (int)((Address)current - 0x1000), OK; }
int cuCtxSynchronize(void) { return wait_for_all(); }
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, OK; }
int cuDeviceCanAccessPeer(int *can, int device, int other) { return (void)device, (void)other, *can = 0, OK; }

int cuGetErrorName(int error, const char **name) {
  *name = error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : error == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_UNKNOWN";
  return OK;
}
int cuGetErrorString(int error, const char **text) { return (void)error, *text = "said by stagec's virtual driver", OK; }

static size_t *used_here(void) { return &used[((Address)current - 0x1000) % MOST_DEVICES]; }
static int claim(size_t size) {
  size_t *here = used_here();
  if (__atomic_add_fetch(here, size, __ATOMIC_RELAXED) <= DEVICE_MEMORY) return OK;
  return __atomic_sub_fetch(here, size, __ATOMIC_RELAXED), OUT_OF_MEMORY;
}
static void release(size_t size) { __atomic_sub_fetch(used_here(), size, __ATOMIC_RELAXED); }

int cuMemGetInfo_v2(size_t *available, size_t *total) {
  return *total = DEVICE_MEMORY, *available = DEVICE_MEMORY - *used_here(), OK;
}
int cuMemAlloc_v2(Address *at, size_t size) {
  if (claim(size)) return OUT_OF_MEMORY;
  void *given = aligned(size);
  if (!given) return release(size), OUT_OF_MEMORY;
  ((size_t *)given)[-3] = size;
  return *at = (Address)given, OK;
}
int cuMemFree_v2(Address at) { return release(((size_t *)at)[-3]), freed((void *)at), OK; }
int cuMemHostAlloc(void **at, size_t size, unsigned flags) { return (void)flags, *at = aligned(size), *at ? OK : OUT_OF_MEMORY; }
int cuMemFreeHost(void *at) { return freed(at), OK; }
int cuMemHostRegister_v2(void *at, size_t size, unsigned flags) { return (void)at, (void)size, (void)flags, OK; }
int cuMemHostUnregister(void *at) { return (void)at, OK; }
int cuMemGetAllocationGranularity(size_t *size, const void *of, int which) { return (void)of, (void)which, *size = 1 << 21, OK; }
int cuMemCreate(Address *handle, size_t size, const void *of, Address flags) {
  return (void)of, (void)flags, *handle = size, claim(size);
}
int cuMemAddressReserve(Address *at, size_t size, size_t alignment, Address where, Address flags) {
  return (void)alignment, (void)where, (void)flags, *at = (Address)aligned(size), *at ? OK : OUT_OF_MEMORY;
}
int cuMemMap(Address at, size_t size, size_t offset, Address handle, Address flags) {
  return (void)at, (void)size, (void)offset, (void)handle, (void)flags, OK;
}
int cuMemSetAccess(Address at, size_t size, const void *access, size_t n) { return (void)at, (void)size, (void)access, (void)n, OK; }
int cuMemUnmap(Address at, size_t size) { return (void)at, (void)size, OK; }
int cuMemRelease(Address handle) { return release(handle), OK; }
int cuMemAddressFree(Address at, size_t size) { return (void)size, freed((void *)at), OK; }
int cuPointerGetAttribute(void *value, int attribute, Address at) {
  return (void)at, *(int *)value = attribute == 2 ? 2 : 0, OK; /* memory of a device */
}

static int copy(void *to, const void *from, size_t size) {
  if (!lost) memcpy(to, from, size);
  return state();
}
int cuMemcpyHtoD_v2(Address to, const void *from, size_t size) { return copy((void *)to, from, size); }
int cuMemcpyDtoH_v2(void *to, Address from, size_t size) { return copy(to, (void *)from, size); }
int cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t size, void *stream) { return (void)stream, copy((void *)to, from, size); }
int cuMemcpyDtoHAsync_v2(void *to, Address from, size_t size, void *stream) { return (void)stream, copy(to, (void *)from, size); }
int cuMemcpyDtoDAsync_v2(Address to, Address from, size_t size, void *stream) {
  /* A kernel's work. In a small array the host may have written something that the program reads again. */
  return (void)stream, size > PAGE && !getenv("STAGEC_VIRTUAL_VALUES") ? state() : copy((void *)to, (void *)from, size);
}
int cuMemsetD8Async(Address to, unsigned char value, size_t size, void *stream) {
  if (size <= PAGE) memset((void *)to, value, size);
  return (void)stream, state();
}
int cuMemsetD32Async(Address to, unsigned value, size_t n, void *stream) {
  (void)stream;
  for (size_t i = 0; i < n && n <= PAGE; ++i) ((unsigned *)to)[i] = value;
  return state();
}

/* No handle comes twice: XLA remembers what it did with one. */
static void *handle(void) {
  static Address made = 0x10000;
  return (void *)__atomic_add_fetch(&made, 16, __ATOMIC_RELAXED);
}

int cuStreamCreate(void **stream, unsigned flags) { return (void)flags, *stream = handle(), OK; }
int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) { return (void)priority, cuStreamCreate(stream, flags); }
int cuStreamDestroy_v2(void *stream) { return (void)stream, OK; }
int cuStreamSynchronize(void *stream) { return (void)stream, wait_for_all(); }
int cuStreamQuery(void *stream) { return (void)stream, query(); }
int cuStreamIsCapturing(void *stream, int *status) { return (void)stream, *status = 0, OK; }
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) { return (void)stream, (void)event, (void)flags, OK; }
int cuEventCreate(void **event, unsigned flags) { return (void)flags, *event = handle(), OK; }
int cuEventDestroy_v2(void *event) { return (void)event, OK; }
int cuEventRecord(void *event, void *stream) { return (void)event, (void)stream, OK; }
int cuEventQuery(void *event) { return (void)event, query(); }
int cuEventSynchronize(void *event) { return (void)event, wait_for_all(); }
int cuEventElapsedTime_v2(float *milliseconds, void *from, void *to) { return (void)from, (void)to, *milliseconds = 0.01f, OK; }
int cuLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
  (void)stream;
  Call *call = malloc(sizeof(Call));
  *call = (Call){function, data, NULL};
  pthread_mutex_lock(&mutex);
  if (!pending++) {
    static int started;
    pthread_t thread;
    if (!started++) pthread_create(&thread, NULL, work, NULL), pthread_detach(thread);
  }
  *last = call, last = &call->next;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&mutex);
  return OK;
}

/* A module is its machine code, an ELF file. A name is in it or not, as in a real one: Mosaic's runtime looks for a
 * variable of NVSHMEM, and ends the process where a module has it and no NVSHMEM is here. */

static const Elf64_Sym *symbol(const char *code, const char *name) {
  const Elf64_Ehdr *elf = (const Elf64_Ehdr *)code;
  const Elf64_Shdr *sections = (const Elf64_Shdr *)(code + elf->e_shoff);
  for (int i = 0; i < elf->e_shnum; ++i) {
    if (sections[i].sh_type != SHT_SYMTAB) continue;
    const char *names = code + sections[sections[i].sh_link].sh_offset;
    const Elf64_Sym *symbols = (const Elf64_Sym *)(code + sections[i].sh_offset);
    for (size_t n = 0; n < sections[i].sh_size / sizeof(Elf64_Sym); ++n)
      if (strcmp(names + symbols[n].st_name, name) == 0) return symbols + n;
  }
  return NULL;
}

int cuModuleLoadData(void **module, const void *code) {
  const Elf64_Ehdr *elf = code;
  if (memcmp(elf->e_ident, ELFMAG, SELFMAG)) return INVALID_IMAGE;
  const Elf64_Shdr *sections = (const Elf64_Shdr *)((const char *)code + elf->e_shoff);
  size_t size = elf->e_shoff + elf->e_shnum * sizeof *sections;
  for (int i = 0; i < elf->e_shnum; ++i) {
    size_t end = sections[i].sh_offset + sections[i].sh_size;
    if (sections[i].sh_type != SHT_NOBITS && end > size) size = end;
  }
  return *module = memcpy(malloc(size), code, size), OK;
}
/* XLA gives the kernels with which it decides in a graph as PTX, a text that has their names. */
int cuModuleLoadDataEx(void **module, const void *text, unsigned n, int *options, void **values) {
  return (void)n, (void)options, (void)values, *module = strdup(text), OK;
}
int cuModuleLoadFatBinary(void **module, const void *code) { return cuModuleLoadData(module, code); }
int cuModuleUnload(void *module) { return free(module), OK; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
  int here = memcmp(module, ELFMAG, SELFMAG) ? strstr(module, name) != NULL : symbol(module, name) != NULL;
  return here ? *function = strdup(name), OK : NOT_FOUND;
}
int cuModuleGetGlobal_v2(Address *at, size_t *size, void *module, const char *name) {
  static char constants[1 << 20] __attribute__((aligned(256))); /* as XLA asks of a constant */
  const Elf64_Sym *global = symbol(module, name);
  if (!global || global->st_size > sizeof constants) return NOT_FOUND;
  if (size) *size = global->st_size;
  return *at = (Address)constants, OK;
}
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

static int launch(const char *kernel) {
  const char *path = getenv("STAGEC_VIRTUAL_KERNELS");
  FILE *file = path ? fopen(path, "a") : NULL;
  if (file) fprintf(file, "%s\n", kernel), fclose(file);
  lost |= fails("lost");
  return state();
}
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned i, unsigned j, unsigned k, unsigned shared,
                   void *stream, void **parameters, void **more) {
  (void)x, (void)y, (void)z, (void)i, (void)j, (void)k, (void)shared, (void)stream, (void)parameters, (void)more;
  return launch(function);
}
int cuLaunchKernelEx(const void *config, void *function, void **parameters, void **more) {
  return (void)config, (void)parameters, (void)more, launch(function);
}

/* Graphs: XLA records most launches of an executable into one. */

typedef struct Node {
  const char *kernel;
  struct Node *next;
} Node;

int cuGraphCreate(void **graph, unsigned flags) { return (void)flags, *graph = calloc(1, sizeof(Node)), OK; }
int cuGraphDestroy(void *graph) { return (void)graph, OK; } /* what was instantiated of it is the same object */
static int add(void **node, Node *graph, const char *kernel) {
  Node *last = graph;
  while (last->next) last = last->next;
  last->next = calloc(1, sizeof(Node));
  last->next->kernel = kernel;
  return *node = last->next, OK;
}
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
    for (unsigned i = 0; i < bodies; ++i) cuGraphCreate(&graphs[i], 0);
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

/* What XLA captures of a stream is the work of a library, which does nothing here, and becomes a node of another graph. */

static __thread void *capturing;
int cuStreamBeginCaptureToGraph(void *stream, void *graph, const void *after, const void *edges, size_t n, int mode) {
  return (void)stream, (void)after, (void)edges, (void)n, (void)mode, capturing = graph, OK;
}
int cuStreamEndCapture(void *stream, void **graph) { return (void)stream, *graph = capturing, capturing = NULL, OK; }
int cuGraphGetRootNodes(void *graph, void **nodes, size_t *n) { return (void)graph, (void)nodes, *n = 0, OK; }
int cuGraphAddChildGraphNode(void **node, void *graph, void **after, size_t n, void *child) {
  (void)after, (void)n;
  for (Node *each = ((Node *)child)->next; each; each = each->next)
    if (each->kernel) add(node, graph, each->kernel);
  return add(node, graph, NULL);
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
int cuGraphExecMemcpyNodeSetParams(void *graph, void *node, const void *parameters, void *context) {
  return (void)graph, (void)node, (void)parameters, (void)context, OK;
}
int cuGraphExecMemsetNodeSetParams(void *graph, void *node, const void *parameters, void *context) {
  return (void)graph, (void)node, (void)parameters, (void)context, OK;
}
int cuGraphInstantiateWithFlags(void **instance, void *graph, Address flags) { return (void)flags, *instance = graph, OK; }
int cuGraphExecDestroy(void *graph) { return (void)graph, OK; }
int cuGraphUpload(void *graph, void *stream) { return (void)graph, (void)stream, OK; }
int cuGraphLaunch(void *graph, void *stream) {
  (void)stream;
  for (Node *node = ((Node *)graph)->next; node; node = node->next)
    if (node->kernel) launch(node->kernel);
  return state();
}

/* The runtime library, of which XLA asks for versions, the last error, and kernels of its own library. */

int cudaGetDevice(int *device) { return cuCtxGetDevice(device); }
int cudaSetDevice(int device) { return current = (void *)(Address)(0x1000 + device), OK; }
int cudaGetDeviceCount(int *devices) { return cuDeviceGetCount(devices); }
int cudaRuntimeGetVersion(int *version) { return *version = 13000, OK; }
int cudaDriverGetVersion(int *version) { return cuDriverGetVersion(version); }
int cudaGetLastError(void) { return OK; }
int cudaPeekAtLastError(void) { return OK; }
const char *cudaGetErrorName(int error) { return (void)error, "cudaErrorUnknown"; }
const char *cudaGetErrorString(int error) { return (void)error, "said by stagec's virtual driver"; }
void **__cudaRegisterFatBinary(void *code) {
  static void *handle;
  return (void)code, &handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }

/* Kernels of XLA's own library, with which it fills and compares arrays when it times others. */
static struct Registered {
  const void *symbol;
  const char *name;
  struct Registered *next;
} *registered;
void __cudaRegisterFunction(void **code, const void *symbol, char *function, const char *name) {
  struct Registered *made = malloc(sizeof *made);
  (void)code, (void)function;
  *made = (struct Registered){symbol, name, registered};
  registered = made;
}
int cudaGetFuncBySymbol(void **function, const void *symbol) {
  for (struct Registered *each = registered; each; each = each->next)
    if (each->symbol == symbol) return *function = (void *)each->name, OK;
  return NOT_FOUND;
}
void __cudaRegisterVar(void) {}

/* The libraries whose kernels XLA times beside its own: they are here, and have no kernel. */

int cudnnCreate(void **library) { return *library = handle(), OK; }
int cudnnDestroy(void *library) { return (void)library, OK; }
int cudnnSetStream(void *library, void *stream) { return (void)library, (void)stream, OK; }
size_t cudnnGetVersion(void) { return 91200; }
int cudnnGetProperty(int which, int *value) { return *value = which == 0 ? 9 : which == 1 ? 12 : 0, OK; }
int cublasCreate_v2(void **library) { return *library = handle(), OK; }
const char *cublasGetStatusString(int status) { return (void)status, "said by stagec's virtual driver"; }
int cublasDestroy_v2(void *library) { return (void)library, OK; }
int cublasSetStream_v2(void *library, void *stream) { return (void)library, (void)stream, OK; }
int cublasLtCreate(void **library) { return *library = handle(), OK; }
int cublasLtDestroy(void *library) { return (void)library, OK; }

/* cuBLASLt has one algorithm for each product, which does nothing, as other kernels do. */

typedef struct {
  uint64_t algorithm[8];
  size_t workspace;
  int status;
  float waves;
  int reserved[4];
} Heuristic;
int cublasLtMatmulDescCreate(void **made, int compute, int scale) { return (void)compute, (void)scale, *made = handle(), OK; }
int cublasLtMatmulDescDestroy(void *product) { return (void)product, OK; }
int cublasLtMatmulDescSetAttribute(void *product, int which, const void *value, size_t size) {
  return (void)product, (void)which, (void)value, (void)size, OK;
}
int cublasLtMatmulDescGetAttribute(void *product, int which, void *value, size_t size, size_t *written) {
  (void)product, (void)which;
  if (written) *written = size;
  return memset(value, 0, size), OK;
}
int cublasLtMatrixLayoutCreate(void **made, int type, uint64_t rows, uint64_t columns, int64_t stride) {
  return (void)type, (void)rows, (void)columns, (void)stride, *made = handle(), OK;
}
int cublasLtMatrixLayoutDestroy(void *layout) { return (void)layout, OK; }
int cublasLtMatrixLayoutSetAttribute(void *layout, int which, const void *value, size_t size) {
  return cublasLtMatmulDescSetAttribute(layout, which, value, size);
}
int cublasLtMatrixLayoutGetAttribute(void *layout, int which, void *value, size_t size, size_t *written) {
  return cublasLtMatmulDescGetAttribute(layout, which, value, size, written);
}
int cublasLtMatmulPreferenceCreate(void **made) { return *made = handle(), OK; }
int cublasLtMatmulPreferenceDestroy(void *preference) { return (void)preference, OK; }
int cublasLtMatmulPreferenceSetAttribute(void *preference, int which, const void *value, size_t size) {
  return cublasLtMatmulDescSetAttribute(preference, which, value, size);
}
int cublasLtMatmulAlgoGetHeuristic(void *library, void *product, void *a, void *b, void *c, void *d, void *preference,
                                   int asked, Heuristic *given, int *count) {
  (void)library, (void)product, (void)a, (void)b, (void)c, (void)d, (void)preference;
  if ((*count = asked > 0)) memset(given, 0, sizeof *given);
  return OK;
}
int cublasLtMatmul(void) { return OK; }

/* The management library. */

int nvmlInit_v2(void) { return OK; }
int nvmlShutdown(void) { return OK; }
int nvmlSystemGetDriverVersion(char *version, unsigned size) { return snprintf(version, size, "580.00.00"), OK; }
const char *nvmlErrorString(int error) { return (void)error, "said by stagec's virtual driver"; }
