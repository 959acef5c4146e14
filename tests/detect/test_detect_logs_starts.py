"""Lines of healthy starts: what libraries complain of before they go on, and every way in which progress is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from phalanx.detect.detection import JudgeVerdict
from phalanx.detect.logs.log_digest import read_job
from phalanx.detect.logs.log_judge import judge_logs
from phalanx.detect.logs.log_rules import Matcher, load_rules
from phalanx.detect.logs.progress_lines import progress_of

FACTORY = "Unable to register cuFFT factory: " + (
    "Attempting to register factory for plugin cuFFT when one has already been registered"
)
STARTS = (
    f"2026-11-25 10:00:00.123456: E external/local_xla/xla/stream_executor/cuda/cuda_fft.cc:485] {FACTORY}",
    f"E0000 00:00:1732528800.123456    4121 cuda_dnn.cc:8310] {FACTORY}",
    "2026-11-25 10:00:00.1: E external/local_xla/cuda_driver.cc:152] failed call to cuInit: INTERNAL: CUDA error: "
    "Failed call to cuInit: UNKNOWN ERROR (303)",
    "gpu03:4121:4200 [0] misc/cudawrap.cc:36 NCCL WARN Cuda failure 3 'initialization error'",
    "/opt/torch/cuda/__init__.py:129: UserWarning: CUDA initialization: The NVIDIA driver on your system is too old",
    "wandb: ERROR Failed to sample metric: Not Supported",
    "wandb: ERROR Error while calling W&B API: project not found (<Response [404]>)",
    "[W1125 10:00:00.123456789 socket.cpp:464] [c10d] The server socket has failed to bind to [::]:29500 "
    "(errno: 98 - Address already in use).",
    "/usr/bin/ld: cannot find -lcufile: No such file or directory",
    "collect2: error: ld returned 1 exit status",
    "fatal: not a git repository (or any of the parent directories): .git",
    "fatal: detected dubious ownership in repository at '/workspace'",
    "ERROR: pip's dependency resolver does not currently take into account all the packages that are installed.",
    "libibverbs: Warning: couldn't load driver 'libmlx5-rdmav34.so': cannot open shared object file: No such file",
    "Could not load library libcudnn_cnn_train.so.8. Error: libcudnn_cnn_train.so.8: undefined symbol",
    "rm: cannot remove '/tmp/x': No such file or directory",
    "slurmstepd: error: *** STEP 1.0 TASK PROLOG exited 0",
    "Fontconfig error: Cannot load default config file: No such file: (null)",
)
TRACEBACK = ("Traceback (most recent call last):", '  File "train.py", line 3, in <module>', "    main()")


@pytest.fixture(scope="module")
def matcher() -> Matcher:
    return Matcher(load_rules(of_failed_jobs=True))


def judged(folder: Path, matcher: Matcher, **lines: Sequence[str]) -> JudgeVerdict:
    for host, said in lines.items():
        (folder / f"{host}.log").write_text("".join(f"{line}\n" for line in said))
    return judge_logs(read_job([folder], matcher))


@pytest.mark.parametrize("line", STARTS)
def test_what_a_library_says_when_it_starts_blames_nobody(tmp_path: Path, matcher: Matcher, line: str) -> None:
    assert judged(tmp_path, matcher, gpu03=[line, "Loading model", "Downloading data"]).detections == ()


@pytest.mark.parametrize("line", STARTS)
def test_a_start_is_no_cause_of_what_fails_before_the_first_step(tmp_path: Path, matcher: Matcher, line: str) -> None:
    said = [line, "Loading model", "Downloading data", "Building the optimizer", *TRACEBACK, "KeyError: 'lr'"]
    (found,) = judged(tmp_path, matcher, gpu03=said).detections
    assert found.what == "key error" and "KeyError" in found.sentence


def test_lines_that_no_family_knows_need_an_end_of_the_job(tmp_path: Path, matcher: Matcher) -> None:
    line = "ERROR could not open the GPU's profiling device: CUDA driver call failed"
    calm = ["Loading model", "Downloading data"]
    assert judged(tmp_path, matcher, gpu03=[line, *calm]).detections == ()
    (last,) = judged(tmp_path, matcher, gpu03=[*calm, line]).detections
    (ended,) = judged(tmp_path, matcher, gpu03=[*calm, line, "closing", "process exited with exit code 1"]).detections
    assert last.what == ended.what == "CUDA error"


def test_a_rank_that_others_wait_for_is_told_by_what_it_said(tmp_path: Path, matcher: Matcher) -> None:
    line = "gpu03:4121:4200 [0] enqueue.cc:99 NCCL WARN Cuda failure 'unspecified launch failure'"
    calm = ["watching files", "watching the clock"]
    assert judged(tmp_path, matcher, gpu03=[line, *calm]).detections == ()
    waits = "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error"
    (found,) = judged(tmp_path, matcher, gpu03=[line, *calm], gpu01=[waits], gpu02=[waits]).detections
    assert found.what == "CUDA error" and found.who[0].name == "gpu03"


PROGRESS = {
    "transformers": "{{'loss': {loss}, 'grad_norm': 1.1, 'learning_rate': 4.00e-05, 'epoch': 0.{n:02d}}}",
    "examples": "Train Epoch: 1 [{n}40/60000 ({n}%)]\tLoss: {loss}",
    "by hand": "Epoch {n} | loss {loss} | acc 0.5",
    "tqdm": " {n}%|###       | {n}/100 [00:10<00:12,  4.5it/s]",
    "lightning": "Epoch 0:  {n}%|####      | {n}/100 [00:10<00:12,  4.5it/s, v_num=0, train_loss=0.5]",
    "deepspeed": "[2026-11-25 10:00:{n:02d},123] [INFO] [logging.py:96:log_dist] [Rank 0] step={n}, skipped=0",
    "megatron": " iteration {n:8d}/    1000 | samples: 512 | lm loss: {loss}E+00 | number of nan iterations:   0 |",
    "nanogpt": "iter {n}: loss {loss}, time 251.30ms, mfu 38.01%",
    "keras": "{n}/500 [====>.....] - ETA: 5s - loss: {loss}",
    "keras 3": "{n}/500 ━━━━━━━━━━ 3s 5ms/step - accuracy: 0.5 - loss: {loss}",
    "timm": "Train: 0 [  {n}/1251 (  4%)]  Loss: {loss} (6.9)  Time: 0.5s",
    "openmmlab": "11/25 10:00:{n:02d} - mmengine - INFO - Epoch(train)  [1][  {n}/1000]  lr: 1e-4  loss: {loss}",
    "fairseq": '2026-11-25 10:00:{n:02d} | INFO | train_inner | {{"epoch": 1, "loss": "{loss}", "num_updates": "{n}"}}',
}


@pytest.mark.parametrize("form", PROGRESS.values(), ids=PROGRESS.keys())
def test_progress_in_every_form_makes_what_was_before_it_harmless(tmp_path: Path, matcher: Matcher, form: str) -> None:
    before = "RuntimeError: CUDA error: an illegal memory access was encountered (caught)"
    steps = [form.format(n=n, loss=f"2.{99 - n}") for n in range(10, 16)]
    assert judged(tmp_path, matcher, gpu03=[before, *steps]).detections == ()
    (found,) = judged(tmp_path, matcher, gpu03=[*steps, before]).detections
    assert found.what == "CUDA error"


def test_one_line_of_a_loss_or_of_trouble_is_no_progress(tmp_path: Path, matcher: Matcher) -> None:
    before = "RuntimeError: CUDA error: an illegal memory access was encountered"
    once = "the best epoch: 3 with loss 2.1"
    (found,) = judged(tmp_path, matcher, gpu03=[before, once, once, once, once]).detections
    assert found.what == "CUDA error"
    assert progress_of("stopped at epoch 3: the loss is 1e9") is None


def test_a_long_bar_before_training_does_not_hide_its_steps(tmp_path: Path, matcher: Matcher) -> None:
    bar = [f"Map: {n}%|###   | {n}0000/1000000 [00:10<00:12, 99 examples/s]" for n in range(1, 4)]
    steps = [f"step: {n} loss 2.{n}" for n in range(1, 8)]
    before = "RuntimeError: CUDA error: an illegal memory access was encountered (caught)"
    assert judged(tmp_path, matcher, gpu03=[*bar, before, *steps]).detections == ()


def test_what_a_model_writes_as_a_sample_is_no_cause(tmp_path: Path, matcher: Matcher) -> None:
    steps = [f"iter {n}: loss 2.{n}, time 250.00ms" for n in range(20)]
    sample = [
        "-----",
        "sample: RuntimeError: NCCL error",
        "Xid 79 GPU has fallen off the bus, said the kernel.",
        "-----",
    ]
    said = [*steps, *sample, "iter 20: loss 2.0, time 250ms", "saved to out/ckpt.pt"]
    assert judged(tmp_path, matcher, train=[*said, "done"]).detections == ()
    failed = ["done", "iter 21: loss 2.1, time 250ms", *TRACEBACK, "KeyError: 'lr'", "done"]
    (found,) = judged(tmp_path, matcher, train=[*said, *failed]).detections
    assert found.what == "key error"  # a script's "done" after it tells nothing


def test_a_run_of_transformers_that_ended(tmp_path: Path, matcher: Matcher) -> None:
    end = ["{'train_runtime': 655.12, 'train_loss': 1.91, 'epoch': 1.0}", "100%|####| 500/500 [10:55<00:00,  1.31s/it]"]
    steps = [PROGRESS["transformers"].format(n=n, loss=f"2.{n}") for n in range(10, 12)]
    late = "RuntimeError: CUDA error: driver shutting down"
    assert judged(tmp_path, matcher, gpu01=[*steps, *end, late]).detections == ()
