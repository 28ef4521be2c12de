"""`instep run script.py` fills in what a script's pools leave open."""

from __future__ import annotations

import pytest

from helpers import run_python, write_script

SCRIPT = """
import sys
import numpy as np
import instep

def fun(w, x):
    return np.mean(w * x), np.mean(x)

with instep.numpy.value_and_grad(fun, {given}) as pool:
    loss, grad = pool(np.float64(2), np.arange(1.0, 51.0))
    told = pool.statistics()
    print(told.engine, told.workers, told.shards, told.threads, loss, grad)
print(__name__, sys.argv[1:])
"""


def run(folder, given, *words):
    script = write_script(folder, SCRIPT.format(given=given))
    words = [script if word == "script" else word for word in words]
    result = run_python("-m", "instep", "run", *words)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.splitlines()


def test_what_a_pool_leaves_open_is_filled_in(tmp_path):
    words = ("--workers", "2", "--shards", "5", "--threads", "1", "script")
    lines = run(tmp_path, "", *words)
    assert lines == ["processes 2 5 1 51.0 25.5", "__main__ []"]


def test_options_may_stand_behind_the_script_among_its_own(tmp_path):
    words = ("script", "--lr", "0.1", "--engine", "serial", "data", "--workers=3")
    lines = run(tmp_path, "workers=None", *words)
    assert lines == ["serial 3 3 1 51.0 25.5", "__main__ ['--lr', '0.1', 'data']"]


def test_what_a_script_says_itself_stays(tmp_path):
    words = ("--engine", "serial", "--workers", "4", "script")
    lines = run(tmp_path, "workers=1, shards=2", *words)
    assert lines[0] == "serial 1 2 1 51.0 25.5"


def test_everything_behind_two_dashes_is_the_script_s(tmp_path):
    words = ("--engine", "serial", "script", "--", "--workers", "9")
    lines = run(tmp_path, "", *words)
    assert lines[1] == "__main__ ['--workers', '9']"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["missing.py"], "missing.py is no file"),
        (["--workers", "0", "script"], "expected a whole number, at least 1"),
        (["--engine", "mesh", "script"], "invalid choice: 'mesh'"),
        (["script", "--shards", "x"], "'x'; expected a whole number"),
    ],
)
def test_wrong_words_are_exit_code_2(tmp_path, words, text):
    script = write_script(tmp_path, "print('never')")
    words = [script if word == "script" else word for word in words]
    result = run_python("-m", "instep", "run", *words)
    assert (result.returncode, result.stdout) == (2, "")
    assert text in result.stderr


@pytest.mark.parametrize(
    ("line", "code", "text"),
    [
        ("raise SystemExit(7)", 7, ""),
        ("raise ValueError('mine')", 1, "ValueError: mine"),
        ("raise instep.BatchError('no rows')", 1, "instep.BatchError: no rows"),
        ("raise instep.ArgumentError('bad')", 1, "instep.ArgumentError: bad"),
    ],
)
def test_a_script_that_fails_says_so_as_it_would_alone(tmp_path, line, code, text):
    script = write_script(tmp_path, f"import instep\n{line}\n")
    result = run_python("-m", "instep", "run", script)
    assert result.returncode == code
    assert text in result.stderr
    assert ("Traceback" in result.stderr) == bool(text)
