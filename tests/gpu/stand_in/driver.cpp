// A CUDA device that computes nothing: MLX's own CUDA library runs over it on any machine, and what it launches is seen.
//
// libmlx.so has a CUDA runtime inside. When this library is loaded, each function of it is made to jump here: to one of
// RUNTIME, or to `nothing`. This is also the driver, cuBLAS, cuDNN, cuFFT, cuSOLVER and NCCL: see build.sh.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <link.h>
#include <sys/mman.h>

#include "graphs.h"
#include "local.h" // LOCAL: the functions of that runtime, by their place in libmlx.so

using graphs::Handle;

namespace {

constexpr size_t MEMORY = size_t(139) << 30;
constexpr int MULTIPROCESSORS = 132;

int nothing() { return 0; }

// What a device is asked: an H200, as far as MLX looks.

int attribute(int* value, int which, int) {
  switch (which) {
    case 10: *value = 32; break; // threads of a warp
    case 16: *value = MULTIPROCESSORS; break;
    case 75: *value = 9; break; // compute capability 9.0
    case 76: *value = 0; break;
    case 97: *value = 232448; break; // bytes of shared memory a block may ask for
    default: *value = 1; // such as memory that host and device share
  }
  return 0;
}

int properties(char* found, int) {
  memset(found, 0, 1024);
  strcpy(found, "a stand-in for an H200");
  auto put = [&](size_t place, auto value) { memcpy(found + place, &value, sizeof value); };
  put(288, MEMORY);
  put(308, 32);
  put(320, 1024);
  put(360, 9); // cudaDeviceProp of CUDA 13
  put(364, 0);
  return 0;
}

int memory(size_t* free, size_t* total) { return *free = *total = MEMORY, 0; }
int one_device(int* count) { return *count = 1, 0; }
int first_device(int* device) { return *device = 0, 0; }
int version(int* number) { return *number = 13000, 0; }
int priorities(int* least, int* greatest) { return *least = 0, *greatest = -5, 0; }
int block_size(int* blocks, int* threads) { return *blocks = MULTIPROCESSORS, *threads = 256, 0; }
const char* error_name(int) { return "an error of the stand-in"; }
int error_string(int, const char** text) { return *text = error_name(0), 0; }
int some_handle(void** handle) { return *handle = reinterpret_cast<void*>(0x1000), 0; }

// Memory, and what the host does: at once, since no kernel takes time.

int allocate(void** start, size_t bytes) { return *start = graphs::allocate(bytes), 0; }
int copy(void* to, const void* from, size_t bytes) { return memcpy(to, from, bytes), 0; }
int call_host(void*, void (*function)(void*), void* argument) { return function(argument), 0; }

// Graphs. A product of cuBLAS comes by capturing a stream.

struct Launch { // cudaKernelNodeParams and CUDA_KERNEL_NODE_PARAMS
  void* kernel;
  unsigned grid[3], block[3], shared;
  void** arguments;
};

struct Size {
  unsigned x, y, z;
};

Handle captured; // what is being captured, or 0

int graph_begin(Handle* graph, unsigned) { return *graph = graphs::begin(), 0; }
int graph_end(Handle graph) { return graphs::end(graph), 0; }
int add_kernel(Handle* node, Handle graph, const Handle*, size_t, const Launch* launch) {
  return *node = graphs::add(graph, graphs::call(Handle(launch->kernel), launch->arguments)), 0;
}
int add_empty(Handle* node, Handle graph, const Handle*, size_t) { return *node = graphs::add(graph, {"empty", {}}), 0; }
int add_graph(Handle* node, Handle graph, const Handle*, size_t, Handle child) {
  return *node = graphs::add(graph, graphs::whole(child)), 0;
}
int add_order(Handle graph, const Handle* before, const Handle* after, const void*, size_t count) {
  return graphs::order(graph, before, after, count), 0;
}
int count_nodes(Handle, Handle*, size_t* count) { return *count = 2, 0; } // so that a captured graph is added whole
int begin_capture(void*, int) { return captured = graphs::begin(), 0; }
int end_capture(void*, Handle* graph) { return *graph = captured, captured = 0; }
int instantiate(void** made, Handle graph) { return graphs::check(graph), some_handle(made); }
int update(void*, Handle graph, char* result) { return memset(result, 0, 24), graphs::check(graph), 0; }
void name_kernel(void**, const char* stub, const char* name) { graphs::name_kernel(Handle(stub), name); }
int refuse() {
  fprintf(stderr, "stand-in: a node of a graph that is no kernel, which nothing here knows\n");
  abort();
}
int launch(const void* kernel, Size, Size, void** arguments, size_t, void*) {
  if (!captured) return 0; // by itself in a stream, behind the graphs before it: such as the signal of a fence
  return graphs::add(captured, graphs::call(Handle(kernel), arguments)), 0;
}
int launch_configured(const void*, const void* kernel, void** arguments) {
  return launch(kernel, {}, {}, arguments, 0, nullptr);
}

struct Replacement {
  const char* name;
  void* function;
};

#define BY(name, function) {name, reinterpret_cast<void*>(function)}
const Replacement RUNTIME[] = {
    BY("__cudaRegisterFunction", name_kernel),
    BY("cudaDeviceGetAttribute", attribute),
    BY("cudaDeviceGetDefaultMemPool", some_handle),
    BY("cudaDeviceGetMemPool", some_handle),
    BY("cudaDeviceGetStreamPriorityRange", priorities),
    BY("cudaDriverGetVersion", version),
    BY("cudaEventCreate", some_handle),
    BY("cudaEventCreateWithFlags", some_handle),
    BY("cudaGetDevice", first_device),
    BY("cudaGetDeviceCount", one_device),
    BY("cudaGetDeviceProperties", properties),
    BY("cudaGetDriverEntryPoint", some_handle),
    BY("cudaGetErrorName", error_name),
    BY("cudaGetErrorString", error_name),
    BY("cudaGetFuncBySymbol", some_handle),
    BY("cudaGraphAddChildGraphNode", add_graph),
    BY("cudaGraphAddDependencies", add_order),
    BY("cudaGraphAddEmptyNode", add_empty),
    BY("cudaGraphAddKernelNode", add_kernel),
    BY("cudaGraphAddMemcpyNode", refuse),
    BY("cudaGraphAddMemcpyNode1D", refuse),
    BY("cudaGraphAddMemsetNode", refuse),
    BY("cudaGraphCreate", graph_begin),
    BY("cudaGraphDestroy", graph_end),
    BY("cudaGraphExecUpdate", update),
    BY("cudaGraphGetNodes", count_nodes),
    BY("cudaGraphInstantiate", instantiate),
    BY("cudaHostAlloc", allocate),
    BY("cudaLaunchHostFunc", call_host),
    BY("cudaLaunchKernel", launch),
    BY("cudaLaunchKernelExC", launch_configured),
    BY("cudaMalloc", allocate),
    BY("cudaMallocAsync", allocate),
    BY("cudaMallocFromPoolAsync", allocate),
    BY("cudaMallocHost", allocate),
    BY("cudaMallocManaged", allocate),
    BY("cudaMemGetInfo", memory),
    BY("cudaMemPoolCreate", some_handle),
    BY("cudaMemcpy", copy),
    BY("cudaMemcpyAsync", copy),
    BY("cudaOccupancyMaxPotentialBlockSize", block_size),
    BY("cudaRuntimeGetVersion", version),
    BY("cudaStreamBeginCapture", begin_capture),
    BY("cudaStreamCreate", some_handle),
    BY("cudaStreamCreateWithFlags", some_handle),
    BY("cudaStreamCreateWithPriority", some_handle),
    BY("cudaStreamEndCapture", end_capture),
};

void* replacement(const char* name) {
  for (const Replacement& one : RUNTIME)
    if (!strcmp(one.name, name)) return one.function;
  return reinterpret_cast<void*>(nothing);
}

int find_mlx(dl_phdr_info* info, size_t, void* base) {
  if (!info->dlpi_name || !strstr(info->dlpi_name, "libmlx.so")) return 0;
  *static_cast<uintptr_t*>(base) = info->dlpi_addr;
  return 1;
}

// Before libmlx.so begins, which is loaded by now but waits for the libraries that it needs.
__attribute__((constructor)) void replace_runtime() {
  uintptr_t base = 0;
  dl_iterate_phdr(find_mlx, &base);
  if (!base) return;
  for (const auto& [offset, name] : LOCAL) {
    void* function = replacement(name);
    auto* code = reinterpret_cast<unsigned char*>(base + offset);
    void* page = reinterpret_cast<void*>(uintptr_t(code) & ~uintptr_t(4095));
    mprotect(page, 8192, PROT_READ | PROT_WRITE | PROT_EXEC);
    memcpy(code, "\x48\xb8", 2); // mov rax, function; jmp rax
    memcpy(code + 2, &function, 8);
    memcpy(code + 10, "\xff\xe0", 2);
  }
}

} // namespace

// The driver and the libraries, as far as MLX needs an answer.
extern "C" {

int cuGetErrorString(int error, const char** text) { return error_string(error, text); }
int cuGraphAddKernelNode_v2(Handle* node, Handle graph, const Handle*, size_t, const Launch* launch) {
  return add_kernel(node, graph, nullptr, 0, launch);
}
int cuLaunchKernelEx(const void* how, const void* kernel, void** arguments) { return launch_configured(how, kernel, arguments); }
int cuModuleLoadDataEx(void** module) { return some_handle(module); }
int cuModuleGetFunction(Handle* kernel, void*, const char* name) {
  static Handle last = 0x2000;
  graphs::name_kernel(*kernel = ++last, name);
  return 0;
}
int cuOccupancyMaxPotentialBlockSize(int* blocks, int* threads) { return block_size(blocks, threads); }

int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, char* result, int* found) {
  return memset(result, 0, 128), *found = 1, 0;
}
int cublasLtMatmul(
    void*, void*, const void*, const void* a, void*, const void* b, void*, const void*, const void* c, void*, void* d,
    void*, const void*, void* workspace, size_t bytes, void*) {
  graphs::add(captured, graphs::product(a, b, c, d, bytes ? workspace : nullptr));
  return 0;
}
}
