"""What ``dshard plan`` and ``dshard simulate`` share: options of the model, its training, and the devices."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dshard.cli.usage import RunError, UsageError

if TYPE_CHECKING:
    from dshard.cli.models import Sampled
    from dshard.planner import Cluster, Device, Training
    from dshard.planner.rates import Rates

_DTYPES = ("bfloat16", "float16", "float32")
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_STATE_BYTES = {"adamw": (8, 4), "momentum": (4, 0), "sgd": (0, 0)}  # per element: kept, and while it steps
_SUFFIXES = (".png", ".svg", ".pdf")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that both commands have."""
    model = parser.add_argument_group("model and training")
    model.add_argument("--batch", help="samples per rank, or auto (1; of module:function, those of its sample)")
    model.add_argument("--sequence", type=int, metavar="TOKENS", help="per sample (what is usual for the model)")
    model.add_argument("--compile", action="store_true", help="by torch.compile, which fuses kernels; needs --profile")
    model.add_argument(
        "--offload",
        nargs="?",
        choices=("none", "all", "auto"),
        const="all",
        default="none",
        help="after MODEL: units in the CPU's memory, all or with auto those that the plan chooses (none)",
    )
    model.add_argument("--checkpoint", action="store_true", help="blocks compute their forward again in backward")
    model.add_argument(
        "--checkpointing",
        nargs="+",
        choices=("none", "selective", "full", "auto"),
        help="what each unit may compute again in backward, to be applied with the plan; auto for any (none)",
    )
    for name, default, text in (
        ("--dtype", "bfloat16", "of computations: param_dtype of mp_policy (%(default)s)"),
        ("--reduce-dtype", None, "of gradients that are reduced: reduce_dtype of mp_policy (that of --dtype)"),
        ("--master", "float32", "of stored parameters (%(default)s)"),
    ):
        model.add_argument(name, choices=_DTYPES, type=_dtype_name, default=default, help=text)
    model.add_argument("--optimizer", choices=tuple(_STATE_BYTES), default="adamw", help="(%(default)s)")
    model.add_argument(
        "--margin",
        type=float,
        metavar="PERCENT",
        help="by which a simpler plan may be slower; 0 for the fastest (3; with --profile, what cannot be told apart)",
    )
    devices = parser.add_argument_group("devices")
    devices.add_argument("--device", required=True, help="such as a100-40g; an unknown name lists all")
    devices.add_argument("--profile", type=Path, metavar="FILE", help="of dshard calibrate; published: that is shipped")
    devices.add_argument("--memory", help="limit per rank, such as 38GiB (95%% of the device's)")
    devices.add_argument(
        "--memory-of",
        choices=("live", "reserved", "expandable"),
        default="live",
        help="what it limits: tensors, or segments of CUDA's allocator, fixed or expandable (%(default)s)",
    )
    devices.add_argument("--ranks-per-host", type=int, metavar="RANKS", help="(what is usual for the device)")
    devices.add_argument("--hosts", type=int, help="the same, as the number of hosts")
    devices.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="RANKS", help="of a host, over which layers are cut (1)"
    )
    devices.add_argument("--between-hosts", type=float, metavar="GBIT", help="network of a host, in Gbit/s (usual)")


def _dtype_name(text: str) -> str:
    """A dtype's name, in full."""
    return _SHORT.get(text, text)


@dataclass(frozen=True, slots=True)
class Target:
    """A model, how it is trained and on what; the number of ranks is still open.

    Attributes:
        memory_of: what it limits, as of `dshard.plan`.
        batch: samples per rank, "auto", or None for those of the sample.
        margin: as of `dshard.plan`.
        rates: of --profile.
        checkpointing: that a unit may have, as of `dshard.plan`.
        offload: as of `dshard.plan`.
        tensor_parallel: ranks over which layers are cut.
    """

    sampled: Sampled
    training: Training
    device: Device
    limit_bytes: int
    memory_of: str
    batch: int | str | None
    margin: float | None
    ranks_per_host: int | None
    hosts: int | None
    between_hosts: float | None
    rates: Rates | None
    checkpointing: tuple[str, ...]
    offload: str
    tensor_parallel: int

    def cluster(self, num_ranks: int) -> Cluster:
        """So many ranks on the usual hosts, or on those that were asked for.

        Raises:
            UsageError: they do not fill their hosts.
        """
        from dshard.planner import cluster_of

        per_host = self.ranks_per_host
        if self.hosts is not None:
            if num_ranks % self.hosts:
                raise UsageError(
                    f"--hosts must divide --world, but they are {self.hosts} and {num_ranks}. Pass --hosts 1."
                )
            per_host = num_ranks // self.hosts
        usual = per_host or self.device.per_host
        if num_ranks > usual and num_ranks % usual:
            raise UsageError(
                f"--world must be a multiple of the {usual} ranks of a host, but it is {num_ranks}. Pass "
                f"--world {-(-num_ranks // usual) * usual}."
            )
        per_host = min(num_ranks, usual)
        return cluster_of(
            self.device,
            num_ranks,
            ranks_per_host=per_host,
            between_hosts=self.between_hosts,
            profile=self.rates,
            tensor_parallel=self.tensor_parallel,
        )


def target_of(args: argparse.Namespace) -> Target:
    """Checks the options that both commands have, and builds the model without memory.

    Raises:
        UsageError: something is wrong.
    """
    import torch

    from dshard.errors import DShardError
    from dshard.planner import Training
    from dshard.planner.texts import parse_bytes

    batch, rates, checkpointing = _batch(args.batch), _rates_for(args), _checkpointing(args)
    for name in ("sequence", "ranks_per_host", "hosts", "tensor_parallel"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, but it is {value}.")
    if args.hosts is not None and args.ranks_per_host is not None:
        raise UsageError("--hosts and --ranks-per-host say the same, but both are given. Pass one of them.")
    if args.between_hosts is not None and not 0 < args.between_hosts < float("inf"):
        raise UsageError(f"--between-hosts must be a finite number above 0, but it is {args.between_hosts}.")
    if args.margin is not None and not 0 <= args.margin < float("inf"):
        raise UsageError(f"--margin must be a finite number of percents, 0 or more, but it is {args.margin}.")
    try:
        device = _device(args.device, rates)
        dtype = getattr(torch, args.dtype)
        if args.dtype not in device.flops_per_s:
            known = ", ".join(device.flops_per_s)
            raise UsageError(f"--dtype must be one that {device.name} computes in ({known}), but it is {args.dtype}.")
        limit = device.limit_bytes if args.memory is None else parse_bytes(_number(args.memory), "--memory")
    except DShardError as error:
        raise UsageError.of(error) from error
    from dshard.cli.models import build_model

    sampled = build_model(
        args.model,
        batch=batch if isinstance(batch, int) else None,
        sequence=args.sequence,
        is_checkpointed=args.checkpoint,
    )
    sampled.model.to(getattr(torch, args.master))
    training = Training(
        dtype,
        dtype if args.reduce_dtype is None else getattr(torch, args.reduce_dtype),
        *_STATE_BYTES[args.optimizer],
        tokens_per_sample=sampled.num_tokens,
        is_compiled=args.compile,
    )
    rate = None if args.between_hosts is None else args.between_hosts * 1e9 / 8
    margin = None if args.margin is None else args.margin / 100
    hosts = args.ranks_per_host, args.hosts, rate
    limits = limit, args.memory_of
    chosen = checkpointing, args.offload
    return Target(sampled, training, device, *limits, batch, margin, *hosts, rates, *chosen, args.tensor_parallel)


def _checkpointing(args: argparse.Namespace) -> tuple[str, ...]:
    """Kinds of activation checkpointing, of --checkpointing."""
    from dshard.planning.recomputing import ANY, kinds_of

    given = args.checkpointing
    if args.checkpoint and given is not None:
        raise UsageError(
            "--checkpoint has all blocks of the model compute again, and --checkpointing leaves that to the plan, but "
            "both are given. Pass one of them."
        )
    if given is not None and ANY in given and len(given) > 1:
        raise UsageError(f"--checkpointing must be {ANY} alone, or other kinds, but it is {' '.join(given)}.")
    return kinds_of("none" if given is None else ANY if ANY in given else given)


def _device(name: str, rates: Rates | None) -> Device:
    """The device of --device: of a datasheet, or the one that the profile has measured.

    Raises:
        ArgumentError: there is none of this name.
        UsageError: the profile has measured none.
    """
    from dshard.planner.devices import find_device
    from dshard.planner.rates import HERE

    if name != HERE:
        return find_device(name, "--device")
    if rates is None or rates.here is None:
        lacks = "there is no --profile" if rates is None else "this --profile has none"
        raise UsageError(
            f"--device {HERE} is what a profile has measured, but {lacks}. Pass --profile with what "
            "benchmarks/calibration/measuring.py wrote."
        )
    return rates.here.device


def _rates_for(args: argparse.Namespace) -> Rates | None:
    """The profile, which a compiled model needs."""
    if args.compile and args.profile is None:
        raise UsageError(
            "--compile needs --profile, which says how many bytes fused kernels save, but it is not given. Pass "
            "--profile published."
        )
    return rates_of(args.profile)


def rates_of(path: Path | None) -> Rates | None:
    """The profile in a file, or the one that is shipped.

    Raises:
        UsageError: there is none.
    """
    from dshard.errors import PlanError
    from dshard.planner.rates import find_rates

    try:
        return None if path is None else find_rates(path)
    except PlanError as error:
        raise UsageError(f"--profile must be what dshard calibrate wrote, but reading it says: {error}") from error


def _number(text: str) -> int | str:
    """A plain number, also a negative one, which is refused with its value."""
    try:
        return int(text)
    except ValueError:
        return text


def _batch(text: str | None) -> int | str | None:
    if text is None or text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--batch must be a number of at least 1, or auto, but it is {text!r}. Pass --batch auto.")
    return int(text)


def check_strategies(names: Sequence[str] | None) -> None:
    """Checks the names of --strategy.

    Raises:
        UsageError: one of them is none.
    """
    from dshard.errors import ArgumentError, DShardError
    from dshard.policies import Strategy

    for name in names or ():
        try:
            Strategy.of(name)
        except ArgumentError as error:
            raise UsageError(str(error).replace("Strategy.of: value", "--strategy")) from error
        except DShardError as error:
            raise UsageError.of(error) from error


def check_picture(option: str, path: Path | None) -> None:
    """Checks that a picture can be drawn at the end, before anything starts.

    Raises:
        UsageError: the suffix is unknown, its folder is not there, or matplotlib is missing.
    """
    if path is None:
        return
    if path.suffix.lower() not in _SUFFIXES:
        raise UsageError(f"{option} must end in one of {', '.join(_SUFFIXES)}, but it is {path}.")
    check_folder(option, path)
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"{option} needs matplotlib, but it is not installed. Run: pip install 'dshard[cli]'.")


def check_folder(option: str, path: Path) -> None:
    """Checks that a file can be there.

    Raises:
        UsageError: its folder is not there, or it is a folder itself.
    """
    if not path.parent.is_dir():
        raise UsageError(f"{option} must be in a folder that exists, but {path.parent} does not. Make it first.")
    if path.is_dir():
        raise UsageError(f"{option} must be a file, but {path} is a folder. Pass another.")


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Writes a file in the block, and says so.

    Raises:
        RunError: it cannot be written.
    """
    from dshard.errors import PlanError

    try:
        yield
    except (OSError, PlanError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        said = getattr(cause, "strerror", None) or str(error)
        raise RunError(
            f"{option} must be a file that can be written, but writing {path} says: {said}. Pass another path, or make "
            "room."
        ) from error
    print(f"wrote {path}")
