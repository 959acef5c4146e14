"""From a checked config to a run that can start: device, data, model, optimizer, and the state to go on from."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from phalanx.checkpoint.restoring.restore import SpoiltError
from phalanx.checkpoint.session.open_session import Saver, open_session
from phalanx.core.errors import UserError
from phalanx.core.fault_points import NO_POINTS, Points
from phalanx.core.layout import Axis
from phalanx.data.host_loader import HostLoaderClient, start_host_loader, why_no_host_loader
from phalanx.data.loader import Loader
from phalanx.data.prepare import Progress as PrepareProgress
from phalanx.data.prepare import prepare
from phalanx.data.tokenizers.spec import save_tokenizer
from phalanx.data.tokens.prepared_corpus import Prepared
from phalanx.launch.cores import allowed_cpus, ignored_threads
from phalanx.model.decoder import Decoder
from phalanx.model.logical_parameters import initialise
from phalanx.model.offload import make_offload
from phalanx.model.shapes import parameter_table
from phalanx.optim.bad_step import BadStepJudge
from phalanx.optim.build import build_optimizer
from phalanx.parallel.apply import Build, build_engine
from phalanx.parallel.config import ParallelConfig
from phalanx.parallel.layout_choice import Machines
from phalanx.parallel.mesh import GroupCopies
from phalanx.parallel.tensor.fused import choose_overlap
from phalanx.train.config import RunConfig
from phalanx.train.derived.kernel_choice import decide_compiling, lacking_for_a_gpu
from phalanx.train.derived.memory_fit import first_level, judge_of
from phalanx.train.derived.memory_needs import described, require_memory, smaller_model, standing_bytes
from phalanx.train.derived.run_layout import ignored_settings, resolve_layout
from phalanx.train.derived.run_numbers import complete_model, destination, total_steps
from phalanx.train.device import Device, choose_device, measure_peak
from phalanx.train.heartbeat import START_S
from phalanx.train.ranks import Ranks
from phalanx.train.run_folder import RunFolder, changes_text, note_hardware
from phalanx.train.system_errors import explained
from phalanx.train.trainer import LocalTrainer, Trainer
from phalanx.train.training_run import Run, Stream, choose_passes, described_attention, require_attention
from phalanx.train.weights.initial import load_initial_weights
from phalanx.train.weights.sampling import prompt_ids

Say = Callable[[str], None]

# Ranks along these axes hold the same blocks wherever they do not split them: one reads, all have it (MegaScale 4).
_DATA_AXES: tuple[Axis, ...] = ("replicate", "shard", "context")


def assemble(
    config: RunConfig,
    folder: RunFolder,
    say: Say,
    prepare_progress: Callable[[PrepareProgress], None] | None = None,
    ranks: Ranks | None = None,
    points: Points = NO_POINTS,
) -> Run:
    """Prepare the data, build every part, and take up the newest good state if there is one; all ranks together.

    Args:
        say: shows a line to a person.
        points: where tests inject faults into checkpoints.

    Raises:
        UserError: anything that the config asks for and that cannot be had.
    """
    ranks = ranks or Ranks()
    device = choose_device(config.train, ranks.worker, shared=config.parallel.share_device)
    with ranks.phases.phase("data"):
        ranks.pulse.enter("prepare")
        # One rank of every host prepares the text, which may take long; the others wait and find it done.
        if ranks.is_first_of_host:
            prepare(config.data, progress=prepare_progress)
        ranks.peers.barrier()
        ranks.pulse.enter("start", START_S)
        prepared = prepare(config.data)
    spread = _with_layout(config, prepared, ranks, device, say)
    spread = _with_kernels(spread, ranks, device, say)
    _require_enough_text(config, prepared)
    needed = standing_bytes(complete_model(config, prepared.vocab_size), config.optim)
    with explained(described(needed), smaller_model(needed)), ranks.phases.phase("model"):
        saver = _open_saver(spread, folder, ranks, say, points)
        build = partial(build_run, spread, folder, device, prepared, ranks, saver)
        # Opened before the model is built: weights that a state will overwrite need not be drawn first.
        blank = saver.has_states()
        run = build(blank=blank)
    try:
        with explained(described(needed), smaller_model(needed)), ranks.phases.phase("checkpoint"):
            run = take_up(run, build, say, blank=blank)
            require_attention(run)
            run.note = say
            run.watch()
        # Written only now that the run stands: one that cannot start must not bind the folder to its mistakes.
        if ranks.is_first:
            save_tokenizer(config.data, folder.tokenizer)
            folder.record_config(config)  # as it was given: the run may go on in another layout
            note_hardware(folder, describe_hardware(run))
        _note_ignored_settings(run, say)
    except BaseException:
        saver.finish(clean=False)  # what hosts hold in memory stays for the next start
        raise
    return run


def _with_layout(config: RunConfig, prepared: Prepared, ranks: Ranks, device: Device, say: Say) -> RunConfig:
    """The config with its layout filled in, once it is known to be possible; the ranks' groups are opened.

    Of several ranks the first decides for all, by the least memory that any of them has.
    """
    available_bytes = device.available_bytes()
    if ranks.worker is None:
        needed = standing_bytes(complete_model(config, prepared.vocab_size), config.optim)
        require_memory(needed, available_bytes, device.name)
        return config
    on_gpu, local = device.torch_device.type == "cuda", ranks.worker.local_world_size
    if not on_gpu and available_bytes is not None:
        available_bytes //= local  # the ranks of a host share its memory
    # Hosts differ in free memory: ranks that chose for themselves could choose other layouts, and hang in the first
    # collective.
    everywhere = ranks.peers.collect([available_bytes, device.memory_bytes() if on_gpu else None, local])

    def least(values: Sequence[int | None]) -> int | None:
        return min((value for value in values if value is not None), default=None)

    def decide() -> list[Any]:
        assert everywhere is not None  # only rank 0 decides
        free, whole, per_host = (least(column) for column in zip(*everywhere, strict=True))
        judge = None
        if whole is not None:
            model = complete_model(config, prepared.vocab_size)
            judge = judge_of(config, model, device.precision, device_bytes=whole)
        machines = Machines(per_host or 1, free)
        found = resolve_layout(config, prepared.vocab_size, machines, ranks.size, say, judge)
        return [found.parallel.model_dump(mode="json"), found.train.micro_batch]

    parallel, micro_batch = ranks.decide(decide)
    config = config.model_copy(
        update={
            "parallel": ParallelConfig.model_validate(parallel),
            "train": config.train.model_copy(update={"micro_batch": micro_batch}),
        }
    )
    ranks.join(config.parallel, device.torch_device)
    return config


def _with_kernels(config: RunConfig, ranks: Ranks, device: Device, say: Say) -> RunConfig:
    """The config with `train.compile` and `parallel.tensor_overlap` decided; all ranks call it."""
    on_gpu = device.torch_device.type == "cuda"
    compiles, why = decide_compiling(config, on_gpu, lacking_for_a_gpu() if on_gpu else "")
    if why:
        say(why)
    overlap = config.parallel.tensor_overlap
    if overlap == "auto":
        overlap, why = choose_overlap(config.parallel.layout, ranks.peers, device.torch_device)
        if why:
            say(why)
    train = config.train.model_copy(update={"compile": compiles})
    parallel = config.parallel.model_copy(update={"tensor_overlap": overlap})
    return config.model_copy(update={"train": train, "parallel": parallel})


def _require_enough_text(config: RunConfig, prepared: Prepared) -> None:
    """Refuse text so short that one batch would hold a sample twice, and a prompt that could not be sampled after the
    last step."""
    samples, batch = Loader(prepared, config.data).samples_per_epoch, config.train.global_batch
    if samples < batch:
        less = "hold less out, " if config.data.held_out else ""
        raise UserError(
            f"the text makes {samples} samples of {config.data.sequence_length} tokens, fewer than one batch",
            cure=f"add text, {less}or set train.global_batch to {samples} or less",
            field="train.global_batch",
            value=batch,
        )
    prompt, longest = config.evaluate.sample_prompt, complete_model(config, prepared.vocab_size).max_sequence
    taken = len(prompt_ids(prepared.tokenizer, prompt)) if prompt else 0
    if taken >= longest:
        raise UserError(
            f"it takes {taken} tokens and the model's longest sequence is {longest}",
            cure="shorten it, or set it to an empty text",
            field="evaluate.sample_prompt",
        )


def _open_saver(config: RunConfig, folder: RunFolder, ranks: Ranks, say: Say, points: Points) -> Saver:
    """What keeps the state of a run; all ranks together, once their groups are opened."""
    copies = None
    if ranks.mesh is not None:
        copies = GroupCopies(ranks.mesh.group(*_DATA_AXES), _DATA_AXES, ranks.mesh.device)
    return open_session(
        destination(config, folder.path),
        config.checkpoint,
        peers=ranks.peers,
        copies=copies,
        layout=config.parallel.layout,
        run_config=config.model_dump(mode="json"),
        report=say,
        points=points,
    )


def build_run(
    config: RunConfig,
    folder: RunFolder,
    device: Device,
    prepared: Prepared,
    ranks: Ranks,
    saver: Saver,
    *,
    blank: bool = False,
) -> Run:
    """Every part of a run that starts at step 0; with `blank` its weights are anything, until they are restored."""
    trainer = build_trainer(config, prepared.vocab_size, device, ranks, blank=blank)
    loader = Loader(prepared, config.data)
    torch.manual_seed(config.train.seed)  # nothing here draws from torch's generator; what a user adds may
    whole_shapes = {name: p.shape for name, p in parameter_table(trainer.model_config).items()}
    return Run(
        config=config,
        folder=folder,
        device=device,
        peak=measure_peak(device) if config.logging.mfu else None,
        prepared=prepared,
        loader=loader,
        ranks=ranks,
        trainer=trainer,
        stream=open_stream(config, loader, ranks, trainer.data_index, trainer.data_ranks),
        optimizer=build_optimizer(
            config.optim,
            trainer.parameters,
            reduction=trainer.reduction,
            gradient_norm=trainer.gradient_norm,
            whole_shapes=whole_shapes,
        ),
        judge=BadStepJudge(config.optim.bad_step, device.torch_device),
        total_steps=total_steps(config),
        saver=saver,
    )


def open_stream(config: RunConfig, loader: Loader, ranks: Ranks, index: int, count: int) -> Stream:
    """How this rank gets its share `index` of `count` of every global batch; all ranks of a run call it together.

    From a loader of its own, or from one that all ranks of its host share (MegaScale 3.4).
    """
    own = partial(loader.stream, rank=index, ranks=count)
    if not config.parallel.host_loader or ranks.size == 1 or why_no_host_loader() is not None:
        return own
    host = socket.gethostname()
    indices = [data_index for name, data_index in ranks.peers.gather([host, index]) if name == host]
    address = ""
    if ranks.is_first_of_host and len(indices) > 1:  # a host of one rank needs no process for it
        # The loader may use any core of this run, not those of the host's first rank alone, with which it ends.
        cores = os.sched_getaffinity(os.getppid()) if ranks.worker is not None else allowed_cpus()
        started = start_host_loader(loader.prepared, config.data, indices=indices, cores=cores)
        ranks.at_end.callback(started.close)
        address = started.address
    known = [found for name, found in ranks.peers.gather([host, address]) if name == host and found]
    return HostLoaderClient(known[0], rank=index, ranks=count).stream if known else own


def build_trainer(config: RunConfig, vocab_size: int, device: Device, ranks: Ranks, *, blank: bool = False) -> Trainer:
    """The model with the weights of its seed, or `blank`: whole, or this rank's part of it."""
    if ranks.mesh is None:
        model = build_model(config, vocab_size, device, blank=blank)
        return LocalTrainer(model, device, compiled=config.train.compile is True, recorder=ranks.spans.recorder)
    build = Build(
        sequence_length=config.data.sequence_length,
        device=device.torch_device,
        compute_dtype=device.compute_dtype,
        seed=config.train.seed,
        blank=blank,
        recompute=first_level(config),
        offload=_offloaded(config, device),
        compile=config.train.compile is True,
        fp8_layers=config.train.fp8_layers(config.model.layers),
        registered=ranks.mesh.registered,
        recorder=ranks.spans.recorder,
    )
    return build_engine(complete_model(config, vocab_size), config.parallel, ranks.mesh, build)


def build_model(config: RunConfig, vocab_size: int, device: Device, *, blank: bool = False) -> Decoder:
    """The model on its device with the weights of its seed, or `blank`; recomputation and compilation as configured."""
    model = Decoder(
        complete_model(config, vocab_size),
        device=device.torch_device,
        compute_dtype=device.compute_dtype,
        fp8_layers=config.train.fp8_layers(config.model.layers),
    )
    if not blank:
        initialise(model, config.train.seed)
    model.set_recompute(first_level(config))
    model.offload = make_offload(_offloaded(config, device), device.torch_device)
    if config.train.compile is True:
        model.compile()
    return model


def _offloaded(config: RunConfig, device: Device) -> float:
    """On a CPU activations are on the host anyway."""
    return config.train.offload if device.torch_device.type == "cuda" else 0.0


def take_up(run: Run, build: Callable[[], Run], say: Say, *, blank: bool) -> Run:
    """Go on from the newest good state; else start, from `train.init_from` where that is set.

    Args:
        build: builds it again, with the weights of its seed: the only way back where a state turns out to be damaged
            after parts of it were read, or where nothing good was found to fill blank weights with.
        blank: the weights of `run` are anything so far.

    Returns:
        The run, or the one that was built instead.

    Raises:
        UserError: checkpoints are there, and none is good.
    """
    try:
        restored = run.restore()
    except SpoiltError:
        # The tensors hold parts of a damaged state: everything is built again.
        restored, blank = None, True
    if restored is not None:
        # The checkpoint's micro-batch is kept where it fits this layout, so that the run repeats the same arithmetic.
        kept, wanted = run.progress.micro_batch, run.config.train.micro_batch
        share = run.config.train.global_batch // run.trainer.data_ranks
        fits = bool(kept) and share % kept == 0 and wanted in (0, kept)
        # The micro-batch, or the layout, may be what was changed.
        choose_passes(run, say, keep=fits and run.config.run.resume != "changed")
        if restored.source == "durable":
            where = f"{destination(run.config, run.folder.path)}/{restored.name}"
        else:
            where = "the memory of " + "; ".join(str(rate) for rate in restored.rates)
        if run.changes:
            say(changes_text(run.changes))
        say(f"going on from {where} (step {restored.step} of {run.total_steps})")
        return run
    if blank:
        run = build()
    if run.config.train.init_from:
        load_initial_weights(run.trainer, run.prepared.tokenizer, Path(run.config.train.init_from), say)
    choose_passes(run, say)
    return run


def _note_ignored_settings(run: Run, say: Say) -> None:
    problem = "" if run.config.train.threads else ignored_threads(os.environ)
    if problem:
        say(f"{problem} ({run.device.threads} here); set it to a whole number from 1, or unset it")
    if run.config.train.offload and run.device.torch_device.type == "cpu":
        say(f"train.offload = {run.config.train.offload:g} has no effect: activations are on the host already")
    for line in (*ignored_settings(run.config.parallel), *run.config.train.ignored()):
        say(line)
    every, evaluated = run.config.checkpoint.every_steps, run.config.evaluate.every_steps
    finds_the_best = every and evaluated and math.lcm(every, evaluated) < run.total_steps
    if run.config.checkpoint.keep_best and not finds_the_best:
        say("checkpoint.keep_best has no effect before the end: no checkpoint is due at a step that is evaluated")
    start, first, last = run.config.profile.start_step, run.progress.step + 1, run.total_steps
    if start and not first <= start <= last:
        say(f"profile.start_step = {start} is ignored: this run does steps {first} to {last}")


def describe_hardware(run: Run) -> dict[str, object]:
    """What a run ran on, for its record."""
    peak = run.peak
    return {
        "device": run.device.name,
        "kind": run.device.torch_device.type,
        "compute_dtype": str(run.device.compute_dtype).removeprefix("torch."),
        "threads": run.device.threads,
        "ranks": run.ranks.size,
        "layout": str(run.config.parallel.layout),
        "attention": described_attention(run),
        "startup_s": run.ranks.phases.seconds,
        "peak_flops_per_s": None if peak is None else peak.flops_per_s,
        "peak_source": None if peak is None else peak.source,
        "torch_build": torch.__config__.show().splitlines()[0],
    }
