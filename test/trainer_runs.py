"""Shared by tests: the trainer's binaries, running them, small models and data. model_files.py, adapter_files.py and others
have what fewer tests share."""

import contextlib
import ctypes
import functools
import json
import mmap
import os
import pathlib
import re
import resource
import subprocess
import threading
import time

import make_model
import numpy as np
import pytest

IS_MPICH = "MPIRUN" in os.environ  # make test-mpich

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Waiting threads sleep: with more threads than free cores, a barrier of spinning threads takes a time slice.
ENVIRONMENT = {**os.environ, "OMP_WAIT_POLICY": "passive"}


@contextlib.contextmanager
def small_disk(path, size):
    """A folder on a disk of its own with a size like "1m". Skips the test if the user may not make one."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("only root can make a small disk")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def cached_bytes(*paths):
    """The bytes of these files in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
    libc.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t
    libc.mincore.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p
    pages = 0
    for path in paths:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            there = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
            at = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
            if libc.mincore(at, size, there):
                raise OSError(ctypes.get_errno(), "mincore")
            libc.munmap(at, size)
            pages += sum(byte & 1 for byte in there.raw)
    return pages * mmap.PAGESIZE


def drop_from_cache(*paths):
    """Drops these files from the page cache. Skips the test if that is impossible, as in file systems in
    memory."""
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_bytes(*paths):
        pytest.skip("a file system that keeps pages")


class Train:
    """One binary of the trainer."""

    def __init__(self, path, **environment):
        self.path = str((ROOT / path).resolve())
        self.environment = ENVIRONMENT | environment
        plan = json.loads(self("--model", "d1", "--plan", "json").stdout)
        self.precision, self.device = plan["precision"], plan["device"]
        # On the GPU that test/gpu emulates, which is slow. Tests give it smaller shapes, or are marked
        # not_played.
        self.is_played = self.device == "cuda" and pathlib.Path(self.path).parent.name.startswith("emulated")

    def __str__(self):
        return f"{self.device}-{self.precision}"

    def command(self, *arguments):
        return [self.path, *map(str, arguments)]

    def start(self, *arguments, cwd=None, **popen):
        popen = {"stdout": subprocess.PIPE} | popen
        return subprocess.Popen(self.command(*arguments), cwd=cwd, env=self.environment, **popen)

    def __call__(self, *arguments, cwd=None, code=0, minutes=2):
        """Runs the binary to its end. stdout stays bytes, because samples of byte models need not be text."""
        result = subprocess.run(self.command(*arguments), cwd=cwd, env=self.environment, capture_output=True,
                                timeout=60 * minutes)
        assert result.returncode == code, (arguments, result.returncode, result.stdout[-2000:], result.stderr)
        return result

    def plan(self, *arguments):
        return plan_of(self(*arguments, "--plan", "json").stdout)


def plan_of(text):
    """The plan in the output of --plan json, without the configuration that it is of."""
    plan = json.loads(text)
    del plan["run"]
    return plan


@contextlib.contextmanager
def running(train, *arguments, **popen):
    """Starts a run that is killed at the end of the block, or after two minutes."""
    process = train.start(*arguments, **popen)
    limit = threading.Timer(120, process.kill)
    limit.start()
    try:
        yield process
    finally:
        limit.cancel()
        process.kill()
        for stream in (process.stdout, process.stderr):
            if stream:
                stream.close()
        process.wait()


def cpu_seconds(run):
    """The processor time of the processes that run() starts and waits for. A bound on it also holds on a busy
    machine."""
    def spent():
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime
    before = spent()
    run()
    return spent() - before


def wait_for_line(process, pattern):
    for line in process.stdout:
        if re.search(pattern, line):
            return line
    raise AssertionError(f"the run ended without {pattern}")


def ranks_of(process):
    """The ranks' processes: they run the program of the process that was started, below MPI's launcher."""
    program = pathlib.Path(f"/proc/{process.pid}/exe").readlink()

    def below(pid):
        for child in map(int, pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if pid != process.pid and pathlib.Path(f"/proc/{child}/exe").readlink() == program:
                    yield child
                else:
                    yield from below(child)
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return list(below(process.pid))
    return []


def processes_below(pid):
    """The processes that this one has started, those that these have started, and so on."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for child in map(int, pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            yield child
            yield from processes_below(child)


def nameless_files(process):
    """The open files without a name that a run has made in the folder for temporary files, so not its standard streams."""
    folder = re.escape(os.environ.get("TMPDIR") or "/var/tmp")
    return [file for file in pathlib.Path(f"/proc/{process.pid}/fd").iterdir()
            if int(file.name) > 2 and re.match(rf"{folder}/(train-\w+|#\d+) \(deleted\)$", os.readlink(file))]


def shared_memory_of(ranks):
    """The files in /dev/shm that these processes have mapped. MPICH's lose their names as soon as they are there."""
    files = set()
    for rank in ranks:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            files.update(re.findall(r"(/dev/shm/(?!mpich)\S+)", pathlib.Path(f"/proc/{rank}/maps").read_text()))
    return files


def unlike_ranks(folder, script):
    """The environment of a run whose ranks each run this line of a shell first; RANK is their number."""
    if IS_MPICH:
        pytest.skip("the agent is for OpenMPI's launcher")
    agent = executable(folder / "rank_agent", f'#!/bin/sh\nRANK=$OMPI_COMM_WORLD_RANK\n{script}\nexec "$@"\n')
    return {"OMPI_MCA_orte_fork_agent": str(agent)}


def wait_for_end(ranks):
    """Waits until these processes have ended; they must within 20 seconds, even on a busy machine: ranks whose network
    is cut have ten to tell MPI (MpiEngine::end_all)."""
    end = time.monotonic() + 20
    while any(pathlib.Path(f"/proc/{rank}").exists() for rank in ranks):
        assert time.monotonic() < end
        time.sleep(0.05)


@functools.cache
def binaries():
    """The binaries in TRAIN_BINARIES."""
    paths = os.environ.get("TRAIN_BINARIES", "build/cpu-fp32/train build/cpu-bf16/train").split()
    return [Train(path) for path in paths]


def make(folder, *options):
    """Makes the folder of a random model."""
    make_model.main(["--out", str(folder), *map(str, options)])
    return folder


def write_shard(path, tokens):
    header = np.zeros(256, dtype=np.int32)
    header[:3] = 20240520, 1, len(tokens)
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype=np.uint16).tobytes())
    return path


def random_tokens(vocab, count, seed=0):
    """Tokens that can be learned: each is a function of the one before, plus noise from 0 to 3."""
    noise = np.random.default_rng(seed).integers(0, 4, count)
    tokens = np.empty(count, dtype=np.int64)
    token = 0
    for i in range(count):
        token = (7 * token + 3 + noise[i]) % vocab
        tokens[i] = token
    return tokens


def write_text(path, size=4000):
    """Writes text of the project's own, which every tokenizer can read."""
    path.write_bytes(pathlib.Path(__file__).read_bytes().ljust(size, b"\n")[:size])
    return path


def read_log(path):
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


def figures(lines):
    """A log without its times: what must be equal in equal runs."""
    return [{key: value for key, value in line.items() if key not in ("ms", "tokens_per_second", "waited_ms")} for line in lines]


def saved_bytes(folder):
    """The files of a save that hold numbers, and its settings: a model's or an adapter's."""
    folder = pathlib.Path(folder)
    kind = ("adapter_config.json", "adapter_model.safetensors")
    names = kind if (folder / kind[0]).exists() else ("config.json", "model.safetensors")
    return {name: (folder / name).read_bytes() for name in (*names, "trainer_state.safetensors")}


def listing(folder):
    """Everything in a folder, to check that nothing was written."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
            for path in sorted(pathlib.Path(folder).rglob("*"))}


def taken_and_planned(printed):
    """The MiB of the device that a run took and had planned, which its last line says."""
    return map(float, re.search(r"taken from the device: ([\d.]+) MiB; planned: ([\d.]+)", printed).groups())


def peak(train, *options, line):
    """The peak memory, in bytes, of a run until it prints a line that starts like this."""
    with running(train, *options) as process:
        wait_for_line(process, line)
        status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
        return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])


# What a run would write if the mistake were not found. None of it may exist afterwards.
GOOD = {"--model": "model", "--data": "text", "--batch": 2, "--seq-len": 24, "--steps": 2, "--sample tokens": 4,
        "--out": "out", "--log": "log"}


def command(options):
    """Options from a dict; None leaves one out, True is a flag, and "--offload weights" is a key of --offload."""
    parts = []
    for name, value in (GOOD | options).items():
        option, _, key = name.partition(" ")
        if value is not None:
            parts += [option] if value is True else [option, f"{key}={value}" if key else str(value)]
    return parts


def error_line(train, *options, cwd=None):
    """The one line of a run that ends with a mistake of its user."""
    error = train(*options, cwd=cwd, code=2).stderr.decode()
    assert error.startswith("train: ") and error.count("\n") == 1 and error.endswith("\n"), error
    return error


def refused(train, folder, options, *named):
    """Runs with these options in place of the good ones; returns the line."""
    before = listing(folder)
    error = error_line(train, *command(options), cwd=folder)
    for name in named:
        assert name in error, error
    assert listing(folder) == before
    return error


def by_key(lines, key):
    return {line["step"]: line[key] for line in lines if key in line}


def sampled(train, *arguments, cwd):
    """A prompt and its likeliest continuation, in bytes."""
    text = train(*arguments, "--sample", "temperature=0", cwd=cwd).stdout
    of_training = re.search(rb"--- sample after \d+ steps ---\n(.*)\n---\n$", text, re.DOTALL)
    return of_training[1] if of_training else text.removesuffix(b"\n")


def losses(log):
    return [line[key] for line in log for key in ("loss", "val_loss") if key in line]


def refused_by_script(script, capsys, arguments, *named):
    """A module of dev/ ends with one line that names what is wrong."""
    with pytest.raises(SystemExit) as ended:
        script.main(arguments)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.startswith(f"{script.__name__}.py: ") and error.count("\n") == 1, error
    for name in named:
        assert name in error, error


def formats_probe(*arguments, data=b"", code=0):
    """The bytes of an answer of formats_probe.cpp, or its error message if one is expected."""
    result = subprocess.run([ROOT / "build/test/fast/formats_probe", *map(str, arguments)], input=data, capture_output=True,
                            timeout=300)
    assert result.returncode == code, result.stderr
    return result.stderr.decode() if code else result.stdout


def executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path
