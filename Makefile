# make                   builds ./train for this machine
# make deps              installs what that needs (Debian, Ubuntu)
# make quick             builds ./train and the kernel tests, and runs a few tests of everything in three minutes
# make test              installs what the tests need, and runs the tests that every change must pass (20 to 40 minutes on two cores)
# make install           puts the program, scripts, the first run's text, a manual page and shells' completions into PREFIX
# make uninstall         removes them, and nothing outside of PREFIX
# make format            formats the C++ sources
# make clean             removes what was built
# make help              prints these lists: this one, that of test/Makefile and that of dev/bench/Makefile
#
# DEVICE=cuda|cpu        the default is cuda if a GPU and nvcc answer, else cpu
# PRECISION=bf16|fp32    the default is bf16 for cuda, fp32 for cpu
# CUDA_ARCH="80 90a"     GPU architectures to compile for; the last one also as PTX, for later GPUs. The default is that of the
#                        GPU that answers; if none does, those of 80, 86, 89, 90a, 100 and 120 that nvcc knows
# NVCC=/path/to/nvcc     the default is the CUDA Toolkit's in /usr/local/cuda, or the one on the PATH
# PREFIX=/usr/local      where make install puts them; the default is ~/.local
# WERROR=1               makes compiler warnings errors, as in the tests

NVCC ?= $(firstword $(wildcard /usr/local/cuda/bin/nvcc) $(shell command -v nvcc 2>/dev/null) nvcc)
CXX := g++
PYTHON := .venv/bin/python

.PHONY: all _notice deps install uninstall format clean help FORCE
all: train

# The program and its planner are compiled side by side, unless -j says otherwise.
ifeq ($(MAKELEVEL)$(filter-out all train install,$(MAKECMDGOALS)),0)
MAKEFLAGS += -j2
endif

# By default warnings are errors only in the tests: a new compiler's warning must not stop a user's build.
WERROR ?= $(if $(filter quick test test-more build-tests unit-tests python-tests race-probe fuzz-build fuzz cuda-build,$(MAKECMDGOALS)),1)
export WERROR
# Functions are inlined as with -O2: with -O3's inlining the program is no faster, and compiles for a tenth longer. Without
# -fno-math-errno -fno-trapping-math the loops of the fast CPU build stay scalar.
# g++ 12 reports overlaps in std::string's own code that cannot happen (GCC's bug 105651). It compiles a tenth faster if it
# collects garbage only beyond 600 MB.
WARNINGS := -Wall -Wextra $(if $(WERROR),-Werror) -Wno-restrict
CXX_COMMON := -std=c++20 $(WARNINGS) -Wno-unknown-pragmas -fopenmp -I. -MMD -MP --param=ggc-min-heapsize=600000
CXXFLAGS := $(CXX_COMMON) -O3 --param max-inline-insns-auto=15 -fno-ipa-cp-clone -march=native -fno-math-errno -fno-trapping-math
TEXT_LIBS := -lpcre2-8 -lutf8proc -lsentencepiece -lz
CPU_LIBS := -ldnnl $(TEXT_LIBS)

# Chooses the device, the precision and the GPU architectures; compile_cuda, and CUDA_FLAGS, which changes with them.
include dev/cuda.mk
BUILD := build/$(DEVICE)-$(PRECISION)

# ./train is a link to the binary of the configuration that make was asked for last. The longest compilations begin first.
# The notice is printed before the build, which takes minutes, and again at the end.
train: _notice $(if $(filter cpu,$(DEVICE)),$(BUILD)/train.o build/planner.o) $(BUILD)/train FORCE
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
HEADERS := CLI/CLI.hpp nlohmann/json.hpp toml++/toml.h pcre2.h utf8proc.h sentencepiece_processor.h zlib.h
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

# The ranks of --devices, over MPI if its headers are installed: OpenMPI's, else MPICH's. The tests of MPICH name that themselves.
build/ranks_mpi.o: MPI_FLAGS = $(shell pkg-config --cflags mpi-c 2>/dev/null || pkg-config --cflags mpich 2>/dev/null)
build/mpich/ranks_mpi.o: MPI_FLAGS = $(shell pkg-config --cflags mpich)
build/ranks_mpi.o build/mpich/ranks_mpi.o: llmc/ranks_mpi.cpp Makefile
	@mkdir -p $(@D)
	$(CXX) -std=c++20 $(WARNINGS) -O2 -I. -MMD -MP $(if $(MPI_FLAGS),-DLLMC_MPI $(MPI_FLAGS:-I%=-isystem %)) -MF $@.d -MT $@ -c $< -o $@

# What all builds share, because it has neither kernels nor the type of weights: an archive, from which each program takes what
# it uses. Code of this kind in a new llmc/NAME.cpp is found here.
INSTALLER := deps
OBJECTS := $(patsubst llmc/%.cpp,build/common/%.o,$(filter-out llmc/ranks_mpi.cpp llmc/update_on_host.cpp,$(wildcard llmc/*.cpp)))
$(OBJECTS): build/common/%.o: llmc/%.cpp Makefile
	$(call need_headers,$(HEADERS),$(INSTALLER))
	@mkdir -p $(@D)
	$(CXX) $(CXX_COMMON) -O2 -DLLMC_COMMON -MF $@.d -MT $@ -c $< -o $@
%/common.a:
	@rm -f $@ && ar rcs $@ $^
COMMON := build/common.a
$(COMMON): $(OBJECTS)
build/common/run_records.o build/test/asan/common/run_records.o build/test/fuzz/common/run_records.o: llmc/report_page.html

build/cpu-fp32/train.o: DEFINES :=
build/cpu-bf16/train.o: DEFINES := -DLLMC_BF16
build/cpu-fp32/train.o build/cpu-bf16/train.o: train_gpt.cu Makefile
	$(call need_headers,$(CPU_HEADERS),deps)
	@mkdir -p $(@D)
	$(CXX) -x c++ $(CXXFLAGS) $(NVTX_INCLUDE) $(DEFINES) -MF $@.d -MT $@ -c $< -o $@

# The planner: plans of the build for a GPU in bf16. ./train runs it for --plan --gpu.
build/planner.o: train_gpt.cu Makefile
	$(call need_headers,$(CPU_HEADERS),deps)
	@mkdir -p $(@D)
	$(CXX) -x c++ $(CXX_COMMON) -O1 -DLLMC_BF16 -DLLMC_PLANNER -MF $@.d -MT $@ -c $< -o $@
build/planner: build/planner.o build/ranks_mpi.o build/commit.o $(COMMON)
	$(CXX) $(WARNINGS) -fopenmp $^ -o $@ $(CPU_LIBS)

build/cpu-fp32/train build/cpu-bf16/train: build/cpu-%/train: build/cpu-%/train.o build/ranks_mpi.o build/commit.o $(COMMON) | build/planner
	$(CXX) $(WARNINGS) -fopenmp $(filter %.o %.a,$^) -o $@ $(CPU_LIBS)

build/cuda-fp32/train.o: DEFINES :=
build/cuda-bf16/train.o: DEFINES := -DLLMC_BF16
build/cuda-fp32/train.o build/cuda-bf16/train.o: train_gpt.cu Makefile $(CUDA_FLAGS)
	$(call need_headers,$(HEADERS),deps)
	$(call compile_cuda_object,$(DEFINES),$@)
build/cuda-fp32/train build/cuda-bf16/train: build/cuda-%/train: build/cuda-%/train.o build/update_on_host-%.o build/ranks_mpi.o build/commit.o $(COMMON)
	$(NVCC) $(filter %.o %.a,$^) -o $@ $(CUDA_LIBS)

# Debian packages for building and training.
DEPS := g++ make libdnnl-dev libcli11-dev nlohmann-json3-dev libtomlplusplus-dev libpcre2-dev libutf8proc-dev libsentencepiece-dev \
  zlib1g-dev pkg-config libopenmpi-dev openmpi-bin
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

# $(call quoted,TEXT) is one word of the shell, whatever characters the text has.
quoted = '$(subst ','\'',$(1))'

# The installed scripts find the program and the text where they are in the repository. A path of the user's is taken as it
# was written ($(value)), so that a $ in it is a character.
ifeq ($(origin PREFIX),undefined)
PREFIX := $(if $(HOME),$(value HOME)/.local)
endif
TO = $(call quoted,$(value DESTDIR)$(value PREFIX))
SHARE := share/train-gpt
PAGES := man:man/man1/train.1 bash:bash-completion/completions/train zsh:zsh/site-functions/_train
INSTALLED := bin/train libexec/train-gpt $(SHARE) $(foreach p,$(PAGES),share/$(lastword $(subst :, ,$(p))))
define check_prefix
@case $(call quoted,$(value PREFIX)) in /*) ;; *) \
  printf 'make $@: PREFIX=%s is no absolute path: give one that begins with /\n' $(call quoted,$(value PREFIX)) >&2; exit 1 ;; esac
endef
install: _notice $(BUILD)/train
	$(check_prefix)
	@install -D $(BUILD)/train $(TO)/bin/train
	@[ $(DEVICE) = cuda ] || install -D build/planner $(TO)/libexec/train-gpt/planner
	@install -D -m 644 -t $(TO)/$(SHARE)/dev/data dev/data/tinyshakespeare.txt
	@install -D -t $(TO)/$(SHARE)/scripts $(filter-out scripts/profile%,$(wildcard scripts/*.sh scripts/*.py))
	@ln -sfn ../../bin/train $(TO)/$(SHARE)/train
	@for page in $(PAGES); do to=$(TO)/share/$${page#*:}; mkdir -p "$$(dirname "$$to")" && \
	  $(BUILD)/train --help $${page%%:*} > "$$to" || exit 1; done
	@printf 'installed %s\n' $(TO)/bin/train
	@case ":$$PATH:" in *:$(call quoted,$(value PREFIX))/bin:*) ;; *) \
	  printf '%s/bin is not on the PATH\n' $(call quoted,$(value PREFIX)) ;; esac
# What a link leads to outside of PREFIX stays.
uninstall:
	$(check_prefix)
	@root=$$(realpath -e $(TO)) || exit 1; root=$${root%/}; for name in $(INSTALLED); do \
	  [ -e "$$root/$$name" ] || [ -L "$$root/$$name" ] || continue; \
	  above=$$(realpath "$$root/$${name%/*}"); case $$above/ in \
	    "$$root"/*) rm -rf "$$root/$$name" && printf 'removed %s\n' "$$root/$$name" || exit 1 ;; \
	    *) printf '%s stays: it is outside of PREFIX, in %s\n' "$$root/$$name" "$$above" >&2 ;; esac; done

include dev/bench/Makefile test/Makefile

format:
	clang-format -i train_gpt.cu llmc/*.h llmc/*.cuh llmc/*.cpp test/*.cpp test/*.h test/gpu/*.h test/gpu/*.cpp test/gpu/*.cu dev/bench/*.cpp

clean:
	rm -rf build train

# Prints the comments at the top of these files.
help:
	@for file in Makefile test/Makefile dev/bench/Makefile; do sed '/^#/!Q; s/^# \?//' $$file; echo; done

-include $(wildcard build/*.d build/*/*.d build/test/*/*.d build/test/*/common/*.d build/bench/*/*.d)
