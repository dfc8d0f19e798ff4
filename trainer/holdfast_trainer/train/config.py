"""What a run is: dataclasses that become flags and TOML tables, and the checks between them.

Torch-free, so that a mistake is answered before anything heavy is imported. Each field's docstring
is its help text on the command line.
"""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from holdfast.errors import ConfigError, LayoutError
from holdfast.parallel import Layout, ModuleLayouts
from holdfast_trainer.models.config import GPTConfig, VisionConfig, check_layout
from holdfast_trainer.models.stages import Pipeline, ScheduleName
from holdfast_trainer.train.limits import check_numbers
from holdfast_trainer.train.placement import (
    PlacementConfig,
    check_placement,
    refuse_placement,
)
from holdfast_trainer.train.rerun_config import RerunConfig, check_rerun


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutConfig:
    """How the ranks are arranged; the sizes multiply to the number of ranks."""

    tp: int = 1
    """Tensor axis: ranks that share each layer's matrices."""
    pp: int = 1
    """Pipeline axis: ranks that have different layers."""
    cp: int = 1
    """Context axis: ranks that have different positions of each row."""
    ep: int = 1
    """Expert axis: ranks that have different experts."""
    expt_tp: int | None = None
    """Tensor axis of experts; absent means the same as --tp."""
    dp: int | None = None
    """Data axis: ranks that take different rows; absent means what the other sizes leave."""
    order: str = Layout().order
    """Axes from the one whose neighbours have neighbouring ranks to the slowest, joined with -."""
    pp_schedule: ScheduleName = "1f1b"
    """Order of the microbatches in a pipeline."""
    stages_per_rank: int = 1
    """Stages of each pipeline rank; several with interleaved, looped-bfs and zero-bubble."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each pipeline stage, first to last; absent: as even as they come."""
    cp_attention: Literal["gather", "ring"] = "gather"
    """Attention over a context axis: gather keys and values, or send them round a ring."""

    def layout(self, world_size: int, *, ranks: range | None = None) -> Layout:
        """The layout over `world_size` ranks; LayoutError with the arithmetic if none fits."""
        return Layout.of_world(
            world_size,
            ranks=ranks,
            tp=self.tp,
            pp=self.pp,
            cp=self.cp,
            ep=self.ep,
            expt_tp=self.expt_tp,
            dp=self.dp,
            order=self.order,
        )

    def pipeline(self) -> Pipeline:
        """Return how the model is cut over the pipeline axis."""
        return Pipeline(
            schedule=self.pp_schedule,
            stages_per_rank=self.stages_per_rank,
            stage_layers=self.stage_layers,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Which text, and how much of it goes into a step."""

    data: tuple[Path, ...] = ()
    """Files and directories of text; absent means the source of Python's standard library."""
    seq_len: int = 256
    """Positions per row, in tokens (bytes)."""
    global_batch_size: int = 16
    """Rows per step over all ranks; data ranks share them equally."""
    micro_batch_size: int = 0
    """Rows per forward pass; 0 means all of a rank's at once, or enough parts for a pipeline."""
    allow_other_data: bool = False
    """Go on with other text than the checkpoint was trained on, from the same position."""

    def num_microbatches(self, *, dp: int, num_stages: int) -> int:
        """Equal parts that the rows of a data rank are cut into.

        Raises:
            ConfigError: a pipeline would have fewer microbatches than stages.
        """
        rows = self.global_batch_size // dp
        if self.micro_batch_size:
            count = rows // self.micro_batch_size
        else:
            fits = (n for n in range(num_stages, rows + 1) if rows % n == 0)
            count = next(fits, rows) if num_stages > 1 else 1
        if count < num_stages:
            raise ConfigError(
                f"{count} microbatches of the {rows} rows of a data rank cannot fill {num_stages} "
                f"pipeline stages: raise --global-batch-size, or lower --micro-batch-size, --dp or "
                f"--pp"
            )
        return count


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """The optimizer and its schedules."""

    optimizer: Literal["adamw", "sgd"] = "adamw"
    """Which optimizer."""
    lr: float = 1e-3
    """Learning rate after warm-up."""
    min_lr: float = 1e-4
    """Learning rate at the end of the cosine."""
    warmup_steps: int = 0
    """Steps in which the learning rate rises linearly from 0."""
    decay_steps: int = 0
    """Step at which the cosine ends; 0 means at --steps."""
    weight_decay: float = 0.1
    """Weight decay of matrices at the start; norms have none."""
    end_weight_decay: float | None = None
    """Weight decay at the end of the cosine; absent means constant."""
    beta1: float = 0.9
    """AdamW: decay of the first moment."""
    beta2: float = 0.95
    """AdamW: decay of the second moment."""
    eps: float = 1e-8
    """AdamW: added to the root of the second moment."""
    momentum: float = 0.9
    """SGD: momentum; 0 keeps no state."""
    clip_grad: float = 1.0
    """Largest global gradient norm; a larger gradient is scaled down to it. 0 means no limit."""
    zero: Literal[0, 1, 2] = 0
    """Optimizer state: 0 whole on every data rank, 1 in shards, 2 gradients in shards, too."""
    fsdp: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] | None = None
    """Shard the whole model over data ranks, layer by layer, with torch's FSDP2: what lies in
    shards; absent means not to. In place of --zero."""
    bucket_nbytes: int = 32 * 2**20
    """With --zero: bytes of gradient that travel at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """What is saved and loaded, where and when."""

    save: Path | None = None
    """Directory or URL (s3://…) to save checkpoints in; absent means none are saved."""
    load: Path | None = None
    """Directory or URL to resume from, at its newest committed step. May be the same as --save."""
    load_step: int | None = None
    """The step to load; absent means the newest."""
    max_fallbacks: int = 0
    """Older checkpoints that may be loaded in place of a damaged newest one; 0 means fail."""
    save_interval: int = 100
    """Steps between saves; the last step, and the one a signal stops at, are saved as well."""
    async_save: bool = False
    """Go on training while a writer process brings each save to storage."""
    lazy_staging: bool = False
    """With --async-save: copy large parameters and optimizer state in the next forward and backward
    instead of before them. On CPU, with Linux 6.7 or newer; no difference elsewhere."""
    keep_image_s: float = 0.0
    """Seconds that the bytes of the newest save stay in memory after the run has ended, so that a
    restart on the same host need not read them from storage; 0 for none."""
    ckpt_format: Literal["holdfast", "torch_dist"] = "holdfast"
    """The form of data files: holdfast, or torch_dist, which PyTorch DCP and Megatron open, too."""
    keep_last: int = 0
    """Checkpoints to keep, newest first; 0 keeps all. The newest sound one always stays."""
    keep_every: int = 0
    """With --keep-last: also keep steps divisible by this; 0 for none."""
    replicate_over: tuple[str, ...] = ()
    """Axes, such as tp: store replicated tensors once for each coordinate along these."""
    max_copy_fraction: float = 1.0
    """The most bytes that --replicate-over may add, as a fraction of those without."""
    max_copied_nbytes: int | None = None
    """The largest tensor, in bytes, that --replicate-over stores more than once; absent for all."""
    check_replicas_every: int = 0
    """Saves from one comparison of what several ranks should hold alike to the next; 0 for none.
    A rank that differs fails the save; with a rerun machine its device is in the report."""
    save_optim: bool = True
    """Save the optimizer's state; --no-save-optim leaves it out of checkpoints."""
    load_optim: bool = True
    """Load the optimizer's state; with --no-load-optim the optimizer starts afresh."""
    load_scheduler: bool = True
    """Load the schedules; with --no-load-scheduler they start afresh, with this run's settings."""
    save_rng: bool = True
    """Save the random number generators; --no-save-rng leaves them out of checkpoints."""
    load_rng: bool = True
    """Load the random number generators; with --no-load-rng they start from the seed."""
    finetune: bool = False
    """Load the weights only, and start at step 0 and the start of the data."""
    init_from: Path | None = None
    """Weights to start from if --load has no checkpoint: a Hugging Face folder, a PyTorch DCP
    directory, a file of torch.save, a run of Megatron or of Holdfast. Read in place."""
    init_map: str | None = None
    """How the names of --init-from become those of the model: the name of a preset, such as
    llama-hf-to-gpt, or a TOML file."""
    exit_on_missing_checkpoint: bool = False
    """Fail, instead of starting afresh, if --load holds no committed checkpoint."""

    @property
    def directories(self) -> tuple[Path | None, ...]:
        """Where a checkpoint of the run may be, the likeliest first."""
        return self.save, self.load


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """What is reported, and where."""

    log_interval: int = 1
    """Steps between progress lines on the terminal."""
    jsonl: Path | None = None
    """File to append one JSON object per step, save and load to."""
    rank_log: bool = True
    """Append each rank's saves and loads to DIR/events of --save; `holdfast view` draws them."""
    tensorboard: Path | None = None
    """Directory for TensorBoard event files; needs the extra holdfast-trainer[tensorboard]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """A whole run."""

    nproc: int = 1
    """Processes to start on this machine; leave out under torchrun, which starts them itself."""
    steps: int = 200
    """Optimizer steps in all, those before a resume included."""
    seed: int = 1
    """Seed of parameters, order of the data, and random number generators."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Arithmetic of matrix products; parameters, gradients and optimizer state are always fp32.
    With fp16 the loss is scaled, and a step whose gradients overflow is left out."""
    deterministic: bool = False
    """Refuse operations without a deterministic implementation; slower on GPUs."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes GPUs if there are any."""
    timeout_s: float = 60.0
    """Seconds to wait, between steps, for a rank that does not arrive before naming it and giving
    up."""
    data_timeout_s: float = 600.0
    """The same inside of a step, where a rank may be late in a long forward or backward."""
    model: GPTConfig = field(default_factory=GPTConfig)
    """Sizes of the model."""
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    """Arrangement of the ranks."""
    data: DataConfig = field(default_factory=DataConfig)
    """Text and batches."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer and schedules."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving and loading."""
    log: LogConfig = field(default_factory=LogConfig)
    """Reporting."""
    rerun: RerunConfig = field(default_factory=RerunConfig)
    """Faults in what is computed."""
    vision: VisionConfig = field(default_factory=VisionConfig)
    """Sizes of a vision encoder and a projector."""
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    """Where those are."""

    def module_layouts(self, *, world_size: int) -> ModuleLayouts:
        """The layouts of all modules of a multimodal run; see `PlacementConfig.layouts`."""
        return self.placement.layouts(
            world_size,
            make_language=lambda ranks: self.layout.layout(len(ranks), ranks=ranks),
        )

    def check(self, *, world_size: int) -> Layout:
        """The layout of this run, or of its language model, once everything fits together.

        Raises:
            ConfigError, LayoutError: naming the flag and the fix.
        """
        check_numbers(self)
        _check_counts(self)
        _check_optim(self.optim, steps=self.steps)
        _check_checkpoint(self.checkpoint)
        check_rerun(self.rerun, save=self.checkpoint.save)
        try:
            layout = self._layout(world_size)
        except LayoutError as error:
            if world_size > 1:
                raise
            raise LayoutError(f"{error} One process runs: --nproc N starts N of them.") from error
        check_layout(self.model, layout=layout)
        _check_fsdp(self, layout=layout)
        stages = self.layout.pipeline().stages(num_layers=self.model.num_layers, pp=layout.pp)
        _check_batch(self.data, layout=layout)
        self.data.num_microbatches(dp=layout.dp, num_stages=len(stages))
        return layout

    def _layout(self, world_size: int) -> Layout:
        """The layout of the run or of its language model; refuses what a multimodal one is not."""
        if not self.vision.multimodal:
            refuse_placement(self.placement)
            return self.layout.layout(world_size)
        layouts = self.module_layouts(world_size=world_size)
        check_placement(
            self.placement,
            vision=self.vision,
            layouts=layouts,
            global_batch_size=self.data.global_batch_size,
        )
        if self.data.data:
            raise ConfigError(
                "--data with the preset multimodal: its data are images; leave it out"
            )
        if self.optim.zero == 0 or self.optim.fsdp is not None:
            raise ConfigError(
                "the preset multimodal keeps optimizer state in shards: set --zero 1 or 2, and "
                "leave --fsdp out"
            )
        return layouts["language"]


def read_toml(path: Path) -> TrainConfig:
    """The run that a TOML file describes: top-level keys and one table per section.

    Raises:
        ConfigError: no such file, not TOML, an unknown key (the nearest valid one is named), or a
            value of the wrong type.
    """
    try:
        with path.open("rb") as file:
            raw = tomllib.load(file)
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration file {path}: {error.strerror}; check the path"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    _check_keys(raw, kind=TrainConfig, where=str(path))
    try:
        return msgspec.convert(raw, TrainConfig, dec_hook=_decode_path)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise ConfigError(f"{path}: {error.__cause__}") from error
        raise ConfigError(f"{path}: {error}; see `holdfast train --help` for its type") from error


def _decode_path(kind: type, value: Any) -> Any:
    """Return what msgspec asks for types that TOML lacks."""
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise ValueError(f"Expected a path as a string, got {value!r}")


def _check_keys(raw: dict[str, Any], *, kind: Any, where: str) -> None:
    """Refuse unknown keys of a TOML table and of those below it."""
    known = {item.name: item for item in fields(kind)}
    for key, value in raw.items():
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r}{_hint(key, kind=kind)}")
        section = _section(known[key])
        if section is not None and isinstance(value, dict):
            _check_keys(value, kind=section, where=f"{where}, table [{key}]")


def _section(item: Field[Any]) -> type | None:
    """The dataclass of a field that is a table; None for a plain value."""
    factory: Any = item.default_factory
    return factory if isinstance(factory, type) and is_dataclass(factory) else None


def _hint(key: str, *, kind: Any) -> str:
    """Return what an unknown key may have meant: a near name, or another table's key."""
    for table in fields(TrainConfig):
        section: Any = _section(table)
        if section is not None and key in {item.name for item in fields(section)}:
            return f"; it belongs in the table [{table.name}]"
    names = [item.name for item in fields(kind)]
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; valid keys here: {', '.join(names)}"


def _check_counts(config: TrainConfig) -> None:
    """Refuse counts that contradict each other."""
    if config.checkpoint.keep_every and not config.checkpoint.keep_last:
        raise ConfigError(
            "--keep-every without --keep-last keeps all checkpoints anyway; add --keep-last N"
        )
    if config.model.vocab_size < 256:
        raise ConfigError(
            f"--vocab-size {config.model.vocab_size}: the tokens are bytes; set it to 256 or more"
        )


def _check_optim(optim: OptimConfig, *, steps: int) -> None:
    """Refuse curves that cannot be drawn."""
    if optim.min_lr > optim.lr:
        raise ConfigError(
            f"--min-lr {optim.min_lr:g} is above --lr {optim.lr:g}: the cosine only goes down; "
            f"lower --min-lr or raise --lr"
        )
    end = optim.decay_steps or steps
    if optim.warmup_steps > end:
        raise ConfigError(
            f"--warmup-steps {optim.warmup_steps} is after the end of the schedule at step {end}; "
            f"lower --warmup-steps, or raise --decay-steps or --steps"
        )


def _check_fsdp(config: TrainConfig, *, layout: Layout) -> None:
    """Refuse what fully sharded models do not run with."""
    fsdp, zero = config.optim.fsdp, config.optim.zero
    if fsdp is None:
        return
    if zero:
        raise ConfigError(
            f"--fsdp {fsdp} with --zero {zero}: both shard the optimizer's state; leave --zero out "
            f"(--fsdp optim shards what --zero 1 does, --fsdp optim_grads what --zero 2 does)"
        )
    if layout.world_size == 1:
        raise ConfigError(
            f"--fsdp {fsdp} in one process has no other rank to shard over: leave it out, or start "
            f"several with --nproc N; checkpoints are the same"
        )
    schedule = config.layout.pp_schedule
    if layout.pp > 1 and schedule not in ("1f1b", "gpipe"):
        raise ConfigError(
            f"--fsdp {fsdp} with --pp-schedule {schedule}: it needs one stage per rank and whole "
            f"backwards; set --pp-schedule 1f1b or gpipe, or use --zero 1 in place of --fsdp"
        )
    if layout.pp > 1 and config.model.tied_head:
        raise ConfigError(
            f"--fsdp {fsdp} with --pp {layout.pp} and a tied head: two stages would have shards of "
            f"one embedding; set --no-tied-head, or use --zero 1 in place of --fsdp"
        )


def _check_checkpoint(checkpoint: CheckpointConfig) -> None:
    """Refuse options that have no meaning without another one, or together."""
    needs = {
        "load": {
            "--load-step": checkpoint.load_step is not None,
            "--no-load-optim": not checkpoint.load_optim,
            "--no-load-scheduler": not checkpoint.load_scheduler,
            "--no-load-rng": not checkpoint.load_rng,
            "--max-fallbacks": checkpoint.max_fallbacks > 0,
            "--finetune": checkpoint.finetune,
            "--exit-on-missing-checkpoint": checkpoint.exit_on_missing_checkpoint,
        },
        "save": {
            "--async-save": checkpoint.async_save,
            "--keep-image-s": checkpoint.keep_image_s > 0 and checkpoint.load is None,
            "--keep-last": checkpoint.keep_last > 0,
            "--check-replicas-every": checkpoint.check_replicas_every > 0,
            "--no-save-optim": not checkpoint.save_optim,
            "--no-save-rng": not checkpoint.save_rng,
        },
    }
    for option, flags in needs.items():
        for flag, is_set in flags.items():
            if is_set and getattr(checkpoint, option) is None:
                raise ConfigError(f"{flag} has no meaning without --{option}: add --{option} DIR")
    if checkpoint.init_map is not None and checkpoint.init_from is None:
        raise ConfigError("--init-map has no meaning without --init-from: add --init-from PATH")
    if checkpoint.init_from is not None and checkpoint.exit_on_missing_checkpoint:
        raise ConfigError(
            "--init-from starts a run that has no checkpoint, and --exit-on-missing-checkpoint "
            "refuses that: leave one of them out"
        )
    if checkpoint.lazy_staging and not checkpoint.async_save:
        raise ConfigError("--lazy-staging has no meaning without --async-save: add --async-save")
    if checkpoint.max_fallbacks and checkpoint.load_step is not None:
        raise ConfigError(
            f"--max-fallbacks with --load-step {checkpoint.load_step}: a step given by number is "
            f"loaded or not; leave one of them out"
        )
    if checkpoint.finetune and checkpoint.save is not None and checkpoint.save == checkpoint.load:
        raise ConfigError(
            "--finetune starts a new run at step 0, so --save must not be the directory of the "
            "run it is loaded from: give --save another directory"
        )


def _check_batch(data: DataConfig, *, layout: Layout) -> None:
    """Refuse batches and rows that the layout cannot share equally."""
    rows, num_data_ranks = data.global_batch_size, layout.dp
    if layout.cp > 1 and data.seq_len % (2 * layout.cp):
        raise ConfigError(
            f"--seq-len {data.seq_len} with --cp {layout.cp}: each rank takes two equal pieces of "
            f"a row; set --seq-len to a multiple of {2 * layout.cp}"
        )
    if rows % num_data_ranks:
        raise ConfigError(
            f"--global-batch-size {rows} cannot be shared by {num_data_ranks} data ranks: "
            f"set --global-batch-size to a multiple of {num_data_ranks}, or another --dp"
        )
    local = rows // num_data_ranks
    if data.micro_batch_size < 0 or (data.micro_batch_size and local % data.micro_batch_size):
        raise ConfigError(
            f"--micro-batch-size {data.micro_batch_size} does not divide the {local} rows of a "
            f"rank (--global-batch-size {rows} over {num_data_ranks} data ranks): "
            f"set it to a divisor of {local}, or to 0"
        )
