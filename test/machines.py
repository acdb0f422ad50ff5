"""Several machines that are simulated on this one: MPI's launcher reaches each through an agent that gives it a host name of its
own and, in a Networked, a network namespace. Both are root's."""

import pathlib
import shutil
import subprocess

import pytest
from trainer_runs import IS_MPICH

NETWORK = "10.77.0"
# mpirun calls it as `agent HOST COMMAND ...` to start its daemon on a host. Options of ssh come before the host.
AGENT = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
number=${1##*.}; shift
exec %s unshare --uts sh -c "hostname machine$number; $*"
"""


def has_means(*command):
    return shutil.which(command[0]) is not None and subprocess.run(command, capture_output=True).returncode == 0


def need_machines():
    """Skips a test where machines cannot be simulated."""
    if IS_MPICH:
        pytest.skip("the agent is for OpenMPI's launcher")
    if not has_means("unshare", "--uts", "true"):
        pytest.skip("host names are root's")


def need_networks():
    if has_means("ip", "-V"):
        subprocess.run(["ip", "netns", "del", "machine0"], capture_output=True)  # of a run that was killed
    if not has_means("ip", "netns", "add", "machine0"):
        pytest.skip("network namespaces are root's")
    subprocess.run(["ip", "netns", "del", "machine0"], check=True)
    if not has_means("tc", "-V"):
        pytest.skip("no tc")


class Machines:
    """A command that starts `ranks` on each of `machines`."""

    def __init__(self, folder, ranks, network="lo", inside=""):
        agent = folder / "agent"
        agent.write_text(AGENT % inside)
        agent.chmod(0o755)
        hosts = ",".join(f"{NETWORK}.{number}:{count}" for number, count in enumerate(ranks, 1))
        self.count = sum(ranks)
        self.command = ["mpirun", "--mca", "plm_rsh_agent", str(agent), "--mca", "btl_tcp_if_include", network, "--mca",
                        "oob_tcp_if_include", network, "--host", hosts, "--oversubscribe", "--bind-to", "none", "-n", str(self.count)]

    def environment(self, train):
        return train.environment | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

    def run(self, train, *options, cwd):
        result = subprocess.run([*self.command, train.path, *map(str, options)], cwd=cwd, env=self.environment(train),
                                capture_output=True, timeout=300)
        assert result.returncode == 0, result.stderr.decode()
        return result.stdout


def ranks_in(folder, train):
    """The trainer's processes in a folder. They are no children of mpirun's."""
    def is_one(process):
        try:
            return (process / "exe").samefile(train.path) and (process / "cwd").samefile(folder)
        except OSError:  # it has ended, or is another user's
            return False
    return [int(process.name) for process in pathlib.Path("/proc").glob("[0-9]*") if is_one(process)]


class Networked(Machines):
    """Machines in network namespaces, with the same number of ranks each. The bridge that connects them, and the launcher, are in
    machine0: so other runs on this machine do not see these networks."""

    def __init__(self, folder, machines, ranks=1):
        super().__init__(folder, (ranks,) * machines, f"{NETWORK}.0/24", "ip netns exec machine$number")
        self.command = ["ip", "netns", "exec", "machine0", *self.command]
        self.numbers = range(1, machines + 1)

    def __enter__(self):
        self.end()
        self.ip("netns add machine0", "-n machine0 link set lo up", "-n machine0 link add bridge type bridge",
                "-n machine0 link set bridge up", f"-n machine0 addr add {NETWORK}.254/24 dev bridge")
        for n in self.numbers:
            self.ip(f"netns add machine{n}", f"-n machine0 link add to_machine{n} type veth peer name eth0 netns machine{n}",
                    f"-n machine0 link set to_machine{n} master bridge up", f"-n machine{n} link set lo up",
                    f"-n machine{n} addr add {NETWORK}.{n}/24 dev eth0", f"-n machine{n} link set eth0 up")
        return self

    def __exit__(self, *_):
        self.end()

    def end(self):
        for n in (*self.numbers, 0):
            subprocess.run(["ip", "netns", "del", f"machine{n}"], capture_output=True)

    def ip(self, *commands):
        for command in commands:
            subprocess.run(["ip", *command.split()], check=True)

    def connect(self, number, state="up"):
        """Connects a machine to the others, or with "down" cuts its link."""
        self.ip(f"-n machine0 link set to_machine{number} {state}")

    def processes(self):
        """All that run in the networks: the launcher, its daemons, ranks."""
        pids = [subprocess.run(["ip", "netns", "pids", f"machine{n}"], capture_output=True, text=True, check=True).stdout.split()
                for n in (0, *self.numbers)]
        return [int(pid) for pid in sum(pids, [])]

    def limit(self, rate):
        for n in self.numbers:
            subprocess.run(f"tc -n machine{n} qdisc replace dev eth0 root tbf rate {rate} burst 256k latency 20ms".split(), check=True)
