"""Start-up phases, ranks and crash causes, from log lines as SGLang 0.5.9 to 0.5.23 write them."""

from datetime import datetime

import pytest

from backends.verdict.startup import PHASES, Startup

# SGLang 0.5.23 on a CPU, one rank, a tiny Kimi-K2.5: image warm-up, dict of arguments, no distributed memory figures.
CPU_0_5_23 = """\
<frozen runpy>:128: RuntimeWarning: 'sglang.launch_server' found in sys.modules after import of package 'sglang'
/site-packages/sglang/launch_server.py:72: UserWarning: 'python -m sglang.launch_server' is still supported
  warnings.warn(
[2026-10-05 14:00:00] WARNING:  Fail to set RLIMIT_NOFILE: current limit exceeds maximum limit
[2026-10-05 14:00:01] Attention backend explicitly specified. Use torch_native backend by default.
[2026-10-05 14:00:02] server_args={'model_path': '/models/kimi-k2_5', 'tokenizer_path': '/models/kimi-k2_5', \
'host': '127.0.0.1', 'port': 30000, 'nccl_port': None, 'tp_size': 1, 'chunked_prefill_size': -1, \
'watchdog_timeout': 1800.0, 'api_key': None, 'tool_server': None}
[2026-10-05 14:00:06] Using a slow tokenizer. This might cause a significant slowdown.
[2026-10-05 14:00:07] Ignore import error when loading sglang.srt.models.midashenglm: No module named 'torchaudio'
[2026-10-05 14:00:08] Init parallel begin.
[2026-10-05 14:00:08] Init parallel ends. elapsed=0.11 s
[2026-10-05 14:00:08] Memory baseline taken. mem usage=0.02 GB
[2026-10-05 14:00:09] Load weight begin. avail mem=28.31 GB
\rLoading safetensors checkpoint shards:   0% Completed | 0/1 [00:00<?, ?it/s]\
\rLoading safetensors checkpoint shards: 100% Completed | 1/1 [00:00<00:00,  9.11it/s]
[2026-10-05 14:00:11] Load weight end. elapsed=1.93 s, type=KimiK25ForConditionalGeneration, avail mem=28.22 GB, \
mem usage=0.09 GB.
[2026-10-05 14:00:11] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 16384, KV size: 0.15 GB
[2026-10-05 14:00:11] Memory pool end. avail mem=28.05 GB
[2026-10-05 14:00:12] max_total_num_tokens=16384, chunked_prefill_size=None, max_prefill_tokens=4096, \
max_running_requests=128, context_len=2056, available_cpu_mem=28.05 GB
[2026-10-05 14:00:13] Engine startup timings (s): load_weight=1.93, kv_cache_allocation=0.05, scheduler_e2e=9.87, \
cuda_graph={}, tokenizer_e2e=3.10
[2026-10-05 14:00:13] INFO:     Started server process [4242]
[2026-10-05 14:00:13] INFO:     Waiting for application startup.
[2026-10-05 14:00:13] INFO:     Application startup complete.
[2026-10-05 14:00:13] INFO:     Uvicorn running on http://127.0.0.1:30000 (Press CTRL+C to quit)
[2026-10-05 14:00:13] INFO:     127.0.0.1:50100 - "GET /health HTTP/1.1" 503 Service Unavailable
[2026-10-05 14:00:14] INFO:     127.0.0.1:50102 - "GET /model_info HTTP/1.1" 200 OK
[2026-10-05 14:00:15] Prefill batch, #new-seq: 1, #new-token: 71, #cached-token: 0, token usage: 0.00, \
#running-req: 0, #queue-req: 0, #pending-token: 0, cpu graph: False, input throughput (token/s): 0.00
[2026-10-05 14:00:21] INFO:     127.0.0.1:50104 - "POST /v1/chat/completions HTTP/1.1" 200 OK
[2026-10-05 14:00:21] INFO:     127.0.0.1:50106 - "POST /freeze_gc HTTP/1.1" 200 OK
[2026-10-05 14:00:21] The server is fired up and ready to roll!
"""

# SGLang 0.5.11 with two ranks on GPUs, graphs and autotune on: "torch distributed", ServerArgs(…), K and V apart.
GPU_0_5_11 = """\
[2026-06-01 09:00:00] server_args=ServerArgs(model_path='/models/r1', tokenizer_path='/models/r1', host='127.0.0.1', \
port=30001, tp_size=2, watchdog_timeout=300, api_key='***')
[2026-06-01 09:00:10 TP0] Init torch distributed begin.
[2026-06-01 09:00:10 TP1] Init torch distributed begin.
[2026-06-01 09:00:11 TP0] sglang is using nccl==2.28.3
[2026-06-01 09:00:14 TP1] Custom allreduce is disabled because your platform lacks GPU P2P capability.
[2026-06-01 09:00:14 TP1] Init torch distributed ends. elapsed=4.10 s, mem usage=0.55 GB
[2026-06-01 09:00:14 TP0] Init torch distributed ends. elapsed=4.12 s, mem usage=0.55 GB
[2026-06-01 09:00:15 TP0] Load weight begin. avail mem=94.02 GB
[2026-06-01 09:00:15 TP1] Load weight begin. avail mem=94.02 GB
\rLoading safetensors checkpoint shards:   0% Completed | 0/64 [00:00<?, ?it/s]\
\rLoading safetensors checkpoint shards:  67% Completed | 43/64 [03:21<01:38,  4.70s/it]
[2026-06-01 09:05:02 TP0] Load weight end. elapsed=287.01 s, type=DeepseekV3ForCausalLM, quant=fp8, \
avail mem=17.90 GB, mem usage=76.12 GB.
[2026-06-01 09:05:40 TP1] Load weight end. elapsed=325.44 s, type=DeepseekV3ForCausalLM, quant=fp8, \
avail mem=17.90 GB, mem usage=76.12 GB.
[2026-06-01 09:05:41 TP0] KV Cache is allocated. #tokens: 65536, K size: 2.15 GB, V size: 2.14 GB
[2026-06-01 09:05:41 TP0] Memory pool end. avail mem=13.02 GB
[2026-06-01 09:05:42 TP0] Running FlashInfer autotune...
\r[AutoTuner]: Tuning fp4_gemm:  25%|██▌       | 5/20 [00:45<02:15,  9.00s/it]
[2026-06-01 09:06:42 TP0] FlashInfer autotune completed.
[2026-06-01 09:06:43 TP0] Capture cuda graph begin. This can take up to several minutes. avail mem=12.80 GB
\rCapturing batches (bs=128 avail_mem=12.70 GB):  33%|███▎      | 12/36 [00:10<00:20,  1.20it/s]
[2026-06-01 09:06:44 TP1] KV Cache is allocated. #tokens: 65536, K size: 2.15 GB, V size: 2.14 GB
[2026-06-01 09:07:13 TP0] Capture cuda graph end. Time elapsed: 30.11 s. mem usage=0.40 GB. avail mem=12.40 GB.
[2026-06-01 09:07:14 TP0] max_total_num_tokens=65536, chunked_prefill_size=-1, max_prefill_tokens=8192, \
max_running_requests=128, context_len=8200, available_gpu_mem=12.40 GB
[2026-06-01 09:07:14] INFO:     Started server process [77]
[2026-06-01 09:07:14] INFO:     Uvicorn running on http://127.0.0.1:30001 (Press CTRL+C to quit)
[2026-06-01 09:07:15] INFO:     127.0.0.1:50102 - "GET /model_info HTTP/1.1" 200 OK
[2026-06-01 09:07:36] INFO:     127.0.0.1:50104 - "POST /generate HTTP/1.1" 200 OK
[2026-06-01 09:07:36] The server is fired up and ready to roll!
"""


def followed(*texts: str) -> Startup:
    startup = Startup()
    for text in texts:
        startup.feed(text)
    return startup


def upto(log: str, words: str) -> str:
    """The log up to the line that holds `words`, that line included."""
    end = log.index("\n", log.index(words)) + 1
    return log[:end]


def seconds(startup: Startup) -> dict[str, float | None]:
    return {p.id: None if p.ended is None else p.ended - (p.started or 0) for p in startup.phases}


# --- Phases ---


def test_a_whole_start_on_a_cpu() -> None:
    startup = followed(CPU_0_5_23)
    assert startup.ready
    assert startup.crashed is None
    assert seconds(startup) == {
        "args": 6,
        "dist": 1,
        "weights": 2,
        "kv": 1,
        "limits": 1,
        "http": 1,
        "warm_up": 7,
        "ready": None,
    }
    assert startup.current is not None
    assert startup.current.id == "ready"
    assert startup.lines == CPU_0_5_23.count("\n")
    assert startup.last_stamp == datetime(2026, 10, 5, 14, 0, 21).timestamp()
    assert startup.effective == {
        "model_path": "/models/kimi-k2_5",
        "port": 30000,
        "tp_size": 1,
        "watchdog_timeout": 1800.0,
        "weights_s": 1.93,
        "weights_gb": 0.09,
        "architecture": "KimiK25ForConditionalGeneration",
        "kv_tokens": 16384,
        "kv_gb": 0.15,
        "max_total_num_tokens": 16384,
        "max_prefill_tokens": 4096,
        "max_running_requests": 128,
        "context_len": 2056,
        "free_gb": 28.05,
        "url": "http://127.0.0.1:30000",
    }
    assert (startup.per_rank, startup.laggard) == ({}, None)


def test_a_whole_start_on_two_gpus_in_older_wording() -> None:
    startup = followed(GPU_0_5_11)
    assert startup.ready
    assert startup.crashed is None
    assert [phase.id for phase in startup.phases] == [phase for phase in PHASES if phase != "draft"]
    assert seconds(startup)["weights"] == 326
    assert {phase.id: phase.detail for phase in startup.phases if phase.detail} == {
        "weights": "76.12 GB a rank",
        "kv": "65536 tokens",
        "tune": "profile 5 of 20",
        "graphs": "12 of 36 graphs",
        "limits": "65536 tokens",
        "http": "http://127.0.0.1:30001",
    }
    assert startup.effective["nccl"] == "2.28.3"
    assert (startup.effective["tp_size"], startup.effective["k_gb"], startup.effective["v_gb"]) == (2, 2.15, 2.14)


def test_the_log_may_come_line_by_line() -> None:
    one_by_one = followed(*(f"{line}\n" for line in CPU_0_5_23.removesuffix("\n").split("\n")))
    assert one_by_one.phases == followed(CPU_0_5_23).phases
    assert one_by_one.lines == followed(CPU_0_5_23).lines


def test_a_phase_that_goes_on_has_no_end_and_shows_its_bar() -> None:
    startup = followed(upto(GPU_0_5_11, "67% Completed"))
    assert startup.current is not None
    assert (startup.current.id, startup.current.detail, startup.current.ended) == ("weights", "shard 43 of 64", None)
    assert not startup.ready


def test_nothing_is_reached_before_the_arguments() -> None:
    startup = followed(upto(CPU_0_5_23, "RLIMIT_NOFILE"))
    assert (startup.phases, startup.current) == ([], None)


def test_colours_and_long_lines_do_no_harm() -> None:
    log = CPU_0_5_23.replace("Load weight begin", "\x1b[32mLoad weight begin\x1b[0m")
    startup = followed(log, "[2026-10-05 14:00:22] Receive: " + "x" * 5_000_000 + "\n")
    assert startup.phases == followed(CPU_0_5_23).phases


def test_deepgemm_and_multi_thread_loading_bars() -> None:
    startup = followed(
        "\rMulti-thread loading shards:  50% Completed | 32/64 [00:30<00:30,  1.07it/s]",
        "\rDeepGEMM warmup:  12%|█▏        | 2048/16384 [01:00<07:00, 34.1it/s]",
    )
    assert {phase.id: phase.detail for phase in startup.phases} == {
        "weights": "shard 32 of 64",
        "tune": "kernel 2048 of 16384",
    }


def test_the_final_kv_size_replaces_the_upper_bound() -> None:
    startup = followed(
        "[2026-10-05 14:00:11] KV Cache VA upper bound. dtype: torch.bfloat16, #tokens: 99999, KV size: 9.00 GB\n",
        "[2026-10-05 14:00:12] Capture target decode CUDA graph begin. backend=full, avail mem=12.80 GB\n",
        "[2026-10-05 14:00:42] Capture target decode CUDA graph end. elapsed=30.11 s, mem usage=0.40 GB\n",
        "[2026-10-05 14:00:43] Post-capture KV sizing: KV cache allocated. #tokens: 65536, KV size: 6.00 GB\n",
    )
    assert (startup.effective["kv_tokens"], startup.effective["kv_gb"]) == (65536, 6.0)
    assert startup.current is not None
    assert startup.current.id == "graphs"


def test_a_stamp_that_is_no_date_is_passed_over() -> None:
    startup = followed("[2026-99-99 99:99:99] Init parallel begin.\n")
    assert (startup.last_stamp, [phase.id for phase in startup.phases]) == (None, ["dist"])


# --- Ranks ---


def test_the_rank_that_still_loads_is_the_laggard() -> None:
    startup = followed(upto(GPU_0_5_11, "elapsed=287.01"))
    assert startup.per_rank == {"TP0": "weights", "TP1": "weights"}
    assert startup.laggard == "TP1"


def test_ranks_that_are_level_have_no_laggard() -> None:
    assert followed(upto(GPU_0_5_11, "elapsed=325.44")).laggard is None


def test_a_slow_rank_extends_its_phase_and_moves_nothing_back() -> None:
    startup = followed(upto(GPU_0_5_11, "[2026-06-01 09:06:44 TP1] KV Cache"))
    assert startup.per_rank == {"TP0": "graphs", "TP1": "kv"}
    assert startup.laggard == "TP1"
    assert startup.current is not None
    assert startup.current.id == "graphs"
    assert seconds(startup)["kv"] == 63


def test_there_is_no_laggard_once_the_http_server_is_up() -> None:
    assert followed(GPU_0_5_11).laggard is None


# --- Crashes ---

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has 1.10 GiB free."


def scheduler_exception(exception: str, rank: str = "", who: str = "Scheduler") -> str:
    return f"""\
[2026-06-01 09:01:00{rank}] {who} hit an exception: Traceback (most recent call last):
  File "/site-packages/sglang/srt/managers/scheduler.py", line 6352, in run_scheduler_process
    scheduler = Scheduler(server_args, port_args)
                ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
{exception}

"""


LAUNCHER_ECHO = """\
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "<frozen runpy>", line 88, in _run_code
  File "/site-packages/sglang/launch_server.py", line 83, in <module>
    run_server(server_args)
  File "/site-packages/sglang/srt/entrypoints/engine.py", line 2032, in _wait_for_scheduler_ready
    raise RuntimeError(
RuntimeError: Initialization failed. Please see the error messages above.
"""

RECEIVED_SIGQUIT = "[2026-06-01 09:01:02] Received sigquit from a child process. It usually means the child failed.\n"


def test_the_cause_is_the_exception_and_not_what_follows() -> None:
    log = scheduler_exception(OOM, " TP1")
    assert followed(log, LAUNCHER_ECHO).crashed == OOM
    assert followed(log, RECEIVED_SIGQUIT).crashed == OOM
    assert followed(log, scheduler_exception("RuntimeError: another", " TP0")).crashed == OOM


def test_the_last_exception_of_a_chain_is_the_cause() -> None:
    chain = scheduler_exception(
        """\
RuntimeError: CUDA error: out of memory

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/site-packages/sglang/srt/model_executor/model_runner.py", line 1, in init_cuda_graphs
    raise Exception(
Exception: Capture cuda graph failed: CUDA out of memory
Possible solutions:
1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)"""
    )
    assert followed(chain).crashed == "Exception: Capture cuda graph failed: CUDA out of memory"


@pytest.mark.parametrize("echo", ["RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:41414", "EOFError"])
def test_a_rank_that_was_killed_outweighs_the_echo_on_the_others(echo: str) -> None:
    log = scheduler_exception(echo, " TP0")
    killed = "[2026-06-01 09:01:01] Subprocess scheduler_3 (pid=99) crashed with exit code -9. Triggering SIGQUIT\n"
    assert followed(log).crashed == echo
    assert "exit code -9" in (followed(log, killed).crashed or "")


def test_another_rank_may_write_between_the_frames() -> None:
    lines = scheduler_exception(OOM, " TP1").splitlines(keepends=True)
    between = [
        "[2026-06-01 09:01:00 TP0] Load weight begin. avail mem=94.02 GB\n",
        "\rLoading safetensors checkpoint shards:  67% Completed | 43/64 [03:21<01:38,  4.70s/it]\n",
    ]
    assert followed(*lines[:2], *between, *lines[2:]).crashed == OOM


def test_killed_while_it_loads() -> None:
    died = LAUNCHER_ECHO.replace(
        "RuntimeError: Initialization failed. Please see the error messages above.",
        "RuntimeError: Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), "
        "a common cause is the OS OOM killer. Run `dmesg -T | grep -i oom` to check.",
    )
    cause = followed(upto(CPU_0_5_23, "Load weight begin"), died).crashed
    assert cause is not None
    assert cause.startswith("RuntimeError: Rank 0 scheduler died during initialization (exit code: -9)")


def test_killed_while_it_loads_in_the_words_of_0_5_9() -> None:
    log = (
        "[2026-01-05 09:01:00] Rank 0 scheduler is dead. Please check if there are relevant logs.\n"
        "[2026-01-05 09:01:01] Exit code: -9\n"
    )
    assert followed(log, LAUNCHER_ECHO).crashed == "Exit code: -9"


def test_a_child_that_python_ended_says_why() -> None:
    child = """\
Traceback (most recent call last):
  File "<string>", line 1, in <module>
  File "/usr/lib/python3.11/multiprocessing/spawn.py", line 122, in spawn_main
    exitcode = _main(fd, parent_sentinel)
ModuleNotFoundError: No module named 'sgl_kernel'
"""
    died = "[2026-06-01 09:01:01] Subprocess scheduler_0 (pid=99) crashed with exit code 1. Triggering SIGQUIT\n"
    assert followed(child).crashed is None
    assert followed(child, died).crashed == "ModuleNotFoundError: No module named 'sgl_kernel'"


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (
            "usage: launch_server.py [-h] --model-path MODEL_PATH\n"
            "launch_server.py: error: unrecognized arguments: --disable-piecewise-cuda-graph\n",
            "launch_server.py: error: unrecognized arguments: --disable-piecewise-cuda-graph",
        ),
        (
            "sglang serve: error: ambiguous option: --cuda-graph-bs could match --cuda-graph-bs-decode\n",
            "sglang serve: error: ambiguous option: --cuda-graph-bs could match --cuda-graph-bs-decode",
        ),
        ("/usr/bin/python3: No module named sglang\n", "/usr/bin/python3: No module named sglang"),
        (
            "[2026-06-01 09:01:01] ERROR:    [Errno 98] error while attempting to bind on address "
            "('127.0.0.1', 30000): address already in use\n",
            "[Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): address already in use",
        ),
        (
            "[2026-06-01 09:01:01] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)\n",
            "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)",
        ),
        (
            "terminate called after throwing an instance of 'c10::DistBackendError'\n"
            "  what():  NCCL error: unhandled system error\n",
            "what():  NCCL error: unhandled system error",
        ),
        ("Fatal Python error: Segmentation fault\n", "Fatal Python error: Segmentation fault"),
        (
            scheduler_exception("requests.exceptions.ReadTimeout: Read timed out. (read timeout=600)").replace(
                "Scheduler hit an exception: ", "Initialization failed. warmup error: "
            ),
            "requests.exceptions.ReadTimeout: Read timed out. (read timeout=600)",
        ),
        (scheduler_exception("ValueError: x", who="DetokenizerManager"), "ValueError: x"),
        (scheduler_exception("AssertionError"), "AssertionError"),
    ],
)
def test_causes(log: str, cause: str) -> None:
    assert followed(log).crashed == cause


def test_a_launcher_that_fails_before_its_arguments() -> None:
    refused = """\
Traceback (most recent call last):
  File "<frozen runpy>", line 189, in _run_module_as_main
  File "<frozen runpy>", line 112, in _get_module_details
  File "/site-packages/sglang/__init__.py", line 1, in <module>
    import torch
ModuleNotFoundError: No module named 'torch'
"""
    assert followed(refused).crashed == "ModuleNotFoundError: No module named 'torch'"


def test_a_missing_model_is_the_launchers_own_traceback() -> None:
    refused = LAUNCHER_ECHO.replace(
        "RuntimeError: Initialization failed. Please see the error messages above.",
        "OSError: /models/kimi does not appear to have a file named config.json.",
    )
    assert followed(refused).crashed == "OSError: /models/kimi does not appear to have a file named config.json."


# --- What is no crash ---


@pytest.mark.parametrize(
    "log",
    [
        # A stop of the whole group.
        "[2026-10-05 15:00:00] Subprocess scheduler_0 (pid=7) crashed with exit code -15. Triggering SIGQUIT\n"
        "[2026-10-05 15:00:00] SIGQUIT received. signum=3, frame=None. It usually means one child failed.\n",
        # The launcher asked first; then a child dies of the SIGKILL that ends every stop.
        "[2026-10-05 15:00:00] SIGTERM received. signum=15 frame=None. Draining requests and shutting down...\n"
        "[2026-10-05 15:00:01] Gracefully exiting... Remaining number of requests 0. Remaining requests [].\n"
        "[2026-10-05 15:00:05] Subprocess scheduler_0 (pid=7) crashed with exit code -9. Triggering SIGQUIT\n",
        # Ctrl-C.
        "[2026-10-05 15:00:00] INFO:     Shutting down\n"
        "Process sglang::scheduler:\n"
        "Traceback (most recent call last):\n"
        '  File "/usr/lib/python3.11/multiprocessing/process.py", line 314, in _bootstrap\n'
        "    self.run()\n"
        "KeyboardInterrupt\n",
        # Stopped while it started.
        LAUNCHER_ECHO.replace(
            "Initialization failed.", "Rank 0 scheduler died during initialization (exit code: -15)."
        ),
    ],
)
def test_a_normal_stop_is_no_crash(log: str) -> None:
    assert followed(CPU_0_5_23, log).crashed is None


@pytest.mark.parametrize(
    "log",
    [
        "[2026-10-05 14:00:02] NVLink detection failed. This is normal if no NVLink is there.\n"
        "Traceback (most recent call last):\n"
        '  File "/site-packages/sglang/srt/utils/common.py", line 1, in has_nvlink\n'
        "    pynvml.nvmlInit()\n"
        "pynvml.NVMLError_LibraryNotFound: NVML Shared Library Not Found\n",
        "[2026-10-05 14:00:30] ERROR:    Exception in ASGI application\n"
        "Traceback (most recent call last):\n"
        '  File "/site-packages/uvicorn/protocols/http/httptools_impl.py", line 401, in run_asgi\n'
        "    result = await app(\n"
        "ValueError: Input length exceeds the maximum allowed length\n",
        "Exception in thread Thread-9 (_report):\n"
        "Traceback (most recent call last):\n"
        '  File "/usr/lib/python3.11/threading.py", line 1045, in _bootstrap_inner\n'
        "    self.run()\n"
        "ConnectionError: usage report\n",
        "[2026-10-05 14:00:02] TokenizerManager watchdog timeout (self.watchdog_timeout=60, self.soft=True)\n",
        "[2026-10-05 14:00:02] Receive: text='Scheduler hit an exception: Traceback', rid='x'\n",
        "[2026-10-05 14:00:02] [AutoTuner]: Skipping tactic: [TensorRT-LLM][ERROR] Assertion failed: out of memory\n",
    ],
)
def test_lines_that_only_look_like_a_crash(log: str) -> None:
    assert followed(log, CPU_0_5_23, log).crashed is None


def test_a_traceback_that_was_caught_is_not_blamed_for_a_later_kill() -> None:
    caught = """\
[2026-10-05 14:00:02] NVLink detection failed. This is normal if no NVLink is there.
Traceback (most recent call last):
  File "/site-packages/sglang/srt/utils/common.py", line 1, in has_nvlink
    pynvml.nvmlInit()
pynvml.NVMLError_LibraryNotFound: NVML Shared Library Not Found
"""
    killed = "[2026-10-05 14:05:00] Subprocess scheduler_0 (pid=7) crashed with exit code -9. Triggering SIGQUIT\n"
    assert "exit code -9" in (followed(caught, CPU_0_5_23, killed).crashed or "")


def test_a_taken_port_is_a_crash_though_the_log_says_ready() -> None:
    bind = (
        "[2026-10-05 14:00:13] ERROR:    [Errno 98] error while attempting to bind on address "
        "('127.0.0.1', 30000): address already in use\n"
    )
    ready = "[2026-10-05 14:00:21] The server is fired up and ready to roll!\n"
    startup = followed(upto(CPU_0_5_23, "Application startup complete"), bind, ready)
    assert startup.ready
    assert startup.crashed is not None
    assert startup.crashed.startswith("[Errno 98]")


def test_a_crash_after_ready_is_seen() -> None:
    startup = followed(CPU_0_5_23, scheduler_exception(OOM))
    assert (startup.ready, startup.crashed) == (True, OOM)
