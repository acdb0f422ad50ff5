# What make builds for, and how nvcc compiles: DEVICE, PRECISION, CUDA_ARCH and the flags that follow from them.

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

CUDA_HOME := $(patsubst %/bin/nvcc,%,$(realpath $(NVCC)))
ifneq ($(wildcard $(CUDA_HOME)/include/nvtx3/nvToolsExt.h),)
  NVTX_INCLUDE := -idirafter $(CUDA_HOME)/include
endif

# If CUDA is not on the loader's paths, the binary must know where CUDA's libraries are.
CUDA_LIB := $(patsubst %/libcublasLt.so,%,$(firstword $(wildcard $(CUDA_HOME)/lib64/libcublasLt.so $(CUDA_HOME)/lib/libcublasLt.so)))

OLDEST_NVCC := 12.0
nvcc_release = $(shell $(NVCC) --version 2>/dev/null | sed -n 's/^.*release \([0-9.]*\),.*/\1/p')
nvcc_archs = $(patsubst compute_%,%,$(shell $(NVCC) --list-gpu-arch 2>/dev/null))
# Without a driver nvidia-smi writes a sentence instead, which may have quotes.
gpu_capabilities = $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -xE '[0-9]+[.][0-9]+|\[N/A\]')
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
NVCCFLAGS := -std=c++20 -O2 -I. -MMD -MP -Xcompiler -Wall,-Wextra,-Wno-restrict,-Wno-unknown-pragmas,-fopenmp \
             -Xptxas -v,-warn-spills,-warn-lmem-usage $(GENCODE) $(HOPPER)
# Not among the flags above, so that the tests need not rebuild what a user has built.
NVCC_WERROR := $(if $(WERROR),-Werror all-warnings -Xcompiler -Werror)
CUDA_LIBS := $(CUDA_LIB:%=-Xlinker -rpath$(comma)%) -lcublasLt $(TEXT_LIBS) -lgomp
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
$(NVCC) $@.o $(COMMON) -o $@ $(2) $(CUDA_LIBS)
endef

# If a user with a GPU gets a build for the CPU, says so prominently, and what to do.
say_notice = $(if $(NOTICE),$(info )$(info *** THIS IS A BUILD FOR THE CPU. $(NOTICE))$(info *** $(ADVICE))$(info ))

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
