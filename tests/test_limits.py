"""What a pool asks of the system: memory, descriptors, no port and no name."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys

import numpy as np
import psutil
import pytest

from helpers import make, run_python, write_script
from instep._memory import Block
from losses import toy

# Memory

LARGE = """
import os
import numpy as np
import instep

def fun(w, x):
    return np.mean(w) * np.mean(x), np.full_like(w, np.mean(x) / len(w))

size = os.statvfs("/dev/shm")
assert size.f_blocks * size.f_frsize == 1 << 20, "not the small one"
w, x = np.ones(1 << 19), np.ones((4, 1 << 18))  # 4 and 8 MiB
with instep.numpy.value_and_grad(fun, workers=2) as pool:
    print(pool(w, x)[0])
"""


def test_a_batch_may_be_larger_than_dev_shm(tmp_path):
    command = [shutil.which("unshare") or "false", "--map-root-user", "--mount"]
    command += ["sh", "-ec", 'mount -t tmpfs -o size=1m none /dev/shm; exec "$@"', "-"]
    if subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("no mount of one's own here")
    result = subprocess.run(
        [*command, sys.executable, write_script(tmp_path, LARGE)],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (result.stdout, result.stderr) == ("1.0\n", "")


@pytest.fixture
def block():
    block = Block.create()
    yield block
    block.close()


def test_shared_memory_lies_in_no_file_system_and_is_the_users_alone(block):
    status = os.fstat(block.fd)
    assert status.st_dev != os.stat("/dev/shm").st_dev
    assert (status.st_uid, status.st_mode & 0o777) == (os.geteuid(), 0o600)
    assert status.st_nlink == 0


@pytest.fixture
def address_space():
    """Sets how much more memory this process may map, for a while."""
    before = resource.getrlimit(resource.RLIMIT_AS)

    def limit(more):
        used = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (used + more, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_block_that_could_not_be_mapped_grows_later(block, address_space):
    block.at_least(8)
    address_space(1 << 24)
    for _ in range(2):
        with pytest.raises(MemoryError, match="no room for 67,108,864 bytes"):
            block.at_least(1 << 26)
    assert len(block.at_least(8)) < 1 << 20
    address_space(1 << 28)
    assert len(block.at_least(1 << 26)) == 1 << 26


def test_a_pool_without_address_space_says_so_and_works_on(address_space):
    fine, large = np.ones(8), np.ones(1 << 23)
    with make(toy, workers=2) as pool:
        expected = pool(np.float64(1), fine)
        address_space(1 << 24)
        for _ in range(2):
            with pytest.raises(MemoryError, match="no room for 67,1"):
                pool(np.float64(1), large)
            assert pool(np.float64(1), fine) == expected
        address_space(1 << 28)
        assert pool(np.float64(1), large) == (1.0, 1.0)


# Descriptors

DESCRIPTORS = """
import errno, gc, os, resource
import numpy as np
import psutil
import instep

def fun(w, x):
    return np.mean(w * x), np.mean(x)

def left():
    gc.collect()
    return len(os.listdir("/proc/self/fd")), psutil.Process().children(recursive=True)

rows, texts = np.arange(16.0), set()
before, (_, most) = left(), resource.getrlimit(resource.RLIMIT_NOFILE)
for limit in range(before[0] + 1, 25):
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    try:
        instep.numpy.value_and_grad(fun, workers=8)
    except OSError as error:
        assert error.errno == errno.EMFILE
        texts.add(str(error))
    else:
        raise AssertionError(f"8 workers within {limit} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    assert left() == before, (limit, left(), before)

with instep.numpy.value_and_grad(fun, workers=8) as pool:
    print(pool(1.0, rows))
    os.kill(pool.statistics().pids[0], 9)
    resource.setrlimit(resource.RLIMIT_NOFILE, (12, most))
    try:
        while pool.statistics().workers_lost == 0:
            pool(1.0, rows)
    except OSError as error:
        texts.add(str(error))
    else:
        raise AssertionError("a worker without descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    while len(pool.statistics().pids) < 8:
        assert pool(1.0, rows) == (7.5, 7.5)
print(*texts, sep="\\n")
"""


def test_too_few_descriptors_are_an_error_that_leaves_nothing(tmp_path):
    result = run_python("-W", "error", write_script(tmp_path, DESCRIPTORS))
    assert (result.returncode, result.stderr) == (0, "")
    answer, *texts = result.stdout.splitlines()
    assert answer == "(np.float64(7.5), np.float64(7.5))"
    for text in texts:
        assert "Too many open files" in text
        assert "ulimit -n" in text


# The network

PORTS = """
import os
import numpy as np
import psutil
import instep

def fun(w, x):
    template = psutil.Process(os.getppid())
    family = [template.parent(), template, *template.children()]
    ports = [port for one in family for port in one.net_connections(kind="inet")]
    return (w * np.mean(x), instep.Sum(len(ports))), np.mean(x)

with instep.numpy.value_and_grad(fun, workers=2, has_aux=True) as pool:
    print(pool(1.0, np.arange(4.0))[0][1])
"""


def test_no_process_of_a_pool_opens_a_port(tmp_path):
    result = run_python(write_script(tmp_path, PORTS))
    assert (result.stdout, result.stderr) == ("0\n", "")
