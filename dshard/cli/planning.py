"""``dshard plan`` and ``dshard simulate``: strategies and predicted steps on devices that need not be here."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dshard import arguments
from dshard.cli.models import build_model
from dshard.cli.usage import PICTURES, UsageError, add_command, check_output, count, named
from dshard.planner import Cluster, Device, Plan, Rates, Training, WholeSteps, cluster_of
from dshard.planner.devices import find_device
from dshard.planner.rates import IN_TEN, find_rates
from dshard.planner.texts import aligned, bytes_text, parse_bytes
from dshard.planning.plan import Profile
from dshard.planning.recomputing import ANY
from dshard.policies import Strategy
from dshard.testing import fake_world

_PLANNED = "plan"  # in the place of a strategy
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_MUON = "muon"
# Per element: kept, and during a step; Muon's is of what it leaves to AdamW.
_STATE_BYTES = {"adamw": (8, 4), "adamw8bit": (2.05, 0), _MUON: (8, 4), "momentum": (4, 0), "sgd": (0, 0)}


def add_parsers(commands: Any) -> None:
    """Add both commands to the parser of ``dshard``."""
    plan = add_command(commands, run_plan)
    plan.add_argument("--world", type=count, required=True, metavar="RANKS", help="number of ranks")
    plan.add_argument("--strategy", nargs="+", help="that a unit may have, such as full 'hybrid(8)' (all)")
    plan.add_argument("--out", type=Path, metavar="FILE", help="write the plan as JSON, for fully_shard(plan=)")
    _add_options(plan)
    simulate = add_command(commands, run_simulate)
    simulate.add_argument("--world", type=count, nargs="+", required=True, metavar="RANKS", help="numbers of ranks")
    simulate.add_argument(
        "--strategy", nargs="+", default=["full"], help="of all units; plan for the best mix (%(default)s)"
    )
    _add_options(simulate)


def _add_options(parser: argparse.ArgumentParser) -> None:
    """Add what both commands have."""
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the (first) simulated step (.png, .svg, .pdf)")
    model = parser.add_argument_group("model and training")
    model.add_argument("--batch", type=_batch, help="samples per rank, or auto (1; of module:function, its sample's)")
    model.add_argument("--sequence", type=count, metavar="TOKENS", help="per sample (the model's usual length)")
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
        default=["none"],
        help="what each unit may compute again in backward, to be applied with the plan; auto for any (none)",
    )
    for name, default, text in (
        ("--dtype", "bfloat16", "of computations: param_dtype of mp_policy (%(default)s)"),
        ("--reduce-dtype", None, "of gradients that are reduced: reduce_dtype of mp_policy (that of --dtype)"),
        ("--master", "float32", "of stored parameters (%(default)s)"),
    ):
        model.add_argument(
            name, choices=tuple(_DTYPES.values()), type=lambda name: _DTYPES.get(name, name), default=default, help=text
        )
    model.add_argument(
        "--optimizer",
        choices=tuple(_STATE_BYTES),
        default="adamw",
        help="(%(default)s; muon: of matrices but embeddings and what has the shape of the largest, adamw of the rest)",
    )
    model.add_argument(
        "--margin", type=float, metavar="PERCENT", help="by which a simpler plan may be slower; 0 for the fastest (3)"
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
    devices.add_argument("--ranks-per-host", type=count, metavar="RANKS", help="(what is usual for the device)")
    devices.add_argument(
        "--tensor-parallel", type=count, default=1, metavar="RANKS", help="of a host, over which layers are cut (1)"
    )
    devices.add_argument("--between-hosts", type=float, metavar="GBIT", help="network of a host, in Gbit/s (usual)")


def _batch(text: str) -> int | str:
    """A number of samples, or "auto", as a type of argparse."""
    return text if text == "auto" else count(text)


@dataclass(frozen=True, slots=True)
class Target:
    """A model and the devices that it is planned for; the number of ranks is still open.

    Attributes:
        heading: The model, its size and the device.
        profile: The model's costs on the device.
        device: The device.
        rates: Of --profile.
        limit_bytes: Memory of each rank.
        args: The command line.
    """

    heading: str
    profile: Profile
    device: Device
    rates: Rates | None
    limit_bytes: int
    args: argparse.Namespace

    def cluster(self, num_ranks: int) -> Cluster:
        """So many ranks on the usual hosts, or on those that were asked for."""
        args = self.args
        usual = args.ranks_per_host or self.device.per_host
        if num_ranks > usual and num_ranks % usual:
            raise UsageError(
                f"--world must be a multiple of the {usual} ranks of a host, but it is {num_ranks}. Pass "
                f"--world {-(-num_ranks // usual) * usual}."
            )
        return cluster_of(
            self.device,
            num_ranks,
            ranks_per_host=min(num_ranks, usual),
            between_hosts=None if args.between_hosts is None else args.between_hosts * 1e9 / 8,
            profile=self.rates,
            tensor_parallel=args.tensor_parallel,
        )

    def given(self, num_ranks: int, strategy: str) -> Plan:
        """A plan that gives all units one strategy, whether it fits or not."""
        batch = self.args.batch
        return self.profile.given(self.cluster(num_ranks), strategy, batch if isinstance(batch, int) else None)

    def planned(self, num_ranks: int, strategies: list[str] | None) -> Plan:
        """The best plan on so many ranks."""
        args = self.args
        return self.profile.plan(
            self.cluster(num_ranks),
            memory=self.limit_bytes,
            memory_of=args.memory_of,
            strategies=strategies,
            batch=args.batch,
            margin=None if args.margin is None else args.margin / 100,
        )


@contextmanager
def _target(args: argparse.Namespace) -> Iterator[Target]:
    """Check the options, build the model without memory, and trace a step; the model's layers are cut in the block."""
    if args.compile and args.profile is None:
        raise UsageError(
            "--compile needs --profile, which says how many bytes fused kernels save, but it is not given. Pass "
            "--profile published."
        )
    if args.checkpoint and args.checkpointing != ["none"]:
        raise UsageError(
            "--checkpoint has all blocks of the model compute again, and --checkpointing leaves that to the plan, but "
            "both are given. Pass one of them."
        )
    if args.optimizer == _MUON and args.tensor_parallel > 1:
        raise UsageError(
            "--optimizer muon needs whole matrices, for plans do not know what owners of cut ones do, but "
            f"--tensor-parallel is {args.tensor_parallel}. Leave one of them out."
        )
    if ANY in args.checkpointing and len(args.checkpointing) > 1:
        raise UsageError(f"--checkpointing must be {ANY} alone, or other kinds, but it is {args.checkpointing}.")
    if args.between_hosts is not None:
        arguments.above_0("plan", "--between-hosts", args.between_hosts)
    if args.margin is not None:
        arguments.from_0("plan", "--margin", args.margin, "a finite number of percents, 0 or more")
    with named("--profile"):
        rates = find_rates("plan", args.profile)
    device: Device = find_device("plan", "--device", args.device)
    dtype = getattr(torch, args.dtype)
    with named("--dtype"):
        device.check(dtype)
    limit = device.limit_bytes if args.memory is None else parse_bytes("plan", "--memory", args.memory)
    batch = args.batch if isinstance(args.batch, int) else None
    sampled = build_model(args.model, batch=batch, sequence=args.sequence, is_checkpointed=args.checkpoint)
    model = sampled.model.to(getattr(torch, args.master))
    training = Training(
        dtype,
        dtype if args.reduce_dtype is None else getattr(torch, args.reduce_dtype),
        *_STATE_BYTES[args.optimizer],
        tokens_per_sample=sampled.num_tokens,
        is_compiled=args.compile,
        whole=WholeSteps(_hidden_matrices(model)) if args.optimizer == _MUON else None,
    )
    heading = f"{args.model}: {sum(p.numel() for p in model.parameters()):,} parameters, {device.name}"
    with cut_layers(model, args.tensor_parallel):
        profile = Profile(
            model,
            sampled.sample,
            device=device,
            training=training,
            rates=rates,
            checkpointing=ANY if ANY in args.checkpointing else args.checkpointing,
            offload=args.offload,
        )
        yield Target(heading, profile, device, rates, limit, args)


def _hidden_matrices(model: nn.Module) -> list[str]:
    """Names of the matrices that Muon is for: no embeddings, and no head, which is told by the largest one's shape."""
    embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    of_head = max(embeddings, key=Tensor.numel).shape if embeddings else None
    others = set(map(id, embeddings))
    named = model.named_parameters()
    return [name for name, p in named if p.ndim == 2 and id(p) not in others and p.shape != of_head]


def _check_strategies(names: list[str] | None, worlds: list[int]) -> None:
    with named("--strategy"):
        for name in names or ():
            for world in worlds:
                Strategy.of(name).on(world)


def run_plan(args: argparse.Namespace) -> int:
    """Choose a strategy for each unit of a model.

    A step is to be shortest and to fit into memory; prints the plan, and the proof that none is faster.
      dshard plan gpt2-xl --world 8 --device a100-40g --memory 38GiB --batch auto
      dshard plan path/to/config.json --world 64 --device h100-80g --out plan.json
    MODEL is a preset (an unknown name lists them), a config.json of Hugging Face, or module:function, which returns a
    model and a sample input. No weights, no devices and no network are needed.
    """
    _check_strategies(args.strategy, [args.world])
    check_output("--plot", args.plot, PICTURES)
    check_output("--out", args.out)
    with _target(args) as target:
        planned = target.planned(args.world, args.strategy)
    print(f"{target.heading}\n{planned.explain()}")
    if args.out is not None:
        planned.save(args.out)
        print(f"wrote {args.out}")
    if args.plot is not None:
        planned.plot(args.plot)
        print(f"wrote {args.plot}")
    return 0


def run_simulate(args: argparse.Namespace) -> int:
    """Predict a step on devices that are not here.

    Prints step time, TFLOP/s and peak memory per rank, and the communication that nothing hides.
      dshard simulate gpt3-175b --checkpoint --world 128 512 4096 --device a100-80g
      dshard simulate gpt2 --world 8 64 --device h100-80g --strategy ddp full plan --plot timeline.png
    MODEL is as for dshard plan. No weights, no devices and no network are needed.
    """
    for option, value in (("--batch", args.batch), ("--offload", args.offload)):
        if value == "auto" and args.strategy != [_PLANNED]:
            raise UsageError(f"{option} auto needs a plan, but --strategy names others. Pass --strategy plan.")
    _check_strategies([name for name in args.strategy if name != _PLANNED], args.world)
    check_output("--plot", args.plot, PICTURES)
    found: dict[tuple[int, str], Plan] = {}
    with _target(args) as target:
        for world in args.world:
            for name in args.strategy:
                is_planned = name == _PLANNED
                found[world, name] = target.planned(world, None) if is_planned else target.given(world, name)
    print(f"{target.heading}\n{_table(found, target.limit_bytes, args.memory_of)}")
    if args.plot is not None:
        next(iter(found.values())).plot(args.plot)
        print(f"wrote {args.plot}")
    return 0


def _table(found: dict[tuple[int, str], Plan], limit_bytes: int, memory_of: str) -> str:
    """One row per simulated step; it fits where the bytes that `memory_of` names are within the limit."""
    known = any(plan.step_interval_s for plan in found.values())
    head = ("exposed", "TFLOP/s per rank", "samples/s", "peak", "fits")
    rows = [("ranks", "strategy", "batch", "step", *[f"{IN_TEN} in 10"] * known, *head)]
    for (world, name), plan in found.items():
        rows.append(
            (
                str(world),
                name,
                str(plan.model.batch_size),
                f"{plan.step_s:.4g} s",
                *[f"{each.low:.3g} to {each.high:.3g} s" for each in (plan.step_interval_s,) if each],
                f"{plan.exposed_s / plan.step_s:.1%}",
                f"{plan.tflops:.4g}",
                f"{plan.samples_per_s:.4g}",
                bytes_text(plan.peak_bytes),
                "yes" if getattr(plan.memory_seen, f"{memory_of}_bytes") <= limit_bytes else "no",
            )
        )
    return "\n".join(aligned(rows, to_left=()))


_WAYS: Mapping[str, Callable[[], Any]] = {  # of Hugging Face's `tp_plan`, which names modules by patterns
    "colwise": ColwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel,
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
}


@contextmanager
def cut_layers(model: nn.Module, num_ranks: int) -> Iterator[None]:
    """Cut the layers that a model's ``tp_plan`` names over some ranks, of which this process plays the first.

    Raises:
        UsageError: The model has no such plan, or one with ways of cutting that are not known here.
    """
    if num_ranks == 1:
        yield
        return
    asked: Any = getattr(model, "tp_plan", None)
    if not isinstance(asked, Mapping) or not asked:
        raise UsageError(
            "--tensor-parallel needs a model that says how its layers are cut (a tp_plan, as Hugging Face's have it, "
            f"and the Llama presets), but {type(model).__name__} has none. Leave it out, or pass module:function with "
            "a model that has one."
        )
    modules = [name for name, _ in model.named_modules()]
    ways = {pattern: way for pattern, way in asked.items() if any(_is_named(name, pattern) for name in modules)}
    unknown = sorted(set(ways.values()) - _WAYS.keys())
    if unknown or not ways:
        what = f"it has {', '.join(unknown)}" if unknown else "it names no module of the model"
        raise UsageError(f"--tensor-parallel needs a tp_plan of {', '.join(_WAYS)}, but {what}. Leave it out.")
    with fake_world(0, num_ranks):
        mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, {pattern: _WAYS[way]() for pattern, way in ways.items()})
        yield


def _is_named(name: str, pattern: str) -> bool:
    """Whether `parallelize_module` finds a module by a pattern: part by part, so that a ``*`` spans no dot."""
    parts, asked = name.split("."), pattern.split(".")
    return bool(name) == bool(pattern) and len(parts) == len(asked) and all(map(fnmatchcase, parts, asked))
