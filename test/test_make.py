"""What make does on different machines: a build's architectures, libraries and warnings, and what stops
it."""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import tempfile

import pytest
from trainer_runs import ROOT, executable

NVCC = '''#!/bin/sh
case $1 in
    --version) echo "Cuda compilation tools, release {release}, V{release}.99" ;;
    --list-gpu-arch) printf 'compute_%s\\n' {archs} ;;
    *) exit 1 ;;
esac
'''
NVIDIA_SMI = '''#!/bin/sh
case $1 in
    -L) printf '%s\n' {gpus} ;;
    --query-gpu=compute_cap) printf '%s\\n' {capabilities} ;;
esac
'''


@pytest.fixture
def dry_make(tmp_path):
    """What make would run, with a toolkit and GPUs that are faked; nothing is built."""

    def run(*arguments, code=0, release="13.0", archs="75 80 86 89 90 100 120", capabilities="", gpus='"GPU 0: Fake"',
            cuda=True):
        executable(tmp_path / "cuda" / "bin" / "nvcc", NVCC.format(release=release, archs=archs))
        executable(tmp_path / "cuda" / "lib64" / "libcublasLt.so", "")
        executable(tmp_path / "bin" / "nvidia-smi", NVIDIA_SMI.format(gpus=gpus, capabilities=capabilities))
        clean = {name: value for name, value in os.environ.items()
                 if name not in ("WERROR", "CUDA_ARCH", "DEVICE", "PRECISION", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
        ran = subprocess.run(
            ["make", "-nB", f"NVCC={tmp_path / 'cuda' / 'bin' / 'nvcc'}", *(["DEVICE=cuda"] if cuda else []), *arguments],
            cwd=ROOT, capture_output=True, text=True, timeout=60,
            env=clean | {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"})
        assert ran.returncode == code, ran.stdout + ran.stderr
        assert code or not ran.stderr, ran.stderr
        return ran.stderr if code else ran.stdout

    return run


def compilations(commands):
    """The commands that compile and do not only link, without clang's compilation of the trainer, whose
    warnings only developers need."""
    return [line for line in commands.splitlines() if re.match(r"(g\+\+|clang\+\+|\S*nvcc) (?!\S+\.o )", line)
            and "-fsanitize=address,undefined" not in line]


def codes(commands):
    """The architectures for which the commands make nvcc compile, in order: sm_80, compute_80."""
    return re.findall(r"code=(\w+)", "\n".join(compilations(commands)))


def test_code_for_the_gpu_at_hand(dry_make):
    assert codes(dry_make(capabilities="8.6")) == ["sm_86", "compute_86"]
    assert codes(dry_make(capabilities="9.0 9.0")) == ["sm_90a", "compute_90"]
    assert codes(dry_make(capabilities="8.0 12.0", cuda=False)) == ["sm_80", "sm_120", "compute_120"]
    assert codes(dry_make("CUDA_ARCH=89", capabilities="9.0")) == ["sm_89", "compute_89"]


def test_gpus_that_are_too_old_are_left_out(dry_make):
    for capabilities, archs, left in (("8.9 7.5", ["sm_89", "compute_89"], "75"),
                                      ("6.1 8.0 5.2", ["sm_80", "compute_80"], "52 61"), ("9.0 6.1", ["sm_90a", "compute_90"], "61")):
        made = dry_make(capabilities=capabilities)
        assert codes(made) == archs
        assert len(re.findall(f"^CUDA_ARCH: .*, and not {left}, which this machine has too", made, re.M)) == 1
    assert "which this machine has too" not in dry_make(capabilities="8.9 8.6")


def test_a_jetson_has_no_number(dry_make):
    archs = "75 80 86 87 89 90 100 110 120"
    everywhere = ["sm_80", "sm_86", "sm_87", "sm_89", "sm_90a", "sm_100", "sm_110", "sm_120", "compute_120"]
    assert codes(dry_make(archs=archs, capabilities="'[N/A]'")) == everywhere
    assert codes(dry_make(archs=archs.replace("110", "101"), capabilities="'[N/A]'"))[6] == "sm_101"
    assert set(codes(dry_make(archs=archs))) == set(everywhere) - {"sm_87", "sm_110"}  # no GPU answers


MISMATCH = "Failed to initialize NVML: Driver/library version mismatch"


def test_a_build_for_the_cpu_beside_a_driver_is_said_twice(dry_make):
    """Before the build and after it, with nvidia-smi's own words, including quotes."""
    words = [MISMATCH, '''couldn't "communicate" with $(the) `driver`; # 1''']
    for said in words:
        quoted = shlex.quote(said)
        made = dry_make("train", gpus=quoted + " 'NVML library version: 580.1'", cuda=False)
        assert "build/cpu-fp32/train" in made
        notices = [line for line in made.splitlines() if line.startswith("*** THIS IS A BUILD FOR THE CPU. nvidia-smi is")]
        assert len(notices) == 2 and all(said in line for line in notices), made
        assert made.index("*** THIS") < made.index("g++") < made.rindex("*** THIS")
    assert "***" not in dry_make("train", capabilities="8.0", cuda=False)
    assert "***" not in dry_make("DEVICE=cpu", "train", gpus=MISMATCH.replace(" ", "-"), cuda=False)
    made = dry_make("train", "NVCC=/nowhere/nvcc", cuda=False)
    assert made.count("*** THIS IS A BUILD FOR THE CPU. A GPU answers nvidia-smi, but there is no nvcc") == 2


def test_code_for_all_where_no_gpu_answers(dry_make):
    everywhere = ["sm_80", "sm_86", "sm_89", "sm_90a"]
    assert codes(dry_make()) == [*everywhere, "sm_100", "sm_120", "compute_120"]
    old = {"release": "12.4", "archs": "50 75 80 86 87 89 90"}
    assert codes(dry_make(**old)) == [*everywhere, "compute_90"]
    assert codes(dry_make(**old, capabilities="12.0")) == [*everywhere, "compute_90"]  # by PTX
    for said in ("Field compute_cap is not valid", "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. 9"):
        assert codes(dry_make(capabilities=shlex.quote(said)))[-1] == "compute_120"


def test_hopper_kernels_where_there_is_hopper_code(dry_make):
    assert "-DLLMC_HOPPER" in dry_make(capabilities="9.0") and "-DLLMC_HOPPER" not in dry_make(capabilities="8.0")


def test_the_binary_knows_where_its_libraries_are(dry_make, tmp_path):
    assert f" -Xlinker -rpath,{(tmp_path / 'cuda' / 'lib64').resolve()} " in dry_make()


@pytest.mark.parametrize("arguments, machine, said", [
    (["CUDA_ARCH=75"], {}, "CUDA_ARCH: 75: the kernels need 80 or later"),
    ([], {"capabilities": "7.5"}, "CUDA_ARCH: 75: the kernels need 80 or later"),
    ([], {"capabilities": "6.1"}, "CUDA_ARCH: 61: the kernels need 80 or later"),
    ([], {"capabilities": "5.2 6.1 7.5"}, "CUDA_ARCH: 52 61 75: the kernels need 80 or later"),
    (["CUDA_ARCH=80 1.2"], {}, "CUDA_ARCH: 1.2: the kernels need 80 or later"),
    (["CUDA_ARCH=80 200a"], {}, "CUDA_ARCH: 200a: nvcc 13.0 knows 75 80 86 89 90 100 120"),
    (["CUDA_ARCH=75"], {"release": "11.5"}, "nvcc is of CUDA 11.5, and 12.0 is the oldest"),
    (["NVCC=/nowhere/nvcc"], {}, "NVCC=/nowhere/nvcc does not answer"),
], ids=["75", "a GPU of 75", "a GPU of 61", "old GPUs", "no number", "unknown", "old nvcc", "no nvcc"])
def test_what_cannot_be_compiled_for_is_said_in_a_line(dry_make, arguments, machine, said):
    error = dry_make(*arguments, code=2, **machine)
    assert said in error and error.count("\n") == 1, error


def test_warnings_stop_tests_but_no_users_build(dry_make):
    for arguments in ((), ("DEVICE=cpu",), ("PRECISION=fp32",)):
        commands = compilations(dry_make(*arguments))
        assert commands and all("-Wall" in command and "-Werror" not in command for command in commands), commands
        commands = compilations(dry_make(*arguments, "WERROR=1"))
        assert commands and all("-Werror" in command for command in commands), commands
    for arguments in (("build-tests",), ("DEVICE=cpu", "build-tests"), ("DEVICE=cpu", "cuda-build")):
        commands = compilations(dry_make(*arguments))
        assert len(commands) >= 2 and all("-Werror" in command for command in commands), arguments


def test_the_cuda_build_is_tested_in_one_precision_unless_more_is_asked_for(dry_make):
    for arguments, precisions in (((), ["bf16"]), (("MORE_TESTS=1",), ["bf16", "fp32"])):
        made = dry_make("DEVICE=cpu", "build-tests", *arguments)
        assert re.findall(r"-c train_gpt\.cu -o build/cuda-(\w+)/train\.o", made) == precisions
        assert set(re.findall(r"-o build/emulated/train-(\w+)", made)) == set(precisions)
        assert ("build/test/fuzz/" in made, "build/test/asan/train" in made) == 2 * (bool(arguments),)


def test_cuda_build_compiles_for_two_architectures(dry_make):
    built = codes(dry_make("DEVICE=cpu", "cuda-build"))
    assert built == 2 * ["sm_80", "sm_90a", "compute_80", "compute_90a"]  # test/gpu runs their PTX
    assert codes(dry_make("DEVICE=cpu", "cuda-build", "CUDA_ARCH=86")) == 2 * ["sm_86", "compute_86"]


# ---- what is missing on a machine


@pytest.fixture
def bare_make(tmp_path):
    """make on a machine with only a shell, a few tools, and the programs that a test fakes."""
    for name in ("sh", "grep", "printf", "mkdir", "sed"):
        (tmp_path / "tools").mkdir(exist_ok=True)
        (tmp_path / "tools" / name).symlink_to(shutil.which(name))

    def run(*arguments, programs=(), code=2):
        """What make prints on stderr; `programs`: their names and scripts."""
        for name, script in dict(programs).items():
            executable(tmp_path / "programs" / name, f"#!/bin/sh\n{script}\n")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        ran = subprocess.run([shutil.which("make"), "DEVICE=cpu", *arguments], cwd=ROOT, capture_output=True, text=True,
                             timeout=120, env=clean | {"PATH": f"{tmp_path / 'programs'}{os.pathsep}{tmp_path / 'tools'}"})
        assert ran.returncode == code, ran.stdout + ran.stderr
        return ran.stderr

    return run


USER, ROOT_USER = {"id": "echo 1000"}, {"id": "echo 0"}
THERE = {"dpkg-query": 'case "$*" in *libdnnl-dev|*zlib1g-dev) exit 1 ;; *) echo install ok installed ;; esac'}
ASKS = "ask for these packages of Debian, or what your system calls them: libdnnl-dev zlib1g-dev\n"


@pytest.mark.parametrize("programs, said", [
    (USER | {"apt-get": ""}, "make deps: you are not root, and there is no sudo: " + ASKS),
    (USER | {"apt-get": "", "sudo": "exit 1"}, "make deps: apt-get failed: " + ASKS),
    (ROOT_USER | {"apt-get": "exit 100"}, "make deps: apt-get failed: " + ASKS),
    (ROOT_USER, "make deps: there is no apt-get here: " + ASKS),
], ids=["no sudo", "sudo refuses", "apt-get fails", "no apt-get"])
def test_deps_that_cannot_be_installed_are_named(bare_make, programs, said):
    assert said in bare_make("deps", programs=THERE | programs)


def test_deps_are_installed_by_who_may(bare_make, tmp_path):
    note = f'echo "$*" >> {tmp_path}/asked'
    bare_make("deps", programs=THERE | USER | {"sudo": '"$@"', "apt-get": note}, code=0)
    assert (tmp_path / "asked").read_text() == "update -qq\ninstall -y -qq libdnnl-dev zlib1g-dev\n"
    bare_make("deps", programs={"dpkg-query": "echo install ok installed", "apt-get": "exit 1"} | USER, code=0)


@pytest.mark.parametrize("target, says", [("build/cpu-fp32/train", "make deps"), ("build/test/fast/test_disk", "make test-deps")])
def test_a_missing_header_is_said_before_the_compiler_says_it(bare_make, target, says):
    error = bare_make("-W", "Makefile", target, "CXX=compiler", programs={
        "compiler": f'case "$*" in *" -E "*|"-E "*) exec {shutil.which("g++")} -nostdinc -I. "$@" ;; *) echo COMPILED >&2 ;; esac'})
    assert "missing: CLI/CLI.hpp nlohmann/json.hpp toml++/toml.h pcre2.h" in error and f"({says} installs what is missing)" in error
    assert "COMPILED" not in error
    assert f"there is no nothing: {says} installs what is missing" in bare_make("-W", "Makefile", target, "CXX=nothing")


def test_a_venv_that_cannot_be_made():
    with tempfile.TemporaryDirectory() as name:  # other users cannot read pytest's folders
        folder = pathlib.Path(name)
        (folder / "dev").mkdir()
        for file in ("venv.sh", "requirements.txt", "requirements-alone.txt"):
            shutil.copy(ROOT / "dev" / file, folder / "dev" / file)
        folder.chmod(0o555)
        nobody = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
        ran = subprocess.run(["sh", folder / "dev" / "venv.sh"], capture_output=True, text=True, timeout=60, **nobody)
        folder.chmod(0o755)
    assert ran.returncode == 1 and not ran.stdout
    assert ran.stderr == f"venv.sh: cannot write in {folder}, where Python's packages go\n"


@pytest.fixture
def venv_script(tmp_path):
    """Runs dev/venv.sh in a folder of its own, with a Python that makes environments whose pip only prints its arguments."""
    (tmp_path / "dev").mkdir()
    for file in ("venv.sh", "requirements.txt", "requirements-alone.txt"):
        shutil.copy(ROOT / "dev" / file, tmp_path / "dev" / file)
    executable(tmp_path / "bin/pip", "#!/bin/sh\n[ \"$3\" = --version ] || echo \"$*\"\n")
    executable(tmp_path / "bin/python3", "#!/bin/sh\n[ \"$2\" != venv ] || { mkdir -p .venv/bin; cp bin/pip .venv/bin/python; }\n")
    return lambda: subprocess.run(["sh", tmp_path / "dev/venv.sh"], capture_output=True, text=True, timeout=60,
                                  env={**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"})


def test_a_venv_says_first_how_much_it_downloads(venv_script):
    """Before anything is installed."""
    ran = venv_script()
    first, *installs = ran.stdout.splitlines()
    assert re.fullmatch(r"venv\.sh: installing .* downloads about [\d.]+ GB, .* takes [\d.]+ GB there", first), ran.stdout + ran.stderr
    assert ran.returncode == 0 and [line.split()[:3] for line in installs] == [["-m", "pip", "install"]] * 2
    again = venv_script()
    assert again.returncode == 0 and not again.stdout + again.stderr


def test_a_venv_whose_making_was_interrupted_is_made_again(venv_script, tmp_path):
    executable(tmp_path / ".venv/bin/python", "#!/bin/sh\necho No module named pip >&2\nexit 1\n")
    ran = venv_script()
    assert ran.returncode == 0 and not ran.stderr
    assert [line.split()[:3] for line in ran.stdout.splitlines()[1:]] == [["-m", "pip", "install"]] * 2


# ---- the tests themselves


def test_no_test_file_imports_another():
    """What several need is in modules like trainer_runs.py, so that each can be renamed, split and read alone."""
    files = sorted((ROOT / "test").glob("*.py"))
    importing = [path.name for path in files
                 if re.search(r"^ *(from|import) test_|^import .*, test_", path.read_text(), re.MULTILINE)]
    assert len(files) > 50 and not importing
