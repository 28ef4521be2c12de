"""`instep demo`, run as a command: what it prints, draws and leaves behind."""

from __future__ import annotations

import dataclasses
import os
import pty
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

import instep
from conftest import wait_until
from helpers import run_python
from instep._demo.measure import Probe, Results, Run
from instep._demo.report import verdict
from instep._demo.trainer import PoolSize

COMMAND = [sys.executable, "-m", "instep", "demo"]
NUMPY = ["--framework", "numpy", "--steps", "30"]


def run_demo(folder, *arguments, **environment):
    """The demo's result, in a folder of its own."""
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=110,
    )


def check_report(output):
    """Losses that agree, small differences, equal bits."""
    one, pooled = map(float, re.search(r"final loss +(\S+) +(\S+)", output).groups())
    assert pooled == pytest.approx(one, rel=1e-4)
    difference = float(re.search(r"gradients differ by +(\S+)", output)[1])
    assert difference < 1e-4
    digests = re.findall(r"\b[0-9a-f]{16}\b", output)
    # One process and one shard; then 1, 2 and 4 workers at four shards.
    assert digests[0] == digests[1] != digests[2] == digests[3] == digests[4]
    assert re.search(r"equal bits +yes", output)


def test_with_numpy_it_compares_and_draws(tmp_path):
    result = run_demo(tmp_path, *NUMPY, "--workers", "3", "--shards", "5")
    assert (result.returncode, result.stderr) == (0, "")
    check_report(result.stdout)
    assert "3 workers, 5 shards" in result.stdout
    assert os.listdir(tmp_path) == ["parabola.png"]
    assert (tmp_path / "parabola.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.guard(120)
def test_with_tensorflow_it_compares_and_draws(tmp_path):
    result = run_demo(tmp_path, "--steps", "20", "--output", "fit.png")
    assert (result.returncode, result.stderr) == (0, "")
    check_report(result.stdout)
    assert os.listdir(tmp_path) == ["fit.png"]


def test_piped_output_is_plain_and_fits_narrow_columns(tmp_path):
    result = run_demo(tmp_path, *NUMPY, COLUMNS="40", PYTHONIOENCODING="ascii")
    lines = result.stdout.splitlines()
    assert result.returncode == 0
    assert max(map(len, lines)) <= 40
    assert all(line.isprintable() for line in lines)
    assert any(re.match(r" +30  loss \S+ +\S+ steps/s", line) for line in lines)


def test_a_terminal_gets_one_bar_per_run(tmp_path):
    terminal, program_end = pty.openpty()
    environment = {**os.environ, "COLUMNS": "80", "TERM": "xterm"}
    with subprocess.Popen(
        [*COMMAND, *NUMPY], cwd=tmp_path, env=environment, stdout=program_end
    ) as process:
        os.close(program_end)
        output = read_all(terminal).decode()
    assert process.returncode == 0
    ends = re.findall(r"30/30.*?loss \S+ +\S+ steps/s *\r\n", output)
    assert len(ends) == 5  # the fit without and with a pool, and three for the bits
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h")  # cursor off, on


def read_all(terminal):
    """What a program writes to its terminal until it ends."""
    output = b""
    with open(terminal, "rb", buffering=0) as file:
        try:
            while part := file.read(4096):
                output += part
        except OSError:  # the way in which Linux says that the other end is closed
            pass
    return output


@pytest.mark.parametrize("moment", ["one process", "4 workers, 4 shards"])
def test_ctrl_c_ends_it_quietly_and_leaves_nothing(tmp_path, moment):
    with subprocess.Popen(
        [*COMMAND, "--framework", "numpy", "--steps", "30000"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while not process.stdout.readline().startswith(moment):
            pass
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        time.sleep(0.01)
        process.send_signal(signal.SIGINT)  # by an impatient user, in the clean-up
        assert process.communicate()[1] == ""
    assert process.returncode == 130
    assert len(children) == (5 if "workers" in moment else 0)
    wait_until(
        lambda: not any(child.is_running() for child in children), "a worker is left"
    )
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--workers", "0"], "--workers: '0'; expected a whole number, at least 1"),
        (["--shards", "-1"], "--shards: '-1'; expected a whole number, at least 1"),
        (["--steps", "many"], "--steps: 'many'; expected a whole number, at least 1"),
        (["--framework", "fortran"], "--framework: invalid choice: 'fortran'"),
        (["--output", "no/where.png"], "--output: the folder no does not exist"),
        (["--output", "."], "--output: . is a folder"),
        ([*NUMPY, "--output", "parabola.xyz"], "--output parabola.xyz: the name says"),
    ],
)
def test_a_wrong_call_is_said_in_one_line(tmp_path, arguments, problem):
    result = run_demo(tmp_path, *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert problem in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("library", "extra"),
    [("rich", "report"), ("matplotlib", "report"), ("tensorflow", "tensorflow")],
)
def test_a_missing_library_is_named_with_the_way_to_get_it(library, extra, tmp_path):
    program = (
        f"import sys; sys.modules[{library!r}] = None\n"
        "from instep.__main__ import main; sys.exit(main(['demo']))"
    )
    result = run_python("-c", program, cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr == (
        f"instep: error: instep demo needs {library}, which is not installed here; "
        f"install it with: pip install 'instep[{extra}]'\n"
    )


def test_the_command_line_loads_nothing_before_it_is_needed():
    program = (
        "import sys, instep.__main__ as command; command.make_parser()\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    loaded = run_python("-c", program).stdout.split()
    assert not {"numpy", "tensorflow", "rich", "matplotlib"} & set(loaded)


def test_version_and_help():
    version = run_python("-m", "instep", "--version")
    assert (version.returncode, version.stdout) == (0, f"instep {instep.__version__}\n")
    assert "demo" in run_python("-m", "instep", "--help").stdout
    nothing = run_python("-m", "instep")
    assert (nothing.returncode, nothing.stdout) == (2, "")


def results(speed_of_one, speed_of_pool):
    """Results of made-up runs."""
    probe = Probe([], [])
    one = Run([1.0], speed_of_one, probe, probe, "")
    pooled = dataclasses.replace(one, steps_per_second=speed_of_pool)
    digests = [{"one process": "a", "1 worker": "a"}, {"1 worker": "b"}]
    return Results(PoolSize(2, 3), one, pooled, 1.0, 0.0, digests, 1)


def test_bits_are_equal_if_they_are_in_every_group():
    assert results(1, 1).has_equal_bits
    other = [{"one process": "a", "1 worker": "a"}, {"1 worker": "b", "2 workers": "c"}]
    assert not dataclasses.replace(results(1, 1), digests=other).has_equal_bits


def test_it_says_which_was_faster():
    assert verdict(results(1000, 500)).startswith("One process is 2 times faster")
    assert verdict(results(1000, 2500)) == (
        "2 workers, 3 shards: 2.5 times faster than one process."
    )
