# make                   builds ./train for this machine
# make deps              installs what that needs (Debian, Ubuntu)
# make test              installs what the tests need, and runs them
# make clean             removes what was built
# make help              prints this list
#
# make test-deps         installs what make deps does and what the tests need; Python's packages go into .venv
# make gpu-deps          installs what make deps does and what gpu-check needs
# make build-tests       builds the tests, and what they run
# make unit-tests        runs the C++ tests; for the CPU also race-probe and fuzz
# make python-tests      runs the Python tests
# make test-more         runs all Python tests, including those that make test leaves out: slower tests, and files in a second
#                        precision; and the attention tests of the faithful CPU build in larger shapes
# make test-smollm2      fine-tunes SmolLM2-135M and compares with transformers (minutes)
# make race-probe        checks that ThreadSanitizer finds a planted missing barrier
# make test-sanitizers   runs kernel tests under AddressSanitizer and ThreadSanitizer, which make test does not (many minutes)
# make fuzz-build        builds the fuzzers of the code that reads files
# make fuzz              runs the fuzzers, each for FUZZ_SECONDS=10
# make cuda-build        compiles the CUDA build, with or without a GPU, and checks that no kernel spills registers
# make cuda-archs        checks for each architecture that nvcc knows that no kernel spills registers (many minutes)
# make emulated-build    builds the CUDA build to run on emulated GPUs, and the emulator
# make test-emulated     runs more tests on emulated GPUs than make test does, of five kinds, and cuda-archs (tens of minutes)
# make test-gpu-python   runs gpu-check's Python tests on an emulated GPU, slow ones in smaller shapes (hours)
# make gpu-coverage      lists the GPU code that no test has executed, in dev/results/gpu-coverage.md
# make gpu-predicted     predicts the times of training steps on GPUs, in dev/results/gpu-predicted.md
# make gpu-check         tests and measures on a GPU; GPU_CHECK=--dry-run prints the plan, GPU_CHECK="build kernels" does a part
# make bench-attention   times attention; BENCH_OPTIONS="..." are options of dev/bench/attention.cpp
# make bench-products    compares the rates of a step's matrix products with oneDNN's own;
#                        BENCH_OPTIONS="--model d12 --batch 4 --seq-len 64"
# make format            formats the C++ sources
# make nvcc-version      prints the version of nvcc
#
# DEVICE=cuda|cpu        the default is cuda if a GPU and nvcc answer, else cpu
# PRECISION=bf16|fp32    the default is bf16 for cuda, fp32 for cpu
# CUDA_ARCH="80 90a"     GPU architectures to compile for; the last one also as PTX, for later GPUs. The default is that of the
#                        GPU that answers; if none does, those of 80, 86, 89, 90a, 100 and 120 that nvcc knows
# NVCC=/path/to/nvcc     the default is the CUDA Toolkit's in /usr/local/cuda, or the one on the PATH
# WERROR=1               makes compiler warnings errors, as in the tests

NVCC ?= $(firstword $(wildcard /usr/local/cuda/bin/nvcc) $(shell command -v nvcc 2>/dev/null) nvcc)
CXX := g++
PYTHON := .venv/bin/python

# NOTICE says why a machine with a GPU, or with a GPU driver, gets a build for the CPU; ADVICE says what to do.
NOTICE :=
ADVICE :=
ifndef DEVICE
  # The first GPU that nvidia-smi lists, or else the first line that it says.
  SMI := $(shell command -v nvidia-smi >/dev/null && { said=$$(nvidia-smi -L 2>&1); \
      echo "$$said" | grep -m 1 '^GPU [0-9]' || echo "$$said" | head -n 1; })
  ifneq ($(filter GPU,$(firstword $(SMI))),)
    ifneq ($(shell command -v $(NVCC) 2>/dev/null),)
      DEVICE := cuda
      WHY := a GPU answers nvidia-smi
    else
      DEVICE := cpu
      WHY := a GPU answers, but there is no nvcc
      NOTICE := A GPU answers nvidia-smi, but there is no nvcc.
      ADVICE := Install the CUDA Toolkit, or say where it is: make NVCC=/path/to/nvcc
    endif
  else
    DEVICE := cpu
    WHY := no GPU answers nvidia-smi
    ifneq ($(SMI),)
      NOTICE := nvidia-smi is installed and names no GPU. It says: $(SMI)
      ADVICE := After an upgrade of the driver, reboot. make DEVICE=cuda builds for a GPU that does not answer now.
    endif
  endif
else
  WHY := asked for
endif
ifeq ($(DEVICE),cuda)
  PRECISION ?= bf16
else ifeq ($(DEVICE),cpu)
  PRECISION ?= fp32
else
  $(error DEVICE=$(DEVICE): cuda or cpu)
endif
ifeq ($(filter bf16 fp32,$(PRECISION)),)
  $(error PRECISION=$(PRECISION): bf16 or fp32)
endif

BUILD := build/$(DEVICE)-$(PRECISION)

# By default warnings are errors only in the tests: a new compiler's warning must not stop a user's build.
WERROR ?= $(if $(filter test build-tests unit-tests python-tests race-probe fuzz-build fuzz cuda-build,$(MAKECMDGOALS)),1)
export WERROR
# Without -fno-math-errno -fno-trapping-math the loops of the fast CPU build stay scalar.
# g++ 12 reports overlaps in std::string's own code that cannot happen (GCC's bug 105651).
WARNINGS := -Wall -Wextra $(if $(WERROR),-Werror) -Wno-restrict
CXX_COMMON := -std=c++20 $(WARNINGS) -Wno-unknown-pragmas -fopenmp -I. -MMD -MP
CXXFLAGS := $(CXX_COMMON) -O3 -march=native -fno-math-errno -fno-trapping-math
TEXT_LIBS := -lpcre2-8 -lutf8proc -lsentencepiece
DISK_LIBS := -luring
CPU_LIBS := -ldnnl $(TEXT_LIBS) $(DISK_LIBS)
CUDA_HOME := $(patsubst %/bin/nvcc,%,$(realpath $(NVCC)))
ifneq ($(wildcard $(CUDA_HOME)/include/nvtx3/nvToolsExt.h),)
  NVTX_INCLUDE := -idirafter $(CUDA_HOME)/include
endif

# If CUDA is not on the loader's paths, the binary must know where CUDA's libraries are.
CUDA_LIB := $(patsubst %/libcublasLt.so,%,$(firstword $(wildcard $(CUDA_HOME)/lib64/libcublasLt.so $(CUDA_HOME)/lib/libcublasLt.so)))

OLDEST_NVCC := 12.0
nvcc_release = $(shell $(NVCC) --version 2>/dev/null | sed -n 's/^.*release \([0-9.]*\),.*/\1/p')
nvcc_archs = $(patsubst compute_%,%,$(shell $(NVCC) --list-gpu-arch 2>/dev/null))
gpu_capabilities = $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null)
number_of = $(subst f,,$(subst a,,$(1)))
# $(call able,ARCHITECTURES): those of them that the kernels support.
able = $(strip $(foreach a,$(1),$(shell [ "$(call number_of,$(a))" -ge 80 ] 2>/dev/null && echo "$(a)")))
CUDA_BUILD_ARCH := $(or $(CUDA_ARCH),80 90a)
ifeq ($(DEVICE)$(CUDA_ARCH),cuda)
  capabilities := $(gpu_capabilities)
  gpu_archs := $(shell printf '%s\n' $(subst .,,$(capabilities)) | grep -x '[0-9][0-9]*' | sort -un)
  able_archs := $(call able,$(gpu_archs))
  # nvidia-smi says [N/A] for a Jetson: it is an 87 or, if newer, a 110, which nvcc 12 calls 101.
  jetson := $(filter [N/A],$(capabilities))
  usual_archs := 80 86 $(if $(jetson),87) 89 90 100 $(if $(jetson),101 110) 120
  known := $(nvcc_archs)
  ifneq ($(able_archs)$(jetson),)
    LEFT_OUT := $(filter-out $(able_archs),$(gpu_archs))
  endif
  # If all GPUs are too old, make stops below. GPUs that nvcc does not know use the newest PTX.
  ifeq ($(able_archs)$(LEFT_OUT)$(jetson),)
    CUDA_ARCH := $(gpu_archs)
  endif
  ifeq ($(CUDA_ARCH),)
    CUDA_ARCH := $(patsubst 90,90a,$(or $(if $(jetson),,$(filter $(known),$(able_archs))),$(filter $(known),$(usual_archs))))
  endif
endif
comma := ,
newest := $(call number_of,$(lastword $(CUDA_ARCH)))
# PLAYED=1, for the tests, adds the PTX of each architecture, uncompressed: the emulator in test/gpu runs it.
GENCODE := $(foreach a,$(CUDA_ARCH),-gencode arch=compute_$(a)$(comma)code=sm_$(a)) \
           $(foreach a,$(if $(PLAYED),$(CUDA_ARCH),$(newest)),-gencode arch=compute_$(a)$(comma)code=compute_$(a)) \
           $(PLAYED:1=-no-compress)
# The Hopper kernels need instructions that only architecture 90a has.
HOPPER := $(if $(filter 90a,$(CUDA_ARCH)),-DLLMC_HOPPER)
NVCCFLAGS := -std=c++20 -O3 -I. -MMD -MP -Xcompiler -Wall,-Wextra,-Wno-restrict,-Wno-unknown-pragmas,-fopenmp \
             -Xptxas -v,-warn-spills,-warn-lmem-usage $(GENCODE) $(HOPPER)
# Not among the flags above, so that the tests need not rebuild what a user has built.
NVCC_WERROR := $(if $(WERROR),-Werror all-warnings -Xcompiler -Werror)
CUDA_LIBS := $(CUDA_LIB:%=-Xlinker -rpath$(comma)%) -lcublasLt $(TEXT_LIBS) $(DISK_LIBS) -lgomp
# Stops with one line if nvcc is too old or CUDA_ARCH is not supported; the compilers would print hundreds.
older_than = $(filter-out $(2),$(shell printf '%s\n' $(1) $(2) | sort -V | head -n 1))
too_old = $(filter-out $(call able,$(CUDA_ARCH)),$(CUDA_ARCH))
unknown_archs = $(strip $(foreach a,$(CUDA_ARCH),$(if $(filter $(nvcc_archs),$(call number_of,$(a))),,$(a))))
check_nvcc = $(if $(nvcc_release),$(if $(call older_than,$(nvcc_release),$(OLDEST_NVCC)),$(error \
  $(NVCC) is of CUDA $(nvcc_release), and $(OLDEST_NVCC) is the oldest that has C++20: NVCC= names another, make DEVICE=cpu needs none)),\
  $(error NVCC=$(NVCC) does not answer: install the CUDA Toolkit, or make DEVICE=cpu))
check_archs = $(if $(too_old),$(error CUDA_ARCH: $(too_old): the kernels need 80 or later, whose tensor cores have bf16; make DEVICE=cpu needs none),\
  $(if $(unknown_archs),$(error CUDA_ARCH: $(unknown_archs): nvcc $(nvcc_release) knows $(nvcc_archs))))
say_left_out = $(if $(LEFT_OUT),$(info CUDA_ARCH: $(CUDA_ARCH), and not $(LEFT_OUT), which this machine has too: the kernels need 80 or later))
# $(call compile_cuda_object,FLAGS,OBJECT) keeps the compilers' report, with registers and spills, in a .log beside the object.
define compile_cuda_object
@mkdir -p $(@D)
$(NVCC) $(1) $(NVCCFLAGS) $(NVCC_WERROR) -MF $@.d -MT $@ -c $< -o $(2) > $(2:.o=.log) 2>&1 || { cat $(2:.o=.log); rm -f $(2); exit 1; }
@grep warning $(2:.o=.log) >&2 || :
endef
# $(call compile_cuda,FLAGS,LIBRARIES) links too.
define compile_cuda
$(call compile_cuda_object,$(1),$@.o)
$(NVCC) $@.o -o $@ $(2) $(CUDA_LIBS)
endef

# If a user with a GPU gets a build for the CPU, says so prominently, and what to do.
say_notice = $(if $(NOTICE),$(info )$(info *** THIS IS A BUILD FOR THE CPU. $(NOTICE))$(info *** $(ADVICE))$(info ))

.PHONY: all _notice deps gpu-deps test test-deps unit-tests python-tests cuda-build fuzz format clean help FORCE
all: train

# ./train is a link to the binary of the configuration that make was asked for last.
# The notice is printed before the build, which takes minutes, and again at the end.
train: _notice $(BUILD)/train FORCE
	$(info ./train: DEVICE=$(DEVICE) ($(WHY)), PRECISION=$(PRECISION))$(say_notice)@ln -sfn $(BUILD)/train $@
_notice:
	$(say_notice)@:

# $(call need_headers,HEADERS,TARGET) stops with one line if the compiler or a header is missing, which make TARGET would
# install; the compiler would print hundreds.
define need_headers
@command -v $(CXX) >/dev/null || { echo "there is no $(CXX): make $(2) installs what is missing" >&2; exit 1; }
@missing=$$(for h in $(1); do printf '#if !__has_include(<%s>)\n%s\n#endif\n' $$h $$h; done | $(CXX) -E -P -x c++ -); \
  [ -z "$$missing" ] || { echo "missing:" $$missing "(make $(2) installs what is missing)" >&2; exit 1; }
endef
HEADERS := CLI/CLI.hpp nlohmann/json.hpp pcre2.h utf8proc.h sentencepiece_processor.h liburing.h
CPU_HEADERS := $(HEADERS) oneapi/dnnl/dnnl.hpp

# The commit, for --version. It has a file of its own, which is rewritten if the commit has changed: then the trainers are only
# linked again. COMMIT=unknown where there is no git.
COMMIT = $(or $(shell git rev-parse --short=12 HEAD 2>/dev/null),unknown)
COMMIT_CODE = extern "C" const char llmc_commit[] = "$(COMMIT)";
build/commit.cpp: FORCE
	@mkdir -p $(@D)
	@echo '$(COMMIT_CODE)' | cmp -s - $@ || echo '$(COMMIT_CODE)' > $@
build/commit.o: build/commit.cpp
	@$(CXX) $(WARNINGS) -c $< -o $@

build/cpu-fp32/train.o: DEFINES :=
build/cpu-bf16/train.o: DEFINES := -DLLMC_BF16
build/cpu-fp32/train.o build/cpu-bf16/train.o: train_gpt.cu Makefile
	$(call need_headers,$(CPU_HEADERS),deps)
	@mkdir -p $(@D)
	$(CXX) -x c++ $(CXXFLAGS) $(NVTX_INCLUDE) $(DEFINES) -MF $@.d -MT $@ -c $< -o $@
build/cpu-fp32/train build/cpu-bf16/train: build/cpu-%/train: build/cpu-%/train.o build/commit.o
	$(CXX) $(WARNINGS) -fopenmp $(filter %.o,$^) -o $@ $(CPU_LIBS)

# Rewritten if CUDA_ARCH has changed, so that everything that depends on it is rebuilt.
CUDA_FLAGS := build/cuda.flags
$(CUDA_FLAGS): FORCE
	$(check_nvcc)$(check_archs)$(say_left_out)@mkdir -p $(@D)
	@echo '$(NVCCFLAGS) $(CUDA_LIBS)' | cmp -s - $@ || echo '$(NVCCFLAGS) $(CUDA_LIBS)' > $@

# The update that runs on a GPU's host is compiled by the host's compiler, for any CPU that a GPU is likely to be used with.
# All of its symbols but one become local, because inline functions of the same names are different code in nvcc's object.
HOST_ARCH := $(if $(filter x86_64,$(shell uname -m)),-march=x86-64-v3)
build/update_on_host-fp32.o build/update_on_host-bf16.o: build/update_on_host-%.o: llmc/update_on_host.cpp Makefile
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) $(HOST_ARCH) -fno-gnu-unique $(if $(filter bf16,$*),-DLLMC_BF16) -MF $@.d -MT $@ -c $< -o $@.all
	ld -r --force-group-allocation $@.all -o $@.one
	objcopy --keep-global-symbol=update_on_host $@.one $@
	@rm -f $@.all $@.one

build/cuda-fp32/train.o: DEFINES :=
build/cuda-bf16/train.o: DEFINES := -DLLMC_BF16
build/cuda-fp32/train.o build/cuda-bf16/train.o: train_gpt.cu Makefile $(CUDA_FLAGS)
	$(call need_headers,$(HEADERS),deps)
	$(call compile_cuda_object,$(DEFINES),$@)
build/cuda-fp32/train build/cuda-bf16/train: build/cuda-%/train: build/cuda-%/train.o build/update_on_host-%.o build/commit.o
	$(NVCC) $(filter %.o,$^) -o $@ $(CUDA_LIBS)

# Debian packages. DEPS is for building and training; TEST_DEPS adds what the tests need (Python's packages go into .venv).
DEPS := g++ make libdnnl-dev libcli11-dev nlohmann-json3-dev libpcre2-dev libutf8proc-dev libsentencepiece-dev liburing-dev
TEST_DEPS := $(DEPS) libgtest-dev python3-venv clang libclang-rt-dev libomp-dev
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)
# $(call install,PACKAGES) installs those that are missing; if it cannot, its last line names them.
define install
	@missing=$$(for p in $(1); do dpkg-query -W -f='$${Status}' $$p 2>/dev/null | grep -q 'ok installed' || echo $$p; done); \
	missing=$$(echo $$missing); [ -n "$$missing" ] || exit 0; \
	stop() { echo "make $@: $$1: ask for these packages of Debian, or what your system calls them: $$missing" >&2; exit 1; }; \
	command -v apt-get >/dev/null || stop "there is no apt-get here"; \
	[ -z "$(SUDO)" ] || command -v sudo >/dev/null || stop "you are not root, and there is no sudo"; \
	echo "installing $$missing"; \
	$(SUDO) apt-get update -qq && DEBIAN_FRONTEND=noninteractive $(SUDO) apt-get install -y -qq $$missing >/dev/null || \
	  stop "apt-get failed"
endef
deps:
	$(call install,$(DEPS))
gpu-deps:
	$(call install,$(DEPS) libgtest-dev)
test-deps:
	$(call install,$(TEST_DEPS))
	@dev/venv.sh

# The kernel tests run in each CPU build of the source (fast and faithful), or with DEVICE=cuda in the CUDA build.
KERNEL_TESTS := test_kernels test_family_kernels test_quantized test_optimizer test_attention test_matmul test_wide_sum test_stream
HOST_TESTS := test_hopper_layout test_files test_permutation test_dataset test_tokenizer test_checkpoint test_arena test_solver test_rates test_host test_host_memory test_family test_random test_gguf test_ptx test_disk test_residence
FAITHFUL := -DSIMT_LANES=32
ifeq ($(DEVICE),cuda)
  UNIT_TESTS := $(KERNEL_TESTS:%=build/test/cuda/%) $(HOST_TESTS:%=build/test/fast/%)
else
  UNIT_TESTS := $(HOST_TESTS:%=build/test/fast/%) $(KERNEL_TESTS:%=build/test/fast/%) \
      $(KERNEL_TESTS:%=build/test/faithful/%) build/test/faithful/test_simt build/test/asan/test_arena
endif
SANITIZED_TESTS := $(filter-out build/test/tsan/test_matmul,$(foreach b,asan tsan,$(KERNEL_TESTS:%=build/test/$(b)/%) build/test/$(b)/test_simt))
TEST_LIBS := -lgtest -lgtest_main $(CPU_LIBS)
build/test/fast/%: FLAGS := $(CXXFLAGS)
build/test/faithful/%: FLAGS := $(CXXFLAGS) $(FAITHFUL)
# This build also checks that a float which is converted to an integer fits it: no NaN, for example.
build/test/asan/%: FLAGS := $(CXX_COMMON) -O1 -g -march=native -fsanitize=address,float-cast-overflow \
    -fno-sanitize-recover=float-cast-overflow $(FAITHFUL)
build/test/tsan/%: FLAGS := $(CXX_COMMON) -O1 -g -march=native -fsanitize=thread $(FAITHFUL)
define cpu_test
build/test/$(1)/%: test/%.cpp Makefile
	$$(call need_headers,$(CPU_HEADERS) gtest/gtest.h,test-deps)
	@mkdir -p $$(@D)
	$(CXX) -x c++ $$(FLAGS) -MF $$@.d -MT $$@ $$< -o $$@ $(TEST_LIBS)
endef
$(foreach b,fast faithful asan tsan,$(eval $(call cpu_test,$(b))))
# The trainer's fast CPU build under AddressSanitizer, which the arena tells which of its memory is in use, and under
# UndefinedBehaviorSanitizer. They are clang's, because g++'s do not report offsets from a null pointer.
ifeq ($(DEVICE),cpu)
ASAN_TRAINERS := build/test/asan/train-bf16 $(if $(MORE_TESTS),build/test/asan/train-fp32)
endif
build/test/asan/train-fp32: DEFINES :=
build/test/asan/train-bf16: DEFINES := -DLLMC_BF16
build/test/asan/train-fp32 build/test/asan/train-bf16: FLAGS := $(filter-out -Werror -Wno-restrict,$(CXX_COMMON)) -Wno-pass-failed -O1 -g -march=native \
    -fsanitize=address,undefined -fno-sanitize-recover=undefined
build/test/asan/train-fp32 build/test/asan/train-bf16: train_gpt.cu Makefile
	@mkdir -p $(@D)
	clang++ -x c++ $(FLAGS) $(NVTX_INCLUDE) $(DEFINES) -MF $@.d -MT $@ $< -o $@ $(CPU_LIBS)
build/test/cuda/%: test/%.cpp Makefile $(CUDA_FLAGS)
	$(call compile_cuda,-x cu,-lgtest -lgtest_main)

test: _notice test-deps
	+$(MAKE) --no-print-directory -j$$(nproc) DEVICE=$(DEVICE) build-tests
	$(MAKE) --no-print-directory DEVICE=$(DEVICE) unit-tests python-tests

.PHONY: build-tests
PROBES := build/test/fast/tokenize_probe build/test/fast/formats_probe

# The CUDA build on a machine without a GPU. The emulator, a library made from test/gpu, replaces CUDA's libraries and runs
# the build's PTX, which these binaries contain uncompressed, for two architectures. The binaries know the library's path.
# The trainers are cuda-build's objects, linked with it.
# With COVERAGE=1 the binaries also count for gcov which lines of host code run, and are in a folder of their own.
EMULATED := build/emulated$(COVERAGE:1=-coverage)
EMULATED_TESTS := $(KERNEL_TESTS:%=$(EMULATED)/%)
EMULATED_TRAINERS := $(EMULATED)/train-fp32 $(EMULATED)/train-bf16
EMULATED_FLAGS := -std=c++20 -O3 -I. -MMD -MP -Xcompiler -Wall,-Wextra,-Wno-restrict,-Wno-unknown-pragmas,-fopenmp -DLLMC_HOPPER \
    $(foreach a,80 90a,-gencode arch=compute_$(a)$(comma)code=compute_$(a)) -cudart shared -no-compress
EMULATED_LIBS := -Xlinker -rpath$(comma)$(CURDIR)/$(EMULATED)/lib -lcublasLt $(TEXT_LIBS) $(DISK_LIBS) -lgomp
CUDA_MAJOR = $(firstword $(subst ., ,$(nvcc_release)))
$(EMULATED)/lib/libgpu.so: $(wildcard test/gpu/*.cpp test/gpu/*.h) Makefile
	@mkdir -p $(@D)
	@printf 'libcudart.so.%s { global: cuda*; __cuda*; local: *; };\nlibcublasLt.so.%s { global: cublasLt*; };\n' $(CUDA_MAJOR) $(CUDA_MAJOR) > $(@D)/exports
	$(CXX) -std=c++20 $(WARNINGS) -O3 -march=native -ffp-contract=off -fPIC -shared -I. -idirafter $(CUDA_HOME)/include \
	    $(filter %.cpp,$^) -o $@ -Wl,--version-script=$(@D)/exports -ldnnl
	@ln -sf $(@F) $(@D)/libcudart.so.$(CUDA_MAJOR)
	@ln -sf $(@F) $(@D)/libcublasLt.so.$(CUDA_MAJOR)
# $(call compile_emulated,FLAGS,LIBRARIES)
define compile_emulated
@mkdir -p $(@D)
$(NVCC) $(1) $(EMULATED_FLAGS) $(COVERAGE:1=-lineinfo -Xcompiler --coverage) $(NVCC_WERROR) -MF $@.d -MT $@ -c $< -o $@.o
$(NVCC) $@.o -o $@ -cudart shared $(COVERAGE:1=-Xcompiler --coverage) $(EMULATED_LIBS) $(2)
endef
ifdef COVERAGE
$(EMULATED)/train-bf16: DEFINES := -DLLMC_BF16
$(EMULATED_TRAINERS): $(EMULATED)/train-%: train_gpt.cu Makefile build/update_on_host-%.o | $(EMULATED)/lib/libgpu.so
	$(call compile_emulated,$(DEFINES),build/update_on_host-$*.o)
else
$(EMULATED_TRAINERS): $(EMULATED)/train-%: cuda-build | $(EMULATED)/lib/libgpu.so
	$(NVCC) build/cuda-$*/train.o -o $@ -cudart shared $(EMULATED_LIBS) build/update_on_host-$*.o
endif
$(EMULATED)/faults $(EMULATED)/instructions: $(EMULATED)/%: test/gpu/%.cu Makefile | $(EMULATED)/lib/libgpu.so
	$(call compile_emulated)
$(EMULATED)/test_%: test/test_%.cpp Makefile | $(EMULATED)/lib/libgpu.so
	$(call compile_emulated,-x cu,-lgtest -lgtest_main)
.PHONY: emulated-build test-emulated
ifneq ($(wildcard $(CUDA_HOME)/bin/nvcc),)
emulated-build: $(EMULATED_TESTS) $(EMULATED_TRAINERS) $(EMULATED)/faults $(EMULATED)/instructions
else
emulated-build: ; @echo "== the CUDA build's tests without a GPU: skipped, no CUDA Toolkit here"
endif
# All kernel tests on all GPUs that can be emulated, with several seeds; tens of minutes.
test-emulated: test-deps cuda-archs emulated-build build/cpu-fp32/train build/cpu-bf16/train
	@for gpu in A100 4090 H100 B200 5090; do for seed in 11 12 13; do for t in $(EMULATED_TESTS); do \
	  echo "== $$t on $$gpu, seed $$seed"; GPU=$$gpu GPU_SEED=$$seed $$t --gtest_brief=1 --gtest_filter=-HopperAttention.Agrees* || exit 1; done; done; done
	@for seed in 11 12 13; do echo "== HopperAttention.Agrees*, seed $$seed"; SMALL_SHAPES=1 GPU=H100 GPU_SEED=$$seed \
	  $(EMULATED)/test_attention --gtest_brief=1 --gtest_filter=HopperAttention.Agrees* || exit 1; done
	MORE_TESTS=1 TRAIN_BINARIES="build/cpu-fp32/train build/cpu-bf16/train" $(PYTHON) -m pytest -q -n 2 test/test_emulated.py

# gpu-check's Python tests on an emulated A100, file by file as in gpu-check: what fails here would fail on every GPU.
.PHONY: test-gpu-python
test-gpu-python: test-deps $(EMULATED_TRAINERS) $(PROBES)
	MORE_TESTS=1 ASAN_TRAINERS= TRAIN_BINARIES="$(EMULATED_TRAINERS)" $(PYTHON) -m pytest -q -n 2 --dist loadfile \
	  $$(KERNEL_TESTS=none dev/gpu_check.sh --dry-run python | grep -o 'test/test_[a-z_]*\.py$$' | grep -v test_emulated)

# The GPU code that no test has executed, as PTX and as lines of host code; at most 2% of either may be left. It takes most of
# an hour on two cores, half of that for its build.
.PHONY: gpu-coverage build/emulated-coverage/report gpu-predicted
gpu-coverage: test-deps build/cpu-fp32/train build/cpu-bf16/train
	+@$(MAKE) --no-print-directory COVERAGE=1 build/emulated-coverage/report
build/emulated-coverage/report: emulated-build
	@rm -f $(EMULATED)/coverage $(EMULATED)/*.gcda
	@for gpu in A100 H100; do for t in $(EMULATED_TESTS); do \
	  if [ $${t##*/} = test_attention ]; then export SMALL_SHAPES=1; else unset SMALL_SHAPES; fi; \
	  GPU=$$gpu GPU_COVERAGE=$(EMULATED)/coverage $$t --gtest_brief=1 || exit 1; done; done
	SMALL_SHAPES=1 GPU=5090 GPU_COVERAGE=$(EMULATED)/coverage $(EMULATED)/test_attention --gtest_brief=1 --gtest_filter='Attention/1.Matches*'
	EMULATED=$(EMULATED) GPU_COVERAGE=$(CURDIR)/$(EMULATED)/coverage MORE_TESTS=1 TRAIN_BINARIES="build/cpu-fp32/train build/cpu-bf16/train" \
	  $(PYTHON) -m pytest -q -n 2 test/test_emulated.py -k "not fault and not kernel_tests"
	@$(PYTHON) dev/gpu_coverage.py $(EMULATED)/coverage --host $(EMULATED) --out dev/results/gpu-coverage.md

# Predicts how long a training step takes on GPUs that are not here.
gpu-predicted: test-deps emulated-build
	$(PYTHON) dev/gpu_predicted.py

BENCH_ATTENTION := build/bench/$(DEVICE)/attention
BENCHES := $(BENCH_ATTENTION) $(if $(filter cpu,$(DEVICE)),build/bench/cpu/products)
ifeq ($(DEVICE),cuda)
TRAINERS := build/cuda-fp32/train build/cuda-bf16/train
build-tests: $(UNIT_TESTS) $(TRAINERS) $(BENCHES) $(PROBES)
else
TRAINERS := build/cpu-fp32/train build/cpu-bf16/train
build-tests: $(UNIT_TESTS) $(TRAINERS) $(ASAN_TRAINERS) $(BENCHES) $(PROBES) build/test/tsan/race_probe cuda-build emulated-build fuzz-build
endif

FUZZED := safetensors shards json config tokenizer gguf nf4 json_lines
FUZZERS := $(FUZZED:%=build/test/fuzz/fuzz_%)

# On a CPU as many tests run at a time as there are cores.
ifeq ($(DEVICE),cpu)
unit-tests: $(UNIT_TESTS) $(FUZZERS)
	+@$(MAKE) --no-print-directory -j$$(nproc) --output-sync=target $(UNIT_TESTS:%=run/%) race-probe fuzz
else
unit-tests: $(UNIT_TESTS)
	@for t in $(UNIT_TESTS); do echo "== $$t"; $$t --gtest_brief=1 || exit 1; done
endif
run/%: %
	@echo "== $<"; $< --gtest_brief=1
# The faithful build's attention is slow, because fibers run its GPU threads: only make test-more has larger shapes.
run/build/test/faithful/test_attention: export SMALL_SHAPES := $(if $(MORE_TESTS),,1)
# The faithful build's kernel tests under AddressSanitizer and ThreadSanitizer. They are not in make test, whose emulated GPU
# finds the same errors in PTX.
.PHONY: test-sanitizers
.SECONDARY: $(SANITIZED_TESTS)
test-sanitizers: test-deps
	+@$(MAKE) --no-print-directory -j$$(nproc) --output-sync=target DEVICE=cpu $(SANITIZED_TESTS:%=run/%) race-probe

# ThreadSanitizer must find a planted missing barrier, and nothing where none is missing.
.PHONY: race-probe fuzz-build
race-probe: build/test/tsan/race_probe
	@$< none >/dev/null 2>&1 || { echo "race_probe: a race was reported where there is none"; exit 1; }
	@$< missing >/dev/null 2>&1; [ $$? = 66 ] || { echo "race_probe: the missing barrier was not found"; exit 1; }
	@echo "== race_probe: the planted missing barrier is found"

# Checks that the CUDA build compiles, that no kernel spills registers, and that wgmma runs asynchronously. It compiles for two
# architectures only, as each takes minutes. Without a CUDA Toolkit there is nothing to check.
cuda-build:
ifneq ($(wildcard $(CUDA_HOME)/bin/nvcc),)
	+@$(MAKE) --no-print-directory DEVICE=cuda PLAYED=1 CUDA_ARCH="$(CUDA_BUILD_ARCH)" build/cuda-bf16/train build/cuda-fp32/train
	@! grep -hE '[1-9][0-9]* bytes (stack frame|spill)' build/cuda-*/train.log || { echo "cuda-build: kernels spill"; exit 1; }
	@! grep -h 'wgmma.*serialized' build/cuda-*/train.log || { echo "cuda-build: products wait for each other"; exit 1; }
	@echo "== cuda-build: $$(cat build/cuda-*/train.log | grep -c 'Used .* registers') kernels, none spills"
else
	@echo "== cuda-build: skipped, no CUDA Toolkit here"
endif

# Compiles only the device code, in both precisions, for each architecture that the kernels support: a compiler may spill
# registers for one and not for another.
.PHONY: cuda-archs
cuda-archs:
ifneq ($(wildcard $(CUDA_HOME)/bin/nvcc),)
	+@$(MAKE) --no-print-directory -j$$(nproc) --output-sync=target $(foreach a,$(call able,$(nvcc_archs)),build/archs/bf16-$(a).log build/archs/fp32-$(a).log)
	@echo "== cuda-archs: no kernel spills on $(call able,$(nvcc_archs))"
else
	@echo "== cuda-archs: skipped, no CUDA Toolkit here"
endif
build/archs/%.log: train_gpt.cu Makefile $(wildcard llmc/*)
	@mkdir -p $(@D)
	@echo "== cuda-archs: $*"
	@$(NVCC) $(if $(filter bf16-%,$*),-DLLMC_BF16) -std=c++20 -O3 -I. -Xcompiler -fopenmp -Xptxas -v,-warn-spills,-warn-lmem-usage \
	    -Werror all-warnings -arch=sm_$(lastword $(subst -, ,$*)) -cubin $< -o $@.cubin > $@.part 2>&1 || { grep -v '^ptxas info' $@.part; exit 1; }
	@mv $@.part $@

FUZZ_SECONDS ?= 10
fuzz-build: $(FUZZERS)
build/test/fuzz/%: test/%.cpp Makefile
	@mkdir -p $(@D)
	clang++ -std=c++20 -Wall -Wextra $(if $(WERROR),-Werror) -I. -MMD -MP -MF $@.d -MT $@ -g -O1 -fopenmp -fsanitize=fuzzer,address $< -o $@ $(TEXT_LIBS)
build/fuzz/seeds: test/fuzz_seeds.py
	@python3 $< $(@D) && touch $@
fuzz: $(FUZZED:%=fuzz/%)
fuzz/%: build/test/fuzz/fuzz_% build/fuzz/seeds
	@$< -max_total_time=$(FUZZ_SECONDS) -verbosity=0 -print_final_stats=0 build/fuzz/$* > build/fuzz/$*.log 2>&1 || \
	  { tail -40 build/fuzz/$*.log; exit 1; }; echo "== fuzz_$*: $(FUZZ_SECONDS) s, nothing found"

# The attention kernels' times by head size and length; dev/bench/attention.py compares them with PyTorch's.
.PHONY: bench-attention
bench-attention: $(BENCH_ATTENTION)
	GOMP_SPINCOUNT=10000 $(BENCH_ATTENTION) $(BENCH_OPTIONS)
# The rates of a step's matrix products, compared with oneDNN's rates for the same products alone.
.PHONY: bench-products
bench-products: build/cpu-$(PRECISION)/train build/bench/cpu/products
	build/cpu-$(PRECISION)/train --bench step,ops,json $(or $(BENCH_OPTIONS),--model d12 --batch 4 --seq-len 64) | \
	  GOMP_SPINCOUNT=10000 build/bench/cpu/products
build/bench/cpu/%: dev/bench/%.cpp Makefile
	@mkdir -p $(@D)
	$(CXX) -x c++ $(CXXFLAGS) $(NVTX_INCLUDE) -MF $@.d -MT $@ $< -o $@ $(CPU_LIBS)
build/bench/cuda/%: dev/bench/%.cpp Makefile $(CUDA_FLAGS)
	$(call compile_cuda,-x cu)

# A real model against transformers; takes minutes.
.PHONY: test-smollm2
test-smollm2: test-deps build/$(DEVICE)-fp32/train
	TRAIN_BINARIES="build/$(DEVICE)-fp32/train" $(PYTHON) -m pytest -q test/slow_smollm2.py

python-tests: $(TRAINERS) $(ASAN_TRAINERS) $(BENCHES) $(PROBES)
	@dev/venv.sh
	TRAIN_BINARIES="$(TRAINERS)" ASAN_TRAINERS="$(ASAN_TRAINERS)" $(PYTHON) -m pytest -q -n 2 --dist loadfile test

.PHONY: test-more
test-more: test-deps
	+MORE_TESTS=1 $(MAKE) --no-print-directory -j$$(nproc) DEVICE=$(DEVICE) build-tests
	MORE_TESTS=1 $(MAKE) --no-print-directory DEVICE=$(DEVICE) $(if $(filter cpu,$(DEVICE)),run/build/test/faithful/test_attention) python-tests

# Checks and measures what only a machine with a GPU can; writes to dev/results/. GPU_CHECK=--dry-run prints the plan, and
# GPU_CHECK="build kernels" runs some groups of it, which dev/gpu_check.sh lists.
.PHONY: gpu-check nvcc-version
gpu-check:
	@KERNEL_TESTS="$(KERNEL_TESTS)" dev/gpu_check.sh $(GPU_CHECK)
nvcc-version:
	@$(NVCC) --version | sed -n 's/^.*release.*, //p'

format:
	clang-format -i train_gpt.cu llmc/*.h llmc/*.cuh llmc/*.cpp test/*.cpp test/*.h test/gpu/*.h test/gpu/*.cpp test/gpu/*.cu dev/bench/*.cpp

clean:
	rm -rf build train

# Prints the comment at the top of this file.
help:
	@sed '/^#/!Q; s/^# \?//' Makefile

-include $(wildcard build/*.d build/*/*.d build/test/*/*.d build/bench/*/*.d)
