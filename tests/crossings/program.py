"""The steps of a row's program on one rank."""

import copy
import io
import pickle
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import dshard
from tests.crossings import sharded
from tests.crossings.model import (
    NUM_STEPS,
    OnDemandError,
    batch,
    build,
    loss_of,
    num_micro,
    optimizers_of,
    plain_name,
    runs_tower,
)
from tests.crossings.oracle import MAX_NORM, MAX_VALUE, PENALTY, Result, compiled, context_of, dtypes_of, num_data_ranks


class Program:
    """A sharded model with its optimizers, on one rank."""

    def __init__(self, row: Mapping[str, str]) -> None:
        self.row = row
        net = sharded.on_device(row, build(row))
        sharded.parallelize(row, net)
        early = optimizers_of(row, net) if row["optimizer"] == "made before" else None
        self.model: Any = sharded.shard(row, net)
        self.optimizers = early or optimizers_of(row, self.model)
        self.losses: list[list[list[float]]] = []
        self.norms: list[float] = []
        if row["use"] == "gathered":
            with dshard.gathered(self.model, writeback=True) as full:
                key = next(name for name in full if plain_name(name) == "norm.weight")
                full[key].mul_(0.5)
        self.start = values(self.model)

    def trained(self) -> dict[str, nn.Parameter]:
        return {plain_name(n): p for n, p in self.model.named_parameters() if p.requires_grad}

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def backwards(self, step: int) -> list[list[float]]:
        """Forward and backward of each micro-batch; this rank's losses."""
        losses = []
        for micro in range(num_micro(self.row)):
            is_last = micro == num_micro(self.row) - 1
            sharded.inner(self.model).runs_tower = runs_tower(step, micro, sharded.data_rank(self.row))
            if self.row["setting"] == "unshard":
                self.model.unshard()
            with sharded.micro_batch(self.row, self.model, is_last=is_last):
                with context_of(self.row):
                    tokens = batch(step, micro, sharded.data_rank(self.row)).to(sharded.device_of(self.row))
                    loss = loss_of(self.model, tokens)
                losses.append([loss.item()])
                loss = loss / num_micro(self.row)
                if self.row["use"] == "penalty" and is_last:
                    loss = loss + PENALTY * sum(plain(p.square().sum()) for p in self.trained().values())
                loss.backward()
            if self.row["use"] == "gradients":
                assert all(torch.isfinite(full(p.grad)).all() for p in self.trained().values() if p.grad is not None)
        return losses

    def raise_within(self) -> None:
        """A step that an exception ends; its gradients are dropped."""
        net = sharded.inner(self.model)
        net.fails = self.row["exception"]
        try:
            self.backwards(1)
        except OnDemandError:
            pass
        else:
            raise AssertionError("nothing was raised")
        net.fails = ""
        self.zero_grad()

    def copy(self) -> None:
        """Go on with a copy of the model and its optimizers."""
        kind = self.row["copy"]
        states = [copy.deepcopy(o.state_dict()) for o in self.optimizers]
        if kind == "deepcopy":
            self.model = copy.deepcopy(self.model)
        elif kind == "pickle":
            self.model = pickle.loads(pickle.dumps(self.model))
        elif kind == "torch.save":
            file = io.BytesIO()
            torch.save(self.model, file)
            file.seek(0)
            self.model = torch.load(file, weights_only=False)
        else:
            self.reload(kind)
        if kind not in ("checkpoint", "state_dict"):
            sharded.compile_blocks(self.row, self.model)
        if kind != "checkpoint":
            self.optimizers = optimizers_of(self.row, self.model)
            for optimizer, state in zip(self.optimizers, states, strict=True):
                optimizer.load_state_dict(state)

    def reload(self, kind: str) -> None:
        """Another model takes the weights, and from a checkpoint the optimizers' states, too."""
        old, old_optimizers = self.model, self.optimizers
        self.model = sharded.remake(self.row)
        if kind == "state_dict":
            self.model.load_state_dict(old.state_dict())
            return
        self.optimizers = optimizers_of(self.row, self.model)
        paths = [tempfile.mkdtemp() if dist.get_rank() == 0 else "" for _ in old_optimizers]
        dist.broadcast_object_list(paths)
        for path, before, after in zip(paths, old_optimizers, self.optimizers, strict=True):
            dshard.checkpoint.save(f"{path}/saved", old, before)
            dshard.checkpoint.load(f"{path}/saved", self.model, after)
        for path in paths if dist.get_rank() == 0 else ():
            shutil.rmtree(path)

    def reduce_ignored(self) -> None:
        """What `fully_shard` ignores the program reduces."""
        grad = self.trained()["gain"].grad if self.row["ignored"] == "gain" and "gain" in self.trained() else None
        if grad is not None:
            dist.all_reduce(grad)
            num_copies = dist.get_world_size() // num_data_ranks(self.row)
            grad.div_(num_copies * (num_data_ranks(self.row) if self.row["grad_reduce"] == "mean" else 1))

    def clip(self) -> float:
        kind, params = self.row["clip"], list(self.trained().values())
        if kind == "value":
            nn.utils.clip_grad_value_(params, MAX_VALUE)
        return (
            float(full(compiled(self.row, sharded.clip_of[kind])(params, MAX_NORM))) if kind in sharded.clip_of else 0.0
        )

    def step(self, step: int) -> None:
        self.zero_grad()
        if step == 1 and self.row["exception"] != "none":
            self.raise_within()
        with dshard.join(self.model, enable=self.row["use"] == "joined"):
            self.losses.append(self.backwards(step))
            self.reduce_ignored()
            self.norms.append(self.clip())
            for optimizer in self.optimizers:
                compiled(self.row, optimizer.step)()
        if step == 0 and self.row["copy"] != "none":
            self.copy()
        if step == 1 and self.row["switch"] != "none":
            switched = sharded.SWITCHES[self.row["switch"]]
            dshard.set_strategy(self.model, switched, optimizer=self.optimizers)

    def check_dtypes(self) -> None:
        """In forward a weight has its compute dtype, elsewhere its own."""
        head = sharded.inner(self.model).head.weight
        own = {"autocast": torch.float32, "bf16 model": torch.bfloat16}.get(self.row["precision"], torch.float64)
        compute = dtypes_of(self.row)[0] or own
        seen = sharded.inner(self.model).seen
        assert head.dtype == own, f"the head is kept in {head.dtype} rather than in {own}"
        assert seen == [compute], f"in forward the head's dtype is {seen} rather than {compute}"


def plain(tensor: Any) -> Tensor:
    """What an operation on a parameter under tensor parallelism gives is a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    return plain(tensor).detach()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {plain_name(n): full(p).cpu().clone() for n, p in model.named_parameters()}


def run(row: Mapping[str, str]) -> Result:
    """Train as a row says."""
    with warnings.catch_warnings():
        if row["compile"] != "no":
            warnings.simplefilter("ignore")  # of dynamo's own
            torch._dynamo.reset()
        program = Program(row)
        for step in range(NUM_STEPS):
            program.step(step)
        program.check_dtypes()
    grads = {n: full(p.grad).cpu().clone() for n, p in program.trained().items() if p.grad is not None}
    return Result(program.losses, program.norms, program.start, values(program.model), grads)
