"""A pool works wherever Python code runs, and importing instep does nothing."""

from __future__ import annotations

import ast
import os
import random
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from jupyter_client.manager import start_new_kernel

import instep
from conftest import wait_until
from helpers import make, run_python, write_script
from losses import toy

SCRIPT = """
import numpy as np
import psutil
import instep

def fun(w, x):
    return np.mean(w * x), np.mean(x)

seen = set()
with instep.numpy.value_and_grad(fun, workers=3, shards=4) as pool:
    for step in range(20):
        result = pool(np.float64(2), np.arange(1.0, 51.0))
        children = psutil.Process().children(recursive=True)
        assert len(children) <= 3 + 1, children  # the template is the one
        seen.update(child.pid for child in children)
print(*result, *seen)
"""


def check_output(output):
    """The script's result, and no process of it that lives."""
    loss, grad, *pids = output.split()
    assert (loss, grad) == ("51.0", "25.5")
    assert len(pids) >= 2
    wait_until(
        lambda: not any(psutil.pid_exists(int(pid)) for pid in pids),
        "a process of the script is left",
    )


def test_a_file_without_a_main_guard(tmp_path):
    result = run_python(write_script(tmp_path, SCRIPT))
    assert (result.returncode, result.stderr) == (0, "")
    check_output(result.stdout)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has no -P before")
def test_files_of_the_current_folder_do_not_get_in_the_way(tmp_path):
    for name in ("queue", "numpy", "instep", "losses"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('the wrong module')")
    (tmp_path / "scripts").mkdir()
    script = write_script(tmp_path / "scripts", SCRIPT)
    result = run_python(script, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    check_output(result.stdout)


def test_a_file_with_a_module_beside_it(tmp_path):
    (tmp_path / "model.py").write_text("def double(x):\n    return 2 * x\n")
    text = SCRIPT.replace("import instep", "import instep\nfrom model import double")
    script = write_script(tmp_path, text.replace("np.mean(w * x)", "double(w) * 12.75"))
    result = run_python(script, cwd="/")
    assert (result.returncode, result.stderr) == (0, "")
    check_output(result.stdout)


def test_python_c():
    result = run_python("-c", SCRIPT)
    assert (result.returncode, result.stderr) == (0, "")
    check_output(result.stdout)


def test_standard_input():
    result = run_python("-", input=SCRIPT)
    assert (result.returncode, result.stderr) == (0, "")
    check_output(result.stdout)


@pytest.mark.filterwarnings("default")  # of the kernel's own packages
def test_a_jupyter_kernel():
    manager, client = start_new_kernel()
    try:
        cells = SCRIPT.split("seen = set()")
        outputs = [
            run_cell(client, cells[0]),
            run_cell(client, "seen = set()" + cells[1]),
        ]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()
    check_output("".join(outputs))


def run_cell(client, code):
    """What the cell printed."""
    printed = []

    def note(message):
        content = message["content"]
        assert message["msg_type"] != "error", "\n".join(content["traceback"])
        if message["msg_type"] == "stream":
            printed.append(content["text"])

    reply = client.execute_interactive(code, output_hook=note, timeout=40)
    assert reply["content"]["status"] == "ok"
    return "".join(printed)


def test_a_pool_that_is_never_closed_ends_with_the_script(tmp_path):
    script = SCRIPT.replace("with instep", "if pool := instep").replace(" as pool", "")
    result = run_python(write_script(tmp_path, script))
    assert (result.returncode, result.stderr) == (0, "")
    check_output(result.stdout)


# Threads


def threads_in_workers(environment, options):
    """Of each of four workers: BLAS threads, threads of the process, OMP's limit."""
    script = f"""
import os
import numpy as np
import instep

def fun(w, x):
    from pathlib import Path
    from threadpoolctl import threadpool_info

    x @ np.ones((len(x.T), 300))  # starts the threads there may be
    blas = max(pool["num_threads"] for pool in threadpool_info())
    status = Path("/proc/self/status").read_text()
    threads = int(status.split("Threads:")[1].split()[0])
    return (0.0, [(blas, threads, int(os.environ["OMP_NUM_THREADS"]))]), w * 0

options = dict(workers=4, has_aux=True, {options})
with instep.numpy.value_and_grad(fun, **options) as pool:
    rows = np.ones((4, 300))
    counts = [tuple(map(int, row)) for row in pool(1.0, rows)[0][1]]
    print(pool.statistics().threads, counts)
"""
    variables = {k: v for k, v in os.environ.items() if "_NUM_THREADS" not in k}
    result = run_python("-c", script, env={**variables, **environment})
    assert result.returncode == 0, result.stderr
    limit, counts = result.stdout.split(maxsplit=1)
    return int(limit), ast.literal_eval(counts)


def test_workers_together_use_no_more_threads_than_cores_or_workers():
    limit, counts = threads_in_workers({}, "")
    assert limit == 1
    assert sum(threads for _, threads, _ in counts) <= max(os.cpu_count() or 1, 4)
    assert counts == [(1, 1, 1)] * 4


def test_the_users_thread_count_is_respected():
    cores = len(os.sched_getaffinity(0))
    limit, counts = threads_in_workers({"OMP_NUM_THREADS": "2"}, "")
    assert limit == 2
    assert [(blas, omp) for blas, _, omp in counts] == [(min(2, cores), 2)] * 4
    limit, counts = threads_in_workers({"OMP_NUM_THREADS": "2"}, "threads=1")
    assert limit == 1
    assert counts == [(1, 1, 1)] * 4


# The master's own state


def test_the_serial_engine_leaves_the_state_of_the_process_alone():
    def fun(w, x):
        random.random()
        np.random.rand()
        return toy(w, x)

    with np.errstate(all="raise"), make(fun, shards=3, engine="serial") as pool:
        before = random.getstate(), np.random.get_state()[1].tolist()
        environment, errors = dict(os.environ), np.geterr()
        pool(np.float64(1), np.arange(9.0))
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before
        assert (dict(os.environ), np.geterr()) == (environment, errors)


def test_a_pool_leaves_the_state_of_the_process_alone():
    before = random.getstate(), np.random.get_state()[1].tolist()
    environment, path = dict(os.environ), list(sys.path)
    with make(toy, workers=2, shards=3) as pool:
        pool(np.float64(1), np.arange(9.0))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert (dict(os.environ), sys.path) == (environment, path)


# The package

PUBLIC = {
    "ArgumentError",
    "Asynchronous",
    "BatchError",
    "Constant",
    "DelayCompensated",
    "EngineUnavailableError",
    "Gamma",
    "GradientError",
    "HeavyTail",
    "InstepError",
    "Job",
    "Local",
    "LossError",
    "Mean",
    "MissingFrameworkError",
    "Network",
    "OneSlow",
    "PoolBrokenError",
    "PoolClosedError",
    "Replay",
    "ShardTimeoutError",
    "ShipError",
    "Simulation",
    "StaleSynchronous",
    "StalenessAware",
    "StartError",
    "Stream",
    "Sum",
    "Synchronous",
    "Training",
    "Update",
    "Weighted",
    "WorkerError",
    "WorkerLostError",
    "WorkerTraceback",
    "shuffled",
    "simulate",
}


def test_the_public_names_are_these():
    found = {
        name
        for name in {*dir(instep)} - {*instep._MODULES}
        if not name.startswith("_")
        and getattr(getattr(instep, name), "__module__", "").startswith("instep")
    }
    assert found == PUBLIC


def test_every_error_is_an_instep_error_and_a_built_in_one():
    errors = {getattr(instep, name) for name in PUBLIC if name.endswith("Error")} - {
        instep.InstepError
    }
    for error in errors:
        assert issubclass(error, instep.InstepError)
        assert issubclass(error, ValueError | TypeError | RuntimeError | ImportError)


def test_importing_loads_no_framework_and_starts_nothing():
    code = """
import sys, threading
before = set(sys.modules)
import instep
import instep.numpy
frameworks = {"tensorflow", "keras", "torch", "jax", "scipy", "mpi4py", "ray"}
assert not frameworks & (set(sys.modules) - before), sys.modules
assert not {"subprocess", "multiprocessing"} & (set(sys.modules) - before)
assert threading.active_count() == 1
"""
    result = run_python("-c", code)
    assert (result.returncode, result.stderr) == (0, "")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'nump'"):
        instep.nump  # noqa: B018


# From top to bottom, in the order in which data passes through. A module imports
# only from rows below its own, or from its own row where that is a package.
LAYERS = [
    ["__main__"],
    ["_commands"],
    ["_compare"],
    ["_training", "_demo", "testing"],
    ["keras"],
    ["tensorflow", "torch", "jax", "numpy"],
    ["_pool"],
    ["_stream"],
    ["_versions", "_lanes"],
    ["_host"],
    ["_slices", "_outcome", "_check", "_rival"],
    ["_aux", "_courier", "_local", "_simulation"],
    ["_times", "_dispatch", "_tuning", "_portions", "_trace", "_dashboard"],
    ["_statistics"],
    ["modes"],
    ["modes.local", "modes.replay"],
    ["modes.asynchronous", "modes.stale_synchronous", "modes.synchronous"],
    ["modes._rules", "modes.corrections"],
    ["_schedule", "_blame", "_events"],
    ["engines"],
    ["engines.mpi", "engines.ray"],
    ["engines._machines"],
    ["engines._holdings", "engines._placement", "engines._letters"],
    ["engines._station"],
    ["engines._average"],
    ["engines._orders"],
    ["engines.serial", "engines.processes"],
    ["engines._base"],
    ["_worker"],
    ["_template"],
    ["_wire", "_shard"],
    ["_slots", "_partials", "_shelf", "_exceptions", "_options"],
    ["_reduction"],
    ["_layout"],
    ["_frame"],
    ["_ship", "_memory"],
    ["_job"],
    ["_pieces"],
    ["_sharding"],
    ["_tree", "_program"],
    ["_seeding", "_shuffled"],
    ["_values", "_errors", "_quiet", "_pace", "_cores", "_closing"],
]


def imported_modules(path):
    """The modules of instep that a file imports, but for those of type checkers."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name[7:] for name in names if name.startswith("instep."))
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            yield from (name[7:] for name in names if name.startswith("instep."))


def row_of(module):
    """The row of the longest name in the layers that the module's begins with."""
    parts = module.split(".")
    for size in range(len(parts), 0, -1):
        for row, names in enumerate(LAYERS):
            if ".".join(parts[:size]) in names:
                return row
    raise AssertionError(f"{module} has no place in the layers")


def may_import(module, imported):
    """Whether `imported` lies below, or is part of the same module or package."""
    package = module.split(".")[0]
    if package != "engines" and imported.split(".")[0] == package:
        return True
    return row_of(module) < row_of(imported)


def test_a_module_imports_only_from_those_below_it():
    package = Path(instep.__file__).parent
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        module = ".".join(parts).removesuffix(".__init__")
        if module == "__init__":
            continue  # the door; everything is below it
        for imported in imported_modules(path):
            assert may_import(module, imported), (
                f"instep.{module} imports instep.{imported}, which is not below it"
            )


def test_frameworks_that_were_used_before_do_not_block_the_start():
    code = """
import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import jax, numpy as np, tensorflow as tf, torch
with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    session.run(tf.random.normal([50, 50]) @ tf.ones([50, 50]))
jax.numpy.ones(50).sum().block_until_ready()
(torch.ones(500, 500) @ torch.ones(500, 500)).sum()
import instep

def loss(model, x):
    return model(x).mean()

def toy(w, x):
    return w * x.mean(), x.mean()

with instep.numpy.value_and_grad(toy, workers=2) as pool:
    print(pool(1.0, np.arange(4.0))[1])
with instep.torch.GradientPool(torch.nn.Linear(1, 1), loss, workers=2) as pool:
    pool.backward(torch.ones(4, 1))
    print("done")
"""
    assert run_python("-c", code).stdout.split() == ["1.5", "done"]
