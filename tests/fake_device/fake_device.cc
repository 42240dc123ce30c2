// A fake device, for tests: a PJRT plugin that answers as an accelerator does, and computes on the CPU.
//
// It stands before the PJRT plugin for CPUs of the package xla-cpu-pjrt, and hands on whatever it does not answer
// itself. What it answers: platform, kind of device, memory and its limit, descriptions, the form of its executables, and
// every way to fail that a device has. It says that it is a fake wherever it says its name.
//
// The environment, read at each call:
//
//   STAGEC_FAKE_CPU_PLUGIN   path of xla_cpu_pjrt.so
//   STAGEC_FAKE_PLATFORM     "cuda" or "tpu": what it answers as
//   STAGEC_FAKE_DEVICES      how many devices there are (1)
//   STAGEC_FAKE_MODEL        a word after its kind, which makes it another kind
//   STAGEC_FAKE_MEMORY       bytes of each (1 GiB)
//   STAGEC_FAKE_DESCRIPTION  file with the text that XLA has for the device (target_config)
//   STAGEC_FAKE_AUTOTUNING   file with results that compiling writes where XLA:GPU would write what it timed
//   STAGEC_FAKE_FAILURE      one of:
//     major-version    the library is for another major version of the PJRT API
//     old-version      the library is for a minor version that jaxlib does not support any more
//     initialize       the plugin cannot be initialized
//     no-driver        no client: there is no driver
//     hang             the client never comes
//     memory-at-load   an executable does not fit into the memory
//     memory-at-put    an array does not
//     memory-at-run    what a call needs does not
//     lost             a call fails, and everything after it: the device is gone
//     lost-later       the same, seen when the results are awaited
#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "pjrt_c_api.h"

namespace {

const char NAME[] = "stagec's fake device for tests";
const char KIND[] = "Fake device of stagec's tests";
const char CODE[] = "code of stagec's fake device for tests\n";  // an executable begins so

const PJRT_Api* cpu;
PJRT_Api fake;

std::string variable(const char* name, const char* otherwise = "") {
  const char* value = getenv(name);
  return value ? value : otherwise;
}

bool fails(const char* how) { return variable("STAGEC_FAKE_FAILURE") == how; }

// Errors and events of its own, beside those of the plugin for CPUs.

struct Error {
  PJRT_Error_Code code;
  std::string message;
};

std::mutex mutex;
std::unordered_set<const void*> errors, events;
bool lost;

PJRT_Error* error(PJRT_Error_Code code, const std::string& what) {
  auto* made = new Error{code, std::string(NAME) + ": " + what};
  std::lock_guard<std::mutex> lock(mutex);
  errors.insert(made);
  return reinterpret_cast<PJRT_Error*>(made);
}

PJRT_Error* out_of_memory(size_t bytes) {
  return error(PJRT_Error_Code_RESOURCE_EXHAUSTED,
               "Out of memory while trying to allocate " + std::to_string(bytes) + " bytes.");
}

PJRT_Error* gone() { return error(PJRT_Error_Code_INTERNAL, "CUDA_ERROR_ILLEGAL_ADDRESS: the device is lost"); }

const Error* own(const PJRT_Error* given) {
  std::lock_guard<std::mutex> lock(mutex);
  return errors.count(given) ? reinterpret_cast<const Error*>(given) : nullptr;
}

void error_destroy(PJRT_Error_Destroy_Args* args) {
  const Error* mine = own(args->error);
  if (!mine) return cpu->PJRT_Error_Destroy(args);
  std::lock_guard<std::mutex> lock(mutex);
  errors.erase(mine);
  delete mine;
}

void error_message(PJRT_Error_Message_Args* args) {
  const Error* mine = own(args->error);
  if (!mine) return cpu->PJRT_Error_Message(args);
  args->message = mine->message.data();
  args->message_size = mine->message.size();
}

PJRT_Error* error_code(PJRT_Error_GetCode_Args* args) {
  const Error* mine = own(args->error);
  if (!mine) return cpu->PJRT_Error_GetCode(args);
  args->code = mine->code;
  return nullptr;
}

// An event that has failed already.
PJRT_Event* failed_event() {
  auto* made = new char;
  std::lock_guard<std::mutex> lock(mutex);
  events.insert(made);
  return reinterpret_cast<PJRT_Event*>(made);
}

bool has_failed(const PJRT_Event* event) {
  std::lock_guard<std::mutex> lock(mutex);
  return events.count(event);
}

PJRT_Error* event_destroy(PJRT_Event_Destroy_Args* args) {
  if (!has_failed(args->event)) return cpu->PJRT_Event_Destroy(args);
  std::lock_guard<std::mutex> lock(mutex);
  events.erase(args->event);
  delete reinterpret_cast<char*>(args->event);
  return nullptr;
}

PJRT_Error* event_is_ready(PJRT_Event_IsReady_Args* args) {
  if (!has_failed(args->event)) return cpu->PJRT_Event_IsReady(args);
  args->is_ready = true;
  return nullptr;
}

PJRT_Error* event_error(PJRT_Event_Error_Args* args) {
  return has_failed(args->event) ? gone() : cpu->PJRT_Event_Error(args);
}

PJRT_Error* event_await(PJRT_Event_Await_Args* args) {
  return has_failed(args->event) ? gone() : cpu->PJRT_Event_Await(args);
}

PJRT_Error* event_on_ready(PJRT_Event_OnReady_Args* args) {
  if (!has_failed(args->event)) return cpu->PJRT_Event_OnReady(args);
  args->callback(gone(), args->user_arg);
  return nullptr;
}

// Memory: what each buffer takes on which device, as a device's allocator counts it.

struct Taken {
  PJRT_Device* device;
  size_t bytes;
};

struct Memory {
  size_t in_use, peak, allocations, largest;
};

std::unordered_map<const PJRT_Buffer*, Taken> taken;
std::unordered_map<const PJRT_Device*, Memory> memories;
std::unordered_set<const PJRT_Buffer*> broken;  // results of a device that was lost

size_t limit() { return strtoull(variable("STAGEC_FAKE_MEMORY", "1073741824").c_str(), nullptr, 10); }

size_t in_use(PJRT_Device* device) {
  std::lock_guard<std::mutex> lock(mutex);
  return memories[device].in_use;
}

void take(PJRT_Buffer* buffer) {
  PJRT_Buffer_OnDeviceSizeInBytes_Args size = {};
  size.struct_size = PJRT_Buffer_OnDeviceSizeInBytes_Args_STRUCT_SIZE;
  size.buffer = buffer;
  PJRT_Buffer_Device_Args where = {};
  where.struct_size = PJRT_Buffer_Device_Args_STRUCT_SIZE;
  where.buffer = buffer;
  if (cpu->PJRT_Buffer_OnDeviceSizeInBytes(&size) || cpu->PJRT_Buffer_Device(&where)) abort();
  std::lock_guard<std::mutex> lock(mutex);
  Memory& memory = memories[where.device];
  taken[buffer] = {where.device, size.on_device_size_in_bytes};
  memory.in_use += size.on_device_size_in_bytes;
  if (memory.in_use <= limit()) memory.peak = std::max(memory.peak, memory.in_use);
  memory.largest = std::max(memory.largest, size.on_device_size_in_bytes);
  ++memory.allocations;
}

void give_back(const PJRT_Buffer* buffer) {
  std::lock_guard<std::mutex> lock(mutex);
  broken.erase(buffer);
  auto found = taken.find(buffer);
  if (found == taken.end()) return;
  memories[found->second.device].in_use -= found->second.bytes;
  taken.erase(found);
}

PJRT_Error* memory_stats(PJRT_Device_MemoryStats_Args* args) {
  std::lock_guard<std::mutex> lock(mutex);
  const Memory& memory = memories[args->device];
  args->bytes_in_use = memory.in_use;
  args->peak_bytes_in_use = memory.peak;
  args->num_allocs = memory.allocations;
  args->largest_alloc_size = memory.largest;
  args->bytes_limit = limit();
  args->bytes_reserved_is_set = args->peak_bytes_reserved_is_set = args->bytes_reservable_limit_is_set =
      args->largest_free_block_bytes_is_set = args->pool_bytes_is_set = args->peak_pool_bytes_is_set = false;
  args->peak_bytes_in_use_is_set = args->num_allocs_is_set = args->largest_alloc_size_is_set =
      args->bytes_limit_is_set = true;
  return nullptr;
}

PJRT_Error* buffer_from_host(PJRT_Client_BufferFromHostBuffer_Args* args) {
  if (lost) return gone();
  if (fails("memory-at-put")) return out_of_memory(limit());
  // As on a device: the memory of the caller is copied, whatever it allows.
  if (args->host_buffer_semantics != PJRT_HostBufferSemantics_kImmutableOnlyDuringCall)
    args->host_buffer_semantics = PJRT_HostBufferSemantics_kImmutableUntilTransferCompletes;
  PJRT_Error* failed = cpu->PJRT_Client_BufferFromHostBuffer(args);
  if (failed) return failed;
  take(args->buffer);
  PJRT_Device* device;
  size_t bytes;
  {
    std::lock_guard<std::mutex> lock(mutex);
    device = taken[args->buffer].device;
    bytes = taken[args->buffer].bytes;
  }
  if (in_use(device) <= limit()) return nullptr;
  give_back(args->buffer);
  PJRT_Buffer_Destroy_Args buffer = {PJRT_Buffer_Destroy_Args_STRUCT_SIZE, nullptr, args->buffer};
  cpu->PJRT_Buffer_Destroy(&buffer);
  PJRT_Event_Destroy_Args event = {PJRT_Event_Destroy_Args_STRUCT_SIZE, nullptr, args->done_with_host_buffer};
  cpu->PJRT_Event_Destroy(&event);
  return out_of_memory(bytes);
}

PJRT_Error* buffer_destroy(PJRT_Buffer_Destroy_Args* args) {
  give_back(args->buffer);
  return cpu->PJRT_Buffer_Destroy(args);
}

PJRT_Error* buffer_delete(PJRT_Buffer_Delete_Args* args) {
  give_back(args->buffer);
  return cpu->PJRT_Buffer_Delete(args);
}

PJRT_Error* copy_to_device(PJRT_Buffer_CopyToDevice_Args* args) {
  if (lost) return gone();
  PJRT_Error* failed = cpu->PJRT_Buffer_CopyToDevice(args);
  if (!failed) take(args->dst_buffer);
  return failed;
}

PJRT_Error* copy_to_memory(PJRT_Buffer_CopyToMemory_Args* args) {
  if (lost) return gone();
  PJRT_Error* failed = cpu->PJRT_Buffer_CopyToMemory(args);
  if (!failed) take(args->dst_buffer);
  return failed;
}

bool is_broken(const PJRT_Buffer* buffer) {
  std::lock_guard<std::mutex> lock(mutex);
  return broken.count(buffer);
}

PJRT_Error* buffer_ready_event(PJRT_Buffer_ReadyEvent_Args* args) {
  if (!is_broken(args->buffer)) return cpu->PJRT_Buffer_ReadyEvent(args);
  args->event = failed_event();
  return nullptr;
}

PJRT_Error* buffer_to_host(PJRT_Buffer_ToHostBuffer_Args* args) {
  if (!args->dst) return cpu->PJRT_Buffer_ToHostBuffer(args);  // asks for the size alone
  return lost || is_broken(args->src) ? gone() : cpu->PJRT_Buffer_ToHostBuffer(args);
}

// The memory of a device is not that of the process.
PJRT_Error* buffer_is_on_cpu(PJRT_Buffer_IsOnCpu_Args* args) {
  args->is_on_cpu = false;
  return nullptr;
}

// The client, and what it says of itself.

PJRT_Error* initialize(PJRT_Plugin_Initialize_Args* args) {
  if (fails("initialize")) return error(PJRT_Error_Code_INTERNAL, "libcuda.so reported version is: Invalid");
  return cpu->PJRT_Plugin_Initialize(args);
}

PJRT_Error* client_create(PJRT_Client_Create_Args* args) {
  while (fails("hang")) sleep(1);
  if (fails("no-driver")) return error(PJRT_Error_Code_FAILED_PRECONDITION, "No visible GPU devices.");
  // Options of the CUDA plugin are none of that for CPUs.
  PJRT_NamedValue count = {};
  count.struct_size = PJRT_NamedValue_STRUCT_SIZE;
  count.name = "cpu_device_count";
  count.name_size = strlen(count.name);
  count.type = PJRT_NamedValue_kInt64;
  count.int64_value = atoll(variable("STAGEC_FAKE_DEVICES", "1").c_str());
  count.value_size = 1;
  args->create_options = &count;
  args->num_options = 1;
  fprintf(stderr, "%s: a CPU answers as %s\n", NAME, variable("STAGEC_FAKE_PLATFORM", "cuda").c_str());
  return cpu->PJRT_Client_Create(args);
}

std::string_view kept(std::string text) {  // strings that are never freed, each once
  static auto* strings = new std::unordered_set<std::string>;
  std::lock_guard<std::mutex> lock(mutex);
  return *strings->insert(std::move(text)).first;
}

PJRT_Error* platform_name(PJRT_Client_PlatformName_Args* args) {
  const std::string_view name = kept(variable("STAGEC_FAKE_PLATFORM", "cuda"));
  args->platform_name = name.data();
  args->platform_name_size = name.size();
  return nullptr;
}

PJRT_Error* platform_version(PJRT_Client_PlatformVersion_Args* args) {
  args->platform_version = NAME;
  args->platform_version_size = strlen(NAME);
  return nullptr;
}

PJRT_Error* device_kind(PJRT_DeviceDescription_Kind_Args* args) {
  const std::string_view kind = kept(KIND + variable("STAGEC_FAKE_MODEL"));
  args->device_kind = kind.data();
  args->device_kind_size = kind.size();
  return nullptr;
}

PJRT_Error* device_text(PJRT_DeviceDescription_ToString_Args* args) {
  PJRT_DeviceDescription_Id_Args id = {PJRT_DeviceDescription_Id_Args_STRUCT_SIZE, nullptr, args->device_description, 0};
  cpu->PJRT_DeviceDescription_Id(&id);
  const std::string_view text = kept("FakeDevice(id=" + std::to_string(id.id) + ")");
  args->to_string = text.data();
  args->to_string_size = text.size();
  return nullptr;
}

PJRT_Error* device_debug_text(PJRT_DeviceDescription_DebugString_Args* args) {
  args->debug_string = NAME;
  args->debug_string_size = strlen(NAME);
  return nullptr;
}

PJRT_Error* topology_name(PJRT_TopologyDescription_PlatformName_Args* args) {
  const std::string_view name = kept(variable("STAGEC_FAKE_PLATFORM", "cuda"));
  args->platform_name = name.data();
  args->platform_name_size = name.size();
  return nullptr;
}

PJRT_Error* topology_version(PJRT_TopologyDescription_PlatformVersion_Args* args) {
  args->platform_version = NAME;
  args->platform_version_size = strlen(NAME);
  return nullptr;
}

std::string read_file(const std::string& path) {
  std::string text;
  if (FILE* file = fopen(path.c_str(), "rb")) {
    char part[4096];
    for (size_t size; (size = fread(part, 1, sizeof part, file)) > 0;) text.append(part, size);
    fclose(file);
  }
  return text;
}

PJRT_Error* topology_attributes(PJRT_TopologyDescription_Attributes_Args* args) {
  static PJRT_NamedValue value;
  const std::string_view text = kept(read_file(variable("STAGEC_FAKE_DESCRIPTION")));
  value.struct_size = PJRT_NamedValue_STRUCT_SIZE;
  value.name = "target_config";
  value.name_size = strlen(value.name);
  value.type = PJRT_NamedValue_kString;
  value.string_value = text.data();
  value.value_size = text.size();
  args->attributes = &value;
  args->num_attributes = 1;
  return nullptr;
}

// Executables.

// XLA:GPU writes what it timed into the file that an option names; it is one of the strings in the message.
void write_results(const char* options, size_t size) {
  const std::string text = read_file(variable("STAGEC_FAKE_AUTOTUNING"));
  const std::string file = "results.textproto";
  if (text.empty() || !memmem(options, size, file.data(), file.size())) return;
  if (FILE* out = fopen(file.c_str(), "wb")) {
    fwrite(text.data(), 1, text.size(), out);
    fclose(out);
  }
}

PJRT_Error* compile(PJRT_Client_Compile_Args* args) {
  if (lost) return gone();
  write_results(args->compile_options, args->compile_options_size);
  return cpu->PJRT_Client_Compile(args);
}

PJRT_Error* serialize(PJRT_Executable_Serialize_Args* args) {
  PJRT_Error* failed = cpu->PJRT_Executable_Serialize(args);
  if (failed) return failed;
  auto* code = new std::string(CODE);
  code->append(args->serialized_bytes, args->serialized_bytes_size);
  args->serialized_executable_deleter(args->serialized_executable);
  args->serialized_bytes = code->data();
  args->serialized_bytes_size = code->size();
  args->serialized_executable = reinterpret_cast<PJRT_SerializedExecutable*>(code);
  args->serialized_executable_deleter = [](PJRT_SerializedExecutable* made) {
    delete reinterpret_cast<std::string*>(made);
  };
  return nullptr;
}

PJRT_Error* deserialize(PJRT_Executable_DeserializeAndLoad_Args* args) {
  const size_t size = strlen(CODE);
  if (lost) return gone();
  if (fails("memory-at-load")) return out_of_memory(args->serialized_executable_size);
  if (args->serialized_executable_size < size || memcmp(args->serialized_executable, CODE, size) != 0)
    return error(PJRT_Error_Code_INVALID_ARGUMENT, "these bytes are not its code");
  PJRT_Executable_DeserializeAndLoad_Args inner = *args;
  inner.serialized_executable += size;
  inner.serialized_executable_size -= size;
  PJRT_Error* failed = cpu->PJRT_Executable_DeserializeAndLoad(&inner);
  args->loaded_executable = inner.loaded_executable;
  return failed;
}

struct Needs {
  size_t outputs, bytes, temporaries;
};

Needs needs_of(PJRT_LoadedExecutable* loaded) {
  PJRT_LoadedExecutable_GetExecutable_Args executable = {};
  executable.struct_size = PJRT_LoadedExecutable_GetExecutable_Args_STRUCT_SIZE;
  executable.loaded_executable = loaded;
  if (cpu->PJRT_LoadedExecutable_GetExecutable(&executable)) abort();
  PJRT_Executable_NumOutputs_Args outputs = {};
  outputs.struct_size = PJRT_Executable_NumOutputs_Args_STRUCT_SIZE;
  outputs.executable = executable.executable;
  PJRT_Executable_GetCompiledMemoryStats_Args memory = {};
  memory.struct_size = PJRT_Executable_GetCompiledMemoryStats_Args_STRUCT_SIZE;
  memory.executable = executable.executable;
  if (cpu->PJRT_Executable_NumOutputs(&outputs) || cpu->PJRT_Executable_GetCompiledMemoryStats(&memory)) abort();
  PJRT_Executable_Destroy_Args destroy = {PJRT_Executable_Destroy_Args_STRUCT_SIZE, nullptr, executable.executable};
  cpu->PJRT_Executable_Destroy(&destroy);
  const size_t bytes = memory.output_size_in_bytes - memory.alias_size_in_bytes;
  return {outputs.num_outputs, bytes, static_cast<size_t>(memory.temp_size_in_bytes)};
}

PJRT_Error* execute(PJRT_LoadedExecutable_Execute_Args* args) {
  if (fails("lost")) lost = true;
  if (lost) return gone();
  const Needs needs = needs_of(args->executable);
  const size_t more = needs.bytes + needs.temporaries;
  if (fails("memory-at-run")) return out_of_memory(more);
  std::vector<PJRT_Device*> devices;
  {
    std::lock_guard<std::mutex> lock(mutex);
    for (size_t i = 0; args->num_args && i < args->num_devices; ++i)
      devices.push_back(taken[args->argument_lists[i][0]].device);
  }
  for (PJRT_Device* device : devices) {
    const size_t needed = in_use(device) + more;
    if (needed > limit()) return out_of_memory(more);
    std::lock_guard<std::mutex> lock(mutex);
    memories[device].peak = std::max(memories[device].peak, needed);
  }
  PJRT_Error* failed = cpu->PJRT_LoadedExecutable_Execute(args);
  if (failed) return failed;
  for (size_t i = 0; i < args->num_devices; ++i) {
    for (size_t j = 0; j < args->num_args; ++j) {  // those that were donated
      PJRT_Buffer_IsDeleted_Args deleted = {};
      deleted.struct_size = PJRT_Buffer_IsDeleted_Args_STRUCT_SIZE;
      deleted.buffer = args->argument_lists[i][j];
      if (!cpu->PJRT_Buffer_IsDeleted(&deleted) && deleted.is_deleted) give_back(deleted.buffer);
    }
    for (size_t j = 0; j < needs.outputs; ++j) take(args->output_lists[i][j]);
  }
  if (!fails("lost-later")) return nullptr;
  std::lock_guard<std::mutex> lock(mutex);
  lost = true;
  for (size_t i = 0; i < args->num_devices; ++i)
    broken.insert(args->output_lists[i], args->output_lists[i] + needs.outputs);
  return nullptr;
}

}  // namespace

extern "C" const PJRT_Api* GetPjrtApi() {
  if (cpu) return &fake;
  void* library = dlopen(variable("STAGEC_FAKE_CPU_PLUGIN").c_str(), RTLD_NOW | RTLD_LOCAL);
  void* get = library ? dlsym(library, "GetPjrtApi") : nullptr;
  if (!get) {
    fprintf(stderr, "%s: STAGEC_FAKE_CPU_PLUGIN: %s\n", NAME, dlerror());
    return nullptr;
  }
  cpu = reinterpret_cast<const PJRT_Api* (*)()>(get)();
  fake = *cpu;
  if (fails("major-version")) fake.pjrt_api_version.major_version = 99;
  if (fails("old-version")) fake.pjrt_api_version.minor_version = 1;
  fake.PJRT_Error_Destroy = error_destroy;
  fake.PJRT_Error_Message = error_message;
  fake.PJRT_Error_GetCode = error_code;
  fake.PJRT_Event_Destroy = event_destroy;
  fake.PJRT_Event_IsReady = event_is_ready;
  fake.PJRT_Event_Error = event_error;
  fake.PJRT_Event_Await = event_await;
  fake.PJRT_Event_OnReady = event_on_ready;
  fake.PJRT_Plugin_Initialize = initialize;
  fake.PJRT_Client_Create = client_create;
  fake.PJRT_Client_PlatformName = platform_name;
  fake.PJRT_Client_PlatformVersion = platform_version;
  fake.PJRT_Client_BufferFromHostBuffer = buffer_from_host;
  fake.PJRT_Client_Compile = compile;
  fake.PJRT_DeviceDescription_Kind = device_kind;
  fake.PJRT_DeviceDescription_ToString = device_text;
  fake.PJRT_DeviceDescription_DebugString = device_debug_text;
  fake.PJRT_Device_MemoryStats = memory_stats;
  fake.PJRT_TopologyDescription_PlatformName = topology_name;
  fake.PJRT_TopologyDescription_PlatformVersion = topology_version;
  fake.PJRT_TopologyDescription_Attributes = topology_attributes;
  fake.PJRT_Executable_Serialize = serialize;
  fake.PJRT_Executable_DeserializeAndLoad = deserialize;
  fake.PJRT_LoadedExecutable_Execute = execute;
  fake.PJRT_Buffer_Destroy = buffer_destroy;
  fake.PJRT_Buffer_Delete = buffer_delete;
  fake.PJRT_Buffer_CopyToDevice = copy_to_device;
  fake.PJRT_Buffer_CopyToMemory = copy_to_memory;
  fake.PJRT_Buffer_ReadyEvent = buffer_ready_event;
  fake.PJRT_Buffer_ToHostBuffer = buffer_to_host;
  fake.PJRT_Buffer_IsOnCpu = buffer_is_on_cpu;
  return &fake;
}
