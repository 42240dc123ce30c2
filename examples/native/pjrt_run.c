/* Runs a function of a bundle on one device, without Python: C99, libdl and a PJRT plugin.
 *
 *   pjrt_run PLUGIN.so PROGRAM OUT AVAL=FILE...
 *
 * PROGRAM is the StableHLO member of an executable. A FILE holds the values of an argument, dense and row-major, and the
 * AVAL says which: f32[8,64]. There is one for each parameter of the description's "abi", in its order. Results are
 * written to OUT.0, OUT.1, ..., in the order of the abi's results. docs/without-python.md has an example.
 *
 * pjrt_c_api.h is XLA's: https://github.com/openxla/xla/blob/main/xla/pjrt/c/pjrt_c_api.h. Every call takes one struct,
 * which says how long it is, so that a plugin that is newer or older than the header knows which fields there are.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pjrt_c_api.h"

static const PJRT_Api *api;

static void fail(const char *what, const char *why) {
  fprintf(stderr, "pjrt_run: %s: %s\n", what, why);
  exit(1);
}

/* Ends the program if a call of the API failed. */
static void check(PJRT_Error *error, const char *what) {
  if (error == NULL) return;
  PJRT_Error_Message_Args message = {.struct_size = PJRT_Error_Message_Args_STRUCT_SIZE, .error = error};
  api->PJRT_Error_Message(&message);
  fprintf(stderr, "pjrt_run: %s: %.*s\n", what, (int)message.message_size, message.message);
  exit(1);
}

/* Calls the function NAME of the API with a struct of its arguments. */
#define CALL(NAME, ARGS) ((ARGS).struct_size = NAME##_Args_STRUCT_SIZE, check(api->NAME(&(ARGS)), #NAME))

static void await(PJRT_Event *event) {
  PJRT_Event_Await_Args wait = {.event = event};
  CALL(PJRT_Event_Await, wait);
  PJRT_Event_Destroy_Args destroy = {.event = event};
  CALL(PJRT_Event_Destroy, destroy);
}

typedef struct {
  char *data;
  size_t size;
} Bytes;

static Bytes read_file(const char *path) {
  FILE *file = fopen(path, "rb");
  if (file == NULL) fail(path, "cannot be opened");
  fseek(file, 0, SEEK_END);
  Bytes bytes = {NULL, (size_t)ftell(file)};
  rewind(file);
  bytes.data = malloc(bytes.size + 1);
  if (fread(bytes.data, 1, bytes.size, file) != bytes.size) fail(path, "cannot be read");
  fclose(file);
  return bytes;
}

enum { MAX_RANK = 16 };

typedef struct {
  PJRT_Buffer_Type type;
  int64_t dims[MAX_RANK];
  size_t rank, bytes;
} Aval;

/* The dtypes of manifests and descriptions. */
static const struct {
  const char *name;
  PJRT_Buffer_Type type;
  size_t bytes;
} DTYPES[] = {
    {"bool", PJRT_Buffer_Type_PRED, 1},  {"i8", PJRT_Buffer_Type_S8, 1},      {"i16", PJRT_Buffer_Type_S16, 2},
    {"i32", PJRT_Buffer_Type_S32, 4},    {"i64", PJRT_Buffer_Type_S64, 8},    {"u8", PJRT_Buffer_Type_U8, 1},
    {"u16", PJRT_Buffer_Type_U16, 2},    {"u32", PJRT_Buffer_Type_U32, 4},    {"u64", PJRT_Buffer_Type_U64, 8},
    {"f16", PJRT_Buffer_Type_F16, 2},    {"bf16", PJRT_Buffer_Type_BF16, 2},  {"f32", PJRT_Buffer_Type_F32, 4},
    {"f64", PJRT_Buffer_Type_F64, 8},    {"c64", PJRT_Buffer_Type_C64, 8},    {"c128", PJRT_Buffer_Type_C128, 16},
};

/* Reads "f32[8,64]". */
static Aval read_aval(const char *text) {
  Aval aval = {PJRT_Buffer_Type_INVALID, {0}, 0, 0};
  size_t name = strcspn(text, "[");
  for (size_t i = 0; i < sizeof DTYPES / sizeof *DTYPES; ++i)
    if (strlen(DTYPES[i].name) == name && strncmp(DTYPES[i].name, text, name) == 0) {
      aval.type = DTYPES[i].type;
      aval.bytes = DTYPES[i].bytes;
    }
  if (aval.type == PJRT_Buffer_Type_INVALID || text[name] != '[') fail(text, "not an aval such as f32[8,64]");
  const char *at = text + name + 1;
  while (*at != ']') {
    char *end;
    if (aval.rank == MAX_RANK) fail(text, "too many dimensions");
    aval.dims[aval.rank] = strtoll(at, &end, 10);
    if (end == at || (*end != ',' && *end != ']')) fail(text, "not an aval such as f32[8,64]");
    aval.bytes *= (size_t)aval.dims[aval.rank++];
    at = *end == ',' ? end + 1 : end;
  }
  return aval;
}

/* XLA's CompileOptionsProto, for one device: executable_build_options (3) with device_ordinal (1) = -1, any;
 * num_replicas (4) = 1; num_partitions (5) = 1. */
static const char ONE_DEVICE[] = "\x1a\x0f\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x20\x01\x28\x01";

static void load_plugin(const char *path) {
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) fail(path, dlerror());
  const PJRT_Api *(*get)(void);
  *(void **)&get = dlsym(library, "GetPjrtApi");
  if (get == NULL) fail(path, "not a PJRT plugin: it has no GetPjrtApi");
  api = get();
  if (api->pjrt_api_version.major_version != PJRT_API_MAJOR) fail(path, "another major version of the PJRT C API");
  PJRT_Plugin_Initialize_Args initialize = {0};
  CALL(PJRT_Plugin_Initialize, initialize);
}

static PJRT_LoadedExecutable *compile(PJRT_Client *client, const char *path) {
  Bytes code = read_file(path);
  PJRT_Program program = {.struct_size = PJRT_Program_STRUCT_SIZE, .code = code.data, .code_size = code.size,
                          .format = "mlir", .format_size = strlen("mlir")};
  PJRT_Client_Compile_Args compile = {.client = client, .program = &program, .compile_options = ONE_DEVICE,
                                      .compile_options_size = sizeof ONE_DEVICE - 1};
  CALL(PJRT_Client_Compile, compile);
  free(code.data);
  return compile.executable;
}

/* Copies the file of "f32[8,64]=FILE" to the device. */
static PJRT_Buffer *put(PJRT_Client *client, PJRT_Device *device, char *argument) {
  char *path = strchr(argument, '=');
  if (path == NULL) fail(argument, "write AVAL=FILE");
  *path++ = '\0';
  Aval aval = read_aval(argument);
  Bytes values = read_file(path);
  if (values.size != aval.bytes) fail(path, "not as many bytes as its aval says");
  PJRT_Client_BufferFromHostBuffer_Args copy = {
      .client = client, .data = values.data, .type = aval.type, .dims = aval.dims, .num_dims = aval.rank,
      .host_buffer_semantics = PJRT_HostBufferSemantics_kImmutableUntilTransferCompletes, .device = device};
  CALL(PJRT_Client_BufferFromHostBuffer, copy);
  await(copy.done_with_host_buffer);
  free(values.data);
  return copy.buffer;
}

/* Writes a result to a file, row-major whatever its layout on the device is. */
static void get(PJRT_Buffer *buffer, const char *path) {
  PJRT_Buffer_Dimensions_Args shape = {.buffer = buffer};
  CALL(PJRT_Buffer_Dimensions, shape);
  int64_t minor_to_major[MAX_RANK];
  if (shape.num_dims > MAX_RANK) fail(path, "too many dimensions");
  for (size_t i = 0; i < shape.num_dims; ++i) minor_to_major[i] = (int64_t)(shape.num_dims - 1 - i);
  PJRT_Buffer_MemoryLayout row_major = {.struct_size = PJRT_Buffer_MemoryLayout_STRUCT_SIZE,
                                        .type = PJRT_Buffer_MemoryLayout_Type_Tiled};
  row_major.tiled.struct_size = PJRT_Buffer_MemoryLayout_Tiled_STRUCT_SIZE;
  row_major.tiled.minor_to_major = minor_to_major;
  row_major.tiled.minor_to_major_size = shape.num_dims;
  PJRT_Buffer_ToHostBuffer_Args copy = {.src = buffer, .host_layout = &row_major};
  CALL(PJRT_Buffer_ToHostBuffer, copy); /* how many bytes? */
  copy.dst = malloc(copy.dst_size + 1);
  CALL(PJRT_Buffer_ToHostBuffer, copy);
  await(copy.event);
  FILE *file = fopen(path, "wb");
  if (file == NULL || fwrite(copy.dst, 1, copy.dst_size, file) != copy.dst_size || fclose(file) != 0)
    fail(path, "cannot be written");
  free(copy.dst);
  PJRT_Buffer_Destroy_Args destroy = {.buffer = buffer};
  CALL(PJRT_Buffer_Destroy, destroy);
}

int main(int argc, char **argv) {
  if (argc < 4) fail("usage", "pjrt_run PLUGIN.so PROGRAM OUT AVAL=FILE...");
  load_plugin(argv[1]);
  PJRT_Client_Create_Args create = {0};
  CALL(PJRT_Client_Create, create);
  PJRT_Client_AddressableDevices_Args devices = {.client = create.client};
  CALL(PJRT_Client_AddressableDevices, devices);
  PJRT_LoadedExecutable *loaded = compile(create.client, argv[2]);

  size_t count = (size_t)argc - 4;
  PJRT_Buffer **arguments = calloc(count + 1, sizeof *arguments);
  for (size_t i = 0; i < count; ++i) arguments[i] = put(create.client, devices.addressable_devices[0], argv[4 + i]);

  PJRT_LoadedExecutable_GetExecutable_Args executable = {.loaded_executable = loaded};
  CALL(PJRT_LoadedExecutable_GetExecutable, executable);
  PJRT_Executable_NumOutputs_Args outputs = {.executable = executable.executable};
  CALL(PJRT_Executable_NumOutputs, outputs);
  PJRT_Buffer **results = calloc(outputs.num_outputs + 1, sizeof *results);

  /* A list of lists: one for each device. A donated argument is consumed, and must not be used again. */
  PJRT_ExecuteOptions options = {.struct_size = PJRT_ExecuteOptions_STRUCT_SIZE};
  PJRT_Buffer *const *argument_lists[] = {arguments};
  PJRT_Buffer **const output_lists[] = {results};
  PJRT_Event *done[1];
  PJRT_LoadedExecutable_Execute_Args execute = {
      .executable = loaded, .options = &options, .argument_lists = argument_lists, .num_devices = 1,
      .num_args = count, .output_lists = output_lists, .device_complete_events = done};
  CALL(PJRT_LoadedExecutable_Execute, execute);
  await(done[0]);

  for (size_t i = 0; i < outputs.num_outputs; ++i) {
    char path[4096];
    snprintf(path, sizeof path, "%s.%zu", argv[3], i);
    get(results[i], path);
  }
  for (size_t i = 0; i < count; ++i) {
    PJRT_Buffer_Destroy_Args destroy = {.buffer = arguments[i]};
    CALL(PJRT_Buffer_Destroy, destroy);
  }
  PJRT_Executable_Destroy_Args unload = {.executable = executable.executable};
  CALL(PJRT_Executable_Destroy, unload);
  PJRT_LoadedExecutable_Destroy_Args destroy = {.executable = loaded};
  CALL(PJRT_LoadedExecutable_Destroy, destroy);
  PJRT_Client_Destroy_Args end = {.client = create.client};
  CALL(PJRT_Client_Destroy, end);
  free(arguments);
  free(results);
  return 0;
}
