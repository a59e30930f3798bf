"""Foreign code in the worker may do what it likes: the caller gets a result or a named error."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from modulelens.errors import ForeignError, NotFound, TimedOut, WorkerCrashed
from modulelens.measure.worker import Stopped, Worker

HERE = str(Path(__file__).parent)


@pytest.fixture(scope="module")
def worker():
    with Worker(timeout_s=30, path=[HERE]) as made:
        yield made


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


@pytest.mark.parametrize("isolate", [True, False])
def test_a_result_comes_back(worker, isolate):
    assert worker.call("foreign:add", {"a": 1, "b": 2.5}, isolate=isolate) == {"sum": 3.5}


def test_isolated_calls_share_nothing_and_the_others_do(worker):
    assert [worker.call("foreign:count") for _ in range(2)] == [1, 1]
    assert [worker.call("foreign:count", isolate=False) for _ in range(2)] == [1, 2]
    assert worker.call("foreign:count") == 1


def test_what_was_warmed_is_found_by_all():
    with Worker(path=[HERE], preload=()) as worker:
        worker.warm("foreign:count")
        assert worker.call("foreign:count") == 2
        assert worker.call("foreign:count", isolate=False) == 2


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize(
    ("target", "args", "message"),
    [
        ("exits", {"code": 0}, "exited with code 0"),
        ("exits", {"code": 7}, "exited with code 7"),
        ("segfaults", {}, "SIGSEGV"),
        ("kills_itself", {}, "SIGKILL"),
        ("closes_everything", {}, "before it gave a result"),
        ("leaves_a_child_behind", {}, "exited with code 0"),
    ],
)
def test_a_crash_is_an_error_and_the_next_call_works(worker, target, args, message, isolate):
    with pytest.raises(WorkerCrashed, match=message):
        worker.call(f"foreign:{target}", args, isolate=isolate)
    assert worker.call("foreign:add", {"a": 1, "b": 1}, isolate=isolate) == {"sum": 2}
    if target == "leaves_a_child_behind":
        assert worker.pid is not None


def test_children_of_foreign_code_end_with_it(worker):
    assert gone(worker.call("foreign:answers_with_a_child"))


@pytest.mark.parametrize("target", ["endless", "sleeps"])
@pytest.mark.parametrize("isolate", [True, False])
def test_an_endless_call_is_stopped(worker, target, isolate):
    start = time.monotonic()
    with pytest.raises(TimedOut, match=f"foreign:{target} did not end within 0.5 s"):
        worker.call(f"foreign:{target}", timeout_s=0.5, isolate=isolate)
    assert time.monotonic() - start < 20
    assert worker.call("foreign:add", {"a": 1, "b": 1}, isolate=isolate) == {"sum": 2}


def test_an_endless_call_tells_where_it_was(worker):
    with pytest.raises(TimedOut, match=r"foreign\.py\", line \d+ in endless"):
        worker.call("foreign:endless", timeout_s=0.5)


@pytest.mark.parametrize("target", ["endless", "sleeps", "prints_endlessly"])
@pytest.mark.parametrize("isolate", [True, False])
def test_a_call_ends_when_it_is_told_to(worker, target, isolate):
    asked = iter([False, False, True])
    with pytest.raises(Stopped):
        worker.call(f"foreign:{target}", isolate=isolate, stop=lambda: next(asked, True))
    assert worker.call("foreign:add", {"a": 1, "b": 1}, isolate=isolate) == {"sum": 2}


def test_a_stop_that_meets_the_answer_disturbs_no_later_call(worker):
    for number in range(60):
        until = time.monotonic() + number / 2000
        with contextlib.suppress(Stopped):
            found = worker.call(
                "foreign:add",
                {"a": number, "b": 0},
                isolate=bool(number % 2),
                stop=lambda until=until: time.monotonic() > until,
            )
            assert found == {"sum": number}
        assert worker.call("foreign:add", {"a": number, "b": 1}) == {"sum": number + 1}


def test_prints_do_not_disturb_and_their_tail_is_kept(worker):
    text = "{'result': 1}\n" * 20_000
    assert worker.call("foreign:prints", {"text": text}) == len(text)
    assert "raw bytes on stderr" in worker.output_tail
    assert len(worker.output_tail) <= 8192


def test_foreign_errors_carry_their_type_and_traceback(worker):
    with pytest.raises(ForeignError, match="ValueError: no, ü") as caught:
        worker.call("foreign:raises", {"message": "no, ü"})
    assert caught.value.kind == "ValueError"
    assert "in raises" in caught.value.traceback
    with pytest.raises(ForeignError, match="SystemExit"):
        worker.call("foreign:leaves")
    with pytest.raises(ForeignError, match="no attribute"):
        worker.call("foreign:nothing")
    with pytest.raises(ForeignError, match="Tensor"):
        worker.call("foreign:not_json")


def test_own_errors_come_back_as_they_were(worker):
    with pytest.raises(NotFound) as caught:
        worker.call("foreign:not_found")
    assert caught.value.hint == "look elsewhere"


def test_forks_use_threads_even_after_each_other(worker):
    for isolate in (False, True, False, True):
        assert worker.call("foreign:threads", isolate=isolate)[0] == 1_000_000


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_is_limited():
    with Worker(path=[HERE], memory_bytes=600_000_000) as worker:
        with pytest.raises(ForeignError, match=r"allocate|memory"):
            worker.call("foreign:eats_memory")
        assert worker.call("foreign:add", {"a": 1, "b": 1}) == {"sum": 2}


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize("isolate", [True, False])
def test_where_memory_ends_foreign_code_goes_first(worker, isolate):
    assert worker.call("foreign:limits", isolate=isolate) == [1000, True]
    assert Path("/proc/self/oom_score_adj").read_text() != "1000\n"


def test_a_killed_worker_is_replaced():
    with Worker(path=[HERE], preload=()) as worker:
        worker.call("foreign:add", {"a": 1, "b": 1})
        first = worker.pid
        os.kill(first, signal.SIGKILL)
        assert gone(first)
        assert worker.call("foreign:add", {"a": 1, "b": 1}) == {"sum": 2}
        assert worker.pid != first


def test_a_worker_that_does_not_start_is_named_with_its_last_words():
    with (
        Worker(preload=["no_such_package"]) as worker,
        pytest.raises(WorkerCrashed, match=r"(?s)ended.*No module named 'no_such_package'"),
    ):
        worker.call("foreign:add")


SCRIPT = f"""
import sys
from modulelens.measure.worker import Stopped, Worker
print("main runs", flush=True)
worker = Worker(path=[{HERE!r}], preload=())
worker.call("foreign:add", {{"a": 1, "b": 1}}, isolate=False)
print(worker.pid, flush=True)
worker.call("foreign:sleeps")
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_the_worker_ends_with_its_parent_and_main_is_not_run_again(how, tmp_path):
    script = tmp_path / "main.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "main runs\n"
    pid = int(process.stdout.readline())
    assert alive(pid)
    time.sleep(0.3)
    process.send_signal(how)
    assert process.wait(timeout=20) != 0
    assert gone(pid)
    assert process.stdout.read() == ""
    process.stdout.close()
