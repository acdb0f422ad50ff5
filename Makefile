# make          builds ./train for this machine        make deps   installs what that needs (Debian, Ubuntu)
# make test     runs the tests                         make help   lists the rest
#
# DEVICE=cuda|cpu        the default is cuda where a GPU answers
# PRECISION=bf16|fp32    the default is bf16 on cuda, fp32 on the cpu
# CUDA_ARCH="80 90a"     GPU architectures to compile for; the last also as PTX, for later ones

NVCC ?= $(firstword $(wildcard /usr/local/cuda/bin/nvcc) $(shell command -v nvcc 2>/dev/null) nvcc)
CXX := g++
PYTHON := .venv/bin/python

ifndef DEVICE
  ifneq ($(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU'),0)
    ifneq ($(shell command -v $(NVCC) 2>/dev/null),)
      DEVICE := cuda
      WHY := a GPU answers nvidia-smi
    else
      DEVICE := cpu
      WHY := a GPU answers, but there is no nvcc
    endif
  else
    DEVICE := cpu
    WHY := no GPU answers nvidia-smi
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
DEFINES_bf16 := -DLLMC_BF16
DEFINES := $(DEFINES_$(PRECISION))

# Without -fno-math-errno -fno-trapping-math the loops of the fast CPU build stay scalar.
WARNINGS := -Wall -Wextra -Werror
CXX_COMMON := -std=c++20 $(WARNINGS) -Wno-unknown-pragmas -fopenmp -I. -MMD -MP
CXXFLAGS := $(CXX_COMMON) -O3 -march=native -fno-math-errno -fno-trapping-math
CPU_LIBS := -ldnnl -lpcre2-8
CUDA_HOME := $(patsubst %/bin/nvcc,%,$(realpath $(NVCC)))
ifneq ($(wildcard $(CUDA_HOME)/include/nvtx3/nvToolsExt.h),)
  NVTX_INCLUDE := -idirafter $(CUDA_HOME)/include
endif

CUDA_ARCH ?= 80 90a
comma := ,
GENCODE := $(foreach a,$(CUDA_ARCH),-gencode arch=compute_$(a)$(comma)code=sm_$(a)) \
           -gencode arch=compute_$(firstword $(subst a,,$(lastword $(CUDA_ARCH))))$(comma)code=compute_$(firstword $(subst a,,$(lastword $(CUDA_ARCH))))
NVCCFLAGS := -std=c++20 -O3 -I. -MMD -MP -Werror all-warnings -Xcompiler -Wall,-Wextra,-Werror,-Wno-unknown-pragmas,-fopenmp \
             -Xptxas -v,-warn-spills,-warn-lmem-usage $(GENCODE)
CUDA_LIBS := -lcublasLt -lcublas -lpcre2-8 -lgomp

.PHONY: all test test-unit test-python deps bench format clean help fuzz FORCE
all: train

# ./train is the binary of the configuration asked for last.
train: $(BUILD)/train FORCE
	@cmp -s $< $@ || { ln -sf $< $@; }
	@echo "./train: DEVICE=$(DEVICE) ($(WHY)), PRECISION=$(PRECISION)"

$(BUILD)/train: build/%-$(PRECISION)/train: train_gpt.cu Makefile
	@mkdir -p $(@D)
ifeq ($(DEVICE),cuda)
	$(NVCC) $(NVCCFLAGS) $(DEFINES) -MF $@.d -MT $@ $< -o $@ $(CUDA_LIBS) > $@.log 2>&1 || { cat $@.log; rm -f $@; exit 1; }
else
	$(CXX) -x c++ $(CXXFLAGS) $(NVTX_INCLUDE) $(DEFINES) -MF $@.d -MT $@ $< -o $@ $(CPU_LIBS)
endif

-include $(wildcard build/*/*.d)
