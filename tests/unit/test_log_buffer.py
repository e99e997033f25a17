"""The console's log buffer: lines, levels, phases and limits, on lines as SGLang 0.5.9 to 0.5.23 write them."""

from __future__ import annotations

import threading
from datetime import datetime

import pytest

from backends.verdict.startup import PHASES
from console.log_buffer import LONGEST, UNFINISHED_SECONDS, LogBuffer

STAMP = "[2026-11-29 17:40:05] "


class Time:
    """A clock that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def fed(*parts: str | bytes, **limits: int) -> LogBuffer:
    buffer = LogBuffer(**limits)
    for part in parts:
        buffer.feed(part.encode() if isinstance(part, str) else part)
    return buffer


def texts(buffer: LogBuffer) -> list[str]:
    return [line.text for line in buffer.lines(buffer.first, buffer.next)]


def levels(*lines: str) -> list[str]:
    buffer = fed("\n".join(lines) + "\n")
    return [line.level for line in buffer.lines(0, buffer.next)]


# --- Lines ---


def test_lines_come_whole_however_they_are_cut() -> None:
    data = "[2026-11-29 17:40:05] one\r\ntwo\n\nd\u00e9j\u00e0 vu \u2588\n".encode()
    for size in range(1, len(data) + 1):
        buffer = fed(*(data[at : at + size] for at in range(0, len(data), size)))
        assert texts(buffer) == ["[2026-11-29 17:40:05] one", "two", "", "déjà vu █"]
        assert (buffer.first, buffer.next, buffer.bytes) == (0, 4, len(data))


def test_half_a_line_is_shown_after_a_moment_and_becomes_the_line() -> None:
    clock = Time()
    buffer = LogBuffer(clock=clock)
    buffer.feed(b"one\nhal")
    assert buffer.unfinished is None
    clock.now += UNFINISHED_SECONDS
    assert buffer.unfinished is not None
    assert (buffer.unfinished.number, buffer.unfinished.text) == (1, "hal")
    buffer.feed(b"f\nnext")
    assert buffer.unfinished is None
    assert texts(buffer) == ["one", "half"]


def bar(done: int, of: int = 64) -> str:
    return (
        f"\rLoading safetensors checkpoint shards: {100 * done // of:3}% Completed | {done}/{of} [03:21<01:38, 4.7s/it]"
    )


def test_a_bar_that_is_redrawn_is_one_line() -> None:
    drawings = [bar(done, 640) for done in range(641)]
    once = fed("before\n", "".join(drawings), "\n\nafter\n")
    by_and_by = fed("before\n", *drawings, "\n", "\n", "after\n")
    whole = drawings[-1].strip("\r")
    assert texts(once) == texts(by_and_by) == ["before", whole, "", "after"]
    assert [line.cut for line in once.lines(0, 4)] == [0, 0, 0, 0]


def test_a_bar_that_ends_in_a_return_is_redrawn_too() -> None:
    buffer = fed("10%\r", "20%\r", "30%\r", "\n")
    assert texts(buffer) == ["30%"]


def test_the_last_drawing_of_a_bar_is_shown_while_it_goes_on() -> None:
    clock = Time()
    buffer = LogBuffer(clock=clock)
    for done in range(5):
        buffer.feed(bar(done).encode())
        clock.now += UNFINISHED_SECONDS
    assert buffer.next == 0
    assert buffer.unfinished is not None
    assert buffer.unfinished.text == bar(4).strip("\r")


def test_what_another_rank_logs_while_a_bar_stands_there_is_a_line() -> None:
    other = "[2026-06-01 09:06:44 TP1] KV Cache is allocated. #tokens: 65536, K size: 2.15 GB, V size: 2.14 GB"
    for parts in ([bar(1), bar(2) + other + "\n", bar(3), "\n"], [bar(1) + bar(2) + other + "\n" + bar(3) + "\n"]):
        buffer = fed("server_args={'tp_size': 2}\n", *parts)
        assert texts(buffer)[1:] == [bar(2).strip("\r"), other, bar(3).strip("\r")]
        assert [line.phase for line in buffer.lines(1, 4)] == ["weights", "kv", ""]


def test_nothing_that_moves_a_terminal_stays_in() -> None:
    buffer = fed(
        "[2026-11-29 17:39:53] \x1b[1;33m'--disable-cuda-graph' is deprecated\x1b[0m\n",
        "\x1b]0;a title\x07text \x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\\n",
        b"bell \x07 null \x00 back \x08 tab\tend \xff\xfe\n",
        "right to left \u202e no-break\u00a0space \x9b2J\n",
        "\x1b[2",
        "Kcut\x1b\n",
    )
    assert texts(buffer) == [
        "[2026-11-29 17:39:53] '--disable-cuda-graph' is deprecated",
        "text link",
        "bell � null � back � tab        end ��",
        "right to left � no-break space �2J",
        "cut",
    ]
    assert all(text.isprintable() for text in texts(buffer))


def test_a_very_long_line_is_kept_cut_and_says_so() -> None:
    half = b"x" * (LONGEST - 10)
    buffer = fed(half, b"y" * 30, b"z" * LONGEST, b"\nshort\n", b"w" * (LONGEST + 5) + b"\n")
    lines = buffer.lines(0, 3)
    assert [len(line.text) for line in lines] == [LONGEST, 5, LONGEST]
    assert [line.cut for line in lines] == [LONGEST + 20, 0, 5]


# --- Limits ---


def test_numbers_stay_when_lines_are_dropped() -> None:
    buffer = LogBuffer(most_lines=1000)
    for number in range(5000):
        buffer.feed(f"line {number}\n".encode())
        assert buffer.next - buffer.first <= 1000
    assert buffer.next == 5000
    assert buffer.dropped == buffer.first >= 4000
    assert buffer.next - buffer.first > 900
    assert buffer.line(buffer.first - 1) is None
    assert buffer.line(buffer.next) is None
    for number in (buffer.first, 4500, 4999):
        line = buffer.line(number)
        assert line is not None
        assert (line.number, line.text) == (number, f"line {number}")
    assert [line.number for line in buffer.lines(0, buffer.first + 2)] == [buffer.first, buffer.first + 1]


def test_text_takes_no_more_than_its_bytes() -> None:
    buffer = LogBuffer(most_bytes=100_000)
    for _ in range(100):
        buffer.feed(b"x" * 9_999 + b"\n")
    assert buffer.next == 100
    assert 8 <= buffer.next - buffer.first <= 10


def test_one_thread_feeds_and_another_reads() -> None:
    buffer = LogBuffer(most_lines=500)
    done = threading.Event()

    def feed() -> None:
        for number in range(0, 50_000, 100):
            buffer.feed(b"".join(b"%d\n" % n for n in range(number, number + 100)))
        done.set()

    thread = threading.Thread(target=feed)
    thread.start()
    while not done.is_set():
        for line in buffer.lines(buffer.first, buffer.next):
            assert line.text == str(line.number)
    thread.join()
    assert buffer.next == 50_000


# --- Marks, times, phases ---


def test_a_mark_stands_between_lines_and_ends_half_a_line() -> None:
    buffer = fed("one\nhal")
    buffer.mark("the log was rotated, 12 bytes of it are gone")
    buffer.feed(b"new\n")
    assert texts(buffer) == ["one", "hal", "the log was rotated, 12 bytes of it are gone", "new"]
    assert [line.ours for line in buffer.lines(0, 4)] == [False, False, True, False]


def test_times_are_those_of_the_stamps() -> None:
    buffer = fed(
        "[2026-11-29 17:40:05] a\n",
        "[2026-11-29 17:40:06.123 DP0 TP11] b\n",
        "  File x\n",
        "2026-11-29 17:40:07 rows.jsonl: 24 samples added, 0 bad rows\n",
        "[2026-99-29 17:40:08] c\n",
    )
    seconds = [None if line.time is None else datetime.fromtimestamp(line.time).second for line in buffer.lines(0, 5)]
    assert seconds == [5, 6, None, 7, None]
    assert buffer.newest == datetime(2026, 11, 29, 17, 40, 7).timestamp()
    assert buffer.rank_width == len("DP0 TP11")


START = """\
[2026-06-01 09:00:00] server_args=ServerArgs(model_path='/models/r1', host='127.0.0.1', port=30001, tp_size=2)
[2026-06-01 09:00:10 TP0] Init torch distributed begin.
[2026-06-01 09:00:10 TP1] Init torch distributed begin.
[2026-06-01 09:00:14 TP0] Init torch distributed ends. elapsed=4.12 s, mem usage=0.55 GB
[2026-06-01 09:00:15 TP0] Load weight begin. avail mem=94.02 GB
[2026-06-01 09:00:15 TP1] Load weight begin. avail mem=94.02 GB
[2026-06-01 09:05:41 TP0] KV Cache is allocated. #tokens: 65536, K size: 2.15 GB, V size: 2.14 GB
[2026-06-01 09:05:42 TP0] Running FlashInfer autotune...
[2026-06-01 09:06:43 TP0] Capture cuda graph begin. This can take up to several minutes. avail mem=12.80 GB
[2026-06-01 09:06:44 TP1] KV Cache is allocated. #tokens: 65536, K size: 2.15 GB, V size: 2.14 GB
[2026-06-01 09:07:14 TP0] max_total_num_tokens=65536, chunked_prefill_size=-1, max_prefill_tokens=8192, \
max_running_requests=128, context_len=8200, available_gpu_mem=12.40 GB
[2026-06-01 09:07:14] INFO:     Started server process [77]
[2026-06-01 09:07:15] INFO:     127.0.0.1:50102 - "GET /model_info HTTP/1.1" 200 OK
[2026-06-01 09:07:36] The server is fired up and ready to roll!
[2026-06-01 09:07:40] INFO:     127.0.0.1:50104 - "POST /generate HTTP/1.1" 200 OK
"""


def test_each_phase_begins_once_in_each_run() -> None:
    buffer = fed(START)
    buffer.mark("run server-2 begins")
    buffer.feed(START.encode())
    phases = [line.phase for line in buffer.lines(0, buffer.next) if line.phase]
    whole = [phase for phase in PHASES if phase != "draft"]
    assert phases == [*whole, *whole]
    assert [line.text[-8:] for line in buffer.lines(0, 15) if line.phase == "ready"] == ["to roll!"]


def test_a_log_that_is_read_from_its_middle_on_has_no_phases() -> None:
    buffer = fed(START.partition("\n")[2])
    assert {line.phase for line in buffer.lines(0, buffer.next)} == {""}


# --- Levels ---


@pytest.mark.parametrize(
    "line",
    [
        STAMP + "Ignore import error when loading sglang.srt.models.inkling: No module named 'cutlass'",
        STAMP + "WARNING:  Fail to set RLIMIT_NOFILE: current limit exceeds maximum limit",
        STAMP + "Fail to set RLIMIT_NOFILE: current limit exceeds maximum limit",
        "/x/awq.py:53: UserWarning: Only CUDA, HIP and XPU support AWQ currently.",
        STAMP + "Cannot detect CUDA architecture.",
        STAMP + "torchaudio is not installed; audio inputs will fail at request time",
        STAMP + "torchcodec is unavailable; video audio-track detection is disabled: No module named 'torchcodec'",
        STAMP + "server_args={'crash_dump_folder': None, 'log_level_http': 'error', 'watchdog_timeout': 300}",
        STAMP + "Memory pool end. avail mem=20.92 GB",
        STAMP + 'INFO:     127.0.0.1:42738 - "GET /health HTTP/1.1" 503 Service Unavailable',
        STAMP + 'INFO:     127.0.0.1:52348 - "POST /generate HTTP/1.1" 200 OK',
        STAMP + "Prefill batch, #new-seq: 1, #new-token: 17, #cached-token: 0, token usage: 0.00",
        STAMP + "TokenizerManager watchdog timeout (self.watchdog_timeout=20.0, self.soft=True)",
        "[AutoTuner]: Skipping tactic <x> due to failure while profiling: [TensorRT-LLM][ERROR] Assertion failed",
        "[2026-11-29 17:40:05 TP2] Setup Custom allreduce failed with . To silence this warning, specify x",
        STAMP + "Disable prefill CUDA graph because cuda_graph_config resolved prefill.backend='disabled'",
        "node1:44:44 [0] NCCL INFO TUNER/Plugin: Could not find: libnccl-tuner.so",
        STAMP + "Using default MoE kernel config. Performance might be sub-optimal! Config file not found at /x.json",
        STAMP + "layertap: the tap is in, drawing outputs of layers 2, 30, 58 (boundaries 3, 31, 59)",
        "2026-11-29 17:38:14 conversations.jsonl: 24 samples added, 0 bad rows",
    ],
)
def test_benign_lines_do_not_look_like_errors(line: str) -> None:
    assert levels(line) == [""]


@pytest.mark.parametrize(
    "line",
    [
        "[2026-11-29 17:40:05 TP0] Scheduler hit an exception: ValueError: x",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        STAMP
        + "Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), a common cause",
        STAMP + "Subprocess scheduler_0 (pid=77) crashed with exit code -9",
        STAMP
        + "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): address already in use",
        STAMP + "SIGQUIT received. signum=None, frame=None. It usually means one child failed.",
        "Fatal Python error: Segmentation fault",
        "terminate called after throwing an instance of 'c10::Error'",
        "  what():  CUDA error: an illegal memory access was encountered",
        "[rank3]:E1129 17:40:05.123 ProcessGroupNCCL.cpp:616] Watchdog caught collective operation timeout",
        "torch.distributed.DistBackendError: NCCL error in: /pytorch/x.cpp:3356, unhandled system error, ncclSystemError",
        STAMP + "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)",
        STAMP + "Initialization failed. warmup error: Traceback (most recent call last):",
        "launch_server.py: error: unrecognized arguments: --cuda-graph-max-bs 8",
        STAMP + 'INFO:     127.0.0.1:52348 - "POST /generate HTTP/1.1" 500 Internal Server Error',
        STAMP + "Prefill out of memory. Try to lower your batch size.",
    ],
)
def test_errors_are_told(line: str) -> None:
    assert levels(line) == ["error"]


@pytest.mark.parametrize(
    "line",
    [
        STAMP + "WARNING:  something is odd",
        "[2026-11-29 17:40:05 TP1] Health check failed. Server couldn't get a response from detokenizer for last 20 seconds.",
        STAMP + "KV cache pool is full. Retract requests. #retracted_reqs: 3, #new_token_ratio: 0.6",
        "[rank0]:W1129 17:40:05.123 ProcessGroupNCCL.cpp:5072] using GPU 0 as device used by this process",
        "node1:44:44 [0] NCCL WARN Call to ibv_modify_qp failed",
        STAMP + 'INFO:     127.0.0.1:52348 - "POST /generate HTTP/1.1" 400 Bad Request',
        STAMP + "Failed to load the chat template",
    ],
)
def test_warnings_are_told(line: str) -> None:
    assert levels(line) == ["warning"]


def test_a_traceback_is_one_error_from_end_to_end() -> None:
    assert levels(
        "[2026-11-29 17:41:07 TP1] Scheduler hit an exception: Traceback (most recent call last):",
        '  File "/x/scheduler.py", line 2000, in run_scheduler_process',
        "    scheduler.event_loop_overlap()",
        "[2026-11-29 17:41:07 TP0] Decode batch, #running-req: 3, #token: 77",
        "    return self.model.forward(a, b)",
        "RuntimeError: shapes do not fit",
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        "Traceback (most recent call last):",
        '  File "/x/y.py", line 1, in z',
        "KeyError: 'a'",
        "",
        "[2026-11-29 17:41:08] all is quiet",
        "a plain line",
    ) == [*["error"] * 3, "", "error", "error", "", "error", "", *["error"] * 3, "", "", ""]


def test_a_traceback_behind_a_benign_line_is_benign() -> None:
    trace = ["Traceback (most recent call last):", '  File "/x/nvml.py", line 1, in y', "NVMLError_NotSupported: No"]
    assert levels(STAMP + "NVLink detection failed. This is normal on PCIe-only hosts.", *trace) == [""] * 4
    assert levels(STAMP + "Ignore import error when loading x: y", *trace[:2], "ValueError: z") == ["", *["error"] * 3]


def test_what_follows_our_own_stop_is_no_error() -> None:
    assert levels(
        STAMP + "SIGTERM received. signum=None frame=None. Draining requests and shutting down...",
        STAMP + "Subprocess scheduler_0 (pid=77) crashed with exit code -15",
        STAMP + "SIGQUIT received. signum=None, frame=None. It usually means one child failed.",
        STAMP + "server_args=ServerArgs(model_path='x')",
        STAMP + "Received sigquit from a child process. It usually means the child failed.",
    ) == ["", "", "", "", "error"]
