"""Shared by the benchmarks: running and measuring processes, describing the machine, tables, and files of
results."""

import argparse
import array
import datetime
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
MIB = 1 << 20
# How long waiting threads spin, the same for all peers; ./train sets it by itself.
ENVIRONMENT = {"GOMP_SPINCOUNT": "10000"}
LOAD_BEFORE = os.getloadavg()[0]  # the load of other work, which spoils times


class PeerFailed(Exception):
    """A process failed; the text is one line."""


class OptionParser(argparse.ArgumentParser):
    """Reports a mistake in one line."""

    def error(self, message):
        fail(message)


def fail(message):
    """Ends the program for a user's mistake: one line, exit code 2."""
    print(f"{os.path.basename(sys.argv[0])}: {message}", file=sys.stderr)
    sys.exit(2)


def positive(text):
    """An argparse type: a whole number above 0."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


positive.__name__ = "int"


def result_path(text):
    """An argparse type: a page of results."""
    path = pathlib.Path(text)
    if path.suffix != ".md":
        raise argparse.ArgumentTypeError(f"{text} must end in .md")
    return path


def shown(command):
    """A command as a person would type it in the repository's root."""
    words = []
    for word in map(str, command):
        for folder, name in ((os.environ.get("LLMC"), "$LLMC"), (str(ROOT), "")):
            if folder and word.startswith(folder.rstrip("/") + "/"):
                word = (f"{name}/" if name else "") + word[len(folder.rstrip("/")) + 1:]
        words.append("python" if word == sys.executable else word)
    return " ".join(words)


def run(command, environment=None, timeout=3600, cwd=None, enough=None):
    """Runs a command; returns its output and its peak resident memory in bytes.

    If `enough` is given, the command is ended once enough(output so far) is true. Raises PeerFailed if it
    cannot be started, ends with an error or takes longer than `timeout` seconds.
    """
    command = [str(word) for word in command]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        def text_of(file):
            return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")

        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, cwd=cwd,
                                       env={**os.environ, **(environment or {})})
        except OSError as error:
            raise PeerFailed(f"{shown(command[:1])}: {error.strerror}") from None
        deadline, stopped, late, pid = time.monotonic() + timeout, False, False, 0
        try:
            while not pid:
                time.sleep(0.02)
                pid, status, usage = os.wait4(process.pid, os.WNOHANG)
                late = late or time.monotonic() > deadline
                if not pid and not stopped and (late or enough and enough(text_of(out))):
                    process.kill()
                    stopped = True
        finally:
            if pid:
                process.returncode = os.waitstatus_to_exitcode(status)
            else:
                process.kill()
        if late:
            raise PeerFailed(f"{shown(command)}: not done after {timeout} s")
        if process.returncode and not stopped:
            said = text_of(errors).strip().splitlines() or [f"exit code {process.returncode}"]
            if process.returncode < 0:
                said.append(f"ended by {signal.Signals(-process.returncode).name}")
            raise PeerFailed(said[-1] if process.returncode == 2 else f"{shown(command)}: {said[-1]}")
        return text_of(out), usage.ru_maxrss * 1024


def last_json(output, command):
    """The last line of a process's output that is a JSON object, or all of the output."""
    for text in (output, *reversed(output.splitlines())):
        try:
            found = json.loads(text)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    raise PeerFailed(f"{shown(command)}: printed no JSON")


def json_of(command, timeout=3600):
    """The JSON that a command prints, as last_json() finds it. Raises as run() does."""
    return last_json(run(command, ENVIRONMENT, timeout)[0], command)


def output_of(*command):
    """What a command prints, stripped; empty if it fails or does not exist."""
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def commit_of(folder):
    """The commit of a checkout, with + if files were changed since."""
    commit = output_of("git", "-C", str(folder), "rev-parse", "--short", "HEAD")
    if not commit or output_of("git", "-C", str(folder), "rev-parse", "--show-prefix"):
        return "unknown (no git checkout)"
    return commit + ("+" if output_of("git", "-C", str(folder), "status", "--porcelain", "-uno") else "")


def ask_gpu(fields):
    """nvidia-smi's values of the GPU that CUDA uses first, as far as the environment tells which that is."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    same_numbers = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"  # CUDA's default order is another one
    one = [f"--id={chosen}"] if chosen.startswith("GPU-") or (chosen and same_numbers) else []
    said = output_of("nvidia-smi", *one, f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    return said.splitlines()[0] if said else ""


def gpu_answers():
    return output_of("nvidia-smi", "-L").startswith("GPU")


def cores():
    """The number of CPUs that this process may run on."""
    return len(os.sched_getaffinity(0))


def cpu_name():
    try:
        found = re.search(r"model name\s*:\s*(.+)", pathlib.Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found.group(1) if found else "unknown"


def onednn_version():
    """The version in the headers that the trainer is built with."""
    for folder in ("/usr/include/oneapi/dnnl", "/usr/local/include/oneapi/dnnl"):
        try:
            text = (pathlib.Path(folder) / "dnnl_version.h").read_text()
        except OSError:
            continue
        return ".".join(re.search(rf"define DNNL_VERSION_{part}\s+(\d+)", text).group(1)
                        for part in ("MAJOR", "MINOR", "PATCH"))
    return "unknown"


def nvcc_version():
    nvcc = next((p for p in ("/usr/local/cuda/bin/nvcc", shutil.which("nvcc")) if p and os.path.exists(p)), None)
    found = re.search(r"release [\d.]+, (V[\d.]+)", output_of(nvcc, "--version")) if nvcc else None
    return found.group(1) if found else "unknown"


def machine(device):
    """{what: in words} of the device and of the tools that build the trainer."""
    facts = {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
             "commit": commit_of(ROOT), "CPU": f"{cpu_name()}, {cores()} cores",
             "load of the machine before": f"{LOAD_BEFORE:.1f}"}
    if device == "cuda":
        facts |= {"GPU, MiB, driver": ask_gpu("name,memory.total,driver_version") or "unknown", "nvcc": nvcc_version()}
    else:
        facts |= {"compiler": (output_of("g++", "--version").splitlines() or ["unknown"])[0],
                  "oneDNN": onednn_version()}
    return facts


def markdown(header, rows):
    """The lines of a table; the first column is text, the others are numbers."""
    return ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|",
            *("| " + " | ".join(row) + " |" for row in rows)]


def facts_list(facts):
    return [f"- {what}: {said}" for what, said in facts.items()]


def add_out(parser, default=None, said=None):
    """The options that say where results go: --out, a page, and --raw, a file for all that was measured."""
    said = said or (default and default.relative_to(ROOT))
    parser.add_argument("--out", type=result_path, default=default, help=f"a page of results (default: {said})")
    parser.add_argument("--raw", type=pathlib.Path, help="a file for all that was measured, as JSON")


def write(path, lines):
    """Writes a whole page."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
    except OSError as error:
        fail(f"--out {path}: {error.strerror}")


def write_section(path, title, heading, lines):
    """Writes a section of a page: it replaces the section with this heading, or becomes the last one. The
    rest of the page is kept. A page that is not there begins with `title`."""
    try:
        old = path.read_text().rstrip("\n").split("\n") if path.exists() else [f"# {title}"]
    except (OSError, UnicodeDecodeError) as error:
        fail(f"--out {path}: {getattr(error, 'strerror', None) or error}")
    begin = old.index(f"## {heading}") if f"## {heading}" in old else len(old)
    end = next((i for i in range(begin + 1, len(old)) if old[i].startswith("## ")), len(old))
    before, after = ("\n".join(part).strip("\n") for part in (old[:begin], old[end:]))
    section = "\n".join([f"## {heading}", "", *lines]).strip("\n")
    write(path, ["\n\n".join(part for part in (before, section, after) if part)])


def write_raw(path, raw):
    """Writes what was measured, if a file for it was named."""
    if path:
        try:
            path.write_text(json.dumps(raw, indent=1) + "\n")
        except OSError as error:
            fail(f"--raw {path}: {error.strerror}")


def write_tokens(path, count):
    """Writes a shard of random tokens of GPT-2's vocabulary, as ./train and llm.c read them."""
    tokens = array.array("H", random.Random(1).choices(range(50257), k=count))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(array.array("i", [20240520, 1, count] + [0] * 253).tobytes() + tokens.tobytes())
