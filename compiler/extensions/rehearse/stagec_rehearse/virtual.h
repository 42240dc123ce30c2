/* A virtual device: what the drivers of NVIDIA (cuda.c) and AMD (hip.c) share.
 *
 * XLA's own plugin starts on it, and runs no kernel. Memory of the device is memory of the process that nobody touches, so it
 * costs nothing; copies from and to the host copy, streams do everything at once, and a launch of a kernel does nothing. So all
 * of XLA's runtime is real but the results: it compiles, reads executables, allocates, loads machine code into "modules",
 * launches, and says when memory is out.
 *
 * What the device says of itself is compiled in (driver.py): DEVICE_NAME, DEVICE_MEMORY (bytes), DEVICE_ATTRIBUTES (pairs of
 * the number of an attribute and its value), DEVICE_CAPABILITY. MOST_DEVICES is the most that there may be.
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

/* The same numbers at both vendors. */
enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_IMAGE = 200, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700 };

static const char SAID[] = "said by stagec's virtual driver";

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

static int start(void) {
  if (fails("no-driver")) return NO_DEVICE;
  static int told;
  const char *results = getenv("STAGEC_VIRTUAL_VALUES") ? "this machine's CPU computes results" : "results are zeros";
  if (!told++) fprintf(stderr, "stagec: a virtual %s; no kernel runs, and %s\n", DEVICE_NAME, results);
  return OK;
}

static int attribute_of_device(int number) {
  static const int VALUES[][2] = {DEVICE_ATTRIBUTES};
  for (size_t i = 0; i < sizeof VALUES / sizeof *VALUES; ++i)
    if (VALUES[i][0] == number) return VALUES[i][1];
  return 0;
}

/* Each thread has a device. */

static __thread int current;
static size_t used[MOST_DEVICES];

/* Memory. The kernel gives a page when somebody writes to it, and the same page of zeros to all who read. */

enum { PAGE = 1 << 21 };

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
static int on_host(void **at, size_t size) { return *at = aligned(size), *at ? OK : OUT_OF_MEMORY; }

static int claim(int device, size_t size) {
  if (__atomic_add_fetch(&used[device], size, __ATOMIC_RELAXED) <= DEVICE_MEMORY) return OK;
  return __atomic_sub_fetch(&used[device], size, __ATOMIC_RELAXED), OUT_OF_MEMORY;
}
static void release(int device, size_t size) { __atomic_sub_fetch(&used[device], size, __ATOMIC_RELAXED); }
static int on_device(void **at, size_t size) {
  if (claim(current, size)) return OUT_OF_MEMORY;
  if (on_host(at, size)) return release(current, size), OUT_OF_MEMORY;
  return ((size_t *)*at)[-3] = size, ((size_t *)*at)[-4] = current, OK;
}
/* Whichever device frees it: it is the owner's. */
static int freed_on_device(void *at) {
  if (at) release(((size_t *)at)[-4], ((size_t *)at)[-3]);
  return freed(at), OK;
}
static int memory(size_t *available, size_t *total) {
  return *total = DEVICE_MEMORY, *available = DEVICE_MEMORY - used[current], OK;
}

static int copy(void *to, const void *from, size_t size) {
  if (!lost) memcpy(to, from, size);
  return state();
}
static int copy_on_device(void *to, const void *from, size_t size) {
  /* A kernel's work. In a small array the host may have written something that the program reads again. */
  return size > PAGE && !getenv("STAGEC_VIRTUAL_VALUES") ? state() : copy(to, from, size);
}
static int fill(void *to, unsigned char value, size_t size) {
  if (size <= PAGE) memset(to, value, size);
  return state();
}
static int fill_words(unsigned *to, unsigned value, size_t n) {
  for (size_t i = 0; i < n && n <= PAGE; ++i) to[i] = value;
  return state();
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

static int call_later(void (*function)(void *), void *data) {
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

/* No handle comes twice: XLA remembers what it did with one. */
static void *handle(void) {
  static Address made = 0x10000;
  return (void *)__atomic_add_fetch(&made, 16, __ATOMIC_RELAXED);
}
static int made(void **object) { return *object = handle(), OK; }

/* A module is its machine code, an ELF file. A name is in it or not, as in a real one: Mosaic's runtime looks for a
 * variable of NVSHMEM, and ends the process where a module has it and no NVSHMEM is here. */

static const Elf64_Sym *symbol(const char *code, const char *name) {
  const Elf64_Ehdr *elf = (const Elf64_Ehdr *)code;
  const Elf64_Shdr *sections = (const Elf64_Shdr *)(code + elf->e_shoff);
  for (int i = 0; i < elf->e_shnum; ++i) {
    if (sections[i].sh_type != SHT_SYMTAB && sections[i].sh_type != SHT_DYNSYM) continue;
    const char *names = code + sections[sections[i].sh_link].sh_offset;
    const Elf64_Sym *symbols = (const Elf64_Sym *)(code + sections[i].sh_offset);
    for (size_t n = 0; n < sections[i].sh_size / sizeof(Elf64_Sym); ++n)
      if (strcmp(names + symbols[n].st_name, name) == 0) return symbols + n;
  }
  return NULL;
}

static int load(void **module, const void *code) {
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
static int unload(void *module) { return free(module), OK; }

static int variable(void **at, size_t *size, const void *module, const char *name) {
  static char constants[1 << 20] __attribute__((aligned(256))); /* as XLA asks of a constant */
  if (memcmp(module, ELFMAG, SELFMAG)) return NOT_FOUND; /* PTX, which is kept as it is */
  const Elf64_Sym *global = symbol(module, name);
  if (!global || global->st_size > sizeof constants) return NOT_FOUND;
  if (size) *size = global->st_size;
  return *at = constants, OK;
}

/* Kernels of XLA's own library, with which it fills and compares arrays when it times others. */

static struct Registered {
  const void *symbol;
  const char *name;
  struct Registered *next;
} *registered;

static void keep(const void *symbol, const char *name) {
  struct Registered *made = malloc(sizeof *made);
  *made = (struct Registered){symbol, name, registered};
  registered = made;
}
static const char *kept(const void *symbol) {
  for (struct Registered *each = registered; each; each = each->next)
    if (each->symbol == symbol) return each->name;
  return NULL;
}

static int launch(const char *kernel) {
  const char *path = getenv("STAGEC_VIRTUAL_KERNELS");
  FILE *file = path ? fopen(path, "a") : NULL;
  if (file) fprintf(file, "%s\n", kernel), fclose(file);
  lost |= fails("lost");
  return state();
}

/* Graphs: XLA records most launches of an executable into one. What is instantiated of one is the same object. */

typedef struct Node {
  const char *kernel;
  struct Node *next;
} Node;

static int make_graph(void **graph) { return *graph = calloc(1, sizeof(Node)), OK; }
static int add(void **node, Node *graph, const char *kernel) {
  Node *last = graph;
  while (last->next) last = last->next;
  last->next = calloc(1, sizeof(Node));
  last->next->kernel = kernel;
  return *node = last->next, OK;
}
static int add_child(void **node, Node *graph, const Node *child) {
  for (const Node *each = child->next; each; each = each->next)
    if (each->kernel) add(node, graph, each->kernel);
  return add(node, graph, NULL);
}
static int launch_graph(const Node *graph) {
  for (const Node *node = graph->next; node; node = node->next)
    if (node->kernel) launch(node->kernel);
  return state();
}
/* What XLA captures of a stream is the work of a library, which does nothing here, and becomes a node of another graph. */
static __thread void *capturing;
static int captured(void **graph) { return *graph = capturing, capturing = NULL, OK; }

/* cuBLASLt and hipBLASLt differ in LT, a prefix, and in LT_WORDS, of what describes an algorithm. Here they have one for each
 * product, which does nothing, as other kernels do. */

int LT(Create)(void **library) { return made(library); }
int LT(Destroy)(void *library) { return (void)library, OK; }
typedef struct {
  uint64_t algorithm[LT_WORDS];
  size_t workspace;
  int status;
  float waves;
  int reserved[4];
} Heuristic;
int LT(MatmulDescCreate)(void **product, int compute, int scale) { return (void)compute, (void)scale, made(product); }
int LT(MatmulDescDestroy)(void *product) { return (void)product, OK; }
int LT(MatmulDescSetAttribute)(void *product, int which, const void *value, size_t size) {
  return (void)product, (void)which, (void)value, (void)size, OK;
}
int LT(MatmulDescGetAttribute)(void *product, int which, void *value, size_t size, size_t *written) {
  (void)product, (void)which;
  if (written) *written = size;
  return memset(value, 0, size), OK;
}
int LT(MatrixLayoutCreate)(void **layout, int type, uint64_t rows, uint64_t columns, int64_t stride) {
  return (void)type, (void)rows, (void)columns, (void)stride, made(layout);
}
int LT(MatrixLayoutDestroy)(void *layout) { return (void)layout, OK; }
int LT(MatrixLayoutSetAttribute)(void *layout, int which, const void *value, size_t size) {
  return LT(MatmulDescSetAttribute)(layout, which, value, size);
}
int LT(MatrixLayoutGetAttribute)(void *layout, int which, void *value, size_t size, size_t *written) {
  return LT(MatmulDescGetAttribute)(layout, which, value, size, written);
}
int LT(MatmulPreferenceCreate)(void **preference) { return made(preference); }
int LT(MatmulPreferenceDestroy)(void *preference) { return (void)preference, OK; }
int LT(MatmulPreferenceSetAttribute)(void *preference, int which, const void *value, size_t size) {
  return LT(MatmulDescSetAttribute)(preference, which, value, size);
}
int LT(MatmulAlgoGetHeuristic)(void *library, void *product, void *a, void *b, void *c, void *d, void *preference,
                               int asked, Heuristic *given, int *count) {
  (void)library, (void)product, (void)a, (void)b, (void)c, (void)d, (void)preference;
  if ((*count = asked > 0)) memset(given, 0, sizeof *given);
  return OK;
}
int LT(Matmul)(void) { return OK; }
