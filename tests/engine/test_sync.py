"""``LLM``: the engine without ``await``, on a loop of its own."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from aexec import LLM, AsyncLLM, SamplingParams
from aexec.engine import sync
from aexec.errors import CallTimeout, ConfigError, EngineDraining, ExecutorClosed, InvalidRequest, QueueFull

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


def engine_threads():
    return sum(thread.name.startswith("aexec-dummy") for thread in threading.enumerate())


@pytest.fixture(scope="module")
def llm():
    with LLM("dummy") as opened:
        yield opened


def test_several_prompts_run_at_once_and_come_back_in_order(llm):
    """Text and token ids may be mixed."""
    before = llm.statistics().num_steps
    completions = llm.generate(["one", [116, 119, 111]], GREEDY)
    assert [completion.num_prompt_tokens for completion in completions] == [3, 3]
    assert llm.statistics().num_steps - before <= 2 * 8
    assert completions[1].token_ids == llm.generate("two", GREEDY)[0].token_ids


@pytest.mark.parametrize(
    ("prompts", "count"), [("text", 1), ([65, 66], 1), (["a", "b"], 2), ([[65], [66]], 2), ([], 0)]
)
def test_one_prompt_or_several_give_a_list(llm, prompts, count):
    """A text is one prompt, and so is a sequence of token ids."""
    assert len(llm.generate(prompts, GREEDY)) == count


def test_sampling_may_differ_from_prompt_to_prompt(llm):
    """One value for each prompt; another number of them is an error."""
    each = [SamplingParams(max_tokens=number, temperature=0.0) for number in (2, 5)]
    assert [len(completion.token_ids) for completion in llm.generate(["a", "b"], each)] == [2, 5]
    with pytest.raises(ValueError, match="shorter"):
        llm.generate(["a", "b", "c"], each)


@pytest.mark.parametrize(
    ("prompts", "sampling", "said"),
    [
        (None, None, "prompts is None: expected a prompt"),
        (5, None, "prompts is 5: expected a prompt"),
        (["a"], {"max_tokens": 3}, r"sampling is or holds {'max_tokens': 3}: expected SamplingParams"),
        (["a", "b"], [SamplingParams(), 3], "sampling is or holds 3: expected SamplingParams"),
        (["a"], [], r"shorter than that of prompts \(0 and 1\)"),
    ],
)
def test_arguments_of_another_type_are_refused_by_name(llm, prompts, sampling, said):
    """Before anything runs."""
    with pytest.raises(InvalidRequest, match=said):
        llm.generate(prompts, sampling)


@pytest.mark.parametrize(
    ("sampling", "error", "said"),
    [
        ({"max_tokens": 3}, InvalidRequest, r"sampling is {'max_tokens': 3}: expected SamplingParams"),
        (SamplingParams(n=10**9), QueueFull, "each of its n=1000000000 samples"),
    ],
)
def test_what_can_never_run_is_refused_without_a_wait(llm, sampling, error, said):
    """While another request runs, whose place it would have to wait for."""
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(llm.complete, "a", SamplingParams(max_tokens=200))
        with pytest.raises(error, match=said):
            llm.complete("a", sampling)
        assert other.result(30).finish_reason == "length"


def test_a_bad_prompt_fails_the_call_with_its_own_error(llm):
    """No group of errors around it, and the engine goes on."""
    with pytest.raises(InvalidRequest, match="empty text"):
        llm.generate(["good", ""], GREEDY)
    assert llm.statistics().blocks.num_holders == 0


def test_more_prompts_than_may_wait_are_all_answered():
    """The façade holds back what the queue would turn away."""
    with LLM("dummy", max_num_seqs=2, max_num_waiting=3) as llm:
        assert len(llm.generate(["x"] * 20, GREEDY)) == 20


def test_calls_may_come_from_several_threads(llm):
    """They share the engine's steps."""
    results: list[tuple[int, ...]] = []
    threads = [
        threading.Thread(target=lambda: results.append(llm.generate("same", GREEDY)[0].token_ids)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert len(set(results)) == 1


def test_the_thread_ends_with_the_engine():
    """Closing may be said twice; nothing is left, and a closed engine says so."""
    before = engine_threads()
    llm = LLM("dummy")
    assert repr(llm) == "<LLM 'dummy': closed>"
    with llm:
        assert repr(llm) == "<LLM 'dummy': open>"
        assert engine_threads() == before + 1
    llm.close()
    assert engine_threads() == before
    with pytest.raises(ExecutorClosed, match="use `with` around it"):
        llm.generate("x")


def test_it_may_be_opened_from_several_threads_at_once():
    """One of them starts the engine; the others wait for it."""
    before = engine_threads()
    llm = LLM("dummy")
    with ThreadPoolExecutor(4) as pool:
        opened = [pool.submit(llm.open) for _ in range(4)]
        assert [future.result(timeout=20) for future in opened] == [llm] * 4
    assert engine_threads() == before + 1
    llm.close()
    assert engine_threads() == before


def test_a_call_that_another_thread_closes_under_says_so():
    """Neither what waits in a loop that is stopped, nor what comes to it later, waits for ever."""
    thread = sync._LoopThread("aexec-dummy")
    has_begun = threading.Event()

    async def work() -> None:
        has_begun.set()
        await asyncio.Event().wait()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(thread.run, work())
        assert has_begun.wait(10)
        thread.stop()
        with pytest.raises(ExecutorClosed, match="another thread has closed it"):
            waiting.result(timeout=10)
    with pytest.raises(ExecutorClosed, match="another thread has closed it"):
        thread.run(work())


def test_a_failed_start_leaves_no_thread():
    """What ``open`` raised is what the workers raised."""
    before = engine_threads()
    with pytest.raises(ConfigError, match="the dummy has no setting 'nonsense'"):
        LLM("dummy:nonsense=1").open()
    assert engine_threads() == before


def test_both_facades_describe_their_settings():
    """``help()`` shows what can be set."""
    assert "max_num_batched_tokens: The token budget of a step." in (AsyncLLM.__doc__ or "")
    assert LLM.__doc__ == sync.LLM.__doc__


INTERRUPTED = """
import os, signal, threading, time
from aexec import LLM, SamplingParams

with LLM("dummy:forward_seconds=0.005,max_model_len=100000", num_blocks=8000) as llm:
    def press():
        while llm.statistics().num_steps < 5:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=press).start()
    try:
        llm.generate("long", SamplingParams(max_tokens=90000))
    except KeyboardInterrupt:
        print("interrupted", llm.statistics().blocks.num_holders, llm.generate("a", SamplingParams(max_tokens=2))[0].finish_reason)
"""

FORGOTTEN = """
from aexec import LLM, SamplingParams
llm = LLM("dummy", executor={executor!r}, tensor_parallel_size={ranks}).open()
print(llm.generate("a", SamplingParams(max_tokens=2))[0].finish_reason)
"""


NOTEBOOK = """
import asyncio
from aexec import LLM, SamplingParams

async def cell():
    loop = asyncio.get_running_loop()
    with LLM("dummy") as llm:
        (completion,) = llm.generate("a", SamplingParams(max_tokens=2))
    print(completion.finish_reason, asyncio.get_running_loop() is loop)

asyncio.run(cell())
"""


FORKED = """
import os, sys, warnings
from aexec import LLM, SamplingParams
from aexec.errors import ExecutorClosed

warnings.simplefilter("ignore")  # of newer Pythons, at a fork beside threads
llm = LLM("dummy").open()
pid = os.fork()
if not pid:
    try:
        llm.generate("a")
    except ExecutorClosed as error:
        print(str(error).rpartition(",")[2], flush=True)
    sys.exit(3)
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(code, llm.generate("a", SamplingParams(max_tokens=2))[0].finish_reason)
"""


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (INTERRUPTED, "interrupted 0 length"),
        (FORGOTTEN.format(executor="uni", ranks=1), "length"),
        (FORGOTTEN.format(executor="mp", ranks=2), "length"),
        (NOTEBOOK, "length True"),
        (FORKED, "a fork of it without its threads: make another LLM here\n3 length"),
    ],
    ids=["ctrl-c", "forgotten", "forgotten-mp", "notebook", "forked"],
)
def test_a_program_works_and_ends_cleanly(program, said):
    """Ctrl-C aborts the waiting call only; a forgotten close does not hang, nor does a fork; a running loop is no obstacle."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert (done.stdout.strip(), done.stderr, done.returncode) == (said, "", 0)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_options_and_samples_work_without_await():
    """Several samples of many prompts, more than may wait; a salt; a timeout; a reset."""
    with LLM("dummy", max_num_waiting=4) as llm:
        params = SamplingParams(max_tokens=4, seed=3, n=3)
        answers = llm.generate(["one", "two", "three", "four"], params, cache_salt="x", priority=1, timeout=60.0)
        assert [len(answer.samples) for answer in answers] == [3, 3, 3, 3]
        assert llm.reset_prefix_cache()
        with pytest.raises(InvalidRequest, match="priority is 'high'"):
            llm.generate("a", priority="high")


SLOW = "dummy:forward_seconds=0.005,max_model_len=100000"
LONG = SamplingParams(max_tokens=90_000, ignore_eos=True)


def answer_beside(llm, prompt, params, request_id):
    """One request that another thread waits for; returns the thread and where its answer goes."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(llm.complete(prompt, params, request_id=request_id)))
    thread.start()
    while llm.statistics().num_running == 0:
        thread.join(0.005)
    return thread, answers


def test_a_request_is_aborted_by_its_id_from_another_thread():
    """It ends at once, with what it has said."""
    with LLM(SLOW, num_blocks=8000) as llm:
        thread, answers = answer_beside(llm, "long", LONG, "mine")
        assert llm.abort("mine")
        thread.join(20)
        assert [answer.finish_reason for answer in answers] == ["abort"]
        assert not llm.abort("mine")


def test_a_paused_engine_goes_on_where_it_was():
    """No step is launched meanwhile."""
    with LLM(SLOW) as llm:
        thread, answers = answer_beside(llm, "short", SamplingParams(max_tokens=100, ignore_eos=True), None)
        llm.pause()
        steps = llm.statistics().num_steps
        assert llm.statistics().steps.num_in_flight == 0
        assert llm.statistics().num_steps == steps
        llm.resume()
        thread.join(20)
        assert [answer.finish_reason for answer in answers] == ["length"]


def test_a_drained_engine_takes_requests_again_after_resume(llm):
    """Those that come meanwhile are told that another replica can take them; a limit that passes says what is left."""
    llm.drain(timeout=20)
    with pytest.raises(EngineDraining, match="drain"):
        llm.generate("a", GREEDY)
    llm.resume()
    assert llm.generate("a", GREEDY)[0].finish_reason == "length"
    with LLM(SLOW, num_blocks=8000) as busy:
        thread, _ = answer_beside(busy, "long", LONG, "mine")
        with pytest.raises(CallTimeout, match="drain"):
            busy.drain(timeout=0.05)
        assert busy.abort("mine")
        thread.join(20)


def test_what_can_be_looked_at_is_the_same_as_with_await(llm):
    """By the same names."""
    assert llm.is_open
    assert llm.async_scheduling.is_on
    assert llm.tokenizer.decode(llm.complete("a", GREEDY).token_ids) == llm.generate("a", GREEDY)[0].text
    assert llm.driver_statistics().handled > 0


def test_only_what_needs_a_task_beside_is_missing():
    """A method of the one façade is one of the other; but chunks and events are read while something else runs."""
    names = {name for name in dir(AsyncLLM) if not name.startswith("_")}
    assert names - set(dir(LLM)) == {"aclose", "assembly", "events", "executor"}
